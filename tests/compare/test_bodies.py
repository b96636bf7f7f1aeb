"""What an exported model is taken apart into: bodies of If, Loop and Scan, pieces, sites that the file rounds after a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from bitwright.compare import bodies
from bitwright.compare.bodies import NO_ITERATION, NOT_TAKEN, after_pools, open_bodies, pooled_places
from bitwright.compare.drift import drift
from bitwright.compare.report import VerifyReport
from bitwright.compare.verify import verify_folder, verify_layers
from bitwright.core.numerics.granularity import PerChannel
from bitwright.errors import ExportError
from bitwright.export.artefacts import Samples
from bitwright.export.qdq.forms import METADATA, read_metadata
from bitwright.export.qdq.write import QdqResult, to_qdq
from bitwright.methods.runtime_repairs import leave_stem_in_float
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.torch import QuantizationSimModel as TorchSim
from tests.export.marked import Array, Graph, simulate
from tests.onnx import flow
from tests.onnx.nets import BOOL, FLOAT, INT64, Net, body, feeds_for, loop_step
from tests.support.cost import steps
from tests.support.simulations import calibrated

Feeds = dict[str, np.ndarray]


def counted_loop() -> onnx.ModelProto:
    """``trip`` times ``v = relu(v W)``; the last one is returned, and all of them."""
    net = Net(seed=7)
    x, trip = net.input("x", (2, 4)), net.input("trip", (), INT64)
    inner = Net(seed=8)
    v = inner("Relu", inner("MatMul", "v_in", inner.weights(4, 4, name="W"), name="product"), name="act", out="v_out")
    each = inner("Identity", v, out="each")
    step = loop_step((v, FLOAT, (2, 4)), (each, FLOAT, (2, 4)), net=inner, v_in=(2, 4))
    last, all_ = net("Loop", trip, net.const(np.bool_(True), "yes"), x, name="loop", out=["last", "all"], body=step)
    return net.model(net("MatMul", all_, net.weights(4, 2, name="V"), name="head", out="y"), last)


def backward_scan() -> onnx.ModelProto:
    """From the last step to the first, along axis 1; what the steps make is stacked the other way round, along axis 1."""
    net = Net(seed=7)
    x = net.input("x", (2, 5, 3))
    inner = Net(seed=8)
    summed = inner("Add", inner("MatMul", "x_t", inner.weights(3, 4, name="W"), name="ih"), "h_in", name="sum")
    h = inner("Tanh", summed, name="tanh", out="h_out")
    step = body(h, inner("Identity", h, name="copy", out="h_each"), net=inner,
                inputs=[("h_in", FLOAT, (2, 4)), ("x_t", FLOAT, (2, 3))])  # fmt: skip
    last, each = net(
        "Scan", net.const(np.zeros((2, 4)), "start"), x, name="rnn", out=["last", "each"], body=step,
        num_scan_inputs=1, scan_input_axes=[1], scan_input_directions=[1],
        scan_output_axes=[1], scan_output_directions=[1],
    )  # fmt: skip
    return net.model(net("MatMul", each, net.weights(4, 2, name="V"), name="head", out="y"), last)


def nested_loops() -> onnx.ModelProto:
    """Twice: a branch, and in it three times ``v = relu(v W)``."""
    net = Net(seed=7)
    x, choose = net.input("x", (2, 4)), net.input("choose", (), BOOL)
    w = net.weights(4, 4, name="W")
    inner, middle, then, other = Net(seed=8), Net(), Net(), Net()
    v = inner("Relu", inner("MatMul", "v_in", w, name="product"), name="act", out="v_out")
    step = loop_step(v, net=inner, v_in=(2, 4))
    count, yes = then.const(np.int64(3), "count"), then.const(np.bool_(True), "yes")
    graphs = {
        "then_branch": body(then("Loop", count, yes, "u_in", name="inner", out="looped", body=step), net=then),
        "else_branch": body(other("MatMul", "u_in", w, name="other", out="turned"), net=other),
    }
    u = middle("If", choose, name="choice", out="u_out", **graphs)
    still = middle("Identity", "still_in", out="still_out")
    outer = body((still, BOOL, ()), u, net=middle,
                 inputs=[("j", INT64, ()), ("still_in", BOOL, ()), ("u_in", FLOAT, (2, 4))])  # fmt: skip
    twice, always = net.const(np.int64(2), "twice"), net.const(np.bool_(True), "always")
    return net.model(net("Loop", twice, always, x, name="outer", out="y", body=outer))


def alternating(length: int | str = 4, turns: int = 4) -> onnx.ModelProto:
    """Four times ``v = v + relu(v A)`` and ``v = v + tanh(v B)`` in turn, each in a branch."""
    net = Net(seed=7)
    x = net.input("x", (2, length))
    inner, then, other = Net(seed=8), Net(seed=9), Net(seed=10)
    odd = inner("Mod", "i", inner.const(np.int64(2), "two"), out="odd")
    first = inner("Equal", odd, inner.const(np.int64(0), "zero"), out="first")
    graphs = {
        "then_branch": body(then("Relu", then("MatMul", "v_in", then.weights(4, 4, name="A"), name="a"), name="relu",
                                 out="made"), net=then),
        "else_branch": body(other("Tanh", other("MatMul", "v_in", other.weights(4, 4, name="B"), name="b"), name="tanh",
                                  out="other_made"), net=other),
    }  # fmt: skip
    v = inner("Add", inner("If", first, name="choice", out="chosen", **graphs), "v_in", name="sum", out="v_out")
    step = loop_step((v, FLOAT, (2, length)), net=inner, v_in=(2, length))
    count, yes = net.const(np.int64(turns), "count"), net.const(np.bool_(True), "yes")
    last = net("Loop", count, yes, x, name="loop", out="last", body=step)
    return net.model(net("MatMul", last, net.weights(4, 2, name="V"), name="head", out="y"))


@pytest.mark.parametrize("turns", [4, 1], ids=["both", "one branch"])
def test_branches_that_iterations_take_in_turn_are_calibrated_and_compared(turns: int) -> None:
    model = alternating(turns=turns)
    data = [{"x": np.random.default_rng(i).standard_normal((2, 4)).astype(np.float32)} for i in range(4)]
    sim = calibrated(QuantizationSimModel(model, data[0]), data[:3], allow_unreached=turns == 1)
    for site, wanted in (("relu.output[0]", True), ("b.output[0]", turns > 1)):
        encoding = sim.quantizers[site].encoding
        assert (encoding is not None) == wanted
        assert not wanted or np.isfinite(encoding.scale).all() and float(encoding.max) > 0.1
    report = sim.verify(data[3])
    assert report.ok and report.outputs[0].as_float > 100
    assert sum(row.site.startswith("relu.output[0]") for row in report.rows) == -(-turns // 2)


def test_a_branch_in_a_loop_is_compared_where_the_batch_says_what_lengths_are_free() -> None:
    data = [{"x": np.random.default_rng(i).standard_normal((2, 4)).astype(np.float32)} for i in range(2)]
    sim = calibrated(QuantizationSimModel(alternating("n"), data[0]), data)
    report = sim.verify(data[1])
    assert report.ok and not report.unchecked, str(report)
    assert sum(row.site.startswith("relu.output[0]") for row in report.rows) == 2


def loop_in_one_branch() -> onnx.ModelProto:
    """``trip`` times ``v = relu(v W)`` in one branch; no site in the other."""
    net = Net(seed=7)
    x, choose, trip = net.input("x", (2, 4)), net.input("choose", (), BOOL), net.input("trip", (), INT64)
    h = net("MatMul", x, net.weights(4, 4, name="U"), name="first", out="h")
    inner, then, other = Net(seed=8), Net(), Net()
    v = inner("Relu", inner("MatMul", "v_in", inner.weights(4, 4, name="W"), name="product"), name="act", out="v_out")
    step = loop_step(v, net=inner, v_in=(2, 4))
    yes = then.const(np.bool_(True), "yes")
    graphs = {
        "then_branch": body(then("Loop", trip, yes, h, name="loop", out="looped", body=step), net=then),
        "else_branch": body(other("Flatten", h, name="flat", out="flat"), net=other),
    }
    out = net("If", choose, name="choice", out="chosen", **graphs)
    return net.model(net("MatMul", out, net.weights(4, 2, name="V"), name="last", out="y"))


def prepared(build: Callable[[], onnx.ModelProto], **given: Any) -> tuple[QuantizationSimModel, Feeds]:
    """A simulation that has seen both branches, and feeds.

    Weights have 7 bits: sums of 8-bit ones saturate inside bodies on CPUs without VNNI, whatever the session's settings.
    """
    proto = build()
    data = []
    for seed in range(4):
        feeds = feeds_for(proto, seed)
        if "choose" in feeds:
            feeds["choose"] = np.array(seed % 2 == 0)
        if "trip" in feeds:
            feeds["trip"] = np.array(4)
        data.append(feeds)
    sim = calibrated(QuantizationSimModel(proto, data[0], threads=1, default_param_bw=7), data)
    return sim, {**data[0], **{name: np.array(value) for name, value in given.items()}}


def exported(sim: QuantizationSimModel, feeds: Feeds) -> tuple[QdqResult, Samples]:
    result = to_qdq(sim.marked, sim._encodings(), bias="int32")
    return result, sim._sample(result, feeds)


def verified(result: QdqResult, samples: Samples) -> VerifyReport:
    return verify_layers(result.model, samples.sites, samples.inputs, outputs=samples.outputs)


RUNS = {  # model -> feeds, a site in a body, how often it runs
    "branch": (flow.branches, {"choose": True}, "product_1.output[0]", 1),
    "other-branch": (flow.branches, {"choose": False}, "product.output[0]", 1),
    "two-results": (flow.two_results, {"choose": True}, "tanh0.output[0]", 1),
    "scan": (flow.scan, {}, "tanh.output[0]", 5),
    "backward-scan": (backward_scan, {}, "tanh.output[0]", 5),
    "loop": (counted_loop, {"trip": 4}, "act.output[0]", 4),
    "loop-once": (counted_loop, {"trip": 1}, "act.output[0]", 1),
    "loop-in-branch": (flow.loop, {"choose": True}, "act.output[0]", 3),
    "nested": (nested_loops, {"choose": True}, "act.output[0]", 6),
    "handed-on": (flow.handed_on, {}, "tanh.output[0]", 10),
    "nested-other": (nested_loops, {"choose": False}, "other.output[0]", 2),
}


@pytest.mark.parametrize("build, given, site, count", RUNS.values(), ids=RUNS)
def test_every_run_in_a_body_is_compared(build, given, site, count):
    sim, feeds = prepared(build, **given)
    report = sim.verify(feeds)
    assert report.ok and not report.unchecked, str(report)
    assert sorted(row.run for row in report.rows if row.site == site) == list(range(count))
    seen = {row.site for row in report.rows}
    activations = {s.name for s in sim.quantizers.values() if s.role in ("input", "output") and s.enabled}
    assert seen | set(report.idle) >= activations and not seen & set(report.idle)
    assert all(min(end.as_float, end.as_integer) > 40 for end in report.outputs)


@pytest.mark.parametrize("build, given, site, count", RUNS.values(), ids=RUNS)
def test_the_model_laid_open_computes_the_same(build, given, site, count):
    from bitwright.compare.runtime import run_model

    result, samples = exported(*prepared(build, **given))
    text = str(result.model.graph)
    opened = open_bodies(result.model, samples.sites)
    assert str(result.model.graph) == text, "the caller's model is left alone"
    assert not [node for node in opened.model.graph.all_nodes() if node.op_type in ("If", "Loop", "Scan")]
    names = [str(value.name) for node in opened.model.graph for value in node.outputs if value.name]
    assert len(names) == len(set(names))
    expected = run_model(result.model, samples.inputs, "float")
    found = run_model(opened.model, {**samples.inputs, **opened.feeds}, "float")
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert np.allclose(array, found[name], atol=1e-6), name


@pytest.mark.parametrize("where", ["outside", "state"])
def test_float_weights_of_a_body_are_no_constants_there(where):
    """ONNX Runtime quantizes a float weight by itself in a main graph, but none that a body reads from outside."""
    net, inner = Net(seed=7), Net()
    x = net.input("x", (5, 1, 8))
    w, b = net.weights(8, 12, name="W"), net.weights(12, name="b")
    read = "w_in" if where == "state" else w
    h = inner("Gemm", "x_t", read, b, name="ih", out="h_each")
    changed = inner("Neg", "w_in", out="w_out")
    step = body(changed, h, net=inner, inputs=[("w_in", FLOAT, (8, 12)), ("x_t", FLOAT, (1, 8))])
    last, each = net("Scan", w, x, name="rnn", out=["last", "each"], body=step, num_scan_inputs=1)
    proto = net.model(each)
    data = [feeds_for(proto, seed) for seed in range(3)]
    sim = QuantizationSimModel(proto, data[0], threads=1)
    sim.quantizers["ih.input[1]" if where == "state" else "W"].enabled = False
    sim.compute_encodings(data, progress=False)
    report = sim.verify(data[0])
    assert report.ok and {row.kernel for row in report.rows if row.ops == ("Gemm",)} == {"float"}, str(report)


def test_a_branch_that_was_not_taken_did_not_run_and_is_no_failure():
    sim, feeds = prepared(flow.two_results, choose=True)
    report = sim.verify(feeds)
    assert report.ok and report.idle == dict.fromkeys(
        ("product1.input[0]", "product1.output[0]", "tanh1.output[0]"), NOT_TAKEN
    )
    assert "did not run: tanh1.output[0]: its branch was not taken" in str(report)
    assert '"idle": {' in report.to_json()


def test_a_loop_without_iterations_did_not_run():
    sim, feeds = prepared(counted_loop, trip=0)
    report = sim.verify(feeds)
    assert report.idle["act.output[0]"] == NO_ITERATION and not report.unchecked, str(report)


@pytest.mark.parametrize("given, idle", [
    ({"choose": True, "trip": 0}, NO_ITERATION), ({"choose": False, "trip": 3}, NOT_TAKEN),
])  # fmt: skip
def test_a_branch_with_an_idle_loop_is_told_from_one_not_taken(given, idle):
    sim, feeds = prepared(loop_in_one_branch, **given)
    report = sim.verify(feeds)
    assert report.idle["act.output[0]"] == idle and report.ok, str(report)


def test_the_run_whose_value_differs_is_named():
    result, samples = exported(*prepared(counted_loop, trip=4))
    (values,) = samples.sites["act.output[0]"]
    values[2] += 3 * np.float32(result_scale(result, "act.output[0]"))
    report = verified(result, samples)
    wrong = {(row.site, row.run) for row in report.rows if not row.ok}
    # and what is fed with it: the next iteration, and what reads all of them
    assert wrong == {("act.output[0]", 2), ("product.input[0]", 3), ("head.output[0]", 0)}


def result_scale(result: QdqResult, site: str) -> np.ndarray:
    noted = (read_metadata(node) for node in result.model.graph.all_nodes())
    facts = next(f for f in noted if f is not None and f["places"][0][0] == site)
    return result.model.graph.initializers[facts["scale"]].const_value.numpy()


def test_borders_keep_quantizers_apart_as_in_the_file():
    """Two grids, one in the branch and one behind it: the runtime would join them where nothing stands between."""
    sim, feeds = prepared(flow.branches, choose=True)
    rows = {row.site: row for row in sim.verify(feeds).rows}
    assert rows["last.input[0]"].as_float.lsb < 1e-3 and rows["last.input[0]"].ops == ()
    assert rows["product_1.output[0]"].kernel == "float", "what enters a branch is a float"
    assert rows["last.output[0]"].kernel == "QLinearMatMul"


def test_what_does_not_depend_on_the_iteration_is_there_once():
    result, samples = exported(*prepared(counted_loop, trip=4))
    opened = open_bodies(result.model, samples.sites).model.graph
    products = [node for node in opened if node.op_type == "MatMul" and str(node.name).startswith("product")]
    assert len(products) == 4
    assert len({node.inputs[1] for node in products}) == 1
    assert sum(value.const_value.size == 16 for value in opened.initializers.values()) == 1, "W"


def test_values_that_do_not_tell_what_ran_leave_a_body_as_it_is(monkeypatch):
    result, samples = exported(*prepared(counted_loop, trip=4))
    first, second = samples.sites["product.input[0]"][0], samples.sites["act.output[0]"][0]
    inside = "it lies inside the body of If, Loop or Scan"
    for sites in ({}, {"product.input[0]": [first[:3]], "act.output[0]": [second]}):
        report = verify_layers(result.model, sites, samples.inputs)
        assert report.unchecked["act.output[0]"] == inside and not report.ok
    monkeypatch.setattr(bodies, "_MOST_NODES", 10)
    assert verified(result, samples).unchecked["act.output[0]"] == inside


def test_a_loop_whose_tensors_change_shape_is_not_compared(caplog):
    """``v`` is twice as long after every iteration."""
    net, inner = Net(seed=7), Net(seed=8)
    x = net.input("x", (2, 4))
    v = inner("Concat", "v_in", inner("Relu", inner("MatMul", "v_in", inner.weights(4, 4, name="W"), name="p")),
              axis=0, out="v_out")  # fmt: skip
    step = loop_step((v, FLOAT, (None, 4)), net=inner, v_in=(None, 4))
    count, yes = net.const(np.int64(3), "count"), net.const(np.bool_(True), "yes")
    proto = net.model(net("Loop", count, yes, x, name="loop", out="y", body=step))
    sim = calibrated(QuantizationSimModel(proto, feeds_for(proto, 0), threads=1))
    report = sim.verify()
    assert "what bodies make cannot be brought out of them" in caplog.text
    assert set(report.unchecked.values()) == {"it lies inside the body of If, Loop or Scan"}
    assert report.ok and report.outputs[0].as_float > 100, "what could not be compared leads to outputs that are equal"
    count = len(report.unchecked)
    assert f", {count} could not be compared, and the outputs are equal: ok" in report.answer
    apart = replace(report, outputs=tuple(replace(end, as_float=50.0) for end in report.outputs))
    assert not apart.ok and f", {count} could not be compared: NOT ok" in apart.answer


def test_an_exported_folder_verifies_bodies_too(tmp_path):
    sim, _ = prepared(flow.scan)
    sim.export(tmp_path, "net")
    report = verify_folder(tmp_path)
    assert report.ok and max(row.run for row in report.rows) == 4


def test_cost_is_linear_in_the_iterations():
    def cost(trip: int) -> int:
        result, samples = exported(*prepared(counted_loop, trip=trip))
        return steps(lambda: open_bodies(result.model, samples.sites))

    one, two, four = (cost(n) for n in (20, 40, 80))
    assert four - two < 2.3 * (two - one)


def test_the_kernel_is_what_computed_and_not_what_moved_its_codes() -> None:
    """ONNX Runtime puts a product of three axes between two Reshapes; one of floats is quantized in front of the second."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    sim = TorchSim(net.eval(), x)
    sim.quantizers["3.output[0]"].enabled = False  # the product behind it reads floats
    sim.compute_encodings([x])
    kernels = {row.site: row.kernel for row in sim.verify(x).rows}
    assert kernels["0.output[0]"] == "QGemm" and kernels["4.output[0]"] == "float"
    sim.quantizers["3.output[0]"].enabled = True
    sim.quantizers["2.output[0]"].enabled = False  # the integer product ends in floats
    sim.compute_encodings([x])
    assert {row.site: row.kernel for row in sim.verify(x).rows}["3.output[0]"] == "QGemm"


