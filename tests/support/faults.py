"""What a planted fault is, and how a builder becomes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Build = Callable[[], tuple[Any, list[Any]]]


@dataclass(frozen=True)
class Fault:
    """A model with one planted fault.

    Attributes:
        name: readable, unique in its front end.
        build: the model and its batches.
        cause: of the diagnosis.
        op: what must be named: an ONNX node, part of the place of a torch call; for bad data the input, for a bad
            parameter the parameter.
        batch, sample: which show it first; ``None`` is not checked.
        where: part of what the report says about the place.
        problem: part of what it says about what happened.
        line: part of the line of code (torch).
    """

    name: str
    build: Build
    cause: str
    op: str = "culprit"
    batch: int | None = 0
    sample: int | None = None
    where: str = ""
    problem: str = ""
    line: str = ""


@dataclass(frozen=True)
class LookAlike:
    """A model that makes or reads values that are not finite, and is healthy."""

    name: str
    build: Build


def fault(table: list[Fault], name: str, cause: str, **expected: Any) -> Callable[[Build], Build]:
    """Decorator that puts a builder into ``table``."""

    def add(build: Build) -> Build:
        table.append(Fault(name, build, cause, **expected))
        return build

    return add


def look_alike(table: list[LookAlike], name: str) -> Callable[[Build], Build]:
    """Decorator that puts a builder into ``table``."""

    def add(build: Build) -> Build:
        table.append(LookAlike(name, build))
        return build

    return add
