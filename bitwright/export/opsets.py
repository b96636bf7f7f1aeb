"""Convert files to another opset and IR version, for compilers that read older ones.

A model is brought down operator by operator. An operator keeps its form where the older opset knows its attributes, types and
number of inputs, and means the same by them; attributes that the older opset lacks go where they say what it does anyway.
Inputs that were attributes once become attributes again where they are constants. Everything else is refused, with the
operator and what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import ConfigError, ExportError
from bitwright.export.files.onnx_file import all_graphs, all_nodes
from bitwright.export.qdq.markers import remove_unread

Array = NDArray[Any]
_STANDARD = ("", "ai.onnx")
LOWEST, NEWEST = 7, 25  # what is asked for; ONNX Runtime knows no others
_NEWEST_IR = 13
#: operator -> the opset before which the same form has another meaning
_MEANING = {
    "Softmax": 13, "LogSoftmax": 13, "Hardmax": 13, "Resize": 11, "GroupNormalization": 21, "Scan": 9, "Upsample": 10,
    "RoiAlign": 16,
}  # fmt: skip
_REDUCTIONS = (
    "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceSumSquare",
)  # fmt: skip
#: operator -> (first opset with inputs in place of attributes, attribute -> port)
_ATTRIBUTES: dict[str, tuple[int, dict[str, int]]] = {
    **dict.fromkeys(_REDUCTIONS, (18, {"axes": 1})),
    "ReduceSum": (13, {"axes": 1}),
    "Squeeze": (13, {"axes": 1}),
    "Unsqueeze": (13, {"axes": 1}),
    "Split": (13, {"split": 1}),
    "Clip": (11, {"min": 1, "max": 2}),
    "Pad": (11, {"pads": 1, "value": 2}),
    "Slice": (10, {"starts": 1, "ends": 2, "axes": 3}),
    "TopK": (10, {"k": 1}),
    "Dropout": (12, {"ratio": 1}),
}
_NUMBERS = frozenset(("min", "max", "value", "ratio"))  # attributes that are single floats


def check_versions(opset: int | None, ir_version: int | None) -> None:
    """Refuse unsupported versions.

    Raises:
        ConfigError: with what can be asked for.
    """
    ranges = (("opset", opset, LOWEST, NEWEST), ("ir_version", ir_version, 4, _NEWEST_IR))
    for name, number, least, most in ranges:
        if number is not None and (
            isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most
        ):
            raise ConfigError(name, f"{number!r} is not a version that can be written", f"use {least} to {most}")


def has_sixteen_bits(opset: int | None) -> bool:
    """Whether QuantizeLinear has 16-bit grids at an opset; ``None``, the default, has."""
    return opset is None or opset >= 21


def may_be_newer(opset: int | None, ir_version: int | None) -> bool:
    """Whether a file with the versions asked for may have opset 22."""
    return opset is None and (ir_version is None or ir_version >= 10)


def bring_to(model: ir.Model, opset: int | None, ir_version: int | None) -> None:
    """Convert ``model`` to the requested versions, in place; ``None`` keeps a version, or raises it as the other needs.

    With neither nothing changes.

    Raises:
        ExportError: an operator cannot be written at that opset, or the opset or a type not at that IR version; names what.
    """
    if opset is None and ir_version is None:
        return
    if opset is not None and opset != model.opset_imports.get("", 0):
        _write_at(model, opset)
    needed, why = _needed_ir(model)
    if ir_version is not None and ir_version < needed:
        raise ExportError("ir_version", f"{ir_version} has no place for {why}", f"ask for {needed} or newer")
    model.ir_version = max(model.ir_version or 0, needed) if ir_version is None else ir_version


def _write_at(model: ir.Model, opset: int) -> None:
    """Convert every operator to ``opset``, and set that version and its IR version."""
    now = model.opset_imports.get("", 0)
    for node in [node for node in all_nodes(model.graph) if node.domain in _STANDARD]:
        _bring(model, node, now, opset)
    for imports in (model.opset_imports, *(graph.opset_imports for graph in all_graphs(model.graph))):
        imports.update({"": opset} if "" in imports else {})
    model.ir_version = _ir_of(opset)[0]


_IR_OF_TYPES = {
    **dict.fromkeys((ir.DataType.INT4, ir.DataType.UINT4), 10),
    **dict.fromkeys((ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2), 9),
}


def _needed_ir(model: ir.Model) -> tuple[int, str]:
    """The lowest IR version that can express ``model``, and the feature that needs it."""
    needed, why = _ir_of(model.opset_imports.get("", 0))
    for value in model.graph.initializers.values():
        least = 0 if value.dtype is None else _IR_OF_TYPES.get(value.dtype, 0)
        if value.dtype is not None and least > needed:
            needed, why = least, f"the type {value.dtype.name.lower()} of {value.name}"
    return needed, why


def _ir_of(opset: int) -> tuple[int, str]:
    """The IR version that came with an opset."""
    return int(onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])), f"opset {opset}"


def _bring(model: ir.Model, node: ir.Node, now: int, opset: int) -> None:
    """Convert one operator to ``opset``.

    Raises:
        ExportError: that has no such operator, or no such form of it.
    """

    def refused(why: str) -> ExportError:
        site = f"{node.name} ({node.op_type})"
        return ExportError(site, f"it cannot be written at opset {opset}: {why}", _remedy(node, now, opset))

    since, write, applies = _DECOMPOSED.get(node.op_type, (0, None, None))
    if write is not None and applies is not None and opset < since <= now and applies(node):
        write(model, node)
        return
    if not onnx.defs.has(node.op_type, opset):
        since = min(s.since_version for s in onnx.defs.get_all_schemas_with_history() if _is_of(s, node))
        raise refused(f"the operator came with opset {since}")
    old, new = (onnx.defs.get_schema(node.op_type, version) for version in (now, opset))
    if old.since_version == new.since_version:
        return
    meaning = _MEANING.get(node.op_type, 0)
    if min(now, opset) < meaning <= max(now, opset) and not _means_the_same(node):
        raise refused(f"it has another meaning before opset {meaning}")
    if opset < now:
        _rename_modes(model, node, opset)
        _inputs_to_attributes(node, opset, refused)
        _drop_attributes(node, old, new, refused)
    if not new.min_input <= len(node.inputs) <= new.max_input or len(node.outputs) > new.max_output:
        raise refused(f"it has {len(node.inputs)} inputs and {len(node.outputs)} outputs, and there it takes others")
    wrong = _unknown_type(node, new)
    if wrong:
        raise refused(f"there it does not take {wrong}")


def _is_of(schema: Any, node: ir.Node) -> bool:
    return bool(schema.name == node.op_type and not schema.domain)


def _remedy(node: ir.Node, now: int, opset: int) -> str:
    if opset > now:
        return f"leave opset out: the model is written at {now}"
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return (
            "ask for a newer opset: 13 knows several scales, 19 float8, 21 integers of 4 and 16 bits and blocks; or quantize "
            "this tensor per tensor and to 8 bits"
        )
    return "ask for a newer opset, or leave opset out"


def _means_the_same(node: ir.Node) -> bool:
    """Whether an operator whose meaning changed is one of those for which it did not matter."""
    shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
    if node.op_type in ("Softmax", "LogSoftmax", "Hardmax") and shape is not None:
        axis = node.attributes.get_int("axis", -1) or 0
        if axis in (-1, len(shape) - 1):
            node.attributes.add(ir.AttrInt64("axis", len(shape) - 1))
            return True
    return False


def _rename_modes(model: ir.Model, node: ir.Node, opset: int) -> None:
    """Rename modes that older opsets spell differently, and add attributes that they require."""
    if node.op_type == "GridSample" and opset < 20:
        mode = node.attributes.get_string("mode", "linear") or "linear"
        node.attributes.add(ir.AttrString("mode", {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)))
    if node.op_type == "Resize" and opset < 13:
        for port in (1, 2):
            if node.inputs[port] is None:
                node.replace_input_with(port, _constant(model, node, f"empty_{port}", np.zeros(0, np.float32)))


def _inputs_to_attributes(node: ir.Node, opset: int, refused: Callable[[str], ExportError]) -> None:
    since, ports = _ATTRIBUTES.get(node.op_type, (0, {}))
    if opset >= since:
        return
    for name, port in ports.items():
        value = node.inputs[port] if port < len(node.inputs) else None
        if value is None:
            continue
        if value.const_value is None:
            raise refused(f"there its {name} are an attribute, and they are computed")
        node.attributes.add(_as_attribute(name, value.const_value.numpy().reshape(-1)))
    if _has_steps(node):
        raise refused("there it has no steps")
    given = list(node.inputs[1:])
    node.resize_inputs(1)
    for value in given:
        if value is not None and value.is_initializer():
            remove_unread(value)


def _has_steps(node: ir.Node) -> bool:
    """Whether a Slice takes each n-th element, or may do so."""
    steps = node.inputs[4] if len(node.inputs) > 4 else None
    return steps is not None and (steps.const_value is None or bool((steps.const_value.numpy() != 1).any()))


def _as_attribute(name: str, numbers: Array) -> ir.Attr:
    if name in _NUMBERS:
        return ir.AttrFloat32(name, float(numbers[0]))
    return ir.AttrInt64(name, int(numbers[0])) if name == "k" else ir.AttrInt64s(name, [int(n) for n in numbers])


def _drop_attributes(node: ir.Node, old: Any, new: Any, refused: Callable[[str], ExportError]) -> None:
    """Remove attributes that ``new`` lacks and that state its behaviour."""
    for name in [name for name in node.attributes if name not in new.attributes]:
        attribute = node.attributes[name]
        default = old.attributes[name].default_value if name in old.attributes else None
        known = default is not None and default.type and onnx.helper.get_attribute_value(default)
        plain = isinstance(known, (int, float, bytes)) and attribute.value == (
            known.decode() if isinstance(known, bytes) else known
        )
        if not plain and not _says_nothing(node, name):
            raise refused(f"there it has no attribute {name}")
        del node.attributes[name]


def _says_nothing(node: ir.Node, name: str) -> bool:
    """Whether an attribute is without effect on this operator."""
    if name == "axis" and node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        scale = node.inputs[1]
        return scale is not None and scale.shape is not None and not len(scale.shape)
    if name == "num_outputs":
        return _splits_evenly(node)
    if name == "allowzero":  # it tells what a length of 0 means
        shape = node.inputs[1].const_value if node.inputs[1] is not None else None
        return shape is not None and 0 not in shape.numpy()
    if name == "dilations":
        return all(n == 1 for n in node.attributes[name].as_ints())
    return False


def _splits_evenly(node: ir.Node) -> bool:
    """Whether a Split makes equal parts, as it does without a number of them."""
    axis, value = node.attributes.get_int("axis", 0) or 0, node.inputs[0]
    length = value.shape[axis] if value is not None and value.shape is not None else None
    return isinstance(length, int) and length % len(node.outputs) == 0


def _unknown_type(node: ir.Node, schema: Any) -> str:
    """A type of an operator's values that ``schema`` lacks; empty if there is none, or types are unknown."""
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for i, value in enumerate(values):
            if value is None or value.dtype is None or not formal:
                continue
            kind = f"tensor({_WORDS.get(value.dtype, value.dtype.name.lower())})"
            types = formal[min(i, len(formal) - 1)].types
            if types and not any(t.startswith(("seq", "optional")) for t in types) and kind not in types:
                return kind
    return ""


