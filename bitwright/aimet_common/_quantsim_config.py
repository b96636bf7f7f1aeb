"""``aimet_common.quantsim_config``: paths of the shipped configurations."""

from __future__ import annotations

from pathlib import Path

from bitwright.core.placement.aimet_config import ALIASES, shipped_config

__all__ = ["get_path_for_per_channel_config", "get_path_for_per_tensor_config", "get_path_for_target_config"]

_CONFIGS = Path(__file__).parents[1] / "configs"


def get_path_for_per_channel_config() -> str:
    """Path of the default configuration with one scale per channel of convolutions and linear layers."""
    return str(_CONFIGS / "default.json")


def get_path_for_per_tensor_config() -> str:
    """Path of the default configuration with one scale per tensor."""
    return str(_CONFIGS / "default_per_tensor.json")


def get_path_for_target_config(target_config: str) -> str:
    """Path of the configuration of a target such as ``htp_quantsim_config_v73`` or ``htp_v73``.

    Raises:
        ConfigError: there is no such target.
    """
    shipped_config(target_config)  # explains a name that is none
    return str(_CONFIGS / f"{ALIASES.get(target_config, target_config)}.json")
