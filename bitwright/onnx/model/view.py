"""``FloatModel`` of an ONNX model, through which framework-independent algorithms read and change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.core.graph.graph import Graph
from bitwright.core.graph.operators import ROTATION, TRAITS
from bitwright.core.simulation.calibration import with_samples
from bitwright.core.simulation.float_model import (
    AddBias,
    Array,
    Bypass,
    Chain,
    Clamp,
    Edit,
    Seen,
    SetParam,
    Undo,
    Untie,
    carry_out,
)
from bitwright.errors import ModelError, checks_arguments, close_matches, with_article
from bitwright.export.files.onnx_file import all_graphs, all_nodes, is_tensor
from bitwright.export.qdq.markers import Names, Outputs, bypass, move_uses, remove_unread
from bitwright.onnx.model.data import as_feeds, input_specs
from bitwright.onnx.model.graph import GraphView, build_graph
from bitwright.onnx.model.instrument import Instrument
from bitwright.onnx.model.load import Loaded, Source, load_model
from bitwright.onnx.model.session import Providers, open_session, run_session

_MOST_AXES = 8  # of a value in a body whose number of axes is not known
_NOT_TAKEN = [-1]  # stands for the shape of what lies in a branch that is not taken


class OnnxView:
    """A model seen through :class:`bitwright.core.simulation.float_model.FloatModel`.

    Edits change the loaded copy, never what it was loaded from. A bypassed node becomes an ``Identity``;
    :meth:`tidy` takes such nodes out when the edits are final.

    Args:
        model: path, proto, ``onnx_ir`` model, or a :class:`Loaded` one, which is then changed in place.
        providers: as ONNX Runtime takes them; the CPU by default.
        shapes: of values as seen in a run, where shape inference may not know them; see :func:`measure_shapes`.
        prepared: makes of a batch what the model takes.
    """

    @checks_arguments
    def __init__(
        self,
        model: Source | Loaded,
        providers: Providers | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        prepared: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self._prepared = prepared
        self.loaded = model if isinstance(model, Loaded) else load_model(model)
        self.model = self.loaded.model
        self.providers, self._shapes = providers, dict(shapes or {})
        self._view: GraphView | None = None
        self._sessions: dict[Any, Any] = {}  # of single operators, by what they compute
        self._names: Names | None = None
        self._constants: dict[str, Array] = {}

    def graph(self) -> Graph:
        """The graph of the model; read anew after :meth:`refresh`."""
        return self._read().graph

    def _read(self) -> GraphView:
        if self._view is None:
            self._view = build_graph(self.model, self._shapes)
            self._constants.clear()
        return self._view

    def refresh(self) -> None:
        """Forget the graph, since the model was changed."""
        self._view = None

    # -- parameters

    def _initializer(self, name: str) -> ir.Value:
        value = self.model.graph.initializers.get(name)
        if value is None or value.const_value is None:
            known = list(self.model.graph.initializers)[:2000]  # close matches compare every pair of letters
            raise KeyError(f"the model has no initializer {name!r}{close_matches(name, known)}")
        return value

    def param(self, name: str) -> Array:
        """A copy of an initializer; numbers of less than 32 bits as float32."""
        tensor = self._initializer(name).const_value
        assert tensor is not None
        return _wide(tensor.numpy()).copy()

    def constant(self, name: str) -> Array | None:
        """Array of a value computed from initializers and constants alone; floats below 32 bits as float32.

        ``None`` inside the body of an If, Loop or Scan, which is not run by itself.
        """
        value = self._read().value[name]
        producer = value.producer()
        if producer is not None and producer.graph is not self.model.graph:
            return None
        return _wide(np.asarray(self._constant(value))).copy()

    def set_param(self, name: str, value: Array) -> None:
        """Give an initializer a new value; its dtype stays.

        Raises:
            ModelError: the shape differs.
        """
        holder = self._initializer(name)
        tensor = holder.const_value
        assert tensor is not None
        shape = tuple(int(n) for n in tensor.shape.numpy())
        if tuple(value.shape) != shape:
            raise ModelError(name, f"the new value has shape {value.shape}, the parameter {shape}", "keep the shape")
        array = np.asarray(value, order="C").astype(tensor.dtype.numpy())
        holder.const_value = ir.Tensor(array, dtype=tensor.dtype, name=name)
        self._constants.clear()

    # -- running

    def capture(self, values: Sequence[str], batches: Iterable[Any]) -> Iterator[dict[str, list[Array]]]:
        """Run the batches one by one; yield the named values of each, every one in a list of its own.

        A value of the main graph has one array per batch; one in the body of a Loop or Scan as many as there are
        iterations, one in a branch of an If none where the other branch is taken.

        Args:
            values: names of any kind of value.
            batches: feeds, as :func:`bitwright.onnx.model.data.as_feeds` takes them.

        Raises:
            ModelError: a value is unknown, or changes its shape from one iteration to the next; or a feed does not fit.
        """
        self.graph()
        for name in values:
            self._check_value(name)
        session, leading = _capture_session(self.model, values, self.providers)
        specs = input_specs(self.model)
        for i, batch in enumerate(with_samples(batches)):
            feeds = as_feeds(self._prepared(batch), specs, f"batch {i}")
            arrays = run_session(session, feeds, f"batch {i}")
            yield {
                name: [_wide(part) for part in _iterations(array, axes)]
                for name, array, axes in zip(values, arrays, leading, strict=True)
            }

    def walk(self, values: Sequence[str], batches: Sequence[Any], seen: Seen) -> None:
        """Run all batches for one value at a time, in the order of the graph; see ``FloatModel.walk``."""
        order = {name: i for i, op in enumerate(self.graph().ops) for name in op.outputs}
        for name in sorted(values, key=lambda name: order.get(name, -1)):
            seen(name, range(len(batches)), [found[name] for found in self.capture([name], batches)])

    def _check_value(self, name: str) -> None:
        if name not in self._read().value:
            some = list(self._read().value)[:2000]
            raise ModelError(name, f"the model has no such value{close_matches(name, some)}", "name a graph value")

    def local(self, op: str) -> Callable[..., Array]:
        """The op as a function of its activation inputs, in port order; parameters are read at each call.

        Raises:
            ModelError: the op is an If, a Loop or a Scan.
        """
        view = self._read()
        node, fixed = view.node[op], view.graph.values
        if node.op_type in TRAITS["bodies"] and not node.domain:
            raise ModelError(
                op, f"{with_article(node.op_type)} is not a single operator", "ask for the operators of its bodies"
            )

        def is_open(value: ir.Value | None) -> bool:
            if value is None:
                return False
            known = fixed.get(str(value.name))
            return (known is None or not known.is_static) and not value.is_initializer()

        return lambda *inputs: self._apply(node, inputs, is_open)

    def _apply(self, node: ir.Node, given: Sequence[Array], is_open: Callable[[ir.Value | None], bool]) -> Array:
        left = iter(given)
        feeds = {}
        for port, value in enumerate(node.inputs):
            if value is not None:
                array = np.asarray(next(left)) if is_open(value) else self._constant(value)
                if value.dtype is not None and value.dtype.is_floating_point():
                    array = array.astype(value.dtype.numpy(), copy=False)
                feeds[f"i{port}"] = np.asarray(array, order="C")
        return _wide(self._run(node, feeds))

    def _run(self, node: ir.Node, feeds: dict[str, Array]) -> Array:
        """The first output of an operator, of inputs by port: ``i0``, ``i1``, ..."""
        result: Array = run_session(self._single(node), feeds, str(node.name))[0]
        return result

    def _constant(self, value: ir.Value) -> Array:
        """Array of a static value; values computed from initializers are cached."""
        if value.const_value is not None:
            array: Array = value.const_value.numpy()
            return array
        name = str(value.name)
        if name not in self._constants:
            (self._constants[name],) = self._computed([value], name)
        return self._constants[name]

    def _computed(self, values: Sequence[ir.Value], site: str) -> list[Array]:
        """Arrays of the main graph's values that depend on constants alone."""
        part = ir.convenience.extract(self.model.graph, [], values)
        part.opset_imports.update(self.model.opset_imports)
        session = open_session(ir.Model(part, ir_version=self.model.ir_version), self.providers)
        return run_session(session, {}, site)

    def materialize(self, values: Iterable[str]) -> None:
        """Turn constants that the model computes into initializers, and remove the nodes that computed them.

        Args:
            values: names; those of initializers and of values inside bodies are left as they are, and codes that the model
                dequantizes: they keep their grid, which their float values would lose.
        """
        view, graph = self._read(), self.model.graph
        found = [view.value[name] for name in dict.fromkeys(values)]
        computed = (value for value in found if value.const_value is None and value.graph is graph)
        wanted = [value for value in computed if not _is_dequantized(value)]
        if not wanted:
            return
        for value, array in zip(wanted, self._computed(wanted, "constants"), strict=True):
            move_uses(value, self._new_initializer(f"{value.name}_value", array, value.dtype))
            remove_unread(value)
        self.refresh()

    def _single(self, node: ir.Node) -> Any:
        """A session for an operator like ``node``; operators that compute the same share it."""
        key = _signature(node)
        if key not in self._sessions:
            single = _alone(node)
            graph = ir.Graph(
                [value for value in single.inputs if value is not None],
                single.outputs[:1],
                nodes=[single],
                opset_imports=dict(self.model.opset_imports),
                name="single",
            )
            self._sessions[key] = open_session(
                ir.Model(graph, ir_version=self.model.ir_version), self.providers, threads=1
            )
        return self._sessions[key]

    # -- edits

    def can_edit(self, edit: Edit) -> str | None:
        """The reason why ``edit`` cannot be done on this model; ``None`` where it can."""
        if isinstance(edit, SetParam):
            known = edit.name in self.model.graph.initializers
            return None if known else f"there is no initializer {edit.name}"
        node = self._read().node.get(edit.op)
        if node is None:
            return f"there is no operator {edit.op}"
        if isinstance(edit, AddBias):
            return _no_bias_place(node)
        if isinstance(edit, Clamp):
            clips = node.op_type == "Clip" and not node.domain
            return None if clips else f"it is {with_article(node.op_type)}, not a Clip"
        if isinstance(edit, Untie):
            return _no_initializer(node, edit.port)
        if isinstance(edit, Chain):
            return _no_chain(node)
        return _no_way_past(node)

    def edit(self, edits: Sequence[Edit]) -> Undo:
        """Carry out the edits; the function returned undoes them in reverse order.

        Raises:
            ModelError: an edit is impossible; those before it are undone.
        """
        return carry_out(edits, self._one, self.refresh)

    def _one(self, edit: Edit) -> Undo:
        if isinstance(edit, SetParam):
            holder = self._initializer(edit.name)
            before = holder.const_value
            self.set_param(edit.name, edit.value)

            def restore() -> None:
                holder.const_value = before
                self._constants.clear()

            return restore
        reason = self.can_edit(edit)
        if reason:
            raise ModelError(edit.op, f"{type(edit).__name__} is impossible: {reason}", "ask can_edit first")
        if isinstance(edit, AddBias):
            return self._add_bias(edit)
        if isinstance(edit, Untie):
            return self._untie(edit)
        if isinstance(edit, Chain):
            return self._chain(edit)
        return self._clamp(edit) if isinstance(edit, Clamp) else self._bypass(edit)

    def _new_initializer(self, name: str, array: Array, dtype: ir.DataType | None) -> ir.Value:
        """A registered initializer under ``name`` or one like it."""
        if self._names is None:
            self._names = Names(self.model)
        name = self._names.value(name)
        kind = dtype or ir.DataType.FLOAT
        tensor = ir.Tensor(np.asarray(array, order="C").astype(kind.numpy()), dtype=kind, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(kind), const_value=tensor)
        self.model.graph.register_initializer(value)
        return value

    def _add_bias(self, edit: AddBias) -> Undo:
        node = self._read().node[edit.op]
        weight = node.inputs[1]
        assert weight is not None
        bias = self._new_initializer(f"{edit.op}.bias", edit.value, weight.dtype)
        if node.op_type == "MatMul":
            added = self._insert_after(node, "Add", bias, f"{edit.op}.add")
            return lambda: self._take_out(added, node, bias)
        size = len(node.inputs)
        node.resize_inputs(3)
        node.replace_input_with(2, bias)

        def restore() -> None:
            node.replace_input_with(2, None)
            node.resize_inputs(size)
            self.model.graph.initializers.pop(str(bias.name))

        return restore

    def _insert_after(self, node: ir.Node, op_type: str, operand: ir.Value, name: str) -> ir.Node:
        """Insert an operator on the result of ``node`` and ``operand`` before its readers."""
        assert node.graph is not None and self._names is not None
        result = node.outputs[0]
        second = ir.Node("", op_type, [result, operand], name=self._names.node(name))
        out = second.outputs[0]
        out.name, out.type, out.shape = (
            self._names.value(f"{result.name}.{op_type.lower()}"),
            result.type,
            result.shape,
        )
        node.graph.insert_after(node, second)
        move_uses(result, out, keep={second})
        if result.is_graph_output():
            name, self_name = str(result.name), str(out.name)
            Outputs(self.model).replace(result, out)
            result.name, out.name = self_name, name
        return second

    def _take_out(self, second: ir.Node, node: ir.Node, *initializers: ir.Value) -> None:
        """Undo :meth:`_insert_after`; the operands named are dropped."""
        result, out = node.outputs[0], second.outputs[0]
        move_uses(out, result)
        if out.is_graph_output():
            name = str(out.name)
            Outputs(self.model).replace(out, result)
            result.name = name
        assert second.graph is not None
        second.graph.remove(second, safe=True)
        for value in initializers:
            self.model.graph.initializers.pop(str(value.name))

    def _clamp(self, edit: Clamp) -> Undo:
        """``Clip`` takes one bound for all: it becomes Relu or Max, and Min after it."""
        node = self._read().node[edit.op]
        result = node.outputs[0]
        sizes = self.graph().values[str(result.name)].shape if result.shape is None else result.shape
        shape = [-1, *(1,) * (len(sizes) - edit.axis - 1)]
        low, high = (np.asarray(end, np.float64).reshape(shape) for end in (edit.low, edit.high))
        as_before = _remember(node)
        kind = ir.DataType.FLOAT if result.dtype is None else result.dtype
        made: list[ir.Value] = []
        node.attributes.clear()
        if np.any(low):
            made.append(self._new_initializer(f"{edit.op}.low", low, kind))
            node.op_type = "Max"
            node.resize_inputs(2)
            node.replace_input_with(1, made[0])
        else:
            node.op_type = "Relu"
            node.resize_inputs(1)
        second: ir.Node | None = None
        if np.isfinite(high).all():
            made.append(self._new_initializer(f"{edit.op}.high", high, kind))
            second = self._insert_after(node, "Min", made[-1], f"{edit.op}.min")

        def restore() -> None:
            if second is not None:
                self._take_out(second, node)
            as_before()
            for value in made:
                self.model.graph.initializers.pop(str(value.name))

        return restore

    def _untie(self, edit: Untie) -> Undo:
        node = self._read().node[edit.op]
        shared = node.inputs[edit.port]
        assert shared is not None and shared.const_value is not None
        own = self._new_initializer(f"{edit.op}.{shared.name}", shared.const_value.numpy(), shared.dtype)
        node.replace_input_with(edit.port, own)
        self.refresh()

        def restore() -> None:
            node.replace_input_with(edit.port, shared)
            self.model.graph.initializers.pop(str(own.name))
            self.refresh()

        return restore

    def _chain(self, edit: Chain) -> Undo:
        """Layers in front of a node, whose weight and attributes change."""
        node = self._read().node[edit.op]
        source, weight, attributes = node.inputs[0], node.inputs[1], dict(node.attributes)
        assert source is not None and weight is not None and node.graph is not None
        made = [self._new_initializer(f"{edit.op}.factor", edit.weight, weight.dtype)]
        nodes: list[ir.Node] = []
        last = source
        assert self._names is not None
        for i, part in enumerate(edit.before):
            factor = self._new_initializer(f"{edit.op}.factor{i + 1}", part.weight, weight.dtype)
            first = ir.node(
                part.type,
                [last, factor],
                _conv_attributes(part.attrs),
                name=self._names.node(f"{edit.op}.{ROTATION if part.rotates else i + 1}"),
            )
            last = first.outputs[0]
            last.name, last.type = self._names.value(f"{edit.op}.reduced{i + 1}"), source.type
            node.graph.insert_before(node, first)
            made.append(factor)
            nodes.append(first)
        node.replace_input_with(0, last)
        node.replace_input_with(1, made[0])
        for name in edit.attrs:
            node.attributes.pop(name, None)
        changed = _conv_attributes(edit.attrs)
        node.attributes.update({a.name: a for a in ir.convenience.convert_attributes(changed)})
        kept = weight.uses() or weight.is_graph_output() or weight.graph is not self.model.graph
        if not kept:
            self.model.graph.initializers.pop(str(weight.name))

        def restore() -> None:
            if not kept:
                self.model.graph.register_initializer(weight)
            node.replace_input_with(0, source)
            node.replace_input_with(1, weight)
            node.attributes.clear()
            node.attributes.update(attributes)
            for first in reversed(nodes):
                assert first.graph is not None
                first.graph.remove(first, safe=True)
            for value in made:
                self.model.graph.initializers.pop(str(value.name))

        return restore

    def _bypass(self, edit: Bypass) -> Undo:
        node = self._read().node[edit.op]
        restore = _remember(node)
        node.resize_inputs(1)
        if len(node.outputs) > 1:
            node.resize_outputs(1)
        node.domain, node.op_type = "", "Identity"
        node.attributes.clear()
        return restore

    def tidy(self) -> None:
        """Remove ``Identity`` nodes and unused initializers; edits cannot be undone afterwards."""
        graphs, outputs = list(all_graphs(self.model.graph)), Outputs(self.model)
        for graph in graphs:
            for node in list(graph):
                if node.op_type == "Identity" and not node.domain:
                    bypass(node, outputs)
        held = [(graph, value) for graph in graphs for value in list(graph.initializers.values())]
        for graph, value in held:
            if not value.uses() and not value.is_graph_output():
                graph.initializers.pop(str(value.name))
        self.refresh()


