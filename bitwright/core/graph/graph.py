"""The read-only data-flow graph that both front ends give to rules, placement and algorithms.

One :class:`Op` stands for one place in the model. A place that runs several times in one forward (a reused module,
a loop over time steps) is still one op; what later runs read is kept beside the first run's inputs in ``Op.also``,
so that no value counts as private that a second run hands elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

UNKNOWN_TYPE = "unknown"
ValueKind = Literal["input", "param", "constant", "activation"]


@dataclass(frozen=True)
class Value:
    """A tensor of the model.

    Attributes:
        name: unique in the graph.
        kind: ``input`` of the model, ``param`` (parameter, buffer, initializer), ``constant`` (made inside the model from
            nothing but constants and parameters), or ``activation``.
        shape: as seen in the recorded run.
        dtype: ``float32``, ``int64``, ``bool``, ..., or :data:`UNKNOWN_TYPE`.
        param: name of the parameter, for ``param`` values.
        sources: for ``constant`` values, names of the parameters it was computed from: who changes one of them changes
            the readers of this value too.
        made_anew: of a ``constant``, whether every run makes it again, and not from what is stored alone, or cuts it to a
            length of the input: it is no weight, and follows the lengths of the inputs, as a bias per position does.
        read_by_code: whether the code of the model takes it for a number or a truth, to decide what it computes.
    """

    name: str
    kind: ValueKind
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    param: str | None = None
    sources: tuple[str, ...] = ()
    made_anew: bool = False
    read_by_code: bool = False

    @property
    def is_float(self) -> bool:
        """Whether the tensor holds floating-point numbers, the only ones that can be quantized."""
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def is_static(self) -> bool:
        """Whether the value is the same in every run on inputs of one shape: a parameter or a constant."""
        return self.kind in ("param", "constant")


@dataclass(frozen=True)
class Op:
    """One operator at one place of the model.

    Attributes:
        name: unique, readable: ``layer1.0.conv1``, ``layer1.0.add``.
        type: canonical operator type, in ONNX vocabulary (see :mod:`bitwright.core.graph.operators`).
        inputs: value name per port, in ONNX port order; ``None`` where a port is empty or no tensor.
        outputs: value names.
        attrs: what the op table needs to know (``group``, ``transB``, ``pads``, ...), of the first run; ``varies`` is True
            when a later run of the place had others.
        calls: how often the place ran in the recorded run.
        also: ``(port, value)`` pairs that later runs of the same place read.
        module: path of the module or name of the function the place belongs to.
        inner: of a recurrent layer, what is computed inside a step: name (:mod:`bitwright.core.graph.recurrence`) -> value, in
            order of computation. ``hidden`` is the output with all steps, where there is one; the others are values of
            their own that no operator reads.
    """

    name: str
    type: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 1
    also: tuple[tuple[int, str], ...] = ()
    module: str = ""
    inner: Mapping[str, str] = field(default_factory=dict)

    def sources(self) -> Iterator[tuple[int, str]]:
        """``(port, value)`` of every operand that any run of this operator read."""
        for port, value in enumerate(self.inputs):
            if value is not None:
                yield port, value
        yield from self.also


class Graph:
    """Ops in execution order, values by name, inputs and outputs; iterative traversal only.

    Args:
        ops: in execution order.
        values: every value that an op or the model reads or writes.
        inputs: names of the model's input values.
        outputs: names of the values the model returns.
    """

    def __init__(
        self, ops: Sequence[Op], values: Mapping[str, Value], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self.ops = tuple(ops)
        self.values = dict(values)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    @cached_property
    def _by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def _producers(self) -> dict[str, Op]:
        return {value: op for op in self.ops for value in (*op.inner.values(), *op.outputs)}

    @cached_property
    def _consumers(self) -> dict[str, tuple[tuple[Op, int], ...]]:
        found: dict[str, dict[tuple[str, int], tuple[Op, int]]] = {}
        for op in self.ops:
            for port, value in op.sources():
                found.setdefault(value, {})[op.name, port] = (op, port)
        return {value: tuple(pairs.values()) for value, pairs in found.items()}

    @cached_property
    def _output_set(self) -> frozenset[str]:
        return frozenset(self.outputs)

    def static(self) -> set[str]:
        """Names of the parameters and constants."""
        return {value.name for value in self.values.values() if value.is_static}

    def op(self, name: str) -> Op:
        """The op called ``name``; KeyError if there is none."""
        return self._by_name[name]

    def producer(self, value: str) -> Op | None:
        """The op that computes ``value``; ``None`` for inputs, parameters and constants."""
        return self._producers.get(value)

    def consumers(self, value: str) -> tuple[tuple[Op, int], ...]:
        """Each ``(op, port)`` that reads ``value``, once, in execution order."""
        return self._consumers.get(value, ())

    def is_output(self, value: str) -> bool:
        """Whether the model returns ``value``."""
        return value in self._output_set

    def sole_consumer(self, value: str) -> Op | None:
        """The only reader of ``value``, or ``None`` when there are several, none, or the model returns it too."""
        readers = self.consumers(value)
        return readers[0][0] if len(readers) == 1 and not self.is_output(value) else None

    def follow(self, value: str, takes: Callable[[Op], bool]) -> tuple[list[Op], str]:
        """The operators behind ``value``, each the only reader of the one before, as far as ``takes`` holds; the last value."""
        found: list[Op] = []
        while (reader := self.sole_consumer(value)) is not None and takes(reader):
            found.append(reader)
            value = reader.outputs[0]
        return found, value

    def plain(self) -> list[tuple[Any, ...]]:
        """The operators as numbers and texts, the same in every process: what the graph computes, without its tensors."""
        return [
            (op.name, op.type, op.inputs, op.outputs, op.also, [(k, v) for k, v in op.attrs.items() if _is_plain(v)])
            for op in self.ops
        ]

    def __len__(self) -> int:
        return len(self.ops)

    def __repr__(self) -> str:
        return f"Graph({len(self.ops)} ops, {len(self.values)} values, {len(self.inputs)} inputs, {len(self.outputs)} outputs)"


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or a tuple or list of them."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def reached(start: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    """The values ``start``, and all that ``following`` leads to from them, step by step."""
    stack = list(start)
    found = set(stack)
    while stack:
        for value in following(stack.pop()):
            if value not in found:
                found.add(value)
                stack.append(value)
    return found
