"""Adapters beside the layers of a simulation: placed later, switched, merged, read, written, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.errors import ConfigError
from bitwright.torch import QuantizationSimModel, export_adapters, load_adapter, merge_adapters, place_adapters
from bitwright.torch.adapters import _check_base
from tests.support.lora import Adapted, Multiplied, PeftLinear
from tests.support.simulations import calibrated

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
RULES = [{"match": "*lora_*.second.*", "weight": {"format": "int8"}}]


def simulated(
    preset: str = "w4", rules: list[Any] | None = None, kind: type[nn.Linear] = nn.Linear
) -> QuantizationSimModel:
    model = Adapted(kind).eval()
    model.add_adapter("first")
    return calibrated(QuantizationSimModel(model, X[:4], config_file={"preset": preset, "rules": rules or []}), [X])


def weights_of(sim: QuantizationSimModel) -> dict[str, int]:
    return {n: s.spec.format.bits for n, s in sim.quantizers.items() if s.role == "weight" and s.enabled and s.spec}


@torch.no_grad()
@pytest.mark.parametrize("preset", ["w4", "w8a8"])
def test_an_adapter_that_is_added_later_gets_its_sites(preset: str) -> None:
    sim = simulated(preset, RULES)
    first, known = sim.model(X), {n: s.encoding for n, s in sim.quantizers.items()}
    sim.model.add_adapter("second", rank=2)
    sim.model.add_adapter("third", rank=3)
    sim.model.up.lora_A["first"].weight.requires_grad_(False)
    names = place_adapters(sim, [X])
    assert {f"{layer}.lora_{part}.second.weight" for layer in ("up", "down") for part in "AB"} <= set(names)
    assert not any("third" in name and name.endswith("weight") for name in names)
    assert all(sim.quantizers[name].encoding == encoding for name, encoding in known.items())
    assert torch.equal(sim.model(X), first) and not sim.model.up.lora_A["first"].weight.requires_grad
    sim.model.set_adapter("second")
    if preset == "w4":  # by hand, on the grids of the sites
        factors = {n: sim.quantizers[f"up.lora_{n}.second.weight"].quantizer for n in "AB"}
        down, up = (factors[n].constant(getattr(sim.model.up, f"lora_{n}")["second"].weight) for n in "AB")
        with sim.in_float():
            base = sim.quantizers["up.base_layer.weight"].quantizer.constant(sim.model.up.base_layer.weight)
            expected = X @ base.T + sim.model.up.base_layer.bias + X @ down.T @ up.T * sim.model.up.scaling["second"]
        tapped: list[torch.Tensor] = []
        handle = sim.model.up.register_forward_hook(lambda _, __, output: tapped.append(output))
        sim.model(X)
        handle.remove()
        assert torch.allclose(tapped[0], expected, atol=1e-5)
    assert not sim._simulator.unseen
    row = next(row for row in sim.coverage() if row.name == "up.lora_B.third.weight")
    assert row.status == "float" and "adapter beside up.base_layer" in row.how
    sim.model.set_adapter("first")
    assert torch.equal(sim.model(X), first)


@torch.no_grad()
def test_a_layer_that_gets_its_first_adapter_later_keeps_its_grid() -> None:
    sim = simulated()
    first, encoding = sim.model(X), sim.quantizers["last.weight"].encoding
    sim.model.last = PeftLinear(sim.model.last)
    sim.model.last.add("other", 2, 2)
    place_adapters(sim)
    assert sim.quantizers["last.base_layer.weight"].encoding == encoding and "last.weight" not in sim.quantizers
    assert torch.equal(sim.model(X), first)
    sim.model.last.set_adapter(["other"])
    assert not torch.equal(sim.model(X), first) and not sim._simulator.unseen


@torch.no_grad()
@pytest.mark.parametrize("preset, near", [("w8", 0.01), ("w8a8", 0.05)])
def test_merged_adapters_need_no_calibration_and_come_out_again(preset: str, near: float) -> None:
    sim = simulated(preset)
    for layer in (sim.model.up, sim.model.down):
        layer.lora_B["first"].weight.mul_(4)  # sums beyond the scales of the base
    sim.compute_encodings([X], progress=False)
    apart, weight = sim.model(X), sim.model.up.base_layer.weight.clone()
    known = {n: s.encoding for n, s in sim.quantizers.items()}
    on_grid = sim.quantizers["up.base_layer.weight"].quantizer.constant(weight)
    undo = merge_adapters(sim)
    exact = on_grid + sim.model.up._delta("first")
    assert torch.allclose(sim.model.up.base_layer.weight, exact)
    step = torch.from_numpy(sim.quantizers["up.base_layer.weight"].encoding.scale.reshape(-1, 1).copy())
    rounded = sim.quantizers["up.base_layer.weight"].quantizer.constant(exact)
    assert ((rounded - exact).abs() <= step / 2 + 1e-6).all()  # nothing is cut off
    assert (sim.model(X) - apart).norm() < near * apart.norm()
    with pytest.raises(ConfigError, match="adapters of up, down are merged into their layers.*undo"):
        merge_adapters(sim)
    undo()
    assert torch.equal(sim.model.up.base_layer.weight, weight) and torch.equal(sim.model(X), apart)
    assert {n: s.encoding for n, s in sim.quantizers.items()} == known


@torch.no_grad()
def test_layers_that_multiply_by_a_transpose_are_merged_and_written_as_others() -> None:
    sim, other = simulated("w8", kind=Multiplied), simulated("w8")
    assert torch.allclose(sim.model(X), other.model(X), atol=1e-5)
    held, known = sim.dequantized_state_dict(), other.dequantized_state_dict()
    assert all(torch.equal(held[name], known[name]) for name in known)
    for layer in (sim.model.up, sim.model.down, other.model.up, other.model.down):
        layer.lora_B["first"].weight.mul_(4)
    first = sim.model(X)
    undo, _ = merge_adapters(sim), merge_adapters(other)
    assert torch.allclose(sim.model(X), other.model(X), atol=1e-5)
    undo()
    assert torch.equal(sim.model(X), first)


@torch.no_grad()
def test_the_model_is_recorded_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, runs = simulated("w8", kind=Multiplied), list[None]()
    recorded = type(sim)._recorded_constants
    monkeypatch.setattr(type(sim), "_recorded_constants", lambda self: runs.append(None) or recorded(self))
    sim.dequantized_state_dict()
    assert len(runs) == 1, "two weights are read through a transpose"


@torch.no_grad()
def test_a_merge_keeps_the_scales_where_they_fit() -> None:
    sim = simulated()
    for layer in (sim.model.up, sim.model.down):
        layer.lora_B["first"].weight.zero_()
    encoding = sim.quantizers["up.base_layer.weight"].encoding
    apart = sim.model(X)
    merge_adapters(sim)
    assert sim.quantizers["up.base_layer.weight"].encoding == encoding and torch.allclose(
        sim.model(X), apart, atol=1e-6
    )


@torch.no_grad()
def test_adapters_are_read_from_a_folder(tmp_path: Path) -> None:
    sim = simulated()
    first = sim.model(X)
    sim.model.save_adapter(tmp_path, "first")
    assert load_adapter(sim, tmp_path, "copy") == ()
    sim.model.set_adapter("copy")
    assert torch.equal(sim.model(X), first)
    sim.model.up.fan_in_fan_out = True  # layers of GPT-2, whose weight is [inputs, outputs]
    sim.model.up.base_layer.weight.data = sim.model.up.base_layer.weight.t().contiguous()
    _check_base(sim, tmp_path, {"up.lora_A.weight": (4, 32), "up.lora_B.weight": (48, 4)})


@pytest.mark.slow
@torch.no_grad()
def test_a_file_takes_adapters_as_inputs(tmp_path: Path) -> None:
    import onnxruntime

    sim = simulated("w8")
    sim.model.add_adapter("other", rank=2, alpha=1)
    sim.model.add_adapter("up alone", rank=3, layers=("up",))
    place_adapters(sim)
    sim.export(tmp_path, "m", X)
    files = export_adapters(sim, tmp_path / "m.onnx", tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"))
    x = session.get_inputs()[0].name
    for name, path in files.items():
        sim.model.set_adapter(name)
        adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load(str(path))
        options.add_active_adapter(adapter)
        assert np.allclose(session.run(None, {x: X.numpy()}, options)[0], sim.model(X).numpy(), atol=1e-4), name
    sim.model.set_adapter("first")
    assert np.allclose(session.run(None, {x: X.numpy()})[0], sim.model(X).numpy(), atol=1e-4)
    sim.model.down.lora_B["first"].weight.add_(1)
    with pytest.raises(ConfigError, match="down.lora_B: the file does not hold the numbers of this factor in float"):
        export_adapters(sim, tmp_path / "m.onnx", tmp_path / "out")
    sim.model.set_adapter("up alone")
    sim.export(tmp_path, "n", X)
    with pytest.raises(ConfigError, match="down: adapter first changes this layer, and the one in the file leaves it"):
        export_adapters(sim, tmp_path / "n.onnx", tmp_path / "out")


_NOT_READ = (
    ("rank_pattern", [3], r"the rank rank_pattern is \[3\]"),
    ("lora_alpha", [2], "PEFT cannot load it: TypeError"),
)


def test_what_does_not_fit_is_said(tmp_path: Path, caplog: Any) -> None:
    sim = simulated()
    sim.model.save_adapter(tmp_path / "rank", "first", r=0)
    with pytest.raises(ConfigError, match=r"adapter_config.json: the rank r is 0.*a rank of 1 or more"):
        load_adapter(sim, tmp_path / "rank", "new")
    other = Adapted()
    other.up = PeftLinear(nn.Linear(40, 48))
    other.add_adapter("first")
    other.save_adapter(tmp_path / "other", "first")
    with pytest.raises(ConfigError, match=r"for another base: up.lora_A.weight has shape \(4, 40\), and up \(48, 32\)"):
        load_adapter(sim, tmp_path / "other", "new")
    other.side = PeftLinear(nn.Linear(32, 8))
    other.side.add("first", 2, 2)
    other.save_adapter(tmp_path / "side", "first")
    with pytest.raises(ConfigError, match="for another base: it changes side, which the model does not have"):
        load_adapter(sim, tmp_path / "side", "new")
    for key, value, said in _NOT_READ:
        shutil.copytree(tmp_path / "side", tmp_path / key)
        sim.model.save_adapter(tmp_path / key, "first")
        file = tmp_path / key / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
        with pytest.raises(ConfigError, match=said):
            load_adapter(sim, tmp_path / key, key)
    with pytest.raises(ConfigError, match=r"up.lora_A.weight has shape \(\), and a factor has two axes"):
        _check_base(sim, tmp_path, {"up.lora_A.weight": ()})
    with pytest.raises(ConfigError, match="it has no adapter_config.json"):
        load_adapter(sim, tmp_path / "nowhere", "new")
    with pytest.raises(ConfigError, match="the model has an adapter of this name"):
        load_adapter(sim, tmp_path / "rank", "first")
    (tmp_path / "rank/adapter_model.safetensors").write_bytes(b"1234")
    with pytest.raises(ConfigError, match="it is damaged"):
        load_adapter(sim, tmp_path / "rank", "new")
    plain = QuantizationSimModel(nn.Linear(32, 8), X, preset="w8")
    with pytest.raises(ConfigError, match="no layer of the model has an adapter of PEFT"):
        place_adapters(plain)
    sim.model.set_adapter("none")
    with pytest.raises(ConfigError, match="no adapter is active"):
        merge_adapters(sim)
    left = simulated(rules=[{"match": "up.base_layer", "weight": {"quantized": False}}])
    left.model.save_adapter(tmp_path / "left", "first")
    load_adapter(left, tmp_path / "left", "new")
    assert "changes layers that are not quantized: up" in caplog.text
