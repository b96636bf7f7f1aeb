"""Fast recurrent layers with the same results: steps with gates side by side, and whole LSTMs in compiled loops.

The compiled loops serve an LSTM while its inner tensors are observed, and with a gradient. What the gradient needs is kept in
one tensor per kind for all steps, where autograd keeps every operation of every step; the gradient of the weights is one
product over all of them.

A step with its gates side by side is one operation on ``[B, gates * H]`` where there were several. The equations are those of
:func:`bitwright.core.graph.recurrence.step`, for the variants that torch has, and give the same numbers bit for bit: sums and
products are taken in the same order, and a quantizer with one scale per column rounds each column as the quantizer of its
gate would.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitwright.core.compiled.counting import NO_KEY, values_of_keys
from bitwright.core.compiled.loops import Loops, loops
from bitwright.core.graph.recurrence import ACTIVATION_RANGES, CELL, HIDDEN, RECURRENT
from bitwright.torch.calls.recurrent import ORDER, Sequences, StackedStep
from bitwright.torch.quantizers.fake_quantize import Grid, codes_from_to, grid_numbers, is_plain, on_host
from bitwright.torch.quantizers.learned_range import LearnedRange, Scaling
from bitwright.torch.quantizers.quantizer import Quantizer, side_by_side

Floats = NDArray[np.float32]
Keys = NDArray[np.int32]
_PRE, _GATE = ([f"{gate}.{kind}" for gate in ORDER["LSTM"]] for kind in ("pre", "gate"))
_GROUPS = (_PRE, _GATE, [CELL], ["cell.gate"])
#: the tensors inside a step, in the order in which they are kept
NAMES = (*_PRE, *_GATE, CELL, "cell.gate", HIDDEN)


def ready(tensors: Sequence[Tensor | None]) -> Loops | None:
    """The compiled loops, if they apply to a layer with these tensors."""
    given = [x for x in tensors if x is not None]
    if torch.compiler.is_dynamo_compiling() or any(not is_plain(x) or x.dtype != torch.float32 for x in given):
        return None
    return loops() if all(on_host(x.device) for x in given) else None


@dataclass(frozen=True)
class Columns:
    """Bounds of every column of a tensor of ``rows`` rows, float32, ``[H]``; all finite."""

    lo: Floats
    hi: Floats
    rows: int


def observed(kept: Mapping[str, list[Tensor]], compiled: Loops) -> Sequences:
    """Run a layer in float, and return the tensors of :data:`NAMES` that are kept, for all steps: ``[T * B, H]``."""
    return partial(_observe, kept, compiled)


def bounded(columns: Mapping[str, list[Columns]], kept: Mapping[str, list[Tensor]], compiled: Loops) -> Sequences:
    """Run a layer in float, and return bounds of columns, computed while a step is in the cache.

    Where a value is not finite, nothing is put into ``columns``, and the tensors themselves into ``kept``.
    """
    return partial(_bound, columns, kept, compiled)


def _observe(
    kept: Mapping[str, list[Tensor]], compiled: Loops, x: Tensor, weight_hh: Tensor, bias_hh: Tensor | None,
    initial: tuple[Tensor, ...], reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    run = _Run(kept, (), compiled, len(x), initial)
    run(x, _Product(weight_hh.detach().t().contiguous(), bias_hh, len(initial[1])), reverse)
    for name, values in run.values().items():
        if name in kept:
            kept[name].append(values.reshape(-1, values.shape[-1]))
    # in memory of their own: what is kept must not change with them
    return (run.hidden.flip(0) if reverse else run.hidden.clone()), *run.last()


def _bound(
    columns: Mapping[str, list[Columns]], kept: Mapping[str, list[Tensor]], compiled: Loops, x: Tensor,
    weight_hh: Tensor, bias_hh: Tensor | None, initial: tuple[Tensor, ...], reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    run = _Run((), columns, compiled, len(x), initial)
    run(x, _Product(weight_hh.detach().t().contiguous(), bias_hh, len(initial[1])), reverse)
    found = run.columns()
    if not all(np.isfinite([found[name].lo, found[name].hi]).all() for name in columns):
        return _observe(kept, compiled, x, weight_hh, bias_hh, initial, reverse)
    for name, into in columns.items():
        into.append(found[name])
    return (run.hidden.flip(0) if reverse else run.hidden), *run.last()


class _Run:
    """A layer in float, once over a sequence.

    The gates stand side by side as in single steps: of rows that lie otherwise torch computes other last bits of a sigmoid.

    Args:
        kept: which of :data:`NAMES` are wanted for all steps.
        seen: of which the bounds of columns are wanted.
        compiled: the loops.
        steps: of the sequence.
        initial: hidden and cell state, ``[B, H]``.

    Attributes:
        hidden: hidden states of all steps, ``[T, B, H]``, in the order in which they were computed.
    """

    def __init__(
        self, kept: Container[str], seen: Container[str], compiled: Loops, steps: int, initial: tuple[Tensor, ...]
    ) -> None:  # fmt: skip
        batch, width = initial[1].shape
        self.steps, self.compiled, self.initial = steps, compiled, initial[0].detach()
        self.sums, self.gates = (torch.empty(batch, 4 * width) for _ in range(2))
        self.cells, self.bent = torch.empty(2, batch, width), torch.empty(batch, width)
        self.hidden = torch.empty(steps, batch, width)
        self.cells[0] = initial[1]
        self.keys = np.full((2, len(NAMES) * width), NO_KEY, np.int32)
        self.keys[1] = ~NO_KEY
        self.wanted = [[any(name in names for name in group) for group in _GROUPS] for names in (kept, seen)]
        self.kept = [
            torch.empty(len(group), steps if wanted else 0, batch, width)
            for group, wanted in zip(_GROUPS, self.wanted[0], strict=True)
        ]

    def __call__(self, x: Tensor, product: _Product, reverse: bool) -> None:
        """Run; ``x`` is the input's share of the gates."""
        sums, gates, width, shares = self.sums, self.gates, self.bent.shape[1], x.detach().unbind()
        curved, straight = sums[:, : 3 * width], sums[:, 3 * width :]
        gated, output, candidate = (gates[:, : 3 * width], gates[:, 2 * width : 3 * width], gates[:, 3 * width :])
        h, compiled, watched, after = self.initial, self.compiled, self._watched(), 0
        cells, hidden = self.cells.unbind(), self.hidden.unbind()
        given, states = _array(gates), _array(self.cells)
        for n, t in enumerate(_order(self.steps, reverse)):
            before, after = after, 1 - after
            torch.add(shares[t], product(h), out=sums)
            torch.sigmoid(curved, out=gated)
            torch.tanh(straight, out=candidate)
            compiled.lstm_next(given, states, before, after)
            torch.tanh(cells[after], out=self.bent)
            h = torch.mul(output, self.bent, out=hidden[n])
            for bits, lo, hi in watched:
                compiled.keys_by_column(bits, after % bits.shape[0], lo, hi)
            if any(self.wanted[0]):
                self._keep(n, cells[after])
        self.final = h, cells[after]

    def _keep(self, n: int, cell: Tensor) -> None:
        """Store the tensors of a step with those of the others."""
        for x, places, wanted in zip(self._made(cell), self.kept, self.wanted[0], strict=True):
            if wanted:
                places[:, n] = x.reshape(len(x), places.shape[0], -1).transpose(0, 1)

    def _made(self, cells: Tensor) -> tuple[Tensor, ...]:
        """The buffers into which a step writes each group of tensors."""
        return self.sums, self.gates, cells, self.bent

    def _watched(self) -> list[tuple[Keys, Keys, Keys]]:
        """Results of a step whose bounds are needed, ``[places, B, columns]``, and their keys."""
        found, first, width = [], 0, self.bent.shape[1]
        for x, group, wanted in zip(self._made(self.cells), _GROUPS, self.wanted[1], strict=True):
            last = first + len(group) * width
            if wanted:
                bits = _array(x).view(np.int32).reshape(-1, len(self.bent), last - first)
                found.append((bits, self.keys[0, first:last], self.keys[1, first:last]))
            first = last
        return found

    def last(self) -> tuple[Tensor, Tensor]:
        """The last hidden and the last cell state."""
        return self.final[0].clone(), self.final[1].clone()

    def values(self) -> dict[str, Tensor]:
        """The tensors of all steps by name; empty for those that are not kept."""
        return dict(zip(NAMES, (*(x for group in self.kept for x in group), self.hidden), strict=True))

    def columns(self) -> dict[str, Columns]:
        """Bounds by name; undefined for those that were not requested."""
        width = self.hidden.shape[-1]
        hidden = _array(self.hidden).view(np.int32).reshape(1, -1, width)
        self.compiled.keys_by_column(hidden, 0, self.keys[0, -width:], self.keys[1, -width:])
        lo, hi = values_of_keys(self.keys).reshape(2, len(NAMES), width)
        return {name: Columns(lo[i], hi[i], hidden.shape[1]) for i, name in enumerate(NAMES)}


