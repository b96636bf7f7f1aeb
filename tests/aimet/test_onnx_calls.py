"""Calls that AIMET's ONNX users write: encodings of another model, ties, batch norms in training mode, sets of equalization."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bitwright.aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight
from bitwright.aimet_onnx.cross_layer_equalization import CrossLayerScaling
from bitwright.aimet_onnx.layer_output_utils import LayerOutput
from bitwright.aimet_onnx.meta.connectedgraph import WEIGHT_INDEX
from bitwright.aimet_onnx.qc_quantize_op import OpMode
from bitwright.aimet_onnx.quantsim import QuantizationSimModel, load_encodings_to_sim
from bitwright.aimet_onnx.utils import (
    ParamUtils,
    get_ordered_dict_of_nodes,
    get_weights,
    remove_nodes_with_type,
    replace_node_with_op,
)
from bitwright.runtimes.onnxruntime import new_session
from tests.aimet.onnx_nets import feeds, folded, net


def graph_of(nodes, weights, inputs, output) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    tensors = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in weights.items()]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [value("output", TensorProto.FLOAT, output)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def joined() -> onnx.ModelProto:
    """Two convolutions of unlike outputs, joined, and a mean over windows of the join."""
    make = helper.make_node
    nodes = [
        make("Conv", ["input", "small"], ["a"], "conv1"),
        make("Conv", ["input", "large"], ["b"], "conv2"),
        make("Concat", ["a", "b"], ["c"], "join", axis=1),
        make("AveragePool", ["c"], ["output"], "pool", kernel_shape=[2, 2]),
    ]
    return graph_of(nodes, {"small": (2, 3, 3, 3), "large": (4, 3, 3, 3)}, {"input": [1, 3, 8, 8]}, None)


def depthwise() -> onnx.ModelProto:
    make = helper.make_node
    nodes = [
        make("Conv", ["input", "w1"], ["a"], "first"),
        make("Relu", ["a"], ["b"], "relu1"),
        make("Conv", ["b", "w2"], ["c"], "middle", group=4),
        make("Relu", ["c"], ["d"], "relu2"),
        make("Conv", ["d", "w3"], ["output"], "last"),
    ]
    weights = {"w1": (4, 3, 3, 3), "w2": (4, 1, 3, 3), "w3": (5, 4, 1, 1)}
    return graph_of(nodes, weights, {"input": [1, 3, 8, 8]}, None)


@pytest.fixture
def saved(tmp_path):
    """A calibrated simulation and the file of its encodings."""
    sim = QuantizationSimModel(folded())
    sim.compute_encodings(feeds())
    sim.export(tmp_path, "model")
    return sim, tmp_path / "model.encodings"


def test_encodings_of_another_model_are_refused(saved):
    other = QuantizationSimModel(depthwise())
    with pytest.raises(AssertionError, match=r"the model has no tensors.*load the file of this model"):
        load_encodings_to_sim(other, saved[1], strict=False)
    assert all(q.encodings is None for q in other.qc_quantize_op_dict.values())


def test_settings_that_differ_are_listed_or_refused(saved):
    sim, path = saved
    other = QuantizationSimModel(folded())
    table = other.qc_quantize_op_dict
    table["conv1.weight"].set_bitwidth(4)
    table["input"].enabled = False
    with pytest.raises(AssertionError, match=r"conv1.weight: bitwidth 4 -> 8"):
        load_encodings_to_sim(other, path)
    assert table["conv1.weight"].bitwidth == 4
    found = {m.quantizer_name: m for m in load_encodings_to_sim(other, path, strict=False)}
    assert found["conv1.weight"].bitwidth_mismatch == (4, 8) and found["conv1.weight"].enabled_mismatch is None
    assert found["input"].enabled_mismatch == (False, True) and len(found) == 2
    (loaded,), (wanted,) = (s.session.run(None, feeds()[0]) for s in (other, sim))
    assert np.array_equal(loaded, wanted)
    assert load_encodings_to_sim(QuantizationSimModel(folded()), path) == []


def test_joins_and_means_share_the_grid_of_what_they_read():
    sim = QuantizationSimModel(joined())
    feed = {"input": np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)}
    sim.compute_encodings([feed])
    grids = {(e.min, e.max, e.delta) for n in ("a", "b", "c", "output") for e in sim.qc_quantize_op_dict[n].encodings}
    assert len(grids) == 1
    found = LayerOutput(joined()).get_outputs(feed)
    (low, high, step) = grids.pop()
    assert abs(high - found["c"].max()) <= step and abs(low - found["c"].min()) <= step


def test_batch_norms_exported_in_training_mode_fold_with_their_statistics():
    plain, training = net(), net()
    for node in training.graph.node:
        if node.op_type == "BatchNormalization":
            node.output.extend([f"{node.name}.mean", f"{node.name}.var"])
            node.attribute.append(helper.make_attribute("training_mode", 1))
    after, before = fold_all_batch_norms_to_weight(training)
    assert [layer.name for layer, _ in after] == ["conv1", "conv2"] and not before
    wanted, found = (new_session(m.SerializeToString()).run(None, feeds()[0])[0] for m in (plain, training))
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_sets_of_equalization_hold_operators_and_join_at_a_depthwise_layer():
    model = depthwise()
    (info,) = CrossLayerScaling(model).scale_model(progress=False)
    first, second = info.cls_pair_info_list
    assert [first.layer1.name, first.layer2.name, second.layer2.name] == ["first", "middle", "last"]
    assert first.relu_activation_between_layers
    weights = [
        numpy_helper.to_array(ParamUtils.get_param(model, layer.get_module(), WEIGHT_INDEX))
        for layer in (first.layer1, first.layer2, second.layer2)
    ]
    ranges = [np.abs(w).max(axis) for w, axis in zip(weights, ((1, 2, 3), (1, 2, 3), (0, 2, 3)), strict=True)]
    np.testing.assert_allclose(ranges[0], ranges[1], rtol=1e-3)
    np.testing.assert_allclose(ranges[1], ranges[2], rtol=1e-3)


def test_quantizers_are_equal_by_tensor_and_simulation(saved):
    sim = QuantizationSimModel(folded())
    assert set(sim.qc_quantize_op_dict.values()) == set(sim.qc_quantize_op_dict.values())
    assert sim.qc_quantize_op_dict["input"] != saved[0].qc_quantize_op_dict["input"]


def test_modes_follow_calibration():
    sim = QuantizationSimModel(folded())
    table = sim.qc_quantize_op_dict
    assert table["conv1.weight"].op_mode is OpMode.oneShotQuantizeDequantize
    assert table["input"].op_mode is OpMode.updateStats
    sim.compute_encodings(feeds())
    assert {table[n].op_mode for n in ("conv1.weight", "input")} == {OpMode.quantizeDequantize}


def test_weights_of_the_simulations_model_have_their_names(saved):
    sim, _ = saved
    held = {t.name: numpy_helper.to_array(t) for t in sim.model.graph().initializer}
    weight = sim.qc_quantize_op_dict["conv1.weight"].quantize_dequantize(sim.constants["conv1.weight"])
    assert np.array_equal(held["conv1.weight"], weight)


def test_constant_operands_are_listed_with_activations(tmp_path):
    model = graph_of(
        [helper.make_node("Add", ["input", "k"], ["a"], "add"), helper.make_node("Relu", ["a"], ["output"], "relu")],
        {"k": (3, 8, 8)},
        {"input": [1, 3, 8, 8]},
        [1, 3, 8, 8],
    )
    sim = QuantizationSimModel(model)
    sim.compute_encodings([{"input": np.ones((1, 3, 8, 8), np.float32)}])
    sim.export(tmp_path, "model", encoding_version="0.6.1")
    written = json.loads((tmp_path / "model.encodings").read_text())
    assert "k" in written["activation_encodings"] and not written["param_encodings"]
    assert written["quantizer_args"]["quant_scheme"] == "min_max"
    assert load_encodings_to_sim(QuantizationSimModel(model), tmp_path / "model.encodings") == []


def test_small_calls_on_graphs():
    graph = folded().graph
    assert list(get_ordered_dict_of_nodes(graph)) == [n.name for n in graph.node]
    assert get_weights("fc.bias", graph) == next(t for t in graph.initializer if t.name == "fc.bias").raw_data
    with pytest.raises(RuntimeError, match="there is no initializer 'nobody'"):
        get_weights("nobody", graph)
    replace_node_with_op("Flatten", "Squeeze", graph)
    remove_nodes_with_type("Relu", graph)
    assert [n.op_type for n in graph.node] == ["Conv", "Conv", "Squeeze", "Gemm"]
    assert graph.node[1].input[0] == graph.node[0].output[0]


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((0,), {}),
        ((feeds(), None), {}),
        ((feeds(),), {"forward_pass_callback": print}),
        ((), {"forward_pass_callback_args": None}),
    ],
)
def test_calibration_takes_feeds_or_one_callback(args, options):
    with pytest.raises(TypeError, match="give compute_encodings"):
        QuantizationSimModel(net()).compute_encodings(*args, **options)


def test_a_callback_with_arguments_is_the_older_call():
    sim = QuantizationSimModel(net())
    with pytest.warns(DeprecationWarning, match="a callback of the session alone"):
        sim.compute_encodings(lambda session, given: session.run(None, given), feeds()[0])
    assert sim.calibrated


@pytest.mark.parametrize(
    ("options", "error"),
    [({"rounding_mode": "stochastic"}, TypeError), ({"param_type": "int4", "default_param_bw": 4}, RuntimeError)],
)
def test_arguments_that_exclude_each_other_are_refused(options, error):
    with pytest.raises(error):
        QuantizationSimModel(net(), **options)


def test_values_that_are_only_moved_have_no_quantizer_and_biases_the_type_of_parameters():
    make = helper.make_node
    nodes = [
        make("Relu", ["input"], ["r"], "relu"),
        make("Flatten", ["r"], ["a"], "flatten"),
        make("Gemm", ["a", "w", "b"], ["output"], "fc"),
    ]
    sim = QuantizationSimModel(
        graph_of(nodes, {"w": (8, 4), "b": (4,)}, {"input": [1, 2, 4]}, [1, 4]), param_type="int4"
    )
    table = sim.qc_quantize_op_dict
    assert set(table) == {"input", "w", "b", "r", "output"} and sim.activation_names == ["input", "r", "output"]
    for quantizer in table.values():
        quantizer.enabled = True
    assert "a" not in sim.qc_quantize_op_dict
    assert (table["b"].enabled, table["b"].bitwidth) == (False, 4)


def test_a_fixed_range_is_told_as_it_was_asked_for():
    sim = QuantizationSimModel(net())
    quantizer = next(q for n, q in sim.qc_quantize_op_dict.items() if n == sim.graph.outputs[0])
    quantizer.set_fixed_encoding_range((0.0, 1.0))
    sim.compute_encodings(feeds())
    assert (quantizer.encodings[0].min, quantizer.encodings[0].max) == (0.0, 1.0)


def test_sensitivities_without_calibration_are_those_of_weights():
    from bitwright.aimet_onnx import analyze_per_layer_sensitivity

    sim, seen = QuantizationSimModel(net()), []
    scores = analyze_per_layer_sensitivity(sim, lambda session: float(seen.append(session) or len(seen)))
    assert len(scores) == len(seen) > 1
    assert not any(site.encoding for site in sim.quantizers.values() if site.role in ("input", "output"))


def test_the_noise_of_a_model_is_that_of_its_worst_output():
    from bitwright.aimet_onnx.utils import make_psnr_eval_fn

    class Session:
        def __init__(self, *outputs):
            self.outputs = [np.asarray(output) for output in outputs]

        def run(self, names, feeds):
            return self.outputs

    real = Session(np.ones(4, np.float32), np.ones(4, np.float32), np.arange(4))
    found = Session(np.full(4, 1.1, np.float32), np.full(4, 1.01, np.float32), np.zeros(4, int))
    assert make_psnr_eval_fn(real, [{}])(found) == pytest.approx(20, abs=1e-3)
    assert make_psnr_eval_fn(real, [{}], 1)(found) == pytest.approx(40, abs=1e-2)
