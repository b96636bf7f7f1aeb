"""Experts of an ONNX model: what a ``TopK`` chooses behind a product with one row per expert.

Two forms are read. *Stacks*: initializers ``[experts, ...]`` that ``Gather`` or ``GatherND`` reads at the chosen numbers.
*Branches*: one for each expert, which begins where ``Equal`` compares the chosen numbers with its own, and whose result is added
to those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ModelError
from bitwright.export.qdq.markers import Names, move_uses, remove_unread
from bitwright.methods.front_end import Mixtures
from bitwright.onnx.model.data import as_feeds, input_specs
from bitwright.onnx.model.load import Loaded, clone_model
from bitwright.onnx.model.session import Providers, open_session, run_session
from bitwright.onnx.model.view import measure_shapes
from bitwright.progress import progress as progress_bar

_MOVES = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_PRODUCTS = ("Gemm", "MatMul")


@dataclass(frozen=True)
class Mixture:
    """A router and the experts that it chooses, by the names of nodes and values.

    Attributes:
        name: of the ``TopK``.
        experts: how many.
        router: node whose result has a column per expert.
        scores: what the ``TopK`` ranks.
        chosen: the numbers that it gives.
        rows: initializer -> the axis that has an entry per expert.
        targets: nodes between router and TopK that are given a shape in which the number of experts is the last one.
        branches: expert -> where its branch begins: the node that compares.
        merges: expert -> node that adds its result to the others', and the port of the others.
    """

    name: str
    experts: int
    router: str
    scores: str
    chosen: str
    rows: Mapping[str, int]
    targets: tuple[str, ...] = ()
    branches: Mapping[int, str] = field(default_factory=dict)
    merges: Mapping[int, tuple[str, int]] = field(default_factory=dict)


Shapes = Mapping[str, tuple[int, ...]]


def find_mixtures(model: ir.Model, shapes: Shapes) -> list[Mixture]:
    """The mixtures of a model, in its order."""
    found = (_mixture(node, shapes) for node in model.graph if node.op_type == "TopK")
    return [mixture for mixture in found if mixture is not None]


def _mixture(top: ir.Node, shapes: Shapes) -> Mixture | None:
    scores, chosen = top.inputs[0], top.outputs[1]
    ranked, made = shapes.get(str(scores.name if scores else ""), ()), shapes.get(str(chosen.name), ())
    if scores is None or not ranked or not made or not 0 < made[-1] < ranked[-1]:
        return None
    count = ranked[-1]
    routed = _router(scores, count, shapes)
    stacks, branches = _readers(chosen, count)
    if routed is None or not (stacks or len(branches) == count):
        return None
    router, rows = routed
    targets = tuple(str(n.name) for n in _between(router, top) if n.op_type in ("Expand", "Reshape"))
    merges = {i: merge for i, node in branches.items() if (merge := _merge(node, shapes)) is not None}
    if len(merges) < len(branches):
        return None
    return Mixture(
        str(top.name), count, str(router.name), str(scores.name), str(chosen.name), {**rows, **stacks}, targets,
        {i: str(node.name) for i, node in branches.items()}, {i: (str(n.name), port) for i, (n, port) in merges.items()},
    )  # fmt: skip


def _router(scores: ir.Value, count: int, shapes: Shapes) -> tuple[ir.Node, dict[str, int]] | None:
    """The product that makes the scores, and the initializers with an entry per expert up to there."""
    makers = list(_makers(scores, count, shapes))
    routers = [node for node in makers if node.op_type in _PRODUCTS]
    rows = {name: axis for node in makers for name, axis in _entries(node, count)}
    return (routers[0], rows) if len(routers) == 1 and rows else None


def _entries(node: ir.Node, count: int) -> list[tuple[str, int]]:
    """The initializers that a node reads with an entry per expert, and the axis of these."""
    product = node.op_type in _PRODUCTS
    held = [_stored(value, -1) for value in (node.inputs[2:] if product else node.inputs)]
    if product:
        held.append(_stored(node.inputs[1], _axis_of_outputs(node)))
    return [(str(one[0].name), one[1]) for one in held if one is not None and _length(one) == count]


def _makers(scores: ir.Value, count: int, shapes: Shapes) -> Iterator[ir.Node]:
    """The nodes that make the scores through values with an entry per expert, as far as products."""
    stack, seen = [scores], {scores}
    while stack:
        node = stack.pop().producer()
        if node is None:
            continue
        yield node
        for value in () if node.op_type in _PRODUCTS else node.inputs:
            if value is not None and value not in seen and shapes.get(str(value.name), ())[-1:] == (count,):
                seen.add(value)
                stack.append(value)


def _between(router: ir.Node, top: ir.Node) -> list[ir.Node]:
    """Nodes that read what the router makes, and that the TopK depends on."""
    needed, stack = {top}, [top]
    while stack:
        for value in stack.pop().inputs:
            node = None if value is None else value.producer()
            if node is not None and node not in needed:
                needed.add(node)
                stack.append(node)
    return [node for node in _behind(router) if node in needed]


def _axis_of_outputs(node: ir.Node) -> int:
    return 0 if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1 else -1


def _stored(value: ir.Value | None, axis: int) -> tuple[ir.Value, int] | None:
    """The initializer that a value is, but for a cast or transpose, and the axis of it that ``axis`` of the value is."""
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.op_type not in ("Cast", "Identity", "Transpose") or value.shape is None:
            return None
        rank = len(value.shape)
        order = (
            tuple(node.attributes.get_ints("perm", range(rank)[::-1])) if node.op_type == "Transpose" else range(rank)
        )
        axis, value = order[axis], node.inputs[0]
    if value is None or value.const_value is None or not value.const_value.dtype.is_floating_point():
        return None
    rank = len(value.const_value.shape)
    return (value, axis % rank) if rank else None


def _length(stored: tuple[ir.Value, int]) -> int:
    value, axis = stored
    assert value.const_value is not None
    return int(value.const_value.numpy().shape[axis])


def _readers(chosen: ir.Value, count: int) -> tuple[dict[str, int], dict[int, ir.Node]]:
    """Stacks that are read at the chosen numbers -> the axis of experts, and the nodes that compare them with one of them."""
    uses = [(node, port) for value in _moved(chosen) for node, port in value.uses()]
    held = (_stored(node.inputs[0], 0) for node, port in uses if _looks_up(node) and port == 1)
    stacks = {str(one[0].name): one[1] for one in held if one is not None and _length(one) == count}
    compared = ((_number(node.inputs[1 - port]), node) for node, port in uses if node.op_type == "Equal")
    return stacks, {number: node for number, node in compared if number is not None and 0 <= number < count}


def _looks_up(node: ir.Node) -> bool:
    """Whether a node reads entries of the first axis."""
    first = node.attributes.get_int("axis", 0) == 0 == node.attributes.get_int("batch_dims", 0)
    return node.op_type in ("Gather", "GatherND") and first


def _moved(value: ir.Value) -> Iterator[ir.Value]:
    """A value, and what is the same numbers in another shape."""
    stack = [value]
    while stack:
        value = stack.pop()
        yield value
        stack.extend(node.outputs[0] for node, port in value.uses() if node.op_type in _MOVES and port == 0)


def _number(value: ir.Value | None) -> int | None:
    """The element of a constant that has one."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return int(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _behind(start: ir.Node) -> list[ir.Node]:
    """A node and all that is computed from its results, each behind what it reads."""
    reached, stack = {start}, [start]
    while stack:
        for value in stack.pop().outputs:
            for node, _ in value.uses():
                if node not in reached:
                    reached.add(node)
                    stack.append(node)
    assert start.graph is not None
    return [node for node in start.graph if node in reached]


