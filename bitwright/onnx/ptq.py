"""Analytic post-training methods for ONNX models, under AIMET's names where it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx
import onnx_ir as ir

from bitwright.algorithms import equalize as equalization
from bitwright.algorithms.batch_norm_affine import LAYERS
from bitwright.algorithms.batch_norm_fold import FoldReport
from bitwright.algorithms.equalize import EqualizeReport
from bitwright.algorithms.layers import batch_norm_moments, moments_of_layers
from bitwright.core.graph import Graph
from bitwright.errors import ModelError
from bitwright.onnx.batch_norm_fold import float_outputs, fold_all_batch_norms, give_back, what_changed
from bitwright.onnx.data import as_feeds, input_specs, random_feeds
from bitwright.onnx.load import Loaded, load_model
from bitwright.onnx.session import Providers
from bitwright.onnx.view import OnnxView, measure_shapes

Model = onnx.ModelProto | ir.Model | Loaded


def _loaded(model: Any, function: str) -> Loaded:
    if not isinstance(model, (onnx.ModelProto, ir.Model, Loaded)):
        raise ModelError(
            function,
            f"a {type(model).__name__} cannot be changed in place",
            "load the file first: model = onnx.load(path), or bitwright.onnx.load_model(path)",
        )
    return model if isinstance(model, Loaded) else load_model(model)


def _open(
    loaded: Loaded, dummy_input: Any, providers: Providers | None
) -> tuple[OnnxView, Callable[[], str | None]]:
    """A view of the model, and a check that says what has changed since now."""
    specs = input_specs(loaded.model)
    feeds = next(random_feeds(specs)) if dummy_input is None else as_feeds(dummy_input, specs, "dummy_input")
    view = OnnxView(loaded, providers, measure_shapes(loaded.model, feeds, providers))
    view.materialize(_computed_weights(view.graph()))
    before = float_outputs(view, feeds)
    return view, lambda: what_changed(view, feeds, before)


def _computed_weights(graph: Graph) -> Iterator[str]:
    """Weights that the model computes from constants, as a transposed initializer."""
    for op in graph.ops:
        for value in op.inputs[1:] if op.type in LAYERS else ():
            if value is not None and graph.values[value].kind == "constant" and graph.values[value].is_float:
                yield value


def _backward_pairs(report: FoldReport) -> Iterable[tuple[str, str]]:
    return (pair for fold in report.folded if fold.direction == "backward" for pair in fold.pairs)


def equalize_model(
    model: Model,
    dummy_input: Any = None,
    *,
    absorb_bias: bool = False,
    providers: Providers | None = None,
) -> EqualizeReport:
    """Fold batch norms, then balance the channel ranges of neighbouring layers, in place.

    The function of the model stays: its outputs on the example input are compared, and a group of layers that changes
    them is found and left alone. A Clip between equalized layers becomes Relu and Min with a bound per channel. What was
    not equalized is in ``report.refused`` and in the log, with the reason.

    Args:
        model: changed in place; its functions are inlined and its constants become initializers.
        dummy_input: feeds of one run; random values where none are given.
        absorb_bias: also move high biases into the next layer, where the batch norm tells how high they are. This
            changes the function a little (one activation in 740).
        providers: as ONNX Runtime takes them; the CPU by default.

    Returns:
        The report. The change is final: load the file again to have the model as it was.

    Raises:
        ModelError: the model cannot be read or run, ``dummy_input`` does not fit, or ``model`` is a path.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.1.
    """
    loaded = _loaded(model, "equalize_model")
    view, _ = _open(loaded, dummy_input, providers)
    moments = batch_norm_moments(view)
    folds = fold_all_batch_norms(loaded, dummy_input, providers=providers)
    view, check = _open(loaded, dummy_input, providers)
    statistics = moments_of_layers(moments, _backward_pairs(folds))
    report = equalization.equalize(view, check, statistics=statistics, absorb_bias=absorb_bias)
    report.keep()
    give_back(loaded, model)
    return report
