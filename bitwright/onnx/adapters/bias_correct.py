"""An ONNX simulation as bias correction sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.algorithms.bias_correct import Correctable
from bitwright.algorithms.channels.layers import Array, Layer
from bitwright.export.qdq.markers import Names, move_uses
from bitwright.onnx.model.data import as_feeds
from bitwright.onnx.model.instrument import Instrument
from bitwright.onnx.model.session import open_session
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.onnx.simulation.simulate import simulation_model


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
        for node in self.sim.marked.graph.all_nodes():
            if node.op_type in ("Loop", "Scan") and not node.domain:
                inside = node.attributes["body"].as_graph().all_nodes()
                found.update((str(inner.name), f"{node.op_type} {node.name}") for inner in inside)
        return found

    def param(self, name: str) -> Array:
        """An initializer."""
        return np.array(self.sim.marked.graph.initializers[name].const_value.numpy(), np.float32)  # type: ignore[union-attr]

    def set_param(self, name: str, value: Array) -> None:
        """In the simulation, whose sessions are made anew."""
        self.sim.set_parameter(name, value)


def _name(layer: Layer) -> str:
    return f"{layer.op}.mean"


def _with_means(model: ir.Model, layers: Sequence[Layer], *, shift: bool) -> ir.Model:
    """``model`` with the channel means of the layers' outputs: as outputs, or as inputs that they are moved to."""
    instrument = Instrument(model)
    names, outputs = instrument.builder.names, instrument.builder.outputs
    nodes = {node.name: node for node in model.graph.all_nodes()}

    def outside(value: ir.Value, graph: ir.Graph, name: str) -> ir.Value:
        """``value``, which bears ``name`` in the main graph; empty where its branch is not taken."""
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
    """Puts operators after ``node``, one after the other, and returns their results."""
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
