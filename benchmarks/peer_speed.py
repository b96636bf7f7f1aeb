"""Cost of each step of quantization, beside AIMET, torchao (PT2E) and ModelOpt in the same process; one table."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import json
import logging
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import torch
from torch import nn
from torch_speed import SUBJECTS, Bench, Settings, training

from bitwright.torch import QuantizationSimModel, apply_reconstruction, equalize_model

HELP = """\
Time the steps of quantization in Bitwright and in the toolkits that are installed, AIMET, torchao (PT2E) and ModelOpt.

A cell is the CPU time of the whole call, everything included, over the CPU time of float forward passes of the same model:
of the same batches for calibration, of one training step in float for training steps, of one forward pass of one batch for all
else. Toolkits and float take turns in this process, one thread; the least time of the rounds is taken of each. Batch norms are
folded in every model before, except for equalization, which folds them itself. A cell says "fails" where the toolkit raises an
error, with its first line below the table, and "-" where it has no such step. Rows of numbers count the tensors that a toolkit
puts on a grid in one forward pass, and the weights that it chooses: a toolkit that leaves more in float does less. The fused
kernel of torch's encoder layers is turned off, for float too: with it AIMET and ModelOpt compute such layers in float, and their
quantizers change nothing.
"""
EXAMPLES = """\
examples:
  python benchmarks/peer_speed.py --models lstm --rounds 3
  python benchmarks/peer_speed.py --rows forward "seq_mse" --results peers.jsonl     goes on where it was stopped
  python benchmarks/peer_speed.py --results peers.jsonl --markdown benchmarks/results/peer_speed.md
"""
BATCHES = 8
ADAROUND_ITERATIONS = 100
NAMES = {"bitwright": "Bitwright", "aimet": "AIMET", "pt2e": "torchao PT2E", "modelopt": "ModelOpt"}
DISTRIBUTIONS = {"bitwright": "bitwright", "aimet": "aimet-torch", "pt2e": "torchao", "modelopt": "nvidia-modelopt"}
Work = Callable[[], measure.Step]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the progress bars and logs of other toolkits out of the output."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class Toolkit(ABC):
    """The steps of one toolkit on one model.

    A method returns what is timed, with its preparation done; ``None`` where the toolkit has no such step.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def own(self) -> nn.Module:
        return copy.deepcopy(self.bench.model)

    def run(self, model: nn.Module, batches: int = BATCHES) -> None:
        with torch.no_grad():
            for x in self.bench.batches[:batches]:
                model(x)

    def called(self, kind: type[nn.Module], acts: Callable[[nn.Module], bool] = lambda module: True) -> int:
        """Modules of a class that are called, and act, in one forward pass."""
        seen: set[nn.Module] = set()
        model = self.calibrated()
        for module in model.modules():
            if isinstance(module, kind) and acts(module):
                module.register_forward_hook(lambda module, args, output: seen.add(module))
        self.run(model, 1)
        return len(seen)

    def forward(self) -> measure.Step:
        model = self.calibrated()
        return lambda: self.run(model, 1)

    @abstractmethod
    def calibrated(self) -> nn.Module:
        """A model that computes what the quantized one will, its ranges from one batch."""

    @abstractmethod
    def calibration(self, scheme: str) -> measure.Step | None:
        """Creation and calibration on all batches."""

    def training_step(self) -> measure.Step:
        """Forward, backward and update."""
        return training(self.calibrated(), self.bench.x)

    def learned_ranges(self) -> measure.Step | None:
        """The same with ranges that train."""
        return None

    def equalization(self) -> measure.Step | None:
        """Cross-layer equalization of a copy of the model, its batch norms folded first."""
        return None

    def export(self) -> measure.Step | None:
        """A file for a runtime."""
        return None

    @abstractmethod
    def quantizers(self) -> int:
        """Tensors that the quantized model puts on a grid in one forward pass."""

    def rounded(self) -> int | None:
        """Weights of which ``seq_mse`` chooses the ranges."""
        return None

    def seq_mse(self) -> measure.Step | None:
        """Ranges of 4-bit weights by the outputs of layers."""
        return None

    def adaround(self) -> measure.Step | None:
        """Learned rounding of 4-bit weights."""
        return None


