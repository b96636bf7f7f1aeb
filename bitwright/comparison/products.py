"""Sums of products as integer kernels compute them: an exported operator as a matrix product of codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.export.qdq.forms import read_metadata

Array = NDArray[Any]

_SIGNED = 128  # kernels shift signed input codes by this


@dataclass(frozen=True)
class IntegerProduct:
    """A Conv, Gemm or MatMul that an integer kernel computes.

    Attributes:
        node: of the exported file.
        site: of its weight in the simulation, or the tensor's name.
        codes: name of the tensor that holds the codes of its input.
        signed: whether these are int8.
        input_scale, input_zero: of its input.
        weight: stored codes of its weight, int8.
        weight_scale: one, or one per output channel.
        bias: stored int32 codes, if there are any.
        output_scale: of the quantizer that follows, if there is one.
    """

    node: ir.Node
    site: str
    codes: str
    signed: bool
    input_scale: float
    input_zero: int
    weight: Array
    weight_scale: Array
    bias: Array | None
    output_scale: float | None

    @property
    def groups(self) -> int:
        """Of a convolution; 1 otherwise."""
        return int(self.node.attributes.get_int("group", 1) or 1) if self.node.op_type == "Conv" else 1

    @property
    def pairs(self) -> bool:
        """Whether its kernel adds pairs of products: one product per channel, a depthwise convolution, has none."""
        return self.groups == 1 or self.weight.shape[1] > 1

    def matrices(self) -> list[Array]:
        """The weight of every group as ``[K, M]``; K in the order in which kernels add: positions, then channels."""
        weight = self.weight.astype(np.int64)
        if self.node.op_type == "Conv":
            parts = np.split(weight, self.groups)
            return [np.moveaxis(part, 1, -1).reshape(part.shape[0], -1).T for part in parts]
        turned = self.node.op_type == "Gemm" and self.node.attributes.get_int("transB", False)
        return [weight.T if turned else weight]

    def orders(self) -> tuple[Callable[[Array], Array], ...]:
        """How runtimes put the last axis of a row, and of a turned weight, in order before they add neighbours.

        ONNX Runtime goes through the channels of all positions in a row. OpenVINO begins every position anew: after an odd
        number of channels stands a zero.
        """
        if self.node.op_type != "Conv" or self.weight.shape[1] % 2 == 0 or self.weight[0, 0].size == 1:
            return (_as_is,)
        channels = self.weight.shape[1]

        def apart(array: Array) -> Array:
            split = array.reshape(*array.shape[:-1], -1, channels)
            return np.pad(split, ((0, 0),) * (split.ndim - 1) + ((0, 1),)).reshape(*array.shape[:-1], -1)

        return _as_is, apart

    def rows(self, codes: Array, most: int, rng: np.random.Generator) -> list[Array]:
        """What the weight of every group is multiplied with: at most so many rows, chosen by chance, ``[N, K]``."""
        given = codes.astype(np.int64) + (_SIGNED if self.signed else 0)
        if self.node.op_type != "Conv":
            flat = given.reshape(-1, given.shape[-1])
            return [flat if len(flat) <= most else flat[rng.choice(len(flat), most, replace=False)]]
        zero = self.input_zero + (_SIGNED if self.signed else 0)
        return _windows(self.node, given, self.weight.shape, self.groups, zero, most, rng)


def _as_is(array: Array) -> Array:
    return array


def _windows(
    node: ir.Node, x: Array, shape: Sequence[int], groups: int, zero: int, most: int, rng: np.random.Generator
) -> list[Array]:
    """Windows of a convolution, padded with the code of zero, at positions chosen by chance; one matrix per group."""
    kernel = tuple(shape[2:])
    rank = len(kernel)
    strides, dilations = (tuple(node.attributes.get_ints(k, ()) or (1,) * rank) for k in ("strides", "dilations"))
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    x = np.pad(x, ((0, 0), (0, 0), *_padding(node, x.shape[2:], reach, strides)), constant_values=zero)
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, 2 + rank)))
    steps: tuple[Any, ...] = (..., *(slice(None, None, s) for s in strides), *(slice(None),) * rank)
    view = view[steps]
    steps = (..., *(slice(None, None, d) for d in dilations))
    view = view[steps]
    places = (view.shape[0], *view.shape[2 : 2 + rank])
    total = int(np.prod(places))
    chosen = np.arange(total) if total <= most else rng.choice(total, most, replace=False)
    at = np.unravel_index(chosen, places)
    steps = (at[0], slice(None), *at[1:])
    windows = view[steps]  # [N, C, *kernel]
    return [np.moveaxis(part, 1, -1).reshape(len(chosen), -1) for part in np.split(windows, groups, axis=1)]


def _padding(
    node: ir.Node, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    auto = node.attributes.get_string("auto_pad", "NOTSET") or "NOTSET"
    if auto.startswith("SAME"):
        totals = [max((-(-n // s) - 1) * s + r - n, 0) for n, r, s in zip(sizes, reach, strides, strict=True)]
        return [(t // 2, t - t // 2) if auto == "SAME_UPPER" else (t - t // 2, t // 2) for t in totals]
    pads = tuple(node.attributes.get_ints("pads", ()) or (0,) * (2 * len(sizes)))
    return list(zip(pads[: len(sizes)], pads[len(sizes) :], strict=True))


def integer_products(model: ir.Model) -> Iterator[IntegerProduct]:
    """Every operator of the main graph whose input and weight are 8-bit codes, in execution order."""
    for node in model.graph:
        if node.op_type in ("Conv", "Gemm", "MatMul") and not node.domain and len(node.inputs) > 1:
            given, weight = (_dequantizer(value) for value in node.inputs[:2])
            product = _product(node, given, weight) if given is not None and weight is not None else None
            if product is not None:
                yield product


def reads_int8_weight(node: ir.Node) -> bool:
    """Whether the second operand of ``node`` is dequantized from a stored int8 constant."""
    weight = _dequantizer(node.inputs[1]) if len(node.inputs) > 1 else None
    codes = None if weight is None else _constant(weight, 0)
    return codes is not None and codes.dtype == np.int8


def _product(node: ir.Node, given: ir.Node, weight: ir.Node) -> IntegerProduct | None:
    """The product of what two operators dequantize; ``None`` where that is not an input by a stored weight of 8 bits each."""
    codes, scale, zero = (_constant(weight, port) for port in range(3))
    if codes is None or scale is None or codes.dtype != np.int8 or codes.ndim < 2:
        return None
    source, step, border = given.inputs[0], _constant(given, 1), _constant(given, 2)
    if source is None or source.producer() is None or step is None or step.size != 1:
        return None
    signed = _is_signed(source, border)
    if signed is None or (zero is not None and zero.any()):
        return None
    bias = _dequantizer(node.inputs[2]) if len(node.inputs) > 2 else None
    return IntegerProduct(
        node, _site_of(weight), str(source.name), signed, float(step.reshape(())),
        0 if border is None else int(border.reshape(())), codes, scale, None if bias is None else _constant(bias, 0),
        _scale_after(node),
    )  # fmt: skip


def _is_signed(codes: ir.Value, zero_point: NDArray[Any] | None) -> bool | None:
    """Of 8-bit codes, by their type or that of the zero point; ``None``: they have not 8 bits."""
    kinds = {ir.DataType.UINT8: False, ir.DataType.INT8: True}
    if codes.dtype in kinds:
        return kinds[codes.dtype]
    return None if zero_point is None else kinds.get(ir.DataType.from_numpy(zero_point.dtype))


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    maker = None if value is None else value.producer()
    return maker if maker is not None and maker.op_type == "DequantizeLinear" else None


def _constant(node: ir.Node, port: int) -> Array | None:
    value = node.inputs[port] if len(node.inputs) > port else None
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _site_of(node: ir.Node) -> str:
    facts = read_metadata(node)
    return str(node.outputs[0].name) if facts is None else str(facts["places"][0][0])


def _scale_after(node: ir.Node) -> float | None:
    """The scale of the quantizer after ``node``, across Add, Relu and Clip."""
    value = node.outputs[0]
    for _ in range(3):
        readers = [use.node for use in value.uses()]
        if len(readers) != 1:
            return None
        if readers[0].op_type == "QuantizeLinear":
            scale = _constant(readers[0], 1)
            return None if scale is None or scale.size != 1 else float(scale.reshape(()))
        if readers[0].op_type not in ("Relu", "Clip", "Add"):
            return None
        value = readers[0].outputs[0]
    return None
