"""Keep zeros at zero while a module trains: masks are buffers of the modules, and so part of the state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.core.simulation.float_model import Array, Handle
from bitwright.errors import ConfigError, checks_arguments, close_matches

SUFFIX = "_mask"


class _Zeros:
    """Sets masked weights to zero before a module runs: after an optimizer step, and before an export."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # the weights are as the last run left them
            return
        weight, mask = getattr(module, self.name), getattr(module, self.name + SUFFIX)
        with torch.no_grad():
            if bool(
                (weight != 0).logical_and(~mask).any()
            ):  # a write would spoil the gradient of a module that runs twice
                weight.mul_(mask)


@checks_arguments
def keep_masks(model: nn.Module, masks: Mapping[str, Array | torch.Tensor]) -> Handle:
    """Keep weights at zero in training and export by constant masks.

    Every mask becomes a buffer beside its parameter, ``conv.weight_mask``: it is in the state dict, moves with the module, and is
    copied with it. A hook before the module's forward sets the weights that it leaves out to zero, whatever an optimizer made
    of them.

    Args:
        model: changed in place.
        masks: parameter -> what stays, boolean, of the parameter's shape: ``report.masks`` of ``sparsify_model``, or a state
            dict, of which the entries that end in ``_mask`` are taken.

    Returns:
        A handle: ``remove()`` sets the zeros once more and takes hooks and buffers away.

    Raises:
        ConfigError: a parameter that the model does not have, or a mask of another shape.
    """
    given = {name.removesuffix(SUFFIX): mask for name, mask in masks.items() if name.endswith(SUFFIX)} or dict(masks)
    own = dict(model.named_parameters())
    hooks: list[Any] = []
    for name, mask in given.items():
        if name not in own:
            raise ConfigError(
                name, f"the model has no such parameter{close_matches(name, own)}", "give masks of this model"
            )
        if tuple(mask.shape) != tuple(own[name].shape):
            raise ConfigError(
                name,
                f"its mask has the shape {tuple(mask.shape)}, the parameter {tuple(own[name].shape)}",
                "give its own mask",
            )
    for name, mask in given.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = mask if isinstance(mask, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(mask))
        module.register_buffer(attribute + SUFFIX, tensor.to(own[name].device, torch.bool))
        zeros = _Zeros(attribute)
        zeros(module, ())
        hooks.append((module, attribute, module.register_forward_pre_hook(zeros), zeros))

    def remove() -> None:
        for module, attribute, hook, zeros in hooks:
            zeros(module, ())
            hook.remove()
            delattr(module, attribute + SUFFIX)

    return Handle(remove)