class Bitwright(Toolkit):
    """Ours, by its own names."""

    def sim(self, scheme: str = "min_max", model: nn.Module | None = None, **options: Any) -> QuantizationSimModel:
        model = self.bench.model if model is None else model
        return QuantizationSimModel(model, dummy_input=self.bench.x, quant_scheme=scheme, **options)

    def calibrated(self) -> nn.Module:
        sim = self.sim()
        sim.compute_encodings(self.bench.batches[:1], progress=False)
        return sim.model

    def quantizers(self) -> int:
        return sum(site.enabled for site in self.sim().quantizers.values())

    def calibration(self, scheme: str) -> measure.Step:
        return lambda: self.sim(scheme).compute_encodings(self.bench.batches, progress=False)

    def learned_ranges(self) -> measure.Step:
        sim = self.sim()
        sim.compute_encodings(self.bench.batches[:1], progress=False)
        sim.learn_ranges()
        return training(sim.model, self.bench.x, sim.range_parameters())

    def equalization(self) -> measure.Step:
        return lambda: equalize_model(copy.deepcopy(self.bench.original), dummy_input=self.bench.x)

    def export(self) -> measure.Step:
        sim = self.sim()
        sim.compute_encodings(self.bench.batches[:1], progress=False)

        def step() -> None:
            with tempfile.TemporaryDirectory() as folder:
                sim.export(folder, "model", self.bench.x)

        return step

    def rounded(self) -> int:
        sim = self.sim(default_param_bw=4)
        return len(apply_reconstruction(sim, self.bench.batches[:1], "seq_mse", progress=False))

    def seq_mse(self) -> measure.Step:
        def step() -> None:
            apply_reconstruction(self.sim(default_param_bw=4), self.bench.batches, "seq_mse", progress=False)

        return step

    def adaround(self) -> measure.Step:
        def step() -> None:
            sim = self.sim(default_param_bw=4)
            apply_reconstruction(sim, self.bench.batches, iterations=ADAROUND_ITERATIONS, progress=False)

        return step


class Aimet(Toolkit):
    """AIMET 2.x for PyTorch."""

    SCHEMES = {
        "min_max": "min_max",
        "tf_enhanced": "post_training_tf_enhanced",
        "percentile": "post_training_percentile",
    }

    def sim(self, scheme: str = "min_max", bits: int = 8) -> Any:
        from aimet_torch.common.defs import QuantScheme
        from aimet_torch.quantsim import QuantizationSimModel as Sim

        chosen = getattr(QuantScheme, self.SCHEMES[scheme])
        sim = Sim(self.own(), self.bench.x, quant_scheme=chosen, default_param_bw=bits)
        if scheme == "percentile":
            sim.set_percentile_value(99.99)
        return sim

    def encode(self, sim: Any, batches: int) -> Any:
        sim.compute_encodings(lambda model: self.run(model, batches))
        return sim

    def calibrated(self) -> nn.Module:
        return self.encode(self.sim(), 1).model

    def quantizers(self) -> int:
        from aimet_torch.v2.quantization.base import QuantizerBase

        return self.called(QuantizerBase)

    def calibration(self, scheme: str) -> measure.Step:
        return lambda: self.encode(self.sim(scheme), BATCHES)

    def learned_ranges(self) -> measure.Step:
        return self.training_step()  # quantizers of AIMET always train

    def equalization(self) -> measure.Step:
        from aimet_torch.cross_layer_equalization import equalize_model as equalize

        return lambda: equalize(copy.deepcopy(self.bench.original), dummy_input=self.bench.x)

    def export(self) -> measure.Step:
        from aimet_torch import onnx

        sim = self.encode(self.sim(), 1)

        def step() -> None:
            with tempfile.TemporaryDirectory() as folder:
                onnx.export(sim, self.bench.x, str(Path(folder, "model.onnx")), dynamo=True)

        return step

    def rounded(self) -> int:
        from aimet_torch.seq_mse import SUPPORTED_MODULES

        return sum(isinstance(module, SUPPORTED_MODULES) for module in self.sim().model.modules())

    def seq_mse(self) -> measure.Step:
        from aimet_torch.seq_mse import apply_seq_mse as apply

        return lambda: apply(self.sim(bits=4), self.bench.batches)

    def adaround(self) -> measure.Step:
        from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters

        def step() -> None:
            settings = AdaroundParameters(self.bench.batches, BATCHES, default_num_iterations=ADAROUND_ITERATIONS)
            with tempfile.TemporaryDirectory() as folder:
                Adaround.apply_adaround(self.own(), self.bench.x, settings, folder, "model", default_param_bw=4)

        return step


