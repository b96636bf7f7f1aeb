"""Simulated models in the loops that people write and those of trainer packages; a NaN costs one step."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitwright.core.numerics.affine import fake_quantize
from bitwright.errors import ConfigError, ModelError
from bitwright.torch import QuantizationSimModel, TrainingGuard
from bitwright.torch.quantizers.learned_range import LearnedRange
from tests.support.simulations import calibrated


def make(width: int = 8) -> tuple[QuantizationSimModel, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(4)]
    sim = calibrated(QuantizationSimModel(model.eval(), data[0][0], preset="w4a8"), [x for x, _ in data])
    sim.model.train()
    return sim, data


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    sim, data = make()
    whole = tuple(torch.cat(part) for part in zip(*data, strict=True))
    loss_of(sim.model, whole).backward()
    expected = [p.grad for p in sim.model.parameters()]
    sim.model.zero_grad()
    for batch in data:
        (loss_of(sim.model, batch) / len(data)).backward()
    for p, grad in zip(sim.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_an_average_of_the_weights_is_simulated_too() -> None:
    sim, data = make()
    average = torch.optim.swa_utils.AveragedModel(
        sim.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        loss_of(sim.model, batch).backward()
        nn.utils.clip_grad_norm_(sim.model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(sim.model)
    average.eval()
    x = data[0][0]
    found = average(x)
    with torch.no_grad():  # the average on the grids of the simulation: the same as its weights put there
        for own, mean in zip(sim.model.parameters(), average.module.parameters(), strict=True):
            assert not torch.equal(own, mean)
            own.copy_(mean)
    torch.testing.assert_close(found, sim.model.eval()(x), rtol=0, atol=0)
    with torch.no_grad(), sim.in_float():
        assert not torch.equal(found, sim.model(x))


def test_a_scaler_of_gradients_and_autocast() -> None:
    sim, data = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.1)
    before = copy.deepcopy(sim.model.state_dict())
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(sim.model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(sim.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.isfinite(p).all() for p in sim.model.parameters())
    assert not torch.equal(before["0.weight"], sim.model.state_dict()["0.weight"])


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_modules_in_half_precision_train_on_the_grid_of_float32(dtype: torch.dtype, learned: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    x = torch.randn(8, 6, dtype=dtype)
    sim = calibrated(QuantizationSimModel(model.eval(), x, preset="w4a8"), [x])
    if learned:
        sim.learn_ranges()
    sim.model.train()
    ranges = sim.range_parameters() if learned else []
    optimizer = torch.optim.SGD([*sim.model.parameters(), *ranges], lr=1e-3)
    sim.model(x).float().square().sum().backward()
    for p in sim.model.parameters():
        assert p.grad is not None and p.grad.dtype == dtype and torch.isfinite(p.grad).all()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in ranges)
    optimizer.step()
    weight = sim.quantizers["0.weight"]
    assert weight.encoding is not None
    on_grid = fake_quantize(model[0].weight.detach().float().numpy(), weight.encoding)
    found = weight.quantizer(model[0].weight).detach()
    assert found.dtype == dtype and torch.equal(found, torch.from_numpy(on_grid).to(dtype))


class Residual(nn.Module):
    """Sums that write over what a layer, a quantizer or an activation gave them."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.first, self.second, self.norm = (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.first(x), inplace=self.in_place)
        out = self.norm(self.second(y))
        if self.in_place:
            out += y
            out = nn.functional.relu_(out)
            out.add_(y, alpha=0.5)
        else:
            out = nn.functional.relu(out + y)
            out = torch.add(out, y, alpha=0.5)
        return self.head(out.mean((2, 3)))


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("size", [8, 40], ids=["separate passes", "compiled loops"])
def test_additions_in_place_have_the_gradients_of_others(learned: bool, size: int) -> None:
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    found = []
    for in_place in (True, False):
        torch.manual_seed(0)
        sim = calibrated(QuantizationSimModel(Residual(in_place).eval(), x, preset="w4a8"), [x])
        if learned:
            sim.learn_ranges()
        sim.model.train()
        out = sim.model(x)
        out.square().sum().backward()
        ranges = [p.grad for p in sim.range_parameters()] if learned else []
        found.append((out, *(p.grad for p in sim.model.parameters()), *ranges))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_step_on_a_gpu_is_that_on_the_cpu() -> None:
    sim, data = make()
    loss_of(sim.model, data[0]).backward()
    expected = [p.grad for p in sim.model.parameters()]
    sim.model.zero_grad()
    sim.model.cuda()
    loss_of(sim.model, tuple(part.cuda() for part in data[0])).backward()
    for p, grad in zip(sim.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.cpu(), grad, rtol=1e-3, atol=1e-5)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = (torch.cat(part) for part in zip(*data, strict=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


def plain(sim: QuantizationSimModel, loader: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.1)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(sim.model, (batch["x"], batch["labels"])).backward()
        optimizer.step()
    return [p.detach() for p in sim.model.parameters()]


@pytest.mark.slow
def test_accelerate_trains_as_a_plain_loop() -> None:
    accelerate = pytest.importorskip("accelerate")
    sim, data = make()
    expected = plain(copy.deepcopy(sim), torch.utils.data.DataLoader(Rows(data), 8))
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Rows(data), 8)
    model, optimizer, loader = accelerator.prepare(sim.model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, (batch["x"], batch["labels"])))
        optimizer.step()
    assert all(torch.equal(p, e) for p, e in zip(sim.model.parameters(), expected, strict=True))


