"""Windows of convolutions and pools over an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


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


def windows(x: Array, kernel: Sequence[int], attrs: Mapping[str, Any], fill: float = 0) -> Array:
    """The window of each output of a convolution: a view ``[N, *positions, C, *kernel]`` of ``x [N, C, *space]``, padded.

    Args:
        x: the input.
        kernel: sizes of the kernel.
        attrs: ``strides``, ``pads``, ``dilations``, ``auto_pad`` as of ONNX.
        fill: the value of the padding, for codes the zero point.

    >>> windows(np.arange(4).reshape(1, 1, 4), (3,), {"pads": (1, 1), "strides": (2,)})[0, :, 0]
    array([[0, 0, 1],
           [1, 2, 3]])
    """
    n = len(kernel)
    strides, dilations = (tuple(attrs.get(key) or (1,) * n) for key in ("strides", "dilations"))
    pads = conv_pads(attrs, x.shape[2:], kernel)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)], constant_values=fill)
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=tuple(range(2, 2 + n)))
    places = (slice(None),) * 2 + tuple(slice(None, None, s) for s in strides)
    return np.moveaxis(view[places + tuple(slice(None, None, d) for d in dilations)], 1, n + 1)
