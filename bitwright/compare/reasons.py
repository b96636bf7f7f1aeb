"""Reasons why codes of the exported file differ from the simulation's, and the bound of each.

A reason that is bounded does not excuse whatever it could explain. The value before rounding is measured, in float, and
two codes of one value may differ only where it lies on the border between them, give or take what the kernel's arithmetic
is known to be off by. A wrong weight, bias or scale moves values away from the borders, so it is never excused.

Sums that a default session of ONNX Runtime saturates on this CPU are found by a comparison with a session of exact sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import MOST_LSB, OUTPUT_FORMAT, SLACK, Agreement, compare, in_float64, step_of
from bitwright.compare.cut import Cut, Place
from bitwright.compare.runtime import EXACT_SUMS, Mode, offers_exact_sums, run_model
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.formats import FloatFormat, parse_format
from bitwright.core.numerics.integer_sums import INT32_MAX
from bitwright.executors.rounding import FOLDED_ERROR

Array = NDArray[Any]

# A float sum is off by u * sqrt(sum of T_i ** 2), u = 2 ** -24, for its partial sums T_i, where their roundings are independent
# (Higham, Accuracy and Stability of Numerical Algorithms, 2002, eq. 4.3; Higham and Mary 2019, DOI 10.1137/18M1226312): at
# most sqrt(n) * u of the largest partial sum, for which the largest result stands. 64 covers n = 4,096 summed one by one;
# kernels sum in blocks, and products of 1,024 and 4,096 terms were measured a sixth of that and less. At least a hundredth
# of a step, and never more than a quarter: sums that cancel so far that float32 itself is off by more are not excused.
_ULPS, _LEAST, _MOST = 64 * 2.0**-24, 0.01, 0.25

_SUMS = {
    *TRAITS["bias_port"],
    "MatMul", "Einsum", "AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum", "LayerNormalization",
    "GroupNormalization", "InstanceNormalization", "BatchNormalization", "RMSNormalization", "CumSum", "LRN",
    "Attention", "LSTM", "GRU", "RNN", "ReduceL2", "ReduceL1", "ReduceSumSquare", "LpNormalization", "Sum", "Mean",
}  # fmt: skip
_PRODUCTS = frozenset((*TRAITS["bias_port"], "MatMul", "Einsum"))
_FUNCTIONS = frozenset((
    "Softmax", "LogSoftmax", "Sigmoid", "Tanh", "Erf", "Gelu", "Exp", "Log", "Pow", "Sqrt", "Reciprocal",
    "Div", "Elu", "Softplus", "Mish", "HardSwish", "Selu", "Celu", "Sin", "Cos", "LSTM", "GRU", "RNN",
    "Resize", "HardSigmoid",
))  # fmt: skip

#: runtime -> steps of an 8-bit grid that its kernels are known to be off by, beside what float sums are: see
#: :func:`bitwright.executors.rounding.rescaled_folded`
KERNEL_ERRORS = {"qnn": FOLDED_ERROR}


@dataclass(frozen=True)
class Evidence:
    """Facts about a place whose codes differ.

    Attributes:
        ops: operator types of its piece of the graph.
        kernel: what the default mode ran last for it, or ``float``.
        runtime: operator types the default mode made of the piece.
        format: of the grid.
        float_params: ``weight``, ``bias``: which of them a Conv or Gemm has in float.
        found: agreement by mode.
        failures: modes the runtime refused.
        accumulated: the largest sum that an integer kernel may have to hold.
        halves: what half precision may add to its results, in parts of the largest.
        bias: what the int32 grid of a bias may add, which the simulation has in float.
        error: in steps, what kernels of the runtime are known to be off by, see :data:`KERNEL_ERRORS`.
    """

    ops: frozenset[str]
    kernel: str
    runtime: frozenset[str | None]
    format: str
    float_params: frozenset[str]
    found: Mapping[Mode, Agreement]
    failures: Mapping[Mode, str]
    accumulated: int = 0
    halves: float = 0.0
    bias: float = 0.0
    error: float = 0.0

    @classmethod
    def of(
        cls,
        place: Place,
        found: Mapping[Mode, Agreement],
        kernels: Mapping[str, str],
        failures: Mapping[Mode, str] | None = None,
        runtime: str = "onnxruntime",
    ) -> Evidence:
        """Collect the evidence on ``place``; ``kernels`` made the tensors in the default mode of ``runtime``."""
        piece = place.piece
        made = frozenset(map(kernels.get, piece.made))
        ops, params, fmt = frozenset(piece.ops), frozenset(piece.float_params), str(place.facts["format"])
        error = KERNEL_ERRORS.get(runtime, 0.0) if fmt in ("uint8", "int8") else 0.0
        bounds = (piece.accumulated, piece.rounding, piece.bias, error)
        return cls(ops, place.kernel(kernels), made, fmt, params, found, failures or {}, *bounds)

    @property
    def wide(self) -> bool:
        """Whether one step of the grid is about as fine as float32's own rounding of a sum."""
        if self.format == OUTPUT_FORMAT:
            return False
        fmt = parse_format(self.format)
        return isinstance(fmt, FloatFormat) or fmt.bits > 8

    @property
    def uses_integers(self) -> bool:
        """Whether an integer kernel computed the codes, or a product that float operators turn into them."""
        return self.kernel != "float" or any(
            kind == "MatMulIntegerToFloat" or str(kind).endswith((" u8", " i8")) for kind in self.runtime
        )

    @property
    def by_table(self) -> bool:
        """Whether the runtime's table for Softmax takes part."""
        return "QLinearSoftmax" in (self.kernel, *self.runtime)

    def differs(self, mode: Mode) -> bool:
        """Whether codes differ in ``mode``."""
        return self.found[mode].equal < 1


