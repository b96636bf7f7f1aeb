"""What quantization of ONNX models costs on top of the float ONNX Runtime session: ratios, one thread, one command."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import onnx
import onnxruntime as ort
import torch

from bitwright.onnx import QuantizationSimModel, check_model, fold_all_batch_norms
from tests.support.zoo import MobileNetV2, ResNet18

HELP = """\
Time the simulation of an ONNX model against the float ONNX Runtime session of the same model, batch norms folded.

Both run in this process on one thread, one right after the other in alternating order; the median of the rounds' ratios
is shown. Calibration counts all that compute_encodings does on 32 batches, weights and the opening of its session included.

rows of the table:
  float forward          ms of one batch in float
  creation               seconds of QuantizationSimModel(model, dummy_input)
  forward                sim.run(x) / float session
  min-max                compute_encodings on the batches / float session on the same batches
  histogram              the same with quant_scheme="percentile"
  histogram, numpy only  the same as in a process that has not loaded torch, which counts faster where it is loaded
  min-max, one batch     seconds of compute_encodings on a single batch: nearly all of it is spent once
  histogram, one batch   the same with quant_scheme="percentile"
  export                 seconds of sim.export
  doctor                 check_model on some healthy batches / float session on the same batches
  diagnosis              seconds of check_model on one batch with a NaN in one sample
  integer file           the exported file at the default level / float session: below 1 is a speed-up
"""

MODELS: dict[str, Callable[[], torch.nn.Module]] = {"resnet18": ResNet18, "mobilenet_v2": MobileNetV2}
TARGETS = {
    ("forward", "resnet18"): 1.25, ("forward", "mobilenet_v2"): 1.8, ("min-max", "resnet18"): 1.2,
    ("min-max", "mobilenet_v2"): 1.8, ("histogram", "resnet18"): 1.5, ("histogram", "mobilenet_v2"): 3.0,
    ("histogram, numpy only", "resnet18"): 1.5, ("histogram, numpy only", "mobilenet_v2"): 3.0,
}  # fmt: skip


class Bench:
    """One model, exported and folded once, with its input batches."""

    def __init__(self, name: str, size: int, batches: int, rounds: int, samples: int = 4) -> None:
        torch.manual_seed(0)
        self.rounds = rounds
        x = torch.randn(samples, 3, size, size)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            torch.onnx.export(
                MODELS[name]().eval(), (x,), path, input_names=["x"], opset_version=21, dynamo=True, verbose=False
            )
            self.model = onnx.load(path)
        random = np.random.default_rng(0)
        self.batches = [
            {"x": random.standard_normal((samples, 3, size, size)).astype(np.float32)} for _ in range(batches)
        ]
        fold_all_batch_norms(self.model, self.batches[0])
        self.float_session = session(self.model)

    def sim(self, scheme: str = "min_max") -> QuantizationSimModel:
        return QuantizationSimModel(self.model, self.batches[0], scheme, threads=1)

    def calibrated(self) -> QuantizationSimModel:
        sim = self.sim()
        sim.compute_encodings(self.batches[:1], progress=False)
        return sim

    def float_pass(self) -> None:
        for feeds in self.batches:
            self.float_session.run(None, feeds)

    def float_one(self) -> None:
        self.float_session.run(None, self.batches[0])

    def float_forward(self) -> float:
        return 1000 * measure.median_seconds(self.float_one, self.rounds)

    def creation(self) -> float:
        return measure.seconds(self.sim)

    def forward(self) -> float:
        sim = self.calibrated()
        return measure.ratio(self.float_one, lambda: sim.run(self.batches[0]), self.rounds)

    def calibration(self, scheme: str) -> float:
        sim = self.sim(scheme)
        return measure.ratio(
            self.float_pass, lambda: sim.compute_encodings(self.batches, progress=False), max(2, self.rounds // 2)
        )

    def without_torch(self, scheme: str) -> float:
        hidden = sys.modules.pop("torch")
        try:
            return self.calibration(scheme)
        finally:
            sys.modules["torch"] = hidden

    def one_batch(self, scheme: str) -> float:
        sim = self.sim(scheme)
        return measure.median_seconds(lambda: sim.compute_encodings(self.batches[:1], progress=False), self.rounds)

    def export(self) -> float:
        sim = self.calibrated()
        with tempfile.TemporaryDirectory() as folder:
            return measure.seconds(lambda: sim.export(folder, "model"))

    def doctor(self) -> float:
        check = lambda: check_model(self.model, self.batches, threads=1, progress=False)  # noqa: E731
        assert check().ok
        return measure.ratio(self.float_pass, check, max(2, self.rounds // 2))

    def diagnosis(self) -> float:
        bad = self.batches[0]["x"].copy()
        bad[2, 0, 5, 5] = np.nan
        check = lambda: check_model(self.model, [{"x": bad}], threads=1, progress=False)  # noqa: E731
        culprit = check().culprit
        assert culprit is not None and culprit.sample == 2
        return measure.seconds(check)

    def integer_file(self) -> float:
        with tempfile.TemporaryDirectory() as folder:
            exported = self.calibrated().export(folder, "model", samples=False)
            integer = session(onnx.load(exported.qdq))
        return measure.ratio(self.float_one, lambda: integer.run(None, self.batches[0]), self.rounds)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """A default session on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


ROWS: dict[str, tuple[Callable[[Bench], float], str]] = {
    "float forward": (Bench.float_forward, "{:.1f} ms"),
    "creation": (Bench.creation, "{:.2f} s"),
    "forward": (Bench.forward, "{:.2f} x"),
    "min-max": (lambda bench: bench.calibration("min_max"), "{:.2f} x"),
    "histogram": (lambda bench: bench.calibration("percentile"), "{:.2f} x"),
    "histogram, numpy only": (lambda bench: bench.without_torch("percentile"), "{:.2f} x"),
    "min-max, one batch": (lambda bench: bench.one_batch("min_max"), "{:.2f} s"),
    "histogram, one batch": (lambda bench: bench.one_batch("percentile"), "{:.2f} s"),
    "export": (Bench.export, "{:.2f} s"),
    "doctor": (Bench.doctor, "{:.2f} x"),
    "diagnosis": (Bench.diagnosis, "{:.2f} s"),
    "integer file": (Bench.integer_file, "{:.2f} x"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller inputs, fewer rounds and batches")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    size, batches, rounds = (96, 4, 5) if options.quick else (224, 32, 7)
    found: dict[str, dict[str, float]] = {}
    for name in options.models:
        bench = Bench(name, size, batches, rounds)
        found[name] = {}
        for row in options.rows:
            print(f"{name}: {row} ...", file=sys.stderr, flush=True)
            found[name][row] = ROWS[row][0](bench)
    title = f"Cost of W8A8 simulation of ONNX models (batch 4, {size}x{size}, one thread)"
    rows = [[row, *(_cell(row, name, found[name][row]) for name in options.models)] for row in options.rows]
    measure.show(title, ["", *options.models], rows)
    raw: Any = {"size": size, "batches": batches, "rounds": rounds, "models": found}
    measure.save(options.json, options.markdown, title, ["", *options.models], rows, raw)


def _cell(row: str, name: str, value: float) -> str:
    text = ROWS[row][1].format(value)
    return f"{text}  (target {TARGETS[row, name]})" if (row, name) in TARGETS else text


if __name__ == "__main__":
    main()
