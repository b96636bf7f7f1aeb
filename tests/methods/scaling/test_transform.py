"""Transforms fitted to data: the closed form, the function that stays, the noise that goes, and what is refused."""

from __future__ import annotations

import copy
import io

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM

from bitwright import quantize
from bitwright.core.graph.operators import is_rotation
from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import Preset, dynamic_spec, find_preset, weight_spec
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.scaling.transform import best_transform
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import transform_model as transform_onnx
from bitwright.torch import QuantizationSimModel as TorchSim
from bitwright.torch import apply_reconstruction, rotate_model, transform_model
from tests.methods.transformer import Decoder, tokens
from tests.support import data
from tests.support.simulations import calibrated

A4 = Preset(weight_spec("int8"), dynamic_spec("uint4"))


def moment(random, n, rank):
    rows = random.standard_normal((rank, n)) * np.exp(random.standard_normal(n))
    return rows.T @ rows


def product(P, C, G):
    inverse = np.linalg.inv(P)
    return np.trace(P.T @ C @ P) * np.trace(inverse @ G @ inverse.T)


@pytest.mark.parametrize("n", [2, 5, 24])
def test_the_closed_form_reaches_the_bound_and_no_other_matrix_is_better(n):
    random = np.random.default_rng(n)
    C, G = moment(random, n, 3 * n), moment(random, n, 3 * n)
    P, ratio = best_transform(C, G, damping=1e-12)
    singular = np.sqrt(
        np.maximum(np.linalg.eigvals(C @ G).real, 0)
    )  # of C^(1/2) G C^(1/2), the root of the eigenvalues
    np.testing.assert_allclose(product(P, C, G), singular.sum() ** 2, rtol=1e-6)
    np.testing.assert_allclose(ratio, singular.sum() ** 2 / (np.trace(C) * np.trace(G)), rtol=1e-6)
    np.testing.assert_allclose(np.trace(P.T @ C @ P), np.trace(C))
    for _ in range(20):
        assert product(P + 0.05 * random.standard_normal((n, n)), C, G) > product(P, C, G)


def test_moments_without_any_power_or_of_low_rank_have_a_finite_transform():
    P, ratio = best_transform(np.zeros((3, 3)), np.eye(3))
    np.testing.assert_array_equal(P, np.eye(3))
    assert ratio == 1.0
    P, ratio = best_transform(np.diag([1.0, 0.0, 0.0]), np.diag([0.0, 0.0, 1.0]))
    assert np.isfinite(P).all() and np.linalg.cond(P) < 200 and ratio < 0.1


def as_onnx(model, x):
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_the_function_stays_in_both_front_ends_and_undo_gives_the_module_back(norm, shared):
    model, batches = Decoder(norm, tied=False, bias=True), [tokens(4), tokens(4).flip(0)]
    wanted, kept = model(batches[0]).detach(), copy.deepcopy(model.state_dict())
    proto = as_onnx(model, batches[0])
    report = transform_model(model, batches, shared=shared)
    assert [row.layers[0].op for row in report.products] == (["q", "gate", "down"] if shared else ["down"]), str(report)
    assert [len(row.layers) for row in report.products] == ([3, 2, 1] if shared else [1])
    assert [row.heads.value.op for row in report.values] == ["v"]
    assert {line.op for line in report.refused} >= {"head"}
    torch.testing.assert_close(model(batches[0]), wanted, rtol=1e-4, atol=1e-4)
    theirs = transform_onnx(proto, [x.numpy() for x in batches], shared=shared)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: batches[0].numpy()})
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=2e-4)
    assert [row.noise for row in theirs.products] == pytest.approx([row.noise for row in report.products], rel=1e-3)
    products = [op for op in OnnxSim(proto, preset=A4).graph.ops if is_rotation(op.type, op.name)]
    assert len(products) == (6 if shared else 1)
    report.undo()
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def mixed(model):
    """Inputs of the down projection that are correlated, and weights that read few directions of them."""
    with torch.no_grad():
        model.down.weight.copy_(model.down.weight * torch.logspace(0, -2, model.down.in_features))
        model.up.weight.copy_(model.up.weight * torch.logspace(-2, 0, model.up.out_features)[:, None])
    return model


def noise(model, wanted, x):
    """Of the outputs, where the input of the down projection has four bits."""
    sim = TorchSim(model, x, preset=A4)
    for name, site in sim.quantizers.items():
        site.enabled = site.role == "input" and name.startswith("down")
    sim.compute_encodings()
    with torch.no_grad():
        return float((sim.model(x) - wanted).square().mean())


