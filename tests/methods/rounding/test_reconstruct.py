"""Reconstruction of small networks: what it promises of weights, encodings, data, interruptions and memory."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.core.numerics.affine import fake_quantize, is_sayable
from bitwright.core.numerics.granularity import PerChannel
from bitwright.core.numerics.spec import find_preset, weight_spec
from bitwright.errors import CalibrationError, ConfigError, ExportError
from bitwright.llm.coded import CodedLinear, StoredWeight
from bitwright.llm.packed import PackedWeight
from bitwright.methods.rounding import gptq
from bitwright.methods.rounding.driver import Cache, Choice, RoundingReport, Store, Walk
from bitwright.methods.rounding.program import block_units, layer_units
from bitwright.methods.rounding.reconstruct import BlockProblem, Settings, optimise
from bitwright.torch import QuantizationSimModel, apply_reconstruction, learn_scales
from bitwright.torch.program import TorchSimulation
from tests.support.cost import steps
from tests.support.simulations import calibrated

METHODS = {
    "adaround": {"iterations": 300},
    "brecq": {"iterations": 150},
    "qdrop": {"iterations": 150},
    "flexround": {"iterations": 150},
    "learned_clipping": {"iterations": 150},
    "distill": {"iterations": 150},
    "autoround": {"iterations": 150},
    "gptq": {},
    "gptaq": {},
    "seq_mse": {},
}


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x):
        return F.relu(x + self.b(F.relu(self.a(x))))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.up(self.blocks(F.relu(self.stem(x))))
        return self.head(x.mean((2, 3)))


def data(batches: int = 4, size: int = 16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.randn(batches * size, 3, 4, 4, generator=generator)
    return list(F.interpolate(smooth, (8, 8)).split(size))  # neighbours alike, as in pictures


def simulated(preset: str = "w4a8", calibrate: bool = True, model: nn.Module | None = None):
    torch.manual_seed(5)
    model = (model or Small()).eval()
    sim = QuantizationSimModel(model, data()[0], preset=preset)
    if calibrate:
        sim.compute_encodings(data())
    return model, sim


def error(model: nn.Module, sim: QuantizationSimModel) -> float:
    """Mean squared error of the simulation on data that no method has seen."""
    with torch.no_grad():
        parts = [(model(x) - sim.model(x)).square().mean() for x in data(seed=1)]
    return float(torch.stack(parts).mean())


@pytest.mark.parametrize("method", METHODS)
def test_the_simulation_comes_nearer_to_the_float_model(method):
    model, sim = simulated()
    before = error(model, sim)
    report = apply_reconstruction(sim, data(), method, **METHODS[method])
    assert error(model, sim) < before
    assert report.gain < 1 and len(report) == 7 and not report.skipped, str(report)
    assert "stem" in str(report) and report.summary.startswith("7 layers")


@pytest.mark.parametrize("method", [m for m in METHODS if m != "seq_mse"])
def test_weights_lie_on_frozen_grids(method):
    _, sim = simulated()
    apply_reconstruction(sim, data(), method, **{**METHODS[method], **({"iterations": 20} if METHODS[method] else {})})
    for site in sim.quantizers.values():
        if site.role == "weight":
            w = sim._interceptor.named_tensor(sim.graph.values[site.value].param).detach()
            assert torch.equal(site.quantizer(w), w), site.name
            assert site.frozen
    before = {s.name: s.encoding for s in sim.quantizers.values() if s.role == "weight"}
    sim.compute_encodings(data(seed=2))
    assert all(sim.quantizers[name].encoding is encoding for name, encoding in before.items())


@pytest.mark.parametrize("preset", ["mxfp4", "nvfp4", "nf4", "fp8", "w4lpbq"])
@pytest.mark.parametrize("method", ["seq_mse", "gptq", "adaround", "autoround"])
def test_weights_of_every_format_are_chosen(preset, method):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    batches = list((torch.randn(256, 64) @ torch.randn(64, 64)).split(64))
    sim = calibrated(QuantizationSimModel(model, batches[0], preset=replace(find_preset(preset), activation=None)))
    with torch.no_grad():
        wanted = [model(x) for x in batches]
        before = sum(float((sim.model(x) - y).square().mean()) for x, y in zip(batches, wanted, strict=True))
    options = {"iterations": 60} if method.endswith("round") else {}
    report = apply_reconstruction(sim, batches, method, progress=False, **options)
    with torch.no_grad():
        after = sum(float((sim.model(x) - y).square().mean()) for x, y in zip(batches, wanted, strict=True))
    assert len(report) == 2 and not report.skipped and report.gain <= 1 and after <= before
    if method != "autoround" or preset in ("mxfp4", "w4lpbq"):  # nearest rounding stays where learning gains nothing
        assert report.gain < 1 and after < before
    for name in ("0.weight", "2.weight"):
        found = sim.quantizers[name].encoding
        assert is_sayable(found)
        if method != "seq_mse" and "nearest rounding kept" not in report[0].note:
            w = sim.model.get_parameter(name).detach()
            assert torch.equal(fake_quantize(w, found), w)


def test_seq_mse_changes_ranges_and_leaves_the_weights():
    model, sim = simulated()
    before = {n: p.clone() for n, p in sim.model.named_parameters()}
    scales = {s.name: s.encoding.scale for s in sim.quantizers.values() if s.role == "weight"}
    apply_reconstruction(sim, data(), "seq_mse")
    assert all(torch.equal(before[n], p) for n, p in sim.model.named_parameters())
    now = {name: sim.quantizers[name].encoding.scale for name in scales}
    assert all((now[n] <= scales[n]).all() for n in scales)
    assert any((now[n] < scales[n]).any() for n in scales)


@pytest.mark.slow
def test_seq_mse_then_adaround_beats_either():
    model, sim = simulated()
    apply_reconstruction(sim, data(), "seq_mse")
    alone = error(model, sim)
    apply_reconstruction(sim, data(), "adaround", iterations=300)
    assert error(model, sim) < alone


@pytest.mark.parametrize("method", ["adaround", "qdrop", "gptq"])
def test_same_seed_same_result(method):
    found = []
    for seed in (3, 3, 4):
        _, sim = simulated()
        options = {} if method == "gptq" else {"iterations": 30}
        apply_reconstruction(sim, data(), method, seed=seed, **options)
        found.append(torch.cat([p.detach().flatten() for p in sim.model.parameters()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) == (method == "gptq")


def test_weights_alone_are_chosen_without_calibration():
    model, sim = simulated(calibrate=False)
    report = apply_reconstruction(sim, data(), "adaround", iterations=100)
    assert report.gain < 1
    sim.compute_encodings(data())
    assert torch.isfinite(sim.model(data()[0])).all()


# ------------------------------------------------------------------------------------------------------------ blocks


def test_blocks_are_the_residual_blocks():
    _, sim = simulated()
    layers = ["stem", "blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b", "up", "head"]
    units = block_units(sim.graph, layers)
    assert [u.layers for u in units] == [
        ("stem",), ("blocks.0.a", "blocks.0.b"), ("blocks.1.a", "blocks.1.b"), ("up", "head")
    ]  # fmt: skip
    assert units[1].ops[-1] == "blocks.0.relu_1"  # the function behind the sum belongs to the block


def test_a_layer_takes_the_function_behind_it_along():
    _, sim = simulated()
    units = {u.layers[0]: u.ops for u in layer_units(sim.graph, ["stem", "blocks.0.b", "head"])}
    assert units == {"stem": ("stem", "relu"), "blocks.0.b": ("blocks.0.b",), "head": ("head",)}


def test_what_stands_behind_a_layer_and_is_no_function_of_one_number_is_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 5, 1), nn.Flatten())
    sim = calibrated(QuantizationSimModel(model, data()[0], preset="w4a8"), data())
    report = apply_reconstruction(sim, data(), "brecq", iterations=50)
    assert [row.layer for row in report] == ["1"] and report.gain <= 1


def test_blocks_can_be_given():
    _, sim = simulated()
    blocks = [["blocks.0.a", "blocks.1.relu_1"]]
    report = apply_reconstruction(sim, data(), "brecq", blocks=blocks, iterations=20)
    assert [row.layer for row in report][1:5] == ["blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b"]
    assert len({row.before for row in report.rows[1:5]}) == 1  # one error for all of them
    with pytest.raises(ConfigError, match="no operator 'blocks.0.aa'.*did you mean 'blocks.0.a'"):
        apply_reconstruction(sim, data(), "brecq", blocks=[["blocks.0.aa"]])


# ---------------------------------------------------------------------------------------------------- data and memory


def test_batches_of_different_sizes():
    model, sim = simulated()
    before = error(model, sim)
    uneven = [*data()[:3], data()[3][:5]]
    apply_reconstruction(sim, uneven, "brecq", iterations=100)
    assert error(model, sim) < before


def test_a_small_memory_budget_gives_the_same_result(tmp_path):
    found = []
    for budget in (None, 10_000):
        _, sim = simulated()
        apply_reconstruction(sim, data(), "brecq", iterations=20, memory_budget=budget, spill_dir=tmp_path)
        found.append(torch.cat([p.detach().flatten() for p in sim.model.parameters()]))
    assert torch.equal(*found)
    assert not list(tmp_path.iterdir())  # nothing is left on the disk


def test_what_is_kept_stays_within_the_budget(tmp_path):
    store = Store(1 << 20, tmp_path)
    tensors = [store.keep(torch.full((1 << 16,), float(i))) for i in range(12)]  # 3 MiB
    assert store.used <= 1 << 20 and store.spilled >= 2 << 20
    assert all(bool((t == i).all()) for i, t in enumerate(tensors))
    del tensors
    assert store.used == 0


def test_no_room_on_the_disk_says_what_to_change(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    store = Store(0, tmp_path)
    with pytest.raises(CalibrationError, match="activations need 4 MiB more.*larger memory_budget, or a spill_dir"):
        store.keep(torch.zeros(1 << 20))


def test_every_step_runs_once_in_each_stream():
    _, sim = simulated()
    calls: list[str] = []
    model = TorchSimulation(sim)
    original = model.quantize
    model.quantize = lambda site, x: (calls.append(site), original(site, x))[1]  # type: ignore[method-assign]
    walk = Walk(model, data()[:1], Store())
    layers = [s.op for s in sim.quantizers.values() if s.role == "weight"]
    for unit in layer_units(sim.graph, layers):
        walk.advance(unit.ops)
        walk.leave(unit.ops)
    assert len(calls) == len(set(calls))


def test_interrupted_work_is_not_done_twice(tmp_path):
    whole = simulated()[1]
    apply_reconstruction(whole, data(), "adaround", iterations=30)
    _, sim = simulated()

    def interrupted(units):
        for i, unit in enumerate(units):
            if i == 3:
                raise KeyboardInterrupt
            yield unit

    from bitwright.export.files.atomic import FinishedLayers
    from bitwright.methods.rounding.table import choose_weights

    finished = FinishedLayers(tmp_path / "done")
    cache = Cache(finished.get, finished.put)
    with pytest.raises(KeyboardInterrupt):
        choose_weights(TorchSimulation(sim), data(), "adaround", {"iterations": 30}, cache=cache, progress=interrupted)
    assert sum(s.frozen for s in sim.quantizers.values()) == 3  # what was done is in force
    assert len(list((tmp_path / "done").iterdir())) == 3
    _, again = simulated()
    apply_reconstruction(again, data(), "adaround", iterations=30, cache_dir=tmp_path / "done")
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "done").iterdir()}
    _, third = simulated()
    apply_reconstruction(third, data(), "adaround", iterations=30, cache_dir=tmp_path / "done")
    assert times == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "done").iterdir()}
    apply_reconstruction(simulated()[1], data(seed=9), "adaround", iterations=30, cache_dir=tmp_path / "done")
    assert len(list((tmp_path / "done").iterdir())) == 14  # other data, other files


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_cache_entry_that_is_no_file_is_refused(tmp_path, kind):
    """A link to a device is read without end, a pipe waited for."""
    apply_reconstruction(simulated()[1], data(), "seq_mse", cache_dir=tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
        path.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(path)
    with pytest.raises(ExportError, match=r"\.safetensors: it is not a regular file. Remedy: "):
        apply_reconstruction(simulated()[1], data(), "seq_mse", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "part, change, says",
    [
        ("weight", lambda a: np.full_like(a, np.nan), "its weight holds NaN or Inf"),
        ("weight", lambda a: a[:1], "its weight has shape"),
        ("weight", lambda a: a.astype(np.int32), "its weight is int32"),
        ("scale", lambda a: -a, "its scale is not positive"),
        ("scale", lambda a: a.ravel()[:1].reshape(1, 1), "its scale has shape"),
        ("zero_point", lambda a: a + 300, "its zero point outside of the grid"),
        ("errors", None, "its errors is missing"),
    ],
)
def test_what_a_cache_cannot_have_is_computed_anew(tmp_path, caplog, part, change, says):
    from bitwright.export.files.atomic import FinishedLayers

    class Strange(FinishedLayers):
        """Gives other arrays back than were put, with hashes that agree."""

        def get(self, key):
            found = super().get(key)
            if found is not None:
                array = found.pop(f"0.{part}")
                found |= {} if change is None else {f"0.{part}": change(array)}
            return found

    from bitwright.methods.rounding.table import choose_weights

    weights = []
    for finished in (FinishedLayers(tmp_path), Strange(tmp_path)):
        _, sim = simulated()
        cache = Cache(finished.get, finished.put)
        choose_weights(TorchSimulation(sim), data(), "adaround", {"iterations": 2}, cache=cache)
        weights.append([p.detach().clone() for p in sim.model.parameters()])
    assert all(map(torch.equal, *weights))
    assert f"what the cache has of it is computed anew: {says}" in caplog.text or says in caplog.text


class Counted:
    """GPTQ's kernel, which counts its calls and fails at the one asked for."""

    def __init__(self, monkeypatch, fails_at=None, error=None):
        self.original, self.calls, self.fails_at, self.error = gptq.round_columns, 0, fails_at, error
        monkeypatch.setattr(gptq, "round_columns", self)

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.fails_at:
            raise self.error
        return self.original(*args)


