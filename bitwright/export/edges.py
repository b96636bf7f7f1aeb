"""Types of the inputs and outputs of a file: half precision, or the codes of their quantizers.

A file whose input is of integers takes what its first quantizer would make: ``code = round(value / scale) + zero_point``. With a
normalisation it takes pixels instead, 0 to 255, and does itself what programs do in front of a model:
``(pixel * scale - mean) / std``, channels first. Scale, zero point and normalisation stand in the metadata of the file, under the
key ``bitwright.io``, as JSON; :func:`as_file_inputs` and :func:`as_values` convert with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import ConfigError, ExportError, close_matches
from bitwright.export.qdq.forms import METADATA, Builder, after, note_metadata, read_metadata
from bitwright.export.qdq.markers import bypass, copy_model, remove_unread
from bitwright.export.qdq.stored import HALVES
from bitwright.runtimes.onnxruntime import IO_KEY, as_file_inputs, as_values, quantized

Array = NDArray[Any]
D = ir.DataType
_TYPES = {"uint8": D.UINT8, "int8": D.INT8, "uint16": D.UINT16, "int16": D.INT16}
INTEGERS = tuple(_TYPES)
_KNOWN = ("float32", *HALVES, *INTEGERS)
_LAYOUTS = ("NCHW", "NHWC")
_IMAGE = 4  # axes of a batch of pictures


@dataclass(frozen=True)
class Normalization:
    """Preprocessing of pixels before the model: ``(pixel * scale - mean) / std``.

    Attributes:
        mean, std: one number, or one per channel; of pixels that are scaled, as torchvision has them.
        scale: of pixels, 1 / 255 by default.
        layout: of the pixels that the file takes: ``"NCHW"``, or ``"NHWC"`` as cameras give them.
        input: the input that takes pictures; by default the only one.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1 / 255
    layout: str = "NCHW"
    input: str = ""

    @staticmethod
    def of(given: Mapping[str, Any]) -> Normalization:
        """Build it from a dict with the keys ``mean``, ``std``, ``scale``, ``layout``, ``input``.

        Raises:
            ConfigError: another key, a ``std`` of zero, or numbers that cannot be used.
        """
        known = ("mean", "std", "scale", "layout", "input")
        if not isinstance(given, Mapping):
            problem = f"{given!r} is not a dict"
            raise ConfigError("normalize", problem, "write {'mean': [...], 'std': [...], 'layout': 'NHWC'}")
        for key in given:
            if key not in known:
                problem = f"{key!r} is not a key of it{close_matches(str(key), known)}"
                raise ConfigError("normalize", problem, f"use {', '.join(known)}")
        try:
            mean, std = (
                tuple(np.atleast_1d(np.asarray(given.get(k, d), float)).tolist()) for k, d in (("mean", 0), ("std", 1))
            )
        except (TypeError, ValueError) as error:
            problem = f"{given.get('mean')!r} and {given.get('std')!r} are not numbers"
            raise ConfigError("normalize", problem, "give one number, or one per channel") from error
        if not all(np.isfinite((*mean, *std))) or min(std, default=0.0) <= 0 or not mean:
            raise ConfigError("normalize", f"mean {list(mean)}, std {list(std)}", "give finite numbers, std above 0")
        scale = given.get("scale", 1 / 255)
        if not isinstance(scale, (int, float)) or not 0 < scale < np.inf:
            raise ConfigError("normalize", f"scale {scale!r}", "give a number above 0, 1 / 255 by default")
        if len(mean) != len(std) and 1 not in (len(mean), len(std)):
            problem = f"{len(mean)} means and {len(std)} standard deviations"
            raise ConfigError("normalize", problem, "give one number of each, or one per channel")
        layout = str(given.get("layout", "NCHW"))
        if layout not in _LAYOUTS:
            problem = f"{layout!r} is not a layout{close_matches(layout, _LAYOUTS)}"
            raise ConfigError("normalize.layout", problem, f"use {' or '.join(_LAYOUTS)}")
        return Normalization(mean, std, float(scale), layout, str(given.get("input", "")))


