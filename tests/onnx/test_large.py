"""Models above ``IN_MEMORY`` are never held whole, and compute what small ones compute, bit for bit."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bitwright import quantize
from bitwright.analysis.analyze import analyze
from bitwright.errors import ModelError
from bitwright.export.files import onnx_file
from bitwright.export.files.atomic import FinishedLayers
from bitwright.export.files.onnx_file import let_go
from bitwright.methods.rounding.apply import apply_reconstruction
from bitwright.onnx import QuantizationSimModel, apply_bias_correction, fold_all_batch_norms, load_model, opened
from bitwright.onnx.model import load, session
from bitwright.onnx.model.session import weight_bytes
from bitwright.onnx.program import OnnxSimulation
from bitwright.onnx.simulation import marked_model as simulate
from bitwright.recipes.widen import widen
from tests.onnx.nets import Net, feeds_for
from tests.support.simulations import calibrated


def stack(layers: int = 6, size: int = 32) -> onnx.ModelProto:
    n = Net(3)
    x = n.input("x", ("n", size))
    for i in range(layers):
        x = n("Relu", n("MatMul", x, n.weights(size, size, name=f"w{i}", scale=0.2), name=f"m{i}"), name=f"r{i}")
    return n.model(x, opset=21)


def convolutions(layers: int = 6, width: int = 16) -> onnx.ModelProto:
    """On a CPU with vector units these run on channels in blocks."""
    n = Net(3)
    x = n.input("x", ("n", width, 8, 8))
    for i in range(layers):
        x = n("Relu", n.conv(x, width, width, name=f"c{i}", pads=[1] * 4), name=f"r{i}")
    return n.model(n("GlobalAveragePool", x, name="pool"), opset=21)


MODELS = {"products": stack, "convolutions": convolutions}


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 8 KiB of weights be a large model."""
    monkeypatch.setattr(session, "IN_MEMORY", 8 << 10)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


DATA = [feeds_for(stack(), seed, n=3) for seed in range(3)]


def outcome(folder: Path, model: onnx.ModelProto, scheme: str, budget: int) -> Any:
    folder.mkdir()
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    data = [feeds_for(model, seed, n=3) for seed in range(3)]
    sim = calibrated(QuantizationSimModel(folder / "m.onnx", data[0], scheme, threads=1, memory_budget=budget), data)
    exported = sim.export(folder, "out")
    encodings = {name: site.encoding for name, site in sim.quantizers.items()}
    return encodings, sim.run(data[0]), exported


@pytest.mark.parametrize("scheme", ["min_max", "percentile"])
@pytest.mark.parametrize("name, budget", [("products", 2000), ("convolutions", 30_000)])
def test_large_models_give_the_same_encodings_outputs_and_files(tmp_path, monkeypatch, scheme, name, budget):
    small = outcome(tmp_path / "small", MODELS[name](), scheme, budget)
    shrink(monkeypatch)
    large = outcome(tmp_path / "large", MODELS[name](), scheme, budget)
    assert large[0] == small[0]
    assert all(np.array_equal(a, b) for a, b in zip(large[1], small[1], strict=True))
    for name in ("qdq", "float_model", "encodings", "sites"):
        assert getattr(large[2], name).read_bytes() == getattr(small[2], name).read_bytes(), name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("large", [False, True])
def test_no_message_holds_the_weights_of_a_large_model(tmp_path, monkeypatch, name, large):
    import onnxruntime as ort

    given: list[Any] = []
    session_class = ort.InferenceSession

    def opened(source: Any, *args: Any, **options: Any) -> Any:
        given.append(len(source) if isinstance(source, bytes) else Path(source).stat().st_size)
        return session_class(source, *args, **options)

    if large:
        shrink(monkeypatch)
    model, files = MODELS[name](), tmp_path / "temporary"
    files.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(files))
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    data = [feeds_for(model, 0, n=3)]
    monkeypatch.setattr(ort, "InferenceSession", opened)
    sim = calibrated(QuantizationSimModel(model, data[0], "percentile", threads=1, memory_budget=500), data)
    sim.run(data[0])
    assert len(given) > 4
    assert (max(given) > weights) is not large, "weights go into a second file, which is mapped into memory"
    del sim
    gc.collect()
    assert not list(files.iterdir())


def test_simulated_weights_exist_one_at_a_time(small_memory, monkeypatch):
    alive: list[Any] = []
    most = 0
    fold = simulate.folded_constant

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal most
        array = fold(*args, **options)
        alive.append(weakref.ref(array))
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        return array

    monkeypatch.setattr(simulate, "folded_constant", counted)
    sim = calibrated(QuantizationSimModel(stack(), DATA[0], "percentile", threads=1, memory_budget=0), DATA)
    sim.run(DATA[0])
    sim.capture(list(sim.quantizers), DATA[0])
    assert len(alive) == 6, "once, however many sessions share them"
    assert most <= 2


