"""Analytic post-training methods for ONNX models, under AIMET's names where it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from bitwright.algorithms import bias_correct
from bitwright.algorithms.bias_correct import BiasReport, QuantParams
from bitwright.algorithms.channels.batch_norm_affine import LAYERS
from bitwright.algorithms.channels.layers import Array, Layers
from bitwright.algorithms.folding import norm_fold
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.folding.norm_fold import NormReport
from bitwright.algorithms.scaling import awq
from bitwright.algorithms.scaling import equalize as equalization
from bitwright.algorithms.scaling import rotate as rotation
from bitwright.algorithms.scaling import smooth as smoothing
from bitwright.algorithms.scaling.awq import AwqReport
from bitwright.algorithms.scaling.equalize import EqualizeReport
from bitwright.algorithms.scaling.rotate import RotateReport
from bitwright.algorithms.scaling.smooth import SmoothReport
from bitwright.core.graph.graph import Graph
from bitwright.core.numerics.spec import Preset, QuantSpec, RangeMethod
from bitwright.core.placement.user_scheme import QuantScheme
from bitwright.core.simulation.protocols import Undo
from bitwright.errors import ModelError
from bitwright.onnx.adapters.bias_correct import OnnxCorrectable
from bitwright.onnx.batch_norm_fold import float_outputs, fold_all_batch_norms, give_back, what_changed
from bitwright.onnx.model.data import as_feeds, input_specs, random_feeds
from bitwright.onnx.model.load import Loaded, Source, load_model
from bitwright.onnx.model.session import Providers
from bitwright.onnx.model.view import OnnxView, measure_shapes
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.progress import progress as bar

Model = onnx.ModelProto | ir.Model | Loaded


def _loaded(model: Any, function: str) -> Loaded:
    if not isinstance(model, (onnx.ModelProto, ir.Model, Loaded)):
        raise ModelError(
            function,
            f"a {type(model).__name__} cannot be changed in place",
            "load the file first: model = onnx.load(path), or bitwright.onnx.load_model(path)",
        )
    return model if isinstance(model, Loaded) else load_model(model)


def _open(
    loaded: Loaded, dummy_input: Any, providers: Providers | None
) -> tuple[OnnxView, Callable[[], str | None]]:
    """A view of the model, and a check that says what has changed since now."""
    specs = input_specs(loaded.model)
    feeds = next(random_feeds(specs)) if dummy_input is None else as_feeds(dummy_input, specs, "dummy_input")
    view = OnnxView(loaded, providers, measure_shapes(loaded.model, feeds, providers))
    view.materialize(_computed_weights(view.graph()))
    before = float_outputs(view, feeds)
    return view, lambda: what_changed(view, feeds, before)


def _computed_weights(graph: Graph) -> Iterator[str]:
    """Weights that the model computes from constants, as a transposed initializer."""
    for op in graph.ops:
        for value in op.inputs[1:] if op.type in LAYERS else ():
            if value is not None and graph.values[value].kind == "constant" and graph.values[value].is_float:
                yield value


Report = TypeVar("Report", EqualizeReport, NormReport, SmoothReport, AwqReport, RotateReport)


def _finish(report: Report, view: OnnxView, model: Model) -> Report:
    """Make a change final and write it into what the caller gave."""
    report.keep()
    view.tidy()
    give_back(view.loaded, model)
    return report


def equalize_model(
    model: Model,
    dummy_input: Any = None,
    *,
    data: Iterable[Any] | None = None,
    absorb_bias: bool = False,
    providers: Providers | None = None,
    progress: bool = True,
) -> EqualizeReport:
    """Fold batch norms, then balance the channel ranges of neighbouring layers, in place.

    The function of the model stays: its outputs on the example input are compared, and a group of layers that changes
    them is found and left alone. A Clip between equalized layers becomes Relu and Min with a bound per channel. What was
    not equalized is in ``report.refused`` and in the log, with the reason.

    Args:
        model: changed in place; its functions are inlined and its constants become initializers.
        dummy_input: feeds of one run; random values where none are given.
        data: batches of real data, about 256 samples. Where no batch norm tells what the values of a layer are they are
            measured on it; without it the factors of these layers look at weights only.
        absorb_bias: also move high biases into the next layer, where batch norm or data tell how high they are. This
            changes the function a little (one activation in 740).
        providers: as ONNX Runtime takes them; the CPU by default.
        progress: show a progress bar on a terminal.

    Returns:
        The report. The change is final: load the file again to have the model as it was.

    Raises:
        ModelError: the model cannot be read or run, ``dummy_input`` does not fit, or ``model`` is a path.
        CalibrationError: ``data`` holds no batch, or gives NaN or infinite values.

    Where batch norms or data tell what a layer's values are, the factors are those of the least rounding noise, of weights
    and activations, at one scale per tensor; elsewhere they give both weights the same ranges.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.1.
    """
    loaded = _loaded(model, "equalize_model")
    _open(loaded, dummy_input, providers)  # an input that does not fit is refused before anything is folded
    folds = fold_all_batch_norms(loaded, dummy_input, providers=providers, progress=progress)
    report = equalize_bn_folded_model(
        loaded, folds, dummy_input, data=data, absorb_bias=absorb_bias, providers=providers, progress=progress
    )
    give_back(loaded, model)
    return report


def equalize_bn_folded_model(
    model: Model,
    folded_pairs: FoldReport | Mapping[str, tuple[Array, Array]] | None = None,
    dummy_input: Any = None,
    *,
    data: Iterable[Any] | None = None,
    absorb_bias: bool = False,
    providers: Providers | None = None,
    progress: bool = True,
) -> EqualizeReport:
    """As :func:`equalize_model`, for a model whose batch norms are folded.

    Args:
        model, dummy_input, data, absorb_bias, providers, progress: as for :func:`equalize_model`.
        folded_pairs: what ``fold_all_batch_norms`` returned, or layer -> mean and standard deviation of its output. Without
            it and without ``data`` the factors look at weights only, and ``absorb_bias`` moves nothing.

    Raises:
        ModelError, CalibrationError: as for :func:`equalize_model`.
    """
    view, check = _open(_loaded(model, "equalize_bn_folded_model"), dummy_input, providers)
    moments = folded_pairs.moments if isinstance(folded_pairs, FoldReport) else folded_pairs
    report = equalization.equalize(
        view,
        check,
        statistics=moments,
        data=data,
        absorb_bias=absorb_bias,
        bar=partial(bar, enabled=progress),
    )
    return _finish(report, view, model)


class CrossLayerScaling:
    """Equalization without anything before or after it, under AIMET's name.

    Args:
        model: batch norms folded; changed in place.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def scale_model(self, dummy_input: Any = None, **options: Any) -> EqualizeReport:
        """:func:`equalize_bn_folded_model` without high biases.

        Returns:
            The report, which :meth:`HighBiasFold.bias_fold` takes.

        Raises:
            ModelError: as for :func:`equalize_model`.
        """
        return equalize_bn_folded_model(self.model, None, dummy_input, **options)


