"""A mask that takes a detour on its way to a softmax does not ruin a range; nor does -Inf stop calibration."""

import numpy as np
import onnx.parser
import pytest

from bitwright.onnx import QuantizationSimModel
from tests.onnx.nets import run

T, D = 6, 8


def attention(mask, weights):
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[{T},{D}] q, float[{T},{D}] k, float[{T},{T}] mask) => (float[{T},{D}] y)
        <float[1] low = {{-10000}}, float[1] two = {{2}}, int64[1] axis = {{-1}}> {{
            kt = Transpose<perm = [1, 0]>(k)
            scores = MatMul(q, kt)
            {mask}
            {weights}
            y = MatMul(w, k)
        }}""")


WAYS = {
    "clamped": ("masked = Add(scores, mask)", "c = Max(masked, low)  w = Softmax(c)"),
    "sigmoid": ("masked = Add(scores, mask)", "w = Sigmoid(masked)"),
    "scaled-after": ("masked = Add(scores, mask)", "c = Div(masked, two)  w = Softmax(c)"),
    "plain": ("masked = Add(scores, mask)", "w = Softmax(masked)"),
    "by-hand": (
        "masked = Add(scores, mask)  top = ReduceMax(masked, axis)  shifted = Sub(masked, top)",
        "e = Exp(shifted)  n = ReduceSum(e, axis)  w = Div(e, n)",
    ),
}


def feeds(seed, low):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((T, D)).astype(np.float32) for _ in range(2))
    return {"q": q / 2, "k": k, "mask": np.triu(np.full((T, T), low, np.float32), 1)}


@pytest.mark.parametrize("low", [-1e4, np.finfo(np.float32).min, -np.inf], ids=["ten-thousand", "least", "inf"])
@pytest.mark.parametrize("mask, weights", WAYS.values(), ids=WAYS)
def test_accuracy_holds(mask, weights, low):
    data = [feeds(seed, low) for seed in range(8)]
    model = attention(mask, weights)
    sim = QuantizationSimModel(model, data[0])
    sim.compute_encodings(data)
    (expected,), found = run(model, data[3]), sim.run(data[3])[0]
    noise = float(np.square(expected - found).sum() / np.square(expected).sum())
    assert noise < 1e-3, f"{-10 * np.log10(noise):.1f} dB"
    scores = [s.encoding for s in sim.quantizers.values() if s.enabled and s.value != "mask"]
    assert all(float(e.min.min()) > -1000 for e in scores)
