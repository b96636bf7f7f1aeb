"""Models that hold quantizers already compute what they computed, and what we wrote we can read."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import bitwright
from bitwright.compare.verify import verify_folder
from bitwright.core.numerics.formats import parse_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.errors import ExportError, ModelError
from bitwright.onnx import QuantizationSimModel
from tests.onnx import flow
from tests.onnx.nets import BOOL, FLOAT, Array, Net, body, feeds_for, run
from tests.onnx.simulation.test_quantsim import DATA, net
from tests.support.cost import steps
from tests.support.recurrent_nets import Variant, layer_model
from tests.support.recurrent_nets import feeds as layer_feeds

Feeds = dict[str, Array]


def reference(model: onnx.ModelProto, feeds: Feeds) -> list[Array]:
    """The model as it is written: no integer kernels, no fusions."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    found: list[Array] = ort.InferenceSession(model.SerializeToString(), options).run(None, feeds)
    return found


def check_same_function(model: onnx.ModelProto, feeds: Feeds, **options: Any) -> QuantizationSimModel:
    """The simulation of ``model`` gives its outputs, bit for bit, without any calibration."""
    sim = QuantizationSimModel(model, feeds, threads=1, **options)
    assert sim.calibrated
    found = run(sim.simulation().model, feeds)
    for want, got in zip(reference(model, feeds), found, strict=True):
        np.testing.assert_array_equal(got, want)
    return sim


# --------------------------------------------------------------------------------------------- what we write


def written(sim: QuantizationSimModel, folder: Path, name: str, **options: Any) -> onnx.ModelProto:
    return onnx.load(sim.export(folder, name, samples=False, **options).qdq)


def calibrated(model: onnx.ModelProto, data: Sequence[Feeds], **options: Any) -> QuantizationSimModel:
    sim = QuantizationSimModel(model, data[0], threads=1, **options)
    sim.compute_encodings(data, progress=False, allow_unreached=True)
    return sim


def check_round_trip(
    sim: QuantizationSimModel, data: Sequence[Feeds], folder: Path, **options: Any
) -> QuantizationSimModel:
    first = written(sim, folder, "first", **options)
    again = QuantizationSimModel(first, data[0], threads=1)
    for feeds in data:
        for want, found in zip(sim.run(feeds), again.run(feeds), strict=True):
            np.testing.assert_array_equal(found, want)
    second = written(again, folder, "second", **options)
    assert [without_notes(n) for n in second.graph.node] == [without_notes(n) for n in first.graph.node]
    for kind in ("initializer", "value_info", "input"):
        one, other = ({v.name: v for v in getattr(model.graph, kind)} for model in (first, second))
        assert one == other
    return again


def without_notes(node: onnx.NodeProto) -> onnx.NodeProto:
    """A weight that was computed has a name of its own in the file, and its site is called after it."""
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.metadata_props[:]
    return bare


def enabled(sim: QuantizationSimModel) -> dict[str, Any]:
    """Site -> encoding, biases aside, whose grids follow from others."""
    sites = sim.quantizers.items()
    return {name: site.encoding for name, site in sites if site.enabled and not site.quantizer.derived}


@pytest.mark.parametrize("preset", ["w8a8", "w4a8", "w8a16", "w4a16", "fp8"])
@pytest.mark.parametrize("activation", ["unsigned", "as_is"])
def test_our_own_files_are_read_back_whole(tmp_path, preset, activation):
    sim = calibrated(net(), DATA, preset=preset)
    again = check_round_trip(sim, DATA, tmp_path, activation=activation)
    assert enabled(again) == enabled(sim)
    assert all(site.frozen for site in again.quantizers.values() if site.enabled and site.role != "bias")


@pytest.mark.parametrize(
    "format",
    ["int3", "uint5", "int6n", "int8n", "uint12", "uint20", "float4_e2m1", "float6_e2m3", "float6_e3m2", "float8_e5m2"],
)
def test_every_form_of_a_quantizer_is_read_back(tmp_path, format):
    sim = calibrated(net(), DATA)
    for site in list(sim.quantizers.values()):
        if site.role in ("input", "output", "weight"):
            site.spec = replace(site.quantizer.spec, format=parse_format(format))
    sim.compute_encodings(DATA, progress=False)
    again = check_round_trip(sim, DATA, tmp_path)
    kept = {k: e for k, e in enabled(again).items() if sim.quantizers[k].role in ("input", "output")}
    assert kept == {k: e for k, e in enabled(sim).items() if k in kept} and len(kept) == 6


