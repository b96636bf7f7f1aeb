"""``aimet_onnx.common.utils``, shared with ``aimet_torch``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_common.utils")
