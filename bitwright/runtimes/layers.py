"""Milliseconds of every layer of exported files in ONNX Runtime, with one thread."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.runtimes.adapters import open_file
from bitwright.runtimes.timing import interleaved

Array = NDArray[Any]
_ROUNDS = 15  # of which the least counts: what else the machine does makes a run longer, never shorter
_RENAMED = re.compile(r"(_token_\d+|_nchwc|_quant|/duplicated)+$")  # what optimizers append to names of operators


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of one file.

    Attributes:
        layers: layer -> its kernel, and everything between it and the layers before it.
        conversions: layer -> the QuantizeLinear of what it reads that stand alone; part of ``layers``.
        rest: what belongs to no layer.
        whole: of one run of the file.
    """

    layers: Mapping[str, float]
    conversions: Mapping[str, float]
    rest: float
    whole: float


def layer_times(
    files: Mapping[str, Path], feeds: Mapping[str, Array], layers: Collection[str], *, rounds: int = _ROUNDS
) -> dict[str, LayerTimes]:
    """Time the layers of several files of one network: all files in turns, the least of each node.

    Args:
        files: name -> ONNX file, each with nodes of the names of ``layers``.
        feeds: one input, by name.
        layers: operators that times are wanted of; what else runs counts for the layer that reads it.
        rounds: of every file, besides a first one.
    """
    with tempfile.TemporaryDirectory() as folder:
        profiled = {name: _Profiled(path, Path(folder, str(i))) for i, (name, path) in enumerate(files.items())}
        for _ in range(rounds + 1):
            for one in profiled.values():
                one.session.run(None, {k: v for k, v in feeds.items() if k in one.inputs})
        nodes = {name: one.nodes() for name, one in profiled.items()}
    opened = {name: open_file("onnxruntime", path, threads=1) for name, path in files.items()}
    steps = {name: (lambda session=session: session.run(feeds)) for name, session in opened.items()}
    whole = interleaved(steps, rounds=rounds, clock=time.process_time)
    return {
        name: _attributed(profiled[name].graph, taken, {*layers}, 1e3 * min(whole[name].rounds))
        for name, taken in nodes.items()
    }


class _Profiled:
    """A session that notes the time of its nodes, and the graph that it runs."""

    def __init__(self, path: Path, folder: Path) -> None:
        import onnxruntime as ort

        folder.mkdir()
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
        options.optimized_model_filepath = str(folder / "optimized.onnx")
        for key, text in (("file_name", "weights.bin"), ("min_size_in_bytes", "1024")):
            options.add_session_config_entry(f"session.optimized_model_external_initializers_{key}", text)
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {one.name for one in self.session.get_inputs()}
        self.graph = ir.load(folder / "optimized.onnx").graph

    def nodes(self) -> dict[str, float]:
        """Node -> the least time of a run, in milliseconds; the first run is left out."""
        events = json.loads(Path(self.session.end_profiling()).read_text())
        times: dict[str, list[float]] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                times.setdefault(event["name"].removesuffix("_kernel_time"), []).append(float(event["dur"]))
        return {name: min(found[1:] or found) / 1e3 for name, found in times.items()}


def _attributed(graph: Any, taken: Mapping[str, float], layers: set[str], whole: float) -> LayerTimes:
    """Times of layers that add up to ``whole``: what a profile of single nodes misses or adds is shared by all."""
    nodes = [node for node in graph if node.name in taken]  # those of bodies are part of the node with the body
    owner = _owners(nodes, layers)
    factor = whole / max(sum(taken[node.name] for node in nodes), 1e-9)
    found = dict.fromkeys(sorted(layers), 0.0)
    conversions = dict.fromkeys(sorted(layers), 0.0)
    rest = 0.0
    for node in nodes:
        name, spent = owner.get(node.name), factor * taken[node.name]
        if name is None:
            rest += spent
            continue
        found[name] += spent
        if node.op_type == "QuantizeLinear":
            conversions[name] += spent
    return LayerTimes(found, conversions, rest, whole)


def _owners(nodes: list[Any], layers: set[str]) -> dict[str, str]:
    """Node -> the layer that it is, or that reads it; at the end of the graph the one before it."""
    names = {node.name: _RENAMED.sub("", node.name).removeprefix("fused ") for node in nodes}
    found = {node: name for node, name in names.items() if name in layers}
    for node in reversed(nodes):
        _belongs(node, found, (use.node for value in node.outputs for use in value.uses()))
    for node in nodes:
        _belongs(node, found, (v.producer() for v in node.inputs if v is not None))
    return found


def _belongs(node: Any, found: dict[str, str], neighbours: Iterable[Any]) -> None:
    """A node that has no layer yet gets that of the first neighbour that has one."""
    owners = (found[n.name] for n in neighbours if n is not None and n.name in found)
    owner = next(owners, None)
    if owner is not None:
        found.setdefault(node.name, owner)
