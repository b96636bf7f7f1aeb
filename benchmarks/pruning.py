"""What structured pruning costs networks without training, beside random choice and Torch-Pruning.

    python benchmarks/pruning.py                                # a row at a time; what is done is kept in build/pruning
    python benchmarks/pruning.py --models resnet20_aux --fresh --markdown

Top-1 accuracy in per cent, or perplexity per token, on parts of the test data: 1,000 images of CIFAR-10, 200 of ImageNet, 1,000
of MNIST, 16,384 characters, 64 stories; of the face detector, the SQNR of its worst output in dB. Calibration: 128 training
images, 64 of ImageNet, 8,192 characters, 16 stories. Torch-Pruning (``pip install torch-pruning``) prunes with L2 norms and the
same part of every layer, to the nearest part of the MACs that it reaches; it has no reconstruction. Nothing is trained but the
rows that say so: see ``fine_tuned``. W8A8: folded, nearest rounding, bias correction. Milliseconds: ONNX Runtime,
one thread, the first calibration batch, before and after in turns. Needs the developer data set.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import torch
from torch import nn

import bitwright
from bitwright.compression.costs import compare_ms
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import BitwrightError
from tests.support import data

RESULTS, STATE = measure.ROOT / "benchmarks" / "results" / "pruning.md", measure.ROOT / "build" / "pruning"


@dataclass(frozen=True)
class Subject:
    """A network: its form, calibration data and score."""

    model: Callable[[], Any]
    calibration: Callable[[], list[Any]]
    score: Callable[[Any], float]
    unit: str = "%"
    tune: Callable[[nn.Module, nn.Module, int], nn.Module] | None = None


def _few(images: data.Images, count: int) -> data.Images:
    return data.Images(images.x[:count], images.y[:count])


def _resnet() -> nn.Module:
    model = data.trained("resnet20_aux")
    model.aux = None
    return model


def _mnist(session: Any) -> float:
    pixels, labels = data.mnist()
    name = session.get_inputs()[0].name
    x = ((pixels / 255.0 - 0.1307) / 0.3081).astype(np.float32)[:, None]
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


EPOCHS = 6


def fine_tuned(model: nn.Module, teacher: nn.Module, seed: int) -> nn.Module:
    """Six epochs on the 4,000 training images: SGD with momentum 0.9, rate 0.02 on a cosine, batches of 64, flips.

    The loss is that of the labels and the distance from the outputs of the original at temperature 4 (Hinton et al.,
    arXiv:1503.02531).
    """
    torch.manual_seed(seed)
    images = data.cifar("train")
    with torch.no_grad():
        views = [images.x, images.x.flip(3)]
        wanted = [torch.cat([teacher(x) for x in view.split(250)]) for view in views]
    model.train()
    steps = EPOCHS * (len(images) // 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        order = torch.randperm(len(images))
        for at in order[: len(order) // 64 * 64].split(64):
            k = int(torch.randint(2, ()))
            y = model(views[k][at])
            soft = nn.functional.kl_div(
                (y / 4).log_softmax(1), (wanted[k][at] / 4).log_softmax(1), reduction="batchmean", log_target=True
            )
            loss = nn.functional.cross_entropy(y, images.y[at]) + 16 * soft
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def fine_tuned_text(model: nn.Module, teacher: nn.Module, seed: int) -> nn.Module:
    """400 steps on the training text: Adam, rate 0.002 on a cosine, 32 sequences of 128 characters; labels and the original."""
    torch.manual_seed(seed)
    text, steps = data.shakespeare("train"), 400
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        starts = torch.randint(len(text) - 129, (32,))
        rows = torch.stack([text[i : i + 129] for i in starts]).long()
        with torch.no_grad():
            wanted = teacher(rows[:, :-1])[0].log_softmax(-1)
        y = model(rows[:, :-1])[0].log_softmax(-1)
        labels = nn.functional.nll_loss(y.flatten(0, 1), rows[:, 1:].flatten())
        loss = labels + nn.functional.kl_div(
            y.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


SUBJECTS = {
    "resnet20_aux": Subject(
        _resnet, lambda: list(data.cifar("train").x[:128].split(64)), lambda m: data.accuracy(m, _few(data.cifar(), 1000)),
        tune=fine_tuned,
    ),
    "mobilenet_v2_cifar": Subject(
        lambda: data.trained("mobilenet_v2_cifar"), lambda: list(data.cifar("train").x[:128].split(64)),
        lambda m: data.accuracy(m, _few(data.cifar(), 1000)), tune=fine_tuned,
    ),
    "mobilenet_v1_025": Subject(
        lambda: data.trained("mobilenet_v1_025"), lambda: list(data.imagenet("calibration").x[:64].split(32)),
        lambda m: data.accuracy(m, _few(data.imagenet(), 200)),
    ),
    "lstm_char": Subject(
        lambda: data.trained("lstm_char"), lambda: list(data.shakespeare("train")[:8192].reshape(32, 256).split(16)),
        lambda m: data.perplexity(m, data.shakespeare()[: 64 * 257].reshape(64, 257)), "perplexity",
        fine_tuned_text,
    ),
    "stories260k": Subject(
        lambda: data.trained("stories260k"), lambda: list(data.stories("calib")[:16, :-1].split(8)),
        lambda m: data.perplexity(m, data.stories()[:64]), "perplexity",
    ),
    "mnist_pytorch.onnx": Subject(
        lambda: str(data.onnx_file("mnist_pytorch")),
        lambda: [((p / 255.0 - 0.1307) / 0.3081).astype(np.float32)[None, None] for p in data.mnist()[0][-64:]], _mnist,
    ),
    "face_slim_320.onnx": Subject(
        lambda: str(data.onnx_file("face_slim_320")), lambda: [_face_input(i) for i in range(8)], _face, "dB",
    ),
}  # fmt: skip
METHODS: dict[str, dict[str, Any] | None] = {
    "random": {"importance": "random", "ranking": "uniform", "reconstruction": False, "batch_norms": False},
    "l2": {"ranking": "uniform", "reconstruction": False, "batch_norms": False},
    "random, reconstructed": {"importance": "random", "ranking": "uniform"},
    "l2, reconstructed": {"ranking": "uniform"},
    "activation, reconstructed": {"importance": "activation", "ranking": "uniform"},
    "activation, exact widths": {"importance": "activation"},
    "Torch-Pruning, l2": None,
}


#: rows that are trained afterwards -> how they were pruned, and the seed
TUNED = {
    f"{method}, fine-tuned, seed {seed}": (method, seed)
    for seed in (0, 1, 2) for method in ("activation, exact widths", "l2, reconstructed", "random", "Torch-Pruning, l2")
}  # fmt: skip


def w8a8(model: nn.Module, batches: list[Any], score: Callable[[Any], float]) -> float:
    """The score of the model in 8 bits, by the default recipe's fold and nearest rounding."""
    return score(bitwright.quantize(model, batches, recipe=["fold", "bias_correction"], progress=False).sim.model)


