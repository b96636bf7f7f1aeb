"""How often the true drop of a chosen mixed precision exceeds what is allowed: 20 splits of the test data.

    python benchmarks/mixed_promise.py --results promise.jsonl --markdown benchmarks/results/mixed_promise.md

The LSTM and ResNet-20 of the developer data set, W8A8, W8A16, W4A8 and W4A16, weights to nearest (the promise is one of
statistics). Of 384 rows of the test text, or 1,200 test pictures, each split gives half to the search, whose metric is the loss
of each row in nats, or whether each picture is wrong (half of them choose, half have the last word), and half stays unseen. A
search promises with a confidence of 90 % that the drop is within ``allowed_drop``. Outputs of a choice are computed once for all
splits.

The share of results beyond what is allowed comes with its 95 % interval (Clopper and Pearson). Drops on unseen samples have an
error of sampling themselves, which makes that share larger rather than smaller.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import torch

from bitwright.analysis.subject import open_subject
from bitwright.precision.candidates import as_candidates, simulation_of
from bitwright.precision.choice import Choice
from bitwright.precision.measure import Metric
from bitwright.precision.result import Goal
from bitwright.precision.search import CANDIDATES, Explorer
from tests.support import data
from tests.support.tasks import TASKS

SPLITS = 20
ALLOWED = {"lstm_char": (0.01, 0.02, 0.04), "resnet20_aux": (0.03,)}  # nats; share of the pictures
UNITS = {"lstm_char": "nats", "resnet20_aux": "accuracy"}
PICTURES, ROWS = 1200, 384
Values = np.ndarray[Any, Any]


def text_losses(model: Any) -> Values:
    """Of every row of the test text, in nats per character."""
    rows = data.shakespeare("test")[: ROWS * 129].reshape(ROWS, 129)
    with torch.no_grad():
        scores = model(rows[:, :-1])
    scores = scores if isinstance(scores, torch.Tensor) else scores[0]
    each = torch.nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return each.reshape(ROWS, -1).mean(1).double().numpy()


def picture_errors(model: Any) -> Values:
    """Of every picture: 1 where the first answer is wrong."""
    images = data.cifar()
    found = []
    with torch.no_grad():
        for x in images.x[:PICTURES].split(200):
            scores = model(x)
            found.append((scores if isinstance(scores, torch.Tensor) else scores[0]).argmax(1))
    return (torch.cat(found) != images.y[:PICTURES]).double().numpy()


LOSSES = {"lstm_char": text_losses, "resnet20_aux": picture_errors}


class Remembered(Explorer):
    """A search that computes the outputs of each choice once, whatever the split."""

    def __init__(self, name: str) -> None:
        candidates, batches = as_candidates(CANDIDATES), TASKS[name]().batches(0)
        subject = open_subject(simulation_of(data.trained(name), batches, candidates[1]))
        self._losses_of, self.subject = LOSSES[name], subject
        self._choice: Choice | None = None
        self._noises: dict[Choice, float] = {}
        self._values: dict[Choice, Values] = {}
        super().__init__(subject, candidates, batches, time.monotonic(), None, False, 32, 0, None)
        with subject.in_float():
            self.reference = self._losses_of(subject.runnable())

    def noise(self, choice: Choice, *, fitted: bool = True) -> float:
        self._choice = choice
        if choice not in self._noises:  # weights to nearest: the same whether fitted or not
            self._noises[choice] = super().noise(choice, fitted=False)
        return self._noises[choice]

    def set(self, choice: Choice) -> None:
        self._choice = choice

    def _check_metric(self, metric: Metric) -> None:
        self._choice = None  # what is measured there is no choice
        super()._check_metric(metric)

    def losses(self) -> Values:
        """Of what is set."""
        if self._choice is None:
            return self._losses_of(self.subject.runnable())
        if self._choice not in self._values:
            self.library.apply(self._choice)
            self._values[self._choice] = self._losses_of(self.subject.runnable())
        return self._values[self._choice]


def run(name: str, rows: list[dict[str, Any]], results: Path) -> None:
    """Add the rows that are missing."""
    known = {(r["split"], r["allowed"]) for r in rows if r["name"] == name}
    if len(known) == SPLITS * len(ALLOWED[name]):
        return
    explorer = Remembered(name)
    n, commit = len(explorer.reference), measure.machine()["commit"]
    for split in range(SPLITS):
        order = np.random.default_rng(split).permutation(n)
        seen, unseen = order[: n // 2], order[n // 2 :]
        for allowed in ALLOWED[name]:
            if (split, allowed) in known:
                continue
            metric = of_split(explorer, seen, allowed, split)
            found = explorer.run(Goal("weight_bytes", {}, metric, None, 12, 0.9), lambda: None)
            row: dict[str, Any] = {"name": name, "split": split, "allowed": allowed, "met": found.met}
            if found.chosen is not None:
                row["drop"] = float((explorer.losses() - explorer.reference)[unseen].mean())
                row["bytes"] = found.chosen.costs["weight_bytes"]
            row["evaluations"], row["commit"] = found.evaluations, commit
            rows.append(row)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")


def of_split(explorer: Remembered, seen: Values, allowed: float, split: int) -> Metric:
    """The metric of a search: the losses of what it sees."""
    started = False

    def metric(model: Any) -> Values:
        nonlocal started
        if not started:  # the float model comes first
            started = True
            return explorer.reference[seen]
        return explorer.losses()[seen]

    return Metric(explorer.subject, metric, lower_is_better=True, allowed=allowed, seed=split)


def line(name: str, allowed: float, of: list[dict[str, Any]]) -> list[str]:
    """One row of the table."""
    from scipy.stats import binomtest

    drops = [r["drop"] for r in of if r["met"]]
    beyond = sum(d > allowed for d in drops)
    cells = [name, f"{allowed:g} {UNITS[name]}", str(len(of)), str(len(drops)), str(beyond)]
    if not drops:
        return [*cells, "", "", ""]
    found = binomtest(beyond, len(drops)).proportion_ci(0.95, method="exact")
    return [
        *cells, f"{beyond / len(drops):.0%} ({found.low:.1%} to {found.high:.1%})", f"{np.mean(drops):.4f}", f"{max(drops):.4f}"
    ]  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--networks", nargs="*", default=tuple(ALLOWED))
    parser.add_argument("--only-table", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = measure.read_rows(options.results)
    for name in options.networks if not options.only_table else ():
        run(name, rows, options.results)
    lines = []
    for name, levels in ALLOWED.items():
        for allowed in levels:
            if of := [r for r in rows if (r["name"], r["allowed"]) == (name, allowed)]:
                lines.append(line(name, allowed, of))
    head = ["network", "allowed drop", "splits", "met", "beyond it", "share (95 % interval)"]
    head += ["mean drop unseen", "largest"]
    text = measure.markdown(
        "The promise of mixed precision on unseen data: at most 10 % beyond what is allowed", head, lines
    )
    print(text)
    if options.markdown:
        measure.write(options.markdown, text)


if __name__ == "__main__":
    main()
