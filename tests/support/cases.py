"""What a case of the zoo is, how its inputs are drawn, and how its model is built and given statistics."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Make = Callable[[torch.Generator], Any]


class Call(NamedTuple):
    """The arguments of one forward: ``model(*call.args, **call.kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    Attributes:
        name: readable, unique in its zoo; serves as test id.
        build: a new model, the same weights every time, in eval mode.
        inputs: the arguments from a generator.
        tags: what the case is about, to select by.
        expect: what batch-norm folding must do: absorb every one (``folds``) or touch none (``refuses``).
        pairs: how many (layer, batch norm) pairs fold.
        why: the reason of a refusal.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Call]
    tags: frozenset[str] = frozenset()
    expect: Literal["folds", "refuses"] | None = None
    pairs: int = 0
    why: str = ""

    def example(self, seed: int = 0) -> Call:
        """Inputs drawn with ``seed``; new tensors every time, as a model may write into them."""
        return self.inputs(torch.Generator().manual_seed(seed))

    def run(self, model: nn.Module, seed: int = 0) -> Any:
        """What ``model`` returns for ``example(seed)``, without gradients."""
        call = self.example(seed)
        with torch.no_grad():
            return model(*call.args, **call.kwargs)


def floats(*shape: int, scale: float = 1.5, shift: float = 0.3, dtype: torch.dtype = torch.float32) -> Make:
    """Normal numbers around ``shift``: off centre, so that ranges are asymmetric and means matter."""
    return lambda g: (torch.randn(*shape, generator=g) * scale + shift).to(dtype)


def ints(high: int, *shape: int) -> Make:
    """Whole numbers (token ids) in ``[0, high)``."""
    return lambda g: torch.randint(high, shape, generator=g)


def bools(*shape: int, first: bool = True) -> Make:
    """A mask, about half of it true; its first column is ``first``, so that no row is wholly masked."""

    def make(g: torch.Generator) -> Tensor:
        mask = torch.rand(*shape, generator=g) < 0.5
        mask[..., 0] = first
        return mask

    return make


def just(value: Any) -> Make:
    """A plain Python value."""
    return lambda g: value


def inputs(*args: Make, **kwargs: Make) -> Callable[[torch.Generator], Call]:
    """Arguments of a forward from one maker each."""
    return lambda g: Call(tuple(a(g) for a in args), {k: v(g) for k, v in kwargs.items()})


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.RMSNorm)


def _randomize_norms(model: nn.Module) -> None:
    """Give every normalisation factors like trained ones: spread over two octaves, some of them negative."""
    for module in model.modules():
        if isinstance(module, _NORMS) and isinstance(module.weight, nn.Parameter):
            sign = 1 - 2 * (torch.rand_like(module.weight) < 0.1).float()
            nn.init.uniform_(module.weight, 0.4, 1.6).data.mul_(sign)
            if isinstance(getattr(module, "bias", None), nn.Parameter):
                nn.init.normal_(module.bias, 0.1, 0.3)


def vary_norms_and_biases(model: nn.Module) -> None:
    """Change what initialisation leaves trivial, so that a mistake with it shows: weights of norms that are all alike, norms
    written out as modules of their own included, by random factors, and biases that are all alike by random numbers.
    """
    with torch.no_grad():
        for module in model.modules():
            norm = "norm" in type(module).__name__.lower()
            for name, parameter in module.named_parameters(recurse=False):
                whole = parameter.is_floating_point() and parameter.numel() > 1
                if parameter.dim() != 1 or not whole or bool((parameter != parameter[0]).any()):
                    continue
                if name.endswith("bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif norm and bool(parameter[0]):
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 2))
                elif norm:  # one is added to it
                    parameter.uniform_(-0.5, 0.5)


def settle(model: nn.Module, make: Callable[[torch.Generator], Call], batches: int = 3) -> nn.Module:
    """Give the batch norms of ``model`` the statistics of ``batches`` batches; it ends in eval mode."""
    norms = [m for m in model.modules() if isinstance(m, _BATCH_NORMS) and m.track_running_stats]
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.momentum = None  # the plain average of all batches
    model.train()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _ in range(batches if norms else 0):
            call = make(generator)
            args = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in call.args]
            model(*args, **call.kwargs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


def builder(
    name: str,
    build: Callable[[], nn.Module],
    make: Callable[[torch.Generator], Call],
    finish: Callable[[nn.Module], object] | None,
) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()))
            model = build()
            _randomize_norms(model)
            vary_norms_and_biases(model)
            settle(model, make)
        if finish is not None:
            finish(model)
        return model

    return seeded
