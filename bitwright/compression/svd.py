"""Factorise layers into two or three smaller ones by low rank, from singular values and real inputs.

Every form is one factorization: a weight seen as ``W [O, P, Q]`` becomes ``B [O, r, Q]`` after ``A [r, P]``, where ``A`` works on
the axis ``P`` of what the layer reads and ``Q`` is left to the second layer.

========= ============================================ ============== ===============================================
form      layers                                       ``P``, ``Q``   source
========= ============================================ ============== ===============================================
spatial   k x 1, then 1 x k (or the other way round)   (i, h), w      Jaderberg et al. 2014, arXiv:1405.3866, scheme 2
weight    1 x 1, then k x k; two linear layers         i, (h, w)      weight SVD
output    k x k, then 1 x 1                            (i, h, w), 1   Zhang et al. 2015, arXiv:1505.06798
tucker    1 x 1, k x k, 1 x 1                          both           Kim et al. 2015, arXiv:1511.06530
========= ============================================ ============== ===============================================

Without data the squared error of the weight is least (truncated singular values). With the second moments ``G`` of real inputs
the squared error of the *outputs* is made small: singular values of ``W S`` with ``S S^T = G`` (the activation-weighted
form, as ASVD, arXiv:2312.05821, and SVD-LLM, arXiv:2403.07378, know it for linear layers; it is the optimum where ``Q`` is 1),
and then ``B`` by least squares. A bias takes up the mean of what is left. Arithmetic is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from bitwright.compression.costs import changed_ms, graph_costs, remedy_of, slower, untouched, with_ms
from bitwright.compression.ratios import Chosen, Option, Part, Space, choose
from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import TRAITS
from bitwright.core.numerics.arrays import windows
from bitwright.core.simulation.float_model import AddBias, Before, Chain, Edit, FloatModel, SetParam, Undo
from bitwright.errors import CalibrationError, ConfigError, checks_arguments, close_matches, first_few
from bitwright.methods.details import Detailed
from bitwright.methods.front_end import Opened, front_end_of, plan_of
from bitwright.methods.layers import Reversible
from bitwright.tables import Table, plain

Array = NDArray[Any]
_DAMPING = 1e-6  # of the mean diagonal of G, so that directions without data stay finite


# ------------------------------------------------------------------------------------------------ arithmetic


class Factorization:
    """``W [O, P, Q]`` as ``B [O, r, Q]`` after ``A [r, P]``, for any rank ``r``.

    Args:
        W: ``[O, P, Q]``.
        G: second moments of the inputs, ``[P, Q, P, Q]``, symmetric; ``None`` weighs all inputs alike.
    """

    def __init__(self, W: Array, G: Array | None = None) -> None:
        self.W = np.asarray(W, np.float64)
        outputs, p, q = self.W.shape
        self.G = None if G is None else np.asarray(G, np.float64).reshape(p, q, p, q)
        self.max_rank = min(p, outputs * q)
        rows = self.W.transpose(0, 2, 1).reshape(outputs * q, p)
        if self.G is None:
            _, _, self._directions = np.linalg.svd(rows, full_matrices=False)
        else:
            weights, basis = np.linalg.eigh(np.einsum("aqbq->ab", self.G))
            root = np.sqrt(np.maximum(weights, _DAMPING * max(float(weights.mean()), 1e-300)))
            _, _, right = np.linalg.svd((rows @ basis) * root, full_matrices=False)
            self._directions = (right / root) @ basis.T

    def at(self, rank: int) -> tuple[Array, Array]:
        """``A [rank, P]`` with rows of length 1, and ``B [O, rank, Q]``.

        Raises:
            ConfigError: the rank is not between 1 and :attr:`max_rank`.
        """
        if not 1 <= rank <= self.max_rank:
            raise ConfigError(
                "rank", f"{rank} is not a rank of a weight {self.W.shape}", f"use 1 to {self.max_rank}"
            )  # fmt: skip
        A = self._directions[:rank]
        A = A / np.maximum(np.linalg.norm(A, axis=1, keepdims=True), 1e-300)
        if self.G is None:
            return A, np.tensordot(self.W, A, (1, 1)).transpose(0, 2, 1)
        half = np.tensordot(A, self.G, (1, 0))  # [r, Q, P, Q]
        inner = np.tensordot(half, A, (2, 1)).transpose(0, 1, 3, 2)
        n = rank * self.W.shape[2]
        wanted = np.tensordot(self.W, half, ((1, 2), (2, 3))).reshape(len(self.W), n)
        return A, _least_squares(inner.reshape(n, n), wanted).reshape(len(self.W), rank, -1)

    def error(self, composed: Array) -> float:
        """Share of the squared outputs (of the squared weight, without data) that ``composed [O, P, Q]`` misses."""
        delta, whole = self.W - composed, self.W
        if self.G is None:
            return float((delta**2).sum() / max(float((whole**2).sum()), 1e-300))
        n = whole[0].size
        G = self.G.reshape(n, n)
        missed, signal = (
            float(((w.reshape(-1, n) @ G) * w.reshape(-1, n)).sum()) for w in (delta, whole)
        )  # fmt: skip
        return max(missed, 0.0) / max(signal, 1e-300)


def _least_squares(inner: Array, wanted: Array) -> Array:
    """``B`` with ``B inner = wanted``, damped."""
    damped = inner + np.eye(len(inner)) * _DAMPING * max(float(np.trace(inner)) / len(inner), 1e-300)
    return np.linalg.solve(damped, wanted.T).T


def compose(A: Array, B: Array) -> Array:
    """``[O, P, Q]`` of ``A [r, P]`` and ``B [O, r, Q]``."""
    return np.tensordot(B, A, (1, 0)).transpose(0, 2, 1)


def low_rank(W: Array, rank: int, G: Array | None = None) -> tuple[Array, Array]:
    """Factorise a matrix ``W [O, K]`` into ``second [O, rank] @ first [rank, K]`` with least error.

    Args:
        W: the matrix; outputs are ``W x``.
        rank: 1 to the smaller of its sides.
        G: ``[K, K]``, second moments of ``x``: the mean squared error of the outputs is least, and without it that of ``W``.

    >>> first, second = low_rank(np.outer([1.0, 2.0], [3.0, 4.0, 5.0]), 1)
    >>> np.round(second @ first, 6)
    array([[ 3.,  4.,  5.],
           [ 6.,  8., 10.]])
    """
    found = Factorization(np.asarray(W)[:, :, None], G)
    first, second = found.at(rank)
    return first, second[:, :, 0]


def spatial_svd(W: Array, rank: int, G: Array | None = None, *, vertical_first: bool = True) -> tuple[Array, Array]:
    """Factorise a convolution ``W [O, I, kh, kw]`` into ``[rank, I, kh, 1]`` and ``[O, rank, 1, kw]``.

    Args:
        W: the weight.
        rank: channels between both.
        G: ``[K, K]``, ``K = I * kh * kw``, second moments of the patches that the convolution reads.
        vertical_first: ``False`` gives ``[rank, I, 1, kw]`` and ``[O, rank, kh, 1]``.

    Reference: Jaderberg et al. 2014, arXiv:1405.3866, section 3.2.
    """
    view = _SPATIAL if vertical_first else _SPATIAL_ACROSS
    A, B = Factorization(view.weight(W), None if G is None else view.moments(G, W.shape)).at(rank)
    return _spatial_kernels(A, B, W.shape, across=not vertical_first)


def _spatial_kernels(A: Array, B: Array, shape: Sequence[int], across: bool) -> tuple[Array, Array]:
    """``A [r, P]`` and ``B [O, r, Q]`` as weights of convolutions; ``across``: 1 x kw, then kh x 1."""
    o, i, kh, kw = shape
    first, last = ((1, kw), (kh, 1)) if across else ((kh, 1), (1, kw))
    return A.reshape(-1, i, *first), B.reshape(o, -1, *last)


def tucker2(W: Array, ranks: tuple[int, int], G: Array | None = None) -> tuple[Array, Array, Array]:
    """Factorise a convolution ``W [O, I, *k]`` into ``[r1, I, 1..]``, the core ``[r2, r1, *k]`` and ``[O, r2, 1..]``.

    Reference: Kim et al. 2015, arXiv:1511.06530, section 3.1; inputs first, then outputs on what they leave.
    """
    view = _POINTWISE
    return _tucker(Factorization(view.weight(W), None if G is None else view.moments(G, W.shape)), W.shape, ranks)


def _tucker(found: Factorization, shape: Sequence[int], ranks: tuple[int, int]) -> tuple[Array, Array, Array]:
    """:func:`tucker2` of a weight seen with its inputs as ``P``."""
    o, i, *kernel = shape
    one = (1,) * len(kernel)
    A, B = found.at(ranks[0])
    inner = None
    if found.G is not None:
        half = np.tensordot(A, found.G, (1, 0))
        inner = np.tensordot(half, A, (2, 1)).transpose(0, 1, 3, 2).reshape(B[0].size, B[0].size)
    core, last = low_rank(B.reshape(o, -1), ranks[1], inner)
    return A.reshape(ranks[0], i, *one), core.reshape(ranks[1], ranks[0], *kernel), last.reshape(o, ranks[1], *one)


@dataclass(frozen=True)
class _View:
    """Axes after the first that make up ``P`` when a weight ``[O, I, *kernel]`` is viewed as ``[O, P, Q]``."""

    of_first: Callable[[int], tuple[int, ...]]

    def weight(self, W: Array) -> Array:
        """``[O, P, Q]``."""
        first, rest = self._axes(W.ndim)
        p = math.prod(W.shape[a] for a in first)
        return np.asarray(W).transpose(0, *first, *rest).reshape(len(W), p, -1)

    def moments(self, G: Array, shape: Sequence[int]) -> Array:
        """``[P, Q, P, Q]`` of ``[K, K]``."""
        first, rest = self._axes(len(shape))
        n = len(shape) - 1
        order = [a - 1 for a in (*first, *rest)]
        wide = np.asarray(G).reshape(*shape[1:], *shape[1:]).transpose(*order, *(a + n for a in order))
        p = math.prod(shape[a] for a in first)
        q = math.prod(shape[a] for a in rest)
        return wide.reshape(p, q, p, q)

    def back(self, composed: Array, shape: Sequence[int]) -> Array:
        """The weight of :meth:`weight`."""
        first, rest = self._axes(len(shape))
        order = (0, *first, *rest)
        return composed.reshape(tuple(shape[a] for a in order)).transpose(np.argsort(order))

    def _axes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first = self.of_first(rank)
        return first, tuple(a for a in range(1, rank) if a not in first)


_SPATIAL = _View(lambda rank: (1, 2))
_SPATIAL_ACROSS = _View(lambda rank: (1, 3))
_POINTWISE = _View(lambda rank: (1,))
_WHOLE = _View(lambda rank: tuple(range(1, rank)))


# ------------------------------------------------------------------------------------------------ layers of a graph

#: forms in the order of the table above -> what they do
FORMS: dict[str, str] = {
    "spatial": "a k x k convolution as k x 1 and 1 x k",
    "weight": "a matrix as two; a k x k convolution as 1 x 1 and k x k",
    "output": "a k x k convolution as k x k and 1 x 1",
    "tucker": "a k x k convolution as 1 x 1, k x k and 1 x 1",
}
_RECURRENT = ("LSTM", "GRU", "RNN")


@dataclass(frozen=True)
class Factored:
    """A factorised layer.

    Attributes:
        layer: op.
        form: a key of :data:`FORMS`.
        rank: channels between the layers; two numbers for ``tucker``.
        macs, params: of the layers together.
        error: share of the layer's squared output that they miss.
        edit: what puts them there.
        bias: what is added to the bias, ``[O]``; ``None`` for nothing.
    """

    layer: str
    form: str
    rank: tuple[int, ...]
    macs: float
    params: float
    error: float
    edit: Chain = field(repr=False)
    bias: Array | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Factors:
    """Layers in place of one, see :class:`Chain`; what they compute together, ``[O, I, *kernel]``, and its error."""

    before: tuple[Before, ...]
    last: Array
    attrs: Mapping[str, Any]
    error: float
    composed: Array
    across: bool = False  # of ``spatial``: 1 x k comes first


class ReadsInputs(Protocol):
    """A layer that :func:`measure_inputs` shows its inputs."""

    name: str
    source: str
    op: Op

    def rows(self, x: Array) -> Array:
        """The rows that the weight multiplies, ``[rows, K]``."""

    def see(self, moments: Array, mean: Array) -> None:
        """Add second moments and mean of rows to the statistics."""


class LowRankLayer:
    """A layer whose weight can be factorised.

    Args:
        graph: that it is in.
        op: the layer.
        weight: its parameter, in the layout of the operator; of a recurrent layer the input matrices of all directions,
            ``[directions, gates * hidden, inputs]``.
        takes_bias: whether what is left of the mean can go into a bias.

    Attributes:
        name: of the op.
        source: the value that it reads.
        W: the weight as ``[O, I, *kernel]``.
        macs, params: of the layer as it is.
        forms: that it can take.
    """

    def __init__(self, graph: Graph, op: Op, weight: Array, takes_bias: bool) -> None:
        self.op, self.name, self.source = op, op.name, str(op.inputs[0])
        # outputs of a transposed convolution see parts of the kernel, so that a mean is no constant there
        self.takes_bias = takes_bias and op.type != "ConvTranspose"
        self._layout = weight.shape
        if op.type == "Conv":
            self.W = weight
        elif op.type == "ConvTranspose":
            self.W = weight.transpose(1, 0, *range(2, weight.ndim))
        elif op.type in _RECURRENT:
            self.W = weight.reshape(-1, weight.shape[-1])
        else:
            self.W = weight if op.attrs.get("transB") else weight.T
        self.kernel = self.W.shape[2:]
        read, made = graph.values[self.source].shape, graph.values[op.outputs[0]].shape
        self._read = math.prod(max(n, 1) for n in read) / max(self.W.shape[1], 1)  # positions
        self._made = math.prod(max(n, 1) for n in made) / max(self.W.shape[0], 1)
        if op.type in _RECURRENT:
            self._made = self._read
        self._space = read[2:], made[2:]
        steps = self._read if op.type == "ConvTranspose" else self._made
        self.macs, self.params = steps * self.W.size, float(self.W.size)
        spread = sum(k > 1 for k in self.kernel)
        self.forms: tuple[str, ...] = ("weight",)
        if op.type == "Conv" and spread:
            self.forms = ("spatial",) if spread == 2 == len(self.kernel) else ()
            self.forms += ("weight", "output", "tucker")
        self._moments: Array | None = None
        self._mean: Array | None = None
        self._known: dict[Any, Any] = {}

    # -- data

    @property
    def measured(self) -> bool:
        """Whether input statistics were collected."""
        return self._moments is not None

    def rows(self, x: Array) -> Array:
        """The rows that the weight multiplies, ``[rows, K]``, float64: patches of a convolution, else the last axis."""
        if self.op.type == "ConvTranspose":
            return np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]).astype(np.float64)
        if self.op.type != "Conv":
            return x.reshape(-1, x.shape[-1]).astype(np.float64)
        return patches(x, self.kernel, self.op.attrs)

    def see(self, moments: Array, mean: Array) -> None:
        """Add second moments ``[K, K]`` and the mean ``[K]`` of :meth:`rows` to the statistics."""
        self._known.clear()
        self._mean = mean if self.takes_bias else None
        self._moments = moments - np.outer(mean, mean) if self.takes_bias else moments

    # -- factors

    def ranks(self, form: str, ratio: float, cost: str = "macs", multiple: int = 1) -> tuple[int, ...]:
        """The largest rank whose layers cost at most ``ratio`` of the layer's ``macs`` or ``params``; at least 1.

        Args:
            form: a key of :data:`FORMS`.
            ratio: above 0.
            cost: ``macs`` or ``params``.
            multiple: the rank is rounded down to a multiple, where that leaves any.
        """
        whole = (self.macs if cost == "macs" else self.params) * ratio
        low, high = 1, self._most(form)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._cost(form, self._pair(form, middle))[cost != "macs"] <= whole * (1 + 1e-9)
            low, high = (middle, high) if fits else (low, middle - 1)
        return self._pair(form, max(low // multiple * multiple, 1) if low >= multiple else low)

    def at(self, form: str, rank: tuple[int, ...]) -> Factored:
        """The factorised layer."""
        key = (form, rank)
        if key not in self._known:
            self._known[key] = self._factored(form, rank)
        return cast(Factored, self._known[key])

    def _most(self, form: str) -> int:
        o, i = self.W.shape[:2]
        if form == "spatial":
            return min(i * self.kernel[0], o * self.kernel[1], i * self.kernel[1], o * self.kernel[0])
        if form == "output":
            return min(o, i * math.prod(self.kernel))
        return i if form == "tucker" else min(i, o * math.prod(self.kernel))

    def _pair(self, form: str, rank: int) -> tuple[int, ...]:
        """Rank of the inputs and, for ``tucker``, of the outputs in the same proportion."""
        if form != "tucker":
            return (rank,)
        o, i = self.W.shape[:2]
        return rank, max(1, min(round(rank * o / i), o, rank * math.prod(self.kernel)))

    def _cost(self, form: str, rank: tuple[int, ...], across: bool = False) -> tuple[float, float]:
        """Multiplications and parameters of the layers together."""
        o, i, kernel = *self.W.shape[:2], self.kernel
        k, r = math.prod(kernel), rank[0]
        if form == "spatial":
            (rows, columns), (out_rows, out_columns) = self._space
            kh, kw = kernel
            batch = self._made / max(math.prod(self._space[1]), 1)
            between = rows * out_columns if across else out_rows * columns
            first = r * i * (kw if across else kh)
            second = o * r * (kh if across else kw)
            return batch * between * first + self._made * second, first + second
        if form == "output":
            return self._made * (r * i * k + o * r), r * i * k + o * r
        if form == "tucker":
            r2 = rank[1]
            core, ends = r2 * r * k, (r * i, o * r2)
            return self._read * ends[0] + self._made * (core + ends[1]), core + sum(ends)
        second = o * r * k
        return self._read * r * i + (self._read if self.op.type == "ConvTranspose" else self._made) * second, (
            r * i + second
        )

    @cached_property
    def _attrs(self) -> dict[str, Any]:
        n = len(self.kernel)
        found = {"strides": (1,) * n, "dilations": (1,) * n, "pads": (0,) * 2 * n, "auto_pad": "NOTSET"}
        return {**found, **{k: v for k, v in self.op.attrs.items() if k in found and v is not None}}

    def _part(self, axes: Sequence[int]) -> dict[str, Any]:
        """Attributes of a convolution that has the kernel of some spatial axes only."""
        n, own = len(self.kernel), self._attrs
        return {
            "kernel_shape": tuple(self.kernel[a] if a in axes else 1 for a in range(n)),
            "strides": tuple(own["strides"][a] if a in axes else 1 for a in range(n)),
            "dilations": tuple(own["dilations"][a] if a in axes else 1 for a in range(n)),
            "pads": tuple(own["pads"][a] if a % n in axes else 0 for a in range(2 * n)),
            "auto_pad": own["auto_pad"],
            "group": 1,
        }

    def _factored(self, form: str, rank: tuple[int, ...]) -> Factored:
        by_form = {
            "spatial": self._as_spatial, "weight": self._as_weight, "output": self._as_output, "tucker": self._as_tucker,
        }  # fmt: skip
        made = by_form[form](rank)
        macs, params = self._cost(form, rank, made.across)
        bias = None
        if self._mean is not None:
            bias = (self.W - made.composed).reshape(len(self.W), -1) @ self._mean
            bias *= self.op.attrs.get("alpha", 1.0) if self.op.type == "Gemm" else 1.0
        edit = Chain(self.name, made.before, made.last, made.attrs)
        return Factored(self.name, form, rank, macs, params, made.error, edit, bias)

    def _as_spatial(self, rank: tuple[int, ...]) -> _Factors:
        """The better of k x 1 first and 1 x k first."""
        both = [self._two(view, rank[0]) for view in (_SPATIAL, _SPATIAL_ACROSS)]
        across = both[1][2] < both[0][2]
        A, B, error, composed = both[across]
        first, last = _spatial_kernels(A, B, self.W.shape, across)
        before = Before("Conv", first, self._part((int(across),)))
        return _Factors((before,), last, self._part((int(not across),)), error, composed, across)

    def _as_output(self, rank: tuple[int, ...]) -> _Factors:
        n = len(self.kernel)
        A, B, error, composed = self._two(_WHOLE, rank[0])
        before = Before("Conv", A.reshape(-1, *self.W.shape[1:]), self._part(range(n)))
        return _Factors((before,), B.reshape(len(self.W), -1, *(1,) * n), self._part(()), error, composed)

    def _as_tucker(self, rank: tuple[int, ...]) -> _Factors:
        whole = self._factorization(_POINTWISE)
        first, core, last = _tucker(whole, self.W.shape, (rank[0], rank[1]))
        flat = [w.reshape(*w.shape[:2], -1) for w in (first, core, last)]
        outer = np.tensordot(flat[2][:, :, 0], flat[1], (1, 0))  # [O, r1, Q]
        composed = compose(flat[0][:, :, 0], outer)
        before = Before("Conv", first, self._part(())), Before("Conv", core, self._part(range(len(self.kernel))))
        return _Factors(before, last, self._part(()), whole.error(composed), composed.reshape(self.W.shape))

    def _as_weight(self, rank: tuple[int, ...]) -> _Factors:
        if self.op.type == "ConvTranspose":
            return self._as_product(rank)
        A, B, error, composed = self._two(_POINTWISE, rank[0])
        last = B.reshape(len(self.W), -1, *self.kernel)
        if self.op.type == "Conv":
            before = Before("Conv", A.reshape(*A.shape, *(1,) * len(self.kernel)), self._part(()))
        else:
            before = Before("MatMul", A.T, {})
        if self.op.type in _RECURRENT:
            last = last.reshape(*self._layout[:-1], -1)
        elif self.op.type != "Conv" and not self.op.attrs.get("transB"):
            last = last.T
        return _Factors((before,), last, {}, error, composed)

    def _as_product(self, rank: tuple[int, ...]) -> _Factors:
        """Factors of a transposed convolution, a matrix product over channels before its outputs are summed."""
        product = Factorization(np.moveaxis(self.W, 1, -1).reshape(-1, self.W.shape[1], 1), self._moments)
        A, B = product.at(rank[0])
        before = Before("Conv", A.reshape(*A.shape, *(1,) * len(self.kernel)), self._part(()))
        last = np.moveaxis(B.reshape(len(self.W), *self.kernel, -1), -1, 0)
        return _Factors((before,), last, {}, product.error(compose(A, B)), self.W)

    def _factorization(self, view: _View) -> Factorization:
        key = ("view", id(view))
        if key not in self._known:
            moments = None if self._moments is None else view.moments(self._moments, self.W.shape)
            self._known[key] = Factorization(view.weight(self.W), moments)
        return cast(Factorization, self._known[key])

    def _two(self, view: _View, rank: int) -> tuple[Array, Array, float, Array]:
        found = self._factorization(view)
        A, B = found.at(min(rank, found.max_rank))
        composed = compose(A, B)
        return A, B, found.error(composed), view.back(composed, self.W.shape)

    def edits(self, found: Factored, view: FloatModel, bias: str | None) -> list[Edit]:
        """Everything that puts ``found`` into the model: the bias as well."""
        if found.bias is None or not np.any(found.bias):
            return [found.edit]
        if bias is None:
            return [AddBias(self.name, found.bias.astype(np.float32)), found.edit]
        return [SetParam(bias, view.param(bias) + found.bias.astype(np.float32)), found.edit]


def patches(x: Array, kernel: Sequence[int], attrs: Mapping[str, Any]) -> Array:
    """``[N * positions, C * kernel]`` float64: what each output of a convolution of ``x [N, C, *space]`` reads.

    Args:
        x: the input.
        kernel: sizes of the kernel.
        attrs: ``strides``, ``pads``, ``dilations``, ``auto_pad`` as of ONNX.

    >>> patches(np.arange(4.0).reshape(1, 1, 4), (3,), {"pads": (1, 1)}).astype(int)
    array([[0, 0, 1],
           [0, 1, 2],
           [1, 2, 3],
           [2, 3, 0]])
    """
    return windows(np.asarray(x, np.float64), kernel, attrs).reshape(-1, x.shape[1] * math.prod(kernel))


# ------------------------------------------------------------------------------------------------ finding layers


@dataclass
class LowRankLayers:
    """The layers of a model that can be factorised, and the reasons of the others.

    Attributes:
        of: op -> layer.
        refused: op -> reason, for operators that multiply by a stored weight.
        bias: op -> parameter of its bias.
    """

    of: dict[str, LowRankLayer] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    bias: dict[str, str | None] = field(default_factory=dict)

    def chosen(self, include: Iterable[str] | None = None, exclude: Iterable[str] = ()) -> list[LowRankLayer]:
        """The named layers.

        Raises:
            ConfigError: a name is none of a layer that can be factored; says why not.
        """
        include, exclude = None if include is None else tuple(include), tuple(exclude)
        for name in (*(include or ()), *exclude):
            if name not in self.of and name not in self.refused:
                known = [*self.of, *self.refused]
                raise ConfigError(name, f"the model has no such layer{close_matches(name, known)}", "name a layer")
        for name in include or ():
            if name in self.refused:
                raise ConfigError(name, f"it cannot be written as factors: {self.refused[name]}", "leave it out")
        kept = set(self.of if include is None else include) - set(exclude)
        return [layer for name, layer in self.of.items() if name in kept]


def find_low_rank_layers(view: FloatModel) -> LowRankLayers:
    """Find the layers whose weights can be factorised; iterative, linear in the size of the graph."""
    graph, found = view.graph(), LowRankLayers()
    for op in graph.ops:
        if op.type not in (*TRAITS["layer"], *_RECURRENT) or len(op.inputs) < 2 or op.inputs[1] is None:
            continue
        if not graph.values[op.inputs[1]].is_static:
            continue  # a product of two activations
        reason = _obstacle(graph, op) or view.can_edit(Chain(op.name, (), np.zeros(1), {}))
        if reason is not None:
            found.refused[op.name] = reason
            continue
        weights = [view.param(str(graph.values[str(one.inputs[1])].param)) for one in _directions(graph, op)]
        weight = np.stack(weights) if op.type in _RECURRENT and weights[0].ndim == 2 else weights[0]
        takes_bias, found.bias[op.name] = _bias(view, graph, op)
        found.of[op.name] = LowRankLayer(graph, op, weight, takes_bias)
    return found


def _bias(view: FloatModel, graph: Graph, op: Op) -> tuple[bool, str | None]:
    """Whether a bias can absorb the mean error, and its parameter; ``None`` if a bias must be added."""
    if op.type in _RECURRENT:
        return False, None
    if len(op.inputs) < 3 or op.inputs[2] is None:
        return view.can_edit(AddBias(op.name, np.zeros(1))) is None, None
    bias = graph.values[op.inputs[2]]
    one = len(graph.consumers(bias.name)) == 1 and bias.shape[-1:] == (math.prod(bias.shape),)
    own = bias.kind == "param" and one
    return own, bias.param if own else None


def _obstacle(graph: Graph, op: Op) -> str | None:
    """The reason why a layer is not factorised; ``None`` where it can be."""
    weight = graph.values[str(op.inputs[1])]
    if weight.kind != "param" or weight.param is None:
        return "its weight is computed by the model"
    if op.attrs.get("varies"):
        return "its attributes change from call to call"
    if any(port == 1 for port, _ in op.also):
        return "it runs several times with different weights"
    readers = [reader.name for reader, _ in graph.consumers(weight.name) if reader is not op]
    if readers:
        return f"{readers[0]} reads the same weight"
    if op.attrs.get("transA"):
        return "it reads its input transposed"
    if op.type not in _RECURRENT:
        return _no_matrix(op, weight.shape)
    if op.attrs.get("layout"):
        return "its layout has the batch first"
    first = _directions(graph, op)[0]
    return None if first is op else f"the input matrix is factored with that of {first.name}"


def _no_matrix(op: Op, shape: Sequence[int]) -> str | None:
    """The reason why a weight is not a matrix of several inputs and outputs; ``None`` where it is."""
    if int(op.attrs.get("group", 1)) > 1:
        depthwise = op.type == "Conv" and shape[1] == 1
        return "it is depthwise: each channel has one filter" if depthwise else "it is grouped"
    if op.type in ("Gemm", "MatMul") and len(shape) != 2:
        return "its weight is a stack of matrices"
    return "one of its sides has a single channel" if min(shape[:2]) < 2 else None


def _directions(graph: Graph, op: Op) -> list[Op]:
    """The recurrent operators that are directions of one layer of a module: their matrices are held apart, and read one input."""
    if op.type not in _RECURRENT or len(graph.values[str(op.inputs[1])].shape) != 2:
        return [op]
    readers = [reader for reader, port in graph.consumers(str(op.inputs[0])) if port == 0]
    return [r for r in readers if (r.type, r.module) == (op.type, op.module)]


def measure_inputs(
    view: FloatModel, layers: Sequence[ReadsInputs], batches: Iterable[Any], *, most_rows: int = 16384, seed: int = 0
) -> int:
    """Second moments of the layers' inputs, in one run of the batches.

    Args:
        view: the model.
        layers: those that will see their inputs.
        batches: real data.
        most_rows: rows (patches) that are kept of one layer, drawn evenly.
        seed: of the draw.

    Returns:
        The number of batches.

    Raises:
        CalibrationError: no batch, or an input that is NaN or infinite.
    """
    held = list(batches)
    if not held:
        raise CalibrationError("compress", "the data held no batch", "give some batches of real data")
    random = np.random.default_rng(seed)
    share = max(1, most_rows // len(held))
    sums: dict[str, Array] = {}
    means: dict[str, Array] = {}
    counts: dict[str, int] = {}
    for captured in view.capture(list(dict.fromkeys(layer.source for layer in layers)), held):
        for layer in layers:
            for x in captured[layer.source]:
                if not np.isfinite(x).all():
                    raise CalibrationError(
                        layer.source,
                        "it is NaN or infinite on this data",
                        "leave out the samples that cause it; `bitwright doctor` finds the operator",
                    )
                rows, name = _few_rows(layer, x, share, random), layer.name
                sums[name] = sums.get(name, 0) + rows.T @ rows
                means[name] = means.get(name, 0) + rows.sum(0)
                counts[name] = counts.get(name, 0) + len(rows)
    for layer in layers:
        n = counts.get(layer.name, 0)
        if n:
            layer.see(sums[layer.name] / n, means[layer.name] / n)
    return len(held)


def _few_rows(layer: ReadsInputs, x: Array, most: int, random: np.random.Generator) -> Array:
    """At most ``most`` rows of a layer's input; for a convolution, drawn from about four times as many."""
    if layer.op.type in ("Conv", "ConvTranspose"):
        per_sample = max(1, math.prod(x.shape[2:]))
        samples = max(1, math.ceil(4 * most / per_sample))
        x = x if samples >= len(x) else x[random.permutation(len(x))[:samples]]
    rows = layer.rows(x)
    return rows if len(rows) <= most else rows[random.permutation(len(rows))[:most]]


