"""Health: what tensors hold and statistics tell of a site, which operator is reported, and why."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.core.health.diagnosis import CASES, REMEDIES, diagnose, remedy
from bitwright.core.health.report import (
    Culprit,
    Flags,
    HealthReport,
    Tracker,
    check_parameters,
    first_non_finite,
    measure_tensor,
    site_health,
)
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.statistics import measure, start
from bitwright.errors import CalibrationError
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

NAN, INF = np.nan, np.inf
BAD_NAN, BAD_INF, MASK, CLEAN = Flags(nan=True), Flags(pos_inf=True), Flags(neg_inf=True), Flags()


# ---- measuring


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_measure_counts_what_is_there(make):
    x = np.float32([[0, 2, NAN], [-3, INF, -INF]])
    health = measure_tensor("x", make(x))
    assert (health.nan, health.pos_inf, health.neg_inf, health.zeros) == (1, 1, 1, 1)
    assert (health.min, health.max, health.smallest) == (-3, 2, 2)
    assert health.first_bad == (0, 2) and health.shape == (2, 3) and health.size == 6
    assert str(health) == ("x float32[2, 3]: in [-3, 2], 1 of 6 NaN, 1 of 6 +Inf, 1 of 6 -Inf, first at [0, 2], 1 zero")


def test_halves_show_what_they_lost():
    health = measure_tensor("h", torch.tensor([65504.0, 1e-7, 0.0, 1.0]).half())
    assert (health.subnormals, health.saturated, health.zeros) == (1, 1, 1)
    assert measure_tensor("b", torch.tensor([1e-40], dtype=torch.bfloat16)).subnormals == 1
    assert measure_tensor("f", np.float32([1e-40])).subnormals == 0, "only halves are watched for it"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_limits_of_halves_are_those_of_the_type(dtype):
    limits = torch.finfo(dtype)
    least = torch.tensor([limits.smallest_normal, limits.smallest_normal / 2, 0.0], dtype=dtype)
    assert measure_tensor("x", least).subnormals == 1
    last = torch.tensor([limits.max, limits.max / 2, -limits.max], dtype=dtype)
    assert measure_tensor("x", last).saturated == 2


@pytest.mark.parametrize("count", [7, 8, 9])
def test_of_many_bad_parameters_eight_are_shown(count):
    bad = tuple(measure_tensor(f"p{i}", A([NAN]), "param") for i in range(count))
    lines = HealthReport("model", bad_params=bad).text().splitlines()
    assert len([line for line in lines if line.startswith("  p")]) == min(count, 8)
    assert [line for line in lines if "more" in line] == (["  and 1 more"] if count == 9 else [])


@pytest.mark.parametrize("x", [3, 2.5, True, np.zeros((0, 3)), np.int8([1]), torch.zeros(0), torch.tensor([True])])
def test_anything_can_be_measured(x):
    assert measure_tensor("x", x).finite


def test_the_first_bad_element_is_found():
    assert first_non_finite(np.float32([[1, 2], [3, 4]])) is None
    assert first_non_finite(torch.tensor([[1, 2], [3, 4]])) is None
    index, value = first_non_finite(torch.tensor([[1.0, 2.0], [NAN, INF]]))
    assert index == (1, 0) and np.isnan(value)
    assert first_non_finite(np.full((2, 2), 3e38, np.float32)) is None, "a sum that overflows is not a NaN"
    assert first_non_finite(torch.full((9,), 3e38)) is None


def test_a_bad_parameter_is_refused_with_its_index():
    bad = np.zeros((2, 3), np.float32)
    bad[1, 2] = -INF
    check_parameters({"fine": np.ones(3, np.float32)})
    with pytest.raises(CalibrationError, match=r"fc\.weight: the parameter .* the first -inf at index \[1, 2\]\."):
        check_parameters({"fine": np.ones(3, np.float32), "fc.weight": bad})
    with pytest.raises(CalibrationError, match=r"so do 2 more: b, c"):
        check_parameters({"a": bad, "b": bad, "c": bad})


# ---- causes

A = np.float32


def health(name, values, kind="activation"):
    return None if values is None else measure_tensor(name, values, kind)


CAUSES = {
    "div": ("Div", {}, [A([1, 2]), A([0, 1])], "division by zero", "the divisor b holds 1 zero"),
    "div-tiny": ("Div", {}, [A([1e30]), A([1e-30])], "division by zero", "comes down to 1e-30"),
    "div-number": ("Div", {}, [A([1.0]), 0], "division by zero", "holds 1 zero"),
    "reciprocal": ("Reciprocal", {}, [A([0.0])], "division by zero", "the divisor a holds 1 zero"),
    "sqrt": ("Sqrt", {}, [A([-1e-3])], "root of a negative number", "comes down to -0.001"),
    "rsqrt-zero": ("Rsqrt", {}, [A([0, 1])], "reciprocal root of zero", "the argument a holds 1 zero"),
    "rsqrt-negative": ("Rsqrt", {}, [A([-1])], "root of a negative number", "comes down to -1"),
    "log": ("Log", {}, [A([0, 1])], "logarithm of a non-positive number", "comes down to 0"),
    "log1p": ("Log1p", {}, [A([-1])], "logarithm of a non-positive number", "comes down to -1"),
    "exp": ("Exp", {}, [A([120])], "exponential overflow", "a reaches 120, and the exponential overflows float32 above 88.7"),
    "pow-zero": ("Pow", {}, [A([0]), -1], "division by zero", "holds 1 zero, raised to -1"),
    "pow-negative": ("Pow", {}, [A([-8]), 0.5], "power out of domain", "comes down to -8, raised to 0.5"),
    "softmax-dead-row": ("Softmax", {}, [A([[-INF, -INF], [1, 2]])], "every element of a row is masked", "2 of 4 elements"),
    "batch-norm": (
        "BatchNormalization", {"epsilon": 1e-5}, [A([1]), A([1]), A([0]), A([0]), A([-1])],
        "negative variance", "the variance e comes down to -1",
    ),
    "batch-norm-zero": (
        "BatchNormalization", {"epsilon": 0.0}, [A([1]), A([1]), A([0]), A([0]), A([0])],
        "zero variance", "holds 1 zero, and epsilon is 0",
    ),
    "layer-norm": ("LayerNormalization", {"epsilon": 0.0}, [A([1, 1])], "zero variance", "epsilon is 0"),
    "acos": ("Acos", {}, [A([1.5])], "argument out of domain", r"needs \[-1, 1\]"),
    "empty-mean": ("ReduceMean", {}, [np.zeros((2, 0), A)], "reduction over nothing", "has no element to reduce"),
    "variance-of-one": ("var", {}, [A([[1]])], "reduction over nothing", "0 / 0"),
    "zero-times-inf": ("Mul", {}, [A([INF]), A([0])], "zero times infinity", "a holds 1 Inf, and b holds 1 zero"),
    "inf-minus-inf": ("Sub", {}, [A([INF]), A([INF])], "infinity minus infinity", "which cancel out"),
    "overflow": ("Mul", {}, [A([1e30]), A([1e30])], "overflow", "the result passes 3.403e"),
    "unknown": ("Floor", {}, [A([1])], "unknown", "finite inputs became 1 NaN"),
}  # fmt: skip


@pytest.mark.parametrize("op, attrs, operands, cause, problem", CAUSES.values(), ids=CAUSES)
def test_the_cause_follows_from_operator_and_operands(op, attrs, operands, cause, problem):
    ports = [health("abcde"[i], x) for i, x in enumerate(operands)]
    made = (
        A([INF]) if "overflow" in cause or "tiny" in problem or problem.startswith("comes down to 1e-30") else A([NAN])
    )
    found = diagnose(op, attrs, ports, [health("y", made)])
    assert found.cause == cause
    assert re.search(problem, found.problem), found.problem
    assert found.remedy == remedy(cause)


def test_a_zero_without_an_infinity_is_not_blamed():
    """Sums that overflow to both sides."""
    x, w = A([[0, 3e38, 3e38, -3e38, -3e38]]), A([[1], [2], [2], [2], [2]])
    operands = [health("a", x), health("b", w)]
    for ordered in (operands, operands[::-1]):
        found = diagnose("MatMul", {}, ordered, [measure_tensor("y", A([[NAN]]))])
        assert found.cause != "zero times infinity", found.problem


def test_half_overflow_tells_the_magnitude_that_was_needed():
    x = measure_tensor("x", np.float16([300]))
    y = measure_tensor("y", np.float16([INF]))
    assert diagnose("Mul", {}, [x, x], [y]).problem == "the result reaches 9e+04, and float16 ends at 65504"
    assert diagnose("MatMul", {}, [x, x], [y], needed=2.5e6).problem.startswith("the result reaches 2.5e+06")
    assert "a sum inside it passes 65504" in diagnose("MatMul", {}, [x, x], [y]).problem
    cast = diagnose("Identity", {}, [measure_tensor("x", A([1e6]))], [y])
    assert cast.cause == "half-precision overflow" and "1e+06" in cast.problem


def test_what_comes_in_is_blamed_before_the_operator():
    bad = measure_tensor("w", A([NAN, 1]), "param")
    found = diagnose("Div", {}, [measure_tensor("x", A([1])), bad], [measure_tensor("y", A([NAN]))])
    assert found.cause == "bad parameter" and "w holds 1 NaN and 0 Inf, the first at [0]" in found.problem
    found = diagnose("Log", {}, [measure_tensor("x", A([INF]), "input")], [measure_tensor("y", A([NAN]))])
    assert found.cause == "bad input data"
    found = diagnose("empty", {"uninitialised": True}, [], [measure_tensor("y", A([NAN]))])
    assert found.cause == "uninitialised memory"
    assert diagnose("full", {}, [], [measure_tensor("y", A([-INF]))]).cause == "mask constant"
    assert diagnose("full", {}, [], [measure_tensor("y", A([NAN]))]).cause == "NaN constant"


def test_every_cause_has_a_remedy_and_every_remedy_a_cause():
    from bitwright.core.health import diagnosis

    named = {cause for cases in (*CASES.values(), diagnosis._FIRST, diagnosis._LAST) for cause, _ in cases}
    assert named | {"unknown"} == REMEDIES.keys()


@pytest.mark.parametrize("cause", REMEDIES)
def test_remedies_speak_the_language_of_the_model(cause):
    """In words that fit any model; then in calls for PyTorch, in nodes for ONNX."""
    words, in_torch, in_onnx = (remedy(cause, front) for front in (None, "torch", "onnx"))
    assert in_torch.startswith(words) and in_onnx.startswith(words)
    of_torch = re.compile(r"torch|\w\.\w+\(|masked_fill|log1p|logsumexp|eps=|correction=")
    assert not of_torch.search(words) and not of_torch.search(in_onnx), in_onnx
    assert not re.search(r"\b(Max|Min|Clip|Where|Cast|Add) node", in_torch), in_torch


# ---- which operator is reported


def follow(*calls, outputs=()):
    """A tracker that was told ``(op, type, [(key, flags)], [(key, flags)])`` and asked about outputs."""
    tracker = Tracker()
    for call in calls:
        tracker.call(*call)
    for key, flags in outputs:
        tracker.output("out", key, flags)
    return tracker


def test_the_first_that_made_it_is_accused_and_the_rest_is_spread():
    tracker = follow(
        ("div", "Div", [("x", CLEAN), ("z", CLEAN)], [("a", BAD_INF)]),
        ("sub", "Sub", [("a", BAD_INF), ("a", BAD_INF)], [("b", BAD_NAN)]),
        ("relu", "Relu", [("b", BAD_NAN)], [("c", BAD_NAN)]),
        outputs=[("c", BAD_NAN)],
    )
    (event,) = tracker.reported
    assert (event.op, event.spread, event.names, event.reached) == ("div", 2, ["sub", "relu"], ["out"])


def test_a_mask_before_a_softmax_is_none_and_a_dead_row_is_one():
    mask = ("fill", "MaskedFill", [("x", CLEAN)], [("m", MASK)])
    fine = follow(mask, ("softmax", "Softmax", [("m", MASK)], [("y", CLEAN)]), outputs=[("y", CLEAN)])
    assert not fine.reported and fine.events[0].meant
    dead = follow(mask, ("softmax", "Softmax", [("m", MASK)], [("y", BAD_NAN)]), outputs=[("y", BAD_NAN)])
    assert [event.op for event in dead.reported] == ["softmax"]
    shown = follow(mask, outputs=[("m", MASK)])
    assert not shown.reported, "the author returns the mask"


def test_what_is_masked_out_before_use_is_harmless():
    log = ("log", "Log", [("x", CLEAN)], [("a", BAD_NAN)])
    assert not follow(log, ("where", "Where", [("a", BAD_NAN)], [("y", CLEAN)]), outputs=[("y", CLEAN)]).reported
    chosen = follow(log, ("argmax", "argmax", [("a", BAD_NAN)], [("y", CLEAN)]), outputs=[("y", CLEAN)])
    assert [event.op for event in chosen.reported] == ["log"], "an index chosen among NaN is wrong"


def test_an_overflow_that_a_division_hides_is_a_fault_and_a_sigmoid_by_hand_is_none():
    hidden = follow(
        ("square", "Mul", [("x", CLEAN)], [("a", BAD_INF)]), ("rsqrt", "Rsqrt", [("a", BAD_INF)], [("y", CLEAN)])
    )
    assert [event.op for event in hidden.reported] == ["square"]
    sigmoid = follow(
        ("exp", "Exp", [("x", CLEAN)], [("a", BAD_INF)]),
        ("add", "Add", [("a", BAD_INF)], [("b", BAD_INF)]),
        ("div", "Div", [("one", CLEAN), ("b", BAD_INF)], [("y", CLEAN)]),
    )
    assert not sigmoid.reported


def test_bad_data_is_a_source_and_a_mask_among_the_inputs_is_none():
    tracker = Tracker()
    assert tracker.source("x", "x", "input", BAD_NAN).meant is False
    assert tracker.source("m", "mask", "input", MASK).meant is True
    tracker.call("add", "Add", [("x", BAD_NAN), ("m", MASK)], [("y", BAD_NAN)])
    tracker.output("out", "y", BAD_NAN)
    assert [(event.op, event.op_type) for event in tracker.reported] == [("x", "input")]


def test_memory_that_is_overwritten_is_forgotten():
    tracker = follow(("empty", "empty", [], [("b", BAD_NAN)]), ("fill", "copy", [("x", CLEAN)], [("b", CLEAN)]))
    assert tracker.events and not tracker.busy


# ---- the report


def test_the_report_reads_well_and_travels_as_json():
    x, zero, y = (measure_tensor(n, A(v)) for n, v in (("x", [1, 2]), ("n", [0, 1]), ("y", [INF, 2])))
    finding = diagnose("Div", {}, [x, zero], [y])
    culprit = Culprit(
        "head.div", "Div", "head", *finding, source="net.py:12: y = x / n", batch=3, sample=0,
        inputs=(x, zero), outputs=(y,), spread=9, spread_names=tuple("abcdefgh"), reached=("output",),
    )  # fmt: skip
    report = HealthReport("Net", (culprit,), batches=4, calls=20)
    assert not report.ok and report.exit_code == 1 and report.culprit is culprit
    assert str(report).splitlines()[:5] == [
        "Net: not healthy (4 batches, 20 calls)",
        "1. head.div (Div): the divisor n holds 1 zero",
        "   at net.py:12: y = x / n",
        "   in head",
        "   first in batch 3, sample 0",
    ]
    assert "carried on by 9 operators: a, b, c, d, e, f, g, h and 1 more" in str(report)
    document = json.loads(report.to_json())
    assert document["culprits"][0]["inputs"][1]["zeros"] == 1 and document["ok"] is False
    healthy = HealthReport("Net")
    assert healthy.ok and healthy.exit_code == 0 and healthy.culprit is None


@pytest.mark.parametrize(
    ("epsilon", "cause"), [(0.0, "zero variance"), (1e-5, "unknown"), (0.5, "unknown"), (None, "unknown")]
)
def test_rows_without_a_variance_are_the_cause_where_nothing_is_added_to_it(epsilon: float | None, cause: str) -> None:
    attrs = {} if epsilon is None else {"epsilon": epsilon}
    row, nan = measure_tensor("x", np.ones((2, 4))), measure_tensor("y", np.full((2, 4), np.nan))
    found = diagnose("LayerNormalization", attrs, [row], [nan])
    assert found.cause == cause
    if cause != "unknown":
        assert found.problem == "epsilon is 0, and a group of x has no variance"


@pytest.mark.parametrize("kind", ["minmax", "histogram"])
def test_channels_that_are_zero_or_constant_are_counted(kind):
    x = np.float32([[0, 0, 0], [2, 2, 2], [1, np.nan, np.inf], [-1, 1, -np.inf]])
    found = site_health("w", measure(kind, x, PerChannel(0)))
    assert (found.groups, found.zero, found.constant) == (4, (0,), (1, 2))
    assert (found.count, found.nan, found.pos_inf, found.neg_inf) == (9, 1, 1, 1)
    assert (found.lo, found.hi) == (-1, 2)


@pytest.mark.parametrize(
    "values, dtype, note",
    [
        ([0.0, 65504.0], "float16", "it reaches the largest number of float16"),
        ([0.0, 3e-6], "float16", "all its values are below the smallest normal number of float16"),
        ([0.0, 0.0], "float32", "it is zero throughout"),
        ([3.0, 3.0], "float32", "it is constant"),
        ([np.nan, np.nan], "float32", "no finite value was seen"),
    ],
)
def test_notes(values, dtype, note):
    found = site_health("s", measure("minmax", np.array(values, dtype), PerTensor()), dtype)
    assert note in found.notes and note in str(found)


def test_a_healthy_site_has_none():
    found = site_health("s", measure("minmax", np.float32([-1, 2])))
    assert found.notes == () and str(found) == "s: in [-1, 2]"
    assert "no finite value was seen" in site_health("s", start("minmax")).notes


def test_a_simulation_reports_its_sites():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight[2] = 0
        model[2].weight[:], model[2].bias[:] = 0, 0
    sim = calibrated(QuantizationSimModel(model, torch.randn(3, 4)), [torch.randn(8, 4)])
    found = {health.site: health for health in sim.health()}
    assert found["0.weight"].notes == ("1 of 6 channels is zero throughout: 2",)
    assert found["2.weight"].zero == (0, 1) and found["2.output[0]"].notes == ("it is zero throughout",)
    assert found["0.input[0]"].notes == () and found["0.input[0]"].count == 32


def test_empty_tensors_are_counted():
    assert site_health("s", measure("minmax", np.float32([-1, 2])), empty=2).notes == ("2 empty tensors",)

    class Rows(nn.Module):
        """A layer on the rows that a condition finds."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x):
            return self.layer(x[x[:, 0] > 0])

    some = torch.cat([torch.randn(8, 4).abs(), -torch.ones(2, 4)])
    sim = calibrated(QuantizationSimModel(Rows(), some), [some, -some.abs()])
    found = {health.site: health for health in sim.health()}
    assert found["layer.input[0]"].notes == ("1 empty tensor",) and found["layer.input[0]"].count == 32
    assert found["layer.weight"].empty == 0
    sim.compute_encodings([some])
    assert not any(health.empty for health in sim.health()), "a new calibration starts from nothing"


