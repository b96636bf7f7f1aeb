"""Execute a file as a target would, without the target: integer operators by the executors of a profile, the rest in float.

A QDQ model is divided as the target would divide it. An operator whose operands are dequantized codes, and whose result goes to
one quantizer, is one integer kernel; Relu and Clip between them join it where the profile says so. What is left runs in ONNX
Runtime, with its quantizers as they stand, in as few sessions as the order of the kernels allows. The body of a Scan, which holds
the steps of a recurrent layer, is divided in the same way and run step by step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.cut import attributes_of, constant_at, dequantizer, graphs_in, reads_of
from bitwright.executors.kernels import CODE_KERNELS, product_in_float
from bitwright.executors.profile import Profile
from bitwright.executors.tensors import Call, Grid, Tensor
from bitwright.export.files.onnx_file import array_of
from bitwright.runtimes.onnxruntime import FLOAT_KERNELS, new_session, session_options

Array = NDArray[Any]
Feeds = Mapping[str, Array]

_BYTES = (np.dtype(np.uint8), np.dtype(np.int8))
_SHIFT = 128  # from int8 to uint8
_JOINS = ("Relu", "Clip")
_PRODUCTS = ("Conv", "MatMul", "Gemm")
_FLOAT_RESULTS = ("MatMul", "Gemm")  # products whose kernel returns floats where no quantizer follows


@dataclass(frozen=True)
class Kernel:
    """An operator that the target computes on integers.

    Attributes:
        node: the operator.
        quantizer: that its result goes to; ``None`` where the kernel returns floats.
        joined: Relu and Clip between them.
        grid: of its codes.
    """

    node: ir.Node
    quantizer: ir.Node | None
    joined: tuple[ir.Node, ...]
    grid: Grid

    @property
    def reads(self) -> Iterator[tuple[ir.Value, ir.Node]]:
        """Codes of its operands, and the DequantizeLinear nodes that read them."""
        for value in self.node.inputs:
            source = dequantizer(value)
            if source is not None and source.inputs[0] is not None:
                yield source.inputs[0], source

    @property
    def inputs(self) -> list[str]:
        """Names of the codes that it reads."""
        return [str(codes.name) for codes, _ in self.reads]

    @property
    def last(self) -> ir.Node:
        """The node in whose place it is computed."""
        return self.node if self.quantizer is None else self.quantizer

    @property
    def made(self) -> str:
        """Name of the tensor that it writes."""
        return str(self.last.outputs[0].name)

    @property
    def outputs(self) -> list[str]:
        """Names of the tensors that it writes."""
        return [self.made]


@dataclass(frozen=True)
class _Scan:
    """A Scan of the main graph with integer kernels in its body.

    Attributes:
        last: the node.
        body: executes one step.
    """

    last: ir.Node
    body: CodeExecutor

    @property
    def inputs(self) -> list[str]:
        """Names of what it and its body read."""
        return list(dict.fromkeys([*_names(self.last), *self.body.outside]))

    @property
    def outputs(self) -> list[str]:
        """Names of the tensors that it writes."""
        return [str(value.name) for value in self.last.outputs if value.name]


@dataclass
class _Segment:
    """Nodes that float kernels compute in one session, which opens when its inputs are known."""

    nodes: list[ir.Node]
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    session: Any = None


@dataclass
class Held:
    """Values while a file runs.

    Attributes:
        values: what is there.
        uses: how many steps still read each; a negative number is never let go.
    """

    values: dict[Any, Array]
    uses: dict[Any, int]

    def let_go(self, read: Iterable[Any]) -> None:
        """Release the values that a step was the last to read."""
        for name in read:
            self.uses[name] = self.uses.get(name, 0) - 1
            if self.uses[name] == 0:
                self.values.pop(name, None)


class CodeExecutor:
    """A QDQ model as a target computes it.

    Args:
        model: as ``to_qdq`` wrote it, or another QDQ model, with 8-bit activations where kernels are to be integer.
        profile: of the target; it reads ONNX files.
        body: of a Scan in its main graph, which is executed in the place of that.

    Attributes:
        model, profile: as given.
        kernels: of the graph itself, without those in the bodies of Scan.
        outside: names of what a body reads from the main graph, initializers left out; they are fed like its inputs.
    """

    def __init__(self, model: ir.Model, profile: Profile, body: ir.Graph | None = None) -> None:
        self.model, self.profile = model, profile
        self._graph = model.graph if body is None else body
        self.kernels = list(find_kernels(self._graph, profile))
        self._constants = {str(v.name): v for graph in (model.graph, self._graph) for v in graph.initializers.values()}
        self.outside = [] if body is None else self._read_outside(body)
        self._scans = [] if body is not None else [*self._find_scans()]
        self._steps = list(self._scheduled())
        self._counts = self._uses()

    def _read_outside(self, body: ir.Graph) -> list[str]:
        own = {str(v.name) for v in body.inputs} | {str(v.name) for node in body for v in node.outputs}
        reads = [name for node in body for name in _names(node)] + [str(v.name) for v in body.outputs]
        return [name for name in dict.fromkeys(reads) if name not in own and name not in self._constants]

    def _find_scans(self) -> Iterator[_Scan]:
        for node in self._graph:
            if node.op_type == "Scan" and node.domain in ("", "ai.onnx"):
                body = CodeExecutor(self.model, self.profile, node.attributes["body"].as_graph())
                if body.kernels:
                    yield _Scan(node, body)

    def run(
        self, feeds: Feeds, outputs: Sequence[str] | None = None, seen: Callable[[str, Array], None] | None = None
    ) -> dict[str, Array]:
        """Graph outputs by name.

        Args:
            feeds: by name of graph input.
            outputs: names of the wanted ones, all by default.
            seen: called with the tensor that each integer kernel writes, and what it wrote; in the body of a Scan once per step.
        """
        held = Held({str(k): np.asarray(v) for k, v in feeds.items()}, dict(self._counts))
        for step in self._steps:
            if isinstance(step, Kernel):
                made = {step.made: self._compute(step, held.values)}
                if seen is not None:
                    seen(step.made, made[step.made])
            elif isinstance(step, _Scan):
                made = self._scanned(step, held.values, seen)
            else:
                made = self._run_segment(step, held.values)
            held.values.update(made)
            held.let_go(step.inputs)
        names = [str(v.name) for v in self._graph.outputs]
        return {name: self._value(name, held.values) for name in names if outputs is None or name in outputs}

    def _scanned(
        self, scan: _Scan, values: Mapping[str, Array], seen: Callable[[str, Array], None] | None
    ) -> dict[str, Array]:
        """Outputs of a Scan by name: last states, then what every step returns."""
        inputs, body = [self._value(str(v.name), values) for v in scan.last.inputs if v is not None], scan.body
        count = scan.last.attributes.get_int("num_scan_inputs", 1)
        fixed = {name: self._value(name, values) for name in body.outside}
        states, sequences = inputs[:-count], _sequences(scan.last, inputs[-count:])
        results = [str(v.name) for v in body.results]
        returned: list[list[Array]] = [[] for _ in results[len(states) :]]
        for rows in zip(*sequences, strict=True):
            found = body.run(fixed | dict(zip(body.inputs, [*states, *rows], strict=True)), seen=seen)
            states = [found[name] for name in results[: len(states)]]
            for kept, name in zip(returned, results[len(states) :], strict=True):
                kept.append(found[name])
        made = zip(scan.last.outputs, [*states, *_stacked(scan.last, returned)], strict=True)
        return {str(value.name): array for value, array in made if value.name}

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs of the graph."""
        return [str(v.name) for v in self._graph.inputs]

    @property
    def results(self) -> list[ir.Value]:
        """Outputs of the graph."""
        return list(self._graph.outputs)

    def _uses(self) -> dict[Any, int]:
        """How many steps read each value; graph outputs are never let go."""
        counts: dict[Any, int] = Counter(name for step in self._steps for name in step.inputs)
        return counts | dict.fromkeys((str(value.name) for value in self._graph.outputs), -1)

    def _value(self, name: str, values: Mapping[str, Array]) -> Array:
        if name in values:
            return values[name]
        held = self._constants[name].const_value
        assert held is not None
        return held.numpy()

    def _compute(self, kernel: Kernel, values: Mapping[str, Array]) -> Array:
        node, profile = kernel.node, self.profile
        inputs = tuple(self._operand(value, values) for value in node.inputs)
        call = Call(
            inputs, kernel.grid, attributes_of(node), profile.kernels[node.op_type], profile.pairs, profile.accumulator,
            profile.bias == "float32",
        )  # fmt: skip
        if not profile.signed and call.read(0).values.dtype == np.int8:
            call = _unsigned(call, 1 if node.op_type in _PRODUCTS else len(inputs))
        if kernel.quantizer is None:
            return product_in_float(call)
        codes = CODE_KERNELS[node.op_type][call.variant](call)
        if codes.dtype != kernel.grid.dtype:
            codes = (codes.astype(np.int16) - _SHIFT).astype(np.int8)
        for low, high in map(bounds_of, kernel.joined):
            codes = np.clip(codes, *kernel.grid.quantize(np.asarray([low, high], np.float32)))
        return codes

    def _operand(self, value: ir.Value | None, values: Mapping[str, Array]) -> Tensor | None:
        """The codes that an operand is dequantized from; ``None`` where it is left out."""
        source = dequantizer(value)
        if source is None:
            held = array_of(value)
            return None if held is None else Tensor(held, np.empty(0, np.float32))
        scale, zero = (constant_at(source, port) for port in (1, 2))
        assert scale is not None and source.inputs[0] is not None
        codes = self._value(str(source.inputs[0].name), values)
        return Tensor(codes, scale.astype(np.float32), 0 if zero is None else int(zero.reshape(-1)[0]))

    # -------------------------------------------------------------------------------------------- the order

    def _scheduled(self) -> Iterator[Kernel | _Scan | _Segment]:
        """Segments and kernels in an order in which all that they read is there; kernels wait as long as they can."""
        steps: list[Kernel | _Scan] = [*self.kernels, *self._scans]
        starts = {step.last: step for step in steps}
        needed = self._needed(starts)
        reads = {
            node: list(dict.fromkeys(_names(node) if node not in starts else starts[node].inputs))
            for node in self._graph
            if node in needed
        }
        order = _Order(reads, starts)
        order.made([*self.inputs, *self.outside, *self._constants])
        results = {str(v.name) for v in self._graph.outputs}
        while order.left:
            ready = order.drained()
            if ready:
                yield self._segment(ready, order.readers, results)
            begun = order.kernels()
            yield from begun
            assert ready or begun, "every node reads what an earlier one makes"

    def _needed(self, starts: Mapping[ir.Node, Kernel | _Scan]) -> set[ir.Node]:
        """Nodes that a graph output depends on, other than those that kernels stand for."""
        found: set[ir.Node] = set()
        stack = [v.producer() for v in self._graph.outputs]
        while stack:
            node = stack.pop()
            if node is None or node in found or (node.graph is self.model.graph is not self._graph):
                continue
            found.add(node)
            step = starts.get(node)
            stack.extend(
                value.producer() for value in (map(_first, step.reads) if isinstance(step, Kernel) else reads_of(node))
            )
        return {node for node in found if node.graph is self._graph}

    def _segment(self, nodes: list[ir.Node], readers: Mapping[str, list[ir.Node]], results: set[str]) -> _Segment:
        members, own = set(nodes), [str(v.name) for node in nodes for v in node.outputs]
        inside = {*own, *self._constants}
        reads = dict.fromkeys(name for node in nodes for name in _names(node) if name not in inside)
        outside = (name for name in own if name in results or not members.issuperset(readers.get(name, ())))
        return _Segment(nodes, list(reads), sorted(outside))

    def _run_segment(self, segment: _Segment, values: Mapping[str, Array]) -> dict[str, Array]:
        feeds = {name: values[name] for name in segment.inputs}
        if segment.session is None:
            segment.session = self._opened(segment, feeds)
        found = segment.session.run(segment.outputs, feeds)
        return dict(zip(segment.outputs, found, strict=True))

    def _opened(self, segment: _Segment, feeds: Feeds) -> Any:
        read = {name for node in segment.nodes for name in _names(node)}
        kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
        graph = onnx.helper.make_graph(
            [ir.to_proto(node) for node in segment.nodes],
            "segment",
            [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()],
            [onnx.helper.make_empty_tensor_value_info(name) for name in segment.outputs],
            [_tensor(name, self._constants[name]) for name in sorted(read & self._constants.keys())],
        )
        imports = [onnx.helper.make_opsetid(k, n) for k, n in self.model.opset_imports.items()]
        proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=min(self.model.ir_version, 13))
        proto.functions.extend(ir.to_proto(function) for function in self.model.functions.values())
        return new_session(proto.SerializeToString(), session_options(entries=FLOAT_KERNELS))


