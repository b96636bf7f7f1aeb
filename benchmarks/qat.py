"""What training the quantized model gains over post-training methods: one table, one thread.

    python benchmarks/qat.py --folder runs                           # everything, hours on one core
    python benchmarks/qat.py --folder runs --models lstm_char --presets w4a4
    python benchmarks/qat.py --folder runs --files                   # what was trained, exported, in ONNX Runtime
    python benchmarks/qat.py --folder runs --only-table --markdown benchmarks/results/qat.md

Nothing is chosen by test data. A part of every network's training data is held out: no calibration and no training step sees
it. On it, on one draw, a post-training recipe is chosen from ``RECIPES`` at W4A4, and at every preset a learning rate for each
way of training; then, at the rate that is best where ranges have ten times the rate of the model, whether they have the same
one. The rows of live batch norms have the rates of learned ranges. Where the recipe that training starts from is better on the
held-out part than all rates are, no training is the choice, and the row says so. Then three other draws are calibrated and
trained with these choices, and each result is scored on the test data once. All trained rows of a network take the same steps on
the same batches and start from the chosen recipe's simulation, whose rounding freezes the ranges of weights: those of activations
are learned. Rows with live batch norms start from ranges of least squared error, and learn all.

Every quantizer has the bits of the preset, the first and the last layer's too: recipes are without the step that widens. A number
is appended to ``results.jsonl`` of the folder when it is there, and not measured again. What the first draw trained is kept as a
checkpoint. Needs the developer data set (see tests/support/data.py).
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bitwright.core.numerics.spec import Preset, activation_spec, weight_spec
from bitwright.export.targets import DEFAULT_TARGET, rules_for
from bitwright.torch import (
    Distillation,
    QuantizationSimModel,
    TrainingGuard,
    fold_all_batch_norms,
    fold_all_batch_norms_to_scale,
    quantize,
    reestimate_bn_stats,
)
from tests.support import data

RATES, PICTURE_RATES = (3e-4, 1e-3, 3e-3), (1e-4, 3e-4, 1e-3)
KEPT_START = -1  # the option of a trained row for which no training is the choice
RANGE_RATES = (10.0, 1.0)  # of ranges, times the rate of the model
# the default recipe without the steps that give sites more bits than the preset or leave them in float, and what may replace gptq
_BASE: tuple[Any, ...] = ("fold", "smooth", "activation_ranges", "seq_mse")
RECIPES: tuple[tuple[Any, ...], ...] = (
    (*_BASE, "gptq"),
    (*_BASE, "gptq", "bias_correction"),
    (*_BASE, {"adaround": {"iterations": 300, "seed": 0}}),
    (_BASE[0], {"equalize": {"keep_bounds": True}}, *_BASE[1:], "gptq"),
)
PRESETS = {
    "w4a4": Preset(weight_spec("int4"), activation_spec("uint4")),
    "w4a8": Preset(weight_spec("int4"), activation_spec("uint8")),
    "w3a8": Preset(weight_spec("int3"), activation_spec("uint8")),
    "w2a4": Preset(weight_spec("int2"), activation_spec("uint4")),
}
DRAWS = (1, 2, 3)
CHOOSING = 0  # the draw that choices are made on
RECIPE_AT = "w4a4"  # the bits that recipes are chosen at
TRAINED = ("fixed", "learned", "distilled")
LIVE = ("live", "re-estimated")
LONGER_AT = "w4a8"  # the precision at which the longer distillation is measured
NAMES = {
    "float": "float",
    "nearest": "nearest rounding",
    "recipe": "post-training recipe",
    "fixed": "trained, fixed ranges",
    "learned": "trained, learned ranges",
    "distilled": "trained, learned ranges, distilled without labels",
    "longer": "the same, four times the steps",
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
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
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


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Subject:
    """A network with its data.

    Attributes:
        model: makes it.
        batches: ``(seed, steps, batch)`` -> training batches.
        calibration: ``seed`` -> batches without labels.
        score: of a model on ``"validation"`` or ``"test"``.
        steps, batch: of training.
        metric: its name.
        higher: whether more of it is better.
        batch_norms: whether the rows with live batch norms exist.
        rates: to choose from.
        recipes: so many of ``RECIPES`` are chosen from.
        longer: whether distillation is measured with four times the steps as well, at the same rates.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Iterator[Batch]]
    calibration: Callable[[int], list[Tensor]]
    score: Callable[[Callable[[Tensor], Any], str], float]
    steps: int
    batch: int
    metric: str
    higher: bool = False
    batch_norms: bool = False
    rates: tuple[float, ...] = RATES
    recipes: int = len(RECIPES)
    longer: bool = False


