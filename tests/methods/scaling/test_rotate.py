"""Rotation: Hadamard matrices, residual streams and heads, language models of transformers, and why a graph does not allow it."""

from __future__ import annotations

import copy
import io
import logging

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import bitwright
from bitwright.core.graph.operators import is_rotation
from bitwright.core.numerics.rotations import hadamard, random_rotation
from bitwright.core.numerics.spec import Preset, dynamic_spec, weight_spec
from bitwright.errors import ConfigError
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import fold_norms as fold_onnx
from bitwright.onnx import rotate_model as rotate_onnx
from bitwright.torch import QuantizationSimModel as TorchSim
from bitwright.torch import TorchView, fold_norms, rotate_model, smooth_model
from tests.methods.transformer import Decoder, RMSNorm, tokens
from tests.onnx.nets import Net, body
from tests.support.simulations import calibrated

# ------------------------------------------------------------------------------------------------ matrices


@pytest.mark.parametrize(
    "n", [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 40, 44, 48, 56, 60, 64, 76, 80, 96, 144, 160, 768, 896]
)
def test_hadamard_matrices_are_orthogonal_signs(n):
    H = hadamard(n)
    assert H.shape == (n, n) and set(np.unique(H)) <= {-1.0, 1.0}
    np.testing.assert_array_equal(H @ H.T, n * np.eye(n))


@pytest.mark.parametrize("n", [0, 3, 6, 10, 92, 172])
def test_other_sizes_are_refused(n):
    with pytest.raises(ConfigError, match=f"hadamard: no construction here gives a Hadamard matrix of size {n}"):
        hadamard(n)


@pytest.mark.parametrize("n", [5, 12, 64, 172])
def test_random_rotations_are_orthogonal_and_repeatable(n):
    R = random_rotation(n, seed=3)
    np.testing.assert_allclose(R @ R.T, np.eye(n), atol=1e-12)
    np.testing.assert_array_equal(R, random_rotation(n, seed=3))
    assert not np.array_equal(R, random_rotation(n, seed=4))


def test_an_outlier_is_spread_evenly():
    x = np.zeros(64)
    x[5] = 64.0
    np.testing.assert_allclose(np.abs(x @ random_rotation(64)), 8.0)


# ---------------------------------------------------------------------------------------------- on a model


@pytest.mark.parametrize("norm", ["rms", "RMSNorm"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_the_stream_and_the_values_are_rotated_and_the_function_stays(norm, tied, bias):
    model, x = Decoder(norm, tied=tied, bias=bias), tokens(4)
    before, kept = model(x), copy.deepcopy(model.state_dict())
    report = rotate_model(model, dummy_input=x)
    (stream,) = report.streams
    assert {layer.op for layer in stream.producers} == {"embed", "o", "down"}
    assert {layer.op for layer in stream.consumers} == {"q", "k", "v", "gate", "up", "head"}
    assert [heads.value.op for heads in report.heads] == ["v"]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model.embed.weight, kept["embed.weight"], atol=0.1)
    report.undo()
    assert (model.head.weight is model.embed.weight) == tied
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def test_outliers_of_the_stream_are_gone():
    model, x = Decoder(tied=False), tokens(16)
    model.embed.weight.data[:, 3] += 30
    model.o.weight.data[3] *= 10

    def peak(value):
        (captured,) = TorchView(model, [x]).capture([value], [x])
        array = captured[value][0]
        return float(np.abs(array).max() / array.std())

    before = peak("embed.output[0]")
    rotate_model(model, dummy_input=x)
    assert peak("embed.output[0]") < before / 1.4


def test_learned_positions_are_rotated_with_the_stream():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(7, 8))
            self.norm, self.fc, self.last = RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.embed(x) + self.positions
            return self.last(x + self.fc(self.norm(x)))

    torch.manual_seed(0)
    model, x = Positions().eval(), tokens()
    before = model(x)
    report = rotate_model(model, dummy_input=x)
    assert report.streams[0].tables == ("positions",)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


class Bare(nn.Module):
    """An embedding, what is done to it, and a linear layer."""

    def __init__(self, wiring, **modules):
        super().__init__()
        self.embed, self.wiring, self.last = nn.Embedding(11, 8), wiring, nn.Linear(8, 3)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.wiring(self, self.embed(x))


def scaled_norm():
    norm = nn.RMSNorm(8)
    norm.weight.data.uniform_(0.5, 2)
    return norm


def test_a_norm_without_a_weight_is_passed():
    torch.manual_seed(0)
    model = Bare(lambda m, x: m.last(m.norm(x)), norm=nn.RMSNorm(8, elementwise_affine=False)).eval()
    x = tokens()
    before, table = model(x), model.embed.weight.detach().clone()
    report = rotate_model(model, dummy_input=x)
    assert len(report.streams) == 1 and not torch.allclose(model.embed.weight, table, atol=0.1)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


