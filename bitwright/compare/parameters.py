"""Constants that operators read, as floats: compared between two models, and exchanged for a targeted run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import spread
from bitwright.compare.cut import QDQ, array_of, constant_at, dequantizer, part_of, reads_constants, zero_points
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
        elif node.op_type not in QDQ:
            read += [(node, port, value) for port, value in _constants_of(node, static)]
    values, found = _evaluated(model, dict.fromkeys(value for _, _, value in read)), {}
    for node, port, value in read:
        array = values.get(value)
        if array is not None and array.size:
            key, role = (str(node.outputs[0].name), port), role_of(node, port)
            found[key] = Parameter(str(value.name), node.op_type, role, array, _step(value, array))
    return found


def _constants_of(node: ir.Node, static: set[ir.Node]) -> Iterator[tuple[int, ir.Value]]:
    for port, value in enumerate(node.inputs):
        if value is not None and (value.is_initializer() or value.producer() in static):
            yield port, value


def _evaluated(model: ir.Model, values: Iterable[ir.Value]) -> dict[ir.Value, Array]:
    """Floats: initializers as they are, and what operators make of constants, computed in one run."""
    held = {value: array_of(value) for value in values}
    wanted = [v for v, array in held.items() if array is None and (v.dtype is None or v.dtype in _FLOATS)]
    made = run_model(part_of(model, wanted), {}, "float") if wanted else {}
    found = {value: made.get(str(value.name)) if array is None else array for value, array in held.items()}
    return {value: array for value, array in found.items() if array is not None and array.dtype.kind == "f"}


def role_of(node: ir.Node, port: int) -> str:
    """What a constant at ``port`` is to ``node``."""
    if node.op_type in TRAITS["bias_port"] and port == 2:
        return "bias"
    if node.op_type in TRAITS["layer"]:
        return "weight"
    return "bias" if node.op_type == "Add" else "constant"


def _step(value: ir.Value, array: Array) -> Array | None:
    """One step of the grid that ``value`` was stored on."""
    maker = value.producer()
    while maker is not None and maker.op_type in ("Reshape", "Transpose", "Cast", "Identity"):
        source = maker.inputs[0]
        maker = None if source is None else source.producer()
    scale = constant_at(maker, 1) if maker is not None and maker.op_type in ("DequantizeLinear", "Mul") else None
    if maker is None or scale is None:
        return None
    if maker.op_type == "Mul" or maker is not value.producer():
        return np.asarray(scale.max())
    return spread(scale, maker.attributes.get_int("axis", 1), array)


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
        maker = dequantizer(by_output[name].inputs[port]) if name in by_output else None
        codes = None if maker is None else constant_at(maker, 0)
        if maker is not None and codes is not None:
            cleared = np.broadcast_to(zero_points(maker), codes.shape).astype(codes.dtype)
            maker.replace_input_with(0, builder.initializer(f"{name}_{port}_cleared", cleared))
            stored.add((name, port))
    give(model, {key: array for key, array in zeros.items() if key not in stored})


def narrow(model: ir.Model, outputs: set[str], bits: int) -> bool:
    """Store the weights of the operators that make ``outputs`` with ``bits`` bits less, their biases to match.

    Returns:
        Whether any of them has integer codes.
    """
    builder, factor, changed = Builder(model), 2.0**bits, False
    layers = [node for node in model.graph if node.op_type in TRAITS["layer"]]
    made = [layer for layer in layers if not outputs.isdisjoint(str(v.name) for v in layer.outputs)]
    for maker in (maker for layer in made for maker in _dequantized(layer)):
        codes, scale, zero = constant_at(maker, 0), constant_at(maker, 1), zero_points(maker)
        if codes is not None and scale is not None:
            less = (np.rint((codes.astype(np.float64) - zero) / factor) + zero).astype(codes.dtype)
            maker.replace_input_with(0, builder.initializer("coarser_q", less))
            more = (scale * np.float32(factor)).astype(np.float32)
            maker.replace_input_with(1, builder.initializer("coarser_scale", more))
            changed = True
    return changed


def _dequantized(layer: ir.Node) -> Iterator[ir.Node]:
    """What dequantizes its weight and bias, also a bias that an Add adds: runtimes make one layer of both."""
    values = [*layer.inputs[1:]]
    for reader, port in layer.outputs[0].uses() if layer.op_type == "MatMul" else ():
        values += [reader.inputs[1 - port]] if reader.op_type == "Add" else []
    yield from filter(None, map(dequantizer, values))
