"""The coverage report: every value and parameter, quantized how, shared with whom, or not and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bitwright.core.graph.graph import Graph
from bitwright.core.placement.plan import Plan, Row
from bitwright.tables import Tabular, html_table, text_table

_HEAD = ("value", "operator", "shape", "status", "how")


@dataclass(frozen=True)
class Coverage(Tabular, Sequence[Row]):
    """Rows of a coverage report; a sequence, and a table when printed.

    Attributes:
        rows: one per float value and parameter, in the order of the graph.
        unseen: calls that ran without having been recorded, and why they are in float.
        notes: rules that matched nothing, chains that were not fused.
    """

    _rows = "rows"
    _also = ("counts",)

    rows: tuple[Row, ...]
    unseen: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, graph: Graph, changed: Mapping[str, str], unseen: Mapping[str, str]) -> Coverage:
        """The report of a plan as it stands now.

        Args:
            plan, graph: the placement and the graph it was made for.
            changed: site -> what became of it since (a new spec, ``disabled``), for sites that differ from the plan.
            unseen: call -> reason.
        """
        touched: dict[str, list[str]] = {}
        for name, what in changed.items():
            touched.setdefault(plan.sites[name].value, []).append(f"{name}: {what}")
        rows = []
        for row in plan.coverage(graph):
            if row.name in touched:
                disabled = all(": disabled" in text for text in touched[row.name])
                row = replace(row, status="float" if disabled else row.status, how="; ".join(touched[row.name]))
            rows.append(row)
        return cls(tuple(rows), tuple(unseen.items()), (*plan.unused, *plan.notes))

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def find(self, name: str) -> Row:
        """The row of a value or parameter; KeyError if there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def counts(self) -> dict[str, int]:
        """How many rows are ``quantized``, ``shared`` and ``float``."""
        return dict(Counter(row.status for row in self.rows))

    def _cells(self) -> list[tuple[str, str, str, str, str]]:
        return [(r.name, r.op_type, "x".join(map(str, r.shape)), r.status, r.how) for r in self.rows]

    def _lines(self) -> list[str]:
        lines = [f"not recorded: {name}: {reason}" for name, reason in self.unseen]
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, ", ".join(f"{n} {status}" for status, n in self.counts.items())]

    def __str__(self) -> str:
        return "\n".join([text_table(_HEAD, self._cells()), *self._lines()])

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._cells(), notes=self._lines())
