"""Verification inside bodies: the branch that was taken and every iteration of a loop, put into the main graph.

:mod:`bitwright.compare.cut` takes a main graph apart at its quantizers. So an If is replaced by the branch that the
simulation took, a Loop or Scan by one copy of its body per iteration of the simulation; each quantizer in a copy is a run of
its site. Which branch and how many iterations follow from the simulation's values alone: a site in a branch that was not
taken has an empty one, and those in a loop have all iterations along a first axis. What does not depend on the iteration
(stored weights above all) is there once.

In the file a body ends what a runtime optimises: two quantizers, or a quantizer and its kernel, stay apart when one is
inside and the other one is not. A Max of one tensor, which no optimiser removes, keeps them apart here. Float weights and
biases that a body reads from outside, and what a state begins with, are not constants to it: here they become inputs that are
fed, or ONNX Runtime would quantize them by itself, as it does in a main graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.operators import TRAITS
from bitwright.export.files.onnx_file import is_tensor
from bitwright.export.qdq.forms import METADATA, Builder, before, read_metadata
from bitwright.export.qdq.markers import STATES, copy_model, move_uses
from bitwright.export.qdq.trace import RANDOM

Array = NDArray[Any]
Values = Mapping[str, Array | Sequence[Array]]


def runs_of(given: Array | Sequence[Array] | None) -> Sequence[Array]:
    """What a site had in each of its runs."""
    return [given] if isinstance(given, np.ndarray) else list(given or ())


BORDER = "bitwright.border"  # in the metadata of nodes that only stand for the way into a body, or out of it
NOT_TAKEN = "its branch was not taken"
NO_ITERATION = "its loop had no iteration"
_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16))  # that Max takes
_MOST_NODES = 50_000  # copies of one loop's nodes; what would be longer stays a loop


@dataclass
class Opened:
    """A model without the bodies that the simulation gave values for.

    Attributes:
        model: the model, a copy where something changed.
        values: the simulation's values, one array per run of a site.
        idle: site that did not run -> why.
        feeds: graph inputs that were added -> what to feed them.
    """

    model: ir.Model
    values: dict[str, Array | Sequence[Array]]
    idle: dict[str, str] = field(default_factory=dict)
    feeds: dict[str, Array] = field(default_factory=dict)


def open_bodies(model: ir.Model, values: Values) -> Opened:
    """Put what ran of every If, Loop and Scan into the main graph.

    A body without sites stays as it is, and so does one whose values do not tell what ran, a loop of more than 50,000
    copied nodes, one over optional values, and a Scan that is a recurrent layer (:mod:`bitwright.compare.recurrent_steps`).

    Args:
        model: as ``to_qdq`` wrote it; left as it is.
        values: site -> the simulation's values, one array per place in the file; inside loops with an axis of iterations
            in front for each loop, in the order in which they read their data.
    """
    found = Opened(model, dict(values))
    if not any(_has_body(node) for node in model.graph):
        return found
    found.model = copy_model(model)
    opener = _Opener(found, Builder(found.model))
    opener.hoist()
    waiting = [node for node in found.model.graph if _has_body(node)]
    while waiting:
        node = waiting.pop()
        waiting += [inner for inner in opener.open(node) if _has_body(inner)]
    return found


def _has_body(node: ir.Node) -> bool:
    return not node.domain and node.op_type in ("If", "Loop", "Scan") and STATES not in node.metadata_props


@dataclass(frozen=True)
class _Copy:
    """A body in the main graph: what stands for its inputs, its nodes, and its outputs."""

    inputs: dict[ir.Value, ir.Value]
    nodes: list[ir.Node]
    outputs: list[ir.Value]


@dataclass(frozen=True)
class _Opener:
    found: Opened
    builder: Builder

    def hoist(self) -> None:
        """Move the constants of all bodies into the main graph; what a body hands out is its input or made by its nodes."""
        bodies = [graph for graph in self.found.model.graphs() if graph is not self.builder.graph]
        for graph in bodies:
            for i, value in enumerate(list(graph.outputs)):
                if value.is_initializer() or value.graph is not graph:
                    graph.outputs[i] = self._handed_on(graph, value)
            for value in list(graph.initializers.values()):
                tensor = value.const_value
                assert tensor is not None
                own = copy(tensor)  # the other is the caller's, name and all; the elements are shared
                moved = self.builder.initializer_of(str(value.name), own)  # type: ignore[arg-type]
                move_uses(value, moved)
                graph.initializers.pop(str(value.name))

    def _handed_on(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        made = self.builder.emit(
            graph.append, "Identity", [value], f"{value.name}_out", value.dtype or ir.DataType.FLOAT
        )
        made.type = value.type or made.type
        return made

    def open(self, node: ir.Node) -> list[ir.Node]:
        """Replace ``node`` by what ran of it, if that is known; the nodes that are in the main graph now."""
        return self._branch(node) if node.op_type == "If" else self._loop(node)

    def _given(self, site: str, run: int) -> Array | None:
        several = self.found.values.get(site, ())
        several = [several] if isinstance(several, np.ndarray) else several
        return np.asarray(several[run]) if run < len(several) else None

    # -- branches

    def _branch(self, node: ir.Node) -> list[ir.Node]:
        graphs = {key: node.attributes[key].as_graph() for key in ("then_branch", "else_branch")}
        taken = _taken({key: self._ran(graph) for key, graph in graphs.items()})
        if taken is None:
            return []
        for key, graph in graphs.items():
            if key != taken:
                self.found.idle.update(dict.fromkeys((site for site, _ in _places(graph)), NOT_TAKEN))
        self._fence(graphs[taken], node)
        part = self._copy(graphs[taken], node, {}, {})
        self._replace(node, part.outputs)
        return part.nodes

    def _ran(self, graph: ir.Graph) -> bool | None:
        """Whether a branch was taken; ``None`` where no site in it tells. A loop without iterations keeps its axes."""
        given = [array for place in _places(graph) if (array := self._given(*place)) is not None]
        return any(array.shape != (0,) for array in given) if given else None

    # -- loops

    def _loop(self, node: ir.Node) -> list[ir.Node]:
        body = node.attributes["body"].as_graph()
        given = {place: array for place in _places(body) if (array := self._given(*place)) is not None}
        lengths = {len(array) for array in given.values() if array.ndim}
        several = (v.type for v in (*node.outputs, *body.outputs))
        if len(lengths) != 1 or any(isinstance(t, ir.OptionalType) for t in several):
            return []
        (count,) = lengths
        if count == 0:
            self.found.idle.update(dict.fromkeys((site for site, _ in given), NO_ITERATION))
            return []
        if count * sum(1 for _ in body.all_nodes()) > _MOST_NODES:
            return []
        self._fence(body, node)
        shape = _loop_shape(node, body) if node.op_type == "Loop" else _scan_shape(node, body)
        copies = self._unroll(node, body, shape, given, count)
        self._replace(node, self._results(node, shape, copies))
        return [inner for part in copies for inner in part.nodes]

    def _unroll(
        self, node: ir.Node, body: ir.Graph, shape: _Shape, given: Mapping[tuple[str, int], Array], count: int
    ) -> list[_Copy]:
        states = [self._entering(node, value) for value in shape.states]
        going = self.builder.initializer("going", np.array(True))
        copies: list[_Copy] = []
        places = range(count)[::-1] if shape.backwards else range(count)
        for i, at in enumerate(places):
            number = self.builder.initializer("iteration", np.array(i))
            counters = [number, going] if node.op_type == "Loop" else []
            slices = [self._slice(node, s, i, count) for s in shape.scanned]
            inputs = dict(zip(body.inputs, [*counters, *states, *slices], strict=True))
            part = self._copy(body, node, inputs, self._shares(given, at, first=not copies))
            copies.append(_share_constant(copies[0], part) if copies else part)
            first = int(node.op_type == "Loop")  # a Loop's own condition comes before its states
            made = copies[-1].outputs[first : first + len(states)]
            states = [v if v is old else self._border(node, v) for v, old in zip(made, states, strict=True)]
        return copies

    def _shares(self, given: Mapping[tuple[str, int], Array], at: int, *, first: bool) -> dict[tuple[str, int], int]:
        """The run that each site has in one iteration; the values of that run are those of iteration ``at``."""
        runs = {}
        for (site, run), array in given.items():
            several = self.found.values[site]
            kept = [several] if isinstance(several, np.ndarray) else list(several)
            if first:
                kept[run] = array[at]
            else:
                kept.append(array[at])
            self.found.values[site] = kept
            runs[site, run] = run if first else len(kept) - 1
        return runs

    def _slice(self, node: ir.Node, scanned: _Scanned, i: int, count: int) -> ir.Value:
        at = self.builder.initializer("slice", np.array(count - 1 - i if scanned.backwards else i))
        name = f"{scanned.value.name}_{i}"
        return self._border(node, self._emit(node, "Gather", [scanned.value, at], name, axis=scanned.axis))

    def _results(self, node: ir.Node, shape: _Shape, copies: Sequence[_Copy]) -> list[ir.Value]:
        """What the loop hands out: its states after the last iteration, and what the iterations made, stacked."""
        first = 1 if node.op_type == "Loop" else 0
        end = first + len(shape.states)
        results = copies[-1].outputs[first:end]
        for i, (axis, backwards) in enumerate(shape.stacked):
            axes = self.builder.initializer("stack_axis", np.array([axis]))
            parts = [self._emit(node, "Unsqueeze", [part.outputs[end + i], axes], "part") for part in copies]
            parts = parts[::-1] if backwards else parts
            results.append(self._emit(node, "Concat", parts, "stacked", axis=axis))
        return results

    def _emit(self, node: ir.Node, op: str, inputs: Sequence[ir.Value], name: str, **attributes: int) -> ir.Value:
        dtype = inputs[0].dtype or ir.DataType.FLOAT
        made = self.builder.emit(before(node), op, inputs, name, dtype, **attributes)
        maker = made.producer()
        assert maker is not None
        maker.metadata_props[BORDER] = ""
        made.shape = made.shape if len(inputs) == 1 and not attributes else None
        return made

    def _border(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """``value`` on the other side of a border."""
        tensor = is_tensor(value)
        op = "Max" if tensor and value.dtype in _FLOATS else "Identity"
        made = self._emit(node, op, [value], f"{value.name}_beyond")
        made.type = made.type if tensor else value.type
        return made

    def _fence(self, body: ir.Graph, node: ir.Node) -> None:
        """Let a body read what it takes from the main graph across a border; constants it reads as they are, or fed."""
        known: dict[ir.Value, ir.Value] = {}
        for reader, i, value in list(self._taken(body)):
            parameter = i > 0 and reader.op_type in TRAITS["bias_port"] and _is_float_constant(value)
            if value.is_initializer() and not parameter:
                continue
            if value not in known:
                known[value] = self._fed(value) if parameter else self._border(node, value)
            reader.replace_input_with(i, known[value])

    def _taken(self, body: ir.Graph) -> Iterator[tuple[ir.Node, int, ir.Value]]:
        """Who reads what of the main graph, and where."""
        for reader in body.all_nodes():
            for i, value in enumerate(reader.inputs):
                if value is not None and value.graph is self.builder.graph:
                    yield reader, i, value

    def _entering(self, node: ir.Node, value: ir.Value) -> ir.Value:
        return self._fed(value) if _is_float_constant(value) else self._border(node, value)

    def _fed(self, value: ir.Value) -> ir.Value:
        """An input of the model that is fed the constant ``value``."""
        assert value.const_value is not None
        name = self.builder.names.value(f"{value.name}_fed")
        made = ir.Value(name=name, type=value.type, shape=value.shape)
        self.builder.graph.inputs.append(made)
        self.found.feeds[name] = np.ascontiguousarray(value.const_value.numpy())
        return made

    # -- copies

    def _copy(
        self, body: ir.Graph, anchor: ir.Node, inputs: dict[ir.Value, ir.Value], runs: Mapping[tuple[str, int], int]
    ) -> _Copy:
        """Put a copy of ``body`` before ``anchor``; ``inputs`` stand for its inputs, ``runs`` are those of its places."""
        clone = body.clone(allow_outer_scope_values=True)
        names = {str(v.name): str(outer.name) for v, outer in inputs.items()}
        given = dict(zip(clone.inputs, (inputs[v] for v in body.inputs), strict=True))
        outputs = [given.get(v, v) for v in clone.outputs]
        for value, outer in given.items():
            move_uses(value, outer)
        clone.outputs.clear()
        nodes = list(clone)
        self._rename(clone, names)
        for node in clone.all_nodes():
            _renumber(node, names, runs)
        clone.remove(nodes)
        assert anchor.graph is not None
        anchor.graph.insert_before(anchor, nodes)
        return _Copy(inputs, nodes, outputs)

    def _rename(self, clone: ir.Graph, names: dict[str, str]) -> None:
        """Give everything in ``clone`` but its inputs a name of its own, noted in ``names``."""
        values = [v for graph in _nested(clone) for v in graph.inputs]
        for node in clone.all_nodes():
            node.name = self.builder.names.node(str(node.name))
            values += [v for v in node.outputs if v.name]
        for value in values:
            fresh = self.builder.names.value(str(value.name))
            names[str(value.name)] = value.name = fresh

    def _replace(self, node: ir.Node, results: Sequence[ir.Value]) -> None:
        """Let the readers of ``node`` read ``results``, under the names that they know, and take it out."""
        for value, result in zip(node.outputs, results, strict=False):
            if value.uses() or value.is_graph_output():
                made = self._border(node, result)
                made.type = value.type or made.type
                move_uses(value, made)
                self.builder.outputs.replace(value, made)
                made.name = value.name
        assert node.graph is not None
        node.graph.remove(node, safe=True)


def _is_float_constant(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input() and value.dtype in _FLOATS


def _taken(ran: Mapping[str, bool | None]) -> str | None:
    """The branch that was taken: one that ran, or the other of one that did not."""
    yes = [key for key, answer in ran.items() if answer]
    no = [key for key, answer in ran.items() if answer is False]
    if yes:
        return yes[0] if len(yes) == 1 else None
    return next(key for key in ran if key not in no) if len(no) == 1 else None


@dataclass(frozen=True)
class _Scanned:
    """What a Scan takes apart: along which axis, and whether from its end."""

    value: ir.Value
    axis: int
    backwards: bool


@dataclass(frozen=True)
class _Shape:
    """What a loop reads and hands out.

    Attributes:
        states: before the first iteration.
        scanned: in the order of the body's inputs.
        stacked: axis, and whether the last iteration comes first, of each output with all iterations.
        backwards: whether the simulation's values stand in the opposite order of the iterations.
    """

    states: list[ir.Value]
    scanned: list[_Scanned]
    stacked: list[tuple[int, bool]]
    backwards: bool


def _loop_shape(node: ir.Node, body: ir.Graph) -> _Shape:
    states = [v for v in node.inputs[2:] if v is not None]
    return _Shape(states, [], [(0, False)] * (len(body.outputs) - 1 - len(states)), backwards=False)


def _scan_shape(node: ir.Node, body: ir.Graph) -> _Shape:
    values = [v for v in node.inputs if v is not None]
    scanned = node.attributes["num_scan_inputs"].as_int()
    states, count = values[:-scanned], len(body.outputs) - len(values) + scanned

    def numbers(name: str, length: int) -> list[int]:
        return list(node.attributes.get_ints(name, ())) or [0] * length

    directions = numbers("scan_input_directions", scanned)
    inputs = zip(values[-scanned:], numbers("scan_input_axes", scanned), directions, strict=True)
    outputs = zip(numbers("scan_output_axes", count), numbers("scan_output_directions", count), strict=True)
    return _Shape(
        states,
        [_Scanned(value, axis, bool(turned)) for value, axis, turned in inputs],
        [(axis, bool(turned)) for axis, turned in outputs],
        backwards=all(directions),
    )


def _share_constant(one: _Copy, other: _Copy) -> _Copy:
    """``other`` without the nodes that do in every iteration what they do in ``one``, the first."""
    varying = {value for key, value in other.inputs.items() if value is not one.inputs[key]}
    shared: dict[ir.Value, ir.Value] = {}
    left = []
    for first, node in zip(one.nodes, other.nodes, strict=True):
        fixed = node.op_type == "Constant" or (node.inputs and not varying.intersection(node.inputs))
        nested = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        if not fixed or nested or node.op_type in RANDOM:
            varying.update(node.outputs)
            left.append(node)
            continue
        for value, same in zip(node.outputs, first.outputs, strict=True):
            move_uses(value, same)
            shared[value] = same
        node.graph.remove(node, safe=True)  # type: ignore[union-attr]
    return _Copy(other.inputs, left, [shared.get(v, v) for v in other.outputs])


def _renumber(node: ir.Node, names: Mapping[str, str], runs: Mapping[tuple[str, int], int]) -> None:
    """Let a copied quantizer be a run of its own."""
    facts = read_metadata(node)
    if facts is not None:
        facts["entry"] = names.get(facts["entry"], facts["entry"])
        facts["places"] = [[site, runs.get((site, run), run)] for site, run in facts["places"]]
        node.metadata_props[METADATA] = json.dumps(facts)


def _places(graph: ir.Graph) -> list[tuple[str, int]]:
    """(site, run) of every activation quantizer in a body, and in bodies within."""
    noted = (read_metadata(node) for node in graph.all_nodes())
    return [
        (str(site), int(run))
        for facts in noted
        if facts is not None and facts["role"] == "activation"
        for site, run in facts["places"]
    ]


def _nested(graph: ir.Graph) -> list[ir.Graph]:
    """The bodies within a body."""
    attributes = (a for node in graph.all_nodes() for a in node.attributes.values())
    return [a.as_graph() for a in attributes if a.type == ir.AttributeType.GRAPH]
