"""Find layers that saturate or overflow in integer kernels: bounds from their weights, and counts on data.

- **pairs**: CPUs without dot-product instructions add two products of uint8 and int8 in 16 bits, which saturate; which two,
  ONNX Runtime and OpenVINO choose differently where a convolution has an odd number of channels;
- **accumulator**: the sum of all products is kept in 32 bits, which wrap around;
- **bias**: int32 codes at the end of their range;
- **scale**: the product of input and weight scale is too small for a float.

Each operator is computed as a matrix product of codes, in exact integers. A static bound of pairs or of the accumulator says
what no data can exceed; the counts say what the data did.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.cut import attributes_of, constant_at, dequantizer, values_by_name
from bitwright.compare.runtime import run_model
from bitwright.core.numerics.arrays import windows
from bitwright.core.numerics.integer_sums import INT16_MAX, INT16_MIN, INT32_MAX, largest_pair, saturated
from bitwright.errors import ExportError, some_of
from bitwright.export.qdq.forms import read_metadata
from bitwright.export.qdq.markers import copy_model
from bitwright.tables import Tabular, html_table, text_table

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
        weight: codes of its weight, int8; those stored as uint8 around 128 are shifted.
        weight_scale: one, or one per output channel.
        bias: stored int32 codes, if there are any.
        output_scale: of the quantizer that follows, if there is one.
        exact: whether its kernel adds in 32 bits on every CPU, as that of two unsigned factors.
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
    exact: bool = False

    @property
    def zero(self) -> int:
        """The code of zero in its input, as kernels shift it."""
        return self.input_zero + (_SIGNED if self.signed else 0)

    @property
    def groups(self) -> int:
        """Groups of a convolution; 1 for other operators."""
        return int(self.node.attributes.get_int("group", 1) or 1) if self.node.op_type == "Conv" else 1

    @property
    def pairs(self) -> bool:
        """Whether its kernel adds pairs of products: one product per channel, a depthwise convolution, has none."""
        return not self.exact and (self.groups == 1 or self.weight.shape[1] > 1)

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
            return (np.asarray,)
        channels = self.weight.shape[1]

        def apart(array: Array) -> Array:
            split = array.reshape(*array.shape[:-1], -1, channels)
            return np.pad(split, ((0, 0),) * (split.ndim - 1) + ((0, 1),)).reshape(*array.shape[:-1], -1)

        return np.asarray, apart

    def rows(self, codes: Array, most: int, rng: np.random.Generator) -> list[Array]:
        """Input rows of every group's matrix product, a random choice of at most that many, ``[N, K]``."""
        given = codes.astype(np.int64) + (_SIGNED if self.signed else 0)
        if self.node.op_type != "Conv":
            flat = given.reshape(-1, given.shape[-1])
            return [flat if len(flat) <= most else flat[rng.choice(len(flat), most, replace=False)]]
        return _windows(self.node, given, self.weight.shape, self.groups, self.zero, most, rng)


def _windows(
    node: ir.Node, x: Array, shape: Sequence[int], groups: int, zero: int, most: int, rng: np.random.Generator
) -> list[Array]:
    """Windows of a convolution, padded with the code of zero, at positions chosen by chance; one matrix per group."""
    view = windows(x, shape[2:], attributes_of(node), zero)  # [N, *positions, C, *kernel]
    places = view.shape[: x.ndim - 1]
    total = int(np.prod(places))
    chosen = np.arange(total) if total <= most else rng.choice(total, most, replace=False)
    read = view[np.unravel_index(chosen, places)]  # [rows, C, *kernel]
    return [np.moveaxis(part, 1, -1).reshape(len(chosen), -1) for part in np.split(read, groups, axis=1)]


def integer_products(model: ir.Model) -> Iterator[IntegerProduct]:
    """Every operator of the main graph whose input and weight are 8-bit codes, in execution order."""
    for node in model.graph:
        if node.op_type in ("Conv", "Gemm", "MatMul") and not node.domain and len(node.inputs) > 1:
            given, weight = (dequantizer(value) for value in node.inputs[:2])
            product = _product(node, given, weight) if given is not None and weight is not None else None
            if product is not None:
                yield product


