"""Where two executions of a model part, and why: causes planted in three models are named."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from typer.testing import CliRunner

import bitwright
from bitwright import PRESETS, drift
from bitwright.cli import app
from bitwright.compare.agreement import Agreement
from bitwright.compare.causes import close, removes
from bitwright.compare.lockstep import clear, parameters
from bitwright.compare.runtime import optimized_types, run_model
from bitwright.compare.verify import verify_folder
from bitwright.core.numerics.formats import parse_format
from bitwright.errors import ConfigError, ExportError
from bitwright.executors.profile import FOLDER, find_profile, profile_names
from bitwright.export.targets import rules_for
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel, quantize
from tests.onnx.nets import Net, body
from tests.support.simulations import calibrated
from tests.support.without_vnni import lacks_vnni, run_without_vnni


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.point(nn.functional.hardtanh(self.depthwise(x), 0.0, 0.4))
        return self.head(x.mean((2, 3)))


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Hardtanh(0.0, 0.5), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 32), nn.Hardtanh(-0.3, 0.3), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
    )


# model -> (site of the clip, its operator's output, a layer with weight and bias that is not the first one)
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "chain": (chain, "2"),
    "residual": (Residual, "point"),
    "perceptron": (perceptron, "3"),
}
BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]


@pytest.fixture(scope="module", params=MODELS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every grid has room beyond the values, as a calibration on other data leaves it.

    Weights have 7 bits: with 8, sums saturate on CPUs without VNNI, which is another cause.
    """
    return export(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of these folders."""
    return export("chain", tmp_path_factory.mktemp("chain"))


def export(name: str, path: Path) -> Path:
    torch.manual_seed(0)
    sim = QuantizationSimModel(MODELS[name][0]().eval(), BATCHES[0], default_param_bw=7)
    sim.compute_encodings([2 * batch for batch in BATCHES])
    _widen(sim)
    sim.export(path, "net", BATCHES[0])
    return path


def _widen(sim: QuantizationSimModel) -> None:
    from bitwright.core.numerics.affine import with_scale

    for site in sim.quantizers.values():
        if site.role == "output" and site.encoding is not None:
            site.quantizer.take(with_scale(site.encoding, site.encoding.scale * np.float32(3)))


def layer_of(folder: Path) -> str:
    return MODELS[next(name for name in MODELS if name in folder.name)][1]


def changed(folder: Path, to: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    model = onnx.load(folder / "net.onnx")
    change(model.graph)
    onnx.save(model, to / "changed.onnx")
    return to / "changed.onnx"


def data_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "net_samples.npz") as samples:
        return {"input" if "input/input" in samples else "x": samples[next(k for k in samples if k[:6] == "input/")]}


def shift(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[onnx.GraphProto], None]:
    def apply(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == name)
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(change(array).astype(array.dtype), name))

    return apply


def drop_clip(graph: onnx.GraphProto) -> None:
    node = next(n for n in graph.node if n.op_type == "Clip")
    maker = next(n for n in graph.node if node.input[0] in n.output)
    maker.output[list(maker.output).index(node.input[0])] = node.output[0]
    graph.node.remove(node)


@pytest.mark.parametrize(
    "side, how", [("float", "onnxruntime"), ("file", "file"), ("float", "litert"), ("file", "litert")]
)
@pytest.mark.parametrize("cause", ["weight", "bias", "clip"])
def test_what_was_planted_in_the_file_is_named(exported: Path, tmp_path: Path, cause: str, side: str, how: str) -> None:
    layer = layer_of(exported)
    changes = {
        "weight": shift(f"{layer}.weight_q", lambda w: np.concatenate([-w[: len(w) // 2], w[len(w) // 2 :]])),
        "bias": shift(f"{layer}.bias_q", lambda b: np.where(np.arange(b.size) % 2, b + 60_000, b)),
        "clip": drop_clip,
    }
    file = changed(exported, tmp_path, changes[cause])
    report = drift(f"{exported}@{side}", f"{file}@{how}", data_of(exported))
    assert report.first is not None and report.first.cause == cause, report.to_text()
    assert report.first.retries[-1].removed and report.first.retries[-1].before.lsb > 1
    assert cause == "clip" or f"the {cause} {layer}.{cause} is" in report.first.text
    assert not report.ok


@pytest.fixture(scope="module")
def for_profiles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Folders of the perceptron by target and bits of its weights: sums of 8 bits saturate, those of 7 do not."""

    @cache
    def made(target: str, bits: int) -> Path:
        torch.manual_seed(0)
        path = tmp_path_factory.mktemp("perceptron")
        rules = rules_for(target, None)
        sim = QuantizationSimModel(perceptron().eval(), BATCHES[0], config_file=rules, default_param_bw=bits)
        sim.compute_encodings([2 * batch for batch in BATCHES])
        forms: dict[str, Any] = {"unsigned_weights": False} if target == "ort_cpu" else {}
        sim.export(path, "net", BATCHES[0], target=target, **forms)
        return path

    return made


@pytest.mark.parametrize("cause", ["rounding", "saturation", "bias"])
@pytest.mark.parametrize("name", profile_names())
def test_what_was_planted_in_a_profile_is_named(
    for_profiles: Callable[[str, int], Path], tmp_path: Path, name: str, cause: str
) -> None:
    """Kernels that cut off where they would round, sums of pairs or of 16 bits, and another bias in the file."""
    profile, text = find_profile(name), (FOLDER / f"{name}.toml").read_text()
    if profile.reads == "tflite":
        pytest.importorskip("ai_edge_litert")
    folder = for_profiles(profile.target, 8 if cause == "saturation" else 7)
    planted = tmp_path / "planted.toml"
    if cause == "rounding":
        planted.write_text(re.sub(r'(Gemm|FULLY_CONNECTED) = "\w+"', r'\1 = "truncated"', text))
        wanted, named = "rounding", "the kernels of planted round otherwise: (Gemm|FULLY_CONNECTED) truncated"
    elif cause == "saturation" and profile.target == "ort_cpu" and not profile.signed:
        planted.write_text(text if profile.pairs else f"pairs = true\n{text}")
        wanted, named = "saturation", "planted adds products of uint8 and int8 in pairs"
    elif cause == "saturation":
        planted.write_text(f"accumulator = 16\n{text}")
        wanted, named = "overflow", "sums of planted have 16 bits and wrap around"
    else:
        bias = next(t.name for t in onnx.load(folder / "net.onnx").graph.initializer if t.name.startswith("3.bias"))
        file = changed(folder, tmp_path, shift(bias, lambda b: b + (60_000 if b.dtype == np.int32 else 2)))
        report = drift(f"{folder}@file", f"{file}@{name}", data_of(folder))
        assert report.first is not None and (report.first.name, report.first.cause) == ("4.output[0]", "bias"), report
        return
    other = name if cause == "rounding" else "simulation"
    report = drift(f"{folder}@{other}", f"{folder}@{planted}")
    assert report.first is not None and report.first.cause == wanted, report.to_text()
    assert re.search(named, report.first.text) and report.first.retries[-1].removed
    assert report.ok == (cause == "rounding")


def test_a_profile_beside_a_runtime_and_in_memory(for_profiles: Callable[[str, int], Path], tmp_path: Path) -> None:
    """What a runtime here does otherwise than a target is named too; a word that is none is refused."""
    folder = for_profiles("ort_cpu", 8)
    report = drift(f"{folder}@onnxruntime", "ort_x64_avx2" if lacks_vnni() else "ort_x64")
    assert report.ok and {row.own.equal for row in report.rows} == {1.0}, report.to_text()
    report = drift(f"{folder}@ort_x64", "ort_x64_avx2")
    assert report.first is not None and report.first.cause == "saturation" and "ort_x64_avx2 adds" in report.first.text
    if lacks_vnni():
        report = drift(f"{folder}@onnxruntime", "ort_x64")
        assert report.first is not None and report.first.cause == "saturation"
        assert report.first.text.startswith(f"{folder}@onnxruntime adds products")
    torch.manual_seed(0)
    sim = calibrated(QuantizationSimModel(perceptron().eval(), BATCHES[0]), BATCHES)
    assert sim.drift("simulation", "ort_x64", BATCHES[0]).ok
    assert CliRunner().invoke(app, ["drift", f"{folder}@file", "ort_x64"]).exit_code == 0
    with pytest.raises(ConfigError, match=r"'ort_x46' is not an execution \(did you mean 'ort_x64'"):
        drift(f"{folder}@file", f"{folder}@ort_x46")
    with pytest.raises(ConfigError, match="the file cannot be read: No such file"):
        drift(f"{folder}@file", str(tmp_path / "none.toml"))


@pytest.mark.parametrize("how", ["file", "litert"])
def test_another_grid_is_named(exported: Path, tmp_path: Path, how: str) -> None:
    codes = next(
        node
        for node in onnx.load(exported / "net.onnx").graph.node
        if node.op_type == "QuantizeLinear" and node.input[0].endswith("output[0]")
    )
    source, scale = codes.input[:2]
    file = changed(exported, tmp_path, shift(scale, lambda s: s * 1.5))
    report = drift(f"{exported}@file", f"{file}@{how}", data_of(exported))
    assert report.first is not None and report.first.cause == "grid", report.to_text()
    assert report.first.name in source


def test_what_was_not_changed_agrees(exported: Path) -> None:
    for a, b in (
        ("simulation", "file"),
        ("simulation", "onnxruntime"),
        ("file", "onnxruntime"),
        ("simulation", "litert"),
        ("onnxruntime", "litert"),
        ("float", "file"),
    ):
        report = drift(f"{exported}@{a}", f"{exported}@{b}")
        assert report.ok, report.to_text()
        assert all(row.own.ok for row in report.rows)
    assert report.growth[-1] < 60  # rounding to the grids is carried on
    assert report.first is not None and report.first.cause == "rounding" and "grids" in report.first.text


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x))
        return self.head((x * torch.sigmoid(self.gate(x))).mean((2, 3)))


