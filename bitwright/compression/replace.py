"""Replace blocks by something cheaper: a linear layer fitted to the block, the unchanged input, or nothing.

A block makes a tensor of the shape that it reads: attention, a feed-forward network, a residual block of convolutions. Of a
module it is an innermost module of several layers, of an ONNX model a branch that a residual sum adds to what it reads. Its
linear variant is the least-squares fit of its result, on real inputs: what training it alone against its block converges to.
Which block becomes what is chosen exactly from the noise in the outputs.

Reference: Bercovich et al. 2024, arXiv:2411.19146 (Puzzle): block-wise local distillation, and a choice by integer programming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.compression.costs import check_target, parts_left
from bitwright.compression.ratios import Chosen, choose
from bitwright.compression.replace_space import COSTS, ReplaceSpace
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.methods.details import Detailed
from bitwright.tables import Table

VARIANTS = ("linear", "identity", "none")


@dataclass(frozen=True)
class ReplacedRow:
    """What became of a block.

    Attributes:
        name: its path.
        variant: what stands in its place; empty where it stays.
        error: of the linear variant, in parts of the block's result, on the data that it was fitted to.
    """

    name: str
    variant: str
    error: float


@dataclass(frozen=True)
class ReplaceReport(Detailed):
    """Result of :func:`replace_blocks`; prints as a table.

    Attributes:
        rows: all blocks.
        refused: what could not be replaced -> why.
        before, after: ``macs``, ``params`` and ``bytes``.
        choice: what was measured.
        plan: what :func:`bitwright.torch.rebuild` takes, for modules.
    """

    _rows = "rows"

    rows: tuple[ReplacedRow, ...]
    refused: Mapping[str, str]
    before: Mapping[str, float]
    after: Mapping[str, float]
    choice: Chosen = field(repr=False)
    plan: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def summary(self) -> str:
        """One line."""
        gone = sum(bool(row.variant) for row in self.rows)
        return f"{gone} of {len(self.rows)} blocks replaced: {parts_left(self.before, self.after)}"

    def table(self) -> Table:
        """The blocks."""
        rows = [[r.name, r.variant or "as it was", f"{r.error:.1%}"] for r in self.rows]
        return Table(["block", "now", "error of a linear layer"], rows, self.summary, right=(2,))

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *(f"not touched: {name}: {why}" for name, why in self.refused.items())])


@checks_arguments
def replace_blocks(
    model: Any,
    data: Iterable[Any],
    *,
    macs: float | None = None,
    params: float | None = None,
    include: Iterable[str] = ("*",),
    variants: Iterable[str] = ("linear", "none"),
    metric: Callable[[Any], Any] | None = None,
    lower_is_better: bool = False,
    providers: Any = None,
    progress: bool = True,
) -> ReplaceReport:
    """Replace blocks by linear layers or by nothing, in place, until a target is met.

    Args:
        model: a module, or a loaded ONNX model.
        data: batches of real inputs: linear layers are fitted to all of them, outputs compared on the first 64 samples.
        macs, params: the part that may be left.
        include: patterns for blocks: paths of modules, ``*self_attn`` for attention; names of residual sums in an ONNX model.
        variants: what a block may become: ``linear``, ``identity`` (what it reads), ``none`` (zeros, behind which a residual sum
            stays).
        metric: ``metric(model) -> float``, of a session for an ONNX model: decides between the choices of least noise.
        lower_is_better: of the metric.
        providers: where ONNX Runtime computes.
        progress: show progress bars.

    Raises:
        CalibrationError: no data, or a metric that is no number.
        ConfigError: no target, or one that cannot be met, with the nearest that can; no block; an unknown variant.
    """
    target = {name: part for name, part in (("macs", macs), ("params", params)) if part is not None}
    batches, asked, patterns = list(data), tuple(variants), tuple(include)
    _check(target, batches, asked)
    space = _space(model, batches, patterns, asked, providers)
    chosen = choose(space, target, metric=metric, lower_is_better=lower_is_better, progress=progress)
    choice = chosen.best.choice
    space.apply(choice)
    rows = tuple(ReplacedRow(name, variant, space.errors[name]) for name, variant in space.picked(choice).items())
    before = {cost: space.original_costs()[cost] for cost in COSTS}
    after = {cost: chosen.best.costs[cost] for cost in before}
    return ReplaceReport(rows, space.refused, before, after, chosen, space.finished(choice))


def _space(
    model: Any, batches: Sequence[Any], patterns: Sequence[str], variants: Sequence[str], providers: Any
) -> ReplaceSpace:
    """The blocks of a model of either front end."""
    if hasattr(model, "state_dict"):
        from bitwright.compression.replace_modules import module_space

        return module_space(model, batches, patterns, variants)
    from bitwright.compression.replace_space import branch_space

    return branch_space(model, batches, patterns, variants, providers)


def _check(target: Mapping[str, float], batches: Sequence[Any], variants: Sequence[str]) -> None:
    if not target:
        raise ConfigError("replace_blocks", "it needs a target", "give macs or params (0.7 leaves 70 %)")
    check_target(target)
    if not batches:
        raise CalibrationError("replace_blocks", "the data held no batch", "give some batches of real data")
    wrong = [v for v in variants if v not in VARIANTS]
    if wrong or not variants:
        problem = f"{wrong[0]!r} is not a variant" if wrong else "none is given"
        raise ConfigError("variants", problem, f"use {', '.join(VARIANTS)}")
