"""Trials per second of MobileNetV2 as an ONNX model: each with another width of one site, by sessions and by one session.

    python benchmarks/trials.py

A trial sets one site of the calibrated simulation to another width and runs one batch. "calibrate" does what a change of width
took where it threw the statistics away: calibration on one batch, and a session with the new encodings. "open" keeps the
statistics and opens a session. "feed" runs a trial session, whose grids and weights are inputs. CPU seconds, one thread; each way
in turn.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import measure
import numpy as np
import onnx_speed

from bitwright.onnx import QuantizationSimModel

SHAPES = ((16, 32), (1, 224), (8, 224))  # batch, pixels
TRIALS = 6


def widths(sim: QuantizationSimModel) -> Iterator[None]:
    """The simulation, before every trial with one more site at another width."""
    sites = [site for site in sim.quantizers.values() if site.spec is not None and site.role != "bias"]
    for site in itertools.cycle(sites):
        assert site.spec is not None
        width = 4 if site.spec.format.bits == 8 else 8
        site.spec = replace(site.spec, format=replace(site.spec.format, bits=width))
        yield


def ways(sim: QuantizationSimModel, feeds: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    trial = sim.trial_session()

    def calibrate() -> None:
        sim.compute_encodings([feeds], progress=False)
        sim.run(feeds)

    return {"calibrate": calibrate, "open": lambda: sim.run(feeds), "feed": lambda: trial.run(None, feeds)}


def main() -> None:
    print("| batch | pixels | " + " | ".join(("calibrate", "open", "feed")) + " | feed / open |")
    print("|---:|---:|---:|---:|---:|---:|")
    for batch, size in SHAPES:
        bench = onnx_speed.Bench("mobilenet_v2", size, 1, 1, batch)
        feeds = {"x": np.random.default_rng(1).standard_normal((batch, 3, size, size)).astype(np.float32)}
        sim = QuantizationSimModel(bench.model, feeds, threads=1)
        sim.compute_encodings([feeds], progress=False)
        found: dict[str, list[float]] = {}
        change, each = widths(sim), ways(sim, feeds)
        for number in range(TRIALS + 1):
            for name, run in each.items():
                next(change)
                taken = measure.seconds(run)
                if number:  # the first opens the trial session
                    found.setdefault(name, []).append(taken)
        rates = {name: 1 / statistics.median(times) for name, times in found.items()}
        row = " | ".join(f"{rate:.1f}" for rate in rates.values())
        print(f"| {batch} | {size} | {row} | {rates['feed'] / rates['open']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
