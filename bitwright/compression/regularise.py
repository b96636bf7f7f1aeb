"""Sparse training: a loss that draws whole units of groups to zero, so that pruning them costs little."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bitwright.compression.checks import checked_dependencies
from bitwright.compression.groups import Group
from bitwright.errors import ConfigError
from bitwright.methods.front_end import front_end_of


def prunable_groups(model: nn.Module, example: Any) -> tuple[Group, ...]:
    """Find the groups of units that :func:`bitwright.compress` can remove from a module; the module is not changed.

    Args:
        model: a module.
        example: a batch.

    Raises:
        ModelError: the module cannot be recorded.
    """
    return checked_dependencies(front_end_of(model).structured(model, example, None), example).groups


def regularisation(model: nn.Module, groups: Iterable[Group]) -> torch.Tensor:
    """The group lasso over units: ``loss + factor * regularisation(model, groups)``.

    The norm of everything that makes or reads a unit, times the root of its size, summed over units and divided by their number
    (Wen et al. 2016, arXiv:1608.03665).

    Args:
        model: the module, in any state of training.
        groups: of :func:`prunable_groups`; make them anew when the module was pruned.

    Returns:
        A scalar to differentiate, of the dtype of the parameters.

    Raises:
        ConfigError: no groups; or a group is of another model: a parameter is missing or shorter.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    total: Any = 0.0
    units = 0
    for group in groups:
        squares: Any = 0.0
        size = 0
        for member in (*group.makers, *group.readers):
            tensor = tensors.get(member.param)
            if (
                tensor is None
                or tensor.dim() <= member.axis
                or int(member.positions.max()) >= tensor.shape[member.axis]
            ):
                has = "no such parameter" if tensor is None else f"the shape {tuple(tensor.shape)}"
                raise ConfigError(
                    member.param, f"the groups are of another model: this one has {has}", "call prunable_groups(model)"
                )
            places = torch.from_numpy(member.positions.reshape(-1)).to(tensor.device)
            rows = tensor.index_select(member.axis, places).movedim(member.axis, 0).reshape(group.units, -1)
            squares, size = squares + rows.square().sum(1), size + rows.shape[1]
        total = total + (size * (squares + 1e-12)).sqrt().sum()
        units += group.units
    if not units:
        raise ConfigError("groups", "there are none", "see bitwright.compress(...).refused for what blocks the layers")
    found: torch.Tensor = total / units
    return found
