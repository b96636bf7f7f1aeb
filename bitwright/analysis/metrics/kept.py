"""What a long analysis has measured, on disk: it goes on from there after Ctrl-C, a deadline or a crash."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.core.files.documents import read_document
from bitwright.errors import ConfigError
from bitwright.export.files.atomic import atomic_write

_FILE, _VERSION = "bitwright_analysis_measured.json", 1
_EVERY = 5.0  # seconds between two writes
_MOST = 1 << 28  # bytes: a metric's value of every sample, with and without every quantizer
_REMEDY = "remove it, or name another folder"


class Kept:
    """A file of measurements.

    Args:
        folder: where; made if need be. ``None`` keeps nothing.
        name: fingerprint of simulation, data and metric.

    Raises:
        ConfigError: the folder has measurements of something else, or a file that cannot be read.
    """

    def __init__(self, folder: str | Path | None, name: str) -> None:
        self._path = None if folder is None else Path(folder) / _FILE
        self._name = name
        self._written = time.monotonic()

    def load(self) -> dict[str, Any]:
        """What was measured before; empty where there is nothing."""
        if self._path is None or not self._path.exists():
            return {}
        content = read_document(self._path, ConfigError, remedy=_REMEDY, max_bytes=_MOST)
        if not (isinstance(content, dict) and isinstance(content.get("measured"), dict)):
            raise self.damaged("it holds no measurements of an analysis")
        if content.get("version") != _VERSION or content.get("fingerprint") != self._name:
            raise ConfigError(
                str(self._path),
                "it holds measurements of another simulation, other data or another metric",
                "name another folder with resume=..., or remove this file to measure anew",
            )
        return dict(content["measured"])

    def damaged(self, problem: str) -> ConfigError:
        """The error about a file that holds something else."""
        return ConfigError(str(self._path), problem, _REMEDY)

    def due(self, now: bool = False) -> bool:
        """Whether it is time to write again: every few seconds, or ``now``."""
        return self._path is not None and (now or time.monotonic() - self._written >= _EVERY)

    def save(self, measured: Mapping[str, Any]) -> None:
        """Write ``measured``; the file is the old one or the new one whole."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"version": _VERSION, "fingerprint": self._name, "measured": dict(measured)}
        with atomic_write(self._path) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")
        self._written = time.monotonic()
