"""Normalisations written out: found in every spelling, and their interior left in float."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.normalisations import find_normalisations
from bitwright.core.placement.config import load_config
from bitwright.core.placement.place import place
from bitwright.core.placement.plan import Plan
from bitwright.core.placement.rules import Rule, default_rules
from tests.core.graphs import Build

ROW, ONE = (4, 8), (4, 1)


class Net(Build):
    """A linear layer, a normalisation of its output, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.linear(self.input(shape=ROW), "a", 8)
        self.gain, self.shift = self.param("gain", (8,)), self.param("shift", (8,))
        self.eps = self.const("eps")

    def full(self, op_type: str, *inputs: str | None, name: str, **attrs: object) -> str:
        return self.op(op_type, *inputs, name=name, shape=ROW, **attrs)

    def one(self, op_type: str, *inputs: str | None, name: str, **attrs: object) -> str:
        return self.op(op_type, *inputs, name=name, shape=ONE, **attrs)

    def finished(self, out: str) -> Graph:
        return self.graph(self.linear(out, "b"))

    def mean_of_squares(self, x: str) -> str:
        return self.one(
            "Add", self.one("ReduceMean", self.full("Mul", x, x, name="square"), name="ms"), self.eps, name="ve"
        )


def rms_by_rsqrt(n: Net) -> str:
    r = n.one("Rsqrt", n.mean_of_squares(n.x), name="r")
    return n.full("Mul", n.gain, n.full("Mul", n.x, r, name="apply"), name="end")


def rms_by_power(n: Net) -> str:
    x = n.full("Identity", n.x, name="to_float")
    square = n.full("Pow", x, None, name="square", exponent=2.0)
    r = n.one("Pow", n.one("Add", n.one("ReduceMean", square, name="ms"), None, name="ve"), name="r", exponent=-0.5)
    scaled = n.full("Identity", n.full("Mul", n.x, r, name="apply"), name="to_half")
    one_more = n.op("Add", n.gain, n.const("one"), name="one_more", shape=(8,))
    return n.full("Mul", scaled, one_more, name="end")


def rms_by_reciprocal_of_root(n: Net) -> str:
    r = n.one("Reciprocal", n.one("Sqrt", n.mean_of_squares(n.x), name="sd"), name="r")
    return n.full("Mul", n.full("Mul", n.x, r, name="apply"), n.gain, name="end")


def rms_by_one_over_root(n: Net) -> str:
    r = n.one("Div", None, n.one("Sqrt", n.mean_of_squares(n.x), name="sd"), name="r")
    return n.full("Mul", n.full("Mul", n.x, r, name="apply"), n.gain, name="end")


def rms_by_division(n: Net) -> str:
    return n.full("Div", n.x, n.one("Sqrt", n.mean_of_squares(n.x), name="sd"), name="end")


def gain_times_reciprocal_first(n: Net) -> str:
    r = n.one("Rsqrt", n.mean_of_squares(n.x), name="r")
    return n.full("Mul", n.x, n.full("Mul", r, n.gain, name="rg"), name="end")


def by_norm(n: Net) -> str:
    norm = n.one("Clip", n.one("ReduceL2", n.x, name="norm"), name="bound", min=1e-12)
    return n.full("Div", n.x, norm, name="end")


def by_sum_of_magnitudes(n: Net) -> str:
    total = n.one("ReduceSum", n.full("Abs", n.x, name="abs"), name="sum")
    return n.full("Div", n.x, n.one("Max", total, n.eps, name="bound"), name="end")


def layer_by_torch(n: Net) -> str:
    centred = n.full("Sub", n.x, n.one("ReduceMean", n.x, name="m"), name="centre")
    square = n.full("Pow", centred, None, name="square", exponent=2.0)
    sd = n.one("Sqrt", n.one("Add", n.one("ReduceMean", square, name="v"), n.eps, name="ve"), name="sd")
    return n.full("Add", n.full("Mul", n.full("Div", centred, sd, name="apply"), n.gain, name="g"), n.shift, name="end")


