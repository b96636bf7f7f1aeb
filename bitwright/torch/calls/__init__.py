"""Calls of torch functions: intercepted, identified, recorded, and fused calls written as their parts.

No quantizer lives here; what happens at a call is the business of a handler in :mod:`bitwright.torch.simulation`.
"""
