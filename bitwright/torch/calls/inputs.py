"""Calls of a model on users' inputs; iteration over tensors in nested arguments and modules in a tree, without recursion."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.errors import BitwrightError, CalibrationError, ConfigError, ModelError

#: types of arguments that hold nothing; by far most arguments of a call are of these, or tensors
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout))


#: what transformers keeps keys, values and other states of layers in: objects whose attributes hold them
_CACHES = frozenset(("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin"))
#: attribute of a layer of a cache -> what ONNX files call it
_CACHED = {"keys": "key", "values": "value"}


def _is_cache(obj: object) -> bool:
    kind: Any = type(obj)
    return _is_cache_type(kind)


@lru_cache
def _is_cache_type(kind: Any) -> bool:
    return any(base.__name__ in _CACHES and base.__module__ == "transformers.cache_utils" for base in kind.__mro__)


def _cached(cache: Any) -> list[tuple[str, Any]]:
    """The layers of a cache, then its attributes, or the attributes of a layer: ``0.key``, ``0.value``."""
    held = {name: value for name, value in vars(cache).items() if not name.startswith("_")}
    layers = [(str(i), layer) for i, layer in enumerate(held.pop("layers", ()))]
    return layers + [(_CACHED.get(name, name), value) for name, value in held.items()]


def _rebuilt_cache(cache: Any, values: list[Any]) -> Any:
    new = copy.copy(cache)
    attributes = [name for name in vars(cache) if not name.startswith("_") and name != "layers"]
    count_of_layers = len(values) - len(attributes)
    vars(new).update(zip(attributes, values[count_of_layers:], strict=True))
    if "layers" in vars(cache):
        new.layers = values[:count_of_layers]
    return new


def caches_in(obj: Any) -> list[Any]:
    """The caches of transformers in nested tuples, lists, mappings and dataclasses, in order."""
    found: list[Any] = []
    stack = [obj]
    while stack:
        item = stack.pop()
        if type(item) in ATOMS or isinstance(item, torch.Tensor):
            continue
        if _is_cache(item):
            found.append(item)
        else:
            stack.extend(reversed([value for _, value in _children(item) or ()]))
    return found


def _children(obj: Any) -> list[tuple[str, Any]] | None:
    if isinstance(obj, Mapping):
        return [(str(k), v) for k, v in obj.items()]
    if isinstance(obj, (list, tuple)):
        names = getattr(obj, "_fields", None) or count()  # what a class of the user's calls its length is not asked
        return [(str(n), v) for n, v in zip(names, obj, strict=False)]
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        # what is stored, not what a property of the same name computes or refuses
        held = getattr(obj, "__dict__", {})
        return [
            (f.name, held[f.name] if f.name in held else getattr(obj, f.name, None)) for f in dataclasses.fields(obj)
        ]
    if isinstance(obj, nn.utils.rnn.PackedSequence):
        return [("data", obj.data)]
    return None


def _children_or_cached(obj: Any, caches: bool) -> list[tuple[str, Any]] | None:
    if type(obj) in ATOMS:
        return None
    return _cached(obj) if caches and _is_cache(obj) else _children(obj)


def _values(obj: Any) -> Collection[Any] | None:
    """Values of a container, without names and caches; ``None`` for other objects."""
    kind = type(obj)
    if kind is tuple or kind is list:
        return obj
    if kind is dict or kind is OrderedDict:
        return obj.values()
    children = _children(obj)
    return None if children is None else [value for _, value in children]


def flatten_tensors(obj: Any, name: str = "", *, caches: bool = False) -> list[tuple[str, torch.Tensor]]:
    """``(path, tensor)`` of every tensor in nested tuples, lists, mappings and dataclasses, in order.

    ``name`` is the path of ``obj`` itself: ``("x", tensor)``, ``("batch.image", tensor)``. With ``caches`` also those of the
    caches of transformers: ``("past_key_values.0.key", tensor)``; a model returns its cache whether or not anybody wants it.
    """
    found: list[tuple[str, torch.Tensor]] = []
    stack: list[tuple[str, Any]] = [(name, obj)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append((path or "output", item))
            continue
        children = _children_or_cached(item, caches)
        if children:
            prefix = f"{path}." if path else ""
            held = [(prefix + key, child) for key, child in children if type(child) not in ATOMS]
            stack.extend(reversed(held))
    return found


def tensors_in(obj: Any) -> list[torch.Tensor]:
    """The tensors of :func:`flatten_tensors` without their paths."""
    if isinstance(obj, torch.Tensor):
        return [obj]
    found: list[torch.Tensor] = []
    stack: list[Any] = [obj]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
            continue
        values = None if type(item) in ATOMS else _values(item)
        if values:
            stack.extend(reversed([value for value in values if type(value) not in ATOMS]))
    return found


def _values_to_map(obj: Any, leaf: type) -> Collection[Any] | None:
    """Values of a container or cache that may hold tensors."""
    if isinstance(obj, (leaf, torch.Tensor, nn.utils.rnn.PackedSequence)):
        return None
    return [value for _, value in _cached(obj)] if _is_cache(obj) else _values(obj)


def _is_constant(obj: Any) -> bool:
    """Whether an object is an atom or a tuple of atoms, such as strides and shapes, which hold no tensors."""
    kind = type(obj)
    return kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, obj)))


def _containers(values: Iterable[Any], leaf: type) -> list[Any]:
    """The ``values`` that may hold tensors to replace."""
    return [v for v in values if not (isinstance(v, leaf) or _is_constant(v))]


def map_tensors(obj: Any, function: Callable[[Any], Any], leaf: type = torch.Tensor) -> Any:
    """``obj`` with every tensor (or instance of ``leaf``) replaced; containers and caches are rebuilt bottom-up."""
    if isinstance(obj, leaf):
        return function(obj)
    order: list[tuple[Any, Collection[Any]]] = []
    stack = [obj]
    while stack:
        item = stack.pop()
        values = _values_to_map(item, leaf)
        if values is not None:
            order.append((item, values))
            stack.extend(_containers(values, leaf))
    rebuilt: dict[int, Any] = {}
    for item, values in reversed(order):
        # containers among them come later in `order`, so they are rebuilt already; atoms never are
        new = [function(v) if isinstance(v, leaf) else rebuilt.get(id(v), v) for v in values]
        same = isinstance(item, tuple) and all(a is b for a, b in zip(new, values, strict=False))
        rebuilt[id(item)] = item if same else _rebuild(item, new)
    return rebuilt.get(id(obj), obj)


def map_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], function: Callable[[Any], Any], leaf: type = torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """:func:`map_tensors` of the arguments of a call, nearly all of which are tensors and atoms themselves."""

    def mapped(value: Any) -> Any:
        if isinstance(value, leaf):
            return function(value)
        return value if _is_constant(value) else map_tensors(value, function, leaf)

    return tuple([mapped(value) for value in args]), {name: mapped(v) for name, v in kwargs.items()}


def _rebuild(item: Any, values: list[Any]) -> Any:
    kind = type(item)
    if _is_cache(item):
        return _rebuilt_cache(item, values)
    if kind is tuple:
        return tuple(values)
    if kind is list:
        return values
    if isinstance(item, Mapping):
        pairs = zip(item.keys(), values, strict=True)
        return dict(pairs) if type(item) is dict else type(item)(pairs)  # type: ignore[call-arg]
    if isinstance(item, tuple):
        return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    if isinstance(item, list):
        return list(values)
    return dataclasses.replace(item, **dict(zip((f.name for f in dataclasses.fields(item)), values, strict=True)))


class NotOfModel:
    """Mixin of modules that expose quantizers inside a model; walks over the model skip them."""


@contextmanager
def model_alone(root: nn.Module) -> Iterator[None]:
    """Take all :class:`NotOfModel` out of the modules of a model inside the block."""
    taken = [
        (module, name, child)
        for _, module in walk_modules(root)
        for name, child in module._modules.items()
        if isinstance(child, NotOfModel)
    ]
    for module, name, _ in taken:
        del module._modules[name]
    try:
        yield
    finally:
        for module, name, child in taken:
            module._modules[name] = child


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no submodules that belong to the model."""
    return all(child is None or isinstance(child, NotOfModel) for child in module._modules.values())


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
        if module._modules:
            stack.extend(
                (f"{path}.{name}" if path else name, child)
                for name, child in reversed(module._modules.items())
                if child is not None and not isinstance(child, NotOfModel)
            )


