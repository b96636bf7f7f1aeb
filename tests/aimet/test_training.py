"""Quantization-aware training as scripts for AIMET do it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.aimet_common.defs import QuantScheme
from bitwright.aimet_torch.batch_norm_fold import fold_all_batch_norms_to_scale
from bitwright.aimet_torch.bn_reestimation import reestimate_bn_stats
from bitwright.aimet_torch.quantsim import QuantizationSimModel

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def make(scheme: object) -> QuantizationSimModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    model.train()(X)  # running statistics
    sim = QuantizationSimModel(model.eval(), X, scheme, default_param_bw=4)
    sim.compute_encodings(lambda m: m(X))
    return sim


def test_range_learning_schemes_train_ranges():
    for scheme in (
        QuantScheme.training_range_learning_with_tf_init,
        QuantScheme.training_range_learning_with_tf_enhanced_init,
        "training_range_learning_with_tf_init",
    ):
        sim = make(scheme)
        ranges = list(sim.quantizer_parameters())
        optimizer = torch.optim.SGD([*sim.model.parameters(), *ranges], lr=0.1)
        before = sim.model[0].param_quantizers["weight"].get_scale().clone()
        sim.model(X).square().mean().backward()
        optimizer.step()
        assert not torch.equal(sim.model[0].param_quantizers["weight"].get_scale(), before)


def test_other_schemes_train_ranges_when_their_parameters_are_asked_for():
    sim = make(QuantScheme.post_training_tf)
    assert not list(sim.named_range_parameters())
    names = [name for name, _ in sim.named_quantizer_parameters()]
    assert "0.weight.log_scale" in names and len(names) == len(list(sim.quantizer_parameters()))
    again = make(QuantScheme.post_training_tf)
    encodings = {n: s.encoding for n, s in again.quantizers.items()}
    assert {n: s.encoding for n, s in sim.quantizers.items()} == encodings, "they start where calibration found them"


def test_batch_norms_are_estimated_anew_and_folded_into_scales():
    sim = make(QuantScheme.post_training_tf)
    conv, norm = sim.model[0], sim.model[1]
    mean = norm.running_mean.clone()
    handle = reestimate_bn_stats(sim.model, [X, X], num_batches=2)
    assert not torch.equal(norm.running_mean, mean)
    handle.remove()
    assert torch.equal(norm.running_mean, mean)
    with torch.no_grad():
        before = sim.model(X)
    pairs = fold_all_batch_norms_to_scale(sim)
    assert list(pairs) == [(conv, norm)] and isinstance(sim.model[1], nn.Identity)
    with torch.no_grad():
        after = sim.model(X)
    assert sim.model[0].param_quantizers["weight"].bitwidth == 4
    assert float((after - before).abs().max()) < 0.05 * float(before.abs().max())


@pytest.mark.slow
def test_pivot_gradients_of_a_thread_reach_compiled_models():
    import threading

    from bitwright.aimet_torch.experimental.pgs import disable_pgs, enable_pgs, is_pgs_enabled

    torch.manual_seed(0)
    x = torch.randn(8, 4)
    sim = QuantizationSimModel(nn.Linear(4, 4).eval(), x, default_param_bw=4)
    sim.compute_encodings(lambda m: m(x))
    compiled = torch.compile(sim.model, backend="aot_eager")

    def gradient(model):
        sim.model.zero_grad()
        model(x).square().sum().backward()
        return sim.model.weight.grad.clone()

    plain = gradient(compiled)
    try:
        for multiplier in (3.0, 5.0):  # changed after compiling
            enable_pgs(eps=0.5, multiplier=multiplier)
            spiked = gradient(sim.model)
            assert not torch.allclose(spiked, plain)
            torch.testing.assert_close(gradient(compiled), spiked)
        elsewhere = []
        other = threading.Thread(target=lambda: elsewhere.append(is_pgs_enabled()))
        other.start()
        other.join()
        assert elsewhere == [False]
    finally:
        disable_pgs()
    torch.testing.assert_close(gradient(compiled), plain)
