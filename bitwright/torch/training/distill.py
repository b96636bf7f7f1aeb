"""Distillation from the float model: its outputs and chosen layers are the targets; no labels are needed."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.errors import ConfigError, ModelError, checks_arguments, close_matches
from bitwright.torch.calls.inputs import as_call, flatten_tensors, model_device, to_device
from bitwright.torch.simulation.quantsim import QuantizationSimModel
from bitwright.torch.simulation.simulate import WithGradient

logger = logging.getLogger("bitwright")

if TYPE_CHECKING:
    Output = Callable[[Any], Tensor]


@checks_arguments
def distillation_loss(
    student: Tensor, teacher: Tensor, temperature: float = 1.0, *, mask: Tensor | None = None, dim: int = -1
) -> Tensor:
    """Cross entropy of two distributions given as logits, less the teacher's own entropy: zero where they agree.

    Args:
        student, teacher: logits of one shape, ``[N, C]`` of a classifier, ``[N, T, V]`` of a language model.
        temperature: both are divided by it; the loss is multiplied by its square, so that gradients keep their size.
        mask: positions that count, of the shape without ``dim`` (padding is left out); ``None`` counts all.
        dim: the axis of classes.

    Returns:
        The mean over the positions, float32.

    Raises:
        ConfigError: shapes differ, or the temperature is not positive.

    Reference: Hinton et al. 2015, arXiv:1503.02531, section 2.
    """
    if student.shape != teacher.shape:
        raise ConfigError(
            "distillation_loss",
            f"the student's logits have shape {tuple(student.shape)} and the teacher's {tuple(teacher.shape)}",
            "give logits of the same batch and classes",
        )
    if not 0 < temperature < math.inf:
        raise ConfigError("distillation_loss", f"temperature={temperature}", "use 1.0 to 4.0")
    own = F.log_softmax(student.float() / temperature, dim)
    target = F.log_softmax(teacher.detach().float() / temperature, dim)
    each = F.kl_div(own, target, reduction="none", log_target=True).sum(dim) * temperature**2
    if mask is None:
        return each.mean()
    weights = mask.to(each.dtype)
    return (each * weights).sum() / weights.sum().clamp(min=1.0)


def _tell_rounded(sim: QuantizationSimModel) -> None:
    """Warn that a teacher would be built from rounded weights."""
    rounded = [site.name for site in sim.quantizers.values() if site.role == "weight" and site.frozen]
    if rounded:
        logger.warning(
            "Distillation: %d weights, %s among them, have frozen ranges, as methods that round weights leave them: the "
            "teacher made of this simulation would have the rounded weights; give the original float model as teacher",
            len(rounded),
            rounded[0],
        )


class Distillation:
    """Runs a batch through the simulation and the float model, and returns the loss between them.

    The float model is a copy of what ``sim`` computes in float when this object is made: make it before training, and after
    methods that round weights (GPTQ, AdaRound) give the original model as ``teacher``. It is in evaluation mode and takes no
    gradients; it is not trained.

    Args:
        sim: the simulation to train, calibrated.
        teacher: another float model for the same inputs, for example a larger one; ``None`` is the simulation's own.
        temperature: see :func:`distillation_loss`.
        layers: outputs of operators to compare too, by name (``"layer3.1.conv2.output[0]"``, as in ``sim.graph`` and
            ``sim.capture``); by mean squared error over the mean square of the teacher's, so that layers count alike.
        layer_weight: of the mean over ``layers``.
        output: takes the logits from what the model returns; by default the tensor named ``logits``, else the first one of
            floating point.

    Raises:
        ConfigError: a layer is not an output of the simulation's graph, or not of the teacher's.

    Example:
        ``loss, output = distillation(images)``; ``guard.step(loss)``.
    """

    @checks_arguments
    def __init__(
        self,
        sim: QuantizationSimModel,
        teacher: nn.Module | None = None,
        *,
        temperature: float = 1.0,
        layers: Sequence[str] = (),
        layer_weight: float = 1.0,
        output: Output | None = None,
    ) -> None:
        self.sim, self.temperature, self.layers = sim, temperature, tuple(layers)
        self.layer_weight, self._output = layer_weight, output or logits_of
        if teacher is None:
            _tell_rounded(sim)
            self._teacher = copy.deepcopy(sim)
        else:
            self._teacher = QuantizationSimModel(teacher, sim.examples[0], examples=sim.examples[1:])
        self._teacher.model.eval().requires_grad_(False)
        for which, owner in (("sim", sim), ("teacher", self._teacher)):
            known = [f"{op.name}.output[{i}]" for op in owner.graph.ops for i in range(len(op.outputs))]
            for name in self.layers:
                if name not in known:
                    raise ConfigError(
                        "Distillation",
                        f"the {which} has no output {name!r}{close_matches(name, known)}",
                        "name outputs of operators: [f'{op.name}.output[0]' for op in sim.graph.ops]",
                    )

    def __call__(self, batch: Any, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Loss and the simulation's output of a batch.

        Args:
            batch: as the model's forward takes it: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
            mask: see :func:`distillation_loss`.
        """
        args, kwargs = as_call(to_device(batch, model_device(self.sim.model)))
        target, values = self._run(self._teacher, args, kwargs, train=False)
        output, own = self._run(self.sim, args, kwargs, train=True)
        loss = distillation_loss(self._output(output), self._output(target), self.temperature, mask=mask)
        if self.layers:
            loss = loss + self.layer_weight * self._apart(own, values)
        return loss, output

    def _run(
        self, sim: QuantizationSimModel, args: Any, kwargs: Any, *, train: bool
    ) -> tuple[Any, Mapping[str, list[Tensor]]]:
        taps: dict[str, list[Tensor]] = {name: WithGradient() if train else [] for name in self.layers}
        handler = sim._handler.variant(None if train else "float", taps if self.layers else None)
        with sim._interceptor.handled_by(handler), torch.set_grad_enabled(train and torch.is_grad_enabled()):
            return sim.model(*args, **kwargs), taps

    def _apart(self, own: Mapping[str, list[Tensor]], target: Mapping[str, list[Tensor]]) -> Tensor:
        terms = []
        for name in self.layers:
            if len(own[name]) != len(target[name]) or not own[name]:
                raise ModelError(
                    name,
                    f"it ran {len(own[name])} times in the simulation and {len(target[name])} times in the teacher",
                    "leave it out of layers=, or choose an operator that every forward reaches equally often",
                )
            for a, b in zip(own[name], target[name], strict=True):
                size = b.float().square().mean().clamp(min=torch.finfo(torch.float32).tiny)
                terms.append((a.float() - b.float()).square().mean() / size)
        return torch.stack(terms).mean()


def logits_of(output: Any) -> Tensor:
    """The tensor named ``logits`` in what a model returned, else the first of floating point.

    Raises:
        ModelError: there is none.
    """
    found = [(name, t) for name, t in flatten_tensors(output) if t.is_floating_point()]
    if not found:
        raise ModelError(
            "Distillation", f"the model returned no floating-point tensor but {type(output).__name__}",
            "pass output=, a function from what the model returns to its logits",
        )  # fmt: skip
    named = [t for name, t in found if name.rpartition(".")[2] == "logits"]
    return named[0] if named else found[0][1]
