"""Record the two kinds of forward calls of ``generate``: on all tokens of an input, then on one token with a cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn

from bitwright.core.graph.operators import op_row
from bitwright.torch.calls.functions import Function
from bitwright.torch.calls.inputs import Continuation, as_call, caches_in, evaluation, map_tensors, same_draws
from bitwright.torch.interception.intercept import Frame, Handler, Key, forward_signature

logger = logging.getLogger("bitwright")

#: inputs of a forward that ``generate`` makes itself
_MADE = (
    "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "labels", "position_ids", "cache_position",
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "logits_to_keep",
)  # fmt: skip
_TOKENS = 2


def generates(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers that generates tokens with a cache."""
    can: Any = getattr(model, "can_generate", None)
    return callable(getattr(model, "generate", None)) and callable(can) and bool(can())


def generated_calls(model: nn.Module, example: Any) -> list[Continuation]:
    """The forward calls while ``model`` generates two tokens from ``example``; none, with a log entry, where it cannot.

    Args:
        model: see :func:`generates`; whatever runs at its calls does so here, too.
        example: input of its forward. One with a cache is a call of that kind itself.
    """
    if caches_in(example):
        return []
    found: list[Continuation] = []

    def note(_model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found.append(map_tensors(Continuation(args, dict(kwargs)), torch.clone))

    args, kwargs = as_call(example)
    signature = forward_signature(model)
    if signature is not None and args:
        kwargs = {**signature.bind_partial(*args).arguments, **kwargs}
    named = {name: value for name, value in kwargs.items() if name not in _MADE and value is not None}
    generate: Any = model.generate
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), evaluation(model), same_draws():
            generate(**named, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False, num_beams=1)
    except Exception as error:
        logger.info(
            "generate fails on the example, whose forward alone is recorded: %s: %s", type(error).__name__, error
        )
        return []
    finally:
        hook.remove()
    return found


class UnseenCalls(Handler):
    """Computes in float; ``found``: whether a call with an integer kernel was at a place not in ``known``."""

    def __init__(self, known: Container[Key]) -> None:
        self._known, self.found = known, False

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def end(self, output: Any) -> None:
        """Nothing is kept."""

    def call(
        self,
        frame: Frame,
        key: Key,
        row: Function,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The call itself."""
        if not self.found and key not in self._known:
            self.found = op_row(row.op_type(row.bind(args, kwargs))).integer
        return func(*args, **kwargs)

    def other(self, frame: Frame, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call itself."""
        return func(*args, **kwargs)