class Reason(NamedTuple):
    """``text`` where ``test`` holds; a ``bounded`` one may make codes agree, see :func:`measure`, and where codes are farther
    off than that ``beyond`` has another text.
    """

    test: Callable[[Evidence], bool]
    text: str
    bounded: bool = False
    beyond: Callable[[Evidence], str] | None = None


UNEXPLAINED = "unexplained: the operator computes something else than the simulation"
_SATURATES = "integer sums of uint8 times int8 saturate at 16 bits on CPUs without VNNI"

_ORDER = "the order of float summation differs"
_DROPPED = (
    "the operators of the file compute something else: a constant among them, such as a small one added before a division, a "
    "root or a logarithm, or an operator was dropped or changed when the file was made; compare them with this part of the model"
)
_SHORT_FACTORS = (
    f"codes are farther off than the {FOLDED_ERROR:.2g} of a step that the requantization of this runtime explains; compare "
    "them with its profile: bitwright drift FOLDER@simulation FOLDER@qnn"
)
_HALVES = "half precision rounds its results, in the simulation and in the runtime"
# First match wins; float mode first, because integer mode inherits what happens there.
FLOAT_REASONS: tuple[Reason, ...] = (
    Reason(lambda e: "float" in e.failures, "the runtime refused the model"),
    Reason(lambda e: e.halves > 0, _HALVES, bounded=True),
    Reason(
        lambda e: bool(e.ops & _SUMS) and e.wide,
        f"{_ORDER}, and a step of this fine grid is about as small",
        bounded=True,
    ),
    Reason(
        lambda e: e.bias > 0 and e.found["float"].lsb <= MOST_LSB + SLACK,
        "a bias that the simulation has in float is on the int32 grid of its accumulator",
        bounded=True,
    ),
    Reason(
        lambda e: bool(e.ops & _SUMS) and e.found["float"].lsb <= MOST_LSB + SLACK,
        _ORDER,
        bounded=True,
        beyond=lambda e: _DROPPED if e.ops & _FUNCTIONS else UNEXPLAINED,
    ),
    Reason(
        lambda e: bool(e.ops & _FUNCTIONS),
        "the runtime approximates this function in its own way",
        bounded=True,
        beyond=lambda e: _DROPPED,
    ),
)
INTEGER_REASONS: tuple[Reason, ...] = (
    Reason(lambda e: len(e.failures) == 2, "the runtime refused the model"),
    Reason(
        lambda e: e.format.startswith("int") and "[ONNXRuntimeError]" in e.failures.get("integer", ""),
        "the runtime refused the model; try session.qdqisint8allowed=1, or export with activation='unsigned'",
    ),
    Reason(lambda e: "integer" in e.failures, "the runtime refused the model"),
    Reason(lambda e: not e.found["float"].ok, "as with float kernels", bounded=True),
    Reason(
        lambda e: e.error > 0 and e.found["integer"].lsb <= MOST_LSB + SLACK,
        "this runtime cuts sums to 3 bits below the code and multiplies them by 11 bits, as profile htp does",
        bounded=True,
        beyond=lambda e: _SHORT_FACTORS,
    ),
    Reason(lambda e: e.halves > 0 and e.kernel == "float", _HALVES, bounded=True),
    Reason(
        lambda e: "MatMulNBits" in e.ops and not e.runtime & {"MatMulNBits"},
        "this runtime quantizes the activations of MatMulNBits by itself; export for it: target='openvino_cpu'",
    ),
    Reason(
        lambda e: "MatMulNBits" in e.runtime,
        "runs as MatMulNBits with int8 activations; export with weight_only='exact', or set "
        "session.qdq_matmulnbits_accuracy_level=1",
    ),
    Reason(
        lambda e: e.by_table and e.found["integer"].lsb > 2,
        "QLinearSoftmax overflows where the probabilities of a row are nearly equal; "
        "leave this output in float: sim.quantizers[...].enabled = False",
    ),
    Reason(lambda e: e.by_table, "QLinearSoftmax works with a table", bounded=True),
    Reason(lambda e: "weight" in e.float_params, "the runtime quantizes this float weight by itself"),
    Reason(
        lambda e: e.kernel == "float" and e.differs("float"),
        "no integer kernel, so it runs in float: as there",
        bounded=True,
    ),
    Reason(lambda e: "bias" in e.float_params, "the runtime quantizes this float bias by itself"),
    Reason(
        lambda e: e.uses_integers and e.accumulated > INT32_MAX and e.found["integer"].lsb > MOST_LSB + SLACK,
        "the int32 accumulator overflows: the inner length of this product is too large for codes of this width; leave "
        "its input in float (sim.quantizers[...].enabled = False), split the layer along its inner axis and add the "
        "parts, or give its weight fewer bits",
    ),
    Reason(
        lambda e: e.uses_integers and bool(e.ops & _PRODUCTS) and e.found["integer"].lsb > MOST_LSB + SLACK, _SATURATES
    ),
    Reason(
        lambda e: e.uses_integers and e.found["integer"].lsb <= MOST_LSB + SLACK,
        "the integer kernel rounds exact sums where the simulation rounds float sums",
        bounded=True,
        beyond=lambda e: _SATURATES if e.ops & _PRODUCTS else UNEXPLAINED,
    ),
    Reason(
        lambda e: e.kernel == "float" and e.found["integer"].lsb <= MOST_LSB + SLACK,
        "other float operators than those of the comparison with float kernels round in their own way",
        bounded=True,
        beyond=lambda e: UNEXPLAINED,
    ),
)
DRAWN = "its values are made of random numbers that the file draws anew in every run"
OTHER_CONSTANT = "the file holds another value: simulate with the encodings that were written"
_REASONS: dict[Mode, tuple[Reason, ...]] = {"float": FLOAT_REASONS, "integer": INTEGER_REASONS}


