"""PyTorch models that hold codes in the place of float weights, and compute with the kernels that torch has for codes."""