HELD_OUT = 1000  # pictures of 4000


def _pictures_of(split: str) -> data.Images:
    images = data.cifar("test" if split == "test" else "train")
    return {"train": images[:-HELD_OUT], "validation": images[-HELD_OUT:], "test": images}[split]


def _pictures(seed: int, steps: int, batch: int) -> Iterator[Batch]:
    """Training pictures in random order, each mirrored and moved by up to two pixels at random."""
    images, generator = _pictures_of("train"), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        flips, tops, lefts = (torch.randint(n, (batch,), generator=generator).tolist() for n in (2, 5, 5))
        moved = []
        for x, flip, top, left in zip(F.pad(images.x[chosen], (2, 2, 2, 2)), flips, tops, lefts, strict=True):
            part = x[:, top : top + 32, left : left + 32]
            moved.append(part.flip(-1) if flip else part)
        yield torch.stack(moved), images.y[chosen]


@functools.cache
def _text(split: str) -> Tensor:
    """The last twentieth of the training text is held out."""
    text = data.shakespeare("test" if split == "test" else "train")
    cut = len(text) * 19 // 20
    return {"train": text[:cut], "validation": text[cut:], "test": text}[split]


def _characters(seed: int, steps: int, batch: int, length: int = 64) -> Iterator[Batch]:
    text, generator = _text("train"), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[i : i + length + 1] for i in at.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def _rows(split: str, length: int) -> Tensor:
    text = _text(split)
    return text[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1)


SAMPLED, LENGTH = 1440, 128  # stories and their tokens: one for each that a step of training sees


@torch.no_grad()
def _sampled() -> Tensor:
    """Stories that the float model tells, as the data set's own were made: ``[SAMPLED, LENGTH + 1]``."""
    torch.manual_seed(0)
    model, rows = data.trained("stories260k"), torch.ones(SAMPLED, 1, dtype=torch.int64)
    for _ in range(LENGTH):
        rows = torch.cat([rows, torch.multinomial(model(rows)[:, -1].softmax(-1), 1)], 1)
    return rows


def _stories(seed: int, steps: int, batch: int) -> Iterator[Batch]:
    tokens, generator = KEPT.tensor("stories", _sampled), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = tokens[torch.randint(len(tokens), (batch,), generator=generator)]
        yield rows[:, :-1], rows[:, 1:]


def _calibration(inputs: Callable[[], Tensor], count: int, batch: int) -> Callable[[int], list[Tensor]]:
    def chosen(seed: int) -> list[Tensor]:
        x = inputs()
        generator = torch.Generator().manual_seed(seed)
        return list(x[torch.randperm(len(x), generator=generator)[:count]].split(batch))

    return chosen


FLOAT_STEPS = 800  # of the decoder: AdamW, one cycle up to 2e-3, batches of 32 x 64 characters