def layer_by_two_moments(n: Net) -> str:
    count = n.const("count")
    mean = n.one("Div", n.one("ReduceSum", n.x, n.const("axes", (1,), "int64"), name="s1"), count, name="m")
    squares = n.one("Div", n.one("ReduceSum", n.full("Mul", n.x, n.x, name="square"), name="s2"), count, name="q")
    difference = n.one("Sub", squares, n.one("Mul", mean, mean, name="mm"), name="v0")
    bounded = n.one("Max", difference, n.const("zero"), name="v")
    sd = n.one("Sqrt", n.one("Add", bounded, n.eps, name="ve"), name="sd")
    factor = n.full("Mul", n.one("Reciprocal", sd, name="r"), n.gain, name="rg")
    centred = n.full("Sub", n.x, mean, name="centre")
    return n.full("Add", n.full("Mul", centred, factor, name="apply"), n.shift, name="end")


def layer_as_scale_and_shift(n: Net) -> str:
    mean = n.one("ReduceMean", n.x, name="m")
    centred = n.full("Sub", n.x, mean, name="centre")
    variance = n.one("ReduceMean", n.full("Square", centred, name="square"), name="v")
    factor = n.full("Mul", n.one("Rsqrt", n.one("Add", variance, n.eps, name="ve"), name="r"), n.gain, name="rg")
    shift = n.full("Sub", n.shift, n.full("Mul", mean, factor, name="mm"), name="s")
    return n.full("Add", n.full("Mul", n.x, factor, name="apply"), shift, name="end")


def by_variance_and_mean(n: Net) -> str:
    n.op("Variance", n.x, name="stats", shape=ONE, outputs=2)
    sd = n.one("Sqrt", n.one("Add", "stats.output[0]", n.eps, name="ve"), name="sd")
    return n.full("Div", n.full("Sub", n.x, "stats.output[1]", name="centre"), sd, name="end")


def by_standard_deviation(n: Net) -> str:
    sd = n.one("Variance", n.x, name="sd", root=True)
    return n.full("Div", n.full("Sub", n.x, n.one("ReduceMean", n.x, name="m"), name="centre"), sd, name="end")


def in_groups(n: Net) -> str:
    parts = n.op("Reshape", n.x, name="split", shape=(4, 2, 4))
    centred = n.op("Sub", parts, n.op("ReduceMean", parts, name="m", shape=(4, 2, 1)), name="centre", shape=(4, 2, 4))
    variance = n.op(
        "ReduceMean", n.op("Mul", centred, centred, name="square", shape=(4, 2, 4)), name="v", shape=(4, 2, 1)
    )
    r = n.op("Rsqrt", n.op("Add", variance, n.eps, name="ve", shape=(4, 2, 1)), name="r", shape=(4, 2, 1))
    whole = n.full("Reshape", n.op("Mul", centred, r, name="apply", shape=(4, 2, 4)), name="join")
    return n.full("Add", n.full("Mul", whole, n.gain, name="g"), n.shift, name="end")


FORMS: list[Callable[[Net], str]] = [
    rms_by_rsqrt, rms_by_power, rms_by_reciprocal_of_root, rms_by_one_over_root, rms_by_division, gain_times_reciprocal_first,
    by_norm, by_sum_of_magnitudes, layer_by_torch, layer_by_two_moments, layer_as_scale_and_shift, by_variance_and_mean,
    by_standard_deviation, in_groups,
]  # fmt: skip


def planned(graph: Graph, *rules: Rule) -> Plan:
    return place(graph, default_rules().extended(list(rules)))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_what_a_normalisation_computes_stays_in_float(form: Callable[[Net], str]) -> None:
    net = Net()
    plan = planned(net.finished(form(net)))
    assert set(plan.sites) == {  # those of the two layers, as around a normalisation that is one operator
        "a.input[0]", "a.weight", "a.bias", "a.output[0]", "b.input[0]", "b.weight", "b.bias", "b.output[0]"
    }  # fmt: skip
    reasons = {plan.floats[v] for v in ("gain", "shift") if net.values[v].name in plan.floats and v in _read(net)}
    assert all("normalisation parameters stay in float" in reason or "no operator" in reason for reason in reasons)