class Pt2e(Toolkit):
    """PyTorch's PT2E flow with the x86 inductor quantizer of torchao."""

    def quantizer(self, qat: bool) -> Any:
        from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
            X86InductorQuantizer,
            get_default_x86_inductor_quantization_config,
        )

        return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_qat=qat))

    def prepared(self, batches: int, qat: bool = False) -> Any:
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

        program = torch.export.export(self.own(), (self.bench.x,)).module()
        model = (prepare_qat_pt2e if qat else prepare_pt2e)(program, self.quantizer(qat))
        self.run(model, batches)
        return model

    def calibrated(self) -> nn.Module:
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

        return convert_pt2e(self.prepared(1))

    def quantizers(self) -> int:
        return sum("dequantize_per" in str(node.target) for node in self.calibrated().graph.nodes)

    def calibration(self, scheme: str) -> measure.Step | None:
        # its observers count histograms
        return None if scheme == "min_max" else lambda: self.prepared(BATCHES)

    def training_step(self) -> measure.Step:
        from torchao.quantization.pt2e import allow_exported_model_train_eval

        model = allow_exported_model_train_eval(self.prepared(1, qat=True))
        return training(model, self.bench.x)


class ModelOpt(Toolkit):
    """NVIDIA's ModelOpt, INT8 with a range per tensor for activations and per channel for weights."""

    def quantized(self, batches: int) -> Any:
        import modelopt.torch.quantization as mtq

        return mtq.quantize(self.own(), mtq.INT8_DEFAULT_CFG, lambda model: self.run(model, batches))

    def calibrated(self) -> nn.Module:
        return self.quantized(1)

    def quantizers(self) -> int:
        from modelopt.torch.quantization.nn import TensorQuantizer

        return self.called(TensorQuantizer, lambda quantizer: bool(quantizer.is_enabled))

    def calibration(self, scheme: str) -> measure.Step | None:
        # the configuration takes the largest value
        return (lambda: self.quantized(BATCHES)) if scheme == "min_max" else None


TOOLKITS: dict[str, tuple[str, type[Toolkit]]] = {
    "bitwright": ("bitwright", Bitwright),
    "aimet": ("aimet_torch", Aimet),
    "pt2e": ("torchao", Pt2e),
    "modelopt": ("modelopt", ModelOpt),
}
# row -> (what is timed, the float work it is divided by)
ROWS: dict[str, tuple[Callable[[Any], measure.Step | None], str]] = {
    "forward": (lambda kit: kit.forward(), "forward"),
    "min-max": (lambda kit: kit.calibration("min_max"), "batches"),
    "tf_enhanced / histogram": (lambda kit: kit.calibration("tf_enhanced"), "batches"),
    "percentile": (lambda kit: kit.calibration("percentile"), "batches"),
    "training step": (lambda kit: kit.training_step(), "training"),
    "training step, learned ranges": (lambda kit: kit.learned_ranges(), "training"),
    "equalization": (lambda kit: kit.equalization(), "forward"),
    "export": (lambda kit: kit.export(), "forward"),
    "seq_mse": (lambda kit: kit.seq_mse(), "forward"),
    "adaround": (lambda kit: kit.adaround(), "forward"),
}
COUNTS: dict[str, Callable[[Any], int | None]] = {
    "tensors on a grid, number": lambda kit: kit.quantizers(),
    "weights that seq_mse treats, number": lambda kit: kit.rounded(),
}
LONG = ("seq_mse", "adaround", "export", "equalization")  # at most two rounds, without one that is not measured
FIRST_ONLY = {"equalization": ("resnet18", "mobilenet_v2")}  # rows that need batch norms


def base_of(bench: Bench, unit: str) -> measure.Step:
    """The float work that a row is divided by."""
    if unit == "training":
        return training(copy.deepcopy(bench.model), bench.x)

    def step() -> None:
        with torch.no_grad():
            for x in bench.batches if unit == "batches" else bench.batches[:1]:
                bench.model(x)

    return step


