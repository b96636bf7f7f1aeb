"""Packed weights: equal to what the simulation computes with, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from bitwright.core.numerics.affine import quantize
from bitwright.core.numerics.formats import FLOAT_FORMATS, IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, QuantSpec, find_preset
from bitwright.errors import ConfigError, GranularityError
from bitwright.llm import FloatWeight, PackedWeight, packed_weights
from bitwright.llm.packed import float_bits, float_values, halves, plans, unhalved
from bitwright.torch import QuantizationSimModel
from tests.llm.models import prompts, tiny, weight_only
from tests.support.simulations import calibrated


@pytest.mark.parametrize("preset", ["w4g32", "w8", "fp8", "nvfp4", "mxfp4", "mxfp8"])
def test_packed_weights_are_those_of_the_simulation(preset):
    sim = weight_only(tiny(LlamaConfig, tie_word_embeddings=True), PRESETS[preset].weight, tables=True)
    packed = {weight.name: weight for weight in packed_weights(sim)}
    assert [weight.plan for weight in packed.values()] == plans(sim)
    quantized = {site.value for site in sim.quantizers.values()}
    assert {name for name, weight in packed.items() if isinstance(weight, PackedWeight)} == quantized
    with torch.no_grad():
        for name, parameter in sim.model.named_parameters():
            parameter.copy_(torch.from_numpy(packed[name].dequantize()))
        with sim.in_float():
            dequantized = sim.model(prompts()).logits
        for name, parameter in tiny(LlamaConfig, tie_word_embeddings=True).named_parameters():
            sim.model.get_parameter(name).copy_(parameter)
        assert torch.equal(sim.model(prompts()).logits, dequantized)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("float8_e4m3", "float8_e4m3fn"), ("float8_e5m2", "float8_e5m2"), ("float6_e2m3", "float6_e2m3fn"),
        ("float6_e3m2", "float6_e3m2fn"), ("float4_e2m1", "float4_e2m1fn"),
    ],
)  # fmt: skip
def test_bit_patterns_are_those_of_ml_dtypes(name, dtype):
    fmt = FLOAT_FORMATS[name]
    bits = np.arange(1 << fmt.bits, dtype=np.uint8)
    values = bits.view(getattr(ml_dtypes, dtype)).astype(np.float32)
    finite = np.isfinite(values)
    assert np.array_equal(float_values(bits, fmt)[finite].view(np.int32), values[finite].view(np.int32))
    assert np.array_equal(float_bits(values[finite], fmt), bits[finite])


def test_nearest_is_the_simulation_of_one_weight():
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for granularity in (PerBlock(32), PerChannel(), PerTensor()):
        packed = PackedWeight.nearest("up.weight", values, QuantSpec("int4", granularity, "asymmetric"))
        assert np.abs(packed.dequantize() - values.numpy()).max() <= packed.scale.max() / 2 + 1e-6
        assert packed.layout.symmetric is False
    with pytest.raises(
        GranularityError, match=r"up.weight: it sums over 64 elements, which groups of 48 do not.*64 or 32"
    ):
        PackedWeight.nearest("up.weight", values, QuantSpec("int4", PerBlock(48)))


class _ReadTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return functional.linear(x, self.weight) + x @ self.weight


def test_one_parameter_with_two_encodings_is_refused():
    sim = calibrated(QuantizationSimModel(_ReadTwice(), torch.randn(2, 32), preset="w4"))
    with pytest.raises(ConfigError, match="weight: matmul reads it with another encoding.*'weight@matmul'"):
        list(packed_weights(sim))


class _Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 8))

    def forward(self, x):
        return x @ self.weight.transpose(0, 1).transpose(0, 1)


def test_a_weight_that_the_model_computes_is_refused():
    sim = calibrated(QuantizationSimModel(_Transposed(), torch.randn(2, 32), preset="w8"))
    assert [s.role for s in sim.quantizers.values() if s.enabled] == ["weight"]
    with pytest.raises(ConfigError, match="which the model computes of a parameter.*enabled = False"):
        list(packed_weights(sim))


def test_floats_stay_what_they_are():
    sim = weight_only(tiny(LlamaConfig).bfloat16(), "w4g32")
    norm = next(weight for weight in packed_weights(sim) if weight.name == "model.norm.weight")
    assert isinstance(norm, FloatWeight) and norm.values.dtype == torch.bfloat16 and norm.plan.layout is None


@pytest.mark.parametrize("name", ["int4", "uint4", "int3"])
def test_two_codes_are_one_byte(name):
    fmt = IntFormat(int(name[-1]), signed=name.startswith("int"))
    kind = np.int8 if fmt.signed else np.uint8
    codes = np.random.default_rng(0).integers(fmt.qmin, fmt.qmax + 1, (5, 64)).astype(kind)
    shifted = codes.astype(np.int64) + (8 if fmt.signed else 0)
    assert np.array_equal(halves(codes), shifted[:, ::2] + 16 * shifted[:, 1::2])
    assert np.array_equal(halves(codes[:, :32]), halves(codes)[:, :16]), "a view of longer rows"
    assert np.array_equal(unhalved(halves(codes), fmt), codes)


@pytest.mark.parametrize("preset", ["w4g32", "w4g32_asym", "w4_float_zero", "w8"])
def test_codes_of_tensors_are_those_of_arrays_and_leave_the_tensor_as_it_was(preset):
    """Torch computes them in one buffer, numpy in a new array for each operation."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 10
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    before = x.clone()
    encoding = PackedWeight.nearest("w", before.nan_to_num(0, 3, -3), find_preset(preset).weight).encoding
    assert np.array_equal(quantize(x, encoding).numpy(), quantize(x.numpy(), encoding))
    assert torch.equal(x.nan_to_num(7), before.nan_to_num(7))
