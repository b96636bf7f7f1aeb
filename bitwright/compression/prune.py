"""Structured pruning: choose the units to remove for a target, and cut."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bitwright.compression.bits import BitSpace, JointSpace
from bitwright.compression.checks import checked_dependencies, difference, masked_outputs
from bitwright.compression.costs import Prices, check_target, nearest_part, remedy_of
from bitwright.compression.groups import Dependencies, Group, Refusal
from bitwright.compression.importance import Evidence, comparable, criterion, mean_squares
from bitwright.compression.ratios import Chosen, Record, choose, sensitivities
from bitwright.compression.reconstruct import Original
from bitwright.compression.widths import WidthSpace, counts_of, cut_graph, few_batches, lost
from bitwright.core.graph.cost import counts_bytes
from bitwright.core.simulation.calibration import samples_in
from bitwright.core.simulation.float_model import Array
from bitwright.errors import ConfigError, ModelError, close_matches, first_few
from bitwright.methods.front_end import Structured

Ranking = Literal["exact", "uniform", "global"]


@dataclass(frozen=True)
class Widths:
    """The widths that a target's kernels prefer.

    Attributes:
        multiple: how many channels they compute at once; narrow layers, of less than four times as many, keep a half or a
            quarter of it.
        always: what every width stays a multiple of where it was one, however narrow the layer is.
    """

    multiple: int
    always: int = 1


#: target -> widths that its kernels like
WIDTHS: dict[str, Widths] = {
    "any": Widths(1),
    # ONNX Runtime blocks channels by 8 with AVX2, XNNPACK and oneDNN too; a depthwise convolution of another width than a
    # multiple of 4 leaves the blocks, with a reordering in front and behind, and takes several times as long
    "cpu": Widths(8, 4),
    "avx512": Widths(16, 4),  # ONNX Runtime blocks by 16
    "tensor_cores": Widths(8, 8),
    "tensor_cores_int8": Widths(16, 16),
    "hexagon": Widths(32, 4),
}


@dataclass(frozen=True)
class Pruned:
    """Outcome for one group.

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
    """Units to remove.

    Attributes:
        removed: group -> units.
        costs: what is left of each cost, in parts of the whole.
    """

    removed: Mapping[str, Array]
    costs: Mapping[str, float]


