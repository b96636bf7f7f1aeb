"""Sums that saturate or overflow: the pairing is that of real kernels, and only guilty layers are narrowed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from typer.testing import CliRunner

import bitwright
from bitwright.cli import app
from bitwright.compare.saturation import integer_products, saturation
from bitwright.compare.sides import read_model
from bitwright.core.numerics.integer_sums import INT16_MAX, INT16_MIN, largest_pair, paired_product, saturated
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError, ExportError
from bitwright.methods.runtime_repairs import repair_saturation
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel, quantize
from tests.support import data
from tests.support.deployed import first_output, quantized
from tests.support.simulations import calibrated
from tests.support.tasks import TASKS
from tests.support.without_vnni import run_without_vnni


def test_pairs_saturate_as_written_out() -> None:
    rng = np.random.default_rng(0)
    for inner in (1, 2, 7, 16):
        codes, weight = rng.integers(0, 256, (5, inner)), rng.integers(-128, 128, (inner, 3))
        wanted = np.zeros((5, 3), np.int64)
        for n in range(5):
            for m in range(3):
                for k in range(0, inner, 2):
                    pair = sum(int(codes[n, i]) * int(weight[i, m]) for i in range(k, min(k + 2, inner)))
                    wanted[n, m] += min(max(pair, INT16_MIN), INT16_MAX)
        assert np.array_equal(paired_product(codes, weight), wanted)


def test_no_input_passes_the_static_bound() -> None:
    rng = np.random.default_rng(1)
    weight = rng.integers(-128, 128, (8, 40))
    bound = np.abs(largest_pair(weight))
    corners = np.array(np.meshgrid(*[[0, 255]] * 8)).reshape(8, -1).T
    pairs = corners.reshape(-1, 4, 2)[..., None] * weight.reshape(4, 2, 40)
    assert np.array_equal(np.abs(pairs.sum(2)).max(0), bound)
    assert not saturated(corners, np.clip(weight, -64, 63))[0].any(), "7 bits cannot saturate"


_KERNELS = """
import numpy as np, onnxruntime as ort
from onnx import TensorProto as T, helper as h, numpy_helper as nh
import onnx_ir as ir
from bitwright.compare.saturation import IntegerProduct
from bitwright.core.numerics.integer_sums import paired_product
rng = np.random.default_rng(0)
options = ort.SessionOptions()
options.intra_op_num_threads = 1
def run(graph, feeds):
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 13)], ir_version=8)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
# channels, outputs, kernel, groups, zero point, stride, padding
for c, m, k, g, z, s, p in ((16, 8, 3, 1, 0, 1, 1), (15, 8, 1, 1, 3, 1, 0), (5, 8, 3, 1, 128, 2, 1), (16, 8, 3, 2, 0, 1, 0),
                            (16, 16, 3, 16, 0, 1, 1), (3, 32, 5, 1, 128, 2, 2)):
    x = rng.integers(0, 256, (1, c, 12, 12)).astype(np.uint8)
    w = rng.integers(-20, 128, (m, c // g, k, k)).astype(np.int8)
    attributes = {"group": g, "strides": [s, s], "pads": [p] * 4}
    node = ir.node("Conv", [], attributes)
    product = IntegerProduct(node, "", "", False, 1.0, z, w, np.ones(1), None, None)
    rows = product.rows(x, 10**9, rng)
    pick = paired_product if product.pairs else lambda a, b: a @ b
    wanted = np.concatenate([pick(a, b) - z * b.sum(0) for a, b in zip(rows, product.matrices())], 1)
    exact = np.concatenate([a @ b - z * b.sum(0) for a, b in zip(rows, product.matrices())], 1)
    scale = np.float32(exact.max() / 220)
    constants = [nh.from_array(np.array(v), n) for n, v in (
        ("one", np.float32(1)), ("zx", np.uint8(z)), ("w", w), ("sw", np.ones(m, np.float32)), ("zw", np.zeros(m, np.int8)),
        ("sy", scale), ("zy", np.uint8(0)))]
    graph = h.make_graph([h.make_node("QLinearConv", ["x", "one", "zx", "w", "sw", "zw", "sy", "zy"], ["y"], **attributes)], "g",
                         [h.make_tensor_value_info("x", T.UINT8, list(x.shape))], [h.make_tensor_value_info("y", T.UINT8, None)],
                         constants)
    y = run(graph, {"x": x})[0].reshape(m, -1).T
    codes = lambda v: np.clip(np.rint(v / scale), 0, 255)
    print("conv", (codes(wanted) == y).mean(), (codes(exact) == y).mean(), product.pairs)
for inner in (64, 65, 576):
    a, w = rng.integers(0, 256, (9, inner)).astype(np.uint8), rng.integers(-60, 128, (inner, 16)).astype(np.int8)
    graph = h.make_graph([h.make_node("MatMulInteger", ["a", "w"], ["y"])], "g",
                         [h.make_tensor_value_info("a", T.UINT8, [9, inner])],
                         [h.make_tensor_value_info("y", T.INT32, [9, 16])], [nh.from_array(w, "w")])
    y = run(graph, {"a": a})
    a, w = a.astype(np.int64), w.astype(np.int64)
    print("matmul", (paired_product(a, w) == y).mean(), (a @ w == y).mean(), True)
"""


def test_pairing_is_that_of_the_runtime_without_dot_products(tmp_path: Path) -> None:
    lines = [line.split() for line in run_without_vnni(_KERNELS, tmp_path).splitlines()]
    assert len(lines) == 9
    for kind, paired, exact, pairs in lines:
        assert float(paired) == 1.0, f"{kind}: the kernel pairs otherwise"
        assert (float(exact) < 1) == (pairs == "True")


_OPENVINO = """
import sys
import numpy as np, openvino, onnx_ir as ir
from onnx import TensorProto as T, helper as h, numpy_helper as nh
from bitwright.compare.saturation import IntegerProduct
from bitwright.core.numerics.integer_sums import paired_product
rng = np.random.default_rng(0)
def constant(value, name):
    return nh.from_array(np.array(value), name)
def run(op, x, w, signed, zero, attributes):
    axis, codes = int(op == "MatMul"), np.int8 if signed else np.uint8
    one = np.ones(w.shape[axis], np.float32)
    constants = [constant(np.float32(1), "one"), constant(codes(zero), "zx"), constant(w, "w"), constant(one, "sw"),
                 constant(one.astype(np.int8) * 0, "zw")]
    nodes = [h.make_node("QuantizeLinear", ["x", "one", "zx"], ["q"]), h.make_node("DequantizeLinear", ["q", "one", "zx"], ["d"]),
             h.make_node("DequantizeLinear", ["w", "sw", "zw"], ["v"], axis=axis),
             h.make_node(op, ["d", "v"], ["y"], **attributes)]
    graph = h.make_graph(nodes, "g", [h.make_tensor_value_info("x", T.FLOAT, list(x.shape))],
                         [h.make_tensor_value_info("y", T.FLOAT, None)], constants)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 13)], ir_version=8)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled({"x": x.astype(np.float32) - zero})[0]
