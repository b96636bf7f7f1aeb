"""Constants of a marked model: which values are the same in every run, and what they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from bitwright.export.qdq.markers import site_nodes

_IR_VERSION = 10
_NUMPY_FLOATS = (None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
RANDOM = frozenset(
    ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")
)


def find_constants(model: ir.Model, also: Iterable[ir.Value | None] = ()) -> dict[ir.Value, ir.TensorProtocol]:
    """Values that are the same in every run: initializers, Constant nodes, marked values made of them.

    Initializers that are graph inputs can be overridden and do not count. What is computed from constants
    alone (a weight under weight normalisation, say) is evaluated only where a marker reads it or where it is one of
    ``also``, all in one run of ONNX Runtime.
    """
    known = _stored(model)
    constant = set(known)
    for node in model.graph.all_nodes():
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
    return {**known, **_evaluate(model, wanted, known)} if wanted else known


def _stored(model: ir.Model) -> dict[ir.Value, ir.TensorProtocol]:
    """Initializers that cannot be overridden."""
    return {
        value: value.const_value
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None and not value.is_graph_input()
    }


def _held_by(node: ir.Node) -> ir.TensorProtocol | None:
    """What a Constant holds."""
    is_constant = node.op_type == "Constant" and not node.domain
    return ir.convenience.get_const_tensor(node.outputs[0]) if is_constant else None


def _is_pure(node: ir.Node) -> bool:
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    nested = any(attr.type in graphs for attr in node.attributes.values())
    return bool(node.inputs) and not node.domain and node.op_type not in RANDOM and not nested


def _evaluate(
    model: ir.Model, wanted: list[ir.Value], known: Mapping[ir.Value, ir.TensorProtocol]
) -> dict[ir.Value, ir.TensorProtocol]:
    """What pure operators on constants give, wherever in the model they stand: also in branches that never run."""
    import onnxruntime as ort

    part = ir.Model(_part(model, wanted, known), ir_version=_IR_VERSION)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(ir.to_proto(part).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {value: ir.Tensor(array) for value, array in zip(wanted, session.run(None, {}), strict=True)}


def _part(model: ir.Model, wanted: list[ir.Value], known: Mapping[ir.Value, ir.TensorProtocol]) -> ir.Graph:
    """A graph without inputs that computes ``wanted`` from copies of what leads to them, out of several graphs."""
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
    """``tensor``; one that lies in a file beside the model as a copy, which a session that is made of bytes asks for."""
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype) if isinstance(tensor, ir.ExternalTensor) else tensor


def _copied(node: ir.Node, made: dict[ir.Value, ir.Value]) -> ir.Node:
    """``node`` on the values that stand for its own; its outputs are added to ``made``."""
    inputs = [None if source is None else made[source] for source in node.inputs]
    copy = ir.Node("", node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name, new.type = f"v{len(made)}", old.type
        made[old] = new
    return copy
