"""What a model brings with it: QuantizeLinear and DequantizeLinear of a file, their grids as encodings, and the sites of these.

What a simulation does with them is in :mod:`bitwright.onnx.simulation`.
"""
