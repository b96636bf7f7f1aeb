"""Linear transforms of layers' inputs, fitted to data, for activations of few bits.

A layer that reads ``x`` may read ``x @ P`` for any invertible ``P``, with weight ``W @ inv(P).T``. A quantizer with one scale for
all channels of a token adds noise whose power is about the same in every channel and grows with the power of the token.
The noise of the layer's outputs is then proportional to ``tr(P.T C P) * tr(inv(P) G inv(P).T)``, where ``C`` is the second
moment of the inputs and ``G = W.T W`` that of the weights. By the inequality of Cauchy and Schwarz no ``P`` makes it less
than ``tr((C^(1/2) G C^(1/2))^(1/2)) ** 2``, and that is reached where ``P @ P.T`` is the geometric mean of ``inv(C)`` and
``G``. This leaves an orthogonal factor open: the matrix of :func:`~bitwright.methods.scaling.rotate.random_rotation`, which
spreads outliers. Rounding errors of the weights meet the same product, with the parts of ``C`` and ``G`` exchanged.

The values of attention are transformed head by head by the layer that makes them, at no cost at run time. In front of other
layers the product runs with the model.

References: rotations alone: Ashkboos et al. 2024, arXiv:2404.00456. Transforms that are learned by gradients: Sun et al. 2024,
arXiv:2410.09426. The closed form here follows from the equations above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bitwright.core.graph.operators import is_rotation
from bitwright.core.numerics.rotations import random_rotation
from bitwright.core.simulation.float_model import Before, Chain, Edit, FloatModel, SetParam, Undo
from bitwright.errors import ConfigError, checks_arguments
from bitwright.methods.attention import Attention
from bitwright.methods.front_end import front_end_of
from bitwright.methods.layers import Array, Bar, Check, Layer, Layers, Refused, Reversible, log_refused, no_bar, sift
from bitwright.methods.scaling.rotate import rotatable_heads, turned_inputs, turned_outputs
from bitwright.methods.scaling.smooth import observe, refuse_no_data
from bitwright.progress import progress as progress_bar
from bitwright.tables import Tabular, counted

#: of the mean power of a channel: added to both second moments, so that channels without any have a finite factor
DAMPING = 0.01


# -------------------------------------------------------------------------------------------- mathematics


def best_transform(C: Array, G: Array, damping: float = DAMPING) -> tuple[Array, float]:
    """The symmetric ``P`` with the least ``tr(P.T C P) * tr(inv(P) G inv(P).T)``; the power of ``x @ P`` is that of ``x``.

    Args:
        C: second moment of the inputs, shape [n, n], symmetric and positive semidefinite.
        G: second moment of the rows of the weights, alike.
        damping: see :data:`DAMPING`.

    Returns:
        ``P``, float64 [n, n], and the product over that of an orthogonal matrix.

    Example:
        A channel of large inputs and one of large weights: both factors become alike.

        >>> P, ratio = best_transform(np.diag([16.0, 1.0]), np.diag([1.0, 16.0]), damping=1e-9)
        >>> np.round(P / P[0, 0], 4), round(ratio, 4)
        (array([[1., 0.],
               [0., 4.]]), 0.2215)
    """
    n = len(C)
    if not np.trace(C) > 0 or not np.trace(G) > 0:
        return np.eye(n), 1.0
    inputs, weights = (M / np.trace(M) * n + damping * np.eye(n) for M in (C, G))
    root, back = _power(inputs, 0.5), _power(inputs, -0.5)
    P = _power(back @ _power(root @ weights @ root, 0.5) @ back, 0.5)
    P *= np.sqrt(np.trace(C) / np.trace(P @ C @ P))
    inverse = np.linalg.inv(P)
    return P, float(np.trace(inverse @ G @ inverse) / np.trace(G))


def _power(M: Array, exponent: float) -> Array:
    """A power of a symmetric positive definite matrix."""
    values, vectors = np.linalg.eigh((M + M.T) / 2)
    values = np.maximum(values, values[-1] * 1e-12)
    result: Array = (vectors * values**exponent) @ vectors.T
    return result


# ---------------------------------------------------------------------------------------------- on a model


@dataclass(frozen=True)
class Product:
    """Layers that read one value, and the product that transforms it at run time.

    Attributes:
        layers: that read it.
        size: channels of the value.
        noise: expected noise of their outputs over that behind a rotation.
    """

    _as_text = True

    layers: tuple[Layer, ...]
    size: int
    noise: float

    def __str__(self) -> str:
        names = ", ".join(layer.op for layer in self.layers)
        return f"input of {names} at run time, {self.size} channels: noise x {self.noise:.2f} of a rotation's"


@dataclass(frozen=True)
class Values:
    """The values of an attention, transformed head by head in the weights around them.

    Attributes:
        heads: the attention.
        noise: expected noise of the output projection over that behind a rotation, mean over heads.
    """

    _as_text = True

    heads: Attention
    noise: float

    def __str__(self) -> str:
        assert self.heads.value is not None and self.heads.output is not None
        return f"values {self.heads.value.op} -> {self.heads.output.op}: noise x {self.noise:.2f} of a rotation's"


@dataclass
class TransformReport(Tabular, Reversible):
    """Result of transforms.

    Attributes:
        products: inputs that a product transforms at run time.
        values: attentions whose values are transformed by the weights.
        refused: layers left as they are, with the reasons.
        samples: how many were measured.
    """

    _rows = "products"

    products: tuple[Product, ...] = ()
    values: tuple[Values, ...] = ()
    refused: tuple[Refused, ...] = ()
    samples: int = 0
    _undos: list[Undo] = field(default_factory=list, repr=False)

    @property
    def changed(self) -> bool:
        """Whether anything was transformed."""
        return bool(self.products or self.values)

    def __str__(self) -> str:
        nothing = "" if self.changed else "NOTHING is transformed: "
        lines = [
            f"{nothing}{counted(len(self.products), 'input')} transformed at run time, values of "
            f"{counted(len(self.values), 'attention')} in the weights, {len(self.refused)} left; {self.samples} samples"
        ]
        lines += [f"  transformed  {item}" for item in (*self.products, *self.values)]
        lines += [f"  left         {refused}" for refused in self.refused]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Fitted:
    """A fitted transform."""

    row: Product | Values
    edits: tuple[Edit, ...]


def transform(
    view: FloatModel,
    batches: Sequence[Any],
    check: Check | None = None,
    *,
    shared: bool = False,
    seed: int = 0,
    bar: Bar = no_bar,
) -> TransformReport:
    """Fit and insert transforms; see :func:`transform_model`."""
    if not batches:
        refuse_no_data("transform")
    layers = Layers(view.graph(), view)
    attended = [heads for heads in rotatable_heads(layers) if _whole_heads(heads)]
    groups, refused = _groups(view, layers, {str(_output(heads).op) for heads in attended}, shared)
    moments, samples = _moments(
        view, layers, [*(g[0] for g in groups), *map(_output, attended)], bar(batches, "measuring")
    )

    def fit_values() -> list[_Fitted]:
        return [_fit_values(view, heads, moments[_input(layers, _output(heads))], seed) for heads in attended]

    def fit_groups() -> list[_Fitted]:
        return [_fit_group(view, group, moments[_input(layers, group[0])], seed) for group in groups]

    report = TransformReport(refused=tuple(refused), samples=samples)
    try:
        # one after the other: both change the weight of a layer that makes values
        report.values = _kept(view, report, fit_values(), check, bar)
        report.products = _kept(view, report, fit_groups(), check, bar)
    except BaseException:
        report.undo()
        raise
    log_refused(report.refused, "transformed", changed=report.changed, without=", as the model has no linear layer")
    return report


def _kept(view: FloatModel, report: TransformReport, fitted: Sequence[_Fitted], check: Check | None, bar: Bar) -> Any:
    """Carry out the transforms that keep the model's function; the others are noted as refused."""
    good, rejected = sift(fitted, lambda some: _carry_out(view, some), check, bar)
    report.refused += tuple(Refused(_name(item.row), reason) for item, reason in rejected)
    report._undos.append(_carry_out(view, good))
    return tuple(item.row for item in good)


