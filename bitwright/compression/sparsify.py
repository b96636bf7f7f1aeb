"""Set weights to zero: by magnitude, by magnitude times input (Wanda), with the others making up for them (SparseGPT), or by what
training did to them (movement).

A weight is a matrix ``W [O, K]`` of what each output multiplies; patterns of zeros run along ``K``:

============== ==============================================================================
pattern        zeros
============== ==============================================================================
unstructured   the least scores: of the layer (magnitude, movement), of each output (Wanda), of blocks of columns (SparseGPT)
``n:m``        all but ``n`` of every ``m`` neighbours; ``2:4`` is what sparse tensor cores of GPUs read
``RxC``        whole blocks of ``R`` outputs and ``C`` inputs
============== ==============================================================================

Zeros save nothing by themselves: kernels of CPUs in ONNX Runtime and PyTorch multiply by them as by other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.compression.permute import Reordered, permute_channels
from bitwright.compression.svd import measure_inputs, patches
from bitwright.core.graph.graph import Op, Value
from bitwright.core.graph.operators import TRAITS
from bitwright.core.simulation.float_model import FloatModel, SetParam, Undo
from bitwright.errors import CalibrationError, ConfigError, checks_arguments, close_matches
from bitwright.methods.details import Detailed
from bitwright.methods.front_end import front_end_of
from bitwright.methods.layers import Reversible
from bitwright.tables import Table, plain

Array = NDArray[Any]
_RECURRENT = ("LSTM", "GRU", "RNN")

# ------------------------------------------------------------------------------------------------ arithmetic


@dataclass(frozen=True)
class Pattern:
    """Where zeros may lie.

    Attributes:
        keep, every: ``n`` and ``m`` of ``n:m``; 0 otherwise.
        block: outputs and inputs of a block; ``(1, 1)`` otherwise.
    """

    keep: int = 0
    every: int = 0
    block: tuple[int, int] = (1, 1)

    @staticmethod
    def of(text: str) -> Pattern:
        """Read from ``unstructured``, ``2:4`` or ``4x1``.

        Raises:
            ConfigError: it is none of them.
        """
        if text == "unstructured":
            return Pattern()
        if found := re.fullmatch(r"(\d+):(\d+)", text):
            n, m = int(found[1]), int(found[2])
            if 0 < n < m:
                return Pattern(n, m)
        if (found := re.fullmatch(r"(\d+)x(\d+)", text)) and int(found[1]) and int(found[2]):
            return Pattern(block=(int(found[1]), int(found[2])))
        raise ConfigError(
            "pattern", f"{text!r} is not a pattern of zeros", "use unstructured, n:m as in 2:4, or RxC as in 4x1"
        )


def mask_of(scores: Array, sparsity: float, pattern: Pattern, *, by_row: bool = False) -> Array:
    """A mask of the kept weights, like ``scores [O, K]``.

    Args:
        scores: what a weight is worth.
        sparsity: share of zeros; ``n:m`` has its own.
        pattern: of the zeros. A last group of fewer than ``m`` keeps ``n`` too, a block at the border is a smaller block.
        by_row: compare weights of one output only, where the pattern is unstructured.

    >>> mask_of(np.array([[4.0, 1.0, 2.0, 3.0]]), 0.5, Pattern.of("2:4")).astype(int)
    array([[1, 0, 0, 1]])
    """
    rows, columns = scores.shape
    if pattern.every:
        padded = np.pad(scores, ((0, 0), (0, -columns % pattern.every)), constant_values=-np.inf)
        groups = padded.reshape(rows, -1, pattern.every)
        order = np.argsort(-groups, axis=2, kind="stable")
        keep = np.zeros(groups.shape, bool)
        np.put_along_axis(keep, order[:, :, : pattern.keep], True, 2)
        return keep.reshape(rows, -1)[:, :columns]
    height, width = pattern.block
    padded = np.pad(scores, ((0, -rows % height), (0, -columns % width)))
    blocks = padded.reshape(padded.shape[0] // height, height, -1, width).sum((1, 3))
    ranked = blocks if by_row and height == width == 1 else blocks.reshape(1, -1)
    gone = np.argsort(ranked, axis=1, kind="stable")[:, : round(sparsity * ranked.shape[1])]
    keep = np.ones(ranked.shape, bool)
    np.put_along_axis(keep, gone, False, 1)
    wide = keep.reshape(blocks.shape).repeat(height, 0).repeat(width, 1)
    return np.asarray(wide[:rows, :columns])


def wanda_scores(W: Array, moments: Array) -> Array:
    """``|W| * ||x||`` of ``W [O, K]`` and the second moments ``[K, K]`` of its inputs (arXiv:2306.11695, eq. 1)."""
    return np.abs(W) * np.sqrt(np.maximum(np.diagonal(moments), 0.0))


def sparse_gpt(W: Array, moments: Array, sparsity: float, pattern: Pattern) -> Array:
    """``W [O, K]`` with zeros, the others moved so that the outputs change least (arXiv:2301.00774, algorithm 1)."""
    import torch

    from bitwright.methods.rounding.gptq import Settings, round_columns

    text = f"{pattern.keep}:{pattern.every}" if pattern.every else "unstructured"
    settings = Settings(act_order=False, sparsity=sparsity, pattern=text)
    w, hessian = torch.from_numpy(np.array(W[None], np.float32)), torch.from_numpy(np.array(moments[None], np.float64))
    return np.asarray(round_columns(w, hessian, None, settings)[0].numpy())


# ------------------------------------------------------------------------------------------------ layers


class SparseLayer:
    """A weight to be made sparse.

    Args:
        op: the layer.
        port: of the weight.
        param: its name.
        weight: its value, in the operator's layout.
    """

    def __init__(self, op: Op, port: int, param: str, weight: Array) -> None:
        self.op, self.port, self.param, self.weight = op, port, param, weight
        self.name, self.source = _name(op, port), str(op.inputs[0])
        self.moments: Array | None = None
        self.scores: Array | None = None  # what its weights are worth, where the caller says so

    def matrix(self, weight: Array) -> Array:
        """``[O, K]``."""
        if self.op.type == "Conv":
            return weight.reshape(len(weight), -1)
        if self.op.type in _RECURRENT:
            return weight.reshape(-1, weight.shape[-1])
        if self.op.type == "ConvTranspose":
            return weight.reshape(len(weight), -1).T
        return weight if self.op.attrs.get("transB") else weight.T

    def tensor(self, matrix: Array) -> Array:
        """The weight that :meth:`matrix` makes ``matrix`` of."""
        if self.op.type in ("Conv", *_RECURRENT):
            return matrix.reshape(self.weight.shape)
        if self.op.type == "ConvTranspose":
            return matrix.T.reshape(self.weight.shape)
        return matrix if self.op.attrs.get("transB") else matrix.T

    def rows(self, x: Array) -> Array:
        """The rows that the matrix multiplies, ``[rows, K]``."""
        if self.op.type == "Conv":
            return patches(x, self.weight.shape[2:], self.op.attrs)
        axis = 1 if self.op.type == "ConvTranspose" else -1
        return np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]).astype(np.float64)

    def see(self, moments: Array, mean: Array) -> None:
        """Add an input to the statistics."""
        self.moments = moments


def _magnitude(layer: SparseLayer, sparsity: float, pattern: Pattern) -> Array:
    W = layer.matrix(layer.weight)
    return W * mask_of(np.abs(W), sparsity, pattern)


def _movement(layer: SparseLayer, sparsity: float, pattern: Pattern) -> Array:
    assert layer.scores is not None
    return layer.matrix(layer.weight) * mask_of(layer.matrix(layer.scores), sparsity, pattern)


def _wanda(layer: SparseLayer, sparsity: float, pattern: Pattern) -> Array:
    W = layer.matrix(layer.weight)
    assert layer.moments is not None
    return W * mask_of(wanda_scores(W, layer.moments), sparsity, pattern, by_row=True)


def _sparse_gpt(layer: SparseLayer, sparsity: float, pattern: Pattern) -> Array:
    assert layer.moments is not None
    return sparse_gpt(layer.matrix(layer.weight), layer.moments, sparsity, pattern)


@dataclass(frozen=True)
class Method:
    """A row of :data:`METHODS`.

    Attributes:
        does: one phrase.
        run: layer, sparsity, pattern -> the new matrix.
        reads: whether it needs the inputs of layers.
    """

    does: str
    run: Callable[[SparseLayer, float, Pattern], Array]
    reads: bool = True


METHODS: dict[str, Method] = {
    "magnitude": Method("the smallest weights", _magnitude, reads=False),
    "wanda": Method("the smallest products of weight and norm of input (arXiv:2306.11695)", _wanda),
    "movement": Method(
        "the weights that training moves towards zero, or least away from it (arXiv:2005.07683)", _movement, reads=False
    ),
    "sparsegpt": Method("column by column, the others make up for it (arXiv:2301.00774)", _sparse_gpt),
}


def find_sparse_layers(view: FloatModel, reads: bool) -> tuple[list[SparseLayer], dict[str, str]]:
    """Weights that can be made sparse, and the reasons of the others."""
    graph = view.graph()
    ports = {**dict.fromkeys(TRAITS["layer"], (1,)), **dict.fromkeys(_RECURRENT, (1, 2))}
    places = [
        (op, port, graph.values[str(op.inputs[port])])
        for op in graph.ops
        for port in ports.get(op.type, ())
        if port < len(op.inputs) and op.inputs[port]
    ]
    found: dict[str, SparseLayer] = {}  # by parameter
    refused = {}
    for op, port, value in places:
        if not value.is_static:
            continue  # a product of two activations
        why = _obstacle(op, port, value, found, reads)
        if why is not None:
            refused[_name(op, port)] = why
            continue
        param = str(value.param)
        found[param] = SparseLayer(op, port, param, view.param(param))
    return list(found.values()), refused


def _obstacle(op: Op, port: int, weight: Value, seen: Container[str], reads: bool) -> str | None:
    """The reason why a weight is not made sparse; ``None`` where it can be. ``seen``: parameters of earlier layers."""
    if weight.param is None or weight.kind != "param":
        return "its weight is computed by the model"
    if weight.param in seen:
        return f"its weight {weight.param} is that of an earlier layer"
    if op.type in ("Conv", "ConvTranspose") and int(op.attrs.get("group", 1)) > 1:
        return "it is grouped: its filters have few weights"
    if op.type in ("Gemm", "MatMul") and len(weight.shape) != 2:
        return "its weight is a stack of matrices"
    if reads and port == 2:
        return "its inputs are hidden states, which are not measured; magnitude can prune it"
    return None


def _name(op: Op, port: int) -> str:
    return op.name if port == 1 else f"{op.name}.input[{port}]"


@dataclass(frozen=True)
class SparseRow:
    """Outcome for one weight.

    Attributes:
        layer, param: where it is.
        sparsity: share of zeros.
        error: squared change of the outputs (of the weight, without data), over their squares.
    """

    layer: str
    param: str
    sparsity: float
    error: float


@dataclass(frozen=True)
class SparsityReport(Reversible, Detailed):
    """Zeros per weight; a table when printed.

    Attributes:
        rows: one per weight.
        refused: layer -> why it was not touched.
        masks: parameter -> which numbers stay, boolean.
        reordered: groups of channels that were put into another order, with what the pattern keeps before and after.
    """

    _rows = "rows"

    rows: tuple[SparseRow, ...]
    refused: Mapping[str, str]
    masks: Mapping[str, Array] = field(repr=False)
    reordered: tuple[Reordered, ...] = ()
    _undos: list[Undo] = field(default_factory=list, repr=False)

    @property
    def summary(self) -> str:
        """One line."""
        zeros = sum(int((~mask).sum()) for mask in self.masks.values())
        total = sum(mask.size for mask in self.masks.values())
        return f"{zeros / max(total, 1):.1%} of {total:,} weights of {len(self.rows)} layers are zero"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the masks."""
        found: dict[str, Any] = plain({"rows": self.rows, "refused": self.refused})
        return found

    def table(self) -> Table:
        """All weights."""
        rows = [(r.layer, r.param, f"{r.sparsity:.1%}", f"{r.error:.2%}") for r in self.rows]
        return Table(("layer", "parameter", "zeros", "error"), rows, right=(2, 3))

    def __str__(self) -> str:
        return "\n".join(
            [str(self.table()), self.summary, *(f"not touched: {n}: {why}" for n, why in self.refused.items())]
        )


