"""A marked model becomes a standard ONNX model with QuantizeLinear and DequantizeLinear.

What integer runtimes need in order to recognise a quantized operator, and what is done about it:

- weights are stored as integers, each with a DequantizeLinear whose output bears the parameter's name (the
  integers are called ``<name>_q``); the float original is dropped unless something else reads it;
- biases are int32 with the scale of the products they are added to (``core.bias``); where that does not fit
  32 bits the weight's scale is raised;
- signed activations are written on the same grid counted from zero (``activation="unsigned"``): equal values,
  and the integer kernels that want uint8 accept them;
- a convolution pads for itself where a Pad with zeros stands in front of it;
- operators that only move data get a pair of the input's grid after them, so that no stretch of the graph
  falls back to float.

The file computes what the simulation computes, bit for bit per quantizer; how each format is written is the
table of :mod:`bitwright.export.qdq.forms`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.graph.ops import is_neutral, op_row, weight_axes
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.graph.traits import TRAITS
from bitwright.core.numerics.affine import with_scale
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerBlock, PerChannel, PerTensor
from bitwright.core.numerics.int32_bias import (
    bias_entries,
    derive_bias_encoding,
    floor_weight_scale,
    quantize_bias,
    underivable,
)
from bitwright.errors import ConfigError, ExportError, close_matches
from bitwright.export.files.atomic import atomic_files
from bitwright.export.files.onnx_file import let_go, save_in_one_file, save_in_two_files
from bitwright.export.qdq.constants import find_constants
from bitwright.export.qdq.forms import (
    METADATA,
    Builder,
    Pair,
    before,
    note_metadata,
    write_activation,
    write_follower,
)
from bitwright.export.qdq.markers import (
    Stripped,
    bypass,
    close,
    copy_model,
    is_site,
    remove_unread,
    rename_values,
    site_names,
    site_nodes,
    site_of,
    strip_sites,
)
from bitwright.export.qdq.nbits import can_say, write_nbits
from bitwright.export.qdq.padding import absorb_padding, pads_of_convolutions
from bitwright.export.qdq.products import (
    ProductForm,
    check_weight_only,
    float_products,
    guard_outputs,
    keep_apart,
)
from bitwright.export.qdq.stored import Stored, folded, store_constant, transpose_encoding, unsigned
from bitwright.export.targets import Target, find_target

__all__ = [
    "Note",
    "QdqResult",
    "Stripped",
    "rename_values",
    "save_model",
    "site_names",
    "strip_sites",
    "to_qdq",
]

BiasForm = Literal["int32", "marked", "float"]
ActivationForm = Literal["unsigned", "as_is"]
NoteKind = Literal[
    "float product",
    "float site",
    "no place",
    "raised scale",
    "float weight",
    "float bias",
    "replaced bias",
    "stored in float",
]

OLDEST_OPSET, IR_VERSION = 13, 10
# Protobuf refuses files of 2 GiB; larger models keep their tensors in a second file.
_ONE_FILE_LIMIT = 3 << 29


@dataclass(frozen=True)
class Note:
    """Something a reader of the file should know about one site."""

    site: str
    kind: NoteKind
    text: str


@dataclass(frozen=True)
class QdqResult:
    """What :func:`to_qdq` returns.

    Attributes:
        model: the QDQ model.
        tensors: site -> names of its dequantized tensors, in execution order; for weights the parameter's
            name.
        notes: what stayed in float or was written otherwise than asked for, and why.
        raised: weight sites whose scale was raised for the sake of an int32 bias -> the encoding written.
    """

    model: ir.Model
    tensors: dict[str, tuple[str, ...]]
    notes: tuple[Note, ...]
    raised: dict[str, Encoding]


def to_qdq(
    model: ir.Model,
    encodings: Mapping[str, Encoding],
    *,
    bias: BiasForm = "int32",
    activation: ActivationForm = "unsigned",
    weight_only: ProductForm = "exact",
    target: str | Target = "packed",
) -> QdqResult:
    """Write every marked place as a quantizer of standard ONNX.

    Args:
        model: with a ``bitwright::Site`` marker at each quantized place (see
            :mod:`bitwright.export.qdq.markers`); opset 21 for 4 and 16 bits and for blocks, 19 for float8, else
            13. It is left as it is.
        encodings: site -> encoding with concrete axes. A marked site without one stays in float.
        bias: ``"int32"`` gives Conv, ConvTranspose, Gemm and MatMul with Add an int32 bias where input and
            weight are quantized, marked or not; ``"marked"`` does so for marked biases only; ``"float"``
            leaves all biases alone. ONNX Runtime quantizes float biases of its integer kernels by itself,
            so that they are not more exact there.
        activation: ``"unsigned"`` writes signed grids of activations as unsigned ones with shifted zero
            point; ``"as_is"`` keeps them signed, which needs ``session.qdqisint8allowed=1`` in ONNX
            Runtime.
        weight_only: MatMul and Gemm of float activations with quantized weights: ``"exact"`` computes them as simulated, in
            float; ONNX Runtime is kept from quantizing the activations by itself. Weights of 4 bits become MatMulNBits where
            the target runs that (``ort_cpu``). ``"nbits"`` asks for MatMulNBits whatever the target; ``"fused"`` leaves all to
            ONNX Runtime, which is fast and computes something else than the simulation.
        target: row of :mod:`bitwright.export.targets`: how many bits codes are stored in.

    Returns:
        A model with the names of the graph's inputs and outputs unchanged; time and memory are linear in
        nodes.

    Raises:
        ConfigError: an option has an unknown value.
        EncodingsError: an encoding does not fit its tensor.
        ExportError: a marker is malformed, a format cannot be written there, or the opset is too old for it.
    """
    _check_option("bias", bias, ("int32", "marked", "float"))
    _check_option("activation", activation, ("unsigned", "as_is"))
    check_weight_only(weight_only)
    row = find_target(target)
    return _Writer(copy_model(model), dict(encodings), bias, activation, weight_only, row).run()


def save_model(model: ir.Model, path: str | os.PathLike[str], *, external: bool | None = None) -> list[Path]:
    """Write ``model``; the files appear whole or not at all.

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
        tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
        external = sum(tensor.nbytes for tensor in tensors if tensor is not None) > _ONE_FILE_LIMIT
    with atomic_files(target.parent, name=target.name) as folder:
        if external:
            save_in_two_files(model, folder / target.name)
        else:
            save_in_one_file(model, folder / target.name)
        return [target.parent / written.name for written in sorted(folder.iterdir())]


