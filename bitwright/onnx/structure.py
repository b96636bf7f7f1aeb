"""Structured pruning of ONNX models: slice initializers, and update widths in operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.core.graph.graph import Graph, Op, reached
from bitwright.core.graph.operators import LENGTHS
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError, ModelError
from bitwright.export.qdq.markers import Names, move_uses
from bitwright.methods.front_end import Kept, Problem, Structured, kept_axes, taken
from bitwright.onnx.model.data import as_feeds, input_specs
from bitwright.onnx.model.graph import GraphView, build_graph
from bitwright.onnx.model.load import Loaded, clone_model, infer_shapes
from bitwright.onnx.model.session import Providers, is_large, open_session, run_session, weights
from bitwright.onnx.model.view import OnnxView, measure_shapes

#: attributes that say how wide a layer is, beside the shapes of its parameters
_WIDTHS = {"LSTM": "hidden_size", "GRU": "hidden_size", "RNN": "hidden_size"}


class OnnxStructure(Structured):
    """A model opened for cuts.

    Args:
        loaded: the caller's copy.
        example: feeds of one run.
        providers: as ONNX Runtime takes them.
        put: is given the model at the end.
    """

    def __init__(
        self,
        loaded: Loaded,
        example: Any,
        providers: Providers | None = None,
        put: Callable[[Loaded], None] | None = None,
    ) -> None:
        self._put = put
        self.loaded, self.model, self.providers = loaded, loaded.model, providers
        self._example = example
        _untie(self.model)
        self._read: GraphView | None = None
        self._computed: dict[str, Array] = {}  # constants that the model computes
        self._bounds: dict[str, Array] | None = None  # bounds of slices that it computes from shapes
        self.steps: list[dict[str, Any]] = []
        self._specs = input_specs(self.model)
        self._narrowings: list[dict[str, tuple[Array | None, ...]]] = []  # of each cut: input -> what stays of its axes

    def view(self) -> OnnxView:
        """The view through which methods read and change the model."""
        return OnnxView(replace(self.loaded, model=self.model), self.providers, self._shapes(), self.narrowed)

    def narrowed(self, batch: Any) -> Any:
        """As the base class says."""
        for cut in self._narrowings:
            feeds = as_feeds(batch, self._specs)
            batch = {name: taken(cut[name], array) if name in cut else array for name, array in feeds.items()}
        return batch

    def finished(self) -> Any:
        """The model as a message that holds its weights; as it is where it is too large for one."""
        infer_shapes(self.model)
        if is_large(self.model):
            return self.model
        model = clone_model(self.model)
        for value, tensor in weights(model):
            if isinstance(tensor, ir.ExternalTensor):  # a message does not know the folder of its weights
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
        return ir.to_proto(model)

    def give_back(self) -> None:
        """Write the result into the model that was opened in place."""
        infer_shapes(self.model)
        if self._put is not None:
            self._put(replace(self.loaded, model=self.model))

    def metric_target(self) -> Any:
        """A session of the model."""
        return open_session(self.model, self.providers)

    def gradients(self, loss: Callable[[Any], Any], names: Sequence[str]) -> dict[str, Array]:
        """None: ONNX Runtime does not differentiate."""
        raise ConfigError(
            "loss", "an ONNX model has no gradients", "use importance='activation', or compress the torch module"
        )

    def directional_gradients(self, batch: Any, names: Sequence[str], seed: int) -> dict[str, Array]:
        """None: ONNX Runtime does not differentiate."""
        raise ConfigError(
            "importance", "hessian needs gradients, which an ONNX model has not", "use importance='activation'"
        )

    # -- reading

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return measure_shapes(self.model, self.narrowed(self._example), self.providers)

    def graph(self) -> Graph:
        """The graph with the shapes of a run, including operators on parameters alone."""
        if self._read is None:
            self._read = build_graph(self.model, self._shapes(), whole=True)
        return self._read.graph

    def refresh(self) -> None:
        """Forget the graph."""
        self._read, self._bounds = None, None
        self._computed.clear()

    def _initializer(self, name: str) -> ir.Value:
        return self.model.graph.initializers[name]

    def param(self, name: str) -> Array:
        """A copy of an initializer, float32 or wider."""
        tensor = self._initializer(name).const_value
        assert tensor is not None
        array = tensor.numpy()
        narrow = tensor.dtype.is_floating_point() and array.dtype.itemsize < 4
        return np.array(array.astype(np.float32) if narrow else array)

    def set_param(self, name: str, value: Array) -> None:
        """Give an initializer another value; its dtype stays."""
        holder = self._initializer(name)
        assert holder.const_value is not None
        dtype = holder.const_value.dtype
        holder.const_value = ir.Tensor(np.asarray(value, order="C").astype(dtype.numpy()), dtype=dtype, name=name)

    def outputs(self, batch: Any) -> list[Array]:
        """Outputs of the model for feeds."""
        feeds = as_feeds(self.narrowed(batch), input_specs(self.model))
        return [np.asarray(a) for a in run_session(open_session(self.model, self.providers), feeds, "batch")]

    def constant(self, op: Op, port: int) -> Array | None:
        """The array of a constant input; ``None`` where it is computed or missing."""
        self.graph()
        assert self._read is not None
        name = op.inputs[port] if port < len(op.inputs) else None
        if name is None or not self._read.graph.values[name].is_static:
            return None
        value = self._read.value[name]
        if value.const_value is None and name not in self._computed:
            found = OnnxView(replace(self.loaded, model=self.model), self.providers).constant(name)
            assert found is not None
            self._computed[name] = found
        return self._computed[name] if value.const_value is None else value.const_value.numpy()

    def bound(self, op: Op, port: int) -> Array | None:
        """The start or end of a Slice: a constant, or what the model computes from shapes, as ``chunk`` is exported.

        ``None`` where it depends on the numbers of the input.
        """
        found, name = self.constant(op, port), op.inputs[port] if port < len(op.inputs) else None
        if found is not None or name is None:
            return found
        if self._bounds is None:
            self._bounds = self._computed_bounds()
        return self._bounds.get(name)

    def _computed_bounds(self) -> dict[str, Array]:
        """Starts and ends of slices that are computed from shapes, in a run of the example."""
        given = dict.fromkeys(v for op in self.graph().ops if op.type == "Slice" for v in op.inputs[1:3])
        names = [v for v in given if v is not None and self._of_shapes(v)]
        captured = next(iter(self.view().capture(names, [self._example]))) if names else {}
        return {name: np.asarray(arrays[0]) for name, arrays in captured.items() if len(arrays) == 1}

    def _of_shapes(self, value: str) -> bool:
        """Whether a value is computed from constants and shapes alone."""
        graph = self.graph()

        def sources(name: str) -> list[str]:
            op = graph.producer(name)
            return [] if op is None or op.type in LENGTHS else [source for _, source in op.sources()]

        return reached([value], sources).isdisjoint(graph.inputs)

    def moved(self, op: Op, elements: Sequence[Array | None]) -> list[Array] | None:
        """By the rules of each operator; ``None`` where a position is computed."""
        graph = self.graph()
        x = elements[0]
        assert x is not None
        shapes = [graph.values[v].shape for v in op.outputs]
        move = _MOVES.get(op.type)
        if move is None or op.attrs.get("operator") == "Scan":
            return None
        found = move(self, op, x, shapes)
        return None if found is None else [np.asarray(f, np.int64) for f in found]

    def kept_axes(self, op: Op) -> tuple[int | None, ...]:
        """The kept axes, from the attribute or the constant input ``axes``."""
        graph = self.graph()
        rank, result = len(graph.values[str(op.inputs[0])].shape), len(graph.values[op.outputs[0]].shape)
        given = self.constant(op, 1)
        axes = op.attrs.get("axes", None if given is None else given.tolist())
        return kept_axes(rank, result, {int(a) % rank for a in axes} if axes else set(range(rank)))

    def argument(self, op: Op, name: str) -> Any:
        """An attribute."""
        return op.attrs.get(name)

    def equal_pieces(self, op: Op) -> list[list[int]]:
        """None: a Split takes the length of every piece."""
        return []

    def filled(self) -> frozenset[str]:
        """None: a file holds such constants as arrays, or computes them by ConstantOfShape."""
        return frozenset()

    def tied(self) -> list[list[tuple[str, int, int]]]:
        """None: every operator has its own widths."""
        return []

    # -- changing

    def cut(self, kept: Kept) -> Undo:
        """Cut initializers, and repair the sizes that operators are given."""
        graph, before = self.graph(), self.model
        read = self._read
        self.model = clone_model(before)
        nodes = {str(node.name): node for node in self.model.graph.all_nodes()}
        names = Names(self.model)
        self._cut_initializers(kept)
        for op in graph.ops:
            repair = _REPAIRS.get(op.type)
            if repair is not None and any(kept.axes(v) for v in (*op.inputs, *op.outputs)):
                repair(self, op, nodes[op.name] if op.name in nodes else None, kept, names)
        _renew_shapes(self.model, kept)
        step = {"kind": "cut", "parameters": sorted(v for v in kept_params(graph, kept))}
        self.steps.append(step)
        narrowing = {name: kept.axes(name) for name in graph.inputs if kept.axes(name)}
        if narrowing:
            self._narrowings.append(narrowing)

        def undo() -> None:
            self.model, self._read = before, read
            self.steps.remove(step)
            if narrowing:
                self._narrowings.remove(narrowing)

        return undo

    def _cut_initializers(self, kept: Kept) -> None:
        for name, value in list(self.model.graph.initializers.items()):
            axes, tensor = kept.axes(name), value.const_value
            if not axes or tensor is None:
                continue
            array = taken(axes, tensor.numpy())
            value.const_value = ir.Tensor(np.asarray(array, order="C"), dtype=tensor.dtype, name=name)
            value.shape = ir.Shape(array.shape)

    def problem(self, kept: Kept, predicted: Graph) -> Problem | None:
        """Run the model and compare the shape of every value."""
        try:
            shapes = self._shapes()
        except ModelError as error:
            text = error.problem
            named = [op.name for op in predicted.ops if op.name and f"'{op.name}'" in text]
            return Problem(max(named, key=len, default=""), f"the model fails after the cut: {text}")
        for op in predicted.ops:
            for value in op.outputs:
                want = kept.shape(value, predicted.values[value].shape)
                if shapes.get(value, want) != want:
                    return Problem(op.name, f"its result has the shape {shapes[value]} after the cut and not {want}")
        return None

    def new_constant(self, names: Names, base: str, array: Array) -> ir.Value:
        """A new initializer of integers."""
        name = names.value(base)
        tensor = ir.Tensor(np.asarray(array, np.int64), dtype=ir.DataType.INT64, name=name)
        value = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.INT64), const_value=tensor
        )
        self.model.graph.register_initializer(value)
        return value


def _renew_shapes(model: ir.Model, kept: Kept) -> None:
    """Declare the new shapes of inputs and outputs that are states; other values declare none."""
    given = {str(value.name): value for value in model.graph.inputs}
    for name, value in (*given.items(), *_made(model).items()):
        axes = kept.axes(name)
        if axes and (value.is_graph_output() or name in given) and value.shape is not None:
            lengths = zip(value.shape, axes, strict=True)
            value.shape = ir.Shape([n if left is None else len(left) for n, left in lengths])
        elif axes:
            value.shape = None


def _untie(model: ir.Model) -> None:
    """Give every reader of a stored vector its own copy, since exporters merge biases that happen to be equal."""
    names = Names(model)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or len(tensor.shape) != 1 or tensor.size < 2 or not tensor.dtype.is_floating_point():
            continue
        for node in [node for node, _ in value.uses() if _passes_on(node)]:
            move_uses(node.outputs[0], value)
            model.graph.remove(node, safe=True)
        for node, port in list(value.uses())[1:]:
            own = names.value(name)
            copied = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=own)
            new = ir.Value(name=own, shape=value.shape, type=value.type, const_value=copied)
            model.graph.register_initializer(new)
            node.replace_input_with(port, new)


def _passes_on(node: ir.Node) -> bool:
    return node.op_type == "Identity" and not node.domain and not node.outputs[0].is_graph_output()


def kept_params(graph: Graph, kept: Kept) -> list[str]:
    """Parameters that a cut shortens."""
    return [str(v.param) for v in graph.values.values() if v.param is not None and kept.axes(v.name)]


def _made(model: ir.Model) -> dict[str, ir.Value]:
    return {str(v.name): v for node in model.graph.all_nodes() for v in node.outputs if v.name}


# ------------------------------------------------------------------------------------------------ movement

Moves = Any


def _transpose(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array]:
    return [x.transpose(op.attrs.get("perm", tuple(range(x.ndim))[::-1]))]


def _slices(s: OnnxStructure, op: Op, rank: int) -> dict[int, tuple[int, int, int]] | None:
    """Axis -> start, end and step of a Slice."""
    if "starts" in op.attrs:
        starts, ends = list(op.attrs["starts"]), list(op.attrs["ends"])
        axes, steps = list(op.attrs.get("axes", range(len(starts)))), [1] * len(starts)
    else:
        first, last = s.bound(op, 1), s.bound(op, 2)
        if first is None or last is None:
            return None
        starts, ends = first.tolist(), last.tolist()
        given, by = s.constant(op, 3), s.constant(op, 4)
        axes = list(range(len(starts))) if given is None else given.tolist()
        steps = [1] * len(starts) if by is None else by.tolist()
    return {a % rank: (b, e, n) for a, b, e, n in zip(axes, starts, ends, steps, strict=True)}


def _slice(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array] | None:
    found = _slices(s, op, x.ndim)
    if found is None:
        # of a length that is computed: along one axis that has no other positions than those from the start
        different = [i for i, (n, m) in enumerate(zip(x.shape, shapes[0], strict=True)) if n != m]
        return None if different else [x]
    at: list[Any] = [slice(None)] * x.ndim
    for axis, (start, end, step) in found.items():
        positions = np.arange(x.shape[axis])
        low = end if step > 0 or end >= -x.shape[axis] else None
        at[axis] = positions[slice(start, low, step)]
    for axis, positions in enumerate(at):
        if isinstance(positions, np.ndarray):
            x = x.take(positions, axis)
    return [x]


def _split(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array]:
    axis = op.attrs.get("axis", 0) % x.ndim
    return list(np.split(x, np.cumsum([shape[axis] for shape in shapes])[:-1], axis))


def _gather(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array] | None:
    indices, axis = s.constant(op, 1), op.attrs.get("axis", 0)
    if indices is None:
        return None
    return [x.take(indices, axis)]


def _expand(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array]:
    return [np.broadcast_to(x, shapes[0])]


def _tile(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array]:
    return [np.tile(x, [m // n for n, m in zip(x.shape, shapes[0], strict=True)])]


def _pads(s: OnnxStructure, op: Op, rank: int) -> list[int] | None:
    """Numbers of padded positions before and after every axis, the former first."""
    pads = op.attrs.get("pads", op.attrs.get("paddings"))
    if pads is None:
        given = s.constant(op, 1)
        if given is None:
            return None
        pads = given.tolist()
    axes = s.constant(op, 3)
    if axes is None:
        return list(pads)
    whole = [0] * (2 * rank)
    for i, axis in enumerate(axes.tolist()):
        whole[axis % rank], whole[axis % rank + rank] = pads[i], pads[i + len(axes)]
    return whole


def _pad(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array] | None:
    pads = _pads(s, op, x.ndim)
    if pads is None or min(pads) < 0:
        return None
    width = list(zip(pads[: x.ndim], pads[x.ndim :], strict=True))
    mode = op.attrs.get("mode", "constant")
    if mode == "constant":
        return [np.pad(x, width, constant_values=-1)]
    return [np.pad(x, width, mode=mode)] if mode in ("reflect", "edge", "wrap") else None


def _depth_to_space(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array]:
    n, c, h, w = x.shape
    b = op.attrs["blocksize"]
    if op.attrs.get("mode", "DCR") == "DCR":
        y = x.reshape(n, b, b, c // b**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // b**2, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return [y.reshape(n, c // b**2, h * b, w * b)]


def _space_to_depth(s: OnnxStructure, op: Op, x: Array, shapes: Any) -> list[Array]:
    n, c, h, w = x.shape
    b = op.attrs["blocksize"]
    y = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
    return [y.reshape(n, c * b * b, h // b, w // b)]


_MOVES: dict[str, Moves] = {
    "Transpose": _transpose, "Slice": _slice, "Split": _split, "Gather": _gather, "Expand": _expand, "Tile": _tile,
    "Pad": _pad, "PadConstant": _pad, "DepthToSpace": _depth_to_space, "SpaceToDepth": _space_to_depth,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ repairs


def _repair_conv(s: OnnxStructure, op: Op, node: Any, kept: Kept, names: Names) -> None:
    group = int(op.attrs.get("group", 1))
    within = kept.axes(op.inputs[1])
    source = str(op.inputs[0])
    if group > 1 and not (within and within[1] is not None):
        shape = s.graph().values[source].shape
        new = kept.shape(source, shape)[1] * group // shape[1]
        if new != group:
            node.attributes["group"] = ir.AttrInt64("group", new)


def _new_sizes(s: OnnxStructure, op: Op, kept: Kept) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the result, before and after."""
    shape = s.graph().values[op.outputs[0]].shape
    return shape, kept.shape(op.outputs[0], shape)


