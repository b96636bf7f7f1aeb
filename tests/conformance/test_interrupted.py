"""Ctrl-C, a killed process, a full disk, a failure halfway: the model and its files are as before the call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.methods.rounding import gptq
from bitwright.onnx import QuantizationSimModel, apply_bias_correction, apply_gptq
from tests.conformance.test_ptq import X, exported, run, small
from tests.methods.transformer import Decoder, tokens
from tests.onnx.nets import Net
from tests.support.processes import python

TOKENS = tokens(8)


class Interrupted:
    """A progress bar that is interrupted at its ``at``-th item, whatever it counts."""

    def __init__(self, at: int) -> None:
        self.left, self.titles = at, []

    def __call__(self, items: Iterable[Any], title: str, enabled: bool = True) -> Iterator[Any]:
        self.titles.append(title)
        for item in items:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield item


def folded() -> nn.Module:
    model = small()
    bt.fold_all_batch_norms(model, dummy_input=X[:2])
    return model


# name -> the model, its input, the call on a module and on an ONNX model
Call = Callable[[Any, Any], Any]
CALLS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, Call, Call]] = {
    "fold": (small, X, lambda m, x: bt.fold_all_batch_norms(m, dummy_input=x),
             lambda m, x: bo.fold_all_batch_norms(m, x)),
    "equalize": (folded, X, lambda m, x: bt.equalize_model(m, dummy_input=x),
                 lambda m, x: bo.equalize_model(m, x)),
    "norms": (Decoder, TOKENS, lambda m, x: bt.fold_norms(m, dummy_input=x), lambda m, x: bo.fold_norms(m, x)),
    "smooth": (Decoder, TOKENS, lambda m, x: bt.smooth_model(m, [x, x]), lambda m, x: bo.smooth_model(m, [x, x])),
    "awq": (Decoder, TOKENS, lambda m, x: bt.awq_model(m, [x, x], weight="w4"),
            lambda m, x: bo.awq_model(m, [x, x], weight="w4")),
    "transform": (Decoder, TOKENS, lambda m, x: bt.transform_model(m, [x, x], shared=True),
                  lambda m, x: bo.transform_model(m, [x, x], shared=True)),
    "rotate": (Decoder, TOKENS, lambda m, x: bt.rotate_model(m, dummy_input=x), lambda m, x: bo.rotate_model(m, x)),
}  # fmt: skip


# modules that show a progress bar
BARS = (
    "methods.folding.norm_fold",
    *(f"methods.scaling.{name}" for name in ("equalize", "smooth", "awq", "rotate", "transform")),
)


@pytest.fixture(scope="module")
def as_onnx() -> dict[Any, onnx.ModelProto]:
    models = {small: small(), folded: folded(), Decoder: Decoder()}
    return {make: exported(m, X[:2] if make is not Decoder else TOKENS) for make, m in models.items()}


def interruptions(
    monkeypatch: pytest.MonkeyPatch, front_end: str, call: Callable[[], Any], check: Callable[[], None]
) -> list[str]:
    """Interrupt ``call`` at one item after the other until it gets through; the titles of its bars."""
    for at in range(200):
        bar = Interrupted(at)
        for part in (*BARS, f"{front_end}.opened"):
            monkeypatch.setattr(f"bitwright.{part}.progress_bar", bar)
        try:
            call()
        except KeyboardInterrupt:
            check()
        else:
            assert at > 0, "the method shows no bar"
            return bar.titles
    raise AssertionError("it never gets through")


@pytest.mark.parametrize("name", CALLS)
def test_a_module_is_as_it_was(name, monkeypatch):
    make, x, call, _ = CALLS[name]
    model = make()
    state, modules, before = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()], model(x)

    def check() -> None:
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert [type(m) for m in model.modules()] == modules and torch.equal(model(x), before)

    assert interruptions(monkeypatch, "torch", lambda: call(model, x), check)
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CALLS)
def test_an_onnx_model_is_as_it_was(name, monkeypatch, as_onnx):
    make, x, _, call = CALLS[name]
    model = copy.deepcopy(as_onnx[make])
    before, reference = model.SerializeToString(), run(model, x)

    def check() -> None:
        assert model.SerializeToString() == before

    assert interruptions(monkeypatch, "onnx", lambda: call(model, x.numpy()), check)
    torch.testing.assert_close(run(model, x), reference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["equalize", "rotate"])
def test_a_loaded_model_that_is_changed_in_place_computes_the_same(name, monkeypatch, as_onnx):
    make, x, _, call = CALLS[name]
    loaded = bo.load_model(as_onnx[make])
    reference = run(as_onnx[make], x)

    def check() -> None:
        torch.testing.assert_close(run(ir.to_proto(loaded.model), x), reference, rtol=1e-4, atol=1e-4)

    assert interruptions(monkeypatch, "onnx", lambda: call(loaded, x.numpy()), check)


def test_a_simulation_whose_biases_were_being_corrected_is_as_it_was(monkeypatch, as_onnx):
    sim, other = (bt.QuantizationSimModel(folded(), X[:2]), bo.QuantizationSimModel(as_onnx[folded], X[:2].numpy()))
    batches = X.split(32)
    sim.compute_encodings(batches, progress=False)
    other.compute_encodings([x.numpy() for x in batches], progress=False)
    before, theirs = sim.model(X), other.run(X.numpy())[0]
    for at in range(3):
        monkeypatch.setattr("bitwright.methods.bias_correction.progress_bar", Interrupted(at))
        with pytest.raises(KeyboardInterrupt):
            bt.apply_bias_correction(sim, batches)
        with pytest.raises(KeyboardInterrupt):
            bo.apply_bias_correction(other, [x.numpy() for x in batches])
    assert torch.equal(sim.model(X), before) and (other.run(X.numpy())[0] == theirs).all()


@pytest.mark.slow
def test_an_export_that_is_stopped_anywhere_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """Killed or interrupted before every change of a file; whoever reads first: verify, show, load_encodings."""
    ran = python("-m", "tests.onnx.stopped_export", tmp_path)
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert [stop for stop, *_ in lines] == ["kill", "interrupt"]
    for _, *outcomes in lines:
        switch = outcomes.index("new")
        assert switch > 8 and len(outcomes) - switch > 8
        assert set(outcomes[:switch]) == {"old"} and set(outcomes[switch:]) == {"new"}


@pytest.mark.parametrize("limit", [500, 9000])
def test_a_full_temporary_folder_is_named(tmp_path: Path, limit: int) -> None:
    """The limit on file sizes stands for a full disk: ONNX Runtime writes its optimised model into a temporary folder."""
    code = f"""