# channels, outputs, kernel, groups, zero point, stride, padding
for c, m, k, g, z, s, p in ((16, 8, 3, 1, 0, 1, 1), (15, 8, 1, 1, 3, 1, 0), (5, 8, 3, 1, 128, 2, 1), (16, 8, 3, 2, 0, 1, 0),
                            (16, 16, 3, 16, 0, 1, 1), (3, 32, 5, 1, 128, 2, 2)):
    for signed in (False, True):
        shift = 128 if signed else 0
        x, w = rng.integers(0, 256, (1, c, 12, 12)) - shift, rng.integers(-20, 128, (m, c // g, k, k)).astype(np.int8)
        attributes = {"group": g, "strides": [s, s], "pads": [p] * 4}
        product = IntegerProduct(ir.node("Conv", [], attributes), "", "", signed, 1.0, z - shift, w, np.ones(1), None, None)
        order = product.orders()[-1]
        parts = list(zip(product.rows(x, 10**9, rng), product.matrices()))
        pick = (lambda a, b: paired_product(order(a), order(b.T).T)) if product.pairs else (lambda a, b: a @ b)
        wanted, exact = (np.concatenate([how(a, b) - z * b.sum(0) for a, b in parts], 1) for how in (pick, lambda a, b: a @ b))
        y = run("Conv", x, w, signed, z - shift, attributes)[0].reshape(m, -1).T
        print("conv", (wanted == y).mean(), (exact == y).mean(), product.pairs)
for inner in (64, 65, 576):
    a, w = rng.integers(0, 256, (9, inner)), rng.integers(-60, 128, (inner, 16)).astype(np.int8)
    y, w = run("MatMul", a, w, False, 100, {}), w.astype(np.int64)
    print("matmul", (paired_product(a, w) - 100 * w.sum(0) == y).mean(), (a @ w - 100 * w.sum(0) == y).mean(), True)
"""


@pytest.mark.parametrize("instructions", ["SSE41", "AVX2", "AVX512_CORE"])
def test_pairing_is_that_of_openvino_without_dot_products(instructions: str) -> None:
    pytest.importorskip("openvino")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("pairs of products are added on x86 alone")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": instructions}
    run = subprocess.run([sys.executable, "-c", _OPENVINO], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 15
    for kind, paired, exact, pairs in lines:
        assert float(paired) == 1.0, f"{kind}: the kernel pairs otherwise"
        assert (float(exact) < 1) == (pairs == "True")


def test_an_odd_number_of_channels_is_paired_as_either_runtime_does() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    with torch.no_grad():  # neighbours within a position, of which the third channel has none, are never both large
        model[0].weight.zero_()
        model[0].weight[:, 2] = 1.0
        model[0].weight[:, 0, :, 1:] = 1.0
    x = 0.9 + 0.1 * torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    sim = calibrated(QuantizationSimModel(model, x), [x])
    sums = sim.saturation([x]).layers[0]
    assert sums.touched == 1.0, "2 of one position and 0 of the next are neighbours in ONNX Runtime"
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[:, :2, 0, 1] = 1.0  # an odd place in a row of 27, an even one in a row of 9 times 4
    sim = calibrated(QuantizationSimModel(model, x), [x])
    assert sim.saturation([x]).layers[0].touched == 1.0, "0 and 1 of the second position are neighbours in OpenVINO"


def net() -> nn.Module:
    """The first layer saturates, the second is depthwise, the others have small weights beside one large one."""
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU6(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU(),
        nn.Conv2d(16, 8, 1), nn.Flatten(), nn.Linear(32, 4),
    ).eval()  # fmt: skip
    with torch.no_grad():
        made[0].weight.abs_().add_(0.1)
        for layer in (made[4], made[6]):
            layer.weight.mul_(0.2).clamp_(-0.03, 0.03)
            layer.weight.view(len(layer.weight), -1)[:, 0] = 0.1
    return made


X = 0.5 + 0.5 * torch.rand(4, 8, 8, 8, generator=torch.Generator().manual_seed(0))


def test_only_guilty_layers_are_narrowed(tmp_path: Path) -> None:
    result = quantize(net(), [X], recipe=["fold"], repair="saturation", path=tmp_path, progress=False)
    repair = result.repair
    assert repair is not None and repair.narrowed == ("0.weight",)
    bits = {name: site.encoding.format.bits for name, site in result.sim.quantizers.items() if site.role == "weight"}
    assert bits == {"0.weight": 7, "2.weight": 8, "4.weight": 8, "6.weight": 8}
    assert repair.found.guilty == ("0.weight",) and repair.left.guilty == () and repair.left.ok
    assert repair.before > repair.after - 1 and np.isfinite(repair.after)
    assert "7-bit weights in 1 of 4 layers (0.weight); accuracy" in str(repair)
    assert repair.saturated < repair.before - 3 and repair.repaired == pytest.approx(repair.after, abs=0.1)
    assert result.sim.verify(X).ok
    codes = {p.site: p.weight for p in integer_products(read_model(tmp_path / "model.onnx"))}
    assert codes["0.weight"].min() >= -64 and codes["0.weight"].max() <= 63
    (row,) = (row for row in result.sim.coverage() if row.name == "0.weight")
    assert "dot-product" in row.how


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_channels_that_do_not_saturate_keep_their_bits(front_end: str, tmp_path: Path) -> None:
    """Weights of one sign saturate, small ones beside a large one do not; other data than those of the repair decide."""
    made = net()
    with torch.no_grad():
        made[0].weight[4:].mul_(0.01)
        made[0].weight[4:, 0, 0, 0] = 0.5
    if front_end == "onnx":
        sim = calibrated(QuantizationSimModel(made, X), [X])
        sim.export(tmp_path, "net", X)
    source, batches = (made, [X]) if front_end == "torch" else (tmp_path / "net_float.onnx", [{"input": X.numpy()}])
    plain, repaired = (
        bitwright.quantize(source, batches, recipe=["fold"], repair=repair, progress=False, measure_speed=False)
        for repair in (None, "saturation")
    )
    repair, name = repaired.repair, "0.weight" if front_end == "torch" else next(iter(repaired.repair.channels))
    assert (
        repair is not None and dict(repair.channels) == {name: (4, 16)} and f"{name} in 4 of 16 channels" in str(repair)
    )
    before, after = (done.sim.quantizers[name].encoding.scale.reshape(-1) for done in (plain, repaired))
    assert np.array_equal(after / before, [2] * 4 + [1] * 12)
    row = next(row for row in repaired.sim.coverage() if row.name == name)
    assert "7 bits in 4 of 16 channels, in which pairs of products saturate" in row.how
    x = (0.5 + 0.5 * torch.rand(64, 8, 8, 8, generator=torch.Generator().manual_seed(1))).numpy()
    for done, equal in ((plain, False), (repaired, True)):
        sessions = [done.sim.runs_as(profile) for profile in ("ort_x64", "ort_x64_avx2")]
        found = [[session.run(None, {"input": rows})[0] for rows in np.split(x, 16)] for session in sessions]
        assert np.array_equal(*found) == equal
    assert repaired.sim.verify(batches[0]).ok


def test_values_that_a_range_clipped_are_clipped_again(tmp_path: Path) -> None:
    """Steps of twice the size bring values beyond the range back, which saturate: then the whole layer has 7 bits."""
    made = net()
    with torch.no_grad():
        made[0].weight[1:].mul_(0.01)
        made[0].weight[1:, 0, 0, 0] = 0.5
    sim = QuantizationSimModel(made, X)
    site = sim.quantizers["0.weight"]
    sim.compute_encodings([X])
    encoding = site.encoding
    site.encoding = replace(encoding, scale=encoding.scale * np.where(np.arange(16) == 0, 0.3, 1).astype(np.float32))
    repair = repair_saturation(sim, [X], lambda target: 0.0)
    assert dict(repair.channels) == {"0.weight": (16, 16)} and repair.left.guilty == ()
    assert site.encoding.format.bits == 7


def test_a_repaired_model_answers_on_such_a_cpu_as_it_was_simulated() -> None:
    """The first layer's pairs saturate: outputs change on AVX2 without VNNI, and no longer with 7 bits in that layer alone."""
    x = 0.5 + 0.5 * torch.rand(64, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    equal = []
    for repair in (None, "saturation"):
        sim = quantize(net(), [X], recipe=["fold"], repair=repair, progress=False).sim
        found = [sim.runs_as(name).run(None, {"input": x.numpy()})[0] for name in ("ort_x64", "ort_x64_avx2")]
        equal.append(float((found[0] == found[1]).mean()))
    assert equal[0] < 1 and equal[1] == 1


def test_a_repair_exports_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often sums are counted: on networks of many branches an export takes longer than everything else."""
    sim = calibrated(QuantizationSimModel(net(), X), [X])
    exports, export = [], torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: exports.append(1) or export(*a, **k))
    repair = repair_saturation(sim, [X], lambda target: 0.0)
    assert repair.narrowed == ("0.weight",) and len(exports) == 1
    assert repair.left.guilty == sim.saturation([X]).guilty == ()


def test_both_front_ends_and_the_command_count_the_same(tmp_path: Path) -> None:
    sim = calibrated(QuantizationSimModel(net(), X), [X])
    sim.export(tmp_path, "net", X, unsigned_weights=False)
    other = OnnxSim(tmp_path / "net.onnx")
    one, two = sim.saturation([X]), other.saturation([{"input": X.numpy()}])
    assert [(a.op, a.risky, a.touched, a.largest) for a in one.layers] == [
        (b.op, b.risky, b.touched, b.largest) for b in two.layers
    ]
    assert one.guilty == ("0.weight",) and one.layers[0].off > 1
    out = tmp_path / "sums.json"
    result = CliRunner().invoke(app, ["saturation", str(tmp_path), "--json", str(out)])
    assert result.exit_code == 1 and "repair='saturation'" in result.output, result.output
    assert json.loads(out.read_text())["guilty"] == ["0.weight"]
    command = ["quantize", str(tmp_path / "net_float.onnx"), "--out", str(tmp_path / "again"), "--repair", "saturation"]
    np.savez(tmp_path / "data.npz", input=X.numpy())
    result = CliRunner().invoke(
        app, [*command, "--data", str(tmp_path / "data.npz"), "--batch-size", "4", "--recipe", "fold"]
    )
    assert result.exit_code == 0, result.output
    assert "saturation: 7-bit weights in 1 of 4 layers" in result.output
    assert CliRunner().invoke(app, ["saturation", str(tmp_path / "again")]).exit_code == 0


@pytest.mark.slow
def test_repaired_files_compute_the_simulation_without_dot_products(tmp_path: Path) -> None:
    for name, repair in (("plain", None), ("repaired", "saturation")):
        result = quantize(net(), [X], recipe=["fold"], repair=repair, progress=False)
        result.sim.export(tmp_path / name, "model", X, unsigned_weights=False)
    code = """
from bitwright import drift
for name in ("plain", "repaired"):
    report = drift(f"{sys.argv[1]}/{name}@simulation", "onnxruntime")
    print(name, report.first and report.first.cause, report.ok)
"""
    lines = run_without_vnni(code, tmp_path, str(tmp_path)).splitlines()
    assert lines[0].startswith("plain saturation False") and lines[1].endswith("True")


def test_an_accumulator_that_overflows_is_named() -> None:
    model = nn.Sequential(nn.Linear(80_000, 3), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.fill_(0.01)
    x = 0.98 + 0.02 * torch.rand(2, 80_000)
    sim = calibrated(QuantizationSimModel(model, x), [x])
    report = sim.saturation([x])
    assert report.layers[0].faults == ("pairs saturate", "the int32 accumulator overflows")
    assert "the int32 accumulator can overflow, on every CPU: 0.weight" in report.to_text()


def test_a_bias_and_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    sim = calibrated(QuantizationSimModel(net(), X), [X])
    sim.export(tmp_path, "net", X, unsigned_weights=False)
    model = onnx.load(tmp_path / "net.onnx")
    scale = next(node.input[1] for node in model.graph.node if node.input[0] == "6.weight_q")
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).copy()
        if tensor.name == "4.bias_q":
            array[0] = (1 << 31) - 1
        if tensor.name == scale:
            array[0] = 1e-38
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, tmp_path / "changed.onnx")
    layers = {s.site: s for s in saturation(read_model(tmp_path / "changed.onnx"), [{"input": X.numpy()}]).layers}
    assert "the int32 bias overflows" in layers["4.weight"].faults
    assert "its scales underflow" in layers["6.weight"].faults
    assert layers["2.weight"].faults == ()


def test_what_cannot_be_counted_is_an_error_or_a_note() -> None:
    sim = calibrated(QuantizationSimModel(net(), X, preset="w8a16"), [X])
    (note,) = sim.saturation([X]).notes
    assert note.startswith("not counted, as not of 8-bit codes") and note.endswith(" and 1 more"), note
    with pytest.raises(ExportError, match="there is no batch to run"):
        sim.saturation([])
    with pytest.raises(ConfigError, match="'saturatoin' is not a repair .did you mean 'saturation'"):
        quantize(net(), [X], repair="saturatoin")


def test_export_says_how_fast_it_is_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).eval()
    x = torch.randn(1, 4)
    sim = calibrated(QuantizationSimModel(tiny, x), [x])
    assert sim.export(tmp_path, "quiet", x).speed is None
    exported = sim.export(tmp_path, "told", x, measure_speed=True)
    assert exported.speed is not None and exported.speed.median > 0
    told = [record.message for record in caplog.records if "slower than float on this machine" in record.message]
    assert bool(told) == exported.speed.slower
    other = OnnxSim(tmp_path / "told.onnx")
    assert other.export(tmp_path / "onnx", "again", measure_speed=True).speed is not None
    assert sim.export(tmp_path, "none", x, samples=False, measure_speed=True).speed is None
    assert "no samples to run" in caplog.text


_OUTPUTS = """
import numpy as np
from dataclasses import replace
from pathlib import Path
from tests.support.deployed import in_onnxruntime
from tests.support.tasks import TASKS
x = TASKS["resnet20_aux"]().batches(0)[0]
for name in ("plain", "repaired"):
    np.save(f"{sys.argv[1]}/{name}.npy", in_onnxruntime(Path(sys.argv[1], name, "model.onnx"))(x).numpy())
"""


@pytest.mark.slow
def test_a_trained_network_is_brought_back(shared_data: Path, tmp_path: Path) -> None:
    """In ONNX Runtime's kernels without dot products, against the simulation."""
    task = TASKS["resnet20_aux"]()
    runs = {
        name: quantized("resnet20_aux", "torch", task, tmp_path / name, repair=repair)
        for name, repair in (("plain", None), ("repaired", "saturation"))
    }
    x = task.batches(0)[0]
    runs["plain"][1].sim.export(tmp_path / "plain", "model", x, unsigned_weights=False)
    run_without_vnni(_OUTPUTS, tmp_path, str(tmp_path))
    plain, repaired = (sqnr(run(x).numpy(), np.load(tmp_path / f"{name}.npy")) for name, (run, _) in runs.items())
    assert plain < 20 and repaired > 40, (plain, repaired)
    narrowed = runs["repaired"][1].repair.narrowed
    assert 1 <= len(narrowed) <= 6, narrowed


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_points_lost_without_vnni_come_back(shared_data: Path, front_end: str) -> None:
    """The result tells the accuracy on such a CPU before and after, for metrics of modules and of sessions."""
    task = TASKS["resnet20_aux"]()
    images = data.cifar()[slice(0, 1000)]

    def metric(model: Any) -> float:
        return data.accuracy(model if front_end == "torch" else first_output(model), images)

    batches = task.batches(0) if front_end == "torch" else [batch.numpy() for batch in task.batches(0)]
    source = data.trained("resnet20_aux") if front_end == "torch" else data.onnx_file("resnet20_aux")
    repair = bitwright.quantize(
        source, batches, recipe=["fold"], repair="saturation", metric=metric, progress=False, poor_below=-np.inf
    ).repair
    assert repair.saturated < repair.before and repair.repaired > repair.saturated, str(repair)
    assert abs(repair.repaired - repair.after) <= 0.5 and "on CPUs without VNNI" in str(repair)