def first_line(error: Exception) -> str:
    """What a cell that fails says below the table."""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def measured(model: str, row: str, kits: Sequence[str], rounds: int) -> dict[str, Any]:
    """Ratio or error of every toolkit on one row; float and toolkits take turns."""
    bench = Bench(model, Settings(False, True, rounds, BATCHES))
    make, unit = ROWS[row]
    base, found = base_of(bench, unit), dict[str, Any]()
    steps: dict[str, measure.Step] = {}
    for kit in kits:
        try:
            with quiet():
                step = make(TOOLKITS[kit][1](bench))
                if step is not None and row not in LONG:
                    step()
        except Exception as error:  # the failure of a toolkit is a result of the table
            found[kit] = first_line(error)
            continue
        if step is not None:
            steps[kit] = step
    base()
    floats: list[float] = []
    taken: dict[str, list[float]] = {kit: [] for kit in steps}
    for _ in range(rounds if row not in LONG else min(rounds, 2)):
        for kit, step in list(steps.items()):
            floats.append(measure.seconds(base))
            try:
                with quiet():
                    taken[kit].append(measure.seconds(step))
            except Exception as error:  # as above
                found[kit] = first_line(error)
                del steps[kit], taken[kit]
    return {**found, **{kit: min(times) / min(floats) for kit, times in taken.items()}}


def counted(model: str, row: str, kits: Sequence[str]) -> dict[str, Any]:
    """What a row of numbers counts, or the error, of every toolkit."""
    bench, found = Bench(model, Settings(False, True, 1, BATCHES)), dict[str, Any]()
    for kit in kits:
        try:
            with quiet():
                found[kit] = COUNTS[row](TOOLKITS[kit][1](bench))
        except Exception as error:  # the failure of a toolkit is a result of the table
            found[kit] = first_line(error)
    return found


def installed() -> list[str]:
    return [kit for kit, (package, _) in TOOLKITS.items() if importlib.util.find_spec(package) is not None]


def table(rows: Sequence[dict[str, Any]], kits: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Cells of the table, and the errors that go below it."""
    lines, notes = [], []
    for row in rows:
        cells = []
        for kit in kits:
            value = row["ratios"].get(kit)
            if isinstance(value, str):
                notes.append(f"{NAMES[kit]}, {row['row']}, {row['model']}: {value[:160]}")
            shown = "fails" if isinstance(value, str) else str(value) if isinstance(value, int) else f"{value or 0:.2f}"
            cells.append("-" if value is None else shown)
        lines.append([f"{row['model']}, {row['row']}", *cells])
    return lines, notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not in the results file yet, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rows", nargs="+", choices=[*COUNTS, *ROWS], default=[*COUNTS, *ROWS], metavar="ROW")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines; rows in it are not measured again")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    chosen = parser.parse_args(arguments)
    torch.backends.mha.set_fastpath_enabled(False)
    kits = installed()
    known = {(row["model"], row["row"]): row for row in (measure.read_rows(chosen.results) if chosen.results else [])}
    for model in chosen.models:
        for row in chosen.rows:
            if (model, row) in known or model not in FIRST_ONLY.get(row, SUBJECTS):
                continue
            found = counted(model, row, kits) if row in COUNTS else measured(model, row, kits, chosen.rounds)
            known[model, row] = {"model": model, "row": row, "ratios": found}
            print(json.dumps(known[model, row]), file=sys.stderr, flush=True)
            if chosen.results:
                with chosen.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[model, row]) + "\n")
    order = list(SUBJECTS), [*COUNTS, *ROWS]
    lines, notes = table([known[key] for key in sorted(known, key=lambda k: tuple(map(list.index, order, k)))], kits)
    columns = ["CPU time over float", *(NAMES[kit] for kit in kits)]
    measure.show("Steps of quantization, everything included", columns, lines)
    if chosen.markdown:
        versions = ", ".join(f"{NAMES[kit]} {importlib.metadata.version(DISTRIBUTIONS[kit])}" for kit in kits)
        told = HELP.split("\n\n", 1)[1] + f"\n{versions}. Command: `python benchmarks/peer_speed.py`."
        title = "Steps of quantization beside other toolkits, CPU time over float"
        text = measure.markdown(title, columns, lines, told)
        measure.write(chosen.markdown, text + "".join(f"\n- {note}" for note in notes) + ("\n" if notes else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
