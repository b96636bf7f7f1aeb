"""Detections that W8A8 keeps in public detectors, trained for minutes on drawn shapes; and what a tail in float costs.

    python benchmarks/detectors.py --models yolov8n yolo11n --markdown table.md   # some minutes per network on one core
    python benchmarks/detectors.py --speed                                        # files with and without grids in the tail

The networks are those of ultralytics, torchvision (of constraints-reach.txt) and transformers, built without stored weights and
trained by their own losses on images of rectangles, ellipses and triangles. A detection of the float model (a score of at
least 0.5 after non-maximum suppression at an overlap of 0.6) is kept where the quantized model has one of the same class with an
overlap (IoU) of at least 0.5 and a score of at least 0.3; the same is counted the other way round, and the lower share is shown.
``fold`` is ``quantize(model, data, recipe=["fold"])``, ``default`` is ``quantize(model, data)``, ``aimet`` is the first with
AIMET's default placement; ``onnx-`` in front means the same of the exported float file.
"""

from __future__ import annotations

import argparse
import io
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import onnx
import onnxruntime
import torch
from detector_families import FAMILIES, TURNED, UPRIGHT, Family, Found, average_precision, drawn, kept, trained, truths
from torch import Tensor, nn

import bitwright.onnx
import bitwright.torch
from bitwright.core.placement.rules import default_rules

TEST = 192  # images


def decibels(wanted: Tensor, found: Tensor) -> float:
    """Signal-to-noise ratio."""
    noise = ((wanted - found).double() ** 2).sum()
    return float(10 * torch.log10((wanted.double() ** 2).sum() / noise))


def _tensors(answer: Any, what: str) -> dict[str, Tensor]:
    """The outputs of a detector by name, as a file has them."""
    if hasattr(answer, "logits"):
        return {"logits": answer.logits, "pred_boxes": answer.pred_boxes}
    if isinstance(answer[0], dict):  # torchvision: a list of what each image shows
        return dict(sorted(answer[0].items()))
    found = answer
    if what == "masks":
        found, protos = (answer[0] if isinstance(answer[0], (tuple, list)) else answer)[:2]
        return {"found": found, "protos": protos[-1] if isinstance(protos, (tuple, list)) else protos}
    while isinstance(found, (tuple, list)):
        found = found[0]
    return {"found": found}


class _Named(nn.Module):
    """A detector that returns tensors only, for the exporter."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        super().__init__()
        self.model, self.family = model, family

    def forward(self, x: Tensor) -> Any:
        answer = _tensors(self.model(x if self.family.batched else [x]), self.family.what)
        return tuple(answer.values())


def _called(model: Any, images: Tensor, family: Family) -> list[Found]:
    """Detections of a module, batch by batch."""
    with torch.no_grad():
        return [one for part in images.split(16) for one in family.read(model(*family.args(part)))]


def _file(model: nn.Module, images: Tensor, family: Family) -> tuple[onnx.ModelProto, list[str]]:
    """The float file of a detector, as torch's exporter by tracing writes it, and the names of its outputs."""
    with torch.no_grad():
        names = list(_tensors(model(*family.args(images[:2])), family.what))
    example = family.args(images[:2])[0] if family.batched else images[0]
    axes = {"x": {0: "rows"}} if family.batched else {}
    file = io.BytesIO()
    torch.onnx.export(
        _Named(model, family).eval(),
        (example,),
        file,
        dynamo=False,
        input_names=["x"],
        output_names=names,
        dynamic_axes=axes,
    )
    return onnx.load_from_string(file.getvalue()), names


def _run(sim: Any, images: Tensor, family: Family, names: Sequence[str]) -> list[Found]:
    """Detections of a simulated file: of batches, or image by image."""
    found = []
    for part in images.split(16) if family.batched else images:
        x = family.args(part)[0] if family.batched else part
        answer = {
            name: torch.from_numpy(np.asarray(value)) for name, value in zip(names, sim.run(x.numpy()), strict=True)
        }
        found += family.read([*answer.values()] if "found" in answer else answer if family.batched else [answer])
    return found


def detections(
    model: nn.Module, way: str, family: Family, batches: Sequence[Tensor], test: Tensor
) -> tuple[list[Found], Any]:
    """What the model quantized in one way finds, and the result."""
    front, _, how = way.rpartition("-")
    options: dict[str, Any] = {} if how == "default" else {"recipe": ["fold"]}
    if how == "aimet":
        options["config_file"] = "default"
    data = [family.args(batch) for batch in batches]
    if front == "onnx":
        proto, names = _file(model, test, family)
        arrays = [args[0].numpy() for args in data] if family.batched else [x.numpy() for b in batches for x in b]
        result = bitwright.onnx.quantize(proto, arrays, progress=False, **options)
        return _run(result.sim, test, family, names), result
    result = bitwright.torch.quantize(model, data, progress=False, **options)
    return _called(result.model, test, family), result


def _worst(result: Any) -> str:
    return "" if result is None or result.quality.worst is None else f"{result.quality.worst.sqnr:.1f}"


