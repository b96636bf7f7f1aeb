"""Signatures of the public names, as a file holds them: ``python -m tests.support.signatures`` adds new names to it."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PINNED = Path(__file__).with_name("signatures.json")
PACKAGES = ("bitwright", "bitwright.torch", "bitwright.onnx")
Signature = list[list[str]]  # per parameter: name, kind, default


def _described(parameter: inspect.Parameter) -> list[str]:
    default = "" if parameter.default is parameter.empty else repr(parameter.default)
    return [parameter.name, parameter.kind.name, default.split(" at 0x")[0]]


def signature(value: Any) -> Signature:
    """The parameters of a function, or of a class's construction."""
    return [_described(p) for p in inspect.signature(value).parameters.values()]


def callables() -> Iterator[tuple[str, Any]]:
    """Every public function and class, and every public method of these classes, by dotted name."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if not callable(value):
                continue
            yield f"{package}.{name}", value
            if not inspect.isclass(value) or issubclass(value, BaseException):
                continue
            ours = [c for c in value.__mro__ if c.__module__.startswith("bitwright")]  # what it inherits too
            for method in sorted({name for c in ours for name in vars(c)}):
                if not method.startswith("_") and inspect.isfunction(getattr(value, method)):
                    yield f"{package}.{name}.{method}", getattr(value, method)


def found() -> dict[str, Signature]:
    """Signatures as they are now; classes that take anything have none."""
    result = {}
    for name, value in callables():
        try:
            result[name] = signature(value)
        except ValueError:
            continue  # an exception class, whose construction Python does not describe
    return result


def main() -> None:
    """Add what is new to the file; what was published stays as it was."""
    pinned = {**found(), **(json.loads(PINNED.read_text()) if PINNED.exists() else {})}
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(pinned.items()))
    PINNED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
