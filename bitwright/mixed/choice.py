"""The choice of a candidate per group, solved exactly: a multiple-choice knapsack as an integer program (HiGHS).

Noise and costs of the groups add up. A front is found by solving for the least cost under a row of bounds on the noise.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import ConfigError
from bitwright.mixed.costs import Cost

Floats = NDArray[np.float64]
Choice = tuple[int, ...]
_TIGHT = 1e-7  # relative; the solver's own tolerance is 1e-6 of a bound scaled to 1
_NOTHING = 1e-9  # of the room of a row; below what the solver can tell from zero
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

    def cheapest(self, noise: Floats, most: float, cost: str, bounds: Mapping[str, float]) -> Choice | None:
        """The choice of least ``cost`` with noise of at most ``most``; among equals, that of the least noise.

        Args:
            noise: ``[groups, candidates]``.
            bounds: most of other costs.
        """
        rows = [(noise[None], np.zeros(1), most), *self._rows(bounds)]
        found = self._solve(self.costs[cost], np.zeros_like(noise), rows)
        if found is None:
            return None
        quiet = self.quietest(noise, {**bounds, cost: self.costs[cost].of(found)})
        return found if quiet is None or total(noise, quiet) > total(noise, found) else quiet

    def quietest(self, noise: Floats, bounds: Mapping[str, float]) -> Choice | None:
        """The choice of least noise within ``bounds`` (cost -> most)."""
        return self._solve(None, noise, self._rows(bounds))

    def least(self, cost: str) -> Choice:
        """The choice of least ``cost``."""
        found = self._solve(self.costs[cost], np.zeros(self.costs[cost].table.shape[1:]), [])
        assert found is not None  # every group has a candidate
        return found

    def _rows(self, bounds: Mapping[str, float]) -> list[tuple[Floats, Floats, float]]:
        return [(self.costs[n].table, self.costs[n].fixed, most * (1 + _TIGHT)) for n, most in bounds.items()]

    def _solve(
        self, cost: Cost | None, linear: Floats, rows: Sequence[tuple[Floats, Floats, float]]
    ) -> Choice | None:
        """Minimize the cost (the largest of its rows) and ``linear`` under ``rows``: (table, fixed, most)."""
        if not self._at:
            return ()
        optimize = _scipy()
        n, peak = len(self._at), cost is not None and len(cost.fixed) > 1
        objective = np.array([linear[g, c] for g, c in self._at])
        if cost is not None and not peak:
            objective = objective + self._pick(cost.table)[0]
        program = _Program(n, [g for g, _ in self._at])
        for table, fixed, most in rows:
            program.add(self._pick(table), most - fixed)
        for row in self._together():
            program.add_equal(row)
        if peak:
            assert cost is not None
            program.add_peak(self._pick(cost.table), cost.fixed)
            objective = np.append(objective, 1.0)
        found = optimize.milp(
            objective / max(float(np.abs(objective).max()), 1e-300),
            integrality=np.append(np.ones(n), [0.0] if peak else []),
            bounds=optimize.Bounds(np.zeros(n + peak), program.top),
            constraints=optimize.LinearConstraint(*program.rows()),
            options={"mip_rel_gap": 0.0, "time_limit": _SECONDS},
        )
        return None if found.x is None else self._read(found.x)

    def _together(self) -> list[Floats]:
        """Rows that are zero where tied groups have candidates of one kind."""
        rows = []
        for first, *others in self._ties:
            for other in others:
                for kind in dict.fromkeys(self._kinds[c] for c in self.allowed[first]):
                    sign = {first: 1.0, other: -1.0}
                    rows.append(
                        np.array([sign.get(g, 0.0) if self._kinds[c] == kind else 0.0 for g, c in self._at])
                    )
        return rows

    def _read(self, x: Floats) -> Choice:
        choice, best = [a[0] for a in self.allowed], [-1.0] * len(self.allowed)
        for (g, c), value in zip(self._at, x, strict=False):
            if value > best[g]:
                best[g], choice[g] = float(value), c
        return tuple(choice)

    def _pick(self, table: Floats) -> Floats:
        return np.stack([table[:, g, c] for g, c in self._at], 1)

    def front(self, noise: Floats, cost: str, bounds: Mapping[str, float], points: int) -> list[Choice]:
        """Choices of least ``cost`` for bounds on the noise from the quietest to the noisiest, without repetition."""
        quiet = self.quietest(noise, bounds)
        if quiet is None:
            return []
        first = total(noise, quiet)
        loud = self.cheapest(
            noise, float("inf") if not self._at else float(noise.max() * len(noise) + 1), cost, bounds
        )
        last = max(first, total(noise, loud)) if loud is not None else first
        floor = max(first, last * 1e-9, 1e-300)
        found: dict[Choice, None] = {}
        for most in np.geomspace(floor * (1 + 1e-9), max(last, floor) * (1 + 1e-9), points):
            choice = self.cheapest(noise, float(most), cost, bounds)
            if choice is not None:
                found[choice] = None
        return undominated(list(found), noise, self.costs[cost])


class _Program:
    """Rows of an integer program, each scaled to its own room, so that the solver's tolerance is a share of it."""

    def __init__(self, n: int, groups: Sequence[int]) -> None:
        one = np.zeros((max(groups) + 1, n))
        one[list(groups), np.arange(n)] = 1.0
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
        self._rows.append(row[None])
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


def total(noise: Floats, choice: Sequence[int]) -> float:
    """The noise of ``choice``, as if no two errors had anything in common."""
    return float(noise[np.arange(len(choice)), list(choice)].sum())


def undominated(choices: Sequence[Choice], noise: Floats, cost: Cost) -> list[Choice]:
    """Those that no other one is better than in both, the quietest first."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (cost.of(c), total(noise, c))):
        if not kept or total(noise, choice) < total(noise, kept[-1]):
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
