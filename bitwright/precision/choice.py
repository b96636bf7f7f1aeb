"""The exact choice of a candidate per group, and the additive noise model that it uses.

:class:`Knapsack`: noise and costs of the groups add up, and pairs of groups may add something together. This is a
multiple-choice knapsack, solved as an integer program (HiGHS): a variable for each two candidates of a pair, whose sums are the
variables of the groups. A front is found by solving for the least cost under a row of bounds on the noise.

:class:`Correction`: errors of groups that were added up miss what they do to each other. After each measurement, factors per
group and per candidate are fitted, in logarithms and with a penalty that keeps them near 1, so that the sum gives what was
seen. One more factor, of all, is nearly free: rounding that makes up for the errors of earlier layers lowers the noise of every
choice. What two groups do together is a term of its own, where it was found.

:class:`Interactions`: the noise of parts is estimated to first order, so that what two errors do only together (a product of
both) is not in it. Where a point is much louder than its parts, measurements find it: groups are lowered one after the other
until the noise is there, by bisection; the last one that was needed is one of the two, and the same with it lowered from the
start finds the other (as QuickXplain does for conflicts; Junker 2004).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import ConfigError

if TYPE_CHECKING:
    from bitwright.precision.candidates import Candidate

Floats = NDArray[np.float64]
Choice = tuple[int, ...]
P = TypeVar("P")
_TIGHT = 1e-7  # relative; the solver's own tolerance is 1e-6 of a bound scaled to 1
_NOTHING = 1e-9  # of the room of a row; below what the solver can tell from zero
_OUT_OF_TIME = 1  # status of scipy's milp
_SECONDS = 20.0  # for one program: the best answer by then is taken


@dataclass(frozen=True)
class Pair:
    """Additional cost or noise of a pair of groups.

    Attributes:
        first, second: places of the groups.
        extra: ``[candidates, candidates]``, what is added where they have these candidates; >= 0.
    """

    first: int
    second: int
    extra: Floats


@dataclass(frozen=True)
class Cost:
    """One cost of every choice.

    Attributes:
        name: ``weight_bytes``, ``bit_ops``, ``activation_bytes``, ``memory``, or ``ms``.
        unit: for tables.
        table: ``[rows, groups, candidates]``, what a group adds to each row at each candidate.
        fixed: ``[rows]``, what does not depend on the choice.
        pairs: what pairs of groups add to every row.
    """

    name: str
    unit: str
    table: Floats
    fixed: Floats
    pairs: tuple[Pair, ...] = ()

    def of(self, choice: Sequence[int]) -> float:
        """The cost of ``choice``, a candidate per group."""
        rows = self.table[:, np.arange(len(choice)), list(choice)].sum(1) + self.fixed
        return float(rows.max()) + self.together(choice)

    def together(self, choice: Sequence[int]) -> float:
        """The sum that the pairs add at ``choice``."""
        return float(sum(pair.extra[choice[pair.first], choice[pair.second]] for pair in self.pairs))

    @staticmethod
    def noise(table: Floats, pairs: tuple[Pair, ...] = ()) -> Cost:
        """Noise over signal of the outputs, ``[groups, candidates]``, as a cost to be bounded or minimised."""
        return Cost("noise", "", table[None], np.zeros(1), pairs)


class Knapsack:
    """The choices of one search.

    Args:
        allowed: candidates of each group.
        costs: by name.
        ties: groups whose candidates must be of one kind.
        kinds: of each candidate: equal where tied groups may have them together.
    """

    def __init__(
        self,
        allowed: Sequence[Sequence[int]],
        costs: Mapping[str, Cost],
        ties: Sequence[Sequence[int]] = (),
        kinds: Sequence[Hashable] = (),
    ) -> None:
        self.allowed, self.costs, self._ties, self._kinds = [list(a) for a in allowed], costs, ties, kinds
        self._at = [(g, c) for g, candidates in enumerate(self.allowed) for c in candidates]

    def cheapest(self, noise: Cost, most: float, cost: str, bounds: Mapping[str, float]) -> Choice | None:
        """The choice of least ``cost`` with noise of at most ``most``; among equals, that of the least noise.

        Args:
            noise: as :meth:`bitwright.precision.costs.Cost.noise` makes it.
            bounds: most of other costs.
        """
        found = self._solve(self.costs[cost], [(noise, most), *self._rows(bounds)])
        if found is None:
            return None
        quiet = self.quietest(noise, {**bounds, cost: self.costs[cost].of(found)})
        return found if quiet is None or noise.of(quiet) > noise.of(found) else quiet

    def quietest(self, noise: Cost, bounds: Mapping[str, float]) -> Choice | None:
        """The choice of least noise within ``bounds`` (cost -> most)."""
        return self._solve(noise, self._rows(bounds))

    def least(self, cost: str, bounds: Mapping[str, float]) -> Choice | None:
        """The choice of least ``cost`` within bounds of others; without any there is always one."""
        return self._solve(self.costs[cost], self._rows(bounds))

    def _rows(self, bounds: Mapping[str, float]) -> list[tuple[Cost, float]]:
        return [(self.costs[name], most * (1 + _TIGHT)) for name, most in bounds.items()]

    def _solve(self, cost: Cost, rows: Sequence[tuple[Cost, float]]) -> Choice | None:
        """Minimize the cost (the largest of its rows) under ``rows``: (another one, its most)."""
        if not self._at:
            return ()
        try:
            from scipy import optimize, sparse
        except ModuleNotFoundError as error:
            problem = "the package scipy, which solves the choice, is not installed"
            raise ConfigError("mixed_precision", problem, "pip install 'bitwright[analysis]'") from error
        pairs = _Pairs(self._at, [cost, *(row for row, _ in rows)])
        n, peak = len(self._at), len(cost.fixed) > 1
        program = _Program([g for g, _ in self._at], len(pairs.at))
        for row, most in rows:
            program.add(pairs.columns(row, self._pick(row.table)), most - row.fixed)
        for equal in (*self._together(), *pairs.links()):
            program.add_equal(equal)
        picked = pairs.columns(cost, self._pick(cost.table))
        objective = picked[0]
        if peak:
            program.add_peak(picked, cost.fixed)
            objective = np.append(np.zeros_like(objective), 1.0)
        matrix, low, high = program.rows()
        found = optimize.milp(
            objective / max(float(np.abs(objective).max()), 1e-300),
            integrality=np.append(np.ones(n), np.zeros(len(pairs.at) + peak)),
            bounds=optimize.Bounds(np.zeros(len(program.top)), program.top),
            constraints=optimize.LinearConstraint(sparse.csr_matrix(matrix), low, high),
            options={"mip_rel_gap": 0.0, "time_limit": _SECONDS},
        )
        if found.x is None and found.status == _OUT_OF_TIME:
            raise ConfigError(
                "mixed_precision",
                f"no choice for {n} pairs of group and candidate was found in {_SECONDS:.0f} s",
                "pass fewer candidates, or a budget that leaves more room",
            )
        if found.x is None:
            return None
        weight = dict(zip(self._at, found.x, strict=False))
        return tuple(max(candidates, key=lambda c: weight[g, c]) for g, candidates in enumerate(self.allowed))

    def _together(self) -> list[Floats]:
        """Rows that are zero where tied groups have candidates of one kind."""
        rows = []
        for first, *others in self._ties:
            for other, kind in itertools.product(others, dict.fromkeys(self._kinds[c] for c in self.allowed[first])):
                sign = {first: 1.0, other: -1.0}
                rows.append([sign.get(g, 0.0) if self._kinds[c] == kind else 0.0 for g, c in self._at])
        return [np.array(row) for row in rows]

    def _pick(self, table: Floats) -> Floats:
        return np.stack([table[:, g, c] for g, c in self._at], 1)

    def neighbours(self, choice: Choice, noise: Cost) -> list[Choice]:
        """Choices with one group at another candidate.

        Where groups are tied, one of them moves alone between candidates of one kind; to another kind they all go, each to the
        candidate of that kind with the least noise or each to the one with the most.

        Args:
            choice: a candidate per group.
            noise: of each group and candidate, estimated.
        """
        table = noise.table[0]
        tied = {g for tie in self._ties for g in tie}
        alone = (
            {g: c}
            for g, c in self._at
            if c != choice[g] and (g not in tied or self._kinds[c] == self._kinds[choice[g]])
        )
        found = (*alone, *(step for tie in self._ties for step in self._steps(tie, choice, table)))
        return [tuple(step.get(g, c) for g, c in enumerate(choice)) for step in found]

    def _steps(self, tie: Sequence[int], choice: Choice, table: Floats) -> Iterable[dict[int, int]]:
        """Candidates of the groups of a tie at each other kind that all of them may have."""
        kinds = dict.fromkeys(self._kinds[c] for c in self.allowed[tie[0]])
        for kind in kinds:
            of_kind = {g: [c for c in self.allowed[g] if self._kinds[c] == kind] for g in tie}
            if kind != self._kinds[choice[tie[0]]] and all(of_kind.values()):
                for end in (min, max):
                    yield {g: end(found, key=table[g].__getitem__) for g, found in of_kind.items()}

    def front(self, noise: Cost, cost: str, bounds: Mapping[str, float], points: int) -> list[Choice]:
        """Choices of least ``cost`` for bounds on the noise from the quietest to the noisiest, without repetition."""
        quiet = self.quietest(noise, bounds)
        if quiet is None:
            return []
        first = noise.of(quiet)
        together = sum(float(pair.extra.max()) for pair in noise.pairs)
        most = (
            float(noise.table.max(2).sum()) + together + 1 if noise.table.size else math.inf
        )  # more than any choice has
        loud = self.cheapest(noise, most, cost, bounds)
        last = max(first, noise.of(loud)) if loud is not None else first
        floor = max(first, last * 1e-9, 1e-300)
        found: dict[Choice, None] = {}
        for most in np.geomspace(floor * (1 + 1e-9), max(last, floor) * (1 + 1e-9), points):
            choice = self.cheapest(noise, float(most), cost, bounds)
            if choice is not None:
                found[choice] = None
        return undominated(found, self.costs[cost].of, noise.of)[::-1]


class _Pairs:
    """Columns of an integer program for two candidates of two groups that add something together.

    The columns of a pair add up to the columns of either group, which makes each the product of two of these: a program of
    pairs along a chain is as tight as one without pairs.
    """

    def __init__(self, at: Sequence[tuple[int, int]], costs: Sequence[Cost]) -> None:
        self._at = {key: i for i, key in enumerate(at)}
        groups: dict[int, list[int]] = {}
        for group, candidate in at:
            groups.setdefault(group, []).append(candidate)
        self._groups = groups
        self._pairs = list(dict.fromkeys((p.first, p.second) for cost in costs for p in cost.pairs))
        self.at = [(a, b, i, j) for a, b in self._pairs for i in groups[a] for j in groups[b]]

    def columns(self, cost: Cost, picked: Floats) -> Floats:
        """Extend ``picked`` by the terms of the pairs."""
        extra: dict[tuple[int, int], Floats] = {}
        for pair in cost.pairs:
            key = (pair.first, pair.second)
            extra[key] = extra[key] + pair.extra if key in extra else pair.extra
        row = [float(extra[a, b][i, j]) if (a, b) in extra else 0.0 for a, b, i, j in self.at]
        return np.hstack([picked, np.tile(row, (len(picked), 1))]) if self.at else picked

    def links(self) -> Iterable[Floats]:
        """Rows that are zero where columns of pairs add up to those of the groups."""
        n = len(self._at)
        sides = [(pair, side, group) for pair in self._pairs for side, group in zip((2, 3), pair, strict=True)]
        for pair, side, group in sides:
            for candidate in self._groups[group]:
                row = np.zeros(n + len(self.at))
                row[self._at[group, candidate]] = -1.0
                row[n:] = [column[:2] == pair and column[side] == candidate for column in self.at]
                yield row


class _Program:
    """Rows of an integer program, each scaled to its own room, so that the solver's tolerance is a share of it."""

    def __init__(self, groups: Sequence[int], pairs: int) -> None:
        n = len(groups) + pairs
        one = np.zeros((max(groups) + 1, n))
        one[list(groups), np.arange(len(groups))] = 1.0
        self._rows, self._low, self._high = [one], [np.ones(len(one))], [np.ones(len(one))]
        self.top = np.ones(n)

    def add(self, picked: Floats, room: Floats) -> None:
        """Add rows with upper bounds; entries that exceed the bound alone are excluded."""
        self.top[: picked.shape[1]][(picked > room[:, None]).any(0)] = 0.0
        size = np.maximum(room, 1e-300)[:, None]
        scaled = np.where(self.top > 0, picked / size, 0.0)
        self._rows.append(np.where(scaled < _NOTHING, 0.0, scaled))
        self._low.append(np.full(len(room), -np.inf))
        self._high.append(np.where(room >= 0, 1.0, -1.0))

    def add_equal(self, row: Floats) -> None:
        """A row that adds up to zero."""
        self._rows.append(np.pad(row, (0, len(self.top) - len(row)))[None])
        self._low.append(np.zeros(1))
        self._high.append(np.zeros(1))

    def add_peak(self, picked: Floats, fixed: Floats) -> None:
        """One more variable, at least as large as every row."""
        scale = max(float((picked.max(1) + fixed).max()), 1e-300)
        self._rows = [np.hstack([rows, np.zeros((len(rows), 1))]) for rows in self._rows]
        self._rows.append(np.hstack([picked / scale, -np.ones((len(picked), 1))]))
        self._low.append(np.full(len(picked), -np.inf))
        self._high.append(-fixed / scale)
        self.top = np.append(self.top, np.inf)

    def rows(self) -> tuple[Floats, Floats, Floats]:
        """Matrix and bounds."""
        return np.vstack(self._rows), np.concatenate(self._low), np.concatenate(self._high)


