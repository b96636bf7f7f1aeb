"""The calls of a simulation, repeated one by one: what reconstruction runs is the simulation, bit for bit."""

from __future__ import annotations

import pytest
import torch

from bitwright.algorithms.rounding.program import Program, Step, run
from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel, apply_gptq
from bitwright.torch.adapters.program import TorchSimulation
from bitwright.torch.calls.trees import flatten_tensors
from tests.support.zoo import ZOO, Case
from tests.torch.test_zoo_simulation import example, simulated

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
    sim = QuantizationSimModel(ThroughAView(), x)
    sim.compute_encodings([x])
    with pytest.raises(ModelError, match="repeated one by one, give another output.*through views"):
        apply_gptq(sim, [x])
