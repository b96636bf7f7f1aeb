"""ONNX side of :class:`bitwright.methods.front_end.FrontEnd`: models opened for a change, quantized, or bias-corrected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.float_model import AddBias, Array, Edit, sqnr
from bitwright.errors import ConfigError, ModelError, with_article
from bitwright.export.files.onnx_file import all_graphs, all_nodes, restore_types, save_model
from bitwright.export.qdq.markers import Names, move_uses
from bitwright.methods.folding.batch_norm_fold import FoldReport, fold_batch_norms
from bitwright.methods.front_end import Correctable, FrontEnd, GivenModel, Opened, Part
from bitwright.methods.layers import Layer
from bitwright.onnx.depth import OnnxBlocks
from bitwright.onnx.existing_quantizers import has_quantizers
from bitwright.onnx.experts import OnnxMixtures
from bitwright.onnx.model.data import as_feeds, example_feeds, input_specs, random_feeds
from bitwright.onnx.model.instrument import Instrument
from bitwright.onnx.model.load import Loaded, Source, clone_model, load_model
from bitwright.onnx.model.opset import modernize
from bitwright.onnx.model.session import Providers, open_session, run_session
from bitwright.onnx.model.view import OnnxView, Undo, measure_shapes, run_measured, tensor_names, values_by_name
from bitwright.onnx.simulation.marked_model import simulation_model
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.onnx.structure import OnnxStructure
from bitwright.progress import progress as progress_bar
from bitwright.runtimes.adapters import arrays_of, one_array


class _FoldingView(OnnxView):
    """A view in which ``MatMul`` of a 2-D input by a stored matrix and a following ``Add`` are one ``Gemm``.

    The nodes stay what they are. A product without an Add gets one when it is given a bias.
    """

    def __init__(self, model: Loaded, providers: Providers | None, shapes: dict[str, tuple[int, ...]] | None) -> None:
        super().__init__(model, providers, shapes)
        self.materialize(_computed_beside_norms(self._read().graph))
        self._adds: dict[str, Op | None] = {}  # product -> the Add after it
        self._inserted: dict[str, ir.Node] = {}  # product -> the Add that an edit has put after it
        self._nodes = self._read().node
        self._joined = self._join(self._read().graph)

    def graph(self) -> Graph:
        """The graph as it was when the view was made, products joined with their biases."""
        return self._joined

    def _join(self, graph: Graph) -> Graph:
        ops: list[Op] = []
        absorbed: set[str] = set()
        for op in graph.ops:
            if op.name in absorbed:
                continue
            if not _is_product(graph, op):
                ops.append(op)
                continue
            add = _bias_add(graph, op)
            self._adds[op.name] = add
            attrs = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}
            joined = replace(op, type="Gemm", attrs=attrs)
            if add is not None:
                absorbed.add(add.name)
                bias = add.inputs[1 - add.inputs.index(op.outputs[0])]
                joined = replace(joined, inputs=(*op.inputs[:2], bias), outputs=add.outputs)
            ops.append(joined)
        return Graph(ops, graph.values, graph.inputs, graph.outputs)

    def local(self, op: str) -> Any:
        """As :class:`OnnxView`, with the Add of a product."""
        product = super().local(op)
        if op not in self._adds:
            return product
        node = self._nodes[op]

        def run(*inputs: Array) -> Array:
            found = product(*inputs)
            add = self._add_behind(node, op)
            return found if add is None else self._apply(add, [found], lambda value: value is node.outputs[0])

        return run

    def _run(self, node: ir.Node, feeds: dict[str, Array]) -> Array:
        """As :class:`OnnxView`, with small convolutions and batch norms in numpy, faster than opening a session."""
        found = _in_numpy(node, list(feeds.values())) if list(feeds) == [f"i{i}" for i in range(len(feeds))] else None
        return super()._run(node, feeds) if found is None else found

    def _add_behind(self, node: ir.Node, op: str) -> ir.Node | None:
        if self._adds[op] is None and op not in self._inserted:
            return None
        return next(reader for reader, _ in node.outputs[0].uses())

    def can_edit(self, edit: Edit) -> str | None:
        """As :class:`OnnxView`; products can have a bias."""
        if isinstance(edit, AddBias) and edit.op in self._adds:
            taken = self._adds[edit.op] is not None or edit.op in self._inserted
            return "it has a bias" if taken else None
        return super().can_edit(edit)

    def _add_bias(self, edit: AddBias) -> Undo:
        if edit.op not in self._adds:
            return super()._add_bias(edit)
        node = self._nodes[edit.op]
        weight = node.inputs[1]
        assert weight is not None
        bias = self._new_initializer(f"{edit.op}.bias", edit.value, weight.dtype)
        add = self._inserted[edit.op] = self._insert_after(node, "Add", bias, f"{edit.op}.add")

        def restore() -> None:
            self._take_out(add, node, bias)
            del self._inserted[edit.op]

        return restore


#: multiplications up to which numpy is asked
_SMALL = 1 << 24


def _in_numpy(node: ir.Node, inputs: Sequence[Array]) -> Array | None:
    """Output of a convolution or batch norm in float32 numpy; ``None`` for other operators, and for large ones."""
    if node.domain not in ("", "ai.onnx") or any(x.dtype != np.float32 for x in inputs):
        return None
    attrs = {a.name: a.value for a in node.attributes.values() if not a.is_ref()}
    if node.op_type == "BatchNormalization" and not attrs.get("training_mode") and attrs.get("spatial", 1):
        return _normalized(np.float32(attrs.get("epsilon", 1e-5)), *inputs)
    if node.op_type == "Conv" and attrs.get("auto_pad", "NOTSET") == "NOTSET":
        return _convolved(attrs, *inputs)
    return None


def _normalized(epsilon: np.float32, x: Array, scale: Array, bias: Array, mean: Array, var: Array) -> Array:
    """A batch norm at inference."""
    shape = (-1, *(1,) * (x.ndim - 2))
    factor = scale / np.sqrt(var + epsilon)
    found: Array = (x - mean.reshape(shape)) * factor.reshape(shape) + bias.reshape(shape)
    return found


def _convolved(attrs: Mapping[str, Any], x: Array, weight: Array, bias: Array | None = None) -> Array | None:
    """A convolution, one kernel position at a time; ``None`` for large ones."""
    group, n = int(attrs.get("group", 1)), weight.ndim - 2
    pads = attrs.get("pads") or [0] * 2 * n
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)])
    steps, spread = attrs.get("strides") or [1] * n, attrs.get("dilations") or [1] * n
    reach = [d * (k - 1) + 1 for d, k in zip(spread, weight.shape[2:], strict=True)]
    count = [(length - r) // s + 1 for length, r, s in zip(x.shape[2:], reach, steps, strict=True)]
    if min(count) < 1 or weight.size * len(x) * int(np.prod(count)) > _SMALL:
        return None
    parts = weight.reshape(group, weight.shape[0] // group, weight.shape[1], -1)
    total = np.zeros((len(x), group, parts.shape[1], int(np.prod(count))), np.float32)
    for i, place in enumerate(np.ndindex(*weight.shape[2:])):
        begins = [d * k for d, k in zip(spread, place, strict=True)]
        window = tuple(slice(b, b + s * (c - 1) + 1, s) for b, s, c in zip(begins, steps, count, strict=True))
        seen = x[(slice(None), slice(None), *window)].reshape(len(x), group, parts.shape[2], -1)
        total += parts[..., i] * seen if parts.shape[2] == 1 else np.matmul(parts[..., i], seen)
    result: Array = total.reshape(len(x), weight.shape[0], *count)
    return result if bias is None else result + bias.reshape(-1, *(1,) * n)


def _computed_beside_norms(graph: Graph) -> Iterator[str]:
    """Weights, biases and parameters of batch norms that the model computes from constants, where one may be folded."""
    for op in filter(partial(_is_beside_norm, graph), graph.ops):
        for name in op.inputs:
            value = None if name is None else graph.values[name]
            if value is not None and value.kind == "constant" and value.is_float:
                yield value.name


def _is_beside_norm(graph: Graph, op: Op) -> bool:
    """Whether ``op`` is a batch norm, or a layer or an Add with one or an Add next to it."""
    if op.type == "BatchNormalization":
        return True
    if op.type not in (*TRAITS["layer"], "Add"):
        return False
    sources = [graph.producer(value) for value in op.inputs if value is not None]
    readers = [reader for value in op.outputs for reader, _ in graph.consumers(value)]
    return any(o is not None and o.type in ("BatchNormalization", "Add") for o in (*sources, *readers))


def _is_product(graph: Graph, op: Op) -> bool:
    """Whether ``op`` is a MatMul of a matrix that is computed by one that is stored."""
    if op.type != "MatMul" or len(op.inputs) != 2 or op.also or None in op.inputs:
        return False
    data, weight = (graph.values[str(name)] for name in op.inputs)
    return not data.is_static and len(data.shape) == 2 and weight.kind == "param" and len(weight.shape) == 2


def _bias_add(graph: Graph, op: Op) -> Op | None:
    """The Add after a product whose other operand is a stored bias."""
    add = graph.sole_consumer(op.outputs[0])
    if add is None or add.type != "Add" or len(add.inputs) != 2 or add.also:
        return None
    other = add.inputs[1 - add.inputs.index(op.outputs[0])]
    bias = graph.values[str(other)]
    channels = graph.values[str(op.inputs[1])].shape[1]
    return add if bias.kind == "param" and bias.shape == (channels,) else None


class OnnxCorrectable(Correctable):
    """An ONNX simulation and its float model.

    The float model returns the mean of every layer's channels; the quantized one takes them as inputs, subtracts the
    difference from the layer's output and returns it. Both are made once.
    """

    sim: QuantizationSimModel
    reference: QuantizationSimModel
    _sessions: tuple[Any, Any] | None = None

    def errors(self, layers: Sequence[Layer], batch: object) -> dict[str, tuple[Array, float]]:
        """As the base class says; a session each."""
        if self._sessions is None:
            sim = self.sim
            reference = _with_means(simulation_model(self.reference.marked, {}).model, layers, shift=False)
            shifted = _with_means(sim.simulation().model, layers, shift=True)
            self._sessions = tuple(
                open_session(model, sim.providers, threads=sim.threads) for model in (reference, shifted)
            )
        assert self._sessions is not None
        feeds = as_feeds(batch, self.sim.specs)
        rows = len(next(iter(feeds.values()), [0]))
        names = [_name(layer) for layer in layers]
        means = dict(zip(names, self._sessions[0].run(names, feeds), strict=True))
        # the shifts carry the weight of their batch: means over positions are over as many in every sample
        shifts = self._sessions[1].run([f"{name}.shift" for name in names], {**feeds, **means})
        return {
            layer.op: (np.asarray(shift, np.float64).reshape(-1), float(rows))
            for layer, shift in zip(layers, shifts, strict=True)
            if np.size(shift)  # nothing comes out of a branch that is not taken
        }

    def why_not_measured(self, layer: Layer) -> str | None:
        """As the base class says; branches of an If are measured in the batches that take them."""
        loop = self._loops.get(layer.op)
        return None if loop is None else f"every iteration of {loop} has a mean of its own, and they share its bias"

    @cached_property
    def _loops(self) -> dict[str, str]:
        """Operator in the body of a Loop or Scan -> that."""
        found: dict[str, str] = {}
        for node in all_nodes(self.sim.marked.graph):
            if node.op_type in ("Loop", "Scan") and not node.domain:
                inside = all_nodes(node.attributes["body"].as_graph())
                found.update((str(inner.name), f"{node.op_type} {node.name}") for inner in inside)
        return found

    def param(self, name: str) -> Array:
        """An initializer."""
        return np.array(self.sim.marked.graph.initializers[name].const_value.numpy(), np.float32)  # type: ignore[union-attr]

    def set_param(self, name: str, value: Array) -> None:
        """Replace a parameter of the simulation; sessions are opened again."""
        self.sim.set_parameter(name, value)


def _name(layer: Layer) -> str:
    return f"{layer.op}.mean"


def _with_means(model: ir.Model, layers: Sequence[Layer], *, shift: bool) -> ir.Model:
    """``model`` with the channel means of the layers' outputs: as outputs, or as inputs that they are moved to."""
    instrument = Instrument(model)
    names, outputs = instrument.builder.names, instrument.builder.outputs
    nodes = {node.name: node for node in all_nodes(model.graph)}

    def outside(value: ir.Value, graph: ir.Graph, name: str) -> ir.Value:
        """``value`` under ``name`` in the main graph; empty where its branch is not taken."""
        lifted, _ = instrument.lift(value, graph, np.zeros(0, np.float32), None)
        lifted.name = name
        return lifted

    results: list[ir.Value] = []
    for layer in layers:
        node = nodes[layer.adder or layer.op]
        add = _appender(node, names)
        value = node.outputs[0]
        axes = [axis for axis in range(layer.rank) if axis != layer.channel_axis]
        mean = _mean(model, value, axes, add, names)
        assert node.graph is not None
        if not shift:
            results.append(outside(mean, node.graph, _name(layer)))
            continue
        whole = node.graph is model.graph
        given = ir.Value(name=_name(layer), type=value.type, shape=ir.Shape([None] * layer.rank) if whole else None)
        model.graph.inputs.append(given)
        difference = add("Sub", [mean, given], value)
        moved = add("Sub", [value, difference], value)
        readers = {mean.producer(), moved.producer()}
        move_uses(value, moved, keep={node for node in readers if node is not None})
        if value.is_graph_output():
            free = str(moved.name)
            outputs.replace(value, moved)
            value.name = free
        results.append(outside(difference, node.graph, f"{_name(layer)}.shift"))
    model.graph.outputs.clear()
    model.graph.outputs.extend(results)
    return model


