"""Recover accuracy without training: fit following layers by least squares, re-estimate batch-norm statistics.

A layer that has lost inputs is given the weights with which it comes nearest to what it computed in the whole model:
``min_W ||Y - X W||``, ``Y`` being the results of the original layer on the data and ``X`` what the pruned model hands to it.
Layers are fitted in the order of the model, so that each corrects what those before it have left (He et al. 2017,
arXiv:1707.06168, section 3.1.2, their sequential form). A fit is kept where it is nearer on rows that it was not fitted to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.numerics.arrays import windows
from bitwright.core.simulation.float_model import Array, SetParam, Undo, sqnr
from bitwright.progress import progress as progress_bar

_ROWS = 32  # of one sample that a layer is fitted to
_DAMPING = 1e-4  # of the mean of the diagonal of X^T X
_HELD_OUT = 5  # every fifth row judges
_MOST = 4096  # inputs of a layer that is fitted
_WALKS = 3  # of the data, where it comes in several batches
_ENOUGH = 64  # rows from which on the moments of a channel are used, unless there are no more


@dataclass(frozen=True)
class Fit:
    """Outcome for one layer.

    Attributes:
        op: the layer.
        before, after: SQNR in dB of its result on rows that were not fitted, with the weights it had and with the new ones.
        kept: whether the new weights were better and are kept.
    """

    op: str
    before: float
    after: float
    kept: bool


def least_squares(X: Array, Y: Array, W: Array, damping: float = _DAMPING) -> Array:
    """``argmin_V ||Y - X V||^2 + d ||V - W||^2``: near ``W`` where the data say nothing.

    Args:
        X: ``[rows, inputs]``; Y: ``[rows, outputs]``; W: ``[inputs, outputs]``.
        damping: ``d`` in parts of the mean of the diagonal of ``X^T X``.

    Returns:
        ``[inputs, outputs]``, float64.
    """
    X, Y, W = (np.asarray(a, np.float64) for a in (X, Y, W))
    H = X.T @ X
    d = damping * max(float(np.mean(np.diag(H))), 1e-12)
    H[np.diag_indices_from(H)] += d
    return np.asarray(np.linalg.solve(H, X.T @ Y + d * W))


class Original:
    """Outputs of layers of the original model, collected once for any number of cuts.

    Args:
        view: a ``FloatModel``, which stays as it is.
        batches: data that can be read again.
    """

    def __init__(self, view: Any, batches: Sequence[Any]) -> None:
        self.batches = batches
        self._view = view
        self.graph = view.graph()
        self.ops = {op.name: op for op in self.graph.ops}
        self._results: dict[str, list[tuple[Array, Array]]] = {}
        self._moments: dict[str, list[Moments]] = {}

    def results(self, ops: Sequence[Op]) -> dict[str, list[tuple[Array, Array]]]:
        """Layer -> of each batch, the positions and the rows of its result there."""
        new = [op for op in ops if op.name not in self._results]
        self._results.update({op.name: [] for op in new})
        for i, captured in enumerate(self._view.capture([op.outputs[0] for op in new], self.batches) if new else ()):
            for op in new:
                y = np.asarray(captured[op.outputs[0]][0])
                places = _places(op, y.shape, i)
                self._results[op.name].append((places, _rows(y, 1 if op.type == "Conv" else y.ndim - 1, places)))
        return {op.name: self._results[op.name] for op in ops}

    def moments(self, values: Sequence[str]) -> dict[str, list[Moments]]:
        """Value -> of each batch, the moments of each channel."""
        self._moments.update(_moments(self._view, [v for v in values if v not in self._moments], self.batches))
        return {value: self._moments[value] for value in values}


def reconstruct(
    original: Original,
    pruned: Any,
    ops: Mapping[str, Array | None],
    progress: bool = True,
    undos: list[Undo] | None = None,
) -> tuple[Fit, ...]:
    """Fit layers of a pruned model to the results of the original, in the order of the model.

    Args:
        original: the whole model, and the data.
        pruned: a ``FloatModel``, which is changed.
        ops: names of layers -> which outputs of the original are left, ``None`` for all; others than convolutions and linear
            layers are left out.
        progress: show a progress bar.
        undos: takes what undoes each change.
    """
    undos = [] if undos is None else undos
    graph = pruned.graph()
    layers = [op for op in graph.ops if op.name in ops and op.name in original.ops and _matrix(graph, op) is not None]
    wanted = original.results([original.ops[op.name] for op in layers])
    layers = [op for op in layers if not graph.values[str(op.inputs[0])].is_static]
    # all batches are known before a layer is fitted, and it is fitted before the next is run: a single batch is run once
    groups = [layers] if len(original.batches) == 1 else _independent(graph, layers)
    fits: dict[str, Fit] = {}
    for group in progress_bar(groups, "Reconstruct", progress):
        readers = [_Reader(pruned, graph, op, wanted[op.name], ops[op.name]) for op in group]
        _fit_together(pruned, original.batches, readers, fits, undos)
    return tuple(fits[op.name] for op in layers if op.name in fits)


def _independent(graph: Graph, layers: Sequence[Op]) -> list[list[Op]]:
    """Consecutive layers of which none reads what the fit of another changes: one run of all batches serves them."""
    number = {op.name: i for i, op in enumerate(layers)}
    last: dict[str, int] = {}  # value -> the last layer that it depends on
    for op in layers:
        last.update(dict.fromkeys((v for v in op.inputs[1:] if v is not None), number[op.name]))
    groups: list[list[Op]] = []
    for op in graph.ops:
        if op.name in number:
            source = last.get(str(op.inputs[0]), -1)
            if not groups or source >= number[groups[-1][0].name]:
                groups.append([])
            groups[-1].append(op)
        behind = max((last.get(value, -1) for _, value in op.sources()), default=-1)
        last.update(dict.fromkeys(op.outputs, behind))
    return groups


def _fit_together(
    view: Any, batches: Sequence[Any], readers: Sequence[_Reader], fits: dict[str, Fit], undos: list[Undo]
) -> None:
    """Run the batches; each layer is fitted once its last input is known."""
    of: dict[str, list[_Reader]] = {}
    for reader in readers:
        of.setdefault(reader.source, []).append(reader)

    def seen(value: str, which: range, runs: list[list[Array]]) -> None:
        for reader in of[value]:
            if reader.name not in fits:
                reader.add(which, runs)
                if which.stop == len(batches):
                    fits.update(reader.fit(undos))

    view.walk(list(of), batches, seen)


def _matrix(graph: Graph, op: Op) -> tuple[str, str | None] | None:
    """Weight and bias of a layer that least squares can fit."""
    if op.type not in ("Conv", "Gemm", "MatMul") or op.also or len(op.inputs) < 2 or op.inputs[0] is None:
        return None
    weight = graph.values[str(op.inputs[1])]
    if weight.param is None or op.attrs.get("group", 1) != 1 or op.attrs.get("transA"):
        return None
    if op.type != "Conv" and len(weight.shape) != 2:
        return None
    bias = graph.values[str(op.inputs[2])] if len(op.inputs) > 2 and op.inputs[2] is not None else None
    if bias is not None and (bias.param is None or len(bias.shape) != 1 or op.attrs.get("beta", 1.0) != 1):
        return None
    return weight.param, None if bias is None else bias.param


def _places(op: Op, shape: Sequence[int], batch: int) -> Array:
    """Sample positions of a result, the same for both models: ``[rows]``, indices into the flattened positions."""
    channel = 1 if op.type == "Conv" else len(shape) - 1
    sites = int(np.prod([n for i, n in enumerate(shape) if i != channel]))
    rows = min(sites, _ROWS * max(1, shape[0]))
    seed = [batch, *op.name.encode()]
    return np.sort(np.random.default_rng(seed).choice(sites, rows, replace=False))


def _rows(y: Array, channel: int, places: Array) -> Array:
    moved = np.moveaxis(y, channel, -1)
    return moved.reshape(-1, moved.shape[-1])[places]


class _Reader:
    """A layer that has lost inputs, and rows of its input.

    Args:
        view, graph: the pruned model.
        op: the layer.
        wanted: of each batch, positions and rows of its result in the original model.
        left: outputs of the original that are left; ``None`` for all.
    """

    def __init__(
        self, view: Any, graph: Graph, op: Op, wanted: Sequence[tuple[Array, Array]], left: Array | None
    ) -> None:
        held = _matrix(graph, op)
        assert held is not None
        self._view, self._op, self.name, (self._weight, self._bias) = view, op, op.name, held
        self.source = str(op.inputs[0])
        self._wanted, self._left = wanted, left
        self._W = np.asarray(view.param(self._weight), np.float64)
        self._rows: dict[int, Array] = {}  # batch -> what it is given at the positions

    def add(self, batches: range, runs: Sequence[Sequence[Array]]) -> None:
        """Add rows of its input in the first run of each batch."""
        for batch, arrays in zip(batches, runs, strict=True):
            if arrays and batch not in self._rows:
                x, places = np.asarray(arrays[0]), self._wanted[batch][0]
                conv = self._op.type == "Conv"
                rows = (
                    _patches(x, self._W.shape, self._op.attrs, places) if conv else x.reshape(-1, x.shape[-1])[places]
                )
                self._rows[batch] = rows.astype(np.float64)

    def fit(self, undos: list[Undo]) -> dict[str, Fit]:
        """Fit the layer to the collected rows; returns its name and outcome, nothing where it cannot be fitted."""
        W = self._W
        b = None if self._bias is None else np.asarray(self._view.param(self._bias), np.float64)
        columns = self._op.type == "Conv" or bool(self._op.attrs.get("transB"))
        alpha = float(self._op.attrs.get("alpha", 1.0)) if self._op.type == "Gemm" else 1.0
        V = alpha * (W.reshape(len(W), -1).T if columns else W)
        given, self._rows = self._rows, {}
        if len(V) > _MOST or sum(map(len, given.values())) < 8 or any(x.shape[1] != len(V) for x in given.values()):
            return {}
        X = np.concatenate(list(given.values()))
        Y = np.concatenate([self._wanted[batch][1] for batch in given]).astype(np.float64)
        Y = Y if self._left is None else Y[:, self._left]
        ones = np.ones((len(X), 1))
        A, V0 = (X, V) if b is None else (np.concatenate([X, ones], 1), np.concatenate([V, b[None]]))
        judge = np.arange(len(X)) % _HELD_OUT == 0
        new = least_squares(A[~judge], Y[~judge], V0)
        before, after = (sqnr(Y[judge], A[judge] @ M) for M in (V0, new))
        if not after > before:
            return {self.name: Fit(self.name, before, after, False)}
        new = least_squares(A, Y, V0)
        V1 = (new if b is None else new[:-1]) / alpha
        edits = [SetParam(self._weight, (V1.T.reshape(W.shape) if columns else V1).astype(np.float32))]
        if b is not None and self._bias is not None:
            edits.append(SetParam(self._bias, new[-1].astype(np.float32)))
        undos.append(self._view.edit(edits))
        return {self.name: Fit(self.name, before, after, True)}


def _patches(x: Array, shape: Sequence[int], attrs: Mapping[str, Any], places: Array) -> Array:
    """Input patches of a convolution at some output positions: ``[rows, C * kernel]``."""
    read = windows(x, shape[2:], attrs)  # [N, *positions, C, *kernel]
    return read[np.unravel_index(places, read.shape[: x.ndim - 1])].reshape(len(places), -1)


def estimate_batch_norms(
    original: Original, pruned: Any, norms: Mapping[str, Array | None], undos: list[Undo] | None = None
) -> int:
    """Shift the statistics of batch norms with their inputs.

    The mean changes by the difference of the means that both models have on the data, the variance by the ratio of the
    variances: statistics from training keep what they know beyond the data. The batches are run once, and every norm is moved
    before it is computed, by what is known of its input until then: norms after it read what it then returns. Where the data
    come in several batches, they are run again, and each batch replaces what it has shown before.

    Args:
        original: the whole model, and the data.
        pruned: a ``FloatModel``, which is changed.
        norms: batch norms -> which channels of the original are left, ``None`` for all.
        undos: takes what undoes each change.

    Returns:
        How many were changed.
    """
    graph, undos = pruned.graph(), [] if undos is None else undos
    sources = {name: str(original.ops[name].inputs[0]) for name in norms if name in original.ops}
    ops = [op for op in graph.ops if op.name in sources and _has_statistics(graph, op)]
    before = original.moments([sources[op.name] for op in ops])
    moving = [_Norm(pruned, graph, op, before[sources[op.name]], norms[op.name]) for op in ops]
    if moving:
        _move_in_walks(pruned, original.batches, moving)
    undos += [norm.undo for norm in moving if norm.undo is not None]
    return len(ops)


def _move_in_walks(view: Any, batches: Sequence[Any], norms: Sequence[_Norm]) -> None:
    """Run the batches and collect each norm's inputs; repeated where several runs are needed."""
    readers: dict[str, list[_Norm]] = {}
    for norm in norms:
        readers.setdefault(norm.source, []).append(norm)

    def seen(value: str, which: range, runs: list[list[Array]]) -> None:
        arrays = list(chain.from_iterable(runs))
        for norm in readers[value]:
            norm.add(which, arrays)

    for walk in range(1, _WALKS + 1):
        view.walk(list(readers), batches, seen)
        if max((len(norm.known) for norm in norms), default=0) < 2:
            break
        for norm in norms:
            norm.walk = walk


