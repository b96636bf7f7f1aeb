"""``aimet_onnx.lite_mp``: more bits for the layers that are most sensitive."""

from __future__ import annotations

from typing import Any

from bitwright.errors import ConfigError
from bitwright.mixed.manual import Request, set_precisions

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
        percent_to_flip: share of the layers, 0 to 100.
        override_precision: a format.

    Returns:
        The layers, the most sensitive first.
    """
    if not 0 <= percent_to_flip <= 100:
        raise ConfigError("percent_to_flip", f"{percent_to_flip!r} is no share", "use 0 to 100")
    count = round(len(layer_sensitivity_dict) * percent_to_flip / 100)
    worst = sorted(layer_sensitivity_dict, key=lambda name: layer_sensitivity_dict[name])[:count]
    if worst:
        name = str(getattr(override_precision, "name", override_precision))
        set_precisions(sim, [Request(tuple(worst), name, name)], strict=False)
    return worst