Append = Callable[[str, list[ir.Value], ir.Value], ir.Value]


def _appender(node: ir.Node, names: Names) -> Append:
    """A function that appends operators after ``node`` and returns their results."""
    last = [node]

    def append(op_type: str, inputs: list[ir.Value], like: ir.Value, **attributes: Any) -> ir.Value:
        made = ir.node(op_type, inputs, attributes or None, name=names.node(f"{node.name}.{op_type}"))
        made.outputs[0].name, made.outputs[0].type = names.value(f"{like.name}.{op_type.lower()}"), like.type
        assert last[0].graph is not None
        last[0].graph.insert_after(last[0], made)
        last[0] = made
        return made.outputs[0]

    return append


def _mean(model: ir.Model, value: ir.Value, axes: list[int], add: Any, names: Names) -> ir.Value:
    """``ReduceMean`` with the axes kept, in the form of the model's opset."""
    if model.opset_imports.get("", 0) < 18:
        result: ir.Value = add("ReduceMean", [value], value, axes=axes, keepdims=1)
        return result
    name = names.value(f"{value.name}.axes")
    tensor = ir.tensor(np.array(axes, np.int64), name=name)
    held = ir.Value(name=name, const_value=tensor, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(axes)]))
    model.graph.register_initializer(held)
    result = add("ReduceMean", [value, held], value, keepdims=1)
    return result


