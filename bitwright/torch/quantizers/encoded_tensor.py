"""Tensors that carry the encoding of their elements through calls that only move, copy or cast them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bitwright.errors import CalibrationError

T = TypeVar("T", bound="EncodedTensor")

#: calls after which the elements are still those of the first argument, so that its encoding holds
_KEEPING = {
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.contiguous,
    torch.Tensor.requires_grad_,
    torch.clone,
    torch.detach,
}
#: changes of device and type: the tensor itself where nothing changes, else one with a copy of the encoding
_CASTING = {
    getattr(torch.Tensor, name)
    for name in ("to", "cpu", "cuda", "float", "half", "double", "bfloat16", "type", "type_as")
}
#: calls whose results consist of elements of the first argument, so that one encoding for all elements holds
_MOVING = {
    getattr(owner, name)
    for owner in (torch.Tensor, torch)
    for name in (
        "__getitem__ adjoint as_strided chunk diagonal dsplit expand expand_as flatten flip gather hsplit index_select "
        "masked_select moveaxis movedim narrow permute ravel repeat repeat_interleave reshape resize roll rot90 select split "
        "squeeze swapaxes swapdims t take take_along_dim tensor_split tile transpose unbind unflatten unfold unsqueeze view "
        "view_as vsplit"
    ).split()
    if hasattr(owner, name)
} | {getattr(torch.Tensor, name).__get__ for name in ("T", "H", "mT", "mH")}
#: changes in place of the shape or of what autograd knows: the elements stay those that the encoding describes
_IN_PLACE = {
    getattr(torch.Tensor, name)
    for name in "requires_grad_ resize_ resize_as_ share_memory_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split()
}


def _call_and_forget(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``func(*args, **kwargs)``; a tensor that it changes in place loses its encoding, which is that of the old values."""
    candidates = (args[0] if args else None, kwargs.get("out"))
    written = [x for x in candidates if isinstance(x, EncodedTensor)]
    traced = torch.compiler.is_compiling()
    before = [None if traced or x.is_inference() else x._version for x in written]
    result = func(*args, **kwargs)
    for x, version in zip(written, before, strict=True):
        if func not in _IN_PLACE and version is not None and x._version != version:
            x.encoding = None
    return result


def _cast(source: EncodedTensor, result: torch.Tensor) -> torch.Tensor:
    """Keep the encoding of a tensor after a change of device or dtype; an unchanged tensor is returned as it is."""
    encoding = None if source.encoding is None else source.encoding.to(result.device)
    return source if result is source else with_encoding(type(source), result, encoding)


class EncodedTensor(torch.Tensor):
    """A tensor that carries the encoding of its elements; computations on it return ordinary tensors.

    Attributes:
        encoding: has ``scale``, ``block_size``, ``to(device)`` and ``changed(function)``, a changed copy; or ``None``.

    Raises:
        CalibrationError: (a RuntimeError) it is made of integers.
    """

    encoding: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A tensor of floating-point numbers."""
        made = super().__new__(cls, *args, **kwargs)
        if not made.is_floating_point():
            raise CalibrationError(
                cls.__name__, f"it is made of {made.dtype}", "give floating-point numbers, as codes.float()"
            )
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        source = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            result = _call_and_forget(func, args, kwargs or {})
        if result is source or not isinstance(source, EncodedTensor):
            return result
        encoding = source.encoding
        if func in _CASTING and isinstance(result, torch.Tensor) and result.is_floating_point():
            return _cast(source, result)
        if func not in _KEEPING and encoding is not None and encoding.scale.numel() > 1:
            encoding = None  # which of the scales are of which element is known for the tensor as it was
        typed = func in _KEEPING or func in _MOVING

        def kept(x: Any) -> Any:
            if typed and isinstance(x, torch.Tensor):
                return with_encoding(type(source), x, _for_rank(encoding, x.dim()))
            return x.as_subclass(torch.Tensor) if isinstance(x, EncodedTensor) else x

        return type(result)(map(kept, result)) if type(result) in (list, tuple) else kept(result)

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
        """Copies of the tensor and of its encoding."""
        return self._with(super().clone(memory_format=memory_format), torch.Tensor.clone)

    def detach(self) -> Any:
        """The tensor and its encoding, both detached from the graph."""
        return self._with(super().detach(), torch.Tensor.detach)

    def _with(self, values: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """``values`` with the encoding of this tensor, changed."""
        return with_encoding(type(self), values, None if self.encoding is None else self.encoding.changed(change))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = with_encoding(type(self), copy.deepcopy(self.plain(), memo), copy.deepcopy(self.encoding, memo))
        memo[id(self)] = made
        return made

    def required(self) -> Any:
        """The encoding.

        Raises:
            CalibrationError: there is none.
        """
        if self.encoding is None:
            raise CalibrationError(type(self).__name__, "the tensor has no encoding", "make it with a quantizer")
        return self.encoding

    def plain(self) -> torch.Tensor:
        """The tensor without its encoding."""
        return self.as_subclass(torch.Tensor)


def _for_rank(encoding: Any, rank: int) -> Any:
    """A copy of ``encoding``; the single scale of one with more axes than the tensor as a number."""
    if encoding is None or encoding.scale.dim() <= rank:
        return copy.copy(encoding)
    made = encoding.changed(lambda tensor: tensor.reshape(()))
    made.block_size = None
    return made


def with_encoding(kind: type[T], values: torch.Tensor, encoding: Any) -> T:
    """``values`` as a tensor of ``kind`` that has ``encoding``; ``values`` themselves while a program is exported."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # noqa: TID251, of torch's older exporter
        return values  # type: ignore[return-value]
    with torch._C.DisableTorchFunctionSubclass():
        made = values.as_subclass(kind)
    made.encoding = encoding
    return made


def plain_tensor(input: torch.Tensor) -> torch.Tensor:
    """``input`` without its encoding; others as they are: ``torch.export`` cannot trace ``as_subclass`` on its stand-ins."""
    return input.as_subclass(torch.Tensor) if isinstance(input, EncodedTensor) else input