class _Product:
    """``h R^T + Rb``, always in the same memory."""

    def __init__(self, columns: Tensor, bias: Tensor | None, batch: int) -> None:
        self.columns, self.bias = columns, None if bias is None else bias.detach()
        self.room = torch.empty(batch, columns.shape[1])

    def __call__(self, h: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(h, self.columns, out=self.room)
        return torch.addmm(self.bias, h, self.columns, out=self.room)


def _order(steps: int, reverse: bool) -> range:
    return range(steps)[:: -1 if reverse else 1]


def _array(x: Tensor) -> Floats:
    found: Floats = x.detach().contiguous().numpy()
    return found


# ------------------------------------------------------------------------------------------------------- training


#: the same layer step by step in operations that autograd knows: share, ``weight_hh``, its bias, initial states -> its results
Steps = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Learned:
    """A learned range inside a layer.

    Attributes:
        place: in :data:`NAMES`.
        range: with one scale.
        numbers: scale and ends of its grid, and where its values begin and end.
        scaling: of its gradients.
    """

    place: int
    range: LearnedRange
    numbers: tuple[np.float32, ...]
    scaling: Scaling


@dataclass(frozen=True)
class _Grids:
    """Grids of the quantizers inside a layer for compiled loops: before and after the gates, and of the states."""

    pre: Floats
    post: Floats
    states: Floats
    learned: Sequence[_Learned]

    @property
    def parameters(self) -> tuple[Tensor | None, Tensor | None]:
        """Parameters of the learned ranges: ``log_scale`` of all, ``offset`` where there is one."""
        offsets: list[Tensor] = [one.range.offset for one in self.learned if one.range.offset is not None]
        scales: list[Tensor] = [one.range.log_scale for one in self.learned]
        return torch.stack(scales) if scales else None, torch.stack(offsets) if offsets else None


def trained(
    grids: Sequence[Grid], learned: Sequence[LearnedRange | None], like: Tensor, compiled: Loops
) -> Callable[[Steps], Sequences]:
    """Run a layer with a gradient.

    Args:
        grids: of :data:`NAMES`, each with one scale.
        learned: of the same; ``None`` for a fixed range.
        like: a state, ``[B, H]``.
        compiled: the loops.

    Returns:
        Of the layer in single steps, which a gradient of the gradient is taken of, the function.
    """
    numbers = np.array([(*grid_numbers(grid), *codes_from_to(grid)) for grid in grids], np.float32)
    pre, post = (np.ascontiguousarray(np.repeat(part.T, like.shape[-1], 1)) for part in (numbers[:4], numbers[4:8]))
    training = [
        _Learned(place, found, tuple(numbers[place]), found.scaling(like, False))
        for place, found in enumerate(learned)
        if found is not None
    ]
    made = _Grids(pre, post, numbers[8:], training)
    return lambda steps: partial(_train, made, compiled, steps)


def _train(
    grids: _Grids, compiled: Loops, steps: Steps, x: Tensor, weight_hh: Tensor, bias_hh: Tensor | None,
    initial: tuple[Tensor, ...], reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    function = _TrainedOnce if grids.learned else _Trained
    found: tuple[Tensor, ...] = function.apply(
        x, weight_hh, bias_hh, *initial, *grids.parameters, grids, compiled, steps, reverse
    )
    return found


class _Trained(torch.autograd.Function):
    """All steps of a layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_hh: Tensor, bias_hh: Tensor | None, h: Tensor, c: Tensor, log_scale: Tensor | None,
        offset: Tensor | None, grids: _Grids, compiled: Loops, steps: Steps, reverse: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        count, (batch, width) = len(x), c.shape
        gates, marks = (torch.empty(count, batch, 4 * width), torch.empty(count, batch, 4 * width, dtype=torch.uint8))
        cells, hidden = (torch.empty(count + 1, batch, width) for _ in range(2))
        bent = torch.empty(count, batch, width)
        # ranges in front of the gates read their sums again when they train
        kept = any(one.place < len(_PRE) for one in grids.learned)
        sums = torch.empty(count if kept else 1, 4, batch, width)
        cells[0], hidden[0] = c, h
        arrays = (_array(x), sums.numpy(), gates.numpy(), marks.numpy(), cells.numpy(), bent.numpy(), hidden.numpy())
        shares, totals, after, passed, states, tanh, given = arrays
        product = _Product(weight_hh.t(), bias_hh, batch)
        cell, tanh_grid, last = (tuple(row[:3]) for row in grids.states)
        for n, t in enumerate(_order(count, reverse)):
            total = totals[n if kept else 0]
            compiled.lstm_gates_marked(shares[t], product(hidden[n]).numpy(), after[n], passed[n], total, *grids.pre)
            torch.sigmoid(gates[n, :, : 3 * width], out=gates[n, :, : 3 * width])
            torch.tanh(gates[n, :, 3 * width :], out=gates[n, :, 3 * width :])
            compiled.lstm_cell(after[n], states[n], states[n + 1], *grids.post[:3], *cell)
            torch.tanh(cells[n + 1], out=bent[n])
            compiled.lstm_hidden(after[n], tanh[n], given[n + 1], *grids.post[:3], *tanh_grid, *last)
        ctx.save_for_backward(x, weight_hh, bias_hh, h, c, gates, marks, cells, bent, hidden, sums)
        ctx.made = grids, compiled, steps, reverse
        return (hidden[1:].flip(0) if reverse else hidden[1:].clone()), hidden[-1].clone(), cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            found = _by_steps(ctx, grads)
        else:
            found = _gradients(ctx, *grads)
        return (*found, None, None, None, None)


def _gradients(ctx: Any, grad: Tensor, grad_last: Tensor, grad_cell: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the input's part of the gates, the weight, its bias, the initial states and the range parameters."""
    _, weight_hh, bias_hh, _, _, gates, marks, cells, bent, hidden, sums = ctx.saved_tensors
    grids, compiled, _, reverse = ctx.made
    inner, carried = grad_last.clone(memory_format=torch.contiguous_format), _array(grad_cell).copy()
    given = torch.empty_like(gates)
    outer = grad.contiguous().numpy()
    after, passed, states, tanh = gates.numpy(), marks.numpy(), cells.numpy(), bent.numpy()
    result, order = given.numpy(), _order(len(gates), reverse)
    ranges = _Ranges(grids.learned, bent.shape[-1], compiled)
    on_grid, received, moved, passed_on = (np.empty((n, *bent.shape[1:]), np.float32) for n in (5, len(NAMES), 2, 2))
    for n in reversed(range(len(gates))):
        t, known = order[n], (grids.post, grids.states)
        np.add(outer[t], inner.numpy(), out=received[-1])
        compiled.lstm_states_backward(
            carried, after[n], states[n], tanh[n], *known, on_grid, received, moved, passed_on
        )
        compiled.lstm_gates_backward(
            after[n], passed[n], states[n], grids.post, on_grid, passed_on, received, carried, result[t]
        )
        ranges.add(received, sums[n % len(sums)].numpy(), after[n], moved, tanh[n])
        torch.mm(given[t], weight_hh, out=inner)
    flat, before = given.flatten(0, 1), (hidden[:-1].flip(0) if reverse else hidden[:-1]).flatten(0, 1)
    weight = flat.t() @ before if ctx.needs_input_grad[1] else None
    bias = flat.sum(0) if bias_hh is not None and ctx.needs_input_grad[2] else None
    return given, weight, bias, inner, torch.from_numpy(carried), *ranges.gradients()


class _Ranges:
    """Gradients of the learned ranges, summed over the steps."""

    def __init__(self, learned: Sequence[_Learned], width: int, compiled: Loops) -> None:
        self.learned, self.compiled = learned, compiled
        self.slopes, self.outside = (np.zeros((len(learned), width), np.float32) for _ in range(2))

    def add(self, received: Floats, *given: Floats) -> None:
        """Add the gradients of a step: those by the quantizers' outputs, and the inputs that :func:`_given_to` reads."""
        for one, slope, outside in zip(self.learned, self.slopes, self.outside, strict=True):
            x = _given_to(one.place, *given)
            self.compiled.range_by_column(received[one.place], x, slope, outside, *one.numbers)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of :attr:`_Grids.parameters`, by formulas of :mod:`bitwright.torch.quantizers.learned_range`."""
        to_scale, to_offset = [], []
        slopes, outside = (sums.sum(1, np.float64) for sums in (self.slopes, self.outside))
        for one, slope, clipped in zip(self.learned, slopes, outside, strict=True):
            by_log_scale, by_offset = one.scaling.slopes(float(one.numbers[0]))
            to_scale.append(by_log_scale * slope)
            if one.range.with_offset:
                to_offset.append(by_offset * clipped)
        made = (torch.tensor(found, dtype=torch.float32) if found else None for found in (to_scale, to_offset))
        return next(made), next(made)


def _given_to(place: int, sums: Floats, gates: Floats, moved: Floats, tanh: Floats) -> Floats:
    """Input of a quantizer in a step: one of :data:`NAMES`, by index."""
    if place < len(_PRE):
        return sums[place]
    if place < len(_PRE) + len(_GATE):
        first = (place - len(_PRE)) * tanh.shape[1]
        return np.ascontiguousarray(gates[:, first : first + tanh.shape[1]])
    return {CELL: moved[0], HIDDEN: moved[1]}.get(NAMES[place], tanh)


def _by_steps(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of a layer with fixed ranges by autograd over single steps, and so differentiable again."""
    given, (_, _, steps, _) = ctx.saved_tensors[:5], ctx.made
    wanted = [x for x, needed in zip(given, ctx.needs_input_grad, strict=False) if needed]
    results = steps(*given)
    found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, allow_unused=True))
    return *(next(found) if needed else None for needed in ctx.needs_input_grad[:5]), None, None


