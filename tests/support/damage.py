"""Damaged copies of valid files: seeded mutations of bytes, of documents and of protobuf messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np

Random = np.random.Generator

# what takes the place of a value in a document
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, -(2**63), 2**64, 10**30, 0.0, -0.5, 1e308, float("nan"), float("inf"),
    "", "x", "*", "\0", "é", "\ud800", "../../x", "/etc/passwd", "a" * 5_000, "9" * 500, "int8", "per_channel", "True",
    [], [[]], [1, "a", None], {}, {"a": 1}, {"": {}}, {"name": 3}, [0] * 1000, "NaN", [float("nan")], b"\xff".hex(),
)  # fmt: skip


def damaged_bytes(content: bytes, rng: Random) -> bytes:
    """``content`` after one to three of: bits flipped, cut off, spliced, repeated, overwritten, text inserted."""
    for _ in range(int(rng.integers(1, 4))):
        content = _one_change(content, rng)
    return content[: 1 << 20]


def _one_change(content: bytes, rng: Random) -> bytes:
    if not content:
        return rng.bytes(8)
    kind, at = int(rng.integers(7)), int(rng.integers(len(content)))
    end = min(len(content), at + int(rng.integers(1, 64)))
    if kind == 0:
        changed = bytearray(content)
        for place in rng.integers(len(content), size=int(rng.integers(1, 9))):
            changed[place] ^= 1 << int(rng.integers(8))
        return bytes(changed)
    if kind == 1:
        return content[:at]
    if kind == 2:
        other = int(rng.integers(len(content)))
        return content[:other] + content[at:end] + content[other:]
    if kind == 3:
        return content[:at] + content[end:]
    if kind == 4:
        return content[:at] + rng.bytes(end - at) + content[end:]
    if kind == 5:
        return content[:at] + content[at:end] * int(rng.integers(2, 50)) + content[end:]
    words = (
        b"[" * 300,
        b"{" * 300,
        b"-",
        b"9" * 400,
        b"&a ",
        b"*a ",
        b": ",
        b"\n",
        b'"',
        b"'",
        b"null",
        b"\xff\xfe",
        b"\0",
    )
    return content[:at] + words[int(rng.integers(len(words)))] + content[at:]


def damaged_document(document: Any, rng: Random) -> Any:
    """A copy of a JSON-like value after one to three of: a value exchanged, removed, repeated, renamed, nested deeply."""
    document = deepcopy(document)
    for _ in range(int(rng.integers(1, 4))):
        places = list(_places(document))
        if not places:
            return ODD[int(rng.integers(len(ODD)))]
        parent, key = places[int(rng.integers(len(places)))]
        _change(parent, key, rng)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [document]
    while waiting and len(waiting) < 10_000:
        value = waiting.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            yield value, key
            waiting.append(value[key])


def _change(parent: Any, key: Any, rng: Random) -> None:
    kind = int(rng.integers(6))
    if kind <= 2:
        parent[key] = deepcopy(ODD[int(rng.integers(len(ODD)))])
    elif kind == 3:
        del parent[key]
    elif kind == 4:
        value = deepcopy(parent[key])
        if isinstance(parent, list):
            parent.insert(key, value)
        else:
            parent[f"{key}"[: int(rng.integers(8))] + "x"] = value
    else:
        value = parent[key]
        for _ in range(int(rng.choice([1, 3, 90]))):
            value = [value]
        parent[key] = value


def as_json(document: Any) -> bytes:
    """JSON text; NaN and lone surrogates are written as they are in the wild."""
    return json.dumps(document).encode()


def damaged_message(message: Any, rng: Random) -> Any:
    """A copy of a protobuf message with one to three of its fields, at any depth, changed, removed or repeated."""
    message = type(message).FromString(message.SerializeToString())
    for _ in range(int(rng.integers(1, 4))):
        fields = list(_fields(message))
        owner, field = fields[int(rng.integers(len(fields)))]
        if field.is_repeated:
            _change_list(getattr(owner, field.name), field, rng)
        elif field.message_type is not None or rng.integers(4) == 0:
            owner.ClearField(field.name)
        else:
            setattr(owner, field.name, _odd_scalar(field, rng))
    return message


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [message]
    while waiting:
        owner = waiting.pop()
        for field, value in owner.ListFields():
            yield owner, field
            if field.message_type is not None:
                waiting += value if field.is_repeated else [value]


def _change_list(values: Any, field: Any, rng: Random) -> None:
    at = int(rng.integers(len(values)))
    if rng.integers(2):
        del values[at]
    elif field.message_type is not None:
        values.add().CopyFrom(values[at])
    elif rng.integers(2):
        values[at] = _odd_scalar(field, rng)
    else:
        values.append(_odd_scalar(field, rng))


def _odd_scalar(field: Any, rng: Random) -> Any:
    kinds: dict[str, tuple[Any, ...]] = {
        "int": (0, 1, -1, 2, 3, 7, 11, 16, 99, 2**31 - 1, -(2**31)),
        "long": (0, 1, -1, 2, 5, 2**31, 2**62, -(2**63)),
        "float": (0.0, -1.0, float("nan"), float("inf"), 1e30),
        "str": ("", "x", "y", "w", "Relu", "Conv", "\0", "../x", "é", "a" * 300),
        "bytes": (b"", b"\0", b"\xff" * 7, rng.bytes(48)),
    }
    names = {1: "float", 2: "float", 3: "long", 4: "long", 5: "int", 9: "str", 12: "bytes", 13: "int", 14: "int"}
    options = kinds[names[field.type]]
    if field.type in (4, 13):
        options = tuple(o for o in options if o >= 0)
    if field.type == 14:
        numbers = [value.number for value in field.enum_type.values]
        return int(rng.choice(numbers))
    return options[int(rng.integers(len(options)))]
