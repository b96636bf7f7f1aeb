"""The simulation of a torch module: quantizers at its calls, ``QuantizationSimModel``, checkpoints and export."""
