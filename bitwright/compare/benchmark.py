"""Measure the speed of an export's quantized file relative to its float file, on the inputs of its samples."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bitwright.errors import ConfigError, ExportError
from bitwright.export.artefacts import Exported
from bitwright.export.files.atomic import temporary_room
from bitwright.export.files.onnx_file import load
from bitwright.export.litert.convert import to_tflite
from bitwright.export.samples import find_export, read_samples
from bitwright.export.targets import DEFAULT_TARGET, find_target
from bitwright.runtimes.adapters import RUNTIMES, find_runtime, open_file
from bitwright.runtimes.benchmark import BenchmarkReport, benchmark
from bitwright.runtimes.timing import Ratio, interleaved, ratio

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
_BRIEF = 0.3  # seconds
_SLOW = 0.1  # seconds of one run of both files; seven and the loading take about a second
_LARGE = 1 << 26  # bytes of both files, which load in a second


def benchmark_export(
    folder: str | os.PathLike[str],
    prefix: str | None = None,
    *,
    runtime: str = "onnxruntime",
    threads: Sequence[int] | None = None,
    seconds: float = 2.0,
    rounds: int | None = None,
) -> BenchmarkReport:
    """Measure the quantized file of an export beside its float file, on the inputs of its samples.

    Args:
        folder: where the files lie.
        prefix: stem of the files; needed only when the folder holds several exports. In LiteRT the float model is
            converted for the measurement.
        runtime, threads, seconds, rounds: see :func:`bitwright.runtimes.benchmark.benchmark`.

    Raises:
        ConfigError: the runtime is not installed.
        ExportError: no export there, no samples of it, or the runtime refuses a file.
    """
    path, stem = Path(folder), find_export(folder, prefix)
    suffix = find_runtime(runtime).suffix
    float_file, feeds = path / f"{stem}_float{suffix}", sample_inputs(path, stem)
    with temporary_room(), tempfile.TemporaryDirectory() as room:
        if suffix == ".tflite" and (path / f"{stem}_float.onnx").is_file():
            float_file = Path(room, float_file.name)
            float_file.write_bytes(to_tflite(load(path / f"{stem}_float.onnx"), feeds).content)
        return benchmark(
            path / f"{stem}{suffix}", float_file if float_file.is_file() else None, feeds,
            runtime=runtime, threads=threads, seconds=seconds, rounds=rounds,
        )  # fmt: skip


def sample_inputs(folder: Path, stem: str) -> dict[str, Array]:
    """The inputs that an export keeps with its samples.

    Raises:
        ExportError: there are none.
    """
    samples = folder / f"{stem}_samples.npz"
    if not samples.is_file():
        raise ExportError(
            str(samples),
            "the export has no samples, whose inputs would be run",
            "export the model again with samples=True",
        )
    return read_samples(samples)[1]


def benchmark_sim(export: Callable[[Path], Exported], options: Mapping[str, Any]) -> BenchmarkReport:
    """The report of :func:`benchmark_export` on files that ``export`` writes into a temporary folder."""
    with temporary_room(), tempfile.TemporaryDirectory() as folder:
        export(Path(folder))
        return benchmark_export(folder, **options)


def measured(exported: Exported, target: str) -> Exported:
    """``exported`` with its speed; a warning is logged where it is slower than float, or where the machine is too busy to tell.

    Raises:
        ExportError: the runtime of ``target`` refuses a file.
        ConfigError: it is not installed.
    """
    speed = brief_speed(exported, target)
    if speed is None:
        logger.warning("%s: its speed cannot be measured: it has no samples to run", exported.qdq)
        return exported
    return _told(exported, speed)


def measured_if_short(exported: Exported, target: str) -> Exported:
    """:func:`measured`, where that takes about a second at most. Raises nothing: the files are already written.

    Left out: files of more than 64 MiB together, runs that take more than a tenth of a second together, files without samples,
    the target ``packed``, which is for compilers, formats that are not of ONNX, and runtimes that are not installed. A file that
    its runtime refuses is a warning.
    """
    files = (exported.qdq, exported.float_model)
    size = sum(one.stat().st_size for file in files for one in (file, Path(f"{file}.data")) if one.is_file())
    runtime = RUNTIMES[find_target(target).runtime]
    if target == "packed" or runtime.suffix != ".onnx" or size > _LARGE:
        return exported
    try:
        speed = brief_speed(exported, target, slowest=_SLOW)
    except ConfigError as reason:  # the user may run the files elsewhere
        logger.info("%s: not compared with float: %s", exported.qdq, reason)
        return exported
    except ExportError as reason:
        logger.warning("%s: not compared with float: %s", exported.qdq, reason)
        return exported
    return exported if speed is None else _told(exported, speed, busy=logging.INFO)


def _told(exported: Exported, speed: Ratio, *, busy: int = logging.WARNING) -> Exported:
    """``exported`` with its speed, and a warning where it is slow; of level ``busy`` where the machine is too busy to tell."""
    if speed.slower:
        logger.warning(
            "%s: slower than float on this machine: %s; `bitwright benchmark %s` tells why",
            exported.qdq, speed, exported.qdq.parent,
        )  # fmt: skip
    elif not speed.steady:
        logger.log(busy, "%s: its speed could not be told, the machine is busy: %s", exported.qdq, speed)
    return replace(exported, speed=speed)


def brief_speed(exported: Exported, target: str = DEFAULT_TARGET, *, slowest: float = math.inf) -> Ratio | None:
    """Speed of an export's file relative to float with one thread, in a third of a second or seven rounds.

    In the runtime of ``target`` where that reads ONNX files, else in ONNX Runtime. ``None`` where the export has no samples to
    run, or where one run of both files takes longer than ``slowest``, in seconds.

    Raises:
        ConfigError: the runtime is not installed.
        ExportError: it refuses a file, which the message says is complete.
    """
    stem = exported.manifest.name.removesuffix("_manifest.json")
    try:
        feeds = sample_inputs(exported.qdq.parent, stem)
    except ExportError:
        return None
    name = find_target(target).runtime
    runtime = name if RUNTIMES[name].suffix == ".onnx" else "onnxruntime"
    files = {"float": exported.float_model, "quantized": exported.qdq}
    try:
        sessions = {name: open_file(runtime, path) for name, path in files.items()}
        steps = {name: (lambda s=session: s.run(feeds)) for name, session in sessions.items()}
        start = time.perf_counter()
        if slowest < math.inf:
            for step in steps.values():
                step()
        if time.perf_counter() - start > slowest:
            return None
        times = interleaved(steps, seconds=_BRIEF)
    except ExportError as error:
        problem = f"the export in {exported.qdq.parent} is complete, but {error.problem}"
        raise ExportError(error.site, problem, error.remedy) from error
    return ratio(times["float"], times["quantized"])
