"""The simulation of a torch module: quantizers at calls, ``QuantizationSimModel``, checkpoints and export."""
