"""Finding tensors in whatever a model takes and returns, and walking module trees, without recursion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def _children(obj: Any) -> list[tuple[str, Any]] | None:
    if isinstance(obj, Mapping):
        return [(str(k), v) for k, v in obj.items()]
    if isinstance(obj, (list, tuple)):
        names = getattr(obj, "_fields", None) or range(len(obj))
        return [(str(n), v) for n, v in zip(names, obj, strict=True)]
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [(f.name, getattr(obj, f.name)) for f in dataclasses.fields(obj)]
    if isinstance(obj, nn.utils.rnn.PackedSequence):
        return [("data", obj.data)]
    return None


def flatten_tensors(obj: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """``(path, tensor)`` of every tensor in nested tuples, lists, mappings and dataclasses, in order.

    ``name`` is the path of ``obj`` itself: ``("x", tensor)``, ``("batch.image", tensor)``.
    """
    found: list[tuple[str, torch.Tensor]] = []
    stack: list[tuple[str, Any]] = [(name, obj)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append((path or "output", item))
            continue
        children = _children(item)
        if children:
            stack.extend((f"{path}.{key}" if path else key, child) for key, child in reversed(children))
    return found


def map_tensors(obj: Any, function: Callable[[Any], Any], leaf: type = torch.Tensor) -> Any:
    """``obj`` with every tensor (or instance of ``leaf``) replaced; containers of the same types are rebuilt bottom-up."""
    if isinstance(obj, leaf):
        return function(obj)
    order: list[tuple[Any, list[tuple[str, Any]]]] = []
    stack = [obj]
    while stack:
        item = stack.pop()
        opaque = isinstance(item, (leaf, torch.Tensor, nn.utils.rnn.PackedSequence))
        children = None if opaque else _children(item)
        if children is not None:
            order.append((item, children))
            stack.extend(child for _, child in children)
    rebuilt: dict[int, Any] = {}
    for item, children in reversed(order):
        values = [
            function(c) if isinstance(c, leaf) else rebuilt.get(id(c), c) for _, c in children
        ]  # children come later in `order`, so they are rebuilt already
        rebuilt[id(item)] = _rebuild(item, values)
    return rebuilt.get(id(obj), obj)


def _rebuild(item: Any, values: list[Any]) -> Any:
    if isinstance(item, Mapping):
        pairs = zip(item.keys(), values, strict=True)
        return dict(pairs) if type(item) is dict else type(item)(pairs)  # type: ignore[call-arg]
    if isinstance(item, tuple):
        return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    if isinstance(item, list):
        return list(values)
    return dataclasses.replace(
        item, **dict(zip((f.name for f in dataclasses.fields(item)), values, strict=True))
    )


def walk_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(path, module)`` of ``root`` and everything below it, each module once, parents first, in registration order."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        stack.extend(
            (f"{path}.{name}" if path else name, child)
            for name, child in reversed(module._modules.items())
            if child is not None
        )


def named_state(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of every parameter and buffer, in module order; a tied tensor appears under each name."""
    for path, module in walk_modules(root):
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield prefix + name, tensor
