"""Accuracy and speed of pruned networks: as cut, reconstructed, fine-tuned, in 8 bits, and milliseconds in ONNX Runtime.

    python benchmarks/pruning.py --markdown          # what is not in build/pruning yet, a row in a process of its own
    python benchmarks/pruning.py --models resnet20_aux --parts 0.5 --seeds 0 --fresh

Top-1 accuracy in per cent, or perplexity per token (lower is better), on test data: 2,000 images of CIFAR-10, 400 of ImageNet,
1,000 of MNIST, 16,384 characters, 64 stories; for the face detector, the SQNR of its worst output in dB. Calibration data: 128
training images, 64 of ImageNet, 8,192 characters, 16 stories; for the ONNX files 64 test images (MNIST) and 8 smooth pictures.
The 95 % confidence interval of an accuracy near 86 % is 1.5 points to each side; of 400 images at 60 % it is 4.8, and of 1,000
at 99 % it is 0.6.

| column | meaning |
|---|---|
| cut | the network without the removed units, nothing else changed; where a method does not apply, its error message |
| fitted | layers that lost inputs fitted to the original's results by least squares, batch-norm statistics re-estimated |
| tuned | fine-tuned (see below): the mean over the seeds, with the lowest and the highest |
| W8A8 | the tuned network, or the fitted one where nothing was trained, in 8 bits: folded, nearest rounding, bias correction |
| ms | ONNX Runtime, one thread, the first calibration batch; the whole and the pruned network run in turns |
| predicted | computed from the milliseconds of the whole network's operators |
| commit | that was measured; with several seeds there can be several |

Empty cells were not measured. Rows of different commits were measured on different days, so compare milliseconds within a row
only.

Fine-tuning on images minimizes the distance from the original's outputs on shifted, mirrored and mixed images, with SGD at a
rate of 0.02 on a cosine, for 12 epochs or as many as the table says: 4,000 images of CIFAR-10, and the 100 images of ImageNet
that are not test images. Networks that start near the original, in factors or with 95 % of its accuracy after the fit, are
trained for 6 epochs at a rate of 0.001 with fixed batch-norm statistics and gradients clipped to a norm of 5; at 0.002 without
clipping, one seed of three ended 5 points below the others. The originals were trained on 50,000 images of CIFAR-10. Text
models are trained with Adam (``fine_tuned_text``), stories260k on stories that the original generates. ONNX files are not
trained.

``random`` draws other units for every seed. Torch-Pruning prunes by L2 norms, the same part of every layer, to the nearest part
of the MACs that it reaches; it does not fit layers and does not read ONNX files. Where it cannot prune a whole network (the
padded shortcuts of this ResNet-20), only the layers inside blocks are pruned. Needs the developer data set, and
``pip install torch-pruning``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import math
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import onnx_ir
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bitwright
from bitwright.compression.costs import Prices, compare_ms, operator_times
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import BitwrightError
from bitwright.methods.front_end import front_end_of
from bitwright.onnx import load_model
from bitwright.torch import rebuild, svd_model
from tests.support import data

RESULTS, STATE = measure.ROOT / "benchmarks" / "results" / "pruning.md", measure.ROOT / "build" / "pruning"
LIMIT = 7200  # seconds of a method; a limit of CPU time would make the clock of CPU time count in ticks


@dataclass(frozen=True)
class Subject:
    """A network: its form, calibration data and score, what trains it, and the layers inside its blocks."""

    model: Callable[[], Any]
    calibration: Callable[[], list[Any]]
    score: Callable[[Any], float]
    unit: str = "%"
    tune: Callable[[str, nn.Module, nn.Module, int, Path, Schedule], nn.Module] | None = None
    inside: tuple[str, ...] = ()
    steps: int = 0  # of training, where it is counted in steps


def few(images: data.Images, count: int) -> data.Images:
    return data.Images(images.x[:count], images.y[:count])


def _resnet() -> nn.Module:
    model = data.trained("resnet20_aux")
    model.aux = None
    return model


def _digits(name: str) -> np.ndarray[Any, Any]:
    """The test digits as a network takes them, [1000, 1, 28, 28]: mnist_cntk from 0 to 255."""
    x = data.mnist()[0][:, None]
    return x.astype(np.float32) if name == "mnist_cntk" else ((x / 255.0 - 0.1307) / 0.3081).astype(np.float32)


def _mnist(network: str, session: Any) -> float:
    x, labels, name = _digits(network), data.mnist()[1], session.get_inputs()[0].name
    return 100 * float(
        np.mean([session.run(None, {name: x[i : i + 1]})[0].argmax() == labels[i] for i in range(len(x))])
    )


def _face_input(seed: int) -> np.ndarray[Any, Any]:
    """A smooth picture: noise has none of the structure that the detector reads."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(1, 3, 8, 10)).astype(np.float32)
    return np.repeat(np.repeat(coarse, 30, 2), 32, 3) * 0.5


