"""Ctrl-C at any point of an analytic method leaves the model as it was before the call, and a bar shows how far it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import bitwright.onnx as bo
import bitwright.torch as bt
from tests.conformance.test_ptq import X, exported, run, small
from tests.methods.transformer import Decoder, tokens

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
    "rotate": (Decoder, TOKENS, lambda m, x: bt.rotate_model(m, dummy_input=x), lambda m, x: bo.rotate_model(m, x)),
}  # fmt: skip


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
        for part in ("methods.functions", f"{front_end}.opened"):
            monkeypatch.setattr(f"bitwright.{part}.bar", bar)
        try:
            call()
        except KeyboardInterrupt:
            check()
        else:
            assert at > 0, "the method shows no bar"
            return bar.titles
    raise AssertionError("it never gets through")


@pytest.mark.slow_variants("equalize", "awq")
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


@pytest.mark.quick_variants("norms")
@pytest.mark.parametrize("name", CALLS)
def test_an_onnx_model_is_as_it_was(name, monkeypatch, as_onnx):
    make, x, _, call = CALLS[name]
    model = copy.deepcopy(as_onnx[make])
    before, reference = model.SerializeToString(), run(model, x)

    def check() -> None:
        assert model.SerializeToString() == before

    assert interruptions(monkeypatch, "onnx", lambda: call(model, x.numpy()), check)
    torch.testing.assert_close(run(model, x), reference, rtol=1e-3, atol=1e-3)


@pytest.mark.quick_variants("equalize")
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
        monkeypatch.setattr("bitwright.methods.functions.bar", Interrupted(at))
        with pytest.raises(KeyboardInterrupt):
            bt.apply_bias_correction(sim, batches)
        with pytest.raises(KeyboardInterrupt):
            bo.apply_bias_correction(other, [x.numpy() for x in batches])
    assert torch.equal(sim.model(X), before) and (other.run(X.numpy())[0] == theirs).all()
