"""Low-rank branches: what they take up of the errors of weights, that they export, and what is refused."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch
from torch import Tensor, nn

from bitwright.core.numerics.spec import find_preset
from bitwright.errors import CalibrationError, ConfigError
from bitwright.torch import QuantizationSimModel, add_low_rank_branches, apply_gptq, correct_errors
from bitwright.torch.training.low_rank import LowRankBranch
from tests.methods.transformer import Decoder, tokens
from tests.support import data
from tests.support.simulations import calibrated


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def inputs(seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(32, 32, generator=torch.Generator().manual_seed(9))
    return torch.randn(128, 32, generator=random) @ mix / 5


def simulated(model: nn.Module, x: Tensor, preset: str = "w3g64") -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(model, x, preset=preset))


def error(sim: QuantizationSimModel, model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((sim.model(x) - model(x)).square().mean() / model(x).square().mean())


def test_branches_change_nothing_until_they_are_fitted_and_stay_in_float():
    model, x = Net().eval(), inputs(0)
    wanted = model(x)
    assert add_low_rank_branches(model, 4) == ("first", "last")
    assert torch.equal(model(x), wanted)
    sim = simulated(model, x)
    assert set(sim.quantizers) == {"first.layer.weight", "last.layer.weight"}
    rows = {row.name: row for row in sim.coverage() if ".down." in row.name and row.name.endswith("weight")}
    assert len(rows) == 2 and all(row.status == "float" and "adapter" in row.how for row in rows.values())


def test_an_error_of_the_rank_of_the_branch_is_taken_up_whole():
    model, x = Net().eval(), inputs(0)
    add_low_rank_branches(model, 2, layers="first")
    sim = simulated(model, x)
    with torch.no_grad():  # weights on the grid, and a float model that differs from them by a matrix of rank two
        site = sim.quantizers["first.layer.weight"]
        on_grid = site.quantizer(sim.model.first.layer.weight)
        sim.model.first.layer.weight.copy_(on_grid)
        model.first.layer.weight.copy_(on_grid + 0.1 * torch.randn(48, 2) @ torch.randn(2, 32))
    (row,) = correct_errors(sim, model, [x], progress=False).layers
    assert row.rank == 2 and row.before > 0.01 and row.after < 1e-9


@pytest.mark.parametrize("method", ["nearest", "gptq"])
def test_errors_on_other_data_fall_with_the_rank(method: str):
    found = []
    for rank in (0, 2, 8):
        model, batches = Net().eval(), [inputs(seed) for seed in range(4)]
        if rank:
            add_low_rank_branches(model, rank)
        sim = simulated(model, batches[0], "w2g32")
        if method == "gptq":
            apply_gptq(sim, batches, progress=False)
        if rank:
            report = correct_errors(sim, model, batches, progress=False)
            assert all(row.after < row.before for row in report.layers) and f"rank {rank}" in str(report)
            assert report.parameters == rank * (32 + 48 + 48 + 16)
        found.append(error(sim, model, inputs(40)))
    assert found[1] < 0.9 * found[0] and found[2] < 0.6 * found[0], found


def test_the_second_moment_of_the_inputs_beats_a_decomposition_of_the_weights_alone():
    model, x = Net().eval(), inputs(0)
    add_low_rank_branches(model, 4, layers="first")
    sim = simulated(model, x, "w2g32")
    plain = copy.deepcopy(sim.model.first)
    with torch.no_grad():
        rounded = sim.quantizers["first.layer.weight"].quantizer(plain.layer.weight)
        U, S, V = torch.linalg.svd(model.first.layer.weight - rounded)
        by_weights = rounded + (U[:, :4] * S[:4]) @ V[:4]
        correct_errors(sim, model, [x], progress=False)
        fitted = rounded + sim.model.first.up.weight @ sim.model.first.down.weight
        held = inputs(7)
        errors = [float(((W - model.first.layer.weight) @ held.T).square().sum()) for W in (fitted, by_weights)]
    assert errors[0] < 0.8 * errors[1]


def test_branches_are_exported_and_the_file_agrees(tmp_path):
    model, x = Decoder(tied=False), tokens(4)
    add_low_rank_branches(model, 4, layers=["q", "down"])
    sim = simulated(model, x, "w4")
    correct_errors(sim, model, [x], progress=False)
    exported = sim.export(tmp_path, "net", x)
    assert sim.verify(x).ok
    held = [tuple(item.dims) for item in onnx.load(exported.qdq).graph.initializer if item.data_type == 1]
    assert sorted(sorted(shape) for shape in held if 4 in shape and len(shape) == 2) == [[4, 16]] * 3 + [[4, 24]]


def test_bad_calls_say_what_to_do():
    model, x = Net().eval(), inputs(0)
    with pytest.raises(ConfigError, match="rank=0. Remedy: use at least 1"):
        add_low_rank_branches(model, 0)
    with pytest.raises(ConfigError, match="the simulation has branches beside 0 layers, and the float model beside 0"):
        correct_errors(simulated(model, x), model, [x])
    add_low_rank_branches(model, 2)
    with pytest.raises(ConfigError, match="is a linear layer without a branch"):
        add_low_rank_branches(model, 2)
    assert not any(isinstance(branch.layer, LowRankBranch) for branch in (model.first, model.last))
    bare = QuantizationSimModel(model, x, preset="w4")
    with pytest.raises(ConfigError, match=r"first.layer.weight: it has no encoding"):
        correct_errors(bare, model, [x])
    sim = simulated(model, x)
    with pytest.raises(CalibrationError, match="the data held no batch"):
        correct_errors(sim, model, [])
    with pytest.raises(CalibrationError, match="its inputs are not finite"):
        correct_errors(sim, model, [torch.full((4, 32), float("nan"))])


@pytest.mark.slow
def test_branches_bring_a_decoder_of_three_bits_nearer_to_float(shared_data):
    batches, found = list(data.stories("calib")[:, :-1].split(8)), []
    for rank in (0, 4):
        model = data.trained("stories260k")
        if rank:
            add_low_rank_branches(model, rank, layers="layers.*")
        sim = QuantizationSimModel(model, batches[0][:1], preset=find_preset("w3g32_float_zero"))
        for name, site in sim.quantizers.items():
            if name.startswith(("tok_embeddings", "output")):
                site.enabled = False
        sim.compute_encodings(progress=False)
        if rank:
            correct_errors(sim, model, batches, progress=False)
        with torch.no_grad():
            found.append(data.perplexity(sim.model, data.stories()[:32]))
    assert found[1] < 0.92 * found[0], found
