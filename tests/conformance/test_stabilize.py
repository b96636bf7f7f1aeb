"""Repairs from a diagnosis, on torch and ONNX models; quantizing group by group."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from bitwright.core.health.diagnosis import REPAIRS, Repair, headroom, propose
from bitwright.core.health.report import Culprit, HealthReport, measure_tensor
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.switching import quantize_progressively
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import check_model as onnx_check_model
from bitwright.onnx import progressive, stabilize
from bitwright.torch import QuantizationSimModel, check_model
from tests.onnx.faulty import FAULTS, HALF, head, tail
from tests.onnx.nets import Net as OnnxNet
from tests.support.sessions import integer_session
from tests.support.simulations import calibrated


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.out, self.middle = nn.Linear(8, 8), nn.Linear(8, 4), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(torch.relu(self.fc(x))))


def batches(n: int = 2) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(4, 8, generator=random) for _ in range(n)]


def simulation(middle: Callable[[Tensor], Tensor]) -> QuantizationSimModel:
    torch.manual_seed(0)
    return QuantizationSimModel(Net(middle), batches()[0])


MIDDLES = {
    "division": lambda x: x / (x.sum(-1, keepdim=True) * (x.sum(-1, keepdim=True) > 1.8)),
    "logarithm": lambda x: torch.log(x),
    "root-in-place": lambda x: x.sub(0.1).sqrt_(),
    "power": lambda x: (x - 0.2) ** 0.5,
    "exponential": lambda x: torch.exp(200 * x),
    "view-method": lambda x: torch.logit(x + 0.5),
}


@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
def test_a_repaired_simulation_calibrates_and_stays_finite(middle: Callable[[Tensor], Tensor]) -> None:
    sim = simulation(middle)
    report = _check(middle)
    assert not report.ok
    with pytest.raises(CalibrationError):
        sim.compute_encodings(batches())
    done = stabilize(sim, report)
    assert [r.op for r in sim.repairs] == [c.op for c in report.culprits] and not done.refused
    sim.compute_encodings(batches())
    assert sim.calibration_log is not None and not sim.calibration_log.clamped
    assert torch.isfinite(sim.model(batches()[0])).all()
    assert check_model(sim.model, batches()).ok


def _check(middle: Callable[[Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    return check_model(Net(middle), batches())


def test_finite_values_stay_what_they_are() -> None:
    middle = MIDDLES["logarithm"]
    sim = simulation(middle)
    stabilize(sim, _check(middle))
    sim.compute_encodings(batches())
    torch.manual_seed(0)
    model = Net(middle)
    with sim.in_float(), torch.no_grad():
        x = batches()[0]
        good = torch.log(torch.relu(model.fc(x))).isfinite().all(-1)
        assert torch.equal(sim.model(x)[good], model(x)[good])


def test_repairs_can_be_taken_back() -> None:
    middle = MIDDLES["division"]
    sim = simulation(middle)
    done = stabilize(sim, _check(middle))
    assert "div: NaN and Inf brought into" in str(done)
    done.undo()
    assert sim.repairs == ()
    with pytest.raises(CalibrationError, match="batch 0, div"):
        sim.compute_encodings(batches())


def test_a_repair_of_ones_own() -> None:
    middle = MIDDLES["logarithm"]
    sim = simulation(middle)
    stabilize(sim, repairs=[Repair("log", "clamp", -4.0, 2.0, -4.0)])
    sim.compute_encodings(batches())
    assert float(sim.quantizers["out.input[0]"].encoding.min) == pytest.approx(-4, abs=0.05)
    done = stabilize(sim, repairs=[Repair("fc", "float")])
    assert not sim.quantizers["fc.weight"].enabled
    done.undo()
    assert sim.quantizers["fc.weight"].enabled and [r.op for r in sim.repairs] == ["log"]
    with pytest.raises(ConfigError, match=r"the simulation has no operator of this name \(did you mean 'log'"):
        stabilize(sim, repairs=[Repair("logg", "clamp", -1, 1)])
    with pytest.raises(ConfigError, match="is not a repair"):
        Repair("log", "clamp", 1, -1)
    with pytest.raises(ConfigError, match="neither a report nor repairs"):
        stabilize(sim)


def test_bad_data_is_not_repaired() -> None:
    data = batches()
    data[0][1, 2] = math.nan
    torch.manual_seed(0)
    report = check_model(Net(nn.Identity()), data)
    sim = simulation(nn.Identity())
    done = stabilize(sim, report)
    assert done.repairs == () and done.refused[0].startswith("x: bad input data; clean the data")
    assert "not repaired: x" in str(done)


def test_an_overflow_leaves_room_for_what_follows() -> None:
    """A product of two numbers at the bound is finite, and what the operator made of other data stays as it is."""
    report = _check(MIDDLES["exponential"])
    (repair,) = stabilize(simulation(MIDDLES["exponential"]), report).repairs
    seen = report.culprits[0].outputs[0].max
    assert repair.hi == max(headroom("float32"), seen) and math.isfinite(np.float32(headroom("float32")) ** 2)
    y = measure_tensor("y", np.float16([-3e4, 1, np.inf]))
    culprit = Culprit("op", "Mul", "", "half-precision overflow", "", "", outputs=(y,))
    (repair,), _ = propose(HealthReport("m", (culprit,)))
    assert repair.lo == np.float16(-3e4) and repair.hi == pytest.approx(255.9, abs=0.1)


def test_a_fault_behind_another_is_found_when_the_first_is_repaired() -> None:
    def middle(x: Tensor) -> Tensor:
        return torch.log(x).sub(9).sqrt()

    sim = simulation(middle)
    data = batches()
    for op in ("log", "sqrt"):
        with sim.in_float():
            report = check_model(sim.model, data)
        assert [c.op for c in report.culprits] == [op]
        stabilize(sim, report)
    with sim.in_float():
        assert check_model(sim.model, data).ok and len(sim.repairs) == 2


def test_every_repair_answers_a_known_cause() -> None:
    from bitwright.core.health.diagnosis import REMEDIES

    assert REPAIRS.keys() <= REMEDIES.keys()


def test_repairs_go_into_the_artefact_and_its_manifest(tmp_path: Path) -> None:

    middle = MIDDLES["division"]
    sim = simulation(middle)
    stabilize(sim, _check(middle))
    sim.compute_encodings(batches())
    exported = sim.export(tmp_path, "net", batches()[0])
    manifest = json.loads(exported.manifest.read_text())
    assert manifest["settings"]["repairs"][0]["op"] == "div"
    session = integer_session(exported.qdq)
    x = batches()[1]
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    step = float(sim.quantizers["out.output[0]"].encoding.scale)
    assert torch.allclose(torch.from_numpy(y), sim.model(x).detach(), atol=1.01 * step)


# ---- group by group


def test_progressive_stops_at_the_group_that_breaks() -> None:
    class Spread(nn.Module):
        """Its middle layer has channels of very different size: 8 bits per tensor cannot hold both."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            with torch.no_grad():
                self.b.weight[0] *= 1e5
                self.c.weight[:, 0] = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(torch.relu(self.a(x))))

    torch.manual_seed(0)
    sim = calibrated(QuantizationSimModel(Spread(), batches()[0]), batches())
    found = progressive(sim, batches(1), threshold=15)
    assert found.stopped_at is not None and found.stopped_at.ops == ("b",)
    assert [step.ops for step in found.steps] == [("a",), ("relu",), ("b",)]
    assert "below 15 dB" in str(found)
    assert sim.quantizers["a.weight"].enabled and not sim.quantizers["b.output[0]"].enabled
    assert not sim.quantizers["c.weight"].enabled
    sim.quantizers["*"].enabled = True
    found = progressive(sim, batches(1), threshold=15, keep_going=True)
    assert [step.good for step in found.steps] == [True, True, False, True]
    assert sim.quantizers["c.weight"].enabled and not sim.quantizers["b.output[0]"].enabled
    with torch.no_grad(), sim.in_float():
        expected = sim.model(batches()[0])
    with torch.no_grad():
        noise = (sim.model(batches()[0]) - expected).pow(2).sum() / expected.pow(2).sum()
    assert float(noise) < 1e-2


