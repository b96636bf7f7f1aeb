"""What bounds the rows of results/speed_goals.md that miss their goal: their parts by themselves, beside the float model."""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import torch

from bitwright.core.compiled.loops import loops
from bitwright.core.numerics import statistics as kept
from bitwright.torch.quantizers.fake_quantize import Grid, on_grid

HELP = """\
Parts of a row as ratios to the float model, CPU time, one thread, all of them once per round in this process: least and median.
Of an export its parts, in float forwards of its batch. Of the ONNX rows (run them with taskset -c 0) the parts that are calls
of ONNX Runtime, from a profile of the same call; of the default recipe every step, as float passes over the calibration data,
and the peak of the process in the first call beyond that of the float model.
"""
EXAMPLES = """\
examples:
  python benchmarks/speed_bounds.py torch
  python benchmarks/speed_bounds.py lstm
  python benchmarks/speed_bounds.py preparation
  taskset -c 0 python benchmarks/speed_bounds.py onnx
  python benchmarks/speed_bounds.py export
  python benchmarks/speed_bounds.py recipe --network resnet20_aux --effort quick
"""
Steps = dict[str, Callable[[], Any]]


def torch_parts(rounds: int) -> Steps:
    """A batch of MobileNetV2: what its simulation and its calibration do beside the float model, part by part."""
    from torch_speed import Bench, Settings

    bench = Bench("mobilenet_v2", Settings(False, True, rounds, 1))
    sim, off = bench.calibrated(), bench.calibrated()
    for site in off.quantizers.values():
        site.enabled = False
    names = [name for name, site in sim.quantizers.items() if site.role in ("input", "output")]
    found = [x for several in sim.capture(names, bench.x).values() for x in several]
    grids = [Grid(float(x.abs().max()) / 127, -128.0, 127.0, torch.zeros(()), None) for x in found]
    compiled = loops()
    assert compiled is not None, "install the extra `fast`"
    flats = [x.contiguous(memory_format=_format(x)) for x in found]
    bits = [_memory(x).view(np.int32) for x in flats]
    empty = kept.start("histogram")
    relus = [x for x in flats if float(x.min()) >= 0]
    print(f"{len(found)} tensors, {sum(x.numel() for x in found):,} elements", file=sys.stderr)
    return {
        "float forward": bench.float_pass,
        "simulated forward": lambda: _forward(sim.model, bench.x),
        "calls intercepted, all sites off": lambda: _forward(off.model, bench.x),
        "compiled passes alone, every activation": lambda: [on_grid(x, g) for x, g in zip(flats, grids, strict=True)],
        "activation functions that these replace": lambda: [x.clamp(0.0, 6.0) for x in relus],
        "one compiled read of every activation": lambda: [compiled.key_bounds(x) for x in bits],
        "min-max calibration on one batch": lambda: sim.compute_encodings([bench.x], progress=False),
        "counting every activation in compiled loops": lambda: [kept.update(empty, x) for x in flats],
    }  # fmt: skip


