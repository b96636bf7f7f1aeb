"""Operators of ONNX as modules, against their definitions."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from bitwright.aimet_torch.nn.modules import custom
from bitwright.aimet_torch.quantization.affine import QuantizeDequantize


def reference(kind: str, *inputs: torch.Tensor, opset: int = 22, **attributes) -> np.ndarray:
    """What ONNX's own reference computes."""
    node = onnx.helper.make_node(kind, [f"x{i}" for i in range(len(inputs))], ["y"], **attributes)
    types = [onnx.helper.np_dtype_to_tensor_dtype(x.numpy().dtype) for x in inputs]
    ports = [onnx.helper.make_tensor_value_info(f"x{i}", t, None) for i, t in enumerate(types)]
    graph = onnx.helper.make_graph([node], "g", ports, [onnx.helper.make_tensor_value_info("y", 1, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model).run(None, {f"x{i}": x.numpy() for i, x in enumerate(inputs)})[0]


@pytest.mark.parametrize("batch_dims, depth", [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)])
def test_gather_nd(batch_dims, depth):
    data = torch.randn(2, 3, 4)
    sizes = data.shape[batch_dims:][:depth]
    indices = torch.stack([torch.randint(0, n, (2, 3, 5)) for n in sizes], -1)
    got = custom.GatherNd(batch_dims)(data, indices)
    np.testing.assert_array_equal(got.numpy(), reference("GatherND", data, indices, batch_dims=batch_dims))


@pytest.mark.parametrize("reduction, name", [(0, "none"), (1, "add"), (2, "mul")])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd(reduction, name, depth):
    data = torch.randn(4, 3, 2)
    every = torch.tensor(list(itertools.product(*map(range, data.shape[:depth]))))
    indices = every[torch.randperm(len(every))[:3]]
    updates, before = torch.randn(3, *data.shape[depth:]), data.clone()
    got = custom.ScatterND(reduction)(data, indices, updates)
    np.testing.assert_allclose(got.numpy(), reference("ScatterND", data, indices, updates, reduction=name), rtol=1e-6)
    assert torch.equal(data, before)


@pytest.mark.parametrize("ratio", [1, 2, 3, 0])
@pytest.mark.parametrize("size", [2, (3, 4)])
def test_roi_align(ratio, size):
    features = torch.randn(2, 3, 10, 12)
    boxes = torch.tensor(
        [[1.0, 2.0, 9.0, 11.0], [0.3, 0.2, 20.0, 17.7], [5.0, 5.0, 5.5, 5.2], [-3.0, -2.0, 30.0, 28.0]]
    )
    batch = torch.tensor([0, 1, 1, 0])
    rows, columns = (size, size) if isinstance(size, int) else size
    got = custom.RoiAlign(size, 0.5, ratio)(features, boxes, batch)
    wanted = reference(
        "RoiAlign", features, boxes, batch, opset=16, coordinate_transformation_mode="output_half_pixel",
        output_height=rows, output_width=columns, sampling_ratio=ratio, spatial_scale=0.5,
    )  # fmt: skip
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert custom.RoiAlign(size, 0.5, ratio)(features, boxes[:0], batch[:0]).shape == (0, 3, rows, columns)


@pytest.mark.parametrize("size", [8, 12, 64, 7])
def test_hadamard_rotation_keeps_lengths_and_undoes_itself(size):
    x, rotation = torch.randn(5, 3, size), custom.HadamardRotation(size)
    y = rotation(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotation(y), x)
    order = size & -size
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)])
    assert torch.equal(rotation.hadamard, signs)
    torch.testing.assert_close(custom.HadamardRotation(size, 2.0)(x), y * 2 * order**0.5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [8, 6])
def test_rotary_embedding_turns_pairs(interleaved, turned):
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(16, turned // 2)
    ids = torch.randint(0, 16, (2, 5))
    module = custom.RotaryEmbedding(interleaved, turned, 8)
    got = module(x, angles.cos(), angles.sin(), ids)
    torch.testing.assert_close(got, module(x, angles[ids].cos(), angles[ids].sin()))
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + turned // 2) for i in range(turned // 2)]
    turns = torch.polar(torch.ones(2, 1, 5, turned // 2), angles[ids].unsqueeze(1))
    for i, (real, imaginary) in enumerate(pairs):
        wanted = torch.complex(x[..., real], x[..., imaginary]) * turns[..., i]
        torch.testing.assert_close(torch.complex(got[..., real], got[..., imaginary]), wanted)
    assert torch.equal(got[..., turned:], x[..., turned:])


@pytest.mark.parametrize(
    "name, arguments, inputs",
    [
        ("GatherNd", (0,), (torch.randn(4, 3), torch.tensor([[0], [3]]))),
        ("ScatterND", (1,), (torch.randn(4, 3), torch.tensor([[0], [3]]), torch.randn(2, 3))),
        ("RoiAlign", (2, 1.0, 2), (torch.randn(1, 2, 6, 6), torch.tensor([[0.0, 1.0, 4.0, 5.0]]), torch.tensor([0]))),
        ("HadamardRotation", (8,), (torch.randn(4, 8),)),
        ("RotaryEmbedding", (True, 4, 4), (torch.randn(1, 2, 3, 4), torch.rand(1, 3, 2), torch.rand(1, 3, 2))),
    ],
)
def test_quantized_forms_quantize_inputs_and_outputs(name, arguments, inputs):
    module = getattr(custom, f"Quantized{name}")(*arguments)
    plain = module.get_original_module()
    assert type(plain) is getattr(custom, name)
    first, output = QuantizeDequantize((), 8, False), QuantizeDequantize((), 8, False)
    module.input_quantizers[0], module.output_quantizers[0] = first, output
    with module.compute_encodings():
        module(*inputs)
    wanted = output(plain(first(inputs[0]), *inputs[1:]))
    assert torch.equal(module(*inputs).as_subclass(torch.Tensor), wanted.as_subclass(torch.Tensor))


def test_modules_of_an_ignored_class_stay_in_float_until_a_quantized_class_is_registered():
    from bitwright.aimet_torch.nn import QuantizationMixin
    from bitwright.aimet_torch.quantsim import QuantizationSimModel

    @QuantizationMixin.ignore
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * 2

    def sites(model):
        sim = QuantizationSimModel(model, torch.rand(2, 4))
        return {name.partition(".")[0] for name, site in sim.quantizers.items() if site.enabled}

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scaled(), torch.nn.ReLU())
    assert "1" not in sites(model) and QuantizationMixin.from_module(model[1]) is model[1]
    QuantizationMixin.implements(Scaled)(type("QuantizedScaled", (QuantizationMixin, Scaled), {}))
    assert "1" in sites(model)
