"""Rounding methods on a torch module and on its ONNX export: one implementation, one result."""

from __future__ import annotations

import io
import logging

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright.onnx as onnx_front
import bitwright.torch as torch_front
from bitwright.errors import ConfigError
from bitwright.onnx.program import OnnxSimulation
from tests.onnx.flow import branches, scan
from tests.onnx.nets import Net
from tests.support.simulations import calibrated

OPTIONS = {
    "adaround": {"iterations": 200},
    "brecq": {"iterations": 100},
    "qdrop": {"iterations": 100},
    "flexround": {"iterations": 100},
    "gptq": {},
    "seq_mse": {},
}


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x):
        return F.relu(x + self.b(F.relu6(self.a(x))))


class Net2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.block = Block(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.block(F.relu(self.stem(x))).mean((2, 3)))


def data(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(F.interpolate(torch.randn(64, 3, 4, 4, generator=generator), (12, 12)).split(16))


def exported(model: nn.Module, example: torch.Tensor) -> onnx.ModelProto:
    buffer = io.BytesIO()
    torch.onnx.export(
        model, (example,), buffer, input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "n"}}, dynamo=False,
        opset_version=17,
    )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


@pytest.fixture(scope="module")
def both():
    torch.manual_seed(11)
    model = Net2().eval()
    return model, exported(model, data()[0])


def torch_sim(model: nn.Module):
    return calibrated(torch_front.QuantizationSimModel(model, data()[0], preset="w4a8"), data())


def onnx_sim(proto: onnx.ModelProto):
    sim = onnx_front.QuantizationSimModel(proto, data()[0].numpy(), preset="w4a8")
    sim.compute_encodings([x.numpy() for x in data()])
    return sim


def error(model: nn.Module, run) -> float:
    with torch.no_grad():
        return float(np.mean([np.square(model(x).numpy() - run(x)).mean() for x in data(1)]))


@pytest.mark.parametrize("method", OPTIONS)
def test_both_front_ends_come_equally_near_to_float(method, both):
    model, proto = both
    one, other = torch_sim(model), onnx_sim(proto)
    torch_run = lambda x: one.model(x).detach().numpy()  # noqa: E731
    onnx_run = lambda x: other.run(x.numpy())[0]  # noqa: E731
    before = error(model, torch_run)
    assert error(model, onnx_run) == pytest.approx(before, rel=0.05)
    first = torch_front.apply_reconstruction(one, data(), method, **OPTIONS[method])
    second = onnx_front.apply_reconstruction(other, [x.numpy() for x in data()], method, **OPTIONS[method])
    assert len(first) == len(second) == 4
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        # behind the first layer, errors hang on what was learned before, from rows drawn in another order
        assert b.before == pytest.approx(a.before, rel=0.05 if i == 0 or method in ("gptq", "seq_mse") else 0.3)
    assert second.gain == pytest.approx(first.gain, rel=0.25)
    after = error(model, torch_run)
    assert after < before
    assert error(model, onnx_run) == pytest.approx(after, rel=0.3)


@pytest.mark.parametrize("method", ["gptq", "flexround"])
def test_the_exported_file_computes_what_the_simulation_computes(method, both, tmp_path):
    _, proto = both
    sim = onnx_sim(proto)
    onnx_front.apply_reconstruction(sim, [x.numpy() for x in data()], method, **OPTIONS[method])
    sim.compute_encodings([x.numpy() for x in data()])
    report = sim.verify(data()[0].numpy())
    assert report.ok, report.to_text()
    files = sim.export(tmp_path, "net")
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(files.qdq).graph.initializer}
    for site in sim.quantizers.values():
        if site.role == "weight":
            w = sim.constants[site.name]
            scale = np.asarray(site.encoding.scale)
            codes = w / (scale.reshape(-1, *[1] * (w.ndim - 1)) if scale.ndim else scale)
            assert np.abs(codes - np.rint(codes)).max() < 1e-4, site.name
    assert any(a.dtype.name == "int4" for a in stored.values()) or files.qdq.stat().st_size > 0


