"""Sessions that watch tensors: in the order in which they die soonest, and in the layout in which they are made.

ONNX Runtime optimises a graph and then runs what reduces a tensor last of all, when the tensor has left the caches and
everything else is still held. On a CPU with vector units it also computes convolutions in a layout of its own (channels
in blocks of 8 or 16) and copies whatever leaves that layout. Minima, maxima and histograms need neither: the runtime is
asked for the model it has optimised, the reductions are moved right after what they reduce, those copies are taken
out that nobody but them reads, and the result is opened to run in just this order.

On MobileNetV2, where half of the cost of watching every tensor was such copies, a batch with bounds of all 65 tensors
takes 1.27 of a batch without, before 1.70; and only what the model itself keeps alive is held.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from bitwright.export.files.value_types import load
from bitwright.onnx.model.session import (
    Providers,
    check_providers,
    open_file,
    open_session,
    save_optimized,
)

_BLOCKED = "com.microsoft.nchwc"  # operators on channels in blocks
_POOL = "GlobalMaxPool"  # which the runtime takes in its own layout
_REDUCTIONS = frozenset(("ReduceMin", "ReduceMax", "ReduceSum", "Size", _POOL))
# what leaves the number of channels of all its inputs as it is
_CHANNELWISE = frozenset(
    ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample", "Add", "Sum", "Mul")
    + ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid", "Clip")
)


@dataclass(frozen=True, eq=False)
class Watching:
    """A session, and under which name it gives each output that goes by another one there.

    ``optimized``, and the folder of its weights, are what :func:`narrow` opens another one from; ``None`` where nothing was
    kept.
    """

    session: Any
    names: Mapping[str, str]
    optimized: ir.Model | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None

    def name(self, output: str) -> str:
        """What to fetch in order to get ``output``."""
        return self.names.get(output, output)


def open_watching(
    model: ir.Model,
    providers: Providers | None = None,
    *,
    threads: int = 0,
    scalars: Collection[str] = (),
    channels: Collection[str] = (),
    unordered: Collection[str] = (),
    arena: bool = True,
    keep: bool = False,
) -> Watching:
    """A session that frees each tensor once its readers are through, reductions to single numbers among them.

    Args:
        model: all that is watched is among its graph outputs.
        providers, threads: of the session.
        scalars: outputs that reduce one tensor to one number, whatever the order of its elements.
        channels: values that reduce one tensor to numbers per channel.
        unordered: outputs of which the elements are wanted in any order. A convolution's result may come with channels
            in blocks then; nothing is added to it and nothing is missing.
        arena: keep the memory of one run for the next.
        keep: the optimised model, where there is one, for :func:`narrow`.

    Raises:
        ConfigError: a provider is not available.
        ModelError: the runtime refuses the model.
    """
    plain = check_providers(providers) == check_providers(None)
    if not (plain and any(node.op_type == "Conv" for node in model.graph)):
        return Watching(open_session(model, providers, threads=threads, order="frugal", arena=arena), {})
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder)
        path = Path(folder.name, "optimized.onnx")
        save_optimized(model, path)
        optimized = load(path)
        names = watch_blocked(optimized.graph, frozenset(scalars), frozenset(unordered))
        reduce_early(optimized.graph, frozenset((*scalars, *channels)))
        ir.save(optimized, path)
        watching = Watching(open_file(path, threads=threads, arena=arena), names)
        if not keep:
            return watching
        stack.pop_all()  # the folder goes with what is kept
        return replace(watching, optimized=optimized, folder=folder)


def narrow(
    watching: Watching,
    outputs: Collection[str],
    *,
    scalars: Collection[str] = (),
    unordered: Collection[str] = (),
    threads: int = 0,
    arena: bool = True,
) -> Watching:
    """A session that gives some of the outputs of an earlier one, for a third of what that one took to open.

    Args:
        watching: from :func:`open_watching` with ``keep``; it gives up what it kept.
        outputs: those to keep, under the names they had in the model.
        scalars, unordered, threads, arena: as for :func:`open_watching`; ``unordered`` may name more than before.
    """
    assert watching.optimized is not None and watching.folder is not None
    graph, kept = watching.optimized.graph, {watching.name(name) for name in outputs}
    graph.outputs[:] = [value for value in graph.outputs if value.name in kept]
    _remove_unread(graph)
    names = {**watching.names, **watch_blocked(graph, frozenset(scalars), frozenset(unordered))}
    with watching.folder as folder:
        path = Path(folder, "narrowed.onnx")
        ir.save(watching.optimized, path)
        return Watching(open_file(path, threads=threads, arena=arena), names)


def _remove_unread(graph: ir.Graph) -> None:
    outputs = set(graph.outputs)
    for node in reversed(graph):
        if not any(value.uses() or value in outputs for value in node.outputs):
            graph.remove(node, safe=True)


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
    """Move what makes ``scalars`` right after what it reads; the runtime has put it where its layout ends.

    Args:
        graph: in an order in which it can run; stays so.
        scalars: values that reduce one tensor to one number, or to one per channel.
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
    if not node.inputs or node.inputs[0] is None or any(_computed(value) for value in node.inputs[1:]):
        return False
    if node.domain == _BLOCKED:
        readers = [reader for reader, _ in node.outputs[0].uses()]
        if node.op_type == "ReorderOutput":
            return any(_reduces(reader, scalars) for reader in readers)
        return node.op_type == _POOL and any(str(reader.outputs[0].name) in scalars for reader in readers)
    return _reduces(node, scalars)


def _computed(value: ir.Value | None) -> bool:
    return value is not None and value.producer() is not None


def _reduces(node: ir.Node, scalars: Collection[str]) -> bool:
    return node.op_type in _REDUCTIONS and str(node.outputs[0].name) in scalars
