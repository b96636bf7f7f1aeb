"""Finished layers of a long method, kept on disk so that none is computed twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bitwright.errors import ExportError
from bitwright.export.atomic import atomic_write


class FinishedLayers:
    """A folder with one safetensors file per finished layer or block, named after everything that it depends on.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:32]}.safetensors"

    def get(self, key: str) -> dict[str, NDArray[Any]] | None:
        """What was kept under ``key``; ``None`` when nothing was.

        Raises:
            ExportError: the file cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ExportError(
                str(path), f"it cannot be read: {error}", "delete it; its layer is then computed anew"
            ) from error

    def put(self, key: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep ``arrays``; the file appears whole or not at all.

        Raises:
            ExportError: the folder cannot be made or written, for example because the disk is full.
        """
        from safetensors.numpy import save_file

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExportError(
                str(self.folder), f"it cannot be made: {error.strerror}", "choose another cache_dir"
            ) from error
        with atomic_write(self._path(key)) as temporary:
            save_file(dict(arrays), temporary)