def torch_pruned(model: nn.Module, x: torch.Tensor, part: float) -> tuple[nn.Module, float]:
    """A module pruned by Torch-Pruning to at most ``part`` of its MACs, and what is left of them."""
    import torch_pruning

    count = torch_pruning.utils.count_ops_and_params
    whole = count(model, x)[0]
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    low, high, best = 0.0, 0.9, None
    for _ in range(6):
        middle = (low + high) / 2
        pruned = copy.deepcopy(model)
        last = [m for m in pruned.modules() if isinstance(m, (nn.Linear, nn.Conv2d))][len(layers) - 1]
        torch_pruning.pruner.MagnitudePruner(
            pruned, x, torch_pruning.importance.MagnitudeImportance(p=2), pruning_ratio=middle, ignored_layers=[last]
        ).step()
        left = count(pruned, x)[0] / whole
        if left <= part:
            high, best = middle, (pruned, left)
        else:
            low = middle
    if best is None:
        raise RuntimeError(f"no ratio up to 0.9 leaves {part:g} of the MACs")
    return best


_PRUNED: dict[tuple[str, float, str, int], tuple[nn.Module, float]] = {}


def _pruned(
    model: nn.Module, batches: list[Any], part: float, options: dict[str, Any] | None, seed: int
) -> tuple[nn.Module, float]:
    """The module at a part of its MACs, and what is left of them; by Torch-Pruning without options."""
    if options is None:
        return torch_pruned(model, batches[0], part)
    result = bitwright.compress(model, batches, {"macs": part}, seed=seed, progress=False, **options)
    return result.model, result.after["macs"] / result.before["macs"]


