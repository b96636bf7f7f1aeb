"""The copy of a user's model that a simulation works on: compiled parts unwrapped, lazy layers made."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bitwright.errors import ModelError
from bitwright.torch.calls.batches import as_call, evaluation, model_device, to_device
from bitwright.torch.calls.trees import ATOMS, tensors_in, walk_modules
from bitwright.torch.interception.forwards import interceptions
from bitwright.torch.simulation.simulate import Simulator

_CONTAINERS = (dict, OrderedDict, list, set)
_TABLES = ("_parameters", "_buffers", "_modules")
_ORIGINAL = "_orig_mod"  # where torch.compile keeps the module that it was given


def adopt(model: nn.Module, example: Any, *, in_place: bool) -> nn.Module:
    """A copy of ``model``, or ``model`` itself, ready to be simulated.

    - A module from ``torch.compile`` is replaced by the one it was made from: compiled code is not seen.
    - What old ``weight_norm``, ``spectral_norm`` and ``torch.nn.utils.prune`` compute before each forward is a tensor that
      cannot be copied; it is copied as a value.
    - Lazy layers get their parameters from one run on ``example``.

    Raises:
        ModelError: a part is compiled and the model is to be simulated in place; lazy layers cannot be made.
    """
    model = _unwrapped(model)
    compiled = [path for path, module in walk_modules(model) if _compiled(module)]
    if compiled and in_place:
        raise ModelError(
            compiled[0] or type(model).__name__,
            "it is compiled (torch.compile), and compiled code cannot be seen by a simulation in place",
            "leave out in_place=True: the copy that is simulated is not compiled",
        )
    own = model if in_place else copied(model)
    for _, module in list(walk_modules(own)):
        if vars(module).get("_compiled_call_impl") is not None:
            module._compiled_call_impl = None
        for name, child in module._modules.items():
            if child is not None and _unwrapped(child) is not child:
                module._modules[name] = _unwrapped(child)
    _make_lazy(own, example)
    return own


def _unwrapped(module: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given; a TorchScript module, whose table of modules is another, is refused later."""
    while isinstance(module._modules, dict) and isinstance(inner := module._modules.get(_ORIGINAL), nn.Module):
        module = inner
    return module


def _compiled(module: nn.Module) -> bool:
    return _unwrapped(module) is not module or vars(module).get("_compiled_call_impl") is not None


def copied(model: nn.Module) -> nn.Module:
    """What ``copy.deepcopy`` makes of a model, without its recursion and without its look at every number.

    Modules are copied one by one, children first, so that the copy of a parent finds them in the memo. A class that has a
    say in how it is copied is left to ``copy.deepcopy``.
    """
    memo = uncopied(model)
    plain: dict[type, bool] = {}
    for _, module in reversed(list(walk_modules(model))):
        kind = type(module)
        if kind not in plain:
            plain[kind] = _is_copied_by_state(kind)
        if plain[kind] and id(module) not in memo:
            new = memo[id(module)] = kind.__new__(kind)
            new.__setstate__(_copied_state(module.__getstate__(), memo))
    return copy.deepcopy(model, memo)


def _copied_state(state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """The attributes of a module, nearly all of which are atoms or empty; of the tables the values are copied one by one."""
    new = {}
    for name, value in state.items():
        kind = type(value)
        if kind in ATOMS:
            new[name] = value
        elif kind in _CONTAINERS and not value:
            new[name] = memo.setdefault(id(value), kind())
        elif kind is dict and name in _TABLES:
            new[name] = memo[id(value)] = {key: _copied_entry(entry, memo) for key, entry in value.items()}
        else:
            new[name] = copy.deepcopy(value, memo)
    return new


def _copied_entry(entry: Any, memo: dict[int, Any]) -> Any:
    """What ``copy.deepcopy`` makes of a parameter, a buffer or a module, found without its search for how to do it."""
    if entry is None or id(entry) in memo:
        return memo.get(id(entry))
    if type(entry) is nn.Parameter:
        return entry.__deepcopy__(memo)
    if type(entry) is not torch.Tensor or not _is_storage_alone(entry):
        return copy.deepcopy(entry, memo)
    storage = entry.untyped_storage().__deepcopy__(memo)  # the same for all tensors that share it
    new = memo[id(entry)] = entry.new_empty(())
    return new.set_(storage, entry.storage_offset(), entry.size(), entry.stride())


def _is_storage_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its place in a storage, with nothing attached."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.grad is None
        and not vars(tensor)
    )


def _is_copied_by_state(kind: type) -> bool:
    """Whether ``copy.deepcopy`` copies the attributes of an object of this class, and nothing else."""
    same = ("__reduce_ex__", "__reduce__", "__getstate__")
    hooks = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
    return (
        all(getattr(kind, name) is getattr(nn.Module, name) for name in same)
        and not any(hasattr(kind, name) for name in hooks)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def uncopied(model: nn.Module) -> dict[int, Any]:
    """For the memo of ``copy.deepcopy``, by id: what it refuses to copy, tensors that autograd made and TorchScript functions.

    Both stand in attributes of modules; of a tensor the value is copied.
    """
    found: dict[int, Any] = {}
    for value in _attributes(model):
        if isinstance(value, torch.jit.ScriptFunction):  # noqa: TID251, which has no state
            found[id(value)] = value
        made = (tensor for tensor in tensors_in(value) if not tensor.is_leaf)
        found.update((id(tensor), tensor.detach().clone()) for tensor in made)
    return found


def _attributes(model: nn.Module) -> Iterator[Any]:
    """What the modules hold beside parameters, buffers and modules, and is neither an atom nor empty."""
    for _, module in walk_modules(model):
        for name, value in vars(module).items():
            empty = type(value) in ATOMS or (type(value) in _CONTAINERS and not value)
            if not empty and name not in _TABLES:
                yield value


def _make_lazy(model: nn.Module, example: Any) -> None:
    lazy = [
        f"{path}.{name}" if path else name
        for path, module in walk_modules(model)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and torch.nn.parameter.is_lazy(tensor)
    ]
    if not lazy:
        return
    args, kwargs = as_call(to_device(example, model_device(model)))
    try:
        with torch.no_grad(), evaluation(model):
            model(*args, **kwargs)
    except Exception as error:
        raise ModelError(
            lazy[0],
            f"this parameter of a lazy module does not exist yet, and the model fails on the example input that would make "
            f"it: {type(error).__name__}: {error}",
            "run the model once on a valid input, and pass that as dummy_input",
        ) from error


def refuse_simulated(model: nn.Module) -> None:
    """Refuse a model that is simulated already."""
    for path, module in walk_modules(model):
        if any(isinstance(forward.owner.handler, Simulator) for forward in interceptions(module)):
            raise ModelError(
                path or type(model).__name__,
                "it is simulated already: it belongs to a QuantizationSimModel, whose quantizers would count as its own code",
                "pass the float model that the simulation was made from; copy.deepcopy(sim).remove() returns it",
            )


def require_module(model: object) -> None:
    """Refuse what is not a module.

    Raises:
        ModelError: with the way to quantize an ONNX file.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model",
            f"it is a {type(model).__name__}, not a torch.nn.Module",
            "pass the module itself; for an ONNX file use bitwright.onnx.QuantizationSimModel",
        )
