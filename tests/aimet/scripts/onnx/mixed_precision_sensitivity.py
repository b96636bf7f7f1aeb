"""The pair analyze_mixed_precision_sensitivity and apply_amp."""

import onnxruntime as ort
from aimet_onnx import QuantizationSimModel, int4, int8, int16
from aimet_onnx.mixed_precision import analyze_mixed_precision_sensitivity, apply_amp
from aimet_onnx.utils import make_psnr_eval_fn

from tests.aimet.onnx_nets import feeds, folded

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
