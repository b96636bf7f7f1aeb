"""Estimate the output error that each quantizer causes, for all quantizers in one forward and one backward pass.

With ``e`` the error that a quantizer makes of its tensor and ``J`` the derivative of the outputs by this tensor, the error of
the outputs is ``J e`` to first order. For a random ``v`` of independent signs, ``(v J) . e`` has the mean square ``|J e|^2``
(Hutchinson 1990), and ``v J`` of every tensor comes from one run back. The error of a weight is taken where it arrives, as
what the layer's outputs differ by. A quantizer that works several times on a sample, as those inside a recurrent layer do at
every step, has its shares added before they are squared. Everything is taken at the float model: on the grid a derivative may
not exist.

The run back needs the values of the run forward. These are kept part by part, and computed once more from what the part began
with (Chen 2016, Training deep nets with sublinear memory cost). A batch whose results are large, or that holds more samples than
are needed, is run in slices, if the model computes each sample by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitwright.core.graph.recurrence import CELLS
from bitwright.core.simulation.calibration import samples_in, slice_samples, with_samples
from bitwright.core.simulation.output_quality import OutputPart, parts_of
from bitwright.errors import ModelError
from bitwright.methods.rounding.program import Program, SimulatedModel, State, Step, run, run_step

_SAMPLES = 32  # rows of outputs that are enough: one estimate is then off by a quarter, one standard deviation


_MEASURED = 4  # a part of the rows of which :attr:`OutputErrors.measured` is taken: it is one number for all quantizers
_PART = 64 * 2**20  # bytes of results from which on a new part begins
_SLICE = 48 * 2**20  # bytes of results from which on a batch is divided

Error = Callable[[], Tensor]


@dataclass(frozen=True)
class OutputErrors:
    """Ratio of noise to signal of the outputs, by the quantizer that causes it.

    Attributes:
        activations: site -> the noise that its quantizer makes.
        weights: site of a weight -> the noise that its quantizer makes.
        constants: site of another constant (a table of rotary angles, a scale) -> the same; not part of :attr:`total`.
        measured: the noise that all quantizers together made, on a quarter of the rows or the first slice; far more than
            :attr:`total` where errors are not small.
        unknown: sites from which no derivative leads to an output: an operator in between has none.
    """

    activations: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    measured: float = 0.0
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Sum of all noise; the errors are taken as uncorrelated."""
        return sum(self.activations.values()) + sum(self.weights.values())


