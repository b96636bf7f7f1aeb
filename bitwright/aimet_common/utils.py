"""``aimet_common.utils``: logging areas, the handle that undoes; ``quantsim_config``: paths of shipped configurations."""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import Path
from typing import Any

from bitwright.aimet_common.defs import CallbackFunc as CallbackFunc  # its older path
from bitwright.core.placement.aimet_config import ALIASES, shipped_config
from bitwright.core.simulation.float_model import Handle as Handle

# ------------------------------------------------------------------------------------ helpers


class AimetLogger:
    """Loggers by area; all of them lie below the logger ``bitwright``."""

    class LogAreas(Enum):
        """AIMET's areas."""

        Quant = "Quant"
        Svd = "Svd"
        Test = "Test"
        Utils = "Utils"
        CompRatioSelect = "CompRatioSelect"
        ChannelPruning = "ChannelPruning"
        Winnow = "Winnow"
        ConnectedGraph = "ConnectedGraph"
        CrosslayerEqualization = "CrossLayerEqualization"
        MixedPrecision = "MixedPrecision"
        AutoQuant = "AutoQuant"
        Nas = "Nas"
        NasPipeline = "NasPipeline"
        DeviceFramework = "DeviceFramework"
        BatchNormFolding = "BatchNormFolding"
        ModelPreparer = "ModelPreparer"
        LayerOutputs = "LayerOutputs"
        QuantAnalyzer = "QuantAnalyzer"
        SeqMse = "SeqMse"

    @staticmethod
    def get_area_logger(area: Any) -> logging.Logger:
        """The logger of an area."""
        return logging.getLogger(f"bitwright.{area.value}")

    @staticmethod
    def set_area_logger_level(area: Any, level: int) -> None:
        """Set the level of one area's logger."""
        AimetLogger.get_area_logger(area).setLevel(level)

    @staticmethod
    def set_level_for_all_areas(level: int) -> None:
        """Set the level of all loggers of Bitwright."""
        logging.getLogger("bitwright").setLevel(level)


# ------------------------------------------------------------------------------------ configurations


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
    shipped_config(target_config)  # raises for an unknown name
    return str(_CONFIGS / f"{ALIASES.get(target_config, target_config)}.json")
