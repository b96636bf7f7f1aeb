"""Read encodings files: one function per version checks an entry and turns it into a record."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, islice
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.files import read_document
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT16, Format, IntFormat
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, Shape
from bitwright.errors import EncodingsError, close_matches
from bitwright.export.encodings.records import (
    FLOATS_2_0_0,
    INTS_2_0_0,
    SECTIONS,
    VERSIONS,
    EncodingsFile,
    GroupedScale,
    Kind,
    NamedEncoding,
    Version,
    check_version,
)
from bitwright.export.files.atomic import AnyPath, read_error

MAX_BYTES = 2 << 30  # parsing takes several times the size of the file in memory

_ENC_TYPES = ("PER_TENSOR", "PER_CHANNEL", "PER_BLOCK", "LPBQ")
_MEND = "correct the entry or export the file again"
_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "null",
}


_Read = tuple[Encoding, GroupedScale | None]


def read_encodings(
    source: AnyPath | Mapping[str, Any], *, params: Collection[str] | None = None, max_bytes: int = MAX_BYTES
) -> EncodingsFile:
    """Read an encodings file of version 0.6.1, 1.0.0 or 2.0.0, by Bitwright or AIMET.

    Also reads the form keyed by module that AIMET writes as ``*_torch.encodings``: the entry below ``c``,
    ``input``, ``0`` gets the name ``c.input[0]``. For LPBQ the effective scale is the integer block scale
    times the channel scale; both factors are kept in `NamedEncoding.grouped`.

    Args:
        source: the file, or its content as a dict.
        params: names of the model's parameters; tells ``kind`` in version 2.0.0, which does not store it.
        max_bytes: refuse larger files, before reading them.

    Raises:
        EncodingsError: not JSON, no or another version, or a malformed entry; names the entry and the key.
        ExportError: the file does not exist or cannot be read.
    """
    site, document = _load(source, max_bytes)
    version = _version(site, document)
    names = None if params is None else frozenset(params)
    records: dict[str, NamedEncoding] = {}
    for name, kind, raw in _entries(site, document, version):
        if not isinstance(name, str) or not name:
            raise EncodingsError(site, f"an entry has {_what(name) if name else 'an empty text'} for a name", _MEND)
        if name in records:
            raise EncodingsError(f"{site}: {name!r}", "two entries have this name", "remove one of them")
        encoding, grouped = _READERS[version](_Entry(f"{site}: {name!r}", raw))
        if kind == "unknown" and names is not None:
            kind = "param" if name in names else "activation"
        records[name] = NamedEncoding(name, kind, encoding, grouped)
    excluded = _setting(site, document, "excluded_layers", list)
    return EncodingsFile(
        version=version,
        records=tuple(records.values()),
        quantizer_args=_setting(site, document, "quantizer_args", dict),
        excluded_layers=tuple(str(layer) for layer in excluded),
        producer=_setting(site, document, "producer", dict),
    )


def _load(source: AnyPath | Mapping[str, Any], max_bytes: int) -> tuple[str, dict[str, Any]]:
    if isinstance(source, Mapping):
        return "encodings", dict(source)
    site = os.fspath(source)
    remedy = "use the .encodings file of an export; this may be another kind of file, or a damaged one"
    document = read_document(
        source,
        EncodingsError,
        remedy=remedy,
        max_bytes=max_bytes,
        larger="pass a larger max_bytes if you trust the file",
        kind=".json",
        unreadable=read_error,
    )
    if not isinstance(document, dict):
        raise EncodingsError(site, f"it holds {_what(document)}, not an object with a version", remedy)
    return site, document


def _version(site: str, document: Mapping[str, Any]) -> Version:
    if "version" not in document:
        raise EncodingsError(
            site,
            "it has no version",
            "export it again; around the bare parameter entries that older tools write, put "
            '{"version": "0.6.1", "param_encodings": ...}',
        )
    version = document["version"]
    if not isinstance(version, str):
        known = ", ".join(map(repr, VERSIONS))
        raise EncodingsError(f"{site}, key 'version'", f"it is {_what(version)}, not a text", f"use one of {known}")
    return check_version(site, version)


def _setting(site: str, document: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    value = document.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise EncodingsError(f"{site}, key {key!r}", f"it is {_what(value)}, not {_what(kind())}", _MEND)
    return value


def _entries(site: str, document: Mapping[str, Any], version: Version) -> Iterator[tuple[Any, Kind, Any]]:
    """``(name, kind, raw entry)`` of all entries, whatever the layout."""
    sections: dict[str, Kind] = {"encodings": "unknown"} if version == "2.0.0" else SECTIONS
    if not any(key in document for key in sections):
        raise EncodingsError(
            site,
            f"version {version} keeps its entries under {' and '.join(map(repr, sections))}; there are none",
            "check the version, or export the file again",
        )
    for key, kind in sections.items():
        section = document.get(key, [])
        if isinstance(section, dict):
            yield from ((name, kind, raw) for top, value in section.items() for name, raw in _by_module(top, value))
        elif isinstance(section, list):
            for i, raw in enumerate(section):
                entry = _Entry(f"{site}: {key}[{i}]", raw)
                yield entry.text("name"), kind, raw
        else:
            raise EncodingsError(f"{site}, key {key!r}", f"it is {_what(section)}, not a list or object", _MEND)


def _by_module(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``(name, raw)``: one of an entry keyed by its name, several of a module with its inputs and outputs."""
    ports = value if isinstance(value, dict) and value and set(value) <= {"input", "output"} else {}
    if not all(isinstance(port, dict) for port in ports.values()) or not ports:
        yield name, value
        return
    for port, indices in ports.items():
        yield from ((f"{name}.{port}[{index}]", raw) for index, raw in indices.items())


