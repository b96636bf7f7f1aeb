"""Rules: which tensors are quantized, and how.

A :class:`Rule` selects tensors and sets some of their facets; :class:`Rules` is the base specs, the rules in
order, and the supergroups. Later rules win, facet by facet, so a list of rules reads from the general to the
particular. Nothing here knows a graph: :mod:`bitwright.core.placement.place` asks a :class:`Resolver` about each
tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from bitwright.core.graph.patterns import DEFAULT_SUPERGROUPS, Pattern
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.graph.roles import CACHES, ROLE, ROLES, check_role
from bitwright.core.numerics.formats import Format, IntFormat, ScaleFormat, parse_format
from bitwright.core.numerics.granularity import Granularity, PerChannel, PerTensor, PerToken
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.numerics.spec import (
    PRESETS,
    SYMMETRIES,
    NonFinite,
    QuantSpec,
    RangeMethod,
    Symmetry,
    activation_spec,
    check_policy,
    dynamic_spec,
    weight_spec,
)
from bitwright.core.placement.kv_cache import KvCache
from bitwright.errors import ConfigError, close_matches

#: what a rule says of the tensors that it selects, attributes of :class:`Rule` and keys of a configuration file
FACETS = (
    "quantized", "format", "symmetry", "granularity", "method", "fixed_range", "non_finite", "scale_format", "dynamic",
)  # fmt: skip

Port = Literal["output", "input", "inner", "weight", "bias", "param", "constant", "model_input", "model_output", "*"]
PORTS: tuple[str, ...] = get_args(Port)
FixedRange = tuple[float | None, float | None]


@dataclass(frozen=True)
class Rule:
    """A rule of placement: which tensors it matches (the first four fields), and what it sets (``None`` sets nothing).

    Attributes:
        name: an operator, module, parameter or site. ``layer1`` means the operator of that name and
            everything below it (``layer1.0.conv1``, never ``layer10``); ``*`` and ``?`` are wildcards that
            also pass dots; brackets are literal, so ``conv1.output[0]`` is one site and ``conv1.weight``
            one parameter. ``role:down`` are the layers of that role of a transformer
            (:mod:`bitwright.core.graph.roles`), ``role:key_cache`` the keys that attention reads.
        op: canonical operator type, or several.
        port: which tensors of the operator. ``param`` is every parameter, ``weight`` and ``bias`` those of
            that name; ``constant`` is a constant operand that is not a parameter of the operator type (a
            positional embedding that is added); ``inner`` is what is computed inside a step of a recurrent
            layer; ``model_input`` and ``model_output`` are the tensors the model takes and returns.
        param: exact parameter name in the operator's vocabulary (``running_mean``).
        quantized: ``False`` leaves the tensor in float; ``True`` quantizes it even where integer runtimes
            would compute in float. For a bias, ``"derived"`` is the default: int32 with the scales of input
            and weight.
        format: number format, or its name. It also undoes an earlier ``quantized=False``.
        symmetry: see :class:`~bitwright.core.numerics.spec.QuantSpec`.
        granularity: which elements share a scale.
        method: how the range is taken, or the name of the method.
        fixed_range: ``(lo, hi)`` in input units; ``None`` at either end calibrates that end.
        non_finite: what calibration does about NaN and Inf, see :class:`~bitwright.core.numerics.spec.QuantSpec`.
        scale_format: what scales are stored as, see :class:`~bitwright.core.numerics.formats.ScaleFormat`.
        dynamic: whether every run chooses the range, see :class:`~bitwright.core.numerics.spec.QuantSpec`. ``True`` without
            a granularity is per token.
        origin: where the rule was written; shown instead of the rule when it is cited.
        optional: the rule describes a target rather than this model, so matching nothing is not reported.
        reaches_producer: with ``port="input"``, set ``symmetry`` on the tensor that is read, wherever it is
            quantized.

    Raises:
        ConfigError: an unknown role, port or symmetry, or a range whose ends are exchanged.

    >>> str(Rule("layer1.*", op="Conv", port="weight", format="int4"))
    "Rule('layer1.*', op='Conv', port='weight', format='int4')"
    """

    name: str = "*"
    op: str | tuple[str, ...] = "*"
    port: Port = "*"
    param: str | None = None
    quantized: bool | Literal["derived"] | None = None
    format: Format | str | None = None
    symmetry: Symmetry | None = None
    granularity: Granularity | None = None
    method: RangeMethod | str | None = None
    fixed_range: FixedRange | None = None
    non_finite: NonFinite | None = None
    scale_format: ScaleFormat | None = None
    origin: str = field(default="", compare=False)
    optional: bool = field(default=False, compare=False)
    reaches_producer: bool = False
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        _check_choice(self, "port", self.port, PORTS)
        if self.name.startswith(ROLE):
            check_role(self.name, (*ROLES, *CACHES))
        if self.symmetry is not None:
            _check_choice(self, "symmetry", self.symmetry, SYMMETRIES)
        if self.quantized == "derived" and self.port != "bias":
            _check_choice(self, f"value of quantized for port {self.port!r}", "derived", ("True", "False"))
        if isinstance(self.format, str):
            parse_format(self.format)
        if self.method is not None:
            find_range_method(self.method)
        if self.non_finite is not None:
            check_policy(self.non_finite, self.origin or f"Rule({self.name!r})")
        if self.fixed_range is not None:
            _check_range(self)

    @property
    def types(self) -> tuple[str, ...]:
        """The operator types selected; ``("*",)`` for all."""
        return (self.op,) if isinstance(self.op, str) else tuple(self.op)

    def __str__(self) -> str:
        if self.origin:
            return self.origin
        parts = [repr(self.name)]
        for facet in ("op", "port", "param", *FACETS):
            value = getattr(self, facet)
            if value not in (None, "*"):
                shown = getattr(value, "name", value) if facet in ("format", "method") else value
                parts.append(f"{facet}={shown!r}")
        return f"Rule({', '.join(parts)})"


def _check_choice(rule: Rule, facet: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(
            rule.origin or f"Rule({rule.name!r})",
            f"{value!r} is not a {facet}{close_matches(str(value), known)}",
            f"use one of {', '.join(known)}",
        )


def _check_range(rule: Rule) -> None:
    assert rule.fixed_range is not None
    lo, hi = rule.fixed_range
    ends = [end for end in (lo, hi) if end is not None]
    finite = all(isinstance(e, (int, float)) and abs(e) < float("inf") for e in ends)  # also refuses NaN
    if not finite or (len(ends) == 2 and ends[0] > ends[1]):
        raise ConfigError(
            rule.origin or f"Rule({rule.name!r})",
            f"fixed_range {rule.fixed_range!r} is not a range of finite numbers, lowest first",
            "write (lowest, highest), with None at an end that shall be calibrated",
        )


#: leaves the inside of recurrent layers in float: quantizers stand only at what enters and leaves a layer
BOUNDARY_ONLY = Rule(op=tuple(CELLS), port="inner", quantized=False, origin="boundary_only", optional=True)
#: after :data:`BOUNDARY_ONLY`: LSTMs choose the ranges of what their products read at run time; see ``Outputs._chooses_ranges``
RUN_TIME = Rule(op="LSTM", port="inner", dynamic=True, origin="run_time", optional=True)
#: spec of what the products of such an LSTM read, as ``DynamicQuantizeLSTM`` of ONNX Runtime quantizes it
RUN_TIME_OPERAND = dynamic_spec("uint8", PerTensor())


def is_run_time_weight(spec: QuantSpec) -> bool:
    """Whether ``DynamicQuantizeLSTM`` reads weights of this spec: 8 bits, symmetric, with one scale or one per row of gates."""
    return (
        spec.format == IntFormat(8)
        and spec.symmetry == "symmetric"
        and isinstance(spec.granularity, PerTensor | PerChannel)
    )


@dataclass(frozen=True)
class Kernel:
    """Bits and kind (``int`` or ``float``) of activations and weights that one kernel of a target takes; ``None``: any."""

    activation: tuple[int, str] | None = None
    weight: tuple[int, str] | None = None

    def runs(self, activation: QuantSpec | None, weight: QuantSpec | None) -> bool:
        """Whether the kernel takes tensors of these specs; ``None`` is float32."""
        pairs = ((self.activation, activation), (self.weight, weight))
        return all(wanted is None or wanted == _width(spec) for wanted, spec in pairs)

    def __str__(self) -> str:
        shown = ["any" if w is None else f"{w[1]}{w[0]}" for w in (self.activation, self.weight)]
        return f"activations {shown[0]}, weights {shown[1]}"


def _width(spec: QuantSpec | None) -> tuple[int, str]:
    if spec is None:
        return 32, "float"
    return spec.format.bits, "int" if isinstance(spec.format, IntFormat) else "float"


@dataclass(frozen=True)
class Rules:
    """All inputs of a placement except the graph.

    Attributes:
        weight: base spec of weights; ``None`` leaves them in float unless a rule gives a format.
        activation: base spec of activations; ``None`` likewise.
        rules: applied in order; later ones win facet by facet.
        supergroups: chains of operators that have one quantizer, at their end.
        fixed_ranges: pin the range of operators whose output lies in a known interval (sigmoid, softmax,
            tanh).
        float_tail: leave what follows the last layer in float, see :mod:`bitwright.core.graph.float_values`.
        split_joins: leave joins after the last layer in float where the values joined have different grids, whatever is
            decided of the other operators there.
        source: where the rules come from, for messages.
        notes: what was read and has no effect, one sentence each.
        kv_cache: what keys and values of attention are stored as, see :mod:`bitwright.core.placement.kv_cache`.
        kernels: operator type, or ``defaults``, -> what the target runs; a search for precisions keeps to it.
        ends: what a language model's table of tokens and output layer are where weights have fewer than 8 bits: ``"kept"`` in
            float (in int8 beside calibrated activations) unless a rule asks for more, or ``"as others"``.
        hw_version: of the accelerator that an AIMET configuration is for: 73 for ``V73``.
    """

    weight: QuantSpec | None = PRESETS["w8a8"].weight
    activation: QuantSpec | None = PRESETS["w8a8"].activation
    rules: tuple[Rule, ...] = ()
    supergroups: tuple[Pattern, ...] = DEFAULT_SUPERGROUPS
    fixed_ranges: bool = True
    float_tail: bool = True
    split_joins: bool = True
    source: str = "default rules"
    notes: tuple[str, ...] = ()
    kernels: Mapping[str, tuple[Kernel, ...]] = field(default_factory=dict)
    kv_cache: KvCache | None = None
    ends: Literal["kept", "as others"] = "kept"
    hw_version: int | None = None

    @property
    def allowed_kernels(self) -> Callable[[str, Any], str | None] | None:
        """``(operator type, precision) -> None``, or why no kernel of the target runs it; ``None`` where any may run.

        A precision has ``activation`` and ``weight``, the specs of an operator, of which ``None`` is float.
        """
        if not self.kernels:
            return None

        def refused(op_type: str, precision: Any) -> str | None:
            known = self.kernels.get(op_type) or self.kernels.get("defaults") or ()
            if not known or any(kernel.runs(precision.activation, precision.weight) for kernel in known):
                return None
            return f"the target runs {op_type} with {'; '.join(map(str, known))} only ({self.source})"

        return refused

    def extended(self, rules: Iterable[Rule]) -> Rules:
        """These rules with more after them."""
        return replace(self, rules=(*self.rules, *rules))


def default_rules(
    weight: QuantSpec | None = PRESETS["w8a8"].weight, activation: QuantSpec | None = PRESETS["w8a8"].activation
) -> Rules:
    """Rules that quantize exactly the operators that common integer runtimes compute on integers.

    Args:
        weight: spec of weights; ``None`` leaves them in float.
        activation: spec of activations; ``None`` leaves them in float.
    """
    return Rules(weight, activation)


@dataclass(frozen=True)
class Setting:
    """The facets that the rules set for one tensor; ``None`` where no rule matched.

    ``decided_by`` is the rule that set ``quantized``; ``matched`` are the positions of all rules that
    matched.
    """

    quantized: bool | Literal["derived"] | None = None
    format: Format | None = None
    symmetry: Symmetry | None = None
    granularity: Granularity | None = None
    method: RangeMethod | None = None
    fixed_range: FixedRange | None = None
    non_finite: NonFinite | None = None
    scale_format: ScaleFormat | None = None
    dynamic: bool | None = None
    decided_by: Rule | None = None
    matched: tuple[int, ...] = ()
    range_of_target: bool = False

    def apply(self, base: QuantSpec | None, *, weight: bool) -> QuantSpec | None:
        """``base`` with the facets set; without a base, a rule with a format makes a new spec.

        Args:
            base: spec of the preset.
            weight: whether the tensor is a weight (symmetric, per channel) or an activation.
        """
        if base is None:
            if self.format is None:
                return None
            base = weight_spec(self.format) if weight else activation_spec(self.format)
        if self.dynamic is not None and not weight and self.dynamic != base.dynamic:
            base = self._in_other_time(base)
        if not self.matched:
            return base
        fixed = base.fixed_range if self.fixed_range is None else self.fixed_range
        return replace(
            base,
            format=base.format if self.format is None else self.format,
            symmetry=base.symmetry if self.symmetry is None else self.symmetry,
            granularity=base.granularity if self.granularity is None else self.granularity,
            method=base.method if self.method is None else self.method,
            fixed_range=None if fixed == (None, None) else fixed,
            non_finite=self.non_finite or base.non_finite,
            scale_format=self.scale_format or base.scale_format,
        )

    def _in_other_time(self, base: QuantSpec) -> QuantSpec:
        """``base`` with a range chosen at run time instead of a calibrated one, or the other way round."""
        fmt = base.format if self.format is None else self.format
        if not self.dynamic:
            return activation_spec(fmt, symmetry="asymmetric" if isinstance(fmt, IntFormat) else "symmetric")
        granularity = self.granularity or PerToken()
        if isinstance(fmt, IntFormat) and self.symmetry is None:  # the grid of the same width that has such kernels
            fmt = IntFormat(fmt.bits, signed=self.format is None or fmt.signed)
        return dynamic_spec(fmt, granularity, **({} if self.symmetry is None else {"symmetry": self.symmetry}))

    def followed_by(self, index: int, rule: Rule) -> Setting:
        """This setting after one more matching rule."""
        quantized, decided_by = self.quantized, self.decided_by
        if rule.quantized is not None:
            quantized, decided_by = rule.quantized, rule
        elif rule.format is not None and quantized is False:
            quantized, decided_by = None, rule  # naming a format takes an earlier "float" back
        return Setting(
            quantized,
            self.format if rule.format is None else parse_format(rule.format),
            rule.symmetry or self.symmetry,
            self.granularity if rule.granularity is None else rule.granularity,
            self.method if rule.method is None else _method(rule.method),
            self.fixed_range if rule.fixed_range is None else rule.fixed_range,
            rule.non_finite or self.non_finite,
            rule.scale_format or self.scale_format,
            self.dynamic if rule.dynamic is None else rule.dynamic,
            decided_by,
            (*self.matched, index),
            self.range_of_target if rule.fixed_range is None else rule.optional,
        )


def _method(method: RangeMethod | str) -> RangeMethod:
    return RangeMethod(method) if isinstance(method, str) else method


_Candidate = tuple[int, Rule, re.Pattern[str] | None]


class Resolver:
    """Looks up the facets that the rules set for each tensor of one model.

    Rules are sorted once by operator type and port, and tensors that no rule names share their answer, so
    the cost is that of the names that have to be compared.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._names = [None if rule.name == "*" else name_pattern(rule.name) for rule in self.rules]
        self._candidates: dict[tuple[str, frozenset[str], str | None], tuple[_Candidate, ...]] = {}
        self._settings: dict[tuple[_Candidate, ...], Setting] = {}

    def setting(
        self, op_type: str, ports: frozenset[str], param: str | None, names: Sequence[str], roles: Sequence[str] = ()
    ) -> Setting:
        """The setting of a tensor.

        Args:
            op_type: canonical type of the operator that makes or reads it.
            ports: the ports it answers to, such as ``{"weight", "param"}``.
            param: its parameter name in the operator's vocabulary.
            names: the operator, module, parameter and site names it goes by.
            roles: what it is in a transformer, which rules name as ``role:q``.
        """
        found = self._select(op_type, ports, param)
        if any(pattern is not None for _, _, pattern in found):
            found = tuple(
                (index, rule, pattern)
                for index, rule, pattern in found
                if pattern is None
                or any(pattern.fullmatch(name) for name in (roles if rule.name.startswith(ROLE) else names))
            )
        if found not in self._settings:
            setting = Setting()
            for index, rule, _ in found:
                setting = setting.followed_by(index, rule)
            self._settings[found] = setting
        return self._settings[found]

    def _select(self, op_type: str, ports: frozenset[str], param: str | None) -> tuple[_Candidate, ...]:
        key = (op_type, ports, param)
        if key not in self._candidates:
            self._candidates[key] = tuple(
                (i, rule, self._names[i])
                for i, rule in enumerate(self.rules)
                if (rule.types == ("*",) or op_type in rule.types)
                and (rule.port == "*" or rule.port in ports)
                and (rule.param is None or rule.param == param)
                and not rule.reaches_producer
            )
        return self._candidates[key]


def name_pattern(name: str) -> re.Pattern[str]:
    """A pattern for the names that ``name`` selects: itself, everything below it, and matches of its wildcards.

    >>> [bool(name_pattern("layer1").fullmatch(n)) for n in ("layer1", "layer1.0.conv1", "layer10")]
    [True, True, False]
    """
    body = re.escape(name).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(rf"{body}(\..*)?", re.DOTALL)
