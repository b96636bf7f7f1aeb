"""Watching sessions give what ordinary sessions give in any order; trial sessions compute what the simulation's own does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from bitwright.core.numerics import statistics
from bitwright.core.numerics.formats import IntFormat, parse_format
from bitwright.core.numerics.granularity import PerChannel
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.numerics.statistics import Histogram, MinMax
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.onnx.model.session import open_session, save_optimized
from bitwright.onnx.simulation.calibrator import open_watching, reduce_early, watch_blocked
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from tests.onnx.nets import Net
from tests.support.cost import steps

SCALARS = ("ReduceMin", "ReduceMax", "ReduceSum", "Size")
# channels that fill blocks of 16, of 8, and neither
CHANNELS = (32, 24, 5)


def convolutions() -> tuple[ir.Model, list[str]]:
    """Convolutions of several widths, residual, pooled, concatenated and flattened; and the tensors to watch."""
    net = Net(4)
    x = net.input("x", ("n", 3, 20, 20))
    watched, width, parts = [x], 3, []
    for i, channels in enumerate(CHANNELS):
        y = net("Relu", net.conv(x, width, channels, name=f"c{i}", pads=[1] * 4), name=f"r{i}", out=f"r{i}.out")
        z = net.conv(y, channels, channels, name=f"d{i}", pads=[1] * 4, group=channels)
        x = net("Add", y, z, name=f"a{i}", out=f"a{i}.out")
        watched += [y, z, x]
        parts.append(x)
        width = channels
    joined = net("Concat", *parts, name="join", out="join.out", axis=1)
    pooled = net("MaxPool", joined, name="pool", out="pool.out", kernel_shape=[2, 2], strides=[2, 2])
    flat = net("Sigmoid", net("GlobalAveragePool", pooled, out="mean.out"), out="gate.out")
    last = net("Mul", joined, flat, name="gated", out="gated.out")
    return ir.from_proto(net.model("a0.out", last)), [*watched, joined, pooled, "mean.out", "gate.out", last]


def instrumented(model: ir.Model, names: list[str]) -> list[str]:
    """Adds the scalars of every named tensor to the outputs, and the tensors themselves; names of the scalars."""
    graph = model.graph
    values = {str(v.name): v for node in graph for v in node.outputs} | {str(v.name): v for v in graph.inputs}
    scalars = []
    for name in names:
        for op in SCALARS:
            keepdims = [] if op == "Size" else [ir.AttrInt64("keepdims", 0)]
            node = ir.Node("", op, [values[name]], keepdims, name=f"{name}/{op}")
            node.outputs[0].name, node.outputs[0].shape = f"{name}_{op}", ir.Shape([])
            node.outputs[0].type = ir.TensorType(ir.DataType.INT64 if op == "Size" else ir.DataType.FLOAT)
            graph.append(node)
            graph.outputs.append(node.outputs[0])
            scalars.append(f"{name}_{op}")
    there = set(graph.outputs)
    for name in names:
        if values[name] not in there and not values[name].is_graph_input():
            values[name].type = ir.TensorType(ir.DataType.FLOAT)
            graph.outputs.append(values[name])
    return scalars


@pytest.mark.parametrize("batch", [1, 3])
def test_scalars_and_elements_are_those_of_an_ordinary_session(batch):
    model, names = convolutions()
    outputs = [str(v.name) for v in model.graph.outputs]
    scalars = instrumented(model, names)
    unordered = [name for name in names[1:] if name not in outputs]
    watching = open_watching(model, threads=1, scalars=scalars, small=scalars, unordered=unordered)
    x = {"x": np.random.default_rng(0).standard_normal((batch, 3, 20, 20)).astype(np.float32)}
    wanted = [*outputs, *scalars, *unordered]
    ordinary = dict(zip(wanted, open_session(model, threads=1).run(wanted, x), strict=True))
    found = watching.session.run([watching.name(name) for name in wanted], x)
    for name, value in zip(wanted, found, strict=True):
        expected = ordinary[name]
        if name.startswith(("mean.out", "gate.out", "gated.out")) or name.endswith("Sum"):
            assert np.allclose(np.sort(value, axis=None), np.sort(expected, axis=None), rtol=1e-4, atol=1e-4)
        elif name in unordered:
            assert value.shape == expected.shape
            assert np.array_equal(np.sort(value, axis=None), np.sort(expected, axis=None)), name
        else:
            assert np.array_equal(value, expected), name


def optimized() -> tuple[onnx.ModelProto, list[str]]:
    model, names = convolutions()
    scalars = instrumented(model, names)
    with tempfile.TemporaryDirectory() as folder:
        save_optimized(model, Path(folder, "o.onnx"))
        found = onnx.load(Path(folder, "o.onnx"))
    return found, scalars


def test_reductions_come_right_behind_what_they_reduce():
    model, scalars = optimized()
    reduce_early(model.graph, frozenset(scalars))
    nodes = list(model.graph.node)
    made = {name: i for i, node in enumerate(nodes) for name in node.output}
    for i, node in enumerate(nodes):
        assert all(made.get(name, -1) < i for name in node.input)  # still an order in which it can run
        if node.op_type in SCALARS and node.output[0] in scalars and node.input[0] in made:
            between = nodes[made[node.input[0]] + 1 : i]
            assert all(n.op_type in (*SCALARS, "ReorderOutput") for n in between)


def test_what_a_body_reads_stays_before_it_and_in_its_layout():
    """A reduction of a tensor that an If reads too is moved; the copy that the body reads stays, and so does its name."""
    net = Net(4)
    x = net.input("x", (1, 3, 20, 20))
    net.conv(x, 3, 32, name="c", pads=[1] * 4, out="y")
    flag = net("Greater", net("ReduceMean", x, keepdims=0, out="mean"), net.const(np.float32(0)), out="flag")

    def branch(name: str) -> onnx.GraphProto:
        node = onnx.helper.make_node("Neg" if name == "a" else "Abs", ["y"], [f"{name}.out"])
        return onnx.helper.make_graph(
            [node], name, [], [onnx.helper.make_tensor_value_info(f"{name}.out", 1, [1, 32, 20, 20])]
        )

    out = net("If", flag, out="out", then_branch=branch("a"), else_branch=branch("b"))
    model = ir.from_proto(net.model(out))
    scalars = instrumented(model, ["y"])
    watching = open_watching(model, threads=1, scalars=scalars, small=scalars, unordered=["y"])
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 3, 20, 20)).astype(np.float32)}
    wanted = ["out", *scalars]
    ordinary = open_session(model, threads=1).run(wanted, feeds)
    found = watching.session.run([watching.name(name) for name in wanted], feeds)
    for name, value, expected in zip(wanted, found, ordinary, strict=True):
        assert np.allclose(value, expected, rtol=1e-5), name


def test_copies_out_of_the_blocked_layout_go_where_channels_fill_the_blocks():
    model, scalars = optimized()
    graph = model.graph
    copies = sum(node.op_type == "ReorderOutput" for node in graph.node)
    names = watch_blocked(graph, frozenset(scalars), frozenset(("r0.out", "d0.out", "r2.out")))
    left = {node.output[0] for node in graph.node if node.op_type == "ReorderOutput"}
    assert "r2.out" not in names  # 5 channels: the block holds zeros that are not of the tensor
    if copies:  # a CPU on which the runtime blocks channels
        assert set(names) == {"r0.out", "d0.out"} and not left & {"r0.out", "d0.out"}
        assert {"a0.out", "r2.out"} <= left  # an output of the model, and one that is filled up
    assert len(graph.output) == len({value.name for value in graph.output})


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
def test_calibration_sees_every_element_once(scheme):
    """The statistics of every site are those of core on the tensor that an ordinary session gives."""
    model, names = convolutions()
    model.graph.inputs[0].shape = ir.Shape([2, 3, 20, 20])
    random = np.random.default_rng(0)
    data = [{"x": (random.standard_normal((2, 3, 20, 20)) * 2**i).astype(np.float32)} for i in range(3)]
    sim = QuantizationSimModel(model, data[0], scheme, threads=1)
    sim.compute_encodings(data)
    calibrator = sim._calibrator()
    tensors = {str(tap.value.name): tap.quantizer for tap in calibrator.taps}
    watched = calibrator._instrument.model
    values = {str(v.name): v for node in watched.graph for v in node.outputs}
    there = set(watched.graph.outputs)
    watched.graph.outputs.extend(values[n] for n in tensors if n in values and values[n] not in there)
    session = open_session(watched, threads=1)
    checked = 0
    for name, quantizer in tensors.items():
        if name not in values or name.startswith(("mean.", "gate")):  # sums depend on where memory starts
            continue
        stats: Any = statistics.start(quantizer.needs)
        for feeds in data:
            stats = statistics.update(stats, session.run([name], feeds)[0])
        assert isinstance(stats, Histogram if scheme == "percentile" else MinMax)
        assert quantizer.statistics == stats, name
        checked += 1
    assert checked >= 6


def test_providers_that_are_named_are_used():
    model, names = convolutions()
    scalars = instrumented(model, names)
    for providers in (
        ["CPUExecutionProvider"],
        [("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})],
    ):
        watching = open_watching(model, providers, threads=1, scalars=scalars, unordered=["d0.out"])
        assert watching.session.get_providers() == ["CPUExecutionProvider"]
        assert watching.name("r0.out") == "r0.out" and watching.name("d0.out") in {
            v.name for v in watching.session.get_outputs()
        }


def test_cost_is_linear():
    def chain(blocks: int) -> ir.Model:
        net = Net()
        x = net.input("x", (1, 2, 4, 4))
        for i in range(blocks):
            x = net("Relu", net.conv(x, 2, 2, k=1, name=f"c{i}"), name=f"r{i}", out=f"r{i}.out")
        return ir.from_proto(net.model(x))

    def cost(blocks: int) -> int:
        model = chain(blocks)
        scalars = instrumented(model, [f"r{i}.out" for i in range(blocks)])
        graph, wanted = ir.to_proto(model).graph, frozenset(scalars)
        return steps(lambda: (watch_blocked(graph, wanted, ()), reduce_early(graph, wanted)))

    cost(5)
    assert cost(400) < 4.4 * cost(100)


def calibrated() -> tuple[OnnxSim, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    n = Net()
    x = n.input("x", ("rows", 4, 8, 8))
    w = n.const(random.standard_normal((6, 4, 3, 3)).astype(np.float32))
    b = n.const(random.standard_normal(6).astype(np.float32))
    h = n("Relu", n("Conv", x, w, b, name="c", pads=[1, 1, 1, 1]), name="r")
    y = n("Conv", h, n.const(random.standard_normal((3, 6, 1, 1)).astype(np.float32)), name="d", out="y")
    feeds = {"x": random.standard_normal((4, 4, 8, 8)).astype(np.float32)}
    sim = OnnxSim(n.model(y), feeds, threads=1)
    sim.compute_encodings([feeds], progress=False)
    return sim, feeds


def bits(sim: Any, site: Any, width: int) -> None:
    site.spec = replace(site.quantizer.spec, format=replace(site.quantizer.spec.format, bits=width))


def every(role: str, change: Callable[..., None]) -> Callable[[Any], None]:
    def run(sim: Any) -> None:
        for site in sim.quantizers.values():
            if site.role in (role, {"output": "input"}.get(role)):
                change(sim, site)

    return run


CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda sim: None,
    "activations of 4 bits": every("output", lambda sim, site: bits(sim, site, 4)),
    "activations of 16 bits": every("output", lambda sim, site: bits(sim, site, 16)),
    "weights of 4 bits": every("weight", lambda sim, site: bits(sim, site, 4)),
    "symmetric": every(
        "output", lambda s, site: setattr(site, "spec", replace(site.spec, format=IntFormat(8), symmetry="symmetric"))
    ),
    "some in float": lambda sim: setattr(sim.quantizers["r.*"], "enabled", False),
    "weights in float": lambda sim: setattr(sim.quantizers["c.*"], "enabled", False),
    "float8": every(
        "output", lambda s, site: setattr(site, "spec", QuantSpec(parse_format("float8_e4m3")))
    ),
    "20 bits": every("output", lambda sim, site: bits(sim, site, 20)),
}  # fmt: skip


def test_runs_what_the_session_runs_after_every_change() -> None:
    sim, feeds = calibrated()
    trials, before = sim.trial_session(), sim.remember()
    for name in [*CHANGES, "nothing"]:
        before()
        CHANGES[name](sim)
        ours, theirs = trials.run(None, feeds)[0], sim.session.run(None, feeds)[0]
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), err_msg=name)
    assert trials.run(["y"], feeds)[0].shape == (4, 3, 8, 8)
    assert [i.name for i in trials.get_inputs()] == ["x"] and [o.name for o in trials.get_outputs()] == ["y"]


def test_other_bits_and_scales_open_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, feeds = calibrated()
    trials = sim.trial_session()
    trials.run(None, feeds)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: pytest.fail("a session was opened"))
    for width in (4, 6, 16):
        for role in ("output", "weight"):
            every(role, lambda sim, site, width=width: bits(sim, site, width))(sim)
            trials.run(None, feeds)


def test_channels_of_activations_are_written_into_the_model() -> None:
    sim, feeds = calibrated()
    site = sim.quantizers["r.output[0]"]
    site.spec = replace(site.spec, granularity=PerChannel(1))
    sim.compute_encodings([feeds], progress=False)
    ours, theirs = sim.trial_session().run(None, feeds)[0], sim.run(feeds)[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def test_a_new_parameter_is_what_the_next_run_computes_with():
    sim, feeds = calibrated()
    name = next(site for site, s in sim.quantizers.items() if s.role == "weight")
    trials = sim.trial_session()
    before, tried = sim.run(feeds)[0], trials.run(None, feeds)[0]
    weight = sim.constants[name]
    sim.set_parameter(name.removesuffix(".weight") if name not in sim.marked.graph.initializers else name, 0 * weight)
    assert not np.array_equal(sim.run(feeds)[0], before)
    assert not sim.constants[name].any()
    ours, theirs = trials.run(None, feeds)[0], sim.run(feeds)[0]
    assert not np.array_equal(ours, tried)
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(tried).max())


def test_new_weights_of_a_recurrent_layer_are_what_the_next_run_computes_with() -> None:
    random = np.random.default_rng(0)
    n = Net()
    x = n.input("x", (5, 2, 4))
    w, r = (n.const(random.standard_normal((1, 24, k)).astype(np.float32)) for k in (4, 6))
    y = n("LSTM", x, w, r, name="l", hidden_size=6, out="y")
    feeds = {"x": random.standard_normal((5, 2, 4)).astype(np.float32)}
    sim = OnnxSim(n.model(y), feeds, threads=1)
    sim.compute_encodings([feeds], progress=False)
    trials = sim.trial_session()
    before = trials.run(None, feeds)[0]
    for name in (w, r):
        sim.set_parameter(name, 0.5 * sim.marked.graph.initializers[name].const_value.numpy())
        ours, theirs = trials.run(None, feeds)[0], sim.run(feeds)[0]
        assert not np.array_equal(ours, before)
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
