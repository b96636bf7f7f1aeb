"""Torch functions: operands and results, decompositions of fused calls, and tensors in nested arguments.

Which calls a model makes is recorded in :mod:`bitwright.torch.interception`.
"""
