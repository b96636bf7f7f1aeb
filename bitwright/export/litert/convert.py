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

from bitwright.export.litert import arithmetic, images, movement, norms, pools, products
from bitwright.export.litert.lowering import SHIFTS, FreeBatchError, Lowering, trace_model
from bitwright.export.qdq.forms import read_metadata
from bitwright.export.qdq.lookups import with_tables

Array = NDArray[Any]
METADATA = "bitwright"  # name of the file's metadata that says which tensor is which site

LOWERINGS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **arithmetic.LOWERINGS,
    **images.LOWERINGS,
    **movement.LOWERINGS,
    **norms.LOWERINGS,
    **pools.LOWERINGS,
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
    model: ir.Model, feeds: Mapping[str, Array], *, origin: Mapping[str, str] | None = None, fixed: bool = False
) -> Converted:
    """Write ``model`` as a LiteRT file.

    Inputs, outputs and their names, types and order of axes are those of ``model``.

    Args:
        model: as ``to_qdq`` wrote it, or a float model; opset 13 or later. Left as it is.
        feeds: one example by name of graph input; shapes of the file are those that it has with it, up to a free batch.
        origin: what the file tells about where it comes from.
        fixed: keep the batch of ``feeds``.

    Returns:
        The file and what there is to say about it. Time and memory are linear in the model, and one run of it on the example.

    Raises:
        ConfigError: ``ai-edge-litert``, whose schema is used, is not installed.
        ExportError: an operator has no form in LiteRT; its site is named.
    """
    model = with_tables(model)
    RemoveUnusedNodesPass()(model)
    try:
        return _written(model, feeds, origin or {}, fixed, ())
    except FreeBatchError as error:
        note = f"{error.site}: {error.problem}; the LiteRT file has the batch of the example"
        return _written(model, feeds, origin or {}, True, (note,))


def _written(
    model: ir.Model, feeds: Mapping[str, Array], origin: Mapping[str, str], fixed: bool, notes: tuple[str, ...]
) -> Converted:
    low = Lowering(model, trace_model(model, feeds, fixed=fixed))
    inputs = _write_inputs(low)
    for node in model.graph:
        _lower(low, node)
    outputs = {str(value.name): _output(low, value) for value in model.graph.outputs}
    sites = json.dumps({"version": 1, "sites": low.sites, "origin": dict(origin)})
    return Converted(low.flat.finish(inputs, outputs, {METADATA: sites}), (*notes, *low.notes))


def _write_inputs(low: Lowering) -> dict[str, int]:
    found = {}
    for value in low.model.graph.inputs:
        if value.is_initializer():
            continue
        held = low.held[str(value.name)] = low.fresh(str(value.name))
        found[held.name] = low.made(held.name, held.identity)
        low.ends.add(found[held.name])
    return found


def _lower(low: Lowering, node: ir.Node) -> None:
    if node in low.done:
        return
    if not node.domain and node.op_type == "QuantizeLinear" and low.grid_of(node) is not None:
        return  # with the DequantizeLinear that reads it
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
    maker = codes.producer()
    if maker is None or low.grid_of(maker) != grid:
        del low.held[result]
        return False
    if not grid.per_tensor:
        low.refuse(
            maker,
            "its activations have several scales, for which LiteRT has no form",
            "quantize them per tensor: Rule(..., granularity=PerTensor())",
        )
    if grid.dtype == "int16" and not grid.symmetric:
        low.refuse(
            maker,
            "its codes of 16 bits have a zero point, for which LiteRT has no form",
            "simulate with symmetric activations, Rule(port='output', symmetry='symmetric'), as quantize(..., target='litert') "
            "does where no configuration is named; or use 8 bits",
        )
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
    if source.grid == grid and source.codes:
        held.grid, held.codes = grid, source.codes
        return
    perm = (source.orders() or [source.identity])[0]
    if source.codes and source.grid is not None:
        low.requantized(low.codes(source.name, perm), source.grid, grid, low.made(result, perm, grid))
        return
    tensor = low.plain(source.name, perm)
    low.flat.op("QUANTIZE", [tensor], [low.made(result, perm, grid)], {"table": "QuantizeOptions"})


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