def kept(sim):
    """What a method changes of a simulation."""
    sites = {s.name: (s.encoding, s.frozen, s.enabled) for s in sim.quantizers.values()}
    return sites, {name: value.clone() for name, value in sim.model.state_dict().items()}


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize(
    "error, seen",
    [
        (ValueError("a crash"), "a crash"),
        (KeyboardInterrupt(), None),
        (MemoryError("1 GiB"), "gptq: the memory is used up after 3 of 7 layers: 1 GiB.*memory_budget.*cache_dir"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "gptq: the memory is used up after 3 of 7"),
        (RuntimeError("shapes differ"), "shapes differ"),
    ],
    ids=["crash", "ctrl-c", "no memory", "no memory for torch", "another error"],
)
def test_no_finished_layer_is_computed_again(error, seen, tmp_path, monkeypatch):
    whole = simulated()[1]
    apply_reconstruction(whole, data(), "gptq", refit=0)  # one rounding of each layer
    _, sim = simulated()
    before = kept(sim)
    with monkeypatch.context() as patched, pytest.raises((type(error), CalibrationError), match=seen):
        Counted(patched, 4, error)
        apply_reconstruction(sim, data(), "gptq", refit=0, cache_dir=tmp_path)
    if isinstance(error, KeyboardInterrupt):
        assert sum(site.frozen for site in sim.quantizers.values()) == 3  # the best result so far
    else:
        assert same(kept(sim), before)
    counted = Counted(monkeypatch)
    _, again = simulated()
    report = apply_reconstruction(again, data(), "gptq", refit=0, cache_dir=tmp_path)
    assert counted.calls == 4 and len(report) == 7
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_layers_are_taken_only_where_all_that_they_depend_on_is_the_same(tmp_path):
    """The tensors and quantizers that no layer is: what a bias adds or an activation rounds changes what later layers read."""
    for change, files in (("nothing", 7), ("nothing", 7), ("a bias", 14), ("a quantizer", 21)):
        _, sim = simulated()
        if change == "a bias":
            next(p for name, p in sim.model.named_parameters() if name.endswith("bias")).data[0] += 1
        if change == "a quantizer":
            next(s for s in sim.quantizers.values() if s.role in ("input", "output") and s.enabled).enabled = False
        apply_reconstruction(sim, data(), "seq_mse", num_candidates=2, cache_dir=tmp_path)
        assert len(list(tmp_path.iterdir())) == files, change


