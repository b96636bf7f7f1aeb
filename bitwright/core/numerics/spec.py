"""Specifications: of one tensor (`QuantSpec`), and the named presets for a whole model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from bitwright.core.numerics.formats import (
    BINARY,
    FLOAT32_SCALE,
    SCALE_FORMATS,
    FloatFormat,
    Format,
    IntFormat,
    ScaleFormat,
    parse_format,
    parse_scale_format,
)
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, PerToken, phrase
from bitwright.errors import ConfigError, close_matches

Symmetry = Literal["asymmetric", "symmetric", "strict_symmetric", "unsigned_symmetric", "float_zero_point"]
NonFinite = Literal["error", "skip", "clamp"]
NON_FINITE: tuple[NonFinite, ...] = ("error", "skip", "clamp")
SYMMETRIES: tuple[Symmetry, ...] = (
    "asymmetric", "symmetric", "strict_symmetric", "unsigned_symmetric", "float_zero_point",
)  # fmt: skip


#: range methods of this package
METHODS = ("minmax", "percentile", "mse", "sqnr", "entropy", "hqq")


@dataclass(frozen=True)
class RangeMethod:
    """Method of computing the range from statistics: the name of a row of ``ranges.RANGE_METHODS`` and its options.

    ``RangeMethod("percentile", {"percentile": 99.99})``; options are kept as a sorted tuple so that specs hash.
    """

    name: str = "minmax"
    options: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, name: str, options: Mapping[str, float] | None = None) -> RangeMethod:
        """The method called ``name`` with ``options``."""
        return cls(name, tuple(sorted((options or {}).items())))


def check_policy(policy: str, site: str = "non_finite") -> NonFinite:
    """Check the name of a policy.

    Raises:
        ConfigError: with the names that exist.
    """
    for known in NON_FINITE:
        if policy == known:
            return known
    raise ConfigError(
        site=site,
        problem=f"{policy!r} is not a policy for NaN and Inf{close_matches(str(policy), NON_FINITE)}",
        remedy=f"use one of {', '.join(NON_FINITE)}",
    )


def _check_method(method: Any) -> None:
    """Refuse values that are not range methods, and methods without a row."""
    if not isinstance(method, RangeMethod):
        raise ConfigError(
            site="QuantSpec.method",
            problem=f"{method!r:.100} is not a RangeMethod",
            remedy="write RangeMethod('mse'), with the name of the method",
        )
    if method.options or method.name not in METHODS:
        # the table of methods is made of functions that take specs, and loads after this module
        import_module("bitwright.core.numerics.ranges").find_range_method(method)


@dataclass(frozen=True)
class QuantSpec:
    """Specification of a tensor's quantization, independent of data.

    Attributes:
        format: the grid, or its name. Under ``symmetry`` the calibrated encoding may carry a variant of it:
            ``strict_symmetric`` drops the lowest code; ``unsigned_symmetric`` uses the unsigned grid of the
            same width when no value is negative.
        granularity: which elements share a scale; axes left ``None`` come from the operator.
        symmetry: where the zero point lies. ``float_zero_point``: anywhere, between two codes and beyond the grid too, as HQQ
            has it: a float32 number beside each scale. Of weights, unsigned integers of up to 8 bits.
        method: how the range is chosen; by least squared error for ``binary``, whose only magnitude is the scale.
        fixed_range: ``(lo, hi)`` instead of calibration; either end may be ``None`` (that end is calibrated).
        non_finite: what calibration does when the tensor holds NaN or Inf: ``error`` stops, ``skip`` leaves
            the whole batch out of all statistics, ``clamp`` uses the finite elements only; ``None`` is the
            policy of the call.
        scale_format: what scales are stored as, a row of ``formats.SCALE_FORMATS`` or its name.
        dynamic: every run chooses the range of the tensor that passes, per tensor or per token; nothing is calibrated. Of
            activations; signed grids are symmetric then, unsigned ones have a zero point, as ONNX DynamicQuantizeLinear.
        recent: (axis, count): the last ``count`` indices of ``axis`` stay in float, as the newest tokens of a cache.
        rotation: the axis, -1 or -2, along which :func:`~bitwright.core.numerics.rotations.random_rotation` is multiplied in
            front of the grid, and its transpose behind it; of keys and values of a cache. The range is that of the product.
    """

    format: Format = field(default_factory=lambda: IntFormat(8))
    granularity: Granularity = PerTensor()
    symmetry: Symmetry = "symmetric"
    method: RangeMethod = RangeMethod()
    fixed_range: tuple[float | None, float | None] | None = None
    non_finite: NonFinite | None = None
    scale_format: ScaleFormat = FLOAT32_SCALE
    dynamic: bool = False
    recent: tuple[int, int] | None = None
    rotation: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.granularity, Granularity):
            raise ConfigError(
                site="QuantSpec.granularity",
                problem=f"{self.granularity!r:.100} is not a granularity",
                remedy="write PerTensor(), PerChannel(), PerBlock(size) or PerGate()",
            )
        _check_method(self.method)
        object.__setattr__(self, "format", parse_format(self.format))
        if self.format == BINARY and self.method == RangeMethod():
            object.__setattr__(self, "method", RangeMethod("mse"))
        if self.symmetry not in SYMMETRIES:
            raise ConfigError(
                site="QuantSpec.symmetry",
                problem=f"{self.symmetry!r} is not a symmetry{close_matches(str(self.symmetry), SYMMETRIES)}",
                remedy=f"use one of {', '.join(SYMMETRIES)}",
            )
        if self.non_finite is not None:
            check_policy(self.non_finite, "QuantSpec.non_finite")
        object.__setattr__(self, "scale_format", parse_scale_format(self.scale_format))
        self._check_dynamic()
        self._check_float_zero_point()
        if self.scale_format == FLOAT32_SCALE:
            return
        has_zero_point = isinstance(self.format, IntFormat) and self.symmetry == "asymmetric"
        if self.scale_format.number is not None:  # of any grid
            has_zero_point = False
        if has_zero_point or (isinstance(self.format, FloatFormat) and not self.format.scaled):
            what = "has a zero point" if has_zero_point else "has no scale"
            raise ConfigError(
                site="QuantSpec.scale_format",
                problem=f"scales of format {self.scale_format.name} go with symmetric grids, and {self.format.name} {what}",
                remedy="set symmetry to 'symmetric', or scale_format to 'float32'"
                if has_zero_point
                else "set scale_format to 'float32'",
            )

    @property
    def has_zero_point(self) -> bool:
        """Whether zero may lie at any code, or between two: of integers, ``asymmetric`` and ``float_zero_point``."""
        return isinstance(self.format, IntFormat) and self.symmetry in ("asymmetric", "float_zero_point")

    def _check_float_zero_point(self) -> None:
        """Refuse float zero points where no kernel computes with them."""
        if self.symmetry != "float_zero_point":
            return
        fmt = self.format
        problem = remedy = ""
        if not isinstance(fmt, IntFormat) or fmt.signed or fmt.bits > 8:
            problem, remedy = f"{fmt.name} has none", "use uint2 to uint8, or the symmetry 'asymmetric'"
        elif self.scale_format != FLOAT32_SCALE and not self.scale_format.offsets:
            problem, remedy = f"scales of {self.scale_format.name} go with none", "use scale_format='float32' or 'q4_k'"
        elif self.dynamic or self.fixed_range is not None:
            problem, remedy = "they are chosen of weights at hand", "use the symmetry 'asymmetric'"
        if problem:
            raise ConfigError("QuantSpec.symmetry", f"zero points that are real numbers: {problem}", remedy)

    def _check_calibrated(self) -> None:
        """Refuse a grid that only ranges chosen at run time have."""
        if isinstance(self.format, IntFormat) and self.format.centred:
            raise ConfigError(
                "QuantSpec.format",
                f"{self.format.name} is a rule for ranges that are chosen at run time, and dynamic is False",
                f"set dynamic to True, or use {IntFormat(self.format.bits).name}",
            )

    def _check_dynamic(self) -> None:
        """Refuse settings that a range chosen at run time cannot have."""
        if not self.dynamic:
            self._check_calibrated()
            if isinstance(self.granularity, PerToken):
                raise ConfigError(
                    "QuantSpec.granularity",
                    "scales per token follow from each run, and dynamic is False",
                    "set dynamic to True, or use PerTensor() or PerChannel()",
                )
            return
        fmt, problem, remedy = self.format, "", ""
        if type(self.granularity) not in (PerTensor, PerToken):
            problem = f"a range that is chosen at run time is of a tensor or of a token, not {phrase(self.granularity)}"
            remedy = "use PerTensor(), PerToken() or PerToken(32)"
        elif self.fixed_range is not None:
            problem, remedy = "a range that is chosen at run time has no fixed ends", "leave out fixed_range or dynamic"
        elif self.method.name != "minmax":
            problem = f"a range that is chosen at run time is all that the tensor holds, not {self.method.name}"
            remedy = "leave out the method, or calibrate the range: dynamic=False"
        elif self.scale_format.multiples is not None:
            problem = f"scales chosen at run time share no number, as those of {self.scale_format.name} do"
            remedy = "use float32, float16, bfloat16 or e8m0"
        elif isinstance(fmt, FloatFormat) and not fmt.scaled:
            problem, remedy = f"{fmt.name} has no range", "leave out dynamic"
        elif isinstance(fmt, IntFormat) and (fmt.bits > 16 or fmt.signed != (self.symmetry != "asymmetric")):
            problem = f"{fmt.name} {self.symmetry} cannot be chosen at run time"
            remedy = "use int2 to int16 with symmetric, or uint2 to uint16 with asymmetric"
        if problem:
            raise ConfigError("QuantSpec.dynamic", problem, remedy)

    def describe(self) -> str:
        """One short phrase: ``int8 symmetric per channel (axis 0), minmax``."""
        symmetry = f" {self.symmetry.replace('_', ' ')}" if isinstance(self.format, IntFormat) else ""
        scales = "" if self.scale_format == FLOAT32_SCALE else f" ({self.scale_format.name} scales)"
        range_of = "range at run time" if self.dynamic else self.method.name
        recent = f", the last {self.recent[1]} tokens in float" if self.recent else ""
        turned = "" if self.rotation is None else ", rotated"
        return f"{self.format.name}{symmetry} {phrase(self.granularity)}{scales}, {range_of}{recent}{turned}"


@dataclass(frozen=True)
class Preset:
    """Specs for the weights and the activations of a whole model; ``None`` leaves that kind in float."""

    weight: QuantSpec | None
    activation: QuantSpec | None


def weight_spec(format: str | Format = "int8", granularity: Granularity | None = None, **changes: Any) -> QuantSpec:
    """A weight spec: symmetric and per output channel by default."""
    return QuantSpec(parse_format(format), PerChannel() if granularity is None else granularity, **changes)


def activation_spec(format: str | Format = "uint8", **changes: Any) -> QuantSpec:
    """An activation spec: asymmetric and per tensor by default."""
    changes.setdefault("symmetry", "asymmetric")
    changes.setdefault("granularity", PerTensor())
    return QuantSpec(parse_format(format), **changes)


def dynamic_spec(format: str | Format = "int8", granularity: Granularity | None = None, **changes: Any) -> QuantSpec:
    """An activation spec whose range is chosen at run time: per token by default.

    >>> dynamic_spec().describe(), dynamic_spec("uint8", PerTensor()).describe()
    ('int8 symmetric per token, range at run time', 'uint8 asymmetric per tensor, range at run time')
    """
    fmt = parse_format(format)
    changes.setdefault("symmetry", "symmetric" if isinstance(fmt, FloatFormat) or fmt.signed else "asymmetric")
    return QuantSpec(fmt, PerToken() if granularity is None else granularity, dynamic=True, **changes)


_E8M0 = SCALE_FORMATS["e8m0"]

PRESETS: dict[str, Preset] = {
    "w8a8": Preset(weight_spec("int8"), activation_spec("uint8")),
    "w8a16": Preset(weight_spec("int8"), activation_spec("uint16")),
    "w4a8": Preset(weight_spec("int4"), activation_spec("uint8")),
    "w4a16": Preset(weight_spec("int4"), activation_spec("uint16")),
    "w8": Preset(weight_spec("int8"), None),
    "w4": Preset(weight_spec("int4"), None),
    "w4g32": Preset(weight_spec("int4", PerBlock(32)), None),
    "w8a8_per_tensor": Preset(weight_spec("int8", PerTensor()), activation_spec("uint8")),
    "fp8": Preset(weight_spec("float8_e4m3"), activation_spec("float8_e4m3", symmetry="symmetric")),
    "w8a8_dynamic": Preset(weight_spec("int8"), dynamic_spec("int8")),
    "w8a8_dynamic_tensor": Preset(weight_spec("int8"), dynamic_spec("uint8", PerTensor())),
    "w4a8_dynamic": Preset(weight_spec("int4", PerBlock(32)), dynamic_spec("int8", PerToken(32))),
    "fp8_dynamic": Preset(weight_spec("float8_e4m3"), dynamic_spec("float8_e4m3")),
    "mxfp4_dynamic": Preset(
        weight_spec("float4_e2m1", PerBlock(32), scale_format=_E8M0),
        dynamic_spec("float4_e2m1", PerToken(32), scale_format=_E8M0),
    ),
    "q8_0": Preset(
        weight_spec("int8", PerBlock(32), symmetry="strict_symmetric", scale_format=SCALE_FORMATS["float16"]),
        dynamic_spec("int8", PerToken(32), scale_format=SCALE_FORMATS["float16"]),
    ),
    "w4lpbq": Preset(weight_spec("int4", PerBlock(64), scale_format=SCALE_FORMATS["uint4"]), None),
    "mxfp4": Preset(weight_spec("float4_e2m1", PerBlock(32), scale_format=_E8M0), None),
    "mxfp6_e2m3": Preset(weight_spec("float6_e2m3", PerBlock(32), scale_format=_E8M0), None),
    "mxfp6_e3m2": Preset(weight_spec("float6_e3m2", PerBlock(32), scale_format=_E8M0), None),
    "mxfp8": Preset(weight_spec("float8_e4m3", PerBlock(32), scale_format=_E8M0), None),
    "w8a8_power_of_two": Preset(
        weight_spec("int8", scale_format=_E8M0), activation_spec("int8", symmetry="symmetric", scale_format=_E8M0)
    ),
    "mxint8": Preset(weight_spec("int8", PerBlock(32), symmetry="strict_symmetric", scale_format=_E8M0), None),
    "nf4": Preset(weight_spec("nf4", PerBlock(64)), None),
    "nvfp4": Preset(weight_spec("float4_e2m1", PerBlock(16), scale_format=SCALE_FORMATS["e4m3"]), None),
    **{
        f"q{bits}_k": Preset(weight_spec(f"int{bits}", PerBlock(group), scale_format=SCALE_FORMATS[f"q{bits}_k"]), None)
        for bits, group in ((3, 16), (4, 32), (5, 32), (6, 16))
    },
    **{
        f"q{bits}_k_offset": Preset(
            weight_spec(
                f"uint{bits}",
                PerBlock(32),
                symmetry="float_zero_point",
                method=RangeMethod("mse"),
                scale_format=SCALE_FORMATS[f"q{bits}_k"],
            ),
            None,
        )
        for bits in (4, 5)
    },
    "fp16": Preset(weight_spec("float16", PerTensor()), activation_spec("float16", symmetry="symmetric")),
    "bf16": Preset(weight_spec("bfloat16", PerTensor()), activation_spec("bfloat16", symmetry="symmetric")),
}


#: weights alone: bits, size of a group, with zero points or without
_WEIGHTS = re.compile(r"w(?P<bits>[2-8])(?:g(?P<group>[1-9]\d*))?(?P<zero>_asym|_float_zero)?")


#: names that other tools give what a preset does, in lower case without ``-`` and ``_``
_OTHER_NAMES = {
    "int8": "w8a8", "uint8": "w8a8", "8bit": "w8a8", "qint8": "w8a8", "quint8": "w8a8", "static": "w8a8", "int16": "w8a16",
    "int4": "w4g32", "uint4": "w4g32", "4bit": "w4g32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "float8": "fp8", "fp8e4m3": "fp8", "dynamic": "w8a8_dynamic", "w8a32": "w8", "w4a32": "w4", "int8weightonly": "w8",
    "int4weightonly": "w4g32", "bnb4bit": "nf4",
}  # fmt: skip


def find_preset(name: str | Preset) -> Preset:
    """The preset called ``name``; a :class:`Preset` is returned as it is.

    ``w<bits>``, ``w<bits>g<group>`` and the same with ``_asym`` or ``_float_zero`` quantize weights alone.

    Raises:
        ConfigError: no such preset; the message lists close names.

    >>> find_preset("w3g128_asym").weight.describe()
    'uint3 asymmetric per block of 128, minmax'
    """
    if isinstance(name, Preset):
        return name
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    found = _WEIGHTS.fullmatch(name) if isinstance(name, str) else None
    if found is not None:
        group = PerBlock(int(found["group"])) if found["group"] else PerChannel()
        if found["zero"] == "_float_zero":
            method = RangeMethod("mse")
            return Preset(weight_spec(f"uint{found['bits']}", group, symmetry="float_zero_point", method=method), None)
        if found["zero"]:
            return Preset(weight_spec(f"uint{found['bits']}", group, symmetry="asymmetric"), None)
        return Preset(weight_spec(f"int{found['bits']}", group), None)
    meant = _OTHER_NAMES.get(str(name).lower().replace("-", "").replace("_", ""))
    raise ConfigError(
        site=f"preset {name!r:.100}",
        problem=f"there is no preset of this name{f' (did you mean {meant!r}?)' if meant else close_matches(str(name), PRESETS)}",
        remedy=f"use one of {', '.join(PRESETS)}; w4g128, w3g64_asym, ... for weights alone; or a Preset of your own",
    )
