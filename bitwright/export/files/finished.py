"""Finished layers of a long method, kept on disk so that none is computed twice."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.core.files.documents import open_regular
from bitwright.errors import ExportError
from bitwright.export.files.atomic import atomic_write, read_error

logger = logging.getLogger("bitwright")

_ENTRY = "key and sha256"  # of the metadata in the header


class FinishedLayers:
    """A folder with one safetensors file per finished layer or block, named after everything that it depends on.

    A file holds its whole key and a hash of its arrays. One that is damaged, or was written for something else, counts as
    missing: a warning names it, and what is computed anew replaces it.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:32]}.safetensors"

    def get(self, key: str) -> dict[str, NDArray[Any]] | None:
        """What was kept under ``key``, as it was given to :meth:`put`; ``None`` when nothing was, or not this.

        Raises:
            ExportError: the file is there and the operating system refuses it, or it is none: a device has no end.
        """
        path = self._path(key)
        if not path.exists():
            return None
        with open_regular(path, ExportError, read_error) as file:
            content = file.read()
        arrays, problem = _checked(content, key)
        if problem is not None:
            logger.warning("%s: %s; its layers are computed anew", path, problem)
        return arrays

    def put(self, key: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep ``arrays``; the file appears whole or not at all.

        Raises:
            ExportError: the folder cannot be made or written, for example because the disk is full.
        """
        from safetensors.numpy import save

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExportError(
                str(self.folder), f"it cannot be made: {error.strerror}", "choose another cache_dir"
            ) from error
        # of an array in another order of axes, safetensors writes the memory as it lies, which is another array
        ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        # one entry, as safetensors writes several in an order of its own in every process
        content = save(ordered, {_ENTRY: f"{key} {_digest(ordered)}"})
        with atomic_write(self._path(key)) as temporary:
            temporary.write_bytes(content)


def _checked(content: bytes, key: str) -> tuple[dict[str, NDArray[Any]] | None, str | None]:
    """The arrays of a file, or why they are not those that were kept under ``key``."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = dict(load(content))
        # safetensors gives metadata only of files that it opens by name
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        found, _, digest = header["__metadata__"][_ENTRY].partition(" ")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, f"it is damaged, or an earlier version wrote it ({type(error).__name__}: {error})"
    if found != key:
        return None, "it was written for another model, other data or other options"
    if digest != _digest(arrays):
        return None, "it is damaged: its arrays are not those that were written"
    return arrays, None


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}\0{array.dtype.str}{array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
