"""Follow the grid of every value of a marked model through data movement, and find constants.

A Pad between quantizers is computed in float by ONNX Runtime, with a DequantizeLinear before and a QuantizeLinear after it,
which together cost more than the convolution; a Pad of zeros before a convolution becomes the convolution's own padding, with
the same numbers (:func:`absorb_padding`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.operators import TRAITS, is_neutral, op_row
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.numerics.integer_sums import bias_entries
from bitwright.errors import close_matches
from bitwright.export.files.onnx_file import all_graphs, all_nodes, check_results
from bitwright.export.qdq.forms import Pair
from bitwright.export.qdq.markers import bypass, is_site, remove_unread, site_nodes, site_of
from bitwright.export.qdq.stored import transpose_encoding
from bitwright.export.qdq.writing import Weight, Writing
from bitwright.runtimes.onnxruntime import new_session, session_options

_IR_VERSION = 10
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NUMPY_FLOATS = (None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
RANDOM = frozenset(
    ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")
)


def find_constants(model: ir.Model, also: Iterable[ir.Value | None] = ()) -> dict[ir.Value, ir.TensorProtocol]:
    """Find values that are equal in every run: initializers, Constant nodes, and marked values computed from them.

    Initializers that are graph inputs can be overridden and do not count. What is computed from constants
    alone (a weight under weight normalisation, say) is evaluated only where a marker reads it or where it is one of
    ``also``, all in one run of ONNX Runtime. A half-precision constant that is only cast to float32 is so at each reading.
    """
    known = _stored(model)
    constant = set(known)
    for node in all_nodes(model.graph):
        tensor = _held_by(node)
        if tensor is not None:
            known[node.outputs[0]] = tensor
            constant.add(node.outputs[0])
        elif _is_pure(node) and all(v is None or v in constant for v in node.inputs):
            constant.update(node.outputs)
    marked = dict.fromkeys(node.inputs[0] for node in site_nodes(model))
    asked = [v for v in marked if v is not None and v.dtype in _NUMPY_FLOATS]
    computed = constant - known.keys()
    wanted = [v for v in dict.fromkeys((*asked, *also)) if v in computed]
    return {**known, **_computed(model, wanted, known)}


def _computed(
    model: ir.Model, wanted: list[ir.Value], known: Mapping[ir.Value, ir.TensorProtocol]
) -> dict[ir.Value, ir.TensorProtocol]:
    """The constants that are computed of known ones: what is only cast is so at each reading, the others at once."""
    widened = {value: wide for value in wanted if (wide := _widened(value, known)) is not None}
    others = [value for value in wanted if value not in widened]
    return {**widened, **(_evaluate(model, others, known) if others else {})}


def _widened(value: ir.Value, known: Mapping[ir.Value, ir.TensorProtocol]) -> ir.TensorProtocol | None:
    """A constant of half precision cast to float32, whose numbers are computed when they are read; ``None`` of others."""
    node = value.producer()
    source = known.get(node.inputs[0]) if node is not None and node.op_type == "Cast" and node.inputs[0] else None
    if source is None or value.dtype != ir.DataType.FLOAT or source.dtype not in _HALVES:
        return None
    return ir.LazyTensor(
        lambda: ir.Tensor(source.numpy().astype(np.float32)), ir.DataType.FLOAT, ir.Shape(source.shape.numpy())
    )


def _stored(model: ir.Model) -> dict[ir.Value, ir.TensorProtocol]:
    """Initializers that cannot be overridden."""
    return {
        value: value.const_value
        for graph in all_graphs(model.graph)
        for value in graph.initializers.values()
        if value.const_value is not None and not value.is_graph_input()
    }


def _held_by(node: ir.Node) -> ir.TensorProtocol | None:
    """The array of a Constant."""
    is_constant = node.op_type == "Constant" and not node.domain
    return ir.convenience.get_const_tensor(node.outputs[0]) if is_constant else None


def _is_pure(node: ir.Node) -> bool:
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    nested = any(attr.type in graphs for attr in node.attributes.values())
    return bool(node.inputs) and not node.domain and node.op_type not in RANDOM and not nested


def _evaluate(
    model: ir.Model, wanted: list[ir.Value], known: Mapping[ir.Value, ir.TensorProtocol]
) -> dict[ir.Value, ir.TensorProtocol]:
    """Evaluate pure operators on constants anywhere in the model, also in branches that never run."""
    check_results(model)
    part = ir.Model(_part(model, wanted, known), ir_version=_IR_VERSION)
    session = new_session(ir.to_proto(part).SerializeToString(), session_options(optimized=False))
    return {value: ir.Tensor(array) for value, array in zip(wanted, session.run(None, {}), strict=True)}


def _part(model: ir.Model, wanted: list[ir.Value], known: Mapping[ir.Value, ir.TensorProtocol]) -> ir.Graph:
    """A graph without inputs that computes ``wanted`` from copies of their producers in several graphs."""
    made: dict[ir.Value, ir.Value] = {}
    initializers: list[ir.Value] = []
    nodes: list[ir.Node] = []
    pending: list[tuple[ir.Value, bool]] = [(value, False) for value in wanted]
    while pending:
        value, entered = pending.pop()
        if value in made:
            continue
        node = value.producer()
        if value in known:
            tensor = _in_memory(known[value])
            made[value] = ir.Value(name=f"v{len(made)}", type=ir.TensorType(tensor.dtype), const_value=tensor)
            made[value].shape = ir.Shape(tensor.shape.numpy())
            initializers.append(made[value])
        elif not entered:
            assert node is not None, value.name  # constants are initializers or come from nodes
            pending.append((value, True))
            pending.extend((source, False) for source in node.inputs if source is not None)
        else:
            assert node is not None
            nodes.append(_copied(node, made))
    outputs = [made[value] for value in wanted]
    opsets = dict(model.opset_imports)
    return ir.Graph([], outputs, nodes=nodes, initializers=initializers, opset_imports=opsets, name="constants")


def _in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """``tensor``; an external one as a copy in memory, as a session opened from bytes needs."""
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype) if isinstance(tensor, ir.ExternalTensor) else tensor


def _copied(node: ir.Node, made: dict[ir.Value, ir.Value]) -> ir.Node:
    """A copy of ``node`` on mapped values; its outputs are added to ``made``."""
    inputs = [None if source is None else made[source] for source in node.inputs]
    copy = ir.Node("", node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name, new.type = f"v{len(made)}", old.type
        made[old] = new
    return copy


Known = Callable[[ir.Value], NDArray[Any] | None]


def pads_of_convolutions(model: ir.Model) -> list[ir.Node]:
    """Every Pad whose readers are all convolutions that state how much they pad."""
    return [node for node in all_nodes(model.graph) if _is_pad(node) and _read_by_convolutions(node.outputs[0])]


def absorb_padding(pads: list[ir.Node], known: Known) -> None:
    """Absorb Pad nodes into the convolutions after them.

    Args:
        pads: as :func:`pads_of_convolutions` found them. Those that pad with another number than zero, in other axes than the
            spatial ones, by a width that is not constant, or that cut off (a width below zero), stay.
        known: the value of a constant, ``None`` of what is computed.
    """
    for node in pads:
        widths, source = _widths(node, known), node.inputs[0]
        if widths is None or source is None:
            continue
        for reader, port in tuple(node.outputs[0].uses()):
            own = reader.attributes.get_ints("pads", (0,) * len(widths))
            total = [int(a) + int(b) for a, b in zip(own, widths, strict=True)]
            reader.attributes.add(ir.AttrInt64s("pads", total))
            reader.attributes.pop("auto_pad", None)
            reader.replace_input_with(port, source)
        remove_unread(node.outputs[0])


def _is_pad(node: ir.Node) -> bool:
    return node.op_type == "Pad" and not node.domain and node.attributes.get_string("mode", "constant") == "constant"


def _read_by_convolutions(value: ir.Value) -> bool:
    readers = list(value.uses())
    return bool(readers) and not value.is_graph_output() and all(_takes(node, port) for node, port in readers)


def _takes(node: ir.Node, port: int) -> bool:
    plain = node.op_type == "Conv" and not node.domain and port == 0
    return plain and node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _widths(node: ir.Node, known: Known) -> list[int] | None:
    """Zeros before and after every spatial axis, in the order of a convolution's ``pads``; ``None`` of other padding."""
    inputs = [*node.inputs[1:], None, None, None][:3]
    arrays = [None if value is None else known(value) for value in inputs]
    if any(value is not None and array is None for value, array in zip(inputs, arrays, strict=True)):
        return None
    given, filler, axes = arrays
    weight = next(iter(node.outputs[0].uses())).node.inputs[1]
    if given is None or (filler is not None and filler.any()) or weight is None or weight.shape is None:
        return None
    whole = np.zeros((2, len(weight.shape)), np.int64)
    whole[:, slice(None) if axes is None else axes] = given.reshape(2, -1)
    if whole[:, :2].any() or (whole < 0).any():
        return None
    return [int(n) for n in whole[:, 2:].reshape(-1)]