#: weights of 7 bits: sums of two products do not saturate on CPUs without VNNI
NARROW = replace(PRESETS["w8a8"], weight=replace(PRESETS["w8a8"].weight, format=parse_format("int7")))


class Recurrent(nn.Module):
    """An LSTM whose initial state is zeros of the batch of its input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2}], ids=["one", "both-ways", "two"])
def test_an_lstm_in_litert(tmp_path: Path, options: dict[str, Any]) -> None:
    """Lengths and states of zeros follow from the shape of the input: no values to feed, and none to compare."""
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    quantize(Recurrent(**options).eval(), [x], NARROW, recipe=["fold"], path=tmp_path, target="litert",
             filename_prefix="net", progress=False, measure_speed=False)  # fmt: skip
    for one, other in (("simulation", "litert"), ("file", "litert_reference"), ("file", "onnxruntime")):
        report = drift(f"{tmp_path}@{one}", f"{tmp_path}@{other}")
        assert report.ok and all(row.own.ok and row.carried.ok for row in report.rows), report.to_text()
        assert {"x", "head.output[0]"} < {row.name for row in report.rows}
    bias = next(t.name for t in onnx.load(tmp_path / "net.onnx").graph.initializer if t.name.startswith("head.bias"))
    file = changed(tmp_path, tmp_path, shift(bias, lambda b: b + 20_000))
    report = drift(f"{tmp_path}@file", f"{file}@litert", data_of(tmp_path))
    assert report.first is not None and (report.first.name, report.first.cause) == ("head.output[0]", "bias")


class Masked(nn.Module):
    """An attention whose mask holds minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 3 + mask
        return torch.softmax(scores, -1) @ self.v(x)


