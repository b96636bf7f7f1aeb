"""Numerical health: records for a diagnosis, the operator at fault, and the health of a site from its statistics.

A front end runs the model on data, tells a :class:`Tracker` which tensors every operator read and wrote, and
measures the ones around each origin of a non-finite value (:func:`measure_tensor`). The tracker decides which
origins are faults and which are harmless: a ``-inf`` mask before a softmax, a NaN that is masked out before
use. The result is a :class:`HealthReport`. Nothing here knows a framework.

:func:`site_health` reads the health of quantizer sites off their statistics after calibration, at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.constant_channels import ConstantChannels
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.arrays import Array, as_array, cast, dtype_name, is_floating, is_torch, namespace, to_numpy
from bitwright.core.numerics.statistics import Histogram, MinMax, bounds_of
from bitwright.errors import CalibrationError
from bitwright.tables import Tabular, counted, html_table, text_table

TensorKind = Literal["input", "param", "constant", "activation"]

#: dtype -> largest finite number
LIMITS: dict[str, float] = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}
#: dtype -> smallest normal number
HALVES: dict[str, float] = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
_SHOWN = 8


@dataclass(frozen=True)
class TensorHealth:
    """Counts of kinds of values in one tensor.

    Attributes:
        name: value, parameter or argument name.
        shape, dtype, size: of the tensor; ``size`` in elements.
        nan, pos_inf, neg_inf: how many elements are NaN, +Inf and -Inf.
        min, max: bounds of the finite elements; ``None`` without any.
        zeros: how many elements are zero.
        smallest: least magnitude of the finite elements that are not zero; ``None`` without any.
        subnormals: in half precision, elements that are not zero and below the smallest normal number.
        saturated: in half precision, finite elements at the largest number of the type.
        first_bad: index of the first element that is NaN or +Inf, or of the first -Inf where there is neither.
        kind: ``input`` of the model, ``param``, ``constant`` or ``activation``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    min: float | None = None
    max: float | None = None
    zeros: int = 0
    smallest: float | None = None
    subnormals: int = 0
    saturated: int = 0
    first_bad: tuple[int, ...] | None = None
    kind: TensorKind = "activation"

    @property
    def inf(self) -> int:
        """Infinite elements of either sign."""
        return self.pos_inf + self.neg_inf

    @property
    def bad(self) -> int:
        """Elements that are not finite."""
        return self.nan + self.inf

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return not self.bad

    @property
    def magnitude(self) -> float:
        """Largest finite magnitude; 0 without any."""
        return max(abs(self.min or 0.0), abs(self.max or 0.0))

    def __str__(self) -> str:
        where = f"{self.name} {self.dtype}{list(self.shape)}"
        parts = [f"in [{self.min:.4g}, {self.max:.4g}]" if self.min is not None else "no finite element"]
        for count, what in ((self.nan, "NaN"), (self.pos_inf, "+Inf"), (self.neg_inf, "-Inf")):
            if count:
                parts.append(f"{count} of {self.size} {what}")
        if self.first_bad is not None:
            parts.append(f"first at {list(self.first_bad)}")
        if self.zeros:
            parts.append(f"{self.zeros} zero")
        for count, what in ((self.subnormals, "subnormal"), (self.saturated, "saturated")):
            if count:
                parts.append(f"{count} {what}")
        return f"{where}: {', '.join(parts)}"


def measure_tensor(name: str, x: Any, kind: TensorKind = "activation") -> TensorHealth:
    """The health of one tensor.

    Args:
        name: for messages.
        x: numpy array, torch tensor or number, any dtype; integers and booleans are always finite.
        kind: role in the model.

    >>> print(measure_tensor("x", np.float32([0, 2, np.nan])))
    x float32[3]: in [0, 2], 1 of 3 NaN, first at [2], 1 zero
    """
    x = as_array(x)
    shape, dtype, size = tuple(int(n) for n in x.shape), dtype_name(x), int(math.prod(x.shape))
    if size == 0:
        return TensorHealth(name, shape, dtype, 0, kind=kind)
    xp = namespace(x)
    half = dtype in HALVES
    values = x.reshape(-1)
    if half or not is_floating(values) or "float8" in dtype:
        values = cast(values, "float32" if is_floating(values) else "float64")
    finite = xp.isfinite(values)
    nan = int(xp.isnan(values).sum())
    pos, neg = int((values == math.inf).sum()), int((values == -math.inf).sum())
    some, first_bad = values, None
    if nan + pos + neg:
        bad = ~finite if not nan + pos else ~finite & (values != -math.inf)
        flat = int(to_numpy(bad).argmax())
        first_bad = tuple(map(int, np.unravel_index(flat, shape)))
        some = values[finite]
    sizes = _magnitudes(some, dtype if half else None)
    return TensorHealth(name, shape, dtype, size, nan, pos, neg, **sizes, first_bad=first_bad, kind=kind)


