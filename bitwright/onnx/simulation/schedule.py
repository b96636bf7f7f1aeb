"""Sessions that watch tensors: in the order in which they die soonest, and in the layout in which they are made.

ONNX Runtime optimises a graph and then runs what reduces a tensor last of all, when the tensor has left the caches and
everything else is still held. On a CPU with vector units it also computes convolutions in a layout of its own (channels
in blocks of 8 or 16) and copies whatever leaves that layout. Minima, maxima and histograms need neither: the runtime is
asked for the model it has optimised, the reductions are moved right after what they reduce, those copies are taken
out that only they read, and the result is opened to run in just this order.

On MobileNetV2, where half of the cost of watching every tensor was such copies, a batch with bounds of all 65 tensors
takes 1.27 of a batch without, before 1.70; and only what the model itself keeps alive is held.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from bitwright.onnx.model.session import Providers, check_providers, open_file, open_session, save_optimized

_BLOCKED = "com.microsoft.nchwc"  # operators on channels in blocks
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
    optimized: onnx.ModelProto | None = None
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
    small: Collection[str] = (),
    unordered: Collection[str] = (),
    arena: bool = True,
    keep: bool = False,
) -> Watching:
    """A session that frees each tensor once its readers are through, reductions among them.

    What the runtime has optimised is edited as the message that it wrote, which takes a tenth of the time of reading and
    writing it as an ``onnx_ir`` model.

    Args:
        model: all that is watched is among its graph outputs.
        providers, threads: of the session.
        scalars: values that reduce one tensor to one number, whatever the order of its elements.
        small: graph outputs made of tensors of the model, and of no other use: what makes them runs right after
            what it reads.
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
        optimized = onnx.load(str(path), load_external_data=False)
        names = watch_blocked(optimized.graph, frozenset(scalars), frozenset(unordered))
        reduce_early(optimized.graph, frozenset(small))
        path.write_bytes(optimized.SerializeToString())
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
    _replace(graph.output, [value for value in graph.output if value.name in kept])
    needed = _needed(graph, kept)
    _replace(graph.node, [node for i, node in enumerate(graph.node) if i in needed])
    names = {**watching.names, **watch_blocked(graph, frozenset(scalars), frozenset(unordered))}
    with watching.folder as folder:
        path = Path(folder, "narrowed.onnx")
        path.write_bytes(watching.optimized.SerializeToString())
        return Watching(open_file(path, threads=threads, arena=arena), names)


def watch_blocked(graph: onnx.GraphProto, scalars: Collection[str], unordered: Collection[str]) -> dict[str, str]:
    """Read tensors in the runtime's own layout wherever the order of elements does not matter.

    Args:
        graph: as the runtime optimised it; changed.
        scalars, unordered: as for :func:`open_watching`.

    Returns:
        ``unordered`` output -> output that holds its elements in another order.
    """
    channels, readers = _blocked_channels(graph), _readers(graph)
    outputs = {value.name: value for value in graph.output}
    found: dict[str, str] = {}
    kept = []
    for node in graph.node:
        if not _is_copy(node) or channels.get(node.input[0]) != _attribute(node, "channels"):
            kept.append(node)  # no copy; or one of a tensor filled up with zeros, or of unknown channels
            continue
        blocked, plain = node.input[0], node.output[0]
        still = [read for read in readers[plain] if not _redirect(*read, blocked, scalars)]
        if plain in unordered and plain in outputs and blocked not in outputs:
            outputs[blocked] = outputs.pop(plain)
            outputs[blocked].name = found[plain] = blocked
        if still or plain in outputs:
            kept.append(node)
    _replace(graph.node, kept)
    return found


def _is_copy(node: onnx.NodeProto) -> bool:
    return bool(node.domain == _BLOCKED and node.op_type == "ReorderOutput")


def _redirect(reader: onnx.NodeProto, port: int, blocked: str, scalars: Collection[str]) -> bool:
    """Let a reduction read the blocked tensor; whether the reader is one."""
    reduces = port >= 0 and all(name in scalars for name in reader.output)
    if reduces:
        reader.input[port] = blocked
    return reduces


