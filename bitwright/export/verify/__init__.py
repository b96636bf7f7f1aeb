"""Layer-by-layer comparison of an exported file with the simulation, in ONNX Runtime."""
