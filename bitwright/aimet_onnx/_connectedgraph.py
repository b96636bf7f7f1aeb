"""``aimet_onnx.meta.connectedgraph``."""

from __future__ import annotations

from typing import Any

from bitwright import onnx as front
from bitwright.aimet_common import connected_graph
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_onnx._models import proto_of

__all__ = ["ConnectedGraph"]

__getattr__ = absent_names(__name__)


class ConnectedGraph(connected_graph.ConnectedGraph):
    """The operators of an ONNX model.

    Args:
        model: ``ModelProto``, ONNX Runtime's ``ONNXModel`` wrapper, or a path; left as it is.
    """

    def __init__(self, model: Any) -> None:
        proto = proto_of(model)
        nodes = {node.name: node for node in proto.graph.node}
        super().__init__(proto, front.QuantizationSimModel(proto).graph, nodes)