class _Entry:
    """One raw entry with its place; the getters check type and value and name the key when they refuse."""

    def __init__(self, site: str, raw: Any) -> None:
        self.site = site
        if isinstance(raw, list):  # 0.6.1: one row per channel
            raw = _columns(site, raw)
        if not isinstance(raw, dict):
            raise EncodingsError(site, f"it is {_what(raw)}, not an object", _MEND)
        self.raw: dict[str, Any] = raw

    def fail(self, key: str, problem: str, remedy: str = _MEND) -> EncodingsError:
        """The error to raise about ``key``."""
        return EncodingsError(f"{self.site}, key {key!r}", problem, remedy)

    def has(self, key: str) -> bool:
        """Whether ``key`` exists and is not null."""
        return self.raw.get(key) is not None

    def need(self, key: str) -> Any:
        """The value of the required ``key``."""
        if key not in self.raw:
            raise self.fail(key, f"it is missing{close_matches(key, [k[:40] for k in islice(self.raw, 50)])}")
        return self.raw[key]

    def text(self, key: str, choices: Collection[str] = ()) -> str:
        """A text, one of ``choices`` if there are any."""
        value = self.need(key)
        if not isinstance(value, str):
            raise self.fail(key, f"it is {_what(value)}, not a text")
        if choices and value not in choices:
            raise self.fail(
                key,
                f"{value!r:.40} is not known{close_matches(value[:40], choices)}",
                f"use one of {', '.join(choices)}",
            )
        return value

    def flag(self, key: str) -> bool:
        """A truth value; the texts "True" and "False" of version 0.6.1 count."""
        value = self.need(key)
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise self.fail(key, f"it is {_shown(value)}, neither true nor false")

    def integer(self, key: str, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"it is {_shown(value)}, not a whole number from {low} to {high}")
        return value

    def numbers(self, key: str) -> NDArray[np.float64]:
        """A number or a regular, possibly nested list of numbers, at least one, as float64."""
        value = self.need(key)
        level, kinds = [value], {type(value)}
        while kinds == {list}:  # all lists of one depth at a time; texts never reach numpy, which would pad them
            level = list(chain.from_iterable(level))
            kinds = set(map(type, level))
        if not kinds or not kinds <= {int, float}:
            raise self.fail(key, f"it is {_what(value)}, not a number or a list of numbers")
        try:
            return np.array(value, np.float64)
        except (ValueError, OverflowError) as error:
            raise self.fail(key, "its rows differ in length, or a number is too large") from error

    def scales(self, key: str) -> NDArray[np.float32]:
        """Numbers that are positive and finite, also as float32."""
        array = self.numbers(key)
        with np.errstate(over="ignore", under="ignore"):
            scales = array.astype(np.float32)
        return self.check_scales(key, scales, array)

    def check_scales(self, key: str, scales: NDArray[np.float32], shown: NDArray[Any]) -> NDArray[np.float32]:
        """Check that ``scales`` are positive and finite; the error shows the number in ``shown``."""
        bad = ~(np.isfinite(scales) & (scales > 0))
        if bad.any():
            where = int(np.flatnonzero(bad)[0])
            raise self.fail(
                key,
                f"{shown.ravel()[where]} at position {where} is not a positive finite number in float32",
                "calibrate the tensor again; an unused tensor should have no entry",
            )
        return scales

    def integers(self, key: str) -> NDArray[np.int64]:
        """Whole numbers; AIMET also writes them as -128.0."""
        array = self.numbers(key)
        whole = np.isfinite(array) & (np.rint(array) == array) & (np.abs(array) < 2.0**53)
        if not whole.all():
            raise self.fail(
                key,
                f"{array[~whole][0]} is not a whole number",
                "grids shifted by half a step are not supported; calibrate this tensor on a plain grid",
            )
        return array.astype(np.int64)

    def refuse_half_steps(self) -> None:
        """Refuse ``zero_point_shift``: an `Encoding` has whole zero points."""
        if self.has("zero_point_shift") and self.numbers("zero_point_shift").any():
            raise self.fail(
                "zero_point_shift",
                "grids shifted by half a step are not supported",
                "calibrate this tensor on a plain grid",
            )