def reason_of(evidence: Evidence, mode: Mode) -> Reason:
    """The first reason that fits what happened in ``mode``; one that is not bounded where none does."""
    unknown = Reason(lambda e: True, UNEXPLAINED)
    return next((reason for reason in _REASONS[mode] if reason.test(evidence)), unknown)


def explain(evidence: Evidence) -> str | None:
    """The reason why codes differ, by mode; ``None`` where none differs."""
    lines = []
    for mode in (mode for mode in _REASONS if evidence.differs(mode)):
        reason, found = reason_of(evidence, mode), evidence.found[mode]
        is_beyond = not found.ok and found.off is not None and not found.within
        text = reason.beyond(evidence) if is_beyond and reason.beyond is not None else reason.text
        lines.append(f"{mode}: {text}")
    return "; ".join(lines) or None


def measure(
    evidence: Evidence,
    mode: Mode,
    expected: Array,
    found: Array,
    exact: Array,
    step: Array,
    scale: float,
    *,
    error: float = 0.0,
) -> tuple[float, float]:
    """How far codes that differ are from the value that both were rounded from.

    Args:
        evidence: of the place.
        mode: which of its two comparisons.
        expected, found: dequantized codes of the simulation and of the file, float, of one shape; where half precision rounded
            them, as :func:`~bitwright.compare.agreement.in_float64` gives them.
        exact: the value before rounding, as float kernels make it from the same input, limited to the grid.
        step: one step of the grid, broadcast against ``expected``.
        scale: the scale of the quantizer, for kernels whose table depends on it.
        error: in steps, what the arithmetic of the kernel that made ``found`` is otherwise known to be off by.

    Returns:
        ``(off, allowed)`` in steps, of the element that exceeds what is allowed to it most, or comes closest to it: the
        distance of the farther code from ``exact`` beyond the half step of correct rounding, and what the simulation's
        float arithmetic, or the kernel's, may add to it.
    """
    precision = 2 * float(np.finfo(exact.dtype).eps)
    one, other, value, step = (np.asarray(a, np.float64) for a in (expected, found, exact, step))
    differ = one != other
    step = np.broadcast_to(step, one.shape)[differ]
    bias = evidence.bias / step  # of the simulation alone: the value before rounding is the file's
    one, other, value = (a[differ] / step for a in (one, other, value))
    apart = np.abs(one - other - np.rint(one - other)) > 2 * SLACK  # codes of a grid with another scale
    # of a float format neighbours of a power of two have different distances
    on_one_grid = isinstance(parse_format(evidence.format), FloatFormat) or not apart.any()
    if not value.size or not np.isfinite(value).all() or not on_one_grid:
        return math.inf, 0.0
    peak = float(np.abs(value).max())
    rounding = max(min(_MOST, max(_LEAST, _ULPS * peak, precision * peak)), evidence.halves * peak)
    # QLinearSoftmax multiplies by 1 / scale, rounded down to an integer
    lost = 1.0 - math.floor(np.float32(1.0 / scale)) * scale if mode == "integer" and evidence.by_table else 0.0
    off = np.stack([np.abs(value - one), np.abs(value - other)]) - 0.5
    allowed = np.stack([rounding + bias, rounding + error + lost * np.abs(value)])
    at = np.unravel_index(int(np.argmax(np.nan_to_num(off - allowed, nan=np.inf))), off.shape)
    return float(off[at]), float(allowed[at])


