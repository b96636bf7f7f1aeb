"""What both front ends share of replacing blocks: linear fits, the space of choices, and what a block costs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.compression.costs import size_costs
from bitwright.compression.ratios import Option, Part, Space
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.simulation.float_model import Array
from bitwright.errors import ConfigError, first_few

COSTS = ("macs", "params", "bytes")
_RIDGE = 1e-6  # of the mean of the inputs' squares


class LinearFit:
    """The least-squares fit of rows ``Y`` by rows ``X`` and a bias, from sums of products.

    Args:
        width: columns of both.
    """

    def __init__(self, width: int) -> None:
        self._gram, self._cross = np.zeros((width + 1, width + 1)), np.zeros((width + 1, width))
        self._energy = 0.0

    def add(self, X: Array, Y: Array) -> None:
        """Take in rows, ``[n, width]``."""
        X = np.concatenate([X, np.ones((len(X), 1))], 1, dtype=np.float64)
        self._gram += X.T @ X
        self._cross += X.T @ Y
        self._energy += float(np.square(Y, dtype=np.float64).sum())

    def solved(self) -> tuple[Array, float]:
        """``[width, width + 1]``, the last column the bias, and the error in parts of the result's norm."""
        gram = self._gram + _RIDGE * self._gram.diagonal().mean() * np.eye(len(self._gram))
        W = np.linalg.solve(gram, self._cross)
        left = self._energy - 2 * float((W * self._cross).sum()) + float((W * (self._gram @ W)).sum())
        return W.T, float(np.sqrt(max(left, 0.0) / max(self._energy, 1e-300)))


class ReplaceSpace(Space):
    """Blocks of a model, each as it is or replaced by one of its variants.

    Args:
        graph: of the model.
        inside: block -> its operators.
        rows: block -> rows of channels that it reads in the example.
        fits: block -> its linear fit.
        variants: what a block may become.
        refused: what is no block -> why.

    Attributes:
        weights: block -> ``[width, width + 1]`` of its linear variant.
        errors: block -> error of its linear variant, in parts of its result.
        refused: as given.
    """

    def __init__(
        self,
        graph: Graph,
        inside: Mapping[str, Sequence[Op]],
        rows: Mapping[str, int],
        fits: Mapping[str, LinearFit],
        variants: Sequence[str],
        refused: Mapping[str, str],
    ) -> None:
        solved = {name: fit.solved() for name, fit in fits.items()}
        self.weights = {name: W for name, (W, _) in solved.items()}
        self.errors = {name: error for name, (_, error) in solved.items()}
        self.refused = refused
        whole, saved = size_costs(graph), {name: _saved(graph, ops) for name, ops in inside.items()}
        self.parts = [
            _part(name, held, rows[name], len(self.weights[name]), self.errors[name], variants)
            for name, held in saved.items()
        ]
        self.fixed = {cost: whole[cost] - sum(s[cost] for s in saved.values()) for cost in COSTS}

    def picked(self, choice: Sequence[int]) -> dict[str, str]:
        """Block -> the variant in its place; empty where it stays."""
        return {p.name: p.options[k].what or "" for p, k in zip(self.parts, choice, strict=True)}

    @abstractmethod
    def finished(self, choice: Sequence[int]) -> dict[str, Any]:
        """Make the choice, which is applied, the user's model; returns its plan, empty where none is needed."""


def no_block(refused: Mapping[str, str], otherwise: str) -> ConfigError:
    """The error of a model without blocks: the reasons, or what is said where there is none."""
    reasons = first_few([f"{name}: {why}" for name, why in refused.items()], 6) or otherwise
    problem = f"the model has no block that can be replaced: {reasons}"
    return ConfigError("replace_blocks", problem, "prune widths instead")


def _saved(graph: Graph, inside: Sequence[Op]) -> dict[str, float]:
    """Costs of operators, and of the parameters that they alone read."""
    gone = {op.name for op in inside}
    left = [op for op in graph.ops if op.name not in gone]
    read = {value for op in left for _, value in op.sources()}
    values = {n: v for n, v in graph.values.items() if v.param is None or n in read}
    whole, rest = size_costs(graph), size_costs(Graph(left, values, graph.inputs, graph.outputs))
    return {cost: whole[cost] - rest[cost] for cost in COSTS}


def _part(name: str, saved: Mapping[str, float], rows: int, width: int, error: float, variants: Sequence[str]) -> Part:
    """The variants of a block that are cheaper than it.

    Args:
        name: of the block.
        saved: costs that go with it.
        rows, width: of what it reads in the example.
        error: of its linear fit.
        variants: what it may become.
    """
    size = width * (width + 1)
    linear = {"macs": float(rows * width**2), "params": float(size), "bytes": 4.0 * size}
    free = dict.fromkeys(COSTS, 0.0)
    options = [Option("as it was", dict(saved), 0.0)]
    for variant in variants:
        costs = linear if variant == "linear" else free
        if all(costs[n] < saved[n] for n in ("macs", "params")):
            ratio = costs["macs"] / max(saved["macs"], 1.0)
            options.append(Option(variant, costs, error if variant == "linear" else 1.0, ratio, variant))
    return Part(name, tuple(options))
