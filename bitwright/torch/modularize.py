"""A copy of a model in which functional calls and repeated calls of a module are modules of their own; and these modules.

They are functions of torch and of ONNX without parameters, for models that are composed of modules alone.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn  # noqa: TID251, of scripts that ask for a traced model; a simulation needs none

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


class CustomSiLU(nn.Module):
    """``x * sigmoid(x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x * sigmoid(x)``."""
        return x * self.sigmoid(x)


class ChannelShuffle(nn.Module):
    """Channels interleaved across groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The first input with its channels shuffled."""
        return F.channel_shuffle(args[0], self.groups)


class DepthToSpaceCRDMode(nn.Module):
    """Channels moved into square blocks of space, column-row-depth."""

    def __init__(self, block_size: Any) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with fewer channels and larger images."""
        size = self.block_size if isinstance(self.block_size, int) else self.block_size[0]
        return F.pixel_shuffle(x, size)


class DepthToSpaceDCRMode(nn.Module):
    """Channels moved into square blocks of space, depth-column-row."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with fewer channels and larger images."""
        batch, channels, height, width = x.shape
        size = self.block_size
        blocks = x.reshape(batch, size, size, channels // size**2, height, width)
        return blocks.permute(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * size, width * size)


class ScatterElements(nn.Module):
    """Values written to indices along an axis."""

    def __init__(self, dim: int, reduce: str | None = None) -> None:
        super().__init__()
        self.dim, self.reduce = dim, reduce

    def forward(self, x: torch.Tensor, index: torch.Tensor, src: Any) -> torch.Tensor:
        """``x`` with ``src`` at ``index``."""
        if self.reduce is None:
            return torch.scatter(x, self.dim, index, src)
        return torch.scatter(x, self.dim, index, src, reduce=self.reduce)


class OneHot(nn.Module):
    """One-hot vectors of indices."""

    def __init__(self, num_classes: int, off_value: Any, on_value: Any) -> None:
        super().__init__()
        self.num_classes, self.off_value, self.on_value = num_classes, off_value, on_value

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The vectors along a last axis."""
        hot = F.one_hot(inputs.to(torch.int64), self.num_classes)
        return self.off_value + hot * (self.on_value - self.off_value)


class CustomGather(nn.Module):
    """Slices picked by indices along an axis."""

    def forward(self, data: torch.Tensor, indices: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """The slices, in the shape of the indices; negative indices count from the end."""
        axis = axis % data.dim()
        picked = torch.index_select(data, axis, indices.flatten() % data.shape[axis])
        return picked.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])


class Cast(nn.Module):
    """A change of dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in the dtype."""
        return x.type(self.dtype)


class GatherNd(nn.Module):
    """Elements, or slices, picked by tuples of indices, as ONNX GatherND.

    Args:
        batch_dim: leading axes that data and indices share.
    """

    def __init__(self, batch_dim: int) -> None:
        super().__init__()
        self.batch_dims = batch_dim

    def forward(self, data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """``data`` at ``indices``, whose last axis holds the tuples: ``[*indices.shape[:-1], *rest of data]``."""
        rank = indices.dim() - 1
        shared = [
            torch.arange(data.shape[axis], device=data.device).reshape([-1 if i == axis else 1 for i in range(rank)])
            for axis in range(self.batch_dims)
        ]
        return data[(*shared, *indices.to(torch.int64).unbind(-1))]


class ScatterND(nn.Module):
    """Values written to tuples of indices, as ONNX ScatterND.

    Args:
        reduction: 0 replaces, 1 adds, 2 multiplies, once per place.
    """

    def __init__(self, reduction: int = 0) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        """``data`` with ``updates`` at ``indices``, whose last axis holds the tuples."""
        places, written = indices.to(torch.int64).unbind(-1), data.clone()
        if self.reduction:
            combine = torch.add if self.reduction == 1 else torch.mul
            updates = combine(data[places], updates)
        written[places] = updates
        return written


class RoiAlign(nn.Module):
    """Means of bilinear samples in the bins of boxes, as ONNX RoiAlign of mode ``output_half_pixel``.

    Source: He et al. 2017, arXiv:1703.06870, section 3; coordinates are not shifted by half a pixel.

    Args:
        output_size: rows and columns of bins, or one number for both.
        spatial_scale: pixels of the feature map per unit of the boxes.
        sampling_ratio: samples of a bin along each axis; 0 or less takes as many as cover its pixels.
    """

    def __init__(self, output_size: Any, spatial_scale: float, sampling_ratio: int) -> None:
        super().__init__()
        self.output_size, self.spatial_scale, self.sampling_ratio = output_size, spatial_scale, sampling_ratio

    def forward(self, inp: torch.Tensor, roi: torch.Tensor, batch_indices: torch.Tensor) -> torch.Tensor:
        """``[boxes, channels, rows, columns]`` of a feature map ``[batch, channels, height, width]``.

        Args:
            inp: the feature map.
            roi: boxes ``x1, y1, x2, y2``.
            batch_indices: sample of each box.
        """
        size = self.output_size
        rows, columns = (size, size) if isinstance(size, int) else size
        pooled = [
            torch.einsum(
                "ph,chw,qw->cpq",
                self._means(y1, y2, rows, inp.shape[2]),
                inp[index],
                self._means(x1, x2, columns, inp.shape[3]),
            )
            for index, (x1, y1, x2, y2) in zip(batch_indices.to(torch.int64), roi * self.spatial_scale, strict=True)
        ]
        return torch.stack(pooled) if pooled else inp.new_zeros(0, inp.shape[1], rows, columns)

    def _means(self, low: torch.Tensor, high: torch.Tensor, bins: int, pixels: int) -> torch.Tensor:
        """Weights of the pixels of an axis in each bin between two ends: ``[bins, pixels]``."""
        length = (high - low).clamp(min=1)
        count = self.sampling_ratio if self.sampling_ratio > 0 else int((length / bins).ceil())
        steps = torch.arange(bins * count, device=low.device, dtype=low.dtype) + 0.5
        at = low + steps * length / (bins * count)
        distance = at.clamp(0, pixels - 1)[:, None] - torch.arange(pixels, device=low.device)
        inside = ((at >= -1) & (at <= pixels))[:, None]
        return (F.relu(1 - distance.abs()) * inside).reshape(bins, count, pixels).mean(1)


class HadamardRotation(nn.Module):
    """Groups of the last axis times a Hadamard matrix of the largest power of two that divides it.

    Args:
        size: of the last axis.
        scale: factor of the products; by default the one that keeps lengths.
    """

    hadamard: torch.Tensor

    def __init__(self, size: int, scale: float | None = None) -> None:
        super().__init__()
        order = size & -size
        signs, twice = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        while len(signs) < order:  # Sylvester's construction
            signs = torch.kron(twice, signs)
        self.register_buffer("hadamard", signs)
        self.scale = scale or order**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with every group rotated."""
        groups = x.unflatten(-1, (-1, self.hadamard.shape[0]))
        return (F.linear(groups, self.hadamard) * self.scale).reshape(x.shape)


class RotaryEmbedding(nn.Module):
    """Pairs of the first elements of heads turned by angles of their positions, as ONNX RotaryEmbedding.

    Source: Su et al. 2021, arXiv:2104.09864.

    Args:
        interleaved: pairs are neighbours; otherwise the halves are paired.
        rotary_embedding_dim: elements that are turned.
        head_size: elements of a head; those after them stay.
    """

    def __init__(self, interleaved: bool, rotary_embedding_dim: int, head_size: int) -> None:
        super().__init__()
        self.interleaved, self.rotary_embedding_dim, self.head_size = interleaved, rotary_embedding_dim, head_size

    def forward(
        self,
        x: torch.Tensor,
        cos_cache: torch.Tensor,
        sin_cache: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x``, ``[batch, heads, length, head_size]``, turned.

        Args:
            x: the heads.
            cos_cache, sin_cache: ``[batch, length, rotary_embedding_dim / 2]``, or ``[positions, ...]`` with positions.
            position_ids: ``[batch, length]``.
        """
        if position_ids is not None:
            cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
        cos, sin = cos_cache.unsqueeze(1), sin_cache.unsqueeze(1)
        turned, rest = x.split([self.rotary_embedding_dim, self.head_size - self.rotary_embedding_dim], -1)
        pairs = (-1, 2) if self.interleaved else (2, -1)
        axis = -1 if self.interleaved else -2
        first, second = turned.unflatten(-1, pairs).unbind(axis)
        made = torch.stack((cos * first - sin * second, sin * first + cos * second), axis).flatten(-2)
        return torch.cat((made, rest), -1)


def _of(name: str, function: Callable[..., Any]) -> type[nn.Module]:
    """A module class that calls a function."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return type(name, (nn.Module,), {"forward": forward, "__module__": __name__, "__doc__": f"``{name}`` as a module."})


class Concat(nn.Module):
    """``torch.cat`` of its inputs along an axis."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self._axis = axis

    @property
    def axis(self) -> int:
        """The axis."""
        return self._axis

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The inputs, one after the other."""
        return torch.cat(args, dim=self._axis)


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, input_shape: Any, axes: Any, epsilon: float) -> None:
        super().__init__()
        self.epsilon, self.axes = epsilon, axes
        sizes = [input_shape[axis] for axis in axes]
        self.normalize_over_last_dim = list(axes)[-1] in (-1, len(input_shape) - 1)
        self.weight = nn.Parameter(torch.ones(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` by its root mean square over the axes, times the weight."""
        return x * torch.rsqrt(x.square().mean(tuple(self.axes), keepdim=True) + self.epsilon) * self.weight


class DynamicConv2d(nn.Module):
    """A convolution whose weight is an input."""

    def __init__(self, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> None:
        super().__init__()
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The convolution of ``x``."""
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


_UNARY: dict[str, Callable[..., Any]] = {
    "Sin": torch.sin, "Cos": torch.cos, "Asin": torch.asin, "Atan": torch.atan, "Erf": torch.erf,
    "Exponential": torch.exp, "Log": torch.log, "Abs": torch.abs, "Neg": torch.neg, "Round": torch.round,
    "Square": torch.square, "Sqrt": torch.sqrt, "RSqrt": torch.rsqrt, "Norm": torch.norm, "Normalize": F.normalize,
    "Max": torch.max, "AMax": torch.amax, "Min": torch.min, "AMin": torch.amin, "Argmin": torch.argmin,
    "Argmax": torch.argmax, "Mean": torch.mean, "Sum": torch.sum, "Prod": torch.prod, "CumSum": torch.cumsum,
    "Split": torch.split, "Reshape": torch.reshape, "Permute": torch.permute, "Select": torch.select,
    "Chunk": torch.chunk, "IndexSelect": torch.index_select, "Gather": torch.gather,
    "ElementwiseCeil": torch.ceil, "ElementwiseFloor": torch.floor, "Pad": F.pad, "Interpolate": F.interpolate,
    "MaxPool2d": F.max_pool2d, "AvgPool2d": F.avg_pool2d, "AdaptiveAvgPool2d": F.adaptive_avg_pool2d,
    "GroupNorm": F.group_norm, "LogicalNot": torch.logical_not, "Tile": torch.tile,
    "Squeeze": torch.squeeze, "Unsqueeze": torch.unsqueeze,
    "Expand": lambda tensor, *sizes: tensor.expand(*sizes),
    "StridedSlice": lambda tensor, ranges: tensor[tuple([slice(*one) for one in ranges])],
    "NullRequant": lambda tensor, shape: tensor,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Subtract": torch.sub, "Multiply": torch.mul, "Divide": torch.div, "Pow": torch.pow,
    "FloorDivide": torch.floor_divide, "Remainder": torch.remainder, "Fmod": torch.fmod, "Outer": torch.outer,
    "MatMul": torch.matmul, "Bmm": torch.bmm, "Maximum": torch.maximum, "Minimum": torch.minimum,
    "LogicalOr": torch.logical_or, "LogicalAnd": torch.logical_and, "Greater": torch.gt, "Less": torch.lt,
    "GreaterEqual": torch.ge, "LessEqual": torch.le, "Equal": torch.eq, "NotEqual": torch.ne,
    "GridSample": F.grid_sample,
}  # fmt: skip
_TERNARY: dict[str, Callable[..., Any]] = {
    "Baddbmm": torch.baddbmm, "Addmm": torch.addmm, "Where": torch.where,
    "ScaledDotProductAttention": F.scaled_dot_product_attention,
    "IndexPut": torch.index_put, "MaskedFill": torch.masked_fill, "DynamicLinear": F.linear,
}  # fmt: skip


class ComposedAttention(nn.MultiheadAttention):
    """The steps of attention, between modules for its products and its softmax that a subclass sets.

    Attributes:
        qk_matmul, softmax, av_matmul: of scaled queries and keys, of the product with masks, of weights and values.
    """

    qk_matmul: nn.Module
    softmax: nn.Module
    av_matmul: nn.Module

    def heads_of(self, taken: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the heads, of three inputs ``[batch, length, width]``."""
        q, k, v = (self._heads(x) for x in self._projected(taken))
        return q, k, v

    def attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any, padding: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The projected result, ``[batch, length, embed_dim]``, and the attention weights of all heads."""
        mask = self._mask(attn_mask, padding, k.shape[-2], q)
        scores = self.qk_matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
        weights = F.dropout(self.softmax(scores if mask is None else scores + mask), self.dropout, self.training)
        return self.out_proj(self.av_matmul(weights, v).transpose(1, 2).flatten(2)), weights

    def _projected(self, taken: Any) -> list[torch.Tensor]:
        """Queries, keys and values, ``[batch, length, embed_dim]``, with the rows that the module adds."""
        own: Any = self
        several = own.in_proj_weight.chunk(3) if own.in_proj_weight is not None else (
            own.q_proj_weight, own.k_proj_weight, own.v_proj_weight)  # fmt: skip
        biases = (None,) * 3 if own.in_proj_bias is None else own.in_proj_bias.chunk(3)
        found = [F.linear(x, weight, bias) for x, weight, bias in zip(taken, several, biases, strict=True)]
        for i, extra in ((1, own.bias_k), (2, own.bias_v)):
            if extra is not None:
                found[i] = torch.cat([found[i], extra.expand(len(found[i]), 1, -1)], 1)
            if own.add_zero_attn:
                found[i] = F.pad(found[i], (0, 0, 0, 1))
        return found

    def swapped(self, x: torch.Tensor) -> torch.Tensor:
        """The first two axes in the other order, unless the batch is first outside too."""
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, embed_dim]`` as ``[batch, heads, length, head_dim]``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, attn_mask: Any, padding: Any, length: int, q: torch.Tensor) -> torch.Tensor | None:
        """What is added to the product, ``[batch or 1, heads or 1, queries or 1, length]``; to rows of the module's own: 0."""
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        padding = None if padding is None else padding.reshape(-1, 1, 1, padding.shape[-1])
        found = None
        for mask in (mask for mask in (attn_mask, padding) if mask is not None):
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            mask = F.pad(mask, (0, length - mask.shape[-1]))
            found = mask if found is None else found + mask
        return found


#: number of tensors that it computes with -> name -> what it computes
_FUNCTIONS: dict[int, dict[str, Callable[..., Any]]] = {
    1: _UNARY,
    2: _BINARY,
    3: _TERNARY,
    5: {"BatchNorm": F.batch_norm},
}
_CLASSES: tuple[type[nn.Module], ...] = (
    CustomSiLU, ChannelShuffle, DepthToSpaceCRDMode, DepthToSpaceDCRMode, ScatterElements, OneHot, CustomGather, Cast,
    GatherNd, ScatterND, RoiAlign, HadamardRotation, RotaryEmbedding, Concat, RmsNorm, DynamicConv2d,
)  # fmt: skip
#: name -> class
FUNCTION_MODULES: dict[str, type[nn.Module]] = {
    **{name: _of(name, function) for table in _FUNCTIONS.values() for name, function in table.items()},
    **{kind.__name__: kind for kind in _CLASSES},
}
#: name -> number of tensors, of those that are called with a function
TENSORS = {name: count for count, table in _FUNCTIONS.items() for name in table}


def __getattr__(name: str) -> Any:
    if name in FUNCTION_MODULES:
        return FUNCTION_MODULES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
