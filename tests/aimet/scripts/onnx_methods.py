"""Methods that repair an ONNX model, analyses, and searches for a precision."""

import json
import math
import os

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from tests.aimet.onnx_nets import feeds, folded, net


def adaround():
    import aimet_onnx

    sim = aimet_onnx.QuantizationSimModel(folded(), param_type="int4", activation_type="int8")
    aimet_onnx.apply_adaround(sim, feeds(), num_iterations=10, nodes_to_include=["conv1", "fc"])
    assert sim.qc_quantize_op_dict["conv1.weight"].is_encoding_frozen()
    assert not sim.qc_quantize_op_dict["conv2.weight"].is_encoding_frozen()
    sim.compute_encodings(feeds())


def auto_quant_warns():
    """AutoQuant for ONNX as in the versions of AIMET that had it."""
    from aimet_common.defs import QuantScheme
    from aimet_onnx.auto_quant import AutoQuant

    session = ort.InferenceSession(folded().SerializeToString())
    wanted = np.concatenate([session.run(None, feed)[0] for feed in feeds(8)]).argmax(1)

    def eval_callback(session, num_samples=None):
        found = np.concatenate([session.run(None, feed)[0] for feed in feeds(8)]).argmax(1)
        return float((found == wanted).mean())

    auto_quant = AutoQuant(
        folded(),
        dummy_input=feeds()[0],
        data_loader=feeds(8),
        eval_callback=eval_callback,
        param_bw=8,
        output_bw=8,
        quant_scheme=QuantScheme.post_training_tf_enhanced,
        results_dir="./autoquant",
    )
    sim, accuracy = auto_quant.run_inference()
    assert accuracy == eval_callback(sim.session)
    best, accuracy, encodings = auto_quant.optimize(allowed_accuracy_drop=0.1)
    assert accuracy >= 0.9 and os.path.isfile(encodings)


def batch_norms_found():
    from aimet_onnx.batch_norm_fold import find_all_batch_norms_to_fold
    from aimet_onnx.meta.connectedgraph import ConnectedGraph

    model = net()
    graph = ConnectedGraph(model)
    conv_bn, bn_conv = find_all_batch_norms_to_fold(graph)
    assert [(conv.name, bn.name) for conv, bn in conv_bn] == [("conv1", "bn1"), ("conv2", "bn2")] and not bn_conv
    assert sum(node.op_type == "BatchNormalization" for node in model.graph.node) == 2  # found, not folded
    assert graph.get_all_ops()["conv1"].get_module().op_type == "Conv"


def equalize():
    from aimet_onnx.cross_layer_equalization import equalize_model

    model = net()
    before = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
    equalize_model(model)
    after = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
    assert np.abs(after - before).max() < 0.2


def equalize_parts():
    from aimet_onnx.batch_norm_fold import BNLayer
    from aimet_onnx.cross_layer_equalization import CrossLayerScaling, HighBiasFold

    model = folded()
    cls_set_info_list = CrossLayerScaling(model).scale_model()
    pair = cls_set_info_list[0].cls_pair_info_list[0]
    assert pair.layer1.name == "conv1" and pair.layer2.name == "conv2" and pair.relu_activation_between_layers
    bn_layers = {"conv1": BNLayer(gamma=np.ones(8), beta=np.full(8, 5.0))}
    HighBiasFold(model).bias_fold(cls_set_info_list, bn_layers)


def equalize_sets():
    from aimet_onnx.cross_layer_equalization import CrossLayerScaling
    from aimet_onnx.meta.connectedgraph import ConnectedGraph

    model = folded()
    before = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
    ops = ConnectedGraph(model).get_all_ops()
    factor = CrossLayerScaling(model).scale_cls_set_with_conv_layers((ops["conv1"], ops["conv2"]))
    assert factor.shape == (8,) and abs(factor - 1).max() > 0.01
    after = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
    assert abs(after - before).max() < 1e-5

    rng = np.random.default_rng(0)
    weights = {"w1": (6, 3, 1, 1), "w2": (6, 1, 3, 3), "w3": (4, 6, 1, 1)}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w1"], ["a"], "first"),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Conv", ["b", "w2"], ["c"], "depthwise", group=6, kernel_shape=[3, 3]),
            helper.make_node("Relu", ["c"], ["d"]),
            helper.make_node("Conv", ["d", "w3"], ["y"], "last"),
        ],
        "separable",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in weights.items()],
    )
    separable = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    nodes = {node.name: node for node in separable.graph.node}
    s12, s23 = CrossLayerScaling(separable).scale_cls_set_with_depthwise_layers(
        (nodes["first"], nodes["depthwise"], nodes["last"])
    )
    assert s12.shape == s23.shape == (6,)


