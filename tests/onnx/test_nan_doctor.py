"""The ONNX doctor beyond the planted faults: what a report holds, what it costs, and calibration under the policies."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bitwright.core.health.report import CLEAN
from bitwright.errors import CalibrationError, ConfigError, ModelError
from bitwright.onnx import QuantizationSimModel, check_model
from bitwright.onnx.model.data import input_specs, random_array
from bitwright.onnx.model.load import load_model
from bitwright.onnx.nan_doctor import Frame, Probe, flags_of
from tests.onnx import faulty, flow
from tests.onnx.nets import Net, feeds_for
from tests.support import data as real
from tests.support.cost import steps
from tests.support.simulations import calibrated


def divides() -> tuple[onnx.ModelProto, list[np.ndarray]]:
    """``y = h / relu(h)`` between two products, and four batches of which the third shows it."""
    net = Net()
    h = faulty.head(net)
    model = faulty.tail(net, net("Div", h, net("Relu", h, name="relu"), name="share", out="shares"))
    batches = [np.ones((4, 4), np.float32) for _ in range(4)]
    batches[2][1] = batches[3][0] = -1
    return model, batches


# -- what a report says


def test_a_report_holds_everything_about_the_operator():
    report = check_model(*divides())
    culprit = report.culprit
    assert (culprit.op, culprit.op_type, culprit.where) == ("share", "Div", "share")
    assert (culprit.batch, culprit.sample, culprit.batches) == (2, 1, 2)
    assert [x.zeros for x in culprit.inputs] == [0, 4] and all(x.finite for x in culprit.inputs)
    assert (culprit.outputs[0].neg_inf, culprit.outputs[0].first_bad) == (4, (1, 0))
    assert (culprit.spread, culprit.spread_names, culprit.reached) == (1, ("tail",), ("y",))
    assert (report.batches, report.calls) == (4, 16)
    text = report.text()
    assert "share (Div): the divisor" in text and "remedy: add a small epsilon" in text
    assert json.loads(report.to_json())["culprits"][0]["sample"] == 1


def test_parameters_of_the_operator_are_told_from_its_inputs():
    culprit = check_model(*next(f for f in faulty.FAULTS if f.name == "half-precision product").build()).culprit
    assert [x.name for x in culprit.params] == ["hundred"] and culprit.params[0].max == 100
    assert len(culprit.inputs) == 1 and culprit.inputs[0].dtype == "float16"


def test_a_healthy_model():
    model, batches = divides()
    report = check_model(model, batches[:2])
    assert report.ok and report.exit_code == 0 and not report.notes and report.culprit is None
    assert report.text() == "net: healthy (2 batches, 8 calls)"


def test_what_is_harmless_is_noted():
    case = next(c for c in faulty.LOOK_ALIKES if c.name == "logarithm kept where it is defined")
    report = check_model(*case.build())
    assert report.ok
    assert report.notes == ("log (Log) makes values that are not finite; nothing of them is left at the end",)


@pytest.mark.parametrize(
    "name, note",
    [
        ("-inf mask before a softmax", "the constant causal is a mask or a bound: its values are not finite; nothing"),
        ("words that a model must not say", "the constant never is a mask or a bound: .* they reach an output"),
        ("missing values in the data, filled in by the model", "the input x is not finite; nothing of them is left"),
        ("running maximum that starts at -inf in a loop", "the constant start is a mask or a bound"),
    ],
)
def test_masks_are_noted(name, note):
    case = next(c for c in faulty.LOOK_ALIKES if c.name == name)
    report = check_model(*case.build())
    assert report.ok and any(re.match(note, line) for line in report.notes), report.notes


def test_several_bad_parameters_are_all_named_and_nothing_is_run():
    net = Net()
    net.conv(net.input("x", (1, 3, 8, 8)), name="first", out="y")
    for tensor in net.initializers:
        array = onnx.numpy_helper.to_array(tensor).copy()
        array.reshape(-1)[-1] = np.inf
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    report = check_model(net.model("y"), [{"nothing": "that fits"}])
    assert [c.op for c in report.culprits] == ["first.weight", "first.bias"]
    assert [x.first_bad for x in report.bad_params] == [(3, 2, 2, 2), (3,)]
    assert report.culprit.where == "first (Conv)" and report.batches == 0


def test_bad_data_is_listed_also_where_the_model_takes_it():
    case = next(c for c in faulty.LOOK_ALIKES if c.name.startswith("missing values"))
    report = check_model(*case.build())
    assert report.ok and [x.name for x in report.bad_inputs] == ["x, batch 0"] and report.bad_inputs[0].nan == 4


def test_without_data_random_values_are_fed():
    net = Net()
    y = net("Log", net("Neg", net("Abs", net.input("x", (2, 4)), name="abs"), name="neg"), name="log", out="y")
    assert check_model(net.model(y)).culprit.op == "log"


def test_the_model_is_left_alone(tmp_path):
    model, batches = divides()
    before = model.SerializeToString()
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    report = check_model(path, batches)
    assert report.model == "model.onnx" and report.culprit.op == "share"
    check_model(model, batches)
    assert model.SerializeToString() == before and sorted(tmp_path.iterdir()) == [path]


def test_several_epochs_of_the_same_fault_are_one_culprit():
    model, batches = divides()
    report = check_model(model, batches * 3)
    assert len(report.culprits) == 1 and report.culprit.batches == 6 and report.culprit.batch == 2


def test_batches_are_counted_and_not_the_steps_of_a_loop():
    model, batches = next(f for f in faulty.FAULTS if f.name.startswith("overflow in a loop that runs")).build()
    assert check_model(model, batches).culprit.batches == 1
    assert check_model(model, batches * 2).culprit.batches == 2
    model, batches = next(f for f in faulty.FAULTS if f.name.startswith("logarithm in a loop that fills")).build()
    assert check_model(model, batches * 2).culprit.batches == 2


def test_ctrl_c_keeps_what_was_found():
    model, batches = divides()

    def feed():
        yield from batches[:3]
        raise KeyboardInterrupt

    report = check_model(model, feed())
    assert report.culprit.op == "share" and report.notes == ("interrupted after 3 batches",)


# -- errors


@pytest.mark.parametrize(
    "data, error, message",
    [
        ([], CalibrationError, "check_model: the data held no batch. Remedy: pass a non-empty list"),
        (np.ones((4, 4), np.float32), CalibrationError, "data is an ndarray, not a list of batches"),
        ([np.ones((4, 3), np.float32)], ModelError, "batch 0: the input x .* was given an array of shape 4x3"),
        (
            [np.ones((4, 4), np.float32), np.ones((0, 4), np.float32)],
            CalibrationError,
            "batch 1: it holds no sample: x is 0x4. Remedy: leave empty batches out",
        ),
    ],
    ids=["empty", "one-batch", "wrong-shape", "empty-batch"],
)  # fmt: skip
def test_data_that_cannot_be_used(data, error, message):
    with pytest.raises(error, match=message):
        check_model(divides()[0], data)


def test_a_provider_that_is_not_there():
    with pytest.raises(ConfigError, match="'CPUExecutionprovider' is not available .*did you mean"):
        check_model(*divides(), providers=["CPUExecutionprovider"])


def test_a_batch_on_which_the_model_fails():
    net = Net()
    x = net.input("x", ("n", 4))
    y = net("Reshape", x, net.const(np.int64([2, 4])), name="fixed", out="y")
    with pytest.raises(CalibrationError, match="check_model: the model fails on a batch: .*fixed"):
        check_model(net.model(y), [np.ones((3, 4), np.float32)])


# -- the probe


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("opset", [7, 11, 13, 21])
def test_non_finite_values_are_told_apart_at_every_opset_and_place(dtype, opset):
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    net = Net()
    y = net("Identity", net.input("x", ("n",), kind), name="copy", out="y")
    probe = Probe(load_model(net.model((y, kind, None), opset=opset)).model)
    for size in (1, 17, 40):
        for at in range(size):
            for bad in (np.nan, np.inf, -np.inf):
                x = np.linspace(-2, 2, size).astype(dtype)
                x[at] = bad
                frame = Frame(probe, {"x": x})
                assert frame.suspects == ["y"] and frame.flags("y") == flags_of(x)
                assert frame.flags("y").bad and len(frame.flags("y")) == 3


def test_a_sum_that_overflows_over_finite_values_is_only_a_suspicion():
    net = Net()
    y = net("Neg", net.input("x", ("n",)), name="minus", out="y")
    frame = Frame(Probe(load_model(net.model(y)).model), {"x": np.full(16, 3e38, np.float32)})
    assert frame.suspects == ["y"] and frame.flags("y") == CLEAN


@pytest.mark.parametrize("build", [flow.branches, flow.scan, flow.loop, flow.two_results], ids=lambda b: b.__name__)
def test_bodies_run_step_by_step_as_the_runtime_runs_them(build):
    """What the last step of a body hands out is what the node hands out."""
    model = load_model(build()).model
    probe = Probe(model)
    for seed in range(2):
        feeds = feeds_for(build(), seed)
        if "choose" in feeds:
            feeds["choose"] = np.array(seed == 0)
        frame = Frame(probe, feeds)
        for node in probe.bodies:
            names = [str(v.name) for v in node.outputs]
            expected = frame.fetch(names)
            *_, last = frame.runs(node)
            found = [last.outputs[name] for name in last.probe.outputs][1 if node.op_type == "Loop" else 0 :]
            for name, array in zip(names, found, strict=True):
                whole = expected[name]
                assert np.allclose(whole if whole.shape == array.shape else whole[-1], array, atol=1e-6)


def test_scans_along_other_axes_and_backwards():
    net = Net()
    x = net.input("x", (2, 5))
    inner = Net()
    h = inner("Add", inner("Log", "x_t", name="culprit"), "h_in", name="sum", out="h_out")
    step = faulty.body(h, net=inner, inputs=[("h_in", faulty.FLOAT, (2,)), ("x_t", faulty.FLOAT, (2,))])
    start = net.const(np.zeros(2, np.float32), "start")
    net("Scan", start, x, name="scan", out=["y"], body=step, num_scan_inputs=1, scan_input_axes=[1],
        scan_input_directions=[1])  # fmt: skip
    data = np.ones((2, 5), np.float32)
    data[1, 1] = -1
    culprit = check_model(net.model("y"), [data]).culprit
    assert culprit.where == "iteration 3 of scan (Scan)" and culprit.inputs[0].min == -1


def chain(count: int, *, bad: bool) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    net = Net()
    h = net.input("x", ("n", 2))
    for i in range(count):
        h = net("Neg" if i or not bad else "Sqrt", h, name=f"node{i}", out=f"v{i}")
    return net.model(h), [np.full((2, 2), -1, np.float32)]


@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "faulty"])
def test_cost_is_linear_in_the_size_of_the_model(bad):
    small, large = (steps(lambda n=n: check_model(*chain(n, bad=bad))) for n in (60, 240))
    assert large < 4.6 * small


def test_a_fault_at_the_start_of_a_long_chain():
    culprit = check_model(*chain(500, bad=True)).culprit
    assert culprit.op == "node0" and culprit.spread == 499 and len(culprit.spread_names) <= 8


@pytest.mark.parametrize("name", ["mnist_cntk", "mnist_pytorch", "face_slim_320", "resnet20_aux", "lstm_char"])
def test_trained_models_are_healthy_and_a_broken_one_is_not(shared_data, name):
    path = real.onnx_file(name)
    specs = input_specs(load_model(path).model)
    rng = np.random.default_rng(0)
    batches = [{spec.name: random_array(spec, rng) for spec in specs} for _ in range(2)]
    report = check_model(path, batches)
    assert report.ok and not report.notes, report
    floats = [array for array in batches[1].values() if array.dtype == np.float32]
    for array in floats:
        array.reshape(-1)[7] = np.nan
    culprit = check_model(path, batches).culprit
    assert culprit is None if not floats else (culprit.cause, culprit.batch) == ("bad input data", 1)


def with_root(model: onnx.ModelProto, value: str) -> onnx.ModelProto:
    """A copy in which ``sqrt(-1 - |value|)`` takes the place of ``value`` for all that read it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = copy.graph.node
    at = next(i for i, node in enumerate(nodes) if value in node.output)
    for node in nodes[at + 1 :]:
        node.input[:] = ["planted_d" if name == value else name for name in node.input]
    make = onnx.helper.make_node
    chain = [
        make("Abs", [value], ["planted_a"], name="magnitude"),
        make("Neg", ["planted_a"], ["planted_b"], name="minus"),
        make("Sub", ["planted_b", "planted_one"], ["planted_c"], name="less"),
        make("Sqrt", ["planted_c"], ["planted_d"], name="planted"),
    ]
    copy.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1), "planted_one"))
    for i, node in enumerate(chain):
        nodes.insert(at + 1 + i, node)
    return copy


