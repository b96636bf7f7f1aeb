"""What the docstring of a data class lists under ``Attributes`` is what the class has."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import bitwright.core
import bitwright.methods
from tests.support.sources import statements

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^    ((?:\*{0,2}\w+, )*\w+): ", re.MULTILINE)


def documented(cls: ast.ClassDef) -> set[str]:
    """Names under ``Attributes:`` in the docstring of ``cls``."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", ast.get_docstring(cls) or "", re.MULTILINE)
    return {name for match in ENTRY.findall(section[1]) for name in match.split(", ")} if section else set()


def members(cls: ast.ClassDef) -> set[str]:
    """Fields, methods and what methods assign on ``self``."""
    own = {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    own |= {n.name for n in cls.body if isinstance(n, ast.FunctionDef)}
    return own | {
        n.attr
        for n in ast.walk(cls)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }


def undocumented_by(tree: ast.Module) -> list[str]:
    classes = [node for node in statements(tree) if isinstance(node, ast.ClassDef) and not node.bases]
    return [f"{c.name}.{name}" for c in classes if (named := documented(c)) for name in sorted(named - members(c))]


def test_every_documented_field_exists() -> None:
    for path in sorted((ROOT / "bitwright").rglob("*.py")):
        assert not undocumented_by(ast.parse(path.read_text())), path.relative_to(ROOT)


def test_a_field_that_is_not_there_is_seen() -> None:
    source = 'class Op:\n    """An op.\n\n    Attributes:\n        a, b: two.\n        c: one.\n    """\n    a: int\n    b: int\n'
    assert undocumented_by(ast.parse(source)) == ["Op.c"]


@pytest.mark.parametrize(
    ("package", "collect"),
    [
        (bitwright.core, {"Event", "CalibrationLog"}),
        (
            bitwright.methods,
            {
                *("AwqReport", "BiasReport", "EqualizeReport", "NormReport", "RotateReport", "SmoothReport"),
                *("LayerProblem", "Run", "_Component"),
            },
        ),
    ],
)
def test_data_classes_are_frozen_but_those_that_collect(package: ModuleType, collect: set[str]) -> None:
    """Decisions are values: two parts may share one, and it may be a key."""
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    classes = {
        each
        for module in modules
        for each in vars(importlib.import_module(module.name)).values()
        if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == module.name
    }
    assert len(classes) > 40
    assert {each.__name__ for each in classes if not each.__dataclass_params__.frozen} == collect