def _remember(node: ir.Node) -> Undo:
    """Return a function that restores the present operator of ``node`` and its inputs after the first."""
    kind, inputs, attributes = (node.domain, node.op_type), node.inputs, dict(node.attributes)
    outputs = len(node.outputs)

    def restore() -> None:
        node.domain, node.op_type = kind
        node.attributes.clear()
        node.attributes.update(attributes)
        node.resize_inputs(len(inputs))
        for port, value in enumerate(inputs[1:], 1):
            node.replace_input_with(port, value)
        if outputs > 1:
            node.resize_outputs(outputs)

    return restore


def _capture_session(
    model: ir.Model, values: Sequence[str], providers: Providers | None
) -> tuple[Any, list[int | None]]:
    """A session that returns ``values``, and how many axes loops put in front of each; ``None`` in the main graph."""
    copy = model.clone()
    held = values_by_name(copy)
    instrument = Instrument(copy)
    outputs, leading = [], []
    for name in values:
        value, axes = held[name], None
        inner = value.graph
        if inner is not None and inner is not copy.graph:
            value, axes = instrument.lift(value, inner, np.zeros(0, (value.dtype or ir.DataType.FLOAT).numpy()), None)
        # an Identity each, so that inputs, initializers and values named twice can be returned too
        node = ir.Node("", "Identity", [value], name=instrument.builder.names.node(f"{name}/captured"))
        node.outputs[0].name = instrument.builder.names.value(f"{name}_captured")
        node.outputs[0].type = value.type
        copy.graph.append(node)
        outputs.append(node.outputs[0])
        leading.append(axes)
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(outputs)
    return open_session(copy, providers), leading