@pytest.mark.parametrize("name", ["mnist_cntk", "face_slim_320", "resnet20_aux", "lstm_char"])
def test_a_root_put_anywhere_into_a_trained_model_is_named(shared_data, name):
    loaded = load_model(real.onnx_file(name)).model
    model, rng = ir.to_proto(loaded), np.random.default_rng(0)
    feeds = {spec.name: random_array(spec, rng) for spec in input_specs(loaded)}
    outputs = set(loaded.graph.outputs)
    inner = [v for node in loaded.graph for v in node.outputs if v.dtype == ir.DataType.FLOAT and v not in outputs]
    for value in rng.choice([str(v.name) for v in inner if v.uses()], 3, replace=False):
        culprit = check_model(with_root(model, value), [feeds]).culprit
        assert culprit is not None and culprit.op == "planted", value
        assert culprit.cause == "root of a negative number"


# -- calibration


def fails_in_batch_2(non_finite=None, **more):
    model, batches = divides()
    sim = QuantizationSimModel(model, batches[0])
    sim.compute_encodings(batches, **({} if non_finite is None else {"non_finite": non_finite}), **more)
    return sim


def test_calibration_stops_at_the_batch_and_names_the_node():
    with pytest.raises(CalibrationError) as error:
        fails_in_batch_2()
    assert error.value.site == "batch 2, share"
    assert "Div made values that are not finite of sample 1: the divisor" in error.value.problem
    assert "add a small epsilon" in error.value.remedy and "non_finite='skip'" in error.value.remedy


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
def test_a_batch_that_is_skipped_leaves_no_trace(scheme):
    model, batches = divides()

    def encodings(data, **more):
        sim = calibrated(QuantizationSimModel(model, batches[0], scheme), data, **more)
        return {name: site.encoding for name, site in sim.quantizers.items()}, sim.calibration_log

    clean, _ = encodings(batches[:2])
    skipped, log = encodings(batches, non_finite="skip")
    turned, _ = encodings(batches[::-1], non_finite="skip")
    assert clean == skipped == turned and log.skipped == [2, 3]


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
def test_clamped_encodings_do_not_depend_on_the_order_of_batches(scheme):
    model, batches = divides()
    found = []
    for data in (batches, batches[::-1]):
        sim = calibrated(QuantizationSimModel(model, batches[0], scheme), data, non_finite="clamp")
        found.append({name: site.encoding for name, site in sim.quantizers.items()})
        assert len(sim.calibration_log.clamped) == 2
    assert found[0] == found[1]
    assert all(np.isfinite(e.scale).all() and (e.scale > 0).all() for e in found[0].values() if e is not None)


