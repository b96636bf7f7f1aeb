"""What an export contains and says: files, other opsets, speed once it is written."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from typer.testing import CliRunner

from bitwright import __version__, quantize
from bitwright.cli import app
from bitwright.compare import benchmark as deployed
from bitwright.compare.benchmark import brief_speed, measured_if_short
from bitwright.errors import ConfigError, EncodingsError, ExportError
from bitwright.export.contents import Table, contents
from bitwright.export.files.manifest import read_origin
from bitwright.export.opsets import bring_to
from bitwright.onnx import QuantizationSimModel, load_model
from bitwright.runtimes.timing import Ratio
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.onnx.nets import Net, feeds_for, run
from tests.onnx.opset_cases import CASES, model_of, opsets_of
from tests.onnx.test_old_files import batches, classifier
from tests.support.simulations import calibrated


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
    told = rows(contents(folder / name), "Provenance")
    assert told["tool"] == (f"bitwright {__version__}",) and told["preset"] == ("w8a8",)
    assert told["recipe"] == ("fold",) and told["target"] == ("litert",)
    assert told["data"][0].startswith("3 batches, the first sha256:")
    assert told["encodings"][0].startswith("sha256:") and told == rows(contents(folder), "Provenance")
    assert "recorded in the file" in shown(folder / name)


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
    told = rows(tables, "Provenance")
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


def test_a_damaged_note_names_the_operator(folder: Path, tmp_path: Path) -> None:
    proto = onnx.load(folder / "net.onnx")
    node = next(node for node in proto.graph.node if node.op_type == "DequantizeLinear")
    next(prop for prop in node.metadata_props if prop.key == "bitwright").value = '{"places": 3}'
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=f"{node.name}: what the export wrote on this operator is damaged"):
        contents(tmp_path / "m.onnx")


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
def test_what_cannot_be_shown_is_an_error(tmp_path, name, content, error, message):
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


X = [torch.randn(1, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def written(folder, **options):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).eval()
    return quantize(net, X, recipe=["fold"], path=folder, progress=False, **options).exported


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return written(tmp_path_factory.mktemp("plain"), measure_speed=False)


@pytest.mark.parametrize(
    ("speed", "warned"), [(Ratio(0.5, 0.48, 0.53), True), (Ratio(0.5, 0.4, 0.6), False), (Ratio(2.0, 1.9, 2.1), False)]
)
def test_quantize_warns_where_the_file_it_wrote_is_slower_than_float(tmp_path, monkeypatch, caplog, speed, warned):
    monkeypatch.setattr(deployed, "brief_speed", lambda *_, **__: speed)
    assert written(tmp_path).speed == speed
    assert (
        "model.onnx: slower than float on this machine: 0.50x (0.48 to 0.53); `bitwright benchmark" in caplog.text
    ) == warned


def test_quantize_measures_what_it_wrote(tmp_path):
    assert 0 < written(tmp_path).speed.median < math.inf


def test_nothing_is_measured_where_that_is_not_asked_for(exported):
    assert exported.speed is None


def test_what_takes_long_to_run_is_not_measured(exported):
    assert brief_speed(exported, slowest=0.0) is None
    assert brief_speed(exported, slowest=60.0) is not None


def test_large_files_are_not_loaded_to_be_measured(exported, monkeypatch):
    monkeypatch.setattr(deployed, "_LARGE", exported.qdq.stat().st_size)
    assert measured_if_short(exported, "ort_cpu").speed is None


@pytest.mark.parametrize("target", ["packed", "litert"])
def test_files_for_what_does_not_run_onnx_are_not_measured(exported, target):
    assert measured_if_short(exported, target).speed is None


def test_a_file_that_its_runtime_refuses_is_a_warning_as_it_is_written(exported, monkeypatch, caplog):
    def refuse(*_, **__):
        raise ExportError("net.onnx", "onnxruntime refuses the file: no kernel", "leave it in float")

    monkeypatch.setattr(deployed, "open_file", refuse)
    assert measured_if_short(exported, "ort_cpu").speed is None
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert told.message.count("not compared with float") == 1
    assert "is complete, but onnxruntime refuses the file: no kernel" in told.message


def test_a_runtime_that_is_not_installed_is_no_warning(exported, monkeypatch, caplog):
    def missing(*_, **__):
        raise ConfigError("onnxruntime", "it is not installed", "pip install onnxruntime")

    monkeypatch.setattr(deployed, "open_file", missing)
    assert measured_if_short(exported, "ort_cpu").speed is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("opset, ir_version", [(25, 13), (21, 10), (19, 9), (17, 8), (15, 8), (13, 7)])
def test_files_of_an_opset_compute_the_same(opset, ir_version, tmp_path):
    data = batches()
    result = quantize(
        classifier(11), data, recipe=["fold"], path=tmp_path, opset=opset, progress=False, measure_speed=False
    )
    for path in (result.exported.qdq, result.exported.float_model):
        model = onnx.load(path)
        assert (model.opset_import[0].version, model.ir_version) == (opset, ir_version)
    found = run(onnx.load(result.exported.qdq), data[0])[0]
    np.testing.assert_allclose(found, result.sim.run(data[0])[0], atol=0.005)
    read = QuantizationSimModel(str(result.exported.qdq), data[0])
    np.testing.assert_array_equal(read.run(data[0])[0], result.sim.run(data[0])[0])


@pytest.mark.parametrize("name", CASES)
def test_operators_are_brought_back_to_the_opset_that_they_came_from(name):
    """Of each operator whose form changed: the model at the newest opset, at every older one that has it, or a reason."""
    newest = opsets_of(name)[-1]
    model = model_of(name, newest)
    feeds = feeds_for(model)
    for opset in (21, 17, 13, 11, 9):
        loaded = load_model(model).model
        try:
            bring_to(loaded, opset, None)
        except ExportError as error:
            assert f"it cannot be written at opset {opset}: " in str(error)
            continue
        for expected, found in zip(run(model, feeds), run(loaded, feeds), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"opset {opset}")


@pytest.mark.parametrize(
    "name", ["ReduceMean", "ReduceSum", "squeeze_unsqueeze", "split", "split_evenly", "shapes", "pools"]
)
def test_what_13_has_is_brought_there(name):
    loaded = load_model(model_of(name, 25)).model
    bring_to(loaded, 13, None)
    assert (loaded.opset_imports[""], loaded.ir_version) == (13, 7)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


def test_modules_are_written_at_an_opset_or_name_the_operator(tmp_path):
    model, x = Transformer().eval(), torch.randn(3, 8)
    sim = calibrated(TorchSim(model, x), [x])
    exported = sim.export(tmp_path, "net", x, opset=17)
    written = onnx.load(exported.qdq)
    assert "Erf" in {node.op_type for node in written.graph.node}, "Gelu came with opset 20"
    np.testing.assert_allclose(run(written, {"x": x.numpy()})[0], sim.model(x).detach().numpy(), atol=0.05)
    with pytest.raises(ExportError, match=r"\(LayerNormalization\): .* opset 16: .* came with opset 17"):
        sim.export(tmp_path, "net", x, opset=16)
    assert onnx.load(exported.qdq).opset_import[0].version == 17, "an export that is refused leaves the earlier one"


@pytest.mark.parametrize(
    "preset, opset, problem",
    [
        ("w8a8", 11, r"c1.weight_dq \(DequantizeLinear\).*at opset 11: .*axis.*13 knows several scales"),
        (
            "w8a16",
            20,
            r"x_q \(QuantizeLinear\).*at opset 20: there it does not take tensor\(uint16\).*21 integers of 4 and 16",
        ),
    ],
)
def test_formats_say_which_opset_they_need(preset, opset, problem, tmp_path):
    with pytest.raises(ExportError, match=problem):
        quantize(classifier(17), batches(), preset, recipe=["fold"], path=tmp_path, opset=opset, progress=False)


def test_versions_that_do_not_exist_or_do_not_fit():
    n = Net()
    model = ir.from_proto(n.model(n("Relu", n.input("x", (2, 4)), out="y"), opset=17))
    for name, given in (("opset", 6), ("opset", 99), ("ir_version", 3), ("ir_version", 14)):
        with pytest.raises(ConfigError, match=f"{name}: .* is not a version that can be written.*use "):
            quantize(n.model("y"), [], **{name: given})
    with pytest.raises(ExportError, match="ir_version: 7 has no place for opset 17.*ask for 8 or newer"):
        bring_to(model, None, 7)
    bring_to(model, 13, 9)
    assert (model.opset_imports[""], model.ir_version) == (13, 9)


def test_provenance_that_is_not_utf8_is_shown_with_its_faulty_bytes_replaced(tmp_path):
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    model.metadata_props.add(key="bitwright.rules", value="default rules")
    content = model.SerializeToString().replace(b"default rules", b"default r\xf5les")
    (tmp_path / "m.onnx").write_bytes(content)
    assert read_origin(tmp_path / "m.onnx") == {"rules": "default r\ufffdles"}


def test_large_tensors_lie_in_a_second_file_where_that_is_asked_for(tmp_path: Path) -> None:
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    sim = calibrated(TorchSim(nn.Linear(512, 256), x, preset="w8"))
    made = sim.export(tmp_path / "torch", "net", x, external=True)
    again = calibrated(QuantizationSimModel(str(made.float_model), preset="w8"))
    for exported in (made, again.export(tmp_path / "onnx", "net", external=True)):
        names = {path.name for path in exported.files if path.suffix == ".data"}
        assert names == {"net.onnx.data", "net_float.onnx.data"}
        session = onnxruntime.InferenceSession(str(exported.qdq), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(found, sim.model(x).detach().numpy(), rtol=1e-4, atol=1e-4)
