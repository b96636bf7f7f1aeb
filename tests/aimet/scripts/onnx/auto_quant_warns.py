"""AutoQuant for ONNX as in the versions of AIMET that had it."""

import os

import numpy as np
import onnxruntime as ort
from aimet_common.defs import QuantScheme
from aimet_onnx.auto_quant import AutoQuant

from tests.aimet.onnx_nets import feeds, folded

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
