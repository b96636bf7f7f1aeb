"""PyTorch models that hold codes instead of float weights, and compute with torch's integer and fp8 kernels."""
