"""What several ranks do together, each a process; run by the tests of this folder as ``python -m tests.torch.training.ranks``.

One process imports torch and forks the ranks of every case; what a rank returns is printed as JSON, by case and rank.
"""

from __future__ import annotations

import copy
import datetime
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwright import compress
from bitwright.core.numerics.spec import RangeMethod
from bitwright.errors import BitwrightError
from bitwright.torch import (
    QuantizationSimModel,
    TrainingGuard,
    apply_gptq,
    gather_batches,
    quantize,
    reestimate_bn_stats,
)
from tests.support.simulations import calibrated

BATCHES = 6


class Net(nn.Module):
    """Convolutions, a recurrent layer and products: statistics of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lstm = nn.Conv2d(2, 4, 3, padding=1), nn.LSTM(4, 5, batch_first=True)
        self.fc, self.unused = nn.Linear(5, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu().mean(3).transpose(1, 2)
        return self.fc(torch.tanh(self.lstm(y)[0][:, -1]))


def batches() -> list[Tensor]:
    """Of different sizes, lengths and ranges, one of them with a channel that is zero throughout."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(1 + i % 3, 2, 4 + i, 5, generator=generator) * 3.0**i / 100 for i in range(BATCHES)]
    found[2][:, 1] = 0
    return found


def simulation(scheme: str = "tf_enhanced") -> QuantizationSimModel:
    method = RangeMethod.of("percentile", {"percentile": 99.0}) if scheme == "percentile" else scheme
    return QuantizationSimModel(
        Net().eval(), batches()[0], quant_scheme=method, default_output_bw=4, default_param_bw=4
    )


def digest(sim: QuantizationSimModel) -> str:
    """Everything that calibration found."""
    found = hashlib.sha256()
    for name, site in sim.quantizers.items():
        encoding, seen = site.encoding, site.channels.seen
        found.update(name.encode())
        if encoding is not None:
            found.update(encoding.scale.tobytes() + encoding.zero_point.tobytes())
        found.update(repr((site.enabled, site.quantizer.empty)).encode())
        if seen is not None:
            found.update(seen.index.tobytes() + seen.value.tobytes())
    found.update(repr(sorted(sim._simulator.lengths.items())).encode())
    return found.hexdigest()


def spread(how: str, rank: int, count: int) -> list[Tensor]:
    """The batches of one rank: each in turn, all on the last rank, or in blocks of unlike sizes."""
    data = batches()
    if how == "last":
        return data if rank == count - 1 else []
    if how == "blocks":
        ends = [0, *(min(BATCHES, 4 + i) for i in range(count - 1)), BATCHES]
        return data[ends[rank] : ends[rank + 1]]
    return data[rank::count]


def calibrate(how: str, scheme: str) -> Callable[[int, int], str]:
    def run(rank: int, count: int) -> str:
        sim = calibrated(simulation(scheme), spread(how, rank, count))
        return digest(sim)

    return run


def in_parts(rank: int, count: int) -> str:
    sim = simulation()
    mine = spread("turns", rank, count)
    sim.compute_encodings(mine[:1], progress=False)
    sim.compute_encodings(mine[1:], progress=False, resume=True)
    return digest(sim)


def resumed_calibration_counts_once(rank: int, count: int) -> int:
    """Values seen at one site after a calibration in two parts."""
    sim = simulation()
    mine = spread("turns", rank, count)
    sim.compute_encodings(mine[:1], progress=False)
    sim.compute_encodings(mine[1:], progress=False, resume=True)
    return int(sim.quantizers["conv.input[0]"].quantizer.statistics.bounds.count)


def alone(rank: int, count: int) -> str:
    sim = simulation()
    if rank == 0:
        sim.compute_encodings(batches(), progress=False, distributed=False)
    return digest(sim)


