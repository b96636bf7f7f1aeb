"""Whole sequences in compiled loops, gates side by side: results, statistics and gradients of single steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from bitwright.core.compiled.loops import loops
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec
from bitwright.torch import QuantizationSimModel
from bitwright.torch.calls import recurrent as calls
from bitwright.torch.quantizers import learned_range
from bitwright.torch.quantizers import sequences as stacked_steps
from bitwright.torch.quantizers.sequences import NAMES, Keep, StepFunctions
from tests.support.simulations import calibrated

X = torch.randn(7, 3, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_steps, "_LEAST", 0)


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(StepFunctions, "sequence", lambda *_: None)


def lstm(**more: object) -> nn.LSTM:
    torch.manual_seed(1)
    return nn.LSTM(6, 10, **more)


def simulated(model: nn.Module, x: Tensor = X) -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(model, x), [x, 2 * x])


@pytest.mark.parametrize("scheme", ["minmax", "percentile"])
@pytest.mark.parametrize("on", ["*", "*.gate"], ids=["default", "gates"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
def test_statistics_are_those_of_single_steps(scheme, on, bidirectional, in_steps):
    def statistics() -> list[object]:
        sim = QuantizationSimModel(lstm(bidirectional=bidirectional), X, quant_scheme=scheme)
        for site in sim.quantizers["*.gate"]:  # by themselves they have a fixed range, which needs no data
            if on == "*.gate":
                site.spec = QuantSpec(IntFormat(8, signed=False), symmetry="asymmetric", method=site.spec.method)
        sim.compute_encodings([X, 2 * X], progress=False)
        return [quantizer.statistics for quantizer in sim.quantizers.unique()]

    fast = statistics()
    in_steps()
    assert fast == statistics()
    assert sum(found is not None for found in fast) >= (1 + bidirectional) * (6 if on == "*" else len(NAMES))


@pytest.mark.parametrize("scheme", ["minmax", "percentile"])
@pytest.mark.parametrize("hidden", [10, 16, 24, 32, 33])
def test_results_are_those_of_single_steps_while_it_is_observed(scheme, hidden, in_steps):
    x = torch.randn(30, 8, 6, generator=torch.Generator().manual_seed(2))

    def results() -> list[Tensor]:
        torch.manual_seed(1)
        sim = QuantizationSimModel(nn.LSTM(6, hidden, bidirectional=True), x, quant_scheme=scheme)
        with sim.calibrating() as model:
            y, (h, c) = model(x)
        return [y, h, c]

    fast = results()
    in_steps()
    assert all(torch.equal(one, other) for one, other in zip(fast, results(), strict=True))


@pytest.mark.parametrize("kind", ["constant", "nan", "inf", "halves"])
def test_what_is_seen_of_channels_and_of_odd_values(kind: str, in_steps: Callable[[], None]) -> None:
    def seen() -> list[object]:
        model, x = lstm(), X.clone()
        with torch.no_grad():
            if kind == "constant":  # of the cell and the hidden state of three units nothing moves, one of them at -0.0
                for weight in (model.weight_ih_l0, model.weight_hh_l0, model.bias_ih_l0, model.bias_hh_l0):
                    weight.view(4, 10, -1)[:, [2, 5, 7]] = 0.0
                model.bias_ih_l0[2], model.bias_ih_l0[22] = -0.0, -0.0
        batches = [x, 2 * x]
        if kind in ("nan", "inf"):
            batches[1][3, 1, 2] = float(kind)
        if kind == "halves":  # what fits the bounds of each batch fits those of both
            batches = [x[:3], x[3:]]
        sim = calibrated(QuantizationSimModel(model, X), batches, non_finite="clamp")
        found: list[object] = [quantizer.statistics for quantizer in sim.quantizers.unique()]
        for site in sim.quantizers.values():
            if site.channels.seen is not None:
                found += [site.channels.seen.index.tolist(), site.channels.seen.value.tolist()]
        return found

    fast = seen()
    in_steps()
    assert fast == seen()


def test_bounds_take_the_place_of_the_tensors_that_have_them() -> None:
    inside = StepFunctions({name: Keep([], []) for name in NAMES})
    share, states = X.new_ones(7, 3, 40), (X.new_zeros(3, 10), X.new_zeros(3, 10))
    tensors = (share, torch.eye(40, 10), None, *states)
    with torch.no_grad():
        sequence = inside.sequence("LSTM", tensors, lambda *_: ())
        assert sequence is not None
        sequence(share, tensors[1], None, states, False)
    for name, function in inside.items():
        assert isinstance(function, Keep) and function.columns is not None and not function.steps, name
        (found,) = function.columns
        assert found.rows == 21 and found.lo.shape == (10,) and bool((found.lo <= found.hi).all())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("bits", [3, 8])
def test_gradients_are_those_of_single_steps(bias: bool, bits: int, in_steps: Callable[[], None]) -> None:
    def gradients() -> list[Tensor]:
        sim = QuantizationSimModel(lstm(bias=bias), X)
        for site in sim.quantizers.values():
            if site.inner is not None:
                site.spec = QuantSpec(IntFormat(bits))
        sim.compute_encodings([X / 3], progress=False)  # so that X clips
        x, h, c = (t.requires_grad_() for t in (X.clone(), torch.rand(1, 3, 10), torch.rand(1, 3, 10)))
        y, (last_h, last_c) = sim.model(x, (h, c))
        (y.square().sum() + last_h.sum() - (3 * last_c).sin().sum()).backward()
        return [y.detach(), last_h.detach(), last_c.detach(), *(p.grad for p in (x, h, c, *sim.model.parameters()))]

    torch.manual_seed(3)
    fast = gradients()
    in_steps()
    torch.manual_seed(3)
    slow = gradients()
    assert all(torch.equal(a, b) for a, b in zip(fast[:3], slow[:3], strict=True))
    for one, other in zip(fast[3:], slow[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True], ids=["observed", "trained"])
def test_a_whole_sequence_is_taken_where_there_are_compiled_loops(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    sequence = StepFunctions.sequence

    def spy(*given: Any) -> Any:
        found = sequence(*given)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(StepFunctions, "sequence", spy)
    sim = simulated(lstm())
    if grad:
        taken.clear()
        sim.model(X)
    assert taken and all(found == (loops() is not None) for found in taken)


def test_a_gradient_of_the_gradient(in_steps: Callable[[], None]) -> None:
    def twice() -> Tensor:
        sim = simulated(lstm())
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(sim.model(x)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    fast = twice()
    in_steps()
    torch.testing.assert_close(fast, twice(), rtol=1e-5, atol=1e-5)
    assert bool(fast.any())


def test_what_is_done_to_the_results_does_not_reach_the_gradient() -> None:
    def gradient(change: bool) -> Tensor:
        sim = simulated(lstm())
        y, (h, _) = sim.model(X)
        loss = y.square().sum() + h.sum()
        if change:
            with torch.no_grad():
                h.zero_()
        loss.backward()
        found = sim.model.weight_hh_l0.grad
        assert found is not None
        return found

    assert torch.equal(gradient(True), gradient(False))


def test_only_what_is_asked_for_has_a_gradient() -> None:
    sim = simulated(lstm())
    sim.model.weight_hh_l0.requires_grad_(False)
    sim.model(X)[0].sum().backward()
    assert sim.model.weight_hh_l0.grad is None and bool(sim.model.weight_ih_l0.grad.any())


@pytest.mark.parametrize("sites", ["*", "*.cell", "*.pre", "*.gate"])
@pytest.mark.parametrize("bits", [3, 8, 16])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
def test_ranges_that_train_get_the_gradients_of_single_steps(sites, bits, bidirectional, in_steps, monkeypatch):
    monkeypatch.setattr(learned_range, "STEEPEST", math.inf)  # the sums themselves are compared

    def gradients() -> dict[str, Tensor]:
        sim = QuantizationSimModel(lstm(bidirectional=bidirectional), X)
        for name, site in sim.quantizers.items():
            if site.inner is not None:  # gates too, which by themselves have fixed ranges; some with a zero point
                odd = site.inner.endswith("gate") or name.endswith("output[0]")
                site.spec = QuantSpec(IntFormat(bits, signed=not odd), symmetry="asymmetric" if odd else "symmetric")
        sim.compute_encodings([X / 3], progress=False)  # so that X clips
        sim.learn_ranges(sites)
        y, (last_h, last_c) = sim.model(X)
        (y.square().sum() + last_h.sum() - (3 * last_c).sin().sum()).backward()
        found = {name: p.grad for name, p in sim.model.named_parameters() if p.grad is not None}
        for name, site in sim.quantizers.items():
            if site.quantizer.learned is not None:
                for part, parameter in site.quantizer.learned.parameters().items():
                    assert parameter.grad is not None, name
                    found[f"{name}.{part}"] = parameter.grad
        return {"output": y.detach(), **found}

    fast = gradients()
    in_steps()
    slow = gradients()
    assert torch.equal(fast.pop("output"), slow.pop("output"))
    assert sum(name.endswith("log_scale") for name in fast) >= 1 + bidirectional
    # a gradient of a scale is a sum of terms of either sign: what it loses is measured by the largest of the layer
    largest = max(float(x.abs().max()) for name, x in slow.items() if "log_scale" in name or "offset" in name)
    for name, other in slow.items():
        torch.testing.assert_close(
            fast[name], other, rtol=1e-5, atol=1e-5 * max(1.0, largest), msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_range_that_trains_runs_in_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulated(lstm())
    sim.learn_ranges()
    monkeypatch.setattr(StepFunctions, "stacked", None)  # nothing is left to single steps
    sim.model(X)[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in sim.range_parameters())


def test_ranges_that_train_have_no_gradient_of_the_gradient(in_steps: Callable[[], None]) -> None:
    def once() -> Tensor:
        sim = simulated(lstm())
        sim.learn_ranges()
        x = X.clone().requires_grad_()
        loss = sim.model(x)[0].square().sum()
        (found,) = torch.autograd.grad(loss, [x], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            found.square().sum().backward()
        return found.detach()

    fast = once()
    in_steps()
    torch.testing.assert_close(fast, once(), rtol=1e-5, atol=1e-5)


GATES_X = torch.randn(9, 5, 6, generator=torch.Generator().manual_seed(0))
PACKED = pack_sequence([GATES_X[:n, i] for i, n in enumerate((9, 7, 4, 4, 1))])


def build(kind: str, **more: object) -> nn.Module:
    torch.manual_seed(1)
    return {"lstm": nn.LSTM, "gru": nn.GRU}[kind](6, 10, **more)


def results(model: nn.Module, x: object, bits: int, learned: bool = False) -> list[Tensor]:
    """Scales, outputs and gradients of a simulation that calibrates, runs and trains a step.

    A gradient of a range is the difference of two long sums, and is divided by their size.
    """
    sim = calibrated(QuantizationSimModel(model, x, default_output_bw=bits, default_param_bw=8), [x])
    found = [
        torch.tensor(site.encoding.scale.tolist()) for site in sim.quantizers.values() if site.encoding is not None
    ]
    with torch.no_grad():
        y, state = sim.model(x)
    found += [y.data if x is PACKED else y, *(state if isinstance(state, tuple) else (state,))]
    if learned:
        sim.learn_ranges()
    y, _ = sim.model(x)
    (y.data if x is PACKED else y).square().sum().backward()
    ranges = [p.grad for p in sim.range_parameters() if p.grad is not None] if learned else []
    return (
        found
        + [p.grad for p in sim.model.parameters() if p.grad is not None]
        + [grad / (20 * grad.abs().amax().clamp(min=1.0)) for grad in ranges]
    )


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("bits", [8, 4, 16])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_equal_to_the_gates_one_by_one(kind, packed, bits, learned, monkeypatch):
    monkeypatch.setattr(stacked_steps, "_LEAST", 0)  # compiled steps, where they are at hand, of small states too
    x, seen = PACKED if packed else GATES_X, []
    stacked, sequence = StepFunctions.stacked, StepFunctions.sequence

    def spy(*args: object) -> object:
        seen.append(stacked(*args))
        return seen[-1]

    def whole(*args: object) -> object:
        found = sequence(*args)
        seen.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(StepFunctions, "stacked", spy)
    monkeypatch.setattr(StepFunctions, "sequence", whole)
    fast = results(build(kind, bidirectional=True), x, bits, learned)
    assert len(seen) == 6 and None not in seen  # two directions that calibrate, run and train
    monkeypatch.setattr(StepFunctions, "stacked", lambda *_: None)
    monkeypatch.setattr(StepFunctions, "sequence", lambda *_: None)
    slow = results(build(kind, bidirectional=True), x, bits, learned)
    forward = next(i for i, one in enumerate(fast) if one.shape == build(kind).weight_ih_l0.shape)
    assert len(fast) == len(slow)
    for one, other in zip(fast[:forward], slow[:forward], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(fast[forward:], slow[forward:], strict=True):  # sums of gradients in another order
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gates_of_different_widths_stand_side_by_side() -> None:
    def outputs(stack: bool) -> Tensor:
        sim = QuantizationSimModel(build("lstm"), GATES_X)
        sim.quantizers["*.forget.gate"].spec = QuantSpec(IntFormat(3, signed=False), symmetry="asymmetric")
        sim.quantizers["*.candidate.pre"].spec = QuantSpec(IntFormat(5))
        sim.compute_encodings([GATES_X], progress=False)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if not stack:
                patch.setattr(StepFunctions, "stacked", lambda *_: None)
                patch.setattr(StepFunctions, "sequence", lambda *_: None)
            return sim.model(GATES_X)[0]

    assert torch.equal(outputs(True), outputs(False))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_fused_operator_runs_where_no_site_inside_is_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(kind)
    sim = QuantizationSimModel(model, GATES_X)
    for site in sim.quantizers.values():
        site.enabled = site.inner is None
    sim.compute_encodings([GATES_X], progress=False)
    fused = []
    original = calls._fused
    monkeypatch.setattr(calls, "_fused", lambda *args: fused.append(1) or original(*args))
    sim.model(GATES_X)
    assert fused == [1]


def test_a_cell_prepares_nothing_for_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = nn.LSTMCell(6, 10)
    sim = calibrated(QuantizationSimModel(cell, GATES_X[0]), [GATES_X[0]])
    asked: list[int] = []
    monkeypatch.setattr(StepFunctions, "stacked", lambda *_: asked.append(1))
    monkeypatch.setattr(StepFunctions, "sequence", lambda *_: asked.append(1))
    sim.model(GATES_X[0])
    assert not asked


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_compiled_steps_of_an_lstm_are_those_of_array_functions(packed, bits, monkeypatch):
    monkeypatch.setattr(stacked_steps, "_LEAST", 0)
    x = PACKED if packed else GATES_X
    fast = results(build("lstm", num_layers=2), x, bits)
    monkeypatch.setattr(stacked_steps, "loops", lambda: None)
    monkeypatch.setattr(StepFunctions, "sequence", lambda *_: None)
    slow = results(build("lstm", num_layers=2), x, bits)
    assert len(fast) == len(slow)
    gradients = 0 if packed else 8  # sums over all steps at once, and step by step
    exact = len(fast) - gradients
    assert all(torch.equal(a, b) for a, b in zip(fast[:exact], slow[:exact], strict=True))
    for one, other in zip(fast[exact:], slow[exact:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
