"""Language models: quantized weights as files hold them, and the files that engines load."""

from bitwright.lazy import published

__all__, __getattr__, __dir__ = published(__name__, __file__)
