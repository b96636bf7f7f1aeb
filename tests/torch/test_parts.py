"""Methods of a model, and modules below it, that are called outside of its forward."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ModelError
from bitwright.torch import QuantizationSimModel
from bitwright.torch.interception.record import record


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def keys(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.k(memory), self.v(memory)

    def forward(self, x: Tensor, memory: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> Tensor:
        q = self.q(x)
        k, v = self.keys(memory) if cached is None else cached
        found: Tensor = self.out(F.scaled_dot_product_attention(q, k, v))
        return found


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.attention = Attention()
        self.act = nn.ReLU()
        self.head = nn.Linear(8, 4)

    def decode(self, x: Tensor, memory: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> Tensor:
        found: Tensor = self.head(self.act(x + self.attention(x, memory, cached)))
        return found

    def forward(self, x: Tensor, source: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return self.decode(x, self.encoder(source), cached)

    def encode(self, source: Tensor) -> Tensor:
        return F.normalize(self.encoder(source), dim=-1)


X, SOURCE = (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 5))


@pytest.fixture
def sim() -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(EncoderDecoder().eval(), (X, SOURCE))
    sim.compute_encodings([(X, SOURCE)])
    return sim


@torch.no_grad()
def test_a_module_called_on_its_own_computes_what_it_does_within_the_forward(sim: QuantizationSimModel) -> None:
    inside = sim.capture(["encoder.2.output[0]", "attention.q.output[0]"], (X, SOURCE))
    seen: list[Tensor] = []
    handle = sim.model.encoder.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    sim.model(X, SOURCE)
    handle.remove()
    assert torch.equal(sim.model.encoder(SOURCE), seen[0])
    with sim.in_float():
        assert not torch.equal(sim.model.encoder(SOURCE), seen[0])
    assert torch.equal(sim.model.encoder.forward(SOURCE), seen[0]), inside.keys()
    assert not sim._simulator.unseen and not sim._interceptor.running


@torch.no_grad()
def test_a_method_is_simulated_and_what_is_not_is_said_once(
    sim: QuantizationSimModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bitwright"):
        first = sim.model.encode(SOURCE)
        assert torch.equal(sim.model.encode(SOURCE), first)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and said[0].startswith("EncoderDecoder.encode calls encoder outside the model's forward")
    assert torch.equal(first, F.normalize(sim.model.encoder(SOURCE), dim=-1))
    assert "not recorded: EncoderDecoder.encode: a method that calls parts" in str(sim.coverage())
    with sim.active():  # the remedy
        sim.model.encode(SOURCE)


@torch.no_grad()
def test_an_attention_to_cached_keys_keeps_its_sites(sim: QuantizationSimModel) -> None:
    expected = sim.model(X, SOURCE)
    with sim.active():
        cached = sim.model.attention.keys(sim.model.encoder(SOURCE))
    assert torch.equal(sim.model(X, SOURCE, cached), expected)
    assert not sim._simulator.unseen


def test_parts_take_part_in_calibration_and_training(sim: QuantizationSimModel) -> None:
    sim.compute_encodings(lambda model: (model(X, SOURCE), model.encoder(SOURCE * 3)))
    assert float(sim.quantizers["encoder.0.input[0]"].encoding.max) > 2 * float(SOURCE.max())
    sim.model.encoder(SOURCE).sum().backward()
    assert sim.model.encoder[0].weight.grad is not None
    with pytest.raises(CalibrationError, match="not finite"):
        sim.compute_encodings(lambda model: model.encoder(SOURCE * torch.inf), allow_unreached=True)


def test_a_part_is_refused_before_calibration_and_where_a_whole_forward_is_needed() -> None:
    sim = QuantizationSimModel(EncoderDecoder().eval(), (X, SOURCE))
    with pytest.raises(CalibrationError, match="before calibration"):
        sim.model.encoder(SOURCE)
    recorder = record(EncoderDecoder().eval(), [(X, SOURCE)])
    with (
        sim._interceptor.handled_by(recorder),
        pytest.raises(ModelError, match=r"encoder: this Sequential was called outside the forward.*sim\.active\(\)"),
    ):
        sim.model.encoder(SOURCE)


def test_ctrl_c_inside_a_part_leaves_nothing_open(sim: QuantizationSimModel) -> None:
    expected = sim.model.encoder(SOURCE)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    handle = sim.model.encoder[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sim.model.encoder(SOURCE)
    handle.remove()
    assert not sim._interceptor.running
    assert torch.equal(sim.model.encoder(SOURCE), expected)
    assert torch.equal(copy.deepcopy(sim).model.encoder(SOURCE), expected)
