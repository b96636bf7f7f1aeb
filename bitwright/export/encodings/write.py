"""Write encodings files of versions 0.6.1, 1.0.0 and 2.0.0 in the form of AIMET 2.42, and compare their names.

The files differ from `Encoding` in these ways, all of which are translated here and in
:mod:`bitwright.export.encodings.read`:

- 0.6.1 and 1.0.0 store an ``offset`` on the *unsigned* grid: ``x = (code + offset) * scale``, codes from 0.
  So ``offset = qmin - zero_point``: int8 with zero point 0 has -128, its narrow form -127, uint8 with zero
  point 3 has -3. Where ``is_sym`` is true the grid is signed, or unsigned symmetric if the offset is 0.
- 0.6.1 and 1.0.0 store no axes. What is read has open axes (``PerChannel()``, ``PerBlock(size)``, flat
  scales) until `NamedEncoding.resolve` is told the tensor's shape and the axes of its operator.
- 2.0.0 stores ONNX dtypes, zero points and axes, but not which names are parameters, and no narrow grids.

Scales are written as float64 text of the float32 value, so that they come back bit for bit. Compilers that want one entry per
tensor also get entries for tensors that only rearrange elements of others (:func:`carried_records`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright import __version__
from bitwright.core.graph.operators import op_row
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT16, FloatFormat, Format, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor, phrase
from bitwright.errors import EncodingsError, close_matches
from bitwright.export.encodings.read import read_encodings
from bitwright.export.encodings.records import (
    FLOATS_2_0_0,
    INTS_2_0_0,
    SECTIONS,
    VERSIONS,
    EncodingsFile,
    GroupedScale,
    Kind,
    NamedEncoding,
    NotExpressed,
    Version,
    WrittenEncodings,
    channels_come_first,
    check_version,
)
from bitwright.export.files.atomic import AnyPath, atomic_write

_FLOAT_DTYPES = {fmt: name for name, fmt in FLOATS_2_0_0.items()}


def write_encodings(
    path: AnyPath,
    records: Iterable[NamedEncoding],
    version: str = "1.0.0",
    *,
    quantizer_args: Mapping[str, Any],
    excluded_layers: Iterable[str] = (),
) -> WrittenEncodings:
    """Write an encodings file that AIMET 2.42 and the compilers that follow it can read.

    The file appears whole or not at all. One entry per line keeps it readable, and quick to write.

    Args:
        path: the file; its folder has to exist.
        records: entries with unique names and positive finite scales.
        version: ``"0.6.1"``, ``"1.0.0"`` or ``"2.0.0"``.
        quantizer_args: global settings, under AIMET's names (``quant_scheme``, ``param_bitwidth``, ...).
        excluded_layers: layers that were left out of quantization.

    Returns:
        The path, and a list of what the version cannot express: each item names the record and says whether
        its nearest faithful form was written (same scale, same values) or it was left out.

    Raises:
        EncodingsError: unknown version; a record without a kind (before 2.0.0), with open axes (2.0.0), with
            a scale that is not finite and positive, or with the name of another record.
        ExportError: the folder is missing, read-only or full.

    Reference: encodings format specification of AIMET, https://quic.github.io/aimet-pages
    """
    check_version(os.fspath(path), version)
    entries: dict[Kind, dict[str, Any]] = {"activation": {}, "param": {}, "unknown": {}}
    notes: list[NotExpressed] = []
    seen: set[str] = set()
    for record in records:
        _check_record(record, version, seen)
        entry, reason = _entry(record, version)
        if record.encoding.dynamic:
            entry, reason = None, "every run chooses its range; left out"
        if reason is not None:
            notes.append(NotExpressed(record.name, reason, written=entry is not None))
        if entry is not None:
            entries["unknown" if version == "2.0.0" else record.kind][record.name] = entry
    document, lost = _document(version, entries, dict(quantizer_args), list(excluded_layers))
    text = json_lines(document, [key for key in document if key.endswith("encodings")])
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(text)
    return WrittenEncodings(Path(path), (*notes, *lost))


def _check_record(record: NamedEncoding, version: str, seen: set[str]) -> None:
    if record.name in seen:
        raise EncodingsError(record.name, "two records have this name", "give every record a name of its own")
    seen.add(record.name)
    if version != "2.0.0" and record.kind == "unknown":
        raise EncodingsError(
            record.name,
            f"version {version} needs to know whether this is an activation or a parameter",
            "set kind to 'activation' or 'param', or pass params= to read_encodings",
        )
    scale = record.encoding.scale
    bad = ~(np.isfinite(scale) & (scale > 0))
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise EncodingsError(
            record.name,
            f"scale {scale.ravel()[where]} at position {where} is not a positive finite number",
            "calibrate this tensor again with finite data that reaches it, or leave its record out",
        )


def _entry(record: NamedEncoding, version: str) -> tuple[Any, str | None]:
    """The entry of a record, or ``None`` and the reason; and what the version cannot express of it."""
    if record.encoding.shift is not None:
        return None, f"version {version} has whole zero points, and these are real numbers; left out"
    return _WRITERS[version](record)


def _write_0_6_1(record: NamedEncoding) -> tuple[Any, str | None]:
    encoding, fmt = record.encoding, record.encoding.format
    if isinstance(fmt, FloatFormat):
        if fmt == FLOAT16:
            return [{"bitwidth": 16, "dtype": "float"}], None
        return None, f"version 0.6.1 cannot describe {fmt.name}; left out"
    if isinstance(encoding.granularity, PerBlock):
        return None, "version 0.6.1 has no blocks; left out"
    offset, symmetric, reason = _unsigned(encoding, fmt)
    rows = [
        {
            "bitwidth": fmt.bits,
            "dtype": "int",
            "is_symmetric": str(symmetric),
            "min": low,
            "max": high,
            "scale": scale,
            "offset": shift,
        }
        for low, high, scale, shift in zip(
            encoding.min.ravel().tolist(),
            encoding.max.ravel().tolist(),
            encoding.scale.ravel().tolist(),
            offset.ravel().tolist(),
            strict=True,
        )
    ]
    if len(rows) == 1 and isinstance(encoding.granularity, PerChannel):
        reason = _both(reason, "version 0.6.1 does not tell one channel from per tensor; same values")
    return rows, reason


def _write_1_0_0(record: NamedEncoding) -> tuple[Any, str | None]:
    encoding, fmt, granularity = record.encoding, record.encoding.format, record.encoding.granularity
    if isinstance(fmt, FloatFormat):
        if fmt == FLOAT16:
            return {"name": record.name, "dtype": "FLOAT", "bw": 16, "enc_type": "PER_TENSOR"}, None
        return None, f"version 1.0.0 cannot describe {fmt.name}; left out"
    grouped, plain = _factors(record, fmt, "1.0.0")
    if grouped is not None and isinstance(granularity, PerBlock):
        return _lpbq_1_0_0(record, grouped, fmt, granularity), plain
    offset, symmetric, reason = _unsigned(encoding, fmt)
    entry = {"name": record.name, "dtype": "INT", "bw": fmt.bits, "is_sym": symmetric}
    if isinstance(granularity, PerBlock):
        entry |= {"enc_type": "PER_BLOCK", "block_size": granularity.size}
    else:
        entry["enc_type"] = "PER_TENSOR" if isinstance(granularity, PerTensor) else "PER_CHANNEL"
    turned = channels_come_first(granularity, encoding.scale.ndim)
    entry["scale"], entry["offset"] = _flat(encoding.scale, turned), _flat(offset, turned)
    return entry, _both(reason, plain)


def _lpbq_1_0_0(record: NamedEncoding, grouped: GroupedScale, fmt: IntFormat, where: PerBlock) -> dict[str, Any]:
    offset = -(1 << (grouped.decompressed_bits - 1))
    return {
        "name": record.name,
        "dtype": "INT",
        "bw": grouped.decompressed_bits,
        "compressed_bw": fmt.bits,
        "is_sym": True,
        "enc_type": "LPBQ",
        "block_size": where.size,
        "scale": _flat(grouped.channel, False),
        "offset": [offset] * grouped.channel.size,
        "per_block_int_scale": _flat(grouped.block, channels_come_first(where, grouped.block.ndim)),
    }


def _write_2_0_0(record: NamedEncoding) -> tuple[Any, str | None]:
    encoding, fmt, granularity = record.encoding, record.encoding.format, record.encoding.granularity
    if record.is_open:
        raise EncodingsError(
            record.name,
            f"version 2.0.0 stores the axis, and this {phrase(granularity)} entry has none yet",
            "call resolve(shape, channel_axis, block_axis) on the record first",
        )
    dtype, reason = _dtype_2_0_0(fmt)
    if dtype is None:
        return None, reason
    entry: dict[str, Any] = {"name": record.name, "output_dtype": dtype}
    grouped, plain = _factors(record, fmt, "2.0.0")
    if grouped is not None:
        entry["per_block_int_scale"] = grouped.block.tolist()
        entry["per_channel_float_scale"] = grouped.channel.tolist()
    else:
        shape = () if isinstance(granularity, PerTensor) else encoding.scale.shape
        entry["y_scale"] = encoding.scale.reshape(shape).tolist()
        if encoding.zero_point.any():
            entry["y_zero_point"] = encoding.zero_point.reshape(shape).tolist()
    if not isinstance(granularity, PerTensor):
        entry["axis"] = granularity.axis
    if isinstance(granularity, PerBlock):
        entry["block_size"] = granularity.size
    return entry, _both(reason, plain)


_WRITERS: dict[str, Callable[[NamedEncoding], tuple[Any, str | None]]] = {
    "0.6.1": _write_0_6_1,
    "1.0.0": _write_1_0_0,
    "2.0.0": _write_2_0_0,
}


def record_2_0_0(encoding: Encoding, grouped: GroupedScale | None = None) -> dict[str, Any]:
    """One encoding in version 2.0.0 without a name; empty for formats that this version treats as float.

    Raises:
        EncodingsError: its axes are open.
    """
    entry = _write_2_0_0(NamedEncoding("encoding", "unknown", encoding, grouped))[0] or {}
    return {key: value for key, value in entry.items() if key != "name"}


def _unsigned(encoding: Encoding, fmt: IntFormat) -> tuple[NDArray[np.int64], bool, str | None]:
    """``offset`` and ``is_sym`` of 0.6.1 and 1.0.0, and the difference from the encoding, if any."""
    offset = fmt.qmin - encoding.zero_point.astype(np.int64)
    symmetric = fmt.signed and not encoding.zero_point.any()
    if symmetric or not fmt.signed:
        return offset, symmetric, None
    # A true is_sym would make AIMET calibrate and train the grid as symmetric.
    spare = " and one spare code at the top" if fmt.narrow else ""
    reason = f"an asymmetric {fmt.name} grid is written as uint{fmt.bits}: same scale, same values, "
    return offset, False, f"{reason}codes larger by {-fmt.qmin}{spare}"


def _factors(record: NamedEncoding, fmt: Format, version: str) -> tuple[GroupedScale | None, str | None]:
    """The two factors to write, or the reason why the effective block scales are written instead."""
    grouped = record.grouped
    if grouped is None:
        return None, None
    if not isinstance(fmt, IntFormat) or not fmt.signed or fmt.narrow or record.encoding.zero_point.any():
        return None, "two-factor scales need a full symmetric integer grid; written as plain block scales"
    if version == "2.0.0" and grouped.decompressed_bits != 2 * fmt.bits:
        widths = f"from {fmt.bits} to {grouped.decompressed_bits} bits"
        return None, f"version 2.0.0 has no two-factor scales {widths}; written as plain block scales"
    return grouped, None


def _both(*reasons: str | None) -> str | None:
    return "; ".join(reason for reason in reasons if reason) or None


def _dtype_2_0_0(fmt: Format) -> tuple[str | None, str | None]:
    if isinstance(fmt, FloatFormat):
        name = _FLOAT_DTYPES.get(fmt)
        return name, None if name else f"version 2.0.0 does not count {fmt.name} as quantized; left out"
    name = f"{'' if fmt.signed else 'u'}int{fmt.bits}"
    odd = narrow = None
    if name not in INTS_2_0_0:
        odd = f"{name} is not a dtype of version 2.0.0; written by this name, compilers may refuse it"
    if fmt.narrow:
        narrow = f"version 2.0.0 has no narrow grids; written as {name}, code {fmt.qmin - 1} can now occur"
    return name, _both(odd, narrow)


def _flat(values: NDArray[Any], turned: bool) -> list[Any]:
    flat: list[Any] = (values.T if turned else values).ravel().tolist()
    return flat


def _document(
    version: str, entries: dict[Kind, dict[str, Any]], args: dict[str, Any], excluded: list[str]
) -> tuple[dict[str, Any], list[NotExpressed]]:
    """The file's content in its order of keys, and global settings that it cannot express."""
    producer = {"package": "bitwright", "version": __version__}
    settings = {"excluded_layers": excluded, "quantizer_args": args}
    try:
        json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EncodingsError(
            "quantizer_args", f"cannot be written as JSON ({error})", "use text, numbers, lists and dicts"
        ) from error
    if version == "2.0.0":
        lost = [
            NotExpressed(key, f"version 2.0.0 has no {key}; left out", written=False)
            for key, value in settings.items()
            if value
        ]
        return {"version": version, "encodings": list(entries["unknown"].values()), "producer": producer}, lost
    sections = {key: entries[kind] for key, kind in SECTIONS.items()}
    if version == "1.0.0":
        return {
            "version": version,
            **{key: list(section.values()) for key, section in sections.items()},
            **settings,
            "producer": producer,
        }, []
    return {"version": version, **sections, **settings, "producer": producer}, []


