"""Requested precisions, reconciled with each other and with the target's kernels; every change has a reason.

A request names layers and what their activations and weights shall be. It reaches the quantizers of what a layer reads, also
where values are only moved on the way. Where two requests meet in one quantizer, or a kernel does not exist, ``strict`` makes an
error of it; otherwise the larger precision is taken and said.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.core.graph.graph import Op
from bitwright.core.graph.operators import OPS
from bitwright.core.numerics.formats import FloatFormat, Format, parse_format
from bitwright.core.numerics.spec import QuantSpec, activation_spec, weight_spec
from bitwright.core.placement.rules import Kernel, name_pattern
from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.core.simulation.sites import Site, values_on_grids
from bitwright.errors import ConfigError, checks_arguments, close_matches
from bitwright.precision.candidates import spec_at
from bitwright.tables import Tabular, text_table

MODEL_INPUT, MODEL_OUTPUT = "model_input", "model_output"
_INPUT = re.compile(r"(.+)\[(\d+)\]")
_END = re.compile(rf"({MODEL_INPUT}|{MODEL_OUTPUT})(?:\[(\d+)\])?")
_ALIASES = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class PrecisionRequest:
    """Which precision a user asks for, and for which layers.

    Attributes:
        where: operator, module or pattern, an operator type, ``model_input`` or ``model_output`` (all of them, or one:
            ``model_input[1]``), one activation that an operator reads (``add[1]``); or several of these.
        activation: format of what they read (``"int16"``, ``"float16"``); of what the model takes or returns, for the last two.
        weight: format of their weights; ``None`` leaves them.
    """

    where: str | tuple[str, ...]
    activation: str | None = None
    weight: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The places as a tuple."""
        return (self.where,) if isinstance(self.where, str) else tuple(self.where)


@dataclass(frozen=True)
class Change:
    """A change of a quantizer's precision.

    Attributes:
        site: its first site.
        before, now: formats; ``float`` where it is off.
        reason: which request, and what it met.
    """

    site: str
    before: str
    now: str
    reason: str


@dataclass(frozen=True)
class PrecisionReport(Tabular):
    """Outcome of the requests.

    Attributes:
        changes: quantizers whose precision changed, in execution order.
        compromises: where a request was not met as it stands, and why.
    """

    changes: tuple[Change, ...]
    compromises: tuple[str, ...] = ()

    _rows = "changes"

    def __str__(self) -> str:
        rows = [(c.site, c.before, c.now, c.reason) for c in self.changes]
        lines = [text_table(("site", "before", "now", "reason"), rows)]
        return "\n".join([*lines, *(f"compromise: {text}" for text in self.compromises)])


@dataclass
class _Wish:
    """The requested precision of a quantizer."""

    format: Format
    reason: str


@dataclass
class _Requests:
    """Requests to be applied to a simulation."""

    sim: Any
    strict: bool
    wishes: dict[int, _Wish] = field(default_factory=dict)
    compromises: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sites = self.sim.quantizers
        self.first: dict[int, Site] = {}
        for site in sites.values():
            self.first.setdefault(id(site.quantizer), site)
        self.on_grid: dict[str, int] = {}
        for key, values in values_on_grids(sites, self.sim.plan.shared).items():
            self.on_grid.update(dict.fromkeys(values, key))
        self.own: dict[str, list[Site]] = {}
        for site in sites.values():
            self.own.setdefault(site.op, []).append(site)

    def reads(self, op: Op, *, weights: bool) -> list[int]:
        """Quantizers of an operator's weights, or of its activations."""
        own = [s for s in self.own.get(op.name, []) if not s.quantizer.derived and s.role != "bias"]
        found = [
            id(s.quantizer)
            for s in own
            if s.is_stored == weights and (weights or s.role == "input" or s.inner is not None)
        ]
        if not weights:
            found += [self.on_grid[v] for _, v in op.sources() if v in self.on_grid]
        return list(dict.fromkeys(found))

    def ask(self, key: int, format: Format, reason: str) -> None:
        """Ask for a format; of two, the one with more bits is taken."""
        known = self.wishes.get(key)
        if known is not None and known.format != format:
            site = self.first[key].name
            text = f"{site}: {known.reason} asks for {known.format.name}, {reason} for {format.name}"
            if self.strict:
                raise ConfigError(
                    site, text.partition(": ")[2], "ask for one precision, or pass strict=False to have the larger"
                )
            self.compromises.append(f"{text}; it has the larger")
            if known.format.bits >= format.bits:
                return
        self.wishes[key] = _Wish(format, reason)


