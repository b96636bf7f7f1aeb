"""What a change is worth: the outputs of the simulation against those of the float model, on samples that it did not see.

Metrics of small sets move by luck, one answer at a time; the noise in the outputs is measured on every number of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.simulation.sites import SiteMap

Array = NDArray[Any]
Outputs = Callable[[Any], Sequence[Array]]
"""A batch -> the model's outputs, always in the same order."""

_EVERY, _BATCHES = 5, 16
_LEAST_NOISE = 1e-8  # of the signal: 80 dB


class Judge:
    """Batches that were held out.

    Args:
        batches: as the model takes them.
        outputs: of the float model; called when it is first needed.
        seen: whether the methods see these batches too: the data held fewer than five.
    """

    def __init__(self, batches: Sequence[Any], outputs: Outputs, *, seen: bool = False) -> None:
        self.batches, self.seen, self._outputs = batches, seen, outputs

    @classmethod
    def of(cls, data: Iterable[Any], outputs: Outputs, most: int = _BATCHES) -> tuple[Judge, Iterable[Any]]:
        """Hold every fifth batch out of ``data``, the second first, ``most`` of them; none of fewer than five.

        Args:
            data: batches; gone through anew by every method.
            outputs: of the float model.
            most: how many at most; the rest of them is given to the methods.

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
            return cls(first, outputs, seen=True), data
        return cls(list(held.values()), outputs), _Without(data, frozenset(held))

    @cached_property
    def wanted(self) -> list[list[Array]]:
        """The outputs of the float model for each batch."""
        return [[np.array(y) for y in self._outputs(batch)] for batch in self.batches]  # a runtime may reuse its own

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
        """Signal-to-noise ratio of ``outputs`` in dB; of several, the mean of the numbers of dB.

        So an output counts for what it gains or loses itself, whether others are noisier or not: the scores of a detector are
        not traded for its boxes. Noise more than 80 dB below its signal is beyond what matters and counts as 80 dB.
        """
        ratios = self.ratios(outputs)
        if any(map(math.isinf, ratios)):
            return -math.inf
        if not any(ratios):
            return math.inf
        return -10 * sum(math.log10(max(ratio, _LEAST_NOISE)) for ratio in ratios) / len(ratios)

    def ratios(self, outputs: Outputs) -> list[float]:
        """Noise over signal of each of ``outputs``; infinite for all of them where one is NaN.

        What is not finite in float is left out, and so are outputs whose shape depends on their values and differs.
        """
        noise: dict[int, float] = {}
        signal: dict[int, float] = {}
        for batch, wanted in zip(self.batches, self.wanted, strict=True):
            for i, (w, found) in enumerate(zip(wanted, outputs(batch), strict=True)):
                if w.dtype.kind != "f" or w.shape != found.shape:
                    continue
                finite = np.isfinite(w)
                reference = w[finite].astype(np.float64)
                noise[i] = noise.get(i, 0.0) + float(np.square(reference - found[finite]).sum())
                signal[i] = signal.get(i, 0.0) + float(np.square(reference).sum())
        if any(math.isnan(n) for n in noise.values()):
            return [math.inf] * len(noise)
        return [noise[i] / signal[i] for i in noise if signal[i]]


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
