"""AIMET's enumerations and small types (``aimet_common.defs``), mapped to ours where they are used."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bitwright.aimet_common.names import absent_names
from bitwright.core.numerics.formats import FLOAT_FORMATS, Format, IntFormat, parse_format
from bitwright.errors import ConfigError, close_matches, with_article

__getattr__ = absent_names(__name__)


class QuantScheme(Enum):
    """How ranges are chosen.

    With the ``training_`` members of ``aimet_torch``, ranges train from those that calibration found.
    """

    min_max = 1
    post_training_tf = min_max
    post_training_tf_enhanced = 2
    training_range_learning_with_tf_init = 3
    training_range_learning_with_tf_enhanced_init = 4
    training_range_learning = 5
    post_training_percentile = 6

    @classmethod
    def from_str(cls, alias: str) -> QuantScheme:
        """The member that AIMET's string ``alias`` means.

        Raises:
            ConfigError: (a ValueError) no such alias.
        """
        if alias not in _SCHEME_OF:
            raise ConfigError(
                "quant_scheme",
                f"{alias!r} is not a scheme{close_matches(alias, _SCHEME_OF)}",
                f"use one of {', '.join(_SCHEME_OF)}",
            )
        return _SCHEME_OF[alias]


_SCHEME_OF = {
    "min_max": QuantScheme.min_max,
    "tf": QuantScheme.min_max,
    "tf_enhanced": QuantScheme.post_training_tf_enhanced,
    "percentile": QuantScheme.post_training_percentile,
}
_METHOD = {
    QuantScheme.min_max: "minmax",
    QuantScheme.post_training_tf_enhanced: "tf_enhanced",
    QuantScheme.training_range_learning_with_tf_init: "minmax",
    QuantScheme.training_range_learning_with_tf_enhanced_init: "tf_enhanced",
    QuantScheme.training_range_learning: "minmax",
    QuantScheme.post_training_percentile: "percentile",
}


def range_method(scheme: Any) -> Any:
    """Range method of a scheme of AIMET; other values are returned unchanged."""
    return _METHOD.get(scheme, scheme) if isinstance(scheme, QuantScheme) else scheme


class QuantizationDataType(Enum):
    """Kind of number format."""

    undefined = 0
    int = 1
    float = 2


def data_type(kind: Any) -> str:
    """``"int"`` or ``"float"``, as our API calls the kind of a format."""
    return str(kind.name if isinstance(kind, Enum) else kind)


class ActivationType(Enum):
    """Kind of activation function."""

    no_activation = 0
    relu = 1
    relu6 = 2


class CostMetric(Enum):
    """The cost that compression reduces."""

    mac = 1
    memory = 2


class CompressionScheme(Enum):
    """Ways to compress."""

    weight_svd = 1
    spatial_svd = 2
    channel_pruning = 3


class RankSelectScheme(Enum):
    """How compression ratios are chosen."""

    greedy = 1


@dataclass
class GreedySelectionParameters:
    """How compression ratios are chosen by the metric.

    Attributes:
        target_comp_ratio: part of the cost that the model may keep.
        num_comp_ratio_candidates: ratios that are tried of each layer: 10 for 0.1, 0.2, ...
        use_monotonic_fit: make scores rise with the ratio first.
        saved_eval_scores_dict: JSON file of the scores of an earlier run.
    """

    target_comp_ratio: Any
    num_comp_ratio_candidates: Any = 10
    use_monotonic_fit: bool = False
    saved_eval_scores_dict: str | None = None


class SupportedKernelsAction(Enum):
    """Action if no kernel of the target fits a layer."""

    allow_error = 1
    warn_on_error = 2
    assert_on_error = 3


class EncodingType(Enum):
    """Granularity of an encoding in a file."""

    PER_TENSOR = 0
    PER_CHANNEL = 1
    PER_BLOCK = 2
    LPBQ = 3
    VECTOR = 4


class CallbackFunc:
    """A function with its second argument bound: ``CallbackFunc(f, args)(model)`` is ``f(model, args)``."""

    def __init__(self, func: Callable[..., Any], func_callback_args: Any = None) -> None:
        self.func, self.args = func, func_callback_args

    def __call__(self, arg: Any) -> Any:
        """Call the function."""
        return self.func(arg, self.args)


class QuantDtypeBwInfo:
    """Kind and width of activations and parameters, as one candidate of mixed precision."""

    def __init__(
        self,
        act_dtype: QuantizationDataType,
        act_bw: int,
        param_dtype: QuantizationDataType = QuantizationDataType.undefined,
        param_bw: int = 0,
    ) -> None:
        self.act_dtype, self.act_bw, self.param_dtype, self.param_bw = (act_dtype, act_bw, param_dtype, param_bw)

    def get_activation(self) -> tuple[int, QuantizationDataType]:
        """Width and kind of activations."""
        return self.act_bw, self.act_dtype

    def get_param(self) -> tuple[int, QuantizationDataType]:
        """Width and kind of parameters."""
        return self.param_bw, self.param_dtype

    def is_same_activation(self, dtype: QuantizationDataType, bw: int) -> bool:
        """Whether activations are of this kind and width."""
        return (self.act_dtype, self.act_bw) == (dtype, bw)

    def is_same_param(self, dtype: QuantizationDataType, bw: int) -> bool:
        """Whether parameters are of this kind and width."""
        return (self.param_dtype, self.param_bw) == (dtype, bw)


class qtype(abc.ABC):  # noqa: N801, AIMET's name
    """A number format: ``qtype.int(8)``, ``qtype.float(5, 10)``, or one of the names ``int8``, ``float16``, ..."""

    @abc.abstractmethod
    def to_legacy_repr(self) -> tuple[QuantizationDataType, int]:
        """Kind and width."""

    @staticmethod
    def from_legacy_repr(dtype: QuantizationDataType, bitwidth: int) -> qtype:
        """The format of a kind and a width.

        Raises:
            ConfigError: (a ValueError) there is no such float format.
        """
        if dtype == QuantizationDataType.int:
            return Int(bitwidth)
        names = {32: "float32", 16: "float16", 8: "float8e4m3fn"}
        if dtype == QuantizationDataType.float and bitwidth in names:
            return QTYPE_ALIASES[names[bitwidth]]
        raise ConfigError("qtype", f"there is no {dtype.name} format of {bitwidth} bits", "use 8, 16 or 32 bits")

    @staticmethod
    def int(bits: int) -> Int:
        """The integer format of ``bits`` bits."""
        return Int(bits)

    @staticmethod
    def float(exponent_bits: Any, mantissa_bits: Any, finite: bool = False, unsigned_zero: bool = False) -> Float:
        """The float format with these fields."""
        return Float(exponent_bits, mantissa_bits, finite, unsigned_zero)

    @staticmethod
    def from_string(name: str) -> qtype:
        """The format called ``name``.

        Raises:
            ConfigError: (a ValueError) no such name.
        """
        if name in QTYPE_ALIASES:
            return QTYPE_ALIASES[name]
        raise ConfigError(
            "qtype",
            f"{name!r} is not a number format{close_matches(name, QTYPE_ALIASES)}",
            f"use one of {', '.join(QTYPE_ALIASES)}, or qtype.int(bits)",
        )

    @staticmethod
    def as_qtype(dtype: qtype | str) -> qtype:
        """``dtype`` itself, or the format of its name.

        Raises:
            TypeError: it is neither.
        """
        if isinstance(dtype, qtype):
            return dtype
        if isinstance(dtype, str):
            return qtype.from_string(dtype)
        raise TypeError(f"{with_article(type(dtype).__name__)} is not a number format; use a qtype or its name")


@dataclass(frozen=True)
class Int(qtype):
    """An integer format."""

    bits: Any

    def __repr__(self) -> str:
        return f"int{self.bits}"

    def to_legacy_repr(self) -> tuple[QuantizationDataType, Any]:
        """Kind and width."""
        return QuantizationDataType.int, self.bits


@dataclass(frozen=True)
class Float(qtype):
    """A float format."""

    exponent_bits: Any
    mantissa_bits: Any
    finite: bool = False
    unsigned_zero: bool = False

    def __repr__(self) -> str:
        for name, known in QTYPE_ALIASES.items():
            if known == self:
                return name
        return f"float{self.to_legacy_repr()[1]}e{self.exponent_bits}m{self.mantissa_bits}"

    def to_legacy_repr(self) -> tuple[QuantizationDataType, Any]:
        """Kind and width."""
        return QuantizationDataType.float, self.exponent_bits + self.mantissa_bits + 1


int2, int4, int8, int16 = (Int(bits) for bits in (2, 4, 8, 16))
float16, float32 = Float(5, 10), Float(8, 23)
float8e4m3fn, float8e5m2 = Float(4, 3, finite=True), Float(5, 2)
QTYPE_ALIASES: dict[str, qtype] = {
    "int2": int2,
    "int4": int4,
    "int8": int8,
    "int16": int16,
    "float16": float16,
    "float32": float32,
    "float8e4m3fn": float8e4m3fn,
    "float8e5m2": float8e5m2,
}


def number_format(kind: qtype | str, *, signed: bool = True) -> Format | None:
    """Our number format for AIMET's; ``None`` is float32, which means not to quantize.

    Raises:
        ConfigError, FormatError: there is no such format here.
    """
    found = qtype.as_qtype(kind)
    if isinstance(found, Int):
        return IntFormat(found.bits, signed)
    assert isinstance(found, Float)
    if found == float32:
        return None
    for known in FLOAT_FORMATS.values():
        if (known.exponent_bits, known.mantissa_bits) == (found.exponent_bits, found.mantissa_bits):
            return known
    raise ConfigError(
        "qtype",
        f"there is no float format with {found.exponent_bits} exponent and {found.mantissa_bits} mantissa bits",
        f"use one of {', '.join(FLOAT_FORMATS)}",
    )


def kind_of(fmt: Format) -> qtype:
    """AIMET's number format for ours."""
    if isinstance(fmt, IntFormat):
        return Int(fmt.bits)
    return Float(fmt.exponent_bits, fmt.mantissa_bits, finite=fmt.name == "float8_e4m3")


def signed_as(fmt: str, signed: bool) -> Format:
    """The format called ``fmt``; an integer one signed or not as told."""
    return parse_format(re.sub(r"^u?int", "int" if signed else "uint", fmt))
