"""AIMET's mixed precision and AutoQuant, called as AIMET's documentation does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright import PrecisionRequest, aimet_torch, set_precisions
from bitwright.aimet_common.defs import CallbackFunc, QuantizationDataType
from bitwright.errors import BitwrightError
from tests.precision.nets import accuracy, as_onnx, batches, model, trained

INT = QuantizationDataType.int
CANDIDATES = [((16, INT), (8, INT)), ((8, INT), (8, INT)), ((8, INT), (4, INT))]


def torch_sim() -> Any:
    sim = aimet_torch.QuantizationSimModel(trained(), batches("torch")[0])
    sim.compute_encodings(lambda net, _: [net(x) for x in batches("torch")], None)
    return sim


def onnx_sim() -> Any:
    from bitwright.aimet_onnx.quantsim import QuantizationSimModel

    sim = QuantizationSimModel(model("onnx"))
    sim.compute_encodings([{"x": x} for x in batches("onnx")])
    return sim


def right(front: str) -> CallbackFunc:
    return CallbackFunc(lambda target, _=None: float(np.mean(accuracy(front, 200)(target))))


def test_requests_on_modules(tmp_path: Path) -> None:
    from bitwright.aimet_torch.mixed_precision import MixedPrecisionConfigurator

    sim = torch_sim()
    mmp = MixedPrecisionConfigurator(sim)
    mmp.set_precision(nn.Conv2d, "int8", {"weight": "int4"})
    mmp.set_precision(sim.model.stem, "int16", {"weight": "int8"})
    mmp.set_model_input_precision("int16")
    mmp.set_model_output_precision("int16")
    mmp.apply(str(tmp_path / "log.txt"), strict=False)
    assert sim.model.stem.param_quantizers["weight"].bitwidth == 8
    assert sim.model.body.param_quantizers["weight"].bitwidth == 4
    assert "stem" in (tmp_path / "log.txt").read_text()
    with pytest.raises(BitwrightError, match="is not a module of the simulation"):
        mmp.set_precision(nn.Conv3d, "int8")


class Ends(nn.Module):
    """Two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x).relu(), self.other(y).relu()


def test_a_precision_per_input_and_output() -> None:
    from bitwright.aimet_torch.mixed_precision import MixedPrecisionConfigurator
    from bitwright.aimet_torch.quantsim import QuantizationSimModel

    sim = QuantizationSimModel(Ends().eval(), (torch.randn(4, 6), torch.randn(4, 6)))
    mmp = MixedPrecisionConfigurator(sim)
    mmp.set_model_input_precision(["int16", None])
    mmp.set_model_output_precision((None, "int16"))
    mmp.apply("")
    found = {name: site.spec.format.bits for name, site in sim.quantizers.items() if not site.is_stored}
    assert sorted(name.partition(".")[0] for name, bits in found.items() if bits == 16) == ["one", "relu_1"]
    for wrong in (["int16"], ["int16", "int8", "int8"]):
        with pytest.raises(BitwrightError, match=f"{len(wrong)} precisions are given, and there are 2 tensors"):
            mmp.set_model_input_precision(wrong)
    with pytest.raises(BitwrightError, match=r"set_precision.*2 precisions are given, and there are 1 tensors"):
        mmp.set_precision(sim.model.one, ["int16", "int8"])
    with pytest.raises(BitwrightError, match=r"the operator reads 1 activations.*count from one\[0\] on"):
        set_precisions(sim, [PrecisionRequest("one[1]", "int16")])
    with pytest.raises(BitwrightError, match="the model has 2 of these.*count from model_output.0. on"):
        set_precisions(sim, [PrecisionRequest("model_output[2]", "int16")])


def test_a_calibrated_weight_takes_other_bits_without_data() -> None:
    sim = torch_sim()
    site = sim.quantizers["stem.weight"]
    site.spec = replace(site.spec, format=replace(site.spec.format, bits=4))
    assert site.encoding.format.bits == 4
    weight = sim.model.stem.weight.detach().flatten(1).numpy()
    assert np.allclose(site.encoding.scale, np.maximum(weight.min(1) / -8, weight.max(1) / 7))