@checks_arguments
def set_precisions(sim: Any, requests: Iterable[PrecisionRequest], *, strict: bool = True) -> PrecisionReport:
    """Set requested precisions of layers, all or none; before or after calibration.

    What was calibrated stays so, where its statistics can serve the new precision.

    Args:
        sim: a simulation of either front end; changed in place.
        requests: later ones win over earlier ones of the same layer.
        strict: refuse what cannot be met; otherwise compromises are part of the report.

    Raises:
        ConfigError: a request matches nothing or names an unknown format; under ``strict`` two requests that contradict each
            other at a shared quantizer, or a precision that the target has no kernel for.
    """
    state = _Requests(sim, strict)
    of_op: dict[str, tuple[Op, PrecisionRequest]] = {}
    for request in requests:
        for place in request.names:
            for op in _matching(sim, state, place, request):
                of_op[op.name] = (op, request)
    for op, request in of_op.values():
        _ask(state, op, request)
    _reconcile(state, [op for op, _ in of_op.values()])
    return _applied(state)


def _ask(state: _Requests, op: Op, request: PrecisionRequest) -> None:
    """Request the precision of an operator's operands."""
    reason = f"the request for {' and '.join(request.names)}"
    for text, weights in ((request.activation, False), (request.weight, True)):
        for key in state.reads(op, weights=weights) if text is not None else ():
            state.ask(key, _format(text), reason)


def _ask_at_an_end(sim: Any, state: _Requests, place: str, request: PrecisionRequest) -> None:
    """Request the precision of the model's inputs or outputs, or of one of them."""
    found = _END.fullmatch(place)
    assert found is not None
    values = list(sim.graph.inputs if found[1] == MODEL_INPUT else sim.graph.outputs)
    if found[2] is not None and int(found[2]) >= len(values):
        raise ConfigError(
            f"request for {place!r}", f"the model has {len(values)} of these", f"count from {found[1]}[0] on"
        )
    if request.activation is None:
        return
    for value in values if found[2] is None else [values[int(found[2])]]:
        if value in state.on_grid:
            state.ask(state.on_grid[value], _format(request.activation), f"the request for {place}")


def _ask_at_an_input(state: _Requests, place: str, request: PrecisionRequest) -> bool:
    """Request the precision of one activation of an operator; returns whether ``place`` names one."""
    found = _INPUT.fullmatch(place)
    op = None if found is None else next((op for op in state.sim.graph.ops if op.name == found[1]), None)
    if found is None or op is None:
        return False
    values, index = state.sim.graph.values, int(found[2])
    reads = [(port, value) for port, value in op.sources() if not values[value].is_static]
    if index >= len(reads):
        raise ConfigError(
            f"request for {place!r}", f"the operator reads {len(reads)} activations", f"count from {op.name}[0] on"
        )
    if not request.activation:
        return True
    port, value = reads[index]
    keys = [id(s.quantizer) for s in state.own.get(op.name, []) if s.role == "input" and s.port == port]
    for key in dict.fromkeys([*keys, *filter(None, [state.on_grid.get(value)])]):
        state.ask(key, _format(request.activation), f"the request for {place}")
    return True


def _matching(sim: Any, state: _Requests, place: str, request: PrecisionRequest) -> Sequence[Op]:
    """Operators that a place names; applies requests for the model's inputs and outputs."""
    if _END.fullmatch(place):
        _ask_at_an_end(sim, state, place, request)
        return ()
    if _ask_at_an_input(state, place, request):
        return ()
    ops, pattern = sim.graph.ops, name_pattern(place)
    if place in OPS:
        found = [op for op in ops if op.type == place]
    else:
        found = [op for op in ops if pattern.fullmatch(op.name) or (op.module and pattern.fullmatch(op.module))]
    if not found:
        known = [op.name for op in ops]
        raise ConfigError(
            f"request for {place!r}",
            f"no operator has this name, module or type{close_matches(place, known)}",
            "take names from sim.coverage(), or a type such as 'Conv'",
        )
    return found


