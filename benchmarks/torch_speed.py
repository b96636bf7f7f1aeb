"""What quantization costs on top of the float model: one table of ratios, one thread, one command."""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bitwright.core.numerics.ranges import choose_range_of
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms
from tests.support.zoo import Encoder, MobileNetV2, ResNet18

HELP = """\
Time a quantization simulation against the float model it simulates.

A ratio of 1.30 x means: 30 % slower than the float model. Both run in this process on one thread, one right
after the other in alternating order, and the median over the rounds is shown. The float model has its batch
norms folded, as the simulated one has: the faster baseline. --unfolded keeps batch norms in both.
"""

EXAMPLES = """\
rows of the table:
  float forward     ms of one batch in float, the unit of the ratios below
  creation          seconds of QuantizationSimModel(model, dummy_input)
  min-max           compute_encodings on some batches / float forwards of the same batches
  histogram         the same with quant_scheme="tf_enhanced"
  whole min-max     creation and min-max together: all that a user waits for / the same float forwards
  weight ranges (s) the fixed part of histogram: seconds of the range search of all weights, done once per
                    calibration whatever the number of batches
  forward           sim.model(x) / model(x), without gradients
  training step     forward, backward, SGD step in train mode / the same in float
  learned ranges    the same with sim.learn_ranges(), whose parameters are stepped too
  folding           seconds of fold_all_batch_norms on the model
  export            seconds of sim.export
  memory            peak of creation, histogram calibration and a forward / peak of float forwards, both with
                    the imported program taken off; each in a process of its own
  memory, training  the same for training steps
  memory, learned   the same with learned ranges
  tensors, training the same of tensors alone, without what an allocator keeps from calibration
  tensors, learned  the same with learned ranges

examples:
  python benchmarks/torch_speed.py                        the whole table, about ten minutes
  python benchmarks/torch_speed.py --quick                half the image size, fewer rounds, a minute or two
  python benchmarks/torch_speed.py --models mobilenet_v2 --rows forward histogram
  python benchmarks/torch_speed.py --markdown benchmarks/results/torch_speed.md --json speed.json
"""


