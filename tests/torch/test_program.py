"""The calls of a simulation, repeated one by one: what reconstruction runs is the simulation, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bitwright.errors import ModelError
from bitwright.methods.rounding.program import Program, Step, run
from bitwright.torch import QuantizationSimModel, apply_gptq
from bitwright.torch.calls.inputs import flatten_tensors
from bitwright.torch.program import TorchSimulation
from tests.support.simulations import calibrated
from tests.support.zoo import ZOO, Case
from tests.torch.test_hard_models import example, simulated

CASES = [pytest.param(case, id=name) for name, case in ZOO.items()]


def repeated(model: TorchSimulation, batch: object, *, quantized: bool) -> list[torch.Tensor]:
    program, state = model.program(batch)
    outputs = tuple(dict.fromkeys(program.outputs))
    whole = Program((*program.steps, Step("", outputs, (), lambda tensors: ())), program.constants, ())
    run(whole, state, 0, len(program.steps), model.quantize if quantized else None)
    return [state[v] if v in state else program.constants[v] for v in program.outputs]


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_simulation_bit_for_bit(case: Case) -> None:
    sim = simulated(case)
    batch = example(case)
    found = repeated(TorchSimulation(sim), batch, quantized=True)
    with torch.no_grad():
        expected = [t for _, t in flatten_tensors(sim.model(*batch.args, **batch.kwargs))]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("case", CASES)
def test_gptq_treats_or_lists_every_layer(case: Case) -> None:
    sim = simulated(case, default_param_bw=4)
    batches = [example(case, seed) for seed in range(2)]
    report = apply_gptq(sim, batches)
    layers = {
        s.op for s in sim.quantizers.values() if s.role == "weight" and sim.graph.op(s.op).type in ("Conv", "Gemm")
    }
    named = {row.layer for row in report} | set(report.skipped)
    assert layers <= named
    assert all(row.after <= row.before for row in report)
    with torch.no_grad():
        sim.model(*batches[0].args, **batches[0].kwargs)


class Rows(torch.nn.Module):
    """Layers on the rows that ``find(scores, h)`` takes; the code around them reads how many there are."""

    def __init__(self, find: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.score, self.b, self.c = (torch.nn.Linear(8, n) for n in (8, 1, 16, 4))
        self.find = find

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).relu()
        rows = self.find(self.score(h)[..., 0], h)
        return self.c(self.b(rows).view(len(rows), 2, 8)).mean((0, 1)), rows


def written_back(scores: Tensor, h: Tensor) -> Tensor:
    found, out = scores > 0, h.clone()
    out[found] = out[found].view(int(found.sum()), 8).tanh()
    return out.flatten(0, 1)


def scattered(scores: Tensor, h: Tensor) -> Tensor:
    keep = scores > 0
    return torch.zeros_like(h).masked_scatter(keep[..., None], h[keep].view(int(keep.sum()), 8)).flatten(0, 1)


def by_experts(scores: Tensor, h: Tensor) -> Tensor:
    found, out = (scores > 0).flatten(), torch.zeros_like(h).flatten(0, 1)
    for i in range(2):
        out[found == i] = h.flatten(0, 1)[found == i] * (i + 1)
    return out


FOUND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nonzero": lambda scores, h: h[(scores > 0).nonzero(as_tuple=True)],
    "nonzero-of-floats": lambda scores, h: h[scores.relu().nonzero(as_tuple=True)],
    "argwhere": lambda scores, h: h[tuple(torch.argwhere(scores > 0).T)],
    "where": lambda scores, h: h[torch.where(scores > 0)],
    "mask": lambda scores, h: h[scores > 0],
    "masked_select": lambda scores, h: h.masked_select((scores > 0)[..., None]).view(-1, 8),
    "top-of-as-many": lambda scores, h: h.flatten(0, 1)[scores.flatten().topk(int((scores > 0).sum())).indices],
    "durations": lambda scores, h: h.flatten(0, 1).repeat_interleave(scores.exp().mul(2).round().long().flatten(), 0),
    "distinct": lambda scores, h: h.flatten(0, 1)[(scores * 6).round().long().unique().abs()],
    "written-back": written_back,
    "scattered": scattered,
    "by-experts": by_experts,
}


@pytest.mark.parametrize("find", FOUND.values(), ids=FOUND)
def test_a_size_that_the_model_read_holds_where_quantizers_would_find_other_rows(find):
    torch.manual_seed(0)
    model, batches = Rows(find).eval(), [torch.randn(3, 12, 8) for _ in range(3)]
    sim = calibrated(QuantizationSimModel(model, batches[0], default_param_bw=2, default_output_bw=4), batches)
    adapter = TorchSimulation(sim)
    for batch in batches:
        expected = model(batch)[1].detach()
        for a, b in zip(repeated(adapter, batch, quantized=False), model(batch), strict=True):
            torch.testing.assert_close(a, b)
        assert repeated(adapter, batch, quantized=True)[1].shape == expected.shape
    apply_gptq(sim, batches)


class RuleMask(torch.nn.Module):
    """A mask by a rule of single positions, as transformers make those whose rule is a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        def rule(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) | (kind[b, i] == kind[b, j])

        t = torch.arange(x.shape[1])
        every = torch.vmap(torch.vmap(torch.vmap(rule, (None, None, 0)), (None, 0, None)), (0, None, None))
        mask = every(torch.arange(x.shape[0]), t, t)
        return self.b((self.a(x) @ x.transpose(1, 2)).masked_fill(~mask, -1e4).softmax(-1) @ x)  # type: ignore[no-any-return]