@pytest.mark.slow
def test_lightning_trains_as_a_plain_loop(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.model, (batch["x"], batch["labels"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    sim, data = make()
    loader = torch.utils.data.DataLoader(Rows(data), 8)
    expected = plain(copy.deepcopy(sim), loader)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(sim.model), loader)
    assert all(torch.equal(p, e) for p, e in zip(sim.model.parameters(), expected, strict=True))


@pytest.mark.slow
def test_the_trainer_of_transformers_with_checkpointing_trains_as_without(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, num_labels=2,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(32, (6,), generator=generator), "labels": torch.tensor(i % 2)} for i in range(8)
    ]
    batch = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
    sim = calibrated(QuantizationSimModel(transformers.BertForSequenceClassification(config).eval(), batch), [batch])
    found = []
    for checkpointing in (False, True):
        one = copy.deepcopy(sim)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(checkpointing)), max_steps=2, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, gradient_checkpointing=checkpointing, seed=3,
        )  # fmt: skip
        transformers.Trainer(model=one.model, args=arguments, train_dataset=rows).train()
        assert not one._simulator.unseen
        found.append(one.model.state_dict())
    changed = [name for name, value in found[0].items() if not torch.equal(value, sim.model.state_dict()[name])]
    assert changed and all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def stepper(sim: QuantizationSimModel) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [*sim.model.parameters()]}, {"params": sim.range_parameters()}], lr=3e-3)


def everything(sim: QuantizationSimModel) -> list[Tensor]:
    return [p.detach().clone() for p in (*sim.model.parameters(), *sim.range_parameters())]


class WithLoss(nn.Module):
    """A network as trainers want it: ``x`` and ``labels`` by name, and the loss in front of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.body(x)
        return y if labels is None else (nn.functional.cross_entropy(y, labels), y)


def learning() -> tuple[QuantizationSimModel, Rows]:
    rows = Rows(make()[1])
    torch.manual_seed(0)
    sim = calibrated(QuantizationSimModel(WithLoss().eval(), rows.x, preset="w4a8"), [rows.x])
    sim.learn_ranges()
    return sim, rows


@pytest.mark.slow
def test_the_trainer_of_transformers_goes_on_with_learned_ranges(tmp_path: Path) -> None:
    """With the callback of docs/training-with.md: three steps and three more are six, bit for bit."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class KeepRanges(transformers.TrainerCallback):
        def __init__(self, sim: QuantizationSimModel) -> None:
            self.sim = sim

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.sim.save_checkpoint(Path(args.output_dir, f"checkpoint-{state.global_step}", "sim"))

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                self.sim.load_checkpoint(Path(args.output_dir, f"checkpoint-{state.global_step}", "sim"))

    def trained(start: str | None) -> list[Tensor]:
        sim, rows = learning()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=8, use_cpu=True, report_to=[],
            save_strategy="steps", save_steps=3, disable_tqdm=True, seed=0,
        )  # fmt: skip
        transformers.Trainer(
            model=sim.model, args=arguments, train_dataset=rows, optimizers=(stepper(sim), None), callbacks=[KeepRanges(sim)]
        ).train(resume_from_checkpoint=start)  # fmt: skip
        return everything(sim)

    whole = trained(None)
    again = trained(str(tmp_path / "checkpoint-3"))
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


@pytest.mark.slow
def test_accelerate_goes_on_with_learned_ranges(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def prepared() -> tuple[Any, ...]:
        sim, rows = learning()
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.register_for_checkpointing(sim)
        loader = torch.utils.data.DataLoader(rows, 8)
        return sim, accelerator, *accelerator.prepare(sim.model.train(), stepper(sim), loader)

    def train(sim: Any, accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[Tensor]:
        torch.manual_seed(1)  # of the dropout
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)[0])
            optimizer.step()
        return everything(sim)

    first = prepared()
    train(*first)
    first[1].save_state(str(tmp_path / "state"))
    whole = train(*first)
    second = prepared()
    second[1].load_state(str(tmp_path / "state"))
    assert all(torch.equal(one, other) for one, other in zip(whole, train(*second), strict=True))


def test_a_bad_loss_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    guard = TrainingGuard(optimizer)
    assert guard.step(model(torch.ones(3, 4)).pow(2).sum())
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert not guard.step(model(torch.full((3, 4), math.nan)).pow(2).sum())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(optimizer.state_dict()["state"][0].values(), state["state"][0].values(), strict=True)
    )
    assert all(p.grad is None for p in model.parameters())
    assert repr(guard) == "TrainingGuard(1 steps, 1 skipped: 1 loss)"