def _repair_target(s: OnnxStructure, op: Op, node: Any, kept: Kept, names: Names) -> None:
    """Repair the target shape of a Reshape or Expand, a constant or a concatenation of pieces."""
    before, after = _new_sizes(s, op, kept)
    place = 0 if op.type == "ConstantOfShape" else 1
    target = node.inputs[place] if len(node.inputs) > place else None
    if target is None or before == after:
        return
    producer = target.producer()
    if target.const_value is not None:
        sizes = target.const_value.numpy().copy()
        front = len(before) - len(sizes)
        new = [_renewed(int(n), before[i + front], after[i + front]) for i, n in enumerate(sizes)]
        node.replace_input_with(place, s.new_constant(names, f"{target.name}_cut", np.array(new, np.int64)))
    elif producer is not None and producer.op_type == "Concat":
        _repair_pieces(s, producer, before, after, names)


def _repair_pieces(
    s: OnnxStructure, concat: ir.Node, before: Sequence[int], after: Sequence[int], names: Names
) -> None:
    """Repair a concatenated shape: constant pieces get new lengths, computed ones follow by themselves."""
    at = 0
    for port, piece in enumerate(concat.inputs):
        assert piece is not None
        held = piece.const_value
        if held is None:
            at += 1 if piece.shape is None else int(piece.shape.numpy()[0])
            continue
        old = held.numpy().tolist()
        new = [_renewed(n, before[at + i], after[at + i]) for i, n in enumerate(old)]
        at += len(old)
        if new != old:
            concat.replace_input_with(port, s.new_constant(names, f"{piece.name}_cut", np.array(new, np.int64)))


