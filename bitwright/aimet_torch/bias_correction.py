"""``aimet_torch.bias_correction``, which AIMET removed in 2.31."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from bitwright import torch as front
from bitwright.aimet_torch._adaround import Unlabelled
from bitwright.aimet_torch._core import walk_modules
from bitwright.aimet_torch.cross_layer_equalization import _moments
from bitwright.aimet_torch.quantsim import QuantParams

__all__ = ["QuantParams", "correct_bias"]


def correct_bias(
    model: nn.Module,
    quant_params: QuantParams,
    num_quant_samples: int | None,
    data_loader: Iterable[Any],
    num_bias_correct_samples: int | None,
    conv_bn_dict: Mapping[Any, Any] | None = None,
    perform_only_empirical_bias_corr: bool = True,
    layers_to_ignore: Iterable[Any] | None = None,
    **options: Any,
) -> Any:
    """:func:`bitwright.torch.correct_bias` with modules: ``conv_bn_dict`` of layer to batch norm, layers to ignore.

    The second element of a batch of two is dropped as its labels.

    Returns:
        Our report (AIMET returns nothing).
    """
    names = {id(module): name for name, module in walk_modules(model)}
    ignored = [
        layer if isinstance(layer, str) else names.get(id(layer), str(layer)) for layer in layers_to_ignore or ()
    ]
    norms = {layer: getattr(found, "bn", found) for layer, found in (conv_bn_dict or {}).items()}
    by_name = all(isinstance(layer, str) for layer in norms)
    moments = norms if by_name else _moments(model, norms)
    return front.correct_bias(
        model, quant_params, num_quant_samples, Unlabelled(data_loader), num_bias_correct_samples, moments,
        perform_only_empirical_bias_corr, ignored, **options,
    )  # fmt: skip
