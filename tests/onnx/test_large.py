"""Models above ``IN_MEMORY`` are never held whole, and compute what small ones compute, bit for bit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bitwright.onnx import QuantizationSimModel, quantsim, session, simulate
from tests.onnx.nets import Net, feeds_for


def stack(layers: int = 6, size: int = 32) -> onnx.ModelProto:
    n = Net(3)
    x = n.input("x", ("n", size))
    for i in range(layers):
        x = n(
            "Relu", n("MatMul", x, n.weights(size, size, name=f"w{i}", scale=0.2), name=f"m{i}"), name=f"r{i}"
        )
    return n.model(x, opset=21)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 8 KiB of weights be a large model."""
    for module in (session, simulate, quantsim):
        monkeypatch.setattr(module, "IN_MEMORY", 8 << 10)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


DATA = [feeds_for(stack(), seed, n=3) for seed in range(3)]


def outcome(folder: Path, scheme: str, budget: int) -> Any:
    folder.mkdir()
    onnx.save(stack(), folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    sim = QuantizationSimModel(folder / "m.onnx", DATA[0], scheme, threads=1, memory_budget=budget)
    sim.compute_encodings(DATA, progress=False)
    exported = sim.export(folder, "out")
    encodings = {name: site.encoding for name, site in sim.quantizers.items()}
    return encodings, sim.run(DATA[0]), exported


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
def test_large_models_give_the_same_encodings_outputs_and_files(tmp_path, monkeypatch, scheme):
    small = outcome(tmp_path / "small", scheme, 2000)
    shrink(monkeypatch)
    large = outcome(tmp_path / "large", scheme, 2000)
    assert large[0] == small[0]
    assert all(np.array_equal(a, b) for a, b in zip(large[1], small[1], strict=True))
    for name in ("qdq", "float_model", "encodings", "sites"):
        assert getattr(large[2], name).read_bytes() == getattr(small[2], name).read_bytes(), name


def test_simulated_weights_exist_one_at_a_time(small_memory, monkeypatch):
    alive: list[Any] = []
    most = 0
    fold = simulate._folded

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal most
        array = fold(*args, **options)
        alive.append(weakref.ref(array))
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        return array

    monkeypatch.setattr(simulate, "_folded", counted)
    sim = QuantizationSimModel(stack(), DATA[0], "percentile", threads=1, memory_budget=0)
    sim.compute_encodings(DATA, progress=False)
    sim.run(DATA[0])
    assert len(alive) == 2 * 6, (
        "once for calibration and once for the simulation, however many sessions share them"
    )
    assert most <= 2


def test_files_of_large_models_go_with_the_simulation(small_memory, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sim = QuantizationSimModel(stack(), DATA[0], threads=1)
    sim.compute_encodings(DATA, progress=False)
    first = sim.run(DATA[0])
    gc.collect()
    assert not list(tmp_path.iterdir()), "the session has what it needs"
    assert np.array_equal(sim.run(DATA[0])[0], first[0])