# ------------------------------------------------------------------------------------------------ a whole model

#: ratios of a layer's cost that a choice has
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


class SvdSpace(Space):
    """The search space of factorised layers for :func:`bitwright.compression.ratios.choose`.

    Args:
        opened: the model.
        data: batches; what layers read on them weighs their errors, and the outputs are compared on the first of them.
        ratios: of the cost of a layer that are offered.
        forms: keys of :data:`FORMS`; at every ratio the one of least error is offered.
        cost: what the ratios count: ``macs`` or ``params``.
        multiple: ranks are multiples of it.
        include, exclude: names of layers.
        data_aware: ``False`` takes the errors of weights.
        judged: batches that the outputs are compared on; the data by default.

    Raises:
        ConfigError: a form or layer that does not exist; no layer can be written as factors.
        CalibrationError: no data.
    """

    def __init__(
        self,
        opened: Opened,
        data: Iterable[Any],
        *,
        ratios: Sequence[float] = RATIOS,
        forms: Sequence[str] = tuple(FORMS),
        cost: str = "macs",
        multiple: int = 1,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        data_aware: bool = True,
        judged: Iterable[Any] | None = None,
    ) -> None:
        unknown = next((form for form in forms if form not in FORMS), None)
        if unknown is not None:
            problem = f"there is no form {unknown!r}{close_matches(str(unknown), FORMS)}"
            raise ConfigError("forms", problem, f"use {', '.join(FORMS)}")
        self.opened, self.view, self.cost, self.multiple, self.forms = opened, opened.view, cost, multiple, forms
        batches = list(data)
        if not batches:
            raise CalibrationError("compress", "the data held no batch", "give some batches of real data")
        self.found = find_low_rank_layers(self.view)
        every = self.found.chosen(include, exclude)
        self.layers = self._kept(
            every, lambda layer: bool(set(layer.forms) & set(forms)), f"it has no form of {', '.join(forms)}"
        )
        self.whole = graph_costs(self.view.graph())
        if data_aware and self.layers:
            measure_inputs(self.view, self.layers, batches)
            self.layers = self._kept(self.layers, lambda layer: layer.measured, "the data did not reach it")
        if not self.layers:
            reasons = [f"{name}: {reason}" for name, reason in self.found.refused.items()]
            raise ConfigError(
                "svd",
                f"no layer can be written as factors: {first_few(reasons, 6) or 'none multiplies by a stored weight'}",
                remedy_of(self.view.graph(), "allow other forms, or exclude fewer layers"),
            )
        self.batches = batches if judged is None else list(judged)
        self._wanted = [[np.array(y) for y in outputs] for outputs in opened.outputs(self.batches)]
        self.parts = [self._part(layer, ratios) for layer in self.layers]
        self.fixed = {
            name: self.whole[name] - sum(part.options[0].costs[name] for part in self.parts)
            for name in ("macs", "params", "bytes")
        }

    def _kept(
        self, layers: Sequence[LowRankLayer], keeps: Callable[[LowRankLayer], bool], reason: str
    ) -> list[LowRankLayer]:
        """The layers for which ``keeps`` holds; the others are refused for ``reason``."""
        self.found.refused.update((layer.name, reason) for layer in layers if not keeps(layer))
        return [layer for layer in layers if keeps(layer)]

    def _part(self, layer: LowRankLayer, ratios: Sequence[float]) -> Part:
        options = [Option("as it is", _costs(layer.macs, layer.params), 0.0)]
        for ratio in sorted(ratios, reverse=True):
            best = self.factored(layer, ratio)
            if best is not None and best.macs <= layer.macs and best.params <= layer.params:
                name = f"{best.form}, rank {' x '.join(map(str, best.rank))}"
                option = Option(name, _costs(best.macs, best.params), best.error, ratio, best)
                options += [option] if option.name != options[-1].name else []
        return Part(layer.name, tuple(options))

    def factored(self, layer: LowRankLayer, ratio: float) -> Factored | None:
        """The form of least error that costs at most ``ratio`` of the layer; ``None`` where none is cheaper."""
        found = []
        for form in layer.forms:
            if form in self.forms:
                one = layer.at(form, layer.ranks(form, ratio, self.cost, self.multiple))
                paid = one.macs / layer.macs if self.cost == "macs" else one.params / layer.params
                found += [one] if paid <= ratio * (1 + 1e-6) else []
        return min(found, key=lambda one: one.error, default=None)

    def plan_step(self, one: Factored) -> dict[str, Any] | None:
        """Plan step that rebuilds the layer, as plain data; ``None`` in ONNX, where the file holds the structure."""
        step: dict[str, Any] | None = self.plans.get(one.layer)
        return step

    def apply(self, choice: Sequence[int]) -> Undo:
        """Put the factors of all changed layers into the model."""
        return self.put([p.options[k].what for p, k in zip(self.parts, choice, strict=True) if k])

    def put(self, factored: Iterable[Factored]) -> Undo:
        """Put factors into the model."""
        edits: list[Edit] = []
        factored = list(factored)
        described = getattr(self.view, "chain_step", lambda edit, bias: None)
        self.plans = {
            one.layer: described(one.edit, one.bias is not None and bool(np.any(one.bias))) for one in factored
        }  # before they are there
        for one in factored:
            edits += self.found.of[one.layer].edits(one, self.view, self.found.bias[one.layer])
        return self.view.edit(edits)

    def noise(self) -> float:
        """Noise-to-signal power ratio of the outputs of the current model, mean over batches."""
        found = []
        for outputs, wanted in zip(self.opened.outputs(self.batches), self._wanted, strict=True):
            for y, y0 in zip(outputs, wanted, strict=True):
                if y0.dtype.kind == "f" and y0.size:
                    signal = float(np.square(y0, dtype=np.float64).sum())
                    found.append(float(np.square(y.astype(np.float64) - y0).sum()) / max(signal, 1e-300))
        return float(np.mean(found)) if found else 0.0

    def runnable(self) -> Any:
        """The argument of the metric."""
        return self.opened.runnable()