def test_infinities_are_equal_and_outputs_of_a_file_are_kept(tmp_path: Path) -> None:
    """LiteRT files hold the largest number where the model has an infinity; outputs that others read stay until the end."""
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    quantize(Masked().eval(), [x], NARROW, recipe=["fold"], path=tmp_path, target="litert", progress=False,
             measure_speed=False)  # fmt: skip
    for other in ("litert", "litert_reference", "onnxruntime"):
        report = drift(f"{tmp_path}@file", f"{tmp_path}@{other}")
        (row,) = (row for row in report.rows if row.ops[-1:] == ("Add",) and row.kernel == "float")
        assert row.own.equal == 1 and row.level > 40, report.to_text()


def test_a_litert_file_and_what_its_kernels_make(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sim = calibrated(QuantizationSimModel(Gated().eval(), BATCHES[0], config_file=rules_for("litert", None)), BATCHES)
    sim.export(tmp_path, "net", BATCHES[0], target="litert")
    report = drift(f"{tmp_path}@simulation", tmp_path / "net.tflite")
    assert report.ok and report.b == f"{tmp_path}@litert", report.to_text()
    kernels = {row.name: row.kernel for row in report.rows}
    assert kernels["conv.input[0]"] == "float" and kernels["relu.output[0]"] == "CONV_2D int8"
    assert kernels["sigmoid.output[0]"] == "LOGISTIC int8" and kernels["head.output[0]"] == "FULLY_CONNECTED int8"
    again = sim.drift("file", "litert", BATCHES[1])
    assert again.ok and {row.kernel for row in again.rows} >= {"LOGISTIC int8", "MUL int8"}
    with pytest.raises(ExportError, match="net.tflite is a LiteRT file, which only litert runs"):
        drift(f"{tmp_path}/net.tflite@file", f"{tmp_path}@simulation")
    (tmp_path / "net.tflite").write_bytes((tmp_path / "net.tflite").read_bytes() + b"x")
    with pytest.raises(ExportError, match="net.tflite has .* bytes instead of .*net.onnx@litert, which is converted"):
        drift(f"{tmp_path}@file", "litert")
    assert drift(f"{tmp_path}@file", f"{tmp_path}/net.onnx@litert").ok
    alone = tmp_path / "alone"
    alone.mkdir()
    (tmp_path / "net.tflite").rename(alone / "net.tflite")
    with pytest.raises(ExportError, match="no export lies beside it"):
        drift(f"{tmp_path}@file", alone / "net.tflite")


class Bent(nn.Module):
    """Functions that LiteRT computes with slopes and tables of few bits, in front of a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(5))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = nn.functional.leaky_relu(conv(x), 0.13)
        return self.head(nn.functional.hardswish(x).mean((2, 3)))


def test_a_kernel_that_rounds_in_a_known_way_is_no_fault_and_hides_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sim = calibrated(QuantizationSimModel(Bent().eval(), BATCHES[0], config_file=rules_for("litert", None)), BATCHES)
    sim.export(tmp_path, "net", BATCHES[0], target="litert")
    for side in ("float", "simulation", "file"):
        report = drift(f"{tmp_path}@{side}", tmp_path / "net.tflite")
        assert report.ok and report.first is not None and report.first.cause == "kernel", report.to_text()
        assert "LEAKY_RELU int8" in report.first.text and "of a step" in report.first.text
    assert sum(row.own.equal < 0.999 for row in report.rows) > 3
    assert any("more tensors round differently" in note for note in report.notes)
    file = changed(tmp_path, tmp_path, shift("head.bias_q", lambda b: b + 60_000))
    report = drift(f"{tmp_path}@file", f"{file}@litert", data_of(tmp_path))
    assert not report.ok and report.first is not None and report.first.cause == "bias", report.to_text()


class Twins(nn.Module):
    """One tower that two inputs go through: its sites run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.PReLU(8), nn.Conv2d(8, 8, 3), nn.Flatten())
        self.head = nn.Linear(8, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.head((self.tower(a) - self.tower(b)).abs())


@pytest.mark.slow
def test_every_run_of_a_module_is_compared_with_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = tuple(3**i * torch.randn(2, 3, 8, 8) for i in range(2))
    sim = QuantizationSimModel(Twins().eval(), pair, default_param_bw=7)  # no sum saturates, on any CPU
    sim.compute_encodings([pair])
    sim.export(tmp_path, "net", pair)
    for a, b in (("simulation", "onnxruntime"), ("simulation", "file"), ("file", "onnxruntime")):
        for report in (drift(f"{tmp_path}@{a}", f"{tmp_path}@{b}"), sim.drift(a, b, pair)):
            names = [row.name for row in report.rows]
            assert report.ok and report.first is None, report.to_text()
            assert "tower.0.output[0]" in names and "tower.0.output[0], run 2" in names, names
    with_bias = changed(tmp_path, tmp_path, shift("head.bias_q", lambda b: b + 60_000))
    with np.load(tmp_path / "net_samples.npz") as samples:
        data = {name[6:]: samples[name] for name in samples if name.startswith("input/")}
    report = drift(f"{tmp_path}@file", f"{with_bias}@onnxruntime", data)
    assert report.first is not None and report.first.cause == "bias", report.to_text()


class PreNorm(nn.Module):
    """Residual additions beside norms: quantizers round what the addition reads, and not what the norm reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.first(x))
        return x + self.second(self.norms[2](self.norms[1](x)))


@pytest.mark.parametrize("runtime", ["file", "onnxruntime"])
def test_a_tensor_that_is_rounded_for_one_of_its_readers_alone(runtime: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 20, 12)
    # no sum saturates, on any CPU
    sim = QuantizationSimModel(PreNorm().eval(), x, default_param_bw=7, config_file={"tail": "quantized"})
    sim.compute_encodings([x])
    sim.export(tmp_path, "net", x)
    report = drift(f"{tmp_path}@float", runtime)
    assert report.ok, report.to_text()
    assert {row.name for row in report.rows} >= {"add.input[0]", "second.input[0]"}


_BIAS_APART = """
import torch
from bitwright import PRESETS, drift
from bitwright.torch import QuantizationSimModel
from tests.compare.test_drift import PreNorm
torch.manual_seed(1)
x = torch.randn(4, 20, 12)
sim = QuantizationSimModel(PreNorm().eval(), x)
sim.compute_encodings([x])
sim.export(sys.argv[1], "net", x, unsigned_weights=False)
for side in ("float", "simulation", "file"):
    first = drift(f"{sys.argv[1]}@{side}", "onnxruntime").first
    print(first.name, first.cause)
    assert "open the session with session.x64quantprecision = 1" in first.remedy, first.remedy
"""


@pytest.mark.slow
def test_saturation_is_named_where_the_bias_is_added_apart(tmp_path: Path) -> None:
    """A product of three axes and an addition, of which the runtime makes one layer."""
    found = run_without_vnni(_BIAS_APART, tmp_path, str(tmp_path / "out")).splitlines()
    assert found == ["first.output[0] saturation"] * 3


_NETS = """
import torch
from torch import nn
from bitwright import PRESETS, drift
from bitwright.torch import QuantizationSimModel
torch.manual_seed(0)
nets = [
    nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU6(), nn.Conv2d(16, 8, 1)),
    nn.Sequential(nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 4)),
    nn.Sequential(nn.Conv2d(16, 24, 1), nn.Flatten(), nn.Linear(1536, 8)),
]
x = 0.5 + 0.5 * torch.rand(2, 16, 8, 8)
for net in nets:
    first = next(part for part in net if hasattr(part, "weight"))
    with torch.no_grad():
        first.weight.abs_().add_(0.1)
