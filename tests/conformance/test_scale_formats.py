"""Presets whose scales have a format of their own: simulated alike in both front ends, exported, read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.core.numerics.affine import is_sayable
from bitwright.core.numerics.spec import PRESETS
from bitwright.export.encodings.read import read_encodings
from tests.support.simulations import calibrated

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
SCALED = [name for name, p in PRESETS.items() if p.weight and p.weight.scale_format.name != "float32"]

#: those whose elements version 2.0.0 of the encodings files has a name for
IN_FILES = ("w4lpbq", "mxfp4", "mxfp8", "nvfp4")
#: one for every form in which weights are stored in an ONNX file
FORMS = ("w4lpbq", "mxint8", "mxfp6_e3m2", "nvfp4")


class Net(nn.Module):
    """Two layers whose blocks differ in size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 10)
        with torch.no_grad():
            self.up.weight *= torch.exp(torch.randn(128, 1)) * torch.exp(torch.randn(1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.fixture(scope="module")
def onnx_net() -> onnx.ModelProto:
    """The network as an ONNX graph with its weights as Gemm takes them."""
    net, make = Net(), onnx.helper
    names = {
        "up.weight": net.up.weight,
        "up.bias": net.up.bias,
        "down.weight": net.down.weight,
        "down.bias": net.down.bias,
    }
    nodes = [
        make.make_node("Gemm", ["x", "up.weight", "up.bias"], ["h"], "up", transB=1),
        make.make_node("Relu", ["h"], ["r"], "relu"),
        make.make_node("Gemm", ["r", "down.weight", "down.bias"], ["y"], "down", transB=1),
    ]  # fmt: skip
    weights = [onnx.numpy_helper.from_array(t.detach().numpy(), name) for name, t in names.items()]
    info = make.make_tensor_value_info
    graph = make.make_graph(nodes, "net", [info("x", 1, ["n", 64])], [info("y", 1, ["n", 10])], weights)
    return make.make_model(graph, opset_imports=[make.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("preset", SCALED)
def test_both_front_ends_export_and_read_back(preset: str, onnx_net: onnx.ModelProto, tmp_path: Path) -> None:
    sim = calibrated(bt.QuantizationSimModel(Net(), X, preset=preset), [X])
    other = calibrated(bo.QuantizationSimModel(onnx_net, preset=preset), [{"x": X.numpy()}])
    for name in ("up.weight", "down.weight"):
        one, two = sim.quantizers[name].encoding, other.quantizers[name].encoding
        assert one == two and is_sayable(one) and one.scale_format.name != "float32"
    assert f"({one.scale_format.name} scales)" in str(sim.coverage())
    with torch.no_grad():
        y = sim.model(X).numpy()
    np.testing.assert_allclose(other.session.run(None, {"x": X.numpy()})[0], y, rtol=1e-4, atol=1e-4)

    if preset in FORMS:
        sim.export(tmp_path, filename_prefix="net", dummy_input=X)
        assert sim.verify(X).ok
    if preset in IN_FILES:
        sim.save_encodings(tmp_path / "net2.encodings", "2.0.0")
        fresh = bt.QuantizationSimModel(Net(), X, preset=preset)
        fresh.load_encodings(tmp_path / "net2.encodings")
        for name in ("up.weight", "down.weight"):
            assert fresh.quantizers[name].encoding == sim.quantizers[name].encoding


@pytest.mark.parametrize("preset", SCALED)
def test_a_checkpoint_keeps_the_format(preset: str, tmp_path: Path) -> None:
    sim = calibrated(bt.QuantizationSimModel(Net(), X, preset=preset), [X])
    sim.save_checkpoint(tmp_path / "kept")
    fresh = bt.QuantizationSimModel(Net(), X, preset=preset)
    fresh.load_checkpoint(tmp_path / "kept")
    assert fresh.quantizers["up.weight"].encoding == sim.quantizers["up.weight"].encoding


def test_lpbq_is_written_in_two_factors(tmp_path: Path) -> None:
    sim = calibrated(bt.QuantizationSimModel(Net(), X, preset="w4lpbq"), [X])
    sim.save_encodings(tmp_path / "lpbq.encodings")
    record = read_encodings(tmp_path / "lpbq.encodings").by_name["up.weight"]
    assert record.grouped is not None and record.grouped.decompressed_bits == 8
    assert record.resolve((128, 64), 0, 1).encoding == sim.quantizers["up.weight"].encoding


def test_rounding_methods_stay_on_the_format() -> None:
    sim = calibrated(bt.QuantizationSimModel(Net(), X, preset="nvfp4"), [X])
    bt.apply_gptq(sim, [X], progress=False)
    assert is_sayable(sim.quantizers["up.weight"].encoding)
    sim = calibrated(bt.QuantizationSimModel(Net(), X, preset="w4lpbq"), [X])
    bt.apply_reconstruction(sim, [X], "seq_mse", progress=False)
    encoding = sim.quantizers["up.weight"].encoding
    assert is_sayable(encoding) and encoding.scale_format.name == "uint4"


def test_a_rule_sets_the_format_of_scales() -> None:
    rules = {"preset": "w4g32", "rules": [{"match": "up", "weight": {"scale_format": "e8m0"}}]}
    sim = calibrated(bt.QuantizationSimModel(Net(), X, config_file=rules), [X])
    found = {n: sim.quantizers[n].encoding.scale_format.name for n in ("up.weight", "down.weight")}
    assert found == {"up.weight": "e8m0", "down.weight": "float32"}


OF_ENGINES = {
    "int4": {"format": "int4"},
    "uint4 float16": {"format": "uint4", "symmetry": "asymmetric", "scale_format": "float16"},
    "int2 bfloat16": {"format": "int2", "scale_format": "bfloat16"},
    "nf4": {"format": "nf4", "scale_format": "fp16"},
    "mxfp4": {"format": "float4_e2m1", "scale_format": "e8m0"},
}


@pytest.mark.parametrize("facets", OF_ENGINES.values(), ids=OF_ENGINES)
def test_blocks_that_do_not_divide_are_simulated_and_exported(
    facets: dict[str, str], onnx_net: onnx.ModelProto, tmp_path: Path
) -> None:
    """Blocks of 48 of 64 and 128 inputs; the last one has fewer elements."""
    rules = {"preset": "w4", "rules": [{"match": "*", "weight": {"granularity": {"per_block": 48}, **facets}}]}
    sim = calibrated(bt.QuantizationSimModel(Net(), X, config_file=rules), [X])
    other = calibrated(bo.QuantizationSimModel(onnx_net, config_file=rules), [{"x": X.numpy()}])
    for name, blocks in (("up.weight", 2), ("down.weight", 3)):
        one, two = sim.quantizers[name].encoding, other.quantizers[name].encoding
        assert one == two and is_sayable(one) and one.scale.shape[1] == blocks
    with torch.no_grad():
        y = sim.model(X).numpy()
    np.testing.assert_allclose(other.session.run(None, {"x": X.numpy()})[0], y, rtol=1e-4, atol=1e-4)
    sim.export(tmp_path, filename_prefix="net", dummy_input=X)
    assert sim.verify(X).ok


def test_products_in_padded_blocks_are_written_and_read_again(tmp_path: Path) -> None:
    """MatMulNBits pads the last block of each row to the size of the others."""
    torch.manual_seed(0)
    x, net = torch.randn(4, 70), nn.Sequential(nn.Linear(70, 24))
    sim = calibrated(bt.QuantizationSimModel(net, x, preset="w4g32"), [x])
    sim.export(tmp_path, "net", x, weight_only="nbits")
    graph = onnx.load(tmp_path / "net.onnx").graph
    packed = {i.name: list(i.dims) for i in graph.initializer}
    assert [n.op_type for n in graph.node] == ["MatMulNBits"] and packed["0.weight_packed"] == [24, 3, 16]
    assert sim.verify(x, weight_only="nbits").ok


@pytest.mark.parametrize("init", ["calibrated", "lsq", "lsq+"])
def test_ranges_of_padded_blocks_train(init: str) -> None:
    """The gradient of a scale is that of the weights of its block, of which the last has fewer."""
    torch.manual_seed(0)
    x, net = torch.randn(4, 70), nn.Sequential(nn.Linear(70, 24))
    full = nn.Sequential(nn.Linear(96, 24))
    with torch.no_grad():
        full[0].weight.zero_()[:, :70] = net[0].weight
        full[0].bias.copy_(net[0].bias)
    found = []
    for model, given in ((net, x), (full, nn.functional.pad(x, (0, 26)))):
        sim = calibrated(bt.QuantizationSimModel(model, given, preset="w4g32"), [given])
        sim.learn_ranges(init="calibrated" if model is full else init)
        if model is full:
            for name in ("0.weight",):  # the same start, whatever the padding says of means
                sim.quantizers[name].encoding = found[0][0]
        encoding = sim.quantizers["0.weight"].encoding
        sim.model(given).square().mean().backward()  # small: large gradients are bounded
        found.append((encoding, sim.range_parameters()[0].grad * (24 * model[0].weight.shape[1]) ** 0.5))
    assert found[0][0].scale.shape == (24, 3)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)
