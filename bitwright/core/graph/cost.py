"""Costs of operators: multiplications from recorded shapes, and transposes between memory layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS, op_row
from bitwright.errors import ConfigError

_IMAGE = 4  # axes of a batch of images


def size(graph: Graph, value: str) -> float:
    """Elements of a value; axes of unknown length count as 1."""
    return float(np.prod([max(n, 1) for n in graph.values[value].shape]))


def is_image(graph: Graph, value: str) -> bool:
    """Whether a value that a run computes has the axes of a batch of images."""
    found = graph.values[value]
    return not found.is_static and len(found.shape) == _IMAGE


def multiplications(graph: Graph, op: Op) -> float:
    """Multiplications of an operator that multiplies matrices, of the recorded run; 0 for the others."""
    row = op_row(op.type)
    if row.kind != "compute" or not op.outputs or op.inputs[0] is None:
        return 0.0
    made, read = size(graph, op.outputs[0]), graph.values[op.inputs[0]].shape
    weight = op.inputs[1] if len(op.inputs) > 1 else None
    if op.type in ("Conv", "ConvTranspose") and weight is not None:
        positions = made if op.type == "Conv" else size(graph, op.inputs[0])
        return positions * float(np.prod(graph.values[weight].shape[1:]))
    if op.type in ("LSTM", "GRU", "RNN"):
        steps = float(np.prod(read[:-1])) if read else 1.0
        return steps * sum(size(graph, v) for v in op.inputs[1:3] if v is not None)
    inner = read[-1 if not op.attrs.get("transA") else 0] if read else 1
    return made * max(inner, 1)


def lifetimes(graph: Graph) -> dict[str, slice]:
    """Value that a run computes -> the operators during which it is kept in memory."""
    ends = {name: len(graph.ops) for name in graph.outputs}
    born = dict.fromkeys(graph.inputs, 0)
    for i, op in enumerate(graph.ops):
        born.update(dict.fromkeys(op.outputs, i))
        for _, value in op.sources():
            ends[value] = max(ends.get(value, 0), i)
    live = [v for v in born if v in graph.values and not graph.values[v].is_static]
    return {value: slice(born[value], ends.get(value, born[value]) + 1) for value in live}


@dataclass(frozen=True)
class KernelTimes:
    """Times of layers in float and on 8-bit codes in one runtime, in nanoseconds on one core. Only ratios count.

    Attributes:
        product: per multiplication of a layer, in float and on codes.
        result: per number that a layer makes, in float and on codes.
        depthwise: per number that a depthwise convolution makes, in float and on codes.
        patch: on codes, per row of the patches that a convolution of fewer than four channels copies: some numbers at a time.
        conversion: per number that is quantized or dequantized between the two.
        operator: for one operator, whatever its size; per sample.
        transpose: per number that is transposed between kernels which want the channels of images last, and others.
        pool: per number that a MaxPool on codes makes while the channels come first, beyond what it takes while they come last.
        layers: the operators that have kernels of either kind.
    """

    product: tuple[float, float]
    result: tuple[float, float]
    depthwise: tuple[float, float]
    patch: float
    conversion: float
    operator: float
    transpose: float = 0.0
    pool: float = 0.0
    layers: frozenset[str] = frozenset(("Conv", "Gemm", "MatMul"))

    def layer(self, graph: Graph, op: Op) -> tuple[float, float]:
        """Times of ``op`` in float and on codes; equal where there is no integer kernel."""
        made = size(graph, op.outputs[0]) if op.outputs else 0.0
        if op.type not in self.layers or not multiplications(graph, op):
            return (0.0, 0.0)
        weight = graph.values[str(op.inputs[1])].shape
        if op.type == "Conv" and weight[1] == 1 and op.attrs.get("group", 1) > 1:
            return (made * self.depthwise[0], made * self.depthwise[1])
        products = multiplications(graph, op)
        in_float, on_codes = (a * products + b * made for a, b in zip(self.product, self.result, strict=True))
        if op.type == "Conv" and weight[1] < 4:
            on_codes += self.patch * made / weight[0] * float(np.prod(weight[2:-1]))
        return (in_float, on_codes)


# operators that compute the same whichever axis holds the channels, beside those that are pointwise and merge
_ANY_LAYOUT = frozenset((
    *TRAITS["identity"], "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "Pad", "Slice", "ReduceMean",
))  # fmt: skip


@dataclass(frozen=True)
class Moved:
    """Transposes caused by one choice of kernels.

    Attributes:
        transposed: values that are transposed, as the layout they are made in is not the one in which they are read.
        slow_pools: MaxPool operators on codes with the channels first, whose kernels are slow then.
    """

    transposed: tuple[str, ...] = ()
    slow_pools: tuple[Op, ...] = ()


class Layouts:
    """The layout in which each image of a graph is held, for any choice of convolutions on codes.

    A convolution on codes reads and makes images with the channels last, in float with the channels first. ONNX Runtime moves a
    transpose past an operator that works in either layout where all of the images that it reads are transposed: one
    image with the channels first keeps a sum, and what is read from it, so. A MaxPool that alone reads what a convolution in
    float makes is in float too: see :mod:`bitwright.export.qdq.rewrites`.

    Args:
        graph: in execution order.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        read = ((op, self._images(op)) for op in graph.ops)
        self._ops = [(op, images) for op, images in read if images]
        self.convolutions = [op for op, _ in self._ops if op.type == "Conv"]
        self._before = {op.name: self._convolution_before(op) for op, _ in self._ops if op.type == "MaxPool"}

    def moved(self, on_codes: Callable[[Op], bool]) -> Moved:
        """Transposes needed where the convolutions for which ``on_codes`` holds have integer kernels."""
        last: set[str] = set()  # values with the channels last
        wanted: dict[str, set[bool]] = {}  # value -> whether its readers want the channels last
        pools: list[Op] = []
        for op, images in self._ops if self.convolutions else ():
            here = on_codes(op) if op.type == "Conv" else _in_any_layout(op) and last.issuperset(images)
            for value in images:
                wanted.setdefault(value, set()).add(here)
            if here:
                last.update(op.outputs)
            elif op.type == "MaxPool" and not self._pools_floats(op, on_codes):
                pools.append(op)
        for value in self._graph.outputs:
            wanted.setdefault(value, set()).add(False)
        moved = (value for value, layouts in wanted.items() if (value not in last) in layouts)
        return Moved(tuple(moved), tuple(pools))

    def _pools_floats(self, pool: Op, on_codes: Callable[[Op], bool]) -> bool:
        before = self._before[pool.name]
        return before is not None and not on_codes(before)

    def _convolution_before(self, pool: Op) -> Op | None:
        """The convolution whose result ``pool`` alone reads, perhaps after operators on each number of it."""
        op: Op | None = pool
        while op is not None and op.type != "Conv":
            read = self._images(op)
            fits = len(read) == 1 and (op.type == "MaxPool" or op_row(op.type).kind in ("pointwise", "merge"))
            alone = fits and self._graph.sole_consumer(read[0]) is op
            op = self._graph.producer(read[0]) if alone else None
        return op

    def _images(self, op: Op) -> list[str]:
        """The images that an operator reads."""
        return [value for value in dict.fromkeys(v for _, v in op.sources()) if is_image(self._graph, value)]

    def time(self, moved: Moved, times: KernelTimes, rows: int = 1) -> float:
        """Time of ``moved`` in nanoseconds.

        Args:
            moved: of this graph.
            times: of the runtime's kernels.
            rows: samples in the recorded run.
        """
        transposed = sum(size(self._graph, value) for value in moved.transposed)
        pooled = sum(size(self._graph, op.outputs[0]) for op in moved.slow_pools)
        started = rows * len(moved.transposed) * times.operator
        return started + transposed * times.transpose + pooled * times.pool


