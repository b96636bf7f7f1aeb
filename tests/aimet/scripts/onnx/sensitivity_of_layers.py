"""Layers by sensitivity, and a higher precision for the most sensitive ones (lite mixed precision)."""

import math
import os

import aimet_onnx
import onnxruntime as ort
from aimet_onnx import QuantizationSimModel, analyze_per_layer_sensitivity, int4, int8, int16
from aimet_onnx.lite_mp import flip_layers_to_higher_precision
from aimet_onnx.utils import make_psnr_eval_fn

from tests.aimet.onnx_nets import feeds, folded

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
