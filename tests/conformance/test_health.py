"""The doctors of both front ends on models with a planted fault, and on models that only look faulty."""

from __future__ import annotations

import json
import logging
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import bitwright.onnx
import bitwright.torch
from bitwright.core.health.diagnosis import remedy
from bitwright.core.numerics.ranges import RANGE_METHODS
from bitwright.core.numerics.spec import RangeMethod
from bitwright.errors import CalibrationError
from bitwright.onnx import check_model as onnx_check
from bitwright.torch.calls.inputs import as_call, flatten_tensors
from tests.support.health_zoo import FAULTS, LOOK_ALIKES, check


def params(table):
    return [pytest.param(front, case, id=f"{front}: {case.name}") for front, cases in table.items() for case in cases]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("front, case", params(FAULTS))
def test_the_planted_operator_is_named(front, case):
    report = check(front, case)
    culprit = report.culprit
    assert culprit is not None and not report.ok and report.exit_code == 1, report
    assert case.op in f"{culprit.where} {culprit.op}" if front == "torch" else case.op == culprit.op, report
    assert culprit.cause == case.cause and culprit.remedy == remedy(case.cause, front), report
    assert case.where in culprit.where and case.problem in culprit.problem, report
    assert case.line in (culprit.source or ""), report
    assert case.batch is None or culprit.batch == case.batch, report
    assert case.sample is None or culprit.sample == case.sample, report
    assert json.loads(report.to_json())["culprits"][0]["op"] == culprit.op


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("front, case", params(FAULTS))
def test_what_is_repaired_is_finite(front, case):
    model, data = case.build()
    tools = bitwright.onnx if front == "onnx" else bitwright.torch
    report = tools.check_model(model, data, progress=False)
    sim = tools.QuantizationSimModel(model, data[0])
    done = tools.stabilize(sim, report)
    assert bool(done.repairs) != bool(done.refused), "every fault is repaired or refused, and one is planted"
    if not done.repairs or case.name in SEVERAL:
        return
    sim.compute_encodings(data, progress=False, non_finite="clamp", allow_unreached=True)
    for batch in data:
        for y in outputs(sim, batch):
            assert np.isfinite(y).all()


SEVERAL = ("two faults, of which the first is to be named first",)  # the second shows when the first is repaired


def outputs(sim, batch):
    """Floating-point outputs of a simulation of either front end."""
    if isinstance(sim, bitwright.onnx.QuantizationSimModel):
        return [np.asarray(y, np.float64) for y in sim.run(batch)]
    args, kwargs = as_call(batch)
    with torch.no_grad():
        return [t.double().numpy() for _, t in flatten_tensors(sim.model(*args, **kwargs)) if t.is_floating_point()]


@pytest.mark.parametrize("front, case", params(LOOK_ALIKES))
def test_what_only_looks_like_a_fault_is_not_accused(front, case):
    report = check(front, case)
    assert report.ok and report.exit_code == 0, report


@pytest.mark.parametrize(
    "name",
    [
        "softmax without its maximum taken off",
        "a row that is masked throughout",
        "batch norm with negative variance",
        "half-precision norm that becomes zero",
    ],
)
def test_a_model_and_its_export_are_diagnosed_alike(name):
    """Operator, cause, batch and sample; where the exporter writes the same operator."""
    case = next(case for case in FAULTS["torch"] if case.name == name)
    model, batches = case.build()
    calls = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, calls[0], dynamo=True, verbose=False, optimize=False)
    assert program is not None
    ours = check("torch", case).culprit
    theirs = onnx_check(program.model_proto, [tuple(x.numpy() for x in call) for call in calls]).culprit
    for field in ("op_type", "cause", "batch", "sample"):
        assert getattr(ours, field) == getattr(theirs, field)


def test_there_are_as_many_cases_as_promised():
    assert sum(map(len, FAULTS.values())) >= 50 and min(map(len, FAULTS.values())) >= 25
    assert min(map(len, LOOK_ALIKES.values())) >= 12
    for cases in (*FAULTS.values(), *LOOK_ALIKES.values()):
        assert len({case.name for case in cases}) == len(cases)


# ---- encodings from spoilt data


class Shares(nn.Module):
    """A division that makes NaN and Inf of some rows, and a layer with a dead channel."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.first.weight[2], self.first.bias[2] = 0, -1

    def forward(self, x):
        return self.last(torch.relu(self.first(x / x.abs().amax(-1, keepdim=True))))


def spoilt():
    """Clean, twice as large, with a NaN, with a row of zeros (0 / 0), with an infinity."""
    random = np.random.default_rng(0)
    data = [random.standard_normal((5, 6)).astype(np.float32) * scale for scale in (1, 2, 1, 1, 1)]
    data[2][1, 2], data[3][0], data[4][2, 2] = np.nan, 0, -np.inf
    return data


@pytest.fixture(scope="module")
def simulations():
    """How to simulate the same network in either front end, with a range method."""
    torch.manual_seed(0)
    model, x = Shares().eval(), torch.ones(5, 6)
    rows = torch.export.Dim("rows")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, dynamic_shapes=({0: rows},))
    assert program is not None
    return {
        "torch": lambda method: bitwright.torch.QuantizationSimModel(model, x, method),
        "onnx": lambda method: bitwright.onnx.QuantizationSimModel(program.model_proto, x.numpy(), method, threads=1),
    }


@pytest.mark.parametrize("method", RANGE_METHODS)
@pytest.mark.parametrize("policy", ["skip", "clamp"])
@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_spoilt_data_give_the_same_encodings_in_any_order(simulations, front, policy, method):
    """Finite, with scales above zero; and the same health, dead channels included."""
    data, found = spoilt(), []
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [3, 0, 2, 1, 4], [2, 4, 0, 3, 1]):
        sim = simulations[front](RangeMethod(method))
        give = torch.from_numpy if front == "torch" else np.asarray
        sim.compute_encodings([give(data[i]) for i in order], progress=False, non_finite=policy)
        log = sim.calibration_log
        assert len(log.skipped if policy == "skip" else log.clamped) == 3
        found.append(({name: site.encoding for name, site in sim.quantizers.items()}, sim.health()))
    encodings, health = found[0]
    for encoding in encodings.values():
        assert encoding is None or (np.isfinite(encoding.scale).all() and (encoding.scale > 0).all())
    assert all(others == encodings for others, _ in found)
    assert all(told == health for _, told in found)
    assert any(site.zero == (2,) and site.groups == 8 for site in health) or policy == "clamp"


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_the_default_stops_at_the_first_batch_that_is_not_finite(simulations, front):
    data = [torch.from_numpy(x) if front == "torch" else x for x in spoilt()]

    def given(*batches):
        for batch in batches:
            taken.append(batch)
            yield batch

    for first in (2, 3, 4):
        taken = []
        sim = simulations[front](RangeMethod("minmax"))
        with pytest.raises(CalibrationError, match=r"^batch 2, "):
            sim.compute_encodings(given(data[0], data[1], data[first], data[0]), progress=False)
        assert len(taken) == 3 and not sim.calibrated and sim.calibration_log is None
