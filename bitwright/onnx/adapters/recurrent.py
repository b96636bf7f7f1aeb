"""RNN, GRU and LSTM nodes as functions of torch tensors: what gradients flow through; ONNX Runtime has none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.algorithms.rounding.program import Quantize
from bitwright.core.graph.recurrence import CELLS, Context, Variant, step, variant_of
from bitwright.export.qdq.markers import DOMAIN
from bitwright.export.recurrent.activations import Activation, layer_activations, unknown_activation
from bitwright.export.recurrent.layers import INITIAL_C, INITIAL_H, LENGTHS, PROJECTION, B, P, R, W, X, inner_sites

_FUNCTIONS: Mapping[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "Relu": lambda x, *_: x.relu(),
    "Tanh": lambda x, *_: x.tanh(),
    "Sigmoid": lambda x, *_: x.sigmoid(),
    "Softsign": lambda x, *_: F.softsign(x),
    "Softplus": lambda x, *_: F.softplus(x),
    "LeakyRelu": lambda x, alpha, _: F.leaky_relu(x, alpha),
    "ThresholdedRelu": lambda x, alpha, _: torch.where(x > alpha, x, 0.0),
    "HardSigmoid": lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    "Elu": lambda x, alpha, _: F.elu(x, alpha),
    "Affine": lambda x, alpha, beta: alpha * x + beta,
    "ScaledTanh": lambda x, alpha, beta: alpha * (beta * x).tanh(),
}


@dataclass(frozen=True)
class RecurrentLayer:
    """One direction of a recurrent node.

    Attributes:
        cell: ``RNN``, ``GRU`` or ``LSTM``.
        activations: of the node, alpha and beta filled in.
        variant: of the equations.
        sites: inner tensor -> site.
        there: ports of the inputs that the node has, in order.
        outputs: places of the outputs that it has.
        reverse, batch_first, clip: attributes of the node.
    """

    cell: str
    activations: tuple[Activation, ...]
    variant: Variant
    sites: Mapping[str, str]
    there: tuple[int, ...]
    outputs: tuple[int, ...]
    reverse: bool
    batch_first: bool
    clip: float | None

    @classmethod
    def of(cls, node: ir.Node) -> RecurrentLayer | None:
        """The layer that ``node`` is; ``None`` where it is none of one direction with activation functions that are known."""
        if node.op_type not in CELLS or node.domain not in ("", DOMAIN):
            return None
        attrs = {a.name: a.value for a in node.attributes.values() if not a.is_ref()}
        direction = str(attrs.get("direction", "forward"))
        if direction == "bidirectional" or unknown_activation(node.op_type, attrs) is not None:
            return None
        there = tuple(port for port, value in enumerate(node.inputs) if value is not None)
        return cls(
            node.op_type,
            layer_activations(node.op_type, attrs),
            replace(variant_of(attrs), projected=PROJECTION in there),
            inner_sites(node),
            there,
            tuple(i for i, value in enumerate(node.outputs) if value.name),
            direction == "reverse",
            bool(attrs.get("layout")),
            attrs.get("clip") or None,
        )

    def real(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the node makes of its inputs, in float."""
        return self._run(tensors, {})

    def inside(self, tensors: Sequence[Tensor], quantize: Quantize) -> list[Tensor]:
        """The same with every inner tensor that has a site given to ``quantize``."""
        return self._run(tensors, {name: partial(quantize, site) for name, site in self.sites.items()})

    def _run(self, tensors: Sequence[Tensor], inside: Mapping[str, Callable[[Tensor], Tensor]]) -> list[Tensor]:
        given: list[Any] = [None] * 9
        for port, tensor in zip(self.there, tensors, strict=True):
            given[port] = tensor
        if self.batch_first:
            given = [
                t.transpose(0, 1) if i in (X, INITIAL_H, INITIAL_C) and t is not None else t
                for i, t in enumerate(given)
            ]
        context = _Context(self, given, inside)
        states = self._scan(context, context.enter(given[X]), context.begin(given), given[LENGTHS])
        return [states[i].movedim(-2, 0) if self.batch_first else states[i] for i in self.outputs]

    def _scan(
        self, context: _Context, entered: Mapping[str, Tensor], state: tuple[Tensor, ...], lengths: Tensor | None
    ) -> list[Tensor]:
        """All hidden states ``[steps, 1, batch, hidden]`` and the last of every state ``[1, batch, hidden]``."""
        count = len(next(iter(entered.values())))
        hidden: list[Tensor] = [state[0]] * count
        for t in reversed(range(count)) if self.reverse else range(count):
            x = {gate: rows[t] for gate, rows in entered.items()}
            found = step(self.cell, context, x, state, self.variant, context.peepholes)
            hidden[t] = found[0]
            if lengths is not None:  # after its end a sequence keeps its state and returns zeros
                on = (lengths > t)[:, None]
                hidden[t] = torch.where(on, found[0], 0.0)
                found = tuple(torch.where(on, new, old) for new, old in zip(found, state, strict=True))
            state = found
        return [torch.stack(hidden)[:, None], *(last[None] for last in state)]


class _Context(Context):
    """The arithmetic of one run of a layer."""

    def __init__(
        self, layer: RecurrentLayer, given: Sequence[Any], inside: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> None:
        self._layer, self._inside = layer, inside
        self._gates = CELLS[layer.cell].gates
        self._weight, self._projection = given[W][0], given[PROJECTION]
        self._entering, recurrent = _halves(given[B])
        self._rows = dict(zip(self._gates, given[R][0].chunk(len(self._gates)), strict=True))
        count = len(self._gates)
        parts: Sequence[Tensor | None] = [None] * count if recurrent is None else recurrent.chunk(count)
        self._biases = dict(zip(self._gates, parts, strict=True))
        thirds = () if given[P] is None else given[P][0].chunk(3)
        self.peepholes = dict(zip(("input", "output", "forget"), thirds, strict=False))

    def enter(self, x: Tensor) -> dict[str, Tensor]:
        """Gate -> what the inputs of all steps add to it, ``[steps, batch, hidden]``."""
        rows = F.linear(x, self._weight, self._entering).chunk(len(self._gates), -1)
        return dict(zip(self._gates, rows, strict=True))

    def begin(self, given: Sequence[Any]) -> tuple[Tensor, ...]:
        """The state before the first step; zeros where none is given."""
        x, rows = given[X], next(iter(self._rows.values()))
        sizes = (rows.shape[1], rows.shape[0])[: 2 if self._layer.cell == "LSTM" else 1]
        ports = (INITIAL_H, INITIAL_C)
        return tuple(
            x.new_zeros(x.shape[1], size) if given[port] is None else given[port][0]
            for port, size in zip(ports, sizes, strict=False)
        )

    def quantize(self, name: str, x: Tensor) -> Tensor:
        return self._inside[name](x) if name in self._inside else x

    def activate(self, index: int, x: Tensor) -> Tensor:
        function = self._layer.activations[index]
        return _FUNCTIONS[function.name](x, function.alpha, function.beta)

    def clip(self, x: Tensor) -> Tensor:
        return x if self._layer.clip is None else x.clamp(-self._layer.clip, self._layer.clip)

    def recur(self, h: Tensor, gates: Sequence[str]) -> list[Tensor]:
        return [F.linear(h, self._rows[gate], self._biases[gate]) for gate in gates]

    def project(self, h: Tensor) -> Tensor:
        return h if self._projection is None else F.linear(h, self._projection[0])


def _halves(biases: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The bias of what enters a step, and of what comes from the one before."""
    if biases is None:
        return None, None
    entering, recurrent = biases[0].chunk(2)
    return entering, recurrent
