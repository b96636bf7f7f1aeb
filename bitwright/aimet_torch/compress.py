"""AIMET's compression: ``ModelCompressor.compress_model`` and the classes of its parameters.

Layers are factored without data, as AIMET factors them; channels are removed by their L1 norms, and the layers that read them
fitted by least squares to their old results on the data; scores of layers are kept as JSON, never as a pickle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitwright.aimet_common.absent import differs
from bitwright.aimet_common.defs import CompressionScheme, CostMetric, GreedySelectionParameters, RankSelectScheme
from bitwright.compression.checks import checked_dependencies
from bitwright.compression.costs import Prices
from bitwright.compression.groups import Dependencies, Group
from bitwright.compression.importance import Evidence, criterion
from bitwright.compression.prune import Selector, Widths, apply
from bitwright.compression.ratios import Scores, greedy, load_scores, measure_scores, monotonic, save_scores
from bitwright.compression.ratios import checked_score as _checked_score
from bitwright.compression.reconstruct import Original, estimate_batch_norms, reconstruct
from bitwright.compression.svd import Factored, LowRankLayer, SvdSpace
from bitwright.compression.widths import WidthSpace, lost
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.front_end import front_end_of
from bitwright.torch.calls.inputs import model_device

#: where AIMET keeps the scores of a greedy search, as JSON
SCORES_FILE = Path("data", "greedy_selection_eval_scores_dict.json")
_FORMS = {CompressionScheme.spatial_svd: "spatial", CompressionScheme.weight_svd: "weight"}


@dataclass
class ModuleCompRatioPair:
    """A module, and which part of its cost it may keep (0 to 1)."""

    module: torch.nn.Module
    comp_ratio: float


class _Mode(Enum):
    """How ratios are chosen."""

    manual = 1
    auto = 2


@dataclass
class _ManualModeParams:
    """Ratios of modules that are given."""

    list_of_module_comp_ratio_pairs: Sequence[ModuleCompRatioPair]


@dataclass
class _AutoModeParams:
    """Ratios are chosen by the metric."""

    greedy_select_params: GreedySelectionParameters
    modules_to_ignore: Sequence[torch.nn.Module] = ()


class SpatialSvdParameters:
    """Parameters of :meth:`ModelCompressor.compress_model` for the scheme ``spatial_svd``.

    Args:
        mode: ``Mode.manual`` or ``Mode.auto``.
        params: ``ManualModeParams`` or ``AutoModeParams``.
        multiplicity: ranks are multiples of it.
    """

    Mode, ManualModeParams, AutoModeParams = _Mode, _ManualModeParams, _AutoModeParams

    def __init__(self, mode: _Mode, params: Any, multiplicity: int = 1) -> None:
        self.mode, self.mode_params, self.multiplicity = mode, params, multiplicity


class WeightSvdParameters(SpatialSvdParameters):
    """As :class:`SpatialSvdParameters`, for the scheme ``weight_svd``."""

    class AutoModeParams(_AutoModeParams):
        """Ratios are chosen by the metric; ``rank_select_scheme`` is ``greedy``."""

        def __init__(
            self,
            rank_select_scheme: RankSelectScheme,
            select_params: GreedySelectionParameters,
            modules_to_ignore: Sequence[torch.nn.Module] = (),
        ) -> None:
            super().__init__(select_params, modules_to_ignore)
            self.rank_select_scheme = rank_select_scheme


class ChannelPruningParameters(SpatialSvdParameters):
    """Parameters of the scheme ``channel_pruning``.

    Args:
        data_loader: batches, perhaps with labels.
        num_reconstruction_samples: samples that what is left is fitted on.
        allow_custom_downsample_ops: not needed: channels are removed from whole groups of layers.
        mode, params, multiplicity: as of :class:`SpatialSvdParameters`.
    """

    def __init__(
        self,
        data_loader: Iterable[Any],
        num_reconstruction_samples: int,
        allow_custom_downsample_ops: bool,
        mode: _Mode,
        params: Any,
        multiplicity: int = 1,
    ) -> None:
        super().__init__(mode, params, multiplicity)
        self.data_loader, self.num_reconstruction_samples = data_loader, num_reconstruction_samples
        self.allow_custom_downsample_ops = allow_custom_downsample_ops


@dataclass
class CompressionStats:
    """Result of a compression; prints as a table.

    Attributes:
        baseline_model_accuracy, compressed_model_accuracy: what the callback returned, as text of six digits.
        memory_compression_ratio, mac_compression_ratio: of the whole model, as text.
        per_layer_stats: one per layer.
        eval_scores_dictionary: layer -> ratio -> score, in automatic mode.
    """

    @dataclass
    class LayerStats:
        """A layer and the part of its cost that it keeps."""

        name: str
        compression_ratio: float

    baseline_model_accuracy: str
    compressed_model_accuracy: str
    memory_compression_ratio: str
    mac_compression_ratio: str
    per_layer_stats: list[LayerStats]
    eval_scores_dictionary: Scores | None = field(default=None, repr=False)

    def __str__(self) -> str:
        line = "*" * 94
        layers = "".join(f"    Name:{s.name}, compression-ratio: {s.compression_ratio}\n" for s in self.per_layer_stats)
        scores = ""
        if self.eval_scores_dictionary:
            rows = self.eval_scores_dictionary.items()
            scores = "\nGreedy Eval Scores\n" + "".join(f"    Name:{n}, scores: {row}\n" for n, row in rows) + line
        return (
            f"{line}\nCompressed Model Statistics\nBaseline model accuracy: {self.baseline_model_accuracy}, "
            f"Compressed model accuracy: {self.compressed_model_accuracy}\nCompression ratio for "
            f"memory={self.memory_compression_ratio}, mac={self.mac_compression_ratio}\n{line}\n\n"
            f"Per-layer Stats\n{layers}{line}\n{scores}"
        )


class ModelCompressor:
    """AIMET's entry to compression."""

    @staticmethod
    def compress_model(
        model: torch.nn.Module,
        eval_callback: Callable[..., float],
        eval_iterations: int | None,
        input_shape: Any,
        compress_scheme: CompressionScheme,
        cost_metric: CostMetric,
        parameters: SpatialSvdParameters,
        trainer: Any = None,
        visualization_url: str | None = None,
    ) -> tuple[torch.nn.Module, CompressionStats]:
        """A compressed copy of a model, and what it cost.

        Args:
            model: left as it is.
            eval_callback: ``eval_callback(model, eval_iterations, use_cuda=...)``, a number; higher is better.
            eval_iterations: handed on.
            input_shape: of the input, with the batch; or several shapes.
            compress_scheme: ``spatial_svd``, ``weight_svd`` or ``channel_pruning``.
            cost_metric: ``mac`` or ``memory``.
            parameters: of the scheme.
            trainer: ``trainer.train_model(model, layer, train_flag=True)`` is called for each layer that was compressed.
            visualization_url: no page is served; print the statistics.

        Raises:
            ConfigError: parameters of another scheme, a ratio that cannot be met (with the nearest that can), a module that is
                not in the model or cannot be compressed, with the reason.
            CalibrationError: the callback returns no finite number.
        """
        if visualization_url is not None:
            differs("visualization_url", "no page is served; print the statistics that compress_model returns")
        if compress_scheme not in _FORMS and compress_scheme is not CompressionScheme.channel_pruning:
            known = ", ".join(f"CompressionScheme.{scheme.name}" for scheme in CompressionScheme)
            raise ConfigError("compress_scheme", f"{compress_scheme!r} is not a scheme", f"use {known}")
        _check_parameters(compress_scheme, parameters)
        device = model_device(model)
        on_gpu = device is not None and device.type == "cuda"

        def metric(found: Any) -> float:
            return eval_callback(found, eval_iterations, use_cuda=on_gpu)

        baseline = _checked_score(metric, model, "original")
        if compress_scheme is CompressionScheme.channel_pruning:
            return _narrowed(model, metric, baseline, _inputs(model, input_shape), cost_metric, parameters, trainer)
        return _factored(
            model,
            metric,
            baseline,
            _inputs(model, input_shape),
            _FORMS[compress_scheme],
            cost_metric,
            parameters,
            trainer,
        )


