"""A model is pruned between training steps; optimizers go on with what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitwright
from bitwright.compression.schedule import CompressionSchedule
from bitwright.compression.training import TrainingPruner
from bitwright.errors import CalibrationError, ConfigError
from bitwright.torch import rebuild

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, :3] - X[:, 3:6]).argmax(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


def loss_of(net: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(net(X), Y)


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, 5e-3),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_prunes_in_steps_and_goes_on(name: str) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    schedule = CompressionSchedule(0.3, "iterative", steps=3, first=20, every=20)
    pruner = TrainingPruner(net, [X], schedule, optimizer, widths=1, ranking="uniform")
    whole, found, momenta = bitwright.model_costs(net, [X])["macs"], [], set()
    for _ in range(120):
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        optimizer.step()
        state = optimizer.state[net.b.weight]
        momenta.update(tuple(t.shape) for t in state.values() if isinstance(t, torch.Tensor) and t.dim() == 2)
        if pruner.step() is not None:
            found.append(bitwright.model_costs(net, [X])["macs"] / whole)
            for p, held in optimizer.state.items():
                assert all(t.shape == p.shape for t in held.values() if isinstance(t, torch.Tensor) and t.dim())
    assert len(found) == 3 and all(f <= p for f, p in zip(found, schedule.parts(), strict=True)) and found[-1] > 0.2
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in net.parameters()} and len(momenta) == 4 and net.training
    assert float(loss_of(net)) < 0.3
    again = rebuild(Net(), {"format": 1, "steps": pruner.steps})
    again.load_state_dict(net.state_dict())
    torch.testing.assert_close(again(X), net(X))


def test_momenta_keep_the_values_of_what_is_left() -> None:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.0, momentum=0.9)
    loss_of(net).backward()
    optimizer.step()
    before = optimizer.state[net.b.weight]["momentum_buffer"].clone()
    pruner = TrainingPruner(net, [X], CompressionSchedule(0.5), optimizer, widths=1, ranking="uniform")
    result = pruner.step()
    assert result is not None
    gone = {row.name: list(row.removed) for row in result.rows}
    rows = [i for i in range(32) if i not in gone["b"]]
    columns = [i for i in range(32) if i not in gone["a"]]
    torch.testing.assert_close(optimizer.state[net.b.weight]["momentum_buffer"], before[rows][:, columns])


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="the schedule says what may be left"):
        TrainingPruner(Net(), [X], CompressionSchedule(0.5), macs=0.5)
    with pytest.raises(CalibrationError, match="held no batch"):
        TrainingPruner(Net(), [], CompressionSchedule(0.5))


def _by_trainer(net: nn.Module, make: Any, tmp_path: Path) -> list[Any]:
    transformers = pytest.importorskip("transformers")
    found: list[Any] = []

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    class Prune(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            self.pruner = make(optimizer)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append(self.pruner.step())

    options = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=8,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    transformers.Trainer(Wrapped(), options, train_dataset=rows, callbacks=[Prune()]).train()
    return found


def _by_lightning(net: nn.Module, make: Any, tmp_path: Path) -> list[Any]:
    lightning = pytest.importorskip("lightning")
    found: list[Any] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), 1e-3)

        def on_train_start(self) -> None:
            self.pruner = make(self.optimizers())

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            found.append(self.pruner.step())

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)
    lightning.Trainer(
        max_steps=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    ).fit(Module(), loader)  # fmt: skip
    return found


def _by_accelerate(net: nn.Module, make: Any, tmp_path: Path) -> list[Any]:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-3))
    pruner, found = make(optimizer), []
    for _ in range(8):
        accelerator.backward(loss_of(model))
        optimizer.step()
        found.append(pruner.step())
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "trainer", [_by_trainer, _by_lightning, _by_accelerate], ids=["trainer", "lightning", "accelerate"]
)
def test_trainers_step_the_schedule(trainer: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    whole = bitwright.model_costs(net, [X])["macs"]
    schedule = CompressionSchedule(0.5, "iterative", steps=2, first=2, every=3)
    found = trainer(
        net, lambda optimizer: TrainingPruner(net, [X], schedule, optimizer, widths=1, ranking="uniform"), tmp_path
    )
    assert [result is not None for result in found] == [i in (2, 5) for i in range(8)]
    assert bitwright.model_costs(net, [X])["macs"] <= 0.5 * whole
