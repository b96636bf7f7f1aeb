"""Reading ``<prefix>_sites.json``, the file of an export in which nothing of a simulation's sites is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitwright.core.files.documents import read_document
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.serialize import encoding_from_json, spec_from_json
from bitwright.core.numerics.spec import QuantSpec
from bitwright.errors import EncodingsError
from bitwright.export.files.atomic import AnyPath, read_error

VERSION = 1
_MAX_BYTES = 2 << 30  # scales of every block of a large model are in it
_MEND = "export the model again"


@dataclass(frozen=True)
class SavedSite:
    """One site as it was exported.

    Attributes:
        role: ``weight``, ``output``, ...
        enabled: whether its quantizer was on.
        spec: what was asked for.
        encoding: what calibration found, if anything.
        tensors: its names in the exported float model.
    """

    role: str
    enabled: bool
    spec: QuantSpec
    encoding: Encoding | None
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class SavedSites:
    """Every site by name, what stayed in float with the reason, and tensors that carry elements of a site's."""

    sites: dict[str, SavedSite]
    floats: dict[str, str]
    carried: tuple[str, ...] = ()


def read_sites(path: AnyPath) -> SavedSites:
    """What a ``*_sites.json`` says; no entry is trusted.

    Raises:
        ExportError: the file does not exist or cannot be read.
        EncodingsError: it is malformed; names the file, and the site if it is one.
    """
    document = read_document(
        path, EncodingsError, remedy=_MEND, max_bytes=_MAX_BYTES, kind=".json", unreadable=read_error
    )
    version = _need(document, f"{path}", dict).get("version")
    if version != VERSION:
        raise EncodingsError(f"{path}", f"its version is {version!r:.40}, not {VERSION}", _MEND)
    sites = {
        name: _site(entry, f"{path}: {name!r:.200}")
        for name, entry in _need(document.get("sites"), f"{path}, key 'sites'", dict).items()
    }
    floats = _need(document.get("float"), f"{path}, key 'float'", dict)
    for name, reason in floats.items():
        _need(reason, f"{path}, key 'float': {name!r:.200}", str)
    carried = _need(document.get("carried", []), f"{path}, key 'carried'", list)
    for tensor in carried:
        _need(tensor, f"{path}, key 'carried'", str)
    return SavedSites(sites, floats, tuple(carried))


def _site(entry: Any, at: str) -> SavedSite:
    _need(entry, at, dict)
    encoding = entry.get("encoding")
    tensors = _need(entry.get("tensors"), f"{at}, key 'tensors'", list)
    for tensor in tensors:
        _need(tensor, f"{at}, key 'tensors'", str)
    return SavedSite(
        role=_need(entry.get("role"), f"{at}, key 'role'", str),
        enabled=_need(entry.get("enabled"), f"{at}, key 'enabled'", bool),
        spec=spec_from_json(entry.get("spec"), f"{at}, key 'spec'"),
        encoding=None if encoding is None else encoding_from_json(encoding, f"{at}, key 'encoding'"),
        tensors=tuple(tensors),
    )


def _need(value: Any, at: str, kind: type) -> Any:
    if not isinstance(value, kind):
        what = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}[kind]
        raise EncodingsError(at, f"it is {value!r:.40}, not {what}", _MEND)
    return value
