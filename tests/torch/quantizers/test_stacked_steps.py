"""Gates side by side give what the gates one by one give, bit for bit; without quantizers inside, torch's operator runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec
from bitwright.torch import QuantizationSimModel
from bitwright.torch.calls import recurrent as calls
from bitwright.torch.quantizers import sequences as stacked_steps
from bitwright.torch.quantizers.sequences import StepFunctions

X = torch.randn(9, 5, 6, generator=torch.Generator().manual_seed(0))
PACKED = pack_sequence([X[:n, i] for i, n in enumerate((9, 7, 4, 4, 1))])


def build(kind: str, **more: object) -> nn.Module:
    torch.manual_seed(1)
    return {"lstm": nn.LSTM, "gru": nn.GRU}[kind](6, 10, **more)


def results(model: nn.Module, x: object, bits: int, learned: bool = False) -> list[Tensor]:
    """Scales, outputs and gradients of a simulation that calibrates, runs and trains a step.

    A gradient of a range is the difference of two long sums, and is divided by their size.
    """
    sim = QuantizationSimModel(model, x, default_output_bw=bits, default_param_bw=8)
    sim.compute_encodings([x], progress=False)
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


@pytest.mark.slow_variants(
    "lstm-padded-8-learned",
    "lstm-padded-16-learned",
    "lstm-packed-8-learned",
    "lstm-packed-4-fixed",
    "lstm-packed-4-learned",
    "lstm-packed-16-fixed",
    "lstm-packed-16-learned",
    "gru-padded-8-learned",
    "gru-padded-4-fixed",
)
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("bits", [8, 4, 16])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_equal_to_the_gates_one_by_one(
    kind: str, packed: bool, bits: int, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_steps, "_LEAST", 0)  # compiled steps, where they are at hand, of small states too
    x, seen = PACKED if packed else X, []
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
        sim = QuantizationSimModel(build("lstm"), X)
        sim.quantizers["*.forget.gate"].spec = QuantSpec(IntFormat(3, signed=False), symmetry="asymmetric")
        sim.quantizers["*.candidate.pre"].spec = QuantSpec(IntFormat(5))
        sim.compute_encodings([X], progress=False)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if not stack:
                patch.setattr(StepFunctions, "stacked", lambda *_: None)
                patch.setattr(StepFunctions, "sequence", lambda *_: None)
            return sim.model(X)[0]

    assert torch.equal(outputs(True), outputs(False))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_fused_operator_runs_where_no_site_inside_is_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(kind)
    sim = QuantizationSimModel(model, X)
    for site in sim.quantizers.values():
        site.enabled = site.inner is None
    sim.compute_encodings([X], progress=False)
    fused = []
    original = calls._fused
    monkeypatch.setattr(calls, "_fused", lambda *args: fused.append(1) or original(*args))
    sim.model(X)
    assert fused == [1]


def test_a_cell_prepares_nothing_for_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = nn.LSTMCell(6, 10)
    sim = QuantizationSimModel(cell, X[0])
    sim.compute_encodings([X[0]], progress=False)
    asked: list[int] = []
    monkeypatch.setattr(StepFunctions, "stacked", lambda *_: asked.append(1))
    monkeypatch.setattr(StepFunctions, "sequence", lambda *_: asked.append(1))
    sim.model(X[0])
    assert not asked


@pytest.mark.slow_variants("packed-8")
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_compiled_steps_of_an_lstm_are_those_of_array_functions(
    packed: bool, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_steps, "_LEAST", 0)
    x = PACKED if packed else X
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
