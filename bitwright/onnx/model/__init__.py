"""An ONNX model in memory: loading, opset conversion, graph view, feeds and sessions.

Nothing here knows quantizers; simulation lives in :mod:`bitwright.onnx.simulation`.
"""
