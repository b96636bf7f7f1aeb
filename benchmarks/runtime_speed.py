"""How fast and how close to float exports are in ONNX Runtime, beside its own tool: one thread, one command."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import numpy as np
import onnx
import onnx.version_converter
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from bitwright.core.simulation.float_model import sqnr
from bitwright.export.targets import rules_for
from bitwright.onnx import quantize
from bitwright.runtimes.adapters import open_file
from bitwright.runtimes.timing import interleaved, ratio
from tests.support.data import cifar, imagenet, mnist, onnx_file, shakespeare, trained
from tests.support.zoo import Encoder, MobileNetV2, ResNet18, UNet

HELP = """\
Quantize real models with the same calibration data (32 samples) and run the files in turns with the float model.

Times are CPU time of one thread. Columns: float (ms of one sample of the model as given) and folded (of the float model with its
batch norms folded, which all that follow are compared with); then for each file how many times as fast as folded it
is (quartiles of the rounds), and the signal-to-noise ratio of its outputs to float in dB (lowest over outputs, 16 samples):
  default          quantize(model, data): the default export, with the default recipe
  w8a8             quantize(model, data, recipe=["fold"]): nearest rounding, no activation with more than 8 bits
  all on integers  the same without that
  w4a8             as w8a8, with preset="w4a8"
  quantize_static  ONNX Runtime's tool on the folded model after its own pre-processing: QDQ, per channel, uint8 activations,
                   int8 weights

Models in the second half have random weights and data: their dB say little, their speed is that of the architecture.
segformer_b0 needs transformers.
"""
COLUMNS = (
    "model", "MMAC", "float", "folded", "default", "dB", "w8a8", "dB", "all on integers", "dB", "w4a8", "dB",
    "quantize_static", "dB",
)  # fmt: skip
_FILES = ("default", "w8a8", "integers", "w4a8", "static")


class _Words(torch.nn.Module):
    """An encoder of sentences with the vocabulary of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder = torch.nn.Embedding(50257, 256), Encoder(layers=2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.words(ids))


