"""Where quantizers go: a pure function of graph, rules and op table.

``place`` decides in four linear passes, none of which depends on where an operator stands in the graph:

1. which values are the same in every run (parameters, constants, and what only moves those);
2. which chains are supergroups, and which operators only prepare the mask of a softmax;
3. what every operator's output is: a site of its own, on the grid of another site, or float, with the reason;
4. what every operator reads: weights, biases, constants, and activations that nobody has quantized yet.

Sites of one group share one encoding. A group is named after one of its sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from bitwright.core.graph.exact import REASONS, computed_values, exact_values
from bitwright.core.graph.graph import Graph, Op, Value
from bitwright.core.graph.ops import STATISTICS, OpRow, op_row, resolve_granularity, weight_axes
from bitwright.core.graph.patterns import Match, find_matches, folds_into
from bitwright.core.graph.recurrence import CELL, CELLS, RETURNS, STATE_PORTS, activation_range, is_wide
from bitwright.core.numerics.formats import FloatFormat, IntFormat, parse_format
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, fitted
from bitwright.core.numerics.int32_bias import bias_entries
from bitwright.core.numerics.spec import QuantSpec, Symmetry
from bitwright.core.placement.rules import Resolver, Rule, Rules, Setting
from bitwright.errors import ConfigError, close_matches

Role = Literal["input", "output", "weight", "bias", "constant"]
Status = Literal["quantized", "shared", "float", "integer"]


@dataclass(frozen=True)
class SitePlan:
    """One place that holds a quantizer.

    Attributes:
        name: unique; see :func:`place`.
        spec: what is asked for, with concrete axes.
        role: ``input`` and ``output`` are activations; ``weight``, ``bias`` and ``constant`` do not change
            between runs.
        op: name of the operator at which the tensor is quantized.
        port: input port of the operator, or index of its output for role ``output``.
        value: graph value that is quantized.
        group: name of the site whose encoding this one has; its own name if it shares none.
        follows: for an int32 bias, the sites of the input and the weight whose scales it multiplies.
        inner: for a site inside the steps of a recurrent layer, what it quantizes there
            (:mod:`bitwright.core.graph.recurrence`); ``port`` is then no output unless the value is one.
        note: why it is not just what was asked for, if it is not.
    """

    name: str
    spec: QuantSpec
    role: Role
    op: str
    port: int
    value: str
    group: str
    follows: tuple[str, str] | None = None
    inner: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One value or parameter of the model, for a coverage report.

    Attributes:
        name: of the value.
        kind: ``input``, ``param``, ``constant`` or ``activation``.
        op_type: type of the operator that makes it, or else of the first that reads it.
        shape: as recorded.
        status: ``quantized``, ``shared`` (on the grid of another site), ``float``, or ``integer`` (of an
            integer or boolean type, so that there is nothing to quantize).
        how: the spec and its sites, the site it shares, or the reason.
    """

    name: str
    kind: str
    op_type: str
    shape: tuple[int, ...]
    status: Status
    how: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.name} ({self.op_type or self.kind}, {shape}): {self.status}, {self.how}"


