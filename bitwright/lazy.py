"""Public names that are imported at first use (PEP 562), listed in the stub of their package."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

# optional package -> the extra that provides it
_EXTRAS = {
    **dict.fromkeys(("onnx", "onnx_ir", "onnxruntime", "onnxscript", "ml_dtypes", "psutil"), "onnx"),
    "torch": "torch",
    "scipy": "analysis",
}


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """The command that installs the extra which provides a missing module; ``None`` where no extra does."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    return None if extra is None else f"pip install 'bitwright[{extra}]'"


def published(package: str, file: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package whose public names ``__init__.pyi`` imports.

    Type checkers read the same stub, so that each name is listed once. Modules of the package load at first use too, so that
    ``import bitwright`` is enough for ``bitwright.llm.quantize``; they are not in ``__all__``.

    Args:
        package: ``__name__`` of the package.
        file: its ``__file__``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module not in (None, package)
        for alias in node.names
    }

    names = sorted([*homes, *(["__version__"] if hasattr(sys.modules[package], "__version__") else [])])

    def load(name: str) -> object:
        if name not in homes:
            return _module(package, name)
        module, attribute = homes[name]
        try:
            value: object = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (remedy := how_to_install(error)) is None:
                raise
            problem = f"{package}.{name} needs {error.name}, which is not installed; remedy: {remedy}"
            raise ModuleNotFoundError(problem, name=error.name) from error
        setattr(sys.modules[package], name, value)  # found at once from now on
        return value

    return names, load, lambda: list(names)


def _module(package: str, name: str) -> object:
    """The module ``name`` of ``package``; an :class:`AttributeError` where there is none."""
    if name.startswith("_") or importlib.util.find_spec(f"{package}.{name}") is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return importlib.import_module(f"{package}.{name}")
