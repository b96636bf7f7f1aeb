"""A checkpoint is found whole or not at all, and a call that cannot load it changes nothing."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bitwright.torch as bt
from bitwright.core.health.diagnosis import Repair
from bitwright.core.numerics.formats import parse_format
from bitwright.core.numerics.spec import RangeMethod
from bitwright.errors import ConfigError, EncodingsError, ExportError, ModelError
from bitwright.export import checkpoint
from bitwright.torch import QuantizationSimModel
from tests.support.processes import python
from tests.support.simulations import calibrated

X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def make(scale: float = 1.0) -> QuantizationSimModel:
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        model.conv.weight.mul_(scale)
    return calibrated(QuantizationSimModel(model, X), [scale * X])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return make(2.0).save_checkpoint(tmp_path / "saved")


def state(sim: QuantizationSimModel) -> list[Any]:
    quantizers = [(q.spec, q.encoding, q.enabled, q.frozen, q.why_float, q.statistics) for q in sim.quantizers.unique()]
    tensors = {name: tensor.tolist() for name, tensor in sim.model.state_dict().items()}
    return [quantizers, tensors, sim.calibrated, sim.repairs, sim.calibration_log]


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``quantizers.json``, and write a manifest that agrees with it."""
    path = folder / "quantizers.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    rehashed(folder)


def rehashed(folder: Path) -> None:
    manifest = json.loads((folder / "checkpoint.json").read_text())
    for entry in manifest["files"]:
        content = (folder / entry["name"]).read_bytes()
        entry["sha256"], entry["size"] = hashlib.sha256(content).hexdigest(), len(content)
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def refused(sim: QuantizationSimModel, folder: Path, match: str) -> None:
    before = state(sim)
    with pytest.raises(EncodingsError, match=match):
        sim.load_checkpoint(folder)
    assert state(sim) == before


