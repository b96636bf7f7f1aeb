"""Every loss and both sides of the comparison, against a search by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.core.numerics.granularity import PerBlock
from bitwright.errors import ConfigError
from bitwright.methods.rounding.seq_mse import Settings
from bitwright.torch import QuantizationSimModel, apply_reconstruction

CANDIDATES = 10


class Two(nn.Module):
    """Two layers, so that the second one's inputs are not what the float model made."""

    def __init__(self, spatial: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3) if spatial else nn.Linear(16, 8)
        self.second: Any = nn.Conv2d(8, 6, 1) if spatial else nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def batches(spatial: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (3, 4, 7, 7) if spatial else (40, 16)
    return [scale * torch.randn(shape, generator=generator) for scale in (1.0, 3.0)]


def by_hand(sim: Any, spatial: bool, loss: str, symmetry: str, scale: np.ndarray, block: int | None) -> np.ndarray:
    """The best scales of the second layer, found one candidate after the other on its outputs; ``[O, blocks]``."""
    model = sim.model
    w = model.second.weight.detach().flatten(1)
    size = block or w.shape[1]
    losses, candidates = [], []
    for i in range(CANDIDATES, 0, -1):
        candidate = torch.tensor(scale * np.float32(i / CANDIDATES)).reshape(w.shape[0], -1)
        spread = candidate.repeat_interleave(size, 1)
        w_q = torch.clamp((w / spread).round(), -4, 3) * spread
        logs, total, rows = [], 0.0, 0
        for x in batches(spatial):
            with sim.in_float():
                real = model.first(x).relu().detach()
            quantized = sim.quantizers["first.weight"].quantizer(model.first.weight.detach())
            made = nn.functional.conv2d(x, quantized, model.first.bias) if spatial else nn.functional.linear(
                x, quantized, model.first.bias)  # fmt: skip
            made = made.relu().detach()
            a, b = (real if symmetry != "symqt" else made), (real if symmetry == "symfp" else made)
            if spatial:
                a, b = (t.permute(0, 2, 3, 1).reshape(-1, 8) for t in (a, b))
            cut = [slice(k, k + size) for k in range(0, w.shape[1], size)]
            want = torch.stack([a[:, s] @ w[:, s].T for s in cut], 2).double()
            found = torch.stack([b[:, s] @ w_q[:, s].T for s in cut], 2).double()
            error = found - want
            total = total + (error.abs() if loss == "l1" else error.square()).sum(0)
            rows += len(want)
            logs.append((error.square().mean(0) / want.square().mean(0)).log())
        losses.append(torch.stack(logs).mean(0) if loss == "sqnr" else total / rows)
        candidates.append(candidate)
    best = torch.stack(losses).argmin(0)
    return torch.stack(candidates).gather(0, best[None])[0].numpy()


@pytest.mark.parametrize("block", [None, 4], ids=["per-channel", "blocks"])
@pytest.mark.parametrize("spatial", [False, True], ids=["linear", "conv"])
@pytest.mark.parametrize("symmetry", ["symqt", "symfp", "asym"])
@pytest.mark.parametrize("loss", ["mse", "l1", "sqnr"])
def test_the_best_candidate_is_chosen(loss: str, symmetry: str, spatial: bool, block: int | None) -> None:
    torch.manual_seed(1)
    sim = QuantizationSimModel(Two(spatial).eval(), batches(spatial)[0], default_param_bw=3)
    for site in sim.quantizers.values():
        site.enabled = site.role == "weight"
    site = sim.quantizers["second.weight"]
    if block is not None:
        from dataclasses import replace

        site.spec = replace(site.quantizer.spec, granularity=PerBlock(block, 1, 0))
    sim.compute_encodings(batches(spatial))
    start = np.array(site.encoding.scale)
    options = {"num_candidates": CANDIDATES, "loss_fn": loss, "inp_symmetry": symmetry}
    apply_reconstruction(sim, batches(spatial), "seq_mse", progress=False, **options)
    wanted = by_hand(sim, spatial, loss, symmetry, start, block)
    np.testing.assert_allclose(site.encoding.scale.reshape(wanted.shape), wanted, rtol=1e-6)
    assert (site.encoding.scale < start).any() and site.frozen


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="loss_fn: it is 'kl'.*mse, l1, sqnr"):
        Settings(loss_fn="kl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="inp_symmetry: it is 'both'.*symqt, symfp, asym"):
        Settings(inp_symmetry="both")  # type: ignore[arg-type]
