"""Recurrent layers as scans: fused torch calls become one call per layer and direction, each a loop over time.

:func:`layer` is what interception sees: one operator with the ports of ONNX's ``LSTM``, ``GRU`` and ``RNN``. It makes the
input's share of all gates for all steps in one matrix product and then runs :func:`bitwright.core.graph.recurrence.step` once
per step, with a function to call on each tensor inside it. Nothing inside it is intercepted again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.onnx.ops
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from bitwright.core.graph.recurrence import CELLS, RECURRENT, Context, Variant, step
from bitwright.errors import ExportError, ModelError
from bitwright.export.encodings.records import gate_order

#: what happens to a tensor inside the steps: inner name -> function of the tensor, which it may write over
Inside = Mapping[str, Callable[[Tensor], Tensor]]
#: a step on all gates side by side: the input's share and the product with the hidden state, ``[B, gates * H]`` each,
#: and the state -> the next state
StackedStep = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
#: all steps at once: the input's share ``[T, B, gates * H]``, ``weight_hh`` and its bias, initial states, and whether the last
#: step is the first -> what :func:`layer` returns
Sequences = Callable[[Tensor, Tensor, Tensor | None, tuple[Tensor, ...], bool], tuple[Tensor, ...]]

#: gates in the row order of torch's weights
GATES: dict[str, tuple[str, ...]] = {
    "LSTM": ("input", "forget", "candidate", "output"),
    "GRU": ("reset", "update", "candidate"),
    "RNN": ("candidate",),
}
#: gates in the order in which the steps compute: those with the same activation function next to each other
ORDER: dict[str, tuple[str, ...]] = {**GATES, "LSTM": ("input", "forget", "output", "candidate")}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": torch.relu}
_FUSED: dict[tuple[str, str], Callable[..., Any]] = {
    ("LSTM", "Tanh"): torch.lstm,
    ("GRU", "Tanh"): torch.gru,
    ("RNN", "Tanh"): torch.rnn_tanh,
    ("RNN", "Relu"): torch.rnn_relu,
}


def activations_of(cell: str, activation: str) -> tuple[str, ...]:
    """ONNX's list of activation functions of a layer whose candidate has ``activation``."""
    return {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": (activation,)}[cell]


def layer(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    batch_sizes: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    peephole: None = None,
    weight_hr: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    cell: str = "LSTM",
    activation: str = "Tanh",
    reverse: bool = False,
    place: str = "layer",
    inside: Inside | None = None,
) -> tuple[Tensor, ...]:
    """One recurrent layer in one direction.

    Args:
        input: ``[T, B, I]``, or the data ``[sum(batch_sizes), I]`` of a packed sequence.
        weight_ih, weight_hh: ``[gates * H, I]`` and ``[gates * H, H]`` (``[gates * H, R]`` with a projection), rows in the
            order of :data:`GATES`.
        bias_ih, bias_hh: ``[gates * H]`` or ``None``.
        batch_sizes: how many sequences are running at each step, falling; ``[T]`` int64 on the CPU.
        initial_h, initial_c: ``[B, R]`` and ``[B, H]``; ``R`` is ``H`` without a projection.
        peephole: torch has none; the port is ONNX's.
        weight_hr: ``[R, H]``, projection of an LSTM.
        cell: ``LSTM``, ``GRU`` or ``RNN``.
        activation: of an RNN: ``Tanh`` or ``Relu``.
        reverse: from the last step to the first.
        place: name of the layer below its module, ``l0.forward``.
        inside: functions for the tensors of a step; ``None`` lets torch's own operator do the work. Where it has a method
            ``stacked(cell, like)`` that returns a step on all gates at once, that one is taken, and before it what
            ``sequence(cell, tensors, steps)`` returns for all steps.

    Returns:
        Hidden states of all steps (``[T, B, R]``, or packed like ``input``), the last one, and for LSTM the last cell.
    """
    tensors = (input, weight_ih, weight_hh, bias_ih, initial_h, initial_c, weight_hr, bias_hh)
    if _is_seen(tensors):
        return handle_torch_function(
            layer, tensors, input, weight_ih, weight_hh, bias_ih, batch_sizes, initial_h, initial_c, peephole, weight_hr,
            bias_hh, cell=cell, activation=activation, reverse=reverse, place=place, inside=inside,
        )  # fmt: skip
    assert initial_h is not None
    states = (initial_h,) if initial_c is None else (initial_h, initial_c)
    if inside is None and weight_hr is None and not (reverse and batch_sizes is not None):
        weights = [w for w in (weight_ih, weight_hh, bias_ih, bias_hh) if w is not None]
        return _fused(_FUSED[cell, activation], input, weights, states, batch_sizes, reverse)
    once = batch_sizes is None and len(input) == 1  # a cell: nothing prepared for many steps pays
    gates = GATES[cell] if once else ORDER[cell]
    w, r = (in_order(rows, GATES[cell], gates) for rows in (weight_ih, weight_hh))
    b, rb = (None if rows is None else in_order(rows, GATES[cell], gates) for rows in (bias_ih, bias_hh))
    ctx = _Context(cell, gates, activation, r, rb, weight_hr, inside or {}, once)
    return _scan(ctx, F.linear(input, w, b), states, batch_sizes, reverse)


def _is_seen(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a function mode or a tensor subclass intercepts the call; a compiler's ``has_torch_function`` ignores modes.

    Without that question a compiled :func:`layer` would run the fused call, which is decomposed to :func:`layer` again.
    """
    return has_torch_function(tensors) or torch._C._is_torch_function_mode_enabled()


def in_order(rows: Tensor, have: Sequence[str], want: Sequence[str]) -> Tensor:
    """A weight or bias with its rows reordered gate by gate."""
    if tuple(have) == tuple(want):
        return rows
    blocks = dict(zip(have, rows.chunk(len(have)), strict=True))
    return torch.cat([blocks[gate] for gate in want])


def attributes(bound: Mapping[str, Any]) -> dict[str, Any]:
    """ONNX attributes of a call of :func:`layer`."""
    cell = bound["cell"]
    return {
        "hidden_size": int(bound["weight_ih"].shape[0]) // len(GATES[cell]),
        "direction": "reverse" if bound.get("reverse") else "forward",
        "activations": activations_of(cell, bound.get("activation", "Tanh")),
        "clip": None,
        "linear_before_reset": int(cell == "GRU"),
        "input_forget": 0,
        "layout": 0,
        "gates": GATES[cell],
        "projected": bound.get("weight_hr") is not None,
    }


# ------------------------------------------------------------------------------------------------------- the scan


class _Context(Context):
    """A step on tensors."""

    def __init__(
        self, cell: str, gates: tuple[str, ...], activation: str, weight_hh: Tensor, bias_hh: Tensor | None,
        weight_hr: Tensor | None, inside: Inside, once: bool,
    ) -> None:  # fmt: skip
        self.cell, self.inside = cell, inside
        self.variant = Variant(linear_before_reset=cell == "GRU", projected=weight_hr is not None)
        self.functions = [_FUNCTIONS[name] for name in activations_of(cell, activation)]
        self.once = once
        self.weight_hh, self.bias_hh, self.weight_hr = weight_hh, bias_hh, weight_hr
        self.gates = gates
        self._columns: Tensor | None = None

    @property
    def together(self) -> bool:
        """Whether all gates, or all steps, may be quantized in one call; it reads values, which a compiler lacks."""
        return self.weight_hr is None and not self.once and not torch.compiler.is_dynamo_compiling()

    def reading(self, weight_hh: Tensor, bias_hh: Tensor | None) -> _Context:
        """A copy of the layer with another weight and bias."""
        new = copy.copy(self)
        new.weight_hh, new.bias_hh = weight_hh, bias_hh
        new._columns = None
        return new

    def columns(self) -> Tensor:
        """The columns of ``weight_hh``, laid out once for the products of all steps.

        No ``cached_property``: its lock breaks the graph of a compiler inside a step.
        """
        if self._columns is None:
            kept = self.once or (torch.is_grad_enabled() and self.weight_hh.requires_grad)
            self._columns = self.weight_hh.t() if kept else self.weight_hh.t().contiguous()
        return self._columns

    def quantize(self, name: str, x: Tensor) -> Tensor:
        function = self.inside.get(name)
        return x if function is None else function(x)

    def quantize_steps(self, name: str, like: Tensor) -> Callable[[Tensor], Tensor]:
        """:meth:`quantize` for the tensors of all steps, which are like ``like``."""
        make = getattr(self.inside.get(name), "for_steps", None)
        found: Callable[[Tensor], Tensor] | None = None if make is None else make(like)
        return partial(self.quantize, name) if found is None else found

    def activate(self, index: int, x: Tensor) -> Tensor:
        return self.functions[index](x)

    def recur(self, h: Tensor, gates: Sequence[str]) -> Sequence[Tensor]:
        found = self.by_gate(self.product(h))
        return [found[gate] for gate in gates]

    def product(self, h: Tensor) -> Tensor:
        """``h R^T + Rb`` of all gates, ``[B, gates * H]``."""
        columns = self.columns()
        return h @ columns if self.bias_hh is None else torch.addmm(self.bias_hh, h, columns)

    def by_gate(self, x: Tensor) -> dict[str, Tensor]:
        """The columns of each gate."""
        return dict(zip(self.gates, x.chunk(len(self.gates), -1), strict=True))

    def project(self, h: Tensor) -> Tensor:
        return h if self.weight_hr is None else F.linear(h, self.weight_hr)


def _scan(
    ctx: _Context, x: Tensor, initial: tuple[Tensor, ...], batch_sizes: Tensor | None, reverse: bool
) -> tuple[Tensor, ...]:
    """Run the steps over ``x``, the input's part of the gates, ``[T, B, gates * H]`` or packed."""
    whole = None if batch_sizes is not None else _whole(ctx, x, initial, reverse)
    if whole is not None:
        return whole(x, ctx.weight_hh, ctx.bias_hh, initial, reverse)
    return _in_steps(ctx, x, initial, batch_sizes, reverse)


def _whole(ctx: _Context, x: Tensor, initial: tuple[Tensor, ...], reverse: bool) -> Sequences | None:
    """A function that computes all steps at once; ``None`` where there is none."""
    make = getattr(ctx.inside, "sequence", None) if ctx.together else None

    def steps(x: Tensor, weight_hh: Tensor, bias_hh: Tensor | None, *initial: Tensor) -> tuple[Tensor, ...]:
        return _in_steps(ctx.reading(weight_hh, bias_hh), x, initial, None, reverse)

    found: Sequences | None = None if make is None else make(ctx.cell, (x, ctx.weight_hh, ctx.bias_hh, *initial), steps)
    return found


def _in_steps(
    ctx: _Context, x: Tensor, initial: tuple[Tensor, ...], batch_sizes: Tensor | None, reverse: bool
) -> tuple[Tensor, ...]:
    sizes = None if batch_sizes is None else batch_sizes.tolist()
    shares = x.unbind() if sizes is None else x.split(sizes)
    order = range(len(shares))[:: -1 if reverse else 1]
    stacked = _gates_at_once(ctx, initial[0])
    quantize = None if stacked is None else ctx.quantize_steps(RECURRENT, initial[0])
    state, ended, hidden = initial, [], []
    if sizes is not None:
        state = _first_rows(initial, sizes[order[0]])
    for t in order:
        if sizes is not None and sizes[t] != len(state[0]):
            state, over = _resize(state, initial, sizes[t])
            ended.extend(over)
        if stacked is not None and quantize is not None:
            state = stacked(shares[t], ctx.product(quantize(state[0])), state)
        else:
            state = step(ctx.cell, ctx, ctx.by_gate(shares[t]), state, ctx.variant)
        hidden.append(state[0])
    if reverse:
        hidden.reverse()
    if ended:  # sequences that ended early stand after those that ended later
        state = tuple(map(torch.cat, zip(state, *reversed(ended), strict=True)))
    return (torch.stack(hidden) if sizes is None else torch.cat(hidden), *state)


def _gates_at_once(ctx: _Context, like: Tensor) -> StackedStep | None:
    """A step that quantizes its gates side by side; ``None`` where there is none."""
    make = getattr(ctx.inside, "stacked", None) if ctx.together else None
    return None if make is None else make(ctx.cell, like)


def _first_rows(state: tuple[Tensor, ...], size: int) -> tuple[Tensor, ...]:
    return tuple(s[:size] for s in state)


def _resize(
    state: tuple[Tensor, ...], initial: tuple[Tensor, ...], size: int
) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, ...]]]:
    """``state`` for ``size`` running sequences, and the final states of those that have ended."""
    rows = len(state[0])
    if size < rows:
        return tuple(s[:size] for s in state), [tuple(s[size:] for s in state)]
    return tuple(torch.cat([s, start[rows:size]]) for s, start in zip(state, initial, strict=True)), []