def _merge(start: ir.Node, shapes: Shapes) -> tuple[ir.Node, int] | None:
    """Where the result of a branch is added to what the others made, and the port of theirs."""
    nodes = _behind(start)
    made = {value for node in nodes for value in node.outputs}
    for node in nodes:
        others = [port for port, value in enumerate(node.inputs) if value not in made]
        if _scatters_into(node) and 0 in others:
            return node, 0
        if node.op_type == "Add" and len(others) == 1 and _sums_up(node, others[0], shapes):
            return node, others[0]
    return None


def _scatters_into(node: ir.Node) -> bool:
    adds = node.op_type in ("ScatterElements", "ScatterND")
    return adds and node.attributes.get_string("reduction", "none") == "add"


def _sums_up(node: ir.Node, port: int, shapes: Shapes) -> bool:
    """Whether an Add adds up results: both operands have the shape of the sum, and what is stored is zero."""
    sizes = {shapes.get(str(value.name if value else "")) for value in (*node.inputs, node.outputs[0])}
    other = node.inputs[port]
    tensor = None if other is None else ir.convenience.get_const_tensor(other)
    if tensor is not None:
        return not np.any(tensor.numpy())
    return len(sizes) == 1 and other is not None and other.dtype is not None and other.dtype.is_floating_point()


