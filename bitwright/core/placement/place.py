"""Place quantizers: a pure function of graph, rules and operator table.

:func:`place` decides in four linear passes, none of which depends on the position of an operator in the graph:

1. which values are the same in every run: parameters, constants, and results of moving them (:class:`Facts`);
2. which chains are supergroups, and which operators only prepare the mask of a softmax (:class:`Facts`);
3. what every operator's output is: a site of its own, on the grid of another site, or float, with the reason
   (:class:`Outputs`);
4. what every operator reads: weights, biases, constants, and activations that are not quantized yet (:class:`Operands`).

Decisions are collected in a :class:`Ledger`: sites, shared grids, reasons for float, and which rules had an effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bitwright.core.graph.float_values import (
    REASONS,
    asks,
    computed_values,
    exact_values,
    is_cell_state,
    reciprocals,
    tail_ops,
)
from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.graph.normalisations import find_normalisations
from bitwright.core.graph.operators import (
    STATISTICS,
    TRAITS,
    OpRow,
    is_addend,
    is_rotation,
    op_row,
    resolve_granularity,
    weight_axes,
)
from bitwright.core.graph.patterns import Match, find_matches, folds_into
from bitwright.core.graph.recurrence import (
    CELL,
    CELLS,
    HIDDEN,
    RECURRENT,
    RETURNS,
    STATE_PORTS,
    activation_range,
    is_wide,
)
from bitwright.core.graph.roles import CACHES, ROLE, ends_of, named_by_role
from bitwright.core.numerics.formats import FLOAT32_SCALE, FloatFormat, IntFormat, parse_format
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, PerToken, fitted
from bitwright.core.numerics.integer_sums import bias_entries
from bitwright.core.numerics.spec import QuantSpec, Symmetry
from bitwright.core.placement.kv_cache import cache_places, describe
from bitwright.core.placement.plan import Plan, RangeFrom, Role, SitePlan
from bitwright.core.placement.rules import RUN_TIME_OPERAND, Resolver, Rule, Rules, Setting, is_run_time_weight
from bitwright.errors import ConfigError, close_matches, with_article

CACHE_ROLES = frozenset(f"{ROLE}{name}" for name in CACHES)
_CHANNELS_FIRST = frozenset(
    ("Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "AveragePool")
)


class Facts:
    """A graph with its rules, and facts that all decisions share.

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
        cache: operator and port -> keys or values of attention, where the rules ask for a cache.
        normalisations: operator that is part of a normalisation written out -> the last operator of it.
        roles: operator, parameter or operand -> its role in a transformer, where a rule names one.
    """

    def __init__(self, graph: Graph, rules: Rules) -> None:
        self.graph, self.rules = graph, rules
        self.resolver = Resolver(
            (
                *_rules_of_ends(graph, rules),
                *_rules_of_routers(graph),
                *_rules_of_expert_biases(graph),
                *_rules_of_adapters(graph),
                *rules.rules,
                *_rules_of_rotations(graph),
            )
        )
        asked = any(rule.name.startswith(ROLE) for rule in rules.rules)
        self.roles = named_by_role(graph) if asked else {}
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
        self.cache = cache_places(graph, rules.kv_cache)

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
        """Whether every element of the output of a merge comes from a recorded operand."""
        return (
            row.activations is None
            or all(p < len(op.inputs) and op.inputs[p] is not None for p in row.activations)
            and (len(row.activations) > 1)
        )

    def steering_reason(self, row: OpRow, values: list[str]) -> str:
        """The reason why an operand that steers the model's control flow stays in float; layers quantize theirs."""
        steering = (self.exact[v] for v in values if v in self.exact and self.exact[v][0] == "steering")
        need, op = next(steering, (None, ""))
        return "" if need is None or row.kind == "compute" else REASONS[need].format(op)

    def exact_reason(self, value: str, spec: QuantSpec | None, reader: Op | None = None, port: int = 0) -> str:
        """The reason why grids of ``spec`` are too coarse for a value, as small float formats may be; empty where they suit.

        Args:
            reader: of the value, at ``port``; a layer quantizes what it reads of positions and of states, which stay in float,
                except for the cell state of an LSTM.
        """
        if value not in self.exact or self.exact[value][0] == "sum":
            return ""
        need, op = self.exact[value]
        layer = reader is not None and op_row(reader.type).kind == "compute" and not is_cell_state(reader, port)
        if need in ("steering", "position", "state") and layer:
            return ""
        coarse = (
            need in ("phase", "position", "identity", "order", "steering", "state")
            or spec is None
            or isinstance(spec.format, IntFormat)
        )
        return REASONS[need].format(op) if coarse else ""

    def statistic_reason(self, op: Op, value: str) -> str:
        """The reason why outputs of ``op`` stay in float as parts of a normalisation or another statistic; else empty.

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
        if isinstance(granularity, PerToken):
            return granularity
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
        """Data operands of ``op`` that are not constant."""
        ports = row.activations
        return [value for port, value in op.sources() if value not in self.static and (ports is None or port in ports)]


_BETWEEN = 6  # operators between a router and the choice of the largest: softmax, sums of biases, groups


def _rules_of_routers(graph: Graph) -> list[Rule]:
    """Layers that choose matrices of a stack (experts) are in float, unless a rule of the user says more.

    They are a thousandth of the weights, and rounded they choose others. A router has one output for each matrix of a stack, and
    the largest of them are picked.
    """
    stacks = _stacks(graph)
    found = []
    for op in graph.ops if stacks else ():
        made = op.outputs[:1] if op.type in ("Gemm", "MatMul") else ()
        wide = any((graph.values[name].shape[-1:] or (0,))[0] in stacks for name in made)
        choice = _picked_by(graph, op.outputs[0]) if wide else None
        if choice is not None:
            why = f"{op.name} chooses experts ({choice}), and chooses others when it is rounded"
            found.append(Rule(op.name, quantized=False, origin=why, optional=True))
    return found


def _rules_of_expert_biases(graph: Graph) -> list[Rule]:
    """Biases of experts, a row of a table each, are in float like those of other layers, unless a rule says more."""
    found = []
    for layer in graph.ops:
        adder = graph.sole_consumer(layer.outputs[0]) if layer.type == "GroupedMatMul" else None
        sources = adder.inputs if adder is not None and adder.type == "Add" else ()
        for op, table in filter(None, (_picked_rows(graph, value) for value in sources)):
            why = f"{table} holds the biases of the experts of {layer.name}"
            found.append(Rule(op, quantized=False, origin=why, optional=True))
    return found


def _picked_rows(graph: Graph, value: str | None) -> tuple[str, str] | None:
    """The operator that gathers a value from rows of a stored matrix, and the matrix."""
    op = None if value is None else graph.producer(value)
    table = graph.values.get(op.inputs[0] or "") if op is not None and op.type == "Gather" else None
    if op is None or table is None or table.param is None or len(table.shape) != 2:
        return None
    return op.name, table.param


_PASSES = frozenset((*TRAITS["identity"], "Dropout", "Cast", "Reshape"))  # layers of GPT-2 read rows in two axes


def _rules_of_adapters(graph: Graph) -> list[Rule]:
    """Low-rank adapters beside a layer (LoRA) are in float, unless a rule of the user says more.

    They are small, and they train while the layer stays on its grid. An adapter is two layers in a row, narrow between, that
    read what a wider layer reads and whose result is added to that layer's.
    Reference: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """
    found = []
    for down in graph.ops:
        names = _adapter(graph, down)
        why = f"{down.name} and {names[1]} are an adapter beside {names[-1]}" if names else ""
        found += [Rule(name, quantized=False, origin=why, optional=True) for name in names[:-1]]
    return found


def _adapter(graph: Graph, down: Op) -> list[str]:
    """The operators of an adapter that ``down`` begins, and the layer it stands beside; empty where it begins none."""
    inputs, rank = _matrix(graph, down)
    if not 0 < 2 * rank <= inputs:
        return []
    _, up = _after(graph, down)
    within, outputs = (0, 0) if up is None else _matrix(graph, up)
    if up is None or within != rank or 2 * rank > outputs:
        return []
    scaled, adder = _after(graph, up)
    base = _beside(graph, adder, _source(graph, down.inputs[0]))
    if base is None or _matrix(graph, base) != (inputs, outputs):
        return []
    return [op.name for op in (down, up, *scaled, base)]


def _matrix(graph: Graph, op: Op) -> tuple[int, int]:
    """Inputs and outputs of a product with a stored matrix; zeros where ``op`` is something else."""
    weight = graph.values.get(op.inputs[1] or "") if op.type in ("Gemm", "MatMul") and len(op.inputs) > 1 else None
    if weight is None or not weight.is_static or len(weight.shape) != 2:
        return 0, 0
    first, second = weight.shape
    return (second, first) if op.attrs.get("transB") else (first, second)


def _multiplied(graph: Graph, op: Op) -> str | None:
    """The activation that a product with a stored matrix reads; ``None`` for other operators."""
    return _source(graph, op.inputs[0]) if _matrix(graph, op)[0] else None


def _after(graph: Graph, op: Op) -> tuple[list[Op], Op | None]:
    """Multiplications of the output of ``op`` by constants, and the sole reader of their result."""
    scaled: list[Op] = []
    reader = graph.sole_consumer(op.outputs[0])
    while reader is not None and (reader.type in _PASSES or _scales(graph, reader)):
        scaled += [] if reader.type in _PASSES else [reader]
        reader = graph.sole_consumer(reader.outputs[0])
    return scaled, reader


def _scales(graph: Graph, op: Op) -> bool:
    """Whether ``op`` multiplies by a constant."""
    static = [graph.values[name].is_static for _, name in op.sources()]
    return op.type == "Mul" and (sum(static) == 1 or len(static) == 1)


def _source(graph: Graph, value: str | None) -> str | None:
    """Trace ``value`` back through operators that do not change it."""
    maker = graph.producer(value) if value is not None else None
    while maker is not None and maker.type in _PASSES:
        value = maker.inputs[0]
        maker = graph.producer(value) if value is not None else None
    return value


_MOST_ADAPTERS = 16  # beside one layer


def _beside(graph: Graph, adder: Op | None, source: str | None) -> Op | None:
    """The product that reads ``source`` and whose result ``adder`` reads, after other adapters where there are some."""
    for _ in range(_MOST_ADAPTERS):
        if adder is None or adder.type != "Add":
            return None
        made = [op for name in adder.inputs if (op := graph.producer(_source(graph, name) or ""))]
        base = [op for op in made if _multiplied(graph, op) == source]
        if base:
            return base[0]
        adder = next((op for op in made if op.type == "Add"), None)
    return None


def _rules_of_ends(graph: Graph, rules: Rules) -> list[Rule]:
    """A language model's table of tokens and output layer are not taken below 8 bits, unless a rule of the user says more.

    Errors of the one reach every layer, those of the other every probability. Engines keep both in float; next to calibrated
    activations, which the output layer reads, they have 8 bits.
    """
    weight, activation = rules.weight, rules.activation
    if weight is None or weight.format.bits >= 8 or rules.ends != "kept":
        return []
    in_float = activation is None or activation.dynamic
    stored: dict[str, Any] = {"format": "int8", "symmetry": "symmetric", "granularity": PerChannel()}
    asked = {"quantized": False} if in_float else {**stored, "scale_format": FLOAT32_SCALE}
    found = []
    for name, role in ends_of(graph).items():
        why = f"{name} {'selects tokens' if role == 'embedding' else 'makes the logits'}, and weights have fewer than 8 bits"
        found.append(Rule(name, port="weight", origin=why, optional=True, **asked))
    return found


def _stacks(graph: Graph) -> set[int]:
    """Number of matrices in the stacks of a graph."""
    found: set[int] = set()
    for op in graph.ops:
        operands = [graph.values[value] for _, value in op.sources() if len(graph.values[value].shape) == 3]
        if op.type == "GroupedMatMul":
            found.update(value.shape[0] for value in operands)
        elif op.type in ("MatMul", "Gather"):
            found.update(value.shape[0] for value in operands if value.param is not None)
    return found


def _picked_by(graph: Graph, value: str) -> str | None:
    """The operator that picks the largest elements of ``value``, directly or after elementwise operators."""
    level = [value]
    for _ in range(_BETWEEN):
        readers = [op for name in level for op, _ in graph.consumers(name)]
        for op in readers:
            if op.type in ("TopK", "ArgMax"):
                return op.name
        level = [op.outputs[0] for op in readers if op.outputs and op_row(op.type).kind != "compute"]
    return None


def _rules_of_rotations(graph: Graph) -> list[Rule]:
    """Online rotations are in float, and so are values that only they read: their outputs are quantized."""
    found = []
    for op in graph.ops:
        if not is_rotation(op.type, op.name):
            continue
        why = f"{op.name} rotates what is quantized after it"
        found.append(Rule(op.name, quantized=False, origin=why, optional=True))
        before = graph.producer(op.inputs[0] or "")
        readers = () if before is None else graph.consumers(before.outputs[0])
        alone = all(is_rotation(reader.type, reader.name) for reader, _ in readers)
        if before is not None and alone and not graph.is_output(before.outputs[0]):
            found.append(Rule(before.name, port="output", quantized=False, origin=why, optional=True))
    return found


def _ask(found: dict[str, tuple[Symmetry, str]], value: str, symmetry: Symmetry, op: str) -> None:
    earlier = found.setdefault(value, (symmetry, op))
    if earlier[0] != symmetry:
        raise ConfigError(
            value,
            f"{earlier[1]} asks for {_an(earlier[0])} encoding, {op} for {_an(symmetry)} one",
            "give both operator types the same is_symmetric, or leave it out for one of them",
        )


def _an(word: str) -> str:
    return with_article(word.replace("_", " "))


def _static_values(graph: Graph) -> set[str]:
    """Values that are the same in every run: parameters, constants, and what only moves those."""
    static = graph.static()
    for op in graph.ops:
        sources = [value for _, value in op.sources()]
        if sources and op_row(op.type).kind == "movement" and all(value in static for value in sources):
            static.update(op.outputs)
    return static


def _masks(graph: Graph, matches: list[Match], static: set[str]) -> tuple[set[str], dict[str, str]]:
    """Operators that only compute the mask of a masked softmax, and mask values -> the softmax.

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
    """The softmax whose mask is the only use of ``op``; ``None`` where its outputs have other readers.

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


FLOAT_OP = "{} runs in float on integer runtimes"
NO_ACTIVATIONS = "activations stay in float under {}"
NO_WEIGHTS = "weights stay in float under {}"
AT_RUN_TIME = "activations are quantized at run time, where products with quantized weights read them"
STATES_AT_RUN_TIME = "{} computes it in float between its products, whose operands are quantized at run time"
TAIL = "{} follows the last layer, where float is as fast and more exact"
MOVED = "only moved where it is read"


class Ledger:
    """The decisions about the values of one graph."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.sites: dict[str, SitePlan] = {}
        self.outputs: dict[str, SitePlan] = {}  # value -> the site at its producer
        self.group_of: dict[str, str] = {}  # quantized or riding activation -> group
        self.spec_of: dict[str, QuantSpec] = {}  # group -> spec
        self.last_states: set[str] = set()  # what recurrent layers end with, also after it was moved
        self.float_ops: set[str] = set()  # operators with an integer kernel that find only floats to work on
        self.origin: dict[str, str] = {}  # float activation that was only moved -> where it came from
        self.why: dict[str, str] = {}  # value -> reason for float; overruled by a site
        self.shared: dict[str, str] = {}
        self.operand_groups: dict[tuple[str, QuantSpec], str] = {}  # (value or its origin, spec) -> group
        self.run_time: set[str] = set()  # LSTMs whose products read values on ranges chosen at run time
        self.float_states: set[str] = set()  # last states of such layers
        self.picked: dict[str, str] = {}  # matrix picked from a stack -> the reason for its having no site
        # values of which the only reason so far is a reader that computes no float of them
        self.aside: set[str] = set()
        self.read_at: dict[str, list[str]] = {}  # float origin -> sites where it is quantized after all
        self.used: set[int] = set()
        self.unused: dict[int, tuple[str, str]] = {}  # rule -> first tensor it matched in vain, and why

    def setting(self, op: Op, ports: frozenset[str], param: str | None, site: str, *values: str) -> Setting:
        """The rules' setting for a tensor of ``op`` with all these names."""
        known = self.facts.roles
        roles = [known[name] for name in (op.name, site, *values) if name in known] if known else ()
        return self.facts.resolver.setting(op.type, ports, param, (op.name, op.module, site, *values), roles)

    def output_setting(self, op: Op, index: int, value: str) -> Setting:
        """The rules' setting for an output."""
        ports = frozenset(("output", "model_output") if self.facts.graph.is_output(value) else ("output",))
        return self.setting(op, ports, None, f"{op.name}.output[{index}]", value)

    def activation_spec(self, setting: Setting, op: Op, row: OpRow, value: str) -> QuantSpec | None:
        """The spec of an activation; ``None`` where the rules have none for activations."""
        spec = setting.apply(self.facts.rules.activation, weight=False)
        if spec is None:
            return None
        if value in self.facts.symmetry and not spec.dynamic:
            spec = replace(spec, symmetry=self.facts.symmetry[value][0])
        return self.pinned(spec, setting, row.fixed_range)

    def pinned(self, spec: QuantSpec | None, setting: Setting, fixed: tuple[float, float] | None) -> QuantSpec | None:
        """``spec`` with the range that the values have whatever the input, unless a rule says otherwise."""
        if spec is None or not self.facts.rules.fixed_ranges or not isinstance(spec.format, IntFormat) or spec.dynamic:
            return spec
        if fixed and setting.fixed_range is None and spec.fixed_range is None:
            if spec.symmetry == "asymmetric" or fixed[0] == -fixed[1]:
                spec = replace(spec, fixed_range=fixed)
        return spec

    def range_from(self, spec: QuantSpec, setting: Setting) -> RangeFrom:
        """What fixes both ends of an activation's range: the operator, a rule or the target; empty for none."""
        if spec.fixed_range is None or None in spec.fixed_range or not isinstance(spec.format, IntFormat):
            return ""
        base = self.facts.rules.activation
        if setting.fixed_range is None and (base is None or base.fixed_range is None):
            return "operator"
        return "target" if setting.range_of_target else "rule"

    def is_settled(self, value: str) -> bool:
        """Whether a value has been decided: on a grid or in float."""
        return (
            value in self.group_of
            or value in self.why
            or self.facts.graph.producer(value) is None
            or value in self.facts.static
        )

    def share_output(self, op: Op, index: int, value: str, group: str) -> None:
        """Put an output on the grid of ``group``."""
        self.group_of[value] = self.shared[value] = group
        setting = self.output_setting(op, index, value)
        self.note_unused(setting, f"{op.name}.output[{index}]", f"it shares the encoding of {group}")

    def in_tail(self, op: Op, setting: Setting) -> bool:
        """Whether ``op`` stays in float because it follows the last layer and no rule selects its tensors."""
        if op.name not in self.facts.tail:
            return False
        matched = (self.facts.rules.rules[index] for index in setting.matched)
        return not any(is_meant(rule) and not rule.optional for rule in matched)

    def verdict(
        self, setting: Setting, wanted: bool, spec: QuantSpec | None, site: str, reason: str, value: str, none: str
    ) -> bool:
        """Whether the tensor is quantized; otherwise notes why not. Keeps account of which rules did
        something."""
        if wanted and spec is not None:
            self.used.update(setting.matched)
            return True
        if setting.quantized is False:
            self.used.update(setting.matched)
            reason = f"float by rule {setting.decided_by}"
        elif wanted:
            reason = none.format(self.facts.rules.source)
        self.why[value] = self.why.get(value) or reason
        self.note_unused(setting, site, reason)
        return False

    def rank_reader(self, op: Op, value: str) -> None:
        """Drop the reason of an earlier reader that computes no float of ``value``, if ``op`` does."""
        if not makes_float(self.facts, op):
            self.aside |= {value} - self.why.keys()
        elif value in self.aside:
            self.aside.remove(value)
            del self.why[value]

    def note_unused(self, setting: Setting, site: str, reason: str) -> None:
        """Record that the rules that matched a tensor changed nothing."""
        for index in setting.matched:
            self.unused.setdefault(index, (site, reason))

    def add(self, site: SitePlan) -> None:
        """Add a site; the first one of a group sets the group's spec."""
        self.sites[site.name] = site
        for name in (site.group, site.name):
            self.spec_of.setdefault(name, site.spec)


