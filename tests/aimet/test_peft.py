"""``aimet_torch.peft`` on LoRA layers with the parts that those of PEFT have."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bitwright.aimet_torch.lora.peft_utils import freeze_base_model
from bitwright.aimet_torch.peft import (
    LoraLayer,
    PeftQuantUtils,
    replace_lora_layers_with_quantizable_layers,
    track_lora_meta_data,
)
from bitwright.aimet_torch.quantsim import QuantizationSimModel


class PeftLinear(nn.Module):
    """A linear layer with adapters as PEFT builds it."""

    def __init__(self, base: nn.Linear, names: tuple[str, ...], active: tuple[str, ...], rank: int = 3) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.r, self.lora_alpha = dict.fromkeys(names, rank), dict.fromkeys(names, 6)
        self.scaling, self.active_adapters, self.use_dora = dict.fromkeys(names, 2.0), list(active), {}
        self.lora_A = nn.ModuleDict({n: nn.Linear(base.in_features, rank, bias=False) for n in names})
        self.lora_B = nn.ModuleDict({n: nn.Linear(rank, base.out_features, bias=False) for n in names})
        self.lora_dropout = nn.ModuleDict({n: nn.Identity() for n in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        for name in self.active_adapters:
            result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


class Net(nn.Module):
    def __init__(self, names: tuple[str, ...] = ("first",), active: tuple[str, ...] = ("first",)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = PeftLinear(nn.Linear(6, 8), names, active), PeftLinear(nn.Linear(8, 5), names, active)
        for name, value in self.named_parameters():
            if "lora_B" in name and any(f".{a}." in name for a in active):
                nn.init.normal_(value, std=0.3)
            elif "lora_B" in name:
                nn.init.zeros_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
TWO = ("first", "second")


def simulated(tmp_path, model: Net):
    """The simulation of a model with its adapters' layers replaced, and the utilities."""
    replace_lora_layers_with_quantizable_layers(model)
    utilities = PeftQuantUtils(track_lora_meta_data(model, tmp_path, "meta"))
    return QuantizationSimModel(model.eval(), X), utilities


def calibrated(sim: QuantizationSimModel) -> None:
    sim.compute_encodings(lambda model, _: model(X), None)


def test_replaced_layers_compute_what_pefts_compute():
    model = Net(TWO).eval()
    wanted = model(X)
    replace_lora_layers_with_quantizable_layers(model)
    assert isinstance(model.up, LoraLayer) and isinstance(model.down, LoraLayer)
    assert model.up.index_to_adapter_name == {0: "first", 1: "second"} and model.up.active_adapters["second"] is False
    torch.testing.assert_close(model(X), wanted)


def test_names_of_the_adapters_are_told_and_written(tmp_path):
    model = Net(TWO)
    replace_lora_layers_with_quantizable_layers(model)
    meta = track_lora_meta_data(model, tmp_path, "meta")
    assert meta["second"].lora_B == ["up.lora_B.1", "down.lora_B.1"] and meta["first"].alpha == 6
    assert json.loads((tmp_path / "meta.json").read_text())["first"]["mul_scale"] == ["up.mul_scale", "down.mul_scale"]


def test_bits_and_frozen_ranges_are_those_of_base_or_adapters(tmp_path):
    sim, utilities = simulated(tmp_path, Net(TWO))
    utilities.set_bitwidth_for_lora_adapters(sim, output_bw=16, param_bw=4)
    calibrated(sim)
    up = sim.model.up
    assert up.base_layer.param_quantizers["weight"].bitwidth == 8
    assert {layer.param_quantizers["weight"].bitwidth for layer in (*up.lora_A, *up.lora_B)} == {4}
    assert up.lora_B[1].output_quantizers[0].bitwidth == 16
    utilities.freeze_base_model(sim)
    kept = {n: q.get_max().clone() for n, q in sim.named_quantizers() if q.is_initialized()}
    with torch.no_grad():
        for layer in (sim.model.up, sim.model.down):
            for linear in (layer.base_layer, *layer.lora_A, *layer.lora_B):
                linear.weight.mul_(2)
    calibrated(sim)
    for name, quantizer in sim.named_quantizers():
        if name in kept and "base_layer" in name:
            assert torch.equal(quantizer.get_max(), kept[name]) and not quantizer.min.requires_grad
        elif "lora_A" in name and "param_quantizers" in name:
            assert not torch.equal(quantizer.get_max(), kept[name])
    assert len(list(utilities.get_quantized_lora_layer(sim))) == len(list(utilities.get_fp_lora_layer(sim.model))) == 8


