"""Values of calibration data as they pass through a model once, in float and quantized, within a stated memory.

A :class:`Walk` keeps, for every batch, the values that steps ahead still read, and moves on unit by unit: a layer or
block is handed what its predecessors really made, and nothing is computed twice from the model's input. What does not
fit the budget lies in files of a temporary folder, mapped into memory, so that tensors are tensors wherever they are.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright.algorithms.rounding.matrices import Layer, rows_of_each
from bitwright.algorithms.rounding.program import Program, SimulatedModel, State, Step, run, run_step
from bitwright.core.simulation.calibration import with_samples
from bitwright.errors import CalibrationError

_SMALL = 1 << 16  # bytes below which a tensor is not worth a file


class Store:
    """Keeps tensors: in memory up to ``budget`` bytes, beyond that in mapped files that go with it.

    Args:
        budget: bytes in memory; ``None`` sets no limit.
        folder: where the temporary folder is made; the system's choice by default.

    Raises:
        CalibrationError: (from :meth:`keep`) the disk has no room either.
    """

    def __init__(self, budget: int | None = None, folder: str | Path | None = None) -> None:
        self.budget, self.used, self.spilled, self.peak = budget, 0, 0, 0
        self._parent = None if folder is None else Path(folder)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0
        self._sizes: dict[int, int] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself, or an equal one whose numbers lie in a file; of a sequence, each of its tensors."""
        if not isinstance(tensor, Tensor):
            return tuple(map(self.keep, tensor)) if isinstance(tensor, tuple) else tensor
        storage = tensor.untyped_storage()
        if self.budget is None or tensor.device.type != "cpu" or storage.data_ptr() in self._sizes:
            return tensor
        size = storage.nbytes()
        if self.used + size > self.budget and size > _SMALL:
            return self._spill(tensor)
        self._note(storage.data_ptr(), size, tensor)
        return tensor

    def _note(self, pointer: int, size: int, tensor: Tensor) -> None:
        self._sizes[pointer] = size
        self.used += size
        self.peak = max(self.peak, self.used)
        weakref.finalize(tensor, self._forget, pointer)

    def _forget(self, pointer: int) -> None:
        self.used -= self._sizes.pop(pointer, 0)

    def empty(self, shape: Sequence[int]) -> Tensor:
        """A float32 tensor to be filled in, in memory or in a file."""
        size = 4 * int(np.prod(shape))
        if self.budget is None or self.used + size <= self.budget:
            tensor = torch.empty(tuple(shape))
            if self.budget is not None:
                self._note(tensor.untyped_storage().data_ptr(), size, tensor)
            return tensor
        return torch.from_numpy(self._map(tuple(shape), np.dtype(np.float32)))

    def _spill(self, tensor: Tensor) -> Tensor:
        source = tensor.detach().contiguous()
        if source.dtype == torch.bfloat16:  # numpy has no such numbers
            bits = self._map(tuple(source.shape), np.dtype(np.int16))
            bits[...] = source.view(torch.int16).numpy()
            return torch.from_numpy(bits).view(torch.bfloat16)
        array = source.numpy()
        mapped = self._map(array.shape, array.dtype)
        mapped[...] = array
        return torch.from_numpy(mapped)

    def _map(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="bitwright-", dir=self._parent)
        size = int(np.prod(shape)) * dtype.itemsize
        free = shutil.disk_usage(self._folder.name).free
        if size > free:
            raise CalibrationError(
                str(self._parent or tempfile.gettempdir()),
                f"activations need {size >> 20} MiB more than the memory budget of {(self.budget or 0) >> 20} MiB, and "
                f"the disk has {free >> 20} MiB left",
                "give fewer samples, a larger memory_budget, or a spill_dir on a larger disk; layers that are done are "
                "kept in cache_dir when one is given",
            )
        self._count += 1
        path = Path(self._folder.name, f"{self._count}.bin")
        mapped = np.memmap(path, dtype, "w+", shape=shape)
        self.spilled += size
        path.unlink()  # the map keeps the file as long as a tensor reads it
        return mapped

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@dataclass
class Run:
    """One batch on its way: its program, both states, its share of the data, and the index of the next step of each."""

    program: Program
    real: State
    quantized: State
    share: float = 1.0
    real_at: int = 0
    quantized_at: int = 0


