"""Prune between the steps of a training loop: the model and the optimizer's state become narrower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bitwright.compression.compress import Compressed, prune_model
from bitwright.compression.costs import model_costs
from bitwright.compression.schedule import CompressionSchedule
from bitwright.errors import CalibrationError, ConfigError
from bitwright.torch.calls.inputs import named_state


class TrainingPruner:
    """Prunes a model while it is trained, in any loop that calls :meth:`step` after each step of its optimizer.

    Parameters that become narrower are new objects, since the graph of the last loss may still hold the old ones; the optimizers
    are given the new ones. Momenta lose the positions that the parameters lose.

    Args:
        model: the module that is trained, changed in place.
        data: batches of real inputs, as :func:`bitwright.compress` takes them.
        schedule: says when, and which part of the multiplications of the model as it is now may be left.
        optimizer: of the model; several as a list.
        options: of :func:`bitwright.torch.prune_model`, such as ``importance``.

    Attributes:
        steps: of the plan so far; ``{"format": 1, "steps": pruner.steps}`` is what :func:`bitwright.torch.rebuild` takes.

    Raises:
        CalibrationError: ``data`` is empty.
        ConfigError: the target stands among the options.
    """

    def __init__(
        self, model: nn.Module, data: Iterable[Any], schedule: CompressionSchedule, optimizer: Any = (), **options: Any
    ) -> None:
        if taken := sorted({"macs", "params"} & options.keys()):
            raise ConfigError(taken[0], "the schedule says what may be left", "leave it out")
        self.model, self.schedule, self.data = model, schedule, list(data)
        if not self.data:
            raise CalibrationError("TrainingPruner", "the data held no batch", "give some batches of real data")
        given: list[Any] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        # Accelerate and Lightning wrap them
        self._optimizers: list[torch.optim.Optimizer] = [getattr(o, "optimizer", o) for o in given]
        self._options = {"progress": False, **options}
        self.steps: list[dict[str, Any]] = []
        self._whole = self._macs()

    def _macs(self) -> float:
        return float(model_costs(self.model, self.data[:1])["macs"])

    def step(self) -> Compressed | None:
        """Count a step of the loop, and prune where the schedule asks for it; ``None`` where nothing is done.

        Raises:
            ConfigError: the part cannot be met, with the nearest that can.
        """
        part = self.schedule.step()
        left = None if part is None else part * self._whole / self._macs()
        if left is None or left >= 1:
            return None
        named = dict(named_state(self.model))
        before = {name: tuple(tensor.shape) for name, tensor in named.items()}
        result = prune_model(self.model, self.data, macs=left, **self._options)
        self.steps += result.plan["steps"]
        cuts = [step["parameters"] for step in result.plan["steps"] if step.get("kind") == "cut"]
        for name, axes in ((name, axes) for cut in cuts for name, axes in cut.items()):
            for optimizer in self._optimizers:
                _narrow(optimizer.state.get(named[name], {}), before[name], axes)
        self._renew({id(named[name]): named[name] for cut in cuts for name in cut})
        return result

    def _renew(self, cut: Mapping[int, torch.Tensor]) -> None:
        """Replace each cut parameter in modules and optimizers."""
        new = {key: nn.Parameter(p.data, p.requires_grad) for key, p in cut.items() if isinstance(p, nn.Parameter)}
        for module in self.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in new:
                    setattr(module, name, new[id(parameter)])
        for optimizer in self._optimizers:
            _renew_in(optimizer, cut, new)


class MovementScores:
    """What training does to each weight: its movement away from zero, summed over steps (Sanh et al. 2020, arXiv:2005.07683).

    The score of a weight is ``-sum(w * dL/dw)``: positive where steps of the optimizer make it larger in magnitude. Given to
    ``sparsify_model(method="movement", scores=...)``, weights that a fine-tune draws to zero go first, however large they are.

    Args:
        model: the module that is trained, left as it is.

    Attributes:
        scores: parameter -> tensor of its shape; of those that a gradient has reached.

    Raises:
        ConfigError: no parameter is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1}
        if not self._trained:
            raise ConfigError("MovementScores", "no weight of the model is trained", "set requires_grad of its weights")
        self.scores: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Add the present gradients: call it after ``backward()`` and before the optimizer's step.

        Raises:
            CalibrationError: no parameter has a gradient, or one is NaN or infinite.
        """
        moved = {name: -(p * p.grad).float() for name, p in self._trained.items() if p.grad is not None}
        if not moved:
            raise CalibrationError(
                "MovementScores", "no weight has a gradient", "call step() after loss.backward() and before zero_grad()"
            )
        for name, by in moved.items():
            if not bool(torch.isfinite(by).all()):
                raise CalibrationError(
                    name,
                    "its gradient is NaN or infinite",
                    "skip the step, as a gradient scaler does, or lower the rate",
                )
            self.scores[name] = self.scores[name] + by if name in self.scores else by


def _renew_in(
    optimizer: torch.optim.Optimizer, old: Mapping[int, torch.Tensor], new: Mapping[int, nn.Parameter]
) -> None:
    """Replace parameters, found by id, in an optimizer; their state stays."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    for key, parameter in new.items():
        if old[key] in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(old[key])


def _narrow(state: dict[str, Any], shape: tuple[int, ...], axes: Mapping[str, list[int]]) -> None:
    """Cut optimizer state of a parameter's shape like the parameter."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
            for axis, positions in axes.items():
                value = value.index_select(int(axis), torch.tensor(positions, device=value.device))
            state[key] = value