_WORDS = {ir.DataType.DOUBLE: "double", ir.DataType.BOOL: "bool", ir.DataType.STRING: "string"}


# -- operators written in older ones


def _constant(model: ir.Model, node: ir.Node, label: str, number: float | Array) -> ir.Value:
    kind = node.outputs[0].dtype or ir.DataType.FLOAT
    name = f"{node.outputs[0].name}_{label}"
    tensor = ir.Tensor(np.asarray(number, kind.numpy()), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(kind), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _before(node: ir.Node, op: str, *inputs: ir.Value | None, **numbers: float) -> ir.Value:
    attributes = [ir.AttrFloat32(key, number) for key, number in numbers.items()]
    label = f"{node.outputs[0].name}_{op.lower()}"
    made = ir.Node("", op, inputs, attributes, name=label)
    made.outputs[0].name, made.outputs[0].type = label, node.outputs[0].type
    made.outputs[0].shape = node.outputs[0].shape
    assert node.graph is not None
    node.graph.insert_before(node, made)
    return made.outputs[0]


def _become(node: ir.Node, op: str, *inputs: ir.Value | None) -> None:
    node.op_type = op
    node.attributes.clear()
    node.resize_inputs(len(inputs))
    for i, value in enumerate(inputs):
        node.replace_input_with(i, value)


def _hard_swish(_: ir.Model, node: ir.Node) -> None:
    x = node.inputs[0]
    _become(node, "Mul", x, _before(node, "HardSigmoid", x, alpha=1 / 6, beta=0.5))


def _gelu(model: ir.Model, node: ir.Node) -> None:
    """``x * (1 + erf(x / sqrt(2))) / 2``, as exporters wrote it, and runtimes know it."""
    x = node.inputs[0]
    turned = _before(node, "Erf", _before(node, "Div", x, _constant(model, node, "root", 2**0.5)))
    shifted = _before(node, "Add", turned, _constant(model, node, "one", 1.0))
    _become(node, "Mul", _before(node, "Mul", x, shifted), _constant(model, node, "half", 0.5))


def _is_exact(node: ir.Node) -> bool:
    return node.attributes.get_string("approximate", "none") == "none"


#: operator -> (the opset that brought it, what writes it in older ones, of which nodes)
_DECOMPOSED: Mapping[str, tuple[int, Callable[[ir.Model, ir.Node], None], Callable[[ir.Node], bool]]] = {
    "HardSwish": (14, _hard_swish, lambda _: True),
    "Gelu": (20, _gelu, _is_exact),
}
