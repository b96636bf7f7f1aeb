"""Bodies of If, Loop and Scan: calibrated over all their runs, quantized, exported, and reached by methods."""

from __future__ import annotations

import logging
import re

import numpy as np
import onnx
import pytest

from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx import apply_reconstruction, quantize
from bitwright.onnx import program as steps
from bitwright.onnx.program import OnnxSimulation
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.recipes.site_cost import output_errors
from tests.onnx import flow
from tests.onnx.nets import BOOL, FLOAT, INT64, Net, body, feeds_for, run

MODELS = [flow.branches, flow.scan, flow.loop, flow.two_results, flow.handed_on]


def batches(proto, seeds=range(6)):
    """Feeds that take both branches in turn."""
    found = []
    for seed in seeds:
        feeds = feeds_for(proto, seed)
        if "choose" in feeds:
            feeds["choose"] = np.array(seed % 2 == 0)
        found.append(feeds)
    return found


def calibrated(build, **options):
    proto = build()
    data = batches(proto)
    sim = QuantizationSimModel(proto, data[0], **options)
    sim.compute_encodings(data)
    return proto, data, sim


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_simulation_is_near_the_model_and_not_the_model(build):
    proto, data, sim = calibrated(build)
    pairs = [pair for feeds in data for pair in zip(run(proto, feeds), sim.run(feeds), strict=True)]
    ratios = [sqnr(expected, found) for expected, found in pairs]
    assert min(ratios) > 20
    assert min(ratios) < 80, "a branch without a layer is exact; the others are on grids"


def weights_of(proto):
    return {i.name: onnx.numpy_helper.to_array(i) for i in proto.graph.initializer}


def test_weights_that_enter_a_loop_as_states_are_weights(caplog):
    proto, _, sim = calibrated(flow.handed_on)
    for name, role in {"W": "weight", "R": "weight", "b": "bias"}.items():
        assert sim.quantizers[name].role == role and sim.quantizers[name].encoding is not None
    assert np.array_equal(sim.constants["R"], weights_of(proto)["R"])
    assert "never reached" not in caplog.text


def test_states_of_a_scan_are_calibrated_over_all_steps():
    proto, data, sim = calibrated(flow.scan)
    held = {name: sim.quantizers[name].encoding for name in ("ih.output[0]", "ih.input[0]")}
    x = np.concatenate([feeds["x"] for feeds in data]).reshape(-1, 3)
    step = float(held["ih.input[0]"].scale)
    assert held["ih.input[0]"].min == pytest.approx(min(x.min(), 0), abs=step)
    assert held["ih.input[0]"].max == pytest.approx(max(x.max(), 0), abs=step)
    projected = x @ weights_of(proto)["W"]
    step = float(held["ih.output[0]"].scale)
    assert held["ih.output[0]"].min == pytest.approx(min(projected.min(), 0), abs=3 * step)
    assert held["ih.output[0]"].max == pytest.approx(max(projected.max(), 0), abs=3 * step)


def test_what_an_if_returns_is_what_its_branches_made():
    """The value of a branch is watched inside it and behind the If: both see the same numbers."""
    _, _, sim = calibrated(flow.branches)
    inside = [sim.quantizers[name].encoding for name in ("product.output[0]", "product_1.output[0]")]
    behind = sim.quantizers["last.input[0]"].encoding
    step = float(behind.scale)
    assert behind.min == pytest.approx(min(e.min for e in inside), abs=2 * step)
    assert behind.max == pytest.approx(max(e.max for e in inside), abs=2 * step)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_the_exported_file_computes_what_the_simulation_does(build, tmp_path):
    # sums of weights of 8 bits saturate inside bodies on CPUs without VNNI, whatever the session's settings
    _, data, sim = calibrated(build, default_param_bw=7)
    sim.export(tmp_path, "net")
    exported = onnx.load(tmp_path / "net.onnx")
    for feeds in data:
        for expected, found in zip(sim.run(feeds), run(exported, feeds, optimize=True), strict=True):
            assert sqnr(expected, found) > 40


