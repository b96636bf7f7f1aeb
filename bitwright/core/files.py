"""Untrusted files: JSON, YAML and TOML documents, arrays in ``.npy`` and ``.npz``, and functions named ``module:function``.

Every reader of such a file goes through here, so that a damaged or hostile one ends in one short error that names it.
The limits are far above what a person or this toolkit writes:

==============  ================================================================================================
size            :data:`MAX_BYTES`, or what the caller allows; checked before the file is read
depth           :data:`MAX_DEPTH` lists and mappings inside each other
YAML aliases    what they stand for, written out, is no longer than :data:`MAX_BYTES`
YAML tags       refused: a document holds plain values
keys            unique in their mapping; of two equal ones, the first would be lost silently
whole numbers   64 bits
text            encodable: no lone surrogates (``"\\ud800"``)
==============  ================================================================================================

No memory is allocated for an array before its header and the size of its data agree, nothing is unpickled, and an archive
may not unpack to more than :data:`MAX_BEYOND` bytes beyond its own size.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import stat
import struct
import tokenize
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import BitwrightError, ConfigError, with_article

MAX_BYTES = 4 << 20
MAX_DEPTH = 64
_MAX_TOML_LINE = 8 << 10  # the parser's time grows with the square of the parts of a dotted key
_LARGEST = 1 << 64
_LARGER = "check that it is the file you mean; files of this kind are smaller"
_TOO_DEEP = f"it is nested too deeply, beyond {MAX_DEPTH} lists and mappings inside each other"
_QUOTE = ", and quote names that start with *"

AnyPath = str | os.PathLike[str]
ErrorType = type[BitwrightError]
Unreadable = Callable[[AnyPath, OSError], BitwrightError]


def read_bytes(
    path: AnyPath, max_bytes: int, error: ErrorType, *, larger: str = _LARGER, unreadable: Unreadable | None = None
) -> bytes:
    """The content of a regular file of at most ``max_bytes`` bytes.

    Args:
        path: of the file.
        max_bytes: refuse a larger file.
        error: what to raise.
        larger: remedy for a file that is too large.
        unreadable: makes the error about a file that the operating system refuses; by default one of class ``error``.

    Raises:
        error: it is missing, no regular file, too large or cannot be read; names the file.
    """
    with open_regular(path, error, unreadable) as file:
        content = file.read(max_bytes + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > max_bytes:
        raise too_large(path, max(size, len(content)), max_bytes, error, larger)
    return content


@contextmanager
def open_regular(path: AnyPath, error: ErrorType, unreadable: Unreadable | None = None) -> Iterator[BufferedReader]:
    """Open a regular file for reading; arguments and errors as of :func:`read_bytes`."""
    site = os.fspath(path)
    try:
        with _named(path, error) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise error(site, "it is not a regular file", "name a file")
            yield file
    except OSError as reason:
        if unreadable is not None:
            raise unreadable(path, reason) from reason
        problem = f"the file cannot be read: {reason.strerror or reason}"
        raise error(site, problem, "check the path") from reason


def _named(path: AnyPath, error: ErrorType) -> BufferedReader:
    try:
        return open(path, "rb", opener=_without_waiting)
    except ValueError as reason:
        raise error(os.fspath(path), f"no file has such a name: {reason}", "check the path") from reason


def too_large(path: AnyPath, size: int, max_bytes: int, error: ErrorType, larger: str = _LARGER) -> BitwrightError:
    """The error for a file with too many bytes."""
    return error(os.fspath(path), f"it has {size} bytes, more than {max_bytes}", larger)


def _without_waiting(name: str, flags: int) -> int:
    """Open without blocking on a pipe that has no writer."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def read_document(
    path: AnyPath,
    error: ErrorType,
    *,
    remedy: str | None = None,
    max_bytes: int = MAX_BYTES,
    larger: str = _LARGER,
    kind: str | None = None,
    unreadable: Unreadable | None = None,
) -> Any:
    """Read a ``.json``, ``.yaml``, ``.yml`` or ``.toml`` file: plain values within the limits of this module.

    Args:
        path: of the file.
        error: what to raise.
        remedy: for files that programs write; by default a person did, and is told which line to correct.
        max_bytes, larger, unreadable: see :func:`read_bytes`.
        kind: reads the file as one of this suffix, whatever it is called.

    Raises:
        error: the file cannot be read or parsed, or goes beyond a limit; names the file and the limit.
    """
    site = os.fspath(path)
    kind = Path(path).suffix.lower() if kind is None else kind
    if kind not in _PARSERS:
        raise error(site, f"{kind!r} is not a known kind of file", f"use {', '.join(_PARSERS)}")
    language = {".yml": "YAML"}.get(kind, kind[1:].upper())
    content = read_bytes(path, max_bytes, error, larger=larger, unreadable=unreadable)
    advice = remedy or "correct the file"
    try:
        document = _PARSERS[kind](content.decode("utf-8-sig"))
        _check_values(document)
    except _LineError as reason:
        if remedy is None:
            line = f"write this line as {language}{reason.hint}"
            raise error(f"{site}, line {reason.line}", reason.problem, line) from reason
        raise error(site, f"it is not {language} ({reason.__cause__ or reason.problem})", remedy) from reason
    except _Limit as reason:
        raise error(site, str(reason), advice) from reason
    except RecursionError as reason:
        raise error(site, _TOO_DEEP, advice) from reason
    except (ValueError, OverflowError) as reason:  # not UTF-8, or a date or number that cannot be
        raise error(site, f"it is not {language} ({reason})", advice) from reason
    return document


