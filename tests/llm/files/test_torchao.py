"""Tensors of torchao in safetensors: read back, and loaded by transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, QuantSpec
from bitwright.llm import PackedWeight, packed_weights, read_checkpoint, write_checkpoint
from bitwright.llm.packed import signed
from tests.llm.models import greedy, prompts, tiny, weight_only

SPECS = {
    "int4-g32": PRESETS["w4g32"].weight,
    "int4-g32-asymmetric": QuantSpec("uint4", PerBlock(32), "asymmetric"),
    "int3-per-channel": QuantSpec("int3", PerChannel()),
    "int8-per-tensor": QuantSpec("int8", PerTensor()),
    "fp8-per-channel": PRESETS["fp8"].weight,
}


@pytest.mark.engine
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_transformers_answers_as_the_simulation(spec, tmp_path):
    model = tiny(LlamaConfig, tie_word_embeddings=True)
    sim = weight_only(model, spec, tables=spec is SPECS["int4-g32"])
    write_checkpoint(tmp_path, packed_weights(sim), model.config.to_dict(), to="torchao")
    back = {weight.name: weight for weight in read_checkpoint(tmp_path)}
    for weight in packed_weights(sim):
        found = back[weight.name]
        assert np.array_equal(found.dequantize(), weight.dequantize())
        if isinstance(weight, PackedWeight) and "embed" not in weight.name:
            assert np.array_equal(signed(found)[0], signed(weight)[0])
    pytest.importorskip("torchao")
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert type(engine.model.layers[0].mlp.up_proj.weight).__module__.startswith("torchao")
    with torch.no_grad():
        expected, found = sim.model(prompts()).logits, engine(prompts()).logits
        assert (expected - found).abs().max() < 1e-4 < (expected - model(prompts()).logits).abs().max()
    assert torch.equal(greedy(engine, prompts()), greedy(sim.model, prompts()))
