"""Find attention in a graph by its operators: a product of queries and keys, a softmax, a product with values.

Also linear attention (Katharopoulos et al., 2020), which is recognised by what it computes: ``q (k' v) / q sum(k)``; and what one
token reads of a model: parameters of experts by the share that is chosen, and the keys and values that are kept."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS, op_row

MOVES = frozenset((
    *TRAITS["identity"], *TRAITS["reshape"], "Transpose", "Slice", "Split", "Expand", "Tile", "Concat", "Stack", "Gather",
))  # fmt: skip
_BEFORE_SOFTMAX = frozenset((  # scales, masks, soft caps, sinks, heads and batch as one axis, the largest subtracted
    "Mul", "Div", "Add", "Sub", "Where", "MaskedFill", "Clip", "Max", "Tanh", "Concat",
    *TRAITS["identity"], *TRAITS["reshape"],
))  # fmt: skip


def attention_products(graph: Graph) -> Iterator[tuple[Op, Op]]:
    """The two products of every attention: queries by keys, and softmax by values."""
    for op in graph.ops:
        if op.type == "Softmax" and op.inputs[0] is not None and len(op.outputs) == 1:
            scores = _product_before(graph, op.inputs[0])
            product = _reader(graph, op.outputs[0])
            if scores is not None and product is not None:
                yield scores, product


def has_attention(graph: Graph) -> bool:
    """Whether the graph has attention."""
    return next(attention_products(graph), None) is not None


def _product_before(graph: Graph, value: str) -> Op | None:
    """The product of two activations from which ``value`` follows by scaling and masking."""
    op = graph.producer(value)
    while op is not None and op.type in _BEFORE_SOFTMAX:
        operands = op.inputs[1:] if op.type == "Where" else op.inputs  # its first chooses
        active = [s for s in operands if s is not None and graph.producer(s) is not None]
        op = graph.producer(active[0]) if active else None
    return op if op is not None and op.type == "MatMul" and len(op.inputs) > 1 else None


def _reader(graph: Graph, value: str) -> Op | None:
    """The product whose first operand is ``value``, across operators that only move it."""
    while (op := sole_reader(graph, value)) is not None and op.type in MOVES and len(op.outputs) == 1:
        value = op.outputs[0]
    return op if op is not None and op.type == "MatMul" and op.inputs[0] == value else None


def data_readers(graph: Graph, value: str) -> list[tuple[Op, int]]:
    """Each ``(op, port)`` that reads the elements of ``value``, not only its shape."""
    return [(op, port) for op, port in graph.consumers(value) if op.type not in ("Shape", "Size")]


def sole_reader(graph: Graph, value: str) -> Op | None:
    """The only op that reads the elements of ``value``; ``None`` when there are several or the model returns it."""
    readers = data_readers(graph, value)
    return readers[0][0] if len(readers) == 1 and not graph.is_output(value) else None


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


_PRODUCTS = frozenset(("MatMul", "Gemm", "Einsum"))
_SHIFTS = frozenset(("Add", "Sub", "Mul", "Div", "Reciprocal", "Neg", "Clip", "Max", "Min", "Relu", "Abs"))
_SUMS = frozenset(("ReduceSum", "ReduceMean", "CumSum"))


@dataclass(frozen=True)
class _Quotient:
    """A product, and its divisor.

    Attributes:
        factors: operands of the product.
        divisor: what it is divided by, or one over that.
        made: values from the result of the product to what is divided.
    """

    factors: tuple[str, ...]
    divisor: str
    made: tuple[str, ...] = ()


def attention_sums(graph: Graph, static: set[str], divided: dict[str, str]) -> dict[str, str]:
    """Sums over keys and values, and the products and sums of keys that they are divided by -> the operator that divides.

    A query is multiplied by a sum over positions of products of keys and values, and the result is divided by the same query
    times a sum of keys: in one Einsum, in products and a division, or with a factor ``1 / ...``; over all positions or those
    before (CumSum). These sums differ in size by position, head and query, and the quotient makes them alike, so that the
    error of one grid for all of them stands beside small ones.

    Args:
        graph: the model.
        static: values that are the same in every run.
        divided: values that are one number divided by others.
    """
    found: dict[str, str] = {}
    for op in graph.ops:
        quotient = _quotient(graph, op, static, divided)
        if quotient is None:
            continue
        sums = {v: path for v in quotient.factors if (path := _summed(graph, v, static))}
        queries = {_moved(graph, v)[-1] for v in quotient.factors if v not in sums}
        keys, products = _multiplied(graph, quotient.divisor, static) if sums and queries else (set(), [])
        if queries.isdisjoint(keys):
            continue
        values = [*quotient.made, *(v for path in sums.values() for v in path), *filter(partial(_is_sum, graph), keys)]
        found.update(dict.fromkeys((*values, *products), op.name))
    return found


def _quotient(graph: Graph, op: Op, static: set[str], divided: dict[str, str]) -> _Quotient | None:
    data = _moving(graph, op, static)
    if len(data) < 2:
        return None
    if op.type == "Div":
        return _of_product(graph, data[0], data[1], static)
    divisor = next((v for v in data if v in divided), None) if op.type in ("Mul", "Einsum") else None
    if divisor is None:
        return None
    factors = tuple(v for v in data if v != divisor)
    return _Quotient(factors, divisor) if len(factors) > 1 else _of_product(graph, factors[0], divisor, static)


def _of_product(graph: Graph, product: str, divisor: str, static: set[str]) -> _Quotient | None:
    made = _moved(graph, product)
    maker = graph.producer(made[-1])
    if maker is None or maker.type not in _PRODUCTS:
        return None
    return _Quotient(tuple(_moving(graph, maker, static)), divisor, made)


def _moving(graph: Graph, op: Op, static: set[str]) -> list[str]:
    """The operands of an operator that differ from run to run, each once."""
    return list(dict.fromkeys(v for v in _data(graph, op) if v not in static))


def _data(graph: Graph, op: Op) -> Iterator[str]:
    return (v for _, v in op.sources() if graph.values[v].is_float)


def _moved(graph: Graph, value: str) -> tuple[str, ...]:
    """``value`` and the values that it was moved from."""
    path = [value]
    while (maker := graph.producer(path[-1])) is not None and op_row(maker.type).kind == "movement":
        source = next(_data(graph, maker), None)
        if source is None:
            break
        path.append(source)
    return tuple(path)


def _is_sum(graph: Graph, value: str) -> bool:
    maker = graph.producer(value)
    return maker is not None and maker.type in _SUMS


def _summed(graph: Graph, value: str, static: set[str]) -> tuple[str, ...]:
    """Values from a sum of products of two computed values back to that product; none where ``value`` is no such sum."""
    path = list(_moved(graph, value))
    added = False
    while (maker := graph.producer(path[-1])) is not None and maker.type in _SUMS:
        added = True
        path += [v for source in tuple(_data(graph, maker))[:1] for v in _moved(graph, source)]
    multiplies = maker is not None and (maker.type in _PRODUCTS or (added and maker.type == "Mul"))
    operands = _moving(graph, maker, static) if maker is not None and multiplies else []
    return tuple(path) if len(operands) > 1 else ()


def _multiplied(graph: Graph, value: str, static: set[str]) -> tuple[set[str], list[str]]:
    """The factors of ``value``, across added constants, powers, sums and data movement.

    Returns:
        These, and the products.
    """
    found: set[str] = set()
    products: list[str] = []
    stack = [(value, False)]
    while stack:
        value, multiplied = stack.pop()
        if multiplied:
            found.add(value)
        maker = graph.producer(value)
        kind = "" if maker is None else _kind(graph, maker, static)
        if maker is None or not kind or (multiplied and kind != "moves"):
            continue
        if kind == "multiplies":
            products.append(value)
        stack += [(v, multiplied or kind == "multiplies") for v in _moving(graph, maker, static)]
    return found, products


def _kind(graph: Graph, op: Op, static: set[str]) -> str:
    """The kind of an operator: it moves, sums or multiplies computed values, or changes one by constants; else empty."""
    kind, several = op_row(op.type).kind, len(_moving(graph, op, static)) > 1
    if kind == "movement" or op.type in _SUMS:
        return "moves"
    if several:
        return "multiplies" if op.type in _PRODUCTS or op.type == "Mul" else ""
    inverse = op.type == "Pow" and op.attrs.get("exponent") == -1
    return "changes" if inverse or (op.type in _SHIFTS and len(set(op.inputs)) == len(op.inputs)) else ""
