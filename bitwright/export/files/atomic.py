"""Atomic writes of single files and sets; temporary folders, and arrays on disk.

Everything is written under a temporary name on the same file system, flushed to the disk, and then renamed:
a reader sees the old file or the new one, never half of either, and a crash leaves at most a hidden temporary
file.

No file system exchanges several files at once, so a set of files has a journal. All of them are written to a hidden
folder; one rename of that folder, to ``.<name>.bitwright-commit``, is the moment at which the set is the new one; then
its files move into place one by one. A process that dies before that moment leaves the old set, and one that dies after
it leaves the new set, some files of which still lie in the journal: whoever reads or writes sets in that folder first
calls :func:`settle`, which moves the rest. Moves can be repeated any number of times, by several processes at once.

:class:`Spool` holds arrays in a temporary file while others are made; :class:`FinishedLayers` keeps the finished layers of
a long method, so that an interrupted run resumes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from bitwright.core.files import open_regular
from bitwright.core.numerics.arrays import Array, cast, to_numpy
from bitwright.errors import ConfigError, ExportError, with_article

#: what the system says of a disk, a quota or a file that takes no more
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def temporary_room(folder: str | None = None) -> Iterator[None]:
    """Raise the error for a full temporary folder where the body, which writes only there, fails by it.

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
    """The error for a full temporary folder; ``size``: bytes to be written."""
    what = "what is to be written" if size is None else f"{size} bytes"
    return ExportError(
        folder or tempfile.gettempdir(),
        f"the temporary folder has no room for {what}: {problem}",
        "free some space, or name a folder on another disk in TMPDIR",
    )


try:
    import fcntl
except ImportError:  # Windows: what a killed process left stays there
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("bitwright")

AnyPath = str | os.PathLike[str]

_PARTIAL, _COMMIT = ".bitwright-partial", ".bitwright-commit"
_STALE = ".stale"  # in a journal: the names of files that the set no longer has, one a line
_FORBIDDEN = '<>:"/\\|?*'  # in names on one system or another
_MOST_BYTES = 128  # of a stem: temporary names are longer, and file systems allow 255
_OLD = 60.0  # seconds; a younger folder without a lock may belong to a process that has not locked it yet

_NO_ROOM = "free some space or choose another disk; earlier files are as they were"

# What file systems say that cannot lock or flush a folder.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)

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
    errno.EFBIG: ("the file would be too large for the file system or the limit of your account",
                  "choose another disk, or raise the limit (ulimit -f); earlier files are as they were"),
    errno.EIO: ("the disk reports an error", "check it, or choose another one; earlier files are as they were"),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "choose a shorter name"),
}  # fmt: skip


def file_error(path: AnyPath, error: OSError) -> ExportError:
    """The error, raised ``from error``, where the operating system refuses to write ``path``."""
    unknown = (error.strerror or str(error), "check the path and its file system")
    problem, remedy = _REASONS.get(error.errno or 0, unknown)
    return ExportError(site=os.fspath(path), problem=problem, remedy=remedy)


def read_error(path: AnyPath, error: OSError) -> ExportError:
    """The error, raised ``from error``, where the operating system refuses to read ``path``."""
    refused = file_error(path, error)
    if error.errno != errno.ENOENT:
        return refused
    remedy = f"check the spelling; a relative path begins at the working directory, {os.getcwd()}"
    return ExportError(refused.site, refused.problem, remedy)


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
        try:
            temporary.touch(exist_ok=False)
            yield temporary
            _sync(temporary)
            os.replace(temporary, target)
            _sync_folder(target.parent)
        finally:
            try:
                temporary.unlink(missing_ok=True)
            finally:  # Ctrl-C before it was done
                temporary.unlink(missing_ok=True)