def _train_decoder() -> Tensor:
    """The parameters of the decoder after training in float, one after the other."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, FLOAT_STEPS)
    for x, y in _characters(0, FLOAT_STEPS, 32):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        schedule.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _decoder() -> nn.Module:
    model = Decoder()
    nn.utils.vector_to_parameters(KEPT.tensor("decoder", _train_decoder), model.parameters())
    return model.eval()


class _Kept:
    """Tensors that take long to compute, in the folder of the results."""

    folder = Path()

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            save_file({name: make()}, path)
        return load_file(path)[name]


KEPT = _Kept()


def _perplexity(rows: Callable[[str], Tensor]) -> Callable[[Callable[[Tensor], Any], str], float]:
    return lambda model, split: data.perplexity(model, rows(split))


SUBJECTS = {
    "resnet20_aux": Subject(
        functools.partial(data.trained, "resnet20_aux"),
        _pictures,
        _calibration(lambda: _pictures_of("train").x, 256, 32),
        lambda model, split: data.accuracy(model, _pictures_of(split)),
        240,
        32,
        "accuracy, %",
        higher=True,
        batch_norms=True,
        rates=PICTURE_RATES,
        recipes=1,
    ),
    "lstm_char": Subject(
        functools.partial(data.trained, "lstm_char"),
        _characters,
        _calibration(lambda: _rows("train", 64)[:, :-1], 64, 16),
        _perplexity(lambda split: _rows(split, 128)[:160]),
        300,
        32,
        "perplexity",
    ),
    "decoder": Subject(
        _decoder,
        _characters,
        _calibration(lambda: _rows("train", 64)[:, :-1], 64, 16),
        _perplexity(lambda split: _rows(split, 64)[:320]),
        360,
        32,
        "perplexity",
    ),
    "mobilenet_v2_cifar": Subject(
        functools.partial(data.trained, "mobilenet_v2_cifar"),
        _pictures,
        _calibration(lambda: _pictures_of("train").x, 256, 32),
        lambda model, split: data.accuracy(model, _pictures_of(split)),
        300,
        32,
        "accuracy, %",
        higher=True,
        batch_norms=True,
        rates=PICTURE_RATES,
        longer=True,
    ),
    "stories260k": Subject(
        functools.partial(data.trained, "stories260k"),
        _stories,
        _calibration(lambda: data.stories("calib")[:24, :-1], 24, 8),
        _perplexity(lambda split: data.stories("test")[:64] if split == "test" else data.stories("calib")[24:]),
        180,
        8,
        "perplexity",
        recipes=1,
        longer=True,
    ),
}


# ------------------------------------------------------------------------------------------------ one number


@dataclass(frozen=True)
class Cell:
    """One number: a row of the table, or what a choice is made by.

    Attributes:
        network, preset, row: what is measured.
        draw: seed of calibration and of training.
        split: what it is scored on.
        option: index into ``RECIPES``, or into :func:`rates_of` of the network; of rows that have neither, 0.
    """

    network: str
    preset: str
    row: str
    draw: int
    split: str
    option: int


class Results:
    """The lines of a results file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        self.lines = measure.read_rows(self.path)

    def find(self, cell: Cell) -> dict[str, Any] | None:
        wanted = asdict(cell).items()
        return next((line for line in self.lines if wanted <= line.items()), None)

    def add(self, cell: Cell, **found: Any) -> None:
        line = {**asdict(cell), **found}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, file=sys.stderr, flush=True)


