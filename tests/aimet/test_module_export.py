"""Quantizers and quantized modules outside of simulations as ONNX: the file computes what they compute."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from bitwright import aimet_torch
from bitwright.aimet_torch import QuantizationSimModel
from bitwright.aimet_torch.nn import QuantizedConv2d, QuantizedLinear, QuantizedSoftmax
from bitwright.aimet_torch.quantization.affine import GroupedBlockQuantizeDequantize, Quantize, QuantizeDequantize
from bitwright.aimet_torch.quantization.float import FloatQuantizeDequantize
from bitwright.errors import ConfigError, ExportError, ModelError

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) * 3


def run(model: bytes | str, x: torch.Tensor) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def values(model: nn.Module, x: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(x).as_subclass(torch.Tensor).numpy()


def calibrated(module: Any, x: torch.Tensor) -> Any:
    if module.__dict__.get("qmax") == 99:  # no range is found for a grid that is no format
        return module.eval()
    with module.compute_encodings():
        module(x)
    return module.eval()


def on_range(quantizer: QuantizeDequantize) -> QuantizeDequantize:
    """With a range that was given."""
    quantizer.set_range(-4.0, 5.0)
    return quantizer


QUANTIZERS = {
    "uint8": lambda: QuantizeDequantize((), 8, False),
    "int4": lambda: QuantizeDequantize((), 4, True),
    "uint16": lambda: QuantizeDequantize((), 16, False),
    "5 bits": lambda: QuantizeDequantize((), 5, False),
    "-127 to 127": lambda: QuantizeDequantize((), -127, 127, True),
    "0 to 99, no format": lambda: on_range(QuantizeDequantize((), 0, 99, False)),
    "channels": lambda: QuantizeDequantize((8, 1), 8, True),
    "blocks": lambda: QuantizeDequantize((8, 4), 4, True, block_size=(1, 8)),
    "blocks on two axes": lambda: QuantizeDequantize((2, 4), 4, True, block_size=(4, 8)),
    "LPBQ": lambda: GroupedBlockQuantizeDequantize((8, 4), 4, True, 8, block_size=(1, 8), block_grouping=(1, -1)),
    "float16": lambda: FloatQuantizeDequantize(dtype=torch.float16),
    "bfloat16": lambda: FloatQuantizeDequantize(dtype=torch.bfloat16),
    "float8": lambda: FloatQuantizeDequantize(4, 3, finite=True),
    "codes": lambda: Quantize((), 8, False),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZERS)
def test_file_of_one_quantizer_computes_its_values(name, tmp_path):
    quantizer = calibrated(QUANTIZERS[name](), X)
    wanted, path = values(quantizer, X), str(tmp_path / "q.onnx")
    aimet_torch.onnx.export(quantizer, X, path, opset_version=21, input_names=["in"], output_names=["out"])
    model = onnx.load(path)
    assert (model.graph.input[0].name, model.graph.output[0].name) == ("in", "out")
    for x in (X, X.flip(0) * 1.7):
        np.testing.assert_array_equal(run(path, x), values(quantizer, x))
    assert np.unique(wanted).size > 8 and not quantizer._forward_hooks
    pairs = [node.op_type for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    if name in ("uint8", "int4", "uint16", "channels", "blocks", "LPBQ"):
        assert pairs == ["QuantizeLinear", "DequantizeLinear"]


@pytest.mark.parametrize("name", [name for name, make in QUANTIZERS.items() if "float" not in name])
def test_exporter_of_torch_writes_the_arithmetic(name, tmp_path):
    quantizer, path = calibrated(QUANTIZERS[name](), X), str(tmp_path / "q.onnx")
    torch.onnx.export(quantizer, (X,), path, dynamo=True, opset_version=21, verbose=False)
    np.testing.assert_array_equal(run(path, X), values(quantizer, X))


def linear(inputs: int, outputs: int) -> Any:
    made: Any = QuantizedLinear(inputs, outputs)
    made.param_quantizers["weight"] = QuantizeDequantize((outputs, 1), 4, True)
    made.input_quantizers[0] = QuantizeDequantize((), 8, False)
    made.output_quantizers[0] = QuantizeDequantize((), 8, False)
    return made


def conv() -> tuple[Any, torch.Tensor]:
    made: Any = QuantizedConv2d(3, 8, 3)
    made.param_quantizers["weight"] = QuantizeDequantize((8, 1, 1, 1), 8, True)
    made.input_quantizers[0] = QuantizeDequantize((), 8, False)
    made.output_quantizers[0] = QuantizeDequantize((), 8, False)
    x = torch.randn(2, 3, 8, 8)
    return calibrated(made, x), x


def softmax() -> tuple[Any, torch.Tensor]:
    made: Any = QuantizedSoftmax(-1)
    made.output_quantizers[0] = QuantizeDequantize((), 8, False)
    return calibrated(made, X), X


def chain() -> tuple[Any, torch.Tensor]:
    """Two layers and one quantizer that both use."""
    first, last = linear(16, 8), linear(8, 4)
    last.input_quantizers[0] = first.output_quantizers[0]
    model, x = nn.Sequential(first, nn.Identity(), last), torch.randn(6, 16)
    with first.compute_encodings(), last.compute_encodings():
        model(x)
    return model.eval(), x


@pytest.mark.parametrize(
    "make", [conv, softmax, chain, lambda: (calibrated(linear(16, 8), x := torch.randn(4, 16)), x)]
)
def test_file_of_quantized_modules_computes_their_values(make: Callable[[], tuple[Any, torch.Tensor]]):
    torch.manual_seed(1)
    model, x = make()
    wanted = values(model, x)
    buffer = io.BytesIO()
    aimet_torch.onnx.export(model, (x,), buffer, export_int32_bias=False, dynamic_axes={"input": {0: "batch"}})
    written = onnx.load_from_string(buffer.getvalue())
    on_grid = [q for q in model.modules() if isinstance(q, QuantizeDequantize)]
    assert sum(node.op_type == "DequantizeLinear" for node in written.graph.node) >= len(set(on_grid))
    got = run(buffer.getvalue(), x)
    steps = float((wanted.max() - wanted.min()) / 255)  # sums in another order may round to a neighbour
    assert np.abs(got - wanted).max() <= 1.01 * steps and (got == wanted).mean() > 0.99
    assert run(buffer.getvalue(), torch.cat([x, x])).shape[0] == 2 * len(x)


def test_what_cannot_be_exported_is_told(tmp_path):
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    path = str(tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="Sequential: the module cannot be exported"):
        aimet_torch.onnx.export(nn.Sequential(Branch()), X, path)
    with pytest.raises(ExportError, match="FloatQuantizeDequantize: the module cannot be exported"):
        aimet_torch.onnx.export(FloatQuantizeDequantize(4, 3), X, path)  # ends at 240, unlike the format of ONNX
    with pytest.raises(TypeError, match="a simulation or a module, not a list"):
        aimet_torch.onnx.export([], X, path)
    with pytest.raises(ConfigError, match="force_activation_as"):
        aimet_torch.onnx.export(nn.ReLU(), X, path, force_activation_as="signed")
    sim = QuantizationSimModel(nn.Sequential(nn.Linear(32, 4), nn.ReLU()).eval(), X)
    sim.compute_encodings(lambda model: model(X))
    with pytest.raises(ModelError, match="part of a simulated model"):
        aimet_torch.onnx.export(sim.model[0], X, path)
    assert not list(tmp_path.iterdir())


def test_quantizer_of_a_simulation_is_exported_alone(tmp_path):
    sim = QuantizationSimModel(nn.Sequential(nn.Linear(32, 4), nn.ReLU()).eval(), X)
    sim.compute_encodings(lambda model: model(X))
    quantizer, path = sim.model[0].param_quantizers["weight"], str(tmp_path / "w.onnx")
    weight = sim.model[0].weight.detach()
    aimet_torch.onnx.export(quantizer, weight, path)
    np.testing.assert_array_equal(run(path, weight), values(quantizer, weight))