Model = onnx.ModelProto | ir.Model | Loaded
_LEAST_AGREEMENT = 60.0  # dB between the outputs before and after: beyond it only rounding differs
_LEAST_IN_HALF = 30.0


def _stated_shapes(model: ir.Model) -> dict[str, tuple[int, ...]] | None:
    """Shapes of all values, where the inputs fix them and inference has followed them all; ``None`` where a run has to tell."""
    held = values_by_name(model)
    if len(all_graphs(model.graph)) > 1 or any(node.domain not in ("", "ai.onnx") for node in model.graph):
        return None
    shapes = {name: held[name].shape for name in tensor_names(model)}
    found = {name: tuple(n for n in shape if isinstance(n, int)) for name, shape in shapes.items() if shape is not None}
    whole = all(shape is not None and len(found[name]) == len(shape) for name, shape in shapes.items())
    return found if whole else None


class OnnxOpened(Opened):
    """A model of this front end."""

    def __init__(self, model: Model, dummy_input: Any, function: str, providers: Providers | None) -> None:
        self._given, self._providers = model, providers
        self.reopens = not isinstance(model, Loaded)
        self.loaded = _loaded(model, function)
        specs = input_specs(self.loaded.model)
        self.example = next(random_feeds(specs)) if dummy_input is None else as_feeds(dummy_input, specs, "dummy_input")
        self._folds_without_check = dummy_input is None
        shapes = _stated_shapes(self.loaded.model)
        if shapes is None:
            self._shapes, outputs = run_measured(self.loaded.model, self.example, self._providers)
        else:
            self._shapes = shapes
            outputs = run_session(open_session(self.loaded.model, self._providers), self.example, "the model")
        self._untold = frozenset(tensor_names(self.loaded.model)) - self._shapes.keys()  # of branches not taken
        self._before = [arrays_of(output) for output in outputs]
        self.view = self._view()

    def _view(self) -> OnnxView:
        """The view of the present model; unchanged values keep their shapes."""
        if any(n not in self._shapes and n not in self._untold for n in tensor_names(self.loaded.model)):
            self._shapes = measure_shapes(self.loaded.model, self.example, self._providers)
        view = OnnxView(self.loaded, self._providers, self._shapes)
        view.materialize(_computed_weights(view.graph()))
        return view

    def changed(self) -> str | None:
        """The difference on the example input, in words; ``None`` within rounding."""
        return what_changed(self.view, self.example, self._before)

    def fold(self, progress: bool, unchecked: bool = False) -> FoldReport:
        """As the base class says."""
        known = None if self._folds_without_check or unchecked else (self._shapes, self._before)
        report = _folded(self.loaded, known and self.example, self._providers, progress, known)
        self.view = self._view()
        return report

    def give_back(self) -> None:
        """Write the model as it stands into what the caller gave."""
        self.view.tidy()
        give_back(self.loaded, self._given)

    def runnable(self) -> Any:
        """A new session of the model."""
        return open_session(self.loaded.model, self._providers)

    def outputs(self, batches: Iterable[Any]) -> Iterator[Sequence[Array]]:
        """As the base class says; one session for all batches."""
        session, specs = self.runnable(), input_specs(self.loaded.model)
        for i, batch in enumerate(batches):
            found = run_session(session, as_feeds(batch, specs, f"batch {i}"), f"batch {i}")
            yield [one_array(y) for y in found]