class _TrainedOnce(_Trained):
    """Gradients with learned ranges: estimates that cannot be differentiated again."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, *grads), None, None, None, None)


Function = Callable[[Tensor], Tensor]
_LEAST = 256  # elements of a state from which compiled loops pay


@dataclass(frozen=True)
class OnGrid:
    """Quantizes an inner tensor with a calibrated quantizer."""

    quantizer: Quantizer

    def __call__(self, x: Tensor) -> Tensor:
        """Quantize ``x``, in its own memory where no gradient needs it."""
        return self.quantizer(x, overwrite=True)


@dataclass(frozen=True)
class Keep:
    """Observes an inner tensor: collects it over all steps.

    Attributes:
        steps: takes the tensors.
        columns: takes the bounds of their columns in their place, where these say all that is observed.
    """

    steps: list[Tensor]
    columns: list[Columns] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Keep ``x`` and return it."""
        self.steps.append(x)
        return x


#: gate -> the interval of its values
RANGES = {
    **dict.fromkeys(("input", "forget", "output", "reset", "update"), ACTIVATION_RANGES["Sigmoid"]),
    "candidate": ACTIVATION_RANGES["Tanh"],
}


class StepFunctions(dict[str, Function]):
    """Functions for the tensors inside a step: inner name -> :class:`OnGrid`, :class:`Keep` or another function."""

    def stacked(self, cell: str, like: Tensor) -> StackedStep | None:
        """A step of a layer without projection, with gates in the order of :data:`bitwright.torch.calls.recurrent.ORDER`.

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
        """All steps, in compiled loops, of a layer that is neither projected nor packed.

        Args:
            cell: ``LSTM``, ``GRU`` or ``RNN``.
            tensors: all that it reads, initial states at the end.
            steps: the same layer in single steps.

        Returns:
            ``None`` where there are no such loops. There are some for an LSTM whose inner tensors are observed and none is
            moved to a grid, and in training for one of which every inner tensor has a grid with one scale, fixed or learned.
        """
        like, functions = tensors[-1], [self.get(name) for name in NAMES]
        if cell != "LSTM" or RECURRENT in self or like is None or like.numel() < _LEAST:
            return None
        if (compiled := ready(tensors)) is None:
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
        """All steps of a layer whose inner tensors are observed and not quantized."""
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
    """A step in three compiled loops, where every inner tensor has one scale and no gradient is needed."""
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
        before = _numpy_array(state[1])
        gates, c, h = torch.empty_like(recurrent), *(torch.empty(before.shape) for _ in range(2))
        compiled.lstm_gates(_numpy_array(x), _numpy_array(recurrent), gates.numpy(), *pre)
        torch.sigmoid(gates[:, :split], out=gates[:, :split])
        torch.tanh(gates[:, split:], out=gates[:, split:])
        given = gates.numpy()
        compiled.lstm_cell(given, before, c.numpy(), *post, *cell)
        compiled.lstm_hidden(given, c.tanh().numpy(), h.numpy(), *post, *bent, *last)
        return h, c

    return run


def _numpy_array(x: Tensor) -> NDArray[np.float32]:
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
