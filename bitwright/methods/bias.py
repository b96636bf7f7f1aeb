"""Bias correction of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from bitwright.algorithms import bias_correct
from bitwright.algorithms.bias_correct import BiasReport
from bitwright.algorithms.channels.layers import Array
from bitwright.errors import checks_arguments
from bitwright.methods.front_end import front_end_of
from bitwright.progress import progress as bar


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
