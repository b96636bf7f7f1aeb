"""Export: the files, and every layer of every zoo model against ONNX Runtime."""

from __future__ import annotations

import copy
import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from bitwright.compare.reasons import sums_saturate
from bitwright.compare.report import VerifyReport
from bitwright.compare.runtime import run_in
from bitwright.compare.verify import _lost_to_saturation, verify_folder, verify_layers
from bitwright.core.numerics.spec import Preset, activation_spec, weight_spec
from bitwright.errors import CalibrationError, ConfigError, ExportError, ModelError
from bitwright.export.encodings.read import read_encodings
from bitwright.export.qdq.forms import read_metadata
from bitwright.export.samples import read_samples
from bitwright.runtimes.adapters import open_file
from bitwright.torch import QuantizationSimModel, fold_all_batch_norms, quantize
from tests.support.deployed import in_onnxruntime
from tests.support.sessions import integer_session
from tests.support.simulations import calibrated
from tests.support.zoo import ZOO, Case
from tests.torch.test_hard_models import example


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu, self.pool = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(72, 4)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        y = self.pool(self.relu(self.bn(self.conv(image))))
        return {"logits": self.fc(y.flatten(1)), "features": y}


class Twice(nn.Module):
    """A block that runs twice: first behind the embedding, whose grid its input then shares, and then behind itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.norm = nn.Linear(6, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for _ in range(2):
            h = 4 * self.norm(h + self.block(h))
        return h


@pytest.fixture
def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(3)]


@pytest.fixture
def sim(data: list[Tensor]) -> QuantizationSimModel:
    torch.manual_seed(0)
    model = Net().eval()
    fold_all_batch_norms(model, dummy_input=data[0])
    return calibrated(QuantizationSimModel(model, data[0]), data)


def run(path: Path, feeds: dict[str, np.ndarray], simulate: bool = False) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = (
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        if simulate
        else integer_session(path)
    )
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_the_files_and_what_they_hold(sim: QuantizationSimModel, data: list[Tensor], tmp_path: Path) -> None:
    exported = sim.export(tmp_path / "out", "net", data[0])
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "net.onnx", "net_float.onnx", "net.encodings", "net_sites.json", "net_manifest.json", "net_samples.npz",
    }  # fmt: skip
    qdq = onnx.load(exported.qdq)
    onnx.checker.check_model(qdq)
    assert [(o.domain, o.version) for o in qdq.opset_import] == [("", 21)] and qdq.ir_version == 10
    assert [i.name for i in qdq.graph.input] == ["image"]
    assert [o.name for o in qdq.graph.output] == ["output.logits", "output.features"]
    stored = {t.name: t.data_type for t in qdq.graph.initializer}
    assert stored["conv.weight_q"] == stored["fc.weight_q"] == onnx.TensorProto.INT8
    assert sum(kind == onnx.TensorProto.INT32 for kind in stored.values()) >= 2
    floats = [t for t in qdq.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert all(len(t.dims) <= 1 for t in floats)  # scales only: no weight is kept in float
    manifest = json.loads(exported.manifest.read_text())
    assert "net.onnx" in json.dumps(manifest) and "bitwright" in json.dumps(manifest)


def test_files_tell_nothing_of_the_machine_they_were_written_on(sim, data, tmp_path):
    exported = sim.export(tmp_path / "out", "net", data[0])
    here = (str(Path(__file__).parent), str(tmp_path), "stack_trace", "pkg.torch")
    for path in (tmp_path / "out").iterdir():
        assert not [word for word in here if word.encode() in path.read_bytes()], path.name
    again = sim.export(tmp_path / "again", "net", data[0])
    assert [p.read_bytes() for p in exported.files] == [p.read_bytes() for p in again.files]


def test_float_graph_and_encodings_speak_of_the_same_tensors(sim, data, tmp_path):
    exported = sim.export(tmp_path, "net", data[0])
    model = onnx.load(exported.float_model)
    onnx.checker.check_model(model)
    names = {v for n in model.graph.node for v in (*n.input, *n.output)} | {i.name for i in model.graph.input}
    records = read_encodings(exported.encodings).records
    assert {r.name for r in records} <= names
    assert {"conv.weight", "fc.weight", "image", "relu.output[0]"} <= {r.name for r in records}
    with torch.no_grad(), sim.in_float():
        expected = sim.model(data[0])["logits"].numpy()
    np.testing.assert_allclose(
        run(exported.float_model, {"image": data[0].numpy()})["output.logits"], expected, atol=1e-5
    )


class NormAct(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(super().forward(x))


class Inside(nn.Module):
    """Batch norms that no identity can replace: of a module that also computes a ReLU, and called by a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Conv2d(3, 8, 3, bias=False), NormAct(8), nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x, n = self.second(self.act(self.first(x))), self.norm
        return nn.functional.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, eps=n.eps)


