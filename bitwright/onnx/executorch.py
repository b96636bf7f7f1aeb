"""ExecuTorch: an ONNX model, quantized (QDQ) or float, lowered to XNNPACK and run.

ExecuTorch reads programs of ``torch.export``, not ONNX files. The model's operators are called as torch functions, its
quantizers as those of ``quantized_decomposed``; the program is captured for the shapes that a run has, lowered, and executed.
Codes are int8 there: the zero point of unsigned grids moves by 128, the numbers on the grid stay. What only moves data gets the
quantizer of its input after it, which changes no value: XNNPACK computes on codes only what has quantizers on both sides.
Every reader of an activation dequantizes its codes for itself: the pass of ExecuTorch 1.5 that inserts copies in another layout
(``ChannelsLastTaggedReshapePass``) gives the copy for one reader to all readers of a dequantizer, whatever layout these take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.errors import ExportError
from bitwright.export.files.onnx_file import array_of, load
from bitwright.onnx.to_torch import as_torch
from bitwright.runtimes.adapters import Session

Array = NDArray[Any]
Kept = Mapping[ir.Value, Any]

_OPS = torch.ops.quantized_decomposed
#: they return values of their input, or maxima of them
_MOVES = frozenset((
    "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "MaxPool", "Identity", "Expand", "Split", "Gather",
    "DepthToSpace",
))  # fmt: skip
#: operators whose other inputs say how, not what
_HOW = frozenset((
    "Reshape", "Squeeze", "Unsqueeze", "Slice", "Expand", "Split", "Pad", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin",
    "Clip",
))  # fmt: skip
_SHAPES = ("Shape", "Size")
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_WIDEST = 16  # bits of codes
_REMEDY = "leave that part in float and outside of the file, or compare with another runtime"


@dataclass(frozen=True)
class Grid:
    """Scale and zero point of an activation, and the ends of its codes in the file."""

    scale: Array
    zero_point: Array
    axis: int
    low: int
    high: int

    @property
    def shift(self) -> int:
        """The offset that makes the codes signed."""
        return (self.high + 1) // 2 if self.low == 0 else 0

    @property
    def type(self) -> torch.dtype:
        """The torch dtype of the codes."""
        return torch.int16 if self.high - self.low > 255 else torch.int8

    @property
    def ends(self) -> tuple[Any, ...]:
        """Lowest and highest code, and the torch dtype of the codes."""
        return self.low - self.shift, self.high - self.shift, self.type

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of torch's per-tensor operators."""
        return float(self.scale.reshape(())), int(self.zero_point.reshape(())) - self.shift, *self.ends

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Scales and zero points of several channels."""
        scales = torch.from_numpy(self.scale.reshape(-1).astype(np.float32))
        return scales, torch.from_numpy(self.zero_point.reshape(-1).astype(np.int64) - self.shift)

    def codes(self, values: Array) -> Array:
        """The file's codes of values on the grid."""
        shape = [-1 if i == self.axis else 1 for i in range(values.ndim)] if self.scale.size > 1 else ()
        scale, zero = self.scale.reshape(shape), self.zero_point.reshape(shape).astype(np.int64)
        return np.clip(np.rint(values / scale) + zero, self.low, self.high)


def _grid_of(node: ir.Node, constant: Callable[[ir.Value | None], Array | None]) -> Grid:
    """The grid of a QuantizeLinear or DequantizeLinear."""
    scale, zero = constant(node.inputs[1]), constant(node.inputs[2]) if len(node.inputs) > 2 else None
    codes = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
    held = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2] is not None else codes
    dtype = None if held is None else held.dtype
    if scale is None or dtype is None or node.attributes.get_int("block_size", 0) > 0:
        raise ExportError(
            str(node.name), "its grid is computed, or given per block, which has no operators there", _REMEDY
        )
    if not dtype.is_integer() or dtype.bitwidth > _WIDEST:
        raise ExportError(
            str(node.name), f"its codes are {dtype.name.lower()}, for which there are no operators", _REMEDY
        )
    zeros = np.zeros(scale.shape, np.int64) if zero is None else zero
    low = -(1 << (dtype.bitwidth - 1)) if dtype.is_signed() else 0
    return Grid(scale, zeros, node.attributes.get_int("axis", 1), low, low + (1 << dtype.bitwidth) - 1)


