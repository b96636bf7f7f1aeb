"""Programs of torch.export after run_decompositions, and calls that cannot be seen or have no shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel


class Core(nn.Module):
    """A layer of each kind that the decompositions rewrite."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.BatchNorm2d(8)
        self.up, self.groups = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.GroupNorm(2, 8)
        self.layer_norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.line, self.head = nn.Conv1d(8, 8, 3, padding="same", dilation=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.gelu(self.norm(self.conv(x))), 2)
        y = self.groups(self.up(y)).flatten(2).transpose(1, 2)
        y = self.layer_norm(y)
        y = y + self.attention(y, y, y)[0]
        y = self.line(y.transpose(1, 2)).mean(2)
        return F.log_softmax(self.head(y), -1)


def test_decomposed_programs_are_quantized_like_the_module() -> None:
    torch.manual_seed(0)
    model, x = Core().eval(), torch.randn(4, 3, 6, 6)
    program = torch.export.export(model, (x,)).run_decompositions()
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"aten.convolution.default", "aten.native_layer_norm.default", "aten.addmm.default"} <= targets
    sim = QuantizationSimModel(program.module(), x)
    types = {op.type for op in sim.graph.ops}
    assert not [t for t in types if "." in t], "no operator is unknown"
    weighted = [op.type for op in sim.graph.ops if op.type in ("Conv", "ConvTranspose", "Gemm", "MatMul")]
    assert sorted(weighted) == ["Conv", "Conv", "ConvTranspose", "Gemm", "Gemm", "MatMul", "MatMul", "MatMul"]
    sim.compute_encodings([x], progress=False)
    assert sum(site.role == "weight" for site in sim.quantizers.values()) == 6
    with torch.no_grad():
        assert sqnr(model(x).numpy(), sim.model(x).numpy()) > 25


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_and_the_remedy_works(layout: torch.layout) -> None:
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    said = r"nested tensor.*Remedy: pad the rows, torch\.nested\.to_padded_tensor\(x, 0\.0\)"
    with pytest.raises(ModelError, match=said):
        QuantizationSimModel(model, nested)
    sim = QuantizationSimModel(model, torch.nested.to_padded_tensor(nested, 0.0))
    with pytest.raises(ModelError, match=said):
        sim.compute_encodings([nested], progress=False)
    sim.compute_encodings([torch.nested.to_padded_tensor(nested, 0.0)], progress=False)
    with pytest.raises(ModelError, match=said):
        sim.model(nested)


def test_a_nested_tensor_made_inside_is_refused_too() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            nested = torch.nested.nested_tensor([x[0, :2], x[1]], layout=torch.jagged)
            return torch.nested.to_padded_tensor(self.fc(nested), 0.0)

    with pytest.raises(ModelError, match=r"^forward: it is a nested tensor"):
        QuantizationSimModel(Inside(), torch.randn(2, 3, 8))


class Attention(nn.Module):
    def __init__(self, flex: bool) -> None:
        super().__init__()
        self.qkv, self.flex = nn.Linear(16, 16), flex

    def forward(self, x: Tensor) -> Tensor:
        q = self.qkv(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return flex_attention(q, q, q) if self.flex else F.scaled_dot_product_attention(q, q, q)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_refused_and_the_remedy_works() -> None:
    x = torch.randn(1, 16, 16)
    with pytest.raises(ModelError, match=r"calls flex_attention.*Remedy: use F\.scaled_dot_product_attention"):
        QuantizationSimModel(Attention(True), x)
    sim = QuantizationSimModel(Attention(False), x)
    sim.compute_encodings([x], progress=False)
    assert any(op.type == "Softmax" for op in sim.graph.ops)
