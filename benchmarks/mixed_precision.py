"""Size and bit operations at a drop of at most one point (1 % of a perplexity): ours, greedy by sensitivity, uniform.

    python benchmarks/mixed_precision.py --results mixed.jsonl --markdown benchmarks/results/mixed_precision.md

All of them choose from W8A8, W8A16, W4A8 and W4A16, share costs and calibration, and round the weights of every point for that
point. ``greedy`` is AIMET's second phase on AIMET's groups (all kernels that read one grid): every group at every lower
candidate alone (SQNR of the outputs) unless another one makes the same of it, groups lowered in that order, the deepest point
within the drop by bisection. An evaluation is one measurement of a point: by the metric, or by the outputs.

The goal ``drop`` is one point (1 %) of the metric. The others are SQNRs of the outputs a third and two thirds of the way (in dB)
from W4A16 to W8A16: they tell fronts apart where W4 for all keeps within a point.

``--greedy earlier.jsonl`` takes greedy and uniform results from rows of an earlier run where the goal is the same one (its
level in dB to 1e-6): they depend on neither estimates nor search. ``--ours`` leaves the rest out.

Points are chosen by the first part of the test data; ``unseen`` is the drop on the second part, which nothing looks at before.
Networks and data are those of the developer data set.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on the path
import numpy as np
import torch

from bitwright.analysis.subject import open_subject
from bitwright.precision.candidates import as_candidates, simulation_of, ties
from bitwright.precision.choice import Choice
from bitwright.precision.measure import Metric
from bitwright.precision.result import Goal, decibel
from bitwright.precision.search import CANDIDATES, Explorer
from bitwright.recipes.judge import Judge
from tests.support import data
from tests.support.tasks import TASKS, exported

CASES = (
    "mobilenet_v2_cifar", "resnet20_aux", "mobilenet_v1_025", "stories260k", "lstm_char",
)  # fmt: skip
LEVELS = {"SQNR 1/3": 1 / 3, "SQNR 2/3": 2 / 3}  # of the way from W4A16 to W8A16
GOALS = (("weight_bytes", "drop"), ("bit_ops", "drop"), *(("weight_bytes", level) for level in LEVELS))
BEST = CANDIDATES.index("w8a16")
SAMPLES = 32  # that estimates look at
CALIBRATION, BATCHES = 60, 10  # samples, a fifth of which measures SQNRs; and the batches they come in
Run = Callable[[torch.Tensor], torch.Tensor]


def score(name: str) -> tuple[list[Callable[[Run], float]], bool]:
    """The metric of a network on both parts of its test data, and whether lower is better."""
    if name == "stories260k":
        found = data.stories()
        parts = [found[:48], found[48:96]]
    elif name == "lstm_char":
        parts = list(data.shakespeare("test")[: 192 * 129].reshape(2, 96, 129))
    else:
        images = data.imagenet() if name == "mobilenet_v1_025" else data.cifar()
        n = 200 if name == "mobilenet_v1_025" else 600
        return [lambda run, i=i: data.accuracy(run, images[i * n : (i + 1) * n]) for i in (0, 1)], False
    return [lambda run, rows=rows: data.perplexity(run, rows) for rows in parts], True


def unseen_inputs(name: str) -> torch.Tensor:
    """Inputs of the second part of the test data, some."""
    if name == "stories260k":
        return data.stories()[48:72, :-1]
    if name == "lstm_char":
        return data.shakespeare("test")[: 192 * 129].reshape(-1, 129)[96:128, :-1]
    return data.imagenet().x[200:232] if name == "mobilenet_v1_025" else data.cifar().x[600:664]


Parts = list[Callable[[Any], float]]


def case(name: str, front: str, draw: int) -> tuple[Any, list[Any], Parts, bool]:
    """Model, calibration data, the metric on both parts of the test data, and its direction."""
    task = TASKS[name]()
    parts, lower = score(name)
    rows = torch.cat(task.batches(draw))[:CALIBRATION]
    batches = list(rows.split(math.ceil(len(rows) / BATCHES)))
    if front == "torch":

        def of_module(model: Any, part: Callable[[Run], float]) -> float:
            with torch.no_grad():
                return part(lambda x: y if isinstance(y := model(x), torch.Tensor) else y[0])

        return data.trained(name), batches, [partial(of_module, part=part) for part in parts], lower
    import onnx

    proto = onnx.load(data.onnx_file(task.file)) if task.file else exported(name, task)

    def of_session(session: Any, part: Callable[[Run], float]) -> float:
        source = session.get_inputs()[0].name
        return part(lambda x: torch.from_numpy(session.run(None, {source: x.numpy()})[0]))

    return proto, [b.numpy() for b in batches], [partial(of_session, part=part) for part in parts], lower


class Trials:
    """The points of one network: each weights, costs and metric on both parts of the data."""

    def __init__(self, name: str, front: str, draw: int) -> None:
        model, batches, self.parts, self.lower = case(name, front, draw)
        candidates = as_candidates(CANDIDATES)
        sim = simulation_of(model, batches, candidates[BEST])
        self.subject = open_subject(sim)
        self.explorer = Explorer(self.subject, candidates, batches, time.monotonic(), None, True, SAMPLES, 0, None)
        self.judge = Judge(
            [x if front == "torch" else x.numpy() for x in unseen_inputs(name).split(8)],
            lambda batch: self.subject.outputs(batch, True),
        )
        assert self.judge.wanted  # before any weight is rounded
        with self.subject.in_float():
            self.float = [part(self.subject.runnable()) for part in self.parts]
        self.allowed = 0.01 * self.float[0] if self.lower else 1.0
        self._lost: dict[tuple[Choice, str], float] = {}
        self.asked: set[Choice] = set()
        self.setup = self.explorer.measurements
        ends = [
            decibel(self.explorer.noise((CANDIDATES.index(c),) * len(self.explorer.groups))) for c in ("w4a16", "w8a16")
        ]
        self.levels = {goal: ends[0] + way * (ends[1] - ends[0]) for goal, way in LEVELS.items()}

    def lost(self, choice: Choice, goal: str) -> float:
        """Loss of a point over what is allowed, by what chooses: the metric on the first part, or the outputs."""
        self.asked.add(choice)
        if (choice, goal) not in self._lost:
            self.explorer.set(choice)
            self._lost[choice, goal] = (
                self.drop(0) / self.allowed
                if goal == "drop"
                else self.explorer.measure() / 10 ** (-self.levels[goal] / 10)
            )
        return self._lost[choice, goal]

    def unseen(self, choice: Choice | None, goal: str) -> float | None:
        """Drop of the metric, or SQNR in dB, on the part that nothing was chosen on."""
        if choice is None:
            return None
        self.explorer.set(choice)
        if goal == "drop":
            return self.drop(1)
        return decibel(float(np.mean(self.judge.ratios(lambda batch: self.subject.outputs(batch, False)))))

    def drop(self, part: int) -> float:
        """Of the metric of the point that is set."""
        found = self.parts[part](self.subject.runnable())
        return found - self.float[part] if self.lower else self.float[part] - found

    def share(self, choice: Choice | None, cost: str) -> float | None:
        """Of the cost of W8A16."""
        if choice is None:
            return None
        known = self.explorer.costs[cost]
        return known.of(choice) / known.of((BEST,) * len(choice))

    def groups(self) -> list[list[int]]:
        """Places of the groups that are one of AIMET's."""
        groups = self.explorer.groups
        return [*ties(groups), *([i] for i, g in enumerate(groups) if not g.tie)]


