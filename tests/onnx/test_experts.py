"""Stacked matrices in ONNX: a MatMul whose weight holds one matrix per expert."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bitwright.onnx import QuantizationSimModel, apply_gptq, apply_reconstruction


def product(x: tuple[int, ...], w: tuple[int, ...]) -> ModelProto:
    """``y = x @ w``; matrices of the stack differ in size by a factor of 100."""
    weight = np.random.default_rng(0).standard_normal(w).astype(np.float32)
    weight *= np.geomspace(0.1, 10, w[0]).reshape(-1, *[1] * (len(w) - 1)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], "stack",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def batches(shape: tuple[int, ...], count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    mix = rng.standard_normal((64, 64))
    return [{"x": (rng.standard_normal(shape) @ mix).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("preset, blocks", [("w4g32", 2), ("w4", 1)])
def test_matrices_of_a_stack_do_not_share_scales(preset: str, blocks: int) -> None:
    sim = QuantizationSimModel(product((4, 16, 64), (4, 64, 24)), preset=preset)
    sim.compute_encodings(batches((4, 16, 64), 2))
    assert sim.quantizers["w"].encoding.scale.shape == (4, blocks, 24)


@pytest.mark.parametrize(
    "x, w",
    [((4, 16, 64), (4, 64, 24)), ((16, 64), (4, 64, 24)), ((2, 4, 16, 64), (4, 64, 24)), ((3, 1, 16, 64), (3, 4, 64, 8))],
    ids=["rows-of-each", "rows-for-all", "batch", "two-axes"],
)  # fmt: skip
def test_methods_of_rounding_treat_stacks(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    data = batches(x, 8)
    for method, options in ((apply_gptq, {}), (apply_reconstruction, {"iterations": 50})):
        sim = QuantizationSimModel(product(x, w), preset="w4g32")
        sim.compute_encodings(data)
        (row,) = method(sim, data, **options)
        assert row.after < 0.75 * row.before
