"""Bias correction: subtract the mean quantization error of every channel from the layers' biases.

*Empirical*: the mean of each output channel is measured in float and quantized, layer after layer with everything before
already corrected, and the difference goes into the bias. One float and one quantized run per batch do it: the
quantized run shifts every layer's output to the float mean of the same batch as it passes, so that the layers after
see corrected inputs, and the shifts are averaged over the batches.

*Analytic*: without data. The error of a weight times the mean of its input is a constant per channel; the mean of the
input follows from the batch norm and the activation before it.

Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.2 and appendices B to D. Beyond the paper: any graph of
convolutions, additions and pools for the analytic form; transposed and grouped convolutions, products.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np

from bitwright.core.graph.graph import Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.calibration import samples_in, with_samples
from bitwright.core.simulation.float_model import AddBias, FloatModel
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.methods.front_end import Correctable, front_end_of
from bitwright.methods.layers import Array, Bar, Layer, Layers, Refused, no_bar
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular

logger = logging.getLogger("bitwright")

#: fewer samples than this leave the channel means uncertain; 256 are enough for images
FEW_SAMPLES = 64
ENOUGH_SAMPLES = 256
Moments = Mapping[str, tuple[Array, Array]]


# ---------------------------------------------------------------------------------------------- arithmetic


def clipped_normal(mean: Array, std: Array, low: float | Array, high: float | Array) -> tuple[Array, Array]:
    """Mean and standard deviation of a normal variable cut at ``low`` and ``high``.

    Args:
        mean, std: of the variable before, shape [C]; a zero ``std`` is a constant.
        low, high: bounds, scalar or shape [C], may be infinite.

    Returns:
        ``mean``, ``std``: float64, shape [C].

    Example:
        >>> m, s = clipped_normal(np.zeros(1), np.ones(1), 0.0, np.inf)
        >>> float(m[0]).__round__(6), float(s[0]).__round__(6)
        (0.398942, 0.583819)

    Reference: arXiv:1906.04721, appendix C, for both bounds; ReLU is (0, inf), ReLU6 (0, 6).
    """
    mean, std = np.asarray(mean, np.float64), np.abs(np.asarray(std, np.float64))
    low, high = np.broadcast_to(low, mean.shape), np.broadcast_to(high, mean.shape)
    constant = np.clip(mean, low, high)
    if not std.any():
        return constant, np.zeros_like(constant)
    wide = np.where(std > 0, std, 1.0)
    a, b = (low - mean) / wide, (high - mean) / wide
    below, until = _cdf(a), _cdf(b)
    inside, edge = until - below, _pdf(a) - _pdf(b)
    ends_a, ends_b = np.where(np.isfinite(low), low, 0.0), np.where(np.isfinite(high), high, 0.0)
    first = ends_a * below + ends_b * (1 - until) + mean * inside + wide * edge
    second = (
        ends_a**2 * below
        + ends_b**2 * (1 - until)
        + mean**2 * inside
        + 2 * mean * wide * edge
        + wide**2 * (inside + _times_pdf(a) - _times_pdf(b))
    )
    variance = np.maximum(second - first**2, 0.0)
    return np.where(std > 0, first, constant), np.where(std > 0, np.sqrt(variance), 0.0)


def _pdf(x: Array) -> Array:
    result: Array = np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi)
    return result


_erfc = np.frompyfunc(math.erfc, 1, 1)


def _cdf(x: Array) -> Array:
    found = np.where(x > 0, 1.0, 0.0)
    finite = np.isfinite(x)
    found[finite] = 0.5 * np.asarray(_erfc(x[finite] / -math.sqrt(2)), np.float64)
    return found


def _times_pdf(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0) * _pdf(x)


def expected_error(layer: Layer, error: Array, expected: Array) -> Array:
    """Mean shift of the output caused by an error of the weight.

    Args:
        layer: whose weight it is.
        error: quantized weight less the float one, shape of the weight.
        expected: mean of the input per channel, shape [inputs].

    Returns:
        Float64, shape [outputs]. Zeros of the padding are taken for inputs of the same mean.

    Reference: arXiv:1906.04721, eq. 17: E[eps * x] = eps * E[x], the error summed over the kernel.
    """
    split = layer.axes.split(np.asarray(error, np.float64))
    return layer.axes.sum_over_inputs(split * layer.axes.over_inputs(expected))


# ------------------------------------------------------------------------------------- expected inputs


def expected_inputs(layers: Layers, moments: Moments) -> dict[str, Array]:
    """The mean of every layer's input per channel, where it follows from the moments of layers' outputs.

    Args:
        layers: of the graph with batch norms folded.
        moments: layer -> mean and standard deviation of its output per channel, shape [outputs].

    Returns:
        Layer -> float64, shape [inputs]. The two sides of an addition are taken for independent.
    """
    known: dict[str, tuple[Array, Array]] = {}
    found: dict[str, Array] = {}
    for op in layers.graph.ops:
        layer = layers.of.get(op.name)
        if layer is None or layer.kind != "layer":
            known.update(_computed_moments(op, known))
            continue
        entering, own = known.get(op.inputs[0] or ""), moments.get(op.name)
        if entering is not None and entering[0].size == layer.axes.inputs:
            found[op.name] = entering[0]
        if own is not None and own[0].size == layer.axes.outputs:
            known[layer.output] = np.asarray(own[0], np.float64), np.abs(np.asarray(own[1], np.float64))
    return found


def _computed_moments(op: Op, known: Moments) -> Moments:
    """Moments of an operator's output, where they follow from those of its inputs and are not known yet."""
    if len(op.outputs) != 1 or op.outputs[0] in known or op.also:
        return {}
    passed = moments_behind(op, known)
    return {} if passed is None else {op.outputs[0]: passed}