def _pads_with_zero(node: ir.Node, constant: Callable[[ir.Value], NDArray[Any] | None]) -> bool:
    if node.attributes.get_string("mode", "constant") != "constant":
        return True
    value = node.inputs[2] if len(node.inputs) > 2 else None
    array = None if value is None else constant(value)
    return value is None or (array is not None and not array.any())


def _is_nearest(node: ir.Node, constant: Callable[[ir.Value], NDArray[Any] | None]) -> bool:
    return node.attributes.get_string("mode", "nearest") == "nearest"


def _has_no_effect(node: ir.Node, constant: Callable[[ir.Value], NDArray[Any] | None]) -> bool:
    value = node.inputs[1] if len(node.inputs) == 2 else None
    array = None if value is None else constant(value)
    number = float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None
    return is_neutral(node.op_type, number)


# Operators whose kind in the op table is not the whole truth: when does the output hold values of the input?
_CONDITIONS: dict[str, Callable[[ir.Node, Callable[[ir.Value], NDArray[Any] | None]], bool]] = {
    "Pad": _pads_with_zero,
    "Resize": _is_nearest,
    **dict.fromkeys(("Mul", "Div", "Pow", "Add", "Sub"), _has_no_effect),
    # what comes out is what the body made; its first input is only where it starts
    **dict.fromkeys(("Loop", "Scan"), lambda node, constant: False),
}