class HighBiasFold:
    """High-bias absorption after equalization, under AIMET's name.

    Args:
        model: equalized; changed in place.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def bias_fold(
        self, cls_set_info_list: EqualizeReport, bn_layers: FoldReport | Mapping[str, tuple[Array, Array]]
    ) -> EqualizeReport:
        """Move what lies three standard deviations above zero into the next layer.

        Args:
            cls_set_info_list: what :meth:`CrossLayerScaling.scale_model` returned.
            bn_layers: what ``fold_all_batch_norms`` returned, or layer -> mean and standard deviation of its output.

        Returns:
            The same report; ``absorbed`` has the layers.

        Raises:
            ModelError: the model cannot be read or run.
        """
        moments = bn_layers.moments if isinstance(bn_layers, FoldReport) else bn_layers
        view, _ = _open(_loaded(self.model, "bias_fold"), None, None)
        equalization.absorb_biases(cls_set_info_list, moments, view)
        return _finish(cls_set_info_list, view, self.model)


def fold_norms(
    model: Model,
    dummy_input: Any = None,
    *,
    untie: bool = True,
    providers: Providers | None = None,
    progress: bool = True,
) -> NormReport:
    """Fold the weights of layer and RMS norms into the linear layers behind them, in place.

    Args:
        model: changed in place; its function stays.
        dummy_input, providers, progress: as for :func:`equalize_model`.
        untie: give an output layer that shares its weight with the embedding a copy of its own.

    Raises:
        ModelError: the model cannot be read or run, ``dummy_input`` does not fit, or ``model`` is a path.
    """
    view, check = _open(_loaded(model, "fold_norms"), dummy_input, providers)
    report = norm_fold.fold_norms(view, check, untie=untie, bar=partial(bar, enabled=progress))
    return _finish(report, view, model)


def smooth_model(
    model: Model,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    alpha: float = 0.5,
    providers: Providers | None = None,
    progress: bool = True,
) -> SmoothReport:
    """Move outliers of activations into the weights that read them (SmoothQuant), in place.

    Treated are norms and linear layers in front of linear layers, gates (SwiGLU) included, and the keys of attention
    against its queries. The function of the model stays; what changes it is found and left alone.

    Args:
        model: changed in place.
        data: feeds of real data, as ``compute_encodings`` takes them; 128 samples are enough.
        dummy_input: the example input; the first feed by default.
        alpha: 0 to 1; how much of the difficulty goes to the weights.
        progress: show a progress bar on a terminal.
        providers: as ONNX Runtime takes them; the CPU by default.

    Raises:
        ConfigError: ``alpha`` is not between 0 and 1.
        CalibrationError: no feed, or an activation that is NaN or infinite.
        ModelError: the model cannot be read or run, a feed does not fit, or ``model`` is a path.

    Reference: Xiao et al. 2023, arXiv:2211.10438.
    """
    batches = list(data)
    if not batches:
        smoothing.refuse_no_data()
    example = batches[0] if dummy_input is None else dummy_input
    view, check = _open(_loaded(model, "smooth_model"), example, providers)
    report = smoothing.smooth(view, batches, check, alpha=alpha, bar=partial(bar, enabled=progress))
    return _finish(report, view, model)


def awq_model(
    model: Model,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    weight: str | Preset | QuantSpec = "w4a16",
    config_file: str | Path | dict[str, Any] | None = None,
    quant_scheme: str | QuantScheme | RangeMethod | None = None,
    alphas: int = 20,
    memory_budget: int = awq.MEMORY_BUDGET,
    providers: Providers | None = None,
    progress: bool = True,
) -> AwqReport:
    """Scale channels so that the weights which read large activations lose less in rounding (AWQ), in place.

    For weights of 4 bits and less. Treated are norms and linear layers in front of linear layers, gates (SwiGLU) included,
    and the values of attention. Per group the exponent of the scales is searched that makes the outputs of the layers,
    with their weights quantized, differ least from the float ones. The function of the model stays.

    Args:
        model: changed in place.
        data: feeds of real data, as ``compute_encodings`` takes them; 128 samples are enough.
        dummy_input: the example input; the first feed by default.
        weight: what the weights will be quantized to: a preset, its name, or the spec of the weights alone.
        config_file, quant_scheme: rules and range method of the simulation, as for :class:`QuantizationSimModel`.
        alphas: steps of the search from 0 to 1.
        memory_budget: bytes kept of what the layers read; 1 GiB by default.
        providers: as ONNX Runtime takes them; the CPU by default.
        progress: show a progress bar on a terminal.

    Returns:
        The report. The change is final: load the file again to have the model as it was.

    Raises:
        ConfigError: ``alphas`` is below 1, ``memory_budget`` too small, or an unknown preset.
        CalibrationError: no feed, or an activation that is NaN or infinite.
        ModelError: the model cannot be read or run, a feed does not fit, or ``model`` is a path.

    Reference: Lin et al. 2023, arXiv:2306.00978.
    """
    batches = list(data)
    if not batches:
        smoothing.refuse_no_data("awq")
    rules = awq.weight_rules(weight, config_file, quant_scheme)
    example = batches[0] if dummy_input is None else dummy_input
    view, check = _open(_loaded(model, "awq_model"), example, providers)
    shown = partial(bar, enabled=progress)
    report = awq.awq(view, batches, rules, check, alphas=alphas, memory_budget=memory_budget, bar=shown)
    return _finish(report, view, model)


def rotate_model(
    model: Model,
    dummy_input: Any = None,
    *,
    seed: int = 0,
    streams: bool = True,
    heads: bool = True,
    providers: Providers | None = None,
    progress: bool = True,
) -> RotateReport:
    """Spread outliers of a transformer over all channels by Hadamard rotations merged into its weights, in place.

    Norms are folded first. The residual stream is rotated where only RMS norms and linear layers read it, embedding and
    output layer included (which are untied), and the values of attention per head. Why something was not rotated is in
    ``report.refused`` and in the log.

    Args:
        model: changed in place; its function stays.
        dummy_input, providers, progress: as for :func:`equalize_model`.
        seed: of the signs.
        streams: rotate residual streams.
        heads: rotate the values of attention heads.

    Raises:
        ModelError: the model cannot be read or run, ``dummy_input`` does not fit, or ``model`` is a path.

    Reference: Ashkboos et al. 2024, arXiv:2404.00456.
    """
    view, check = _open(_loaded(model, "rotate_model"), dummy_input, providers)
    report = rotation.rotate(
        view, check, seed=seed, streams=streams, heads=heads, bar=partial(bar, enabled=progress)
    )
    return _finish(report, view, model)


def apply_spinquant(
    model: Model, dummy_input: Any = None, *, enable_r1: bool = True, enable_r2: bool = False, **options: Any
) -> RotateReport:
    """Rotations under AIMET's name: :func:`rotate_model`, of residual streams (R1) and of attention heads' values (R2)."""
    return rotate_model(model, dummy_input, streams=enable_r1, heads=enable_r2, **options)


def apply_bias_correction(
    sim: QuantizationSimModel,
    data: Iterable[Any],
    *,
    num_samples: int | None = None,
    moments: Mapping[str, tuple[Array, Array]] | None = None,
    layers_to_ignore: Iterable[str] = (),
    reference: Source | None = None,
    progress: bool = True,
) -> BiasReport:
    """Take the mean error of every layer's output out of its bias, layer after layer; the last step of a recipe.

    Args:
        sim: calibrated; its biases are changed in place.
        data: feeds as ``compute_encodings`` takes them; 256 samples are enough.
        num_samples: use so many; all with ``None``.
        moments: layer -> mean and standard deviation of its output (from batch norms): layers whose input's mean follows
            from them are corrected analytically, without data, before the others.
        layers_to_ignore: names of nodes to leave alone.
        reference: the float model that ``sim`` was made from; needed where a method has changed the weights of ``sim``
            since (AdaRound, GPTQ) or biases were corrected before. By default ``sim`` in float is the goal.
        progress: show a progress bar on a terminal.

    Returns:
        What was corrected by how much, and what was left, with the reason; a layer without a bias is left.

    Raises:
        CalibrationError: ``sim`` is not calibrated, no feed came, or a mean is NaN or infinite.
        ConfigError: a name in ``layers_to_ignore`` is no layer.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.2.
    """
    goal = (
        None if reference is None else QuantizationSimModel(reference, sim.example(), providers=sim.providers)
    )
    return bias_correct.correct(
        OnnxCorrectable(sim, goal),
        bias_correct.first_samples(data, num_samples),
        moments or {},
        layers_to_ignore,
        partial(bar, enabled=progress),
    )


def correct_bias(
    model: Model,
    quant_params: QuantParams,
    num_quant_samples: int | None,
    data_loader: Iterable[Any],
    num_bias_correct_samples: int | None,
    conv_bn_dict: Mapping[str, tuple[Array, Array]] | None = None,
    perform_only_empirical_bias_corr: bool = True,
    layers_to_ignore: Iterable[str] | None = None,
    *,
    providers: Providers | None = None,
    progress: bool = True,
) -> BiasReport:
    """Change the biases of a float model so that its quantized self makes no error in the mean.

    A simulation of the model is made and calibrated for it; layers without a bias get one. The corrected model is then
    simulated as any other.

    Args:
        model: batch norms folded; changed in place.
        quant_params: what is simulated.
        num_quant_samples: calibrate on so many samples; all with ``None``.
        data_loader: feeds as ``compute_encodings`` takes them; gone through twice.
        num_bias_correct_samples: measure means on so many samples; all with ``None``.
        conv_bn_dict: layer -> mean and standard deviation of its output, as ``moments`` of the report of
            :func:`fold_all_batch_norms` says; only the analytic form needs it.
        perform_only_empirical_bias_corr: ``False`` corrects the layers analytically whose input's mean follows from
            ``conv_bn_dict``, and only the others from data.
        layers_to_ignore: names of nodes to leave alone.
        providers: as ONNX Runtime takes them; the CPU by default.
        progress: show a progress bar on a terminal.

    Returns:
        What was corrected by how much, and what was left, with the reason.

    Raises:
        CalibrationError: no feed, or a mean that is NaN or infinite; the model is left as it was.
        ConfigError: a name in ``layers_to_ignore`` is no layer.
        ModelError: the model cannot be read or run, or a feed does not fit.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.2.
    """
    feeds = list(data_loader)
    if not feeds:
        bias_correct.refuse_no_data()
    view, _ = _open(_loaded(model, "correct_bias"), feeds[0], providers)
    _, undo = _add_zeros(view)
    try:
        sim = QuantizationSimModel(
            view.model, feeds[0], quant_params.quant_scheme, quant_params.weight_bw, quant_params.act_bw,
            quant_params.config_file, providers,
        )  # fmt: skip
        wanted = [feed for feed, _ in bias_correct.first_samples(feeds, num_quant_samples)]
        sim.compute_encodings(wanted, progress=progress)
        report = apply_bias_correction(
            sim,
            feeds,
            num_samples=num_bias_correct_samples,
            moments={} if perform_only_empirical_bias_corr else conv_bn_dict,
            layers_to_ignore=layers_to_ignore or (),
            progress=progress,
        )
    except BaseException:
        undo()
        raise
    corrected = OnnxCorrectable(sim)
    for layer in Layers(sim.graph).of.values():
        if layer.op in report.corrected and layer.bias is not None:
            view.set_param(layer.bias, corrected.bias(layer))
    give_back(view.loaded, model)
    return report


def add_biases(
    model: Model, dummy_input: Any = None, *, providers: Providers | None = None
) -> tuple[str, ...]:
    """Give every layer without a bias one of zeros, in place, so that bias correction can treat it.

    Returns:
        Names of the nodes.

    Raises:
        ModelError: the model cannot be read or run, ``dummy_input`` does not fit, or ``model`` is a path.
    """
    view, _ = _open(_loaded(model, "add_biases"), dummy_input, providers)
    added, _ = _add_zeros(view)
    give_back(view.loaded, model)
    return added


def _add_zeros(view: OnnxView) -> tuple[tuple[str, ...], Undo]:
    """Biases of zeros where layers have none: names of the layers, and how to take them back."""
    edits = bias_correct.missing_biases(view)
    return tuple(edit.op for edit in edits), view.edit(edits)