def moments_behind(op: Op, known: Moments) -> tuple[Array, Array] | None:
    """Mean and standard deviation after an operator, from those of its inputs by name; ``None``: not known."""
    sources = [known.get(value) for value in op.inputs if value is not None]
    if not sources or sources[0] is None:
        return None
    mean, std = sources[0]
    if op.type == "Add" and len(sources) == 2 and sources[1] is not None and sources[1][0].size == mean.size:
        return mean + sources[1][0], np.hypot(std, sources[1][1])
    if op.type in _ACTIVATIONS:
        return _ACTIVATIONS[op.type](op, mean, std)
    return (mean, std) if op.type in TRAITS["keeps_mean"] else None


def _after_relu(op: Op, mean: Array, std: Array) -> tuple[Array, Array]:
    return clipped_normal(mean, std, 0.0, np.inf)


def _after_clip(op: Op, mean: Array, std: Array) -> tuple[Array, Array] | None:
    low, high = op.attrs.get("min"), op.attrs.get("max")
    if low is None and high is None:
        return None
    return clipped_normal(mean, std, -np.inf if low is None else low, np.inf if high is None else high)


def _after_leaky_relu(op: Op, mean: Array, std: Array) -> tuple[Array, Array]:
    slope = float(op.attrs.get("alpha", 0.01))
    above, below = clipped_normal(mean, std, 0.0, np.inf), clipped_normal(mean, std, -np.inf, 0.0)
    return above[0] + slope * below[0], above[1] + slope * below[1]


_ACTIVATIONS: dict[str, Callable[[Op, Array, Array], tuple[Array, Array] | None]] = {
    "Relu": _after_relu,
    "Clip": _after_clip,
    "LeakyRelu": _after_leaky_relu,
}


# ---------------------------------------------------------------------------------------------- on a model


def missing_biases(view: FloatModel) -> list[AddBias]:
    """Biases of zeros for the layers that have none and can be given one."""
    layers = Layers(view.graph()).of.values()
    zeros = (AddBias(x.op, np.zeros(x.axes.outputs)) for x in layers if x.kind == "layer" and not x.bias)
    return [edit for edit in zeros if view.can_edit(edit) is None]


