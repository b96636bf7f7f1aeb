"""Models as targets compute them: codes of the runtimes that are here, metrics on the command line, wrong input."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor, nn

import bitwright.torch
from bitwright.cli.app import app
from bitwright.compare.executed import CodeExecutor
from bitwright.compare.executed_flat import FlatExecutor
from bitwright.compare.runtime import EXACT_SUMS
from bitwright.compare.target import evaluate_target, open_target
from bitwright.errors import ConfigError, ExportError
from bitwright.executors.profile import find_profile
from bitwright.export.litert.flat import FlatModel, Grid
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.runtimes.adapters import session_of
from bitwright.runtimes.onnxruntime import new_session, session_options
from tests.support.simulations import calibrated
from tests.support.without_vnni import lacks_vnni


class Net(nn.Module):
    """Convolutions, a sum, a pool and a layer whose codes go through every kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.deep, self.last = nn.Conv2d(8, 8, 3, stride=2, groups=8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x) + x)
        return self.last(F.adaptive_avg_pool2d(F.relu6(self.deep(x)), 1).flatten(1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same network exported for each target."""
    torch.manual_seed(0)
    net, data = Net().eval(), [torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = {}
    for target in ("ort_cpu", "litert"):
        found[target] = tmp_path_factory.mktemp(target)
        options: dict[str, Any] = {"recipe": ["fold"], "progress": False, "measure_speed": False}
        bitwright.torch.quantize(net, data, path=found[target], filename_prefix="net", target=target, **options)
    return found


X = np.random.default_rng(3).normal(size=(6, 3, 12, 12)).astype(np.float32)


def seen_of(session: Any) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    codes: dict[str, np.ndarray] = {}
    return session.run(None, {"x": X}, codes.__setitem__), codes


@pytest.mark.parametrize("profile", ["ort_x64", "ort_x64_avx2"])
def test_outputs_are_those_of_onnx_runtime(exported: dict[str, Path], profile: str) -> None:
    if profile == "ort_x64_avx2" and not lacks_vnni():
        pytest.skip("this CPU has integer dot products")
    session = open_target(exported["ort_cpu"], profile)
    made, codes = seen_of(session)
    entries = EXACT_SUMS if profile == "ort_x64" else {}
    wanted = new_session(exported["ort_cpu"] / "net.onnx", session_options(entries=entries)).run(None, {"x": X})
    np.testing.assert_array_equal(made[0], wanted[0])
    assert len(codes) == 6  # four layers, a sum and a mean


def test_codes_are_those_of_the_reference_kernels(exported: dict[str, Path]) -> None:
    pytest.importorskip("ai_edge_litert")
    session = open_target(exported["litert"], "litert_reference")
    made, codes = seen_of(session)
    there = session_of((exported["litert"] / "net.tflite").read_bytes(), reference=True, keeps=True)
    np.testing.assert_array_equal(made[0], there.run({"x": X})["output"])
    places = {found["name"]: found["index"] for found in there.interpreter.get_tensor_details()}
    assert len(codes) >= 6
    for name, array in codes.items():
        np.testing.assert_array_equal(array, there.interpreter.get_tensor(places[name]), name)
    assert session.notes == ()


class Scalar(nn.Module):
    """A mean over everything becomes a scalar in a LiteRT file, whose shape is a constant without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) - x.mean()


def test_a_scalar_in_a_litert_file() -> None:
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    sim = calibrated(bitwright.torch.QuantizationSimModel(Scalar().eval(), torch.from_numpy(X)), [torch.from_numpy(X)])
    (found,) = sim.runs_as("litert_reference").run(None, {"x": X})
    with torch.no_grad():
        error = np.abs(found - sim.model(torch.from_numpy(X)).numpy()).max()
    assert error <= 1.01 * sim.quantizers["first.output[0]"].encoding.scale


class Recurrent(nn.Module):
    """An LSTM, whose file has the batch of the example in LiteRT."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0])


def test_steps_of_an_lstm_are_those_of_onnx_runtime(tmp_path: Path) -> None:
    """The bodies of Scan are divided like the model: the product of gate and state is an integer kernel, once per step."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.LSTM(6, 8, batch_first=True, bidirectional=True)).eval(), 2 * torch.randn(4, 12, 6)
    sim = calibrated(bitwright.torch.QuantizationSimModel(net, x), [x])
    path = sim.export(tmp_path, "net", x).qdq
    session, seen, feeds = open_target(path, "ort_x64"), list[str](), {"input": x.numpy()}
    found = session.run(None, feeds, lambda name, codes: seen.append(name))
    wanted = new_session(path, session_options(entries=EXACT_SUMS)).run(None, feeds)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [seen.count(name) for name in set(seen)] == [12, 12]


def step(inputs: list[str]) -> onnx.GraphProto:
    """A step whose only operator is a product of two values on one grid; it returns the product twice."""
    grid, value = ("s", "z"), helper.make_tensor_value_info
    nodes = []
    for name in inputs:
        nodes += [helper.make_node("QuantizeLinear", [name, *grid], [f"{name}_q"])]
        nodes += [helper.make_node("DequantizeLinear", [f"{name}_q", *grid], [f"{name}_d"])]
    nodes += [helper.make_node("Mul", [f"{inputs[0]}_d", f"{inputs[1]}_d"], ["p"])]
    nodes += [helper.make_node("QuantizeLinear", ["p", *grid], ["p_q"])]
    nodes += [helper.make_node("DequantizeLinear", ["p_q", *grid], [name]) for name in ("state", "row")]
    ends = [value(name, onnx.TensorProto.FLOAT, None) for name in (*inputs, "state", "row")]
    return helper.make_graph(nodes, "step", ends[: len(inputs)], ends[len(inputs) :])


@pytest.mark.parametrize("backwards", [0, 1], ids=["forwards", "backwards"])
@pytest.mark.parametrize("axes", [(0, 0), (1, 2)], ids=["first axis", "other axes"])
def test_every_form_of_scan_is_that_of_onnx_runtime(backwards: int, axes: tuple[int, int]) -> None:
    value, body = helper.make_tensor_value_info, step(["h", "x_t"])
    scan = helper.make_node(
        "Scan", ["h0", "x"], ["last", "rows"], body=body, num_scan_inputs=1, scan_input_axes=[axes[0]],
        scan_input_directions=[backwards], scan_output_axes=[axes[1]], scan_output_directions=[backwards],
    )  # fmt: skip
    held = {"s": np.float32(0.0625), "z": np.uint8(128)}
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    given = [value(name, onnx.TensorProto.FLOAT, [5, 5, 4][i:]) for i, name in ((1, "h0"), (0, "x"))]
    made = [value(name, onnx.TensorProto.FLOAT, None) for name in ("last", "rows")]
    graph = helper.make_graph([scan], "g", given, made, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    rng = np.random.default_rng(0)
    feeds = {n: rng.uniform(-4, 4, s).astype(np.float32) for n, s in (("h0", (5, 4)), ("x", (5, 5, 4)))}
    seen = list[str]()
    found = CodeExecutor(ir.from_proto(proto), find_profile("ort_x64")).run(
        feeds, seen=lambda name, _: seen.append(name)
    )
    wanted = new_session(proto.SerializeToString(), session_options(entries=EXACT_SUMS)).run(["last", "rows"], feeds)
    assert seen == ["p_q"] * 5
    for name, array in zip(("last", "rows"), wanted, strict=True):
        np.testing.assert_array_equal(found[name], array)


def test_data_of_any_batch_runs_in_a_file_with_a_fixed_one(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    net, data = Recurrent().eval(), [torch.randn(4, 5, 6) for _ in range(2)]
    options: dict[str, Any] = {"recipe": ["fold"], "progress": False, "measure_speed": False}
    bitwright.torch.quantize(net, data, path=tmp_path, target="litert", **options)
    session = open_target(tmp_path, "litert_reference")
    (source,) = (port.name for port in session.get_inputs())
    x = np.random.default_rng(0).normal(size=(11, 5, 6)).astype(np.float32)
    (whole,) = session.run(None, {source: x})
    assert whole.shape == (11, 5, 3)
    there = session_of((tmp_path / "model.tflite").read_bytes(), reference=True)
    for start in (0, 4, 7):
        (wanted,) = there.run({source: x[start : start + 4]}).values()
        np.testing.assert_array_equal(whole[start : start + 4], wanted)


def test_data_of_another_length_is_refused_with_both(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    flat = FlatModel()
    x, y = (flat.tensor(name, (4, 8), "int8", Grid("int8", (0.5,), (0,))) for name in ("x", "y"))
    flat.op("LOGISTIC", [x], [y], None)
    content = flat.finish({"x": x}, {"y": y}, {"bitwright": '{"sites": []}'})
    executor = FlatExecutor(content, find_profile("litert_reference"))
    with pytest.raises(
        ExportError, match="x: the .tflite file takes 4x8, and the data has 5x8. Remedy: give data of these"
    ):
        executor.run({"x": np.zeros((5, 8), np.int8)})


@pytest.mark.parametrize("profile", ["ort_x64", "litert_reference"])
def test_simulations_of_both_front_ends_run_as_a_target(exported: dict[str, Path], profile: str) -> None:
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    sim = calibrated(bitwright.torch.QuantizationSimModel(Net().eval(), torch.from_numpy(X[:2])), [torch.from_numpy(X)])
    other = calibrated(OnnxSim(exported["ort_cpu"] / "net_float.onnx"), [X])
    assert sim.runs_as(profile).run(["output"], {"x": X})[0].shape == (6, 5)
    assert other.runs_as(profile).run(["output"], {"x": X})[0].shape == (6, 5)


def _cpu_seconds(run: Callable[[], Any]) -> float:
    """The least CPU time of three runs: what else the machine does makes a run longer, never shorter."""
    found = []
    for _ in range(3):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.parametrize(
    "target, profile",
    [("ort_cpu", "ort_x64"), ("ort_cpu", "ort_x64_avx2"), ("litert", "litert_reference"), ("litert", "cmsis_nn")],
)
def test_a_run_as_a_target_costs_at_most_twenty_float_passes(
    exported: dict[str, Path], target: str, profile: str
) -> None:
    pytest.importorskip("ai_edge_litert")
    pictures = np.random.default_rng(0).standard_normal((256, 3, 12, 12)).astype(np.float32)
    net, threads = Net().eval(), torch.get_num_threads()
    session = open_target(exported[target], profile)
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            one_pass = _cpu_seconds(lambda: net(torch.from_numpy(pictures)))
    finally:
        torch.set_num_threads(threads)
    assert _cpu_seconds(lambda: session.run(None, {"x": pictures})) < 20 * one_pass


def test_the_command_measures_float_file_and_target(
    exported: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "x.npz", x=X)
    np.save(tmp_path / "y.npy", np.arange(6) % 5)
    arguments = ["evaluate", str(exported["ort_cpu"]), "--as", "ort_x64", "--data", str(tmp_path / "x.npz")]
    app([*arguments, "--labels", str(tmp_path / "y.npy")], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ort_x64: ") and [line.split()[0] for line in lines[3:]] == ["float", "file", "ort_x64"]


@pytest.mark.parametrize("name", ["net.onnx", "net_float.onnx", "net.tflite"])
def test_a_file_that_was_changed_since_its_export_is_not_measured(
    exported: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(exported["litert" if name == "net.tflite" else "ort_cpu"], tmp_path / "copy"))
    (folder / "net_samples.npz").unlink()  # which an evaluation does not read
    assert len(evaluate_target(folder, "ort_x64", lambda session: 1.0).rows) == 3
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ExportError, match=f"{name} has another content than was written. Remedy: export again"):
        evaluate_target(folder, "ort_x64", lambda session: 1.0)


def test_wrong_input_is_named(exported: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_target(exported["ort_cpu"], "ort_x64")
    with pytest.raises(
        ExportError, match=r"the data has no input 'x'; it holds y. Remedy: give the data of this model"
    ):
        session.run(None, {"y": X})
    with pytest.raises(ExportError, match=r"its input 'x' is \?x3x12x12, and the data has 6x3x9x9"):
        session.run(None, {"x": X[:, :, :9, :9]})
    with pytest.raises(ExportError, match=r"it has no output 'z'; its outputs are output"):
        session.run(["z"], {"x": X})
    (note,) = open_target(exported["litert"], "ort_x64").notes
    assert note.startswith("the file was exported for litert, and ort_x64 computes files for ort_cpu")
    with pytest.raises(ExportError, match=r"it holds no net.tflite.*Remedy: export with target='litert'"):
        open_target(exported["ort_cpu"], "litert_reference")
    with pytest.raises(ExportError, match="computes .tflite files, which lie in the folder of an export"):
        open_target(exported["ort_cpu"] / "net.onnx", "litert_reference")
    monkeypatch.setitem(__import__("sys").modules, "ai_edge_litert", None)
    with pytest.raises(
        ConfigError, match=r"ai_edge_litert is not installed. Remedy: pip install 'bitwright\[litert\]'"
    ):
        open_target(exported["litert"], "litert_reference")
