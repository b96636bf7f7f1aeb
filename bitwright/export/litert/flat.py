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
from numpy.typing import NDArray

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
        """Whether all zero points are 0."""
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
    """A LiteRT model under construction.

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
        """``base``, or a similar name where another tensor has it."""
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
        """Give ``tensor`` exactly this name; one that has it already gets another, except for the inputs and outputs ``ends``.

        An input that the model returns as it is has one name on both sides.
        """
        for i, other in enumerate(self.tensors):
            if other.name == name.encode() and i != tensor and i not in ends:
                other.name = self.unique(f"{name}_inner").encode()
        self.tensors[tensor].name = name.encode()

    def constant(self, name: str, array: Array) -> int:
        """A constant argument of kernels: shapes, axes, paddings; equal ones are stored once."""
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
    """A buffer aligned to 16 bytes, which the generated ``Pack`` does not ensure."""

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