class Parts(nn.Module):
    """Two layers with an input each."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.a(x), self.b(y)


def test_an_empty_tensor_in_a_batch_that_is_left_out_is_not_counted():
    sim = QuantizationSimModel(Parts(), (torch.randn(3, 4), torch.randn(3, 4)))
    good, bad, none = torch.randn(3, 4), torch.full((3, 4), torch.nan), torch.zeros(0, 4)
    sim.compute_encodings([(good, good), (bad, none), (good, none)], non_finite="skip")
    found = {health.site: health for health in sim.health()}
    assert found["b.input[0]"].empty == 1 and found["a.input[0]"].empty == 0


def test_channels_of_an_activation_with_one_scale_are_named_with_their_layer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)).eval()
    with torch.no_grad():
        net[1].bias[:11] = -100
        net[1].weight[[12, 15]], net[1].bias[[12, 15]] = 0, 0.5
    sim = calibrated(QuantizationSimModel(net, torch.randn(2, 3, 6, 6)), [torch.randn(4, 3, 6, 6) for _ in range(3)])
    found = {health.site: health for health in sim.health()}
    assert found["2.output[0]"].notes == (
        "11 of 16 channels of 1 are zero throughout: 0, 1, 2, 3, 4, 5, 6, 7 and 3 more",
        "2 of 16 channels of 1 are constant: 12, 15",
    )
    assert found["2.output[0]"].groups == 16 and found["4.output[0]"].notes == ()
    sim.quantizers["0.weight"].spec = replace(sim.quantizers["0.weight"].spec, granularity=PerTensor())
    sim.compute_encodings([torch.randn(4, 3, 6, 6)])
    assert {h.site: h.groups for h in sim.health()}["0.weight"] == 16, "weights with one scale are looked at too"


class Paths(nn.Module):
    """Two layers whose outputs are joined, and so have one encoding; each has another dead channel."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1)
        with torch.no_grad():
            self.a.weight[0], self.a.bias[0] = 0, -1
            self.b.weight[2], self.b.bias[2] = 0, -1

    def forward(self, x):
        return torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1)


