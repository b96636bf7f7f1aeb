"""Source files as tests of the layout read them, and scripts as modules."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below ``tree``, which imports, classes and functions are: a fraction of what ``ast.walk`` visits."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.stmt):
            yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, name, ())
            left += inner if isinstance(inner, list) else ()  # an expression has a body too


def load_script(path: Path) -> ModuleType:
    """A script that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
