"""Comparing the time of two or more things on a machine that others use: interleaved rounds, medians, and their spread.

Milliseconds of every layer of exported files in ONNX Runtime, with one thread.
"""

from __future__ import annotations

import gc
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.runtimes.adapters import open_file

#: quartiles further apart than this share of the median say more about the machine than about the model
MOST_SPREAD = 0.25
_FEWEST, _MOST = 7, 400  # rounds
_SHORT = 0.01  # seconds


@dataclass(frozen=True)
class Timing:
    """Seconds of one thing in every round.

    Attributes:
        rounds: seconds, wall clock.
    """

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        low, _, high = statistics.quantiles(self.rounds, n=4)
        return (high - low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one thing is as another, by rounds that ran next to each other.

    Attributes:
        median: above 1 where it is faster.
        low, high: quartiles over the rounds.
    """

    median: float
    low: float
    high: float

    @property
    def steady(self) -> bool:
        """Whether the quartiles are close enough for the median to mean something."""
        return self.high - self.low <= MOST_SPREAD * self.median

    @property
    def slower(self) -> bool:
        """Whether it is slower, beyond what the rounds differ by."""
        return self.steady and self.high < 1

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 2.0,
    rounds: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times of ``steps``: every round runs each of them, in an order drawn anew.

    What slows the machine for a while slows all of them. One unmeasured round comes first, for lazy loading; a short step runs
    once unmeasured before it is measured, too: after a larger model it found the caches cold, 5 % of the time of a small one.

    Args:
        steps: name -> what is timed.
        seconds: wall clock to be spent on what is measured; at least seven rounds are run.
        rounds: exactly so many instead.
        clock: ``time.process_time`` leaves out what other processes take, where one thread does the work.
    """
    names, order = list(steps), random.Random(0)
    start, last = time.perf_counter(), {}
    for name, step in steps.items():
        last[name] = _timed(step, clock)
    once = max(time.perf_counter() - start, 1e-6)
    count = max(_FEWEST, min(_MOST, int(seconds / once))) if rounds is None else max(2, rounds)
    found: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.disable()  # a collection would be counted as the work of whatever ran then
    try:
        for _ in range(count):
            for name in order.sample(names, len(names)):
                if last[name] < _SHORT:
                    steps[name]()
                last[name] = _timed(steps[name], clock)
                found[name].append(last[name])
    finally:
        if enabled:
            gc.enable()
    return {name: Timing(tuple(times)) for name, times in found.items()}


def _timed(step: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def ratio(base: Timing, other: Timing) -> Ratio:
    """How many times as fast ``other`` is as ``base``; both come from one call of :func:`interleaved`.

    Example:
        >>> str(ratio(Timing((2.0, 2.0, 4.0)), Timing((1.0, 1.0, 2.0))))
        '2.00x (2.00 to 2.00)'
    """
    each = [one / two for one, two in zip(base.rounds, other.rounds, strict=True)]
    low, middle, high = _quartiles(each)
    return Ratio(middle, low, high)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high


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
