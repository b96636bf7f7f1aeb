"""Graphs of torch's operators as JSON and back: the program of a packed model without its class.

What a file may call is torch's own operators and a few functions of numbers, by name; nothing of a file is executed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn  # noqa: TID251, the language of programs that torch.export returns

from bitwright.errors import ExportError, ModelError

#: functions of numbers that programs with free axes call
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module.__name__.strip('_')}.{name}": getattr(module, name)
    for module, names in (
        (operator, ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "getitem")),
        (operator, ("eq", "ne", "lt", "le", "gt", "ge")),
        (math, ("ceil", "floor", "trunc")),
    )
    for name in names
}  # fmt: skip
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_NAMESPACES = ("aten", "prims", "prim", "quantized_decomposed", "torchvision")
_KINDS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def to_json(graph: fx.Graph) -> dict[str, Any]:
    """Inputs, nodes and outputs of a graph.

    Raises:
        ExportError: it calls what has no name here.
    """
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    nodes, outputs = [], None
    for node in graph.nodes:
        if node.op == "output":
            outputs = _written(node.args[0], node)
        elif node.op != "placeholder":
            nodes.append({
                "name": node.name,
                "op": node.op,
                "target": _target_name(node) if node.op == "call_function" else str(node.target),
                "args": [_written(arg, node) for arg in node.args],
                "kwargs": {key: _written(arg, node) for key, arg in node.kwargs.items()},
            })  # fmt: skip
    return {"inputs": inputs, "nodes": nodes, "outputs": outputs}


def _target_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return str(target)
    name = _NAMES.get(target)  # type: ignore[arg-type]
    if name is None:
        raise ExportError(
            str(node),
            f"the program calls {target}, which a packed model has no name for",
            "leave out data-dependent control flow, or pack layers whose inputs alone are quantized (form='modules')",
        )
    return name


def _written(value: Any, node: fx.Node) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_written(item, node) for item in value]
    if isinstance(value, slice):
        return {"slice": [_written(part, node) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in _KINDS:
        return {_KINDS[type(value)]: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise ExportError(str(node), f"an argument is a {type(value).__name__}, which a file cannot hold", "export ONNX")


def from_json(root: nn.Module, stored: Mapping[str, Any]) -> fx.GraphModule:
    """Read the graph that :func:`to_json` wrote, on the tensors and layers of ``root``.

    Raises:
        ModelError: the file names an operator that there is not, or a node before it is computed.
    """
    graph, made = fx.Graph(), {}
    try:
        for name in stored["inputs"]:
            made[name] = graph.placeholder(_text(name))
        for node in stored["nodes"]:
            args = tuple(_read(arg, made) for arg in node["args"])
            kwargs = {_text(key): _read(arg, made) for key, arg in node["kwargs"].items()}
            kind, target = node["op"], _text(node["target"])
            if kind == "call_function":
                made[node["name"]] = graph.call_function(_function(target), args, kwargs)
            elif kind == "call_module":
                root.get_submodule(target)
                made[node["name"]] = graph.call_module(target, args, kwargs)
            elif kind == "get_attr":
                made[node["name"]] = graph.get_attr(target)
            else:
                raise ValueError(f"{kind!r:.40} is not a kind of node")
        graph.output(_read(stored["outputs"], made))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            "graph", f"it is not one of a packed model: {error!r:.200}", "pack the simulation again"
        ) from error
    return fx.GraphModule(root, graph, "PackedProgram")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a name")
    return value


def _function(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    space, operation, overload = (*name.split("."), "", "")[:3]
    if space not in _NAMESPACES:
        raise ValueError(f"{name!r:.60} is not an operator of torch")
    return getattr(getattr(getattr(torch.ops, space), operation), overload)


def _read(value: Any, made: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_read(item, made) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "node":
        return made[held]
    if kind == "slice":
        return slice(*(_read(part, made) for part in held))
    if kind == "float":
        return float(held)
    if kind == "device":
        return torch.device(held)
    found = getattr(torch, _text(held))
    if kind not in _KINDS.values() or _KINDS.get(type(found)) != kind:
        raise ValueError(f"{held!r:.40} is not a {kind}")
    return found


def nodes_of(graph: fx.Graph, target: Any) -> Iterator[fx.Node]:
    """The nodes that call ``target``."""
    return (node for node in list(graph.nodes) if node.target is target)
