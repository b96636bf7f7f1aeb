"""AIMET's package for PyTorch on Bitwright: the module paths, names and signatures of ``aimet_torch``.

``bitwright migrate script.py`` rewrites the imports of a script and says what behaves differently.
"""

from bitwright import __version__
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_torch import nn, onnx, quantization
from bitwright.aimet_torch.quantsim import QuantizationSimModel

__all__ = ["QuantizationSimModel", "__version__", "nn", "onnx", "quantization"]

__getattr__ = absent_names(__name__)
