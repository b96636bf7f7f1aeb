"""Batch-norm folding for torch modules, under AIMET's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bitwright.algorithms.folding import batch_norm_fold as algorithm
from bitwright.core.simulation.protocols import sqnr
from bitwright.errors import ModelError
from bitwright.progress import progress as bar
from bitwright.torch.adapters.view import BATCH_NORMS, TorchView
from bitwright.torch.calls.batches import as_call, evaluation, model_device, to_device
from bitwright.torch.calls.trees import flatten_tensors, map_tensors, walk_modules

# dB that the outputs before and after must agree to: what the rounding of the weights' own dtype leaves in a deep network
_FLOORS = {torch.float16: 30.0, torch.bfloat16: 12.0}


def fold_all_batch_norms(
    model: nn.Module,
    input_shapes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    dummy_input: Any = None,
    *,
    progress: bool = True,
) -> algorithm.FoldReport:
    """Fold every batch norm that can be folded into the convolution or linear layer beside it, in place.

    Each fold is checked numerically on random input; then the model's outputs on the example input are compared with
    those before, and folds that changed them are found and undone. What was not folded is listed with the reason in
    ``report.refused`` and in the log.

    Args:
        model: changed in place: weights and biases are rewritten, folded batch norms become ``nn.Identity``.
        input_shapes: shape of the input, or a list of shapes for several; random inputs are made of them.
        dummy_input: one input instead: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        progress: show a progress bar on a terminal.

    Returns:
        A report; iterating it gives the folded ``(layer, batch norm)`` name pairs.

    Raises:
        ModelError: neither ``input_shapes`` nor ``dummy_input``, or the model fails on the input.

    Reference: Jacob et al. 2018, arXiv:1712.05877, section 3.2.
    """
    return _fold(model, input_shapes, dummy_input, "fold_all_batch_norms", None, progress)


def fold_given_batch_norms(
    model: nn.Module,
    layer_pairs: Iterable[Sequence[str | nn.Module]],
    input_shapes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    dummy_input: Any = None,
    *,
    progress: bool = True,
) -> algorithm.FoldReport:
    """:func:`fold_all_batch_norms` of the batch norms in ``layer_pairs`` only.

    Args:
        model, input_shapes, dummy_input, progress: as for :func:`fold_all_batch_norms`.
        layer_pairs: a layer and its batch norm each, in either order, as modules of ``model`` or by name.

    Raises:
        ModelError: no module of the model, no batch norm in a pair; and as for :func:`fold_all_batch_norms`.
    """
    modules = dict(walk_modules(model))
    names = {id(module): path for path, module in modules.items()}
    wanted: set[str] = set()
    for pair in layer_pairs:
        paths = [member if isinstance(member, str) else names.get(id(member), "") for member in pair]
        norms = [path for path in paths if isinstance(modules.get(path), BATCH_NORMS)]
        if len(norms) != 1 or not all(path in modules for path in paths):
            raise ModelError(
                "layer_pairs",
                f"{tuple(str(member) for member in pair)} is no layer of the model with a batch norm of it",
                "give pairs such as (model.conv1, model.bn1) or ('conv1', 'bn1')",
            )
        wanted.update(norms)
    return _fold(model, input_shapes, dummy_input, "fold_given_batch_norms", wanted, progress)


def _fold(
    model: nn.Module, shapes: Any, dummy_input: Any, function: str, only: set[str] | None, progress: bool
) -> algorithm.FoldReport:
    example = example_input(model, shapes, function) if dummy_input is None else dummy_input
    example = to_device(example, model_device(model))
    view = TorchView(model, [example])
    view.graph()  # explains an example that does not fit, before anything runs
    before = float_outputs(model, example)
    report = algorithm.fold_all_batch_norms(
        view, lambda: what_changed(model, example, before), only=only, bar=partial(bar, enabled=progress)
    )
    report.keep()
    return report


def example_input(model: nn.Module, shapes: Any, function: str) -> Any:
    """Random inputs of the shapes given, in the model's dtype.

    Raises:
        ModelError: no shapes.
    """
    if shapes is None:
        raise ModelError(
            function,
            "neither dummy_input nor input_shapes was given, so the model cannot be run once",
            "pass dummy_input=x, or input_shapes=(1, 3, 224, 224)",
        )
    several = len(shapes) > 0 and isinstance(shapes[0], Sequence)
    generator = torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = tuple(
        torch.randn(tuple(s), generator=generator).to(dtype) for s in (shapes if several else [shapes])
    )
    return inputs if several else inputs[0]


def float_outputs(model: nn.Module, example: Any) -> list[tuple[str, torch.Tensor]]:
    """Name and value of every floating-point output of the model on an input, in evaluation mode."""
    args, kwargs = as_call(map_tensors(example, torch.clone))  # a model may write into its input
    with torch.no_grad(), evaluation(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            (n, t.detach().clone())
            for n, t in flatten_tensors(model(*args, **kwargs))
            if t.is_floating_point()
        ]


def what_changed(model: nn.Module, example: Any, before: list[tuple[str, torch.Tensor]]) -> str | None:
    """What is different on the example input since ``before`` was taken; ``None`` when only rounding is."""
    try:
        after = float_outputs(model, example)
    except Exception as error:  # in the model's own code, which may rely on what the folds have changed
        return f"the model fails: {type(error).__name__}: {error}"
    for (name, old), (_, new) in zip(before, after, strict=True):
        finite = torch.isfinite(old)  # mask constants and the like must stay where they are
        if not torch.equal(finite, torch.isfinite(new)):
            return f"{name} has NaN or infinite elements in other places"
        agreement = sqnr(old[finite].double().cpu().numpy(), new[finite].double().cpu().numpy())
        if agreement < _FLOORS.get(old.dtype, 60.0):
            return f"{name} agrees with the original to {agreement:.1f} dB only"
    return None
