"""What every operator reads: weights, biases, constants, and activations that are not quantized yet."""

from __future__ import annotations

import math
from dataclasses import replace

from bitwright.core.graph.graph import Op, Value
from bitwright.core.graph.ops import STATISTICS, OpRow, is_addend, op_row, resolve_granularity, weight_axes
from bitwright.core.graph.patterns import folds_into
from bitwright.core.graph.recurrence import CELLS, RETURNS, STATE_PORTS
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import Granularity, PerChannel, PerTensor, fitted
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.placement.facts import Facts
from bitwright.core.placement.ledger import (
    FLOAT_OP,
    MOVED,
    NO_ACTIVATIONS,
    NO_WEIGHTS,
    TAIL,
    Ledger,
    is_meant,
    with_granularity,
)
from bitwright.core.placement.plan import Role, SitePlan
from bitwright.core.placement.rules import Rule, Setting
from bitwright.core.sums.int32_bias import bias_entries

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
    """Whether ``op`` looks rows up in what it reads at ``port``."""
    return port == 0 and facts.looks_up(op, row)


def no_input_reason(ledger: Ledger, op: Op, row: OpRow, port: int, value: str) -> str:
    """Why a float operand is left in float whatever the operator; empty if it need not be."""
    if op.type in _SHAPE_ONLY:
        return f"{op.name} reads only its shape"
    if (origin := ledger.origin.get(value, value)) in ledger.picked:
        return ledger.picked[origin]
    if not any(ledger.facts.is_float(v) for v in op.outputs):
        return f"{op.name} makes no floating-point result of it"
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
    """Why a constant stays in float when no rule speaks; empty if it does not."""
    if not param:
        return _operand_reason(ledger, op, row, port, value)
    weighs = row.weight == port or row.kind == "compute" or is_table(ledger.facts, op, row, port)
    return _parameter_reason(ledger, op, row, value, param, param == "weight" and weighs)