def _face(session: Any) -> float:
    import onnxruntime as ort

    reference = ort.InferenceSession(str(data.onnx_file("face_slim_320")), providers=["CPUExecutionProvider"])
    rows = [
        (reference.run(None, {"input": x}), session.run(None, {"input": x})) for x in map(_face_input, range(100, 104))
    ]
    return min(
        sqnr(np.stack([a[i] for a, _ in rows]), np.stack([b[i] for _, b in rows])) for i in range(len(rows[0][0]))
    )


TEMPERATURE = 4.0


@dataclass(frozen=True)
class Schedule:
    """Epochs of SGD, images of a batch, highest rate, steps of warm-up, largest norm of a gradient; do batch norms stay?"""

    epochs: int
    batch: int
    rate: float
    warm_up: int = 0
    largest: float = math.inf
    fixed_norms: bool = False


FAR, NEAR = Schedule(12, 32, 0.02), Schedule(6, 64, 0.001, 50, 5.0, True)
"""For networks that lost units, and for those that begin near the original: in factors, or with most of its score left."""
_MOST = 0.95


def _schedule(method: str, epochs: int | None, left: float) -> Schedule:
    """How a network is trained that was cut by a method and has so much of its score left, or for as many epochs as are given."""
    schedule = NEAR if method in FACTORS or left >= _MOST else FAR
    return schedule if epochs is None else replace(schedule, epochs=epochs)


def _view(name: str, epoch: int) -> torch.Tensor:
    """The training images as an epoch sees them: moved by up to an eighth, half of them mirrored, half mixed with another one."""
    x = data.imagenet("calibration").x if name == "mobilenet_v1_025" else data.cifar("train").x
    n, size, rng = len(x), x.shape[-1], torch.Generator().manual_seed(epoch)
    far = size // 8
    i, j = (torch.randint(2 * far + 1, (n,), generator=rng)[:, None] + torch.arange(size) for _ in range(2))
    padded = nn.functional.pad(x, (far, far, far, far))
    moved = padded[torch.arange(n)[:, None, None], :, i[:, :, None], j[:, None, :]].permute(0, 3, 1, 2)
    mirrored = torch.rand(n, generator=rng) < 0.5
    moved[mirrored] = moved[mirrored].flip(3)
    share = (0.5 * torch.rand(n, generator=rng) * (torch.rand(n, generator=rng) < 0.5))[:, None, None, None]
    return torch.lerp(moved, moved[torch.randperm(n, generator=rng)], share)


def _wanted(name: str, teacher: nn.Module, epoch: int) -> torch.Tensor:
    """What the original makes of the images of an epoch; kept in ``build/pruning``, as all that are trained see the same."""
    file = STATE / f"{name}-outputs-{epoch}.safetensors"
    if not file.exists():
        with torch.no_grad():
            save_file({"wanted": torch.cat([teacher(part) for part in _view(name, epoch).split(50)])}, file)
    return load_file(file)["wanted"]