def _check_parameters(scheme: CompressionScheme, parameters: Any) -> None:
    wanted = {
        CompressionScheme.spatial_svd: SpatialSvdParameters,
        CompressionScheme.weight_svd: WeightSvdParameters,
        CompressionScheme.channel_pruning: ChannelPruningParameters,
    }[scheme]
    if type(parameters) is not wanted:
        raise ConfigError(
            "parameters",
            f"{type(parameters).__name__} does not belong to the scheme {scheme.name}",
            f"pass {wanted.__name__}",
        )


def _inputs(model: torch.nn.Module, shape: Any) -> Any:
    """Random inputs of one shape, or of several."""
    device = model_device(model)
    if isinstance(shape, (list, tuple)) and shape and isinstance(shape[0], (list, tuple)):
        return tuple(torch.rand(*one, device=device) for one in shape)
    return torch.rand(*shape, device=device)


def _factored(
    model: torch.nn.Module,
    metric: Callable[[Any], float],
    baseline: float,
    example: Any,
    form: str,
    cost_metric: CostMetric,
    parameters: SpatialSvdParameters,
    trainer: Any,
) -> tuple[torch.nn.Module, CompressionStats]:
    names = {id(module): name for name, module in model.named_modules()}
    work = copy.deepcopy(model)
    opened = front_end_of(work).open_model(work, None, example, "compress_model", None)
    cost = "macs" if cost_metric is CostMetric.mac else "params"
    automatic = parameters.mode is SpatialSvdParameters.Mode.auto
    params = parameters.mode_params
    count = int(params.greedy_select_params.num_comp_ratio_candidates) if automatic else 1
    offered = [k / count for k in range(1, count)]
    space = SvdSpace(
        opened, [example], ratios=offered, forms=(form,), cost=cost, multiple=parameters.multiplicity, data_aware=False
    )  # fmt: skip
    by_name = {layer.name: layer for layer in space.layers}
    scores: Scores | None = None
    if automatic:
        _leave_out(space, {names.get(id(module)) for module in params.modules_to_ignore})
        ratios, scores = _chosen(space, metric, baseline, params.greedy_select_params, cost)
    else:
        ratios = _asked(space, names, params.list_of_module_comp_ratio_pairs)
    picked = [_layer(space, by_name[name], ratio) for name, ratio in ratios.items() if ratio < 1]
    found = [one for one in picked if one is not None]
    space.put(found)
    opened.view.refresh()
    for one in found if trainer is not None else ():
        trainer.train_model(work, work.get_submodule(one.layer), train_flag=True)
    return work, _statistics(space, found, baseline, _checked_score(metric, work, "compressed"), scores)


