"""Branches of an ONNX model that can be replaced: those that a residual sum adds to what they read."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.compression.replace_space import LinearFit, ReplaceSpace, no_block
from bitwright.compression.widths import few_batches, output_noise
from bitwright.core.graph.graph import Graph
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.methods.front_end import front_end_of


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
