"""A copy of a model in which functional calls and repeated calls of a module are modules of their own."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn  # noqa: TID251, of scripts that ask for a traced model; a simulation needs none

from bitwright.torch.calls.function_modules import FUNCTION_MODULES
from bitwright.torch.simulation.quantsim import copied

logger = logging.getLogger(__name__)

#: function or method of a tensor -> class of torch whose constructor takes what is not a tensor
_LAYERS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "elu": nn.ELU, "celu": nn.CELU, "selu": nn.SELU, "gelu": nn.GELU, "silu": nn.SiLU,
    "mish": nn.Mish, "leaky_relu": nn.LeakyReLU, "hardtanh": nn.Hardtanh, "hardshrink": nn.Hardshrink,
    "hardsigmoid": nn.Hardsigmoid, "hardswish": nn.Hardswish, "softplus": nn.Softplus, "softshrink": nn.Softshrink,
    "softsign": nn.Softsign, "tanhshrink": nn.Tanhshrink, "logsigmoid": nn.LogSigmoid, "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh, "softmax": nn.Softmax, "log_softmax": nn.LogSoftmax,
}  # fmt: skip
#: function, operator or method of a tensor -> class that is called with the same arguments
_SAME_CALL = {
    "add": "Add", "sub": "Subtract", "subtract": "Subtract", "mul": "Multiply", "multiply": "Multiply", "div": "Divide",
    "divide": "Divide", "truediv": "Divide", "matmul": "MatMul", "bmm": "Bmm", "baddbmm": "Baddbmm", "addmm": "Addmm",
    "pow": "Pow", "mean": "Mean", "sum": "Sum", "prod": "Prod", "cumsum": "CumSum", "exp": "Exponential", "log": "Log",
    "sqrt": "Sqrt", "rsqrt": "RSqrt", "square": "Square", "erf": "Erf", "sin": "Sin", "cos": "Cos", "neg": "Neg",
    "abs": "Abs", "maximum": "Maximum", "minimum": "Minimum", "norm": "Norm", "normalize": "Normalize",
    "interpolate": "Interpolate", "max_pool2d": "MaxPool2d", "max_pool2d_with_indices": "MaxPool2d",
    "avg_pool2d": "AvgPool2d", "adaptive_avg_pool2d": "AdaptiveAvgPool2d", "batch_norm": "BatchNorm",
    "group_norm": "GroupNorm", "grid_sampler": "GridSample", "where": "Where",
    "scaled_dot_product_attention": "ScaledDotProductAttention",
}  # fmt: skip
#: what a tensor tells about itself, which is no tensor
_PLAIN = {"size", "dim", "ndimension", "numel", "getattr", "len"}


class _Tracer(fx.Tracer):
    """Traces into modules of scripts, but not into layers of torch, functions as modules, and what is left out."""

    def __init__(self, modules: Collection[nn.Module] = (), classes: tuple[type, ...] = ()) -> None:
        super().__init__()
        self.kept = {id(module) for module in modules}
        self.classes = (*classes, *FUNCTION_MODULES.values())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of ``m`` stays one call."""
        return id(m) in self.kept or isinstance(m, self.classes) or super().is_leaf_module(m, module_qualified_name)


def modularized(model: nn.Module, keep: Iterable[nn.Module] = (), keep_classes: Iterable[type] = ()) -> nn.Module:
    """A copy that calls modules where ``model`` calls functions, or one module several times.

    A function becomes ``module_<function>``, counted on (``module_add_1``); the second call of ``relu`` becomes
    ``module_relu_1`` beside it, with the same parameters. The copy computes what ``model`` computes and is a
    ``torch.fx.GraphModule``. A model that ``torch.fx`` cannot trace, whose path depends on data for one, is copied as it is, and
    the reason is logged.

    Args:
        model: any model; the mode (``train()``, ``eval()``) that it is in is the copy's, also in what it computes.
        keep: modules of ``model`` that are not looked into.
        keep_classes: classes of such modules.
    """
    kept = {id(module) for module in keep}
    names = [name for name, module in model.named_modules() if id(module) in kept]
    twin = copied(model)
    tracer = _Tracer([twin.get_submodule(name) for name in names], tuple(keep_classes))
    try:
        graph = tracer.trace(twin)
    except Exception as error:  # of the model's code, which runs on placeholders here
        kind = type(model).__name__
        logger.warning("%s is not rewritten: torch.fx does not trace it (%s: %s)", kind, type(error).__name__, error)
        return copied(model)
    made = fx.GraphModule(tracer.root, graph, type(model).__name__)
    _rewrite(made)
    return made.train(model.training)


