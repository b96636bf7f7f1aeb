"""The choice of a candidate per group, solved exactly: a multiple-choice knapsack as an integer program (HiGHS).

Noise and costs of the groups add up, and pairs of groups may add something together: a variable for each two of their
candidates, whose sums are the variables of the groups. A front is found by solving for the least cost under a row of bounds on
the noise.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import ConfigError
from bitwright.mixed.choosing.costs import Cost

Floats = NDArray[np.float64]
Choice = tuple[int, ...]
_TIGHT = 1e-7  # relative; the solver's own tolerance is 1e-6 of a bound scaled to 1
_NOTHING = 1e-9  # of the room of a row; below what the solver can tell from zero
_OUT_OF_TIME = 1  # status of scipy's milp
_SECONDS = 20.0  # for one program: the best answer by then is taken


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
            noise: as :meth:`bitwright.mixed.choosing.costs.Cost.noise` makes it.
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
        optimize = _scipy()
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
        found = optimize.milp(
            objective / max(float(np.abs(objective).max()), 1e-300),
            integrality=np.append(np.ones(n), np.zeros(len(pairs.at) + peak)),
            bounds=optimize.Bounds(np.zeros(len(program.top)), program.top),
            constraints=optimize.LinearConstraint(*program.rows()),
            options={"mip_rel_gap": 0.0, "time_limit": _SECONDS},
        )
        if found.x is None and found.status == _OUT_OF_TIME:
            raise ConfigError(
                "mixed_precision",
                f"no choice for {n} pairs of group and candidate was found in {_SECONDS:.0f} s",
                "pass fewer candidates, or a budget that leaves more room",
            )
        return None if found.x is None else self._read(found.x)

    def _together(self) -> list[Floats]:
        """Rows that are zero where tied groups have candidates of one kind."""
        pairs = [(first, other) for first, *others in self._ties for other in others]
        return [
            self._alike(first, other, kind)
            for first, other in pairs
            for kind in dict.fromkeys(self._kinds[c] for c in self.allowed[first])
        ]

    def _alike(self, first: int, other: int, kind: Any) -> Floats:
        """A row that is zero where both groups, or neither, have a candidate of ``kind``."""
        sign = {first: 1.0, other: -1.0}
        return np.array([sign.get(g, 0.0) if self._kinds[c] == kind else 0.0 for g, c in self._at])

    def _read(self, x: Floats) -> Choice:
        choice, best = [a[0] for a in self.allowed], [-1.0] * len(self.allowed)
        for (g, c), value in zip(self._at, x, strict=False):
            if value > best[g]:
                best[g], choice[g] = float(value), c
        return tuple(choice)

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
        loud = self.cheapest(noise, _most(noise), cost, bounds)
        last = max(first, noise.of(loud)) if loud is not None else first
        floor = max(first, last * 1e-9, 1e-300)
        found: dict[Choice, None] = {}
        for most in np.geomspace(floor * (1 + 1e-9), max(last, floor) * (1 + 1e-9), points):
            choice = self.cheapest(noise, float(most), cost, bounds)
            if choice is not None:
                found[choice] = None
        return undominated(list(found), noise, self.costs[cost])


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
        """``picked`` with what each two candidates add."""
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
        """Each row adds up to its room at most; what is more than that alone is left out."""
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

    def rows(self) -> tuple[Any, Floats, Floats]:
        """Matrix and bounds."""
        from scipy.sparse import csr_matrix

        return csr_matrix(np.vstack(self._rows)), np.concatenate(self._low), np.concatenate(self._high)


def _most(noise: Cost) -> float:
    """More than any choice has."""
    together = sum(float(pair.extra.max()) for pair in noise.pairs)
    return float(noise.table.max(2).sum()) + together + 1 if noise.table.size else math.inf


def undominated(choices: Sequence[Choice], noise: Cost, cost: Cost) -> list[Choice]:
    """Those that no other one is better than in both, the quietest first."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (cost.of(c), noise.of(c))):
        if not kept or noise.of(choice) < noise.of(kept[-1]):
            kept.append(choice)
    return kept[::-1]


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ModuleNotFoundError as error:
        raise ConfigError(
            "mixed_precision", "the package scipy, which solves the choice, is not installed", "pip install 'bitwright[analysis]'"
        ) from error  # fmt: skip
    return optimize