def test_the_torch_export_computes_what_the_simulation_computes(both, tmp_path):
    model, _ = both
    sim = torch_sim(model)
    torch_front.apply_reconstruction(sim, data(), "adaround", iterations=50)
    sim.compute_encodings(data())
    assert sim.verify(data()[0][:4]).ok


def test_steps_are_the_simulation_bit_for_bit_where_runtimes_agree(both):
    """The quantized stream of a walk is what the simulation computes, but for the order of sums."""
    from bitwright.methods.rounding.program import Program, Step, run

    _, proto = both
    sim = onnx_sim(proto)
    model = OnnxSimulation(sim)
    program, state = model.program(data()[0].numpy())
    whole = Program((*program.steps, Step("", program.outputs, (), lambda t: ())), program.constants, ())
    run(whole, state, 0, len(program.steps), model.quantize)
    found, expected = state[program.outputs[0]].numpy(), sim.run(data()[0].numpy())[0]
    step = float(np.abs(expected).max()) / 127
    assert np.abs(found - expected).max() <= 2 * step
    assert (np.abs(found - expected) < 1e-6).mean() > 0.8


def test_the_same_seed_gives_the_same_weights(both):
    found = []
    for seed in (3, 3, 4):
        sim = onnx_sim(both[1])
        onnx_front.apply_reconstruction(sim, [x.numpy() for x in data()], "qdrop", iterations=20, seed=seed)
        found.append(sim.run(data()[0].numpy())[0])
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])


def with_runtime_operators() -> onnx.ModelProto:
    net = Net()
    x = net.conv(net.input(shape=(4, 3, 8, 8)), 3, 6, name="first")
    scales = net.const(np.float32([1, 1, 2, 2]))
    x = net("Resize", x, "", scales, name="grow", mode="linear")
    x = net.conv(net("Relu", x, name="act"), 6, 4, name="second")
    return net.model(net("ReduceMean", x, axes=[2, 3], keepdims=0, name="mean"))


def test_operators_without_a_torch_row_are_run_by_the_runtime(caplog):
    proto = with_runtime_operators()
    random = np.random.default_rng(0)
    feeds = [random.standard_normal((4, 3, 8, 8)).astype(np.float32) for _ in range(4)]
    sim = calibrated(onnx_front.QuantizationSimModel(proto, feeds[0], preset="w4a8"), feeds)
    report = onnx_front.apply_reconstruction(sim, feeds, "brecq", blocks=[["first", "second"]], iterations=100)
    assert [row.layer for row in report] == ["first", "second"]  # there is no gradient through Resize: one by one
    assert report.rows[0].before != report.rows[1].before and report.gain < 1


def with_sequences() -> onnx.ModelProto:
    """A tensor is split into a sequence, layers read parts of it, and one puts its result into it."""
    net = Net()
    x = net.conv(net.input(shape=(8, 3, 8, 8)), 3, 6, name="first", pads=[1] * 4)
    parts = net("SplitToSequence", net("Relu", x), net.const(np.int64(2)), name="parts", axis=1)
    zero, two = net.const(np.int64(0)), net.const(np.int64(2))
    left = net.conv(net("SequenceAt", parts, zero), 2, 4, name="left", pads=[1] * 4)
    more = net("SequenceInsert", parts, left, name="more")
    right = net.conv(net("SequenceAt", more, two), 2, 4, name="right", pads=[1] * 4)
    joined = net("ConcatFromSequence", more, name="joined", axis=1)
    x = net.conv(net("Concat", joined, right, axis=1), 14, 4, name="last")
    x = net("OptionalGetElement", net("Optional", x, name="wrapped"), name="unwrapped")
    return net.model(net("ReduceMean", x, axes=[2, 3], keepdims=0, name="mean"))


@pytest.mark.parametrize("method", ["gptq", "brecq"])
def test_layers_around_sequences_of_tensors_are_treated(method, tmp_path):
    random = np.random.default_rng(0)
    feeds = [random.standard_normal((8, 3, 8, 8)).astype(np.float32) for _ in range(4)]
    found = []
    for budget in (None, 1000) if method == "gptq" else (None,):
        sim = calibrated(onnx_front.QuantizationSimModel(with_sequences(), feeds[0], preset="w4a8"), feeds)
        options = {} if method == "gptq" else {"iterations": 60}
        report = onnx_front.apply_reconstruction(
            sim, feeds, method, memory_budget=budget, spill_dir=tmp_path, **options
        )
        assert [row.layer for row in report] == ["first", "left", "right", "last"] and not report.skipped
        assert report.gain < 1
        found.append([row.after for row in report])
        assert sim.verify(feeds[0]).ok
    assert found[0] == found[-1]  # parts of a sequence go to the disk as other values do


