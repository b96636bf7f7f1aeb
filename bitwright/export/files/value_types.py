"""Types of values that ``onnx_ir`` cannot hold: maps, and sequences of maps, as classifiers return them.

A model is read without these types, which ONNX Runtime infers by itself, and a file is written with them: meanwhile each
stands in the metadata of its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

_KEY = "bitwright.type"  # in the metadata of a value: the type, serialised, in hexadecimal digits


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


def load(path: Path) -> ir.Model:
    """The model in a file, as ``onnx_ir.load`` reads it: the elements of external tensors stay where they are.

    Types that the file does not state are those that quantizers imply.
    """
    model = from_proto(onnx.load(str(path), load_external_data=False))
    for graph in (model.graph, *model.graphs()):
        ir.external_data.set_base_dir(graph, path.parent)
    _imply_types(model)
    return model


def _imply_types(model: ir.Model) -> None:
    """Codes have the type of their zero point; dequantized values are float32."""
    for node in model.graph.all_nodes():
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
    """Give the values of a message their types again; whether there were such."""
    found = False
    for value in _values(proto):
        for at in reversed(range(len(value.metadata_props))):
            if value.metadata_props[at].key == _KEY:
                value.type.ParseFromString(bytes.fromhex(value.metadata_props[at].value))
                del value.metadata_props[at]
                found = True
    return found


def restore_types_of_file(path: Path) -> None:
    """Give the values of the model in a file their types again; external tensors are not touched."""
    proto = onnx.load(str(path), load_external_data=False)
    if restore_types(proto):
        onnx.save(proto, str(path))


def has_map(value: ir.Value) -> bool:
    """Whether the type of ``value`` is one that holds maps."""
    return _KEY in value.metadata_props


def is_tensor(value: ir.Value) -> bool:
    """Whether ``value`` is not a sequence, map or optional value, as far as types are known."""
    return (value.type is None or isinstance(value.type, ir.TensorType)) and not has_map(value)


def note_type(value: ir.Value, kind: onnx.TypeProto) -> None:
    """Give ``value`` the type that shape inference found, where it has none."""
    if holds_map(kind):
        value.metadata_props.setdefault(_KEY, kind.SerializeToString().hex())
    elif value.type is None:
        value.type = ir.serde.deserialize_type_proto_for_type(kind)


def holds_map(kind: onnx.TypeProto) -> bool:
    """Whether values of this type are, or are sequences of, maps: types that ``onnx_ir`` does not have."""
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
            for attribute in node.attribute:
                for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                    yield from (*body.input, *body.output, *body.value_info)
                    nodes.append(body.node)