def fine_tuned(name: str, model: nn.Module, teacher: nn.Module, seed: int, kept: Path, schedule: Schedule) -> nn.Module:
    """Epochs on the training images, as :data:`FAR` or :data:`NEAR` say: SGD with momentum 0.9, the rate on a cosine, no labels.

    The loss is the distance from the outputs of the original at temperature 4 (Hinton et al., arXiv:1503.02531) on images that
    are moved, mirrored and mixed (Beyer et al., arXiv:2106.05237): labels of so few images would be learned by heart. What an
    epoch leaves is in the folder ``kept``, and the next call goes on from there.
    """
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), schedule.rate, 0.9, weight_decay=1e-4, nesterov=True)
    kept.mkdir(parents=True, exist_ok=True)
    done = max((int(f.stem) for f in kept.glob("*.safetensors")), default=0)
    if done:
        state = load_file(kept / f"{done}.safetensors")
        for i, p in enumerate(model.parameters()):
            optimizer.state[p]["momentum_buffer"] = state.pop(f"momentum {i}")
        model.load_state_dict(state)
    for epoch in range(done, schedule.epochs):
        _train_epoch(model, optimizer, schedule, _view(name, epoch), _wanted(name, teacher, epoch), seed, epoch)
        momentum = {f"momentum {i}": optimizer.state[p]["momentum_buffer"] for i, p in enumerate(model.parameters())}
        state = {n: t.contiguous() for n, t in (model.state_dict() | momentum).items()}
        save_file(state, kept / f"{epoch + 1}.safetensors")
        (kept / f"{epoch}.safetensors").unlink(missing_ok=True)
    return model.eval()