def json_lines(document: dict[str, Any], by_entry: Collection[str], *, allow_nan: bool = False) -> Iterator[str]:
    """The text of ``document``, one line per entry of ``by_entry``: readable, and `json` can use its fast encoder."""
    opening = "{\n "
    for key, value in document.items():
        yield f"{opening}{json.dumps(key)}: "
        opening = ",\n "
        if key not in by_entry or not value:
            yield json.dumps(value, allow_nan=allow_nan)
            continue
        ends = "[]" if isinstance(value, list) else "{}"
        names = [""] * len(value) if isinstance(value, list) else [f"{json.dumps(name)}: " for name in value]
        items = value if isinstance(value, list) else value.values()
        for i, (name, item) in enumerate(zip(names, items, strict=True)):
            yield f"{',' if i else ends[0]}\n  {name}{json.dumps(item, allow_nan=allow_nan)}"
        yield f"\n {ends[1]}"
    yield "\n}\n"


__all__ = [
    "VERSIONS",
    "EncodingsFile",
    "GroupedScale",
    "Kind",
    "NamedEncoding",
    "NotExpressed",
    "Version",
    "WrittenEncodings",
    "compare_names",
    "names_error",
    "read_encodings",
    "write_encodings",
]


def compare_names(expected: Iterable[str], found: Iterable[str]) -> tuple[list[str], list[str]]:
    """``(missing, extra)``: expected names that were not found, and found ones that were not expected.

    Example:
        >>> compare_names(["conv1.weight", "fc.weight"], ["conv1.weight", "head.weight"])
        (['fc.weight'], ['head.weight'])
    """
    wanted, there = dict.fromkeys(expected), dict.fromkeys(found)
    return [name for name in wanted if name not in there], [name for name in there if name not in wanted]


