"""QuantizedMultiheadAttention: the function of torch's class, and quantizers inside that are used and exported."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from bitwright.aimet_torch import QuantizationSimModel
from bitwright.aimet_torch.nn import QuantizationMixin, QuantizedMultiheadAttention, compute_encodings
from bitwright.aimet_torch.onnx import export
from bitwright.aimet_torch.quantization.affine import QuantizeDequantize

GENERATOR = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


@pytest.mark.parametrize(
    "options, shapes, masks",
    [
        ({}, ((5, 2, 8),) * 3, {}),
        ({"batch_first": True}, ((2, 4, 8), (2, 5, 8), (2, 5, 8)), {"need_weights": False}),
        ({"kdim": 6, "vdim": 7, "bias": False}, ((4, 2, 8), (5, 2, 6), (5, 2, 7)), {"average_attn_weights": False}),
        ({"add_bias_kv": True, "add_zero_attn": True}, ((4, 2, 8), (5, 2, 8), (5, 2, 8)), {"attn_mask": "bool"}),
        ({"batch_first": True}, ((2, 4, 8), (2, 5, 8), (2, 5, 8)), {"attn_mask": "heads", "key_padding_mask": "ends"}),
        ({}, ((4, 8), (5, 8), (5, 8)), {"attn_mask": "float"}),
    ],
    ids=["plain", "batch-first", "other-sizes", "rows-added", "masks", "unbatched"],
)
def test_without_quantizers_it_is_the_function_of_torch(options: Any, shapes: Any, masks: dict[str, Any]) -> None:
    torch.manual_seed(1)
    plain = nn.MultiheadAttention(8, 2, **options).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    made = {
        "bool": torch.tensor([[False, True, False, False, True]] * 4),
        "float": r(4, 5),
        "ends": torch.tensor([[0.0, 0, 0, 0, 0], [0, 0, 0, -torch.inf, -torch.inf]]),
        "heads": r(4, 4, 5),  # of 2 samples and 2 heads
    }
    given = {name: made[value] if isinstance(value, str) else value for name, value in masks.items()}
    inputs = [r(*shape) for shape in shapes]
    own = QuantizationMixin.from_module(plain)
    assert type(own) is QuantizedMultiheadAttention and type(plain.out_proj).__name__.startswith("NonDynamically")
    for module in (own, own.get_original_module(), copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        wanted, found = plain(*inputs, **given), module(*inputs, **given)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
        assert (found[1] is None) == (wanted[1] is None)
        if wanted[1] is not None:
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-6)
    assert type(own.get_original_module()) is nn.MultiheadAttention


def on_grids() -> tuple[Any, tuple[Tensor, ...]]:
    """A module with a quantizer at every place, calibrated, and its inputs."""
    torch.manual_seed(2)
    module: Any = QuantizedMultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    for holder in (module, module.out_proj):
        for name in holder.param_quantizers:
            if "weight" in name:
                holder.param_quantizers[name] = QuantizeDequantize((), 8, True)
    lists = [module.input_quantizers, module.output_quantizers, module.softmax.output_quantizers]
    lists += [module.qk_matmul.input_quantizers, module.qk_matmul.output_quantizers]
    lists += [module.av_matmul.input_quantizers, module.av_matmul.output_quantizers]
    for places in lists:
        for i in range(len(places)):
            places[i] = QuantizeDequantize((), 8, False)
    module.av_matmul.input_quantizers[0] = None  # the output of the softmax is on a grid
    inputs = (r(2, 5, 8), r(2, 6, 8), r(2, 6, 8))
    with torch.no_grad(), compute_encodings(module):
        module(*inputs)
    return module, inputs


def quantizers(module: nn.Module) -> dict[str, Any]:
    return {name: part for name, part in module.named_modules() if isinstance(part, QuantizeDequantize)}


def test_quantizers_inside_are_calibrated_and_used() -> None:
    module, inputs = on_grids()
    found = quantizers(module)
    assert len(found) == 13 and all(quantizer.is_initialized() for quantizer in found.values())
    assert float(found["softmax.output_quantizers.0"].get_max().detach()) <= 1.01
    with torch.no_grad():
        before = module(*inputs)[0]
        for place in ("qk_matmul.output_quantizers.0", "softmax.output_quantizers.0", "av_matmul.input_quantizers.1"):
            kept = found[place].bitwidth
            found[place].bitwidth = 2
            assert (module(*inputs)[0] - before).abs().max() > 0.05, place
            found[place].bitwidth = kept
        assert torch.equal(module(*inputs)[0], before)


def test_layers_of_transformers_call_it_in_evaluation_too() -> None:
    """Where torch's layer would compute everything in one kernel, which knows no quantizers."""
    torch.manual_seed(3)
    layer: Any = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, padding = r(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        wanted = layer(x, src_key_padding_mask=padding)
        layer.self_attn = QuantizationMixin.from_module(layer.self_attn)
        torch.testing.assert_close(layer(x, src_key_padding_mask=padding)[0], wanted[0], rtol=1e-5, atol=1e-5)
        layer.self_attn.softmax.output_quantizers[0] = QuantizeDequantize((), 2, False)
        with compute_encodings(layer):
            layer(x)
        assert (layer(x, src_key_padding_mask=padding)[0] - wanted[0]).abs().max() > 1e-3


def test_encodings_inside_are_in_the_file_and_its_answers_are_those_of_the_module() -> None:
    module, inputs = on_grids()
    buffer = io.BytesIO()
    export(module, inputs, buffer, export_int32_bias=False)
    graph = onnx.load_from_string(buffer.getvalue()).graph
    held = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    scales = [float(held[node.input[1]]) for node in graph.node if node.op_type == "QuantizeLinear"]
    for name, quantizer in quantizers(module).items():
        if "param" not in name:
            scale = float(quantizer.get_scale().detach())
            assert any(np.isclose(scale, written, rtol=1e-6) for written in scales), name
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(buffer.getvalue(), options)
    answers = session.run(None, {p.name: x.numpy() for p, x in zip(session.get_inputs(), inputs, strict=True)})
    with torch.no_grad():
        for got, want, quantizer in zip(answers, module(*inputs), module.output_quantizers, strict=True):
            step = float(quantizer.get_scale())
            # sums in another order may round to a neighbour, also inside
            assert np.mean(np.isclose(got, want.as_subclass(Tensor).numpy(), atol=1e-5)) > 0.9
            np.testing.assert_allclose(got, want.as_subclass(Tensor).numpy(), atol=2.01 * step)


def test_a_simulation_of_the_float_class_shows_what_lies_inside_it() -> None:
    """Also after the quantized class was used: simulations quantize each of its operators."""
    QuantizationMixin.from_module(nn.MultiheadAttention(8, 2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    x = r(2, 5, 8)
    sim = QuantizationSimModel(Net().eval(), x)
    sim.compute_encodings(lambda model: model(x))
    weight = sim.model.attention.out_proj.param_quantizers["weight"]
    weight.bitwidth = 4
    assert weight.bitwidth == 4
    products = [op.name for op in sim.graph.ops if op.type == "MatMul"]
    assert sum(site.op in products for site in sim.quantizers.values()) >= 2
