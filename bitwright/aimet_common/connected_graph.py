"""The graph of a model under the names that AIMET's scripts read it by; what it shows is our own graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.core.graph.graph import Graph, Op


class GraphOp:
    """One operator.

    Attributes:
        name, type: of the operator; types are ONNX's where there is one.
        inputs, outputs: names of its tensors.
        dotted_name: path of the module that computes it; the name itself in an ONNX model.
    """

    def __init__(self, op: Op, holder: Any) -> None:
        self.name, self.type = op.name, op.type
        self.inputs = [name for name in op.inputs if name is not None]
        self.outputs = list(op.outputs)
        self.dotted_name = op.module or op.name
        self.groups = int(op.attrs.get("group", 1))
        self._holder = holder

    def get_module(self) -> Any:
        """The module that computes it (torch) or its node (ONNX); ``None`` where there is none."""
        return self._holder

    def __repr__(self) -> str:
        return f"{self.name} ({self.type})"


class ConnectedGraph:
    """The operators of a model in the order in which they are computed.

    Attributes:
        model: the model it was made from.
        ordered_ops: the operators.
    """

    def __init__(self, model: Any, graph: Graph, holders: Mapping[str, Any]) -> None:
        self.model = model
        self.ordered_ops = [GraphOp(op, holders.get(op.module or op.name)) for op in graph.ops]
        self._by_name = {op.name: op for op in self.ordered_ops}

    def get_all_ops(self) -> dict[str, GraphOp]:
        """Operators by name."""
        return dict(self._by_name)

    def get_op_from_module_name(self, name: str) -> GraphOp | None:
        """The operator that the module (or node) called ``name`` computes."""
        return next((op for op in self.ordered_ops if op.dotted_name == name), None)
