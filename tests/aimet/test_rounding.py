"""Methods that choose weights, called as AIMET's scripts call them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.aimet_torch.adaround.adaround_weight import AdaroundParameters
from bitwright.aimet_torch.nn import QuantizedLinear
from bitwright.aimet_torch.quantization.affine import QuantizeDequantize
from bitwright.aimet_torch.quantsim import QuantizationSimModel
from bitwright.aimet_torch.seq_mse import SeqMseParams, SequentialMse, apply_seq_mse

BATCHES = [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def test_ranges_of_sequential_mse_neither_train_nor_calibrate_and_excluded_ones_do_both():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    sim = QuantizationSimModel(model, BATCHES[0], default_param_bw=4)
    apply_seq_mse(model, sim, BATCHES, SeqMseParams(num_batches=2), modules_to_exclude=[model[0]])
    first, last = (sim.model[i].param_quantizers["weight"] for i in (0, 2))
    assert first._allow_overwrite and first.min.requires_grad and first.max.requires_grad
    assert not last._allow_overwrite and not last.min.requires_grad and not last.max.requires_grad
    scale = last.get_encoding().scale.clone()
    sim.compute_encodings(lambda model, _: model(BATCHES[0]), None)
    assert torch.equal(last.get_encoding().scale, scale) and first.is_initialized()


@pytest.mark.parametrize("shape", [(8, 1), ()], ids=str)
def test_one_module_is_optimized_as_in_its_model(shape):
    torch.manual_seed(0)
    module = QuantizedLinear(6, 8)
    module.param_quantizers["weight"] = quantizer = QuantizeDequantize(shape, 4, True)
    params = SeqMseParams(num_batches=2, num_candidates=10)
    wanted = torch.stack([batch @ module.weight.T for batch in BATCHES])

    def errors() -> torch.Tensor:
        found = torch.stack([batch @ quantizer(module.weight).T for batch in BATCHES])
        each = (found - wanted).square().mean((0, 1))
        return each if shape else each.sum()

    tried = []
    with torch.no_grad():
        with quantizer.compute_encodings():
            quantizer(module.weight)
        for high, low in SequentialMse.get_candidates(10, quantizer.get_max(), quantizer.get_min()):
            quantizer.set_range(low, high)
            tried.append(errors())
    SequentialMse.optimize_module(module, BATCHES, BATCHES, params)
    with torch.no_grad():
        torch.testing.assert_close(errors(), torch.stack(tried).amin(0))
    assert not quantizer.is_overwrite_allowed() and not quantizer.min.requires_grad
    with pytest.raises(ValueError, match="inp_symmetry is asym.*call apply_seq_mse"):
        SequentialMse.optimize_module(module, BATCHES, BATCHES, SeqMseParams(2, inp_symmetry="asym"))


def test_more_batches_than_a_loader_has_are_refused():
    with pytest.raises(ValueError, match="3 batches of a loader of 2"):
        AdaroundParameters(BATCHES, num_batches=3)
