"""Joins of unlike ranges: one grid for values of which some are smaller than its step, or little larger.

A concatenation of coordinates in pixels and probabilities, a stack of a large and a small tensor, a selection between them: the
grid of the result spans the larger ones, and has few codes for the smaller ones, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.ops import op_row
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.simulation.sites import Site

logger = logging.getLogger("bitwright")

_FEWEST_CODES = 16  # of an operand on the grid of the join; four of eight bits
_SHOWN = 3


@dataclass(frozen=True)
class UnlikeJoin:
    """A join whose grid is too coarse for one of its operands.

    Attributes:
        op: the operator that joins.
        site: the quantizer of what was joined.
        large, small: operand and its range: the widest, and the narrowest with steps of its own.
        step: of the join's grid.
    """

    op: str
    site: str
    large: tuple[str, tuple[float, float]]
    small: tuple[str, tuple[float, float]]
    step: float

    @property
    def codes(self) -> float:
        """How many steps of the join's grid the narrowest operand's range has."""
        lo, hi = self.small[1]
        return (hi - lo) / self.step

    def __str__(self) -> str:
        (large, wide), (small, narrow) = self.large, self.small
        return (
            f"{self.site} (joined by {self.op}): {large} from {wide[0]:.4g} to {wide[1]:.4g} and {small} from "
            f"{narrow[0]:.4g} to {narrow[1]:.4g} share one grid with a step of {self.step:.4g}, "
            f"which has {self.codes:.2g} steps for the narrower"
        )


def unlike_joins(graph: Graph, sites: Mapping[str, Site], shared: Mapping[str, str]) -> list[UnlikeJoin]:
    """The joins of calibrated values, in order of execution, on whose grid an operand has fewer than 16 steps.

    Args:
        graph: the model.
        sites: calibrated.
        shared: value that only carries elements of another -> the group on whose grid they lie.
    """
    made, read = _at_work(sites, shared)
    merges = (op for op in graph.ops if op_row(op.type).kind == "merge" and op.outputs)
    joined = ((op, made.get(op.outputs[0]) or _read_later(graph, op.outputs[0], read)) for op in merges)
    found = (_unlike(op, site, made, read) for op, site in joined if site is not None)
    return [join for join in found if join is not None]


def _at_work(
    sites: Mapping[str, Site], shared: Mapping[str, str]
) -> tuple[dict[str, Site], dict[tuple[str, int], Site]]:
    """The quantizer that each value went through where it was made, and the one at each port that reads through one."""
    calibrated = [site for site in sites.values() if site.enabled and site.encoding is not None]
    carried = {value: sites[group] for value, group in shared.items() if group in sites and sites[group].enabled}
    made = carried | {site.value: site for site in calibrated if site.role == "output"}
    return made, {(site.op, site.port): site for site in calibrated if site.role in ("input", "constant")}


def warn_of_unlike_joins(graph: Graph, sites: Mapping[str, Site], shared: Mapping[str, str]) -> None:
    """Log the joins of unlike ranges, with both ranges and what can be done."""
    found = unlike_joins(graph, sites, shared)
    if found:
        more = f"; and {len(found) - _SHOWN} more joins" if len(found) > _SHOWN else ""
        logger.warning(
            "joins of unlike ranges: %s%s. Remedy: leave the join in float with Rule(%r, port='output', quantized=False), or "
            "give it 16 bits with format='uint16'",
            "; ".join(map(str, found[:_SHOWN])),
            more,
            found[0].site,
        )


def _read_later(graph: Graph, value: str, read: Mapping[tuple[str, int], Site]) -> Site | None:
    """The quantizer that a value in float, or what only moves it, first meets."""
    stack, seen = [value], {value}
    while stack:
        for op, port in graph.consumers(stack.pop()):
            if (op.name, port) in read:
                return read[op.name, port]
            moved = op.outputs if op_row(op.type).kind == "movement" else ()
            stack += [output for output in moved if output not in seen]
            seen.update(moved)
    return None


def _unlike(op: Op, site: Site, made: Mapping[str, Site], read: Mapping[tuple[str, int], Site]) -> UnlikeJoin | None:
    """What ``op`` joins badly; ``None`` where every operand has steps enough on the grid of ``site``."""
    encoding = site.encoding
    if encoding is None or not isinstance(encoding.format, IntFormat) or encoding.scale.size != 1:
        return None
    ranges = dict(_ranges(op, site, made, read))
    if len(ranges) < 2:
        return None
    width = {value: hi - lo for value, (lo, hi) in ranges.items()}
    large, small = max(width, key=width.__getitem__), min(width, key=width.__getitem__)
    step = float(encoding.scale.reshape(()))
    join = UnlikeJoin(op.name, site.name, (large, ranges[large]), (small, ranges[small]), step)
    return join if join.codes < _FEWEST_CODES and width[large] > width[small] * 2 else None


def _ranges(
    op: Op, site: Site, made: Mapping[str, Site], read: Mapping[tuple[str, int], Site]
) -> Iterator[tuple[str, tuple[float, float]]]:
    """The operands of ``op`` that have grids of their own, and the ranges of these."""
    ports = op_row(op.type).activations
    for port, value in op.sources():
        if ports is not None and port not in ports:
            continue
        own = read.get((op.name, port)) or made.get(value)
        if own is None or own.quantizer is site.quantizer or own.encoding is None:
            continue
        if isinstance(own.encoding.format, IntFormat):
            yield value, (float(own.encoding.min.min()), float(own.encoding.max.max()))
