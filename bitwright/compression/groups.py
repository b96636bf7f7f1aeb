"""The dependency graph of structured pruning: which channels of which weights must be removed together.

Every position of every axis of a parameter is an *atom*. An operator says which atoms of what it reads are the same
channel, and which atoms the axes of its result hold: a convolution joins the channels of its input with the second axis of
its weight, a sum joins both operands position by position, and whatever moves data is carried out once on the numbers of the
elements, so that concatenations, splits, shuffles of channels and reshapes need no rule of their own. Atoms that are joined are
one *unit*: they are removed together or not at all. Units that occupy the same axes in the same numbers form a :class:`Group`.

An axis that is cut in two by a reshape, as ``heads * width`` is, keeps its units on one of the two: whole heads by default,
the positions inside every head with ``inner=True``.

The walk is one pass over the operators in execution order; joining is done at its end by :func:`components`.

Reference: Fang et al. 2023, arXiv:2301.12900, for groups; the atoms and the index arrays are ours.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bitwright.compression.rules import ChannelRule, rule_of
from bitwright.compression.states import STATE_PORTS, final_states, from_input, given_states
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.core.graph.recurrence import CELLS
from bitwright.errors import ConfigError, with_article

Index = NDArray[np.int64]
Axes = list["Index | None"]
"""Per axis of a value: the atom of every position, or ``None`` for an axis that must stay as it is."""


class Structure(Protocol):
    """Interface of a front end to the dependency graph."""

    def graph(self) -> Graph:
        """The graph with all shapes known; computations on parameters are operators too."""

    def moved(self, op: Op, elements: Sequence[Index | None]) -> list[Index] | None:
        """Input element number of each output element of a data movement operator; -1 where it fills in a value.

        ``None`` where it depends on values that the model computes.
        """

    def kept_axes(self, op: Op) -> tuple[int | None, ...]:
        """For each axis of the first input of a reduction: the axis of the result, or ``None`` where it is reduced."""

    def argument(self, op: Op, name: str) -> Any:
        """An argument of the call, an attribute or a constant input; ``None`` where there is none."""

    def equal_pieces(self, op: Op) -> Sequence[Sequence[int]]:
        """Pieces of a split that one number gives their length, so that unequal lengths cannot be set."""

    def filled(self) -> Collection[str]:
        """Constants that hold one number everywhere and are made in the width that is asked for, as zeros to start from."""

    def tied(self) -> Sequence[Sequence[tuple[str, int, int]]]:
        """Parameters whose widths the model holds in one number: ``(parameter, axis, blocks)``, position by position."""


@dataclass(frozen=True)
class Member:
    """The place of a group in one axis of a parameter.

    Attributes:
        param: its name.
        axis: of the parameter.
        positions: ``[units, count]``, ascending in each row: what is removed with each unit.
        role: ``out`` where a layer makes the channels, ``in`` where one reads them, ``with`` beside them (bias, norm).
        op: the operator that reads the parameter.
    """

    param: str
    axis: int
    positions: Index = field(repr=False)
    role: str
    op: str


@dataclass(frozen=True)
class Group:
    """Units that can be removed one by one, each from all members at once.

    Attributes:
        name: of the first layer that makes the channels, ``layer1.0.conv1``; ``#2`` is appended to a second one.
        kind: ``channels``, ``heads`` (a unit is several rows of a matrix that attention splits), ``hidden`` of a recurrent
            layer, ``groups`` of a grouped convolution or norm.
        units: how many there are.
        members: every axis of every parameter that has some.
        atoms: ``[units, n]``, what a unit is in the dependency graph.
        averaged: norms and means that average over the units: removing even a channel of zeros changes what they compute.
    """

    name: str
    kind: str
    units: int
    members: tuple[Member, ...]
    atoms: Index = field(repr=False)
    averaged: tuple[str, ...] = ()

    @property
    def makers(self) -> tuple[Member, ...]:
        """The members with role ``out``."""
        return tuple(member for member in self.members if member.role == "out")

    @property
    def readers(self) -> tuple[Member, ...]:
        """The members with role ``in``."""
        return tuple(member for member in self.members if member.role == "in")

    @property
    def kin(self) -> str:
        """The name without block numbers: groups at the same place of repeated blocks are kin."""
        return f"{re.sub('[0-9]+', '*', self.name)}/{self.kind}"

    def __str__(self) -> str:
        return f"{self.name}: {self.units} {self.kind}"


@dataclass(frozen=True)
class Refusal:
    """Why the channels of a layer cannot be removed."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Cut:
    """The kept positions of every value: ascending per axis, ``None`` if all are kept.

    Attributes:
        kept: value or parameter name -> axes; values of which everything stays are left out.
    """

    kept: Mapping[str, tuple[Index | None, ...]]

    def axes(self, value: str | None) -> tuple[Index | None, ...]:
        """The kept positions per axis; ``()`` where all are kept."""
        return () if value is None else self.kept.get(value, ())

    def shape(self, value: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape after the cut."""
        axes = self.axes(value) or (None,) * len(shape)
        return tuple(n if kept is None else len(kept) for n, kept in zip(shape, axes, strict=True))


# ------------------------------------------------------------------------------------------------- joining


def components(count: int, one: Index, other: Index) -> Index:
    """The smallest atom that each of ``count`` atoms is joined with, through the pairs ``(one[i], other[i])``.

    Roots hang themselves below smaller roots that they are joined with, and paths are halved, until nothing changes: no
    recursion, and about log(count) passes over arrays.

    >>> components(5, np.array([0, 3]), np.array([2, 4])).tolist()
    [0, 1, 0, 3, 3]
    """
    parent = np.arange(count)
    while one.size:
        a, b = parent[one], parent[other]
        apart = a != b
        one, other, a, b = one[apart], other[apart], a[apart], b[apart]
        np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(parent, above := parent[parent]):
            parent = above
    return parent


# ------------------------------------------------------------------------------------------------- the walk

_SAME = frozenset((
    *TRAITS["identity"], "Cast", "MaskedFill", "CumSum", "Trilu", "Roll", "LpNormalization", "round",
    "isneginf", "isposinf", "isinf", "isnan", "isfinite", "gt", "ge", "lt", "le", "eq", "ne",
    "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "IsNaN", "IsInf",
    *(f"{kind}{op}" for kind in ("", "logical_", "bitwise_") for op in ("not", "and", "or", "xor")),
    "invert", "copy", "Not", "And", "Or", "Xor", "zeros_like", "ones_like", "full_like",
))  # fmt: skip
_LAYOUTS = frozenset((*TRAITS["identity"], "Cast", "Transpose", "Squeeze", "Unsqueeze"))
_POOLS = frozenset(("AveragePool", "GlobalAveragePool", "MaxPool", "GlobalMaxPool", "Resize", "ResizeNearest", "LRN"))
_MEANS = frozenset(("ReduceMean", "Variance", "ReduceMax", "ReduceMin", "ReduceLogSumExp", "ReduceProd", "all", "any"))
_CHANNEL_NORMS = ("BatchNormalization", "InstanceNormalization")
_MERGES_BY_ELEMENT = frozenset(("Where", "If", "Loop"))
_MOVES = frozenset((
    "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Expand", "Tile", "Pad", "Gather",
    "DepthToSpace", "SpaceToDepth", "Flip", "Unfold", "ChannelShuffle", "Diagonal", "GatherElements", "PadConstant",
))  # fmt: skip
FREE_CONSTANT = "a constant of the model"
PICKED = "is picked by its number"
RETURNED = "the model returns it"


class Dependencies:
    """The dependency graph of a model.

    Args:
        structure: of either front end.
        inner: keep units on the inner one of the axes that a reshape cuts apart: head widths in place of heads, positions
            within the groups of grouped convolutions.
        forbidden: names of groups that were found not to be removable -> why.
        narrow_inputs: inputs of the model that are states of recurrent layers may become narrower.

    Attributes:
        groups: what can be removed, in the order of the model.
        refused: layers whose channels stay, and why.
        states: outputs of the model that are states of recurrent layers; they become narrower with the hidden units.
        given: inputs of the model that are such states, where they may become narrower.
    """

    def __init__(
        self,
        structure: Structure,
        *,
        inner: bool = False,
        forbidden: Mapping[str, str] | None = None,
        narrow_inputs: bool = True,
    ) -> None:
        self.structure, self.inner, self._narrow_inputs = structure, inner, narrow_inputs
        self.graph = structure.graph()
        self._fills = structure.filled()
        self._choices: dict[str, int] = {}  # reshape -> how many of its axes were tried in vain
        for _ in range(_TRIES):
            self._walk()
            if not self._other_axes():
                break
        self.groups, self.refused = self._collect(forbidden or {})

    def without(self, forbidden: Mapping[str, str]) -> Dependencies:
        """A copy with groups refused: name or :attr:`Group.kin` -> reason."""
        other = copy.copy(self)
        other.groups, other.refused = other._collect(forbidden)
        return other

    # -- atoms

    def _walk(self) -> None:
        self._count = 0
        self._joined: list[tuple[Index, Index]] = []
        self._stays: list[tuple[Index, str, str]] = []  # atoms, reason, operator
        self._averaged: list[tuple[Index, str]] = []
        self._axes: dict[str, Axes] = {}
        self._param_axes: dict[tuple[str, int], Index] = {}
        self._starts: dict[int, tuple[str, int]] = {}  # first atom of an axis of a parameter -> the axis
        self._stored: set[str] = set()  # values that are a parameter in another layout
        self._state_units: dict[
            tuple[str, int], Index
        ] = {}  # recurrent layer, port -> units of the state it reads there
        self._soft: set[int] = set()  # the first atoms of axes that are repeated
        self._roles: dict[tuple[str, int], tuple[str, str]] = {}
        self._split_sites: dict[str, tuple[Index, int]] = {}
        self._kinds: list[tuple[Index, str]] = []
        self._contracted: list[Index] = []  # summed over in a product of two computed matrices
        states = given_states(self.graph)
        self.given = states if self._narrow_inputs else ()
        for value in self.given:
            self._axes[value] = [*self._all_stay(value)[:-1], self._fresh(self.graph.values[value].shape[-1])]
        for op in self.graph.ops:
            if op.type in _LAYOUTS and op.inputs and self._is_stored(op.inputs[0]):
                self._stored.update(op.outputs[:1])
            made = self._rule(op)
            for i, value in enumerate(op.outputs):
                self._axes[value] = self._fitting(op, made[i], value) if i < len(made) else self._all_stay(value)
        for op in self.graph.ops:
            self._join_later_runs(op)
        self._results_stay()
        for places in self.structure.tied():
            self._tie(places)

    def _join_later_runs(self, op: Op) -> None:
        for port, value in op.also:
            first = op.inputs[port] if port < len(op.inputs) else None
            if op.type in CELLS and port in STATE_PORTS:
                self._state(value, self._state_units.get((op.name, port)), op)
            else:
                self._join_values(first, value, op)

    def _results_stay(self) -> None:
        states = final_states(self.graph)
        self.states = tuple(value for value in self.graph.outputs if value in states)
        for value in self.graph.outputs:
            if value not in states:
                self._stay(self.axes(value), RETURNED, None)

    def _is_stored(self, value: str | None) -> bool:
        return value is not None and (self.graph.values[value].param is not None or value in self._stored)

    def _all_stay(self, value: str) -> Axes:
        return [None] * len(self.graph.values[value].shape)

    def _fitting(self, op: Op, axes: Axes, value: str) -> Axes:
        """The axes that a rule has found, where the value has them."""
        shape = self.graph.values[value].shape
        if len(axes) == len(shape) and all(a is None or len(a) == n for a, n in zip(axes, shape, strict=True)):
            return axes
        last = axes[-1] if axes else None
        if last is not None and shape and len(last) == shape[-1] and all(a is None for a in axes[:-1]):
            return [
                *self._all_stay(value)[1:],
                last,
            ]  # it reads another run of a module, with more or fewer axes in front
        self._stay(axes, f"its shape {shape} is not the one that {op.type} is known to make", op)
        return self._all_stay(value)

    def _fresh(self, count: int) -> Index:
        self._count += count
        return np.arange(self._count - count, self._count)

    def axes(self, value: str | None) -> Axes:
        """Per axis of a value: the atom at every position, or ``None`` where it must stay as it is."""
        if value is None:
            return []
        if value not in self._axes:
            self._axes[value] = self._new_axes(value)
        return self._axes[value]

    def _new_axes(self, value: str) -> Axes:
        """The axes of a value that no operator of the graph makes."""
        known = self.graph.values[value]
        if value in self._fills:
            return [self._fresh(n) for n in known.shape]
        if known.kind != "param":
            return [None] * len(known.shape)
        places = [(str(known.param), axis) for axis in range(len(known.shape))]
        for place, n in zip(places, known.shape, strict=True):
            if place not in self._param_axes:
                self._param_axes[place] = self._fresh(n)
                self._starts[self._count - n] = place
        return [self._param_axes[place] for place in places]

    def walked(self, value: str | None) -> Axes:
        """:meth:`axes` of a value that a rule has looked at; no axes of any other."""
        return self._axes.get(str(value), [])

    def _stay(self, axes: Sequence[Index | None], reason: str, op: Op | None) -> None:
        for atoms in axes:
            if atoms is not None:
                self._stays.append((atoms, reason, "" if op is None else op.name))

    def _what_stays(self, op: Op) -> str:
        """Why channels that an operator joins with an axis that stays do so too."""
        weight = self.graph.values[str(op.inputs[1])] if op.type in ("Conv", "ConvTranspose", "Gemm") else None
        if weight is None or weight.kind != "activation":
            return f"joins it with {FREE_CONSTANT} or an axis of the input"
        return (
            "multiplies it by a weight that the model computes (torch.nn.utils.parametrize.remove_parametrizations or "
            "remove_weight_norm makes it a parameter)"
        )

    def _join(self, one: Index | None, other: Index | None, op: Op) -> Index | None:
        """Join the channels of two axes."""
        if one is None or other is None:
            self._stay((one, other), f"{op.name} {self._what_stays(op)}", op)
            return None
        if len(one) != len(other):
            self._stay((one, other), f"{op.name} joins {len(one)} positions with {len(other)}", op)
            return None
        if one is not other:
            self._joined.append((one, other))
        return one

    def _join_values(self, one: str | None, other: str | None, op: Op) -> None:
        first, second = self.axes(one), self.axes(other)
        if len(first) != len(second) or one is None or other is None:
            self._stay((*first, *second), f"{op.name} runs several times, on other shapes", op)
            return
        for a, b in zip(first, second, strict=True):
            if a is not None or b is not None:
                self._join(a, b, op)

    def _tie(self, places: Sequence[tuple[str, int, int]]) -> None:
        """Join axes whose widths one number of the model holds: the same positions are removed everywhere."""
        known = [(self._param_axes.get((param, axis)), blocks) for param, axis, blocks in places]
        first: Index | None = None
        for atoms, blocks in known:
            if atoms is None:
                continue
            row = atoms.reshape(blocks, -1)[0]
            if first is None:
                first = row
            elif len(row) == len(first):
                self._joined.append((first, row))

    def _together(self, rows: Index) -> Index:
        """Join each row of ``[n, m]`` into one unit; returns one atom of each."""
        rows = np.atleast_2d(rows)
        first = rows[:, 0]
        for column in rows.T[1:]:
            self._joined.append((first, column))
        return first

    def _role(self, value: str | None, axis: int, role: str, op: Op) -> None:
        place = None if value is None else self._place(value, axis)
        if place is not None:
            held = self._roles.get(place)
            if held is None or (held[0] == "with"):
                self._roles[place] = (role, op.name)
            elif held[0] != role:
                self._roles[place] = ("out", held[1])  # a table that is both embedding and classifier

    def _place(self, value: str, axis: int) -> tuple[str, int] | None:
        """The parameter and its axis that an axis of a value is: of the parameter, or of one that is transposed."""
        known = self.graph.values[value]
        if known.param is not None:
            return known.param, axis
        atoms = self.axes(value)[axis] if value in self._stored else None
        if atoms is None or not len(atoms):
            return None
        place = self._starts.get(int(atoms[0]))
        return place if place is not None and len(self._param_axes[place]) == len(atoms) else None

    # -- rules

    def _rule(self, op: Op) -> list[Axes]:
        own = _RULES.get(op.type)
        if own is not None:
            return own(self, op)
        if op.type in _MOVES:
            return self._move(op)
        if op_row(op.type).kind == "pointwise" or op.type in _SAME or op.type in _MERGES_BY_ELEMENT:
            return self._pointwise(op)
        rule = rule_of(op.type)
        if rule is not None:
            return self._taught(op, rule)
        for value in op.inputs:
            self._stay(
                self.axes(value),
                f"{op.name} is {with_article(op.type)}, which the dependency graph has no rule for: see docs/plugins.md",
                op,
            )
        return [self._all_stay(v) for v in op.outputs]

    def _taught(self, op: Op, rule: ChannelRule) -> list[Axes]:
        """An operator whose rule a user gave."""
        values = [str(v) for v in op.inputs if v is not None]
        terms = self._named(rule.inputs, values)
        ends = self._named(rule.outputs, op.outputs)
        if terms is None or ends is None or len(ends) < len(op.outputs):
            return self._refuse(op, "has another number of operands or axes than its rule")
        roles = self._taught_roles(values, terms, ends)
        joined: dict[str, list[Index | None]] = {name: [] for name in roles}
        for value, term in zip(values, terms, strict=False):
            self._join_named(op, value, term, roles, joined)
        for value in values[len(terms) :]:
            self._stay(self.axes(value), f"the rule of {op.type} does not name it", op)
        found = {name: self._all_joined(atoms, op) for name, atoms in joined.items()}
        summed = (found[name] for name, role in roles.items() if role == "in")
        self._contracted += [atoms for atoms in summed if atoms is not None]
        return [[found.get(name) for name in term] for term in ends]

    def _join_named(
        self, op: Op, value: str, term: Sequence[str], roles: Mapping[str, str], joined: dict[str, list[Index | None]]
    ) -> None:
        """Take in the axes of an operand: those without a name stay."""
        for axis, (name, atoms) in enumerate(zip(term, self.axes(value), strict=True)):
            if name:
                joined[name].append(atoms)
                self._role(value, axis, roles[name], op)
            else:
                self._stay((atoms,), f"the rule of {op.type} leaves this axis as it is", op)

    def _named(self, terms: Sequence[Sequence[str]], values: Sequence[str]) -> list[tuple[str, ...]] | None:
        """The channels on the axes of values; ``None`` where a rule is for others."""
        ranks = [len(self.graph.values[value].shape) for value in values]
        found = [ChannelRule.axes(term, rank) for term, rank in zip(terms, ranks, strict=False)]
        known = [term for term in found if term is not None]
        return known if len(known) == len(terms) else None

    def _taught_roles(
        self, values: Sequence[str], terms: Sequence[Sequence[str]], ends: Sequence[Sequence[str]]
    ) -> dict[str, str]:
        """Channels -> what their axes of parameters do with them: make them, read them, or go with them."""
        made = {name for term in ends for name in term}
        read = {n for value, term in zip(values, terms, strict=False) if not self._is_stored(value) for n in term}
        names = {name for term in terms for name in term if name}
        return {n: "in" if n not in made else "with" if n in read else "out" for n in names}

    def _pointwise(self, op: Op) -> list[Axes]:
        if not op.outputs:
            return []
        made = self._aligned(op, op.inputs, 0)
        self._all_roles(op, "with")
        return [made] * len(op.outputs)

    def _aligned(self, op: Op, inputs: Sequence[str | None], left_out: int) -> Axes:
        """Axes of the result, joined over inputs that are aligned at their ends; those of length 1 are spread."""
        shape = self.graph.values[op.outputs[0]].shape
        made: Axes = []
        for back in range(len(shape), left_out, -1):
            found: list[Index | None] = []
            for value in inputs:
                axes = self.axes(value)
                if back > len(axes):
                    continue
                if self.graph.values[str(value)].shape[-back] == shape[-back]:
                    found.append(axes[-back])
                else:
                    self._stay((axes[-back],), f"{op.name} spreads it over other channels", op)
            made.append(self._all_joined(found, op))
        return made

    def _all_joined(self, found: Sequence[Index | None], op: Op) -> Index | None:
        if not found or all(a is None for a in found):
            return None
        first = found[0]
        for other in found[1:]:
            first = self._join(first, other, op)
        return first

    def _layer_bias(self, op: Op, port: int, out: Index | None) -> None:
        bias = op.inputs[port] if port < len(op.inputs) else None
        if bias is not None:
            axes = self.axes(bias)
            if axes and axes[-1] is not None and len(axes[-1]) > 1 or (axes and out is not None and len(out) == 1):
                self._join(axes[-1], out, op)
                self._role(bias, len(axes) - 1, "with", op)

    def _conv(self, op: Op) -> list[Axes]:
        x, w = self.axes(op.inputs[0]), self.axes(op.inputs[1])
        group = int(op.attrs.get("group", 1))
        transposed = op.type == "ConvTranspose"
        rank = len(self.graph.values[op.outputs[0]].shape)
        channel = 1 if len(x) == len(w) else 0  # an image without a batch
        self._stay(w[2:], "positions of a kernel", None)
        made, read = (w[1], w[0]) if transposed else (w[0], w[1])
        out = made
        if group == 1:
            self._join(x[channel], read, op)
            self._role(op.inputs[1], 1 if transposed else 0, "out", op)
            self._role(op.inputs[1], 0 if transposed else 1, "in", op)
        else:
            within = w[1]
            if within is None and self.graph.values[str(op.inputs[1])].shape[1] == 1:
                within = self._fresh(1)  # a depthwise kernel that the code has given this axis
            out = self._grouped(op, x[channel], w[0], within, group, transposed)
        self._layer_bias(op, 2, out)
        axes: Axes = [None] * rank
        axes[channel] = out
        return [axes]

    def _grouped(
        self, op: Op, x: Index | None, first: Index | None, second: Index | None, group: int, transposed: bool
    ) -> Index | None:
        """Join the units of a grouped layer: whole groups with their channels, or the same positions in every group."""
        self._role(op.inputs[1], 0, "out", op)
        if first is None or x is None or second is None:
            self._stay((first, second, x), f"{op.name} reads groups of an axis that stays", op)
            return None
        rows, entering = first.reshape(group, -1), x.reshape(group, -1)
        if self.inner and second.size > 1 and rows.shape[1] > 1:
            # the first axis of a transposed convolution is the input's
            tiled = np.tile(second, group)
            read, out = (first, tiled) if transposed else (tiled, first)
            self._join(x, read, op)
            self._together(entering.T)
            self._together(out.reshape(group, -1).T)
            self._role(op.inputs[1], 1, "out" if transposed else "in", op)
            return out
        self._stay((second,), "positions inside a group" if second.size > 1 else "", None)
        out = self._fresh(group * second.size) if transposed else first
        self._together(np.concatenate([rows, entering, out.reshape(group, -1)], 1))
        if rows.shape[1] > 1 or entering.shape[1] > 1:
            self._kinds.append((first, "groups"))
        return out

    def _gemm(self, op: Op) -> list[Axes]:
        x, w = self.axes(op.inputs[0]), self.axes(op.inputs[1])
        if len(w) != 2 or not x:
            return self._refuse(op, "has no matrix")
        flipped = bool(op.attrs.get("transB", 0))
        out_axis, in_axis = (0, 1) if flipped else (1, 0)
        entering, rest = (x[-2], [x[-1]]) if op.attrs.get("transA", 0) else (x[-1], list(x[:-1]))
        self._join(entering, w[in_axis], op)
        self._role(op.inputs[1], out_axis, "out", op)
        self._role(op.inputs[1], in_axis, "in", op)
        self._layer_bias(op, 2, w[out_axis])
        return [[*rest, w[out_axis]]]

    def _matmul(self, op: Op) -> list[Axes]:
        x, y = self.axes(op.inputs[0]), self.axes(op.inputs[1])
        if len(x) < 2 or len(y) < 2:
            return self._refuse(op, "multiplies by a vector")
        self._join_free(x[-1], y[-2], op)
        self._contracted += [a for a in (x[-1], y[-2]) if a is not None]
        for value, port in ((op.inputs[0], 0), (op.inputs[1], 1)):
            rank = len(self.axes(value))
            self._role(value, rank - 1, "in" if port == 0 else "out", op)
            self._role(value, rank - 2, "out" if port == 0 else "in", op)
        made = self._aligned(op, op.inputs[:2], 2)
        self._layer_bias(op, 2, y[-1])
        return [[*made, x[-2], y[-1]]]

    def _join_free(self, one: Index | None, other: Index | None, op: Op) -> None:
        if one is not None or other is not None:
            self._join(one, other, op)

    def _einsum(self, op: Op) -> list[Axes]:
        equation = self.structure.argument(op, "equation")
        if not isinstance(equation, str) or "." in equation or "->" not in equation:
            return self._refuse(op, f"computes {equation!r}")
        left, right = equation.replace(" ", "").split("->")
        letters: dict[str, list[Index | None]] = {}
        for term, value in zip(left.split(","), op.inputs, strict=False):
            for axis, (letter, atoms) in enumerate(zip(term, self.axes(value), strict=True)):
                letters.setdefault(letter, []).append(atoms)
                self._role(value, axis, "out" if letter in right else "in", op)
        joined = {letter: self._all_joined(found, op) for letter, found in letters.items()}
        self._contracted += [atoms for letter, atoms in joined.items() if letter not in right and atoms is not None]
        return [[joined[letter] for letter in right]]

    def _embedding(self, op: Op) -> list[Axes]:
        table = self.axes(op.inputs[0])
        ids = self.axes(op.inputs[1])
        self._stay(table[:1], "rows are picked by the input", op)
        self._role(op.inputs[0], 1, "out", op)
        return [[*([None] * len(ids)), *table[1:]]]

    def _channel_norm(self, op: Op) -> list[Axes]:
        x = self.axes(op.inputs[0])
        out = x[1] if len(x) > 1 else None
        for value in op.inputs[1:]:
            axes = self.axes(value)
            if axes:
                if out is not None or axes[0] is not None:
                    out = self._join(out, axes[0], op)
                self._role(value, 0, "with", op)
        return [[*x[:1], out, *x[2:]]]

    def _group_norm(self, op: Op) -> list[Axes]:
        x = self.axes(op.inputs[0])
        group = self.structure.argument(op, "num_groups")
        out = x[1]
        for value in op.inputs[1:]:
            axes = self.axes(value)
            if axes and axes[0] is not None and out is not None and len(axes[0]) == len(out):
                self._join(out, axes[0], op)
                self._role(value, 0, "with", op)
            else:
                self._stay(axes, f"{op.name} has another width than its input", op)
        if out is not None:
            if not isinstance(group, int) or len(out) % group:
                self._stay((out,), f"{op.name} has an unknown number of groups", op)
            elif len(out) > group:
                self._kinds.append((out, "groups"))
                self._together(out.reshape(group, -1))
        return [list(x)]

    def _norm(self, op: Op) -> list[Axes]:
        x = list(self.axes(op.inputs[0]))
        weights = [self.axes(value) for value in op.inputs[1:]]
        over = max((len(axes) for axes in weights), default=1)
        for value, axes in zip(op.inputs[1:], weights, strict=True):
            for back in range(1, len(axes) + 1):
                if axes[-back] is not None or x[-back] is not None:
                    x[-back] = self._join(x[-back], axes[-back], op)
                self._role(value, len(axes) - back, "with", op)
        for atoms in x[-over:]:
            if atoms is not None:
                self._averaged.append((atoms, op.name))
        return [x, *self._numbers(op)[1:]]

    def _softmax(self, op: Op) -> list[Axes]:
        x = list(self.axes(op.inputs[0]))
        axis = op.attrs.get("axis", -1)
        self._stay((x[axis],), f"{op.name} compares it with the others", op)
        x[axis] = None
        return [x]

    def _over_all(self, op: Op) -> list[Axes]:
        """An operator over all positions of some axes."""
        x = self.axes(op.inputs[0])
        self._stay(x, f"{op.name} compares it with the others", op)
        return [self._all_stay(v) for v in op.outputs]

    def _reduce(self, op: Op) -> list[Axes]:
        x = self.axes(op.inputs[0])
        made: Axes = [None] * (len(self.graph.values[op.outputs[0]].shape) if op.outputs else 0)
        for atoms, kept in zip(x, self.structure.kept_axes(op), strict=True):
            if kept is not None:
                made[kept] = atoms
            elif atoms is not None and op.type in _MEANS:
                self._averaged.append((atoms, op.name))
        return [made] * len(op.outputs)

    def _pool(self, op: Op) -> list[Axes]:
        x = self.axes(op.inputs[0])
        shape = self.graph.values[op.outputs[0]].shape
        same = len(x) == len(shape)
        if not same:
            return self._refuse(op, "changes the number of axes")
        made: Axes = []
        for axis, atoms in enumerate(x):
            channel = axis < 2 and (atoms is None or len(atoms) == shape[axis])
            if not channel:
                self._stay((atoms,), f"{op.name} moves over it", op)
            made.append(atoms if channel else None)
        return [made] * len(op.outputs)

    def _concat(self, op: Op) -> list[Axes]:
        axis = op.attrs.get("axis", self.structure.argument(op, "dim"))
        rank = len(self.graph.values[op.outputs[0]].shape)
        at = (axis if isinstance(axis, int) else 0) % rank
        inputs = [self.axes(v) for v in op.inputs if v is not None and 0 not in self.graph.values[v].shape]
        if not inputs:
            return self._numbers(op)
        if op.type == "Stack":
            inputs = [[*a[:at], None, *a[at:]] for a in inputs]
        made = [None if i == at else self._all_joined([a[i] for a in inputs], op) for i in range(rank)]
        made[at] = self._beside([a[at] for a in inputs], op)
        self._all_roles(op, "with")
        return [made]

    def _beside(self, found: Sequence[Index | None], op: Op) -> Index | None:
        known = [a for a in found if a is not None]
        if len(known) == len(found):
            return np.concatenate(known)
        self._stay(found, f"{op.name} puts it beside {FREE_CONSTANT} or an axis of the input", op)
        return None

    def _all_roles(self, op: Op, role: str) -> None:
        for value in op.inputs:
            for axis in range(len(self.axes(value))):
                self._role(value, axis, role, op)

    def _prelu(self, op: Op) -> list[Axes]:
        slopes = self.graph.values[str(op.inputs[1])].shape
        if len(slopes) != 1 or slopes == (1,):
            return self._pointwise(op)
        return self._channel_norm(op)

    def _glu(self, op: Op) -> list[Axes]:
        x = list(self.axes(op.inputs[0]))
        shape = self.graph.values[op.outputs[0]].shape
        for axis, atoms in enumerate(x):
            if atoms is not None and len(atoms) == 2 * shape[axis]:
                half = len(atoms) // 2
                x[axis] = self._join(atoms[:half], atoms[half:], op)
        return [x]

    def _recurrent(self, op: Op) -> list[Axes]:
        ports = [self.axes(value) for value in op.inputs]
        ports += [[] for _ in range(10 - len(ports))]
        x, w, r, projection = ports[0], ports[1], ports[2], ports[8]
        hidden, out = (projection or r)[-1], projection[-2] if projection else (r or [None])[-1]
        if hidden is None or out is None or any(a is None for a in (*w[-2:], *r[-2:])):
            return self._refuse(op, "computes its weights")
        self._join(x[-1], w[-1], op)
        self._stay((*w[:-2], *r[:-2]), "directions of a recurrent layer", None)
        self._join(out, r[-1], op)
        self._gates((w[-2], r[-2], *(ports[at][-1] for at in (3, 7, 9) if ports[at])), hidden, op)
        self._states(op, out, hidden)
        self._kinds.append((hidden, "hidden"))
        for port, back, role in (
            (1, 2, "out"),
            (2, 2, "out"),
            (1, 1, "in"),
            (2, 1, "in"),
            (3, 1, "with"),
            (9, 1, "with"),
        ):
            if ports[port]:
                self._role(op.inputs[port], len(ports[port]) - back, role, op)
        returns = op.attrs.get("returns", ("hidden", "hidden", "cell"))
        states = [hidden if returns[i] == "cell" else out for i in range(len(op.outputs))]
        return [[*self._all_stay(value)[:-1], units] for value, units in zip(op.outputs, states, strict=True)]

    def _gates(self, rows: Sequence[Index | None], hidden: Index, op: Op) -> None:
        """Join the rows of each hidden unit over the gates."""
        for atoms in rows:
            for part in () if atoms is None else atoms.reshape(-1, len(hidden)):
                self._join(hidden, part, op)

    def _states(self, op: Op, out: Index, hidden: Index) -> None:
        """Join the units of initial states."""
        for at, units in zip(STATE_PORTS, (out, hidden), strict=True):
            self._state_units[op.name, at] = units
            self._state(op.inputs[at] if at < len(op.inputs) else None, units, op)

    def _state(self, value: str | None, units: Index | None, op: Op) -> None:
        """Join a state of a recurrent layer; a constant one is created again with the new width."""
        axes = self.axes(value)
        if value is None or units is None or not axes:
            return
        known = self.graph.values[value]
        if axes[-1] is not None:
            self._join(axes[-1], units, op)
        elif known.kind == "constant" and known.shape[-1] == len(units):
            self._axes[value] = [*axes[:-1], units]
        else:
            self._stay((units,), self._why_it_stays(value, op), op)

    def _why_it_stays(self, value: str, op: Op) -> str:
        """The reason why a state keeps its width."""
        source = from_input(self.graph, value)
        if source is None:
            return f"{op.name} begins with the state {value}, whose width the dependency graph cannot follow"
        if not self._narrow_inputs and source in given_states(self.graph):
            return (
                f"{op.name} begins with the input {source}, which would become narrower: inputs stay as they are where a model "
                "is pruned in place, and for a target of milliseconds"
            )
        return (
            f"{op.name} begins with the input {source}, which the caller computes: the model does not return this state, or "
            "reads it elsewhere too"
        )

    def _grouped_matmul(self, op: Op) -> list[Axes]:
        x, w = self.axes(op.inputs[0]), self.axes(op.inputs[1])
        self._join_free(x[-1], w[-2], op)
        self._stay(w[:-2], "experts are picked by the input", op)
        rank = len(w)
        self._role(op.inputs[1], rank - 1, "out", op)
        self._role(op.inputs[1], rank - 2, "in", op)
        return [[x[0], w[-1]]]

    def _refuse(self, op: Op, why: str) -> list[Axes]:
        for value in op.inputs:
            self._stay(self.axes(value), f"{op.name}, {with_article(op.type)}, {why}", op)
        return [self._all_stay(v) for v in op.outputs]

    # -- movement

    def _move(self, op: Op) -> list[Axes]:
        """Track units through a data movement operator by element numbers; skipped if no axis carries units."""
        source = op.inputs[0]
        shapes = [self.graph.values[v].shape for v in op.outputs]
        if op.type == "Expand" and source is not None:
            return [self._expand(op, source, shapes[0])]
        if source is None or all(a is None for a in self.axes(source)):
            for value in op.inputs[1:]:
                self._stay(self.axes(value), f"{op.name} takes it for a position", op)
            return [self._all_stay(v) for v in op.outputs]
        x, shape = self.axes(source), self.graph.values[source].shape
        plain = _unsplit(x, shape, shapes[0]) if op.type in TRAITS["reshape"] else None
        if plain is not None:
            return [plain]
        moved = self._elements(op, shape, shapes)
        if moved is None:
            return self._refuse(op, "moves what the dependency graph cannot follow")
        made = [self._moved(op, i, part, x, shape) for i, part in enumerate(moved)]
        if op.type == "Split":
            self._join_pieces(op, made, len(shape))
        return made

    def _elements(self, op: Op, shape: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[Index] | None:
        """Per output the number of the element of the input at every position."""
        numbers = np.arange(int(np.prod(shape))).reshape(shape)
        if op.type in TRAITS["reshape"]:
            return [numbers.reshape(shapes[0])]
        moved = self.structure.moved(op, [numbers])
        fits = moved is not None and all(m.shape == s for m, s in zip(moved, shapes, strict=False))
        return moved if fits else None

    def _join_pieces(self, op: Op, made: Sequence[Axes], rank: int) -> None:
        """Join pieces whose lengths cannot be told apart, which lose the same positions."""
        for together, axis in itertools.product(self.structure.equal_pieces(op), range(rank)):
            parts = [made[i][axis] for i in together if len(made[i]) == rank]
            pieces = [p for p in parts if p is not None and parts[0] is not None and len(p) == len(parts[0])]
            if len(pieces) > 1 and not np.array_equal(pieces[0], pieces[1]):
                self._joined.extend((pieces[0], other) for other in pieces[1:])

    def _expand(self, op: Op, source: str, result: Sequence[int]) -> Axes:
        """Axes that are repeated have positions of their own: they can be made as long as is asked for."""
        x, shape = self.axes(source), self.graph.values[source].shape
        made: Axes = []
        for back in range(len(result), 0, -1):
            whole = back <= len(shape) and shape[-back] == result[-back]
            if back <= len(shape) and not whole:
                self._stay((x[-back],), f"{op.name} repeats it", op)
            made.append(x[-back] if whole else self._soft_axis(result[-back]))
        return made

    def _soft_axis(self, length: int) -> Index:
        """Positions that hold the same everywhere: where they are merged with channels, there stay as many of them."""
        atoms = self._fresh(length)
        self._soft.update(atoms[:1].tolist())
        return atoms

    def _filled(self, op: Op) -> list[Axes]:
        """The axes of a constant tensor, of any length."""
        return [[self._fresh(n) for n in self.graph.values[v].shape] for v in op.outputs]

    def _numbers(self, op: Op) -> list[Axes]:
        """No axes for lengths, which follow by themselves."""
        return [self._all_stay(v) for v in op.outputs]

    def _moved(self, op: Op, output: int, moved: Index, x: Axes, shape: Sequence[int]) -> Axes:
        """The axes of one output of a data movement with the element numbers ``moved``."""
        if not moved.size:
            return _of_empty(moved.shape, x, shape)
        made: Axes = [None] * moved.ndim
        held: set[int] = set()  # axes of the result that have units
        soft = [a is not None and len(a) > 0 and int(a[0]) in self._soft for a in x]
        for axis in sorted(range(len(x)), key=soft.__getitem__):
            atoms = x[axis]
            if atoms is None:
                continue
            at = moved // int(np.prod(shape[axis + 1 :])) % shape[axis]
            at = np.where(moved < 0, -1, at)
            chosen = self._along(op, f"{op.name}/{output}/{axis}", np.where(at < 0, -1, atoms[at]), at, held)
            if chosen is None:
                self._stay((atoms,), f"one position {PICKED} at {op.name}", op)
            elif chosen in held and soft[axis]:
                self._stay((atoms,), f"{op.name} puts the copies beside each other", op)
            elif chosen in held:
                self._stay((atoms, made[chosen]), f"{op.name} merges two axes of channels", op)
                made[chosen] = None
            else:
                rows = np.moveaxis(at, chosen, 0).reshape(moved.shape[chosen], -1)
                made[chosen] = labels = self._labels(op, rows, atoms)
                held.add(chosen)
                key = f"{op.name}/{output}/{axis}"
                if key in self._split_sites:
                    self._split_sites[key] = (labels, self._split_sites[key][1])
        return made

    def _along(self, op: Op, key: str, units: Index, at: Index, held: set[int]) -> int | None:
        """The axis of a result along which the unit changes, or else the position; one of them where an axis is cut apart."""
        along = next(filter(None, ([b for b in range(at.ndim) if _varies(of, b)] for of in (units, at))), [])
        along = along or [b for b in range(at.ndim) if at.shape[b] > 1 and (at != at.take([0], b)).any()]  # filled in
        along = [b for b in along if b not in held] or along
        if len(along) < 2:
            return along[0] if along else None
        order = along[::-1] if self.inner else along
        self._split_sites[key] = (np.zeros(0, np.int64), len(order))
        return order[min(self._choices.get(key, 0), len(order) - 1)]

    def _labels(self, op: Op, rows: Index, atoms: Index) -> Index:
        """One atom for each row of positions, which are joined; new ones where everything is filled in."""
        first = np.where(rows[:, 0] < 0, rows.max(1), rows[:, 0])
        labels, empty = atoms[first], first < 0
        if empty.any():
            labels[empty] = self._fresh(int(empty.sum()))
            before = int(np.argmin(empty))
            behind = int(np.argmin(empty[::-1]))
            if before and before == behind:  # one number says how much is put on both sides
                self._joined.append((labels[:before], labels[len(labels) - behind :]))
        others = (rows >= 0) & (rows != first[:, None])
        if others.any():
            pairs = np.stack([np.broadcast_to(first[:, None], rows.shape)[others], rows[others]])
            unique = np.unique(pairs, axis=1)
            self._joined.append((atoms[unique[0]], atoms[unique[1]]))
            self._kinds.append((labels, "heads"))
        return labels

    def _other_axes(self) -> bool:
        """Move the units of a reshape off an axis whose positions are picked singly, if another axis can hold them."""
        picked = [atoms for atoms, reason, _ in self._stays if PICKED in reason]
        if not picked or not self._split_sites:
            return False
        marked = np.zeros(self._count, bool)
        marked[np.concatenate(picked)] = True
        changed = False
        for key, (labels, choices) in self._split_sites.items():
            if marked[labels].any() and self._choices.get(key, 0) + 1 < choices:
                self._choices[key] = self._choices.get(key, 0) + 1
                changed = True
        return changed

    # -- groups

    def _collect(self, forbidden: Mapping[str, str]) -> tuple[tuple[Group, ...], tuple[Refusal, ...]]:
        none = np.zeros(0, np.int64)
        one = np.concatenate([none, *(a for a, _ in self._joined)])
        other = np.concatenate([none, *(b for _, b in self._joined)])
        self.roots = components(self._count, one, other)
        units = _Units(self.roots, self._param_axes)
        contracted = set(np.unique(self.roots[np.concatenate([none, *self._contracted])]).tolist())
        stays, averaged, kinds = self._notes()
        rank = {op.name: i for i, op in enumerate(self.graph.ops)}
        self._by_name: dict[str, Group] = {}
        refused: dict[str, str] = {}
        taken: dict[str, int] = {}
        for alike in units.alike(stays):
            root, places = units.root(alike[0]), units.places(alike[0])
            base = self._first_maker(places, rank)
            if base is None:
                continue
            if root not in stays:
                count = taken[base] = taken.get(base, 0) + 1
                name = base if count == 1 else f"{base}#{count}"
                group = self._group(name, units, alike, averaged, kinds)
                reason = forbidden.get(name, forbidden.get(group.kin, _why_useless(group, root in contracted)))
            else:
                reason = stays[root]
            if reason is None:
                self._by_name[name] = group
            elif reason:
                refused.setdefault(base, reason)
        return tuple(self._by_name.values()), tuple(Refusal(name, reason) for name, reason in refused.items())

    def _first_maker(self, places: Sequence[tuple[str, int]], rank: Mapping[str, int]) -> str | None:
        makers = [op for role, op in map(self._role_of, places) if role == "out"]
        return min(makers, key=lambda name: rank.get(name, len(rank)), default=None)

    def _group(
        self, name: str, units: _Units, alike: Sequence[int], averaged: Mapping[int, Mapping[str, None]],
        kinds: Mapping[int, str],
    ) -> Group:  # fmt: skip
        atoms = units.atoms(alike)
        members = tuple(
            Member(*place, units.positions(alike, place), *self._role_of(place))
            for place in dict.fromkeys(units.places(alike[0]))
        )
        means = dict.fromkeys(n for r in self.roots[atoms[:, 0]].tolist() for n in averaged.get(r, ()))
        kind = kinds.get(units.root(alike[0]), "channels")
        return Group(name, kind, len(alike), members, atoms, tuple(means))

    def _role_of(self, place: tuple[str, int]) -> tuple[str, str]:
        return self._roles.get(place, ("with", ""))

    def _notes(self) -> tuple[dict[int, str], dict[int, dict[str, None]], dict[int, str]]:
        """By root: the first reason to stay, the norms that average over it, the kind of its units."""
        stays: dict[int, str] = {}
        blocked = np.zeros(self._count, bool)
        for atoms, reason, _ in self._stays:
            new = np.unique(self.roots[atoms])
            new = new[~blocked[new]]
            blocked[new] = True
            stays.update(dict.fromkeys(new.tolist(), reason))
        averaged: dict[int, dict[str, None]] = {}
        for atoms, name in self._averaged:
            for root in np.unique(self.roots[atoms]).tolist():
                averaged.setdefault(root, {})[name] = None
        kinds: dict[int, str] = {}
        for atoms, kind in reversed(self._kinds):
            kinds.update(dict.fromkeys(np.unique(self.roots[atoms]).tolist(), kind))
        return stays, averaged, kinds

    def group(self, name: str) -> Group:
        """The group of that name.

        Raises:
            ConfigError: there is none; the message says why where the layer is known.
        """
        if name in self._by_name:
            return self._by_name[name]
        reason = next(
            (str(r) for r in self.refused if r.name == name), "no layer of the model makes channels under this name"
        )
        raise ConfigError(name, reason, f"choose one of {', '.join(g.name for g in self.groups[:10])}")

    def cut(self, removed: Mapping[str, Index]) -> Cut:
        """Compute the positions kept of every value when units are removed.

        Args:
            removed: group name -> numbers of its units.

        Raises:
            ConfigError: no such group or unit, or all units of one.
        """
        gone = np.zeros(self._count, bool)
        for name, units in removed.items():
            group = self.group(name)
            numbers = np.unique(np.asarray(units, np.int64))
            if numbers.size and (numbers[0] < 0 or numbers[-1] >= group.units):
                raise ConfigError(
                    name, f"it has units 0 to {group.units - 1}, not {numbers[-1]}", "remove units that exist"
                )
            gone[group.atoms[numbers].reshape(-1)] = True
        cuts = _Cuts(gone)
        found = ((value, tuple(map(cuts.of, axes))) for value, axes in self._axes.items())
        kept = {value: left for value, left in found if any(k is not None for k in left)}
        for value, left in kept.items():
            _check_left(value, left)
        return Cut(kept)


def _check_left(value: str, left: Sequence[Index | None]) -> None:
    if any(k is not None and not k.size for k in left):
        raise ConfigError(value, "no channel of it would be left", "remove fewer units")


class _Cuts:
    """Positions kept of axes; computed once for an axis that several values share."""

    def __init__(self, gone: NDArray[np.bool_]) -> None:
        self._gone = gone
        self._seen: dict[int, Index | None] = {}

    def of(self, atoms: Index | None) -> Index | None:
        """The kept positions; ``None`` where all are kept."""
        if atoms is None:
            return None
        if id(atoms) not in self._seen:
            lost = self._gone[atoms]
            self._seen[id(atoms)] = np.flatnonzero(~lost) if lost.any() else None
        return self._seen[id(atoms)]


class _Units:
    """The joined atoms of parameters, sorted by their roots.

    Args:
        roots: of every atom.
        axes: atoms of every axis of every parameter.
    """

    def __init__(self, roots: Index, axes: Mapping[tuple[str, int], Index]) -> None:
        none = np.zeros(0, np.int64)
        self._places = list(axes)
        atom = np.concatenate([none, *axes.values()])
        where = np.repeat(np.arange(len(axes)), [len(a) for a in axes.values()])
        position = np.concatenate([none, *(np.arange(len(a)) for a in axes.values())])
        order = np.lexsort((position, where, roots[atom]))
        self._owner, self._where, self._position = roots[atom][order], where[order], position[order]
        self._starts = np.flatnonzero(np.r_[True, self._owner[1:] != self._owner[:-1]]) if order.size else none
        self._ends = np.r_[self._starts[1:], order.size]
        # atoms that are filled in belong to no parameter, and to the unit all the same
        self._members = np.argsort(roots, kind="stable")
        self._bounds = np.searchsorted(roots[self._members], np.arange(len(roots) + 1))

    def alike(self, stays: Mapping[int, str]) -> list[list[int]]:
        """Units that occupy the same axes as often, together, in the order of the model."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for unit, (start, end) in enumerate(zip(self._starts.tolist(), self._ends.tolist(), strict=True)):
            root = int(self._owner[start])
            if end - start > 1 or root in stays:  # otherwise on its own: read by nothing that the rules know
                size = self._bounds[root + 1] - self._bounds[root]
                found.setdefault((self._where[start:end].tobytes(), size, root in stays), []).append(unit)
        return sorted(found.values(), key=lambda units: int(self._where[self._starts[units[0]]]))

    def root(self, unit: int) -> int:
        """The root of a unit."""
        return int(self._owner[self._starts[unit]])

    def places(self, unit: int) -> list[tuple[str, int]]:
        """Parameter and axis of each atom of a unit."""
        return [self._places[w] for w in self._where[self._starts[unit] : self._ends[unit]].tolist()]

    def positions(self, alike: Sequence[int], place: tuple[str, int]) -> Index:
        """``[units, count]`` in one axis of a parameter."""
        columns = np.array([p == place for p in self.places(alike[0])])
        first = np.flatnonzero(columns)
        return np.asarray(self._position[self._starts[list(alike)][:, None] + first])

    def atoms(self, alike: Sequence[int]) -> Index:
        """The atoms of units, ``[units, n]``, including those of filled-in values."""
        return np.stack([self._members[self._bounds[r] : self._bounds[r + 1]] for r in map(self.root, alike)])


def _why_useless(group: Group, contracted: bool) -> str | None:
    if not group.readers and not contracted:
        return "no layer that is known reads its channels"
    return "it is a single unit, which cannot be removed whole" if group.units < 2 else None


_TRIES = 4  # axes of one reshape


def _varies(at: Index, axis: int) -> bool:
    """Whether numbers change along an axis; those below 0, where a value is filled in, are left out."""
    if at.shape[axis] < 2:
        return False
    most = at.max(axis, keepdims=True)
    return bool(((at != most) & (at >= 0)).any())


def _of_empty(result: Sequence[int], x: Axes, shape: Sequence[int]) -> Axes:
    """The axes of an empty slice: those that stay whole keep their units."""
    if len(result) != len(shape):
        return [None] * len(result)
    return [atoms if n == m else None for atoms, n, m in zip(x, shape, result, strict=True)]


def _unsplit(x: Axes, shape: Sequence[int], result: Sequence[int]) -> Axes | None:
    """The axes after a reshape that leaves every axis with units as it is; ``None`` where it does not."""
    before, after = np.cumprod([1, *shape]).tolist(), np.cumprod([1, *result]).tolist()
    starts = {(after[i], n): i for i, n in enumerate(result) if n > 1}
    made: Axes = [None] * len(result)
    for axis, atoms in enumerate(x):
        if atoms is None:
            continue
        if len(atoms) == 1:
            return None
        at = starts.get((before[axis], shape[axis]))
        if at is None:
            return None
        made[at] = atoms
    return made


Rule = Callable[[Dependencies, Op], list[Axes]]

_RULES: dict[str, Rule] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), Dependencies._conv),
    "Gemm": Dependencies._gemm,
    "MatMul": Dependencies._matmul,
    "Einsum": Dependencies._einsum,
    "Embedding": Dependencies._embedding,
    "GroupedMatMul": Dependencies._grouped_matmul,
    **dict.fromkeys(_CHANNEL_NORMS, Dependencies._channel_norm),
    "GroupNormalization": Dependencies._group_norm,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), Dependencies._norm),
    **dict.fromkeys(("Softmax", "LogSoftmax"), Dependencies._softmax),
    **dict.fromkeys(("TopK", "Sort", "ArgMax", "ArgMin", "argmax", "argmin", "argsort"), Dependencies._over_all),
    **dict.fromkeys((*_MEANS, "ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare"), Dependencies._reduce),
    **dict.fromkeys(_POOLS, Dependencies._pool),
    **dict.fromkeys(("Concat", "Stack"), Dependencies._concat),
    **dict.fromkeys(("ConstantOfShape", "new_zeros", "new_ones", "new_full"), Dependencies._filled),
    **dict.fromkeys(("Shape", "Size"), Dependencies._numbers),
    "Glu": Dependencies._glu,
    "PRelu": Dependencies._prelu,
    **dict.fromkeys(CELLS, Dependencies._recurrent),
}
