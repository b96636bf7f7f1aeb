"""Learned ranges: which train, where they start, under ``torch.compile``, and what goes wrong around a loop."""

from __future__ import annotations

import copy
import io
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.errors import CalibrationError, ConfigError, EncodingsError, ModelError
from bitwright.torch import QuantizationSimModel, TrainingGuard, apply_gptq, reestimate_bn_stats
from bitwright.torch.quantizers.learned_range import LearnedRange
from bitwright.torch.simulation.ranges import LOOK_EVERY

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 10


class Net(nn.Module):
    """Convolutions, an in-place addition on a quantized value, a softmax of fixed range, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.act, self.fc = nn.Hardswish(), nn.Linear(8 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv1(x))
        z = self.act(self.conv2(y))
        z += y
        z = z * torch.sigmoid(z)
        return self.fc(z.flatten(1))


def make(bits: int = 4, **options: Any) -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(Net(), X, default_param_bw=bits, default_output_bw=bits, **options)
    sim.compute_encodings([X])
    return sim


def train(sim: QuantizationSimModel, steps: int, optimizer: Any = None) -> Any:
    if optimizer is None:
        groups = [{"params": list(sim.model.parameters())}, {"params": sim.range_parameters(), "lr": 1e-2}]
        optimizer = torch.optim.Adam(groups, lr=1e-3)
    guard = TrainingGuard(optimizer)
    for _ in range(steps):
        guard.step(nn.functional.cross_entropy(sim.model(X), Y))
    return optimizer


def output(sim: QuantizationSimModel) -> Tensor:
    with torch.no_grad():
        return sim.model(X)


def test_learning_starts_from_the_calibrated_simulation():
    sim = make()
    before, encodings = output(sim), {n: s.encoding for n, s in sim.quantizers.items()}
    names = list(sim.model.state_dict())
    report = sim.learn_ranges()
    assert torch.equal(output(sim), before) and torch.equal(sim.model(X), before)
    assert {n: s.encoding for n, s in sim.quantizers.items()} == encodings
    assert list(sim.model.state_dict()) == names and len(list(sim.model.parameters())) == 6
    assert {"conv1.weight", "conv1.input[0]", "conv2.weight", "fc.weight", "fc.output[0]"} <= set(report.learned)
    assert report.fixed["conv1.bias"] == "its grid follows from those of the input and the weight"
    assert any("both ends of its range are given" in reason for reason in report.fixed.values())
    kinds = dict(sim.named_range_parameters())
    assert "conv1.input[0].offset" in kinds and "conv1.weight.offset" not in kinds
    relu = next(name for name in report.learned if "relu" in name)
    assert f"{relu}.log_scale" in kinds and f"{relu}.offset" not in kinds, "zero is an end of the range and stays so"


def test_every_range_gets_a_gradient_and_training_lowers_the_loss():
    sim = make()
    first = float(nn.functional.cross_entropy(sim.model(X), Y).detach())
    sim.learn_ranges()
    optimizer = train(sim, 40)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in sim.range_parameters())
    assert float(nn.functional.cross_entropy(output(sim), Y)) < 0.8 * first
    train(sim, 1, optimizer)
    with torch.no_grad():
        assert torch.equal(sim.model(X), sim.model(X.clone()))


def test_the_forward_equals_that_of_fixed_ranges_with_the_same_encodings():
    sim = make()
    sim.learn_ranges()
    train(sim, 5)
    fixed = make()
    fixed.model.load_state_dict(sim.model.state_dict())
    for name, site in sim.quantizers.items():
        if not site.quantizer.derived:
            fixed.quantizers[name].encoding = site.encoding
    assert torch.equal(output(fixed), output(sim)) and torch.equal(fixed.model(X), sim.model(X))


def test_ranges_alone_can_be_trained():
    sim = make()
    sim.learn_ranges()
    sim.model.requires_grad_(False)
    weights = copy.deepcopy(sim.model.state_dict())
    first = float(nn.functional.cross_entropy(output(sim), Y))
    train(sim, 40, torch.optim.Adam(sim.range_parameters(), lr=1e-2))
    assert all(torch.equal(v, weights[n]) for n, v in sim.model.state_dict().items())
    assert float(nn.functional.cross_entropy(output(sim), Y)) < first


def test_some_sites_only():
    sim = make()
    assert all(name.endswith(".weight") for name in sim.learn_ranges("*.weight").learned)
    assert len(sim.range_parameters()) == 3
    sim.learn_ranges(["fc.output[0]"], offsets=False)
    assert len(sim.range_parameters()) == 4
    kept = {id(p) for p in sim.range_parameters()}
    sim.learn_ranges("*.weight")
    assert {id(p) for p in sim.range_parameters()} == kept, "an optimizer has them"


def test_what_cannot_be_learned_is_refused():
    sim = make()
    with pytest.raises(ConfigError, match=r"no range of this simulation trains.*call sim.learn_ranges\(\)"):
        sim.range_parameters()
    with pytest.raises(ConfigError, match="there is no site 'conv1.wieght' .did you mean 'conv1.weight'"):
        sim.learn_ranges("conv1.wieght")
    with pytest.raises(ConfigError, match="there is no init 'kaiming'"):
        sim.learn_ranges(init="kaiming")
    with pytest.raises(ConfigError, match="no range can be learned: conv1.bias: its grid follows"):
        sim.learn_ranges("conv1.bias")
    torch.manual_seed(0)
    with pytest.raises(CalibrationError, match=r"learn_ranges: .* is not calibrated.*call sim.compute_encodings"):
        QuantizationSimModel(Net(), X).learn_ranges()
    wide = make(preset="fp8")
    with pytest.raises(ConfigError, match="is not an integer grid of up to 16 bits"):
        wide.learn_ranges("conv1.weight")


@pytest.mark.parametrize("init", ["lsq", "lsq+"])
def test_weights_start_where_the_papers_start_them(init):
    sim = make()
    sim.learn_ranges(init=init)
    w = sim.model.conv1.weight.detach().double().flatten(1)
    scale = torch.from_numpy(sim.quantizers["conv1.weight"].encoding.scale.copy())
    qmax = sim.quantizers["conv1.weight"].encoding.format.qmax
    if init == "lsq":
        wanted = 2 * w.abs().mean(1) / math.sqrt(qmax)
    else:
        mean, std = w.mean(1), w.std(1, correction=0)
        wanted = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / qmax
    torch.testing.assert_close(scale, wanted.float())


def test_state_dict_and_checkpoint_carry_everything(tmp_path: Path):
    sim = make()
    sim.learn_ranges()
    optimizer = train(sim, 10)
    buffer = io.BytesIO()
    torch.save({"sim": sim.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    sim.save_checkpoint(tmp_path / "c")
    saved = output(sim)
    train(sim, 10, optimizer)

    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    resumed = make()
    resumed.load_state_dict(state["sim"])
    assert torch.equal(output(resumed), saved)
    groups = [{"params": list(resumed.model.parameters())}, {"params": resumed.range_parameters(), "lr": 1e-2}]
    again = torch.optim.Adam(groups, lr=1e-3)
    again.load_state_dict(state["optimizer"])
    train(resumed, 10, again)
    assert torch.equal(output(resumed), output(sim)), "ten steps, saved, ten steps: twenty steps"
    pairs = zip(resumed.named_range_parameters(), sim.named_range_parameters(), strict=True)
    assert all(n == m and torch.equal(p, q) for (n, p), (m, q) in pairs)

    from_folder = make()
    from_folder.learn_ranges()
    own = from_folder.range_parameters()
    from_folder.load_checkpoint(tmp_path / "c")
    assert torch.equal(output(from_folder), saved)
    assert all(p is q for p, q in zip(own, from_folder.range_parameters(), strict=True)), "an optimizer has them"


def test_a_state_that_does_not_fit_changes_nothing():
    sim = make()
    sim.learn_ranges()
    train(sim, 3)
    state = sim.state_dict()
    other = make()
    before = output(other)
    with pytest.raises(EncodingsError, match="not 'model' and 'simulation'.*sim.model.load_state_dict"):
        other.load_state_dict(sim.model.state_dict())
    damaged = copy.deepcopy(state)
    damaged["simulation"]["quantizers"]["fc.weight"]["learned"]["parameters"]["log_scale"][0] = math.nan
    with pytest.raises(EncodingsError, match="fc.weight: .*not one finite number per scale"):
        other.load_state_dict(damaged)
    damaged = copy.deepcopy(state)
    del damaged["model"]["fc.weight"]
    with pytest.raises(EncodingsError, match="the tensors do not fit the model"):
        other.load_state_dict(damaged)
    assert torch.equal(output(other), before) and not list(other.named_range_parameters())


def test_recalibration_keeps_the_parameters_of_the_optimizer():
    sim = make()
    calibrated = {n: s.encoding for n, s in sim.quantizers.items() if not s.quantizer.derived}
    sim.learn_ranges()
    own = sim.range_parameters()
    with torch.no_grad():
        for p in own:
            p.add_(0.1)
    sim.compute_encodings([X])
    assert all(p is q and not p.any() for p, q in zip(own, sim.range_parameters(), strict=True))
    assert {n: s.encoding for n, s in sim.quantizers.items() if not s.quantizer.derived} == calibrated


def test_a_copy_learns_on_its_own():
    sim = make()
    sim.learn_ranges()
    twin = copy.deepcopy(sim)
    before = output(sim)
    train(twin, 5)
    assert torch.equal(output(sim), before) and not torch.equal(output(twin), before)


def test_the_exported_file_has_the_learned_ranges(tmp_path: Path):
    sim = make(bits=8)
    sim.learn_ranges()
    train(sim, 10)
    sim.model.eval()
    sim.save_encodings(tmp_path / "e.json")
    sim.export(tmp_path, "net")
    assert sim.verify(X).ok
    other = make(bits=8)
    other.model.load_state_dict(sim.model.state_dict())
    other.load_encodings(tmp_path / "e.json")
    assert torch.equal(output(other), output(sim))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0])


def tagger() -> tuple[QuantizationSimModel, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 7, 5)
    sim = QuantizationSimModel(Tagger(), x)
    sim.compute_encodings([x])
    return sim, x


def test_grids_of_more_than_8_bits_are_learned_where_they_are_named():
    """A value at the end of 16 bits adds 32767 times its gradient: one step of SGD moved such a range off its tensor."""
    sim, _ = tagger()
    report = sim.learn_ranges()
    wide = {site.name for site in sim.quantizers.values() if site.encoding.format.bits == 16}
    assert wide and not wide.intersection(report.learned)
    assert all("more than 8 bits" in report.fixed[name] and "name it" in report.fixed[name] for name in wide)
    one = sorted(wide)[0]
    assert sim.learn_ranges(one).learned == (one,)
    assert one in sim.learn_ranges().learned  # it trains already


def test_ranges_inside_a_recurrent_layer_train():
    sim, x = tagger()
    before = output_of(sim, x)
    sim.learn_ranges(["*"])
    out = sim.model(x)
    assert torch.equal(out, before)
    out.square().sum().backward()
    grads = {n: p.grad for n, p in sim.named_range_parameters()}
    assert [n for n, g in grads.items() if g is None or not bool(g.isfinite().all())] == []


def output_of(sim: QuantizationSimModel, x: Tensor) -> Tensor:
    with torch.no_grad():
        return sim.model(x)


IMAGES = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def test_a_step_of_sgd_moves_a_range_by_a_bounded_part():
    """A gradient over a small scale threw ranges of 8 bits off their tensors within three steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))
    sim = QuantizationSimModel(model, x)
    sim.compute_encodings([x], progress=False)
    sim.learn_ranges()
    optimizer = torch.optim.SGD([{"params": list(sim.model.parameters())}, {"params": sim.range_parameters()}], lr=1e-2)
    losses = []
    for _ in range(8):
        before = [p.detach().clone() for p in sim.range_parameters()]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(sim.model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps = [float((p.detach() - b).abs().max()) for p, b in zip(sim.range_parameters(), before, strict=True)]
        assert max(steps) <= 0.1 + 1e-6
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_compiled_training_has_the_numbers_and_gradients_of_the_eager_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    sim = QuantizationSimModel(model, IMAGES, default_param_bw=4, default_output_bw=4)
    sim.compute_encodings([IMAGES])
    sim.learn_ranges()
    run = torch.compile(sim.model, backend="eager", fullgraph=True)
    parameters = [*sim.model.parameters(), *sim.range_parameters()]
    for step in range(2):
        found = []
        for call in (sim.model, run):
            for p in parameters:
                p.grad = None
            out = call(IMAGES)
            out.square().mean().backward()
            found.append([out.detach(), *(p.grad for p in parameters)])
        assert torch.equal(found[0][0], found[1][0]), step
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for p in sim.range_parameters():
                p.add_(0.05)


def test_ranges_of_values_near_nothing_keep_finite_gradients():
    """The square of such a scale is zero in float32."""
    encoding = Encoding(IntFormat(4, signed=False), np.float32(1e-25), np.int64(7), PerTensor())
    learned = LearnedRange("here", encoding, offset=True)
    x = (IMAGES * 1e-24).requires_grad_()
    learned.traced(x, weight=False).sum().backward()
    found = [x.grad, *(p.grad for p in learned.parameters().values())]
    assert all(torch.isfinite(grad).all() and grad.any() for grad in found)


ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def small_sim(*layers: nn.Module) -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(nn.Sequential(*(layers or (nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))).eval(), ROWS)
    sim.compute_encodings([ROWS])
    return sim


def train_small(sim: QuantizationSimModel, parameters: list[Tensor], forwards: int, accumulate: int = 1) -> None:
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for i in range(forwards):
        sim.model(ROWS).square().mean().backward()
        if i % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()


def test_an_optimizer_without_the_ranges_is_told_once(caplog):
    sim = small_sim()
    sim.learn_ranges()
    with caplog.at_level(logging.WARNING):
        train_small(sim, list(sim.model.parameters()), 3 * LOOK_EVERY)
    (record,) = caplog.records
    text = record.getMessage()
    assert (
        f"did not change in {LOOK_EVERY} forwards" in text
        and "add the group {'params': sim.range_parameters()}" in text
    )


def test_right_loops_are_not_told_of(caplog):
    with caplog.at_level(logging.WARNING):
        sim = small_sim()
        train_small(sim, list(sim.model.parameters()), 2 * LOOK_EVERY + 2)  # nothing is learned
        sim.learn_ranges()
        train_small(sim, [*sim.model.parameters(), *sim.range_parameters()], 2 * LOOK_EVERY + 2)
        sim = small_sim()
        sim.learn_ranges()
        everything = [*sim.model.parameters(), *sim.range_parameters()]
        train_small(sim, everything, 2 * LOOK_EVERY + 2, accumulate=4 * LOOK_EVERY)  # no step was taken yet
    assert not caplog.records


class Branch(nn.Module):
    """Two layers, of which the second is left out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if self.both else y


@pytest.mark.parametrize("form", ["made", "copied", "compiled"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_loops_that_clear_the_gradients_of_the_model_alone_train_as_others(form, accumulate):
    """As the Trainer of transformers does: gradients of ranges had summed up over all steps."""
    torch.compiler.reset()  # tests before may have used up the graphs that torch keeps of a function
    found = []
    for clears in ("optimizer", "model"):
        torch.manual_seed(0)
        sim = small_sim(Branch())
        sim.learn_ranges()
        sim = copy.deepcopy(sim) if form == "copied" else sim
        model = torch.compile(sim.model, backend="aot_eager") if form == "compiled" else sim.model
        branch = sim.model[0]
        optimizer = torch.optim.Adam([*sim.model.parameters(), *sim.range_parameters()], lr=1e-2)
        for i in range(4 * accumulate):
            # the short run of the compiled one has a graph per simulation, not two
            branch.both = i // accumulate != 2 or (form, accumulate) == ("compiled", 1)
            model(ROWS * (i + 1)).square().mean().backward()
            if i % accumulate == accumulate - 1:
                optimizer.step()
                (optimizer if clears == "optimizer" else sim.model).zero_grad()
        found.append([p.detach() for p in (*sim.model.parameters(), *sim.range_parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_ranges_that_rounding_froze_are_told_of(caplog):
    sim = small_sim()
    apply_gptq(sim, [ROWS], progress=False)
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
    sim = small_sim(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with caplog.at_level(logging.WARNING), torch.no_grad():
        sim.model(ROWS)
        reestimate_bn_stats(sim.model, [ROWS])
        assert not caplog.records
        sim.model.train()
        sim.model(ROWS)
        sim.model(ROWS)
    (record,) = caplog.records
    assert "1 batch norms normalise by each batch" in record.getMessage()
    assert "call sim.model.eval() before you evaluate it" in record.getMessage()


def test_the_guard_names_the_range_that_a_step_moved_off_its_tensor():
    sim = small_sim()
    sim.learn_ranges("*.weight")
    before = [p.detach().clone() for p in sim.range_parameters()]
    encoding = sim.quantizers["0.weight"].encoding
    guard = TrainingGuard(torch.optim.Adam(sim.range_parameters(), lr=100.0), sim=sim)
    with pytest.raises(ModelError, match=r"0.weight: its learned scale is e\^100.0 times .* lower the learning rate"):
        guard.step(sim.model(ROWS).square().mean())
    assert all(torch.equal(p, q) for p, q in zip(sim.range_parameters(), before, strict=True))
    assert sim.quantizers["0.weight"].encoding == encoding and bool(sim.model(ROWS).isfinite().all())


def test_a_gradient_that_is_not_finite_leaves_the_ranges_alone():
    sim = small_sim()
    sim.learn_ranges()
    guard = TrainingGuard(torch.optim.Adam([*sim.model.parameters(), *sim.range_parameters()], lr=1e-2), sim=sim)
    assert guard.step(sim.model(ROWS).square().mean())
    before = [p.detach().clone() for p in sim.range_parameters()]
    assert not guard.step((sim.model(ROWS) * torch.nan).sum())
    assert not guard.step((sim.model(ROWS) - sim.model(ROWS).detach()).sqrt().sum())
    assert guard.reasons == {"loss": 1, "gradient": 1}
    assert all(torch.equal(p, q) for p, q in zip(sim.range_parameters(), before, strict=True))


def test_weights_that_are_computed_anew_in_each_forward_have_learned_ranges_too():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    sim = small_sim(layer, nn.ReLU(), nn.Linear(4, 2))
    report = sim.learn_ranges(init="lsq")
    (name,) = [n for n in report.learned if n.startswith("0") and sim.quantizers[n].role == "weight"]
    scale = torch.from_numpy(sim.quantizers[name].encoding.scale.copy())
    qmax = sim.quantizers[name].encoding.format.qmax
    torch.testing.assert_close(scale, 2 * sim.model[0].weight.detach().abs().mean(1) / qmax**0.5)
    first = float(sim.model(ROWS).square().mean().detach())
    train_small(sim, [*sim.model.parameters(), *sim.range_parameters()], 20)
    assert float(sim.model(ROWS).square().mean().detach()) < first
    sim.model(ROWS).square().mean().backward()
    assert all(p.grad is not None for p in sim.range_parameters())


def test_what_was_made_under_inference_mode_trains_as_what_was_not(tmp_path):
    def losses(context):
        with context():
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
            sim = QuantizationSimModel(model.eval(), ROWS)
            sim.compute_encodings([ROWS], progress=False)
            sim.save_encodings(tmp_path / "encodings.json")
            sim.load_encodings(tmp_path / "encodings.json")
            sim.learn_ranges()
            sim.model(ROWS)
            sim = copy.deepcopy(sim)
            sim.model(ROWS)
        optimizer = torch.optim.Adam([*sim.model.parameters(), *sim.range_parameters()], lr=1e-3)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = sim.model(ROWS).square().mean()
            loss.backward()
            optimizer.step()
            with context():
                sim.model(ROWS)
            found.append(float(loss.detach()))
        return found

    expected = losses(torch.no_grad)
    assert expected[2] < expected[0]
    assert losses(torch.inference_mode) == expected