def with_facts(model: onnx.ModelProto, site: str, **changes: Any) -> onnx.ModelProto:
    """The model, with changes of what was noted on the quantizer of ``site``."""
    notes = [entry for node in model.graph.node for entry in node.metadata_props if entry.key == "bitwright"]
    note = next(note for note in notes if json.loads(note.value)["places"] == [site])
    note.value = json.dumps({**json.loads(note.value), **changes})
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {"axis": "0"}, {"axis": True}, {"perm": 3}, {"perm": [0, 0]}, {"perm": [0, 1, 2, 3, 4, 5]}, {"format": None},
        {"entry": []}, {"scale": 1}, {"pooled": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_facts_are_refused(tmp_path, changes):
    damaged = with_facts(written(calibrated(net(), DATA), tmp_path, "net"), "c1.weight", **changes)
    with pytest.raises(ExportError, match="what the export wrote on this operator is damaged"):
        QuantizationSimModel(damaged, DATA[0], threads=1)


def test_scales_per_channel_without_an_axis_in_the_facts_are_those_of_the_file(tmp_path):
    """Somebody gave the activation a scale for each of its channels."""
    model = written(calibrated(net(), DATA), tmp_path, "net")
    node = next(n for n in model.graph.node if n.op_type == "QuantizeLinear")
    numbers = {t.name: t for t in model.graph.initializer}
    for name in node.input[1:]:
        old = numpy_helper.to_array(numbers[name])
        numbers[name].CopyFrom(numpy_helper.from_array(np.stack([old, old, old]), name))
    sim = QuantizationSimModel(model, DATA[0], threads=1)
    encoding = sim.quantizers["c1.input[0]"].encoding
    assert encoding.granularity == PerChannel(1) and encoding.scale.shape == (3,)


@pytest.mark.parametrize("build", [flow.branches, flow.scan, flow.loop, flow.two_results], ids=lambda f: f.__name__)
def test_bodies_are_read_back(tmp_path, build):
    model = build()
    data = [feeds_for(model, seed) for seed in range(3)]
    sim = calibrated(model, data)
    again = check_round_trip(sim, data, tmp_path)
    assert enabled(again) == enabled(sim)


def test_recurrent_layers_are_read_back_as_the_scans_they_became(tmp_path):
    n = Net(3)
    parts = [n.weights(1, 20, 3, name="W"), n.weights(1, 20, 5, name="R"), n.weights(1, 40, name="B")]
    y = n("LSTM", n.input("x", (4, 2, 3)), *parts, hidden_size=5, name="lstm", out=["y", "", ""])[0]
    model = n.model(y)
    data = [feeds_for(model, seed) for seed in range(2)]
    sim = calibrated(model, data)
    again = QuantizationSimModel(written(sim, tmp_path, "net"), data[0], threads=1)
    np.testing.assert_array_equal(again.run(data[1])[0], sim.run(data[1])[0])


def transposed() -> onnx.ModelProto:
    """A weight that is read transposed by one operator and as it is by another, and two readers that share one."""
    n = Net(3)
    x = n.input("x", (2, 4))
    w = n.weights(4, 4, name="w")
    turned = n("Transpose", w, name="turn", perm=[1, 0])
    a = n("MatMul", x, turned, name="a")
    b = n("MatMul", a, w, name="b")
    return n.model(n("Add", b, n("MatMul", x, n.weights(4, 4, name="v"), name="c"), name="sum", out="y"))


def test_transposed_and_shared_weights_are_read_back(tmp_path):
    model = transposed()
    data = [feeds_for(model, seed) for seed in range(2)]
    check_round_trip(calibrated(model, data), data, tmp_path)


def test_half_precision_models_are_read_back(tmp_path):
    n = Net(3)
    half = TensorProto.FLOAT16
    weight = n.const(np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16), "w")
    y = n("MatMul", n.input("x", (2, 8), half), weight, name="m", out="y")
    model = n.model((y, half, (2, 4)))
    data = [feeds_for(model, seed) for seed in range(2)]
    check_round_trip(calibrated(model, data), data, tmp_path)