def _costs(macs: float, params: float) -> dict[str, float]:
    return {"macs": macs, "params": params, "bytes": 4 * params}


@dataclass(frozen=True)
class SvdRow:
    """Outcome for one layer.

    Attributes:
        layer: its name.
        form, rank: the factors; empty where it is as it was.
        macs, params: before and after.
        error: share of its output that is missed.
    """

    layer: str
    form: str
    rank: tuple[int, ...]
    macs: tuple[float, float]
    params: tuple[float, float]
    error: float


@dataclass(frozen=True)
class SvdReport(Reversible, Detailed):
    """The factorised layers; a table when printed.

    Attributes:
        rows: one per layer that could be factored.
        refused: layer -> why it could not.
        before, after: costs of the whole model; ``ms`` where they were measured.
        chosen: the search, where ratios were chosen.
        plan: of a module, what :func:`bitwright.torch.rebuild` takes to give one of the original class these layers.
    """

    _rows = "rows"

    rows: tuple[SvdRow, ...]
    refused: Mapping[str, str]
    before: Mapping[str, float]
    after: Mapping[str, float]
    chosen: Chosen | None = field(default=None, repr=False)
    plan: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _undos: list[Undo] = field(default_factory=list, repr=False)

    @property
    def changed(self) -> bool:
        """Whether any layer was factorised."""
        return any(row.form for row in self.rows)

    @property
    def choice(self) -> Chosen | None:
        """As :attr:`chosen`."""
        return self.chosen

    @property
    def summary(self) -> str:
        """One line; it begins with milliseconds where they rose."""
        count = sum(bool(row.form) for row in self.rows)
        shares = ", ".join(f"{name} {self.after[name] / max(self.before[name], 1e-300):.3f}" for name in self.after)
        return f"{slower(self.before, self.after)}{count} of {len(self.rows)} layers in factors: {shares} of before"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what undoes the change."""
        found: dict[str, Any] = plain(
            {"rows": self.rows, "refused": self.refused, "before": self.before, "after": self.after}
        )
        return found

    def table(self) -> Table:
        """All layers."""
        head = ("layer", "factors", "MACs before", "after", "params before", "after", "error")
        rows = [
            (
                r.layer, f"{r.form}, rank {' x '.join(map(str, r.rank))}" if r.form else "as it was",
                f"{r.macs[0]:,.0f}", f"{r.macs[1]:,.0f}", f"{r.params[0]:,.0f}", f"{r.params[1]:,.0f}", f"{r.error:.2%}",
            )
            for r in self.rows
        ]  # fmt: skip
        return Table(head, rows, right=range(2, 7))

    def __str__(self) -> str:
        lines = [f"not touched: {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join([str(self.table()), self.summary, *lines])


_NO_CONFIGURATION = "layers are written as factors, which no configuration describes"


def svd_report(space: SvdSpace, factored: Sequence[Factored], undo: Undo, chosen: Chosen | None = None) -> SvdReport:
    """The report of the factors in the model of ``space``."""
    by_layer = {one.layer: one for one in factored}
    rows = []
    before = {name: space.whole[name] for name in ("macs", "params", "bytes")}
    after = dict(before)
    for layer in space.layers:
        one = by_layer.get(layer.name)
        made = (layer.macs, layer.params) if one is None else (one.macs, one.params)
        form, rank, error = ("", (), 0.0) if one is None else (one.form, one.rank, one.error)
        rows.append(SvdRow(layer.name, form, rank, (layer.macs, made[0]), (layer.params, made[1]), error))
        saved = _costs(layer.macs - made[0], layer.params - made[1])
        after = {name: after[name] - saved[name] for name in after}
    steps = [step for one in factored if (step := space.plan_step(one)) is not None]
    plan = plan_of(steps) if len(steps) == len(factored) else {}
    saves = space.opened.undescribed(_NO_CONFIGURATION, plan) if factored else lambda: None

    def undo_both() -> None:
        saves()
        undo()

    return SvdReport(tuple(rows), dict(space.found.refused), before, after, chosen, plan, [undo_both])


def svd(
    opened: Opened,
    data: Iterable[Any],
    *,
    macs: float | None = None,
    params: float | None = None,
    ratios: Mapping[str, float] | None = None,
    forms: Sequence[str] = tuple(FORMS),
    multiple: int = 1,
    exclude: Iterable[str] = (),
    data_aware: bool = True,
    metric: Callable[[Any], Any] | None = None,
    lower_is_better: bool = False,
    deadline: float | None = None,
    progress: bool = True,
) -> SvdReport:
    """Factorise layers of an opened model; ``report.undo()`` restores it.

    Args:
        opened: the model, changed in place.
        data: batches of real inputs.
        macs, params: what the model may keep of its multiplications and parameters; the ratio of each layer is chosen.
        ratios: layer -> ratio of its cost, instead of ``macs`` and ``params``.
        forms: keys of :data:`FORMS` that may be used.
        multiple: ranks are multiples of it.
        exclude: layers that are left alone.
        data_aware: make the error of outputs small, and not of weights.
        metric, lower_is_better, deadline, progress: as for :func:`bitwright.compression.ratios.choose`.

    Raises:
        ConfigError: no target, or one that cannot be met; a ratio that is none; a layer that is unknown or cannot be factored.
    """
    target = {name: value for name, value in (("macs", macs), ("params", params)) if value is not None}
    if bool(target) == bool(ratios):
        raise ConfigError("svd", "it needs a target", "give macs or params (0.5 halves them), or ratios of layers")
    cost = "params" if target.keys() == {"params"} else "macs"
    common: dict[str, Any] = {"forms": forms, "cost": cost, "multiple": multiple, "data_aware": data_aware}
    if ratios:
        return _at_ratios(opened, data, ratios, common)
    space = SvdSpace(opened, data, exclude=exclude, **common)
    chosen = choose(
        space, target, metric=metric, lower_is_better=lower_is_better, deadline=deadline, progress=progress
    )  # fmt: skip
    picked = [p.options[k].what for p, k in zip(space.parts, chosen.best.choice, strict=True) if k]
    return svd_report(space, picked, space.apply(chosen.best.choice), chosen)


def _at_ratios(
    opened: Opened, data: Iterable[Any], ratios: Mapping[str, float], common: Mapping[str, Any]
) -> SvdReport:
    """:func:`svd` with a given ratio for each layer."""
    for name, ratio in ratios.items():
        if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise ConfigError(name, f"{ratio!r} is not a ratio", "write a number above 0, 1 at most")
    space = SvdSpace(opened, data, ratios=(), include=ratios, **common)
    found = []
    for layer in space.layers:
        ratio = ratios[layer.name]
        if ratio == 1:
            continue
        one = space.factored(layer, ratio)
        if one is None:
            least = min(layer.at(form, layer._pair(form, 1)).macs for form in layer.forms if form in space.forms)
            problem = f"{ratio:g} of its cost cannot be met: the nearest that can is {least / layer.macs:.3f}"
            raise ConfigError(layer.name, problem, "ask for more")
        found.append(one)
    return svd_report(space, found, space.put(found))


@checks_arguments
def svd_model(
    model: Any,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    macs: float | None = None,
    params: float | None = None,
    ratios: Mapping[str, float] | None = None,
    forms: Sequence[str] = tuple(FORMS),
    multiple: int = 1,
    exclude: Iterable[str] = (),
    data_aware: bool = True,
    metric: Callable[[Any], Any] | None = None,
    lower_is_better: bool = False,
    deadline: float | None = None,
    providers: Any = None,
    milliseconds: bool | None = None,
    progress: bool = True,
) -> SvdReport:
    """Factorise layers of a PyTorch or ONNX model into two or three smaller ones, in place.

    Convolutions become k x 1 and 1 x k (spatial SVD), 1 x 1 and k x k, k x k and 1 x 1, or 1 x 1, k x k and 1 x 1 (Tucker-2);
    linear layers, products with a stored matrix and the input matrices of recurrent layers become two products. Without
    training; the errors of outputs on real inputs are made small, and a bias takes up their mean.

    Args:
        model: a module, or a loaded ONNX model; changed in place.
        data: batches (feeds) of real inputs; a few hundred samples are enough.
        dummy_input: the example input; the first batch by default.
        macs, params: what the model may keep of its multiplications and of its parameters, 0.5 for half. Which layer keeps how
            much is chosen exactly from estimates, see :func:`bitwright.compression.ratios.choose`.
        ratios: layer -> ratio of its cost, in place of ``macs`` and ``params``.
        forms: ``spatial``, ``weight``, ``output``, ``tucker``; all of them by default, the best at each ratio.
        multiple: ranks are multiples of it, as kernels of a target like them.
        exclude: names of layers that are left as they are.
        data_aware: ``False`` makes the errors of weights small, whatever the data.
        metric: ``metric(model) -> float`` (of a session for ONNX): decides between the choices of least noise.
        lower_is_better: of the metric.
        deadline: seconds after which no further choice is measured.
        providers: where ONNX Runtime computes.
        milliseconds: measure a run of the first batch before and after, in ONNX Runtime on one thread; by default of ONNX models,
            as a module has to be exported for it. Fewer multiplications in more layers can take longer: the report says so first.
        progress: show progress bars on a terminal.

    Returns:
        The report: one row per layer, and why others were not touched. Of a module ``report.undo()`` gives it back as it was. The
        change of an ONNX model is final.

    Raises:
        ConfigError: no target; one that cannot be met, with the nearest that can; a layer that is unknown or cannot be factored.
        CalibrationError: no data, an input that is NaN or infinite, or a metric that is no finite number.

    Reference: Jaderberg et al. 2014, arXiv:1405.3866; Kim et al. 2015, arXiv:1511.06530; Wang et al. 2024, arXiv:2403.07378.
    """
    batches = list(data)
    if not batches:
        raise CalibrationError("svd_model", "the data held no batch", "give some batches of real data")
    example = batches[0] if dummy_input is None else dummy_input
    timed = not hasattr(model, "state_dict") if milliseconds is None else milliseconds
    whole = untouched(model) if timed else None
    opened = front_end_of(model).open_model(model, None, example, "svd_model", providers)
    report = svd(
        opened, batches, macs=macs, params=params, ratios=ratios, forms=forms, multiple=multiple, exclude=exclude,
        data_aware=data_aware, metric=metric, lower_is_better=lower_is_better, deadline=deadline, progress=progress,
    )  # fmt: skip
    opened.finish(report)
    if timed:
        report = replace(report, **with_ms(report.before, report.after, changed_ms(whole, model, batches[0])))
    return report
