"""What one token reads of a model: parameters of experts by the share that is chosen, and the keys and values that are kept."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from bitwright.core.graph.attention import MOVES, attention_products
from bitwright.core.graph.graph import Graph, Op

_LOOKED_UP = ("Gather", "Embedding")
_READ_BY_CHOICE = ("MatMul", "GroupedMatMul", "Einsum", *_LOOKED_UP)


def chosen_experts(graph: Graph) -> dict[int, tuple[int, float]]:
    """Number of things that an operator ranks -> how many of them it chooses, and all choices of the recorded run."""
    found = {}
    for op in graph.ops:
        if op.type == "TopK" and op.inputs[0] is not None:
            ranked, chosen = graph.values[op.inputs[0]].shape, graph.values[op.outputs[0]].shape
            if ranked and chosen and 0 < chosen[-1] < ranked[-1]:
                found[ranked[-1]] = chosen[-1], float(math.prod(chosen))
    return found


def active_shares(graph: Graph) -> dict[str, float]:
    """Parameter of an expert -> the share of it that one token reads; parameters that all tokens read are left out.

    Experts are stacks of matrices (and rows of biases) with one for each of the things that a ``TopK`` ranks; or layers whose
    names differ in one number, and that read together as many rows as the ``TopK`` chooses.
    """
    choices = chosen_experts(graph)
    if not choices:
        return {}
    return {**_listed(graph, choices), **_stacked(graph, choices)}


def _stacked(graph: Graph, choices: Mapping[int, tuple[int, float]]) -> dict[str, float]:
    read = {name: op.type for op in graph.ops if op.type in _READ_BY_CHOICE for _, name in op.sources()}
    params = {name: graph.values[name] for name in read if graph.values[name].param is not None}
    counts = {v.shape[0] for v in params.values() if len(v.shape) > 2 and v.shape[0] in choices}
    return {
        str(v.param): choices[v.shape[0]][0] / v.shape[0]
        for name, v in params.items()  # a matrix that is looked up has a row of biases for each; others are of routers
        if v.shape and v.shape[0] in counts and len(v.shape) >= (2 if read[name] in _LOOKED_UP else 3)
    }


def _listed(graph: Graph, choices: Mapping[int, tuple[int, float]]) -> dict[str, float]:
    """Layers of one shape that are called alike but for a number."""
    found: dict[str, float] = {}
    for members in _alike(graph).values():
        rows = sum(_rows(graph, op) for _, op in members.values())
        fits = [k for count, (k, all_of) in choices.items() if max(members) < count and rows == all_of]
        if len(members) > 1 and fits:
            found.update((param, min(fits[0] / len(members), 1.0)) for param, _ in members.values())
    return found


def _alike(graph: Graph) -> dict[Any, dict[int, tuple[str, Op]]]:
    """Name of a parameter without one of its numbers, and its shape -> that number -> the parameter, and who reads it."""
    found: dict[Any, dict[int, tuple[str, Op]]] = defaultdict(dict)
    for op in graph.ops:
        for value in (graph.values[name] for _, name in op.sources()):
            for pattern, number in _patterns(str(value.param or "")):
                found[pattern, tuple(value.shape)][number] = str(value.param), op
    return found


def _patterns(name: str) -> list[tuple[str, int]]:
    """The name with each of its numbers left out in turn.

    >>> _patterns("layers.1.experts.3.weight")
    [('layers.*.experts.3.weight', 1), ('layers.1.experts.*.weight', 3)]
    """
    return [(f"{name[: m.start()]}*{name[m.end() :]}", int(m[0])) for m in re.finditer(r"\d+", name)]


def _rows(graph: Graph, op: Op) -> float:
    """Rows of channels that an operator makes in the recorded run."""
    shape = graph.values[op.outputs[0]].shape if op.outputs else ()
    return float(math.prod(shape[:-1]))


def cached_numbers(graph: Graph) -> dict[str, str]:
    """Product of an attention -> the keys or values that it reads, before heads are repeated."""
    return {
        op.name: before
        for products in attention_products(graph)
        for op in products
        if len(op.inputs) > 1 and op.inputs[1] is not None and not graph.values[op.inputs[1]].is_static
        for before in [unrepeated(graph, op.inputs[1])]
    }


def unrepeated(graph: Graph, value: str) -> str:
    """The smallest value of which ``value`` is made by moving and repeating."""
    size = math.prod(graph.values[value].shape)
    best, here = value, value
    while (op := graph.producer(here)) is not None and op.type in MOVES and op.type != "Concat" and op.inputs[0]:
        here = op.inputs[0]
        held = math.prod(graph.values[here].shape)
        if held > size or graph.values[here].is_static:
            break
        if held < size:
            best, size = here, held
    return best
