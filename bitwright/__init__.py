"""Bitwright: simulate, repair and export quantized neural networks.

Names load when they are first used: ``import bitwright`` alone imports no framework and no other package.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# Every public name and the module it lives in; `dir(bitwright)` is this list and `__version__`.
_HOME = {
    "quantize": "bitwright.torch.pipeline",
    "QuantSpec": "bitwright.core.numerics.spec",
    "RangeMethod": "bitwright.core.numerics.spec",
    "Preset": "bitwright.core.numerics.spec",
    "PRESETS": "bitwright.core.numerics.spec",
    "Rule": "bitwright.core.placement.rules",
    "IntFormat": "bitwright.core.numerics.formats",
    "FloatFormat": "bitwright.core.numerics.formats",
    "PerTensor": "bitwright.core.numerics.granularity",
    "PerChannel": "bitwright.core.numerics.granularity",
    "PerBlock": "bitwright.core.numerics.granularity",
    "PerGate": "bitwright.core.numerics.granularity",
    "BitwrightError": "bitwright.errors",
    "BusyError": "bitwright.errors",
    "CalibrationError": "bitwright.errors",
    "ConfigError": "bitwright.errors",
    "EncodingsError": "bitwright.errors",
    "ExportError": "bitwright.errors",
    "FormatError": "bitwright.errors",
    "GranularityError": "bitwright.errors",
    "ModelError": "bitwright.errors",
    "RangeError": "bitwright.errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    """Import the module of a public name when the name is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'bitwright' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
