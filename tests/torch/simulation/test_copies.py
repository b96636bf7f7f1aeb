"""One way to copy a module, whoever asks: simulations, ``quantize``, ``prepare_model``."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import bitwright
from bitwright.aimet_torch.model_preparer import prepare_model
from bitwright.torch import QuantizationSimModel


class Cached(nn.Module):
    """Keeps what it computed last, with its history."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), None

    def forward(self, x):
        self.kept = self.layer(x)
        return self.kept


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)), nn.ReLU())


def old_spectral_norm():
    return torch.nn.utils.spectral_norm(nn.Linear(4, 4))


def pruned():
    layer = nn.Linear(4, 4)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


@pytest.mark.parametrize("make", [Cached, old_weight_norm, old_spectral_norm, pruned])
@pytest.mark.parametrize("recipe", [None, ["fold"]], ids=["default recipe", "fold"])
def test_a_module_that_keeps_a_tensor_with_a_history_is_quantized_as_it_is_simulated(make, recipe):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(2, 4)
    wanted = model(x)
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([x])
    result = bitwright.quantize(model, [x] * 6, recipe=recipe, progress=False)
    assert len(result.sim.quantizers) == len(sim.quantizers)
    assert torch.allclose(result.model(x), wanted, atol=0.1 * float(wanted.detach().abs().max()))
    assert torch.equal(prepare_model(model)(x), wanted)
    assert torch.equal(model(x), wanted)


def test_lazy_layers_are_made_for_the_copy_alone():
    model, x = nn.Sequential(nn.LazyLinear(4)).eval(), torch.randn(2, 4)
    result = bitwright.quantize(model, [x] * 2, recipe=["fold"], progress=False)
    assert result.sim.quantizers["0.weight"].enabled