def _whole_heads(heads: Attention) -> bool:
    """Whether a layer computes only values, each head for a whole number of heads of the output projection."""
    return heads.value is not None and _output(heads).axes.inputs % heads.value.axes.outputs == 0


def _output(heads: Attention) -> Layer:
    assert heads.output is not None
    return heads.output


def _moments(
    view: FloatModel, layers: Layers, readers: Sequence[Layer], batches: Iterable[Any]
) -> tuple[dict[str, Array], int]:
    """The second moments of layers' inputs by value, and the number of samples."""
    widths = {_input(layers, layer): layer.axes.inputs for layer in readers}
    moments = {value: np.zeros((width, width)) for value, width in widths.items()}

    def add(value: str, rows: Array) -> None:
        wide = rows.astype(np.float64)
        moments[value] += wide.T @ wide

    return moments, observe(view, dict.fromkeys(widths, -1), batches, add, "transform") if widths else 0


def _input(layers: Layers, layer: Layer) -> str:
    return str(layers.graph.op(layer.op).inputs[0])


def _name(row: Product | Values) -> str:
    return row.layers[0].op if isinstance(row, Product) else str(row.heads.value and row.heads.value.op)


def _carry_out(view: FloatModel, items: Sequence[_Fitted]) -> Undo:
    return view.edit([edit for item in items for edit in item.edits])


