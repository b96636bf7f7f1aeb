"""``aimet_onnx.adascale``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bitwright import onnx as front
from bitwright.aimet_common.absent import absent_names, differs

__all__ = ["AdaScale", "apply_adascale"]

__getattr__ = absent_names(__name__)


def apply_adascale(
    sim: front.QuantizationSimModel,
    inputs: Iterable[Any],
    adascale_model_config: Any = None,
    num_iterations: int = 1500,
    *,
    topology: Any = None,
    loss_fn: Any = None,
    **options: Any,
) -> None:
    """:func:`bitwright.onnx.apply_adascale`: blocks are found in any network, so that no configuration is read."""
    if loss_fn is not None:
        differs("apply_adascale(loss_fn=...)", "the loss is the mean squared error of a block's output")
    front.apply_adascale(sim, inputs, None, num_iterations, **options)


class AdaScale:
    """The function as a method, as AIMET has it."""

    apply_adascale = staticmethod(apply_adascale)
