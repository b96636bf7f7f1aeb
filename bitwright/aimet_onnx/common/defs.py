"""``aimet_onnx.common.defs``, shared with ``aimet_torch``."""

from bitwright.aimet_common.aliases import names_of

__getattr__ = names_of("bitwright.aimet_common.defs")
