"""AIMET's tools for language models on models of transformers as they are, and on a decoder as an ONNX file."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bitwright.aimet_common.names import DifferenceWarning, names
from bitwright.aimet_onnx import QSpec
from bitwright.aimet_onnx import QuantizationSimModel as OnnxSim
from bitwright.aimet_onnx.llm_configurator import configure_llm
from bitwright.aimet_onnx.llm_topology import LlmTopology, analyze_llm_topology
from bitwright.aimet_torch import QuantizationSimModel
from bitwright.aimet_torch.adascale import AdaScaleModelConfig, apply_adascale
from bitwright.aimet_torch.experimental.fptquant.fptquant_optimizer import FPTQuant
from bitwright.aimet_torch.experimental.omniquant import apply_omniquant
from bitwright.aimet_torch.experimental.spinquant.spinquant_optimizer import (
    SUPPORTED_MODULE_DICT,
    SpinQuantConfig,
    apply_spinquant,
)
from bitwright.aimet_torch.gptvq.defs import GPTVQParameters
from bitwright.aimet_torch.gptvq.gptvq_weight import GPTVQ
from bitwright.aimet_torch.quantization.affine import QuantizeDequantize
from bitwright.errors import ConfigError, ModelError

SIZES = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, use_cache=False)  # fmt: skip
TOKENS = torch.randint(0, 48, (3, 12), generator=torch.Generator().manual_seed(0))


def decoder(kind: str = "llama") -> Any:
    """A model of random weights, also those of norms."""
    torch.manual_seed(3)
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    made = model(config(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5 if "norm" in name else 0.3 * torch.randn_like(parameter))
    return made


def simulated(model: Any, bits: int) -> Any:
    sim = QuantizationSimModel(model, {"input_ids": TOKENS}, default_param_bw=bits, default_output_bw=16)
    sim.compute_encodings(lambda m: m(input_ids=TOKENS))
    return sim


def forward(model: Any, batch: Any) -> Any:
    return model(input_ids=batch)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_rotations_keep_the_model_and_registries_take_entries(kind: str) -> None:
    model = decoder(kind)
    SUPPORTED_MODULE_DICT[type(model)] = SpinQuantConfig(block_type=type(model.model.layers[0]))
    AdaScaleModelConfig(block_type=type(model.model.layers[0]), beta_gamma_lr=1e-3, scales_lr=5e-4)
    try:
        with torch.no_grad():
            wanted, weight = model(input_ids=TOKENS).logits, model.model.layers[0].self_attn.q_proj.weight.clone()
            apply_spinquant(model, enable_r1=True, enable_r2=True)
            torch.testing.assert_close(model(input_ids=TOKENS).logits, wanted, rtol=1e-3, atol=1e-3)
        assert not torch.equal(model.model.layers[0].self_attn.q_proj.weight, weight)
    finally:
        SUPPORTED_MODULE_DICT.clear()


def test_transforms_of_fptquant_keep_the_model() -> None:
    model, plain = decoder(), decoder()
    with torch.no_grad():
        for some in (model, plain):
            some.model.layers[0].mlp.up_proj.weight[3] *= 30  # one loud channel of what the down projection reads
        wanted = model(input_ids=TOKENS).logits
        with pytest.warns(
            DifferenceWarning, match="rotates the residual stream, values and inputs of down projections"
        ):
            report = FPTQuant.insert_fpt_quant_transforms(model, model.config)
        FPTQuant.merge_fpt_quant_transforms(model)
        assert len(report.streams) == 1 and len(report.heads) == len(report.online) == 2
        torch.testing.assert_close(model(input_ids=TOKENS).logits, wanted, rtol=1e-3, atol=1e-3)
        only = FPTQuant.insert_nonmergeable_down_project_transform(plain, plain.config)
        assert len(only.streams) == 1 and not only.heads and len(only.online) == 2
        torch.testing.assert_close(plain(input_ids=TOKENS).logits, wanted, rtol=1e-3, atol=1e-3)
    with pytest.raises(
        ModelError, match=r"no embedding of tokens.*insert_fpt_quant_transforms\(model, dummy_input=...\)"
    ):
        FPTQuant.insert_fpt_quant_transforms(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"vector_stride": 2}, r"vector_stride are \(0, 1, 2\).*neighbours along the inputs"),
        ({"index_bw": 9}, "index_bw: it is 9.*1 to 8 bits"),
        ({"vector_dim": 9}, "vector: it is 9.*from 1 to 8"),
    ],
)
def test_sizes_of_vectors_are_checked(given: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTVQParameters([], **given)


@pytest.mark.filterwarnings("ignore::bitwright.aimet_common.names.DifferenceWarning")
def test_layers_that_vectors_cannot_stand_for_are_refused(tmp_path: Path) -> None:
    model, data = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Linear(4, 4)), [torch.randn(3, 2, 4)]
    with pytest.raises(ConfigError, match="'0' is no linear layer with a quantized weight.*name nn.Linear modules"):
        GPTVQ.apply_gptvq(model, data[0], GPTVQParameters(data), tmp_path, block_level_module_names=[["0"], ["1"]])


@pytest.mark.parametrize("method", ["omniquant", "adascale"])
def test_methods_of_blocks_lower_the_errors_of_three_bits(method: str) -> None:
    sim = simulated(decoder(), 3)
    if method == "omniquant":
        with pytest.warns(DifferenceWarning, match="merges the learned scales into the model"):
            report = apply_omniquant(sim, [TOKENS], forward, num_iterations=12)
    else:
        report = apply_adascale(sim, [TOKENS], forward, num_iterations=12)
    assert len(report) == 15 and all(row.after <= row.before for row in report)
    assert sum(row.after < row.before for row in report) > 7
    assert torch.isfinite(sim.model(input_ids=TOKENS).logits).all()


def test_classes_of_transformers_have_quantized_ones() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from bitwright.aimet_torch.nn.transformers.models.llama import modeling_llama
    from bitwright.aimet_torch.nn.transformers.models.llama.modeling_llama import QuantizedLlamaRMSNorm

    assert modeling_llama.QuantizedLlamaRMSNorm is QuantizedLlamaRMSNorm and issubclass(
        QuantizedLlamaRMSNorm, LlamaRMSNorm
    )
    own = QuantizedLlamaRMSNorm(8)
    own.param_quantizers["weight"] = QuantizeDequantize((), 8, False)
    own.output_quantizers[0] = QuantizeDequantize((), 8, True)
    x = torch.randn(4, 8)
    with own.compute_encodings():
        own(x)
    assert (own(x) - LlamaRMSNorm(8)(x)).abs().max() <= own.output_quantizers[0].get_scale()
    sim = simulated(decoder(), 8)
    assert isinstance(sim.model.model.norm, QuantizedLlamaRMSNorm)
    with pytest.raises(ImportError, match="nothing has to be wrapped"):
        from bitwright.aimet_torch.nn.transformers import fast_generate_wrapper  # noqa: F401


@pytest.mark.parametrize("path", [path for path in names() if path.startswith("aimet_torch.nn.transformers.models")])
def test_quantized_classes_of_every_model(path: str) -> None:
    import importlib

    module = importlib.import_module(f"bitwright.{path}")
    for name in names()[path]:
        try:
            assert issubclass(getattr(module, name), nn.Module)
        except ImportError as absent:
            assert f"{name} needs a version of transformers" in str(absent)


class Block(nn.Module):
    """A block that takes the keys and values of earlier tokens and returns those of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False), nn.Linear(24, 16)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = torch.cat([key, k], 2), torch.cat([value, v], 2)
        weights = torch.softmax(q @ k.transpose(2, 3) / 8**0.5, -1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), k, v


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(20, 16), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 20, bias=False)

    def forward(self, tokens: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        x, present = self.embedding(tokens), []
        for i, block in enumerate(self.blocks):
            x, key, value = block(x, past[2 * i], past[2 * i + 1])
            present += [key, value]
        return self.head(self.norm(x)), *present


PAST = [f"past_{i}_{kind}" for i in range(2) for kind in ("key", "value")]
PRESENT = [name.replace("past", "present") for name in PAST]


@functools.cache
def decoder_file() -> bytes:
    torch.manual_seed(0)
    inputs = (torch.randint(0, 20, (1, 4)), *(torch.randn(1, 2, 3, 8) for _ in PAST))
    program = torch.onnx.export(
        Decoder().eval(), inputs, dynamo=True, opset_version=21, verbose=False, input_names=["tokens", *PAST],
        output_names=["logits", *PRESENT],
    )  # fmt: skip
    buffer = io.BytesIO()
    program.save(buffer)
    return buffer.getvalue()


def test_parts_of_a_decoder_are_found_and_get_formats() -> None:
    model = onnx.load_from_string(decoder_file())
    topology = analyze_llm_topology(model, "llama")
    assert isinstance(topology, LlmTopology) and len(topology.blocks) == 2 and len(topology.lm_head) == 1
    assert all(set(block.linears) == {"q", "k", "v", "o", "gate", "up", "down"} for block in topology.blocks)
    assert set(topology.kv_cache) == {*PAST, *PRESENT}
    order = [node.name for node in model.graph.node]
    for block, following in zip(topology.blocks, [*topology.blocks[1:], None], strict=True):
        norms, linears = sorted(map(order.index, block.norms)), {r: order.index(n) for r, (n,) in block.linears.items()}
        first = [norm for norm in norms if norm < linears["q"]]  # several nodes for each of the two
        assert 0 < len(first) < len(norms) and linears["q"] < linears["o"] < norms[len(first)]
        assert norms[-1] < linears["up"] < linears["down"]
        assert following is None or linears["down"] < min(map(order.index, following.norms))
    sim = OnnxSim(model, param_type="int8", activation_type="int16")
    configure_llm(
        sim, topology, kv_cache_type="int8", backbone_weight_type="int4", lm_head_weight_type=QSpec.per_channel("int8")
    )
    feeds = {"tokens": np.array([[1, 2, 3, 4]])}
    feeds |= {name: np.random.default_rng(i).standard_normal((1, 2, 3, 8), np.float32) for i, name in enumerate(PAST)}
    sim.compute_encodings([feeds])
    weights = {name: q.bitwidth for name, q in sim.qc_quantize_op_dict.items() if name in sim.param_names and q.enabled}
    assert sorted(weights.values()) == sorted(
        [*[4] * 14, 8, *[b for n, b in weights.items() if "norm" in n or "embed" in n]]
    )
    cached = {name: sim.qc_quantize_op_dict[name] for name in (*PAST, *PRESENT)}
    assert {q.bitwidth for q in cached.values()} == {8}
    others = {
        q.bitwidth
        for name, q in sim.qc_quantize_op_dict.items()
        if name not in cached and name not in sim.param_names and q.enabled
    }
    assert 16 in others


def test_what_a_topology_does_not_name_is_told(tmp_path: Path) -> None:
    sim = OnnxSim(onnx.load_from_string(decoder_file()))
    with pytest.raises(ConfigError, match=r"configure_llm\(lm_head_weight_type=...\).*names nothing"):
        configure_llm(sim, LlmTopology((), (), ()), lm_head_weight_type="int8")
    from tests.aimet.onnx_nets import folded

    with pytest.raises(ConfigError, match="no attention with layers for queries"):
        analyze_llm_topology(folded())
