"""Grids that targets ask for at several places together: operands of products, and what joins and means read and write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.sites import Site, values_on_grids


def fit_products(sim: Any) -> None:
    """Give what products of two activations read the grids that AIMET's targets multiply.

    The second operand is symmetric: before V73 it has 8 bits; from V73 on one of 16 bits asks the first to have 16 bits as well.
    An operand without a quantizer has that of what it is computed from, along first operands.
    """
    version = sim.rules.hw_version
    if version is None:
        return
    at = _on_integers(sim)
    bits = 8 if version < 73 else 16
    makers = {value: op for op in sim.graph.ops for value in op.outputs}
    for op in (op for op in sim.graph.ops if op.type == "MatMul"):
        one, other = (_nearest(name, at, makers) for name in op.inputs[:2])
        if one and other and bits in (8, other.spec.format.bits):
            other.spec = replace(other.spec, format=replace(other.spec.format, bits=bits), symmetry="symmetric")
            one.spec = replace(one.spec, format=replace(one.spec.format, bits=max(bits, one.spec.format.bits)))


def _on_integers(sim: Any) -> dict[str, Any]:
    """Value -> the site of its grid of integers, if it is on."""
    first = {id(s.quantizer): s for s in sim.quantizers.values() if s.enabled and isinstance(s.spec.format, IntFormat)}
    grids = values_on_grids(sim.quantizers, sim.plan.shared)
    return {value: first.get(key) for key, values in grids.items() for value in values}


def _nearest(value: str | None, at: Mapping[str, Any], makers: Mapping[str, Op]) -> Any:
    """The site of a value, or of the first one before it that has one."""
    while value is not None and at.get(value) is None:
        maker = makers.get(value)
        value = None if maker is None else next((v for _, v in maker.sources()), None)
    return None if value is None else at.get(value)


#: operators whose output has the grid of what they read, as AIMET ties them: of one reader alone, or of all
_TIED = {
    **dict.fromkeys(("Concat", "ScatterElements", "ScatterND"), True),
    **dict.fromkeys(("AveragePool", "Resize", "Upsample"), False),
}


def tie_joined(sim: Any) -> None:
    """Give joins, means over windows and resizings one quantizer with what they read, where both are asked for alike."""
    first = {id(s.quantizer): s for s in sim.quantizers.values() if s.role in ("input", "output")}
    grids = values_on_grids(sim.quantizers, sim.plan.shared)
    at = {value: first[key] for key, values in grids.items() for value in values}
    held: dict[int, list[Site]] = {}
    for site in sim.quantizers.values():
        held.setdefault(id(site.quantizer), []).append(site)
    for source, out in _ties(sim.graph, at):
        _tie(source, out, held)


def _ties(graph: Graph, at: Mapping[str, Site]) -> Iterator[tuple[Site, Site]]:
    """Sites of what an operator reads and of its output, where AIMET ties them; ``at`` has the site of a value's grid."""
    for op in (op for op in reversed(graph.ops) if op.type in _TIED and op.outputs[0] in at):
        for value in (v for v in op.inputs[: 1 if op.type != "Concat" else None] if v is not None and v in at):
            if not _TIED[op.type] or all(len(graph.consumers(name)) == 1 for name in {value, at[value].value}):
                yield at[value], at[op.outputs[0]]


def _tie(source: Site, out: Site, held: dict[int, list[Site]]) -> None:
    """Let every site with the quantizer of ``source`` have that of ``out``, if both are on and asked for alike."""
    if source.quantizer is out.quantizer or source.spec != out.spec or not (source.enabled and out.enabled):
        return
    moved = held.pop(id(source.quantizer))
    for site in moved:
        site.quantizer = out.quantizer
    held[id(out.quantizer)] += moved
