"""Framework-independent code: arithmetic, graphs, placement, the state of a simulation, numerical health.

numpy only. Reading and writing files belongs to ``export`` (configuration files are the exception: they become rules
here); running a model belongs to the front ends ``torch`` and ``onnx``.
"""
