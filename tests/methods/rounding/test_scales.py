"""Learned factors and shifts: the function that stays, the error that goes, and what is refused, in both front ends."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.core.numerics.granularity import PerBlock
from bitwright.core.numerics.spec import Preset, dynamic_spec, weight_spec
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods.rounding import scales
from bitwright.methods.rounding.scales import through
from tests.methods.transformer import Decoder, tokens, with_outliers

A4 = Preset(weight_spec("int4", PerBlock(8)), dynamic_spec("int4"))
X = tokens(8)


def made(front_end: str, model: nn.Module, preset: Any = A4, **options: Any) -> tuple[Any, Any]:
    """A simulation, and its outputs in a simulated run."""
    if front_end == "torch":
        sim = bt.QuantizationSimModel(model, X, preset=preset, **options)
        sim.compute_encodings([X], progress=False)

        def run() -> np.ndarray[Any, Any]:
            with torch.no_grad():
                return np.asarray(sim.model(X))

        return sim, run
    file = io.BytesIO()
    torch.onnx.export(model, (X,), file, dynamo=True, verbose=False)
    other = bo.QuantizationSimModel(onnx.load_from_string(file.getvalue()), preset=preset, **options)
    feeds = {other.graph.inputs[0]: X.numpy()}
    other.compute_encodings([feeds], progress=False)
    return other, lambda: other.session.run(None, feeds)[0]


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_the_function_stays_and_the_error_falls(front_end: str) -> None:
    model = with_outliers(Decoder(norm="LayerNorm", bias=True), X[:1])
    with torch.no_grad():
        wanted = np.asarray(model(X))
    sim, run = made(front_end, model, kv_cache={"key": {"format": "int4", "granularity": "per_token"}})
    before = float(np.square(run() - wanted).sum())
    learn, batch = (bt.learn_scales, X) if front_end == "torch" else (bo.learn_scales, {sim.graph.inputs[0]: X.numpy()})
    report = learn(sim, [batch], iterations=12, progress=False)
    assert len(report.groups) == 4 and report.shifted == 3 and len(report.attentions) == 1
    assert report.changed and all(after <= start for start, after in report.blocks.values())
    assert float(np.square(run() - wanted).sum()) < 0.5 * before
    assert report.judged is not None
    np.testing.assert_allclose(
        report.judged, np.array([before, np.square(run() - wanted).sum()]) / np.square(wanted).sum(), rtol=1e-3
    )
    for site in sim.quantizers.values():
        site.enabled = False
    np.testing.assert_allclose(run(), wanted, rtol=1e-3, atol=1e-3)


def test_the_gradient_of_a_quantizer_follows_its_range() -> None:
    x = torch.tensor([[0.4, 2.0, 0.2, 1.0]], requires_grad=True)
    y = through(x, torch.round, dynamic_spec("int4"))
    assert torch.equal(y, torch.round(x))
    y[0, 0].backward()  # an error of -0.4 in a range of 2
    torch.testing.assert_close(x.grad, torch.tensor([[1.0, -0.2, 0.0, 0.0]]))


def test_what_cannot_be_scaled_has_a_reason() -> None:
    sim, _ = made("torch", Decoder(), "w8a8")
    report = bt.learn_scales(sim, [X], iterations=1, progress=False)
    assert {group.producers[0].op for group in report.groups} == {"norm1", "norm2"}
    assert "left   v: its values are quantized to fewer than 16 bits where they are made" in str(report)
    with pytest.raises(CalibrationError, match="the data held no batch"):
        bt.learn_scales(sim, [])
    with pytest.raises(ConfigError, match="iterations: it is 0.*give 1 or more"):
        bt.learn_scales(sim, [X], iterations=0)
    with pytest.raises(ConfigError, match="lr: it is -1.0"):
        bt.learn_scales(sim, [X], lr=-1.0)


def test_a_model_whose_outputs_would_lose_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, run = made("torch", Decoder())
    before, state = run(), {name: value.clone() for name, value in sim.model.state_dict().items()}
    errors = iter((0.1, 0.2))
    monkeypatch.setattr(scales, "_judge", lambda model, batches: lambda now: next(errors))
    report = bt.learn_scales(sim, [X], iterations=1, progress=False)
    assert not report.changed and "0.1 -> 0.2 of their power, so that NOTHING is scaled" in str(report)
    assert all(torch.equal(value, state[name]) for name, value in sim.model.state_dict().items())
    np.testing.assert_array_equal(run(), before)


def test_calibrated_ranges_of_16_bits_follow() -> None:
    sim, run = made("torch", with_outliers(Decoder(norm="LayerNorm", bias=True), X[:1]), "w4a16")
    before = run()
    name = next(name for name in sim.quantizers if name.startswith("q.input"))
    scale = float(sim.quantizers[name].encoding.scale)
    report = bt.learn_scales(sim, [X], iterations=4, progress=False)
    assert report.changed and float(sim.quantizers[name].encoding.scale) != scale
    assert np.isfinite(run()).all() and not np.array_equal(run(), before)
