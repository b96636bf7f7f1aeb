"""The same comparison in another runtime, and what a file tells of its origin."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bitwright import __version__
from bitwright.cli import app
from bitwright.compare.runtime import run_in
from bitwright.compare.verify import verify_folder
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError, ExportError
from bitwright.export.files.manifest import read_origin
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel, quantize
from tests.support.without_vnni import lacks_vnni

BATCHES = [torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(), nn.Flatten(), nn.Linear(512, 4)
    ).eval()
    path = tmp_path_factory.mktemp("exported")
    quantize(
        model,
        BATCHES,
        "w8a8",
        recipe=["fold"],
        path=path,
        filename_prefix="net",
        repair="saturation",  # sums are exact in OpenVINO on any CPU
        progress=False,
    )
    return path


def test_layers_in_openvino(folder: Path) -> None:
    pytest.importorskip("openvino")
    result = CliRunner().invoke(
        app, ["verify", str(folder), "--runtime", "openvino", "--json", str(folder.parent / "r.json")]
    )
    assert result.exit_code == 0, result.output
    report = json.loads((folder.parent / "r.json").read_text())
    kernels = {row["kernel"] for row in report["rows"] if row["ops"]}
    assert report["runtime"] == "openvino" and "Convolution u8" in kernels
    sim = OnnxSim(folder / "net.onnx")
    assert sim.verify(runtime="openvino").ok and "in openvino" in str(sim.verify(runtime="openvino"))


@pytest.mark.slow_variants("w4", "w8")
@pytest.mark.parametrize("preset", ["w4g32", "w4", "w8"])
def test_weights_beside_float_activations_in_openvino(preset: str, tmp_path: Path) -> None:
    """Rows of 33 codes do not end with a byte, and data of three axes takes another kernel than that of two."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 33), nn.Tanh(), nn.Linear(33, 48), nn.Tanh(), nn.Linear(48, 33)).eval()
    for i, shape in enumerate(((2, 4, 48), (4, 48))):
        x = torch.randn(*shape)
        sim = QuantizationSimModel(model, x, preset=preset)
        sim.compute_encodings([x])
        sim.export(tmp_path / str(i), "net", x, target="openvino_cpu")
        report = verify_folder(tmp_path / str(i), runtime="openvino")
        assert report.ok and all(row.as_integer > 100 for row in report.outputs), report.to_text()
        stored = {t.name: t.data_type for t in onnx.load(tmp_path / str(i) / "net.onnx").graph.initializer}
        kinds = {kind for name, kind in stored.items() if name.endswith("_q")}
        eight, four = onnx.TensorProto.INT8, onnx.TensorProto.INT4
        assert kinds == ({eight} if preset == "w8" else {eight, four}), "rows of even length take 4 bits"


@pytest.mark.slow_variants("w4")
@pytest.mark.parametrize("preset", ["w4", "w8"])
def test_the_export_says_what_a_session_of_ones_own_needs(preset: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 127), nn.Tanh(), nn.Linear(127, 96)).eval()
    x = torch.randn(2, 5, 64)
    sim = QuantizationSimModel(model, x, preset=preset)
    sim.compute_encodings([x])
    exported = sim.export(tmp_path, "net", x, target="openvino_cpu")
    (note,) = (note for note in exported.notes if "products of float activations" in note)
    hint, value = re.search(r'compile the file with {"(\w+)": "(\w+)"}', note).groups()  # type: ignore[union-attr]
    core = openvino.Core()

    def levels(options: dict[str, object], from_ir: bool = False) -> float:
        read = core.read_model(tmp_path / "net.onnx")
        if from_ir:
            read.set_rt_info(0, ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
            openvino.save_model(read, tmp_path / "net.xml", compress_to_fp16=False)
            read = core.read_model(tmp_path / "net.xml")
        with torch.no_grad():
            return sqnr(sim.model(x).numpy(), core.compile_model(read, "CPU", options)([x.numpy()])[0])

    in_float = {"INFERENCE_PRECISION_HINT": "f32"}
    assert levels({hint: value}) > 100 and levels(in_float, from_ir=True) > 100
    if lacks_vnni():  # the plugin has no kernel there for activations that it quantizes by itself
        assert levels(in_float) > 100 and levels({}) > 100
    else:
        assert levels(in_float) < 60, "the hint is not needed any more"
    assert not any("compile the file" in note for note in sim.export(tmp_path / "other", "net", x).notes)


def test_a_changed_file_fails_in_openvino(folder: Path, tmp_path: Path) -> None:
    """Values of other weights are seen, whatever the kernel."""
    pytest.importorskip("openvino")
    sim = OnnxSim(folder / "net.onnx")
    name = next(name for name, array in sim.constants.items() if array.ndim == 4)
    exported = sim.export(tmp_path, "net")
    import shutil

    from bitwright.compare.verify import verify_layers
    from bitwright.export.samples import read_samples

    param = sim.graph.values[sim.quantizers[name].value].param
    assert param is not None
    sim.set_parameter(param, -sim.constants[name])
    other = sim.export(tmp_path / "other", "net")
    sites, inputs, outputs = read_samples(tmp_path / "net_samples.npz")
    shutil.copy(other.qdq, tmp_path / "changed.onnx")
    assert verify_layers(exported.qdq, sites, inputs, outputs=outputs, runtime="openvino").ok
    assert not verify_layers(tmp_path / "changed.onnx", sites, inputs, outputs=outputs, runtime="openvino").ok


def test_a_file_that_openvino_refuses_names_the_operator_and_no_file_of_ours(folder: Path) -> None:
    pytest.importorskip("openvino")
    x = np.ones((2, 3), np.float32)
    node = onnx.helper.make_node("NoSuchOperator", ["x"], ["y"], "the_node")
    shapes = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xy"]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", shapes[:1], shapes[1:]))
    with pytest.raises(ExportError, match="does not have this operator") as caught:
        run_in("openvino", ir.from_proto(model), {"x": x}, "integer")
    assert caught.value.site == "the_node (NoSuchOperator)"


