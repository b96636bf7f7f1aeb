"""What OpenVINO computes wrongly of plain ONNX files, as docs/openvino.md says: a test that fails tells that it was repaired."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bitwright.runtimes.adapters import open_file

STEP = 6 / 255  # of the quantized result
REPAIRED = "OpenVINO is right here now: take its sentence out of docs/openvino.md, and this test"


def quantized(name: str, step: float, zero: int) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """``name`` on a grid of uint8, as ``name_d``."""
    grid = [f"{name}_s", f"{name}_z"]
    nodes = [
        helper.make_node("QuantizeLinear", [name, *grid], [f"{name}_q"]),
        helper.make_node("DequantizeLinear", [f"{name}_q", *grid], [f"{name}_d"]),
    ]
    facts = (np.float32(step), np.uint8(zero))
    return nodes, [numpy_helper.from_array(np.array(a), n) for a, n in zip(facts, grid, strict=True)]


def steps_off(op: str, shape: list[int], path: Path, *, of_codes: bool) -> NDArray[np.float64]:
    """How many steps of the result OpenVINO is off the definition, where ``op`` reduces the last axis of floats or of codes."""
    read, made = quantized("x", 4 / 255, 128), quantized("y", STEP, 100)
    nodes = [
        *(read[0] if of_codes else ()),
        helper.make_node(op, ["x_d" if of_codes else "x", "axes"], ["y"], keepdims=0),
        *made[0],
    ]
    held = [*(read[1] if of_codes else ()), *made[1], numpy_helper.from_array(np.array([-1]), "axes")]
    ports = [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in (("x", shape), ("y_d", shape[:-1]))
    ]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    wanted, found = (
        open_file(runtime, path, reference=runtime == "onnxruntime").run({"x": x})["y_d"].astype(np.float64)
        for runtime in ("onnxruntime", "openvino")
    )
    return np.abs(found - wanted) / STEP


def test_means_of_codes_are_wrong_for_samples_beyond_the_number_of_channels(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    off = steps_off("ReduceMean", [8, 4, 5], tmp_path / "net.onnx", of_codes=True).max(axis=1)
    assert (off[:4] <= 1.01).all() and (off[4:] > 2).any(), REPAIRED
    assert steps_off("ReduceMean", [8, 4, 5], tmp_path / "net.onnx", of_codes=False).max() <= 1.01


def test_a_maximum_of_floats_with_a_quantized_result_is_wrong_for_one_axis_of_several(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    assert steps_off("ReduceMax", [8, 4, 5], tmp_path / "net.onnx", of_codes=False).max() > 2, REPAIRED
    assert steps_off("ReduceMax", [8, 4, 5], tmp_path / "net.onnx", of_codes=True).max() <= 1.01
