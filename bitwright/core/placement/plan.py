"""A plan: the tensors of a graph that have quantizers, the reasons of the others, and the coverage report.

Sites of one group share one encoding. A group is named after one of its sites.
:func:`bitwright.core.placement.place.place` makes plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bitwright.core.graph.graph import UNKNOWN_TYPE, Graph, Value
from bitwright.core.graph.patterns import Match
from bitwright.core.numerics.spec import QuantSpec
from bitwright.tables import Tabular, html_table, text_table

Role = Literal["input", "output", "weight", "bias", "constant"]
RangeFrom = Literal["", "operator", "target", "rule"]
Status = Literal["quantized", "shared", "float", "integer"]


@dataclass(frozen=True)
class SitePlan:
    """One planned quantizer.

    Attributes:
        name: unique; see :func:`bitwright.core.placement.place.place`.
        spec: what is asked for, with concrete axes.
        role: ``input`` and ``output`` are activations; ``weight``, ``bias`` and ``constant`` do not change
            between runs.
        op: name of the operator at which the tensor is quantized.
        port: input port of the operator, or index of its output for role ``output``.
        value: graph value that is quantized.
        group: name of the site whose encoding this one has; its own name if it shares none.
        follows: for an int32 bias, the sites of the input and the weight whose scales it multiplies.
        inner: for a site inside the steps of a recurrent layer, what it quantizes there
            (:mod:`bitwright.core.graph.recurrence`); ``port`` is then no output unless the value is one.
        range_from: what fixes the range, where it is fixed and data can be asked whether it serves: the definition of
            the ``operator``, a kernel of the ``target``, or a ``rule``; empty otherwise.
    """

    name: str
    spec: QuantSpec
    role: Role
    op: str
    port: int
    value: str
    group: str
    follows: tuple[str, str] | None = None
    inner: str | None = None
    range_from: RangeFrom = ""

    @property
    def is_stored(self) -> bool:
        """Whether its values are stored in the model: a weight or another constant, but no bias."""
        return self.role in ("weight", "constant")


@dataclass(frozen=True)
class Row:
    """One value or parameter of the model, for a coverage report.

    Attributes:
        name: of the value.
        kind: ``input``, ``param``, ``constant`` or ``activation``.
        op_type: type of the operator that makes it, or else of the first that reads it.
        shape: as recorded.
        status: ``quantized``, ``shared`` (on the grid of another site), ``float``, or ``integer`` (of an
            integer or boolean type, so that there is nothing to quantize).
        how: the spec and its sites, the site it shares, or the reason.
    """

    name: str
    kind: str
    op_type: str
    shape: tuple[int, ...]
    status: Status
    how: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.name} ({self.op_type or self.kind}, {shape}): {self.status}, {self.how}"


@dataclass(frozen=True)
class Plan:
    """The decision for every float value and parameter of a graph.

    Attributes:
        sites: by name, in execution order (operands of an operator before its outputs).
        floats: value -> why it has no quantizer.
        shared: value that only carries the elements of another -> the group whose grid they lie on.
        matches: the supergroups found.
        notes: chains that were not fused because of their surroundings, and settings without effect.
        unused: rules that changed nothing, each with what is wrong with it.
    """

    sites: dict[str, SitePlan]
    floats: dict[str, str]
    shared: dict[str, str]
    matches: tuple[Match, ...] = ()
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Group -> the sites that share its encoding."""
        found: dict[str, list[str]] = {}
        for site in self.sites.values():
            found.setdefault(site.group, []).append(site.name)
        return {group: tuple(names) for group, names in found.items()}

    def left_out(self, graph: Graph, activation: QuantSpec, weight: QuantSpec, *, inputs: bool) -> dict[str, SitePlan]:
        """A site for every float activation and parameter that has none, by name; no branch or loop as a whole.

        Args:
            activation, weight: what is asked for, with one scale per tensor.
            inputs: also where an operator reads what has a site elsewhere; else only inputs of the model that have none.
        """
        held = {site.value for site in self.sites.values()}
        taken = {*self.sites, *(f"{s.op}.input[{s.port}]" for s in self.sites.values() if s.role != "output")}
        found: dict[str, SitePlan] = {}
        groups: dict[str, str] = {}  # value without a producer -> its first new site
        for role, op, port, value in _edges(graph):
            first = value.name not in held and (role == "output" or graph.producer(value.name) is None)
            name = value.param or f"{op}.{role}[{port}]"
            if name in taken or not (first or (inputs and not value.is_static)):
                continue
            name = f"{name}@{op}" if name in found else name
            group = groups.setdefault(value.name, name) if first else name
            found[name] = _site_of(value, SitePlan(name, activation, role, op, port, value.name, group), weight)
        return found

    def with_sites(self, added: Mapping[str, SitePlan], graph: Graph) -> Plan:
        """The plan with more sites, in execution order."""
        order = {op.name: index for index, op in enumerate(graph.ops)}
        sites = sorted({**self.sites, **added}.items(), key=lambda item: (order[item[1].op], item[1].role == "output"))
        return replace(self, sites=dict(sites))

    def coverage(self, graph: Graph) -> list[Row]:
        """One row per value and parameter of ``graph``, in the graph's order."""
        by_value: dict[str, list[SitePlan]] = {}
        for site in self.sites.values():
            by_value.setdefault(site.value, []).append(site)
        for name, site in self._read_later(graph):
            by_value.setdefault(name, []).append(site)
        rows = []
        for value in graph.values.values():
            op = graph.producer(value.name)
            readers = graph.consumers(value.name) if op is None else ()
            op_type = op.type if op is not None else readers[0][0].type if readers else ""
            status, how = self._status(value, by_value.get(value.name, []))
            rows.append(Row(value.name, value.kind, op_type, value.shape, status, how))
        return rows

    def _read_later(self, graph: Graph) -> Iterator[tuple[str, SitePlan]]:
        """Yield the inputs that later runs of an operator read at a quantized port; the same quantizer covers them."""
        inputs = {(s.op, s.port): s for s in self.sites.values() if s.role != "output" and s.inner is None}
        told = {(s.value, s.name) for s in inputs.values()}
        for op in graph.ops:
            for port, value in op.also:
                site = inputs.get((op.name, port))
                if site is not None and (value, site.name) not in told and graph.values[value].is_float:
                    told.add((value, site.name))
                    yield value, site

    def _status(self, value: Value, sites: list[SitePlan]) -> tuple[Status, str]:
        if not sites:
            if value.dtype.startswith("complex"):
                return "float", f"{value.dtype}: quantizers take real numbers"
            if value.dtype == UNKNOWN_TYPE:
                return "float", "its type is not known: ONNX Runtime does not run the operator, or it lies in a body"
            if not value.is_float:
                return "integer", f"{value.dtype} is not a floating-point type"
            if value.name in self.shared:
                return "shared", f"with {self.shared[value.name]}"
            return "float", self.floats[value.name]
        specs: dict[str, list[str]] = {}
        for site in sites:
            phrase = f"int32 from the scales of {' and '.join(site.follows)}" if site.follows else site.spec.describe()
            where = site.name if site.name == site.group else f"{site.name} (shared with {site.group})"
            specs.setdefault(phrase, []).append(where)
        return "quantized", "; ".join(f"{spec} at {', '.join(where)}" for spec, where in specs.items())


def _site_of(value: Value, plan: SitePlan, weight: QuantSpec) -> SitePlan:
    """``plan``, or the same for a parameter."""
    return replace(plan, role="weight", spec=weight) if value.is_static else plan


def _edges(graph: Graph) -> Iterator[tuple[Role, str, int, Value]]:
    """Role, operator, port and value of every float tensor with elements, except those of branches and loops as a whole."""
    for op in (op for op in graph.ops if op.type not in ("If", "Loop", "Scan")):
        sides: tuple[tuple[Role, Sequence[str | None]], ...] = (("input", op.inputs), ("output", op.outputs))
        ends = ((role, port, name) for role, names in sides for port, name in enumerate(names) if name is not None)
        for role, port, name in ends:
            value = graph.values[name]
            if value.is_float and 0 not in value.shape and (value.param is not None or not value.is_static):
                yield role, op.name, port, value


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
        """The report of a plan in its present state.

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
        """Numbers of rows that are ``quantized``, ``shared`` and ``float``."""
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
