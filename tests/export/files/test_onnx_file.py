"""What is written tensor by tensor is read back as the model that was written."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from bitwright.export.files.onnx_file import save_in_one_file, save_model

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
    nodes = [helper.make_node("MatMul", ["x", "large"], ["h"]), helper.make_node("Add", ["h", "small"], ["y"])]
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


def branching() -> onnx.ModelProto:
    """A sum and a product of a body with weights of 40 bytes, as ``torch.onnx.export`` puts them into a second file."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [10]) for name in ("x", "y", "inside")]
    outer, inner = (numpy_helper.from_array(W[0, at : at + 10], name) for at, name in ((0, "w"), (10, "v")))
    body = [
        helper.make_graph([helper.make_node("Mul", ["h", "v"], ["inside"])], "then", [], values[2:], [inner]),
        helper.make_graph([helper.make_node("Identity", ["h"], ["inside"])], "else", [], values[2:]),
    ]
    nodes = [
        helper.make_node("Add", ["x", "w"], ["h"]),
        helper.make_node("If", ["take"], ["y"], then_branch=body[0], else_branch=body[1]),
    ]
    take = helper.make_tensor_value_info("take", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [values[0], take], values[1:2], [outer])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("external", [False, True], ids=["one file", "two files"])
def test_small_tensors_of_another_file_come_along(tmp_path: Path, external: bool) -> None:
    given, path = tmp_path / "given", tmp_path / "written"
    for folder in (given, path):
        folder.mkdir()
    proto = branching()
    (body,) = (attribute.g for attribute in proto.graph.node[1].attribute if attribute.name == "then_branch")
    for tensor in (proto.graph.initializer[0], body.initializer[0]):
        set_external_data(tensor, "m.data")
    onnx.save(proto, given / "m.onnx")
    model = ir.load(given / "m.onnx")
    before = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    assert [type(tensor) for tensor in before] == [ir.ExternalTensor] * 2
    save_model(model, path / "m.onnx", external=external)
    after = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    shutil.rmtree(given)
    onnx.checker.check_model(path / "m.onnx", full_check=True)
    session = ort.InferenceSession(path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": W[1, :10], "take": np.array(True)})
    np.testing.assert_allclose(found, (W[1, :10] + W[0, :10]) * W[0, 10:20], rtol=1e-6)
