"""``bitwright.auto_quantize``: trials from cheap to dear, where they run, and the best of them on disk.

A trial may search for precisions; that search itself is in ``search``.
"""
