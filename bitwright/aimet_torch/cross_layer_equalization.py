"""``aimet_torch.cross_layer_equalization``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_torch import batch_norm_fold
from bitwright.aimet_torch._core import walk_modules
from bitwright.aimet_torch._layers import smallest_input
from bitwright.errors import ModelError

__all__ = ["ClsSetInfo", "CrossLayerScaling", "HighBiasFold", "equalize_bn_folded_model", "equalize_model"]

__getattr__ = absent_names(__name__)


class ClsSetInfo:
    """A set of equalized layers: one pair, or two with a depthwise layer in the middle.

    Attributes:
        cls_pair_info_list: the pairs.
    """

    class ClsSetLayerPairInfo:
        """Two neighbouring layers and what the channels between them were divided by."""

        def __init__(self, layer1: Any, layer2: Any, scale_factor: Any, relu_activation_between_layers: bool) -> None:
            self.layer1, self.layer2 = layer1, layer2
            self.scale_factor, self.relu_activation_between_layers = (scale_factor, relu_activation_between_layers)

    def __init__(self, cls_pair_1: ClsSetLayerPairInfo, cls_pair_2: ClsSetLayerPairInfo | None = None) -> None:
        self.cls_pair_info_list = [cls_pair_1] if cls_pair_2 is None else [cls_pair_1, cls_pair_2]


class ClsSetInfos(list[ClsSetInfo]):
    """What :meth:`CrossLayerScaling.scale_model` did; ``report`` says more, and what was left and why."""

    report: Any = None


def equalize_model(model: nn.Module, input_shapes: Any = None, dummy_input: Any = None, **options: Any) -> Any:
    """:func:`bitwright.torch.equalize_model`, in place; high biases are absorbed, as in AIMET.

    Returns:
        Our report of what was equalized (AIMET returns nothing).
    """
    return front.equalize_model(model, input_shapes, dummy_input, absorb_bias=True, **options)


def equalize_bn_folded_model(
    model: nn.Module, input_shapes: Any = None, folded_pairs: Any = None, dummy_input: Any = None, **options: Any
) -> Any:
    """:func:`bitwright.torch.equalize_bn_folded_model`; ``folded_pairs`` are ``(layer, batch norm)`` modules.

    Returns:
        Our report of what was equalized (AIMET returns nothing).
    """
    moments = _moments(model, folded_pairs)
    return front.equalize_bn_folded_model(
        model, input_shapes, moments, dummy_input, absorb_bias=bool(moments), **options
    )


def _moments(model: nn.Module, pairs: Any) -> Any:
    """Layer -> mean and deviation of its output, from ``(layer, batch norm)`` pairs or a dict of them."""
    if pairs is None:
        return None
    if isinstance(pairs, batch_norm_fold.FoldedPairs) and len(pairs) == len(pairs.report or ()):
        return pairs.report.moments
    names = {id(module): name for name, module in walk_modules(model)}
    found: dict[str, Any] = {}
    for layer, norm in pairs.items() if isinstance(pairs, Mapping) else pairs:
        if id(layer) not in names:
            raise ModelError(
                "folded_pairs",
                f"a {type(layer).__name__} in it is not a module of the model",
                "give the pairs of (layer, batch norm) modules that fold_all_batch_norms returned for this model",
            )
        found[names[id(layer)]] = _moments_of(norm)
    return found


def _moments_of(norm: Any) -> tuple[Any, Any]:
    count = norm.num_features
    beta, gamma = (None if p is None else p.detach().double().cpu().numpy() for p in (norm.bias, norm.weight))
    return np.zeros(count) if beta is None else beta, np.ones(count) if gamma is None else np.abs(gamma)


class CrossLayerScaling:
    """Equalization without anything before or after it."""

    def __init__(self, model: Any = None) -> None:
        self._model = model

    @staticmethod
    def scale_model(model: nn.Module, input_shapes: Any = None, dummy_input: Any = None, **options: Any) -> ClsSetInfos:
        """Equalize a model whose batch norms are folded.

        Returns:
            The equalized sets, for :meth:`HighBiasFold.bias_fold`.
        """
        report = front.CrossLayerScaling.scale_model(model, input_shapes, dummy_input, **options)
        infos = ClsSetInfos(_sets(model, report))
        infos.report = report
        return infos

    @staticmethod
    def scale_cls_sets(cls_sets: Sequence[Sequence[nn.Module]], **options: Any) -> list[Any]:
        """Equalize tuples of layers that follow one another; returns what their channels were divided by."""
        return list(front.CrossLayerScaling.scale_cls_sets(cls_sets, **options))

    @staticmethod
    def scale_cls_set(cls_set: Sequence[nn.Module]) -> Any:
        """:meth:`scale_cls_sets` of one set."""
        return CrossLayerScaling.scale_cls_sets([cls_set], progress=False)[0]

    def scale_cls_set_with_conv_layers(self: Any, cls_set: Any = None) -> Any:
        """Equalize two layers; returns what the channels between them were divided by.

        Raises:
            ModelError: it is not a set of two.
        """
        return _scale(self if cls_set is None else cls_set, 2)

    def scale_cls_set_with_depthwise_layers(self: Any, cls_set: Any = None) -> Any:
        """Equalize three layers, the middle one depthwise; returns what the channels between them were divided by.

        Raises:
            ModelError: it is not a set of three.
        """
        return _scale(self if cls_set is None else cls_set, 3)


def _scale(cls_set: Any, count: int) -> Any:
    if not isinstance(cls_set, (tuple, list)) or len(cls_set) != count:
        raise ModelError("cls_set", f"it is not a tuple of {count} layers", "give the modules in their order")
    return CrossLayerScaling.scale_cls_set(cls_set)


def _sets(model: nn.Module, report: Any) -> list[ClsSetInfo]:
    pairs = list(_pairs(model, report))
    found: list[ClsSetInfo] = []
    used: set[int] = set()
    for pair in pairs:
        if id(pair) in used:
            continue
        follower = None
        if getattr(pair.layer2, "groups", 1) > 1:  # depthwise: one set with the layer after it
            after = (p for p in pairs if p.layer1 is pair.layer2 and id(p) not in used)
            follower = next(after, None)
        used.update({id(pair), id(follower)})
        found.append(ClsSetInfo(pair, follower))
    return found


def _pairs(model: nn.Module, report: Any) -> Iterator[ClsSetInfo.ClsSetLayerPairInfo]:
    """Each producer of a group with each of its consumers, and whether an activation is between them."""
    modules = dict(walk_modules(model))
    graph = report.view.graph()
    for group, factor in zip(report.groups, report.factors, strict=True):
        for producer in group.producers:
            first, value = modules.get(graph.op(producer.op).module), graph.op(producer.op).outputs[0]
            relu = any(op.type in ("Relu", "PRelu", "Clip") for op, _ in graph.consumers(value))
            for consumer, _ in group.consumers:
                second = modules.get(graph.op(consumer.op).module)
                yield ClsSetInfo.ClsSetLayerPairInfo(first, second, factor, relu)


class HighBiasFold:
    """High-bias absorption after equalization."""

    @staticmethod
    def bias_fold(cls_set_info_list: Any, bn_layers: Any) -> Any:
        """Move what lies three standard deviations above zero into the next layer, in place.

        Args:
            cls_set_info_list: what :meth:`CrossLayerScaling.scale_model` returned, or a list of :class:`ClsSetInfo`.
            bn_layers: layer -> its batch norm as it was before it was folded, both modules.
        """
        report = getattr(cls_set_info_list, "report", None)
        if report is not None:
            given = bn_layers.report if isinstance(bn_layers, batch_norm_fold.FoldedPairs) else bn_layers
            return front.HighBiasFold.bias_fold(report, given)
        norms = dict(bn_layers)
        for info in cls_set_info_list:
            for pair in info.cls_pair_info_list:
                if pair.layer1 in norms and pair.relu_activation_between_layers:
                    _absorb(pair, norms[pair.layer1])
        return None


def _absorb(pair: ClsSetInfo.ClsSetLayerPairInfo, norm: Any) -> None:
    """Absorb the bias of one pair that is equalized already."""
    chain = nn.Sequential(pair.layer1, nn.ReLU(), pair.layer2)
    factor = np.asarray(pair.scale_factor, np.float64)
    mean, deviation = _moments_of(norm)
    x = smallest_input((pair.layer1, pair.layer2))
    report = front.CrossLayerScaling.scale_model(chain, dummy_input=x, progress=False)
    front.HighBiasFold.bias_fold(report, {"0": (mean / factor, deviation / factor)})
