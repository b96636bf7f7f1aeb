"""Calling a model on whatever a user hands over as one input, and showing progress over many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.errors import ConfigError, ModelError
from bitwright.torch.calls.trees import flatten_tensors, map_tensors, walk_modules


class Inputs(NamedTuple):
    """One input of a forward that takes both: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def refuse_providers(providers: Any) -> None:
    """Refuse what only ONNX models have.

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
    """``(args, kwargs)`` of one input: a tuple or list is positional arguments, a dict keyword arguments."""
    if isinstance(batch, Inputs):
        return tuple(batch.args), dict(batch.kwargs)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return tuple(batch), {}
    return (batch,), {}


#: problem and remedy where a model fails on arrays
ARRAYS = ("it holds numpy arrays, and PyTorch models take tensors", "convert them: torch.from_numpy(array)")


def holds_arrays(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument of a call is a numpy array, or a list or tuple of them."""
    found = [*args, *kwargs.values()]
    found += [part for item in found if isinstance(item, (list, tuple)) for part in item]
    return any(isinstance(item, np.ndarray) for item in found)


@contextmanager
def trainable_tensors() -> Iterator[None]:
    """Make ordinary tensors inside ``torch.inference_mode`` as well; its own take part in no training ever after."""
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


def to_device(batch: Any, device: torch.device | None) -> Any:
    """``batch`` with its tensors on ``device``; the object itself when they are there already."""
    if device is None or all(t.device == device for _, t in flatten_tensors(batch)):
        return batch
    try:
        return map_tensors(batch, lambda t: t.to(device))
    except (NotImplementedError, RuntimeError) as error:
        found = ", ".join(sorted({str(t.device) for _, t in flatten_tensors(batch)}))
        raise ModelError(
            "input",
            f"its tensors are on {found} and cannot be moved to the model's device, {device}: {error}",
            f"create the input on {device}, or move the model with model.to(...)",
        ) from error


def outputs_of(model: nn.Module, batch: Any) -> list[NDArray[Any]]:
    """The tensors that ``model`` returns for ``batch``, in eval mode, as arrays; half precision as float32."""
    return [array for _, array in named_outputs_of(model, batch)]


def named_outputs_of(model: nn.Module, batch: Any) -> list[tuple[str, NDArray[Any]]]:
    """The same with the path of each in what the model returns: ``logits``, ``output[1].boxes``."""
    args, kwargs = as_call(to_device(batch, model_device(model)))
    with torch.no_grad(), evaluation(model):
        found = [(name, tensor.detach().cpu()) for name, tensor in flatten_tensors(model(*args, **kwargs))]
    half = (torch.float16, torch.bfloat16)
    return [(_path(name), (tensor.float() if tensor.dtype in half else tensor).numpy()) for name, tensor in found]


def _path(name: str) -> str:
    first, dot, rest = name.partition(".")
    return f"output[{first}]{dot}{rest}" if first.isdigit() else name


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Every module in ``eval`` inside the block; each gets its own mode back."""
    training = [module for _, module in walk_modules(model) if module.training]  # others are not written to
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
