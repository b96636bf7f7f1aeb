"""What can be asked of an export once it lies in a folder: how fast it is beside its float model."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bitwright.errors import ExportError
from bitwright.export.artefacts import Exported
from bitwright.export.files.temporary import temporary_room
from bitwright.export.files.value_types import load
from bitwright.export.targets import DEFAULT_TARGET, find_target
from bitwright.export.tflite.convert import to_tflite
from bitwright.export.verify.samples import find_export, read_samples
from bitwright.runtimes.adapters import RUNTIMES, find_runtime, open_file
from bitwright.runtimes.benchmark import BenchmarkReport, benchmark
from bitwright.runtimes.timing import Ratio, interleaved, ratio

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
_BRIEF = 0.3  # seconds


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
            path / f"{stem}{suffix}",
            float_file if float_file.is_file() else None,
            feeds,
            runtime=runtime,
            threads=threads,
            seconds=seconds,
            rounds=rounds,
        )


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
    """What :func:`benchmark_export` says of the files that ``export`` writes into a folder it is given."""
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
    if speed.high < 1:
        logger.warning(
            "%s: slower than float on this machine: %s; `bitwright benchmark %s` tells why",
            exported.qdq, speed, exported.qdq.parent,
        )  # fmt: skip
    elif not speed.steady:
        logger.warning("%s: its speed could not be told, the machine is busy: %s", exported.qdq, speed)
    return replace(exported, speed=speed)


def brief_speed(exported: Exported, target: str = DEFAULT_TARGET) -> Ratio | None:
    """How many times as fast as float the files of an export are with one thread, in a third of a second or seven rounds.

    In the runtime of ``target`` where that reads ONNX files, else in ONNX Runtime. ``None`` where the export has no samples to
    run.
    """
    stem = exported.manifest.name.removesuffix("_manifest.json")
    try:
        feeds = sample_inputs(exported.qdq.parent, stem)
    except ExportError:
        return None
    name = find_target(target).runtime
    runtime = name if RUNTIMES[name].suffix == ".onnx" else "onnxruntime"
    files = {"float": exported.float_model, "quantized": exported.qdq}
    sessions = {name: open_file(runtime, path) for name, path in files.items()}
    steps = {name: (lambda s=session: s.run(feeds)) for name, session in sessions.items()}
    times = interleaved(steps, seconds=_BRIEF)
    return ratio(times["float"], times["quantized"])