def step_of(group: Group, widths: Widths) -> int:
    """Number of units to remove at once, so that widths of their producers suit the kernels."""
    count = max((m.positions.shape[1] for m in group.makers), default=1)
    width, multiple = group.units * count, widths.multiple
    while multiple > math.gcd(width, widths.always) and multiple * 4 > width:
        multiple //= 2
    step = multiple // math.gcd(multiple, count)
    return max(1, min(step, group.units // 2))


class Selector:
    """Chooses units of the groups of a model by their scores.

    Args:
        found: the dependency graph.
        prices: what cut graphs cost.
        groups: those that may lose units.
        scores: group -> score of every unit.
        cap: largest part of the units of one group that may go.
        widths: that are left, see :func:`step_of`.
        ranking: ``uniform`` takes the same part from every group; ``global`` the lowest scores, each in parts of the mean of
            its group; ``exact`` begins with ``uniform``.
        alike: take as many units from groups that are kin.
        ratios: parts of a group that may be left, in place of ten even steps.
    """

    def __init__(
        self, found: Dependencies, prices: Prices, groups: Sequence[Group], scores: Mapping[str, Array], *,
        cap: float = 0.9, widths: Widths = WIDTHS["any"], ranking: Ranking = "uniform", alike: bool = False,
        ratios: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        self.found, self.prices, self.groups, self.scores = found, prices, list(groups), scores
        self.cap, self.widths, self.ranking, self.alike, self.ratios = cap, widths, ranking, alike, ratios
        self.order: dict[str, Array] = {g.name: np.argsort(scores[g.name], kind="stable") for g in self.groups}
        shared = [comparable(np.asarray(scores[g.name], np.float64)) for g in self.groups]
        ranks = [np.argsort(self.order[g.name]) / g.units for g in self.groups]  # where scores are equal, evenly
        owners = np.repeat(np.arange(len(self.groups)), [g.units for g in self.groups])
        self._owners = owners[np.lexsort((np.concatenate(ranks), np.concatenate(shared)))]

    def at(self, part: float) -> dict[str, Array]:
        """Group -> the removed units, when about this part of all units is removed."""
        removed = {}
        counts = self._counts(part)
        for group in self.groups:
            step = self.step(group)
            count = min(int(counts[group.name] + 0.5), self.most(group))
            left = -(-(group.units - count) // step) * step
            count = group.units - min(left, group.units)
            if count:
                removed[group.name] = np.sort(self.order[group.name][:count])
        return removed

    def step(self, group: Group) -> int:
        """Number of units removed at once."""
        return step_of(group, self.widths)

    def most(self, group: Group) -> int:
        """Largest number of units that may be removed."""
        return int(min(self.cap, 1 - 1 / group.units) * group.units)

    def counts(self, groups: Sequence[Group]) -> list[int]:
        """Numbers of units that may be removed from each of ``groups``, ascending from 0."""
        if self.ratios is not None:
            units = groups[0].units
            multiple = self.widths.multiple
            left = {max(1, round(units * ratio / multiple) * multiple) for ratio in self.ratios}
            return sorted({0, *(units - n for n in left if n < units)})
        return counts_of(groups[0].units, self.step(groups[0]), min(map(self.most, groups)))

    def sets(self) -> list[list[Group]]:
        """Sets of groups that lose equally many units."""
        if not self.alike:
            return [[group] for group in self.groups]
        kin: dict[str, list[Group]] = {}
        for group in self.groups:
            kin.setdefault(f"{group.kin}/{group.units}", []).append(group)
        return list(kin.values())

    def _counts(self, part: float) -> dict[str, float]:
        """Number of units to remove from each group, before rounding."""
        if self.ranking == "global":
            gone = np.bincount(self._owners[: round(part * len(self._owners))], minlength=len(self.groups))
            counts = {group.name: float(n) for group, n in zip(self.groups, gone, strict=True)}
        else:
            counts = {group.name: part * group.units for group in self.groups}
        if not self.alike:
            return counts
        means = ((alike, float(np.mean([counts[g.name] for g in alike]))) for alike in self.sets())
        return {group.name: mean for alike, mean in means for group in alike}

    def left(self, removed: Mapping[str, Array]) -> dict[str, float]:
        """Remaining fraction of every cost."""
        return self.prices.left(cut_graph(self.found.graph, self.found.cut(removed)))

    def choose(self, target: Mapping[str, float]) -> Choice:
        """The smallest removal that meets the target, by bisection.

        Raises:
            ConfigError: nothing meets it; the message has the nearest that can be met.
        """
        most = self.at(1.0)
        least = self.left(most)
        missed = {name: part for name, part in target.items() if least[name] > part}
        if missed:
            name, part = max(missed.items(), key=lambda item: least[item[0]] / item[1])
            whole = self.prices.whole[name]
            asked = nearest_part(name, part * whole, whole) if counts_bytes(name) else f"{part:g}"
            nearest = nearest_part(name, least[name] * whole, whole)
            also = f" (also missed: {', '.join(n for n in missed if n != name)})" if len(missed) > 1 else ""
            blocked = first_few([str(r) for r in self.found.refused])
            raise ConfigError(
                "target", f"{asked} of the {name} cannot be met{also}: with cap={self.cap:g} the least is {nearest}; "
                f"not touched: {blocked}",
                f'use target={{"{name}": {nearest.split()[0]}}}, a larger cap, or averaged=True',
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
        best = self.refilled(best, target)
        return Choice(best, self.left(best))

    def refilled(self, removed: Mapping[str, Array], target: Mapping[str, float]) -> dict[str, Array]:
        """Restore the most important units while the target is still met."""
        best = dict(removed)
        groups = {g.name: g for g in self.groups}
        waiting = [] if self.alike else list(best)
        left_over = _REFILLS * len(best)
        while waiting and left_over > 0:
            left_over -= 1
            name = max(waiting, key=lambda n: float(np.max(comparable(self.scores[n])[best[n]])))
            step, scores = self.step(groups[name]), self.scores[name]
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


_DIRECTIONS = 8  # random directions of the outputs, for each batch
_BISECTIONS = 14
_REFILLS = 4  # of each group, at most on average


@dataclass(frozen=True)
class PruneOptions:
    """Options of the choice of units; see :func:`bitwright.compression.compress.compress`."""

    importance: str = "l2"
    ranking: Ranking = "uniform"
    cap: float = 0.9
    widths: str | int = "cpu"
    alike: bool | None = None
    inner: bool = False
    averaged: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    seed: int = 0
    narrow_inputs: bool = True
    bits: tuple[int, ...] = ()
    in_config: bool = False

    @property
    def kernels(self) -> Widths:
        """The preferred multiples of widths.

        Raises:
            ConfigError: there is no such row, or a number that is none.
        """
        if isinstance(self.widths, int) and self.widths > 0:
            return Widths(self.widths)
        if self.widths not in WIDTHS:
            raise ConfigError(
                "widths", f"there is no row {self.widths!r}{close_matches(str(self.widths), WIDTHS)}",
                f"use {', '.join(WIDTHS)}, or a positive number",
            )  # fmt: skip
        return WIDTHS[str(self.widths)]


@dataclass(frozen=True)
class PruneReport:
    """Result of :func:`prune`.

    Attributes:
        rows: of every group that could be pruned.
        refused: layers that were not touched, and why.
        costs: what is left of each cost, in parts of the whole.
        choice: what the exact choice has measured.
        readers: operators that lost inputs -> which of their outputs are left, ``None`` for all.
        norms: batch norms -> which of their channels are left.
        states: inputs and outputs that are states of recurrent layers -> shape before and after, where it changed.
        weights: the weights that are rounded, where bits were chosen.
        bits: of each of them, by its parameter.
    """

    rows: tuple[Pruned, ...]
    refused: tuple[Refusal, ...]
    costs: Mapping[str, float]
    choice: Chosen | None = None
    readers: Mapping[str, Array | None] = field(default_factory=dict, repr=False)
    norms: Mapping[str, Array | None] = field(default_factory=dict, repr=False)
    states: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    weights: BitSpace | None = field(default=None, repr=False)
    bits: Mapping[str, int] = field(default_factory=dict)

    @property
    def rules(self) -> dict[str, Any]:
        """Rules of a simulation with the bits that were chosen; empty where none were."""
        return {} if self.weights is None else self.weights.rules(self.bits)

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """The model with its weights rounded to the bits that were chosen, for the length of a ``with`` block."""
        undo = None if self.weights is None else self.weights.apply(self.bits)
        try:
            yield
        finally:
            if undo is not None:
                undo()


@dataclass(frozen=True)
class Search:
    """Options of the exact choice.

    Attributes:
        original: a ``FloatModel`` of the whole model, to which trials are fitted; ``None`` leaves layers as they are.
        batch_norms: move the statistics of batch norms in trials.
        metric: of the model; decides between the choices of least noise.
        baseline: the metric of the model as it is.
        lower_is_better: of the metric.
        deadline: seconds after which no further choice is measured.
        resume: folder that keeps measurements.
        progress: show progress bars.
        times: operator -> milliseconds, for a target of ``ms``.
        wanted: the model's outputs for the first batches before any cut (:func:`~bitwright.compression.widths.few_batches`);
            computed where they are not given.
        shared: folders in which other processes have measured shares of the sensitivities, for the length of a ``with`` block.
    """

    original: Any = None
    batch_norms: bool = False
    metric: Callable[[Any], Any] | None = None
    baseline: float | None = None
    lower_is_better: bool = False
    deadline: float | None = None
    resume: Any = None
    progress: bool = True
    times: Mapping[str, float] | None = None
    wanted: Sequence[Sequence[Array]] | None = None
    shared: Callable[[], AbstractContextManager[Iterable[Path]]] | None = None


def prune(
    structure: Structured,
    batches: Sequence[Any],
    target: Mapping[str, float | str],
    options: PruneOptions = PruneOptions(),  # noqa: B008
    search: Search = Search(),  # noqa: B008
    gradients: Callable[[Sequence[str]], Mapping[str, Array]] | None = None,
) -> PruneReport:
    """Remove units from a model until a target is met.

    Args:
        structure: the model, changed in place; as it was where an error is raised.
        batches: data; the first one checks the cut.
        target: cost -> the part of it that may be left, or bytes.
        options: how units are chosen.
        search: how the exact choice is made, for ``ranking="exact"``.
        gradients: parameters -> gradients of a loss, for ``importance="taylor"``.

    Raises:
        ConfigError: a target or an option that cannot be met; nothing can be removed, with the layers and the reasons.
        ModelError: the cut model does not compute what the whole one does with the same channels at zero.
    """
    plan = _planned(structure, batches, target, options, search, gradients)
    found, groups, selector, prices, choice = plan.found, plan.groups, plan.selector, plan.prices, plan.choice
    weights = plan.weights
    chosen, bits = None, {} if weights is None else weights.all_at(plan.level)
    if options.ranking == "exact":
        chosen, removed, bits = _exact(structure, plan, batches, search, options)
        selector.prices = prices.at(bits)
        removed = selector.refilled(removed, plan.parts)
        choice = Choice(removed, selector.left(removed))
    removed = dict(choice.removed)
    cut = found.cut(removed)
    readers, norms = lost(found, cut, [g for g in groups if g.name in removed])
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
    shapes = {n: found.graph.values[n].shape for n in (*found.given, *found.states) if cut.axes(n)}
    states = {name: (shape, cut.shape(name, shape)) for name, shape in shapes.items()}
    return PruneReport(rows, found.refused, choice.costs, chosen, readers, norms, states, weights, bits)


@dataclass(frozen=True)
class _Plan:
    """What is known before anything is chosen exactly: the same part of every group within the target, and what it costs."""

    found: Dependencies
    groups: list[Group]
    selector: Selector
    prices: Prices
    parts: dict[str, float]
    weights: BitSpace | None
    level: int
    choice: Choice


def _planned(
    structure: Structured, batches: Sequence[Any], target: Mapping[str, float | str], options: PruneOptions, search: Search,
    gradients: Callable[[Sequence[str]], Mapping[str, Array]] | None,
) -> _Plan:  # fmt: skip
    wanted, score, widths = check_target(target), criterion(options.importance), options.kernels
    found, groups = _groups(structure, batches[0], options)
    evidence = _evidence(structure, found, groups, batches, options, gradients)
    scores = {g.name: np.asarray(score(g, evidence)) for g in groups}
    prices = Prices(found.graph, wanted, search.times, max(samples_in(batches[0]), 1))
    parts = prices.parts(wanted)
    selector = Selector(
        found, prices, groups, scores, cap=options.cap, widths=widths,
        ranking=options.ranking, alike=structure.one_configuration() if options.alike is None else options.alike,
    )  # fmt: skip
    weights = BitSpace(structure, options.bits) if options.bits else None
    level, choice = _first(selector, parts, weights)
    return _Plan(found, groups, selector, prices, parts, weights, level, choice)


def measure_share(
    structure: Structured,
    batches: Sequence[Any],
    target: Mapping[str, float | str],
    options: PruneOptions,
    search: Search,
    gradients: Callable[[Sequence[str]], Mapping[str, Array]] | None,
    measures: Callable[[int], bool],
) -> None:
    """Measure some of what :func:`prune` measures to choose, and keep it in the folder ``search.resume``.

    Args:
        structure, batches, target, options, search, gradients: as for :func:`prune`; the model is as it was afterwards.
        measures: whether a part is measured, by its number.
    """
    plan = _planned(structure, batches, target, options, search, gradients)
    space, of = _space(structure, plan, batches, search, options)
    sensitivities(space, search.progress, Record(search.resume, space, *of), measures)


def _groups(structure: Structured, batch: Any, options: PruneOptions) -> tuple[Dependencies, list[Group]]:
    """The dependency graph, and the groups that may lose units.

    Raises:
        ConfigError: there is none; with the reasons.
    """
    found = checked_dependencies(
        structure, batch, inner=options.inner, averaged=options.averaged, narrow_inputs=options.narrow_inputs
    )
    groups = [g for g in found.groups if _chosen(g, options)]
    if options.in_config and (forbidden := _undescribed(structure, found, groups, options.kernels)):
        found = found.without({**{r.name: r.reason for r in found.refused}, **forbidden})
        groups = [g for g in found.groups if _chosen(g, options)]
    if not groups:
        raise _nothing(found)
    return found, groups


def _undescribed(structure: Structured, found: Dependencies, groups: Sequence[Group], widths: Widths) -> dict[str, str]:
    """Group -> why the configuration of the model cannot say a smaller width of it and of its kin."""
    reasons: dict[str, str] = {}
    for kin in dict.fromkeys(g.kin for g in groups):
        alike = [g for g in groups if g.kin == kin]
        gone = {g.name: np.arange(g.units - step_of(g, widths), g.units) for g in alike if g.units > 1}
        undo = structure.cut(found.cut(gone))
        reason = structure.undescribed()
        undo()
        if reason:
            reasons |= {g.name: f"the configuration cannot say another width of it: {reason}" for g in alike}
    return reasons


def _first(selector: Selector, target: Mapping[str, float], weights: BitSpace | None) -> tuple[int, Choice]:
    """The same part of every group within the target, all weights at the largest number of bits with which one is.

    Returns:
        The place of this number among those that may be chosen, and the choice.
    """
    whole, last = selector.prices, 0 if weights is None else len(weights.levels) - 1
    for level in range(last + 1):
        selector.prices = whole if weights is None else whole.at(weights.all_at(level))
        least = selector.left(selector.at(1.0))
        if level == last or all(least[name] <= part for name, part in target.items()):
            break
    return level, selector.choose(target)


def _space(
    structure: Structured, plan: _Plan, batches: Sequence[Any], search: Search, options: PruneOptions
) -> tuple[WidthSpace | JointSpace, tuple[Any, ...]]:
    """What is chosen from, and what measurements depend on beside it."""
    few = few_batches(batches)
    original = None if search.original is None else Original(search.original, few)
    widths = WidthSpace(structure, plan.selector, few, original, search.batch_norms, search.wanted)
    space = widths if plan.weights is None else JointSpace(widths, plan.weights)
    return space, (options, search.batch_norms, original is None, space.fingerprint)


def _exact(
    structure: Structured, plan: _Plan, batches: Sequence[Any], search: Search, options: PruneOptions
) -> tuple[Chosen, dict[str, Array], dict[str, int]]:
    """The numbers of units, and of bits, within the target of least output noise.

    Equal parts of all groups are also tried, with all weights at the same level of bits.
    """
    space, of = _space(structure, plan, batches, search, options)
    widths = space if isinstance(space, WidthSpace) else space.widths
    start = [*widths.nearest(plan.choice.removed), *[plan.level] * (len(space.parts) - len(widths.parts))]
    record = Record(search.resume, space, *of)
    if search.shared is not None:
        with search.shared() as folders:
            for folder in folders:
                record.take(Record(folder, space, *of))
    if search.baseline is not None:
        record.get("score", lambda: float(search.baseline or 0.0))
    chosen = choose(
        space, plan.parts, metric=search.metric, lower_is_better=search.lower_is_better, deadline=search.deadline,
        start=start, record=record, progress=search.progress,
    )  # fmt: skip
    best = chosen.best.choice
    narrow, bits = (best, {}) if isinstance(space, WidthSpace) else space.split(best)
    return chosen, widths.removed(narrow), bits


def _nothing(found: Dependencies) -> ConfigError:
    reasons = [str(r) for r in found.refused] or ["it has no layer whose channels are computed and read by layers"]
    problem = f"nothing can be removed: {first_few(reasons, 6)}"
    return ConfigError("compress", problem, remedy_of(found.graph, "see docs/compression.md for what blocks a layer"))


def _evidence(
    structure: Structured, found: Dependencies, groups: Sequence[Group], batches: Sequence[Any], options: PruneOptions,
    gradients: Callable[[Sequence[str]], Mapping[str, Array]] | None,
) -> Evidence:  # fmt: skip
    """Collect the statistics that the criterion needs."""
    evidence = Evidence(found.graph, structure.param, seed=options.seed)
    if options.importance == "activation":
        evidence.squares = mean_squares(structure.view(), found.graph, groups, batches)
    if options.importance == "taylor":
        if gradients is None:
            raise ConfigError(
                "importance", "taylor needs a loss to differentiate", "give loss=, or use importance='activation'"
            )
        evidence.gradients = gradients([m.param for g in groups for m in g.makers])
    if options.importance == "hessian":
        names, few = [m.param for g in groups for m in g.makers], few_batches(batches)
        seeded = itertools.product(few, range(options.seed, options.seed + _DIRECTIONS))
        evidence.directions = [structure.directional_gradients(batch, names, seed) for batch, seed in seeded]
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
        problem = difference(found, cut, masked, structure.outputs(batch))
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
