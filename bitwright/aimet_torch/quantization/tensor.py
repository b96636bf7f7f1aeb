"""Tensors that carry the encoding they were quantized with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from bitwright.errors import CalibrationError

__all__ = ["DequantizedTensor", "EncodingError", "QuantizedTensor", "QuantizedTensorBase"]

EncodingError = CalibrationError
T = TypeVar("T", bound="QuantizedTensorBase")

#: calls after which the elements are still those of the first argument, so that its encoding holds
_KEEPING = {
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.contiguous,
    torch.Tensor.requires_grad_,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.clone,
    torch.detach,
}
#: the same where one encoding serves all elements
_MOVING = {
    torch.Tensor.reshape,
    torch.Tensor.view,
    torch.Tensor.flatten,
    torch.Tensor.permute,
    torch.Tensor.transpose,
    torch.Tensor.squeeze,
    torch.Tensor.unsqueeze,
    torch.Tensor.__getitem__,
    torch.Tensor.expand,
    torch.reshape,
    torch.flatten,
    torch.permute,
    torch.transpose,
    torch.squeeze,
    torch.unsqueeze,
}


class QuantizedTensorBase(torch.Tensor):
    """A tensor with the encoding its elements have; whatever computes on it returns ordinary tensors."""

    encoding: Any = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if not isinstance(result, torch.Tensor) or not isinstance(source, QuantizedTensorBase):
            return result
        encoding = source.encoding
        moved = func in _MOVING and encoding is not None and encoding.scale.numel() == 1
        if func in _KEEPING or moved:
            return with_encoding(type(source), result, encoding)
        return result.as_subclass(torch.Tensor) if isinstance(result, QuantizedTensorBase) else result

    def quantize(self) -> QuantizedTensor:
        """The codes of the tensor's values."""
        raise NotImplementedError(f"{type(self).__name__}.quantize")

    def dequantize(self) -> DequantizedTensor:
        """The tensor's values."""
        raise NotImplementedError(f"{type(self).__name__}.dequantize")

    def quantized_repr(self) -> torch.Tensor:
        """The codes in an integer dtype that holds them."""
        raise NotImplementedError(f"{type(self).__name__}.quantized_repr")

    def new_empty(self, size: Any, *, dtype: torch.dtype | None = None, device: Any = None,  # type: ignore[override]
                  requires_grad: bool = False, layout: torch.layout = torch.strided, pin_memory: bool = False,
                  **kwargs: Any) -> Any:  # fmt: skip
        """A tensor of the same kind, without values and, unless it is given, without an encoding."""
        encoding = kwargs.pop("encoding", None)
        made = super().new_empty(
            size, dtype=dtype, device=device, requires_grad=requires_grad, layout=layout,
            pin_memory=pin_memory, **kwargs,
        )  # fmt: skip
        return with_encoding(type(self), made, encoding)

    def clone(self, *, memory_format: torch.memory_format | None = torch.preserve_format) -> Any:
        """A copy with the same encoding."""
        return super().clone(memory_format=memory_format)

    def detach(self) -> Any:
        """The tensor without its history, with the same encoding, which has none either."""
        encoding = copy.copy(self.encoding)
        if encoding is not None:
            fields = {key: v.detach() for key, v in vars(encoding).items() if isinstance(v, torch.Tensor)}
            vars(encoding).update(fields)
        return with_encoding(type(self), super().detach(), encoding)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = with_encoding(type(self), copy.deepcopy(self._plain(), memo), copy.deepcopy(self.encoding, memo))
        memo[id(self)] = made
        return made

    def _required(self) -> Any:
        if self.encoding is None:
            raise CalibrationError(
                type(self).__name__, "the tensor has no encoding", "make it with a quantizer of quantization.affine"
            )
        return self.encoding

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def with_encoding(kind: type[T], values: torch.Tensor, encoding: Any) -> T:
    """``values`` as a tensor of ``kind`` that has ``encoding``."""
    with torch._C.DisableTorchFunctionSubclass():
        made = values.as_subclass(kind)
    made.encoding = encoding
    return made


class QuantizedTensor(QuantizedTensorBase):
    """Codes on a grid."""

    def quantize(self) -> QuantizedTensor:
        """The tensor itself."""
        return self

    def dequantize(self) -> DequantizedTensor:
        """The values of the codes."""
        encoding = self._required()
        return with_encoding(DequantizedTensor, encoding.dequantize(self._plain()), encoding)

    def quantized_repr(self) -> torch.Tensor:
        """The codes in an integer dtype that holds them."""
        encoding = self._required()
        return self._plain().detach().to(encoding.dtype)


class DequantizedTensor(QuantizedTensorBase):
    """Values that lie on a grid."""

    def quantize(self) -> QuantizedTensor:
        """The codes of the values."""
        encoding = self._required()
        return with_encoding(QuantizedTensor, encoding.quantize(self._plain()), encoding)

    def dequantize(self) -> DequantizedTensor:
        """The tensor itself."""
        return self

    def quantized_repr(self) -> torch.Tensor:
        """The codes in an integer dtype that holds them."""
        return self.quantize().quantized_repr()
