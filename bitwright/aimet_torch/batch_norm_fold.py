"""``aimet_torch.batch_norm_fold``: folding that takes and returns modules."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_common.connected_graph import GraphOp
from bitwright.aimet_torch._connectedgraph import ConnectedGraph
from bitwright.aimet_torch._core import walk_modules
from bitwright.aimet_torch._layers import smallest_input
from bitwright.aimet_torch.quantsim import QuantizationSimModel
from bitwright.errors import ModelError

__all__ = [
    "FoldedPairs",
    "find_all_batch_norms_to_fold",
    "find_standalone_batchnorm_ops",
    "fold_all_batch_norms",
    "fold_all_batch_norms_to_scale",
    "fold_given_batch_norms",
]

__getattr__ = absent_names(__name__)

Pair = tuple[nn.Module, nn.Module]


class FoldedPairs(list[Pair]):
    """``(layer, batch norm)`` modules that were folded; ``report`` says more, and what was not and why."""

    report: Any = None


def fold_all_batch_norms(
    model: nn.Module, input_shapes: Any = None, dummy_input: Any = None, **options: Any
) -> FoldedPairs:
    """:func:`bitwright.torch.fold_all_batch_norms` that returns pairs of modules.

    Returns:
        ``(layer, batch norm)`` of each fold; the batch norms are those the model had before.
    """
    modules = dict(walk_modules(model))
    report = front.fold_all_batch_norms(model, input_shapes, _positional(dummy_input), **options)
    pairs = FoldedPairs(
        (modules[layer], modules[norm]) for layer, norm in report if layer in modules and norm in modules
    )
    pairs.report = report
    return pairs


def fold_all_batch_norms_to_scale(sim: QuantizationSimModel) -> FoldedPairs:
    """:func:`bitwright.torch.fold_all_batch_norms_to_scale`: batch norms into the scales of the weights before them.

    Returns:
        ``(layer, batch norm)`` of each fold, as modules that ``sim.model`` had before.
    """
    modules = dict(walk_modules(sim.model))
    report = front.fold_all_batch_norms_to_scale(sim)
    sim.show_quantizers()
    pairs = FoldedPairs((modules[layer], modules[norm]) for layer, norm in report)
    pairs.report = report
    return pairs


def _positional(dummy_input: Any) -> Any:
    return tuple(dummy_input) if isinstance(dummy_input, list) else dummy_input


def fold_given_batch_norms(
    model: nn.Module, layer_pairs: Iterable[Sequence[nn.Module]], input_shapes: Any = None, dummy_input: Any = None
) -> None:
    """Fold these pairs of a layer and a batch norm, in the order in which they are computed.

    Without an input for the model each pair is taken by itself: that nothing else reads what lies between the two is on the
    caller, as in AIMET.

    Raises:
        ModelError: a pair that cannot be folded, with the reason; those before it are folded.
    """
    if input_shapes is not None or dummy_input is not None:
        report = front.fold_given_batch_norms(model, layer_pairs, input_shapes, dummy_input)
        if report.refused:
            _refuse(_reasons(report))
        return
    names = {id(module): name for name, module in walk_modules(model)}
    for first, second in layer_pairs:
        for missing in (module for module in (first, second) if id(module) not in names):
            _refuse(f"a {type(missing).__name__} is not a module of the model")
        _fold_pair(first, second)
        norm = second if isinstance(second, nn.modules.batchnorm._BatchNorm) else first
        parent, _, name = names[id(norm)].rpartition(".")
        setattr(model.get_submodule(parent), name, nn.Identity())


def _fold_pair(first: nn.Module, second: nn.Module) -> None:
    chain = nn.Sequential(first, second)
    report = front.fold_all_batch_norms(chain, dummy_input=_random_like(smallest_input((first, second))))
    if not len(report):
        _refuse(_reasons(report) or "there is no batch norm in a pair")


def _reasons(report: Any) -> str:
    return "; ".join(str(refusal) for refusal in report.refused)


def _random_like(zeros: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(zeros.shape, generator=generator).to(zeros)


def _refuse(problem: str) -> None:
    raise ModelError(
        "fold_given_batch_norms",
        problem,
        "give pairs of a Conv, ConvTranspose or Linear module and its batch norm; fold_all_batch_norms finds them",
    )


def find_all_batch_norms_to_fold(
    model: nn.Module, input_shapes: Any = None, dummy_input: Any = None
) -> tuple[list[Pair], list[Pair]]:
    """What :func:`fold_all_batch_norms` would fold, tried on a copy.

    Returns:
        ``(layer, batch norm)`` modules of the model: batch norms after their layers, and ``(batch norm, layer)`` of those
        before them.
    """
    report = front.fold_all_batch_norms(copy.deepcopy(model), input_shapes, _positional(dummy_input), progress=False)
    modules = dict(walk_modules(model))
    after: list[Pair] = []
    before: list[Pair] = []
    for fold in report.folded:
        for layer, norm in fold.pairs:
            if fold.direction == "backward":
                after.append((modules[layer], modules[norm]))
            else:
                before.append((modules[norm], modules[layer]))
    return after, before


def find_standalone_batchnorm_ops(connected_graph: ConnectedGraph) -> set[GraphOp]:
    """The batch norms of a graph that cannot be folded.

    Args:
        connected_graph: ``aimet_torch.meta.connectedgraph.ConnectedGraph(model, model_input)``.
    """
    pairs = find_all_batch_norms_to_fold(connected_graph.model, dummy_input=connected_graph.model_input)
    folded = {id(module) for several in pairs for pair in several for module in pair}
    norms = [op for op in connected_graph.ordered_ops if op.type == "BatchNormalization"]
    return {op for op in norms if id(op.get_module()) not in folded}


class BatchNormFold:
    """The functions as methods of a class, as AIMET has them too."""

    find_all_batch_norms_to_fold = staticmethod(find_all_batch_norms_to_fold)
    find_standalone_batchnorm_ops = staticmethod(find_standalone_batchnorm_ops)

    fold_all_batch_norms_to_weight = staticmethod(fold_all_batch_norms)
    fold_given_batch_norms = staticmethod(fold_given_batch_norms)
    fold_all_batch_norms_to_scale = staticmethod(fold_all_batch_norms_to_scale)
