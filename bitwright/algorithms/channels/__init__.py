"""Layers as channels: which layers there are, how channels connect them, and trial edits that are checked.

What is done with channels lives in ``folding`` and ``scaling``.
"""