class OnnxGiven(GivenModel):
    """A model of this front end.

    Raises:
        ModelError: the model cannot be read.
    """

    def __init__(self, model: Source, providers: Providers | None, memory_budget: int | None) -> None:
        self._source, self._providers, self._budget = model, providers, memory_budget
        self._loaded: Loaded | None = load_model(model)

    def copy(self, first: Any) -> Loaded:
        """The model as it was loaded, which no step before needs any more, at an opset that every step knows.

        One with quantizers keeps its opset until the simulation has taken them out: converted, they are no longer found.
        """
        loaded, self._loaded = self._loaded, None
        loaded = load_model(self._source) if loaded is None else loaded
        return loaded if has_quantizers(loaded.model) else modernize(loaded, first)

    def copied(self, work: Loaded) -> Loaded:
        """Copy the model; both share the arrays of weights."""
        return replace(work, model=work.model.clone())

    def example(self) -> Any:
        """As the base class says."""
        return example_feeds(self._float[1])

    @cached_property
    def _float(self) -> tuple[Any, Any]:
        """Session and inputs, opened at the first batch, since later steps change the loaded model."""
        loaded = load_model(self._source)
        return open_session(loaded.model, self._providers), input_specs(loaded.model)

    def outputs(self, batch: Any) -> Sequence[Array]:
        """Outputs as arrays; the floats of a sequence or map are concatenated."""
        session, specs = self._float
        return [one_array(y) for y in run_session(session, as_feeds(batch, specs), "the float model")]

    def output_names(self) -> Sequence[str]:
        """As the base class says."""
        return [output.name for output in self._float[0].get_outputs()]

    def metric_target(self) -> Any:
        """A session."""
        assert self._loaded is not None
        return open_session(self._loaded.model, self._providers)

    def answers(self, target: Any, batch: Any) -> Sequence[Array]:
        """As the base class says, of a session."""
        shapes = {given.name: given.shape for given in target.get_inputs()}  # of states that pruning made narrower too
        specs = [replace(spec, shape=_lengths(shapes.get(spec.name))) for spec in self._float[1]]
        return [one_array(y) for y in run_session(target, as_feeds(batch, specs), "the model")]

    def reference(self, work: Loaded) -> Any:
        """The model itself: simulations copy it, and methods of rounding do not change it."""
        return work.model

    def simulation(self, work: Loaded, first: Any, rules: Mapping[str, Any]) -> QuantizationSimModel:
        """A simulation of a copy of the model."""
        return QuantizationSimModel(work.model, first, **rules, providers=self._providers, memory_budget=self._budget)


