"""Where error is made and where it only passes: every step in float and quantized, side by side, in one pass over data.

Each step runs four times: in float and quantized, on what the float steps before it made and on what the quantized ones
made. Steps without quantizers run twice. Values live as long as a later step reads them, so memory is that of two runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitwright.algorithms.rounding.program import Program, SimulatedModel, State, Step, run_step
from bitwright.analysis.subject.steps import QuantizedSteps
from bitwright.analysis.values.site_values import SiteValues


@dataclass
class Ratio:
    """Noise and signal, summed."""

    noise: float = 0.0
    signal: float = 0.0

    def add(self, wanted: Any, found: Any) -> None:
        """The error of ``found``; what is not finite in ``wanted``, or of another shape, is left out."""
        if not isinstance(wanted, Tensor) or not wanted.is_floating_point() or wanted.shape != found.shape:
            return
        reference = wanted.detach().float().flatten()
        signal = _power(reference)
        noise = 0.0 if wanted is found else _power(reference - found.detach().float().flatten())
        if not math.isfinite(signal + noise):
            finite = torch.isfinite(reference)
            error = reference[finite] - found.detach().float().flatten()[finite]
            signal, noise = (float(reference[finite].double().square().sum()), float(error.double().square().sum()))
        self.noise += noise
        self.signal += signal

    @property
    def value(self) -> float | None:
        """Noise over signal; ``None`` where there was no signal."""
        return self.noise / self.signal if self.signal > 0 else None


def _power(x: Tensor) -> float:
    """Sum of squares; a dot product is several times faster than squares and a sum, and as exact as is needed here."""
    return float(torch.dot(x, x))


@dataclass
class LayerErrors:
    """Errors of one operator, summed over its calls: see :class:`bitwright.analysis.result.LayerRow`.

    Attributes:
        elements: of its outputs.
        operand_reach: the largest magnitude of each value that it reads.
    """

    made: Ratio = field(default_factory=Ratio)
    made_quantized: Ratio = field(default_factory=Ratio)
    arrived: Ratio = field(default_factory=Ratio)
    after: Ratio = field(default_factory=Ratio)
    elements: int = 0
    operand_reach: dict[int, float] = field(default_factory=dict)

    @property
    def root_mean_square(self) -> float:
        """Of what it makes in float."""
        return math.sqrt(self.after.signal / self.elements) if self.elements else 0.0


class Lockstep:
    """Runs batches and gathers what every layer and site shows.

    Args:
        model: a calibrated simulation.

    Attributes:
        layers: operator -> its errors, in execution order.
        sites: site -> its values.
        runs: operator runs so far.
        steps: steps of the programs so far: what one forward pass of the same batches would have run.
    """

    def __init__(self, model: SimulatedModel) -> None:
        self._steps = QuantizedSteps(model)
        self._sites = self._steps.sites
        self.layers: dict[str, LayerErrors] = {}
        self.sites: dict[str, SiteValues] = {}
        self.runs = self.steps = 0

    def batch(self, program: Program, inputs: State) -> None:
        """Add one batch."""
        real: State = dict(inputs)
        found: State = dict(inputs)
        end = program.last_read
        self.steps += len(program.steps)
        with torch.no_grad():
            for i, step in enumerate(program.steps):
                wanted, results = self._step(step, real, found, program.constants)
                for value in step.reads:
                    if end.get(value) == i:
                        real.pop(value, None)
                        found.pop(value, None)
                for value, w, f in zip(step.writes, wanted, results, strict=True):
                    if end.get(value, -1) > i:
                        real[value], found[value] = w, f

    def _step(
        self, step: Step, real: State, found: State, constants: Mapping[int, Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        quantizes = bool(step.operands or step.results or step.inside is not None)
        apart = any(v in found and found[v] is not real[v] for v in step.reads)
        wanted = list(run_step(step, real, constants))
        alone = list(run_step(step, real, constants, self._steps.quantize)) if quantizes else wanted
        passed = list(run_step(step, found, constants)) if apart else wanted
        after = alone
        if apart:
            after = list(run_step(step, found, constants, self._steps.quantize)) if quantizes else passed
        self.runs += 1 + quantizes + apart + (apart and quantizes)
        if step.inside is not None and step.differentiable:
            self._see_inside(step, real, constants)
        if step.op:
            self._note(step, real, found, (wanted, alone, passed, after))
        self._see(step, real, constants, wanted)
        return wanted, after

    def _note(self, step: Step, real: State, found: State, made: tuple[Sequence[Tensor], ...]) -> None:
        errors = self.layers.setdefault(step.op, LayerErrors())
        for slot, value in enumerate(dict.fromkeys(step.reads)):
            if value in real:
                errors.arrived.add(real[value], found[value])
                if isinstance(real[value], Tensor) and real[value].is_floating_point() and real[value].numel():
                    largest = float(torch.linalg.vector_norm(real[value], float("inf")))
                    errors.operand_reach[slot] = max(errors.operand_reach.get(slot, 0.0), largest)
        for wanted, alone, passed, after in zip(*made, strict=True):
            errors.made.add(wanted, alone)
            errors.made_quantized.add(passed, after)
            errors.after.add(wanted, after)
            errors.elements += wanted.numel() if isinstance(wanted, Tensor) else 0

    def _see(self, step: Step, real: State, constants: Mapping[int, Tensor], made: Sequence[Any]) -> None:
        for slot, name in step.operands:
            value = step.reads[slot]
            if value in real:
                self._add(name, real[value])
            elif name not in self.sites:
                self._add(name, constants[value])
        for index, name in step.results:
            self._add(name, made[index])

    def _see_inside(self, step: Step, real: State, constants: Mapping[int, Tensor]) -> None:
        """What passes the quantizers inside a recurrent layer, of all steps of time together."""
        kept: dict[str, list[Tensor]] = {}

        def keep(name: str, x: Tensor) -> Tensor:
            kept.setdefault(name, []).append(x)
            return x

        run_step(step, real, constants, inner=keep)
        self.runs += 1
        for name, steps in kept.items():
            if self._sites[name].enabled:
                self._add(name, torch.cat(steps))

    def _add(self, name: str, x: Any) -> None:
        if isinstance(x, Tensor) and x.is_floating_point():
            values = self.sites.setdefault(name, SiteValues(self._sites[name]))
            values.add(x, self._steps.quantize(name, x))


def observe(model: SimulatedModel, batches: Iterable[Any]) -> Lockstep:
    """Run ``batches`` in float and quantized, step by step."""
    found = Lockstep(model)
    for batch in batches:
        found.batch(*model.program(batch))
    return found
