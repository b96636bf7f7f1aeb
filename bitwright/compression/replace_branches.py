"""Branches of an ONNX model that can be replaced: those that a residual sum adds to what they read."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.compression.costs import size_costs
from bitwright.compression.replace_space import COSTS, ReplaceSpace, part_of
from bitwright.compression.widths import few_batches, output_noise
from bitwright.core.graph.graph import Graph
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError, first_few
from bitwright.methods.front_end import front_end_of

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


class BranchSpace(ReplaceSpace):
    """Branches of an ONNX model.

    Args:
        blocks: of the model, as :class:`bitwright.onnx.depth.OnnxBlocks` finds them.
        names: those that may be replaced.
        batches: that linear layers are fitted to.
        variants: what a branch may become.
    """

    def __init__(self, blocks: Any, names: Sequence[str], batches: Sequence[Any], variants: Sequence[str]) -> None:
        self._blocks, self._batches, self.refused = blocks, few_batches(batches), dict(blocks.refused)
        self._wanted = [blocks.outputs(batch) for batch in self._batches]
        fits = _fits(blocks, names, batches)
        self.errors = {name: error for name, (_, error) in fits.items()}
        self._weights = {name: W for name, (W, _) in fits.items()}
        whole, saved = size_costs(blocks.graph()), {name: _saved(blocks, name) for name in names}
        self.parts = [
            part_of(name, saved[name], _rows(blocks, name), len(self._weights[name]), self.errors[name], variants)
            for name in names
        ]
        self.fixed = {cost: whole[cost] - sum(s[cost] for s in saved.values()) for cost in COSTS}

    def _put(self, choice: Sequence[int]) -> dict[str, Any]:
        """Branch -> what is added in its place: see :meth:`_instead`."""
        return {name: self._instead(name, variant) for name, variant in self.picked(choice).items() if variant}

    def _instead(self, name: str, variant: str) -> Array | str | None:
        """A matrix, the source itself (``"identity"``), or ``None`` for nothing."""
        if variant == "linear":
            return self._weights[name]
        return variant if variant == "identity" else None

    def apply(self, choice: Sequence[int]) -> Undo:
        """Run a copy with the variants."""
        undo: Undo = self._blocks.replaced(self._put(choice))
        return undo

    def noise(self) -> float:
        """Noise-to-signal power ratio of the outputs, mean over batches and outputs."""
        return output_noise(self._blocks, self._batches, self._wanted) or 0.0

    def runnable(self) -> Any:
        """A session."""
        return self._blocks.session()

    def finished(self, choice: Sequence[int]) -> dict[str, Any]:
        """The model is an ordinary one, which needs no plan."""
        self._blocks.put(self._put(choice))
        return {}


def _fits(blocks: Any, names: Sequence[str], batches: Sequence[Any]) -> dict[str, tuple[Array, float]]:
    ends = {name: blocks.ends(name) for name in names}
    fits: dict[str, LinearFit] = {}
    for batch in batches:
        values = blocks.values(batch, [value for pair in ends.values() for value in pair])
        for name, pair in ends.items():
            X, Y = (_as_rows(values[value], blocks.channel_axis(name)) for value in pair)
            fits.setdefault(name, LinearFit(X.shape[1])).add(X, Y)
    return {name: fit.solved() for name, fit in fits.items()}


def _as_rows(x: Array, axis: int) -> Array:
    x = np.moveaxis(x, axis, -1)
    return x.reshape(-1, x.shape[-1])


def _rows(blocks: Any, name: str) -> int:
    shape = blocks.graph().values[blocks.ends(name)[0]].shape
    return int(np.prod(shape)) // int(shape[blocks.channel_axis(name)])


def _saved(blocks: Any, name: str) -> Mapping[str, float]:
    """Costs of the operators of a branch, and of the parameters that they alone read."""
    graph: Graph = blocks.graph()
    gone = blocks.gone([name])
    left = [op for op in graph.ops if op.name not in gone]
    read = {value for op in left for _, value in op.sources()}
    values = {n: v for n, v in graph.values.items() if v.param is None or n in read}
    whole, rest = size_costs(graph), size_costs(Graph(left, values, graph.inputs, graph.outputs))
    return {cost: whole[cost] - rest[cost] for cost in COSTS}


def branch_space(
    model: Any, batches: Sequence[Any], patterns: Sequence[str], variants: Sequence[str], providers: Any
) -> BranchSpace:
    """The branches of a loaded ONNX model, with their linear fits; of those inside each other the innermost.

    Raises:
        ConfigError: there is none.
    """
    blocks = front_end_of(model).blocks(model, batches[0], providers)
    named = [name for name in blocks.names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    inside = {name: set(blocks.gone([name])) - {name} for name in named}
    names = [name for name in named if not inside[name] & set(named)]
    if not names:
        reasons = first_few([f"{name}: {why}" for name, why in blocks.refused.items()], 6) or "it has no residual sum"
        problem = f"the model has no block that can be replaced: {reasons}"
        raise ConfigError("replace_blocks", problem, "prune widths instead")
    return BranchSpace(blocks, names, batches, variants)
