"""``aimet_torch.model_validator.model_validator``: whether a model can be simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bitwright import torch as front
from bitwright.errors import ModelError

__all__ = ["ModelValidator"]


class ModelValidator:
    """Reused modules and functional calls are not obstacles here; a model that cannot be recorded is one."""

    @staticmethod
    def validate_model(
        model: nn.Module, model_input: Any, checks: tuple[Callable[..., bool], ...] = (), **kwargs: Any
    ) -> bool:
        """Whether ``model`` runs on ``model_input`` and its operators can be seen; ``checks`` are asked as well.

        A check is ``check(model, model_input, **kwargs) -> bool``.
        """
        try:
            front.QuantizationSimModel(model, model_input)
        except ModelError:
            return False
        return all(check(model, model_input, **kwargs) for check in checks)

    @staticmethod
    def add_check(validation_check: Callable[..., bool]) -> None:
        """AIMET keeps checks for the whole process; here they are given to :meth:`validate_model`.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "ModelValidator.add_check",
            "checks are not kept for the process",
            "pass them: ModelValidator.validate_model(model, model_input, checks=(check,))",
        )