class Program(nn.Module):
    """An ONNX model as a module that ``torch.export`` captures.

    Args:
        model: without bodies.
        feeds: of the shapes that the program is for.

    Attributes:
        inputs: names of the inputs, in the order of ``forward``.
        outputs: graph output -> grid whose codes it holds, ``None`` for other values.

    Raises:
        ExportError: an operator has no form there.
    """

    def __init__(self, model: ir.Model, feeds: Mapping[str, Array]) -> None:
        super().__init__()
        self.inputs = [str(v.name) for v in model.graph.inputs if not v.is_initializer()]
        self._entries = [v for v in model.graph.inputs if not v.is_initializer()]
        self._returned = list(model.graph.outputs)
        self._opset = model.opset_imports.get("", 1)
        self._fixed: dict[ir.Value, Array] = {}
        for value in model.graph.initializers.values():
            array = array_of(value)
            assert array is not None
            self._fixed[value] = array
        self._grids: dict[ir.Value, Grid] = {}
        self._tables: dict[ir.Value, str] = {}
        self._weights: dict[ir.Value, Grid] = {}
        self._turned: set[ir.Value] = set()  # matrices that are stored output by output, as linear layers read them
        self._scales: dict[ir.Value, tuple[str, str]] = {}
        self._nodes = list(model.graph)
        self._fused: dict[ir.Node, ir.Node] = {}  # product -> the addition of its bias
        for node in self._nodes:
            self._prepare(node)
        for node in self._nodes:
            self._fuse(node)
        self._settle(feeds)
        self.outputs = {str(v.name): self._coded(v) for v in self._returned}

    def _constant(self, value: ir.Value | None) -> Array | None:
        return None if value is None else self._fixed.get(value)

    def _prepare(self, node: ir.Node) -> None:
        """Read the grids, stored weights and biases of a node."""
        source = node.inputs[0] if node.inputs else None
        if node.op_type == "QuantizeLinear":
            self._grids[node.outputs[0]] = grid = _grid_of(node, self._constant)
            self._store_scales(node.outputs[0], grid)
        elif node.op_type == "DequantizeLinear":
            codes = self._constant(source)
            if codes is not None:
                self._hold(node, codes)
            elif source in self._grids:
                self._grids[node.outputs[0]] = self._grids[source]
                self._scales.update({node.outputs[0]: self._scales[source]} if source in self._scales else {})
        elif node.op_type in _MOVES and source in self._grids and self._grids[source].scale.size == 1:
            self._grids.update((v, self._grids[source]) for v in node.outputs if not _is_quantized(v))

    def _fuse(self, node: ir.Node) -> None:
        """Record the addition of a stored bias to a product with a stored matrix."""
        uses = list(node.outputs[0].uses()) if node.op_type == "MatMul" else []
        add = uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None
        if add is None or add.op_type != "Add" or not self._is_matrix(node.inputs[1]):
            return
        bias = self._constant(add.inputs[1 - uses[0].idx])
        if bias is not None and bias.ndim == 1:
            self._fused[node] = add

    def _is_matrix(self, value: ir.Value | None) -> bool:
        return value in self._weights and getattr(self, self._tables[value]).dim() == 2

    def _hold(self, node: ir.Node, codes: Array) -> None:
        """Store codes of a weight, or the numbers of a bias."""
        value, held = node.outputs[0], node.inputs[0]
        wide = held is not None and held.dtype in (ir.DataType.INT32, ir.DataType.INT64)
        if wide:
            scale = self._constant(node.inputs[1])
            assert scale is not None
            self._fixed[value] = (codes.astype(np.float32) * scale).astype(np.float32)
            return
        grid = _grid_of(node, self._constant)
        if codes.ndim == 2 and all(use.idx == 1 and _reads_columns(use.node) for use in value.uses()):
            self._turned.add(value)
            codes, grid = codes.T, replace(grid, axis=1 - grid.axis % 2)
        self._weights[value] = grid
        self._store(value, torch.from_numpy(codes.astype(np.int64) - grid.shift).to(grid.type))
        self._store_scales(value, grid)

    def _store_scales(self, value: ir.Value, grid: Grid) -> None:
        """Store scales of channels as buffers, where lowering looks for them."""
        if grid.scale.size > 1:
            self._scales[value] = names = f"scales_{len(self._scales)}", f"zeros_{len(self._scales)}"
            for name, tensor in zip(names, grid.tensors(), strict=True):
                self.register_buffer(name, tensor)

    def _store(self, value: ir.Value, tensor: Tensor) -> None:
        self._tables[value] = name = f"held_{len(self._tables)}"
        self.register_buffer(name, tensor)

    def _settle(self, feeds: Mapping[str, Array]) -> None:
        """Compute once the values that depend only on shapes and constants."""
        with torch.no_grad():
            self._run([torch.from_numpy(np.array(feeds[name])) for name in self.inputs], settle=True)
        for value, array in self._fixed.items():
            if value not in self._tables and any(use.node.op_type not in _QUANTIZERS for use in value.uses()):
                self._store(value, torch.from_numpy(np.array(array)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the graph, with dequantized codes."""
        known = self._run(inputs)
        return tuple(self._tensor(value, known) for value in self._returned)

    def _run(self, inputs: Sequence[Tensor], settle: bool = False) -> dict[ir.Value, Tensor]:
        known: dict[ir.Value, Tensor] = dict(zip(self._entries, inputs, strict=True))
        for node in self._nodes:
            outputs = [v for v in node.outputs if v.name]
            if self._is_stored(node):
                continue
            if node.op_type in _SHAPES:
                self._note_shape(node, known)
                continue
            made = self._call(node, known, len(outputs))
            if settle and self._fixed.keys() >= {v for v in node.inputs if v is not None}:
                self._fixed.update((v, t.numpy()) for v, t in zip(outputs, made, strict=True))
            else:
                known.update(zip(self._fused.get(node, node).outputs, made, strict=False))
        return known

    def _is_stored(self, node: ir.Node) -> bool:
        """Whether a node's results are stored, or computed by the product before it."""
        return node in self._fused.values() or all(
            v in self._fixed or v in self._weights for v in node.outputs if v.name
        )

    def _note_shape(self, node: ir.Node, known: Mapping[ir.Value, Tensor]) -> None:
        source = node.inputs[0]
        assert source is not None
        shape = self._tensor(source, known).shape
        part = shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(shape))]
        self._fixed[node.outputs[0]] = np.array(part if node.op_type == "Shape" else shape.numel(), np.int64)

    def _call(self, node: ir.Node, known: Mapping[ir.Value, Tensor], count: int) -> Sequence[Tensor]:
        if node.op_type in _QUANTIZERS:
            source = node.inputs[0]
            assert source is not None
            if node.op_type == "QuantizeLinear":
                return [self._quantized(self._tensor(source, known), node.outputs[0])]
            codes = self._held(source, known)
            return [codes if source in self._grids else self._of_codes(codes, node)]
        linear = self._linear(node, known)
        if linear is not None:
            return [linear]
        made = self._function(node, count)([self._argument(node, port, known) for port in range(len(node.inputs))])
        return [
            self._quantized(tensor, value) if value in self._grids else tensor
            for value, tensor in zip(node.outputs, made, strict=False)
        ]

    def _of_codes(self, codes: Tensor, node: ir.Node) -> Tensor:
        """Dequantize codes among the model's inputs."""
        grid = _grid_of(node, self._constant)
        shape = [-1 if i == grid.axis % codes.dim() else 1 for i in range(codes.dim())] if grid.scale.size > 1 else []
        scale, zero = (torch.from_numpy(np.array(a, np.float32)).reshape(shape) for a in (grid.scale, grid.zero_point))
        return (codes.float() - zero) * scale

    def _function(self, node: ir.Node, count: int) -> Callable[[Sequence[Any]], Sequence[Tensor]]:
        if node.op_type == "Clip" and not node.attributes:
            return _clipped
        attrs: dict[str, Any] = {a.name: a.value for a in node.attributes.values()}
        attrs |= {"opset": self._opset, "outputs": len(node.outputs)}
        function = None if node.domain else as_torch(node.op_type, attrs, count)
        if function is None:
            problem = f"there is no form of {node.op_type} with these attributes in torch here"
            raise ExportError(f"{node.name} ({node.op_type})", problem, _REMEDY)
        return function

    def _argument(self, node: ir.Node, port: int, known: Mapping[ir.Value, Tensor]) -> Any:
        value = node.inputs[port]
        if value is None:
            return None
        if port and node.op_type in _HOW and value in self._fixed:
            return _plain(self._fixed[value])
        return self._tensor(value, known)

    def _linear(self, node: ir.Node, known: Mapping[ir.Value, Tensor]) -> Tensor | None:
        """A product with a stored matrix as the linear layer that XNNPACK computes on codes; ``None`` for other nodes."""
        if node.op_type not in ("Gemm", "MatMul") or len(node.inputs) < 2:
            return None
        left, right = node.inputs[0], node.inputs[1]
        get = node.attributes.get_float
        plain = not node.attributes.get_int("transA", 0) and get("alpha", 1.0) == 1 and get("beta", 1.0) == 1
        if left is None or right is None or not plain or not self._is_matrix(right):
            return None
        turned = _reads_columns(node)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if node in self._fused:
            bias = next(v for v in self._fused[node].inputs if v is not node.outputs[0])
        weight = self._dequantized(right, turned != (right in self._turned))
        return F.linear(self._tensor(left, known), weight, None if bias is None else self._tensor(bias, known))

    def _tensor(self, value: ir.Value, known: Mapping[ir.Value, Tensor]) -> Tensor:
        """A value for one reader, dequantized where it is on a grid."""
        if value in self._weights:
            return self._dequantized(value, value in self._turned)
        held = self._held(value, known)
        return self._numbers(held, value) if value in self._grids else held

    def _held(self, value: ir.Value, known: Mapping[ir.Value, Tensor]) -> Tensor:
        """A computed or stored value; its codes where it is on a grid."""
        if value in known:
            return known[value]
        if value in self._tables:
            return getattr(self, self._tables[value])
        return torch.from_numpy(np.array(self._fixed[value]))

    def _quantized(self, x: Tensor, value: ir.Value) -> Tensor:
        """Quantize an activation."""
        grid = self._grids[value]
        if grid.scale.size == 1:
            return _OPS.quantize_per_tensor(x, *grid.arguments())
        return _OPS.quantize_per_channel(x, *self._channels(value, grid))

    def _numbers(self, codes: Tensor, value: ir.Value) -> Tensor:
        """Dequantize an activation for one reader."""
        grid = self._grids[value]
        if grid.scale.size == 1:
            return _OPS.dequantize_per_tensor(codes, *grid.arguments())
        return _OPS.dequantize_per_channel(codes, *self._channels(value, grid))

    def _channels(self, value: ir.Value, grid: Grid) -> tuple[Any, ...]:
        """Arguments of torch's per-channel operators."""
        return *(getattr(self, name) for name in self._scales[value]), grid.axis, *grid.ends

    def _dequantized(self, value: ir.Value, turned: bool = False) -> Tensor:
        """A stored weight, dequantized; transposed where ``turned``."""
        codes, grid = getattr(self, self._tables[value]), self._weights[value]
        if grid.scale.size == 1:
            found = _OPS.dequantize_per_tensor(codes, *grid.arguments())
        else:
            scales = (getattr(self, name) for name in self._scales[value])
            found = _OPS.dequantize_per_channel(codes, *scales, grid.axis % codes.dim(), *grid.ends)
        return found.t() if turned else found

    def _coded(self, value: ir.Value) -> Grid | None:
        """The grid of an output that holds codes."""
        return self._grids.get(value) if value.dtype is not None and not value.dtype.is_floating_point() else None