def test_a_full_disk_leaves_what_is_done_in_the_cache(tmp_path, monkeypatch):
    left = iter([1 << 40] * 9)

    def usage(path):
        return type("Usage", (), {"free": next(left, 0)})()

    _, sim = simulated()
    before = kept(sim)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", usage)
        with pytest.raises(CalibrationError, match="the disk has 0 MiB left.*layers that are done are kept"):
            apply_reconstruction(
                sim, data(), "adaround", iterations=3, memory_budget=1, spill_dir=tmp_path, cache_dir=tmp_path / "done"
            )
    done = len(list((tmp_path / "done").iterdir()))
    assert 0 < done < 7 and same(kept(sim), before)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]  # no temporary files
    report = apply_reconstruction(simulated()[1], data(), "adaround", iterations=3, cache_dir=tmp_path / "done")
    assert len(report) == 7


def test_a_whole_run_stays_within_the_budget(tmp_path, monkeypatch):
    stores = []

    class Watched(Store):
        def __init__(self, *args):
            super().__init__(*args)
            stores.append(self)

    monkeypatch.setattr("bitwright.methods.rounding.driver.Store", Watched)
    batches, budget = data(4, 128), 1 << 20
    for memory_budget in (1 << 30, budget):
        _, sim = simulated()
        apply_reconstruction(sim, batches, "adaround", iterations=3, memory_budget=memory_budget, spill_dir=tmp_path)
    free, bounded = stores
    assert free.peak > 2 * budget and not free.spilled
    assert bounded.peak <= budget and bounded.spilled > budget


