"""What ``torch.compile`` is told of an intercepted model, and what is refused because it would not show it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from bitwright.errors import ModelError
from bitwright.torch.calls.trees import walk_modules

logger = logging.getLogger("bitwright")

Call = TypeVar("Call", bound=Callable[..., Any])

_FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


# What torch.compiler offers for the next two loads the whole compiler, which takes longer than the rest of this package.


def without_compiler(function: Call) -> Call:
    """``function`` runs without a compiler, and with it all that it calls; as ``torch.compiler.disable``."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def constant_for_compilers(function: Call) -> Call:
    """A compiler calls ``function`` while it reads, and keeps the result; as ``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compiled_only_inside_others(function: Call) -> Call:
    """Let the compiler read ``function`` where one that it compiles calls it, and begin no graph there.

    Where a graph breaks further inside, the compiler would begin anew in ``function`` and run parts of the graph while calls are
    intercepted: what quantizers compute in a part would be taken for calls of the model.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def compiler_gave_up() -> bool:
    """Whether a compiler is at work in this thread, in whose graph the function that runs now is not."""
    return eval_frame.get_eval_frame_callback() is not None


def tell_broken(model: nn.Module) -> None:
    """Warn that a compiler did not read the forward of ``model`` to its end."""
    logger.warning(
        "%s: torch.compile breaks its graph inside this model, so the simulation runs without being compiled; "
        "TORCH_LOGS=graph_breaks says where, and nn.RNN, nn.GRU and nn.LSTM are compiled with "
        "torch._dynamo.config.allow_rnn = True",
        type(model).__name__,
    )


def refuse_fused_layers(model: nn.Module) -> None:
    """Refuse layers that would run as one kernel.

    Raises:
        ModelError: there is one, in inference.
    """
    if torch.is_grad_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return
    for path, module in walk_modules(model):
        if isinstance(module, _FUSED) and not module.training:
            raise ModelError(
                path,
                "torch.compile takes the fused kernel of this attention layer in inference, which has no quantizers",
                "call torch.backends.mha.set_fastpath_enabled(False) and torch._dynamo.reset(), and compile the model anew",
            )


def refuse_hidden_functions(model: nn.Module, hidden: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a model that was recorded with a function which a compiler does not show.

    Args:
        model: for the message.
        hidden: path of a module -> the function's name, and what to write instead.

    Raises:
        ModelError: there is one.
    """
    for path, (name, instead) in hidden.items():
        raise ModelError(
            path or type(model).__name__,
            f"torch.compile does not show {name} to a simulation, so its output would have no quantizer",
            f"use {instead} there, or run the simulation without compiling",
        )