@checks_arguments
def sparsify_model(
    model: Any,
    data: Iterable[Any],
    dummy_input: Any = None,
    *,
    sparsity: float = 0.5,
    pattern: str = "unstructured",
    method: str = "wanda",
    permute: bool = False,
    scores: Mapping[str, Any] | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    providers: Any = None,
    progress: bool = True,
) -> SparsityReport:
    """Put zeros into the weights of a PyTorch or ONNX model, in place.

    Zeros make a model smaller where its file is compressed and faster where kernels skip them: ``2:4`` on sparse tensor cores of
    GPUs. CPUs gain nothing.

    Args:
        model: a module, or a loaded ONNX model; changed in place.
        data: batches (feeds) of real inputs; ``magnitude`` and ``movement`` read the first only.
        dummy_input: the example input; the first batch by default.
        sparsity: share of zeros of every weight; ``n:m`` has its own.
        pattern: ``unstructured``, ``n:m`` as in ``2:4``, or blocks ``RxC`` of outputs and inputs as in ``4x1``.
        method: ``magnitude``, ``wanda``, ``sparsegpt``, which moves the other weights and needs torch, or ``movement``.
        permute: put channels into another order first, so that ``n:m`` keeps larger weights; the model computes the same
            (:mod:`bitwright.compression.permute`). :meth:`SparsityReport.undo` leaves the order as it is.
        scores: for ``movement``: parameter -> what each of its numbers is worth, of its shape, as
            :class:`bitwright.compression.training.MovementScores` has them.
        include, exclude: names of layers.
        providers: where ONNX Runtime computes.
        progress: show progress bars on a terminal.

    Returns:
        The report. Of a module ``report.undo()`` gives it back as it was; ``bitwright.torch.keep_masks(model, report.masks)``
        keeps zeros zero in training. The change of an ONNX model is final.

    Raises:
        ConfigError: an unknown method, pattern or layer; a sparsity that is none; blocks with ``sparsegpt``; scores with
            another method, none with ``movement``, or of another shape.
        CalibrationError: no data, or an input that is NaN or infinite.
    """
    batches, wanted = list(data), Pattern.of(pattern)
    _check_options(method, sparsity, wanted, pattern, permute, scores)
    if not batches:
        raise CalibrationError("sparsify_model", "the data held no batch", "give some batches of real data")
    example = batches[0] if dummy_input is None else dummy_input
    reordered: tuple[Reordered, ...] = ()
    if permute:
        structure = front_end_of(model).structured(model, example, providers, in_place=True)
        reordered, _ = permute_channels(structure, example, wanted.keep, wanted.every)
        structure.give_back()
    opened = front_end_of(model).open_model(model, None, example, "sparsify_model", providers)
    view, row = opened.view, METHODS[method]
    layers, refused = find_sparse_layers(view, row.reads)
    layers = _chosen(layers, refused, include, exclude)
    if scores is not None:
        layers = _scored(layers, scores, refused)
    if row.reads and layers:
        measure_inputs(view, layers, batches)
    rows, masks, edits = [], {}, []
    for layer in layers:
        if row.reads and layer.moments is None:
            refused[layer.name] = "the data did not reach it"
            continue
        new = row.run(layer, sparsity, wanted).astype(np.float32)
        old = layer.matrix(layer.weight)
        rows.append(SparseRow(layer.name, layer.param, float((new == 0).mean()), _error(old, new, layer.moments)))
        masks[layer.param] = layer.tensor(new) != 0
        edits.append(SetParam(layer.param, np.ascontiguousarray(layer.tensor(new))))
    report = SparsityReport(tuple(rows), refused, masks, reordered, [view.edit(edits)])
    opened.finish(report)
    return report