def names_error(site: str, expected: Iterable[str], found: Iterable[str]) -> EncodingsError | None:
    """The error for a file whose names differ from the model's; ``None`` where they match.

    Args:
        site: the file, or whatever the names come from.
        expected: names of the model.
        found: names of the file.

    Returns:
        An error to raise or to log; shows the first few names of both kinds, with close matches.
    """
    missing, extra = compare_names(expected, found)
    if not missing and not extra:
        return None
    parts = []
    if missing:
        parts.append(f"{len(missing)} names of the model are missing: {_some(missing, extra)}")
    if extra:
        parts.append(f"{len(extra)} of its names are not in the model: {_some(extra, ())}")
    return EncodingsError(
        site, "; ".join(parts), "use the encodings file that was exported with this model, or rename the entries"
    )


def _some(names: list[str], others: Iterable[str], shown: int = 3) -> str:
    """The first few ``names``, with close matches among a limited number of ``others``."""
    near = list(islice(others, 500))
    text = ", ".join(f"{name!r}{close_matches(name, near)}" for name in names[:shown])
    return f"{text} and {len(names) - shown} more" if len(names) > shown else text


def carried_records(
    model: ir.Model, records: Iterable[NamedEncoding], known: Collection[str] = ()
) -> dict[str, NamedEncoding]:
    """Tensor of ``model`` without a record -> the record of the activation whose elements it carries.

    Max pools, reshapes, transposes, slices and their kin carry elements of their input; Concat and Where those of several,
    which must lie on one grid. Only encodings with a single scale hold wherever an element is moved to.

    Args:
        model: the float model.
        records: its encodings by name of tensor.
        known: tensors that have a quantizer of their own, on or off; they get no record here.
    """
    grids = {r.name: r for r in records if r.kind == "activation" and r.encoding.scale.ndim == 0}
    found: dict[str, NamedEncoding] = {}
    for node in model.graph:
        source = _source(node, grids)
        for value in node.outputs if source is not None else ():
            name = str(value.name)
            if source is not None and name not in grids and name not in known and _is_float(value):
                grids[name] = found[name] = replace(source, name=name)
    return found


def _source(node: ir.Node, grids: dict[str, NamedEncoding]) -> NamedEncoding | None:
    """The record of the input whose elements ``node`` passes on; ``None`` where it computes or there is none."""
    row = op_row(node.op_type)
    if node.domain or row.kind not in ("movement", "merge") or (node.op_type == "Pad" and not _pads_zeros(node)):
        return None
    ports = range(len(node.inputs)) if row.activations is None else row.activations
    values = [node.inputs[port] for port in ports if port < len(node.inputs)]
    carried = [value for value in values if value is not None and _is_float(value)]
    sources = [grids.get(str(value.name)) for value in carried]
    first = sources[0] if sources else None
    if first is None or any(s is None or s.encoding != first.encoding for s in sources):
        return None
    return first


def _pads_zeros(node: ir.Node) -> bool:
    """Whether a Pad adds only zeros, which lie on every grid, or elements of its input."""
    mode = node.attributes.get("mode")
    if mode is not None and mode.as_string() != "constant":
        return True
    added = node.inputs[2] if len(node.inputs) > 2 else None
    if added is None:
        return True
    constant = ir.convenience.get_const_tensor(added)
    return constant is not None and not np.any(constant.numpy())


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()