def test_norms_that_folding_leaves_in_place_keep_no_layer_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 3, 9, 9), Inside().eval()
    for norm in (model.act, model.norm):
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias), nn.init.normal_(norm.running_mean)
    given = copy.deepcopy(model)
    assert len(fold_all_batch_norms(model, dummy_input=x)) == 2 and isinstance(model.act, NormAct)
    for net, norms in ((given, 2), (model, 0)):
        sim = QuantizationSimModel(net, x)
        sim.compute_encodings([x])
        exported = sim.export(tmp_path / str(norms), "net", x)
        for path in (exported.qdq, exported.float_model):
            assert [node.op_type for node in onnx.load(path).graph.node].count("BatchNormalization") == norms
        report = sim.verify(x)
        assert report.ok
        assert [row.kernel for row in report.rows].count("QLinearConv") == 2 - norms


@pytest.mark.parametrize("simulate", [True, False], ids=["float-kernels", "integer-kernels"])
def test_the_exported_network_computes_what_the_simulation_does(sim, data, tmp_path, simulate):
    exported = sim.export(tmp_path, "net", data[0])
    got = run(exported.qdq, {"image": data[1].numpy()}, simulate)
    with torch.no_grad():
        expected = sim.model(data[1])
    step = float(sim.quantizers["fc.output[0]"].encoding.scale)
    assert np.abs(got["output.logits"] - expected["logits"].numpy()).max() <= step * 1.01


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_exported_encodings_in_a_fresh_simulation_give_the_same_bits(sim, data, tmp_path, version):
    exported = sim.export(tmp_path, "net", data[0], encoding_version=version)
    fresh = QuantizationSimModel(copy.deepcopy(sim).remove(), data[0])
    fresh.load_encodings(exported.encodings)
    for name, value in sim.model(data[1]).items():
        assert torch.equal(fresh.model(data[1])[name], value)


def test_options(sim: QuantizationSimModel, data: list[Tensor], tmp_path: Path) -> None:
    exported = sim.export(tmp_path, "net", data[0], bias="float", dynamic_batch=True, samples=False)
    assert not list(tmp_path.glob("*.npz"))
    stored = {t.data_type for t in onnx.load(exported.qdq).graph.initializer}
    assert onnx.TensorProto.INT32 not in stored
    assert run(exported.qdq, {"image": data[0][:3].numpy()})["output.logits"].shape == (3, 4)
    with pytest.raises(ConfigError, match=r"'3\.0\.0' is not a version"):
        sim.export(tmp_path, "net", data[0], encoding_version="3.0.0")
    with pytest.raises(ConfigError, match=r"there is no input 'img'.*the inputs are image"):
        sim.export(tmp_path, "net", data[0], dynamic_shapes={"img": {0: torch.export.Dim.AUTO}})


def test_exporting_leaves_the_simulation_as_it_was(sim, data, tmp_path):
    before = sim.model(data[0])["logits"]
    sim.export(tmp_path, "net", data[0])
    assert torch.equal(sim.model(data[0])["logits"], before)
    assert sim.model(data[0])["logits"].requires_grad


def test_one_simulated_forward_gives_samples_and_outputs(sim, data, tmp_path):
    runs: list[bool] = []
    sim.model.fc.register_forward_hook(lambda *given: runs.append(type(given[-1]) is Tensor))
    sim.export(tmp_path, "net", data[0])
    # one in float, whose calls are compared with the exporter's; those of the exporter have stand-ins for values
    assert sum(runs) == 2


def test_a_block_that_runs_twice_is_compared_and_calibrated_in_both_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 6)
    model = Twice().eval()
    sim = calibrated(QuantizationSimModel(model, x), [x])
    report = sim.verify(x)
    assert report.ok and not report.unchecked, str(report)
    assert sum(row.ops == ("Gemm",) or "Gemm" in row.ops for row in report.rows) >= 3
    error = (sim.model(x) - model(x)).detach().double()
    assert 10 * torch.log10(model(x).detach().double().pow(2).sum() / error.pow(2).sum()) > 25
    sim.export(tmp_path, "twice", x)
    assert verify_folder(tmp_path).ok


def test_a_simulation_without_quantizers_is_verified_by_its_outputs(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 4)
    sim = QuantizationSimModel(nn.Sequential(nn.Flatten(), nn.ReLU()), x)
    for site in sim.quantizers.values():
        site.enabled = False
    sim.compute_encodings([x])
    assert sim.verify(x).ok
    sim.export(tmp_path, "plain", x)
    assert verify_folder(tmp_path).ok


