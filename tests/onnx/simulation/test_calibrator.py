"""Calibration: the statistics are those of core.statistics on the tensors themselves, whatever the way they came."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from bitwright import quantize
from bitwright.core.numerics import statistics
from bitwright.core.numerics.affine import encode, fake_quantize
from bitwright.core.numerics.granularity import PerChannel
from bitwright.core.numerics.ranges import choose_range
from bitwright.core.numerics.statistics import MinMax
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.onnx.model.instrument import Tap
from bitwright.onnx.model.session import open_session
from bitwright.onnx.simulation import calibrator as calibrate
from bitwright.onnx.simulation.calibrator import Calibrator
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from tests.onnx.nets import Net, body, conv_chain, feeds_for, run
from tests.support.simulations import calibrated

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def small(batch: Any = "n") -> onnx.ModelProto:
    net = Net(3)
    x = net.input("x", (batch, 3, 8, 8))
    y = net("Relu", net.conv(x, name="c1"), name="r1", out="r1.out")
    y = net("MaxPool", y, name="pool", kernel_shape=[2, 2], strides=[2, 2])
    return net.model(net.conv(y, 4, 5, name="c2", out="y"))


def deep(layers: int = 6) -> onnx.ModelProto:
    """Every layer's result is watched and as large as the input."""
    net = Net(4)
    y = net.input("x", ("n", 3, 8, 8))
    for i in range(layers):
        y = net("Relu", net.conv(y, 3, 3, name=f"c{i}", pads=[1] * 4), name=f"t{i}")
    return net.model(net("GlobalAveragePool", y, name="pool", out="y"))


def batches(count: int = 3, shape: Sequence[int] = (2, 3, 8, 8)) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [{"x": (random.standard_normal(shape) * (1 + i)).astype(np.float32)} for i in range(count)]


def simulate(model: onnx.ModelProto, scheme: Any = None, **options: Any) -> QuantizationSimModel:
    return QuantizationSimModel(model, None, scheme, threads=1, **options)


def expected(sim: QuantizationSimModel, site: str, tensors: Sequence[np.ndarray]) -> Any:
    """The encoding that core makes of the tensors."""
    spec = sim.quantizers[site].spec
    stats: Any = statistics.start(sim.quantizers[site].quantizer.needs)
    for x in tensors:
        stats = statistics.update(stats, x)
    return encode(*choose_range(stats, spec, site), spec, spec.granularity, site)


@pytest.mark.parametrize("scheme", ["min_max", "tf_enhanced", "percentile", "mse", "entropy"])
@pytest.mark.parametrize("budget", [None, 10_000, 0], ids=["one-pass", "a-few-passes", "a-pass-per-tensor"])
def test_encodings_are_those_of_core(scheme, budget):
    model, data = small(), batches()
    sim = calibrated(simulate(model, scheme, memory_budget=budget), data)
    assert sim.quantizers["c1.input[0]"].encoding == expected(sim, "c1.input[0]", [f["x"] for f in data])
    activations = [s for s in sim.quantizers.values() if s.role == "output"]
    assert activations and all(s.encoding is not None for s in activations)


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
def test_order_and_batch_size_do_not_matter(scheme):
    data = batches(4)
    found = []
    for feeds in (data, data[::-1], [{"x": f["x"][i : i + 1]} for f in data for i in range(2)]):
        sim = calibrated(simulate(small(), scheme), feeds)
        found.append(sim.quantizers["c1.input[0]"].encoding)
    assert found[0] == found[1] == found[2]


def test_statistics_of_a_reduced_tensor_are_exact():
    data = batches(2)
    sim = calibrated(simulate(small()), data)
    seen = sim.quantizers["c1.input[0]"].quantizer.statistics
    both: Any = statistics.start("minmax")
    for feeds in data:
        both = statistics.update(both, feeds["x"])
    assert isinstance(seen, MinMax) and seen == both


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
@pytest.mark.parametrize("at", [0, 7, 383], ids=["first", "in-a-vector", "last"])
def test_non_finite_values_are_counted_and_kept_out(bad, scheme, at):
    data = batches(2)
    calibrated(simulate(small(), scheme), data)
    dirty = [dict(data[0]), {"x": data[1]["x"].copy()}]
    dirty[1]["x"].reshape(-1)[at] = bad
    sim = calibrated(simulate(small(), scheme), dirty, non_finite="clamp")
    bounds = statistics.bounds_of(sim.quantizers["c1.input[0]"].quantizer.statistics)
    assert int(bounds.nan_count + bounds.inf_count) == 1
    assert sim.quantizers["c1.input[0]"].encoding == expected(sim, "c1.input[0]", [f["x"] for f in dirty])