def _columns(site: str, rows: list[Any]) -> dict[str, Any]:
    """The rows of a 0.6.1 entry as one object with lists; what holds for the whole tensor has to agree."""
    if not rows:
        raise EncodingsError(site, "it is an empty list", _MEND)
    entries = [_row(f"{site}[{i}]", row) for i, row in enumerate(rows)]
    merged = dict(entries[0].raw)
    for key in ("bitwidth", "dtype", "is_symmetric"):
        for other in entries:
            if other.raw.get(key) != merged.get(key):
                problem = f"{other.raw.get(key)!r} differs from {merged.get(key)!r} of the first channel"
                raise other.fail(key, problem)
    if merged.get("dtype") == "float":
        return merged
    merged |= {key: [entry.need(key) for entry in entries] for key in ("scale", "offset")}
    return merged | {"zero_point_shift": [entry.raw.get("zero_point_shift") or 0 for entry in entries]}


def _row(site: str, row: Any) -> _Entry:
    if not isinstance(row, dict):
        raise EncodingsError(site, f"it is {_what(row)}, not an object", _MEND)
    return _Entry(site, row)


def _read_0_6_1(entry: _Entry) -> _Read:
    bits = entry.integer("bitwidth", 2, 32)
    if entry.text("dtype", ("int", "float")) == "float":
        return _half(entry, "bitwidth", bits), None
    entry.refuse_half_steps()
    granularity = PerTensor() if entry.numbers("scale").size == 1 else PerChannel()
    return _offset_encoding(entry, bits, entry.flag("is_symmetric"), granularity), None


