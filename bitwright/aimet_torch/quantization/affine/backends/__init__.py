"""The functional form: ``quantize``, ``dequantize`` and ``quantize_dequantize`` with gradients, on our arithmetic.

``offset`` is AIMET's: minus our zero point.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bitwright.aimet_torch._core import functional
from bitwright.errors import ConfigError

__all__ = ["dequantize", "get_backend", "quantize", "quantize_dequantize", "set_backend"]


def derived_grid(num_steps: int, signed: bool) -> tuple[int, int]:
    """Ends of the grid with ``num_steps`` intervals; a signed one has its larger half below zero.

    >>> derived_grid(255, True), derived_grid(254, True), derived_grid(15, False)
    ((-128, 127), (-127, 127), (0, 15))
    """
    return (-((num_steps + 1) // 2), num_steps // 2) if signed else (0, num_steps)


_FORMS = ("qmin, qmax", "bitwidth, signed=False", "*, num_steps, signed=False")


def _grid(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int, Any]:
    """``qmin``, ``qmax`` and the block size of the three forms of call."""
    given = dict(kwargs)
    positional = list(args)
    block_size = given.pop("block_size", None)
    shift = given.pop("zero_point_shift", None)
    grid = _ends(positional, given)
    if given or len(positional) > 2:
        wrong = sorted(given) or positional[2:]
        raise TypeError(f"unknown arguments {wrong}; the grid is one of: {'; '.join(_FORMS)}")
    block_size, shift = (*positional, *(block_size, shift)[len(positional) :])
    refuse_shift(shift)
    return *grid, block_size


def _ends(positional: list[Any], given: dict[str, Any]) -> tuple[int, int]:
    """``qmin`` and ``qmax``; the arguments that say them are taken out of both."""
    if "num_steps" in given:
        return derived_grid(int(given.pop("num_steps")), bool(given.pop("signed", False)))
    if "bitwidth" in given or (_starts_with_bitwidth(positional) and "qmax" not in given):
        bits = given.pop("bitwidth") if "bitwidth" in given else positional.pop(0)
        named = not positional or not isinstance(positional[0], bool)
        signed = given.pop("signed", False) if named else positional.pop(0)
        return derived_grid((1 << int(bits)) - 1, bool(signed))
    ends = [positional.pop(0) if positional else given.pop(name, None) for name in ("qmin", "qmax")]
    if None in ends:
        raise TypeError(f"give the grid as one of: {'; '.join(_FORMS)}")
    return int(ends[0]), int(ends[1])


def _starts_with_bitwidth(positional: list[Any]) -> bool:
    return len(positional) == 1 or (len(positional) > 1 and isinstance(positional[1], bool))


def refuse_shift(shift: float | None) -> None:
    """Refuse grids whose codes lie between the integers.

    Raises:
        ConfigError: ``shift`` is neither ``None`` nor 0.
    """
    if shift:
        raise ConfigError(
            "zero_point_shift", f"{shift!r}: codes between the integers are not supported", "leave it out"
        )


def quantize(
    tensor: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Codes of ``tensor``: ``clamp(round(tensor / scale) - offset, qmin, qmax)``.

    The grid is given as ``qmin, qmax``, as ``bitwidth, signed=False`` or as ``num_steps=, signed=False``, with ``block_size``
    after it.

    Returns:
        Shape of ``tensor``, in the dtype of ``scale``.

    Raises:
        TypeError: no grid, or unknown arguments.
        GranularityError: (a ValueError) scale or blocks do not fit the tensor.
    """
    qmin, qmax, block_size = _grid(args, kwargs)
    codes = functional.quantize(tensor, scale, -offset, qmin, qmax, block_size)
    return codes if codes.dtype == torch.float64 else codes.to(scale.dtype)


def dequantize(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    block_size: tuple[int, ...] | None = None,
    zero_point_shift: float | None = None,
) -> torch.Tensor:
    """Values of codes: ``(tensor + offset) * scale``."""
    refuse_shift(zero_point_shift)
    return functional.dequantize(tensor, scale, -offset, block_size)


def quantize_dequantize(
    tensor: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """``tensor`` on the grid; arguments as for :func:`quantize`."""
    qmin, qmax, block_size = _grid(args, kwargs)
    return functional.quantize_dequantize(tensor, scale, -offset, qmin, qmax, block_size)


def get_backend() -> str:
    """``"torch_builtins"``, the only backend: its values are those of the exported model on every device."""
    return "torch_builtins"


def set_backend(backend: str) -> Any:
    """Accepted for ``"torch_builtins"``; returns a context manager as AIMET does.

    Raises:
        ConfigError: (a ValueError) another backend.
    """
    if backend != "torch_builtins":
        raise ConfigError("set_backend", f"there is no backend {backend!r} here", "use 'torch_builtins'")
    return _nothing()


@contextmanager
def _nothing() -> Iterator[None]:
    yield
