"""What a step of compression did, part by part, for HTML reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.tables import Table, Tabular


class Detailed(Tabular, ABC):
    """Base class of reports of compression: they have ``summary`` and ``table()``, and those of these attributes that apply.

    Attributes:
        before, after: costs of the whole model.
        refused: what was not touched, and why.
        choice: what was measured to choose, a :class:`bitwright.compression.ratios.Chosen`.
    """

    @property
    @abstractmethod
    def summary(self) -> str:
        """One line."""

    @abstractmethod
    def table(self) -> Table:
        """What became of every part."""

    def details(self) -> dict[str, Any]:
        """Plain data for a report: ``summary``, ``costs``, ``table``, ``tried`` (the front) and ``refused``."""
        shown, refused = self.table(), getattr(self, "refused", ())
        pairs = refused.items() if isinstance(refused, Mapping) else ((r.name, r.reason) for r in refused)
        before, after = getattr(self, "before", {}), getattr(self, "after", {})
        return {
            "summary": self.summary,
            "costs": [[name, before[name], after[name]] for name in after if before.get(name)],
            "table": {"head": list(shown.head), "rows": [list(row) for row in shown.rows]},
            "tried": _front(getattr(self, "choice", None), before),
            "refused": [[name, reason] for name, reason in pairs],
        }


def _front(choice: Any, before: Mapping[str, float]) -> list[dict[str, Any]]:
    """The choices that were measured: part of each cost that is left, dB of the outputs, and the metric."""
    if choice is None:
        return []
    return [
        {
            "left": {name: cost / before[name] for name, cost in tried.costs.items() if before.get(name)},
            "sqnr_db": -10 * float(np.log10(tried.noise)) if tried.noise > 0 and np.isfinite(tried.noise) else None,
            "metric": tried.score,
            "chosen": tried.choice == choice.best.choice,
        }
        for tried in choice.tried
    ]