def _renewed(given: int, before: int, after: int) -> int:
    return after if given == before else given


def _repair_split(s: OnnxStructure, op: Op, node: Any, kept: Kept, names: Names) -> None:
    graph = s.graph()
    axis = op.attrs.get("axis", 0)
    sizes = [kept.shape(v, graph.values[v].shape)[axis] for v in op.outputs]
    if s.loaded.opset < 13:
        node.attributes["split"] = ir.AttrInt64s("split", sizes)
        return
    node.attributes.pop("num_outputs", None)
    if len(node.inputs) < 2:
        node.resize_inputs(2)
    node.replace_input_with(1, s.new_constant(names, f"{op.name}_sizes", np.array(sizes, np.int64)))


def _repair_slice(s: OnnxStructure, op: Op, node: Any, kept: Kept, names: Names) -> None:
    """Repair starts and ends of a Slice on axes that were cut, by the number of kept positions before them."""
    graph = s.graph()
    source = str(op.inputs[0])
    shape, axes = graph.values[source].shape, kept.axes(op.inputs[0])
    found = _slices(s, op, len(shape))
    if found is None or not any(a is not None and i in found for i, a in enumerate(axes)):
        return
    computed = "starts" not in op.attrs and any(s.constant(op, port) is None for port in (1, 2))
    if computed and any(axes[i] is None for i in found):
        return  # the lengths of the other axes may vary; whether what is computed still fits is checked afterwards
    starts, ends = [], []
    for axis, (start, end, step) in found.items():
        positions = axes[axis]
        if positions is not None and step == 1:
            start, end = (int((positions < k).sum()) for k in slice(start, end).indices(shape[axis])[:2])
        starts.append(start)
        ends.append(end)
    if "starts" in op.attrs:
        node.attributes["starts"], node.attributes["ends"] = (
            ir.AttrInt64s("starts", starts), ir.AttrInt64s("ends", ends)
        )  # fmt: skip
        return
    for port, values in ((1, starts), (2, ends)):
        node.replace_input_with(port, s.new_constant(names, f"{op.name}_{port}_cut", np.array(values, np.int64)))