# --------------------------------------------------------------------------------------------------------- bad input


def test_no_data():
    with pytest.raises(CalibrationError, match="the data held no batch.*256 to 1024 samples"):
        apply_reconstruction(simulated()[1], [])


def test_few_samples_are_warned_about_once(caplog):
    with caplog.at_level(logging.WARNING, "bitwright"):
        apply_reconstruction(simulated()[1], [data()[0][:2]], "gptq")
    (text,) = [r.getMessage() for r in caplog.records if "too few samples" in r.getMessage()]
    assert "layer(s) see too few" in text and "256 to 1024 samples" in text
    assert "head (2 samples for 6 inputs per output)" in text


def test_errors_that_are_tiny_count_by_their_ratio():
    """A mean over layers whose values are all near zero says how much better they are, not how small."""
    rows = (Choice("a", None, None, 4e-40, 1e-40), Choice("b", None, None, 9.0, 1.0))  # type: ignore[arg-type]
    assert RoundingReport("gptq", rows).gain == pytest.approx(1 / 6)


def test_data_that_is_not_finite_names_the_layer():
    _, sim = simulated()
    bad = [data()[0].clone()]
    bad[0][3, 1, 2, 2] = np.nan
    with pytest.raises(CalibrationError, match="stem: its input or output .* holds NaN"):
        apply_reconstruction(sim, bad, "gptq")


