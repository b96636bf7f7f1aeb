"""Recurrent layers: their gates, one step of their equations, and the tensors inside a step that can be quantized.

The step is written once, over whatever has ``+ - *``: numpy and torch arrays compute with it, and symbolic values
write it into the body of an ONNX ``Scan``. Equations and gate names are those of the ONNX operators ``RNN``, ``GRU``
and ``LSTM``; ``W``, ``R``, ``P`` are input weights, recurrent weights and peepholes as named there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bitwright.core.graph.graph import Value

InnerKind = Literal["pre", "gate", "state", "product"]

HIDDEN, CELL, UNPROJECTED = "hidden", "cell", "unprojected"
#: what the recurrent product of an LSTM reads, where its range is chosen at run time; elsewhere the hidden state itself
RECURRENT = "recurrent"

#: which state each output of the operators carries: all steps, and the last one; ``Op.attrs["returns"]`` has it where
#: an ONNX node leaves outputs out
RETURNS = (HIDDEN, HIDDEN, CELL)
#: port of an initial state -> the state
STATE_PORTS = {5: HIDDEN, 6: CELL}


@dataclass(frozen=True)
class Inner:
    """A tensor inside a step.

    Attributes:
        name: of its site below the operator: ``input.pre``, ``input.gate``, ``cell``.
        kind: ``pre`` is what enters a gate's activation function, ``gate`` what leaves it, ``state`` is handed to the
            next step, ``product`` is an operand of a matrix product within the step.
        activation: index of the activation function that makes it (ONNX ``f``, ``g``, ``h``), for ``gate``.
    """

    name: str
    kind: InnerKind
    activation: int | None = None


@dataclass(frozen=True)
class Cell:
    """A type of recurrent operator.

    Attributes:
        gates: names, in the row order of ONNX's ``W`` and ``R``.
        activations: default activation functions in ONNX order ``f``, ``g``, ``h``.
        inner: what can be quantized inside a step, in order of computation. ``hidden`` is the operator's first output.
    """

    gates: tuple[str, ...]
    activations: tuple[str, ...]
    inner: tuple[Inner, ...]

    @property
    def states(self) -> tuple[str, ...]:
        """States passed from step to step: ``hidden``, and ``cell`` for LSTM."""
        return tuple(inner.name for inner in reversed(self.inner) if inner.kind == "state")


def _gate(name: str, activation: int) -> tuple[Inner, Inner]:
    return Inner(f"{name}.pre", "pre"), Inner(f"{name}.gate", "gate", activation)


CELLS: dict[str, Cell] = {
    "RNN": Cell(("candidate",), ("Tanh",), (Inner("candidate.pre", "pre"), Inner(HIDDEN, "state"))),
    "GRU": Cell(
        ("update", "reset", "candidate"),
        ("Sigmoid", "Tanh"),
        (
            *_gate("update", 0),
            *_gate("reset", 0),
            Inner("reset.hidden", "product"),
            *_gate("candidate", 1),
            Inner(HIDDEN, "state"),
        ),
    ),
    "LSTM": Cell(
        ("input", "output", "forget", "candidate"),
        ("Sigmoid", "Tanh", "Tanh"),
        (
            *_gate("input", 0),
            *_gate("forget", 0),
            *_gate("candidate", 1),
            Inner(CELL, "state"),
            *_gate("output", 0),
            Inner("cell.gate", "gate", 2),
            Inner(UNPROJECTED, "product"),
            Inner(HIDDEN, "state"),
        ),
    ),
}

#: activation function -> the interval its values lie in
ACTIVATION_RANGES: dict[str, tuple[float, float]] = {
    "Sigmoid": (0.0, 1.0),
    "HardSigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
}


class Context(ABC):
    """Backend of a step: numpy, torch, or a writer of ONNX nodes."""

    @abstractmethod
    def quantize(self, name: str, x: Any) -> Any:
        """``x`` on the grid of the inner tensor ``name``, or as it is."""

    @abstractmethod
    def activate(self, index: int, x: Any) -> Any:
        """Activation function ``f``, ``g`` or ``h`` (0, 1, 2) of ``x``."""

    def clip(self, x: Any) -> Any:
        """``x`` within the operator's ``clip`` threshold, if it has one."""
        return x

    @abstractmethod
    def recur(self, h: Any, gates: Sequence[str]) -> Sequence[Any]:
        """``h R_g^T + Rb_g`` for each gate named, ``h`` of shape ``[batch, hidden]``."""

    def project(self, h: Any) -> Any:
        """The projected hidden state, for an LSTM with a projection; ``h`` itself otherwise."""
        return h


@dataclass(frozen=True)
class Variant:
    """Variants of the equations selected by an operator's attributes.

    Attributes:
        linear_before_reset: GRU: reset the product with ``R`` instead of the hidden state (PyTorch's GRU).
        input_forget: LSTM: the forget gate is one minus the input gate.
        projected: LSTM: the hidden state is multiplied by a projection matrix at the end of the step.
    """

    linear_before_reset: bool = False
    input_forget: bool = False
    projected: bool = False


def inner_names(op_type: str, variant: Variant = Variant()) -> tuple[str, ...]:
    """Names of the tensors that ``step`` quantizes for this variant, in order of computation."""
    names = [inner.name for inner in CELLS[op_type].inner]
    if op_type == "LSTM" and variant.input_forget:
        names = [name for name in names if not name.startswith("forget.")]
    if op_type == "LSTM" and not variant.projected:
        names.remove(UNPROJECTED)
    if op_type == "GRU" and variant.linear_before_reset:
        names.remove("reset.hidden")
    return tuple(names)


