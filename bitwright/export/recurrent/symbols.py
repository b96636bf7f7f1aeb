"""Tensors whose arithmetic writes nodes; :func:`bitwright.core.graph.recurrence.step` computes with them in a Scan's body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.export.qdq.forms import Builder, Place
from bitwright.export.recurrent.layers import Layer


@dataclass
class NodeWriter:
    """Writes nodes at one place under names that begin with the layer's."""

    builder: Builder
    place: Place
    layer: Layer
    constants: dict[tuple[Any, ...], ir.Value] = field(default_factory=dict)

    def emit(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        suffix: str,
        shape: Sequence[int | None] | None = None,
        dtype: ir.DataType | None = None,
        count: int = 1,
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """The outputs of a new node."""
        names, base = self.builder.names, f"{self.layer.node.name}_{suffix}"
        node = ir.node(op, inputs, attributes, num_outputs=count, name=names.node(f"{base}/{op}"))
        for value in node.outputs:
            value.name, value.type = names.value(base), ir.TensorType(dtype or self.layer.dtype)
            value.shape = None if shape is None else ir.Shape(shape)
        self.place(node)
        return tuple(node.outputs)

    def one(self, op: str, inputs: Sequence[ir.Value | None], suffix: str, *rest: Any, **kwargs: Any) -> ir.Value:
        """The output of a new node that has one."""
        return self.emit(op, inputs, suffix, *rest, **kwargs)[0]

    def constant(self, array: Any, suffix: str) -> ir.Value:
        """An initializer with this value, the same one for equal values."""
        array = np.asarray(array)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = self.builder.initializer(f"{self.layer.node.name}_{suffix}", array)
        return self.constants[key]

    def number(self, x: float, suffix: str) -> ir.Value:
        """A scalar of the layer's type."""
        return self.constant(np.asarray(x, self.layer.dtype.numpy()), suffix)

    def split(self, value: ir.Value, sizes: Sequence[int], suffix: str, axis: int = -1) -> tuple[ir.Value, ...]:
        """Parts of ``value`` along ``axis``; itself where there is only one."""
        if len(sizes) == 1:
            return (value,)
        parts = self.emit(
            "Split", [value, self.constant(np.asarray(sizes, np.int64), "sizes")], suffix, count=len(sizes), axis=axis
        )
        for part, size in zip(parts, sizes, strict=True):
            if value.shape is not None and axis == -1:
                part.shape = ir.Shape([*value.shape[:-1], size])
        return parts

    def matrix(self, port: int, columns: int) -> ir.Value:
        """The weight ``[1, rows, columns]`` at ``port`` as ``[columns, rows]``, for products from the left."""
        value = self.layer.node.inputs[port]
        assert value is not None
        turned = self.one("Transpose", [value], f"{port}_transposed", (1, None, None), value.dtype, perm=[0, 2, 1])
        axes = self.constant(np.asarray([0], np.int64), "axes")
        return self.one("Squeeze", [turned, axes], f"{port}_matrix", (None, columns), value.dtype)


class Symbol:
    """A tensor inside the body; arithmetic on it writes nodes."""

    def __init__(self, pen: NodeWriter, value: ir.Value) -> None:
        self.pen, self._value = pen, value

    @property
    def value(self) -> ir.Value:
        """The tensor itself."""
        return self._value

    def _with(self, op: str, left: Any, right: Any) -> Symbol:
        operands = [x.value if isinstance(x, Symbol) else self.pen.number(x, "number") for x in (left, right)]
        shape = (1, None, self.pen.layer.hidden)
        return Symbol(self.pen, self.pen.one(op, operands, op.lower(), shape))

    def __add__(self, other: Any) -> Symbol:
        return self._with("Add", self, other)

    def __mul__(self, other: Any) -> Symbol:
        return self._with("Mul", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return self._with("Sub", other, self)


class Block:
    """Several gates side by side in one tensor, ``[..., gates * hidden]``; split when one of them is needed alone."""

    def __init__(self, pen: NodeWriter, value: ir.Value, gates: tuple[str, ...]) -> None:
        self.pen, self.value, self.gates = pen, value, gates
        self._sums: dict[ir.Value, Block] = {}
        self._parts: tuple[ir.Value, ...] = ()

    def __add__(self, other: Block) -> Block:
        if other.value not in self._sums:
            shape = (1, None, self.pen.layer.hidden * len(self.gates))
            total = self.pen.one("Add", [self.value, other.value], "pre", shape)
            self._sums[other.value] = Block(self.pen, total, self.gates)
        return self._sums[other.value]

    def part(self, gate: str) -> ir.Value:
        """The tensor of one gate."""
        if not self._parts:
            self._parts = self.pen.split(self.value, [self.pen.layer.hidden] * len(self.gates), "gate")
        return self._parts[self.gates.index(gate)]

    def symbols(self) -> dict[str, Symbol]:
        """Gate -> symbol."""
        return {gate: Gate(self, gate) for gate in self.gates}


class Gate(Symbol):
    """One gate of a block: sums of two blocks are written once for all their gates."""

    def __init__(self, block: Block, gate: str) -> None:
        self.pen, self.block, self.gate = block.pen, block, gate

    @property
    def value(self) -> ir.Value:
        """The gate alone, split from its block."""
        return self.block.part(self.gate)

    def __add__(self, other: Any) -> Symbol:
        if isinstance(other, Gate) and other.block.gates == self.block.gates:
            return Gate(self.block + other.block, self.gate)
        return super().__add__(other)
