"""Measure the output error of quantizers: with only some of them enabled, and with all but them.

The values of a float run and of a quantized run are kept. With only one site quantized, everything before it is as in the
float run; with all but one, as in the quantized run. So only steps run again that read a changed value, and a change that a
step undoes (a rounding, a ReLU) ends there. Values beyond the memory budget lie in mapped files; of data that do not fit,
as many batches as fit are treated together.
"""

from __future__ import annotations

import heapq
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.analysis.subject import Active, QuantizedSteps
from bitwright.core.simulation.output_quality import is_judged, noise_and_signal
from bitwright.methods.rounding.driver import Store
from bitwright.methods.rounding.program import Program, SimulatedModel, State, Step
from bitwright.metrics.metric import OutputMetric

Array = NDArray[Any]
Sites = frozenset[str]
_FULL = 0.8  # share of the budget from which on no further batch joins


@dataclass
class Measured:
    """Outputs against the float model's, summed over batches; and the metric's values.

    Attributes:
        noise, signal: by index of the output.
        values: of the metric, one array per batch.
    """

    noise: dict[int, float] = field(default_factory=dict)
    signal: dict[int, float] = field(default_factory=dict)
    values: list[Array] = field(default_factory=list)

    def add(self, wanted: Sequence[Array], found: Sequence[Array]) -> None:
        """Add a batch; values that are not finite in float, or of another shape, are left out."""
        for i, (w, f) in enumerate(zip(wanted, found, strict=True)):
            if is_judged(w, f):
                noise, signal = noise_and_signal(w, f)
                self.noise[i] = self.noise.get(i, 0.0) + float(noise.sum())
                self.signal[i] = self.signal.get(i, 0.0) + float(signal.sum())

    @property
    def ratio(self) -> float | None:
        """Noise over signal, the mean over outputs; ``None`` without any signal."""
        ratios = [self.noise[i] / self.signal[i] for i in self.noise if self.signal[i]]
        return sum(ratios) / len(ratios) if ratios else None

    def score(self, metric: OutputMetric | None) -> float | None:
        """The metric of the samples that were added; ``None`` where there is none."""
        return float(metric.per_sample(self.values).mean()) if self.values and metric is not None else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "noise": {str(k): v for k, v in self.noise.items()},
            "signal": {str(k): v for k, v in self.signal.items()},
            "values": [v.tolist() for v in self.values],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Measured:
        """Rebuild from the result of :meth:`to_dict`."""
        noise, signal = ({int(k): float(v) for k, v in content[n].items()} for n in ("noise", "signal"))
        return cls(noise, signal, [_values(v) for v in content["values"]])


def _values(content: Sequence[Any]) -> Array:
    """Read a metric's stored values: arrays of equal length per sample, or objects."""
    try:
        return np.asarray(content, np.float64)
    except (TypeError, ValueError):
        found = np.empty(len(content), object)
        found[:] = content
        return found


@dataclass
class Pair:
    """A target measured on the first ``batches`` batches: with only its sites, and with all but these."""

    only: Measured = field(default_factory=Measured)
    without: Measured = field(default_factory=Measured)
    batches: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {"only": self.only.to_dict(), "without": self.without.to_dict(), "batches": self.batches}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Pair:
        """Rebuild from the result of :meth:`to_dict`."""
        only, without = (Measured.from_dict(content[name]) for name in ("only", "without"))
        return cls(only, without, int(content["batches"]))


