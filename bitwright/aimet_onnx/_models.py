"""Models as AIMET's scripts hand them over."""

from __future__ import annotations

import os
from typing import Any

import onnx


def proto_of(model: Any) -> onnx.ModelProto:
    """The protobuf of a ``ModelProto``, of ONNX Runtime's ``ONNXModel`` wrapper, or of a file."""
    if isinstance(model, (str, os.PathLike)):
        return onnx.load(str(model))
    inner = getattr(model, "model", None)
    return inner if isinstance(inner, onnx.ModelProto) else model


def wrapped(model: onnx.ModelProto) -> Any:
    """A model in ONNX Runtime's wrapper."""
    from onnxruntime.quantization.onnx_model import ONNXModel

    return ONNXModel(model)