"""
_SATURATED = f"""{_NETS}
for net in nets:
    sim = QuantizationSimModel(net.eval(), x)
    sim.compute_encodings([x])
    sim.export(sys.argv[1], "net", x, unsigned_weights=False)
    for side in ("float", "simulation", "file"):
        found = drift(f"{{sys.argv[1]}}@{{side}}", "onnxruntime").first
        print(found and found.cause)
"""


@pytest.mark.slow
def test_saturation_of_kernels_without_dot_products_is_named(tmp_path: Path) -> None:
    assert run_without_vnni(_SATURATED, tmp_path, str(tmp_path / "out")).split() == ["saturation"] * 9


_NOT_IN_LITERT = f"""{_NETS}
from bitwright.export.targets import rules_for
for net in nets:
    sim = QuantizationSimModel(net.eval(), x, config_file=rules_for("litert", None))
    sim.compute_encodings([x])
    sim.export(sys.argv[1], "net", x, target="litert")
    one, other = (drift(f"{{sys.argv[1]}}@simulation", runtime) for runtime in ("litert", "onnxruntime"))
    print(one.ok, other.first.cause)
"""


@pytest.mark.slow
def test_sums_that_saturate_elsewhere_do_not_in_litert(tmp_path: Path) -> None:
    """On a CPU without dot products, where ONNX Runtime saturates in the same export."""
    pytest.importorskip("ai_edge_litert")
    lines = run_without_vnni(_NOT_IN_LITERT, tmp_path, str(tmp_path / "out")).splitlines()
    assert lines == ["True saturation"] * 3


@pytest.mark.parametrize("preset", ["w8", "w4", "w4g32"])
def test_litert_quantizes_no_activations_by_itself(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh()).eval()
    x = torch.randn(2, 5, 64)
    sim = calibrated(QuantizationSimModel(model, x, preset=preset, config_file=rules_for("litert", None, preset)), [x])
    sim.export(tmp_path, "net", x, target="litert")
    for side in ("float", "simulation", "file"):
        report = drift(f"{tmp_path}@{side}", "litert")
        assert report.ok and (report.first is None or report.first.cause == "rounding"), report.to_text()
    outputs = verify_folder(tmp_path, runtime="litert").outputs
    assert min(min(row.as_float, row.as_integer) for row in outputs) > 100


@pytest.mark.slow
def test_saturation_in_openvino_is_named(tmp_path: Path) -> None:
    """Its instructions can be limited by the environment, on any CPU of this kind."""
    pytest.importorskip("openvino")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("pairs of products are added on x86 alone")
    code = "import sys" + _SATURATED.replace("onnxruntime", "openvino")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["saturation"] * 9


def test_command_and_both_front_ends_tell_the_same(one: Path, tmp_path: Path) -> None:
    layer = layer_of(one)
    file = changed(one, tmp_path, shift(f"{layer}.bias_q", lambda b: b + 3000))
    np.savez(tmp_path / "data.npz", **data_of(one))
    out = tmp_path / "report.json"
    command = ["drift", f"{one}@file", str(file), "--data", str(tmp_path / "data.npz"), "--batch-size", "4"]
    result = CliRunner().invoke(app, [*command, "--json", str(out)])
    assert result.exit_code == 1, result.output
    assert "bias" in result.output and "growth:" in result.output
    found = json.loads(out.read_text())
    assert found["findings"][0]["cause"] == "bias"
    assert CliRunner().invoke(app, ["drift", str(one), "onnxruntime"]).exit_code == 0
    sim = OnnxSim(one / "net.onnx")
    assert sim.drift("simulation", "onnxruntime").ok
    assert bitwright.drift is drift


@pytest.mark.parametrize(
    "a, b, message",
    [
        ("{net}@flaot", "{net}", "is not an execution .did you mean 'float'"),
        ("{net}", "onnxruntme", "neither a file or folder nor an execution .did you mean 'onnxruntime'"),
        ("float", "file", "neither names a folder or a file"),
        ("{net}@file", "{net}", "does not differ from itself"),
        ("{net}/missing.onnx", "float", "there is no such file or folder"),
        ("{net}/net_manifest.json", "float", "cannot be read as an ONNX model"),
        ("{net}/net.onnx@simulation", "{net}@file", "a file alone does not keep"),
        ("{net}/net.onnx@float", "{net}@file", "holds quantizers"),
    ],
)
def test_sides_that_are_none(one: Path, a: str, b: str, message: str) -> None:
    with pytest.raises((ConfigError, ExportError), match=message):
        drift(a.format(net=one), b.format(net=one))


def test_data_of_another_model(one: Path) -> None:
    name = next(iter(data_of(one)))
    with pytest.raises(ExportError, match=f"the data has no input '{name}'.*it holds picture"):
        drift(f"{one}@float", "onnxruntime", {"picture": np.zeros((1, 3, 8, 8), np.float32)})
    with pytest.raises(ExportError, match=r"its input '.*' is .*3x8x8, and the data has 1x1x28x28"):
        drift(f"{one}@float", "onnxruntime", {name: np.zeros((1, 1, 28, 28), np.float32)})
    with pytest.raises(ConfigError, match="its own samples.*sim.drift"):
        drift(f"{one}@simulation", "onnxruntime", {name: np.zeros((1, 3, 8, 8), np.float32)})


def test_what_quantizers_inside_a_body_round_is_told(tmp_path: Path) -> None:
    net, branches = Net(), {}
    x, flag = net.input("x", (2, 3, 8, 8)), net.input("flag", (), onnx.TensorProto.BOOL)
    h = net.conv(x, 3, 4, name="c")
    for branch, kind in (("then_branch", "Relu"), ("else_branch", "HardSigmoid")):
        inner = Net()
        branches[branch] = body(inner(kind, h), net=inner)
    model = net.model(net("If", flag, name="choice", **branches))
    pictures = np.random.default_rng(0).standard_normal((2, 2, 3, 8, 8)).astype(np.float32)
    feeds = [{"x": x, "flag": np.bool_(on)} for x, on in zip(pictures, (0, 1), strict=True)]
    sim = calibrated(OnnxSim(model, feeds[0], config_file={"tail": "quantized"}), feeds)
    sim.export(tmp_path / "out", "net")
    report = drift(f"{tmp_path / 'out'}@float", f"{tmp_path / 'out'}@file")
    (found,) = [one for one in report.findings if one.cause == "operators"]
    assert "quantizers in the body of If" in found.text and "only" not in found.text
    assert "@simulation" in found.remedy
    assert drift(f"{tmp_path / 'out'}@simulation", f"{tmp_path / 'out'}@file").ok


def test_models_without_a_common_tensor(one: Path, tmp_path: Path) -> None:
    x = torch.randn(1, 7)
    sim = calibrated(QuantizationSimModel(nn.Sequential(nn.Linear(7, 2)).eval(), x), [x])
    sim.export(tmp_path, "other", x)
    other = onnx.load(tmp_path / "other.onnx")
    for field in (other.graph.input, other.graph.output):
        field[0].name = f"of_{field[0].name}"
    for node in other.graph.node:
        for names in (node.input, node.output):
            for i, old in enumerate(names):
                names[i] = f"of_{old}" if old and old not in {t.name for t in other.graph.initializer} else old
    onnx.save(other, tmp_path / "renamed.onnx")
    feeds = {**data_of(one), "of_input": x.numpy()}
    with pytest.raises(ExportError, match="no tensor of the same name"):
        drift(f"{one}@float", tmp_path / "renamed.onnx", feeds)


def test_files_of_old_exporters_are_compared(one: Path, tmp_path: Path) -> None:
    """Initializers among the inputs, and constants of other types that the file computes."""
    model = onnx.load(one / "net_float.onnx")
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    shape = next(node for node in model.graph.node if node.op_type == "Reshape")
    whole = onnx.helper.make_node("Abs", [shape.input[1]], ["whole_shape"])
    model.graph.node.insert(0, whole)
    shape.input[1] = "whole_shape"
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "old.onnx")
    report = drift(tmp_path / "old.onnx", f"{one}@file", data_of(one))
    assert report.ok and len(report.rows) > 3


class Lines(nn.Module):
    """Its input gives the batch of an LSTM's zero state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.steps = nn.LSTM(16, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        return self.steps(torch.relu(self.second(x)).mean(2).transpose(1, 2))[0]