def _train_epoch(
    model: nn.Module, optimizer: Any, schedule: Schedule, x: torch.Tensor, wanted: torch.Tensor, seed: int, epoch: int
) -> None:
    model.train()
    for module in model.modules():
        if schedule.fixed_norms and isinstance(module, nn.BatchNorm2d):
            module.eval()
    x = x.contiguous(memory_format=torch.channels_last)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    batches = order.split(schedule.batch)
    for step, at in enumerate(batches, epoch * (-(-len(x) // schedule.batch))):
        part = step / (len(batches) * schedule.epochs)
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / schedule.warm_up) if schedule.warm_up else 1.0
            group["lr"] = schedule.rate * warm * 0.5 * (1 + math.cos(math.pi * part))
        y, t = (model(x[at]) / TEMPERATURE).log_softmax(1), (wanted[at] / TEMPERATURE).log_softmax(1)
        loss = TEMPERATURE**2 * nn.functional.kl_div(y, t, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), schedule.largest)
        optimizer.step()
    print(time.strftime("%H:%M:%S"), "seed", seed, "epoch", epoch + 1, f"loss {loss.item():.3f}", flush=True)


def _text_rows(name: str, teacher: nn.Module) -> torch.Tensor:
    """Rows of 129 characters of the training text; for stories260k, of 512 stories that the original tells, which are kept."""
    if name == "lstm_char":
        text = data.shakespeare("train")
        return text[: len(text) // 129 * 129].reshape(-1, 129).long()
    file = STATE / f"{name}-told.safetensors"
    if not file.exists():
        rng = torch.Generator().manual_seed(0)
        rows = data.stories("calib")[:, :1].repeat(16, 1)
        with torch.no_grad():
            while rows.shape[1] < 129:
                rows = torch.cat([rows, torch.multinomial(teacher(rows)[:, -1].softmax(-1), 1, generator=rng)], 1)
        save_file({"rows": rows}, file)
    return load_file(file)["rows"]


def fine_tuned_text(
    name: str, model: nn.Module, teacher: nn.Module, seed: int, kept: Path, schedule: Schedule
) -> nn.Module:
    """Steps on text: Adam, rate 0.002 on a cosine, 32 rows of 128 tokens (16 for stories260k); labels and the original."""
    rng, steps = torch.Generator().manual_seed(seed), SUBJECTS[name].steps
    text = _text_rows(name, teacher)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = text[torch.randint(len(text), (32 if name == "lstm_char" else 16,), generator=rng)]
        with torch.no_grad():
            wanted = _logits(teacher, rows[:, :-1]).log_softmax(-1)
        y = _logits(model, rows[:, :-1]).log_softmax(-1)
        labels = nn.functional.nll_loss(y.flatten(0, 1), rows[:, 1:].flatten())
        loss = labels + nn.functional.kl_div(
            y.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cosine.step()
    return model.eval()


def _logits(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    made = model(rows)
    return made if isinstance(made, torch.Tensor) else made[0]


SUBJECTS = {
    "resnet20_aux": Subject(
        _resnet, lambda: list(data.cifar("train").x[:128].split(64)), lambda m: data.accuracy(m, data.cifar()),
        tune=fine_tuned, inside=tuple(f"layer{i}.{k}.conv1" for i in (1, 2, 3) for k in range(3)),
    ),
    "mobilenet_v2_cifar": Subject(
        lambda: data.trained("mobilenet_v2_cifar"), lambda: list(data.cifar("train").x[:128].split(64)),
        lambda m: data.accuracy(m, data.cifar()), tune=fine_tuned,
    ),
    "mobilenet_v1_025": Subject(
        lambda: data.trained("mobilenet_v1_025"), lambda: list(data.imagenet("calibration").x[:64].split(32)),
        lambda m: data.accuracy(m, data.imagenet()), tune=fine_tuned,
    ),
    "lstm_char": Subject(
        lambda: data.trained("lstm_char"), lambda: list(data.shakespeare("train")[:8192].reshape(32, 256).split(16)),
        lambda m: data.perplexity(m, data.shakespeare()[: 64 * 257].reshape(64, 257)), "perplexity",
        fine_tuned_text, steps=400,
    ),
    "stories260k": Subject(
        lambda: data.trained("stories260k"), lambda: list(data.stories("calib")[:16, :-1].split(8)),
        lambda m: data.perplexity(m, data.stories()[:64]), "perplexity", fine_tuned_text, steps=200,
    ),
    **{f"{name}.onnx": Subject(
        partial(lambda n: str(data.onnx_file(n)), name), partial(lambda n: list(_digits(n)[-64:, None]), name),
        partial(_mnist, name),
    ) for name in ("mnist_pytorch", "mnist_cntk")},
    "face_slim_320.onnx": Subject(
        lambda: str(data.onnx_file("face_slim_320")), lambda: [_face_input(i) for i in range(8)], _face, "dB",
    ),
}  # fmt: skip

#: method -> options of ``compress``
METHODS: dict[str, dict[str, Any] | None] = {
    "activation, exact widths": {"importance": "activation"},
    "activation, same part": {"importance": "activation", "ranking": "uniform"},
    "l2, same part": {"ranking": "uniform"},
    "random, same part": {"importance": "random", "ranking": "uniform"},
    "spatial SVD": None,
    "low rank, all forms": None,
    "Torch-Pruning": None,
}
#: method -> forms of the factors of ``svd_model``
FACTORS: dict[str, tuple[str, ...]] = {
    "spatial SVD": ("spatial",),
    "low rank, all forms": ("spatial", "weight", "output", "tucker"),
}
Cut = tuple[Any, float, Any]
"""A pruned model, the part of the MACs that is left, and the model as it was cut, before anything was fitted."""


def w8a8(model: Any, batches: list[Any], score: Callable[[Any], float]) -> float:
    """The score of the model in 8 bits, by the default recipe's fold and nearest rounding."""
    sim = bitwright.quantize(model, batches, recipe=["fold", "bias_correction"], progress=False).sim
    return score(sim.model if isinstance(model, nn.Module) else sim.session)


def torch_pruned(model: nn.Module, x: torch.Tensor, part: float, inside: tuple[str, ...]) -> tuple[nn.Module, float]:
    """A module pruned by Torch-Pruning to at most ``part`` of its MACs, and what is left of them.

    Where it cannot prune the whole module, only the layers ``inside`` are pruned.
    """
    import torch_pruning

    count = torch_pruning.utils.count_ops_and_params
    whole = count(model, x)[0]
    layers = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]

    def at(ratio: float, only: tuple[str, ...]) -> tuple[nn.Module, float]:
        pruned = copy.deepcopy(model)
        named = dict(pruned.named_modules())
        kept = [named[name] for name in layers if (only and name not in only) or name == layers[-1]]
        torch_pruning.pruner.MagnitudePruner(
            pruned, x, torch_pruning.importance.MagnitudeImportance(p=2), pruning_ratio=ratio, ignored_layers=kept
        ).step()
        return pruned, count(pruned, x)[0] / whole

    only: tuple[str, ...] = ()
    try:
        at(0.5, only)
    except IndexError:
        only = inside
        if not only:
            raise
    low, high, best = 0.0, 0.95, None
    for _ in range(7):
        middle = (low + high) / 2
        found = at(middle, only)
        if found[1] <= part:
            high, best = middle, found
        else:
            low = middle
    if best is None:
        raise RuntimeError(f"no ratio up to 0.95 leaves {part:g} of the MACs")
    return best


def predicted_ms(model: Any, pruned: Any, batch: Any) -> float:
    """Milliseconds of the pruned model, from those of the whole one's operators."""
    graphs = [front_end_of(m).structured(m, batch, None).graph() for m in (model, pruned)]
    return Prices(graphs[0], {"ms"}, operator_times(model, graphs[0], batch))(graphs[1])["ms"]


def cut_by(name: str, method: str, part: float, seed: int) -> Cut:
    """The network pruned by a method."""
    subject = SUBJECTS[name]
    model, batches, options = subject.model(), subject.calibration(), METHODS[method]
    if method == "Torch-Pruning":
        pruned, left = torch_pruned(model, batches[0], part, subject.inside)
        return None, left, pruned
    if method in FACTORS:
        plain, _ = factored(subject.model(), batches, part, FACTORS[method], False)
        return *factored(model, batches, part, FACTORS[method], True), plain
    assert options is not None
    common: dict[str, Any] = {"seed": seed, "progress": False, **options}
    result = bitwright.compress(model, batches, {"macs": part}, **common)
    left = result.after["macs"] / result.before["macs"]
    if isinstance(model, nn.Module):
        return result.model, left, rebuild(subject.model(), result.plan)  # the same units, and nothing fitted
    plain = bitwright.compress(model, batches, {"macs": part}, reconstruction=False, batch_norms=False, **common)
    return result.model, left, plain.model


def factored(
    model: Any, batches: list[Any], part: float, forms: tuple[str, ...], data_aware: bool
) -> tuple[Any, float]:
    """A network whose layers are written as factors of these forms, and the part of the MACs that is left."""
    opened = load_model(model) if isinstance(model, str) else model
    report = svd_model(opened, batches, macs=part, forms=forms, data_aware=data_aware, progress=False)
    made = onnx_ir.to_proto(opened.model) if isinstance(model, str) else opened
    return made, report.after["macs"] / report.before["macs"]


def score_of(subject: Subject, model: Any) -> float:
    """The score of a module, or of an ONNX model in a session."""
    if isinstance(model, nn.Module):
        return subject.score(model.eval())
    import onnxruntime as ort

    given = model if isinstance(model, str) else model.SerializeToString()
    return subject.score(ort.InferenceSession(given, providers=["CPUExecutionProvider"]))


@dataclass(frozen=True)
class Extent:
    """What of a row is measured: without times and 8 bits, without training, or with another number of epochs."""

    quick: bool = False
    untuned: bool = False
    epochs: int | None = None


def measured(name: str, method: str, part: float, seeds: list[int], extent: Extent) -> None:
    """The measurements of a method, a file per seed; what is not drawn is cut once."""
    subject, batches = SUBJECTS[name], SUBJECTS[name].calibration()
    model = subject.model()
    whole = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    kept: Cut | None = None
    remains = 0.0  # of the score, before training
    for seed in seeds:
        start = time.process_time()
        if kept is None or "random" in method:
            kept = cut_by(name, method, part, seed)
        fitted, left, plain = kept
        pruned = copy.deepcopy(plain if fitted is None else fitted)
        found: dict[str, Any] = {"macs": left, "commit": measure.machine()["commit"]}
        if seed == seeds[0] or "random" in method:
            found["float"] = score_of(subject, whole)
            found["cut"] = score_of(subject, plain)
            if fitted is not None:
                found["fitted"] = score_of(subject, fitted)
                remains = found["fitted"] / found["float"]
        if seed == 0 and not extent.quick:
            ms = compare_ms({"before": whole, "after": pruned}, batches[0])
            found["ms"] = [ms["before"], ms["after"]]
            if method not in ("Torch-Pruning", *FACTORS):
                found["predicted"] = predicted_ms(whole, pruned, batches[0])
        if subject.tune is not None and not extent.untuned:
            schedule = _schedule(method, extent.epochs, remains)
            found["training"] = f"{subject.steps} steps" if subject.steps else f"{schedule.epochs} epochs"
            kept_at = _file(name, method, part, seed).with_suffix(f".{schedule.epochs}-epochs")
            pruned = subject.tune(name, pruned, whole, seed, kept_at, schedule)
            found["tuned"] = subject.score(pruned)
        if not extent.quick and (seed == 0 or "random" in method):
            found["w8a8"] = w8a8(pruned, batches, subject.score)
        _keep({**found, "seconds": time.process_time() - start}, name, method, part, seed)


def _file(name: str, method: str, part: float, seed: int) -> Path:
    return STATE / f"{name}-{part:g}-{method.replace(', ', '_').replace(' ', '_')}-{seed}.json"


def _keep(found: dict[str, Any], *row: Any) -> None:
    _file(*row).write_text(json.dumps(found))
    print(*row, found, flush=True)


def _work(name: str, method: str, part: float, seeds: list[int], extent: Extent) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        measured(name, method, part, seeds, extent)
    except Exception as error:  # the row says so
        missing = next(seed for seed in seeds if not _file(name, method, part, seed).exists())
        _keep({"failed": _told(error), "commit": measure.machine()["commit"]}, name, method, part, missing)


def _told(error: Exception) -> str:
    """What an error says, in one line: the line of code that raised it where it has no message."""
    if isinstance(error, BitwrightError):
        return f"refused: {error.problem}"
    said = str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    return f"{type(error).__name__}: {said}".splitlines()[0]


def seeds_of(name: str, method: str, part: float, seeds: list[int], fresh: bool) -> list[int]:
    """The seeds that are to be measured: several where something is drawn, and those that are not there yet."""
    if name.endswith(".onnx") and method == "Torch-Pruning":
        return []
    drawn = SUBJECTS[name].tune is not None or "random" in method
    return [s for s in seeds if (s == 0 or drawn) and (fresh or not _file(name, method, part, s).exists())]


def run(
    names: list[str], methods: list[str], parts: list[float], seeds: list[int], fresh: bool, extent: Extent
) -> None:
    """What is not there yet, each method in a process of its own."""
    STATE.mkdir(parents=True, exist_ok=True)
    for part, name, method in itertools.product(parts, names, methods):
        wanted = seeds_of(name, method, part, seeds, fresh)
        if not wanted:
            continue
        process = multiprocessing.get_context("fork").Process(target=_work, args=(name, method, part, wanted, extent))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            told = {"failed": f"more than {LIMIT} seconds", "commit": measure.machine()["commit"]}
            _keep(told, name, method, part, wanted[0])


def _mean(found: list[dict[str, Any]], key: str) -> str:
    """The mean over seeds, and the lowest and highest."""
    values = [f[key] for f in found if key in f]
    if not values:
        return ""
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len({*values}) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


def _ms(found: list[dict[str, Any]]) -> str:
    """The predicted milliseconds, in three digits."""
    return f"{found[0]['predicted']:.3g}" if "predicted" in found[0] else ""


def _found(name: str, method: str, part: float) -> list[dict[str, Any]]:
    """The measurements of a method that are there, a seed each."""
    files = [f for seed in range(3) if (f := _file(name, method, part, seed)).exists()]
    return [json.loads(f.read_text()) for f in files]


_COLUMNS = ["network", "target", "method", "seeds", "MACs left", "float", "cut", "fitted", "tuned", "training", "W8A8", "ms",
            "predicted", "CPU seconds", "commit"]  # fmt: skip
_Rows = dict[tuple[str, ...], dict[str, str]]
"""Network, target and method -> column -> text."""


def _published() -> tuple[_Rows, str]:
    """The rows of the published table, and the sections behind it, which are written by hand."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    table, heading, told = text.partition("\n## ")
    rows: _Rows = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" |")]
        if len(cells) == len(_COLUMNS) and cells[0] in SUBJECTS:
            rows[tuple(cells[:3])] = dict(zip(_COLUMNS, cells, strict=True))
    return rows, heading + told


def _row(name: str, part: float, method: str) -> dict[str, str] | None:
    """The row of a method, from what ``build/pruning`` has; ``None`` where nothing was measured."""
    found = _found(name, method, part)
    if not found:
        return None
    row = dict.fromkeys(_COLUMNS, "") | {
        "network": name, "target": f"{part:.0%}", "method": method,
        "commit": ", ".join(dict.fromkeys(f["commit"] for f in found)),
    }  # fmt: skip
    failed = next((f["failed"] for f in found if "failed" in f), None)
    if failed is not None:
        return row | {"cut": failed.replace("|", "/")}
    return row | {
        "seeds": str(len(found)), "MACs left": f"{found[0]['macs']:.1%}",
        "float": "" if SUBJECTS[name].unit == "dB" else f"{found[0]['float']:.2f}",
        "training": found[0].get("training", ""), "W8A8": _mean(found, "w8a8"),
        **{key: _mean(found, key) for key in ("cut", "fitted", "tuned")},
        "ms": " -> ".join(f"{t:.3g}" for t in found[0].get("ms", [])), "predicted": _ms(found),
        "CPU seconds": f"{found[0]['seconds']:.0f}",
    }  # fmt: skip


def _goals(rows: _Rows) -> list[list[str]]:
    """What was to be reached, what was measured, and whether it is enough; a row where it was measured."""

    def value(part: str, method: str, column: str) -> float | None:
        text = rows.get(("resnet20_aux", part, method), {}).get(column)
        return float(text.split()[0]) if text else None

    goals = []
    other = value("50%", "Torch-Pruning", "tuned")
    for method in ("activation, exact widths", *FACTORS):
        whole, tuned = (value("50%", method, column) for column in ("float", "tuned"))
        if whole is None or tuned is None:
            continue
        name, lost = f"ResNet-20 at 50 %, tuned, {method}", whole - tuned
        goals.append([name, "at most 1.5 points lost", f"{lost:.2f}", "yes" if lost <= 1.5 else "no"])
        if other is not None:
            gain = tuned - other
            goals.append(
                ["the same beside Torch-Pruning", "not worse", f"{gain:+.2f} points", "yes" if gain >= 0 else "no"]
            )
    whole, fitted = (value("75%", "spatial SVD", column) for column in ("float", "fitted"))
    if whole is not None and fitted is not None:
        lost = whole - fitted
        goals.append(
            ["spatial SVD at 75 %, not trained", "at most 1 point lost", f"{lost:.2f}", "yes" if lost <= 1 else "no"]
        )
    return goals


def table() -> None:
    """Write what is there; published rows that were not measured again stay, and so does what was written by hand."""
    published, told_by_hand = _published()
    rows: _Rows = {}
    for name, part, method in itertools.product(SUBJECTS, (0.75, 0.5), METHODS):
        place = (name, f"{part:.0%}", method)
        row = _row(name, part, method) or published.get(place)
        if row is not None:
            rows[place] = row
    text = measure.markdown("Structured pruning", _COLUMNS, [list(row.values()) for row in rows.values()])
    goals = [
        "| goal | asked | measured | reached |",
        "|---|---:|---:|---|",
        *("| " + " | ".join(r) + " |" for r in _goals(rows)),
    ]
    command, _, told = str(__doc__).partition("Top-1")
    command = command.strip().splitlines()[2].partition(" #")[0].strip()
    measure.write(RESULTS, text + "\n" + "\n".join(goals) + f"\n\n`{command}`\n\nTop-1{told}" + told_by_hand)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--parts", nargs="*", type=float, default=[0.5, 0.75])
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--quick", action="store_true", help="without times and 8 bits")
    parser.add_argument("--untuned", action="store_true", help="without training")
    parser.add_argument("--epochs", type=int, help="of training on images, in place of 12, or 6 for factors")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--table", action="store_true", help="write what is there, and measure nothing")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    if not given.table:
        extent = Extent(given.quick, given.untuned, given.epochs)
        run(given.models, given.methods, given.parts, given.seeds, given.fresh, extent)
    if given.markdown or given.table:
        table()
