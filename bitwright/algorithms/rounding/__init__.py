"""Choosing weights on the grid: GPTQ, SeqMSE, AdaRound, FlexRound, block reconstruction, and the walk they share.

torch may be imported here. Methods that only move scales or biases live in ``scaling`` and ``bias_correct``.
"""
