"""What a change is worth: the outputs of the simulation against those of the float model, on samples that it did not see.

Metrics of small sets move by luck, one answer at a time; the noise in the outputs is measured on every number of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.simulation.output_parts import (
    OutputPart,
    PartQuality,
    is_judged,
    noise_and_signal,
    parts_of,
    quality,
)
from bitwright.core.simulation.sites import SiteMap

Array = NDArray[Any]
Outputs = Callable[[Any], Sequence[Array]]
"""A batch -> the model's outputs, always in the same order."""
Names = Callable[[], Sequence[str]]

_EVERY, _BATCHES = 5, 16
_LEAST_NOISE = 1e-8  # of the signal: 80 dB


class Judge:
    """Batches that were held out.

    Args:
        batches: as the model takes them.
        outputs: of the float model; called when it is first needed.
        seen: whether the methods see these batches too: the data held fewer than five.
        names: of the outputs; called after the float model has run.
    """

    def __init__(self, batches: Sequence[Any], outputs: Outputs, *, seen: bool = False, names: Names = tuple) -> None:
        self.batches, self.seen, self._outputs, self._names = batches, seen, outputs, names

    @classmethod
    def of(
        cls, data: Iterable[Any], outputs: Outputs, most: int = _BATCHES, names: Names = tuple
    ) -> tuple[Judge, Iterable[Any]]:
        """Hold every fifth batch out of ``data``, the second first, ``most`` of them; none of fewer than five.

        Args:
            data: batches; gone through anew by every method.
            outputs: of the float model.
            most: how many at most; the rest of them is given to the methods.
            names: of the outputs; called after the float model has run.

        Returns:
            The judge, and the data without its batches.
        """
        first: list[Any] = []
        place = -1
        held: dict[int, Any] = {}
        for place, batch in enumerate(data):
            if place == 0:
                first = [batch]
            if place % _EVERY == 1 and len(held) < most:
                held[place] = batch
            if len(held) == most and place + 1 >= _EVERY:
                break
        if place + 1 < _EVERY:  # a quarter of the data and more would be missed in the choice of weights
            return cls(first, outputs, seen=True, names=names), data
        return cls(list(held.values()), outputs, names=names), _Without(data, frozenset(held))

    @cached_property
    def wanted(self) -> list[list[Array]]:
        """The outputs of the float model for each batch."""
        return [[np.array(y) for y in self._outputs(batch)] for batch in self.batches]  # a runtime may reuse its own

    @cached_property
    def parts(self) -> list[OutputPart]:
        """What is judged apart: every output, and slices of unlike scales inside one."""
        wanted = self.wanted
        return parts_of(wanted, self._names())

    @property
    def possible(self) -> bool:
        """Whether there is an output of numbers to compare."""
        return any(y.dtype.kind == "f" and y.size for outputs in self.wanted for y in outputs)

    @property
    def where(self) -> str:
        """One phrase: on what it judges."""
        if self.seen:
            return "on a batch that the methods see too: give five or more"
        return f"on {len(self.batches)} batch{'es' if len(self.batches) > 1 else ''} that the methods do not see"

    def sqnr(self, outputs: Outputs) -> float:
        """Signal-to-noise ratio of ``outputs`` in dB; of several parts, the mean of the numbers of dB.

        So a part counts for what it gains or loses itself, whether others are noisier or not: the scores of a detector are
        not traded for its boxes. Noise more than 80 dB below its signal is beyond what matters and counts as 80 dB.
        """
        return mean_decibel(self.ratios(outputs))

    def ratios(self, outputs: Outputs) -> list[float]:
        """Noise over signal of each of :attr:`parts` that has a signal; infinite for all of them where one is NaN.

        What is not finite in float is left out, and so are outputs whose shape depends on their values and differs.
        """
        sums = [(sum(n), sum(s)) for n, s in self._sums(outputs).values()]
        if any(math.isnan(noise) for noise, _ in sums):
            return [math.inf] * len(sums)
        return [noise / signal for noise, signal in sums if signal]

    def rate(self, outputs: Outputs) -> Rating:
        """The quality of every part of ``outputs``, with intervals over the batches."""
        found = (quality(self.parts[i].name, n, s) for i, (n, s) in self._sums(outputs).items())
        return Rating(tuple(part for part in found if part is not None), self.where)

    def _sums(self, outputs: Outputs) -> dict[int, tuple[list[float], list[float]]]:
        """Part -> noise and signal in each batch that has it in the same shape."""
        sums: dict[int, tuple[list[float], list[float]]] = {}
        for batch, wanted in zip(self.batches, self.wanted, strict=True):
            found = list(outputs(batch))
            for i, part in enumerate(self.parts):
                w, f = wanted[part.output], found[part.output]
                if is_judged(w, f):
                    noise, signal = noise_and_signal(part.of(w), part.of(f))
                    noises, signals = sums.setdefault(i, ([], []))
                    noises.append(noise)
                    signals.append(signal)
        return sums


@dataclass(frozen=True)
class Rating:
    """How near the outputs come to the float model's.

    Attributes:
        parts: every output, and slices of unlike scales inside one.
        where: one phrase: on what they are compared.
    """

    parts: tuple[PartQuality, ...] = ()
    where: str = ""

    @property
    def worst(self) -> PartQuality | None:
        """The part with the lowest ratio; ``None`` without an output of numbers."""
        return min(self.parts, key=lambda part: part.sqnr, default=None)

    @property
    def sqnr(self) -> float:
        """Of all parts, as :meth:`Judge.sqnr`."""
        return mean_decibel([10 ** (-part.sqnr / 10) for part in self.parts])


def mean_decibel(ratios: Sequence[float]) -> float:
    """The mean of ratios of noise to signal in dB, each at most 80 dB; infinite where there is no noise at all."""
    if any(map(math.isinf, ratios)):
        return -math.inf
    if not any(ratios):
        return math.inf
    return -10 * sum(math.log10(max(ratio, _LEAST_NOISE)) for ratio in ratios) / len(ratios)


@contextmanager
def weights_in_float(sites: SiteMap) -> Iterator[None]:
    """Leave the weights of a simulation in float meanwhile, so that its outputs show what activations cost alone."""
    undo = sites.remember()
    try:
        for site in sites.values():
            if site.role == "weight":
                site.enabled = False
        yield
    finally:
        undo()


class _Without:
    """Data without some of its batches."""

    def __init__(self, data: Iterable[Any], places: frozenset[int]) -> None:
        self._data, self._places = data, places

    def __iter__(self) -> Iterator[Any]:
        return (batch for place, batch in enumerate(self._data) if place not in self._places)