def is_meant(rule: Rule | None) -> bool:
    """Whether a rule selects some operators and not all."""
    return rule is not None and (rule.name != "*" or rule.types != ("*",) or rule.quantized is False)


def with_granularity(spec: QuantSpec, granularity: Granularity) -> QuantSpec:
    """``spec`` with another granularity; itself where that is the same."""
    return spec if spec.granularity == granularity else replace(spec, granularity=granularity)


_PRODUCTS = frozenset(("MatMul", "Einsum"))
_ADDED = "added to the product of {} before anything is rounded"
_RECIPROCAL = "float: a reciprocal made by {}, large where the divisor is small; {} multiplies with it in float"
_NORM_PARAMETER = "normalisation parameters stay in float"
_MOST_INPUT_BITS, _MOST_WEIGHT_BITS = 16, 8  # what int32 accumulators are made for
# they read the shape of a tensor and none of its values
_SHAPE_ONLY = frozenset(
    "Shape Size RandomNormalLike RandomUniformLike EyeLike zeros_like ones_like full_like empty_like "
    "rand_like randn_like new_zeros new_ones new_full new_empty".split()
)


def is_table(facts: Facts, op: Op, row: OpRow, port: int) -> bool:
    """Whether ``op`` gathers rows of its operand at ``port``."""
    return port == 0 and facts.looks_up(op, row)