def reads_int8_weight(node: ir.Node) -> bool:
    """Whether the second operand of ``node`` is dequantized from a stored int8 constant."""
    weight = dequantizer(node.inputs[1]) if len(node.inputs) > 1 else None
    codes = None if weight is None else constant_at(weight, 0)
    return codes is not None and codes.dtype == np.int8


def _product(node: ir.Node, given: ir.Node, weight: ir.Node) -> IntegerProduct | None:
    """The product of what two operators dequantize; ``None`` where that is not an input by a stored weight of 8 bits each."""
    codes, scale, zero = (constant_at(weight, port) for port in range(3))
    shifted = None if codes is None or codes.ndim < 2 else _as_signed(codes, zero)
    if codes is None or scale is None or shifted is None:
        return None
    source, step, border = given.inputs[0], constant_at(given, 1), constant_at(given, 2)
    if source is None or source.producer() is None or step is None or step.size != 1:
        return None
    kinds = (source.dtype, None if border is None else ir.DataType.from_numpy(border.dtype))
    kind = next((kind for kind in kinds if kind in (ir.DataType.UINT8, ir.DataType.INT8)), None)
    if kind is None:
        return None
    bias = dequantizer(node.inputs[2]) if len(node.inputs) > 2 else None
    facts = read_metadata(weight)
    return IntegerProduct(
        node, str(weight.outputs[0].name if facts is None else facts["places"][0][0]), str(source.name),
        kind == ir.DataType.INT8, float(step.reshape(())), 0 if border is None else int(border.reshape(())), shifted, scale,
        None if bias is None else constant_at(bias, 0), _scale_after(node), codes.dtype == np.uint8,
    )  # fmt: skip


def _as_signed(codes: Array, zero: Array | None) -> Array | None:
    """Codes of a symmetric grid of 8 bits as int8, those that are stored around 128 too; ``None`` for other codes."""
    shift = {np.dtype(np.int8): 0, np.dtype(np.uint8): _SIGNED}.get(codes.dtype)
    if shift is None or np.any((0 if zero is None else zero.astype(np.int64)) != shift):
        return None
    return (codes.astype(np.int16) - shift).astype(np.int8)


def _scale_after(node: ir.Node) -> float | None:
    """The scale of the quantizer after ``node``, across Add, Relu and Clip."""
    value = node.outputs[0]
    for _ in range(3):
        readers = [use.node for use in value.uses()]
        if len(readers) != 1:
            return None
        if readers[0].op_type == "QuantizeLinear":
            scale = constant_at(readers[0], 1)
            return None if scale is None or scale.size != 1 else float(scale.reshape(()))
        if readers[0].op_type not in ("Relu", "Clip", "Add"):
            return None
        value = readers[0].outputs[0]
    return None


Feeds = Mapping[str, Array]

_MARGIN = 8  # other data may have codes larger by this part than those that were looked at
_ROWS = 256  # outputs per layer and batch whose sums are taken apart
_BIAS_END = float(1 << 30)
_TINY = float(np.finfo(np.float32).tiny)
_HEAD = ("weight", "operator", "pairs at risk", "outputs with one", "off by", "largest sum", "bound", "what")