class _SessionOfPart:
    """An ``InferenceSession`` whose runs a pipeline records, or answers by another session."""

    def __init__(self, session: Any) -> None:
        self._session = self._answers = session
        self._keep: Callable[[Any], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None) -> Any:
        """As ``InferenceSession.run``."""
        if self._keep is not None:
            self._keep({name: np.array(value) for name, value in input_feed.items()})
        return self._answers.run(output_names, dict(input_feed), run_options)


class OnnxPart(Part):
    """A session that a program runs."""

    def __init__(self, model: Source) -> None:
        self.target = _SessionOfPart(open_session(load_model(model).model, None))

    def holds(self, other: Part) -> bool:
        """As the base class says: every model has a session of its own."""
        return other is self

    @contextmanager
    def recorded(self, keep: Callable[[Any], None]) -> Iterator[None]:
        """As the base class says."""
        self.target._keep = keep
        try:
            yield
        finally:
            self.target._keep = None

    @contextmanager
    def replaced(self, sim: QuantizationSimModel) -> Iterator[None]:
        """As the base class says."""
        self.target._answers = sim.session
        try:
            yield
        finally:
            self.target._answers = self.target._session

    def same_draws(self) -> AbstractContextManager[None]:
        """As the base class says: operators that draw have a seed in the file, or none that could be set."""
        return nullcontext()


