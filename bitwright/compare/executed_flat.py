"""Execute a LiteRT file as a target would, without the target: integer operators by the executors of a profile.

Operators that only move codes, those in float, and integer ones that the profile does not name are computed by LiteRT's kernel of
that one operator: the reference kernel, or under ``xnnpack`` the default one, whose float functions have other last bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.compare.executed import Held
from bitwright.compare.litert import MOVES_CODES, FlatFile
from bitwright.errors import ExportError
from bitwright.executors.litert import FLAT_KERNELS
from bitwright.executors.profile import Profile
from bitwright.executors.tensors import Call, Grid, Tensor
from bitwright.export.litert.flat import pack, schema
from bitwright.runtimes.adapters import LitertSession, flat_edges, session_of
from bitwright.runtimes.onnxruntime import as_file_inputs, as_values

Array = NDArray[Any]
Feeds = Mapping[str, Array]

#: operators whose executors compute on codes of 8 bits only
_EIGHT_BITS = frozenset(("SOFTMAX", "LOGISTIC", "TANH", "RESIZE_BILINEAR"))


class FlatExecutor:
    """A LiteRT file as a target computes it.

    Args:
        content: of the file, as an export wrote it.
        profile: of the target; it reads ``.tflite`` files.
        in_batches: whether the first axis of all inputs and outputs counts samples, so that data with more or fewer of them than
            a file with a fixed batch takes is divided, and filled up with its first sample.

    Attributes:
        by_reference: kinds of integer operators that the profile does not name; a kernel of LiteRT computes them.
    """

    def __init__(self, content: bytes, profile: Profile, *, in_batches: bool = False) -> None:
        self.file, self.profile, self._in_batches = FlatFile(content), profile, in_batches
        self._edges = flat_edges(content)
        graph, model = self.file.graph, self.file.model
        self._held: dict[int, Array] = {}
        for index, tensor in enumerate(graph.tensors):
            data = model.buffers[tensor.buffer].data
            shape = [] if tensor.shape is None else tensor.shape
            if data is not None and len(data):
                self._held[index] = np.frombuffer(np.asarray(data, np.uint8).tobytes(), _dtype(tensor)).reshape(shape)
            elif (
                0 in shape and index not in self.file.makers and index not in graph.inputs
            ):  # a constant without elements, such as the shape of a scalar
                self._held[index] = np.empty(shape, _dtype(tensor))
        self._sessions: dict[int, LitertSession] = {}
        self.by_reference = sorted({kind for i, kind in enumerate(self._kinds()) if self._unnamed(i, kind)})

    def _kinds(self) -> list[str]:
        return [self.file.kinds[op.opcodeIndex] for op in self.file.graph.operators]

    def _unnamed(self, index: int, kind: str) -> bool:
        grid = self.file.graph.tensors[int(self.file.graph.operators[index].outputs[0])].quantization
        on_codes = grid is not None and grid.scale is not None and len(grid.scale) > 0
        return on_codes and kind not in MOVES_CODES and not self._executes(index, kind)

    def _executes(self, index: int, kind: str) -> bool:
        """Whether the profile's kernel computes an operator: it names it, and the operator reads and writes codes."""
        op, tensors = self.file.graph.operators[index], self.file.graph.tensors
        if kind not in self.profile.kernels:
            return False
        types = [_dtype(tensors[int(i)]) for i in op.outputs[:1]]
        operands = [int(i) for i in op.inputs[_CODES_AT.get(kind, slice(2))]]
        if any(i < 0 or not _has_grid(tensors[i]) for i in operands) or not _has_grid(tensors[int(op.outputs[0])]):
            return False
        allowed: tuple[Any, ...] = (np.int8,) if kind in _EIGHT_BITS else (np.int8, np.int16)
        allowed = (*allowed, np.uint8) if kind == "QUANTIZE" else allowed
        return all(kind in allowed for kind in types)

    def run(
        self, feeds: Feeds, outputs: Sequence[str] | None = None, seen: Callable[[str, Array], None] | None = None
    ) -> dict[str, Array]:
        """Graph outputs by name.

        Args:
            feeds: by name of graph input; floats, also for a file that takes and returns codes or takes pixels.
            outputs: names of the wanted ones, all by default.
            seen: called with the name of each tensor of codes that an integer kernel writes, and what it wrote. Of a file with a
                fixed batch it is called once for each batch of that size.

        Raises:
            ExportError: the file has another fixed length than the data.
        """
        given = as_file_inputs(self._edges.get("inputs", {}), feeds)
        parts = [self._run_file(part, outputs, seen) for part in self._divided(given)]
        found, count = parts[0], len(next(iter(feeds.values())))
        if len(parts) > 1:
            found = {name: np.concatenate([part[name] for part in parts])[:count] for name in parts[0]}
        return as_values(self._edges.get("outputs", {}), found)

    def _divided(self, feeds: Feeds) -> list[Feeds]:
        """The data as the file takes it: in batches of its size where that is fixed and they count samples."""
        tensors = [self.file.graph.tensors[int(i)] for i in self.file.graph.inputs]
        inputs = {tensor.name.decode(): np.asarray(feeds[tensor.name.decode()]) for tensor in tensors}
        batch = self._fixed_batch() if self._in_batches else None
        counts = {len(array) for array in inputs.values()} if batch is not None else set()
        parts: list[Feeds] = [inputs]
        if batch is not None and len(counts) == 1:
            parts = list(_in_batches(inputs, batch))
        for tensor in tensors:
            _check_shape(tensor, parts[0][tensor.name.decode()].shape)
        return parts

    def _run_file(
        self, feeds: Feeds, outputs: Sequence[str] | None, seen: Callable[[str, Array], None] | None
    ) -> dict[str, Array]:
        graph = self.file.graph
        counts = Counter(i for op in graph.operators for i in {int(i) for i in op.inputs})
        uses = {**counts, **dict.fromkeys([*map(int, graph.outputs), *self._held], -1)}
        held = Held(dict(self._held), uses)
        for i in map(int, graph.inputs):
            tensor = graph.tensors[i]
            held.values[i] = np.asarray(feeds[tensor.name.decode()], _dtype(tensor), order="C")
        for index, op in enumerate(graph.operators):
            if int(op.outputs[0]) not in self._held:  # else of constants only, computed before
                held.values.update(zip(map(int, op.outputs), self._made(index, held.values, seen), strict=True))
            held.let_go({int(i) for i in op.inputs})
        named = {graph.tensors[i].name.decode(): held.values[i] for i in map(int, graph.outputs)}
        return {name: array for name, array in named.items() if outputs is None or name in outputs}

    def _fixed_batch(self) -> int | None:
        """Length of the first axis of all inputs and outputs, where no data may change it; ``None`` where it is free."""
        ends = (*self.file.graph.inputs, *self.file.graph.outputs)
        lengths = {_lengths(self.file.graph.tensors[int(i)])[:1] for i in ends}
        found = lengths.pop() if len(lengths) == 1 else ()
        return found[0] if found and found[0] > 0 else None

    def _made(self, index: int, values: Mapping[int, Array], seen: Callable[[str, Array], None] | None) -> list[Array]:
        """Outputs of an operator, from the profile's executor or from LiteRT."""
        op, kind = self.file.graph.operators[index], self._kinds()[index]
        if self._executes(index, kind):
            codes = self._compute(index, kind, values)
            if seen is not None:
                seen(self.file.graph.tensors[int(op.outputs[0])].name.decode(), codes)
            return [codes]
        made = self._by_runtime(index, values)
        if len(made) == 1 and all(i < 0 or i in self._held for i in map(int, op.inputs)):
            self._held[int(op.outputs[0])] = made[0]
        return made

    def _compute(self, index: int, kind: str, values: Mapping[int, Array]) -> Array:
        op = self.file.graph.operators[index]
        inputs = tuple(None if i < 0 else self._tensor(int(i), values[int(i)]) for i in op.inputs)
        out = self._tensor(int(op.outputs[0]), np.empty(0, _dtype(self.file.graph.tensors[int(op.outputs[0])])))
        options = {} if op.builtinOptions is None else vars(op.builtinOptions)
        variant = self.profile.kernels[kind]
        call = Call(
            inputs, Grid(out.values.dtype, out.step, out.zero_point), options, variant, self.profile.pairs,
            self.profile.accumulator,
        )  # fmt: skip
        return FLAT_KERNELS[kind][variant](call)

    def _tensor(self, index: int, values: Array) -> Tensor:
        return self.file.tensor(index, values)

    def _by_runtime(self, index: int, values: Mapping[int, Array]) -> list[Array]:
        """One operator by the kernel of LiteRT that the profile takes for those it does not name."""
        op, tensors = self.file.graph.operators[index], self.file.graph.tensors
        given = [int(i) for i in dict.fromkeys(int(i) for i in op.inputs) if i >= 0 and not tensors[int(i)].isVariable]
        fed = [i for i in given if i not in self._held]
        if not fed:  # a session needs an input: one constant is given as one
            fed = given[:1]
        if index not in self._sessions:
            self._sessions[index] = session_of(self._alone(index, fed), reference=self.profile.others == "reference")
        session = self._sessions[index]
        found = session.run({f"in{i}": values[i] for i in fed})
        return [_as_noted(tensors[int(i)], found[f"out{int(i)}"]) for i in op.outputs]

    def _alone(self, index: int, fed: Sequence[int]) -> bytes:
        """A file of one operator; ``fed`` are its inputs, and other tensors hold constants or states."""
        known, graph, model = schema(), self.file.graph, self.file.model
        op = graph.operators[index]
        made = known.ModelT()
        made.version, made.description = 3, b"one operator"
        made.operatorCodes = [model.operatorCodes[op.opcodeIndex]]
        made.buffers = [known.BufferT()]
        sub = known.SubGraphT()
        sub.tensors, places = [], {}
        for i in dict.fromkeys([*(int(i) for i in op.inputs), *(int(i) for i in op.outputs)]):
            if i < 0:
                continue
            tensor = known.TensorT()
            for key, value in vars(graph.tensors[i]).items():
                setattr(tensor, key, value)
            is_output = i in {int(k) for k in op.outputs}
            tensor.name = f"{'out' if is_output else 'in'}{i}".encode()
            tensor.buffer = 0
            if i in self._held and i not in fed:
                buffer = known.BufferT()
                buffer.data = np.frombuffer(np.ascontiguousarray(self._held[i]).tobytes(), np.uint8)
                tensor.buffer = len(made.buffers)
                tensor.shape = np.asarray(self._held[i].shape, np.int32)
                made.buffers.append(buffer)
            places[i] = len(sub.tensors)
            sub.tensors.append(tensor)
        one = known.OperatorT()
        for key, value in vars(op).items():
            setattr(one, key, value)
        one.opcodeIndex = 0
        one.inputs = np.asarray([places.get(int(i), -1) for i in op.inputs], np.int32)
        one.outputs = np.asarray([places[int(i)] for i in op.outputs], np.int32)
        sub.operators = [one]
        sub.inputs = np.asarray([places[i] for i in fed], np.int32)
        sub.outputs = one.outputs
        made.subgraphs = [sub]
        return pack(made)


