"""Train a quantized network on several processes: calibrated together, trained under DDP with learned ranges, saved once.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py [FOLDER]

``--standalone`` takes a free port. Every process calibrates on its part of the digits and trains on its part of every batch; the
encodings, the weights and the learned ranges are the same on all of them. It also runs as one process, ``python
examples/train_ddp.py``. Everything runs on the CPU and takes less than a minute.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bitwright.torch import QuantizationSimModel, TrainingGuard, fold_all_batch_norms

sys.path.insert(0, str(Path(__file__).parent))
from quickstart import DigitNet, accuracy, digits, train


def main(folder: Path | None = None, steps: int = 24) -> tuple[float, float, str]:
    """Accuracy in percent before and after training the quantized network, and a digest of all that was trained."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:  # a rank that ends, or does not come in time, is an error on the others
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, count = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    training, test = digits()
    model = DigitNet(width=8)
    train(model, training, epochs=3)  # one seed, so every process trains the same float network
    fold_all_batch_norms(model, dummy_input=training[0][0])
    sim = QuantizationSimModel(model, training[0][0], preset="w4a8")
    sim.compute_encodings([images for images, _ in training[rank::count]], progress=False)
    sim.learn_ranges()
    before = accuracy(sim.model, test)

    call = nn.parallel.DistributedDataParallel(sim.model) if several else sim.model
    groups = [{"params": list(sim.model.parameters())}, {"params": sim.range_parameters(), "lr": 3e-3}]
    guard = TrainingGuard(torch.optim.Adam(groups, lr=5e-4), sim=sim)
    call.train()
    for step in range(steps):
        images, labels = (part.chunk(count)[rank] for part in training[step % len(training)])
        guard.step(nn.functional.cross_entropy(call(images), labels))
    sim.model.eval()
    after = accuracy(sim.model, test)

    trained = [*sim.model.parameters(), *sim.range_parameters()]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trained)).hexdigest()
    if folder is not None and rank == 0:
        sim.save_checkpoint(folder)
    if several:
        dist.barrier()  # nobody leaves before the checkpoint is written
        dist.destroy_process_group()
    return before, after, digest


if __name__ == "__main__":
    place = int(os.environ.get("RANK", "0"))
    first, last, content = main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    sys.stdout.write(
        f"rank {place}: {first:.2f} % before, {last:.2f} % after training, all parameters {content[:16]}\n"
    )
    sys.stdout.flush()