def test_a_sum_that_overflows_is_no_reason_to_lose_a_batch():
    data = [{"x": np.full((2, 3, 8, 8), 3e37, np.float32)}]
    sim = calibrated(simulate(small()), data)
    assert sim.quantizers["c1.input[0]"].encoding.max == pytest.approx(3e37, rel=1e-6)


def test_nothing_but_non_finite_values_is_an_error_that_names_the_site():
    with pytest.raises(CalibrationError, match=r"c1.input\[0\]: calibration saw no finite value \(384 NaN, 0"):
        simulate(small()).compute_encodings([{"x": np.full((2, 3, 8, 8), np.nan, np.float32)}], non_finite="clamp")


def test_per_channel_activations():
    sim, data = simulate(small()), batches()
    site = sim.quantizers["r1.output[0]"]
    site.spec = replace(site.spec, granularity=PerChannel(1))
    sim.compute_encodings(data)
    assert site.encoding.scale.shape == (4,)
    inner = sim.capture(["r1.output[0]"], data[0])["r1.output[0]"][0]
    codes = inner / site.encoding.scale.reshape(1, 4, 1, 1)
    assert np.allclose(codes, np.rint(codes), atol=1e-3)


def test_shapes_may_change_from_batch_to_batch():
    data = batches(1, (1, 3, 8, 8)) + batches(1, (5, 3, 8, 8))
    for budget in (None, 5_000):
        sim = calibrated(simulate(small(), "percentile", memory_budget=budget), data)
        assert sim.quantizers["c1.input[0]"].encoding == expected(sim, "c1.input[0]", [f["x"] for f in data])


def test_memory_is_bounded_by_runs_of_groups():
    sim = simulate(deep(), "percentile", memory_budget=1600)
    calibrator = sim._calibrator()
    feeds = batches(1)[0]
    calibrator.run(feeds)
    sizes = calibrator._sizes.of(calibrator._fetched, feeds)
    groups = calibrator._sessions.groups(sizes)
    assert len(groups) > 1
    assert all(len(group) == 1 or sum(sizes[t] for t in group) <= 1600 for group in groups)
    assert (len(calibrator._sessions.kept) - 1) * calibrator._sessions.weights <= 1600
    frugal = simulate(deep(), "percentile", memory_budget=0)._calibrator()
    frugal.run(feeds)
    assert len(frugal._sessions.kept) == 1


