"""Analytic post-training methods for torch modules, under AIMET's names where it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.algorithms import bias_correct
from bitwright.algorithms.bias_correct import BiasReport, QuantParams
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
from bitwright.core.numerics.spec import Preset, QuantSpec, RangeMethod
from bitwright.core.placement.user_scheme import QuantScheme
from bitwright.progress import progress as bar
from bitwright.torch.adapters.bias_correct import TorchCorrectable
from bitwright.torch.adapters.view import TorchView
from bitwright.torch.batch_norm_fold import example_input, float_outputs, fold_all_batch_norms, what_changed
from bitwright.torch.calls.batches import model_device, to_device
from bitwright.torch.simulation.quantsim import QuantizationSimModel

Shapes = Sequence[int] | Sequence[Sequence[int]] | None


def _open(
    model: nn.Module, shapes: Shapes, dummy_input: Any, function: str
) -> tuple[TorchView, Callable[[], str | None]]:
    """A view of the model, and a check that says what has changed since now."""
    example = example_input(model, shapes, function) if dummy_input is None else dummy_input
    example = to_device(example, model_device(model))
    view = TorchView(model, [example])
    view.graph()  # explains an example that does not fit, before anything runs
    before = float_outputs(model, example)
    return view, lambda: what_changed(model, example, before)


def equalize_model(
    model: nn.Module,
    input_shapes: Shapes = None,
    dummy_input: Any = None,
    *,
    data: Iterable[Any] | None = None,
    absorb_bias: bool = False,
    progress: bool = True,
) -> EqualizeReport:
    """Fold batch norms, then balance the channel ranges of neighbouring layers, in place.

    The function of the model stays: its outputs on the example input are compared, and a group of layers that changes
    them is found and left alone. ReLU6 modules between equalized layers become a :class:`ChannelClamp` with a bound per
    channel. What was not equalized is in ``report.refused`` and in the log, with the reason.

    Args:
        model: changed in place.
        input_shapes: shape of the input, or a list of shapes for several; random inputs are made of them.
        dummy_input: one input instead: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        data: batches of real data, about 256 samples. Where no batch norm tells what the values of a layer are they are
            measured on it; without it the factors of these layers look at weights only.
        absorb_bias: also move high biases into the next layer, where batch norm or data tell how high they are. This
            changes the function a little (one activation in 740).
        progress: show a progress bar on a terminal.

    Returns:
        The report; ``report.undo()`` gives the folded model back.

    Raises:
        ModelError: neither ``input_shapes`` nor ``dummy_input``, or the model fails on the input.
        CalibrationError: ``data`` holds no batch, or gives NaN or infinite values.

    Where batch norms or data tell what a layer's values are, the factors are those of the least rounding noise, of weights
    and activations, at one scale per tensor; elsewhere they give both weights the same ranges.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.1.
    """
    example = example_input(model, input_shapes, "equalize_model") if dummy_input is None else dummy_input
    folds = fold_all_batch_norms(model, dummy_input=example, progress=progress)
    return equalize_bn_folded_model(
        model, None, folds, example, data=data, absorb_bias=absorb_bias, progress=progress
    )


def equalize_bn_folded_model(
    model: nn.Module,
    input_shapes: Shapes = None,
    folded_pairs: FoldReport | Mapping[str, tuple[Array, Array]] | None = None,
    dummy_input: Any = None,
    *,
    data: Iterable[Any] | None = None,
    absorb_bias: bool = False,
    progress: bool = True,
) -> EqualizeReport:
    """As :func:`equalize_model`, for a model whose batch norms are folded.

    Args:
        model, input_shapes, dummy_input, data, absorb_bias, progress: as for :func:`equalize_model`.
        folded_pairs: what ``fold_all_batch_norms`` returned, or layer -> mean and standard deviation of its output. Without
            it and without ``data`` the factors look at weights only, and ``absorb_bias`` moves nothing.

    Raises:
        ModelError, CalibrationError: as for :func:`equalize_model`.
    """
    view, check = _open(model, input_shapes, dummy_input, "equalize_bn_folded_model")
    moments = folded_pairs.moments if isinstance(folded_pairs, FoldReport) else folded_pairs
    return equalization.equalize(
        view,
        check,
        statistics=moments,
        data=data,
        absorb_bias=absorb_bias,
        bar=partial(bar, enabled=progress),
    )


def fold_norms(
    model: nn.Module,
    input_shapes: Shapes = None,
    dummy_input: Any = None,
    *,
    untie: bool = True,
    progress: bool = True,
) -> NormReport:
    """Fold the weights of layer and RMS norms into the linear layers behind them, in place.

    Args:
        model: changed in place; its function stays.
        input_shapes, dummy_input: as for :func:`equalize_model`.
        untie: give an output layer that shares its weight with the embedding a copy of its own.
        progress: show a progress bar on a terminal.

    Raises:
        ModelError: neither ``input_shapes`` nor ``dummy_input``, or the model fails on the input.
    """
    view, check = _open(model, input_shapes, dummy_input, "fold_norms")
    return norm_fold.fold_norms(view, check, untie=untie, bar=partial(bar, enabled=progress))


def smooth_model(
    model: nn.Module,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    alpha: float = 0.5,
    progress: bool = True,
) -> SmoothReport:
    """Move outliers of activations into the weights that read them (SmoothQuant), in place.

    Treated are norms and linear layers in front of linear layers, gates (SwiGLU) included, and the keys of attention
    against its queries. The function of the model stays; what changes it is found and left alone.

    Args:
        model: changed in place.
        data: batches of real data, as ``compute_encodings`` takes them; 128 samples are enough.
        dummy_input: the example input; the first batch by default.
        alpha: 0 to 1; how much of the difficulty goes to the weights.
        progress: show a progress bar on a terminal.

    Returns:
        The report; ``report.undo()`` gives the model back as it was.

    Raises:
        ConfigError: ``alpha`` is not between 0 and 1.
        CalibrationError: no batch, or an activation that is NaN or infinite.

    Reference: Xiao et al. 2023, arXiv:2211.10438.
    """
    batches = list(data)
    if not batches:
        smoothing.refuse_no_data()
    view, check = _open(model, None, batches[0] if dummy_input is None else dummy_input, "smooth_model")
    return smoothing.smooth(view, batches, check, alpha=alpha, bar=partial(bar, enabled=progress))


def awq_model(
    model: nn.Module,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    weight: str | Preset | QuantSpec = "w4a16",
    config_file: str | Path | dict[str, Any] | None = None,
    quant_scheme: str | QuantScheme | RangeMethod | None = None,
    alphas: int = 20,
    memory_budget: int = awq.MEMORY_BUDGET,
    progress: bool = True,
) -> AwqReport:
    """Scale channels so that the weights which read large activations lose less in rounding (AWQ), in place.

    For weights of 4 bits and less. Treated are norms and linear layers in front of linear layers, gates (SwiGLU) included,
    and the values of attention. Per group the exponent of the scales is searched that makes the outputs of the layers,
    with their weights quantized, differ least from the float ones. The function of the model stays.

    Args:
        model: changed in place.
        data: batches of real data, as ``compute_encodings`` takes them; 128 samples are enough.
        dummy_input: the example input; the first batch by default.
        weight: what the weights will be quantized to: a preset, its name, or the spec of the weights alone.
        config_file, quant_scheme: rules and range method of the simulation, as for :class:`QuantizationSimModel`.
        alphas: steps of the search from 0 to 1.
        memory_budget: bytes kept of what the layers read; 1 GiB by default.
        progress: show a progress bar on a terminal.

    Returns:
        The report; ``report.undo()`` gives the model back as it was.

    Raises:
        ConfigError: ``alphas`` is below 1, ``memory_budget`` too small, or an unknown preset.
        CalibrationError: no batch, or an activation that is NaN or infinite.

    Reference: Lin et al. 2023, arXiv:2306.00978.
    """
    batches = list(data)
    if not batches:
        smoothing.refuse_no_data("awq")
    rules = awq.weight_rules(weight, config_file, quant_scheme)
    view, check = _open(model, None, batches[0] if dummy_input is None else dummy_input, "awq_model")
    shown = partial(bar, enabled=progress)
    return awq.awq(view, batches, rules, check, alphas=alphas, memory_budget=memory_budget, bar=shown)


def rotate_model(
    model: nn.Module,
    input_shapes: Shapes = None,
    dummy_input: Any = None,
    *,
    seed: int = 0,
    streams: bool = True,
    heads: bool = True,
    progress: bool = True,
) -> RotateReport:
    """Spread outliers of a transformer over all channels by Hadamard rotations merged into its weights, in place.

    Norms are folded first. The residual stream is rotated where only RMS norms and linear layers read it, embedding and
    output layer included (which are untied), and the values of attention per head. Why something was not rotated is in
    ``report.refused`` and in the log.

    Args:
        model: changed in place; its function stays.
        input_shapes, dummy_input: as for :func:`equalize_model`.
        seed: of the signs.
        streams: rotate residual streams.
        heads: rotate the values of attention heads.
        progress: show a progress bar on a terminal.

    Returns:
        The report; ``report.undo()`` gives the model back as it was.

    Raises:
        ModelError: neither ``input_shapes`` nor ``dummy_input``, or the model fails on the input.

    Reference: Ashkboos et al. 2024, arXiv:2404.00456.
    """
    view, check = _open(model, input_shapes, dummy_input, "rotate_model")
    return rotation.rotate(
        view, check, seed=seed, streams=streams, heads=heads, bar=partial(bar, enabled=progress)
    )


def apply_spinquant(
    model: nn.Module,
    dummy_input: Any = None,
    *,
    enable_r1: bool = True,
    enable_r2: bool = False,
    **options: Any,
) -> RotateReport:
    """Rotations under AIMET's name: :func:`rotate_model`, of residual streams (R1) and of attention heads' values (R2)."""
    return rotate_model(model, None, dummy_input, streams=enable_r1, heads=enable_r2, **options)


def correct_bias(
    model: nn.Module,
    quant_params: QuantParams,
    num_quant_samples: int | None,
    data_loader: Iterable[Any],
    num_bias_correct_samples: int | None,
    conv_bn_dict: Mapping[str, tuple[Array, Array]] | None = None,
    perform_only_empirical_bias_corr: bool = True,
    layers_to_ignore: Iterable[str] | None = None,
    *,
    progress: bool = True,
) -> BiasReport:
    """Change the biases of a float model so that its quantized self makes no error in the mean.

    A simulation of the model is made and calibrated for it; layers without a bias get one. The corrected model is then
    simulated as any other.

    Args:
        model: batch norms folded; changed in place.
        quant_params: what is simulated.
        num_quant_samples: calibrate on so many samples; all with ``None``.
        data_loader: batches without labels; gone through twice.
        num_bias_correct_samples: measure means on so many samples; all with ``None``.
        conv_bn_dict: layer -> mean and standard deviation of its output, as ``moments`` of the report of
            :func:`fold_all_batch_norms` says; only the analytic form needs it.
        perform_only_empirical_bias_corr: ``False`` corrects the layers analytically whose input's mean follows from
            ``conv_bn_dict``, and only the others from data.
        layers_to_ignore: names of layers to leave alone.
        progress: show a progress bar on a terminal.

    Returns:
        What was corrected by how much, and what was left, with the reason.

    Raises:
        CalibrationError: no batch, or a mean that is NaN or infinite.
        ConfigError: a name in ``layers_to_ignore`` is no layer.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.2.
    """
    batches = list(data_loader)
    if not batches:
        bias_correct.refuse_no_data()
    view = TorchView(model, [batches[0]])
    undo = view.edit(bias_correct.missing_biases(view))
    try:
        sim = QuantizationSimModel(
            model, batches[0], quant_params.quant_scheme, quant_params.act_bw, quant_params.weight_bw,
            config_file=quant_params.config_file,
        )  # fmt: skip
        wanted = [batch for batch, _ in bias_correct.first_samples(batches, num_quant_samples)]
        sim.compute_encodings(wanted, progress=progress)
        report = apply_bias_correction(
            sim,
            batches,
            num_samples=num_bias_correct_samples,
            moments={} if perform_only_empirical_bias_corr else dict(conv_bn_dict or {}),
            layers_to_ignore=layers_to_ignore or (),
            progress=progress,
        )
    except BaseException:
        undo()
        raise
    view.refresh()
    corrected = TorchCorrectable(sim)
    for layer in Layers(view.graph()).of.values():
        if layer.op in report.corrected and layer.bias is not None:
            view.set_param(layer.bias, corrected.bias(layer))
    sim.remove()
    return report


def apply_bias_correction(
    sim: QuantizationSimModel,
    data: Iterable[Any],
    *,
    num_samples: int | None = None,
    moments: Mapping[str, tuple[Array, Array]] | None = None,
    layers_to_ignore: Iterable[str] = (),
    reference: nn.Module | None = None,
    progress: bool = True,
) -> BiasReport:
    """Take the mean error of every layer's output out of its bias, layer after layer; the last step of a recipe.

    Args:
        sim: calibrated; the biases of ``sim.model`` are changed in place.
        data: batches as ``compute_encodings`` takes them; 256 samples are enough.
        num_samples: use so many; all with ``None``.
        moments: layer -> mean and standard deviation of its output (from batch norms): layers whose input's mean follows
            from them are corrected analytically, without data, before the others.
        layers_to_ignore: names of layers to leave alone.
        reference: the float model that ``sim`` was made from; needed where a method has changed the weights of ``sim``
            since (AdaRound, GPTQ) or biases were corrected before. By default ``sim`` in float is the goal.
        progress: show a progress bar on a terminal.

    Returns:
        What was corrected by how much, and what was left, with the reason; a layer without a bias is left.

    Raises:
        CalibrationError: ``sim`` is not calibrated, no batch came, or a mean is NaN or infinite.
        ConfigError: a name in ``layers_to_ignore`` is no layer.
    """
    goal = (
        None
        if reference is None
        else QuantizationSimModel(reference, sim.examples[0], examples=sim.examples[1:])
    )
    return bias_correct.correct(
        TorchCorrectable(sim, goal),
        bias_correct.first_samples(data, num_samples),
        moments or {},
        layers_to_ignore,
        partial(bar, enabled=progress),
    )
