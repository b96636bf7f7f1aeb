"""LiteRT (TensorFlow Lite) files: a QDQ model of :mod:`bitwright.export.qdq` as a flatbuffer with integer kernels.

The simulation's grids are written as they are; an operator without an integer kernel for them is computed in float
between DEQUANTIZE and QUANTIZE, as the simulation computes it. Activations lie channels last, as the kernels read them.
"""
