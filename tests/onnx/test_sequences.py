"""Sequences, maps and optional values: made and read in float, returned as ONNX Runtime returns them, compared by `verify`."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import bitwright.onnx
from bitwright.compare.verify import verify_folder
from bitwright.errors import ModelError
from bitwright.onnx import QuantizationSimModel, check_model, fold_all_batch_norms
from bitwright.runtimes.adapters import arrays_of
from tests.onnx.nets import BOOL, FLOAT, INT64, Net, run
from tests.support.simulations import calibrated

TENSORS = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
SCORES = helper.make_sequence_type_proto(helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, [])))


def typed(model, **types):
    for output in model.graph.output:
        if output.name in types:
            output.CopyFrom(helper.make_value_info(output.name, types[output.name]))
    return model


def linear(net, x, cin, cout, name, **more):
    w, b = net.weights(cout, cin, name=f"{name}.weight"), net.weights(cout, name=f"{name}.bias")
    return net("Gemm", x, w, b, transB=1, name=name, **more)


def classifier(opset=21):
    net = Net()
    hidden = net("Relu", linear(net, net.input("x", ("n", 8)), 8, 16, "first"))
    scores = net("Softmax", linear(net, hidden, 16, 4, "last"), axis=1)
    net("ArgMax", scores, axis=1, keepdims=0, out="label")
    net("ZipMap", scores, out="scores", domain="ai.onnx.ml", classlabels_int64s=[1, 2, 3, 4])
    model = net.model(("label", INT64, ["n"]), "scores", domains={"ai.onnx.ml": 3}, opset=opset)
    return typed(model, scores=SCORES)


def older_classifier():
    return classifier(opset=12)


def returns_a_sequence():
    net = Net()
    hidden = net("Relu", linear(net, net.input("x", ("n", 8)), 8, 16, "first"))
    net("SequenceConstruct", hidden, linear(net, hidden, 16, 4, "last"), out="both")
    return typed(net.model("both"), both=TENSORS)


def split_within():
    net = Net()
    hidden = linear(net, net.input("x", ("n", 8)), 8, 16, "first")
    parts = net("SplitToSequence", hidden, net.const(np.array(8)), axis=1)
    halves = [net("SequenceAt", parts, net.const(np.array(i))) for i in (0, 1)]
    return net.model(linear(net, net("Add", *halves), 8, 4, "last", out="y"))


def grown_in_a_loop():
    inner = Net(3)
    state = inner("Tanh", linear(inner, "state", 8, 8, "step"), out="next")
    inner("SequenceInsert", "kept", state, out="longer")
    inner("Identity", "going", out="goes_on")
    body = helper.make_graph(
        inner.nodes,
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("going", BOOL, []),
            helper.make_tensor_value_info("state", FLOAT, [2, 8]),
            helper.make_value_info("kept", TENSORS),
        ],
        [
            helper.make_tensor_value_info("goes_on", BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, [2, 8]),
            helper.make_value_info("longer", TENSORS),
        ],
        inner.initializers,
    )
    net = Net()
    steps, going = net.const(np.array(3)), net.const(np.array(True))
    x, empty = net.input("x", (2, 8)), net("SequenceEmpty")
    _, kept = net("Loop", steps, going, x, empty, body=body, out=["end", "kept_all"])
    y = linear(net, net("ConcatFromSequence", kept, axis=0), 8, 4, "last", out="y")
    return typed(net.model(y, kept), kept_all=TENSORS)


def optional_within():
    net = Net()
    hidden = net("Optional", linear(net, net.input("x", ("n", 8)), 8, 16, "first"))
    return net.model(linear(net, net("OptionalGetElement", hidden), 16, 4, "last", out="y"), opset=18)


MODELS = (classifier, older_classifier, returns_a_sequence, split_within, grown_in_a_loop, optional_within)


def batches(count=4):
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((2, 8)).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_simulated_calibrated_exported_and_verified(build, tmp_path):
    proto, data = build(), batches()
    before = proto.SerializeToString()
    sim = calibrated(QuantizationSimModel(proto, data[0]), data)
    assert proto.SerializeToString() == before
    for expected, found in zip(run(proto, data[0]), sim.run(data[0]), strict=True):
        assert type(expected) is type(found)
        for one, other in zip(arrays_of(expected), arrays_of(found), strict=True):
            np.testing.assert_allclose(other, one, atol=0.15)
    sim.export(tmp_path, "model")
    report = verify_folder(tmp_path)
    assert report.ok, str(report)
    names = {row.name.partition("[")[0] for row in report.outputs}
    assert names == {output.name for output in proto.graph.output}
    written = onnx.load(tmp_path / "model.onnx")
    assert [o.type.WhichOneof("value") for o in written.graph.output] == [
        o.type.WhichOneof("value") for o in proto.graph.output
    ]
    assert check_model(proto, data).ok
    assert not fold_all_batch_norms(build(), data[0])


def test_types_with_maps_are_in_every_file_and_message(tmp_path):
    proto = classifier()
    scores = next(o for o in proto.graph.output if o.name == "scores")
    sim = calibrated(QuantizationSimModel(proto, batches()[0]), batches())
    sim.export(tmp_path, "model")
    for name in ("model.onnx", "model_float.onnx"):
        path = tmp_path / name
        if path.exists():
            output = next(o for o in onnx.load(path).graph.output if o.name == "scores")
            assert output.type == scores.type and not output.metadata_props
    fold_all_batch_norms(proto)
    assert next(o for o in proto.graph.output if o.name == "scores") == scores


@pytest.mark.parametrize("build", (classifier, grown_in_a_loop, split_within), ids=lambda b: b.__name__)
def test_the_default_recipe_runs_and_its_export_verifies(build, tmp_path):
    bitwright.onnx.quantize(build(), batches(6), path=tmp_path, progress=False)
    report = verify_folder(tmp_path)
    assert report.ok, str(report)


@pytest.mark.parametrize("build", (classifier, returns_a_sequence), ids=lambda b: b.__name__)
def test_the_analysis_measures_the_numbers_in_them(build):
    sim = calibrated(QuantizationSimModel(build(), batches()[0]), batches())
    assert "dB" in str(bitwright.analyze(sim, batches()))


@pytest.mark.parametrize("method", ("adaround", "gptq", "seq_mse", "bias_correction"))
def test_weight_methods_on_a_sequence_and_a_map(method):
    for build in (returns_a_sequence, classifier):
        sim = calibrated(QuantizationSimModel(build(), batches()[0]), batches())
        if method == "bias_correction":
            bitwright.onnx.apply_bias_correction(sim, batches(), progress=False)
        else:
            options = {"iterations": 5} if method == "adaround" else {}
            bitwright.onnx.apply_reconstruction(sim, batches(), method, progress=False, **options)
        assert sim.verify().ok


def test_weight_only_models_are_compared_at_the_elements_of_a_sequence():
    sim = calibrated(QuantizationSimModel(returns_a_sequence(), batches()[0], preset="w8"), batches())
    report = sim.verify()
    assert report.ok and [row.name for row in report.outputs] == ["both[0]", "both[1]"]


def test_inputs_that_are_no_tensors_are_refused():
    net = Net()
    net("SequenceAt", "s", net.const(np.array(0)), out="y")
    net.inputs.append(helper.make_value_info("s", TENSORS))
    with pytest.raises(ModelError, match=r"its input 's' is not a tensor but a sequence, and data are arrays"):
        QuantizationSimModel(net.model("y"))


def test_reading_a_map_leaves_the_message_as_it_was():
    from bitwright.export.files.onnx_file import from_proto, restore_types

    proto = classifier()
    before = proto.SerializeToString()
    model = from_proto(proto)
    assert proto.SerializeToString() == before
    again = ir.to_proto(model)
    assert not again.graph.output[1].HasField("type")
    assert restore_types(again) and again.graph.output[1] == proto.graph.output[1]


def test_arrays_of_nested_outputs():
    a, b = np.zeros(2), np.ones((1, 3))
    assert all(x is y for x, y in zip(arrays_of([a, [b, None]]), [a, b], strict=True))
    assert arrays_of([{1: 0.25, 2: 0.75}, {1: 0.5}])[0].tolist() == [0.25, 0.75, 0.5]