def _attribute(node: onnx.NodeProto, name: str) -> int | None:
    return next((int(found.i) for found in node.attribute if found.name == name), None)


def _blocked_channels(graph: onnx.GraphProto) -> dict[str, int]:
    """Channels of values in the runtime's own layout, those that only fill the last block included."""
    found: dict[str, int] = {}
    weights = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
    for node in graph.node:
        if node.domain == _BLOCKED and node.op_type == "Conv":
            count = weights.get(node.input[1])
        else:
            count = _channels_made(node, [found.get(name) for name in node.input if name])
        if count is not None:
            found[node.output[0]] = count
    return found


def _channels_made(node: onnx.NodeProto, given: Collection[int | None]) -> int | None:
    """Channels of what ``node`` makes of tensors with so many; ``None`` where that is not known."""
    known = [n for n in given if n is not None]
    if not known or len(known) < len(given):
        return None
    if node.op_type == "Concat":
        return sum(known)
    return known[0] if node.op_type in _CHANNELWISE and len(set(known)) == 1 else None


def reduce_early(graph: onnx.GraphProto, small: Collection[str]) -> None:
    """Move what only ``small`` outputs need right after what it reads; the runtime has put it last.

    Args:
        graph: in an order in which it can run; stays so.
        small: see :func:`open_watching`.
    """
    nodes = list(graph.node)
    needed = _needed(graph, [value.name for value in graph.output if value.name not in small])
    made = {name for node in nodes for name in node.output if name}
    free = set(range(len(nodes))) - needed
    sources = {i: [name for name in _read(nodes[i]) if name in made] for i in sorted(free)}
    first = [i for i, names in sources.items() if not names]  # they reduce inputs of the model
    order = _with_readers([*first, *sorted(needed)], sources, nodes)
    _replace(graph.node, [nodes[i] for i in order])


def _with_readers(
    places: Sequence[int], sources: Mapping[int, Sequence[str]], nodes: Sequence[onnx.NodeProto]
) -> Iterator[int]:
    """``places``, and each place of ``sources`` right after the last of the nodes that make its sources."""
    waiting: dict[str, list[int]] = defaultdict(list)  # by what they wait for
    missing = {i: len(names) for i, names in sources.items()}
    for i, names in sources.items():
        for name in names:
            waiting[name].append(i)
    stack = list(reversed(places))
    while stack:
        at = stack.pop()
        yield at
        freed = []
        for reader in chain.from_iterable(waiting.pop(name, ()) for name in nodes[at].output):
            missing[reader] -= 1
            if not missing[reader]:
                freed.append(reader)
        stack.extend(reversed(freed))


def _needed(graph: onnx.GraphProto, outputs: Collection[str]) -> set[int]:
    """Places of the nodes that take part in what ``outputs`` hold."""
    wanted, found = set(outputs), set()
    for i in range(len(graph.node) - 1, -1, -1):
        node = graph.node[i]
        if not wanted.isdisjoint(node.output):
            found.add(i)
            wanted.update(_read(node))
    return found


def _readers(graph: onnx.GraphProto) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """Name -> the nodes that read it, each with its port, -1 where a body of the node reads it."""
    found: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        for port, name in enumerate(_read(node)):
            found[name].append((node, port if port < len(node.input) else -1))
    return found


def _read(node: onnx.NodeProto) -> list[str]:
    """Names of what a node reads: its inputs, and then all names in its bodies."""
    return [*node.input, *_read_in_bodies(node)]


def _read_in_bodies(node: onnx.NodeProto) -> Iterator[str]:
    nodes = [node]
    while nodes:
        for attribute in nodes.pop().attribute:
            for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                nodes.extend(body.node)
                yield from (name for inner in body.node for name in inner.input)
                yield from (value.name for value in body.output)


def _replace(field: Any, items: list[Any]) -> None:
    """Let a repeated field of a message hold ``items``, which may be of it."""
    del field[:]
    field.extend(items)