def named_state(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of every parameter and buffer, in module order; a tied tensor appears under each name."""
    for path, module in walk_modules(root):
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield prefix + name, tensor


class Inputs(NamedTuple):
    """Positional and keyword arguments of one call: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class Continuation(Inputs):
    """An input with caches that a forward writes into: every run gets a copy of its tensors."""

    __slots__ = ()


def refuse_providers(providers: Any) -> None:
    """Refuse ``providers``, which only ONNX models take.

    Raises:
        ConfigError: it is given.
    """
    if providers is not None:
        raise ConfigError(
            "providers",
            f"{providers!r} is given for a PyTorch module, which runs where its parameters are",
            "leave it out; move the module: model.to(device)",
        )


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of one input: a tuple or list is positional arguments, a dict keyword arguments.

    Caches are copied, around the same tensors: a forward lengthens the one that it gets, and an input is run more than once.
    """
    if isinstance(batch, Continuation):
        batch = map_tensors(batch, torch.clone)
    elif caches_in(batch):
        batch = map_tensors(batch, lambda tensor: tensor)
    if isinstance(batch, Inputs):
        return tuple(batch.args), dict(batch.kwargs)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return tuple(batch), {}
    return (batch,), {}


def as_example(model: nn.Module, example: Any) -> Any:
    """An example as scripts for AIMET give it, in the form of :func:`as_call`.

    A list is positional arguments; a dict whose keys ``model.forward`` has no parameters for is its one argument; and an empty
    dict at the end, which torch's older exporter needs after a dict, is left out.
    """
    if isinstance(example, list):
        return tuple(example)
    if isinstance(example, tuple) and len(example) > 1 and example[-1] == {} and isinstance(example[-2], dict):
        return example[:-1]
    if isinstance(example, dict):
        parameters = inspect.signature(model.forward).parameters
        named = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return example if named or example.keys() <= parameters.keys() else (example,)
    return example


#: problem and remedy where a model fails on arrays
ARRAYS = ("it holds numpy arrays, and PyTorch models take tensors", "convert them: torch.from_numpy(array)")


def holds_arrays(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument of a call is a numpy array, or a list or tuple of them."""
    found = [*args, *kwargs.values()]
    found += [part for item in found if isinstance(item, (list, tuple)) for part in item]
    return any(isinstance(item, np.ndarray) for item in found)


def run_batch(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What ``model`` returns for the arguments of a batch.

    Raises:
        CalibrationError: the model fails, and an argument is a numpy array. Other errors of the model are left as they are.
    """
    try:
        return model(*args, **kwargs)
    except BitwrightError:
        raise
    except Exception as error:
        if holds_arrays(args, kwargs):
            raise CalibrationError("batch", *ARRAYS) from error
        raise


@contextmanager
def trainable_tensors() -> Iterator[None]:
    """Create ordinary tensors also inside ``torch.inference_mode``, whose own tensors cannot be trained."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def model_device(model: nn.Module) -> torch.device | None:
    """The device of the model's parameters and buffers, when they agree on one."""
    devices = {
        t.device
        for _, m in walk_modules(model)
        for t in (*m._parameters.values(), *m._buffers.values())
        if t is not None
    }
    return devices.pop() if len(devices) == 1 else None


@contextmanager
def same_draws() -> Iterator[None]:
    """Seed the default generators alike in every such block; the caller's random state is restored.

    What a forward draws while a model is captured may be a constant in the file, which is compared with what a run drew.
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        torch.manual_seed(0)
        yield


def to_device(batch: Any, device: torch.device | None) -> Any:
    """``batch`` with its tensors on ``device``; the object itself when they are there already."""
    if device is None or all(t.device == device for _, t in flatten_tensors(batch, caches=True)):
        return batch
    try:
        return map_tensors(batch, lambda t: t.to(device))
    except (NotImplementedError, RuntimeError) as error:
        found = ", ".join(sorted({str(t.device) for _, t in flatten_tensors(batch, caches=True)}))
        raise ModelError(
            "input",
            f"its tensors are on {found} and cannot be moved to the model's device, {device}: {error}",
            f"create the input on {device}, or move the model with model.to(...)",
        ) from error


def outputs_of(model: nn.Module, batch: Any) -> list[NDArray[Any]]:
    """The tensors that ``model`` returns for ``batch``, in eval mode, as arrays; half precision as float32."""
    return [array for _, array in named_outputs_of(model, batch)]


def named_outputs_of(model: nn.Module, batch: Any) -> list[tuple[str, NDArray[Any]]]:
    """Output tensors with the path of each in the result: ``logits``, ``output[1].boxes``."""
    args, kwargs = as_call(to_device(batch, model_device(model)))
    with torch.no_grad(), evaluation(model):
        return named_arrays(run_batch(model, args, kwargs))


def named_arrays(output: Any) -> list[tuple[str, NDArray[Any]]]:
    """The tensors of what a model returned, with their paths in it, as arrays; half precision as float32."""
    found = [(name, tensor.detach().cpu()) for name, tensor in flatten_tensors(output)]
    half = (torch.float16, torch.bfloat16)
    return [(_path(name), (tensor.float() if tensor.dtype in half else tensor).numpy()) for name, tensor in found]


def _path(name: str) -> str:
    first, dot, rest = name.partition(".")
    return f"output[{first}]{dot}{rest}" if first.isdigit() else name


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Set every module to ``eval`` inside the block, and restore each one's mode."""
    training = [module for _, module in walk_modules(model) if module.training]  # others are not written to
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def smallest_input(layers: Sequence[nn.Module]) -> torch.Tensor:
    """An input that all of ``layers``, one after the other, can run on: zeros, a batch of two.

    Raises:
        ModelError: there is no layer with a weight among them whose inputs are known.
    """
    weighted: list[Any] = [m for m in layers if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))]
    if not weighted:
        raise ModelError(
            "layers",
            f"{', '.join(type(layer).__name__ for layer in layers)}: no Conv, ConvTranspose or Linear among them",
            "name the layer whose batch norm it is",
        )
    first = weighted[0]
    channels = first.in_features if isinstance(first, nn.Linear) else first.in_channels
    size = [1] * (first.weight.dim() - 2)
    for layer in reversed(weighted):
        for axis in range(len(size) if not isinstance(layer, (nn.Linear, nn.modules.conv._ConvTransposeNd)) else 0):
            reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
            size[axis] = (size[axis] - 1) * layer.stride[axis] + reach
    return torch.zeros((2, channels, *size), dtype=first.weight.dtype, device=first.weight.device)