def test_a_mask_does_not_stop_calibration():
    case = next(c for c in faulty.LOOK_ALIKES if c.name == "-inf mask before a softmax")
    model, batches = case.build()
    sim = calibrated(QuantizationSimModel(model, batches[0]), batches)
    assert sim.calibrated and all(np.isfinite(s.encoding.scale).all() for s in sim.quantizers.values() if s.encoding)


def test_a_bad_weight_is_refused_by_name_before_anything_runs():
    model, batches = next(f for f in faulty.FAULTS if f.name == "NaN in a convolution's weight").build()
    with pytest.raises(CalibrationError, match=r"first.weight: the parameter .* the first nan at index \[3, 1, 0, 2\]"):
        QuantizationSimModel(model, batches[0]).compute_encodings([{"nothing": "that fits"}])


def test_an_unknown_policy():
    with pytest.raises(ConfigError, match="'skipp' .*did you mean 'skip'"):
        fails_in_batch_2("skipp")


def test_a_rule_gives_a_site_a_policy_of_its_own():
    model, batches = divides()
    rules = {"preset": "w8a8", "rules": [{"match": "tail", "all": {"non_finite": "clamp"}}]}
    sim = calibrated(QuantizationSimModel(model, batches[0], config_file=rules), batches)
    assert sim.calibration_log.clamped == [2, 3]


