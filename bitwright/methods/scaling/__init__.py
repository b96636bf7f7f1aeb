"""Rescale channels without changing the function: equalization, SmoothQuant, AWQ, rotations, fitted transforms."""
