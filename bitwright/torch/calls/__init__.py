"""Torch functions: what each reads and makes, fused ones written as their parts, and the tensors in nested arguments.

Which calls a model makes is recorded in :mod:`bitwright.torch.interception`.
"""
