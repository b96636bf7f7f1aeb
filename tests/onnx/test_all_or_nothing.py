"""Methods that fail halfway leave a simulation of an ONNX model as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitwright.methods.rounding import gptq
from bitwright.onnx import QuantizationSimModel, apply_bias_correction, apply_gptq
from tests.onnx.nets import Net


def network():
    """Three layers, the weight of the second one computed by the model."""
    net = Net()
    y = net("Relu", net("Gemm", net.input("x", ("n", 8)), net.weights(8, 8, name="a"), transB=1, name="first"))
    turned = net("Transpose", net.weights(8, 8, name="b"), perm=[1, 0])
    y = net("Relu", net("MatMul", y, turned, name="second"))
    return net.model(net("Gemm", y, net.weights(4, 8, name="c"), net.weights(4), transB=1, name="third", out="y"))


def batches():
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((16, 8)).astype(np.float32)} for _ in range(3)]


def calibrated():
    sim = QuantizationSimModel(network(), batches()[0])
    sim.compute_encodings(batches())
    return sim


def state(sim):
    sites = {s.name: (s.encoding, s.frozen, s.enabled) for s in sim.quantizers.values()}
    return sites, sim.run(batches()[0])[0]


@pytest.mark.parametrize("at", (2, 3))
def test_gptq_that_fails_at_a_later_layer(at, monkeypatch):
    sim, original, calls = calibrated(), gptq.round_columns, []
    before = state(sim)

    def fails(*args):
        calls.append(1)
        if len(calls) == at:
            raise torch.linalg.LinAlgError("the matrix is singular")
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(gptq, "round_columns", fails)
        with pytest.raises(torch.linalg.LinAlgError):
            apply_gptq(sim, batches(), progress=False)
    after = state(sim)
    assert after[0] == before[0] and np.array_equal(after[1], before[1])
    apply_gptq(sim, batches(), progress=False)
    assert sum(s.frozen for s in sim.quantizers.values()) == 3


def test_bias_correction_whose_data_fail():
    net = Net()
    y = net.input("x", ("n", 8))
    for name in ("first", "second"):
        weight, bias = net.weights(8, 8, name=f"{name}.weight"), net.weights(8, name=f"{name}.bias")
        y = net("Relu", net("Gemm", y, weight, bias, transB=1, name=name))
    sim = QuantizationSimModel(net.model(y), batches()[0], preset="w4a8")
    sim.compute_encodings(batches())
    before = state(sim)
    moments = {"first": (np.zeros(8), np.ones(8))}

    def data():
        yield batches()[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        apply_bias_correction(sim, data(), moments=moments, progress=False)
    after = state(sim)
    assert after[0] == before[0] and np.array_equal(after[1], before[1])
    report = apply_bias_correction(sim, batches(), moments=moments, progress=False)
    assert report.analytic == {"second"}  # the layer that is corrected before any data are read