def test_the_pareto_list_of_torch(tmp_path: Path) -> None:
    from bitwright.aimet_torch.mixed_precision import EvalCallbackFactory, choose_mixed_precision

    sim = torch_sim()
    factory = EvalCallbackFactory(batches("torch"))
    sqnr = factory.sqnr()
    assert sqnr(trained()) == 100.0 and 5 < sqnr(sim.model) < 60
    found = choose_mixed_precision(
        sim, batches("torch")[0], CANDIDATES, sqnr, right("torch"), 0.05, str(tmp_path), True,
        CallbackFunc(lambda m, _: None),
    )  # fmt: skip
    assert found and json.loads((tmp_path / "pareto_list.json").read_text())[0][0] == found[0][0] <= 1
    assert json.loads((tmp_path / "accuracy_list.json").read_text())
    assert right("torch")(sim.model) >= right("torch")(trained()) - 0.051
    assert any(bits == "w4a8" for row in found for bits in row[2].values())
    curve = (tmp_path / "pareto_curve.html").read_text()
    assert curve.count("<svg") == 2 and curve.count("<circle") >= 2 * len(found) and "<script" not in curve
    page = (tmp_path / "quantizer_group_sensitivity.html").read_text()
    assert page.count("<svg") == 3 and "<td>stem" in page


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_sensitivities_are_estimated_on_what_the_callback_runs(front, tmp_path, monkeypatch):
    from bitwright.aimet_onnx import mixed_precision as of_onnx
    from bitwright.aimet_torch import mixed_precision as of_torch

    seen: list[Any] = []
    module: Any = of_torch if front == "torch" else of_onnx
    monkeypatch.setattr(module, "choose", lambda sim, data, *args: seen.extend(data))
    xs = batches(front)
    if front == "torch":
        run = CallbackFunc(lambda net, _: [net(x) for x in xs])
        of_torch.choose_mixed_precision(torch_sim(), xs[0] * 0, CANDIDATES, run, run, 0.1, str(tmp_path), True, run)
        assert [bool((a == b).all()) for a, b in zip(seen, xs, strict=False)] == [True] * min(16, len(xs))
    else:
        run = CallbackFunc(lambda session, _: [session.run(None, {"x": x}) for x in xs])
        of_onnx.choose_mixed_precision(onnx_sim(), CANDIDATES, run, run, 0.1, str(tmp_path), True, run)
        np.testing.assert_array_equal([feed["x"] for feed in seen], xs[:16])


def test_the_pareto_list_of_onnx(tmp_path: Path) -> None:
    from bitwright.aimet_onnx.mixed_precision import choose_mixed_precision

    found = choose_mixed_precision(
        onnx_sim(),
        CANDIDATES,
        right("onnx"),
        right("onnx"),
        0.05,
        str(tmp_path),
        data=[{"x": x} for x in batches("onnx")],
    )
    assert found and (tmp_path / "pareto_list.json").is_file()


def test_sensitivities_and_an_acceptance_function() -> None:
    from bitwright.aimet_onnx.mixed_precision import analyze_mixed_precision_sensitivity, apply_amp

    sim = onnx_sim()
    before = {n: s.spec for n, s in sim.quantizers.items()}
    found = analyze_mixed_precision_sensitivity(sim, ["w8a8", "w4a8"], right("onnx"))
    assert found and {name for _, name in found} == {"w4a8"}
    assert {n: s.spec for n, s in sim.quantizers.items()} == before
    count = iter(range(100))
    apply_amp(sim, found, lambda session: next(count) < 1)
    widths = [s.spec.format.bits for s in sim.quantizers.values() if s.role == "weight"]
    assert widths.count(4) <= 1
    with pytest.raises(BitwrightError, match="the simulation has no such group"):
        apply_amp(sim, {("nothing", "w4a8"): 1.0}, lambda session: True)


