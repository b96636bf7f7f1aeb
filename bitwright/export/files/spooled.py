"""Arrays that wait in a temporary file while others are made: what all of them take is not held in memory at once."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.arrays import Array, cast, to_numpy
from bitwright.export.files.temporary import temporary_room

Floats = NDArray[np.float32]
Shape = tuple[int, ...]
HELD = 4 << 20
"""Bytes that are held in memory before there is a file."""


class Spool:
    """A place for arrays, gone with the last :class:`Spooled` of it."""

    def __init__(self) -> None:
        self._file: Any = tempfile.SpooledTemporaryFile(max_size=HELD)
        self._end = 0

    def put(self, x: Floats) -> int:
        """Add an array; the place where it begins.

        Raises:
            ExportError: the temporary folder is full.
        """
        start = self._end
        with temporary_room():
            self._file.seek(start)
            self._file.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
        self._end = start + x.nbytes
        return start

    def get(self, start: int, shape: Shape) -> Floats:
        """The array of this shape that begins there."""
        found = np.empty(shape, np.float32)
        self._file.seek(start)
        self._file.readinto(found.reshape(-1).view(np.uint8).data)
        return found


class Spooled(Sequence[Floats]):
    """A sequence of float32 arrays in a :class:`Spool`, to which arrays and tensors of any device are appended."""

    def __init__(self, spool: Spool, places: list[tuple[int, Shape]] | None = None) -> None:
        self._spool, self._places = spool, places if places is not None else []

    def append(self, x: Array) -> None:
        """Add an array or tensor, in float32; see :meth:`Spool.put`."""
        array = to_numpy(cast(x, "float32"))
        self._places.append((self._spool.put(array), tuple(array.shape)))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Floats: ...
    @overload
    def __getitem__(self, index: slice) -> Spooled: ...
    def __getitem__(self, index: int | slice) -> Floats | Spooled:
        if isinstance(index, slice):
            return Spooled(self._spool, self._places[index])
        return self._spool.get(*self._places[index])

    def __iter__(self) -> Iterator[Floats]:
        return (self._spool.get(*place) for place in self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(4 * math.prod(shape) for _, shape in self._places)
