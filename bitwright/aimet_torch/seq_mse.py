"""``aimet_torch.seq_mse``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_torch import _modules
from bitwright.aimet_torch._adaround import batches_for
from bitwright.aimet_torch._core import walk_modules
from bitwright.aimet_torch.utils import default_forward_fn

__all__ = ["SeqMseParams", "apply_seq_mse"]

__getattr__ = absent_names(__name__)


@dataclass
class SeqMseParams:
    """What the older call ``apply_seq_mse(model, sim, data_loader, params)`` is to do.

    Attributes:
        num_batches: how many batches are used; all with ``None``.
        num_candidates: fractions of the range that are tried per channel.
        inp_symmetry: ``symqt``, ``symfp`` or ``asym``.
        loss_fn: ``mse``, ``l1`` or ``sqnr``.
        forward_fn: ``forward_fn(model, batch)``.

    Raises:
        ConfigError: (a ValueError) a value that AIMET does not know either.
    """

    num_batches: int | None = 4
    num_candidates: int = 20
    inp_symmetry: str = "symqt"
    loss_fn: str = "mse"
    forward_fn: Any = default_forward_fn

    def __post_init__(self) -> None:
        front.SeqMseParams(
            self.num_batches, self.num_candidates, self.inp_symmetry, self.loss_fn
        )  # refuses unknown ones


def apply_seq_mse(*args: Any, **kwargs: Any) -> None:
    """Choose the range of every weight by its layer's output error, and freeze it.

    Two calls: ``(sim, data_loader, num_candidates=20, forward_fn=..., modules_to_exclude=None, checkpoints_config=None,
    cache_dir=None)``, and the older ``(model, sim, data_loader, params, modules_to_exclude=None, checkpoints_config=None,
    cache_dir=None)``. Modules to exclude may be those of the simulation or of the model it was made from.
    """
    if isinstance(args[0], nn.Module) if args else "model" in kwargs:
        _older(*args, **kwargs)
    else:
        _newer(*args, **kwargs)


def _newer(
    sim: front.QuantizationSimModel,
    data_loader: Iterable[Any],
    num_candidates: int = 20,
    forward_fn: Any = default_forward_fn,
    modules_to_exclude: Iterable[nn.Module] | None = None,
    checkpoints_config: str | None = None,
    cache_dir: str | Path | None = None,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> None:
    own = None if forward_fn is default_forward_fn else forward_fn
    front.apply_seq_mse(
        sim, batches_for(data_loader, own), num_candidates, own,
        _of_simulation(sim, model, modules_to_exclude or ()), None, cache_dir, **options,
    )  # fmt: skip


def _older(
    model: nn.Module,
    sim: front.QuantizationSimModel,
    data_loader: Iterable[Any],
    params: SeqMseParams,
    modules_to_exclude: Iterable[nn.Module] | None = None,
    checkpoints_config: str | None = None,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> None:
    batches = Few(data_loader, params.num_batches)
    _newer(sim, batches, params.num_candidates, params.forward_fn, modules_to_exclude, checkpoints_config,
           cache_dir, model=model, inp_symmetry=params.inp_symmetry, loss_fn=params.loss_fn, **options)  # fmt: skip


class Few:
    """The first batches of a loader."""

    def __init__(self, loader: Iterable[Any], count: int | None) -> None:
        self._loader, self._count = loader, count

    def __iter__(self) -> Any:
        import itertools

        return itertools.islice(self._loader, self._count)


def _of_simulation(
    sim: front.QuantizationSimModel, model: nn.Module | None, modules: Iterable[nn.Module]
) -> list[nn.Module]:
    """The simulation's modules for those of either model; those without a weight have no effect."""
    named = dict(walk_modules(sim.model))
    names = {id(module): name for name, module in named.items()}
    names |= {id(module): name for module, name in getattr(sim, "original_names", {}).items()}
    names |= {id(module): name for name, module in (walk_modules(model) if model is not None else ())}
    found = []
    for module in modules:
        own = named.get(names.get(id(module), ""), module) if id(module) in names else module
        if id(module) not in names or _has_weights(own):
            found.append(own)
    return found


def _has_weights(module: nn.Module) -> bool:
    return any(
        slot.sites for record in _modules.below(module) for name, slot in record.slots() if name.startswith("param")
    )