def _groups(
    view: FloatModel, layers: Layers, merged: set[str], shared: bool
) -> tuple[list[tuple[Layer, ...]], list[Refused]]:
    """Linear layers by the value that they read, and the reasons of the others."""
    linear = _linear(layers)
    reasons = {layer.op: _why_not(view, layers, layer) for layer in linear}
    refused = [Refused(op, reason) for op, reason in reasons.items() if reason is not None]
    found: dict[str, list[Layer]] = {}
    for layer in linear:
        if reasons[layer.op] is None and layer.op not in merged:
            found.setdefault(_input(layers, layer), []).append(layer)
    groups = [tuple(group) for group in found.values() if shared or len(group) == 1]
    why = "{} layers read its input, each would have a product: shared=True adds them"
    several = [] if shared else [group for group in found.values() if len(group) > 1]
    return groups, refused + [Refused(layer.op, why.format(len(group))) for group in several for layer in group]


def _linear(layers: Layers) -> list[Layer]:
    held = [layer for layer in layers.of.values() if layer.kind == "layer" and layer.type in ("Gemm", "MatMul")]
    return [layer for layer in held if not is_rotation(layer.type, layer.op)]


def _why_not(view: FloatModel, layers: Layers, layer: Layer) -> str | None:
    """The reason why the input of a layer is not transformed at run time; ``None`` where it can be."""
    graph = layers.graph
    source = _input(layers, layer)
    if graph.values[source].is_static:
        return "its input is a constant"
    if graph.is_output(layer.output):
        return "it makes an output of the model, which is left as it is"
    before = graph.producer(source)
    if before is not None and is_rotation(before.type, before.name):
        return f"{before.name} transforms its input already: leave out online=True of the rotation"
    chain = Chain(layer.op, (_before(np.eye(layer.axes.inputs)),), np.asarray(view.param(layer.weight)), {})
    return layers.why_not_private(layer) or view.can_edit(chain)


def _before(P: Array) -> Before:
    return Before("MatMul", P.astype(np.float32), {}, rotates=True)


