"""Convert models to an opset with all quantizers, and check that they still compute the same.

QuantizeLinear and DequantizeLinear know 4 and 16 bits and blocks from opset 21 on. Most operators of most models did
not change since, apart from the types they take: a model of these only gets the new number. Of reductions, Squeeze,
Unsqueeze and Split an attribute became an input, which is written here. For the others, the converter that comes with
``onnx`` is right nearly always; what it is known to get wrong is done here (Upsample and Resize of opset 10 become a Resize
with the half-pixel rule, which is another function), and every conversion is run against the original in ONNX Runtime,
because a converter that fails silently would be worse than none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ModelError, close_matches, first_few, with_article
from bitwright.export.files.onnx_file import all_graphs, all_nodes, from_proto
from bitwright.export.qdq.markers import Names
from bitwright.onnx.model.data import Feeds, InputSpec, as_feeds, input_specs, random_array
from bitwright.onnx.model.load import Loaded, load_model, stamp_opset
from bitwright.onnx.model.rewrites import TAKEN_IN, part_training_norms, rewrite_dropped, train_norms
from bitwright.onnx.model.session import first_line, open_session
from bitwright.onnx.model.view import OnnxView
from bitwright.runtimes.adapters import arrays_of
from bitwright.runtimes.onnxruntime import refusals

logger = logging.getLogger("bitwright")

Array = NDArray[Any]
OPSET = 21
_IR_VERSION = 10
_LEAST_SQNR = 90.0  # dB; different kernels of the same function agree to about 120
_SMALL = 1 << 10  # bytes: what the converter may want to look at (axes, scales, shapes)
_PARKED = "bitwright.parked"  # a domain the converter leaves alone


# Operator -> opset from which on its definition only gained types, optional inputs, and attributes whose default means
# what was meant before (up to opset 21).
_UNCHANGED_SINCE: dict[str, int] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "MatMul", "Flatten", "Transpose", "Identity", "Shape", "Size"), 1),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "Softplus", "Softsign", "Gather"), 1),
    **dict.fromkeys(("LRN", "SpaceToDepth", "ArgMax", "ArgMin", "If", "Loop"), 1),
    **dict.fromkeys(("Concat",), 4),
    **dict.fromkeys(("Reshape",), 5),
    **dict.fromkeys(("Relu", "LeakyRelu", "Sigmoid", "Tanh", "Elu", "Selu", "HardSigmoid", "Abs", "Neg"), 6),
    **dict.fromkeys(("Reciprocal", "Sqrt", "Exp", "Log", "Floor", "Ceil", "Tile", "InstanceNormalization"), 6),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Gemm", "And", "Or", "Not", "LSTM", "GRU", "RNN", "Sin", "Cos"), 7),
    **dict.fromkeys(("MaxPool", "Expand", "Max", "Min", "Sum"), 8),
    **dict.fromkeys(("Erf", "Where", "Cast", "Sign", "Greater", "Less", "ConstantOfShape", "PRelu"), 9),
    **dict.fromkeys(("Scan", "IsNaN", "NonZero"), 9),
    **dict.fromkeys(("Slice",), 10),
    **dict.fromkeys(
        ("Round", "Range", "CumSum", "Equal", "DepthToSpace", "GatherND", "GatherElements", "Clip", "Pad"), 11
    ),
    **dict.fromkeys(("Pow",), 12),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "Resize"), 13),
    **dict.fromkeys(("HardSwish", "Trilu"), 14),
    **TAKEN_IN,
    **dict.fromkeys(("BatchNormalization",), 15),
    **dict.fromkeys(("Einsum",), 12),
    **dict.fromkeys(("ScatterND", "ScatterElements", "GreaterOrEqual", "LessOrEqual"), 16),
    **dict.fromkeys(("LayerNormalization",), 17),
    **dict.fromkeys(("Mish",), 18),
}
# Operator -> the attribute that became its second input, from which opset on; nothing else of its meaning changed.
_REDUCTIONS = ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
_BECAME_INPUT: dict[str, tuple[str, int]] = {
    **{f"Reduce{kind}": ("axes", 18) for kind in _REDUCTIONS},
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), ("axes", 13)),
    "Split": ("split", 13),
}
_SPLIT_COUNTS = 18  # the opset from which on a Split without sizes says how many parts it makes
_OLDEST_FORM = 2  # the opset from which on these operators have the attribute


def modernize(loaded: Loaded, dummy_input: Any = None) -> Loaded:
    """``loaded`` at opset 21 or later.

    Args:
        loaded: from :func:`bitwright.onnx.model.load.load_model`; its model may be given the new number in place.
        dummy_input: what to compare the two on; random values serve where it is ``None``.

    Raises:
        ModelError: an operator cannot be converted, or the converted model computes something else.
    """
    if loaded.opset >= OPSET:
        return loaded
    if all(_is_unchanged(kind, loaded.opset) for kind in _standard_operators(loaded.model)):
        _write_attributes_as_inputs(loaded.model, loaded.opset)
        stamp_opset(loaded.model, OPSET)
        loaded.model.ir_version = max(loaded.model.ir_version or 0, _IR_VERSION)
        return replace(loaded, opset=OPSET)
    converted, remarks = _convert(loaded)
    note = _compare(loaded, converted, dummy_input)
    notes = (*loaded.notes, *remarks, f"converted from opset {loaded.opset} to {OPSET}{note}")
    return replace(converted, path=loaded.path, notes=notes, inputs=loaded.inputs)


def _is_unchanged(kind: str, opset: int) -> bool:
    """Whether an operator is the same at :data:`OPSET`, except that an attribute may have become an input."""
    return (_OLDEST_FORM if kind in _BECAME_INPUT else _UNCHANGED_SINCE.get(kind, OPSET)) <= opset


def _write_attributes_as_inputs(model: ir.Model, opset: int) -> None:
    """Write what :data:`_BECAME_INPUT` names as constants of ``model``, one for all nodes with the same numbers."""
    names: Names | None = None
    constants: dict[tuple[int, ...], ir.Value] = {}
    for node in _of_the_standard(model):
        key, since = _BECAME_INPUT.get(node.op_type, ("", 0))
        given = node.attributes.get(key) if opset < since else None
        if given is not None:
            numbers = tuple(given.as_ints())
            names = names or Names(model)
            if numbers not in constants:
                constants[numbers] = _vector(model, names.value(f"{node.name}_{key}"), numbers)
            _take_as_input(node, key, constants[numbers])
        if opset < _SPLIT_COUNTS:
            _count_parts(node)


def _take_as_input(node: ir.Node, key: str, numbers: ir.Value) -> None:
    """Turn the attribute ``key`` of ``node`` into its second input; missing axes mean all axes in both forms."""
    del node.attributes[key]
    if numbers.shape is not None and numbers.shape[0]:
        node.resize_inputs(2)
        node.replace_input_with(1, numbers)


def _count_parts(node: ir.Node) -> None:
    """Set the number of equal parts of a Split without sizes."""
    if node.op_type == "Split" and (len(node.inputs) < 2 or node.inputs[1] is None):
        node.attributes.add(ir.AttrInt64("num_outputs", len(node.outputs)))


def _of_the_standard(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in all_nodes(model.graph) if node.domain in ("", "ai.onnx"))


def _vector(model: ir.Model, name: str, numbers: Sequence[int]) -> ir.Value:
    """A constant of ``model`` that holds a vector of int64."""
    tensor = ir.Tensor(np.asarray(numbers, np.int64), name=name)
    constant = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(constant)
    return constant


def _standard_operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in _of_the_standard(model)}


def _convert(loaded: Loaded) -> tuple[Loaded, list[str]]:
    """The converted model, and notes on its operators."""
    site = str(loaded.path or loaded.model.graph.name or "model")
    skeleton = loaded.model.clone()
    rewritten = rewrite_dropped(skeleton, loaded.opset)
    trained = part_training_norms(skeleton, loaded.opset, site)
    _refuse_unknown(skeleton, loaded.opset, site)
    skeleton.ir_version = (
        _IR_VERSION  # before 4 every initializer had to be an input too, which the converter insists on
    )
    kept = _park_tensors(skeleton)
    parked = _park_nodes(skeleton, loaded.opset)
    _spread_groups(skeleton, site)
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(skeleton), OPSET)
    except (RuntimeError, onnx.version_converter.ConvertError) as error:
        raise ModelError(
            site,
            f"it cannot be converted from opset {loaded.opset} to {OPSET}: {first_line(error)}",
            "export the model again with opset 21, or replace the operator that the message names",
        ) from error
    model = from_proto(proto)
    for name, tensor in kept.items():
        value = model.graph.initializers.get(name)
        if value is not None:
            value.const_value = tensor
    _unpark_nodes(model, parked)
    train_norms(model, trained)
    model.ir_version = _IR_VERSION
    model.opset_imports.pop(_PARKED, None)
    for key, version in loaded.model.opset_imports.items():
        model.opset_imports.setdefault(key, version)
    notes = []
    if rewritten:
        notes.append(f"operators that the standard no longer has were rewritten: {', '.join(rewritten)}")
    if trained:
        notes.append(
            f"batch norms in training mode, which normalise with the statistics of the batch: {first_few(trained)}; "
            "export the model in evaluation mode if that is not meant"
        )
    return load_model(model), notes


def _refuse_unknown(model: ir.Model, opset: int, site: str) -> None:
    """Refuse operators outside the standard, on which the converter fails without a useful message."""
    for node in all_nodes(model.graph):
        known_here = onnx.defs.has(node.op_type, max(opset, TAKEN_IN.get(node.op_type, 0)))
        if node.domain in ("", "ai.onnx") and not known_here:
            known = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
            raise ModelError(
                site,
                f"node {node.name!r} is {with_article(node.op_type)}, and opset {opset} has no such operator"
                f"{close_matches(node.op_type, known)}",
                "correct the operator's type or its domain",
            )


def _spread_groups(model: ir.Model, site: str) -> None:
    """GroupNormalization takes scale and bias per channel from opset 21 on, per group before; the converter forgets it."""
    names: Names | None = None
    for node in all_nodes(model.graph):
        if node.op_type != "GroupNormalization" or node.domain not in ("", "ai.onnx"):
            continue
        shape = None if node.inputs[0] is None else node.inputs[0].shape
        groups = node.attributes.get_int("num_groups", 1)
        if shape is None or len(shape) < 2 or not isinstance(shape[1], int):
            raise ModelError(
                site,
                f"the GroupNormalization {node.name!r} cannot be converted to opset {OPSET}: how many channels it has is "
                "not known",
                "export the model again with opset 21",
            )
        names = names or Names(model)
        for port in (1, 2):
            _repeat(model, node, port, int(shape[1]) // groups, names)


def _repeat(model: ir.Model, node: ir.Node, port: int, times: int, names: Names) -> None:
    """Let ``node`` read each element of the vector at ``port`` ``times`` times in a row."""
    value = node.inputs[port]
    assert value is not None and node.graph is not None
    labelled = (("column", [-1, 1]), ("repeats", [1, times]), ("vector", [-1]))
    constants = [_vector(model, names.value(f"{value.name}_{label}"), numbers) for label, numbers in labelled]
    for op, constant in zip(("Reshape", "Tile", "Reshape"), constants, strict=True):
        step = ir.Node("", op, [value, constant], name=names.node(f"{node.name}/{op}"))
        step.outputs[0].name = names.value(f"{node.name}_{op.lower()}")
        node.graph.insert_before(node, step)
        value = step.outputs[0]
    node.replace_input_with(port, value)


def _park_tensors(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Move large tensors out of the model while it is converted, so that any size converts in memory."""
    kept: dict[str, ir.TensorProtocol] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or value.name is None:
            continue
        if tensor.nbytes <= _SMALL:  # the converter may have to know it, and a proto names no folder of its data
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
            continue
        kept[value.name] = tensor
        value.const_value = ir.ExternalTensor(
            "parked", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=value.name
        )
    return kept