def _narrowed(
    model: torch.nn.Module,
    metric: Callable[[Any], float],
    baseline: float,
    example: Any,
    cost_metric: CostMetric,
    parameters: Any,
    trainer: Any,
) -> tuple[torch.nn.Module, CompressionStats]:
    """Input channels of convolutions go, with the layers before them; the convolutions are fitted to their old results."""
    names = {id(module): name for name, module in model.named_modules()}
    channels = _Channels(model, example, parameters)
    params = parameters.mode_params
    scores: Scores | None = None
    if parameters.mode is ChannelPruningParameters.Mode.auto:
        cost = "macs" if cost_metric is CostMetric.mac else "params"
        ignored = {names.get(id(module)) for module in params.modules_to_ignore}
        ratios, scores = channels.greedily(metric, baseline, params.greedy_select_params, cost, ignored)
    else:
        ratios = _asked_channels(channels.read, channels.found, names, params.list_of_module_comp_ratio_pairs)
    work, kept = channels.cut(ratios)
    if trainer is not None:
        for layer in (name for name, part in kept.items() if part < 1):
            trainer.train_model(work, work.get_submodule(layer), train_flag=True)
    left = channels.prices.left(channels.structure.graph())
    return work, CompressionStats(
        f"{baseline:f}",
        f"{_checked_score(metric, work, 'compressed'):f}",
        f"{left['params']:f}",
        f"{left['macs']:f}",
        [CompressionStats.LayerStats(layer, round(part, 4)) for layer, part in kept.items()],
        scores,
    )


