"""Bodies of If, Loop and Scan under simulation: calibrated over all their runs, quantized, exported."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from tests.onnx import flow
from tests.onnx.nets import feeds_for, run

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


def bodies_of(graph):
    """Every body, those inside others included."""
    found = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    for inner in found:
        found += [a.g for node in inner.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return found