def _magnitudes(finite: Any, half: str | None) -> dict[str, Any]:
    """Fields of :class:`TensorHealth` that the finite values fill; ``half`` is their type if that is narrow."""
    count = int(math.prod(finite.shape))
    if not count:
        return {}
    sizes = abs(finite)
    zeros = int((sizes == 0).sum())
    found: dict[str, Any] = {"min": float(finite.min()), "max": float(finite.max()), "zeros": zeros}
    if zeros < count:
        found["smallest"] = float((sizes[sizes > 0] if zeros else sizes).min())
    if half is not None:
        found["subnormals"] = int((sizes < HALVES[half]).sum()) - zeros
        found["saturated"] = int((sizes >= LIMITS[half]).sum())
    return found


def first_non_finite(x: Array) -> tuple[tuple[int, ...], float] | None:
    """Index and value of the first element of ``x`` that is not finite; ``None`` if all are.

    >>> first_non_finite(np.float32([[1, 2], [np.inf, 3]]))
    ((1, 0), inf)
    """
    x = as_array(x)
    if not is_floating(x) or 0 in tuple(x.shape):
        return None
    if is_torch(x):
        wide = namespace(x).float32 if dtype_name(x) in HALVES else None
        if bool(x.sum(dtype=wide).isfinite()):  # a tenth of what isfinite costs; one that overflows is not proof
            return None
        bad: NDArray[np.bool_] = to_numpy(~namespace(x).isfinite(x))
    else:
        bad = ~np.isfinite(x)
    if not bad.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    return index, float(to_numpy(x[index]))


def check_parameters(parameters: Mapping[str, Array]) -> None:
    """Refuse parameters with NaN or Inf before calibration.

    Args:
        parameters: by name, those that are to be quantized.

    Raises:
        CalibrationError: names the first such parameter and the index of its first bad element.
    """
    found = [(name, bad) for name, value in parameters.items() if (bad := first_non_finite(value))]
    if not found:
        return
    name, (index, value) = found[0]
    more = ""
    if len(found) > 1:
        shown = ", ".join(other for other, _ in found[1 : _SHOWN + 1])
        more = f"; so do {len(found) - 1} more: {shown}{', ...' if len(found) > _SHOWN + 1 else ''}"
    raise CalibrationError(
        name,
        f"the parameter holds values that are not finite, the first {value} at index {list(index)}{more}",
        "load or train it again (a diverged training step writes NaN); no range can be taken from it",
    )


@dataclass(frozen=True)
class Culprit:
    """The operator that turned finite values into others.

    Attributes:
        op: readable name; the one its quantizer sites carry.
        op_type: canonical type (``Div``, ``Softmax``, ...).
        where: module path (torch) or node name (ONNX).
        cause: a key of ``diagnosis.REMEDIES``.
        problem: what happened, with the numbers seen.
        remedy: what to do about it.
        source: ``file.py:123: code line`` of the user's code, if there is any.
        batch, sample: which batch of the data, and which row of it, showed it first.
        inputs, params, outputs: the tensors around the call, measured before it wrote any of them.
        spread: how many operators after it carried the values on, and the names of the first ones.
        reached: outputs of the model that hold the values.
        batches: how many batches showed it.
    """

    op: str
    op_type: str
    where: str
    cause: str
    problem: str
    remedy: str
    source: str | None = None
    batch: int | None = None
    sample: int | None = None
    inputs: tuple[TensorHealth, ...] = ()
    params: tuple[TensorHealth, ...] = ()
    outputs: tuple[TensorHealth, ...] = ()
    spread: int = 0
    spread_names: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()
    batches: int = 1

    @property
    def summary(self) -> str:
        """One line: the operator and what happened."""
        return f"{self.op} ({self.op_type}): {self.problem}"

    def lines(self) -> list[str]:
        """The whole record, for a terminal."""
        found = [f"{self.op} ({self.op_type}): {self.problem}"]
        if self.source:
            found.append(f"  at {self.source}")
        if self.where and self.where != self.op:
            found.append(f"  in {self.where}")
        if self.batch is not None:
            sample = "" if self.sample is None else f", sample {self.sample}"
            more = f" ({self.batches} batches show it)" if self.batches > 1 else ""
            found.append(f"  first in batch {self.batch}{sample}{more}")
        for title, tensors in (("input", self.inputs), ("param", self.params), ("output", self.outputs)):
            found += [f"  {title} {tensor}" for tensor in tensors]
        if self.spread:
            found.append(
                f"  carried on by {counted(self.spread, 'operator')}: {_shortened(self.spread_names, self.spread)}"
            )
        if self.reached:
            found.append(f"  reaches {_shortened(self.reached, len(self.reached))}")
        return [*found, f"  remedy: {self.remedy}"]


