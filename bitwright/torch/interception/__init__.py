"""A model's forward, intercepted: which module runs, which place a call is, and the graph that a run records.

Which functions there are is in :mod:`bitwright.torch.calls`; what happens at a call is decided by a handler, as in
:mod:`bitwright.torch.simulation`. No quantizer lives here.
"""