def moves_data(node: ir.Node, constant: Callable[[ir.Value], NDArray[Any] | None]) -> bool:
    """Whether ``node`` passes on elements of its first input, unchanged; ``constant`` gives a value known before."""
    condition = _CONDITIONS.get(node.op_type)
    return condition(node, constant) if condition else op_row(node.op_type).kind == "movement"


# Layers that arrange a weight which is known when they load, and are slower with one that is not.
_ARRANGES = frozenset(("Conv", "ConvTranspose", *CELLS))

# Operators of one value that runtimes fuse with the convolution that makes it.
_FUSED = frozenset((*TRAITS["activation"], "BatchNormalization", "Add", "Sub", "Mul", "Div"))

# Joins of equal grids: which inputs carry data.
_JOINS: dict[str, slice] = {"Concat": slice(None), "Where": slice(1, 3)}


def trace(w: Writing) -> None:
    """Fill ``places``, ``constants``, ``grids``, ``weights`` and ``in_float``; markers without an encoding are taken out."""
    _count_runs(w)
    _drop_float_sites(w)
    _settle_constants(w)
    _follow(w)
    w.in_float = set(_layers_in_float(w))


def _count_runs(w: Writing) -> None:
    """Number the markers of each site; one in an unrolled loop has several."""
    counted: Counter[str] = Counter()
    for node in site_nodes(w.model):
        site = site_of(node)
        w.places[node] = (site, counted[site])
        counted[site] += 1


def _drop_float_sites(w: Writing) -> None:
    """Remove markers without an encoding; report encodings without a marker."""
    known = set()
    for node in site_nodes(w.model):
        site = site_of(node)
        known.add(site)
        encoding = w.encodings.get(site)
        if encoding is None:
            w.note(site, "float site", "has no encoding and stays in float")
        elif w.bias == "float" and encoding.format == IntFormat(32):
            w.note(site, "float bias", "stays in float, as asked for")
        else:
            continue
        if node.inputs[0] is not None:
            w.float_values.add(node.inputs[0])
        bypass(node, w.builder.outputs)
    for site in w.encodings:
        if site not in known:
            near = close_matches(site, known)
            w.note(site, "no place", f"has an encoding, but the model has no marker for it{near}")


def _settle_constants(w: Writing) -> None:
    """Find the constants, and absorb padding of constant widths into convolutions."""
    pads = pads_of_convolutions(w.model)
    also = [value for node in pads for value in node.inputs[1:]]
    if w.bias == "int32":  # no marker is needed
        also += [value for node in all_nodes(w.model.graph) for value in _bias_values(node)]
    w.constants = find_constants(w.model, also)
    absorb_padding(pads, w.array)


def bias_place(node: ir.Node) -> tuple[ir.Node, int] | None:
    """``(operator, port)``: the bias that ``node`` reads, of ``operator``, itself or the MatMul before it."""
    if node.domain:
        return None
    if node.op_type in TRAITS["bias_port"]:
        return (node, 2) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    if node.op_type != "Add":
        return None
    for port in (0, 1):
        product = node.inputs[1 - port]
        operator = product.producer() if product is not None else None
        if product is None or operator is None or operator.op_type != "MatMul":
            continue
        if len(product.uses()) == 1 and not product.is_graph_output() and node.inputs[port] is not None:
            return operator, port
    return None


def _bias_values(node: ir.Node) -> list[ir.Value]:
    """Operands of ``node`` that can be a bias: one number per output channel, not an attention mask."""
    place = bias_place(node)
    value = None if place is None else node.inputs[place[1]]
    shape = None if value is None or value.shape is None or not value.shape.is_static() else value.shape.numpy()
    return [value] if value is not None and shape and bias_entries(shape) is not None else []