@dataclass(frozen=True)
class HealthReport(Tabular):
    """Result of a health check over the data.

    Attributes:
        model: its name.
        culprits: faults in execution order; the first is the one to repair first.
        bad_inputs: model inputs that are not finite, each with the batch in its name.
        bad_params: parameters and buffers that are not finite.
        notes: what looked like a fault and is none, one sentence each.
        batches, calls: how much was looked at.
    """

    _rows = "culprits"
    _also = ("ok",)

    model: str
    culprits: tuple[Culprit, ...] = ()
    bad_inputs: tuple[TensorHealth, ...] = ()
    bad_params: tuple[TensorHealth, ...] = ()
    notes: tuple[str, ...] = ()
    batches: int = 0
    calls: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing non-finite was made that matters, and every parameter is finite."""
        return not self.culprits and not self.bad_params

    @property
    def culprit(self) -> Culprit | None:
        """The first fault."""
        return self.culprits[0] if self.culprits else None

    @property
    def exit_code(self) -> int:
        """0 for a healthy model, 1 for one with a fault."""
        return 0 if self.ok else 1

    def text(self) -> str:
        """The report as lines for a terminal."""
        verdict = "healthy" if self.ok else "not healthy"
        seen = f"{counted(self.batches, 'batch', 'batches')}, {counted(self.calls, 'call')}"
        found = [f"{self.model}: {verdict} ({seen})"]
        for title, tensors in (("parameters", self.bad_params), ("inputs", self.bad_inputs)):
            if tensors:
                found.append(f"{title} that are not finite:")
                found += [f"  {tensor}" for tensor in tensors[:_SHOWN]]
                found += [f"  and {len(tensors) - _SHOWN} more"] if len(tensors) > _SHOWN else []
        for number, culprit in enumerate(self.culprits, 1):
            first, *rest = culprit.lines()
            found += [f"{number}. {first}", *(f" {line}" for line in rest)]
        found += [f"note: {note}" for note in self.notes]
        return "\n".join(found)

    def __str__(self) -> str:
        return self.text()


def _shortened(names: Sequence[str], count: int) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {count - min(len(names), _SHOWN)} more" if count > min(len(names), _SHOWN) else "")


# ---- who made it, and does it matter


class Flags(NamedTuple):
    """Kinds of non-finite values in a tensor."""

    nan: bool = False
    pos_inf: bool = False
    neg_inf: bool = False

    @property
    def bad(self) -> bool:
        """Whether there are any."""
        return self.nan or self.pos_inf or self.neg_inf


CLEAN = Flags()

#: operators that write a constant the author chose: an infinity from them is meant
MAKERS = frozenset(
    "MaskedFill Where full full_like new_full fill tensor as_tensor Constant ConstantOfShape scatter "
    "ScatterElements PadConstant Pad setitem index_fill masked_scatter".split()
)
#: operators that answer an infinity with an innocent number: port -> what becomes of it
_DIVIDES = {"Div": 1, "Reciprocal": 0, "Rsqrt": 0}
#: operators that weigh data with parameters: an infinity among what they read is not a mask
_WEIGHS = frozenset((*TRAITS["layer"], "LSTM", "GRU", "RNN"))
#: operators that turn NaN into an index, a count or a choice
_CHOOSES = frozenset("ArgMax ArgMin argmax argmin argsort multinomial bincount long int TopK Sort Cast".split())


#: operators in which some runtimes lose a NaN: ``max(NaN, 0)`` may be 0
_SWALLOWS = frozenset((
    *TRAITS["piecewise_linear"], "ThresholdedRelu", "PRelu", "Max", "Min", "MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin",
    "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Softmax", "QuantizeLinear", "DynamicQuantizeLinear", "LSTM", "GRU", "RNN",
))  # fmt: skip


@dataclass
class Event:
    """One origin of non-finite values in one run.

    Attributes:
        index: order of appearance.
        op, op_type: who made them; for a model input or a parameter its name and ``input`` or ``param``.
        meant: it is a constant that the author wrote, a mask or a fill value.
        reported: the values reached an output, or falsified one.
        carriers: operators that carried them on, each once, in order.
        reached: model outputs that hold them.
    """

    index: int
    op: str
    op_type: str
    meant: bool
    reported: bool = False
    carriers: dict[str, None] = field(default_factory=dict)
    reached: list[str] = field(default_factory=list)

    @property
    def spread(self) -> int:
        """Number of operators that propagated the values."""
        return len(self.carriers)

    @property
    def names(self) -> list[str]:
        """The first of these operators."""
        return list(islice(self.carriers, _SHOWN))


class Tracker:
    """Follows non-finite values through one run of a model, operator by operator in execution order.

    Tensors go by any hashable key of the front end's. An operator is the origin of an :class:`Event` when it
    writes non-finite values and read none, or writes NaN and read only infinities that are meant (a
    softmax over a row that is masked throughout), or adds up to +Inf beside a mask of -Inf. An event is named when its values

    - reach an output of the model, unless they are infinities that are meant;
    - are infinite by overflow and a division turns them into an innocent zero (``x * rsqrt(mean(x * x))`` in half
      precision), an exponential excepted: ``1 / (1 + exp(-x))`` is right;
    - are NaN and an operator chooses an index by them, or loses them (``max(NaN, 0)`` is 0 in some runtimes);
    - stand in the data, not masked yet when they are multiplied with a weight.

    Everything else is harmless: nothing of it is left at the end.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._taint: dict[Hashable, Event] = {}

    def source(self, key: Hashable, name: str, kind: TensorKind, flags: Flags) -> Event | None:
        """Record a tensor that enters the run: a model input, a parameter, a constant. Returns the event if it is bad.

        ``-inf`` alone is a mask, whoever made it; in a constant of the model any infinity is meant.
        """
        if not flags.bad:
            self._taint.pop(key, None)
            return None
        meant = flags == Flags(neg_inf=True) or (kind == "constant" and not flags.nan)
        event = self._event(name, kind, meant=meant)
        self._taint[key] = event
        return event

    @property
    def busy(self) -> bool:
        """Whether any tensor is known to hold non-finite values."""
        return bool(self._taint)

    def knows(self, key: Hashable) -> bool:
        """Whether the non-finite values of this tensor are attributed to an event."""
        return key in self._taint

    def move(self, key: Hashable, to: Hashable) -> None:
        """Give the tensor ``key`` a second name ``to``, where it enters or leaves the body of a loop."""
        event = self._taint.get(key)
        if event is None:
            self._taint.pop(to, None)
        else:
            self._taint[to] = event

    def call(
        self, op: str, op_type: str, inputs: Iterable[tuple[Hashable, Flags]], outputs: Iterable[tuple[Hashable, Flags]]
    ) -> Event | None:
        """Record one run of an operator; returns the event if it began here.

        Args:
            op, op_type: its name and canonical type.
            inputs: key and flags of every tensor read, in port order, as they were before the call.
            outputs: the same for every tensor written.
        """
        read = [(port, self._taint.get(key), flags) for port, (key, flags) in enumerate(inputs) if flags.bad]
        written = list(outputs)
        if op_type in _WEIGHS:
            _accuse_inputs(read)
        bad = any(flags.bad for _, flags in written)
        if not read and not bad:
            self._mark(written, None)
            return None
        origin = self._origin(op, op_type, read, written)
        blamed = origin or _blamed([event for _, event, _ in read])
        self._mark(written, blamed)
        if origin is None and blamed is not None and bad:
            blamed.carriers[op] = None
        elif origin is None:
            self._absorbed(op_type, read)
        return origin

    def _mark(self, written: Iterable[tuple[Hashable, Flags]], event: Event | None) -> None:
        """Attribute non-finite values of the written tensors to ``event``, and mark the other tensors as clean."""
        if event is None and not self._taint:
            return
        for key, flags in written:
            if flags.bad and event is not None:
                self._taint[key] = event
            else:
                self._taint.pop(key, None)

    def output(self, name: str, key: Hashable, flags: Flags) -> None:
        """Record that the model returns a tensor."""
        event = self._taint.get(key)
        if event is None or not flags.bad:
            return
        event.reached.append(name)
        event.reported = event.reported or not event.meant or flags.nan

    @property
    def reported(self) -> list[Event]:
        """The faults, in execution order."""
        return [event for event in self.events if event.reported]

    def _event(self, op: str, op_type: str, meant: bool) -> Event:
        self.events.append(Event(len(self.events), op, op_type, meant))
        return self.events[-1]

    def _origin(
        self,
        op: str,
        op_type: str,
        read: Sequence[tuple[int, Event | None, Flags]],
        written: Sequence[tuple[Hashable, Flags]],
    ) -> Event | None:
        made = Flags(*(any(parts) for parts in zip(*(flags for _, flags in written), strict=True)))
        if not made.bad:
            return None
        unknown = bool(read) and all(event is None for _, event, _ in read)
        if read and not unknown:
            innocent = all(event is None or event.meant for _, event, _ in read)
            before = Flags(*map(any, zip(*(flags for _, _, flags in read), strict=True)))
            overflows = op_type == "Add" and made.pos_inf and not before.pos_inf  # beside a mask
            if not innocent or before.nan or not (made.nan or overflows):
                return None
        return self._event(op, op_type, meant=op_type in MAKERS and not made.nan)

    def _absorbed(self, op_type: str, read: Sequence[tuple[int, Event | None, Flags]]) -> None:
        for port, event, flags in read:
            if event is None or event.meant:
                continue
            divided = _DIVIDES.get(op_type) == port and not flags.nan and event.op_type != "Exp"
            if divided or (flags.nan and (op_type in _CHOOSES or op_type in _SWALLOWS)):
                event.reported = True


