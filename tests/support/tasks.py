"""The trained networks of the developer data set with their data and metrics: what accuracies are measured on."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

import bitwright.onnx
import bitwright.torch
from bitwright.core.numerics.spec import Preset
from tests.support import data

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A trained network with its data.

    Attributes:
        samples: what calibration samples are drawn from.
        count: how many are drawn.
        batch: samples per batch.
        score: (the model as a function of a batch) -> metric.
        file: of a network that there is as ONNX only.
        dynamo: which exporter writes the others.
    """

    samples: Callable[[], Tensor]
    count: int
    batch: int
    score: Callable[[Run], float]
    file: str = ""
    dynamo: bool = False

    def batches(self, seed: int) -> list[Tensor]:
        """Calibration data; of seed 0 the first samples."""
        samples = self.samples()
        generator = np.random.default_rng(seed)
        order = np.arange(len(samples)) if seed == 0 else generator.permutation(len(samples))
        return list(samples[order[: self.count]].split(self.batch))


def digits(name: str) -> Task:
    pixels, labels = data.mnist()
    x = pixels.astype(np.float32)[:, None]
    if name == "mnist_pytorch":
        x = (x / 255 - np.float32(0.1307)) / np.float32(0.3081)
    images = data.Images(torch.from_numpy(x), torch.from_numpy(labels))
    return Task(lambda: images.x, 64, 1, lambda run: data.accuracy(run, images, batch=1), file=name)


def faces() -> Task:
    """Anchors that score above 0.7, against those of the float model: F1 in percent."""
    from PIL import Image

    with np.load(data.DATA / "imagenet_sample_dev.npz") as file:
        jpeg, offset = file["jpeg"].tobytes(), file["offset"]
    found = []
    for first, last in zip(offset[:180], offset[1:181], strict=True):
        picture = Image.open(io.BytesIO(jpeg[first:last])).resize((320, 240), Image.Resampling.BILINEAR)
        found.append((np.asarray(picture, np.float32).transpose(2, 0, 1) - 127) / 128)
    pictures = torch.from_numpy(np.stack(found))
    plain = onnxruntime.InferenceSession(data.onnx_file("face_slim_320"), providers=["CPUExecutionProvider"])
    wanted = [plain.run(None, {"input": x.numpy()})[0][..., 1] > 0.7 for x in pictures[:80].split(1)]

    def score(run: Run) -> float:
        seen = [run(x).numpy()[..., 1] > 0.7 for x in pictures[:80].split(1)]
        both = sum(int((a & b).sum()) for a, b in zip(wanted, seen, strict=True))
        return 200 * both / sum(int(a.sum()) + int(b.sum()) for a, b in zip(wanted, seen, strict=True))

    return Task(lambda: pictures[80:], 40, 1, score, file="face_slim_320")


def cifar() -> Task:
    return Task(lambda: data.cifar("train").x, 512, 32, lambda run: data.accuracy(run, data.cifar()))


def photographs() -> Task:
    return Task(lambda: data.imagenet("calibration").x, 100, 25, lambda run: data.accuracy(run, data.imagenet()))


def stories() -> Task:
    return Task(
        lambda: data.stories("calib")[:, :-1], 32, 8, lambda run: data.perplexity(run, data.stories()),
        dynamo=True,
    )  # fmt: skip


def characters() -> Task:
    rows = data.shakespeare("test")[: 160 * 129].reshape(160, 129)
    train = data.shakespeare("train")
    return Task(
        lambda: train[: len(train) // 128 * 128].reshape(-1, 128), 64, 16,
        lambda run: data.perplexity(run, rows), file="lstm_char",
    )  # fmt: skip


TASKS: dict[str, Callable[[], Task]] = {
    "mobilenet_v2_cifar": cifar,
    "mobilenet_v1_025": photographs,
    "resnet20_aux": cifar,
    "stories260k": stories,
    "lstm_char": characters,
    "mnist_cntk": lambda: digits("mnist_cntk"),
    "mnist_pytorch": lambda: digits("mnist_pytorch"),
    "face_slim_320": faces,
}


def measured(
    name: str, task: Task, front_end: str, preset: str | Preset, recipe: Any, seed: int = 0, **options: Any
) -> float:
    """The metric of a network after ``quantize`` with ``options``; of the float network if the recipe is ``"float"``."""
    options = {"recipe": recipe, "progress": False, **options}
    batches = task.batches(seed)
    if front_end == "torch":
        model: Any = data.trained(name)
        if recipe != "float":
            model = bitwright.torch.quantize(model, batches, preset, **options).model
        with torch.no_grad():
            return task.score(lambda x: _first(model(x)))
    proto = onnx.load(data.onnx_file(task.file)) if task.file else exported(name, task)
    if recipe == "float":
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        source = session.get_inputs()[0].name
        return task.score(lambda x: torch.from_numpy(session.run(None, {source: x.numpy()})[0]))
    feeds = [batch.numpy() for batch in batches]
    sim = bitwright.onnx.quantize(proto, feeds, preset, **options).sim
    return task.score(lambda x: torch.from_numpy(sim.run(x.numpy())[0]))


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def exported(name: str, task: Task) -> onnx.ModelProto:
    """The network as ONNX, batch norms kept, with one input ``x`` and an open batch size."""
    model, x = data.trained(name), task.batches(0)[0][:2]
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
