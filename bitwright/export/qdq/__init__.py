"""Marked models become standard ONNX models with QuantizeLinear and DequantizeLinear.

Checking the result belongs to :mod:`bitwright.compare.verify`.
"""