def measured(
    evidence: Evidence, mode: Mode, place: Place, code: Array, rounded: Array, before: Array | None, error: float = 0.0
) -> Agreement:
    """The agreement of a place in ``mode``, with what :func:`measure` says where the value before rounding is known.

    Args:
        evidence, mode: see there.
        place: with the simulation's codes.
        code: what was made there.
        rounded: codes of the value before rounding; they stand for it where it lies outside the grid.
        before: the value before rounding, as float kernels make it.
        error: see there.
    """
    if before is None or before.shape != rounded.shape:
        return evidence.found[mode]
    step = step_of(place.expected, code, place.facts, place.scale)
    expected, code, rounded = in_float64(step, place.expected, code, rounded, codes=place.scale is not None)
    # beyond half a step from its own code a value lies outside the grid; on the border float32 may add SLACK, and half
    # precision more: a fused kernel does not round in between
    beyond = evidence.halves * float(np.abs(before).max(initial=0.0))
    outside = np.abs(before - rounded) > (0.5 + SLACK) * step + beyond
    value = np.where(outside, rounded, before).astype(np.promote_types(before.dtype, np.float32))
    scale = 1.0 if place.scale is None else float(np.max(place.scale))
    off, allowed = measure(evidence, mode, expected, code, value, step, scale, error=error)
    return replace(evidence.found[mode], off=off, allowed=allowed)