@pytest.mark.parametrize("model", [branches, scan], ids=["if", "scan"])
def test_weights_in_bodies_are_listed_and_the_rest_is_treated(model):
    proto = model()
    sim = onnx_front.QuantizationSimModel(proto, preset="w4a8")
    random = np.random.default_rng(0)
    feeds = [
        {s.name: random.standard_normal(v.shape).astype(v.dtype) for s, v in zip(sim.specs, sim.example().values(), strict=True)}
        for _ in range(3)
    ]  # fmt: skip
    sim.compute_encodings(feeds, allow_unreached=True)
    report = onnx_front.apply_reconstruction(sim, feeds, "gptq")
    assert isinstance(report.summary, str)
    for feed in feeds:
        sim.run(feed)


def test_torch_is_asked_for_when_it_is_missing(monkeypatch, both):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="adaround: .* torch is not installed.*pip install"):
        onnx_front.apply_reconstruction(onnx_sim(both[1]), data(), "adaround")


def test_layers_are_chosen_by_globs(both, caplog):
    sim = onnx_sim(both[1])
    feeds = [x.numpy() for x in data()]
    with caplog.at_level(logging.WARNING):
        one = onnx_front.apply_reconstruction(sim, feeds, "seq_mse", num_candidates=5, exclude=["/head/*"])
        two = onnx_front.apply_reconstruction(sim, feeds, iterations=20, include=["/stem/*"])
        three = onnx_front.apply_gptq(sim, feeds, include=["/head/*"])
    assert len(one) == 3 and [r.layer for r in two] == ["/stem/Conv"] and [r.layer for r in three] == ["/head/Gemm"]


def test_a_weight_that_a_node_computes_becomes_an_initializer_of_its_own(tmp_path):
    net = Net()
    stored = net.weights(6, 8, name="stored")
    turned = net("Transpose", stored, name="turn", perm=[1, 0])
    x = net("MatMul", net.input(shape=(16, 8)), turned, name="layer")
    proto = net.model(net("Relu", x, name="act"))
    random = np.random.default_rng(0)
    feeds = [random.standard_normal((16, 8)).astype(np.float32) for _ in range(4)]
    sim = calibrated(onnx_front.QuantizationSimModel(proto, feeds[0], preset="w4a8"), feeds)
    before = sim.run(feeds[0])[0]
    report = onnx_front.apply_gptq(sim, feeds)
    assert [row.layer for row in report] == ["layer"] and report.gain < 1
    assert not np.array_equal(sim.run(feeds[0])[0], before)
    sim.compute_encodings(feeds)
    assert sim.verify(feeds[0]).ok
    files = sim.export(tmp_path, "net")
    assert "Transpose" not in [node.op_type for node in onnx.load(files.qdq).graph.node]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, num_layers=2)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize("method", ["seq_mse", "gptq"])
def test_a_recurrent_layer_reads_what_the_chosen_weights_of_the_one_before_make(method):
    torch.manual_seed(5)
    model, batches = TwoLayers().eval(), [torch.randn(9, 8, 6) for _ in range(4)]
    feeds = [x.numpy() for x in batches]
    sim = calibrated(torch_front.QuantizationSimModel(model, batches[0], preset="w4a16"), batches)
    other = calibrated(onnx_front.QuantizationSimModel(exported(model, batches[0]), feeds[0], preset="w4a16"), feeds)
    one = torch_front.apply_reconstruction(sim, batches, method, progress=False)
    two = onnx_front.apply_reconstruction(other, feeds, method, progress=False)
    assert len(one) == len(two) == 5
    for mine, theirs in zip(one, two, strict=True):
        assert mine.before == pytest.approx(theirs.before, rel=2e-2), mine.layer
        assert mine.after == pytest.approx(theirs.after, rel=5e-2), mine.layer