@dataclass(frozen=True)
class Plan:
    """The answer for every float value and parameter of a graph.

    Attributes:
        sites: by name, in execution order (operands of an operator before its outputs).
        floats: value -> why it has no quantizer.
        shared: value that only carries the elements of another -> the group whose grid they lie on.
        matches: the supergroups found.
        notes: chains that were not fused because of their surroundings, and settings without effect.
        unused: rules that changed nothing, each with what is wrong with it.
    """

    sites: dict[str, SitePlan]
    floats: dict[str, str]
    shared: dict[str, str]
    matches: tuple[Match, ...] = ()
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Group -> the sites that share its encoding."""
        found: dict[str, list[str]] = {}
        for site in self.sites.values():
            found.setdefault(site.group, []).append(site.name)
        return {group: tuple(names) for group, names in found.items()}

    def coverage(self, graph: Graph) -> list[Row]:
        """One row per value and parameter of ``graph``, in the graph's order."""
        by_value: dict[str, list[SitePlan]] = {}
        for site in self.sites.values():
            by_value.setdefault(site.value, []).append(site)
        rows = []
        for value in graph.values.values():
            op = graph.producer(value.name)
            readers = graph.consumers(value.name) if op is None else ()
            op_type = op.type if op is not None else readers[0][0].type if readers else ""
            status, how = self._status(value, by_value.get(value.name, []))
            rows.append(Row(value.name, value.kind, op_type, value.shape, status, how))
        return rows

    def _status(self, value: Value, sites: list[SitePlan]) -> tuple[Status, str]:
        if not sites:
            if not value.is_float:
                return "integer", f"{value.dtype} is not a floating-point type"
            if value.name in self.shared:
                return "shared", f"with {self.shared[value.name]}"
            return "float", self.floats[value.name]
        specs: dict[str, list[str]] = {}
        for site in sites:
            phrase = (
                f"int32 from the scales of {' and '.join(site.follows)}"
                if site.follows
                else site.spec.describe()
            )
            phrase += f" ({site.note})" if site.note else ""
            where = site.name if site.name == site.group else f"{site.name} (shared with {site.group})"
            specs.setdefault(phrase, []).append(where)
        return "quantized", "; ".join(f"{spec} at {', '.join(where)}" for spec, where in specs.items())


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
        GranularityError: an axis asked for does not exist in its tensor, or blocks do not divide it.
        ConfigError: two operators ask for different symmetries of the value they both read.
    """
    return _Placer(graph, rules).plan()


_FLOAT_OP = "{} runs in float on integer runtimes"
_NORM = "normalisation parameters stay in float"
_STATISTICS = "statistics of a normalisation stay in float unless a rule names them"
_NO_ACTIVATIONS = "activations stay in float under {}"
_NO_WEIGHTS = "weights stay in float under {}"
_INNER = frozenset(("inner",))
_PARAM, _CONSTANT, _BIAS = frozenset(("param",)), frozenset(("constant",)), frozenset(("bias", "param"))
_PARAM_PORTS = {"bias": _BIAS, "weight": frozenset(("weight", "param"))}
# they read the shape of a tensor and none of its values
_SHAPE_ONLY = frozenset(
    "Shape Size RandomNormalLike RandomUniformLike EyeLike zeros_like ones_like full_like empty_like "
    "rand_like randn_like new_zeros new_ones new_full new_empty".split()
)
_MOVED = "only moved where it is read"
_EMPTY = "it has no elements"
_CHANNELS_FIRST = frozenset(
    (
        "Conv",
        "ConvTranspose",
        "BatchNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "AveragePool",
    )
)
_INT32 = QuantSpec(IntFormat(32), PerTensor(), "symmetric")
_MOST_INPUT_BITS, _MOST_WEIGHT_BITS = 16, 8  # what int32 accumulators are made for


class _Placer:
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
        self.picked: dict[
            str, str
        ] = {}  # matrix picked from a stack of weights -> the reason for its having no site
        self.read_at: dict[str, list[str]] = {}  # float origin -> sites where it is quantized after all
        self.used: set[int] = set()
        self.idle: dict[int, tuple[str, str]] = {}  # rule -> first tensor it matched in vain, and why
        self.symmetry = self._asked_of_producers()
        self.exact = exact_values(graph, self.static)

    # ---- the whole

    def plan(self) -> Plan:
        for op in self.graph.ops:
            if op.name not in self.static_ops:
                self._outputs(op)
        for op in self.graph.ops:
            if op.name in self.static_ops:
                self._static_op(op)
            else:
                self._operands(op)
                for value in (*op.inner.values(), *op.outputs):
                    if value in self.outputs:
                        self.sites[self.outputs[value].name] = self.outputs[value]
        self._share_model_inputs()
        notes = (*map(str, self.misses), *self.rules.notes)
        return Plan(
            self.sites, self._floats(), self.shared, tuple(self.matches), notes, tuple(self._unused())
        )

    def _is_float(self, value: str) -> bool:
        return value in self.float_values

    # ---- outputs

    def _outputs(self, op: Op) -> None:
        """Decide what becomes of the outputs of ``op``; those of the operators before it are settled."""
        row = op_row(op.type)
        if op.type in CELLS:
            self._recurrent(op, row)
            return
        carried = row.kind in ("movement", "merge") and not self._looks_up(op, row)
        for index, value in enumerate(op.outputs):
            if not self._is_float(value):
                continue
            if row.kind == "norm" and index:
                self.why[value] = "a statistic that the normalisation measures"
            elif self._picks_matrices(op, row):
                self._pick(op, index, value)
            elif op.name in self.mask_ops or (value in self.inner and not carried):
                self._inside(op, index, value)
            elif carried:
                self._carry(op, row, index, value)
            else:
                self._decide_output(op, row, index, value, default=row.integer or self._looks_up(op, row))

    # ---- recurrent layers

    def _recurrent(self, op: Op, row: OpRow) -> None:
        """Decide what is computed inside the steps of ``op``, and the outputs, which carry its states."""
        for name, value in op.inner.items():
            self._inner(op, row, name, value)
        returns = op.attrs.get("returns", RETURNS)
        for index, (value, state) in enumerate(zip(op.outputs, returns, strict=False)):
            carried = op.inner.get(state)
            if index or state == CELL:
                self.last_states.add(value)
            if not self._is_float(value) or (value == carried and value in self.outputs):
                continue
            group = self.group_of.get(carried) if carried else None
            if group is not None and self.outputs[carried or ""].inner is not None:
                self.group_of[value] = self.shared[value] = group
                setting = self._output_setting(op, index, value)
                self._idle(setting, f"{op.name}.output[{index}]", f"it shares the encoding of {group}")
            elif self._decide_output(op, row, index, value, default=True) and group is not None:
                self._join(value, group)

    def _join(self, value: str, group: str) -> None:
        """Let the site of ``value`` share the encoding of ``group``, if both are asked for alike."""
        site = self.outputs[value]
        if site.spec == self.spec_of[group]:
            self.outputs[value] = replace(site, group=group)
            self.group_of[value] = group

    def _inner(self, op: Op, row: OpRow, name: str, value: str) -> None:
        """Give a tensor inside the steps of ``op`` a site, or the reason why it has none.

        A hidden state that is kept in float between the steps is still an output, quantized after the layer.
        """
        site = f"{op.name}.{name}"
        setting = self._setting(op, _INNER, None, site, value)
        if value in op.outputs and setting.quantized is False:
            self.used.update(setting.matched)
            return
        index = -1
        if value in op.outputs:
            index = op.outputs.index(value)
            site, setting = f"{op.name}.output[{index}]", self._output_setting(op, index, value)
        base = self.rules.activation
        base = _wide(base) if base is not None and is_wide(op.type, name) else base
        spec = self._pinned(
            setting.apply(base, weight=False), setting, activation_range(op.type, op.attrs, name)
        )
        if self._verdict(setting, setting.quantized is not False, spec, site, "", value, _NO_ACTIVATIONS):
            assert spec is not None
            spec = _with_granularity(spec, self._concrete(spec.granularity, op, value))
            self.outputs[value] = SitePlan(site, spec, "output", op.name, index, value, site, inner=name)
            self.group_of[value], self.spec_of[site] = site, spec

    def _initial_state(self, op: Op, port: int, values: list[str], grids: dict[int, str]) -> None:
        """What a layer starts from is on the grid of the state it becomes, unless its producer has quantized it."""
        loose = [v for v in values if v not in self.group_of]
        if not loose:
            return
        state = STATE_PORTS[port]
        returns = zip(op.outputs, op.attrs.get("returns", RETURNS), strict=False)
        carriers = [op.inner.get(state, ""), *(value for value, returned in returns if returned == state)]
        group = next((self.group_of[v] for v in carriers if v in self.group_of), None)
        if group is None:
            self._activation(op, op_row(op.type), port, values, grids)
            return
        site = f"{op.name}.input[{port}]"
        setting = self._setting(op, frozenset(("input",)), None, site, loose[0])
        reason = f"{op.name} reads it in float"
        wanted = setting.quantized is not False
        if self._verdict(setting, wanted, self.spec_of[group], site, reason, loose[0], _NO_ACTIVATIONS):
            self._add(SitePlan(site, self.spec_of[group], "input", op.name, port, loose[0], group))
            self.read_at.setdefault(self.origin.get(loose[0], loose[0]), []).append(site)

    def _stays_in_float(self, op: Op, row: OpRow) -> bool:
        """Whether all that ``op`` computes with is in float, so that an integer kernel has nothing to start
        from.

        Convolutions and matrix products are worth a quantizer at their input, and so is a softmax; for sums,
        activations and means between operators in float it would only cost accuracy. For the end of a
        supergroup the operands of its first operator count.
        """
        match = self.match_of.get(op.name)
        if match is not None:
            op, row = match.ops[0], op_row(match.ops[0].type)
        if row.kind == "compute" or (match is not None and match.pattern.kind == "masked_softmax"):
            return False
        sources = [v for v in self._data(op, row) if v not in self.static]
        return bool(sources) and all(
            self._is_settled(v)
            and v not in self.group_of
            and self.graph.values[self.origin.get(v, v)].kind != "input"
            for v in sources
        )

    def _data(self, op: Op, row: OpRow) -> list[str]:
        """The float values with elements that ``op`` reads as data, in all its runs."""
        ports = row.activations
        return [
            v
            for port, v in op.sources()
            if (ports is None or port in ports) and self._is_float(v) and 0 not in self.graph.values[v].shape
        ]

    def _inside(self, op: Op, index: int, value: str) -> None:
        """Leave ``value`` in float; the reason is told at the end, when the fate of its chain is known."""
        self.why[value] = ""
        match = self.inner.get(value)
        end = (
            f"inside the supergroup {match.pattern}; name {match.ops[-1].name}"
            if match
            else "part of a softmax mask"
        )
        self._idle(self._output_setting(op, index, value), f"{op.name}.output[{index}]", f"it is {end}")

    def _looks_up(self, op: Op, row: OpRow) -> bool:
        """Whether ``op`` picks rows of a constant table by a computed index, as an embedding does."""
        return op.type == "Gather" and bool(op.inputs) and op.inputs[0] in self.static

    def _picks_matrices(self, op: Op, row: OpRow) -> bool:
        """Whether ``op`` picks some of a stack of matrices by a computed index, as experts do."""
        return (
            self._looks_up(op, row)
            and len(op.inputs) > 1
            and op.inputs[1] is not None
            and not op.attrs.get("axis")
            and len(self.graph.values[op.inputs[0] or ""].shape) > 2
        )

    def _pick(self, op: Op, index: int, value: str) -> None:
        """What is picked has the scales of its matrices, for which an activation has no grid."""
        stack = str(op.inputs[0])
        self.picked[value] = self.why[value] = f"matrices of {stack}, each on its own grid there"
        self._idle(self._output_setting(op, index, value), f"{op.name}.output[{index}]", self.why[value])

    def _decide_output(
        self, op: Op, row: OpRow, index: int, value: str, *, default: bool, why: str = ""
    ) -> bool:
        """Give ``value`` a site at its producer, or the reason why it has none."""
        site = f"{op.name}.output[{index}]"
        setting = self._output_setting(op, index, value)
        spec = self._activation_spec(setting, op, row, value)
        reason = "" if default else why or _FLOAT_OP.format(op.type)
        if default and self.rules.activation is not None and self._stays_in_float(op, row):
            self.float_ops.add(op.name)
            reason = f"{op.type} runs in float because its operands are in float"
        unfit = self._exact_reason(value, spec)
        reason = (unfit or reason) if setting.quantized else (reason or unfit)
        asked = None if unfit and not _is_meant(setting.decided_by) else setting.quantized
        wanted = not reason if asked is None else bool(asked)
        if self._verdict(setting, wanted, spec, site, reason, value, _NO_ACTIVATIONS):
            assert spec is not None
            spec = _with_granularity(spec, self._concrete(spec.granularity, op, value))
            spec.granularity.param_shape(self.graph.values[value].shape, site)  # raises where it cannot be
            self.outputs[value] = SitePlan(site, spec, "output", op.name, index, value, site)
            self.group_of[value], self.spec_of[site] = site, spec
            return True
        return False

    def _exact_reason(self, value: str, spec: QuantSpec | None) -> str:
        """Why no grid of ``spec`` serves a value; empty where one does. Small float formats have steps that grow."""
        if value not in self.exact:
            return ""
        need, op = self.exact[value]
        coarse = need in ("phase", "identity", "order") or spec is None or isinstance(spec.format, IntFormat)
        return REASONS[need].format(op) if coarse else ""

    def _output_setting(self, op: Op, index: int, value: str) -> Setting:
        ports = frozenset(("output", "model_output") if self.graph.is_output(value) else ("output",))
        return self._setting(op, ports, None, f"{op.name}.output[{index}]", value)

    def _activation_spec(self, setting: Setting, op: Op, row: OpRow, value: str) -> QuantSpec | None:
        spec = setting.apply(self.rules.activation, weight=False)
        if spec is None:
            return None
        if value in self.symmetry:
            spec = replace(spec, symmetry=self.symmetry[value][0])
        return self._pinned(spec, setting, row.fixed_range)

    def _pinned(
        self, spec: QuantSpec | None, setting: Setting, fixed: tuple[float, float] | None
    ) -> QuantSpec | None:
        """``spec`` with the range that the values have whatever the input, unless a rule says otherwise."""
        if spec is None or not self.rules.fixed_ranges or not isinstance(spec.format, IntFormat):
            return spec
        if fixed and setting.fixed_range is None and spec.fixed_range is None:
            if spec.symmetry == "asymmetric" or fixed[0] == -fixed[1]:
                spec = replace(spec, fixed_range=fixed)
        return spec

    def _is_settled(self, value: str) -> bool:
        return (
            value in self.group_of
            or value in self.why
            or self.graph.producer(value) is None
            or value in self.static
        )

    def _carry(self, op: Op, row: OpRow, index: int, value: str) -> None:
        """Decide an output that has its inputs' grid, if these have one grid."""
        sources = self._data(op, row)
        # a source that comes later in the order is read by a later run; its grid, not known yet, is another
        settled = all(self._is_settled(v) for v in sources)
        groups = {self.group_of.get(v) for v in sources}
        group = next(iter(groups)) if settled and len(groups) == 1 else None
        last = bool(sources) and self.last_states.issuperset(sources)
        if last:
            self.last_states.add(value)
        setting = self._output_setting(op, index, value)
        rule = setting.decided_by
        named = setting.quantized is True and rule is not None and rule.types != ("*",)
        if group is not None and not named and (row.kind == "movement" or self._complete(op, row)):
            self.group_of[value] = self.shared[value] = group
            self._idle(setting, f"{op.name}.output[{index}]", f"it shares the encoding of {group}")
        elif value in self.inner:
            self._inside(op, index, value)
        elif row.kind == "movement" and settled and groups <= {None} and not named:
            self._carry_float(op, value, sources)
            self._idle(setting, f"{op.name}.output[{index}]", self.why[value])
        else:
            default = (row.integer or row.kind == "movement") and not last
            why = "" if default else f"{op.type} joins values of different grids and {_FLOAT_OP.format('it')}"
            why = (
                f"last states of several layers, each on its own grid, put together by {op.type}"
                if last
                else why
            )
            self._decide_output(op, row, index, value, default=default, why=why)

    def _complete(self, op: Op, row: OpRow) -> bool:
        """Whether every element that a merge can put out comes from a recorded operand."""
        return (
            row.activations is None
            or all(p < len(op.inputs) and op.inputs[p] is not None for p in row.activations)
            and (len(row.activations) > 1)
        )

    def _carry_float(self, op: Op, value: str, sources: list[str]) -> None:
        origins = {self.origin.get(v, v) for v in sources}
        if len(origins) == 1:
            origin = self.origin[value] = origins.pop()
            if origin in self.static:
                self.why[value] = f"carries elements of the constant {origin}"
            else:
                self.why[value] = f"carries elements of {origin}, which is in float here"
        else:
            self.why[value] = "carries elements of several values that are in float"

    # ---- operands

    def _operands(self, op: Op) -> None:
        row = op_row(op.type)
        by_port: dict[int, list[str]] = {}
        for port, value in op.sources():
            if value not in self.float_values:
                continue
            if 0 in self.graph.values[value].shape:  # a cache before its first entry
                self.why.setdefault(value, _EMPTY)
            else:
                by_port.setdefault(port, []).append(value)
        grids: dict[int, str] = {}  # port -> group of what arrives there
        biases: list[tuple[int, list[str]]] = []
        for port in sorted(by_port):
            values = list(dict.fromkeys(by_port[port]))
            if row.bias == port and values[0] in self.static:
                biases.append((port, values))
            elif op.type in CELLS and port in STATE_PORTS:
                self._initial_state(op, port, values, grids)
            elif self.static.issuperset(values):
                self._constants(op, row, port, values, grids)
            elif row.kind != "movement":
                self._activation(op, row, port, values, grids)
        for port, values in biases:
            self._bias(op, port, values, grids)

    def _activation(self, op: Op, row: OpRow, port: int, values: list[str], grids: dict[int, str]) -> None:
        """Quantize what arrives at ``port`` unless its producers have done so."""
        match = self.match_of.get(op.name)
        groups = {self.group_of[v] for v in values if v in self.group_of}
        loose = [v for v in values if v not in self.group_of and not (match and v in match.inner)]
        if not loose:
            if len(groups) == 1:
                grids[port] = groups.pop()
            return
        value = next((v for v in loose if v not in self.static), loose[0])
        origin = self.origin.get(value, value)
        reason = self._no_input_reason(op, row, port, match, value)
        from_model = self.graph.values[origin].kind == "input"
        site = f"{op.name}.input[{port}]"
        ports = frozenset(("input", "model_input") if from_model else ("input",))
        setting = self._setting(op, ports, None, site, *((origin,) if from_model else ()))
        spec = self._activation_spec(setting, op, _PLAIN, origin)
        unfit = self._exact_reason(value, spec) if not reason and not groups else ""
        wanted = (
            not reason and not unfit and (from_model or (_wants_grid(row) and op.name not in self.float_ops))
        )
        if setting.quantized is not None and (not unfit or _is_meant(setting.decided_by)):
            wanted = bool(setting.quantized) and not reason
        reason = reason or unfit or f"{op.name} reads it in float"
        if not self._verdict(setting, wanted, spec, site, reason, origin, _NO_ACTIVATIONS):
            return
        assert spec is not None
        spec = _with_granularity(spec, self._concrete(spec.granularity, op, value))
        spec.granularity.param_shape(self.graph.values[value].shape, site)
        group = self._input_group(site, spec, origin, loose, groups)
        self._add(SitePlan(site, self.spec_of.get(group, spec), "input", op.name, port, value, group))
        grids[port] = group
        self.read_at.setdefault(origin, []).append(site)

    def _input_group(
        self, site: str, spec: QuantSpec, origin: str, loose: list[str], groups: set[str]
    ) -> str:
        if len(groups) == 1:  # other runs of the place read a value that has a grid: it serves for all
            (group,) = groups
            # a pinned range need not hold what the first run reads, unless that is a constant starting state
            pinned = self.spec_of[group].fixed_range if all(v in self.static for v in loose) else None
            if self.spec_of[group] == (spec if pinned is None else replace(spec, fixed_range=pinned)):
                return group
        if groups or len({self.origin.get(v, v) for v in loose}) > 1:
            return site
        return self.operand_groups.setdefault((origin, spec), site)

    def _no_input_reason(self, op: Op, row: OpRow, port: int, match: Match | None, value: str) -> str:
        """Why a float operand is left in float whatever the operator; empty if it need not be."""
        if op.type in _SHAPE_ONLY:
            return f"{op.name} reads only its shape"
        if (origin := self.origin.get(value, value)) in self.picked:
            return self.picked[origin]
        if not any(self._is_float(v) for v in op.outputs):
            return f"{op.name} makes no floating-point result of it"
        masked = match is not None and match.pattern.kind == "masked_softmax"
        if (op.name in self.mask_ops or masked) and value in self.mask_values:
            return f"mask of the softmax {self.mask_values[value]}"
        if match is not None and masked:
            return f"inside the supergroup {match.pattern}"
        if row.activations is not None and port not in row.activations:
            return f"a setting of {op.name}, not data"
        return ""

    def _constants(self, op: Op, row: OpRow, port: int, values: list[str], grids: dict[int, str]) -> None:
        """Quantize what is the same in every run: weights, other parameters, constants."""
        value = self.graph.values[values[0]]
        table = self._looks_up(op, row) and port == 0
        param = "weight" if table else self._param_name(op, row, port, value)
        weight = param == "weight" and (table or row.weight == port or row.kind == "compute")
        site = self._constant_name(op, port, value, param, several=len(values) > 1)
        ports = _CONSTANT if param is None else _PARAM_PORTS.get(param, _PARAM)
        setting = self._setting(op, ports, param, site, value.param or value.name)
        spec = setting.apply(self.rules.weight if param else self.rules.activation, weight=param is not None)
        reason = self._constant_reason(op, row, port, value, param, weight)
        reason = reason or self._exact_reason(value.name, spec)
        wanted = not reason if setting.quantized is None else setting.quantized is True
        if wanted and param in STATISTICS and not _names(setting.decided_by, param, value):
            wanted, reason = False, _STATISTICS
        if wanted and reason and (head := folds_into(self.graph, op)) is not None:
            wanted, reason = False, f"it can be folded into {head.name}, which leaves nothing of it"
        none = _NO_WEIGHTS if param else _NO_ACTIVATIONS
        if not self._verdict(setting, wanted, spec, site, reason, value.name, none):
            self.why.update(dict.fromkeys(values[1:], self.why[value.name]))
            return
        assert spec is not None
        granularity = (
            resolve_granularity(op.type, op.attrs, port, spec.granularity, value.shape)
            if param
            else PerTensor()
        )
        note = ""
        if (
            setting.granularity is None
        ):  # a preset is meant for layers of every width, a rule for those it names
            granularity, note = fitted(granularity, value.shape)
        if not param and setting.granularity is not None:
            granularity = self._concrete(setting.granularity, op, value.name)
        granularity.param_shape(value.shape, site)
        spec = _with_granularity(spec, granularity)
        role: Role = "weight" if param else "constant"
        if len(values) > 1:
            role = "input"  # runs of this place read different constants: watch them, for a range of them all
        group = site if len(values) > 1 else self.operand_groups.setdefault((value.name, spec), site)
        self._add(SitePlan(site, spec, role, op.name, port, value.name, group, note=note))
        self.read_at.setdefault(self.origin.get(value.name, value.name), []).append(site)
        grids[port] = site
        for other in values[1:]:
            self.shared.setdefault(other, group)

    def _param_name(self, op: Op, row: OpRow, port: int, value: Value) -> str | None:
        """The parameter that a constant at ``port`` is; ``None`` for an operand that is none."""
        if port in row.params or row.weight == port:
            return row.params.get(port, "weight")
        if (
            row.kind == "compute"
            and not row.params
            and any(v not in self.static for v in self._data(op, row))
        ):
            return "weight"  # on whichever side of a product it stands
        return value.param.rpartition(".")[2] if row.kind == "float" and value.param else None

    def _constant_name(self, op: Op, port: int, value: Value, param: str | None, *, several: bool) -> str:
        if value.param and not several:
            return self._unique(value.param, op, port)
        return self._unique(f"{op.name}.{param}" if param else f"{op.name}.input[{port}]", op, port)

    def _unique(self, name: str, op: Op, port: int) -> str:
        for candidate in (name, f"{name}@{op.name}"):
            if candidate not in self.sites:
                return candidate
        return f"{name}@{op.name}[{port}]"

    def _constant_reason(
        self, op: Op, row: OpRow, port: int, value: Value, param: str | None, weight: bool
    ) -> str:
        """Why a constant stays in float when no rule speaks; empty if it does not."""
        if param:
            return self._parameter_reason(op, row, value, param, weight)
        return self._operand_reason(op, row, port, value)

    def _parameter_reason(self, op: Op, row: OpRow, value: Value, param: str, weight: bool) -> str:
        if row.kind == "norm":
            return _NORM
        if row.kind == "float":
            return _FLOAT_OP.format(op.type)
        if weight and (row.kind == "compute" or _size(value.shape) > 1 or self._looks_up(op, row)):
            return ""
        if op.type in CELLS:
            return f"{param} of {op.name}, added within a step before anything is rounded"
        return f"scalar parameter of {op.name}"

    def _operand_reason(self, op: Op, row: OpRow, port: int, value: Value) -> str:
        match = self.match_of.get(op.name)
        if match is not None and match.pattern.kind == "masked_softmax":
            return f"inside the supergroup {match.pattern}, as its mask or factor"
        if match is not None and match.pattern.kind == "bias_add" and op is match.ops[1]:
            return (
                f"bias of {match.ops[0].name}, added to the accumulator inside the supergroup {match.pattern}"
            )
        if op.name in self.mask_ops:
            return "part of a softmax mask"
        if row.activations is not None and port not in row.activations:
            return f"a setting of {op.name}, not data"
        if row.kind == "movement":
            return _MOVED
        if _size(value.shape) == 1:
            return "scalar"
        integer = row.integer and op.name not in self.float_ops
        return "" if integer else f"operand of {op.name}, which runs in float"

    def _bias(self, op: Op, port: int, values: list[str], grids: dict[int, str]) -> None:
        name = values[0]
        value = self.graph.values[name]
        site = self._constant_name(op, port, value, "bias", several=False)
        setting = self._setting(op, _BIAS, "bias", site, value.param or name)
        if len(values) > 1:
            self.why.update(dict.fromkeys(values, f"float: runs of {op.name} read different biases"))
            return
        if setting.quantized is True:
            self._plain_bias(op, port, value, site, setting)
            return
        reason = self._no_int32_reason(op, value, grids)
        wanted = setting.quantized is not False and not reason
        spec = _INT32
        if not self._verdict(setting, wanted, spec, site, reason, name, _NO_WEIGHTS):
            return
        weight = grids[1]
        if not isinstance(self.sites[weight].spec.granularity, PerTensor):
            spec = replace(_INT32, granularity=PerChannel(len(value.shape) - 1))
        follows = (grids[0], weight)
        self._add(SitePlan(site, spec, "bias", op.name, port, name, site, follows))

    def _plain_bias(self, op: Op, port: int, value: Value, site: str, setting: Setting) -> None:
        """A bias that a rule quantizes like any other parameter."""
        spec = setting.apply(self.rules.weight, weight=True)
        if not self._verdict(setting, True, spec, site, "", value.name, _NO_WEIGHTS):
            return
        assert spec is not None
        granularity = PerTensor() if setting.granularity is None else setting.granularity
        spec = replace(spec, granularity=granularity.resolve(0, None))
        spec.granularity.param_shape(value.shape, site)
        group = self.operand_groups.setdefault((value.name, spec), site)
        self._add(SitePlan(site, spec, "bias", op.name, port, value.name, group))

    def _no_int32_reason(self, op: Op, bias: Value, grids: dict[int, str]) -> str:
        """Why no int32 bias follows from input and weight; empty if one does."""
        if op.type not in ("Conv", "ConvTranspose", "Gemm"):
            return _FLOAT_OP.format(f"the bias of {op.type}")
        if 0 not in grids or 1 not in grids:
            return "float: its input or weight is not quantized"
        weight = self.sites.get(grids[1])
        if weight is None or weight.role != "weight":
            return "float: its weight is not the same in every run"
        data = self.spec_of[grids[0]]
        if not isinstance(data.granularity, PerTensor):
            return "float: its input has several scales"
        if not isinstance(data.format, IntFormat) or not isinstance(weight.spec.format, IntFormat):
            return "float: its input or weight is not on an integer grid"
        if data.format.bits > _MOST_INPUT_BITS or weight.spec.format.bits > _MOST_WEIGHT_BITS:
            return "float: its input has more than 16 bits or its weight more than 8"
        shape = self.graph.values[weight.value].shape
        if bias_entries(bias.shape) != _output_channels(op, shape):
            return f"float: integer kernels add one number per output channel, and it has shape {bias.shape}"
        if not _scales_follow_channels(op, weight.spec.granularity, shape):
            return "float: its weight has scales that do not belong to one output channel each"
        return ""

    # ---- settings and verdicts

    def _setting(self, op: Op, ports: frozenset[str], param: str | None, site: str, *values: str) -> Setting:
        return self.resolver.setting(op.type, ports, param, (op.name, op.module, site, *values))

    def _verdict(
        self,
        setting: Setting,
        wanted: bool,
        spec: QuantSpec | None,
        site: str,
        reason: str,
        value: str,
        none: str,
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
            reason = none.format(self.rules.source)
        self.why[value] = self.why.get(value) or reason
        self._idle(setting, site, reason)
        return False

    def _idle(self, setting: Setting, site: str, reason: str) -> None:
        for index in setting.matched:
            self.idle.setdefault(index, (site, reason))

    def _concrete(self, granularity: Granularity, op: Op, value: str) -> Granularity:
        """The open axis of an activation: axis 1 of images and what convolutions handle, else the last
        one."""
        rank = len(self.graph.values[value].shape)
        if rank == 0 or isinstance(granularity, PerTensor):
            return PerTensor()
        axis = 1 if rank > 3 or (rank == 3 and op.type in _CHANNELS_FIRST) else rank - 1
        return granularity.resolve(None if isinstance(granularity, PerBlock) else axis, axis)

    def _asked_of_producers(self) -> dict[str, tuple[Symmetry, str]]:
        """Value -> (symmetry, asking operator), for rules that reach back to where their input is
        quantized."""
        asking = [r for r in self.rules.rules if r.reaches_producer and r.symmetry is not None]
        found: dict[str, tuple[Symmetry, str]] = {}
        moved: dict[str, str] = {}
        for op in self.graph.ops if asking else ():
            row = op_row(op.type)
            if row.kind == "movement" and op.inputs and op.inputs[0] is not None:
                moved.update(dict.fromkeys(op.outputs, moved.get(op.inputs[0], op.inputs[0])))
            symmetry = next((r.symmetry for r in reversed(asking) if op.type in r.types), None)
            if symmetry is None:
                continue
            for port, value in op.sources():
                if value not in self.static and (row.activations is None or port in row.activations):
                    self._ask(found, moved.get(value, value), symmetry, op.name)
        return found

    def _ask(self, found: dict[str, tuple[Symmetry, str]], value: str, symmetry: Symmetry, op: str) -> None:
        earlier = found.setdefault(value, (symmetry, op))
        if earlier[0] != symmetry:
            raise ConfigError(
                value,
                f"{earlier[1]} asks for {_an(earlier[0])} encoding, {op} for {_an(symmetry)} one",
                "give both operator types the same is_symmetric, or leave it out for one of them",
            )

    def _add(self, site: SitePlan) -> None:
        self.sites[site.name] = site
        for name in (site.group, site.name):
            self.spec_of.setdefault(name, site.spec)

    # ---- what remains

    def _share_model_inputs(self) -> None:
        """A model input that is first moved is on the grid of the sites that read it, and so is what
        carries it."""
        covered = {site.value for site in self.sites.values()}
        for value, origin in [*((name, name) for name in self.graph.inputs), *self.origin.items()]:
            at = self.read_at.get(origin)
            if at and self.graph.values[origin].kind == "input" and value not in covered:
                self.shared.setdefault(value, self.sites[at[0]].group)

    def _static_op(self, op: Op) -> None:
        """A parameter that is moved before it is used is quantized where it is used."""
        for source in self._data(op, op_row(op.type)):
            self.why.setdefault(source, _MOVED)
            self.origin.update(dict.fromkeys(op.outputs, self.origin.get(source, source)))

    def _floats(self) -> dict[str, str]:
        """The reason for every float value that has neither a site nor another's grid."""
        covered = {site.value for site in self.sites.values()} | self.shared.keys()
        floats = {}
        for value in self.graph.values.values():
            if value.name in self.float_values and value.name not in covered:
                floats[value.name] = self._reason(value)
        return floats

    def _reason(self, value: Value) -> str:
        reason = self.why.get(value.name)
        if value.name in self.inner and not reason:
            match = self.inner[value.name]
            group = self.group_of.get(match.output)
            return f"inside the supergroup {match.pattern}" + (
                f", quantized at {group}" if group else ", which is in float"
            )
        if value.name in self.mask_values and not reason:
            return f"mask of the softmax {self.mask_values[value.name]}"
        if not reason:
            if self.graph.consumers(value.name):
                return "no operator computes with it"
            return (
                "no operator of the recorded run reads it"
                if value.is_static or value.kind == "input"
                else "not recorded"
            )
        if at := self.read_at.get(value.name):
            return f"{reason}; quantized at {', '.join(at[:3])}{' and others' if len(at) > 3 else ''}"
        return reason

    def _unused(self) -> Iterator[str]:
        names: list[str] | None = None
        for index, rule in enumerate(self.rules.rules):
            if index in self.used or rule.optional or rule.reaches_producer:
                continue
            if index in self.idle:
                site, reason = self.idle[index]
                yield f"{rule}: no effect; it matches {site}, but {reason}"
                continue
            types = {op.type for op in self.graph.ops}
            unknown = [t for t in rule.types if t != "*" and t not in types]
            if unknown:
                found = close_matches(unknown[0], types)
                yield f"{rule}: the model has no operator of type {unknown[0]!r}{found}"
                continue
            if names is None:
                names = list(self._names())
            yield f"{rule}: nothing in the model has this name and port{close_matches(rule.name, names)}"

    def _names(self) -> Iterator[str]:
        yield from (op.name for op in self.graph.ops[:2000])  # close matches compare every pair of letters
        yield from list(self.sites)[:2000]
        yield from self.graph.inputs


_PLAIN = OpRow("pointwise")


def _names(rule: Rule | None, param: str, value: Value) -> bool:
    """Whether a rule means this parameter and not all of a kind."""
    return rule is not None and (rule.param == param or rule.name == (value.param or value.name))


def _is_meant(rule: Rule | None) -> bool:
    """Whether a rule speaks of some operators and not of all."""
    return rule is not None and (rule.name != "*" or rule.types != ("*",) or rule.quantized is False)


def _wants_grid(row: OpRow) -> bool:
    """Whether integer runtimes need this operator's operands on a grid: products, sums and joins."""
    return row.kind == "compute" or (row.integer and row.activations is None)


def _an(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word.replace('_', ' ')}"


def _with_granularity(spec: QuantSpec, granularity: Granularity) -> QuantSpec:
    return spec if spec.granularity == granularity else replace(spec, granularity=granularity)


def _wide(spec: QuantSpec) -> QuantSpec:
    """``spec`` with at least 16 bits: a signed symmetric grid, or float16."""
    if isinstance(spec.format, FloatFormat):
        return spec if spec.format.bits >= 16 else replace(spec, format=parse_format("float16"))
    return replace(spec, format=IntFormat(max(16, spec.format.bits)), symmetry="symmetric")


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


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
    values: dict[str, str] = {}
    ports: set[tuple[str, str]] = set()  # (operator, value) where a mask enters
    for match in softmaxes:
        operands = [
            (op, v) for op in match.ops for _, v in op.sources() if v not in match.inner and v not in static
        ]
        if any(v in computed for _, v in operands):
            for op, value in operands:
                if value not in computed and graph.values[value].is_float:
                    values[value] = match.ops[-1].name
                    ports.add((op.name, value))
    serves: dict[str, str] = {}  # operator -> the softmax whose mask it prepares
    for op in reversed(graph.ops):
        readers = [(reader.name, value) for value in op.outputs for reader, _ in graph.consumers(value)]
        softmaxes_of = [values[v] if (r, v) in ports else serves.get(r) for r, v in readers]
        if softmaxes_of and all(softmaxes_of) and not any(map(graph.is_output, op.outputs)):
            serves[op.name] = softmaxes_of[0] or ""
            for value in (*op.outputs, *(v for _, v in op.sources() if v not in static)):
                values.setdefault(value, serves[op.name])
    return set(serves), values