def write_json(path: AnyPath, content: Any, *, indent: int | None = 1, allow_nan: bool = False) -> None:
    """Write a JSON document atomically.

    Raises:
        ExportError: see :func:`atomic_write`.
        ValueError: it holds a number that is not finite, and ``allow_nan`` is not set.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=indent, allow_nan=allow_nan), encoding="utf-8")


@contextmanager
def atomic_files(folder: AnyPath, *, name: str, create: bool = False, stale: Iterable[str] = ()) -> Iterator[Path]:
    """Write files that belong together: the body fills a hidden folder, whose files then move to ``folder``.

    Nothing in ``folder`` changes before all files are complete and on the disk. Then the set is the new one at once for
    every reader that calls :func:`settle` first; see the top of this module. Files move over those of the same name; other
    files in ``folder`` are left alone.

    Args:
        folder: where the files go.
        name: of the set; two sets of one name replace each other. The file of this name, if there is one, moves last.
        create: make ``folder`` and its parents when they do not exist.
        stale: names of files in ``folder`` that an earlier set had: those that this one does not have are removed.

    Raises:
        ExportError: as for :func:`atomic_write`; or an interrupted set cannot be completed, see :func:`settle`.
    """
    target = Path(os.path.realpath(folder))
    staging = target / f".{name}.{secrets.token_hex(8)}{_PARTIAL}"
    with _explained(folder, staging, target):
        if create:
            target.mkdir(parents=True, exist_ok=True)
        settle(target)
        _remove_abandoned(target, name)
        lock: int | None = None
        try:
            staging.mkdir()
            lock = _lock(staging)
            yield staging
            written = _files(staging)
            gone = sorted(set(stale) - {source.name for source in written})
            (staging / _STALE).write_text("".join(f"{line}\n" for line in gone), encoding="utf-8")
            for source in written:
                _refuse_folder(target / source.name)
            for source in (*written, staging / _STALE):
                _sync(source)
            _commit(staging, target / f".{name}{_COMMIT}", target)
        finally:
            try:
                _remove(staging)
            finally:  # Ctrl-C before it was done
                _remove(staging)
                if lock is not None:
                    os.close(lock)


def settle(folder: AnyPath) -> None:
    """Move the files of sets into place that were complete when their writer was stopped; see :func:`atomic_files`.

    Whoever reads several files that belong together calls this first. It does nothing in a folder without such a set.

    Raises:
        ExportError: the folder must be changed for it and cannot be.
    """
    target = Path(os.path.realpath(folder))
    try:
        found = [entry.name for entry in os.scandir(target) if _is_journal(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise file_error(folder, error) from error
    for name in found:
        logger.info("%s: a set of files that was complete is moved into place", target)
        _finish(target / name, target)


def check_stem(stem: object, argument: str = "filename_prefix") -> str:
    """Check that ``stem`` can begin file names on every operating system.

    Args:
        stem: part of file names.
        argument: what the error calls it.

    Raises:
        ConfigError: it is empty, hidden, too long, or has a separator or another character that names cannot have.

    >>> check_stem("mobilenet-v2 (int8)")
    'mobilenet-v2 (int8)'
    """
    remedy = "give the first part of the files' names, such as 'model'; the folder is an argument of its own"
    if not isinstance(stem, str):
        raise ConfigError(f"{argument}={stem!r}", f"it is {with_article(type(stem).__name__)}, not a string", remedy)
    found = sorted({c for c in stem if c in _FORBIDDEN or not c.isprintable()})
    encoded = stem.encode("utf-8", "surrogatepass")
    if not stem.strip():
        problem = "it is empty"
    elif found:
        problem = f"names of files cannot have {' '.join(map(repr, found[:5]))}"
    elif stem.startswith(".") or stem != stem.strip():
        problem = "it starts with a dot, or starts or ends with a space"
    elif len(encoded) > _MOST_BYTES:
        problem = f"it has {len(encoded)} bytes, more than {_MOST_BYTES}"
    else:
        return stem
    raise ConfigError(f"{argument}={stem[:200]!r}", problem, remedy)


def check_destination(path: AnyPath, stem: str) -> None:
    """Refuse a folder and stem that cannot be written, before any work.

    Raises:
        ConfigError: see :func:`check_stem`.
        ExportError: ``path`` is a file.
    """
    check_stem(stem)
    if os.path.isfile(path):
        raise ExportError(os.fspath(path), "there is a file of this name", "name a folder, or move the file away")


def _is_journal(entry: os.DirEntry[str]) -> bool:
    hidden = entry.name.startswith(".") and entry.name.endswith(_COMMIT)
    return hidden and entry.is_dir(follow_symlinks=False)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.name != _STALE)


def _commit(staging: Path, journal: Path, target: Path) -> None:
    """The rename that makes the set the new one, and the moves after it."""
    _sync_folder(staging)
    try:
        _rename(staging, journal, target)
        _finish(journal, target)
    except KeyboardInterrupt:  # where the set is the new one, leave the folder as its readers expect it
        if journal.is_dir():
            _finish(journal, target)
        raise


def _rename(staging: Path, journal: Path, target: Path) -> None:
    while True:
        try:
            os.rename(staging, journal)
            return
        except OSError as error:
            # another writer of this set has committed in the meantime: its files come first
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not journal.is_dir():
                raise
            _finish(journal, target)


def _remove(staging: Path) -> None:
    if staging.exists():
        shutil.rmtree(staging)


def _finish(journal: Path, target: Path) -> None:
    """Move the files listed in ``journal`` into place. Repeatable, also by several processes at once."""
    last = journal.name[1 : -len(_COMMIT)]
    try:
        _sync_folder(target)
        _remove_stale(journal, target)
        for source in sorted(_files(journal), key=lambda path: path.name == last):
            _unless_gone(os.replace, source, target / source.name)
        _sync_folder(target)
        _unless_gone(os.rmdir, journal)
    except OSError as error:
        reason = file_error(target, error)
        raise ExportError(
            str(target),
            f"complete new files lie in {journal.name} and cannot be moved into place: {reason.problem}",
            f"{reason.remedy}; the next call that reads or writes the folder moves them",
        ) from error


def _remove_stale(journal: Path, target: Path) -> None:
    listed = journal / _STALE
    try:
        names = listed.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for name in names:
        if name == os.path.basename(name) and name not in ("", ".", ".."):
            _unless_gone(os.remove, target / name)
    _unless_gone(os.remove, listed)


def _unless_gone(operation: Callable[..., object], *paths: AnyPath) -> None:
    """Do it, unless another process has done it already; a folder that another set has moved into stays."""
    try:
        operation(*paths)
    except FileNotFoundError:
        pass
    except OSError as error:
        if operation is not os.rmdir or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _lock(folder: Path) -> int | None:
    """A lock on ``folder`` that ends with the process, however it ends: the folder is in use."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno not in _UNSUPPORTED:
            raise
        return None
    return handle


