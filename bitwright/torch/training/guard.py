"""Training steps that skip NaN and Inf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from bitwright.errors import ConfigError, ModelError, checks_arguments
from bitwright.torch.quantizers.learned_range import LearnedRange, check_ranges
from bitwright.torch.ranks import calibrating_ranks
from bitwright.torch.simulation.ranges import learned_ranges

if TYPE_CHECKING:
    from bitwright.torch.simulation.quantsim import QuantizationSimModel


class TrainingGuard:
    """Takes optimizer steps with clipped gradients, and skips those whose loss or gradients are not finite.

    A step that is left out changes nothing: parameters, ranges that are learned and the state of the optimizer stay finite,
    as one NaN in any of them would spoil every later step. It is counted, so that it does not pass unseen.

    Args:
        optimizer: its parameters are those that are trained.
        max_norm: gradients are scaled down where their common 2-norm is larger; ``None`` leaves them. Those of the ranges of
            ``sim`` have a norm of their own, with the same bound: they are thousands of times larger than the model's where a
            scale is small, and in one norm with them the model's would vanish.
        patience: so many steps in a row may be left out.
        sim: a simulation whose ranges are learned: a step that moves one far off its tensor, as with too large a learning
            rate, is an error that names the site, and the ranges are what they were before it.
        distributed: where a process group of several ranks is initialised, a step that is bad on one rank is left out on all of
            them: the others would wait for the gradients of that rank, or go another way than it. ``False`` lets every rank
            decide for itself.

    Attributes:
        steps: how many were taken.
        skipped: how many were left out.
        reasons: ``"loss"`` or ``"gradient"`` -> how many were left out because of it.
        norm, range_norm: of the gradients of the model and of the ranges of ``sim`` in the last step taken, before clipping.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> guard = TrainingGuard(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> guard.step(model(torch.full((1, 2), torch.nan)).sum()), guard.step(model(torch.ones(1, 2)).sum())
        (False, True)
        >>> guard
        TrainingGuard(1 steps, 1 skipped: 1 loss)
    """

    @checks_arguments
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = 1.0,
        *,
        patience: int = 20,
        sim: QuantizationSimModel | None = None,
        distributed: bool = True,
    ) -> None:
        if max_norm is not None and not 0 < max_norm < float("inf"):
            raise ConfigError("TrainingGuard", f"max_norm={max_norm!r} is not a norm", "use 1.0, or None not to clip")
        self.optimizer, self.max_norm, self.patience = optimizer, max_norm, patience
        self.steps = self.skipped = 0
        self.reasons: dict[str, int] = {}
        self.norm = self.range_norm = 0.0
        self._sim, self._distributed = sim, distributed
        self._in_a_row = 0

    def step(self, loss: torch.Tensor) -> bool:
        """Backward pass, clipping and optimizer step of ``loss``, a scalar; returns whether the step was taken.

        Raises:
            ModelError: more than ``patience`` steps in a row were left out, or a learned range left its tensor.
            CalibrationError: another rank ended, or did not take this step within the timeout of the process group.
        """
        self.optimizer.zero_grad()
        where = self._bad(not bool(torch.isfinite(loss.detach()).all()))
        if where is not None:
            return self._skip("loss", where)
        loss.backward()
        groups = self._groups()
        norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
        where = self._bad(not all(bool(torch.isfinite(norm)) for norm in norms))
        if where is not None:
            return self._skip("gradient", where)
        if self.max_norm is not None:
            for group, norm in zip(groups, norms, strict=True):
                nn.utils.clip_grads_with_norm_(group, self.max_norm, norm)
        self._take()
        self.norm, self.range_norm = (float(norm) for norm in norms)
        self._in_a_row = 0
        self.steps += 1
        return True

    def _groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The optimizer's parameters that have a gradient: those of the model, and those of learned ranges."""
        ranges = {id(p) for learned in self._ranges() for p in learned.parameters().values()}
        found: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    found[id(p) in ranges].append(p)
        return found

    def _ranges(self) -> list[LearnedRange]:
        return [] if self._sim is None else [learned for _, learned in learned_ranges(self._sim)]

    def _bad(self, here: bool) -> str | None:
        """The fault of this step in words; ``None`` where there is none."""
        ranks = calibrating_ranks(self._distributed)
        if ranks is None:
            return "" if here else None
        found = ranks.with_bad_step(here)
        return f" on rank {found[0]} of {ranks.count}" if found else None

    def _take(self) -> None:
        """Run the optimizer's step; restores ranges that it makes invalid, then raises the error."""
        ranges = self._ranges()
        states = [learned.state() for learned in ranges]
        self.optimizer.step()
        try:
            check_ranges(ranges)
        except ModelError:
            for learned, state in zip(ranges, states, strict=True):
                learned.put(state)
            raise

    def _skip(self, reason: str, where: str) -> bool:
        self.optimizer.zero_grad()
        self.skipped += 1
        self._in_a_row += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if self._in_a_row > self.patience:
            raise ModelError(
                "training",
                f"{self._in_a_row} steps in a row had a {reason} that is not finite{where}",
                "run check_model(model, [batch]) to find the operator; lower the learning rate if it began well",
            )
        return False

    def __repr__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return f"TrainingGuard({self.steps} steps, {self.skipped} skipped{': ' if reasons else ''}{reasons})"
