"""``bitwright show``: every kind of file that is written says where it comes from, and how its tensors are quantized."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from typer.testing import CliRunner

from bitwright import __version__
from bitwright.cli import app
from bitwright.errors import EncodingsError, ExportError
from bitwright.export.contents import Table, contents
from bitwright.torch import quantize


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    batches = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    result = quantize(
        model, batches, recipe=["fold"], path=path, filename_prefix="net", target="litert", progress=False
    )
    result.sim.save_checkpoint(path / "checkpoint")
    return path


def shown(path: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["show", str(path), *more])
    assert result.exit_code == 0, result.output
    return result.output


def rows(tables: list[Table], title: str) -> dict[str, tuple[str, ...]]:
    (found,) = (table for table in tables if table.title.startswith(title))
    return {row[0]: row[1:] for row in found.rows}


@pytest.mark.parametrize("name", ["", "net.onnx", "net.tflite"])
def test_models_tell_their_origin(folder: Path, name: str) -> None:
    told = rows(contents(folder / name), "Origin")
    assert told["tool"] == (f"bitwright {__version__}",) and told["preset"] == ("w8a8",)
    assert told["recipe"] == ("fold",) and told["target"] == ("litert",)
    assert told["data"][0].startswith("3 batches, the first sha256:")
    assert told["encodings"][0].startswith("sha256:") and told == rows(contents(folder), "Origin")
    assert "what the file says of itself" in shown(folder / name)


def test_every_file_tells_the_same_scales(folder: Path) -> None:
    saved = rows(contents(folder), "Sites of net")["0.weight"]
    assert saved[:4] == ("weight", "quantized", "int8n", "per channel (axis 0)")
    scales = saved[4:6]
    assert rows(contents(folder / "net_sites.json"), "net_sites.json")["0.weight"] == saved
    assert rows(contents(folder / "checkpoint"), "Quantizers")["0.weight"][3:5] == scales
    assert rows(contents(folder / "net.encodings"), "net.encodings")["0.weight"][3:5] == scales
    stored = rows(contents(folder / "net.onnx"), "Quantized tensors")
    assert stored["0.weight"] == ("constant", "int8n", "per channel (axis 0)", *scales)
    assert stored["0.bias"][:2] == ("bias", "int32") and stored["0.input[0]"][0] == "activation"
    flat = rows(contents(folder / "net.tflite"), "Quantized tensors")
    assert [row[3] for row in flat.values()].count(scales[0]) == 1
    assert flat["0.input[0]"] == ("activation", "int8", "per tensor", stored["0.input[0]"][3], flat["0.input[0]"][4])
    assert "0.weight" in shown(folder / "net.onnx", "--match", "0.w*")
    assert "3.weight" not in shown(folder / "net.onnx", "--match", "0.w*")


def test_a_float_model_and_a_manifest(folder: Path) -> None:
    assert rows(contents(folder / "net_float.onnx"), "Quantized tensors") == {}
    tables = contents(folder / "net_manifest.json")
    assert set(rows(tables, "Files")) == {"net.onnx", "net_float.onnx", "net.tflite", "net.encodings", "net_sites.json",
                                          "net_samples.npz"}  # fmt: skip
    told = rows(tables, "Origin")
    assert told["target"] == ('"litert"',) and told["version of bitwright"] == (__version__,)


def test_files_of_other_tools(tmp_path: Path) -> None:
    """A weight in blocks, a scale that is computed, codes whose type is that of the zero point."""

    def constant(name: str, array: np.ndarray) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(array, name)

    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], axis=0, block_size=4),
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "sx", "zx"], ["d"]),
        helper.make_node("Abs", ["sx"], ["computed"]),
        helper.make_node("DequantizeLinear", ["q", "computed", "zx"], ["e"]),
        helper.make_node("MatMul", ["d", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2]),
         helper.make_tensor_value_info("e", TensorProto.FLOAT, [1, 8])],
        [constant("w", np.ones((8, 2), np.int8)), constant("s", np.ones((2, 2), np.float32)),
         constant("z", np.zeros((2, 2), np.int8)), constant("sx", np.float32(0.5)), constant("zx", np.uint8(3))],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    (table,) = contents(tmp_path / "m.onnx")
    assert table.rows == (
        ("v", "constant", "int8", "per block of 4 (axis 0)", "1", "0"),
        ("d", "activation", "uint8", "per tensor", "0.5", "3"),
        ("e", "activation", "uint8", "", "computed", ""),
    )


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("m.onnx", b"no model", ExportError, "cannot be read as an ONNX model"),
        ("m.tflite", b"no model", ExportError, "cannot be read as a LiteRT file"),
        ("m.npz", b"", ExportError, r".npz files hold values alone.*name the folder that it lies in"),
        ("model.safetensors", b"", ExportError, "hold values alone"),
        ("m_manifest.json", b"[]", ExportError, "manifest"),
        ("m.encodings", b"\xfa", EncodingsError, "it is not JSON"),
        ("gone", None, ExportError, "there is no such file or folder"),
    ],
)
def test_what_cannot_be_shown_is_an_error(
    tmp_path: Path, name: str, content: bytes | None, error: type[Exception], message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        contents(tmp_path / name)


@pytest.mark.parametrize("state", [[], {}, {"quantizers": {"a": {}}}, {"quantizers": {"a": 3}}])
def test_a_checkpoint_that_lists_no_quantizers(folder: Path, tmp_path: Path, state: object) -> None:
    from bitwright.export.files.manifest import write_manifest

    (tmp_path / "quantizers.json").write_text(json.dumps(state))
    write_manifest(tmp_path / "checkpoint.json")
    with pytest.raises(EncodingsError, match="it lists no quantizers.*save the checkpoint again"):
        contents(tmp_path)
    (tmp_path / "quantizers.json").write_text("{}  ")
    with pytest.raises(ExportError, match=r"quantizers\.json"):
        contents(tmp_path)
