"""Verification inside recurrent layers: all steps of a Scan side by side, each fed the simulation's own states.

What a step computes does not depend on how often the loop ran before, only on the states it is handed. So the body of
a Scan that :mod:`bitwright.export.recurrent` wrote is put into the main graph once, for ``length * batch`` rows at a
time: its slices are the scanned tensors with the two axes joined, its states those of the simulation one step earlier.
Then it is a chain of layers like any other, which :mod:`bitwright.export.cut` takes apart at its quantizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.builder import Builder, before, read_metadata
from bitwright.export.markers import copy_model, move_uses

Array = NDArray[Any]
Values = Mapping[str, Array | Sequence[Array]]
STATES = "bitwright.states"  # key of the metadata of a Scan that is a recurrent layer


def note_states(scan: ir.Node, sites: Sequence[str | None]) -> None:
    """Write on a Scan which sites its states pass at every step; ``None`` for a state that passes none."""
    scan.metadata_props[STATES] = json.dumps(list(sites))


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


def side_by_side(model: ir.Model, values: Values) -> SideBySide:
    """Lay out every recurrent layer of the main graph whose states the simulation gave values for.

    Args:
        model: as ``to_qdq`` wrote it; left as it is.
        values: site -> the simulation's values, of inner sites for all steps in the order of time: ``[length, batch,
            hidden]``, perhaps with an axis of directions.
    """
    found = SideBySide(model, dict(values))
    if not any(STATES in node.metadata_props for node in model.graph):
        return found
    found.model = copy_model(model)
    builder = Builder(found.model)
    for node in [n for n in found.model.graph if STATES in n.metadata_props]:
        layer = _layer_of(node, values)
        if layer is not None:
            _lay_out(layer, builder, found)
    return found


@dataclass(frozen=True)
class _Layer:
    """A Scan and what the simulation says about it.

    Attributes:
        states: of every state all its values, ``[length, batch, width]``.
        places: (site, run) of every quantizer in the body.
    """

    scan: ir.Node
    body: ir.Graph
    states: tuple[Array, ...]
    places: tuple[tuple[str, int], ...]

    @property
    def reverse(self) -> bool:
        directions = self.scan.attributes.get_ints("scan_input_directions", ())
        return bool(directions and directions[0])


def _layer_of(scan: ir.Node, values: Values) -> _Layer | None:
    """The layer, or ``None`` where a state has no values: it passes no site, or nobody gave them."""
    body = scan.attributes["body"].as_graph()
    facts = [read_metadata(node) for node in body]
    places = tuple((str(site), int(run)) for fact in facts if fact for site, run in fact["places"])
    runs = dict(places)
    states = []
    for site in json.loads(scan.metadata_props[STATES]):
        given = values.get(site or "")
        several = [given] if isinstance(given, np.ndarray) else list(given or ())
        if site not in runs or runs[site] >= len(several):
            return None
        states.append(_rows_of_steps(several[runs[site]]))
    return _Layer(scan, body, tuple(states), places)


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
    for node in list(body):
        body.remove(node)
        scan.graph.insert_before(scan, node)  # type: ignore[union-attr]
    last = 0 if layer.reverse else -1
    results = [layer.states[i][last][None] for i in range(count)] + [layer.states[0][:, None]]
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
        states, dtype = layer.states[index], initial.dtype or ir.DataType.FLOAT
        length, batch, width = states.shape
        others = self.feed(f"{initial.name}_steps", states[1:] if layer.reverse else states[:-1], dtype)
        parts = [others, initial] if layer.reverse else [initial, others]
        joined = self.builder.emit(
            before(self.scan), "Concat", parts, f"{initial.name}_all_steps", dtype, axis=0
        )
        joined.shape = ir.Shape((length, batch, width))
        return self.reshape(joined, (1, length * batch, width))

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
