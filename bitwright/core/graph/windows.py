"""How convolutions and pools move their window over an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def conv_pads(attrs: Mapping[str, Any], sizes: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """ONNX ``pads`` (all begins, then all ends) of a convolution or pool, ``auto_pad`` resolved.

    >>> conv_pads({"auto_pad": "SAME_UPPER", "strides": (2,), "dilations": (1,)}, (8,), (3,))
    (0, 1)
    """
    mode, rank = str(attrs.get("auto_pad") or "NOTSET"), len(kernel)
    if mode == "VALID":
        return (0,) * 2 * rank
    if not mode.startswith("SAME"):
        return tuple(int(p) for p in attrs.get("pads") or (0,) * 2 * rank)
    strides, dilations = (attrs.get(key) or (1,) * rank for key in ("strides", "dilations"))
    totals = [
        max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    less, more = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (*less, *more) if mode == "SAME_UPPER" else (*more, *less)
