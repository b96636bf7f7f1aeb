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

from bitwright.aimet_common.defs import CompressionScheme, CostMetric, GreedySelectionParameters, RankSelectScheme
from bitwright.aimet_common.names import differs
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
        example, cost = _inputs(model, input_shape), "macs" if cost_metric is CostMetric.mac else "params"
        if compress_scheme is CompressionScheme.channel_pruning:
            return _narrowed(model, metric, baseline, example, cost, parameters, trainer)
        return _factored(model, metric, baseline, example, _FORMS[compress_scheme], cost, parameters, trainer)


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


def _greedy(parameters: SpatialSvdParameters, cost: str) -> GreedyRatios | None:
    """The search that AIMET's parameters ask for; ``None`` where ratios are given."""
    if parameters.mode is not SpatialSvdParameters.Mode.auto:
        return None
    given = parameters.mode_params.greedy_select_params
    return GreedyRatios(
        _checked_ratio("target_comp_ratio", given.target_comp_ratio),
        cost,
        int(given.num_comp_ratio_candidates),
        saved=given.saved_eval_scores_dict,
        written=SCORES_FILE,
        fit=given.use_monotonic_fit,
    )


def _ignored(names: Mapping[int, str], parameters: SpatialSvdParameters) -> set[str | None]:
    return {names.get(id(module)) for module in parameters.mode_params.modules_to_ignore}


def _factored(
    model: torch.nn.Module,
    metric: Callable[[Any], float],
    baseline: float,
    example: Any,
    form: str,
    cost: str,
    parameters: SpatialSvdParameters,
    trainer: Any,
) -> tuple[torch.nn.Module, CompressionStats]:
    names = {id(module): name for name, module in model.named_modules()}
    work = copy.deepcopy(model)
    opened = front_end_of(work).open_model(work, None, example, "compress_model", None)
    by = _greedy(parameters, cost)
    space = RankRatios(opened, example, form, cost, () if by is None else by.offered, parameters.multiplicity)
    ratios: Mapping[str, float]
    scores: Scores | None = None
    if by is not None:
        space.leave_out(_ignored(names, parameters))
        ratios, scores = space.search(metric, baseline, by)
    else:
        ratios = _asked(space, names, parameters.mode_params.list_of_module_comp_ratio_pairs)
    layers = {layer.name: layer for layer in space.layers}
    found = space.put_ratios(ratios)
    opened.view.refresh()
    _train(trainer, work, [one.layer for one in found])
    saved = {c: sum(getattr(layers[f.layer], c) - getattr(f, c) for f in found) for c in ("macs", "params")}
    kept = {f.layer: round(getattr(f, cost) / getattr(layers[f.layer], cost), 4) for f in found}
    left = {c: 1 - saved[c] / max(space.whole[c], 1) for c in saved}
    parts = {name: kept.get(name, 1.0) for name in layers}
    return work, _statistics(baseline, _checked_score(metric, work, "compressed"), left, parts, scores)


def _narrowed(
    model: torch.nn.Module,
    metric: Callable[[Any], float],
    baseline: float,
    example: Any,
    cost: str,
    parameters: Any,
    trainer: Any,
) -> tuple[torch.nn.Module, CompressionStats]:
    """Input channels of convolutions go, with the layers before them; the convolutions are fitted to their old results."""
    names = {id(module): name for name, module in model.named_modules()}
    data = _images(parameters.data_loader, parameters.num_reconstruction_samples, model_device(model))
    channels = ChannelRatios(model, example, data, parameters.multiplicity)
    by, scores = _greedy(parameters, cost), None
    if by is not None:
        ratios, scores = channels.search(metric, baseline, by, _ignored(names, parameters))
    else:
        pairs = parameters.mode_params.list_of_module_comp_ratio_pairs
        ratios = _asked_channels(channels.read, channels.found, names, pairs)
    work, kept = channels.cut(ratios)
    _train(trainer, work, [name for name, part in kept.items() if part < 1])
    left = channels.prices.left(channels.structure.graph())
    score, parts = _checked_score(metric, work, "compressed"), {layer: round(part, 4) for layer, part in kept.items()}
    return work, _statistics(baseline, score, left, parts, scores)


def _train(trainer: Any, model: torch.nn.Module, layers: Iterable[str]) -> None:
    for layer in layers if trainer is not None else ():
        trainer.train_model(model, model.get_submodule(layer), train_flag=True)


def _statistics(
    baseline: float, score: float, left: Mapping[str, float], parts: Mapping[str, float], scores: Scores | None
) -> CompressionStats:
    """Statistics of a model of which these parts of cost are left, in all and by layer."""
    layers = [CompressionStats.LayerStats(*row) for row in parts.items()]
    return CompressionStats(
        f"{baseline:f}", f"{score:f}", f"{left['params']:f}", f"{left['macs']:f}", layers, scores
    )  # fmt: skip


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
