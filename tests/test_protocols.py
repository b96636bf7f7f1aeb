"""What algorithms ask of models is three protocols, and all of it is used."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.test_imports import FILES, ROOT

#: protocol -> files that define or fill it, in which a use of a member may be its own
THREE = {
    "FloatModel": ("core/simulation/float_model.py", "torch/view.py", "onnx/model/view.py"),
    "Simulation": ("core/simulation/simulation.py", "torch/simulation/quantsim.py", "onnx/simulation/quantsim.py"),
    "SimulatedModel": ("methods/rounding/program.py", "torch/program.py", "onnx/program.py"),
}


def protocols(source: str) -> Iterator[ast.ClassDef]:
    """Classes that derive from ``Protocol``, however it was imported."""
    nodes = list(ast.walk(ast.parse(source)))
    named = {n.asname or n.name for n in nodes if isinstance(n, ast.alias) and n.name == "Protocol"}
    for node in nodes:
        bases = [ast.unparse(base).partition("[")[0] for base in getattr(node, "bases", ())]
        if isinstance(node, ast.ClassDef) and any(b in named or b.endswith(".Protocol") for b in bases):
            yield node


def members(protocol: ast.ClassDef) -> Iterator[str]:
    """What a protocol asks for."""
    for node in protocol.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def unused(names: Iterable[str], sources: Iterable[str]) -> set[str]:
    """Names that no source reads as an attribute; what comments and docstrings mention is no use."""
    left = set(names)
    for source in sources:
        if any(f".{name}" in source for name in left):
            left -= {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return left


def found() -> list[ast.ClassDef]:
    return [node for path in FILES if "Protocol" in (text := path.read_text()) for node in protocols(text)]


def test_there_are_three() -> None:
    assert sorted(node.name for node in found()) == sorted(THREE)


@pytest.mark.parametrize(
    "start",
    [
        "from typing import Protocol\nclass More(Protocol):",
        "import typing\nclass More(typing.Protocol[int]):",
        "from typing_extensions import Protocol as P\nclass More(P[int]):",
    ],
    ids=["plain", "of its module", "renamed"],
)
def test_a_fourth_would_be_seen(start: str) -> None:
    (node,) = protocols(f"{start}\n    x: int\n    def f(self): ...")
    assert node.name == "More" and list(members(node)) == ["x", "f"]


def test_every_member_is_used() -> None:
    for node in found():
        own = {ROOT / "bitwright" / path for path in THREE[node.name]}
        assert all(Path(path).is_file() for path in own)
        assert not unused(members(node), (path.read_text() for path in FILES if path not in own))


def test_a_member_without_a_use_is_seen() -> None:
    sources = ["x.used()", "dead = x.deadly", "'It was `x.dead` once.'  # x.dead"]
    assert unused(["used", "dead"], sources) == {"dead"}