class _Limit(ValueError):
    """A limit of this module was exceeded."""


class _LineError(Exception):
    """A syntax error at a line of a document."""

    def __init__(self, line: int, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.line, self.problem, self.hint = line, problem, hint


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise _LineError(error.lineno, error.msg) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Limit(_twice(key for key, _ in pairs))
    return found


def _twice(keys: Iterable[Any]) -> str:
    seen: set[Any] = set()
    twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return f"the key {twice!r:.100} occurs twice in one object; remove one of them"


def _parse_yaml(text: str) -> Any:
    import yaml  # only who writes YAML pays for it

    make: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, make))
        loader = make(text)
        try:
            node = loader.get_single_node()
            _check_keys(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        if "nesting depth" in problem:  # the limit of the library's own, from PyYAML 6.0.4 on
            raise _Limit(_TOO_DEEP) from error
        raise _LineError(mark.line + 1 if mark else 1, problem, _QUOTE) from error


def _check_events(events: Iterable[Any]) -> None:
    """Refuse tags, excessive depth, and aliases that expand to too much, before anything is built from ``events``."""
    import yaml

    sizes: dict[str | None, int] = {}  # anchor -> characters of what it stands for, aliases written out
    opened: list[tuple[str | None, int]] = []  # anchor and start, in ``total``, of what is open
    total = 0
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, start = opened.pop()
            sizes[anchor] = total - start
        elif isinstance(event, yaml.NodeEvent):
            line = _check_tag(event)
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, total))
            total += _size_of(event, sizes, line)
            if isinstance(event, yaml.ScalarEvent):
                sizes[event.anchor] = len(event.value) + 1
        if len(opened) > MAX_DEPTH:
            raise _Limit(_TOO_DEEP)
        if total > MAX_BYTES:
            raise _Limit(f"with its aliases written out it is longer than {MAX_BYTES} characters")


def _check_tag(event: Any) -> int:
    """Refuse a tag, and return the line of the event."""
    line: int = event.start_mark.line + 1
    tag = getattr(event, "tag", None)
    if tag is not None:
        raise _LineError(line, f"it has the tag {tag!r:.100}; a document holds plain values", "YAML")
    return line


def _size_of(event: Any, sizes: Mapping[str | None, int], line: int) -> int:
    import yaml

    if isinstance(event, yaml.AliasEvent):
        assert event.anchor is not None
        if event.anchor not in sizes:
            problem = f"the alias *{event.anchor:.100} stands for nothing in front of it, or for what it is part of"
            raise _LineError(line, problem, _QUOTE)
        return sizes[event.anchor]
    return 1 + len(getattr(event, "value", ""))


def _check_keys(node: Any) -> None:
    """Refuse a mapping with two equal keys; every node is looked at once."""
    import yaml

    waiting, seen = [] if node is None else [node], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        else:
            waiting += [part for pair in node.value for part in pair]
            _check_mapping(node)


def _check_mapping(node: Any) -> None:
    import yaml

    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    if len(set(keys)) < len(keys):
        raise _LineError(node.start_mark.line + 1, _twice(keys))


def _parse_toml(text: str) -> Any:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _MAX_TOML_LINE:
            raise _LineError(
                number, f"it has {len(line)} characters, and at most {_MAX_TOML_LINE} are read", " in several lines"
            )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem, _, place = str(error).partition(" (at ")
        digits = place.removeprefix("line ").partition(",")[0]
        line_number = int(digits) if digits.isdigit() else text.count("\n") + 1
        raise _LineError(line_number, problem) from error


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": _parse_json,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": _parse_toml,
}


def _check_values(document: Any) -> None:
    """Refuse depth, large numbers and lone surrogates; what YAML aliases share is looked at once per depth."""
    level: list[Any] = [[document]]
    for _ in range(MAX_DEPTH + 1):
        below: dict[int, Any] = {}
        for parts in level:
            below.update((id(value), value) for value in _collections_in(parts))
        level = list(below.values())
        if not level:
            return
    raise _Limit(_TOO_DEEP)


def _collections_in(parts: Any) -> list[Any]:
    """The lists and mappings in a list or mapping; checks all other values."""
    values = parts if isinstance(parts, list) else [*parts, *parts.values()]
    if set(map(type, values)) <= _HARMLESS:  # long lists of scales
        return []
    for value in values:
        if not isinstance(value, (dict, list)):
            _check_leaf(value)
    return [value for value in values if isinstance(value, (dict, list))]


_HARMLESS = frozenset((float, bool, type(None)))


def _check_leaf(value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii():
            value.encode()  # a lone surrogate raises UnicodeEncodeError, which is a ValueError
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise _Limit("a whole number does not fit into 64 bits")


Array = NDArray[Any]

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
    """Read an array from a stream of ``size`` bytes to its end, so that its checksum is compared."""
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


def load_entry_point(text: str, what: str = "yields feeds") -> Callable[..., Any]:
    """Import the function that ``text`` names, ``module:function``.

    Args:
        text: ``package.module:function``; the module is imported.
        what: what the function does, for the error.

    Raises:
        ConfigError: there is no such module or function, or it is not a function.

    >>> load_entry_point("json:dumps").__name__
    'dumps'
    """
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            text, f"it cannot be imported: {error}", "write module:function, with the module's folder in PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(
            text, f"{name} is {with_article(type(found).__name__)}, not a function", f"name a function that {what}"
        )
    function: Callable[..., Any] = found
    return function
