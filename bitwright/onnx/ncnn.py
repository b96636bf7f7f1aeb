"""Convert ONNX models, quantized (QDQ) or float, to ncnn's ``.param`` and ``.bin`` files, and run them.

Convolutions and fully connected layers with stored codes, whose input has a symmetric int8 grid, are ncnn's int8 layers: they
quantize their input, add products in int32, and return floats. Every other quantizer is computed in float as it stands
(multiply, round, clip, multiply). Files hold one sample: ncnn has no batch axis.

Source: ncnn's ``docs/developer-guide/operation-param-weight-table.md`` and ``src/layer/*.cpp``; the layout of int8 weights
(``int8_scale_term``) was checked with the wheel of version 1.0.20261020.
"""

from __future__ import annotations

import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.errors import ExportError, checks_arguments
from bitwright.export.files.atomic import atomic_files, temporary_room
from bitwright.export.files.onnx_file import array_of, load
from bitwright.runtimes.adapters import Session

Array = NDArray[Any]

_MAGIC = 7767517
_FLOATS, _CODES = struct.pack("<I", 0), struct.pack("<I", 0x000D4B38)  # in front of weights: what type they have
_MOST = 127  # the largest code of a layer's input and weight; the smallest is its negative
_REMEDY = "leave that part outside of the file, or compare with another runtime"
_SUM, _DIFFERENCE, _PRODUCT, _RATIO = range(4)  # operations of BinaryOp
_ROUND = 18  # of UnaryOp: a half to even
_BINARY = {"Add": _SUM, "Sum": _SUM, "Sub": _DIFFERENCE, "Mul": _PRODUCT, "Div": _RATIO}
_PLAIN = {"Sigmoid": "Sigmoid", "Tanh": "TanH", "Identity": "Noop", "Dropout": "Noop", "Flatten": "Flatten"}
_LARGE = float(np.finfo(np.float32).max)


@dataclass
class _Layer:
    """One line of a ``.param`` file, and its part of the ``.bin`` file."""

    kind: str
    name: str
    inputs: list[str]
    outputs: list[str]
    options: dict[int, Any]
    content: bytes = b""

    def line(self) -> str:
        ends = [*self.inputs, *self.outputs]
        options = [f"{key}={_text(value)}" for key, value in self.options.items()]
        return " ".join([self.kind, self.name, str(len(self.inputs)), str(len(self.outputs)), *ends, *options])


def _part(blob: str, taken: Counter[str]) -> str:
    """The next of the equal blobs that a Split makes."""
    taken[blob] += 1
    return f"{blob}@{taken[blob]}"


def _split_of(blob: str, count: int) -> _Layer:
    return _Layer("Split", f"split_{blob}", [blob], [f"{blob}@{k + 1}" for k in range(count)], {})


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class NcnnFile:
    """A model in ncnn's format.

    Attributes:
        param, content: what the ``.param`` and the ``.bin`` file hold.
        inputs, outputs: name in the model -> name of the blob.
        kernels: operator of the model -> ncnn's layer; those on codes end in ``i8``.
    """

    param: str
    content: bytes
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    kernels: Mapping[str, str]


