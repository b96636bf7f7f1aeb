"""Cross-layer equalization and high-bias absorption: balance the channel ranges of neighbouring layers.

Between two layers with nothing but a piecewise-linear activation, channel ``c`` can be divided by ``s[c]`` after the
first and multiplied by it in front of the second. The choice ``s = sqrt(r1 / r2)`` gives both weights the same range
in every channel, so that one grid per tensor serves all channels. Where batch norms or data say what the values between
the layers are, the factors are those of the least rounding noise in weights and activations together (``channel_noise``).

Reference: Nagel et al. 2019, arXiv:1906.04721, sections 4.1 and 4.2. Beyond the paper: factors that look at the
activations too; groups of any number of consumers, transposed and grouped convolutions, linear layers, products with a
gate, and activations that cut at fixed bounds (ReLU6), whose bounds are divided too instead of being dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.float_model import AddBias, Clamp, Edit, FloatModel, SetParam, Undo
from bitwright.errors import checks_arguments
from bitwright.methods.bias_correction import Moments
from bitwright.methods.folding.batch_norm_search import FoldReport
from bitwright.methods.front_end import Opened, front_end_of
from bitwright.methods.layers import (
    Array,
    Bar,
    Check,
    Group,
    Layer,
    Layers,
    Refused,
    Reversible,
    find_groups,
    forward_obstacle,
    log_refused,
    no_bar,
    rescaling,
    sift,
)
from bitwright.methods.scaling.channel_noise import (
    Bounds,
    Channels,
    Extremes,
    bounds_of_factors,
    channels_of,
    measured_extremes,
    measured_moments,
    quietest_factors,
)
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular, counted

MAX_ROUNDS = 1000
#: factors of a round that are nearer to 1 than this end the iteration
TOLERANCE = 1e-3


def equalizing_factors(r1: Array, r2: Array) -> Array:
    """``s`` with ``r1 / s == r2 * s`` per channel; 1 where a range is zero or not finite.

    Args:
        r1: largest magnitude of the first weight per output channel, shape [C].
        r2: of the second weight per input channel, shape [C].

    Example:
        >>> equalizing_factors(np.array([8.0, 1.0, 0.0]), np.array([2.0, 4.0, 1.0]))
        array([2. , 0.5, 1. ])

    Reference: arXiv:1906.04721, eq. 11: s = sqrt(r1 r2) / r2.
    """
    with np.errstate(all="ignore"):
        s = np.sqrt(np.asarray(r1, np.float64) / np.asarray(r2, np.float64))
    return np.where(np.isfinite(s) & (s > 0), s, 1.0)


def converged_factors(
    groups: Sequence[Group], weights: Mapping[str, Array], bar: Bar = no_bar
) -> tuple[list[Array], int]:
    """Factors that equalize all groups simultaneously.

    A layer between two groups changes both, so the groups are equalized in turn until the factors stop to change.

    Args:
        groups: to equalize, in execution order.
        weights: of their layers, by name.
        bar: shows the rounds.

    Returns:
        Per group the factors that its channels are divided by, shape [channels]; and the number of rounds.
    """
    state = _Ranges(weights, groups)
    total = [np.ones(group.channels) for group in groups]
    rounds = 0
    change = np.inf
    for _ in bar(iter(range(MAX_ROUNDS)), "equalize: rounds"):
        if change <= TOLERANCE or not groups:
            break
        change, rounds = 0.0, rounds + 1
        for i, group in enumerate(groups):
            r1 = np.max([state.outputs(layer) for layer in group.producers], axis=0)
            r2 = np.max([state.inputs(layer, repeat) for layer, repeat in group.consumers], axis=0)
            s = equalizing_factors(r1, r2)
            state.divide(group, s)
            total[i] = total[i] * s
            change = max(change, float(np.abs(np.log(s)).max(initial=0.0)))
    return total, rounds


class _Ranges:
    """Magnitudes of weights reduced over the kernel, under factors of their input and output channels.

    Of a layer at one end of its groups only one number per channel is held: quotients and products are in the order of what they
    are made of, so the largest one is made of the largest.
    """

    def __init__(self, weights: Mapping[str, Array], groups: Sequence[Group]) -> None:
        self.weights = weights
        self._magnitude: dict[str, Array] = {}
        self._producers = {layer.op for group in groups for layer in group.producers}
        self._consumers = {layer.op for group in groups for layer, _ in group.consumers}

    def _of(self, layer: Layer) -> Array:
        if layer.op not in self._magnitude:
            split = layer.axes.split(np.abs(self.weights[layer.weight]).astype(np.float64))
            outputs, inputs = (1, 2) if layer.axes.outputs_first else (2, 1)
            fixed = (3, *([inputs] if layer.op not in self._consumers else []))
            fixed += (outputs,) if layer.op not in self._producers else ()
            self._magnitude[layer.op] = split.max(axis=fixed, keepdims=True, initial=0.0)
        return self._magnitude[layer.op]

    def outputs(self, layer: Layer) -> Array:
        found: Array = self._of(layer).max(axis=2 if layer.axes.outputs_first else 1).reshape(-1)
        return found

    def inputs(self, layer: Layer, repeat: int) -> Array:
        found = self._of(layer).max(axis=1 if layer.axes.outputs_first else 2).reshape(-1, repeat)
        result: Array = found.max(axis=1)
        return result

    def divide(self, group: Group, s: Array) -> None:
        for layer in group.producers:  # in place: new arrays of this size would take most of the time
            found = self._of(layer)
            np.divide(found, layer.axes.over_outputs(s), out=found)
        for layer, repeat in group.consumers:
            found = self._of(layer)
            np.multiply(found, layer.axes.over_inputs(np.repeat(s, repeat)), out=found)


# ------------------------------------------------------------------------------------- high-bias absorption


def absorbed_bias(mean: Array, std: Array) -> Array:
    """The bias that moves across a ReLU, with a small change of one value in 740.

    Args:
        mean, std: of the channel before the ReLU, shape [C]: beta and \\|gamma\\| of its batch norm.

    Returns:
        ``max(0, mean - 3 std)``, shape [C], >= 0.

    Reference: arXiv:1906.04721, section 4.1.3.
    """
    return np.maximum(0.0, np.asarray(mean, np.float64) - 3 * np.abs(std))


# ---------------------------------------------------------------------------------------------- on a model


@dataclass
class EqualizeReport(Tabular, Reversible):
    """Result of equalization.

    Attributes:
        groups: the equalized ones.
        refused: layers that begin no group, with the reasons.
        factors: per group, what its channels were divided by.
        rounds: until the factors stopped to change.
        clamped: activations that now cut each channel at a bound of its own.
        absorbed: layers whose high biases moved into the next layer.
        statistics: of the layers' outputs, mean and standard deviation per channel, brought up to date.
        spread: largest range of a channel over the smallest, the worst group, before and after.
        noise: expected of rounding weights and activations to 8 bits with one scale per tensor, before and after: the
            power of each tensor's rounding over that of the signal, summed over the tensors of groups whose values are
            known. ``None`` where those of none are.
        left_alone: why nothing was tried; empty where something was.
        view: the model.
    """

    _rows = "groups"

    groups: tuple[Group, ...] = ()
    refused: tuple[Refused, ...] = ()
    factors: tuple[Array, ...] = field(default=(), repr=False)
    rounds: int = 0
    clamped: tuple[str, ...] = ()
    absorbed: tuple[str, ...] = ()
    statistics: dict[str, tuple[Array, Array]] = field(default_factory=dict, repr=False)
    spread: tuple[float, float] = (1.0, 1.0)
    noise: tuple[float, float] | None = None
    left_alone: str = ""
    _undos: list[Undo] = field(default_factory=list, repr=False)
    view: FloatModel | None = field(default=None, repr=False)

    @property
    def changed(self) -> bool:
        """Whether anything was equalized or absorbed."""
        return bool(self.groups or self.absorbed)

    def __str__(self) -> str:
        if self.left_alone:
            return self.left_alone
        lines = [
            f"{counted(len(self.groups), 'group')} of layers equalized in {self.rounds} rounds, "
            f"{counted(len(self.refused), 'layer')} without a partner; "
            f"largest spread of channel ranges {self.spread[0]:.3g} before, {self.spread[1]:.3g} after"
        ]
        if self.noise is not None:
            lines[0] += f"; expected noise {self.noise[0]:.3g} before, {self.noise[1]:.3g} after"
        lines += [f"  equalized  {group}" for group in self.groups]
        lines += [f"  clamped    {op}: a bound per channel" for op in self.clamped]
        lines += [f"  absorbed   high biases of {op}" for op in self.absorbed]
        lines += [f"  left       {refused}" for refused in self.refused]
        return "\n".join(lines)


def equalize(
    view: FloatModel,
    check: Check | None = None,
    *,
    statistics: Mapping[str, tuple[Array, Array]] | None = None,
    data: Iterable[Any] | None = None,
    absorb_bias: bool = False,
    only: Set[tuple[str, str]] | None = None,
    keep_bounds: bool = False,
    weight_noise: float = 1.0,
    worth: float = 0.0,
    bar: Bar = no_bar,
) -> EqualizeReport:
    """Equalize every possible group of layers, keeping the model's function.

    Args:
        view: the model, batch norms folded; changed in place.
        check: says what is wrong with the model's function, or ``None``; groups it objects to are found by halving
            and left alone.
        statistics: mean and standard deviation per channel of the outputs of layers, by op name (beta and \\|gamma\\|
            of the folded batch norm). Groups that have them get the factors of the least noise, the others those that
            give both weights the same ranges.
        data: batches to measure the statistics of the other layers on; not run where there are none.
        absorb_bias: also absorb high biases, where the statistics of the layer are known. That changes the function a little.
        only: (layer, the layer that reads it) of the groups that are equalized; all with ``None``.
        keep_bounds: let activations cut where they do, as one number for all channels, which integer kernels do without an
            operator of its own. Factors are then limited to those under which nothing on ``data`` is cut that was not:
            :mod:`bitwright.methods.scaling.channel_noise`.
        weight_noise: share of the noise of weights rounded to nearest that counts, above 0: less than 1 where a later method
            rounds them better.
        worth: dB that the expected noise of rounding falls by at least; the model is left alone where it is known to fall by
            less.
        bar: shows checks and rounds.

    Returns:
        The report; ``report.undo()`` gives the model back as it was.

    Raises:
        CalibrationError: no batch in ``data``, or a value on it that is NaN or infinite.
        ConfigError: ``keep_bounds`` without ``data``.
    """
    layers = Layers(view.graph())
    groups, refused = equalizable(view, layers, clamps=not keep_bounds)
    if only is not None:
        groups = [group for group in groups if not only.isdisjoint(_links(group))]
    batches = list(data) if keep_bounds and data is not None else data  # which are run twice
    known, channels = _what_is_known(view, layers.graph, groups, statistics or {}, batches, bar)
    extremes = measured_extremes(view, groups, batches, bar) if keep_bounds else None
    planner = _Planner(view, channels, known, extremes, weight_noise, bar)
    if worth and (noise := planner.plan(groups).noise) is not None and (less := _decibel(*noise)) < worth:
        why = f"left alone, as the noise of rounding would fall by {less:.1f} dB, and {worth:g} are asked for"
        return EqualizeReport(refused=tuple(refused), noise=noise, statistics=dict(known), left_alone=why, view=view)
    kept, rejected = sift(groups, lambda some: view.edit(planner.plan(some).edits), check, bar)
    refused += [Refused(group.producers[0].op, reason) for group, reason in rejected]
    done = planner.plan(kept)
    undo = view.edit(done.edits)
    order = {op.name: i for i, op in enumerate(layers.graph.ops)}
    report = EqualizeReport(
        tuple(kept), tuple(sorted(refused, key=lambda r: order[r.op])), tuple(done.factors), done.rounds,
        done.clamped, spread=done.spread, noise=done.noise, statistics=_divided(known, kept, done.factors), view=view,
        _undos=[undo],
    )  # fmt: skip
    log_refused(report.refused, "equalized")
    if absorb_bias:
        try:
            _absorb(view, layers, report)
        except BaseException:
            report.undo()
            raise
    return report


def _decibel(before: float, after: float) -> float:
    """How much less noise there is, in dB; 0 where there was none."""
    return 10 * math.log10(before / after) if before > 0 and after > 0 else 0.0


def _what_is_known(
    view: FloatModel, graph: Graph, groups: Sequence[Group], known: Moments, data: Iterable[Any] | None, bar: Bar
) -> tuple[Moments, dict[str, Channels | None]]:
    """The values of every group by its first producer: ``known``, and those measured on ``data``.

    The data is not run where nothing is unknown.
    """
    channels = {g.producers[0].op: channels_of(graph, g, known) for g in groups}
    unknown = [g for g in groups if len(g.producers) == 1 and channels[g.producers[0].op] is None]
    if data is None or not unknown:
        return dict(known), channels
    known = {**known, **measured_moments(view, unknown, bar(data, "equalize: measuring activations"))}
    channels.update((g.producers[0].op, channels_of(graph, g, known)) for g in unknown)
    return known, channels


def _links(group: Group) -> list[tuple[str, str]]:
    """Every (producer, consumer) of a group."""
    return [(producer.op, consumer.op) for producer in group.producers for consumer, _ in group.consumers]


def absorb_biases(
    report: EqualizeReport, statistics: Mapping[str, tuple[Array, Array]], view: FloatModel | None = None
) -> None:
    """Move high biases of groups that were equalized before into the next layers; noted in ``report``.

    Args:
        report: of :func:`equalize`.
        statistics: as for :func:`equalize`, from before the layers were equalized.
        view: the model, where it is no longer the one that was equalized but a copy of it.
    """
    view = view or report.view
    assert view is not None
    report.statistics = _divided(statistics, report.groups, report.factors)
    _absorb(view, Layers(view.graph()), report)


def equalizable(view: FloatModel, layers: Layers, *, clamps: bool = True) -> tuple[list[Group], list[Refused]]:
    """The groups that ``view`` can rescale, and the reasons of layers that begin none.

    Args:
        view: the model.
        layers: of its graph.
        clamps: whether activations that cut are changed, which not all can be.
    """
    found, refused = find_groups(layers, [layer for layer in layers.of.values() if layer.kind == "layer"])
    refused += [
        Refused(op, reason) for op, reason in layers.refused.items() if layers.graph.op(op).type in TRAITS["layer"]
    ]
    groups = []
    for group in found:
        clips = group.clips if clamps else ()
        reason = next((r for op, axis in clips if (r := _why_no_clamp(view, op.name, group, axis))), None)
        if reason is None:
            groups.append(group)
        else:
            refused.append(Refused(group.producers[0].op, reason))
    return groups, refused


def _why_no_clamp(view: FloatModel, op: str, group: Group, axis: int) -> str | None:
    ones = np.ones(group.channels)
    reason = view.can_edit(Clamp(op, ones, ones, axis))
    return reason and f"{op} cuts all channels at the same bounds and cannot be changed: {reason}"


@dataclass(frozen=True)
class _Plan:
    """Plan of the equalization of groups, with its report."""

    edits: list[Edit]
    factors: list[Array]
    rounds: int
    spread: tuple[float, float]
    noise: tuple[float, float] | None

    @property
    def clamped(self) -> tuple[str, ...]:
        """Activations that get a bound per channel."""
        return tuple(edit.op for edit in self.edits if isinstance(edit, Clamp))


class _Planner:
    """Plans of groups that are tried together."""

    def __init__(
        self,
        view: FloatModel,
        channels: Mapping[str, Channels | None],
        statistics: Moments,
        extremes: Extremes | None,
        weight_noise: float,
        bar: Bar,
    ) -> None:
        self._view, self._statistics, self._weight_noise, self._bar = view, statistics, weight_noise, bar
        self._extremes = extremes  # where bounds are kept
        self._channels = channels  # by the first producer of a group
        self._last: tuple[tuple[str, ...], _Plan] | None = None

    def plan(self, groups: Sequence[Group]) -> _Plan:
        """The plan of groups that are equalized together; factors accepted in an earlier check are reused."""
        key = tuple(group.producers[0].op for group in groups)
        if self._last is None or self._last[0] != key:
            self._last = key, self._search(groups)
        return self._last[1]

    def _search(self, groups: Sequence[Group]) -> _Plan:
        names = dict.fromkeys(layer.weight for group in groups for layer in group.layers)
        weights = {name: self._view.param(name) for name in names}
        channels = [self._channels[group.producers[0].op] for group in groups]
        bounds = [bounds_of_factors(group, self._extremes) for group in groups]
        factors, rounds, noise = _factors(
            groups, weights, channels, self._statistics, bounds, self._weight_noise, self._bar
        )
        edits, _ = rescaling(self._view, groups, factors, bounds=self._extremes is None)
        before = _spread(groups, weights)
        weights.update({edit.name: edit.value for edit in edits if isinstance(edit, SetParam) and edit.name in weights})
        return _Plan(edits, factors, rounds, (before, _spread(groups, weights)), noise)


def _factors(
    groups: Sequence[Group],
    weights: Mapping[str, Array],
    channels: Sequence[Channels | None],
    statistics: Mapping[str, tuple[Array, Array]],
    bounds: Sequence[Bounds],
    weight_noise: float,
    bar: Bar,
) -> tuple[list[Array], int, tuple[float, float] | None]:
    """Factors of every group within its bounds, the number of rounds, and the noise where values are known."""
    fixed, rounds = [np.ones(group.channels) for group in groups], 0
    if any(known is None for known in channels):
        fixed, rounds = converged_factors(groups, weights, bar)
        fixed = [np.clip(s, *ends) for s, ends in zip(fixed, bounds, strict=True)]
    if all(known is None for known in channels):
        return fixed, rounds, None
    factors, descents, noise = quietest_factors(groups, weights, channels, statistics, fixed, bounds, weight_noise, bar)
    return factors, rounds + descents, noise


def _spread(groups: Sequence[Group], weights: Mapping[str, Array]) -> float:
    """The largest ratio of two output channels' ranges in one producer; channels without weights left out."""
    worst = 1.0
    for layer in (layer for group in groups for layer in group.producers):
        ranges = layer.output_range(weights[layer.weight])
        ranges = ranges[ranges > 0]
        worst = max(worst, float(ranges.max() / ranges.min()) if ranges.size else 1.0)
    return worst