def _follow(w: Writing) -> None:
    """Follow grids through operators that move data, and weights through transpositions, in one pass."""
    for node in all_nodes(w.model.graph):
        source = node.inputs[0] if node.inputs else None
        if source is None:
            continue
        if is_site(node):
            _note_site(w, node, source)
        elif node.op_type == "Transpose" and source in w.weights:
            weight = w.weights[source]
            perm = permutation(node, len(weight.shape))
            shape = tuple(weight.shape[i] for i in perm)
            moved = transpose_encoding(weight.encoding, perm)
            w.weights[node.outputs[0]] = Weight(weight.site, moved, shape)
        else:
            _note_float_weight(w, node)
            _note_carried(w, node)


def _note_carried(w: Writing, node: ir.Node) -> None:
    encoding = carried(w, node, w.grids)
    if encoding is not None:
        w.grids.update(dict.fromkeys(data_outputs(node), encoding))


def _note_site(w: Writing, node: ir.Node, source: ir.Value) -> None:
    encoding, array = w.encodings[site_of(node)], w.array(source)
    if array is not None:
        w.weights[node.outputs[0]] = Weight(site_of(node), encoding, array.shape)
    elif isinstance(encoding.granularity, PerTensor):
        w.grids[node.outputs[0]] = encoding


def _note_float_weight(w: Writing, node: ir.Node) -> None:
    """A float weight after a quantized input does not stay float in ONNX Runtime's default mode."""
    weight = node.inputs[1] if node.op_type in TRAITS["bias_port"] and len(node.inputs) > 1 else None
    if weight is not None and weight in w.constants and node.inputs[0] in w.grids:
        text = "stays in float, but ONNX Runtime by default quantizes float weights after quantized inputs"
        w.note(str(weight.name), "float weight", text)


def carried(w: Writing, node: ir.Node, known: Mapping[ir.Value, Any]) -> Any:
    """The entry in ``known`` of the data that ``node`` passes on unchanged; ``None`` if it computes."""
    if node.domain or not node.inputs:
        return None
    if node.op_type in _JOINS:
        joined = [known.get(v) if v is not None else None for v in node.inputs[_JOINS[node.op_type]]]
        first = joined[0]
        same = first is not None and all(_same_grid(first, other) for other in joined[1:])
        return first if same else None
    source = node.inputs[0]
    return known.get(source) if moves_data(node, w.array) and source is not None else None


def _same_grid(one: Encoding | Pair, other: Encoding | Pair | None) -> bool:
    if isinstance(one, Pair):
        return isinstance(other, Pair) and (one.dtype, one.encoding) == (other.dtype, other.encoding)
    return one == other


def data_outputs(node: ir.Node) -> tuple[ir.Value, ...]:
    """Outputs that hold data; indices of MaxPool and TopK do not."""
    return tuple(node.outputs) if node.op_type == "Split" else tuple(node.outputs[:1])


def permutation(node: ir.Node, rank: int) -> tuple[int, ...]:
    """The permutation of a Transpose."""
    return tuple(node.attributes.get_ints("perm", tuple(reversed(range(rank)))))


def _layers_in_float(w: Writing) -> Iterator[ir.Node]:
    """Layers that the target computes in float, with weights packed at load time.

    Not so a convolution between two grids, of whatever width: ONNX Runtime quantizes a float weight there by itself (1.31).
    """
    nodes = tuple(all_nodes(w.model.graph))
    rounded = _rounded(w, nodes)
    for node in nodes:
        if node.domain or node.op_type not in _ARRANGES:
            continue
        given = w.grids.get(node.inputs[0]) if node.inputs[0] is not None else None
        on_integers = node.outputs[0] in rounded or (is_narrow(given) and node.op_type not in w.target.code_results)
        if node.op_type in CELLS or given is None or not on_integers:
            yield node


def is_narrow(encoding: Encoding | None) -> bool:
    """Whether integer kernels read such codes."""
    return encoding is not None and isinstance(encoding.format, IntFormat) and encoding.format.bits <= 8


def is_fused(w: Writing, node: ir.Node) -> bool:
    """Whether runtimes fuse ``node``, of one operand, with the layer before it, or move quantizers across it."""
    return not node.domain and (node.op_type in _FUSED or moves_data(node, w.array))


def _rounded(w: Writing, nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """Values that are quantized, directly or after operators that the runtime fuses or moves quantizers across."""
    found: set[ir.Value] = set()
    for node in reversed(nodes):
        if not node.inputs or not (is_site(node) or any(v in found for v in node.outputs)):
            continue
        read = [v for v in node.inputs if v is not None]
        alone = sum(v not in w.constants for v in read) == 1
        if is_site(node) or (alone and is_fused(w, node)):
            found.update(read)
    return found