def makes_float(facts: Facts, op: Op) -> bool:
    """Whether ``op`` computes floating-point results of the elements of its operands."""
    return op.type not in _SHAPE_ONLY and any(facts.is_float(v) for v in op.outputs)


def no_input_reason(ledger: Ledger, op: Op, row: OpRow, port: int, value: str) -> str:
    """The reason why a float operand stays in float under any operator; empty without one."""
    if op.type in _SHAPE_ONLY:
        return f"{op.name} reads only its shape"
    if (origin := ledger.origin.get(value, value)) in ledger.picked:
        return ledger.picked[origin]
    if not any(ledger.facts.is_float(v) for v in op.outputs):
        is_complex = any(ledger.facts.graph.values[v].dtype.startswith("complex") for v in op.outputs)
        return f"{op.name} makes {'complex numbers' if is_complex else 'no floating-point result'} of it"
    match = ledger.facts.match_of.get(op.name)
    masked = match is not None and match.pattern.kind == "masked_softmax"
    if (op.name in ledger.facts.mask_ops or masked) and value in ledger.facts.mask_values:
        return f"mask of the softmax {ledger.facts.mask_values[value]}"
    if match is not None and masked:
        return f"inside the supergroup {match.pattern}"
    if is_addend(op.type, port):
        return _ADDED.format(op.name)
    if row.activations is not None and port not in row.activations:
        return f"a setting of {op.name}, not data"
    return ""


def constant_reason(ledger: Ledger, op: Op, row: OpRow, port: int, value: Value, param: str | None) -> str:
    """The reason why a constant stays in float where no rule matches; empty if it is quantized."""
    if not param:
        return _operand_reason(ledger, op, row, port, value)
    weighs = row.weight == port or row.kind == "compute" or is_table(ledger.facts, op, row, port)
    return _parameter_reason(ledger, op, row, value, param, param == "weight" and weighs)


def _in_float_norm(ledger: Ledger, op: Op) -> bool:
    """Whether ``op`` is part of a written-out normalisation whose output no rule has put on a grid."""
    return op.name in ledger.facts.normalisations and op.name in ledger.float_ops


def _parameter_reason(ledger: Ledger, op: Op, row: OpRow, value: Value, param: str, weight: bool) -> str:
    if row.kind == "norm" or _in_float_norm(ledger, op):
        return _NORM_PARAMETER
    if row.kind == "float":
        return FLOAT_OP.format(op.type)
    if weight and (row.kind == "compute" or math.prod(value.shape) > 1 or ledger.facts.looks_up(op, row)):
        return ""
    if op.type in CELLS:
        return f"{param} of {op.name}, added within a step before anything is rounded"
    return f"scalar parameter of {op.name}"


