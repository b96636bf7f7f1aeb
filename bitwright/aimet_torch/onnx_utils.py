"""``aimet_torch.onnx_utils``: arguments of ONNX exports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitwright.aimet_common.absent import absent_names

__all__ = ["OnnxExportApiArgs"]

__getattr__ = absent_names(__name__)


@dataclass
class OnnxExportApiArgs:
    """What ``sim.export(onnx_export_args=...)`` takes; the opset has no effect here."""

    opset_version: int | None = None
    input_names: list[str] | None = None
    output_names: list[str] | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments as keywords."""
        return dict(vars(self))
