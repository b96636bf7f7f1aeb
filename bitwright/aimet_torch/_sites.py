"""Quantizers of a simulation as AIMET's scripts see them: objects with ``bitwidth``, ``symmetric``, ``min``, ``max``, ...

A view holds no state of its own. It reads and writes the sites of one place, so that two views of a place agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from bitwright.aimet_common.absent import differs
from bitwright.aimet_common.site_view import SiteView, int_format_of
from bitwright.aimet_torch import _core
from bitwright.aimet_torch._core import FloatFormat, QuantSpec, Site
from bitwright.aimet_torch.quantization.affine import (
    AffineEncoding,
    AffineQuantizerBase,
    GroupedBlockQuantizeDequantize,
    QuantizeDequantize,
)
from bitwright.aimet_torch.quantization.affine.encoding import GroupedBlockEncoding, qnn_dict
from bitwright.aimet_torch.quantization.base import QuantizerBase
from bitwright.aimet_torch.quantization.float import FloatEncoding, FloatQuantizeDequantize
from bitwright.aimet_torch.quantization.tensor import DequantizedTensor, with_encoding
from bitwright.errors import ConfigError, GranularityError


class Snapshot(torch.Tensor):
    """A value read from a quantizer; changing it in place would change nothing, and is refused."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        changing = name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_")
        if (changing or name == "__setitem__") and args and isinstance(args[0], Snapshot):
            raise ConfigError(
                f"quantizer range, {name}",
                "ranges are read from the simulation, so that changing the tensor would change nothing",
                "call quantizer.set_range(min, max), or assign quantizer.min and quantizer.max",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class SiteQuantizer(SiteView):
    """The quantizer of one place of a simulation."""

    # -- range

    def _shown(self, values: Any, dtype: torch.dtype | None) -> torch.Tensor:
        found = _core.broadcastable(values, self._granularity, self._value_shape)
        return found.to(dtype or torch.float32).as_subclass(Snapshot)

    def get_scale(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Input units per step; ``None`` without a range."""
        encoding = self._site.encoding
        return None if encoding is None else self._shown(encoding.scale, dtype)

    def get_offset(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Minus the zero point; ``None`` without a range."""
        encoding = self._site.encoding
        return None if encoding is None else self._shown(0 - encoding.zero_point, dtype)

    def get_min(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Lowest representable value; ``None`` without a range."""
        encoding = self._site.encoding
        return None if encoding is None else self._shown(encoding.min, dtype)

    def get_max(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Highest representable value; ``None`` without a range."""
        encoding = self._site.encoding
        return None if encoding is None else self._shown(encoding.max, dtype)

    @property
    def min(self) -> torch.Tensor | None:
        """Lowest representable value; assign a tensor to move it."""
        return self.get_min()

    @min.setter
    def min(self, value: Any) -> None:
        self.set_range(value, None if value is None else self.get_max())

    @property
    def max(self) -> torch.Tensor | None:
        """Highest representable value; assign a tensor to move it."""
        return self.get_max()

    @max.setter
    def max(self, value: Any) -> None:
        self.set_range(None if value is None else self.get_min(), value)

    def set_range(self, min: Any, max: Any) -> None:
        """Put the ends of the grid at ``min`` and ``max``; ``None`` forgets the range.

        Raises:
            ConfigError: only one end is given, or the shapes do not fit.
            RangeError: an end is not finite, or they are exchanged.
        """
        if (min is None) != (max is None):
            raise ConfigError(self._site.name, "only one end of the range is known", "give set_range both ends")
        if min is None:
            for site in self.sites:
                site.encoding = None
            return
        self.set_ends(_array(min), _array(max))

    # -- encodings

    def get_encodings(self) -> Any:
        """The encoding; ``None`` without a range."""
        fmt, scale = self._format, self.get_scale()
        if scale is None:
            return None
        scale = scale.as_subclass(torch.Tensor)
        if isinstance(fmt, FloatFormat):
            finite = fmt.name == "float8_e4m3"
            return FloatEncoding(fmt.mantissa_bits, fmt.exponent_bits, finite, False, scale, self.block_size)
        offset = self.get_offset()
        assert offset is not None
        plain = offset.as_subclass(torch.Tensor)
        return self._affine_encoding(scale, plain)

    def _affine_encoding(self, scale: torch.Tensor, plain: torch.Tensor) -> AffineEncoding:
        fmt = self._format
        return AffineEncoding(scale, plain, fmt.qmin, fmt.qmax, self.symmetric, self.block_size)

    get_encoding = get_encodings

    @property
    def encoding(self) -> Any:
        """:meth:`get_encodings` under its older name."""
        return self.get_encodings()

    def set_encodings(self, encodings: Any) -> None:
        """Take number format and range of an encoding."""
        if isinstance(encodings, FloatEncoding):
            self.assign(FloatQuantizeDequantize.from_encodings(encodings))
        else:
            self.assign(QuantizeDequantize.from_encodings(encodings))

    def get_legacy_encodings(self) -> list[dict[str, Any]] | None:
        """The encoding as files of version 0.6.1 have it; ``None`` without a range."""
        encodings = self.get_encodings()
        if encodings is None:
            return None
        if isinstance(encodings, FloatEncoding):
            return [{"bitwidth": encodings.bitwidth, "dtype": "float"}]
        found: list[dict[str, Any]] = qnn_dict(encodings, "0.6.1")
        return found

    def set_legacy_encodings(self, encodings: list[dict[str, Any]]) -> None:
        """Take width, symmetry and range of records of version 0.6.1."""
        self.bitwidth = encodings[0]["bitwidth"]
        self.symmetric = str(encodings[0]["is_symmetric"]).lower() == "true"
        lo, hi = (torch.tensor([e[end] for e in encodings]) for end in ("min", "max"))
        self.set_range(lo, hi)

    def assign(self, quantizer: Any) -> None:
        """Become what ``quantizer`` (a building block, or the view of another place) is: grid, range and whether it is fixed.

        Raises:
            TypeError: it is not a quantizer.
            GranularityError: its shape or blocks have no counterpart at this place.
        """
        if isinstance(quantizer, SiteQuantizer):
            self._copy(quantizer)
            return
        spec = self._spec_for(quantizer)
        self._respec(spec, None)
        if quantizer.is_initialized() and not isinstance(quantizer, FloatQuantizeDequantize):
            self.set_ends(_array(quantizer.get_min()), _array(quantizer.get_max()))
        for site in self.sites:
            site.enabled, site.frozen = True, not quantizer.is_overwrite_allowed()
        quantizer.bind(self)

    def check(self, quantizer: Any) -> None:
        """Refuse what :meth:`assign` would refuse of a building block.

        Raises:
            TypeError, GranularityError, ConfigError: see there.
        """
        self._spec_for(quantizer)

    def _copy(self, other: SiteQuantizer) -> None:
        if other.sites == self.sites:
            return
        if other._site.quantizer is not self._site.quantizer:
            differs(
                f"{self._site.name} = {other._site.name}",
                "the quantizer is copied; the two places keep quantizers of their own, which later calibration sets apart",
            )
        self._respec(other._spec, other._site.encoding)
        for site in self.sites:
            site.enabled, site.frozen = other._site.enabled, other._site.frozen

    def _spec_for(self, quantizer: Any) -> QuantSpec:
        if isinstance(quantizer, FloatQuantizeDequantize):
            return replace(self._spec, format=quantizer._format, symmetry="symmetric",
                           granularity=self._granularity_for(quantizer), scale_format=_core.FLOAT32_SCALE)  # fmt: skip
        if not isinstance(quantizer, AffineQuantizerBase):
            raise TypeError(
                f"{self._site.name} takes None, a quantizer of quantization.affine or .float, or that of another place, "
                f"not a {type(quantizer).__name__}"
            )
        fmt = int_format_of(quantizer, self._site.name)
        symmetry: Any = "symmetric" if quantizer.symmetric else "asymmetric"
        symmetry = "strict_symmetric" if fmt.narrow else symmetry
        return replace(
            self._spec,
            format=fmt,
            symmetry=symmetry,
            granularity=self._granularity_for(quantizer),
            method=quantizer.encoding_analyzer.method,
            scale_format=self._scale_format_for(quantizer),
        )

    def _scale_format_for(self, quantizer: Any) -> Any:
        """What the scales of a building block are stored as at this place.

        Raises:
            ConfigError: LPBQ whose blocks are not those of one channel together.
        """
        if not isinstance(quantizer, GroupedBlockQuantizeDequantize):
            return _core.FLOAT32_SCALE
        granularity = self._granularity_for(quantizer)
        blocked = granularity.axis if isinstance(granularity, _core.PerBlock) else None
        for at, (count, size) in enumerate(zip(quantizer.shape, quantizer.block_grouping, strict=True)):
            if size not in ((-1, count) if at == blocked else (1, -1) if count == 1 else (1,)):
                raise ConfigError(
                    self._site.name,
                    f"block_grouping {quantizer.block_grouping} for scales of shape {quantizer.shape}",
                    "let all blocks of a channel share its scale: -1 on the axis of the blocks, 1 on the others",
                )
        return _core.grouped_scale_format(quantizer.bitwidth, quantizer.decompressed_bw, self._site.name)

    def _granularity_for(self, quantizer: Any) -> Any:
        found = _core.granularity_of(quantizer.shape, quantizer.block_size, self._value_shape)
        if found is None:
            raise GranularityError(
                self._site.name,
                f"a quantizer of shape {quantizer.shape} with blocks {quantizer.block_size} does not fit its tensor of shape "
                f"{self._value_shape}, or has blocks along several axes",
                "use shape () per tensor, (n, 1, ...) per channel, or blocks along one axis",
            )
        return found

    # -- calibration and use

    def requires_grad_(self, requires_grad: bool = True) -> SiteQuantizer:
        """Which ranges of a simulation train is the simulation's to say: ``sim.learn_ranges(sites)``."""
        if requires_grad:
            differs(
                f"{self._site.name}.requires_grad_(True)",
                f"call sim.learn_ranges({self._site.name!r}) instead, and give sim.range_parameters() to the optimizer",
            )
        return self

    @contextmanager
    def compute_encodings(self) -> Iterator[None]:
        """Find the range from what is given to this quantizer inside the block."""
        for site in self.sites:
            site.encoding, site.quantizer.statistics = None, None
        self.__dict__["observing"] = True
        try:
            yield
        finally:
            self.__dict__["observing"] = False
        for site in self.sites:
            site.quantizer.freeze()

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` on the grid.

        Raises:
            CalibrationError: (a RuntimeError) there is no range yet.
        """
        plain = input.as_subclass(torch.Tensor)
        if self.__dict__.get("observing"):
            self._site.quantizer.observe(plain.detach())
            return plain
        apply: Any = self._site.quantizer
        return with_encoding(DequantizedTensor, apply(plain), self.get_encodings())

    def __repr__(self) -> str:
        grid = f"bitwidth={self.bitwidth}, symmetric={self.symmetric}"
        return f"{type(self).__name__}({self._site.name}: shape={self.shape}, {grid})"


class AffineSiteQuantizer(SiteQuantizer):
    """The affine quantizer of one place of a simulation."""


class GroupedSiteQuantizer(AffineSiteQuantizer):
    """The quantizer of one place of a simulation whose block scales are multiples of one per channel (LPBQ)."""

    @property
    def decompressed_bw(self) -> int:
        """Bits of code times multiple."""
        return self.bitwidth + (_core.grouped_bits(self._spec.scale_format) or 0)

    @property
    def block_grouping(self) -> tuple[int, ...]:
        """How many blocks share a channel's scale, axis by axis: ``-1``, all, on the axis of the blocks."""
        axis = getattr(self._granularity, "axis", None) if self.block_size is not None else None
        return tuple(-1 if at == axis else 1 for at in range(len(self.shape)))

    def get_per_channel_scale(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The scale that those of the blocks are multiples of; ``None`` without a range."""
        encoding = self._site.encoding
        if encoding is None or encoding.common is None:
            return None
        return self._shown(encoding.common, dtype)

    def _affine_encoding(self, scale: torch.Tensor, plain: torch.Tensor) -> AffineEncoding:
        fmt, per_channel = self._format, self.get_per_channel_scale()
        return GroupedBlockEncoding(
            scale, plain, fmt.qmin, fmt.qmax, self.symmetric, self.block_size,
            block_grouping=self.block_grouping, decompressed_bw=self.decompressed_bw,
            per_channel_scale=None if per_channel is None else per_channel.as_subclass(torch.Tensor),
        )  # fmt: skip


class FloatSiteQuantizer(SiteQuantizer):
    """The float quantizer of one place of a simulation."""

    @property
    def exponent_bits(self) -> int:
        """Exponent bits of the format."""
        return int(self._format.exponent_bits)

    @property
    def mantissa_bits(self) -> int:
        """Mantissa bits of the format."""
        return int(self._format.mantissa_bits)

    def is_float16(self) -> bool:
        """Whether the format is IEEE half precision."""
        return bool(self._format.name == "float16")

    def is_bfloat16(self) -> bool:
        """Whether the format is bfloat16."""
        return bool(self._format.name == "bfloat16")


QuantizerBase.register(SiteQuantizer)
QuantizeDequantize.register(AffineSiteQuantizer)
GroupedBlockQuantizeDequantize.register(GroupedSiteQuantizer)
FloatQuantizeDequantize.register(FloatSiteQuantizer)


def view_of(sites: tuple[Site, ...]) -> SiteQuantizer:
    """The view of a place's sites, of the kind that its number format asks for."""
    spec = sites[0].quantizer.spec
    if isinstance(spec.format, FloatFormat):
        return FloatSiteQuantizer(sites)
    return AffineSiteQuantizer(sites) if _core.grouped_bits(spec.scale_format) is None else GroupedSiteQuantizer(sites)


def _array(value: Any) -> Any:
    """The numbers of a tensor or of what is like one."""
    tensor = torch.as_tensor(value, dtype=torch.float64).detach()
    return tensor.as_subclass(torch.Tensor).cpu().numpy()
