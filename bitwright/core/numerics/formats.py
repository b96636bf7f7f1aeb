"""Number formats: integer grids and small floating-point formats, by value and by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from bitwright.core.registry import Registry
from bitwright.errors import FormatError, close_matches


@dataclass(frozen=True)
class IntFormat:
    """An integer grid of ``bits`` bits, 2 to 32; ``signed`` puts zero in the middle.

    ``narrow`` drops the lowest code of a signed grid (-127..127 instead of -128..127), which makes it
    exactly symmetric. ``centred`` keeps it, and half of all steps reach the largest magnitude: 127.5 of 8 bits, so that a
    range chosen at run time has the scale ``2 * max / 255`` of compressed-tensors instead of ``max / 127``.
    """

    bits: int
    signed: bool = True
    narrow: bool = False
    centred: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool) or not 2 <= self.bits <= 32:
            raise FormatError(
                site=f"IntFormat(bits={self.bits!r})",
                problem=f"{self.bits!r} is not a bit width between 2 and 32",
                remedy="use 4, 8 or 16 bits for integer runtimes; any whole number from 2 to 32 can be simulated",
            )
        if self.narrow and not self.signed:
            raise FormatError(
                site=f"IntFormat(bits={self.bits}, signed=False, narrow=True)",
                problem="only a signed grid can be narrow",
                remedy="drop narrow=True or use signed=True",
            )
        if self.centred and (self.narrow or not self.signed):
            raise FormatError(
                site=f"IntFormat(bits={self.bits}, signed={self.signed}, narrow={self.narrow}, centred=True)",
                problem="only a signed grid with all of its codes can be centred",
                remedy="drop centred=True, or use signed=True without narrow",
            )

    @property
    def qmin(self) -> int:
        """Lowest code of the grid."""
        return -(1 << (self.bits - 1)) + self.narrow if self.signed else 0

    @property
    def qmax(self) -> int:
        """Highest code of the grid."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    @property
    def steps(self) -> int:
        """Number of intervals between the lowest and the highest code."""
        return self.qmax - self.qmin

    @property
    def reach(self) -> float:
        """Steps from zero to the largest magnitude of a symmetric range: ``qmax``, or half of all steps of a centred grid."""
        return self.steps / 2 if self.centred else float(self.qmax)

    @property
    def name(self) -> str:
        """``int8``, ``uint4``, ...; a narrow grid is written ``int8n``, a centred one ``int8c``."""
        return f"{'' if self.signed else 'u'}int{self.bits}{'n' if self.narrow else 'c' if self.centred else ''}"


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with ``exponent_bits`` and ``mantissa_bits`` (and a sign bit).

    ``finite`` formats use the topmost exponent for numbers too (all but the all-ones pattern for e4m3, all of
    it for e2m1); ``scaled`` formats are stored as ``x / scale``, the wide ones (fp16, bf16) as ``x`` itself.
    A format with a ``codebook`` has these numbers, lowest first, whatever its bits say; a code is the index of one.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    scaled: bool
    codebook: tuple[float, ...] = ()

    @property
    def bits(self) -> int:
        """Storage width in bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return (1 << max(self.exponent_bits - 1, 0)) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; below it the spacing stays constant (subnormals)."""
        return 1 - self.bias

    @property
    def step(self) -> float:
        """The smallest positive number, of which every number is a multiple."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


Format = IntFormat | FloatFormat


def largest_code(fmt: Format) -> float:
    """What the scale times is the largest magnitude: 127 for int8, 127.5 for int8c, 448 for float8_e4m3."""
    return fmt.max if isinstance(fmt, FloatFormat) else fmt.reach


FLOAT8_E4M3 = FloatFormat("float8_e4m3", 4, 3, 448.0, scaled=True)
FLOAT8_E5M2 = FloatFormat("float8_e5m2", 5, 2, 57344.0, scaled=True)
FLOAT6_E2M3 = FloatFormat("float6_e2m3", 2, 3, 7.5, scaled=True)
FLOAT6_E3M2 = FloatFormat("float6_e3m2", 3, 2, 28.0, scaled=True)
FLOAT4_E2M1 = FloatFormat("float4_e2m1", 2, 1, 6.0, scaled=True)
FLOAT16 = FloatFormat("float16", 5, 10, 65504.0, scaled=False)
BFLOAT16 = FloatFormat("bfloat16", 8, 7, 3.3895313892515355e38, scaled=False)
#: quantiles of a normal distribution, with an exact zero: Dettmers et al. 2023, arXiv:2305.14314, appendix E
NF4 = FloatFormat(
    "nf4", 1, 2, 1.0, scaled=True,
    codebook=(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip

#: the sign alone: Rastegari et al. 2016, arXiv:1603.05279
BINARY = FloatFormat("binary", 0, 0, 1.0, scaled=True, codebook=(-1.0, 1.0))


def _checked_format(name: str, row: object) -> FloatFormat:
    """A number format of a plug-in."""
    fmt = row() if callable(row) else row
    if not isinstance(fmt, FloatFormat):
        problem = f"{fmt!r:.100} is no FloatFormat"
        raise FormatError(
            f"format {name!r}", problem, "register bitwright.FloatFormat(name, exponent_bits, mantissa_bits, ...)"
        )
    wrong = "its name is " + repr(fmt.name) if fmt.name != name or name != name.lower() else ""
    numbers = fmt.codebook
    if numbers and (len(numbers) != 1 << fmt.bits or list(numbers) != sorted(set(numbers))):
        wrong = f"its codebook needs {1 << fmt.bits} different numbers, lowest first"
    if not wrong and len(numbers) > 2 and 0.0 not in numbers:
        wrong = "its codebook has no zero"
    if not wrong and not numbers and not 0 < fmt.max < float("inf"):
        wrong = f"its largest number is {fmt.max}"
    if wrong:
        raise FormatError(f"format {name!r}", wrong, "see the rows of bitwright.core.numerics.formats.FLOAT_FORMATS")
    return fmt


_FORMATS = (FLOAT8_E4M3, FLOAT8_E5M2, FLOAT6_E2M3, FLOAT6_E3M2, FLOAT4_E2M1, NF4, BINARY, FLOAT16, BFLOAT16)
FLOAT_FORMATS: Registry[FloatFormat] = Registry("formats", {f.name: f for f in _FORMATS}, _checked_format)
_ALIASES = {"fp8": "float8_e4m3", "e4m3": "float8_e4m3", "e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3",
            "fp8_e5m2": "float8_e5m2", "fp6_e2m3": "float6_e2m3", "e2m3": "float6_e2m3", "fp6_e3m2": "float6_e3m2",
            "e3m2": "float6_e3m2", "fp4": "float4_e2m1", "fp4_e2m1": "float4_e2m1", "e2m1": "float4_e2m1",
            "fp16": "float16", "bf16": "bfloat16", "int1": "binary"}  # fmt: skip


def parse_format(text: str | Format) -> Format:
    """The format called ``text``: ``"int8"``, ``"uint4"``, ``"int8n"`` (narrow), ``"int8c"`` (centred), ``"float8_e4m3"``, ...

    Raises:
        FormatError: no such format; the message lists close names.
    """
    if isinstance(text, (IntFormat, FloatFormat)):
        return text
    key = str(text).strip().lower()
    name = _ALIASES.get(key, key)
    # before the table: names that it lacks are looked for among the entry points of all installed packages, in milliseconds
    if match := re.fullmatch(r"(u?)int([0-9]{1,3})([nc]?)", name):
        return IntFormat(int(match[2]), signed=not match[1], narrow=match[3] == "n", centred=match[3] == "c")
    if name in FLOAT_FORMATS:
        return FLOAT_FORMATS[name]
    known = [*FLOAT_FORMATS, *_ALIASES, "int4", "int8", "int16", "uint4", "uint8", "uint16"]
    raise FormatError(
        site=f"format {text!r:.100}",
        problem=f"there is no number format of this name{close_matches(key, known)}",
        remedy=f"use int2 to int32, uint2 to uint32, or one of {', '.join(FLOAT_FORMATS)}",
    )


def int_format(qmin: int, qmax: int) -> IntFormat | None:
    """The integer format whose codes are ``qmin`` to ``qmax``; ``None`` if no such format exists."""
    bits = int(qmax - qmin + 1).bit_length()
    for width in (bits - 1, bits):
        for signed, narrow in ((False, False), (True, False), (True, True)):
            if 2 <= width <= 32:
                fmt = IntFormat(width, signed, narrow)
                if (fmt.qmin, fmt.qmax) == (qmin, qmax):
                    return fmt
    return None


def float_format(exponent_bits: int, mantissa_bits: int, finite: bool = False) -> FloatFormat:
    """The format with these fields; a named format of Bitwright if one has the same largest number.

    >>> float_format(5, 10).name, float_format(4, 3, finite=True).max, float_format(4, 3).max
    ('float16', 448.0, 240.0)
    """
    largest = float(2 ** (2 ** (exponent_bits - 1) - 1)) * (2 - 2.0**-mantissa_bits)
    for known in FLOAT_FORMATS.values():
        fields = (known.exponent_bits, known.mantissa_bits) == (exponent_bits, mantissa_bits)
        if fields and (finite or known.max == largest):
            return known
    if finite:  # the topmost exponent holds numbers too, all but the last one of which is NaN
        largest = float(2 ** (2 ** (exponent_bits - 1))) * (2 - 2.0 ** (1 - mantissa_bits))
    bits = exponent_bits + mantissa_bits + 1
    name = f"float{bits}_e{exponent_bits}m{mantissa_bits}_to_{largest:g}"  # not the name of a format with another end
    return FloatFormat(name, exponent_bits, mantissa_bits, largest, scaled=bits < 16)


@dataclass(frozen=True)
class ScaleFormat:
    """Storage format of a tensor's scales; computations use float32.

    Zero points follow from the scale that is stored.

    Attributes:
        name: of the row of :data:`SCALE_FORMATS`.
        shared: which of the scales are stored as multiples of one float32 number: ``"none"`` of them, all scales of the
            ``"tensor"``, the blocks of each ``"channel"``, or the next ``count`` blocks of a channel: ``"blocks"``.
        multiples: format of the multiples; ``None`` where scales share no number.
        number: format of a scale, or of the number that scales share, that has fewer bits than float32.
        count: blocks that share a number; 0 where all or none do.
        most: the largest multiple, where it is not that of ``multiples``.
        offsets: the largest multiple that offsets of real zero points (scale times zero point) are stored as, of another float16
            number that the same blocks share; 0 where such zero points are stored as they are, or cannot be.

    ============  =====================================  =====================================================
    name          a scale is                             used by
    ============  =====================================  =====================================================
    ``float32``   a float32 number                       most runtimes
    ``float16``   a float16 number                       GGUF, MatMulNBits of float16 models, vLLM
    ``bfloat16``  a bfloat16 number                      compressed-tensors and torchao of bfloat16 models
    ``float12``   a float16 number of 7 significant      Q4_1 of GGUF, which stores scale times zero point as float16
                  bits, exact times a 4-bit zero point
    ``e8m0``      a power of two, 8 bits                 MX (OCP Microscaling Formats 1.0, section 5.1 and 6.3)
    ``e4m3``      a float8 number times one per tensor   NVFP4
    ``uint4``     1 to 16 times one number per channel   LPBQ (AIMET): 4-bit blocks of 8-bit channels
    ``uint2`` to  1 to 4, ... 1 to 4096 times one number LPBQ of other widths: ``uint8`` for 8-bit blocks of 16-bit
    ``uint12``    per channel                            channels
    ``q6_k``      1 to 127 times a float16 number per    Q6_K of GGUF: blocks of 16
                  16 blocks
    ``q3_k``      1 to 31 times a float16 number per     Q3_K of GGUF: blocks of 16
                  16 blocks
    ``q4_k``,     1 to 63 times a float16 number per     Q4_K and Q5_K of GGUF: blocks of 32; offsets of real zero
    ``q5_k``      8 blocks                               points alike
    ============  =====================================  =====================================================
    """

    name: str
    shared: Literal["none", "tensor", "channel", "blocks"] = "none"
    multiples: FloatFormat | IntFormat | None = None
    number: FloatFormat | None = field(default=None, repr=False)  # told by the name
    count: int = field(default=0, repr=False)
    most: int = field(default=0, repr=False)
    offsets: int = field(default=0, repr=False)

    @property
    def largest_multiple(self) -> float:
        """The largest number that a shared one is multiplied with; 1 where none is shared."""
        if self.most or self.multiples is None:
            return self.most or 1
        return 1 << self.multiples.bits if isinstance(self.multiples, IntFormat) else self.multiples.max


FLOAT32_SCALE = ScaleFormat("float32")
SCALE_FORMATS: dict[str, ScaleFormat] = {
    row.name: row
    for row in (
        FLOAT32_SCALE,
        ScaleFormat("float16", number=FLOAT16),
        ScaleFormat("bfloat16", number=BFLOAT16),
        ScaleFormat("float12", number=FloatFormat("float12", 5, 6, 65024.0, scaled=False)),
        ScaleFormat("e8m0"),
        ScaleFormat("e4m3", "tensor", FLOAT8_E4M3),
        *(ScaleFormat(f"uint{bits}", "channel", IntFormat(bits, signed=False)) for bits in range(2, 13)),
        *(
            ScaleFormat(name, "blocks", IntFormat(most.bit_length(), signed=False), FLOAT16, count, most, offsets)
            for name, count, most, offsets in (
                ("q3_k", 16, 31, 0),
                ("q4_k", 8, 63, 63),
                ("q5_k", 8, 63, 63),
                ("q6_k", 16, 127, 0),
            )  # fmt: skip
        ),
    )
}


def parse_scale_format(text: str | ScaleFormat) -> ScaleFormat:
    """The scale format called ``text``.

    Raises:
        FormatError: no such scale format; the message lists close names.
    """
    if isinstance(text, ScaleFormat):
        return text
    name = {"fp16": "float16", "bf16": "bfloat16"}.get(text, text) if isinstance(text, str) else ""
    if name in SCALE_FORMATS:
        return SCALE_FORMATS[name]
    raise FormatError(
        site=f"scale format {text!r:.100}",
        problem=f"there is no scale format of this name{close_matches(str(text), SCALE_FORMATS)}",
        remedy=f"use one of {', '.join(SCALE_FORMATS)}",
    )
