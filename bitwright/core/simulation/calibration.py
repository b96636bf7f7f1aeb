"""Calibration state: batches with NaN or Inf are rejected whole, and joins of tensors with unlike ranges are reported.

A front end tells a :class:`BatchGate` where a batch starts and ends. Statistics are immutable, so a rejected batch is
undone by restoring the previous ones; a clean batch costs one look at the non-finite counts of every site.

A concatenation of pixel coordinates and probabilities, a stack of a large and a small tensor, or a selection between them
has one grid: it spans the larger operand and leaves few codes, or none, for the smaller one (:func:`unlike_joins`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bitwright.core.graph.constant_channels import ChannelWatch, ConstantChannels
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import op_row
from bitwright.core.health.report import HealthReport
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import NON_FINITE, NonFinite
from bitwright.core.numerics.statistics import Histogram, MinMax, Statistics, bounds_of
from bitwright.core.simulation.quantizer import Quantizer
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError, with_article
from bitwright.tables import Tabular

logger = logging.getLogger("bitwright")

_SHOWN = 5


@dataclass(frozen=True)
class Violation:
    """A site that saw NaN or Inf in one batch, and how many of each; ``policy`` is the one in effect there."""

    site: str
    nan: int
    pos_inf: int
    neg_inf: int
    policy: NonFinite

    def __str__(self) -> str:
        counts = ((self.nan, "NaN"), (self.pos_inf, "+Inf"), (self.neg_inf, "-Inf"))
        return f"{self.site} ({', '.join(f'{n} {what}' for n, what in counts if n)})"


@dataclass
class CalibrationLog(Tabular):
    """Record of accepted, skipped and changed batches.

    Attributes:
        batches: how many came.
        skipped: numbers of those left out of all statistics.
        clamped: numbers of those whose finite elements alone were used.
        first: the first site that saw NaN or Inf, in each of these batches.
    """

    _rows = "first"

    batches: int = 0
    skipped: list[int] = field(default_factory=list)
    clamped: list[int] = field(default_factory=list)
    first: dict[int, str] = field(default_factory=dict)

    def copy(self) -> CalibrationLog:
        """A copy of the log, to continue from."""
        return CalibrationLog(self.batches, [*self.skipped], [*self.clamped], {**self.first})

    def lines(self) -> list[str]:
        """One sentence per kind of batch that was skipped or changed; empty if all were clean."""
        found = []
        for numbers, what in (
            (self.skipped, "left out, because they hold values that are not finite"),
            (self.clamped, "hold values that are not finite; ranges are of the finite ones"),
        ):
            if numbers:
                shown = ", ".join(f"{n}, first at {self.first[n]}" for n in numbers[:_SHOWN])
                more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
                found.append(f"{len(numbers)} of {self.batches} batches {what}: batch {shown}{more}")
        return found


class Observer:
    """Protocol of an observer of calibration runs.

    Attributes:
        runs: how many there were.
        gate: decides about batches that are not finite.
    """

    runs: int = 0
    gate: BatchGate | None = None


class BatchGate:
    """Decides batch by batch what enters the statistics of the quantizers.

    Args:
        quantizers: those that observe activations.
        policy: for sites whose spec names none: ``error``, ``skip`` or ``clamp``.
        diagnose: finds the operator to blame, given the batch; called under the policy ``error`` only. A report that
            is ``ok`` says that nothing of it matters (values that are masked out before use): the batch is clamped.
        watches: of the sites of these quantizers.

    The strictest policy among the sites that saw something decides for the batch: ``error`` before ``skip`` before
    ``clamp``. So the statistics do not depend on the order of the batches.
    """

    def __init__(
        self,
        quantizers: Iterable[Quantizer],
        policy: NonFinite = "error",
        diagnose: Callable[[Any], HealthReport | None] | None = None,
        watches: Iterable[ChannelWatch] = (),
    ) -> None:
        self.quantizers = list(quantizers)
        self.watches = list(watches)
        self.policy = policy
        self.diagnose = diagnose
        self.log = CalibrationLog()
        self._before: list[Statistics | None] | None = None
        self._empty: list[int] = []
        self._channels: list[ConstantChannels | None] = []
        self._batch: Any = None

    @property
    def next_number(self) -> int:
        """Number of the batch that starts next; the one that is still open counts."""
        return self.log.batches + (self._before is not None)

    def open(self, batch: Any = None) -> None:
        """Start a batch; one that is still open is closed first."""
        if self._before is not None:
            self.close()
        self._batch = batch
        self._before = [quantizer.statistics for quantizer in self.quantizers]
        self._empty = [quantizer.empty for quantizer in self.quantizers]
        self._channels = [watch.seen for watch in self.watches]

    def close(self) -> bool:
        """End the batch, and return whether it counts. Without an open batch, does nothing.

        Raises:
            CalibrationError: a site with the policy ``error`` saw NaN or Inf; its batch is not in the statistics.
        """
        if self._before is None:
            return True
        violations = self._violations()
        batch, self._batch = self._batch, None
        number = self.log.batches
        self.log.batches += 1
        policy = min((one.policy for one in violations), key=NON_FINITE.index, default=None)
        if policy == "error":
            before, self._before = self._before, None
            report = self.diagnose(batch) if self.diagnose is not None else None
            if report is None or not report.ok:
                self._restore(before)
                raise _refusal(number, violations[0], report)
            policy, self._before = "clamp", before
        if policy is not None:
            self.log.first[number] = str(violations[0])
            (self.log.skipped if policy == "skip" else self.log.clamped).append(number)
        if policy == "skip":
            self._restore(self._before)
        self._before = None
        return policy != "skip"

    def abandon(self) -> None:
        """Discard the open batch, if there is one: it was interrupted or failed."""
        if self._before is not None:
            self._restore(self._before)
        self._before = self._batch = None

    def finish(self) -> CalibrationLog:
        """End calibration: close the last batch and report.

        Raises:
            CalibrationError: see :meth:`close`; also when every batch was left out.
        """
        self.close()
        for line in self.log.lines():
            logger.warning("calibration: %s", line)
        if self.log.batches and len(self.log.skipped) == self.log.batches:
            raise CalibrationError(
                "compute_encodings",
                f"all {self.log.batches} batches were left out, because each holds values that are not finite, "
                f"first at {self.log.first[0]}",
                "run check_model(model, data) to find the operator that makes them, or clean the data",
            )
        return self.log

    def _violations(self) -> list[Violation]:
        assert self._before is not None
        pairs = zip(self.quantizers, self._before, strict=True)
        found = (self._of_quantizer(quantizer, before) for quantizer, before in pairs)
        return [one for one in found if one is not None]

    def _of_quantizer(self, quantizer: Quantizer, before: Statistics | None) -> Violation | None:
        """Non-finite values that a quantizer received in this batch; ``None`` for none."""
        after = quantizer.statistics
        if after is before or not isinstance(after, MinMax | Histogram):
            return None
        now = _bad(after)
        if not any(now):
            return None
        then = _bad(before) if isinstance(before, MinMax | Histogram) else (0, 0, 0)
        nan, above, below = (a - b for a, b in zip(now, then, strict=True))
        if quantizer.masking:  # -Inf is a mask there
            below = 0
        if not (nan or above or below):
            return None
        return Violation(quantizer.name, nan, above, below, quantizer.spec.non_finite or self.policy)

    def _restore(self, before: list[Statistics | None]) -> None:
        for quantizer, statistics, empty in zip(self.quantizers, before, self._empty, strict=True):
            quantizer.statistics, quantizer.empty = statistics, empty
        for watch, seen in zip(self.watches, self._channels, strict=True):
            watch.seen = seen


def refuse_one_batch(data: Any, function: str, write: str = "[batch]") -> None:
    """Refuse data that are one batch instead of an iterable of batches: an array, a tensor, or one batch's mapping of inputs.

    Args:
        data: as the user gave them to ``function``.
        write: how one batch is written there, for the message.

    Raises:
        CalibrationError: they are.
    """
    if isinstance(data, Mapping) or hasattr(data, "shape") or not isinstance(data, Iterable):
        samples = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping)
        remedy = f"write {write} for a single batch"
        if samples and not hasattr(data, "shape"):  # a Dataset of torch
            remedy = "wrap a data set of single samples: torch.utils.data.DataLoader(data, batch_size=32)"
        raise CalibrationError(function, f"data is {with_article(type(data).__name__)}, not a list of batches", remedy)


def refuse_empty(number: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a batch without samples.

    Args:
        number: of the batch.
        shapes: of its tensors, by name. A batch that holds elements in any of them, as a cache that is still empty has
            beside its tokens, is no empty one, and scalars tell nothing about it.

    Raises:
        CalibrationError: no tensor with an axis has an element.
    """
    shaped = {name: shape for name, shape in shapes.items() if shape}
    if shaped and all(0 in shape for shape in shaped.values()):
        text = ", ".join(f"{name} is {'x'.join(map(str, shape))}" for name, shape in shaped.items())
        raise CalibrationError(f"batch {number}", f"it holds no sample: {text}", "leave empty batches out of the data")


