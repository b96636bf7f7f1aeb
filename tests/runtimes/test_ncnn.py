"""ncnn: what is written for an ONNX model, and its numbers where the wheel is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from bitwright.compare.verify import verify_folder
from bitwright.errors import ExportError
from bitwright.onnx import write_ncnn
from bitwright.runtimes.adapters import open_file
from bitwright.torch import quantize


class Net(nn.Module):
    """Convolutions, one with groups, a sum that reads what a layer reads, pools, a linear layer and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point, self.pool, self.head = nn.Conv2d(8, 8, 1, bias=False), nn.MaxPool2d(2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = self.pool(torch.relu(x + self.point(nn.functional.relu6(self.depthwise(x)))))
        return torch.softmax(self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)), -1)


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("ncnn")
    recipe = ["fold", "layer_inputs"]
    found = quantize(Net().eval(), [X], recipe=recipe, target="ncnn", path=folder, progress=False, measure_speed=False)
    with torch.no_grad():
        return folder, found.sim.model(X).numpy()


def test_layers_hold_codes_and_scales(exported: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """The layout of the files: ncnn's documentation of parameters, and a tag in front of int8 weights."""
    made = write_ncnn(exported[0] / "model.onnx", tmp_path)
    assert (tmp_path / "model.ncnn.param").read_text() == made.param
    assert (tmp_path / "model.ncnn.bin").read_bytes() == made.content
    with pytest.raises(ExportError, match="model.ncnn.bin: File exists"):
        write_ncnn(exported[0] / "model.onnx", tmp_path / "model.ncnn.bin")
    lines = [line.split() for line in made.param.splitlines()]
    assert lines[0] == ["7767517"] and int(lines[1][0]) == len(lines) - 2
    layers = [line[0] for line in lines[2:]]
    assert (
        layers.count("Convolution") == 2 and layers.count("ConvolutionDepthWise") == layers.count("InnerProduct") == 1
    )
    assert "UnaryOp" not in layers or layers.count("UnaryOp") < 4  # quantizers that layers have are not written again
    on_codes = [line for line in lines[2:] if line[0] in ("Convolution", "ConvolutionDepthWise", "InnerProduct")]
    assert [next(w for w in line if w.startswith("8=")) for line in on_codes] == ["8=2", "8=1", "8=2", "8=2"]
    reads = [blob for line in lines[2:] for blob in line[4 : 4 + int(line[2])]]
    assert len(reads) == len(set(reads))  # every blob has one reader
    # codes of 4 bytes each padded, biases, one scale per output and one of the input
    sizes = [(216, 8, 8), (72, 8, 8), (64, 0, 8), (32, 4, 4)]
    assert len(made.content) == sum(4 + codes + 4 * (bias + scales + 1) for codes, bias, scales in sizes)
    assert sorted(kind for kind in made.kernels.values() if kind.endswith("i8")) == [
        "Convolution i8", "Convolution i8", "ConvolutionDepthWise i8", "InnerProduct i8",
    ]  # fmt: skip


def test_ncnn_computes_what_the_simulation_does(exported: tuple[Path, np.ndarray]) -> None:
    pytest.importorskip("ncnn")
    folder, wanted = exported
    before = sorted(folder.iterdir())
    (found,) = open_file("ncnn", folder / "model.onnx").run({"x": X.numpy()}).values()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert sorted(folder.iterdir()) == before
    report = verify_folder(folder, runtime="ncnn")
    assert report.ok and sum("i8" in row.kernel for row in report.rows) >= 1


class Mixed(nn.Module):
    """Groups of several channels, and constants with one number and one per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 16, 3, groups=2)
        self.gain, self.head = nn.Parameter(torch.randn(1, 8, 1, 1)), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = 1 - nn.functional.hardswish(self.first(x)) * self.gain
        y = torch.cat([nn.functional.leaky_relu(self.second(y)), nn.functional.avg_pool2d(y, 3, 1)], 1)
        return self.head(y.mean((2, 3)))


def test_grids_that_ncnn_does_not_have_are_computed_in_float(tmp_path: Path) -> None:
    pytest.importorskip("ncnn")
    torch.manual_seed(0)
    found = quantize(Mixed().eval(), [X], recipe=["fold"], path=tmp_path, progress=False, measure_speed=False)
    (made,) = open_file("ncnn", tmp_path / "model.onnx").run({"x": X.numpy()}).values()
    with torch.no_grad():
        np.testing.assert_allclose(made, found.sim.model(X).numpy(), rtol=0, atol=1e-6)
    assert not any(kind.endswith("i8") for kind in write_ncnn(tmp_path / "model.onnx", tmp_path).kernels.values())


@pytest.mark.parametrize(
    "node, message",
    [
        (helper.make_node("Hardmax", ["x"], ["y"], name="hard"), r"hard \(Hardmax\).*no form of Hardmax in ncnn"),
        (helper.make_node("Softmax", ["x"], ["y"], name="soft", axis=0), r"soft \(Softmax\).*along the batch"),
        (helper.make_node("MatMul", ["x", "x"], ["y"], name="square"), r"square \(MatMul\).*operand 1 is computed"),
    ],
    ids=["operator", "batch", "product"],
)
def test_what_has_no_form_is_refused_by_name(node: onnx.NodeProto, message: str, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, [3, 3])], [value("y", TensorProto.FLOAT, [3, 3])]
    opset = [helper.make_opsetid("", 17)]
    onnx.save(
        helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=opset, ir_version=8), tmp_path / "n.onnx"
    )
    with pytest.raises(ExportError, match=f"{message}.*another runtime"):
        write_ncnn(tmp_path / "n.onnx", tmp_path)
