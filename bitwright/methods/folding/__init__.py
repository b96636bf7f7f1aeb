"""Absorb batch norms and the weights of other norms into the layers beside them."""
