"""The flatbuffer of a LiteRT model, built with the format's own schema, and its fixed-point rescaling.

A real factor becomes a 32-bit mantissa and a power of two. The product with a sum of 32 bits is rounded twice: to the upper 32
bits of the product, and by the shift to the right that follows. All functions are exact on integers.

Source: gemmlowp, ``fixedpoint/fixedpoint.h``; Jacob et al. 2018, arXiv:1712.05877, section 2.2; ``tensorflow/lite/kernels/
internal/common.h`` for the form with 64-bit sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitwright.errors import ConfigError, ExportError

Array = NDArray[Any]
IDENTIFIER = b"TFL3"
_LIMIT = 2**31 - 1  # offsets of a flatbuffer are signed 32-bit numbers
_ALIGNMENT = 16  # of tensors' bytes, as the schema demands of them

_TYPES = {
    "float32": "FLOAT32", "float16": "FLOAT16", "float64": "FLOAT64", "int8": "INT8", "int16": "INT16", "int32": "INT32",
    "int64": "INT64", "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip
# The version of an operator that has what is written here, where that is not the first.
_VERSIONS: dict[str, tuple[int, int]] = {  # operator -> (of floats, of integers)
    "ADD": (1, 2), "AVERAGE_POOL_2D": (1, 2), "BATCH_MATMUL": (1, 2), "BROADCAST_TO": (2, 3), "CONCATENATION": (1, 2),
    "CONV_2D": (1, 3), "DEPTHWISE_CONV_2D": (2, 3), "DEQUANTIZE": (2, 2), "FULLY_CONNECTED": (5, 5), "GATHER": (2, 2),
    "LEAKY_RELU": (1, 2), "LOGISTIC": (1, 2), "MAXIMUM": (1, 2), "MAX_POOL_2D": (1, 2), "MEAN": (1, 2), "MINIMUM": (1, 2),
    "MUL": (1, 2), "PAD": (1, 2), "QUANTIZE": (1, 2), "RELU": (1, 2), "RELU6": (1, 2), "RESHAPE": (1, 1),
    "RESIZE_BILINEAR": (3, 3), "RESIZE_NEAREST_NEIGHBOR": (3, 3), "SLICE": (1, 2), "SOFTMAX": (1, 2), "SPLIT": (1, 2),
    "STRIDED_SLICE": (1, 2), "SUB": (1, 2), "SUM": (1, 2), "TANH": (1, 2), "TRANSPOSE": (1, 2), "TRANSPOSE_CONV": (3, 3),
    "GELU": (1, 2), "PACK": (1, 2), "REDUCE_MAX": (1, 2), "REDUCE_MIN": (1, 2), "HARD_SWISH": (1, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Scales of integer codes in a file: ``value = (code - zero_point) * scale``.

    Attributes:
        dtype: ``"int8"``, ``"int16"``, ``"int32"`` or ``"int64"``.
        scale, zero_point: one number each, or one per index of ``axis``.
        axis: in the order of the ONNX tensor; ``None`` for one scale.
    """

    dtype: str
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    axis: int | None = None

    @property
    def per_tensor(self) -> bool:
        """Whether one scale holds for all codes."""
        return self.axis is None

    @property
    def symmetric(self) -> bool:
        """Whether code 0 stands for 0 everywhere."""
        return not any(self.zero_point)


def schema() -> Any:
    """The generated schema module of the package ``ai-edge-litert``.

    Raises:
        ConfigError: it is not installed, with the extra.
    """
    try:
        from ai_edge_litert import schema_py_generated
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("ai_edge_litert", "flatbuffers"):
            raise
        problem = "the package ai_edge_litert, whose schema LiteRT files are written with, is not installed"
        raise ConfigError("format 'tflite'", problem, "pip install 'bitwright[litert]'") from error
    return schema_py_generated


