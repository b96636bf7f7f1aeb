"""The front end for ONNX models, on ``onnx_ir`` and ONNX Runtime."""

from bitwright.lazy import published

__all__, __getattr__, __dir__ = published(__name__, __file__)
