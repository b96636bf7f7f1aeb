"""Check a model file before its tensors are read: their sizes, the location of their data, and stated shapes.

A tensor whose data do not fit its shape, or lie in a file that the model has no business with, would be read past its
end, allocated at a length that a damaged number says, or taken from anywhere on the disk.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

import onnx
import onnx_ir as ir

from bitwright.core.files import open_regular, too_large
from bitwright.errors import ModelError, with_article
from bitwright.export.files.onnx_file import all_graphs, all_nodes, body_protos

_STANDARD = ("", "ai.onnx")
#: operators whose result onnx infers a negative length for where a window, pads or sizes do not fit the input
_MAY_BE_NEGATIVE = {
    "Conv", "ConvInteger", "QLinearConv", "ConvTranspose", "DeformConv", "MaxPool", "AveragePool", "LpPool", "MaxUnpool",
    "Pad", "CenterCropPad", "Resize", "Upsample", "Split", "TopK", "Col2Im", "RoiAlign", "DFT", "STFT",
}  # fmt: skip
_UNKNOWN = "unknown"  # a domain whose operators shape inference skips
_MODEL_GRAPH = 7 << 3 | 2  # tag of a field in onnx.proto
_VARINT, _COUNTED, _FIXED = (0, 2, {1: 8, 5: 4})  # kinds of fields, and the bytes of those that have always the same
_LONGEST_HEAD = 20  # bytes of a tag and a number
_WHOLE = 1 << 26  # bytes of a file that is read at once
_PIECE = 1 << 22  # bytes of a graph that are read at once
#: bytes of a file; protobuf has no larger messages
MAX_BYTES = 2 << 30
_AGAIN = "export or download the file again; onnx.checker.check_model(path) shows whether it is whole"
_BESIDE = "put the data file beside the model file and name it without a folder; onnx.save writes it so"
_FROM_TORCH = (
    "a PyTorch model is quantized in Python: bitwright.quantize(model, batches, path=...); or export it first: "
    "torch.onnx.export(model, example, 'model.onnx', dynamo=True)"
)
#: how files of other kinds begin, at byte 0 or 4, what they are, and the remedy
_OTHER_FILES = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it", _FROM_TORCH),
    (b"\x80\x02", "a pickle, as torch.save wrote it before PyTorch 1.6", _FROM_TORCH),
    (b"TFL3", "a LiteRT model", "convert the original model with tf2onnx, and pass the .onnx file"),
    (b"\x89HDF", "an HDF5 file, as Keras writes it", "convert it with tf2onnx, and pass the .onnx file"),
)


def read_proto(path: Path) -> onnx.ModelProto:
    """The message that a file holds; external data stay where they are.

    Raises:
        ModelError: the file is missing, larger than a message can be, or no ONNX model.
    """
    from google.protobuf.message import DecodeError

    larger = "keep the weights in a second file: onnx.save(model, path, save_as_external_data=True)"
    with open_regular(path, ModelError) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise too_large(path, size, MAX_BYTES, ModelError, larger)
        head = file.read(8)
        file.seek(0)
        for begins, what, remedy in _OTHER_FILES:
            if head.startswith(begins) or head[4:].startswith(begins):
                raise ModelError(str(path), f"it is {what}, not an ONNX model", remedy)
        try:
            return onnx.ModelProto.FromString(file.read()) if size <= _WHOLE else _in_pieces(file, size)
        except (DecodeError, ValueError) as error:
            problem = f"it is not an ONNX model, or it was cut off: {error}"
            raise ModelError(str(path), problem, _AGAIN) from error


def _in_pieces(file: BinaryIO, size: int) -> onnx.ModelProto:
    """The message in ``file``, of which a tensor or some MiB at a time are in memory twice.

    Fields of a message that come one after the other are a message each, and merging them gives the whole.

    Raises:
        DecodeError, ValueError: it is no such message.
    """
    proto = onnx.ModelProto()
    for tag, start, content, end in _fields(file, 0, size):
        if tag != _MODEL_GRAPH:
            proto.MergeFromString(_read(file, start, end))
            continue
        first = content
        proto.graph.SetInParent()
        for _, _, _, last in _fields(file, content, end):
            if last - first >= _PIECE or last == end:
                proto.graph.MergeFromString(_read(file, first, last))
                first = last
    return proto


def _fields(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Tag, start, start of the content and end of every field of a message that lies at ``start`` to ``end``.

    Raises:
        ValueError: a field is of no known kind, or ends after the message.
    """
    while start < end:
        file.seek(start)
        head = file.read(min(_LONGEST_HEAD, end - start))
        tag, used = _varint(head, 0)
        kind = tag & 7
        if kind == _COUNTED:
            length, content = _varint(head, used)
        elif kind == _VARINT:
            length, content = 0, _varint(head, used)[1]
        elif kind in _FIXED:
            length, content = _FIXED[kind], used
        else:
            raise ValueError(f"a field at byte {start} is of kind {kind}")
        last = start + content + length
        if last > end:
            raise ValueError(f"a field at byte {start} ends at byte {last}, and the message around it at {end}")
        yield tag, start, start + content, last
        start = last


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """The number at ``start``, seven bits a byte, the lowest first, and where it ends."""
    number = 0
    for i, byte in enumerate(data[start : start + 10]):
        number |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return number, start + i + 1
    raise ValueError("a number in it has no end")


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def check_tensors(proto: onnx.ModelProto) -> None:
    """Check that every tensor of ``proto`` has as many elements as its shape, or names a file in its folder.

    Raises:
        ModelError: one does not; names the tensor.
    """
    for tensor in _tensors(proto):
        _check_tensor(tensor, tensor.name or "a tensor without a name")


