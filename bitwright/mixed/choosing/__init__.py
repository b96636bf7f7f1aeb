"""The choice of a candidate per group: its costs, the estimate of its noise, and the integer program that weighs the two.

Nothing here runs a model on the user's data: estimates come in, choices go out.
"""
