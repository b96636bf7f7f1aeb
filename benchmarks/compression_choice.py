"""The choice of widths: AIMET's greedy search by the metric against the exact choice from measured noise, on ResNet-20.

    python benchmarks/compression_choice.py --markdown       # some four minutes on one free core

Both prune the same groups by the same scores, and fit the layers to the same 64 training images. The greedy search asks the
metric (top-1 of 200 other training images) for every group at nine ratios, the default of AIMET, once for all targets. The
exact choice measures the noise of every group once, and asks the metric of three choices per target at most. Top-1 is of 1,000
test images, nothing is trained. Needs the developer data set.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
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

    def accuracy(choice: Any) -> float:
        undo = space.apply(choice)
        try:
            return data.accuracy(structure.metric_target(), test)
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
        rows.append(
            [
                f"{target:.0%}",
                f"{left[0]:.1%}",
                f"{accuracy(other):.1f}",
                f"{left[1]:.1%}",
                f"{accuracy(best.choice):.1f}",
            ]
        )
        print(rows[-1], flush=True)
    head = ["target", "greedy: MACs left", "top-1", "exact: MACs left", "top-1"]
    title = "The choice of widths: greedy by the metric, and exact from noise"
    told = f"Evaluations of the metric for all targets: greedy {asked}, exact {ours[-1][1]}; CPU seconds "
    told += f"{seconds[1]:.0f} and {seconds[0]:.0f}."
    measure.show(title, head, rows)
    print(told)
    if given.markdown:
        measure.write(RESULTS, measure.markdown(title, head, rows) + f"\n{told}\n\n" + str(__doc__).split("\n\n", 2)[2])


if __name__ == "__main__":
    main()