def _operand_reason(ledger: Ledger, op: Op, row: OpRow, port: int, value: Value) -> str:
    match = ledger.facts.match_of.get(op.name)
    if match is not None and match.pattern.kind == "masked_softmax":
        return f"inside the supergroup {match.pattern}, as its mask or factor"
    if match is not None and match.pattern.kind == "bias_add" and op is match.ops[1]:
        return f"bias of {match.ops[0].name}, added to the accumulator inside the supergroup {match.pattern}"
    if op.name in ledger.facts.mask_ops:
        return "part of a softmax mask"
    if is_addend(op.type, port):
        return _ADDED.format(op.name)
    if row.activations is not None and port not in row.activations:
        return f"a setting of {op.name}, not data"
    if row.kind == "movement":
        return MOVED
    if math.prod(value.shape) == 1:
        return "scalar"
    if _in_float_norm(ledger, op):
        return _NORM_PARAMETER
    integer = row.integer and op.name not in ledger.float_ops
    return "" if integer else f"operand of {op.name}, which runs in float"


def no_int32_reason(ledger: Ledger, op: Op, bias: Value, grids: dict[int, str]) -> str:
    """The reason why input and weight give no int32 bias; empty where they do."""
    if op.type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return FLOAT_OP.format(f"the bias of {op.type}")
    if 0 not in grids or 1 not in grids:
        return "float: its input or weight is not quantized"
    weight = ledger.sites.get(grids[1])
    if weight is None or weight.role != "weight":
        return "float: its weight is not the same in every run"
    data = ledger.spec_of[grids[0]]
    if data.dynamic:
        return "float: the scale of its input is chosen at run time"
    if not isinstance(data.granularity, PerTensor):
        return "float: its input has several scales"
    if not isinstance(data.format, IntFormat) or not isinstance(weight.spec.format, IntFormat):
        return "float: its input or weight is not on an integer grid"
    if data.format.bits > _MOST_INPUT_BITS or weight.spec.format.bits > _MOST_WEIGHT_BITS:
        return "float: its input has more than 16 bits or its weight more than 8"
    shape = ledger.facts.graph.values[weight.value].shape
    if len(shape) < 2:
        return "float: its weight has no output channels"
    if bias_entries(bias.shape) != _output_channels(op, shape):
        return f"float: integer kernels add one number per output channel, and it has shape {bias.shape}"
    if not _scales_follow_channels(op, weight.spec.granularity, shape):
        return "float: its weight has scales that do not belong to one output channel each"
    return ""


def _output_channels(op: Op, shape: tuple[int, ...]) -> int:
    """Number of output channels of an operator with a weight of ``shape``."""
    axis, _ = weight_axes(op.type, op.attrs, 1, len(shape))
    assert axis is not None, op.type
    return shape[axis] * (int(op.attrs.get("group", 1)) if op.type == "ConvTranspose" else 1)


def _scales_follow_channels(op: Op, granularity: Granularity, shape: tuple[int, ...]) -> bool:
    """Whether the weight has one scale, or one per output channel."""
    if isinstance(granularity, PerChannel) and granularity.axis is not None:
        granularity = PerChannel(granularity.axis % len(shape))
    natural = resolve_granularity(op.type, op.attrs, 1, PerChannel(), shape)
    return isinstance(granularity, PerTensor) or granularity == natural


_STATISTICS = "statistics of a normalisation stay in float unless a rule names them"
_PARAM, _CONSTANT, _BIAS = frozenset(("param",)), frozenset(("constant",)), frozenset(("bias", "param"))
_PARAM_PORTS = {"bias": _BIAS, "weight": frozenset(("weight", "param"))}
_EMPTY = "it has no elements"
_INT32 = QuantSpec(IntFormat(32), PerTensor(), "symmetric")
_PLAIN = OpRow("pointwise")


