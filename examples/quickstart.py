"""Train a small network on real handwritten digits, quantize it, and run it on integer kernels.

    python examples/quickstart.py [output folder]

Writes the float and the quantized models to the folder (default: quickstart-output) and prints one table.
Everything runs on the CPU with a fixed seed and takes less than a minute.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_model
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel, fold_all_batch_norms

BATCH = 50  # one size everywhere: the exported model keeps the batch size it was recorded with
Batches = list[tuple[Tensor, Tensor]]
Predict = Callable[[Tensor], Tensor]


class ConvBlock(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int = 3, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, kernel, padding=kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )


class DigitNet(nn.Module):
    """Convolutions, a depthwise-separable block, a residual sum: images [N, 1, 8, 8] -> logits [N, 10]."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = ConvBlock(1, width)
        self.body = ConvBlock(width, width)
        self.depthwise = ConvBlock(width, width, groups=width)
        self.pointwise = ConvBlock(width, width, kernel=1)
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        x = x + self.pointwise(self.depthwise(x))
        x = nn.functional.max_pool2d(x, 2)
        return self.head(x.flatten(1))


def digits() -> tuple[Batches, Batches]:
    """26 training and 9 test batches of the scanned digits that come with scikit-learn, values 0 to 1."""
    data = load_digits()
    images = torch.tensor(data.images / 16.0, dtype=torch.float32)[:, None]
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    whole = [(images[i], labels[i]) for i in order.split(BATCH) if len(i) == BATCH]
    return whole[:-9], whole[-9:]


def train(model: nn.Module, batches: Batches, epochs: int = 15) -> None:
    """Train in place; images are shifted by up to a pixel, so that position matters less."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * len(batches))
    generator = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(epochs):
        for i in torch.randperm(len(batches), generator=generator).tolist():
            images, labels = batches[i]
            shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
            loss = nn.functional.cross_entropy(model(images.roll(shift, (2, 3))), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def accuracy(predict: Predict, batches: Batches) -> float:
    """Share of right answers in percent; ``predict`` maps images [N, 1, 8, 8] to logits [N, 10]."""
    with torch.no_grad():
        right = sum(int((predict(images).argmax(1) == labels).sum()) for images, labels in batches)
    return 100.0 * right / sum(len(labels) for _, labels in batches)


def integer_runtime(path: Path) -> Predict:
    """The exported model in ONNX Runtime; its default session replaces Q/DQ pairs by integer kernels."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def quantize(model: nn.Module, weight_bits: int, calibration: list[Tensor], folder: Path) -> QuantizationSimModel:
    """Simulate with 8-bit activations and weights of ``weight_bits``, calibrate, export to ``folder``."""
    example = calibration[0]
    sim = QuantizationSimModel(model, dummy_input=example, default_output_bw=8, default_param_bw=weight_bits)
    sim.compute_encodings(calibration)
    sim.export(folder, filename_prefix="digits", dummy_input=example)
    return sim


def row(name: str, percent: float, model_file: Path) -> tuple[str, str, str, str]:
    """One line of the table: what ran, its accuracy, its model file with its size."""
    size = sum(f.stat().st_size for f in model_file.parent.glob(f"{model_file.name}*"))  # weights may lie beside it
    return name, f"{percent:.2f} %", f"{size / 1000:.1f} kB", f"{model_file.parent.name}/{model_file.name}"


def main(output: Path) -> None:
    """Train, quantize twice, compare."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums in one order: the same numbers on every run
    training, test = digits()
    model = DigitNet()
    train(model, training)

    float_file = output / "float" / "digits.safetensors"
    float_file.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, str(float_file))
    rows = [row("float", accuracy(model, test), float_file)]

    calibration = [images for images, _ in training[:10]]
    folded = copy.deepcopy(model)
    fold_all_batch_norms(folded, dummy_input=calibration[0])

    for name, bits in (("W8A8", 8), ("W4A8", 4)):
        sim = quantize(folded, bits, calibration, output / name.lower())
        file = output / name.lower() / "digits.onnx"
        rows.append(row(f"{name}, simulated", accuracy(sim.model, test), file))
        rows.append(row(f"{name}, in ONNX Runtime", accuracy(integer_runtime(file), test), file))

    table = Table("model", "accuracy", "size", "model file")
    table.title = f"{sum(len(labels) for _, labels in test)} handwritten digits that were not trained on"
    for cells in rows:
        table.add_row(*cells)
    Console().print(table)
    print(
        "ONNX Runtime runs both on integer kernels: its CPU has none for 4-bit weights, so their codes are stored as bytes, "
        "which is as fast as W8A8; target='packed' stores half a byte each."
    )
    print(f"The files lie in {output}. To look into them, and to compare one with its simulation layer by layer:")
    for command in ("show", "verify"):
        print(f"  {command_line()} {command} {output / 'w8a8'}")


def command_line() -> str:
    """The bitwright command of this environment, as one would type it here."""
    command = Path(sys.executable).with_name("bitwright")
    return str(command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart-output"))
