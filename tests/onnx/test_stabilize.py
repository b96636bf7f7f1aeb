"""Repairs from a diagnosis on ONNX models; quantizing group by group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bitwright.core.health.diagnosis import Repair
from bitwright.errors import CalibrationError, ConfigError
from bitwright.onnx import QuantizationSimModel, check_model, progressive, stabilize
from tests.onnx.faulty import FAULTS, HALF, head, tail
from tests.onnx.nets import Net
from tests.support.sessions import integer_session

PLANTED = {fault.name: fault for fault in FAULTS}
REPAIRED = (
    "division by zero",
    "log of a negative number",
    "exp overflow",
    "NaN that a Relu hides",
    "overflow in a loop that runs while a condition holds",
    "square root between operators that only ONNX Runtime has",
    "overflow in double precision",
)
IN_A_BODY = ("overflow in a loop that runs while a condition holds",)


def planted(name: str) -> tuple[onnx.ModelProto, list[Any], QuantizationSimModel]:
    model, data = PLANTED[name].build()
    return model, data, QuantizationSimModel(model, data[0])


def run(model: onnx.ModelProto | str, feed: Any) -> list[Any]:
    session = integer_session(model)
    return list(session.run(None, {session.get_inputs()[0].name: feed}))


@pytest.mark.quick_variants(
    "division by zero", "log of a negative number", "exp overflow", "overflow in double precision"
)
@pytest.mark.parametrize("name", REPAIRED)
def test_a_repaired_simulation_calibrates_and_its_files_are_healthy(name: str, tmp_path: Path) -> None:
    model, data, sim = planted(name)
    original = model.SerializeToString()
    report = check_model(model, data)
    done = stabilize(sim, report)
    assert [r.op for r in sim.repairs] == [c.op for c in report.culprits] and not done.refused
    sim.compute_encodings(data)
    assert sim.calibration_log is not None and not sim.calibration_log.clamped
    assert all(np.isfinite(y).all() for batch in data for y in sim.run(batch))
    exported = sim.export(tmp_path, "net")
    manifest = json.loads(exported.manifest.read_text())
    assert [r["op"] for r in manifest["settings"]["repairs"]] == [r.op for r in sim.repairs]
    for batch in data:
        for file in (exported.qdq, exported.float_model):
            assert all(np.isfinite(y).all() for y in run(str(file), batch))
        for found, expected in zip(run(str(exported.qdq), batch), sim.run(batch), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-5)
    assert check_model(exported.float_model, data).ok
    verified = sim.verify(data[-1])  # it compares no places inside bodies
    assert verified.ok or (name in IN_A_BODY and all(row.ok for row in verified.rows))
    assert model.SerializeToString() == original


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("kind", ["clamp", "replace"])
def test_what_becomes_of_each_kind_of_value(kind: Any, dtype: Any, tmp_path: Path) -> None:
    net = Net()
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = net.input("x", ("n", 4), code)
    net("Neg", x, name="turn", out="y")
    sim = QuantizationSimModel(net.model(("y", code, None)), np.ones((2, 4), dtype))
    stabilize(sim, repairs=[Repair("turn", kind, -2.0, 3.0, 1.0)])
    sim.compute_encodings([np.ones((2, 4), dtype)])
    exported = sim.export(tmp_path, "net")
    (y,) = run(str(exported.float_model), np.array([[np.nan, np.inf, -np.inf, -50], [0.5, -3, 9, -0.0]], dtype))
    clamped = [[1, -2, 3, 3], [-0.5, 3, -2, 0]]
    replaced = [[1, -2, 3, 50], [-0.5, 3, -9, 0]]
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, np.array(clamped if kind == "clamp" else replaced, dtype))


def test_half_precision_is_clamped_to_what_can_be_computed_with() -> None:
    net = Net()
    h = head(net, dtype=HALF)
    model = tail(net, net("Mul", h, h, name="square"), dtype=HALF)
    data = [np.ones((2, 4), np.float16), np.full((2, 4), 1000, np.float16)]
    sim = QuantizationSimModel(model, data[0])
    stabilize(sim, check_model(model, data))
    assert sim.repairs[0].kind == "clamp" and 255 < sim.repairs[0].hi < 256
    sim.compute_encodings(data[:1])
    assert sim.calibration_log is not None and not sim.calibration_log.clamped


def test_repairs_can_be_taken_back() -> None:
    model, data, sim = planted("division by zero")
    names = [value.name for node in sim.marked.graph.all_nodes() for value in node.outputs]
    initializers = list(sim.marked.graph.initializers)
    done = stabilize(sim, check_model(model, data))
    assert "culprit: NaN and Inf brought into" in str(done)
    sim.compute_encodings(data)
    assert np.isfinite(sim.run(data[1])[0]).all()
    done.undo()
    assert sim.repairs == ()
    assert names == [value.name for node in sim.marked.graph.all_nodes() for value in node.outputs]
    assert initializers == list(sim.marked.graph.initializers)
    with pytest.raises(CalibrationError, match="batch 1, culprit"):
        sim.compute_encodings(data)


def test_a_repair_of_ones_own() -> None:
    _, data, sim = planted("log of a negative number")
    first = stabilize(sim, repairs=[Repair("culprit", "clamp", -4.0, 2.0, -4.0)])
    sim.compute_encodings(data)
    assert float(sim.quantizers["tail.input[0]"].encoding.min) == pytest.approx(-4, abs=0.05)
    assert np.isfinite(sim.run(data[1])[0]).all()
    done = stabilize(sim, repairs=[Repair("head", "float")])
    assert not sim.quantizers["w_in"].enabled
    done.undo()
    assert sim.quantizers["w_in"].enabled and [r.op for r in sim.repairs] == ["culprit"]
    assert np.isfinite(sim.run(data[1])[0]).all()
    sim.quantizers["*"].enabled = False
    assert np.isfinite(sim.run(data[1])[0]).all()
    first.undo()
    assert not np.isfinite(sim.run(data[1])[0]).all(), "a session must not outlive the repair in it"
    with pytest.raises(ConfigError, match=r"the simulation has no operator of this name \(did you mean 'culprit'"):
        stabilize(sim, repairs=[Repair("culprits", "clamp", -1, 1)])
    with pytest.raises(ConfigError, match="neither a report nor repairs"):
        stabilize(sim)


def test_an_operator_without_numbers_cannot_be_repaired() -> None:
    net = Net()
    h = head(net)
    net("ArgMax", h, name="best", axis=1, out="y")
    sim = QuantizationSimModel(net.model(("y", onnx.TensorProto.INT64, None)), np.ones((2, 4), np.float32))
    with pytest.raises(ConfigError, match="no result in float16, .*float64 that anything reads"):
        stabilize(sim, repairs=[Repair("best", "replace")])
    assert sim.repairs == ()


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("NaN in the data of a GRU", "not repaired: x: bad input data; clean the data"),
        ("LSTM whose cell grows without bound", "not repaired: culprit: overflow inside its steps; normalise"),
        ("cast to eight bits that does not saturate", "not repaired: culprit: overflow; the simulation has no result"),
    ],
)  # fmt: skip
def test_what_no_repair_can_answer_is_said(name: str, sentence: str) -> None:
    model, data, sim = planted(name)
    done = stabilize(sim, check_model(model, data))
    assert done.repairs == () and sentence in str(done)


# ---- group by group


def spread() -> tuple[onnx.ModelProto, list[Any]]:
    """Its middle layer has channels of very different size: 8 bits per tensor cannot hold both."""
    net = Net()
    middle = net.random.standard_normal((4, 4))
    middle[:, 0] *= 1e5
    last = net.random.standard_normal((4, 2))
    last[0] = 0
    h = net("Relu", head(net), name="relu")
    h = net("MatMul", h, net.const(middle, "middle.w"), name="middle")
    net("MatMul", h, net.const(last, "last.w"), name="last", out="y")
    data = [np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) for i in range(2)]
    return net.model("y"), data


def test_progressive_stops_at_the_group_that_breaks() -> None:
    model, data = spread()
    sim = QuantizationSimModel(model, data[0])
    sim.compute_encodings(data)
    found = progressive(sim, data[:1], threshold=15)
    assert found.stopped_at is not None and found.stopped_at.ops == ("middle",)
    assert [step.ops for step in found.steps] == [("head",), ("relu",), ("middle",)]
    assert "below 15 dB" in str(found)
    assert sim.quantizers["w_in"].enabled and not sim.quantizers["last.w"].enabled
    sim.quantizers["*"].enabled = True
    found = progressive(sim, data[:1], threshold=15, keep_going=True)
    assert [step.good for step in found.steps] == [True, True, False, True]
    assert sim.quantizers["last.w"].enabled


def test_progressive_needs_a_calibrated_simulation_and_data() -> None:
    model, data = spread()
    sim = QuantizationSimModel(model, data[0])
    with pytest.raises(CalibrationError, match="the simulation has no encodings yet"):
        progressive(sim, data)
    sim.compute_encodings(data)
    with pytest.raises(CalibrationError, match="the data held no batch"):
        progressive(sim, [])
