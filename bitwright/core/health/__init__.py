"""NaN, infinities, saturation and degenerate ranges: what was found, why it happened, how it can be repaired.

Finding them in a running model belongs to the front ends.
"""