def _read_1_0_0(entry: _Entry) -> _Read:
    bits, kind = entry.integer("bw", 2, 32), entry.text("enc_type")
    if kind == "VECTOR":
        raise entry.fail("enc_type", "vector quantization is not supported", "quantize this weight per channel")
    entry.text("enc_type", _ENC_TYPES)
    if entry.text("dtype", ("INT", "FLOAT")) == "FLOAT":
        return _half(entry, "bw", bits), None
    entry.refuse_half_steps()
    if kind == "LPBQ":
        return _read_lpbq_1_0_0(entry, bits)
    granularity: Granularity = PerTensor() if kind == "PER_TENSOR" else PerChannel()
    if kind == "PER_BLOCK":
        granularity = PerBlock(entry.integer("block_size", 1, 2**31 - 1))
    return _offset_encoding(entry, bits, entry.flag("is_sym"), granularity), None


def _half(entry: _Entry, key: str, bits: int) -> Encoding:
    if bits != 16:
        raise entry.fail(
            key,
            f"a float format of {bits} bits is ambiguous in this version",
            "export with version 2.0.0, which names the float format",
        )
    return Encoding(FLOAT16, np.ones((), np.float32), np.zeros((), np.int32))


def _offset_encoding(entry: _Entry, bits: int, symmetric: bool, granularity: Granularity) -> Encoding:
    """The encoding of ``scale``, ``offset`` (unsigned grid) and ``is_sym``; flat, its axes open."""
    scale: NDArray[np.float32] = entry.scales("scale").ravel()
    offset: NDArray[np.int64] = entry.integers("offset").ravel()
    if scale.size != offset.size:
        raise entry.fail("offset", f"it has {offset.size} numbers, but 'scale' has {scale.size}")
    if isinstance(granularity, PerTensor):
        if scale.size != 1:
            raise entry.fail("scale", f"it has {scale.size} numbers, but a PER_TENSOR entry has one")
        scale, offset = scale.reshape(()), offset.reshape(())
    middle = 1 << (bits - 1)
    if symmetric and bool((offset == 1 - middle).all()):
        fmt = IntFormat(bits, narrow=True)
    else:
        fmt = IntFormat(bits, signed=symmetric and bool(offset.any()))
    zero_point = fmt.qmin - offset
    _check_zero_point(entry, "offset", zero_point, fmt, offset)
    return Encoding(fmt, scale, zero_point.astype(np.int64), granularity)


def _check_zero_point(
    entry: _Entry, key: str, zero_point: NDArray[np.int64], fmt: IntFormat, shown: NDArray[np.int64]
) -> None:
    outside = (zero_point < fmt.qmin) | (zero_point > fmt.qmax)
    if outside.any():
        raise entry.fail(key, f"{shown[outside].ravel()[0]} puts zero outside of the {fmt.name} grid")


def _read_lpbq_1_0_0(entry: _Entry, bits: int) -> _Read:
    compressed = entry.integer("compressed_bw", 2, bits)
    channel, block = entry.scales("scale").ravel(), _block_scales(entry).ravel()
    if block.size % channel.size:
        raise entry.fail(
            "per_block_int_scale", f"{block.size} numbers cannot be shared by the {channel.size} channels of 'scale'"
        )
    granularity = PerBlock(entry.integer("block_size", 1, 2**31 - 1))
    return _grouped(entry, IntFormat(compressed), GroupedScale(block, channel, bits), granularity)


def _block_scales(entry: _Entry) -> NDArray[np.int64]:
    block = entry.integers("per_block_int_scale")
    if (block < 1).any() or (block > 1 << 24).any():  # beyond, float32 products would not be exact
        raise entry.fail("per_block_int_scale", "a block scale is not a whole number from 1 to 16777216")
    return block


def _grouped(entry: _Entry, fmt: IntFormat, grouped: GroupedScale, granularity: PerBlock) -> _Read:
    scale = grouped.product()
    entry.check_scales("per_block_int_scale", scale, scale)
    return Encoding(fmt, scale, np.zeros(scale.shape, np.int32), granularity), grouped


