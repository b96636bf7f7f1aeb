"""The search for precisions: points are chosen, measured and confirmed until the cheapest good one is known.

Costs and the choice among candidates are in ``choosing``; the search over methods as well as precisions is ``automatic``.
"""