def output_errors(
    model: SimulatedModel, batches: Iterable[Any], *, samples: int = _SAMPLES, seed: int = 0
) -> OutputErrors:
    """Estimate the output error that each quantizer of a calibrated simulation causes.

    Args:
        model: the simulation.
        batches: data; only as much of it is read as holds ``samples``.
        samples: how many rows of outputs are looked at; no fewer, and more where a batch cannot be divided.
        seed: of the random signs.

    Raises:
        ModelError: an operator has no gradient.
    """
    watch, rows = _Watch(model, seed, samples // _MEASURED), 0
    for batch in with_samples(batches):
        for part in _slices(model, batch, samples - rows):
            rows += watch.batch(*model.program(part))
            if rows >= samples:
                return watch.found()
    return watch.found()


def _slices(model: SimulatedModel, batch: Any, wanted: int) -> Iterator[Any]:
    """Yield ``batch`` in slices of bounded results; whole where it is small or its samples depend on each other."""
    first, count = slice_samples(batch, 0, 1), samples_in(batch)
    alone = _outputs(model, first) if first is not None and count > 1 else None
    if alone is None or (alone.nbytes * count <= _SLICE and count <= 2 * wanted):
        yield batch
        return
    size = max(1, min(wanted, _SLICE // max(alone.nbytes, 1)))
    few = max(2, size)
    together = _outputs(model, slice_samples(batch, 0, few))
    if together is None or not _same_samples(alone.tensors, together.tensors, min(few, count)):
        yield batch
        return
    for start in range(0, count, size):
        yield slice_samples(batch, start, min(start + size, count))


@dataclass(frozen=True)
class _Outputs:
    """Outputs of a float run, and the bytes of all results in it."""

    tensors: Sequence[Any]
    nbytes: int


def _outputs(model: SimulatedModel, batch: Any) -> _Outputs | None:
    """Run ``batch`` in float; ``None`` if the model takes no batch of this size."""
    try:
        program, state = model.program(batch)
    except Exception:  # of the model's own code; if it is not about the size, the whole batch raises it again
        return None
    ends, nbytes = set(program.outputs), 0
    with torch.no_grad():
        for i, step in enumerate(program.steps):
            results = run_step(step, state, program.constants)
            program.settle(state, i, results, ends)
            nbytes += sum(r.nbytes for r in results if isinstance(r, Tensor))
    return _Outputs([state.get(v) for v in program.outputs], nbytes)


def _same_samples(one: Sequence[Any], several: Sequence[Any], count: int) -> bool:
    """Whether the outputs of the first sample alone equal those among ``count`` samples up to rounding."""
    return len(one) == len(several) and all(
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and b.shape[:1] == (count,)
        and a.shape == (1, *b.shape[1:])
        and torch.allclose(a[0].double(), b[0].double(), rtol=1e-3, atol=1e-4 * float(b.abs().max()), equal_nan=True)
        for a, b in zip(one, several, strict=True)
    )


def _backward(ends: list[Tensor], gradients: list[Tensor], inputs: list[Tensor]) -> None:
    """Backpropagate ``gradients`` of ``ends`` to the leaves ``inputs``.

    Raises:
        ModelError: an operator of the user's own has no gradient.
    """
    try:
        torch.autograd.backward(ends, gradients, inputs=inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ModelError(
            "the model", f"torch has no gradient of it: {error}",
            "register the gradient of the operator (torch.library.register_autograd), or leave out what needs gradients",
        ) from error  # fmt: skip


class _Watch:
    """Accumulates the noise of every site over batches."""

    def __init__(self, model: SimulatedModel, seed: int, measured: int) -> None:
        self._sites, self._quantize, self._graph = model.sites(), model.quantize, model.graph()
        self._generator = torch.Generator().manual_seed(seed)
        self._noise: dict[str, float] = {}
        self._shares: dict[tuple[str, int], Tensor] = {}
        self._met: dict[str, None] = {}
        self._leaves: list[Tensor] = []
        self._rows, self._wanted = 0, measured
        self._measured, self._measured_rows = 0.0, 0
        self._parts: list[list[OutputPart]] | None = None  # of each output; those of the first batch

    def found(self) -> OutputErrors:
        """The noise so far, as the mean over samples."""
        rows = max(self._rows, 1)
        mean = {name: noise / rows for name, noise in self._noise.items()}
        weights, constants = (
            {n: v for n, v in mean.items() if self._sites[n].role == role} for role in ("weight", "constant")
        )
        activations = {n: v for n, v in mean.items() if n not in weights and n not in constants}
        unknown = tuple(n for n in self._met if n not in mean)
        measured = self._measured / max(self._measured_rows, 1)
        return OutputErrors(activations, weights, unknown, measured, constants)

    def batch(self, program: Program, state: State) -> int:
        """Add one batch; returns how many rows its outputs had."""
        constants = {v: t.detach() for v, t in program.constants.items()}
        program = replace(program, constants=constants)
        watched = replace(program, steps=tuple(step.traced or step for step in program.steps))
        begun, outputs = self._forward(watched, dict(state))
        floats = {v: y for v, y in outputs.items() if y.requires_grad}
        parts = {v: p for v, p in zip(outputs, self._divided(outputs), strict=False) if v in floats}
        count = sum(map(len, parts.values()))
        self._back(watched, begun, {v: self._direction(floats[v], p, count) for v, p in parts.items()}, floats)
        rows = max((y.shape[0] for y in outputs.values() if y.dim()), default=1)
        self._rows += rows
        if not self._measured_rows or self._measured_rows < self._wanted:
            found = self._measure(program, dict(state), {v: y.detach() for v, y in outputs.items()})
            self._measured, self._measured_rows = self._measured + rows * found, self._measured_rows + rows
        for (site, _), share in self._shares.items():
            self._noise[site] = self._noise.get(site, 0.0) + rows * float(share.square().sum())
        self._shares = {}
        return rows

    def _divided(self, outputs: Mapping[int, Tensor]) -> list[list[OutputPart]]:
        """The parts of each output, by the first batch."""
        if self._parts is None:
            found = parts_of([[y.detach().cpu().float().numpy() for y in outputs.values()]])
            self._parts = [[part for part in found if part.output == i] for i in range(len(outputs))]
        return self._parts

    def _back(
        self,
        program: Program,
        begun: list[tuple[int, State]],
        gradients: Mapping[int, Tensor],
        ends: Mapping[int, Tensor],
    ) -> None:
        """Backpropagate from the outputs ``ends``; the last part is still in memory, earlier ones are recomputed."""
        last = len(program.steps)
        while begun and gradients:
            first, state = begun.pop()
            if last < len(program.steps):
                self._leaves, ends = [], dict(state)
                self._steps(program, ends, first, last)
            gradients, last = self._through(state, gradients, ends), first
        self._leaves = []

    def _through(self, state: State, gradients: Mapping[int, Tensor], ends: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Gradients with respect to the ``state`` at the start of a part, from those with respect to its ``ends``."""
        before = {v: t for v, t in state.items() if isinstance(t, Tensor) and t.requires_grad}
        roots = [v for v in gradients if ends[v].requires_grad]
        if roots:
            _backward([ends[v] for v in roots], [gradients[v] for v in roots], [*self._leaves, *before.values()])
        return {v: t.grad for v, t in before.items() if t.grad is not None}

    def _measure(self, program: Program, state: State, wanted: Mapping[int, Tensor]) -> float:
        """Mean noise-to-signal ratio of the quantized outputs, over the parts whose length does not depend on values."""
        outputs = tuple(wanted)
        whole = Program((*program.steps, Step("", outputs, (), lambda tensors: ())), program.constants, ())
        run(whole, state, 0, len(program.steps), self._quantize)
        pairs = [(wanted[v].detach().double(), state[v].double()) for v in outputs]
        ratios = [
            float(_of(part, found - w).square().nansum() / _of(part, w).square().nansum().clamp(min=1e-30))
            for (w, found), parts in zip(pairs, self._parts or (), strict=False)
            if w.shape == found.shape
            for part in parts
        ]
        return sum(ratios) / max(len(ratios), 1)

    def _direction(self, y: Tensor, parts: Sequence[OutputPart], count: int) -> Tensor:
        """Random signs, scaled so that the noise comes out over the signal, as the mean over ``count`` parts of all outputs."""
        signs = torch.randint(0, 2, y.shape, generator=self._generator).to(y) * 2 - 1
        for part in parts:
            power = float(_of(part, y.detach().double()).square().nansum())
            factor = (max(power, 1e-30) * count) ** -0.5
            if part.axis is None:
                signs = signs * factor
            else:
                index = torch.tensor(part.indices, device=y.device)
                signs.index_copy_(part.axis, index, signs.index_select(part.axis, index) * factor)
        return signs

    def _forward(self, program: Program, state: State) -> tuple[list[tuple[int, State]], dict[int, Tensor]]:
        """Run in float; every tensor that a quantizer would change is watched.

        Returns:
            Of every part its first step and the state there; and what the model returns. Only the last part can run back.
        """
        begun, size, self._leaves = [(0, dict(state))], 0, []
        for i in range(len(program.steps)):
            if size >= _PART and all(isinstance(t, Tensor) for t in state.values()):
                state = {v: t.detach().requires_grad_(t.requires_grad) for v, t in state.items()}
                begun.append((i, dict(state)))
                size, self._leaves = 0, []
            size += self._steps(program, state, i, i + 1)
        found = {v: state.get(v) for v in program.outputs}
        return begun, {v: y for v, y in found.items() if isinstance(y, Tensor) and y.is_floating_point()}

    def _steps(self, program: Program, state: State, first: int, last: int) -> int:
        """Run the steps ``[first, last)``; returns how many bytes they made."""
        outputs, made = set(program.outputs), 0
        for i in range(first, last):
            results = self._run(program.steps[i], state, program.constants)
            program.settle(state, i, results, outputs)
            made += sum(r.nbytes for r in results if isinstance(r, Tensor))
        return made

    def _run(self, step: Step, state: State, constants: Mapping[int, Tensor]) -> list[Any]:
        axis = self._samples_axis(step)
        read = {slot: (site, state[v]) for slot, site in step.operands if (v := step.reads[slot]) in state}
        watched = {s: self._watched(site, _alias(x), self._error(site, x), axis) for s, (site, x) in read.items()}
        with torch.enable_grad():
            made = list(
                run_step(step, state, constants, None, watched, lambda n, x: self._watched(n, x, self._error(n, x)))
            )
        exact = [y.detach() if isinstance(y, Tensor) else y for y in made]
        results = _separated(made) if step.differentiable else list(exact)
        for slot, site in step.operands:
            if slot in read or not self._sites[site].is_stored:
                continue
            for i, error in enumerate(self._of_weight(slot, site, step, state, constants, exact)):
                results[i] = self._watched(site, results[i], error, axis)
        for index, site in step.results:
            results[index] = self._watched(site, results[index], self._error(site, results[index]), axis)
        return results

    def _samples_axis(self, step: Step) -> int:
        """The axis that counts the samples of tensors of three axes: recurrent layers have steps of time before it."""
        op = self._graph.op(step.op) if step.op else None
        return 1 if op is not None and op.type in CELLS and not op.attrs.get("layout") else 0

    def _of_weight(
        self, slot: int, site: str, step: Step, state: State, constants: Mapping[int, Tensor], exact: Sequence[Any]
    ) -> list[Error | None]:
        """Error that a weight's quantizer causes in its layer's outputs; ``None`` for results that are not numeric tensors."""
        works = [self._works(site, y) for y in exact]
        if not any(works):
            return [None] * len(exact)
        held = {v: state[v] for v in step.reads if v in state}

        def outputs() -> Sequence[Any]:
            weight = self._quantize(site, constants[step.reads[slot]])
            return run_step(step, held, constants, None, {slot: weight})

        if len(exact) == 1:
            return [lambda: outputs()[0] - exact[0]]
        with torch.no_grad():  # a recurrent layer would run once more for every output
            found = zip(outputs(), exact, works, strict=True)
            errors = [new - old if ok else None for new, old, ok in found]
        return [None if error is None else partial(torch.Tensor.detach, error) for error in errors]

    def _error(self, site: str, x: Tensor) -> Error | None:
        """The rounding error of ``x`` at ``site``."""
        if not self._works(site, x):
            return None
        value = x.detach()
        return lambda: self._quantize(site, value) - value

    def _works(self, site: str, x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point() and self._sites[site].enabled

    def _watched(self, site: str, x: Tensor, error: Error | None, axis: int = 0) -> Tensor:
        """``x`` with a hook that adds the contribution of ``error`` to the outputs once the gradient is known.

        The error is computed then, of a value that the run back mostly keeps anyway: errors kept from the run forward take
        twice the memory of all values, one per activation and one per weight.
        """
        if error is None:
            return x
        if not x.requires_grad:
            x = x.detach().requires_grad_()
            self._leaves.append(x)
        self._met.setdefault(site)

        def note(gradient: Tensor | None) -> None:
            if gradient is None:  # an operator behind it has no derivative: the site stays among the unknown ones
                return
            with torch.no_grad():
                share = (gradient * error()).double()
            share = share.nan_to_num_(0.0, 0.0, 0.0)  # where there is no derivative
            if axis and share.dim() >= 3:  # ONNX has an axis of directions between them
                share = share.movedim(share.dim() - 2, 0)
            share = share.flatten(1).sum(1) if share.dim() > 1 else share.sum()[None]
            key = site, len(share)
            self._shares[key] = self._shares[key] + share if key in self._shares else share

        x.register_hook(note)
        return x


def _of(part: OutputPart, y: Tensor) -> Tensor:
    """Slice a part out of an output."""
    return y if part.axis is None else y.index_select(part.axis, torch.tensor(part.indices, device=y.device))


def _separated(results: list[Any]) -> list[Any]:
    """Give each result a separate gradient, since one may be a view of another, as the last of all states."""
    return results if len(results) == 1 else [y.view_as(y) if isinstance(y, Tensor) else y for y in results]


def _alias(x: Any) -> Any:
    """A view of ``x`` with a gradient of its own: that of one reader, not the sum over all readers."""
    if not isinstance(x, Tensor) or not x.requires_grad:
        return x
    with torch.enable_grad():
        return x.view_as(x)
