"""The parts of equalization one by one, under AIMET's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.algorithms.channels.layers import Array
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.scaling import equalize as equalization
from bitwright.algorithms.scaling.equalize import EqualizeReport
from bitwright.errors import ModelError, checks_arguments
from bitwright.methods.channels import equalize_bn_folded_model
from bitwright.progress import progress as bar
from bitwright.torch.adapters.view import BATCH_NORMS, TorchView
from bitwright.torch.calls.batches import model_device
from bitwright.torch.calls.trees import walk_modules


class CrossLayerScaling:
    """Equalization without anything before or after it."""

    @staticmethod
    @checks_arguments
    def scale_model(
        model: nn.Module,
        input_shapes: Sequence[int] | Sequence[Sequence[int]] | None = None,
        dummy_input: Any = None,
        *,
        progress: bool = True,
    ) -> EqualizeReport:
        """Equalize a model whose batch norms are folded: :func:`equalize_bn_folded_model` without high biases.

        Returns:
            The report, which :meth:`HighBiasFold.bias_fold` takes.

        Raises:
            ModelError: as for :func:`equalize_model`.
        """
        return equalize_bn_folded_model(model, input_shapes, None, dummy_input, progress=progress)

    @staticmethod
    @checks_arguments
    def scale_cls_sets(
        cls_sets: Sequence[Sequence[nn.Module]], *, progress: bool = True
    ) -> list[Array | tuple[Array, ...]]:
        """Equalize sets of layers that follow one another, in place.

        Nothing but a piecewise-linear activation may stand between the layers of a set, and nothing else may read what
        is between: these layers alone do not show it, so that :meth:`scale_model` is the safer call.

        Args:
            cls_sets: tuples of two or more Conv, ConvTranspose or Linear modules; the middle one of three is depthwise.
            progress: show a progress bar on a terminal.

        Returns:
            Per set what the channels were divided by, shape [channels]; for a set of n layers a tuple of n - 1 of them.

        Raises:
            ModelError: channels of neighbours do not fit.
        """
        factors: list[Array | tuple[Array, ...]] = []
        for cls_set in bar(cls_sets, "equalize: sets", progress):
            found = _scaled(cls_set)
            factors.append(found[0] if len(found) == 1 else found)
        return factors


def _scaled(cls_set: Sequence[nn.Module]) -> tuple[Array, ...]:
    """What the channels between the layers of a set were divided by."""
    training = [module.training for module in cls_set]
    chain = nn.Sequential(*cls_set).eval()
    try:
        report = equalization.equalize(TorchView(chain, [_smallest_input(cls_set)]))
    except RuntimeError as error:
        names = " -> ".join(str(module) for module in cls_set)
        raise ModelError("scale_cls_sets", f"the layers do not fit together: {error}", f"check {names}") from error
    finally:
        for module, mode in zip(cls_set, training, strict=True):
            module.training = mode
    if len(cls_set) < 2 or len(report.groups) != len(cls_set) - 1:
        report.undo()
        raise ModelError(
            "scale_cls_sets",
            "; ".join(str(line) for line in report.refused[:-1]) or "a set of one layer",
            "give two or more layers with parameters of their own that follow one another",
        )
    return report.factors


def _smallest_input(layers: Sequence[nn.Module]) -> torch.Tensor:
    """An input that all of ``layers``, one after the other, can run on."""
    first: Any = layers[0]
    channels = first.in_features if isinstance(first, nn.Linear) else first.in_channels
    size = [1] * (first.weight.dim() - 2)
    for layer in reversed(layers):
        for axis in range(len(size)):
            if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                kernel, stride, dilation = layer.kernel_size[axis], layer.stride[axis], layer.dilation[axis]
                size[axis] = (size[axis] - 1) * stride + dilation * (kernel - 1) + 1
    return torch.zeros((1, channels, *size), dtype=first.weight.dtype, device=model_device(first))


class HighBiasFold:
    """High-bias absorption after equalization."""

    @staticmethod
    @checks_arguments
    def bias_fold(cls_set_info_list: EqualizeReport, bn_layers: Any) -> EqualizeReport:
        """Move what lies three standard deviations above zero into the next layer.

        Args:
            cls_set_info_list: what :meth:`CrossLayerScaling.scale_model` returned.
            bn_layers: what ``fold_all_batch_norms`` returned; or layer (module or name) -> its batch norm as it was
                before it was folded, or mean and standard deviation of its output.

        Returns:
            The same report; ``absorbed`` has the layers.

        Raises:
            ModelError: a batch norm is given by its name, or a layer is none of the model.
        """
        view = cls_set_info_list.view
        assert isinstance(view, TorchView)
        equalization.absorb_biases(cls_set_info_list, _moments(bn_layers, view.model))
        return cls_set_info_list


def _moments(bn_layers: Any, model: nn.Module) -> Mapping[str, tuple[Array, Array]]:
    if isinstance(bn_layers, FoldReport):
        return bn_layers.moments
    names = {id(module): path for path, module in walk_modules(model)}
    found: dict[str, tuple[Array, Array]] = {}
    for layer, norm in dict(bn_layers).items():
        name = layer if isinstance(layer, str) else names.get(id(layer))
        if name is None:
            raise ModelError(
                "bn_layers", f"a {type(layer).__name__} in it is not a module of the model", "name its layers"
            )
        found[name] = _of_norm(name, norm)
    return found


def _of_norm(layer: str, norm: Any) -> tuple[Array, Array]:
    if isinstance(norm, BATCH_NORMS):
        channels = norm.num_features
        beta, gamma = (None if p is None else p.detach().double().cpu().numpy() for p in (norm.bias, norm.weight))
        return np.zeros(channels) if beta is None else beta, np.ones(channels) if gamma is None else np.abs(gamma)
    if isinstance(norm, tuple) and len(norm) == 2:
        return norm
    raise ModelError(
        "bn_layers",
        f"{layer} has {norm!r}, which tells no mean and deviation",
        "give the report of fold_all_batch_norms itself, which keeps what its batch norms said",
    )