class OnnxMixtures(Mixtures):
    """The mixtures of a loaded model.

    Args:
        loaded: as it is read.
        batches: of real inputs.
        providers: as ONNX Runtime takes them.
        put: is given the model at the end.
    """

    looked_for = (
        "the model has no TopK behind a product with a row per expert whose choice reads stacks of matrices, or begins branches "
        "that are added up"
    )

    def __init__(
        self, loaded: Loaded, batches: Sequence[Any], providers: Providers | None, put: Callable[[Loaded], None]
    ) -> None:
        self._loaded, self._model, self._providers, self._put = loaded, loaded.model, providers, put
        self._batches = [as_feeds(batch, input_specs(loaded.model)) for batch in batches]
        self._shapes = measure_shapes(self._model, self._batches[0], providers)
        self._found = {mixture.name: mixture for mixture in find_mixtures(self._model, self._shapes)}

    def counts(self) -> Mapping[str, int]:
        """As the base class says."""
        return {name: mixture.experts for name, mixture in self._found.items()}

    def size(self) -> float:
        """As the base class says."""
        tensors = (value.const_value for value in self._model.graph.initializers.values())
        return float(sum(t.size for t in tensors if t is not None and t.dtype.is_floating_point()))

    def _run(self, model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
        return [np.asarray(a) for a in run_session(open_session(model, self._providers), feeds, "batch")]

    # -- saliency

    def saliencies(self, names: Sequence[str], needed: bool, progress: bool) -> list[tuple[Array, Array]]:
        """As the base class says: norms of what is added up, which has been multiplied by gates."""
        nodes = {str(node.name): node for node in self._model.graph}
        added = {name: self._added(self._found[name], nodes) for name in names}
        hidden = [name for name in names if not added[name]]
        if needed and hidden:
            raise ModelError(
                hidden[0], "the results of its experts are not added up by one ReduceSum over the chosen of each token",
                "write importance='frequency'",
            )  # fmt: skip
        wanted = dict.fromkeys(one for name in names for one in (self._found[name].chosen, *added[name]))
        session = open_session(_returning(self._model, wanted), self._providers)
        runs = []
        for feeds in progress_bar(self._batches, "Experts", progress):
            made = dict(zip(wanted, map(np.asarray, run_session(session, feeds, "batch", list(wanted))), strict=True))
            runs.append([self._of_run(self._found[name], made, added[name]) for name in names])
        totals = ([sum(parts) for parts in zip(*of_one, strict=True)] for of_one in zip(*runs, strict=True))
        return [(sums / np.maximum(tokens, 1), tokens) for sums, tokens in totals]

    def _of_run(self, mixture: Mixture, made: Mapping[str, Array], added: Sequence[str]) -> tuple[Array, Array]:
        """Sums of norms, and tokens, of each expert in one run."""
        chosen = made[mixture.chosen]
        tokens = np.bincount(chosen.reshape(-1), minlength=mixture.experts)
        return self._norms(mixture, chosen, [made[one] for one in added]), tokens

    def _added(self, mixture: Mixture, nodes: Mapping[str, ir.Node]) -> list[str]:
        """Values that are added up: of every branch its own, of stacks one with the chosen of each token along an axis."""
        if mixture.merges:
            merged = [(nodes[node], port) for _, (node, port) in sorted(mixture.merges.items())]
            ports = [2 if node.op_type.startswith("Scatter") else 1 - port for node, port in merged]
            return [str(value.name) for (node, _), p in zip(merged, ports, strict=True) if (value := node.inputs[p])]
        sums = (node for node in _behind(nodes[mixture.name]) if node.op_type == "ReduceSum")
        return [
            str(node.inputs[0].name) for node in sums if node.inputs[0] is not None and self._adds_up(mixture, node)
        ][:1]

    def _adds_up(self, mixture: Mixture, node: ir.Node) -> bool:
        """Whether a ReduceSum sums over the chosen of each token."""
        assert node.inputs[0] is not None
        shape, axis = self._shapes.get(str(node.inputs[0].name), ()), _reduced(node)
        return (
            bool(shape)
            and axis is not None
            and _axis_of_chosen(shape[:-1], self._shapes[mixture.chosen]) == axis % len(shape)
        )

    def _norms(self, mixture: Mixture, chosen: Array, added: Sequence[Array]) -> Array:
        """Sum of the norms of what each expert adds; zeros where it is not known."""
        if not added:
            return np.zeros(mixture.experts)
        if mixture.merges:
            return np.array([np.linalg.norm(part.astype(np.float64), axis=-1).sum() for part in added])
        norms = np.linalg.norm(added[0].astype(np.float64), axis=-1)
        axis = _axis_of_chosen(norms.shape, chosen.shape)
        assert axis is not None
        return np.bincount(chosen.reshape(-1), np.moveaxis(norms, axis, -1).reshape(-1), minlength=mixture.experts)

    # -- removal

    def without(self, gone: Mapping[str, Sequence[int]]) -> list[Array]:
        """The outputs of a copy whose logits and scores are as low as can be where experts go."""
        model = clone_model(self._model)
        nodes = {str(node.name): node for node in model.graph}
        for name, numbers in gone.items():
            mixture = self._found[name]
            for value in dict.fromkeys((nodes[mixture.router].outputs[0], nodes[name].inputs[0])):
                assert value is not None
                _add_low(model, value, mixture.experts, numbers)
        return self._run(model, self._batches[0])

    def remove(self, kept: Mapping[str, Sequence[int]]) -> tuple[list[Array], Undo]:
        """As the base class says."""
        before, model = self._model, clone_model(self._model)
        nodes, names = {str(node.name): node for node in model.graph}, Names(model)
        for name, left in kept.items():
            _take_out(model, nodes, names, self._found[name], left)
        for name, value in list(model.graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                model.graph.initializers.pop(name)
        made = _reshaped(model, lambda: self._run(model, self._batches[0]))
        self._model = model

        def undo() -> None:
            self._model = before

        return made, undo

    def finish(self, kept: Mapping[str, Sequence[int]]) -> tuple[Mapping[str, Any], str]:
        """Put the model into the caller's; a file needs no plan besides."""
        self._put(replace(self._loaded, model=self._model))
        return {}, ""


def _returning(model: ir.Model, names: Iterable[str]) -> ir.Model:
    """A copy that returns some values, too."""
    model = clone_model(model)
    returned = {str(v.name) for v in model.graph.outputs}
    model.graph.outputs.extend(v for node in model.graph for v in node.outputs if v.name in set(names) - returned)
    return model


def _axis_of_chosen(shape: Sequence[int], chosen: Sequence[int]) -> int | None:
    """The axis of results without their width that runs over the chosen of one token; the last one that fits."""
    fits = (
        axis for axis in range(len(shape))[::-1]
        if shape[axis] == chosen[-1] and math.prod(shape) == math.prod(chosen)
    )  # fmt: skip
    return next(fits, None)


def _reshaped(model: ir.Model, run: Callable[[], list[Array]]) -> list[Array]:
    """Run a model whose values have other lengths than it declares, and declare those of its outputs anew."""
    for value in (value for node in model.graph for value in node.outputs if not value.is_graph_output()):
        value.shape = None
    made = run()
    for value, array in zip(model.graph.outputs, made, strict=True):
        if value.shape is not None and len(value.shape) == array.ndim:
            lengths = zip(value.shape, array.shape, strict=True)
            value.shape = ir.Shape([own if isinstance(n, int) else n for n, own in lengths])
    return made


def _reduced(node: ir.Node) -> int | None:
    """The one axis that a ReduceSum sums over."""
    if node.op_type != "ReduceSum":
        return None
    axes = list(node.attributes.get_ints("axes", ()))
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        tensor = ir.convenience.get_const_tensor(node.inputs[1])
        axes = [] if tensor is None else tensor.numpy().reshape(-1).tolist()
    return int(axes[0]) if len(axes) == 1 else None


def _add_low(model: ir.Model, value: ir.Value, count: int, numbers: Sequence[int]) -> None:
    """Let all readers of logits see the lowest numbers where experts are never chosen."""
    dtype = value.dtype or ir.DataType.FLOAT
    low = np.zeros(count, np.float32)
    low[list(numbers)] = -3e4 if dtype == ir.DataType.FLOAT16 else -1e9
    name = Names(model).value(f"{value.name}.never")
    tensor = ir.Tensor(low.astype(dtype.numpy()), dtype=dtype, name=name)
    held = ir.Value(name=name, const_value=tensor, type=ir.TensorType(dtype), shape=ir.Shape(low.shape))
    model.graph.register_initializer(held)
    node, maker = ir.node("Add", [value, held]), value.producer()
    node.outputs[0].name = f"{name}.sum"
    node.outputs[0].dtype = dtype
    move_uses(value, node.outputs[0], keep={node})
    assert maker is not None
    model.graph.insert_after(maker, node)


def _take_out(
    model: ir.Model, nodes: Mapping[str, ir.Node], names: Names, mixture: Mixture, kept: Sequence[int]
) -> None:
    """Take experts out: their entries of initializers, and their branches; those that are left are counted anew."""
    for name, axis in mixture.rows.items():
        value = model.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None
        array = np.ascontiguousarray(tensor.numpy().take(list(kept), axis))
        value.const_value, value.shape = ir.Tensor(array, dtype=tensor.dtype, name=name), ir.Shape(array.shape)
    for name in mixture.targets:
        shape = nodes[name].inputs[1]
        target = None if shape is None else ir.convenience.get_const_tensor(shape)
        if target is not None and target.numpy()[-1:].tolist() == [mixture.experts]:
            sizes = np.array([*target.numpy()[:-1], len(kept)], np.int64)
            nodes[name].replace_input_with(1, _constant(model, names, f"{name}.shape", sizes))
    number = {old: new for new, old in enumerate(kept)}
    for expert, (name, port) in mixture.merges.items():
        start = nodes[mixture.branches[expert]]
        if expert in number:
            at = next(p for p, value in enumerate(start.inputs) if _number(value) == expert)
            old = start.inputs[at]
            assert old is not None
            kind = ir.convenience.get_const_tensor(old).numpy()  # type: ignore[union-attr]
            new = np.full(kind.shape, number[expert], kind.dtype)
            start.replace_input_with(at, _constant(model, names, f"{start.name}.number", new))
            continue
        merge, others = nodes[name], nodes[name].inputs[port]
        assert others is not None
        move_uses(merge.outputs[0], others)
        remove_unread(merge.outputs[0])


def _constant(model: ir.Model, names: Names, base: str, array: Array) -> ir.Value:
    name = names.value(base)
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    model.graph.register_initializer(value)
    return value
