"""Biases that the simulation has in float and the file on the int32 grid of an accumulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import bitwright.onnx
from bitwright.compare.drift import drift
from bitwright.compare.verify import verify_folder


def product_and_sum(folder: Path) -> Path:
    """A MatMul and an Add, whose constant is a bias: with 4-bit weights a step of its grid is a part of an output's step."""
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((32, 16)), "b": rng.standard_normal(16)}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Add", ["product", "b"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 16])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "net.onnx")
    return folder / "net.onnx"


def test_what_the_int32_grid_of_a_bias_moves_is_measured_and_a_wrong_bias_fails(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((1024, 32)).astype(np.float32)
    result = bitwright.onnx.quantize(
        product_and_sum(tmp_path),
        [x],
        "w4a8",
        recipe=["fold"],
        config_file={"rules": [{"match": "*", "bias": {"quantized": False}}]},
        path=tmp_path,
        filename_prefix="net",
        progress=False,
    )
    assert result.exported is not None
    report = verify_folder(tmp_path)
    row = report.rows[-1]
    assert row.as_float.equal < 0.999, "the model is made for codes that differ"
    assert report.ok and row.verdict == "within", str(report)
    assert "float: a bias that the simulation has in float is on the int32 grid" in str(row.reason)
    found = drift(f"{tmp_path}@simulation", f"{tmp_path}@file")
    assert found.ok and found.first is not None and found.first.cause == "rounding", str(found)

    changed = onnx.load(result.exported.qdq)
    bias = next(t for t in changed.graph.initializer if t.data_type == onnx.TensorProto.INT32)
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + 3, bias.name))
    onnx.save(changed, tmp_path / "changed.onnx")
    assert not drift(f"{tmp_path}@simulation", f"{tmp_path / 'changed.onnx'}@file").ok