@pytest.mark.slow
def test_a_save_that_is_stopped_anywhere_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Killed or interrupted before every change of a file; saved once more, it is the new one."""
    ran = python("-m", "tests.torch.stopped_checkpoint", tmp_path)
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        ["over", "kill"], ["over", "interrupt"], ["first", "kill"], ["first", "interrupt"]
    ]  # fmt: skip
    for before, _, *outcomes in lines:
        old = "old" if before == "over" else "none"
        switch = outcomes.index("new")
        assert switch >= 8 and len(outcomes) - switch >= 5
        assert set(outcomes[:switch]) == {old} and set(outcomes[switch:]) == {"new"}


@pytest.mark.parametrize("name", ["model.safetensors", "quantizers.json", "statistics.safetensors"])
def test_parts_of_two_checkpoints_are_refused(tmp_path: Path, saved: Path, name: str) -> None:
    other = make(3.0).save_checkpoint(tmp_path / "other")
    os.replace(other / name, saved / name)
    refused(make(), saved, f"{name}: it has another content than checkpoint.json was written with")


@pytest.mark.parametrize("name", ["model.safetensors", "quantizers.json", "statistics.safetensors", "checkpoint.json"])
def test_a_missing_part_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    refused(make(), saved, f"no readable checkpoint there.*{name}|{name} is missing")


@pytest.mark.parametrize("name", ["model.safetensors", "quantizers.json", "statistics.safetensors"])
def test_a_flipped_bit_is_found(saved: Path, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[-20] ^= 1
    (saved / name).write_bytes(content)
    refused(make(), saved, "another content")


def encoding_of(site: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["quantizers"][site]["encoding"].update(changes)


def spec_of(site: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["quantizers"][site]["spec"].update(changes)


WEIGHT = "conv.weight"
SCALE = f"{WEIGHT}: it is not an encoding: a scale is not a positive finite number"
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "negative-scale": (encoding_of(WEIGHT, scale=[-1.0, 1, 1, 1]), SCALE),
    "nan-scale": (encoding_of(WEIGHT, scale=[1, 1, float("nan"), 1]), SCALE),
    "infinite-scale": (encoding_of(WEIGHT, scale=[1, 1, float("inf"), 1]), SCALE),
    "zero-scale": (encoding_of(WEIGHT, scale=[0, 1, 1, 1]), SCALE),
    "few-scales": (encoding_of(WEIGHT, scale=[1.0] * 3), f"{WEIGHT}: it is not an encoding: cannot reshape"),
    "wrong-shape": (
        encoding_of(WEIGHT, scale=[1.0] * 3, shape=[3], zero_point=[0] * 3),
        rf"{WEIGHT}: its encoding has scales of shape \(3,\).*has \(4,\)",
    ),
    "text": (encoding_of(WEIGHT, scale="abcd"), f"{WEIGHT}: it is not an encoding: 'abcd' is not a list"),
    "zero-point": (encoding_of("relu.output[0]", zero_point=[256]), r"relu.output\[0\]: .* zero point lies outside 0 to 255"),
    "huge-zero-point": (encoding_of("relu.output[0]", zero_point=[1 << 80]), "no readable checkpoint|it is not an encoding"),
    "no-format": (encoding_of(WEIGHT, format="int99"), f"{WEIGHT}: it is not an encoding: .*99 is not a bit width"),
    "no-spec-format": (spec_of(WEIGHT, format="int"), f"{WEIGHT}: it is not a spec: .*there is no number format"),
    "no-method": (spec_of(WEIGHT, method="best"), f"{WEIGHT}: it is not a spec: .*best"),
    "no-axis": (spec_of(WEIGHT, granularity={"kind": "per_channel", "axis": 7}), f"{WEIGHT}: .*axis 7"),
    "fixed-range": (spec_of(WEIGHT, fixed_range=[1.0, -1.0]), f"{WEIGHT}: its spec has the fixed range"),
    "no-symmetry": (spec_of(WEIGHT, symmetry="odd"), f"{WEIGHT}: it is not a spec: .*'odd' is not a symmetry"),
    "switch": (lambda d: d["quantizers"][WEIGHT].update(enabled="yes"), f"{WEIGHT}: enabled and frozen"),
    "no-encoding": (lambda d: d["quantizers"][WEIGHT].pop("encoding"), f"{WEIGHT}: what is saved.*KeyError"),
    "list": (lambda d: d["quantizers"].update({WEIGHT: [1]}), f"{WEIGHT}: what is saved"),
    "stage": (lambda d: d.update(stage="observe"), "no readable checkpoint there: there is no stage 'observe'"),
    "version": (lambda d: d.update(version=9), "no readable checkpoint there: its version is 9"),
    "no-quantizers": (lambda d: d.pop("quantizers"), "no readable checkpoint there: 'quantizers'"),
    "name": (
        lambda d: d["quantizers"].update(x=d["quantizers"].pop(WEIGHT)),
        f"names of the model are missing: {WEIGHT!r}",
    ),
    "repair": (lambda d: d.update(repairs=[{"op": "a", "kind": "burn"}]), "no readable checkpoint there.*'burn'"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_quantizer_that_cannot_be_is_named(saved: Path, damage: str) -> None:
    change, match = DAMAGES[damage]
    rewritten(saved, change)
    refused(make(), saved, match)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: t.update({"fc.bias": torch.zeros(4)}), r"fc.bias has shape \(4,\) in the checkpoint and \(5,\)"),
        (lambda t: t.update({"fc.bias": torch.zeros(5, dtype=torch.float64)}), "fc.bias has dtype torch.float64"),
        (lambda t: t.pop("fc.bias"), "names of the model are missing: 'fc.bias'"),
        (lambda t: t.update(extra=torch.zeros(1)), "not in the model: 'extra'"),
    ],
    ids=["shape", "dtype", "missing", "extra"],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(saved: Path, change: Any, match: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, saved / "model.safetensors")
    rehashed(saved)
    refused(make(), saved, match)


def test_sites_that_share_a_quantizer_agree(tmp_path: Path) -> None:
    class Join(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x + 1, x * 2], 1) - 1

    sim = calibrated(QuantizationSimModel(Join(), X), [X])
    names = [name for name, site in sim.quantizers.items() if site.quantizer.name != name]
    assert names, "the model has no shared quantizer"
    folder = sim.save_checkpoint(tmp_path)
    rewritten(folder, encoding_of(names[0], scale=[7.0]))
    refused(sim, folder, "it shares its quantizer with .*, of which something else is saved")


@pytest.mark.parametrize("at", range(6))
def test_an_interrupted_load_changes_nothing(saved: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = make()
    before, left, put = state(sim), [at], checkpoint.Setting.put

    def interrupted(self: Any, site: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        put(self, site)

    monkeypatch.setattr(checkpoint.Setting, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sim.load_checkpoint(saved)
    assert state(sim) == before


def test_everything_that_changes_the_answer_is_kept(tmp_path: Path) -> None:
    sim = make(2.0)
    sim._simulator.repairs = {"conv": Repair("conv", "clamp", -0.1, 0.1, 0.0, "overflow")}
    sim.quantizers["fc.output[0]"].enabled = False
    sim.quantizers["conv.input[0]"].frozen = True
    sim.quantizers["relu.output[0]"].quantizer.why_float = "it holds mask constants"
    fresh = make()
    assert not torch.equal(fresh.model(X), sim.model(X))
    fresh.load_checkpoint(sim.save_checkpoint(tmp_path))
    assert torch.equal(fresh.model(X), sim.model(X)) and fresh.repairs == sim.repairs
    assert fresh.quantizers["relu.output[0]"].quantizer.why_float == "it holds mask constants"
    for name, site in sim.quantizers.items():
        assert fresh.quantizers[name].quantizer.statistics == site.quantizer.statistics  # and not of other data
    again = make()
    again.load_checkpoint(fresh.save_checkpoint(tmp_path))
    assert torch.equal(again.model(X), sim.model(X))


@pytest.mark.parametrize("scheme", ["min_max", "mse", "percentile"])
def test_other_bits_and_range_methods_need_no_data_after_loading(tmp_path: Path, scheme: str) -> None:
    sims = [QuantizationSimModel(Net().eval(), X, scheme) for _ in range(2)]
    sims[0].compute_encodings([X, 3 * X], progress=False)
    sims[1].load_checkpoint(sims[0].save_checkpoint(tmp_path))
    methods = ["minmax"] if scheme == "min_max" else ["minmax", "mse", "percentile", "entropy"]
    for method in methods:
        for bits in ("uint4", "uint8"):
            for sim in sims:
                for site in sim.quantizers.values():
                    if site.role in ("input", "output"):
                        spec = site.quantizer.spec
                        site.spec = replace(spec, format=parse_format(bits), method=RangeMethod.of(method))
            one, other = (
                {name: site.encoding for name, site in sim.quantizers.items() if site.role in ("input", "output")}
                for sim in sims
            )
            assert one == other and None not in one.values()
    sims[1].compute_encodings([10 * X], resume=True, progress=False)  # and calibration goes on
    assert sims[1].quantizers["conv.input[0]"].encoding.max > sims[0].quantizers["conv.input[0]"].encoding.max


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda a: {f"{k}x": v for k, v in a.items()}, "there are no statistics of kind 'minmax' of a site"),
        (lambda a: {k.replace("minmax/", "average/"): v for k, v in a.items()}, "no statistics of kind 'average'"),
        (lambda a: {k: v.reshape(1) if "/hi/" in k else v for k, v in a.items()}, "are not of one shape"),
        (lambda a: {k: v for k, v in a.items() if "/hi/" not in k}, "no readable checkpoint there"),
        (lambda a: {"hi": a[next(iter(a))]}, "no readable checkpoint there"),
    ],
    ids=["site", "kind", "shape", "field", "key"],
)
def test_statistics_of_something_else_are_refused(saved: Path, change: Any, match: str) -> None:
    path = saved / "statistics.safetensors"
    save_file(change(load_file(path)), path)
    rehashed(saved)
    refused(make(), saved, match)


def test_an_uncalibrated_simulation_is_saved_as_such(tmp_path: Path) -> None:
    sim = QuantizationSimModel(Net().eval(), X)
    fresh = make()
    fresh.load_checkpoint(sim.save_checkpoint(tmp_path))
    assert not fresh.calibrated


def test_saving_inside_in_float_saves_the_calibrated_simulation(tmp_path: Path) -> None:
    sim, fresh = make(2.0), make()
    with sim.in_float():
        sim.save_checkpoint(tmp_path)
    fresh.load_checkpoint(tmp_path)
    assert fresh.calibrated and torch.equal(fresh.model(X), sim.model(X))


def test_saving_during_calibration_is_refused(tmp_path: Path) -> None:
    sim = make()
    with pytest.raises(ModelError, match="being calibrated.*when compute_encodings has returned"):
        sim.compute_encodings(lambda model: sim.save_checkpoint(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_a_version_without_hashes_is_explained(saved: Path) -> None:
    (saved / "checkpoint.json").unlink()
    refused(make(), saved, "checkpoint.json is missing, which tells whether the other files are whole")


def test_a_full_disk_keeps_the_earlier_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(self: Path, *args: Any, **options: Any) -> int:
        if self.name == "quantizers.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args, **options)

    sim = make()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(ExportError, match="the disk is full. Remedy: free some space"):
            sim.save_checkpoint(saved)
    names = ["checkpoint.json", "model.safetensors", "quantizers.json", "statistics.safetensors"]
    assert sorted(path.name for path in saved.iterdir()) == names
    sim.load_checkpoint(saved)
    assert torch.equal(sim.model(X), make(2.0).model(X))


@pytest.mark.parametrize("prefix", ["../../up", "/up", "", "a/b"])
def test_a_prefix_that_leads_out_of_the_folder_is_refused_before_any_work(tmp_path: Path, prefix: str) -> None:
    sim, folder = make(), tmp_path / "a" / "b"
    for call in (
        lambda: sim.export(folder, prefix),
        lambda: bt.quantize(Net(), iter(()), path=folder, filename_prefix=prefix),
    ):
        with pytest.raises(ConfigError, match="filename_prefix"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_fresh_model_that_is_folded_takes_the_checkpoint_of_a_trained_one(tmp_path: Path) -> None:
    """A batch norm as it is born shifts nothing; its fold gives the layer a bias all the same."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(64, 5, bias=False), nn.BatchNorm1d(5),
        )  # fmt: skip

    trained = build().train()
    for _ in range(3):
        trained(X + 1)
    trained.eval()
    fresh = copy.deepcopy(build()).eval()
    sims = []
    for model in (trained, fresh):
        assert len(bt.fold_all_batch_norms(model, dummy_input=X)) == 2
        sims.append(QuantizationSimModel(model, X))
    sims[0].compute_encodings([X])
    sims[1].load_checkpoint(sims[0].save_checkpoint(tmp_path))
    assert torch.equal(sims[0].model(X), sims[1].model(X))
