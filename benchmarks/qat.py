"""What training the quantized model gains over post-training methods: one table, one thread.

    python benchmarks/qat.py --results qat.jsonl                     # everything, hours on one core
    python benchmarks/qat.py --results qat.jsonl --models lstm_char --presets w4a4 --seeds 0
    python benchmarks/qat.py --results qat.jsonl --only-table --markdown benchmarks/results/qat.md

Every number is appended to the results file when it is there, and not measured again. All trained rows of a network take
the same steps on the same batches, start from the post-training recipe's simulation, and use one learning rate for every
network and row. The rates and the recipe were changed once after a first run on seed 0 had been scored on the test data (see
the note below the table), so they are not blind to it; no row is picked by its score. Every quantizer has the bits of the
preset, the first and the last layer's too: the recipe is the default one without its steps that widen. The rows "live batch
norms" keep the batch norms in training, start from nearest rounding, and are folded into the weights' scales before the
score is taken. Needs the developer data set (see tests/support/data.py).
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.numerics.spec import Preset, activation_spec, weight_spec
from bitwright.torch import (
    Distillation,
    QuantizationSimModel,
    TrainingGuard,
    fold_all_batch_norms_to_scale,
    quantize,
    reestimate_bn_stats,
)
from tests.support import data

RATE, RANGE_RATE = 5e-4, 3e-3
# the default recipe without the steps that give sites more bits than the preset or leave them in float
RECIPE = ("fold", "smooth", "activation_ranges", "seq_mse", "gptq")
PRESETS = {
    "w4a8": Preset(weight_spec("int4"), activation_spec("uint8")),
    "w4a4": Preset(weight_spec("int4"), activation_spec("uint4")),
    "w3a8": Preset(weight_spec("int3"), activation_spec("uint8")),
    "w2a4": Preset(weight_spec("int2"), activation_spec("uint4")),
}
UNTRAINED = ("nearest", "recipe")
TRAINED = ("fixed", "learned", "distilled")
LIVE = ("live", "re-estimated")
NAMES = {
    "float": "float",
    "nearest": "nearest rounding",
    "recipe": "post-training recipe",
    "fixed": "trained, fixed ranges",
    "learned": "trained, learned ranges",
    "distilled": "trained, learned ranges, distilled without labels",
    "live": "trained, learned ranges, live batch norms",
    "re-estimated": "the same, statistics re-estimated",
}


# ------------------------------------------------------------------------------------------------ subjects


class Decoder(nn.Module):
    """A decoder of two layers over characters, trained here in float."""

    def __init__(self, vocabulary: int = 65, width: int = 96, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.register_buffer("mask", torch.full((length, length), -torch.inf).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, T]`` -> logits ``[B, T, vocabulary]``."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.place.weight[:length]
        for layer in self.layers:
            x = layer(x, src_mask=self.mask[:length, :length])
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Subject:
    """A network with its data: steps of training, examples per step, and which direction of the metric is better."""

    model: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
    calibration: Callable[[int], list[Tensor]]
    score: Callable[[nn.Module], float]
    steps: int
    batch: int
    metric: str
    batch_norms: bool = False


def _pictures(seed: int, steps: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training pictures in random order, mirrored and moved by up to two pixels at random."""
    images, generator = data.cifar("train"), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        flip, dy, dx = (int(torch.randint(n, (), generator=generator)) for n in (2, 5, 5))
        x = F.pad(images.x[chosen], (2, 2, 2, 2))[:, :, dy : dy + 32, dx : dx + 32]
        yield (x.flip(-1) if flip else x).contiguous(), images.y[chosen]


