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
from bitwright.errors import ConfigError
from bitwright.executors.profile import find_profile
from bitwright.executors.rounding import rescaled_folded
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