class _Segformer(torch.nn.Module):
    """Segformer-B0 for 19 classes, without its wrapper of outputs."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import SegformerConfig, SegformerForSemanticSegmentation

        self.net = SegformerForSemanticSegmentation(SegformerConfig(num_labels=19))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).logits


class _Bottleneck(torch.nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        super().__init__()
        inner, norm = made // 4, torch.nn.BatchNorm2d
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(given, inner, 1, bias=False), norm(inner), torch.nn.ReLU(),
            torch.nn.Conv2d(inner, inner, 3, stride, 1, bias=False), norm(inner), torch.nn.ReLU(),
            torch.nn.Conv2d(inner, made, 1, bias=False), norm(made),
        )  # fmt: skip
        same = given == made and stride == 1
        self.short = (
            torch.nn.Identity()
            if same
            else torch.nn.Sequential(torch.nn.Conv2d(given, made, 1, stride, bias=False), norm(made))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


class _Detector(torch.nn.Module):
    """Bottleneck blocks, and an encoder over the places of their image, as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(
            torch.nn.Conv2d(3, 64, 7, 4, 3, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU()
        )
        widths = ((64, 256, 1), (256, 256, 1), (256, 512, 2), (512, 512, 1), (512, 1024, 2), (1024, 1024, 1))
        self.blocks = torch.nn.Sequential(*(_Bottleneck(*width) for width in widths))
        self.project, self.encoder = torch.nn.Conv2d(1024, 256, 1), Encoder(layers=2, norm_first=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.project(self.blocks(self.stem(x))).flatten(2).transpose(1, 2))


class _Speech(torch.nn.Module):
    """Convolutions of a waveform with norms after them, and an encoder, as in wav2vec 2.0."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for given, kernel, stride in ((1, 10, 5), *((256, 3, 2),) * 4):
            layers += [torch.nn.Conv1d(given, 256, kernel, stride), torch.nn.GroupNorm(16, 256), torch.nn.GELU()]
        self.features, self.encoder = torch.nn.Sequential(*layers), Encoder(layers=2, norm_first=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.features(x).transpose(1, 2))


#: architectures with random weights: what builds them, and the shape of a sample; of token ids the vocabulary beside it
RANDOM: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...], int | None]] = {
    "resnet18": (ResNet18, (3, 224, 224), None),
    "mobilenet_v2": (MobileNetV2, (3, 224, 224), None),
    "unet_32": (lambda: UNet(32), (3, 128, 128), None),
    "segformer_b0": (_Segformer, (3, 128, 128), None),
    "detector_like": (_Detector, (3, 160, 160), None),
    "speech_like": (_Speech, (1, 8000), None),
    "encoder_256": (Encoder, (64, 256), None),
    "words_50k": (_Words, (64,), 50257),
}


def _built(name: str, x: torch.Tensor) -> torch.nn.Module:
    """The model; of random weights with the statistics of ``x`` in its batch norms."""
    if name not in RANDOM:
        return trained(name).eval()
    torch.manual_seed(0)
    model = RANDOM[name][0]()
    with torch.no_grad():
        model.train()(x[:8])
    return model.eval()


def _exported(name: str, x: torch.Tensor, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    program = torch.onnx.export(_built(name, x), (x[:1],), dynamo=True, opset_version=18, verbose=False)
    program.save(str(path))
    return path


def _pictures(kind: str) -> np.ndarray:
    """48 samples, of which the first 32 calibrate."""
    if kind in RANDOM:
        _, shape, words = RANDOM[kind]
        rng = np.random.default_rng(0)
        return (
            rng.normal(size=(48, *shape)).astype(np.float32) if words is None else rng.integers(0, words, (48, *shape))
        )
    if kind == "cifar":
        return cifar("train").x[:48].numpy()
    if kind == "imagenet":
        return np.concatenate([imagenet("calibration").x[:32].numpy(), imagenet().x[:16].numpy()])
    if kind == "faces":
        x = torch.nn.functional.interpolate(imagenet("calibration").x[:48], size=(240, 320))
        return x.numpy() * np.float32(127.5 / 128)
    if kind == "text":
        return shakespeare("train")[: 48 * 128].reshape(48, 128).numpy()
    pixels = mnist()[0][:48, None].astype(np.float32)
    return pixels if kind == "mnist_cntk" else (pixels / 255 - 0.1307) / 0.3081


MODELS: dict[str, tuple[str, bool]] = {  # name -> kind of data, and whether it is exported from torch here
    "mobilenet_v1_025": ("imagenet", True),
    "mobilenet_v2_cifar": ("cifar", True),
    "resnet20_aux": ("cifar", False),
    "face_slim_320": ("faces", False),
    "lstm_char": ("text", False),
    "mnist_cntk": ("mnist_cntk", False),
    "mnist_pytorch": ("mnist_pytorch", False),
    **{name: (name, True) for name in RANDOM},
}


class _Reader(CalibrationDataReader):
    def __init__(self, feeds: Sequence[dict[str, Any]]) -> None:
        self.left: Iterator[dict[str, Any]] = iter(feeds)

    def get_next(self) -> dict[str, Any] | None:
        return next(self.left, None)


def _by_their_tool(model: Path, feeds: Sequence[dict[str, Any]], folder: Path) -> Path:
    clean, out = folder / "clean.onnx", folder / "static.onnx"
    quant_pre_process(str(model), str(clean), skip_symbolic_shape=True)
    if next(one.version for one in onnx.load(clean).opset_import if not one.domain) < 13:  # several scales need 13
        onnx.save(onnx.version_converter.convert_version(onnx.load(clean), 13), clean)
    quantize_static(
        str(clean), str(out), _Reader(feeds), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return out


def _macs(model: Path) -> float:
    """Millions of multiplications in Conv, Gemm and MatMul with constant weights, of the shapes that inference finds."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(model)).graph
    sizes = {t.name: int(np.prod(t.dims)) for t in graph.initializer}
    shapes = {
        v.name: [d.dim_value or 1 for d in v.type.tensor_type.shape.dim] for v in (*graph.value_info, *graph.output)
    }
    total = 0
    for node in graph.node:
        if node.op_type == "Conv":
            total += sizes.get(node.input[1], 0) * int(np.prod(shapes.get(node.output[0], [1])[2:]))
        elif node.op_type in ("Gemm", "MatMul"):
            rows = shapes.get(node.output[0], [1])
            total += sizes.get(node.input[1], 0) * int(np.prod(rows[:-1]))
    return total / 1e6


def _level(base: Any, other: Any, feeds: Sequence[dict[str, Any]]) -> float:
    pairs = [(base.run(feed), other.run(feed)) for feed in feeds]
    return min(
        sqnr(np.stack([one[name] for one, _ in pairs]), np.stack([two[name] for _, two in pairs]))
        for name in pairs[0][0]
    )


def row(name: str, seconds: float) -> tuple[list[str], dict[str, Any]]:
    """Cells and raw numbers of one model."""
    kind, from_torch = MODELS[name]
    data = _pictures(kind)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = _exported(name, torch.from_numpy(data), folder) if from_torch else onnx_file(name)
        graph = onnx.load(model).graph
        (given,) = {i.name for i in graph.input} - {t.name for t in graph.initializer}
        feeds = [{given: data[i : i + 1]} for i in range(len(data))]
        files = {"float": model}
        asked: dict[str, dict[str, Any]] = {
            "default": {"recipe": None},
            "w8a8": {},
            "integers": {"config_file": rules_for("ort_cpu", None)},
            "w4a8": {"preset": "w4a8"},
        }
        for key, given_options in asked.items():
            made = quantize(
                model, feeds[:32], path=folder / key, progress=False, **{"recipe": ["fold"], **given_options}
            )
            files[key] = made.exported.qdq
            if key == "w8a8":
                files["folded"] = made.exported.float_model
        try:
            theirs = _by_their_tool(files["folded"], feeds[:32], folder)
            open_file("onnxruntime", theirs)
            files["static"] = theirs
        except Exception as error:  # a cell of the table: their tool has no answer for this model
            print(f"{name}: quantize_static: {type(error).__name__}: {error}", flush=True)
        sessions = {key: open_file("onnxruntime", path) for key, path in files.items()}
        steps = {key: (lambda s=session: s.run(feeds[0])) for key, session in sessions.items()}
        times = interleaved(steps, seconds=seconds, clock=time.process_time)
        cells = [name, f"{_macs(model):.1f}", *(f"{1e3 * times[key].median:.2f}" for key in ("float", "folded"))]
        raw = {}
        for key in _FILES:
            if key not in files:
                cells += ["fails", ""]
                continue
            speed, level = (ratio(times["folded"], times[key]), _level(sessions["float"], sessions[key], feeds[32:]))
            cells += [str(speed), f"{level:.1f}"]
            raw[key] = {"speed": speed.median, "low": speed.low, "high": speed.high, "dB": level}
    return cells, raw


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=3.0, help="for the rounds of each model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    rows, raw = [], {}
    for name in options.models:
        cells, raw[name] = row(name, options.seconds)
        rows.append(cells)
        print(*cells, sep=" | ", flush=True)
    title = (
        "Exported files in ONNX Runtime (batch 1, one thread): times as fast as folded float, and outputs against float"
    )
    measure.show(title, COLUMNS, rows)
    measure.save(options.json, options.markdown, title, COLUMNS, rows, raw)


if __name__ == "__main__":
    main()