class Walk:
    """Calibration batches on their way through a model.

    Args:
        model: the simulation.
        batches: as the front end takes them.
        store: where values are kept.

    Attributes:
        short: layers that see fewer samples than they have inputs -> both numbers.

    Raises:
        CalibrationError: no batch came.
    """

    def __init__(self, model: SimulatedModel, batches: Iterable[Any], store: Store) -> None:
        self.model, self.store = model, store
        self.short: dict[str, str] = {}
        self.runs: list[Run] = []
        self._float: dict[int, dict[int, Tensor]] = {}
        for batch in with_samples(batches):
            program, state = model.program(batch)
            kept = {value: store.keep(tensor) for value, tensor in state.items()}
            self.runs.append(Run(program, kept, dict(kept), float(_numbers(state))))
        if not self.runs:
            raise CalibrationError(
                "reconstruction",
                "the data held no batch",
                "give a non-empty list or loader (a generator can be used only once); 256 to 1024 samples are enough",
            )

        total = sum(r.share for r in self.runs)
        for r in self.runs:
            r.share = r.share / total if total else 1 / len(self.runs)

    @property
    def programs(self) -> list[Program]:
        """The programs of all batches, each once."""
        return list({id(r.program): r.program for r in self.runs}.values())

    @property
    def program(self) -> Program:
        """The program of the first batch."""
        return self.runs[0].program

    @property
    def one_program(self) -> bool:
        """Whether every batch takes the same steps, with tensors of the same shapes."""
        return all(r.program is self.program for r in self.runs)

    def advance(self, ops: Sequence[str]) -> None:
        """Bring both streams to the first step of ``ops``."""
        for r in self.runs:
            span = r.program.span(ops)
            if span is not None:
                run(r.program, r.real, r.real_at, span[0], None, self.store.keep)
                run(r.program, r.quantized, r.quantized_at, span[0], self.model.quantize, self.store.keep)
                r.real_at = r.quantized_at = span[0]

    def replace(self, layer: Layer, weight: Tensor) -> None:
        """Give the simulation a layer's new weight; the float stream keeps the old one until :meth:`leave`."""
        for program in self.programs:
            if layer.op in program.places:
                step = program.steps[program.places[layer.op][0]]
                value = step.reads[step.ports[layer.port]] if layer.port in step.ports else None
                if value is not None and value in program.constants:
                    self._float.setdefault(id(program), {})[value] = program.constants[value].detach().clone()
        self.model.set_weight(layer.site, weight)

    def leave(self, ops: Sequence[str]) -> None:
        """Take both streams over the steps of ``ops``, whose weights are chosen."""
        for r in self.runs:
            span = r.program.span(ops)
            if span is not None:
                keep, constants = self.store.keep, self._constants(r.program)
                run(r.program, r.real, r.real_at, span[1], None, keep, constants)
                run(r.program, r.quantized, r.quantized_at, span[1], self.model.quantize, keep)
                r.real_at = r.quantized_at = span[1]
        self._float.clear()

    def _constants(self, program: Program) -> Mapping[int, Tensor]:
        """Those of the float stream: with the weights from before this unit."""
        held = self._float.get(id(program))
        return ChainMap(held, program.constants) if held else program.constants  # type: ignore[arg-type]

    def inputs(self, layer: Layer) -> Iterator[tuple[Tensor, Tensor]]:
        """What a layer multiplies, float and quantized, for every batch and every run of it in a batch."""
        return ((real, quantized) for real, quantized, _ in self.shares(layer))

    def shares(self, layer: Layer) -> Iterator[tuple[Tensor, Tensor, float]]:
        """:meth:`inputs`, each with the share of the data that its batch is.

        For the recurrent weights of a layer these are the hidden states of the step before, and the quantized ones in
        both places: they change with the weights, so that weights which made up for their errors would make up for
        errors that are no longer there. For experts as well: the two models may route a sample to different ones, so that
        their rows are not pairs.
        """
        for r in self.runs:
            span = r.program.span([layer.op])
            if span is not None:
                last = span[1]
                quantized = _reads(r.program, r.quantized, (r.quantized_at, last), layer, self.model.quantize)
                real = (
                    quantized
                    if layer.reads_hidden or layer.is_routed
                    else _reads(r.program, r.real, (r.real_at, last), layer, None, self._constants(r.program))
                )
                yield from ((x, x_q, r.share) for x, x_q in zip(real, quantized, strict=True))

    def step(self, op: str) -> Step:
        """The first step of ``op`` in the first batch that has one."""
        return next(r.program.steps[r.program.places[op][0]] for r in self.runs if op in r.program.places)

    def constants(self, op: str) -> Program:
        """The program whose constants :meth:`step` reads."""
        return next(r.program for r in self.runs if op in r.program.places)


def _numbers(state: State) -> int:
    return sum(tensor.numel() for tensor in state.values() if isinstance(tensor, Tensor))


def _reads(
    program: Program,
    state: State,
    span: tuple[int, int],
    layer: Layer,
    quantize: Callable[[str, Tensor], Tensor] | None,
    constants: Mapping[int, Tensor] | None = None,
) -> list[Tensor]:
    """What ``layer`` multiplies in each of its steps; the steps between are run on a copy of the state."""
    constants = program.constants if constants is None else constants
    found, scratch, wanted = [], dict(state), program.places[layer.op]
    with torch.no_grad():
        for i in range(*span):
            step = program.steps[i]
            if i in wanted and not layer.reads_hidden:
                found.append(_multiplied(step, layer, scratch, constants, quantize))
                if i == wanted[-1]:
                    break
            results = run_step(step, scratch, constants, quantize)
            if i in wanted and layer.reads_hidden:
                start = _read(step, 5, scratch, constants, quantize) if 5 in step.ports else None
                found.append(_before(results[0].detach(), start, layer.attrs.get("direction") == "reverse"))
            scratch.update(zip(step.writes, results, strict=True))
    return found


def _multiplied(
    step: Step,
    layer: Layer,
    state: State,
    constants: Mapping[int, Tensor],
    quantize: Callable[[str, Tensor], Tensor] | None,
) -> Tensor:
    x = _read(step, 0, state, constants, quantize)
    return rows_of_each(x, _read(step, 2, state, constants, None)) if layer.is_routed else x


def _read(
    step: Step,
    port: int,
    state: Mapping[int, Tensor],
    constants: Mapping[int, Tensor],
    quantize: Callable[[str, Tensor], Tensor] | None,
) -> Tensor:
    """What ``step`` reads at ``port``."""
    slot = step.ports[port]
    value = step.reads[slot]
    x = state[value] if value in state else constants[value]
    for place, site in step.operands if quantize is not None else ():
        if place == slot:
            x = quantize(site, x)  # type: ignore[misc]
    return x.detach()


def _before(hidden: Tensor, start: Tensor | None, reverse: bool) -> Tensor:
    """The hidden state before each step: ``[T, ...]`` of all steps moved by one, with the initial state where known."""
    kept = hidden[1:] if reverse else hidden[:-1]
    if start is None:
        return kept
    first = start.reshape(1, *hidden.shape[1:])
    return torch.cat([kept, first] if reverse else [first, kept])
