"""Folding of batch norms that are named, under AIMET's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.errors import ModelError, checks_arguments
from bitwright.torch.adapters.opened import TorchOpened
from bitwright.torch.adapters.view import BATCH_NORMS
from bitwright.torch.calls.trees import walk_modules


@checks_arguments
def fold_given_batch_norms(
    model: nn.Module,
    layer_pairs: Iterable[Sequence[str | nn.Module]],
    input_shapes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    dummy_input: Any = None,
    *,
    progress: bool = True,
) -> FoldReport:
    """:func:`bitwright.torch.fold_all_batch_norms` of the batch norms in ``layer_pairs`` only.

    Args:
        model, input_shapes, dummy_input, progress: as for :func:`bitwright.torch.fold_all_batch_norms`.
        layer_pairs: a layer and its batch norm each, in either order, as modules of ``model`` or by name.

    Raises:
        ModelError: no module of the model, no batch norm in a pair; and as for :func:`bitwright.torch.fold_all_batch_norms`.
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
                f"{tuple(str(member) for member in pair)} is not a layer of the model with a batch norm of it",
                "give pairs such as (model.conv1, model.bn1) or ('conv1', 'bn1')",
            )
        wanted.update(norms)
    opened = TorchOpened(model, input_shapes, dummy_input, "fold_given_batch_norms")
    return opened.fold_last(progress, wanted)
