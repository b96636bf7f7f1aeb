"""The simulation of an ONNX model: markers in the graph, calibration, and ``QuantizationSimModel``."""
