"""Files that appear whole or not at all.

Everything is written under a temporary name on the same file system, flushed to the disk, and then renamed:
a reader sees the old file or the new one, never half of either, and a crash leaves at most a hidden temporary
file.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitwright.errors import ExportError

AnyPath = str | os.PathLike[str]

_NO_ROOM = "free some space or choose another disk; earlier files are as they were"

# What the operating system says -> what was found there, and how to go on.
_REASONS: dict[int, tuple[str, str]] = {
    errno.ENOENT: ("there is no such file or folder", "create the folder first, or check the spelling"),
    errno.ENOTDIR: ("a part of this path is a file, not a folder", "name a path whose parents are folders"),
    errno.EISDIR: ("there is a folder of this name", "name a file, or move the folder away"),
    errno.EACCES: ("permission was denied", "choose a path you have access to, or change its permissions"),
    errno.EPERM: ("permission was denied", "choose a path you have access to, or change its permissions"),
    errno.EROFS: ("the file system is read-only", "choose a folder on a writable file system"),
    errno.ENOSPC: ("the disk is full", _NO_ROOM),
    errno.EDQUOT: ("your disk quota is used up", _NO_ROOM),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "choose a shorter name"),
}  # fmt: skip


def file_error(path: AnyPath, error: OSError) -> ExportError:
    """The error to raise (``from error``) when the operating system refuses ``path``."""
    unknown = (error.strerror or str(error), "check the path and its file system")
    problem, remedy = _REASONS.get(error.errno or 0, unknown)
    return ExportError(site=os.fspath(path), problem=problem, remedy=remedy)


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[Path]:
    """Write one file: the body writes to the path it is given, which becomes ``path`` when it ends well.

    The temporary file lies beside ``path`` and keeps its suffix. A symbolic link is followed: the file it
    points to is replaced, the link stays. When the body raises, the temporary file is removed and ``path``
    stays as it was.

    Raises:
        ExportError: the folder is missing, read-only or full, or ``path`` is a folder; names the path and the
            remedy. An ``OSError`` of the body that is about another file passes unchanged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with atomic_write(Path(folder, "a.json")) as temporary:
        ...         _ = temporary.write_text("{}")
        ...     [p.name for p in Path(folder).iterdir()]
        ['a.json']
    """
    target = Path(os.path.realpath(path))
    # Part of the name helps to tell leftovers of a crash apart; all of it could exceed the limit on names.
    temporary = target.with_name(f".{target.stem[:64]}.{secrets.token_hex(8)}{target.suffix[:32]}")
    with _explained(path, temporary, target):
        _refuse_folder(target)
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_files(folder: AnyPath, *, create: bool = False, last: str | None = None) -> Iterator[Path]:
    """Write files that belong together: the body fills a hidden folder, whose files then move to ``folder``.

    Nothing in ``folder`` changes before all files are complete and on the disk; then each one is renamed into
    place, subfolders included, over files of the same name. Other files in ``folder`` are left alone. Each
    file is whole at any time; between the renames the set may be mixed, so that a reader who needs all of it
    waits for the file named ``last`` (a manifest, say), which moves after the others.

    Args:
        folder: where the files go.
        create: make ``folder`` and its parents when they do not exist.
        last: name of the file that moves last.

    Raises:
        ExportError: as for :func:`atomic_write`.
    """
    target = Path(os.path.realpath(folder))
    staging = target / f".{secrets.token_hex(8)}.partial"
    with _explained(folder, staging, target):
        if create:
            target.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        try:
            yield staging
            found = [Path(parent, name) for parent, _, names in os.walk(staging) for name in names]
            moves = [(source, target / source.relative_to(staging)) for source in sorted(found)]
            for source, destination in moves:
                _refuse_folder(destination)
                _sync(source)
            for source, destination in sorted(moves, key=lambda move: move[1].name == last):
                destination.parent.mkdir(parents=True, exist_ok=True)
                os.replace(source, destination)
        finally:
            shutil.rmtree(staging)


@contextmanager
def _explained(path: AnyPath, temporary: Path, target: Path) -> Iterator[None]:
    """Turn an ``OSError`` about these paths or what lies below into an `ExportError`; let others pass."""
    try:
        yield
    except OSError as error:
        names = [os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, (str, bytes))]
        about_us = any(name.startswith((str(temporary), str(target))) for name in names)
        # A failing write (disk full) names no file at all.
        if about_us or (not names and error.errno in _REASONS):
            below = (
                names and names[0].startswith(f"{target}{os.sep}") and not names[0].startswith(str(temporary))
            )
            raise file_error(names[0] if below else path, error) from error
        raise


def _refuse_folder(target: Path) -> None:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))


def _sync(path: Path) -> None:
    """Wait until the content is on the disk: a rename that overtakes it may leave an empty file."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
