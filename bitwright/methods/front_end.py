"""Which front end a model belongs to."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from os import PathLike
from typing import Any, cast

from bitwright.algorithms.front_ends import FrontEnd, Pipeline
from bitwright.core.health.report import HealthReport
from bitwright.errors import ModelError

# Top-level module of a class of models -> the front end that reads it. Classes that users derive from these are found too.
_FRONT_ENDS = {"torch": "torch", "onnx": "onnx", "onnx_ir": "onnx"}


def front_end_of(model: Any) -> FrontEnd:
    """What changes a model, or reads a simulation, of either front end.

    Raises:
        ModelError: it is of neither.
    """
    module = importlib.import_module(f"bitwright.{_name_of(model)}.adapters.opened")
    return cast(FrontEnd, module.FRONT_END)


def health_check_of(model: Any) -> Callable[..., HealthReport]:
    """``check(model, data, providers, threads, progress)`` of a model of either front end.

    Raises:
        ModelError: it is of neither.
    """
    module = importlib.import_module(f"bitwright.{_name_of(model)}.health")
    return cast(Callable[..., HealthReport], module.check_health)


def pipeline_of(model: Any, providers: Any, memory_budget: int | None) -> Pipeline:
    """A model of either front end on its way through :func:`bitwright.quantize`.

    Raises:
        ModelError: it is of neither, or cannot be read.
        ConfigError: an option that its front end does not have.
    """
    name = _name_of(model)
    module = importlib.import_module(f"bitwright.{name}.pipeline")
    return cast(Pipeline, getattr(module, f"{name.title()}Pipeline")(model, providers, memory_budget))


def _name_of(model: Any) -> str:
    if isinstance(model, (str, PathLike)):  # of a file
        return "onnx"
    for cls in type(model).__mro__:
        parts = cls.__module__.split(".")
        name = parts[1] if parts[0] == "bitwright" and len(parts) > 1 else _FRONT_ENDS.get(parts[0])
        if name in ("torch", "onnx"):
            return name
    raise ModelError(
        "model",
        f"a {type(model).__name__} is not a model of PyTorch or ONNX",
        "give a torch.nn.Module, or a loaded ONNX model: onnx.load(path), bitwright.onnx.load_model(path)",
    )