def _remove_abandoned(target: Path, name: str) -> None:
    """Remove folders in which a writer of the set ``name`` was killed before its files were complete."""
    if fcntl is None:
        return
    for entry in list(os.scandir(target)):
        ours = entry.name.startswith(f".{name}.") and entry.name.endswith(_PARTIAL)
        if not ours or time.time() - entry.stat(follow_symlinks=False).st_mtime < _OLD:
            continue
        try:
            lock = _lock(Path(entry.path))
        except (BlockingIOError, FileNotFoundError):
            continue  # its writer lives, or has just ended
        if lock is not None:
            shutil.rmtree(entry.path, ignore_errors=True)  # what cannot be removed is hidden and does no harm
            os.close(lock)


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
            below = names and names[0].startswith(f"{target}{os.sep}") and not names[0].startswith(str(temporary))
            raise file_error(names[0] if below else path, error) from error
        raise


def _refuse_folder(target: Path) -> None:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))


def _sync(path: Path) -> None:
    """Flush the content to disk, since an earlier rename could leave an empty file."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Flush renames in a folder to disk, where the system supports it."""
    if fcntl is None:
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)


Floats = NDArray[np.float32]
Shape = tuple[int, ...]
HELD = 4 << 20
"""Bytes that are held in memory before there is a file."""


class Spool:
    """A temporary file of arrays, removed with its last :class:`Spooled`."""

    def __init__(self) -> None:
        self._file: Any = tempfile.SpooledTemporaryFile(max_size=HELD)
        self._end = 0

    def put(self, x: Floats) -> int:
        """Add an array; returns its offset.

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
        """The array of this shape at an offset."""
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
        self._asked = False

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:32]}.safetensors"

    def get(self, key: str) -> dict[str, NDArray[Any]] | None:
        """The value stored under ``key``; ``None`` where there is none, or it belongs to another key.

        Raises:
            ExportError: the file is there and the operating system refuses it, or it is none: a device has no end.
        """
        path = self._path(key)
        if not self._asked:  # the layers come in one order, so that the first is there if any is
            self._asked = True
            self._say(path.exists())
        if not path.exists():
            return None
        with open_regular(path, ExportError, read_error) as file:
            content = file.read()
        arrays, problem = _checked(content, key)
        if problem is not None:
            logger.warning("%s: %s; its layers are computed anew", path, problem)
        return arrays

    def _say(self, goes_on: bool) -> None:
        """Say whether the work that is there is continued."""
        count = sum(not path.name.startswith(".") for path in self.folder.glob("*.safetensors"))
        if goes_on:
            logger.info("%s: going on with %d finished layers or blocks", self.folder, count)
        elif count:
            logger.warning(
                "%s: none of its %d finished layers or blocks is of this model, these data and these options; starting anew",
                self.folder, count,
            )  # fmt: skip

    def clear(self) -> None:
        """Remove the files, also what a process that was killed left of one, and the folder where nothing else is in it."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def put(self, key: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store ``arrays`` atomically.

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
    """The arrays of a file, or the reason why they do not belong to ``key``."""
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
