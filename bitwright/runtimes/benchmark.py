"""Measure an exported file relative to its float model: time, size, memory, loading, and time per operator.

Every number is measured on this machine in this call. Times are wall clock, of rounds that run the float and the quantized
file one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import ConfigError, ExportError
from bitwright.runtimes.adapters import check_not_empty, find_runtime, open_file
from bitwright.runtimes.onnxruntime import Ran, operator_libraries, profile
from bitwright.runtimes.timing import MOST_SPREAD, Ratio, Timing, interleaved, ratio
from bitwright.tables import Tabular, text_table

Array = NDArray[Any]
Feeds = Mapping[str, Array]
_MOST_ROWS = 12
_MOST_PER_CORE = 4  # threads


@dataclass(frozen=True)
class FileCost:
    """Size, loading time and memory of one file.

    Attributes:
        name: ``float`` or ``quantized``.
        size: bytes on disk, external tensors included.
        load: seconds until a fresh process has a session of it, without the import of the runtime.
        memory: MiB that the process grew by at most while it loaded and ran once.
    """

    name: str
    size: int
    load: float
    memory: float


@dataclass(frozen=True)
class BenchmarkReport(Tabular):
    """Result of :func:`benchmark`.

    Attributes:
        runtime: name of the runtime.
        costs: of the float file, where there is one, and of the quantized one.
        times: threads -> name of the file -> times.
        speed: threads -> how many times as fast as float the quantized file is.
        operators: what ONNX Runtime ran for the quantized file with one thread; empty in other runtimes.
        notes: what there is to say, first of all where the numbers mean little.
    """

    _rows = "costs"

    runtime: str
    costs: tuple[FileCost, ...]
    times: dict[int, dict[str, Timing]]
    speed: dict[int, Ratio]
    operators: tuple[Ran, ...] = ()
    notes: tuple[str, ...] = ()
    suggestions: tuple[Any, ...] = field(default=())

    @property
    def slower(self) -> bool:
        """Whether the quantized file is slower than float with some number of threads, beyond the noise of the rounds."""
        return any(found.slower for found in self.speed.values())

    def to_text(self) -> str:
        """Tables for the terminal."""
        parts = [f"In {self.runtime}, on this machine", self._costs(), self._times()]
        if self.operators:
            parts.append(self._operators())
        if self.suggestions:
            head = ("change", "speed against float", "against the file", "accuracy (SQNR to float)")
            parts.append(text_table(head, [row.cells() for row in self.suggestions]))
        return "\n\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    __str__ = to_text

    def _costs(self) -> str:
        head = ("file", "size on disk", "load", "peak memory")
        rows = [
            (c.name, f"{c.size / 2**20:.2f} MiB", f"{1e3 * c.load:.1f} ms", f"{c.memory:.1f} MiB") for c in self.costs
        ]
        return text_table(head, rows)

    def _times(self) -> str:
        head = ("threads", "file", "median", "spread", "speed against float (quartiles)")
        rows = []
        for threads, files in self.times.items():
            for name, timing in files.items():
                speed = str(self.speed[threads]) if name == "quantized" and threads in self.speed else ""
                rows.append((str(threads), name, f"{1e3 * timing.median:.3f} ms", f"{timing.spread:.0%}", speed))
        return text_table(head, rows)

    def _operators(self) -> str:
        total = sum(row.micros for row in self.operators) or 1.0
        by_kind = {kind: sum(r.micros for r in self.operators if r.kind == kind) / total for kind in _KINDS}
        shares = ", ".join(f"{_KINDS[kind]} {share:.0%}" for kind, share in by_kind.items() if share)
        costly = [row for row in self.operators if row.kind == "convert" or row.why]
        costly = sorted(costly, key=lambda row: -row.micros)[:_MOST_ROWS]
        lines = [f"time of operators: {shares}"]
        if costly:
            rows = [
                (r.name, r.op, f"{r.micros:.0f} us", r.why or "a conversion that no kernel took up") for r in costly
            ]
            lines.append(text_table(("not on integers", "operator", "time", "why"), rows))
        return "\n".join(lines)


_KINDS = {
    "integer": "integer kernels",
    "float": "float kernels",
    "convert": "conversions that stand alone",
    "move": "data movement",
}


def benchmark(
    quantized: str | os.PathLike[str],
    float_file: str | os.PathLike[str] | None,
    feeds: Feeds,
    *,
    runtime: str = "onnxruntime",
    threads: Sequence[int] | None = None,
    seconds: float = 2.0,
    rounds: int | None = None,
) -> BenchmarkReport:
    """Measure a quantized file beside its float model.

    Args:
        quantized, float_file: files that ``runtime`` reads; without the second there is nothing to compare with.
        feeds: one input, by name.
        runtime: row of :data:`bitwright.runtimes.adapters.RUNTIMES`.
        threads: numbers of threads; 1 and all cores by default.
        seconds: for the rounds of each number of threads.
        rounds: exactly so many rounds instead.

    Raises:
        ConfigError: the runtime is not installed, or a number of threads is none.
        ExportError: a file is missing, the runtime refuses it, or the batch holds no sample.
    """
    find_runtime(runtime)
    check_not_empty("benchmark", feeds)
    files = {} if float_file is None else {"float": Path(float_file)}
    files["quantized"] = Path(quantized)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = tuple(dict.fromkeys(threads or (1, cores)))
    _check_threads(counts, cores)
    times: dict[int, dict[str, Timing]] = {}
    for count in counts:
        opened = {name: open_file(runtime, path, threads=count) for name, path in files.items()}
        steps = {name: partial(session.run, feeds) for name, session in opened.items()}
        times[count] = interleaved(steps, seconds=seconds, rounds=rounds)
    speed = {n: ratio(t["float"], t["quantized"]) for n, t in times.items() if "float" in t}
    costs = tuple(file_cost(name, path, feeds, runtime) for name, path in files.items())
    ran = tuple(profile(files["quantized"], feeds)) if runtime == "onnxruntime" else ()
    return BenchmarkReport(runtime, costs, times, speed, ran, tuple(_notes(times, speed, ran)))


def _check_threads(counts: Sequence[int], cores: int) -> None:
    for count in counts:
        if not isinstance(count, int) or not 0 <= count <= _MOST_PER_CORE * cores:
            problem = (
                f"{count!r} is not a number of threads for this process, which has {cores} core{'s' * (cores > 1)}"
            )
            raise ConfigError("threads", problem, f"use 1 to {cores}, or 0 for all")


def _notes(times: Mapping[int, Mapping[str, Timing]], speed: Mapping[int, Ratio], ran: Sequence[Ran]) -> Iterator[str]:
    for count, found in speed.items():
        if not found.steady:
            yield (
                f"with {count} thread{'s' if count > 1 else ''} the rounds differ too much ({found.low:.2f} to {found.high:.2f}"
                f" times as fast, more than {MOST_SPREAD:.0%} of the median): the machine is busy; measure again when it is not"
            )
    for count, found in speed.items():
        if found.slower:
            yield f"slower than float with {count} thread{'s' if count > 1 else ''}: {found}"
    alone = sum(row.kind == "convert" for row in ran)
    if alone > 2:
        yield f"{alone} QuantizeLinear and DequantizeLinear stand alone; those at the inputs and outputs of the model have to"


# ------------------------------------------------------------------------------------------------ one file


_CHILD = """
import json, sys, time
import numpy as np
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024
path, feeds, runtime, *libraries = sys.argv[1:]
from bitwright.runtimes.adapters import find_runtime, open_file
find_runtime(runtime)
if libraries:
    from bitwright.runtimes.onnxruntime import register_operators
    for library in libraries:
        register_operators(library)
archive = np.load(feeds, allow_pickle=False)
arrays = {name: archive[name] for name in archive.files}
try:
    before = peak()
except OSError:
    before = None
start = time.perf_counter()
session = open_file(runtime, path)
load = time.perf_counter() - start
session.run(arrays)
print(json.dumps({"load": load, "memory": float("nan") if before is None else peak() - before}))
"""


def file_cost(name: str, path: Path, feeds: Feeds, runtime: str) -> FileCost:
    """Size, time to load and memory of a file, the last two in a fresh process with one thread.

    Raises:
        ExportError: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "feeds.npz")
        np.savez(archive, **dict(feeds))  # type: ignore[arg-type]
        run = subprocess.run(
            [sys.executable, "-c", _CHILD, str(path), str(archive), runtime, *operator_libraries()],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        raise ExportError(str(path), f"a fresh process could not run it: {last}", "run it in this process first")
    found = json.loads(run.stdout.splitlines()[-1])
    parts = (path, path.with_name(f"{path.name}.data"))  # and the file of its external tensors
    size = sum(part.stat().st_size for part in parts if part.is_file())
    return FileCost(name, size, found["load"], found["memory"])
