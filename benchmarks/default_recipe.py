"""What ``quantize(model, data)`` does when nothing is said, beside nearest rounding and what other tools do by default.

    python benchmarks/default_recipe.py --results default.jsonl                  # everything, half an hour on one core
    python benchmarks/default_recipe.py --results default.jsonl --networks denoiser --seeds 0
    python benchmarks/default_recipe.py --results default.jsonl --only-table --markdown table.md

W8A8. Two numbers per network and draw of calibration data: the signal-to-noise ratio of the outputs against the float
model's on data that nothing was calibrated on, and the metric. ``ort`` is ``onnxruntime.quantization.quantize_static``
after its own pre-processing; ``nncf`` is ``nncf.quantize`` of the ONNX model, where that package is installed. Networks of
tests/support/standins.py are trained at the start; the others need the developer data set (see tests/support/data.py).

    python benchmarks/default_recipe.py --cost --markdown cost.md

tells what ``nearest``, the efforts and ``nncf`` cost: CPU time over that of the float model on the same calibration data
(interleaved, the least of both over the rounds), and the memory beyond what the float model took, each in a fresh process.

    python benchmarks/default_recipe.py --results w4a4.jsonl --preset w4a4 --ways float nearest mse default onnx_mse onnx_default

is W4A4 instead: ``mse`` is nearest rounding with the ranges of weights and activations of least squared error, which is what
ranges alone can do; ``onnx_...`` the same of the ONNX model.

    python benchmarks/default_recipe.py --weight-grid

compares the two symmetric grids of 8- and 4-bit weights, with and without the code that has no positive counterpart.
"""

from __future__ import annotations

import argparse
import functools
import gc
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import onnx
import onnxruntime
import torch

import bitwright.onnx
import bitwright.torch
from bitwright.core.numerics.affine import fake_quantize
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import Preset, find_preset
from bitwright.core.simulation.float_model import sqnr
from tests.support import data
from tests.support.standins import STANDINS
from tests.support.tasks import TASKS, exported

FROM_DATA_SET = ("mobilenet_v2_cifar", "mobilenet_v1_025", "resnet20_aux", "stories260k", "lstm_char")
NETWORKS = (*STANDINS, *FROM_DATA_SET)
EFFORTS = ("quick", "default", "thorough")
WAYS = ("float", "nearest", *EFFORTS, "ort", "nncf")
OTHER_WAYS = ("mse", "onnx_nearest", "onnx_mse", "onnx_default")
LOWER_IS_BETTER = ("stories260k", "lstm_char")
Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A network: the module, calibration data by seed, unseen inputs, the metric, and the network as ONNX."""

    model: torch.nn.Module
    batches: Callable[[int], list[torch.Tensor]]
    unseen: list[torch.Tensor]
    score: Callable[[Run], float]
    onnx: Callable[[], onnx.ModelProto]


@functools.cache
def case(name: str) -> Case:
    """The network ``name``, trained now or read."""
    if name in STANDINS:
        standin = STANDINS[name]()

        def written() -> onnx.ModelProto:
            file = io.BytesIO()
            torch.onnx.export(
                standin.model, (standin.test[:2],), file, dynamo=False, opset_version=17, input_names=["x"],
                dynamic_axes={"x": {0: "rows"}},
            )  # fmt: skip
            return onnx.load_from_string(file.getvalue())

        return Case(standin.model, standin.batches, list(standin.test[:300].split(100)), standin.score, written)
    task = TASKS[name]()

    def draw(seed: int) -> list[torch.Tensor]:
        return task.batches(seed + 1)[:8]  # draw 0 is the first samples, in the order of the file

    return Case(
        data.trained(name), draw, _unseen(name), task.score,
        lambda: onnx.load(data.onnx_file(task.file)) if task.file else exported(name, task),
    )  # fmt: skip


def _unseen(name: str) -> list[torch.Tensor]:
    if name == "mobilenet_v1_025":
        return list(data.imagenet().x[:100].split(25))
    if name == "stories260k":
        return list(data.stories()[:64, :-1].split(8))
    if name == "lstm_char":
        return list(data.shakespeare("test")[: 64 * 128].reshape(64, 128).split(16))
    return list(data.cifar().x[:300].split(100))


def first(result: Any) -> torch.Tensor:
    """The first output."""
    return result if isinstance(result, torch.Tensor) else result[0]


def of_torch(model: torch.nn.Module) -> Run:
    """A module as a function of a batch."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return first(model(x))

    return run


def of_onnx(model: onnx.ModelProto) -> Run:
    """An ONNX model as a function of a batch."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    source = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {source: x.numpy()})[0])


def by_onnxruntime(model: onnx.ModelProto, batches: Sequence[torch.Tensor]) -> Run:
    """As ``quantize_static`` does it when nothing is said."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source = model.graph.input[0].name

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter([{source: batch.numpy()} for batch in batches])

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, f"{i}.onnx")) for i in range(3)]
        onnx.save(model, paths[0])
        quant_pre_process(paths[0], paths[1], skip_symbolic_shape=True)
        quantize_static(paths[1], paths[2], Reader())
        return of_onnx(onnx.load(paths[2]))