class Operands:
    """Decides the operands of operators, after all outputs, and records the decisions in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.facts = ledger, ledger.facts
        self._grids: dict[str, dict[int, str]] = {}  # product -> port -> group: an addition may bring its bias

    def decide(self, op: Op) -> None:
        """Decide the operands of ``op``; a bias last, as it follows from the others."""
        row = op_row(op.type)
        grids: dict[int, str] = {}  # port -> group of what arrives there
        biases: list[tuple[int, list[str]]] = []
        product = self._product_before(op)
        for port, values in self._read(op):
            if (row.bias == port or product is not None) and values[0] in self.facts.static:
                biases.append((port, values))
            elif op.type in CELLS and port in STATE_PORTS:
                self._initial_state(op, port, values, grids)
            elif self.facts.static.issuperset(values):
                self._constants(op, row, port, values, grids)
            elif row.kind != "movement":
                self._activation(op, row, port, values, grids)
        if op.type == "MatMul":
            self._grids[op.name] = grids
        for port, values in biases:
            self._bias(op, port, values, grids if product is None else self._grids[product.name])

    def _read(self, op: Op) -> list[tuple[int, list[str]]]:
        """Operands of ``op`` that can be quantized: per port, the values of all runs."""
        by_port: dict[int, dict[str, None]] = {}
        for port, value in op.sources():
            if value not in self.facts.float_values:
                continue
            if 0 in self.facts.graph.values[value].shape:  # a cache before its first entry
                self.ledger.why.setdefault(value, _EMPTY)
            else:
                by_port.setdefault(port, {})[value] = None
        return [(port, list(by_port[port])) for port in sorted(by_port)]

    def _product_before(self, op: Op) -> Op | None:
        """The MatMul whose result ``op`` reads directly to add a bias: integer kernels add it before rounding."""
        match = self.facts.match_of.get(op.name)
        if match is None or match.pattern.kind != "bias_add" or op is not match.ops[1]:
            return None
        product = match.ops[0]
        return product if product.outputs[0] in op.inputs else None

    def _initial_state(self, op: Op, port: int, values: list[str], grids: dict[int, str]) -> None:
        """Put an initial state on the grid of the state that it becomes, unless its producer quantizes it."""
        loose = [v for v in values if v not in self.ledger.group_of]
        if not loose:
            return
        if op.name in self.ledger.run_time:
            self.ledger.why.setdefault(self.ledger.origin.get(loose[0], loose[0]), STATES_AT_RUN_TIME.format(op.name))
            return
        state = STATE_PORTS[port]
        returns = zip(op.outputs, op.attrs.get("returns", RETURNS), strict=False)
        carriers = [op.inner.get(state, ""), *(value for value, returned in returns if returned == state)]
        group = next((self.ledger.group_of[v] for v in carriers if v in self.ledger.group_of), None)
        if group is None:
            self._activation(op, op_row(op.type), port, values, grids)
            return
        site = f"{op.name}.input[{port}]"
        setting = self.ledger.setting(op, frozenset(("input",)), None, site, loose[0])
        reason = f"{op.name} reads it in float"
        wanted = setting.quantized is not False
        if self.ledger.verdict(setting, wanted, self.ledger.spec_of[group], site, reason, loose[0], NO_ACTIVATIONS):
            self.ledger.add(SitePlan(site, self.ledger.spec_of[group], "input", op.name, port, loose[0], group))
            self.ledger.read_at.setdefault(self.ledger.origin.get(loose[0], loose[0]), []).append(site)

    def _activation(self, op: Op, row: OpRow, port: int, values: list[str], grids: dict[int, str]) -> None:
        """Quantize the operand at ``port`` unless its producers have."""
        ledger, facts = self.ledger, self.facts
        if (op.name, port) in facts.cache:
            self._cached(op, port, values, grids)
            return
        match = facts.match_of.get(op.name)
        inner = match.inner if match else ()
        groups = {ledger.group_of[v] for v in values if v in ledger.group_of}
        loose = [v for v in values if v not in ledger.group_of and v not in inner]
        if op.name in ledger.run_time:  # its kernel chooses a range also for values that lie on a grid
            groups, loose = set(), values
        if loose:
            self._loose(op, row, port, loose, groups, grids)
        elif len(groups) == 1:
            grids[port] = groups.pop()

    def _cached(self, op: Op, port: int, values: list[str], grids: dict[int, str]) -> None:
        """Keys or values of attention: on the grid of the cache, whatever grid their producer has."""
        site, value = f"{op.name}.input[{port}]", values[0]
        setting = self.ledger.setting(op, frozenset(("input",)), None, site)
        spec = self.facts.cache[op.name, port].spec
        wanted = setting.quantized is not False
        if self.ledger.verdict(setting, wanted, spec, site, "", self.ledger.origin.get(value, value), NO_ACTIVATIONS):
            self.ledger.add(SitePlan(site, spec, "input", op.name, port, value, site))
            grids[port] = site
            self.ledger.read_at.setdefault(self.ledger.origin.get(value, value), []).append(site)

    def _loose(self, op: Op, row: OpRow, port: int, loose: list[str], groups: set[str], grids: dict[int, str]) -> None:
        """Quantize the operand at ``port`` where it arrives without a grid in some runs; ``groups``: those of the other runs."""
        ledger, facts = self.ledger, self.facts
        value = next((v for v in loose if v not in facts.static), loose[0])
        origin = ledger.origin.get(value, value)
        from_model = facts.graph.values[origin].kind == "input"
        site = f"{op.name}.input[{port}]"
        ports = frozenset(("input", "model_input") if from_model else ("input",))
        setting = ledger.setting(op, ports, None, site, *((origin,) if from_model else ()))
        at_run_time = op.name in ledger.run_time
        spec = RUN_TIME_OPERAND if at_run_time else ledger.activation_spec(setting, op, _PLAIN, origin)
        reason = no_input_reason(ledger, op, row, port, value)
        ledger.rank_reader(op, origin)
        wanted = False
        if not reason:
            reason = facts.steering_reason(row, loose) or self._unfit(op, row, port, value, origin, spec, groups)
            wanted = self._input_wanted(op, row, setting, from_model, reason)
            if spec is not None and spec.dynamic and not self._runs_dynamic(setting, op, port, site):
                wanted, reason = False, reason or AT_RUN_TIME
            if (
                not groups
                and setting.quantized is not True
                and self._multiplies_a_reciprocal(op, value, origin, reason)
            ):
                wanted = False
        reason = reason or f"{op.name} reads it in float"
        if not ledger.verdict(setting, wanted, spec, site, reason, origin, NO_ACTIVATIONS):
            return
        assert spec is not None
        spec = with_granularity(spec, facts.concrete(spec.granularity, op, value))
        spec.granularity.param_shape(facts.graph.values[value].shape, site)
        group = self._input_group(site, spec, origin, loose, groups)
        ledger.add(SitePlan(site, ledger.spec_of.get(group, spec), "input", op.name, port, value, group))
        grids[port] = group
        ledger.read_at.setdefault(origin, []).append(site)

    def _unfit(
        self, op: Op, row: OpRow, port: int, value: str, origin: str, spec: QuantSpec | None, groups: set[str]
    ) -> str:
        """The reason why an operand stays in float: as its producer and ``op`` do, or since every grid is too coarse."""
        if groups:
            return ""
        if origin in self.ledger.float_states and row.kind != "compute":
            return self.ledger.why[origin]
        return self.facts.exact_reason(value, spec, op, port)

    def _runs_dynamic(self, setting: Setting, op: Op, port: int, site: str) -> bool:
        """Whether an operand gets a range at run time: beside a weight, where a cache keeps it, or because a rule says so."""
        of_cache = bool(setting.dynamic) and self.facts.roles.get(site) in CACHE_ROLES
        return op.name in self.ledger.run_time or of_cache or setting.quantized is True or self._reads_weight(op, port)

    def _reads_weight(self, op: Op, port: int) -> bool:
        """Whether ``op`` multiplies what it reads at ``port`` by a weight that is quantized, as dynamic kernels do."""
        if (
            op.type not in ("MatMul", "Gemm")
            or port != 0
            or len(op.inputs) < 2
            or op.inputs[1] not in self.facts.static
        ):
            return False
        weight = self.facts.graph.values[op.inputs[1] or ""]
        name = self._constant_name(op, 1, weight, "weight", several=False)
        setting = self.ledger.setting(op, _PARAM_PORTS["weight"], "weight", name, weight.param or weight.name)
        return setting.quantized is not False and setting.apply(self.facts.rules.weight, weight=True) is not None

    def _multiplies_a_reciprocal(self, op: Op, value: str, origin: str, reason: str) -> bool:
        """Whether ``op`` multiplies by a reciprocal; notes that as the reason of ``origin`` where it has no other ``reason``."""
        found = op.type == "Mul" and value in self.facts.reciprocals and op.name not in self.facts.normalisations
        if found:
            self.ledger.why[origin] = reason or _RECIPROCAL.format(self.facts.reciprocals[value], op.name)
        return found

    def _input_wanted(self, op: Op, row: OpRow, setting: Setting, from_model: bool, unfit: str) -> bool:
        """Whether an operand gets a grid; ``unfit``: the reason why every grid is too coarse for its values."""
        if setting.quantized is not None and (not unfit or is_meant(setting.decided_by)):
            return bool(setting.quantized)
        if from_model and self.ledger.in_tail(op, setting):
            return False
        return not unfit and (from_model or (_wants_grid(row) and op.name not in self.ledger.float_ops))

    def _input_group(self, site: str, spec: QuantSpec, origin: str, loose: list[str], groups: set[str]) -> str:
        if len(groups) == 1:  # other runs of the place read a value that has a grid: it serves for all
            (group,) = groups
            # a pinned range need not hold what the first run reads, unless that is a constant starting state
            pinned = self.ledger.spec_of[group].fixed_range if all(v in self.facts.static for v in loose) else None
            if self.ledger.spec_of[group] == (spec if pinned is None else replace(spec, fixed_range=pinned)):
                return group
        if groups or len({self.ledger.origin.get(v, v) for v in loose}) > 1:
            return site
        return self.ledger.operand_groups.setdefault((origin, spec), site)

    def _constants(self, op: Op, row: OpRow, port: int, values: list[str], grids: dict[int, str]) -> None:
        """Quantize constants: weights, other parameters, computed constants."""
        ledger, several = self.ledger, len(values) > 1
        value = self.facts.graph.values[values[0]]
        param = "weight" if is_table(self.facts, op, row, port) else self._param_name(op, row, port, value)
        site = self._constant_name(op, port, value, param, several=several)
        ports = _CONSTANT if param is None else _PARAM_PORTS.get(param, _PARAM)
        setting = ledger.setting(op, ports, param, site, value.param or value.name)
        rules = self.facts.rules
        spec = setting.apply(rules.weight if param else rules.activation, weight=param is not None)
        reason = constant_reason(ledger, op, row, port, value, param)
        reason = (
            reason or self._reason_of_setting(op, param, setting, spec) or self.facts.exact_reason(value.name, spec)
        )
        wanted, reason = self._constant_wanted(op, setting, param, value, reason)
        none = NO_WEIGHTS if param else NO_ACTIVATIONS
        if not ledger.verdict(setting, wanted, spec, site, reason, value.name, none):
            ledger.why.update(dict.fromkeys(values[1:], ledger.why[value.name]))
            return
        assert spec is not None
        granularity = self._constant_granularity(op, port, value, param, setting, spec)
        granularity.param_shape(value.shape, site)
        spec = with_granularity(spec, granularity)
        role: Role = "weight" if param else "constant"
        if several or (not param and value.made_anew):
            role = (
                "input"  # runs read different constants, or may on other lengths: watch them, for a range of them all
            )
        group = site if several else ledger.operand_groups.setdefault((value.name, spec), site)
        ledger.add(SitePlan(site, spec, role, op.name, port, value.name, group))
        ledger.read_at.setdefault(ledger.origin.get(value.name, value.name), []).append(site)
        grids[port] = site
        for other in values[1:]:
            ledger.shared.setdefault(other, group)

    def _reason_of_setting(self, op: Op, param: str | None, setting: Setting, spec: QuantSpec | None) -> str:
        """Why a constant that could be quantized stays in float under its setting: in the tail, or beside dynamic ranges."""
        if param:
            in_tail = op.name in self.ledger.float_ops and self.ledger.in_tail(op, setting)
            return TAIL.format(op.type) if in_tail else ""
        return AT_RUN_TIME if spec is not None and spec.dynamic and setting.quantized is None else ""

    def _constant_wanted(
        self, op: Op, setting: Setting, param: str | None, value: Value, reason: str
    ) -> tuple[bool, str]:
        """Whether a rule quantizes a constant that ``reason`` would leave in float; notes the reason where none does."""
        wanted = not reason if setting.quantized is None else setting.quantized is True
        if wanted and param in STATISTICS and not _rule_names(setting.decided_by, param, value):
            return False, _STATISTICS
        if wanted and reason and (head := folds_into(self.facts.graph, op)) is not None:
            return False, f"it can be folded into {head.name}, which leaves nothing of it"
        return wanted, reason

    def _constant_granularity(
        self, op: Op, port: int, value: Value, param: str | None, setting: Setting, spec: QuantSpec
    ) -> Granularity:
        """The granularity of a constant with its axes."""
        granularity: Granularity = PerTensor()
        if param:
            granularity = resolve_granularity(op.type, op.attrs, port, spec.granularity, value.shape)
        if setting.granularity is None:  # a preset is meant for layers of every width, a rule for those it names
            return fitted(granularity, value.shape)
        return granularity if param else self.facts.concrete(setting.granularity, op, value.name)

    def _param_name(self, op: Op, row: OpRow, port: int, value: Value) -> str | None:
        """The name of the parameter at ``port``; ``None`` for other operands."""
        if is_addend(op.type, port) or (value.made_anew and op.type in _PRODUCTS):
            return None  # of a product with what every run makes, as positions, the second factor is data as well
        if port in row.params or row.weight == port:
            return row.params.get(port, "weight")
        if (
            row.kind == "compute"
            and not row.params
            and any(v not in self.facts.static for v in self.facts.data(op, row))
        ):
            return "weight"  # on whichever side of a product it stands
        return value.param.rpartition(".")[2] if row.kind == "float" and value.param else None

    def _constant_name(self, op: Op, port: int, value: Value, param: str | None, *, several: bool) -> str:
        if value.param and not several:
            return self._unique(value.param, op, port)
        return self._unique(f"{op.name}.{param}" if param else f"{op.name}.input[{port}]", op, port)

    def _unique(self, name: str, op: Op, port: int) -> str:
        for candidate in (name, f"{name}@{op.name}"):
            if candidate not in self.ledger.sites:
                return candidate
        return f"{name}@{op.name}[{port}]"

    def _bias(self, op: Op, port: int, values: list[str], grids: dict[int, str]) -> None:
        name = values[0]
        value = self.facts.graph.values[name]
        site = self._constant_name(op, port, value, "bias", several=False)
        setting = self.ledger.setting(op, _BIAS, "bias", site, value.param or name)
        if len(values) > 1:
            self.ledger.why.update(dict.fromkeys(values, f"float: runs of {op.name} read different biases"))
            return
        if setting.quantized is True:
            self._plain_bias(op, port, value, site, setting)
            return
        reason = no_int32_reason(self.ledger, self._product_before(op) or op, value, grids)
        wanted = setting.quantized is not False and not reason
        spec = _INT32
        if not self.ledger.verdict(setting, wanted, spec, site, reason, name, NO_WEIGHTS):
            return
        weight = grids[1]
        if not isinstance(self.ledger.sites[weight].spec.granularity, PerTensor):
            spec = replace(_INT32, granularity=PerChannel(len(value.shape) - 1))
        follows = (grids[0], weight)
        self.ledger.add(SitePlan(site, spec, "bias", op.name, port, name, site, follows))

    def _plain_bias(self, op: Op, port: int, value: Value, site: str, setting: Setting) -> None:
        """Quantize a bias like any other parameter, as a rule asks."""
        spec = setting.apply(self.facts.rules.weight, weight=True)
        if not self.ledger.verdict(setting, True, spec, site, "", value.name, NO_WEIGHTS):
            return
        assert spec is not None
        granularity = PerTensor() if setting.granularity is None else setting.granularity
        spec = replace(spec, granularity=granularity.resolve(0, None))
        spec.granularity.param_shape(value.shape, site)
        group = self.ledger.operand_groups.setdefault((value.name, spec), site)
        self.ledger.add(SitePlan(site, spec, "bias", op.name, port, value.name, group))


def _rule_names(rule: Rule | None, param: str, value: Value) -> bool:
    """Whether a rule selects this parameter and not all of a kind."""
    return rule is not None and (rule.param == param or rule.name == (value.param or value.name))


def _wants_grid(row: OpRow) -> bool:
    """Whether integer runtimes need this operator's operands on a grid: products, sums and joins."""
    return row.kind == "compute" or (row.integer and row.activations is None)


