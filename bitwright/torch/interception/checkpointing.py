"""Activation checkpointing: what the backward pass computes again is intercepted where the forward was.

``torch.utils.checkpoint`` runs a function without keeping its intermediate results and calls it again in the backward pass,
where no forward of the model runs: the calls would find no place, and those outside of any module would not be seen at all.
A region is recognised by the first call inside of it, and the function that torch keeps for the backward pass is given the
frames as they stood then. Both variants keep it in an object that is made for each region, so nothing of torch is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

Resumed = Callable[[], AbstractContextManager[None]]

_REENTRANT = CheckpointFunction.forward.__code__
_CHECKPOINT = getattr(checkpoint, "__wrapped__", checkpoint).__code__
_PACK = "_checkpoint_hook.__init__.<locals>.pack_hook"


class Recomputed:
    """The function of a region, as the backward pass calls it.

    Args:
        owner: the interceptor.
        function: what was checkpointed.
        resumed: brings back the frames in which the region stood, inside of a block.
        line: where the region stands in the code.
    """

    def __init__(
        self, owner: object, function: Callable[..., Any], resumed: Resumed, line: tuple[Hashable, ...]
    ) -> None:
        self.owner, self.function, self.resumed, self.line = owner, function, resumed, line

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function, called from where it was called in the forward."""
        with self.resumed():
            return self.function(*args, **kwargs)


RECOMPUTES = Recomputed.__call__.__code__


class Region:
    """The innermost checkpointed region around a call; ``holder`` keeps its function under ``name``."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name = holder, name

    def known_to(self, owner: object) -> bool:
        """Whether the function has the frames of ``owner`` already."""
        function = getattr(self.holder, self.name)
        while isinstance(function, Recomputed):
            if function.owner is owner:
                return True
            function = function.function
        return False

    def resume_with(self, owner: object, resumed: Resumed, line: tuple[Hashable, ...]) -> None:
        """Let the backward pass call the function in a block of ``resumed``."""
        function = getattr(self.holder, self.name)
        setattr(self.holder, self.name, Recomputed(owner, function, resumed, line))


def region_of_call() -> Region | None:
    """The checkpointed region whose forward makes this call of a model in training; ``None`` outside of any.

    The variant ``use_reentrant=False`` computes with gradients under hooks of its own for saved tensors, the other one
    without gradients.
    """
    if torch.is_grad_enabled():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or getattr(hooks[0], "__qualname__", "") != _PACK:
            return None
        pack = hooks[0]
        held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))["frame"].cell_contents
        return Region(held, "recompute_fn")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            ctx = frame.f_locals["ctx"]  # before it has the function it looks at the arguments
            return Region(ctx, "run_function") if hasattr(ctx, "run_function") else None
        frame = frame.f_back
    return None


def frame_of_region() -> FrameType | None:
    """The frame of ``torch.utils.checkpoint.checkpoint`` that is innermost on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CHECKPOINT:
        frame = frame.f_back
    return frame