class Study:
    """One network at one preset: what is chosen, and then measured."""

    def __init__(self, network: str, preset: str, results: Results) -> None:
        self.network, self.preset, self.results = network, preset, results
        self.subject = SUBJECTS[network]
        self._treated: tuple[tuple[int, int], QuantizationSimModel] | None = None

    def cell(self, row: str, draw: int, split: str, option: int = 0) -> Cell:
        return Cell(self.network, self.preset, row, draw, split, option)

    # -- choices

    def held_out(self, row: str, option: int) -> float:
        """What choices are made by."""
        cell = self.cell(row, CHOOSING, "validation", option)
        if self.results.find(cell) is None:
            self.measure(row, CHOOSING, "validation", option)
        line = self.results.find(cell)
        assert line is not None
        score: float = line["score"]
        return score if self.subject.higher else -score

    def recipe(self) -> int:
        if self.subject.recipes == 1:
            return 0
        if self.preset != RECIPE_AT:
            return Study(self.network, RECIPE_AT, self.results).recipe()
        return max(range(self.subject.recipes), key=lambda option: self.held_out("recipe", option))

    def options(self) -> dict[str, int]:
        """Each way of training with its rate, or :data:`KEPT_START`."""
        start = self.held_out("recipe", self.recipe())
        best = {way: self._best_rates(way) for way in TRAINED}
        chosen = {way: option if self.held_out(way, option) > start else KEPT_START for way, option in best.items()}
        if self.subject.longer and self.preset == LONGER_AT:
            chosen["longer"] = best["distilled"]
        return chosen | ({"live": best["learned"]} if self.subject.batch_norms else {})

    def _best_rates(self, way: str) -> int:
        """The best rate, and with it the best of the rates of ranges."""
        count = len(self.subject.rates)
        best = max(range(count), key=lambda option: self.held_out(way, option))
        if way == "fixed":
            return best
        others = range(best, count * len(RANGE_RATES), count)
        return max(others, key=lambda option: self.held_out(way, option))

    # -- numbers

    def run(self, draws: Sequence[int]) -> None:
        """All rows, those of the first draws first."""
        chosen = {"nearest": 0, "recipe": self.recipe(), **self.options()}
        for draw in draws:
            for row, option in chosen.items():
                if self.results.find(self.cell(row, draw, "test", option)) is None:
                    self.measure(row, draw, "test", option)

    def measure(self, row: str, draw: int, split: str, option: int) -> None:
        start = time.process_time()
        torch.manual_seed(draw)
        if row == "live":
            return self._measure_live(draw, split, option, start)
        if row in ("nearest", "recipe"):
            sim = self.treated(draw, option) if row == "recipe" else self._quantized(draw, ("fold",))
        else:
            sim = copy.deepcopy(self.treated(draw, self.recipe()))
            start = time.process_time()
            if option != KEPT_START:
                train(sim, self.subject, row, draw, *rates_of(self.subject)[option])
        self._score(row, sim, draw, split, option, start)

    def _measure_live(self, draw: int, split: str, option: int, start: float) -> None:
        """One training, scored with the statistics that it left and with new ones."""
        sim = self._with_batch_norms(draw)
        train(sim, self.subject, "live", draw, *rates_of(self.subject)[option])
        other = copy.deepcopy(sim)
        shown = [x for x, _ in self.subject.batches(draw + 1000, 20, self.subject.batch)]
        reestimate_bn_stats(other.model, shown, num_batches=20)
        # the row that a later run looks for comes last
        for row, one in (("re-estimated", other), ("live", sim)):
            fold_all_batch_norms_to_scale(one, progress=False)
            self._score(row, one, draw, split, option, start)

    def _score(self, row: str, sim: QuantizationSimModel, draw: int, split: str, option: int, start: float) -> None:
        score = self.subject.score(sim.model.eval(), split)
        cell = self.cell(row, draw, split, option)
        if split == "test" and draw == DRAWS[0]:
            sim.save_checkpoint(self.results.folder / "-".join((self.network, self.preset, row)))
        self.results.add(cell, score=score, seconds=round(time.process_time() - start, 1))

    # -- simulations

    def treated(self, draw: int, recipe: int) -> QuantizationSimModel:
        """After a recipe; the last one is kept."""
        if self._treated is None or self._treated[0] != (draw, recipe):
            self._treated = (draw, recipe), self._quantized(draw, RECIPES[recipe])
        return self._treated[1]

    def _quantized(self, draw: int, recipe: Sequence[Any]) -> QuantizationSimModel:
        calibration = self.subject.calibration(draw)
        preset = PRESETS[self.preset]
        return quantize(self.subject.model(), calibration, preset, recipe=list(recipe), progress=False).sim

    def _with_batch_norms(self, draw: int) -> QuantizationSimModel:
        calibration = self.subject.calibration(draw)
        sim = QuantizationSimModel(self.subject.model(), calibration[0], "mse", preset=PRESETS[self.preset])
        sim.compute_encodings(calibration, progress=False)
        return sim

    def fresh(self, row: str) -> QuantizationSimModel:
        """A simulation that takes the checkpoint of ``row``."""
        model, example = self.subject.model(), self.subject.calibration(DRAWS[0])[0]
        if self.subject.batch_norms:
            fold_all_batch_norms(model, dummy_input=example)
        rules = rules_for(DEFAULT_TARGET, None)  # as quantize does
        return QuantizationSimModel(model, example, preset=PRESETS[self.preset], config_file=rules)


def rates_of(subject: Subject) -> list[tuple[float, float]]:
    """Rates of the model and of its ranges to choose from; the first so many serve for fixed ranges."""
    return [(rate, factor * rate) for factor in RANGE_RATES for rate in subject.rates]


