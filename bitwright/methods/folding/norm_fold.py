"""Folding the weights of layer and RMS norms into the linear layers after them.

``W (gamma n + beta) = (W gamma) n + W beta``: the norm is left with a weight of one and no bias, and what enters the
layers has the same range in every channel that the norm gave it. Rotation needs it; by itself it takes one
quantizer's work out of the graph.

Reference: Ashkboos et al. 2024, arXiv:2404.00456, section 3.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bitwright.core.simulation.float_model import AddBias, Edit, FloatModel, SetParam, Undo, Untie
from bitwright.errors import checks_arguments
from bitwright.methods.front_end import front_end_of
from bitwright.methods.layers import (
    MOVES,
    Array,
    Bar,
    Check,
    Group,
    Layer,
    Layers,
    Refused,
    Reversible,
    data_readers,
    find_groups,
    joined,
    no_bar,
    sift,
)
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular

logger = logging.getLogger("bitwright")


def folded_weight(layer: Layer, W: Array, gamma: Array, beta: Array | None) -> tuple[Array, Array]:
    """Weight and added bias of a linear layer after a norm.

    Args:
        layer: the linear layer.
        W: its weight.
        gamma, beta: of the norm, shape [inputs].

    Returns:
        ``W'``, float64, shape of ``W``; and what its bias grows by, float64, shape [outputs].
    """
    shift = np.zeros(layer.axes.outputs)
    if beta is not None:
        split = layer.axes.split(np.asarray(W, np.float64))
        shift = layer.axes.sum_over_inputs(split * layer.axes.over_inputs(beta))
    return layer.times_inputs(W, gamma), shift


@dataclass
class NormReport(Tabular, Reversible):
    """Result of folding norms.

    Attributes:
        groups: norms with the layers that took their weights.
        refused: norms that keep theirs, with the reasons.
        untied: layers that got a copy of their own of a weight shared with an embedding.
    """

    _rows = "groups"

    groups: tuple[Group, ...] = ()
    refused: tuple[Refused, ...] = ()
    untied: tuple[str, ...] = ()
    _undos: list[Undo] = field(default_factory=list, repr=False)

    @property
    def changed(self) -> bool:
        """Whether a norm was folded."""
        return bool(self.groups)

    def __str__(self) -> str:
        lines = [f"{len(self.groups)} norms folded, {len(self.refused)} kept"]
        lines += [f"  folded  {group}" for group in self.groups]
        lines += [f"  untied  {op}: a copy of its own of the shared weight" for op in self.untied]
        lines += [f"  kept    {refused}" for refused in self.refused]
        return "\n".join(lines)


def fold_norm_weights(
    view: FloatModel, check: Check | None = None, *, untie: bool = True, bar: Bar = no_bar
) -> NormReport:
    """Fold the weight and bias of every norm that only linear layers read.

    Args:
        view: the model; changed in place.
        check: says what is wrong with the model's function, or ``None``.
        untie: give an output layer that shares its weight with the embedding a copy of its own. Without it the
            norm before such a layer keeps its weight.
        bar: shows the checks.

    Returns:
        The report; ``report.undo()`` gives the model back as it was.
    """
    undos: list[Undo] = []
    try:
        return _fold(view, check, untie, undos, bar)
    except BaseException:
        joined(undos)()
        raise


def _fold(view: FloatModel, check: Check | None, untie: bool, undos: list[Undo], bar: Bar) -> NormReport:
    untied = untie_heads(view, undos) if untie else ()
    layers = Layers(view.graph(), view)
    found, refused = find_groups(layers, [layer for layer in layers.of.values() if layer.kind == "norm"])
    groups = []
    for group in found:
        reason = _why_not(view, layers, group)
        if reason is None:
            groups.append(group)
        else:
            refused.append(Refused(group.producers[0].op, reason))
    kept, rejected = sift(groups, lambda some: view.edit(_edits(view, some)), check, bar)
    refused += [Refused(group.producers[0].op, reason) for group, reason in rejected]
    undos.append(view.edit(_edits(view, kept)))
    for line in refused:
        logger.info("norm kept: %s", line)
    return NormReport(tuple(kept), tuple(refused), untied, undos)


def untie_heads(view: FloatModel, undos: list[Undo]) -> tuple[str, ...]:
    """Give every linear layer that is tied to an embedding its own copy of the weight, where the model allows it."""
    graph = view.graph()
    layers = Layers(graph)
    tables = {layer.weight for layer in layers.of.values() if layer.kind == "embedding"}
    done = []
    for layer in [layer for layer in layers.of.values() if layer.kind == "layer" and layer.weight in tables]:
        edit = Untie(layer.op, 1)
        if view.can_edit(edit) is None:
            undos.append(view.edit([edit]))
            done.append(layer.op)
    return tuple(done)


def _why_not(view: FloatModel, layers: Layers, group: Group) -> str | None:
    norm, *more = group.producers
    direct = _readers(layers, norm.output) == {layer.op for layer, _ in group.consumers}
    if more or not direct or any(repeat != 1 for _, repeat in group.consumers):
        return "between it and the layers after it is another operator"
    if norm.bias is None or not np.any(view.param(norm.bias)):
        return None
    for layer, _ in group.consumers:
        reason = None if layer.bias else view.can_edit(AddBias(layer.op, np.zeros(layer.axes.outputs)))
        if reason:
            return f"{layer.op} has no place for the bias of the norm: {reason}"
    return None


def _readers(layers: Layers, value: str) -> set[str]:
    """Names of the operators that read ``value``, a selection of its rows, or a reshaped form."""
    found: set[str] = set()
    open_values = [value]
    while open_values:
        for op, _ in data_readers(layers.graph, open_values.pop()):
            if op.type in MOVES:
                open_values += op.outputs
            else:
                found.add(op.name)
    return found


def _edits(view: FloatModel, groups: Sequence[Group]) -> list[Edit]:
    edits: list[Edit] = []
    for group in groups:
        (norm,) = group.producers
        gamma = np.asarray(view.param(norm.weight), np.float64) + norm.offset
        beta = None if norm.bias is None else np.asarray(view.param(norm.bias), np.float64)
        edits.append(SetParam(norm.weight, np.full_like(gamma, 1 - norm.offset)))
        if norm.bias is not None:
            edits.append(SetParam(norm.bias, np.zeros_like(gamma)))
        for layer, _ in group.consumers:
            W, shift = folded_weight(layer, view.param(layer.weight), gamma, beta)
            edits.append(SetParam(layer.weight, W))
            if layer.bias is not None:
                old = np.asarray(view.param(layer.bias), np.float64)
                edits.append(SetParam(layer.bias, old + shift.reshape(old.shape)))
            elif np.any(shift):
                edits.append(AddBias(layer.op, shift))
    return edits


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
    report = fold_norm_weights(opened.view, opened.changed, untie=untie, bar=partial(progress_bar, enabled=progress))
    opened.finish(report)
    return report
