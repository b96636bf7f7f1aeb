"""Batch norms while a simulated model trains: their statistics taken anew, or frozen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.torch.calls.batches import as_call, evaluation, model_device, to_device
from bitwright.torch.calls.trees import walk_modules

logger = logging.getLogger("bitwright")

Norm = nn.modules.batchnorm._BatchNorm
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Handle:
    """Takes a change back: call :meth:`remove`, or leave the ``with`` block of it; once is enough."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Bring back what was before."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def batch_norms(model: nn.Module) -> dict[str, Norm]:
    """The batch norms of ``model`` that keep running statistics, by path."""
    found = {}
    for path, module in walk_modules(model):
        if isinstance(module, Norm) and module.running_mean is not None:
            found[path] = module
    return found


@dataclass
class _Pool:
    """Mean and variance of all values a batch norm was given, merged exactly over calls (Chan et al. 1979)."""

    count: float = 0.0
    mean: torch.Tensor | None = None
    squares: torch.Tensor | None = field(default=None)  # sum of squared distances from the mean

    def add(self, x: torch.Tensor) -> None:
        """Take in the input of a batch norm, ``[N, C, ...]``."""
        with (
            torch._C.DisableTorchFunction()
        ):  # a simulation looks at the calls of its model, and this is none of them
            self._add(x)

    def _add(self, x: torch.Tensor) -> None:
        values = x.detach().transpose(0, 1).flatten(1) if x.ndim > 2 else x.detach().t()
        count = values.shape[1]
        variance, mean = torch.var_mean(values.double(), 1, correction=0)
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, variance * count
            return
        total, apart = self.count + count, mean - self.mean
        self.squares = self.squares + variance * count + apart.square() * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total


def reestimate_bn_stats(
    model: nn.Module,
    dataloader: Iterable[Any],
    num_batches: int = 100,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
) -> Handle:
    """Take the running statistics of every batch norm anew, from what it is given in the quantized model.

    Weights that oscillate between two codes change the statistics from step to step, so that running averages are of weights
    that are gone (Nagel et al. 2022, arXiv:2203.11086, section 2.3.1). Batch norms normalise by the statistics of each batch
    meanwhile, as they do in training; all other modules are in evaluation mode, and nothing takes gradients. Means and variances
    of the batches are merged exactly, whatever their sizes.

    Args:
        model: ``sim.model``, or any other.
        dataloader: batches; labels are left out by ``forward_fn``.
        num_batches: at most so many are used.
        forward_fn: ``forward_fn(model, batch)``; by default batches are given as the model's forward takes them.

    Returns:
        A handle: ``remove()``, or the end of its ``with`` block, brings the old statistics back.

    Raises:
        ModelError: the model has no batch norm with running statistics.
        CalibrationError: no batch came, or no batch norm was run.
        ConfigError: ``num_batches`` is not positive.
    """
    norms = batch_norms(model)
    if num_batches < 1:
        raise ConfigError("reestimate_bn_stats", f"num_batches={num_batches}", "use at least 1")
    if not norms:
        raise ModelError(
            "reestimate_bn_stats",
            "the model has no batch norm with running statistics: they are folded, or there were none",
            "make the simulation from the model with its batch norms, train and re-estimate, then call "
            "fold_all_batch_norms_to_scale(sim)",
        )
    old = {id(n): {b: getattr(n, b).clone() for b in _BUFFERS if getattr(n, b) is not None} for n in norms.values()}  # fmt: skip

    def undo() -> None:
        with torch.no_grad():
            for norm in norms.values():
                for name, value in old[id(norm)].items():
                    getattr(norm, name).copy_(value)

    try:
        pools = _observed(model, norms, dataloader, num_batches, forward_fn)
    finally:
        undo()
    if not any(pool.count for pool in pools.values()):
        raise CalibrationError(
            "reestimate_bn_stats", "no batch came, or no batch norm was run", "pass a non-empty list or DataLoader"
        )  # fmt: skip
    found = {path: _statistics(path, pool) for path, pool in pools.items()}
    with torch.no_grad():
        for path, norm in norms.items():
            statistics = found[path]
            assert norm.running_mean is not None and norm.running_var is not None
            if statistics is not None:
                norm.running_mean.copy_(statistics[0])
                norm.running_var.copy_(statistics[1])
    return Handle(undo)


def _statistics(path: str, pool: _Pool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and variance; ``None`` where nothing was seen, which is told."""
    if pool.mean is None or pool.squares is None or pool.count < 2:
        logger.warning("%s: no batch reached it, so it keeps its statistics", path)
        return None
    variance = pool.squares / (pool.count - 1)  # without bias, as in running statistics of training
    if not bool(torch.isfinite(pool.mean).all() and torch.isfinite(variance).all()):
        raise CalibrationError(
            path,
            "its inputs have NaN or infinite values, so it has no statistics; every batch norm keeps those it had",
            "find the operator with check_model(model, batches), or leave the batch out",
        )
    return pool.mean, variance


def _observed(
    model: nn.Module,
    norms: dict[str, Norm],
    dataloader: Iterable[Any],
    num_batches: int,
    forward_fn: Callable[[nn.Module, Any], Any] | None,
) -> dict[str, _Pool]:
    pools = {path: _Pool() for path in norms}
    device = model_device(model)
    with torch.no_grad(), evaluation(model), _in_training(norms), ExitStack() as stack:
        for path, norm in norms.items():
            hook = norm.register_forward_pre_hook(lambda _, args, pool=pools[path]: pool.add(args[0]))
            stack.callback(hook.remove)
        for i, batch in enumerate(dataloader):
            if i == num_batches:
                break
            if forward_fn is not None:
                forward_fn(model, batch)
            else:
                args, kwargs = as_call(to_device(batch, device))
                model(*args, **kwargs)
    return pools


@contextmanager
def _in_training(norms: dict[str, Norm]) -> Iterator[None]:
    for norm in norms.values():
        norm.training = True
    try:
        yield
    finally:
        for norm in norms.values():
            norm.training = False


def freeze_batch_norms(model: nn.Module, after: int = 0) -> Handle:
    """Let batch norms use their running statistics from the step ``after`` on, although the model is in training mode.

    Args:
        model: ``sim.model``, or any other.
        after: so many forward passes in training mode go by before.

    Returns:
        A handle: ``remove()`` lets them go on as ``model.train()`` says.

    Raises:
        ModelError: the model has no batch norm with running statistics.
        ConfigError: ``after`` is negative.
    """
    norms = batch_norms(model)
    if after < 0:
        raise ConfigError("freeze_batch_norms", f"after={after}", "use 0 to freeze them at once")
    if not norms:
        raise ModelError(
            "freeze_batch_norms",
            "the model has no batch norm with running statistics: they are folded, or there were none",
            "leave the call out",
        )
    seen = 0
    switched: set[int] = set()

    def before(module: nn.Module, args: Any) -> None:
        nonlocal seen
        if not module.training or not torch.is_grad_enabled():
            return
        seen += 1
        training = [norm for norm in norms.values() if norm.training] if seen > after else []
        switched.update(id(norm) for norm in training)
        for norm in training:
            norm.training = False

    hook = model.register_forward_pre_hook(before)

    def undo() -> None:
        hook.remove()
        for norm in (norm for norm in norms.values() if id(norm) in switched):
            norm.training = model.training

    return Handle(undo)
