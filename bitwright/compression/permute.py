"""Reorder channels so that ``n:m`` zeros among neighbours cost less.

The channels of a group stand in the same places of all its parameters, so that they may change places together and the model
computes what it did. Which four inputs of a layer are neighbours decides which weights ``2:4`` keeps.

Reference: Pool and Yu 2021, "Channel Permutations for N:M Sparsity" (NeurIPS), for the swaps that climb; the layers that have to
be permuted along come from the dependency graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.compression.checks import checked_dependencies
from bitwright.compression.groups import Cut, Dependencies, Group, Index
from bitwright.core.simulation.float_model import Array
from bitwright.methods.front_end import Structured

_SWEEPS = 8
_PAIRS = 4000  # of groups of neighbours that are looked at, of one matrix
_NOISE = 1e-3  # of the largest output, that sums in another order may differ by


@dataclass(frozen=True)
class Reordered:
    """Outcome for one group of channels.

    Attributes:
        name: of the group.
        before, after: share of the absolute weights of its readers that the pattern keeps.
    """

    name: str
    before: float
    after: float


def kept_weight(scores: Array, keep: int, every: int) -> Array:
    """The sum of the ``keep`` largest of every ``every`` neighbours of the last axis, whose length is a multiple.

    >>> float(kept_weight(np.array([[4.0, 1.0, 2.0, 3.0]]), 2, 4))
    7.0
    """
    groups = scores.reshape(*scores.shape[:-1], -1, every)
    return np.asarray(np.partition(groups, every - keep, axis=-1)[..., every - keep :].sum((-3, -2, -1)))


def better_order(scores: Array, keep: int, every: int, seed: int = 0) -> Index:
    """An order of columns with more weight in ``keep`` of every ``every`` neighbours, by swaps between neighbourhoods.

    Args:
        scores: ``[rows, columns]``, at least 0.
        keep, every: ``n`` and ``m`` of the pattern.
        seed: of the order in which pairs are looked at.

    Returns:
        Numbers of columns; the order that they have where no swap is better.
    """
    columns = scores.shape[1]
    whole = columns // every
    order = np.arange(columns)
    rng, left = np.random.default_rng(seed), _PAIRS
    swaps = [(i, j) for i in range(every) for j in range(every)]
    exchanged = np.tile(np.arange(2 * every), (len(swaps) + 1, 1))  # the first leaves everything where it is
    for k, (i, j) in enumerate(swaps, 1):
        exchanged[k, [i, every + j]] = exchanged[k, [every + j, i]]
    for _ in range(_SWEEPS):
        changed = False
        for one, other in rng.permutation([(a, b) for a in range(whole) for b in range(a)])[:left] if whole > 1 else ():
            at = np.r_[one * every : (one + 1) * every, other * every : (other + 1) * every]
            found = kept_weight(np.moveaxis(scores[:, order[at]][:, exchanged], 1, 0), keep, every)
            best = int(found.argmax())
            if found[best] > found[0] * (1 + 1e-9):
                order[at] = order[at][exchanged[best]]
                changed = True
            left -= 1
        if not changed or left <= 0:
            break
    return order


def permute_channels(
    structure: Structured, batch: Any, keep: int, every: int, seed: int = 0
) -> tuple[tuple[Reordered, ...], dict[str, str]]:
    """Reorder the channels that linear layers and 1 x 1 convolutions read, consistently over the model.

    Args:
        structure: a model, changed in place.
        batch: an input, on which the model is compared with itself.
        keep, every: ``n`` and ``m`` of the pattern.
        seed: of the search.

    Returns:
        What was gained, and group -> why its channels stay where they are.
    """
    found = checked_dependencies(structure, batch, averaged=True)
    refused = {r.name: r.reason for r in found.refused}
    orders: dict[str, Index] = {}
    rows: dict[str, Reordered] = {}
    for group in found.groups:
        scores = _scores(structure, group, every)
        if scores is None:
            refused[group.name] = "no layer reads one weight of each of its units"
            continue
        orders[group.name] = better_order(scores, keep, every, seed)
        rows[group.name] = _row(group, scores, orders[group.name], keep, every)
    orders = {name: order for name, order in orders.items() if rows[name].after > rows[name].before}
    done = _kept_orders(structure, found, orders, batch)
    refused.update({name: "the model computes something else in another order" for name in orders if name not in done})
    structure.refresh()
    return tuple(rows[name] for name in done), refused


def _row(group: Group, scores: Array, order: Index, keep: int, every: int) -> Reordered:
    whole, n = max(float(scores.sum()), 1e-300), group.units // every * every
    before, after = (float(kept_weight(s[:, :n], keep, every)) / whole for s in (scores, scores[:, order]))
    return Reordered(group.name, before, after)


def _kept_orders(structure: Structured, found: Dependencies, orders: Mapping[str, Index], batch: Any) -> list[str]:
    """Reorder all groups at once, else one by one those that keep the outputs."""
    wanted = structure.outputs(batch)
    if orders and _applied(structure, found, orders, wanted, batch):
        return list(orders)
    return [name for name, order in orders.items() if _applied(structure, found, {name: order}, wanted, batch)]


def _applied(
    structure: Structured, found: Dependencies, orders: Mapping[str, Index], wanted: Sequence[Array], batch: Any
) -> bool:
    """Reorder groups if the outputs stay the same."""
    undo = structure.cut(reordered(found, orders))
    same = all(_alike(a, b) for a, b in zip(wanted, structure.outputs(batch), strict=True))
    if not same:
        undo()
    return same


def _alike(a: Array, b: Array) -> bool:
    if a.dtype.kind != "f":
        return bool(np.array_equal(a, b))
    return bool(np.abs(a - b).max(initial=0.0) <= _NOISE * max(float(np.abs(a).max(initial=0.0)), 1e-6))


def reordered(found: Dependencies, orders: Mapping[str, Index]) -> Cut:
    """A cut that keeps every position in another order.

    Args:
        found: the dependency graph.
        orders: group -> the numbers of its units in their new order.
    """
    shapes = {v.param: v.shape for v in found.graph.values.values() if v.param is not None}
    places: dict[tuple[str, int], Index] = {}
    for name, order in orders.items():
        for member in found.group(name).members:
            key = (member.param, member.axis)
            row = places.setdefault(key, np.arange(shapes[member.param][member.axis]))
            row[member.positions.reshape(-1)] = member.positions[order].reshape(-1)
    kept = {}
    for value in found.graph.values.values():
        axes = [places.get((str(value.param), axis)) for axis in range(len(value.shape))]
        if value.param is not None and any(a is not None for a in axes):
            kept[value.name] = tuple(axes)
    return Cut(kept)


def _scores(structure: Structured, group: Group, every: int) -> Array | None:
    """The absolute weights that read the units, ``[rows, units]``, of all layers that have one weight of a unit in each row."""
    found = []
    for member in group.readers:
        weight = np.abs(structure.param(member.param))
        first, plain = int(member.positions[0, 0]), weight.ndim == 2 or set(weight.shape[2:]) == {1}
        in_order = np.array_equal(member.positions[:, 0], np.arange(first, first + group.units))
        if plain and in_order and member.positions.shape[1] == 1 and first % every == 0:
            rows = np.moveaxis(weight, member.axis, -1)[..., first : first + group.units]
            found.append(rows.reshape(-1, group.units))
    return np.concatenate(found) if found else None
