"""A module in place of a block that was replaced, and the step of a plan that puts it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bitwright.core.simulation.float_model import Undo
from bitwright.errors import ConfigError
from bitwright.torch.calls.inputs import walk_modules

VARIANTS = ("linear", "identity", "none")


class Replaced(nn.Module):
    """In place of a block: a linear layer, the input as it is, or zeros; other results of the block are ``None``.

    Args:
        variant: one of ``linear``, ``identity``, ``none``.
        width: channels of the input.
        images: channels are the second axis, and not the last.
        results: how many results the block returned as a tuple; 0 where it returned a tensor.
        reads: keyword under which the block is given its input; empty for the first argument.
    """

    def __init__(self, variant: str, width: int, images: bool = False, results: int = 0, reads: str = "") -> None:
        super().__init__()
        self.variant, self.images, self.results, self.reads = variant, images, results, reads
        self.linear = nn.Linear(width, width) if variant == "linear" else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the block that it replaces."""
        x = kwargs[self.reads] if self.reads else args[0]
        if self.linear is not None:
            made = self.linear(x.movedim(1, -1)).movedim(-1, 1) if self.images else self.linear(x)
        else:
            made = x if self.variant == "identity" else torch.zeros_like(x)
        return (made, *[None] * (self.results - 1)) if self.results else made


def put_block(model: nn.Module, name: str, module: nn.Module) -> Undo:
    """Put a module in place of the one of that path; the function returned takes it back."""
    modules = dict(walk_modules(model))
    parent, _, last = name.rpartition(".")
    before = modules[name]
    modules[parent]._modules[last] = module

    def undo() -> None:
        modules[parent]._modules[last] = before

    return undo


def replaced_again(model: nn.Module, step: Mapping[str, Any]) -> None:
    """Carry out a step of a plan.

    Raises:
        ConfigError: the step is damaged, or of another model.
    """
    name: Any = step.get("module")
    options: Any = step.get("with")
    known = {"variant": str, "width": int, "images": bool, "results": int, "reads": str}
    good = isinstance(options, Mapping) and options.keys() == known.keys()
    if not isinstance(name, str) or not good or not all(type(options[k]) is kind for k, kind in known.items()):
        raise ConfigError(
            "plan", "a step does not say what stands in place of a block", "give the plan as it was written"
        )
    if name not in dict(walk_modules(model)) or not name or options["variant"] not in VARIANTS or options["width"] < 1:
        raise ConfigError(name, "the plan replaces it, and the model has no such block", "rebuild the original class")
    put_block(model, name, Replaced(**options))
