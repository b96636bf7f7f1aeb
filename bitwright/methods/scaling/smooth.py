"""SmoothQuant: move outliers of activations into the weights that read them.

A channel that norm or layer makes and linear layers read is divided by ``s[c]`` where it is made and its weights are
multiplied by ``s[c]``; ``s = max|x| ** alpha / max|w| ** (1 - alpha)`` shares the difficulty between the two.

Reference: Xiao et al. 2023, arXiv:2211.10438, eq. 4. Beyond the paper: layers in front of layers, through gates
(SwiGLU), and the keys and queries of attention (:mod:`bitwright.methods.attention`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np

from bitwright.core.simulation.calibration import samples_in
from bitwright.core.simulation.float_model import Edit, FloatModel, SetParam, Undo
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.methods.attention import Attention, find_attention
from bitwright.methods.front_end import front_end_of
from bitwright.methods.layers import (
    Array,
    Bar,
    Check,
    Group,
    Layers,
    Refused,
    Reversible,
    find_groups,
    joined,
    log_refused,
    no_bar,
    rescaling,
    sift,
)
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular, counted

logger = logging.getLogger("bitwright")

#: fewer samples than this may miss the outliers; 128 are enough
FEW_SAMPLES = 8
ENOUGH_SAMPLES = 128


def smoothing_factors(activation: Array, weight: Array, alpha: float = 0.5) -> Array:
    """``max|x| ** alpha / max|w| ** (1 - alpha)`` per channel; 1 where a range is zero.

    Args:
        activation: largest magnitude of the activation per channel, shape [C].
        weight: largest magnitude of the weights that read the channel, shape [C].
        alpha: 0 leaves the activations' ranges to the weights' needs, 1 makes all activation channels alike.

    Example:
        >>> smoothing_factors(np.array([16.0, 1.0]), np.array([1.0, 1.0]))
        array([4., 1.])

    Reference: arXiv:2211.10438, eq. 4.
    """
    x, w = np.asarray(activation, np.float64), np.asarray(weight, np.float64)
    with np.errstate(all="ignore"):
        s = x**alpha / w ** (1 - alpha)
    return np.where(np.isfinite(s) & (s > 0), s, 1.0)


#: which channels of a head must share a factor, from the finest to the coarsest: none, those that rotary positions mix
#: (neighbours, or the two halves), all
TIES: dict[str, Callable[[int], Array]] = {
    "channels": lambda dim: np.arange(dim),
    "pairs": lambda dim: np.arange(dim) // 2,
    "halves": lambda dim: np.arange(dim) % max(1, dim // 2),
    "heads": lambda dim: np.zeros(dim, np.int64),
}


def head_factors(query: Array, key: Array, dim: int, tie: Array, alpha: float = 0.5) -> tuple[Array, Array]:
    """Factors that divide the channels of keys and multiply those of queries, which keeps their products.

    Args:
        query, key: largest magnitude per channel, shapes [query heads * dim], [key heads * dim]; a key head serves
            as many query heads in a row as there are more of them.
        dim: channels per head.
        tie: group of each channel of a head, shape [dim]; a group has one factor.
        alpha: 1 makes all keys alike, 0 all queries.

    Returns:
        ``by``, shape of ``key``, and ``times``, shape of ``query``.
    """
    heads = key.size // dim
    repeat = query.size // key.size
    k = _tied(key.reshape(heads, dim), tie)
    q = _tied(query.reshape(heads, repeat, dim).max(axis=1), tie)
    s = smoothing_factors(k, q, alpha)
    return s.reshape(-1), np.repeat(s[:, None, :], repeat, axis=1).reshape(-1)


def _tied(ranges: Array, tie: Array) -> Array:
    """Largest magnitude per head and group, given to every channel of the group."""
    largest = np.zeros((len(ranges), int(tie.max(initial=0)) + 1))
    for i, group in enumerate(tie):
        largest[:, group] = np.maximum(largest[:, group], ranges[:, i])
    result: Array = largest[:, tie]
    return result


@dataclass
class SmoothReport(Tabular, Reversible):
    """Result of smoothing.

    Attributes:
        groups: producers and the layers that read them.
        factors: per group, what its channels were divided by.
        attentions: those whose keys were balanced against their queries.
        refused: norms and linear layers that begin no group, with the reasons.
        samples: how many were measured.
    """

    _rows = "groups"

    groups: tuple[Group, ...] = ()
    factors: tuple[Array, ...] = field(default=(), repr=False)
    attentions: tuple[Attention, ...] = ()
    refused: tuple[Refused, ...] = ()
    samples: int = 0
    _undos: list[Undo] = field(default_factory=list, repr=False)

    @property
    def changed(self) -> bool:
        """Whether anything was smoothed."""
        return bool(self.groups or self.attentions)

    def __str__(self) -> str:
        keys = f" and the keys of {counted(len(self.attentions), 'attention')}" if self.attentions else ""
        lines = [
            f"{counted(len(self.groups), 'group')}{keys} smoothed on {self.samples} samples, "
            f"{counted(len(self.refused), 'layer')} without a partner"
        ]
        lines += [f"  smoothed  {group}" for group in self.groups]
        lines += [f"  balanced  {attention}" for attention in self.attentions]
        lines += [f"  left      {refused}" for refused in self.refused]
        return "\n".join(lines)


def smooth(
    view: FloatModel, batches: Iterable[Any], check: Check | None = None, *, alpha: float = 0.5, bar: Bar = no_bar
) -> SmoothReport:
    """Smooth every group of a norm or linear layer and the layers after it.

    Args:
        view: the model; changed in place, its function stays.
        batches: a few samples of real data.
        check: says what is wrong with the model's function, or ``None``.
        alpha: 0 to 1; how much of the difficulty goes to the weights.
        bar: shows batches and checks.

    Returns:
        The report; ``report.undo()`` gives the model back as it was.

    Raises:
        ConfigError: ``alpha`` is not between 0 and 1.
        CalibrationError: no batch, or an activation that is NaN or infinite.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError("alpha", f"it is {alpha}", "give a number from 0 to 1; 0.5 is the usual choice")
    layers = Layers(view.graph(), view)
    groups, refused = linear_groups(layers)
    attentions = [heads for heads in find_attention(layers) if _why_not_heads(layers, heads) is None]
    read = [_what_is_read(layers, group) for group in groups]
    scored = [(layer.output, -1) for heads in attentions for layer in heads.scored]
    if not read and not scored:
        return SmoothReport(refused=tuple(refused))  # nothing to measure
    ranges, samples = activation_ranges(view, dict(read + scored), bar(batches, "smooth"))
    factors = {
        id(group): _factors(view, group, ranges[value], alpha) for group, (value, _) in zip(groups, read, strict=True)
    }

    def divide(some: Sequence[Group]) -> Undo:
        return view.edit(rescaling(view, some, [factors[id(group)] for group in some])[0])

    kept, rejected = sift(groups, divide, check, bar)
    refused += [Refused(group.producers[0].op, reason) for group, reason in rejected]
    log_refused(refused, "smoothed")
    undos = [divide(kept)]
    try:
        balanced = _balance(view, attentions, ranges, alpha, check, undos)
    except BaseException:
        joined(undos)()
        raise
    chosen = tuple(factors[id(group)] for group in kept)
    left = _still_refused(refused, balanced)
    return SmoothReport(tuple(kept), chosen, tuple(balanced), left, samples, undos)


