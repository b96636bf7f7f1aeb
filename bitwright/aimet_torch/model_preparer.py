"""``aimet_torch.model_preparer``: nothing needs preparing here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from bitwright import torch as front

__all__ = ["prepare_model", "prepare_pt_transformer_for_quantsim"]


def prepare_model(
    model: nn.Module,
    modules_to_exclude: Sequence[nn.Module] | None = None,
    module_classes_to_exclude: Sequence[Any] | None = None,
    concrete_args: dict[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``model``, of its own class: functional calls are quantized as they are, so that nothing is rewritten.

    The other arguments have no effect.
    """
    return front.prepare_model(model)


def prepare_pt_transformer_for_quantsim(transformer_model: nn.Module) -> None:
    """Nothing is to be prepared."""
