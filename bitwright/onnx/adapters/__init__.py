"""An ONNX simulation as the protocols of :mod:`bitwright.algorithms` see it."""