def uniform(trials: Trials, cost: str, goal: str) -> Choice | None:
    """The cheapest candidate for all that is good."""
    choices = [(c,) * len(trials.explorer.groups) for c in range(len(CANDIDATES))]
    good = [c for c in choices if trials.lost(c, goal) <= 1]
    return min(good, key=trials.explorer.costs[cost].of, default=None)


def lowered(choice: Choice, group: list[int], candidate: int) -> Choice:
    """``choice`` with one of AIMET's groups at another candidate."""
    return tuple(candidate if i in group else c for i, c in enumerate(choice))


def sensitivities(trials: Trials) -> dict[tuple[int, int], float]:
    """Noise with one group alone at a candidate, the others at the one with the most bits."""
    base = (BEST,) * len(trials.explorer.groups)
    groups = trials.groups()
    return {(g, c): trials.explorer.noise(lowered(base, groups[g], c), fitted=False) for g, c in alternatives(trials)}


def alternatives(trials: Trials) -> list[tuple[int, int]]:
    """AIMET's groups and candidates that make something else of them than the most bits or an earlier candidate."""
    same = trials.explorer.library.same
    found = []
    for g, group in enumerate(trials.groups()):
        kept = [BEST]
        for c in range(len(CANDIDATES)):
            if not any(all(same(i, k, c) for i in group) for k in kept):
                kept.append(c)
        found += [(g, c) for c in kept[1:]]
    return found


def greedy(trials: Trials, cost: str, goal: str, alone: dict[tuple[int, int], float]) -> Choice | None:
    """Groups lowered from the least sensitive on; the deepest point within the drop, by bisection."""
    groups, of = trials.groups(), trials.explorer.costs[cost].of
    now: Choice = (BEST,) * len(trials.explorer.groups)
    points = [now]
    for (g, c), _ in sorted(alone.items(), key=lambda item: item[1]):
        if of(lowered(now, groups[g], c)) < of(now):
            now = lowered(now, groups[g], c)
            points.append(now)
    low, high = 0, len(points)
    if trials.lost(points[-1], goal) <= 1:  # AIMET looks at both ends first
        return points[-1]
    if trials.lost(points[0], goal) > 1:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trials.lost(points[middle], goal) <= 1 else (low, middle)
    return points[low]