def test_encodings_that_came_with_the_model_survive_calibration_and_more_can_be_added(tmp_path):
    sim = calibrated(net(), DATA)
    sim.quantizers["c2.output[0]"].enabled = False
    again = QuantizationSimModel(written(sim, tmp_path, "net"), DATA[0], threads=1)
    before = enabled(again)
    assert "c2.output[0]" not in before and again.coverage().find("hidden_output_1").how == "c2.output[0]: disabled"
    again.quantizers["c2.output[0]"].enabled = True
    again.compute_encodings(DATA, progress=False)
    after = enabled(again)
    assert after.pop("c2.output[0]") is not None and after == before


def test_the_notes_say_what_was_read(tmp_path, caplog):
    sim = calibrated(net(), DATA)
    sim.quantizers["c2.output[0]"].enabled = False
    with caplog.at_level(logging.INFO, "bitwright"):
        again = QuantizationSimModel(written(sim, tmp_path, "net"), DATA[0], threads=1)
    note = ("the model brought 8 encodings with it, which are in effect and frozen; 1 other sites of the rules are in "
            "float, as there")  # fmt: skip
    assert again.notes == (note,) and note in caplog.messages


# ------------------------------------------------------------------------------------------ what others write


def static(**options: Any) -> Callable[[Path], onnx.ModelProto]:
    """The model :func:`tests.onnx.simulation.test_quantsim.net` as ONNX Runtime's own tool quantizes it."""

    def make(folder: Path) -> onnx.ModelProto:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

        class Reader(CalibrationDataReader):
            def __init__(self) -> None:
                self.rest = iter(DATA)

            def get_next(self) -> Any:
                return next(self.rest, None)

        opset = options.pop("opset", 17)
        onnx.save(net(opset), folder / "float.onnx")
        form = options.pop("quant_format", QuantFormat.QDQ)
        logging.disable(logging.WARNING)
        try:
            quantize_static(folder / "float.onnx", folder / "qdq.onnx", Reader(), quant_format=form, **options)
        finally:
            logging.disable(logging.NOTSET)
        return onnx.load(folder / "qdq.onnx")

    return make


def _options() -> dict[str, dict[str, Any]]:
    from onnxruntime.quantization import QuantType as T

    return {
        "default": {},
        "per-channel": {"per_channel": True},
        "signed": {"activation_type": T.QInt8, "weight_type": T.QInt8},
        "sixteen-bits-com-microsoft": {"activation_type": T.QUInt16, "extra_options": {"UseQDQContribOps": True}},
        "int4-weights": {"weight_type": T.QInt4, "opset": 21},
        "weights-in-pairs": {"per_channel": True, "extra_options": {"AddQDQPairToWeight": True, "QuantizeBias": False}},
        "a-pair-per-reader": {"extra_options": {"DedicatedQDQPair": True}},
        "opset-11": {"opset": 11},
    }


@pytest.mark.parametrize("name", _options())
def test_models_of_the_runtimes_own_tool(tmp_path, name):
    model = static(**_options()[name])(tmp_path)
    sim = check_same_function(model, DATA[0])
    assert sim.verify().ok
    biases = [site.enabled for site in sim.quantizers.values() if site.role == "bias"]
    assert biases == [name != "weights-in-pairs"] * 3, "its int32 biases are those that follow from input and weight"


@pytest.mark.parametrize(
    "steps", [None, ["fold"], ["equalize"], ["smooth"]], ids=["default", "fold", "equalize", "smooth"]
)
def test_recipes_keep_the_grids_that_weights_came_with(tmp_path, steps):
    model = static(per_channel=True)(tmp_path)
    plain = QuantizationSimModel(model, DATA[0], threads=1)
    result = bitwright.quantize(model, list(DATA), recipe=steps, progress=False)
    weights = [site for site in plain.quantizers.values() if site.role == "weight"]
    assert weights and all(result.sim.quantizers[site.name].encoding == site.encoding for site in weights)
    for want, got in zip(reference(model, DATA[0]), run(result.sim.simulation().model, DATA[0]), strict=True):
        np.testing.assert_array_equal(got, want)


def q(
    n: Net, x: str, scale: Any, zero: Any = None, *, domain: str = "", name: str = "", out: str = "", **attrs: Any
) -> str:
    """A pair of QuantizeLinear and DequantizeLinear."""
    params = [n.const(np.asarray(scale, np.float32)), *([] if zero is None else [n.const(zero)])]
    codes = n("QuantizeLinear", x, *params, name=f"{name}_q" if name else "", domain=domain, **attrs)
    return n("DequantizeLinear", codes, *params, name=name, out=out, domain=domain, **attrs)