def values_by_name(model: ir.Model) -> dict[str, ir.Value]:
    """Every value of a model and of its bodies, initializers included."""
    held = {str(v.name): v for g in all_graphs(model.graph) for v in (*g.inputs, *g.initializers.values())}
    held.update((str(v.name), v) for node in all_nodes(model.graph) for v in node.outputs if v.name)
    return held


def _iterations(array: Array, axes: int | None) -> list[Array]:
    """The value in each iteration of one run: loops prepend ``axes`` axes, and fill skipped iterations with NaN."""
    if axes is None:
        return [array]
    if axes == 0:  # of a branch; one that was not taken gives nothing
        return [array] if array.shape != (0,) else []
    entries = list(array.reshape(math.prod(array.shape[:axes]), *array.shape[axes:]))
    return [entry for entry in entries if entry.dtype.kind != "f" or not entry.size or not np.isnan(entry).all()]


def measure_shapes(model: ir.Model, feeds: Any, providers: Providers | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of every value in one run: for models whose shapes cannot be inferred.

    The tensors themselves are not kept: the run returns their shapes. Of a value inside a loop the shape in its last
    iteration is given, of one in a branch that is not taken nothing.

    Args:
        model: as :func:`load_model` gives it; left as it is.
        feeds: one batch.
    """
    return run_measured(model, feeds, providers)[0]


def run_measured(
    model: ir.Model, feeds: Any, providers: Providers | None = None
) -> tuple[dict[str, tuple[int, ...]], list[Any]]:
    """The shapes that :func:`measure_shapes` gives, and the outputs of the same run."""
    copy = model.clone()
    instrument = Instrument(copy)
    held, names = values_by_name(copy), list(tensor_names(copy))
    inner = (name for name in names if held[name].graph is not copy.graph)
    # nothing is left of the shape of a number that could say in which iterations its branch was taken
    found: dict[str, tuple[int, ...]] = {name: () for name in inner if held[name].shape == ()}
    asked = [(name, *_shape_in_runs(instrument, held[name])) for name in names if name not in found]
    own = len(copy.graph.outputs)
    copy.graph.outputs.extend(shape for _, shape, _ in asked)
    given = as_feeds(feeds, input_specs(model))
    arrays = run_session(open_session(copy, providers), given, "feeds")
    for (name, _, axes), array in zip(asked, arrays[own:], strict=True):
        if (made := _last_shape(array, axes)) is not None:
            found[name] = made
    return found, arrays[:own]


def _shape_in_runs(instrument: Instrument, value: ir.Value) -> tuple[ir.Value, int | None]:
    """The shape of a value as a value of the main graph, and how many axes the loops around it prepend."""
    graph = value.graph
    assert graph is not None
    place = instrument.right_after(value, graph)
    shape = instrument.builder.emit(place, "Shape", [value], f"{value.name}_shape", ir.DataType.INT64)
    shape.shape = None
    if graph is instrument.model.graph:
        return shape, None
    if value.shape is None:  # iterations are stacked, and may make numbers of axes that differ
        shape, rank = _padded(instrument, shape, graph), _MOST_AXES
    else:
        rank = len(value.shape)
    return instrument.lift(shape, graph, np.asarray(_NOT_TAKEN * rank, np.int64), None)


def _padded(instrument: Instrument, shape: ir.Value, graph: ir.Graph) -> ir.Value:
    """A shape with -1 behind it, in a vector of a fixed length."""
    held, emit = instrument.builder.initializer, instrument.builder.emit
    several = [shape, held("padding", np.asarray(_NOT_TAKEN * _MOST_AXES, np.int64))]
    place = instrument.right_after(shape, graph)
    long = emit(place, "Concat", several, f"{shape.name}_long", ir.DataType.INT64, axis=0)
    cut = [long, held("first", np.asarray([0], np.int64)), held("end", np.asarray([_MOST_AXES], np.int64))]
    made = emit(instrument.right_after(long, graph), "Slice", cut, f"{shape.name}_padded", ir.DataType.INT64)
    long.shape = made.shape = None
    return made


def _last_shape(array: Array, axes: int | None) -> tuple[int, ...] | None:
    """The shape in the last iteration that made the value; ``None`` where none did."""
    seen = _iterations(array, axes) if axes and array.tolist() != _NOT_TAKEN else [array]
    made = [one for one in seen if (one.ravel()[:1] >= 0).all()]
    return tuple(int(n) for n in made[-1] if n >= 0) if made else None


def tensor_names(model: ir.Model) -> Iterator[str]:
    """Names of all values whose shape :func:`measure_shapes` can measure."""
    for name, value in values_by_name(model).items():
        if value.graph is not None and not value.is_initializer() and is_tensor(value):
            yield name


def _no_bias_place(node: ir.Node) -> str | None:
    if node.op_type == "MatMul" and not node.domain:
        weight = node.inputs[1]
        stored = weight is not None and weight.is_initializer() and weight.shape is not None and len(weight.shape) == 2
        return None if stored else "it multiplies by no stored matrix"
    if node.op_type not in TRAITS["bias_port"] or node.domain:
        return f"{with_article(node.op_type)} has no input for a bias"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return f"it has the bias {node.inputs[2].name}"
    return None


def _no_initializer(node: ir.Node, port: int) -> str | None:
    held = node.inputs[port] if port < len(node.inputs) else None
    return None if held is not None and held.is_initializer() else "it reads no initializer there"


def _no_chain(node: ir.Node) -> str | None:
    """The reason why no layers can be inserted before a node whose weight changes."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or not weight.is_initializer() or node.inputs[0] is None:
        return "it has no stored weight"
    return "another operator reads its weight" if len(weight.uses()) > 1 or weight.is_graph_output() else None


def _conv_attributes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a convolution in ONNX; without pads where these follow the input's size."""
    automatic = str(attrs.get("auto_pad", "NOTSET")) != "NOTSET"
    left_out = "pads" if automatic else "auto_pad"
    return {k: list(v) if isinstance(v, tuple) else v for k, v in attrs.items() if k != left_out}


def _no_way_past(node: ir.Node) -> str | None:
    if sum(bool(value.name) for value in node.outputs) != 1:
        return "it has several outputs"
    if not node.inputs or node.inputs[0] is None or node.op_type in TRAITS["bodies"]:
        return "it has no input to pass through"
    return None


def _alone(node: ir.Node) -> ir.Node:
    """An operator like ``node`` that reads inputs ``i0``, ``i1``, ... of the same types."""
    inputs = [
        None if value is None else ir.Value(name=f"i{port}", type=value.type or ir.TensorType(ir.DataType.FLOAT))
        for port, value in enumerate(node.inputs)
    ]
    single = ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs),
        name=node.name,
    )  # fmt: skip
    for i, value in enumerate(single.outputs):
        value.name = f"o{i}" if node.outputs[i].name or i == 0 else ""
    single.outputs[0].type = node.outputs[0].type
    return single


def _is_dequantized(value: ir.Value) -> bool:
    """Whether a DequantizeLinear computes the value, across data movement."""
    node = value.producer()
    while node is not None and node.op_type != "DequantizeLinear":
        source = node.inputs[0] if node.inputs else None
        node = None if source is None else source.producer()
    return node is not None


def _signature(node: ir.Node) -> tuple[Any, ...]:
    """Signature of an operator without its operands; operators with equal ones share a session."""
    attributes = tuple(
        sorted(
            (a.name, a.type, a.value if isinstance(a.value, (int, float, str)) else repr(a.value))
            for a in node.attributes.values()
        )
    )
    kinds = tuple(None if value is None else value.dtype for value in node.inputs)
    made = tuple(bool(value.name) for value in node.outputs)
    large = any(a.type in (ir.AttributeType.TENSOR, ir.AttributeType.GRAPH) for a in node.attributes.values())
    return node.domain, node.op_type, attributes, kinds, made, id(node) if large else 0


def _wide(array: Array) -> Array:
    """Convert floating-point numbers of less than 32 bits to float32."""
    narrow = array.dtype.name in ("float16", "bfloat16") or array.dtype.name.startswith("float8")
    return array.astype(np.float32) if narrow else np.asarray(array)
