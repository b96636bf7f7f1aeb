"""Convert a QDQ model of an export, or a float model, to the bytes of a LiteRT file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from bitwright.errors import ExportError
from bitwright.export.edges import Edges, as_file_inputs, told
from bitwright.export.litert import arithmetic, images, movement, products
from bitwright.export.litert.flat import Grid
from bitwright.export.litert.lowering import SHIFTS, FreeBatchError, Lowering, trace_model
from bitwright.export.qdq.forms import read_metadata
from bitwright.export.qdq.lookups import with_tables
from bitwright.runtimes.onnxruntime import IO_KEY

Array = NDArray[Any]
METADATA = "bitwright"  # name of the file's metadata that says which tensor is which site

LOWERINGS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **arithmetic.LOWERINGS,
    **images.LOWERINGS,
    **movement.LOWERINGS,
    **products.LOWERINGS,
}


@dataclass(frozen=True)
class Converted:
    """A LiteRT file in memory.

    Attributes:
        content: its bytes.
        notes: what runs in float between codes and why, and where the file is narrower than the model.
    """

    content: bytes
    notes: tuple[str, ...]


def to_tflite(
    model: ir.Model,
    feeds: Mapping[str, Array],
    *,
    origin: Mapping[str, str] | None = None,
    fixed: bool = False,
    edges: Edges = Edges(),  # noqa: B008
) -> Converted:
    """Write ``model`` as a LiteRT file.

    Inputs, outputs and their names, types and order of axes are those of ``model``, codes signed or not as ``edges`` has them.

    Args:
        model: as ``to_qdq`` wrote it, or a float model; opset 13 or later. Left as it is.
        feeds: one example by name of graph input; shapes of the file are those that it has with it, up to a free batch.
        origin: what the file tells about where it comes from.
        fixed: keep the batch of ``feeds``.
        edges: what inputs and outputs of ``model`` that are codes were asked to be.

    Returns:
        The file and what there is to say about it. Time and memory are linear in the model, and one run of it on the example.

    Raises:
        ConfigError: ``ai-edge-litert``, whose schema is used, is not installed.
        ExportError: an operator has no form in LiteRT; its site is named. Codes of an input or output have none.
    """
    model = with_tables(model)
    RemoveUnusedNodesPass()(model)
    ends = _Ends.of(model, edges)
    feeds = as_file_inputs(ends.facts["inputs"], feeds)
    try:
        return _written(model, feeds, origin or {}, fixed, ends, ())
    except FreeBatchError as error:
        note = f"{error.site}: {error.problem}; the LiteRT file has the batch of the example"
        return _written(model, feeds, origin or {}, True, ends, (note,))


@dataclass(frozen=True)
class _Ends:
    """Inputs and outputs of integers.

    Attributes:
        facts: of the ONNX model; see :mod:`bitwright.export.edges`.
        edges: what was asked for.
    """

    facts: Mapping[str, Mapping[str, Any]]
    edges: Edges

    @staticmethod
    def of(model: ir.Model, edges: Edges) -> _Ends:
        facts = json.loads(model.metadata_props.get(IO_KEY, "{}"))
        return _Ends({"inputs": {}, "outputs": {}, **facts}, edges)


def _written(
    model: ir.Model,
    feeds: Mapping[str, Array],
    origin: Mapping[str, str],
    fixed: bool,
    ends: _Ends,
    notes: tuple[str, ...],
) -> Converted:
    low = Lowering(model, trace_model(model, feeds, fixed=fixed))
    facts: dict[str, dict[str, Any]] = {"inputs": {}, "outputs": {}}
    inputs = _write_inputs(low, ends, facts["inputs"])
    for node in model.graph:
        _lower(low, node)
    outputs = _write_outputs(low, ends, facts["outputs"])
    metadata = {METADATA: json.dumps({"version": 1, "sites": low.sites, "origin": dict(origin)})}
    if any(facts.values()):
        metadata[IO_KEY] = json.dumps(facts, sort_keys=True)
    for side, several in facts.items():
        others = {name: fact for name, fact in several.items() if fact != ends.facts[side][name]}
        notes = (*notes, *(f"{name}: in the LiteRT file {told(fact)}" for name, fact in others.items()))
    return Converted(low.flat.finish(inputs, outputs, metadata), (*notes, *low.notes))


def _write_inputs(low: Lowering, ends: _Ends, facts: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The tensors of the graph inputs; fills ``facts`` with those of integers."""
    found = {}
    for value in (value for value in low.model.graph.inputs if not value.is_initializer()):
        name = str(value.name)
        low.held[name], fact = low.fresh(name), ends.facts["inputs"].get(name, {})
        of_codes = fact.get("codes", bool(fact) and "mean" not in fact)  # else floats, or pixels that are none
        made = _input_codes(low, value, ends.edges) if of_codes else low.made(name, low.held[name].identity)
        if fact:
            facts[name] = dict(fact) if "mean" in fact else _fact(low, made)
        found[name] = made
        low.ends.add(made)
    return found


