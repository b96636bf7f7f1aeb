"""What both front ends share of replacing blocks: linear fits, the space of choices, and what a block costs.

Of an ONNX model, the blocks are branches that a residual sum adds to what they read (:class:`BranchSpace`).
"""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.compression.costs import size_costs
from bitwright.compression.ratios import Option, Part, Space
from bitwright.compression.widths import few_batches, output_noise
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError, first_few
from bitwright.methods.front_end import front_end_of

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


class BranchSpace(ReplaceSpace):
    """Branches of an ONNX model.

    Args:
        blocks: of the model, as :class:`bitwright.onnx.depth.OnnxBlocks` finds them.
        names: those that may be replaced.
        batches: that linear layers are fitted to.
        variants: what a branch may become.
    """

    def __init__(self, blocks: Any, names: Sequence[str], batches: Sequence[Any], variants: Sequence[str]) -> None:
        self._blocks, self._batches = blocks, few_batches(batches)
        self._wanted = [blocks.outputs(batch) for batch in self._batches]
        graph: Graph = blocks.graph()
        gone = {name: blocks.gone([name]) for name in names}
        inside = {name: [op for op in graph.ops if op.name in gone[name]] for name in names}
        rows, fits = {name: _rows(blocks, name) for name in names}, _fits(blocks, names, batches)
        super().__init__(graph, inside, rows, fits, variants, dict(blocks.refused))

    def _put(self, choice: Sequence[int]) -> dict[str, Any]:
        """Branch -> what is added in its place: see :meth:`_instead`."""
        return {name: self._instead(name, variant) for name, variant in self.picked(choice).items() if variant}

    def _instead(self, name: str, variant: str) -> Array | str | None:
        """A matrix, the source itself (``"identity"``), or ``None`` for nothing."""
        if variant == "linear":
            return self.weights[name]
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


def _fits(blocks: Any, names: Sequence[str], batches: Sequence[Any]) -> dict[str, LinearFit]:
    ends = {name: blocks.ends(name) for name in names}
    fits: dict[str, LinearFit] = {}
    for batch in batches:
        values = blocks.values(batch, [value for pair in ends.values() for value in pair])
        for name, pair in ends.items():
            X, Y = (_as_rows(values[value], blocks.channel_axis(name)) for value in pair)
            fits.setdefault(name, LinearFit(X.shape[1])).add(X, Y)
    return fits


def _as_rows(x: Array, axis: int) -> Array:
    x = np.moveaxis(x, axis, -1)
    return x.reshape(-1, x.shape[-1])


def _rows(blocks: Any, name: str) -> int:
    shape = blocks.graph().values[blocks.ends(name)[0]].shape
    return int(np.prod(shape)) // int(shape[blocks.channel_axis(name)])


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
        raise no_block(blocks.refused, "it has no residual sum")
    return BranchSpace(blocks, names, batches, variants)