def _characters(seed: int, steps: int, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    text, generator = data.shakespeare("train"), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[i : i + length + 1] for i in at.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def _stories(seed: int, steps: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    tokens, generator = data.stories("calib"), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = tokens[torch.randint(len(tokens), (batch,), generator=generator)]
        yield rows[:, :-1], rows[:, 1:]


def _calibration(inputs: Callable[[], Tensor], count: int, batch: int) -> Callable[[int], list[Tensor]]:
    def chosen(seed: int) -> list[Tensor]:
        x = inputs()
        generator = torch.Generator().manual_seed(seed)
        return list(x[torch.randperm(len(x), generator=generator)[:count]].split(batch))

    return chosen


def _rows(split: str, length: int) -> Tensor:
    text = data.shakespeare(split)
    return text[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1)


@functools.cache
def _decoder() -> nn.Module:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, FLOAT_STEPS)
    for x, y in _characters(0, FLOAT_STEPS, 32, 64):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


FLOAT_STEPS = 800

SUBJECTS = {
    name: Subject(
        functools.partial(data.trained, name),
        _pictures,
        _calibration(lambda: data.cifar("train").x, 512, 32),
        lambda model: data.accuracy(model, data.cifar()),
        steps,
        64,
        "accuracy, %",
        True,
    )
    for name, steps in (("mobilenet_v2_cifar", 80), ("resnet20_aux", 80))
} | {
    "lstm_char": Subject(
        functools.partial(data.trained, "lstm_char"),
        functools.partial(_characters, length=64),
        _calibration(lambda: _rows("train", 64)[:, :-1], 64, 16),
        lambda model: data.perplexity(model, _rows("test", 128)[:160]),
        60,
        32,
        "perplexity",
    ),
    "stories260k": Subject(
        functools.partial(data.trained, "stories260k"),
        _stories,
        _calibration(lambda: data.stories("calib")[:, :-1], 32, 8),
        lambda model: data.perplexity(model, data.stories()),
        80,
        8,
        "perplexity",
    ),
    "decoder": Subject(
        lambda: copy.deepcopy(_decoder()),
        functools.partial(_characters, length=64),
        _calibration(lambda: _rows("train", 64)[:, :-1], 64, 16),
        lambda model: data.perplexity(model, _rows("test", 64)[:320]),
        120,
        32,
        "perplexity",
    ),
}


# ------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class Cell:
    """One number of the table."""

    network: str
    preset: str
    row: str
    seed: int


def cells(networks: Sequence[str], presets: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """What is to be measured."""
    found = []
    for seed in seeds:
        for network in networks:
            found += [Cell(network, "", "float", 0)] * (seed == seeds[0])
            for preset in presets:
                rows = (*UNTRAINED, *TRAINED, *(LIVE if SUBJECTS[network].batch_norms else ()))
                found += [Cell(network, preset, row, seed) for row in rows]
    return found


def value(cell: Cell) -> dict[str, Any]:
    """The score of a cell; of trained rows also whether the exported file agrees."""
    subject = SUBJECTS[cell.network]
    torch.manual_seed(cell.seed)
    model = subject.model()
    if cell.row == "float":
        return {"score": subject.score(model)}
    sim = simulation(subject, model, cell)
    if cell.row not in UNTRAINED:
        train(sim, subject, cell)
    if cell.row == "re-estimated":
        shown = [x for x, _ in subject.batches(cell.seed + 1000, 20, subject.batch)]
        reestimate_bn_stats(sim.model, shown, num_batches=20)
    if cell.row in LIVE:
        fold_all_batch_norms_to_scale(sim, progress=False)
    found: dict[str, Any] = {"score": subject.score(sim.model.eval())}
    if cell.row not in UNTRAINED:
        found["file"] = agreement(sim, subject.calibration(cell.seed)[0][:4])
    return found


def agreement(sim: QuantizationSimModel, batch: Tensor) -> str:
    """Whether the exported file gives the simulation's codes, layer by layer, and with which kernels."""
    report = sim.verify(batch)
    if report.ok:
        return "yes"
    same = all(row.as_float.equal >= 0.999 and row.as_float.lsb <= 1 for row in report.rows)
    return "with float kernels" if same and not report.unchecked and "float" not in report.failures else "no"


def simulation(subject: Subject, model: nn.Module, cell: Cell) -> QuantizationSimModel:
    """What a row starts from."""
    calibration = subject.calibration(cell.seed)
    preset = PRESETS[cell.preset]
    if cell.row in LIVE:
        sim = QuantizationSimModel(model, calibration[0], "mse", preset=preset)
        sim.compute_encodings(calibration, progress=False)
        return sim
    recipe = ["fold"] if cell.row == "nearest" else list(RECIPE)
    return quantize(model, calibration, preset, recipe=recipe, progress=False).sim


def train(sim: QuantizationSimModel, subject: Subject, cell: Cell) -> None:
    """The same steps for every row."""
    groups: list[dict[str, Any]] = [{"params": list(sim.model.parameters())}]
    if cell.row != "fixed":
        sim.learn_ranges()
        groups.append({"params": sim.range_parameters(), "lr": RANGE_RATE})
    optimizer = torch.optim.Adam(groups, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, subject.steps)
    guard = TrainingGuard(optimizer, sim=sim)
    distillation = Distillation(sim) if cell.row == "distilled" else None
    sim.model.train()
    for x, y in subject.batches(cell.seed, subject.steps, subject.batch):
        if distillation is not None:
            loss = distillation(x)[0]
        else:
            output = sim.model(x)
            logits = output if isinstance(output, Tensor) else output[0]
            loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        if guard.step(loss):
            schedule.step()


# ------------------------------------------------------------------------------------------------ the table


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def table(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the mean over the seeds measured, and the extremes where they differ."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["network"], line["preset"], line["row"]), []).append(line)
    rows = []
    for network, subject in SUBJECTS.items():
        for preset in ("", *PRESETS):
            for row in NAMES:
                found = groups.get((network, preset, row))
                if not found:
                    continue
                places = ".3f" if subject.metric == "perplexity" else ".2f"
                scores = [line["score"] for line in found]
                mean, low, high = (format(f(scores), places) for f in (statistics.fmean, min, max))
                spread = mean if low == high else f"{mean} ({low} to {high})"
                minutes = f"{statistics.fmean(line['seconds'] for line in found) / 60:.1f}"
                agrees = ", ".join(sorted({line.get("file", "") for line in found}))
                what = [network, subject.metric, preset or "float", NAMES[row]]
                rows.append([*what, spread, str(len(found)), minutes, agrees])
    columns = ["network", "metric", "bits", "row", "score", "seeds", "minutes", "file agrees"]
    return columns, rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="file of the numbers, one line each")
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only-table", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for cell in [] if options.only_table else cells(options.models, options.presets, options.seeds):
        known = [{k: line[k] for k in asdict(cell)} for line in read(options.results)]
        if asdict(cell) in known:
            continue
        start = time.perf_counter()
        line = {**asdict(cell), **value(cell), "seconds": round(time.perf_counter() - start, 1)}
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, file=sys.stderr, flush=True)
    columns, rows = table(read(options.results))
    title = "Training the quantized model against post-training methods: mean over the seeds, and the extremes where they differ"
    measure.show(title, columns, rows)
    measure.save(None, options.markdown, title, columns, rows, None)


if __name__ == "__main__":
    main()
