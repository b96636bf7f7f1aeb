"""Benchmarks of ONNX files without their simulation, and of changes that may make them faster."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.benchmark import benchmark_export, sample_inputs
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.core.numerics.affine import encode
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec, Symmetry
from bitwright.core.simulation.float_model import sqnr
from bitwright.core.simulation.sites import Site
from bitwright.errors import BitwrightError, ExportError, some_of
from bitwright.export.files.atomic import temporary_room
from bitwright.export.files.onnx_file import save_model
from bitwright.export.qdq.markers import strip_sites
from bitwright.export.qdq.write import to_qdq
from bitwright.export.recurrent import write_recurrent
from bitwright.export.samples import find_export
from bitwright.export.targets import DEFAULT_TARGET
from bitwright.onnx.model.data import input_specs, random_array
from bitwright.onnx.model.load import load_model
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.runtimes.adapters import find_runtime, open_file
from bitwright.runtimes.benchmark import BenchmarkReport, benchmark
from bitwright.runtimes.onnxruntime import HAS_INTEGER_KERNEL
from bitwright.runtimes.timing import Ratio, interleaved, ratio

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
Feeds = Mapping[str, Array]


def benchmark_path(
    path: Path,
    prefix: str | None = None,
    *,
    runtime: str = "onnxruntime",
    threads: Sequence[int] | None = None,
    seconds: float = 2.0,
    suggest: bool = False,
) -> BenchmarkReport:
    """Benchmark an export folder, or any quantized ONNX model; the command ``bitwright benchmark``.

    Args:
        path: the folder or the file; a file is compared with itself without its quantizers, on random inputs.
        prefix: stem of the files in the folder.
        runtime, threads, seconds: see :func:`bitwright.runtimes.benchmark.benchmark`.
        suggest: also try the changes of :func:`suggestions`.

    Raises:
        ConfigError: the runtime is not installed.
        ExportError: no export there, or the runtime refuses a file.
        ModelError: the file is not an ONNX model that can be read.
    """
    with temporary_room(), tempfile.TemporaryDirectory() as folder:
        row = find_runtime(runtime)
        if path.suffix == ".tflite":
            if row.suffix != path.suffix:
                raise ExportError(str(path), f"{row.name} reads {row.suffix} files", "add runtime='litert'")
            if not path.with_name(f"{path.stem}_manifest.json").is_file():
                problem = "no export lies beside it, whose float model and samples it would be measured with"
                raise ExportError(str(path), problem, "name the folder of an export with target='litert'")
            path, prefix = path.parent, path.stem
        if path.is_dir():
            report = benchmark_export(path, prefix, runtime=runtime, threads=threads, seconds=seconds)
            stem = find_export(path, prefix)
            file, plain, feeds = path / f"{stem}.onnx", path / f"{stem}_float.onnx", sample_inputs(path, stem)
        else:
            if row.suffix != ".onnx":
                problem = f"{row.name} reads {row.suffix} files, and this one is not converted here"
                raise ExportError(str(path), problem, f"name the folder of an export with target={row.name!r}")
            file, plain = path, Path(folder, "float.onnx")
            save_model(strip_sites(QuantizationSimModel(path).marked).model, plain)
            rng = np.random.default_rng(0)
            feeds = {spec.name: random_array(spec, rng) for spec in input_specs(load_model(path).model)}
            report = benchmark(file, plain, feeds, runtime=runtime, threads=threads, seconds=seconds)
        if not suggest:
            return report
        return replace(report, suggestions=tuple(suggestions(file, plain, feeds, runtime=runtime, seconds=seconds)))


@dataclass(frozen=True)
class Suggestion:
    """A change of a file, with its measured effect.

    Attributes:
        change: what was changed, and how it is asked for.
        speed: how many times as fast as float the changed file is.
        against: how many times as fast as the file that there is.
        accuracy: signal-to-noise ratio of its outputs to those of the float file, in dB; of the file that there is, ``before``.
    """

    change: str
    speed: Ratio
    against: Ratio
    accuracy: float
    before: float

    def cells(self) -> tuple[str, ...]:
        """The cells of a table row."""
        gain = f"{self.accuracy:.1f} dB, was {self.before:.1f} dB"
        return self.change, str(self.speed), str(self.against), gain


def suggestions(
    file: Path, plain: Path, feeds: Feeds, *, runtime: str = "onnxruntime", seconds: float = 2.0
) -> Iterator[Suggestion]:
    """Applicable changes of the quantized ``file``, each measured beside it and beside the float file ``plain``.

    Args:
        file, plain: ONNX files.
        feeds: one input, on which speed and accuracy are measured.
        runtime: that reads ``.onnx`` files.
        seconds: for the rounds of each change.
    """
    sim = QuantizationSimModel(file)
    base, now = open_file(runtime, plain), open_file(runtime, file)
    wanted = base.run(feeds)

    def worst(found: Mapping[str, Array]) -> float:
        """The lowest signal-to-noise ratio over the float outputs, in dB."""
        floats = {name: array for name, array in wanted.items() if np.issubdtype(array.dtype, np.floating)}
        levels = [sqnr(a, found[name]) for name, a in floats.items() if name in found and a.shape == found[name].shape]
        return min(levels, default=float("nan"))

    before = worst(now.run(feeds))
    with temporary_room(), tempfile.TemporaryDirectory() as folder:
        for number, (change, write) in enumerate(_changes(sim)):
            changed = Path(folder, f"{number}.onnx")
            try:
                save_model(write(), changed)
                session = open_file(runtime, changed)
                level = worst(session.run(feeds))
            except BitwrightError as error:  # a form that this model or this runtime has not: no suggestion
                logger.info("%s: %s", change, error)
                continue
            steps = {"float": base, "now": now, "changed": session}
            times = interleaved({name: partial(one.run, feeds) for name, one in steps.items()}, seconds=seconds)
            speed, against = (ratio(times[name], times["changed"]) for name in ("float", "now"))
            yield Suggestion(change, speed, against, level, before)


def _changes(sim: QuantizationSimModel) -> Iterator[tuple[str, Callable[[], ir.Model]]]:
    """Changes that apply to this model: the user's option for each, and a function that writes the changed file."""
    encodings = {s.name: s.encoding for s in sim.quantizers.values() if s.enabled and s.encoding is not None}
    layers = write_recurrent(sim.marked, "native")  # recurrent layers as the operators that the file has

    def write(left_out: Collection[str] = (), other: Mapping[str, Encoding] | None = None, **options: Any) -> ir.Model:
        given = {**encodings, **(other or {})}
        kept = {name: encoding for name, encoding in given.items() if name not in left_out}
        return to_qdq(layers, kept, **{"target": DEFAULT_TARGET, **options}).model

    yield "signed activations: activation='as_is'", partial(write, activation="as_is")
    even, narrow = _other_grids(sim, encodings)
    islands = _islands(sim)
    ends = [name for name in encodings if _is_end(sim, sim.quantizers[name])]
    products = [note.site for note in to_qdq(layers, encodings).notes if note.kind == "float product"]
    tried: list[tuple[str, Collection[str], dict[str, Any]]] = [
        ("symmetric weights: Rule(..., weight={'symmetry': 'symmetric'}) for {}", even, {"other": even}),
        ("8 bits: {'widen': {'allowance': 0}}, or Rule(..., output='uint8') for {}", narrow, {"other": narrow}),
        ("islands in float: sim.quantizers[...].enabled = False for {}", islands, {"left_out": islands}),
        ("outputs of the model in float: Rule(..., output=None) for the last layers", ends, {"left_out": ends}),
        ("weights of float products fused: weight_only='fused'", products, {"weight_only": "fused"}),
    ]
    for text, names, options in tried:
        if names:
            yield text.replace("{}", some_of(list(names))), partial(write, **options)


