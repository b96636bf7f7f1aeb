"""Chains of operators that belong together: which ones, where they occur in a graph, and why one does not
match.

A chain is written as operator types from first to last. The values between its operators must have no other
reader and must not be returned by the model. Operators that change nothing at inference (identity, dropout,
a batch normalisation that can still be folded into the operator before it) may stand between any two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.errors import with_article

PatternKind = Literal["chain", "bias_add", "masked_softmax"]


@dataclass(frozen=True)
class Pattern:
    """A chain of operator types.

    Attributes:
        ops: canonical types, first to last; at least two.
        kind: ``bias_add`` asks that the second operator adds a constant with one axis; ``masked_softmax``
            also leaves the other operands (the mask) in float.
        plain_only: refuse a convolution over three spatial axes or a depthwise one at the head.
    """

    ops: tuple[str, ...]
    kind: PatternKind = "chain"
    plain_only: bool = False

    def __str__(self) -> str:
        return ">".join(self.ops)


@dataclass(frozen=True)
class Match:
    """A chain found in a graph.

    Attributes:
        pattern: what was looked for.
        ops: every operator of the chain, those skipped over included, in execution order.
        inner: the values between them.
        output: the value the chain passes on.
    """

    pattern: Pattern
    ops: tuple[Op, ...]
    inner: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class NoMatch:
    """The reason why a chain from ``op`` does not match ``pattern``; ``near`` where only its context forbids it."""

    op: str
    pattern: Pattern
    reason: str
    near: bool = False

    def __str__(self) -> str:
        return f"{self.op}: not fused as {self.pattern}, because {self.reason}"


_ACTIVATIONS = TRAITS["clamp"]
_HEADS = (*TRAITS["bias_port"], "MatMul", "Add", "Sub", "Mul", "BatchNormalization", "AveragePool", "GlobalAveragePool")

_MASKING = ("Add", "Where", "MaskedFill")
_SCALING = ("Mul", "Div")
MASKED_SOFTMAX: tuple[Pattern, ...] = (
    *(Pattern((scale, mask, "Softmax"), "masked_softmax") for scale in _SCALING for mask in _MASKING),
    *(Pattern((mask, scale, "Softmax"), "masked_softmax") for scale in _SCALING for mask in _MASKING),
    *(Pattern((head, "Softmax"), "masked_softmax") for head in (*_MASKING, *_SCALING)),
)
MATMUL_ADD: tuple[Pattern, ...] = (
    *(Pattern(("MatMul", "Add", a), "bias_add") for a in _ACTIVATIONS),
    Pattern(("MatMul", "Add"), "bias_add"),
)
DEFAULT_SUPERGROUPS: tuple[Pattern, ...] = (
    *(Pattern((head, "BatchNormalization", a)) for head in TRAITS["bias_port"] for a in _ACTIVATIONS),
    *(Pattern((head, a)) for head in _HEADS for a in _ACTIVATIONS),
    *(Pattern((head, "BatchNormalization")) for head in TRAITS["bias_port"]),
    *MATMUL_ADD,
    *MASKED_SOFTMAX,
)


def folds_into(graph: Graph, op: Op) -> Op | None:
    """The operator that the batch normalisation ``op`` could be folded into, or ``None``.

    It must use running statistics, directly follow a convolution or linear operator with a constant weight,
    and be the only reader of its output; a linear operator's output must have its channels on axis 1, as
    [N, C].
    """
    value = op.inputs[0] if op.type == "BatchNormalization" and op.inputs else None
    if value is None or op.also or op.attrs.get("training") or len(op.inputs) < 5 or None in op.inputs[3:5]:
        return None
    head = graph.producer(value)
    if head is None or head.type not in TRAITS["bias_port"] or graph.sole_consumer(value) is None:
        return None
    weight = head.inputs[1] if len(head.inputs) > 1 else None
    if weight is None or not graph.values[weight].is_static:
        return None
    return head if head.type != "Gemm" or len(graph.values[value].shape) == 2 else None


class _Links:
    """The next operator of a chain, looked up once per value."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._skips: dict[str, bool] = {}

    def after(self, op: Op) -> Op | str:
        """The only reader of ``op``'s output, or why there is none."""
        if len(op.outputs) != 1:
            return f"{op.name} has {len(op.outputs)} outputs"
        value = op.outputs[0]
        readers = self.graph.consumers(value)
        if self.graph.is_output(value):
            return f"{value} is also an output of the model"
        if len(readers) > 1:
            names = dict.fromkeys(reader.name for reader, _ in readers)
            return f"{value} is read {len(readers)} times, by {', '.join(list(names)[:3])}"
        if not readers:
            return f"nothing reads {value}"
        reader, port = readers[0]
        row = op_row(reader.type)
        if row.activations is not None and port not in row.activations:
            return f"{reader.name} reads {value} as {row.params.get(port, 'a setting')}, not as data"
        return reader

    def skips(self, op: Op) -> bool:
        """Whether ``op`` is an identity at inference."""
        if op.type in TRAITS["identity"]:
            return True
        if op.type != "BatchNormalization":
            return False
        if op.name not in self._skips:
            self._skips[op.name] = folds_into(self.graph, op) is not None
        return self._skips[op.name]


def match_at(graph: Graph, op: Op, pattern: Pattern) -> Match | NoMatch:
    """Match ``pattern`` with its head at ``op``; otherwise the reason."""
    return _match_at(_Links(graph), op, pattern)