@pytest.mark.parametrize(
    "call, message",
    [
        ({"method": "adarund"}, "there is no method 'adarund'.*did you mean 'adaround'"),
        ({"iteration": 3}, "adaround: there is no option 'iteration'.*did you mean 'iterations'"),
        ({"include": ["stam"]}, "include: 'stam' matches no layer.*did you mean 'stem'"),
        ({"iterations": 0}, "iterations: it is 0"),
        ({"warm_start": 1.0}, "warm_start: it is 1.0"),
        ({"method": "gptaq", "share": 2.0}, r"share: it is 2.0.*from 0 \(GPTQ\) to 1"),
    ],
)
def test_impossible_arguments(call, message):
    with pytest.raises(ConfigError, match=message):
        apply_reconstruction(simulated()[1], data(), **call)


@pytest.mark.parametrize("method", ["autoround", "gptq"])
def test_layers_that_hold_codes_are_refused(method):
    weight = torch.randn(8, 16)
    packed = PackedWeight.nearest("0.weight", weight, weight_spec("int4", PerChannel(0)))
    model = nn.Sequential(CodedLinear(StoredWeight(packed, torch.float32), None), nn.Linear(8, 4)).eval()
    x = torch.randn(4, 16)
    sim = QuantizationSimModel(model, x, preset="w4")
    with pytest.raises(ConfigError, match=f"{method}: 1 layer with codes instead of float weights, 0 first"):
        apply_reconstruction(sim, [x], method)
    with pytest.raises(ConfigError, match="learn_scales: 1 layer with codes instead of float weights, 0 first"):
        learn_scales(sim, [x])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8, 1))
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.middle(self.embedding(tokens))
        return self.out(F.linear(x, self.middle.weight * self.scale))


def test_layers_that_cannot_be_treated_are_listed(caplog):
    tokens = torch.arange(24).reshape(4, 6) % 12
    sim = calibrated(QuantizationSimModel(Tied(), tokens, preset="w4"), [tokens])
    report = apply_reconstruction(sim, [tokens], "gptq")
    assert report.skipped["embedding"] == "Embedding is not a matrix product of its input"
    assert report.skipped["out"] == "its weight is also read by embedding, which would change with it"
    assert "is also read by" in report.skipped["middle"]
    assert "embedding: nearest rounding, Embedding" in str(report)
    assert "left" in caplog.text or "no layer to work on" in caplog.text