def _divided(
    statistics: Mapping[str, tuple[Array, Array]], groups: Sequence[Group], factors: Sequence[Array]
) -> dict[str, tuple[Array, Array]]:
    found = dict(statistics)
    for group, s in zip(groups, factors, strict=True):
        for layer in group.producers:
            if layer.op in found:
                mean, std = found[layer.op]
                found[layer.op] = (mean / s, std / s)
    return found


def _absorb(view: FloatModel, layers: Layers, report: EqualizeReport) -> None:
    """Move high biases of equalized groups into the next layers where a constant shift stays one."""
    for group in report.groups:
        edits, shift = _absorbing(view, layers, group, report.statistics)
        if edits:
            report._undos.append(view.edit(edits))
            for layer in group.producers:
                mean, std = report.statistics[layer.op]
                report.statistics[layer.op] = (mean - shift, std)
            report.absorbed += tuple(layer.op for layer in group.producers)


def _absorbing(
    view: FloatModel, layers: Layers, group: Group, statistics: Mapping[str, tuple[Array, Array]]
) -> tuple[list[Edit], Array]:
    """The edits that absorb the bias of a group, if any, and the absorbed amount."""
    nothing: tuple[list[Edit], Array] = ([], np.zeros(group.channels))
    (first, *more) = group.producers
    if more or first.op not in statistics or first.bias is None or not _is_behind_relu(layers.graph, group):
        return nothing
    h = absorbed_bias(*statistics[first.op])
    if not h.any() or any(_blocks(layers.graph, layer, h) for layer, _ in group.consumers):
        return nothing
    b = np.asarray(view.param(first.bias), np.float64)
    edits: list[Edit] = [SetParam(first.bias, (b.reshape(-1) - h).reshape(b.shape))]
    for layer, repeat in group.consumers:
        split = layer.axes.split(view.param(layer.weight))
        moved = layer.axes.sum_over_inputs(split * layer.axes.over_inputs(np.repeat(h, repeat)))
        if layer.bias is not None:
            old = np.asarray(view.param(layer.bias), np.float64)
            edits.append(SetParam(layer.bias, old + moved.reshape(old.shape)))
        elif view.can_edit(AddBias(layer.op, moved)):
            return nothing
        else:
            edits.append(AddBias(layer.op, moved))
    return edits, h


