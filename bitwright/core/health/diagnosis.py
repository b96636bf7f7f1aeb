"""Diagnose NaN and Inf: the cause at an operator, the remedy by cause, and the repair that a simulation can apply.

:func:`diagnose` receives the health of everything the operator read and wrote, in canonical port order, and tries the
cases of its type, then those that any operator may meet. A :class:`Repair` changes what one operator passes on and nothing
in the user's model: it can be listed, written to a manifest and undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bitwright.core.graph.recurrence import CELLS
from bitwright.core.health.report import HALVES, LIMITS, MAKERS, Culprit, HealthReport, TensorHealth
from bitwright.errors import ConfigError, close_matches
from bitwright.tables import Tabular, counted


class Finding(NamedTuple):
    """``cause``: a key of ``REMEDIES``; ``problem``: what happened, with the numbers seen; ``remedy``: a sentence."""

    cause: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Run:
    """One call of an operator.

    ``operands`` and ``outputs`` are in port order, ``None`` for a port that is not connected; ``needed`` is
    the largest magnitude of the result in a wider type, where the front end computed it.
    """

    op_type: str
    attrs: Mapping[str, Any]
    operands: Sequence[TensorHealth | None]
    outputs: Sequence[TensorHealth]
    needed: float | None = None

    def port(self, index: int) -> TensorHealth | None:
        """The operand at a port; ``None`` if it is missing or empty."""
        found = self.operands[index] if index < len(self.operands) else None
        return found if found is not None and found.size else None

    @property
    def dtype(self) -> str:
        """Dtype of the result."""
        return self.outputs[0].dtype if self.outputs else "float32"

    @property
    def nan(self) -> bool:
        """Whether the result holds NaN."""
        return any(out.nan for out in self.outputs)


class Remedy(NamedTuple):
    """Remedy of a cause: a sentence, and code for a PyTorch model and for an ONNX model."""

    text: str
    torch: str = ""
    onnx: str = ""


Front = Literal["torch", "onnx"]

REMEDIES: dict[str, Remedy] = {
    "division by zero": Remedy(
        "add a small epsilon to the divisor, or keep it away from zero",
        "x / y.clamp(min=eps)",
        "a Max node with a small constant before the divisor",
    ),
    "root of a negative number": Remedy(
        "keep the argument at zero or above before the root, or add an epsilon to a variance that rounding made negative",
        "x.clamp(min=0).sqrt()",
        "a Max node with 0 before the root",
    ),
    "reciprocal root of zero": Remedy(
        "add an epsilon under the root", "torch.rsqrt(x + eps)", "an Add node with a small constant before the root"
    ),
    "logarithm of a non-positive number": Remedy(
        "keep the argument above zero, or use the logarithm of the softmax, or of one more than the argument, where it comes "
        "from a softmax or a sum with one",
        "log(x.clamp(min=eps)), log_softmax, log1p",
        "a Max node with a small constant before the Log; LogSoftmax",
    ),
    "exponential overflow": Remedy(
        "subtract the largest element before the exponential, use a function that does so, or bound the argument",
        "softmax, logsumexp, softplus, x.clamp(max=80)",
        "Softmax, ReduceLogSumExp, Softplus, or a Min node with 80 before the Exp",
    ),
    "power out of domain": Remedy(
        "keep the base above zero, or use an integer exponent",
        "x.clamp(min=eps) ** p",
        "a Max node with a small constant before the Pow",
    ),
    "argument out of domain": Remedy(
        "keep the argument in the interval on which the function is defined",
        "x.clamp(-1 + eps, 1 - eps)",
        "a Clip node before it",
    ),
    "every element of a row is masked": Remedy(
        "let every row attend to something, or replace the rows without a key after the softmax; a mask of finite numbers "
        "(-1e4) avoids the NaN as well",
        "masked_fill(dead_rows, 0)",
        "a Where node after the Softmax",
    ),
    "half-precision overflow": Remedy(
        "keep this operator in float32 or bfloat16, or scale its input down before and its result up after it",
        "x.float()",
        "Cast nodes around it",
    ),
    "overflow": Remedy(
        "normalise the input or bound the activations; look for the layer before it whose values grow",
        "x.clamp(-1e4, 1e4)",
        "a Clip node",
    ),
    "negative variance": Remedy(
        "the running statistics are damaged: load the checkpoint again, or compute them anew over data",
        "run the model in train mode",
        "export the model again from a checkpoint that is sound",
    ),
    "zero variance": Remedy(
        "use an epsilon above zero in the normalisation layer", "eps=1e-5", "the attribute epsilon, 1e-5"
    ),
    "reduction over nothing": Remedy(
        "skip the reduction where there is nothing to reduce, or divide by a count of at least one; the unbiased variance needs "
        "two elements",
        "count.clamp(min=1), correction=0",
        "a Max node with 1 after the count",
    ),
    "zero times infinity": Remedy(
        "mask by selection, not by multiplying with zero", "where, masked_fill", "a Where node"
    ),
    "infinity minus infinity": Remedy(
        "use a finite mask constant such as -1e4, or combine boolean masks before they become numbers",
        "mask_a & mask_b",
        "an And node on the masks",
    ),
    "uninitialised memory": Remedy(
        "fill the buffer before it is read", "torch.zeros in place of torch.empty"
    ),
    "mask constant": Remedy("none is needed: quantization leaves mask constants out of ranges"),
    "NaN constant": Remedy(
        "the model writes this NaN itself: write a finite number, or remove it before it is used"
    ),
    "bad input data": Remedy("clean the data, or leave such samples out; the report names the first of them"),
    "bad parameter": Remedy("load or train the parameter again; no range can be taken from it"),
    "unknown": Remedy("look at the inputs above: one of them is outside of what the operator can take"),
}  # fmt: skip


def remedy(cause: str, front: Front | None = None) -> str:
    """The remedy of a cause, with the code for one front end.

    >>> remedy("zero times infinity", "onnx")
    'mask by selection, not by multiplying with zero (a Where node)'
    """
    found = REMEDIES[cause]
    how = "" if front is None else getattr(found, front)
    return f"{found.text} ({how})" if how else found.text


def diagnose(
    op_type: str,
    attrs: Mapping[str, Any],
    operands: Sequence[TensorHealth | None],
    outputs: Sequence[TensorHealth],
    needed: float | None = None,
    front: Front | None = None,
) -> Finding:
    """Find the cause why this call produced non-finite values from finite ones.

    Args:
        op_type: canonical type (``bitwright.core.graph.operators``), or the function's own name where it has none.
        attrs: its attributes (``epsilon``).
        operands: what it read, in port order, parameters at their ports, before it wrote anything.
        outputs: what it wrote.
        needed: largest magnitude of the result computed in a wider type, if it was.
        front: in whose words the remedy is.

    >>> from bitwright.core.health.report import measure_tensor
    >>> import numpy as np
    >>> x, zero = measure_tensor("x", np.ones(3)), measure_tensor("y", np.zeros(3))
    >>> diagnose("Div", {}, [x, zero], [measure_tensor("z", np.full(3, np.inf))])[:2]
    ('division by zero', 'the divisor y holds 3 zeros')
    """
    run = Run(op_type, attrs, operands, outputs, needed)
    for cause, when in (*_FIRST, *CASES.get(op_type, ()), *_LAST):
        problem = when(run)
        if problem is not None:
            return Finding(cause, problem, remedy(cause, front))
    return Finding("unknown", f"finite inputs became {_made(run)}", remedy("unknown", front))


When = Callable[[Run], str | None]
Case = tuple[str, When]


def _made(run: Run) -> str:
    counts = {
        what: sum(getattr(out, field) for out in run.outputs)
        for field, what in (("nan", "NaN"), ("pos_inf", "+Inf"), ("neg_inf", "-Inf"))
    }
    return " and ".join(f"{count} {what}" for what, count in counts.items() if count) or "no bad value"


# ---- cases by operator


def _zero(port: int, noun: str) -> When:
    def when(run: Run) -> str | None:
        x = run.port(port)
        return f"{noun} {x.name} holds {counted(x.zeros, 'zero')}" if x is not None and x.zeros else None

    return when


def _tiny(port: int, noun: str) -> When:
    """Diagnose a divisor so small that the quotient overflows."""

    def when(run: Run) -> str | None:
        x = run.port(port)
        if x is None or x.smallest is None or x.smallest >= 1e-3 or run.nan:
            return None
        return f"{noun} {x.name} comes down to {x.smallest:.3g}, and the quotient overflows {run.dtype}"

    return when


def _below(port: int, bound: float, noun: str, *, strictly: bool = True) -> When:
    def when(run: Run) -> str | None:
        x = run.port(port)
        if x is None or x.min is None or not (x.min < bound or (x.min == bound and not strictly)):
            return None
        return f"{noun} {x.name} comes down to {x.min:.6g}"

    return when


def _beyond(low: float, high: float, *, ends: bool = True) -> When:
    def when(run: Run) -> str | None:
        x = run.port(0)
        if x is None or x.min is None or x.max is None:
            return None
        if (low <= x.min and x.max <= high) if ends else (low < x.min and x.max < high):
            return None
        needs = f"[{low:g}, {high:g}]" if ends else f"the inside of [{low:g}, {high:g}]"
        return f"{x.name} lies in [{x.min:.6g}, {x.max:.6g}], and the function needs {needs}"

    return when


def _exponent(run: Run) -> str | None:
    x = run.port(0)
    limit = math.log(LIMITS.get(run.dtype, LIMITS["float32"]))
    if x is None or x.max is None or x.max <= limit:
        return None
    return f"{x.name} reaches {x.max:.6g}, and the exponential overflows {run.dtype} above {limit:.4g}"


def _power_of_zero(run: Run) -> str | None:
    base, exponent = run.port(0), run.port(1)
    if base is None or exponent is None or exponent.min is None or not (base.zeros and exponent.min < 0):
        return None
    return f"{base.name} holds {counted(base.zeros, 'zero')}, raised to {exponent.min:g}"


def _power_of_negative(run: Run) -> str | None:
    base, exponent = run.port(0), run.port(1)
    if base is None or exponent is None or base.min is None or exponent.min is None or exponent.max is None:
        return None
    whole = exponent.min == exponent.max and float(exponent.min).is_integer()
    if whole or base.min >= 0 or not run.nan:
        return None
    raised = f"{exponent.min:g}" if exponent.min == exponent.max else f"powers that are not whole ({exponent.name})"
    return f"{base.name} comes down to {base.min:.6g}, raised to {raised}"


def _masked_row(run: Run) -> str | None:
    x = run.port(0)
    if x is None or not x.neg_inf or not run.nan:
        return None
    return f"{x.neg_inf} of {x.size} elements of {x.name} are -Inf, and in some row all of them are"


def _negative_variance(run: Run) -> str | None:
    variance = run.port(4)
    epsilon = float(run.attrs.get("epsilon", 1e-5))
    if variance is None or variance.min is None or variance.min + epsilon >= 0:
        return None
    return f"the variance {variance.name} comes down to {variance.min:.6g}"


def _zero_variance(run: Run) -> str | None:
    variance, epsilon = run.port(4), float(run.attrs.get("epsilon", 1e-5))
    if epsilon > 0 or run.attrs.get("training") or variance is None or not variance.zeros:
        return None
    return f"the variance {variance.name} holds {counted(variance.zeros, 'zero')}, and epsilon is {epsilon:g}"


def _constant_rows(run: Run) -> str | None:
    epsilon = run.attrs.get("epsilon")
    if epsilon is None or float(epsilon) > 0 or not run.operands or run.port(0) is None:
        return None
    return f"epsilon is {float(epsilon):g}, and a group of {run.operands[0].name} has no variance"  # type: ignore[union-attr]


def _nothing(run: Run) -> str | None:
    x = run.operands[0] if run.operands else None
    if x is None or not any(out.size for out in run.outputs):
        return None
    if x.size == 0:
        return f"{x.name} of shape {list(x.shape)} has no element to reduce"
    return None


def _one_element(run: Run) -> str | None:
    x = run.port(0)
    if x is None or not run.nan or x.size != sum(out.size for out in run.outputs):
        return None
    return f"the unbiased variance of one element of {x.name} is 0 / 0"


_ROOT: tuple[Case, ...] = (("root of a negative number", _below(0, 0.0, "the argument")),)
_LOG: tuple[Case, ...] = (("logarithm of a non-positive number", _below(0, 0.0, "the argument", strictly=False)),)
_DIVIDE: tuple[Case, ...] = (
    ("division by zero", _zero(1, "the divisor")),
    ("division by zero", _tiny(1, "the divisor")),
)
_EXP: tuple[Case, ...] = (("exponential overflow", _exponent),)
_SOFTMAX: tuple[Case, ...] = (("every element of a row is masked", _masked_row),)
_NORM: tuple[Case, ...] = (("zero variance", _constant_rows),)
_EMPTY: tuple[Case, ...] = (("reduction over nothing", _nothing),)
_SPREAD: tuple[Case, ...] = (*_EMPTY, ("reduction over nothing", _one_element))
_UNIT: tuple[Case, ...] = (("argument out of domain", _beyond(-1.0, 1.0)),)
_MAKES: tuple[Case, ...] = (
    ("NaN constant", lambda run: "it writes NaN" if run.nan else None),
    ("mask constant", lambda run: f"it writes {_made(run)}"),
)

CASES: dict[str, tuple[Case, ...]] = {
    **dict.fromkeys(("Div", "FloorDiv", "Mod", "true_divide"), _DIVIDE),
    "Reciprocal": (("division by zero", _zero(0, "the divisor")), ("division by zero", _tiny(0, "the divisor"))),
    "Rsqrt": (*_ROOT, ("reciprocal root of zero", _zero(0, "the argument"))),
    "Sqrt": _ROOT,
    **dict.fromkeys(("Log", "log2", "log10", "Log2", "Log10", "xlogy", "LogSigmoid"), _LOG),
    "Log1p": (("logarithm of a non-positive number", _below(0, -1.0, "the argument", strictly=False)),),
    "logit": (("argument out of domain", _beyond(0.0, 1.0, ends=False)),),
    **dict.fromkeys(("Exp", "Expm1", "exp2", "Sinh", "Cosh"), _EXP),
    "Pow": (("division by zero", _power_of_zero), ("power out of domain", _power_of_negative)),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _SOFTMAX),
    "Attention": _SOFTMAX,
    "BatchNormalization": (("negative variance", _negative_variance), ("zero variance", _zero_variance)),
    **dict.fromkeys(
        ("LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization", "LpNormalization"),
        _NORM,
    ),
    **dict.fromkeys(("Asin", "Acos"), _UNIT),
    **dict.fromkeys(("Atanh", "atanh", "arctanh"), (("argument out of domain", _beyond(-1.0, 1.0, ends=False)),)),
    **dict.fromkeys(("Acosh", "acosh", "arccosh"), (("argument out of domain", _beyond(1.0, math.inf)),)),
    **dict.fromkeys(("ReduceMean", "AveragePool", "GlobalAveragePool", "ReduceLogSumExp", "ReduceLogSum"), _EMPTY),
    **dict.fromkeys(("Variance", "var", "std", "std_mean", "var_mean"), _SPREAD),
    **dict.fromkeys(MAKERS, _MAKES),
}


# ---- cases of any operator


def _bad_operand(kind: str) -> When:
    def when(run: Run) -> str | None:
        found = next((x for x in run.operands if x is not None and x.kind == kind and x.bad), None)
        if found is None or (kind != "param" and found.bad == found.neg_inf):
            return None
        index = "" if found.first_bad is None else f", the first at {list(found.first_bad)}"
        what = "parameter" if kind == "param" else "input"
        return f"the {what} {found.name} holds {found.nan} NaN and {found.inf} Inf{index}"

    return when


def _uninitialised(run: Run) -> str | None:
    if not run.attrs.get("uninitialised"):
        return None
    return "it reads memory that nothing was written to"


def _zero_times_infinity(run: Run) -> str | None:
    if run.op_type not in ("Mul", "MatMul", "Gemm", "Conv", "Einsum") or not run.nan:
        return None
    a, b = run.port(0), run.port(1)
    if a is None or b is None or not ((a.inf and b.zeros) or (b.inf and a.zeros)):
        return None
    infinite, zero = (a, b) if a.inf else (b, a)
    return f"{infinite.name} holds {infinite.inf} Inf, and {zero.name} holds {counted(zero.zeros, 'zero')}"


def _infinities_meet(run: Run) -> str | None:
    infinite = [x for x in run.operands if x is not None and x.inf]
    if not run.nan or not infinite:
        return None
    return f"{' and '.join(f'{x.name} holds {x.inf} Inf' for x in infinite)}, which cancel out to NaN"


def _given(run: Run) -> bool:
    """Whether the bad values may come from an operand; -Inf of a mask does not explain +Inf."""
    operands = [x for x in run.operands if x is not None]
    if any(out.pos_inf for out in run.outputs) and run.op_type == "Add":
        return any(x.nan or x.pos_inf for x in operands)
    return any(x.bad for x in operands)


def _half_overflow(run: Run) -> str | None:
    limit = LIMITS.get(run.dtype, math.inf)
    if run.dtype not in HALVES or _given(run):
        return None
    needed = run.needed if run.needed is not None else _estimate(run)
    if not needed > limit:
        return f"a sum inside it passes {limit:.5g}, the largest number of {run.dtype}"
    return f"the result reaches {needed:.4g}, and {run.dtype} ends at {limit:.5g}"


def _overflow(run: Run) -> str | None:
    if _given(run) or not any(out.inf or out.nan for out in run.outputs):
        return None
    reach = [f"{x.name} reaches {x.magnitude:.4g}" for x in run.operands if x is not None and x.size]
    limit = LIMITS.get(run.dtype, LIMITS["float32"])
    if not reach or max((x.magnitude for x in run.operands if x is not None), default=0.0) < 1e4:
        return None
    return f"the result passes {limit:.4g}, the largest number of {run.dtype}: {', '.join(reach)}"


def _estimate(run: Run) -> float:
    """An upper bound of the result's magnitude, from those of the operands."""
    sizes = [x.magnitude for x in run.operands if x is not None and x.size]
    if not sizes:
        return 0.0
    try:
        return _ESTIMATES.get(run.op_type, max)(sizes)
    except OverflowError:
        return math.inf


