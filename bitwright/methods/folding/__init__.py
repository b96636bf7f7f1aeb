"""Fold batch norms and the weights of other norms into adjacent layers."""
