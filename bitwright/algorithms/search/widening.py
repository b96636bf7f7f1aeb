"""What it costs to raise quantizers above eight bits: shares of a model's work that leave the kernels on 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.layouts import Layouts
from bitwright.core.graph.ops import op_row
from bitwright.core.graph.work import KernelTimes, multiplications, size

_FUSED = 4  # operators that a runtime takes into a layer's kernel: a bias, a norm that stayed, an activation
_FLOAT_OUT = frozenset(("Gemm", "MatMul"))  # whose kernels on codes return float as well


class Neighbours:
    """The operators that read and make the values of each quantizer.

    Args:
        graph: of the simulated model.
        values: quantizer -> the values on its grid.
    """

    def __init__(self, graph: Graph, values: Mapping[int, Iterable[str]]) -> None:
        self.graph = graph
        self.key_of = {value: key for key, on_grid in values.items() for value in on_grid}
        self.work = {op.name: multiplications(graph, op) for op in graph.ops}
        self.readers: dict[int, tuple[Op, ...]] = {}
        self.makers: dict[int, tuple[Op, ...]] = {}
        for key, on_grid in values.items():
            self.readers[key] = _computing(op for v in on_grid for op, _ in graph.consumers(v))
            made = (self._maker(v) for v in on_grid)
            self.makers[key] = _computing(op for op in made if op is not None)

    def layers(self, key: int) -> set[str]:
        """Names of the layers that read or make its values and need more than 8 bits for it."""
        makers = (op for op in self.makers[key] if op.type not in _FLOAT_OUT)
        return {op.name for op in (*self.readers[key], *makers) if self.work[op.name]}

    def is_read(self, key: int) -> bool:
        """Whether a layer reads its values."""
        return any(self.work[op.name] for op in self.readers[key])

    def _maker(self, value: str) -> Op | None:
        """The operator whose kernel rounds ``value``: what makes it, or computes what the operators between the two read."""
        op = self.graph.producer(value)
        for _ in range(_FUSED):
            if op is None or self.work[op.name]:
                return op
            given = [v for _, v in op.sources() if not self.graph.values[v].is_static]
            if len(given) != 1 or given[0] in self.key_of:
                return op
            op = self.graph.producer(given[0])
        return op


def _computing(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Each of ``ops`` once, but for those that only move data."""
    return tuple({op.name: op for op in ops if op_row(op.type).kind != "movement"}.values())


class ByProducts:
    """Shares of the multiplications in layers that read or make raised values."""

    def __init__(self, around: Neighbours) -> None:
        self._around = around
        self._all = sum(around.work.values()) or 1.0

    def share(self, keys: Sequence[int]) -> float:
        """Of the model's multiplications, what raising ``keys`` takes off the kernels on 8-bit codes."""
        layers = {name for key in keys for name in self._around.layers(key)}
        return sum(self._around.work[name] for name in layers) / self._all


class ByTime:
    """Shares of the time that a runtime takes for the model on 8-bit codes, by its :class:`KernelTimes`.

    An operator that reads or makes a raised value works in float: what it reads on a grid is dequantized for it, and what it
    makes on one is quantized. A raised value between two such operators is converted no more, so that a share may be below
    that of fewer keys, and below zero. What the runtime transposes between convolutions in float and on codes, and around the
    additions after them, is in it.
    """

    def __init__(self, around: Neighbours, times: KernelTimes) -> None:
        graph = around.graph
        self._around, self._times = around, times
        self._rows = max(1, *(graph.values[v].shape[0] for v in graph.inputs if graph.values[v].shape))
        self._layouts = Layouts(graph)
        self._known: dict[frozenset[str], float] = {}  # convolutions on codes -> what their layouts take
        layers = sum(times.layer(graph, op)[1] + self._start(1) for op in graph.ops)
        self._moved = self._moving(set())
        self._all = layers + self._moved or 1.0

    def _start(self, operators: int) -> float:
        return operators * self._rows * self._times.operator

    def share(self, keys: Sequence[int]) -> float:
        """How much longer the model takes with ``keys`` raised, as a share."""
        raised = set(keys)
        found = (op for key in keys for op in (*self._around.readers[key], *self._makers(key)))
        ops = {op.name: op for op in found}
        longer = sum(self._longer(op, raised) for op in ops.values()) + self._moving(raised) - self._moved
        return (longer - sum(self._saved(key) for key in keys)) / self._all

    def _moving(self, raised: set[int]) -> float:
        """What transposes take, and pools on codes that have the channels first."""
        codes = frozenset(op.name for op in self._layouts.convolutions if self._on_codes(op, raised))
        if codes not in self._known:
            moved = self._layouts.moved(lambda op: op.name in codes)
            on_codes = tuple(op for op in moved.slow_pools if op.inputs[0] in self._around.key_of)
            moved = replace(moved, slow_pools=on_codes)
            self._known[codes] = self._layouts.time(moved, self._times, self._rows)
        return self._known[codes]

    def _on_codes(self, op: Op, raised: set[int]) -> bool:
        """Whether it reads and makes values on grids, none of them raised."""
        keys = [self._around.key_of.get(value) for value in (str(op.inputs[0]), *self._made(op))]
        return all(key is not None and key not in raised for key in keys)

    def _saved(self, key: int) -> float:
        """The conversion of what the model is given, or returns."""
        graph = self._around.graph
        ends = (v for v in (*graph.inputs, *graph.outputs) if self._around.key_of.get(v) == key)
        return sum(self._converted(v) for v in ends)

    def _makers(self, key: int) -> Iterable[Op]:
        return (op for op in self._around.makers[key] if op.type not in _FLOAT_OUT)

    def _longer(self, op: Op, raised: set[int]) -> float:
        in_float, on_codes = self._times.layer(self._around.graph, op)
        return in_float - on_codes + sum(self._converted(v) for v in self._borders(op, raised))

    def _borders(self, op: Op, raised: set[int]) -> Iterable[str]:
        """Values on grids between ``op`` in float and operators on codes."""
        key_of = self._around.key_of
        read = (v for v in dict.fromkeys(v for _, v in op.sources()) if not self._around.graph.values[v].is_static)
        around = (*read, *self._made(op))
        return (v for v in around if v in key_of and key_of[v] not in raised)

    def _made(self, op: Op) -> Iterable[str]:
        """What ``op`` makes, or what the operators make that a runtime takes into its kernel."""
        for value in op.outputs:
            for _ in range(_FUSED):
                reader = self._around.graph.sole_consumer(value)
                if value in self._around.key_of or reader is None or self._around.work[reader.name]:
                    break
                value = reader.outputs[0]
            yield value

    def _converted(self, value: str) -> float:
        # a conversion, and one of the layout of float kernels
        return size(self._around.graph, value) * self._times.conversion + self._start(2)
