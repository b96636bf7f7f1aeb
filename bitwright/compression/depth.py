"""Depth pruning: remove whole residual blocks and transformer layers, those of least effect on the outputs first.

A block is taken out by handing on what it reads. Which one goes is measured, not estimated: every block that is there is left
out alone, given those that are gone, and the one with the least noise in the outputs goes. (Men et al. 2024, arXiv:2403.03853,
rank once, by the similarity of what a layer reads and makes; the outputs see what follows it too.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.compression.costs import check_target, parts_left, size_costs
from bitwright.compression.groups import Refusal
from bitwright.compression.widths import few_batches, output_noise
from bitwright.core.graph.graph import Graph
from bitwright.core.simulation.float_model import Array
from bitwright.errors import CalibrationError, ConfigError, checks_arguments, first_few
from bitwright.methods.details import Detailed
from bitwright.methods.front_end import Blocks, front_end_of
from bitwright.progress import progress as progress_bar
from bitwright.tables import Table


@dataclass(frozen=True)
class Dropped:
    """A removed block.

    Attributes:
        name: of the block.
        noise: over signal of the outputs, with this block and those above it in the table left out.
    """

    name: str
    noise: float


@dataclass(frozen=True)
class DepthReport(Detailed):
    """Result of :func:`drop_blocks`; prints as a table.

    Attributes:
        rows: blocks that went, in this order.
        kept: blocks that could have gone.
        refused: blocks that could not, and why.
        before, after: ``macs``, ``params`` and ``bytes``.
        plan: what :func:`bitwright.torch.rebuild` takes, for modules.
    """

    _rows = "rows"

    rows: tuple[Dropped, ...]
    kept: tuple[str, ...]
    refused: tuple[Refusal, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    plan: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def summary(self) -> str:
        """One line."""
        parts = parts_left(self.before, self.after)
        return f"{len(self.rows)} of {len(self.rows) + len(self.kept)} blocks taken out: {parts}"

    def table(self) -> Table:
        """The removed blocks."""
        rows = [[row.name, f"{row.noise:.3g}"] for row in self.rows]
        return Table(["block", "noise of the outputs"], rows, self.summary, right=(1,))

    def __str__(self) -> str:
        return str(self.table())


@checks_arguments
def drop_blocks(
    model: Any,
    data: Iterable[Any],
    *,
    count: int | None = None,
    macs: float | None = None,
    params: float | None = None,
    exclude: Iterable[str] = (),
    providers: Any = None,
    progress: bool = True,
) -> DepthReport:
    """Remove whole blocks from a model, in place, until ``count`` are removed or the target is met.

    Of a module the blocks are the members of its ``ModuleList`` and ``Sequential`` containers that make a tensor of the shape
    that they read: layers of transformers, residual blocks. Of an ONNX model they are the branches that a residual sum adds.

    Args:
        model: a module, or a loaded ONNX model; changed in place.
        data: batches; outputs are compared on the first 64 samples.
        count: how many blocks go.
        macs, params: the part that may be left, in place of ``count``.
        exclude: names of blocks that stay.
        providers: where ONNX Runtime computes.
        progress: show a progress bar.

    Raises:
        CalibrationError: no data.
        ConfigError: neither or both of count and a target; more than can be met, with the nearest that can; no block.
        ModelError: the model cannot be run, or its code depends on the number of blocks.
    """
    target = {name: part for name, part in (("macs", macs), ("params", params)) if part is not None}
    if bool(target) == (count is not None):
        raise ConfigError("drop_blocks", "it needs a count or a target", "write count=2, or macs=0.7")
    if target:
        check_target(target)
    batches = few_batches(data)
    if not batches:
        raise CalibrationError("drop_blocks", "the data held no batch", "give some batches of real data")
    blocks = front_end_of(model).blocks(model, batches[0], providers)
    refused = tuple(Refusal(name, reason) for name, reason in blocks.refused.items())
    left = [name for name in blocks.names if name not in set(exclude)]
    if not left:
        reasons = first_few([str(r) for r in refused], 6) or "no part of it makes what it reads in another form"
        raise ConfigError(
            "drop_blocks", f"the model has no block that can be left out: {reasons}", "prune widths instead"
        )
    whole = _costs(blocks, ())
    _check_reachable(blocks, left, count, target, whole)
    gone = _least_noise(
        blocks, left, batches, count, {name: part * whole[name] for name, part in target.items()}, progress
    )
    names = [dropped.name for dropped in gone]
    after = _costs(blocks, names)
    plan = blocks.remove(names, batches[0])
    kept = tuple(name for name in left if name not in names)
    return DepthReport(tuple(gone), kept, refused, whole, after, plan)


def _least_noise(
    blocks: Blocks, left: Sequence[str], batches: Sequence[Any], count: int | None, bounds: Mapping[str, float], progress: bool
) -> list[Dropped]:  # fmt: skip
    """Blocks chosen greedily by noise, until there are ``count``, or costs are within ``bounds``."""
    wanted = [blocks.outputs(batch) for batch in batches]
    gone: list[Dropped] = []
    while True:
        names = [dropped.name for dropped in gone]
        tried = progress_bar([n for n in left if n not in names], f"Block {len(gone) + 1}", progress)
        found = [Dropped(n, _noise(blocks, [*names, n], batches, wanted)) for n in tried]
        gone.append(min(found, key=lambda dropped: dropped.noise))
        costs = _costs(blocks, [*names, gone[-1].name])
        if len(gone) == count or (count is None and all(costs[name] <= most for name, most in bounds.items())):
            return gone


def _costs(blocks: Blocks, names: Sequence[str]) -> dict[str, float]:
    """Costs of the graph without the operators of blocks and their private parameters."""
    graph, gone = blocks.graph(), set(blocks.gone(names))
    ops = [op for op in graph.ops if op.name not in gone]
    read = {value for op in ops for _, value in op.sources()}
    values = {name: value for name, value in graph.values.items() if value.param is None or name in read}
    return size_costs(Graph(ops, values, graph.inputs, graph.outputs))


def _check_reachable(
    blocks: Blocks, left: Sequence[str], count: int | None, target: Mapping[str, float], whole: Mapping[str, float]
) -> None:
    if count is not None and not 0 < count <= len(left):
        raise ConfigError("count", f"{count} blocks cannot go: {len(left)} can", f"write a count from 1 to {len(left)}")
    least = _costs(blocks, left)
    for name, part in target.items():
        if least[name] > part * whole[name]:
            nearest = int(np.ceil(least[name] / whole[name] * 1000)) / 1000
            raise ConfigError(
                "target", f"{part:g} of the {name} cannot be met: without any of the {len(left)} blocks {nearest:g} are left",
                f"ask for {nearest:g} or more, or prune widths as well",
            )  # fmt: skip


def _noise(blocks: Blocks, names: Sequence[str], batches: Sequence[Any], wanted: Sequence[Sequence[Array]]) -> float:
    undo = blocks.without(names)
    try:
        noise = output_noise(blocks, batches, wanted) or 0.0
    finally:
        undo()
    return noise if np.isfinite(noise) else float("inf")