@dataclass(frozen=True)
class Subject:
    """A model and the shape of its input: at full size, and with ``--quick``."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    quick: tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    quick: bool
    fold: bool
    rounds: int
    batches: int


class Recurrent(nn.Module):
    """Two LSTM layers over a sequence, and a classifier of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, 256, 2, batch_first=True), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, 128]`` -> ``[B, T, 64]``."""
        return self.head(self.lstm(x)[0])


SUBJECTS: dict[str, Subject] = {
    "resnet18": Subject(ResNet18, (4, 3, 224, 224), (4, 3, 112, 112)),
    "mobilenet_v2": Subject(MobileNetV2, (4, 3, 224, 224), (4, 3, 112, 112)),
    "encoder": Subject(Encoder, (4, 128, 256), (4, 64, 256)),
    "lstm": Subject(Recurrent, (16, 64, 128), (16, 32, 128)),
}

# (row, model) -> (AIMET 2.42 on the same kind of machine, our target), as ratios to the float model
REFERENCE: dict[tuple[str, str], tuple[float, float]] = {
    ("forward", "resnet18"): (1.85, 1.3),
    ("forward", "mobilenet_v2"): (3.5, 1.8),
    ("min-max", "resnet18"): (1.6, 1.2),
    ("min-max", "mobilenet_v2"): (3.4, 1.5),
    ("histogram", "resnet18"): (6.4, 2.0),
    ("histogram", "mobilenet_v2"): (38.0, 4.0),
    ("training step", "resnet18"): (1.7, 1.5),
    ("training step", "mobilenet_v2"): (3.5, 2.5),
    ("learned ranges", "resnet18"): (1.7, 1.5),
    ("learned ranges", "mobilenet_v2"): (3.5, 2.2),
}


class Bench:
    """One subject, built and folded once, with its input batches."""

    def __init__(self, name: str, settings: Settings) -> None:
        subject = SUBJECTS[name]
        self.settings = settings
        torch.manual_seed(0)
        shape = subject.quick if settings.quick else subject.shape
        self.batches = [torch.randn(shape) for _ in range(settings.batches)]
        self.original = subject.build().eval()
        _give_statistics(self.original)
        self.model = copy.deepcopy(self.original)
        if settings.fold:
            fold_all_batch_norms(self.model, dummy_input=self.x)

    @property
    def x(self) -> Tensor:
        return self.batches[0]

    def sim(self, scheme: str = "min_max") -> QuantizationSimModel:
        return QuantizationSimModel(
            self.model, dummy_input=self.x, quant_scheme=scheme, default_output_bw=8, default_param_bw=8
        )

    def calibrated(self) -> QuantizationSimModel:
        sim = self.sim()
        sim.compute_encodings(self.batches[:1], progress=False)
        return sim

    def float_pass(self) -> None:
        with torch.no_grad():
            for x in self.batches:
                self.model(x)

    def ratio(self, base: measure.Step, ours: measure.Step) -> float:
        return measure.ratio(base, ours, self.settings.rounds)

    # -- the rows

    def float_forward(self) -> float:
        with torch.no_grad():
            return 1000 * measure.median_seconds(lambda: self.model(self.x), self.settings.rounds)

    def creation(self) -> float:
        return measure.seconds(self.sim)

    def min_max(self) -> float:
        sim = self.sim()
        return self.ratio(self.float_pass, lambda: sim.compute_encodings(self.batches, progress=False))

    def histogram(self) -> float:
        sim = self.sim("tf_enhanced")
        return self.ratio(self.float_pass, lambda: sim.compute_encodings(self.batches, progress=False))

    def whole_min_max(self) -> float:
        return self.ratio(self.float_pass, lambda: self.sim().compute_encodings(self.batches, progress=False))

    def weight_ranges(self) -> float:
        sim = self.sim("tf_enhanced")
        parameters = dict(sim.model.named_parameters())
        weights = [
            (parameters[name].detach(), quantizer.spec)
            for name, quantizer in sim.quantizers.items()
            if quantizer.role == "weight" and name in parameters
        ]
        assert weights, "no quantizer has the name of a parameter"

        def search() -> None:
            for weight, spec in weights:
                choose_range_of(weight, spec, spec.granularity)

        return measure.median_seconds(search, self.settings.rounds)

    def forward(self) -> float:
        sim = self.calibrated()
        with torch.no_grad():
            return self.ratio(lambda: self.model(self.x), lambda: sim.model(self.x))

    def training_step(self) -> float:
        plain, quantized = copy.deepcopy(self.model), self.calibrated().model
        return self.ratio(training(plain, self.x), training(quantized, self.x))

    def learned_step(self) -> float:
        plain, sim = copy.deepcopy(self.model), self.calibrated()
        sim.learn_ranges()
        return self.ratio(training(plain, self.x), training(sim.model, self.x, sim.range_parameters()))

    def folding(self) -> float:
        model = copy.deepcopy(self.original)
        return measure.seconds(lambda: fold_all_batch_norms(model, dummy_input=self.x))

    def export(self) -> float:
        sim = self.calibrated()
        with tempfile.TemporaryDirectory() as folder:
            return measure.seconds(lambda: sim.export(folder, "model", self.x))


def _give_statistics(model: nn.Module) -> None:
    """Statistics of one random batch for the batch norms, without the cost of running one."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)


