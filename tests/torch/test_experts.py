"""Mixtures of experts: products with a weight of their own per group of rows, however a model writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.simulation.protocols import sqnr
from bitwright.torch import QuantizationSimModel, quantize

EXPERTS, WIDTH, HIDDEN = 4, 8, 16


class Experts(nn.Module):
    """Top-2 routing, then two layers per expert; ``how`` the products are written."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        with torch.no_grad():
            self.up *= torch.tensor([1.0, 8.0, 0.1, 2.0]).reshape(-1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        token = torch.arange(x.size(0)).repeat_interleave(2)
        rows, expert = x[token], chosen.reshape(-1)
        made = getattr(self, self.how)(rows, expert) * share.reshape(-1, 1)
        return made.reshape(-1, 2, WIDTH).sum(1)

    def grouped(self, rows: Tensor, expert: Tensor) -> Tensor:
        order = torch.sort(expert)[1]
        ends = torch.cumsum(F.one_hot(expert, EXPERTS).sum(0), 0).to(torch.int32)
        hidden = F.grouped_mm(rows[order], self.up.transpose(-2, -1), offs=ends).relu()
        out = F.grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)
        return out[torch.sort(order)[1]]

    def picked(self, rows: Tensor, expert: Tensor) -> Tensor:
        hidden = torch.bmm(self.up[expert], rows.unsqueeze(-1)).relu()
        return torch.bmm(self.down[expert], hidden).squeeze(-1)

    def looped(self, rows: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e in torch.unique(expert):
            at = torch.where(expert == e)[0]
            out = out.index_copy(0, at, F.linear(F.linear(rows[at], self.up[e]).relu(), self.down[e]))
        return out


def batch(seed: int, rows: int = 24) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("how", ["grouped", "picked", "looped"])
def test_every_expert_has_scales_of_its_own(how: str) -> None:
    model = Experts(how).eval()
    sim = QuantizationSimModel(model, batch(0), preset="w8a16")
    sim.compute_encodings([batch(seed) for seed in range(3, 30)], progress=False)
    weights = {id(s.quantizer): s for s in sim.quantizers.values() if s.role == "weight"}.values()
    shapes = sorted(s.encoding.scale.shape for s in weights if len(s.encoding.scale.shape) == 3)
    channels = sorted([(EXPERTS, 1, HIDDEN), (EXPERTS, 1, WIDTH)])
    assert shapes == (channels if how == "grouped" else sorted([(EXPERTS, HIDDEN, 1), (EXPERTS, WIDTH, 1)]))
    with torch.no_grad():
        for seed in (7, 8):  # other experts than in the example take other rows
            assert sqnr(model(batch(seed)).numpy(), sim.model(batch(seed)).numpy()) > 33
    assert not sim._simulator.unseen


def test_a_weight_picked_by_a_computed_index_is_quantized_whole() -> None:
    """What was picked on the example is not what is picked later, though it comes from a parameter alone."""

    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.tensor([[1.0, -1.0], [100.0, -50.0]]))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table[(x[:, 0] > 0).long().max()].unsqueeze(-1)

    x = torch.tensor([[-1.0, 2.0]])
    sim = QuantizationSimModel(Pick(), x, preset="w8a16")
    sim.compute_encodings([x, -x], progress=False)
    with torch.no_grad():
        assert sqnr(Pick()(-x).numpy(), sim.model(-x).numpy()) > 35
    assert sim.quantizers["table"].encoding.scale.shape == (2,)


def test_grouped_products_are_exported_with_a_scale_per_expert_and_column(tmp_path: Path) -> None:
    sim = quantize(
        Experts("grouped").eval(), [batch(s) for s in range(3)], recipe=["fold"], progress=False
    ).sim
    exported = sim.export(tmp_path, "experts")
    report = sim.verify(batch(4))  # rows of one expert stand in the same order in the file
    assert report.ok, str(report)
    import onnxruntime as ort

    session = ort.InferenceSession(str(exported.qdq), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        x, want = batch(0), sim.model(batch(0)).numpy()
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert sqnr(want, np.asarray(found)) > 40
    size = sum(p.stat().st_size for p in tmp_path.iterdir() if p.name.startswith("experts.onnx"))
    assert size < 40_000, "scales are not written once per element"


def test_a_grouped_product_is_recorded_quantized_and_trained() -> None:
    sim = QuantizationSimModel(Experts("grouped"), batch(0))
    sim.compute_encodings([batch(0)], progress=False)
    assert {op.type for op in sim.graph.ops} >= {"GroupedMatMul"}
    sim.model.train()
    sim.model(batch(1)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (sim.model.up, sim.model.down))