def test_the_most_sensitive_layers_get_more() -> None:
    from bitwright.aimet_onnx.lite_mp import flip_layers_to_higher_precision

    sim = onnx_sim()
    layers = [o.name for o in sim.graph.ops if o.type in ("Conv", "Gemm")]
    flipped = flip_layers_to_higher_precision(sim, dict(zip(layers, (30.0, 10.0, 20.0), strict=True)), 33)
    assert flipped == [layers[1]]
    weight = next(s for s in sim.quantizers.values() if s.op == layers[1] and s.role == "weight")
    assert weight.spec.format.name == "float16"


def test_auto_quant(tmp_path: Path) -> None:
    from bitwright.aimet_onnx.auto_quant import AutoQuant

    search = AutoQuant(model("onnx"), None, batches("onnx"), right("onnx"), str(tmp_path))
    assert ("mse", "mse") in search.get_quant_scheme_candidates()
    search.set_quant_scheme_candidates([("min_max", "min_max")])
    sim, score = search.run_inference()
    assert score == pytest.approx(right("onnx")(sim.session))
    best, found, encodings = search.optimize(allowed_accuracy_drop=0.05)
    assert found >= right("onnx")(float_session()) - 0.0501 and Path(encodings).exists()
    assert found == pytest.approx(right("onnx")(best.session))


def test_auto_quant_returns_the_nearest_model_where_none_keeps_the_accuracy(tmp_path, monkeypatch):
    from bitwright.aimet_common.auto_quant import AutoQuant
    from bitwright.aimet_torch.adaround.adaround_weight import AdaroundParameters
    from bitwright.precision.trials import Trial

    search = AutoQuant(model("onnx"), None, batches("onnx"), CallbackFunc(worse_when_touched), str(tmp_path))
    search.set_adaround_params(AdaroundParameters(batches("onnx"), 1, 7))
    recipes = [trial.recipe for trial in search._trials() or ()]
    steps = [step for recipe in recipes for step in recipe or () if isinstance(step, dict)]
    assert [step["adaround"]["iterations"] for step in steps] == [7] and steps[0]["adaround"]["warm_start"] == 0.2
    with pytest.raises(BitwrightError, match="adaround_params: 7 is an int.*pass AdaroundParameters"):
        search.set_adaround_params(7)
    only = Trial("w4", "w4a8", recipe=("fold", {"adaround": {"iterations": 2}}))
    monkeypatch.setattr(search, "_trials", lambda: [only])
    sim, accuracy, encodings = search.optimize(allowed_accuracy_drop=0.0)
    assert sim.calibrated and accuracy == 0.5 and Path(encodings).is_file()


def worse_when_touched(session: Any, _: Any = None) -> float:
    """1 of the float model, and less of any other."""
    x = batches("onnx")[0]
    wanted = float_session().run(None, {"x": x})[0]
    found = session.run(None, {session.get_inputs()[0].name: x})[0]
    return 1.0 if np.allclose(found, wanted, rtol=1e-4, atol=1e-5) else 0.5


def float_session() -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(as_onnx(), providers=["CPUExecutionProvider"])


def test_layers_with_frozen_weights_are_flipped() -> None:
    from bitwright.aimet_onnx import apply_seq_mse
    from bitwright.aimet_onnx.lite_mp import flip_layers_to_higher_precision

    sim, feeds = onnx_sim(), [{"x": x} for x in batches("onnx")]
    apply_seq_mse(sim, feeds, num_candidates=2)
    layers = {site.op: 1.0 for site in sim.quantizers.values() if site.role == "weight"}
    flip_layers_to_higher_precision(sim, layers, percent_to_flip=100)
    sim.compute_encodings(feeds)
    sim.session.run(None, feeds[0])
    assert {s.spec.format.name for s in sim.quantizers.values() if s.role == "weight"} == {"float16"}


def test_precisions_without_a_name_are_refused_when_they_are_asked_for() -> None:
    from bitwright.aimet_torch.mixed_precision import MixedPrecisionConfigurator

    wanted = MixedPrecisionConfigurator(None)
    for activation, param in (("int2", None), (["int8", "int2"], None), ("int8", {"weight": "int2"})):
        with pytest.raises(ValueError, match="there is no precision 'int2'"):
            wanted.set_precision(torch.nn.Conv2d, activation, param)
