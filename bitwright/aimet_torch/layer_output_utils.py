"""``aimet_torch.layer_output_utils``: outputs of every layer as files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from bitwright import torch as front
from bitwright.aimet_common.layer_outputs import RawFiles
from bitwright.aimet_torch._core import exported_names, walk_modules
from bitwright.aimet_torch._modules import record_of
from bitwright.errors import ConfigError

__all__ = ["LayerOutput", "LayerOutputUtil", "NamingScheme"]


class NamingScheme(Enum):
    """What files are called after: modules, or tensors of the exported model."""

    PYTORCH = 1
    ONNX = 2
    TORCHSCRIPT = 3


class LayerOutput:
    """What the leaf modules of a model, in float or simulated, return."""

    def __init__(
        self,
        model: nn.Module,
        dir_path: str,
        naming_scheme: NamingScheme = NamingScheme.PYTORCH,
        dummy_input: Any = None,
        onnx_export_args: Any = None,
    ) -> None:
        self._model = model
        self._leaves = [(name, m) for name, m in walk_modules(model) if not list(m.children()) and name]
        self._names = {} if naming_scheme is NamingScheme.PYTORCH else _tensors(model, naming_scheme, dummy_input)
        self._renames = naming_scheme is not NamingScheme.PYTORCH

    def get_outputs(self, input_instance: Any) -> dict[str, torch.Tensor]:
        """Name -> output of every leaf module that ran, in execution order; of one that ran several times the last."""
        found: dict[str, torch.Tensor] = {}
        handles = [m.register_forward_hook(_into(found, name)) for name, m in self._leaves]
        arguments = input_instance if isinstance(input_instance, tuple | list) else (input_instance,)
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        try:
            with torch.no_grad():
                self._model(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments))
        finally:
            for handle in handles:
                handle.remove()
        if self._renames:
            return {self._names[name]: value for name, value in found.items() if name in self._names}
        return found


class LayerOutputUtil:
    """Writes the outputs of every leaf module for inputs, one by one, as raw float32 files.

    Args:
        model: ``sim.model``, or a float model.
        dir_path: folder, made if need be.
        naming_scheme: ``PYTORCH`` calls files after modules, ``ONNX`` after tensors of the exported model, which is made for it;
            modules without a tensor of their own are left out then. ``TORCHSCRIPT`` is refused.
        dummy_input: for ``ONNX``, by default the simulation's example.
        onnx_export_args: AIMET's argument; the export needs none.

    Raises:
        ConfigError: (a ValueError) ``TORCHSCRIPT``, or ``ONNX`` for a model that is not simulated.
    """

    def __init__(
        self,
        model: nn.Module,
        dir_path: str,
        naming_scheme: NamingScheme = NamingScheme.PYTORCH,
        dummy_input: Any = None,
        onnx_export_args: Any = None,
    ) -> None:
        self.layer_output = LayerOutput(model, dir_path, naming_scheme, dummy_input, onnx_export_args)
        self.save_input_output = RawFiles(dir_path)

    def generate_layer_outputs(self, input_instance: Any) -> None:
        """Run one input and write it with every layer's output."""
        self.save_input_output.save(input_instance, self.layer_output.get_outputs(input_instance))


def _into(found: dict[str, torch.Tensor], name: str) -> Any:
    def note(_: nn.Module, __: Any, output: Any) -> None:
        first = next(_tensors_in(output), None)
        if first is not None:
            found.pop(name, None)  # a later run is later in the order too
            found[name] = first.detach().clone()

    return note


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    stack = [output]
    while stack:
        item = stack.pop(0)
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, tuple | list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())


def _tensors(model: nn.Module, scheme: NamingScheme, dummy_input: Any) -> dict[str, str]:
    """Module -> the tensor of the exported model that is its output."""
    if scheme is NamingScheme.TORCHSCRIPT:
        raise ConfigError("naming_scheme", "models are not exported as TorchScript", "use NamingScheme.ONNX")
    record = record_of(model) or next((r for _, m in walk_modules(model) if (r := record_of(m))), None)
    if record is None:
        raise ConfigError(
            "naming_scheme",
            "names of an exported model are known of simulated models only",
            "pass sim.model, or use NamingScheme.PYTORCH",
        )
    with tempfile.TemporaryDirectory() as folder:
        example = record.sim.example() if dummy_input is None else dummy_input
        front.QuantizationSimModel.export(record.sim, folder, "model", example)  # with our own files
        return exported_names(folder)