def by_onnx_simulation(found: Case, seed: int, preset: str, asked: dict[str, Any]) -> Run:
    """The ONNX model, simulated as its front end does it."""
    model = found.onnx()
    source = model.graph.input[0].name
    feeds = [{source: batch.numpy()} for batch in found.batches(seed)]
    sim = bitwright.onnx.quantize(model, feeds, preset_of(preset), **asked, progress=False).sim
    return lambda x: torch.from_numpy(sim.run({source: x.numpy()})[0])


def by_nncf(model: onnx.ModelProto, batches: Sequence[torch.Tensor]) -> Run:
    """As ``nncf.quantize`` does it when nothing is said."""
    import nncf

    source = model.graph.input[0].name
    feeds = [{source: batch.numpy()} for batch in batches]
    return of_onnx(nncf.quantize(model, nncf.Dataset(feeds)))


def asked_of(way: str) -> dict[str, Any]:
    """Options of ``quantize``."""
    if way == "mse":
        return {"recipe": ["fold"], "quant_scheme": "mse"}
    return {"recipe": ["fold"]} if way == "nearest" else {"effort": way}


def preset_of(name: str) -> Preset:
    """A preset by name; ``w4a4`` is none of the package's: the weights of ``w4a8``, activations of four bits."""
    if name != "w4a4":
        return find_preset(name)
    preset = find_preset("w4a8")
    assert preset.activation is not None
    return replace(preset, activation=replace(preset.activation, format=IntFormat(4, signed=False)))


def run_of(way: str, found: Case, seed: int, preset: str = "w8a8") -> Run:
    """The network as ``way`` leaves it."""
    if way == "float":
        return of_torch(found.model)
    if way in ("nearest", "mse", *EFFORTS):
        result = bitwright.torch.quantize(
            found.model, found.batches(seed), preset_of(preset), **asked_of(way), progress=False
        )
        return of_torch(result.model)
    if way.startswith("onnx_"):
        return by_onnx_simulation(found, seed, preset, asked_of(way.removeprefix("onnx_")))
    return (by_onnxruntime if way == "ort" else by_nncf)(found.onnx(), found.batches(seed))


def measured(name: str, way: str, seed: int, preset: str = "w8a8") -> tuple[float, float]:
    """``(dB of the outputs, metric)``."""
    found = case(name)
    wanted = [of_torch(found.model)(x).numpy().ravel() for x in found.unseen]
    run = run_of(way, found, seed, preset)
    got = [run(x).numpy().ravel() for x in found.unseen]
    return sqnr(np.concatenate(wanted), np.concatenate(got)), found.score(run)


# ---- what it costs


def cost(name: str, way: str, rounds: int) -> dict[str, float]:
    """``passes`` and ``mib`` of one way, in this process."""
    found = case(name)
    batches, run = found.batches(0), of_torch(found.model)
    model = found.onnx() if way in ("ort", "nncf") else None

    def float_pass() -> None:
        for batch in batches:
            run(batch)

    def quantized() -> None:
        if model is not None:
            (by_onnxruntime if way == "ort" else by_nncf)(model, batches)
        else:
            run_of(way, found, 0)

    if model is not None:
        run = of_onnx(model)
    float_pass()
    measure.forget_peak()
    float_pass()
    before = measure.peak_mib()
    measure.forget_peak()
    times: dict[str, list[float]] = {"float": [], "way": []}
    for i in range(rounds):
        for key, step in (("float", float_pass), ("way", quantized)):
            gc.collect()
            start = time.process_time()
            step()
            times[key].append(time.process_time() - start)
        if not i:
            mib = measure.peak_mib() - before
    return {"passes": min(times["way"]) / min(times["float"]), "mib": mib}


def cost_table(networks: Sequence[str], ways: Sequence[str], rounds: int) -> tuple[list[str], list[list[str]]]:
    """Passes and MiB of every way on every network."""
    rows = []
    for name in networks:
        cells = []
        for way in ways:
            found = measure.in_fresh_process(__file__, "--cost-of", name, way, str(rounds))
            cells.append(f"{found['passes']:.1f}, {found['mib']:.0f} MiB")
            print(name, way, cells[-1], file=sys.stderr, flush=True)
        rows.append([name, *cells])
    return ["float passes, added memory", *ways], rows


# ---- the table


def read(path: Path) -> dict[tuple[str, str, int], tuple[float, float]]:
    """The numbers of a results file."""
    rows = measure.read_rows(path)
    return {(r["network"], r["way"], r["seed"]): (r["sqnr"], r["metric"]) for r in rows}