def test_sites_that_share_an_encoding_have_channels_of_their_own():
    torch.manual_seed(0)
    sim = calibrated(QuantizationSimModel(Paths(), torch.randn(2, 2, 3, 3)), [torch.randn(2, 2, 3, 3)])
    zero = {health.site: health.zero for health in sim.health() if health.zero}
    assert zero["relu.output[0]"] == (0,) and zero["relu_1.output[0]"] == (2,)


def test_a_batch_that_is_left_out_tells_nothing_of_channels():
    sim = QuantizationSimModel(Parts(), (torch.randn(3, 4), torch.randn(3, 4)))
    same, other, bad = torch.ones(3, 4), torch.randn(3, 4), torch.full((3, 4), torch.nan)
    sim.compute_encodings([(bad, other), (other, same), (bad, other)], non_finite="skip")
    found = {health.site: health for health in sim.health()}
    assert found["b.input[0]"].constant == (0, 1, 2, 3) and not found["a.input[0]"].constant


def test_what_was_seen_is_brought_back():
    class Rows(nn.Module):
        """Two layers; the rows of the second may be none, as of a cache that is still empty."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x), self.second(rows)

    some, none = torch.ones(2, 4), torch.zeros(0, 4)
    sim = calibrated(QuantizationSimModel(Rows(), (torch.randn(3, 4), torch.randn(3, 4))), [(some, some), (some, none)])
    before = sim.health()
    (found,) = [row for row in before if row.empty and row.notes[0] == "it is constant"]
    assert found.empty == 1 and found.notes == ("it is constant", "1 empty tensor")
    restore = sim.quantizers.remember()
    sim.compute_encodings([(torch.randn(8, 4), torch.randn(8, 4))])
    assert sim.health() != before
    restore()
    assert sim.health() == before


def test_a_simulation_in_half_precision_reports_saturation_and_underflow():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).half()
    with torch.no_grad():
        net[0].weight[:], net[0].bias[:] = torch.eye(2), 0
        net[2].weight[:], net[2].bias[:] = 0, 1e-6
    sim = QuantizationSimModel(net, torch.ones(3, 2, dtype=torch.half))
    sim.compute_encodings([torch.tensor([[65504.0, 1.0]], dtype=torch.half)])
    found = {health.site: health for health in sim.health()}
    assert found["0.input[0]"].saturated and found["0.input[0]"].dtype == "float16"
    assert found["2.output[0]"].underflow and not found["2.output[0]"].saturated
