"""What goes wrong around a training loop is told once, and nothing is told of a loop that is right."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.torch import QuantizationSimModel, TrainingGuard, apply_gptq, reestimate_bn_stats
from bitwright.torch.simulation.ranges import LOOK_EVERY

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def make(*layers: nn.Module) -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(nn.Sequential(*(layers or (nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))).eval(), X)
    sim.compute_encodings([X])
    return sim


def train(sim: QuantizationSimModel, parameters: list[Tensor], forwards: int, accumulate: int = 1) -> None:
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for i in range(forwards):
        sim.model(X).square().mean().backward()
        if i % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()


def test_an_optimizer_without_the_ranges_is_told_once(caplog):
    sim = make()
    sim.learn_ranges()
    with caplog.at_level(logging.WARNING):
        train(sim, list(sim.model.parameters()), 3 * LOOK_EVERY)
    (record,) = caplog.records
    text = record.getMessage()
    assert (
        f"did not change in {LOOK_EVERY} forwards" in text
        and "add the group {'params': sim.range_parameters()}" in text
    )


def test_right_loops_are_not_told_of(caplog):
    with caplog.at_level(logging.WARNING):
        sim = make()
        train(sim, list(sim.model.parameters()), 2 * LOOK_EVERY + 2)  # nothing is learned
        sim.learn_ranges()
        train(sim, [*sim.model.parameters(), *sim.range_parameters()], 2 * LOOK_EVERY + 2)
        sim = make()
        sim.learn_ranges()
        everything = [*sim.model.parameters(), *sim.range_parameters()]
        train(sim, everything, 2 * LOOK_EVERY + 2, accumulate=4 * LOOK_EVERY)  # no step was taken yet
    assert not caplog.records


class Branch(nn.Module):
    """Two layers, of which the second is left out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if self.both else y


