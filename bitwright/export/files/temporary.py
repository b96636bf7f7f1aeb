"""Temporary folders: a full one is named."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from bitwright.errors import ExportError

#: what the system says of a disk, a quota or a file that takes no more
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def temporary_room(folder: str | None = None) -> Iterator[None]:
    """Tell a full temporary folder from any other failure of the body, which writes there only.

    Args:
        folder: where it writes; the system's temporary folder with ``None``.

    Raises:
        ExportError: the folder is full; names it. Any other ``OSError`` of the body passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise no_room(folder, error.strerror or str(error)) from error


def no_room(folder: str | None, problem: str, size: int | None = None) -> ExportError:
    """The error to raise where a temporary folder is full; ``size`` is of what was to be written, in bytes."""
    what = "what is to be written" if size is None else f"{size} bytes"
    return ExportError(
        folder or tempfile.gettempdir(),
        f"the temporary folder has no room for {what}: {problem}",
        "free some space, or name a folder on another disk in TMPDIR",
    )