def _lengths(shape: Sequence[Any] | None) -> tuple[int | None, ...] | None:
    """A shape as a session states it, where free axes have names."""
    return None if shape is None else tuple(n if isinstance(n, int) else None for n in shape)


class OnnxFrontEnd(FrontEnd):
    """Models and simulations of this front end."""

    def given(self, model: Source, providers: Providers | None, memory_budget: int | None) -> OnnxGiven:
        """As the base class says."""
        return OnnxGiven(model, providers, memory_budget)

    def structured(self, model: Source | Loaded, first: Any, providers: Any, in_place: bool = False) -> OnnxStructure:
        """As the base class says."""
        if in_place:
            _loaded(model, "prune_model")
        loaded = replace(model, model=clone_model(model.model)) if isinstance(model, Loaded) else load_model(model)
        return OnnxStructure(loaded, first, providers, partial(_put_into, model) if in_place else None)

    def part(self, model: Source) -> OnnxPart:
        """As the base class says."""
        return OnnxPart(model)

    def mixtures(self, model: Model, batches: Sequence[Any], providers: Any) -> OnnxMixtures:
        """As the base class says."""
        loaded = _loaded(model, "drop_experts")
        own = replace(loaded, model=clone_model(loaded.model)) if loaded is model else loaded
        return OnnxMixtures(own, batches, providers, partial(_put_into, model))

    def blocks(self, model: Model, first: Any, providers: Any) -> OnnxBlocks:
        """As the base class says."""
        loaded = _loaded(model, "drop_blocks")
        own = replace(loaded, model=clone_model(loaded.model)) if loaded is model else loaded
        return OnnxBlocks(own, first, providers, partial(_put_into, model))

    def save_compressed(self, model: Source, plan: dict[str, Any], folder: Path, name: str) -> list[Path]:
        """``<name>.onnx``."""
        folder.mkdir(parents=True, exist_ok=True)
        return save_model(load_model(model).model, folder / f"{name}.onnx")

    def open_model(self, model: Model, shapes: Any, dummy_input: Any, function: str, providers: Any) -> OnnxOpened:
        """As the base class says; ``shapes`` may be the example input.

        Raises:
            ModelError: the model cannot be read or run, ``dummy_input`` does not fit, or ``model`` is a path.
        """
        return OnnxOpened(model, shapes if dummy_input is None else dummy_input, function, providers)

    def fold(
        self, model: Model, shapes: Any, dummy_input: Any, function: str, providers: Any, progress: bool
    ) -> FoldReport:
        """As the base class says; without an example input the outputs are not compared."""
        loaded = _loaded(model, function)
        example = shapes if dummy_input is None else dummy_input
        feeds = None if example is None else as_feeds(example, input_specs(loaded.model), "dummy_input")
        report = _folded(loaded, feeds, providers, progress)
        give_back(loaded, model)
        return report

    def correctable(self, sim: QuantizationSimModel, reference: Source | None = None) -> OnnxCorrectable:
        """As the base class says."""
        if reference is None:
            return OnnxCorrectable(sim)
        return OnnxCorrectable(sim, QuantizationSimModel(reference, sim.example(), providers=sim.providers))

    def batches_of_all(self, batches: Iterable[Any]) -> Iterable[Any]:
        """As the base class says: ONNX models are simulated in one process."""
        return batches

    def steppable(self, sim: QuantizationSimModel, forward_fn: Any) -> Any:
        """As the base class says.

        Raises:
            ConfigError: ``forward_fn`` is given.
        """
        # on torch, which not every user of ONNX has
        from bitwright.onnx.program import OnnxSimulation

        if forward_fn is not None:
            raise ConfigError("forward_fn", "it is given for an ONNX model, which is called in one way", "leave it out")
        return OnnxSimulation(sim)


