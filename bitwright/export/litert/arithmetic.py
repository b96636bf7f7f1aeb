"""Elementwise operators: sums, products, activation functions, softmax; reductions over axes; normalisations."""

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


_NO_KERNEL = "LiteRT has no integer kernel for it"


class Floats:
    """Writes float operators on tensors of one value's shape, in one order of axes.

    Args:
        low: the conversion.
        held: the value whose shape they have.
        perm: order of axes.
    """

    def __init__(self, low: Lowering, held: Held, perm: Perm) -> None:
        self.low, self.held, self.perm = low, held, perm

    def shape(self, axes: Sequence[int] = ()) -> tuple[list[int], list[bool]]:
        """Shape and free axes, with 1 along ``axes`` (as stored)."""
        sizes = [1 if i in axes else self.held.shape[a] for i, a in enumerate(self.perm)]
        return sizes, [i not in axes and self.held.free[a] for i, a in enumerate(self.perm)]

    def scratch(self, axes: Sequence[int] = ()) -> int:
        """A tensor of the shape, with 1 along ``axes``."""
        return self.low.scratch(f"{self.held.name}_part", *self.shape(axes))

    def number(self, value: float) -> int:
        """A constant."""
        return self.low.flat.constant("number", np.asarray(value, np.float32))

    def two(self, kernel: str, one: int, other: int, axes: Sequence[int] = (), out: int | None = None) -> int:
        """An operator of two operands."""
        made = self.scratch(axes) if out is None else out
        self.low.flat.op(kernel, [one, other], [made], binary_options(kernel))
        return made

    def one(self, kernel: str, source: int, axes: Sequence[int] = (), out: int | None = None) -> int:
        """An operator of one operand without options."""
        made = self.scratch(axes) if out is None else out
        self.low.flat.op(kernel, [source], [made])
        return made

    def mean(self, source: int, axes: Sequence[int]) -> int:
        """The mean along ``axes`` (as stored), which stay with length 1."""
        made = self.scratch(axes)
        argument = self.low.flat.constant("axes", np.asarray(sorted(axes), np.int32))
        self.low.flat.op("MEAN", [source, argument], [made], {"table": "ReducerOptions", "keepDims": True})
        return made

    def constant(self, array: np.ndarray, name: str) -> int:
        """``array``, which broadcasts in ONNX's order against the shape, in the order of axes used here."""
        rank = len(self.perm)
        wide = np.asarray(array, np.float32).reshape((1,) * (rank - array.ndim) + array.shape)
        stored = wide.transpose(self.perm)
        return self.low.flat.tensor(name, stored.shape, "float32", data=stored)


def _known(low: Lowering, node: ir.Node, port: int) -> np.ndarray | None:
    value = node.inputs[port] if len(node.inputs) > port else None
    if value is None:
        return None
    array = low.known(value)
    if array is None:
        low.refuse(node, "its scale or bias is computed", "use constants")
    return array


def _start(low: Lowering, node: ir.Node) -> tuple[Domain, Held, Perm]:
    held = low.get(node.inputs[0])
    domain = low.domain(node, node.inputs[:1], fuses=False, unless=_NO_KERNEL)
    return domain, held, next(iter(held.orders()), held.identity)


