"""``aimet_torch.meta.connectedgraph``."""

from __future__ import annotations

from typing import Any

from torch import nn

from bitwright import torch as front
from bitwright.aimet_common import connected_graph
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_torch._core import walk_modules

__all__ = ["ConnectedGraph"]

__getattr__ = absent_names(__name__)


class ConnectedGraph(connected_graph.ConnectedGraph):
    """The operators of a module, functional calls included.

    Args:
        model: left as it is.
        model_input: one input: a tensor, a tuple of arguments, or a dict of keyword arguments.
    """

    def __init__(self, model: nn.Module, model_input: Any) -> None:
        self.model_input = tuple(model_input) if isinstance(model_input, list) else model_input
        sim = front.QuantizationSimModel(model, self.model_input)
        super().__init__(model, sim.graph, dict(walk_modules(model)))

    def get_op_from_module_name(self, name: str) -> connected_graph.GraphOp | None:
        """The operator that the module called ``name`` computes; AIMET's ``Model.name`` is understood too."""
        own = super().get_op_from_module_name(name)
        return own or super().get_op_from_module_name(name.removeprefix(f"{type(self.model).__name__}."))
