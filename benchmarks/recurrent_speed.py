"""What quantizers inside recurrent layers cost: ratios to torch's fused operator, one thread, one command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure  # first of ours: it puts the repository on the path
import torch
from torch import nn

from bitwright.torch import QuantizationSimModel

HELP = """\
Time recurrent layers with quantizers inside their steps against the fused float operator.

A ratio of 3.00 x means: three times the time of the fused layer. Both run in this process on one thread, one right
after the other in alternating order, and the median over the rounds is shown.
"""
EXAMPLES = """\
examples:
  python benchmarks/recurrent_speed.py                             length 100, batch 16, hidden 256
  python benchmarks/recurrent_speed.py --length 20 --hidden 64     another size
  python benchmarks/recurrent_speed.py --markdown benchmarks/results/recurrent_speed.md
"""
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
TARGETS = {"simulated forward": 2.0, "min-max calibration": 1.8, "training step": 2.2}


class Bench:
    """One layer, its simulation, and an input."""

    def __init__(self, layer: str, length: int, batch: int, hidden: int, rounds: int) -> None:
        torch.manual_seed(0)
        self.model, self.rounds = LAYERS[layer](hidden, hidden), rounds
        self.x = torch.randn(length, batch, hidden)
        self.sim = QuantizationSimModel(self.model, self.x)
        self.calibrate()

    def calibrate(self) -> None:
        self.sim.compute_encodings([self.x], progress=False)

    def forward(self, model: nn.Module) -> None:
        with torch.no_grad():
            model(self.x)

    def train(self, model: nn.Module) -> None:
        model.zero_grad()
        model(self.x)[0].square().mean().backward()

    def ratio(self, base: measure.Step, ours: measure.Step) -> float:
        return measure.ratio(base, ours, self.rounds)

    def rows(self) -> dict[str, float]:
        """Row -> milliseconds for the first, ratios for the others."""

        def fused() -> None:
            self.forward(self.model)

        found = {"float forward, ms": 1000 * measure.median_seconds(fused, self.rounds)}
        found["simulated forward"] = self.ratio(fused, lambda: self.forward(self.sim.model))
        found["min-max calibration"] = self.ratio(fused, self.calibrate)
        found["training step"] = self.ratio(lambda: self.train(self.model), lambda: self.train(self.sim.model))
        return found


def peak(layer: str, length: int, batch: int, hidden: int) -> float:
    """MiB that a calibration and a training step of a sequence of ``length`` need above the imported program."""
    bench = Bench(layer, 2, batch, hidden, 1)
    bench.train(bench.sim.model)
    start = measure.peak_mib()
    bench.x = torch.randn(length, batch, hidden)
    bench.calibrate()
    bench.train(bench.sim.model)
    return measure.peak_mib() - start


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=100, help="steps of the sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--hidden", type=int, default=256, help="inputs and hidden units")
    parser.add_argument("--rounds", type=int, default=9, help="rounds per ratio; raise it on a busy machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--phase", choices=LAYERS, help=argparse.SUPPRESS)  # what the memory row starts itself
    return parser.parse_args(arguments)


def cell(row: str, value: Any) -> str:
    """A number with its unit, and the target where there is one."""
    if row == "float forward, ms":
        return f"{value:.1f} ms"
    if row.startswith("memory"):
        return " -> ".join(f"{mib:.0f}" for mib in value) + " MiB"
    return f"{value:.2f} x" + (f"  (target {TARGETS[row]:.0f})" if row in TARGETS else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files asked for."""
    options = parse(arguments)
    length, batch, hidden = options.length, options.batch, options.hidden
    if options.phase:
        print(json.dumps(peak(options.phase, length, batch, hidden)))
        return
    found: dict[str, dict[str, Any]] = {}
    for layer in LAYERS:
        print(f"{layer} ...", file=sys.stderr, flush=True)
        found[layer] = dict(Bench(layer, length, batch, hidden, options.rounds).rows())
        sizes = ["--batch", str(batch), "--hidden", str(hidden), "--phase", layer]
        found[layer]["memory, length x1, x2, x4"] = [
            float(measure.in_fresh_process(__file__, "--length", str(n * length), *sizes)) for n in (1, 2, 4)
        ]
    title = f"Recurrent layers with quantizers inside (length {length}, batch {batch}, hidden {hidden}, one thread)"
    rows = [[row, *(cell(row, found[layer][row]) for layer in LAYERS)] for row in found["LSTM"]]
    measure.show(title, ["", *LAYERS], rows)
    measure.save(options.json, options.markdown, title, ["", *LAYERS], rows, found)


if __name__ == "__main__":
    main()