def _read_2_0_0(entry: _Entry) -> _Read:
    fmt = _format_2_0_0(entry)
    axis = entry.integer("axis", -64, 63) if entry.has("axis") else None
    if entry.has("per_block_int_scale"):
        return _read_lpbq_2_0_0(entry, fmt)
    scale = entry.scales("y_scale")
    zero_point = np.zeros(scale.shape, np.int64)
    if entry.has("y_zero_point"):
        zero_point = entry.integers("y_zero_point")
        if zero_point.shape != scale.shape:
            shapes = f"{zero_point.shape}, but 'y_scale' has shape {scale.shape}"
            raise entry.fail("y_zero_point", f"it has shape {shapes}")
        if isinstance(fmt, IntFormat):
            _check_zero_point(entry, "y_zero_point", zero_point, fmt, zero_point)
        elif zero_point.any():
            raise entry.fail("y_zero_point", f"a {fmt.name} grid has no zero point")
    if entry.has("block_size"):
        return Encoding(fmt, scale, zero_point, _blocks_2_0_0(entry, scale.shape)), None
    if axis is None:
        if scale.size != 1:
            raise entry.fail("axis", f"it is missing, but there are {scale.size} scales")
        return Encoding(fmt, scale.reshape(()), zero_point.reshape(())), None
    if scale.ndim > 1:
        raise entry.fail("y_scale", f"it has {scale.ndim} dimensions; without 'block_size' it is a plain list")
    return Encoding(fmt, scale.ravel(), zero_point.ravel(), PerChannel(axis)), None


def _format_2_0_0(entry: _Entry) -> Format:
    name = entry.text("output_dtype")
    if name in FLOATS_2_0_0:
        return FLOATS_2_0_0[name]
    prefix, _, bits = name.partition("int")
    if prefix in ("", "u") and bits.isascii() and bits.isdigit() and len(bits) < 3 and 2 <= int(bits) <= 32:
        return IntFormat(int(bits), signed=not prefix)
    known = (*INTS_2_0_0, *FLOATS_2_0_0)
    raise entry.fail(
        "output_dtype",
        f"{name!r:.40} is not a supported dtype{close_matches(name[:40], known)}",
        f"use one of {', '.join(known)}",
    )


def _blocks_2_0_0(entry: _Entry, shape: Shape) -> PerBlock:
    """The granularity of scales of ``shape``, which has the rank of the tensor."""
    rank, size = len(shape), entry.integer("block_size", 1, 2**31 - 1)
    if rank == 0:
        raise entry.fail("block_size", "blocks need a nested list of scales, one level per axis of the tensor")
    axis = entry.integer("axis", -rank, rank - 1) % rank
    return PerBlock(size, axis, tuple(i for i, n in enumerate(shape) if i != axis and n > 1))


def _read_lpbq_2_0_0(entry: _Entry, fmt: Format) -> _Read:
    if not isinstance(fmt, IntFormat) or fmt.bits > 16:
        raise entry.fail("output_dtype", "two-factor scales need an integer grid of at most 16 bits")
    block, channel = _block_scales(entry), entry.scales("per_channel_float_scale")
    granularity = _blocks_2_0_0(entry, block.shape)
    channels = tuple(1 if i == granularity.axis else n for i, n in enumerate(block.shape))
    if channel.ndim == 1 and channel.size == prod(channels):
        channel = channel.reshape(channels)
    if channel.shape != channels:  # checked before the product: other shapes could broadcast to a huge one
        raise entry.fail(
            "per_channel_float_scale",
            f"it has shape {channel.shape}, but 'per_block_int_scale' has shape {block.shape}",
        )
    return _grouped(entry, fmt, GroupedScale(block, channel, 2 * fmt.bits), granularity)


_READERS: dict[str, Callable[[_Entry], _Read]] = {"0.6.1": _read_0_6_1, "1.0.0": _read_1_0_0, "2.0.0": _read_2_0_0}


def _what(value: object) -> str:
    """The kind of a JSON value."""
    return _KINDS.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    """A number or a shortened text; for other values only the kind."""
    return f"{value!r:.40}" if isinstance(value, (str, int, float)) else _what(value)