@dataclass(frozen=True)
class Edges:
    """Requested types and normalisation of a file's inputs and outputs.

    Attributes:
        inputs, outputs: type of all of them.
        named: type of those with other ones, by name.
        normalize: of pixels.
    """

    inputs: str = "float32"
    outputs: str = "float32"
    named: Mapping[str, str] = field(default_factory=dict)
    normalize: Normalization | None = None

    def of_input(self, name: str) -> str:
        """The type that was requested for an input."""
        return self.named.get(name, self.inputs)

    def of_output(self, name: str) -> str:
        """The type that was requested for an output."""
        return self.named.get(name, self.outputs)

    @property
    def changes(self) -> bool:
        """Whether any change was requested."""
        return {self.inputs, self.outputs, *self.named.values()} != {"float32"} or self.normalize is not None

    @property
    def integers(self) -> bool:
        """Whether integers were requested for an input or output."""
        return bool({self.inputs, self.outputs, *self.named.values()} & set(INTEGERS)) or self.normalize is not None


def edges_of(io: str | Mapping[str, str] | None, normalize: Mapping[str, Any] | None = None) -> Edges:
    """Parse ``io`` and ``normalize`` of an export.

    Args:
        io: a type for inputs and outputs, or a dict from ``"inputs"``, ``"outputs"`` or names of them to types.
        normalize: see :class:`Normalization`; the input is of uint8 then, if ``io`` says nothing else.

    Raises:
        ConfigError: there is no such type, or see :meth:`Normalization.of`.

    Example:
        >>> edges_of("uint8").outputs, edges_of({"inputs": "uint8"}).outputs
        ('uint8', 'float32')
    """
    given = {"inputs": io, "outputs": io} if isinstance(io, str) else dict(io or {})
    for name, kind in given.items():
        if kind not in _KNOWN:
            problem = f"{kind!r} is not a type of inputs and outputs{close_matches(str(kind), _KNOWN)}"
            raise ConfigError(f"io: {name}", problem, f"use one of {', '.join(_KNOWN)}")
    norm = None if normalize is None else Normalization.of(normalize)
    inputs = given.pop("inputs", "uint8" if norm is not None and not norm.input else "float32")
    if norm is not None:
        kind = given.setdefault(norm.input, "uint8") if norm.input else inputs
        if kind != "uint8":
            raise ConfigError(
                "normalize", f"pixels are of uint8, and the input is asked to be of {kind}", 'use io="uint8"'
            )
    return Edges(inputs, given.pop("outputs", "float32"), given, norm)


