"""The layouts of GPTQ and AWQ: read back, and unpacked as their own readers do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.core.numerics.spec import PRESETS, QuantSpec
from bitwright.errors import ExportError
from bitwright.llm import PackedWeight, packed_weights, read_checkpoint, write_simulation
from bitwright.llm.files.common import StoredTensors
from tests.llm.models import tiny, weight_only

LAYER = "model.layers.1.mlp.up_proj"


def gptq_weight(layer, bits, version):
    """The arithmetic of GPTQModel's ``TorchQuantLinear``: shifts, masks, one added to zero points of the first version."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    zeros = torch.bitwise_right_shift(layer["qzeros"].unsqueeze(2), shifts.view(1, 1, -1)) & ((1 << bits) - 1)
    zeros = zeros.reshape(layer["scales"].shape) + (version == 1)
    codes = torch.bitwise_right_shift(layer["qweight"].unsqueeze(1), shifts.view(1, -1, 1)) & ((1 << bits) - 1)
    codes = codes.reshape(-1, layer["qweight"].shape[1])
    index = layer["g_idx"].long()
    return (layer["scales"][index] * (codes - zeros[index])).T


def awq_weight(layer, group):
    """The arithmetic of AutoAWQ's ``dequantize_gemm``: unpack, undo the order of eight, multiply."""
    shifts = torch.arange(0, 32, 4)
    codes = torch.bitwise_right_shift(layer["qweight"][:, :, None], shifts).to(torch.int8) & 15
    zeros = torch.bitwise_right_shift(layer["qzeros"][:, :, None], shifts).to(torch.int8) & 15
    back = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    codes, zeros = (t[:, :, back].reshape(len(t), -1) for t in (codes, zeros))
    return ((codes - zeros.repeat_interleave(group, 0)) * layer["scales"].repeat_interleave(group, 0)).T


CASES = {
    "gptq-int4-g32": ("gptq", PRESETS["w4g32"].weight, 1),
    "gptq-uint4-g32-asymmetric": ("gptq", QuantSpec("uint4", PerBlock(32), "asymmetric"), 2),
    "gptq-int2-g32": ("gptq", QuantSpec("int2", PerBlock(32)), 1),
    "gptq-int8-per-channel": ("gptq", QuantSpec("int8", PerChannel()), 1),
    "awq-int4-g32": ("awq", PRESETS["w4g32"].weight, 0),
    "awq-uint4-g32-asymmetric": ("awq", QuantSpec("uint4", PerBlock(32), "asymmetric"), 0),
}


@pytest.mark.parametrize("kind, spec, version", CASES.values(), ids=CASES)
def test_layouts_hold_the_simulation(kind, spec, version, tmp_path):
    sim = weight_only(tiny(LlamaConfig), spec)
    write_simulation(tmp_path, sim, to=kind)
    back = {weight.name: weight for weight in read_checkpoint(tmp_path)}
    for weight in packed_weights(sim):
        found = back.pop(weight.name)
        assert type(found) is type(weight) and np.array_equal(found.dequantize(), weight.dequantize())
        if isinstance(weight, PackedWeight):
            assert found.layout.group == weight.layout.group
    assert not back
    stored = StoredTensors(tmp_path)
    parts = {name.rpartition(".")[2]: stored[name] for name in stored if name.startswith(f"{LAYER}.")}
    used = gptq_weight(parts, spec.format.bits, version) if kind == "gptq" else awq_weight(parts, 32)
    expected = next(weight for weight in packed_weights(sim) if weight.name == f"{LAYER}.weight").dequantize()
    assert np.array_equal(used.numpy(), expected)
    own = json.loads((tmp_path / "quantize_config.json").read_text())
    assert own["bits"] == spec.format.bits
    assert kind == "awq" or own["checkpoint_format"] == {1: "gptq", 2: "gptq_v2"}[version]


@pytest.mark.parametrize("kind", ["compressed-tensors", "gguf", "torchao", "gptq", "awq"])
def test_real_zero_points_are_refused_by_files_that_store_integers(tmp_path, kind):
    sim = weight_only(tiny(LlamaConfig), "w4g32_float_zero")
    reason = "zero points that are real numbers n" if kind == "gguf" else "it stores zero points as integers"
    with pytest.raises(ExportError, match=f"zero points that are real numbers.*{reason}"):
        write_simulation(tmp_path, sim, to=kind)
    assert not list(tmp_path.iterdir())


def test_layers_that_differ_are_refused(tmp_path):
    sim = weight_only(tiny(LlamaConfig), "w4g32")
    sim.quantizers[f"{LAYER}.weight"].spec = QuantSpec("int8", PerBlock(32))
    with pytest.raises(
        ExportError, match=f"{LAYER}.weight: its width, group or symmetry is another.*compressed-tensors"
    ):
        write_simulation(tmp_path, sim, to="gptq")
    with pytest.raises(ExportError, match="int8 symmetric.* cannot be stored in awq files.*integers of 4 bits"):
        write_simulation(tmp_path, sim, to="awq")
    assert not list(tmp_path.iterdir())
