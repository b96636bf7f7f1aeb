"""Source files as tests of the layout read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator


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