@dataclass(frozen=True)
class Moments:
    """Sums over the rows of a value: how many, of each channel, and of its squares; in float64."""

    rows: int = 0
    total: Array | float = 0.0
    squares: Array | float = 0.0

    @classmethod
    def of(cls, arrays: Iterable[Array]) -> Moments:
        """Of arrays whose second axis has the channels."""
        found = cls()
        for x in arrays:
            rows = np.moveaxis(np.asarray(x, np.float64), 1, -1).reshape(-1, x.shape[1])
            found += cls(len(rows), rows.sum(0), np.square(rows).sum(0))
        return found

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.rows + other.rows, self.total + other.total, self.squares + other.squares)

    def __sub__(self, other: Moments) -> Moments:
        return Moments(self.rows - other.rows, self.total - other.total, self.squares - other.squares)

    @property
    def mean(self) -> Array:
        """The mean of each channel."""
        return np.asarray(self.total / max(self.rows, 1))

    @property
    def variance(self) -> Array:
        """The variance of each channel."""
        return np.maximum(self.squares / max(self.rows, 1) - np.square(self.mean), 0.0)


class _Norm:
    """A batch norm with shifting statistics, and the moments of its input.

    Args:
        view, graph: the pruned model.
        op: the batch norm.
        before: what it reads in the original model, by batch.
        left: channels of the original that are left; ``None`` for all.
    """

    def __init__(self, view: Any, graph: Graph, op: Op, before: Sequence[Moments], left: Array | None) -> None:
        self._view, self.source, self._before, self._left = view, str(op.inputs[0]), before, left
        self._names = [str(graph.values[str(v)].param) for v in op.inputs[3:5]]
        self._held = [np.asarray(view.param(name), np.float64) for name in self._names]
        self.known: dict[int, tuple[int, Moments]] = {}  # first batch -> in which walk it was run, and what was read
        self.walk, self._until = 0, 0
        self._new, self._old = Moments(), Moments()
        self.undo: Undo | None = None

    def add(self, batches: range, arrays: Iterable[Array]) -> None:
        """Take in what it reads in some batches, and set its statistics by all that are known, in both models."""
        read = Moments.of(arrays)
        walk, before = self.known.get(batches.start, (self.walk, Moments()))
        if walk < self.walk:
            self._new, before = self._new - before, Moments()
        self.known[batches.start], self._new = (self.walk, before + read), self._new + read
        for known in self._before[self._until : batches.stop]:
            self._old += known
        self._until, new, old = max(self._until, batches.stop), self._new, self._old
        if not new.rows or (new.rows < _ENOUGH and self._until < len(self._before)):
            return
        mean, variance = (a if self._left is None else a[self._left] for a in (old.mean, old.variance))
        ratio = np.where(variance > 0, new.variance / np.where(variance > 0, variance, 1.0), 1.0)
        moved = (self._held[0] + new.mean - mean, self._held[1] * ratio)
        edits = [SetParam(name, np.asarray(a, np.float32)) for name, a in zip(self._names, moved, strict=True)]
        undo = self._view.edit(edits)
        self.undo = self.undo or undo  # the first one goes back to the statistics held before


def _has_statistics(graph: Graph, op: Op) -> bool:
    if op.attrs.get("training") or len(op.inputs) < 5 or op.also:
        return False
    return all(value is not None and graph.values[value].param is not None for value in op.inputs[3:5])


def _moments(view: Any, values: Sequence[str], batches: Iterable[Any]) -> dict[str, list[Moments]]:
    """Value -> of each batch, the moments of each channel of its second axis."""
    found: dict[str, list[Moments]] = {value: [] for value in values}
    for captured in view.capture(list(found), batches) if values else ():
        for value, arrays in captured.items():
            found[value].append(Moments.of(arrays))
    return found
