"""Sites that must share a precision: the operands of one kernel, and what these share with the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.algorithms.search.grids import values_on_grids
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.ops import op_row
from bitwright.core.simulation.sites import Site
from bitwright.mixed.candidates import Candidate, bits_of

_WEIGHTS = ("weight", "constant")


@dataclass(frozen=True)
class Group:
    """Quantizers that change together.

    Attributes:
        name: of its first layer.
        layers: operators whose operands they quantize, in execution order.
        weights, activations: the first site of each quantizer.
        candidates: places of the candidates that it may have.
        refused: candidate -> why it may not have it.
    """

    name: str
    layers: tuple[str, ...]
    weights: tuple[str, ...]
    activations: tuple[str, ...]
    candidates: tuple[int, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.weights, *self.activations)


class _Sets:
    """Disjoint sets of quantizers."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, key: int) -> int:
        """The set of ``key``."""
        root = key
        while (up := self._parent.setdefault(root, root)) != root:
            root = up
        while key != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def join(self, keys: Sequence[int]) -> None:
        """Put the sets of ``keys`` together."""
        for key in keys[1:]:
            self._parent[self.find(key)] = self.find(keys[0])


def operands(sim: Any, which: Callable[[Site], bool] | None = None) -> dict[str, dict[int, Site]]:
    """Operator -> the quantizers of what its kernel computes with, each with one of its sites.

    A kernel reads activations and weights on their grids; a recurrent layer has its states and gates beside them. Operators
    that only move data have none of their own.

    Args:
        sim: of either front end.
        which: sites that count; those that a search may change by default.
    """
    graph: Graph = sim.graph
    movable = {name: site for name, site in sim.quantizers.items() if (which or can_change)(site)}
    on_grid: dict[str, Site] = {}
    of = {id(site.quantizer): site for site in movable.values()}
    for key, values in values_on_grids(sim.quantizers, sim.plan.shared).items():
        on_grid.update({value: of[key] for value in values if key in of})
    own: dict[str, list[Site]] = {}
    for site in movable.values():
        if site.role in ("input", *_WEIGHTS) or site.inner is not None:
            own.setdefault(site.op, []).append(site)
    found: dict[str, dict[int, Site]] = {}
    for op in graph.ops:
        if not _has_kernel(op):
            continue
        sites = list(own.get(op.name, []))
        held = {site.value for site in sites}
        sites += [on_grid[v] for _, v in op.sources() if v in on_grid and v not in held]
        if sites:
            found[op.name] = {id(site.quantizer): site for site in sites}
    return found


def _has_kernel(op: Op) -> bool:
    """Whether integer runtimes compute with the grids of all its operands: products, sums, joins."""
    row = op_row(op.type)
    return row.kind == "compute" or (row.integer and row.activations is None)


def can_change(site: Site) -> bool:
    """Whether a search may change the precision of a site: calibrated, not frozen, no int32 bias."""
    quantizer = site.quantizer
    return (
        site.enabled and not quantizer.derived and quantizer.encoding is not None
        and site.role != "bias" and not site.frozen
    )  # fmt: skip


def find_groups(sim: Any, candidates: Sequence[Candidate], allowed: Any = None) -> tuple[Group, ...]:
    """The groups of a calibrated simulation, in execution order.

    Args:
        sim: of either front end.
        candidates: what each may become.
        allowed: ``(operator type, candidate) -> None``, or the reason why its kernel cannot; every candidate by default.
    """
    kernels, sets = operands(sim), _Sets()
    for sites in kernels.values():
        sets.join(list(sites))
    layers: dict[int, list[str]] = {}
    members: dict[int, dict[int, Site]] = {}
    for name, sites in kernels.items():
        key = sets.find(next(iter(sites)))
        layers.setdefault(key, []).append(name)
        members.setdefault(key, {}).update(sites)
    for site in sim.quantizers.values():  # what no kernel reads is a group of its own
        if can_change(site) and sets.find(id(site.quantizer)) not in members:
            members[sets.find(id(site.quantizer))] = {id(site.quantizer): site}
    found = []
    for key, sites in members.items():
        refused = _refused(sim.graph, layers.get(key, []), candidates, allowed)
        first = next(iter(sites.values()))
        found.append(
            Group(
                _name(sim.graph, layers.get(key, [])) or first.name,
                tuple(layers.get(key, [])),
                tuple(s.name for s in sites.values() if s.role in _WEIGHTS),
                tuple(s.name for s in sites.values() if s.role not in _WEIGHTS),
                tuple(i for i, c in enumerate(candidates) if c.name not in refused),
                refused,
            )
        )
    return tuple(found)


def _name(graph: Graph, layers: Sequence[str]) -> str:
    """The first layer with a weight, or the first."""
    computing = [name for name in layers if op_row(graph.op(name).type).kind == "compute"]
    return next(iter([*computing, *layers]), "")


def _refused(
    graph: Graph, layers: Sequence[str], candidates: Sequence[Candidate], allowed: Any
) -> dict[str, str]:
    found: dict[str, str] = {}
    for candidate in candidates if allowed is not None else ():
        for name in layers:
            why = allowed(graph.op(name).type, candidate)
            if why is not None:
                found[candidate.name] = f"{name}: {why}"
                break
    return found


def planned_bits(sim: Any) -> dict[str, int]:
    """Site -> bits that its operator needs at least: of what the placement gave more than the preset, as a cell state."""
    base = bits_of(sim.rules.activation)
    return {
        name: site.spec.format.bits
        for name, site in sim.plan.sites.items()
        if site.spec is not None and site.role not in _WEIGHTS and site.spec.format.bits > base
    }