def _repair_gather(s: OnnxStructure, op: Op, node: Any, kept: Kept, names: Names) -> None:
    """Renumber constant indices on an axis that was cut, without those of removed positions."""
    axes, indices = kept.axes(op.inputs[0]), s.constant(op, 1)
    if not axes or indices is None:
        return
    axis = op.attrs.get("axis", 0) % len(axes)
    positions = axes[axis]
    if positions is None:
        return
    length = s.graph().values[str(op.inputs[0])].shape[axis]
    number = np.full(length, -1)
    number[positions] = np.arange(len(positions))
    new = number[indices % length]
    left = kept.axes(op.outputs[0])
    if new.ndim == 1 and left and left[axis] is not None:
        new = new[left[axis]]
    node.replace_input_with(1, s.new_constant(names, f"{op.name}_positions", new))


def _repair_pad(s: OnnxStructure, op: Op, node: Any, kept: Kept, names: Names) -> None:
    graph = s.graph()
    shape, axes = graph.values[str(op.inputs[0])].shape, kept.axes(op.outputs[0])
    pads = _pads(s, op, len(shape))
    if pads is None or not axes:
        return
    rank = len(shape)
    for axis, positions in enumerate(axes):
        if positions is not None:
            front, last = pads[axis], pads[axis] + shape[axis]
            pads[axis], pads[axis + rank] = int((positions < front).sum()), int((positions >= last).sum())
    if "pads" in op.attrs:
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)
        return
    node.replace_input_with(1, s.new_constant(names, f"{op.name}_pads", np.array(pads, np.int64)))
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        node.replace_input_with(3, s.new_constant(names, f"{op.name}_axes", np.arange(rank)))


def _repair_width(s: OnnxStructure, op: Op, node: Any, kept: Kept, names: Names) -> None:
    recurrent = str(op.inputs[2])
    width = kept.shape(recurrent, s.graph().values[recurrent].shape)[-1]
    node.attributes[_WIDTHS[op.type]] = ir.AttrInt64(_WIDTHS[op.type], width)


def _repair_groups(s: OnnxStructure, op: Op, node: Any, kept: Kept, names: Names) -> None:
    shape = s.graph().values[str(op.inputs[0])].shape
    group = op.attrs["num_groups"]
    new = kept.shape(str(op.inputs[0]), shape)[1] * group // shape[1]
    node.attributes["num_groups"] = ir.AttrInt64("num_groups", new)


_REPAIRS: dict[str, Any] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _repair_conv),
    **dict.fromkeys(("Reshape", "Expand", "ConstantOfShape"), _repair_target),
    "Split": _repair_split, "Slice": _repair_slice, "Gather": _repair_gather, "Pad": _repair_pad,
    "GroupNormalization": _repair_groups, **dict.fromkeys(_WIDTHS, _repair_width),
}  # fmt: skip