def representable(edges: Edges, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Inputs that a file with ``edges`` can take, as float32: rounded to half precision, or to integer pixels."""
    found = dict(arrays)
    norm = edges.normalize
    for name, array in arrays.items():
        kind = edges.of_input(name)
        if array.dtype.kind != "f":
            continue
        if norm is not None and array.ndim == _IMAGE and norm.input in ("", name):
            mean, std = (np.asarray(x, np.float32).reshape(1, -1, 1, 1) for x in (norm.mean, norm.std))
            if max(mean.size, std.size) in (1, array.shape[1]):
                fact = {"mean": norm.mean, "std": norm.std, "pixel": norm.scale, "layout": "NCHW"}
                step, shift = (norm.scale / std).astype(np.float32), (mean / std).astype(np.float32)
                found[name] = quantized(array, fact).astype(np.float32) * step - shift
        elif kind in HALVES:
            found[name] = array.astype(HALVES[kind].numpy()).astype(np.float32)
    return found


def write_edges(model: ir.Model, edges: Edges, *, either_sign: bool = False) -> list[str]:
    """Give float32 inputs and outputs of ``model`` integer types, in place; returns notes.

    Args:
        model: as ``to_qdq`` wrote it.
        edges: what is asked for.
        either_sign: codes become inputs and outputs as the model has them, signed or not, whichever was asked for: the model
            stands beside a file that has the other sign.

    Raises:
        ExportError: a name is not that of an input or output, no quantizer stands there, its codes have another type, or the
            normalisation does not fit the input.
    """
    if not edges.integers:
        return []
    graph = model.graph
    builder = Builder(model)
    inputs = {str(v.name): v for v in graph.inputs if not v.is_initializer()}
    outputs = {str(v.name): v for v in graph.outputs}
    _check_names(edges, (*inputs, *outputs))
    facts: dict[str, dict[str, Any]] = {"inputs": {}, "outputs": {}}
    pictures = _picture(edges.normalize, inputs) if edges.normalize is not None else ""
    for name, value in _of_integers(inputs, edges.inputs, edges):
        if name == pictures and edges.normalize is not None:
            facts["inputs"][name] = _take_pixels(builder, model, value, edges.normalize)
        else:
            facts["inputs"][name] = _take_codes(builder, value, edges.of_input(name), either_sign)
    for name, value in _of_integers(outputs, edges.outputs, edges):
        facts["outputs"][name] = _give_codes(builder, model, value, edges.of_output(name), either_sign)
    model.metadata_props[IO_KEY] = json.dumps(facts, sort_keys=True)
    return [f"{name}: {told(fact)}" for several in facts.values() for name, fact in several.items()]


def _check_names(edges: Edges, known: Sequence[str]) -> None:
    unknown = next((name for name in edges.named if name not in known), None)
    if unknown is not None:
        problem = f"the file has no input or output of this name{close_matches(unknown, known)}"
        raise ExportError(f"io: {unknown}", problem, f"use one of {', '.join(known)}")


def _of_integers(values: Mapping[str, ir.Value], kind: str, edges: Edges) -> list[tuple[str, ir.Value]]:
    """The float32 values that become integers."""
    asked = ((name, value, edges.named.get(name, kind)) for name, value in values.items())
    return [(name, value) for name, value, one in asked if one in INTEGERS and value.dtype == D.FLOAT]


def told(fact: Mapping[str, Any]) -> str:
    """What an input or output of integers means, in words."""
    if "mean" in fact:
        mean, std = (", ".join(f"{x:g}" for x in fact[k]) for k in ("mean", "std"))
        does = f"(pixel * {fact['pixel']:.6g} - mean) / std"
        return f"takes pixels of uint8, {fact['layout']}; the file does {does} with mean {mean}, std {std}"
    return f"{fact['type']} codes, value = (code - {fact['zero_point']}) * {fact['scale']:.9g}"


def _picture(norm: Normalization, inputs: Mapping[str, ir.Value]) -> str:
    """The name of the picture input.

    Raises:
        ExportError: it cannot be told, or takes none.
    """
    name = norm.input or next((n for n, v in inputs.items() if v.shape is not None and len(v.shape) == _IMAGE), "")
    several = [n for n, v in inputs.items() if v.shape is not None and len(v.shape) == _IMAGE]
    if name not in inputs or (not norm.input and len(several) != 1):
        problem = f"{'no' if not several else len(several)} inputs have the four axes of pictures, and none is named"
        raise ExportError("normalize", problem, f"name it: normalize={{'input': ...}}, one of {', '.join(inputs)}")
    value = inputs[name]
    channels = value.shape[1] if value.shape is not None and len(value.shape) == _IMAGE else None
    count = max(len(norm.mean), len(norm.std))
    if value.shape is None or len(value.shape) != _IMAGE or value.dtype != D.FLOAT:
        raise ExportError(
            name, "a normalisation is of pictures, float32 [N, C, H, W], and this input is not", "leave it out"
        )
    if count > 1 and channels != count:
        problem = f"the normalisation has {count} channels, and the input {channels}"
        raise ExportError(name, problem, "give one number per channel of the input")
    return name


def _sole_quantizer(value: ir.Value, kind: str, either_sign: bool) -> ir.Node:
    """The QuantizeLinear that is the only reader of the input ``value``.

    Raises:
        ExportError: it is read otherwise, or its codes are of another type.
    """
    readers = list(dict.fromkeys(use.node for use in value.uses()))
    nodes = [node for node in readers if node.op_type == "QuantizeLinear"]
    if len(readers) != len(nodes) or not nodes or value.is_graph_output():
        others = ", ".join(sorted({node.op_type for node in readers} - {"QuantizeLinear"})) or "the output itself"
        problem = f"it has no codes of {kind}: no quantizer stands at this input, which {others} reads in float"
        remedy = (
            f"leave it in float: io={{'{value.name}': 'float32'}}, or quantize it: a preset with quantized activations, and no "
            "rule that leaves it in float"
        )
        raise ExportError(str(value.name), problem, remedy)
    _check_type(nodes[0], str(value.name), kind, either_sign)
    if len({_grid(node) for node in nodes}) > 1:
        raise ExportError(str(value.name), "its readers quantize it to several grids", "leave this one in float32")
    return nodes[0]


def _check_type(node: ir.Node, name: str, kind: str, either_sign: bool) -> None:
    made, scale = _type_of(node), node.inputs[1]
    if made != kind and not (either_sign and made.removeprefix("u") == kind.removeprefix("u")):
        raise ExportError(name, f"its codes are {made}, and {kind} were asked for", f"use io={{'{name}': '{made}'}}")
    if scale is None or scale.const_value is None or scale.const_value.numpy().size != 1:
        raise ExportError(name, "its quantizer has several scales, or one chosen at run time", "leave it in float32")


def _type_of(node: ir.Node) -> str:
    """The type of the codes of a QuantizeLinear or DequantizeLinear."""
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    return "uint8" if zero is None or zero.dtype is None else zero.dtype.name.lower()


def _grid(node: ir.Node) -> tuple[float, int]:
    scale, zero = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert scale is not None and scale.const_value is not None
    point = 0 if zero is None or zero.const_value is None else int(zero.const_value.numpy().reshape(-1)[0])
    return float(scale.const_value.numpy().reshape(-1)[0]), point


def _fact(node: ir.Node) -> dict[str, Any]:
    scale, zero = _grid(node)
    return {"type": _type_of(node), "scale": scale, "zero_point": zero}


def _take_codes(builder: Builder, value: ir.Value, kind: str, either_sign: bool) -> dict[str, Any]:
    """Let an input take the codes of its quantizer."""
    fact = _fact(_sole_quantizer(value, kind, either_sign))
    for node in list(dict.fromkeys(use.node for use in value.uses())):
        rest = node.inputs[1:]
        bypass(node, builder.outputs)
        for one in rest:
            if one is not None:
                remove_unread(one)
    value.type = ir.TensorType(_TYPES[fact["type"]])
    return fact


def _give_codes(builder: Builder, model: ir.Model, value: ir.Value, kind: str, either_sign: bool) -> dict[str, Any]:
    """Let the file return the codes of a dequantized output."""
    node = value.producer()
    codes = node.inputs[0] if node is not None and node.op_type == "DequantizeLinear" else None
    if node is None or codes is None or codes.is_graph_output() or codes.producer() is None:
        maker = "the graph" if node is None else node.op_type
        problem = f"it has no codes of {kind}: no quantizer stands at this output, which {maker} makes in float"
        remedy = (
            f"leave it in float: io={{'{value.name}': 'float32'}}, or quantize it: model_output in a configuration, and a preset "
            "with quantized activations"
        )
        raise ExportError(str(value.name), problem, remedy)
    _check_type(node, str(value.name), kind, either_sign)
    fact, name, graph = _fact(node), str(value.name), model.graph
    value.name = builder.names.value(f"{name}_float")
    graph.outputs[list(graph.outputs).index(value)] = codes
    codes.name, codes.type = name, ir.TensorType(_TYPES[fact["type"]])
    codes.shape = codes.shape if codes.shape is not None else value.shape
    remove_unread(value)
    return fact


def _take_pixels(builder: Builder, model: ir.Model, value: ir.Value, norm: Normalization) -> dict[str, Any]:
    """Let an input take bytes and normalise them; where its quantizer's grid matches, bytes are the codes."""
    graph = model.graph
    shape = value.shape
    assert shape is not None
    mean, std = np.broadcast_arrays(np.asarray(norm.mean), np.asarray(norm.std))
    name = str(value.name)
    fact: dict[str, Any] = {
        "type": "uint8",
        "mean": mean.tolist(),
        "std": std.tolist(),
        "pixel": norm.scale,
        "layout": norm.layout,
    }
    anchor = next(iter(graph))
    pixels = ir.Value(name=name, type=ir.TensorType(D.UINT8), shape=shape.copy())
    value.name = builder.names.value(f"{name}_normalized")
    place = lambda node: graph.insert_before(anchor, node)  # noqa: E731
    codes = pixels
    if norm.layout == "NHWC":
        pixels.shape = ir.Shape([shape[i] for i in (0, 2, 3, 1)])
        codes = builder.emit(place, "Transpose", [pixels], f"{name}_channels_first", D.UINT8)
        made = codes.producer()
        assert made is not None
        made.attributes.add(ir.AttrInt64s("perm", [0, 3, 1, 2]))
        codes.shape = shape.copy()
    graph.inputs[list(graph.inputs).index(value)] = pixels
    whole = mean / norm.scale
    readers = list(dict.fromkeys(use.node for use in value.uses()))
    step = norm.scale / std
    if _lies_on_bytes(readers, step, whole):
        for node in readers:
            for use_node, index in list(node.outputs[0].uses()):
                use_node.replace_input_with(index, codes)
            graph.remove(node, safe=True)
        fact["codes"] = True
        return fact
    per_channel = (1, -1, 1, 1) if step.size > 1 else ()
    wide = builder.emit(place, "Cast", [codes], f"{name}_pixels", D.FLOAT, to=int(D.FLOAT))
    scale = builder.initializer(f"{name}_step", step.reshape(per_channel).astype(np.float32))
    shift = builder.initializer(f"{name}_shift", (mean / std).reshape(per_channel).astype(np.float32))
    scaled = builder.emit(place, "Mul", [wide, scale], f"{name}_scaled", D.FLOAT)
    made_value = builder.emit(place, "Sub", [scaled, shift], str(value.name), D.FLOAT) if mean.any() else scaled
    for use_node, index in list(value.uses()):
        use_node.replace_input_with(index, made_value)
    _rename_entries(model, name, str(made_value.name))
    return fact


def _rename_entries(model: ir.Model, old: str, new: str) -> None:
    """Record ``new`` as the name of the quantizers' input."""
    for node in model.graph:
        facts = read_metadata(node) if METADATA in node.metadata_props else None
        if facts is not None and facts.get("entry") == old:
            note_metadata(node, **{**facts, "entry": new})


def _lies_on_bytes(readers: Sequence[ir.Node], step: Array, whole: Array) -> bool:
    """Whether the quantizer of a normalised picture returns its original bytes."""
    if not readers or any(node.op_type != "QuantizeLinear" for node in readers) or np.ptp(step) or np.ptp(whole):
        return False
    scale, zero = _grid(readers[0])
    same = abs(scale - step[0]) <= 1e-6 * step[0] and zero == whole[0]
    kinds = {node.inputs[2].dtype for node in readers if len(node.inputs) > 2 and node.inputs[2] is not None}
    return bool(same and kinds <= {D.UINT8} and len({_grid(node) for node in readers}) == 1)


def with_float_edges(model: ir.Model) -> ir.Model:
    """A copy of a file with float32 inputs and outputs, as its simulation has; restores omitted quantizers.

    A model without other edges is returned as it is.
    """
    facts = json.loads(model.metadata_props.get(IO_KEY, "{}"))
    halves = [
        v for v in (*model.graph.inputs, *model.graph.outputs) if v.dtype in HALVES.values() and not v.is_initializer()
    ]
    if not facts and not halves:
        return model
    copy = copy_model(model)
    copy.metadata_props.pop(IO_KEY, None)
    graph, builder = copy.graph, Builder(copy)
    first = next(iter(graph))
    for i, value in enumerate(list(graph.inputs)):
        fact = facts.get("inputs", {}).get(str(value.name))
        if value.is_initializer() or (fact is None and value.dtype not in HALVES.values()):
            continue
        _float_input(builder, graph, first, i, value, fact)
    for i, value in enumerate(list(graph.outputs)):
        _float_output(builder, graph, i, value, facts.get("outputs", {}).get(str(value.name)))
    return copy


def _float_output(builder: Builder, graph: ir.Graph, i: int, value: ir.Value, fact: Mapping[str, Any] | None) -> None:
    """Convert an output of another type to float32."""
    name, maker = str(value.name), value.producer()
    if maker is None or (fact is None and value.dtype not in HALVES.values()):
        return
    value.name = builder.names.value(f"{name}_codes")
    if fact is None:
        made = builder.emit(after(maker), "Cast", [value], name, D.FLOAT, to=int(D.FLOAT))
    else:
        made = builder.emit(
            after(maker), "DequantizeLinear", [value, *_grid_values(builder, name, fact)], name, D.FLOAT
        )
    made.name = name
    graph.outputs[i] = made


def _grid_values(builder: Builder, name: str, fact: Mapping[str, Any]) -> tuple[ir.Value, ir.Value]:
    kind = np.dtype(fact["type"])
    scale = builder.initializer(f"{name}_io_scale", np.array(fact["scale"], np.float32))
    return scale, builder.initializer(f"{name}_io_zero", np.array(fact["zero_point"], kind))


def _float_input(
    builder: Builder, graph: ir.Graph, first: ir.Node, i: int, value: ir.Value, fact: Mapping[str, Any] | None
) -> None:
    """Insert a conversion from float32 to the type of an input."""
    name = str(value.name)
    shape = value.shape
    outer = ir.Value(name=name, type=ir.TensorType(D.FLOAT), shape=None if shape is None else shape.copy())
    value.name = builder.names.value(f"{name}_inside")

    def place(node: ir.Node) -> None:
        graph.insert_before(first, node)

    if fact is None:
        assert value.dtype is not None
        made = builder.emit(place, "Cast", [outer], str(value.name), value.dtype, to=int(value.dtype))
    elif "mean" in fact:
        made = _pixels(builder, place, outer, name, fact)
    else:
        made = builder.emit(
            place, "QuantizeLinear", [outer, *_grid_values(builder, name, fact)], str(value.name), D.UINT8
        )
        made.type = value.type
    for node, index in list(value.uses()):
        node.replace_input_with(index, made)
    graph.inputs[i] = outer


def _pixels(builder: Builder, place: Any, outer: ir.Value, name: str, fact: Mapping[str, Any]) -> ir.Value:
    """The original bytes of a normalised picture."""
    if fact["layout"] == "NHWC" and outer.shape is not None:
        outer.shape = ir.Shape([outer.shape[k] for k in (0, 3, 1, 2)])
    mean, std = (np.asarray(fact[key], np.float32).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    scale = builder.initializer(f"{name}_io_scale", (std / fact["pixel"]).astype(np.float32))
    shift = builder.initializer(f"{name}_io_shift", (mean / fact["pixel"]).astype(np.float32))
    wide = builder.emit(place, "Mul", [outer, scale], f"{name}_io_scaled", D.FLOAT)
    moved = builder.emit(place, "Add", [wide, shift], f"{name}_io_moved", D.FLOAT)
    rounded = builder.emit(place, "Round", [moved], f"{name}_io_rounded", D.FLOAT)
    low, high = (builder.initializer(f"{name}_io_{k}", np.array(n, np.float32)) for k, n in (("low", 0), ("high", 255)))
    clipped = builder.emit(place, "Clip", [rounded, low, high], f"{name}_io_clipped", D.FLOAT)
    made = builder.emit(place, "Cast", [clipped], f"{name}_io_bytes", D.UINT8, to=int(D.UINT8))
    if fact["layout"] == "NHWC":
        turned = builder.emit(place, "Transpose", [made], f"{name}_io_last", D.UINT8)
        node = turned.producer()
        assert node is not None
        node.attributes.add(ir.AttrInt64s("perm", [0, 2, 3, 1]))
        turned.shape = None
        return turned
    return made


__all__ = [
    "Edges",
    "Normalization",
    "as_file_inputs",
    "as_values",
    "edges_of",
    "quantized",
    "told",
    "with_float_edges",
    "write_edges",
]
