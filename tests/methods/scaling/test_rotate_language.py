"""Rotation and norm folding on language models of transformers: slices between norm and output layer, norms of 1 + weight."""

import io
import logging

import numpy as np
import onnx
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
from bitwright.onnx import fold_norms as fold_onnx
from bitwright.torch import fold_norms, rotate_model, smooth_model
from tests.onnx.nets import Net, body

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
