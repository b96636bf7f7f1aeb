"""The rows of speed that have a goal, PyTorch front end: ratios to the float model, or seconds, least and median."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import preparation
import recurrent_speed
import torch_speed

from bitwright.core.compiled.loops import loops

HELP = """\
Measure the rows of results/speed_goals.md that are of the PyTorch front end. Ratios: the float model and the simulation take
turns in this process, one thread, CPU time; least over least, and the median of the ratios of the rounds. Seconds: least and
median. With numba the compiled loops are measured; BITWRIGHT_COMPILED=0 in front of the command measures without them.
"""
Pair = tuple[float, float]


def compared(base: measure.Step, ours: measure.Step, rounds: int) -> Pair:
    """Least time of ``ours`` over that of ``base``, and the median of the rounds' ratios."""
    base()
    ours()
    times: list[tuple[float, float]] = []
    for i in range(rounds):
        taken = {step: measure.seconds(step) for step in ((base, ours) if i % 2 == 0 else (ours, base))}
        times.append((taken[base], taken[ours]))
    least = min(b for _, b in times) / min(a for a, _ in times)
    return least, statistics.median(b / a for a, b in times)


class Models(torch_speed.Bench):
    """A model whose rows are pairs."""

    def ratio(self, base: measure.Step, ours: measure.Step) -> Any:
        return compared(base, ours, self.settings.rounds)


class Layers(recurrent_speed.Bench):
    """A recurrent layer whose rows are pairs."""

    def ratio(self, base: measure.Step, ours: measure.Step) -> Any:
        return compared(base, ours, self.rounds)

    def without_inner_sites(self) -> Any:
        for name, site in self.sim.quantizers.items():
            if "." in name and name.split(".")[-1] in ("pre", "gate", "cell", "output[0]"):
                site.quantizer.enabled = False
        return self.ratio(lambda: self.forward(self.model), lambda: self.forward(self.sim.model))


def _prepared(model: str, row: str, rounds: int) -> Pair:
    taken = preparation.times(preparation.steps_of(model, [row]), rounds)[row]
    return min(taken), statistics.median(taken)


def _model(row: str, name: str = "mobilenet_v2") -> Callable[[int], Any]:
    return lambda rounds: torch_speed.ROWS[row][0](Models(name, torch_speed.Settings(False, True, rounds, 8)))


@functools.cache
def _layers(rounds: int) -> dict[str, Any]:
    """All rows of the LSTM, which one run measures."""
    return Layers("LSTM", 100, 16, 256, rounds).rows()


def _layer(row: str) -> Callable[[int], Any]:
    return lambda rounds: _layers(rounds)[row]


ROWS: dict[str, tuple[float, str, Callable[[int], Any]]] = {
    "simulated forward, MobileNetV2": (1.15, "x", _model("forward")),
    "min-max calibration, MobileNetV2, 8 batches": (1.25, "x", _model("min-max")),
    "min-max calibration, ResNet-18, 8 batches": (1.15, "x", _model("min-max", "resnet18")),
    "histogram calibration, MobileNetV2, 8 batches": (2.5, "x", _model("histogram")),
    "training step, MobileNetV2": (1.3, "x", _model("training step")),
    "LSTM, simulated forward": (2.0, "x", _layer("simulated forward")),
    "LSTM, min-max calibration": (1.8, "x", _layer("min-max calibration")),
    "LSTM, training step": (2.2, "x", _layer("training step")),
    "LSTM, inner sites off, simulated forward": (
        1.2,
        "x",
        lambda rounds: Layers("LSTM", 100, 16, 256, rounds).without_inner_sites(),
    ),
    "creation, 1,000 blocks": (0.3, "s", lambda rounds: _prepared("chain", "creation", rounds)),
    "folding, ResNet-18": (0.25, "s", lambda rounds: _prepared("resnet18", "folding", rounds)),
    "folding, MobileNetV2": (0.15, "s", lambda rounds: _prepared("mobilenet_v2", "folding", rounds)),
    "folding, 1,000 blocks": (0.7, "s", lambda rounds: _prepared("chain", "folding", rounds)),
    "equalization, ResNet-18": (0.3, "s", lambda rounds: _prepared("resnet18", "equalization", rounds)),
    "equalization, MobileNetV2": (0.5, "s", lambda rounds: _prepared("mobilenet_v2", "equalization", rounds)),
    "export, MobileNetV2": (2.5, "s", lambda rounds: _prepared("mobilenet_v2", "export", rounds)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the files asked for."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error(f"--rounds is {chosen.rounds}; it must be at least 1")
    found: dict[str, Pair] = {}
    for row in chosen.rows:
        found[row] = ROWS[row][2](chosen.rounds)
        print(row, json.dumps(found[row]), file=sys.stderr, flush=True)
    kind = "array functions" if loops() is None else "compiled loops"
    title = f"Rows with a goal, PyTorch ({kind}, least and median of {chosen.rounds}, one thread)"
    columns = ["", "goal", "least", "median"]
    rows = [[row, *(f"{value:.2f} {ROWS[row][1]}" for value in (ROWS[row][0], *found[row]))] for row in chosen.rows]
    measure.show(title, columns, rows)
    measure.save(chosen.json, chosen.markdown, title, columns, rows, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