class _Order:
    """Nodes and kernels whose operands are there, from the operands that are still missing.

    Args:
        reads: node -> names of what it reads.
        starts: the nodes among them that stand for kernels.
    """

    def __init__(self, reads: Mapping[ir.Node, list[str]], starts: Mapping[ir.Node, Kernel | _Scan]) -> None:
        self._starts, self._missing = starts, {node: len(names) for node, names in reads.items()}
        self.readers: dict[str, list[ir.Node]] = {}
        for node, names in reads.items():
            for name in names:
                self.readers.setdefault(name, []).append(node)
        self.left = len(reads)
        self._nodes, self._kernels = deque[ir.Node](), list[ir.Node]()
        for node, count in self._missing.items():
            if count == 0:
                self._there(node)

    def _there(self, node: ir.Node) -> None:
        (self._kernels if node in self._starts else self._nodes).append(node)

    def made(self, names: Iterable[str]) -> None:
        """Mark these values as available."""
        for node in (node for name in names for node in self.readers.get(name, ())):
            self._missing[node] -= 1
            if self._missing[node] == 0:
                self._there(node)

    def drained(self) -> list[ir.Node]:
        """All float nodes that can run now, and those that can run after them."""
        found: list[ir.Node] = []
        while self._nodes:
            node = self._nodes.popleft()
            found.append(node)
            self.made(str(v.name) for v in node.outputs)
        self.left -= len(found)
        return found

    def kernels(self) -> list[Kernel | _Scan]:
        """All kernels that can run now."""
        found, self._kernels = [self._starts[node] for node in self._kernels], []
        self.left -= len(found)
        self.made(name for step in found for name in step.outputs)
        return found