def _in_any_layout(op: Op) -> bool:
    return op.type in _ANY_LAYOUT or op_row(op.type).kind in ("pointwise", "merge")


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str, argument: str = "memory") -> int:
    """A number of bytes with a unit.

    >>> parse_bytes("512KiB"), parse_bytes("1.5 MB")
    (524288, 1500000)

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS or float(found[1]) == 0:
        raise ConfigError(argument, f"{text!r} is no number of bytes", "write 512KiB, 2MiB, 600kB or 524288")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def counts_bytes(cost: str) -> bool:
    """Whether the cost called ``name`` counts bytes."""
    return cost.endswith("bytes") or cost == "memory"


def as_bound(cost: str, asked: float | str, argument: str) -> float:
    """A bound on a cost as a number: bytes may be written with their unit.

    >>> as_bound("memory", "2kB", "budget"), as_bound("macs", 0.5, "target")
    (2000.0, 0.5)

    Raises:
        ConfigError: it is neither a number nor bytes of a cost that is counted in bytes.
    """
    if not isinstance(asked, str):
        return float(asked)
    if not counts_bytes(cost):
        raise ConfigError(argument, f"{asked!r} of {cost} is no number", f"write a number: {{{cost!r}: 0.5}}")
    return float(parse_bytes(asked, argument))