def _park_nodes(model: ir.Model, opset: int) -> dict[str, list[float] | None]:
    """Hide Upsample, the Resize of opset 10 and unknown operators in a separate domain; returns node -> scales."""
    found: dict[str, list[float] | None] = {}
    if opset > 10:
        return found
    for node in all_nodes(model.graph):
        if node.domain in ("", "ai.onnx") and node.op_type in ("Upsample", "Resize", *TAKEN_IN):
            scales = node.attributes.get("scales")
            found[str(node.name)] = None if scales is None else list(scales.as_floats())
            node.domain = _PARKED
    for graph in all_graphs(model.graph):
        if found:
            graph.opset_imports[_PARKED] = 1
    return found


def _unpark_nodes(model: ir.Model, parked: dict[str, list[float] | None]) -> None:
    """Write hidden nodes as the equivalent Resize: pixel ``i`` lies at ``i / scale``."""
    for node in all_nodes(model.graph):
        if node.domain != _PARKED:
            continue
        if node.op_type in TAKEN_IN:
            node.domain = ""
            continue
        scales = parked[str(node.name)]
        given = node.inputs[1] if scales is None else None
        mode = node.attributes.get_string("mode", "nearest")
        if scales is not None:
            name = f"{node.outputs[0].name}_scales"
            tensor = ir.Tensor(np.asarray(scales, np.float32), name=name)
            given = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            model.graph.register_initializer(given)
        # the Resize of opset 10 rounds up where it shrinks
        rounding = "ceil" if node.op_type == "Resize" and _shrinks(given) else "floor"
        node.domain, node.op_type = "", "Resize"
        node.attributes.clear()
        for key, text in (("mode", mode), ("coordinate_transformation_mode", "asymmetric"), ("nearest_mode", rounding)):
            node.attributes.add(ir.AttrString(key, text))
        node.resize_inputs(3)
        node.replace_input_with(1, None)
        node.replace_input_with(2, given)