def test_a_fitted_transform_leaves_less_noise_than_a_rotation():
    model, x = mixed(Decoder(tied=False)), tokens(32)
    wanted = model(x).detach()
    turned, fitted = copy.deepcopy(model), copy.deepcopy(model)
    rotate_model(turned, dummy_input=x, online=True)
    rotate_model(fitted, dummy_input=x)
    (row,) = transform_model(fitted, [x]).products
    assert row.noise < 0.5 and "noise x 0." in str(row)
    assert noise(fitted, wanted, x) < 0.6 * noise(turned, wanted, x)


def test_products_stay_in_float_and_the_exported_file_agrees(tmp_path):
    model, x = Decoder(tied=False), tokens(4)
    transform_model(model, [x], shared=True)
    sim = calibrated(TorchSim(model, x, preset=Preset(weight_spec("int4"), dynamic_spec("int8"))))
    rotations = {op.name for op in sim.graph.ops if is_rotation(op.type, op.name)}
    assert len(rotations) == 6 and rotations.isdisjoint({site.op for site in sim.quantizers.values()})
    assert all(row.status == "float" for row in sim.coverage() if row.name.endswith("rotation.weight"))
    sim.export(tmp_path, "net", x)
    assert sim.verify(x).ok


def test_static_ranges_leave_what_only_products_read_in_float():
    model, x = Decoder("RMSNorm", tied=False), tokens(4)
    transform_model(model, [x], shared=True)
    sim = TorchSim(model, x, preset="w8a8")
    before = {sim.graph.producer(op.inputs[0]).name for op in sim.graph.ops if is_rotation(op.type, op.name)}
    assert before.isdisjoint({site.op for site in sim.quantizers.values() if site.role == "output"})


def test_a_llama_with_grouped_heads_and_a_recipe():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(0, 64, (4, 16)), "use_cache": False}
    wanted = model(**batch).logits
    result = quantize(copy.deepcopy(model), [batch], recipe=["rotate", "transform"], preset=A4, progress=False)
    assert "transform" in str(result)
    report = transform_model(model, [batch])
    assert len(report.products) == 2 and len(report.values) == 2
    torch.testing.assert_close(model(**batch).logits, wanted, rtol=1e-4, atol=1e-4)


def test_values_of_a_projection_that_makes_queries_and_keys_too_are_left():
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=16)).eval()
    batch = {"input_ids": torch.randint(0, 64, (4, 8)), "use_cache": False}
    wanted = model(**batch).last_hidden_state
    report = transform_model(model, [batch])
    assert not report.values and len(report.products) == 4
    torch.testing.assert_close(model(**batch).last_hidden_state, wanted, rtol=1e-4, atol=1e-4)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.last(self.first(x))), self.first.weight.sum()


def test_what_is_refused_says_why():
    model, x = Decoder("RMSNorm"), tokens(4)
    rotate_model(model, dummy_input=x, online=True)
    reasons = {line.op: line.reason for line in transform_model(model, [x]).refused}
    assert reasons["down.1"] == "down.rotation transforms its input already: leave out online=True of the rotation"
    assert reasons["head"] == "it makes an output of the model, which is left as it is"
    assert reasons["gate"] == "2 layers read its input, each would have a product: shared=True adds them"
    with pytest.raises(CalibrationError, match="transform: the data held no batch"):
        transform_model(model, [])
    with pytest.raises(ConfigError, match="seed: it is -1. Remedy: give 0 or more"):
        transform_model(model, [x], seed=-1)
    broken = Plain().eval()
    with pytest.raises(CalibrationError, match="NaN or infinite"):
        transform_model(broken, [torch.full((4, 8), float("nan"))], torch.ones(4, 8))


@pytest.mark.slow
def test_weights_and_activations_of_4_bits_per_token_stay_within_10_percent_of_float(shared_data):
    batches = list(data.stories("calib")[:, :-1].split(8))
    model = data.trained("stories260k")
    rotate_model(model, None, batches[0][:1])
    transform_model(model, batches, shared=True)
    preset = Preset(find_preset("w4g32_float_zero").weight, dynamic_spec("uint4"))
    assert preset.weight.granularity == PerBlock(32)
    sim = TorchSim(model, batches[0][:1], preset=preset)
    for name, site in sim.quantizers.items():
        if name.startswith(("tok_embeddings", "output")):
            site.enabled = False
    sim.compute_encodings()
    apply_reconstruction(sim, batches, "gptaq", progress=False)
    with torch.no_grad():
        assert data.perplexity(sim.model, data.stories()) < 1.1 * 3.558