def hand_made() -> dict[str, onnx.ModelProto]:
    """Quantizers in odd places."""
    found = {}

    def add(name: str, n: Net, *outputs: Any, opset: int = 21, **more: Any) -> None:
        found[name] = n.model(*outputs, opset=opset, **more)

    n = Net(1)
    x = q(n, n.input("x", (2, 8)), 0.05)
    add("without-zero-point", n, n("Relu", x, name="r", out="y"))

    n = Net(1)
    h = n("Relu", n.input("x", (2, 8)), name="r")
    y = n("MatMul", q(n, h, 0.1, np.uint8(3)), n.weights(8, 4), name="m", out="y")
    add("one-of-two-readers", n, y, n("Abs", h, name="a", out="z"))

    n = Net(1)
    h = n("Relu", n.input("x", (2, 8)), name="r")
    y = n("MatMul", q(n, h, 0.1, np.uint8(3)), n.weights(8, 4), name="m", out="y")
    add("another-grid-per-reader", n, y, n("Abs", q(n, h, 0.3, np.uint8(1)), name="a", out="z"))

    n = Net(1)
    h = n("Neg", n.input("x", (2, 8)), name="r")
    add("two-in-a-row", n, n("Abs", q(n, q(n, h, 0.1, np.int8(3)), 0.3, np.uint8(100)), name="a", out="y"))

    n = Net(1)
    x = n.input("x", (2, 8))
    add("two-in-a-row-at-the-input", n, n("Abs", q(n, q(n, x, 0.1, np.int8(3)), 0.3, np.uint8(9)), name="a", out="y"))

    n = Net(1)
    h = n("Neg", n.input("x", (2, 8)), name="r")
    add("two-in-a-row-at-the-end", n, q(n, q(n, h, 0.1, np.int8(3)), 0.3, np.uint8(100), out="y"))

    n = Net(1)
    add("nothing-but-a-quantizer", n, q(n, n.input("x", (2, 8)), 0.1, np.int8(0), out="y"))

    n = Net(1)
    h = n("Neg", n.input("x", (2, 8)), name="r", out="h")
    add("beside-an-output", n, h, q(n, h, 0.1, np.int8(0), out="y"))

    n = Net(1)
    x = q(n, n.input("x", (2, 3, 4, 4)), [0.1, 0.2, 0.3], np.int8([0, 1, -2]), axis=1)
    add("channels-of-an-activation", n, n("Relu", x, name="r", out="y"))

    n = Net(1)
    codes = n.const(n.random.integers(0, 15, (8, 4)).astype(np.uint8), "w_q")
    scale = n.const(n.random.uniform(0.1, 0.2, (2, 4)).astype(np.float32))
    w = n("DequantizeLinear", codes, scale, n.const(np.full((2, 4), 7, np.uint8)), out="w", axis=0, block_size=4)
    add("blocks-of-a-weight", n, n("MatMul", q(n, n.input("x", (2, 8)), 0.1, np.uint8(3)), w, name="m", out="y"))

    n = Net(1)
    scale, zero = n.const(np.float32([0.1, 0.2, 0.3, 0.4])), n.const(np.int8([0, 0, 0, 0]))
    w = n("DequantizeLinear", n.const(n.random.integers(-9, 9, (4, 8)).astype(np.int8), "w_q"), scale, zero, axis=0)
    turned = n("Transpose", w, perm=[1, 0])
    add(
        "a-weight-behind-transpose",
        n,
        n("MatMul", q(n, n.input("x", (2, 8)), 0.1, np.uint8(3)), turned, name="m", out="y"),
    )

    n = Net(1)
    w = n("Mul", n.weights(8, 4), n.const(np.float32(0.5)), name="half")
    x = q(n, n.input("x", ("n", 8)), 0.1, np.uint8(3))
    add("a-pair-on-a-computed-weight", n, n("MatMul", x, q(n, w, 0.05, np.int8(0)), name="m", out="y"))

    n = Net(1)
    w = q(n, n.weights(4, 8), [0.1, 0.2, 0.3, 0.4], np.int8([0] * 4), axis=0)
    flat = n("Reshape", w, n.const(np.int64([8, 4])))
    x = q(n, n.input("x", ("n", 8)), 0.1, np.uint8(3))
    add("a-weight-whose-channels-are-lost", n, n("MatMul", x, flat, name="m", out="y"))

    n = Net(1)
    x = q(n, n.input("x", ("n", "c")), [0.1, 0.2, 0.3], np.int8([0, 1, -2]), axis=1)
    add("channels-of-unknown-number", n, n("Relu", x, name="r", out="y"))

    n = Net(1)
    x = q(n, n.input("x", (1, 3, 8, 8)), 0.02, np.uint8(128))
    w = q(n, n.weights(4, 3, 3, 3), [0.01] * 4, np.int8([0] * 4), axis=0)
    bias = n("DequantizeLinear", n.const(np.int32([3, -4, 500, 6])), n.const(np.float32(0.1)), n.const(np.int32(0)))
    add("a-bias-on-a-grid-of-its-own", n, n("Conv", x, w, bias, name="c", out="y"))

    n = Net(1)
    x = q(n, n.input("x", (2, 8)), 0.01, np.uint16(700), domain="com.microsoft")
    add("the-runtimes-domain", n, n("Relu", x, name="r", out="y"), opset=17, domains={"com.microsoft": 1})

    n = Net(1)
    x = q(n, n.input("x", (1, 2, 4, 4)), 0.05, np.uint8(100))
    h = q(n, n("MaxPool", x, name="p", kernel_shape=[2, 2]), 0.05, np.uint8(100))
    h = q(n, n("Pad", h, n.const(np.int64([0, 0, 1, 1, 0, 0, 1, 1])), name="pad"), 0.05, np.uint8(100))
    add("movers-between-equal-pairs", n, n("Relu", h, name="r", out="y"))

    n = Net(7)
    x, choose = n.input("x", (2, 4)), n.input("choose", (), BOOL)
    h = q(n, x, 0.05, np.uint8(100))
    inner, other = Net(1), Net(2)
    inner._count = 100  # names of a body are not those of the graph around it
    y = inner("MatMul", q(inner, h, 0.2, np.uint8(77)), inner.weights(4, 4), name="m", out="inner")
    graphs = {"then_branch": body(y, net=inner), "else_branch": body(other("Identity", h, out="same"), net=other)}
    add("pairs-in-a-branch", n, n("If", choose, name="if", out="y", **graphs))

    n = Net(7)
    x, start = n.input("x", (5, 1, 3)), n.input("s", (1, 3))
    inner = Net(1)
    h = inner("Add", "x_t", "h_in", name="add", out="h_out")
    step = body(
        h, inner("Identity", h, out="each"), net=inner, inputs=[("h_in", FLOAT, (1, 3)), ("x_t", FLOAT, (1, 3))]
    )
    both = q(n, start, 0.05, np.uint8(100)), q(n, x, 0.1, np.uint8(100))
    last, each = n("Scan", *both, name="rnn", out=["last", "each"], body=step, num_scan_inputs=1)
    add("what-enters-a-scan", n, last, each)

    n = Net(1)
    h = q(n, n("Relu", n.input("x", (2, 8)), name="r"), 0.1, np.uint8(0))
    q(n, n("Reshape", h, n.const(np.int64([4, 4])), name="idle"), 0.1, np.uint8(0))  # which nothing reads
    add("what-nothing-reads", n, n("Abs", q(n, n("Neg", "x", name="s"), 0.1, np.uint8(9)), name="a", out="y"))

    n = Net(1)
    h = q(n, n("Relu", n.input("x", (2, 8)), name="r"), 0.1, numpy_helper.to_array(_float8()))
    add("float8", n, n("Abs", h, name="a", out="y"))
    return found