def _input_codes(low: Lowering, value: ir.Value, edges: Edges) -> int:
    """An input of codes, or of pixels that are codes, and their form that kernels read."""
    name, kind = str(value.name), edges.of_input(str(value.name))
    held, grid = low.held[name], _grid_after(low, value)
    _check_grid(grid, kind, name)
    tensor = low.flat.tensor(name, held.shape, kind, _with_sign(grid, kind), free=held.free)
    if kind == grid.dtype:
        held.grid, held.codes[held.identity] = grid, tensor
    else:
        low.flat.op("QUANTIZE", [tensor], [low.made(name, held.identity, grid)], {"table": "QuantizeOptions"})
    return tensor


def _grid_after(low: Lowering, value: ir.Value) -> Grid:
    """The grid that codes at an input are read on, perhaps in another order of axes."""
    while True:
        reader = next(iter(value.uses())).node
        if reader.op_type != "Transpose":
            grid = low.grid_of(reader)
            assert grid is not None, value.name  # what gave the input its type made sure
            return grid
        value = reader.outputs[0]


def _with_sign(grid: Grid, kind: str) -> Grid:
    """``grid``, with codes of 8 bits counted as ``kind`` has them."""
    return grid if kind == grid.dtype else Grid(kind, grid.scale, tuple(n + 128 for n in grid.zero_point))


def _check_grid(grid: Grid, kind: str, name: str) -> None:
    """Refuse codes at an input or output that LiteRT has no form of.

    Raises:
        ExportError: 16 bits unsigned, or with a zero point.
    """
    if kind == "uint16":
        problem = "kernels of LiteRT take no codes of uint16"
        raise ExportError(name, problem, f"use io={{'{name}': 'int16'}}")
    if grid.dtype == "int16" and not grid.symmetric:
        raise ExportError(name, *_ZERO_POINT)


def _fact(low: Lowering, tensor: int) -> dict[str, Any]:
    """What is told of an input or output of codes."""
    found = low.flat.tensors[tensor]
    names = {value: key for key, value in vars(low.flat.schema.TensorType).items() if not key.startswith("_")}
    grid = found.quantization
    return {"type": names[found.type].lower(), "scale": float(grid.scale[0]), "zero_point": int(grid.zeroPoint[0])}


def _lower(low: Lowering, node: ir.Node) -> None:
    if node in low.done:
        return
    if not node.domain and node.op_type == "QuantizeLinear" and low.grid_of(node) is not None:
        if str(node.outputs[0].name) in low.outputs:  # else with the DequantizeLinear that reads it
            low.held[str(node.outputs[0].name)] = low.fresh(str(node.outputs[0].name))
            _quantize(low, node, str(node.outputs[0].name))
        return
    if not node.domain and node.op_type == "DequantizeLinear" and _dequantize(low, node):
        return
    known = (low.trace.constants, low.trace.linear)
    if all(any(str(value.name) in one for one in known) for value in node.outputs if value.name):
        return
    lowering = LOWERINGS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if lowering is None:
        low.refuse(
            node,
            "it has no form in LiteRT files here",
            "replace it in the model by operators of docs/litert.md, cut it off before or after it, or export format='onnx'",
        )
    lowering(low, node)


