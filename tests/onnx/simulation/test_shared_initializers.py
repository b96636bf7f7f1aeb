"""Initializers that several nodes read: one encoding, and one stored tensor, for all that read it in the same way."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from bitwright.compare.verify import verify_folder
from bitwright.core.numerics.granularity import PerChannel
from bitwright.onnx import QuantizationSimModel
from tests.onnx.nets import Net


def same():
    net = Net()
    weight = net.weights(8, 8, name="w")
    hidden = net("Relu", net("Gemm", net.input("x", ("n", 8)), weight, transB=1, name="a"))
    return net.model(net("Gemm", hidden, weight, transB=1, name="b", out="y"))


def embedding():
    net = Net()
    weight = net.weights(8, 8, name="w")
    rows = net("Gather", weight, net("Cast", net.input("x", ("n", 8)), to=7), axis=0, name="a")
    return net.model(net("Gemm", net("ReduceMean", rows, axes=[1], keepdims=0), weight, transB=1, out="y"))


def turned():
    net = Net()
    weight = net.weights(8, 8, name="w")
    hidden = net("Relu", net("Gemm", net.input("x", ("n", 8)), weight, transB=1, name="a"))
    return net.model(net("MatMul", hidden, weight, name="b", out="y"))


def exported(build, tmp_path):
    data = {"x": np.random.default_rng(0).uniform(0, 3, (4, 8)).astype(np.float32)}
    sim = QuantizationSimModel(build(), data)
    sim.compute_encodings([data])
    sim.export(tmp_path, "model")
    report = verify_folder(tmp_path)
    assert report.ok, str(report)
    stored = [name for name in ir.load(tmp_path / "model.onnx").graph.initializers if name.startswith("w_q")]
    return [site for site in sim.quantizers.values() if site.role == "weight"], stored


@pytest.mark.parametrize("build", (same, embedding), ids=lambda build: build.__name__)
def test_readers_along_one_axis_share_one_encoding_and_one_tensor(build, tmp_path):
    sites, stored = exported(build, tmp_path)
    assert len(sites) == 2 and sites[0].quantizer is sites[1].quantizer and stored == ["w_q"]
    before = sites[1].encoding
    sites[0].enabled = False
    assert not sites[1].enabled and sites[1].encoding == before  # what is done to one is done to both


def test_readers_along_other_axes_have_scales_of_their_own_and_tensors_of_their_own(tmp_path):
    sites, stored = exported(turned, tmp_path)
    assert [site.encoding.granularity for site in sites] == [PerChannel(0), PerChannel(1)]
    assert sites[0].quantizer is not sites[1].quantizer and stored == ["w_q", "w_q_1"]
