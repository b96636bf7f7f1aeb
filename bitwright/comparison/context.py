"""Operators that a runtime computes otherwise in the whole file than alone, on the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from bitwright.comparison.causes import close
from bitwright.comparison.lockstep import Lockstep
from bitwright.comparison.points import Pair
from bitwright.comparison.report import Finding, Retry
from bitwright.export.files.whole import fix_lengths, free_inputs, how_to_fix
from bitwright.export.verify.agreement import MOST_LSB, SLACK, Agreement

Array = NDArray[Any]

_TEXT = (
    "the runtime computes something else there in the whole file than in these operators alone, although both are fed the same "
    "values"
)
_OTHER = "leave the layer in float: sim.quantizers[...].enabled = False, or show the runtime's maintainers this file"


def in_context(both: Lockstep, most: int) -> list[Finding]:
    """The first ``most`` tensors that the second execution, a runtime, makes otherwise in the whole file than alone."""
    if not both.b.in_runtime:
        return []
    apart = _apart(both, both.in_the_whole())
    if not apart:
        return []
    fixed = (
        both.in_the_whole(lambda model: fix_lengths(model, both.feeds_b)) if free_inputs(both.b.model) else {}
    )
    return [_finding(both, pair, before, fixed.get(pair)) for pair, before in list(apart.items())[:most]]


def _apart(both: Lockstep, values: Mapping[Pair, tuple[Array, Array]]) -> dict[Pair, Agreement]:
    """Where the two differ by more than the order of summation and a table inside a kernel may change."""
    compared = {pair: both.agreement(pair, *two) for pair, two in values.items()}
    return {pair: found for pair, found in compared.items() if not _alike(found)}


def _alike(agreement: Agreement) -> bool:
    return close(agreement) or agreement.lsb <= MOST_LSB + SLACK


def _finding(both: Lockstep, pair: Pair, before: Agreement, fixed: tuple[Array, Array] | None) -> Finding:
    """With the run that has the lengths of the input in the place of free axes, where there are any."""
    retries: tuple[Retry, ...] = ()
    remedy = _OTHER
    if fixed is not None:
        after = both.agreement(pair, *fixed)
        without = "with the lengths of this input instead of free axes"
        retries = (Retry("fusion", without, before, after, _alike(after)),)
        if _alike(after):
            remedy = how_to_fix({name: array.shape for name, array in both.feeds_b.items()})
    return Finding(pair.name, tuple(both.places[pair].piece.ops), "fusion", _TEXT, remedy, retries)
