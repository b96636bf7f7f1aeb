"""Search space of widths: costs of consecutive layers multiply, and errors are measured on the cut model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from bitwright.compression.costs import Prices
from bitwright.compression.groups import Cut, Dependencies, Group
from bitwright.compression.importance import channel_axis
from bitwright.compression.ratios import Option, Part, Space
from bitwright.compression.reconstruct import Original, estimate_batch_norms, reconstruct
from bitwright.core.graph.graph import Graph, reached
from bitwright.core.simulation.calibration import samples_in
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.core.simulation.output_quality import noise_and_signal, quality, varying_share
from bitwright.export.files.manifest import fingerprint
from bitwright.methods.bias_correction import first_samples
from bitwright.methods.front_end import Blocks, Kept, Structured

_OPTIONS = 10  # of one group, at most
_JUDGED = 64  # samples that choices are measured on


def lost(
    found: Dependencies, cut: Cut, groups: Iterable[Group]
) -> tuple[dict[str, Array | None], dict[str, Array | None]]:
    """Layers that read ``groups``, and batch norms behind the cut -> the kept outputs, ``None`` for all."""
    known = {op.name: op for op in found.graph.ops}

    def left(name: str, channel: int) -> Array | None:
        axes = cut.axes(known[name].outputs[0])
        return axes[channel] if axes else None

    readers = {
        name: left(name, channel_axis(known[name])) for name in dict.fromkeys(m.op for g in groups for m in g.readers)
    }

    def results(value: str) -> list[str]:
        return [made for op, _ in found.graph.consumers(value) for made in op.outputs]

    behind = reached((value for value in found.graph.values if cut.axes(value)), results)
    norms = {
        op.name: left(op.name, 1)
        for op in found.graph.ops
        if op.type == "BatchNormalization" and op.inputs[0] in behind
    }
    return readers, norms


def cut_graph(graph: Graph, kept: Kept) -> Graph:
    """The graph with the shapes after a cut."""
    values = dict(graph.values)
    for name, value in graph.values.items():
        if kept.axes(name):
            values[name] = replace(value, shape=kept.shape(name, value.shape))
    return Graph(graph.ops, values, graph.inputs, graph.outputs)


def counts_of(units: int, step: int, most: int) -> list[int]:
    """Numbers of units that may go, from none on: those that leave multiples of ``step``, at most :data:`_OPTIONS` of them."""
    left = [n for n in range(units // step * step, 0, -step) if units - n <= most]
    counts = sorted({0, *(units - n for n in left)})
    return [counts[i] for i in np.unique(np.linspace(0, len(counts) - 1, _OPTIONS + 1).round().astype(int))]


def few_batches(batches: Iterable[Any]) -> list[Any]:
    """Read the first batches, up to the number of samples on which choices are measured."""
    return [batch for batch, _ in first_samples(batches, _JUDGED)]


def output_noise(
    structure: Structured | Blocks, batches: Sequence[Any], wanted: Sequence[Sequence[Array]]
) -> float | None:
    """Noise over signal of a model's outputs against ``wanted``, the mean over batches and outputs; ``None`` without numbers.

    States of recurrent layers that have fewer units than before are left out.
    """
    found = []
    for batch, outputs in zip(batches, wanted, strict=True):
        for y, y0 in zip(structure.outputs(batch), outputs, strict=True):
            if y0.dtype.kind == "f" and y0.size and y.shape == y0.shape:
                signal = float(np.square(y0, dtype=np.float64).sum())
                found.append(float(np.square(y.astype(np.float64) - y0).sum()) / max(signal, 1e-300))
    return float(np.mean(found)) if found else None


def noise_exceeds_variation(
    structure: Structured | Blocks, batches: Sequence[Any], wanted: Sequence[Sequence[Array]]
) -> bool:
    """Whether the noise of an output is larger than what differs in it between samples."""
    counts = [samples_in(batch) for batch in batches]
    for own, made in zip(zip(*wanted, strict=True), zip(*map(structure.outputs, batches), strict=True), strict=True):
        if all(y0.dtype.kind == "f" and y.shape == y0.shape for y0, y in zip(own, made, strict=True)):
            noise, signal = zip(*(noise_and_signal(y0, y) for y0, y in zip(own, made, strict=True)), strict=True)
            part = quality("output", noise, signal, varying_share(own, counts))
            if part is not None and part.noise_exceeds_variation:
                return True
    return False


class Units(Protocol):
    """Interface of a selection of removable units; see :class:`bitwright.compression.prune.Selector`."""

    found: Dependencies
    prices: Prices
    scores: Mapping[str, Array]
    order: dict[str, Array]

    def sets(self) -> list[list[Group]]:
        """Sets of groups that lose equally many units."""

    def counts(self, groups: Sequence[Group]) -> list[int]:
        """Numbers of units that may be removed from each of ``groups``, ascending from 0."""


class WidthSpace(Space):
    """The groups of a model, each as it is or with fewer units.

    Args:
        structure: the model; as it was after each trial.
        selector: which units of each group go first, how many at once, and what cut graphs cost.
        batches: data that choices are measured on.
        original: what layers of the cut model are fitted to; ``None`` leaves them as they are.
        batch_norms: move their statistics.
        wanted: what the model makes of ``batches`` before any cut; computed where it is not given.
    """

    def __init__(
        self,
        structure: Structured,
        selector: Units,
        batches: Sequence[Any],
        original: Original | None,
        batch_norms: bool,
        wanted: Sequence[Sequence[Array]] | None = None,
    ) -> None:
        self.structure, self.selector, self.found = structure, selector, selector.found
        self._batches, self._original, self._batch_norms = batches, original, batch_norms
        self._wanted = [structure.outputs(batch) for batch in batches] if wanted is None else wanted
        self._seen: dict[tuple[int, ...], dict[str, float]] = {}
        self._last: tuple[tuple[int, ...], Graph] | None = None
        self.sets, self.counts = [], []
        for groups in selector.sets():
            counts = selector.counts(groups)
            if len(counts) > 1:
                self.sets.append(list(groups))
                self.counts.append(counts)
        self._n = len(self.sets)
        self.fixed = dict.fromkeys(selector.prices.whole, 0.0)
        self.parts = [self._part(i, selector.scores) for i in range(self._n)]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data and of the model's outputs."""
        return fingerprint([self._batches, self._wanted])

    def _part(self, i: int, scores: Mapping[str, Array]) -> Part:
        groups, counts = self.sets[i], self.counts[i]
        energy = []  # share of squared scores that goes with so many units
        for group in groups:
            sorted_scores = np.square(np.asarray(scores[group.name], np.float64)[self.selector.order[group.name]])
            total = max(float(sorted_scores.sum()), 1e-300)
            energy.append(np.concatenate([[0.0], np.cumsum(sorted_scores)])[counts] / total)
        errors = np.maximum.accumulate(np.mean(energy, 0))
        alone = [[0] * i + [k] + [0] * (self._n - i - 1) for k in range(len(counts))]
        options = [
            Option(f"{groups[0].units - n} of {groups[0].units}", self.costs_of(choice), float(e), 1 - n / groups[0].units, n)
            for n, e, choice in zip(counts, errors, alone, strict=True)
        ]  # fmt: skip
        return Part(", ".join(g.name for g in groups), tuple(options))

    def removed(self, choice: Sequence[int]) -> dict[str, Array]:
        """Group -> removed units."""
        return {
            group.name: np.sort(self.selector.order[group.name][: counts[k]])
            for groups, counts, k in zip(self.sets, self.counts, choice, strict=True)
            for group in groups
            if k
        }

    def nearest(self, removed: Mapping[str, Array]) -> list[int]:
        """The nearest choice that removes at least as many units of every group."""
        choice = []
        for groups, counts in zip(self.sets, self.counts, strict=True):
            wanted = max(len(removed.get(g.name, ())) for g in groups)
            choice.append(next((k for k, n in enumerate(counts) if n >= wanted), len(counts) - 1))
        return choice

    def graph_of(self, choice: Sequence[int]) -> Graph:
        """The cut graph."""
        key = tuple(choice)
        if self._last is None or self._last[0] != key:
            self._last = key, cut_graph(self.found.graph, self.found.cut(self.removed(choice)))
        return self._last[1]

    def costs_of(self, choice: Sequence[int]) -> dict[str, float]:
        """Costs of the cut graph."""
        key = tuple(choice)
        if key not in self._seen:
            self._seen[key] = self.selector.prices(self.graph_of(choice))
        return self._seen[key]

    def cost_of_cut(self, removed: Mapping[str, Array]) -> dict[str, float]:
        """Costs of the graph without these units."""
        return self.selector.prices(cut_graph(self.found.graph, self.found.cut(removed)))

    def around(
        self, choice: Sequence[int], prices: Prices | None = None
    ) -> Mapping[str, tuple[Sequence[Sequence[float]], float]]:
        """Every option is tried with the others at ``choice``; costs are of degree two in the units of a group.

        Args:
            choice: an option per group.
            prices: of cut graphs, instead of the selector's.
        """

        cost = self.costs_of if prices is None else lambda choice: prices(self.graph_of(choice))
        here = cost(choice)
        rows: dict[str, list[list[float]]] = {name: [] for name in here}
        rest = {name: -(self._n - 1) * here[name] for name in here}
        for i, counts in enumerate(self.counts):
            at = sorted({0, len(counts) // 2, len(counts) - 1})
            costs = [cost([*choice[:i], k, *choice[i + 1 :]]) for k in at]
            for name in here:
                curve = np.polynomial.Polynomial.fit([counts[k] for k in at], [c[name] for c in costs], len(at) - 1)
                row = curve(np.asarray(counts, float))
                rest[name] += float(row[-1])
                rows[name].append((row - row[-1]).tolist())
        return {name: (rows[name], rest[name]) for name in here}

    def apply(self, choice: Sequence[int]) -> Undo:
        """Cut the model, and fit the rest to the original."""
        removed = self.removed(choice)
        if not removed:
            return lambda: None
        cut = self.found.cut(removed)
        groups = [self.found.group(name) for name in removed]
        undos: list[Undo] = [self.structure.cut(cut)]
        if self._original is not None:
            readers, norms = lost(self.found, cut, groups)
            view = self.structure.view()
            reconstruct(self._original, view, readers, progress=False, undos=undos)
            if self._batch_norms:
                estimate_batch_norms(self._original, view, norms, undos)

        def undo() -> None:
            while undos:
                undos.pop()()

        return undo

    def noise(self) -> float:
        """Noise-to-signal power ratio of the outputs, mean over batches and outputs."""
        return output_noise(self.structure, self._batches, self._wanted) or 0.0

    def runnable(self) -> Any:
        """The argument of the metric."""
        return self.structure.metric_target()
