"""Rotations, merged into weights, that spread outliers over all channels.

A transformer's residual stream is only added to, normalised by its root mean square and read by linear layers, so it
may be multiplied by any orthogonal matrix ``R``: what writes into the stream is multiplied by ``R``, what reads from it
by ``R`` transposed. The values of an attention head may be rotated alike between their projection and the output
projection. A Hadamard matrix with random signs makes the channels as alike as a rotation can.

Other layers that write into the stream, as the down projection, read what no other layer makes. A product by an orthogonal
matrix is put in front of each of these where asked for (R4 of SpinQuant), and their weights undo it.

Reference: Ashkboos et al. 2024, arXiv:2404.00456, section 4, stages 1a to 1c. The rotation of what a cache holds is a setting of
the cache (:mod:`bitwright.core.placement.kv_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bitwright.core.graph.graph import Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.rotations import is_hadamard, random_rotation
from bitwright.core.simulation.float_model import Before, Chain, Edit, FloatModel, SetParam, Undo
from bitwright.errors import checks_arguments
from bitwright.methods.attention import Attention, find_attention
from bitwright.methods.folding.norm_fold import NormReport, fold_norm_weights
from bitwright.methods.front_end import front_end_of
from bitwright.methods.layers import (
    Array,
    Bar,
    Check,
    Layer,
    Layers,
    Refused,
    Reversible,
    data_readers,
    joined,
    log_refused,
    no_bar,
    sift,
    sole_reader,
)
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular


def turned_outputs(layer: Layer, W: Array, R: Array) -> Array:
    """The weight of a layer whose output ``y`` becomes ``y @ R``; float64, shape of ``W``."""
    wide = np.asarray(W, np.float64)
    rows_are_outputs = layer.kind == "layer" and layer.axes.outputs_first
    return R.T @ wide if rows_are_outputs else wide @ R


def turned_inputs(layer: Layer, W: Array, R: Array) -> Array:
    """The weight of a layer that reads ``x @ R`` instead of ``x``; float64, shape of ``W``."""
    wide = np.asarray(W, np.float64)
    return wide @ R if layer.axes.outputs_first else R.T @ wide


# ------------------------------------------------------------------------------------------------ streams


@dataclass(frozen=True)
class Stream:
    """A residual stream.

    Attributes:
        producers: layers and embeddings that write into it.
        consumers: linear layers that read from it, most of them after a norm.
        tables: parameters added to it, as learned positions are.
        channels: its width.
    """

    _as_text = True

    producers: tuple[Layer, ...]
    consumers: tuple[Layer, ...]
    tables: tuple[str, ...]
    channels: int

    def __str__(self) -> str:
        return (
            f"stream of {self.channels} channels from {self.producers[0].op}: {len(self.producers)} layers write into "
            f"it, {len(self.consumers)} read from it"
        )


_MOVES = frozenset((*TRAITS["identity"], *TRAITS["reshape"], "Slice"))
_MOVES_TOO = frozenset({"Gather"})


def find_streams(view: FloatModel, layers: Layers) -> tuple[list[Stream], list[Refused]]:
    """The residual streams that can be rotated, and the reasons of the others."""
    streams: list[Stream] = []
    refused: list[Refused] = []
    seen: set[str] = set()
    for start in _starts(layers):
        if start.op in seen:
            continue
        walk = _StreamWalk(view, layers, start.axes.outputs)
        reason = walk.run(start)
        seen.update(layer.op for layer in walk.producers)
        if reason is None:
            streams.append(Stream(tuple(walk.producers), tuple(walk.consumers), tuple(walk.tables), walk.channels))
        else:
            refused.append(Refused(start.op, reason))
    return streams, refused


def _starts(layers: Layers) -> list[Layer]:
    """Embeddings, and linear layers whose result is an addend."""

    def adds(layer: Layer) -> bool:
        return any(op.type == "Add" for op, _ in layers.graph.consumers(layer.output))

    held = layers.of.values()
    return [layer for layer in held if layer.kind == "embedding"] + [
        layer for layer in held if layer.kind == "layer" and layer.type in ("Gemm", "MatMul") and adds(layer)
    ]


class _StreamWalk:
    """The closure of a value over additions, norms without weights and operators that move rows."""

    def __init__(self, view: FloatModel, layers: Layers, channels: int) -> None:
        self.view, self.layers, self.graph, self.channels = view, layers, layers.graph, channels
        self.producers: list[Layer] = []
        self.consumers: list[Layer] = []
        self.tables: list[str] = []
        self.seen: set[str] = set()
        self.open: list[str] = []

    def run(self, start: Layer) -> str | None:
        """The reason why the stream of ``start``'s output cannot be rotated; ``None`` when it can."""
        self._enter(start.output)
        reason: str | None = None
        while self.open and reason is None:
            value = self.open.pop()
            reason = self._before(value) or self._behind(value)
        if reason is None and len(self.producers) + len(self.consumers) < 2:
            reason = "no other layer shares its channels"
        for layer in (*self.producers, *self.consumers):
            reason = reason or self.layers.why_not_private(layer)
        return reason

    def _enter(self, value: str) -> None:
        if value not in self.seen:
            self.seen.add(value)
            self.open.append(value)

    def _before(self, value: str) -> str | None:
        layer = self.layers.by_output.get(value)
        if layer is not None and layer.kind != "norm":
            self.producers.append(layer)
            good = layer.axes.outputs == self.channels and layer.channel_axis == layer.rank - 1
            return None if good else f"{layer.op} ({layer.type}) writes into it with channels on another axis"
        op = self.graph.producer(value)
        if op is None:
            return f"{value} in it is an input of the model"
        if not self.seen.isdisjoint(source for source in op.inputs if source is not None):
            return None
        if op.type not in _MOVES | {"Add", "Mul", "Div"} or op.inputs[0] is None or op.also:
            return f"{op.name} ({op.type}) writes into it"
        sources = op.inputs if op.type in ("Add", "Mul") else op.inputs[:1]
        for source in sources:
            if source is not None and self._is_wide(source) and not self.graph.values[source].is_static:
                self._enter(source)
        return None

    def _is_wide(self, value: str) -> bool:
        shape = self.graph.values[value].shape
        return bool(shape) and shape[-1] == self.channels

    def _behind(self, value: str) -> str | None:
        if self.graph.is_output(value):
            return f"{value} in it is an output of the model"
        for op, port in data_readers(self.graph, value):
            if not (layer := self.layers.of.get(op.name)) or layer.adder != op.name:
                reason = self._reader(op, port, value)
                if reason:
                    return reason
        return None

    def _reader(self, op: Op, port: int, value: str) -> str | None:
        layer = self.layers.of.get(op.name)
        if op.also:
            return f"{op.name} ({op.type}) reads it and runs several times"
        if layer is not None and layer.kind == "layer":
            if port or layer.type not in ("Gemm", "MatMul") or layer.axes.inputs != self.channels:
                return f"{op.name} ({op.type}) reads it with channels on another axis"
            self.consumers.append(layer)
            return None
        if op.type in ("Pow", "Mul", "Square") and self._is_mean_square(op, value):
            return None
        if op.type == "RMSNormalization" or op.type == "Mul" and layer is not None:
            return self._norm(op, layer)
        if op.type == "Add":
            return self._add(op, value)
        if self._hands_on(op, port, value):
            self._enter(op.outputs[0])
            return None
        norm = op.type == "LayerNormalization"
        hint = ", which subtracts the mean: a rotation does not keep it" if norm else ""
        return f"{op.name} ({op.type}) reads it{hint}"

    def _hands_on(self, op: Op, port: int, value: str) -> bool:
        """Whether the output of ``op`` is the stream with its rows scaled or moved."""
        if op.type in ("Mul", "Div"):
            return (port == 0 or op.type == "Mul") and self._per_row(op, value)
        moves = op.type in _MOVES | _MOVES_TOO and port == 0
        return moves and len(op.outputs) == 1 and self._is_wide(op.outputs[0])

    def _is_mean_square(self, op: Op, value: str) -> bool:
        """Whether ``op`` squares the stream, and only the mean over channels reads the result."""
        others = {source for source in op.inputs if source is not None and source != value}
        if op.type == "Mul" and others or any(not self.graph.values[o].is_static for o in others):
            return False
        mean = sole_reader(self.graph, op.outputs[0])
        reduced = mean is not None and mean.type in ("ReduceMean", "ReduceSum")
        return reduced and not self._is_wide(mean.outputs[0])  # type: ignore[union-attr]

    def _norm(self, op: Op, layer: Layer | None) -> str | None:
        if layer is None and len([source for source in op.inputs if source]) > 1:
            return f"the weight of {op.name} is not a stored parameter"
        if layer is not None and (
            layer.bias is not None or not np.all(self.view.param(layer.weight) + layer.offset == 1)
        ):
            return f"the weight of the norm {op.name} is not folded into the layers after it"
        self._enter(op.outputs[0])
        return None

    def _add(self, op: Op, value: str) -> str | None:
        for source in op.inputs:
            if source is None or source == value:
                continue
            held = self.graph.values[source]
            if not held.is_static:
                if self._is_wide(source):
                    self._enter(source)
                    continue
                return f"{op.name} adds {source} of shape {held.shape} to it"
            name = held.param or source
            if held.kind != "param" or not self._is_wide(source) or name in self.layers.shared:
                return f"{op.name} adds {source} to it, which is not a parameter of its own with a value per channel"
            self.tables.append(name)
        self._enter(op.outputs[0])
        return None

    def _per_row(self, op: Op, value: str) -> bool:
        """Whether the other operand has one number for all channels."""
        others = [source for source in op.inputs if source is not None and source != value]
        shapes = [self.graph.values[source].shape for source in others]
        return all(not shape or shape[-1] == 1 for shape in shapes)


