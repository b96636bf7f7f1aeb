"""Quantizing one group of operators after the other, until the outputs turn bad: where does it break?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.simulation.sites import SiteMap


@dataclass(frozen=True)
class Step:
    """One group of operators was quantized.

    Attributes:
        ops: their names.
        sqnr: of the model's outputs against float, in dB; ``inf`` where they are equal, NaN where an output is not finite.
        good: whether it stayed quantized.
        reason: why not.
    """

    ops: tuple[str, ...]
    sqnr: float
    good: bool
    reason: str = ""


@dataclass(frozen=True)
class Progression:
    """What :func:`quantize_progressively` did: its steps in execution order."""

    steps: tuple[Step, ...]

    @property
    def stopped_at(self) -> Step | None:
        """The first group that turned bad; ``None`` if none did."""
        return next((step for step in self.steps if not step.good), None)

    def __str__(self) -> str:
        lines = [
            f"{'quantized' if step.good else 'in float '}  {step.sqnr:7.1f} dB  {', '.join(step.ops)}"
            + (f"  {step.reason}" if step.reason else "")
            for step in self.steps
        ]
        return "\n".join(lines)


def quantize_progressively(
    sites: SiteMap,
    outputs: Callable[[], Sequence[NDArray[Any]]],
    *,
    threshold: float = 10.0,
    groups: Sequence[Sequence[str]] | None = None,
    keep_going: bool = False,
    track: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Progression:
    """Switch sites on group by group in execution order, and stop at the first that turns the outputs bad.

    All calibrated sites start in float. A group that makes an output NaN or Inf, or the signal-to-quantization-noise ratio
    fall below ``threshold``, goes back to float, and so does everything after it unless ``keep_going``.

    Args:
        sites: of a calibrated simulation.
        outputs: runs the simulation as it stands on fixed data; its outputs.
        threshold: in dB.
        groups: names of operators that are switched on together; each operator by itself by default.
        keep_going: leave bad groups in float and go on with those after them.
        track: goes over the groups, for example with a progress bar.

    Returns:
        One step per group that was tried. Ctrl-C ends the search and leaves the groups found good.
    """
    by_op: dict[str, list[str]] = {}
    for name, site in sites.items():
        if site.enabled:
            by_op.setdefault(site.op, []).append(name)
    chosen = [tuple(group) for group in groups] if groups is not None else [(op,) for op in by_op]
    steps: list[Step] = []
    restore = sites.remember()
    try:
        for names in by_op.values():
            _switch(sites, names, on=False)
        for step in _tried(sites, track(chosen), by_op, outputs, threshold):
            steps.append(step)
            if not (step.good or keep_going):
                break
    except KeyboardInterrupt:
        pass  # the groups so far are the result
    except BaseException:
        restore()
        raise
    return Progression(tuple(steps))


def _tried(
    sites: SiteMap,
    groups: Iterable[tuple[str, ...]],
    by_op: Mapping[str, Sequence[str]],
    outputs: Callable[[], Sequence[NDArray[Any]]],
    threshold: float,
) -> Iterator[Step]:
    """Switch one group after the other on, and those off again that are bad."""
    reference = [np.asarray(out, np.float64) for out in outputs()]
    for ops in groups:
        names = [name for op in ops for name in by_op.get(op, ())]
        if not names:
            continue
        before = {name: sites[name].enabled for name in names}
        _switch(sites, names, on=True)
        step = _judge(ops, reference, outputs(), threshold)
        if not step.good:
            _restore(sites, before)  # a quantizer may be shared with a group that was good
        yield step


def _switch(sites: SiteMap, names: Iterable[str], *, on: bool) -> None:
    _restore(sites, dict.fromkeys(names, on))


def _restore(sites: SiteMap, enabled: Mapping[str, bool]) -> None:
    for name, on in enabled.items():
        sites[name].enabled = on


def _judge(
    ops: tuple[str, ...], reference: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]], threshold: float
) -> Step:
    values = [np.asarray(out, np.float64) for out in found]
    for i, out in enumerate(values):
        if not np.isfinite(out).all() and np.isfinite(reference[i]).all():
            return Step(ops, math.nan, False, f"output {i} holds {int((~np.isfinite(out)).sum())} NaN or Inf")
    sqnr = min((_sqnr(a, b) for a, b in zip(reference, values, strict=True)), default=math.inf)
    low = sqnr < threshold
    return Step(ops, sqnr, not low, f"below {threshold:g} dB" if low else "")


def _sqnr(reference: NDArray[Any], found: NDArray[Any]) -> float:
    """``10 log10(sum x^2 / sum (x - y)^2)`` over the elements that are finite in both."""
    both = np.isfinite(reference) & np.isfinite(found)
    signal, noise = float(np.square(reference[both]).sum()), float(np.square((reference - found)[both]).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