def _fused(
    function: Callable[..., Any], x: Tensor, weights: list[Tensor], initial: tuple[Tensor, ...],
    batch_sizes: Tensor | None, reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the layer by torch's own operator."""
    given = [s.unsqueeze(0) for s in initial]
    hx: Any = given if len(given) > 1 else given[0]
    options = (weights, len(weights) == 4, 1, 0.0, False, False)
    if batch_sizes is not None:
        out, *last = function(x, batch_sizes, hx, *options)
    else:
        out, *last = function(x.flip(0) if reverse else x, hx, *options, False)
    return (out.flip(0) if reverse else out, *(s.squeeze(0) for s in last))


# ---------------------------------------------------------------------------------------------------- for export

#: port of a weight -> ONNX's name for it; a projection has none there
WEIGHT_PORTS = {1: "W", 2: "R", 8: "projection"}


def onnx_rows(cell: str) -> tuple[int, ...]:
    """For each gate of ONNX's order, its index in torch's weights."""
    return gate_order(GATES[cell], CELLS[cell].gates)


def _onnx(cell: str, weight: Tensor) -> Tensor:
    """A weight or bias in ONNX's order of gates, with the axis of directions."""
    parts = weight.chunk(len(GATES[cell]))
    return torch.cat([parts[i] for i in onnx_rows(cell)]).unsqueeze(0)


def _in_front(x: Tensor | None) -> Tensor | None:
    """Insert a first axis of length 1."""
    return None if x is None else x.unsqueeze(0)


def marked_layer(
    input: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, batch_sizes: Tensor | None,
    initial_h: Tensor, initial_c: Tensor | None, peephole: None, weight_hr: Tensor | None, bias_hh: Tensor | None,
    *, cell: str, activation: str, reverse: bool, place: str, inside: None = None,
    mark: Callable[[Tensor, str], Tensor], weights: Mapping[int, str], sites: Mapping[str, str],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The layer as the exporter sees it: a node of ONNX's inputs, outputs and attributes in the domain ``bitwright``.

    Args: those of :func:`layer`; ``mark`` puts a site's name on a tensor, ``weights`` are the sites of the weights by port,
        ``sites`` those inside a step. See :mod:`bitwright.export.recurrent`.
    """
    if batch_sizes is not None:
        raise ExportError(
            f"{place} ({cell})",
            "it reads a packed sequence, whose layout is computed from the values of the lengths",
            "export the model with padded input: pass the padded tensor to the layer and mask its outputs",
        )
    given = {1: _onnx(cell, weight_ih), 2: _onnx(cell, weight_hh), 8: _in_front(weight_hr)}
    w, r, p = (mark(x, weights[port]) if x is not None and port in weights else x for port, x in given.items())
    bias = None
    if bias_ih is not None and bias_hh is not None:
        bias = torch.cat([_onnx(cell, bias_ih), _onnx(cell, bias_hh)], 1)
    inputs = [input, w, r, bias, None, _in_front(initial_h), _in_front(initial_c), None, p]
    while inputs[-1] is None:
        inputs.pop()
    attrs: dict[str, Any] = {
        "hidden_size": weight_hh.shape[0] // len(GATES[cell]),
        "direction": "reverse" if reverse else "forward",
        "activations": list(activations_of(cell, activation)),
    }
    if cell == "GRU":
        attrs["linear_before_reset"] = 1
    if sites:
        attrs["inner_sites"] = [f"{name}={site}" for name, site in sites.items()]
    last = [s.unsqueeze(0).shape for s in (initial_h, initial_c) if s is not None]
    y, *rest = torch.onnx.ops.symbolic_multi_out(
        f"bitwright::{cell}", inputs, attrs=attrs, dtypes=[input.dtype] * (1 + len(last)),
        shapes=[(input.shape[0], *last[0]), *last], version=1,
    )  # fmt: skip
    return (y.squeeze(1), *(s.squeeze(0) for s in rest))


# --------------------------------------------------------------------------------- the fused calls as their layers


@dataclass(frozen=True)
class _Stack:
    """The arguments of ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``, of both overloads."""

    input: Tensor
    hx: tuple[Tensor, ...]
    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    batch_sizes: Tensor | None = None

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def weights(self, index: int) -> dict[str, Tensor]:
        """Arguments of :func:`layer` that are parameters, of the layer and direction ``index``."""
        count = len(self.params) // (self.num_layers * self.directions)
        names = ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.has_biases else ()), "weight_hr"]
        return dict(zip(names, self.params[index * count : (index + 1) * count], strict=False))


_OPTIONS = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", "hx", *_OPTIONS, "batch_first")
_PACKED = ("data", "batch_sizes", "hx", *_OPTIONS)


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Stack:
    packed = "batch_sizes" in kwargs or (len(args) > 3 and not isinstance(args[3], bool))
    bound = {**dict(zip(_PACKED if packed else _PADDED, args, strict=False)), **kwargs}
    hx = bound["hx"]
    bound["hx"] = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    if packed:
        bound["input"] = bound.pop("data")
    return _Stack(**bound)


def _stacked(cell: str, activation: str, fused: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = _read(args, kwargs)
        time = 1 if call.batch_first else 0
        if call.batch_sizes is None and call.input.shape[time] == 0:
            with torch._C.DisableTorchFunction():
                return fused(*args, **kwargs)  # torch's own refusal of an empty sequence
        return _run_stack(call, cell, activation)

    return run


def _run_stack(call: _Stack, cell: str, activation: str) -> tuple[Tensor, ...]:
    """All layers and directions: each reads the one before, directions side by side."""
    _check_states(call, cell)
    x = call.input.transpose(0, 1) if call.batch_first else call.input
    finals: list[tuple[Tensor, ...]] = []
    for number in range(call.num_layers):
        outputs = []
        for direction in range(call.directions):
            index = number * call.directions + direction
            y, *last = _one(call, cell, activation, x, index, direction == 1)
            outputs.append(y)
            finals.append(tuple(last))
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if call.dropout and call.train and number < call.num_layers - 1:
            x = F.dropout(x, call.dropout, True)
    if call.batch_first:
        x = x.transpose(0, 1)
    return (x, *(torch.stack(parts) for parts in zip(*finals, strict=True)))


def _one(call: _Stack, cell: str, activation: str, x: Tensor, index: int, reverse: bool) -> tuple[Tensor, ...]:
    weights = call.weights(index)
    initial = [s[index] for s in call.hx]
    place = f"l{index // call.directions}.{'reverse' if reverse else 'forward'}"
    return layer(
        x, weights["weight_ih"], weights["weight_hh"], weights.get("bias_ih"), call.batch_sizes, initial[0],
        initial[1] if len(initial) > 1 else None, None, weights.get("weight_hr"), weights.get("bias_hh"),
        cell=cell, activation=activation, reverse=reverse, place=place,
    )  # fmt: skip


def _check_states(call: _Stack, cell: str) -> None:
    """Refuse states that would broadcast; modules check this, functions do not."""
    batch = int(call.batch_sizes[0]) if call.batch_sizes is not None else call.input.shape[0 if call.batch_first else 1]
    first = call.weights(0)
    sizes = [first["weight_hh"].shape[1], first["weight_hh"].shape[0] // len(GATES[cell])]
    for name, state, size in zip(("hidden", "cell"), call.hx, sizes, strict=False):
        expected = (call.num_layers * call.directions, batch, size)
        if tuple(state.shape) != expected:
            raise ModelError(
                cell,
                f"the initial {name} state has shape {tuple(state.shape)}, and the layer needs {expected}",
                "give one state per layer and direction, for every sequence of the batch",
            )


def _celled(cell: str, activation: str, fused: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:  # fmt: skip
        h, c = (hx, None) if isinstance(hx, Tensor) else hx
        if any(len(s) != len(input) for s in (h, c) if s is not None):
            with torch._C.DisableTorchFunction():
                return fused(input, hx, w_ih, w_hh, b_ih, b_hh)  # torch's own refusal of another batch
        _, *last = layer(
            input.unsqueeze(0), w_ih, w_hh, b_ih, None, h, c, None, None, b_hh,
            cell=cell, activation=activation, place=fused.__name__,
        )  # fmt: skip
        return tuple(last) if len(last) > 1 else last[0]

    return run


_Calls = dict[Callable[..., Any], tuple[str, str]]

#: fused calls of whole stacks of layers -> (cell, activation)
STACKS: _Calls = {
    torch.lstm: ("LSTM", "Tanh"),
    torch.gru: ("GRU", "Tanh"),
    torch.rnn_tanh: ("RNN", "Tanh"),
    torch.rnn_relu: ("RNN", "Relu"),
}
#: fused calls of single steps
CELL_CALLS: _Calls = {
    torch.lstm_cell: ("LSTM", "Tanh"),
    torch.gru_cell: ("GRU", "Tanh"),
    torch.rnn_tanh_cell: ("RNN", "Tanh"),
    torch.rnn_relu_cell: ("RNN", "Relu"),
}


def decompositions() -> Iterator[tuple[Any, Callable[..., Any], bool]]:
    """``(fused call, replacement, whether it is a single step)``."""
    for function, (cell, activation) in STACKS.items():
        yield function, _stacked(cell, activation, function), False
    for function, (cell, activation) in CELL_CALLS.items():
        yield function, _celled(cell, activation, function), True