def with_nan(rank: int, count: int) -> str:
    sim, mine = simulation(), spread("turns", rank, count)
    sim.compute_encodings(mine, progress=False)
    before = digest(sim)
    if rank == 1:
        mine[1][0, 0, 0, 0] = torch.nan
    try:
        sim.compute_encodings(mine, progress=False)
    except BitwrightError as error:
        return f"{error} | {digest(sim) == before}"
    return "no error"


def message(function: Callable[[int], Any]) -> Callable[[int, int], str]:
    def run(rank: int, count: int) -> str:
        try:
            function(rank)
        except (BitwrightError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return run


def dies(rank: int) -> None:
    sim = simulation()
    if rank == 1:
        os._exit(0)
    sim.compute_encodings(batches(), progress=False)


def until_the_other_ends(case: str) -> None:
    """Return once rank 0 has given up, however slow the machine is."""
    while not Path(os.environ["RANKS_FOLDER"], f"{case}.0").exists():
        time.sleep(0.1)


def stays_away(rank: int) -> None:
    sim = simulation()
    if rank == 1:
        until_the_other_ends("stays away")
        return
    sim.compute_encodings(batches(), progress=False)


def other_weights(rank: int) -> None:
    sim = simulation()
    with torch.no_grad():
        sim.model.fc.weight.add_(rank)
    sim.compute_encodings(batches(), progress=False)


def other_model(rank: int) -> None:
    model: nn.Module = Net() if rank else nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU())
    QuantizationSimModel(model.eval(), batches()[0]).compute_encodings(batches(), progress=False)


def no_data(rank: int) -> None:
    simulation().compute_encodings([], progress=False)


# ------------------------------------------------------------------------------------------------ training