@dataclass
class BiasReport(Tabular):
    """Result of bias correction: corrected and refused layers.

    Attributes:
        corrected: layer -> what was taken off its bias, shape [outputs].
        refused: layers that keep their bias, with the reasons.
        samples: how many the correction rests on; 0 for the analytic form alone.
        analytic: the corrected layers whose shift was computed, not measured.
    """

    _rows = "corrected"

    corrected: dict[str, Array] = field(default_factory=dict, repr=False)
    refused: tuple[Refused, ...] = ()
    samples: int = 0
    analytic: frozenset[str] = frozenset()

    @property
    def changed(self) -> bool:
        """Whether a bias was corrected."""
        return bool(self.corrected)

    def __str__(self) -> str:
        count = len(self.corrected)
        lines = [
            f"{count} bias{'es' * (count != 1)} corrected from {self.samples} samples, {len(self.refused)} layers left"
        ]
        for op, shift in self.corrected.items():
            how = "computed" if op in self.analytic else "measured"
            lines.append(f"  corrected  {op}: by {float(np.abs(shift).max(initial=0.0)):.3g} at most, {how}")
        lines += [f"  left       {refused}" for refused in self.refused]
        return "\n".join(lines)


def correctable(layers: Layers, ignore: Iterable[str] = ()) -> tuple[list[Layer], list[Refused]]:
    """Layers with a private bias, in execution order, and the reasons of the others.

    Raises:
        ConfigError: a name in ``ignore`` is not a layer.
    """
    ignored = set(ignore)
    known = {layer.op for layer in layers.of.values() if layer.kind == "layer"} | layers.refused.keys()
    for name in ignored - known:
        raise ConfigError(
            "layers_to_ignore", f"there is no layer {name!r}", f"use some of {', '.join(sorted(known)[:10])}"
        )
    found, refused = [], []
    for layer in (layer for layer in layers.of.values() if layer.kind == "layer"):
        if layer.op in ignored:
            reason: str | None = "it is in layers_to_ignore"
        elif layer.bias is None:
            reason = "it has no bias"
        else:
            reason = layers.shared.get(layer.bias)
        if reason is None:
            found.append(layer)
        else:
            refused.append(Refused(layer.op, reason))
    refused += [Refused(op, reason) for op, reason in layers.refused.items() if op not in ignored]
    return found, refused


def _measurable(sim: Correctable, ignore: Iterable[str]) -> tuple[list[Layer], list[Refused]]:
    """:func:`correctable`, without layers whose shift cannot be measured."""
    layers, refused = correctable(Layers(sim.graph), ignore)
    reasons = {layer.op: sim.why_not_measured(layer) for layer in layers}
    refused += [Refused(op, reason) for op, reason in reasons.items() if reason is not None]
    return [layer for layer in layers if reasons[layer.op] is None], refused


def correct_empirically(
    sim: Correctable, batches: Iterable[tuple[object, int]], ignore: Iterable[str] = (), bar: Bar = no_bar
) -> BiasReport:
    """Correct every bias by the mean error measured on data.

    Args:
        sim: calibrated; its biases are changed in place.
        batches: each with its number of samples.
        ignore: layers to leave alone.
        bar: shows the batches.

    Raises:
        CalibrationError: no batch, or a mean that is NaN or infinite; nothing was changed then.
    """
    layers, refused = _measurable(sim, ignore)
    sums = {layer.op: np.zeros(layer.axes.outputs) for layer in layers}
    counts = dict.fromkeys(sums, 0.0)
    samples = 0
    for batch, size in bar(batches, "bias correction"):
        for op, (shift, count) in sim.errors(layers, batch).items() if layers else ():
            if not np.isfinite(shift).all():
                raise CalibrationError(
                    op,
                    f"the mean of its output channel {int(np.argmin(np.isfinite(shift)))} is NaN or infinite on this data",
                    "look for the first such layer in the float model, and leave out the samples that cause it",
                )
            sums[op] += shift * count
            counts[op] += count
        samples += size
    if not samples:
        refuse_no_data()
    if samples < FEW_SAMPLES:
        logger.warning(
            "bias correction: %d samples leave the means of channels uncertain; %d are enough", samples, ENOUGH_SAMPLES
        )
    corrected = {}
    for layer in layers:
        if counts[layer.op]:
            corrected[layer.op] = sums[layer.op] / counts[layer.op]
        else:
            refused.append(Refused(layer.op, "no batch reached it"))
    _subtract(sim, layers, corrected)
    return BiasReport(corrected, tuple(refused), samples)