def variant_of(attrs: Mapping[str, Any]) -> Variant:
    """The variant that the attributes of an operator ask for; a missing attribute is off."""
    return Variant(*(bool(attrs.get(name)) for name in ("linear_before_reset", "input_forget", "projected")))


def inner_values(
    op: str, op_type: str, attrs: Mapping[str, Any], hidden: str | None, shape: tuple[int, ...], dtype: str
) -> tuple[dict[str, str], list[Value]]:
    """Inner tensors of a layer, as a front end records them.

    Args:
        op, op_type, attrs: name, type and attributes of the operator.
        hidden: name of its output with all steps; ``None`` where it returns only the last.
        shape: of one gate, ``[batch, hidden_size]``.
        dtype: of the layer.

    Returns:
        ``Op.inner``, and the values in it that are not output, named ``<op>.<inner name>``.
    """
    inner = {name: f"{op}.{name}" for name in inner_names(op_type, variant_of(attrs))}
    values = [
        Value(value, "activation", shape, dtype) for name, value in inner.items() if name != HIDDEN or hidden is None
    ]
    if hidden is not None:
        inner[HIDDEN] = hidden
    return inner, values


def activation_range(op_type: str, attrs: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """The interval that the inner tensor ``name`` lies in whatever the input; ``None`` where there is none."""
    cell = CELLS[op_type]
    inner = next(i for i in cell.inner if i.name == name)
    functions = attrs.get("activations") or cell.activations
    if op_type == "RNN" and name == HIDDEN:
        return ACTIVATION_RANGES.get(functions[0])
    return None if inner.activation is None else ACTIVATION_RANGES.get(functions[inner.activation])


def is_wide(op_type: str, name: str) -> bool:
    """Whether the inner tensor ``name`` has 16 bits where activations have fewer.

    The cell adds up over time, and a sum that enters a steep gate loses more in 8 bits than the gate's own output does
    (measured in ``docs/decisions/0008-recurrent.md``). Integer LSTM kernels keep both in 16 bits for the same reason.
    """
    return name == CELL or any(i.name == name and i.kind == "pre" for i in CELLS[op_type].inner)


def step(
    op_type: str,
    ctx: Context,
    x: Mapping[str, Any],
    state: Sequence[Any],
    variant: Variant = Variant(),
    peepholes: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """One time step.

    Args:
        op_type: ``RNN``, ``GRU`` or ``LSTM``.
        ctx: arithmetic and quantizers.
        x: gate -> ``x_t W_g^T + Wb_g``, shape ``[batch, hidden]``.
        state: ``(h,)``, or ``(h, c)`` for LSTM.
        variant: of the equations.
        peepholes: LSTM: gate (``input``, ``output``, ``forget``) -> ``P_g``, shape ``[hidden]``.

    Returns:
        The next state, in the order of ``state``.

    Reference: ONNX operators RNN, GRU, LSTM; Hochreiter and Schmidhuber 1997; Cho et al. 2014, arXiv:1406.1078.
    """
    return _STEPS[op_type](ctx, x, tuple(state), variant, peepholes or {})


def _activated(ctx: Context, gate: str, index: int, pre: Any) -> Any:
    return ctx.quantize(f"{gate}.gate", ctx.activate(index, ctx.quantize(f"{gate}.pre", ctx.clip(pre))))


def _rnn(ctx: Context, x: Mapping[str, Any], state: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
    (recurrent,) = ctx.recur(state[0], ("candidate",))
    pre = ctx.quantize("candidate.pre", ctx.clip(x["candidate"] + recurrent))
    return (ctx.quantize(HIDDEN, ctx.activate(0, pre)),)


def _gru(ctx: Context, x: Mapping[str, Any], state: tuple[Any, ...], variant: Variant, *_: Any) -> tuple[Any, ...]:
    (h,) = state
    if variant.linear_before_reset:
        r_update, r_reset, r_candidate = ctx.recur(h, ("update", "reset", "candidate"))
    else:
        r_update, r_reset = ctx.recur(h, ("update", "reset"))
    update = _activated(ctx, "update", 0, x["update"] + r_update)
    reset = _activated(ctx, "reset", 0, x["reset"] + r_reset)
    if variant.linear_before_reset:
        recurrent = reset * r_candidate
    else:
        (recurrent,) = ctx.recur(ctx.quantize("reset.hidden", reset * h), ("candidate",))
    candidate = _activated(ctx, "candidate", 1, x["candidate"] + recurrent)
    return (ctx.quantize(HIDDEN, (1 - update) * candidate + update * h),)


def _lstm(
    ctx: Context, x: Mapping[str, Any], state: tuple[Any, ...], variant: Variant, peepholes: Mapping[str, Any]
) -> tuple[Any, ...]:
    h, c = state
    gates = CELLS["LSTM"].gates
    products = ctx.recur(ctx.quantize(RECURRENT, h), gates)
    pre = {gate: x[gate] + product for gate, product in zip(gates, products, strict=True)}
    for gate in ("input", "forget"):
        if gate in peepholes:
            pre[gate] = pre[gate] + peepholes[gate] * c
    i = _activated(ctx, "input", 0, pre["input"])
    f = 1 - i if variant.input_forget else _activated(ctx, "forget", 0, pre["forget"])
    g = _activated(ctx, "candidate", 1, pre["candidate"])
    c = ctx.quantize(CELL, f * c + i * g)
    if "output" in peepholes:
        pre["output"] = pre["output"] + peepholes["output"] * c
    o = _activated(ctx, "output", 0, pre["output"])
    h = o * ctx.quantize("cell.gate", ctx.activate(2, c))
    if variant.projected:
        h = ctx.project(ctx.quantize(UNPROJECTED, h))
    return ctx.quantize(HIDDEN, h), c


_STEPS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
