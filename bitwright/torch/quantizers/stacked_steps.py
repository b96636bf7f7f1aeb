"""Steps of recurrent layers with their gates side by side: one operation on ``[B, gates * H]`` where there were several.

The equations are those of :func:`bitwright.core.graph.recurrence.step`, for the variants that torch has, and give the same
numbers bit for bit: sums and products are taken in the same order, and a quantizer with one scale per column rounds each
column as the quantizer of its gate would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.compiled.loops import Loops, loops
from bitwright.core.graph.recurrence import ACTIVATION_RANGES, CELL, HIDDEN
from bitwright.torch.calls.recurrent import ORDER, Sequences, StackedStep
from bitwright.torch.quantizers.devices import on_host
from bitwright.torch.quantizers.fake_quantize import grid_numbers
from bitwright.torch.quantizers.quantizer import Quantizer, side_by_side
from bitwright.torch.quantizers.sequences import NAMES, Columns, Steps, bounded, observed, ready, trained

Function = Callable[[Tensor], Tensor]
_LEAST = 256  # elements of a state from which compiled loops pay


@dataclass(frozen=True)
class OnGrid:
    """What happens to an inner tensor that has a calibrated quantizer."""

    quantizer: Quantizer

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` on its grid, in the memory of ``x`` where no gradient needs that."""
        return self.quantizer(x, overwrite=True)


