"""``aimet_onnx.adaround.adaround_weight``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bitwright import onnx as front
from bitwright.aimet_common.absent import absent_names

__all__ = ["Adaround", "apply_adaround"]

__getattr__ = absent_names(__name__)


def apply_adaround(
    sim: front.QuantizationSimModel,
    inputs: Iterable[Any],
    num_iterations: int = 10000,
    nodes_to_include: list[str] | None = None,
    *,
    node_names_to_optimize: list[str] | None = None,
    **options: Any,
) -> None:
    """:func:`bitwright.onnx.apply_adaround`: round the weights of a simulation in place and freeze them."""
    front.apply_adaround(sim, inputs, num_iterations, nodes_to_include or node_names_to_optimize, **options)


class Adaround:
    """The function as a method, as AIMET has it too."""

    apply_adaround = staticmethod(apply_adaround)
