"""Batch-norm folding: absorb batch norms into the layers beside them, each fold checked and undone if it
fails.

The arithmetic is in :mod:`bitwright.methods.layers`, the decision where folding keeps the
function in :mod:`bitwright.methods.folding.batch_norm_search`; here the folds are carried out through a
``FloatModel``.

Reference: Jacob et al. 2018, arXiv:1712.05877, section 3.2. Beyond the paper: a batch norm before a layer,
several batch norms in a row, layers and weights that are used more than once, layers that have no place for a
bias.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.simulation.float_model import AddBias, Bypass, Edit, FloatModel, SetParam, Undo
from bitwright.errors import checks_arguments
from bitwright.methods.folding.batch_norm_search import (
    Chain,
    Fold,
    FoldReport,
    Refusal,
    filled,
    find_folds,
    in_execution_order,
    moved,
    operand,
)
from bitwright.methods.front_end import front_end_of
from bitwright.methods.layers import (
    Array,
    Bar,
    batch_norm_moments,
    bn_affine,
    channel_axes,
    fold_backward,
    fold_forward,
    forward_obstacle,
    no_bar,
    unit_variance,
)
from bitwright.progress import collector_paused

__all__ = [
    "MAX_CHECKS",
    "TOLERANCE",
    "Fold",
    "FoldReport",
    "Refusal",
    "bn_affine",
    "find_folds",
    "fold_all_batch_norms",
    "fold_backward",
    "fold_forward",
    "forward_obstacle",
    "relative_difference",
    "unit_variance",
]

logger = logging.getLogger("bitwright")


#: largest relative difference of a layer before and after folding, by the dtype of its output; 1e-4 for any
#: other
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2}
#: how often the check of the whole model is asked at most, to find the folds it objects to
MAX_CHECKS = 100
_LARGEST = {"float16": float(np.finfo(np.float16).max)}


def fold_batch_norms(
    view: FloatModel,
    check: Callable[[], str | None] | None = None,
    *,
    only: Collection[str] | None = None,
    bar: Bar = no_bar,
) -> FoldReport:
    """Fold every batch norm that can be folded, check each fold, undo those that changed the function.

    A folded batch norm is bypassed; where the model offers no way to that (a functional call) it becomes an
    exact identity by its parameters. Each fold is checked on its own: the layer and its batch norms run on
    random input of the recorded shape, before and after.

    Args:
        view: the model; changed in place.
        check: says what is wrong with the model as a whole, as it stands, or ``None``. It finds what no graph
            shows: code that reads an attribute of a batch norm, parameters that share memory. The folds that
            it objects to are found by halving and undone, within ``MAX_CHECKS`` calls; what is still under
            suspicion then is not folded.
        only: names of batch norms; the others stay. All with ``None``.
        bar: shows the folds.

    Returns:
        The report; ``report.undo()`` gives the model back as it was.
    """
    graph = view.graph()
    folds, refusals = find_folds(graph, view)
    if only is not None:
        folds = [fold for fold in folds if set(only).issuperset(fold.batch_norms)]
        refusals = [refusal for refusal in refusals if refusal.bn in only]
    norms = batch_norm_moments(view, graph)
    folder = _Folder(graph, view)
    done: list[tuple[Fold, float]] = []
    try:
        for fold, outcome in _sift(folder, folds, check, bar):
            if isinstance(outcome, float):
                done.append((fold, outcome))
                logger.info("batch norm folded: %s", fold)
            else:
                refusals.extend(_refusals(fold, outcome))
    except BaseException:
        folder.undo_to(0)
        raise
    refusals = in_execution_order(refusals, graph)
    for refusal in refusals:
        logger.info("batch norm kept: %s", refusal)
    max_error = max((error for _, error in done), default=0.0)
    return FoldReport((fold for fold, _ in done), refusals, max_error, folder.undos, norms)


def _refusals(fold: Fold, reason: str) -> Iterator[Refusal]:
    """Refusals of a failed fold: each of its batch norms, with the first layer that could have absorbed it."""
    layers = {bn: layer for layer, bn in reversed(fold.pairs)}
    return (Refusal(layers[bn], bn, reason) for bn in fold.batch_norms)


def _sift(
    folder: _Folder, folds: Sequence[Fold], check: Callable[[], str | None] | None, bar: Bar
) -> Iterator[tuple[Fold, float | str]]:
    """Carry out ``folds``; returns each with its measured error, or the reason of its failure."""
    groups, checks = [list(folds)], 0
    while groups:
        group, mark = groups.pop(), len(folder.undos)
        outcomes = [(fold, folder.carry_out(fold)) for fold in bar(group, "folding batch norms")]
        left = [fold for fold, outcome in outcomes if isinstance(outcome, float)]
        problem = check() if check is not None and left else None
        checks += 1
        if problem is None:
            yield from outcomes
            continue
        yield from (pair for pair in outcomes if isinstance(pair[1], str))
        folder.undo_to(mark)
        if len(left) == 1 or checks >= MAX_CHECKS:
            yield from ((fold, f"with it folded, {problem}") for fold in left)
        else:
            half = len(left) // 2
            groups += [left[half:], left[:half]]


class _Folder:
    """Carries out folds on a model; keeps their undo functions and the added biases."""

    def __init__(self, graph: Graph, view: FloatModel) -> None:
        self.graph, self.view = graph, view
        self.undos: list[Undo] = []
        self._added: dict[str, tuple[Array, Undo]] = {}
        self._random = np.random.default_rng(0)

    def carry_out(self, fold: Fold) -> float | str:
        """Fold and check; returns the largest relative difference, or the reason why the fold was undone."""
        edits, reason = self._layer_edits(fold)
        if reason:
            return reason
        edits += self._norm_edits(fold)
        bypassed = {edit.op for edit in edits if isinstance(edit, Bypass)}
        inputs = {layer: self._fold_input(fold, layer, chain) for layer, chain in fold.layers}
        before = {layer: self._run(fold, layer, chain, inputs[layer]) for layer, chain in fold.layers}
        self.undos.append(self._edit(edits))
        try:
            outcome = self._compare(fold, inputs, before, bypassed)
        except BaseException:
            self.undos.pop()()
            raise
        if isinstance(outcome, str):
            self.undos.pop()()
        return outcome

    def undo_to(self, mark: int) -> None:
        """Undo all but the first ``mark`` folds."""
        while len(self.undos) > mark:
            self.undos.pop()()

    # -- edits

    def _layer_edits(self, fold: Fold) -> tuple[list[Edit], str | None]:
        """New weights and biases, or why they cannot be stored."""
        change = fold_backward if fold.direction == "backward" else fold_forward
        shift = np.zeros_like(fold.shift) if fold.keeps_shift else fold.shift
        edits: dict[tuple[str, str], Edit] = {}  # a parameter that several layers share is set once
        for name, _ in fold.layers:
            op = self.graph.op(name)
            W, b = self._stored(op, 1), self._bias(op)
            assert W is not None
            folded, bias = change(
                op.type,
                op.attrs,
                W,
                None if b is None else b.reshape(-1),
                fold.of_layer(name, fold.scale),
                fold.of_layer(name, shift),
            )
            reason = self._why_not_storable(op, folded, bias)
            if reason:
                return [], reason
            if bias is None:
                bias = self._zero_bias(fold, name)
            edits["param", self._param(op, 1)] = SetParam(self._param(op, 1), folded)
            if bias is not None and operand(op, 2) is None:
                edits["bias", name] = AddBias(name, bias)
            elif bias is not None and b is not None:
                edits["param", self._param(op, 2)] = SetParam(self._param(op, 2), bias.reshape(b.shape))
        return list(edits.values()), None

    def _zero_bias(self, fold: Fold, layer: str) -> Array | None:
        """A zero bias for a layer, so that the set of parameters depends only on the network and not on values.

        A freshly built network, whose batch norms shift nothing, then takes the state of a trained one after both are folded.
        """
        op = self.graph.op(layer)
        shape = self.graph.values[op.inputs[1] or ""].shape
        zeros = np.zeros(channel_axes(op.type, op.attrs, shape).outputs)
        impossible = fold.keeps_shift or self.view.can_edit(AddBias(layer, zeros)) is not None
        return None if impossible else zeros

    def _why_not_storable(self, op: Op, weight: Array, bias: Array | None) -> str | None:
        dtype = self.graph.values[op.inputs[1] or ""].dtype
        values = [v for v in (weight, bias) if v is not None and v.size]
        extremes = [extreme for v in values for extreme in (v.max(), -v.min())]  # NaN if there is one
        if not np.isfinite(extremes).all():
            return f"a parameter of {op.name} would have a NaN or infinite element"
        largest = float(max(extremes, default=0.0))
        if largest > _LARGEST.get(dtype, float(np.finfo(np.float32).max)):
            return f"a parameter of {op.name} would reach {largest:.3g}, beyond {dtype}"
        return None

    def _norm_edits(self, fold: Fold) -> list[Edit]:
        ends = {chain[-1] for _, chain in fold.layers} if fold.keeps_shift else set()
        edits: list[Edit] = []
        for bn in fold.batch_norms:
            if bn in ends:
                edits += self._only_adds(bn, fold.shift)
            elif self.view.can_edit(Bypass(bn)) is None:
                edits.append(Bypass(bn))
            else:
                edits += self._only_adds(bn, np.zeros_like(fold.shift))
        return edits

    def _only_adds(self, bn: str, shift: Array) -> list[Edit]:
        """The parameters with which a batch norm only adds ``shift``."""
        op = self.graph.op(bn)
        mean, var = self._param(op, 3), self._param(op, 4)
        dtype = self.graph.values[op.inputs[4] or ""].dtype
        neutral = unit_variance(float(op.attrs.get("epsilon", 1e-5)), dtype)
        has_bias = operand(op, 2) is not None
        edits: list[Edit] = [
            SetParam(mean, np.zeros_like(shift) if has_bias else -shift),
            SetParam(var, np.full_like(shift, neutral)),
        ]
        if has_bias:
            edits.append(SetParam(self._param(op, 2), shift))
        if operand(op, 1) is not None:
            edits.append(SetParam(self._param(op, 1), np.ones_like(shift)))
        return edits

    def _param(self, op: Op, port: int) -> str:
        value = op.inputs[port]
        assert value is not None
        return self.graph.values[value].param or value

    def _stored(self, op: Op, port: int) -> Array | None:
        return None if operand(op, port) is None else self.view.param(self._param(op, port))

    def _bias(self, op: Op) -> Array | None:
        return self._added[op.name][0] if op.name in self._added else self._stored(op, 2)

    def _edit(self, edits: Sequence[Edit]) -> Undo:
        undos: list[Undo] = []

        def undo() -> None:
            while undos:
                undos.pop()()

        try:
            undos.append(self.view.edit([edit for edit in edits if not isinstance(edit, AddBias)]))
            for edit in edits:
                if isinstance(edit, AddBias):
                    undos.append(self._add_bias(edit))
        except BaseException:
            undo()
            raise
        return undo

    def _add_bias(self, edit: AddBias) -> Undo:
        """Add a bias, or replace one that an earlier fold added and the graph does not show."""
        previous = self._added.pop(edit.op, None)
        if previous is not None:
            previous[1]()

        def restore() -> None:
            self._added.pop(edit.op)[1]()
            if previous is not None:
                self._added[edit.op] = (previous[0], self.view.edit([AddBias(edit.op, previous[0])]))

        self._added[edit.op] = (edit.value, self.view.edit([edit]))
        return restore

    # -- the check

    def _fold_input(self, fold: Fold, layer: str, chain: Chain) -> Array:
        """Random input of the compared part: a layer, its batch norms and the data movement between them."""
        if layer not in fold.between:
            return self._random_input(layer)
        first = self.graph.op(layer if fold.direction == "backward" else chain[0])
        shape = filled(self.graph.values[first.inputs[0] or ""].shape)
        assert shape is not None  # the map was found with it
        return self._random.standard_normal(shape, dtype=np.float32)

    def _random_input(self, layer: str) -> Array:
        """Normal numbers of the recorded shape, cropped to a few positions of the kernel.

        Of an axis whose length is not known (negative) it takes what the layer needs.
        """
        op = self.graph.op(layer)
        assert op.inputs[0] is not None and op.inputs[1] is not None
        shape = list(self.graph.values[op.inputs[0]].shape)
        weight = self.graph.values[op.inputs[1]].shape
        kernel = weight[2:]
        shape[0] = 1 if kernel else max(1, min(shape[0], 4))
        if shape[1] < 0:
            shape[1] = channel_axes(op.type, op.attrs, weight).inputs
        for i, k in enumerate(kernel):
            stride = (op.attrs.get("strides") or (1,) * len(kernel))[i]
            dilation = (op.attrs.get("dilations") or (1,) * len(kernel))[i]
            enough = dilation * (k - 1) + 1 + 2 * stride
            shape[2 + i] = enough if shape[2 + i] < 0 else max(1, min(shape[2 + i], enough))
        return self._random.standard_normal(shape, dtype=np.float32)

    def _run(self, fold: Fold, layer: str, chain: Chain, x: Array, without: Iterable[str] = ()) -> Array:
        norms = [bn for bn in chain if bn not in set(without)]
        backward = fold.direction == "backward"
        for name in [layer] if backward else norms:
            x = self.view.local(name)(x)
        if layer in fold.between:
            x = moved(self.view, fold.between[layer].path, x)
        for name in norms if backward else [layer]:
            x = self.view.local(name)(x)
        return np.asarray(x, np.float64)

    def _compare(
        self, fold: Fold, inputs: Mapping[str, Array], before: Mapping[str, Array], bypassed: set[str]
    ) -> float | str:
        worst = 0.0
        for layer, chain in fold.layers:
            after = self._run(fold, layer, chain, inputs[layer], without=bypassed)
            op = self.graph.op(layer)
            last = fold.direction == "forward" and op.type in ("Gemm", "MatMul")
            error = relative_difference(before[layer], after, axis=-1 if last else 1)
            tolerance = TOLERANCE.get(self.graph.values[op.outputs[0]].dtype, 1e-4)
            if not error <= tolerance:
                return (
                    f"folded into {layer} it differed from the original by {error:.2g} of the channel's "
                    f"range on random input, more than {tolerance:g}"
                )
            worst = max(worst, error)
        return worst


def relative_difference(reference: Array, other: Array, axis: int = 1) -> float:
    """Largest difference per channel, which ``axis`` counts, relative to the channel's largest magnitude.

    NaN when either array has one. A channel a thousand times weaker than the strongest is measured against
    a thousandth of that: below lies rounding.
    """
    axes = tuple(i for i in range(reference.ndim) if i != axis % reference.ndim)
    size = np.abs(reference).max(axis=axes, initial=0.0)
    difference = np.abs(reference - other).max(axis=axes, initial=0.0)
    floor = max(1e-3 * float(size.max(initial=0.0)), float(np.finfo(np.float32).tiny))
    return float((difference / np.maximum(size, floor)).max(initial=0.0))


@checks_arguments
def fold_all_batch_norms(
    model: Any, input_shapes: Any = None, dummy_input: Any = None, *, providers: Any = None, progress: bool = True
) -> FoldReport:
    """Fold every batch norm that can be folded into the convolution or linear layer beside it, in place.

    Each fold is checked numerically on random input; then the model's outputs on the example input are compared with
    those before, and folds that changed them are found and undone. What was not folded is listed with the reason in
    ``report.refused`` and in the log.

    Args:
        model: changed in place. In a module weights and biases are rewritten, and folded batch norms become
            ``nn.Identity``. Of an ONNX model functions are inlined and constants become initializers (see
            :mod:`bitwright.onnx.model.load`); layers are Conv, ConvTranspose, Gemm, and MatMul of a 2-D input with or
            without an Add after it; inputs and outputs keep names and order.
        input_shapes: shape of the input of a module, or a list of shapes for several; random inputs are made of them. An
            ONNX model knows its shapes: the second argument is its example input.
        dummy_input: one input instead. Of a module a tensor, a tuple of positional arguments, or a dict of keyword
            arguments; of an ONNX model its feeds, without which its outputs before and after are not compared.
        providers: of ONNX Runtime, for an ONNX model; the CPU by default.
        progress: show a progress bar on a terminal.

    Returns:
        A report; iterating it gives the folded ``(layer, batch norm)`` name pairs.

    Raises:
        ModelError: a module without ``input_shapes`` and ``dummy_input``, a path, or a model that cannot be read or run
            on the input.

    Reference: Jacob et al. 2018, arXiv:1712.05877, section 3.2.
    """
    with collector_paused():
        return front_end_of(model).fold(model, input_shapes, dummy_input, "fold_all_batch_norms", providers, progress)
