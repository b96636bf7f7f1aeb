"""What placement has decided so far: sites, shared grids, reasons for float, and which rules had an effect."""

from __future__ import annotations

from dataclasses import replace

from bitwright.core.graph.graph import Op
from bitwright.core.graph.ops import OpRow
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import Granularity
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.placement.facts import Facts
from bitwright.core.placement.plan import RangeFrom, SitePlan
from bitwright.core.placement.rules import Rule, Setting

FLOAT_OP = "{} runs in float on integer runtimes"
NO_ACTIVATIONS = "activations stay in float under {}"
NO_WEIGHTS = "weights stay in float under {}"
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
        self.picked: dict[str, str] = {}  # matrix picked from a stack -> the reason for its having no site
        self.read_at: dict[str, list[str]] = {}  # float origin -> sites where it is quantized after all
        self.used: set[int] = set()
        self.unused: dict[int, tuple[str, str]] = {}  # rule -> first tensor it matched in vain, and why

    def setting(self, op: Op, ports: frozenset[str], param: str | None, site: str, *values: str) -> Setting:
        """What the rules say of a tensor of ``op`` that has all these names."""
        return self.facts.resolver.setting(op.type, ports, param, (op.name, op.module, site, *values))

    def output_setting(self, op: Op, index: int, value: str) -> Setting:
        """What the rules say of an output."""
        ports = frozenset(("output", "model_output") if self.facts.graph.is_output(value) else ("output",))
        return self.setting(op, ports, None, f"{op.name}.output[{index}]", value)

    def activation_spec(self, setting: Setting, op: Op, row: OpRow, value: str) -> QuantSpec | None:
        """The spec of an activation; ``None`` where the rules have none for activations."""
        spec = setting.apply(self.facts.rules.activation, weight=False)
        if spec is None:
            return None
        if value in self.facts.symmetry:
            spec = replace(spec, symmetry=self.facts.symmetry[value][0])
        return self.pinned(spec, setting, row.fixed_range)

    def pinned(self, spec: QuantSpec | None, setting: Setting, fixed: tuple[float, float] | None) -> QuantSpec | None:
        """``spec`` with the range that the values have whatever the input, unless a rule says otherwise."""
        if spec is None or not self.facts.rules.fixed_ranges or not isinstance(spec.format, IntFormat):
            return spec
        if fixed and setting.fixed_range is None and spec.fixed_range is None:
            if spec.symmetry == "asymmetric" or fixed[0] == -fixed[1]:
                spec = replace(spec, fixed_range=fixed)
        return spec

    def range_from(self, spec: QuantSpec, setting: Setting) -> RangeFrom:
        """What fixes both ends of the range of an activation."""
        if spec.fixed_range is None or None in spec.fixed_range or not isinstance(spec.format, IntFormat):
            return ""
        base = self.facts.rules.activation
        if setting.fixed_range is None and (base is None or base.fixed_range is None):
            return "operator"
        return "target" if setting.range_of_target else "rule"

    def is_settled(self, value: str) -> bool:
        """Whether it is decided what grid a value has, if any."""
        return (
            value in self.group_of
            or value in self.why
            or self.facts.graph.producer(value) is None
            or value in self.facts.static
        )

    def share_output(self, op: Op, index: int, value: str, group: str) -> None:
        """An output lies on the grid of ``group``."""
        self.group_of[value] = self.shared[value] = group
        setting = self.output_setting(op, index, value)
        self.note_unused(setting, f"{op.name}.output[{index}]", f"it shares the encoding of {group}")

    def in_tail(self, op: Op, setting: Setting) -> bool:
        """Whether ``op`` stays in float because it follows the last layer, and no rule means its tensors."""
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

    def note_unused(self, setting: Setting, site: str, reason: str) -> None:
        """The rules that matched a tensor changed nothing there."""
        for index in setting.matched:
            self.unused.setdefault(index, (site, reason))

    def add(self, site: SitePlan) -> None:
        """A new site; the first of a group gives it its spec."""
        self.sites[site.name] = site
        for name in (site.group, site.name):
            self.spec_of.setdefault(name, site.spec)


def is_meant(rule: Rule | None) -> bool:
    """Whether a rule speaks of some operators and not of all."""
    return rule is not None and (rule.name != "*" or rule.types != ("*",) or rule.quantized is False)


def with_granularity(spec: QuantSpec, granularity: Granularity) -> QuantSpec:
    """``spec`` with another granularity; itself where that is the same."""
    return spec if spec.granularity == granularity else replace(spec, granularity=granularity)