def test_files_of_large_models_go_with_the_simulation(small_memory, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sim = QuantizationSimModel(stack(), DATA[0], threads=1)
    for _ in range(5):
        sim.compute_encodings(DATA, progress=False)
        sim.run(DATA[0])
        sim.set_parameter("w0", sim.constants["w0"] * 0.9)
    gc.collect()
    sizes = sorted(file.stat().st_size for folder in tmp_path.iterdir() for file in folder.iterdir())
    assert sizes[0] == 5 * sim.constants["w0"].nbytes, "the replaced weights have a file of their own"
    assert sizes[1] <= 3 * weight_bytes(sim.marked) and len(sizes) == 2
    simulation = sim.simulation()
    del sim
    gc.collect()
    assert list(tmp_path.iterdir()), "a session of it can still be opened"
    del simulation
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "use",
    [
        lambda sim: widen(OnnxSimulation(sim), DATA),
        lambda sim: sim._name_nan(DATA[0]),
        lambda sim: analyze(sim, DATA),
        lambda sim: QuantizationSimModel(sim.simulation().model, DATA[0]).compute_encodings(DATA, progress=False),
        lambda sim: session.open_session(sim.simulation().model).run(None, DATA[0]),
    ],
    ids=["widen", "NaN", "analyze", "simulation of it", "session"],
)
def test_a_model_of_a_large_simulation_has_its_weights_as_long_as_it_lives(small_memory, use):
    sim = calibrated(QuantizationSimModel(stack(), DATA[0], threads=1), DATA)
    use(sim)


def test_bias_correction_of_a_large_model_and_of_one_without_biases(small_memory):
    model = convolutions()
    data = [feeds_for(model, 0, n=3)]
    sim = calibrated(QuantizationSimModel(model, data[0], threads=1), data)
    assert len(apply_bias_correction(sim, data, progress=False).corrected) == 6
    sim = calibrated(QuantizationSimModel(stack(), DATA[0], threads=1), DATA)
    report = apply_bias_correction(sim, DATA, progress=False)
    assert not report.corrected and len(report.refused) == 6


def test_methods_choose_the_same_weights_in_files(tmp_path, monkeypatch):
    """Copies of the weights, the chosen ones and what undoes them are mapped from files."""
    chosen = []
    for folder in ("small", "large"):
        (tmp_path / folder).mkdir()
        sim = QuantizationSimModel(stack(), DATA[0], default_param_bw=4, threads=1)
        report = apply_reconstruction(sim, DATA, "gptq", memory_budget=0, progress=False)
        weights = [sim.constants[f"w{i}"] for i in range(6)]
        chosen.append(([array.copy() for array in weights], [row.after for row in report]))
        files = {file.name for place in (tmp_path / "large").glob("*") for file in place.iterdir()}
        assert len(files) == (folder == "large"), "of replaced weights, as long as the simulation lives"
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "large"))
        shrink(monkeypatch)
        monkeypatch.setattr("bitwright.onnx.program._HELD", 0)
    assert chosen[0][1] == chosen[1][1]
    assert all(np.array_equal(one, other) for one, other in zip(chosen[0][0], chosen[1][0], strict=True))


def test_a_replaced_weight_is_quantized_anew(small_memory):
    sim = calibrated(QuantizationSimModel(stack(), DATA[0], threads=1), DATA)
    before = sim.run(DATA[0])[0]
    weight = sim.constants["w0"]
    sim.set_parameter("w0", weight * 0.5)
    assert not np.array_equal(sim.run(DATA[0])[0], before)
    sim.set_parameter("w0", weight)
    assert np.array_equal(sim.run(DATA[0])[0], before)