@dataclass(frozen=True)
class LayerSums:
    """Sums of one layer.

    Attributes:
        site: of its weight.
        op: operator type.
        risky: share of pairs of weights that some input can saturate.
        touched: share of outputs in which a pair did, of those that were looked at; of two runtimes that pair otherwise the
            larger one.
        off: how far that moves an output at most, in steps of its grid; relative to the largest output where it has none.
        largest: largest absolute sum that was seen.
        bound: largest that any input can make.
        bias: largest absolute code of the bias.
        scale: smallest product of input and weight scale.
        seen: outputs that were looked at.
        channels: output channels in which pairs saturated, or would for input codes an eighth larger (other data have them).
        of: number of output channels.
    """

    site: str
    op: str
    risky: float
    touched: float
    off: float
    largest: int
    bound: int
    bias: int
    scale: float
    seen: int
    channels: tuple[int, ...] = ()
    of: int = 0

    _also = ("faults",)

    @property
    def faults(self) -> tuple[str, ...]:
        """Its faults in words; empty where there is none."""
        return tuple(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.touched:
            yield "pairs saturate"
        if self.largest > INT32_MAX:
            yield "the int32 accumulator overflows"
        elif self.bound > INT32_MAX:
            yield "the int32 accumulator can overflow"
        if self.bias > _BIAS_END:
            yield "the int32 bias overflows"
        if self.scale < _TINY:
            yield "its scales underflow"


@dataclass(frozen=True)
class SaturationReport(Tabular):
    """Result of :func:`saturation`.

    Attributes:
        layers: in execution order.
        notes: what was left out.
    """

    _rows = "layers"
    _also = ("ok", "guilty")

    layers: tuple[LayerSums, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no layer has a fault."""
        return not any(layer.faults for layer in self.layers)

    @property
    def guilty(self) -> tuple[str, ...]:
        """Weights of the layers in which pairs saturated."""
        return tuple(layer.site for layer in self.layers if layer.touched)

    def to_text(self) -> str:
        """The answer, a table, and notes."""
        first, *rest = self._lines()
        return "\n".join([first, text_table(_HEAD, map(_cells, self.layers)), "", *rest])

    __str__ = to_text

    def _repr_html_(self) -> str:
        return html_table(_HEAD, map(_cells, self.layers), "Sums in integer kernels", self._lines())

    def _lines(self) -> Iterator[str]:
        if self.ok:
            yield f"{len(self.layers)} layers: nothing saturates or overflows"
        if self.guilty:
            yield (
                f"pairs saturate in {len(self.guilty)} of {len(self.layers)} layers on CPUs without VNNI: "
                "repair='saturation' gives 7 bits to the weights of the output channels concerned"
            )
        wide = [layer.site for layer in self.layers if layer.bound > INT32_MAX]
        if wide:
            yield (
                f"the int32 accumulator can overflow, on every CPU: {', '.join(wide)}: leave the input of these layers in float, "
                "split them along their inner axis, or give their weights fewer bits"
            )
        yield from (f"note: {note}" for note in self.notes)


def _cells(layer: LayerSums) -> tuple[str, ...]:
    return (
        layer.site, layer.op, f"{layer.risky:.1%}", f"{layer.touched:.2%}", f"{layer.off:.3g}", f"{layer.largest:.3g}",
        f"{layer.bound:.3g}", "; ".join(layer.faults),
    )  # fmt: skip


def _left_out(model: ir.Model, known: Container[ir.Node]) -> Iterator[str]:
    """A note on the products that were not examined."""
    layers = [node for node in model.graph.all_nodes() if node.op_type in ("Conv", "Gemm", "MatMul")]
    left = [node for node in layers if node not in known and node.graph is model.graph]
    inside = [node for node in layers if node.graph is not model.graph and reads_int8_weight(node)]
    named = [[node.name or str(node.outputs[0].name) for node in nodes] for nodes in (left, inside)]
    if left:
        yield f"not counted, as not of 8-bit codes or without a stored weight: {some_of(named[0])}"
    if inside:
        yield (
            f"not counted, as in a body of If, Loop or Scan: {some_of(named[1])}; pairs can saturate there on CPUs without "
            "VNNI: files for target='ort_cpu' have uint8 weights there, with which none does"
        )


def saturation(model: ir.Model, batches: Iterable[Feeds], *, rows: int = _ROWS) -> SaturationReport:
    """Examine the sums of every integer product of an exported model.

    Args:
        model: as an export wrote it, or another QDQ model.
        batches: inputs by name.
        rows: outputs per layer and batch that are taken apart, chosen by chance (seed 0).

    Raises:
        ExportError: there is no batch, or the model does not run on one.
    """
    products = list(integer_products(model))
    observed = copy_model(model)  # returns the codes that the products read, too
    named = values_by_name(observed)
    for product in products:
        value = named[product.codes]
        value.dtype = ir.DataType.INT8 if product.signed else ir.DataType.UINT8
        if not value.is_graph_output():
            observed.graph.outputs.append(value)
    counts = [_Count(product) for product in products]
    rng, ran = np.random.default_rng(0), 0
    for feeds in batches:
        found = run_model(observed, feeds, "float") if products else {}
        ran += 1
        for count in counts:
            count.add(found[count.product.codes], rows, rng)
    if not ran:
        raise ExportError("saturation", "there is no batch to run", "give at least one input")
    notes = tuple(_left_out(model, {product.node for product in products}))
    return SaturationReport(tuple(count.layer() for count in counts), notes)


@dataclass
class _Count:
    """Sums of one layer over batches: outputs seen and those in which a pair saturated, the largest sum and loss."""

    product: IntegerProduct
    seen: int = 0
    touched: int = 0
    largest: int = 0
    lost: int = 0
    near: Array | None = None

    def add(self, codes: Array, rows: int, rng: np.random.Generator) -> None:
        """Add the layer's inputs in one batch."""
        product, weights, near = self.product, self.product.matrices(), list[Array]()
        biases = [np.zeros(1, np.int64)] * len(weights)
        if product.bias is not None:
            flat = product.bias.astype(np.int64).reshape(-1)
            biases = np.split(flat, len(weights)) if flat.size >= len(weights) else [flat] * len(weights)
        for given, weight, bias in zip(product.rows(codes, rows, rng), weights, biases, strict=True):
            exact = (given - product.zero) @ weight + bias
            self.largest = max(self.largest, int(np.abs(exact).max(initial=0)))
            self.seen += exact.size
            if product.pairs:
                near.append(self._add_pairs(given, weight))
        if near:
            found = np.concatenate(near)
            self.near = found if self.near is None else self.near | found

    def _add_pairs(self, given: Array, weight: Array) -> Array:
        """Count pairs that saturate; returns the output channels in which one does, or would for larger codes."""
        ordered = [(order(given), order(weight.T).T) for order in self.product.orders()]
        losses = [saturated(codes, factors)[0] for codes, factors in ordered]
        self.touched += max(int((lost != 0).sum()) for lost in losses)
        self.lost = max(self.lost, *(int(np.abs(lost).max(initial=0)) for lost in losses))
        near = [saturated(codes + codes // _MARGIN, factors)[1].any(0) for codes, factors in ordered]
        return np.asarray(np.any(near, 0))

    def layer(self) -> LayerSums:
        """The result for this layer."""
        product, weights, shares = self.product, self.product.matrices(), [0.0]
        for order in product.orders() if product.pairs else ():
            bounds = [largest_pair(order(weight.T).T) for weight in weights]
            shares.append(float(np.mean([((b > INT16_MAX) | (b < INT16_MIN)).mean() for b in bounds])))
        bias = 0 if product.bias is None else int(np.abs(product.bias.astype(np.int64)).max(initial=0))
        step = product.input_scale * float(product.weight_scale.max())
        off = self.lost * step / product.output_scale if product.output_scale else self.lost / max(self.largest, 1)
        bound = max(int(np.abs(w).sum(0).max(initial=0)) for w in weights) * max(255 - product.zero, product.zero)
        return LayerSums(
            product.site, product.node.op_type, max(shares), self.touched / max(self.seen, 1), off, self.largest, bound, bias,
            product.input_scale * float(product.weight_scale.min()), self.seen,
            () if self.near is None or not self.touched else tuple(np.flatnonzero(self.near).tolist()),
            sum(weight.shape[1] for weight in weights),
        )  # fmt: skip
