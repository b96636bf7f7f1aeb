"""The choice of widths: AIMET's greedy search by the metric against the exact choice from measured noise, on ResNet-20.

    python benchmarks/compression_choice.py --markdown       # some four minutes on one free core

Both prune the same groups by the same scores, and fit the layers to the same 64 training images. The greedy search asks the
metric (top-1 of 200 other training images) for every group at nine ratios, the default of AIMET, once for all targets. The
exact choice measures the noise of every group once, and asks the metric of three choices per target at most. Top-1 is of 1,000
test images, nothing is trained. The difference has its 95 % interval, from the images on which the two disagree. Where one is
right on three images more than the other, no number of disagreements tells them apart: with the fewest, three, the sign test has
p = 0.25, with more a larger one. Needs the developer data set.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import torch
from pruning import SUBJECTS, few

from bitwright.compression.checks import checked_dependencies
from bitwright.compression.costs import Prices
from bitwright.compression.importance import Evidence, criterion, mean_squares
from bitwright.compression.prune import Selector
from bitwright.compression.ratios import Record, choose, greedy, measure_scores, sensitivities
from bitwright.compression.reconstruct import Original
from bitwright.compression.widths import WidthSpace
from bitwright.methods.front_end import front_end_of
from tests.support import data

TARGETS = (0.75, 0.6, 0.5)
RESULTS = measure.ROOT / "benchmarks" / "results" / "compression_choice.md"


def gain(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> str:
    """Points that ``other`` is better by, with the 95 % interval of paired answers.

    >>> gain(np.array([True, False, True, True]), np.array([True, True, True, True]))
    '+25.0 (-17.4 to +67.4)'
    """
    each = 100.0 * (other.astype(float) - one)
    wide = 1.96 * each.std() / math.sqrt(len(each))
    return f"{each.mean():+.1f} ({each.mean() - wide:+.1f} to {each.mean() + wide:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    model, batches = SUBJECTS["resnet20_aux"].model(), [data.cifar("train").x[:64]]
    search, test = data.cifar("train")[1000:1200], few(data.cifar(), 1000)
    front = front_end_of(model)
    structure = front.structured(model, batches[0], None)
    found = checked_dependencies(structure, batches[0])
    evidence = Evidence(found.graph, structure.param)
    evidence.squares = mean_squares(structure.view(), found.graph, found.groups, batches)
    scores = {g.name: criterion("activation")(g, evidence) for g in found.groups}
    ratios = [k / 10 for k in range(1, 10)]
    selector = Selector(found, Prices(found.graph), found.groups, scores, ranking="exact", ratios=ratios)
    space = WidthSpace(
        structure, selector, batches, Original(front.structured(model, batches[0], None).view(), batches), True
    )
    asked = 0

    def metric(work: Any) -> float:
        nonlocal asked
        asked += 1
        return data.accuracy(work, search)

    def right(choice: Any) -> np.ndarray[Any, Any]:
        """Whether each test image is classified rightly."""
        undo = space.apply(choice)
        try:
            with torch.no_grad():
                made = [structure.metric_target()(test.x[i : i + 100]) for i in range(0, len(test.x), 100)]
            return (torch.cat(made).argmax(1) == test.y).numpy()
        finally:
            undo()

    def nearest(ratio: Mapping[str, float]) -> list[int]:
        return [
            int(np.argmin([abs(o.ratio - ratio[p.name]) if o.ratio <= ratio[p.name] + 1e-9 else 9 for o in p.options]))
            for p in space.parts
        ]

    start = time.process_time()
    noise = sensitivities(space, progress=False)
    ours, record = [], Record()
    for target in TARGETS:
        chosen = choose(space, {"macs": target}, metric=metric, sensitivity=noise, record=record, progress=False)
        ours.append((chosen.best, asked))
    seconds = [time.process_time() - start]
    asked, start = 0, time.process_time()
    baseline = metric(structure.metric_target())
    table = measure_scores(space, metric, progress=False)
    theirs = []
    whole = space.costs_of([0] * len(space.parts))["macs"]
    for target in TARGETS:
        ratio = greedy(table, lambda r: space.costs_of(nearest(r))["macs"], target * whole, baseline)
        theirs.append(nearest(ratio))
    seconds.append(time.process_time() - start)
    rows = []
    for target, (best, _), other in zip(TARGETS, ours, theirs, strict=True):
        left = [space.costs_of(c)["macs"] / whole for c in (other, best.choice)]
        one, two = right(other), right(best.choice)
        tops = [f"{100 * seen.mean():.1f}" for seen in (one, two)]
        rows.append([f"{target:.0%}", f"{left[0]:.1%}", tops[0], f"{left[1]:.1%}", tops[1], gain(one, two)])
        print(rows[-1], flush=True)
    head = ["target", "greedy: MACs left", "top-1", "exact: MACs left", "top-1", "difference"]
    title = "The choice of widths: greedy by the metric, and exact from noise"
    told = f"Evaluations of the metric for all targets: greedy {asked}, exact {ours[-1][1]}; CPU seconds "
    told += f"{seconds[1]:.0f} and {seconds[0]:.0f}."
    measure.show(title, head, rows)
    print(told)
    if given.markdown:
        measure.write(RESULTS, measure.markdown(title, head, rows) + f"\n{told}\n\n" + str(__doc__).split("\n\n", 2)[2])


if __name__ == "__main__":
    main()
