"""Experts of mixtures: which of them a model can spare, by what the router gives them and how large their results are (REAP).

The saliency of an expert is the mean, over the tokens that are routed to it, of its gate times the norm of its result: the error
that the sum makes without it.

Reference: Lasby et al. 2025, arXiv:2510.13999 (REAP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.core.simulation.float_model import Array
from bitwright.errors import CalibrationError, ConfigError, ModelError, checks_arguments, close_matches, first_few
from bitwright.methods.details import Detailed
from bitwright.methods.front_end import Mixtures, front_end_of
from bitwright.tables import Table


@dataclass(frozen=True)
class ExpertsRow:
    """What became of a mixture.

    Attributes:
        name: of its experts: the path of a module, or the name of the ``TopK`` that chooses them in an ONNX model.
        before: number of experts.
        kept: their numbers.
        scores: saliencies of all experts; 0 for one that no token reached.
        tokens: that were routed to each.
    """

    name: str
    before: int
    kept: tuple[int, ...]
    scores: tuple[float, ...] = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class ExpertsReport(Detailed):
    """Result of :func:`drop_experts`; prints as a table.

    Attributes:
        rows: a mixture each.
        before, after: ``params``.
        plan: what :func:`bitwright.torch.rebuild` takes, for modules.
        not_in_config: as :attr:`bitwright.compression.compress.Compressed.not_in_config`.
    """

    _rows = "rows"

    rows: tuple[ExpertsRow, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    plan: Mapping[str, Any] = field(default_factory=dict, repr=False)
    not_in_config: str = ""

    @property
    def summary(self) -> str:
        """One line."""
        kept, all_of = sum(len(row.kept) for row in self.rows), sum(row.before for row in self.rows)
        return f"{kept} of {all_of} experts left: {self.after['params'] / self.before['params']:.1%} of the params"

    def table(self) -> Table:
        """The mixtures."""
        rows = [[r.name, str(r.before), str(len(r.kept)), f"{_lost(r):.1%}"] for r in self.rows]
        return Table(["experts", "before", "after", "saliency lost"], rows, self.summary, right=(1, 2, 3))

    def __str__(self) -> str:
        return str(self.table())


def _lost(row: ExpertsRow) -> float:
    """Share of the saliency, over all tokens, of the experts that went."""
    weighted = np.multiply(row.scores, row.tokens)
    return 1 - float(weighted[list(row.kept)].sum()) / max(float(weighted.sum()), 1e-300)


#: name -> score of every expert from saliency, tokens, and a seed
CRITERIA: dict[str, Callable[[Array, Array, int], Array]] = {
    "reap": lambda saliency, tokens, seed: saliency,
    "frequency": lambda saliency, tokens, seed: tokens.astype(float),
    "random": lambda saliency, tokens, seed: np.random.default_rng(seed).random(len(tokens)),
}


@checks_arguments
def drop_experts(
    model: Any,
    data: Iterable[Any],
    *,
    keep: float,
    importance: str = "reap",
    exclude: Iterable[str] = (),
    seed: int = 0,
    providers: Any = None,
    progress: bool = True,
) -> ExpertsReport:
    """Take experts out of the mixtures of a model, in place: the least salient of each, as many everywhere.

    Of a module, mixtures are experts in a ``ModuleList`` or stacked as in transformers, beside a router. Of an ONNX model they
    are what a ``TopK`` chooses behind a product with one row per expert: stacks of matrices that are read by the chosen numbers,
    or branches that each begin with a comparison of these numbers with one of them.

    Args:
        model: a module, or a loaded ONNX model; changed in place.
        data: batches of real inputs.
        keep: part of the experts that stays, of each mixture, rounded up.
        importance: ``reap``, ``frequency`` (tokens that are routed to an expert), or ``random``.
        exclude: names of mixtures that stay.
        seed: of ``random``.
        providers: where ONNX Runtime computes.
        progress: show a progress bar.

    Returns:
        The report; the configuration of a model of transformers has the new number.

    Raises:
        CalibrationError: no data.
        ConfigError: the model has no mixture, a part that is none, an unknown criterion.
        ModelError: without the experts the model does not compute what it does when they are never chosen; it is as it was.

    Reference: Lasby et al. 2025, arXiv:2510.13999. Gates are measured, as derivatives of the sum, or with the results that they
    are multiplied by, and not read from a router.
    """
    batches = list(data)
    if not batches:
        raise CalibrationError("drop_experts", "the data held no batch", "give some batches of real data")
    if not 0 < keep < 1:
        raise ConfigError("keep", f"{keep!r} is not a part of the experts", "write a number between 0 and 1")
    if importance not in CRITERIA:
        known = f"use {', '.join(CRITERIA)}"
        raise ConfigError(
            "importance", f"there is no criterion {importance!r}{close_matches(importance, CRITERIA)}", known
        )
    mixtures: Mixtures = front_end_of(model).mixtures(model, batches, providers)
    counts = {name: count for name, count in mixtures.counts().items() if name not in set(exclude)}
    if not counts:
        raise ConfigError("drop_experts", mixtures.looked_for, "use compress() for other models")
    names, rows = list(counts), []
    for i, (saliency, tokens) in enumerate(mixtures.saliencies(names, importance == "reap", progress)):
        scores = CRITERIA[importance](saliency, tokens, seed + i)
        left = int(np.ceil(keep * counts[names[i]] - 1e-9))
        kept = sorted(np.argsort(-scores, kind="stable")[:left].tolist())
        rows.append(
            ExpertsRow(names[i], counts[names[i]], tuple(kept), tuple(saliency.tolist()), tuple(tokens.tolist()))
        )
    before = {"params": mixtures.size()}
    _remove(mixtures, rows)
    after = {"params": mixtures.size()}
    plan, reason = mixtures.finish({row.name: row.kept for row in rows})
    return ExpertsReport(tuple(rows), before, after, plan, reason)


def _remove(mixtures: Mixtures, rows: Sequence[ExpertsRow]) -> None:
    """Take the experts out, and compare with the model that never chooses them."""
    wanted = mixtures.without({row.name: [i for i in range(row.before) if i not in set(row.kept)] for row in rows})
    problem, undo = "", None
    try:
        made, undo = mixtures.remove({row.name: row.kept for row in rows})
        if not all(_near(a, b) for a, b in zip(made, wanted, strict=True)):
            problem = "its outputs are not those of the model that never chooses these experts"
    except Exception as error:  # of the model's code
        problem = f"it fails: {error}".splitlines()[0]
    if problem:
        if undo is not None:
            undo()
        names = first_few([row.name for row in rows])
        raise ModelError(
            "drop_experts", f"with fewer experts in {names}: {problem}", "keep more of them, or exclude these experts"
        )


def _near(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        # logits of routers have fewer columns
        return one.ndim == other.ndim and one.shape[:-1] == other.shape[:-1] and one.shape[-1] < other.shape[-1]
    return bool(np.allclose(one, other, rtol=0, atol=1e-4 * max(float(np.abs(other).max(initial=0)), 1e-6)))
