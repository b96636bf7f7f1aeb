"""Methods of quantized modules on the modules of a simulated model: ``sim.model.conv1.compute_param_encodings()``.

Modules keep their own classes in a simulation, so that the methods are attributes of the instances, as their quantizers are
(:mod:`bitwright.aimet_torch._modules`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from bitwright.aimet_torch import _block_floats, _modules
from bitwright.aimet_torch._calibration import compute_encodings
from bitwright.aimet_torch._core import walk_modules
from bitwright.aimet_torch._module_encodings import export_encodings, import_encodings
from bitwright.aimet_torch._weights import detach, fold_parameters


class ModuleCalls:
    """What one module of a simulated model can be asked; a copy of the model has its own."""

    def __init__(self, module: nn.Module, record: _modules.Record) -> None:
        self._module, self._record = module, record

    def compute_encodings(self) -> AbstractContextManager[None]:
        """Find the ranges of this module's quantizers from what passes inside the block; all others are kept."""
        return compute_encodings(self._module)

    def compute_param_encodings(self) -> None:
        """Find the ranges of the parameters' quantizers."""
        for name, quantizer in self._record.params.items():
            if quantizer is not None:
                parameter: Any = self._module._parameters[name]
                with quantizer.compute_encodings():
                    quantizer(parameter.detach())

    def fold_param_quantizers(self) -> None:
        """Write the quantized values into the parameters and switch their quantizers off."""
        fold_parameters([self._record])

    def get_original_module(self) -> nn.Module:
        """The module without quantizers, outside of the simulation, with the same parameters."""
        plain = copy.copy(self._module)
        plain.__dict__.update(
            {
                key: copy.copy(value) if isinstance(value, dict) else value
                for key, value in vars(self._module).items()
            }
        )
        detach(plain)
        return plain

    def set_weight_quantizer_to_mxfp4_int8(self, block_size: int = 32) -> None:
        """Round the weight to MXFP4 and quantize it to int8 per channel.

        Raises:
            FormatError, GranularityError: (ValueErrors) another kind of layer, or blocks that do not divide it.
        """
        _block_floats.set_weight_quantizer_to_mxfp4_int8(self._module, self._record.params, block_size)

    def set_weight_quantizer_to_nvfp4_int8(
        self, scale_q: torch.Tensor, meta_scale: torch.Tensor | float
    ) -> None:
        """Round the weight to NVFP4 with given scales and quantize it to int8 per channel.

        Raises:
            FormatError, GranularityError: (ValueErrors) another kind of layer, or scales that do not fit it.
        """
        _block_floats.set_weight_quantizer_to_nvfp4_int8(
            self._module, self._record.params, scale_q, meta_scale
        )

    def export_param_encodings(self, encoding_version: str) -> dict[str, Any]:
        """Encodings of the parameters by name, as encodings files have them."""
        return export_encodings(self._record.params, encoding_version)

    def export_input_encodings(self, encoding_version: str) -> dict[str, Any]:
        """Encodings of the inputs by index, as encodings files have them."""
        return export_encodings(self._record.inputs, encoding_version)

    def export_output_encodings(self, encoding_version: str) -> dict[str, Any]:
        """Encodings of the outputs by index, as encodings files have them."""
        return export_encodings(self._record.outputs, encoding_version)

    def import_param_encodings(
        self,
        encodings: Mapping[str, Any],
        strict: bool,
        partial: bool,
        requires_grad: bool | None,
        allow_overwrite: bool,
    ) -> None:
        """Take encodings of the parameters by name (:func:`._module_encodings.import_encodings`)."""
        import_encodings(self._record.params, encodings, strict, partial, requires_grad, allow_overwrite)

    def import_input_encodings(
        self,
        encodings: Mapping[str, Any],
        strict: bool,
        partial: bool,
        requires_grad: bool | None,
        allow_overwrite: bool,
    ) -> None:
        """Take encodings of the inputs by index (:func:`._module_encodings.import_encodings`)."""
        import_encodings(self._record.inputs, encodings, strict, partial, requires_grad, allow_overwrite)

    def import_output_encodings(
        self,
        encodings: Mapping[str, Any],
        strict: bool,
        partial: bool,
        requires_grad: bool | None,
        allow_overwrite: bool,
    ) -> None:
        """Take encodings of the outputs by index (:func:`._module_encodings.import_encodings`)."""
        import_encodings(self._record.outputs, encodings, strict, partial, requires_grad, allow_overwrite)


def attach_calls(sim: Any) -> None:
    """Give the modules of ``sim.model`` that show quantizers the methods of quantized modules.

    A name that a module's class or instance has already stays what it is.
    """
    for _, module in walk_modules(sim.model):
        record = _modules.record_of(module)
        if record is None or not _modules.is_quantized(module):
            continue
        calls = ModuleCalls(module, record)
        for name in _modules.METHODS:
            if not hasattr(type(module), name):
                vars(module)[name] = getattr(calls, name)