def with_samples(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield ``batches``, and refuse empty ones.

    Raises:
        CalibrationError: as :func:`refuse_empty`, at the batch, as far as arrays in tuples, lists and mappings show it.
    """
    for number, batch in enumerate(batches):
        named = batch if isinstance(batch, Mapping) else {"input": batch}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, part in named.items():
            arrays = list(arrays_in(part))
            several = len(arrays) > 1 or part is batch
            shapes |= {f"{name} {i}" if several else str(name): tuple(a.shape) for i, a in enumerate(arrays)}
        refuse_empty(number, shapes)
        yield batch


def arrays_in(batch: Any) -> Iterator[Any]:
    """The arrays and tensors of a batch, in order."""
    left = deque([batch])
    while left:
        item = left.popleft()
        if getattr(item, "shape", None) is not None:
            yield item
        elif isinstance(item, Mapping):
            left.extendleft(reversed(list(item.values())))
        elif isinstance(item, (tuple, list)):
            left.extendleft(reversed(item))


def samples_in(batch: Any) -> int:
    """Samples of a batch: the length of its first array with an axis; 1 if it has none."""
    return next((int(array.shape[0]) for array in arrays_in(batch) if len(array.shape)), 1)


def slice_samples(batch: Any, start: int, stop: int) -> Any:
    """Take the samples ``[start, stop)`` of a batch.

    Returns:
        The slice; ``None`` if ``batch`` is no array and no tuple, list or dict of arrays, or if its arrays differ in the length
        of the first axis.
    """
    arrays = batch if type(batch) in (tuple, list) else batch.values() if type(batch) is dict else (batch,)
    lengths = {tuple(getattr(array, "shape", ()))[:1] for array in arrays}
    if len(lengths) != 1 or lengths == {()}:
        return None
    parts = [array[start:stop] for array in arrays]
    if type(batch) is dict:
        return dict(zip(batch, parts, strict=True))
    return type(batch)(parts) if type(batch) in (tuple, list) else parts[0]


def fewer_samples(batch: Any, most: int, run: Callable[[Any], Any]) -> Any:
    """The first ``most`` samples of a batch, where a model takes them.

    Args:
        batch: as the model takes it.
        most: how many are wanted.
        run: the model; called on the slice.

    Returns:
        The slice; ``batch`` itself where it holds no more, cannot be divided, or the model takes only batches of its size.
    """
    part = slice_samples(batch, 0, most) if samples_in(batch) > most else None
    if part is None:
        return batch
    try:
        run(part)
    except Exception:  # of the model's own code: a size that is written down in it
        return batch
    return part


def nested_calibration() -> CalibrationError:
    """The error of a calibration started inside another one of the same simulation."""
    return CalibrationError(
        "calibrating",
        "the simulation is being calibrated already, by a block or call around this one",
        "run the model in that block; use resume=True for a second calibration after it",
    )


def _bad(stats: MinMax | Histogram) -> tuple[int, int, int]:
    bounds = bounds_of(stats)
    counts = (bounds.nan_count, bounds.pos_inf_count, bounds.neg_inf_count)
    # a sum takes twenty times as long as reading the one number that most sites have
    nan, above, below = (int(count) if count.ndim == 0 else int(count.sum()) for count in counts)
    return nan, above, below


def _refusal(number: int, violation: Violation, report: HealthReport | None) -> CalibrationError:
    policies = "or calibrate with non_finite='skip' (leaves such batches out) or 'clamp' (uses the finite values)"
    if report is None or report.culprit is None:
        return CalibrationError(
            f"batch {number}, {violation.site}",
            f"the values are not finite: {violation}",
            f"run check_model(model, data) to find the operator that makes them, {policies}",
        )
    culprit = report.culprit
    sample = "" if culprit.sample is None else f" of sample {culprit.sample}"
    source = f", at {culprit.source}" if culprit.source else ""
    made = f"{culprit.op_type} made values that are not finite{sample}: {culprit.problem}{source}"
    if culprit.op_type in ("input", "param"):
        made = f"the {culprit.op_type} is not finite{sample}: {culprit.problem}"
    return CalibrationError(
        f"batch {number}, {culprit.op}",
        f"{made}; the first quantizer to see it is {violation}",
        f"{culprit.remedy}; {policies}",
    )


_FEWEST_CODES = 16  # of an operand on the grid of the join; four of eight bits
_SHOWN_JOINS = 3


@dataclass(frozen=True)
class UnlikeJoin:
    """A join whose grid is too coarse for one of its operands.

    Attributes:
        op: the operator that joins.
        site: the quantizer of what was joined.
        large, small: operand and its range: the widest, and the narrowest with steps of its own.
        step: of the join's grid.
    """

    op: str
    site: str
    large: tuple[str, tuple[float, float]]
    small: tuple[str, tuple[float, float]]
    step: float

    @property
    def codes(self) -> float:
        """Number of the join's grid steps in the narrowest operand's range."""
        lo, hi = self.small[1]
        return (hi - lo) / self.step

    def __str__(self) -> str:
        (large, wide), (small, narrow) = self.large, self.small
        return (
            f"{self.site} (joined by {self.op}): {large} from {wide[0]:.4g} to {wide[1]:.4g} and {small} from "
            f"{narrow[0]:.4g} to {narrow[1]:.4g} share one grid with a step of {self.step:.4g}, "
            f"which has {self.codes:.2g} steps for the narrower"
        )


def unlike_joins(graph: Graph, sites: Mapping[str, Site], shared: Mapping[str, str]) -> list[UnlikeJoin]:
    """The joins of calibrated values, in order of execution, on whose grid an operand has fewer than 16 steps.

    Args:
        graph: the model.
        sites: calibrated.
        shared: value that only carries elements of another -> the group on whose grid they lie.
    """
    made, read = _at_work(sites, shared)
    merges = (op for op in graph.ops if op_row(op.type).kind == "merge" and op.outputs)
    joined = ((op, made.get(op.outputs[0]) or _read_later(graph, op.outputs[0], read)) for op in merges)
    found = (_unlike(op, site, made, read) for op, site in joined if site is not None)
    return [join for join in found if join is not None]


def _at_work(
    sites: Mapping[str, Site], shared: Mapping[str, str]
) -> tuple[dict[str, Site], dict[tuple[str, int], Site]]:
    """The quantizer that each value went through where it was made, and the one at each port that reads through one."""
    calibrated = [site for site in sites.values() if site.enabled and site.encoding is not None]
    carried = {value: sites[group] for value, group in shared.items() if group in sites and sites[group].enabled}
    made = carried | {site.value: site for site in calibrated if site.role == "output"}
    return made, {(site.op, site.port): site for site in calibrated if site.role in ("input", "constant")}


def warn_of_unlike_joins(graph: Graph, sites: Mapping[str, Site], shared: Mapping[str, str]) -> None:
    """Log the joins of unlike ranges, with both ranges and what can be done."""
    found = unlike_joins(graph, sites, shared)
    if found:
        more = f"; and {len(found) - _SHOWN_JOINS} more joins" if len(found) > _SHOWN_JOINS else ""
        logger.warning(
            "joins of unlike ranges: %s%s. Remedy: leave the join in float with Rule(%r, port='output', quantized=False), or "
            "give it 16 bits with format='uint16'",
            "; ".join(map(str, found[:_SHOWN_JOINS])),
            more,
            found[0].site,
        )


def _read_later(graph: Graph, value: str, read: Mapping[tuple[str, int], Site]) -> Site | None:
    """The first quantizer that a float value reaches, across data movement."""
    stack, seen = [value], {value}
    while stack:
        for op, port in graph.consumers(stack.pop()):
            if (op.name, port) in read:
                return read[op.name, port]
            moved = op.outputs if op_row(op.type).kind == "movement" else ()
            stack += [output for output in moved if output not in seen]
            seen.update(moved)
    return None


def _unlike(op: Op, site: Site, made: Mapping[str, Site], read: Mapping[tuple[str, int], Site]) -> UnlikeJoin | None:
    """The operand of ``op`` with too few steps on the grid of ``site``; ``None`` where all have enough."""
    encoding = site.encoding
    if encoding is None or not isinstance(encoding.format, IntFormat) or encoding.scale.size != 1:
        return None
    ranges = dict(_ranges(op, site, made, read))
    if len(ranges) < 2:
        return None
    width = {value: hi - lo for value, (lo, hi) in ranges.items()}
    large, small = max(width, key=width.__getitem__), min(width, key=width.__getitem__)
    step = float(encoding.scale.reshape(()))
    join = UnlikeJoin(op.name, site.name, (large, ranges[large]), (small, ranges[small]), step)
    return join if join.codes < _FEWEST_CODES and width[large] > width[small] * 2 else None


def _ranges(
    op: Op, site: Site, made: Mapping[str, Site], read: Mapping[tuple[str, int], Site]
) -> Iterator[tuple[str, tuple[float, float]]]:
    """The operands of ``op`` that have grids of their own, and the ranges of these."""
    ports = op_row(op.type).activations
    for port, value in op.sources():
        if ports is not None and port not in ports:
            continue
        own = read.get((op.name, port)) or made.get(value)
        if own is None or own.quantizer is site.quantizer or own.encoding is None:
            continue
        if isinstance(own.encoding.format, IntFormat):
            yield value, (float(own.encoding.min.min()), float(own.encoding.max.max()))
