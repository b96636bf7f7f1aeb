"""Quantize a small network to 4-bit weights and train it so, with a guard against NaN.

    python examples/qat.py

The network of ``quickstart.py`` reads handwritten digits. One of the training batches is damaged on purpose: the guard
leaves its step out and counts it. Everything runs on the CPU with a fixed seed and takes less than a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bitwright.torch import QuantizationSimModel, TrainingGuard, fold_all_batch_norms

sys.path.insert(0, str(Path(__file__).parent))
from quickstart import Batches, DigitNet, accuracy, digits, train


def train_quantized(sim: QuantizationSimModel, batches: Batches, epochs: int, rate: float) -> TrainingGuard:
    """Train the simulated model in place: gradients pass the rounding straight through and are clipped."""
    guard = TrainingGuard(torch.optim.AdamW(sim.model.parameters(), lr=rate), max_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(guard.optimizer, epochs * len(batches))
    generator = torch.Generator().manual_seed(1)
    sim.model.train()
    for _ in range(epochs):
        for i in torch.randperm(len(batches), generator=generator).tolist():
            images, labels = batches[i]
            if guard.step(nn.functional.cross_entropy(sim.model(images), labels)):
                schedule.step()
    sim.model.eval()
    return guard


def main() -> tuple[dict[str, float], TrainingGuard]:
    """Train, quantize, train the quantized model; accuracy in percent at each stage, and what the guard saw."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums in one order: the same numbers on every run
    training, test = digits()
    model = DigitNet(width=16)
    train(model, training, epochs=6)
    found = {"float": accuracy(model, test)}

    fold_all_batch_norms(model, dummy_input=training[0][0])
    sim = QuantizationSimModel(model, training[0][0], preset="w4a8")
    sim.quantizers["stem*.weight"].spec = None  # the first layer, 9 weights per channel, stays in float
    sim.compute_encodings([images for images, _ in training[:10]])
    found["W4A8, after training"] = accuracy(sim.model, test)

    damaged = training[7][0].clone()
    damaged[12, 0, 3, 3] = torch.nan
    guard = train_quantized(sim, [*training, (damaged, training[7][1])], epochs=3, rate=1e-3)
    found["W4A8, trained quantized"] = accuracy(sim.model, test)
    return found, guard


if __name__ == "__main__":
    percent, seen = main()
    table = Table("model", "accuracy")
    for name, value in percent.items():
        table.add_row(name, f"{value:.2f} %")
    Console().print(table)
    Console().print(f"{seen.steps} steps, {seen.skipped} left out because of a loss that is not finite")
