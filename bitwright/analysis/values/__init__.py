"""Values inside of the model, in float and quantized: how they lie on their grids, and where error is made.

What that costs the model's result is in ``metrics``.
"""