def fold_param_quantizers():
    from aimet_onnx import QuantizationSimModel

    sim = QuantizationSimModel(folded(), param_type="int4")
    sim.compute_encodings(feeds())
    before = sim.session.run(None, feeds()[0])[0]
    step = sim.qc_quantize_op_dict["output"].get_encodings()[0].delta
    sim.fold_param_quantizers()
    assert not sim.qc_quantize_op_dict["conv1.weight"].enabled
    assert np.abs(sim.session.run(None, feeds()[0])[0] - before).max() <= 1.01 * step


def fold_two_lists():
    from aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight

    model = net()
    before = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
    conv_bn, bn_conv = fold_all_batch_norms_to_weight(model)
    assert [(conv.name, bn.name) for conv, bn in conv_bn] == [("conv1", "bn1"), ("conv2", "bn2")] and not bn_conv
    assert not any(node.op_type == "BatchNormalization" for node in model.graph.node)
    after = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
    assert abs(after - before).max() < 1e-4


def mixed_precision_automatic():
    """choose_mixed_precision on an ONNX model."""
    from aimet_onnx.common.defs import CallbackFunc, QuantizationDataType
    from aimet_onnx.mixed_precision import choose_mixed_precision
    from aimet_onnx.quantsim import QuantizationSimModel

    session = ort.InferenceSession(folded().SerializeToString())
    wanted = [session.run(None, feed)[0] for feed in feeds(8)]

    def forward_pass(session, _):
        for feed in feeds(8):
            session.run(None, feed)

    def agreement(session, _):
        found = [session.run(None, feed)[0] for feed in feeds(8)]
        return float(np.mean([a.argmax(-1) == b.argmax(-1) for a, b in zip(found, wanted, strict=True)]))

    def quality(session, _):
        found = [session.run(None, feed)[0] for feed in feeds(8)]
        noise = sum(((a - b) ** 2).sum() for a, b in zip(found, wanted, strict=True))
        return float(10 * np.log10(sum((a**2).sum() for a in wanted) / (noise + 1e-12)))

    sim = QuantizationSimModel(folded(), default_param_bw=16, default_activation_bw=16)
    sim.compute_encodings(forward_pass, None)
    kind = QuantizationDataType.int
    candidates = [((16, kind), (16, kind)), ((16, kind), (8, kind)), ((8, kind), (8, kind)), ((8, kind), (4, kind))]
    pareto = choose_mixed_precision(
        sim,
        candidates,
        CallbackFunc(quality, None),
        CallbackFunc(agreement, None),
        0.1,
        "./amp",
        True,
        CallbackFunc(forward_pass, None),
    )
    assert pareto is None or all(len(entry) == 4 for entry in pareto)
    assert os.path.isdir("amp")
    assert agreement(sim.session, None) >= 0.9


def mixed_precision_sensitivity():
    """The pair analyze_mixed_precision_sensitivity and apply_amp."""
    from aimet_onnx import QuantizationSimModel, int4, int8, int16
    from aimet_onnx.mixed_precision import analyze_mixed_precision_sensitivity, apply_amp
    from aimet_onnx.utils import make_psnr_eval_fn

    session = ort.InferenceSession(folded().SerializeToString())
    rate = make_psnr_eval_fn(session, feeds())

    sim = QuantizationSimModel(folded(), param_type=int8, activation_type=int16)
    sim.compute_encodings(feeds())
    best = rate(sim.session)
    found = analyze_mixed_precision_sensitivity(sim, [(int8, int16), (int8, int8), (int4, int8)], rate, feeds())
    apply_amp(sim, found, lambda session: rate(session) > best - 6)
    assert best >= rate(sim.session) > best - 6

    # a function of the session calibrates as well
    other = QuantizationSimModel(folded(), param_type=int8, activation_type=int16)

    def calibrate(session):
        for feed in feeds():
            session.run(None, feed)

    other.compute_encodings(calibrate)
    assert analyze_mixed_precision_sensitivity(other, [(int8, int16), (int4, int16)], rate, calibrate)


