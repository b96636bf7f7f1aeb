"""Find the layers and quantizers that cost accuracy, the causes, and the remedies; for simulations of both front ends."""

from bitwright.lazy import published

__all__, __getattr__, __dir__ = published(__name__, __file__)