def refuse_no_data() -> NoReturn:
    """Raise the error for missing data."""
    raise CalibrationError(
        "bias correction", "the data held no batch", f"give about {ENOUGH_SAMPLES} samples, without labels"
    )


def correct(
    sim: Correctable,
    batches: Iterable[tuple[object, int]],
    moments: Moments,
    ignore: Iterable[str] = (),
    bar: Bar = no_bar,
) -> BiasReport:
    """Correct layers with ``moments`` analytically, then the others on data; all or nothing.

    Args:
        sim, batches, ignore, bar: as for :func:`correct_empirically`.
        moments: layer -> mean and standard deviation of its output per channel; may be empty.
    """
    expected = expected_inputs(Layers(sim.graph), moments) if moments else {}
    if not expected:
        return correct_empirically(sim, batches, ignore, bar)
    layers, _ = correctable(Layers(sim.graph), ignore)
    before = [(layer, sim.bias(layer)) for layer in layers if layer.op in expected]
    computed = correct_analytically(sim, expected, ignore)
    try:
        measured = correct_empirically(sim, batches, {*ignore, *computed.corrected}, bar)
    except BaseException:
        for layer, bias in before:
            sim.set_bias(layer, bias)
        raise
    refused = tuple(line for line in measured.refused if line.op not in computed.corrected)
    both = {**computed.corrected, **measured.corrected}
    return BiasReport(both, refused, measured.samples, computed.analytic)


def correct_analytically(sim: Correctable, expected: Mapping[str, Array], ignore: Iterable[str] = ()) -> BiasReport:
    """Correct every bias by the expected error from rounding the weight.

    Args:
        sim: with encodings for its weights; its biases are changed in place.
        expected: layer -> mean of its input per channel; see :func:`expected_inputs`.
        ignore: layers to leave alone.
    """
    layers, refused = correctable(Layers(sim.graph), ignore)
    corrected = {}
    for layer in layers:
        if layer.op in expected:
            W, quantized = sim.weight(layer)
            corrected[layer.op] = expected_error(layer, np.asarray(quantized, np.float64) - W, expected[layer.op])
        else:
            refused.append(Refused(layer.op, "the mean of its input does not follow from batch norms"))
    _subtract(sim, layers, corrected)
    return BiasReport(corrected, tuple(refused), analytic=frozenset(corrected))


def _subtract(sim: Correctable, layers: Iterable[Layer], shifts: Mapping[str, Array]) -> None:
    for layer in layers:
        if layer.op in shifts:
            b = np.asarray(sim.bias(layer), np.float64)
            beta = float(layer.attrs.get("beta", 1.0)) or 1.0
            sim.set_bias(layer, b - shifts[layer.op].reshape(b.shape) / beta)


def first_samples(batches: Iterable[object], count: int | None) -> Iterator[tuple[object, int]]:
    """Batches until ``count`` samples have passed, each with its number of samples (length of the first axis).

    No batch is read after the last one that is returned.
    """
    left = math.inf if count is None else count
    if left <= 0:
        return
    for batch in with_samples(batches):
        n = samples_in(batch)
        left -= n
        yield batch, n
        if left <= 0:
            return


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
    """Subtract the mean error of every layer's output from its bias, layer after layer; the last step of a recipe.

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
    return correct(
        front_end_of(sim).correctable(sim, reference),
        first_samples(data, num_samples),
        moments or {},
        layers_to_ignore,
        partial(progress_bar, enabled=progress),
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
    edits = missing_biases(opened.view)
    opened.view.edit(edits)
    opened.give_back()
    return tuple(edit.op for edit in edits)