def data_of_step(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(4, 2, 6, 5, generator=generator), torch.randint(3, (4,), generator=generator)


def steps(call: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, rank: int, count: int) -> None:
    """Training steps on this rank's part of each batch."""
    call.train()
    for step in range(first, last):
        x, y = (part.chunk(count)[rank] for part in data_of_step(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(call(x), y).backward()
        optimizer.step()


def parameters(sim: QuantizationSimModel) -> dict[str, list[float]]:
    """Of the model and of the ranges that train."""
    named = (*sim.model.named_parameters(), *sim.named_range_parameters())
    return {name: p.detach().flatten().tolist() for name, p in named}


def optimizer_of(sim: QuantizationSimModel) -> torch.optim.Optimizer:
    return torch.optim.Adam([*sim.model.parameters(), *sim.range_parameters()], lr=0.01)


def learning(rank: int, count: int, **options: Any) -> tuple[QuantizationSimModel, torch.optim.Optimizer]:
    """A calibrated simulation with ranges that train, and an optimizer of all its parameters."""
    sim = calibrated(simulation(), spread("turns", rank, count))
    sim.learn_ranges(**options)
    return sim, optimizer_of(sim)


def gradients(sim: QuantizationSimModel, rank: int, count: int, passes: int) -> dict[str, list[float]]:
    """Of the ranges, after some backward passes of which DDP averages only the last."""
    call = wrapped(sim, count)
    call.train()
    for step in range(passes):
        x, y = (part.chunk(count)[rank] for part in data_of_step(step))
        quiet = isinstance(call, DistributedDataParallel) and step < passes - 1
        with call.no_sync() if quiet else nullcontext():
            nn.functional.cross_entropy(call(x.double()), y).backward()
    return {name: p.grad.flatten().tolist() for name, p in sim.named_range_parameters() if p.grad is not None}


def gradients_of_ranges(rank: int, count: int) -> Any:
    """After one pass, after two, and of a copy; in float64, where it does not matter in which order a batch is summed."""
    first, second = learning(rank, count)[0], learning(rank, count)[0]
    third = copy.deepcopy(first)
    for sim in (first, second, third):
        sim.model.double()
    return [gradients(sim, rank, count, passes) for sim, passes in ((first, 1), (second, 2), (third, 1))]


def ranges_alone(rank: int, count: int) -> Any:
    sim, optimizer = learning(rank, count, distributed=False)
    steps(sim.model, optimizer, 0, 2, rank, count)
    return parameters(sim)


def other_ranges(rank: int) -> None:
    """A rank that learns others than the rest."""
    sim, optimizer = learning(rank, 2, sites="*.weight" if rank else "*")
    steps(wrapped(sim, 2), optimizer, 0, 1, rank, 2)


def ends_in_training(rank: int) -> None:
    sim, optimizer = learning(rank, 2)
    steps(sim.model, optimizer, 0, 1, rank, 2)
    if rank == 1:
        os._exit(0)
    steps(sim.model, optimizer, 1, 2, rank, 2)


def learns_nothing(rank: int) -> None:
    """A rank that trains without learned ranges, beside one that has them."""
    sim, optimizer = learning(rank, 2)
    if rank == 1:
        until_the_other_ends("learns nothing")
        return
    steps(sim.model, optimizer, 0, 1, rank, 2)


def with_bad_losses(bad: set[int]) -> Callable[[int, int], Any]:
    """Four steps whose loss is NaN on rank 1 in those of ``bad``."""

    def run(rank: int, count: int) -> Any:
        sim, optimizer = learning(rank, count)
        guard = TrainingGuard(optimizer, sim=sim, patience=2)
        call = wrapped(sim, count)
        call.train()
        for step in range(4):
            x, y = (part.chunk(count)[rank] for part in data_of_step(step))
            loss = nn.functional.cross_entropy(call(x), y)
            try:
                guard.step(loss * torch.nan if rank == 1 and step in bad else loss)
            except BitwrightError as error:
                return str(error)
        return [repr(guard), parameters(sim)]

    return run


def wrapped(sim: QuantizationSimModel, count: int) -> nn.Module:
    return DistributedDataParallel(sim.model, find_unused_parameters=True) if count > 1 else sim.model


def trained(rank: int, count: int) -> Any:
    """Ten steps and ten more."""
    sim, optimizer = learning(rank, count)
    steps(wrapped(sim, count), optimizer, 0, 20, rank, count)
    return parameters(sim)


def trained_with_fixed_ranges(rank: int, count: int) -> Any:
    sim = calibrated(simulation(), spread("turns", rank, count))
    steps(wrapped(sim, count), torch.optim.Adam(sim.model.parameters(), lr=0.01), 0, 20, rank, count)
    return parameters(sim)


def on_one_rank(rank: int, count: int) -> Any:
    """What a checkpoint of two ranks gives on one: its parameters, and whether it runs."""
    sim = simulation()
    sim.load_checkpoint(Path(os.environ["RANKS_FOLDER"]) / "resume2")
    return [parameters(sim), bool(sim.calibrated and torch.isfinite(sim.model(batches()[0])).all())]


def resumed(rank: int, count: int) -> Any:
    """Ten steps, a checkpoint that rank 0 writes, everything anew, ten steps."""
    folder = Path(os.environ["RANKS_FOLDER"]) / f"resume{count}"
    sim, optimizer = learning(rank, count)
    steps(wrapped(sim, count), optimizer, 0, 10, rank, count)
    written = parameters(sim)
    if rank == 0:
        sim.save_checkpoint(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    if count > 1:
        dist.barrier()
    fresh = simulation()
    fresh.load_checkpoint(folder)
    optimizer = optimizer_of(fresh)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    steps(wrapped(fresh, count), optimizer, 10, 20, rank, count)
    return [written, parameters(fresh)]


def perceptron(rank: int, count: int, spread_out: Callable[[nn.Module, int], nn.Module]) -> Any:
    """Four steps on the whole batch of a model without feedback: its parameters and those of its ranges."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3)), nn.Linear(6, 2))
    data = [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    sim = calibrated(QuantizationSimModel(model.eval(), data[0], preset="w4a8"), data[rank::count])
    sim.learn_ranges()
    sim.model.train()
    call = spread_out(sim.model, count)
    groups = [{"params": list(sim.model.parameters())}, {"params": sim.range_parameters(), "lr": 1e-3}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for x in data * 2:
        optimizer.zero_grad()
        call(x.chunk(count)[rank]).square().mean().backward()
        optimizer.step()
    found = {}
    for name, p in (*sim.model.named_parameters(), *sim.named_range_parameters()):
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        found[name] = whole.detach().flatten().tolist()
    return [found, sorted(sim._simulator.unseen)]


def fully_sharded(model: nn.Module, count: int) -> nn.Module:
    """FSDP2, each block on its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (count,))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# ------------------------------------------------------------------------------------------------ methods


def weights(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def gptq(how: str) -> Callable[[int, int], Any]:
    """Each rank gives what it has; ``"all"``: it has all already."""

    def run(rank: int, count: int) -> Any:
        sim = simulation()
        mine = spread("turns" if how == "all" else how, rank, count)
        sim.compute_encodings(mine, progress=False)
        apply_gptq(sim, gather_batches(mine) if how == "all" else mine, progress=False)
        return [weights(sim.model), digest(sim)]

    return run


def gptq_alone(rank: int, count: int) -> Any:
    sim = simulation()
    mine = spread("turns", rank, count)
    sim.compute_encodings(mine, progress=False)
    apply_gptq(sim, mine, progress=False, distributed=False)
    return weights(sim.model)


def recipe(rank: int, count: int) -> Any:
    done = quantize(Net().eval(), gather_batches(spread("turns", rank, count)), "w4a8", progress=False)
    return [weights(done.sim.model), digest(done.sim)]


def pruned(rank: int, count: int) -> Any:
    mine = gather_batches(spread("turns", rank, count))
    done = compress(Net().eval(), mine, {"params": 0.8}, importance="activation", widths=1, progress=False)
    return [weights(done.model), json.dumps(done.plan, sort_keys=True)]


class Normed(nn.Module):
    """A batch norm behind another, whose inputs depend on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(torch.relu(self.bn(self.conv(x)))))


def normed() -> QuantizationSimModel:
    return calibrated(QuantizationSimModel(Normed().eval(), batches()[0], preset="w4a8"), batches(), distributed=False)


def norms(how: str) -> Callable[[int, int], str]:
    def run(rank: int, count: int) -> str:
        sim = normed()
        reestimate_bn_stats(sim.model, spread(how, rank, count))
        return weights(sim.model)

    return run


def norms_with_nan(rank: int) -> None:
    mine = spread("turns", rank, 2)
    if rank == 1:
        mine[0][0] = torch.nan
    reestimate_bn_stats(normed().model, mine)


def norms_that_fail(rank: int) -> None:
    """A batch that the model of one rank cannot take."""
    mine: list[Any] = spread("turns", rank, 2)
    if rank == 1:
        mine[1] = torch.zeros(1, 5, 4, 4)
    reestimate_bn_stats(normed().model, mine)


def unused_parameters(rank: int) -> None:
    """A parameter that no step uses, and DDP that was not told so: torch says it at the second step."""
    sim = calibrated(simulation(), batches())
    call = DistributedDataParallel(sim.model)
    steps(call, torch.optim.SGD(sim.model.parameters(), lr=0.01), 0, 2, rank, 2)


CASES: dict[str, tuple[int, Callable[[int, int], Any]]] = {
    **{f"{s} 1": (1, calibrate("turns", s)) for s in ("min_max", "tf_enhanced", "percentile", "mse")},
    **{f"{s} 2": (2, calibrate("blocks", s)) for s in ("min_max", "tf_enhanced", "percentile", "mse")},
    "tf_enhanced 2 last": (2, calibrate("last", "tf_enhanced")),
    **{f"{s} 4": (4, calibrate("turns", s)) for s in ("tf_enhanced", "mse")},
    "in parts 1": (1, in_parts),
    "in parts 2": (2, in_parts),
    "counts 1": (1, resumed_calibration_counts_once),
    "counts 2": (2, resumed_calibration_counts_once),
    "alone": (2, alone),
    "nan": (2, with_nan),
    "dies": (2, message(dies)),
    "stays away": (2, message(stays_away)),
    "other weights": (2, message(other_weights)),
    "other model": (2, message(other_model)),
    "no data": (2, message(no_data)),
    "ranges 1": (1, gradients_of_ranges),
    "ranges 2": (2, gradients_of_ranges),
    "ranges alone": (2, ranges_alone),
    "other ranges": (2, message(other_ranges)),
    "ends in training": (2, message(ends_in_training)),
    "learns nothing": (2, message(learns_nothing)),
    "a bad loss": (2, with_bad_losses({1})),
    "bad losses": (2, with_bad_losses({1, 2, 3})),
    "trained 1": (1, trained),
    "trained 2": (2, trained),
    "resumed 1": (1, resumed),
    "resumed 2": (2, resumed),
    "two on one": (1, on_one_rank),
    "fixed 1": (1, trained_with_fixed_ranges),
    "fixed 2": (2, trained_with_fixed_ranges),
    "one process": (1, functools.partial(perceptron, spread_out=lambda model, count: model)),
    "replicated": (2, functools.partial(perceptron, spread_out=lambda model, count: DistributedDataParallel(model))),
    "sharded": (2, functools.partial(perceptron, spread_out=fully_sharded)),
    **{f"gptq {count}": (count, gptq("turns")) for count in (1, 2, 4)},
    "gptq 2 last": (2, gptq("last")),
    "gptq 2 all": (2, gptq("all")),
    "gptq alone": (2, gptq_alone),
    "recipe 1": (1, recipe),
    "recipe 2": (2, recipe),
    "pruned 1": (1, pruned),
    "pruned 2": (2, pruned),
    **{f"norms {count}": (count, norms("turns")) for count in (1, 2, 4)},
    "norms 2 last": (2, norms("last")),
    "norms nan": (2, message(norms_with_nan)),
    "norms fail": (2, message(norms_that_fail)),
    "unused": (2, message(unused_parameters)),
}


#: where a rank does not come, and the others wait until the timeout
LATE = ("stays away", "learns nothing")
#: seconds after which a rank or a case that hangs is ended, on a machine that is busy with other things too
LONG = 300


def _rank(case: str, rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    if count > 1:
        store = dist.FileStore(f"{folder}/{case.replace(' ', '_')}", count)
        store.set(f"started {rank}", "")  # a short timeout begins when all have started
        store.wait([f"started {each}" for each in range(count)], datetime.timedelta(seconds=LONG))
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=count,
            timeout=datetime.timedelta(seconds=5 if case in LATE else LONG),
        )
    (Path(folder) / f"{case}.{rank}").write_text(json.dumps(CASES[case][1](rank, count)))
    if count > 1 and case not in (*LATE, "dies", "ends in training"):
        dist.destroy_process_group()


def main(names: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """Each case, one after the other."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RANKS_FOLDER"] = folder
        for name in names:
            count = CASES[name][0]
            ranks = [fork.Process(target=_rank, args=(name, rank, count, folder)) for rank in range(count)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(2 * LONG)
            for process in ranks:
                process.kill()
            files = [Path(folder) / f"{name}.{rank}" for rank in range(count)]
            yield name, [json.loads(file.read_text()) if file.exists() else None for file in files]


def warm_up() -> None:
    """Load what a first simulation loads (compiled loops, torch's own parts) before the ranks are forked, and not in each."""
    sim, _ = learning(0, 1)
    nn.functional.cross_entropy(sim.model(data_of_step(0)[0]), data_of_step(0)[1]).backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up()
    print(json.dumps(dict(main(sys.argv[1:] or list(CASES)))))
