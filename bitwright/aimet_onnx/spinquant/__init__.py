"""``aimet_onnx.spinquant``."""

from __future__ import annotations

from typing import Any

from bitwright import onnx as front
from bitwright.aimet_common.absent import absent_names
from bitwright.aimet_onnx._models import proto_of
from bitwright.errors import ConfigError

__all__ = ["apply_spinquant"]

__getattr__ = absent_names(__name__)


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
