"""Methods of quantized modules on the modules of a simulated model: ``sim.model.conv1.compute_param_encodings()``.

Modules keep their own classes in a simulation, so that the methods are attributes of the instances, as their quantizers are
(:mod:`bitwright.aimet_torch._modules`).
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from bitwright.aimet_torch import _modules
from bitwright.aimet_torch._calibration import compute_encodings
from bitwright.aimet_torch._core import walk_modules
from bitwright.aimet_torch._quantized_module import QuantizedModule
from bitwright.aimet_torch._weights import detach, fold_parameters


class ModuleCalls(QuantizedModule):
    """What one module of a simulated model can be asked; a copy of the model has its own."""

    def __init__(self, module: nn.Module, record: _modules.Record) -> None:
        self._module, self._record = module, record

    @property
    def _parametrized(self) -> nn.Module:
        return self._module

    @property
    def param_quantizers(self) -> Any:
        """By name of the parameter."""
        return self._record.params

    @property
    def input_quantizers(self) -> Any:
        """By index of the input."""
        return self._record.inputs

    @property
    def output_quantizers(self) -> Any:
        """By index of the output."""
        return self._record.outputs

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
            {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(self._module).items()}
        )
        detach(plain)
        return plain


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