def test_a_bad_gradient_changes_nothing() -> None:
    weight = nn.Parameter(torch.zeros(3))
    guard = TrainingGuard(torch.optim.SGD([weight], lr=0.1))
    assert not guard.step(weight.sqrt().sum())  # finite, with an infinite slope
    assert torch.equal(weight, torch.zeros(3)) and guard.reasons == {"gradient": 1}


def test_gradients_are_clipped() -> None:
    weight = nn.Parameter(torch.zeros(4))
    guard = TrainingGuard(torch.optim.SGD([weight], lr=1.0), max_norm=0.5)
    assert guard.step((100 * weight).sum())
    assert float(weight.detach().norm()) == pytest.approx(0.5, rel=1e-5) and guard.norm == pytest.approx(200)
    free = nn.Parameter(torch.zeros(4))
    assert TrainingGuard(torch.optim.SGD([free], lr=1.0), max_norm=None).step((100 * free).sum())
    assert float(free.detach().norm()) == pytest.approx(200)


def test_too_many_in_a_row_stop_the_training() -> None:
    weight = nn.Parameter(torch.ones(2))
    guard = TrainingGuard(torch.optim.SGD([weight], lr=1.0), patience=2)
    for value in (math.nan, 1.0, math.inf, math.nan):
        guard.step((weight * value).sum())
    with pytest.raises(ModelError, match="3 steps in a row had a loss that is not finite"):
        guard.step((weight * math.nan).sum())
    with pytest.raises(ConfigError, match="max_norm=0 is not a norm"):
        TrainingGuard(torch.optim.SGD([weight], lr=1.0), max_norm=0)


def test_a_simulation_survives_a_bad_batch() -> None:
    torch.manual_seed(0)
    data = [torch.randn(8, 6) for _ in range(6)]
    sim = calibrated(QuantizationSimModel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), data[0]), data)
    encodings = {name: site.encoding for name, site in sim.quantizers.items()}
    guard = TrainingGuard(torch.optim.SGD(sim.model.parameters(), lr=0.05))
    data[3][2, 1] = math.nan
    for x in data:
        guard.step(sim.model(x).pow(2).mean())
    assert (guard.steps, guard.skipped) == (5, 1)
    assert all(torch.isfinite(p).all() for p in sim.model.parameters())
    for name, site in sim.quantizers.items():
        if not site.quantizer.derived:
            assert site.encoding == encodings[name]
        assert np.isfinite(site.encoding.scale).all()


class InPlace(nn.Module):
    """A sum in place on what is only quantized where it is read: the scores of an attention divided by a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, in_place: bool = True) -> torch.Tensor:
        scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2)) / 2.0
        bias = self.q(x) @ x.T
        if in_place:
            scores += bias
        else:
            scores = scores + bias
        return scores @ x


def test_a_value_that_is_quantized_where_it_is_read_may_be_overwritten_there() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    sims = []
    for in_place in (True, False):
        sim = calibrated(QuantizationSimModel(InPlace(), (x, in_place)), [(x, in_place)])
        sim.model.train()
        out = sim.model(x, in_place)
        out.square().sum().backward()
        sims.append((out, sim.model.q.weight.grad, sim.model.k.weight.grad))
    assert "add.input[0]" in sim.quantizers
    for one, other in zip(*sims, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("preset", ["w8a8", "w4a8", "fp8"])
def test_sparse_gradients_of_embeddings_stay_sparse_and_right(preset: str) -> None:
    grads = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 3))
        x = torch.tensor([[1, 3], [3, 9]])
        sim = calibrated(QuantizationSimModel(model, x, preset=preset), [x])
        optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(model[0].parameters(), lr=0.1)
        sim.model.train()
        sim.model(x).square().sum().backward()
        grads.append(sim.model[0].weight.grad)
        optimizer.step()
    assert grads[0].is_sparse and torch.equal(grads[0].to_dense(), grads[1])
    assert grads[1].abs().sum() > 0


def test_gradients_of_ranges_do_not_take_the_room_of_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of small scales are thousands of times larger, where unbounded: in one norm the model would stand still."""
    monkeypatch.setattr(LearnedRange, "bounded", False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    x = torch.randn(16, 6)
    sim = calibrated(QuantizationSimModel(model.eval(), x, preset="w4a8"), [x])
    sim.learn_ranges()
    parameters = list(sim.model.parameters())
    before = [p.detach().clone() for p in parameters]
    groups = [{"params": parameters}, {"params": sim.range_parameters(), "lr": 0.0}]
    guard = TrainingGuard(torch.optim.SGD(groups, lr=1.0), max_norm=0.5, sim=sim)
    assert guard.step(100 * sim.model(x).square().sum())
    moved = torch.cat([(p.detach() - q).flatten() for p, q in zip(parameters, before, strict=True)])
    assert guard.range_norm > 100 * guard.norm > 50
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4)