def _format(text: str | None) -> Format:
    assert text is not None
    return parse_format(_ALIASES.get(text, text))


def _reconcile(state: _Requests, asked: Sequence[Op]) -> None:
    """Raise precisions without a kernel on the target, until nothing changes: bits only grow."""
    rules, ops = state.sim.rules, {op.name: op for op in asked}
    touched = {op.name: op for op in state.sim.graph.ops if set(state.reads(op, weights=False)) & state.wishes.keys()}
    changed = bool(rules.kernels)
    while changed:
        changed = False
        for op in {**touched, **ops}.values():
            changed = _meet(state, op, rules.kernels.get(op.type, rules.kernels.get("defaults", ()))) or changed


def _meet(state: _Requests, op: Op, kernels: Sequence[Kernel]) -> bool:
    """Whether the precision of an operator had to be raised to that of a kernel."""
    values, weights = state.reads(op, weights=False), state.reads(op, weights=True)
    if not kernels or not values:
        return False
    a, w = (max((_bits(state, key) for key in keys), default=None) for keys in (values, weights))

    def has(kernel: Kernel, enough: Callable[[int, int], bool]) -> bool:
        pairs = ((kernel.activation, a), (kernel.weight, w))
        return all(width is None or bits is None or enough(width[0], bits) for width, bits in pairs)

    able = [kernel for kernel in kernels if has(kernel, operator.ge)]
    if any(has(kernel, operator.eq) for kernel in able):
        return False
    problem = f"the target has no kernel of {op.type} for {a}-bit activations" + (f" and {w}-bit weights" if w else "")
    if state.strict or not able:
        raise ConfigError(
            op.name, problem, f"ask for one of: {'; '.join(map(str, kernels))}" + ("" if not able else ", or pass strict=False")
        )  # fmt: skip
    best = min(able, key=lambda k: ((k.activation or (0, ""))[0], (k.weight or (0, ""))[0]))
    state.compromises.append(f"{op.name}: {problem}; it has {best}")
    reason = f"the kernels of {op.type}"
    _raise_to(state, values, best.activation, reason)
    _raise_to(state, weights, best.weight, reason)
    return True


def _raise_to(state: _Requests, keys: Iterable[int], width: tuple[int, str] | None, reason: str) -> None:
    """Raise requests below the width of a kernel to it."""
    if width is None:
        return
    found = parse_format(f"int{width[0]}" if width[1] == "int" else "float16")
    state.wishes.update({key: _Wish(found, reason) for key in keys if _bits(state, key) < width[0]})


def _bits(state: _Requests, key: int) -> int:
    if key in state.wishes:
        return state.wishes[key].format.bits
    site = state.first[key]
    return site.quantizer.spec.format.bits if site.enabled else 32


def _applied(state: _Requests) -> PrecisionReport:
    changes = []
    with all_or_nothing(state.sim):
        for key, site in state.first.items():
            wish = state.wishes.get(key)
            if wish is None:
                continue
            before = site.quantizer.spec.format.name if site.enabled else "float"
            site.spec = spec_at(site.quantizer.spec, _wanted(site, wish.format))
            now = site.quantizer.spec.format.name
            if (
                site.frozen and site.encoding is None
            ):  # what was frozen is gone with its grid: calibration finds another
                site.frozen = False
            if now != before:
                site.quantizer.why_spec = wish.reason
                changes.append(Change(site.name, before, now, wish.reason))
    return PrecisionReport(tuple(changes), tuple(dict.fromkeys(state.compromises)))


def _wanted(site: Site, format: Format) -> QuantSpec:
    if site.is_stored:
        return weight_spec(format)
    return activation_spec(format, **({"symmetry": "symmetric"} if isinstance(format, FloatFormat) else {}))