@pytest.mark.slow
def test_a_runtime_that_computes_the_whole_file_otherwise_than_its_parts_is_not_rounding(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    x = torch.rand(1, 1, 8, 16)
    result = quantize(Lines().eval(), [x], recipe=["fold"], path=tmp_path, progress=False, target="openvino_cpu")
    assert result.exported is not None
    core = openvino.Core()
    model = core.read_model(result.exported.qdq)
    free = core.compile_model(model, "CPU")(x.numpy())[0]
    model.reshape(list(x.shape))
    fixed = core.compile_model(model, "CPU")(x.numpy())[0]
    report = drift(f"{tmp_path}@simulation", f"{tmp_path}@openvino")
    if np.abs(free - fixed).max() < 1e-4:
        assert report.ok, "this version of OpenVINO computes the same"
        return
    first = report.first
    assert first is not None and not report.ok
    assert (first.name, first.cause) == ("relu.output[0]", "fusion"), str(report)
    assert first.retries[-1].removed and "model.reshape({'x': [1, 1, 8, 16]})" in first.remedy
    verified = verify_folder(tmp_path, runtime="openvino")
    assert all(row.ok for row in verified.rows) and not verified.ok
    assert verified.otherwise is not None and verified.otherwise.other > 100
    assert "model.reshape({'x': [1, 1, 8, 16]})" in str(verified)
    result.sim.export(tmp_path / "fixed", "net", x, target="openvino_cpu", dynamic_batch=False)
    assert verify_folder(tmp_path / "fixed", runtime="openvino").ok, "the remedy helps"


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def test_a_cleared_bias_leaves_the_runtime_its_kernels(tmp_path: Path) -> None:
    """A bias of floats in the place of codes made a float Gemm of an integer product, which hid that its sums saturate."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    sim = calibrated(QuantizationSimModel(Affine().eval(), x, default_param_bw=7), [x])
    model = ir.load(sim.export(tmp_path, "net", x).qdq)
    before = sorted(optimized_types(model).values())
    assert "QGemm" in before
    keys = [key for key, one in parameters(model).items() if one.role == "bias"]
    clear(model, {key: np.zeros(8, np.float32) for key in keys})
    assert sorted(optimized_types(model).values()) == before
    with torch.no_grad():
        sim.model.layer.bias.zero_()
        expected = sim.model(x).numpy()
    found = run_model(model, {"x": x.numpy()}, "float")["output"]
    np.testing.assert_allclose(found, expected, atol=1e-6)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x)
        return torch.softmax(h @ h.transpose(1, 2), -1) @ h


class Pooling(nn.Module):
    """The mean of pixels that the network itself weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.score, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.conv(x)).flatten(2)
        return self.head((h * torch.softmax(self.score(h.transpose(1, 2)).transpose(1, 2), -1)).sum(-1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(12, 40), nn.Linear(12, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(self.gate(x), -1) * torch.tanh(self.experts(x))).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "shape", "size"),
    [
        (Attention, (2, 26, 16), 0.3),
        (Attention, (2, 33, 16), 0.3),
        (Pooling, (4, 3, 8, 8), 4.0),
        (Experts, (16, 12), 3.0),
    ],
)
def test_a_fused_kernel_is_named(model: type[nn.Module], shape: tuple[int, ...], size: float) -> None:
    torch.manual_seed(0)
    net, x = model().eval(), size * torch.randn(*shape)
    # no sum saturates, on any CPU; the softmax of the experts follows the last layer
    sim = calibrated(QuantizationSimModel(net, x, default_param_bw=7, config_file={"tail": "quantized"}), [x])
    report = sim.drift("file", "onnxruntime", x)
    assert report.first is not None and report.first.cause == "fusion", report.to_text()
    assert "QLinearSoftmax" in report.first.text and report.first.name == "softmax.output[0]"


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 6, -1) @ self.v(x)