FRONT_END = OnnxFrontEnd()


def _folded(
    loaded: Loaded,
    feeds: dict[str, Array] | None,
    providers: Providers | None,
    progress: bool,
    known: tuple[dict[str, tuple[int, ...]], list[list[Array]]] | None = None,
) -> FoldReport:
    """Fold every batch norm that can be folded, in place and for good.

    Args:
        feeds: on which outputs are compared; ``None`` compares nothing.
        known: the shapes and the outputs on ``feeds``, where they were measured already.
    """
    if not any(node.op_type == "BatchNormalization" for node in all_nodes(loaded.model.graph)):
        feeds = None  # nothing will be folded, so nothing needs to be compared
    shapes, before = (None, []) if known is None or feeds is None else known
    if feeds is not None and shapes is None:
        shapes = measure_shapes(loaded.model, feeds, providers)
    view = _FoldingView(loaded, providers, shapes)
    check = None
    if feeds is not None:
        check = partial(what_changed, view, feeds, before or float_outputs(view, feeds))
    report = fold_batch_norms(view, check, bar=partial(progress_bar, enabled=progress))
    report.keep()
    view.tidy()
    return report


def _loaded(model: Any, function: str) -> Loaded:
    if not isinstance(model, (onnx.ModelProto, ir.Model, Loaded)):
        raise ModelError(
            function,
            f"{with_article(type(model).__name__)} cannot be changed in place",
            "load the file first: model = onnx.load(path), or bitwright.onnx.load_model(path)",
        )
    return model if isinstance(model, Loaded) else load_model(model)


def _computed_weights(graph: Graph) -> Iterator[str]:
    """Weights that the model computes from constants, as a transposed initializer."""
    for op in graph.ops:
        for value in op.inputs[1:] if op.type in TRAITS["layer"] else ():
            if value is not None and graph.values[value].kind == "constant" and graph.values[value].is_float:
                yield value


def _put_into(model: Any, loaded: Loaded) -> None:
    """Write a model into another one that has the same input names."""
    if isinstance(model, Loaded):
        model.model.graph = loaded.model.graph
    else:
        give_back(loaded, model)


def give_back(loaded: Loaded, model: Model) -> None:
    """Write the changed copy into what the caller gave."""
    if isinstance(model, Loaded):
        return
    graph = loaded.model.graph
    listed = {str(v.name): v for v in (*graph.initializers.values(), *graph.inputs)}
    graph.inputs.clear()
    graph.inputs.extend(listed[name] for name in loaded.inputs if name in listed)
    if isinstance(model, onnx.ModelProto):
        proto = ir.to_proto(loaded.model)
        restore_types(proto)
        model.CopyFrom(proto)
    else:
        model.graph = graph
        model.functions.clear()
        model.ir_version = loaded.model.ir_version


def float_outputs(view: OnnxView, feeds: dict[str, Array]) -> list[list[Array]]:
    """The outputs of the model, each as its arrays."""
    return [arrays_of(output) for output in run_session(open_session(view.model, view.providers), feeds, "the model")]


def what_changed(view: OnnxView, feeds: dict[str, Array], before: Sequence[Sequence[Array]]) -> str | None:
    """The difference from ``before``, in words; ``None`` within rounding."""
    for value, old, new in zip(view.model.graph.outputs, before, float_outputs(view, feeds), strict=True):
        if len(old) != len(new):
            return f"{value.name} holds {len(new)} tensors, not {len(old)}"
        for one, other in zip(old, new, strict=True):
            difference = _difference(one, other)
            if difference:
                return f"{value.name} {difference}"
    return None


def _difference(old: Array, new: Array) -> str | None:
    if old.dtype.kind != "f":
        return None
    finite = np.isfinite(old)
    if old.shape != new.shape or not np.array_equal(finite, np.isfinite(new)):
        return "has another shape, or NaN or infinite elements in other places"
    agreement = sqnr(old[finite], new[finite])
    if agreement < (_LEAST_IN_HALF if old.dtype == np.float16 else _LEAST_AGREEMENT):
        return f"agrees with the original to {agreement:.1f} dB only"
    return None
