"""Methods of quantized modules, whether the quantizers are the module's own or those of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bitwright.aimet_torch import _block_floats
from bitwright.aimet_torch._module_encodings import export_encodings, import_encodings


class QuantizedModule:
    """What a module can be asked through its quantizers.

    Attributes:
        param_quantizers, input_quantizers, output_quantizers: the quantizers, ``None`` where there is none.
    """

    param_quantizers: Any
    input_quantizers: Any
    output_quantizers: Any

    @property
    def _parametrized(self) -> Any:
        """The module that holds the parameters."""
        return self

    def set_weight_quantizer_to_mxfp4_int8(self, block_size: int = 32) -> None:
        """Round the weight to MXFP4 and quantize it to int8 per channel.

        Raises:
            FormatError, GranularityError: (ValueErrors) another kind of layer, or blocks that do not divide it.
        """
        _block_floats.set_weight_quantizer_to_mxfp4_int8(self._parametrized, self.param_quantizers, block_size)

    def set_weight_quantizer_to_nvfp4_int8(self, scale_q: torch.Tensor, meta_scale: torch.Tensor | float) -> None:
        """Round the weight to NVFP4 with given scales and quantize it to int8 per channel.

        Raises:
            FormatError, GranularityError: (ValueErrors) another kind of layer, or scales that do not fit it.
        """
        _block_floats.set_weight_quantizer_to_nvfp4_int8(self._parametrized, self.param_quantizers, scale_q, meta_scale)

    # -- encodings

    def export_input_encodings(self, encoding_version: str) -> dict[str, Any]:
        """Encodings of the inputs by index, as encodings files have them."""
        return export_encodings(self.input_quantizers, encoding_version)

    def export_output_encodings(self, encoding_version: str) -> dict[str, Any]:
        """Encodings of the outputs by index, as encodings files have them."""
        return export_encodings(self.output_quantizers, encoding_version)

    def export_param_encodings(self, encoding_version: str) -> dict[str, Any]:
        """Encodings of the parameters by name, as encodings files have them."""
        return export_encodings(self.param_quantizers, encoding_version)

    def import_input_encodings(
        self,
        encodings: Mapping[str, Any],
        strict: bool,
        partial: bool,
        requires_grad: bool | None,
        allow_overwrite: bool,
    ) -> None:
        """Take encodings of the inputs by index (:func:`._module_encodings.import_encodings`)."""
        import_encodings(self.input_quantizers, encodings, strict, partial, requires_grad, allow_overwrite)

    def import_output_encodings(
        self,
        encodings: Mapping[str, Any],
        strict: bool,
        partial: bool,
        requires_grad: bool | None,
        allow_overwrite: bool,
    ) -> None:
        """Take encodings of the outputs by index (:func:`._module_encodings.import_encodings`)."""
        import_encodings(self.output_quantizers, encodings, strict, partial, requires_grad, allow_overwrite)

    def import_param_encodings(
        self,
        encodings: Mapping[str, Any],
        strict: bool,
        partial: bool,
        requires_grad: bool | None,
        allow_overwrite: bool,
    ) -> None:
        """Take encodings of the parameters by name (:func:`._module_encodings.import_encodings`)."""
        import_encodings(self.param_quantizers, encodings, strict, partial, requires_grad, allow_overwrite)
