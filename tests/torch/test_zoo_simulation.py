"""Every model of the zoo can be simulated as it is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from bitwright.core.simulation.float_model import sqnr
from bitwright.torch.calls.inputs import Inputs, flatten_tensors
from bitwright.torch.simulation.quantsim import QuantizationSimModel
from tests.support.zoo import ZOO, Case, MobileNetV2

CASES = [pytest.param(case, id=name) for name, case in ZOO.items()]


def example(case: Case, seed: int = 0) -> Inputs:
    call = case.example(seed)
    return Inputs(call.args, call.kwargs)


def run(model: torch.nn.Module, case: Case, seed: int = 0) -> list[torch.Tensor]:
    return [t for _, t in flatten_tensors(case.run(model, seed)) if t.is_floating_point()]


def simulated(case: Case, **options: Any) -> QuantizationSimModel:
    sim = QuantizationSimModel(case.build(), example(case), **options)
    sim.compute_encodings([example(case, seed) for seed in range(3)], allow_unreached=True)
    return sim


@pytest.mark.parametrize("case", CASES)
def test_sixteen_bits_change_nothing_a_person_would_see(case: Case) -> None:
    sim = simulated(case, default_output_bw=16, default_param_bw=16)
    model = case.build()
    for old, new in zip(run(model, case), run(sim.model, case), strict=True):
        assert new.dtype == old.dtype and new.shape == old.shape
        low = old.dtype in (torch.float16, torch.bfloat16)
        assert sqnr(old.float().numpy(), new.float().numpy()) > (20 if low else 45)


@pytest.mark.slow_variants("vit-half")
@pytest.mark.parametrize("case", CASES)
def test_the_model_keeps_its_class_its_state_and_its_function_in_float(case: Case) -> None:
    model = case.build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    sim = QuantizationSimModel(model, example(case))
    assert type(sim.model) is type(model) and sim.model is not model
    assert list(sim.model.state_dict()) == list(before)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    with sim.in_float():
        for old, new in zip(run(model, case), run(sim.model, case), strict=True):
            # attention is computed as its documented parts: equal to rounding, everything else bit for bit
            low = old.dtype in (torch.float16, torch.bfloat16)
            torch.testing.assert_close(new, old, rtol=2e-2 if low else 1e-4, atol=5e-2 if low else 1e-4)


@pytest.mark.slow_variants(
    "resnet18",
    "mobilenet-v2",
    "unet",
    "audio-net",
    "depthwise-separable",
    "mobilenet-v3-block",
    "densenet",
    "encoder-post-norm",
    "vit-sdpa",
    "vit-bmm",
    "vit-einsum",
    "vit-matmul",
    "masked-lm",
    "masked-lm-sdpa",
    "llama",
    "llama-cached",
    "cell-loop",
    "activations",
    "norms",
    "resnet18-half",
    "vit-half",
    "resnet18-bfloat16",
    "vit-bfloat16",
    "chain",
    "chain-residual",
)
@pytest.mark.parametrize("case", CASES)
def test_copies_and_repeats_are_bit_identical(case: Case) -> None:
    sim = simulated(case)
    first = run(sim.model, case)
    twin = copy.deepcopy(sim)
    again = simulated(case)
    for a, b, c, d in zip(first, run(sim.model, case), run(twin.model, case), run(again.model, case), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and torch.equal(a, d)
    assert list(twin.quantizers) == list(sim.quantizers)
    twin.quantizers["*"].enabled = False
    assert all(site.enabled or site.encoding is None for site in sim.quantizers.values())


@pytest.mark.parametrize("case", CASES)
def test_every_float_value_is_accounted_for(case: Case) -> None:
    sim = QuantizationSimModel(case.build(), example(case))
    rows = {row.name: row for row in sim.coverage()}
    floats = [v.name for v in sim.graph.values.values() if v.is_float]
    assert set(floats) <= set(rows)
    assert all(row.how for row in rows.values())
    sites = {site for site in sim.quantizers}
    assert {p.name for p in sim.plan.sites.values()} == sites


@pytest.mark.slow_variants("mobilenet-v2", "unet", "vit-einsum")
@pytest.mark.parametrize("case", [c for c in CASES if "half" not in c.id and "bfloat" not in c.id])
def test_gradients_reach_every_trained_parameter_the_float_model_trains(case: Case) -> None:
    sim = simulated(case)
    float_model = case.build()
    call = case.example(0)

    def trained(model: torch.nn.Module) -> set[str]:
        outputs = [
            t for _, t in flatten_tensors(model(*call.args, **call.kwargs)) if t.is_floating_point() and t.requires_grad
        ]
        sum(t.float().square().mean() for t in outputs).backward()  # type: ignore[union-attr]
        return {n for n, p in model.named_parameters() if p.grad is not None and torch.isfinite(p.grad).all()}

    try:
        expected = trained(float_model)
    except RuntimeError:
        pytest.fail("the float model itself cannot be trained; give the case a tag")
    call = case.example(0)
    assert trained(sim.model) == expected


def test_statistics_do_not_depend_on_batches_or_their_order() -> None:
    net = MobileNetV2(0.25, classes=10, stages=3).eval()
    batches = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for scheme in ("min_max", "tf_enhanced", "percentile", "entropy", "mse"):
        encodings = []
        for data in (batches, batches[::-1], [torch.cat(batches)]):
            sim = QuantizationSimModel(net, batches[0], quant_scheme=scheme)
            sim.compute_encodings(data)
            encodings.append({n: s.encoding for n, s in sim.quantizers.items() if s.role == "input"})
        assert encodings[0] == encodings[1] == encodings[2]
        assert all(np.isfinite(e.scale).all() for e in encodings[0].values())
