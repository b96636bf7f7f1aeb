"""Size and bit operations at a drop of at most one point (1 % of a perplexity): ours, greedy by sensitivity, uniform.

    python benchmarks/mixed_precision.py --results mixed.jsonl --markdown benchmarks/results/mixed_precision.md

All of them choose from W8A8, W8A16, W4A8 and W4A16, share groups, costs and rounded weights, and are judged by the same
numbers. ``greedy`` is AIMET's second phase: every group at every lower candidate alone (SQNR of the outputs), groups lowered in
that order, the deepest point within the drop by bisection. An evaluation is one measurement of a point: by the metric, or by
the outputs. Networks and data are those of the developer data set.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import torch

from bitwright.analysis.subject import open_subject
from bitwright.core.numerics.spec import find_preset
from bitwright.mixed.candidates import as_candidates
from bitwright.mixed.choice import Choice
from bitwright.mixed.search import CANDIDATES, _Search, mixed_precision
from bitwright.mixed.start import simulation_of
from tests.support import data
from tests.support.tasks import TASKS, exported

CASES = (
    "mobilenet_v2_cifar", "resnet20_aux", "mobilenet_v1_025", "stories260k", "lstm_char",
)  # fmt: skip
COSTS = ("weight_bytes", "bit_ops")
IMAGES = 600
Run = Callable[[torch.Tensor], torch.Tensor]


def score(name: str) -> tuple[Callable[[Run], float], bool]:
    """The metric of a network (of a part of its test data), and whether lower is better."""
    if name == "stories260k":
        return lambda run: data.perplexity(run, data.stories()[:64]), True
    if name == "lstm_char":
        rows = data.shakespeare("test")[: 96 * 129].reshape(96, 129)
        return lambda run: data.perplexity(run, rows), True
    images = data.imagenet() if name == "mobilenet_v1_025" else data.cifar()
    return lambda run: data.accuracy(run, images[:IMAGES]), False


def case(name: str, front: str, draw: int) -> tuple[Any, list[Any], Callable[[Any], float], bool]:
    """Model, calibration data, metric and its direction."""
    task = TASKS[name]()
    of, lower = score(name)
    batches = task.batches(draw)
    if front == "torch":

        def metric(model: Any) -> float:
            with torch.no_grad():
                return of(lambda x: y if isinstance(y := model(x), torch.Tensor) else y[0])

        return data.trained(name), batches, metric, lower
    import onnx

    proto = onnx.load(data.onnx_file(task.file)) if task.file else exported(name, task)

    def of_session(session: Any) -> float:
        source = session.get_inputs()[0].name
        return of(lambda x: torch.from_numpy(session.run(None, {source: x.numpy()})[0]))

    return proto, [b.numpy() for b in batches], of_session, lower


class Trials:
    """Points of one search, measured once."""

    def __init__(self, name: str, front: str, draw: int) -> None:
        model, batches, self.metric, self.lower = case(name, front, draw)
        candidates = as_candidates(CANDIDATES)
        sim = simulation_of(model, batches, candidates[1])
        self.subject = open_subject(sim)
        with self.subject.in_float():
            self.float = self.metric(self.subject.runnable())
        self.search = _Search(self.subject, candidates, batches, time.monotonic(), None, True, 32, 0, None)
        self.allowed = 0.01 * self.float if self.lower else 1.0
        self._metric: dict[Choice, float] = {}
        self.evaluations = 0

    def drop(self, choice: Choice) -> float:
        """Of the metric against float."""
        if choice not in self._metric:
            self.evaluations += 1
            self.search.library.apply(choice)
            found = self.metric(self.subject.runnable())
            self._metric[choice] = found - self.float if self.lower else self.float - found
        return self._metric[choice]

    def noise(self, choice: Choice) -> float:
        """Of the outputs."""
        self.evaluations += 1
        self.search.library.apply(choice)
        return self.search._noise.measure()

    def cost(self, choice: Choice, name: str) -> float:
        """Of a choice."""
        return self.search._costs[name].of(choice)


def uniform(trials: Trials, cost: str) -> Choice | None:
    """The cheapest candidate for all that keeps within the drop."""
    groups = trials.search.groups
    choices = [(c,) * len(groups) for c in range(len(CANDIDATES))]
    good = [c for c in choices if trials.drop(c) <= trials.allowed]
    return min(good, key=lambda c: trials.cost(c, cost), default=None)


def sensitivities(trials: Trials) -> dict[tuple[int, int], float]:
    """Noise with one group alone at a candidate, the others at the one with the most bits."""
    n, best = len(trials.search.groups), CANDIDATES.index("w8a16")
    found = {}
    for g in range(n):
        for c in range(len(CANDIDATES)):
            if c != best:
                found[g, c] = trials.noise(tuple(c if i == g else best for i in range(n)))
    return found


def greedy(trials: Trials, cost: str, alone: dict[tuple[int, int], float]) -> Choice | None:
    """Groups lowered from the least sensitive on; the deepest point within the drop, by bisection."""
    n, best = len(trials.search.groups), CANDIDATES.index("w8a16")
    now = [best] * n
    points = [tuple(now)]
    for (g, c), _ in sorted(alone.items(), key=lambda item: item[1]):
        lowered = [*now[:g], c, *now[g + 1 :]]
        if trials.cost(tuple(lowered), cost) < trials.cost(tuple(now), cost):
            now = lowered
            points.append(tuple(now))
    low, high = 0, len(points)
    if trials.drop(points[-1]) <= trials.allowed:  # AIMET looks at both ends first
        return points[-1]
    if trials.drop(points[0]) > trials.allowed:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trials.drop(points[middle]) <= trials.allowed else (low, middle)
    return points[low]


def run(name: str, front: str, draw: int) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"name": name, "front": front, "draw": draw}
    trials = Trials(name, front, draw)
    row["groups"] = len(trials.search.groups)
    for cost in COSTS:
        found = uniform(trials, cost)
        dear = trials.cost((CANDIDATES.index("w8a16"),) * row["groups"], cost)
        row[f"uniform {cost}"] = None if found is None else trials.cost(found, cost) / dear
    trials.evaluations = 0
    alone = sensitivities(trials)
    phase_1 = trials.evaluations
    for cost in COSTS:
        trials.evaluations, trials._metric = 0, {}
        found = greedy(trials, cost, alone)
        row[f"greedy {cost}"] = None if found is None else trials.cost(found, cost) / dear_of(trials, cost)
        row[f"greedy {cost} evaluations"] = phase_1 + trials.evaluations
    for cost in COSTS:
        model, batches, metric, lower = case(name, front, draw)
        begin = time.monotonic()
        result = mixed_precision(
            model, batches, CANDIDATES, cost=cost, metric=metric, lower_is_better=lower,
            allowed_drop="1%" if lower else 1.0, evaluations=12,
        )  # fmt: skip
        measured = [p for p in result.points if p.sqnr_db is not None]
        row[f"ours {cost}"] = result.chosen.costs[cost] / dear_of(trials, cost) if result.chosen else None
        row[f"ours {cost} drop"] = result.chosen.drop if result.chosen else None
        row[f"ours {cost} evaluations"] = result.evaluations + len(measured)
        row[f"ours {cost} seconds"] = round(time.monotonic() - begin, 1)
    return row


def dear_of(trials: Trials, cost: str) -> float:
    """What W8A16 costs."""
    return trials.cost((CANDIDATES.index("w8a16"),) * len(trials.search.groups), cost)


def table(rows: list[dict[str, Any]]) -> str:
    """All rows as Markdown; shares of the cost of W8A16."""
    head = ["network", "groups"]
    for cost in COSTS:
        head += [f"{cost}: uniform", "greedy (evaluations)", "ours (evaluations)", "drop"]
    lines = []
    for row in rows:
        cells = [f"{row['name']}, {row['front']}, draw {row['draw']}", str(row["groups"])]
        for cost in COSTS:
            for way in ("uniform", "greedy", "ours"):
                value = row[f"{way} {cost}"]
                text = "none" if value is None else f"{value:.1%}"
                count = row.get(f"{way} {cost} evaluations")
                cells.append(text if count is None else f"{text} ({count:.0f})")
            drop = row[f"ours {cost} drop"]
            cells.append("" if drop is None else f"{drop:.3f}")
        lines.append(cells)
    title = "Cheapest precisions within a drop of one point (1 % of a perplexity), as shares of W8A16"
    return measure.markdown(title, head, lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, required=True, help="JSON lines; rows that stand there are not run again"
    )
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--networks", nargs="*", default=CASES)
    parser.add_argument("--fronts", nargs="*", default=("torch", "onnx"))
    parser.add_argument("--draws", nargs="*", type=int, default=(0, 1, 2))
    parser.add_argument("--only-table", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    assert find_preset("w8a16")
    rows = (
        [json.loads(line) for line in options.results.read_text().splitlines()]
        if options.results.exists()
        else []
    )
    known = {(r["name"], r["front"], r["draw"]) for r in rows}
    for draw in options.draws if not options.only_table else ():
        for name in options.networks:
            for front in options.fronts:
                if (name, front, draw) not in known:
                    rows.append(run(name, front, draw))
                    with options.results.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print(rows[-1], flush=True)
    if options.markdown:
        measure.write(options.markdown, table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
