"""Show the contents of a file or folder of this package as tables: provenance, and how each tensor is quantized.

Folders of an export, checkpoints, ONNX files, LiteRT files, encodings files, sites files and manifests are told apart by name.
ONNX and LiteRT files of other tools are read as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.files import read_document
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, phrase
from bitwright.errors import EncodingsError, ExportError
from bitwright.export.files.atomic import read_error
from bitwright.export.files.manifest import origin_in, read_manifest, read_message, read_origin

if TYPE_CHECKING:  # each reader imports what it needs: a table of a small file is there before the rest would be
    import onnx

    from bitwright.core.numerics.encoding import Encoding
    from bitwright.export.encodings.of_simulation import SavedSites

Array = NDArray[Any]
Cells = tuple[str, ...]

_ENCODING = ("format", "granularity", "scale", "zero point", "range")
_SITE = ("site", "role", "state", *_ENCODING)
_TENSOR = ("name", "kind", *_ENCODING)
_STORED = _TENSOR[:-1]  # of files that hold codes: scales, and no range
_CHECKPOINT = "checkpoint.json"
_FLAT = ".tflite"
_MAX_BYTES = 2 << 30
#: keys of metadata of nodes, as ``qdq.forms`` and ``qdq.lookups`` have them, whose imports take longer than a small file
_NOTED, _KEPT = "bitwright", "bitwright.table"


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
    """Tables of the contents of ``path``.

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
    from bitwright.export.encodings.of_simulation import read_sites
    from bitwright.export.samples import find_export

    stem = find_export(path, prefix)
    saved = read_sites(path / f"{stem}_sites.json")
    return [*_origin(read_origin(path / f"{stem}.onnx")), *_sites(saved, f"Sites of {stem}")]


def _sites_file(path: Path) -> list[Table]:
    from bitwright.export.encodings.of_simulation import read_sites

    return list(_sites(read_sites(path), path.name))


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
    from bitwright.core.numerics.serialize import encoding_from_json, spec_from_json

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
    from bitwright.export.encodings.read import read_encodings

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
    proto = read_message(path)
    told = origin_in(proto)
    if any(prop.key == _KEPT for node in _nodes(proto.graph) for prop in node.metadata_props):
        import onnx_ir as ir

        from bitwright.export.qdq.lookups import restore_lookups

        model = ir.from_proto(proto)
        restore_lookups(model)
        proto = ir.to_proto(model)
    graphs = list(_graphs(proto.graph))
    held = {tensor.name: tensor for graph in graphs for tensor in graph.initializer}
    types = {value.name: value.type.tensor_type.elem_type for graph in graphs for value in graph.value_info}
    types |= {value.name: value.type.tensor_type.elem_type for graph in graphs for value in graph.input}
    types |= {name: tensor.data_type for name, tensor in held.items()}
    found = (node for node in _nodes(proto.graph) if node.op_type == "DequantizeLinear")
    rows = tuple(_dequantized(node, held, types, path.parent) for node in found)
    return [*_origin(told), Table(f"Quantized tensors of {path.name}", _STORED, rows)]


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, one with bodies before the nodes of these."""
    waiting = [iter(graph.node)]
    while waiting:
        for node in waiting[-1]:
            yield node
            if bodies := [body for attribute in node.attribute for body in _bodies(attribute)]:
                waiting.extend(iter(body.node) for body in reversed(bodies))
                break
        else:
            waiting.pop()


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in _nodes(graph):
        for attribute in node.attribute:
            yield from _bodies(attribute)


def _bodies(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def _dequantized(
    node: onnx.NodeProto, held: Mapping[str, onnx.TensorProto], types: Mapping[str, int], folder: Path
) -> Cells:
    """The output of a DequantizeLinear: a constant, or an activation rounded by QuantizeLinear."""
    from onnx import TensorProto, numpy_helper

    inputs = [*node.input, "", ""][:3]
    scale, zero = (numpy_helper.to_array(held[name], str(folder)) if name in held else None for name in inputs[1:])
    place, role, form = _facts(node)
    codes = held.get(inputs[0])
    stored = "bias" if place and codes is not None and codes.data_type == TensorProto.INT32 else "constant"
    name, kind = place or node.output[0], role or ("activation" if codes is None else stored)
    if not form and types.get(inputs[0]):
        form = TensorProto.DataType.Name(types[inputs[0]]).lower()
    form = form or ("codes" if zero is None else zero.dtype.name)
    if scale is None:
        return name, kind, form, "", "computed", ""
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    shared = phrase(_granularity(scale.size, numbers.get("axis", 1), numbers.get("block_size", 0) * (scale.ndim > 1)))
    zeros = np.zeros(1) if zero is None else zero.astype(np.float64)
    return name, kind, form, shared, _span(scale), _span(zeros)


def _facts(node: onnx.NodeProto) -> tuple[str, str, str]:
    """First place, role and format that an export noted on a node; empty where it did not.

    Raises:
        ExportError: what it noted was changed since.
    """
    text = next((prop.value for prop in node.metadata_props if prop.key == _NOTED), None)
    if text is None:
        return "", "", ""
    try:
        facts = json.loads(text)
        pairs = ((place, 0) if isinstance(place, str) else place for place in facts["places"])
        places = [(str(site), int(run)) for site, run in pairs]
        return places[0][0] if places else "", facts.get("role") or "", facts.get("format") or ""
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        from bitwright.export.qdq.forms import damaged_metadata

        raise damaged_metadata(node) from error


def _flat(path: Path) -> list[Table]:
    from bitwright.export.litert.convert import METADATA
    from bitwright.export.litert.flat import IDENTIFIER, schema

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
    ("_sites.json", _sites_file),
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
    """The cells of an encoding for the columns of ``_ENCODING``; without an encoding, the requested format."""
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
