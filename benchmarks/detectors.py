"""Detections that W8A8 keeps in public detectors, trained for minutes on drawn shapes; and what a tail in float costs.

    python benchmarks/detectors.py --models yolov8n yolo11n --markdown table.md   # some minutes per network on one core
    python benchmarks/detectors.py --speed                                        # files with and without grids in the tail

The networks are those of the package ultralytics (with torchvision of constraints-reach.txt), built without stored weights and
trained by the package's own loss on images of rectangles, ellipses and triangles. A detection of the float model (a score of at
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bitwright.onnx
import bitwright.torch
from bitwright.core.placement.rules import default_rules

SIZE, CLASSES = 96, 3
KEPT, NEAR, OVERLAP, SUPPRESSED = 0.5, 0.3, 0.5, 0.6
Detections = list[tuple[Tensor, Tensor, Tensor]]  # of each image: boxes (x0, y0, x1, y1), scores, classes


def drawn(count: int, seed: int) -> dict[str, Tensor]:
    """Images with one to three shapes that do not overlap, in the form that ultralytics trains on."""
    draw = np.random.default_rng(seed)
    images = np.zeros((count, 3, SIZE, SIZE), np.float32)
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32) / SIZE
    kinds, boxes, owners = [], [], []
    for i, image in enumerate(images):
        slope, tilt, phase = draw.normal(size=3)
        image[:] = 0.5 + 0.1 * np.sin(5 * (slope * x + tilt * y) + phase)
        taken: list[tuple[float, ...]] = []
        for _ in range(draw.integers(1, 4)):
            w, h = draw.uniform(0.22, 0.42, 2)
            a, b = draw.uniform(w / 2, 1 - w / 2), draw.uniform(h / 2, 1 - h / 2)
            if any(abs(a - p) < (w + q) / 2 and abs(b - r) < (h + s) / 2 for p, r, q, s in taken):
                continue
            taken.append((a, b, w, h))
            kind = int(draw.integers(CLASSES))
            inside = (
                (abs(x - a) < w / 2) & (abs(y - b) < h / 2),
                ((x - a) / w) ** 2 + ((y - b) / h) ** 2 < 0.25,
                (abs(y - b) < h / 2) & (abs(x - a) < (y - b + h / 2) * w / (2 * h)),
            )[kind]
            colour = draw.uniform(0, 1, 3)
            colour[kind], colour[(kind + 1) % 3] = 1, 0.3 * colour[(kind + 1) % 3]
            image[:, inside] = colour[:, None]
            kinds.append(kind)
            boxes.append((a, b, w, h))
            owners.append(i)
    images += draw.normal(0, 0.02, images.shape)
    return {
        "img": torch.tensor(images.clip(0, 1), dtype=torch.float32),
        "cls": torch.tensor(kinds, dtype=torch.float32).view(-1, 1),
        "bboxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
        "batch_idx": torch.tensor(owners, dtype=torch.float32),
    }


def ultralytics(name: str, steps: int, cache: Path | None) -> nn.Module:
    """A detector of ultralytics, trained for ``steps`` batches of eight images, or as it lies in ``cache``."""
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    torch.manual_seed(0)
    model = DetectionModel(f"{name}.yaml", nc=CLASSES, verbose=False)
    file = None if cache is None else cache / f"{name}.safetensors"
    if file is not None and file.exists():
        model.load_state_dict(load_file(file))
        return model.eval()
    model.args = get_cfg()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    for step in range(steps):
        loss = model.loss(drawn(8, 1000 + step))[0].sum() / 8
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    if file is not None:
        save_file(model.state_dict(), file)
    return model.eval()


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """IoU of every box with every other."""
    low, high = torch.maximum(one[:, None, :2], other[None, :, :2]), torch.minimum(one[:, None, 2:], other[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(-1) for boxes in (one, other)]
    return both / (areas[0][:, None] + areas[1][None] - both).clamp(min=1e-9)


def detections(answer: Any) -> Detections:
    """What an answer holds: [batch, 4 + classes, candidates], or [batch, boxes, 6] of heads that need no suppression."""
    found = []
    for one in torch.as_tensor(answer[0] if isinstance(answer, (tuple, list)) else answer).float():
        if one.shape[1] == 6:
            boxes, scores, classes = one[:, :4], one[:, 4], one[:, 5].long()
        else:
            centre, size = one[:2].T, one[2:4].T
            boxes = torch.cat([centre - size / 2, centre + size / 2], 1)
            scores, classes = one[4 : 4 + CLASSES].max(0)
        likely = scores >= NEAR
        boxes, scores, classes = boxes[likely], scores[likely], classes[likely]
        hides = (overlaps(boxes, boxes) > SUPPRESSED) & (classes[:, None] == classes[None])
        alive, kept = torch.ones(len(boxes), dtype=torch.bool), []
        for i in scores.argsort(descending=True).tolist():
            if alive[i]:
                kept.append(i)
                alive &= ~hides[i]
        found.append((boxes[kept], scores[kept], classes[kept]))
    return found


def kept(wanted: Detections, found: Detections) -> float:
    """Share of the clear detections of either side that the other has; the lower of the two."""
    shares = []
    for one, other in ((wanted, found), (found, wanted)):
        clear = hits = 0
        for (boxes, scores, classes), (boxes2, _, classes2) in zip(one, other, strict=True):
            at = scores >= KEPT
            matches = (overlaps(boxes[at], boxes2) >= OVERLAP) & (classes[at][:, None] == classes2[None])
            clear, hits = clear + int(at.sum()), hits + int(matches.any(1).sum())
        shares.append(hits / clear if clear else 0.0)
    return min(shares)


def average_precision(found: Detections, truth: dict[str, Tensor]) -> float:
    """Mean over classes of the area under precision and recall, at an overlap of 0.5."""
    areas = []
    for kind in range(CLASSES):
        ranked, total = [], 0
        for i, (boxes, scores, classes) in enumerate(found):
            mine = (truth["batch_idx"] == i) & (truth["cls"][:, 0] == kind)
            centre, size = truth["bboxes"][mine][:, :2] * SIZE, truth["bboxes"][mine][:, 2:] * SIZE
            real = torch.cat([centre - size / 2, centre + size / 2], 1)
            total += len(real)
            free = torch.ones(len(real), dtype=torch.bool)
            of_kind = classes == kind
            for score, row in zip(scores[of_kind], overlaps(boxes[of_kind], real) * 1.0, strict=True):
                best = int((row * free).argmax()) if len(real) else -1
                hit = best >= 0 and bool(free[best]) and float(row[best]) >= 0.5
                if hit:
                    free[best] = False
                ranked.append((float(score), hit))
        hits = np.cumsum([hit for _, hit in sorted(ranked, reverse=True)])
        precision = hits / np.arange(1, len(hits) + 1)
        areas.append(
            sum(precision[i] for i, (_, hit) in enumerate(sorted(ranked, reverse=True)) if hit) / max(total, 1)
        )
    return float(np.mean(areas))


def decibels(wanted: Tensor, found: Tensor) -> float:
    """Signal-to-noise ratio."""
    noise = ((wanted - found).double() ** 2).sum()
    return float(10 * torch.log10((wanted.double() ** 2).sum() / noise))


def answers(model: nn.Module, way: str, batches: Sequence[Tensor], test: Tensor) -> Tensor:
    """What the model quantized in one way answers."""
    front, _, how = way.rpartition("-")
    options: dict[str, Any] = {} if how == "default" else {"recipe": ["fold"]}
    if how == "aimet":
        options["config_file"] = "default"
    if front == "onnx":
        file = io.BytesIO()
        first = _First(model)
        torch.onnx.export(first, (test[:1],), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}})
        proto = onnx.load_from_string(file.getvalue())
        result = bitwright.onnx.quantize(proto, [b.numpy() for b in batches], progress=False, **options)
        return torch.from_numpy(result.sim.run(test.numpy())[0])
    result = bitwright.torch.quantize(model, list(batches), progress=False, **options)
    with torch.no_grad():
        answer = result.model(test)
    return answer[0] if isinstance(answer, (tuple, list)) else answer


class _First(nn.Module):
    """The first thing that a model returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        answer = self.model(x)
        return answer[0] if isinstance(answer, (tuple, list)) else answer