_ESTIMATES: dict[str, Callable[[Sequence[float]], float]] = {
    "Mul": math.prod,
    "Square": lambda sizes: sizes[0] * sizes[0],
    "Pow": lambda sizes: sizes[0] ** (sizes[1] if len(sizes) > 1 else 2.0),
    "Add": sum,
    "Sub": sum,
    "Exp": lambda sizes: math.exp(sizes[0]),
}

_FIRST: tuple[Case, ...] = (
    ("uninitialised memory", _uninitialised),
    ("bad parameter", _bad_operand("param")),
    ("bad input data", _bad_operand("input")),
)
_LAST: tuple[Case, ...] = (
    ("zero times infinity", _zero_times_infinity),
    ("infinity minus infinity", _infinities_meet),
    ("half-precision overflow", _half_overflow),
    ("overflow", _overflow),
)


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
    """Repair of one operator's output.

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
    """Result of ``stabilize``.

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
        """Undo the repairs; the simulation computes as it did before."""
        self._undo()

    def __str__(self) -> str:
        lines = [str(repair) for repair in self.repairs]
        return "\n".join([*lines, *(f"not repaired: {sentence}" for sentence in self.refused)])


def choose(
    report: HealthReport | None, repairs: Iterable[Repair] | None, known: set[str], able: Callable[[str], bool] = bool
) -> tuple[tuple[Repair, ...], tuple[str, ...]]:
    """The repairs to apply, and the faults without a repair, as :func:`propose` returns them.

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
    """The repairs of the faults in a report, and a sentence for every fault without one.

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
