"""ExecuTorch: what is made of an ONNX model, and its codes where the wheel is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from bitwright.compare.drift import drift
from bitwright.compare.verify import verify_folder
from bitwright.errors import ExportError
from bitwright.export.files.onnx_file import load
from bitwright.onnx.executorch import Program, open_model
from bitwright.onnx.simulation.quantsim import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated


class Net(nn.Module):
    """Convolutions, a sum, a pool, and linear layers behind a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point, self.pool = nn.Conv2d(8, 8, 1), nn.MaxPool2d(2)
        self.fc, self.head = nn.Linear(128, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.point(nn.functional.relu6(self.depthwise(x))))
        return self.head(torch.sigmoid(self.fc(self.pool(x).flatten(1))))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, QuantizationSimModel, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    sim = calibrated(QuantizationSimModel(Net().eval(), x), [x, torch.randn(4, 3, 8, 8)])
    folder = tmp_path_factory.mktemp("exported")
    sim.export(folder, "net", x)
    return folder, sim, x


def test_the_program_computes_what_the_simulation_does(exported: tuple[Path, QuantizationSimModel, Tensor]) -> None:
    folder, sim, x = exported
    program = Program(load(folder / "net.onnx"), {"x": x.numpy()}).eval()
    with torch.no_grad():
        assert torch.equal(program(x)[0], sim.model(x))
    captured = torch.export.export(program, (x,), strict=False)
    reads = [node for node in captured.graph.nodes if "dequantize_per_tensor" in str(node.target)]
    assert reads and all(len(node.users) == 1 for node in reads)  # its layout is that of its reader
    held = {name: t for name, t in program.state_dict().items() if t.dtype == torch.int8}
    weights = [p.numel() for name, p in sim.model.named_parameters() if "weight" in name]
    assert sorted(t.numel() for t in held.values()) == sorted(weights)


def matmul(shape: int) -> onnx.ModelProto:
    """A product of which the weight is read column by column, its bias added apart, behind a shape that is computed."""
    rng, value = np.random.default_rng(0), helper.make_tensor_value_info
    held = {"w": rng.standard_normal((12, 5)).astype(np.float32), "b": rng.standard_normal(5).astype(np.float32)}
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], end=1),
        helper.make_node("Concat", ["s", "rest"], ["whole"], axis=0),
        helper.make_node("Reshape", ["x", "whole"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["p"]),
        helper.make_node("Add", ["b", "p"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(a, n) for n, a in {**held, "rest": np.int64([-1])}.items()]
    ends = [value("x", TensorProto.FLOAT, [shape, 3, 4])], [value("y", TensorProto.FLOAT, [shape, 5])]
    return helper.make_model(
        helper.make_graph(nodes, "g", *ends, tensors), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )


def test_products_with_their_bias_are_linear_layers(tmp_path: Path) -> None:
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float32)}
    sim = calibrated(OnnxSim(matmul(2), feeds), [feeds])
    path = sim.export(tmp_path, "net").qdq
    program = Program(load(path), feeds).eval()
    captured = torch.export.export(program, (torch.from_numpy(feeds["x"]),), strict=False)
    kinds = [str(node.target) for node in captured.graph.nodes if node.op == "call_function"]
    assert kinds.count("aten.linear.default") == 1 and not any("matmul" in kind or "add" in kind for kind in kinds)
    at = kinds.index("aten.linear.default")
    assert kinds[at - 2 : at + 2].count("quantized_decomposed.quantize_per_tensor.default") == 1
    with torch.no_grad():
        assert np.array_equal(program(torch.from_numpy(feeds["x"]))[0].numpy(), sim.run(feeds)[0])


def test_codes_that_a_part_of_a_model_is_given_are_read(tmp_path: Path) -> None:
    value, codes = helper.make_tensor_value_info, np.array([[0, 3, 255], [7, 128, 9]], np.uint8)
    nodes = [helper.make_node("DequantizeLinear", ["x", "s", "z"], ["d"]), helper.make_node("Neg", ["d"], ["y"])]
    held = [numpy_helper.from_array(np.float32(0.5), "s"), numpy_helper.from_array(np.uint8(3), "z")]
    ends = [value("x", TensorProto.UINT8, [2, 3])], [value("y", TensorProto.FLOAT, [2, 3])]
    graph = helper.make_graph(nodes, "g", *ends, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "n.onnx")
    program = Program(load(tmp_path / "n.onnx"), {"x": codes})
    assert np.array_equal(program(torch.from_numpy(codes))[0], -(codes.astype(np.float32) - 3) * 0.5)


def test_what_has_no_form_is_refused_by_name(tmp_path: Path) -> None:
    path, value = tmp_path / "net.onnx", helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, [2, 3])], [value("y", TensorProto.FLOAT, [2, 3])]
    graph = helper.make_graph([helper.make_node("Hardmax", ["x"], ["y"], name="hard")], "g", *ends)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with pytest.raises(ExportError, match=r"hard \(Hardmax\).*no form of Hardmax.*another runtime"):
        open_model(path, 1, False).run({"x": np.zeros((2, 3), np.float32)})


def test_an_activation_that_a_node_makes_of_constants_keeps_its_numbers(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Add", ["x", "d"], ["y"]),
    ]
    held = {"c": np.float32([0.9, -2.0, 70]), "s": np.float32(0.5), "z": np.uint8(3)}
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    ends = [value("x", TensorProto.FLOAT, [3])], [value("y", TensorProto.FLOAT, [3])]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "n.onnx")
    x = np.float32([0, 0, 0])
    assert np.array_equal(Program(load(tmp_path / "n.onnx"), {"x": x})(torch.from_numpy(x))[0], [1, -1.5, 70])


@pytest.mark.slow
def test_executorch_computes_what_the_simulation_does(exported: tuple[Path, QuantizationSimModel, Tensor]) -> None:
    """The whole file, its parts, of which several read one input, and the file with every value an output."""
    pytest.importorskip("executorch")
    folder, *_ = exported
    report = verify_folder(folder, runtime="executorch")
    assert report.ok and all(row.as_integer.equal == 1 for row in report.rows)
    assert [row.as_integer for row in report.outputs] == [float("inf")]
    rows = drift(f"{folder}@file", f"{folder}@executorch").rows
    assert len(rows) == 10 and all(row.own.equal == row.carried.equal == 1 for row in rows)