class Residual(nn.Module):
    """A block of a vocoder: a convolution, upsampled, and the sum with two more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv1d(8, 16, 7, padding=3), nn.ConvTranspose1d(16, 16, 4, 2, 1)
        self.second, self.third = nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.last = nn.Conv1d(16, 1, 7, padding=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(nn.functional.leaky_relu(self.first(x), 0.1))
        hidden = nn.functional.leaky_relu(self.second(nn.functional.leaky_relu(x, 0.1)), 0.1)
        return torch.tanh(self.last(nn.functional.leaky_relu(x + self.third(hidden))))


def test_a_file_whose_layers_agree_and_whose_output_is_wrong_fails(tmp_path: Path) -> None:
    """OpenVINO 2026.4 makes something else of a residual sum while nothing observes the values around it."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    batches = [torch.randn(1, 8, 24) for _ in range(2)]
    # weights of 7 bits: those of 8 saturate in OpenVINO's kernels on CPUs without VNNI, which is another fault
    rules = {"preset": "w8a8", "rules": [{"match": "*", "weight": "int7"}]}
    quantize(Residual().eval(), batches, recipe=["fold"], path=tmp_path, progress=False, config_file=rules)
    report = verify_folder(tmp_path, runtime="openvino")
    (end,) = report.outputs
    if end.as_integer > 60:
        assert report.ok, "this version computes the same"
        return
    assert all(row.ok for row in report.rows) and not report.ok
    assert report.otherwise is not None and report.otherwise.other > end.as_integer + 20
    assert "computes the whole file otherwise than its operators" in str(report)


def test_missing_and_unfit_runtimes_are_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'bitwright\[openvino\]'"):
        verify_folder(folder, runtime="openvino")
    result = CliRunner().invoke(app, ["verify", str(folder), "--runtime", "opnvino"])
    assert result.exit_code == 2 and "did you mean 'openvino'" in result.output


def test_the_file_tells_where_it_comes_from(folder: Path, tmp_path: Path) -> None:
    told = read_origin(folder / "net.onnx")
    assert told["tool"] == f"bitwright {__version__}" and told["preset"] == "w8a8" and told["recipe"] == "fold"
    assert told["data"].startswith("3 batches, the first sha256:") and told["target"] == "ort_cpu"
    assert told["example"].startswith("sha256:") and told["encodings"].startswith("sha256:")
    assert told["output"] and float(told["sqnr_db"]) > 10 and "metric_float" not in told
    shown = CliRunner().invoke(app, ["show", str(folder)]).output
    assert all(text in shown for text in ("Origin", told["tool"], told["encodings"], "3 batches"))
    sim = OnnxSim(folder / "net.onnx")
    again = read_origin(sim.export(tmp_path, "net").qdq)
    assert again["example"] != told["example"], "it is told of the new file, with another example"
