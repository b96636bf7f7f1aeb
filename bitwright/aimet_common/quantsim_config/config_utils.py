"""Paths of the shipped configurations of targets."""

from __future__ import annotations

from bitwright.aimet_common.quantsim_config.utils import CONFIGS
from bitwright.core.placement.aimet_config import ALIASES, shipped_config


def get_path_for_target_config(target_config: str) -> str:
    """Path of the configuration of a target such as ``htp_quantsim_config_v73`` or ``htp_v73``.

    Raises:
        ConfigError: there is no such target.
    """
    shipped_config(target_config)  # explains a name that is none
    return str(CONFIGS / f"{ALIASES.get(target_config, target_config)}.json")