# ---------------------------------------------------------------------------------------------- on a model


@dataclass(frozen=True)
class Online:
    """A layer whose input is rotated at run time.

    Attributes:
        layer: whose input is rotated.
        size: channels.
        hadamard: whether by a Hadamard matrix with random signs; else by a random orthogonal matrix, as there is no Hadamard
            matrix of this size here.
    """

    _as_text = True

    layer: Layer
    size: int
    hadamard: bool

    def __str__(self) -> str:
        kind = "Hadamard" if self.hadamard else f"random orthogonal, as no Hadamard matrix has the size {self.size}"
        return f"input of {self.layer.op} at run time, {self.size} channels ({kind})"


@dataclass
class RotateReport(Tabular, Reversible):
    """Result of a rotation.

    Attributes:
        norms: what was folded first.
        streams: rotated residual streams.
        heads: attentions whose values were rotated per head.
        online: layers whose input a product rotates at run time.
        refused: streams and attentions left as they are, with the reasons.
    """

    _rows = "streams"

    norms: NormReport
    streams: tuple[Stream, ...] = ()
    heads: tuple[Attention, ...] = ()
    online: tuple[Online, ...] = ()
    refused: tuple[Refused, ...] = ()
    _undos: list[Undo] = field(default_factory=list, repr=False)

    @property
    def changed(self) -> bool:
        """Whether anything was rotated."""
        return bool(self.streams or self.heads or self.online)

    def undo(self) -> None:
        """Restore the original model including norms; a second call does nothing."""
        super().undo()
        self.norms.undo()

    def keep(self) -> None:
        """Make the change final."""
        super().keep()
        self.norms.keep()

    def __str__(self) -> str:
        nothing = "" if self.changed else "NOTHING is rotated: "
        first = f" ({self.refused[0]})" if self.refused and not self.changed else ""
        lines = [
            f"{nothing}{len(self.streams)} residual streams and the values of {len(self.heads)} attentions rotated, "
            f"{f'{len(self.online)} inputs rotated at run time, ' if self.online else ''}"
            f"{len(self.refused)} left; {len(self.norms.groups)} norms folded{first}"
        ]
        lines += [f"  rotated  {stream}" for stream in self.streams]
        lines += [
            f"  rotated  values {heads.value.op} -> {heads.output.op}"
            for heads in self.heads
            if heads.output and heads.value
        ]
        lines += [f"  rotated  {online}" for online in self.online]
        lines += [f"  left     {refused}" for refused in self.refused]
        return "\n".join(lines)


