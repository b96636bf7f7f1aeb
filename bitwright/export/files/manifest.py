"""The manifest beside exported files, and the provenance in the metadata of an ONNX file: versions, inputs, hashes.

It answers, months later: which versions, which rules and seeds, which calibration data, and whether these
files are still the ones that were written. A manifest holds no time unless one is given, so that equal
exports are equal files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnx

from bitwright import __version__
from bitwright.core.files import read_document
from bitwright.core.numerics.arrays import to_numpy
from bitwright.errors import ConfigError, ExportError, with_article
from bitwright.export.files.atomic import AnyPath, atomic_write, file_error, read_error, settle

if TYPE_CHECKING:
    import onnx_ir as ir

    from bitwright.core.numerics.spec import Preset
    from bitwright.core.simulation.calibration import CalibrationLog

VERSION = 1
_KINDS: dict[str, type] = {"files": list, "settings": dict, "seeds": dict, "notes": list, "versions": dict}
_PACKAGES = ("numpy", "torch", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "ml_dtypes", "safetensors")
_CHUNK = 1 << 20
_MAX_BYTES = 64 << 20  # of a manifest: notes about thousands of sites are in it
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class FileEntry:
    """One file: its path relative to the manifest, with forward slashes, its sha256 and its size in bytes."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Contents of a manifest file.

    Attributes:
        files: everything that was exported, sorted by name.
        settings: the caller's own words: rules, preset, options; plain JSON.
        seeds: name of a random generator -> its seed.
        data: fingerprint of the calibration or example data, see :func:`fingerprint`.
        notes: what a reader of the files should know.
        versions: bitwright, Python and the packages that took part.
        created: when, as the caller put it, or ``None``.
        version: of this format.
    """

    files: tuple[FileEntry, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    data: str | None = None
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str | None = None
    version: int = VERSION

    def problems(self, folder: AnyPath, names: Container[str] | None = None) -> list[str]:
        """The files in ``folder``, only of ``names`` if given, that are missing or have changed since they were written."""
        found = []
        for entry in self.files:
            if names is not None and entry.name not in names:
                continue
            path = Path(folder, entry.name)
            if not path.is_file():
                found.append(f"{entry.name} is missing")
            elif path.stat().st_size != entry.size:
                found.append(f"{entry.name} has {path.stat().st_size} bytes instead of {entry.size}")
            elif hash_file(path) != entry.sha256:
                found.append(f"{entry.name} has another content than was written")
        return found


def write_manifest(
    path: AnyPath,
    *,
    folder: AnyPath | None = None,
    files: Iterable[AnyPath] | None = None,
    settings: Mapping[str, Any] | None = None,
    seeds: Mapping[str, int] | None = None,
    data: str | None = None,
    notes: Sequence[str] = (),
    created: str | None = None,
) -> Manifest:
    """Write the manifest of the files in a folder, atomically.

    Args:
        path: of the manifest, usually inside ``folder``.
        folder: where the files lie; the manifest's own by default.
        files: paths relative to ``folder``; by default everything in it, except the manifest and hidden
            files.
        settings: plain JSON values: rules, preset, options.
        seeds: seeds of the random generators that took part.
        data: from :func:`fingerprint`.
        notes: sentences for the reader.
        created: a time in any form; none is written unless given.

    Raises:
        ConfigError: a setting is not plain JSON value.
        ExportError: a file is missing, or the manifest cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "net.onnx").write_bytes(b"abc")
        ...     manifest = write_manifest(Path(folder, "manifest.json"), settings={"preset": "w8a8"})
        ...     again = read_manifest(Path(folder, "manifest.json"), check=True)
        ...     [entry.name for entry in manifest.files], again == manifest
        (['net.onnx'], True)
    """
    target = Path(path)
    base = target.parent if folder is None else Path(folder)
    names = files_in(base, target) if files is None else sorted(Path(name).as_posix() for name in files)
    manifest = Manifest(
        files=tuple(_entry(base, name) for name in names),
        settings=_plain("settings", settings or {}),
        seeds=_plain("seeds", seeds or {}),
        data=data,
        notes=tuple(notes),
        versions=installed_versions(),
        created=created,
    )
    with atomic_write(target) as temporary:
        temporary.write_text(json.dumps(asdict(manifest), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def read_manifest(path: AnyPath, *, check: bool = False) -> Manifest:
    """Read a manifest back.

    Args:
        path: of the manifest.
        check: also compare the files beside it with their hashes.

    Raises:
        ExportError: it is missing or no manifest; with ``check``, also when a file is missing or has changed.
    """
    site, remedy = os.fspath(path), "export again, or name the manifest that the export wrote"
    document = read_document(
        path, ExportError, remedy=remedy, max_bytes=_MAX_BYTES, kind=".json", unreadable=read_error
    )
    try:
        manifest = _from_json(document)
    except (ValueError, TypeError, KeyError) as error:
        problem = f"it is not a manifest of version {VERSION}: {error}"
        raise ExportError(site, problem, remedy) from error
    if check and not manifest.files:
        raise ExportError(site, "it lists no file, so that nothing can be checked", remedy)
    if check and (problems := manifest.problems(Path(path).parent)):
        remedy = "export again, or restore the files; a manifest holds only for the files it was written with"
        raise ExportError(site, "; ".join(problems), remedy)
    return manifest


def earlier_files(path: AnyPath) -> list[str]:
    """Names of the files that a manifest lists, beside it; none where there is no manifest that can be read.

    Raises:
        ExportError: see :func:`bitwright.export.files.atomic.settle`.
    """
    settle(Path(path).parent)
    try:
        manifest = read_manifest(path)
    except ExportError:  # there is none, or whoever damaged it decides what becomes of the files
        return []
    return [entry.name for entry in manifest.files]


class Fingerprint:
    """sha256 of a stream of data: dtype, shape and bytes of every array, and their nesting."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, batch: Any) -> None:
        """Add one batch: arrays or tensors, alone or nested in lists, tuples, mappings and data classes.

        Raises:
            ConfigError: something in it is neither array nor plain value.
        """
        stack = [batch]
        while stack:
            item = stack.pop()
            children = _children(item)
            if children is not None:
                self._hash.update(f"{type(item).__name__}:{len(children)};".encode())
                stack.extend(reversed(children))
            elif item is None or isinstance(item, str | bytes | bool | int | float | complex):
                self._hash.update(f"{item!r};".encode())
            else:
                self._add_array(item)

    def _add_array(self, item: Any) -> None:
        array = to_numpy(item) if hasattr(item, "dtype") and hasattr(item, "shape") else None
        if array is None or array.dtype.hasobject:
            raise ConfigError(
                "data",
                f"{with_article(type(item).__name__)} is not an array, tensor or plain value, so it cannot be fingerprinted",
                "pass arrays or tensors, alone or in lists, tuples and mappings",
            )
        self._hash.update(f"{array.dtype}:{array.shape};".encode())
        self._hash.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches and hash each on the way, so that data are read only once."""
        for batch in batches:
            self.update(batch)
            yield batch

    def __str__(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def fingerprint(batches: Iterable[Any]) -> str:
    """``"sha256:..."`` of all batches in order; equal data gives equal text, on any machine.

    Example:
        >>> fingerprint([np.zeros(3)]) == fingerprint([np.zeros(3)]) != fingerprint([np.zeros(4)])
        True
    """
    seen = Fingerprint()
    for batch in batches:
        seen.update(batch)
    return str(seen)


def _children(item: Any) -> list[Any] | None:
    if isinstance(item, Mapping):
        return [part for pair in item.items() for part in pair]
    if isinstance(item, list | tuple):
        return list(item)
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, f.name) for f in fields(item)]
    return None


def files_in(base: Path, manifest: Path | None = None) -> list[str]:
    """Names of the files below ``base``, sorted, without hidden ones and ``manifest``; links to folders are not followed."""
    found = []
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    own = None if manifest is None else manifest.resolve()
    return sorted(path.relative_to(base).as_posix() for path in found if path.resolve() != own)


def _entry(base: Path, name: str) -> FileEntry:
    path = base / name
    try:
        return FileEntry(name, hash_file(path), path.stat().st_size)
    except OSError as error:
        raise file_error(path, error) from error


def hash_file(path: Path) -> str:
    """SHA-256 of the content of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _plain(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that survives a round trip through JSON."""
    try:
        return dict(json.loads(json.dumps(given, allow_nan=False)))
    except (TypeError, ValueError) as error:
        remedy = "give strings, numbers, booleans, None, and lists and mappings of them"
        raise ConfigError(f"manifest {name}", f"they are not plain JSON: {error}", remedy) from error


def installed_versions() -> dict[str, str]:
    """Versions of Bitwright, Python and the packages that an export uses, by name."""
    import importlib.metadata  # brings the parser of e-mail, which readers of a file do not need

    found = {"bitwright": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed: it took no part
    return found


def _from_json(document: Any) -> Manifest:
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ValueError("the key 'version' is missing or names another one")
    known = {f.name for f in fields(Manifest)}
    if unknown := sorted(document.keys() - known):
        raise ValueError(f"unknown keys {unknown}")
    wrong = [key for key, kind in _KINDS.items() if not isinstance(document.get(key, kind()), kind)]
    if wrong or not isinstance(document.get("data"), str | None):
        raise ValueError(f"the value of {(wrong or ['data'])[0]!r} is of another kind")
    entries = tuple(_file_entry(entry) for entry in document["files"])
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("it lists a file twice")
    return Manifest(**{**document, "files": entries, "notes": tuple(map(str, document.get("notes", ())))})


def _file_entry(entry: Any) -> FileEntry:
    """The entry of a file; refuses paths outside of the manifest's folder."""
    name, digest, size = (entry[key] for key in ("name", "sha256", "size"))
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r:.200} is not a name of a file")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or ".." in PurePosixPath(name).parts:
        raise ValueError(f"the file {name!r:.200} lies outside of its folder")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{name!r:.200} has no sha256")
    if type(size) is not int or size < 0:
        raise ValueError(f"{name!r:.200} has no size")
    return FileEntry(name, digest, size)


