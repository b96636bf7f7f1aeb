"""Rate a change by the error of the simulation's outputs against the float model's, on held-out samples.

A metric on a small set changes by chance, one answer at a time; the error of the outputs uses every number in them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.simulation.calibration import samples_in, slice_samples
from bitwright.core.simulation.output_quality import (
    Gain,
    OutputPart,
    PartQuality,
    gain,
    gain_of_mean,
    is_judged,
    matched_rows,
    noise_and_signal,
    parts_of,
    places_of,
    quality,
    varying_share,
)
from bitwright.core.simulation.sites import Site, SiteMap
from bitwright.errors import CalibrationError

Array = NDArray[Any]
Outputs = Callable[[Any], Sequence[Array]]
"""A batch -> the model's outputs, always in the same order."""
Names = Callable[[], Sequence[str]]

_EVERY, _BATCHES = 5, 16
_FEW, _QUARTER = 4, 4  # a fifth of less than four samples makes no interval: a quarter is held out then, or four
_LEAST_NOISE = 1e-8  # of the signal
_NEAR = 2  # samples on either side of a cut that are run to see whether samples depend on each other
_BEYOND = -10 * math.log10(_LEAST_NOISE)  # dB
_ENOUGH, _SAME = 50.0, 0.1  # dB of a part beyond which more is worth nothing; differences that are none