def _float8() -> onnx.TensorProto:
    return onnx.helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, (), [0.0])


HAND_MADE = hand_made()


@pytest.mark.parametrize("name", HAND_MADE)
def test_quantizers_in_odd_places(tmp_path, name):
    model = HAND_MADE[name]
    feeds = feeds_for(model, n=2, c=3)
    sim = check_same_function(model, feeds)
    check_round_trip(sim, [feeds], tmp_path)


def test_where_the_encodings_lie():
    sims = {
        name: QuantizationSimModel(model, feeds_for(model, n=2, c=3), threads=1) for name, model in HAND_MADE.items()
    }
    kinds = {name: {k: e.granularity for k, e in enabled(sim).items() if e is not None} for name, sim in sims.items()}
    assert kinds["without-zero-point"] == {"r.input[0]": PerTensor()}
    assert kinds["one-of-two-readers"] == {"m.input[0]": PerTensor()}
    assert kinds["another-grid-per-reader"] == {"m.input[0]": PerTensor(), "a.input[0]": PerTensor()}
    assert kinds["two-in-a-row"] == {"r.output[0]": PerTensor(), "a.input[0]": PerTensor()}
    assert kinds["channels-of-an-activation"] == {"r.input[0]": PerChannel(1)}
    assert kinds["blocks-of-a-weight"]["w"] == PerBlock(4, 0, 1)
    assert kinds["a-weight-behind-transpose"]["m.weight"] == PerChannel(1)
    (bias,) = (s for s in sims["a-bias-on-a-grid-of-its-own"].quantizers.values() if s.role == "bias")
    assert not bias.enabled, "no integer kernel has its grid: its values stay, in float"
    assert kinds["movers-between-equal-pairs"] == {"p.input[0]": PerTensor()}


