"""``aimet_onnx.cross_layer_equalization``."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright import onnx as front
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_onnx._models import proto_of
from bitwright.errors import ModelError

__all__ = ["ClsSetInfo", "CrossLayerScaling", "HighBiasFold", "equalize_model"]

__getattr__ = absent_names(__name__)


class ClsSetInfo:
    """A pair of equalized layers.

    Attributes:
        cls_pair_info_list: the pair.
    """

    class ClsSetLayerPairInfo:
        """Two neighbouring nodes and what the channels between them were divided by."""

        def __init__(self, layer1: Any, layer2: Any, scale_factor: Any, relu_activation_between_layers: bool) -> None:
            self.layer1, self.layer2, self.scale_factor = layer1, layer2, scale_factor
            self.relu_activation_between_layers = relu_activation_between_layers

    def __init__(self, cls_pair_1: Any, cls_pair_2: Any = None) -> None:
        self.cls_pair_info_list = [cls_pair_1] if cls_pair_2 is None else [cls_pair_1, cls_pair_2]


class ClsSetInfos(list[ClsSetInfo]):
    """What :meth:`CrossLayerScaling.scale_model` did; ``report`` says more, and what was left and why."""

    report: Any = None


def equalize_model(model: Any, **options: Any) -> Any:
    """:func:`bitwright.onnx.equalize_model`, in place; high biases are absorbed, as in AIMET.

    Returns:
        Our report of what was equalized (AIMET returns nothing).
    """
    return front.equalize_model(proto_of(model), absorb_bias=True, **options)


class CrossLayerScaling:
    """Equalization without anything before or after it."""

    def __init__(self, model: Any) -> None:
        self._model = proto_of(model)

    def scale_model(self, **options: Any) -> ClsSetInfos:
        """Equalize a model whose batch norms are folded; the sets are for :meth:`HighBiasFold.bias_fold`."""
        report = front.CrossLayerScaling(self._model).scale_model(**options)
        assert report.view is not None
        graph, infos = report.view.graph(), ClsSetInfos()
        nodes = {node.name: node for node in self._model.graph.node}
        for group, factor in zip(report.groups, report.factors, strict=True):
            for producer in group.producers:
                readers = graph.consumers(graph.op(producer.op).outputs[0])
                relu = any(op.type in ("Relu", "PRelu", "Clip") for op, _ in readers)
                for consumer, _ in group.consumers:
                    pair = ClsSetInfo.ClsSetLayerPairInfo(nodes.get(producer.op), nodes.get(consumer.op), factor, relu)
                    infos.append(ClsSetInfo(pair))
        infos.report = report
        return infos

    def scale_cls_set_with_conv_layers(self, cls_set: Any) -> Any:
        """Equalize two layers (nodes, operators of a ConnectedGraph, or names) in place.

        Returns:
            What the channels between them were divided by.

        Raises:
            ModelError: it is not a set of two, or they cannot be equalized, with the reason.
        """
        return self._scale(cls_set, 2)

    def scale_cls_set_with_depthwise_layers(self, cls_set: Any) -> Any:
        """Equalize three layers, the middle one depthwise, in place; two factors come back.

        Raises:
            ModelError: it is not a set of three, or they cannot be equalized, with the reason.
        """
        return self._scale(cls_set, 3)

    def scale_cls_set(self, cls_set: Any) -> Any:
        """Equalize two or three layers in place."""
        return self._scale(cls_set, len(cls_set))

    def _scale(self, cls_set: Any, count: int) -> Any:
        if not isinstance(cls_set, (tuple, list)) or len(cls_set) != count:
            raise ModelError("cls_set", f"it is not a tuple of {count} layers", "give the nodes in their order")
        names = [layer if isinstance(layer, str) else layer.name for layer in cls_set]
        return front.CrossLayerScaling(self._model).scale_cls_sets([names], progress=False)[0]


class HighBiasFold:
    """High-bias absorption after equalization."""

    def __init__(self, model: Any) -> None:
        self._model = proto_of(model)

    def bias_fold(self, cls_set_info_list: Any, bn_layers: Any) -> Any:
        """Move what lies three standard deviations above zero into the next layer, in place.

        Args:
            cls_set_info_list: what :meth:`CrossLayerScaling.scale_model` returned.
            bn_layers: name of a node -> its :class:`BNLayer`; or what ``fold_all_batch_norms_to_weight`` returned.

        Raises:
            ModelError: the list is another one.
        """
        report = getattr(cls_set_info_list, "report", None)
        if report is None:
            raise ModelError(
                "cls_set_info_list", f"a {type(cls_set_info_list).__name__} does not know its model",
                "pass what CrossLayerScaling(model).scale_model() returned",
            )  # fmt: skip
        if isinstance(bn_layers, tuple) and bn_layers:
            bn_layers = bn_layers[0]
        given = getattr(bn_layers, "report", None)
        if given is None:
            given = {
                name: (np.asarray(norm.beta, np.float64).ravel(), np.abs(np.asarray(norm.gamma, np.float64)).ravel())
                for name, norm in bn_layers.items()
            }
        return front.HighBiasFold(self._model).bias_fold(report, given)
