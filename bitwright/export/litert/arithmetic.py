"""Elementwise operators: sums, products, activation functions, softmax; and reductions over axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.litert.flat import Grid
from bitwright.export.litert.lowering import Domain, Held, Lowering, Perm, clip_bounds

Array = NDArray[Any]

# ---------------------------------------------------------------------------------------------------- two operands

_TABLES = {"ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions", "DIV": "DivOptions"}
_OF_TWO = {
    "MAXIMUM": "MaximumMinimumOptions", "MINIMUM": "MaximumMinimumOptions", "POW": "PowOptions", "EQUAL": "EqualOptions",
    "GREATER": "GreaterOptions", "GREATER_EQUAL": "GreaterEqualOptions", "LESS": "LessOptions",
    "LESS_EQUAL": "LessEqualOptions", "LOGICAL_AND": "LogicalAndOptions", "LOGICAL_OR": "LogicalOrOptions",
    "SQUARED_DIFFERENCE": "SquaredDifferenceOptions", "FLOOR_MOD": "FloorModOptions",
}  # fmt: skip
_ONLY_FLOAT = "LiteRT has no integer kernel for it"
_EXACT_MEAN = 64  # elements from which on the first rounding of MEAN, to a whole step of the sum, hardly shows


def on_one_grid(out: Grid, inputs: Sequence[Grid]) -> str | None:
    """Put operands and result on one grid, for kernels that do not rescale."""
    same = all(grid == out for grid in inputs)
    return None if same else "its kernel needs one grid for inputs and output"


def _binary(kernel: str, low: Lowering, node: ir.Node) -> None:
    unless = _ONLY_FLOAT if kernel in ("DIV", "POW") else None
    accepts = on_one_grid if kernel in ("MAXIMUM", "MINIMUM") else (lambda out, ins: None)
    domain = low.domain(node, node.inputs, fuses=kernel in _TABLES, accepts=accepts, unless=unless)
    pairwise(low, domain, kernel, list(node.inputs))


def pairwise(low: Lowering, domain: Domain, kernel: str, values: Sequence[ir.Value | str | None]) -> None:
    """Write a binary operator with broadcasting, in the axis order of its operands."""
    rank = len(low.trace.shapes[domain.result])
    perm = low.order([v for v in values if isinstance(v, ir.Value)], rank)
    inputs = [broadcast(low, domain, value, rank, perm) for value in values]
    low.flat.op(kernel, inputs, [low.write(domain, perm)], binary_options(kernel, domain.activation))


def binary_options(kernel: str, activation: int = 0) -> dict[str, Any]:
    """Options of an operator of two operands."""
    if kernel not in _TABLES:
        return {"table": _OF_TWO[kernel]}
    options: dict[str, Any] = {"table": _TABLES[kernel], "fusedActivationFunction": activation}
    return {**options, "potScaleInt16": False} if kernel in ("ADD", "SUB") else options


def broadcast(low: Lowering, domain: Domain, value: ir.Value | str | None, rank: int, perm: Perm) -> int:
    """An operand of an operator of ``rank`` axes that computes in the order ``perm``."""
    held = low.get(value)
    if held.rank == rank:
        return low.read(domain, value, perm)
    if perm == tuple(range(rank)) or all(n == 1 for n in held.shape):
        return low.read(domain, value)  # broadcasting counts axes from the last
    wide = _widened(low, held, rank)
    return low.read(domain, wide.name, perm)


def _widened(low: Lowering, held: Held, rank: int) -> Held:
    """A copy of ``held`` with leading axes of length 1."""
    name, more = f"{held.name}_rank{rank}", rank - held.rank
    if name in low.held:
        return low.held[name]
    grid = held.grid
    if grid is not None and grid.axis is not None:
        grid = Grid(grid.dtype, grid.scale, grid.zero_point, grid.axis + more)
    wide = Held(name, (1,) * more + held.shape, (False,) * more + held.free, held.dtype, grid)
    low.held[name] = wide
    if held.array is not None:
        wide.array = held.array.reshape(wide.shape)
        return wide
    source = low.codes(held.name) if grid is not None else low.plain(held.name)
    tensor = low.scratch(name, wide.shape, wide.free, held.dtype, grid)
    low.reshape(source, tensor, [-1 if f else n for n, f in zip(wide.shape, wide.free, strict=True)])
    (wide.plain if grid is None else wide.codes)[wide.identity] = tensor
    return wide


# ---------------------------------------------------------------------------------------------------- one operand

# scale and zero point that the kernel's output has, of 8 and of 16 bits
_FIXED: dict[str, dict[str, tuple[float, int]]] = {
    "LOGISTIC": {"int8": (2.0**-8, -128), "int16": (2.0**-15, 0)},
    "SOFTMAX": {"int8": (2.0**-8, -128), "int16": (2.0**-15, 0)},
    "TANH": {"int8": (2.0**-7, 0), "int16": (2.0**-15, 0)},
}
_EIGHT_BITS = frozenset(("HARD_SWISH", "ELU", "GELU", "EXP", "LOG", "RSQRT", "SQRT", "ABS", "NEG"))
_INTEGER_UNARY = frozenset((*_FIXED, "HARD_SWISH", "ELU", "GELU", "EXP", "RSQRT", "LEAKY_RELU"))
_UNARY_OPTIONS = {
    "HARD_SWISH": "HardSwishOptions", "EXP": "ExpOptions", "ABS": "AbsOptions", "NEG": "NegOptions", "COS": "CosOptions",
    "SQUARE": "SquareOptions", "LOGICAL_NOT": "LogicalNotOptions", "SIGN": "SignOptions",
}  # fmt: skip


def fits(kernel: str) -> Callable[[Grid, Sequence[Grid]], str | None]:
    """Whether grids meet the constraints of a kernel with one operand."""

    def accepts(out: Grid, inputs: Sequence[Grid]) -> str | None:
        if kernel not in _INTEGER_UNARY:
            return _ONLY_FLOAT
        if kernel in _EIGHT_BITS and out.dtype != "int8":
            return "its integer kernel has 8 bits only"
        if kernel in _FIXED:
            scale, zero = _FIXED[kernel][out.dtype]
            if (np.float32(out.scale[0]), out.zero_point[0]) != (np.float32(scale), zero):
                return (
                    f"its kernel makes codes of scale {scale:g} and zero point {zero} only; simulate with the rules of "
                    "target='litert', which have that range"
                )
        return None

    return accepts


def unary(kernel: str, low: Lowering, node: ir.Node, options: dict[str, Any] | None = None) -> None:
    """Write an elementwise operator of one operand."""
    domain = low.domain(node, node.inputs[:1], fuses=False, accepts=fits(kernel))
    perm = low.order(node.inputs[:1], low.get(node.inputs[0]).rank)
    if options is None and kernel in _UNARY_OPTIONS:
        options = {"table": _UNARY_OPTIONS[kernel]}
    low.flat.op(kernel, [low.read(domain, node.inputs[0], perm)], [low.write(domain, perm)], options)


def _leaky_relu(low: Lowering, node: ir.Node) -> None:
    alpha = node.attributes.get_float("alpha", 0.01)
    unary("LEAKY_RELU", low, node, {"table": "LeakyReluOptions", "alpha": alpha})


def _gelu(low: Lowering, node: ir.Node) -> None:
    tanh = node.attributes.get_string("approximate", "none") == "tanh"
    unary("GELU", low, node, {"table": "GeluOptions", "approximate": tanh})


def _relu(low: Lowering, node: ir.Node) -> None:
    """Write a Relu or Clip that was not fused into a kernel before it."""
    activation = low.activation_of(node)
    kernel = {1: "RELU", 2: "RELU_N1_TO_1", 3: "RELU6"}.get(activation or 0)
    source = low.get(node.inputs[0])
    if kernel is None or kernel == "RELU_N1_TO_1":
        _clip(low, node)
        return
    domain = low.domain(node, node.inputs[:1], fuses=False)
    if not domain.integer and source.grid is not None and domain.why is None:
        domain = low.carried(node, node.inputs[0])  # zero is on every grid
        domain = domain if kernel == "RELU" else Domain(False, domain.result, 0)
    perm = low.order(node.inputs[:1], source.rank)
    low.flat.op(kernel, [low.read(domain, source.name, perm)], [low.write(domain, perm)])


def _clip(low: Lowering, node: ir.Node) -> None:
    """MINIMUM and MAXIMUM with the bounds; on codes where input and output lie on one grid."""
    bounds = clip_bounds(low, node)
    if np.isnan(bounds).any():
        low.refuse(node, "its bounds are computed", "clip with constants")
    source = low.get(node.inputs[0])
    domain = low.domain(node, node.inputs[:1], fuses=False, accepts=on_one_grid)
    perm = low.order(node.inputs[:1], source.rank)
    tensor, grid = low.read(domain, source.name, perm), domain.grid
    pairs = zip(("MAXIMUM", "MINIMUM"), bounds, strict=True)
    kinds = [(kind, bound) for kind, bound in pairs if np.isfinite(bound)]
    free = [source.free[j] for j in perm]
    dtype = source.dtype if grid is None else grid.dtype
    for i, (kind, bound) in enumerate(kinds):
        last = i == len(kinds) - 1
        out = low.write(domain, perm) if last else low.scratch(
            f"{source.name}_clipped", [source.shape[j] for j in perm], free, source.dtype, grid
        )  # fmt: skip
        limit = np.asarray(bound, source.dtype) if grid is None else on_grid(bound, grid)
        name = f"{node.outputs[0].name}_bound"
        constant = low.flat.tensor(name, (), dtype, grid, data=limit)
        low.flat.op(kind, [tensor, constant], [out], {"table": "MaximumMinimumOptions"})
        tensor = out
    if not kinds:
        low.flat.op("RESHAPE", [tensor], [low.write(domain, perm)])


def on_grid(number: float, grid: Grid) -> Array:
    """The code of ``number``, rounded as by QuantizeLinear."""
    info = np.iinfo(grid.dtype)
    code = np.rint(np.float32(number) / np.float32(grid.scale[0])) + grid.zero_point[0]
    return np.asarray(np.clip(code, info.min, info.max), grid.dtype)


def _prelu(low: Lowering, node: ir.Node) -> None:
    domain = low.domain(node, node.inputs, fuses=False)
    rank = low.get(node.inputs[0]).rank
    perm = low.order(node.inputs[:1], rank)
    slope = low.get(node.inputs[1])
    shaped = slope if slope.rank == rank else _widened(low, slope, rank)
    # the kernel's slopes have no axis of the batch
    if not shaped.constant or perm[0] != 0 or shaped.shape[0] != 1:
        low.refuse(node, "its slopes are computed, or differ along the batch", "use constant slopes, one per channel")
    array = shaped.array if domain.integer else shaped.floats()
    assert array is not None
    grid = shaped.grid if domain.integer else None
    stored = array.transpose(perm)[0]
    slopes = low.flat.tensor(slope.name, stored.shape, stored.dtype.name, grid, data=stored)
    low.flat.op("PRELU", [low.read(domain, node.inputs[0], perm), slopes], [low.write(domain, perm)])


# -------------------------------------------------------------------------------------------- along axes


def _softmax(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    axis = node.attributes.get_int("axis", -1) % held.rank
    perm = low.order(node.inputs[:1], held.rank)
    if perm[-1] != axis:
        perm = (*(i for i in range(held.rank) if i != axis), axis)
    domain = low.domain(node, node.inputs[:1], fuses=False, accepts=fits("SOFTMAX"))
    tensors = [low.read(domain, held.name, perm)], [low.write(domain, perm)]
    low.flat.op("SOFTMAX", *tensors, {"table": "SoftmaxOptions", "beta": 1.0})


def _log_softmax(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    axis = node.attributes.get_int("axis", -1) % held.rank
    perm = (*(i for i in range(held.rank) if i != axis), axis)
    domain = low.domain(node, node.inputs[:1], fuses=False, unless=_ONLY_FLOAT)
    tensors = [low.read(domain, held.name, perm)], [low.write(domain, perm)]
    low.flat.op("LOG_SOFTMAX", *tensors, {"table": "LogSoftmaxOptions"})


def reduce_axes(low: Lowering, node: ir.Node, rank: int) -> list[int]:
    """The axes that a Reduce operator works along, from 0."""
    given = low.known(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    axes = node.attributes.get_ints("axes", ()) if given is None else [int(a) for a in given.ravel()]
    if not axes and node.attributes.get_int("noop_with_empty_axes", 0) == 1:
        return []
    return sorted(a % rank for a in axes) or list(range(rank))


def reduce(kernel: str, low: Lowering, node: ir.Node) -> None:
    """A Reduce operator along constant axes."""
    held = low.get(node.inputs[0])
    axes = reduce_axes(low, node, held.rank)
    unless = None if kernel == "SUM" else _ONLY_FLOAT
    if kernel == "MEAN":
        few = int(np.prod([held.shape[a] for a in axes])) < _EXACT_MEAN
        unless = "its kernel rounds twice, which shows in means of few elements" if few else None
    accepts = (lambda out, ins: None) if kernel in ("MEAN", "SUM") else on_one_grid
    domain = low.domain(node, node.inputs[:1], fuses=False, accepts=accepts, unless=unless)
    reduce_to(low, domain, kernel, held, axes, bool(node.attributes.get_int("keepdims", 1)))


def reduce_to(low: Lowering, domain: Domain, kernel: str, held: Held, axes: Sequence[int], keeps: bool) -> None:
    """``kernel`` along ``axes`` of ``held``."""
    perm = next(iter(held.orders()), held.identity)
    stored = sorted(perm.index(a) for a in axes)
    source = low.read(domain, held.name, perm)
    left = [a for a in perm if a not in axes]
    out = perm if keeps else tuple(sorted(left).index(a) for a in left)
    argument = low.flat.constant("axes", np.asarray(stored, np.int32))
    options = {"table": "ReducerOptions", "keepDims": keeps}
    low.flat.op(kernel, [source, argument], [low.write(domain, out)], options)


LOWERINGS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **{
        onnx: partial(_binary, kernel)
        for onnx, kernel in (
            ("Add", "ADD"), ("Sub", "SUB"), ("Mul", "MUL"), ("Div", "DIV"), ("Max", "MAXIMUM"), ("Min", "MINIMUM"),
            ("Pow", "POW"), ("Equal", "EQUAL"), ("Greater", "GREATER"), ("GreaterOrEqual", "GREATER_EQUAL"), ("Less", "LESS"),
            ("LessOrEqual", "LESS_EQUAL"), ("And", "LOGICAL_AND"), ("Or", "LOGICAL_OR"),
        )
    },
    **{
        onnx: partial(unary, kernel)
        for onnx, kernel in (
            ("Sigmoid", "LOGISTIC"), ("Tanh", "TANH"), ("HardSwish", "HARD_SWISH"), ("Exp", "EXP"), ("Log", "LOG"),
            ("Sqrt", "SQRT"), ("Abs", "ABS"), ("Neg", "NEG"), ("Floor", "FLOOR"), ("Ceil", "CEIL"), ("Round", "ROUND"),
            ("Sin", "SIN"), ("Cos", "COS"), ("Not", "LOGICAL_NOT"), ("Sign", "SIGN"),
        )
    },
    "LeakyRelu": _leaky_relu,
    "Gelu": _gelu,
    "Relu": _relu,
    "Clip": _relu,
    "PRelu": _prelu,
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "ReduceSum": partial(reduce, "SUM"),
    "ReduceMax": partial(reduce, "REDUCE_MAX"),
    "ReduceMin": partial(reduce, "REDUCE_MIN"),
}  # fmt: skip