def test_a_model_with_quantized_weights_only_leaves_activations_to_the_rules():
    n = Net(4)
    codes, scale = (n.const(np.arange(-8, 8, dtype=np.int8).reshape(4, 4), "codes"), n.const(np.float32(0.1), "scale"))
    w = n("DequantizeLinear", codes, scale, name="dq", out="w")
    model = n.model(n("MatMul", n.input("x", (2, 4)), w, name="m", out="y"))
    sim = QuantizationSimModel(model, feeds_for(model), threads=1)
    assert not sim.calibrated and sim.quantizers["w"].frozen
    assert sim.notes == ("the model brought 1 encodings with it, which are in effect and frozen",)
    sim.compute_encodings([feeds_for(model)], progress=False)
    assert float(sim.quantizers["w"].encoding.scale) == np.float32(0.1)
    assert sim.quantizers["m.input[0]"].encoding is not None
    check_same_function(model, feeds_for(model), preset="w8")


def chain(blocks: int) -> onnx.ModelProto:
    n = Net()
    x = q(n, n.input("x", (1, 4)), 0.1, np.uint8(100))
    for i in range(blocks):
        w = n("DequantizeLinear", n.const(np.eye(4, dtype=np.int8)), n.const(np.float32(1)), out=f"w{i}")
        x = q(n, n("MatMul", x, w, name=f"m{i}"), 0.1, np.uint8(100))
    return n.model(n("Relu", x, name="last", out="y"))


def test_reading_is_linear():
    models = {blocks: chain(blocks) for blocks in (20, 80)}
    costs = {blocks: steps(lambda m=model: QuantizationSimModel(m, threads=1)) for blocks, model in models.items()}  # type: ignore[misc]
    assert costs[80] <= 4 * costs[20]


# --------------------------------------------------------------------------------------------- what is refused


def integer_operator() -> onnx.ModelProto:
    n = Net()
    x, w = n.input("x", (2, 4), TensorProto.UINT8), n.const(np.ones((4, 4), np.uint8))
    return n.model((n("MatMulInteger", x, w, name="product", out="y"), TensorProto.INT32, (2, 4)))


def dynamic() -> onnx.ModelProto:
    n = Net()
    codes, scale, zero = n("DynamicQuantizeLinear", n.input("x", (2, 4)), name="dyn", out=["c", "s", "z"])
    return n.model(n("DequantizeLinear", codes, scale, zero, out="y"))


def computed_scale() -> onnx.ModelProto:
    n = Net()
    x, zero = n.input("x", (2, 4)), n.const(np.uint8(0))
    scale = n("ReduceMax", x, name="peak", out="peak_of_x", keepdims=0)
    codes = n("QuantizeLinear", x, scale, zero, name="quantize")
    return n.model(n("DequantizeLinear", codes, scale, zero, name="dq", out="y"), opset=17)


def other_grid() -> onnx.ModelProto:
    n = Net()
    one, two, zero = n.const(np.float32(0.1)), n.const(np.float32(0.2)), n.const(np.uint8(0))
    codes = n("QuantizeLinear", n.input("x", (2, 4)), one, zero, name="quantize")
    return n.model(n("DequantizeLinear", codes, two, zero, name="dq", out="y"))


