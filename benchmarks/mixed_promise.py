"""How often the true drop of a chosen mixed precision exceeds what is allowed: 20 splits of the test data.

    python benchmarks/mixed_promise.py --results promise.jsonl --markdown benchmarks/results/mixed_promise.md

The LSTM of the developer data set, W8A8, W8A16, W4A8 and W4A16, weights to nearest (the promise is one of statistics). Of 384
rows of the test text each split gives half to the search, whose metric is the loss of each row in nats (half of them choose,
half have the last word), and half stays unseen. A search promises with a confidence of 90 % that the drop is within
``allowed_drop``.
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
from bitwright.mixed.candidates import as_candidates
from bitwright.mixed.explorer import Explorer
from bitwright.mixed.goal import Goal
from bitwright.mixed.measure import Metric
from bitwright.mixed.search import CANDIDATES
from bitwright.mixed.start import simulation_of
from tests.support import data
from tests.support.tasks import TASKS

ROWS, SPLITS = 384, 20
ALLOWED = (0.01, 0.02, 0.04)  # nats


def losses(model: Any) -> np.ndarray[Any, Any]:
    """Of every row of the test text, in nats per character."""
    rows = data.shakespeare("test")[: ROWS * 129].reshape(ROWS, 129)
    with torch.no_grad():
        scores = model(rows[:, :-1])
    scores = scores if isinstance(scores, torch.Tensor) else scores[0]
    each = torch.nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return each.reshape(ROWS, -1).mean(1).double().numpy()


def run(rows: list[dict[str, Any]], results: Path) -> None:
    """Add the rows that are missing."""
    candidates = as_candidates(CANDIDATES)
    batches = TASKS["lstm_char"]().batches(0)
    subject = open_subject(simulation_of(data.trained("lstm_char"), batches, candidates[1]))
    explorer = Explorer(subject, candidates, batches, time.monotonic(), None, False, 32, 0, None)
    with subject.in_float():
        reference = losses(subject.runnable())
    known = {(r["split"], r["allowed"]) for r in rows}
    for split in range(SPLITS):
        order = np.random.default_rng(split).permutation(ROWS)
        seen, unseen = order[: ROWS // 2], order[ROWS // 2 :]
        for allowed in ALLOWED:
            if (split, allowed) in known:
                continue
            metric = Metric(
                subject,
                lambda model, seen=seen: losses(model)[seen],
                lower_is_better=True,
                allowed=allowed,
                seed=split,
            )
            found = explorer.run(Goal("weight_bytes", {}, metric, None, 12, 0.9), lambda: None)
            row: dict[str, Any] = {"split": split, "allowed": allowed, "met": found.met}
            if found.chosen is not None:
                row["drop"] = float((losses(subject.runnable()) - reference)[unseen].mean())
                row["bytes"] = found.chosen.costs["weight_bytes"]
            explorer.library.restore()
            rows.append(row)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only-table", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = measure.read_rows(options.results)
    if not options.only_table:
        run(rows, options.results)
    lines = []
    for allowed in ALLOWED:
        of = [r for r in rows if r["allowed"] == allowed]
        drops = [r["drop"] for r in of if r["met"]]
        lines.append([
            str(allowed), str(len(of)), str(len(drops)), str(sum(d > allowed for d in drops)),
            f"{np.mean(drops):.4f}" if drops else "", f"{max(drops):.4f}" if drops else "",
        ])  # fmt: skip
    head = ["allowed drop (nats)", "splits", "met", "true drop beyond it", "mean drop unseen", "largest"]
    text = measure.markdown(
        "The promise of mixed precision on unseen data: at most 10 % beyond what is allowed", head, lines
    )
    print(text)
    if options.markdown:
        measure.write(options.markdown, text)


if __name__ == "__main__":
    main()