def _accuse_inputs(read: Sequence[tuple[int, Event | None, Flags]]) -> None:
    """Report infinities in model inputs that reach an operator with weights: they were not intended."""
    for _, event, _ in read:
        if event is not None and event.op_type == "input":
            event.meant, event.reported = False, True


def _blamed(events: Sequence[Event | None]) -> Event | None:
    """The earliest of the unintended events, else of the intended ones."""
    known = [event for event in events if event is not None]
    return min(known, key=lambda event: (event.meant, event.index), default=None)


_SITES_SHOWN = 8
_HEAD = ("site", "dtype", "range", "notes")


@dataclass(frozen=True)
class SiteHealth:
    """The health of one site, over all accepted calibration data (an activation) or over its values (a weight).

    Attributes:
        site, dtype: its name, and the type of its tensor.
        count, nan, pos_inf, neg_inf: how many elements were finite, NaN, +Inf and -Inf.
        lo, hi: bounds of the finite ones; ``nan`` where there were none.
        groups: how many groups of elements were looked at one by one: those with a scale of their own (channels or blocks),
            or the channels of a tensor with one scale, if some of them are constant; else 1.
        zero, constant: which of them held nothing but zeros, and nothing but one other value.
        saturated: in half precision, whether a value reached the largest number of the type.
        underflow: in half precision, whether all values lay below its smallest normal number.
        empty: how many tensors without elements came; they count nowhere else.
        layer: the operator that makes the channels, where it is known and not the site's own.
        kind: what the groups are called: ``channels`` or ``blocks``.
    """

    site: str
    dtype: str
    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    lo: float
    hi: float
    groups: int
    zero: tuple[int, ...]
    constant: tuple[int, ...]
    saturated: bool
    underflow: bool
    empty: int = 0
    layer: str = ""
    kind: str = "channels"

    _also = ("notes",)

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings as phrases; empty for a healthy site."""
        found = [f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.pos_inf, "+Inf"), (self.neg_inf, "-Inf")) if n]
        found += [
            self._told(which, what)
            for which, what in ((self.zero, "zero throughout"), (self.constant, "constant"))
            if which
        ]
        if self.saturated:
            found.append(f"it reaches the largest number of {self.dtype}")
        if self.underflow:
            found.append(f"all its values are below the smallest normal number of {self.dtype}")
        if self.empty:
            found.append(f"{self.empty} empty tensor{'s' if self.empty > 1 else ''}")
        if not self.count:
            found.append("no finite value was seen")
        return tuple(found)

    def _told(self, which: tuple[int, ...], what: str) -> str:
        if self.lo == self.hi:
            return f"it is {what}"
        shown = ", ".join(map(str, which[:_SITES_SHOWN]))
        more = f" and {len(which) - _SITES_SHOWN} more" if len(which) > _SITES_SHOWN else ""
        made = f" of {self.layer}" if self.layer else ""
        verb = "is" if len(which) == 1 else "are"
        return f"{len(which)} of {self.groups} {self.kind}{made} {verb} {what}: {shown}{more}"

    def __str__(self) -> str:
        return f"{self.site}: {'; '.join(self.notes) or f'in [{self.lo:.4g}, {self.hi:.4g}]'}"


class HealthTable(Tabular, list[SiteHealth]):
    """The health of every site, in order: a list that prints as a table, also in a notebook."""

    _rows = "rows"
    _also = ("rows",)

    @property
    def rows(self) -> tuple[SiteHealth, ...]:
        """The sites."""
        return tuple(self)

    def _cells(self) -> list[tuple[str, str, str, str]]:
        return [(h.site, h.dtype, f"[{h.lo:.4g}, {h.hi:.4g}]" if h.count else "", "; ".join(h.notes)) for h in self]

    def _summary(self) -> str:
        return f"{len(self)} sites, {sum(bool(h.notes) for h in self)} with notes"

    def __str__(self) -> str:
        return f"{text_table(_HEAD, self._cells())}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._cells(), notes=[self._summary()])


def site_health(
    site: str,
    statistics: MinMax | Histogram,
    dtype: str = "float32",
    empty: int = 0,
    *,
    channels: ConstantChannels | None = None,
    layer: str = "",
    kind: str = "channels",
) -> SiteHealth:
    """The health of a site.

    Args:
        site: its name.
        statistics: of everything that was seen there.
        dtype: of its tensor; halves are watched for saturation and underflow.
        empty: how many tensors without elements came.
        channels: of a site with one scale, those that are constant.
        layer, kind: for messages, see :class:`SiteHealth`.

    >>> import numpy as np
    >>> from bitwright.core.numerics.statistics import measure
    >>> from bitwright.core.numerics.granularity import PerChannel
    >>> x = np.float32([[0, 0], [2, 2], [1, np.nan], [-1, 1]])
    >>> print(site_health("conv1.weight", measure("minmax", x, PerChannel(0))))
    conv1.weight: 1 NaN; 1 of 4 channels is zero throughout: 0; 2 of 4 channels are constant: 1, 2
    """
    bounds = bounds_of(statistics)
    seen = bounds.count > 0
    same = seen & (bounds.lo == bounds.hi)
    zero = same & (bounds.lo == 0)
    groups = int(bounds.count.size)
    zeros, constants = (tuple(np.flatnonzero(which).tolist()) for which in (zero, same & ~zero))
    if groups == 1 and channels is not None and channels.count:
        groups, zeros, constants = channels.count, channels.zero, channels.constant
    some = bool(seen.any())
    lo = float(bounds.lo[seen].min()) if some else float("nan")
    hi = float(bounds.hi[seen].max()) if some else float("nan")
    half, magnitude = dtype in HALVES and some, max(-lo, hi)
    return SiteHealth(
        site,
        dtype,
        int(bounds.count.sum()),
        int(bounds.nan_count.sum()),
        int(bounds.pos_inf_count.sum()),
        int(bounds.neg_inf_count.sum()),
        lo,
        hi,
        groups,
        zeros,
        constants,
        half and magnitude >= LIMITS[dtype],
        half and 0 < magnitude < HALVES[dtype],
        empty,
        layer,
        kind,
    )