def train(sim: QuantizationSimModel, subject: Subject, way: str, draw: int, rate: float, range_rate: float) -> None:
    """The same steps for every way: Adam on a cosine, gradients of model and ranges clipped to a norm of 1 each."""
    groups: list[dict[str, Any]] = [{"params": list(sim.model.parameters())}]
    if way != "fixed":
        sim.learn_ranges()
        groups.append({"params": sim.range_parameters(), "lr": range_rate})
    optimizer, steps = torch.optim.Adam(groups, lr=rate), subject.steps * (4 if way == "longer" else 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    guard = TrainingGuard(optimizer, sim=sim)
    distillation = Distillation(sim, teacher=subject.model().eval()) if way in ("distilled", "longer") else None
    sim.model.train()
    for x, y in subject.batches(draw, steps, subject.batch):
        if distillation is not None:
            loss = distillation(x)[0]
        else:
            output = sim.model(x)
            logits = output if isinstance(output, Tensor) else output[0]
            loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        if guard.step(loss):
            schedule.step()


# ------------------------------------------------------------------------------------------------ files


def as_deployed(study: Study, row: str) -> dict[str, Any] | None:
    """What the exported file of a trained simulation does: layer by layer, and its score on what is held out."""
    folder = study.results.folder / "-".join((study.network, study.preset, row))
    if not folder.exists():
        return None
    sim = study.fresh(row)
    sim.load_checkpoint(folder)
    seen: list[Tensor] = []
    simulated = study.subject.score(lambda x: (seen.append(x), sim.model.eval()(x))[1], "validation")
    report = sim.verify(seen[0][:4])
    with tempfile.TemporaryDirectory() as target:
        sim.export(target, "model", seen[0], samples=False)
        deployed = study.subject.score(_session(Path(target) / "model.onnx"), "validation")
    return {"verify": bool(report.ok), "simulated": simulated, "deployed": deployed}


def _session(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def compare_files(study: Study) -> None:
    """Add a line for each kept checkpoint that has none."""
    for row in (*TRAINED, "longer", *LIVE):
        cell = study.cell(row, DRAWS[0], "file")
        if study.results.find(cell) is None:
            found = as_deployed(study, row)
            if found is not None:
                study.results.add(cell, **found)


# ------------------------------------------------------------------------------------------------ the table


def table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the mean over the draws that all rows of a network and preset have, and the extremes."""
    columns = ["network", "metric", "bits", "row", "score", "draws", "chosen", "seconds", "file"]
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for line in results.lines:
        if line["split"] == "test":
            found = groups.setdefault((line["network"], line["preset"]), {})
            found.setdefault(line["row"], []).append(line)
    rows = []
    for network in SUBJECTS:
        for preset in ("float", *PRESETS):
            group = {row: _of_last_choice(lines) for row, lines in groups.get((network, preset), {}).items()}
            common = set(DRAWS).intersection(*({line["draw"] for line in lines} for lines in group.values()))
            for row in NAMES:
                lines = [line for line in group.get(row, ()) if line["draw"] in common]
                if lines:
                    rows.append(_row(results, network, preset, row, lines))
    return columns, rows


def _of_last_choice(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["option"] == lines[-1]["option"]]


def _row(results: Results, network: str, preset: str, row: str, lines: list[dict[str, Any]]) -> list[str]:
    subject = SUBJECTS[network]
    places = ".2f" if subject.higher else ".3f"
    scores = [line["score"] for line in lines]
    mean, low, high = (format(f(scores), places) for f in (statistics.fmean, min, max))
    spread = mean if low == high else f"{mean} ({low} to {high})"
    option = lines[-1]["option"]
    chosen = {"float": "", "nearest": "", "recipe": f"{option + 1} of {subject.recipes}"}.get(row)
    if chosen is None:
        chosen = "not to train" if option == KEPT_START else _rates_told(subject, row, option)
    file = results.find(Cell(network, preset, row, DRAWS[0], "file", 0))
    told = "" if file is None else _told(file, places)
    seconds = f"{statistics.fmean(line['seconds'] for line in lines):.0f}"
    return [network, subject.metric, preset, NAMES[row], spread, str(len(scores)), chosen, seconds, told]


def _rates_told(subject: Subject, row: str, option: int) -> str:
    rate, range_rate = rates_of(subject)[option]
    return f"{rate:g}" if row == "fixed" else f"{rate:g}, ranges {range_rate:g}"


def _told(file: dict[str, Any], places: str) -> str:
    simulated, deployed = (format(file[name], places) for name in ("simulated", "deployed"))
    return f"{'verified' if file['verify'] else 'differs'}, {deployed} (simulated {simulated})"


def measure_float(network: str, results: Results) -> None:
    cell = Cell(network, "float", "float", DRAWS[0], "test", 0)
    if results.find(cell) is None:
        start = time.process_time()
        score = SUBJECTS[network].score(SUBJECTS[network].model(), "test")
        results.add(cell, score=score, seconds=round(time.process_time() - start, 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the numbers and checkpoints")
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--draws", type=int, default=len(DRAWS), help="so many of the three")
    parser.add_argument("--files", action="store_true", help="export what was trained, and train nothing")
    parser.add_argument("--only-table", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = Results(options.folder)
    KEPT.folder = options.folder
    for preset in [] if options.only_table else options.presets:
        for network in options.models:
            study = Study(network, preset, results)
            if options.files:
                compare_files(study)
            else:
                measure_float(network, results)
                study.run(DRAWS[: options.draws])
    columns, rows = table(results)
    title = "Training the quantized model against post-training methods: mean over the draws, and the extremes"
    measure.show(title, columns, rows)
    measure.save(None, options.markdown, title, columns, rows, None)


if __name__ == "__main__":
    main()