_PREFIX = "bitwright."


def origin_of(preset: str | Preset, steps: Iterable[str], first: Any, log: CalibrationLog | None) -> dict[str, str]:
    """Preset, recipe and calibration data of one call of ``quantize``; data that has no bytes goes without a fingerprint."""
    found = {"preset": preset if isinstance(preset, str) else repr(preset), "recipe": ", ".join(steps)}
    try:
        batches = f"{log.batches} batches, the first " if log is not None else ""
        found["data"] = f"{batches}{fingerprint([first])}"
    except ConfigError:
        pass
    return found


def scores_of(metrics: Mapping[str, float], worst: Any) -> dict[str, str]:
    """Metric and SQNR of the worst output, in the form stored in the files of ``quantize``.

    Args:
        metrics: ``float`` and ``quantized``, or nothing.
        worst: a ``PartQuality``, or ``None``.
    """
    found = {f"metric_{which}": f"{value:.6g}" for which, value in metrics.items()}
    return found if worst is None else {**found, "output": worst.name, "sqnr_db": f"{worst.sqnr:.4g}"}


def write_origin(model: ir.Model, facts: Mapping[str, str]) -> None:
    """Store ``facts`` in the metadata of ``model``, in place."""
    model.metadata_props.update({f"{_PREFIX}{key}": text for key, text in facts.items()})


def read_origin(path: str | os.PathLike[str]) -> dict[str, str]:
    """Provenance that :func:`write_origin` stored in the file at ``path``; empty where there is none.

    Raises:
        ExportError: there is no such file, or it is not an ONNX model.
    """
    return origin_in(read_message(path))


def read_message(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The ONNX model at ``path``, without loading external tensors.

    Raises:
        ExportError: there is no such file, or it is not an ONNX model.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own errors are not importable through onnx
        problem = f"it cannot be read as an ONNX model: {error}"
        raise ExportError(os.fspath(path), problem, "export the simulation again, or check the path") from error


def origin_in(model: onnx.ModelProto) -> dict[str, str]:
    """Provenance that :func:`write_origin` stored in a model."""
    pairs = ((_text_of(prop.key), _text_of(prop.value)) for prop in model.metadata_props)
    return {key.removeprefix(_PREFIX): value for key, value in pairs if key.startswith(_PREFIX)}


def _text_of(held: str | bytes) -> str:
    """A text of a message; of one that is not UTF-8 protobuf gives the bytes, of which the faulty ones are replaced."""
    return held if isinstance(held, str) else held.decode(errors="replace")