def rotate(
    view: FloatModel,
    check: Check | None = None,
    *,
    seed: int = 0,
    streams: bool = True,
    heads: bool = True,
    online: bool = False,
    bar: Bar = no_bar,
) -> RotateReport:
    """Fold norms, then rotate residual streams and values of attentions where possible.

    Args:
        view: the model; changed in place, its function stays.
        check: says what is wrong with the model's function, or ``None``.
        seed: of the signs.
        streams: rotate residual streams (R1 of SpinQuant); norms are folded for them.
        heads: rotate the values of attention heads (R2).
        online: rotate what the other layers that write into a stream read, by a product at run time (R4).
        bar: shows the checks.

    Returns:
        The report; ``report.undo()`` gives the model back as it was. Where no stream can be rotated the norms are
        left as they were, and the heads too.
    """
    norms = fold_norm_weights(view, check, bar=bar) if streams else NormReport()
    undos: list[Undo] = []
    try:
        layers = Layers(view.graph(), view)
        found, refused = find_streams(view, layers) if streams else ([], [])
        kept, rejected = sift(found, lambda some: _rotate_streams(view, some, seed), check, bar)
        refused += [Refused(stream.producers[0].op, reason) for stream, reason in rejected]
        undos.append(_rotate_streams(view, kept, seed))
        values = rotatable_heads(layers) if heads and (kept or not streams) else []
        turned, failed = sift(values, lambda some: _rotate_heads(view, some, seed), check, bar)
        refused += [Refused(h.value.op, reason) for h, reason in failed if h.value]
        undos.append(_rotate_heads(view, turned, seed))
        before, unfit = _online_candidates(view, layers) if online else ([], [])
        added, broken = sift(before, lambda some: _rotate_online(view, some, seed), check, bar)
        refused += [*unfit, *(Refused(item.layer.op, reason) for item, reason in broken)]
        undos.append(_rotate_online(view, added, seed))
    except BaseException:
        joined(undos)()
        norms.undo()
        raise
    if not kept and streams:
        refused = [*norms.refused, *refused]
        norms.undo()
        norms = NormReport()
    report = RotateReport(norms, tuple(kept), tuple(turned), tuple(added), tuple(refused), undos)
    log_refused(report.refused, "rotated", changed=report.changed, without=", as the model has no residual stream")
    return report