def _clipped(inputs: Sequence[Any]) -> list[Tensor]:
    """A Clip as XNNPACK takes one after a layer; clamp, of the same values, ends in partitions that depend on each other."""
    x, low, high = [*inputs, None, None][:3]
    return [F.hardtanh(x, -np.inf if low is None else low, np.inf if high is None else high)]


def _is_quantized(value: ir.Value) -> bool:
    """Whether only quantizers read a value."""
    return bool(value.uses()) and all(use.node.op_type == "QuantizeLinear" for use in value.uses())


def _plain(array: Array) -> Any:
    """Operands that are lists or numbers as Python values."""
    return array if array.ndim else array.item()


def _reads_columns(node: ir.Node) -> bool:
    """Whether a product reads its second matrix with one output per column."""
    return node.op_type in ("MatMul", "Gemm") and not node.attributes.get_int("transB", 0)


def open_model(path: Path, threads: int, reference: bool) -> Session:
    """Open an ONNX file as a session that is lowered for the shapes of each run; ``threads``: those of ExecuTorch.

    Args:
        path: of the file.
        threads: not used: the runtime has one pool for the process.
        reference: portable kernels alone, without XNNPACK.
    """
    model = load(path)
    if next(model.graph.subgraphs(), None) is not None:
        raise ExportError(str(path), "it holds If, Loop or Scan, which have no form there", _REMEDY)
    ready: dict[tuple[tuple[int, ...], ...], tuple[Program, tuple[Any, Any, Any]]] = {}

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        key = tuple(np.shape(feeds[str(v.name)]) for v in model.graph.inputs if not v.is_initializer())
        if key not in ready:
            program = Program(model, feeds).eval()
            ready[key] = program, _lowered(program, feeds, reference)
        program, (*_, method) = ready[key]
        found = method.execute([torch.from_numpy(np.array(feeds[name])) for name in program.inputs])
        outputs = {}
        for value, tensor in zip(model.graph.outputs, found, strict=True):
            array, grid = tensor.numpy().copy(), program.outputs[str(value.name)]
            if grid is not None and value.dtype is not None:
                array = grid.codes(array).astype(value.dtype.numpy())
            outputs[str(value.name)] = array
        return outputs

    return Session(run)


def _lowered(program: Program, feeds: Mapping[str, Array], reference: bool) -> tuple[Any, Any, Any]:
    """The bytes of a lowered program, the program, and its method, which needs the other two kept alive."""
    import executorch.kernels.quantized  # noqa: F401, registers what computes quantizers outside of XNNPACK
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    given = tuple(torch.from_numpy(np.array(feeds[name])) for name in program.inputs)
    captured = torch.export.export(program, given, strict=False)
    lowered = to_edge_transform_and_lower(captured, partitioner=[] if reference else [XnnpackPartitioner()])
    content = lowered.to_executorch().buffer
    loaded = Runtime.get().load_program(content)
    return content, loaded, loaded.load_method("forward")