@dataclass(frozen=True)
class Keep:
    """What happens to an inner tensor that is observed: it is put with those of the other steps.

    Attributes:
        steps: takes the tensors.
        columns: takes the bounds of their columns in their place, where these say all that is observed.
    """

    steps: list[Tensor]
    columns: list[Columns] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` itself, kept."""
        self.steps.append(x)
        return x


#: gate -> the interval of its values
RANGES = {
    **dict.fromkeys(("input", "forget", "output", "reset", "update"), ACTIVATION_RANGES["Sigmoid"]),
    "candidate": ACTIVATION_RANGES["Tanh"],
}


class StepFunctions(dict[str, Function]):
    """What happens to the tensors inside a step: inner name -> :class:`OnGrid`, :class:`Keep` or another function."""

    def stacked(self, cell: str, like: Tensor) -> StackedStep | None:
        """The step of a layer that is not projected, on gates in the order of :data:`bitwright.torch.calls.recurrent.ORDER`.

        Args:
            cell: ``LSTM``, ``GRU`` or ``RNN``.
            like: a hidden state, ``[B, H]``.

        Returns:
            ``None`` where the gates cannot be treated together: some have a quantizer and some have none, a format
            without the fast path, a tensor that an exporter or compiler traces, an RNN, which has one gate.
        """
        make = {"LSTM": _lstm, "GRU": _gru}.get(cell)
        if make is None or like.dtype != torch.float32:
            return None
        gates = ORDER[cell] if cell == "LSTM" else ORDER[cell][:-1]
        pre = _together([self.get(f"{gate}.pre") for gate in gates], like)
        post = _together([self.get(f"{gate}.gate") for gate in gates], like, [RANGES[gate] for gate in gates])
        return None if pre is None or post is None else make(self, pre, post, like)

    def sequence(self, cell: str, tensors: Sequence[Tensor | None], steps: Steps) -> Sequences | None:
        """All steps of a layer that is neither projected nor packed in compiled loops.

        Args:
            cell: ``LSTM``, ``GRU`` or ``RNN``.
            tensors: all that it reads, initial states at the end.
            steps: the same layer in single steps.

        Returns:
            ``None`` where there are no such loops. There are some for an LSTM whose inner tensors are observed and none is
            moved to a grid, and in training for one of which every inner tensor has a grid with one scale, fixed or learned.
        """
        like, functions = tensors[-1], [self.get(name) for name in NAMES]
        if cell != "LSTM" or like is None or like.numel() < _LEAST or (compiled := ready(tensors)) is None:
            return None
        if not torch.is_grad_enabled():
            return self._observed(compiled)
        quantizers = [f.quantizer for f in functions if isinstance(f, OnGrid)]
        grids = [q.plain_grid(like, learned=True) for q in quantizers]
        ready_made = [grid for grid in grids if grid is not None]
        if len(ready_made) < len(functions):
            return None
        return trained(ready_made, [q.learned for q in quantizers], like, compiled)(steps)

    def _observed(self, compiled: Loops) -> Sequences | None:
        """All steps of a layer whose inner tensors are observed and none is moved to a grid."""
        kept = {name: f for name, f in self.items() if isinstance(f, Keep)}
        if not 0 < len(kept) == len(self):
            return None
        steps = {name: f.steps for name, f in kept.items()}
        columns = {name: f.columns for name, f in kept.items() if f.columns is not None}
        return bounded(columns, steps, compiled) if len(columns) == len(kept) else observed(steps, compiled)


def _same(x: Tensor) -> Tensor:
    return x


def _together(
    functions: Sequence[Function | None], like: Tensor, within: Sequence[tuple[float, float]] = ()
) -> Function | None:
    """One function of all gates for one function per gate; ``None`` where they differ in kind."""
    if all(function is None for function in functions):
        return _same
    if all(isinstance(function, Keep) for function in functions):
        kept = [function.steps for function in functions if isinstance(function, Keep)]

        def keep(x: Tensor) -> Tensor:
            for steps, part in zip(kept, x.chunk(len(kept), -1), strict=True):
                steps.append(part)
            return x

        return keep
    if all(isinstance(function, OnGrid) for function in functions):
        return side_by_side([f.quantizer for f in functions if isinstance(f, OnGrid)], like, within)
    return None


def _activate(x: Tensor, split: int) -> Tensor:
    """Sigmoid of the first ``split`` columns, hyperbolic tangent of the others."""
    if x.requires_grad:
        return torch.cat([x[:, :split].sigmoid(), x[:, split:].tanh()], 1)
    out = torch.empty_like(x)
    torch.sigmoid(x[:, :split], out=out[:, :split])
    torch.tanh(x[:, split:], out=out[:, split:])
    return out


def _lstm(inside: Mapping[str, Function], pre: Function, post: Function, like: Tensor) -> StackedStep:
    compiled = _lstm_compiled(inside, like)
    if compiled is not None:
        return compiled
    hidden = like.shape[-1]
    cell_gate = _together([inside.get("cell.gate")], like, [ACTIVATION_RANGES["Tanh"]]) or inside["cell.gate"]
    cell, last = inside.get(CELL, _same), inside.get(HIDDEN, _same)

    def run(x: Tensor, recurrent: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gates = post(_activate(pre(x + recurrent), 3 * hidden))
        i, f, o, g = gates.chunk(4, -1)
        c = cell(f * state[1] + i * g)
        return last(o * cell_gate(c.tanh())), c

    return run


def _lstm_compiled(inside: Mapping[str, Function], like: Tensor) -> StackedStep | None:
    """The same step where every inner tensor has a grid with one scale and no gradient is wanted: three compiled loops."""
    functions = [inside.get(name) for name in NAMES]
    quantizers = [f.quantizer for f in functions if isinstance(f, OnGrid)]
    if torch.is_grad_enabled() or len(quantizers) < len(functions) or not on_host(like.device):
        return None
    if torch.compiler.is_dynamo_compiling() or like.numel() < _LEAST or (compiled := loops()) is None:
        return None
    grids = [quantizer.plain_grid(like) for quantizer in quantizers]
    if any(grid is None for grid in grids):
        return None
    numbers = [grid_numbers(grid) for grid in grids if grid is not None]
    split, width = 3 * like.shape[-1], like.shape[-1]
    pre, post = (
        [np.repeat(np.array(ends, np.float32), width) for ends in zip(*part, strict=True)]
        for part in (numbers[:4], numbers[4:8])
    )
    cell, bent, last = numbers[8:]

    def run(x: Tensor, recurrent: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        before = _array(state[1])
        gates, c, h = torch.empty_like(recurrent), *(torch.empty(before.shape) for _ in range(2))
        compiled.lstm_gates(_array(x), _array(recurrent), gates.numpy(), *pre)
        torch.sigmoid(gates[:, :split], out=gates[:, :split])
        torch.tanh(gates[:, split:], out=gates[:, split:])
        given = gates.numpy()
        compiled.lstm_cell(given, before, c.numpy(), *post, *cell)
        compiled.lstm_hidden(given, c.tanh().numpy(), h.numpy(), *post, *bent, *last)
        return h, c

    return run


def _array(x: Tensor) -> NDArray[np.float32]:
    """A matrix as an array whose rows lie one after the other."""
    found: NDArray[np.float32] = x.detach().contiguous().numpy()
    return found


def _gru(inside: Mapping[str, Function], pre: Function, post: Function, like: Tensor) -> StackedStep:
    hidden = like.shape[-1]
    before, gated, last = (inside.get(name, _same) for name in ("candidate.pre", "candidate.gate", HIDDEN))

    def run(x: Tensor, recurrent: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        both = 2 * hidden
        reset, update = post(pre(x[:, :both] + recurrent[:, :both]).sigmoid()).chunk(2, -1)
        candidate = gated(before(x[:, both:] + reset * recurrent[:, both:]).tanh())
        return (last((1 - update) * candidate + update * state[0]),)

    return run
