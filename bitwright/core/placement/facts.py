"""What placement reads off a graph before it decides anything: constants, chains, masks, what needs exact values."""

from __future__ import annotations

from bitwright.core.graph.exact import REASONS, computed_values, exact_values, reciprocals
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.masks import asks
from bitwright.core.graph.normalisations import find_normalisations
from bitwright.core.graph.ops import OpRow, op_row
from bitwright.core.graph.patterns import Match, find_matches
from bitwright.core.graph.tail import tail_ops
from bitwright.core.graph.traits import TRAITS
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerTensor
from bitwright.core.numerics.spec import QuantSpec, Symmetry
from bitwright.core.placement.rules import Resolver, Rules
from bitwright.errors import ConfigError

_CHANNELS_FIRST = frozenset(
    ("Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "AveragePool")
)


class Facts:
    """A graph with its rules, and what follows from these for every decision alike.

    Attributes:
        graph, rules: as given.
        resolver: answers what the rules say about a tensor.
        static: values that are the same in every run.
        float_values: names of floating-point values.
        static_ops: operators that only move what is static.
        matches, misses: supergroups found, and chains that are none because of their surroundings.
        inner: value inside a supergroup -> the supergroup.
        match_of: operator -> its supergroup.
        mask_ops, mask_values: see :func:`_masks`.
        symmetry: value -> the symmetry that a reader asks for, and the reader.
        tail: operators after the last layer that are left in float unless a rule asks for more, see :meth:`_float_tail`.
        exact: value -> what it is needed for exactly, and the operator that needs it.
        reciprocals: value that is a reciprocal, or a multiple of one -> the operator that divides.
        normalisations: operator that is part of a normalisation written out -> the last operator of it.
    """

    def __init__(self, graph: Graph, rules: Rules) -> None:
        self.graph, self.rules = graph, rules
        self.resolver = Resolver(rules.rules)
        self.static = _static_values(graph)
        self.float_values = {value.name for value in graph.values.values() if value.is_float}
        self.static_ops = {op.name for op in graph.ops if op.outputs and self.static.issuperset(op.outputs)}
        self.matches, self.misses = find_matches(graph, rules.supergroups, self.static_ops)
        self.inner = {value: match for match in self.matches for value in match.inner}
        self.match_of = {op.name: match for match in self.matches for op in match.ops}
        self.mask_ops, self.mask_values = _masks(graph, self.matches, self.static)
        self.symmetry = self._asked_of_producers()
        self.exact = exact_values(graph, self.static)
        self.reciprocals = reciprocals(graph, self.static)
        self.normalisations = find_normalisations(graph, self.static)
        self.tail = self._float_tail()

    def is_float(self, value: str) -> bool:
        """Whether a value is of a floating-point type."""
        return value in self.float_values

    def data(self, op: Op, row: OpRow) -> list[str]:
        """The float values with elements that ``op`` reads as data, in all its runs."""
        ports = row.activations
        return [
            v
            for port, v in op.sources()
            if (ports is None or port in ports) and self.is_float(v) and 0 not in self.graph.values[v].shape
        ]

    def looks_up(self, op: Op, row: OpRow) -> bool:
        """Whether ``op`` picks rows of a constant table by a computed index, as an embedding does."""
        return op.type == "Gather" and bool(op.inputs) and op.inputs[0] in self.static

    def picks_matrices(self, op: Op, row: OpRow) -> bool:
        """Whether ``op`` picks some of a stack of matrices by a computed index, as experts do."""
        return (
            self.looks_up(op, row)
            and len(op.inputs) > 1
            and op.inputs[1] is not None
            and not op.attrs.get("axis")
            and len(self.graph.values[op.inputs[0] or ""].shape) > 2
        )

    def complete(self, op: Op, row: OpRow) -> bool:
        """Whether every element that a merge can put out comes from a recorded operand."""
        return (
            row.activations is None
            or all(p < len(op.inputs) and op.inputs[p] is not None for p in row.activations)
            and (len(row.activations) > 1)
        )

    def steering_reason(self, row: OpRow, values: list[str]) -> str:
        """Why an operand stays in float that decides in some runs what the model computes; a layer quantizes its own."""
        steering = (self.exact[v] for v in values if v in self.exact and self.exact[v][0] == "steering")
        need, op = next(steering, (None, ""))
        return "" if need is None or row.kind == "compute" else REASONS[need].format(op)

    def exact_reason(self, value: str, spec: QuantSpec | None, reader: OpRow | None = None) -> str:
        """Why no grid of ``spec`` serves a value; empty where one does. Small float formats have steps that grow.

        Args:
            reader: of the value; a layer quantizes what it reads of a solver's states, which stay in float.
        """
        if value not in self.exact or self.exact[value][0] == "sum":
            return ""
        need, op = self.exact[value]
        if need == "steering" and reader is not None and reader.kind == "compute":
            return ""
        coarse = (
            need in ("phase", "identity", "order", "steering") or spec is None or isinstance(spec.format, IntFormat)
        )
        return REASONS[need].format(op) if coarse else ""

    def statistic_reason(self, op: Op, value: str) -> str:
        """Why what ``op`` makes is in float as part of a normalisation or another statistic; empty where it is part of none.

        Integer runtimes have a kernel for each of these operators, and a grid holds the values, badly: a rule that asks for
        the operator, be it one for all operators, is followed.
        """
        end = self.normalisations.get(op.name)
        if end is None:
            need, reader = self.exact.get(value, ("", ""))
            return REASONS["sum"].format(reader) if need == "sum" else ""
        if end == op.name:
            return f"{op.type} completes a normalisation, which runs in float on integer runtimes"
        return f"float: inside the normalisation that {end} completes"

    def concrete(self, granularity: Granularity, op: Op, value: str) -> Granularity:
        """The open axis of an activation: axis 1 of images and what convolutions handle, else the last
        one."""
        rank = len(self.graph.values[value].shape)
        if rank == 0 or isinstance(granularity, PerTensor):
            return PerTensor()
        axis = 1 if rank > 3 or (rank == 3 and op.type in _CHANNELS_FIRST) else rank - 1
        return granularity.resolve(None if isinstance(granularity, PerBlock) else axis, axis)

    def _float_tail(self) -> set[str]:
        """Operators after the last layer that runtimes compute in float as fast: functions of numbers, joins, and products that
        decode. Clamps are computed by the operator before them; pools and means read many more numbers than they make.
        """
        rules = self.rules
        if rules.activation is None or not (rules.float_tail or rules.split_joins):
            return set()
        kinds = ("pointwise", "merge", "compute") if rules.float_tail else ("merge",)
        return {
            op.name
            for op in tail_ops(self.graph, self.static)
            if op_row(op.type).kind in kinds and op.type not in TRAITS["clamp"] and not self._ends_layer(op)
        }

    def _ends_layer(self, op: Op) -> bool:
        """Whether ``op`` is computed together with the layer before it."""
        match = self.match_of.get(op.name)
        return match is not None and op_row(match.ops[0].type).kind in ("compute", "norm", "reduce")

    def _asked_of_producers(self) -> dict[str, tuple[Symmetry, str]]:
        """Value -> (symmetry, asking operator), for rules that reach back to where their input is quantized."""
        asked = {  # type -> the symmetry that the last rule asks for
            op_type: rule.symmetry
            for rule in self.rules.rules
            if rule.reaches_producer and rule.symmetry is not None
            for op_type in rule.types
        }
        found: dict[str, tuple[Symmetry, str]] = {}
        moved: dict[str, str] = {}
        for op in self.graph.ops if asked else ():
            row = op_row(op.type)
            if row.kind == "movement" and op.inputs and op.inputs[0] is not None:
                moved.update(dict.fromkeys(op.outputs, moved.get(op.inputs[0], op.inputs[0])))
            if op.type in asked:
                for value in self._moving_operands(op, row):
                    _ask(found, moved.get(value, value), asked[op.type], op.name)
        return found

    def _moving_operands(self, op: Op, row: OpRow) -> list[str]:
        """What ``op`` reads as data and is not the same in every run."""
        ports = row.activations
        return [value for port, value in op.sources() if value not in self.static and (ports is None or port in ports)]


def _ask(found: dict[str, tuple[Symmetry, str]], value: str, symmetry: Symmetry, op: str) -> None:
    earlier = found.setdefault(value, (symmetry, op))
    if earlier[0] != symmetry:
        raise ConfigError(
            value,
            f"{earlier[1]} asks for {_an(earlier[0])} encoding, {op} for {_an(symmetry)} one",
            "give both operator types the same is_symmetric, or leave it out for one of them",
        )


def _an(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word.replace('_', ' ')}"


def _static_values(graph: Graph) -> set[str]:
    """Values that are the same in every run: parameters, constants, and what only moves those."""
    static = {value.name for value in graph.values.values() if value.is_static}
    for op in graph.ops:
        sources = [value for _, value in op.sources()]
        if sources and op_row(op.type).kind == "movement" and all(value in static for value in sources):
            static.update(op.outputs)
    return static


def _masks(graph: Graph, matches: list[Match], static: set[str]) -> tuple[set[str], dict[str, str]]:
    """Operators that only prepare the mask of a masked softmax, and mask values -> the softmax.

    The mask is the operand that no product of tensors leads to; where both operands are like that, neither
    is a mask.
    """
    softmaxes = [m for m in matches if m.pattern.kind == "masked_softmax"]
    if not softmaxes:
        return set(), {}
    computed = computed_values(graph)
    entries = {  # (operator, value) where a mask enters -> the softmax
        (op.name, value): match.ops[-1].name
        for match in softmaxes
        for op, value in _mask_operands(graph, match, static, computed)
    }
    values = {value: softmax for (_, value), softmax in entries.items()}
    serves: dict[str, str] = {}  # operator -> the softmax whose mask it prepares
    for op in reversed(graph.ops):
        softmax = _served(graph, op, values, entries, serves)
        if softmax:
            serves[op.name] = softmax
            for value in (*op.outputs, *(v for _, v in op.sources() if v not in static)):
                values.setdefault(value, softmax)
    return set(serves), values


def _served(
    graph: Graph, op: Op, values: dict[str, str], entries: dict[tuple[str, str], str], serves: dict[str, str]
) -> str | None:
    """The softmax for whose mask alone ``op`` works; ``None`` where something else reads its outputs.

    What asks a question of the mask (which rows are masked in full) may read it as well.
    """
    if any(map(graph.is_output, op.outputs)):
        return None
    readers = [
        (reader.name, value) for value in op.outputs for reader, _ in graph.consumers(value) if not asks(graph, reader)
    ]
    served = [values[v] if (r, v) in entries else serves.get(r) for r, v in readers]
    return served[0] if served and all(served) else None


def _mask_operands(graph: Graph, match: Match, static: set[str], computed: set[str]) -> list[tuple[Op, str]]:
    """The operands of a masked softmax that no product leads to, with the operators that read them."""
    operands = [(op, v) for op in match.ops for _, v in op.sources() if v not in match.inner and v not in static]
    if computed.isdisjoint(value for _, value in operands):
        return []
    return [(op, v) for op, v in operands if v not in computed and graph.values[v].is_float]
