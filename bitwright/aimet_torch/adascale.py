"""``aimet_torch.adascale``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bitwright import torch as front
from bitwright.aimet_common.absent import absent_names, differs
from bitwright.aimet_torch._adaround import batches_for

__all__ = ["AdaScale", "apply_adascale"]

__getattr__ = absent_names(__name__)


def apply_adascale(
    qsim: front.QuantizationSimModel,
    data_loader: Iterable[Any],
    forward_fn: Any = None,
    num_iterations: int = 1500,
    checkpoint_dir: str | None = None,
    *,
    loss_fn: Any = None,
    **options: Any,
) -> Any:
    """:func:`bitwright.torch.apply_adascale`, in place; blocks are found in any network.

    Returns:
        Our report (AIMET returns nothing).
    """
    if loss_fn is not None:
        differs("apply_adascale(loss_fn=...)", "the loss is the mean squared error of a block's output")
    data = batches_for(data_loader, forward_fn)
    return front.apply_adascale(qsim, data, forward_fn, num_iterations, checkpoint_dir, **options)


class AdaScale:
    """The function as a method, as AIMET has it too."""

    apply_adascale = staticmethod(apply_adascale)
