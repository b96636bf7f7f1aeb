"""What one layer of AdaRound and one of GPTQ costs, and where the time goes; one thread, one command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import measure  # first of ours: it puts the repository on the path
import torch

from bitwright.algorithms import gptq, reconstruct
from bitwright.algorithms.adaround import AdaptiveRounding
from bitwright.algorithms.matrices import Grid, Layer, second_moment
from bitwright.algorithms.reconstruct import LayerProblem, Settings

HELP = """\
Time AdaRound on a 64 x 64 x 3 x 3 convolution (1,000 iterations) and GPTQ on a 1024 x 1024 linear layer.

AdaRound draws rows of the convolution's matrix product, here 256 of those that 32 pictures of 16 x 16 have; the column
"pictures" is the same loop on all rows of 32 pictures, which is what a loop over whole pictures computes.
"""
EXAMPLES = """\
examples:
  python benchmarks/ptq_speed.py
  python benchmarks/ptq_speed.py --iterations 100 --features 256      a quick look
  python benchmarks/ptq_speed.py --markdown benchmarks/results/ptq_speed.md
"""


def grid_of(w: torch.Tensor) -> Grid:
    return Grid(w.abs().amax(2, keepdim=True) / 7, torch.tensor(-8.0), torch.tensor(7.0))


def adaround_problem(batch: int) -> tuple[LayerProblem, torch.Tensor]:
    """The rows of a 64-channel convolution on 32 pictures of 16 x 16, with ReLU behind it."""
    torch.manual_seed(0)
    attrs = {"group": 1, "pads": (1,) * 4, "strides": (1, 1), "dilations": (1, 1)}
    layer = Layer("conv", "conv", "Conv", attrs, (64, 64, 3, 3), "conv.weight")
    w = layer.matrix(torch.randn(64, 64, 3, 3) / 24)
    x = torch.cat(list(layer.rows(torch.randn(32, 64, 16, 16).relu())), 1)
    y = reconstruct.predict(x, w, None, torch.relu)
    return LayerProblem(x, y, None, torch.relu, batch), w


def adaround_rows(iterations: int, batch: int) -> dict[str, float]:
    """Seconds of the whole loop, and of its parts alone."""
    problem, w = adaround_problem(batch)
    settings = Settings(iterations=iterations, batch=batch)
    generator = torch.Generator().manual_seed(0)

    def loop() -> None:
        reconstruct.optimise(problem, [AdaptiveRounding(w, grid_of(w))], settings, 0.05, 1.0, generator)

    rounding = AdaptiveRounding(w, grid_of(w))
    optimiser = torch.optim.Adam([rounding.v], lr=0.05, fused=True)
    index = torch.randint(problem.size, (problem.batch,), generator=generator)
    x, y = problem.x.index_select(1, index), problem.y.index_select(1, index)

    def forward() -> torch.Tensor:
        return problem._squared(x, y, rounding.soft(1e-4, 4.0))

    def data() -> None:
        problem.x.index_select(1, index), problem.y.index_select(1, index)

    def both() -> None:
        forward().backward()

    both()
    rounds = max(2, min(20, iterations // 20))
    parts = {
        "data": measure.median_seconds(data, rounds),
        "forward": measure.median_seconds(forward, rounds),
        "backward": measure.median_seconds(both, rounds),
        "optimiser": measure.median_seconds(optimiser.step, rounds),
    }
    parts["backward"] = max(0.0, parts["backward"] - parts["forward"])
    return {"whole": measure.seconds(loop), **{name: t * iterations for name, t in parts.items()}}


def gptq_rows(features: int, samples: int) -> dict[str, float]:
    """Seconds of the second moment, the Cholesky factors and the columns."""
    torch.manual_seed(0)
    layer = Layer("l", "l", "Gemm", {"transB": 1}, (features, features), "l.weight")
    x = torch.randn(samples, features) @ torch.randn(features, features)
    w = torch.randn(1, features, features)
    grid, settings = grid_of(w), gptq.Settings()
    moment: list[torch.Tensor] = []
    whole = measure.seconds(lambda: moment.append(second_moment(layer, [x])[0]))
    factor = measure.seconds(lambda: gptq.inverse_factor(moment[0], settings.damping))
    columns = measure.seconds(lambda: gptq.round_columns(w.clone(), moment[0], grid, settings))
    return {
        "whole": whole + columns,
        "second moment": whole,
        "Cholesky factors": factor,
        "columns": columns - factor,
    }


def rows(iterations: int, features: int) -> dict[str, dict[str, float]]:
    return {
        f"AdaRound 64x64x3x3, {iterations} iterations, 256 rows": adaround_rows(iterations, 256),
        f"AdaRound 64x64x3x3, {iterations} iterations, 32 pictures": {
            name: t * 10 for name, t in adaround_rows(max(1, iterations // 10), 32 * 256).items()
        },
        f"GPTQ {features}x{features}, {4 * features} samples": gptq_rows(features, 4 * features),
    }


def table(found: dict[str, dict[str, float]]) -> str:
    lines = ["| layer | seconds | of which |", "|---|---|---|"]
    for name, parts in found.items():
        split = ", ".join(f"{part} {t:.2f}" for part, t in parts.items() if part != "whole")
        lines.append(f"| {name} | {parts['whole']:.2f} | {split} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=1000, help="of AdaRound (1000)")
    parser.add_argument("--features", type=int, default=1024, help="of the linear layer (1024)")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    chosen = parser.parse_args(arguments)
    found = rows(chosen.iterations, chosen.features)
    print(table(found))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))
    if chosen.markdown:
        chosen.markdown.write_text(table(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