def ptq_whole():
    import aimet_onnx
    from aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight

    model = net()
    expected = ort.InferenceSession(model.SerializeToString()).run(None, feeds()[0])[0]
    fold_all_batch_norms_to_weight(model)
    sim = aimet_onnx.QuantizationSimModel(model, param_type="int8", activation_type=aimet_onnx.int8)
    sim.compute_encodings(feeds())
    (output,) = sim.session.run(None, feeds()[0])
    assert 0 < np.abs(output - expected).max() < 0.2
    sim.export(path=".", filename_prefix="net")


def quant_analyzer():
    """QuantAnalyzer on an ONNX model."""
    from aimet_onnx.common.defs import CallbackFunc, QuantScheme
    from aimet_onnx.quant_analyzer import QuantAnalyzer

    model = folded()
    session = ort.InferenceSession(model.SerializeToString())
    wanted = [session.run(None, feed)[0] for feed in feeds()]

    def forward_pass(session, _):
        for feed in feeds():
            session.run(None, feed)

    def evaluate(session, _):
        found = [session.run(None, feed)[0] for feed in feeds()]
        return -float(np.mean([(a - b) ** 2 for a, b in zip(found, wanted, strict=True)]))

    analyzer = QuantAnalyzer(
        model=model,
        dummy_input=feeds()[0],
        forward_pass_callback=CallbackFunc(forward_pass, None),
        eval_callback=CallbackFunc(evaluate, None),
    )
    analyzer.enable_per_layer_mse_loss([list(feed.values()) for feed in feeds()], num_batches=2)
    analyzer.analyze(
        quant_scheme=QuantScheme.post_training_tf_enhanced,
        default_param_bw=8,
        default_activation_bw=8,
        config_file=None,
        results_dir="./results/",
    )
    for name in ("per_layer_quant_enabled", "per_layer_quant_disabled", "per_layer_mse_loss"):
        assert os.path.isfile(f"results/{name}.html")
        with open(f"results/{name}.json") as file:
            assert json.load(file)


def sensitivity_of_layers():
    """Layers by sensitivity, and a higher precision for the most sensitive ones (lite mixed precision)."""
    import aimet_onnx
    from aimet_onnx import QuantizationSimModel, analyze_per_layer_sensitivity, int4, int8, int16
    from aimet_onnx.lite_mp import flip_layers_to_higher_precision
    from aimet_onnx.utils import make_psnr_eval_fn

    model = folded()
    session = ort.InferenceSession(model.SerializeToString())

    def simulate():
        sim = QuantizationSimModel(folded(), param_type=int4, activation_type=int8)
        sim.compute_encodings(feeds())
        return sim

    sim = simulate()
    rate = make_psnr_eval_fn(session, feeds())
    scores = analyze_per_layer_sensitivity(sim, rate, "layers.html")
    assert {"conv1", "conv2", "fc"} <= set(scores) and os.path.isfile("layers.html")
    assert all(math.isfinite(score) and score > 0 for score in scores.values())

    before = rate(sim.session)
    flip_layers_to_higher_precision(sim, scores, percent_to_flip=34, override_precision=aimet_onnx.float16)
    sim.compute_encodings(feeds())
    assert rate(sim.session) > before

    # weights and activations apart: (param_type, activation_type)
    worst = min(("conv1", "conv2", "fc"), key=scores.get)
    other = simulate()
    flip_layers_to_higher_precision(other, {worst: scores[worst]}, 100, override_precision=(int8, int16))
    other.compute_encodings(feeds())
    assert other.qc_quantize_op_dict[f"{worst}.weight"].bitwidth == 8
    assert rate(other.session) > before