def _sequences(scan: ir.Node, inputs: Sequence[Array]) -> Iterator[Array]:
    """Sequences with time as their first axis, in the order in which a Scan reads them."""
    options, none = attributes_of(scan), [0] * len(inputs)
    axes, turned = options.get("scan_input_axes", none), options.get("scan_input_directions", none)
    for array, axis, back in zip(inputs, axes, turned, strict=True):
        moved = np.moveaxis(array, axis, 0)
        yield moved[::-1] if back else moved


def _stacked(scan: ir.Node, returned: Sequence[list[Array]]) -> Iterator[Array]:
    """What the steps of a Scan return, along an axis of time."""
    options, none = attributes_of(scan), [0] * len(returned)
    axes, turned = options.get("scan_output_axes", none), options.get("scan_output_directions", none)
    for steps, axis, back in zip(returned, axes, turned, strict=True):
        yield np.stack(steps[::-1] if back else steps, axis)


def _unsigned(call: Call, activations: int) -> Call:
    """The kernel on uint8 codes, 128 higher: runtimes on x86 rewrite int8 activations this way."""

    def higher(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        codes = (tensor.values.astype(np.int16) + _SHIFT).astype(np.uint8)
        return Tensor(codes, tensor.scale, tensor.zero_point + _SHIFT)

    inputs = (*map(higher, call.inputs[:activations]), *call.inputs[activations:])
    grid = Grid(np.dtype(np.uint8), call.grid.scale, call.grid.zero_point + _SHIFT)
    return replace(call, inputs=inputs, grid=grid)


def _first(read: tuple[ir.Value, ir.Node]) -> ir.Value:
    return read[0]


def _tensor(name: str, value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None
    proto = ir.to_proto(value.const_value)
    if proto.external_data:
        proto = onnx.numpy_helper.from_array(value.const_value.numpy(), name)
    proto.name = name
    return proto


def _names(node: ir.Node) -> list[str]:
    """Names that a node reads from its graph, also inside its bodies."""
    bodies = graphs_in(node)
    if not bodies:
        return [str(value.name) for value in node.inputs if value is not None]
    own: set[int] = set()
    for body in bodies:
        own.update(id(value) for inner in body.all_nodes() for value in inner.outputs)
        for graph in (body, *(g for inner in body.all_nodes() for g in graphs_in(inner))):
            own.update(map(id, (*graph.inputs, *graph.initializers.values())))
    return [str(value.name) for value in reads_of(node) if id(value) not in own]


def bounds_of(node: ir.Node) -> tuple[float, float]:
    """Bounds of a Relu, or of a Clip with constant bounds; NaN where a bound is computed."""
    if node.op_type == "Relu":
        return 0.0, float("inf")
    ends = [float("-inf"), float("inf")]
    for port, key in ((1, "min"), (2, "max")):
        if key in node.attributes:
            ends[port - 1] = node.attributes.get_float(key, 0.0) or 0.0
        elif len(node.inputs) > port and node.inputs[port] is not None:
            held = constant_at(node, port)
            ends[port - 1] = float("nan") if held is None else float(held.reshape(()))
    return ends[0], ends[1]


# ---------------------------------------------------------------------------------------- which operators are kernels


def find_kernels(graph: ir.Graph, profile: Profile) -> Iterator[Kernel]:
    """The operators of a graph that a target computes on integers, in execution order."""
    results = {id(value) for value in graph.outputs}
    for node in graph:
        if node.domain in ("", "ai.onnx") and node.op_type in profile.kernels:
            found = _kernel_of(node, results, profile)
            if found is not None:
                yield found


def _kernel_of(node: ir.Node, results: set[int], profile: Profile) -> Kernel | None:
    """The kernel of ``node`` with the operators fused into it; ``None`` where it is computed in float."""
    quantizer, joined = _quantizer_after(node, results)
    grid = None if quantizer is None else _grid(quantizer)
    if joined and node.op_type in _FLOAT_RESULTS and (grid is None or not _joins(joined, grid, profile)):
        quantizer, joined, grid = None, (), None  # what lies in between is computed on its floats
    if not _ends_well(node, quantizer, joined, grid, profile) or not _reads_codes(node, grid, profile):
        return None
    if not profile.signed and not _become_unsigned(node):
        return None
    return Kernel(node, quantizer, joined, grid or Grid(np.dtype(np.uint8), np.float32(1)))


def _ends_well(
    node: ir.Node, quantizer: ir.Node | None, joined: Sequence[ir.Node], grid: Grid | None, profile: Profile
) -> bool:
    """Whether a kernel can make what follows an operator: codes, after what joins it, or the floats of a product."""
    if grid is not None:
        return _joins(joined, grid, profile)
    return quantizer is None and not joined and node.op_type in _FLOAT_RESULTS


def _quantizer_after(node: ir.Node, results: set[int]) -> tuple[ir.Node | None, tuple[ir.Node, ...]]:
    """The only reader of ``node``, if that is a quantizer, and the Relu and Clip between them."""
    joined: list[ir.Node] = []
    value = node.outputs[0]
    while id(value) not in results:
        readers = [use.node for use in value.uses()]
        if len(readers) != 1:
            break
        if readers[0].op_type == "QuantizeLinear":
            return readers[0], tuple(joined)
        if readers[0].op_type not in _JOINS or readers[0].inputs[0] is not value:
            break
        joined.append(readers[0])
        value = readers[0].outputs[0]
    return None, ()


def _grid(quantizer: ir.Node) -> Grid | None:
    scale, zero = (constant_at(quantizer, port) for port in (1, 2))
    kind = quantizer.outputs[0].dtype
    if scale is None or scale.size != 1 or scale.dtype != np.float32:
        return None
    dtype = zero.dtype if zero is not None else np.dtype(np.uint8) if kind is None else kind.numpy()
    if np.dtype(dtype) not in _BYTES:
        return None
    return Grid(np.dtype(dtype), np.float32(scale.reshape(())), 0 if zero is None else int(zero.reshape(())))


def _joins(joined: Sequence[ir.Node], grid: Grid, profile: Profile) -> bool:
    """Whether the operators between a node and its quantizer are fused into the kernel."""
    if profile.relu == "always":
        return not any(np.isnan(bounds_of(node)).any() for node in joined)
    # in float32 and with its epsilon, as ONNX Runtime compares (clip_quantizelinear.cc): 255 * float32(6 / 255) is 6 there
    low, high = (np.float32(end - grid.zero_point) * grid.scale for end in grid.ends)
    slack = float(np.finfo(np.float32).eps)
    return all(b[0] - low <= slack and high - b[1] <= slack for b in map(bounds_of, joined))


def _reads_codes(node: ir.Node, grid: Grid | None, profile: Profile) -> bool:
    """Whether all operands are codes of a kind that the kernel takes."""
    sources = [dequantizer(value) if value is not None else None for value in node.inputs]
    if not sources or any(source is None for source in sources[: 2 if node.op_type in _PRODUCTS else None]):
        return False
    kinds = [_kind(source) for source in sources if source is not None]
    if any(kind is None for kind in kinds):
        return False
    if node.op_type in _PRODUCTS:
        return _is_product(node, sources, profile.bias == "float32")
    return grid is not None and all(kind == (grid.dtype, 1) for kind in kinds)


def _become_unsigned(node: ir.Node) -> bool:
    """Whether int8 activations come from quantizers, which the target makes uint8; others stay in float."""
    activations = node.inputs[:1] if node.op_type in _PRODUCTS else node.inputs
    for source in filter(None, map(dequantizer, activations)):
        codes = source.inputs[0]
        assert codes is not None
        kind = _kind(source)
        if kind is not None and kind[0] == np.int8:
            made = codes.producer()
            if made is None or made.op_type != "QuantizeLinear":
                return False
    return True


def _is_product(node: ir.Node, sources: Sequence[ir.Node | None], float_bias: bool) -> bool:
    kinds = [None if source is None else _kind(source) for source in sources]
    data, weight = kinds[0], kinds[1]
    assert data is not None and weight is not None and sources[1] is not None
    if data[0] not in _BYTES or data[1] != 1 or weight[0] not in _BYTES:
        return False
    zero = constant_at(sources[1], 2)
    if zero is not None and (zero != zero.reshape(-1)[0]).any():
        return False
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    if has_bias and not (kinds[2] is not None and kinds[2][0] == np.int32):
        return float_bias and node.inputs[2].const_value is not None  # type: ignore[union-attr]
    if node.op_type == "Gemm":
        return node.attributes.get_float("alpha", 1.0) == 1 and node.attributes.get_float("beta", 1.0) == 1
    return True


def _kind(source: ir.Node) -> tuple[np.dtype[Any], int] | None:
    """Type of the codes that a DequantizeLinear reads, and how many scales they have; ``None`` where these are computed."""
    scale, zero, codes = (constant_at(source, 1), constant_at(source, 2), source.inputs[0])
    if scale is None or codes is None or scale.dtype != np.float32 or source.attributes.get_int("block_size"):
        return None
    if codes.const_value is not None:
        dtype = codes.const_value.dtype.numpy()
    elif zero is not None:
        dtype = zero.dtype
    elif codes.dtype is not None:
        dtype = codes.dtype.numpy()
    else:
        return None
    return np.dtype(dtype), scale.size