@dataclass
class FlatModel:
    """A LiteRT model that is being written.

    Attributes:
        schema: the generated module.
    """

    schema: Any = field(default_factory=schema)

    def __post_init__(self) -> None:
        self.buffers: list[Array | None] = [None]
        self.tensors: list[Any] = []
        self.operators: list[Any] = []
        self._codes: dict[tuple[int, int], int] = {}
        self._names: dict[str, int] = {}
        self._kept: dict[tuple[Any, ...], int] = {}

    def unique(self, base: str) -> str:
        """``base``, or nearly, where another tensor has that name."""
        name = base
        while count := self._names.get(name, 0):
            self._names[name] = count + 1
            name = f"{name}_{count}"
        self._names[name] = 1
        return name

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        grid: Grid | None = None,
        *,
        axis: int | None = None,
        free: Sequence[bool] = (),
        data: Array | None = None,
    ) -> int:
        """A new tensor; its index.

        Args:
            name: as wished; made unique.
            shape: as stored; 1 on free axes.
            dtype: numpy's name of the type.
            grid: of codes.
            axis: where the axis of ``grid`` lies in ``shape``.
            free: which axes take any length.
            data: of a constant, of ``shape``.
        """
        found = self.schema.TensorT()
        found.name = self.unique(name).encode()
        found.shape, found.hasRank = np.asarray(shape, np.int32), True
        found.type = getattr(self.schema.TensorType, _TYPES[dtype])
        if any(free):
            found.shapeSignature = np.asarray([-1 if f else n for n, f in zip(shape, free, strict=True)], np.int32)
        if data is not None:
            found.buffer = len(self.buffers)
            self.buffers.append(np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8))
        if grid is not None:
            quantization = self.schema.QuantizationParametersT()
            quantization.scale = np.asarray(grid.scale, np.float32)
            quantization.zeroPoint = np.asarray(grid.zero_point, np.int64)
            quantization.quantizedDimension = axis or 0
            found.quantization = quantization
        self.tensors.append(found)
        return len(self.tensors) - 1

    def rename(self, tensor: int, name: str, ends: Collection[int] = ()) -> None:
        """Give ``tensor`` exactly this name; one that has it already gets another, but for the inputs and outputs ``ends``.

        An input that the model returns as it is has one name on both sides.
        """
        for i, other in enumerate(self.tensors):
            if other.name == name.encode() and i != tensor and i not in ends:
                other.name = self.unique(f"{name}_inner").encode()
        self.tensors[tensor].name = name.encode()

    def constant(self, name: str, array: Array) -> int:
        """A constant that kernels read as an argument: shapes, axes, paddings; equal ones are kept once."""
        array = np.asarray(array)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._kept:
            self._kept[key] = self.tensor(name, array.shape, array.dtype.name, data=array)
        return self._kept[key]

    def op(
        self,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Append an operator.

        Args:
            name: of the builtin operator.
            inputs, outputs: indices of tensors; -1 for an input that is left out.
            options: its options table's name under ``"table"``, and fields of it.
            more: fields of the operator itself.
        """
        known = self.schema
        code = getattr(known.BuiltinOperator, name)
        integers = {known.TensorType.INT8, known.TensorType.INT16}
        narrow = any(self.tensors[i].type in integers for i in (*inputs, *outputs) if i >= 0)
        version = _VERSIONS.get(name, (1, 1))[narrow]
        found = known.OperatorT()
        found.opcodeIndex = self._codes.setdefault((code, version), len(self._codes))
        found.inputs, found.outputs = np.asarray(inputs, np.int32), np.asarray(outputs, np.int32)
        if options is not None:
            fields = dict(options)
            table = fields.pop("table")
            found.builtinOptionsType = getattr(known.BuiltinOptions, table)
            found.builtinOptions = getattr(known, f"{table}T")()
            for key, value in fields.items():
                assert hasattr(found.builtinOptions, key), (table, key)
                setattr(found.builtinOptions, key, value)
        for key, value in more.items():
            setattr(found, key, value)
        self.operators.append(found)

    def finish(self, inputs: Mapping[str, int], outputs: Mapping[str, int], metadata: Mapping[str, str]) -> bytes:
        """The file.

        Args:
            inputs, outputs: name in the signature -> tensor.
            metadata: name -> text.

        Raises:
            ExportError: it would exceed 2 GiB, which the format cannot hold.
        """
        known = self.schema
        model = known.ModelT()
        model.version, model.description = 3, b"bitwright"
        model.metadata = []
        for name, text in metadata.items():
            entry = known.MetadataT()
            entry.name, entry.buffer = name.encode(), len(self.buffers)
            self.buffers.append(np.frombuffer(text.encode(), np.uint8))
            model.metadata.append(entry)
        size = sum(array.nbytes for array in self.buffers if array is not None)
        if size > _LIMIT:
            problem = f"it holds {size / 2**30:.1f} GiB, and a LiteRT file at most 2"
            raise ExportError("model", problem, "quantize more of its weights, or export format='onnx'")
        graph = known.SubGraphT()
        graph.name, graph.tensors, graph.operators = b"main", self.tensors, self.operators
        graph.inputs, graph.outputs = list(inputs.values()), list(outputs.values())
        model.subgraphs, model.operatorCodes = [graph], [self._operator_code(*key) for key in self._codes]
        model.signatureDefs = [self._signature(inputs, outputs)]
        model.buffers = [_aligned(known, array) for array in self.buffers]
        return pack(model)

    def _operator_code(self, code: int, version: int) -> Any:
        found = self.schema.OperatorCodeT()
        found.builtinCode, found.version = code, version
        found.deprecatedBuiltinCode = min(code, 127)  # 127 tells old readers to look at the new field
        return found

    def _signature(self, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> Any:
        found = self.schema.SignatureDefT()
        found.signatureKey, found.subgraphIndex = b"serving_default", 0
        found.inputs, found.outputs = (
            [self._mapped(name, tensor) for name, tensor in side.items()] for side in (inputs, outputs)
        )
        return found

    def _mapped(self, name: str, tensor: int) -> Any:
        found = self.schema.TensorMapT()
        found.name, found.tensorIndex = name.encode(), tensor
        return found


def pack(model: Any) -> bytes:
    """A ``ModelT`` as the bytes of a file."""
    import flatbuffers

    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def _aligned(known: Any, array: Array | None) -> Any:
    """A buffer whose bytes lie at a multiple of 16, which the generated ``Pack`` does not see to."""

    class Aligned(known.BufferT):
        def Pack(self, builder: Any) -> int:  # the generated module's name
            if self.data is not None:
                builder.StartVector(1, len(self.data), _ALIGNMENT)
                builder.head -= len(self.data)
                builder.Bytes[builder.head : builder.head + len(self.data)] = self.data.tobytes()
                self.data_at = builder.EndVector()
            known.BufferStart(builder)
            if self.data is not None:
                known.BufferAddData(builder, self.data_at)
            return int(known.BufferEnd(builder))

    found = Aligned()
    found.data = array
    return found


Integers = NDArray[np.int64]
_MANTISSA = 31  # fractional bits
_NARROW = 16  # that the form for sums of 64 bits leaves away


def quantize_multiplier(factor: ArrayLike) -> tuple[Integers, Integers]:
    """Positive factors as ``mantissa * 2 ** (shift - 31)``.

    Args:
        factor: float64, of any shape.

    Returns:
        The mantissa, from ``2 ** 30`` to ``2 ** 31 - 1`` (0 of factors below ``2 ** -32``), and the shift.

    Example:
        >>> [int(part) for part in quantize_multiplier(0.25)]
        [1073741824, -1]
    """
    fraction, exponent = np.frexp(np.asarray(factor, np.float64))
    mantissa = np.floor(fraction * (1 << _MANTISSA) + 0.5).astype(np.int64)
    full = mantissa == 1 << _MANTISSA
    mantissa, shift = np.where(full, mantissa >> 1, mantissa), exponent.astype(np.int64) + full
    gone = shift < -_MANTISSA
    return np.where(gone, 0, mantissa), np.where(gone, 0, shift)


def high_product(a: Any, b: Any) -> Integers:
    """The upper half of ``2 * a * b`` of 32-bit integers, rounded to nearest, a half upwards."""
    product = np.asarray(a, np.int64) * np.asarray(b, np.int64)
    half = np.int64(1) << (_MANTISSA - 1)
    return _truncated(product + np.where(product >= 0, half, 1 - half), _MANTISSA)


def _truncated(values: Integers, bits: int) -> Integers:
    """``values / 2 ** bits`` rounded towards zero."""
    return np.where(values >= 0, values >> bits, -(-values >> bits))


def rounded_shift(values: Any, bits: Any) -> Integers:
    """``values / 2 ** bits``, rounded to nearest, a half away from zero."""
    values, bits = np.asarray(values, np.int64), np.asarray(bits, np.int64)
    mask = (np.int64(1) << bits) - 1
    return np.asarray((values >> bits) + ((values & mask) > (mask >> 1) + (values < 0)), np.int64)


def rescaled(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """``sums * mantissa * 2 ** (shift - 31)`` with two roundings.

    Args:
        sums: of 32 bits.
        mantissa, shift: of :func:`quantize_multiplier`; broadcast against ``sums``.

    Example:
        >>> int(rescaled(1, *quantize_multiplier(0.3))), int(rescaled(1, *quantize_multiplier(0.2)))
        (1, 0)
    """
    shift = np.asarray(shift, np.int64)
    left = np.asarray(sums, np.int64) << np.maximum(shift, 0)
    return rounded_shift(high_product(left, mantissa), np.maximum(-shift, 0))


def rescaled_once(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """The same with one rounding of the whole product, a half upwards."""
    bits = _MANTISSA - np.asarray(shift, np.int64)
    product = np.asarray(sums, np.int64) * np.asarray(mantissa, np.int64)
    return np.asarray((product + (np.int64(1) << (bits - 1))) >> bits, np.int64)


def rescaled_wide(sums: Any, mantissa: Any, shift: Any) -> Integers:
    """The same for sums of 64 bits, beside activations of 16: a mantissa of 15 bits, and one rounding, a half upwards."""
    kept = _narrowed(np.asarray(mantissa, np.int64))
    bits = _MANTISSA - _NARROW - np.asarray(shift, np.int64)
    return np.asarray((np.asarray(sums, np.int64) * kept + (np.int64(1) << (bits - 1))) >> bits, np.int64)


def _narrowed(mantissa: Integers) -> Integers:
    """A mantissa of 31 bits as one of 15."""
    return np.asarray(np.minimum((mantissa + (1 << (_NARROW - 1))) >> _NARROW, 0x7FFF), np.int64)


def rescaling_error(factor: ArrayLike) -> float:
    """The most by which :func:`rescaled` lies off the rounded product with one of ``factor``, before its last rounding.

    The first rounding is to multiples of ``2 ** shift``: half of that, where it shifts to the right.

    Example:
        >>> rescaling_error(0.3), rescaling_error(1.7)
        (0.25, 0.0)
    """
    shift = quantize_multiplier(factor)[1]
    return float(np.max(np.where(shift < 0, np.exp2(shift - 1.0), 0.0), initial=0.0))


def wide_rescaling_error(factor: ArrayLike, largest: float) -> float:
    """The most by which the shorter mantissa of :func:`rescaled_wide` moves results of size ``largest``."""
    mantissa, shift = quantize_multiplier(factor)
    kept = _narrowed(mantissa)
    exact = np.asarray(factor, np.float64)
    stands = kept * np.exp2(shift - float(_MANTISSA - _NARROW))
    return float(np.max(np.abs(stands - exact) / exact, initial=0.0)) * largest
