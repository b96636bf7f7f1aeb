"""Low-rank corrections train beside frozen integer weights, and end up in the grid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError, ModelError
from bitwright.torch import LowRankCorrection, QuantizationSimModel

X = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def make(bits: int = 4) -> tuple[QuantizationSimModel, torch.Tensor]:
    """A simulation, and what its float model computes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)).eval()
    sim = QuantizationSimModel(model, X, default_param_bw=bits, default_output_bw=8)
    sim.compute_encodings([X], progress=False)
    return sim, model(X).detach()


def error(sim: QuantizationSimModel, wanted: torch.Tensor) -> float:
    with torch.no_grad():
        return float((sim.model(X) - wanted).square().mean())


def train(correction: LowRankCorrection, sim: QuantizationSimModel, wanted: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(correction.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (sim.model(X) - wanted).square().mean().backward()
        optimizer.step()


def test_the_correction_alone_trains_and_starts_from_nothing() -> None:
    sim, wanted = make()
    before = {name: p.clone() for name, p in sim.model.named_parameters()}
    plain, start = sim.model(X).detach(), error(sim, wanted)
    correction = LowRankCorrection(sim, rank=4)
    assert correction.layers == ("0.weight", "3.weight")
    assert torch.equal(sim.model(X), plain)
    assert sim.model.state_dict().keys() == before.keys()
    train(correction, sim, wanted)
    assert error(sim, wanted) < 0.5 * start
    assert all(torch.equal(p, before[name]) for name, p in sim.model.named_parameters() if name.endswith("weight"))


def test_the_grid_takes_the_correction() -> None:
    """At 8 bits most of it; the weights are on the grid afterwards, whose encoding stays."""
    sim, _ = make(bits=8)
    wanted = make()[1] * 1.5
    start = error(sim, wanted)
    encodings = {name: site.encoding for name, site in sim.quantizers.items() if site.role == "weight"}
    correction = LowRankCorrection(sim, rank=4)
    train(correction, sim, wanted)
    lost = correction.merge()
    assert all(part < 0.5 for part in lost.values()) and not correction.layers
    assert error(sim, wanted) < 0.5 * start
    for name, encoding in encodings.items():
        site = sim.quantizers[name]
        assert site.encoding is encoding
        weight = sim.model.get_parameter(name)
        assert torch.equal(site.quantizer(weight.detach()), weight) and weight.requires_grad
    assert sim.verify(X[:4]).ok


def test_some_layers_and_a_way_back() -> None:
    sim, _ = make()
    plain = sim.model(X).detach()
    correction = LowRankCorrection(sim, rank=100, layers="3", alpha=2.0)
    assert correction.layers == ("3.weight",)
    assert [tuple(p.shape) for p in correction.parameters()] == [(5, 128), (5, 5)]
    with torch.no_grad():
        for p in correction.parameters():
            p.add_(0.1)
    assert not torch.equal(sim.model(X), plain)
    kept = correction.state_dict()
    correction.remove()
    assert torch.equal(sim.model(X), plain)
    LowRankCorrection(sim, rank=100, layers="3", alpha=2.0).load_state_dict(kept)
    assert not torch.equal(sim.model(X), plain)


def test_files_wait_for_the_merge(tmp_path: Path) -> None:
    sim, _ = make()
    correction = LowRankCorrection(sim)
    message = "0.weight: (export|save_checkpoint): it has a low-rank correction beside its integer weights.*merge"
    for write in (lambda: sim.export(tmp_path, "m"), lambda: sim.save_checkpoint(tmp_path / "c"), sim.state_dict):
        with pytest.raises(ModelError, match=message):
            write()
    correction.merge()
    sim.save_checkpoint(tmp_path / "c")


def test_what_cannot_be_corrected_is_refused() -> None:
    sim, _ = make()
    with pytest.raises(ConfigError, match="rank=0"):
        LowRankCorrection(sim, rank=0)
    with pytest.raises(ConfigError, match="no module is called 'conv'"):
        LowRankCorrection(sim, layers="conv")
    with pytest.raises(ConfigError, match="no weight of layers='1' is quantized"):
        LowRankCorrection(sim, layers="1")
    first = LowRankCorrection(sim, layers="0")
    with pytest.raises(ConfigError, match="no weight of layers='0' is quantized on an integer grid and trains"):
        LowRankCorrection(sim, layers="0")
    first.remove()
    LowRankCorrection(sim, layers="0")