def table(models: Sequence[str], ways: Sequence[str], steps: int, cache: Path | None) -> list[str]:
    """One row per model and way."""
    lines = [
        "| model | way | mAP 0.5 | kept | boxes dB | scores dB | distinct scores |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    batches, truth = [drawn(4, seed)["img"] for seed in range(8)], drawn(48, 77)
    for name in models:
        model = ultralytics(name, steps, cache)
        with torch.no_grad():
            wanted = _First(model)(truth["img"])
        rows = {"float": wanted}
        for way in ways:
            rows[way] = answers(model, way, batches, truth["img"])
        for way, answer in rows.items():
            boxes, scores = (slice(0, 4), slice(4, None)) if answer.shape[-1] != 6 else (None, None)
            parts = ["", ""]
            if boxes is not None and way != "float":
                parts = [f"{decibels(wanted[:, part], answer[:, part]):.1f}" for part in (boxes, scores)]
            distinct = len((answer[:, 4:] if boxes is not None else answer[..., 4]).unique())
            share = kept(detections(wanted), detections(answer))
            precision = average_precision(detections(answer), truth)
            lines.append(f"| {name} | {way} | {precision:.3f} | {share:.1%} | {parts[0]} | {parts[1]} | {distinct} |")
            print(lines[-1], flush=True)
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
    parser.add_argument(
        "--models", nargs="+", default=["yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n"]
    )
    parser.add_argument("--ways", nargs="+", default=["aimet", "fold", "default", "onnx-fold", "onnx-default"])
    parser.add_argument("--steps", type=int, default=160, help="batches of training")
    parser.add_argument("--cache", type=Path, help="folder for what was trained")
    parser.add_argument("--speed", action="store_true", help="measure tails in ONNX Runtime instead")
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    lines = speed(args.rounds) if args.speed else table(args.models, args.ways, args.steps, args.cache)
    if args.markdown is not None:
        measure.write(args.markdown, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
