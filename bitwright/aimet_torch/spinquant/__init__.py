"""``aimet_torch.spinquant``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.absent import absent_names
from bitwright.errors import ModelError

__all__ = ["SpinQuant", "apply_spinquant"]

__getattr__ = absent_names(__name__)


def apply_spinquant(
    model: nn.Module, dummy_input: Any = None, *, enable_r1: bool = True, enable_r2: bool = False, **options: Any
) -> Any:
    """:func:`bitwright.torch.apply_spinquant`; language models need no ``dummy_input``, eight tokens are used.

    Returns:
        Our report of what was rotated (AIMET returns nothing).

    Raises:
        ModelError: no ``dummy_input`` and no embedding of tokens in the model.
    """
    if dummy_input is None:
        dummy_input = _tokens(model)
    return front.apply_spinquant(model, dummy_input, enable_r1=enable_r1, enable_r2=enable_r2, **options)


def _tokens(model: nn.Module) -> Any:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        raise ModelError(
            "apply_spinquant", "the model has no embedding of tokens, so that it is not a language model",
            "pass an example: apply_spinquant(model, dummy_input)",
        )  # fmt: skip
    largest = max(embeddings, key=lambda module: module.num_embeddings)
    device = largest.weight.device
    return torch.arange(8, device=device).remainder(largest.num_embeddings).unsqueeze(0)


class SpinQuant:
    """The function as a method, as AIMET has it too."""

    apply_spinquant = staticmethod(apply_spinquant)
