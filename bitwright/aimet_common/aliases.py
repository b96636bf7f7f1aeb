"""Modules under a second path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def names_of(module: str) -> Callable[[str], Any]:
    """A module ``__getattr__`` that finds the names of another module."""

    def found(name: str) -> Any:
        if name.startswith("__"):
            if name == "__all__":
                home = importlib.import_module(module)
                return getattr(home, "__all__", [n for n in vars(home) if not n.startswith("_")])
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)

    return found