import resource
import bitwright.onnx as bo
from bitwright.errors import ExportError
from tests.onnx.nets import conv_chain, feeds_for
model = conv_chain(3, 16)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    bo.quantize(model, [feeds_for(model)], recipe=["fold"], path={str(tmp_path / "out")!r})
except ExportError as error:
    print(error)
"""
    ran = python("-c", code, check=False)
    assert "the temporary folder has no room for" in ran.stdout and "in TMPDIR" in ran.stdout, ran.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_temporary_folder_is_named_by_what_writes_there_itself() -> None:
    """Weights of a large model are spilled; one whose tensors lie in another file is opened and verified through a file."""
    code = """
import resource
import numpy as np
import onnx
import onnx_ir as ir
import bitwright.onnx as bo
from onnx import helper
from bitwright.errors import ExportError
from bitwright.compare import runtime
from bitwright.onnx.model.session import open_session
w = onnx.numpy_helper.from_array(np.eye(1100, dtype=np.float32), "w")
values = [helper.make_tensor_value_info(name, 1, [2, 1100]) for name in ("x", "y")]
graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [w])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
x = np.ones((2, 1100), np.float32)
sim = bo.QuantizationSimModel(model, x, threads=1)
loaded = ir.from_proto(model)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
for what in (
    lambda: sim.compute_encodings([x], progress=False),
    lambda: open_session(loaded),
    lambda: runtime.optimized_types(loaded),
):
    try:
        what()
    except ExportError as error:
        print(error)
"""
    ran = python("-c", code, check=False)
    assert ran.stdout.count("the temporary folder has no room for what is to be written") == 3, ran.stderr + ran.stdout
    assert "in TMPDIR" in ran.stdout


def network():
    """Three layers, the weight of the second one computed by the model."""
    net = Net()
    y = net("Relu", net("Gemm", net.input("x", ("n", 8)), net.weights(8, 8, name="a"), transB=1, name="first"))
    turned = net("Transpose", net.weights(8, 8, name="b"), perm=[1, 0])
    y = net("Relu", net("MatMul", y, turned, name="second"))
    return net.model(net("Gemm", y, net.weights(4, 8, name="c"), net.weights(4), transB=1, name="third", out="y"))


def batches():
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((16, 8)).astype(np.float32)} for _ in range(3)]


def calibrated():
    sim = QuantizationSimModel(network(), batches()[0])
    sim.compute_encodings(batches())
    return sim


def state(sim):
    sites = {s.name: (s.encoding, s.frozen, s.enabled) for s in sim.quantizers.values()}
    return sites, sim.run(batches()[0])[0]


@pytest.mark.parametrize("at", (2, 3))
def test_gptq_that_fails_at_a_later_layer(at, monkeypatch):
    sim, original, calls = calibrated(), gptq.round_columns, []
    before = state(sim)

    def fails(*args):
        calls.append(1)
        if len(calls) == at:
            raise torch.linalg.LinAlgError("the matrix is singular")
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(gptq, "round_columns", fails)
        with pytest.raises(torch.linalg.LinAlgError):
            apply_gptq(sim, batches(), progress=False)
    after = state(sim)
    assert after[0] == before[0] and np.array_equal(after[1], before[1])
    apply_gptq(sim, batches(), progress=False)
    assert sum(s.frozen for s in sim.quantizers.values()) == 3


def test_bias_correction_whose_data_fail():
    net = Net()
    y = net.input("x", ("n", 8))
    for name in ("first", "second"):
        weight, bias = net.weights(8, 8, name=f"{name}.weight"), net.weights(8, name=f"{name}.bias")
        y = net("Relu", net("Gemm", y, weight, bias, transB=1, name=name))
    sim = QuantizationSimModel(net.model(y), batches()[0], preset="w4a8")
    sim.compute_encodings(batches())
    before = state(sim)
    moments = {"first": (np.zeros(8), np.ones(8))}

    def data():
        yield batches()[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        apply_bias_correction(sim, data(), moments=moments, progress=False)
    after = state(sim)
    assert after[0] == before[0] and np.array_equal(after[1], before[1])
    report = apply_bias_correction(sim, batches(), moments=moments, progress=False)
    assert report.analytic == {"second"}  # the layer that is corrected before any data are read