@pytest.mark.parametrize("port", ["output", "input"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_rules_can_ask_for_quantizers_around_control_flow(build, port):
    rules = {"preset": "w8a8", "rules": [{"op": ["If", "Loop", "Scan", "Slice"], port: {"quantized": True}}]}
    proto = build()
    data = batches(proto)
    sim = QuantizationSimModel(proto, data[0], config_file=rules)
    sim.compute_encodings(data)
    if port == "output":
        assert any(site.startswith(("choice", "rnn")) for site in sim.quantizers)
    pairs = [pair for feeds in data for pair in zip(run(proto, feeds), sim.run(feeds), strict=True)]
    ratios = [sqnr(expected, found) for expected, found in pairs]
    assert min(ratios) > 20
    assert min(ratios) < 80, "a branch without a layer is exact; the others are on grids"


@pytest.mark.parametrize("build", [flow.scan, flow.loop, flow.handed_on], ids=lambda build: build.__name__)
def test_weights_in_bodies_have_codes_whose_products_fit_everywhere(build, tmp_path):
    """CPUs without VNNI add pairs of products of uint8 and int8 in 16 bits; no session option reaches bodies."""
    proto, data, sim = calibrated(build)
    for target, dtype in (("ort_cpu", onnx.TensorProto.UINT8), ("packed", onnx.TensorProto.INT8)):
        sim.export(tmp_path / target, "net", target=target)
        exported = onnx.load(tmp_path / target / "net.onnx")
        inside = {name for graph in bodies_of(exported.graph) for node in graph.node for name in node.input}
        codes = {i.name: i.data_type for i in exported.graph.initializer if i.name.endswith("_q") and i.dims}
        stored = {kind for name, kind in codes.items() if name in inside and kind != onnx.TensorProto.INT32}
        assert stored == {dtype}
        if target == "ort_cpu":  # in a default session, on any CPU
            for feeds in data:
                for expected, found in zip(sim.run(feeds), run(exported, feeds, optimize=True), strict=True):
                    assert sqnr(expected, found) > 40
        notes = [note for note in sim.saturation(data, target=target).notes if "in a body of If, Loop or Scan" in note]
        assert len(notes) == (target == "packed"), notes
        assert sim.verify(data[0], target=target).ok


def test_recurrent_layers_with_a_mask(caplog):
    """Both directions of an LSTM that holds its states at padding: near the float model, weights on grids, the file equal."""
    proto = flow.masked()
    data = []
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((4, 6, 8)).astype(np.float32)
        for row, length in zip(x, range(2, 6), strict=True):
            row[length:] = 0
        data.append({"x": x})
    sim = QuantizationSimModel(proto, data[0])
    sim.compute_encodings(data)
    for feeds in data:
        assert sqnr(run(proto, feeds)[0], sim.run(feeds)[0]) > 25
    weights = [f"{way}.{name}" for way in ("forward", "backward") for name in "WR"]
    assert all(sim.quantizers[name].role == "weight" and sim.quantizers[name].encoding is not None for name in weights)
    assert "never reached" not in caplog.text
    assert sim.verify(data[0]).ok


def test_gates_of_both_ways_are_on_grids_and_no_weight_is_left_out(caplog):
    """Weights that are states of Loops and read by Gemm: none is called unreached, and every place of the file agrees."""
    proto, data, sim = calibrated(flow.gated)
    for feeds in data:
        assert sqnr(run(proto, feeds)[0], sim.run(feeds)[0]) > 28
    weights = [f"{way}.{name}" for way in ("forward", "backward") for name in "WR"]
    assert all(sim.quantizers[name].role == "weight" and sim.quantizers[name].encoding is not None for name in weights)
    assert "never reached" not in caplog.text
    report = sim.verify(data[0])
    assert report.ok and all(row.ok for row in report.rows), report.to_text()


def bodies_of(graph):
    """Every body, those inside others included."""
    found = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    for inner in found:
        found += [a.g for node in inner.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return found


RANDOM = np.random.default_rng(0)
BATCHES = [RANDOM.standard_normal((8, 3, 6, 6)).astype(np.float32) for _ in range(8)]
TWO = np.stack(BATCHES[:2])  # as iterations


def layers(net: Net, x: str) -> str:
    """Two convolutions, the first with a batch norm and unlike channels, and a matrix."""
    y = net("Relu", net.bn(net.conv(x, 3, 6, name="c1"), 6), name="r1")
    y = net("Relu", net.conv(y, 6, 6, name="c2"), name="r2")
    y = net("Flatten", net("GlobalAveragePool", y, name="pool"), name="flat")
    return net("MatMul", y, net.weights(6, 4, name="w"), name="head", out="head.out")


def plain():
    net = Net(seed=3)
    return net.model(net("Identity", layers(net, net.input("x", ("n", 3, 6, 6))), out="y"), opset=18)


def in_an_if():
    """The layers in the branch that a rate of 16000 takes; the other one has a layer of its own."""
    net = Net(seed=9)
    x, rate = net.input("x", ("n", 3, 6, 6)), net.input("rate", (), INT64)
    taken, other = Net(seed=3), Net(seed=4)
    pooled = other("Flatten", other("GlobalAveragePool", x))
    branches = {
        "then_branch": body(layers(taken, x), net=taken),
        "else_branch": body(other("MatMul", pooled, other.weights(3, 4, name="w"), name="slow"), net=other),
    }
    chosen = net("Equal", rate, net.const(np.int64(16000)))
    return net.model(net("If", chosen, name="choice", out="y", **branches), opset=18)


def in_a_scan():
    """The layers once for each picture set of a sequence."""
    net, inner = Net(seed=9), Net(seed=3)
    x = net.input("x", ("t", "n", 3, 6, 6))
    step = body(inner("Identity", "s", out="s_out"), layers(inner, "x_t"), net=inner,
                inputs=[("s", FLOAT, (1,)), ("x_t", FLOAT, ("n", 3, 6, 6))])  # fmt: skip
    _, y = net("Scan", net.const(np.zeros(1)), x, name="scan", out=["last", "y"], body=step, num_scan_inputs=1)
    return net.model(y, opset=18)


def feeds(kind, x):
    return {"x": x} if kind is plain else {"x": x, "rate": np.int64(16000)} if kind is in_an_if else {"x": x[None]}


def result_of(kind, recipe):
    data = [feeds(kind, x) for x in BATCHES]
    result = quantize(kind(), data, recipe=recipe, allow_unreached=True, measure_speed=False, progress=False)
    return result, np.concatenate([np.asarray(result.sim.run(f)[0]).reshape(-1) for f in data])


RECIPE = ["fold", "equalize", "activation_ranges", "gptq"]


@pytest.mark.parametrize("kind", [in_an_if, in_a_scan], ids=["if", "scan"])
def test_a_recipe_does_in_a_body_what_it_does_in_the_main_graph(kind):
    notes = []
    for one in (plain, kind):
        result, outputs = result_of(one, RECIPE)
        said = [re.sub(r"in \d+ rounds|, \d left.*|\d layers? without a partner", "", o.note) for o in result.report]
        notes.append((said, outputs))
    assert notes[0][0] == notes[1][0]
    assert "3 layers" in notes[1][0][-1]
    assert sqnr(notes[0][1], notes[1][1]) > 35  # sums in another order move single codes


def test_biases_in_a_branch_are_corrected_as_in_the_main_graph():
    found = [result_of(kind, ["fold", "bias_correction"])[0] for kind in (plain, in_an_if)]
    biases = [{name: p for name, p in r.sim.constants.items() if name in ("c1.bias", "c2.bias")} for r in found]
    assert "2 biases corrected" in found[1].report[-1].note
    for name, wanted in biases[0].items():
        assert np.abs(biases[1][name] - wanted).max() < 0.02 * np.abs(wanted).max()


def test_biases_of_a_loop_are_left_with_the_reason():
    result, _ = result_of(in_a_scan, ["fold"])
    from bitwright.onnx import apply_bias_correction

    report = apply_bias_correction(result.sim, [feeds(in_a_scan, x) for x in BATCHES], num_samples=8)
    assert not report.corrected
    assert "c1: every iteration of Scan scan has a mean of its own, and they share its bias" in str(report)


def simulated(proto, data):
    sim = OnnxSim(proto, data[0])
    sim.compute_encodings(data, progress=False, allow_unreached=True)
    return sim


def as_steps(net: Net, x: str, count: int) -> str:
    """``flow.loop``'s body ``count`` times in a row, on one weight."""
    for i in range(count):
        x = net("Relu", net("MatMul", x, "W", name=f"product{i}"), name=f"act{i}")
    return x


def test_noise_of_a_loop_is_that_of_its_iterations_in_a_row():
    proto = flow.loop()
    data = [{**feeds_for(proto, seed), "choose": np.array(True)} for seed in range(4)]
    sim = simulated(proto, data)
    errors = output_errors(OnnxSimulation(sim), data, samples=8)
    net = Net(seed=7)
    net.input("x", (2, 4))
    net.weights(4, 4, name="W")
    row = simulated(net.model(as_steps(net, "x", 3)), [{"x": f["x"]} for f in data])
    for i in range(3):  # the loop has one grid for what all iterations make
        row.quantizers[f"act{i}.output[0]"].encoding = sim.quantizers["act.output[0]"].encoding
    in_a_row = output_errors(OnnxSimulation(row), [{"x": f["x"]} for f in data], samples=8)
    assert not errors.unknown
    assert errors.measured == pytest.approx(in_a_row.measured)
    assert errors.activations.keys() == {"product.input[0]", "act.output[0]"} and errors.weights.keys() == {"W"}
    # the grid of a state rounds twice in the loop what the row rounds once, and both are estimated
    assert 1 < errors.total / in_a_row.total < 4


CHOSEN = [
    (flow.scan, "gptq"),
    (flow.scan, "seq_mse"),
    pytest.param(flow.scan, "adaround", marks=pytest.mark.slow),
    (flow.loop, "gptq"),
    (flow.loop, "seq_mse"),
]


@pytest.mark.parametrize(("build", "method"), CHOSEN)
def test_weights_of_a_loop_are_chosen_for_all_its_iterations(build, method):
    proto = build()
    data = [feeds_for(proto, seed) for seed in range(24)]
    data = [{**f, "choose": np.array(True)} if "choose" in f else f for f in data]
    sim = OnnxSim(proto, data[0], config_file={"preset": "w4a16"})
    sim.compute_encodings(data, progress=False, allow_unreached=True)
    before = [sim.run(f)[0] for f in data]
    options = {"iterations": 300} if method == "adaround" else {}
    report = apply_reconstruction(sim, data, method, progress=False, **options)
    inside = {"ih", "hh", "head"} if build is flow.scan else {"product"}
    assert {row.layer for row in report} >= inside and not report.skipped
    assert report.gain < 0.95
    assert not all(np.array_equal(sim.run(f)[0], old) for f, old in zip(data, before, strict=True))


def test_batches_that_take_other_branches_have_steps_of_their_own():
    proto = flow.branches()
    model = OnnxSimulation(simulated(proto, [feeds_for(proto, 0), {**feeds_for(proto, 1), "choose": np.array(False)}]))
    programs = [
        model.program({**feeds_for(proto, i), "choose": np.array(c)})[0] for i, c in enumerate([True, False, True])
    ]
    assert programs[0] is programs[2] and programs[0] is not programs[1]
    assert [{"product", "product_1"} & program.places.keys() for program in programs[:2]] == [
        {"product_1"},
        {"product"},
    ]
    report = apply_reconstruction(
        model.sim, [{**feeds_for(proto, i), "choose": np.array(i % 2 == 0)} for i in range(8)], "gptq", progress=False
    )
    assert {row.layer for row in report} == {"first", "product", "product_1", "last"}


def counted():
    """As many products as the first element of the input says."""
    net, inner = Net(seed=7), Net(seed=8)
    x, w = net.input("x", (2, 4)), net.weights(4, 4, name="W")
    first = net("Squeeze", net("Slice", x, *(net.const(np.array(v)) for v in ([0, 0], [1, 1], [0, 1]))))
    count = net("Cast", first, to=INT64)
    v = inner("Tanh", inner("MatMul", "v_in", w, name="product"), name="act", out="v_out")
    step = body((inner("Identity", "going_in", out="going_out"), BOOL, ()), v, net=inner,
                inputs=[("i", INT64, ()), ("going_in", BOOL, ()), ("v_in", FLOAT, (2, 4))])  # fmt: skip
    return net.model(net("Loop", count, "", x, name="loop", out="y", body=step))


def test_the_data_say_how_often_a_loop_runs():
    proto, data = counted(), []
    for count in (1, 3, 1, 2):
        x = RANDOM.standard_normal((2, 4)).astype(np.float32)
        x[0, 0] = count + 0.5
        data.append({"x": x})
    model = OnnxSimulation(simulated(proto, data))
    runs = [len(model.program(feeds)[0].places["product"]) for feeds in data]
    assert runs == [1, 3, 1, 2]
    assert model.program(data[0])[0] is model.program(data[2])[0]


def test_a_very_long_loop_is_one_step(monkeypatch):
    monkeypatch.setattr(steps, "_MOST_STEPS", 4)
    proto = flow.scan()
    data = [feeds_for(proto, seed) for seed in range(4)]
    sim = simulated(proto, data)
    program, _ = OnnxSimulation(sim).program(data[0])
    assert "ih" not in program.places and len(program.steps) == 2
    report = apply_reconstruction(sim, data, "gptq", progress=False)
    assert report.skipped == {name: "no batch reached it" for name in ("ih", "hh")}


def test_what_no_batch_reaches_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        result, _ = result_of(in_an_if, None)
    assert [o.kept for o in result.report if o.step.startswith("gptq")] == [True]
    said = [r.message for r in caplog.records if "never reached" in r.message]
    assert len(said) == 1 and "slow.output[0]" in said[0]
