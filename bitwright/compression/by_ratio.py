"""Compression by a ratio for each layer: the part of its cost, or of its input channels, that it keeps.

Layers are factored without data; channels are removed by their L1 norms, and the layers that read them fitted by least squares
to their old results. Ratios are given, or found by a greedy search on scores of single layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.compression.checks import checked_dependencies
from bitwright.compression.costs import Prices
from bitwright.compression.groups import Group
from bitwright.compression.importance import Evidence, criterion
from bitwright.compression.prune import Selector, Widths, apply
from bitwright.compression.ratios import Scores, greedy, load_scores, measure_scores, monotonic, save_scores
from bitwright.compression.reconstruct import Original, estimate_batch_norms, reconstruct
from bitwright.compression.svd import Factored, LowRankLayer, SvdSpace
from bitwright.compression.widths import WidthSpace, lost
from bitwright.methods.front_end import front_end_of

Metric = Callable[[Any], float]


class GreedyRatios:
    """A greedy search of ratios on scores of single layers.

    Args:
        target: part of the whole cost that may be left.
        cost: ``macs`` or ``params``.
        candidates: ratios that are tried of each layer: 10 for 0.1, 0.2, ...
        saved: JSON file of scores of an earlier run.
        written: where the scores are written, as JSON.
        fit: make scores rise with the ratio first.
    """

    def __init__(
        self, target: float, cost: str, candidates: int, *, saved: str | Path | None, written: Path, fit: bool
    ) -> None:
        self.target, self.cost, self.saved, self.written, self.fit = target, cost, saved, written, fit
        self.offered = [k / candidates for k in range(1, candidates)]

    def search(
        self, space: Any, names: Sequence[str], metric: Metric, baseline: float, whole: float,
        cost_of: Callable[[Mapping[str, float]], float],
    ) -> tuple[dict[str, float], Scores]:  # fmt: skip
        """Ratios by layer, and the scores of every layer at every ratio."""
        known = None if self.saved is None else load_scores(self.saved, names)
        scores = measure_scores(space, metric, known)
        save_scores(self.written, scores)
        used = {name: monotonic(row) for name, row in scores.items()} if self.fit else scores
        return dict(greedy(used, cost_of, self.target * whole, baseline)), scores


class ChannelRatios:
    """The input channels of the convolutions of a model.

    Args:
        model: left as it is.
        example: an input.
        batches: what the layers that read removed channels are fitted on.
        multiple: what is left of a group of channels is a multiple of it.

    Attributes:
        read: convolution -> the channels that it reads, where they can be removed.
    """

    def __init__(self, model: Any, example: Any, batches: list[Any], multiple: int) -> None:
        front = front_end_of(model)
        self.structure, self._example, self._multiple = front.structured(model, example, None), example, multiple
        self.found = checked_dependencies(self.structure, example)
        types = {op.name: op.type for op in self.found.graph.ops}
        self.read: dict[str, Group] = {
            m.op: group for group in self.found.groups for m in group.readers if types.get(m.op) == "Conv"
        }
        self.prices = Prices(self.found.graph)
        self._original = Original(front.structured(model, example, None).view(), batches)

    def _selector(self, left_out: Collection[str], ratios: Sequence[float] | None) -> Selector:
        groups = list({g.name: g for g in self.read.values() if g.name not in left_out}.values())
        evidence = Evidence(self.found.graph, self.structure.param)
        scores = {group.name: criterion("l1")(group, evidence) for group in groups}
        return Selector(self.found, self.prices, groups, scores, widths=Widths(self._multiple), ratios=ratios)

    def search(
        self, metric: Metric, baseline: float, by: GreedyRatios, ignored: Collection[str | None]
    ) -> tuple[dict[str, float], Scores]:
        """Ratios of all convolutions but those ``ignored``, and the scores."""
        left_out = {group.name for layer, group in self.read.items() if layer in ignored}
        selector = self._selector(left_out, by.offered)
        space = WidthSpace(self.structure, selector, self._original.batches, self._original, True)
        first = {group.name: layer for layer, group in reversed(self.read.items())}
        space.parts = [replace(part, name=first[part.name]) for part in space.parts]

        def cost_of(ratios: Mapping[str, float]) -> float:
            return space.cost_of_cut(self._gone(selector, ratios))[by.cost]

        return by.search(
            space, [part.name for part in space.parts], metric, baseline, self.prices.whole[by.cost], cost_of
        )

    def _gone(self, selector: Selector, ratios: Mapping[str, float]) -> dict[str, Any]:
        """Group -> the units that go, so that these parts are left, in multiples."""
        removed = {}
        for layer, ratio in ratios.items():
            group = self.read[layer]
            left = max(1, round(group.units * ratio / self._multiple) * self._multiple)
            if left < group.units:
                removed[group.name] = np.sort(selector.order[group.name][: group.units - left])
        return removed

    def cut(self, ratios: Mapping[str, float]) -> tuple[Any, dict[str, float]]:
        """The model with these parts of the inputs of layers, and the part that every layer keeps."""
        removed = self._gone(self._selector((), None), ratios)
        if removed:
            readers, norms = lost(self.found, self.found.cut(removed), [self.found.group(name) for name in removed])
            apply(self.structure, self.found, removed, self._example)
            reconstruct(self._original, self.structure.view(), readers, progress=False)
            estimate_batch_norms(self._original, self.structure.view(), norms)
            self.structure.refresh()
        kept = {layer: 1 - len(removed.get(group.name, ())) / group.units for layer, group in self.read.items()}
        return self.structure.finished(), kept


class RankRatios(SvdSpace):
    """The layers of a model that can be factored in one form, without data.

    Args:
        opened: the model, which is changed.
        example: an input.
        form: see :class:`bitwright.compression.svd.SvdSpace`.
        cost: ``macs`` or ``params``: of what ratios are.
        offered: ratios of a search.
        multiple: ranks are multiples of it.
    """

    def __init__(
        self, opened: Any, example: Any, form: str, cost: str, offered: Sequence[float], multiple: int
    ) -> None:
        super().__init__(
            opened, [example], ratios=offered, forms=(form,), cost=cost, multiple=multiple, data_aware=False
        )  # fmt: skip

    def leave_out(self, ignored: Collection[str | None]) -> None:
        """Take layers out of the search; what they cost is spent whatever is chosen."""
        keep = [i for i, layer in enumerate(self.layers) if layer.name not in ignored]
        left_out = [part for i, part in enumerate(self.parts) if i not in keep]
        self.layers = [self.layers[i] for i in keep]
        self.fixed = {n: held + sum(part.options[0].costs[n] for part in left_out) for n, held in self.fixed.items()}
        self.parts = [self.parts[i] for i in keep]

    def factored(self, layer: LowRankLayer, ratio: float) -> Factored | None:
        """The layer at a ratio, or at rank 1 where that costs more; ``None`` where it saves nothing."""
        (form,) = self.forms
        found = layer.at(form, layer.ranks(form, ratio, self.cost, self.multiple))
        return found if getattr(found, self.cost) < getattr(layer, self.cost) else None

    def search(self, metric: Metric, baseline: float, by: GreedyRatios) -> tuple[dict[str, float], Scores]:
        """Ratios by layer, and the scores."""

        def cost_of(ratios: Mapping[str, float]) -> float:
            total = self.fixed[by.cost]
            for layer in self.layers:
                made = self.factored(layer, ratios[layer.name]) if ratios[layer.name] < 1 else None
                total += getattr(layer if made is None else made, by.cost)
            return float(total)

        return by.search(self, [layer.name for layer in self.layers], metric, baseline, self.whole[by.cost], cost_of)

    def put_ratios(self, ratios: Mapping[str, float]) -> list[Factored]:
        """Factor these layers in the model; those that save something."""
        picked = [self.factored(layer, ratios[layer.name]) for layer in self.layers if ratios.get(layer.name, 1) < 1]
        found = [one for one in picked if one is not None]
        self.put(found)
        return found
