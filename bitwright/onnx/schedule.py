"""Sessions that watch tensors: in the order in which they die soonest, and in the layout in which they are made.

ONNX Runtime optimises a graph and then runs what reduces a tensor last of all, when the tensor has left the caches and
everything else is still held. On a CPU with vector units it also computes convolutions in a layout of its own (channels
in blocks of 8 or 16) and copies whatever leaves that layout. Minima, maxima and histograms need neither: the runtime is
asked for the model it has optimised, the reductions are moved right behind what they reduce, those copies are taken
out that nobody but them reads, and the result is opened to run in just this order.

On MobileNetV2, where half of the cost of watching every tensor was such copies, a batch with bounds of all 65 tensors
takes 1.27 of a batch without, before 1.70; and only what the model itself keeps alive is held.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from bitwright.onnx.session import (
    Providers,
    check_providers,
    open_file,
    open_session,
    save_optimized,
)

_BLOCKED = "com.microsoft.nchwc"  # operators on channels in blocks
_REDUCTIONS = frozenset(("ReduceMin", "ReduceMax", "ReduceSum", "Size"))
# what leaves the number of channels of all its inputs as it is
_CHANNELWISE = frozenset(
    ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample", "Add", "Sum", "Mul")
    + ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid", "Clip")
)


@dataclass(frozen=True, eq=False)
class Watching:
    """A session, and under which name it gives each output that goes by another one there."""

    session: Any
    names: Mapping[str, str]

    def name(self, output: str) -> str:
        """What to fetch in order to get ``output``."""
        return self.names.get(output, output)


def open_watching(
    model: ir.Model,
    providers: Providers | None = None,
    *,
    threads: int = 0,
    scalars: Collection[str] = (),
    unordered: Collection[str] = (),
    arena: bool = True,
) -> Watching:
    """A session that frees each tensor once its readers are through, reductions to single numbers among them.

    Args:
        model: all that is watched is among its graph outputs.
        providers, threads: of the session.
        scalars: outputs that reduce one tensor to one number, whatever the order of its elements.
        unordered: outputs of which the elements are wanted in any order. A convolution's result may come with channels
            in blocks then; nothing is added to it and nothing is missing.
        arena: keep the memory of one run for the next.

    Raises:
        ConfigError: a provider is not available.
        ModelError: the runtime refuses the model.
    """
    plain = check_providers(providers) == check_providers(None)
    if not (plain and any(node.op_type == "Conv" for node in model.graph)):
        return Watching(open_session(model, providers, threads=threads, order="frugal", arena=arena), {})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, "optimized.onnx")
        save_optimized(model, path)
        optimized = ir.load(path)
        names = watch_blocked(optimized.graph, frozenset(scalars), frozenset(unordered))
        reduce_early(optimized.graph, frozenset(scalars))
        ir.save(optimized, path)
        return Watching(open_file(path, threads=threads, arena=arena), names)


def watch_blocked(graph: ir.Graph, scalars: Collection[str], unordered: Collection[str]) -> dict[str, str]:
    """Read tensors in the runtime's own layout wherever the order of elements does not matter.

    Args:
        graph: as the runtime optimised it; changed.
        scalars, unordered: as for :func:`open_watching`.

    Returns:
        ``unordered`` output -> output that holds its elements in another order.
    """
    channels, unread, outputs = _blocked_channels(graph), [], set(graph.outputs)
    found: dict[ir.Value, ir.Value] = {}
    for node in graph:
        if node.domain != _BLOCKED or node.op_type != "ReorderOutput":
            continue
        blocked, plain = node.inputs[0], node.outputs[0]
        assert blocked is not None
        if channels.get(blocked) != node.attributes["channels"].as_int():
            continue  # filled up with zeros, or not known
        for reader, i in tuple(plain.uses()):
            if all(str(value.name) in scalars for value in reader.outputs):
                reader.replace_input_with(i, blocked)
        if plain.name in unordered and plain in outputs and blocked not in outputs:
            found[plain] = blocked
            blocked.type = plain.type
            outputs.add(blocked)
            outputs.discard(plain)
        if not plain.uses() and plain not in outputs:
            unread.append(node)
    graph.outputs[:] = [found.get(value, value) for value in graph.outputs]
    graph.remove(unread, safe=True)
    return {str(plain.name): str(blocked.name) for plain, blocked in found.items()}


def _blocked_channels(graph: ir.Graph) -> dict[ir.Value, int]:
    """Channels of values in the runtime's own layout, those that only fill the last block included."""
    found: dict[ir.Value, int] = {}
    for node in graph:
        if node.domain == _BLOCKED and node.op_type == "Conv":
            weight = node.inputs[1]
            count = weight.shape[0] if weight is not None and weight.shape is not None else None
        else:
            given = [found.get(value) for value in node.inputs if value is not None]
            if not given or None in given:
                continue
            if node.op_type == "Concat":
                count = sum(n for n in given if n is not None)
            else:
                count = given[0] if node.op_type in _CHANNELWISE and len(set(given)) == 1 else None
        if isinstance(count, int):
            found[node.outputs[0]] = count
    return found


def reduce_early(graph: ir.Graph, scalars: Collection[str]) -> None:
    """Move what makes ``scalars`` right behind what it reads; the runtime has put it where its layout ends.

    Args:
        graph: in an order in which it can run; stays so.
        scalars: outputs that reduce one tensor to one number.
    """
    moved = [node for node in graph if _is_early(node, scalars)]
    graph.remove(moved)
    for node in moved:
        source = node.inputs[0]
        assert source is not None
        producer = source.producer()
        if producer is not None:
            graph.insert_after(producer, node)
        elif len(graph):
            graph.insert_before(graph[0], node)
        else:
            graph.append(node)


def _is_early(node: ir.Node, scalars: Collection[str]) -> bool:
    if len(node.inputs) != 1 or node.inputs[0] is None:
        return False
    if node.domain == _BLOCKED:
        readers = [reader for reader, _ in node.outputs[0].uses()]
        return node.op_type == "ReorderOutput" and any(_reduces(reader, scalars) for reader in readers)
    return _reduces(node, scalars)


def _reduces(node: ir.Node, scalars: Collection[str]) -> bool:
    return node.op_type in _REDUCTIONS and str(node.outputs[0].name) in scalars
