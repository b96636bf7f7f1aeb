"""Which layers saturate or overflow in integer kernels: what their weights allow, and what was counted on data.

- **pairs**: CPUs without dot-product instructions add two products of uint8 and int8 in 16 bits, which saturate; which two,
  ONNX Runtime and OpenVINO choose differently where a convolution has an odd number of channels;
- **accumulator**: the sum of all products is kept in 32 bits, which wrap around;
- **bias**: int32 codes at the end of their range;
- **scale**: the product of input and weight scale is too small for a float.

A static bound of pairs or of the accumulator says what no data can do; the counts say what the data did.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.comparison.points import values_by_name
from bitwright.comparison.products import IntegerProduct, integer_products, reads_int8_weight
from bitwright.core.sums.accumulator import INT16_MAX, INT16_MIN, INT32_MAX, largest_pair, saturated
from bitwright.errors import ExportError, some_of
from bitwright.export.qdq.markers import copy_model
from bitwright.export.verify.runtime import run_model
from bitwright.tables import Tabular, html_table, text_table

Array = NDArray[Any]
Feeds = Mapping[str, Array]

_ROWS = 256  # outputs per layer and batch whose sums are taken apart
_BIAS_END = float(1 << 30)
_TINY = float(np.finfo(np.float32).tiny)
_HEAD = ("weight", "operator", "pairs at risk", "outputs with one", "off by", "largest sum", "bound", "what")


@dataclass(frozen=True)
class LayerSums:
    """What one layer adds up.

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

    _also = ("faults",)

    @property
    def faults(self) -> tuple[str, ...]:
        """What goes wrong in it, in words; empty where nothing does."""
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
    """What :func:`saturation` found.

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
        """A table."""
        return "\n".join([text_table(_HEAD, map(_cells, self.layers)), "", *self._lines()])

    __str__ = to_text

    def _repr_html_(self) -> str:
        return html_table(_HEAD, map(_cells, self.layers), "Sums in integer kernels", self._lines())

    def _lines(self) -> Iterator[str]:
        if self.guilty:
            yield (
                f"pairs saturate in {len(self.guilty)} of {len(self.layers)} layers on CPUs without VNNI: "
                "repair='saturation' gives their weights 7 bits"
            )
        wide = [layer.site for layer in self.layers if layer.bound > INT32_MAX]
        if wide:
            yield (
                f"the int32 accumulator can overflow, on every CPU: {', '.join(wide)}: leave the input of these layers in float, "
                "split them along their inner axis, or give their weights fewer bits"
            )
        yield from (f"note: {note}" for note in self.notes)
        if self.ok:
            yield f"{len(self.layers)} layers: nothing saturates or overflows"


def _cells(layer: LayerSums) -> tuple[str, ...]:
    return (
        layer.site, layer.op, f"{layer.risky:.1%}", f"{layer.touched:.2%}", f"{layer.off:.3g}", f"{layer.largest:.3g}",
        f"{layer.bound:.3g}", "; ".join(layer.faults),
    )  # fmt: skip


def _left_out(model: ir.Model, known: Container[ir.Node]) -> Iterator[str]:
    """A note on the products that were not taken apart."""
    layers = [node for node in model.graph.all_nodes() if node.op_type in ("Conv", "Gemm", "MatMul")]
    left = [_named(node) for node in layers if node not in known and node.graph is model.graph]
    if left:
        yield f"not counted, as not of 8-bit codes or without a stored weight: {some_of(left)}"
    inside = [_named(node) for node in layers if node.graph is not model.graph and reads_int8_weight(node)]
    if inside:
        yield (
            f"not counted, as in a body of If, Loop or Scan: {some_of(inside)}; pairs can saturate there on CPUs without VNNI: "
            "files for target='ort_cpu' have uint8 weights there, with which none does"
        )


def _named(node: ir.Node) -> str:
    return node.name or str(node.outputs[0].name)


def saturation(model: ir.Model, batches: Iterable[Feeds], *, rows: int = _ROWS) -> SaturationReport:
    """Take the sums of every integer product of an exported model apart.

    Args:
        model: as an export wrote it, or another QDQ model.
        batches: inputs by name.
        rows: outputs per layer and batch that are taken apart, chosen by chance (seed 0).

    Raises:
        ExportError: there is no batch, or the model does not run on one.
    """
    products = list(integer_products(model))
    observed = _returning_codes(model, products)
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


def _returning_codes(model: ir.Model, products: Sequence[IntegerProduct]) -> ir.Model:
    """A copy that also returns the codes that the products read."""
    copy = copy_model(model)
    named = values_by_name(copy)
    for product in products:
        value = named[product.codes]
        value.dtype = ir.DataType.INT8 if product.signed else ir.DataType.UINT8
        if not value.is_graph_output():
            copy.graph.outputs.append(value)
    return copy


class _Count:
    """Sums of one layer over batches."""

    def __init__(self, product: IntegerProduct) -> None:
        self.product = product
        self.weights, self.orders = product.matrices(), product.orders()
        self.seen = self.touched = self.largest = 0
        self.lost = self.peak = 0

    def add(self, codes: Array, rows: int, rng: np.random.Generator) -> None:
        """Take in what the layer reads in one batch."""
        product = self.product
        zero = product.input_zero + (128 if product.signed else 0)
        biases = self._biases()
        for given, weight, bias in zip(product.rows(codes, rows, rng), self.weights, biases, strict=True):
            exact = (given - zero) @ weight + bias
            self.largest = max(self.largest, int(np.abs(exact).max(initial=0)))
            self.peak = self.largest
            self.seen += exact.size
            if product.pairs:
                losses = [saturated(order(given), order(weight.T).T)[0] for order in self.orders]
                self.touched += max(int((lost != 0).sum()) for lost in losses)
                self.lost = max(self.lost, *(int(np.abs(lost).max(initial=0)) for lost in losses))

    def _biases(self) -> list[Array]:
        bias, count = self.product.bias, len(self.weights)
        if bias is None:
            return [np.zeros(1, np.int64)] * count
        return np.split(bias.reshape(-1).astype(np.int64), count) if bias.size >= count else [bias] * count

    def layer(self) -> LayerSums:
        """What was found."""
        product = self.product
        zero = product.input_zero + (128 if product.signed else 0)
        furthest = max(255 - zero, zero)
        bounds = [[largest_pair(order(w.T).T) for w in self.weights] for order in self.orders]
        shares = [float(np.mean([((b > INT16_MAX) | (b < INT16_MIN)).mean() for b in groups])) for groups in bounds]
        bias = 0 if product.bias is None else int(np.abs(product.bias.astype(np.int64)).max(initial=0))
        step = product.input_scale * float(product.weight_scale.max())
        off = self.lost * step / product.output_scale if product.output_scale else self.lost / max(self.peak, 1)
        return LayerSums(
            product.site, product.node.op_type, max(shares) if product.pairs else 0.0, self.touched / max(self.seen, 1), off,
            self.largest, max(int(np.abs(w).sum(0).max(initial=0)) for w in self.weights) * furthest, bias,
            product.input_scale * float(product.weight_scale.min()), self.seen,
        )  # fmt: skip