def test_a_callback_is_stopped_too():
    model, batches = divides()
    sim = QuantizationSimModel(model, batches[0])

    def feed(session):
        for batch in batches:
            session.run(None, {"x": batch})

    with pytest.raises(CalibrationError, match="batch 2, share: Div made values that are not finite"):
        sim.compute_encodings(feed)
    sim.compute_encodings(feed, non_finite="skip")
    assert sim.calibration_log.skipped == [2, 3]


def test_ctrl_c_keeps_the_batches_that_count():
    model, batches = divides()

    def feed():
        yield from (batches[0], batches[2])
        raise KeyboardInterrupt

    sim = QuantizationSimModel(model, batches[0])
    with pytest.raises(KeyboardInterrupt):
        sim.compute_encodings(feed(), non_finite="skip")
    one = calibrated(QuantizationSimModel(model, batches[0]), batches[:1])
    assert {n: s.encoding for n, s in sim.quantizers.items()} == {n: s.encoding for n, s in one.quantizers.items()}


def test_when_every_batch_is_left_out():
    model, batches = divides()
    with pytest.raises(CalibrationError, match="all 2 batches were left out"):
        QuantizationSimModel(model, batches[0]).compute_encodings(batches[2:], non_finite="skip")


def test_a_model_that_was_quantized_in_a_loop_body_stops_with_the_node_inside():
    case = next(c for c in faulty.FAULTS if c.name == "logarithm in a scan")
    model, batches = case.build()
    with pytest.raises(CalibrationError, match="batch 0, culprit: Log made values that are not finite"):
        QuantizationSimModel(model, batches[0]).compute_encodings(batches)