_INNER = frozenset(("inner",))
#: measured: at 48 units the operator takes as long as that of floats (decision 0024)
_LEAST_UNITS = 64
_INITIAL_HIDDEN = next(port for port, state in STATE_PORTS.items() if state == HIDDEN)


class Outputs:
    """Decides the outputs of operators, in execution order, and records the decisions in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.facts = ledger, ledger.facts

    def decide(self, op: Op) -> None:
        """Decide the outputs of ``op``, after those of the operators before it."""
        row = op_row(op.type)
        if op.type in CELLS:
            self._recurrent(op, row)
            return
        carried = row.kind in ("movement", "merge") and not self.facts.looks_up(op, row)
        for index, value in enumerate(op.outputs):
            if not self.facts.is_float(value):
                continue
            if row.kind == "norm" and index:
                self.ledger.why[value] = "a statistic that the normalisation measures"
            elif self.facts.picks_matrices(op, row):
                self._pick(op, index, value)
            elif op.name in self.facts.mask_ops or (value in self.facts.inner and not carried):
                self._inside(op, index, value)
            elif carried:
                self._carry(op, row, index, value)
            else:
                self._decide_output(op, row, index, value, default=row.integer or self.facts.looks_up(op, row))

    def _recurrent(self, op: Op, row: OpRow) -> None:
        """Decide the values inside the steps of ``op``, and its outputs, which carry the states."""
        at_run_time = self._chooses_ranges(op)
        for name, value in op.inner.items():
            self._inner(op, row, name, value)
        returns = op.attrs.get("returns", RETURNS)
        for index, (value, state) in enumerate(zip(op.outputs, returns, strict=False)):
            if index or state == CELL:
                self.ledger.last_states.add(value)
            carried = op.inner.get(state, "")
            if at_run_time:
                why = STATES_AT_RUN_TIME.format(op.name)
                if not self._decide_output(op, row, index, value, default=False, why=why) and index:
                    self.ledger.float_states.add(value)
            elif self.facts.is_float(value) and not (value == carried and value in self.ledger.outputs):
                self._state(op, row, index, value, carried)

    def _chooses_ranges(self, op: Op) -> bool:
        """Whether an LSTM reads its input and its hidden state on ranges chosen at run time; gives it the site of the latter.

        A rule has to ask for it (``recurrent: run_time``), and a kernel must exist: ``DynamicQuantizeLSTM`` of ONNX Runtime has
        8-bit weights with one scale, or one per row of gates, and no projection. With fewer units it is slower than float.
        """
        site = f"{op.name}.{RECURRENT}"
        setting = self.ledger.setting(op, _INNER, None, site)
        asked = self.facts.rules.activation
        if not setting.dynamic or asked is None or not self._has_run_time_kernel(op):
            return False
        if not isinstance(asked.format, IntFormat) or asked.format.bits != 8:
            return False
        self.ledger.used.update(setting.matched)
        self.ledger.run_time.add(op.name)
        hidden = op.inner[HIDDEN]
        self.ledger.add(
            SitePlan(site, RUN_TIME_OPERAND, "input", op.name, _INITIAL_HIDDEN, hidden, site, inner=RECURRENT)
        )
        return True

    def _is_one_step(self, op: Op) -> bool:
        """Whether a layer was recorded on sequences of one step, as a cell is: the operator costs more than it saves there."""
        shape = self.facts.graph.values[op.inputs[0] or ""].shape
        return len(shape) != 3 or shape[0] == 1

    def _has_run_time_kernel(self, op: Op) -> bool:
        lengths, projection = ((op.inputs[port] if len(op.inputs) > port else None) for port in (4, 8))
        if (
            op.type != "LSTM"
            or lengths is not None
            or projection is not None
            or op.attrs.get("layout", 0)
            or self._is_one_step(op)
        ):
            return False
        for port in (1, 2):
            weight = self.facts.graph.values[op.inputs[port] or ""]
            setting = self.ledger.setting(
                op, _PARAM_PORTS["weight"], "weight", f"{op.name}.weight", weight.param or weight.name
            )
            spec = setting.apply(self.facts.rules.weight, weight=True)
            if weight.name not in self.facts.static or setting.quantized is False:
                return False
            if spec is None or not is_run_time_weight(spec):
                return False
        units = self.facts.graph.values[op.inputs[2] or ""].shape[-1]
        return units >= _LEAST_UNITS

    def _state(self, op: Op, row: OpRow, index: int, value: str, carried: str) -> None:
        """Decide an output of a recurrent layer that is, or ends with, the state ``carried``."""
        group = self.ledger.group_of.get(carried)
        if group is not None and self.ledger.outputs[carried].inner is not None:
            self.ledger.share_output(op, index, value, group)
        elif self._decide_output(op, row, index, value, default=True) and group is not None:
            self._join(value, group)

    def _join(self, value: str, group: str) -> None:
        """Let the site of ``value`` share the encoding of ``group``, if their specs are equal."""
        site = self.ledger.outputs[value]
        if site.spec == self.ledger.spec_of[group]:
            self.ledger.outputs[value] = replace(site, group=group)
            self.ledger.group_of[value] = group

    def _inner(self, op: Op, row: OpRow, name: str, value: str) -> None:
        """Give a tensor inside the steps of ``op`` a site, or the reason why it has none.

        A hidden state that is kept in float between the steps is still an output, quantized after the layer.
        """
        site = f"{op.name}.{name}"
        setting = self.ledger.setting(op, _INNER, None, site, value)
        if value in op.outputs and setting.quantized is False:
            self.ledger.used.update(setting.matched)
            return
        index = -1
        if value in op.outputs:
            index = op.outputs.index(value)
            site, setting = f"{op.name}.output[{index}]", self.ledger.output_setting(op, index, value)
        base = self.facts.rules.activation
        base = _wide(base) if base is not None and is_wide(op.type, name) else base
        spec = self.ledger.pinned(setting.apply(base, weight=False), setting, activation_range(op.type, op.attrs, name))
        if spec is not None and spec.dynamic:
            chosen = op.name in self.ledger.run_time
            self.ledger.why[value] = STATES_AT_RUN_TIME.format(op.name) if chosen else AT_RUN_TIME
            return
        if self.ledger.verdict(setting, setting.quantized is not False, spec, site, "", value, NO_ACTIVATIONS):
            assert spec is not None
            spec = with_granularity(spec, self.facts.concrete(spec.granularity, op, value))
            self.ledger.outputs[value] = SitePlan(site, spec, "output", op.name, index, value, site, inner=name)
            self.ledger.group_of[value], self.ledger.spec_of[site] = site, spec

    def _stays_in_float(self, op: Op, row: OpRow) -> bool:
        """Whether all that ``op`` computes with is in float, so that an integer kernel has nothing to start
        from.

        Convolutions and matrix products are worth a quantizer at their input, and so is a softmax; for sums,
        activations and means between operators in float it would only cost accuracy. For the end of a
        supergroup the operands of its first operator count.
        """
        match = self.facts.match_of.get(op.name)
        if match is not None:
            op, row = match.ops[0], op_row(match.ops[0].type)
        if row.kind == "compute" or (match is not None and match.pattern.kind == "masked_softmax"):
            return False
        sources = [v for v in self.facts.data(op, row) if v not in self.facts.static]
        return bool(sources) and all(
            self.ledger.is_settled(v)
            and v not in self.ledger.group_of
            and self.facts.graph.values[self.ledger.origin.get(v, v)].kind != "input"
            for v in sources
        )

    def _inside(self, op: Op, index: int, value: str) -> None:
        """Leave ``value`` in float; the reason is noted at the end, once its whole chain is decided."""
        self.ledger.why[value] = ""
        match = self.facts.inner.get(value)
        end = f"inside the supergroup {match.pattern}; name {match.ops[-1].name}" if match else "part of a softmax mask"
        self.ledger.note_unused(
            self.ledger.output_setting(op, index, value), f"{op.name}.output[{index}]", f"it is {end}"
        )

    def _pick(self, op: Op, index: int, value: str) -> None:
        """Leave gathered matrices as they are: they keep the scales of their stack."""
        stack = str(op.inputs[0])
        self.ledger.picked[value] = self.ledger.why[value] = f"matrices of {stack}, each on its own grid there"
        self.ledger.note_unused(
            self.ledger.output_setting(op, index, value), f"{op.name}.output[{index}]", self.ledger.why[value]
        )

    def _decide_output(self, op: Op, row: OpRow, index: int, value: str, *, default: bool, why: str = "") -> bool:
        """Give ``value`` a site at its producer, or note the reason why it stays in float."""
        site = f"{op.name}.output[{index}]"
        setting = self.ledger.output_setting(op, index, value)
        spec = self.ledger.activation_spec(setting, op, row, value)
        reason = "" if default else why or FLOAT_OP.format(op.type)
        if stays := self._runs_in_float(op, row, value, setting, default=default):
            self.ledger.float_ops.add(op.name)
            reason = stays
        if not reason and spec is not None and spec.dynamic and not (setting.quantized or setting.dynamic):
            if row.kind != "compute":
                self.ledger.float_ops.add(op.name)
            reason = AT_RUN_TIME
        unfit = self.facts.exact_reason(value, spec)
        reason = (unfit or reason) if setting.quantized else (reason or unfit)
        asked = None if unfit and not is_meant(setting.decided_by) else setting.quantized
        wanted = not reason if asked is None else bool(asked)
        if self.ledger.verdict(setting, wanted, spec, site, reason, value, NO_ACTIVATIONS):
            assert spec is not None
            spec = with_granularity(spec, self.facts.concrete(spec.granularity, op, value))
            spec.granularity.param_shape(self.facts.graph.values[value].shape, site)  # raises where it cannot be
            made_by = self.ledger.range_from(spec, setting)
            self.ledger.outputs[value] = SitePlan(site, spec, "output", op.name, index, value, site, range_from=made_by)
            self.ledger.group_of[value], self.ledger.spec_of[site] = site, spec
            return True
        return False

    def _runs_in_float(self, op: Op, row: OpRow, value: str, setting: Setting, *, default: bool) -> str:
        """The reason why ``op`` runs in float although its kind may (``default``) have integer kernels; empty if it does not."""
        activations = self.facts.rules.activation is not None
        inside = self.facts.statistic_reason(op, value)
        if inside and activations and setting.quantized is not True:
            return inside
        if default and activations and self._stays_in_float(op, row):
            return f"{op.type} runs in float because its operands are in float"
        return TAIL.format(op.type) if default and self.ledger.in_tail(op, setting) else ""

    def _carry(self, op: Op, row: OpRow, index: int, value: str) -> None:
        """Decide an output that takes the grid of its inputs, if they share one."""
        sources = self.facts.data(op, row)
        # a source that comes later in the order is read by a later run; its grid, not known yet, is another
        settled = all(self.ledger.is_settled(v) for v in sources)
        groups = {self.ledger.group_of.get(v) for v in sources}
        group = next(iter(groups)) if settled and len(groups) == 1 else None
        last = bool(sources) and self.ledger.last_states.issuperset(sources)
        if last:
            self.ledger.last_states.add(value)
        setting = self.ledger.output_setting(op, index, value)
        named = _names_operators(setting)
        moves = row.kind == "movement"
        if group is not None and not named and (moves or self.facts.complete(op, row)):
            self.ledger.share_output(op, index, value, group)
        elif value in self.facts.inner:
            self._inside(op, index, value)
        elif moves and settled and groups <= {None} and not named:
            self._carry_float(op, value, sources)
            self.ledger.note_unused(setting, f"{op.name}.output[{index}]", self.ledger.why[value])
        else:
            why = _why_joined_in_float(op, sources, last)
            self._decide_output(op, row, index, value, default=(row.integer or moves) and not last, why=why)

    def _carry_float(self, op: Op, value: str, sources: list[str]) -> None:
        origins = {self.ledger.origin.get(v, v) for v in sources}
        if len(origins) == 1:
            origin = self.ledger.origin[value] = origins.pop()
            if origin in self.facts.static:
                self.ledger.why[value] = f"carries elements of the constant {origin}"
            else:
                self.ledger.why[value] = f"carries elements of {origin}, which is in float here"
        else:
            self.ledger.why[value] = "carries elements of several values that are in float"


def _why_joined_in_float(op: Op, sources: Sequence[str], last: bool) -> str:
    """Why the result of a merge stays in float; ``last``: it puts together the last states of recurrent layers."""
    if last:
        return f"last states of several layers, each on its own grid, put together by {op.type}"
    if len(set(sources)) > 1:
        return f"{op.type} joins values of different grids and {FLOAT_OP.format('it')}"
    return FLOAT_OP.format(op.type)


def _names_operators(setting: Setting) -> bool:
    """Whether a rule that selects operator types asks for a quantizer."""
    rule = setting.decided_by
    return setting.quantized is True and rule is not None and rule.types != ("*",)


def _wide(spec: QuantSpec) -> QuantSpec:
    """``spec`` with at least 16 bits: a signed symmetric grid, or float16."""
    if isinstance(spec.format, FloatFormat):
        return spec if spec.format.bits >= 16 else replace(spec, format=parse_format("float16"))
    return replace(spec, format=IntFormat(max(16, spec.format.bits)), symmetry="symmetric")


def place(graph: Graph, rules: Rules) -> Plan:
    """Decide for every float value and parameter of ``graph`` whether and how it is quantized.

    Site names: a parameter has its own name at the first operator that reads it and ``<param>@<op>`` at
    others; weights and biases computed from parameters are ``<op>.weight`` and ``<op>.bias``, other
    constants and activations that are quantized where they are read ``<op>.input[port]``, outputs
    ``<op>.output[index]``, what is computed inside a recurrent layer ``<op>.<inner name>``.

    Args:
        graph: the model.
        rules: base specs, rules and supergroups.

    Returns:
        A plan in which each float value is in ``sites`` (as the value of one), in ``shared``, or in
        ``floats``. Time and memory are linear in the graph.

    Raises:
        GranularityError: an axis asked for does not exist in its tensor.
        ConfigError: two operators ask for different symmetries of the value they both read.
    """
    facts = Facts(graph, rules)
    ledger = Ledger(facts)
    outputs, operands = Outputs(ledger), Operands(ledger)
    for op in graph.ops:
        if op.name not in facts.static_ops:
            outputs.decide(op)
    for op in graph.ops:
        if op.name in facts.static_ops:
            _note_moved(ledger, op)
            continue
        operands.decide(op)
        for value in (*op.inner.values(), *op.outputs):
            if value in ledger.outputs:
                ledger.sites[ledger.outputs[value].name] = ledger.outputs[value]
    _share_model_inputs(ledger)
    cached = (describe(facts.cache),) if facts.cache else ()
    notes = (*cached, *map(str, facts.misses), *rules.notes)
    return Plan(ledger.sites, _floats(ledger), ledger.shared, tuple(facts.matches), notes, tuple(_unused(ledger)))


def _share_model_inputs(ledger: Ledger) -> None:
    """Put a model input that is only moved, and its moved copies, on the grid of the sites that read it."""
    graph = ledger.facts.graph
    covered = {site.value for site in ledger.sites.values()}
    for value, origin in [*((name, name) for name in graph.inputs), *ledger.origin.items()]:
        at = ledger.read_at.get(origin)
        if at and graph.values[origin].kind == "input" and value not in covered:
            ledger.shared.setdefault(value, ledger.sites[at[0]].group)


def _note_moved(ledger: Ledger, op: Op) -> None:
    """Note that a parameter is quantized where it is used, after data movement."""
    for source in ledger.facts.data(op, op_row(op.type)):
        ledger.why.setdefault(source, MOVED)
        ledger.origin.update(dict.fromkeys(op.outputs, ledger.origin.get(source, source)))


def _floats(ledger: Ledger) -> dict[str, str]:
    """The reason for every float value that has neither a site nor another's grid."""
    facts = ledger.facts
    covered = {site.value for site in ledger.sites.values()} | ledger.shared.keys()
    computed = _computed_of_params(ledger)
    return {
        value.name: computed.get(value.name) or _reason(ledger, value)
        for value in facts.graph.values.values()
        if value.name in facts.float_values and value.name not in covered
    }


