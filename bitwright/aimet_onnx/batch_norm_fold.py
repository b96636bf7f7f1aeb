"""``aimet_onnx.batch_norm_fold``."""

from __future__ import annotations

import copy
from typing import Any

import onnx

from bitwright import onnx as front
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_onnx._models import proto_of

__all__ = ["BNLayer", "FoldedPairs", "find_all_batch_norms_to_fold", "fold_all_batch_norms_to_weight"]

__getattr__ = absent_names(__name__)


class BNLayer:
    """A batch norm's scale and shift, as :class:`HighBiasFold` takes them."""

    def __init__(self, bn_layer: Any = None, gamma: Any = None, beta: Any = None) -> None:
        self.bn_layer, self.gamma, self.beta = bn_layer, gamma, beta


class FoldedPairs(list[tuple[onnx.NodeProto, onnx.NodeProto]]):
    """``(layer, batch norm)`` nodes that were folded; ``report`` says more, and what was not and why."""

    report: Any = None


def fold_all_batch_norms_to_weight(model: Any, **options: Any) -> tuple[FoldedPairs, FoldedPairs]:
    """:func:`bitwright.onnx.fold_all_batch_norms`, in place.

    Returns:
        Two lists of ``(layer, batch norm)`` nodes: batch norms after their layers, and before them. The nodes are copies of
        those the model had.
    """
    proto = proto_of(model)
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


def find_all_batch_norms_to_fold(connected_graph: Any) -> tuple[FoldedPairs, FoldedPairs]:
    """What :func:`fold_all_batch_norms_to_weight` would fold, tried on a copy.

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
