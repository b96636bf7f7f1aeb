"""From a diagnosis to the repairs that a simulation applies.

A repair changes what one operator hands on, and nothing in the user's model: it can be listed, written to a manifest and
undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from bitwright.core.graph.recurrence import CELLS
from bitwright.core.health.report import LIMITS, Culprit, HealthReport
from bitwright.errors import ConfigError, close_matches
from bitwright.tables import Tabular

RepairKind = Literal["clamp", "replace", "float"]
REPAIR_KINDS: tuple[RepairKind, ...] = ("clamp", "replace", "float")

#: cause -> how it is repaired; a cause that is missing here cannot be: the data or the parameter is what is wrong
REPAIRS: dict[str, RepairKind] = {
    "exponential overflow": "clamp",
    "overflow": "clamp",
    "half-precision overflow": "clamp",
    "power out of domain": "replace",
    "division by zero": "replace",
    "root of a negative number": "replace",
    "reciprocal root of zero": "replace",
    "logarithm of a non-positive number": "replace",
    "argument out of domain": "replace",
    "every element of a row is masked": "replace",
    "zero variance": "replace",
    "negative variance": "replace",
    "reduction over nothing": "replace",
    "zero times infinity": "replace",
    "infinity minus infinity": "replace",
    "NaN constant": "replace",
    "unknown": "replace",
}


@dataclass(frozen=True)
class Repair:
    """What becomes of the output of one operator.

    Attributes:
        op: its name in the simulation.
        kind: ``clamp`` bounds finite and infinite values, ``replace`` exchanges only those that are not finite, ``float``
            leaves the operator's sites in float and its values alone.
        lo, hi: what ``-inf`` and ``inf`` become, and for ``clamp`` the bounds of everything else.
        nan: what NaN becomes.
        cause: of the diagnosis it answers.
    """

    op: str
    kind: RepairKind
    lo: float = 0.0
    hi: float = 0.0
    nan: float = 0.0
    cause: str = ""

    def __post_init__(self) -> None:
        finite = all(math.isfinite(value) for value in (self.lo, self.hi, self.nan))
        if self.kind not in REPAIR_KINDS or not finite or self.lo > self.hi:
            raise ConfigError(
                f"Repair({self.op!r})",
                f"kind={self.kind!r}, lo={self.lo!r}, hi={self.hi!r}, nan={self.nan!r} is not a repair",
                f"use one of {', '.join(REPAIR_KINDS)}, and finite numbers with lo <= hi",
            )

    def __str__(self) -> str:
        if self.kind == "float":
            return f"{self.op}: its sites stay in float"
        what = "all values" if self.kind == "clamp" else "NaN and Inf"
        return f"{self.op}: {what} brought into [{self.lo:g}, {self.hi:g}], NaN to {self.nan:g} ({self.cause})"


@dataclass(frozen=True, eq=False)
class Stabilized(Tabular):
    """What ``stabilize`` of a front end did to a simulation.

    Attributes:
        sim: the simulation.
        repairs: in effect until :meth:`undo`.
        refused: a sentence for every fault that no repair can answer: bad data, a bad parameter.
    """

    _rows = "repairs"

    sim: Any = field(repr=False)
    repairs: tuple[Repair, ...]
    refused: tuple[str, ...]
    _undo: Callable[[], None]

    def undo(self) -> None:
        """Take the repairs back; the simulation computes as before."""
        self._undo()

    def __str__(self) -> str:
        lines = [str(repair) for repair in self.repairs]
        return "\n".join([*lines, *(f"not repaired: {sentence}" for sentence in self.refused)])


def choose(
    report: HealthReport | None, repairs: Iterable[Repair] | None, known: set[str], able: Callable[[str], bool] = bool
) -> tuple[tuple[Repair, ...], tuple[str, ...]]:
    """The repairs to apply, and what no repair can answer, as :func:`propose` gives them.

    Args:
        report, repairs: what ``stabilize`` was given; ``repairs`` win over those that the report proposes.
        known: operators of the simulation.
        able: whether an operator has a result that can be repaired; what the report proposes elsewhere is refused.

    Raises:
        ConfigError: neither was given, or a repair names no operator of the simulation.
    """
    if report is None and repairs is None:
        raise ConfigError("stabilize", "it got neither a report nor repairs", "pass check_model(model, data)")
    proposed, refused = propose(report) if report is not None else ((), ())
    if repairs is None:
        refused += tuple(
            f"{repair.op}: {repair.cause}; the simulation has no result of this name that it can repair"
            for repair in proposed
            if not (repair.op in known and able(repair.op))
        )
        return tuple(r for r in proposed if r.op in known and able(r.op)), refused
    chosen = tuple(repairs)
    for repair in chosen:
        if repair.op not in known:
            raise ConfigError(
                f"Repair({repair.op!r})",
                f"the simulation has no operator of this name{close_matches(repair.op, known)}",
                "run check_model on the model that is simulated; sim.graph lists its operators",
            )
    return chosen, refused


def propose(report: HealthReport) -> tuple[tuple[Repair, ...], tuple[str, ...]]:
    """The repairs that answer a report, and a sentence for every fault that no repair can answer.

    ``+inf`` and ``-inf`` become the bounds of what the operator made of the other elements, so that ranges stay what they
    are, and NaN becomes 0 or the nearest of these. Where it overflowed, these bounds are at least the square root of the
    largest number of the type, either way, and everything is clamped to them: what is computed next (a sum, a product) does
    not overflow again, as it would from the largest number on. What overflows inside the steps of a recurrent layer cannot be
    reached from after it.

    >>> from bitwright.core.health.report import measure_tensor
    >>> import numpy as np
    >>> y = measure_tensor("y", np.float32([1, 4, np.inf]))
    >>> culprit = Culprit("d", "Div", "", "division by zero", "", "", outputs=(y,))
    >>> print(propose(HealthReport("m", (culprit,)))[0][0])
    d: NaN and Inf brought into [1, 4], NaN to 1 (division by zero)
    """
    repairs, refused = [], []
    for culprit in report.culprits:
        kind = REPAIRS.get(culprit.cause)
        inside = kind == "clamp" and culprit.op_type in CELLS
        if kind is None or inside or culprit.op_type in ("input", "param"):
            where = " inside its steps" if inside else ""
            refused.append(f"{culprit.op}: {culprit.cause}{where}; {culprit.remedy}")
        else:
            repairs.append(_repair(culprit, kind))
    return tuple(repairs), tuple(refused)


def _repair(culprit: Culprit, kind: RepairKind) -> Repair:
    finite = [out for out in culprit.outputs if out.min is not None and out.max is not None]
    lo = min((out.min for out in finite if out.min is not None), default=0.0)
    hi = max((out.max for out in finite if out.max is not None), default=0.0)
    if kind == "clamp":
        room = headroom(culprit.outputs[0].dtype if culprit.outputs else "float32")
        lo, hi = min(lo, -room), max(hi, room)
    return Repair(culprit.op, kind, lo, hi, min(max(0.0, lo), hi), culprit.cause)


def headroom(dtype: str) -> float:
    """The largest number whose square a type can hold: 256 in float16, 1.8e19 in float32.

    >>> round(headroom("float16"))
    256
    """
    return math.sqrt(LIMITS.get(dtype, LIMITS["float32"]))