class _Channels:
    """The input channels of the convolutions of a model.

    Attributes:
        read: convolution -> the channels that it reads, where they can be removed.
    """

    def __init__(self, model: torch.nn.Module, example: Any, parameters: ChannelPruningParameters) -> None:
        front = front_end_of(model)
        self.structure, self._example, self._multiple = (
            front.structured(model, example, None),
            example,
            parameters.multiplicity,
        )
        self.found = checked_dependencies(self.structure, example)
        types = {op.name: op.type for op in self.found.graph.ops}
        self.read = {m.op: group for group in self.found.groups for m in group.readers if types.get(m.op) == "Conv"}
        self.prices = Prices(self.found.graph)
        data = _images(parameters.data_loader, parameters.num_reconstruction_samples, model_device(model))
        self._original = Original(front.structured(model, example, None).view(), data)

    def _selector(self, left_out: Collection[str], ratios: Sequence[float] | None) -> Selector:
        groups = list({g.name: g for g in self.read.values() if g.name not in left_out}.values())
        evidence = Evidence(self.found.graph, self.structure.param)
        scores = {group.name: criterion("l1")(group, evidence) for group in groups}
        return Selector(self.found, self.prices, groups, scores, widths=Widths(self._multiple), ratios=ratios)

    def greedily(
        self, metric: Callable[[Any], float], baseline: float, given: GreedySelectionParameters, cost: str,
        ignored: Collection[str | None],
    ) -> tuple[dict[str, float], Scores]:  # fmt: skip
        """Ratios by AIMET's greedy search, and the scores, which are written down."""
        count = int(given.num_comp_ratio_candidates)
        left_out = {group.name for layer, group in self.read.items() if layer in ignored}
        selector = self._selector(left_out, [k / count for k in range(1, count)])
        space = WidthSpace(self.structure, selector, self._original.batches, self._original, True)
        first = {group.name: layer for layer, group in reversed(self.read.items())}
        space.parts = [replace(part, name=first[part.name]) for part in space.parts]
        scores, used = _scores(space, [part.name for part in space.parts], metric, given)

        def cost_of(ratios: Mapping[str, float]) -> float:
            return space.cost_of_cut(self._gone(selector, ratios))[cost]

        target = _checked_ratio("target_comp_ratio", given.target_comp_ratio)
        return greedy(used, cost_of, target * self.prices.whole[cost], baseline), scores

    def _gone(self, selector: Selector, ratios: Mapping[str, float]) -> dict[str, Any]:
        """Group -> the units that go, so that these parts are left, in multiples."""
        removed = {}
        for layer, ratio in ratios.items():
            group = self.read[layer]
            left = max(1, round(group.units * ratio / self._multiple) * self._multiple)
            if left < group.units:
                removed[group.name] = np.sort(selector.order[group.name][: group.units - left])
        return removed

    def cut(self, ratios: Mapping[str, float]) -> tuple[torch.nn.Module, dict[str, float]]:
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


def _images(loader: Iterable[Any], samples: int, device: Any) -> list[Any]:
    """Inputs of a data loader without its labels, until there are so many.

    Raises:
        CalibrationError: it holds none.
    """
    chosen: list[Any] = []
    count = 0
    for batch in loader:
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        images = images[: samples - count]
        chosen.append(images.to(device) if device is not None else images)
        count += len(images)
        if count >= samples:
            break
    if not count:
        raise CalibrationError("data_loader", "it held no image", "pass a loader of images, with labels or without")
    return chosen


def _asked_channels(
    read: Mapping[str, Group], found: Dependencies, names: Mapping[int, str], pairs: Iterable[ModuleCompRatioPair]
) -> dict[str, float]:
    """Ratios by name of convolution; of layers that read the same channels, one."""
    ratios: dict[str, float] = {}
    for pair in pairs:
        name = names.get(id(pair.module))
        if name is None:
            raise ConfigError("ModuleCompRatioPair", "its module is not in the model", "pass a module of this model")
        if name not in read:
            reasons = (
                "; ".join(str(r) for r in found.refused) or "it is not a convolution whose inputs a layer computes"
            )
            raise ConfigError(name, f"its input channels cannot be removed: {reasons}", "leave it out of the list")
        ratio = _checked_ratio(name, pair.comp_ratio)
        other = next((n for n, r in ratios.items() if read[n].name == read[name].name and r != ratio), None)
        if other is not None:
            raise ConfigError(
                name, f"it reads the same channels as {other}, with another ratio", f"give both {ratios[other]:g}"
            )  # fmt: skip
        ratios[name] = ratio
    return ratios