def _other_grids(
    sim: QuantizationSimModel, encodings: Mapping[str, Encoding]
) -> tuple[dict[str, Encoding], dict[str, Encoding]]:
    """Grids for the same ranges that integer kernels support, or run faster.

    Returns:
        Of weights whose zero point is not in the middle, symmetric ones; of activations of more than 8 bits, those of 8 bits.
    """

    def regridded(encoding: Encoding, fmt: IntFormat, symmetry: Symmetry) -> Encoding:
        given = encoding.format
        assert isinstance(given, IntFormat)
        lo, hi = ((end - encoding.zero_point) * encoding.scale.astype(np.float64) for end in (given.qmin, given.qmax))
        return encode(lo, hi, QuantSpec(fmt, encoding.granularity, symmetry), encoding.granularity)

    even: dict[str, Encoding] = {}
    narrow: dict[str, Encoding] = {}
    for name, encoding in encodings.items():
        fmt, role = encoding.format, sim.quantizers[name].role
        if isinstance(fmt, IntFormat) and role == "weight" and encoding.zero_point.any():
            even[name] = regridded(encoding, IntFormat(fmt.bits), "symmetric")
        if isinstance(fmt, IntFormat) and role in ("input", "output") and fmt.bits > 8:
            narrow[name] = regridded(encoding, IntFormat(8, signed=fmt.signed), "asymmetric")
    return even, narrow


def _is_end(sim: QuantizationSimModel, site: Site) -> bool:
    return site.role == "output" and site.value in sim.graph.outputs


def _islands(sim: QuantizationSimModel) -> list[str]:
    """Activation sites between operators without integer kernels, whose quantizers only cost conversions."""
    found = []
    for site in sim.quantizers.values():
        if site.role not in ("input", "output") or not site.enabled or site.encoding is None:
            continue
        maker = sim.graph.producer(site.value)
        around = [op.type for op, _ in sim.graph.consumers(site.value)] + ([maker.type] if maker else [])
        if not any(
            kind in HAS_INTEGER_KERNEL or kind in TRAITS["clamp"] or op_row(kind).kind == "movement" for kind in around
        ):
            found.append(site.name)
    return found
