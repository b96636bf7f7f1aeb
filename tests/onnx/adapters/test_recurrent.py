"""Recurrent nodes as functions of torch tensors: what ONNX Runtime computes, with gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.analysis.subject import open_subject
from bitwright.methods.rounding.program import run_step
from bitwright.onnx import QuantizationSimModel
from bitwright.onnx.program import OnnxSimulation
from bitwright.recipes.site_cost import output_errors
from tests.support.recurrent_nets import Variant, feeds, layer_model

ALPHAS = (("activations", ["HardSigmoid", "Affine", "ScaledTanh"]), ("activation_alpha", [0.3, 0.8, 0.9]),
          ("activation_beta", [0.4, 0.1, 0.7]))  # fmt: skip
VARIANTS = {
    **{f"{op} {way}": Variant(op, way) for op in ("RNN", "GRU", "LSTM") for way in ("forward", "reverse")},
    "states": Variant("LSTM", states=True),
    "peepholes": Variant("LSTM", peepholes=True, states=True),
    "lengths": Variant("GRU", lengths=(6, 2, 4), states=True),
    "lengths, reverse": Variant("LSTM", "reverse", lengths=(6, 2, 4), states=True),
    "batch first": Variant("LSTM", layout=1, states=True),
    "batch first, reverse": Variant("GRU", "reverse", layout=1),
    "no bias": Variant("GRU", bias=False),
    "reset before": Variant("GRU", attributes=(("linear_before_reset", 1),)),
    "coupled gates": Variant("LSTM", attributes=(("input_forget", 1),)),
    "clip": Variant("LSTM", attributes=(("clip", 0.4),)),
    "functions with parameters": Variant("LSTM", attributes=ALPHAS),
    "other functions": Variant("GRU", attributes=(("activations", ["Softsign", "LeakyRelu"]),)),
    "a function of its own": Variant("RNN", attributes=(("activations", ["Softplus"]),)),
    "both directions": Variant("LSTM", "bidirectional", states=True),
}  # fmt: skip


def simulated(v: Variant, **options: Any) -> QuantizationSimModel:
    sim = QuantizationSimModel(layer_model(v), feeds(v), threads=1, **options)
    sim.compute_encodings([feeds(v, seed) for seed in range(3)])
    return sim


@pytest.mark.slow_variants("both directions")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_traced_step_computes_what_the_node_does(name: str) -> None:
    v = VARIANTS[name]
    model = OnnxSimulation(simulated(v))
    program, state = model.program(feeds(v, 9))
    assert sum(step.traced is not None for step in program.steps) == v.directions
    for i, step in enumerate(program.steps):
        real = run_step(step, state, program.constants)
        if step.traced is not None:
            assert step.traced.differentiable and not step.differentiable
            found = run_step(step.traced, state, program.constants)
            for one, other in zip(found, real, strict=True):
                np.testing.assert_allclose(one.numpy(), other.numpy(), atol=2e-5)
            inside = run_step(step.traced, state, program.constants, model.quantize)
            quantized = run_step(step, state, program.constants, model.quantize)
            for one, other in zip(inside, quantized, strict=True):
                assert (one - other).abs().max() < 0.05 and (one - other).abs().mean() < 2e-3
        program.settle(state, i, real, program.outputs)


def test_a_function_that_nobody_knows_stays_with_the_runtime() -> None:
    from bitwright.onnx.to_torch import RecurrentLayer

    node = layer_model(Variant("GRU", attributes=(("activations", ["Sigmoid", "Mish"]),))).graph[0]
    assert RecurrentLayer.of(node) is None


@pytest.mark.slow_variants("GRU-1", "LSTM-0")
@pytest.mark.parametrize("op, layout", [("RNN", 0), ("GRU", 1), ("LSTM", 0)])
def test_every_site_of_a_native_layer_has_an_estimate(op: str, layout: int) -> None:
    """Weights, states and what is inside the steps: each alone makes about the noise that was estimated."""
    v = Variant(op, batch=32, length=8, hidden=8, layout=layout)
    sim = simulated(v, preset="w4a8")
    batches = [feeds(v, seed) for seed in range(3)]
    draws = [output_errors(OnnxSimulation(sim), batches, samples=96, seed=seed) for seed in range(3)]
    found = [{**errors.activations, **errors.weights} for errors in draws]
    assert not draws[0].unknown and found[0].keys() == sim.quantizers.keys()
    restore, compared = sim.remember(), 0
    subject = open_subject(sim)
    wanted = [list(subject.outputs(batch, True)) for batch in batches]
    for name in found[0]:
        for other in sim.quantizers.values():
            other.enabled = other.quantizer is sim.quantizers[name].quantizer
        measured = noise(sim, batches, wanted)
        estimate = sum(f[name] for f in found) / len(found)
        if measured > 1e-8:
            assert 0.4 < estimate / measured < 2.5, name
            compared += 1
    restore()
    assert compared >= 3


def noise(sim: QuantizationSimModel, batches: list[Any], wanted: list[list[Any]]) -> float:
    """Over signal, the mean of the outputs."""
    found = [sim.session.run(None, batch) for batch in batches]
    ratios = []
    for i in range(len(wanted[0])):
        error = sum(float(np.square(f[i] - w[i]).sum()) for f, w in zip(found, wanted, strict=True))
        ratios.append(error / sum(float(np.square(w[i]).sum()) for w in wanted))
    return float(np.mean(ratios))