def _in_float_norm(ledger: Ledger, op: Op) -> bool:
    """Whether ``op`` is part of a normalisation written out, and no rule has put what it makes on a grid."""
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
    """Why no int32 bias follows from input and weight; empty if one does."""
    if op.type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return FLOAT_OP.format(f"the bias of {op.type}")
    if 0 not in grids or 1 not in grids:
        return "float: its input or weight is not quantized"
    weight = ledger.sites.get(grids[1])
    if weight is None or weight.role != "weight":
        return "float: its weight is not the same in every run"
    data = ledger.spec_of[grids[0]]
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
    """How many output channels an operator with a weight of ``shape`` has."""
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
    """Decides what operators read, once all outputs are decided, and notes the decisions in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.facts = ledger, ledger.facts
        self._grids: dict[str, dict[int, str]] = {}  # product -> port -> group: an addition may bring its bias

    def decide(self, op: Op) -> None:
        """Decide what ``op`` reads; a bias last, as it follows from the others."""
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
        """What ``op`` reads that can be quantized: per port, the values of all runs."""
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
        """The MatMul whose bias ``op`` adds, with nothing in between: integer kernels add it before they round."""
        match = self.facts.match_of.get(op.name)
        if match is None or match.pattern.kind != "bias_add" or op is not match.ops[1]:
            return None
        product = match.ops[0]
        return product if product.outputs[0] in op.inputs else None

    def _initial_state(self, op: Op, port: int, values: list[str], grids: dict[int, str]) -> None:
        """What a layer starts from is on the grid of the state it becomes, unless its producer has quantized it."""
        loose = [v for v in values if v not in self.ledger.group_of]
        if not loose:
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
        """Quantize what arrives at ``port`` unless its producers have done so."""
        ledger, facts = self.ledger, self.facts
        match = facts.match_of.get(op.name)
        inner = match.inner if match else ()
        groups = {ledger.group_of[v] for v in values if v in ledger.group_of}
        loose = [v for v in values if v not in ledger.group_of and v not in inner]
        if loose:
            self._loose(op, row, port, loose, groups, grids)
        elif len(groups) == 1:
            grids[port] = groups.pop()

    def _loose(self, op: Op, row: OpRow, port: int, loose: list[str], groups: set[str], grids: dict[int, str]) -> None:
        """Quantize what arrives at ``port`` in some runs without a grid; ``groups`` are those of the other runs."""
        ledger, facts = self.ledger, self.facts
        value = next((v for v in loose if v not in facts.static), loose[0])
        origin = ledger.origin.get(value, value)
        from_model = facts.graph.values[origin].kind == "input"
        site = f"{op.name}.input[{port}]"
        ports = frozenset(("input", "model_input") if from_model else ("input",))
        setting = ledger.setting(op, ports, None, site, *((origin,) if from_model else ()))
        spec = ledger.activation_spec(setting, op, _PLAIN, origin)
        reason = no_input_reason(ledger, op, row, port, value)
        wanted = False
        if not reason:
            reason = facts.steering_reason(row, loose) or ("" if groups else facts.exact_reason(value, spec, row))
            wanted = self._input_wanted(op, row, setting, from_model, reason)
            if self._multiplies_a_reciprocal(op, value) and not groups and setting.quantized is not True:
                wanted = False
                ledger.why[origin] = reason or _RECIPROCAL.format(facts.reciprocals[value], op.name)
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

    def _multiplies_a_reciprocal(self, op: Op, value: str) -> bool:
        return op.type == "Mul" and value in self.facts.reciprocals and op.name not in self.facts.normalisations

    def _input_wanted(self, op: Op, row: OpRow, setting: Setting, from_model: bool, unfit: str) -> bool:
        """Whether an operand gets a grid; ``unfit`` says why none serves its values."""
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
        """Quantize what is the same in every run: weights, other parameters, constants."""
        ledger, several = self.ledger, len(values) > 1
        value = self.facts.graph.values[values[0]]
        param = "weight" if is_table(self.facts, op, row, port) else self._param_name(op, row, port, value)
        site = self._constant_name(op, port, value, param, several=several)
        ports = _CONSTANT if param is None else _PARAM_PORTS.get(param, _PARAM)
        setting = ledger.setting(op, ports, param, site, value.param or value.name)
        rules = self.facts.rules
        spec = setting.apply(rules.weight if param else rules.activation, weight=param is not None)
        reason = constant_reason(ledger, op, row, port, value, param)
        if param and not reason and op.name in ledger.float_ops and ledger.in_tail(op, setting):
            reason = TAIL.format(op.type)
        wanted, reason = self._constant_wanted(
            op, setting, param, value, reason or self.facts.exact_reason(value.name, spec)
        )
        none = NO_WEIGHTS if param else NO_ACTIVATIONS
        if not ledger.verdict(setting, wanted, spec, site, reason, value.name, none):
            ledger.why.update(dict.fromkeys(values[1:], ledger.why[value.name]))
            return
        assert spec is not None
        granularity, note = self._constant_granularity(op, port, value, param, setting, spec)
        granularity.param_shape(value.shape, site)
        spec = with_granularity(spec, granularity)
        role: Role = "weight" if param else "constant"
        if several or (not param and value.made_anew):
            role = (
                "input"  # runs read different constants, or may on other lengths: watch them, for a range of them all
            )
        group = site if several else ledger.operand_groups.setdefault((value.name, spec), site)
        ledger.add(SitePlan(site, spec, role, op.name, port, value.name, group, note=note))
        ledger.read_at.setdefault(ledger.origin.get(value.name, value.name), []).append(site)
        grids[port] = site
        for other in values[1:]:
            ledger.shared.setdefault(other, group)

    def _constant_wanted(
        self, op: Op, setting: Setting, param: str | None, value: Value, reason: str
    ) -> tuple[bool, str]:
        """Whether a constant is quantized that would stay in float for ``reason``, and why it is not."""
        wanted = not reason if setting.quantized is None else setting.quantized is True
        if wanted and param in STATISTICS and not _names(setting.decided_by, param, value):
            return False, _STATISTICS
        if wanted and reason and (head := folds_into(self.facts.graph, op)) is not None:
            return False, f"it can be folded into {head.name}, which leaves nothing of it"
        return wanted, reason

    def _constant_granularity(
        self, op: Op, port: int, value: Value, param: str | None, setting: Setting, spec: QuantSpec
    ) -> tuple[Granularity, str]:
        """The granularity of a constant with its axes, and a note where it is not the one asked for."""
        granularity: Granularity = PerTensor()
        if param:
            granularity = resolve_granularity(op.type, op.attrs, port, spec.granularity, value.shape)
        if setting.granularity is None:  # a preset is meant for layers of every width, a rule for those it names
            return fitted(granularity, value.shape)
        return granularity if param else self.facts.concrete(setting.granularity, op, value.name), ""

    def _param_name(self, op: Op, row: OpRow, port: int, value: Value) -> str | None:
        """The parameter that a constant at ``port`` is; ``None`` for an operand that is none."""
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
        """A bias that a rule quantizes like any other parameter."""
        spec = setting.apply(self.facts.rules.weight, weight=True)
        if not self.ledger.verdict(setting, True, spec, site, "", value.name, NO_WEIGHTS):
            return
        assert spec is not None
        granularity = PerTensor() if setting.granularity is None else setting.granularity
        spec = replace(spec, granularity=granularity.resolve(0, None))
        spec.granularity.param_shape(value.shape, site)
        group = self.ledger.operand_groups.setdefault((value.name, spec), site)
        self.ledger.add(SitePlan(site, spec, "bias", op.name, port, value.name, group))


def _names(rule: Rule | None, param: str, value: Value) -> bool:
    """Whether a rule means this parameter and not all of a kind."""
    return rule is not None and (rule.param == param or rule.name == (value.param or value.name))


def _wants_grid(row: OpRow) -> bool:
    """Whether integer runtimes need this operator's operands on a grid: products, sums and joins."""
    return row.kind == "compute" or (row.integer and row.activations is None)
