"""Absorbing norms into the layers beside them: where it is possible, and doing it with a check of the function."""
