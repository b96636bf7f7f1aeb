"""Write ONNX files, in one or two pieces, tensor by tensor, without holding the serialized message in memory.

Weights of large models are read from memory-mapped files and released as soon as they are written: they count as memory of
the process only until the system needs the pages. A model with results that do not fit into memory is refused.

``onnx_ir`` cannot represent maps and sequences of maps, which classifiers return. A model is read without these types, which
ONNX Runtime infers itself, and written with them; meanwhile each is kept in the metadata of its value.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
import psutil
from numpy.typing import NDArray

from bitwright.errors import BitwrightError, ModelError
from bitwright.export.files.atomic import atomic_files
from bitwright.progress import collector_paused

_KEY = "bitwright.type"  # in the metadata of a value: the type, serialised, in hexadecimal digits


def all_nodes(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Every node of a graph, one with bodies before the nodes of these: ``graph.all_nodes()`` in a tenth of the time.

    Linear in nodes and attributes; nodes may be added and removed meanwhile, as with that.
    """
    waiting = [iter(graph)]
    while waiting:
        for node in waiting[-1]:
            yield node
            if bodies := graphs_of(node):
                waiting.extend(iter(body) for body in reversed(bodies))
                break
        else:
            waiting.pop()


def all_graphs(graph: ir.Graph) -> list[ir.Graph]:
    """A graph and the bodies of all its nodes, in the order in which :func:`all_nodes` comes to them."""
    found: dict[ir.Graph, None] = {}
    waiting = [graph]
    while waiting:
        found.setdefault(at := waiting.pop())
        inner = [body for node in at for body in graphs_of(node)]
        waiting.extend(reversed(inner))
    return list(found)


def graphs_of(node: ir.Node) -> list[ir.Graph]:
    """The bodies of a node, in the order of its attributes."""
    found: list[ir.Graph] = []
    held = node.attributes.data  # the dict inside, which a loop reads ten times as fast
    for attribute in held.values() if held else ():
        kind = attribute.type
        if kind is ir.AttributeType.GRAPH and not attribute.is_ref():
            found.append(attribute.as_graph())
        elif kind is ir.AttributeType.GRAPHS and not attribute.is_ref():
            found.extend(attribute.as_graphs())
    return found