def test_progressive_sees_what_is_not_finite() -> None:
    sim = calibrated(simulation(lambda x: 1 / (x + 1e-3)), batches())
    with torch.no_grad():
        found = progressive(sim, batches(1), threshold=-100)
    assert all(step.good or "NaN or Inf" in step.reason for step in found.steps)


def test_progressive_keeps_what_was_found_when_interrupted() -> None:
    sim = calibrated(simulation(nn.Identity()), batches())
    ops = list(dict.fromkeys(site.op for site in sim.quantizers.values()))

    calls = iter(range(10))

    def outputs() -> list[Any]:
        if next(calls) == 2:  # the reference and one group came before
            raise KeyboardInterrupt
        return [np.ones(3)]

    found = quantize_progressively(sim.quantizers, outputs)
    assert [step.ops for step in found.steps] == [(ops[0],)] and found.stopped_at is None
    assert all(site.enabled == (site.op == ops[0]) for site in sim.quantizers.values() if site.role == "weight")


def test_progressive_needs_a_calibrated_simulation_and_data() -> None:
    sim = simulation(nn.Identity())
    with pytest.raises(CalibrationError, match="the simulation has no encodings yet"):
        progressive(sim, batches())
    sim.compute_encodings(batches())
    with pytest.raises(CalibrationError, match="the data held no batch"):
        progressive(sim, [])


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


def planted(name: str) -> tuple[onnx.ModelProto, list[Any], OnnxSim]:
    model, data = PLANTED[name].build()
    return model, data, OnnxSim(model, data[0])


def run(model: onnx.ModelProto | str, feed: Any) -> list[Any]:
    session = integer_session(model)
    return list(session.run(None, {session.get_inputs()[0].name: feed}))


