"""Calibration: whole batches enter the statistics or none of a batch does; loops of the user's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from bitwright import onnx as onnx_front
from bitwright import torch as torch_front
from bitwright.core.health.report import Culprit, HealthReport
from bitwright.core.numerics.serialize import spec_from_json, spec_to_json
from bitwright.core.numerics.spec import QuantSpec, RangeMethod, activation_spec
from bitwright.core.numerics.statistics import bounds_of
from bitwright.core.placement.rules import Rule
from bitwright.core.simulation.calibration import BatchGate, arrays_in, samples_in, slice_samples
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.core.simulation.sites import SiteMap
from bitwright.errors import CalibrationError, ConfigError

NAN, INF = np.nan, np.inf
CLEAN = [np.float32([1, -2, 3]), np.float32([0.5, 9, -1])]
BAD = np.float32([100, NAN, -INF])


def quantizers(method="minmax", **facets):
    spec = activation_spec(method=RangeMethod(method), **facets)
    return [Quantizer("a", "output", spec), Quantizer("b", "output", activation_spec(method=RangeMethod(method)))]


def calibrate(found, batches, policy, diagnose=None):
    """Site ``a`` sees every batch as it is, site ``b`` sees it doubled and always clean."""
    gate = BatchGate(found, policy, diagnose)
    for batch in batches:
        gate.open(batch)
        found[0].observe(batch)
        found[1].observe(np.nan_to_num(batch, posinf=0, neginf=0) * 2)
        gate.close()
    log = gate.finish()
    for quantizer in found:
        quantizer.freeze()
    return log


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse", "entropy"])
def test_skip_drops_the_whole_batch_at_every_site(method):
    found, clean = quantizers(method), quantizers(method)
    log = calibrate(found, [CLEAN[0], BAD, CLEAN[1]], "skip")
    calibrate(clean, CLEAN, "error")
    assert [q.encoding for q in found] == [q.encoding for q in clean]
    assert log.skipped == [1] and log.clamped == [] and log.batches == 3
    assert log.lines() == [
        "1 of 3 batches left out, because they hold values that are not finite: batch 1, first at a (1 NaN, 1 -Inf)"
    ]


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse", "entropy"])
def test_clamp_takes_the_finite_part(method):
    found, finite = quantizers(method), quantizers(method)
    log = calibrate(found, [CLEAN[0], BAD], "clamp")
    calibrate(finite, [CLEAN[0], np.float32([100])], "error")
    assert found[0].encoding == finite[0].encoding
    assert log.clamped == [1]
    bounds = bounds_of(found[0].statistics)
    assert (int(bounds.nan_count), int(bounds.pos_inf_count), int(bounds.neg_inf_count)) == (1, 0, 1)


def test_error_stops_at_the_batch_and_keeps_it_out():
    found = quantizers()
    with pytest.raises(CalibrationError, match=r"batch 1, a: the values are not finite: a \(1 NaN, 1 -Inf\)"):
        calibrate(found, [CLEAN[0], BAD, CLEAN[1]], "error")
    assert bounds_of(found[0].statistics).hi == 3 and bounds_of(found[1].statistics).hi == 6


def test_error_tells_what_the_doctor_found():
    culprit = Culprit("neck.div", "Div", "neck", "division by zero", "the divisor n holds 2 zeros", "add an epsilon",
                      source="net.py:7: y = x / n", sample=3)  # fmt: skip
    seen = []

    def diagnose(batch):
        seen.append(batch)
        return HealthReport("Net", (culprit,))

    with pytest.raises(
        CalibrationError,
        match=r"batch 0, neck\.div: Div made values that are not finite of sample 3: the divisor n holds 2 zeros, "
        r"at net\.py:7: y = x / n; the first quantizer to see it is a .*add an epsilon; or calibrate with "
        r"non_finite='skip'",
    ):
        calibrate(quantizers(), [BAD], "error", diagnose)
    assert len(seen) == 1 and seen[0] is BAD


def test_what_the_doctor_finds_harmless_is_clamped():
    found = quantizers()
    log = calibrate(found, [CLEAN[0], BAD], "error", lambda batch: HealthReport("Net"))
    assert log.clamped == [1] and bounds_of(found[0].statistics).hi == 100


@pytest.mark.parametrize("policy", ["skip", "clamp"])
@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_the_order_of_batches_does_not_matter(policy, method):
    batches = [*CLEAN, BAD, np.float32([INF, -7, 0]), np.float32([NAN] * 3)]
    encodings = []
    for order in itertools.permutations(batches):
        found = quantizers(method)
        calibrate(found, order, policy)
        encodings.append([q.encoding for q in found])
    assert all(pair == encodings[0] for pair in encodings)
    assert all(np.isfinite(q.scale) and q.scale > 0 for q in encodings[0])


def test_a_site_may_have_its_own_policy_and_the_strictest_one_decides():
    found = quantizers(non_finite="skip")
    assert calibrate(found, [CLEAN[0], BAD], "clamp").skipped == [1]
    found = quantizers(non_finite="clamp")
    assert calibrate(found, [CLEAN[0], BAD], "error").clamped == [1]
    found = quantizers(non_finite="error")
    with pytest.raises(CalibrationError, match="batch 1, a"):
        calibrate(found, [CLEAN[0], BAD], "skip")


@pytest.mark.parametrize("policies", list(itertools.permutations(["error", "skip", "clamp"], 2)), ids="-".join)
def test_the_strictest_policy_of_several_sites_decides(policies):
    """Both sites see values that are not finite in the same batch."""
    found = [
        Quantizer(name, "output", activation_spec(non_finite=policy))
        for name, policy in zip("ab", policies, strict=True)
    ]
    gate = BatchGate(found, "clamp")
    for batch in (CLEAN[0], BAD):
        gate.open(batch)
        for quantizer in found:
            quantizer.observe(batch)
        if batch is BAD and "error" in policies:
            with pytest.raises(CalibrationError, match="batch 1, a"):
                gate.close()
            assert all(bounds_of(q.statistics).hi == 3 for q in found)
            return
        gate.close()
    assert (gate.log.skipped, gate.log.clamped) == ([1], [])


def test_all_batches_left_out_is_an_error():
    with pytest.raises(CalibrationError, match=r"all 2 batches were left out.* first at a \(1 NaN, 1 -Inf\)"):
        calibrate(quantizers(), [BAD, BAD], "skip")


def test_an_interrupted_batch_is_taken_back():
    found = quantizers()
    gate = BatchGate(found, "error")
    gate.open()
    found[0].observe(CLEAN[0])
    gate.close()
    gate.open()
    found[0].observe(np.float32([1e6]))
    gate.abandon()
    assert bounds_of(found[0].statistics).hi == 3


def test_a_batch_that_nobody_closed_is_closed_by_the_next():
    found = quantizers()
    gate = BatchGate(found, "skip")
    for batch in (BAD, CLEAN[0]):
        gate.open()
        found[0].observe(batch)
    assert gate.finish().skipped == [0] and bounds_of(found[0].statistics).hi == 3


def test_empty_tensors_leave_no_trace():
    found = quantizers()
    gate = BatchGate(found, "error")
    gate.open()
    found[0].observe(np.zeros((0, 3), np.float32))
    assert gate.close() and found[0].statistics is None


def test_the_policy_is_a_facet_of_specs_and_rules():
    spec = QuantSpec(non_finite="skip")
    assert spec_from_json(spec_to_json(spec)) == spec
    assert spec_from_json(spec_to_json(QuantSpec())) == QuantSpec()
    assert str(Rule("conv1", non_finite="clamp")) == "Rule('conv1', non_finite='clamp')"
    with pytest.raises(ConfigError, match=r"'skipp' is not a policy for NaN and Inf \(did you mean 'skip'"):
        QuantSpec(non_finite="skipp")
    with pytest.raises(ConfigError, match="'drop' is not a policy"):
        Rule("conv1", non_finite="drop")


BATCHES = [np.random.default_rng(i).normal(size=(4, 6)).astype(np.float32) * (i + 1) for i in range(6)]
Run = Callable[[Any, Any], None]


def torch_sim() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return torch_front.QuantizationSimModel(model.train(), torch.ones(4, 6), quant_scheme="tf_enhanced")


def onnx_sim() -> Any:
    graph = onnx.parser.parse_graph("main (float[N, 6] x) => (float[N, 8] y) { h = MatMul(x, w)  y = Relu(h) }")
    weight = np.random.default_rng(7).normal(size=(6, 8)).astype(np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    return onnx_front.QuantizationSimModel(model, quant_scheme="tf_enhanced")


def run_torch(model: Any, batch: Any) -> None:
    model(torch.from_numpy(batch))


def run_onnx(session: Any, batch: Any) -> None:
    session.run(None, {"x": batch})


@pytest.fixture(params=[(torch_sim, run_torch), (onnx_sim, run_onnx)], ids=["torch", "onnx"])
def front(request: Any) -> tuple[Any, Run]:
    make, run = request.param
    return make(), run


def encodings(sim: Any) -> dict[str, Any]:
    return {name: site.encoding for name, site in sim.quantizers.items()}


def test_block_finds_what_a_call_finds_and_freezes_once(front, monkeypatch):
    sim, run = front
    sim.compute_encodings(lambda model: [run(model, batch) for batch in BATCHES])
    expected, frozen, plain = encodings(sim), [], SiteMap.freeze_activations
    monkeypatch.setattr(SiteMap, "freeze_activations", lambda self: (frozen.append(1), plain(self))[1])
    with sim.calibrating() as model:
        for batch in BATCHES:
            run(model, batch)
        assert not frozen
    assert frozen == [1]
    assert encodings(sim) == expected and sim.calibrated


def test_resumed_block_adds_to_the_statistics(front):
    sim, run = front
    sim.compute_encodings(lambda model: [run(model, batch) for batch in BATCHES])
    expected = encodings(sim)
    for part, resume in ((BATCHES[:2], False), (BATCHES[2:], True)):
        with sim.calibrating(resume=resume) as model:
            for batch in part:
                run(model, batch)
    assert encodings(sim) == expected


def test_block_that_fails_leaves_the_earlier_encodings(front):
    sim, run = front
    sim.compute_encodings(lambda model: run(model, BATCHES[0]))
    expected = encodings(sim)
    with pytest.raises(ZeroDivisionError), sim.calibrating() as model:
        run(model, BATCHES[3])
        raise ZeroDivisionError
    with pytest.raises(CalibrationError, match=r"did not run in the block.*inside the block"), sim.calibrating():
        pass
    assert encodings(sim) == expected and sim.calibrated
    with sim.calibrating() as model:  # and another one can start
        run(model, BATCHES[3])
    assert encodings(sim) != expected


def test_block_inside_of_another_is_refused_and_the_outer_one_goes_on(front):
    sim, run = front
    sim.compute_encodings(lambda model: [run(model, batch) for batch in BATCHES[:2]])
    expected = encodings(sim)
    with sim.calibrating() as model:
        run(model, BATCHES[0])
        with pytest.raises(CalibrationError, match="being calibrated already"):
            sim.compute_encodings(lambda other: run(other, BATCHES[5]))
        run(model, BATCHES[1])
    assert encodings(sim) == expected


def test_interrupted_block_keeps_what_it_saw(front, caplog):
    sim, run = front
    sim.compute_encodings(lambda model: run(model, BATCHES[2]))
    expected = encodings(sim)
    with pytest.raises(KeyboardInterrupt), sim.calibrating() as model:
        run(model, BATCHES[2])
        raise KeyboardInterrupt
    assert encodings(sim) == expected and "resume=True" in caplog.text


def test_torch_modules_get_their_training_flags_back():
    sim = torch_sim()
    sim.model.train()
    with sim.calibrating() as model:
        assert not model.training and not torch.is_grad_enabled()
        run_torch(model, BATCHES[0])
    assert sim.model.training and torch.is_grad_enabled()


def test_session_of_an_ended_calibration_is_refused():
    sim = onnx_sim()
    with sim.calibrating() as session:
        run_onnx(session, BATCHES[0])
    with pytest.raises(CalibrationError, match=r"has ended"):
        run_onnx(session, BATCHES[0])


@pytest.mark.parametrize(
    "batch, count",
    [(np.zeros((7, 2)), 7), ((np.zeros((3, 2)), 1), 3), ({"x": np.zeros((5,))}, 5), (np.float32(1), 1), ([], 1)],
)
def test_samples_are_counted_on_the_first_axis(batch, count):
    assert samples_in(batch) == count


@pytest.mark.parametrize(
    "batch, part",
    [
        (np.arange(6), np.array([2, 3])),
        ((np.arange(6), np.ones((6, 2))), (np.array([2, 3]), np.ones((2, 2)))),
        ({"x": np.arange(6)}, {"x": np.array([2, 3])}),
        ([np.arange(6), np.arange(5)], None),  # of other lengths
        ((np.arange(6), np.float32(1)), None),  # a value without samples
        ((np.arange(6), [np.arange(6)]), None),
        ([], None),
    ],
)
def test_samples_of_a_batch_are_sliced(batch, part):
    found = slice_samples(batch, 2, 4)
    assert type(found) is type(part)
    for x, y in zip(arrays_in(found), arrays_in(part), strict=True):
        np.testing.assert_array_equal(x, y)
