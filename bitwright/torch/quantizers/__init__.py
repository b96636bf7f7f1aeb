"""Quantizers of torch tensors: fake-quantize and its gradients, learned ranges, steps of recurrent layers side by side.

They know tensors, not models; where they stand in a model is decided in :mod:`bitwright.torch.simulation`.
"""
