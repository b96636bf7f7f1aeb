"""Layers as matrix products, the form of convolutions and linear layers in rounding methods.

A layer multiplies rows by a matrix: ``X [G, P, K]`` (groups, positions, inputs of one output) times ``W [G, O, K]``.
For a convolution the rows are patches. A transposed convolution is taken as the product before its outputs are added up
where they overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.numerics.affine import (
    format_numbers,
    round_to_float,
    split_zero_point,
    stored_scale,
    with_stored_scale,
)
from bitwright.core.numerics.arrays import conv_pads
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT32_SCALE, FloatFormat, IntFormat, ScaleFormat

RECURRENT = ("LSTM", "GRU", "RNN")
_CHUNK = 1 << 24  # numbers of a patch matrix made at once: 64 MiB
#: from how many columns on, and at what part of them, rows are kept in place of the sum of their products
_MANY, _FEWER = 1024, 4
_BLOCKED = 256  # columns from which on half of a symmetric product is worth leaving out


@dataclass(frozen=True)
class Layer:
    """A layer that can be written as a matrix product.

    Attributes:
        name: the operator's, or the site's where an operator has several weights.
        op: operator.
        type: ``Conv``, ``ConvTranspose``, ``Gemm``, ``MatMul``, ``GroupedMatMul``, or a recurrent layer.
        attrs: of the operator.
        shape: of the weight tensor.
        site: of the weight.
        port: of the weight.
    """

    name: str
    op: str
    type: str
    attrs: Mapping[str, Any]
    shape: tuple[int, ...]
    site: str
    port: int = 1

    @property
    def reads_hidden(self) -> bool:
        """Whether the layer multiplies the previous hidden state, and not the operator's input."""
        return self.type in RECURRENT and self.port == 2

    @property
    def is_routed(self) -> bool:
        """Whether every matrix of a stack has its own rows, which the quantized model may choose differently."""
        return self.type == "GroupedMatMul"

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes that count the matrices, where the weight is a stack of them."""
        return self.shape[:-2] if self.type in ("MatMul", "GroupedMatMul") else ()

    @property
    def groups(self) -> int:
        """Independent matrix products side by side."""
        if self.stack:
            return math.prod(self.stack)
        return int(self.attrs.get("group", 1)) if self.type in ("Conv", "ConvTranspose") else 1

    @property
    def fan_in(self) -> int:
        """Inputs of one output: ``K``."""
        if self.type == "Conv":
            return math.prod(self.shape[1:])
        if self.type == "ConvTranspose":
            return self.shape[0] // self.groups
        if self.stack:
            return self.shape[-2]
        return self.shape[-1 if self.type in RECURRENT or self.attrs.get("transB") else 0]

    @property
    def has_rows_as_outputs(self) -> bool:
        """Whether row ``o`` of the matrix computes output channel ``o``, so that a bias and a function can follow."""
        return self.type != "ConvTranspose"

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight tensor (or one that broadcasts like it) as ``[G, O, K]``.

        ============== =================================== ==============
        type           weight                              matrix
        ============== =================================== ==============
        Conv           ``[G*O, I/G, *kernel]``             K = I/G * kernel
        ConvTranspose  ``[G*K, O', *kernel]``              O = O' * kernel
        Gemm           ``[O, K]`` if ``transB`` else ``[K, O]``
        MatMul         ``[K, O]``, or a stack     G matrices ``[*stack, K, O]``
        GroupedMatMul  ``[G, K, O]``
        LSTM, GRU, RNN ``[O, K]`` or ``[1, O, K]``         O = gates * hidden
        ============== =================================== ==============
        """
        if self.type in RECURRENT:
            return weight.reshape(1, -1, self.shape[-1])
        if self.type == "Conv":
            return weight.reshape(self.groups, self.shape[0] // self.groups, -1)
        if self.type == "ConvTranspose":
            return weight.reshape(self.groups, self.shape[0] // self.groups, -1).transpose(1, 2)
        if self.type == "Gemm" and self.attrs.get("transB"):
            return weight[None]
        if self.stack:
            return weight.reshape(self.groups, *self.shape[-2:]).transpose(1, 2)
        return weight.t()[None]

    def tensor(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`matrix`: the weight tensor of ``matrix``."""
        if self.type == "Conv" or self.type in RECURRENT:
            return matrix.reshape(self.shape)
        if self.type == "ConvTranspose":
            return matrix.transpose(1, 2).reshape(self.shape)
        if self.type == "Gemm" and self.attrs.get("transB"):
            return matrix[0]
        if self.stack:
            return matrix.transpose(1, 2).reshape(self.shape).contiguous()
        return matrix[0].t().contiguous()

    def positions(self, x: Tensor) -> int:
        """The number of rows of ``x``."""
        if self.type == "Conv":
            return int(x.shape[0]) * math.prod(self._sizes(x))
        if self.type == "ConvTranspose":
            return int(x.shape[0]) * math.prod(x.shape[2:])
        if self.stack:
            together = torch.broadcast_shapes(x.shape[:-2], self.stack)
            return math.prod(together) // self.groups * int(x.shape[-2])
        return x.numel() // int(x.shape[-1])

    def rows(self, x: Tensor) -> Iterator[Tensor]:
        """``x`` as rows ``[G, P, K]`` float32, in parts of bounded size, in the order of :meth:`positions`."""
        if self.type not in ("Conv", "ConvTranspose"):
            flat = self._flat(x)
            for part in flat.split(max(1, _CHUNK // (len(flat) * int(flat.shape[2]))), 1):
                yield part.float()
            return
        kernel = math.prod(self.shape[2:]) if self.type == "Conv" else 1
        size = max(1, x[0].numel() * kernel) if len(x) else 1
        for part in x.split(max(1, _CHUNK // size)):
            patches = self._patches(part.float()) if self.type == "Conv" else part.float().flatten(2)
            n, _, length = patches.shape
            grouped = patches.reshape(n, self.groups, -1, length)
            yield grouped.permute(1, 0, 3, 2).reshape(self.groups, n * length, -1)

    def rows_at(self, x: Tensor, places: Tensor) -> Iterator[Tensor]:
        """Yield the rows of :meth:`rows` at ``places`` in parts of bounded size; only these patches are made."""
        spatial = self.type in ("Conv", "ConvTranspose")
        if not spatial:
            x = self._flat(x)
        inputs = math.prod(self.shape[1:]) * self.groups if self.type == "Conv" else int(x.shape[-1])
        for part in places.split(max(1, _CHUNK // inputs)):
            if spatial:
                patches = self._patches_at(x, part).float()
                yield patches.reshape(len(part), self.groups, -1).transpose(0, 1)
            else:
                yield x[:, part].float()

    def _flat(self, x: Tensor) -> Tensor:
        """The rows of a product: ``[1, P, K]``, or of a stack of matrices those of each, ``[G, P, K]``."""
        if not self.stack:
            return x.reshape(1, -1, x.shape[-1])
        together = torch.broadcast_shapes(x.shape[:-2], self.stack)
        own = (1,) * (len(together) - len(self.stack)) + self.stack
        first = [axis for axis, count in enumerate(own) if count > 1]
        rest = [axis for axis, count in enumerate(own) if count == 1]
        full = x.expand(*together, *x.shape[-2:]).permute(*first, *rest, -2, -1)
        return full.reshape(self.groups, -1, x.shape[-1])

    def _patches_at(self, x: Tensor, places: Tensor) -> Tensor:
        """``[P, C, kernel]``, zero where a patch reaches beyond ``x``."""
        n, length = len(self.shape) - 2, self.positions(x) // int(x.shape[0])
        sizes = self._sizes(x) if self.type == "Conv" else tuple(int(m) for m in x.shape[2:])
        sample, left = places // length, places % length
        corners: list[Tensor] = []
        for size in reversed(sizes):
            corners.insert(0, left % size)
            left = left // size
        if self.type == "ConvTranspose":
            at: tuple[Any, ...] = (sample, slice(None), *corners)
            return x[at][..., None]
        strides, dilations, pads = self.attrs["strides"], self.attrs["dilations"], self.pads(x)
        padded = F.pad(x, [p for i in reversed(range(n)) for p in (pads[i], pads[n + i])]) if any(pads) else x
        pixels = padded.movedim(1, -1).contiguous()  # the channels of a place side by side are one copy
        first, steps = sample, [0]
        for i in range(n):
            first = first * pixels.shape[1 + i] + corners[i] * strides[i]
            steps = [s * pixels.shape[1 + i] + o * dilations[i] for s in steps for o in range(self.shape[2 + i])]
        index = first[:, None] + torch.tensor(steps, device=x.device)
        found = pixels.reshape(-1, pixels.shape[-1]).index_select(0, index.reshape(-1))
        return found.reshape(len(places), len(steps), -1).transpose(1, 2)

    def pads(self, x: Tensor) -> tuple[int, ...]:
        """Padding of a convolution of ``x``: as given, or by ``auto_pad`` from the input's size."""
        sizes = tuple(int(n) for n in x.shape[2:])
        return conv_pads(self.attrs, sizes, self.shape[2:])

    def _sizes(self, x: Tensor) -> tuple[int, ...]:
        """Output sizes of a convolution."""
        strides, dilations = self.attrs["strides"], self.attrs["dilations"]
        pads, n = self.pads(x), len(self.shape) - 2
        return tuple(
            (int(x.shape[2 + i]) + pads[i] + pads[n + i] - dilations[i] * (self.shape[2 + i] - 1) - 1) // strides[i] + 1
            for i in range(n)
        )

    def _patches(self, x: Tensor) -> Tensor:
        """``[N, C * kernel, L]`` of ``[N, C, *spatial]``."""
        strides, dilations = self.attrs["strides"], self.attrs["dilations"]
        pads, sizes, n = self.pads(x), self._sizes(x), len(self.shape) - 2
        if any(pads):
            x = F.pad(x, [p for i in reversed(range(n)) for p in (pads[i], pads[n + i])])
        parts = []
        for offset in itertools.product(*(range(k) for k in self.shape[2:])):
            window = tuple(
                slice(o * d, o * d + s * (size - 1) + 1, s)
                for o, d, s, size in zip(offset, dilations, strides, sizes, strict=True)
            )
            parts.append(x[(slice(None), slice(None), *window)])
        return torch.stack(parts, 2).reshape(int(x.shape[0]), -1, math.prod(sizes))


def rows_of_each(x: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by matrix as rows of each matrix, padded with zeros, which do not change sums.

    Args:
        x: ``[S, K]``.
        ends: ``[G]``, where the rows of each matrix end.

    Returns:
        ``[G, P, K]``, ``P`` the most rows that a matrix has.

    >>> rows_of_each(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1, 1, 3])).squeeze(2)
    tensor([[1., 0.],
            [0., 0.],
            [2., 3.]])
    """
    starts = [0, *ends.tolist()[:-1]]
    parts = [x[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]
    spread = x.new_zeros(len(parts), max(map(len, parts)), int(x.shape[1]))
    for own, part in zip(spread, parts, strict=True):
        own[: len(part)] = part
    return spread


@dataclass(frozen=True)
class Grid:
    """The grid of every weight of a layer, as matrices that broadcast against ``[G, O, K]``.

    A code is what the scale is multiplied with: an integer, or a number of a float format.

    Attributes:
        scale: float32, input units per step.
        lo, hi: ``qmin - zero_point`` and ``qmax - zero_point``: codes with real zero at 0; of a float format its ends. One number
            where they are the same everywhere.
        own_rows: whether the scales of different rows may differ, so that they can be changed row by row.
        format: of the codes, where they are not the integers.
        scale_format: what scales are stored as.
        common: what stored scales are multiples of, where they are.
        index: which of the encoding's scales each weight has, int64 ``[G, O, K]``; ``None`` where no method asks for it.
        steps: of an integer grid with zero points, the number of its codes less one; 0 where there is none.
        free: whether zero points are real numbers: codes with real zero at 0 are then a whole number above ``lo``.
    """

    scale: Tensor
    lo: Tensor
    hi: Tensor
    own_rows: bool = True
    format: FloatFormat | None = None
    scale_format: ScaleFormat = FLOAT32_SCALE
    common: Tensor | None = None
    index: Tensor | None = None
    steps: int = 0
    free: bool = False

    @property
    def stores_offsets(self) -> bool:
        """Whether zero points are stored as products with the scales, whose numbers are few."""
        return self.free and self.scale_format.offsets > 0

    def nearest(self, w: Tensor) -> Tensor:
        """Codes of ``w``, ties to even."""
        return self.rounded(w / self.scale)

    def rounded(self, ratio: Tensor) -> Tensor:
        """Codes of weights that are divided by their scales."""
        if self.format is not None:
            return round_to_float(ratio, self.format).float()
        return torch.clamp(self.to_codes(ratio), self.lo, self.hi)

    def to_codes(self, ratio: Tensor) -> Tensor:
        """The nearest code of an unbounded integer grid."""
        return (ratio - self.lo).round() + self.lo if self.free else ratio.round()

    def below(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """The code at or below each ratio, and the distance to the next; integer codes may lie outside the grid."""
        if self.format is None:
            down = (ratio - self.lo).floor() + self.lo if self.free else ratio.floor()
            return down, torch.ones_like(down)
        numbers = torch.from_numpy(format_numbers(self.format)).to(ratio.device)
        index = (torch.searchsorted(numbers, ratio.contiguous(), right=True) - 1).clamp(0, len(numbers) - 2)
        return numbers[index], numbers[index + 1] - numbers[index]

    def values(self, codes: Tensor) -> Tensor:
        """The dequantized numbers of codes, which the quantizer leaves unchanged."""
        return codes * self.scale + 0.0

    def stored(self, scale: Tensor) -> Tensor:
        """``scale`` as it is stored."""
        found: Tensor = stored_scale(scale, self.scale_format, self.common)
        return found

    @staticmethod
    def of(encoding: Encoding, layer: Layer, device: torch.device, *, index: Tensor | None = None) -> Grid:
        """The grid of an ``encoding`` of the layer's weight; ``index`` is reused from another grid of the same weight."""
        shape, granularity = layer.shape, encoding.granularity
        view = granularity.view_shape(shape)

        def spread(values: Any) -> Tensor:
            small = torch.from_numpy(np.array(granularity.spread(np.asarray(values), shape))).to(device)
            return layer.matrix(small.expand(view).reshape(shape)).contiguous()

        own_rows = encoding.scale.ndim > 0 and layer.has_rows_as_outputs
        stored, common = encoding.scale_format, None
        if encoding.common is not None:
            common = spread(np.broadcast_to(encoding.common, encoding.scale.shape).copy())
        if index is None:
            index = spread(np.arange(encoding.scale.size).reshape(encoding.scale.shape))
        if isinstance(encoding.format, FloatFormat):
            hi = torch.full((1, 1, 1), encoding.format.max, device=device)
            return Grid(spread(encoding.scale), -hi, hi, own_rows, encoding.format, stored, common, index)
        steps, free = 0 if encoding.symmetric else encoding.format.steps, encoding.shift is not None
        ends = [(end - encoding.zero).astype("float32") for end in (encoding.format.qmin, encoding.format.qmax)]
        if not steps and bool((ends[0] == ends[0].flat[0]).all()):
            low, high = (torch.full((1, 1, 1), float(end.flat[0]), device=device) for end in ends)
        else:
            low, high = map(spread, ends)
        return Grid(spread(encoding.scale), low, high, own_rows, None, stored, common, index, steps, free)


def grid_encoding(grid: Grid, encoding: Encoding, layer: Layer) -> Encoding:
    """``encoding`` with the scales and zero points of ``grid``, which was derived from it."""
    granularity = encoding.granularity

    def gathered(values: Tensor) -> NDArray[Any]:
        firsts = layer.tensor(values).reshape(layer.shape)[granularity.firsts(layer.shape)]
        return np.asarray(firsts.reshape(granularity.param_shape(layer.shape)).cpu())

    if grid.free and isinstance(encoding.format, IntFormat):
        zero_point, shift = split_zero_point(0 - gathered(grid.lo), encoding.format)
        encoding = replace(encoding, zero_point=zero_point, shift=shift)
    elif grid.steps and isinstance(encoding.format, IntFormat):
        encoding = replace(encoding, zero_point=encoding.format.qmin - gathered(grid.lo).astype(np.int64))
    return with_stored_scale(encoding, gathered(grid.scale))


class FewRows:
    """``x^T x`` of rows ``x`` that are far fewer than columns, without the matrix: ``[G, K, K]``.

    Has what rounding asks of the matrix: products from the left, some of the matrices, the diagonal.

    Args:
        x: ``[G, P, K]`` float64.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __rmatmul__(self, left: Tensor) -> Tensor:
        found: Tensor = (left @ self.x.transpose(1, 2)) @ self.x
        return found

    def __getitem__(self, matrices: slice) -> FewRows:
        return FewRows(self.x[matrices])

    def diagonal(self, dim1: int = 1, dim2: int = 2) -> Tensor:
        """``[G, K]``; ``dim1`` and ``dim2`` as of a tensor."""
        assert (dim1, dim2) == (1, 2)
        return self.x.square().sum(1)

    def any(self) -> Tensor:
        """Whether a number is not zero."""
        return self.x.any()


@dataclass(frozen=True)
class Moments:
    """Sums over rows of a layer's inputs, float64.

    Attributes:
        own: sum of ``x_q x_q^T`` of the quantized inputs, ``[G, K, K]``.
        moved: ``W`` times the sum of ``(x - x_q) x_q^T`` of float and quantized inputs, ``[G, O, K]``; of :class:`FewRows`
            the sum without its last factor, ``[G, O, P]``. ``None`` without ``W``.
        rows: how many.
    """

    own: Tensor | FewRows
    moved: Tensor | None
    rows: int

    @property
    def matrix(self) -> Tensor:
        """:attr:`own` where :class:`FewRows` was not asked for."""
        assert isinstance(self.own, Tensor)
        return self.own


def moments(
    layer: Layer,
    inputs: Iterable[tuple[Tensor, Tensor, float]],
    generator: torch.Generator,
    weight: Tensor | None = None,
    *,
    few: bool = False,
) -> Moments:
    """The moments of ``(float, quantized, sufficient rows)``; rows are drawn by ``generator``.

    Products are float32 within a part of at most 2^24 numbers and float64 between parts.

    Args:
        layer: whose inputs they are.
        inputs: of every batch.
        generator: draws the rows.
        weight: ``W``, ``[G, O, K]``.
        few: whether rows are kept instead of the matrix where they are at most a quarter of many columns.
    """
    most_kept = layer.fan_in // _FEWER if few and layer.fan_in >= _MANY else 0
    parts = (
        (x_q, x - x_q if weight is not None and x is not x_q else None)
        for real, quantized, most in inputs
        for x, x_q in paired_rows(layer, real, quantized, most, generator)
    )
    kept: list[_Part] = []
    count = 0
    for part in parts:
        kept.append(part)
        count += int(part[0].shape[1])
        if count > most_kept:
            return _summed(itertools.chain((kept.pop(0) for _ in range(len(kept))), parts), weight)
    assert kept, layer.name
    return Moments(FewRows(torch.cat([x for x, _ in kept], 1).double()), _moved_to(weight, kept), count)


_Part = tuple[Tensor, Tensor | None]
"""Rows of quantized inputs, and what the float ones differ from them by, if they do."""


def _summed(parts: Iterable[_Part], weight: Tensor | None) -> Moments:
    own: Tensor | None = None
    moved: Tensor | None = None
    count = 0
    for x, difference in parts:
        own = _added(own, gram(x).double())
        count += int(x.shape[1])
        if weight is not None and difference is not None:
            moved = _added(moved, _moved(weight, difference, x))
    assert own is not None
    if weight is not None and moved is None:
        moved = torch.zeros_like(weight, dtype=torch.float64)
    return Moments(own, moved, count)


def _moved_to(weight: Tensor | None, kept: Sequence[_Part]) -> Tensor | None:
    """``W d^T`` of all rows, ``[G, O, P]`` float64; ``d`` is the difference of float and quantized inputs."""
    if weight is None:
        return None
    nothing = weight.new_zeros(1, dtype=torch.float64)
    parts = [
        nothing.expand(*weight.shape[:2], x.shape[1]) if d is None else (weight @ d.transpose(1, 2)).double()
        for x, d in kept
    ]
    return torch.cat(parts, 2)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Add to ``total`` in place, if there is one."""
    return part if total is None else total.add_(part)


def gram(x: Tensor) -> Tensor:
    """``x^T x`` of ``[G, P, K]``, exactly symmetric; of many columns only blocks on and above the diagonal are computed."""
    n = int(x.shape[2])
    if n < _BLOCKED:
        return x.transpose(1, 2) @ x
    found, size = x.new_empty((len(x), n, n)), -(-n // 4)
    for start in range(0, n, size):
        stop = min(start + size, n)
        found[:, start:stop, start:] = x[:, :, start:stop].transpose(1, 2) @ x[:, :, start:]
        found[:, stop:, start:stop] = found[:, start:stop, stop:].transpose(1, 2)
    return found


def _moved(weight: Tensor, difference: Tensor, x: Tensor) -> Tensor:
    """``W d^T x`` in the order of products that takes fewer multiplications: a layer has few outputs or few inputs."""
    if 2 * weight.shape[1] < weight.shape[2]:
        return ((difference @ weight.transpose(1, 2)).transpose(1, 2) @ x).double()
    return weight.double() @ (difference.transpose(1, 2) @ x).double()


def paired_rows(
    layer: Layer, real: Tensor, quantized: Tensor, most: float, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """At most ``most`` evenly drawn rows of both inputs, in parts; one tensor where both inputs are the same."""
    total = layer.positions(quantized)
    drawn = None if total <= most else _drawn(total, math.ceil(most), generator).to(quantized.device)
    return _pairs(layer, real, quantized, drawn)


def _pairs(layer: Layer, real: Tensor, quantized: Tensor, drawn: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of both inputs in parts; the same tensor where both inputs are the same."""

    def rows(x: Tensor) -> Iterator[Tensor]:
        return layer.rows(x) if drawn is None else layer.rows_at(x, drawn)

    if real is quantized:
        return ((part, part) for part in rows(quantized))
    return zip(rows(real), rows(quantized), strict=True)


def _drawn(total: int, most: int, generator: torch.Generator) -> Tensor:
    """``most`` sorted positions below ``total``, one from each of as many equal intervals."""
    starts = torch.arange(most + 1, dtype=torch.int64) * total // most
    return starts[:-1] + (torch.rand(most, generator=generator) * (starts[1:] - starts[:-1])).long()


def sample_rows(
    layer: Layer,
    pairs: Iterable[tuple[Tensor, Tensor]],
    total: int,
    most: int,
    generator: torch.Generator,
    places: tuple[Tensor, Tensor],
) -> None:
    """Fill ``places`` (float and quantized, each ``[G, most, K]``) with the same random rows of both inputs."""
    chosen = torch.randperm(total, generator=generator)[:most].sort().values
    start = filled = 0
    for pair in pairs:
        counts = 0
        for real, quantized in zip(layer.rows(pair[0]), layer.rows(pair[1]), strict=True):
            n = int(real.shape[1])
            low, high = torch.searchsorted(chosen, torch.tensor([start + counts, start + counts + n])).tolist()
            index = (chosen[low:high] - start - counts).to(real.device)
            places[0][:, filled : filled + high - low] = real[:, index]
            places[1][:, filled : filled + high - low] = quantized[:, index]
            filled += high - low
            counts += n
        start += counts
