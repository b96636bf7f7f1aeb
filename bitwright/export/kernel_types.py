"""Types without CPU kernels in ONNX Runtime: bfloat16 in most operators, float64 in some.

Such an operator gets its inputs as float32, and its results are rounded back to the type: as PyTorch's kernels of bfloat16 do on
CPUs, which accumulate in float32 too, and closer than float32 resolves where it is float64. Weights keep their type in the file.
Inputs and outputs in bfloat16, which numpy does not have, are float32.
"""

from __future__ import annotations

import onnx_ir as ir

from bitwright.core.graph.recurrence import CELLS
from bitwright.errors import ExportError
from bitwright.export.files.onnx_file import all_nodes
from bitwright.export.qdq.forms import Builder, after, before
from bitwright.export.qdq.markers import is_site, move_uses

_HALF, _FLOAT, _DOUBLE = ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE
#: operators that have kernels for every type, or only pass values on to their bodies
_MOVES = frozenset(
    ("Cast", "Concat", "Constant", "ConstantOfShape", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "If", "Loop",
     "Reshape", "Scan", "ScatterElements", "ScatterND", "Shape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
)  # fmt: skip
#: operators without a kernel of float64 in ONNX Runtime 1.31, of those whose definition has the type
_NO_DOUBLE = frozenset(
    ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "AveragePool", "Bernoulli", "Col2Im", "Conv", "ConvTranspose", "Cosh",
     "Elu", "Erf", "Gelu", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "GroupNormalization", "GRU", "HardSigmoid",
     "HardSwish", "Hardmax", "InstanceNormalization", "LRN", "LSTM", "LeakyRelu", "LpPool", "MaxUnpool", "Mean",
     "MeanVarianceNormalization", "Mish", "NonZero", "OneHot", "PRelu", "RNN", "Resize", "Selu", "Sinh", "Softplus", "Softsign",
     "Tan", "ThresholdedRelu")
)  # fmt: skip


def compute_in_float(model: ir.Model) -> None:
    """Let every operator of ``model`` without a kernel for its type compute in float32, in place.

    Markers mark the float32 values, as quantizers compute in float32.

    Raises:
        ExportError: a recurrent layer is in bfloat16, whose steps the simulation rounds to it one by one.
    """
    builder = Builder(model)
    found = [(node, kind) for node in all_nodes(model.graph) if (kind := _lacking(node)) is not None]
    for node, kind in found:
        # the rounding comes after the bias, as in PyTorch
        _widen(builder, node, kind, rounded=kind == _DOUBLE or not _is_biased(node))
    ends = [v for v in (*model.graph.inputs, *model.graph.outputs) if v.dtype == _HALF]
    for value in dict.fromkeys(ends):
        if value.is_graph_input():
            _widen_input(builder, value)
        else:
            _widen_output(builder, value)
    if found or ends:
        model.graph.sort()


def _lacking(node: ir.Node) -> ir.DataType | None:
    """The type that ``node`` computes in without a kernel for it.

    Raises: as :func:`compute_in_float`.
    """
    kinds = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None}
    if _HALF in kinds and node.op_type in CELLS:
        raise ExportError(
            str(node.name),
            f"the {node.op_type} is in bfloat16, for which ONNX Runtime has no kernels on CPUs, and in float32 its steps "
            "would give other results than the simulation's",
            "convert this layer, or the simulation, first: sim.model.float(); its encodings stay as they are",
        )
    if _HALF in kinds and node.op_type not in _MOVES:
        return _HALF
    return _DOUBLE if _DOUBLE in kinds and (node.op_type in _NO_DOUBLE or is_site(node)) else None


def _widen_output(builder: Builder, value: ir.Value) -> None:
    maker = value.producer()
    if maker is None:
        return
    wide = builder.emit(after(maker), "Cast", [value], f"{value.name}_float", _FLOAT, to=int(_FLOAT))
    name, value.name = value.name, builder.names.value(f"{value.name}_half")
    builder.outputs.replace(value, wide)
    wide.name = name


def _is_biased(node: ir.Node) -> bool:
    """Whether ``node`` is a product to which only a bias is added: one call of PyTorch, two operators in a file."""
    uses = tuple(node.outputs[0].uses())
    if node.op_type != "MatMul" or len(uses) != 1 or uses[0].node.op_type != "Add" or node.outputs[0].is_graph_output():
        return False
    bias = uses[0].node.inputs[1 - uses[0].idx]
    while bias is not None and (maker := bias.producer()) is not None and (maker.op_type == "Cast" or is_site(maker)):
        bias = maker.inputs[0]
    return bias is not None and bias.is_initializer() and bias.shape is not None and len(bias.shape) == 1


def _widen(builder: Builder, node: ir.Node, kind: ir.DataType, *, rounded: bool) -> None:
    """Cast inputs of ``node`` of type ``kind`` to float32, and its results back if they are ``rounded``."""
    for i, value in enumerate(node.inputs):
        if value is not None and value.dtype == kind:
            wide = builder.emit(before(node), "Cast", [value], f"{value.name}_float", _FLOAT, to=int(_FLOAT))
            node.replace_input_with(i, wide)
    for value in node.outputs:
        if value.dtype != kind:
            continue
        value.dtype = _FLOAT
        if not rounded:
            continue
        back = builder.emit(after(node), "Cast", [value], f"{value.name}_{kind.name.lower()}", kind, to=int(kind))
        made = back.producer()
        assert made is not None
        move_uses(value, back, keep={made})
        name, value.name = value.name, builder.names.value(f"{value.name}_wide")
        builder.outputs.replace(value, back)
        back.name = name


def _widen_input(builder: Builder, value: ir.Value) -> None:
    readers = [use.node for use in value.uses()]
    value.dtype = _FLOAT
    if not readers:
        return
    half = builder.emit(before(builder.graph[0]), "Cast", [value], f"{value.name}_half", _HALF, to=int(_HALF))
    made = half.producer()
    assert made is not None
    move_uses(value, half, keep={made})