def _still_refused(refused: Iterable[Refused], balanced: Iterable[Attention]) -> tuple[Refused, ...]:
    taken = {layer.op for heads in balanced for layer in heads.scored}
    return tuple(line for line in refused if line.op not in taken)


def _what_is_read(layers: Layers, group: Group) -> tuple[str, int]:
    """The value that the first consumer of a group reads, and its channel axis."""
    consumer, _ = group.consumers[0]
    spatial = consumer.type in ("Conv", "ConvTranspose")
    return str(layers.graph.op(consumer.op).inputs[0]), 1 if spatial else -1


def _why_not_heads(layers: Layers, heads: Attention) -> str | None:
    query, key = heads.query, heads.key
    if query is None or key is None or query.op == key.op or query.axes.outputs % key.axes.outputs:
        return "queries and keys do not come from a linear layer each"
    return layers.why_not_private(query) or layers.why_not_private(key)


def _balance(
    view: FloatModel, attentions: Sequence[Attention], ranges: Mapping[str, Array], alpha: float, check: Check | None,
    undos: list[Undo],
) -> list[Attention]:  # fmt: skip
    """Divide keys and multiply queries by the finest factors that keep the function."""
    if check is None:
        return []

    def divide(some: Sequence[Attention], tie: str) -> Undo:
        return view.edit([edit for heads in some for edit in _head_edits(view, heads, ranges, tie, alpha)])

    open_heads, balanced = list(attentions), []
    for tie in TIES:
        # an attention that allows a tie has siblings that do: the first tells whether to try the rest
        if open_heads and sift(open_heads[:1], lambda some, tie=tie: divide(some, tie), check)[0]:  # type: ignore[misc]
            kept, rejected = sift(open_heads, lambda some, tie=tie: divide(some, tie), check)  # type: ignore[misc]
            undos.append(divide(kept, tie))
            balanced += kept
            open_heads = [heads for heads, _ in rejected]
    return balanced