def _dequantize(low: Lowering, node: ir.Node) -> bool:
    """Put the output of a DequantizeLinear on its grid: a constant, or codes quantized before."""
    grid, codes, result = low.grid_of(node), node.inputs[0], str(node.outputs[0].name)
    if grid is None or codes is None:
        return False
    array = low.trace.constants.get(str(codes.name))
    held = low.held[result] = low.fresh(result)
    if array is not None:
        assert codes.dtype is not None
        held.array, held.grid = (array.astype(np.int64) - SHIFTS[codes.dtype]).astype(grid.dtype), grid
        return True
    maker, source = codes.producer(), low.held.get(str(codes.name))
    if source is not None and source.grid == grid and source.codes:  # at an input, or an output too
        held.grid, held.codes = grid, source.codes
    elif maker is None or low.grid_of(maker) != grid:
        del low.held[result]
        return False
    else:
        _quantize(low, maker, result)
    facts = read_metadata(node)
    if facts is not None and facts["places"]:
        perm = next(iter(held.codes))
        low.sites.append(
            {"places": facts["places"], "format": facts["format"], "tensor": held.codes[perm], "perm": list(perm)}
        )
    return True


def _quantize(low: Lowering, node: ir.Node, result: str) -> None:
    """Quantize the input of ``node`` as ``result``; without an operator where it already lies on the grid."""
    source, grid, held = low.get(node.inputs[0]), low.grid_of(node), low.held[result]
    assert grid is not None
    if not grid.per_tensor:
        low.refuse(
            node,
            "its activations have several scales, for which LiteRT has no form",
            "quantize them per tensor: Rule(..., granularity=PerTensor())",
        )
    if grid.dtype == "int16" and not grid.symmetric:
        low.refuse(node, *_ZERO_POINT)
    if source.grid == grid and source.codes:
        held.grid, held.codes = grid, source.codes
        return
    perm = (source.orders() or [source.identity])[0]
    if source.codes and source.grid is not None:
        low.requantized(low.codes(source.name, perm), source.grid, grid, low.made(result, perm, grid))
        return
    tensor = low.plain(source.name, perm)
    low.flat.op("QUANTIZE", [tensor], [low.made(result, perm, grid)], {"table": "QuantizeOptions"})


_ZERO_POINT = (
    "its codes of 16 bits have a zero point, for which LiteRT has no form",
    "simulate with symmetric activations, Rule(port='output', symmetry='symmetric'), as quantize(..., target='litert') does "
    "where no configuration is named; or use 8 bits",
)


def _write_outputs(low: Lowering, ends: _Ends, facts: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The tensors of the graph outputs; fills ``facts`` with those of integers."""
    found = {}
    for value in low.model.graph.outputs:
        name = str(value.name)
        if name in ends.facts["outputs"]:
            found[name] = _output_codes(low, value, ends.edges.of_output(name))
            facts[name] = _fact(low, found[name])
        else:
            found[name] = _output(low, value)
    return found


def _output_codes(low: Lowering, value: ir.Value, kind: str) -> int:
    """The tensor of a graph output of codes of the type ``kind``."""
    held = low.get(value)
    grid, tensor = held.grid, low.codes(held.name)
    assert grid is not None, held.name
    _check_grid(grid, kind, held.name)
    if kind != grid.dtype or tensor in low.ends:
        copied = low.flat.tensor(f"{held.name}_output", held.shape, kind, _with_sign(grid, kind), free=held.free)
        low.flat.op("QUANTIZE", [tensor], [copied], {"table": "QuantizeOptions"})
        tensor = copied
    low.ends.add(tensor)
    low.flat.rename(tensor, held.name, low.ends)
    return tensor


def _output(low: Lowering, value: ir.Value) -> int:
    """The tensor of a graph output, with its name and no other use."""
    held = low.get(value)
    tensor = low.plain(held.name)
    if tensor in low.ends or held.constant:
        copied = low.flat.tensor(f"{held.name}_output", held.shape, held.dtype, free=held.free)
        low.reshape(tensor, copied, [-1 if f else n for n, f in zip(held.shape, held.free, strict=True)])
        tensor = copied
    low.ends.add(tensor)
    low.flat.rename(tensor, held.name, low.ends)
    return tensor