class Judge:
    """Held-out batches that rate simulations.

    Args:
        batches: as the model takes them.
        outputs: of the float model; called when it is first needed.
        seen: whether the methods see these batches too: nothing could be held out, or the recipe is the user's.
        names: of the outputs; called after the float model has run.
        whence: where the batches are from, in one phrase.
    """

    def __init__(
        self, batches: Sequence[Any], outputs: Outputs, *, seen: bool = False, names: Names = tuple, whence: str = ""
    ) -> None:
        self.batches, self.seen, self._outputs, self._names, self.whence = batches, seen, outputs, names, whence
        self.left_out: Iterable[Any] = ()  # what is held out of the data: these batches, and others between them
        # layer -> the site or value that is judged in place of outputs whose rows are chosen
        self.instead: dict[str, str] = {}
        self._chosen: frozenset[int] = frozenset()  # these outputs
        self._layers: list[list[Array]] = []  # what the float model has there, for each batch
        # output -> axis of rows that an operator chose before the last layers; the value with their indices
        self.rows: dict[int, int] = {}
        self._indices = ""
        self._orders: list[Array] = []  # the indices in the float model, for each batch
        self._matched = (0, 0)  # rows that both runs chose in the last comparison, and all

    @classmethod
    def of(
        cls, data: Iterable[Any], outputs: Outputs, most: int = _BATCHES, names: Names = tuple
    ) -> tuple[Judge, Iterable[Any]]:
        """Hold the last fifth of ``data`` out, and judge by ``most`` batches spread over it.

        The last part, and not every fifth batch: data come in the order of recordings and files, and a frame between two
        frames that calibration saw says nothing of other recordings. What is near the border counts least.

        Where a fifth is fewer than four samples, a quarter is held out, at most four: the interval of two samples is four
        times as wide as that of four. Of fewer than five batches the last samples are held out, where the model computes the
        samples of the last batch apart from each other, which a run shows. Otherwise nothing is held out, and the first
        batches judge (:meth:`of_seen`).

        Args:
            data: batches; gone through anew by every method.
            outputs: of the float model.
            most: how many batches judge at most; the rest of the last fifth is not looked at.
            names: of the outputs; called after the float model has run.

        Returns:
            The judge, and the data without what it holds.
        """
        count = batches_in(data)
        held_out = _held_out(count, data)
        kept = count - held_out
        places = _spread(kept, count, most)
        held = [batch for place, batch in enumerate(data) if place in places]
        if held:
            part = "fifth" if held_out == count // _EVERY else "quarter"
            judge = cls(held, outputs, names=names, whence=f"the last {part} of the data")
            judge.left_out = _Part(data, kept, count)
            return judge, _Part(data, 0, kept)
        batches = list(data)
        cut = _last_samples(batches, outputs)
        if cut is None:  # a quarter of the data and more would be missed in the choice of weights
            return cls.of_seen(batches[0], batches, outputs, names), data
        rest, last, found = cut
        judge = cls([last], outputs, names=names, whence="the last samples of the data")
        judge.left_out = judge.batches
        if found is not None:
            judge._float_outputs = [found]
        return judge, rest

    @classmethod
    def of_seen(
        cls, first: Any, data: Iterable[Any], outputs: Outputs, names: Names = tuple, whence: str = ""
    ) -> Judge:
        """A judge of the first batches of ``data``, which the methods see too: as many as hold four samples.

        ``data`` is not read where ``first``, its first batch, is enough.
        """
        batches, count = [first], samples_in(first)
        if count < _FEW:
            for batch in itertools.islice(data, 1, None):
                batches.append(batch)
                count += samples_in(batch)
                if count >= _FEW:
                    break
        return cls(batches, outputs, seen=True, names=names, whence=whence)

    @classmethod
    def given(cls, held_out: Iterable[Any], outputs: Outputs, most: int = _BATCHES, names: Names = tuple) -> Judge:
        """A judge of the user's own batches, ``most`` spread over them.

        Raises:
            CalibrationError: there is none.
        """
        batches = list(held_out)
        if not batches:
            raise CalibrationError(
                "held_out", "it holds no batch", "give batches of data that calibration does not see"
            )
        places = _spread(0, len(batches), most)
        chosen = [batch for place, batch in enumerate(batches) if place in places]
        return cls(chosen, outputs, names=names, whence="of held_out")

    @cached_property
    def _float_outputs(self) -> list[list[Array]]:
        return [[np.array(y) for y in self._outputs(batch)] for batch in self.batches]  # a runtime may reuse its own

    @cached_property
    def wanted(self) -> list[list[Array]]:
        """The outputs of the float model for each batch, and what its layers of :attr:`instead` compute."""
        if not self.instead:
            return self._float_outputs
        nothing = np.zeros(0, np.int64)  # in place of an output that is not judged
        return [
            [*(nothing if i in self._chosen else y for i, y in enumerate(outputs)), *layers]
            for outputs, layers in zip(self._float_outputs, self._layers, strict=True)
        ]

    @cached_property
    def parts(self) -> list[OutputPart]:
        """Parts judged separately: every output, and slices of unlike scales inside one."""
        count = len(self.wanted[0]) - len(self.instead) if self.wanted else 0
        names = [*self._names()][:count]
        names += [f"output[{i}]" if count > 1 else "output" for i in range(len(names), count)]
        return parts_of(self.wanted, [*names, *self.instead])

    @cached_property
    def _varying(self) -> list[float | None]:
        """Share of each of :attr:`parts` that differs between samples."""
        counts = [samples_in(batch) for batch in self.batches]
        return [
            varying_share([part.of(outputs[part.output]) for outputs in self.wanted], counts) for part in self.parts
        ]

    def look_at_layers(self, sim: Any) -> None:
        """Find layers to compare where a model chooses rows (TopK, suppression) by scores.

        Which rows it chooses, and in which order, depends on the last digits of scores. Where outputs consist of rows that were
        chosen after the last layer, the last layers before the choice are compared. Where layers follow, rows of the outputs
        are compared that were chosen by the same index. The values of the float model come from the first simulation,
        before a method works on it.

        Args:
            sim: calibrated, with the weights of the float model.
        """
        if self.looks_at_more:
            return
        chosen, layers = sim._chosen_outputs()
        indices, rows = ("", {}) if layers else sim._ordered_rows()
        names = [*layers.values()] if layers else [indices] if rows else []
        if not names or any(len(outputs) != len(sim.graph.outputs) for outputs in self._float_outputs):
            return  # nothing is chosen; or the place of an output in the graph does not tell its place in the answer
        with in_float(sim.quantizers, lambda site: True):
            answer = sim._outputs_and(names)
            found = [[np.array(y) for y in answer(batch)[-len(names) :]] for batch in self.batches]
        if layers:
            self.instead, self._chosen, self._layers = layers, frozenset(chosen), found
        else:
            self.rows, self._indices, self._orders = rows, indices, [one for (one,) in found]
        for known in ("wanted", "parts", "_varying"):
            self.__dict__.pop(known, None)

    @property
    def looks_at_more(self) -> bool:
        """Whether more than the outputs is compared, so that :meth:`answers` is needed."""
        return bool(self.instead or self.rows)

    def answers(self, sim: Any) -> Outputs:
        """The tensors of a simulation that are compared."""
        names = [*self.instead.values(), *([self._indices] if self.rows else [])]
        found: Outputs = sim._outputs_and(names) if names else sim._outputs
        return found

    @property
    def possible(self) -> bool:
        """Whether the model has a numeric output to compare."""
        return any(y.dtype.kind == "f" and y.size for outputs in self.wanted for y in outputs)

    @property
    def where(self) -> str:
        """One phrase: which batches it uses."""
        many = f"on {len(self.batches)} batch{'es' if len(self.batches) > 1 else ''}"
        before = "; compared before the model chooses rows of its outputs" if self.instead else ""
        if self.rows and self._matched[1]:
            share = self._matched[0] / self._matched[1]
            before = f"; rows are compared by the index that chose them, {share:.0%} are chosen by both"
        if self.seen:
            return f"{many} that {self.whence or 'the methods see too: give five or more'}{before}"
        return (
            f"{many} that neither calibration nor methods had seen{f' ({self.whence})' if self.whence else ''}{before}"
        )

    def ratios(self, outputs: Outputs) -> list[float]:
        """Noise over signal of each of :attr:`parts` that has a signal; infinite for all of them where one is NaN.

        What is not finite in float is left out, and so are outputs whose shape depends on their values and differs.
        """
        sums = [(sum(map(np.sum, n)), sum(map(np.sum, s))) for n, s in self._sums(outputs).values()]
        if any(math.isnan(noise) for noise, _ in sums):
            return [math.inf] * len(sums)
        return [float(noise / signal) for noise, signal in sums if signal]

    def rate(self, outputs: Outputs) -> Rating:
        """Rate every part of ``outputs``, with confidence intervals."""
        sums = self._sums(outputs)
        found = (quality(self.parts[i].name, n, s, self._varying[i]) for i, (n, s) in sums.items())
        too_few = self.seen and not self.whence
        return Rating(tuple(part for part in found if part is not None), self.where, self.seen, too_few)

    def _sums(self, outputs: Outputs) -> dict[int, tuple[list[Array], list[Array]]]:
        """Part -> noise and signal per sample, of each batch in which float and quantized shapes agree."""
        sums: dict[int, tuple[list[Array], list[Array]]] = {}
        self._matched = (0, 0)
        for place, (batch, wanted) in enumerate(zip(self.batches, self.wanted, strict=True)):
            own, found = list(wanted), list(outputs(batch))
            if self.rows:
                own, found = self._by_index(self._orders[place], wanted, found)
            for i, part in enumerate(self.parts):
                w, f = own[part.output], found[part.output]
                if is_judged(w, f):
                    noise, signal = noise_and_signal(part.of(w), part.of(f), samples_in(batch))
                    noises, signals = sums.setdefault(i, ([], []))
                    noises.append(noise)
                    signals.append(signal)
        return sums

    def _by_index(
        self, order: Array, wanted: Sequence[Array], found: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Outputs of both runs with rows matched by the index that chose them; see :func:`matched_rows`."""
        own, other = [*wanted], [*found[:-1]]
        both, at = places_of(order, found[-1])
        for i, axis in self.rows.items():
            if is_judged(own[i], other[i]):
                own[i], other[i] = matched_rows(own[i], other[i], both, at, axis)
        self._matched = (self._matched[0] + int(both.sum()), self._matched[1] + both.size)
        return own, other


@dataclass(frozen=True)
class Rating:
    """Error of the simulation's outputs against the float model's.

    Attributes:
        parts: every output, and slices of unlike scales inside one.
        where: one phrase: on what they are compared.
        seen: whether calibration saw these data too.
        too_few: whether it did because the data are too few to hold any out.
    """

    parts: tuple[PartQuality, ...] = ()
    where: str = ""
    seen: bool = False
    too_few: bool = False

    @property
    def worst(self) -> PartQuality | None:
        """The part with the lowest ratio; ``None`` without a numeric output."""
        return min(self.parts, key=lambda part: part.sqnr, default=None)

    @property
    def sqnr(self) -> float:
        """Signal-to-noise ratio of the outputs in dB; of several parts, the mean of the numbers of dB.

        So a part counts for what it gains or loses itself, whether others are noisier or not: the scores of a detector are
        not traded for its boxes. Noise more than 80 dB below its signal is beyond what matters and counts as 80 dB.
        """
        return mean_decibel([10 ** (-part.sqnr / 10) for part in self.parts])

    def gain_over(self, other: Rating) -> Gain:
        """How much higher :attr:`sqnr` is than that of another simulation on the same samples, with an interval.

        Parts of at least 80 dB in both neither gain nor vary.
        """
        before = {part.name: part for part in other.parts}
        pairs = [(part, before[part.name]) for part in self.parts if part.name in before]
        varying = [gain(*pair) for pair in pairs if min(part.sqnr for part in pair) < _BEYOND]
        return gain_of_mean(_difference(self.sqnr, other.sqnr), varying, len(pairs))

    def loses_to(self, other: Rating) -> PartQuality | None:
        """The part in which ``other`` is better; ``None`` where this rating is at least as good.

        It is, where the worst part is lower, where parts lose on the whole, or where one part loses more than any gains. What
        is beyond 50 dB counts as 50.
        """
        mine, theirs = ({part.name: min(part.sqnr, _ENOUGH) for part in rating.parts} for rating in (self, other))
        both = [name for name in mine if name in theirs]
        if not both:
            return None
        gains = {name: mine[name] - theirs[name] if mine[name] != theirs[name] else 0.0 for name in both}
        least = min(both, key=gains.__getitem__)
        lower = min(mine.values()) < min(theirs.values()) - _SAME
        on_the_whole = sum(gains.values()) < -_SAME * len(both)
        traded = gains[least] < -1 and -gains[least] > max(gains.values())
        if not (lower or on_the_whole or traded):
            return None
        return next(part for part in self.parts if part.name == least)


def mean_decibel(ratios: Sequence[float]) -> float:
    """The mean of ratios of noise to signal in dB, each at most 80 dB; infinite where there is no noise at all."""
    if any(map(math.isinf, ratios)):
        return -math.inf
    if not any(ratios):
        return math.inf
    return -10 * sum(math.log10(max(ratio, _LEAST_NOISE)) for ratio in ratios) / len(ratios)


def _difference(after: float, before: float) -> float:
    return 0.0 if after == before else after - before  # of infinite ones too


@contextmanager
def in_float(sites: SiteMap, which: Callable[[Site], bool]) -> Iterator[None]:
    """Context manager: disable some quantizers of a simulation."""
    undo = sites.remember()
    try:
        for site in sites.values():
            if which(site):
                site.enabled = False
        yield
    finally:
        undo()


class _Part:
    """The batches of data from ``begin`` to ``end``."""

    def __init__(self, data: Iterable[Any], begin: int, end: int) -> None:
        self._data, self._begin, self._end = data, begin, end

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._data, self._begin, self._end)

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def held(self) -> Sequence[Any] | None:
        """The batches, where the data are in memory."""
        return self._data[self._begin : self._end] if isinstance(self._data, (list, tuple)) else None


def some_and_others(data: Iterable[Any], most: int) -> tuple[Sequence[Any], Sequence[Any] | None]:
    """``most`` batches spread over ``data``, and the others; both empty for fewer batches or data not in memory."""
    count = batches_in(data)
    if count <= most:
        return (), ()
    held = data.held if isinstance(data, _Part) else data if isinstance(data, (list, tuple)) else None
    places = _spread(0, count, most)
    if held is None:
        return [batch for place, batch in enumerate(data) if place in places], None
    some, others = ([b for i, b in enumerate(held) if (i in places) == inside] for inside in (True, False))
    return some, others


def batches_in(data: Iterable[Any]) -> int:
    """The number of batches."""
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:
        return sum(1 for _ in data)


def _held_out(count: int, data: Iterable[Any] = ()) -> int:
    """The number of held-out batches of ``count``, or of samples if there are no batches."""
    held = count // _EVERY
    if not 0 < held < _FEW:
        return held
    rows = max(next((samples_in(batch) for batch in data), 1), 1)
    return max(held, min(-(-_FEW // rows), count // _QUARTER))


def _last_samples(batches: Sequence[Any], outputs: Outputs) -> tuple[list[Any], Any, list[Array] | None] | None:
    """Batches with the last one cut by a fifth of its samples, that part, and the model's outputs of it if it was run.

    ``None`` where the last batch cannot be divided.
    """
    if not batches:
        return None
    count, total = samples_in(batches[-1]), sum(map(samples_in, batches))
    held = min(_held_out(total), count)
    if not held or (held == count and len(batches) == 1):
        return None
    if held == count:
        return [*batches[:-1]], batches[-1], None
    begin, end = slice_samples(batches[-1], 0, count - held), slice_samples(batches[-1], count - held, count)
    found = None if begin is None else _computed_apart(outputs, batches[-1], count - held)
    return None if found is None else ([*batches[:-1], begin], end, found)


def _computed_apart(outputs: Outputs, batch: Any, first: int) -> list[Array] | None:
    """The outputs of a batch from sample ``first`` on, where they do not depend on what else is in the batch; else ``None``.

    Outputs of two samples before it and two from it on are compared with those of all samples from it on.
    """
    count = samples_in(batch)
    begin, end = max(first - _NEAR, 0), min(first + _NEAR, count)
    try:
        parts = slice_samples(batch, begin, end), slice_samples(batch, first, count)
        near, found = ([np.array(y) for y in outputs(part)] for part in parts)
    except Exception:  # of the model's own code; if it is not about the size, calibration raises it again
        return None
    apart = len(near) == len(found) and all(
        _same_rows(
            _of_samples(a, end - begin, first - begin, end - begin), _of_samples(b, count - first, 0, end - first)
        )
        for a, b in zip(near, found, strict=True)
    )
    return found if apart else None


def _of_samples(y: Array, count: int, first: int, last: int) -> Array | None:
    """The rows of samples ``[first, last)`` of ``count``; ``None`` where the first axis is not one of samples."""
    if not y.ndim or len(y) % count:
        return None
    rows = len(y) // count
    return y[first * rows : last * rows]


def _same_rows(a: Array | None, b: Array | None) -> bool:
    """Whether two arrays are equal up to rounding."""
    if a is None or b is None or a.shape != b.shape:
        return False
    scale = float(np.nanmax(np.abs(a), initial=0.0)) if a.dtype.kind == "f" else 0.0
    return np.allclose(a, b, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)


def _spread(first: int, last: int, most: int) -> frozenset[int]:
    """At most ``most`` indices spread evenly over ``[first, last)``."""
    count = min(most, last - first)
    return frozenset(first + (2 * i + 1) * (last - first) // (2 * count) for i in range(count))
