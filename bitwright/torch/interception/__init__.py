"""Interception of a model's forward: the running module, the places of calls, and the recorded graph.

Which functions there are is in :mod:`bitwright.torch.calls`; what happens at a call is decided by a handler, as in
:mod:`bitwright.torch.simulation`. No quantizer lives here.
"""