def _layer_norm(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    first = node.attributes.get_int("axis", -1) % held.rank
    scale, bias = _known(low, node, 1), _known(low, node, 2)
    _normalise(low, node, range(first, held.rank), scale, bias, node.attributes.get_float("epsilon", 1e-5), True)


def _rms_norm(low: Lowering, node: ir.Node) -> None:
    held = low.get(node.inputs[0])
    first = node.attributes.get_int("axis", -1) % held.rank
    scale = _known(low, node, 1)
    _normalise(low, node, range(first, held.rank), scale, None, node.attributes.get_float("epsilon", 1e-5), False)


def _instance_norm(low: Lowering, node: ir.Node) -> None:
    rank = low.get(node.inputs[0]).rank
    shaped = [
        a if a is None else a.reshape(-1, *(1,) * (rank - 2)) for a in (_known(low, node, 1), _known(low, node, 2))
    ]
    _normalise(low, node, range(2, rank), shaped[0], shaped[1], node.attributes.get_float("epsilon", 1e-5), True)


def _normalise(
    low: Lowering,
    node: ir.Node,
    axes: Sequence[int],
    scale: np.ndarray | None,
    bias: np.ndarray | None,
    epsilon: float,
    centred: bool,
) -> None:
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias`` along ``axes``; of RMS norms without the mean."""
    domain, held, perm = _start(low, node)
    write, along = Floats(low, held, perm), [perm.index(a) for a in axes]
    x = low.plain(held.name, perm)
    if centred:
        x = write.two("SUB", x, write.mean(x, along))
    power = write.mean(write.two("MUL", x, x), along)
    inverse = write.one("RSQRT", write.two("ADD", power, write.number(epsilon), along), along)
    steps = [("MUL", scale), ("ADD", bias)]
    left = [(kernel, array) for kernel, array in steps if array is not None]
    x = write.two("MUL", x, inverse, out=None if left else low.write(domain, perm))
    for i, (kernel, array) in enumerate(left):
        out = low.write(domain, perm) if i == len(left) - 1 else None
        x = write.two(kernel, x, write.constant(array, f"{domain.result}_{kernel.lower()}"), out=out)


def _batch_norm(low: Lowering, node: ir.Node) -> None:
    """One product and one sum per channel."""
    domain, held, perm = _start(low, node)
    scale, bias, mean, variance = (_known(low, node, port) for port in range(1, 5))
    assert scale is not None and bias is not None and mean is not None and variance is not None
    factor = scale / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    shape = (-1, *(1,) * (held.rank - 2))
    write = Floats(low, held, perm)
    x = write.two("MUL", low.plain(held.name, perm), write.constant(factor.reshape(shape), f"{domain.result}_mul"))
    shift = write.constant((bias - mean * factor).reshape(shape), f"{domain.result}_add")
    write.two("ADD", x, shift, out=low.write(domain, perm))


def _group_norm(low: Lowering, node: ir.Node) -> None:
    """An instance norm of the groups, which are made the channels by a change of shape."""
    held = low.get(node.inputs[0])
    domain = low.domain(node, node.inputs[:1], fuses=False, unless=_NO_KERNEL)
    groups, epsilon = node.attributes.get_int("num_groups", 1), node.attributes.get_float("epsilon", 1e-5)
    scale, bias = _known(low, node, 1), _known(low, node, 2)
    assert scale is not None and bias is not None
    n, channels, *spatial = held.shape
    if scale.size == groups and groups != channels:  # opset 18 to 20: one per group
        scale, bias = np.repeat(scale, channels // groups), np.repeat(bias, channels // groups)
    inner = Held(
        f"{held.name}_groups",
        (n, groups, int(np.prod(spatial)) * channels // groups),
        (held.free[0], False, False),
        "float32",
    )
    write = Floats(low, inner, (0, 1, 2))
    x = write.scratch()
    low.reshape(low.plain(held.name), x, [-1 if held.free[0] else n, *inner.shape[1:]])
    x = write.two("SUB", x, write.mean(x, [2]))
    power = write.mean(write.two("MUL", x, x), [2])
    x = write.two("MUL", x, write.one("RSQRT", write.two("ADD", power, write.number(epsilon), [2]), [2]))
    outer = Floats(low, held, held.identity)
    back = outer.scratch()
    low.reshape(x, back, [-1 if held.free[0] else n, *held.shape[1:]])
    shape = (-1, *(1,) * len(spatial))
    back = outer.two("MUL", back, outer.constant(scale.reshape(shape), f"{domain.result}_mul"))
    outer.two(
        "ADD", back, outer.constant(bias.reshape(shape), f"{domain.result}_add"), out=low.write(domain, held.identity)
    )


def _hard_sigmoid(low: Lowering, node: ir.Node) -> None:
    """``clip(alpha x + beta, 0, 1)``."""
    domain, held, perm = _start(low, node)
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    write = Floats(low, held, perm)
    x = write.two("MUL", low.plain(held.name, perm), write.number(alpha))
    x = write.two("MAXIMUM", write.two("ADD", x, write.number(beta)), write.number(0.0))
    write.two("MINIMUM", x, write.number(1.0), out=low.write(domain, perm))


def _reciprocal(low: Lowering, node: ir.Node) -> None:
    domain, held, perm = _start(low, node)
    write = Floats(low, held, perm)
    write.two("DIV", write.number(1.0), low.plain(held.name, perm), out=low.write(domain, perm))


def _elu(low: Lowering, node: ir.Node) -> None:
    """ELU; with another alpha and factor its negative part is scaled: ``g (max(x, 0) + alpha min(elu(x), 0))``."""
    domain, held, perm = _start(low, node)
    selu = node.op_type == "Selu"
    alpha = node.attributes.get_float("alpha", 1.6732632 if selu else 1.0)
    gain = node.attributes.get_float("gamma", 1.0507010) if selu else 1.0
    write, x = Floats(low, held, perm), low.plain(held.name, perm)
    if (alpha, gain) == (1.0, 1.0):
        write.one("ELU", x, out=low.write(domain, perm))
        return
    negative = write.two("MUL", write.two("MINIMUM", write.one("ELU", x), write.number(0.0)), write.number(alpha))
    total = write.two("ADD", write.two("MAXIMUM", x, write.number(0.0)), negative)
    write.two("MUL", total, write.number(gain), out=low.write(domain, perm))


def _softplus(low: Lowering, node: ir.Node) -> None:
    """``max(x, 0) + log(1 + exp(-|x|))``."""
    domain, held, perm = _start(low, node)
    write, x = Floats(low, held, perm), low.plain(held.name, perm)
    write.two("ADD", *_softplus_parts(write, x), out=low.write(domain, perm))


def _softplus_parts(write: Floats, x: int) -> tuple[int, int]:
    size = write.two("MAXIMUM", x, write.two("MUL", x, write.number(-1.0)))
    small = write.one("EXP", write.two("MUL", size, write.number(-1.0)))
    return write.two("MAXIMUM", x, write.number(0.0)), write.one("LOG", write.two("ADD", small, write.number(1.0)))


def _mish(low: Lowering, node: ir.Node) -> None:
    """``x tanh(softplus(x))``."""
    domain, held, perm = _start(low, node)
    write, x = Floats(low, held, perm), low.plain(held.name, perm)
    soft = write.two("ADD", *_softplus_parts(write, x))
    write.two("MUL", x, write.one("TANH", soft), out=low.write(domain, perm))


LOWERINGS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **{
        onnx: partial(_binary, kernel)
        for onnx, kernel in (
            ("Add", "ADD"),
            ("Sub", "SUB"),
            ("Mul", "MUL"),
            ("Div", "DIV"),
            ("Max", "MAXIMUM"),
            ("Min", "MINIMUM"),
            ("Pow", "POW"),
            ("Equal", "EQUAL"),
            ("Greater", "GREATER"),
            ("GreaterOrEqual", "GREATER_EQUAL"),
            ("Less", "LESS"),
            ("LessOrEqual", "LESS_EQUAL"),
            ("And", "LOGICAL_AND"),
            ("Or", "LOGICAL_OR"),
        )
    },
    **{
        onnx: partial(unary, kernel)
        for onnx, kernel in (
            ("Sigmoid", "LOGISTIC"),
            ("Tanh", "TANH"),
            ("HardSwish", "HARD_SWISH"),
            ("Exp", "EXP"),
            ("Log", "LOG"),
            ("Sqrt", "SQRT"),
            ("Abs", "ABS"),
            ("Neg", "NEG"),
            ("Floor", "FLOOR"),
            ("Ceil", "CEIL"),
            ("Round", "ROUND"),
            ("Sin", "SIN"),
            ("Cos", "COS"),
            ("Not", "LOGICAL_NOT"),
            ("Sign", "SIGN"),
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
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "HardSigmoid": _hard_sigmoid,
    "Reciprocal": _reciprocal,
    "Elu": _elu,
    "Selu": _elu,
    "Softplus": _softplus,
    "Mish": _mish,
}
