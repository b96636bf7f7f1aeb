"""What every operator's output is: a site of its own, on the grid of another site, or float, with the reason."""

from __future__ import annotations

from dataclasses import replace

from bitwright.core.graph.graph import Op
from bitwright.core.graph.ops import OpRow, op_row
from bitwright.core.graph.recurrence import CELL, CELLS, RETURNS, activation_range, is_wide
from bitwright.core.numerics.formats import FloatFormat, IntFormat, parse_format
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.placement.ledger import FLOAT_OP, NO_ACTIVATIONS, TAIL, Ledger, is_meant, with_granularity
from bitwright.core.placement.plan import SitePlan
from bitwright.core.placement.rules import Setting

_INNER = frozenset(("inner",))


class Outputs:
    """Decides the outputs of operators, in execution order, and notes the decisions in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.facts = ledger, ledger.facts

    def decide(self, op: Op) -> None:
        """Decide what becomes of the outputs of ``op``; those of the operators before it are settled."""
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
        """Decide what is computed inside the steps of ``op``, and the outputs, which carry its states."""
        for name, value in op.inner.items():
            self._inner(op, row, name, value)
        returns = op.attrs.get("returns", RETURNS)
        for index, (value, state) in enumerate(zip(op.outputs, returns, strict=False)):
            if index or state == CELL:
                self.ledger.last_states.add(value)
            carried = op.inner.get(state, "")
            if self.facts.is_float(value) and not (value == carried and value in self.ledger.outputs):
                self._state(op, row, index, value, carried)

    def _state(self, op: Op, row: OpRow, index: int, value: str, carried: str) -> None:
        """Decide an output of a recurrent layer that is, or ends with, the state ``carried``."""
        group = self.ledger.group_of.get(carried)
        if group is not None and self.ledger.outputs[carried].inner is not None:
            self.ledger.share_output(op, index, value, group)
        elif self._decide_output(op, row, index, value, default=True) and group is not None:
            self._join(value, group)

    def _join(self, value: str, group: str) -> None:
        """Let the site of ``value`` share the encoding of ``group``, if both are asked for alike."""
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
        """Leave ``value`` in float; the reason is told at the end, when the fate of its chain is known."""
        self.ledger.why[value] = ""
        match = self.facts.inner.get(value)
        end = f"inside the supergroup {match.pattern}; name {match.ops[-1].name}" if match else "part of a softmax mask"
        self.ledger.note_unused(
            self.ledger.output_setting(op, index, value), f"{op.name}.output[{index}]", f"it is {end}"
        )

    def _pick(self, op: Op, index: int, value: str) -> None:
        """What is picked has the scales of its matrices, for which an activation has no grid."""
        stack = str(op.inputs[0])
        self.ledger.picked[value] = self.ledger.why[value] = f"matrices of {stack}, each on its own grid there"
        self.ledger.note_unused(
            self.ledger.output_setting(op, index, value), f"{op.name}.output[{index}]", self.ledger.why[value]
        )

    def _decide_output(self, op: Op, row: OpRow, index: int, value: str, *, default: bool, why: str = "") -> bool:
        """Give ``value`` a site at its producer, or the reason why it has none."""
        site = f"{op.name}.output[{index}]"
        setting = self.ledger.output_setting(op, index, value)
        spec = self.ledger.activation_spec(setting, op, row, value)
        reason = "" if default else why or FLOAT_OP.format(op.type)
        if default and self.facts.rules.activation is not None and self._stays_in_float(op, row):
            self.ledger.float_ops.add(op.name)
            reason = f"{op.type} runs in float because its operands are in float"
        elif default and self.ledger.in_tail(op, setting):
            self.ledger.float_ops.add(op.name)
            reason = TAIL.format(op.type)
        inside = self.facts.statistic_reason(op, value)
        if inside and self.facts.rules.activation is not None and setting.quantized is not True:
            self.ledger.float_ops.add(op.name)
            reason = inside
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

    def _carry(self, op: Op, row: OpRow, index: int, value: str) -> None:
        """Decide an output that has its inputs' grid, if these have one grid."""
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
            why = f"{op.type} joins values of different grids and {FLOAT_OP.format('it')}"
            if last:
                why = f"last states of several layers, each on its own grid, put together by {op.type}"
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


def _names_operators(setting: Setting) -> bool:
    """Whether a rule that speaks of some types of operators asks for a quantizer."""
    rule = setting.decided_by
    return setting.quantized is True and rule is not None and rule.types != ("*",)


def _wide(spec: QuantSpec) -> QuantSpec:
    """``spec`` with at least 16 bits: a signed symmetric grid, or float16."""
    if isinstance(spec.format, FloatFormat):
        return spec if spec.format.bits >= 16 else replace(spec, format=parse_format("float16"))
    return replace(spec, format=IntFormat(max(16, spec.format.bits)), symmetry="symmetric")