def body_protos(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The bodies of a node in a message, in the order of its attributes; :func:`graphs_of` has those of ``onnx_ir``."""
    return [g for a in node.attribute for g in (*([a.g] if a.HasField("g") else ()), *a.graphs)]


def from_proto(proto: onnx.ModelProto) -> ir.Model:
    """The model of a message, which is as before afterwards; types that hold maps stand in the metadata of their values.

    Raises:
        What ``onnx_ir.from_proto`` raises.
    """
    changed: list[tuple[onnx.ValueInfoProto, onnx.TypeProto]] = []
    try:
        for value in _values(proto):
            if value.HasField("type") and holds_map(value.type):
                kind = onnx.TypeProto()
                kind.CopyFrom(value.type)
                changed.append((value, kind))
                value.ClearField("type")
                value.metadata_props.add(key=_KEY, value=kind.SerializeToString().hex())
        return ir.from_proto(proto)
    finally:
        for value, kind in changed:
            del value.metadata_props[-1]
            value.type.CopyFrom(kind)


@collector_paused()
def load(path: Path) -> ir.Model:
    """Load a model by ``onnx_ir.load``, without the elements of external tensors.

    Types that the file does not state are those that quantizers imply.
    """
    model = from_proto(onnx.load(str(path), load_external_data=False))
    for graph in (model.graph, *all_graphs(model.graph)):
        ir.external_data.set_base_dir(graph, path.parent)
    _imply_types(model)
    return model


def _imply_types(model: ir.Model) -> None:
    """Set the types that quantizers imply: codes have the type of their zero point, dequantized values are float32."""
    for node in all_nodes(model.graph):
        if (
            node.domain
            or node.op_type not in ("QuantizeLinear", "DequantizeLinear")
            or node.outputs[0].dtype is not None
        ):
            continue
        zero_point = node.inputs[2] if len(node.inputs) > 2 else None
        codes = None if zero_point is None else zero_point.dtype
        implied = codes if node.op_type == "QuantizeLinear" else ir.DataType.FLOAT
        if implied is not None:
            node.outputs[0].dtype = implied


def restore_types(proto: onnx.ModelProto) -> bool:
    """Restore implied types of values in a message; returns whether there were any."""
    found = False
    for value in _values(proto):
        for at in reversed(range(len(value.metadata_props))):
            if value.metadata_props[at].key == _KEY:
                value.type.ParseFromString(bytes.fromhex(value.metadata_props[at].value))
                del value.metadata_props[at]
                found = True
    return found


def restore_types_of_file(path: Path) -> None:
    """Restore implied types of values in a file, without touching external tensors."""
    proto = onnx.load(str(path), load_external_data=False)
    if restore_types(proto):
        onnx.save(proto, str(path))


def array_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The array of a constant; ``None`` for other values."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def has_map(value: ir.Value) -> bool:
    """Whether the type of ``value`` is one that holds maps."""
    return _KEY in value.metadata_props


def is_tensor(value: ir.Value) -> bool:
    """Whether ``value`` is not a sequence, map or optional value, as far as types are known."""
    return (value.type is None or isinstance(value.type, ir.TensorType)) and not has_map(value)


def note_type(value: ir.Value, kind: onnx.TypeProto) -> None:
    """Set the inferred type of ``value``, where it has none."""
    if holds_map(kind):
        value.metadata_props.setdefault(_KEY, kind.SerializeToString().hex())
    elif value.type is None:
        value.type = ir.serde.deserialize_type_proto_for_type(kind)


def holds_map(kind: onnx.TypeProto) -> bool:
    """Whether values of this type are maps or sequences of maps, which ``onnx_ir`` lacks."""
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = (kind.sequence_type if kind.HasField("sequence_type") else kind.optional_type).elem_type
    return kind.HasField("map_type")


def _values(proto: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Every value with a type of its own, in bodies and functions too."""
    nodes = [proto.graph.node]
    yield from (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    for function in proto.functions:
        yield from function.value_info
        nodes.append(function.node)
    while nodes:
        for node in nodes.pop():
            for body in body_protos(node):
                yield from (*body.input, *body.output, *body.value_info)
                nodes.append(body.node)


#: types whose elements lie in files as they do in arrays
_PLAIN = frozenset(
    (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE, ir.DataType.INT8)
    + (ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64)
)
_LARGE = 1 << 16  # bytes of a tensor that is kept out of the message
# Tags of fields in onnx.proto, whose wire type is 2 (a length and so many bytes).
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_RAW_DATA = b"\x3a", b"\x2a", b"\x4a"
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
# Protobuf refuses files of 2 GiB; larger models keep their tensors in a second file.
_ONE_FILE_LIMIT = 3 << 29


@contextmanager
def checked_on_failure(source: object, site: str, kind: type[BitwrightError] = ModelError) -> Iterator[None]:
    """Turn an error inside into a ``kind`` where the ONNX checker finds the model invalid.

    Models with flaws that do no harm pass; an error about a valid model is ours and goes on as it is.

    Args:
        source: path, message or model.
        site: of the error.
        kind: its class.
    """
    try:
        yield
    except BitwrightError:
        raise
    except Exception as error:
        flaw = _flaw(source)
        if flaw is None:
            raise
        remedy = "export or download the file again; onnx.checker.check_model(path) shows whether it is whole"
        raise kind(site, f"it is not a valid ONNX model: {flaw}", remedy) from error


def _flaw(source: object) -> str | None:
    """The message of the ONNX checker for a path, a proto or a model."""
    try:
        onnx.checker.check_model(ir.to_proto(source) if isinstance(source, ir.Model) else source)  # type: ignore[arg-type]
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    except Exception:  # larger than a message, or too broken to be written: the error at hand says more
        return None
    return None


def save_model(model: ir.Model, path: str | os.PathLike[str], *, external: bool | None = None) -> list[Path]:
    """Write ``model``, atomically.

    Args:
        model: any model.
        path: of the ``.onnx`` file.
        external: keep large tensors in ``<path>.data`` beside it; ``None`` does so from 1.5 GiB on.

    Returns:
        The files written.

    Raises:
        ExportError: the folder is missing, read-only or full.
    """
    target = Path(path)
    if external is None:
        tensors = (value.const_value for graph in all_graphs(model.graph) for value in graph.initializers.values())
        external = sum(tensor.nbytes for tensor in tensors if tensor is not None) > _ONE_FILE_LIMIT
    with atomic_files(target.parent, name=target.name) as folder:
        if external:
            save_in_two_files(model, folder / target.name)
        else:
            save_in_one_file(model, folder / target.name)
        return [target.parent / written.name for written in sorted(folder.iterdir())]


@collector_paused()
def save_in_one_file(model: ir.Model, path: Path) -> None:
    """Write ``model`` with all its tensors inside; one large tensor at a time is in memory twice.

    Messages hold a copy of the tensors and serialising them another. The file is what ``ir.save`` writes, except for the
    order of fields, which has no meaning in protobuf.

    Args:
        model: below the 2 GiB that a message can have; its large initializers, and those that lie in other files, are taken
            out meanwhile.
        path: of the file.

    Raises:
        OSError: the file cannot be written.
    """
    values = [v for v in model.graph.initializers.values() if _is_apart(v.const_value)]
    tensors = {str(value.name): value.const_value for value in values}
    inner = [v for v in _initializers_of_bodies(model) if isinstance(v.const_value, ir.ExternalTensor)]
    kept = [value.const_value for value in (*values, *inner)]
    try:
        for value in values:
            value.const_value = _placeholder(value)
        for value in inner:
            value.const_value = _in_memory(value)
        proto = ir.to_proto(model)
        restore_types(proto)
        _drop_inferred(proto)
    finally:
        for value, tensor in zip((*values, *inner), kept, strict=True):
            value.const_value = tensor
    initializers = list(proto.graph.initializer)
    del proto.graph.initializer[:]
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    heads = [_head(tensor, tensors.get(tensor.name)) for tensor in initializers]
    size = len(graph) + sum(len(_field(_GRAPH_INITIALIZER, n)) + n for n in (_length(*head) for head in heads))
    with path.open("wb") as file:
        file.write(proto.SerializeToString())
        file.write(_field(_MODEL_GRAPH, size))
        file.write(graph)
        for head in heads:
            _write_tensor(file, *head)


def _drop_inferred(proto: onnx.ModelProto) -> None:
    """Drop types and shapes that follow from quantizers, which would double the stated ones.

    Shapes are those of what they read, types of codes those of the zero points; dequantized values are float32 unless
    they are stated.
    """
    made = {
        name: node
        for node in proto.graph.node
        if node.op_type in _QUANTIZERS and not node.domain
        for name in node.output
    }
    kept = []
    for info in proto.graph.value_info:
        node, tensor = made.get(info.name), info.type.tensor_type
        if node is not None:
            tensor.ClearField("shape")
            codes = node.op_type == "QuantizeLinear"
            if (codes and len(node.input) > 2) or (not codes and tensor.elem_type == onnx.TensorProto.FLOAT):
                continue
        kept.append(info)
    if len(kept) < len(proto.graph.value_info):
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(kept)


def save_in_two_files(model: ir.Model, path: Path) -> None:
    """Write ``model``, and its large tensors to ``<path>.data`` beside it.

    Raises:
        OSError: a file cannot be written.
    """
    written: list[ir.TensorProtocol] = []

    def let_last_go(tensor: ir.TensorProtocol, _: object) -> None:
        let_go(written.pop() if written else None)
        written.append(tensor)

    try:
        ir.save(model, path, external_data=f"{path.name}.data", callback=let_last_go)
    except OSError as error:
        if error.errno is None:  # numpy tells only how many elements found room
            raise OSError(errno.ENOSPC, str(error), str(path)) from error
        raise
    let_go(written.pop() if written else None)
    restore_types_of_file(path)


def _is_apart(tensor: ir.TensorProtocol | None) -> bool:
    """Whether elements are written outside of a message: those of large and of external tensors."""
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return False
    return isinstance(tensor, ir.ExternalTensor) or tensor.nbytes >= _LARGE


def _initializers_of_bodies(model: ir.Model) -> Iterator[ir.Value]:
    """Initializers of the bodies of ``If``, ``Loop`` and ``Scan``, and of functions."""
    return (
        value for graph in all_graphs(model.graph) if graph is not model.graph for value in graph.initializers.values()
    )


def _in_memory(value: ir.Value) -> ir.Tensor:
    """The tensor of ``value`` with its elements."""
    tensor = value.const_value
    assert tensor is not None
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name, doc_string=tensor.doc_string)


def _placeholder(value: ir.Value) -> ir.ExternalTensor:
    """A tensor of the same name, type and shape that serialises without its elements."""
    tensor = value.const_value
    assert tensor is not None
    made = ir.ExternalTensor("none", 0, 0, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=str(value.name))
    made.doc_string = tensor.doc_string
    made.metadata_props.update(tensor.metadata_props)
    return made


def _head(proto: onnx.TensorProto, tensor: ir.TensorProtocol | None) -> tuple[bytes, ir.TensorProtocol | None]:
    """The message of a tensor, without the elements of a large one."""
    if tensor is not None:
        proto.ClearField("external_data")
        proto.ClearField("data_location")
    return proto.SerializeToString(), tensor


def _length(head: bytes, tensor: ir.TensorProtocol | None) -> int:
    return len(head) + (0 if tensor is None else len(_field(_TENSOR_RAW_DATA, tensor.nbytes)) + tensor.nbytes)


def _write_tensor(file: BinaryIO, head: bytes, tensor: ir.TensorProtocol | None) -> None:
    file.write(_field(_GRAPH_INITIALIZER, _length(head, tensor)))
    file.write(head)
    if tensor is not None:
        file.write(_field(_TENSOR_RAW_DATA, tensor.nbytes))
        start = file.tell()
        write_elements(tensor, file)
        assert file.tell() - start == tensor.nbytes, tensor.name


def write_elements(tensor: ir.TensorProtocol, file: BinaryIO) -> None:
    """Write the elements in file byte order, and release the memory of a tensor that is stored in another file."""
    array = tensor.numpy() if tensor.dtype in _PLAIN and sys.byteorder == "little" else None
    if array is not None and array.flags.c_contiguous:
        file.write(array.reshape(-1).view(np.uint8).data)  # without a copy
    else:
        file.write(tensor.tobytes())
    let_go(tensor)


def let_go(tensor: ir.TensorProtocol | NDArray[Any] | None) -> None:
    """Release the memory of a tensor that is stored in a file, to be read again on demand."""
    raw: object = tensor.raw if isinstance(tensor, (ir.ExternalTensor, ir.Tensor)) else tensor
    while isinstance(raw, (np.ndarray, memoryview)):
        raw = raw.base if isinstance(raw, np.ndarray) else raw.obj
    if not isinstance(raw, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    with memoryview(raw) as view:
        kept = view.readonly  # what was written into a private mapping would be lost
    if kept:
        raw.madvise(mmap.MADV_DONTNEED)


def _field(tag: bytes, length: int) -> bytes:
    """The tag of a field and its length as a varint: seven bits a byte, the lowest first."""
    rest, varint = length, bytearray()
    while rest > 0x7F:
        varint.append(rest & 0x7F | 0x80)
        rest >>= 7
    return tag + bytes((*varint, rest))


def moved_model(source: Path, target: Path) -> Path:
    """Give a model's file another name; weights in a file of their own go with it."""
    if not source.with_name(f"{source.name}.data").exists():
        return source.replace(target)
    onnx.save(onnx.load(str(source)), str(target), save_as_external_data=True, location=f"{target.name}.data")
    return target


_SURELY_FREE = 1 << 26  # bytes up to which a result is assumed to fit


def check_results(model: ir.Model) -> None:
    """Refuse a model with a result that does not fit into the free memory twice; a simulation holds it in float and quantized.

    Raises:
        ModelError: naming the node. Otherwise a system that overcommits memory would kill the process without a message.
    """
    made = chain.from_iterable(node.outputs for node in all_nodes(model.graph))
    known = ((value, value.shape, value.dtype) for value in made if value.shape is not None and value.dtype is not None)
    sizes = (
        (math.prod(shape.numpy()) * dtype.bitwidth // 8, value)
        for value, shape, dtype in known
        if shape.is_static() and dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)
    )
    size, value = max(sizes, key=itemgetter(0), default=(0, None))
    if value is None or size < _SURELY_FREE or 2 * size <= (free := free_memory()):
        return
    node = value.producer()
    assert node is not None and value.shape is not None
    raise ModelError(
        f"{node.name or value.name} ({node.op_type})",
        f"its result {value.name!r} of shape {list(value.shape.numpy())} takes {size / 2**30:.1f} GiB, a simulation holds it "
        f"twice, and {free / 2**30:.1f} GiB of memory are free",
        "check the constants that determine this shape, or use a machine with more memory",
    )


def free_memory() -> int:
    """Bytes that this process may still allocate: free memory of the machine, limited by its control group."""
    free = [psutil.virtual_memory().available]
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(max(0, limit - used))
    return min(free)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None
