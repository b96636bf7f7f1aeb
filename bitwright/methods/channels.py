"""Methods that move scales between layers and leave the function of the model as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bitwright.algorithms.channels.layers import Array
from bitwright.algorithms.folding import norm_fold
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.folding.norm_fold import NormReport
from bitwright.algorithms.front_ends import Opened
from bitwright.algorithms.scaling import awq
from bitwright.algorithms.scaling import equalize as equalization
from bitwright.algorithms.scaling import rotate as rotation
from bitwright.algorithms.scaling import smooth as smoothing
from bitwright.algorithms.scaling.awq import AwqReport
from bitwright.algorithms.scaling.equalize import EqualizeReport
from bitwright.algorithms.scaling.rotate import RotateReport
from bitwright.algorithms.scaling.smooth import SmoothReport
from bitwright.core.numerics.spec import Preset, QuantSpec, RangeMethod
from bitwright.errors import checks_arguments
from bitwright.methods.front_end import front_end_of
from bitwright.progress import progress as bar


@checks_arguments
def equalize_model(
    model: Any,
    input_shapes: Any = None,
    dummy_input: Any = None,
    *,
    data: Iterable[Any] | None = None,
    folds: FoldReport | Mapping[str, tuple[Array, Array]] | None = None,
    absorb_bias: bool = False,
    keep_bounds: bool = False,
    providers: Any = None,
    progress: bool = True,
) -> EqualizeReport:
    """Fold batch norms, then balance the channel ranges of neighbouring layers, in place.

    The function of the model stays: its outputs on the example input are compared, and a group of layers that changes
    them is found and left alone. A ReLU6 between equalized layers becomes a clamp with a bound per channel. What was not
    equalized is in ``report.refused`` and in the log, with the reason.

    Args:
        model: changed in place: a ``torch.nn.Module``, an ``onnx.ModelProto``, an ``onnx_ir.Model`` or a ``Loaded`` one. Of an
            ONNX model functions are inlined, and constants become initializers.
        input_shapes: shape of the input of a module, or a list of shapes for several; random inputs are made of them. An
            ONNX model knows its shapes: the second argument is its example input.
        dummy_input: one input instead. Of a module a tensor, a tuple of positional arguments, or a dict of keyword
            arguments; of an ONNX model its feeds, random values by default.
        data: batches of real data, about 256 samples. Where no batch norm tells what the values of a layer are they are
            measured on it; without it the factors of these layers look at weights only.
        folds: what :func:`fold_all_batch_norms` returned, where the batch norms of this model are folded already; or layer ->
            mean and standard deviation of its output.
        absorb_bias: also move high biases into the next layer, where batch norm or data tell how high they are. This
            changes the function a little (one activation in 740).
        keep_bounds: let a ReLU6 cut all channels at 6, as integer kernels do without an operator of its own; needs ``data``.
            Channels then only grow, at most to half of the bound where they came less near to it on ``data``, so that values
            twice as large as any that was seen are cut as well.
        providers: of ONNX Runtime, for an ONNX model; the CPU by default.
        progress: show a progress bar on a terminal.

    Returns:
        The report; of a module ``report.undo()`` gives the folded model back. The change of an ONNX model is final.

    Raises:
        ModelError: a module without ``input_shapes`` and ``dummy_input``, a path, or a model that cannot be read or run
            on the input.
        CalibrationError: ``data`` holds no batch, or gives NaN or infinite values.
        ConfigError: ``keep_bounds`` without ``data``.

    Where batch norms or data tell what a layer's values are, the factors are those of the least rounding noise, of weights
    and activations, at one scale per tensor; elsewhere they give both weights the same ranges.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.1.
    """
    opened = front_end_of(model).open_model(model, input_shapes, dummy_input, "equalize_model", providers)
    known = folds.moments if isinstance(folds, FoldReport) else folds or {}
    moments = {**known, **opened.fold(progress).moments}
    return equalize_opened(opened, moments, progress, data=data, absorb_bias=absorb_bias, keep_bounds=keep_bounds)


def equalize_opened(
    opened: Opened, moments: Mapping[str, tuple[Array, Array]] | None, progress: bool, **options: Any
) -> EqualizeReport:
    """:func:`bitwright.algorithms.scaling.equalize.equalize` of a model that is open, with its ``options``."""
    report = equalization.equalize(
        opened.view, opened.changed, statistics=moments, bar=partial(bar, enabled=progress), **options
    )
    opened.finish(report)
    return report


@checks_arguments
def fold_norms(
    model: Any,
    input_shapes: Any = None,
    dummy_input: Any = None,
    *,
    untie: bool = True,
    providers: Any = None,
    progress: bool = True,
) -> NormReport:
    """Fold the weights of layer and RMS norms into the linear layers after them, in place.

    Args:
        model: changed in place; its function stays.
        input_shapes, dummy_input, providers: as for :func:`equalize_model`.
        untie: give an output layer that shares its weight with the embedding a copy of its own.
        progress: show a progress bar on a terminal.

    Raises:
        ModelError: as for :func:`equalize_model`.
    """
    opened = front_end_of(model).open_model(model, input_shapes, dummy_input, "fold_norms", providers)
    report = norm_fold.fold_norms(opened.view, opened.changed, untie=untie, bar=partial(bar, enabled=progress))
    opened.finish(report)
    return report


@checks_arguments
def smooth_model(
    model: Any,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    alpha: float = 0.5,
    providers: Any = None,
    progress: bool = True,
) -> SmoothReport:
    """Move outliers of activations into the weights that read them (SmoothQuant), in place.

    Treated are norms and linear layers in front of linear layers, gates (SwiGLU) included, and the keys of attention
    against its queries. The function of the model stays; what changes it is found and left alone.

    Args:
        model: changed in place.
        data: batches (feeds) of real data, as ``compute_encodings`` takes them; 128 samples are enough.
        dummy_input: the example input; the first batch by default.
        alpha: 0 to 1; how much of the difficulty goes to the weights.
        providers: as for :func:`equalize_model`.
        progress: show a progress bar on a terminal.

    Returns:
        The report; of a module ``report.undo()`` gives it back as it was. The change of an ONNX model is final.

    Raises:
        ConfigError: ``alpha`` is not between 0 and 1.
        CalibrationError: no batch, or an activation that is NaN or infinite.

    Reference: Xiao et al. 2023, arXiv:2211.10438.
    """
    batches = list(data)
    if not batches:
        smoothing.refuse_no_data()
    example = batches[0] if dummy_input is None else dummy_input
    opened = front_end_of(model).open_model(model, None, example, "smooth_model", providers)
    report = smoothing.smooth(opened.view, batches, opened.changed, alpha=alpha, bar=partial(bar, enabled=progress))
    opened.finish(report)
    return report


@checks_arguments
def awq_model(
    model: Any,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    weight: str | Preset | QuantSpec = "w4a16",
    config_file: str | Path | dict[str, Any] | None = None,
    quant_scheme: str | RangeMethod | None = None,
    alphas: int = 20,
    memory_budget: int = awq.MEMORY_BUDGET,
    providers: Any = None,
    progress: bool = True,
) -> AwqReport:
    """Scale channels so that the weights which read large activations lose less in rounding (AWQ), in place.

    For weights of 4 bits and less. Treated are norms and linear layers in front of linear layers, gates (SwiGLU) included,
    and the values of attention. Per group the exponent of the scales is searched that makes the outputs of the layers,
    with their weights quantized, differ least from the float ones. The function of the model stays.

    Args:
        model: changed in place.
        data: batches (feeds) of real data, as ``compute_encodings`` takes them; 128 samples are enough.
        dummy_input: the example input; the first batch by default.
        weight: what the weights will be quantized to: a preset, its name, or the spec of the weights alone.
        config_file, quant_scheme: rules and range method of the simulation, as for :class:`QuantizationSimModel`.
        alphas: steps of the search from 0 to 1.
        memory_budget: bytes kept of what the layers read; 1 GiB by default.
        providers: as for :func:`equalize_model`.
        progress: show a progress bar on a terminal.

    Returns:
        The report; of a module ``report.undo()`` gives it back as it was. The change of an ONNX model is final.

    Raises:
        ConfigError: ``alphas`` is below 1, ``memory_budget`` too small, or an unknown preset.
        CalibrationError: no batch, or an activation that is NaN or infinite.

    Reference: Lin et al. 2023, arXiv:2306.00978.
    """
    batches = list(data)
    if not batches:
        smoothing.refuse_no_data("awq")
    rules = awq.weight_rules(weight, config_file, quant_scheme)
    example = batches[0] if dummy_input is None else dummy_input
    opened = front_end_of(model).open_model(model, None, example, "awq_model", providers)
    report = awq.awq(
        opened.view, batches, rules, opened.changed, alphas=alphas, memory_budget=memory_budget,
        bar=partial(bar, enabled=progress),
    )  # fmt: skip
    opened.finish(report)
    return report


@checks_arguments
def rotate_model(
    model: Any,
    input_shapes: Any = None,
    dummy_input: Any = None,
    *,
    seed: int = 0,
    streams: bool = True,
    heads: bool = True,
    providers: Any = None,
    progress: bool = True,
) -> RotateReport:
    """Spread outliers of a transformer over all channels by Hadamard rotations merged into its weights, in place.

    Norms are folded first. The residual stream is rotated where only RMS norms and linear layers read it, embedding and
    output layer included (which are untied), and the values of attention per head. Why something was not rotated is in
    ``report.refused`` and in the log.

    Args:
        model: changed in place; its function stays.
        input_shapes, dummy_input, providers: as for :func:`equalize_model`.
        seed: of the signs.
        streams: rotate residual streams.
        heads: rotate the values of attention heads.
        progress: show a progress bar on a terminal.

    Returns:
        The report; of a module ``report.undo()`` gives it back as it was. The change of an ONNX model is final.

    Raises:
        ModelError: as for :func:`equalize_model`.

    Reference: Ashkboos et al. 2024, arXiv:2404.00456.
    """
    opened = front_end_of(model).open_model(model, input_shapes, dummy_input, "rotate_model", providers)
    report = rotation.rotate(
        opened.view, opened.changed, seed=seed, streams=streams, heads=heads, bar=partial(bar, enabled=progress)
    )
    opened.finish(report)
    return report


@checks_arguments
def apply_spinquant(
    model: Any, dummy_input: Any = None, *, enable_r1: bool = True, enable_r2: bool = False, **options: Any
) -> RotateReport:
    """:func:`rotate_model` with SpinQuant's names: of residual streams (R1) and of attention heads' values (R2).

    The rotations are Hadamard matrices; they are not learned. Reference: Liu et al. 2024, arXiv:2405.16406.
    """
    return rotate_model(model, None, dummy_input, streams=enable_r1, heads=enable_r2, **options)