def check_names(proto: onnx.ModelProto, site: str) -> None:
    """Check that every name and type of ``proto`` is valid UTF-8, which protobuf otherwise returns as bytes.

    Raises:
        ModelError: one is not.
    """
    for word in _words(proto):
        if not isinstance(word, str):
            raise ModelError(site, f"the name or text {word!r:.100} is not UTF-8", _AGAIN)


def _words(proto: onnx.ModelProto) -> Iterator[object]:
    for graph in graph_protos((proto.graph, *proto.functions)):
        yield graph.name
        if isinstance(graph, onnx.GraphProto):
            for values in (graph.input, graph.output, graph.value_info, graph.initializer):
                yield from (value.name for value in values)
        for node in graph.node:
            yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
            yield from (attribute.name for attribute in node.attribute)
            if node.domain in _STANDARD and node.op_type != "Constant":
                yield from (_text(word) for a in node.attribute for word in (a.s, *a.strings))


def _text(word: bytes) -> str | bytes:
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError:
        return word


def graph_protos(
    roots: Iterable[onnx.GraphProto | onnx.FunctionProto],
) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """``roots`` and every graph in an attribute below them."""
    waiting = list(roots)
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting.extend(body for node in graph.node for body in body_protos(node))


def infer_past_wrong_shapes(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, set[str]]:
    """``proto`` with inferred shapes, and the names of values with wrong stated shapes, which are dropped.

    Negative lengths, which some exporters write for unknown ones, are dropped too: onnx ends the process at a Slice of them.
    """
    for graph in _graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim if value.type.tensor_type.HasField("shape") else ():
                if dim.dim_value < 0:
                    dim.ClearField("dim_value")
    try:
        return onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True), set()
    except (onnx.shape_inference.InferenceError, RuntimeError):  # stated shapes may be all that is wrong
        wrong = _drop_wrong_shapes(proto)
    return onnx.shape_inference.infer_shapes(proto, data_prop=True), wrong