def codes_returned() -> onnx.ModelProto:
    n = Net()
    one, zero = n.const(np.float32(0.1)), n.const(np.uint8(0))
    return n.model(
        (n("QuantizeLinear", n.input("x", (2, 4)), one, zero, name="quantize", out="y"), TensorProto.UINT8, (2, 4))
    )


def codes_computed_with() -> onnx.ModelProto:
    n = Net()
    one, zero = n.const(np.float32(0.1)), n.const(np.uint8(0))
    codes = n("QuantizeLinear", n.input("x", (2, 4)), one, zero, name="quantize")
    return n.model(n("DequantizeLinear", n("Max", codes, zero, name="largest"), one, zero, out="y"))


def no_scale() -> onnx.ModelProto:
    n = Net()
    return n.model(n("Relu", q(n, n.input("x", (2, 4)), 0.0, np.uint8(0), name="dq"), out="y"))


REFUSED: dict[Callable[..., onnx.ModelProto], str] = {
    integer_operator: "product: the model is quantized already, into operators that cannot be simulated: MatMulInteger "
    "chooses its scale anew for every input. Remedy: start from the float model: dynamic quantization has no fixed "
    "encodings",
    dynamic: "dyn: the model is quantized already, into operators that cannot be simulated: DynamicQuantizeLinear chooses "
    "its scale anew for every input. Remedy: start from the float model: dynamic quantization has no fixed encodings",
    computed_scale: "quantize: its parameter 'peak_of_x' is computed while the model runs. Remedy: start from the float model: "
    "such a quantizer has no fixed encoding",
    other_grid: "dq: it reads the codes of quantize on another grid, Encoding(uint8, scale=0.2, zero_point=0) instead of "
    "Encoding(uint8, scale=0.1, zero_point=0): the model computes on integers here. Remedy: start from the float model",
    codes_returned: "quantize: its codes are returned: the model computes on integers here. Remedy: start from the float "
    "model; every QuantizeLinear needs a DequantizeLinear right after it",
    codes_computed_with: "quantize: its codes are read by largest (Max): the model computes on integers here. Remedy: "
    "start from the float model; every QuantizeLinear needs a DequantizeLinear right after it",
    no_scale: "dq_q: its scale is not a positive number everywhere: 0 to 0. Remedy: quantize the model again; a scale of "
    "zero or less has no meaning",
}


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_what_cannot_be_read_is_refused(build):
    with pytest.raises(ModelError) as error:
        QuantizationSimModel(build())
    assert str(error.value) == REFUSED[build]


def _beside_a_matrix(
    axis: int,
    scales: int | tuple[int, ...],
    *,
    block: int = 0,
    zeros: int | tuple[int, ...] | None = None,
    activation: bool = False,
) -> onnx.ModelProto:
    """A product with a quantizer of its weight of shape 8 x 4, or of its input of shape 2 x 4."""
    n = Net()
    scale = n.const(np.full(scales, 0.1, np.float32))
    zero = n.const(np.zeros(scales if zeros is None else zeros, np.uint8))
    attributes = {"axis": axis, **({"block_size": block} if block else {})}
    x, w = n.input("x", (2, 8)), n.const(np.ones((8, 4), np.uint8))
    if activation:
        codes = n("QuantizeLinear", x, scale, zero, name="q", **attributes)
        x, w = n("DequantizeLinear", codes, scale, zero, name="dq", **attributes), n.weights(8, 4)
    else:
        w = n("DequantizeLinear", w, scale, zero, name="dq", **attributes)
    return n.model(n("MatMul", x, w, name="mm", out="y"), opset=21)


