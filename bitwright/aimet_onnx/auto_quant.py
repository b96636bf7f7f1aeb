"""``aimet_onnx.auto_quant``: automatic quantization under AIMET's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bitwright.aimet_common.auto_quant import AutoQuantBase

__all__ = ["AutoQuant"]


class AutoQuant(AutoQuantBase):
    """See :class:`bitwright.aimet_common.auto_quant.AutoQuantBase`.

    Args:
        model: the float model.
        dummy_input: taken from the data; kept for AIMET's order of arguments.
        data_loader: batches without labels.
        eval_callback: ``(model or session) -> accuracy``.
        results_dir: folder of the trials.
    """

    def __init__(
        self,
        model: Any,
        dummy_input: Any,
        data_loader: Iterable[Any],
        eval_callback: Callable[[Any], float],
        results_dir: str = "./autoquant",
        **options: Any,
    ) -> None:
        super().__init__(model, data_loader, eval_callback, results_dir, **options)
