"""One place of a simulation as AIMET's scripts see it: what both front ends' views of a quantizer share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.aimet_common import grids
from bitwright.aimet_common.grids import Encoding, FloatFormat, IntFormat, QuantSpec, Site
from bitwright.errors import ConfigError


class SiteView:
    """The quantizer of one place; it holds no state of its own, so that two views of a place agree."""

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self.__dict__["sites"] = sites

    sites: tuple[Site, ...]

    @property
    def _site(self) -> Site:
        return self.sites[0]

    @property
    def _spec(self) -> QuantSpec:
        spec: QuantSpec = self._site.quantizer.spec
        return spec

    @property
    def _value_shape(self) -> tuple[int, ...]:
        return self._site._graph.values[self._site.value].shape

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            raise AttributeError(f"a quantizer of a simulation has no attribute {name!r} that could be set")
        object.__setattr__(self, name, value)

    def _respec(self, spec: QuantSpec, encoding: Encoding | None) -> None:
        for site in self.sites:
            enabled = site.enabled
            site.spec = spec
            if encoding is not None:
                site.encoding = encoding
            site.enabled = enabled

    # -- grid

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of scale and offset."""
        return grids.aimet_shape(self._granularity, self._value_shape)

    @property
    def block_size(self) -> tuple[int, ...] | None:
        """Elements per block, axis by axis; ``None`` without blocks."""
        return grids.aimet_blocks(self._granularity, self._value_shape)

    @property
    def _granularity(self) -> Any:
        encoding = self._site.encoding
        return self._spec.granularity if encoding is None else encoding.granularity

    @property
    def _format(self) -> Any:
        encoding = self._site.encoding
        if encoding is not None:
            return encoding.format
        fmt = self._spec.format
        if isinstance(fmt, IntFormat) and self._spec.symmetry == "symmetric":
            return replace(fmt, signed=True)
        return fmt

    @property
    def bitwidth(self) -> int:
        """Bits of the number format; setting it keeps the range."""
        return int(self._format.bits)

    @bitwidth.setter
    def bitwidth(self, bitwidth: int) -> None:
        fmt = self._spec.format
        if isinstance(fmt, FloatFormat):
            raise ConfigError(self._site.name, "it is a float quantizer", "put an affine quantizer in its place")
        self._regrid(replace(self._spec, format=replace(fmt, bits=int(bitwidth))), bits=int(bitwidth))

    def _regrid(self, spec: QuantSpec, bits: int | None = None) -> None:
        """Another format or symmetry on the range in effect."""
        encoding = self._site.encoding
        if encoding is None:
            self._respec(spec, None)
            return
        fmt: Any = encoding.format
        fmt = replace(fmt, bits=bits) if bits is not None else grids.asked_format(spec)
        moved = replace(spec, format=fmt)
        self._respec(spec, grids.range_encoding(encoding.min, encoding.max, moved, encoding.granularity))

    @property
    def symmetric(self) -> bool:
        """Whether the zero point is kept in the middle of the grid; setting it keeps the range."""
        return self._spec.symmetry != "asymmetric"

    @symmetric.setter
    def symmetric(self, symmetric: bool) -> None:
        if bool(symmetric) != self.symmetric:
            self._regrid(replace(self._spec, symmetry="symmetric" if symmetric else "asymmetric"))

    use_symmetric_encodings = symmetric

    @property
    def signed(self) -> bool:
        """Whether codes may be negative; setting it keeps the values of the grid."""
        fmt = self._format
        return isinstance(fmt, FloatFormat) or bool(fmt.signed)

    @signed.setter
    def signed(self, signed: bool) -> None:
        fmt, encoding = self._spec.format, self._site.encoding
        if isinstance(fmt, FloatFormat) or (self.symmetric and signed == self.signed):
            return
        if self.symmetric and not signed:
            raise ConfigError(self._site.name, "a symmetric grid is signed here", "leave it: the values are the same")
        moved = None if encoding is None else grids.signed_as(encoding, bool(signed))
        self._respec(replace(self._spec, format=replace(fmt, signed=bool(signed))), moved)

    @property
    def qmin(self) -> int:
        """Lowest code."""
        return int(self._format.qmin)

    @property
    def qmax(self) -> int:
        """Highest code."""
        return int(self._format.qmax)

    # -- range

    def is_initialized(self) -> bool:
        """Whether there is a range."""
        return self._site.encoding is not None or self._site.quantizer.is_fixed

    def set_core(self, encoding: Encoding) -> None:
        """Put one of our encodings into effect."""
        for site in self.sites:
            site.encoding = encoding

    def set_ends(self, lo: Any, hi: Any) -> None:
        """Put the ends of the grid at these numbers: one value each, or one per scale.

        Raises:
            ConfigError: the numbers of values do not fit.
            RangeError: an end is not finite, or they are exchanged.
        """
        spec, site = self._spec, self._site.name
        params = spec.granularity.param_shape(self._value_shape, site)
        low, high = (ends(end, params, site) for end in (lo, hi))
        asked = replace(spec, format=grids.asked_format(spec))
        self.set_core(grids.range_encoding(low, high, asked, spec.granularity))

    # -- use

    @property
    def enabled(self) -> bool:
        """Whether the quantizer works."""
        return self._site.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        for site in self.sites:
            site.enabled = enabled

    def allow_overwrite(self, mode: bool | None = None, **ends: bool) -> None:
        """Whether calibration may change the range; for both ends alike."""
        allowed = all(ends.values()) if mode is None else bool(mode)
        for site in self.sites:
            site.frozen = not allowed

    def is_overwrite_allowed(self, name: str | None = None) -> bool:
        """Whether calibration may change the range."""
        return not self._site.frozen

    def freeze_encoding(self) -> None:
        """Keep the range through calibration."""
        self.allow_overwrite(False)


def ends(value: Any, params: tuple[int, ...], site: str) -> Any:
    """An end of a range, in the parameter shape of a place.

    Raises:
        ConfigError: neither one value nor one per scale.
    """
    array = np.asarray(value, np.float64)
    count = int(np.prod(params))
    if array.size not in (1, count):
        raise ConfigError(site, f"{array.size} values for {count} scales", "give one value, or one per scale")
    return array.reshape(params) if array.size == count else np.full(params, array.item())


def int_format_of(quantizer: Any, site: str) -> IntFormat:
    """The integer format with the ends of ``quantizer``'s grid.

    Raises:
        ConfigError: there is none.
    """
    fmt = grids.int_format(quantizer.qmin, quantizer.qmax)
    if fmt is None:
        raise ConfigError(
            site,
            f"a grid from {quantizer.qmin} to {quantizer.qmax} is not an integer format",
            "use bitwidth=..., or the ends of a signed or unsigned integer type",
        )
    return fmt
