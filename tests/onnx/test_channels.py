"""Channels that never change, in calibration of ONNX models."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest

from bitwright.errors import CalibrationError
from bitwright.onnx import QuantizationSimModel
from bitwright.onnx.model.session import open_session
from tests.onnx.flow import loop
from tests.onnx.nets import Net
from tests.support.cost import steps
from tests.support.simulations import calibrated

CHANNELS = (32, 24, 5)  # that fill blocks of 16, of 8, and neither


def images() -> onnx.ModelProto:
    """Convolutions, each with a channel that a ReLU makes zero, one that is constant, and one that is so in one batch."""
    net = Net(4)
    x, width = net.input("x", ("n", 3, 12, 12)), 3
    for i, channels in enumerate(CHANNELS):
        weight = net.random.standard_normal((channels, width, 3, 3)) / width
        bias = np.zeros(channels)
        weight[:3], bias[:3] = 0, (-1, 0.25, 0.0)
        bias[3] = -1.5
        pads = dict(kernel_shape=[3, 3], pads=[1] * 4)
        y = net("Conv", x, net.const(weight, f"w{i}"), net.const(bias, f"b{i}"), name=f"c{i}", **pads)
        x, width = net("Relu", y, name=f"r{i}", out=f"r{i}.out"), channels
    return net.model(net("GlobalAveragePool", x, name="mean"))


def features() -> onnx.ModelProto:
    net = Net(5)
    x, width = net.input("x", ("n", "t", 6)), 6
    for i in range(2):
        weight = net.random.standard_normal((width, 8))
        weight[:, :2] = 0
        y = net("Add", net("MatMul", x, net.const(weight, f"w{i}")), net.const(np.linspace(-1, 1, 8), f"b{i}"))
        x, width = net("Relu", y, name=f"r{i}", out=f"r{i}.out"), 8
    return net.model(x)


def batches(model: onnx.ModelProto, count: int = 3) -> list[Any]:
    random = np.random.default_rng(0)
    shape = [d.dim_value or 4 for d in model.graph.input[0].type.tensor_type.shape.dim]
    return [(random.standard_normal(shape) * scale).astype(np.float32) for scale in (0.1, 1, 3)[:count]]


def seen(sim: QuantizationSimModel) -> dict[str, tuple[dict[int, float], int]]:
    """Site -> its constant channels, and how many channels it has."""
    found = {}
    for name, site in sim.quantizers.items():
        channels = site.channels.seen
        if channels is not None:
            pairs = zip(channels.index.tolist(), channels.value.tolist(), strict=True)
            found[name] = (dict(pairs), channels.count)
    return found


def expected(sim: QuantizationSimModel, data: list[Any]) -> dict[str, tuple[dict[int, float], int]]:
    """The same, from the tensors themselves."""
    simulation = sim._watched_model()
    values = {site: str(places[0][0].name) for site, places in simulation.taps.items()}
    graph = simulation.model.graph
    made = {str(value.name): value for node in graph for value in node.outputs}
    graph.outputs.extend({made[n] for n in values.values() if n in made} - set(graph.outputs))
    session = open_session(simulation.model, threads=1)
    names = [output.name for output in session.get_outputs()]
    runs = [{**dict(zip(names, session.run(None, {"x": x}), strict=True)), "x": x} for x in data]
    result = {}
    for site, name in values.items():
        place = sim.quantizers[site].channels.place
        if place is not None and sim.quantizers[site].enabled:
            parts = [np.moveaxis(run[name], place.axis, 0) for run in runs]
            rows = np.concatenate([part.reshape(len(part), -1) for part in parts], 1)
            same = {i: float(row[0]) for i, row in enumerate(rows) if (row == row[0]).all()}
            result[site] = (same, len(rows) if same else 0)
    return result


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
@pytest.mark.parametrize("build", [images, features])
def test_what_is_found_is_exact_whatever_the_order_of_batches(build, scheme) -> None:
    model = build()
    data = batches(model)
    sims = []
    for order in itertools.permutations(range(3)):
        sim = calibrated(QuantizationSimModel(model, data[0], scheme, threads=1), [data[i] for i in order])
        sims.append(sim)
    found = seen(sims[0])
    assert found == expected(sims[0], data)
    assert all(seen(sim) == found for sim in sims)
    dead = {site: channels for site, (channels, _) in found.items() if site.startswith("r")}
    assert len(dead) == (3 if build is images else 2)
    assert all(len(channels) >= 2 and 0.0 in channels.values() for channels in dead.values()), dead


def lines(size: int = 4) -> onnx.ModelProto:
    """One channel is zero, one is the image itself, one is its negative part."""
    net = Net()
    x = net.input("x", (1, 1, size, size))
    first = net("Conv", x, net.const(np.reshape([0.0, 1.0, 1.0], (3, 1, 1, 1)), "w"), name="c", out="c.out")
    caps = net.const(np.reshape([9.0, 1e9, 0.0], (1, 3, 1, 1)))
    y = net("Min", first, caps, name="cap", out="cap.out")
    return net.model(net("Conv", y, net.weights(2, 3, 1, 1), name="last"))


def test_a_channel_that_was_the_least_of_its_tensor_is_followed_when_it_is_not_any_more() -> None:
    model, positive = lines(), np.linspace(0, 1, 16, dtype=np.float32).reshape(1, 1, 4, 4)
    for data, constants in (
        ([positive], {0: 0.0, 2: 0.0}),
        ([positive, positive, -positive], {0: 0.0}),
        ([-positive, positive], {0: 0.0}),
    ):
        sim = calibrated(QuantizationSimModel(model, positive), data)
        assert seen(sim)["last.input[0]"][0] == constants


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
@pytest.mark.parametrize("size", [4, 12])
def test_values_that_are_not_finite_are_no_constants_and_skipped_batches_tell_nothing(size, scheme) -> None:
    model = lines(size)
    positive = np.linspace(0, 1, size**2, dtype=np.float32).reshape(1, 1, size, size)
    bad = np.full_like(positive, np.nan)
    for policy, constants in (("skip", {0: 0.0, 2: 0.0}), ("clamp", {})):
        for data in ([positive, bad], [bad, positive]):
            sim = calibrated(QuantizationSimModel(model, positive, scheme), data, non_finite=policy)
            assert seen(sim)["last.input[0]"][0] == constants


def test_more_batches_add_to_what_was_seen() -> None:
    model = images()
    data = batches(model)
    whole, parts = (QuantizationSimModel(model, data[0]) for _ in range(2))
    whole.compute_encodings(data, progress=False)
    parts.compute_encodings(data[:1], progress=False)
    assert seen(parts) != seen(whole)
    parts.compute_encodings(data[1:], progress=False, resume=True)
    assert seen(parts) == seen(whole)


def test_channels_inside_bodies() -> None:
    """In a loop inside a branch; a batch in which it did not run shows nothing. Bounds are taken of whole tensors there."""
    model = loop()
    weight = next(t for t in model.graph.initializer if t.name == "W")
    values = onnx.numpy_helper.to_array(weight).copy()
    values[:, 2] = 0
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "W"))
    sim = QuantizationSimModel(model, {"x": np.ones((2, 4), np.float32), "choose": np.True_}, "percentile")
    random = np.random.default_rng(0)
    feeds = [{"x": random.standard_normal((2, 4)).astype(np.float32), "choose": np.bool_(c)} for c in (0, 1, 1, 0)]
    sim.compute_encodings(feeds, progress=False, allow_unreached=True)
    assert seen(sim)["act.output[0]"][0].get(2) == 0.0
    (health,) = (h for h in sim.health() if h.site == "act.output[0]")
    assert 2 in health.zero and health.layer == "product"


@pytest.mark.parametrize("size", [("h", "w"), (4, 4)], ids=["open", "known"])
def test_batches_without_images_are_refused_and_change_nothing(size) -> None:
    net = Net()
    x = net.input("x", ("n", 3, *size))
    y = net("Relu", net.conv(x, 3, 4, k=1, name="c"), name="r", out="r.out")
    model = net.model(net.conv(y, 4, 2, k=1, name="d"))
    some, none = (net.random.standard_normal((2, 3, 4, 4)).astype(np.float32), np.ones((0, 3, 4, 4), np.float32))
    sim = calibrated(QuantizationSimModel(model, some), [some])
    before = seen(sim)
    with pytest.raises(CalibrationError, match="^batch 1: it holds no sample: x is 0x3x4x4. Remedy: leave empty"):
        sim.compute_encodings([some, none], progress=False)
    assert seen(sim) == before


def test_health_names_them() -> None:
    model = images()
    sim = calibrated(QuantizationSimModel(model, batches(model)[0]), batches(model))
    notes = {health.site: health.notes for health in sim.health()}
    assert notes["r2.output[0]"][0].startswith("2 of 5 channels of c2 are zero throughout: 0, 2")


def test_cost_is_linear() -> None:
    def cost(blocks: int) -> int:
        net = Net()
        x = net.input("x", (1, 2, 4, 4))
        for i in range(blocks):
            x = net("Relu", net.conv(x, 2, 2, k=1, name=f"c{i}"), name=f"r{i}", out=f"r{i}.out")
        sim = QuantizationSimModel(net.model(x), np.ones((1, 2, 4, 4), np.float32))
        data = [np.ones((1, 2, 4, 4), np.float32)] * 2
        return steps(lambda: sim.compute_encodings(data, progress=False))

    cost(2)
    assert cost(40) < 4.4 * cost(10)