@pytest.mark.parametrize(
    "model, problem",
    [
        (_beside_a_matrix(9, 4), "dq: its axis is 9, and its tensor has 2 axes"),
        (_beside_a_matrix(-3, 4), "dq: its axis is -3, and its tensor has 2 axes"),
        (_beside_a_matrix(2, 8), "dq: its axis is 2, and its tensor has 2 axes"),
        (_beside_a_matrix(9, 8, activation=True), "q: its axis is 9, and its tensor has 2 axes"),
        (_beside_a_matrix(1, 3), r"dq: its scales have the shape \[3\], which does not fit axis 1 .*of shape 8x4"),
        (_beside_a_matrix(1, 3, activation=True), r"q: .*\[3\], which does not fit axis 1 of a tensor of shape 2x8"),
        (_beside_a_matrix(1, 4, zeros=3), "dq: it has 3 zero points and 4 scales"),
        (_beside_a_matrix(0, (3, 4), block=4), r"dq: .*\[3, 4\], which does not fit blocks of 4 along axis 0"),
        (_beside_a_matrix(0, 4, block=4), r"dq: .*\[4\], which does not fit blocks of 4 along axis 0"),
        (_beside_a_matrix(1, 0), "dq: it has no scale"),
    ],
)
def test_scales_that_do_not_belong_to_their_tensor_are_refused(model, problem):
    with pytest.raises(ModelError, match=problem):
        QuantizationSimModel(model)


@pytest.mark.parametrize("zeros", [1, (1, 1)])
def test_one_zero_point_of_any_rank_holds_for_all_scales(zeros):
    (calibrated,) = (
        q for q in QuantizationSimModel(_beside_a_matrix(1, 4, zeros=zeros)).quantizers.values() if q.encoding
    )
    np.testing.assert_array_equal(calibrated.encoding.zero_point, np.zeros(4))


def test_operators_on_integers_of_another_form_are_refused_by_name():
    n = Net()
    one, zero = n.const(np.float32(0.1)), n.const(np.uint8(0))
    codes = n("QuantizeLinear", n.input("x", (1, 4, 4, 3)), one, zero, name="quantize")
    pool = n(
        "QLinearGlobalAveragePool", codes, one, zero, one, zero, name="pool", domain="com.microsoft", channels_last=1
    )
    model = n.model(n("DequantizeLinear", pool, one, zero, out="y"), domains={"com.microsoft": 1})
    problem = (
        r"cannot be simulated: QLinearGlobalAveragePool computes on integers\. Remedy: .*quant_format=QuantFormat\.QDQ"
    )
    with pytest.raises(ModelError, match=problem):
        QuantizationSimModel(model)


def test_weight_only_products_are_read_back_with_their_encodings(tmp_path):
    """The Reshape that keeps ONNX Runtime from fusing them is not part of the model."""
    n = Net()
    x = n.input("x", (4, 64))
    y = n("MatMul", x, n.weights(64, 32, name="w"), name="mm", out="y")
    sim = QuantizationSimModel(n.model(y), preset="w8")
    feeds = {"x": np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)}
    sim.compute_encodings([feeds])
    exported = sim.export(tmp_path, "m")
    again = QuantizationSimModel(exported.qdq)
    assert [node.op_type for node in again.marked.graph if node.op_type != "Site"] == ["MatMul"]
    np.testing.assert_array_equal(
        np.asarray(again.quantizers["w"].encoding.scale), np.asarray(sim.quantizers["w"].encoding.scale)
    )


def test_a_recurrent_layer_written_as_a_scan_is_verified_when_it_is_read_again(tmp_path):
    """The file notes the sites of the simulation that wrote it; in the one that reads it its steps are those of any loop."""
    v = Variant("GRU")
    sim = QuantizationSimModel(layer_model(v), layer_feeds(v), threads=1)
    sim.compute_encodings([layer_feeds(v)])
    again = QuantizationSimModel(sim.export(tmp_path, "m", recurrent="scan").qdq, threads=1)
    report = again.verify(layer_feeds(v))
    assert report.ok and not report.unchecked, str(report)
    assert max(row.run for row in report.rows) > 0
    again.export(tmp_path, "again")
    assert verify_folder(tmp_path, prefix="again").ok


@pytest.mark.parametrize(
    "change, problem",
    [
        ("missing", "this QuantizeLinear of a quantizer has no zero point"),
        ("more", "it has 2 zero points and 1 scales"),
    ],
)
def test_a_changed_quantizer_of_ours_is_named(tmp_path, change, problem):
    model = written(calibrated(net(), DATA), tmp_path, "m")
    node = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    zero = next(t for t in model.graph.initializer if t.name == node.input[2])
    if change == "missing":
        del node.input[2]
    else:
        array = numpy_helper.to_array(zero)
        zero.CopyFrom(numpy_helper.from_array(np.repeat(array.reshape(1), 2), zero.name))
        del model.graph.value_info[:]
    with pytest.raises(ModelError, match=problem):
        QuantizationSimModel(model, threads=1)
