"""Write normalisations and other functions as float operators of LiteRT."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from bitwright.export.litert.arithmetic import binary_options
from bitwright.export.litert.lowering import Domain, Held, Lowering, Perm

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
