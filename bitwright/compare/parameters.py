"""Constants that operators read, as floats: compared between two models, and exchanged for a targeted run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import spread
from bitwright.compare.cut import reads_constants
from bitwright.compare.runtime import run_model
from bitwright.core.graph.operators import TRAITS
from bitwright.export.qdq.forms import Builder

Array = NDArray[Any]
Key = tuple[str, int]  # name of an operator's first output, and the port

_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16))


@dataclass(frozen=True)
class Parameter:
    """A constant that an operator reads.

    Attributes:
        name: of the tensor.
        op: type of the operator.
        role: ``weight``, ``bias`` or ``constant``.
        value: in float.
        step: one step of its grid, broadcast against ``value``; ``None`` where it is stored in float.
    """

    name: str
    op: str
    role: str
    value: Array
    step: Array | None

    def apart(self, other: Array) -> float:
        """The largest difference to ``other``, in steps of the grid; in ten-thousandths of its largest value without one."""
        peak = float(np.abs(self.value).max(initial=0.0)) or 1.0
        step = np.float64(1e-4 * peak) if self.step is None else self.step.astype(np.float64)
        gap = np.abs(self.value.astype(np.float64) - other.astype(np.float64)) / step
        return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))


def parameters(model: ir.Model) -> dict[Key, Parameter]:
    """Every float constant that an operator of the main graph reads beside values that depend on the input."""
    static: set[ir.Node] = set()
    read: list[tuple[ir.Node, int, ir.Value]] = []
    for node in model.graph:
        if reads_constants(node, static):
            static.add(node)
        elif node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            read += _constants_of(node, static)
    values = _evaluated(model, [value for _, _, value in read], static)
    found = {}
    for node, port, value in read:
        array = values.get(value)
        if array is not None and array.dtype.kind == "f" and array.size:
            step = _step(value, array)
            key, role = (str(node.outputs[0].name), port), role_of(node, port)
            found[key] = Parameter(str(value.name), node.op_type, role, array, step)
    return found


def _constants_of(node: ir.Node, static: set[ir.Node]) -> Iterator[tuple[ir.Node, int, ir.Value]]:
    for port, value in enumerate(node.inputs):
        if value is not None and (value.is_initializer() or value.producer() in static):
            yield node, port, value


def role_of(node: ir.Node, port: int) -> str:
    """What a constant at ``port`` is to ``node``."""
    if node.op_type in TRAITS["bias_port"] and port == 2:
        return "bias"
    if node.op_type in TRAITS["layer"]:
        return "weight"
    return "bias" if node.op_type == "Add" else "constant"


def _evaluated(model: ir.Model, values: list[ir.Value], static: set[ir.Node]) -> dict[ir.Value, Array]:
    """Initializers as they are, and what ``static`` operators make, computed in one run."""
    found = {v: np.asarray(v.const_value.numpy()) for v in values if v.const_value is not None}
    made = [v for v in dict.fromkeys(values) if v not in found and (v.dtype is None or v.dtype in _FLOATS)]
    if not made:
        return found
    nodes = [node for node in model.graph if node in static]
    needed = {v for node in nodes for v in node.inputs if v is not None and v.is_initializer()}
    view = ir.GraphView([], made, nodes=nodes, initializers=sorted(needed, key=lambda v: str(v.name)),
                        opset_imports=dict(model.graph.opset_imports), name="constants")  # fmt: skip
    part = ir.Model(view.clone(), ir_version=model.ir_version)
    results = run_model(part, {}, "float")
    return {**found, **{value: results[str(value.name)] for value in made}}


def _step(value: ir.Value, array: Array) -> Array | None:
    """One step of the grid that ``value`` was stored on."""
    maker = value.producer()
    while maker is not None and maker.op_type in ("Reshape", "Transpose", "Cast", "Identity"):
        source = maker.inputs[0]
        maker = None if source is None else source.producer()
    if maker is None or maker.op_type not in ("DequantizeLinear", "Mul") or len(maker.inputs) < 2:
        return None
    given = maker.inputs[1]
    scale = None if given is None or given.const_value is None else given.const_value.numpy()
    if scale is None:
        return None
    if maker.op_type == "Mul" or maker is not value.producer():
        return np.asarray(scale.max())
    return np.asarray(spread(scale, maker.attributes.get_int("axis", 1), array))


def give(model: ir.Model, values: Mapping[Key, Array]) -> None:
    """Let operators of ``model`` read other constants, in float; those of another shape stay."""
    builder = Builder(model)
    by_output = {str(node.outputs[0].name): node for node in model.graph if node.outputs}
    for (name, port), array in values.items():
        node = by_output.get(name)
        old = None if node is None or len(node.inputs) <= port else node.inputs[port]
        if node is None or old is None:
            continue
        dtype = old.dtype.numpy() if old.dtype is not None else np.dtype(np.float32)
        node.replace_input_with(port, builder.initializer(f"{old.name}_given", array.astype(dtype)))


def clear(model: ir.Model, zeros: Mapping[Key, Array]) -> None:
    """Let operators of ``model`` read zeros, in floats of the shape that is given, or as codes where they read codes.

    A runtime picks its kernels by what stands in the graph. With a float bias in the place of codes it may compute in float
    what it computes on integers, and a difference is gone that the bias had no part in.
    """
    builder, stored = Builder(model), set[Key]()
    by_output = {str(node.outputs[0].name): node for node in model.graph if node.outputs}
    for name, port in zeros:
        value = by_output[name].inputs[port] if name in by_output else None
        maker = None if value is None else value.producer()
        codes = maker.inputs[0] if maker is not None and maker.op_type == "DequantizeLinear" else None
        if maker is not None and codes is not None and codes.const_value is not None:
            cleared = np.broadcast_to(_zero_point(maker), codes.const_value.shape.numpy())
            held = cleared.astype(codes.const_value.numpy().dtype)
            maker.replace_input_with(0, builder.initializer(f"{codes.name}_cleared", held))
            stored.add((name, port))
    give(model, {key: array for key, array in zeros.items() if key not in stored})


def narrow(model: ir.Model, outputs: set[str], bits: int) -> bool:
    """Store the weights of the operators that make ``outputs`` with ``bits`` bits less, their biases to match.

    Returns:
        Whether any of them has integer codes.
    """
    changed = False
    for node in model.graph:
        if outputs.intersection(str(v.name) for v in node.outputs) and node.op_type in TRAITS["layer"]:
            for maker in [*_dequantized(node)]:
                changed = _coarser(model, maker, 2.0**bits) or changed
    return changed


def _dequantized(layer: ir.Node) -> Iterator[ir.Node]:
    """What dequantizes its weight and bias, also a bias that an Add adds: runtimes make one layer of both."""
    values = [*layer.inputs[1:]]
    for reader, port in layer.outputs[0].uses() if layer.op_type == "MatMul" else ():
        values += [reader.inputs[1 - port]] if reader.op_type == "Add" else []
    makers = (value.producer() for value in values if value is not None)
    yield from (maker for maker in makers if maker is not None and maker.op_type == "DequantizeLinear")


def _coarser(model: ir.Model, node: ir.Node, factor: float) -> bool:
    """Let a DequantizeLinear of a constant hold codes divided by ``factor``, rounded; whether it is one."""
    codes, scale = (value.const_value if value is not None else None for value in node.inputs[:2])
    if codes is None or scale is None:
        return False
    whole, zero = codes.numpy().astype(np.float64), _zero_point(node)
    less = (np.rint((whole - zero) / factor) + zero).astype(codes.numpy().dtype)
    builder = Builder(model)
    node.replace_input_with(0, builder.initializer("coarser_q", less))
    more = (scale.numpy() * np.float32(factor)).astype(np.float32)
    node.replace_input_with(1, builder.initializer("coarser_scale", more))
    return True


def _zero_point(node: ir.Node) -> Array:
    """The codes that stand for zero in what a DequantizeLinear reads, so that they broadcast against it."""
    codes, given = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    if codes is None or codes.const_value is None or given is None or given.const_value is None:
        return np.zeros(())
    axis = node.attributes.get_int("axis", 1)
    return np.asarray(spread(given.const_value.numpy(), axis, codes.const_value.numpy()))
