"""Quantizers by sensitivity: the metric, groups, files and the page."""

import os

import onnxruntime as ort
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

from tests.aimet.onnx_nets import feeds, folded

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
    os.path.isfile("scores.html") and os.path.isfile("stats_weights.html") and os.path.isfile("stats_activations.html")
)
