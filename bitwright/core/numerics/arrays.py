"""Array functions for numpy and torch alike, chosen by the type of the argument; and windows of convolutions in numpy.

Torch is looked up among the modules that are loaded already and never imported here: an array can only be a
tensor if its owner imported torch. Where both libraries use one name (``where``, ``clip``, ``isnan``,
``frexp``) the code calls ``namespace(x).where(...)``; the functions below are the ones that differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any
"""A numpy array or a torch tensor."""

_COUNTED_BY_TORCH = frozenset((np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64)))


def is_torch(x: object) -> bool:
    """Whether ``x`` is a torch tensor (parameters and other subclasses included)."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(x, tensor)


def namespace(x: object) -> Any:
    """The array module of ``x``: ``torch`` for tensors, ``numpy`` for everything else."""
    return sys.modules["torch"] if is_torch(x) else np


def as_array(x: Any) -> Array:
    """``x`` without its gradient history if it is a tensor, else as a numpy array.

    >>> as_array([1, 2]).shape
    (2,)
    """
    return x.detach() if is_torch(x) else np.asarray(x)


def dtype_name(x: Array) -> str:
    """``"float32"``, ``"bfloat16"``, ``"int64"``, ...: the same names for both libraries."""
    return str(x.dtype).removeprefix("torch.")


def is_floating(x: Array) -> bool:
    """Whether the elements are floating-point numbers; half and bfloat16 count."""
    return "float" in dtype_name(x)


def cast(x: Array, dtype: Any) -> Array:
    """``x`` with ``dtype``, a name (``"float32"``) or a dtype of its library; no copy if it has it."""
    if is_torch(x):
        return x.to(getattr(sys.modules["torch"], dtype) if isinstance(dtype, str) else dtype)
    return x.astype(dtype, copy=False)


def like(value: NDArray[Any], x: Array, dtype: str) -> Array:
    """The numpy array ``value`` as an array of ``x``'s library, on its device, with ``dtype``.

    A divisor has to lie on the device of the dividend: torch replaces the division of a GPU tensor by a host
    scalar with a multiplication by the reciprocal, which rounds differently.
    """
    if is_torch(x):
        torch = sys.modules["torch"]
        return torch.tensor(np.asarray(value), dtype=getattr(torch, dtype), device=x.device)
    return np.asarray(value, dtype)


def share(value: NDArray[Any], x: Array) -> Array:
    """The numpy array ``value`` as an array of ``x``'s library and device; on the host it shares its memory."""
    if is_torch(x):
        return sys.modules["torch"].from_numpy(value).to(x.device)
    return value


def to_numpy(x: Array) -> NDArray[Any]:
    """``x`` on the host as a numpy array; bfloat16 tensors, which numpy lacks, as float32."""
    if is_torch(x):
        x = x.detach()
        return np.asarray((x.float() if dtype_name(x) == "bfloat16" else x).cpu())
    return np.asarray(x)


def rint(x: Array) -> Array:
    """Nearest integer, ties to even, same dtype."""
    return x.round() if is_torch(x) else np.rint(x)


def transpose(x: Array, axes: tuple[int, ...]) -> Array:
    """``x`` with its axes in the order ``axes``; a view."""
    return x.permute(axes) if is_torch(x) else np.transpose(x, axes)


def padded(x: Array, axis: int, count: int) -> Array:
    """``x`` with ``count`` zeros appended along ``axis``."""
    missing = [0] * (2 * x.ndim)
    missing[2 * axis + 1] = count
    if is_torch(x):
        order = [missing[2 * i + end] for i in reversed(range(x.ndim)) for end in (0, 1)]
        return sys.modules["torch"].nn.functional.pad(x, order)
    return np.pad(x, list(zip(missing[::2], missing[1::2], strict=True)))


def row_bounds(rows: Array) -> tuple[Array, Array]:
    """Minimum and maximum of every row of a ``(rows, n)`` array, n > 0; NaN wherever a row holds one.

    Two reductions, because ``torch.aminmax`` along an axis takes twenty times as long.
    """
    return (rows.amin(1), rows.amax(1)) if is_torch(rows) else (rows.min(1), rows.max(1))


def bounds(x: Array) -> tuple[float, float]:
    """Minimum and maximum of all elements, at least one; NaN if one is."""
    lo, hi = x.aminmax() if is_torch(x) else (x.min(), x.max())
    return float(lo), float(hi)


def bincount(codes: Array, size: int) -> NDArray[np.int64]:
    """How often each of ``0 ... size - 1`` occurs in ``codes`` (1-D, integers), int64 on the host.

    Torch, where it is loaded, also counts for numpy: it needs neither a conversion to int64 nor a copy and takes 0.6 of
    the time.
    """
    torch = sys.modules.get("torch")
    if not is_torch(codes) and torch is not None and codes.dtype in _COUNTED_BY_TORCH:
        codes = torch.from_numpy(codes)
    if is_torch(codes):
        return to_numpy(codes.bincount(minlength=size))
    return np.bincount(codes, minlength=size).astype(np.int64, copy=False)


def nonzeros(x: Array) -> int:
    """How many elements of ``x`` (float32 or float64, up to 2**24 of them) differ from zero.

    For tensors a sum of signs, exact in float32: ``torch.count_nonzero`` takes 25 times as long on sparse
    data. numpy counts truth values four times as fast as floats.
    """
    return int(x.sign().abs_().sum()) if is_torch(x) else int(np.count_nonzero(x != 0))


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


def windows(x: NDArray[Any], kernel: Sequence[int], attrs: Mapping[str, Any], fill: float = 0) -> NDArray[Any]:
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
