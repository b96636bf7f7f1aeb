"""Precision of every layer: candidates, costs, the search of ``mixed_precision`` and the trials of ``auto_quantize``."""