@pytest.mark.slow_variants("3-compiled")
@pytest.mark.parametrize("form", ["made", "copied", "compiled"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_loops_that_clear_the_gradients_of_the_model_alone_train_as_others(form, accumulate):
    """As the Trainer of transformers does: gradients of ranges had summed up over all steps."""
    found = []
    for clears in ("optimizer", "model"):
        torch.manual_seed(0)
        sim = make(Branch())
        sim.learn_ranges()
        sim = copy.deepcopy(sim) if form == "copied" else sim
        model = torch.compile(sim.model, backend="aot_eager") if form == "compiled" else sim.model
        branch = sim.model[0]
        optimizer = torch.optim.Adam([*sim.model.parameters(), *sim.range_parameters()], lr=1e-2)
        for i in range(4 * accumulate):
            # the short run of the compiled one has a graph per simulation, not two
            branch.both = i // accumulate != 2 or (form, accumulate) == ("compiled", 1)
            model(X * (i + 1)).square().mean().backward()
            if i % accumulate == accumulate - 1:
                optimizer.step()
                (optimizer if clears == "optimizer" else sim.model).zero_grad()
        found.append([p.detach() for p in (*sim.model.parameters(), *sim.range_parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_ranges_that_rounding_froze_are_told_of(caplog):
    sim = make()
    apply_gptq(sim, [X], progress=False)
    with caplog.at_level(logging.WARNING):
        report = sim.learn_ranges()
    assert not any(name.endswith("weight") for name in report.learned)
    (record,) = caplog.records
    assert "2 frozen ranges stay as they are, 0.weight among them" in record.getMessage()
    for name in ("0.weight", "2.weight"):  # as the message says
        sim.quantizers[name].frozen = False
    caplog.clear()
    assert {"0.weight", "2.weight"} <= set(sim.learn_ranges().learned) and not caplog.records


def test_weights_that_others_were_rounded_for_keep_their_ranges(caplog):
    """At two bits a range of the embedding that moves by 1 % changes codes which the rounded layer after it makes up for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval()
    tokens = torch.arange(40).reshape(4, 10) % 10
    sim = QuantizationSimModel(model, tokens, default_param_bw=2)
    sim.compute_encodings([tokens], progress=False)
    apply_gptq(sim, [tokens], progress=False)
    assert sim.quantizers["1.weight"].frozen and not sim.quantizers["0.weight"].frozen
    with caplog.at_level(logging.WARNING):
        report = sim.learn_ranges()
    assert report.learned and "0.weight" not in report.learned
    assert "name it to learn it" in report.fixed["0.weight"]
    assert "other weights (0.weight) keep theirs too" in caplog.records[-1].getMessage()
    assert sim.learn_ranges("0.weight").learned == ("0.weight",)  # as the reason says
    assert "0.weight" in sim.learn_ranges().learned  # what trains goes on


@pytest.mark.slow_variants("Adam")
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_ranges_train_with_the_optimizers_that_people_use(make_optimizer):
    """A range three times too wide at four bits comes to where the output is nearer to that of the float model."""
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    sim = QuantizationSimModel(model, x, default_output_bw=4, default_param_bw=8)
    sim.compute_encodings([3 * x], progress=False)
    with torch.no_grad(), sim.in_float():
        wanted = sim.model(x)
    sim.learn_ranges("*put[0]")
    # with SGD steps are as long as in the papers, which wants a rate of its own
    options = {"lr": 1.0, "momentum": 0.9} if make_optimizer is torch.optim.SGD else {"lr": 0.02}
    guard = TrainingGuard(make_optimizer(sim.range_parameters(), **options), sim=sim)

    def error() -> Tensor:
        return (sim.model(x) - wanted).square().mean()

    before = float(error().detach())
    for _ in range(100):
        guard.step(error())
    assert float(error().detach()) < 0.2 * before
    assert guard.skipped == 0


def test_evaluation_in_training_mode_is_told_once(caplog):
    sim = make(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with caplog.at_level(logging.WARNING), torch.no_grad():
        sim.model(X)
        reestimate_bn_stats(sim.model, [X])
        assert not caplog.records
        sim.model.train()
        sim.model(X)
        sim.model(X)
    (record,) = caplog.records
    assert "1 batch norms normalise by each batch" in record.getMessage()
    assert "call sim.model.eval() before you evaluate it" in record.getMessage()


def test_the_guard_names_the_range_that_a_step_moved_off_its_tensor():
    sim = make()
    sim.learn_ranges("*.weight")
    before = [p.detach().clone() for p in sim.range_parameters()]
    encoding = sim.quantizers["0.weight"].encoding
    guard = TrainingGuard(torch.optim.Adam(sim.range_parameters(), lr=100.0), sim=sim)
    with pytest.raises(
        ModelError, match=r"0.weight: its learned scale is e\^100.0 times .* lower the learning rate of sim.range"
    ):
        guard.step(sim.model(X).square().mean())
    assert all(torch.equal(p, q) for p, q in zip(sim.range_parameters(), before, strict=True))
    assert sim.quantizers["0.weight"].encoding == encoding and bool(sim.model(X).isfinite().all())


def test_a_gradient_that_is_not_finite_leaves_the_ranges_alone():
    sim = make()
    sim.learn_ranges()
    guard = TrainingGuard(torch.optim.Adam([*sim.model.parameters(), *sim.range_parameters()], lr=1e-2), sim=sim)
    assert guard.step(sim.model(X).square().mean())
    before = [p.detach().clone() for p in sim.range_parameters()]
    assert not guard.step((sim.model(X) * torch.nan).sum())
    assert not guard.step((sim.model(X) - sim.model(X).detach()).sqrt().sum())
    assert guard.reasons == {"loss": 1, "gradient": 1}
    assert all(torch.equal(p, q) for p, q in zip(sim.range_parameters(), before, strict=True))


def test_weights_that_are_computed_anew_in_each_forward_have_learned_ranges_too():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    sim = make(layer, nn.ReLU(), nn.Linear(4, 2))
    report = sim.learn_ranges(init="lsq")
    (name,) = [n for n in report.learned if n.startswith("0") and sim.quantizers[n].role == "weight"]
    scale = torch.from_numpy(sim.quantizers[name].encoding.scale.copy())
    qmax = sim.quantizers[name].encoding.format.qmax
    torch.testing.assert_close(scale, 2 * sim.model[0].weight.detach().abs().mean(1) / qmax**0.5)
    first = float(sim.model(X).square().mean().detach())
    train(sim, [*sim.model.parameters(), *sim.range_parameters()], 20)
    assert float(sim.model(X).square().mean().detach()) < first
    sim.model(X).square().mean().backward()
    assert all(p.grad is not None for p in sim.range_parameters())


def test_what_was_made_under_inference_mode_trains_as_what_was_not(tmp_path):
    def losses(context):
        with context():
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
            sim = QuantizationSimModel(model.eval(), X)
            sim.compute_encodings([X], progress=False)
            sim.save_encodings(tmp_path / "encodings.json")
            sim.load_encodings(tmp_path / "encodings.json")
            sim.learn_ranges()
            sim.model(X)
            sim = copy.deepcopy(sim)
            sim.model(X)
        optimizer = torch.optim.Adam([*sim.model.parameters(), *sim.range_parameters()], lr=1e-3)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = sim.model(X).square().mean()
            loss.backward()
            optimizer.step()
            with context():
                sim.model(X)
            found.append(float(loss.detach()))
        return found

    expected = losses(torch.no_grad)
    assert expected[2] < expected[0]
    assert losses(torch.inference_mode) == expected