def table(names: Sequence[str], ways: Sequence[str], cache: Path, verify: bool = False) -> list[str]:
    """One row per detector and way; with ``verify``, what the file of each is to its simulation is printed after the row."""
    lines = [
        "| detector | way | mAP 0.5 | mAP 0.5:0.95 | detections | kept | worst output dB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        family = FAMILIES[name]
        model = trained(name, cache)
        angles = TURNED if family.what == "oriented" else UPRIGHT
        batches, test = [drawn(4, seed, angles).images for seed in range(8)], drawn(TEST, 77, angles)
        truth = truths(test, family.what)
        wanted = _called(model, test.images, family)
        for way in ["float", *(way for way in ways if family.exports or not way.startswith("onnx"))]:
            found, result = (wanted, None) if way == "float" else detections(model, way, family, batches, test.images)
            precision = average_precision(found, truth, family.what)
            share, count = kept(wanted, found, family.what)
            lines.append(
                f"| {name} | {way} | {precision[0]:.3f} | {precision[1]:.3f} | {count} | {share:.1%} | {_worst(result)} |"
            )
            print(lines[-1], flush=True)
            if (
                verify and result is not None and (way.startswith("onnx") or family.batched)
            ):  # lists of images have no file
                report = result.sim.verify()
                ends = [f"{end.name} {end.as_integer:.1f} dB" for end in report.outputs]
                print(f"{name} {way}: {report.answer}; {', '.join(ends)}", flush=True)
    return lines


def _body() -> nn.Sequential:
    chain = [layer for a, b in ((3, 32), (32, 64), (64, 64)) for layer in (nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())]
    return nn.Sequential(*chain)


class _Network(nn.Module):
    """Layers, and a tail."""

    def __init__(self, layers: Sequence[nn.Module], tail: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers, self.tail = nn.ModuleList(layers), tail

    def forward(self, x: Tensor) -> Tensor:
        features = self.layers[0](x)
        return self.tail(x, *(layer(features) for layer in self.layers[1:]))


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _networks() -> dict[str, tuple[nn.Module, Tensor]]:
    image = torch.rand(1, 3, 224, 224)
    linear = nn.Sequential(_Mean(), nn.Linear(64, 1000))
    flat = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))
    small = nn.Sequential(*_body()[:2], nn.ConvTranspose2d(32, 3, 2, 2))
    resize = nn.functional.interpolate
    return {
        "classifier, softmax": (_Network([_body(), linear], lambda x, y: y.softmax(-1)), image),
        "perceptron, sigmoid": (_Network([nn.Identity(), flat], lambda x, y: y.sigmoid()), torch.rand(64, 128)),
        "segmentation, resize": (
            _Network([_body(), nn.Conv2d(64, 21, 1)], lambda x, y: resize(y, scale_factor=8, mode="bilinear")), image),
        "segmentation, resize, softmax": (
            _Network([_body(), nn.Conv2d(64, 21, 1)], lambda x, y: resize(y, scale_factor=8, mode="bilinear").softmax(1)), image),
        "super-resolution, sum": (_Network([nn.Identity(), small], lambda x, y: x + y), image),
        "generator, tanh": (_Network([nn.Identity(), small], lambda x, y: y.tanh()), image),
        "SqueezeNet's end": (_Network([_body(), nn.Conv2d(64, 1000, 1)], lambda x, y: y.relu().mean((2, 3)).softmax(-1)), image),
        "features, SiLU": (_Network([_body(), nn.Conv2d(64, 128, 3, 1, 1)], lambda x, y: nn.functional.silu(y)), image),
        "detector": (
            _Network([_body(), nn.Conv2d(64, 4, 1), nn.Conv2d(64, 80, 1)],
                     lambda x, b, s: torch.cat([b.flatten(2).exp() * 100, s.flatten(2).sigmoid()], 1)), image),
    }  # fmt: skip


def speed(rounds: int) -> list[str]:
    """Files with and without grids after the last layer: milliseconds of CPU time in ONNX Runtime on one thread, and dB."""
    lines = ["| network | grids: ms | dB | float: ms | dB | time |", "|---|---:|---:|---:|---:|---:|"]
    torch.manual_seed(0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for name, (network, x) in _networks().items():
        network.eval()
        sessions = []
        for tail in (False, True):
            rules = replace(default_rules(), float_tail=tail, split_joins=tail)
            sim = bitwright.torch.QuantizationSimModel(network, x, config_file=rules)
            sim.compute_encodings([x, torch.rand_like(x)], progress=False)
            with tempfile.TemporaryDirectory() as folder:
                file = sim.export(folder, "net", dummy_input=x).qdq
                sessions.append(onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"]))
        feeds = {sessions[0].get_inputs()[0].name: x.numpy()}
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for session, taken in zip(sessions, times, strict=True):
                start = time.process_time()
                session.run(None, feeds)
                taken.append(time.process_time() - start)
        with torch.no_grad():
            wanted = network(x)
        noise = [decibels(wanted, torch.from_numpy(session.run(None, feeds)[0])) for session in sessions]
        grids, floats = (float(np.quantile(taken, 0.25)) * 1e3 for taken in times)
        lines.append(
            f"| {name} | {grids:.3f} | {noise[0]:.1f} | {floats:.3f} | {noise[1]:.1f} | {floats / grids:.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--ways", nargs="+", default=["aimet", "default"])
    parser.add_argument("--cache", type=Path, default=Path(".detectors"), help="folder for what was trained")
    parser.add_argument("--verify", action="store_true", help="compare the file of each with its simulation too")
    parser.add_argument("--speed", action="store_true", help="measure tails in ONNX Runtime instead")
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    lines = speed(args.rounds) if args.speed else table(args.models, args.ways, args.cache, args.verify)
    if args.markdown is not None:
        measure.write(args.markdown, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