@pytest.mark.parametrize("name", REPAIRED)
def test_a_repaired_simulation_calibrates_and_its_files_are_healthy(name: str, tmp_path: Path) -> None:
    model, data, sim = planted(name)
    original = model.SerializeToString()
    report = onnx_check_model(model, data)
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
    assert onnx_check_model(exported.float_model, data).ok
    verified = sim.verify(data[-1])  # it compares no places inside bodies
    assert verified.ok or (name in IN_A_BODY and all(row.ok for row in verified.rows))
    assert model.SerializeToString() == original


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("kind", ["clamp", "replace"])
def test_what_becomes_of_each_kind_of_value(kind: Any, dtype: Any, tmp_path: Path) -> None:
    net = OnnxNet()
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = net.input("x", ("n", 4), code)
    net("Neg", x, name="turn", out="y")
    sim = OnnxSim(net.model(("y", code, None)), np.ones((2, 4), dtype))
    stabilize(sim, repairs=[Repair("turn", kind, -2.0, 3.0, 1.0)])
    sim.compute_encodings([np.ones((2, 4), dtype)])
    exported = sim.export(tmp_path, "net")
    (y,) = run(str(exported.float_model), np.array([[np.nan, np.inf, -np.inf, -50], [0.5, -3, 9, -0.0]], dtype))
    clamped = [[1, -2, 3, 3], [-0.5, 3, -2, 0]]
    replaced = [[1, -2, 3, 50], [-0.5, 3, -9, 0]]
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, np.array(clamped if kind == "clamp" else replaced, dtype))


def test_half_precision_is_clamped_to_what_can_be_computed_with() -> None:
    net = OnnxNet()
    h = head(net, dtype=HALF)
    model = tail(net, net("Mul", h, h, name="square"), dtype=HALF)
    data = [np.ones((2, 4), np.float16), np.full((2, 4), 1000, np.float16)]
    sim = OnnxSim(model, data[0])
    stabilize(sim, onnx_check_model(model, data))
    assert sim.repairs[0].kind == "clamp" and 255 < sim.repairs[0].hi < 256
    sim.compute_encodings(data[:1])
    assert sim.calibration_log is not None and not sim.calibration_log.clamped


def test_repairs_can_be_taken_back_onnx() -> None:
    model, data, sim = planted("division by zero")
    names = [value.name for node in sim.marked.graph.all_nodes() for value in node.outputs]
    initializers = list(sim.marked.graph.initializers)
    done = stabilize(sim, onnx_check_model(model, data))
    assert "culprit: NaN and Inf brought into" in str(done)
    sim.compute_encodings(data)
    assert np.isfinite(sim.run(data[1])[0]).all()
    done.undo()
    assert sim.repairs == ()
    assert names == [value.name for node in sim.marked.graph.all_nodes() for value in node.outputs]
    assert initializers == list(sim.marked.graph.initializers)
    with pytest.raises(CalibrationError, match="batch 1, culprit"):
        sim.compute_encodings(data)


def test_a_repair_of_ones_own_onnx() -> None:
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
    net = OnnxNet()
    h = head(net)
    net("ArgMax", h, name="best", axis=1, out="y")
    sim = OnnxSim(net.model(("y", onnx.TensorProto.INT64, None)), np.ones((2, 4), np.float32))
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
    done = stabilize(sim, onnx_check_model(model, data))
    assert done.repairs == () and sentence in str(done)


# ---- group by group


def spread() -> tuple[onnx.ModelProto, list[Any]]:
    """Its middle layer has channels of very different size: 8 bits per tensor cannot hold both."""
    net = OnnxNet()
    middle = net.random.standard_normal((4, 4))
    middle[:, 0] *= 1e5
    last = net.random.standard_normal((4, 2))
    last[0] = 0
    h = net("Relu", head(net), name="relu")
    h = net("MatMul", h, net.const(middle, "middle.w"), name="middle")
    net("MatMul", h, net.const(last, "last.w"), name="last", out="y")
    data = [np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) for i in range(2)]
    return net.model("y"), data


def test_progressive_stops_at_the_group_that_breaks_onnx() -> None:
    model, data = spread()
    sim = calibrated(OnnxSim(model, data[0]), data)
    found = progressive(sim, data[:1], threshold=15)
    assert found.stopped_at is not None and found.stopped_at.ops == ("middle",)
    assert [step.ops for step in found.steps] == [("head",), ("relu",), ("middle",)]
    assert "below 15 dB" in str(found)
    assert sim.quantizers["w_in"].enabled and not sim.quantizers["last.w"].enabled
    sim.quantizers["*"].enabled = True
    found = progressive(sim, data[:1], threshold=15, keep_going=True)
    assert [step.good for step in found.steps] == [True, True, False, True]
    assert sim.quantizers["last.w"].enabled


def test_progressive_needs_a_calibrated_simulation_and_data_onnx() -> None:
    model, data = spread()
    sim = OnnxSim(model, data[0])
    with pytest.raises(CalibrationError, match="the simulation has no encodings yet"):
        progressive(sim, data)
    sim.compute_encodings(data)
    with pytest.raises(CalibrationError, match="the data held no batch"):
        progressive(sim, [])
