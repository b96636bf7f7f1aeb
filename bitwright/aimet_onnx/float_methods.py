"""Methods on a float ONNX model under AIMET's names: batch-norm folding, equalization, rotation.

Home of ``aimet_onnx.batch_norm_fold``, ``cross_layer_equalization``, ``spinquant`` and ``meta.connectedgraph``. Layers are given
and returned as nodes; our functions name them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx

from bitwright import onnx as front
from bitwright.aimet_common import sites
from bitwright.aimet_common.names import absent_names
from bitwright.aimet_common.sites import ClsSetInfo, ClsSetInfos
from bitwright.aimet_onnx.utils import proto_of
from bitwright.errors import ConfigError, ModelError, with_article
from bitwright.methods.scaling import equalize as equalization
from bitwright.methods.scaling.equalize import EqualizeReport, equalize_opened
from bitwright.onnx.opened import OnnxOpened
from bitwright.progress import progress as bar

__all__ = [
    "BNLayer", "ClsSetInfo", "ConnectedGraph", "CrossLayerScaling", "FoldedPairs", "HighBiasFold", "apply_spinquant",
    "equalize_model", "find_all_batch_norms_to_fold", "fold_all_batch_norms_to_weight",
]  # fmt: skip

__getattr__ = absent_names(__name__)

#: inputs of a node that hold its weight and its bias
WEIGHT_INDEX, BIAS_INDEX = 1, 2

# ---------------------------------------------------------------------------------------------------- batch norms


class BNLayer:
    """A batch norm's scale and shift, as :class:`HighBiasFold` takes them."""

    def __init__(self, bn_layer: Any = None, gamma: Any = None, beta: Any = None) -> None:
        self.bn_layer, self.gamma, self.beta = bn_layer, gamma, beta


class FoldedPairs(list[tuple[onnx.NodeProto, onnx.NodeProto]]):
    """``(layer, batch norm)`` nodes that were folded; ``report`` says more, and what was not folded and why."""

    report: Any = None


def _as_inference(graph: onnx.GraphProto) -> None:
    """Let batch norms that were exported in training mode use their stored statistics, as AIMET does."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        if node.op_type == "BatchNormalization" and len(node.output) > 1 and read.isdisjoint(node.output[1:]):
            del node.output[1:]
            kept = [attribute for attribute in node.attribute if attribute.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend(kept)


def fold_all_batch_norms_to_weight(model: Any, **options: Any) -> tuple[FoldedPairs, FoldedPairs]:
    """:func:`bitwright.onnx.fold_all_batch_norms`, in place; also of batch norms exported in training mode.

    Returns:
        Two lists of ``(layer, batch norm)`` nodes: batch norms after their layers, and before them. The nodes are copies of
        those the model had.
    """
    proto = proto_of(model)
    _as_inference(proto.graph)
    nodes = {node.name: copy.deepcopy(node) for node in proto.graph.node}
    report = front.fold_all_batch_norms(proto, **options)
    lists = {"backward": FoldedPairs(), "forward": FoldedPairs()}
    for fold in report.folded:
        for layer, norm in fold.pairs:
            if layer in nodes and norm in nodes:
                lists[fold.direction].append((nodes[layer], nodes[norm]))
    for pairs in lists.values():
        pairs.report = report
    return lists["backward"], lists["forward"]


class ConnectedGraph(sites.ConnectedGraph):
    """The operators of an ONNX model.

    Args:
        model: ``ModelProto``, ONNX Runtime's ``ONNXModel`` wrapper, or a path; left as it is.
    """

    def __init__(self, model: Any) -> None:
        proto = proto_of(model)
        nodes = {node.name: node for node in proto.graph.node}
        super().__init__(proto, front.QuantizationSimModel(proto).graph, nodes)


def find_all_batch_norms_to_fold(connected_graph: Any) -> tuple[FoldedPairs, FoldedPairs]:
    """Find the pairs that :func:`fold_all_batch_norms_to_weight` folds, on a copy.

    Args:
        connected_graph: ``aimet_onnx.meta.connectedgraph.ConnectedGraph(model)``; or the model itself.

    Returns:
        Two lists of nodes: ``(layer, batch norm)`` of batch norms after their layers, ``(batch norm, layer)`` of those before
        them.
    """
    after, before = fold_all_batch_norms_to_weight(copy.deepcopy(proto_of(connected_graph)), progress=False)
    swapped = FoldedPairs((norm, layer) for layer, norm in before)
    swapped.report = before.report
    return after, swapped


# ---------------------------------------------------------------------------------------------------- equalization


def equalize_model(model: Any, **options: Any) -> Any:
    """:func:`bitwright.onnx.equalize_model`, in place; high biases are absorbed, as in AIMET.

    Returns:
        Our report of what was equalized (AIMET returns nothing).
    """
    _as_inference(proto_of(model).graph)
    return front.equalize_model(proto_of(model), absorb_bias=True, **options)


class CrossLayerScaling:
    """Equalization without anything before or after it."""

    def __init__(self, model: Any) -> None:
        self._model = proto_of(model)

    def scale_model(self, *, progress: bool = True) -> ClsSetInfos:
        """Equalize a model whose batch norms are folded; the sets are for :meth:`HighBiasFold.bias_fold`."""
        report = equalize_opened(OnnxOpened(self._model, None, "scale_model", None), None, progress)
        assert report.view is not None
        nodes = {node.name: node for node in self._model.graph.node}
        return ClsSetInfos.of(report, sites.ConnectedGraph(self._model, report.view.graph(), nodes).get_all_ops().get)

    def scale_cls_sets(self, cls_sets: Sequence[Sequence[Any]], *, progress: bool = True) -> list[Any]:
        """Equalize sets of layers that follow one another; the model's other layers stay as they are.

        Args:
            cls_sets: tuples of two or more Conv, ConvTranspose, Gemm or MatMul nodes, operators of a ConnectedGraph, or
                names; the middle one of three is depthwise.
            progress: show a progress bar on a terminal.

        Returns:
            Per set what the channels were divided by, shape [channels]; for a set of n layers a tuple of n - 1 of them.

        Raises (and leaves the model as it was):
            ModelError: neighbours of a set cannot be equalized, with the reason; or the model cannot be read or run.
        """
        opened = OnnxOpened(self._model, None, "scale_cls_sets", None)
        links = [tuple(itertools.pairwise(map(_name_of, cls_set))) for cls_set in cls_sets]
        wanted = {link for several in links for link in several}
        report = equalization.equalize(opened.view, only=wanted, bar=partial(bar, enabled=progress))
        found = _factors_of_links(report)
        lacking = [link for link in wanted if link not in found]
        if lacking or not all(links):
            report.undo()
            raise _not_equalizable(lacking, report)
        opened.finish(report)
        return [found[set_[0]] if len(set_) == 1 else tuple(found[link] for link in set_) for set_ in links]

    def scale_cls_set_with_conv_layers(self, cls_set: Any) -> Any:
        """Equalize two layers in place; see :meth:`scale_cls_sets`.

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
        return self.scale_cls_sets([cls_set], progress=False)[0]