def _match_at(links: _Links, op: Op, pattern: Pattern) -> Match | NoMatch:
    if op.type != pattern.ops[0]:
        return NoMatch(op.name, pattern, f"it is {with_article(op.type)}")
    if pattern.plain_only and (refusal := _not_plain(links.graph, op)):
        return NoMatch(op.name, pattern, refusal)
    ops, inner, at = [op], [], 1
    while at < len(pattern.ops):
        reader = links.after(ops[-1])
        if isinstance(reader, str):
            return NoMatch(op.name, pattern, reason=reader, near=_reads(links.graph, ops[-1], pattern.ops[at]))
        if reader.type == pattern.ops[at]:
            if at == 1 and pattern.kind == "bias_add" and not _adds_bias(links.graph, reader):
                return NoMatch(op.name, pattern, f"{reader.name} does not add a constant with one axis")
            at += 1
        elif not links.skips(reader):
            return NoMatch(op.name, pattern, f"{with_article(reader.type)}, {reader.name}, follows {ops[-1].name}")
        inner.append(ops[-1].outputs[0])
        ops.append(reader)
    if len(ops[-1].outputs) != 1:
        return NoMatch(op.name, pattern, f"{ops[-1].name} has {len(ops[-1].outputs)} outputs")
    return Match(pattern, tuple(ops), tuple(inner), ops[-1].outputs[0])


def _reads(graph: Graph, op: Op, op_type: str) -> bool:
    return any(reader.type == op_type for value in op.outputs for reader, _ in graph.consumers(value))


def _adds_bias(graph: Graph, add: Op) -> bool:
    operands = [graph.values[value] for value in add.inputs if value is not None]
    return not add.also and any(_is_row(v, other) for v, other in zip(operands, operands[::-1], strict=True))


def _is_row(value: Value, other: Value) -> bool:
    """Whether a constant is a row: one axis, perhaps after axes of length one, and at most the rank of the other addend."""
    rank, most = len(value.shape), max(len(other.shape), 2)  # a product of unknown shape is one by a matrix
    return value.is_static and 0 < rank <= most and all(length == 1 for length in value.shape[:-1])


def _not_plain(graph: Graph, op: Op) -> str | None:
    if op.type not in ("Conv", "ConvTranspose") or len(op.inputs) < 2 or op.inputs[1] is None:
        return None
    shape, group = graph.values[op.inputs[1]].shape, int(op.attrs.get("group", 1))
    if len(shape) == 5:
        return "the target does not fuse convolutions over three spatial axes"
    if op.type == "Conv" and group > 1 and shape[1:2] == (1,) and shape[0] == group:
        return "the target does not fuse depthwise convolutions"
    return None


def find_matches(
    graph: Graph, patterns: Sequence[Pattern], skip: Iterable[str] = ()
) -> tuple[list[Match], list[NoMatch]]:
    """Every chain of ``patterns`` in ``graph``, longest patterns first, no operator in two of them.

    A batch normalisation that can still be folded and ended up in no chain forms one with the operator
    before it.

    Args:
        graph: the graph.
        patterns: chains to look for; among equally long ones the match that spans more operators wins.
        skip: names of operators that take part in no chain.

    Returns:
        The matches in execution order, and one :class:`NoMatch` per operator whose chain was there except for
        another reader or because the model returns an inner value. Linear in the graph.
    """
    links, taken = _Links(graph), set(skip)
    found: dict[str, Match] = {}
    near: dict[str, NoMatch] = {}
    for heads in _by_head(patterns):
        for op in graph.ops:
            if op.type in heads and op.name not in taken:
                _try(links, op, heads[op.type], found, near, taken)
    _add_foldable_norms(graph, found, taken)
    matches = [found[op.name] for op in graph.ops if op.name in found]
    return matches, [miss for name, miss in near.items() if name not in taken]


def _by_head(patterns: Sequence[Pattern]) -> Iterator[dict[str, list[Pattern]]]:
    """For every length, the longest first: type of the first operator -> the patterns of that length."""
    for length in sorted({len(p.ops) for p in patterns}, reverse=True):
        heads: dict[str, list[Pattern]] = {}
        for pattern in patterns:
            if len(pattern.ops) == length:
                heads.setdefault(pattern.ops[0], []).append(pattern)
        yield heads


def _add_foldable_norms(graph: Graph, found: dict[str, Match], taken: set[str]) -> None:
    """Chains of a batch normalisation and the operator into which it can be folded."""
    for op in graph.ops:
        head = folds_into(graph, op) if op.name not in taken else None
        if head is not None and head.name not in taken:
            pattern = Pattern((head.type, op.type))
            found[head.name] = Match(pattern, (head, op), head.outputs, op.outputs[0])
            taken.update((head.name, op.name))


def _try(
    links: _Links, op: Op, patterns: list[Pattern], found: dict[str, Match], near: dict[str, NoMatch], taken: set[str]
) -> None:
    best: Match | None = None
    for pattern in patterns:
        result = _match_at(links, op, pattern)
        if isinstance(result, NoMatch):
            if result.near:
                near.setdefault(op.name, result)
        elif (best is None or len(result.ops) > len(best.ops)) and all(o.name not in taken for o in result.ops):
            best = result
    if best is not None:
        found[op.name] = best
        taken.update(o.name for o in best.ops)