def _computed_of_params(ledger: Ledger) -> dict[str, str]:
    """Parameters used only in values that are the same in every run, such as table rows at constant positions."""
    graph = ledger.facts.graph
    made: dict[str, list[str]] = {}
    read = (value for value in graph.values.values() if value.kind == "constant" and graph.consumers(value.name))
    for source, name in ((source, value.name) for value in read for source in value.sources):
        made.setdefault(source, []).append(name)
    sites: dict[str, str] = {}
    for site in ledger.sites.values():
        sites.setdefault(site.value, site.name)
    unread = (value for value in graph.values.values() if value.param in made and not graph.consumers(value.name))
    return {value.name: _computed_alike(made[value.param or ""], sites) for value in unread}


def _computed_alike(names: Sequence[str], sites: Mapping[str, str]) -> str:
    at = [sites[name] for name in names if name in sites]
    end = f"; that is quantized at {', '.join(at[:3])}{' and others' if len(at) > 3 else ''}" if at else ""
    return f"operators read {names[0]}, which is computed of it alike in every run{end}"


def _reason(ledger: Ledger, value: Value) -> str:
    reason = ledger.why.get(value.name)
    if not reason:
        return _unspoken_reason(ledger, value)
    if at := ledger.read_at.get(value.name):
        return f"{reason}; quantized at {', '.join(at[:3])}{' and others' if len(at) > 3 else ''}"
    return reason


