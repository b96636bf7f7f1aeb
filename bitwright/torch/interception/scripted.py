"""Functions compiled by ``torch.jit.script``: they run outside Python, so what they compute is not seen."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from bitwright.torch.calls.trees import walk_modules


def scripted_functions(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Path of a module -> the TorchScript functions that its methods name, also through Python functions they call; by name."""
    by_class: dict[type, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for path, module in walk_modules(model):
        kind = type(module)
        if kind not in by_class:
            by_class[kind] = {} if kind.__module__.startswith("torch.") else _named_by(kind)
        held = {name: value for name, value in vars(module).items() if _is_scripted(value)}
        names = {**by_class[kind], **held}
        if names:
            found[path] = names
    return found


def scripted_code(model: nn.Module) -> frozenset[CodeType]:
    """The code that TorchScript functions were compiled from: ``torch.export`` runs it in their place."""
    functions = (value for names in scripted_functions(model).values() for value in names.values())
    sources = (inspect.unwrap(getattr(value, "_torchdynamo_inline", value)) for value in functions)
    return frozenset(source.__code__ for source in sources if isinstance(source, FunctionType))


def called_from(code: Collection[CodeType], ends: Collection[CodeType]) -> bool:
    """Whether the call in hand is made in ``code``, or by what it calls, inside the innermost forward (code in ``ends``)."""
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code not in ends:
        if frame.f_code in code:
            return True
        frame = frame.f_back
    return False


def _named_by(kind: type) -> dict[str, Any]:
    """The TorchScript functions that the methods of a class lead to."""
    pending = list(_methods(kind))
    seen: set[FunctionType] = set(pending)
    names: dict[str, Any] = {}
    while pending:
        function = inspect.unwrap(pending.pop())
        if not isinstance(function, FunctionType):
            continue
        for name, value in _referenced(function):
            if _is_scripted(value):
                names[value.name or name] = value
            elif isinstance(value, FunctionType) and value not in seen and not _is_of_torch(value):
                seen.add(value)
                pending.append(value)
    return names


def _methods(kind: type) -> Iterator[FunctionType]:
    for own in kind.__mro__:
        if issubclass(own, nn.Module) and own is not nn.Module:
            yield from (value for value in vars(own).values() if isinstance(value, FunctionType))


def _referenced(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Name and value of every global and closure variable in the code of a function and of those defined in it."""
    codes: list[CodeType] = [function.__code__]
    while codes:
        code = codes.pop()
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
        yield from ((n, function.__globals__[n]) for n in code.co_names if n in function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _is_scripted(value: Any) -> bool:
    return isinstance(value, torch.jit.ScriptFunction)  # noqa: TID251, looked for here


def _is_of_torch(function: FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"