def _shrinks(scales: ir.Value | None) -> bool:
    tensor = None if scales is None else scales.const_value
    return tensor is not None and bool((tensor.numpy() < 1).any())


def _compare(old: Loaded, new: Loaded, dummy_input: Any) -> str:
    """Refuse a conversion that changed the function; returns a note where that could not be checked."""
    site = str(old.path or old.model.graph.name or "model")
    specs = input_specs(old.model)
    feeds = _feeds(specs, dummy_input)
    failures: tuple[type[Exception], ...] = (ModelError, *refusals())
    if feeds is None:
        return ", unchecked: no random input can be made for it"
    try:
        expected = open_session(old.model).run(None, feeds)
    except failures as error:
        if dummy_input is not None:
            raise ModelError(
                site, f"ONNX Runtime cannot run it on dummy_input: {first_line(error)}", "check model and input"
            ) from error
        return ", unchecked: it does not run on random input"
    try:
        found = open_session(new.model).run(None, feeds)
    except failures as error:
        raise ModelError(
            site,
            f"conversion from opset {old.opset} to {OPSET} makes a model that ONNX Runtime refuses: {first_line(error)}; "
            f"one of its operators ({', '.join(_converted_kinds(old))}) is converted wrongly",
            "export the model again with opset 21",
        ) from error
    for name, one, other in zip((v.name for v in old.model.graph.outputs), expected, found, strict=True):
        if not _equal(one, other):
            raise ModelError(
                site,
                f"conversion from opset {old.opset} to {OPSET} changes its output {name!r}: {_culprit(old, new, feeds)} "
                "is converted wrongly",
                "export the model again with opset 21",
            )
    return ""