def rotatable_heads(layers: Layers) -> list[Attention]:
    """Attentions whose values come from one layer and go to one, both with private parameters."""
    found = find_attention(layers)
    return [
        heads
        for heads in found
        if heads.value is not None
        and heads.output is not None
        and not any(layers.why_not_private(layer) for layer in (heads.value, heads.output))
    ]


def _online_candidates(view: FloatModel, layers: Layers) -> tuple[list[Online], list[Refused]]:
    """Layers that write into streams, without those that read an attention's values, and the reasons of refused ones."""
    found, refused = [], []
    attended = {heads.output.op for heads in find_attention(layers) if heads.output is not None}
    streams, _ = find_streams(view, layers)
    for layer in {layer.op: layer for stream in streams for layer in stream.producers}.values():
        if layer.kind != "layer" or layer.type not in ("Gemm", "MatMul") or layer.op in attended:
            continue
        size = layer.axes.inputs
        weight = np.asarray(view.param(layer.weight))
        chain = Chain(layer.op, (Before("MatMul", np.eye(size, dtype=np.float32), {}, rotates=True),), weight, {})
        reason = layers.why_not_private(layer) or view.can_edit(chain)
        if reason is None:
            found.append(Online(layer, size, is_hadamard(size)))
        else:
            refused.append(Refused(layer.op, reason))
    return found, refused


