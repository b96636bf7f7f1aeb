"""Qualcomm's HTP: its arithmetic as measured, the simulator where it is installed, and what to install where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from bitwright import drift
from bitwright.compare.executed import CodeExecutor
from bitwright.compare.target import open_target
from bitwright.compare.verify import verify_folder, verify_layers
from bitwright.errors import ConfigError
from bitwright.executors.profile import find_profile
from bitwright.executors.rounding import FOLDED_ERROR, rescaled_folded
from bitwright.export.samples import read_samples
from bitwright.runtimes.adapters import find_runtime, open_file
from bitwright.torch import quantize
from tests.executors.test_kernels import OPERATORS, Draw, feeds

# factor, zero point, sums, and the codes that the simulator of onnxruntime-qnn 2.7 made of them: none is the nearest one
MEASURED = [
    (0.0022490887149409985, 210, [1565, 1558, -1102, -193, 703, -16200], [213, 213, 207, 209, 211, 173]),
    (0.00307773665054927, 245, [-72285, -27454, 1137, -23542, -27765, -42070], [22, 160, 249, 172, 159, 115]),
    (0.0036366686221088644, 175, [-21032, 18561, -26237, -19642, -18280, -18273], [98, 242, 79, 103, 108, 108]),
    (0.001796756314441513, 227, [9780, -38085, -21979, -13076, -38120, -38116], [244, 158, 187, 203, 158, 158]),
]


@pytest.mark.parametrize(("factor", "zero_point", "sums", "codes"), MEASURED, ids=["a", "b", "c", "d"])
def test_sums_are_brought_onto_the_grid_as_measured(
    factor: float, zero_point: int, sums: list[int], codes: list[int]
) -> None:
    assert rescaled_folded(sums, factor, zero_point).tolist() == codes
    assert (np.rint(np.asarray(sums) * factor) + zero_point != codes).all()


@pytest.mark.parametrize("op", ["Conv", "MatMul", "Gemm"])
def test_products_of_the_simulator_are_met_bit_for_bit(op: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    compared = 0
    for seed in range(1, 16):
        draw = Draw(seed)
        draw.dtype, draw.low, draw.high = np.dtype(np.uint8), 0, 255
        proto = OPERATORS[op](draw)
        held = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
        if "y_s" not in held or (op != "Conv" and held["w_s"].size > 1):
            continue  # products of several scales are computed in float there
        conv = next((node for node in proto.graph.node if node.op_type == "Conv"), None)
        found = {} if conv is None else {a.name: helper.get_attribute_value(a) for a in conv.attribute}
        if found and (found["kernel_shape"] == [1, 1] or (found["dilations"][0] > 1 and found["strides"][0] > 1)):
            continue  # what the profile says it does not meet
        for node in proto.graph.node:
            node.name = node.output[0]
        (tmp_path / "one.onnx").write_bytes(proto.SerializeToString())
        given = feeds(proto, draw)
        wanted = np.rint(open_file("qnn", tmp_path / "one.onnx").run(given)["o"] / held["y_s"])
        executor = CodeExecutor(ir.from_proto(proto), find_profile("htp"))
        np.testing.assert_array_equal(np.rint(executor.run(given)["o"] / held["y_s"]), wanted, f"{op} {seed}")
        compared += 1
    assert compared >= 3


def test_what_the_simulator_rounds_otherwise_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)).eval()
    data = [torch.randn(2, 3, 12, 12) for _ in range(2)]
    options: dict[str, Any] = {"recipe": ["fold"], "progress": False, "measure_speed": False}
    quantize(model, data, path=tmp_path, filename_prefix="net", target="qnn", **options)
    report = drift(f"{tmp_path}@simulation", f"{tmp_path}@qnn")
    assert report.ok and report.first is not None and report.first.cause == "kernel", report.to_text()
    assert report.first.text == "the kernels of qnn round otherwise, as profile htp says"
    x = data[0].numpy()
    (made,) = open_file("qnn", tmp_path / "net.onnx").run({"input": x}).values()
    (found,) = open_target(tmp_path, "htp").run(None, {"input": x})
    np.testing.assert_allclose(found, made, atol=1e-6)


def draws_of_zero_points_and_sums() -> list[tuple[float, int, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    grids = [(float(np.exp(rng.uniform(-12, 0))), int(rng.integers(256))) for _ in range(200)]
    return [(factor, zero, rng.integers(-zero / factor, (255 - zero) / factor + 1, 2000)) for factor, zero in grids]


def test_the_tolerance_of_the_simulator_holds_and_is_reached() -> None:
    farthest = 0.0
    for factor, zero, sums in draws_of_zero_points_and_sums():
        off = np.abs(rescaled_folded(sums, factor, zero) - (sums * factor + zero)) - 0.5
        # the zero point is added to the sum, on the grid of sums
        farthest = max(farthest, float(off.max()))
        assert off.max() <= FOLDED_ERROR + factor / 2
    assert farthest > 0.7 * FOLDED_ERROR


def test_verify_takes_what_the_simulator_rounds_otherwise_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.Flatten(), nn.Linear(256, 5))
    model = nn.Sequential(*layers).eval()
    options: dict[str, Any] = {"recipe": ["fold"], "progress": False, "measure_speed": False}
    quantize(model, [torch.randn(4, 3, 11, 11) for _ in range(2)], path=tmp_path, target="qnn", **options)
    report = verify_folder(tmp_path, runtime="qnn")
    within = [row for row in report.rows if row.verdict == "within"]
    assert report.ok and within, report.to_text()
    assert all("as profile htp does" in str(row.reason) for row in within), report.to_text()
    assert max(row.as_integer.off or 0.0 for row in within) <= FOLDED_ERROR
    file = ir.load(tmp_path / "model.onnx")
    held_in = file.graph.initializers
    name, codes = next((n, v) for n, v in held_in.items() if v.dtype == ir.DataType.INT32 and v.shape == (8,))
    held = codes.const_value.numpy()  # type: ignore[union-attr]
    step = np.abs(held).max() // 8 + 1  # a bias that is off by about half a step of its output
    held_in[name].const_value = ir.tensor((held + step).astype(np.int32), name=name)
    ir.save(file, tmp_path / "model.onnx")
    sites, inputs, outputs = read_samples(tmp_path / "model_samples.npz")
    broken = verify_layers(tmp_path / "model.onnx", sites, inputs, outputs=outputs, runtime="qnn")
    assert not broken.ok and any(row.verdict == "fails" for row in broken.rows)


def test_where_it_is_not_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime_qnn", None)
    with pytest.raises(ConfigError, match=r"onnxruntime_qnn is not installed. Remedy: pip install 'bitwright\[qnn\]'"):
        find_runtime("qnn")


def test_a_truncating_profile_of_ones_own_is_told_from_it() -> None:
    draw = Draw(2)
    proto = OPERATORS["Gemm"](draw)
    given, profile = feeds(proto, draw), find_profile("htp")
    cut = replace(profile, kernels={**profile.kernels, "Gemm": "truncated"})
    one, other = (CodeExecutor(ir.from_proto(proto), row).run(given)["o"] for row in (profile, cut))
    step = next(numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == "y_s")
    assert 0 < np.abs(one - other).max() <= 1.01 * step
