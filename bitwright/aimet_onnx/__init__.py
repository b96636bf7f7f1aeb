"""AIMET's package for ONNX on Bitwright: the module paths, names and signatures of ``aimet_onnx``.

``bitwright migrate script.py`` rewrites the imports of a script and says what behaves differently.
"""

from bitwright import __version__
from bitwright.aimet_common.defs import float8e4m3fn, float8e5m2, float16, int2, int4, int8, int16, qtype
from bitwright.aimet_common.names import names_below
from bitwright.aimet_onnx.analysis import analyze_per_layer_sensitivity
from bitwright.aimet_onnx.defs import QSpec
from bitwright.aimet_onnx.quantsim import QuantizationSimModel, compute_encodings, encodings_to_onnx_qdq
from bitwright.aimet_onnx.rounding import apply_adaround, apply_seq_mse

__all__ = [
    "QSpec", "QuantizationSimModel", "__version__", "analyze_per_layer_sensitivity", "apply_adaround",
    "apply_seq_mse", "compute_encodings", "encodings_to_onnx_qdq", "float8e4m3fn", "float8e5m2", "float16", "int2",
    "int4", "int8", "int16", "qtype",
]  # fmt: skip

__getattr__ = names_below(__name__)