def _fit_group(view: FloatModel, group: tuple[Layer, ...], C: Array, seed: int) -> _Fitted:
    weights = [np.asarray(view.param(layer.weight), np.float64) for layer in group]
    rows = [W if layer.axes.outputs_first else W.T for layer, W in zip(group, weights, strict=True)]
    P, noise = best_transform(C, np.sum([W.T @ W for W in rows], axis=0))
    P = (P @ random_rotation(len(P), seed)).astype(np.float32).astype(np.float64)  # what is undone is what runs
    back = np.linalg.inv(P).T
    edits = [
        Chain(layer.op, (_before(P),), turned_inputs(layer, W, back).astype(np.float32), {})
        for layer, W in zip(group, weights, strict=True)
    ]
    return _Fitted(Product(group, len(P), noise), tuple(edits))


def _fit_values(view: FloatModel, heads: Attention, C: Array, seed: int) -> _Fitted:
    """Transforms of each head of values; a head shared by several queries has the moments of all of them."""
    value, output = heads.value, heads.output
    assert value is not None and output is not None
    size = heads.value_dim
    count, repeat = value.axes.outputs // size, output.axes.inputs // value.axes.outputs
    W, U = (np.asarray(view.param(layer.weight), np.float64) for layer in (value, output))
    G = U.T @ U if output.axes.outputs_first else U @ U.T
    inner, outer = np.zeros((count * size,) * 2), np.zeros((count * size * repeat,) * 2)
    noises = []
    for head in range(count):
        served = [slice(i * size, (i + 1) * size) for i in range(head * repeat, (head + 1) * repeat)]
        P, noise = best_transform(*(np.sum([M[s, s] for s in served], axis=0) for M in (C, G)))
        P = P @ random_rotation(size, seed)
        place = slice(head * size, (head + 1) * size)
        inner[place, place] = P
        for s in served:
            outer[s, s] = np.linalg.inv(P).T
        noises.append(noise)
    edits: list[Edit] = [SetParam(value.weight, turned_outputs(value, W, inner))]
    if value.bias is not None:
        edits.append(SetParam(value.bias, np.asarray(view.param(value.bias), np.float64) @ inner))
    edits.append(SetParam(output.weight, turned_inputs(output, U, outer)))
    return _Fitted(Values(heads, float(np.mean(noises))), tuple(edits))


@checks_arguments
def transform_model(
    model: Any,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    shared: bool = False,
    seed: int = 0,
    providers: Any = None,
    progress: bool = True,
) -> TransformReport:
    """Put products by fitted matrices in front of linear layers, for activations of few bits, in place.

    Each makes what the layer reads, and its weight, as easy to round as a linear transform can where every token has one
    scale; the weight undoes it. It applies to layers that alone read their input (down projections), and the values of
    attention, whose matrices are merged into weights. Layers that make an output of the model are left. Call
    :func:`rotate_model` first, without ``online``, where the model has a residual stream that can be rotated.

    A product of a value of ``n`` channels has ``n * n`` multiplications a token; it runs in float and is exported as a MatMul;
    simulations leave it, and what it reads, in float.

    Args:
        model: changed in place; its function stays.
        data: batches (feeds) of real data, as ``compute_encodings`` takes them; 32 samples are enough.
        dummy_input: the example input; the first batch by default.
        shared: also where several layers read one value, as queries, keys and values do. Each has a product of its own.
        seed: of the rotation behind each transform.
        providers: as for :func:`equalize_model`.
        progress: show a progress bar on a terminal.

    Returns:
        The report; of a module ``report.undo()`` gives it back as it was. The change of an ONNX model is final.

    Raises:
        ConfigError: ``seed`` is negative.
        CalibrationError: no batch, or an activation that is NaN or infinite.
        ModelError: as for :func:`equalize_model`.
    """
    if seed < 0:
        raise ConfigError("seed", f"it is {seed}", "give 0 or more")
    batches = list(data)
    if not batches:
        refuse_no_data("transform")
    example = batches[0] if dummy_input is None else dummy_input
    opened = front_end_of(model).open_model(model, None, example, "transform_model", providers)
    report = transform(
        opened.view, batches, opened.changed, shared=shared, seed=seed, bar=partial(progress_bar, enabled=progress)
    )
    opened.finish(report)
    return report
