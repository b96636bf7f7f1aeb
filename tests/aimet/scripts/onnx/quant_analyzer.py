"""QuantAnalyzer on an ONNX model."""

import json
import os

import numpy as np
import onnxruntime as ort
from aimet_onnx.common.defs import CallbackFunc, QuantScheme
from aimet_onnx.quant_analyzer import QuantAnalyzer

from tests.aimet.onnx_nets import feeds, folded

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
