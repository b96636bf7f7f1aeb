"""``aimet_onnx.qc_quantize_op``: quantizers of an ONNX simulation as AIMET's scripts see them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from bitwright.aimet_common.defs import QuantizationDataType, QuantScheme, kind_of, number_format, qtype, range_method
from bitwright.aimet_common.names import absent_attribute, absent_names
from bitwright.aimet_common.sites import SiteView, affine_records, grouped_bits, grouped_scale_format
from bitwright.aimet_onnx import defs
from bitwright.core.numerics.affine import fake_quantize, scale_multiples
from bitwright.core.numerics.arrays import to_numpy
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, FloatFormat, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.numerics.spec import QuantSpec, activation_spec, weight_spec
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, ModelError
from bitwright.export.encodings.records import check_version
from bitwright.export.encodings.write import record_2_0_0

__all__ = ["GroupedBlockQuantizeDequantize", "OpMode", "QcQuantizeOp", "TensorQuantizerParams", "TfEncoding"]

__getattr__ = absent_names(__name__)


class OpMode(Enum):
    """Modes of a quantizer."""

    updateStats = 0  # noqa: N815, AIMET's names
    oneShotQuantizeDequantize = 1  # noqa: N815
    quantizeDequantize = 2  # noqa: N815
    passThrough = 3  # noqa: N815


class TfEncoding:
    """One scale: ``min``, ``max``, ``delta`` (our scale), ``offset`` of the unsigned grid, and bits."""

    def __init__(self) -> None:
        self.min = self.max = self.delta = 0.0
        self.offset, self.bw = 0.0, 8

    def __repr__(self) -> str:
        return f"TfEncoding(min={self.min}, max={self.max}, delta={self.delta}, offset={self.offset}, bw={self.bw})"


@dataclass
class TensorQuantizerParams:
    """Shape of a tensor and its axes of channels and blocks."""

    tensor_shape: tuple[int, ...]
    channel_axis: int | None = None
    block_axis: int | None = None


class QcQuantizeOp(SiteView):
    """The quantizer of one tensor of a simulation; a view of its sites, which reads and writes them."""

    def __init__(self, name: str, sites: tuple[Site, ...], sim: Any) -> None:
        super().__init__(sites)
        self.__dict__.update(name=name, _sim=sim)

    name: str
    _sim: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QcQuantizeOp) and (self.name, id(self._sim)) == (other.name, id(other._sim))

    def __hash__(self) -> int:
        return hash((self.name, id(self._sim)))

    @property
    def _site(self) -> Site:
        """The first site of the tensor, which gets one if the rules have left it in float.

        Raises:
            ModelError: no quantizer can stand there: at what a branch or a loop makes.
        """
        if not self.sites:
            self._sim._place_left_out()
            found = tuple(site for site in self._sim.quantizers.values() if site.value == self.name)
            if not found:
                raise ModelError(
                    self.name,
                    "this tensor can have no quantizer",
                    "set that of what computes it (sim.coverage() lists them)",
                )
            self.__dict__["sites"] = found
        return self.sites[0]

    @property
    def _spec(self) -> QuantSpec:
        if self.sites and not self.sites[0].quantizer.derived:
            return super()._spec
        rules = self._sim.rules  # an int32 bias has what is asked for of parameters, as in AIMET
        return (rules.weight or weight_spec()) if self.sites else (rules.activation or activation_spec())

    @property
    def _encoding(self) -> Encoding | None:
        return super()._encoding if self.sites else None

    def _respec(self, spec: QuantSpec, encoding: Encoding | None) -> None:
        assert self._site is not None
        super()._respec(spec, encoding)

    def __getattr__(self, name: str) -> Any:
        raise absent_attribute("aimet_onnx.qc_quantize_op.QcQuantizeOp", name)

    # -- on and off

    @property
    def enabled(self) -> bool:
        """Whether the quantizer works."""
        return any(site.enabled and not site.quantizer.derived for site in self.sites)

    @enabled.setter
    def enabled(self, enable: bool) -> None:
        if enable:
            assert self._site is not None
        for site in self.sites:
            site.enabled = bool(enable)

    @property
    def op_mode(self) -> OpMode:
        """Mode of the quantizer, derived from its state; it says nothing about :attr:`enabled`, as in AIMET."""
        if self.enabled and self.is_initialized():
            return OpMode.quantizeDequantize
        is_param = self._sim.graph.values[self.name].is_static
        return OpMode.oneShotQuantizeDequantize if is_param else OpMode.updateStats

    @op_mode.setter
    def op_mode(self, op_mode: OpMode) -> None:
        self.enabled = op_mode is not OpMode.passThrough

    @property
    def quant_info(self) -> SimpleNamespace:
        """The state of the quantizer as AIMET's kernel has it; to be read."""
        params, valid = self.tensor_quantizer_params, SimpleNamespace(isEncodingValid=self.is_initialized())
        channel, block = params.channel_axis, params.block_axis
        return SimpleNamespace(
            encoding=self.encodings or [], enabled=self.enabled, opMode=self.op_mode,
            useSymmetricEncoding=self.symmetric, isIntDataType=self.data_type is QuantizationDataType.int,
            usePerChannelMode=channel is not None or block is not None,
            channelAxis=0 if channel is None else channel, blockAxis=0 if block is None else block,
            blockSize=0 if block is None else self._granularity.size, tensorQuantizerRef=[valid] * max(1, math.prod(self.shape)),
        )  # fmt: skip

    # -- grid

    def set_bitwidth(self, bitwidth: int) -> None:
        """Use so many bits."""
        self.bitwidth = bitwidth

    @property
    def data_type(self) -> QuantizationDataType:
        """Integer or float."""
        is_float = isinstance(self._spec.format, FloatFormat)
        return QuantizationDataType.float if is_float else QuantizationDataType.int

    @data_type.setter
    def data_type(self, data_type: QuantizationDataType) -> None:
        if data_type is not self.data_type:
            self.set_precision(qtype.from_legacy_repr(data_type, 16 if data_type.name == "float" else self.bitwidth))

    def precision(self) -> qtype:
        """Number format."""
        return kind_of(self._spec.format)

    def set_precision(self, precision: qtype | str) -> None:
        """Use another number format; float32 switches the quantizer off."""
        fmt = number_format(precision, signed=getattr(self._spec.format, "signed", True))
        if fmt is None:
            self.enabled = False
            return
        enabled = self.enabled
        was_int = not isinstance(self._spec.format, FloatFormat)
        if was_int and not isinstance(fmt, FloatFormat):
            self.bitwidth = fmt.bits
        else:
            symmetry: Any = "symmetric" if isinstance(fmt, FloatFormat) else self._spec.symmetry
            self._respec(replace(self._spec, format=fmt, symmetry=symmetry), None)
        self.enabled = enabled

    def set_qspec(self, spec: defs.QSpec) -> None:
        """Use the number format, granularity and symmetry of ``spec``.

        Raises:
            ConfigError: a shifted zero point, or LPBQ of an asymmetric or float format.
        """
        if spec.shift_zero_point:
            raise ConfigError(
                self.name, "shifted zero points cannot be simulated in this version", "leave shift_zero_point out"
            )
        if isinstance(spec.granularity, defs.LPBQ):
            self._set_grouped(spec, spec.granularity)
            return
        self.set_precision(spec.dtype)
        if spec.granularity is not None:
            self._respec(
                replace(
                    self._spec,
                    granularity=_GRANULARITY[type(spec.granularity)](spec.granularity),
                    scale_format=FLOAT32_SCALE,
                ),
                None,
            )
        if spec.symmetric is not None:
            self.symmetric = spec.symmetric

    def _set_grouped(self, spec: defs.QSpec, lpbq: defs.LPBQ) -> None:
        fmt = number_format(spec.dtype)
        if not isinstance(fmt, IntFormat) or spec.symmetric is False:
            raise ConfigError(
                self.name, "block scales in two factors (LPBQ) go with symmetric integer grids",
                "use QSpec.lpbq('int4')",
            )  # fmt: skip
        scale_format = grouped_scale_format(fmt.bits, fmt.bits + lpbq.scale_bits, self.name)
        granularity = PerBlock(lpbq.block_size)
        asked = replace(
            self._spec, format=fmt, granularity=granularity, symmetry="symmetric", scale_format=scale_format
        )
        self._respec(asked, None)

    @property
    def decompressed_bw(self) -> int:
        """Bits of code times multiple, of block scales in two factors (LPBQ); else :attr:`bitwidth`."""
        return self.bitwidth + (grouped_bits(self._spec.scale_format) or 0)

    @decompressed_bw.setter
    def decompressed_bw(self, decompressed_bw: int) -> None:
        scale_format = grouped_scale_format(self.bitwidth, decompressed_bw, self.name)
        self._respec(replace(self._spec, scale_format=scale_format), None)

    def enable_per_channel_quantization(self, enable: bool = True) -> None:
        """Use one scale per output channel, or one for all."""
        granularity: Any = PerChannel() if enable else PerTensor()
        self._respec(replace(self._spec, granularity=granularity, scale_format=FLOAT32_SCALE), None)

    @property
    def use_symmetric_encodings(self) -> bool:
        """Whether the zero point is kept in the middle of the grid."""
        return self.symmetric

    @use_symmetric_encodings.setter
    def use_symmetric_encodings(self, symmetric: bool) -> None:
        self.symmetric = symmetric

    @property
    def use_strict_symmetric(self) -> bool:
        """Whether the grid leaves out its lowest code."""
        return self._spec.symmetry == "strict_symmetric"

    @use_strict_symmetric.setter
    def use_strict_symmetric(self, strict: bool) -> None:
        self._set_symmetry("strict_symmetric", strict)

    @property
    def use_unsigned_symmetric(self) -> bool:
        """Whether the grid is unsigned where no value is negative."""
        return self._spec.symmetry == "unsigned_symmetric"

    @use_unsigned_symmetric.setter
    def use_unsigned_symmetric(self, unsigned: bool) -> None:
        self._set_symmetry("unsigned_symmetric", unsigned)

    def _set_symmetry(self, symmetry: Any, on: bool) -> None:
        if on or self._spec.symmetry == symmetry:
            self._respec(replace(self._spec, symmetry=symmetry if on else "symmetric"), None)

    @property
    def quant_scheme(self) -> Any:
        """How the range is chosen."""
        return self._spec.method.name

    def set_quant_scheme(self, quant_scheme: QuantScheme | str) -> None:
        """Choose ranges this way from now on."""
        self._respec(replace(self._spec, method=find_range_method(range_method(quant_scheme))), None)

    # -- range

    def is_initialized(self) -> bool:
        """Whether there is a range."""
        return bool(self.sites) and super().is_initialized()

    def get_encodings(self) -> list[TfEncoding] | None:
        """One encoding per scale; ``None`` without a range."""
        encoding = self._site.encoding if self.sites else None
        if encoding is None:
            return None
        shift = encoding.format.qmin if not isinstance(encoding.format, FloatFormat) and encoding.format.signed else 0
        found = []
        fixed = self._spec.fixed_range or (None, None)
        for lo, hi, scale, zero in zip(
            encoding.min.ravel(), encoding.max.ravel(), encoding.scale.ravel(), encoding.zero_point.ravel(), strict=True
        ):
            one = TfEncoding()
            one.min, one.max = (_as_asked(end, wanted) for end, wanted in zip((lo, hi), fixed, strict=True))
            one.delta = float(scale)
            one.offset, one.bw = float(shift - int(zero)), encoding.format.bits
            found.append(one)
        return found

    @property
    def encodings(self) -> list[TfEncoding] | None:
        """:meth:`get_encodings` under its older name; assign to load."""
        return self.get_encodings()

    @encodings.setter
    def encodings(self, encodings: list[TfEncoding] | None) -> None:
        if encodings is None:
            self.reset_encoding_stats()
        else:
            self.load_encodings(encodings)

    def load_encodings(self, encoding: list[TfEncoding]) -> None:
        """Take width and range of encodings, one per scale."""
        if encoding[0].bw != self.bitwidth:
            self.bitwidth = int(encoding[0].bw)
        self.set_ends([e.min for e in encoding], [e.max for e in encoding])

    def update_quantizer_and_load_encodings(
        self,
        encoding: list[TfEncoding],
        is_symmetric: bool | None,
        is_strict_symmetric: bool | None,
        is_unsigned_symmetric: bool | None,
        data_type: QuantizationDataType,
    ) -> None:
        """Take symmetry, kind, width and range."""
        self.data_type = data_type
        if is_symmetric is not None:
            self.symmetric = is_symmetric
        if is_strict_symmetric:
            self.use_strict_symmetric = True
        if is_unsigned_symmetric:
            self.use_unsigned_symmetric = True
        self.load_encodings(encoding)

    def set_fixed_encoding_range(self, fixed_range: tuple[float | None, float | None]) -> None:
        """Keep these ends of the range through calibration; ``None`` is an end that is calibrated."""
        self._respec(replace(self._spec, fixed_range=(fixed_range[0], fixed_range[1])), None)
        if None not in fixed_range:
            self.set_ends(*fixed_range)

    def clip_and_recompute_encodings(self, clamp_val: float) -> bool:
        """Cut the range at plus and minus ``clamp_val``; whether it reached beyond."""
        encoding = self._site.encoding if self.sites else None
        if encoding is None or (np.abs([encoding.min, encoding.max]) <= clamp_val).all():
            return False
        self.set_ends(np.clip(encoding.min, -clamp_val, clamp_val), np.clip(encoding.max, -clamp_val, clamp_val))
        return True

    def freeze_encodings(self) -> None:
        """Keep the range through calibration."""
        self.allow_overwrite(False)

    def is_encoding_frozen(self) -> bool:
        """Whether calibration leaves the range alone."""
        return not self.is_overwrite_allowed()

    def reset_encoding_stats(self) -> None:
        """Forget the range, unless it is frozen."""
        for site in self.sites:
            if not site.frozen:
                site.quantizer.statistics = None
                site.encoding = None

    def update_encoding_stats(self, tensor: Any) -> None:
        """Add the values of a tensor to the statistics."""
        self._site.quantizer.observe(np.asarray(tensor))

    def compute_encodings(self) -> list[TfEncoding] | None:
        """Turn the statistics into the range."""
        self._site.quantizer.freeze()
        return self.get_encodings()

    def quantize_dequantize(self, input_tensor: Any) -> Any:
        """An array on the grid.

        Raises:
            CalibrationError: (a RuntimeError) there is no range yet.
        """
        return quantized_constant(input_tensor, self._site.quantizer.required)

    def export_encodings(self, encoding_version: str = "0.6.1") -> Any:
        """The encoding as encodings files of version 0.6.1, 1.0.0 or 2.0.0 have it; ``None`` without a range.

        Raises:
            EncodingsError: (a RuntimeError) there is no such version.
        """
        check_version("export_encodings", encoding_version)
        found = self.get_encodings()
        if found is None:
            return None
        if encoding_version == "2.0.0":
            encoding = self._site.encoding
            return None if encoding is None else record_2_0_0(encoding) or None
        if isinstance(self._format, FloatFormat):
            return [{"bitwidth": self.bitwidth, "dtype": "float"}]
        if encoding_version == "1.0.0" and grouped_bits(self._spec.scale_format) is not None:
            return self._grouped_record()
        kind = "PER_BLOCK" if self.block_size else "PER_CHANNEL" if len(found) > 1 else "PER_TENSOR"
        ends, scale = ([e.min for e in found], [e.max for e in found]), [e.delta for e in found]
        offset = [e.offset for e in found]
        return affine_records(encoding_version, self.bitwidth, self.symmetric, kind, ends, scale, offset)

    def _grouped_record(self) -> dict[str, Any]:
        encoding = self._site.encoding
        assert encoding is not None and encoding.common is not None
        multiples, scale = scale_multiples(encoding), encoding.common.ravel().tolist()
        assert multiples is not None
        granularity: Any = encoding.granularity
        return {
            "bw": self.decompressed_bw, "compressed_bw": self.bitwidth, "dtype": "INT", "enc_type": "LPBQ", "is_sym": True,
            "block_size": granularity.size, "scale": scale, "offset": [-(1 << (self.decompressed_bw - 1))] * len(scale),
            "per_block_int_scale": _channels_first(multiples, granularity).astype(int).ravel().tolist(),
        }  # fmt: skip

    @property
    def tensor_quantizer_params(self) -> TensorQuantizerParams:
        """Shape and axes of the tensor."""
        granularity = self._granularity
        if isinstance(granularity, PerBlock):
            channel = next(iter(granularity.channel_axes[-1:]), None)
            return TensorQuantizerParams(self._value_shape, channel, granularity.axis)
        return TensorQuantizerParams(self._value_shape, getattr(granularity, "axis", None), None)

    def __repr__(self) -> str:
        state = "" if self.enabled else ", disabled"
        return f"QcQuantizeOp({self.name}{state})"