def _head_edits(view: FloatModel, heads: Attention, ranges: Mapping[str, Array], tie: str, alpha: float) -> list[Edit]:
    query, key = heads.query, heads.key
    assert query is not None and key is not None
    by, times = head_factors(ranges[query.output], ranges[key.output], heads.dim, TIES[tie](heads.dim), alpha)
    edits: list[Edit] = []
    for layer, factor in ((key, 1 / by), (query, times)):
        edits.append(SetParam(layer.weight, layer.times_outputs(view.param(layer.weight), factor)))
        if layer.bias is not None:
            b = np.asarray(view.param(layer.bias), np.float64)
            edits.append(SetParam(layer.bias, (b.reshape(-1) * factor).reshape(b.shape)))
    return edits


def _factors(view: FloatModel, group: Group, activation: Array, alpha: float) -> Array:
    weights = [
        group.gathered(layer.input_range(view.param(layer.weight)), repeat).max(axis=1)
        for layer, repeat in group.consumers
    ]
    magnitude = group.gathered(activation, activation.size // group.channels).max(axis=1)
    return smoothing_factors(magnitude, np.max(weights, axis=0), alpha)


def linear_groups(layers: Layers) -> tuple[list[Group], list[Refused]]:
    """The groups that begin at a norm or linear layer, and the reasons of layers that begin none."""
    starts = [layer for layer in layers.of.values() if layer.kind == "norm" or layer.type in ("Gemm", "MatMul")]
    found, refused = find_groups(layers, starts)
    groups = []
    for group in found:
        if group.clips:
            refused.append(
                Refused(group.producers[0].op, f"{group.clips[0][0].name} cuts at fixed bounds; equalize it")
            )
        else:
            groups.append(group)
    return groups, refused


def refuse_no_data(method: str = "smooth") -> NoReturn:
    """Raise the error for missing data."""
    raise CalibrationError(method, "the data held no batch", f"give about {ENOUGH_SAMPLES} samples")


def activation_ranges(
    view: FloatModel, values: Mapping[str, int], batches: Iterable[Any]
) -> tuple[dict[str, Array], int]:
    """Largest magnitude per channel of some values, and the number of samples.

    Args:
        view: the model.
        values: of the graph, each with the axis of its channels.
        batches: run one by one.

    Raises:
        CalibrationError: no batch, or a value that is NaN or infinite.
    """
    held: dict[str, Array] = {}

    def note(value: str, rows: Array) -> None:
        largest = np.abs(rows).max(axis=0, initial=0.0)
        held[value] = np.maximum(held[value], largest) if value in held else largest

    return held, observe(view, values, batches, note)


def observe(
    view: FloatModel, values: Mapping[str, int], batches: Iterable[Any], note: Callable[[str, Array], None],
    method: str = "smooth",
) -> int:  # fmt: skip
    """Run the batches and pass values to ``note`` as rows with one column per channel.

    Args:
        view: the model.
        values: of the graph, each with the axis of its channels.
        batches: run one by one.
        note: called with the name of a value and an array [rows, channels], for every run of its place.
        method: who asks, for messages.

    Returns:
        The number of samples.

    Raises:
        CalibrationError: no batch, or a value that is NaN or infinite.
    """

    def rows_of(value: str, array: Array) -> None:
        rows = np.moveaxis(array, values[value], -1).reshape(-1, array.shape[values[value]])
        check_finite(value, np.asarray(np.isfinite(rows).all(axis=0)))
        note(value, rows)

    return observe_arrays(view, values, batches, rows_of, method)


def observe_arrays(
    view: FloatModel, values: Iterable[str], batches: Iterable[Any], note: Callable[[str, Array], None], method: str
) -> int:
    """:func:`observe` with values in the model's shape, unchecked.

    Raises:
        CalibrationError: no batch.
    """
    samples = 0

    def counted() -> Iterable[Any]:
        nonlocal samples
        for batch in batches:
            samples += samples_in(batch)
            yield batch

    for captured in view.capture(list(values), counted()):
        for value, arrays in captured.items():
            for array in arrays:
                note(value, array)
    if not samples:
        refuse_no_data(method)
    if samples < FEW_SAMPLES:
        logger.warning("%s: %d samples may miss the outliers; %d are enough", method, samples, ENOUGH_SAMPLES)
    return samples


def check_finite(value: str, good: Array) -> None:
    """Refuse a value with NaN or Inf in a channel; ``good``: [channels] of bool.

    Raises:
        CalibrationError: there is one.
    """
    if not good.all():
        raise CalibrationError(
            value,
            f"channel {int(np.argmin(good))} is NaN or infinite on this data",
            "look for the first such value in the float model, and leave out the samples that cause it",
        )


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

    It applies to norms and linear layers that feed linear layers, gates (SwiGLU) included, and to the keys of attention
    against its queries. The model computes the same function; groups whose scaling would change it are left alone.

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
        refuse_no_data()
    example = batches[0] if dummy_input is None else dummy_input
    opened = front_end_of(model).open_model(model, None, example, "smooth_model", providers)
    report = smooth(opened.view, batches, opened.changed, alpha=alpha, bar=partial(progress_bar, enabled=progress))
    opened.finish(report)
    return report
