"""Bitwright: simulate, repair and export quantized neural networks.

Names load when they are first used: ``import bitwright`` alone imports no framework and no other package.
"""

from bitwright.lazy import published

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = published(__name__, __file__)
