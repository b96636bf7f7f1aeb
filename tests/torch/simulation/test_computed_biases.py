"""Biases that are computed in every run (packed ones of attention, scaled ones), and that are added behind a product."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel


class Attention(nn.Module):
    """``self``: one source; ``cross``: key and value have another; ``three``: each has its own."""

    def __init__(self, sources: str) -> None:
        super().__init__()
        self.sources = sources
        self.query, self.other = nn.Linear(8, 16), nn.Linear(8, 16)
        self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 4)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        k = q if self.sources == "self" else self.other(x.flip(1))
        v = F.relu(k) if self.sources == "three" else k
        return self.head(self.attention(q, k, v, need_weights=False)[0])


class Scaled(nn.Module):
    """The bias is a product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16))
        self.gain, self.head = nn.Parameter(torch.tensor([1.5])), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.linear(x, self.weight, self.bias * self.gain)))


class ByHand(nn.Module):
    """Products and additions without ``linear``; one of the biases is a row, one is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(n, 16) * 0.3) for n in (8, 16, 16))
        self.bias, self.row = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(1, 16))
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(x @ self.first + self.bias)
        y = F.relu(torch.matmul(y, self.second) + self.row)
        return y @ self.third + self.bias * self.gain


def integer_biases(path: Path) -> int:
    """How many biases of a file are int32; no operator reads one that is computed in float."""
    graph = onnx.load(str(path)).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    read = [node.input[-1] for node in graph.node if node.op_type in ("Add", "Gemm")]
    assert {made.get(name) for name in read} == {"DequantizeLinear"}, read
    return sum(i.data_type == onnx.TensorProto.INT32 for i in graph.initializer)


MODELS = {
    **{sources: (lambda sources=sources: Attention(sources)) for sources in ("self", "cross", "three")},
    "scaled": Scaled,
    "by-hand": ByHand,
}
X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))


def simulated(name: str) -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(MODELS[name]().eval(), X, preset="w4a8")
    return sim


@pytest.mark.quick_variants("scaled-learned")
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("name", MODELS)
def test_they_are_integers_in_simulation_and_file_and_trained_ones_verify(
    name: str, learned: bool, tmp_path: Path
) -> None:
    sim = simulated(name)
    sim.compute_encodings([X], progress=False)
    if learned:
        sim.learn_ranges()
    biases = [site for site in sim.quantizers.values() if site.role == "bias"]
    assert biases and all(site.encoding is not None for site in biases)
    ranges = sim.range_parameters() if learned else []
    optimizer = torch.optim.Adam([*sim.model.parameters(), *ranges], lr=3e-3)
    sim.model.train()
    for _ in range(8):
        optimizer.zero_grad()
        (sim.model(X) - 1.0).square().mean().backward()
        optimizer.step()
    sim.model.eval()
    report = sim.verify(X)
    assert report.ok, report
    sim.export(str(tmp_path), "model", X)
    assert integer_biases(tmp_path / "model.onnx") == len(biases)


def test_loaded_encodings_serve_before_any_run(tmp_path: Path) -> None:
    sim = simulated("cross")
    sim.compute_encodings([X], progress=False)
    sim.save_checkpoint(tmp_path)
    again = simulated("cross")
    again.load_checkpoint(tmp_path)
    torch.testing.assert_close(again.model(X), sim.model(X), rtol=0, atol=0)
    assert again.verify(X).ok


def test_calibration_sees_the_bias_of_its_own_run() -> None:
    """A bias far from the recorded one asks for a larger scale of the weight, so that int32 can hold it."""
    sim = simulated("scaled")
    with torch.no_grad():
        sim.model.weight[0] = 0.0  # a channel without weights has the smallest of scales
        sim.model.bias[0] = 1e6
    sim.compute_encodings([X], progress=False)
    (bias,) = (site for site in sim.quantizers.values() if site.role == "bias" and site.name != "head.bias")
    assert bias.encoding is not None and bias.encoding.scale[0] * 2.0**31 > 1.5e6


def test_the_file_of_an_onnx_model_has_them_as_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = str(tmp_path / "float.onnx")  # with its weights in a file beside it
    torch.onnx.export(Attention("cross").eval(), (X,), path, dynamo=True, verbose=False, external_data=True)
    sim = OnnxSim(path, default_activation_bw=8, default_param_bw=4)
    sim.compute_encodings([{"x": X.numpy()}], progress=False)
    sim.export(str(tmp_path / "out"), "model")
    assert (
        integer_biases(tmp_path / "out" / "model.onnx") == 5
    )  # key and value are one product, and the last bias of attention is zero