def training(model: nn.Module, x: Tensor, ranges: Sequence[nn.Parameter] = ()) -> measure.Step:
    """One training step of ``model`` on ``x``: forward, backward, an update too small to make it drift."""
    model.train()
    groups = [{"params": list(model.parameters())}, {"params": list(ranges), "lr": 1e-9}]
    optimizer = torch.optim.SGD(groups, lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


# ------------------------------------------------------------------------------------------------------------
# memory: one process per phase


def _float_phase(bench: Bench) -> None:
    bench.float_pass()


def _sim_phase(bench: Bench) -> None:
    sim = bench.sim("tf_enhanced")
    sim.compute_encodings(bench.batches, progress=False)
    with torch.no_grad():
        sim.model(bench.x)


def _train(model: nn.Module, x: Tensor, ranges: Sequence[nn.Parameter] = ()) -> None:
    step = training(model, x, ranges)
    step()
    step()


def _simulated(bench: Bench) -> QuantizationSimModel:
    """The simulation alone: whoever trains it does not keep the float model that it was copied from."""
    sim = bench.calibrated()
    del bench.model, bench.original
    gc.collect()
    return sim


def _float_step(bench: Bench) -> measure.Step:
    del bench.original
    return training(bench.model, bench.x)


def _fixed_step(bench: Bench) -> measure.Step:
    return training(_simulated(bench).model, bench.x)


def _learned_step(bench: Bench) -> measure.Step:
    sim = _simulated(bench)
    sim.learn_ranges()
    return training(sim.model, bench.x, sim.range_parameters())


STEPS = {"float": _float_step, "sim": _fixed_step, "learned": _learned_step}
PHASES = ("float", "sim", *(f"{kind}-{what}" for kind in STEPS for what in ("training", "tensors")))


def _live_tensors(step: measure.Step) -> float:
    """MiB of all tensors at the fullest moment of a step: those that stay after it, and what it adds at most."""
    step()
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    recorder = recorded.profiler
    assert recorder is not None
    events = [e for e in recorder.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    added = max(itertools.accumulate(event.nbytes() for event in events))
    return (sum(storages.values()) + added) / 2**20


class _Small(nn.Module):
    """A layer of every kind that the subjects have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lstm = nn.Conv2d(4, 8, 3, padding=1), nn.LSTM(8, 16, batch_first=True)
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 4, H, W]`` -> ``[B, H, 16]``."""
        y = self.lstm(nn.functional.relu6(self.conv(x)).mean(3).transpose(1, 2))[0]
        return y + nn.functional.gelu(self.fc(self.norm(y)))


def _load_program() -> None:
    """Steps of a small model: what a process loads once, the compiler of loops among it, is no memory of a step."""
    x = torch.randn(8, 4, 32, 32)
    sim = QuantizationSimModel(_Small().eval(), x)
    sim.compute_encodings([x], progress=False)
    _train(sim.model, x)
    sim.learn_ranges()
    _train(sim.model, x, sim.range_parameters())


def run_phase(name: str, phase: str, settings: Settings) -> float:
    """MiB that ``phase`` needed above the program with its compiled loops, or those of its tensors."""
    kind, _, what = phase.partition("-")
    if what == "tensors":
        return _live_tensors(STEPS[kind](Bench(name, settings)))
    if what:
        _load_program()
        measure.forget_peak()
    imported = measure.peak_mib()
    bench = Bench(name, settings)
    measure.forget_peak()  # folding is not part of the phase
    if what:
        step = STEPS[kind](bench)
        step()
        step()
    else:
        {"float": _float_phase, "sim": _sim_phase}[kind](bench)
    return measure.peak_mib() - imported


def memory(name: str, settings: Settings, base: str, ours: str) -> dict[str, float]:
    """Peak MiB of the two phases, each in its own process, and their ratio."""
    found = {}
    for phase in (base, ours):
        options = ["--phase", phase, "--models", name, "--batches", str(settings.batches)]
        options += ["--quick"] * settings.quick + ["--unfolded"] * (not settings.fold)
        found[phase] = float(measure.in_fresh_process(__file__, *options))
    return {**found, "ratio": found[ours] / found[base]}


# ------------------------------------------------------------------------------------------------------------
# the table

# row -> (how to measure it, how to print it)
ROWS: dict[str, tuple[Callable[[Bench], float], str]] = {
    "float forward": (Bench.float_forward, "{:.1f} ms"),
    "creation": (Bench.creation, "{:.2f} s"),
    "min-max": (Bench.min_max, "{:.2f} x"),
    "histogram": (Bench.histogram, "{:.2f} x"),
    "whole min-max": (Bench.whole_min_max, "{:.2f} x"),
    "weight ranges (s)": (Bench.weight_ranges, "{:.3f} s"),
    "forward": (Bench.forward, "{:.2f} x"),
    "training step": (Bench.training_step, "{:.2f} x"),
    "learned ranges": (Bench.learned_step, "{:.2f} x"),
    "folding": (Bench.folding, "{:.2f} s"),
    "export": (Bench.export, "{:.2f} s"),
}
MEMORY_ROWS = {
    "memory": ("float", "sim"),
    "memory, training": ("float-training", "sim-training"),
    "memory, learned": ("float-training", "learned-training"),
    "tensors, training": ("float-tensors", "sim-tensors"),
    "tensors, learned": ("float-tensors", "learned-tensors"),
}


def measure_model(name: str, rows: Sequence[str], settings: Settings) -> dict[str, Any]:
    """The wanted rows of one model: a number, or for memory the two sizes and their ratio."""
    bench, found = Bench(name, settings), {}
    for row in rows:
        print(f"{name}: {row} ...", file=sys.stderr, flush=True)
        found[row] = memory(name, settings, *MEMORY_ROWS[row]) if row in MEMORY_ROWS else ROWS[row][0](bench)
    return found


def cell(row: str, name: str, value: Any) -> str:
    """A number with its unit, and beside it AIMET's and the target where there are such."""
    if row in MEMORY_ROWS:
        base, ours = MEMORY_ROWS[row]
        return f"{value['ratio']:.2f} x  ({value[base]:.0f} -> {value[ours]:.0f} MiB)"
    text = ROWS[row][1].format(value)
    if (row, name) in REFERENCE:
        aimet, target = REFERENCE[row, name]
        text += f"  (target {target}, AIMET {aimet})"
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = [*ROWS, *MEMORY_ROWS]
    parser.add_argument(
        "--quick", action="store_true", help="smaller inputs, fewer rounds: for a look, not for a record"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=SUBJECTS,
        default=list(SUBJECTS),
        metavar="NAME",
        help="of " + ", ".join(SUBJECTS),
    )
    parser.add_argument(
        "--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help='only these, e.g. forward "training step"'
    )
    parser.add_argument("--rounds", type=int, help="rounds per ratio (7; 5 with --quick); raise it on a busy machine")
    parser.add_argument("--batches", type=int, help="calibration batches of 4 (16; 4 with --quick)")
    parser.add_argument("--unfolded", action="store_true", help="keep batch norms, in the float model too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)  # what the memory rows start themselves
    options = parser.parse_args(arguments)
    for name in ("rounds", "batches"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    options = parse(arguments)
    quick = options.quick
    settings = Settings(
        quick, not options.unfolded, options.rounds or (5 if quick else 7), options.batches or (4 if quick else 16)
    )
    if options.phase:
        print(json.dumps(run_phase(options.models[0], options.phase, settings)))
        return
    found = {name: measure_model(name, options.rows, settings) for name in options.models}
    size = "quick look" if quick else "batch 4, 224x224; encoder 4x128x256"
    title = f"Cost of W8A8 simulation against the float model ({size}, one thread)"
    columns = ["", *options.models]
    rows = [[row, *(cell(row, name, found[name][row]) for name in options.models)] for row in options.rows]
    measure.show(title, columns, rows)
    measure.save(options.json, options.markdown, title, columns, rows, {"settings": vars(settings), "models": found})


if __name__ == "__main__":
    main()
