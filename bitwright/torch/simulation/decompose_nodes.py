"""Decompose a program as torch's exporter does, one node at a time, where that gives the same operators.

Torch retraces the whole program: it runs it twice on stand-ins, which takes half of the time of an export. Most networks hold
few operators that become others by that, and these have a row in :data:`_ROWS`: what the retracing makes of them where no axis
is free. Calls that write into a tensor become calls that return one, where no other tensor shares its memory. Whatever has no
row here leaves the program as it is, and :func:`decomposed_by_node` says so: then the program is retraced.

The names of nodes are counted anew, as the retracing does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx  # noqa: TID251, the language of programs that torch.export returns
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

_aten = torch.ops.aten

#: composite operators that the exporter translates as they are
_KEPT = frozenset((
    _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default, _aten.linear.default, _aten.matmul.default,
    _aten.einsum.default, _aten.bilinear.default, _aten.softmax.int, _aten.max_pool2d.default, _aten.max_pool3d.default,
    _aten.layer_norm.default, _aten.group_norm.default, _aten.instance_norm.default, _aten.log_sigmoid.default,
    _aten.selu.default, _aten.prelu.default, _aten.pad.default, _aten.upsample_nearest2d.vec,
    _aten.upsample_bilinear2d.vec, _aten.relu6.default, _aten.repeat_interleave.self_int,
))  # fmt: skip
#: operators whose operands and results are of several types by nature
_OF_TYPES = frozenset((
    _aten.embedding.default, _aten.masked_fill.Scalar, _aten.max_pool2d_with_indices.default, _aten.topk.default,
    operator.getitem,
))  # fmt: skip
#: operators whose result may share the memory of their operand, beside those whose schema says so
_MAY_SHARE = frozenset((_aten.dropout.default, _aten.contiguous.default, _aten.reshape.default))


class _NoRowError(Exception):
    """Raised where a program has to be retraced."""


class _Rebuilt:
    """A graph under construction, node by node.

    Attributes:
        graph: the new graph.
        made: node of the old graph -> what stands for its value in the new one.
    """

    def __init__(self, is_kept: Callable[[Any], bool]) -> None:
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self._is_kept = is_kept
        self._written: dict[fx.Node, fx.Node] = {}  # result of a call that writes into a tensor -> what made the tensor

    def add(self, node: fx.Node) -> None:
        """Write ``node`` of the old graph.

        Raises:
            _NoRowError: it has no row.
        """
        if node.op in ("placeholder", "output"):
            # fx names the copy of `input`, which is also a built-in of Python, `input_1`; the signature keeps the old name
            made = self.made[node] = self.graph.node_copy(node, self._now)
            made.name = node.name
        elif node.op != "call_function":
            raise _NoRowError
        elif node.target in _ROWS:
            self.made[node] = _ROWS[node.target](self, node)
        elif _writes(node.target):
            self._add_written(node)
        elif self._is_kept(node.target):
            self.made[node] = self.call(node, node.target, self.given(node.args), self.given(node.kwargs))
        else:
            raise _NoRowError

    def call(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None, value: Any = None) -> fx.Node:
        """A call in place of ``node``, of the same value unless another is given."""
        name = getattr(getattr(target, "overloadpacket", target), "__name__", None)
        made = self.graph.create_node("call_function", target, args, kwargs or {}, name)
        made.meta = {**node.meta, "val": node.meta["val"] if value is None else value}
        return made

    def given(self, arguments: Any) -> Any:
        """Arguments of a node of the old graph, in the new one."""
        return fx.node.map_arg(arguments, self._now)

    def _now(self, node: fx.Node) -> fx.Node:
        """The present value of ``node``."""
        return self.made[self._written.get(node, node)]

    def _add_written(self, node: fx.Node) -> None:
        """Replace a call that writes into its first operand; later readers of that get the call's result."""
        tensor = node.args[0]
        assert isinstance(tensor, fx.Node)
        first = self._written.get(tensor, tensor)
        if first.op != "call_function" or _shares(first) or any(_shares(user) for user in first.users):
            raise _NoRowError
        same = [*node.users, *first.users]
        if any(_shares(user) for user in same):
            raise _NoRowError
        if node.target is _aten.copy_.default:
            source = node.args[1]
            if not isinstance(source, fx.Node) or not _alike(source, first):
                raise _NoRowError
            made = self._now(source)
        else:
            functional = _functional(node.target)
            if functional is None or not self._is_kept(functional) or not _alike(node, first):
                raise _NoRowError
            made = self.call(node, functional, self.given(node.args), self.given(node.kwargs))
        self._written[node] = first
        self.made[first] = made


