"""``aimet_torch.quantization``: quantizers as modules and functions, encodings, and tensors that carry their encoding.

A tensor keeps its encoding through calls that only move, copy or cast its elements (:class:`EncodedTensor`).
Home of ``quantization.base``, ``.affine``, ``.tensor`` and ``.encoding_analyzer``; float quantizers are in
:mod:`bitwright.aimet_torch.float_quantizers`. The arithmetic is that of :mod:`bitwright.torch.quantizers.functional`.
"""

from __future__ import annotations

import abc
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import torch
from torch import nn

from bitwright.aimet_common.sites import affine_records, granularity_of, steps_format
from bitwright.core.numerics.affine import encode
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT_FORMATS, IntFormat, int_format
from bitwright.core.numerics.granularity import PerBlock, PerChannel
from bitwright.core.numerics.ranges import choose_range, find_range_method, needs
from bitwright.core.numerics.spec import QuantSpec, RangeMethod
from bitwright.core.numerics.statistics import Statistics, start, update
from bitwright.errors import CalibrationError, ConfigError, EncodingsError, FormatError
from bitwright.export.encodings.read import read_encodings
from bitwright.export.encodings.records import GroupedScale, check_version
from bitwright.export.encodings.write import record_2_0_0
from bitwright.torch.quantizers import functional

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


__all__ = [
    "AffineEncoding", "AffineQuantizerBase", "Dequantize", "DequantizedTensor", "EncodingAnalyzer", "EncodingError",
    "GroupedBlockEncoding", "GroupedBlockQuantizeDequantize", "MinMaxEncodingAnalyzer", "MinMaxQuantizer",
    "PercentileEncodingAnalyzer", "Quantize", "QuantizeDequantize", "QuantizedTensor", "QuantizedTensorBase",
    "ScaleOffsetQuantizer", "SqnrEncodingAnalyzer", "StatisticsNotFoundError", "TfEnhancedEncodingAnalyzer",
    "VectorEncoding", "dequantize", "get_backend", "quantize", "quantize_dequantize", "set_backend",
]  # fmt: skip


# ------------------------------------------------------------------------------------ what all have in common


class EncodingBase(abc.ABC):
    """A number format with its scale, as tensors; ``mapping`` is ``affine`` or ``float``."""

    mapping: str
    format: Any
    scale: torch.Tensor
    block_size: tuple[int, ...] | None

    @property
    @abc.abstractmethod
    def bitwidth(self) -> int:
        """Bits of the format."""

    @property
    def granularity(self) -> str:
        """``pertensor``, ``perchannel`` or ``blockwise``."""
        if self.block_size is not None:
            return "blockwise"
        return "pertensor" if self.scale.numel() == 1 else "perchannel"

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The encoding with its tensors moved as :meth:`torch.Tensor.to` moves them.

        Raises:
            EncodingsError: (a RuntimeError) to integers.
        """
        if not self.scale.to(*args, **kwargs).is_floating_point():
            raise EncodingsError(type(self).__name__, "scales are not integers", "move it to a floating-point dtype")
        return self.changed(lambda tensor: tensor.to(*args, **kwargs))

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Self:
        """A copy whose tensors are what ``change`` makes of them."""
        made = copy.copy(self)
        vars(made).update({key: change(v) for key, v in vars(self).items() if isinstance(v, torch.Tensor)})
        return made

    @abc.abstractmethod
    def quantize(self, input: torch.Tensor) -> torch.Tensor:
        """Codes of ``input``."""

    @abc.abstractmethod
    def dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """Values of codes."""

    @abc.abstractmethod
    def to_qnn_encoding_dict(self, encoding_version: str | None = None) -> Any:
        """The encoding as encodings files have it."""

    def quantize_dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` on the grid."""
        return self.dequantize(self.quantize(input)).to(input.dtype)


P = ParamSpec("P")
R = TypeVar("R")