def layers(*sizes: tuple[int, int]) -> nn.Module:
    return nn.Sequential(*(part for size in sizes for part in (nn.Linear(*size, bias=False), nn.Tanh())))


@pytest.mark.parametrize(
    "build", [lambda: layers((64, 128)), lambda: layers((64, 128), (128, 96), (96, 32)), Skip, Heads],
    ids=["layer", "layers", "skip", "heads"],
)  # fmt: skip
def test_products_fused_with_activations_that_nobody_quantized_are_named(build, tmp_path):
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(2, 5, 64)
    sim = calibrated(QuantizationSimModel(model, x, preset="w4g32"), [x])
    sim.export(tmp_path, "fused", x, weight_only="fused", target="packed")
    for side in ("float", "simulation", "file"):
        report = drift(f"{tmp_path}@{side}", "onnxruntime")
        assert report.first is not None and report.first.cause == "4-bit fusion", report.to_text()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(75_000, 3), (2, 75_000)),
        (lambda: nn.Linear(140_000, 3), (2, 140_000)),
        (lambda: nn.Conv2d(3000, 3, 5), (1, 3000, 6, 6)),
        (lambda: nn.Linear(75_000, 3, bias=False), (1, 2, 75_000)),
    ],
    ids=["linear", "longer", "convolution", "three-axes"],
)
def test_an_overflow_of_the_accumulator_is_named(layer, shape):
    model = nn.Sequential(layer(), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.fill_(0.01)
    x = 0.98 + 0.02 * torch.rand(*shape, generator=torch.Generator().manual_seed(0))
    sim = calibrated(QuantizationSimModel(model, x), [x])
    for side in ("simulation", "file"):  # in memory: export writes in float what a kernel gets this wrong
        report = sim.drift(side, "onnxruntime", x)
        assert report.first is not None and report.first.cause == "overflow", report.to_text()


def test_a_run_that_leaves_most_differences_has_not_removed_them() -> None:
    """98.9 % of equal codes without a suspected bias became 99.1 %, which alone would count as agreement."""
    before = Agreement(0.989, 1.0, 10_000)
    assert close(Agreement(0.991, 1.0, 10_000)) and not removes(before, Agreement(0.991, 1.0, 10_000))
    assert removes(before, Agreement(0.996, 1.0, 10_000)) and removes(before, Agreement(1.0, 0.0, 10_000))
    assert removes(Agreement(0.995, 40.0, 10_000), Agreement(0.994, 1.0, 10_000))
    assert not removes(before, Agreement(0.996, 2.0, 10_000))