def _alike(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return (
        isinstance(one, torch.Tensor)
        and isinstance(two, torch.Tensor)
        and (one.shape, one.dtype) == (two.shape, two.dtype)
    )


def _schema(target: Any) -> Any:
    return getattr(target, "_schema", None)


def _writes(target: Any) -> bool:
    schema = _schema(target)
    return schema is not None and bool(schema.is_mutable)


def _shares(node: fx.Node) -> bool:
    """Whether the result of ``node`` may share the memory of another tensor, without writing into it."""
    schema = _schema(node.target)
    if schema is None or node.target in _MAY_SHARE:
        return node.op == "call_function"
    return not schema.is_mutable and any(argument.alias_info is not None for argument in schema.arguments)


def _functional(target: Any) -> Any:
    """The functional form of the in-place operator ``target``; ``None`` where there is none."""
    space, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None) if name.endswith("_") else None
    made = None if packet is None else getattr(packet, target._overloadname, None)
    return made if made is not None and not made._schema.is_mutable else None


def _batch_norm(to: _Rebuilt, node: fx.Node) -> fx.Node:
    x, weight, bias, mean, variance, training, momentum, eps = to.given(node.args[:8])
    if training or mean is None or variance is None:
        raise _NoRowError
    value = node.meta["val"]
    target = _aten._native_batch_norm_legit_no_training.default
    empty = value.new_empty((0,))
    made = to.call(node, target, (x, weight, bias, mean, variance, momentum, eps), value=(value, empty, empty))
    parts = [to.call(node, operator.getitem, (made, i), value=value if i == 0 else empty) for i in range(3)]
    return parts[0]  # the others are counted, as the retracing counts them, and dropped


def _in_order(to: _Rebuilt, node: fx.Node, source: fx.Node) -> fx.Node:
    """A contiguous copy of ``source``, as an operand of ``node``."""
    order = {"memory_format": torch.contiguous_format}
    return to.call(node, _aten.clone.default, (source,), order, source.meta["val"].contiguous())


def _contiguous(to: _Rebuilt, node: fx.Node) -> fx.Node:
    source: fx.Node = to.given(node.args[0])
    if len(node.args) > 1 or node.kwargs:
        raise _NoRowError
    return source if source.meta["val"].is_contiguous() else _in_order(to, node, source)


def _in_shape(to: _Rebuilt, node: fx.Node) -> fx.Node:
    source, shape = to.given(node.args[0]), list(node.meta["val"].shape)
    try:
        source.meta["val"].view(shape)
    except (RuntimeError, ValueError):  # of the order in which the elements lie in memory: torch copies them
        source = _in_order(to, node, source)
        return to.call(node, _aten._unsafe_view.default, (source, shape))
    return to.call(node, _aten.view.default, (source, shape))


def _dropout(to: _Rebuilt, node: fx.Node) -> fx.Node:
    source: fx.Node = to.given(node.args[0])
    if node.args[2]:
        raise _NoRowError
    return source


def _average(to: _Rebuilt, node: fx.Node) -> fx.Node:
    size: Any = node.args[1]
    if any(length != 1 for length in size):
        raise _NoRowError
    return to.call(node, _aten.mean.dim, (to.given(node.args[0]), [-1, -2], True))