def test_sessions_read_external_weights_where_they_lie(tmp_path, monkeypatch):
    """No copy of the weights is written for the float model of a file with external data."""
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "m.onnx"
    onnx.save(stack(), path, save_as_external_data=True, location="m.data", size_threshold=0)
    (expected,) = session.open_session(load_model(stack()).model, threads=1).run(None, DATA[0])
    shrink(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    (found,) = session.open_session(load_model(path).model, threads=1).run(None, DATA[0])
    assert np.array_equal(found, expected)


def test_weights_that_fill_the_memory_stay_in_their_files(tmp_path, monkeypatch):
    asked: list[str] = []
    new_session = session.new_session

    def noted(source: Any, options: Any, *args: Any, **more: Any) -> Any:
        asked.append(options.get_session_config_entry("session.disable_prepacking"))
        return new_session(source, options, *args, **more)

    shrink(monkeypatch)
    onnx.save(stack(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    model = load_model(tmp_path / "m.onnx").model
    (expected,) = session.open_session(model, threads=1).run(None, DATA[0])
    monkeypatch.setattr(session, "new_session", noted)
    monkeypatch.setattr(session, "free_memory", lambda: 2 * weight_bytes(model) - 1)
    (found,) = session.open_session(model, threads=1).run(None, DATA[0])
    assert asked == ["1"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_result_that_does_not_fit_into_the_memory_is_refused_by_its_node(monkeypatch):
    n = Net(3)
    filled = n("ConstantOfShape", n.const(np.int64([1 << 14, 1 << 10])), name="fill", out="filled")
    x = n("MatMul", n("Mul", n.input("x", (1, 1)), filled), n.weights(1 << 10, 4))
    model = n.model(n("ReduceMax", x, keepdims=0), opset=17)
    size = 1 << 26
    monkeypatch.setattr(onnx_file, "free_memory", lambda: 2 * size)
    session.open_session(load_model(model).model, threads=1)
    monkeypatch.setattr(onnx_file, "free_memory", lambda: 2 * size - 1)
    message = r"\((ConstantOfShape|Mul)\): its result '.*' of shape \[16384, 1024\] takes 0\.1 GiB, a simulation holds it twice"
    with pytest.raises(ModelError, match=message) as caught:
        quantize(model, [{"x": np.ones((1, 1), np.float32)}], recipe=["fold"], progress=False)
    assert "use a machine with more memory" in caught.value.remedy


def test_a_model_without_batch_norms_is_not_run_to_fold_them(monkeypatch):
    monkeypatch.setattr(opened, "open_session", None)
    monkeypatch.setattr(opened, "measure_shapes", None)
    assert not fold_all_batch_norms(stack(), DATA[0], progress=False)


def test_what_was_read_of_a_mapped_file_is_let_go_of_and_nothing_else(tmp_path):
    path = tmp_path / "data"
    np.arange(4096, dtype=np.float32).tofile(path)
    own = np.memmap(path, np.float32, "c")
    own[:] = 7
    let_go(ir.Tensor(own[5:]))
    assert (own == 7).all(), "what was written into a private mapping stays"
    read = np.memmap(path, np.float32, "r")
    let_go(read[3:])
    assert np.array_equal(read, np.arange(4096))


def test_weights_inside_a_large_file_take_no_memory_while_nobody_reads_them(tmp_path, monkeypatch):
    """They come from a private copy: whoever writes the file anew changes nothing."""
    monkeypatch.setattr(load, "_HELD", 8 << 10)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    n = Net(0)
    kinds = (np.float32, np.float16, np.int64, ml_dtypes.bfloat16)
    arrays = {kind.__name__: np.arange(1025).reshape(5, 205).astype(kind) for kind in kinds}
    x = n.input("x", ("n", 3))
    model = n.model(n("Relu", x, name="y"), opset=21)
    model.graph.initializer.extend(ir.to_proto(ir.Tensor(array, name=name)) for name, array in arrays.items())
    onnx.save(model, tmp_path / "m.onnx")
    loaded = load_model(tmp_path / "m.onnx").model
    (tmp_path / "m.onnx").write_bytes(bytes((tmp_path / "m.onnx").stat().st_size))
    for name, array in arrays.items():
        tensor = loaded.graph.initializers[name].const_value
        base = tensor.numpy()
        assert base.dtype == array.dtype and np.array_equal(base, array)
        while not isinstance(base, mmap.mmap):
            base = base.obj if isinstance(base, memoryview) else base.base
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def by_layers(folder: Path, out: str, monkeypatch: pytest.MonkeyPatch, *, kill: int = 0, factor: float = 1) -> int:
    """Quantize a large file with external data layer by layer; the layers that were not taken from the work folder.

    Args:
        folder: of the file and the work folder.
        out: name of the folder of the result.
        kill: end the process when so many layers have been finished.
        factor: of the data.
    """
    count, put = 0, FinishedLayers.put

    def counted(self: FinishedLayers, key: str, arrays: Any) -> None:
        nonlocal count
        put(self, key, arrays)
        count += 1
        if count == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        shrink(patched)
        patched.setattr(FinishedLayers, "put", counted)
        data = [{"x": factor * feeds_for(stack(), seed, n=3)["x"]} for seed in range(3)]
        recipe: list[Any] = [{"seq_mse": {"num_candidates": 3}}, {"gptq": {"refit": 0}}]
        options = {"path": folder / out, "work_dir": folder / "work", "samples": False, "measure_speed": False}
        quantize(folder / "m.onnx", data, "w4g32", recipe=recipe, progress=False, **options)
    return count


@pytest.mark.slow  # a process of its own is killed
def test_a_killed_run_goes_on_and_writes_the_same_files(tmp_path, monkeypatch, caplog):
    onnx.save(stack(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert by_layers(tmp_path, "whole", monkeypatch) == 12
    call = "from tests.onnx.test_large import *; by_layers(Path(sys.argv[1]), 'again', pytest.MonkeyPatch(), kill=8)"
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", call, str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (tmp_path / "again").exists()
    kept = {path.parent.name: path for path in (tmp_path / "work").glob("*/*")}
    assert sorted(kept) == ["01-seq_mse", "02-gptq"]
    damaged = kept["02-gptq"]
    damaged.write_bytes(damaged.read_bytes()[:-5])
    assert by_layers(tmp_path, "again", monkeypatch) == 12 - 8 + 1
    assert f"{damaged}: it is damaged" in caplog.text and "starting anew" not in caplog.text
    assert not (tmp_path / "work").exists()
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