def _rewrite(made: fx.GraphModule) -> None:
    """Put modules in the place of functions and of further calls of a module."""
    called: set[str] = set()
    plain: set[fx.Node] = set()
    for node in list(made.graph.nodes):
        node.type = None  # a postponed annotation is text, which the code of a graph cannot hold
        if node.op == "call_module":
            if node.target in called:
                node.target = _further(made, node)
            called.add(str(node.target))
        elif node.op in ("call_function", "call_method"):
            if _is_plain(node, plain):
                plain.add(node)
            elif (new := _module_for(made, node, _function(node))) is not None:
                node.op, node.target = "call_module", _added(made, "", node.name, new)
    made.graph.lint()
    made.recompile()


def _further(made: fx.GraphModule, node: fx.Node) -> str:
    """Path of another module with the parameters of the one that ``node`` calls, beside it."""
    parent = str(node.target).rpartition(".")[0]
    own = node.name.removeprefix(f"{parent.replace('.', '_')}_") if parent else node.name
    module = made.get_submodule(str(node.target))
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return _added(made, f"{parent}." if parent else "", own, copy.deepcopy(module, memo))


def _is_plain(node: fx.Node, plain: Collection[fx.Node]) -> bool:
    """Whether a call's result is no tensor: a size, or what is computed from sizes."""
    sources = node.all_input_nodes
    return _function(node) in _PLAIN or (bool(sources) and all(source in plain for source in sources))


def _function(node: fx.Node) -> str:
    """What a node calls, by the name without the number that tells equal calls apart."""
    name, _, number = node.name.rpartition("_")
    return name if number.isdigit() else node.name


def _added(made: fx.GraphModule, parent: str, name: str, module: nn.Module) -> str:
    path = f"{parent}module_{name}"
    made.add_submodule(path, module)
    return path


def _module_for(made: fx.GraphModule, node: fx.Node, function: str) -> nn.Module | None:
    """The module that computes what ``node`` calls, whose arguments it fits; ``None``: it stays a function."""
    if function in _SAME_CALL:
        return FUNCTION_MODULES[_SAME_CALL[function]]()
    if function in _LAYERS:
        return _layer(node, _LAYERS[function], getattr(F, function, None))
    if function in ("cat", "concat"):
        return _concat(node)
    return _convolution(made, node) if function == "conv2d" else None


def _layer(node: fx.Node, kind: type[nn.Module], function: Callable[..., Any] | None) -> nn.Module | None:
    names = list(inspect.signature(function).parameters) if inspect.isfunction(function) else ["input"]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    given = {name: value for name, value in given.items() if value is not None and name != "_stacklevel"}
    taken = given.pop("input", None)
    known = set(inspect.signature(kind).parameters)
    if len(node.args) > len(names):  # of a method that takes a dimension
        if "dim" not in known:
            return None
        given["dim"] = node.args[1]
    if taken is None or not given.keys() <= known or any(isinstance(value, fx.Node) for value in given.values()):
        return None
    node.args, node.kwargs = (taken,), {}
    return kind(**given)


def _concat(node: fx.Node) -> nn.Module | None:
    tensors = node.args[0] if node.args else node.kwargs.get("tensors")
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(tensors, (list, tuple)) or not isinstance(axis, int) or "out" in node.kwargs:
        return None
    node.args, node.kwargs = tuple(tensors), {}
    return FUNCTION_MODULES["Concat"](axis)


def _convolution(made: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    x, weight, bias, *rest = (given[name] for name in names)
    if any(isinstance(value, fx.Node) for value in rest):
        return None
    held = [_parameter(made, value) for value in (weight, bias)]
    options = dict(zip(names[3:], rest, strict=True))
    if held[0] is None or (bias is not None and held[1] is None):
        node.args, node.kwargs = (x, weight, bias), {}
        return FUNCTION_MODULES["DynamicConv2d"](**options)
    out, within, *kernel = held[0].shape
    options |= {"bias": bias is not None, "device": "meta"}
    module = nn.Conv2d(within * options["groups"], out, tuple(kernel), **options)
    module.weight, module.bias = held[0], held[1]
    node.args, node.kwargs = (x,), {}
    return module


def _parameter(made: fx.GraphModule, value: Any) -> Any:
    """The parameter that a node reads; ``None`` if it reads something else."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    owner, _, name = str(value.target).rpartition(".")
    found = made.get_submodule(owner)._parameters.get(name)
    return found if isinstance(found, torch.nn.Parameter) else None
