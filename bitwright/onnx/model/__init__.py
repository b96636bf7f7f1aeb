"""An ONNX model in memory: loaded, brought to a known opset, viewed as a graph, fed with data, run in sessions.

Nothing here knows quantizers; simulation lives in :mod:`bitwright.onnx.simulation`.
"""