def _read(net: Net) -> set[str | None]:
    return {value for op in net.ops for value in op.inputs}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_operator_of_a_normalisation_is_found(form: Callable[[Net], str]) -> None:
    net = Net()
    graph = net.finished(form(net))
    static = {v.name for v in graph.values.values() if v.is_static}
    found = find_normalisations(graph, static)
    moved = ("to_float", "to_half", "split", "one_more", "join")
    assert found.keys() | set(moved) >= {op.name for op in graph.ops} - {"a", "b"}
    assert set(found.values()) == {"end"}
    assert not found.keys() & {"a", "b"}


def test_the_coverage_says_where_a_value_of_a_normalisation_belongs() -> None:
    net = Net()
    plan = planned(net.finished(rms_by_rsqrt(net)))
    assert plan.floats["r.output[0]"] == "float: inside the normalisation that end completes"
    assert plan.floats["square.output[0]"] == "float: inside the normalisation that end completes"
    assert plan.floats["gain"] == "normalisation parameters stay in float"
    rows = {row.name: row for row in plan.coverage(net.graph())}
    assert rows["end.output[0]"].how.startswith("uint8 asymmetric per tensor, minmax at b.input[0]")


def test_a_rule_that_asks_for_a_value_of_a_normalisation_holds() -> None:
    net = Net()
    plan = planned(net.finished(rms_by_rsqrt(net)), Rule("apply", op="Mul", port="output", quantized=True))
    assert "apply.output[0]" in plan.sites
    assert "square.output[0]" not in plan.sites


def test_a_configuration_in_the_form_of_aimet_keeps_its_meaning() -> None:
    """Its defaults ask for a grid at the output of every operator; what no grid can hold is another matter."""
    net = Net()
    plan = place(net.finished(rms_by_rsqrt(net)), load_config("default"))
    assert {"square.output[0]", "apply.output[0]", "end.output[0]", "gain"} <= set(plan.sites)
    assert "ve.output[0]" not in plan.sites  # read by a reciprocal root


def test_a_gate_before_a_normalisation_keeps_its_grid() -> None:
    """Mamba-2 multiplies with a gate and normalises the product: the tensor that is normalised is as around one operator."""
    net = Net()
    gated = net.full("Mul", net.x, net.linear("x", "gate", 8), name="gated")
    net.x = gated
    plan = planned(net.finished(rms_by_rsqrt(net)))
    assert "gated.output[0]" in plan.sites
    assert "apply.output[0]" not in plan.sites


def test_what_follows_a_normalisation_is_no_part_of_it() -> None:
    net = Net()
    angles = net.const("angles", ROW)
    turned = net.full("Mul", rms_by_rsqrt(net), angles, name="turned")
    scaled = net.full("Mul", turned, net.linear("x", "scale", 8), name="scaled")
    graph = net.finished(scaled)
    found = find_normalisations(graph, {v.name for v in graph.values.values() if v.is_static})
    assert "turned" not in found
    assert "scaled" not in found
    assert "scaled.output[0]" in planned(graph).sites


def test_a_residual_sum_with_a_normalised_value_has_a_grid() -> None:
    net = Net()
    x = net.x
    plan = planned(net.finished(net.full("Add", x, rms_by_rsqrt(net), name="residual")))
    assert {"residual.output[0]", "residual.input[1]"} <= set(plan.sites)


def test_means_that_divide_nothing_have_grids() -> None:
    """Squeeze and excitation multiplies a tensor with a function of its mean."""
    net = Net()
    gate = net.one("Sigmoid", net.linear(net.one("ReduceMean", net.x, name="m"), "fc", 1), name="gate")
    plan = planned(net.finished(net.full("Mul", net.x, gate, name="excite")))
    assert {"m.output[0]", "gate.output[0]", "excite.output[0]"} <= set(plan.sites)


def test_a_mean_over_what_a_mask_leaves_is_a_statistic() -> None:
    net = Net()
    mask = net.input("mask", ONE)
    count = net.one("ReduceSum", mask, name="count")
    mean = net.one("Div", net.one("ReduceSum", net.full("Mul", net.x, mask, name="kept"), name="sum"), count, name="m")
    centred = net.full("Sub", net.x, mean, name="centre")
    kept = net.full("Mul", net.full("Square", centred, name="square"), mask, name="kept_squares")
    variance = net.one("Div", net.one("ReduceSum", kept, name="sum_2"), count, name="v")
    sd = net.one("Sqrt", net.one("Add", variance, net.eps, name="ve"), name="sd")
    graph = net.finished(net.full("Div", centred, sd, name="end"))
    found = find_normalisations(graph, {v.name for v in graph.values.values() if v.is_static})
    assert {"kept", "sum", "m", "centre", "square", "kept_squares", "v", "ve", "sd", "end"} <= found.keys()


