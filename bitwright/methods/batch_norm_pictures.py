"""Pictures whose statistics in front of batch norms are those that these stored in training (ZeroQ, arXiv:2001.00281)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.numerics.arrays import to_numpy
from bitwright.errors import ConfigError
from bitwright.methods.rounding.program import Program, SimulatedModel, State, run_step
from bitwright.progress import progress as progress_bar

Array = NDArray[Any]
_RATE = 0.1  # of Adam, in standard deviations of the input; falls to zero along half a cosine
_LEAST = 1e-3  # of the mean variance of a layer, that is added to each channel's: some channels are constant


@dataclass(frozen=True)
class Pictures:
    """Result of :func:`pictures`.

    Attributes:
        values: of the input.
        norms: batch norms whose statistics were met.
        noise, distance: from the statistics, before and after.
    """

    values: Array
    norms: int
    noise: float
    distance: float


@dataclass(frozen=True)
class _Norm:
    """A batch norm: the step it is, the value it reads, and what it stored, float32 of shape ``[C]``."""

    step: int
    reads: int
    mean: Tensor
    var: Tensor

    def distance(self, x: Tensor) -> Tensor:
        """Mean over channels of the squared distances of mean and deviation, in deviations of the channel."""
        axes = [axis for axis in range(x.dim()) if axis != 1]
        spread = self.var + _LEAST * self.var.mean()
        var, mean = torch.var_mean(x.float(), axes, correction=0)
        deviation = (var + _LEAST * self.var.mean()).sqrt()
        return ((mean - self.mean).square() / spread + (deviation / spread.sqrt() - 1).square()).mean()


def pictures(
    model: SimulatedModel, batch_of: Callable[[Array], Any], noise: Array, iterations: int, progress: bool = True
) -> Pictures:
    """Change ``noise`` until the statistics in front of batch norms are those that they stored.

    Args:
        model: the model in float, its batch norms in place.
        batch_of: values of the input -> batch.
        noise: the first values, float32 ``[N, C, ...]``.
        iterations: steps of Adam.
        progress: show a bar.

    Raises:
        ConfigError: there is no batch norm with statistics that gradients lead to.
    """
    program, state = model.program(batch_of(noise))
    program = replace(
        program,
        steps=tuple(step.traced or step for step in program.steps),
        constants={v: t.detach() for v, t in program.constants.items()},
    )
    norms = _norms(model, program)
    (source,) = (v for v, t in state.items() if t.is_floating_point() and tuple(t.shape) == noise.shape)
    spread = float(noise.std())
    x = state[source].detach().clone().float().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=_RATE * spread)
    first = last = math.nan
    for i in progress_bar(range(iterations + 1), "pictures", progress):
        loss = _distance(program, {**state, source: x.to(state[source].dtype)}, norms)
        last = float(loss.detach())
        first = last if i == 0 else first
        if i == iterations:
            break
        if not loss.requires_grad:
            raise _none("no gradient leads from its batch norms to the input")
        optimizer.param_groups[0]["lr"] = _RATE * spread * 0.5 * (1 + math.cos(math.pi * i / iterations))
        (x.grad,) = torch.autograd.grad(loss, [x])
        optimizer.step()
    return Pictures(to_numpy(x.detach()), len(norms), math.sqrt(first / 2), math.sqrt(last / 2))


def _norms(model: SimulatedModel, program: Program) -> list[_Norm]:
    """The batch norms that hold statistics.

    Raises:
        ConfigError: there is none.
    """
    kinds = {op.name: op.type for op in model.graph().ops}
    found = []
    for i, step in enumerate(program.steps):
        places = [step.ports.get(port) for port in (0, 3, 4)]
        if kinds.get(step.op) != "BatchNormalization" or None in places:
            continue
        reads, mean, var = (step.reads[place] for place in places if place is not None)
        if mean in program.constants and var in program.constants:
            found.append(_Norm(i, reads, program.constants[mean].float(), program.constants[var].float()))
    if not found:
        raise _none("the model has no batch norm with stored statistics (they may be folded into its layers)")
    return found


def _none(problem: str) -> ConfigError:
    return ConfigError(
        "generate_data",
        problem,
        "give the model as it was trained, before batch norms were folded, or calibrate on data of your own",
    )


def _distance(program: Program, state: State, norms: Iterable[_Norm]) -> Tensor:
    """Mean distance of all batch norms; the run ends with the last of them."""
    waiting = {norm.step: norm for norm in norms}
    found = []
    for i, step in enumerate(program.steps):
        if (norm := waiting.pop(i, None)) is not None:
            found.append(norm.distance(state[norm.reads]))
            if not waiting:
                break
        program.settle(state, i, run_step(step, state, program.constants))
    return torch.stack(found).mean()
