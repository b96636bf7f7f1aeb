"""An ONNX model as batch-norm folding sees it: products with their biases are layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import onnx_ir as ir

from bitwright.algorithms.folding import batch_norm_fold as algorithm
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.traits import TRAITS
from bitwright.core.simulation.protocols import AddBias, Array, Edit
from bitwright.onnx.model.load import Loaded
from bitwright.onnx.model.session import Providers
from bitwright.onnx.model.view import OnnxView, Undo
from bitwright.progress import progress as bar


def fold_batch_norms(
    loaded: Loaded,
    providers: Providers | None,
    shapes: dict[str, tuple[int, ...]] | None,
    opened: Callable[[OnnxView], None],
    changed: Callable[[OnnxView], str | None] | None,
    progress: bool,
) -> algorithm.FoldReport:
    """Fold every batch norm of a loaded model that can be folded, in place and for good.

    Args:
        loaded, providers, shapes: as :class:`OnnxView` takes them.
        opened: is given the view before anything is changed.
        changed: what is different since, for the view; nothing is compared without it.
        progress: show a progress bar on a terminal.
    """
    view = _FoldingView(loaded, providers, shapes)
    opened(view)
    check = None if changed is None else partial(changed, view)
    report = algorithm.fold_all_batch_norms(view, check, bar=partial(bar, enabled=progress))
    report.keep()
    view.tidy()
    return report


class _FoldingView(OnnxView):
    """A view in which ``MatMul`` of a 2-D input by a stored matrix, and an ``Add`` after it, is one ``Gemm``.

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
        """As of :class:`OnnxView`; a product is followed by its Add."""
        product = super().local(op)
        if op not in self._adds:
            return product
        node = self._nodes[op]

        def run(*inputs: Array) -> Array:
            found = product(*inputs)
            add = self._add_behind(node, op)
            return found if add is None else self._apply(add, [found], lambda value: value is node.outputs[0])

        return run

    def _add_behind(self, node: ir.Node, op: str) -> ir.Node | None:
        if self._adds[op] is None and op not in self._inserted:
            return None
        return next(reader for reader, _ in node.outputs[0].uses())

    def can_edit(self, edit: Edit) -> str | None:
        """As of :class:`OnnxView`; a product can have a bias too."""
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
