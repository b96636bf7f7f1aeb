"""Encoding analyzers: statistics of what passes a quantizer, and the range that follows from them."""

from __future__ import annotations

import math
from typing import Any

import torch

from bitwright.aimet_torch import _core
from bitwright.aimet_torch._core import RangeMethod, functional
from bitwright.errors import CalibrationError, ConfigError, FormatError

__all__ = [
    "EncodingAnalyzer",
    "MinMaxEncodingAnalyzer",
    "PercentileEncodingAnalyzer",
    "SqnrEncodingAnalyzer",
    "StatisticsNotFoundError",
    "TfEnhancedEncodingAnalyzer",
]

StatisticsNotFoundError = CalibrationError


class EncodingAnalyzer:
    """Keeps statistics of tensors whose parameters have ``shape``, and chooses ranges by one of our methods.

    Args:
        shape: of the ranges it makes.
        block_size: elements that share a range, axis by axis.
        method: the range method.
    """

    def __init__(self, shape: tuple[int, ...], block_size: tuple[int, ...] | None, method: RangeMethod) -> None:
        self.shape, self.block_size, self.method = tuple(shape), block_size, method
        self._seen: Any = None

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return functional.block_rows(tensor, self.shape, self.block_size)

    def update_stats(self, input_tensor: torch.Tensor) -> None:
        """Add the values of a tensor."""
        if self._seen is None:
            self._seen = _core.start_rows(self.method, math.prod(self.shape))
        self._seen = _core.update_rows(self._seen, self._rows(input_tensor))

    def reset_stats(self) -> None:
        """Forget all values."""
        self._seen = None

    def compute_encodings(self, num_steps: float, is_symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Ends of the grid with ``num_steps`` intervals, both of this analyzer's shape.

        Raises:
            CalibrationError: (a RuntimeError) no values were seen.
            FormatError: (a ValueError) no integer grid has so many intervals.
        """
        if self._seen is None:
            raise CalibrationError(type(self).__name__, "it has seen no values", "call update_stats(tensor) first")
        return self._range(self._seen, num_steps, is_symmetric)

    def compute_dynamic_encodings(
        self, input_tensor: torch.Tensor, num_steps: float, is_symmetric: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`compute_encodings` of one tensor alone; the statistics stay as they are."""
        seen = _core.start_rows(self.method, math.prod(self.shape))
        return self._range(
            _core.update_rows(seen, self._rows(input_tensor)), num_steps, is_symmetric, like=input_tensor
        )

    def _range(
        self, seen: Any, num_steps: float, symmetric: bool, like: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fmt = _core.steps_format(num_steps, signed=symmetric) if num_steps > 0 else None
        if fmt is None:
            raise FormatError(
                type(self).__name__,
                f"no integer grid has {num_steps} intervals",
                "use 2 ** bitwidth - 1, or one less for a grid that is symmetric about zero",
            )
        lo, hi = _core.range_of_rows(seen, self.method, fmt, symmetric=symmetric)
        device = None if like is None else like.device
        low, high = (torch.as_tensor(end, dtype=torch.float32, device=device).reshape(self.shape) for end in (lo, hi))
        return low, high


class MinMaxEncodingAnalyzer(EncodingAnalyzer):
    """The lowest and the highest value seen."""

    def __init__(self, shape: tuple[int, ...], block_size: tuple[int, ...] | None = None) -> None:
        super().__init__(shape, block_size, RangeMethod.of("minmax"))


class PercentileEncodingAnalyzer(EncodingAnalyzer):
    """The range that holds ``percentile`` percent of the values; ``num_bins`` has no effect, our histograms grow."""

    def __init__(
        self,
        shape: tuple[int, ...],
        num_bins: int = 2048,
        percentile: float = 100,
        block_size: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(shape, block_size, RangeMethod.of("percentile"))
        self.set_percentile(percentile)

    def set_percentile(self, percentile: float) -> None:
        """Use another percentile, 50 to 100, from now on.

        Raises:
            ConfigError: (a ValueError) it is not in this interval.
        """
        if not 50 <= percentile <= 100:
            raise ConfigError("percentile", f"{percentile!r} is not between 50 and 100", "use 99.99")
        self.method = _core.find_range_method("percentile", {"percentile": float(percentile)})


class SqnrEncodingAnalyzer(EncodingAnalyzer):
    """The range of the least squared error, with ``gamma`` times the weight on clipping.

    The numbers of bins and of candidates have no effect: our search is exact on its histogram.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        num_bins: int = 2048,
        *,
        asymmetric_delta_candidates: int = 17,
        symmetric_delta_candidates: int = 101,
        offset_candidates: int = 21,
        max_parallelism: int = 64,
        gamma: float = 3.0,
        histogram_growth_limit: float | None = None,
        block_size: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(shape, block_size, _core.find_range_method("sqnr", {"gamma": float(gamma)}))


class TfEnhancedEncodingAnalyzer(SqnrEncodingAnalyzer):
    """:class:`SqnrEncodingAnalyzer` with AIMET's defaults."""

    def __init__(self, shape: tuple[int, ...], block_size: tuple[int, ...] | None = None) -> None:
        super().__init__(shape, block_size=block_size)
