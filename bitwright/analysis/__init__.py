"""Which layer and which quantizer cost the accuracy, why, and what helps; for simulations of both front ends."""

from bitwright.lazy import published

__all__, __getattr__, __dir__ = published(__name__, __file__)