def _format(x: torch.Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _memory(x: torch.Tensor) -> np.ndarray[Any, Any]:
    dense = x if x.is_contiguous() else x.permute(0, 2, 3, 1)
    return np.asarray(dense.reshape(-1))


def _forward(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def lstm_parts(rounds: int) -> Steps:
    """An LSTM of length 100, batch 16, hidden 256: the matrix products of its steps, without anything else."""
    from recurrent_speed import Bench

    bench = Bench("LSTM", 100, 16, 256, rounds)
    off = Bench("LSTM", 100, 16, 256, rounds)
    names = [n for n, site in off.sim.quantizers.items() if site.role != "weight"]
    weights, bias = torch.randn(1024, 256), torch.randn(1024)
    columns, h, room = weights.t().contiguous(), torch.randn(16, 256), torch.empty(16, 1024)
    inner = torch.randn(1600, 1024), torch.randn(1600, 256)
    sites = [torch.randn(1600, 256) for _ in names]

    def products() -> None:
        with torch.no_grad():
            torch.nn.functional.linear(inner[1], weights, bias)
            for _ in range(100):
                torch.addmm(bias, h, columns, out=room)

    def curves() -> None:
        torch.sigmoid(inner[0][:, :768]), torch.tanh(inner[0][:, 768:]), torch.tanh(inner[1])

    def observe() -> None:
        for x in sites:
            kept.update(kept.start("minmax"), x)

    return {
        "float forward": lambda: _forward(bench.model, bench.x),
        "min-max calibration": bench.calibrate,
        "matrix products of all steps alone": products,
        "their activation functions alone, in one call each": curves,
        f"bounds of {len(names)} tensors of all steps alone": observe,
        "weights calibrated and put on their grids alone": lambda: _weights(bench),
    }  # fmt: skip


def _weights(bench: Any) -> None:
    for name, site in bench.sim.quantizers.items():
        if site.role == "weight":
            x = dict(bench.model.named_parameters())["weight_hh_l0"]
            site.quantizer.encoding = None
            site.quantizer.observe_once(x.detach())
            with torch.no_grad():
                site.quantizer.constant(x)
            del name


def times(steps: Steps, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every step, all once per round; one round that is not measured first."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items():
            taken = measure.seconds(step)
            if i:
                found[name].append(taken)
    return found


def ratios(steps: Steps, rounds: int) -> list[list[str]]:
    """Rows of the table; the first step is the float model."""
    found = times(steps, rounds)
    base = next(iter(found.values()))
    least, middle = min(base), statistics.median(base)
    return [
        [name, f"{1000 * min(t):.1f} ms", f"{min(t) / least:.2f}", f"{statistics.median(t) / middle:.2f}"]
        for name, t in found.items()
    ]


# ---- ONNX


def onnx_rows(rounds: int) -> list[list[str]]:
    """Of calibrations on 8 batches, and of an equalization, what passes in ONNX Runtime; least of the rounds for each part."""
    import onnx_rows as rows
    import onnx_speed

    bench = onnx_speed.Bench("mobilenet_v2", 224, 8, rounds)
    steps = rows.steps_of(bench)
    table, base = [], []
    for row in ("min-max", "histogram", "equalization"):
        parts: dict[str, list[float]] = defaultdict(list)
        for i in range(rounds + 1):
            base.append(measure.seconds(bench.float_pass))
            for part, taken in _in_runtime(steps[row]).items() if i else ():
                parts[part].append(taken)
        table += [(row, part, min(taken)) for part, taken in parts.items()]
    unit = min(base)
    return [[f"{row}: {part}", f"{1000 * taken:.0f} ms", f"{taken / unit:.2f}", ""] for row, part, taken in table]


def _in_runtime(step: Callable[[], Any]) -> dict[str, float]:
    """Part -> CPU seconds of one run; a profile slows what is in Python, and the calls of the runtime not at all."""
    profile = cProfile.Profile(time.process_time)
    whole = measure.seconds(step)
    profile.runcall(step)
    found = {"all, without the profile": whole, "runs of a session": 0.0, "opening sessions": 0.0}
    calls = {"run": "runs of a session", "initialize_session": "opening sessions"}
    counting = 0.0
    for (_, _, function), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "onnxruntime_pybind11_state." in function:
            part = calls.get(function.rpartition(".")[2].rstrip(">}"))
            found[part or "runs of a session"] += own if part else 0.0
        counting += own if function in ("count_bins", "key_bounds") else 0.0
    return found | ({"compiled loops over tensors": counting} if counting else {})


# ---- the default recipe


class _Clock:
    """CPU seconds by part, and peaks where they are asked for; what runs inside another part is not counted in both."""

    def __init__(self, *, peaks: bool) -> None:
        self._asked = peaks
        self.seconds: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        if self._asked:  # which takes time
            measure.forget_peak()
        start = time.process_time()
        yield
        taken = time.process_time() - start
        self.seconds[name] += taken - self._inner.pop()
        self._inner[-1] += taken
        if self._asked:
            self.peaks[name] = max(self.peaks[name], measure.peak_mib())


#: (module, function, what it does): what a part calls of another part is that one's
_PREPARING = (
    ("bitwright.torch.simulation.quantsim", "adopt", "copy of the model"),
    ("bitwright.torch.simulation.quantsim", "record", "recording run and graph"),
    ("bitwright.torch.simulation.quantsim", "QuantizationSimModel._plan", "placement"),
    ("bitwright.torch.simulation.quantsim", "place_quantizers", "quantizers"),
    ("bitwright.torch.opened", "TorchOpened._outputs_of", "recording run and graph"),
    ("bitwright.torch.opened", "what_changed", "another forward, compared"),
    ("bitwright.methods.folding.batch_norm_fold", "find_folds", "search for folds"),
    ("bitwright.methods.folding.batch_norm_fold", "_Folder.carry_out", "folds, each checked by itself"),
    ("bitwright.methods.scaling.equalize", "_factors", "search for factors"),
)


_EXPORTING = (
    ("bitwright.torch.simulation.export", "marked_onnx", "torch's exporters: trace and graph"),
    ("bitwright.export.artefacts", "to_qdq", "quantizers and codes as operators"),
    ("bitwright.export.artefacts", "strip_sites", "float model"),
    ("bitwright.export.artefacts", "bring_to", "opset"),
    ("bitwright.export.artefacts", "save_model", "both models written, with their weights"),
    ("bitwright.export.artefacts", "_write_encodings", "encodings"),
    ("bitwright.export.artefacts", "_few_enough", "samples: the simulation runs on them"),
    ("bitwright.export.artefacts", "write_samples", "samples: written"),
    ("bitwright.export.artefacts", "_self_check", "samples: the file runs on them"),
    ("bitwright.export.artefacts", "write_manifest", "manifest and hashes"),
)


@contextmanager
def _taken_apart(clock: list[_Clock], functions: Sequence[tuple[str, str, str]]) -> Iterator[None]:
    """Let ``functions`` report to the last of ``clock``."""
    undo = []
    for module, path, part in functions:
        holder: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for step in outer:
            holder = getattr(holder, step)
        original = getattr(holder, name)

        def timed(*args: Any, original: Any = original, part: str = part, **options: Any) -> Any:
            with clock[-1].part(part):
                return original(*args, **options)

        setattr(holder, name, timed)
        undo.append((holder, name, original))
    try:
        yield
    finally:
        for holder, name, original in undo:
            setattr(holder, name, original)


def preparation_rows(models: Sequence[str], rounds: int) -> list[list[str]]:
    """Creation, folding and equalization by part, beside a float forward and a copy of the same model."""
    import preparation

    table = []
    for name in models:
        rows = ("creation", "folding") if name == "chain" else ("folding", "equalization")
        steps = preparation.steps_of(name, ["float forward", "copy.deepcopy", *rows])
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        clocks: list[_Clock] = []
        for i in range(rounds + 1):
            for row, (prepare, step) in steps.items():
                given = prepare()
                gc.collect()
                clocks.append(_Clock(peaks=False))
                with _taken_apart(clocks, _PREPARING), clocks[-1].part("all else"):
                    step(given)
                parts = clocks[-1].seconds
                for part, taken in (parts | {"": sum(parts.values())}).items() if i else ():
                    found[row, part].append(taken)
        for (row, part), taken in sorted(found.items(), key=lambda item: list(steps).index(item[0][0])):
            if not (part == "all else" and row not in rows):
                title = f"{name}: {row}" + (f": {part}" if part else "")
                table.append([title, f"{min(taken):.3f} s", "", f"{statistics.median(taken):.3f} s"])
    return table


def export_rows(rounds: int) -> list[list[str]]:
    """An export with samples by part, of a module and of an ONNX model, beside a float forward of its batch."""
    import onnx_speed
    import preparation

    table = []
    for name in ("resnet18", "mobilenet_v2"):
        bench = onnx_speed.Bench(name, 224, 1, 1)
        steps = preparation.steps_of(name, ["float forward", "export"])
        sim = bench.calibrated()
        pairs = {
            "torch": tuple(partial(step, None) for _, step in steps.values()),
            "ONNX": (bench.float_one, lambda sim=sim: preparation._export(sim)),
        }
        for front_end, (forward, export) in pairs.items():
            found: dict[str, list[float]] = defaultdict(list)
            clocks: list[_Clock] = []
            base = []
            for i in range(rounds + 1):
                base.append(measure.seconds(forward))
                clocks.append(_Clock(peaks=False))
                with _taken_apart(clocks, _EXPORTING), clocks[-1].part("all else"):
                    export()
                parts = clocks[-1].seconds
                for part, taken in (parts | {"sum": sum(parts.values())}).items() if i else ():
                    found[part].append(taken)
            for part, taken in found.items():
                ratios = (f"{of(taken) / of(base):.2f}" for of in (min, statistics.median))
                table.append([f"{name}, {front_end}: {part}", f"{1000 * min(taken):.0f} ms", *ratios])
    return table


def recipe_rows(network: str, effort: str, rounds: int) -> list[list[str]]:
    """Every step of the recipe as float passes over its data, and the process's peak in it beyond the float model's."""
    import default_recipe as subject

    from bitwright.recipes.attempt import Attempt

    found = subject.case(network)
    batches, run = found.batches(0), subject.of_torch(found.model)
    whole: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, float] = {}
    originals = {name: getattr(Attempt, name) for name in ("apply", "simulate", "sqnr", "keep")}
    for i in range(rounds + 1):
        measure.forget_peak()
        base = measure.seconds(lambda: [run(batch) for batch in batches])
        before = measure.peak_mib()
        clock = _Clock(peaks=not i)

        def timed(name: str, clock: _Clock = clock) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **options: Any) -> Any:
                part = {"simulate": "calibration", "sqnr": "judge", "keep": "copies"}.get(name)
                with clock.part(part or f"step {args[0].name}"):
                    return originals[name](self, *args, **options)

            return call

        for name in originals:
            setattr(Attempt, name, timed(name))
        with clock.part("all else"):
            subject.run_of(effort, found, 0)
        if i:
            whole["float passes"].append(base)
            for name, taken in clock.seconds.items():
                whole[name].append(taken)
        else:  # later rounds use again what the allocator kept
            peaks = {name: peak - before for name, peak in clock.peaks.items()}
    base = min(whole.pop("float passes"))
    rows = [
        [name, f"{1000 * min(taken):.0f} ms", f"{min(taken) / base:.2f}", f"{peaks[name]:.0f} MiB"]
        for name, taken in whole.items()
    ]
    total = sum(min(taken) for taken in whole.values())
    return [*rows, ["sum", f"{1000 * total:.0f} ms", f"{total / base:.2f}", ""]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the file asked for."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("torch", "lstm", "preparation", "onnx", "export", "recipe"))
    parser.add_argument("--network", default="resnet20_aux", help="of the default recipe")
    parser.add_argument("--effort", default="quick", help="of the default recipe")
    models = ("chain", "resnet18", "mobilenet_v2")
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="of preparation")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    chosen = parser.parse_args(arguments)
    columns = ["", "least", "least / float", "median / float"]
    title = f"What bounds {chosen.what}"
    if chosen.what == "recipe":
        title += f": {chosen.network}, {chosen.effort}"
        columns[2:] = ["float passes", "peak beyond float"]
        rows = recipe_rows(chosen.network, chosen.effort, chosen.rounds)
    elif chosen.what == "onnx":
        rows = onnx_rows(chosen.rounds)
    elif chosen.what == "export":
        rows = export_rows(chosen.rounds)
    elif chosen.what == "preparation":
        columns[2:] = ["", "median"]
        rows = preparation_rows(chosen.models, chosen.rounds)
    else:
        rows = ratios({"torch": torch_parts, "lstm": lstm_parts}[chosen.what](chosen.rounds), chosen.rounds)
    measure.show(title, columns, rows)
    measure.save(None, chosen.markdown, title, columns, rows, {})


if __name__ == "__main__":
    main()