def _check_options(
    method: str, sparsity: float, wanted: Pattern, pattern: str, permute: bool, scores: Mapping[str, Any] | None
) -> None:
    """Refuse unknown or incompatible options."""
    if method not in METHODS:
        raise ConfigError(
            "method", f"there is no method {method!r}{close_matches(method, METHODS)}", f"use {', '.join(METHODS)}"
        )
    if not 0 < sparsity < 1:
        raise ConfigError("sparsity", f"{sparsity!r} is not a share of zeros", "write a number between 0 and 1")
    if method == "sparsegpt" and wanted.block != (1, 1):
        raise ConfigError("pattern", f"sparsegpt has no blocks {pattern}", "use magnitude or wanda")
    if (method == "movement") != (scores is not None):
        problem = "movement needs what training has found" if scores is None else f"{method} computes its own"
        raise ConfigError(
            "scores", problem, "write method='movement', scores=MovementScores(model).scores after training"
        )
    if permute and (not wanted.every or scores is not None):
        raise ConfigError(
            "permute",
            "scores are of the order that the channels have"
            if wanted.every
            else f"the order of channels does not matter for {pattern}",
            "leave permute out" if wanted.every else "use a pattern n:m as in 2:4",
        )


def _scored(layers: Sequence[SparseLayer], scores: Mapping[str, Any], refused: dict[str, str]) -> list[SparseLayer]:
    """The layers whose weights have scores.

    Raises:
        ConfigError: scores of another shape than the weight, or with NaN; of no layer.
    """
    for layer in layers:
        if layer.param not in scores:
            refused[layer.name] = "its weight has no scores: no gradient reached it"
            continue
        found = scores[layer.param]
        layer.scores = np.asarray(found.detach().cpu() if hasattr(found, "detach") else found, np.float64)
        if layer.scores.shape != layer.weight.shape or np.isnan(layer.scores).any():
            problem = (
                "they hold NaN"
                if layer.scores.shape == layer.weight.shape
                else (f"they have shape {list(layer.scores.shape)}, the weight {list(layer.weight.shape)}")
            )
            raise ConfigError(f"scores of {layer.param}", problem, "give those that training of this model has found")
    kept = [layer for layer in layers if layer.scores is not None]
    if not kept:
        raise ConfigError(
            "scores", "they are of none of the weights", "give those that training of this model has found"
        )
    return kept


def _chosen(
    layers: Sequence[SparseLayer], refused: Mapping[str, str], include: Iterable[str] | None, exclude: Iterable[str]
) -> list[SparseLayer]:
    """The named layers.

    Raises:
        ConfigError: a name is none of a layer that can be pruned; says why not.
    """
    names = [layer.name for layer in layers]
    include, exclude = None if include is None else tuple(include), tuple(exclude)
    for name in (*(include or ()), *exclude):
        if name in refused:
            raise ConfigError(name, f"it cannot be pruned: {refused[name]}", "name a layer of the report")
        if name not in names:
            problem = f"the model has no such layer{close_matches(name, names)}"
            raise ConfigError(name, problem, "name a layer of the report")
    kept = set(names if include is None else include) - set(exclude)
    return [layer for layer in layers if layer.name in kept]


def _error(old: Array, new: Array, moments: Array | None) -> float:
    delta = (old - new).astype(np.float64)
    if moments is None:
        return float(np.square(delta).sum() / max(float(np.square(old, dtype=np.float64).sum()), 1e-300))
    whole = old.astype(np.float64)
    return float(((delta @ moments) * delta).sum() / max(float(((whole @ moments) * whole).sum()), 1e-300))
