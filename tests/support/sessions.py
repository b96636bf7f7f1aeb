"""Sessions of ONNX Runtime that compute the same on every CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from bitwright.compare.runtime import EXACT_SUMS


def integer_session(source: onnx.ModelProto | str | Path) -> Any:
    """A session on one thread with integer kernels, whose sums are exact on CPUs without VNNI too."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    for key, value in EXACT_SUMS.items():
        options.add_session_config_entry(key, value)
    content = source.SerializeToString() if isinstance(source, onnx.ModelProto) else str(source)
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