def sensitivity_of_quantizers():
    """Quantizers by sensitivity: the metric, groups, files and the page."""
    from aimet_onnx import QuantizationSimModel
    from aimet_onnx.analysis import (
        SensitivityMetric,
        analyze_per_quantizer_sensitivity,
        get_quantizer_op_names,
        group_by_op_name,
        load_sensitivity_results,
        make_topk_logit_psnr_metric,
        save_sensitivity_plot,
        save_sensitivity_results,
        visualize_stats,
    )
    from aimet_onnx.utils import make_psnr_eval_fn

    model = folded()
    session = ort.InferenceSession(model.SerializeToString())
    sim = QuantizationSimModel(model)
    sim.compute_encodings(feeds())

    metric = SensitivityMetric("PSNR", make_psnr_eval_fn(session, feeds()), higher_is_worse=False)
    scores = analyze_per_quantizer_sensitivity(sim, metric)
    assert {"conv1.weight", "conv2.weight", "fc.weight", "input"} <= set(scores)
    assert list(scores.values()) == sorted(scores.values())
    assert metric.sensitivity_score(3.0) == -3.0

    by_node = analyze_per_quantizer_sensitivity(sim, metric, group_fn=group_by_op_name(sim))
    assert {"conv1", "conv2", "fc"} <= set(by_node)
    weights = analyze_per_quantizer_sensitivity(
        sim, metric, group_fn=lambda name: "weights" if name.endswith(".weight") else None
    )
    assert set(weights) == {"weights"}
    assert get_quantizer_op_names(sim)["conv2.weight"] == "conv2"

    topk = make_topk_logit_psnr_metric(session, feeds(), k=3)
    assert set(analyze_per_quantizer_sensitivity(sim, topk)) == set(scores)

    save_sensitivity_results(scores, "scores.json", details={"fc.weight": "the head"})
    loaded = load_sensitivity_results("scores.json")
    assert list(loaded) == list(scores)
    assert all(abs(loaded[name] - score) < 1e-4 for name, score in scores.items())
    save_sensitivity_plot(scores, metric, "scores.html", highlight_patterns=["weight"])
    visualize_stats(sim, "stats.html")
    assert (
        os.path.isfile("scores.html")
        and os.path.isfile("stats_weights.html")
        and os.path.isfile("stats_activations.html")
    )


def seq_mse():
    from aimet_onnx import QuantizationSimModel, apply_seq_mse
    from aimet_onnx.sequential_mse.seq_mse import SeqMseParams, SequentialMse

    sim = QuantizationSimModel(folded(), param_type="int4")
    apply_seq_mse(sim, feeds(), num_candidates=4, nodes_to_exclude=["fc"])
    assert sim.qc_quantize_op_dict["conv1.weight"].is_encoding_frozen()
    assert not sim.qc_quantize_op_dict["fc.weight"].is_encoding_frozen()
    older = QuantizationSimModel(folded(), param_type="int4")
    SequentialMse(folded(), older, SeqMseParams(num_batches=1, num_candidates=4), feeds()).apply_seq_mse_algo()
    assert older.qc_quantize_op_dict["fc.weight"].is_encoding_frozen()


def seq_mse_losses():
    from aimet_onnx import QuantizationSimModel
    from aimet_onnx.sequential_mse.seq_mse import SeqMseParams, SequentialMse

    scales = []
    for loss_fn in ("mse", "l1", "sqnr"):
        model = folded()
        sim = QuantizationSimModel(model, param_type="int2")
        params = SeqMseParams(num_batches=2, num_candidates=10, loss_fn=loss_fn)
        SequentialMse(model, sim, params, feeds()).apply_seq_mse_algo()
        quantizer = sim.qc_quantize_op_dict["conv2.weight"]
        assert quantizer.is_encoding_frozen()
        scales.append([encoding.delta for encoding in quantizer.get_encodings()])
    assert not np.array_equal(scales[0], scales[1])