def of_place(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorator: forward the call to the quantizer of a simulation once this quantizer is bound to it."""

    @functools.wraps(method)
    def answered(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.bound is None:
            return method(self, *args, **kwargs)
        found: R = getattr(self.bound, method.__name__)(*args, **kwargs)
        return found

    return answered


class Described:
    """Methods that follow from the encodings, shared by these modules and the quantizers of simulations."""

    shape: Any
    get_encodings: Any
    set_range: Any
    is_overwrite_allowed: Any
    allow_overwrite: Any

    @property
    def _allow_overwrite(self) -> Any:
        """:meth:`is_overwrite_allowed` under the name that AIMET's scripts read."""
        return self.is_overwrite_allowed()

    @_allow_overwrite.setter
    def _allow_overwrite(self, mode: bool) -> None:
        self.allow_overwrite(mode)

    def get_encoding(self) -> Any:
        """:meth:`get_encodings` under its older name."""
        return self.get_encodings()

    def get_legacy_encodings(self) -> list[dict[str, Any]] | None:
        """The encoding as files of version 0.6.1 have it; ``None`` without a range."""
        encodings = self.get_encodings()
        return None if encodings is None else encodings.to_qnn_encoding_dict("0.6.1")

    def set_legacy_encodings(self, encodings: list[dict[str, Any]]) -> None:
        """Set width, symmetry and range from records of version 0.6.1."""
        self.bitwidth = encodings[0]["bitwidth"]
        self.symmetric = str(encodings[0]["is_symmetric"]).lower() == "true"
        lo, hi = (torch.tensor([e[end] for e in encodings]).reshape(self.shape) for end in ("min", "max"))
        self.set_range(lo, hi)


class QuantizerBase(Described, abc.ABC, nn.Module):
    """A module that quantizes its input.

    A quantizer that was put in a place of a simulation (``module.output_quantizers[0] = q``) shows and changes the quantizer
    of that place from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._overwrite: dict[str, bool] = {}
        self.__dict__["_bound"] = None
        self.__dict__["_observing"] = 0

    # -- being the quantizer of a place in a simulation

    @property
    def bound(self) -> Any:
        """The quantizer of a simulation that this one is bound to, or ``None``."""
        return self.__dict__["_bound"]

    def bind(self, view: Any) -> None:
        """Bind this one to the quantizer of a simulation, which answers from now on."""
        self.__dict__["_bound"] = view

    # -- what a script asks

    @abc.abstractmethod
    def is_initialized(self) -> bool:
        """Whether there is a range."""

    @abc.abstractmethod
    def get_encodings(self) -> Any:
        """The encoding; ``None`` until there is a range."""

    def set_encodings(self, encodings: EncodingBase) -> None:
        """Set grid and range from an encoding."""
        raise NotImplementedError(f"{type(self).__name__}.set_encodings")

    @classmethod
    @abc.abstractmethod
    def from_encodings(cls, encodings: EncodingBase) -> Any:
        """A quantizer with the grid and range of an encoding; ``None`` for encodings of another kind."""

    @contextmanager
    def compute_encodings(self) -> Iterator[None]:
        """Find the range of the tensors that pass inside the block."""
        self._start()
        self.__dict__["_observing"] += 1
        try:
            yield
            self._finish()
        finally:
            self.__dict__["_observing"] -= 1

    @property
    def observing(self) -> bool:
        """Whether a :meth:`compute_encodings` block is open."""
        return bool(self.__dict__["_observing"])

    @abc.abstractmethod
    def _start(self) -> None: ...

    @abc.abstractmethod
    def _finish(self) -> None: ...

    def allow_overwrite(self, mode: bool | None = None, **ends: bool) -> None:
        """Whether :meth:`compute_encodings` may change the range, or single ends of it (``min=False``).

        Args:
            mode: for all parameters of the quantizer.
            ends: by the name of the parameter.
        """
        names = list(self._overwrite)
        self._overwrite.update(dict.fromkeys(names, bool(mode)) if mode is not None else {})
        self._overwrite.update({name: bool(allowed) for name, allowed in ends.items()})
        if self.bound is not None:
            self.bound.allow_overwrite(all(self._overwrite.values()))

    def is_overwrite_allowed(self, name: str | None = None) -> bool:
        """Whether :meth:`compute_encodings` may change the parameter called ``name``, or all of them."""
        return self._overwrite[name] if name is not None else all(self._overwrite.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizerBase:
        """An independent copy; if bound, with the range of the simulation's quantizer."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state = {key: value for key, value in self.__dict__.items() if key not in ("_bound", "_observing")}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.__dict__.update(_bound=copy.deepcopy(self.bound, memo), _observing=0)
        return made


def is_float(input: Any, quantizer: object) -> bool:
    """Whether ``input`` is a floating-point tensor; others, such as indices and masks, pass a quantizer unchanged.

    Raises:
        TypeError: it is no tensor.
    """
    if not isinstance(input, torch.Tensor):
        raise TypeError(f"{type(quantizer).__name__} quantizes tensors, not {type(input).__name__}")
    return input.is_floating_point()


# ------------------------------------------------------------------------------------ tensors that carry their encoding


EncodingError = CalibrationError


class QuantizedTensorBase(EncodedTensor):
    """A tensor that carries the encoding of its elements; computations on it return ordinary tensors."""

    def quantize(self) -> QuantizedTensor:
        """The codes of the tensor's values."""
        raise NotImplementedError(f"{type(self).__name__}.quantize")

    def dequantize(self) -> DequantizedTensor:
        """The tensor's values."""
        raise NotImplementedError(f"{type(self).__name__}.dequantize")

    def quantized_repr(self) -> torch.Tensor:
        """The codes in an integer dtype that holds them."""
        codes = self.quantize()
        return codes.plain().detach().to(codes.required().dtype)


class QuantizedTensor(QuantizedTensorBase):
    """Codes on a grid."""

    def quantize(self) -> QuantizedTensor:
        """The tensor itself."""
        return self

    def dequantize(self) -> DequantizedTensor:
        """The values of the codes."""
        encoding = self.required()
        return with_encoding(DequantizedTensor, encoding.dequantize(self.plain()), copy.copy(encoding))


class DequantizedTensor(QuantizedTensorBase):
    """Values that lie on a grid."""

    def quantize(self) -> QuantizedTensor:
        """The codes of the values."""
        encoding = self.required()
        return with_encoding(QuantizedTensor, encoding.quantize(self.plain()), encoding)

    def dequantize(self) -> DequantizedTensor:
        """The tensor itself."""
        return self


# ------------------------------------------------------------------------------------ ranges from statistics


StatisticsNotFoundError = CalibrationError


class EncodingAnalyzer:
    """Keeps statistics of tensors whose parameters have ``shape``, and chooses ranges by one of our methods.

    Args:
        shape: of the ranges it makes.
        block_size: elements that share a range, axis by axis.
        method: the range method.

    Raises:
        ConfigError: (a ValueError) ``num_bins`` is not positive; it has no other effect, because histograms grow.
    """

    def __init__(
        self, shape: tuple[int, ...] | int, block_size: tuple[int, ...] | None, method: RangeMethod, num_bins: int = 1
    ) -> None:
        if num_bins < 1:
            raise ConfigError("num_bins", f"a histogram has no {num_bins} bins", "leave it out: histograms grow")
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.block_size, self.method = block_size, method
        self._seen: Any = None

    def _with(self, seen: Statistics | None, tensor: torch.Tensor) -> Statistics:
        """Statistics with the values of one more tensor, one row per range."""
        known = start(needs(self.method), (math.prod(self.shape),)) if seen is None else seen
        rows = functional.block_rows(tensor, self.shape, self.block_size).detach()
        return update(known, rows, PerChannel(0))  # type: ignore[type-var]

    def update_stats(self, input_tensor: torch.Tensor) -> None:
        """Add the values of a tensor."""
        self._seen = self._with(self._seen, input_tensor)

    def reset_stats(self) -> None:
        """Discard all statistics."""
        self._seen = None

    def compute_encodings(self, num_steps: float, is_symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Ends of the grid with ``num_steps`` intervals, both of this analyzer's shape.

        Raises:
            CalibrationError: (a RuntimeError) no values were seen.
            FormatError: (a ValueError) no integer grid has so many intervals.
        """
        if self._seen is None:
            raise CalibrationError(type(self).__name__, "it has seen no values", "call update_stats(tensor) first")
        return self._range(self._seen, num_steps, is_symmetric)

    def compute_dynamic_encodings(
        self, input_tensor: torch.Tensor, num_steps: float, is_symmetric: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`compute_encodings` of one tensor alone; the statistics stay as they are."""
        return self._range(self._with(None, input_tensor), num_steps, is_symmetric, like=input_tensor)

    def _range(
        self, seen: Any, num_steps: float, symmetric: bool, like: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fmt = steps_format(num_steps, signed=symmetric) if num_steps > 0 else None
        if fmt is None:
            raise FormatError(
                type(self).__name__,
                f"no integer grid has {num_steps} intervals",
                "use 2 ** bitwidth - 1, or one less for a grid that is symmetric about zero",
            )
        spec = QuantSpec(fmt, PerChannel(0), "symmetric" if symmetric else "asymmetric", self.method)
        found = encode(*choose_range(seen, spec), spec, PerChannel(0))
        lo, hi = found.min, found.max
        device = None if like is None else like.device
        low, high = (torch.as_tensor(end, dtype=torch.float32, device=device).reshape(self.shape) for end in (lo, hi))
        return low, high


class MinMaxEncodingAnalyzer(EncodingAnalyzer):
    """The lowest and the highest value seen."""

    def __init__(self, shape: tuple[int, ...], block_size: tuple[int, ...] | None = None) -> None:
        super().__init__(shape, block_size, RangeMethod.of("minmax"))


class PercentileEncodingAnalyzer(EncodingAnalyzer):
    """The range of ``percentile`` percent of the values."""

    def __init__(
        self,
        shape: tuple[int, ...],
        num_bins: int = 2048,
        percentile: float = 100,
        block_size: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(shape, block_size, RangeMethod.of("percentile"), num_bins)
        self.set_percentile(percentile)

    def set_percentile(self, percentile: float) -> None:
        """Use another percentile, 50 to 100, from now on.

        Raises:
            ConfigError: (a ValueError) it is not in this interval.
        """
        if not 50 <= percentile <= 100:
            raise ConfigError("percentile", f"{percentile!r} is not between 50 and 100", "use 99.99")
        self.method, self.percentile = (
            find_range_method("percentile", {"percentile": float(percentile)}),
            float(percentile),
        )


class SqnrEncodingAnalyzer(EncodingAnalyzer):
    """The range of the least squared error, with ``gamma`` times the weight on clipping.

    The numbers of candidates have no effect: our search is exact on its histogram.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        num_bins: int = 2048,
        *,
        asymmetric_delta_candidates: int = 17,
        symmetric_delta_candidates: int = 101,
        offset_candidates: int = 21,
        max_parallelism: int = 64,
        gamma: float = 3.0,
        histogram_growth_limit: float | None = None,
        block_size: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(shape, block_size, find_range_method("sqnr", {"gamma": float(gamma)}), num_bins)


class TfEnhancedEncodingAnalyzer(SqnrEncodingAnalyzer):
    """:class:`SqnrEncodingAnalyzer` with AIMET's defaults."""

    def __init__(self, shape: tuple[int, ...], block_size: tuple[int, ...] | None = None) -> None:
        super().__init__(shape, block_size=block_size)


# ------------------------------------------------------------------------------------ functions


def derived_grid(num_steps: int, signed: bool) -> tuple[int, int]:
    """Ends of the grid with ``num_steps`` intervals; a signed one has its larger half below zero.

    >>> derived_grid(255, True), derived_grid(254, True), derived_grid(15, False)
    ((-128, 127), (-127, 127), (0, 15))
    """
    return (-((num_steps + 1) // 2), num_steps // 2) if signed else (0, num_steps)


_FORMS = ("qmin, qmax", "bitwidth, signed=False", "*, num_steps, signed=False")


def split_grid(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], *, signed: bool = True
) -> tuple[int, int, dict[str, Any]]:
    """``qmin``, ``qmax`` and the other arguments of ``(qmin, qmax, *names)`` or ``(bitwidth, signed, *names)``.

    Args:
        args, kwargs: of the call.
        names: of the other arguments, in their order.
        signed: whether ``signed`` follows the width by position; else the grid is signed where ``symmetric`` is given.

    Raises:
        TypeError: none of the forms, or unknown arguments.
        ConfigError: (a ValueError) a ``zero_point_shift``: codes between the integers are not supported.
    """
    given, positional = dict(kwargs), list(args)
    by_ends = "qmin" in given or "qmax" in given
    by_ends |= len(positional) > 1 and isinstance(positional[1], (int, float)) and not isinstance(positional[1], bool)
    heads = _heads_of_grid(given, by_ends, signed)
    for name in (*heads, *names):
        by_position = positional and name not in given
        if by_position and (name != "signed" or isinstance(positional[0], bool)):
            given[name] = positional.pop(0)
    shift = given.pop("zero_point_shift", None)
    below = bool(given.pop("signed", given.get("symmetric", False)))
    if {"qmin", "qmax"} <= given.keys():
        ends = int(given.pop("qmin")), int(given.pop("qmax"))
    elif "num_steps" in given or "bitwidth" in given:
        steps = given.pop("num_steps") if "num_steps" in given else (1 << int(given.pop("bitwidth"))) - 1
        ends = derived_grid(int(steps), below)
    else:
        raise TypeError(f"give the grid as one of: {'; '.join(_FORMS)}")
    if wrong := sorted(given.keys() - set(names)) or positional:
        raise TypeError(f"unknown arguments {wrong}; the grid is one of: {'; '.join(_FORMS)}")
    refuse_shift(shift)
    return *ends, given


def _heads_of_grid(given: Mapping[str, Any], by_ends: bool, signed: bool) -> Sequence[str]:
    """Names of the arguments by position with which a grid begins."""
    if "num_steps" in given:
        return ()
    if by_ends:
        return ("qmin", "qmax")
    return ("bitwidth", "signed") if signed else ("bitwidth",)


def refuse_shift(shift: float | None) -> None:
    """Raise an error for a zero-point shift, which puts codes between the integers.

    Raises:
        ConfigError: ``shift`` is neither ``None`` nor 0.
    """
    if shift:
        raise ConfigError(
            "zero_point_shift", f"{shift!r}: codes between the integers are not supported", "leave it out"
        )


def quantize(
    tensor: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Codes of ``tensor``: ``clamp(round(tensor / scale) - offset, qmin, qmax)``.

    The grid is given as ``qmin, qmax``, as ``bitwidth, signed=False`` or as ``num_steps=, signed=False``, with ``block_size``
    after it.

    Returns:
        Shape and dtype of ``tensor``; float64 where float32 cannot hold the codes.

    Raises:
        TypeError: no grid, or unknown arguments.
        EncodingsError: (a RuntimeError) the tensor has a half-precision dtype that does not hold the codes.
        GranularityError: (a ValueError) scale or blocks do not fit the tensor.
    """
    qmin, qmax, rest = split_grid(args, kwargs, ("block_size", "zero_point_shift"))
    codes = functional.quantize(tensor, scale, -offset, qmin, qmax, rest.get("block_size"))
    ends = torch.tensor([qmin, qmin + 1, qmax - 1, qmax])
    if tensor.dtype.itemsize < 4 and not torch.equal(ends.to(tensor.dtype).long(), ends):
        raise EncodingsError("quantize", f"{tensor.dtype} does not hold the codes {qmin} to {qmax}", "give float32")
    return codes if codes.dtype == torch.float64 else codes.to(tensor.dtype)


def dequantize(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    block_size: tuple[int, ...] | None = None,
    zero_point_shift: float | None = None,
) -> torch.Tensor:
    """Values of codes: ``(tensor + offset) * scale``."""
    refuse_shift(zero_point_shift)
    return functional.dequantize(tensor, scale, -offset, block_size)


def quantize_dequantize(
    tensor: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """``tensor`` on the grid; arguments as for :func:`quantize`."""
    qmin, qmax, rest = split_grid(args, kwargs, ("block_size", "zero_point_shift"))
    return functional.quantize_dequantize(tensor, scale, -offset, qmin, qmax, rest.get("block_size"))


def get_backend() -> str:
    """``"torch_builtins"``, the only backend: its values are those of the exported model on every device."""
    return "torch_builtins"


def set_backend(backend: str) -> Any:
    """Accepted for ``"torch_builtins"``; returns a context manager as AIMET does.

    Raises:
        ConfigError: (a ValueError) another backend.
    """
    if backend != "torch_builtins":
        raise ConfigError("set_backend", f"there is no backend {backend!r} here", "use 'torch_builtins'")
    return nullcontext()


# ------------------------------------------------------------------------------------ affine encodings


class AffineEncoding(EncodingBase):
    """``AffineEncoding(scale, offset, qmin, qmax, symmetry=False, block_size=None)``, or ``bitwidth, signed=False`` for the grid.

    Attributes:
        scale: input units per step.
        offset: minus our zero point.
        qmin, qmax: ends of the grid.
        symmetry: whether the zero point is kept in the middle.
        zero_point_shift: always 0: shifts are not supported.
    """

    mapping, zero_point_shift = "affine", 0.0

    def __init__(self, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("producer", None)
        self.qmin, self.qmax, rest = split_grid(args, kwargs, ("symmetry", "block_size", "zero_point_shift"))
        self.scale, self.offset = scale, offset
        self.symmetry, self.block_size = bool(rest.get("symmetry", False)), rest.get("block_size")

    @property
    def num_steps(self) -> int:
        """Intervals of the grid."""
        return self.qmax - self.qmin

    @property
    def min(self) -> torch.Tensor:
        """Lowest representable value."""
        return (self.qmin + self.offset) * self.scale

    @property
    def max(self) -> torch.Tensor:
        """Highest representable value."""
        return (self.qmax + self.offset) * self.scale

    @property
    def bitwidth(self) -> int:
        """Bits of the grid."""
        return math.ceil(math.log2(self.num_steps + 1))

    @property
    def signed(self) -> bool:
        """Whether codes may be negative."""
        return self.qmin < 0

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer dtype of torch that holds the codes."""
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
            info = torch.iinfo(dtype)
            if info.min <= self.qmin and self.qmax <= info.max:
                return dtype
        return torch.int64

    def quantize(self, input: torch.Tensor) -> torch.Tensor:
        """Codes of ``input``."""
        return quantize(input, self.scale, self.offset, self.qmin, self.qmax, self.block_size)

    def dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """Values of codes."""
        return dequantize(input, self.scale, self.offset, self.block_size)

    def quantize_dequantize(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` on the grid."""
        return quantize_dequantize(input, self.scale, self.offset, self.qmin, self.qmax, self.block_size)

    def to_qnn_encoding_dict(self, encoding_version: str | None = None) -> Any:
        """The encoding as encodings files have it: a list of records (0.6.1), or one record (1.0.0, 2.0.0).

        Raises:
            EncodingsError: (a RuntimeError) there is no such version.
        """
        return qnn_dict(self, check_version("to_qnn_encoding_dict", encoding_version or "1.0.0"))

    @classmethod
    def from_qnn_encoding_dict(
        cls, encoding_dict: Any, version: str | None = None, ndim: int | None = None
    ) -> AffineEncoding:
        """The encoding of a record of any version.

        Args:
            encoding_dict: what :meth:`to_qnn_encoding_dict` returns.
            version: of the record; found out by its keys if ``None``.
            ndim: axes of the tensor; without it, several scales of one axis are a tensor of one axis.

        Raises:
            EncodingsError: (a RuntimeError) no readable record, or one of a float format.
        """
        version = _version_of(encoding_dict) if version is None else version
        named: Any = {"x": encoding_dict} if version == "0.6.1" else [{**encoding_dict, "name": "x"}]
        section = "encodings" if version == "2.0.0" else "param_encodings"
        sections = {"param_encodings": type(named)(), "activation_encodings": type(named)(), section: named}
        record = read_encodings({"version": version, **sections}).by_name["x"]
        found = record.encoding
        if not isinstance(found.format, IntFormat):
            raise EncodingsError("encoding", f"{found.format.name} is not an affine grid", "read it with FloatEncoding")
        shape, block_size, grouping = _blocks_of(found, ndim)
        scale, zero_point = (
            torch.tensor(v.reshape(shape), dtype=torch.float32) for v in (found.scale, found.zero_point)
        )
        ends = found.format.qmin, found.format.qmax
        symmetric = found.format.signed and not bool(zero_point.any())
        if record.grouped is None or block_size is None:
            return AffineEncoding(scale, -zero_point, *ends, symmetric, block_size)
        return GroupedBlockEncoding(
            scale, -zero_point, *ends, symmetric, block_size,
            block_grouping=grouping, decompressed_bw=record.grouped.decompressed_bits,
            per_channel_scale=torch.tensor(record.grouped.channel),
        )  # fmt: skip

    _from_qnn_encoding_dict = from_qnn_encoding_dict  # AIMET's name in 2.42

    def __repr__(self) -> str:
        return f"AffineEncoding({self.bitwidth} bits, scale {tuple(self.scale.shape)}, {self.granularity})"


def _version_of(record: Any) -> str:
    """The version of AIMET's encodings that a record is of, by its type and keys."""
    if isinstance(record, list):
        return "0.6.1"
    return "1.0.0" if {"y_scale", "per_block_int_scale"}.isdisjoint(record) else "2.0.0"


def _blocks_of(encoding: Encoding, ndim: int | None) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]:
    """The shape of AIMET's scales of a tensor of ``ndim`` axes, its ``block_size``, and the blocks of a channel by axis."""
    shape, granularity = tuple(encoding.scale.shape), encoding.granularity
    if isinstance(granularity, PerBlock) and granularity.axis is not None and len(shape) > 1:
        size = [1 if n > 1 else -1 for n in shape]
        grouping = [1] * len(shape)
        size[granularity.axis], grouping[granularity.axis] = granularity.size, shape[granularity.axis]
        return shape, tuple(size), tuple(grouping)
    if isinstance(granularity, PerChannel) and ndim is not None:
        spread = [1] * ndim
        spread[(granularity.axis or 0) % ndim] = encoding.scale.size
        shape = tuple(spread)
    return shape, None, ()


def qnn_dict(encoding: AffineEncoding, version: str) -> Any:
    """An encoding in the form of AIMET's files; offsets are those of the unsigned grid in versions before 2.0.0."""
    if version == "2.0.0":
        return _qnn_2_0_0(encoding)
    shift = encoding.qmin if encoding.signed else 0
    lo, hi, scale, offset = (
        t.detach().flatten().tolist() for t in (encoding.min, encoding.max, encoding.scale, encoding.offset + shift)
    )
    kind = {"pertensor": "PER_TENSOR", "perchannel": "PER_CHANNEL", "blockwise": "PER_BLOCK"}[encoding.granularity]
    record = affine_records(version, encoding.bitwidth, encoding.symmetry, kind, (lo, hi), scale, offset)
    if version == "1.0.0" and encoding.block_size is not None:
        record["block_size"] = max(encoding.block_size)
    return record


def core_encoding(encoding: Any, shape: tuple[int, ...]) -> Encoding | None:
    """The encoding of a tensor of ``shape`` in Bitwright's terms; ``None`` where it has no format or granularity for it."""
    affine = isinstance(encoding, AffineEncoding)
    fmt = int_format(encoding.qmin, encoding.qmax) if affine else FLOAT_FORMATS.get(encoding.format.name)
    granularity = granularity_of(tuple(encoding.scale.shape), encoding.block_size, shape)
    if fmt is None or granularity is None:
        return None
    zero_point = -encoding.offset if affine else torch.zeros_like(encoding.scale)
    params = granularity.param_shape(shape)
    scale, zero = (v.detach().cpu().numpy().reshape(params) for v in (encoding.scale, zero_point))
    return Encoding(fmt, scale, zero.astype(np.int64), granularity)


def _qnn_2_0_0(encoding: AffineEncoding) -> dict[str, Any]:
    params = tuple(encoding.scale.shape)
    blocks = encoding.block_size or (1,) * len(params)
    core = core_encoding(encoding, tuple(n * max(size, 1) for n, size in zip(params, blocks, strict=True)))
    if core is None:
        raise EncodingsError(
            "to_qnn_encoding_dict",
            f"version 2.0.0 has no record for the grid {encoding.qmin} to {encoding.qmax} with scales of shape {params} and "
            f"blocks {encoding.block_size}",
            "use an integer format with one scale, or one per channel, or blocks along one axis",
        )
    grouped = None
    if isinstance(encoding, GroupedBlockEncoding) and encoding.per_channel_scale is not None:
        multiples = encoding.per_block_int_scale.detach().cpu().numpy().astype(np.int64).reshape(core.scale.shape)
        channel = encoding.per_channel_scale.detach().cpu().numpy()
        grouped = GroupedScale(multiples, channel, encoding.decompressed_bw)
    return record_2_0_0(core, grouped)


class VectorEncoding(AffineEncoding):
    """An affine encoding of vectors; its vector fields are kept and not used."""

    def __init__(self, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        known = {"rows_per_block", "cols_per_block", "vector_dim", "vector_stride", "index_bw"}
        self.vector = {name: kwargs.pop(name) for name in tuple(kwargs) if name in known}
        super().__init__(scale, offset, *args, **kwargs)


class GroupedBlockEncoding(AffineEncoding):
    """An affine encoding whose block scales are integer multiples of one scale per channel (LPBQ)."""

    def __init__(self, scale: torch.Tensor, offset: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.block_grouping = kwargs.pop("block_grouping", None)
        self.decompressed_bw = kwargs.pop("decompressed_bw", None)
        self.per_channel_scale = kwargs.pop("per_channel_scale", None)
        super().__init__(scale, offset, *args, **kwargs)

    @property
    def per_block_int_scale(self) -> torch.Tensor:
        """Scale of every block as a multiple of its channel's scale."""
        return torch.round(self.scale / self.per_channel_scale)


# ------------------------------------------------------------------------------------ affine quantizers


class AffineQuantizerBase(QuantizerBase):
    """``(shape, qmin, qmax, symmetric, encoding_analyzer=None, block_size=None)``, or ``bitwidth`` for the two ends.

    Args:
        shape: of the parameters ``min`` and ``max``: ``()`` per tensor, ``(n, 1, 1, 1)`` per channel.
        bitwidth: instead of ``qmin, qmax``: the signed grid of this width if ``symmetric``, else the unsigned one.
        symmetric: keep the zero point in the middle of the grid.
        encoding_analyzer: how ranges are found; min-max by default.
        block_size: elements per block, axis by axis.

    Attributes:
        min, max: the range, parameters with gradients; -1 and 1 until it is known. Setting ``None`` forgets an end.
    """

    min: Any
    max: Any
    _fresh: dict[str, int | None]
    """End -> version of its parameter as it was created; ``None`` once it was set."""

    def __init__(self, shape: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        names = ("symmetric", "encoding_analyzer", "block_size", "zero_point_shift")
        self.qmin, self.qmax, rest = split_grid(args, kwargs, names, signed=False)
        if "symmetric" not in rest:
            raise TypeError(f"{type(self).__name__} needs to be told whether it is symmetric")
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._symmetric, self.block_size = bool(rest["symmetric"]), rest.get("block_size")
        analyzer: EncodingAnalyzer | None = rest.get("encoding_analyzer")
        self.encoding_analyzer = analyzer or MinMaxEncodingAnalyzer(self.shape, self.block_size)
        torch.empty(self.encoding_analyzer.shape, device="meta").expand(self.shape)
        self._overwrite = {"min": True, "max": True}
        self.__dict__["_fresh"] = {}
        self.min = self.max = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("min", "max"):
            unknown = value is None
            value = nn.Parameter(torch.full(self.shape, -1.0 if name == "min" else 1.0)) if unknown else value
            self._fresh[name] = value._version if unknown else None
        super().__setattr__(name, value)

    def _is_set(self, name: str) -> bool:
        """Whether an end of the range was set, also in place, as optimizers and ``copy_`` do."""
        version = self._fresh[name]
        return version is None or getattr(self, name)._version != version

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, version in self._fresh.items():  # copies and unpickled parameters begin with versions of their own
            self._fresh[name] = None if version is None else getattr(self, name)._version

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fresh": {name: None if self._is_set(name) else 0 for name in self._fresh}}

    # -- the grid

    @property
    def bitwidth(self) -> int:
        """Bits of the grid; setting it keeps the range."""
        return math.ceil(math.log2(self.qmax - self.qmin + 1)) if self.bound is None else self.bound.bitwidth

    @bitwidth.setter
    def bitwidth(self, bitwidth: int) -> None:
        self.qmin, self.qmax = derived_grid((1 << int(bitwidth)) - 1, self.qmin < 0)
        if self.bound is not None:
            self.bound.bitwidth = bitwidth

    @property
    def symmetric(self) -> bool:
        """Whether the zero point is kept in the middle of the grid."""
        return self._symmetric if self.bound is None else self.bound.symmetric

    @symmetric.setter
    def symmetric(self, symmetric: bool) -> None:
        self._symmetric = bool(symmetric)
        if self.bound is not None:
            self.bound.symmetric = symmetric

    @property
    def signed(self) -> bool:
        """Whether codes may be negative."""
        return self.qmin < 0 if self.bound is None else self.bound.signed

    @signed.setter
    def signed(self, signed: bool) -> None:
        self.qmin, self.qmax = derived_grid(self.qmax - self.qmin, bool(signed))
        if self.bound is not None:
            self.bound.signed = signed

    # -- the range

    @of_place
    def is_initialized(self) -> bool:
        """Whether there is a range."""
        return self._is_set("min") and self._is_set("max")

    @of_place
    def get_min(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Lowest representable value; ``None`` without a range."""
        return self._end(self.qmin, dtype)

    @of_place
    def get_max(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Highest representable value; ``None`` without a range."""
        return self._end(self.qmax, dtype)

    def _end(self, code: int, dtype: torch.dtype | None) -> torch.Tensor | None:
        scale, offset = self.get_scale(dtype), self.get_offset(dtype)
        return None if scale is None or offset is None else scale * (code + offset)

    def _grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point."""
        if not self.is_initialized():
            raise CalibrationError(
                type(self).__name__,
                "the quantizer has no range yet",
                "run data through it inside `with quantizer.compute_encodings():`, or call set_range(min, max)",
            )
        return functional.grid_of_range(self.min, self.max, self.qmin, self.qmax, symmetric=self._symmetric)

    @of_place
    def get_scale(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Input units per step; ``None`` without a range."""
        return self._grid()[0].to(dtype or self.min.dtype) if self.is_initialized() else None

    @of_place
    def get_offset(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Minus the zero point; ``None`` without a range."""
        return (-self._grid()[1]).to(dtype or self.min.dtype) if self.is_initialized() else None

    @of_place
    @torch.no_grad()
    def set_range(self, min: torch.Tensor | float | None, max: torch.Tensor | float | None) -> None:
        """Put the ends of the grid at ``min`` and ``max``; ``None`` forgets the range."""
        for name, end in (("min", min), ("max", max)):
            value = (
                None if end is None else torch.as_tensor(end, dtype=torch.float32).detach().expand(self.shape).clone()
            )
            own = getattr(self, name)
            if value is None or own.shape != value.shape:
                setattr(self, name, None if value is None else nn.Parameter(value))
            else:
                own.copy_(value)
                self._fresh[name] = None

    @of_place
    def get_encodings(self) -> AffineEncoding | None:
        """The encoding; ``None`` without a range."""
        if not self.is_initialized():
            return None
        scale, zero_point = self._grid()
        return self._encoding(scale, zero_point)

    def _encoding(self, scale: torch.Tensor, zero_point: torch.Tensor) -> AffineEncoding:
        return AffineEncoding(scale, -zero_point, self.qmin, self.qmax, self._symmetric, self.block_size)

    @of_place
    def set_encodings(self, encodings: Any) -> None:
        """Set grid and range from an encoding."""
        self.qmin, self.qmax, self._symmetric = encodings.qmin, encodings.qmax, encodings.symmetry
        self.block_size, self.shape = encodings.block_size, tuple(encodings.scale.shape)
        self.min = self.max = None
        self.set_range(encodings.min, encodings.max)

    @classmethod
    def from_encodings(cls, encodings: Any) -> Any:
        """A quantizer with the grid and range of an encoding; ``None`` for encodings of another kind."""
        if not isinstance(encodings, AffineEncoding):
            return None
        made = cls(
            tuple(encodings.scale.shape), encodings.qmin, encodings.qmax, encodings.symmetry,
            block_size=encodings.block_size,
        )  # fmt: skip
        made.set_range(encodings.min, encodings.max)
        return made

    # -- calibration

    def _start(self) -> None:
        self.encoding_analyzer.reset_stats()

    def _finish(self) -> None:
        if self.encoding_analyzer._seen is None:
            return
        lo, hi = self.encoding_analyzer.compute_encodings(self.qmax - self.qmin, self._symmetric)
        self.encoding_analyzer.reset_stats()
        kept = {name: getattr(self, name) for name, free in self._overwrite.items() if not free and self._is_set(name)}
        self.set_range(lo if kept.get("min") is None else kept["min"], hi if kept.get("max") is None else kept["max"])

    def _observed_grid(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point: of this input alone while ranges are being found."""
        if not self.observing:
            return self._grid()
        self.encoding_analyzer.update_stats(input)
        lo, hi = self.encoding_analyzer.compute_dynamic_encodings(input, self.qmax - self.qmin, self._symmetric)
        return functional.grid_of_range(lo, hi, self.qmin, self.qmax, symmetric=self._symmetric)

    def get_extra_state(self) -> Any:
        """State beside the range for the state dict; an empty tensor for torch's older exporter, which takes nothing else."""
        if torch.onnx.is_in_onnx_export():
            return torch.tensor([])
        ends = {name: torch.tensor(self._is_set(name)) for name in ("min", "max")}
        frozen = {f"{name}_overwrite": torch.tensor(allowed) for name, allowed in self._overwrite.items()}
        return {"symmetric": torch.tensor(self._symmetric), **ends, **frozen}

    def set_extra_state(self, state: Any) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self._symmetric = bool(state.get("symmetric", self._symmetric))
        for name, allowed in self._overwrite.items():
            self._overwrite[name] = bool(state.get(f"{name}_overwrite", allowed))
            if not state.get(name, True):
                setattr(self, name, None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if f"{prefix}min" in state_dict or f"{prefix}max" in state_dict:  # a state may have the range alone
            state_dict.setdefault(f"{prefix}_extra_state", {})
        for name in ("min", "max"):  # a quantizer without a range gets one
            value = state_dict.get(f"{prefix}{name}")
            if value is not None and not self._is_set(name):
                setattr(self, name, nn.Parameter(value.detach().clone()))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Shape, blocks, grid and symmetry."""
        blocks = "" if self.block_size is None else f"block_size={self.block_size}, "
        return f"shape={self.shape}, {blocks}qmin={self.qmin}, qmax={self.qmax}, symmetric={self.symmetric}"


class _Parametrized(type):
    """Metaclass of what quantizers are by their parameters; nothing is an instance of such a class itself."""

    names: tuple[str, ...] = ()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, QuantizerBase) and set(cls.names) <= {n for n, _ in instance.named_parameters()}


class MinMaxQuantizer(metaclass=_Parametrized):
    """Quantizers whose parameters are ``min`` and ``max``, as all of them are here."""

    names = ("min", "max")


class ScaleOffsetQuantizer(metaclass=_Parametrized):
    """Quantizers whose parameters are ``scale`` and ``offset``; none is."""

    names = ("scale", "offset")


class Quantize(AffineQuantizerBase):
    """Quantizes to codes: a :class:`QuantizedTensor`."""

    def forward(self, input: torch.Tensor) -> QuantizedTensor:
        """Codes of ``input``.

        Raises:
            CalibrationError: (a RuntimeError) there is no range yet.
        """
        if not is_float(input, self):
            return input  # type: ignore[return-value]
        if self.bound is not None and not self.observing:
            return self.bound(input).quantize()
        encoding = self._encoding(*self._observed_grid(input))
        return with_encoding(QuantizedTensor, encoding.quantize(plain_tensor(input)), encoding)


class QuantizeDequantize(AffineQuantizerBase):
    """Moves values onto the grid: a :class:`DequantizedTensor`."""

    def forward(self, input: torch.Tensor) -> DequantizedTensor:
        """``input`` on the grid.

        Raises:
            CalibrationError: (a RuntimeError) there is no range yet.
        """
        if not is_float(input, self):
            return input  # type: ignore[return-value]
        if self.bound is not None and not self.observing:
            return self.bound(plain_tensor(input))
        encoding = self._encoding(*self._observed_grid(input))
        return with_encoding(DequantizedTensor, encoding.quantize_dequantize(plain_tensor(input)), encoding)


class Dequantize(AffineQuantizerBase):
    """Turns codes back into values; takes a :class:`QuantizedTensor`."""

    def forward(self, input: QuantizedTensor) -> DequantizedTensor:
        """The values of ``input``."""
        return input.dequantize()


class GroupedBlockQuantizeDequantize(QuantizeDequantize):
    """Blocks whose scales are integer multiples of one scale per channel (LPBQ).

    Args:
        decompressed_bw: bits of ``code * multiple``; multiples have ``decompressed_bw - bitwidth`` bits.
        block_grouping: how many blocks share a channel's scale, axis by axis; ``-1``: all of the axis.
    """

    def __init__(
        self,
        shape: Any,
        bitwidth: int,
        symmetric: bool,
        decompressed_bw: int,
        encoding_analyzer: EncodingAnalyzer | None = None,
        block_size: tuple[int, ...] | None = None,
        block_grouping: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(shape, bitwidth, symmetric, encoding_analyzer, block_size)
        if not symmetric or decompressed_bw < bitwidth:
            raise EncodingsError(
                "GroupedBlockQuantizeDequantize",
                f"LPBQ is symmetric and decompresses to more bits: symmetric={symmetric}, bitwidth={bitwidth}, "
                f"decompressed_bw={decompressed_bw}",
                "use symmetric=True and a decompressed_bw above bitwidth",
            )
        self.decompressed_bw = decompressed_bw
        self.block_grouping = (1,) * len(self.shape) if block_grouping is None else tuple(block_grouping)
        if len(self.block_grouping) != len(self.shape):
            raise EncodingsError(
                "block_grouping",
                f"{self.block_grouping} is not one number for each axis of {self.shape}",
                "give one per axis",
            )

    @of_place
    def get_per_channel_scale(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The scale that those of the blocks are multiples of; ``None`` without a range."""
        return self._grouped(super()._grid()[0])[1].to(dtype or self.min.dtype) if self.is_initialized() else None

    def _grouped(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of blocks as multiples of those of channels, and these."""
        return functional.grouped_scale(scale, self.block_grouping, 2 ** (self.decompressed_bw - self.bitwidth))

    def _grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = super()._grid()
        return self._grouped(scale)[0], zero_point

    def _observed_grid(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = super()._observed_grid(input)
        return self._grouped(scale)[0], zero_point

    def _encoding(self, scale: torch.Tensor, zero_point: torch.Tensor) -> GroupedBlockEncoding:
        return GroupedBlockEncoding(
            scale, -zero_point, self.qmin, self.qmax, self.symmetric, self.block_size,
            block_grouping=self.block_grouping, decompressed_bw=self.decompressed_bw,
            per_channel_scale=self._grouped(scale)[1],
        )  # fmt: skip