def test_a_mask_that_vmap_makes_is_a_constant_of_its_run() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(2, 6, 8), torch.randint(0, 2, (2, 6))) for _ in range(3)]
    sim = calibrated(QuantizationSimModel(RuleMask().eval(), batches[0], default_param_bw=4), batches)
    adapter = TorchSimulation(sim)
    for batch in batches:
        with torch.no_grad():
            assert torch.equal(repeated(adapter, batch, quantized=True)[0], sim.model(*batch))
    assert len(apply_gptq(sim, batches)) == 2


class ThroughAView(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        y[:, 0].add_(1.0)  # changes y without naming it
        return y


def test_a_tensor_changed_through_a_view_is_refused() -> None:
    x = torch.randn(8, 4)
    sim = calibrated(QuantizationSimModel(ThroughAView(), x), [x])
    with pytest.raises(ModelError, match="repeated one by one, give another output.*through views"):
        apply_gptq(sim, [x])


class _Counted(torch.nn.Module):
    """Counts its runs in a list, which torch does not see, and may look at its input or change with every run."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.held, self.turn = torch.nn.Linear(4, 4), how, [], 0

    def forward(self, x: Tensor) -> Tensor:
        _RUNS.append(1)
        y = self.layer(x)
        if self.how == "reads numbers" and float(x.detach().sum()) > 1e6:
            return y
        if self.how == "reads as array" and x.detach().numpy().sum() > 1e6:
            return y
        if self.how == "chooses rows":
            return torch.relu(y[y[:, 0] > 0])
        if self.how == "draws":
            return torch.relu(y + 0 * torch.rand(4))
        if self.how == "counts":
            self.turn += 1
        if self.how == "collects":
            self.held.append(1)
        return torch.relu(y)


_RUNS: list[int] = []


@pytest.mark.parametrize(
    "how, again",
    [
        ("plain", 0),
        ("reads numbers", 1),
        ("reads as array", 1),
        ("chooses rows", 1),
        ("draws", 1),
        ("counts", 1),
        ("collects", 1),
    ],
)
def test_only_a_model_whose_calls_depend_on_shapes_alone_is_not_run_for_every_batch(how: str, again: int) -> None:
    torch.manual_seed(0)
    sim = QuantizationSimModel(_Counted(how), torch.randn(6, 4))
    batches = [torch.randn(6, 4) for _ in range(3)]
    sim.compute_encodings(batches)
    model = TorchSimulation(sim)
    first, _ = model.program(batches[0])
    _RUNS.clear()
    program, state = model.program(batches[1])
    assert len(_RUNS) == again
    assert torch.equal(next(iter(state.values())), batches[1])
    if not again:
        assert program is first
        found = repeated(model, batches[2], quantized=True)
        with torch.no_grad():
            assert torch.equal(found[0], sim.model(batches[2]))
    _RUNS.clear()
    model.program(torch.randn(5, 4))
    assert len(_RUNS) == 1, "other shapes are run"


@pytest.mark.parametrize("preset", ["w8a8", "w8a16"])
def test_quantizers_of_a_recurrent_layer_do_the_gates_at_once_or_one_by_one(preset: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.LSTM(6, 24, batch_first=True)
    batch = torch.randn(12, 5, 6)
    sim = calibrated(QuantizationSimModel(layer, batch, preset=preset), [batch])
    model = TorchSimulation(sim)
    at_once = repeated(model, batch, quantized=True)
    model.quantize = lambda site, x: TorchSimulation.quantize(model, site, x)  # type: ignore[method-assign]
    one_by_one = repeated(model, batch, quantized=True)
    with torch.no_grad():
        expected = [t for _, t in flatten_tensors(sim.model(batch))]
    for a, b, c in zip(at_once, one_by_one, expected, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)
