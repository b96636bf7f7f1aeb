"""Analytic post-training methods for torch modules, under AIMET's names where it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from bitwright.algorithms import equalize as equalization
from bitwright.algorithms.batch_norm_fold import FoldReport
from bitwright.algorithms.equalize import EqualizeReport
from bitwright.algorithms.layers import batch_norm_moments, moments_of_layers
from bitwright.torch.batch_norm_fold import example_input, float_outputs, fold_all_batch_norms, what_changed
from bitwright.torch.batches import model_device, to_device
from bitwright.torch.view import TorchView

Shapes = Sequence[int] | Sequence[Sequence[int]] | None


def _open(
    model: nn.Module, shapes: Shapes, dummy_input: Any, function: str
) -> tuple[TorchView, Callable[[], str | None]]:
    """A view of the model, and a check that says what has changed since now."""
    example = example_input(model, shapes, function) if dummy_input is None else dummy_input
    example = to_device(example, model_device(model))
    view = TorchView(model, [example])
    view.graph()  # explains an example that does not fit, before anything runs
    before = float_outputs(model, example)
    return view, lambda: what_changed(model, example, before)


def _backward_pairs(report: FoldReport) -> Iterable[tuple[str, str]]:
    return (pair for fold in report.folded if fold.direction == "backward" for pair in fold.pairs)


def equalize_model(
    model: nn.Module, input_shapes: Shapes = None, dummy_input: Any = None, *, absorb_bias: bool = False
) -> EqualizeReport:
    """Fold batch norms, then balance the channel ranges of neighbouring layers, in place.

    The function of the model stays: its outputs on the example input are compared, and a group of layers that changes
    them is found and left alone. ReLU6 modules between equalized layers become a :class:`ChannelClamp` with a bound per
    channel. What was not equalized is in ``report.refused`` and in the log, with the reason.

    Args:
        model: changed in place.
        input_shapes: shape of the input, or a list of shapes for several; random inputs are made of them.
        dummy_input: one input instead: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        absorb_bias: also move high biases into the next layer, where the batch norm tells how high they are. This
            changes the function a little (one activation in 740).

    Returns:
        The report; ``report.undo()`` gives the folded model back.

    Raises:
        ModelError: neither ``input_shapes`` nor ``dummy_input``, or the model fails on the input.

    Reference: Nagel et al. 2019, arXiv:1906.04721, section 4.1.
    """
    example = example_input(model, input_shapes, "equalize_model") if dummy_input is None else dummy_input
    view, _ = _open(model, None, example, "equalize_model")
    moments = batch_norm_moments(view)
    folds = fold_all_batch_norms(model, dummy_input=example)
    view, check = _open(model, None, example, "equalize_model")
    statistics = moments_of_layers(moments, _backward_pairs(folds))
    return equalization.equalize(view, check, statistics=statistics, absorb_bias=absorb_bias)