def _unspoken_reason(ledger: Ledger, value: Value) -> str:
    """The reason why a value without a decision of its own is in float."""
    facts = ledger.facts
    if match := facts.inner.get(value.name):
        group = ledger.group_of.get(match.output)
        end = f"quantized at {group}" if group else "which is in float"
        return f"inside the supergroup {match.pattern}, {end}"
    if value.name in facts.mask_values:
        return f"mask of the softmax {facts.mask_values[value.name]}"
    readers = facts.graph.consumers(value.name)
    if readers and not any(value.name in op.inputs for op, _ in readers):
        return f"only a later run of {readers[0][0].name} reads it, at an input where the first run needs no quantizer"
    if readers:
        return "no operator computes with it"
    if value.is_static or value.kind == "input":
        return "no operator of the recorded run reads it"
    return "not recorded"


def _unused(ledger: Ledger) -> Iterator[str]:
    """The fault of each rule that changed nothing."""
    unused = [
        (index, rule)
        for index, rule in enumerate(ledger.facts.rules.rules)
        if index not in ledger.used and not rule.optional and not rule.reaches_producer
    ]
    types = {op.type for op in ledger.facts.graph.ops} if unused else set()
    names: list[str] = []
    for index, rule in unused:
        unknown = [t for t in rule.types if t not in types | {"*"}]
        if index in ledger.unused:
            site, reason = ledger.unused[index]
            yield f"{rule}: no effect; it matches {site}, but {reason}"
        elif unknown:
            found = close_matches(unknown[0], types)
            yield f"{rule}: the model has no operator of type {unknown[0]!r}{found}"
        else:
            names = names or list(_names(ledger))
            yield f"{rule}: nothing in the model has this name and port{close_matches(rule.name, names)}"


def _names(ledger: Ledger) -> Iterator[str]:
    graph = ledger.facts.graph
    yield from (op.name for op in graph.ops[:2000])  # close matches compare every pair of letters
    yield from list(ledger.sites)[:2000]
    yield from graph.inputs
