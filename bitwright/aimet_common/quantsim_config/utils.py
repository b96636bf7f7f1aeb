"""Paths of the default configurations."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"


def get_path_for_per_channel_config() -> str:
    """Path of the default configuration with one scale per channel of convolutions and linear layers."""
    return str(CONFIGS / "default.json")


def get_path_for_per_tensor_config() -> str:
    """Path of the default configuration with one scale per tensor."""
    return str(CONFIGS / "default_per_tensor.json")
