"""Trial sessions compute what the simulation's own session computes, whatever changes between runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from bitwright.core.numerics.formats import IntFormat, parse_format
from bitwright.core.numerics.granularity import PerChannel
from bitwright.core.numerics.spec import QuantSpec
from bitwright.onnx import QuantizationSimModel
from tests.onnx.nets import Net


def calibrated() -> tuple[QuantizationSimModel, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    n = Net()
    x = n.input("x", ("rows", 4, 8, 8))
    w = n.const(random.standard_normal((6, 4, 3, 3)).astype(np.float32))
    b = n.const(random.standard_normal(6).astype(np.float32))
    h = n("Relu", n("Conv", x, w, b, name="c", pads=[1, 1, 1, 1]), name="r")
    y = n("Conv", h, n.const(random.standard_normal((3, 6, 1, 1)).astype(np.float32)), name="d", out="y")
    feeds = {"x": random.standard_normal((4, 4, 8, 8)).astype(np.float32)}
    sim = QuantizationSimModel(n.model(y), feeds, threads=1)
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
    sim = QuantizationSimModel(n.model(y), feeds, threads=1)
    sim.compute_encodings([feeds], progress=False)
    trials = sim.trial_session()
    before = trials.run(None, feeds)[0]
    for name in (w, r):
        sim.set_parameter(name, 0.5 * sim.marked.graph.initializers[name].const_value.numpy())
        ours, theirs = trials.run(None, feeds)[0], sim.run(feeds)[0]
        assert not np.array_equal(ours, before)
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
