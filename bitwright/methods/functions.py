"""Methods that choose weights on the grid: AdaRound, BRECQ, QDrop, FlexRound, GPTQ, SeqMSE.

Bias correction of a simulation.

Methods that move scales between layers and leave the function of the model as it is.

Batch-norm folding.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.core.numerics.spec import Preset, QuantSpec, RangeMethod
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.export.files.atomic import FinishedLayers
from bitwright.methods import bias_correction as bias_correct
from bitwright.methods.bias_correction import BiasReport
from bitwright.methods.folding import norm_fold
from bitwright.methods.folding.batch_norm_fold import FoldReport
from bitwright.methods.folding.norm_fold import NormReport
from bitwright.methods.front_end import Opened, front_end_of
from bitwright.methods.layers import Array
from bitwright.methods.scaling import awq
from bitwright.methods.scaling import equalize as equalization
from bitwright.methods.scaling import rotate as rotation
from bitwright.methods.scaling import smooth as smoothing
from bitwright.methods.scaling.awq import AwqReport
from bitwright.methods.scaling.equalize import EqualizeReport
from bitwright.methods.scaling.rotate import RotateReport
from bitwright.methods.scaling.smooth import SmoothReport
from bitwright.progress import collector_paused
from bitwright.progress import progress as bar

if TYPE_CHECKING:
    from bitwright.methods.rounding.driver import RoundingReport


@checks_arguments
def apply_bias_correction(
    sim: Any,
    data: Iterable[Any],
    *,
    num_samples: int | None = None,
    moments: Mapping[str, tuple[Array, Array]] | None = None,
    layers_to_ignore: Iterable[str] = (),
    reference: Any = None,
    progress: bool = True,
) -> BiasReport:
    """Take the mean error of every layer's output out of its bias, layer after layer; the last step of a recipe.

    Args:
        sim: of either front end, calibrated; its biases are changed in place.
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
        ConfigError: a name in ``layers_to_ignore`` is not a layer.
    """
    return bias_correct.correct(
        front_end_of(sim).correctable(sim, reference),
        bias_correct.first_samples(data, num_samples),
        moments or {},
        layers_to_ignore,
        partial(bar, enabled=progress),
    )


@checks_arguments
def add_biases(model: Any, dummy_input: Any = None, *, providers: Any = None) -> tuple[str, ...]:
    """Give every layer without a bias one of zeros, in place, so that bias correction can treat it.

    Args:
        model: of either front end.
        dummy_input: the example input; an ONNX model does without.
        providers: of ONNX Runtime, for an ONNX model; the CPU by default.

    Returns:
        Names of the layers.

    Raises:
        ModelError: the model cannot be read or run, ``dummy_input`` does not fit, or ``model`` is a path.
    """
    opened = front_end_of(model).open_model(model, None, dummy_input, "add_biases", providers)
    edits = bias_correct.missing_biases(opened.view)
    opened.view.edit(edits)
    opened.give_back()
    return tuple(edit.op for edit in edits)


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
    """:func:`bitwright.methods.scaling.equalize.equalize` of a model that is open, with its ``options``."""
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


@checks_arguments
def fold_all_batch_norms(
    model: Any, input_shapes: Any = None, dummy_input: Any = None, *, providers: Any = None, progress: bool = True
) -> FoldReport:
    """Fold every batch norm that can be folded into the convolution or linear layer beside it, in place.

    Each fold is checked numerically on random input; then the model's outputs on the example input are compared with
    those before, and folds that changed them are found and undone. What was not folded is listed with the reason in
    ``report.refused`` and in the log.

    Args:
        model: changed in place. In a module weights and biases are rewritten, and folded batch norms become
            ``nn.Identity``. Of an ONNX model functions are inlined and constants become initializers (see
            :mod:`bitwright.onnx.model.load`); layers are Conv, ConvTranspose, Gemm, and MatMul of a 2-D input with or
            without an Add after it; inputs and outputs keep names and order.
        input_shapes: shape of the input of a module, or a list of shapes for several; random inputs are made of them. An
            ONNX model knows its shapes: the second argument is its example input.
        dummy_input: one input instead. Of a module a tensor, a tuple of positional arguments, or a dict of keyword
            arguments; of an ONNX model its feeds, without which its outputs before and after are not compared.
        providers: of ONNX Runtime, for an ONNX model; the CPU by default.
        progress: show a progress bar on a terminal.

    Returns:
        A report; iterating it gives the folded ``(layer, batch norm)`` name pairs.

    Raises:
        ModelError: a module without ``input_shapes`` and ``dummy_input``, a path, or a model that cannot be read or run
            on the input.

    Reference: Jacob et al. 2018, arXiv:1712.05877, section 3.2.
    """
    with collector_paused():
        return front_end_of(model).fold(model, input_shapes, dummy_input, "fold_all_batch_norms", providers, progress)


@checks_arguments
def apply_reconstruction(
    sim: Any,
    data: Iterable[Any] | None = None,
    method: str = "adaround",
    *,
    num_samples: int | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    blocks: Sequence[Sequence[str]] | None = None,
    seed: int = 0,
    memory_budget: int | None = None,
    spill_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    forward_fn: Any = None,
    progress: bool = True,
    inputs: Iterable[Any] | None = None,
    distributed: bool = True,
    **options: Any,
) -> RoundingReport:
    """Choose the weights of a simulation so that its layers or blocks compute what they compute in float.

    The weights (of ``sim.model``, or the initializers of an ONNX simulation) become numbers on their grids, whose encodings
    are frozen: a later ``compute_encodings`` finds the ranges of the activations anew and leaves the weights. Where ``sim``
    is calibrated, activations are quantized meanwhile; else only weights are. The methods work on torch tensors, for ONNX
    models too, and load torch when they are called.

    ===============  =======================================================================================
    method           what it does
    ===============  =======================================================================================
    ``adaround``     learns each weight's rounding, layer after layer (arXiv:2004.10568)
    ``brecq``        the same, block after block (arXiv:2102.05426, without its Fisher weights)
    ``qdrop``        as ``brecq``, with activation quantizers dropped at random (arXiv:2203.05740)
    ``flexround``    learns what each weight is divided by, and the scale (arXiv:2306.00317)
    ``gptq``         rounds column by column with error feedback (arXiv:2210.17323)
    ``seq_mse``      chooses the range only, by the layer's output error
    ===============  =======================================================================================

    Args:
        sim: of either front end; changed in place.
        data: batches, as ``sim.compute_encodings`` takes them; 256 to 1024 samples.
        method: see above.
        num_samples: use so many; all with ``None``.
        include, exclude: names or globs of layers; every layer by default.
        blocks: for block-wise methods, names of the operators that belong together; found from the graph by default.
        seed: same seed, same result.
        memory_budget: bytes of activations held in memory, 4 GiB by default; what goes beyond lies in temporary files.
        spill_dir: where these are made.
        cache_dir: folder that keeps finished layers: a call with the same model, data and options takes them from there.
        forward_fn: ``forward_fn(model, batch)``, when a module is not called as ``model(batch)``; not for ONNX models.
        progress: show a progress bar on a terminal.
        inputs: ``data`` under the name that it had for ONNX simulations.
        distributed: of PyTorch simulations, where a process group is initialised: work on the batches of all ranks
            (:func:`bitwright.torch.gather_batches`), so that every rank finds the same weights, bit for bit, however many there
            are. Each must call this then; ``False`` works on those of this rank alone.
        options: of the method: ``iterations``, ``batch``, ``lr``, ``reg_param``, ``beta_range``, ``warm_start``, ``rows``,
            ``drop`` (learned methods); ``damping``, ``act_order``, ``block``, ``match_float`` (``gptq``);
            ``num_candidates``, ``loss_fn`` (``mse``, ``l1``, ``sqnr``), ``inp_symmetry`` (``symqt``, ``symfp``, ``asym``;
            ``seq_mse``).

    Returns:
        The error of every layer before and after, and the layers that were left with the reason; a table when printed.

    Raises:
        ConfigError: torch is missing; an unknown method, option or layer; an option that the front end does not have.
        CalibrationError: no batch, activations that are not finite, or no memory and disk for them.
        ModelError: the model fails on a batch, or a batch does not fit it.
    """
    require_torch(method)
    from bitwright.methods.rounding.driver import NO_CACHE, Cache
    from bitwright.methods.rounding.table import choose_weights

    front_end, batches = front_end_of(sim), _one_of(data, inputs)
    finished = None if cache_dir is None else FinishedLayers(cache_dir)
    return choose_weights(
        front_end.steppable(sim, forward_fn),
        front_end.batches_of_all(batches) if distributed else batches,
        method,
        options,
        num_samples=num_samples,
        include=include,
        exclude=exclude,
        blocks=blocks,
        seed=seed,
        memory_budget=memory_budget,
        spill_dir=None if spill_dir is None else str(spill_dir),
        cache=NO_CACHE if finished is None else Cache(finished.get, finished.put),
        progress=lambda units: bar(units, method, progress),
    )


@checks_arguments
def apply_gptq(
    sim: Any, data: Iterable[Any] | None = None, *, inputs: Iterable[Any] | None = None, **options: Any
) -> RoundingReport:
    """:func:`apply_reconstruction` with ``gptq``."""
    return apply_reconstruction(sim, data, "gptq", inputs=inputs, **options)


def require_torch(method: str) -> None:
    """Refuse ``method`` where torch is not installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            method,
            "it learns by gradients and works on torch tensors, and torch is not installed",
            "pip install 'bitwright[torch]'; folding, equalization, calibration and export do without it",
        )


def _one_of(data: Iterable[Any] | None, inputs: Iterable[Any] | None) -> Iterable[Any]:
    """The batches, under the name they were given."""
    given = [batches for batches in (data, inputs) if batches is not None]
    if len(given) != 1:
        raise CalibrationError(
            "apply_reconstruction",
            "both data and inputs were given" if given else "no batches were given",
            "pass the batches as data; inputs is another name for it",
        )
    return given[0]