@pytest.mark.parametrize("names", [("first",), TWO])
def test_scalings_lie_on_the_fixed_grid_that_was_asked_for(tmp_path, names):
    sim, utilities = simulated(tmp_path, Net(names))
    utilities.quantize_lora_scale_with_fixed_range(sim, 16, 0.0, 1.0)
    calibrated(sim)
    quantizer = sim.model.up.mul_scale.input_quantizers[1]
    assert float(quantizer.min) == 0.0 and float(quantizer.max) == 1.0 and quantizer.bitwidth == 16
    clipped = sim.model(X)  # the scaling is 2 and the end of its grid 1
    for layer in (sim.model.up, sim.model.down):
        for scaling in layer.scaling:
            scaling.data.fill_(1.0)
    torch.testing.assert_close(sim.model(X), clipped)


def test_adapters_are_written_loaded_and_switched_off(tmp_path):
    sim, utilities = simulated(tmp_path, Net())
    utilities.export_adapter_weights(sim, tmp_path, "adapters")
    path = tmp_path / "adapters.safetensor"
    tensors = load_file(path)
    assert sorted(tensors) == [f"{layer}.lora_{part}.0.weight" for layer in ("down", "up") for part in "AB"]
    utilities.disable_lora_adapters(sim)
    assert not sim.model.up.lora_B[0].weight.any() and sim.model.up.base_layer.weight.any()
    utilities.enable_adapter_and_load_weights(sim, path)
    assert torch.equal(sim.model.up.lora_B[0].weight, tensors["up.lora_B.0.weight"])
    save_file({n: v for n, v in tensors.items() if "down" not in n}, path)
    with pytest.raises(KeyError, match=r"no weights of \['down.lora_A.0'"):
        utilities.enable_adapter_and_load_weights(sim, path)
    save_file({**tensors, "up.lora_A.0.weight": torch.zeros(4, 6)}, path)
    with pytest.raises(ValueError, match=r"up.lora_A.0.weight.*another shape"):
        utilities.enable_adapter_and_load_weights(sim, path)
    with pytest.raises(ValueError, match="are pickles"):
        utilities.enable_adapter_and_load_weights(sim, path, use_safetensor=False)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="cannot be read"):
        utilities.enable_adapter_and_load_weights(sim, path)
    assert torch.equal(sim.model.up.lora_A[0].weight, tensors["up.lora_A.0.weight"]), "nothing is changed"


def test_adapters_train_on_a_frozen_base_and_export(tmp_path):
    sim, _ = simulated(tmp_path, Net())
    calibrated(sim)
    freeze_base_model(sim)  # by the names of PEFT, without the utilities
    base = sim.model.up.base_layer.weight.clone()
    wanted = torch.randn(16, 5, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.Adam(
        [p for n, p in sim.model.named_parameters() if "lora_" in n and n.endswith("weight")], 1e-2
    )
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (sim.model(X) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0] and torch.equal(base, sim.model.up.base_layer.weight)
    sim.export(str(tmp_path), "model", dummy_input=X)
    assert (tmp_path / "model.encodings").exists()


def test_adapters_that_are_computed_otherwise_are_refused():
    model = Net()
    model.down.use_dora = {"first": True}
    with pytest.raises(ValueError, match=r"DoRA.*simulations quantize the base of PEFT models"):
        replace_lora_layers_with_quantizable_layers(model)


def test_an_adapter_that_is_not_active_is_told():
    model = Net(TWO)
    nn.init.normal_(model.up.lora_B["second"].weight)
    with pytest.warns(UserWarning, match=r"adapters \['second'\] are not active in PEFT and are added too"):
        replace_lora_layers_with_quantizable_layers(model)
