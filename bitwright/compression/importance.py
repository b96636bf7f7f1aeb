"""Importance of the units of a group: one function per criterion, on parameters and statistics of either front end.

Every score is of a unit within its group; :func:`comparable` makes those of unlike groups comparable, by dividing by the mean of
the group, so that a global ranking does not remove a layer whose weights merely are small.

==============  ==================================================================================================
name            a unit's score
==============  ==================================================================================================
``l1``, ``l2``  norm of the rows that make it and of the columns that read it, each in parts of its parameter's mean; weights in
                front of a batch norm as it scales their results
``gamma``       magnitude of the factors of its batch norms (Liu et al. 2017, arXiv:1708.06519)
``median``      sum of distances of its rows from those of the other units (He et al. 2019, arXiv:1811.00250)
``lamp``        squared norm over the sum of the squared norms that are not smaller (Lee et al. 2021, arXiv:2010.07611)
``taylor``      what the loss would change by, ``|sum(gradient * weight)|`` (Molchanov et al. 2019, arXiv:1906.10771)
``hessian``     what the outputs would change by, without labels: the mean of ``sum(gradient * weight)`` squared, over gradients
                of the outputs in random directions, which is the change to first order (the Gauss-Newton matrix of the squared
                error, as Hassibi and Stork 1993, but per unit)
``activation``  norm of what its readers read times the norm of the columns they read it by (as Sun et al., arXiv:2306.11695)
``random``      random numbers: the baseline of every comparison
==============  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.compression.groups import Group, Member
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS, weight_axes
from bitwright.core.simulation.float_model import Array
from bitwright.errors import ConfigError, close_matches
from bitwright.methods.layers import bn_affine


@dataclass
class Evidence:
    """Inputs of the importance criteria.

    Attributes:
        graph: of the model.
        param: name -> value.
        gradients: parameter -> gradient of the loss, summed over the data; for ``taylor``.
        directions: such gradients of the outputs in random directions, one after the other; for ``hessian``.
        squares: operator -> mean square of each channel it reads, and the axis of its weight that they belong to; for
            ``activation``.
        seed: of ``random``.
        normed: layer -> itself and the batch norm of its result.
    """

    graph: Graph
    param: Callable[[str], Array]
    gradients: Mapping[str, Array] = field(default_factory=dict)
    directions: Sequence[Mapping[str, Array]] = ()
    squares: Mapping[str, Array] = field(default_factory=dict)
    seed: int = 0
    normed: Mapping[str, tuple[Op, Op]] = field(init=False)

    def __post_init__(self) -> None:
        self.normed = _normed(self.graph)

    def rows(self, member: Member, value: Array | None = None) -> Array:
        """The parameters of each unit in one member, ``[units, n]``, float64."""
        W = np.asarray(self.param(member.param) if value is None else value, np.float64)
        lines = np.moveaxis(W, member.axis, 0).reshape(W.shape[member.axis], -1)
        return lines[member.positions].reshape(len(member.positions), -1)


def comparable(scores: Array) -> Array:
    """Scores relative to their group's mean; all 1 where all are 0.

    >>> comparable(np.array([1.0, 3.0])).tolist()
    [0.5, 1.5]
    """
    mean = float(np.mean(scores))
    return np.ones_like(scores) if mean == 0 else scores / mean


def _norms(group: Group, evidence: Evidence, power: int) -> Array:
    found = []
    for member in (*group.makers, *group.readers):
        rows = evidence.rows(member, _folded(evidence, member))
        norms = np.abs(rows).sum(1) if power == 1 else np.sqrt(np.square(rows).sum(1))
        found.append(comparable(norms))
    return np.sum(found, 0)


def _folded(evidence: Evidence, member: Member) -> Array:
    """The parameter of a member, times the factors of the batch norm after its layer.

    A batch norm undoes the scale of the rows in front of it, so that norms of a layer's weights say nothing by themselves.
    """
    W = np.asarray(evidence.param(member.param), np.float64)
    layer, norm = evidence.normed.get(member.op, (None, None))
    if layer is None or norm is None:
        return W
    axis, _ = weight_axes(layer.type, layer.attrs, 1, W.ndim)
    values = evidence.graph.values
    stored = [values[v].param if v is not None else None for v in norm.inputs[1:5]]
    gamma, _, mean, variance = (None if name is None else evidence.param(name) for name in stored)
    if mean is None or variance is None or axis is None or W.shape[axis] != len(mean):
        return W
    scale, _ = bn_affine(gamma, None, mean, variance, float(norm.attrs.get("epsilon", 1e-5)))
    return W * scale.reshape([-1 if i == axis else 1 for i in range(W.ndim)])


def _normed(graph: Graph) -> dict[str, tuple[Op, Op]]:
    """Layer -> the layer and the batch norm after it."""
    made = {op.outputs[0]: op for op in graph.ops if op.type in TRAITS["layer"]}
    norms = [op for op in graph.ops if op.type == "BatchNormalization" and len(op.inputs) == 5]
    pairs = ((made.get(str(op.inputs[0])), op) for op in norms)
    return {layer.name: (layer, op) for layer, op in pairs if layer is not None}


def _gamma(group: Group, evidence: Evidence) -> Array:
    norms = {op.inputs[1] for op in evidence.graph.ops if op.type == "BatchNormalization" and len(op.inputs) > 1}
    params = {evidence.graph.values[v].param for v in norms if v is not None}
    held = [m for m in group.members if m.param in params]
    if not held:
        raise ConfigError(group.name, "it has no batch norm, whose factors gamma compares", "use importance='l2'")
    return np.sum([comparable(np.abs(evidence.rows(m)).sum(1)) for m in held], 0)


def _median(group: Group, evidence: Evidence) -> Array:
    found = []
    for member in group.makers:
        rows = evidence.rows(member)
        squares = np.square(rows).sum(1)
        distances = squares[:, None] + squares[None] - 2 * rows @ rows.T
        found.append(comparable(np.sqrt(np.maximum(distances, 0)).sum(1)))
    return np.sum(found, 0)


def _lamp(group: Group, evidence: Evidence) -> Array:
    squares = np.square(_norms(group, evidence, 2))
    order = np.argsort(squares, kind="stable")
    left = np.cumsum(squares[order][::-1])[::-1]  # of this one and all larger ones
    scores = np.empty_like(squares)
    scores[order] = squares[order] / np.maximum(left, np.finfo(float).tiny)
    return scores


def _taylor(group: Group, evidence: Evidence) -> Array:
    found = []
    for member in group.makers:
        gradient = evidence.gradients.get(member.param)
        if gradient is None:
            raise ConfigError(
                "importance", f"taylor needs the gradient of {member.param}, which the loss does not reach",
                "give loss=, a function of the model and a batch that returns a number to differentiate",
            )  # fmt: skip
        found.append(np.abs((evidence.rows(member) * evidence.rows(member, gradient)).sum(1)))
    return np.sum(found, 0)


def _hessian(group: Group, evidence: Evidence) -> Array:
    total = np.zeros(group.units)
    for gradients in evidence.directions:
        parts = [(member, gradients.get(member.param)) for member in group.makers]
        known = [evidence.rows(member) * evidence.rows(member, g) for member, g in parts if g is not None]
        total += np.square(sum((rows.sum(1) for rows in known), np.zeros(group.units)))
    return np.sqrt(total / max(len(evidence.directions), 1))


def _activation(group: Group, evidence: Evidence) -> Array:
    found = []
    for member in group.readers:
        squares = evidence.squares.get(member.op)
        W = np.square(np.asarray(evidence.param(member.param), np.float64))
        columns = np.moveaxis(W, member.axis, 0).reshape(W.shape[member.axis], -1).sum(1)
        if squares is not None and len(squares) == len(columns):
            columns = columns * squares
        found.append(comparable(np.sqrt(columns[member.positions].sum(1))))
    return np.sum(found, 0)


def _random(group: Group, evidence: Evidence) -> Array:
    seed = [evidence.seed, *group.name.encode()]
    return np.random.default_rng(seed).random(group.units) + 0.5


#: name -> the score of every unit of a group, ``[units]``, not negative
IMPORTANCE: dict[str, Callable[[Group, Evidence], Array]] = {
    "l1": lambda group, evidence: _norms(group, evidence, 1),
    "l2": lambda group, evidence: _norms(group, evidence, 2),
    "gamma": _gamma,
    "median": _median,
    "lamp": _lamp,
    "taylor": _taylor,
    "hessian": _hessian,
    "activation": _activation,
    "random": _random,
}


def criterion(name: str) -> Callable[[Group, Evidence], Array]:
    """The row of :data:`IMPORTANCE`.

    Raises:
        ConfigError: there is none.
    """
    if name not in IMPORTANCE:
        raise ConfigError(
            "importance",
            f"there is no criterion {name!r}{close_matches(name, IMPORTANCE)}",
            f"use {', '.join(IMPORTANCE)}",
        )
    return IMPORTANCE[name]


def mean_squares(view: Any, graph: Graph, groups: Iterable[Group], batches: Iterable[Any]) -> dict[str, Array]:
    """Operator -> mean square of each channel that it reads, for the readers of ``groups``.

    Args:
        view: a ``FloatModel``.
        graph: the one that ``groups`` are of.
        batches: data.
    """
    known = {op.name: op for op in view.graph().ops}
    names = dict.fromkeys(m.op for g in groups for m in g.readers)
    read = [known[name] for name in names if name in known and _reads_data(view.graph(), known[name])]
    sources = {op.name: str(op.inputs[0]) for op in read}
    channels = {str(op.inputs[0]): channel_axis(op) for op in read}
    sums: dict[str, Array] = {}
    count: dict[str, int] = dict.fromkeys(channels, 0)
    for captured in view.capture(list(channels), batches):
        for value, arrays in captured.items():
            rows = np.concatenate([_channels_last(x, channels[value]) for x in arrays])
            sums[value] = sums.get(value, 0) + np.square(rows).sum(0)
            count[value] += len(rows)
    return {name: sums[value] / max(count[value], 1) for name, value in sources.items()}


def channel_axis(op: Op) -> int:
    """The channel axis of a layer's input and output."""
    return 1 if op.type in ("Conv", "ConvTranspose") else -1


def _reads_data(graph: Graph, op: Op) -> bool:
    return op.inputs[0] is not None and not graph.values[op.inputs[0]].is_static


def _channels_last(x: Array, channel: int) -> Array:
    moved = np.moveaxis(np.asarray(x, np.float64), channel, -1)
    return moved.reshape(-1, moved.shape[-1])