def _check_option(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        problem = f"{value!r} is not a value of this option{close_matches(str(value), known)}"
        raise ConfigError(f"to_qdq({name}=...)", problem, f"use one of {', '.join(map(repr, known))}")


# ------------------------------------------------------------------------------------ operators that move
# data


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


# Joins of equal grids: which inputs carry data.
_JOINS: dict[str, slice] = {"Concat": slice(None), "Where": slice(1, 3)}
# Several scales that integer kernels of ONNX Runtime handle: (operator, port) -> any, or (axis, rank).
_KERNEL_AXES: dict[tuple[str, int], tuple[int, int | None] | Literal["any"]] = {
    ("Conv", 1): (0, None),
    ("MatMul", 1): (1, 2),
    ("Gemm", 1): "any",
    ("ConvTranspose", 1): "any",
    ("Gather", 0): "any",
    # no integer kernel reads a DequantizeLinear in front of these
    **{(op_type, port): "any" for op_type in CELLS for port in (1, 2)},
}
# Ports of weights, whose signedness integer kernels take as it comes.
_WEIGHT_PORTS = {
    **dict.fromkeys(TRAITS["layer"], (1,)),
    **dict.fromkeys(CELLS, (1, 2)),
    **dict.fromkeys(("Gather", "Transpose"), (0,)),
}


# -----------------------------------------------------------------------------------------------------
# writing


@dataclass(frozen=True)
class _Weight:
    """A quantized constant as its reader sees it: perhaps transposed, otherwise as the site has it."""

    site: str
    encoding: Encoding
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Bias:
    """A bias that an int32 grid can be derived for: ``node`` reads it at ``port``."""

    node: ir.Node
    port: int
    source: ir.Value
    array: NDArray[np.float32]
    site: str | None
    input: Encoding
    weight: _Weight

    @property
    def name(self) -> str:
        return self.site or str(self.source.name)


@dataclass(eq=False)
class _Written:
    """What one quantizer became, kept until names are final; ``places`` are its sites and their runs."""

    places: list[tuple[str, int]]
    role: Literal["activation", "constant", "bias"]
    encoding: Encoding
    scale: ir.Value | None
    axis: int | None = None
    entry: ir.Value | None = None
    perm: tuple[int, ...] = ()


@dataclass(eq=False)
class _Writer:
    """Turns one copied model into its QDQ form; the steps are the lines of :meth:`run`."""

    model: ir.Model
    encodings: dict[str, Encoding]
    bias: BiasForm
    activation: ActivationForm
    weight_only: ProductForm
    target: Target
    notes: dict[Note, None] = field(default_factory=dict)
    raised: dict[str, Encoding] = field(default_factory=dict)
    tensors: dict[str, list[ir.Value]] = field(default_factory=dict)
    written: dict[ir.Value, _Written] = field(default_factory=dict)
    # values of the marked model -> the grid they lie on; quantized constants as their readers see them
    grids: dict[ir.Value, Encoding] = field(default_factory=dict)
    weights: dict[ir.Value, _Weight] = field(default_factory=dict)
    # values of the QDQ model -> the pair they come from
    pairs: dict[ir.Value, Pair] = field(default_factory=dict)
    quantized: dict[tuple[ir.Value, Encoding, ir.Graph], ir.Value] = field(default_factory=dict)
    stored: dict[tuple[object, ...], tuple[Stored, list[ir.Value]]] = field(default_factory=dict)
    heirs: dict[ir.Value, ir.Value] = field(default_factory=dict)
    places: dict[ir.Node, tuple[str, int]] = field(default_factory=dict)
    narrow_products: list[ir.Node] = field(default_factory=list)  # that become MatMulNBits

    def run(self) -> QdqResult:
        """All steps, in order."""
        self._check_opset(OLDEST_OPSET, "per-channel DequantizeLinear")
        self.builder = Builder(self.model)
        self._count_runs()
        self._drop_float_sites()
        self._settle_constants()
        self._trace()
        if self.bias != "float":
            self._write_biases()
        for node in site_nodes(self.model):
            write = self._write_constant if node.inputs[0] in self.constants else self._write_activation
            write(node, site_of(node))
        self._write_followers()
        self._write_products()
        guard_outputs(self.builder, self.model.graph.all_nodes())
        self._tidy()
        write_nbits(self.builder, self.narrow_products)
        version, what = self.builder.opset
        self._check_opset(version, what)
        names = {site: tuple(str(v.name) for v in values) for site, values in self.tensors.items()}
        return QdqResult(self.model, names, tuple(self.notes), self.raised)

    def _check_opset(self, needed: int, what: str) -> None:
        found = self.model.opset_imports.get("", 0)
        if found < needed:
            raise ExportError(
                what,
                f"needs opset {needed}, and the model has opset {found}",
                f"convert the model to opset {max(needed, 21)}, or export it anew with that opset",
            )

    def _note(self, site: str, kind: NoteKind, text: str) -> None:
        self.notes[Note(site, kind, text)] = None

    def _record(self, result: ir.Value, written: _Written) -> None:
        self.written[result] = written
        for site, _ in written.places:
            self.tensors.setdefault(site, []).append(result)

    # -------------------------------------------------------------------------------------------- preparation

    def _count_runs(self) -> None:
        """Number the markers of each site: one that stands in a loop that was unrolled runs several times."""
        counted: Counter[str] = Counter()
        for node in site_nodes(self.model):
            site = site_of(node)
            self.places[node] = (site, counted[site])
            counted[site] += 1

    def _drop_float_sites(self) -> None:
        """Take out markers without an encoding; say which encodings have no marker."""
        known = set()
        for node in site_nodes(self.model):
            site = site_of(node)
            known.add(site)
            encoding = self.encodings.get(site)
            if encoding is None:
                self._note(site, "float site", "has no encoding and stays in float")
            elif self.bias == "float" and encoding.format == IntFormat(32):
                self._note(site, "float bias", "stays in float, as asked for")
            else:
                continue
            bypass(node, self.builder.outputs)
        for site in self.encodings:
            if site not in known:
                near = close_matches(site, known)
                self._note(site, "no place", f"has an encoding, but the model has no marker for it{near}")

    def _settle_constants(self) -> None:
        """Find the constants, and let convolutions pad for themselves where a constant says how much."""
        pads = pads_of_convolutions(self.model)
        self.constants = find_constants(self.model, (value for node in pads for value in node.inputs[1:]))
        absorb_padding(pads, self._array)

    def _trace(self) -> None:
        """Follow grids through operators that move data, and weights through transpositions, in one pass."""
        for node in self.model.graph.all_nodes():
            source = node.inputs[0] if node.inputs else None
            if source is None:
                continue
            if is_site(node):
                self._note_site(node, source)
            elif node.op_type == "Transpose" and source in self.weights:
                weight = self.weights[source]
                perm = _permutation(node, len(weight.shape))
                shape = tuple(weight.shape[i] for i in perm)
                moved = transpose_encoding(weight.encoding, perm)
                self.weights[node.outputs[0]] = _Weight(weight.site, moved, shape)
            else:
                self._note_float_weight(node)
                self._note_carried(node)

    def _note_carried(self, node: ir.Node) -> None:
        carried = self._carried(node, self.grids)
        if carried is not None:
            self.grids.update(dict.fromkeys(_data_outputs(node), carried))

    def _note_site(self, node: ir.Node, source: ir.Value) -> None:
        encoding, array = self.encodings[site_of(node)], self._array(source)
        if array is not None:
            self.weights[node.outputs[0]] = _Weight(site_of(node), encoding, array.shape)
        elif isinstance(encoding.granularity, PerTensor):
            self.grids[node.outputs[0]] = encoding

    def _note_float_weight(self, node: ir.Node) -> None:
        """A float weight after a quantized input does not stay float in ONNX Runtime's default mode."""
        weight = node.inputs[1] if node.op_type in TRAITS["bias_port"] and len(node.inputs) > 1 else None
        if weight in self.constants and node.inputs[0] in self.grids:
            text = (
                "stays in float, but ONNX Runtime by default quantizes float weights after quantized inputs"
            )
            self._note(str(weight.name), "float weight", text)

    def _carried(self, node: ir.Node, known: Mapping[ir.Value, Any]) -> Any:
        """What is ``known`` of the data that ``node`` passes on unchanged; ``None`` if it computes."""
        if node.domain or not node.inputs:
            return None
        if node.op_type in _JOINS:
            joined = [known.get(v) if v is not None else None for v in node.inputs[_JOINS[node.op_type]]]
            first = joined[0]
            same = first is not None and all(_same_grid(first, other) for other in joined[1:])
            return first if same else None
        source = node.inputs[0]
        return known.get(source) if moves_data(node, self._array) and source is not None else None

    def _array(self, value: ir.Value) -> NDArray[Any] | None:
        tensor = self.constants.get(value)
        return None if tensor is None else tensor.numpy()

    # ------------------------------------------------------------------------------------------------- biases

    def _write_biases(self) -> None:
        """Raise weight scales where a bias asks for it, then write each bias on the grid that follows."""
        found = [bias for node in self.model.graph.all_nodes() for bias in self._biases_of(node)]
        for bias in found:
            site, seen = bias.weight.site, self._weight_encoding(bias)
            floored = floor_weight_scale(seen, bias.input, bias.array, bias.name)
            if floored is not seen:
                given = self.encodings[site]
                scale = floored.scale.reshape(given.scale.shape)
                raised = with_scale(given, scale)
                self.encodings[site] = self.raised[site] = raised
        for site in self.raised:
            text = (
                "its scale was raised where an int32 bias would not fit; simulate with the encoding written"
            )
            self._note(site, "raised scale", text)
        for bias in found:
            self._write_bias(bias)

    def _weight_encoding(self, bias: _Bias) -> Encoding:
        """The weight's encoding as it now stands, in the orientation its operator sees."""
        seen = bias.weight.encoding
        scale = self.encodings[bias.weight.site].scale.reshape(seen.scale.shape)
        if np.array_equal(scale, seen.scale):
            return seen
        return with_scale(seen, scale)

    def _biases_of(self, node: ir.Node) -> Iterator[_Bias]:
        """The bias of ``node`` if it can be int32; where one might expect that, a note."""
        place = _bias_place(node)
        if place is None:
            return
        operator, port = place
        value, data, weight_value = node.inputs[port], operator.inputs[0], operator.inputs[1]
        assert value is not None and data is not None and weight_value is not None
        marker = value.producer()
        site = site_of(marker) if marker is not None and is_site(marker) else None
        source = marker.inputs[0] if marker is not None and site is not None else value
        assert source is not None
        given, weight, array = self.grids.get(data), self.weights.get(weight_value), self._array(source)
        if given is None or weight is None or array is None or (site is None and self.bias == "marked"):
            return
        if site is not None and self.encodings[site].format != IntFormat(32):
            return
        problem = _bias_problem(operator, given, weight, array)
        if problem is not None:
            self._note(site or str(source.name), "float bias", f"no int32 bias: {problem}")
            return
        yield _Bias(node, port, source, np.asarray(array, np.float32), site, given, weight)

    def _write_bias(self, bias: _Bias) -> None:
        encoding = derive_bias_encoding(bias.input, self._weight_encoding(bias), bias.array, bias.name)
        if bias.site is not None and self.encodings[bias.site] != encoding:
            text = "written with input scale times weight scale, which differs from the encoding given"
            self._note(bias.site, "replaced bias", text)
        key, source = (bias.source, encoding), bias.source
        if key not in self.stored:
            axis = bias.array.ndim - 1 if encoding.scale.ndim else None
            small = Stored(quantize_bias(bias.array, encoding), encoding.scale, None, axis)
            self.stored[key] = (small, self._parameters(small, str(source.name)))
        small, values = self.stored[key]
        marker = bias.node.inputs[bias.port]
        result = self._dequantize(bias.node, small, values, source)
        bias.node.replace_input_with(bias.port, result)
        self.heirs.setdefault(source, result)
        maker = None if marker is None else marker.producer()
        places = [] if bias.site is None or maker is None else [self.places[maker]]
        self._record(result, _Written(places, "bias", encoding, values[1], small.axis))
        if bias.site is not None and marker is not None:
            remove_unread(marker)

    def _dequantize(self, at: ir.Node, small: Stored, values: list[ir.Value], source: ir.Value) -> ir.Value:
        """The float value of a small constant in the type of its ``source``, made in front of ``at``."""
        dtype, name = source.dtype or ir.DataType.FLOAT, f"{source.name}_dq"
        value, is_float32 = values[0], dtype == ir.DataType.FLOAT
        if small.op == "DequantizeLinear":
            value = self.builder.emit(
                before(at),
                small.op,
                values,
                name if is_float32 else f"{source.name}_f32",
                ir.DataType.FLOAT,
                **_axis_attributes(small),
            )
        if small.op == "Cast" or not is_float32:
            value = self.builder.emit(before(at), "Cast", [value], name, dtype, to=int(dtype))
        return value

    # ------------------------------------------------------------------------------ constants and activations

    def _write_constant(self, node: ir.Node, site: str) -> None:
        """A weight, or another constant: a small initializer and what makes a float of it, for the marker."""
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None
        encoding = self.encodings[site]
        shift = self.activation == "unsigned" and not _is_weight(result)
        for reader, port in tuple(result.uses()):
            if reader.op_type == "Transpose" and port == 0 and source.dtype in (None, ir.DataType.FLOAT):
                self._write_transposed(reader, source, encoding, self.places[node])
        if remove_unread(result):
            return
        shown = unsigned(encoding) if shift else encoding
        small, values = self._store(source, (), encoding, shown, site, result)
        folds = self._folds(result) and small.op == "DequantizeLinear"
        write = self._folded if folds else self._dequantize
        value = write(node, small, values, source)
        if small.op is None:
            self._note(site, "stored in float", f"{encoding.format.name} constants have no exact small form")
        if value.producer() is None:
            node.replace_input_with(0, value)
            bypass(node, self.builder.outputs)
            result = value if not result.is_graph_output() else result
        else:
            self.builder.take_over(node, value)
        self.heirs.setdefault(source, result)
        scale = values[1] if small.scale is not None else None
        self._record(result, _Written([self.places[node]], "constant", encoding, scale, small.axis))

    def _write_transposed(
        self, node: ir.Node, source: ir.Value, encoding: Encoding, place: tuple[str, int]
    ) -> None:
        """Store a transposed weight transposed: integer kernels want DequantizeLinear right before them."""
        array = self._array(source)
        assert array is not None
        perm = _permutation(node, array.ndim)
        moved = transpose_encoding(encoding, perm)
        small, values = self._store(source, perm, moved, moved, place[0], node.outputs[0])
        if small.op != "DequantizeLinear":
            return
        result = node.outputs[0]
        if not result.is_graph_output():
            result.name = self.builder.names.value(f"{source.name}_transposed")
        self.builder.become(node, small.op, values, None, **_axis_attributes(small))
        self._record(result, _Written([place], "constant", moved, values[1], small.axis, perm=perm))
        self.heirs.setdefault(source, source)

    def _is_misread(self, value: ir.Value, encoding: Encoding) -> bool:
        """Whether an integer kernel that reads the constant ``value`` would take several scales for one."""
        granularity = encoding.granularity
        if isinstance(granularity, PerTensor):
            return False
        rank = len(self.weights[value].shape)
        axis = (
            granularity.axis % rank
            if isinstance(granularity, PerChannel) and granularity.axis is not None
            else None
        )
        for node, port in value.uses():
            handled = _KERNEL_AXES.get((node.op_type, port))
            known = handled in ("any", (axis, rank), (axis, None))
            if not known and any(v in self.grids for v in node.inputs if v is not None):
                return True
        return False

    def _width(self, value: ir.Value, encoding: Encoding) -> int | None:
        """Bits that the codes of the constant ``value`` take; ``None`` for floats and what is left to the table of forms."""
        fmt = encoding.format
        if self._is_misread(value, encoding):
            return 4 if isinstance(fmt, IntFormat) and fmt.bits <= 4 else 16
        if not isinstance(fmt, IntFormat) or fmt.bits > 8:
            return None
        others = (v for node, _ in value.uses() for v in node.inputs if v is not None and v is not value)
        beside = not isinstance(encoding.granularity, PerBlock) and any(v in self.grids for v in others)
        return self.target.stored_bits(fmt.bits, beside_codes=beside)

    def _folds(self, value: ir.Value) -> bool:
        """Whether all readers of ``value`` are recurrent operators, and the target wants their weights computed when it loads."""
        readers = [use.node.op_type for use in value.uses()]
        return self.target.folds and bool(readers) and all(op_type in CELLS for op_type in readers)

    def _folded(self, at: ir.Node, small: Stored, values: list[ir.Value], source: ir.Value) -> ir.Value:
        """The float value of a small constant by operators that every runtime computes when it loads."""
        dtype, float32 = source.dtype or ir.DataType.FLOAT, ir.DataType.FLOAT
        base, place = str(source.name), before(at)
        # OpenVINO keeps a Cast of 8-bit codes to float for its own integer operators, and has none that is recurrent
        wide = ir.DataType.INT32
        value = self.builder.emit(place, "Cast", values[:1], f"{base}_wide", wide, to=int(wide))
        value = self.builder.emit(place, "Cast", [value], f"{base}_codes", float32, to=int(float32))
        if len(values) > 2:
            value = self.builder.emit(place, "Sub", [value, values[2]], f"{base}_centred", float32)
        value = self.builder.emit(place, "Mul", [value, values[1]], f"{base}_dq", float32)
        if dtype == float32:
            return value
        return self.builder.emit(place, "Cast", [value], f"{base}_cast", dtype, to=int(dtype))

    def _store(
        self,
        source: ir.Value,
        perm: tuple[int, ...],
        encoding: Encoding,
        shown: Encoding,
        site: str,
        result: ir.Value,
    ) -> tuple[Stored, list[ir.Value]]:
        """The constant in its small form and its initializers, once per tensor, orientation, grid and width of the codes.

        Readers of ``result`` decide on the width.
        """
        width, folds = self._width(result, encoding), self._folds(result)
        key = (source, perm, encoding, shown, width, folds)
        if key not in self.stored:
            array = self._array(source)
            assert array is not None
            small = store_constant(
                array.transpose(perm) if perm else array, encoding, shown, site, width=width
            )
            if folds and small.op == "DequantizeLinear":
                small = folded(small, small.array.ndim)
            let_go(self.constants[source])
            self.builder.need(ir.DataType.from_numpy(small.array.dtype), site, small.block is not None)
            base = f"{source.name}_transposed" if perm else str(source.name)
            self.stored[key] = (small, self._parameters(small, base))
        return self.stored[key]

    def _parameters(self, small: Stored, base: str) -> list[ir.Value]:
        parts = (("q", small.array), ("scale", small.scale), ("zero_point", small.zero_point))
        return [self.builder.initializer(f"{base}_{name}", a) for name, a in parts if a is not None]

    def _write_activation(self, node: ir.Node, site: str) -> None:
        """A quantizer in place of the marker; one that its tensor went through already is not repeated."""
        source, result, graph = node.inputs[0], node.outputs[0], node.graph
        assert source is not None and graph is not None
        encoding = self.encodings[site]
        place = self.places[node]
        twin = self.quantized.get((source, encoding, graph))
        if twin is not None:
            node.replace_input_with(0, twin)
            bypass(node, self.builder.outputs)
            self.written[twin].places.append(place)
            self.tensors.setdefault(site, []).append(twin)
            return
        shown = unsigned(encoding) if self.activation == "unsigned" else encoding
        found = write_activation(self.builder, node, encoding, shown, site)
        if found.pair is not None:
            self.pairs[result] = found.pair
        self.quantized[source, encoding, graph] = self.quantized[result, encoding, graph] = result
        written = _Written([place], "activation", encoding, found.scale, found.axis, entry=source)
        self._record(result, written)

    def _write_followers(self) -> None:
        """Pairs of the same grid after operators that move data: integer runtimes then see through them."""
        own = self.builder.own
        for node in tuple(self.model.graph.all_nodes()):
            pair: Pair | None = None if node in own else self._carried(node, self.pairs)
            if pair is None:
                continue
            for value in _data_outputs(node):
                if value.is_graph_output() or any(use.node not in own for use in value.uses()):
                    self.pairs[write_follower(self.builder, value, pair)] = pair

    def _write_products(self) -> None:
        """Keep float activations of products with quantized weights in float, or say that the runtime will not."""
        found = float_products(self.model)
        if not found:
            return
        what = (
            f"{len(found)} product{'s' if len(found) > 1 else ''} of float activations with quantized weights"
        )
        if self.weight_only != "fused":
            chosen = self.weight_only == "nbits" or self.target.multiplies_nbits
            self.narrow_products = [node for node in found if chosen and can_say(node)]
            left = [node for node in found if node not in self.narrow_products]
            keep_apart(self.builder, left)
            text = f"{what} computed as simulated, in float" + "".join(
                _forms(len(self.narrow_products), len(left))
            )
        else:
            text = (
                f"{what}, whose activations ONNX Runtime quantizes to 8 bits by itself, as no simulation does; "
                "session.qdq_matmulnbits_accuracy_level=1 makes it compute them in float"
            )
        self._note("model", "float product", text)

    # ------------------------------------------------------------------------------------------------ the end

    def _tidy(self) -> None:
        """Drop float originals, give their names to what replaced them, write metadata and versions."""
        for source, heir in self.heirs.items():
            name = source.name
            remove_unread(source)
            gone = not source.uses() and not source.is_graph_output() and not source.is_graph_input()
            if gone and heir is not source and not heir.is_graph_output():
                heir.name = name
        for result, written in self.written.items():
            node = result.producer()
            if node is None or not written.places:
                continue
            note_metadata(
                node,
                places=written.places,
                role=written.role,
                format=written.encoding.format.name,
                scale=written.scale.name if written.scale is not None else None,
                axis=written.axis,
                entry=written.entry.name if written.entry is not None else None,
                perm=list(written.perm),
            )
        close(self.model)
        self.model.metadata_props[METADATA] = "qdq"  # a model may have no quantizer to tell it by
        newest = self.model.opset_imports[""]
        self.model.ir_version = IR_VERSION if newest <= 21 else max(IR_VERSION, self.model.ir_version)


def _same_grid(one: Encoding | Pair, other: Encoding | Pair | None) -> bool:
    if isinstance(one, Pair):
        return isinstance(other, Pair) and (one.dtype, one.encoding) == (other.dtype, other.encoding)
    return one == other


def _data_outputs(node: ir.Node) -> tuple[ir.Value, ...]:
    """Outputs that hold data; indices of MaxPool and TopK do not."""
    return tuple(node.outputs) if node.op_type == "Split" else tuple(node.outputs[:1])


def _forms(narrow: int, left: int) -> Iterator[str]:
    """How products with quantized weights are written: as MatMulNBits, or with a DequantizeLinear."""
    if narrow:
        yield f"; {narrow} written as MatMulNBits"
    if left:
        yield f"; the weights of {left} are dequantized in every run of ONNX Runtime"
        yield " (MatMulNBits has no form for them)" if narrow else ""
        yield (
            ": 4 bits in blocks run as MatMulNBits with target='ort_cpu' or weight_only='nbits'"
            if not narrow
            else ""
        )


def _axis_attributes(small: Stored) -> dict[str, int]:
    found = {"axis": small.axis, "block_size": small.block}
    return {key: number for key, number in found.items() if number is not None}


def _permutation(node: ir.Node, rank: int) -> tuple[int, ...]:
    return tuple(node.attributes.get_ints("perm", tuple(reversed(range(rank)))))


def _is_weight(value: ir.Value) -> bool:
    """Whether all readers take ``value`` as a weight, of which integer kernels accept either sign."""
    return all(use.idx in _WEIGHT_PORTS.get(use.node.op_type, ()) for use in value.uses())


def _bias_place(node: ir.Node) -> tuple[ir.Node, int] | None:
    """``(operator, port)``: ``node`` reads there the bias of ``operator``, itself or the MatMul before it."""
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


def _bias_problem(operator: ir.Node, given: Encoding, weight: _Weight, array: NDArray[Any]) -> str | None:
    """Why the bias ``array`` of ``operator`` has no int32 form, or ``None``."""
    attributes = {key: attr.value for key, attr in operator.attributes.items()}
    channel, summed = weight_axes(operator.op_type, attributes, 1, len(weight.shape))
    if channel is None:
        return "its weight has no output channels"
    group = int(attributes.get("group", 1)) if operator.op_type == "ConvTranspose" else 1
    if bias_entries(array.shape) != weight.shape[channel] * group:
        return f"its shape {array.shape} is not one entry per output channel"
    if operator.op_type == "Gemm" and (attributes.get("alpha", 1.0), attributes.get("beta", 1.0)) != (
        1.0,
        1.0,
    ):
        return "Gemm multiplies by alpha or beta"
    granularity = weight.encoding.granularity
    wanted = {channel} if group == 1 else {channel, 0} if weight.shape[channel] == 1 else set()
    if isinstance(granularity, PerChannel) and granularity.axis not in wanted:
        return f"its weight has one scale per index of axis {granularity.axis}, not per output channel"
    if isinstance(granularity, PerBlock):
        here = (granularity.axis, granularity.channel_axis, granularity.size)
        if here != (summed, channel, weight.shape[summed or 0] // group):
            return "its weight has several scales per output channel"
    return underivable(given, weight.encoding, array.size)
