"""Number formats, granularities, encodings, statistics of tensors, and the reference arithmetic.

Everything here works on arrays alone. Operators and graphs live in :mod:`bitwright.core.graph`; which tensor gets
which format is decided in :mod:`bitwright.core.placement`.
"""
