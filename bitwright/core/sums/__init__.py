"""Sums of products: what an integer accumulator can hold, the int32 biases that are added to it, and exact sums of floats.

Grids of single tensors are in :mod:`bitwright.core.numerics`.
"""
