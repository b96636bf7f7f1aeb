"""Which activations are left in float when only layers' inputs are quantized, in both front ends."""

import numpy as np
import torch
from torch import nn

from bitwright.algorithms.layer_inputs import layer_inputs
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.algorithms.transformer import Decoder


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(x + x)[0] * 2


def convolutional():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Sigmoid())


def layer_reads(sim):
    """Data operands of products with stored weights, by value; of recurrent layers, the states too."""
    layers = [
        op
        for op in sim.graph.ops
        if op.type in ("Gemm", "MatMul", "Conv", "LSTM") and sim.graph.values[op.inputs[1]].is_static
    ]
    return {value for op in layers for value in (op.inputs if op.type == "LSTM" else op.inputs[:1])}


def check(sim, run):
    before = {name for name, site in sim.quantizers.items() if site.enabled}
    report = layer_inputs(sim)
    enabled = {name for name, site in sim.quantizers.items() if site.enabled}
    read = layer_reads(sim)
    assert set(report.in_float) == before - enabled and report.in_float
    for name, site in sim.quantizers.items():
        if site.role in ("input", "output") and site.inner is None and name in enabled:
            shared = [s for s in sim.quantizers.values() if s.quantizer is site.quantizer]
            assert any(s._plan.value in read for s in shared), name
        if site.role == "weight":
            assert (name in enabled) == (name in before)
    assert np.isfinite(run()).all()
    assert layer_inputs(sim).in_float == ()  # done once


def test_a_transformer_in_torch_and_onnx():
    torch.manual_seed(0)
    model, x = Decoder(tied=False), torch.randint(0, 11, (2, 6))
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([x])
    check(sim, lambda: sim.model(x).detach().numpy())
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert program is not None
    other = OnnxSim(program.model_proto, x.numpy())
    other.compute_encodings([x.numpy()])
    check(other, lambda: other.run(x.numpy())[0])


def test_recurrent_layers_keep_what_is_inside_them():
    x = torch.randn(5, 2, 8)
    sim = QuantizationSimModel(Recurrent().eval(), x)
    sim.compute_encodings([x])
    inner = {name for name, site in sim.quantizers.items() if site.inner is not None and site.enabled}
    check(sim, lambda: sim.model(x).detach().numpy())
    assert inner and all(sim.quantizers[name].enabled for name in inner)


def test_models_without_attention_can_be_left_alone():
    x = torch.randn(2, 3, 8, 8)
    sim = QuantizationSimModel(convolutional().eval(), x)
    sim.compute_encodings([x])
    report = layer_inputs(sim, only_with_attention=True)
    assert report.in_float == () and report.summary == "every activation quantized stays so"
    assert layer_inputs(sim).in_float  # the output of the sigmoid


def test_sixteen_bits_stay():
    x = torch.randn(2, 3, 8, 8)
    sim = QuantizationSimModel(convolutional().eval(), x, preset="w8a16")
    assert layer_inputs(sim).in_float == ()
