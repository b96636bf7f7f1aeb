"""State of long runs that go on later: JSON with a digest, so that what was changed in between is found before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.core.files import read_document
from bitwright.errors import ConfigError, with_article
from bitwright.export.files.atomic import write_json

_MAX_BYTES = 64 << 20  # every group and point of a search for precisions is in a report
_DIGEST = "digest"


def write_run_state(path: Path, content: Mapping[str, Any], *, indent: int | None = 1, allow_nan: bool = False) -> None:
    """Write a document and its digest atomically.

    Raises:
        ExportError: the file cannot be written.
        ValueError: it holds a number that is not finite, and ``allow_nan`` is not set.
    """
    write_json(path, {**content, _DIGEST: _digest(content)}, indent=indent, allow_nan=allow_nan)


def read_run_state(path: Path, remove: str = "remove it", *, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Read a document that :func:`write_run_state` wrote.

    Raises:
        ConfigError: the file is damaged, or was changed since it was written.
    """
    remedy = f"{remove}, and the same call goes on; or name an empty folder"
    found = read_document(path, ConfigError, remedy=remedy, max_bytes=max_bytes, kind=".json")
    if not isinstance(found, dict):
        raise ConfigError(str(path), f"it holds {with_article(type(found).__name__)}, not what a search wrote", remedy)
    if found.pop(_DIGEST, None) != _digest(found):
        raise ConfigError(
            str(path), "it was changed since it was written, or is of an older version of Bitwright", remedy
        )
    return found


def _digest(content: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))  # tuples are lists there, and keys are texts
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()
