"""Structured pruning: which units go, for a target, and the cut itself."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from bitwright.compression.checks import checked_dependencies, difference, masked_outputs
from bitwright.compression.costs import size_costs
from bitwright.compression.groups import Dependencies, Group, Refusal
from bitwright.compression.importance import Evidence, channel_axis, comparable, criterion, mean_squares
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.simulation.float_model import Array
from bitwright.errors import ConfigError, ModelError, close_matches, first_few
from bitwright.methods.front_end import Kept, Structured

Ranking = Literal["uniform", "global"]

#: target -> how many channels its kernels compute at once; widths stay multiples of it where a layer has four times as many
WIDTHS: dict[str, int] = {
    "any": 1,
    "cpu": 8,  # ONNX Runtime blocks channels by 8 with AVX2, XNNPACK and oneDNN too
    "avx512": 16,
    "tensor_cores": 8,
    "tensor_cores_int8": 16,
    "hexagon": 32,
}
COSTS = ("macs", "params", "bytes")


@dataclass(frozen=True)
class Pruned:
    """What became of one group.

    Attributes:
        name, kind: of the group.
        before, after: units.
        removed: their numbers, ascending.
    """

    name: str
    kind: str
    before: int
    after: int
    removed: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Choice:
    """What is to be removed.

    Attributes:
        removed: group -> units.
        costs: what is left of each cost, in parts of the whole.
    """

    removed: Mapping[str, Array]
    costs: Mapping[str, float]


def cut_graph(graph: Graph, kept: Kept) -> Graph:
    """The graph with the shapes that a cut leaves."""
    values = dict(graph.values)
    for name, value in graph.values.items():
        if kept.axes(name):
            values[name] = replace(value, shape=kept.shape(name, value.shape))
    return Graph(graph.ops, values, graph.inputs, graph.outputs)


def checked_target(target: Mapping[str, float]) -> dict[str, float]:
    """Parts of each cost that may be left.

    Raises:
        ConfigError: an unknown cost, or a part that is not between 0 and 1.
    """
    if not target:
        raise ConfigError("target", "it names no cost", 'write target={"macs": 0.5} for half of the multiplications')
    for name, part in target.items():
        if name not in COSTS:
            raise ConfigError(
                "target", f"there is no cost {name!r}{close_matches(str(name), COSTS)}", f"use {', '.join(COSTS)}"
            )
        if not isinstance(part, (int, float)) or not 0 < part <= 1:
            raise ConfigError(
                "target", f"{part!r} of the {name} is not a part between 0 and 1", 'write target={"macs": 0.5} for half'
            )
    return dict(target)


def step_of(group: Group, multiple: int) -> int:
    """How many units go at once, so that the widths of the layers that make them stay multiples of ``multiple``."""
    count = max((m.positions.shape[1] for m in group.makers), default=1)
    width = group.units * count
    while multiple > 1 and multiple * 4 > width:
        multiple //= 2
    step = multiple // math.gcd(multiple, count)
    return max(1, min(step, group.units // 2))


class Selector:
    """Chooses units of the groups of a model by their scores.

    Args:
        found: the dependency graph.
        groups: those that may lose units.
        scores: group -> score of every unit.
        cap: largest part of the units of one group that may go.
        multiple: of the widths that are left, see :func:`step_of`.
        ranking: ``uniform`` takes the same part from every group; ``global`` the lowest scores, each in parts of the mean of
            its group.
        alike: take as many units from groups that are kin.
    """

    def __init__(
        self, found: Dependencies, groups: Sequence[Group], scores: Mapping[str, Array], *, cap: float = 0.9,
        multiple: int = 1, ranking: Ranking = "uniform", alike: bool = False,
    ) -> None:  # fmt: skip
        self.found, self.groups, self.scores = found, list(groups), scores
        self.cap, self.multiple, self.ranking, self.alike = cap, multiple, ranking, alike
        self.whole = size_costs(found.graph)
        self._order = {g.name: np.argsort(scores[g.name], kind="stable") for g in self.groups}
        shared = [comparable(np.asarray(scores[g.name], np.float64)) for g in self.groups]
        ranks = [np.argsort(self._order[g.name]) / g.units for g in self.groups]  # where scores are equal, evenly
        owners = np.repeat(np.arange(len(self.groups)), [g.units for g in self.groups])
        self._owners = owners[np.lexsort((np.concatenate(ranks), np.concatenate(shared)))]

    def at(self, part: float) -> dict[str, Array]:
        """Group -> the units that go, when about this part of all units does."""
        removed = {}
        counts = self._counts(part)
        for group in self.groups:
            step = step_of(group, self.multiple)
            most = int(min(self.cap, 1 - 1 / group.units) * group.units)
            count = min(int(counts[group.name] + 0.5), most)
            left = -(-(group.units - count) // step) * step
            count = group.units - min(left, group.units)
            if count:
                removed[group.name] = np.sort(self._order[group.name][:count])
        return removed

    def _counts(self, part: float) -> dict[str, float]:
        """How many units of each group go, before they are rounded."""
        if self.ranking == "global":
            gone = np.bincount(self._owners[: round(part * len(self._owners))], minlength=len(self.groups))
            counts = {group.name: float(n) for group, n in zip(self.groups, gone, strict=True)}
        else:
            counts = {group.name: part * group.units for group in self.groups}
        if not self.alike:
            return counts
        kin: dict[str, list[Group]] = {}
        for group in self.groups:
            kin.setdefault(f"{group.kin}/{group.units}", []).append(group)
        means = ((alike, float(np.mean([counts[g.name] for g in alike]))) for alike in kin.values())
        return {group.name: mean for alike, mean in means for group in alike}

    def left(self, removed: Mapping[str, Array]) -> dict[str, float]:
        """What is left of every cost, in parts of the whole."""
        costs = size_costs(cut_graph(self.found.graph, self.found.cut(removed)))
        return {name: costs[name] / self.whole[name] if self.whole[name] else 1.0 for name in costs}

    def choose(self, target: Mapping[str, float]) -> Choice:
        """The smallest removal that meets the target, by bisection.

        Raises:
            ConfigError: nothing meets it; the message has the nearest that can be met.
        """
        most = self.at(1.0)
        least = self.left(most)
        missed = {name: part for name, part in target.items() if least[name] > part}
        if missed:
            name, part = next(iter(missed.items()))
            blocked = first_few([str(r) for r in self.found.refused])
            raise ConfigError(
                "target", f"{part:g} of the {name} cannot be met: with cap={self.cap:g} the least is {least[name]:.3f}; "
                f"not touched: {blocked}",
                f'use target={{"{name}": {math.ceil(least[name] * 1000) / 1000:g}}}, a larger cap, or averaged=True',
            )  # fmt: skip
        low, high, best = 0.0, 1.0, most
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            removed = self.at(middle)
            left = self.left(removed)
            if all(left[name] <= part for name, part in target.items()):
                high, best = middle, removed
            else:
                low = middle
        best = self._refilled(best, target)
        return Choice(best, self.left(best))

    def _refilled(self, removed: Mapping[str, Array], target: Mapping[str, float]) -> dict[str, Array]:
        """Give units back, the most important ones first, while the target is still met: whole steps are coarse."""
        best = dict(removed)
        groups = {g.name: g for g in self.groups}
        waiting = [] if self.alike else list(best)
        left_over = _REFILLS * len(best)
        while waiting and left_over > 0:
            left_over -= 1
            name = max(waiting, key=lambda n: float(np.max(comparable(self.scores[n])[best[n]])))
            step, scores = step_of(groups[name], self.multiple), self.scores[name]
            order = best[name][np.argsort(scores[best[name]], kind="stable")]
            fewer = {**best, name: np.sort(order[:-step])}
            if len(order) <= step:
                del fewer[name]
            left = self.left(fewer)
            if any(left[cost] > part for cost, part in target.items()):
                waiting.remove(name)
            else:
                best, waiting = fewer, [n for n in waiting if n in fewer]
        return best


_BISECTIONS = 14
_REFILLS = 4  # of each group, at most on average


@dataclass(frozen=True)
class PruneOptions:
    """How units are chosen; see :func:`bitwright.compression.compress.compress`."""

    importance: str = "l2"
    ranking: Ranking = "uniform"
    cap: float = 0.9
    widths: str | int = "cpu"
    alike: bool = False
    inner: bool = False
    averaged: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    seed: int = 0

    @property
    def multiple(self) -> int:
        """Of the widths.

        Raises:
            ConfigError: there is no such row, or a number that is none.
        """
        if isinstance(self.widths, int) and self.widths > 0:
            return self.widths
        if self.widths not in WIDTHS:
            raise ConfigError(
                "widths", f"there is no row {self.widths!r}{close_matches(str(self.widths), WIDTHS)}",
                f"use {', '.join(WIDTHS)}, or a positive number",
            )  # fmt: skip
        return WIDTHS[str(self.widths)]


@dataclass(frozen=True)
class PruneReport:
    """What :func:`prune` did.

    Attributes:
        rows: of every group that could be pruned.
        refused: layers that were not touched, and why.
        costs: what is left of each cost, in parts of the whole.
        readers: operators that lost inputs -> which of their outputs are left, ``None`` for all.
        norms: batch norms -> which of their channels are left.
    """

    rows: tuple[Pruned, ...]
    refused: tuple[Refusal, ...]
    costs: Mapping[str, float]
    readers: Mapping[str, Array | None] = field(default_factory=dict, repr=False)
    norms: Mapping[str, Array | None] = field(default_factory=dict, repr=False)


def prune(
    structure: Structured,
    batches: Sequence[Any],
    target: Mapping[str, float],
    options: PruneOptions = PruneOptions(),  # noqa: B008
    gradients: Callable[[Sequence[str]], Mapping[str, Array]] | None = None,
) -> PruneReport:
    """Remove units from a model until a target is met.

    Args:
        structure: the model, changed in place; as it was where an error is raised.
        batches: data; the first one checks the cut.
        target: cost -> the part of it that may be left.
        options: how units are chosen.
        gradients: parameters -> gradients of a loss, for ``importance="taylor"``.

    Raises:
        ConfigError: a target or an option that cannot be met; nothing can be removed, with the layers and the reasons.
        ModelError: the cut model does not compute what the whole one does with the same channels at zero.
    """
    target, score, multiple = checked_target(target), criterion(options.importance), options.multiple
    found = checked_dependencies(structure, batches[0], inner=options.inner, averaged=options.averaged)
    groups = [g for g in found.groups if _chosen(g, options)]
    if not groups:
        raise _nothing(found)
    evidence = _evidence(structure, found, groups, batches, options, gradients)
    scores = {g.name: np.asarray(score(g, evidence)) for g in groups}
    selector = Selector(
        found, groups, scores, cap=options.cap, multiple=multiple, ranking=options.ranking, alike=options.alike
    )
    choice = selector.choose(target)
    removed = dict(choice.removed)
    cut = found.cut(removed)
    known = {op.name: op for op in found.graph.ops}

    def left(op: Op, channel: int) -> Array | None:
        axes = cut.axes(op.outputs[0])
        return axes[channel] if axes else None

    gone = dict.fromkeys(m.op for g in groups if g.name in removed for m in g.readers)
    readers = {name: left(known[name], channel_axis(known[name])) for name in gone}
    norms = {op.name: left(op, 1) for op in found.graph.ops if op.type == "BatchNormalization"}
    apply(structure, found, removed, batches[0])
    rows = tuple(
        Pruned(
            g.name,
            g.kind,
            g.units,
            g.units - len(removed.get(g.name, ())),
            tuple(np.asarray(removed.get(g.name, ()), int).tolist()),
        )
        for g in groups
    )
    return PruneReport(rows, found.refused, choice.costs, readers, norms)


def _nothing(found: Dependencies) -> ConfigError:
    reasons = [str(r) for r in found.refused] or ["it has no layer whose channels are computed and read by layers"]
    problem = f"nothing can be removed: {first_few(reasons, 6)}"
    return ConfigError("compress", problem, "see docs/compression.md for what blocks a layer")


def _evidence(
    structure: Structured, found: Dependencies, groups: Sequence[Group], batches: Sequence[Any], options: PruneOptions,
    gradients: Callable[[Sequence[str]], Mapping[str, Array]] | None,
) -> Evidence:  # fmt: skip
    """What the criterion needs, beside the parameters."""
    evidence = Evidence(found.graph, structure.param, seed=options.seed)
    if options.importance == "activation":
        evidence.squares = mean_squares(structure.view(), found.graph, groups, batches)
    if options.importance == "taylor":
        if gradients is None:
            raise ConfigError(
                "importance", "taylor needs a loss to differentiate", "give loss=, or use importance='activation'"
            )
        evidence.gradients = gradients([m.param for g in groups for m in g.makers])
    return evidence


def apply(structure: Structured, found: Dependencies, removed: Mapping[str, Array], batch: Any) -> None:
    """Cut the model, and check it: shapes as predicted, outputs those of the whole model with these channels at zero.

    Raises:
        ModelError: they are not; the model is as it was.
    """
    gone = [found.group(name) for name in removed]
    exact = not any(group.averaged for group in gone)
    masked = masked_outputs(structure, gone, dict(removed), batch) if exact else None
    graph, cut = structure.graph(), found.cut(removed)
    undo = structure.cut(cut)
    problem = structure.problem(cut, graph)
    if problem is None and masked is not None:
        problem = difference(masked, structure.outputs(batch))
    if problem is not None:
        undo()
        raise ModelError(
            problem.where or "compress",
            problem.text,
            "exclude the group with exclude=, or write the width from a shape",
        )
    structure.refresh()


def _chosen(group: Group, options: PruneOptions) -> bool:
    named = [group.name, *(m.op for m in group.makers)]

    def fits(patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in named for pattern in patterns)

    return (not options.include or fits(options.include)) and not fits(options.exclude)
