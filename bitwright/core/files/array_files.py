"""Arrays from ``.npy`` and ``.npz`` untrusted files.

No memory is taken before the header of an array and the size of its data agree, nothing is unpickled, and an archive
may not unpack to more than :data:`MAX_BEYOND` bytes beyond its own size.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import BitwrightError

Array = NDArray[Any]
AnyPath = str | os.PathLike[str]

MAX_BEYOND = 1 << 29
_PIECE = 1 << 20  # bytes read at once: a stream that unpacks holds as many again
_MAX_ARRAYS = 1 << 20
# what a damaged header, archive or stream raises in numpy, zipfile and zlib
_FAULTS = (
    ValueError, EOFError, OverflowError, MemoryError, TypeError, SyntaxError, KeyError, NotImplementedError,
    RuntimeError, struct.error, tokenize.TokenError, zlib.error, zipfile.BadZipFile, OSError,
)  # fmt: skip


def read_array(path: AnyPath, error: type[BitwrightError], remedy: str = "write it with np.save") -> Array:
    """The array of a ``.npy`` file.

    Raises:
        error: it is missing, damaged, or holds Python objects; names the file.
    """
    with _explained(path, error, "an array", remedy):
        _check_regular(path)
        with open(path, "rb") as file:
            return _array(file, os.fstat(file.fileno()).st_size)


def read_archive(
    path: AnyPath, error: type[BitwrightError], remedy: str = "write it with np.savez"
) -> dict[str, Array]:
    """The arrays of a ``.npz`` file by name, in its order.

    Raises:
        error: it is missing, damaged, unpacks to too much, or holds something else than arrays; names the file.
    """
    found: dict[str, Array] = {}
    with _explained(path, error, "an archive of arrays", remedy):
        _check_regular(path)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_sizes(members, os.stat(path).st_size)
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in found:
                    raise ValueError(f"two arrays have the name {name!r:.100}")
                with _explained(f"{os.fspath(path)}: {name!r:.100}", error, "an array", remedy):
                    found[name] = _member(archive, member)
    return found


def _check_regular(path: AnyPath) -> None:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a regular file")


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with archive.open(member) as file:
        return _array(file, member.file_size)


def _check_sizes(members: list[zipfile.ZipInfo], size: int) -> None:
    unpacked, most = sum(member.file_size for member in members), size + MAX_BEYOND
    if unpacked > most:
        raise ValueError(
            f"it unpacks to {unpacked} bytes, more than {most}; write it with np.savez, which does not compress, or in parts"
        )
    if len(members) > _MAX_ARRAYS:
        raise ValueError(f"it holds {len(members)} arrays, more than {_MAX_ARRAYS}")


def _array(file: IO[bytes], size: int) -> Array:
    """What a stream of ``size`` bytes holds; its end is reached, so that a checksum is compared."""
    readers: dict[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"version {version} of the format is not known")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which would have to be unpickled")
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != size - file.tell():
        raise ValueError(f"its header says {dtype} of shape {shape}, and {size - file.tell()} bytes follow")
    array = np.empty(shape, dtype, "F" if fortran else "C")
    left = array.reshape(-1, order="A").view(np.uint8).data if array.nbytes else memoryview(b"")
    while left:
        count = file.readinto(left[:_PIECE])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"{len(left)} bytes are missing")
        left = left[count:]
    if file.read(1):
        raise ValueError("bytes follow that belong to no array")
    return array


@contextmanager
def _explained(path: AnyPath, error: type[BitwrightError], what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except BitwrightError:  # of the array inside
        raise
    except _FAULTS as reason:
        problem = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise error(os.fspath(path), f"it cannot be read as {what}: {problem}", remedy) from reason
