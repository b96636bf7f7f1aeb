"""Quantizers of torch tensors: fake-quantize and its gradients, learned ranges, steps of recurrent layers.

They know tensors, not models; where they stand in a model is decided in :mod:`bitwright.torch.simulation`.
"""
