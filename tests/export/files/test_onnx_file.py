"""What is written tensor by tensor is read back as the model that was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from bitwright.export.files.onnx_file import save_in_one_file

W = np.random.default_rng(0).standard_normal((160, 160)).astype(np.float32)


def model() -> ir.Model:
    int4 = helper.make_tensor("q", TensorProto.INT4, [160, 1025], np.arange(160 * 1025) % 15 - 7)
    weights = [
        numpy_helper.from_array(W, "large"),
        numpy_helper.from_array(W[0], "small"),
        int4,
        numpy_helper.from_array(W.astype(np.float16).repeat(2, 0), "half"),
        helper.make_tensor("names", TensorProto.STRING, [2], [b"a", b"b" * 70000]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 160]) for name in ("x", "y")]
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["h"]),
        helper.make_node("Add", ["h", "small"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights, doc_string="what it is")
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def test_the_file_is_the_model(tmp_path: Path) -> None:
    written, path = model(), tmp_path / "m.onnx"
    lazy = ir.LazyTensor(lambda: ir.Tensor(W * 2), ir.DataType.FLOAT, ir.Shape(W.shape), name="large")
    written.graph.initializers["large"].const_value = lazy
    before = {name: value.const_value for name, value in written.graph.initializers.items()}
    save_in_one_file(written, path)
    assert {name: value.const_value for name, value in written.graph.initializers.items()} == before
    onnx.checker.check_model(path, full_check=True)
    found, expected = onnx.load(path), ir.to_proto(written)
    for proto in (found, expected):  # elements of four bits may lie in another field
        for tensor in proto.graph.initializer:
            if tensor.name != "names":
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    assert found == expected
    x = np.ones((2, 160), np.float32)
    (found,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(found, x @ (2 * W) + W[0], rtol=1e-4, atol=1e-4)


def test_a_model_that_cannot_be_written_keeps_its_tensors(tmp_path: Path) -> None:
    kept = model()
    with pytest.raises(OSError, match="absent"):
        save_in_one_file(kept, tmp_path / "absent" / "m.onnx")
    assert np.array_equal(kept.graph.initializers["large"].const_value.numpy(), W)