def _converted_kinds(old: Loaded) -> list[str]:
    """Types of the operators that are not the same at both opsets."""
    return sorted(k for k in _standard_operators(old.model) if not _is_unchanged(k, old.opset))


def _culprit(old: Loaded, new: Loaded, feeds: Feeds) -> str:
    """The first operator whose result differs; the converted ones where that is unknown."""
    there = {str(value.name) for node in new.model.graph for value in node.outputs if value.name}
    made = {
        str(value.name): node
        for node in old.model.graph
        for value in node.outputs
        if value.name in there and value.uses()
    }
    failures: tuple[type[Exception], ...] = (ModelError, *refusals())
    try:
        ((before,), (after,)) = (OnnxView(loaded).capture(list(made), [feeds]) for loaded in (old, new))
    except failures:
        before = after = {}
    for name, node in made.items():
        if name in before and not _equal(before[name][0], after[name][0]):
            return f"{node.op_type} ({node.name})"
    return f"one of {', '.join(_converted_kinds(old))}"


def _equal(one: Any, other: Any) -> bool:
    mine, others = arrays_of(one), arrays_of(other)
    return len(mine) == len(others) and all(map(_equal_arrays, mine, others))


def _equal_arrays(one: Array, other: Array) -> bool:
    if one.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    if one.shape != other.shape or not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return False
    finite = np.isfinite(one)
    return bool(np.array_equal(one[finite], other[finite]) or sqnr(one[finite], other[finite]) > _LEAST_SQNR)


def _feeds(specs: tuple[InputSpec, ...], dummy_input: Any) -> Feeds | None:
    if dummy_input is not None:
        return as_feeds(dummy_input, specs, "dummy_input")
    if any(spec.dtype is None or spec.shape is None for spec in specs):
        return None
    rng = np.random.default_rng(0)
    return {spec.name: random_array(spec, rng) for spec in specs}