def undominated(points: Iterable[P], cost: Callable[[P], float], loss: Callable[[P], Any]) -> list[P]:
    """The Pareto front of cost and loss, cheapest first."""
    kept: list[P] = []
    for point in sorted(points, key=lambda p: (cost(p), loss(p))):
        if not kept or loss(point) < loss(kept[-1]):
            kept.append(point)
    return kept


_STIFF = 0.3  # how much a factor of e costs, in units of an error of e in one measurement
_FREE = 0.03  # the same for the factor of all
_ROUNDS = 30
_TINY = 1e-30


@dataclass
class Correction:
    """Estimates and measurements.

    Attributes:
        estimate: ``[groups, candidates]``, noise that each makes alone.
        seen: (choice, noise measured).
        pairs: noise that two groups make together.
        coarser: for each candidate those that cannot have less noise than it; empty where nothing is known of them.
    """

    estimate: Floats
    seen: list[tuple[Choice, float]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    coarser: Sequence[Sequence[int]] = ()

    def see(self, choice: Choice, noise: float) -> None:
        """Add a measurement and refit the factors."""
        if np.isfinite(noise):
            self.seen.append((choice, max(noise, _TINY)))

    @property
    def plain(self) -> Cost:
        """The estimates without factors."""
        return Cost.noise(self._ordered(self.estimate), tuple(self.pairs))

    def _ordered(self, table: Floats) -> Floats:
        """``table`` with at least the noise of a candidate at those that are coarser.

        Factors follow what was seen: without this, a candidate that no point had yet would look better than a finer one that was
        found to be loud.
        """
        found = table.copy()
        for finer, those in enumerate(self.coarser):
            for c in those:
                found[:, c] = np.maximum(found[:, c], table[:, finer])
        return found

    def noise(self) -> Cost:
        """The estimates times the factors that explain the measurements best."""
        base = np.log(np.maximum(self.estimate, _TINY))
        groups, candidates = base.shape
        theta = np.zeros(groups + candidates + 1)
        stiff = np.append(np.full(groups + candidates, _STIFF**2), _FREE**2)
        if not self.seen:
            return Cost.noise(self._ordered(np.exp(base)), tuple(self.pairs))
        at = np.array([choice for choice, _ in self.seen])
        wanted = np.log([noise for _, noise in self.seen])
        together = np.array([self.plain.together(choice) for choice, _ in self.seen])
        for _ in range(_ROUNDS):
            jacobian, found = self._slopes(base, theta, at, together)
            left = wanted - found
            normal = jacobian.T @ jacobian + np.diag(stiff)
            step = np.linalg.solve(normal, jacobian.T @ left - stiff * theta)
            theta += step / max(1.0, float(np.abs(step).max()))
            if np.abs(step).max() < 1e-6:
                break
        table = np.exp(base + theta[:groups, None] + theta[None, groups:-1] + theta[-1])
        return Cost.noise(
            self._ordered(table), tuple(replace(p, extra=p.extra * np.exp(theta[-1])) for p in self.pairs)
        )

    @staticmethod
    def _slopes(base: Floats, theta: Floats, at: NDArray[np.int64], together: Floats) -> tuple[Floats, Floats]:
        """Derivatives of the logarithm of each sum by the logarithms of the factors, and the logarithms themselves."""
        groups, candidates = base.shape
        which = np.arange(groups)
        logs = base[which, at] + theta[:groups] + theta[groups:-1][at] + theta[-1]
        pairs = np.log(np.maximum(together, _TINY)) + theta[-1]
        largest = np.maximum(logs.max(1), pairs)[:, None]
        parts = np.exp(logs - largest)
        whole = parts.sum(1) + np.exp(pairs - largest[:, 0])
        share: Floats = parts / whole[:, None]
        by_candidate = np.stack([(share * (at == c)).sum(1) for c in range(candidates)], 1)
        found = largest[:, 0] + np.log(whole)
        return np.hstack([share, by_candidate, np.ones((len(at), 1))]), found


LOUD = 2.0  # times the noise that was expected, from which on a point is looked into
_HALF = 0.5  # share of the noise in excess that has to be there
_MOST = 2  # times per search


@dataclass
class Interactions:
    """The search for interactions between groups.

    Attributes:
        correction: the estimates; what is found is added to them.
        measure: noise of a choice, with the weights that were estimated.
        base: the candidate with the most bits for every group.
        units: groups that have to be lowered together.
        candidates: their bits say which of them are at least as coarse as the ones that were measured.
        looked: how often something was looked for.
    """

    correction: Correction
    measure: Callable[[Choice], float]
    base: Choice
    units: Sequence[Sequence[int]]
    candidates: Sequence[Candidate]
    looked: int = 0
    _known: dict[Choice, float] = field(default_factory=dict, repr=False)

    def worth(self, expected: float, noise: float) -> bool:
        """Whether the measured noise of a point exceeds the estimate so much that pairs are searched for."""
        return len(self.correction.seen) > 1 and noise > LOUD * expected and self.looked < _MOST

    def find(self, choice: Choice) -> tuple[int, ...]:
        """Find the groups whose interaction makes ``choice`` noisy, and correct the estimates; empty where many interact."""
        self.looked += 1
        low = [unit for unit in self.units if any(choice[g] != self.base[g] for g in unit)]
        whole = self._excess(choice, low)
        if whole < (LOUD - 1) * self.correction.plain.of(choice):
            return ()  # of the rounding of this point, not of its precisions
        enough = whole * _HALF
        last = self._first(choice, low, [], enough)
        partners = low[:last]
        kept = [low[last]]
        if self._excess(choice, kept) >= enough:
            group, noise = self._of(choice, low[last]), self._excess(choice, kept)
            for c in self._coarser(choice[group], self.base[group]):  # the estimate of one group was too low
                self.correction.estimate[group, c] += noise
            return (group,)
        other = self._first(choice, partners, kept, enough)
        found = self._excess(choice, [partners[other], *kept])
        if found < enough:
            return ()  # more than two of them
        return self._together(choice, partners[other], low[last], found)

    def _first(
        self, choice: Choice, units: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], enough: float
    ) -> int:
        """Index of the first unit that, with those before it and ``kept``, causes the excess noise."""
        low, high = -1, len(units) - 1  # with all of them it is
        while high - low > 1:
            middle = (low + high) // 2
            there = self._excess(choice, [*units[: middle + 1], *kept]) >= enough
            low, high = (low, middle) if there else (middle, high)
        return high

    def _excess(self, choice: Choice, units: Sequence[Sequence[int]]) -> float:
        """Noise beyond the estimates with these units of ``choice`` lowered."""
        mixed = list(self.base)
        for unit in units:
            for g in unit:
                mixed[g] = choice[g]
        wanted = tuple(mixed)
        if wanted not in self._known:
            self._known[wanted] = self.measure(wanted)
        return self._known[wanted] - self.correction.plain.of(wanted)

    def _together(self, choice: Choice, one: Sequence[int], other: Sequence[int], noise: float) -> tuple[int, ...]:
        """Record the interaction of two groups, also for coarser candidates."""
        first, second = self._of(choice, one), self._of(choice, other)
        size = len(self.candidates)
        extra = np.zeros((size, size))
        for i in self._coarser(choice[first], self.base[first]):
            for j in self._coarser(choice[second], self.base[second]):
                extra[i, j] = noise
        self.correction.pairs.append(Pair(first, second, extra))
        return first, second

    def _of(self, choice: Choice, unit: Sequence[int]) -> int:
        """The group that represents a unit."""
        return next(g for g in unit if choice[g] != self.base[g])

    def _coarser(self, candidate: int, base: int) -> list[int]:
        """Candidates of no more bits than ``candidate`` where it has fewer than ``base``."""
        bits, most = self.candidates[candidate].bits, self.candidates[base].bits
        cut = [k for k in (0, 1) if bits[k] < most[k]]
        return [
            c
            for c, other in enumerate(self.candidates)
            if all(other.bits[k] <= bits[k] for k in cut) and (cut or c == candidate)
        ]


def told(groups: Sequence[str], found: Sequence[int]) -> str:
    """One sentence on the pairs that were found, for the notes."""
    if len(found) == 1:
        return f"what {groups[found[0]]} costs was measured: its estimate was far too low"
    return f"{groups[found[0]]} and {groups[found[1]]} cost far more together than alone; what they do was measured"
