"""What lies in a file or folder that this package writes, as tables: where it comes from, and how its tensors are quantized.

Folders of an export, checkpoints, ONNX files, LiteRT files, encodings files, sites files and manifests are told apart by name.
ONNX and LiteRT files of other tools are read as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.files import read_document
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, phrase
from bitwright.core.numerics.serialize import encoding_from_json, spec_from_json
from bitwright.errors import EncodingsError, ExportError
from bitwright.export.encodings.of_simulation import SavedSites, read_sites
from bitwright.export.encodings.read import read_encodings
from bitwright.export.files.atomic import read_error
from bitwright.export.files.manifest import read_manifest, read_origin
from bitwright.export.files.onnx_file import all_nodes
from bitwright.export.litert.convert import METADATA
from bitwright.export.litert.flat import IDENTIFIER, schema
from bitwright.export.qdq.forms import read_metadata
from bitwright.export.qdq.lookups import restore_lookups
from bitwright.export.samples import find_export

Array = NDArray[Any]
Cells = tuple[str, ...]

_ENCODING = ("format", "granularity", "scale", "zero point", "range")
_SITE = ("site", "role", "state", *_ENCODING)
_TENSOR = ("name", "kind", *_ENCODING)
_STORED = _TENSOR[:-1]  # of files that hold codes: scales, and no range
_CHECKPOINT = "checkpoint.json"
_FLAT = ".tflite"
_MAX_BYTES = 2 << 30


@dataclass(frozen=True)
class Table:
    """A table to print.

    Attributes:
        title: above it.
        head: names of its columns.
        rows: cells as text.
        named: whether the first cell of a row is the name of a site, a tensor or a value.
    """

    title: str
    head: Cells
    rows: tuple[Cells, ...]
    named: bool = True


def contents(path: Path, prefix: str | None = None) -> list[Table]:
    """Tables of what lies at ``path``.

    Args:
        path: a folder of an export, a checkpoint, or a file of either.
        prefix: stem of the files in a folder; needed only where it holds several exports.

    Raises:
        ExportError: there is nothing, or it is of a kind that is not read.
        EncodingsError: an encodings file, a sites file or a checkpoint is damaged.
        ConfigError: a LiteRT file, and the package with its schema is not installed.
    """
    if path.is_dir():
        is_checkpoint = prefix is None and (path / _CHECKPOINT).is_file()
        return _checkpoint(path) if is_checkpoint else _folder(path, prefix)
    if not path.is_file():
        raise ExportError(str(path), "there is no such file or folder", "check the path")
    return next(read for ends, read in _FILES if path.name.endswith(ends))(path)


# ------------------------------------------------------------------------------------------------ folders


def _folder(path: Path, prefix: str | None) -> list[Table]:
    stem = find_export(path, prefix)
    saved = read_sites(path / f"{stem}_sites.json")
    return [*_origin(read_origin(path / f"{stem}.onnx")), *_sites(saved, f"Sites of {stem}")]


def _sites(saved: SavedSites, title: str) -> Iterator[Table]:
    rows = []
    for name, site in saved.sites.items():
        state = "quantized" if site.encoding is not None else "no encoding"
        cells = _cells(site.encoding, site.spec.format.name)
        rows.append((name, site.role, state if site.enabled else "float", *cells))
    yield Table(title, _SITE, tuple(rows))
    if saved.floats:
        yield Table("In float", ("value", "reason"), tuple(saved.floats.items()))


def _checkpoint(folder: Path) -> list[Table]:
    manifest = read_manifest(folder / _CHECKPOINT, check=True)
    path, remedy = folder / "quantizers.json", "save the checkpoint again, or restore the file"
    state = read_document(path, EncodingsError, remedy=remedy, max_bytes=_MAX_BYTES, unreadable=read_error)
    rows = []
    try:
        for name, saved in state["quantizers"].items():
            at = f"{path}: {name!r:.200}"
            spec, encoding = spec_from_json(saved["spec"], at), saved["encoding"]
            found = None if encoding is None else encoding_from_json(encoding, at)
            why = saved.get("why_float")
            kept = "quantized" if found is not None else "no encoding"
            rows.append(
                (name, kept if saved["enabled"] else f"float{f': {why}' if why else ''}",
                 *_cells(found, spec.format.name))
            )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise EncodingsError(str(path), f"it lists no quantizers: {error!r:.100}", remedy) from error
    return [
        *_origin({f"version of {name}": text for name, text in manifest.versions.items()}),
        Table(f"Quantizers of {folder.name}", ("site", "state", *_ENCODING), tuple(rows)),
    ]


# -------------------------------------------------------------------------------------------------- files


def _encodings(path: Path) -> list[Table]:
    file = read_encodings(path)
    rows = tuple((r.name, r.kind, *_cells(r.encoding)) for r in file.records)
    return [Table(f"{path.name}, version {file.version}", _TENSOR, rows)]


def _manifest(path: Path) -> list[Table]:
    found = read_manifest(path)
    facts = {"data": found.data or "", "created": found.created or ""}
    facts |= {key: json.dumps(value) for key, value in (*found.settings.items(), *found.seeds.items())}
    facts |= {f"version of {name}": text for name, text in found.versions.items()}
    files = tuple((entry.name, str(entry.size), entry.sha256) for entry in found.files)
    return [
        *_origin({key: text for key, text in facts.items() if text}),
        Table("Files", ("file", "bytes", "sha256"), files, named=False),
        *([Table("Notes", ("note",), tuple((n,) for n in found.notes), named=False)] if found.notes else []),
    ]


def _refused(path: Path) -> list[Table]:
    problem = f"{path.suffix} files hold values alone, which say nothing of how they are quantized"
    remedy = "name the folder that it lies in, or its .onnx, .tflite or .encodings file"
    raise ExportError(str(path), problem, remedy)


def _onnx(path: Path) -> list[Table]:
    told = read_origin(path)
    model = ir.load(path)
    restore_lookups(model)
    rows = tuple(_dequantized(node) for node in all_nodes(model.graph) if node.op_type == "DequantizeLinear")
    return [*_origin(told), Table(f"Quantized tensors of {path.name}", _STORED, rows)]


def _dequantized(node: ir.Node) -> Cells:
    """A tensor that a DequantizeLinear makes of codes: a constant, or what a QuantizeLinear rounded."""
    facts = read_metadata(node) or {"places": (), "role": None, "format": None}
    name = str(facts["places"][0][0] if facts["places"] else node.outputs[0].name)
    codes = node.inputs[0]
    stored = codes is not None and codes.const_value is not None
    kind = str(facts["role"] or ("constant" if stored else "activation"))
    scale, zero = (_array(node, port) for port in (1, 2))
    form = str(facts.get("format") or _type_of(codes, zero))
    if scale is None:
        return name, kind, form, "", "computed", ""
    block, axis = (node.attributes.get_int(key, default) for key, default in (("block_size", 0), ("axis", 1)))
    shared = phrase(_granularity(scale.size, axis, block if scale.ndim > 1 else 0))
    zeros = np.zeros(1) if zero is None else zero.astype(np.float64)
    return name, kind, form, shared, _span(scale), _span(zeros)


def _type_of(codes: ir.Value | None, zero_point: Array | None) -> str:
    if codes is not None and codes.dtype is not None:
        return codes.dtype.name.lower()
    return "codes" if zero_point is None else zero_point.dtype.name


def _array(node: ir.Node, port: int) -> Array | None:
    value = node.inputs[port] if len(node.inputs) > port else None
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _flat(path: Path) -> list[Table]:
    known, content, remedy = schema(), path.read_bytes(), "export again, or copy the file anew"
    try:
        if content[4:8] != IDENTIFIER:
            raise ValueError("its identifier is another")
        model = known.ModelT.InitFromObj(known.Model.GetRootAsModel(content, 0))
        noted = {entry.name.decode(): model.buffers[entry.buffer].data for entry in model.metadata or []}
        facts = json.loads(bytes(noted[METADATA])) if METADATA in noted else {}
        told = {str(key): str(text) for key, text in facts.get("origin", {}).items()}
        sites = {int(site["tensor"]): str(site["places"][0][0]) for site in facts.get("sites", [])}
        types = {v: k.lower() for k, v in vars(known.TensorType).items() if not k.startswith("_")}
        rows = tuple(
            _tensor(tensor, sites.get(index), types, model.buffers)
            for index, tensor in enumerate(model.subgraphs[0].tensors)
            if tensor.quantization is not None and tensor.quantization.scale is not None
        )
    except Exception as error:  # flatbuffers raises struct.error and classes of its own
        problem = f"it cannot be read as a LiteRT file: {str(error) or type(error).__name__:.200}"
        raise ExportError(str(path), problem, remedy) from error
    return [*_origin(told), Table(f"Quantized tensors of {path.name}", _STORED, rows)]


def _tensor(tensor: Any, site: str | None, types: Mapping[int, str], buffers: Any) -> Cells:
    grid, data = tensor.quantization, buffers[tensor.buffer].data
    scale = np.asarray(grid.scale, np.float32)
    zero = np.zeros(1) if grid.zeroPoint is None else np.asarray(grid.zeroPoint, np.float64)
    kind = "activation" if data is None or not len(data) else "constant"
    shared = phrase(_granularity(scale.size, int(grid.quantizedDimension or 0), 0))
    return site or tensor.name.decode(), kind, types[tensor.type], shared, _span(scale), _span(zero)


_FILES: tuple[tuple[str, Callable[[Path], list[Table]]], ...] = (
    (".onnx", _onnx),
    (_FLAT, _flat),
    ("_sites.json", lambda path: list(_sites(read_sites(path), path.name))),
    ("_manifest.json", _manifest),
    (_CHECKPOINT, lambda path: _checkpoint(path.parent)),
    (".npz", _refused),
    (".safetensors", _refused),
    ("", _encodings),
)


# -------------------------------------------------------------------------------------------------- cells


def _origin(facts: Mapping[str, str]) -> Iterator[Table]:
    if facts:
        yield Table("Provenance", ("", "recorded in the file"), tuple(facts.items()), named=False)


def _cells(encoding: Encoding | None, form: str = "") -> Cells:
    """An encoding under the columns of ``_ENCODING``; without one the format that is asked for."""
    if encoding is None:
        return form, "", "", "", ""
    return (
        encoding.format.name,
        phrase(encoding.granularity),
        _span(encoding.scale),
        _span(encoding.zero_point),
        f"{encoding.min.min():.5g} to {encoding.max.max():.5g}",
    )


def _granularity(scales: int, axis: int, block: int) -> Granularity:
    if scales == 1:
        return PerTensor()
    return PerBlock(block, axis) if block else PerChannel(axis)


def _span(values: Array) -> str:
    if not values.size:
        return ""
    lowest, highest = float(values.min()), float(values.max())
    return f"{lowest:.5g}" if lowest == highest else f"{lowest:.5g} to {highest:.5g}"
