"""Recognise linear attention (Katharopoulos et al., 2020) by what it computes: ``q (k' v) / q sum(k)``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import op_row

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