_MOST_NAMED = 5


@dataclass(frozen=True)
class Saturated:
    """Differences between a default session and one with exact sums.

    Attributes:
        places: site -> agreement of its codes in both sessions, where they do not agree; the worst run of several.
        refused: ONNX Runtime refuses the file where sums are to be exact, or does not make all of them so.
    """

    places: dict[str, Agreement]
    refused: bool

    def __str__(self) -> str:
        worst = sorted(self.places, key=lambda site: self.places[site].equal)
        named = [f"{site} ({self.places[site].equal:.1%} equal)" for site in worst[:_MOST_NAMED]]
        named += ["..."] * (len(worst) > _MOST_NAMED)
        remedy = "" if self.refused else "open the session with session.x64quantprecision = 1, or "
        return (
            "this CPU has no VNNI: with the default settings of a session, sums of uint8 times int8 saturate at 16 bits in "
            f"{len(worst)} places, {', '.join(named)}; {remedy}quantize with repair='saturation', or export with "
            "unsigned_weights=True, as an export on this CPU does by itself where its samples saturate"
        )


def saturated_places(model: ir.Model, cut: Cut, feeds: Mapping[str, Array]) -> Saturated | None:
    """Where the sums of a default session saturate; ``None`` if nowhere, as on other CPUs, after one small product.

    Args:
        model: the file, which ONNX Runtime takes.
        cut: of it.
        feeds: values of the graph's inputs and of what else all parts read.
    """
    if not sums_saturate():
        return None
    found: dict[str, Agreement] = {}
    for places in cut.groups():
        part, more = cut.part(places)
        given = {**feeds, **more}
        exact = run_model(part, given, "integer", entries=EXACT_SUMS)
        default = run_model(part, given, "integer")
        for place in places:
            name = str(place.result.name)
            agreement = _of_sessions(place, exact[name], default[name])
            for site, _ in place.facts["places"]:
                if not agreement.ok and (site not in found or agreement.equal < found[site].equal):
                    found[site] = agreement
    return Saturated(found, not offers_exact_sums(model)) if found else None


def _of_sessions(place: Place, exact: Array, default: Array) -> Agreement:
    """The agreement of two sessions; of other shapes, as rows have that a router sends to an expert, nothing agrees."""
    if exact.shape != default.shape:
        return Agreement(0.0, math.inf, exact.size)
    return compare(exact, default, place.facts, place.scale)


def sums_saturate() -> bool:
    """Whether a default session of ONNX Runtime adds pairs of products of uint8 and int8 in 16 bits on this CPU."""
    x_codes, w_codes = np.full((1, 2), 255, np.uint8), np.full((2, 1), 127, np.int8)
    values = [_constant("w", w_codes)]
    values += [_constant(name, np.float32(value)) for name, value in (("one", 1.0), ("step", 500.0))]
    values += [_constant("u", np.uint8(0)), _constant("s", np.int8(0))]
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape((1, 2)))
    w, one, step, u, s = values
    product = ir.node("QLinearMatMul", [x, one, u, w, one, s, step, u])
    (y,) = product.outputs
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.UINT8), ir.Shape((1, 1))
    graph = ir.Graph([x], [y], nodes=[product], initializers=values, opset_imports={"": 21}, name="pair")
    (code,) = run_model(ir.Model(graph, ir_version=10), {"x": x_codes}, "integer")["y"].ravel()
    return int(code) != round(2 * 255 * 127 / 500)  # 130; saturated 66


def _constant(name: str, array: Any) -> ir.Value:
    tensor = ir.tensor(np.asarray(array), name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(np.shape(array)), const_value=tensor)