def check_lengths(proto: onnx.ModelProto) -> None:
    """Refuse operators whose result would have an axis of negative length, in models that also have a Slice.

    onnx aborts the process where a Slice reads such a result. Shapes are therefore inferred several times: first with
    every Slice unknown that reads the result of such an operator, then with those whose operators were checked.

    Raises:
        ModelError: naming the node.
    """
    suspects = _suspects(proto)
    levels = _levels(proto.graph, suspects.keys())
    nodes = chain.from_iterable(graph.node for graph in _graphs(proto))
    slices = [(node, levels[node.output[0]]) for node in nodes if _is_slice(node)]
    for level in range(max((number for _, number in slices), default=0) // 2):
        later = [node for node, number in slices if number // 2 > level]
        for info in _inferred_without(later, proto):
            if info.name in suspects and levels[info.name] // 2 == level:
                _check_result(suspects[info.name], info)


def _check_result(node: onnx.NodeProto, info: onnx.ValueInfoProto) -> None:
    lengths = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
    if min(lengths, default=0) < 0:
        raise ModelError(
            f"{node.name or info.name} ({node.op_type})",
            f"its result would have the shape {lengths}: its window, pads or sizes do not fit its input",
            "check its attributes and constants, and the shapes of the model's inputs",
        )


def _levels(graph: onnx.GraphProto, suspects: Set[str]) -> dict[str, int]:
    """Number each value that a node of ``graph`` or of its bodies computes by the Slices of suspects that lead to it.

    The number is odd from a result in ``suspects`` on, and the next even one from a Slice of such a value on.
    """
    levels: dict[str, int] = {}
    for node, bodies, entering in _in_order(graph):
        level = max((levels.get(name, 0) for name in node.input), default=0)
        if entering:
            levels |= {value.name: level for body in bodies for value in body.input}
            continue
        level = max((level, *(levels.get(value.name, 0) for body in bodies for value in body.output)))
        if suspects & {*node.output}:
            level |= 1
        elif _is_slice(node):
            level += level % 2
        levels |= dict.fromkeys(node.output, level)
    return levels


def _in_order(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, list[onnx.GraphProto], bool]]:
    """Yield each node of ``graph`` and its bodies in execution order, with its bodies and whether these are still to come.

    A node with bodies is yielded twice: before their nodes, and after them.
    """
    stack = [(node, True) for node in reversed(graph.node)]
    while stack:
        node, entering = stack.pop()
        bodies = body_protos(node)
        yield node, bodies, entering and bool(bodies)
        if entering and bodies:
            stack.append((node, False))
            stack.extend((inner, True) for body in bodies for inner in reversed(body.node))


def _is_slice(node: onnx.NodeProto) -> bool:
    return node.op_type == "Slice" and node.domain in _STANDARD and bool(node.output)


def _suspects(proto: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Results that may have a negative length, with the nodes that compute them; windows and pads that fit any input are none."""
    graphs = _graphs(proto)
    tensors = {tensor.name: tensor for graph in graphs for tensor in graph.initializer}
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in proto.graph.input}
    shapes |= {name: list(tensor.dims) for name, tensor in tensors.items()}
    suspects: dict[str, onnx.NodeProto] = {}
    for node in chain.from_iterable(graph.node for graph in graphs):
        second = "".join(node.input[1:2])
        if not _fits_any(node, tensors.get(second), shapes.get(second, [])):
            suspects |= dict.fromkeys(node.output, node)
    return suspects


def _fits_any(node: onnx.NodeProto, second: onnx.TensorProto | None, shape: list[int]) -> bool:
    """Whether the pads of ``node`` are such that no input gives its result a negative length.

    Args:
        second: its second input, where that is a constant.
        shape: of its second input; empty where it is unknown.
    """
    if node.op_type not in _MAY_BE_NEGATIVE or node.domain not in _STANDARD:
        return True
    lists = {a.name: list(a.ints) for a in node.attribute if a.ints}
    if node.op_type == "Pad":
        if second is not None and second.data_type == onnx.TensorProto.INT64:
            lists["pads"] = onnx.numpy_helper.to_array(second).ravel().tolist()
        return min(lists.get("pads", [-1]), default=0) >= 0
    if node.op_type not in ("Conv", "MaxPool", "AveragePool", "LpPool"):
        return False
    window = lists.get("kernel_shape", shape[2:])
    rank = len(window)
    pads, steps = lists.get("pads", [0] * 2 * rank), lists.get("dilations", [1] * rank)
    return 0 < rank == len(steps) == len(pads) // 2 and all(
        steps[i] > 0 and 0 < window[i] <= 1 + (pads[i] + pads[rank + i]) // steps[i] for i in range(rank)
    )


def _inferred_without(nodes: list[onnx.NodeProto], proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Types inferred while the results of ``nodes`` are unknown; an empty list where the stated shapes contradict the model."""
    domains = [node.domain for node in nodes]
    unknown = proto.opset_import.add(domain=_UNKNOWN, version=1)
    try:
        for node in nodes:
            node.domain = _UNKNOWN
        found = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError):
        return []
    finally:
        for node, domain in zip(nodes, domains, strict=True):
            node.domain = domain
        proto.opset_import.remove(unknown)
    return [info for graph in _graphs(found) for info in (*graph.value_info, *graph.output)]


def _drop_wrong_shapes(proto: onnx.ModelProto) -> set[str]:
    """Remove stated shapes that the model's operators contradict.

    An exporter that moves Transposes after it has noted shapes writes such files. ONNX Runtime runs them with a warning; what
    is derived from a wrong shape it refuses.

    Args:
        proto: names of values are unique over all graphs; changed in place.

    Returns:
        Names of the values.

    Raises:
        InferenceError, RuntimeError: of onnx, where operators contradict each other.
    """
    graphs = _graphs(proto)
    stated = [list(graph.value_info) for graph in graphs]
    _state(graphs, [[] for _ in graphs])
    try:
        bare = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    finally:
        _state(graphs, stated)
    known = {info.name: info for graph in _graphs(bare) for info in graph.value_info}
    infos = chain.from_iterable(stated)
    wrong = {info.name for info in infos if _contradict(info, known.get(info.name, info))}
    _state(graphs, [[info for info in infos if info.name not in wrong] for infos in stated])
    return wrong


def _graphs(proto: onnx.ModelProto) -> list[onnx.GraphProto]:
    return [g for g in graph_protos((proto.graph,)) if isinstance(g, onnx.GraphProto)]


def _state(graphs: list[onnx.GraphProto], infos: list[list[onnx.ValueInfoProto]]) -> None:
    """Let each graph state ``infos`` of its values, and nothing else."""
    for graph, kept in zip(graphs, infos, strict=True):
        del graph.value_info[:]
        graph.value_info.extend(kept)


def _contradict(one: onnx.ValueInfoProto, other: onnx.ValueInfoProto) -> bool:
    """Whether two statements about a tensor give it other ranks or lengths."""
    types = one.type.tensor_type, other.type.tensor_type
    if not all(t.HasField("shape") for t in types):
        return False
    lengths = [[d.dim_value if d.HasField("dim_value") else None for d in t.shape.dim] for t in types]
    pairs = zip(*lengths, strict=False)
    return len(lengths[0]) != len(lengths[1]) or any(a is not None and b is not None and a != b for a, b in pairs)


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    graphs = list(graph_protos((proto.graph, *proto.functions)))
    sparse: list[onnx.SparseTensorProto] = []
    for graph in graphs:
        if isinstance(graph, onnx.GraphProto):
            yield from graph.initializer
            sparse += graph.sparse_initializer
    for attribute in (a for graph in graphs for node in graph.node for a in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        if attribute.HasField("sparse_tensor"):
            sparse.append(attribute.sparse_tensor)
        yield from attribute.tensors
        sparse += attribute.sparse_tensors
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _check_tensor(tensor: onnx.TensorProto, site: str) -> None:
    if any(n < 0 for n in tensor.dims):
        raise ModelError(site, f"its shape {list(tensor.dims)} has an axis of negative length", _AGAIN)
    known = tensor.data_type in onnx.TensorProto.DataType.values() and tensor.data_type
    if not known:
        raise ModelError(site, f"its data type, number {tensor.data_type}, is not one of ONNX", _AGAIN)
    dtype = ir.DataType(tensor.data_type)
    count, bits = math.prod(tensor.dims), 8 if dtype == ir.DataType.STRING else dtype.bitwidth
    bits = 8 if bits == 6 else bits  # stored one to a byte, unlike narrower ones
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_entries(tensor, site, (count * bits + 7) // 8)
    elif tensor.HasField("raw_data"):
        _compare(tensor, site, len(tensor.raw_data), (count * bits + 7) // 8, "bytes")
    else:
        values = getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type))
        needed = (count * bits + 7) // 8 if bits < 8 else count * (2 if "COMPLEX" in dtype.name else 1)
        _compare(tensor, site, len(values), needed, "elements")


def _compare(tensor: onnx.TensorProto, site: str, found: int, needed: int, unit: str) -> None:
    if found != needed:
        raise ModelError(
            site, f"its shape {list(tensor.dims)} needs {needed} {unit} of data, and it has {found}", _AGAIN
        )


def _check_entries(tensor: onnx.TensorProto, site: str, needed: int) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    parts = PurePosixPath(location.replace("\\", "/"))
    if not location or "\0" in location:
        raise ModelError(site, "its data lie in another file, whose name is missing", _AGAIN)
    if parts.is_absolute() or PureWindowsPath(location).drive or ".." in parts.parts:
        raise ModelError(site, f"its data lie in {location!r:.200}, outside the folder of the model", _BESIDE)
    for key in ("offset", "length"):
        text = entries.get(key, "0")
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise ModelError(site, f"the {key} of its data, {text!r:.40}, is not a number of bytes", _AGAIN)
    if "length" in entries:
        _compare(tensor, site, int(entries["length"]), needed, "bytes")


_MOST_IN_A_BLOCK = 1 << 31  # whose square is a number of 64 bits


def check_nodes(model: ir.Model, opset: int) -> None:
    """Check that standard nodes have the inputs and attributes they need, and If, Loop and Scan fitting bodies.

    Raises:
        ModelError: one has not; names the node. ONNX Runtime loads none of these.
    """
    schemas: dict[str, onnx.defs.OpSchema | None] = {}
    for node in all_nodes(model.graph):
        if node.domain not in _STANDARD:
            continue
        if node.op_type not in schemas:
            known = onnx.defs.has(node.op_type, opset)
            schemas[node.op_type] = onnx.defs.get_schema(node.op_type, opset) if known else None
        schema = schemas[node.op_type]
        wrong = None if schema is None else _wrong_with_node(node, schema)
        for name in _BODIES.get(node.op_type, ()):
            wrong = wrong or _wrong_with_body(node, name)
        if wrong is not None:
            raise ModelError(f"node {node.name!r}", wrong, _AGAIN)


def _wrong_with_node(node: ir.Node, schema: onnx.defs.OpSchema) -> str | None:
    if node.op_type == "Constant" and len(node.attributes) != 1:
        return f"it is a Constant of {len(node.attributes)} attributes instead of one, its value"
    needed = [name for name, attribute in schema.attributes.items() if attribute.required]
    needed += ["hidden_size"] if node.op_type in ("RNN", "GRU", "LSTM") else []  # which no other attribute tells
    for name in needed:
        if name not in node.attributes:
            return f"it is {with_article(node.op_type)} without {name}"
    size = node.attributes.get("blocksize")
    if size is not None and size.type == ir.AttributeType.INT and not 0 < size.as_int() < _MOST_IN_A_BLOCK:
        return f"its blocksize is {size.as_int()}"  # ONNX Runtime divides by its square
    count = len(node.inputs)
    if not schema.min_input <= count <= schema.max_input:
        return (
            f"it is {with_article(node.op_type)} of {count} inputs, and takes {schema.min_input} to {schema.max_input}"
        )
    return _wrong_with_inputs(node, schema)


def _wrong_with_inputs(node: ir.Node, schema: onnx.defs.OpSchema) -> str | None:
    count = len(node.inputs)
    scanned = node.attributes.get("num_scan_inputs")
    if scanned is not None and scanned.type == ir.AttributeType.INT and not 0 < scanned.as_int() <= count:
        return f"it scans {scanned.as_int()} inputs and has {count}"  # ONNX Runtime allocates as many
    for i, value in enumerate(node.inputs):
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        if value is None and formal.option != onnx.defs.OpSchema.FormalParameterOption.Optional:
            return f"it is {with_article(node.op_type)} without its input {formal.name}"
    return None


def _wrong_with_body(node: ir.Node, name: str) -> str | None:
    attribute = node.attributes.get(name)
    if attribute is None or attribute.type != ir.AttributeType.GRAPH or attribute.is_ref():
        return f"it is {with_article(node.op_type)} without {name}"
    body, extra = attribute.as_graph(), 1 if node.op_type == "Loop" else 0
    found, needed = len(body.outputs) - extra, len(node.outputs)
    if found < needed or (node.op_type == "If" and found != needed):
        return f"its {name} gives {max(0, found)} values, and the {node.op_type} has {needed} outputs"
    if not _is_fed(node, body):
        return f"its {len(node.inputs)} inputs are too few or too many for its {name}"
    return None


_BODIES = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


def _is_fed(node: ir.Node, body: ir.Graph) -> bool:
    given = len(node.inputs)
    if node.op_type == "If":
        return given == 1 and node.inputs[0] is not None and not body.inputs
    if node.op_type == "Loop":
        return given >= 2 and len(body.inputs) == given
    return given in (len(body.inputs), len(body.inputs) + 1)  # one more of them up to opset 8


def check_external_data(model: ir.Model, path: Path | None) -> None:
    """Check that the data of external tensors exist inside the folder of the model.

    A link is followed: the file may also lie where the model file really is, as in caches that link both. Such a
    tensor is given the real name, because ``onnx_ir`` reads no data through a link that leaves the folder.

    Args:
        model: as read; private.
        path: of its file; ``None`` for a model in memory, whose tensors know their folders.

    Raises:
        ModelError: a file is missing, lies elsewhere or is too short; names the tensor.
    """
    files = _DataFiles(path)
    for graph in all_graphs(model.graph):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = files.checked(value.const_value, str(value.name))
    for node in all_nodes(model.graph):
        for name, tensor in tensor_attributes(node):
            if isinstance(tensor, ir.ExternalTensor):
                found = files.checked(tensor, f"{node.name or node.op_type}, attribute {name}")
                node.attributes[name] = ir.AttrTensor(name, found)


def tensor_attributes(node: ir.Node) -> list[tuple[str, ir.TensorProtocol]]:
    """Name and value of every attribute of ``node`` that is a tensor."""
    found = [a for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR and not a.is_ref()]
    return [(attribute.name, attribute.as_tensor()) for attribute in found]


class _DataFiles:
    """The files beside a model; each is looked at once."""

    def __init__(self, model: Path | None) -> None:
        self._home = None if model is None else os.path.dirname(os.path.realpath(model))
        self._known: dict[tuple[str, str], tuple[str, int]] = {}

    def checked(self, tensor: ir.ExternalTensor, site: str) -> ir.ExternalTensor:
        """``tensor``, under its real name where a link leads out of the folder of the model."""
        base, location = os.fspath(tensor.base_dir), os.fspath(tensor.location)
        if (base, location) not in self._known:
            self._known[base, location] = self._look(base, location, site)
        real, size = self._known[base, location]
        end = (tensor.offset or 0) + (tensor.nbytes if tensor.length is None else tensor.length)
        if end > size:
            raise ModelError(
                site,
                f"its data ends at byte {end} of {os.path.basename(location)!r}, which has only {size}",
                "copy the data file again, it was cut off",
            )
        if not base or _inside(real, os.path.realpath(base)):
            return tensor
        return ir.ExternalTensor(
            os.path.basename(real), tensor.offset, tensor.length, tensor.dtype,
            shape=tensor.shape, name=tensor.name or "", base_dir=os.path.dirname(real),
        )  # fmt: skip

    def _look(self, base: str, location: str, site: str) -> tuple[str, int]:
        """The resolved path of a file, and its size."""
        path = Path(base, location)
        real = os.path.realpath(path)
        if not any(_inside(real, home) for home in (os.path.realpath(base), self._home) if home is not None):
            raise ModelError(site, f"its data lie in {real!r:.300}, outside the folder of the model", _BESIDE)
        found = _status(path)
        if found is None:
            raise ModelError(
                site,
                f"its data lies in {path.name!r:.300}, which is not in {str(path.parent)!r}",
                "put the data file beside the model file; both belong together",
            )
        if base and found.st_nlink > 1:
            problem = (
                f"its data lie in {path.name!r}, which has other names too (hard links), so that onnx_ir reads none"
            )
            raise ModelError(site, problem, "copy the data file: cp data copy && mv copy data")
        return real, found.st_size


def _status(path: Path) -> os.stat_result | None:
    """File status of a regular file; ``None`` where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _inside(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder
