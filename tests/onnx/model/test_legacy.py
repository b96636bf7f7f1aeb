"""Old forms that ONNX Runtime still runs: operators the standard dropped, training mode by outputs, unread initializers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from bitwright.compare.verify import verify_folder
from bitwright.errors import ModelError
from bitwright.onnx import QuantizationSimModel, quantize
from bitwright.onnx.model.load import load_model
from bitwright.onnx.model.opset import OPSET, modernize
from tests.onnx.nets import FLOAT, Array, Net, run

RNG = np.random.default_rng(3)
X = {"x": RNG.normal(size=(2, 3, 8, 8)).astype(np.float32)}


def legacy_net(op: str, **attrs: object) -> onnx.ModelProto:
    n = Net()
    x = n.input("x", (2, 3, 8, 8))
    y = n.conv(n(op, x, name="old", **attrs), name="conv", pads=[1, 1, 1, 1])
    return n.model(y, opset=8, ir_version=3)


@pytest.mark.slow_variants("Crop-{'border': [1, 2, 0, 0], 'scale': [4, 5]}")
@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("ImageScaler", {"scale": 0.5, "bias": [0.0, 0.1, 0.2]}),
        ("Affine", {"alpha": 0.5, "beta": 0.1}),
        ("ScaledTanh", {"alpha": 0.7, "beta": 0.4}),
        ("ParametricSoftplus", {"alpha": 0.7, "beta": 0.4}),
        ("Crop", {"border": [1, 2, 1, 0]}),
        ("Crop", {"border": [1, 2, 0, 0], "scale": [4, 5]}),
        ("ThresholdedRelu", {"alpha": 0.3}),
    ],
    ids=str,
)
def test_operators_that_the_standard_dropped_compute_what_they_did(op: str, attrs: dict[str, object]) -> None:
    model = legacy_net(op, **attrs)
    new = modernize(load_model(model))
    assert new.opset == OPSET
    sim = QuantizationSimModel(model, X)
    assert op == "ThresholdedRelu" or any(f"were rewritten: {op}" in note for note in new.notes)
    for site in sim.quantizers.values():
        site.enabled = False
    sim.compute_encodings([X])
    np.testing.assert_allclose(sim.run(X)[0], run(model, X)[0], rtol=1e-5, atol=1e-5)


def training_net(opset: int, *more: str) -> onnx.ModelProto:
    n = Net()
    x = n.conv(n.input("x", (2, 3, 8, 8)), name="conv", pads=[1, 1, 1, 1])
    parts = [n.weights(4, name=f"bn.{p}") for p in ("weight", "bias", "mean")]
    var = n.const(RNG.uniform(0.5, 2, 4), "bn.var")
    outs = ["y", "mean2", "var2", "saved_mean", "saved_var"]
    n("BatchNormalization", x, *parts, var, name="bn", out=outs)
    return n.model("y", *more, opset=opset)


@pytest.mark.slow_variants("9", "13")
@pytest.mark.parametrize("opset", [7, 9, 13])
def test_batch_norms_in_training_mode_below_opset_14(opset: int, tmp_path: Path) -> None:
    model = training_net(opset)
    result = quantize(model, [X], recipe=["fold"], path=tmp_path, progress=False)
    assert not list(result.folds), "it normalises with the statistics of the batch"
    assert not [name for name in result.sim.quantizers if "mean" in name or "output[1]" in name]
    for site in result.sim.quantizers.values():
        site.enabled = False
    np.testing.assert_allclose(result.sim.run(X)[0], run(model, X)[0], rtol=1e-4, atol=1e-5)
    assert verify_folder(tmp_path).ok
    notes = modernize(load_model(model)).notes
    assert any("batch norms in training mode" in note and "evaluation mode" in note for note in notes)


def test_a_batch_norm_that_hands_on_the_statistics_of_the_batch_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'bn' is in training mode and hands on.*Remedy: export.*evaluation mode"):
        QuantizationSimModel(training_net(9, "saved_mean"))


def test_initializers_that_are_inputs_and_that_nothing_reads() -> None:
    n = Net()
    y = n.conv(n.input("x", (2, 3, 8, 8)), name="conv", pads=[1, 1, 1, 1])
    n.weights(4, name="spare")
    for tensor in list(n.initializers):
        n.input(tensor.name, tuple(tensor.dims))
    sim = QuantizationSimModel(n.model(y, opset=8, ir_version=3))
    sim.compute_encodings([X])
    assert sim.verify(X).ok


def label_net(text_input: bool) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Class names out, or words in: labels of scikit-learn and of speech models."""
    n = Net()
    ml = {"domain": "ai.onnx.ml"}
    if text_input:
        x = n.input("words", (3,), TensorProto.STRING)
        numbers = n("LabelEncoder", x, name="encode", keys_strings=["a", "b"], values_floats=[0.5, 2.0], **ml)
        x = n("Unsqueeze", numbers, n.const(np.array([1]), "axis"))
    else:
        x = n.input("x", (3, 1))
    scores = n("MatMul", x, n.weights(1, 4, name="w"), name="fc", out="scores")
    best = n("ArgMax", scores, axis=1, keepdims=0)
    n("LabelEncoder", best, name="label", out="label", keys_int64s=[0, 1, 2, 3], values_strings=list("abcd"), **ml)
    outputs = (("scores", FLOAT, (3, 4)), ("label", TensorProto.STRING, (3,)))
    feeds = {"words": np.array(["a", "b", "a"], object)} if text_input else {"x": np.float32([[1], [-2], [3]])}
    return n.model(*outputs, domains={"ai.onnx.ml": 2}), feeds


@pytest.mark.parametrize("text_input", [False, True], ids=["strings out", "strings in and out"])
def test_strings_are_exported_and_compared(text_input: bool, tmp_path: Path) -> None:
    model, feeds = label_net(text_input)
    quantize(model, [feeds], recipe=["fold"], path=tmp_path, progress=False)
    report = verify_folder(tmp_path)
    assert report.ok and [(o.name, o.as_integer) for o in report.outputs][1] == ("label", np.inf)
