"""AIMET's package for PyTorch on Bitwright: the module paths, names and signatures of ``aimet_torch``.

``bitwright migrate script.py`` rewrites the imports of a script and says what behaves differently.
"""

from bitwright import __version__
from bitwright.aimet_common.names import names_below
from bitwright.aimet_torch import nn
from bitwright.aimet_torch.quantsim import QuantizationSimModel

__all__ = ["QuantizationSimModel", "__version__", "nn", "onnx", "quantization"]

__getattr__ = names_below(__name__)
