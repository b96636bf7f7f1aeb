"""Bias correction of a float model, and of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from bitwright.algorithms import bias_correct
from bitwright.algorithms.bias_correct import BiasReport, QuantParams
from bitwright.algorithms.channels.layers import Array, Layers
from bitwright.core.simulation.protocols import SetParam
from bitwright.errors import checks_arguments
from bitwright.methods.front_end import front_end_of
from bitwright.progress import progress as bar


@checks_arguments
def correct_bias(
    model: Any,
    quant_params: QuantParams,
    num_quant_samples: int | None,
    data_loader: Iterable[Any],
    num_bias_correct_samples: int | None,
    conv_bn_dict: Mapping[str, tuple[Array, Array]] | None = None,
    perform_only_empirical_bias_corr: bool = True,
    layers_to_ignore: Iterable[str] | None = None,
    *,
    providers: Any = None,
    progress: bool = True,
) -> BiasReport:
    """Change the biases of a float model so that its quantized self makes no error in the mean.

    A simulation of the model is made and calibrated for it; layers without a bias get one. The corrected model is then
    simulated as any other.

    Args:
        model: of either front end, batch norms folded; changed in place.
        quant_params: what is simulated.
        num_quant_samples: calibrate on so many samples; all with ``None``.
        data_loader: batches without labels; gone through twice.
        num_bias_correct_samples: measure means on so many samples; all with ``None``.
        conv_bn_dict: layer -> mean and standard deviation of its output, as ``moments`` of the report of
            :func:`fold_all_batch_norms` says; only the analytic form needs it.
        perform_only_empirical_bias_corr: ``False`` corrects the layers analytically whose input's mean follows from
            ``conv_bn_dict``, and only the others from data.
        layers_to_ignore: names of layers to leave alone.
        providers: of ONNX Runtime, for an ONNX model; the CPU by default.
        progress: show a progress bar on a terminal.

    Returns:
        What was corrected by how much, and what was left, with the reason.

    Raises:
        CalibrationError: no batch, or a mean that is NaN or infinite; the model is left as it was.
        ConfigError: a name in ``layers_to_ignore`` is not a layer.
        ModelError: the model cannot be read or run.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.2.
    """
    batches = list(data_loader)
    if not batches:
        bias_correct.refuse_no_data()
    opened = front_end_of(model).open_model(model, None, batches[0], "correct_bias", providers)
    undo = opened.view.edit(bias_correct.missing_biases(opened.view))
    try:
        sim = opened.simulation(quant_params)
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
    opened.view.refresh()
    corrected = front_end_of(sim).correctable(sim)
    layers = (layer for layer in Layers(sim.graph).of.values() if layer.op in report.corrected)
    opened.view.edit([SetParam(x.bias, corrected.bias(x)) for x in layers if x.bias is not None])
    opened.give_back()
    return report


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
