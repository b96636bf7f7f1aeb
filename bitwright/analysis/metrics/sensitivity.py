"""Measuring targets by running steps again, or by switching quantizers in the simulation, with a deadline and a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.analysis.metrics.exact import Exact, Measured, Pair, Sites
from bitwright.analysis.metrics.judged import Judged
from bitwright.analysis.metrics.kept import Kept
from bitwright.analysis.subject.data import Clock
from bitwright.analysis.subject.subject import Array, Subject
from bitwright.core.simulation.sites import Site
from bitwright.progress import progress as bar

if TYPE_CHECKING:
    from bitwright.algorithms.rounding.program import SimulatedModel


@dataclass
class Sensitivity:
    """What switching quantizers does to the outputs and to the metric.

    Attributes:
        subject, judged: the simulation, and what it is judged by.
        model: the simulation as steps; ``None`` where it has none, and quantizers are switched in the simulation.
        batches: data of the measurements.
        labels: of these batches.
        clock, kept, show: when to stop, where to keep what is known, and whether to show progress.
        budget: bytes of values in memory.
        pairs: target -> what was measured.
        metrics: target -> the user's function with only it, and with all but it.
        passes: forward passes over ``batches``.
        stopped: whether the time ended before all was measured, or Ctrl-C came.
    """

    subject: Subject
    judged: Judged
    model: SimulatedModel | None
    batches: Sequence[Any]
    labels: Sequence[Array | None]
    clock: Clock
    kept: Kept
    show: bool
    budget: int
    pairs: dict[str, Pair] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    passes: float = 0.0
    stopped: str = ""
    runs: int = 0
    peak: int = 0

    def load(self) -> int:
        """Take what an earlier analysis measured; returns how much."""
        found = self.kept.load()
        try:
            pairs = {name: Pair.from_dict(row) for name, row in found.get("pairs", {}).items()}
            metrics = {n: (float(a), float(b)) for n, (a, b) in found.get("metrics", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.kept.damaged(f"its measurements cannot be read ({error!r})") from error
        self.pairs.update(pairs)
        self.metrics.update(metrics)
        return len(self.pairs) + len(self.metrics)

    def measure(self, targets: Mapping[str, Sites]) -> None:
        """Measure targets, the first first, until all are done or the time is up."""
        try:
            if self.model is None:
                self._switch(targets)
            else:
                self._run_again(targets)
        except KeyboardInterrupt:
            self.stopped = "Ctrl-C"
        finally:
            self._save(now=True)

    def measure_metric(self, targets: Mapping[str, Sites]) -> None:
        """Call the user's function with only the sites of each target, and with all but them."""
        if self.judged.function is None or self.stopped:
            return
        todo = {name: sites for name, sites in targets.items() if name not in self.metrics}
        try:
            for name in self._order(todo, "metric"):
                inside = _among(todo[name])
                only = self.judged.switched(inside)
                self.metrics[name] = only, self.judged.switched(_not(inside))
        except KeyboardInterrupt:
            self.stopped = "Ctrl-C"
        finally:
            self._save(now=True)

    def _order(self, names: Iterable[str], title: str) -> Iterator[str]:
        for name in bar(list(names), title, self.show):
            if self.clock.over:
                self.stopped = self.stopped or f"the deadline of {self.clock.limit:g} s"
                return
            yield name
            self._save()

    def _run_again(self, targets: Mapping[str, Sites]) -> None:
        assert self.model is not None
        exact = Exact(self.model, self.batches, self.judged.named, self.labels, budget=self.budget)
        exact.found = self.pairs
        try:
            exact.measure(targets, lambda names: self._order(names, "quantizers"))
        finally:
            self.runs, self.peak = self.runs + exact.runs, max(self.peak, exact.peak)
            self.passes += exact.runs / max(exact.steps, 1)
        hidden = {name: sites for name, sites in targets.items() if not sites & exact.seen}
        if hidden and not self.stopped:  # in bodies of loops and branches: steps do not show them
            for name in hidden:
                self.pairs.pop(name, None)
            self._switch(hidden)

    def _switch(self, targets: Mapping[str, Sites]) -> None:
        wanted = [[np.array(y) for y in self.subject.outputs(batch, True)] for batch in self.batches]
        todo = [name for name in targets if name not in self.pairs]
        for name in self._order(todo, "quantizers"):
            inside = _among(targets[name])
            only = self._outputs(inside, wanted)
            without = self._outputs(_not(inside), wanted)
            self.pairs[name] = Pair(only, without, len(self.batches))
            self.passes += 2

    def _outputs(self, active: Callable[[Site], bool], wanted: Sequence[Sequence[Array]]) -> Measured:
        found = Measured()
        with self.subject.only(active):
            for batch, labels, reference in zip(self.batches, self.labels, wanted, strict=True):
                outputs = list(self.subject.outputs(batch, False))
                found.add(reference, outputs)
                if self.judged.named is not None:
                    found.values.append(self.judged.named.values(outputs, reference, labels))
        return found

    def _save(self, *, now: bool = False) -> None:
        if self.kept.due(now):
            self.kept.save({"pairs": {n: p.to_dict() for n, p in self.pairs.items()}, "metrics": self.metrics})


def _among(names: Sites) -> Callable[[Site], bool]:
    return lambda site: site.name in names


def _not(condition: Callable[[Site], bool]) -> Callable[[Site], bool]:
    return lambda site: not condition(site)