def test_excluded_layers_are_listed_as_such():
    _, sim = simulated()
    report = apply_reconstruction(sim, data(), "gptq", exclude=["blocks.*"])
    assert [row.layer for row in report] == ["stem", "up", "head"]
    assert report.skipped["blocks.0.a"] == "excluded"
    assert not sim.quantizers["blocks.0.a.weight"].frozen


def test_recurrent_layers_are_two_products(tmp_path):
    torch.manual_seed(0)
    model = nn.LSTM(6, 8, batch_first=True)
    batches = list(torch.randn(4, 8, 12, 6))
    sim = calibrated(QuantizationSimModel(model, batches[0], preset="w4a16"), batches)
    held = torch.randn(16, 12, 6)
    expected = model(held)[0]
    before = (sim.model(held)[0] - expected).square().mean()
    report = apply_reconstruction(sim, batches, "gptq", cache_dir=tmp_path)
    assert [row.layer for row in report] == ["weight_ih_l0", "weight_hh_l0"] and report.gain < 0.9
    assert (sim.model(held)[0] - expected).square().mean() < before


# -------------------------------------------------------------------------------------------------------------- cost


def test_cost_is_linear_in_depth():
    def cost(depth: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth)))
        batches = [torch.randn(8, 3)]
        sim = calibrated(QuantizationSimModel(model, batches[0], preset="w4a8"), batches)
        return steps(lambda: apply_reconstruction(sim, batches, "gptq", progress=False))

    assert cost(40) < 2.3 * cost(20)


def test_what_is_held_in_memory_is_bounded_without_a_word(monkeypatch):
    from bitwright.methods.rounding import driver as rounding

    given = []
    real = rounding.Store
    monkeypatch.setattr(rounding, "Store", lambda *arguments: given.append(arguments) or real(*arguments))
    model, batches = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), [torch.randn(32, 4)]
    sim = calibrated(QuantizationSimModel(model, batches[0], preset="w4a8"), batches)
    apply_reconstruction(sim, batches, "gptq")
    apply_reconstruction(sim, batches, "gptq", memory_budget=100)
    assert given == [(rounding.MEMORY_BUDGET, None), (100, None)]


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.8])
def test_qdrop_leaves_as_many_values_in_float_as_asked_for(drop):
    """Of activations; weights are always quantized."""
    problem = object.__new__(BlockProblem)
    sites = {name: SimpleNamespace(role=name) for name in ("input", "output", "weight")}
    model = SimpleNamespace(quantize=lambda site, x: x + 1, sites=lambda: sites)
    problem.walk, problem.drop, problem.silent = SimpleNamespace(model=model), drop, frozenset()
    problem.generator = torch.Generator().manual_seed(0)
    x = torch.zeros(100, 1000)
    for site in ("input", "output"):
        assert float((problem._dropping(site, x) == 0).float().mean()) == pytest.approx(drop, abs=0.01)
    assert bool((problem._dropping("weight", x) == 1).all())


def test_the_learning_rate_falls_by_factors_that_compound():
    """Under a gradient that stays the same a step of Adam is as long as its learning rate."""
    place = torch.zeros(1, requires_grad=True)
    rounding = SimpleNamespace(
        parameters=lambda: [{"params": [place], "factor": 0.5}], soft=lambda weight=0.0, beta=2.0: place
    )
    problem = SimpleNamespace(size=1, batch=1, loss=lambda index, weights: weights[0].sum())
    count = optimise(problem, [rounding], Settings(iterations=400), 0.01, 1.0, torch.Generator())
    assert count == 400
    assert place.item() == pytest.approx(-0.01 * 0.5 * np.cumprod(1 - np.arange(400) / 400).sum(), rel=1e-3)


@pytest.mark.parametrize(("rows", "read"), [(16, 2), (200, 4), (None, 5)])
def test_batches_are_read_until_every_layer_has_twice_the_rows_that_are_drawn(rows, read):
    """1,024 positions a batch: at least 1,024 rows are drawn of a layer, or 200 for each of 9 inputs of one output."""
    batches, seen = [torch.randn(4, 1, 16, 16) for _ in range(5)], []
    model = nn.Conv2d(1, 4, 3, padding=1)
    sim = QuantizationSimModel(model.eval(), batches[0], preset="w8")

    def noted():
        for batch in batches:
            seen.append(batch)
            yield batch

    sim.compute_encodings(batches)
    apply_reconstruction(sim, noted(), "gptq", rows_per_input=rows, progress=False)
    assert len(seen) == read
