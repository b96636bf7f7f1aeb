"""choose_mixed_precision on an ONNX model."""

import os

import numpy as np
import onnxruntime as ort
from aimet_onnx.common.defs import CallbackFunc, QuantizationDataType
from aimet_onnx.mixed_precision import choose_mixed_precision
from aimet_onnx.quantsim import QuantizationSimModel

from tests.aimet.onnx_nets import feeds, folded

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
