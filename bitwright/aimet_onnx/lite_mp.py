"""``aimet_onnx.lite_mp``: more bits for the layers that are most sensitive."""

from __future__ import annotations

import math
from typing import Any

from bitwright.aimet_common.defs import qtype
from bitwright.errors import ConfigError
from bitwright.precision.manual import PrecisionRequest, set_precisions

__all__ = ["flip_layers_to_higher_precision"]


def flip_layers_to_higher_precision(
    sim: Any,
    layer_sensitivity_dict: dict[str, float],
    percent_to_flip: float = 10.0,
    override_precision: Any = "float16",
) -> list[str]:
    """Give the most sensitive layers a higher precision; what they read and their weights.

    Args:
        sim: the simulation; changed in place.
        layer_sensitivity_dict: layer -> SQNR or PSNR with it alone quantized; the lower, the more sensitive.
        percent_to_flip: share of the layers, 0 to 100; a part of a layer is one.
        override_precision: a number format, or one for weights and one for activations.

    Raises:
        ConfigError: (a ValueError) a share or precisions that have no meaning.

    Returns:
        The layers, the most sensitive first.
    """
    if not 0 <= percent_to_flip <= 100:
        raise ConfigError("percent_to_flip", f"{percent_to_flip!r} is not a share", "use 0 to 100")
    several = override_precision if isinstance(override_precision, tuple | list) else [override_precision] * 2
    if len(several) != 2:
        raise ConfigError(
            "override_precision", f"{override_precision!r} is not a pair", "give (param_type, activation_type)"
        )
    weight, activation = (str(qtype.as_qtype(one)) for one in several)
    count = math.ceil(len(layer_sensitivity_dict) * percent_to_flip / 100)
    worst = sorted(layer_sensitivity_dict, key=lambda name: layer_sensitivity_dict[name])[:count]
    if worst:
        set_precisions(sim, [PrecisionRequest(tuple(worst), activation, weight)], strict=False)
    return worst