class Replay:
    """One batch, with every value of its float and of its quantized run.

    Args:
        steps: how steps run.
        program, inputs: of the batch.
        store: where values are kept.
    """

    def __init__(self, steps: QuantizedSteps, program: Program, inputs: State, store: Store) -> None:
        self._steps, self.program = steps, program
        self.places = steps.places(program)
        self.readers: dict[int, list[int]] = {}
        for i, step in enumerate(program.steps):
            for value in dict.fromkeys(step.reads):
                self.readers.setdefault(value, []).append(i)
        self.runs = 0
        self.real = self._whole(inputs, store, lambda name: False)
        self.quantized = self._whole(inputs, store, lambda name: True)
        self.wanted = self._outputs(self.real, {})

    def _whole(self, inputs: State, store: Store, active: Active) -> State:
        state: State = {value: store.keep(tensor) for value, tensor in inputs.items()}
        for step in self.program.steps:
            results = self._run(step, state, active)
            for value, tensor in zip(step.writes, results, strict=True):
                state[value] = store.keep(tensor)
        return state

    def _run(self, step: Step, state: Mapping[int, Tensor], active: Active) -> Sequence[Tensor]:
        self.runs += 1
        with torch.no_grad():
            return self._steps.run(step, state, self.program.constants, active)

    def only(self, sites: Sites) -> list[Array]:
        """Outputs with these sites quantized."""
        return self._again(self.real, sites, lambda name: name in sites)

    def without(self, sites: Sites) -> list[Array]:
        """Outputs with all but these sites quantized."""
        return self._again(self.quantized, sites, lambda name: name not in sites)

    def _again(self, base: State, sites: Sites, active: Active) -> list[Array]:
        program, end, outputs = self.program, self.program.last_read, set(self.program.outputs)
        queue = sorted({i for name in sites for i in self.places.get(name, ())})
        queued = set(queue)
        changed: State = {}
        while queue:
            i = heapq.heappop(queue)
            step = program.steps[i]
            results = self._run(step, ChainMap(changed, base), active)
            for value in step.reads:
                if end.get(value) == i and value not in outputs:
                    changed.pop(value, None)
            made = zip(step.writes, results, strict=True)
            other = {value: tensor for value, tensor in made if not _equal(base.get(value), tensor)}
            changed.update(other)
            for reader in {i for value in other for i in self.readers.get(value, ())} - queued:
                queued.add(reader)
                heapq.heappush(queue, reader)
        return self._outputs(base, changed)

    def _outputs(self, base: State, changed: State) -> list[Array]:
        found = []
        for value in self.program.outputs:
            tensor = changed.get(value, base.get(value, self.program.constants.get(value)))
            found.append(_array(tensor))
        return found


class Exact:
    """Measures the output error of targets, which are sets of sites.

    Args:
        model: a calibrated simulation.
        batches: data.
        metric: read off the outputs; ``None`` measures the noise alone.
        labels: right answers of each batch; ``None`` where there are none.
        budget: bytes of values held in memory.

    Attributes:
        found: target -> what was measured.
        runs: operator runs so far.
        steps: operator runs of one forward pass of all batches seen so far.
        peak: most bytes of values held so far.
    """

    def __init__(
        self,
        model: SimulatedModel,
        batches: Sequence[Any],
        metric: OutputMetric | None = None,
        labels: Sequence[Array | None] | None = None,
        *,
        budget: int,
    ) -> None:
        self._model, self._batches, self._metric = model, batches, metric
        self._labels = labels or [None] * len(batches)
        self._budget, self._steps = budget, QuantizedSteps(model)
        self.found: dict[str, Pair] = {}
        self.runs = self.steps = self.peak = 0
        self.seen: set[str] = set()

    def measure(self, targets: Mapping[str, Sites], order: Callable[[Iterable[str]], Iterable[str]]) -> None:
        """Measure targets, in the order that ``order`` goes over their names; it may end early.

        Each target is measured on the batches of a chunk before the next one is, and is known for whole chunks only.
        """
        for first, chunk in self._chunks():
            last = first + len(chunk)
            for name in order([n for n in targets if n not in self.found or self.found[n].batches < last]):
                pair = self.found.get(name, Pair())
                skip = pair.batches - first
                only, without = _copy(pair.only), _copy(pair.without)
                for place, replay in list(enumerate(chunk))[max(skip, 0) :]:
                    self._add(only, replay, replay.only(targets[name]), first + place)
                    self._add(without, replay, replay.without(targets[name]), first + place)
                self.found[name] = Pair(only, without, last)

    def _add(self, into: Measured, replay: Replay, outputs: list[Array], place: int) -> None:
        into.add(replay.wanted, outputs)
        if self._metric is not None:
            into.values.append(self._metric.values(outputs, replay.wanted, self._labels[place]))

    def _chunks(self) -> Iterator[tuple[int, list[Replay]]]:
        store = Store(self._budget)
        chunk: list[Replay] = []
        first = 0
        try:
            for place, batch in enumerate(self._batches):
                replay = Replay(self._steps, *self._model.program(batch), store)
                self.seen.update(replay.places)
                self.steps += len(replay.program.steps)
                chunk.append(replay)
                self.peak = max(self.peak, store.peak)
                if store.used * (1 + 1 / len(chunk)) > _FULL * self._budget or place + 1 == len(self._batches):
                    yield first, chunk
                    self.runs += sum(replay.runs for replay in chunk)
                    first, chunk = place + 1, []
        finally:
            self.runs += sum(replay.runs for replay in chunk)
            store.close()


def _copy(one: Measured) -> Measured:
    return Measured(dict(one.noise), dict(one.signal), list(one.values))


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _array(value: Any) -> Array:
    """An output as an array; ``None`` for a sequence."""
    if not isinstance(value, Tensor):
        return np.empty(0, np.int64)
    half = (torch.float16, torch.bfloat16)
    return np.asarray((value.float() if value.dtype in half else value).detach().cpu().numpy())
