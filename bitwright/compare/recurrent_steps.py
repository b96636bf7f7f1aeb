"""Verification inside recurrent layers: all steps of a Scan side by side, each fed the simulation's own states.

What a step computes does not depend on how often the loop ran before, only on the states it is handed. So the body of
a Scan that :mod:`bitwright.export.recurrent` wrote is put into the main graph once, for ``length * batch`` rows at a
time: its slices are the scanned tensors with the two axes joined, its states those of the simulation one step earlier.
Then it is a chain of layers like any other, which :mod:`bitwright.compare.cut` takes apart at its quantizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.bodies import runs_of
from bitwright.compare.runtime import refusals, run_model
from bitwright.export.qdq.forms import Builder, before, damaged_metadata, read_metadata
from bitwright.export.qdq.markers import STATES, copy_model, move_uses

Array = NDArray[Any]
Values = Mapping[str, Array | Sequence[Array]]


@dataclass
class SideBySide:
    """A model in which the steps of recurrent layers stand side by side.

    Attributes:
        model: the model, a copy where something changed.
        values: the simulation's values, in the shapes that this model has.
        feeds: graph inputs that were added -> what to feed them.
        settled: graph outputs that are states, which are compared where a step makes them.
    """

    model: ir.Model
    values: dict[str, Array | Sequence[Array]]
    feeds: dict[str, Array] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)


def side_by_side(model: ir.Model, values: Values, graph_inputs: Mapping[str, Array]) -> SideBySide:
    """Lay out every recurrent layer of the main graph whose states the simulation gave values for.

    A layer whose sequences have lengths that are computed inside the model stays as it is.

    Args:
        model: as ``to_qdq`` wrote it; left as it is.
        values: site -> the simulation's values, of inner sites for all steps in the order of time: ``[length, batch,
            hidden]``, perhaps with an axis of directions.
        graph_inputs: name -> value.
    """
    found = SideBySide(model, dict(values))
    if not any(STATES in node.metadata_props for node in model.graph):
        return found
    found.model = copy_model(model)
    builder = Builder(found.model)
    for node in [n for n in found.model.graph if STATES in n.metadata_props]:
        layer = _layer_of(node, values, graph_inputs)
        if layer is not None:
            _lay_out(layer, builder, found)
    return found


@dataclass(frozen=True)
class _Layer:
    """A Scan and what the simulation says about it.

    Attributes:
        states: of every state what each step made, ``[length, batch, width]``.
        lengths: of the sequences, ``[batch]``; ``None`` where all have that of the input.
        places: (site, run) of every quantizer in the body.
    """

    scan: ir.Node
    body: ir.Graph
    states: tuple[Array, ...]
    lengths: Array | None
    places: tuple[tuple[str, int], ...]

    @property
    def reverse(self) -> bool:
        directions = self.scan.attributes.get_ints("scan_input_directions", ())
        return bool(directions and directions[0])

    @property
    def ends(self) -> Array:
        """Number of steps of every sequence, ``[batch]``."""
        length, batch, _ = self.states[0].shape
        return np.full(batch, length) if self.lengths is None else self.lengths

    def sequence(self) -> Array:
        """The hidden states as the layer returns them: zero beyond the end of a sequence."""
        steps = np.arange(len(self.states[0]))[:, None, None]
        return np.where(steps < self.ends[:, None], self.states[0], np.float32(0))

    def last(self, index: int) -> Array:
        """A state after the last step, ``[batch, width]``."""
        state = self.states[index]
        rows = np.arange(state.shape[1])
        return state[0] if self.reverse else state[np.maximum(self.ends, 1) - 1, rows]

    def before_steps(self, index: int) -> tuple[Array, Array]:
        """A state before each step, ``[length, batch, width]``, and where it is the initial one, ``[length, batch, 1]``."""
        state, ends = self.states[index], self.ends
        length, batch, _ = state.shape
        steps, rows = np.arange(length)[:, None], np.arange(batch)[None]
        source = steps + 1 if self.reverse else np.minimum(steps, ends) - 1  # an ended sequence keeps its state
        first = source >= ends if self.reverse else source < 0
        return state[np.clip(source, 0, length - 1), rows], first[..., None]


def _places_in(body: ir.Graph) -> Iterator[tuple[str, int]]:
    for facts in filter(None, map(read_metadata, body)):
        yield from ((str(site), int(run)) for site, run in facts["places"])


def _layer_of(scan: ir.Node, values: Values, graph_inputs: Mapping[str, Array]) -> _Layer | None:
    """The layer, or ``None`` where a state has no values (it passes no site, or they were not given), or lengths are unknown."""
    try:
        noted = json.loads(scan.metadata_props[STATES])
        name, sites = noted["lengths"], list(noted["sites"])
    except (ValueError, TypeError, KeyError) as error:
        raise damaged_metadata(scan) from error
    constant = None if name is None or scan.graph is None else scan.graph.initializers.get(name)
    tensor = None if constant is None else constant.const_value
    lengths = graph_inputs.get(name) if tensor is None else tensor.numpy()
    if lengths is None and name is not None:
        return None
    body = scan.attributes["body"].as_graph()
    places = tuple(_places_in(body))
    runs = dict(places)
    states = []
    for site in sites:
        several = runs_of(values.get(site or ""))
        if site not in runs or runs[site] >= len(several):
            return None
        states.append(_rows_of_steps(several[runs[site]]))
    return _Layer(scan, body, tuple(states), lengths, places)


def _rows_of_steps(x: Array) -> Array:
    """``[length, batch, width]`` of a tensor that may have an axis of directions too."""
    return x.reshape(x.shape[0], x.shape[-2], x.shape[-1])


def _lay_out(layer: _Layer, builder: Builder, found: SideBySide) -> None:
    """Put the body of one layer in the place of its Scan."""
    scan, body, count = layer.scan, layer.body, len(layer.states)
    length, batch, _ = layer.states[0].shape
    put = _Put(builder, scan, found)
    entering = [put.before_steps(layer, i) for i in range(count)]
    scanned = [v for v in scan.inputs[count:] if v is not None]
    rows = [put.reshape(v, (length * batch, -1)) for v in scanned]
    for value, outer in zip(list(body.inputs), [*entering, *rows], strict=True):
        move_uses(value, outer)
    body.outputs.clear()
    for value in list(body.initializers.values()):
        body.initializers.pop(str(value.name))
        builder.graph.register_initializer(value)
    for node in list(body):
        body.remove(node)
        scan.graph.insert_before(scan, node)  # type: ignore[union-attr]
    results = [layer.last(i)[None] for i in range(count)] + [layer.sequence()[:, None]]
    for value, array in zip(scan.outputs, results, strict=False):
        put.replace(value, array)
    scan.graph.remove(scan, safe=True)  # type: ignore[union-attr]
    for site, run in layer.places:
        given = found.values.get(site, ())
        several = [given] if isinstance(given, np.ndarray) else list(given)
        if run < len(several):
            several[run] = several[run].reshape(1, length * batch, -1)
            found.values[site] = several


@dataclass(frozen=True)
class _Put:
    """Writes what surrounds the steps: inputs for the simulation's values, and changes of shape."""

    builder: Builder
    scan: ir.Node
    found: SideBySide

    def feed(self, base: str, array: Array, dtype: ir.DataType) -> ir.Value:
        """A new graph input that is fed ``array``."""
        name = self.builder.names.value(base)
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape))
        self.builder.graph.inputs.append(value)
        self.found.feeds[name] = np.ascontiguousarray(array, dtype.numpy())
        return value

    def reshape(self, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        target = self.builder.initializer(f"{value.name}_rows_shape", np.asarray(shape, np.int64))
        dtype = value.dtype or ir.DataType.FLOAT
        made = self.builder.emit(before(self.scan), "Reshape", [value, target], f"{value.name}_rows", dtype)
        made.shape = None
        return made

    def before_steps(self, layer: _Layer, index: int) -> ir.Value:
        """A state before each step, ``[1, length * batch, width]``: the initial one, then those of the simulation."""
        initial = self.scan.inputs[index]
        assert initial is not None
        dtype, place, name = initial.dtype or ir.DataType.FLOAT, before(self.scan), str(initial.name)
        states, first = layer.before_steps(index)
        given = [self.feed(f"{name}_first", first, ir.DataType.BOOL), self.feed(f"{name}_steps", states, dtype)]
        joined = self.builder.emit(place, "Where", [given[0], initial, given[1]], f"{name}_all_steps", dtype)
        joined.shape = ir.Shape(states.shape)
        return self.reshape(joined, (1, -1, states.shape[-1]))

    def replace(self, value: ir.Value, array: Array) -> None:
        """Let the readers of ``value`` read what the simulation had there."""
        if not value.uses() and not value.is_graph_output():
            return
        dtype = value.dtype or ir.DataType.FLOAT
        fed = self.feed(f"{value.name}_simulated", array, dtype)
        made = self.builder.emit(before(self.scan), "Identity", [fed], f"{value.name}_fed", dtype)
        move_uses(value, made)
        if value.is_graph_output():
            self.found.settled.add(str(value.name))
        self.builder.outputs.replace(value, made)


# ---- values of sites that the file rounds after the pools that read them (bitwright.export.qdq.rewrites): the largest of
# quantized numbers is one of them, so that pools of the simulation's values give what the file has there


def after_pools(model: ir.Model, values: Values) -> dict[str, Array | Sequence[Array]]:
    """``values``, of the shapes that the tensors of ``model`` have.

    Args:
        model: as ``to_qdq`` wrote it.
        values: site -> the simulation's values, one array per run. Those of other sites, and those that the pools do not take
            because they have another number of axes, stay as they are.

    Raises:
        ExportError: what the export wrote on an operator is damaged.
    """
    found = dict(values)
    for (site, run), pools in pooled_places(model).items():
        several = list(runs_of(found.get(site)))
        if run < len(several):
            several[run] = _pooled(pools, several[run], model.opset_imports[""])
            found[site] = several
    return found


def pooled_places(model: ir.Model) -> dict[tuple[str, int], tuple[ir.Node, ...]]:
    """(site, run) of every quantizer that stands after pools of what the site is -> these pools, in execution order.

    Raises:
        ExportError: what the export wrote on an operator is damaged.
    """
    noted = [(node, read_metadata(node)) for node in model.graph]
    found: dict[tuple[str, int], tuple[ir.Node, ...]] = {}
    for node, facts in noted:
        if facts is not None and facts["pooled"]:
            pools = _pools_before(node, str(facts["entry"]), facts["pooled"])
            found.update(((site, run), pools) for site, run in facts["places"])
    return found


def _pools_before(node: ir.Node, entry: str, count: int) -> tuple[ir.Node, ...]:
    """The last ``count`` operators that lead to ``entry``, of the quantizer that ``node`` ends."""
    value: ir.Value | None = node.outputs[0]
    while value is not None and value.name != entry:
        value = _read(value)
    found: list[ir.Node] = []
    while value is not None and value.producer() is not None and len(found) < count:
        found.insert(0, value.producer())  # type: ignore[arg-type]
        value = _read(value)
    if len(found) < count:
        raise damaged_metadata(node)
    return tuple(found)


def _read(value: ir.Value) -> ir.Value | None:
    """What the maker of ``value`` reads first."""
    maker = value.producer()
    return maker.inputs[0] if maker is not None and maker.inputs else None


def _pooled(pools: Sequence[ir.Node], array: Array, opset: int) -> Array:
    """What ``pools`` make of ``array``, one after the other."""
    given = ir.Value(name="x", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
    nodes: list[ir.Node] = []
    for pool in pools:
        read = nodes[-1].outputs[0] if nodes else given
        nodes.append(ir.Node("", pool.op_type, [read], list(pool.attributes.values()), num_outputs=1))
        nodes[-1].outputs[0].name, nodes[-1].outputs[0].type = f"y{len(nodes)}", given.type
    made = nodes[-1].outputs[0]
    graph = ir.Graph([given], [made], nodes=nodes, opset_imports={"": opset}, name="pools")
    model = ir.Model(graph, ir_version=10)
    try:
        return run_model(model, {"x": np.ascontiguousarray(array)}, "float")[str(made.name)]
    except refusals():
        return array  # another number of axes: the comparison of shapes says so