def _transposed(to: _Rebuilt, node: fx.Node) -> fx.Node:
    rank = node.meta["val"].dim() - 2
    given = (*to.given(node.args), *(None, 1, 0, 0, 1, 1)[len(node.args) - 2 :])
    x, weight, bias, stride, padding, output_padding, groups, dilation = given
    lists = ([n] * rank if isinstance(n, int) else list(n) * (rank // len(n)) for n in (stride, padding, dilation))
    added = [output_padding] * rank if isinstance(output_padding, int) else list(output_padding)
    args = (x, weight, bias, *lists, True, added * (rank // len(added)), groups)
    return to.call(node, _aten.convolution.default, args)


def _chunk(to: _Rebuilt, node: fx.Node) -> fx.Node:
    dim: Any = node.args[2] if len(node.args) > 2 else 0
    return to.call(node, _aten.split.Tensor, (to.given(node.args[0]), node.meta["val"][0].shape[dim], dim))


_ROWS: dict[Any, Callable[[_Rebuilt, fx.Node], fx.Node]] = {
    _aten.batch_norm.default: _batch_norm,
    _aten.flatten.using_ints: _in_shape,
    _aten.reshape.default: _in_shape,
    _aten.contiguous.default: _contiguous,
    _aten.dropout.default: _dropout,
    _aten.adaptive_avg_pool2d.default: _average,
    _aten.chunk.default: _chunk,
    _aten.conv_transpose1d.default: _transposed,
    _aten.conv_transpose2d.input: _transposed,
    _aten.conv_transpose3d.input: _transposed,
}


def decomposed_by_node(program: ExportedProgram, is_translated: Callable[[Any], bool]) -> bool:
    """Decompose ``program`` in place.

    Args:
        program: of ``torch.export``; changed only where the result is ``True``.
        is_translated: whether an operator has a translation, and is not replaced by its parts.

    Returns:
        Whether that was possible: every operator is translated, or has a row here, no axis is free, no operands
        of several types meet, and nothing is written into inputs and buffers.
    """
    module = program.graph_module
    if not _is_plain(program):
        return False

    def is_kept(target: Any) -> bool:
        return target is operator.getitem or (is_translated(target) and (target in _KEPT or not _is_composite(target)))

    rebuilt = _Rebuilt(is_kept)
    try:
        for node in module.graph.nodes:
            rebuilt.add(node)
    except _NoRowError:
        return False
    _rename_results(program, rebuilt.graph)
    module.graph = rebuilt.graph
    module.graph.eliminate_dead_code()
    return True


def _rename_results(program: ExportedProgram, graph: fx.Graph) -> None:
    """Let the signature of ``program`` name the results that its new ``graph`` returns."""
    before, after = (
        next(node for node in reversed(nodes) if node.op == "output").args[0]
        for nodes in (program.graph.nodes, graph.nodes)
    )
    assert isinstance(before, tuple | list) and isinstance(after, tuple | list)
    renamed = {old.name: new.name for old, new in zip(before, after, strict=True) if isinstance(old, fx.Node)}
    for spec in program.graph_signature.output_specs:
        if spec.arg.name in renamed:
            spec.arg.name = renamed[spec.arg.name]


def _is_composite(target: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))


def _is_plain(program: ExportedProgram) -> bool:
    """Whether shapes are known, operands have one dtype, and the program only returns results."""
    if program.range_constraints or any(
        module is not program.graph_module for module in program.graph_module.modules()
    ):
        return False
    signature = program.graph_signature
    if any(spec.kind != OutputKind.USER_OUTPUT for spec in signature.output_specs):
        return False
    if any(
        spec.kind not in (InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER) for spec in signature.input_specs
    ):
        return False
    return all(map(_is_of_one_type, program.graph.nodes))


def _is_of_one_type(node: fx.Node) -> bool:
    """Whether a call has no free axis, and no operand that the exporter would cast."""
    if node.op != "call_function":
        return True
    made, read = _tensors([node]), _tensors(node.all_input_nodes)
    if made is None or read is None or any(type(length) is not int for tensor in made for length in tensor.shape):
        return False
    if node.target in _OF_TYPES:
        return True
    types = {tensor.dtype for tensor in (*made, *read)}
    if len(types) > 1:
        return False
    scalars = any(isinstance(argument, float) for argument in (*node.args, *node.kwargs.values()))
    return not scalars or all(kind.is_floating_point for kind in types)


def _tensors(nodes: Sequence[fx.Node]) -> list[torch.Tensor] | None:
    """The values of nodes; ``None`` where one is not a tensor."""
    values: list[Any] = []
    for node in nodes:
        value = node.meta.get("val")
        values += value if isinstance(value, tuple | list) else [value]
    return values if all(isinstance(value, torch.Tensor) for value in values) else None
