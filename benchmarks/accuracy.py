"""What post-training methods do to the accuracy of trained networks, in PyTorch and as ONNX.

    python benchmarks/accuracy.py                       # everything, some twenty minutes on one core
    python benchmarks/accuracy.py --models mobilenet_v2_cifar --front-ends torch
    python benchmarks/accuracy.py --quick               # few samples, for a first look

Needs the developer data set (see tests/data.py). A row of ``ROWS`` is a name, the models it is for, the preset and the
steps; adding a method is adding a row, and a step that is new a function in ``TorchRun`` and ``OnnxRun``.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import onnx
import onnxruntime
import torch
from torch import Tensor

import bitwright.onnx.ptq as onnx_ptq
import bitwright.torch.ptq as torch_ptq
from bitwright import onnx as bw_onnx
from bitwright import torch as bw_torch
from bitwright.algorithms.methods import METHODS
from tests import data


@dataclass(frozen=True)
class Task:
    """A trained network with its data.

    Attributes:
        batches: calibration data.
        score: (model as a function of a batch) -> metric.
        dynamo: which exporter writes it.
    """

    name: str
    batches: tuple[Tensor, ...]
    score: Callable[[Callable[[Tensor], Tensor]], float]
    dynamo: bool = False


def image_task(name: str, calibration: Tensor, images: data.Images) -> Task:
    return Task(name, tuple(calibration.split(64)), lambda model: data.accuracy(model, images))


def tasks(quick: bool) -> dict[str, Callable[[], Task]]:
    """Networks by name; the data are read when one is asked for."""
    some = 500 if quick else 2000
    few = slice(0, 16 if quick else 128)
    return {
        "mobilenet_v2_cifar": lambda: image_task(
            "mobilenet_v2_cifar", data.cifar("train").x[:512], data.cifar()[:some]
        ),
        "mobilenet_v1_025": lambda: image_task(
            "mobilenet_v1_025", data.imagenet("calibration").x, data.imagenet()[: some // 5]
        ),
        "resnet20_aux": lambda: image_task("resnet20_aux", data.cifar("train").x[:512], data.cifar()[:some]),
        "stories260k": lambda: Task(
            "stories260k",
            tuple(data.stories("calib")[:, :-1].split(8)),
            lambda model: data.perplexity(model, data.stories()[few]),
            dynamo=True,
        ),
    }


CONVOLUTIONAL = ("mobilenet_v2_cifar", "mobilenet_v1_025", "resnet20_aux")
LANGUAGE = ("stories260k",)
# label, networks, preset, steps
ROWS: list[tuple[str, Sequence[str], str, Sequence[str]]] = [
    ("W8A8 per tensor", CONVOLUTIONAL, "w8a8_per_tensor", ["fold"]),
    ("+ equalization", CONVOLUTIONAL, "w8a8_per_tensor", ["equalize"]),
    (
        "+ equalization, bias correction",
        CONVOLUTIONAL,
        "w8a8_per_tensor",
        ["equalize", "simulate", "correct"],
    ),
    ("W8A8 per channel", CONVOLUTIONAL, "w8a8", ["fold"]),
    ("+ bias correction", CONVOLUTIONAL, "w8a8", ["fold", "simulate", "correct"]),
    ("W4A8 per channel", CONVOLUTIONAL, "w4a8", ["fold"]),
    ("+ bias correction (W4A8)", CONVOLUTIONAL, "w4a8", ["fold", "simulate", "correct"]),
    ("+ seq_mse (W4A8)", CONVOLUTIONAL, "w4a8", ["fold", "simulate", "seq_mse"]),
    ("+ gptq (W4A8)", CONVOLUTIONAL, "w4a8", ["fold", "simulate", "gptq"]),
    ("+ adaround (W4A8)", CONVOLUTIONAL, "w4a8", ["fold", "simulate", "adaround"]),
    ("+ seq_mse, brecq (W4A8)", CONVOLUTIONAL, "w4a8", ["fold", "simulate", "seq_mse", "brecq"]),
    ("W4A16", LANGUAGE, "w4a16", []),
    ("+ seq_mse", LANGUAGE, "w4a16", ["simulate", "seq_mse"]),
    ("+ gptq", LANGUAGE, "w4a16", ["simulate", "gptq"]),
    ("+ seq_mse, gptq", LANGUAGE, "w4a16", ["simulate", "seq_mse", "gptq"]),
    ("+ adaround", LANGUAGE, "w4a16", ["simulate", "adaround"]),
    ("+ brecq", LANGUAGE, "w4a16", ["simulate", "brecq"]),
    ("W8A8, every activation", LANGUAGE, "w8a8", []),
    ("+ smoothing", LANGUAGE, "w8a8", ["smooth"]),
    ("+ rotation", LANGUAGE, "w8a8", ["rotate"]),
    ("+ rotation, smoothing", LANGUAGE, "w8a8", ["rotate", "smooth"]),
    ("W8A8, inputs of linear layers", LANGUAGE, "w8a8", ["simulate", "only_linear"]),
    ("+ smoothing (inputs)", LANGUAGE, "w8a8", ["smooth", "simulate", "only_linear"]),
    ("+ rotation, smoothing (inputs)", LANGUAGE, "w8a8", ["rotate", "smooth", "simulate", "only_linear"]),
]


#: options of the methods that learn; blocks take whole samples and gain nothing from more
LEARNED: dict[str, dict[str, int]] = {"adaround": {"iterations": 1000}, "brecq": {"iterations": 300}}


class TorchRun:
    """The steps on a module."""

    def __init__(self, task: Task) -> None:
        self.task, self.model = task, data.trained(task.name)
        self.example = task.batches[0][:1]
        self.sim: bw_torch.QuantizationSimModel

    def fold(self) -> None:
        bw_torch.fold_all_batch_norms(self.model, dummy_input=self.example)

    def equalize(self) -> None:
        torch_ptq.equalize_model(self.model, dummy_input=self.example)

    def smooth(self) -> None:
        torch_ptq.smooth_model(self.model, self.task.batches)

    def rotate(self) -> None:
        torch_ptq.rotate_model(self.model, dummy_input=self.example)

    def simulate(self, preset: str) -> None:
        self.sim = bw_torch.QuantizationSimModel(self.model, self.example, preset=preset)
        self.sim.compute_encodings(self.task.batches)

    def correct(self) -> None:
        torch_ptq.apply_bias_correction(self.sim, self.task.batches)

    def choose_weights(self, method: str) -> None:
        batches = [part for batch in self.task.batches for part in batch.split(32)]
        bw_torch.apply_reconstruction(self.sim, batches, method, **LEARNED.get(method, {}))
        self.sim.compute_encodings(self.task.batches)

    def only_linear(self) -> None:
        _only_linear(self.sim)

    def run_float(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            return _first(self.model(batch))

    def run(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            return _first(self.sim.model(batch))


class OnnxRun:
    """The same on the network as torch exports it."""

    def __init__(self, task: Task) -> None:
        self.task, self.model = task, exported(task)
        self.feeds = [batch.numpy() for batch in task.batches]
        self.example = self.feeds[0][:2]
        self.sim: bw_onnx.QuantizationSimModel
        self._session: Any = None

    def fold(self) -> None:
        bw_onnx.fold_all_batch_norms(self.model, self.example)

    def equalize(self) -> None:
        onnx_ptq.equalize_model(self.model, self.example)

    def smooth(self) -> None:
        onnx_ptq.smooth_model(self.model, self.feeds)

    def rotate(self) -> None:
        onnx_ptq.rotate_model(self.model, self.example)

    def simulate(self, preset: str) -> None:
        self.sim = bw_onnx.QuantizationSimModel(self.model, self.example, preset=preset, threads=1)
        self.sim.compute_encodings(self.feeds)

    def correct(self) -> None:
        onnx_ptq.apply_bias_correction(self.sim, self.feeds)

    def choose_weights(self, method: str) -> None:
        feeds = [part.numpy() for batch in self.task.batches for part in batch.split(32)]
        bw_onnx.apply_reconstruction(self.sim, feeds, method, **LEARNED.get(method, {}))
        self.sim.compute_encodings(self.feeds)

    def only_linear(self) -> None:
        _only_linear(self.sim)

    def run_float(self, batch: Tensor) -> Tensor:
        if self._session is None:
            self._session = onnxruntime.InferenceSession(
                self.model.SerializeToString(), providers=["CPUExecutionProvider"]
            )
        return torch.from_numpy(self._session.run(None, {"x": batch.numpy()})[0])

    def run(self, batch: Tensor) -> Tensor:
        return torch.from_numpy(self.sim.run(batch.numpy())[0])


FRONT_ENDS: dict[str, Callable[[Task], Any]] = {"torch": TorchRun, "onnx": OnnxRun}


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _only_linear(sim: Any) -> None:
    """Leave all activations in float but those that a layer with a stored weight reads."""
    read = {
        op.inputs[0]
        for op in sim.graph.ops
        if op.type in ("Conv", "Gemm", "MatMul") and sim.graph.values[op.inputs[1]].is_static
    }
    for site in sim.quantizers.values():
        site.enabled = site.role == "weight" or site._plan.value in read


def exported(task: Task) -> onnx.ModelProto:
    """The network as ONNX, batch norms kept, with one input ``x`` and an open batch size."""
    model, x = data.trained(task.name), task.batches[0][:2]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if task.dynamo:
            rows = torch.export.Dim("rows", min=1, max=512)
            program = torch.onnx.export(
                model, (x,), dynamo=True, verbose=False, input_names=["x"], dynamic_shapes=({0: rows},)
            )
            assert program is not None
            return program.model_proto
        file = io.BytesIO()
        torch.onnx.export(
            model, (x,), file, dynamo=False, opset_version=17, input_names=["x"], dynamic_axes={"x": {0: "rows"}},
            training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def score(task: Task, front_end: str, preset: str, steps: Sequence[str]) -> float:
    """The metric after the steps; the simulation is made where ``simulate`` stands, or at the end."""
    run = FRONT_ENDS[front_end](task)
    for step in steps:
        if step == "simulate":
            run.simulate(preset)
        elif step in METHODS:
            run.choose_weights(step)
        else:
            getattr(run, step)()
    if "simulate" not in steps:
        run.simulate(preset)
    return task.score(run.run)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=[*CONVOLUTIONAL, *LANGUAGE], default=[*CONVOLUTIONAL, *LANGUAGE]
    )
    parser.add_argument("--front-ends", nargs="+", choices=list(FRONT_ENDS), default=list(FRONT_ENDS))
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    known = tasks(options.quick)
    columns = ["network", "method", *options.front_ends]
    rows: list[list[str]] = []
    raw: list[dict[str, Any]] = []
    for name in options.models:
        task = known[name]()
        found = [task.score(FRONT_ENDS[end](task).run_float) for end in options.front_ends]
        _add(rows, raw, name, "float", options.front_ends, found)
        for label, networks, preset, steps in ROWS:
            if name in networks:
                found = [score(task, end, preset, steps) for end in options.front_ends]
                _add(rows, raw, name, label, options.front_ends, found)
    title = "Accuracy after post-training methods"
    measure.show(title, columns, rows)
    measure.save(options.json, options.markdown, title, columns, rows, raw)


def _add(
    rows: list[list[str]],
    raw: list[dict[str, Any]],
    name: str,
    label: str,
    ends: Sequence[str],
    found: Sequence[float],
) -> None:
    digits = 3 if name in LANGUAGE else 2
    rows.append([name, label, *(f"{value:.{digits}f}" for value in found)])
    raw.append({"network": name, "method": label, **dict(zip(ends, found, strict=True))})
    print(*rows[-1], sep="\t", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
