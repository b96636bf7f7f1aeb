"""Equivalent rewrites of a QDQ model that runtimes need.

- :func:`close_scans`: ONNX lets the body of a Scan read values of the enclosing graphs. OpenVINO 2026.4 counts these among the
  inputs of the Scan and refuses it ("num_scan_outputs can't be negative"), so bodies hold their constants themselves.
- :func:`measure_codes`: Shape and Size read codes instead of dequantized values. ONNX Runtime gives every reader of a
  DequantizeLinear its own copy: a Shape before a Reshape dequantized the whole tensor.
- :func:`round_after_pools`: a MaxPool before the quantizer instead of after it::

      before: Conv -> Relu -> QuantizeLinear -> DequantizeLinear -> MaxPool
      after:  Conv -> Relu -> MaxPool -> Concat -> QuantizeLinear -> DequantizeLinear

  Rounding to a grid of one scale is monotonic, so the code of the maximum is the maximum of the codes. ONNX Runtime (1.31) pools
  floats in the blocked layout of the preceding convolution, and codes, whose channels come first there, several times as
  slowly. It would move the QuantizeLinear back across the MaxPool; a Concat of one tensor, which costs one copy, prevents it.
- :func:`join_activations`: SiLU and GELU, written out, become one operator of ONNX Runtime::

      before: x -> Sigmoid -> Mul(x)
      after:  x -> QuickGelu

  ONNX Runtime fuses them itself in float models (GELU in some spellings only), but not after a DequantizeLinear, of which
  each reader gets a copy.
- :func:`pool_codes`: a ReduceMean over the height and width of an image, between quantizers, becomes a GlobalAveragePool,
  which has an integer kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import onnx_ir as ir

from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.export.files.onnx_file import all_nodes, array_of
from bitwright.export.qdq.forms import Builder, after, before, note_metadata, read_metadata
from bitwright.export.qdq.markers import is_site, move_uses, remove_unread, site_nodes, site_of
from bitwright.export.qdq.trace import is_fused, is_narrow
from bitwright.export.qdq.writing import Writing

_CODE_TYPES = frozenset((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16))


def measure_codes(model: ir.Model) -> None:
    """Connect Shape and Size to the codes before a DequantizeLinear.

    Args:
        model: changed in place; computes the same. Codes of other types than of 8 and 16 bits stay unread.
    """
    for node in all_nodes(model.graph):
        if node.op_type not in ("Shape", "Size") or node.domain or node.inputs[0] is None:
            continue
        made_by = node.inputs[0].producer()
        if made_by is None or made_by.op_type != "DequantizeLinear":
            continue
        codes = made_by.inputs[0]
        if codes is not None and codes.dtype in _CODE_TYPES:
            node.replace_input_with(0, codes)


_POOLS = frozenset(("MaxPool", "GlobalMaxPool"))
_CODES = 16  # most bits of codes that pairs stand for


_OWN = "com.microsoft"
_IMAGE = 4  # axes of a batch of images
_TOLERANCE = 1e-4  # relative; constants of GELU are written with few digits


def join_activations(builder: Builder, model: ir.Model) -> None:
    """Write SiLU and exact GELU in float32 as ``QuickGelu`` and ``Gelu`` of ONNX Runtime.

    A function stays as it is if a value inside it is quantized, read by another operator or returned by the model.

    Args:
        builder: of the model.
        model: changed in place; computes the same within rounding of float32.
    """
    for node in tuple(all_nodes(model.graph)):
        find, name, attributes = _JOINED.get(node.op_type, (None, "", {}))
        found = None if find is None or node.domain or node.inputs[0] is None else find(node)
        if found is not None and found[0].dtype == ir.DataType.FLOAT:
            _join(builder, *found, name, attributes)


def _join(builder: Builder, given: ir.Value, last: ir.Node, name: str, attributes: Mapping[str, float]) -> None:
    """Turn the last operator of an activation function into the whole of it."""
    parts = [value for value in last.inputs if value is not None and value is not given]
    builder.become(last, name, [given], last.name)
    last.domain = _OWN
    for key, number in attributes.items():
        last.attributes[key] = ir.AttrFloat32(key, number)
    for value in parts:
        remove_unread(value)
    builder.graph.opset_imports.setdefault(_OWN, 1)


def pool_codes(builder: Builder, model: ir.Model) -> None:
    """Write the mean over the last two of four axes, between two grids, as GlobalAveragePool.

    Args:
        builder: of the model.
        model: changed in place; computes the same within rounding of float32.
    """
    for node in tuple(all_nodes(model.graph)):
        if _is_mean_of_image(node) and _is_between_grids(node):
            given, axes = node.inputs[:2]
            assert given is not None and axes is not None
            builder.become(node, "GlobalAveragePool", [given], node.name)
            remove_unread(axes)


def _is_mean_of_image(node: ir.Node) -> bool:
    """Whether a node is a mean over the last two of four axes that keeps them."""
    if node.domain or node.op_type != "ReduceMean" or not node.attributes.get_int("keepdims", 1):
        return False
    given, axes = (*node.inputs, None)[:2]
    numbers = array_of(axes)
    if given is None or given.shape is None or len(given.shape) != _IMAGE or numbers is None:
        return False
    return sorted(int(axis) % _IMAGE for axis in numbers.reshape(-1)) == [2, 3]


def _is_between_grids(node: ir.Node) -> bool:
    """Whether a node reads a DequantizeLinear, and a QuantizeLinear alone reads it."""
    given, reader = node.inputs[0], _sole_reader(node.outputs[0])
    made_by = None if given is None else given.producer()
    ends = (made_by, "DequantizeLinear"), (reader, "QuantizeLinear")
    return all(one is not None and one.op_type == op for one, op in ends)


def _silu(sigmoid: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """What a SiLU reads, and its last operator."""
    given, product = sigmoid.inputs[0], _sole_reader(sigmoid.outputs[0])
    assert given is not None
    return (given, product) if product is not None and _other(product, "Mul", sigmoid.outputs[0]) is given else None


def _gelu(erf: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """What ``x / 2 * (1 + erf(x / sqrt(2)))`` reads, and its last operator, whichever is multiplied first."""
    scaled = erf.inputs[0]
    assert scaled is not None
    given = _divided(scaled, math.sqrt(2.0))
    plus = _sole_reader(erf.outputs[0])
    if given is None or plus is None or not _is_number(_other(plus, "Add", erf.outputs[0]), 1.0):
        return None
    first = _sole_reader(plus.outputs[0])
    other = None if first is None else _other(first, "Mul", plus.outputs[0])
    if first is None or other is None:
        return None
    if _divided(other, 2.0) is given:
        return given, first
    last = _sole_reader(first.outputs[0])
    factor = None if last is None else _other(last, "Mul", first.outputs[0])
    if last is None or factor is None:
        return None
    whole = (other is given and _is_number(factor, 0.5)) or (factor is given and _is_number(other, 0.5))
    return (given, last) if whole else None


#: operator that occurs once in the function -> what finds the whole function, its operator in ONNX Runtime, its attributes
_JOINED: Mapping[str, tuple[Callable[[ir.Node], tuple[ir.Value, ir.Node] | None], str, Mapping[str, float]]] = {
    "Sigmoid": (_silu, "QuickGelu", {"alpha": 1.0}),
    "Erf": (_gelu, "Gelu", {}),
}


def _divided(value: ir.Value, number: float) -> ir.Value | None:
    """``x`` where ``value`` is ``x / number``, or ``x`` times its reciprocal, and nothing else reads it."""
    node = value.producer()
    if node is None or node.domain or _sole_reader(value) is None:
        return None
    left, right = (*node.inputs, None)[:2]
    if node.op_type == "Div":
        return left if _is_number(right, number) else None
    if node.op_type == "Mul":
        return left if _is_number(right, 1 / number) else right if _is_number(left, 1 / number) else None
    return None


def _other(node: ir.Node, op: str, value: ir.Value) -> ir.Value | None:
    """What an ``op`` of two operands reads beside ``value``."""
    if node.op_type != op or node.domain:
        return None
    return next((other for other in node.inputs if other is not value), None)


def _is_number(value: ir.Value | None, number: float) -> bool:
    held = None if value is None else value.const_value
    return held is not None and held.size == 1 and math.isclose(float(held.numpy().item()), number, rel_tol=_TOLERANCE)


def round_after_pools(w: Writing) -> None:
    """Move markers past the pools that alone read what they mark, where that is made in float; fills ``pooled``.

    Left as they are: values that something else reads too or the model returns, pools that return indices or whose result has
    a grid of its own or is returned, grids of several scales, of floats or of more than 16 bits, and bodies.

    Args:
        w: after :func:`bitwright.export.qdq.trace.trace`.
    """
    for marker in site_nodes(w.model):
        while (pool := _pool_after(w, marker)) is not None:
            _swap(w, marker, pool)


def keep_after_pool(w: Writing, marker: ir.Node) -> None:
    """Insert a copy between ``marker`` and the pool before it, so that the quantizer stays."""
    source = marker.inputs[0]
    assert source is not None
    dtype = source.dtype or ir.DataType.FLOAT
    copy = w.builder.emit(before(marker), "Concat", [source], f"{source.name}_pooled", dtype, axis=1)
    marker.replace_input_with(0, copy)


def _pool_after(w: Writing, marker: ir.Node) -> ir.Node | None:
    """The pool that ``marker`` can be moved past."""
    source, marked = marker.inputs[0], marker.outputs[0]
    encoding = w.encodings[site_of(marker)]
    pool = _sole_reader(marked)
    if pool is None or source is None or pool.op_type not in _POOLS or pool.domain:
        return None
    fits = marker.graph is w.model.graph and _sole_reader(source) is marker and _is_alone(pool)
    return pool if fits and _keeps_order(encoding) and _is_made_in_float(w, source, encoding) else None


def _sole_reader(value: ir.Value) -> ir.Node | None:
    """The only operator that reads ``value``; ``None`` where the model returns it too."""
    uses = value.uses()
    return None if len(uses) != 1 or value.is_graph_output() else next(iter(uses)).node


def _is_alone(pool: ir.Node) -> bool:
    """Whether ``pool`` returns only values on the grid of its input."""
    made, *indices = pool.outputs
    readers = [use.node for use in made.uses()]
    plain = readers and not made.is_graph_output() and not any(map(is_site, readers))
    return bool(plain) and not any(value.uses() or value.is_graph_output() for value in indices)


def _keeps_order(encoding: Encoding) -> bool:
    fmt = encoding.format
    return isinstance(fmt, IntFormat) and fmt.bits <= _CODES and isinstance(encoding.granularity, PerTensor)


def _is_made_in_float(w: Writing, made: ir.Value, encoding: Encoding) -> bool:
    """Whether no integer kernel makes ``made``, with the operators that runtimes fuse with it."""
    value = made
    while (node := value.producer()) is not None and value not in w.constants:
        if value in w.grids or node in w.in_float or not is_narrow(encoding):
            return not is_narrow(w.grids.get(value))
        read, wide = _read(w, node)
        if read != 1 or not wide or not is_fused(w, node):
            return bool(wide)
        value = wide[0]
    return value is not made and value not in w.constants


def _read(w: Writing, node: ir.Node) -> tuple[int, list[ir.Value]]:
    """The number of computed inputs of ``node``, and those among them that no integer kernel reads."""
    read = [v for v in node.inputs if v is not None and v not in w.constants and v not in w.weights]
    return len(read), [v for v in read if not is_narrow(w.grids.get(v))]


def _swap(w: Writing, marker: ir.Node, pool: ir.Node) -> None:
    """``source -> marker -> pool -> readers`` becomes ``source -> pool -> marker -> readers``."""
    source, marked, made = marker.inputs[0], marker.outputs[0], pool.outputs[0]
    assert marker.graph is not None
    pool.replace_input_with(0, source)
    move_uses(made, marked)
    marker.replace_input_with(0, made)
    marked.shape = None if made.shape is None else made.shape.copy()
    marker.graph.remove(marker)
    after(pool)(marker)
    w.grids.pop(made, None)
    text = f"made in float, and rounded after the {pool.op_type} that alone reads it: the same codes, fewer of them"
    w.note(site_of(marker), "after pool", text)
    w.pooled[marker] = w.pooled.get(marker, 0) + 1


_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def close_scans(builder: Builder, model: ir.Model) -> None:
    """Copy what bodies of Scan nodes read from outside into them, where constants decide it; the originals go when nothing else
    reads them.

    Values that depend on the model's inputs stay where they are.

    Args:
        builder: of ``model``, for names.
        model: changed in place; computes the same. Time and memory are linear in what is copied.
    """
    for node in [node for node in all_nodes(model.graph) if node.op_type == "Scan" and not node.domain]:
        _close(node.attributes["body"].as_graph(), builder)


def _close(body: ir.Graph, builder: Builder) -> None:
    inside = set(all_nodes(body))
    leading = {value: nodes for value in _captured(body, inside) if (nodes := _leading_to(value)) is not None}
    made = dict.fromkeys(node for nodes in leading.values() for node in nodes)
    copies: dict[ir.Value, ir.Value] = {}
    first = next(iter(body), None)
    for node in made:
        assert first is not None  # something reads what they make
        body.insert_before(first, _copied(node, body, builder, copies))
    for value in leading:
        copy = copies.get(value) or _stored(value, body, builder, copies)
        for node, i in [use for use in value.uses() if use.node in inside]:
            node.replace_input_with(i, copy)
        remove_unread(value)
    new_names = {str(old.name): str(_named_as(old, new).name) for old, new in copies.items()}
    for reader in (*(copies[node.outputs[0]].producer() for node in made), *inside):
        _rename_scale(reader, new_names)


def _captured(body: ir.Graph, inside: set[ir.Node]) -> list[ir.Value]:
    """Values that nodes of ``body`` capture from outer graphs, in order."""
    own = {value for graph in (body, *body.subgraphs()) for value in (*graph.inputs, *graph.initializers.values())}
    read = dict.fromkeys(value for node in all_nodes(body) for value in node.inputs if value is not None)
    return [value for value in read if value not in own and value.producer() not in inside]


def _named_as(old: ir.Value, new: ir.Value) -> ir.Value:
    """``new``, under the name of ``old`` if that was removed."""
    producer = old.producer()
    if old.graph is None if producer is None else producer.graph is None:
        new.name = old.name
    return new


def _rename_scale(node: ir.Node | None, new_names: Mapping[str, str]) -> None:
    """Update the scale's name in a quantizer's metadata."""
    facts = None if node is None else read_metadata(node)
    if node is not None and facts is not None and facts["scale"] in new_names:
        note_metadata(node, **{**facts, "scale": new_names[facts["scale"]]})


def _leading_to(value: ir.Value) -> list[ir.Node] | None:
    """The operators that compute ``value`` from initializers alone, in order; ``None`` where it depends on more."""
    waiting, found = [(value, False)], dict[ir.Node, None]()
    while waiting:
        one, entered = waiting.pop()
        node = one.producer()
        if node is not None and entered:
            found[node] = None
        elif _depends_on_more(one):
            return None
        elif node is not None and node not in found:
            waiting.append((one, True))
            waiting.extend((source, False) for source in node.inputs if source is not None)
    return list(found)


def _depends_on_more(value: ir.Value) -> bool:
    """Whether ``value`` is neither an initializer nor made by an operator without bodies."""
    node = value.producer()
    if node is None:
        return not value.is_initializer() or value.is_graph_input()
    return any(attr.type in _GRAPHS for attr in node.attributes.values())


def _copied(node: ir.Node, body: ir.Graph, builder: Builder, copies: dict[ir.Value, ir.Value]) -> ir.Node:
    """A copy of ``node`` in a body, on copies of its inputs."""
    inputs = [
        None if value is None else copies.get(value) or _stored(value, body, builder, copies) for value in node.inputs
    ]
    copy = ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs),
        name=builder.names.node(str(node.name)), metadata_props=dict(node.metadata_props),
    )  # fmt: skip
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name, new.type = builder.names.value(str(old.name)), old.type
        new.shape = None if old.shape is None else old.shape.copy()
        copies[old] = new
    return copy


def _stored(value: ir.Value, body: ir.Graph, builder: Builder, copies: dict[ir.Value, ir.Value]) -> ir.Value:
    """An initializer of a body with the number of ``value``."""
    tensor = value.const_value
    assert tensor is not None, value.name
    name = builder.names.value(str(value.name))
    kept = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    copy = ir.Value(name=name, shape=kept.shape, type=ir.TensorType(tensor.dtype), const_value=kept)
    body.register_initializer(copy)
    copies[value] = copy
    return copy
