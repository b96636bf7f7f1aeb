"""One quantized network, trained in every way that people train: the loop changes, the network and its ranges do not.

    python examples/train_with.py loop                 a loop of one's own, with learned ranges
    python examples/train_with.py checkpoint           activation checkpointing, without re-entering autograd
    python examples/train_with.py reentrant            the older variant of it
    python examples/train_with.py compile              torch.compile of the simulated model
    python examples/train_with.py accelerate           Hugging Face accelerate
    python examples/train_with.py trainer              the Trainer of transformers
    python examples/train_with.py lightning            Lightning
    torchrun --standalone --nproc-per-node 2 examples/train_with.py fsdp2

``examples/train_ddp.py`` is the same with DistributedDataParallel. Everything runs on the CPU and takes less than a minute.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwright.torch import QuantizationSimModel, TrainingGuard, fold_all_batch_norms

sys.path.insert(0, str(Path(__file__).parent))
from quickstart import Batches, DigitNet, accuracy, digits, train

STEPS = 24


class Checkpointed(DigitNet):
    """The network, whose depthwise-separable block is computed again in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[N, 1, 8, 8]`` -> logits ``[N, 10]``."""
        x = self.body(self.stem(x))
        x = x + checkpoint(lambda y: self.pointwise(self.depthwise(y)), x, use_reentrant=self.reentrant)
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


class Reentrant(Checkpointed):
    """The same by the older variant."""

    reentrant = True


def simulated(training: Batches, network: type[DigitNet] = DigitNet) -> QuantizationSimModel:
    """A trained float network, folded, simulated with 4-bit weights and calibrated."""
    torch.manual_seed(0)
    model = network(width=8)
    train(model, training, epochs=3)
    fold_all_batch_norms(model, dummy_input=training[0][0])
    sim = QuantizationSimModel(model, training[0][0], preset="w4a8")
    sim.compute_encodings([images for images, _ in training], progress=False)
    return sim


def optimizer_for(sim: QuantizationSimModel) -> torch.optim.Optimizer:
    """Weights, and ranges in a group of their own."""
    sim.learn_ranges()
    groups = [{"params": list(sim.model.parameters())}, {"params": sim.range_parameters(), "lr": 3e-3}]
    return torch.optim.Adam(groups, lr=5e-4)


def steps_of(training: Batches) -> Batches:
    """The batches of all steps."""
    return [training[i % len(training)] for i in range(STEPS)]


class Examples(torch.utils.data.Dataset[Any]):
    """Single images and labels, as trainers want them."""

    def __init__(self, batches: Batches) -> None:
        self.images, self.labels = (torch.cat(part) for part in zip(*batches, strict=True))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.images[index], "labels": self.labels[index]}


# ------------------------------------------------------------------------------------------------ the ways


def loop(sim: QuantizationSimModel, training: Batches, call: nn.Module | None = None) -> None:
    """A loop of one's own; ``call`` is what wraps the simulated model."""
    guard = TrainingGuard(optimizer_for(sim), sim=sim)
    model = sim.model if call is None else call
    model.train()
    for images, labels in steps_of(training):
        guard.step(nn.functional.cross_entropy(model(images), labels))


def compiled(sim: QuantizationSimModel, training: Batches) -> None:
    """``aot_eager`` gives the simulation's numbers bit for bit; ``inductor``, the default, wants a C++ compiler."""
    loop(sim, training, torch.compile(sim.model, backend="aot_eager", fullgraph=True))  # type: ignore[arg-type]


def with_accelerate(sim: QuantizationSimModel, training: Batches) -> None:
    """The model, the optimizer and the data are prepared; the parameters of the ranges lie in the optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(Examples(steps_of(training)), 50)
    model, optimizer, loader = accelerator.prepare(sim.model, optimizer_for(sim), loader)
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(batch["x"]), batch["labels"]))
        optimizer.step()


def with_trainer(sim: QuantizationSimModel, training: Batches) -> None:
    """Trainer saves the weights of ``sim.model`` as those of any model; ``sim.save_checkpoint`` has the ranges too."""
    from transformers import Trainer, TrainingArguments

    def loss(model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:
        logits = model(inputs["x"])
        found = nn.functional.cross_entropy(logits, inputs["labels"])
        return (found, logits) if return_outputs else found

    class DigitTrainer(Trainer):
        compute_loss = staticmethod(loss)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=50, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, remove_unused_columns=False, seed=0,
        )  # fmt: skip
        DigitTrainer(
            model=sim.model, args=arguments, train_dataset=Examples(training), optimizers=(optimizer_for(sim), None)
        ).train()


def with_lightning(sim: QuantizationSimModel, training: Batches) -> None:
    """The module holds the simulated model as an attribute."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = sim.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return optimizer_for(sim)

    loader = torch.utils.data.DataLoader(Examples(steps_of(training)), 50)
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        ).fit(Module(), loader)  # fmt: skip


def fully_sharded(sim: QuantizationSimModel, training: Batches) -> None:
    """FSDP2 after calibration: every process keeps a part of each weight, and all of the ranges."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    for block in (sim.model.stem, sim.model.body, sim.model.depthwise, sim.model.pointwise, sim.model.head):
        fully_shard(block, mesh=mesh)
    fully_shard(sim.model, mesh=mesh)
    optimizer = optimizer_for(sim)  # made of the parts that a process keeps
    sim.model.train()
    for images, labels in steps_of(training):
        optimizer.zero_grad()
        mine = images.chunk(count)[rank], labels.chunk(count)[rank]
        nn.functional.cross_entropy(sim.model(mine[0]), mine[1]).backward()
        optimizer.step()


Way = Callable[[QuantizationSimModel, Batches], None]
WAYS: dict[str, tuple[Way, type[DigitNet]]] = {
    "loop": (loop, DigitNet),
    "checkpoint": (loop, Checkpointed),
    "reentrant": (loop, Reentrant),
    "compile": (compiled, DigitNet),
    "accelerate": (with_accelerate, DigitNet),
    "trainer": (with_trainer, DigitNet),
    "lightning": (with_lightning, DigitNet),
    "fsdp2": (fully_sharded, DigitNet),
}


def main(name: str) -> tuple[float, float]:
    """Accuracy in percent before and after training."""
    torch.set_num_threads(1)
    if name == "fsdp2":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    training, test = digits()
    way, network = WAYS[name]
    sim = simulated(training, network)
    before = accuracy(sim.model, test)
    ranges = copy.deepcopy(sim.quantizers["head.weight"].encoding)
    way(sim, training)
    sim.model.eval()
    after = accuracy(sim.model, test)
    assert sim.quantizers["head.weight"].encoding != ranges, "the ranges trained too"
    if name == "fsdp2":
        dist.barrier()
        dist.destroy_process_group()
    return before, after


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in WAYS:
        sys.exit(f"usage: train_with.py {'|'.join(WAYS)}")
    first, last = main(sys.argv[1])
    sys.stdout.write(f"{sys.argv[1]}: {first:.2f} % before, {last:.2f} % after training\n")
    sys.stdout.flush()