class Positions(nn.Module):
    """A constant that every sample of the batch has a copy of, as position embeddings and class tokens."""

    def __init__(self, batch: int | None = None) -> None:
        super().__init__()
        self.token, self.fc, self.batch = nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 4), batch

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        if self.batch is not None and x.shape[0] == self.batch:
            joined = joined * 2
        return self.fc(joined)


def test_quantize_leaves_the_batch_free(tmp_path: Path) -> None:
    """Also from an example of one sample; what is computed for the other sizes is the same sample by sample."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 6)
    result = quantize(Positions(), [x[:1], x[1:2]], recipe=["fold"], path=tmp_path, progress=False)
    assert result.exported is not None
    session = ort.InferenceSession(str(result.exported.qdq))
    assert session.get_inputs()[0].shape == ["batch", 3, 6]
    five, one = (run(result.exported.qdq, {"x": part.numpy()})["output"] for part in (x, x[:1]))
    np.testing.assert_array_equal(five[:1], one)
    report = verify_folder(tmp_path)
    assert report.ok and any("cat" in row.ops or "token" in row.site or "cat" in row.site for row in report.rows), (
        report
    )


def test_a_batch_that_the_model_fixes_is_named(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6)
    result = quantize(Positions(2), [x], recipe=["fold"], path=tmp_path, progress=False)
    assert result.exported is not None
    assert ort.InferenceSession(str(result.exported.qdq)).get_inputs()[0].shape == [2, 3, 6]
    (note,) = (note for note in result.exported.notes if note.startswith("batch:"))
    assert note == "batch: the size is fixed to 2, that of the example: the model computes with the size of x"
    assert verify_folder(tmp_path).ok


def test_verify_compares_every_layer(sim: QuantizationSimModel, data: list[Tensor], tmp_path: Path) -> None:
    report = sim.verify(data[0])
    assert report.ok and len(report.rows) >= 3
    assert all(row.as_float.equal >= 0.999 and row.as_integer.lsb <= 1 for row in report.rows)
    assert any(row.kernel == "QLinearConv" for row in report.rows)
    sim.export(tmp_path, "net", data[0])
    again = verify_folder(tmp_path)
    assert again.ok and len(again.rows) >= 3
    (tmp_path / "net.onnx").write_bytes((tmp_path / "net.onnx").read_bytes() + b" ")
    with pytest.raises(ExportError, match=r"net\.onnx"):
        verify_folder(tmp_path)
    with pytest.raises(ExportError, match="the folder holds no export"):
        verify_folder(tmp_path / "..")


def test_one_line(data: list[Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    result = quantize(
        model,
        iter(data),
        "w4a8",
        metric=lambda m: float(m(data[0])["logits"].sum()),
        path=tmp_path,
        filename_prefix="net",
    )
    assert set(result.metrics) == {"float", "quantized"} and list(result.folds) == [("conv", "bn")]
    assert isinstance(model.bn, nn.BatchNorm2d) and (tmp_path / "net.onnx").exists()
    assert result.sim.quantizers["conv.weight"].spec.format.bits == 4
    with pytest.raises(ModelError, match=r"net\.onnx: the model file does not exist"):
        quantize("net.onnx", data)
    with pytest.raises(CalibrationError, match="the data held no batch"):
        quantize(model, [])


def test_a_folder_that_cannot_be_written_keeps_what_it_had(sim, data, tmp_path):
    target = tmp_path / "file"
    target.write_text("mine")
    with pytest.raises(ExportError, match="file"):
        sim.export(target, "net", data[0])
    assert target.read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["file"]
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        probe = folder / "probe"
        probe.touch()  # a superuser may write anywhere
        probe.unlink()
    except PermissionError:
        with pytest.raises(ExportError, match="permission"):
            sim.export(folder, "net", data[0])
    finally:
        folder.chmod(stat.S_IRWXU)
    assert not list(folder.iterdir()) or folder.stat().st_uid == 0


def test_a_model_the_exporter_cannot_capture_keeps_the_cause() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum() > 0 else x

    x = torch.ones(1, 2)
    sim = calibrated(QuantizationSimModel(Branch(), x), [x])
    with pytest.raises(
        ExportError,
        match=r"Branch.*cannot be exported to ONNX: GuardOnDataDependentSymNode.*Remedy: choose by tensors, torch.where",
    ) as info:
        sim.verify(x)
    assert info.value.__cause__ is not None


class Experts(nn.Module):
    """Rows go to one of three layers, as in Switch Transformers: by a loop over those that have rows, or over all.

    Args:
        found: loop over those that have rows.
    """

    def __init__(self, found: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.found = nn.Linear(8, 3), found
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(self.router(x).argmax(-1), 3)
        made = torch.zeros_like(x)
        hit = torch.greater(chosen.sum(0), 0).nonzero() if self.found else torch.arange(3)[:, None]
        for which in hit if self.found else range(3):
            number = which[0] if self.found else which
            (rows,) = torch.where(chosen[:, number])
            made = made.index_add(0, rows, self.experts[f"expert_{number}"](x[rows]))
        return made


def test_a_loop_over_what_was_found_is_named_and_one_over_all_is_the_remedy() -> None:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    found, every = ((model := Experts(f).eval()) and QuantizationSimModel(model, x) for f in (True, False))
    for sim in (found, every):
        sim.compute_encodings([x])
    assert torch.equal(found.model(x), every.model(x))
    with pytest.raises(ExportError, match=r"test_export.py:\d+, in forward: .*Remedy: let this loop go over all parts"):
        found.verify(x)
    assert every.verify(x).ok


class Filtered(nn.Module):
    """A filter bank and statistics in float64 before layers in float32, as audio front ends have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(4, 1, 5).double())
        self.register_buffer("mean", torch.randn(4, 1).double())
        self.layer = nn.Conv1d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        bands = torch.nn.functional.conv1d(x.double(), self.bank)
        return self.layer(((bands - self.mean) / self.mean.abs()).tanh().float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_models_in_other_types_are_exported_as_they_are(
    sim: QuantizationSimModel, data: list[Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    sim.model.to(dtype)
    assert (report := sim.verify(data[0].to(dtype))).ok, report.to_text()
    sim.export(tmp_path, "net", data[0].to(dtype))
    assert (report := verify_folder(tmp_path)).ok, report.to_text()


def test_buffers_in_float64_that_compute_are_exported_as_they_are() -> None:
    torch.manual_seed(0)
    model, x = Filtered().eval(), torch.randn(2, 1, 30)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    assert (report := sim.verify(x)).ok, report.to_text()


def test_a_recurrent_layer_in_bfloat16_gets_the_remedy() -> None:
    model, x = nn.Sequential(nn.LSTM(4, 4)).bfloat16().eval(), torch.randn(3, 2, 4).bfloat16()
    sim = calibrated(QuantizationSimModel(model, x), [x])
    with pytest.raises(ExportError, match=r"the LSTM is in bfloat16.*sim\.model\.float\(\)"):
        sim.verify(x)


# what cannot be exported, and the reason a user is given; everything else agrees layer by layer
NOT_CAPTURED = {"branch": "GuardOnDataDependentSymNode", "gru-packed": "cannot be exported"}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in ZOO.items()])
def test_every_layer_of_the_zoo_agrees_with_the_runtime(case: Case) -> None:
    model = case.build()
    fold_all_batch_norms(model, dummy_input=example(case))
    sim = QuantizationSimModel(model, example(case))
    sim.compute_encodings([example(case, seed) for seed in range(3)], allow_unreached=True)
    if case.name in NOT_CAPTURED:
        with pytest.raises(ExportError, match=NOT_CAPTURED[case.name]):
            sim.verify(example(case, 1))
        return
    report = sim.verify(example(case, 1))
    assert not report.unchecked
    assert not report.failures
    for row in report.rows:
        if not row.ok and row.kernel != "constant":
            # the one integer kernel that computes something else than the operator
            assert row.reason, row
            assert row.kernel == "QLinearSoftmax", row
            assert row.as_float.ok and row.as_integer.lsb <= 3, row


class HalfParts(nn.Module):
    """A branch in float16 between float32, with an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1).half()
        self.d = nn.Conv2d(16, 16, 1).half()
        self.c = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x)).half()
        x = torch.relu(self.b(x) + self.d(x)).float()
        return self.c(x.mean((2, 3)))


@pytest.mark.parametrize("bits", [8, 16])
def test_parts_in_half_precision_verify_within_what_it_rounds(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    sim = calibrated(QuantizationSimModel(HalfParts().eval(), x, default_output_bw=bits), [x])
    report = sim.verify(x)
    assert report.ok
    within = [row for row in report.rows if row.verdict == "within"]
    assert within and all("half precision" in str(row.reason) for row in within)

    sim.export(tmp_path, "net", x)
    sites, inputs, outputs = read_samples(tmp_path / "net_samples.npz")
    for name in ("b.weight", "relu_1.output[0]"):  # a real fault of 1 % is still one
        model = ir.load(tmp_path / "net.onnx")
        noted = [facts for node in model.graph if (facts := read_metadata(node)) is not None]
        scale = model.graph.initializers[next(facts["scale"] for facts in noted if facts["places"][0][0] == name)]
        assert scale.const_value is not None
        scale.const_value = ir.tensor(scale.const_value.numpy() * np.float32(1.01), name=scale.name)
        wrong = verify_layers(model, sites, inputs, outputs=outputs)
        assert [row.site for row in wrong.rows if row.verdict == "fails"], name


def test_large_samples_of_a_model_with_a_free_batch_axis_are_cut(tmp_path, monkeypatch):
    from bitwright.compare.verify import verify_folder
    from bitwright.export.samples import read_samples

    torch.manual_seed(0)
    x = torch.randn(6, 5)
    sim = calibrated(QuantizationSimModel(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU()).eval(), x), [x])
    monkeypatch.setattr("bitwright.export.artefacts.SAMPLE_LIMIT", 150)
    for free, kept in ((True, 2), (False, 6)):
        exported = sim.export(tmp_path / str(free), "net", x, dynamic_batch=free)
        assert len(read_samples(tmp_path / str(free) / "net_samples.npz")[1]["input"]) == kept
        assert verify_folder(tmp_path / str(free)).ok
        assert any(note.startswith("samples: ") for note in exported.notes)


class Similarities(nn.Module):
    """As CLIP: what is returned is also transposed and multiplied; its input is called as the exporter calls a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, i: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        i, t = self.left(i), self.right(t)
        i, t = i / i.norm(dim=-1, keepdim=True), t / t.norm(dim=-1, keepdim=True)
        return t, i, t @ i.t() * 10


def test_an_output_that_is_transposed_and_quantized_verifies_and_inputs_keep_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Similarities().eval(), [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
    sim = calibrated(QuantizationSimModel(model, data[0]), data)
    sim.export(tmp_path, "model", data[0])
    assert [i.name for i in onnx.load(tmp_path / "model.onnx").graph.input] == ["i", "t"]
    report = verify_folder(tmp_path)
    assert report.ok, str(report)


@pytest.mark.parametrize("returned", ["plain", "dict"])
def test_an_input_named_output_keeps_its_name(returned: str, tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
            self.register_buffer("output_1", torch.ones(8))

        def forward(self, output: Tensor) -> Tensor | dict[str, Tensor]:
            y = self.head(self.output(output).relu() * self.output_1)
            return y if returned == "plain" else {"output": y}

    torch.manual_seed(0)
    data = [torch.randn(4, 8) for _ in range(3)]
    sim = quantize(Named().eval(), data, recipe=["fold"], progress=False).sim
    exported = sim.export(tmp_path, "m")
    assert sim.verify(data[0]).ok and verify_folder(tmp_path).ok
    session = integer_session(exported.qdq)
    assert [value.name for value in session.get_inputs()] == ["output"]
    (found,) = session.run(None, {"output": data[0].numpy()})
    wanted = sim.model(data[0])
    wanted = wanted if isinstance(wanted, Tensor) else wanted["output"]
    np.testing.assert_allclose(found, wanted.detach().numpy(), atol=1e-5)
    again = QuantizationSimModel(Named().eval(), data[0])
    again.load_encodings(exported.encodings)


def test_samples_wait_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never are all of them in memory: arrays are read when they are written into the archive, one at a time."""
    from bitwright.export import artefacts
    from bitwright.export.files.atomic import Spooled
    from bitwright.export.samples import read_samples

    torch.manual_seed(0)
    x = torch.randn(6, 5)
    sim = calibrated(QuantizationSimModel(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU()).eval(), x), [x])
    seen = []
    original = artefacts.write_samples
    monkeypatch.setattr(artefacts, "write_samples", lambda *args: seen.append(args[1]) or original(*args))
    sim.export(tmp_path, "net", x)
    (sites,) = seen
    assert sites and all(isinstance(kept, Spooled) for kept in sites.values())
    wanted, written = sim.capture(list(sites), x), read_samples(tmp_path / "net_samples.npz")[0]
    assert {name: [t.tolist() for t in kept] for name, kept in wanted.items()} == {
        name: [a.tolist() for a in kept] for name, kept in written.items()
    }


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_a_softmax_of_nearly_equal_entries_does_not_overflow_in_the_file(spread, tmp_path):
    """QLinearSoftmax multiplies sums of 32 bits by the inverse of the output's scale, which an observed range makes large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 300), nn.Softmax(-1), nn.Linear(300, 4)).eval()
    with torch.no_grad():
        model[0].weight.mul_(spread), model[0].bias.mul_(spread)
    x = torch.randn(16, 16)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    sim.export(tmp_path, "m", x)
    session = integer_session(tmp_path / "m.onnx")
    (got,), wanted = session.run(None, {"input": x.numpy()}), sim.model(x).detach().numpy()
    (site,) = [q for q in sim.quantizers.unique() if q.range_note]
    assert np.square(got - wanted).sum() < 1e-3 * np.square(wanted).sum()
    assert 1 / 300 < float(site.encoding.max) < 0.1


class OnePosition(nn.Module):
    """Separable attention, as MobileViTv2 has it, over the positions of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.key, self.out = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x).flatten(2).softmax(-1)
        context = (self.key(x).flatten(2) * weights).sum(-1, keepdim=True)[..., None]
        return self.out(x.relu() * context)


@pytest.mark.parametrize("size", [1, 2])
def test_a_softmax_over_one_entry_is_one_in_the_file(size, tmp_path):
    """QLinearSoftmax of ONNX Runtime answers 0 there, and with it all of this model."""
    torch.manual_seed(0)
    model, x = OnePosition().eval(), torch.randn(4, 8, size, size)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    sim.export(tmp_path, "m", x)
    (got,), wanted = integer_session(tmp_path / "m.onnx").run(None, {"x": x.numpy()}), sim.model(x).detach().numpy()
    assert np.square(got - wanted).sum() < 1e-3 * np.square(wanted).sum()
    assert verify_folder(tmp_path).ok
    kinds = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert ("Softmax" in kinds) == (size > 1)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.conv(x).relu() + shift
        return self.fc(features.flatten(1)), features


def simulated() -> tuple[QuantizationSimModel, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    batch = (torch.randn(2, 3, 4, 4), torch.randn(2, 4, 2, 2))
    sim = calibrated(QuantizationSimModel(TwoInputs().eval(), batch), [batch])
    return sim, batch


def test_files_bear_the_names_and_agree(tmp_path: Path) -> None:
    sim, batch = simulated()
    inner = "conv2d"  # the exporter's name of a tensor inside
    made = sim.export(tmp_path, "net", batch, input_names=["image"], output_names=["logits", inner])
    for path in (made.qdq, made.float_model):
        graph = onnx.load(path).graph
        assert [value.name for value in graph.input] == ["image", "shift"]
        assert [value.name for value in graph.output] == ["logits", inner]
    assert verify_folder(tmp_path).ok
    other, _ = simulated()
    other.load_encodings(made.encodings)
    scales = [float(s.quantizers["conv.input[0]"].encoding.scale) for s in (sim, other)]
    assert scales[0] == scales[1]


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["a", "b", "c"], [], "input_names: 3 names for 2 tensors.*name x, shift"),
        (["a", "a"], [], "'a' names several tensors"),
        (["fc.weight"], [], "'fc.weight' is the name of a parameter"),
        ([], ["shift"], "'shift' names several tensors"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, inputs: list[str], outputs: list[str], message: str) -> None:
    sim, batch = simulated()
    with pytest.raises(ExportError, match=message):
        sim.export(tmp_path, "net", batch, input_names=inputs, output_names=outputs)
    assert not list(tmp_path.iterdir())


def test_what_a_kernel_of_the_runtime_gets_wrong_is_written_in_float(tmp_path, caplog):
    """As if no one knew of QLinearSoftmax over one entry yet."""
    torch.manual_seed(0)
    model, x = OnePosition().eval(), torch.randn(4, 8, 1, 1)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    with patch("bitwright.export.qdq.write.fill_softmax", lambda builder, nodes: None):
        exported = sim.export(tmp_path, "m", x)
    (got,), wanted = integer_session(tmp_path / "m.onnx").run(None, {"x": x.numpy()}), sim.model(x).detach().numpy()
    assert np.square(got - wanted).sum() < 1e-2 * np.square(wanted).sum()
    assert verify_folder(tmp_path).ok
    (note,) = [note for note in exported.notes if "in float in this file" in note]
    assert "softmax" in note and "because QLinearSoftmax of ONNX Runtime gives 0.0% of its codes as simulated" in note
    assert "integer kernels of ONNX Runtime bring the output" in caplog.text
    assert sim.quantizers[note.partition(":")[0]].enabled, "the simulation is as it was"


def test_a_file_that_float_places_do_not_repair_is_refused(tmp_path):
    """An output that integer kernels bring away though each place by itself is right."""
    torch.manual_seed(0)
    model, x = OnePosition().eval(), torch.randn(4, 8, 1, 1)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    with (
        patch("bitwright.export.qdq.write.fill_softmax", lambda builder, nodes: None),
        patch("bitwright.compare.verify.verify_layers", lambda *args, **options: VerifyReport(())),
    ):
        with pytest.raises(ExportError, match=r"bring the output .* leave the place in float .*samples=False"):
            sim.export(tmp_path, "m", x)
        assert not list(tmp_path.iterdir())
        sim.export(tmp_path, "m", x, samples=False)
    assert (tmp_path / "m.onnx").is_file()


@pytest.mark.parametrize(("target", "runner"), [("openvino_cpu", "run_in"), ("litert", "open_file")])
@pytest.mark.parametrize("saturates", [False, True])
def test_the_check_runs_the_runtime_of_the_target(tmp_path, caplog, target, runner, saturates):
    """Kernels that answer 0: repaired by a place in float, but for OpenVINO on a CPU whose sums saturate, where it is said."""
    pytest.importorskip("openvino" if runner == "run_in" else "ai_edge_litert")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    runs = []

    def wrong_at_first(runtime: str, model: Any, feeds: Any, mode: str, **options: Any) -> dict[str, np.ndarray]:
        found = run_in(runtime, model, feeds, mode, **options)
        runs.append(mode)
        return {name: 0 * array for name, array in found.items()} if len(runs) == 1 else found

    def wrong_file_at_first(runtime: str, path: Path) -> Any:
        session = open_file(runtime, path)
        runs.append("integer")
        if len(runs) > 1:
            return session
        return SimpleNamespace(run=lambda feeds: {name: 0 * array for name, array in session.run(feeds).items()})

    with (
        patch(f"bitwright.compare.verify.{runner}", wrong_at_first if runner == "run_in" else wrong_file_at_first),
        patch("bitwright.compare.verify.sums_saturate", lambda: saturates),
        patch("bitwright.compare.verify._wrong_places", lambda *args: {"1.output[0]": "its kernel is wrong"}),
    ):
        exported = sim.export(tmp_path, "m", x, target=target)
    repaired = [
        note for note in exported.notes if note == "1.output[0]: in float in this file, because its kernel is wrong"
    ]
    said = "which has no VNNI" in caplog.text
    assert (bool(repaired), said) == ((False, True) if saturates and target == "openvino_cpu" else (True, False))
    assert exported.qdq.is_file() and "integer kernels of" in caplog.text


@pytest.mark.parametrize("fmt", ["float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), (4, 16)),
        ((nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3)), (2, 3, 9, 9)),
    ],
    ids=["linear", "convolutions"],
)
def test_weights_of_float8_run_beside_integer_activations(fmt, layers, shape):
    """ONNX Runtime takes their quantizers for those of an integer kernel, which refuses float8."""
    model, x = nn.Sequential(*layers).eval(), torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    sim = calibrated(QuantizationSimModel(model, x, preset=Preset(weight_spec(fmt), activation_spec("uint8"))), [x])
    report = sim.verify(x)
    assert report.ok and all(row.as_integer.equal == 1 for row in report.rows), str(report)


NAMES = ("conv.weight", "up.weight", "out.weight")


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.out = nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 4, 2, 2), nn.Linear(144, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.up(torch.relu(self.conv(x)))).flatten(1))


@pytest.mark.parametrize("weight", [None, "nf4", "float4_e2m1"])
def test_weights_that_are_no_integers_stay_so_between_quantized_activations(weight: str | None, tmp_path: Path) -> None:
    """A default session of ONNX Runtime quantizes constant weights between quantizers, and float biases there, by itself."""
    torch.manual_seed(0)
    model, batches = ThreeLayers().eval(), [torch.randn(2, 4, 5, 5) for _ in range(2)]
    rules = {"rules": [{"weight": None if weight is None else {"format": weight}}]}
    sim = calibrated(QuantizationSimModel(model, batches[0], config_file=rules), batches)
    path = sim.export(tmp_path, "net", batches[0]).qdq
    assert_close_db(sim.model(batches[1]), in_onnxruntime(path)(batches[1]), 100)
    assert sim.verify(batches[1]).ok


def test_real_zero_points_are_exported_and_kept_in_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = ThreeLayers().eval(), torch.randn(2, 4, 5, 5)
    weight = {"format": "uint4", "symmetry": "float_zero_point", "method": "mse"}
    sim = QuantizationSimModel(model, x, config_file={"rules": [{"weight": weight}, {"match": "conv", "output": None}]})
    sim.compute_encodings([x])
    exported = sim.export(tmp_path, "net", x)
    assert_close_db(sim.model(x), in_onnxruntime(exported.qdq)(x), 100)
    assert sim.verify(x).ok
    stored = {tensor.data_type for tensor in onnx.load(exported.qdq).graph.initializer if np.prod(tensor.dims) > 100}
    assert stored == {onnx.TensorProto.UINT4}
    assert any("conv.weight: version 1.0.0 has whole zero points" in note for note in exported.notes)
    sim.save_checkpoint(tmp_path / "saved")
    other = QuantizationSimModel(model, x, config_file={"rules": [{"weight": weight}]})
    other.load_checkpoint(tmp_path / "saved")
    assert other.quantizers["conv.weight"].encoding == sim.quantizers["conv.weight"].encoding
    assert torch.equal(other.model(x), sim.model(x))


def test_real_zero_points_of_activations_are_refused_where_they_are_written(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 5, 5)
    rules = {"rules": [{"match": "out", "output": {"format": "uint8", "symmetry": "float_zero_point"}}]}
    sim = calibrated(QuantizationSimModel(ThreeLayers().eval(), x, config_file=rules), [x])
    with pytest.raises(ExportError, match="zero points of ONNX are whole numbers.*float_zero_point is for weights"):
        sim.export(tmp_path, "net", x)


@pytest.mark.parametrize(
    "weight",
    [
        {"format": "nf4", "granularity": {"per_block": 48}},
        {"format": "binary"},
        {"format": "nf4", "granularity": "per_tensor"},
        {"format": "uint3", "symmetry": "float_zero_point", "granularity": {"per_block": 48}},
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["w8a8", "nf4"])
def test_grids_that_dequantize_linear_cannot_say_are_stored_as_codes(
    preset: str, weight: dict[str, Any], tmp_path: Path
) -> None:
    """Indices of 4 bits, looked up and scaled when a session opens; blocks of 48 do not divide the 144 and 36 inputs alike."""
    torch.manual_seed(0)
    model, batches = ThreeLayers().eval(), [torch.randn(2, 4, 5, 5) for _ in range(2)]
    sim = QuantizationSimModel(
        model, batches[0], config_file={"preset": preset, "rules": [{"match": "*", "weight": weight}]}
    )
    sim.compute_encodings(batches)
    exported = sim.export(tmp_path, "net", batches[0])
    stored = {tensor.data_type for tensor in onnx.load(exported.qdq).graph.initializer if np.prod(tensor.dims) > 100}
    assert stored == {onnx.TensorProto.UINT4}
    assert_close_db(sim.model(batches[1]), in_onnxruntime(exported.qdq)(batches[1]), 100)
    assert sim.verify(batches[1]).ok
    sites, inputs, _ = read_samples(tmp_path / "net_samples.npz")
    weights = sim.capture(list(NAMES), batches[0])
    for factor in (1, 2):  # what the file stores is compared with what the simulation has
        given = {name: [factor * np.asarray(v) for v in kept] for name, kept in weights.items()}
        report = verify_layers(exported.qdq, {**sites, **given}, inputs)
        assert [row.ok for row in report.rows if row.kernel == "constant"] == [factor == 1] * len(NAMES)


@pytest.mark.parametrize("unsigned, kind", [(True, np.uint8), (False, np.int8), (None, None)])
def test_unsigned_weights_compute_the_simulation_on_every_cpu(
    unsigned: bool | None, kind: type | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of products of uint8 and int8 saturate in a default session where there is no VNNI."""
    monkeypatch.setattr("bitwright.compare.verify._lost_to_saturation", _lost_to_saturation)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 4)
    ).eval()
    with torch.no_grad():
        for weight in (model[0].weight, model[3].weight):
            weight.abs_()
    x = 0.5 + torch.rand(2, 4, 5, 5)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    exported = sim.export(tmp_path, "net", x, unsigned_weights=unsigned)
    weights = [
        array for array in map(onnx.numpy_helper.to_array, onnx.load(exported.qdq).graph.initializer) if array.ndim > 1
    ]
    assert kind is None or {array.dtype for array in weights} == {np.dtype(kind)}
    told = any(note.startswith("weights are stored unsigned: in a default session") for note in exported.notes)
    assert told == (unsigned is None and sums_saturate())
    if unsigned is not False:
        assert_close_db(sim.model(x), in_onnxruntime(exported.qdq)(x), 60)
    assert verify_folder(tmp_path).ok


def assert_close_db(expected: Tensor, found: Tensor, least: float) -> None:
    noise = (expected - found).detach().double().square().mean()
    assert 10 * torch.log10(expected.detach().double().square().mean() / noise.clamp_min(1e-30)) > least
