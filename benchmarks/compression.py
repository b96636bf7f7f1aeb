"""What low-rank factors and masks cost networks without training, beside the multiplications that they leave.

    python benchmarks/compression.py                          # some twenty minutes on one core
    python benchmarks/compression.py --models resnet20_aux --ratios 0.75

Top-1 accuracy in per cent on the test data, or perplexity per token. Calibration data: 256 training images, 100 of ImageNet,
16,384 characters, 32 stories. Factors of a layer are chosen among all forms, unless a form is named. Needs the developer data
set (see tests/support/data.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import torch
from torch import nn

from bitwright.errors import ConfigError
from bitwright.torch import sparsify_model, svd_model
from tests.support import data


@dataclass(frozen=True)
class Subject:
    """A network, its calibration data, and how it is scored."""

    calibration: Callable[[], list[Any]]
    score: Callable[[nn.Module], float]


def trained(name: str) -> nn.Module:
    """A copy of a network; ResNet-20 without its auxiliary head, which only training uses."""
    model = data.trained(name)
    if name == "resnet20_aux":
        model.aux = None
    return model


def _lstm_batches() -> list[Any]:
    return list(data.shakespeare("train")[: 64 * 256].reshape(64, 256).split(16))


SUBJECTS = {
    "resnet20_aux": Subject(
        lambda: list(data.cifar("train").x[:256].split(64)), lambda m: data.accuracy(m, data.cifar())
    ),
    "mobilenet_v2_cifar": Subject(
        lambda: list(data.cifar("train").x[:256].split(64)), lambda m: data.accuracy(m, data.cifar())
    ),
    "mobilenet_v1_025": Subject(
        lambda: list(data.imagenet("calibration").x.split(25)), lambda m: data.accuracy(m, data.imagenet())
    ),
    "lstm_char": Subject(_lstm_batches, lambda m: data.perplexity(m, data.shakespeare()[: 64 * 257].reshape(64, 257))),
    "stories260k": Subject(
        lambda: list(data.stories("calib")[:, :-1].split(8)), lambda m: data.perplexity(m, data.stories())
    ),
}
FACTORS: dict[str, dict[str, Any]] = {
    "spatial SVD of the weights": {"forms": ("spatial",), "data_aware": False},
    "spatial SVD of the outputs": {"forms": ("spatial",)},
    "weight SVD of the weights": {"forms": ("weight",), "data_aware": False},
    "weight SVD of the outputs": {"forms": ("weight",)},
    "all forms": {},
}
MASKS = {f"{method}, {pattern}": {"method": method, "pattern": pattern} for method in ("magnitude", "wanda", "sparsegpt")
         for pattern in ("unstructured", "2:4")}  # fmt: skip
COLUMNS = ["method", "ratio", "MACs left", "params left", "score", "seconds"]


def rows_of(name: str, methods: Sequence[str], ratios: Sequence[float]) -> list[list[str]]:
    """The rows of one network."""
    subject = SUBJECTS[name]
    batches = subject.calibration()
    rows = [[f"{name}, as trained", "", "1", "1", f"{subject.score(trained(name)):.2f}", ""]]
    print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    for method in methods:
        for ratio in ratios if method in FACTORS else (0.5,):
            model, begin = trained(name), time.perf_counter()
            try:
                if method in FACTORS:
                    report = svd_model(model, batches, macs=ratio, progress=False, **FACTORS[method])
                    left = [report.after[n] / report.before[n] for n in ("macs", "params")]
                else:
                    sparsify_model(model, batches, sparsity=0.5, progress=False, **MASKS[method])
                    left = [1.0, 1.0]
            except ConfigError as error:  # a target that a form cannot meet is a row of the table
                rows.append([f"{name}, {method}", f"{ratio:g}", "", "", str(error)[:60], ""])
                print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
                continue
            spent = time.perf_counter() - begin
            with torch.no_grad():
                score = subject.score(model)
            rows.append(
                [f"{name}, {method}", f"{ratio:g}", *(f"{n:.3f}" for n in left), f"{score:.2f}", f"{spent:.0f}"]
            )
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--methods", nargs="+", choices=[*FACTORS, *MASKS], default=[*FACTORS, *MASKS])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.75, 0.5])
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    logging.getLogger("bitwright").setLevel(logging.ERROR)
    rows = [row for name in options.models for row in rows_of(name, options.methods, options.ratios)]
    title = "Low-rank factors and masks without training"
    measure.show(title, COLUMNS, rows)
    measure.save(options.json, options.markdown, title, COLUMNS, rows, rows)


if __name__ == "__main__":
    main()
