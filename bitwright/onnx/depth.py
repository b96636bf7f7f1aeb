"""Blocks of an ONNX model: branches that a residual sum adds to what they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.export.qdq.markers import move_uses, remove_unread
from bitwright.methods.front_end import Blocks
from bitwright.onnx.model.data import as_feeds, input_specs
from bitwright.onnx.model.graph import build_graph
from bitwright.onnx.model.load import Loaded, clone_model
from bitwright.onnx.model.session import Providers, open_session, run_session
from bitwright.onnx.model.view import measure_shapes


class OnnxBlocks(Blocks):
    """The blocks of a loaded model.

    Args:
        loaded: as it is read.
        example: feeds of one run.
        providers: as ONNX Runtime takes them.
        put: is given the model at the end.
    """

    def __init__(
        self, loaded: Loaded, example: Any, providers: Providers | None, put: Callable[[Loaded], None]
    ) -> None:
        self._loaded, self._providers, self._put = loaded, providers, put
        self._model = loaded.model
        self._graph = build_graph(self._model, measure_shapes(self._model, example, providers), whole=True).graph
        graph = self._graph
        self._sums = residual_sums(graph)
        returned = {name for name in self._sums if graph.is_output(graph.op(name).outputs[0])}
        self.refused = dict.fromkeys(returned, "the model returns the sum")
        self.names = [name for name in self._sums if name not in returned]

    def graph(self) -> Graph:
        """The graph with the shapes of a run."""
        return self._graph

    def gone(self, names: Sequence[str]) -> set[str]:
        """Operators that are removed with the blocks."""
        left = {str(node.name) for node in self._cut(names).graph.all_nodes()}
        return {op.name for op in self._graph.ops if op.name not in left}

    def _cut(self, names: Sequence[str], put: Mapping[str, Any] | None = None) -> ir.Model:
        """A copy without blocks; with ``put`` in place of some: see :meth:`replaced`."""
        model = clone_model(self._loaded.model)
        nodes = {str(node.name): node for node in model.graph.all_nodes()}
        for name in names:
            node = nodes[name]
            if node.graph is None:  # it went with the block around it
                continue
            made = node.outputs[0]
            source = node.inputs[self._sums[name]]
            assert source is not None
            added = (put or {}).get(name)
            if added is not None:
                branch = node.inputs[1 - self._sums[name]]
                assert branch is not None
                node.replace_input_with(1 - self._sums[name], self._added(name, node, source, added))
                remove_unread(branch)
                continue
            move_uses(made, source)
            remove_unread(made)
        for name, value in list(model.graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                model.graph.initializers.pop(name)
        return model

    def without(self, names: Sequence[str]) -> Undo:
        """The outputs of a copy without the blocks."""
        before, self._model = self._model, self._cut(names)

        def undo() -> None:
            self._model = before

        return undo

    def outputs(self, batch: Any) -> list[Array]:
        """Outputs of the model."""
        feeds = as_feeds(batch, input_specs(self._model))
        return [np.asarray(a) for a in run_session(open_session(self._model, self._providers), feeds, "batch")]

    def ends(self, name: str) -> tuple[str, str]:
        """The values that a block reads and makes."""
        op, port = self._graph.op(name), self._sums[name]
        return str(op.inputs[port]), str(op.inputs[1 - port])

    def channel_axis(self, name: str) -> int:
        """Of what a block reads: the second axis of images, or the last one."""
        images = len(self._graph.values[self.ends(name)[0]].shape) == 4
        convolved = any(self._graph.op(op).type == "Conv" for op in self.gone([name]))
        return 1 if images and convolved else -1

    def values(self, batch: Any, names: Sequence[str]) -> dict[str, Array]:
        """Values of the whole model, by name."""
        model = clone_model(self._loaded.model)
        known = {
            str(v.name): v for v in (*model.graph.inputs, *(v for n in model.graph.all_nodes() for v in n.outputs))
        }
        returned = {str(v.name) for v in model.graph.outputs}
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name not in returned and not known[name].is_graph_input():
                model.graph.outputs.append(known[name])
        feeds = as_feeds(batch, input_specs(self._loaded.model))
        made = run_session(open_session(model, self._providers), feeds, "batch")
        found = dict(zip((str(v.name) for v in model.graph.outputs), made, strict=True))
        return {name: np.asarray(feeds[name] if name in feeds else found[name]) for name in wanted}

    def _added(self, name: str, node: ir.Node, source: ir.Value, what: Any) -> ir.Value:
        """What a sum adds in place of a block: its source again, or a linear layer of it."""
        if isinstance(what, str):
            return source
        graph, kind = node.graph, self._graph.values[self.ends(name)[0]].dtype
        assert graph is not None
        images, W = self.channel_axis(name) == 1, np.asarray(what, kind)
        parts = {"weight": W[:, :-1, None, None] if images else W[:, :-1].T, "bias": W[:, -1]}
        held = {}
        for part, array in parts.items():
            tensor = ir.tensor(np.ascontiguousarray(array), name=f"{name}.linear.{part}")
            held[part] = ir.Value(
                name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape)
            )
            graph.register_initializer(held[part])
        if images:
            made = [ir.node("Conv", [source, held["weight"], held["bias"]], name=f"{name}.linear")]
        else:
            product = ir.node("MatMul", [source, held["weight"]], name=f"{name}.linear")
            made = [product, ir.node("Add", [product.outputs[0], held["bias"]], name=f"{name}.linear.sum")]
        for one in made:
            one.outputs[0].name = f"{one.name}.output"
        graph.insert_before(node, made)
        return made[-1].outputs[0]

    def replaced(self, put: Mapping[str, Any]) -> Undo:
        """The outputs of a copy with something in place of blocks.

        Args:
            put: block -> a matrix ``[width, width + 1]``, the bias in its last column; ``"identity"``; or ``None`` for nothing.
        """
        before, self._model = self._model, self._cut(list(put), put)

        def undo() -> None:
            self._model = before

        return undo

    def put(self, put: Mapping[str, Any]) -> None:
        """Replace blocks for good, as :meth:`replaced` does."""
        self._put(replace(self._loaded, model=self._cut(list(put), put)))

    def session(self) -> Any:
        """A session of the current model."""
        return open_session(self._model, self._providers)

    def remove(self, names: Sequence[str], batch: Any) -> dict[str, Any]:
        """Remove the blocks; an ONNX file needs no plan besides."""
        self._put(replace(self._loaded, model=self._cut(names)))
        return {}


def residual_sums(graph: Graph) -> dict[str, int]:
    """Sums of a value and a branch computed from it -> the input that remains without the branch.

    The branch has a layer, reads nothing else that was made after its source, and the source has the shape of the sum. Every
    branch is walked back no further than where its source was made.
    """
    place = {value: i for i, op in enumerate(graph.ops) for value in op.outputs}
    found = {}
    for op in graph.ops:
        if op.type == "Add" and len(op.inputs) == 2 and None not in op.inputs and not op.also:
            port = next(
                (p for p in (0, 1) if _is_residual(graph, place, op, str(op.inputs[p]), str(op.inputs[1 - p]))), None
            )
            found.update({} if port is None else {op.name: port})
    return found


def _is_residual(graph: Graph, place: dict[str, int], op: Op, source: str, branch: str) -> bool:
    if graph.values[source].is_static or graph.values[branch].is_static:
        return False
    if graph.values[source].shape != graph.values[op.outputs[0]].shape:
        return False
    return _branches_from(graph, place, source, branch)


def _branches_from(graph: Graph, place: dict[str, int], source: str, branch: str) -> bool:
    start, stack, seen, layer, reached = place.get(source, -1), [branch], {branch}, False, False
    while stack:
        value = stack.pop()
        if value == source:
            reached = True
            continue
        maker: Op | None = graph.producer(value)
        if maker is None or place[value] <= start:  # an input of the model, or older than the source: a mask, positions
            continue
        layer = layer or maker.type in TRAITS["layer"]
        for _, read in maker.sources():
            if read not in seen and not graph.values[read].is_static:
                seen.add(read)
                stack.append(read)
    return reached and layer
