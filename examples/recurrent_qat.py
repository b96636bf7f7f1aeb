"""Train a small recurrent classifier, quantize it to 4-bit weights, and train the quantized model a little more.

    python examples/recurrent_qat.py

A handwritten digit of 8 x 8 pixels is read row by row by an LSTM. Everything runs on the CPU with a fixed seed and takes
about half a minute.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bitwright.torch import QuantizationSimModel

Batches = list[tuple[Tensor, Tensor]]


class RowReader(nn.Module):
    """Rows of an image [N, 8, 8] one after the other -> logits [N, 10]."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, rows: Tensor) -> Tensor:
        _, (last, _) = self.rnn(rows)
        logits: Tensor = self.head(last[-1])
        return logits


def digits(batch: int = 50) -> tuple[Batches, Batches]:
    """26 training and 9 test batches of the scanned digits that come with scikit-learn, values 0 to 1."""
    data = load_digits()
    images = torch.tensor(data.images / 16.0, dtype=torch.float32)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    whole = [(images[i], labels[i]) for i in order.split(batch) if len(i) == batch]
    return whole[:-9], whole[-9:]


def train(model: nn.Module, batches: Batches, epochs: int, rate: float, clip: float = 1.0) -> None:
    """Train in place. Gradients through time are clipped: one steep step must not throw the weights off."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    generator = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(epochs):
        for i in torch.randperm(len(batches), generator=generator).tolist():
            images, labels = batches[i]
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    """Share of right answers in percent."""
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches)
    return 100.0 * right / sum(len(labels) for _, labels in batches)


def quantize(model: nn.Module, preset: str, training: Batches) -> QuantizationSimModel:
    """Quantizers inside the steps of the LSTM too: gates, cell and hidden state; one scale per weight matrix."""
    rules = {"rules": [{"op": ["LSTM", "Gemm"], "weight": {"granularity": "per_tensor"}}]}
    sim = QuantizationSimModel(model, training[0][0], preset=preset, config_file=rules)
    sim.compute_encodings([images for images, _ in training[:10]])
    return sim


def main() -> dict[str, float]:
    """Train, quantize, train the quantized model; accuracy in percent at each stage."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums in one order: the same numbers on every run
    training, test = digits()
    model = RowReader()
    train(model, training, epochs=30, rate=1e-2)
    found = {"float": accuracy(model, test)}
    found["W8A8, after training"] = accuracy(quantize(model, "w8a8", training).model, test)

    sim = quantize(model, "w4a8", training)
    found["W4A8, after training"] = accuracy(sim.model, test)
    train(sim.model, training, epochs=8, rate=2e-3)
    found["W4A8, trained quantized"] = accuracy(sim.model, test)
    return found


if __name__ == "__main__":
    table = Table("model", "accuracy")
    for name, percent in main().items():
        table.add_row(name, f"{percent:.2f} %")
    Console().print(table)