def test_the_cosine_of_two_tensors_is_a_normalisation() -> None:
    net = Net()
    other = net.linear("x", "c", 8)
    dot = net.one("ReduceSum", net.full("Mul", net.x, other, name="products"), name="dot")
    norms = net.one("Mul", net.one("ReduceL2", net.x, name="nx"), net.one("ReduceL2", other, name="ny"), name="norms")
    graph = net.finished(net.one("Div", dot, net.one("Max", norms, net.eps, name="bound"), name="end"))
    plan = planned(graph)
    assert {"products.output[0]", "norms.output[0]", "nx.output[0]"} <= plan.floats.keys()


def test_the_search_takes_time_linear_in_the_graph() -> None:
    """A thousand normalisations in a row, each of the one before."""
    net = Net()
    for i in range(1000):
        square = net.full("Mul", net.x, net.x, name=f"square{i}")
        r = net.one("Rsqrt", net.one("ReduceMean", square, name=f"ms{i}"), name=f"r{i}")
        net.x = net.full("Mul", net.x, r, name=f"apply{i}")
    graph = net.finished(net.x)
    found = find_normalisations(graph, {v.name for v in graph.values.values() if v.is_static})
    assert len(found) == 4000


def test_a_product_reads_a_reciprocal_in_float() -> None:
    """Of anything, and not only of a statistic of the other factor: one grid has few codes for all but the largest."""
    net = Net()
    scale = net.full("Reciprocal", net.full("Abs", net.linear("x", "scale", 8), name="abs"), name="r")
    plan = planned(net.finished(net.full("Mul", net.x, scale, name="scaled")))
    assert plan.floats["r.output[0]"].startswith("float: a reciprocal made by r, large where the divisor is small")
    assert "scaled.output[0]" in plan.sites
    asked = Rule("scaled", op="Mul", port="input", quantized=True)
    assert "scaled.input[1]" in planned(net.finished("scaled.output[0]"), asked).sites


def test_a_logistic_function_written_out_is_bounded_and_has_a_grid() -> None:
    net = Net()
    e = net.full("Exp", net.full("Neg", net.linear("x", "gate", 8), name="neg"), name="e")
    gate = net.full("Div", None, net.full("Add", e, net.const("one"), name="more"), name="gate_value")
    assert "scaled.input[1]" in planned(net.finished(net.full("Mul", net.x, gate, name="scaled"))).sites


def test_squares_that_are_added_up_for_a_root_or_a_logarithm_stay_in_float() -> None:
    net = Net()
    square = net.full("Mul", net.x, net.x, name="square")
    moment = net.one(
        "Sub", net.one("ReduceMean", square, name="ms"), net.one("Square", "m.output[0]", name="mm"), name="v"
    )
    net.one("ReduceMean", net.x, name="m")
    net.ops.insert(2, net.ops.pop())  # the mean comes first
    plan = planned(net.finished(net.one("Sqrt", moment, name="deviation")))
    assert plan.floats["square.output[0]"].startswith("float: deviation needs the magnitude of sums of it")
    assert "a.output[0]" in plan.sites


def test_a_logarithm_of_a_spectrum_by_bands_reads_powers_in_float() -> None:
    net = Net()
    power = net.full("Add", net.full("Square", net.x, name="re"), net.full("Square", net.x, name="im"), name="power")
    bands = net.full("MatMul", power, net.param("filters", (8, 8)), name="bands")
    plan = planned(net.finished(net.full("Log", net.full("Add", bands, net.eps, name="more"), name="log")))
    for value in ("power.output[0]", "re.output[0]", "bands.output[0]", "a.output[0]"):
        assert plan.floats[value], value
    assert "filters" in plan.sites