def table(
    found: dict[tuple[str, str, int], tuple[float, float]], preset: str = "w8a8", ways: Sequence[str] = WAYS
) -> tuple[list[str], list[list[str]]]:
    """Two rows per network: dB and metric; mean over the draws and the extremes."""
    rows = []
    for name in NETWORKS:
        for what, index in (("dB", 0), ("metric", 1)):
            numbers = [[v[index] for (n, w, _), v in found.items() if (n, w) == (name, way)] for way in ways]
            texts = [_spread(n, 3 if name in LOWER_IS_BETTER and index else 2) for n in numbers]
            texts[0] = "" if not index else texts[0]
            if any(texts):
                rows.append([f"{name}, {what}", *texts])
    return [preset.upper(), *ways], rows


def _spread(numbers: Sequence[float], places: int) -> str:
    if not numbers:
        return ""
    mean, low, high = (f"{f(numbers):.{places}f}" for f in (statistics.fmean, min, max))
    return mean if low == high else f"{mean} ({low} to {high})"


def weight_grid(networks: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Strict less full, in dB: weights per layer, and outputs with weights alone quantized."""
    rows = []
    for name in networks:
        found = case(name)
        wanted = np.concatenate([of_torch(found.model)(x).numpy().ravel() for x in found.unseen])
        for preset in ("w8", "w8_per_tensor", "w4"):
            weights: dict[str, list[float]] = {}
            outputs = [_with_grid(found, preset, s, wanted, weights) for s in ("symmetric", "strict_symmetric")]
            gains = np.array([strict - full for full, strict in weights.values()])
            rows.append(
                [
                    f"{name}, {preset}",
                    str(len(gains)),
                    f"{gains.mean():+.3f}",
                    f"{gains.min():+.2f} to {gains.max():+.2f}",
                    f"{100 * np.mean(gains > 0):.0f} %",
                    f"{outputs[0]:.2f}",
                    f"{outputs[1] - outputs[0]:+.2f}",
                ]  # fmt: skip
            )
    columns = [
        "+-127 less -128..127",
        "layers",
        "weights, dB",
        "from to",
        "layers better",
        "outputs, dB",
        "outputs, dB more",
    ]
    return columns, rows


def _with_grid(found: Case, name: str, symmetry: str, wanted: Any, weights: dict[str, list[float]]) -> float:
    preset = find_preset("w8a8_per_tensor" if name == "w8_per_tensor" else name)
    assert preset.weight is not None
    asked = Preset(replace(preset.weight, symmetry=symmetry), None)  # type: ignore[arg-type]
    sim = bitwright.torch.quantize(found.model, found.batches(0), asked, recipe=["fold"], progress=False).sim
    for site, param in ((s, sim.graph.values[s.value].param) for s in sim.quantizers.values()):
        if site.role == "weight" and site.enabled and param is not None:
            weight = sim._interceptor.named_tensor(param).detach()
            loss = sqnr(weight.numpy(), fake_quantize(weight, site.encoding).numpy())
            weights.setdefault(site.name, []).append(loss)
    return sqnr(wanted, np.concatenate([of_torch(sim.model)(x).numpy().ravel() for x in found.unseen]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="file of the numbers, one line each")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *OTHER_WAYS), default=WAYS[:-1])
    parser.add_argument("--preset", default="w8a8", help="a preset, or w4a4")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only-table", action="store_true", help="measure nothing")
    parser.add_argument("--weight-grid", action="store_true", help="compare the grids of weights instead")
    parser.add_argument("--cost", action="store_true", help="measure time and memory instead")
    parser.add_argument("--cost-of", nargs=3, metavar=("NETWORK", "WAY", "ROUNDS"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3, help="of --cost")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if options.cost_of:
        name, way, rounds = options.cost_of
        print(json.dumps(cost(name, way, int(rounds))))
        return
    if options.cost:
        title = "What quantize costs: float passes over the calibration data (CPU time), and memory beyond the float model's"
        columns, rows = cost_table(options.networks, [w for w in options.ways if w != "float"], options.rounds)
    elif options.weight_grid:
        title = "Symmetric weights without the lowest code (+-127), less those with it (-128..127)"
        columns, rows = weight_grid(options.networks)
    else:
        if options.results is None:
            parser.error("--results is needed")
        if not options.only_table:
            _measure(options)
        title = (
            "The default recipe: outputs against float in dB, and the metric; mean over three draws, and the extremes"
        )
        shown = WAYS if options.preset == "w8a8" else options.ways
        columns, rows = table(read(options.results), options.preset, shown)
    measure.show(title, columns, rows)
    measure.save(None, options.markdown, title, columns, rows, None)


def _measure(options: argparse.Namespace) -> None:
    known = read(options.results)
    for name in options.networks:
        for way in options.ways:
            for seed in options.seeds if way != "float" else options.seeds[:1]:
                if (name, way, seed) in known:
                    continue
                decibels, metric = measured(name, way, seed, options.preset)
                row = {"network": name, "way": way, "seed": seed, "sqnr": decibels, "metric": metric}
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                print(*row.values(), sep="\t", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