# name -> model, what the refusal of the embedding says
REFUSED = {
    "layer-norm": (
        lambda: Bare(lambda m, x: m.last(m.norm(x)), norm=nn.LayerNorm(8)),
        "norm (LayerNormalization) reads it, which subtracts the mean: a rotation does not keep it",
    ),
    "norm-that-is-returned": (
        lambda: Bare(lambda m, x: (m.last(m.norm(x)), torch.relu(m.norm(x))), norm=scaled_norm()),
        "the weight of the norm norm is not folded into the layers after it",
    ),
    "activation": (lambda: Bare(lambda m, x: m.last(torch.relu(x))), "relu (Relu) reads it"),
    "returned": (lambda: Bare(lambda m, x: (m.last(x), x)), "embed.output[0] in it is an output of the model"),
    "reused": (
        lambda: Bare(lambda m, x: m.last(m.fc(m.fc(x))), fc=nn.Linear(8, 8)),
        "fc is used at 2 places of the model, which share fc.weight",
    ),
    "convolution": (
        lambda: Bare(lambda m, x: m.last(m.conv(x)), conv=nn.Conv1d(7, 7, 1)),
        "conv (Conv) reads it with channels on another axis",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rotated_says_why_and_stays(name):
    build, reason = REFUSED[name]
    torch.manual_seed(0)
    model, x = build().eval(), tokens()
    kept = copy.deepcopy(model.state_dict())
    report = rotate_model(model, dummy_input=x)
    assert not report.streams
    assert [line.reason for line in report.refused if line.op == "embed"] == [reason], str(report)
    assert f"left     embed: {reason}" in str(report)
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def test_a_decoder_with_layer_norms_is_left_as_it_was():
    model, x = Decoder("LayerNorm"), tokens()
    kept = copy.deepcopy(model.state_dict())
    report = rotate_model(model, dummy_input=x)
    assert not report.streams and not report.heads and not report.norms.groups
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "mistral": (MistralForCausalLM, MistralConfig),
    "phi3": (Phi3ForCausalLM, Phi3Config),
    "gemma": (GemmaForCausalLM, GemmaConfig),
}
TOKENS = {"input_ids": torch.arange(16).reshape(2, 8), "use_cache": False}


def language_model(name):
    cls, config = MODELS[name]
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    made = cls(config(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if key.endswith("norm.weight"):
                parameter.add_(0.5 * torch.rand_like(parameter))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_the_stream_is_rotated_and_the_function_kept(name):
    model = language_model(name)
    wanted, before = model(**TOKENS).logits, model.model.layers[0].mlp.down_proj.weight.clone()
    report = rotate_model(model, dummy_input=TOKENS)
    assert len(report.streams) == 1 and len(report.norms.groups) == 5 and report.changed
    assert not torch.equal(before, model.model.layers[0].mlp.down_proj.weight)
    assert torch.allclose(model(**TOKENS).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_norms_are_folded_over_the_slice(name):
    model = language_model(name)
    wanted = model(**TOKENS).logits
    report = fold_norms(model, dummy_input=TOKENS)
    assert "model.norm" in str(report) and not report.refused
    assert torch.equal(model.model.norm.weight, torch.full((32,), 0.0 if name == "gemma" else 1.0))
    assert torch.allclose(model(**TOKENS).logits, wanted, rtol=1e-4, atol=1e-5)


def test_norms_of_one_plus_weight_are_smoothed():
    model = language_model("gemma")
    wanted = model(**TOKENS).logits
    report = smooth_model(model, [TOKENS])
    assert report.changed and torch.allclose(model(**TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)


class Normed(nn.Module):
    """A norm and what reads it, with something in between."""

    def __init__(self, between, bias=True):
        super().__init__()
        self.between, self.norm, self.last = between, nn.LayerNorm(8, bias=bias), nn.Linear(8, 4)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x):
        return self.last(self.between(self.norm(x)))


@pytest.mark.parametrize(
    ("between", "folds"),
    [
        (lambda y: y[:, -1:], True),
        (lambda y: y[:, 2], True),
        (lambda y: y.reshape(-1, 8), True),
        (lambda y: y.clone().contiguous(), True),
        (lambda y: y[:, torch.tensor([2, 0])], False),  # torch does not say of which axis
        (lambda y: y[..., torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])], False),
        (lambda y: y.flip(-1), False),
        (lambda y: torch.relu(y), False),
    ],
    ids=["slice", "select", "reshape", "copy", "rows", "channels", "flip", "relu"],
)
@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_what_moves_rows_does_not_block_and_what_moves_channels_does(front_end, between, folds):
    torch.manual_seed(0)
    model, x = Normed(between).eval(), torch.randn(3, 4, 8)
    wanted = model(x).detach()
    if front_end == "torch":
        report = fold_norms(model, dummy_input=x)
        found = model(x).detach()
    else:
        file = io.BytesIO()
        torch.onnx.export(model, (x,), file, dynamo=False, input_names=["x"])
        given = onnx.load_from_string(file.getvalue())
        report = fold_onnx(given)
        found = torch.from_numpy(run(given, x))
    if front_end == "torch" or folds:
        assert len(report.groups) == folds
    assert torch.allclose(found, wanted, atol=1e-5)


def run(model, x):
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString())
    return np.asarray(session.run(None, {"x": x.numpy()})[0])


def test_a_rotation_that_does_nothing_says_so_and_why(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    with caplog.at_level(logging.WARNING, "bitwright"):
        report = rotate_model(model, dummy_input=torch.randn(2, 8))
    assert not report.changed and str(report).startswith("NOTHING is rotated: 0 residual streams")
    assert "nothing is rotated" in caplog.text
    result = bitwright.quantize(model, [torch.randn(2, 8)], recipe=["rotate"], progress=False)
    assert str(result).startswith("rotate() (NOTHING is rotated: ") and "changed nothing" in result.headline


@pytest.mark.parametrize("where", ["main graph", "body"])
def test_one_plus_weight_of_onnx_is_folded_where_it_is_computed_in_the_main_graph(where):
    net, inner = Net(), Net(1)
    net.input("x", (3, 4))
    host = net if where == "main graph" else inner
    gain = host("Add", net.weights(4), net.const(np.ones(1)), name="plus_one")
    found = host("MatMul", host("Mul", "x", gain, name="norm"), net.weights(4, 4), name="last", out="t")
    if where == "body":
        net.input("cond", (), onnx.TensorProto.BOOL)
        found = net(
            "If", "cond", name="branch", out="y", then_branch=body("t", net=inner), else_branch=body("t", net=inner)
        )
    report = fold_onnx(net.model(found))
    assert len(report.groups) == (where == "main graph")


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_inputs_of_down_projections_are_rotated_at_run_time_and_stay_in_float(front_end):
    model, x = Decoder("RMSNorm", tied=False), tokens(4)
    wanted = model(x).detach().numpy()
    preset = Preset(weight_spec("int8"), dynamic_spec("int4"))
    if front_end == "torch":
        report = rotate_model(model, dummy_input=x, online=True)
        sim = TorchSim(model, x, preset=preset)
        found = model(x).detach().numpy()
    else:
        file = io.BytesIO()
        torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
        proto = onnx.load_from_string(file.getvalue())
        report = rotate_onnx(proto, dummy_input=x.numpy(), online=True)
        sim = OnnxSim(proto, preset=preset)
        session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    (online,) = report.online
    assert online.size == 24 and online.hadamard and "24 channels (Hadamard)" in str(report)
    rotation = next(op for op in sim.graph.ops if is_rotation(op.type, op.name))
    (reader,) = [op for op, _ in sim.graph.consumers(rotation.outputs[0])]
    ops = {site.op: site for site in sim.quantizers.values() if site.role == "input"}
    assert rotation.name not in {site.op for site in sim.quantizers.values()}
    assert ops[reader.name].spec.dynamic
    row = next(row for row in sim.coverage() if row.name == rotation.inputs[1])
    assert row.status == "float" and "rotates what is quantized after it" in row.how


def test_a_size_without_a_hadamard_matrix_gets_a_random_rotation_and_says_so():
    model, x = Decoder(), tokens(4)
    model.gate, model.up, model.down = nn.Linear(16, 9), nn.Linear(16, 9), nn.Linear(9, 16)
    before = model(x)
    report = rotate_model(model, dummy_input=x, online=True)
    torch.testing.assert_close(model(x), before, atol=1e-3, rtol=1e-3)
    assert "random orthogonal, as no Hadamard matrix has the size 9" in str(report)
    report.undo()
    torch.testing.assert_close(model(x), before)
    assert isinstance(model.down, nn.Linear)


def test_a_rotation_in_front_spreads_the_outlier_of_one_channel():
    model, x = Decoder(), tokens(16)
    with torch.no_grad():
        model.up.weight[3] *= 6
        model.down.weight[:, 3] /= 6
    wanted = model(x).detach()

    def noise(candidate):
        sim = calibrated(TorchSim(candidate, x, preset=Preset(weight_spec("int8"), dynamic_spec("int4"))))
        return float((sim.model(x) - wanted).square().mean())

    plain, turned = copy.deepcopy(model), copy.deepcopy(model)
    rotate_model(plain, dummy_input=x)
    rotate_model(turned, dummy_input=x, online=True)
    assert noise(turned) < 0.9 * noise(plain)
