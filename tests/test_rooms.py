"""Which room of a part may import which others of the same part, and that no two rooms import each other.

A room is a folder below a part of the package. Directions between parts are those of ``test_imports.py``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_imports import FILES, ROOT, imported

# Room -> rooms and single files of the same part that its files may import, in front of those that need it.
ROOMS: dict[str, dict[str, set[str]]] = {
    "core": {
        "files": set(),
        "compiled": set(),
        "numerics": {"compiled"},
        "sums": {"numerics"},
        "graph": {"compiled", "numerics"},
        "health": {"graph", "numerics"},
        "placement": {"files", "graph", "numerics", "sums"},
        "simulation": {"graph", "health", "numerics", "placement", "sums"},
    },
    "algorithms": {
        "channels": set(),
        "folding": {"channels"},
        "rounding": {"bias_correct", "channels", "options"},
        "scaling": {"bias_correct", "channels", "folding"},
        "search": {"channels", "options", "rounding"},
    },
    "export": {
        "files": set(),
        "encodings": {"files"},
        "qdq": {"files", "targets"},
        "recurrent": {"qdq", "targets"},
        "tflite": {"files", "qdq"},
        "verify": {"files", "qdq", "recurrent", "targets", "tflite"},
    },
    "torch": {
        "calls": set(),
        "interception": {"calls"},
        "quantizers": {"calls"},
        "simulation": {"calls", "health", "interception", "quantizers", "ranks"},
        "adapters": {"calls", "interception", "quantizers", "ranks", "simulation"},
        "training": {"adapters", "calls", "interception", "quantizers", "ranks", "simulation"},
    },
    "onnx": {
        "model": set(),
        "given": set(),
        "health": {"model"},
        "simulation": {"given", "health", "model"},
        "adapters": {"model", "simulation"},
    },
    "analysis": {
        "subject": set(),
        "metrics": {"intervals", "result", "subject"},
        "values": {"subject"},
        "causes": {"metrics", "result", "subject", "values"},
    },
    "mixed": {
        "precisions": set(),
        "choosing": {"precisions"},
        "search": {"choosing", "precisions"},
        "automatic": {"choosing", "precisions", "search"},
    },
}


def unit_of(name: str) -> tuple[str, str] | None:
    """``("core", "graph")`` for ``bitwright.core.graph.ops``: part and room, or single file; ``None`` outside of the parts."""
    path = name.split(".")
    return (path[1], path[2]) if len(path) > 2 and path[0] == "bitwright" and path[1] in ROOMS else None


def breaches(path: Path, source: str) -> list[str]:
    """What a file of a room imports and may not, as readable lines."""
    here = unit_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if here is None or here[1] not in ROOMS[here[0]]:
        return []
    part, room = here
    found = []
    for line, name in imported(path, ast.parse(source)):
        there = unit_of(name)
        if there is not None and there[0] == part and there[1] not in ROOMS[part][room] | {room}:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}; {room} may import {ROOMS[part][room]}")
    return found


def test_rooms_import_what_they_may() -> None:
    assert not [breach for path in FILES for breach in breaches(path, path.read_text())]


@pytest.mark.parametrize("part", ROOMS)
def test_every_folder_has_a_row_and_says_what_lives_there(part: str) -> None:
    folders = {p.parent.name: p for p in (ROOT / "bitwright" / part).glob("*/__init__.py")}
    assert folders.keys() == ROOMS[part].keys()
    for name, init in folders.items():
        assert ast.get_docstring(ast.parse(init.read_text())), f"{part}/{name}/__init__.py says nothing"


@pytest.mark.parametrize("part", ROOMS)
def test_no_two_rooms_import_each_other(part: str) -> None:
    left = {room: others & ROOMS[part].keys() for room, others in ROOMS[part].items()}
    while left:
        free = [room for room, others in left.items() if not others & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for room in free:
            del left[room]


@pytest.mark.parametrize("part, room", [(part, room) for part in ROOMS for room in ROOMS[part]])
def test_a_breach_of_every_room_is_seen(part: str, room: str) -> None:
    forbidden = next((other for other in ROOMS[part] if other != room and other not in ROOMS[part][room]), "elsewhere")
    file = ROOT / "bitwright" / part / room / "x.py"
    assert breaches(file, f"from bitwright.{part}.{forbidden}.y import z")
    assert breaches(file, f"def f():\n    import bitwright.{part}.{forbidden}")
    assert not breaches(file, f"from bitwright.{part}.{room}.y import z")


def test_plans_of_sites_are_read_through_sites_only() -> None:
    """``Site`` says what others need of its plan."""
    outside = [path for path in FILES if path.name != "sites.py" and re.search(r"(?<!self)\._plan\b", path.read_text())]
    assert not outside