_FIRST = ("SOFTMAX", "LOGISTIC", "TANH", "LEAKY_RELU", "AVERAGE_POOL_2D", "MAX_POOL_2D", "MEAN", "RESIZE_BILINEAR")
#: operator -> which of its operands hold codes, where those are not the first two
_CODES_AT = {**dict.fromkeys(_FIRST, slice(1)), "QUANTIZE": slice(0), "TRANSPOSE_CONV": slice(1, 3)}


def _lengths(tensor: Any) -> tuple[int, ...]:
    """Lengths of the axes of a tensor; -1 of those that the data decide on."""
    known = tensor.shape if tensor.shapeSignature is None else tensor.shapeSignature
    return () if known is None else tuple(map(int, known))


def _check_shape(tensor: Any, shape: tuple[int, ...]) -> None:
    wanted = _lengths(tensor)
    if len(wanted) != len(shape) or any(n not in (-1, m) for n, m in zip(wanted, shape, strict=True)):
        stated, given = ("x".join("?" if n < 0 else str(n) for n in lengths) for lengths in (wanted, shape))
        problem = f"the .tflite file takes {stated}, and the data has {given}"
        raise ExportError(
            tensor.name.decode(),
            problem,
            "give data of these lengths, or export with an example of the lengths of the data",
        )


def _in_batches(feeds: Feeds, batch: int) -> Iterator[Feeds]:
    """``batch`` samples at a time; the last are filled up with the first sample."""
    count = len(next(iter(feeds.values())))
    for start in range(0, count, batch):
        missing = max(start + batch - count, 0)
        yield {
            name: np.concatenate([x[start : start + batch], np.repeat(x[:1], missing, 0)])
            for name, x in ((name, np.asarray(array)) for name, array in feeds.items())
        }


def _as_noted(tensor: Any, array: Array) -> Array:
    """A scalar where the file notes one: LiteRT takes a shape without elements for none, and returns one axis."""
    scalar = array.size == 1 and (tensor.shape is None or len(tensor.shape) == 0)
    return array.reshape(()) if scalar else array


def _has_grid(tensor: Any) -> bool:
    grid = tensor.quantization
    return grid is not None and grid.scale is not None and len(grid.scale) > 0


def _dtype(tensor: Any) -> Any:
    known = schema().TensorType
    names = {value: key for key, value in vars(known).items() if not key.startswith("_")}
    return np.dtype(names[tensor.type].lower().replace("bool", "bool_")).type