def ours(trials: Trials, cost: str, goal: str) -> tuple[Choice | None, int]:
    """The result of a search, and its evaluations."""
    metric = None
    if goal == "drop":
        trials.explorer.library.restore()  # the metric reads the float model, without the weights of an earlier point
        metric = Metric(trials.subject, trials.parts[0], lower_is_better=trials.lower, allowed=trials.allowed)
        assert metric.reference.mean == trials.float[0]
    before = trials.explorer.measurements
    wanted = Goal(cost, {}, metric, trials.levels.get(goal), 12, 0.9)
    found = trials.explorer.run(wanted, lambda: None)
    count = trials.setup + trials.explorer.measurements - before + round(metric.evaluations if metric else 0)
    if found.chosen is None:
        return None, count
    names = list(CANDIDATES)
    choice = tuple(names.index(found.chosen.choice[g.name]) for g in found.groups)
    assert np.isclose(trials.explorer.costs[cost].of(choice), found.chosen.costs[cost])
    return choice, count


KEYS = ("name", "front", "draw", "cost", "goal")
GREEDY = ("greedy", "greedy unseen", "greedy points", "uniform", "uniform unseen")


def run(
    name: str,
    front: str,
    draw: int,
    goals: list[tuple[str, str]],
    save: Callable[[dict[str, Any]], None],
    earlier: list[dict[str, Any]],
    only_ours: bool,
) -> None:
    """One row per cost and goal."""
    start = time.process_time()
    trials = Trials(name, front, draw)
    alone: dict[tuple[int, int], float] = {}
    for cost, goal in goals:
        row: dict[str, Any] = {"name": name, "front": front, "draw": draw, "cost": cost, "goal": goal}
        row["groups"], row["aimet_groups"] = len(trials.explorer.groups), len(trials.groups())
        choice, row["ours evaluations"] = ours(trials, cost, goal)
        row["ours"], row["ours unseen"] = trials.share(choice, cost), trials.unseen(choice, goal)
        known = [r for r in earlier if all(r[key] == row[key] for key in KEYS)]
        level = trials.levels.get(goal)
        if known and (level is None or abs(known[0]["level"] - level) < 1e-6):
            row.update({k: known[0][k] for k in GREEDY})
        elif not only_ours:
            alone = alone or sensitivities(trials)
            trials.asked.clear()
            choice = greedy(trials, cost, goal, alone)
            row["greedy points"] = len(trials.asked)
            row["greedy"], row["greedy unseen"] = trials.share(choice, cost), trials.unseen(choice, goal)
            choice = uniform(trials, cost, goal)
            row["uniform"], row["uniform unseen"] = trials.share(choice, cost), trials.unseen(choice, goal)
        if "greedy" in row:
            row["greedy evaluations"] = len(alternatives(trials)) + row["greedy points"]
        row["seconds"], row["lower"] = round(time.process_time() - start, 1), trials.lower
        row["level"], row["commit"] = level, measure.machine()["commit"]
        save(row)


def table(rows: list[dict[str, Any]]) -> str:
    """All rows as Markdown; shares of the cost of W8A16."""
    head = ["network", "goal", "uniform", "unseen", "greedy", "unseen", "evaluations", "ours", "unseen", "evaluations"]
    lines = []
    order = [(r["cost"], r["goal"]) for r in rows]
    assert set(order) <= set(GOALS)
    for row in sorted(
        rows, key=lambda r: (GOALS.index((r["cost"], r["goal"])), CASES.index(r["name"]), r["front"], r["draw"])
    ):
        goal = row["goal"] if row["goal"] == "drop" else f"{row['level']:.1f} dB"
        cells = [f"{row['name']}, {row['front']}, draw {row['draw']}", f"{row['cost']}, {goal}"]
        for way in ("uniform", "greedy", "ours"):
            value, lost = row.get(way), row.get(f"{way} unseen")
            cells.append("-" if way not in row else "none" if value is None else f"{value:.1%}")
            cells.append(
                "" if lost is None else f"{lost:.3f}" if row["lower"] and row["goal"] == "drop" else f"{lost:.1f}"
            )
            if way != "uniform":
                cells.append(str(row.get(f"{way} evaluations", "")))
        lines.append(cells)
    title = "Cheapest precisions within a drop of one point (1 % of a perplexity), as shares of W8A16"
    return measure.markdown(title, head, lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, required=True, help="JSON lines; rows that stand there are not run again"
    )
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--networks", nargs="*", default=CASES)
    parser.add_argument("--fronts", nargs="*", default=("torch", "onnx"))
    parser.add_argument("--draws", nargs="*", type=int, default=(0, 1, 2))
    parser.add_argument("--greedy", type=Path, help="rows of an earlier run")
    parser.add_argument("--ours", action="store_true", help="without what is not in these rows")
    parser.add_argument("--only-table", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = measure.read_rows(options.results)
    earlier = measure.read_rows(options.greedy) if options.greedy else []
    known = {tuple(r[key] for key in KEYS) for r in rows}

    def save(row: dict[str, Any]) -> None:
        rows.append(row)
        with options.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    for draw in options.draws if not options.only_table else ():
        for front in options.fronts:
            for name in options.networks:
                goals = [goal for goal in GOALS if (name, front, draw, *goal) not in known]
                if goals:
                    run(name, front, draw, goals, save, earlier, options.ours)
    if options.markdown:
        measure.write(options.markdown, table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