def _rotate_online(view: FloatModel, found: Sequence[Online], seed: int) -> Undo:
    edits: list[Edit] = []
    for item in found:
        R = random_rotation(item.size, seed)
        weight = turned_inputs(item.layer, view.param(item.layer.weight), R).astype(np.float32)
        before = Before("MatMul", R.astype(np.float32), {}, rotates=True)
        edits.append(Chain(item.layer.op, (before,), weight, {}))
    return view.edit(edits)


def _rotate_streams(view: FloatModel, streams: Sequence[Stream], seed: int) -> Undo:
    edits: list[Edit] = []
    for stream in streams:
        R = random_rotation(stream.channels, seed)
        changed: dict[str, Array] = {}

        def held(name: str, changed: dict[str, Array] = changed) -> Array:
            return changed[name] if name in changed else np.asarray(view.param(name), np.float64)

        for layer in stream.producers:
            changed[layer.weight] = turned_outputs(layer, held(layer.weight), R)
            if layer.bias is not None:
                changed[layer.bias] = held(layer.bias) @ R
        for layer in stream.consumers:
            changed[layer.weight] = turned_inputs(layer, held(layer.weight), R)
        changed.update({name: held(name) @ R for name in stream.tables})
        edits += [SetParam(name, value) for name, value in changed.items()]
    return view.edit(edits)


def _rotate_heads(view: FloatModel, found: Sequence[Attention], seed: int) -> Undo:
    edits: list[Edit] = []
    for heads in found:
        value, output = heads.value, heads.output
        assert value is not None and output is not None
        R = random_rotation(heads.value_dim, seed)
        inner = np.kron(np.eye(value.axes.outputs // heads.value_dim), R)
        outer = np.kron(np.eye(output.axes.inputs // heads.value_dim), R)
        edits.append(SetParam(value.weight, turned_outputs(value, view.param(value.weight), inner)))
        if value.bias is not None:
            edits.append(SetParam(value.bias, np.asarray(view.param(value.bias), np.float64) @ inner))
        edits.append(SetParam(output.weight, turned_inputs(output, view.param(output.weight), outer)))
    return view.edit(edits)


@checks_arguments
def rotate_model(
    model: Any,
    input_shapes: Any = None,
    dummy_input: Any = None,
    *,
    seed: int = 0,
    streams: bool = True,
    heads: bool = True,
    online: bool = False,
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
        online: put a product by an orthogonal matrix in front of every other layer that writes into the stream (down
            projections), for activations of few bits. It runs in float and is exported as a MatMul; simulations leave it,
            and what it reads, in float. Where a size has no Hadamard matrix the matrix is a random orthogonal one.
        progress: show a progress bar on a terminal.

    Returns:
        The report; of a module ``report.undo()`` gives it back as it was. The change of an ONNX model is final.

    Raises:
        ModelError: as for :func:`equalize_model`.

    Reference: Ashkboos et al. 2024, arXiv:2404.00456.
    """
    opened = front_end_of(model).open_model(model, input_shapes, dummy_input, "rotate_model", providers)
    report = rotate(
        opened.view,
        opened.changed,
        seed=seed,
        streams=streams,
        heads=heads,
        online=online,
        bar=partial(progress_bar, enabled=progress),
    )
    opened.finish(report)
    return report


@checks_arguments
def apply_spinquant(
    model: Any,
    dummy_input: Any = None,
    *,
    enable_r1: bool = True,
    enable_r2: bool = False,
    enable_r4: bool = False,
    **options: Any,
) -> RotateReport:
    """:func:`rotate_model` with SpinQuant's names: of residual streams (R1), of attention heads' values (R2), and of what
    down projections read (R4, at run time).

    The rotations are Hadamard matrices; they are not learned. Reference: Liu et al. 2024, arXiv:2405.16406.
    """
    return rotate_model(model, None, dummy_input, streams=enable_r1, heads=enable_r2, online=enable_r4, **options)