@dataclass
class _Writer:
    """Writes the layers of a model in execution order."""

    model: ir.Model
    layers: list[_Layer] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    _blobs: dict[ir.Value, str] = field(default_factory=dict)
    _folded: dict[ir.Value, Array] = field(default_factory=dict)

    def write(self) -> NcnnFile:
        inputs: dict[str, str] = {}
        for value in (v for v in self.model.graph.inputs if not v.is_initializer()):
            inputs[str(value.name)] = self._blobs[value] = blob = f"in{len(inputs)}"
            self.layers.append(_Layer("Input", blob, [], [blob], {}))
        for node in self.model.graph:
            if not self._fold(node) and node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
                self._add(node)
        outputs = {}
        for i, value in enumerate(self.model.graph.outputs):
            outputs[str(value.name)] = blob = f"out{i}"
            self.layers.append(_Layer("Noop", f"result{i}", [self.blob(value)], [blob], {}))
        self._drop_unread(outputs.values())
        self._split()
        return self._file(inputs, outputs)

    def _file(self, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> NcnnFile:
        count = len({blob for layer in self.layers for blob in layer.outputs})
        lines = [str(_MAGIC), f"{len(self.layers)} {count}", *(layer.line() for layer in self.layers)]
        content = b"".join(layer.content for layer in self.layers)
        return NcnnFile("\n".join(lines) + "\n", content, inputs, outputs, self.kernels)

    def _drop_unread(self, results: Iterable[str]) -> None:
        """Drop unused layers: quantizers that layers on codes include."""
        read, kept = set(results), list[_Layer]()
        for layer in reversed(self.layers):
            if layer.kind == "Input" or read.intersection(layer.outputs):
                read.update(layer.inputs)
                kept.append(layer)
        self.layers = kept[::-1]

    def _split(self) -> None:
        """Give every reader of a blob its own copy."""
        counts = Counter(blob for layer in self.layers for blob in layer.inputs)
        taken: Counter[str] = Counter()
        found: list[_Layer] = []
        for layer in self.layers:
            layer.inputs = [_part(blob, taken) if counts[blob] > 1 else blob for blob in layer.inputs]
            found.append(layer)
            found += [_split_of(blob, counts[blob]) for blob in layer.outputs if counts[blob] > 1]
        self.layers = found

    # ------------------------------------------------------------------------------------------------- values

    def blob(self, value: ir.Value | None) -> str:
        """The blob of a value; its quantizers, and constants, are written when they are first read."""
        assert value is not None
        chain: list[ir.Node] = []
        while value not in self._blobs and value is not None:
            node = value.producer()
            if (
                node is None
                or node.op_type not in ("QuantizeLinear", "DequantizeLinear")
                or self.constant(value) is not None
            ):
                break
            chain.append(node)
            value = node.inputs[0]
        assert value is not None
        if value not in self._blobs:
            self._hold(value)
        for node in reversed(chain):
            self._quantizer(node)
        return self._blobs[chain[0].outputs[0] if chain else value]

    def constant(self, value: ir.Value | None) -> Array | None:
        """The numbers of a stored value, or one computed from stored values; ``None`` for others."""
        return None if value is None else self._folded.get(value, array_of(value))

    def _fold(self, node: ir.Node) -> bool:
        """Compute an operator on stored weights, if all its operands are stored."""
        arrays = [array for array in map(self.constant, node.inputs) if array is not None]
        if node.op_type not in _FOLDS or len(arrays) < len(node.inputs):
            return False
        self._folded[node.outputs[0]] = _FOLDS[node.op_type](node, arrays)
        return True

    def _hold(self, value: ir.Value) -> None:
        array = self.constant(value)
        shape = () if array is None else array.shape[1:] if array.shape[:1] == (1,) else array.shape
        if array is None or len(shape) > 3:
            problem = "it is computed, or a constant of four axes, which has no form in ncnn here"
            raise ExportError(str(value.name), problem, _REMEDY)
        sizes = dict(zip((0, 1, 2), shape[::-1] or (1,), strict=False))
        self._put("MemoryData", value, [], sizes, np.ascontiguousarray(array, np.float32).tobytes())

    def _put(
        self, kind: str, value: ir.Value, inputs: Sequence[str], options: dict[int, Any], content: bytes = b""
    ) -> None:
        """Add a layer that makes ``value``."""
        self._blobs[value] = blob = _word(value)
        self.layers.append(_Layer(kind, f"{kind}_{blob}", list(inputs), [blob], options, content))

    def _quantizer(self, node: ir.Node) -> None:
        """QuantizeLinear as codes counted from the zero point, in float; DequantizeLinear as their product with the scale."""
        made, grid = node.outputs[0], _grid(node)
        if made in self._blobs:
            return
        if grid.scale.size != 1:
            raise ExportError(
                str(node.name), "its activation has several scales, which ncnn has no layers for", _REMEDY
            )
        source, name, step = self.blob(node.inputs[0]), _word(made), float(grid.scale.reshape(()))
        if node.op_type == "DequantizeLinear":
            self._put("BinaryOp", made, [source], {0: _PRODUCT, 1: 1, 2: step})
            return
        low, high = (float(end - int(grid.zero.reshape(()))) for end in grid.ends)
        for kind, options in (("BinaryOp", {0: _RATIO, 1: 1, 2: step}), ("UnaryOp", {0: _ROUND})):
            self.layers.append(_Layer(kind, f"{kind}_{name}", [source], [f"{name}_{kind}"], options))
            source = f"{name}_{kind}"
        self._put("Clip", made, [source], {0: low, 1: high})

    # ------------------------------------------------------------------------------------------------- operators

    def _add(self, node: ir.Node) -> None:
        write = _LAYERS.get(node.op_type) if not node.domain else None
        if write is None:
            problem = f"there is no form of {node.op_type} in ncnn here"
            raise ExportError(f"{node.name} ({node.op_type})", problem, _REMEDY)
        before = len(self.layers)
        write(self, node)
        made = [
            layer.kind + " i8" * (layer.options.get(8, 0) > 0 and layer.kind in _ON_CODES)
            for layer in self.layers[before:]
        ]
        self.kernels[str(node.name)] = made[-1] if made else "Noop"

    def refuse(self, node: ir.Node, problem: str) -> ExportError:
        return ExportError(f"{node.name} ({node.op_type})", problem, _REMEDY)

    def stored(self, node: ir.Node, port: int) -> Array:
        """A constant operand."""
        found = self.constant(node.inputs[port]) if len(node.inputs) > port else None
        if found is None:
            raise self.refuse(node, f"its operand {port} is computed")
        return found

    def weight(self, node: ir.Node, turned: bool, groups: int) -> tuple[str, dict[int, Any], bytes, bytes, Array]:
        """Blob to read, options, weights and scales of a layer with a stored weight, and the weight itself in float."""
        weight, codes = self.stored(node, 1), self._codes(node, turned, groups)
        flat = np.ascontiguousarray(weight.T if turned else weight, np.float32)
        if codes is None:
            return self.blob(node.inputs[0]), {}, _FLOATS + flat.tobytes(), b"", flat
        stored, scales, step, source = codes
        held = _CODES + stored.tobytes() + b"\0" * (-stored.size % 4)
        tail = (1 / scales).astype(np.float32).tobytes() + np.float32(1 / step).tobytes()
        return self.blob(source), {8: 1 if groups > 1 else 2}, held, tail, flat

    def _codes(self, node: ir.Node, turned: bool, groups: int) -> tuple[Array, Array, float, ir.Value] | None:
        """Codes and scales of a weight, the scale of the input, and the value quantized there; ``None`` for a float layer."""
        data, weight = (_maker(value, "DequantizeLinear") for value in node.inputs[:2])
        quantizer = None if data is None else _maker(data.inputs[0], "QuantizeLinear")
        held = None if weight is None or weight.inputs[0] is None else array_of(weight.inputs[0])
        if data is None or weight is None or quantizer is None or held is None:
            return None
        grid, steps, source = _grid(data), _grid(weight), quantizer.inputs[0]
        whole = steps.centred(held)
        if source is None or not grid.is_narrow or np.abs(whole).max(initial=0) > _MOST:
            return None
        whole = np.ascontiguousarray((whole.T if turned else whole).astype(np.int8))
        scales = np.broadcast_to(steps.scale.reshape(-1), (len(whole),))
        scales = scales.reshape(len(whole) if groups == 1 else groups, -1)
        if (scales != scales[:, :1]).any():  # ncnn has one scale per group
            return None
        step = float(grid.scale.reshape(()))
        return whole, scales[:, 0], step, self._unclipped(source, step)

    def _unclipped(self, value: ir.Value, step: float) -> ir.Value:
        """``value`` before a Clip that the layer's own quantizer repeats."""
        node = value.producer()
        if node is None or node.op_type != "Clip" or len(node.inputs) != 3 or node.inputs[0] is None:
            return value
        ends = [self.constant(end) for end in node.inputs[1:]]
        same = all(
            end is not None and np.isclose(end.reshape(()), sign * _MOST * step, rtol=1e-5, atol=0)
            for end, sign in zip(ends, (-1, 1), strict=True)
        )
        return node.inputs[0] if same else value


@dataclass(frozen=True)
class _Grid:
    scale: Array
    zero: Array
    axis: int
    ends: tuple[int, int]

    @property
    def is_narrow(self) -> bool:
        """Whether a layer on codes can quantize its input to it."""
        return self.scale.size == 1 and not self.zero.any() and self.ends == (-_MOST - 1, _MOST)

    def _spread(self, array: Array, codes: Array) -> Array:
        shape = [-1 if i == self.axis % max(codes.ndim, 1) else 1 for i in range(codes.ndim)]
        return array.reshape(shape) if array.size > 1 else array.reshape(())

    def centred(self, codes: Array) -> Array:
        """Codes counted from the zero point."""
        return codes.astype(np.int64) - self._spread(self.zero, codes)

    def numbers(self, codes: Array) -> Array:
        """The dequantized codes."""
        return (self.centred(codes).astype(np.float32) * self._spread(self.scale, codes)).astype(np.float32)


def _grid(node: ir.Node) -> _Grid:
    """The grid of a QuantizeLinear or DequantizeLinear."""
    held = [array_of(value) if value is not None else None for value in node.inputs[1:3]]
    scale, zero = held[0], held[1] if len(held) > 1 else None
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" else node.outputs[0]
    kind = zero.dtype if zero is not None else None if codes is None or codes.dtype is None else codes.dtype.numpy()
    if scale is None or kind is None or node.attributes.get_int("block_size", False) or np.dtype(kind).kind not in "iu":
        problem = "its grid is computed, given per block, or of other codes than integers, which has no form in ncnn"
        raise ExportError(str(node.name), problem, _REMEDY)
    info = np.iinfo(kind)
    whole = np.zeros(scale.shape, np.int64) if zero is None else zero.astype(np.int64)
    return _Grid(scale, whole, node.attributes.get_int("axis", 1), (int(info.min), int(info.max)))


def _maker(value: ir.Value | None, kind: str) -> ir.Node | None:
    """The producer of a value, if it has this type."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def _word(value: ir.Value) -> str:
    """A name without spaces, which separate the words of a ``.param`` file."""
    return "_".join(str(value.name).split())


def _bias(writer: _Writer, node: ir.Node) -> Array | None:
    given = len(node.inputs) > 2 and node.inputs[2] is not None
    return writer.stored(node, 2).reshape(-1).astype(np.float32) if given else None


def _windows(node: ir.Node, keys: Sequence[int], size: Sequence[int]) -> dict[int, int]:
    """Options of kernel, strides and pads of a Conv or pool of two axes; ``keys``: their numbers in ncnn."""
    ints = {
        name: [int(n) for n in node.attributes[name].as_ints()]
        for name in ("strides", "pads", "dilations")
        if name in node.attributes
    }
    pads, (high, wide) = ints.get("pads", [0, 0, 0, 0]), size
    steps = ints.get("strides", [1, 1])
    values = (wide, high, steps[1], steps[0], pads[1], pads[3], pads[0], pads[2])
    return dict(zip(keys, values, strict=True))


def _conv(writer: _Writer, node: ir.Node) -> None:
    weight, groups = writer.stored(node, 1), node.attributes.get_int("group", 1) or 1
    padding = node.attributes.get_string("auto_pad", "NOTSET")
    if weight.ndim != 4 or padding not in ("NOTSET", "VALID"):
        raise writer.refuse(node, "it has other axes than two, or pads by auto_pad")
    source, options, held, tail, flat = writer.weight(node, False, groups)
    bias, dilations = _bias(writer, node), node.attributes.get_ints("dilations", [1, 1]) or [1, 1]
    options = {
        0: len(flat), **_windows(node, (1, 11, 3, 13, 4, 15, 14, 16), flat.shape[2:]), 2: dilations[1], 12: dilations[0],
        5: int(bias is not None), 6: flat.size, **({7: groups} if groups > 1 else {}), **options,
    }  # fmt: skip
    kind = "ConvolutionDepthWise" if groups > 1 else "Convolution"
    content = held + (b"" if bias is None else bias.tobytes()) + tail
    writer._put(kind, node.outputs[0], [source], options, content)


def _linear(writer: _Writer, node: ir.Node) -> None:
    turned = node.op_type == "MatMul" or not node.attributes.get_int("transB", False)
    scaled = any(node.attributes.get_float(name, 1.0) != 1 for name in ("alpha", "beta"))
    if scaled or node.attributes.get_int("transA", False) or writer.stored(node, 1).ndim != 2:
        raise writer.refuse(node, "ncnn has no such product")
    source, options, held, tail, flat = writer.weight(node, turned, 1)
    bias = _bias(writer, node)
    options = {0: len(flat), 1: int(bias is not None), 2: flat.size, **options}
    content = held + (b"" if bias is None else bias.tobytes()) + tail
    writer._put("InnerProduct", node.outputs[0], [source], options, content)


def _pool(writer: _Writer, node: ir.Node) -> None:
    size, mean = node.attributes["kernel_shape"].as_ints(), node.op_type == "AveragePool"
    odd = node.attributes.get_int("ceil_mode", 0) or node.attributes.get_string("auto_pad", "NOTSET") not in (
        "NOTSET",
        "VALID",
    )
    if len(size) != 2 or odd or any(n != 1 for n in node.attributes.get_ints("dilations", [1]) or [1]):
        raise writer.refuse(node, "ncnn's pools have two axes, round down, and have no dilations")
    options = {0: int(mean), **_windows(node, (1, 11, 2, 12, 3, 14, 13, 15), size), 5: 1}
    writer._put(
        "Pooling",
        node.outputs[0],
        [writer.blob(node.inputs[0])],
        options | {6: node.attributes.get_int("count_include_pad", 0)},
    )


def _mean(writer: _Writer, node: ir.Node) -> None:
    value, made = node.inputs[0], node.outputs[0]
    rank = None if value is None or value.shape is None else len(value.shape)
    axes = [2, 3]
    if node.op_type == "ReduceMean":
        given = writer.stored(node, 1) if len(node.inputs) > 1 else np.asarray(node.attributes.get_ints("axes", []))
        axes = sorted(int(a) % (rank or 4) for a in np.ravel(given))
    if axes != [2, 3] or rank not in (None, 4):
        raise writer.refuse(node, "ncnn's pool takes the mean of the last two of four axes")
    source, kept = writer.blob(value), node.op_type != "ReduceMean" or node.attributes.get_int("keepdims", True)
    if not kept:
        writer._put("Pooling", made, [source], {0: 1, 4: 1})
        return
    name = f"{_word(made)}_pooled"
    writer.layers.append(_Layer("Pooling", f"Pooling_{name}", [source], [name], {0: 1, 4: 1}))
    writer._put("Reshape", made, [name], {0: 1, 1: 1, 2: -1})


def _reshape(writer: _Writer, node: ir.Node) -> None:
    shape = None if node.outputs[0].shape is None else [n for n in node.outputs[0].shape][1:]
    given = writer.constant(node.inputs[1])
    lengths = (
        shape if given is None or (shape is not None and all(isinstance(n, int) for n in shape)) else given.ravel()[1:]
    )
    if lengths is None or len(lengths) > 3 or sum(not isinstance(n, int | np.integer) or n < 0 for n in lengths) > 1:
        raise writer.refuse(node, "its shape is computed, or has more than three axes beside the batch")
    sizes = [int(n) if isinstance(n, int | np.integer) else -1 for n in lengths]
    writer._put(
        "Reshape", node.outputs[0], [writer.blob(node.inputs[0])], dict(zip((0, 1, 2), sizes[::-1], strict=False))
    )


def _binary(writer: _Writer, node: ir.Node) -> None:
    operation, made = _BINARY[node.op_type], node.outputs[0]
    if len(node.inputs) != 2:
        if len(node.inputs) > 2:
            raise writer.refuse(node, "ncnn's sums have two operands here")
        writer._put("Noop", made, [writer.blob(node.inputs[0])], {})
        return
    number = writer.constant(node.inputs[1])
    if number is not None and number.size == 1:
        writer._put("BinaryOp", made, [writer.blob(node.inputs[0])], {0: operation, 1: 1, 2: float(number.reshape(()))})
        return
    writer._put("BinaryOp", made, [writer.blob(value) for value in node.inputs], {0: operation})


def _clip(writer: _Writer, node: ir.Node) -> None:
    ends = [-_LARGE, _LARGE]
    for port, name in ((1, "min"), (2, "max")):
        if name in node.attributes:
            ends[port - 1] = node.attributes[name].as_float()
        elif len(node.inputs) > port and node.inputs[port] is not None:
            ends[port - 1] = float(writer.stored(node, port).reshape(()))
    writer._put("Clip", node.outputs[0], [writer.blob(node.inputs[0])], {0: ends[0], 1: ends[1]})


def _along(writer: _Writer, node: ir.Node) -> None:
    """Write Concat or Softmax, with the axis counted without the batch."""
    axis = node.attributes.get_int("axis", -1)
    if axis == 0:
        raise writer.refuse(node, "it works along the batch, which ncnn does not have")
    axis = axis - 1 if axis > 0 else axis
    options = {0: axis} if node.op_type == "Concat" else {0: axis, 1: 1}
    writer._put(node.op_type, node.outputs[0], [writer.blob(value) for value in node.inputs], options)


def _plain(writer: _Writer, node: ir.Node) -> None:
    options: dict[int, Any] = {}
    kind = _PLAIN.get(node.op_type, "ReLU")
    if node.op_type == "LeakyRelu":
        options = {0: float(node.attributes.get_float("alpha", 0.01) or 0.0)}
    writer._put(kind, node.outputs[0], [writer.blob(node.inputs[0])], options)


def _hard(writer: _Writer, node: ir.Node) -> None:
    swish = node.op_type == "HardSwish"
    alpha = 1 / 6 if swish else node.attributes.get_float("alpha", 0.2)
    beta = 0.5 if swish else node.attributes.get_float("beta", 0.5)
    writer._put(
        node.op_type, node.outputs[0], [writer.blob(node.inputs[0])], {0: float(alpha or 0.0), 1: float(beta or 0.0)}
    )


#: operators between stored codes and those that read their numbers
_FOLDS: dict[str, Callable[[ir.Node, list[Array]], Array]] = {
    "Constant": lambda node, given: node.attributes["value"].as_tensor().numpy(),
    "DequantizeLinear": lambda node, given: _grid(node).numbers(given[0]),
    "Cast": lambda node, given: given[0].astype(node.outputs[0].dtype.numpy() if node.outputs[0].dtype else np.float32),
    "Mul": lambda node, given: given[0] * given[1],
    "Reshape": lambda node, given: given[0].reshape([int(n) for n in given[1]]),
}
_ON_CODES = frozenset(("Convolution", "ConvolutionDepthWise", "InnerProduct"))
_LAYERS: dict[str, Callable[[_Writer, ir.Node], None]] = {
    "Conv": _conv, "Gemm": _linear, "MatMul": _linear, "MaxPool": _pool, "AveragePool": _pool, "ReduceMean": _mean,
    "GlobalAveragePool": _mean, "Reshape": _reshape, "Clip": _clip, "Concat": _along, "Softmax": _along, "Relu": _plain,
    "LeakyRelu": _plain, "HardSwish": _hard, "HardSigmoid": _hard, **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_PLAIN, _plain),
}  # fmt: skip


def to_ncnn(model: ir.Model) -> NcnnFile:
    """Convert an ONNX model to ncnn's format, for one sample at a time.

    Args:
        model: QDQ or float, without bodies; the first axis of its inputs and outputs counts samples.

    Raises:
        ExportError: an operator, or an operand, has no form in ncnn here; it is named.
    """
    if next(model.graph.subgraphs(), None) is not None:
        raise ExportError(str(model.graph.name), "it holds If, Loop or Scan, which have no form there", _REMEDY)
    return _Writer(model).write()


@checks_arguments
def write_ncnn(path: str | Path, folder: str | Path) -> NcnnFile:
    """Convert an ONNX file, written by an export or another tool, to ``<stem>.ncnn.param`` and ``<stem>.ncnn.bin``.

    Args:
        path: of the ONNX file. Layers whose input has a symmetric int8 grid (``target="ncnn"``) are computed on codes.
        folder: of the files, created if missing.

    Raises:
        ExportError: as :func:`to_ncnn`, or the folder cannot be written.
    """
    made, stem = to_ncnn(load(Path(path))), Path(path).stem
    with atomic_files(folder, name=f"{stem}.ncnn.param", create=True) as staging:
        (staging / f"{stem}.ncnn.param").write_text(made.param, encoding="utf-8")
        (staging / f"{stem}.ncnn.bin").write_bytes(made.content)
    return made


def open_model(path: Path, threads: int, reference: bool) -> Session:
    """Open an ONNX file as a session in ncnn, which runs samples one at a time.

    Args:
        path: of the file.
        threads: 0 for all.
        reference: not used: ncnn has one set of kernels.
    """
    made = to_ncnn(load(path))
    net = _loaded(made, path, threads)

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        given = {blob: np.asarray(feeds[name], np.float32) for name, blob in made.inputs.items()}
        count = len(next(iter(given.values())))
        rows = [_run_sample(net, {blob: x[i] for blob, x in given.items()}, made.outputs) for i in range(count)]
        return {name: np.stack([row[name] for row in rows]) for name in made.outputs}

    return Session(run, made.kernels)


def _loaded(made: NcnnFile, path: Path, threads: int) -> Any:
    """Load a net of ncnn."""
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = threads or ncnn.get_cpu_count()
    # float32, so that values that are rounded next are those of the file
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = net.opt.use_bf16_storage = False
    with temporary_room(), tempfile.TemporaryDirectory() as folder:
        param, content = Path(folder, "net.param"), Path(folder, "net.bin")
        param.write_text(made.param)
        content.write_bytes(made.content)
        if net.load_param(str(param)) or net.load_model(str(content)):
            raise ExportError(str(path), "ncnn does not load what is written for it", _REMEDY)
    return net


def _run_sample(net: Any, inputs: Mapping[str, Array], outputs: Mapping[str, str]) -> dict[str, Array]:
    """Outputs of one sample by their names in the model."""
    import ncnn

    extractor = net.create_extractor()
    for blob, x in inputs.items():  # layers may write into their input
        extractor.input(blob, ncnn.Mat(np.ascontiguousarray(x)).clone())
    return {name: np.array(extractor.extract(blob)[1]) for name, blob in outputs.items()}
