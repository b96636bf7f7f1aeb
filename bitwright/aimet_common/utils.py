"""``aimet_common.utils``: logging areas, the handle that undoes; ``quantsim_config``: paths of shipped configurations."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.aimet_common.defs import CallbackFunc as CallbackFunc  # its older path
from bitwright.aimet_common.names import absent_names
from bitwright.core.placement.aimet_config import ALIASES, shipped_config
from bitwright.core.simulation.float_model import Handle as Handle
from bitwright.errors import ConfigError

__getattr__ = absent_names(__name__)

# ------------------------------------------------------------------------------------ helpers


def _areas() -> Any:
    """AIMET's areas of logging."""
    names = (
        "Quant Svd Test Utils CompRatioSelect ChannelPruning Winnow ConnectedGraph CrosslayerEqualization MixedPrecision "
        "AutoQuant Nas NasPipeline DeviceFramework BatchNormFolding ModelPreparer LayerOutputs QuantAnalyzer SeqMse"
    )
    return Enum("LogAreas", {name: name.replace("Crosslayer", "CrossLayer") for name in names.split()})


class AimetLogger:
    """Loggers by area; all of them lie below the logger ``bitwright``."""

    LogAreas: Any = _areas()

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


#: version of encodings files that scripts set here, as in AIMET
encoding_version: str = os.environ.get("AIMET_ENCODING_VERSION", "1.0.0")
_SET_HERE = tuple(
    f"bitwright.{package}.quantsim" for package in ("aimet_common", "aimet_torch.common", "aimet_onnx.common")
)


def file_version(asked: str | None) -> str:
    """The version of an encodings file: the one asked for, or set as ``aimet_common.quantsim.encoding_version``, or 1.0.0."""
    found = (vars(sys.modules[name]).get("encoding_version") for name in _SET_HERE if name in sys.modules)
    return asked or next((version for version in found if version is not None), encoding_version)


class StopForwardException(Exception):
    """Raised by a script's hook to end a forward early."""


class CachedDataset:
    """Batches of a loader, kept in files of a folder and read one by one.

    Args:
        data_loader: batches: arrays, tensors, or tuples, lists and dicts of them; ``None`` to read what the folder has.
        num_batches: how many of them; ``None`` for all.
        path: the folder, created if missing.

    Raises:
        ConfigError: (a ValueError) there are fewer batches.
    """

    def __init__(self, data_loader: Iterable[Any] | None, num_batches: int | None, path: str) -> None:
        self._folder = Path(path)
        self._folder.mkdir(parents=True, exist_ok=True)
        for index, batch in enumerate(islice(data_loader or (), num_batches)):
            self._write(self._file(index), batch)
        self._count = len(list(self._folder.glob("model_inputs_*")))
        if num_batches is not None and self._count < num_batches:
            raise ConfigError(
                str(path),
                f"{self._count} batches are there, {num_batches} are asked for",
                "ask for fewer, or give more data",
            )

    def _file(self, index: int) -> Path:
        return self._folder / f"model_inputs_{index}"

    def _write(self, path: Path, batch: Any) -> None:
        kind = type(batch).__name__ if isinstance(batch, (tuple, list, dict)) else "array"
        items = batch.items() if isinstance(batch, dict) else enumerate([batch] if kind == "array" else batch)
        with path.open("wb") as file:
            np.savez(file, **{f"{kind}:{key}": self._array(value) for key, value in items})

    def _read(self, path: Path) -> Any:
        with np.load(path) as file:
            found = {name.partition(":")[2]: self._value(file[name]) for name in file.files}
            kind = next(iter(file.files), "tuple:").partition(":")[0]
        if kind == "dict":
            return found
        return next(iter(found.values())) if kind == "array" else {"tuple": tuple}.get(kind, list)(found.values())

    def _array(self, value: Any) -> Any:
        return np.asarray(value)

    def _value(self, array: Any) -> Any:
        return array

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._read(self._file(index))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._count))


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