def _scores(
    space: Any, names: Sequence[str], metric: Callable[[Any], float], given: GreedySelectionParameters
) -> tuple[Scores, Scores]:
    """Scores of every layer at every ratio, read or measured, and written down; and the same made monotonic, if asked."""
    known = None if given.saved_eval_scores_dict is None else load_scores(given.saved_eval_scores_dict, names)
    scores = measure_scores(space, metric, known)
    save_scores(SCORES_FILE, scores)
    return scores, {name: monotonic(row) for name, row in scores.items()} if given.use_monotonic_fit else scores


def _statistics(
    space: SvdSpace, found: Sequence[Factored], baseline: float, score: float, scores: Scores | None
) -> CompressionStats:
    """Statistics of factored layers: cost saved of the whole model, and the fraction that each layer keeps."""
    by_name = {layer.name: layer for layer in space.layers}
    saved = {c: sum(getattr(by_name[f.layer], c) - getattr(f, c) for f in found) for c in ("macs", "params")}
    kept = {f.layer: round(getattr(f, space.cost) / getattr(by_name[f.layer], space.cost), 4) for f in found}
    return CompressionStats(
        f"{baseline:f}",
        f"{score:f}",
        f"{1 - saved['params'] / max(space.whole['params'], 1):f}",
        f"{1 - saved['macs'] / max(space.whole['macs'], 1):f}",
        [CompressionStats.LayerStats(layer.name, kept.get(layer.name, 1.0)) for layer in space.layers],
        scores,
    )


def _leave_out(space: SvdSpace, ignored: Collection[str | None]) -> None:
    """Take layers out of the search; what they cost is spent whatever is chosen."""
    keep = [i for i, layer in enumerate(space.layers) if layer.name not in ignored]
    left_out = [part for i, part in enumerate(space.parts) if i not in keep]
    space.layers = [space.layers[i] for i in keep]
    space.fixed = {n: held + sum(part.options[0].costs[n] for part in left_out) for n, held in space.fixed.items()}
    space.parts = [space.parts[i] for i in keep]


def _asked(space: SvdSpace, names: Mapping[int, str], pairs: Iterable[ModuleCompRatioPair]) -> Mapping[str, float]:
    """Ratios by name of layer, of pairs with a module of ``names``, which has their ids."""
    known = {layer.name for layer in space.layers}
    ratios: dict[str, float] = {}
    for pair in pairs:
        name = names.get(id(pair.module))
        if name is None:
            raise ConfigError("ModuleCompRatioPair", "its module is not in the model", "pass a module of this model")
        if name not in known:
            reason = space.found.refused.get(name, "it is not a layer that the model runs")
            raise ConfigError(name, f"it cannot be compressed: {reason}", "leave it out of the list")
        ratios[name] = _checked_ratio(name, pair.comp_ratio)
    return ratios


def _checked_ratio(name: str, ratio: Any) -> float:
    if not isinstance(ratio, (int, float, Decimal)) or not 0 < ratio <= 1:
        raise ConfigError(name, f"{ratio!r} is not a ratio", "write a number above 0, 1 at most")
    return float(ratio)


def _layer(space: SvdSpace, layer: LowRankLayer, ratio: float) -> Factored | None:
    """The layer at a ratio, or at rank 1 where that costs more."""
    (form,) = space.forms
    found = layer.at(form, layer.ranks(form, ratio, space.cost, space.multiple))
    return found if getattr(found, space.cost) < getattr(layer, space.cost) else None


def _chosen(
    space: SvdSpace, metric: Callable[[Any], float], baseline: float, given: GreedySelectionParameters, cost: str
) -> tuple[Mapping[str, float], Scores]:
    """Ratios by AIMET's greedy search, and the scores, which are written down."""
    scores, used = _scores(space, [layer.name for layer in space.layers], metric, given)

    def cost_of(ratios: Mapping[str, float]) -> float:
        total = space.fixed[cost]
        for layer in space.layers:
            made = _layer(space, layer, ratios[layer.name]) if ratios[layer.name] < 1 else None
            total += getattr(layer if made is None else made, cost)
        return float(total)

    target = _checked_ratio("target_comp_ratio", given.target_comp_ratio)
    return greedy(used, cost_of, target * space.whole[cost], baseline), scores