def _name_of(layer: Any) -> str:
    return layer if isinstance(layer, str) else str(layer.name)


def _factors_of_links(report: EqualizeReport) -> dict[tuple[str, str], Any]:
    """Divisors of the channels between two layers, for each pair of neighbours."""
    return {
        (producer.op, consumer.op): factor
        for group, factor in zip(report.groups, report.factors, strict=True)
        for producer in group.producers
        for consumer, _ in group.consumers
    }


def _not_equalizable(lacking: Sequence[tuple[str, str]], report: EqualizeReport) -> ModelError:
    """The error for neighbours that were not equalized, with the reasons of the report; without any, a set has one layer."""
    first = {one for one, _ in lacking}
    reasons = "; ".join(str(line) for line in report.refused if line.op in first)
    names = ", ".join(f"{one} -> {other}" for one, other in lacking) or "a set of one layer"
    return ModelError(
        "scale_cls_sets",
        f"{names} cannot be equalized" + (f": {reasons}" if reasons else ""),
        "name two or more layers that follow one another, with nothing but a piecewise linear activation between them",
    )


class HighBiasFold:
    """High-bias absorption after equalization."""

    def __init__(self, model: Any) -> None:
        self._model = proto_of(model)

    def bias_fold(self, cls_set_info_list: Any, bn_layers: Any) -> Any:
        """Move what lies three standard deviations above zero into the next layer, in place.

        Args:
            cls_set_info_list: what :meth:`CrossLayerScaling.scale_model` returned.
            bn_layers: name of a node -> its :class:`BNLayer`; or what ``fold_all_batch_norms_to_weight`` returned.

        Returns:
            Our report, whose ``absorbed`` has the layers.

        Raises:
            ModelError: the list is another one.
        """
        report = getattr(cls_set_info_list, "report", None)
        if report is None:
            raise ModelError(
                "cls_set_info_list", f"{with_article(type(cls_set_info_list).__name__)} does not know its model",
                "pass what CrossLayerScaling(model).scale_model() returned",
            )  # fmt: skip
        if isinstance(bn_layers, tuple) and bn_layers:
            bn_layers = bn_layers[0]
        folds = getattr(bn_layers, "report", None)
        moments = {
            name: (np.asarray(norm.beta, np.float64).ravel(), np.abs(np.asarray(norm.gamma, np.float64)).ravel())
            for name, norm in ({} if folds is not None else bn_layers).items()
        }
        opened = OnnxOpened(self._model, None, "bias_fold", None)
        equalization.absorb_biases(report, moments if folds is None else folds.moments, opened.view)
        opened.finish(report)
        return report


# ---------------------------------------------------------------------------------------------------- rotation


def apply_spinquant(
    model: Any,
    visual_model: Any = None,
    embedding: Any = None,
    *,
    enable_r1: bool = True,
    enable_r2: bool = False,
    enable_r3: bool = False,
    topology: Any = None,
    **options: Any,
) -> None:
    """:func:`bitwright.onnx.apply_spinquant`, in place; no topology is asked for.

    Raises:
        ConfigError: ``visual_model``, ``embedding`` or ``enable_r3``, which have no counterpart.
    """
    for name, given in (("visual_model", visual_model), ("embedding", embedding), ("enable_r3", enable_r3 or None)):
        if given is not None:
            raise ConfigError(f"apply_spinquant({name}=...)", "it has no counterpart here", "leave it out")
    front.apply_spinquant(proto_of(model), enable_r1=enable_r1, enable_r2=enable_r2, **options)