FEEDS = {"x": np.random.default_rng(5).normal(size=(2, 1, 12, 10)).astype(np.float32)}
SITE = "relu.output[0]"


def net(pools: int = 1) -> tuple[ir.Model, Graph]:
    g = Graph()
    weight = g.weight(g.param("first.weight", (4, 1, 5, 5)), granularity=PerChannel(0))
    conv = g.op("Conv", g.input("x", 2, 1, 12, 10), weight, g.param("first.bias", (4,)), pads=[2] * 4)
    value = g.mark(g.op("Relu", conv, name="relu"), SITE, data=(0, 9))
    for _ in range(pools):
        value = g.op("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    second = g.op("Conv", value, g.weight(g.param("second.weight", (3, 4, 3, 3))), name="second")
    return g.model(g.mark(second, "second.output[0]", data=(-9, 9), name="y")), g


def file_and_values(pools: int = 1) -> tuple[ir.Model, dict[str, list[Array]], dict[str, Array]]:
    model, g = net(pools)
    values, outputs = simulate(model, g.encodings, FEEDS)
    return to_qdq(model, g.encodings, target="ort_cpu").model, values, outputs


@pytest.mark.parametrize("pools", [1, 2])
def test_every_site_is_judged(pools: int) -> None:
    model, values, outputs = file_and_values(pools)
    report = verify_layers(model, values, FEEDS, outputs=outputs)
    assert report.ok and not report.unchecked, str(report)
    (row,) = [row for row in report.rows if row.site == SITE]
    assert row.ops == ("Conv", "Relu", *["MaxPool"] * pools) and row.kernel == "float"
    assert {row.site for row in report.rows} == values.keys()
    assert values[SITE][0].shape == (2, 4, 12, 10), "the simulation's values are left as they are"


def test_values_are_those_of_the_pools() -> None:
    model, values, _ = file_and_values(2)
    assert [len(pools) for pools in pooled_places(model).values()] == [2]
    (found,) = after_pools(model, values)[SITE]
    x = torch.from_numpy(values[SITE][0])
    expected = nn.functional.max_pool2d(nn.functional.max_pool2d(x, 3, 2, 1), 3, 2, 1)
    np.testing.assert_array_equal(found, expected.numpy())


def test_a_wrong_scale_is_seen() -> None:
    model, values, _ = file_and_values()
    scale = next(v for name, v in model.graph.initializers.items() if name.startswith("maxpool") and "scale" in name)
    assert scale.const_value is not None
    scale.const_value = ir.Tensor(scale.const_value.numpy() * np.float32(1.02), name=scale.name)
    report = verify_layers(model, values, FEEDS)
    assert [row.ok for row in report.rows if row.site == SITE] == [False], str(report)


def test_values_of_other_inputs_are_refused() -> None:
    model, values, _ = file_and_values()
    with pytest.raises(ExportError, match="has shape"):
        verify_layers(model, {**values, SITE: [values[SITE][0][:1]]}, FEEDS)


def test_values_that_no_pool_takes_do_not_agree() -> None:
    model, values, _ = file_and_values()
    report = verify_layers(model, {**values, SITE: [values[SITE][0].reshape(2, -1)]}, FEEDS)
    assert not report.ok and report.failures, str(report)


@pytest.mark.parametrize("number", ["7", '"many"'])
def test_damaged_notes_are_an_error(number: str) -> None:
    model, values, _ = file_and_values()
    for node in model.graph:
        text = node.metadata_props.get(METADATA, "")
        node.metadata_props[METADATA] = text.replace('"pooled":1', f'"pooled":{number}')
    with pytest.raises(ExportError, match="damaged"):
        verify_layers(model, values, FEEDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a module whose first convolution is in float, for two targets."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    ).eval()  # fmt: skip
    x, path = torch.randn(1, 1, 98, 90), tmp_path_factory.mktemp("export")
    model(x)
    sim = TorchSim(model, x, config_file={"recurrent": "boundary_only"})
    assert leave_stem_in_float(sim).layers
    sim.compute_encodings([x])
    for target in ("ort_cpu", "openvino_cpu"):
        sim.export(path, target, x, target=target)
    return path


def test_a_module_is_verified_from_its_folder(folder: Path) -> None:
    report = verify_folder(folder, "ort_cpu")
    assert report.ok and not report.unchecked, str(report)
    assert {row.site for row in report.rows} == {row.site for row in verify_folder(folder, "openvino_cpu").rows}
    assert report.outputs[0].as_integer > 40


@pytest.mark.parametrize("sides", [("simulation", "file"), ("float", "file"), ("simulation", "onnxruntime")])
def test_drift_compares_what_is_pooled(folder: Path, sides: tuple[str, str]) -> None:
    report = drift(f"{folder}@{sides[0]}", f"{folder}@{sides[1]}", prefix="ort_cpu")
    names = {row.name for row in report.rows}
    assert "1.output[0], pooled" in names, names


def test_drift_of_two_files_that_round_at_different_places(folder: Path) -> None:
    report = drift(str(folder / "openvino_cpu.onnx"), str(folder / "ort_cpu.onnx"))
    assert report.rows and all(row.own.equal == row.carried.equal == 1 for row in report.rows), str(report)
