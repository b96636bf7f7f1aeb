"""Which gains the judge of the default recipe should believe: three rules on networks that nothing was tuned on.

    python benchmarks/recipe_rule.py --results rule.jsonl                    # an hour on one core; resumes
    python benchmarks/recipe_rule.py --results rule.jsonl --only-table --markdown benchmarks/results/recipe_rule.md

W8A8. For each network, number of samples and draw of samples and weights: signal-to-noise ratio of the outputs on 400 samples
that nothing saw, of the plain simulation, calibrated on all samples, and of the default recipe with every rule. The samples are
eight batches and more. `mean` keeps a step that gains on the held-out samples; `half` one of which half of the paired 95 %
interval is a gain too, `full` one of which the whole interval is, but for `widen`, which adds bits and fits nothing. The last
three undo the whole recipe where its gain over the plain simulation is not as sure.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import measure  # first: it puts the repository on the path
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitwright
from bitwright.core.simulation import output_quality
from bitwright.methods.front_end import front_end_of
from bitwright.recipes.judge import Judge
from tests.support import data
from tests.support.cases import vary_norms_and_biases

#: rule -> shares of half the 95 % interval that a step, and the result beside the plain simulation, must gain at least
RULES = {
    "mean": (0.0, 0.0), "half": (0.5, 0.0), "full": (1.0, 0.0), "whole": (0.0, 1.0), "half, half of the whole": (0.5, 0.5),
    "half, whole": (0.5, 1.0),
}  # fmt: skip
_UNSEEN, _LOSS = 400, 0.3  # samples; dB that are a loss


class HashGrid(nn.Module):
    """Multiresolution grid of features, tables looked up by hashed corners, and a small network (Mueller et al. 2022)."""

    def __init__(self, levels: int = 4, entries: int = 512, width: int = 2) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(levels))
        self.entries = entries
        self.net = nn.Sequential(
            nn.Linear(levels * width, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for level, table in enumerate(self.tables):
            at = x * (4 * 2**level)
            low = torch.floor(at)
            part = at - low
            features = 0.0
            for corner in range(4):
                step = torch.tensor([corner & 1, corner >> 1])
                place = low.long() + step
                index = (place[:, 0] * 1 ^ place[:, 1] * 2654435761) % self.entries
                weight = torch.where(step.bool(), part, 1 - part).prod(1, keepdim=True)
                features = features + weight * table(index)
            found.append(features)
        return self.net(torch.cat(found, 1))


class ResidualVQ(nn.Module):
    """Encoder, three codebooks that quantize what the one before left, decoder (SoundStream)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv1d(1, 16, 7, 2, 3), nn.ELU(), nn.Conv1d(16, 32, 5, 2, 2), nn.ELU(), nn.Conv1d(32, 16, 3, 1, 1)
        )
        self.books = nn.ParameterList(nn.Parameter(torch.randn(64, 16) * 0.5 ** (i + 1)) for i in range(3))
        self.decode = nn.Sequential(
            nn.Conv1d(16, 32, 3, 1, 1),
            nn.ELU(),
            nn.ConvTranspose1d(32, 16, 4, 2, 1),
            nn.ELU(),
            nn.ConvTranspose1d(16, 1, 4, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        left = self.encode(x).transpose(1, 2)
        total = torch.zeros_like(left)
        for book in self.books:
            far = (left.unsqueeze(2) - book).square().sum(-1)
            chosen = F.embedding(far.argmin(-1), book)
            total, left = total + chosen, left - chosen
        return self.decode(total.transpose(1, 2))


class SchNet(nn.Module):
    """Continuous-filter convolutions over the distances of atoms; an energy per molecule (Schuett et al. 2017)."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.outer = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.head = nn.Sequential(nn.Linear(width, 16), nn.Softplus(), nn.Linear(16, 1))
        self.register_buffer("centres", torch.linspace(0, 5, 16))

    def forward(self, kinds: Tensor, places: Tensor) -> Tensor:
        x = self.embed(kinds)
        distance = (places.unsqueeze(1) - places.unsqueeze(2)).square().sum(-1).add(1e-6).sqrt()
        radial = torch.exp(-4 * (distance.unsqueeze(-1) - self.centres).square())
        for make, inner, outer in zip(self.filters, self.inner, self.outer, strict=True):
            x = x + outer((make(radial) * inner(x).unsqueeze(1)).sum(2))
        return self.head(x).sum((1, 2))


class NBeats(nn.Module):
    """Stacks of doubly residual blocks that forecast a series (Oreshkin et al. 2020)."""

    def __init__(self, back: int = 40, ahead: int = 10, blocks: int = 3, width: int = 48) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(back, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
            )
            for _ in range(blocks)
        )
        self.backs = nn.ModuleList(nn.Linear(width, back) for _ in range(blocks))
        self.heads = nn.ModuleList(nn.Linear(width, ahead) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        forecast = torch.zeros((), device=x.device)
        for block, back, head in zip(self.blocks, self.backs, self.heads, strict=True):
            hidden = block(x)
            x, forecast = x - back(hidden), forecast + head(hidden)
        return forecast


class Triplet(nn.Module):
    """One tower on three pictures, distances of normalised embeddings (FaceNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 24),
        )  # fmt: skip

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        a, s, o = (F.normalize(self.tower(x), dim=1) for x in (anchor, same, other))
        return (a - s).square().sum(1), (a - o).square().sum(1)


class PointNet(nn.Module):
    """Shared layers over points, a maximum over them, a class (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 32, 1),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, 64, 1),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Conv1d(64, 128, 1),
        )
        self.head = nn.Sequential(nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(2))


class Mixer(nn.Module):
    """Gated convolutions with squeeze and excitation, a norm over channels and GELU."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.deep = nn.ModuleList(nn.Conv2d(width, width, 5, padding=2, groups=width) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.wide = nn.ModuleList(nn.Conv2d(width, 3 * width, 1) for _ in range(2))
        self.back = nn.ModuleList(nn.Conv2d(3 * width, width, 1) for _ in range(2))
        self.gate = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for deep, norm, wide, back, gate in zip(self.deep, self.norms, self.wide, self.back, self.gate, strict=True):
            y = back(F.gelu(wide(norm(deep(x)))))
            x = x + y * torch.sigmoid(gate(y.mean((2, 3), keepdim=True)))
        return self.head(x.mean((2, 3)))


Samples = Callable[[int, torch.Generator], tuple[Tensor, ...]]


def _normal(*shape: int, scale: float = 1.0) -> Samples:
    return lambda count, generator: (scale * torch.randn(count, *shape, generator=generator),)


def _uneven(*shape: int) -> Samples:
    """Samples of unlike loudness, as recordings and photographs are."""

    def make(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        loud = torch.exp(0.5 * torch.randn(count, *(1,) * len(shape), generator=generator))
        return (loud * torch.randn(count, *shape, generator=generator),)

    return make


def _molecules(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(0, 10, (count, 8), generator=generator), 1.5 * torch.randn(count, 8, 3, generator=generator))


def _pictures(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Photographs of the developer data set."""
    chosen = torch.randint(0, 4000, (count,), generator=generator)
    return (data.cifar("train").x[chosen],)


def _three(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    anchor, other = (torch.rand(count, 3, 24, 24, generator=generator) for _ in range(2))
    return anchor, anchor + 0.3 * torch.randn(anchor.shape, generator=generator), other


def _points(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (
        F.normalize(torch.randn(count, 3, 64, generator=generator), dim=1)
        * (0.5 + torch.rand(count, 1, 1, generator=generator)),
    )


@dataclass(frozen=True)
class Network:
    """A row: how a model is made, and its samples."""

    model: Callable[[], nn.Module]
    samples: Samples
    random: bool = True  # weights differ from draw to draw


NETWORKS = {
    "hash grid": Network(HashGrid, lambda count, g: (torch.rand(count, 2, generator=g),)),
    "residual VQ": Network(ResidualVQ, _uneven(1, 256)),
    "SchNet": Network(SchNet, _molecules),
    "N-BEATS": Network(NBeats, lambda count, g: (torch.randn(count, 40, generator=g).cumsum(1),)),
    "Triplet": Network(Triplet, _three),
    "PointNet": Network(PointNet, _points),
    "mixer": Network(Mixer, _uneven(3, 32, 32)),
    "ResNet-20": Network(lambda: data.trained("resnet20_aux"), _pictures, random=False),
    "MobileNetV2": Network(lambda: data.trained("mobilenet_v2_cifar"), _pictures, random=False),
}


def batches_of(samples: tuple[Tensor, ...], rows: int) -> list[Any]:
    parts = list(zip(*(tensor.split(rows) for tensor in samples), strict=True))
    return [part[0] if len(part) == 1 else part for part in parts]


def run(name: str, count: int, draw: int, steps: Sequence[float]) -> dict[str, Any]:
    """A row of results: what the recipe gives where its steps must gain each of these shares of an interval."""
    row, generator = NETWORKS[name], torch.Generator().manual_seed(1000 * draw + count)
    torch.manual_seed(draw)
    model = row.model().eval()
    if row.random:
        vary_norms_and_biases(model)
    samples = batches_of(row.samples(count, generator), max(count // 16, 4))
    unseen = batches_of(row.samples(_UNSEEN, generator), 50)
    given = front_end_of(model).given(model, None, None)
    judge = Judge(unseen, given.outputs)

    def rated(**options: Any) -> tuple[float, Any]:
        result = bitwright.quantize(model, samples, progress=False, fallback=False, measure_speed=False, **options)
        judge.look_at_layers(result.sim)
        return judge.rate(judge.answers(result.sim)).sqnr, result

    found: dict[str, Any] = {"network": name, "samples": count, "draw": draw, "plain": rated(recipe=["fold"])[0]}
    least = -math.inf  # share up to which the last result is the same
    for share in steps:
        if share > least:
            with mock.patch.object(output_quality, "_SURE", share):
                decibel, result = rated()
            kept = [o for o in result.report if o.kept and o.gain is not None]
            least = min((o.gain.decibel / max(o.gain.half_width, 1e-9) for o in kept), default=math.inf)
            whole = result.quality.gain_over(result.plain)
        found[str(share)] = {
            "unseen": decibel, "gain": whole.decibel, "half": whole.half_width,
            "steps": [(o.step.partition("(")[0], o.kept, o.gain.decibel, o.gain.half_width) for o in result.report if o.gain],
        }  # fmt: skip
    return found


def outcome(row: dict[str, Any], rule: str) -> float:
    """dB on unseen samples that a rule gains over the plain simulation; it is that where the rule undoes all."""
    share, of_all = RULES[rule]
    one = row[str(share)]
    return one["unseen"] - row["plain"] if one["gain"] >= of_all * one["half"] else 0.0


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for name in NETWORKS:
        for count in sorted({row["samples"] for row in rows}):
            own = [row for row in rows if (row["network"], row["samples"]) == (name, count)]
            if own:
                lines.append([name, str(count), str(len(own)), f"{statistics.mean(r['plain'] for r in own):.2f}"])
                lines[-1] += [_cell([outcome(row, rule) for row in own]) for rule in RULES]
    lines.append(["all", "", str(len(rows)), "", *(_cell([outcome(row, rule) for row in rows]) for rule in RULES)])
    return ["network", "samples", "draws", "plain, dB", *RULES], lines


def _cell(gains: Sequence[float]) -> str:
    lost = sum(gain < -_LOSS for gain in gains)
    return f"{statistics.mean(gains):+.2f}, least {min(gains):+.2f}" + (f", {lost} lose" if lost else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--samples", nargs="*", type=int, default=[32, 128])
    parser.add_argument("--draws", nargs="*", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--only-table", action="store_true")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    logging.getLogger("bitwright").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    done = {(r["network"], r["samples"], r["draw"]) for r in measure.read_rows(options.results)}
    for draw in () if options.only_table else options.draws:
        for name in options.networks:
            for count in options.samples:
                if (name, count, draw) not in done:
                    row = run(name, count, draw, sorted({share for share, _ in RULES.values()}))
                    with options.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                    print(row, file=sys.stderr, flush=True)
    columns, lines = table(measure.read_rows(options.results))
    measure.show("rules", columns, lines)
    measure.save(None, options.markdown, "Which gains the judge believes", columns, lines, None)


if __name__ == "__main__":
    main()