def _is_behind_relu(graph: Graph, group: Group) -> bool:
    """Whether the consumers read only a Relu of the producer's output."""
    relu = graph.sole_consumer(group.producers[0].output)
    if relu is None or relu.type != "Relu" or group.clips:
        return False
    return {op.name for op, _ in graph.consumers(relu.outputs[0])} == {c.op for c, _ in group.consumers}


def _blocks(graph: Graph, layer: Layer, shift: Array) -> bool:
    kernel = graph.values[str(graph.op(layer.op).inputs[1])].shape[2:]
    return forward_obstacle(layer.type, layer.attrs, kernel, shift) is not None


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
    options: dict[str, Any] = {"data": data, "absorb_bias": absorb_bias, "keep_bounds": keep_bounds}
    if data is None and opened.reopens:  # data could be run once only
        try:
            moments = {**known, **opened.fold(progress, unchecked=True).moments}
            return equalize_opened(opened, moments, progress, strict=True, **options)
        except _DiffersError:  # by a fold or by a factor: each is looked at by itself
            opened = front_end_of(model).open_model(model, input_shapes, dummy_input, "equalize_model", providers)
    moments = {**known, **opened.fold(progress).moments}
    return equalize_opened(opened, moments, progress, **options)


class _DiffersError(Exception):
    """The outputs of the folded and equalized model differ from the original."""


def equalize_opened(
    opened: Opened,
    moments: Mapping[str, tuple[Array, Array]] | None,
    progress: bool,
    *,
    strict: bool = False,
    **options: Any,
) -> EqualizeReport:
    """:func:`equalize` of an opened model with ``options``; ``strict``: raise where the outputs change."""
    asked: list[str | None] = []

    def check() -> str | None:
        asked.append(problem := opened.changed())
        if strict and problem is not None:
            raise _DiffersError(problem)
        return problem

    report = equalize(opened.view, check, statistics=moments, bar=partial(progress_bar, enabled=progress), **options)
    if strict and not asked:
        check()
    opened.finish(report)
    return report
