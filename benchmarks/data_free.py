"""Calibration on data that the model makes itself, beside random and real data.

    python benchmarks/data_free.py resnet20_aux --samples 300

One row per kind of calibration data: the metric of the W8A8 simulation, and the signal-to-noise ratio of its first output on
real data. Pictures: those that were made, as many standard normal ones, and the task's calibration pictures. Text: stories that
the model wrote, as many of random tokens, and its calibration stories. Needs the developer data set. Results:
benchmarks/results/data_free.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import bitwright
from bitwright.core.simulation.float_model import sqnr
from tests.support import data
from tests.support.tasks import TASKS


def first(model: Any) -> Any:
    """The first output of a module."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = model(x)
        return found[0] if isinstance(found, tuple) else found

    return run


def rows(name: str, count: int, made: int, iterations: int) -> Iterator[str]:
    model, real = data.trained(name), TASKS[name]().batches(0)
    generator = torch.Generator().manual_seed(0)
    if name == "stories260k":
        story = data.stories()[:count]
        test, score = story[:, :-1], lambda run: data.perplexity(run, story)
        example = torch.zeros(1, 128, dtype=torch.int64)
        written = bitwright.generate_data(model, example, samples=made, start=1, progress=False)
        random = [torch.randint(512, tuple(batch.shape), generator=generator) for batch in written]
    else:
        images = (data.imagenet() if name == "mobilenet_v1_025" else data.cifar())[slice(0, count)]
        test, score = images.x, lambda run: data.accuracy(run, images)
        written = bitwright.generate_data(model, test[:1], samples=made, iterations=iterations, progress=False)
        random = [torch.randn(tuple(batch.shape), generator=generator) for batch in written]
    wanted = first(model)(test[:32]).numpy()
    yield f"| {name} | float | {score(first(model)):.2f} | |"
    for kind, batches in (("random", random), ("generated", list(written)), ("real", list(real))):
        result = bitwright.quantize(
            model, batches, recipe=["fold"], progress=False, measure_speed=False, poor_below=-math.inf
        )
        run = first(result.sim.model)
        ratio = sqnr(wanted, np.asarray(run(test[:32])))
        yield f"| {name} | {kind} | {score(run):.2f} | {ratio:.1f} |"
    yield f"| {name} | | {written} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="+", choices=("resnet20_aux", "mobilenet_v2_cifar", "mobilenet_v1_025", "stories260k")
    )
    parser.add_argument("--samples", type=int, default=300, help="that the metric is measured on")
    parser.add_argument("--made", type=int, default=64, help="pictures or stories that are made")
    parser.add_argument("--iterations", type=int, default=200, help="of pictures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | calibrated on | metric | dB |\n|---|---|---:|---:|")
    for name in given.models:
        for row in rows(name, given.samples, given.made, given.iterations):
            print(row, flush=True)


if __name__ == "__main__":
    main()