class GroupedBlockQuantizeDequantize(QcQuantizeOp):
    """The quantizer of a tensor whose block scales are multiples of one per channel (LPBQ)."""


def quantizer_of(name: str, sites: tuple[Site, ...], sim: Any) -> QcQuantizeOp:
    """The view of a tensor's sites, of the kind that its scales ask for."""
    grouped = bool(sites) and grouped_bits(sites[0].quantizer.spec.scale_format) is not None
    return (GroupedBlockQuantizeDequantize if grouped else QcQuantizeOp)(name, sites, sim)


def _as_asked(end: Any, wanted: float | None) -> float:
    """The end of a fixed range as it was asked for, of which a scale in float32 makes a number close by."""
    return float(end) if wanted is None or not np.isclose(end, wanted, rtol=1e-6) else float(wanted)


def _channels_first(values: Any, granularity: Any) -> Any:
    axes = granularity.channel_axes
    return values if len(axes) != 1 else np.moveaxis(values, axes[0], 0)


_GRANULARITY: dict[type, Any] = {
    defs.PerTensor: lambda _: PerTensor(),
    defs.PerChannel: lambda _: PerChannel(),
    defs.Blockwise: lambda blocks: PerBlock(blocks.block_size),
}


def quantized_constant(values: Any, encoding: Encoding) -> Any:
    """A constant on its grid, as numpy array of its dtype."""
    array = np.asarray(to_numpy(values))
    return np.asarray(fake_quantize(array, encoding)).astype(array.dtype)
