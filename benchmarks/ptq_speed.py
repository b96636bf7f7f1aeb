"""What one layer of AdaRound and one of GPTQ costs, and where the time goes; one thread, one command."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import measure  # first of ours: it puts the repository on the path
import torch

from bitwright.methods.rounding import gptq, reconstruct
from bitwright.methods.rounding.matrices import Grid, Layer, moments
from bitwright.methods.rounding.reconstruct import AdaptiveRounding, LayerProblem, Settings

HELP = """\
Time AdaRound on a 64 x 64 x 3 x 3 convolution (1,000 iterations) and GPTQ on a 1024 x 1024 linear layer.

AdaRound draws rows of the convolution's matrix product, here 256 of those that 32 pictures of 16 x 16 have; the row
"32 pictures" is the same loop on all rows of 32 pictures, which is what a loop over whole pictures computes.

Seconds are CPU time of one thread, the parts measured in turn and the best of several rounds taken, so that what else
runs on the machine counts little. A layer of four times as many inputs and 128 samples is rounded by the matrix of second
moments and by the rows themselves, which few samples take. "products" are bare matrix products of the same sizes: what no
method can do without.
"""
EXAMPLES = """\
examples:
  python benchmarks/ptq_speed.py
  python benchmarks/ptq_speed.py --iterations 100 --features 256      a quick look
  python benchmarks/ptq_speed.py --markdown benchmarks/results/ptq_speed.md
"""
TITLE = "One layer of AdaRound and of GPTQ (CPU seconds, one thread)"
COLUMNS = ("layer", "whole", "of which", "products alone")


def best(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU seconds of each step: all of them in turn, ``rounds`` times, the best of each; one unmeasured round first."""
    found = dict.fromkeys(steps, float("inf"))
    for i in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            found[name] = min(found[name], time.process_time() - start) if i else found[name]
    return found


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


def adaround_rows(iterations: int, batch: int, rounds: int) -> dict[str, float]:
    """Seconds of the whole loop, and of its parts: each by what the loop costs with it less what it costs without."""
    problem, w = adaround_problem(batch)
    settings = Settings(iterations=iterations, batch=batch)
    generator = torch.Generator().manual_seed(0)
    rounding = AdaptiveRounding(w, grid_of(w))
    optimiser = torch.optim.Adam([rounding.v], lr=0.05, fused=True)
    indices = torch.randint(problem.size, (max(1, iterations // 10), problem.batch), generator=generator)
    x, y = (t.index_select(1, indices[0]) for t in (problem.x, problem.y))

    def loop() -> None:
        reconstruct.optimise(problem, [AdaptiveRounding(w, grid_of(w))], settings, 0.05, 1.0, generator)

    def until(part: str) -> Callable[[], None]:
        def run() -> None:
            for index in indices:
                if part == "data":
                    problem.x.index_select(1, index), problem.y.index_select(1, index)
                    continue
                loss = problem.loss(index, [rounding.soft(1e-4, 10.5)]) / 3
                if part != "forward":
                    optimiser.zero_grad()
                    loss.backward()
                if part == "optimiser":
                    optimiser.step()

        return run

    def products() -> None:
        for _ in indices:
            y.transpose(1, 2) @ x, x @ w.transpose(1, 2)

    parts = ("data", "forward", "backward", "optimiser")
    found = best({**{name: until(name) for name in parts}, "products": products, "whole": loop}, rounds)
    scale = iterations / len(indices)
    before = {"data": 0.0} | {one: found[other] for other, one in itertools.pairwise(parts)}
    share = {name: max(0.0, found[name] - before[name]) * scale for name in parts}
    return {"whole": found["whole"], "products": found["products"] * scale, **share}


def gptq_rows(features: int, samples: int, rounds: int) -> dict[str, float]:
    """Seconds of the second moment, the Cholesky factors and the columns."""
    torch.manual_seed(0)
    layer = Layer("l", "l", "Gemm", {"transB": 1}, (features, features), "l.weight")
    x = torch.randn(samples, features) @ torch.randn(features, features)
    w = torch.randn(1, features, features)
    grid, settings = grid_of(w), gptq.Settings()

    def second_moment() -> torch.Tensor:
        return moments(layer, [(x, x, float(samples))], torch.Generator().manual_seed(0)).matrix

    moment = second_moment()

    def products() -> None:
        x.T @ x
        for stop in range(settings.block, features, settings.block):
            w[0, :, : settings.block] @ w[0, : settings.block, stop:]

    steps: dict[str, Callable[[], object]] = {
        "second moment": second_moment,
        "Cholesky factors": lambda: gptq.inverse_factor(moment, settings.damping),
        "columns": lambda: gptq.round_columns(w.clone(), moment, grid, settings),
        "products": products,
    }
    found = best(steps, rounds)
    whole = found["second moment"] + found["columns"]
    return {"whole": whole, **found, "columns": max(0.0, found["columns"] - found["Cholesky factors"])}


def wide_rows(inputs: int, samples: int, few: bool, rounds: int) -> dict[str, float]:
    """Seconds of a layer of 256 outputs and many more inputs than samples, by its rows or by their matrix."""
    torch.manual_seed(0)
    layer = Layer("l", "l", "Gemm", {"transB": 1}, (256, inputs), "l.weight")
    x, w = torch.randn(samples, inputs), torch.randn(1, 256, inputs)
    grid, settings = grid_of(w), gptq.Settings()

    def whole() -> torch.Tensor:
        found = moments(layer, [(x, x, float(samples))], torch.Generator().manual_seed(0), few=few)
        return gptq.round_columns(w.clone(), gptq.factored(found.own, settings), grid, settings)

    def products() -> None:
        for stop in range(settings.block, inputs, settings.block):
            w[0, :, : settings.block] @ x[: settings.block, stop:]

    return best({"whole": whole, "products": products}, rounds)


def measured(iterations: int, features: int, rounds: int) -> dict[str, dict[str, float]]:
    pictures = adaround_rows(max(1, iterations // 10), 32 * 256, rounds)
    return {
        f"AdaRound 64x64x3x3, {iterations} iterations, 256 rows": adaround_rows(iterations, 256, rounds),
        f"AdaRound 64x64x3x3, {iterations} iterations, 32 pictures": {n: 10 * t for n, t in pictures.items()},
        f"GPTQ {features}x{features}, {4 * features} samples": gptq_rows(features, 4 * features, rounds),
        f"GPTQ 256x{4 * features}, 128 samples, by their matrix": wide_rows(4 * features, 128, False, 1),
        f"GPTQ 256x{4 * features}, 128 samples, by rows": wide_rows(4 * features, 128, True, 1),
    }


def table(found: dict[str, dict[str, float]]) -> list[list[str]]:
    order = ("data", "forward", "backward", "optimiser", "second moment", "Cholesky factors", "columns")
    rows = []
    for name, parts in found.items():
        split = ", ".join(f"{part} {parts[part]:.2f}" for part in order if part in parts)
        rows.append([name, f"{parts['whole']:.2f}", split, f"{parts['products']:.2f}"])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=1000, help="of AdaRound (1000)")
    parser.add_argument("--features", type=int, default=1024, help="of the linear layer (1024)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the best is taken (5)")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    chosen = parser.parse_args(arguments)
    found = measured(chosen.iterations, chosen.features, chosen.rounds)
    measure.show(TITLE, COLUMNS, table(found))
    measure.save(chosen.json, chosen.markdown, TITLE, COLUMNS, table(found), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
