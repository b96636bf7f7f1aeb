"""The same script under AIMET and under ``bitwright.aimet_torch``: scales, placement and outputs side by side.

Run it in an environment that has ``aimet-torch`` beside Bitwright::

    python benchmarks/aimet_side_by_side.py

It prints one row per model. Weights are compared by their scales, activations by theirs where both have a quantizer at the
place; outputs by their signal-to-noise ratio against the float model, in dB.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.aimet.nets import Mlp, Net, Separable  # noqa: E402


class Block(nn.Module):
    """Attention-free transformer block of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.act(self.up(self.norm(x)))))


class Wide(nn.Module):
    """Grouped and transposed convolutions with other activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(3, 8, 3, stride=2), nn.Hardswish()
        self.conv2, self.act2 = nn.Conv2d(8, 8, 3, groups=2, padding=1), nn.ReLU6()
        self.up, self.act3 = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act3(self.up(self.act2(self.conv2(self.act1(self.conv1(x))))))


MODELS = {
    "convolutions, batch norms folded": (Net, (8, 3, 12, 12)),
    "depthwise separable": (Separable, (8, 3, 12, 12)),
    "linear, GELU, softmax": (Mlp, (64, 16)),
    "layer norm, SiLU": (Block, (64, 32)),
    "grouped, transposed, ReLU6": (Wide, (8, 3, 17, 17)),
}


def calibrated(
    package: str, model: nn.Module, batches: list[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Scale by place, and the output on the first batch."""
    folding = importlib.import_module(f"{package}.batch_norm_fold")
    quantsim = importlib.import_module(f"{package}.quantsim")
    defs = importlib.import_module(f"{package}.common.defs")
    folding.fold_all_batch_norms(model, tuple(batches[0].shape))
    sim = quantsim.QuantizationSimModel(model, batches[0], quant_scheme=defs.QuantScheme.min_max)
    with torch.no_grad():
        sim.compute_encodings(lambda m, _: [m(x) for x in batches], None)
        output = sim.model(batches[0])
    return scales_of(sim), output.detach().as_subclass(torch.Tensor)


def scales_of(sim: Any) -> dict[str, torch.Tensor]:
    """Scale by place of everything that a simulation quantizes."""
    scales = {}
    for name, module in sim.named_qmodules():
        places = [(f"{name}.{key}", q) for key, q in module.param_quantizers.items()]
        places += [(f"{name}.input[{i}]", q) for i, q in enumerate(module.input_quantizers)]
        places += [(f"{name}.output[{i}]", q) for i, q in enumerate(module.output_quantizers)]
        scales.update({place: q.get_scale().detach().as_subclass(torch.Tensor) for place, q in places if q})
    return scales


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], places: list[str]) -> float:
    """Largest relative difference of a scale."""
    found = [((ours[p].flatten() - theirs[p].flatten()).abs() / theirs[p].flatten()).max() for p in places]
    return float(max(found, default=torch.zeros(())))


def decibels(signal: torch.Tensor, noisy: torch.Tensor) -> float:
    """Signal-to-noise ratio."""
    return float(10 * torch.log10(signal.square().sum() / (signal - noisy).square().sum()))


def main() -> None:
    """Print the table."""
    print(
        "| model | places | only AIMET | only here | weights | model inputs | other activations | AIMET dB | here dB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for title, (kind, shape) in MODELS.items():
        torch.manual_seed(0)
        float_model = kind().eval()
        state = float_model.state_dict()
        batches = [torch.randn(shape) for _ in range(4)]
        with torch.no_grad():
            expected = float_model(batches[0])
        found = {}
        for package in ("aimet_torch", "bitwright.aimet_torch"):
            model = kind().eval()
            model.load_state_dict(state)
            found[package] = calibrated(package, model, batches)
        (theirs, their_output), (ours, our_output) = found.values()
        both = sorted(theirs.keys() & ours.keys())
        weights = [p for p in both if "[" not in p]
        inputs = [p for p in both if ".input[" in p]
        others = [p for p in both if ".output[" in p]
        row = [
            title, len(both), ", ".join(sorted(theirs.keys() - ours.keys())) or "-",
            ", ".join(sorted(ours.keys() - theirs.keys())) or "-",
            f"{worst(ours, theirs, weights):.1e}", f"{worst(ours, theirs, inputs):.1e}",
            f"{worst(ours, theirs, others):.1e}", f"{decibels(expected, their_output):.1f}",
            f"{decibels(expected, our_output):.1f}",
        ]  # fmt: skip
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