def row(name: str, method: str, part: float) -> dict[str, Any]:
    """One measurement."""
    subject, start = SUBJECTS[name], time.perf_counter()
    model, batches = subject.model(), subject.calibration()
    if method in TUNED:
        before, seed = TUNED[method]
        key = (name, part, before, seed if before == "random" else 0)  # the others prune alike with every seed
        if key not in _PRUNED:
            _PRUNED[key] = _pruned(model, batches, part, METHODS[before], seed)
        pruned, left = copy.deepcopy(_PRUNED[key])
        assert subject.tune is not None
        found = {"macs": left, "pruned": subject.score(pruned), "float": subject.score(model)}
        tuned = subject.tune(pruned, model, seed)
        return {**found, "score": subject.score(tuned), "w8a8": w8a8(tuned, batches, subject.score),
                "seconds": time.perf_counter() - start}  # fmt: skip
    options = METHODS[method]
    if options is None:
        if isinstance(model, str):
            raise RuntimeError("it reads no ONNX files")
        pruned, left = torch_pruned(model, batches[0], part)
        return {"macs": left, "score": subject.score(pruned), "seconds": time.perf_counter() - start}
    result = bitwright.compress(
        model, batches, {"macs": part}, metric=subject.score, lower_is_better=subject.unit == "perplexity",
        progress=False, **options,
    )  # fmt: skip
    found = {"macs": result.after["macs"] / result.before["macs"], "score": result.metrics["compressed"],
             "float": result.metrics["float"], "seconds": time.perf_counter() - start}  # fmt: skip
    if method == "activation, exact widths":
        ms = compare_ms({"before": model, "after": result.model}, batches[0])
        found["ms"] = [ms["before"], ms["after"]]
        if isinstance(result.model, nn.Module):
            found["w8a8"] = w8a8(result.model, batches, subject.score)
    return found


def run(models: list[str], parts: list[float], methods: list[str], fresh: bool) -> None:
    """Every row that is not there yet."""
    STATE.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for name in models:
            for method in [m for m in methods if m not in TUNED or SUBJECTS[name].tune is not None]:
                file = STATE / f"{name}-{part:g}-{method.replace(', ', '_')}.json"
                if file.exists() and not fresh:
                    continue
                try:
                    found = row(name, method, part)
                except (
                    BitwrightError,
                    RuntimeError,
                    ValueError,
                    AssertionError,
                    IndexError,
                    KeyError,
                    TypeError,
                ) as error:
                    found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
                file.write_text(json.dumps(found))
                print(part, name, method, found, flush=True)


def table() -> None:
    """Write what is there."""
    rows = []
    for name, subject in SUBJECTS.items():
        for part in (0.75, 0.5):
            for method in (*METHODS, *TUNED):
                file = STATE / f"{name}-{part:g}-{method.replace(', ', '_')}.json"
                if not file.exists():
                    continue
                found = json.loads(file.read_text())
                whole = json.loads((STATE / f"{name}-{part:g}-l2.json").read_text()).get("float")
                before = "" if whole is None or subject.unit == "dB" else f"{whole:.2f}"
                if "failed" in found:
                    rows.append([name, f"{part:.0%}", method, "", before, found["failed"][:70], "", "", ""])
                else:
                    score = f"{found['score']:.2f} {subject.unit}"
                    eight = f"{found['w8a8']:.2f}" if "w8a8" in found else ""
                    ms = "{:.2f} -> {:.2f}".format(*found["ms"]) if "ms" in found else ""
                    rows.append([name, f"{part:.0%}", method, f"{found['macs']:.1%}", before, score, eight, ms,
                                 f"{found['seconds']:.0f}"])  # fmt: skip
    head = ["network", "target", "method", "MACs left", "float", "pruned", "W8A8 on top", "ms", "seconds"]
    text = measure.markdown("Structured pruning", head, rows)
    measure.write(RESULTS, text + f"\n{__doc__.partition('Top-1')[1]}{__doc__.partition('Top-1')[2]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--parts", nargs="*", type=float, default=[0.5, 0.75])
    parser.add_argument("--methods", nargs="*", choices=[*METHODS, *TUNED], default=[*METHODS, *TUNED])
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    run(given.models, given.parts, given.methods, given.fresh)
    if given.markdown:
        table()