class Held:
    """Bytes of the arrays that runs handed out and that somebody still holds; the runtime itself is not asked."""

    def __init__(self, calibrator: Calibrator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: list[tuple[int, Any]] = []
        self.before: list[int] = []
        self.most = 0
        open_ = calibrator._open

        def opened(*args: Any, **options: Any) -> Any:
            made = open_(*args, **options)
            run_ = made.run
            made.run = lambda feeds: self.note(run_, feeds)
            return made

        monkeypatch.setattr(calibrator, "_open", opened)

    def bytes(self) -> int:
        return sum(n for n, ref in self.alive if ref() is not None)

    def note(self, run_: Any, feeds: Any) -> Any:
        self.before.append(self.bytes())
        found = run_(feeds)
        self.alive += [(array.nbytes, weakref.ref(array)) for array in found]
        self.most = max(self.most, self.bytes())
        return found


def test_sessions_are_kept_in_a_quarter_of_the_budget(monkeypatch):
    budget, feeds = 20_000, batches(1, (12, 3, 8, 8))[0]
    calibrator = simulate(deep(), "percentile", memory_budget=budget)._calibrator()
    weights, opened = calibrator._sessions.weights, []
    sizes = calibrator._sizes.of(calibrator._fetched, feeds)
    groups = calibrator._sessions.groups(sizes)
    assert 2 * weights <= budget // 4 < 3 * weights and len(groups) > 4
    assert all(len(group) == 1 or sum(sizes[t] for t in group) <= budget - budget // 4 for group in groups)
    open_ = calibrator._open

    def counted(*args: Any, **options: Any) -> Any:
        assert len(calibrator._sessions.kept) * weights <= budget // 4
        opened.append(args)
        return open_(*args, **options)

    monkeypatch.setattr(calibrator, "_open", counted)
    for _ in range(2):  # the channels are looked at in the first batch
        calibrator.run(feeds)
    opened.clear()
    calibrator.run(feeds)
    assert len(opened) < len(groups), "some were kept"
    wide = {"x": np.concatenate([feeds["x"]] * 2)}
    for _ in range(3):
        calibrator.run(wide)
    assert all(session.used >= 3 for session in calibrator._sessions.kept.values()), "other shapes made way"


@pytest.mark.parametrize("budget", [1600, 3200])
def test_the_tensors_of_one_run_are_gone_before_the_next(monkeypatch, budget):
    calibrator = simulate(deep(), "percentile", memory_budget=budget)._calibrator()
    held, feeds = Held(calibrator, monkeypatch), batches(1)[0]
    outputs = sum(array.nbytes for array in calibrator.run(feeds))
    assert len(held.before) > 2 and held.before[0] == 0
    # minima and maxima, 2 samples, 3 channels: they wait for their tensors, in whatever run these come
    kept = outputs + 4 * sum(tap.channels != () for tap in calibrator.taps) * 2 * 2 * 3
    assert set(held.before[1:]) <= {outputs, kept}, "the caller is given the outputs, all else is counted"
    largest = max(calibrator._sizes.of(calibrator._fetched, feeds).values())
    assert held.most <= kept + max(budget, largest)


def test_each_tensor_of_a_run_is_gone_once_it_is_counted(monkeypatch):
    calibrator = simulate(deep(), "percentile")._calibrator()
    held, left = Held(calibrator, monkeypatch), []
    observe = Tap.observe

    def counted(tap: Tap, x: np.ndarray) -> None:
        left.append(held.bytes())
        observe(tap, x)

    monkeypatch.setattr(Tap, "observe", counted)
    calibrator.run(batches(1)[0])
    assert len(held.before) == 1 and len(left) > 3
    assert sorted(left, reverse=True) == left and left[0] > left[-1]


def test_what_a_session_freed_goes_back_before_the_next_is_opened(monkeypatch):
    calibrator = simulate(deep(), "percentile", memory_budget=0)._calibrator()
    steps: list[str] = []
    open_ = calibrator._open

    def opened(*args: Any, **options: Any) -> Any:
        assert not calibrator._sessions.kept
        steps.append("open")
        return open_(*args, **options)

    monkeypatch.setattr(calibrator, "_open", opened)
    monkeypatch.setattr(calibrate, "return_memory", lambda: steps.append("return"))
    calibrator.run(batches(1)[0])
    assert steps == ["open", *["return", "open"] * (steps.count("open") - 1)] and len(steps) > 3


def test_inputs_that_are_not_finite_need_no_run_of_their_own():
    calibrator = simulate(small())._calibrator()
    calibrator._reduced = [tap for tap in calibrator._reduced if tap.value.is_graph_input()]
    feeds = {"x": np.full((2, 3, 8, 8), np.nan, np.float32)}
    calibrator._in_order = calibrator._summed = [0]
    vectors = [np.float32([np.inf]), np.float32([-np.inf]), np.int64([384]), np.float32([np.nan])]
    calibrator._bounds = calibrator._bounds.of(1)
    calibrator._read_scalars(vectors, feeds)
    assert not calibrator._sessions.kept
    assert calibrator._reduced[0].quantizer.statistics.nan_count == 384


def test_tensors_that_are_not_finite_are_fetched_together():
    calibrator = simulate(small())._calibrator()
    calibrator.run({"x": np.full((2, 3, 8, 8), np.nan, np.float32)})
    assert len(calibrator._reduced) > 2 and len(calibrator._sessions.kept) == 2
    seen = [tap.quantizer.statistics for tap in calibrator._reduced]
    assert all(isinstance(s, MinMax) and s.count == 0 and s.nan_count > 0 for s in seen[:2])


def test_callback_gets_a_session():
    data, seen = batches(2), []
    model = small()

    def callback(session: Any, feeds: Any) -> None:
        assert [i.name for i in session.get_inputs()] == ["x"]
        for batch in feeds:
            seen.extend(session.run(None, batch))
            seen.extend(session.run(["y"], batch))

    sim = calibrated(simulate(model), callback, data)
    other = calibrated(simulate(model), data)
    assert sim.quantizers["c2.output[0]"].encoding == other.quantizers["c2.output[0]"].encoding
    # weights are quantized meanwhile, activations are not
    assert np.allclose(seen[0], run(model, data[0])[0], atol=0.1) and not np.array_equal(
        seen[0], run(model, data[0])[0]
    )
    with pytest.raises(ConfigError, match="the model has no output 'z'"):
        sim.compute_encodings(lambda session: session.run(["z"], data[0]))


@pytest.mark.parametrize(
    "data, problem", [([], "the data held no batch"), (lambda session: None, "never ran its session")]
)
def test_no_data_is_an_error(data, problem):
    with pytest.raises(CalibrationError, match=problem):
        simulate(small()).compute_encodings(data)


def test_a_single_batch_is_not_a_list_of_batches():
    with pytest.raises(CalibrationError, match="data is a dict, not a list of batches"):
        simulate(small()).compute_encodings(batches()[0])


def test_batch_that_does_not_fit():
    with pytest.raises(ModelError, match=r"batch 1: the input x \(float32, \?x3x8x8\) .* an array of shape 2x4x8x8"):
        simulate(small()).compute_encodings([batches()[0], {"x": np.zeros((2, 4, 8, 8), np.float32)}])


def test_resume_adds_to_what_was_seen():
    data = batches(3)
    whole, parts = simulate(small(), "percentile"), simulate(small(), "percentile")
    whole.compute_encodings(data)
    parts.compute_encodings(data[:1])
    parts.compute_encodings(data[1:], resume=True)
    assert {s.name: s.encoding for s in whole.quantizers.values() if s.role != "bias"} == {
        s.name: s.encoding for s in parts.quantizers.values() if s.role != "bias"
    }


def test_interrupted_calibration_leaves_what_was_seen():
    data = batches(2)

    def stream() -> Any:
        yield data[0]
        raise KeyboardInterrupt

    sim = simulate(small())
    with pytest.raises(KeyboardInterrupt):
        sim.compute_encodings(stream())
    assert sim.calibrated and sim.quantizers["c1.input[0]"].encoding == expected(sim, "c1.input[0]", [data[0]["x"]])


# ------------------------------------------------------------------------------------------------------ bodies


def branching() -> onnx.ModelProto:
    then, other = Net(1), Net(2)
    then("Relu", then("MatMul", "x", then.weights(4, 4, name="wt"), name="mt", out="t1"), name="rt", out="t2")
    other("Mul", other("MatMul", "x", other.weights(4, 4, name="wo"), name="mo", out="o1"), other.const(2.0), out="o2")
    net = Net()
    net.input("x", (3, 4))
    net.input("cond", (), BOOL)
    y = net(
        "If", "cond", name="branch", out="y",
        then_branch=body("t2", net=then), else_branch=body("o2", net=other),
    )  # fmt: skip
    return net.model(y)


def looping() -> onnx.ModelProto:
    """``h = Relu(h W)``, ``trip`` times; every ``h`` is handed out."""
    inner = Net(5)
    inner("MatMul", "h", inner.weights(4, 4, name="w", scale=0.7), name="m", out="p")
    inner("Relu", "p", name="r", out="h_out")
    inner("Identity", "h_out", out="each")
    inner("Identity", "go", out="go_out")
    net = Net()
    net.input("x", (3, 4))
    net.input("trip", (), INT64)
    inputs = [("i", INT64, []), ("go", BOOL, []), ("h", FLOAT, [3, 4])]
    final, steps = net(
        "Loop", "trip", net.const(np.array(True)), "x", name="loop", out=("final", "steps"),
        body=body(("go_out", BOOL, []), ("h_out", FLOAT, [3, 4]), ("each", FLOAT, [3, 4]), net=inner, inputs=inputs),
    )  # fmt: skip
    return net.model(final, steps)


def scanning() -> onnx.ModelProto:
    inner = Net(6)
    inner("Add", inner("MatMul", "x_t", inner.weights(4, 4, name="w"), name="m", out="p"), "s", name="a", out="q")
    inner("Tanh", "q", name="t", out="s_out")
    inner("Identity", "s_out", out="each")
    net = Net()
    net.input("xs", (7, 3, 4))
    net.input("s0", (3, 4))
    inputs = [("s", FLOAT, [3, 4]), ("x_t", FLOAT, [3, 4])]
    last, all_ = net(
        "Scan", "s0", "xs", name="scan", out=("last", "all"), num_scan_inputs=1, scan_output_axes=[0],
        body=body(("s_out", FLOAT, [3, 4]), ("each", FLOAT, [3, 4]), net=inner, inputs=inputs),
    )  # fmt: skip
    return net.model(last, all_)


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
def test_branches_see_what_passed_them(scheme):
    random = np.random.default_rng(0)
    data = [{"x": random.standard_normal((3, 4)).astype(np.float32), "cond": np.array(c)} for c in (True, True, False)]
    sim = calibrated(simulate(branching(), scheme), data)
    weight = fake_quantize(sim.constants["wt"], sim.quantizers["wt"].encoding)
    then = [np.maximum(f["x"] @ weight, 0) for f in data[:2]]
    found = sim.quantizers["rt.output[0]"].encoding
    assert np.allclose(found.max, expected(sim, "rt.output[0]", then).max, rtol=1e-5)
    y = sim.run(data[0])[0]
    assert np.abs(y - run(branching(), data[0])[0]).max() < 0.1


def test_a_branch_that_never_ran_is_reported(caplog):
    x = np.ones((3, 4), np.float32)
    sim = calibrated(simulate(branching()), [{"x": x, "cond": np.array(True)}])
    assert "calibration never reached" in caplog.text and "mo" in caplog.text
    with pytest.raises(CalibrationError, match="calibration never reached this site"):
        sim.run({"x": x, "cond": np.array(True)})
    sim.compute_encodings([{"x": x, "cond": np.array(True)}], allow_unreached=True)
    assert len(sim.run({"x": x, "cond": np.array(False)})) == 1


def test_weights_of_a_branch_that_never_ran_are_calibrated_from_their_values(tmp_path):
    then, other = Net(1), Net(2)
    then("MatMul", "x", then.weights(4, 4, name="wt"), name="mt", out="t1")
    wo = np.random.default_rng(5).standard_normal((4, 4)).astype(np.float32)
    turned = other("Transpose", other.const(wo), name="turn", out="turned", perm=[1, 0])
    scaled = other("Mul", turned, other.const(2.0), name="scale", out="scaled")
    other("MatMul", "x", scaled, name="mo", out="o1")
    net = Net()
    net.input("x", (3, 4))
    net.input("cond", (), BOOL)
    y = net(
        "If", "cond", name="branch", out="y",
        then_branch=body("t1", net=then), else_branch=body("o1", net=other),
    )  # fmt: skip
    feeds = [{"x": np.ones((3, 4), np.float32), "cond": np.array(True)}]
    result = quantize(net.model(y), feeds, path=tmp_path, progress=False)
    site = next(s for s in result.sim.quantizers.values() if s.op == "mo" and s.role == "weight")
    assert np.array_equal(result.sim.constants[site.name], 2 * wo.T)
    assert site.encoding is not None and site.encoding.scale.shape == (4,)
    assert result.sim.quantizers["mo.output[0]"].enabled is False
    with pytest.raises(CalibrationError, match="no calibration batch reached this site.*--allow-unreached"):
        quantize(net.model(y), feeds, progress=False, allow_unreached=False)


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
@pytest.mark.parametrize("trip", [0, 1, 5])
def test_loops_merge_their_iterations(scheme, trip):
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    sim = calibrated(simulate(looping(), scheme), [{"x": x, "trip": np.array(5)}, {"x": x, "trip": np.array(0)}])
    site = sim.quantizers["r.output[0]"]
    steps = run(looping(), {"x": x, "trip": np.array(5)})[1]
    assert np.allclose(site.encoding.max, steps.max(), rtol=0.05)
    want, found = run(looping(), {"x": x, "trip": np.array(trip)}), sim.run({"x": x, "trip": np.array(trip)})
    assert all(w.shape == f.shape for w, f in zip(want, found, strict=True))
    assert all(np.allclose(w, f, atol=0.05 * max(1, np.abs(steps).max())) for w, f in zip(want, found, strict=True))


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
def test_scans_merge_their_iterations(scheme):
    random = np.random.default_rng(0)
    feeds = {"xs": random.standard_normal((7, 3, 4)).astype(np.float32), "s0": np.zeros((3, 4), np.float32)}
    sim = calibrated(simulate(scanning(), scheme), [feeds])
    inside = [s for s in sim.quantizers.values() if s.role != "bias"]
    assert inside and all(s.encoding is not None for s in inside)
    for want, found in zip(run(scanning(), feeds), sim.run(feeds), strict=True):
        assert np.allclose(want, found, atol=0.1)


@pytest.mark.parametrize("scheme", ["min_max", "mse"])
def test_empty_tensors_are_counted_and_bodies_that_did_not_run_are_not(scheme):
    net, then, other = Net(), Net(), Net()
    h = net("MatMul", net.input("x", ("n", 4)), net.weights(4, 4), name="head")
    net("Neg", net.input("beside", ("m", 4)), name="neg", out="z")
    choose = net.input("choose", (), BOOL)
    graphs = {
        "then_branch": body(then("MatMul", h, then.weights(4, 4), name="left", out="a"), net=then),
        "else_branch": body(other("MatMul", h, other.weights(4, 4), name="right", out="b"), net=other),
    }
    net("Relu", net("If", choose, name="choice", **graphs), name="last", out="y")
    full, none = np.ones((3, 4), np.float32), np.zeros((0, 4), np.float32)
    feeds = [{"x": x, "beside": full, "choose": np.array(c)} for x, c in ((full, True), (none, True), (full, False))]
    sim = calibrated(QuantizationSimModel(net.model("y", "z"), feeds[0], quant_scheme=scheme), feeds)
    found = {health.site: health.empty for health in sim.health()}
    assert found["head.input[0]"] == found["head.output[0]"] == 1
    assert not any(n for site, n in found.items() if site.startswith(("left", "right")))


def test_calibrating_again_and_again_keeps_nothing() -> None:

    model = conv_chain(4)
    feeds = feeds_for(model)
    sim = QuantizationSimModel(model, feeds, "percentile", threads=1)

    def kept(times: int) -> tuple[int, int]:
        for _ in range(times):
            sim.compute_encodings([feeds, feeds], progress=False)
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        kept(3)
        (objects, size), (more, larger) = kept(1), kept(8)
    finally:
        tracemalloc.stop()
    assert more - objects < 8, "objects of every calibration are kept"
    assert larger - size < 8 * 5 * 1024, "numpy keeps a few small blocks for later; more is a leak"


def rectified() -> onnx.ModelProto:
    """A ReLU after a convolution, then another convolution; images of 16 x 16, of which 4 x 4 pixels are looked at first."""
    net = Net(3)
    weight = net.const(np.eye(2, dtype=np.float32)[:, :, None, None])
    y = net("Conv", net.input("x", ("n", 2, 16, 16)), weight, name="c1")
    y = net("Relu", y, name="r1", out="r1.out")
    return net.model(net.conv(y, 2, 3, name="c2", out="y"))


def relu_statistics(data: Sequence[np.ndarray]) -> tuple[Any, Any, QuantizationSimModel]:
    """What calibration keeps of the ReLU, what core makes of the tensors themselves, and the simulation."""
    sim = calibrated(simulate(rectified()), [{"x": x} for x in data])
    graph = sim._watched_model().model
    graph.graph.outputs.extend(v for n in graph.graph for v in n.outputs if v.name == "r1.out")
    session = open_session(graph, threads=1)
    stats: Any = statistics.start("minmax")
    for x in data:
        stats = statistics.update(stats, session.run(["r1.out"], {"x": x})[0])
    site = next(s for s in sim.quantizers.values() if s.value == "r1.out")
    return site.quantizer.statistics, stats, sim


def sessions_opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []

    def counted(name: str) -> Any:
        opener = getattr(calibrate, name)

        def opening(*args: Any, **options: Any) -> Any:
            opened.append(name)
            return opener(*args, **options)

        return opening

    for name in ("open_watching", "narrow"):
        monkeypatch.setattr(calibrate, name, counted(name))
    return opened


def images(least: float, count: int = 3) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.uniform(least, 3, (2, 2, 16, 16)).astype(np.float32) for _ in range(count)]


def test_one_session_serves_all_batches_where_a_few_pixels_tell_enough(monkeypatch):
    opened = sessions_opened(monkeypatch)
    found, expected, _ = relu_statistics(images(-3))
    assert found == expected and opened == ["open_watching"]


def test_a_zero_that_the_few_pixels_do_not_show_is_found():
    data = images(0.5)
    data[1][1, 1, 5, 7] = -1
    found, expected, _ = relu_statistics(data)
    assert found == expected and found.lo == 0


def test_a_rectifier_that_never_returns_zero(monkeypatch):
    opened = sessions_opened(monkeypatch)
    found, expected, _ = relu_statistics(images(0.5))
    assert found == expected and found.lo > 0.5
    assert opened.count("open_watching") <= 3  # with a few pixels, for the tensor itself, and with all of them


def test_a_channel_that_is_the_same_at_the_few_pixels_only_is_not_constant():
    data = images(-3)
    for x in data:
        x[:, 1] = 2.5
    data[0][1, 1, 5, 7] = 2.0  # between the pixels that are looked at
    _, _, sim = relu_statistics(data)
    channels = next(s.channels.seen for s in sim.quantizers.values() if s.value == "r1.out")
    assert channels is not None and not channels.index.size
    data[0][1, 1, 5, 7] = 2.5
    _, _, sim = relu_statistics(data)
    channels = next(s.channels.seen for s in sim.quantizers.values() if s.value == "r1.out")
    assert channels is not None and channels.index.tolist() == [1] and channels.value.tolist() == [2.5]


@pytest.mark.parametrize("bias", [0.0, -2.0])
def test_values_that_overflow_inside_are_still_named(bias):
    """No sum is taken of what a convolution makes of bounded inputs; where it may overflow, the tensor is looked at."""
    net = Net(3)
    x = net.input("x", ("n", 2, 16, 16))
    big = net.const(np.full((2, 2, 1, 1), 1e19, np.float32), "w")
    y = net("Conv", x, big, name="c1", out="c1.out")
    y = net("Conv", net("Relu", y, name="r1"), net.const(np.full((1, 2, 1, 1), 1e19, np.float32), "v"), name="c2")
    model = net.model(net("Add", y, net.const(np.float32(bias)), name="a", out="y"))
    calibrated(simulate(model), [{"x": np.full((1, 2, 16, 16), 1e-3, np.float32)}])
    with pytest.raises(CalibrationError, match="c2"):
        simulate(model).compute_encodings([{"x": np.full((1, 2, 16, 16), 1e3, np.float32)}])


def test_nan_after_an_operator_that_can_make_it_is_found_where_later_layers_hide_it():
    net = Net(3)
    x = net.input("x", ("n", 2, 16, 16))
    y = net("Sqrt", net.conv(x, 2, 4, name="c1", pads=[1] * 4), name="root")
    out = net("Relu", net.conv(y, 4, 4, name="c2"), name="r2", out="y")
    with pytest.raises(CalibrationError, match="root"):
        simulate(net.model(out)).compute_encodings([{"x": x} for x in images(-3, 1)])


def test_a_tensor_that_several_sites_of_one_quantizer_watch_counts_once_for_each() -> None:
    net = Net(0)
    x, z = net.input("x", (2, 40)), net.input("z", (2, 40))
    model = net.model(net("Concat", x, x, z, axis=1, name="c", out="y"))
    feeds = feeds_for(model)
    sim = calibrated(simulate(model, "percentile"), [feeds])
    counted = [sim.quantizers[f"c.input[{i}]"].quantizer.statistics for i in range(3)]
    assert counted[0] is counted[1]
    for seen, name, times in ((counted[0], "x", 2), (counted[2], "z", 1)):
        expected: Any = statistics.start("histogram")
        for _ in range(times):
            expected = statistics.update(expected, feeds[name])
        assert isinstance(seen, statistics.Histogram)
        assert np.array_equal(seen.counts, expected.counts) and seen.exponent == expected.exponent
