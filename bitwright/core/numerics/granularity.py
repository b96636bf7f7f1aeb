"""Granularity: the number of scales of a tensor, and the elements that share each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bitwright.core.numerics.arrays import is_torch
from bitwright.errors import GranularityError

Shape = tuple[int, ...]


def _axis(axis: int, rank: int, site: str) -> int:
    if not -rank <= axis < rank:
        raise GranularityError(
            site, f"axis {axis} does not exist in a tensor of rank {rank}", "name an axis the tensor has"
        )
    return axis % rank


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor.

    ================  =============
    tensor shape      scale shape
    ================  =============
    ``(8, 3, 5, 5)``  ``()``
    ================  =============
    """

    def param_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """Shape of ``scale`` and ``zero_point`` for a tensor of ``shape``."""
        return ()

    def broadcast_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """Shape that makes a parameter broadcast against the tensor viewed with :meth:`view_shape`."""
        return ()

    def view_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """Shape in which the tensor is to be viewed so that parameters broadcast."""
        return shape

    def spread(self, param: Any, shape: Shape) -> Any:
        """A parameter (numpy array or torch tensor) so that it broadcasts against the view of a tensor of ``shape``."""
        return param.reshape(())

    def firsts(self, shape: Shape) -> tuple[slice, ...]:
        """Slices that select the first element of each scale in a tensor of ``shape``."""
        return tuple(slice(0, 1) for _ in shape)

    def resolve(self, channel_axis: int | None, block_axis: int | None) -> PerTensor:
        """The granularity with its open axes filled in from the operator."""
        return self


@dataclass(frozen=True)
class PerChannel:
    """One scale per index of ``axis``; ``None`` means the output channels of the operator that consumes the tensor.

    ================  ========  =============
    tensor shape      ``axis``  scale shape
    ================  ========  =============
    ``(8, 3, 5, 5)``  0         ``(8,)``
    ``(16, 10)``      1         ``(10,)``
    ================  ========  =============
    """

    axis: int | None = None

    def param_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """Shape of ``scale`` and ``zero_point`` for a tensor of ``shape``."""
        return (shape[self._concrete(shape, site)],)

    def broadcast_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """Shape that makes a parameter broadcast against the tensor."""
        axis = self._concrete(shape, site)
        return tuple(n if i == axis else 1 for i, n in enumerate(shape))

    def view_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """Shape in which the tensor is to be viewed so that parameters broadcast: its own."""
        return shape

    def spread(self, param: Any, shape: Shape) -> Any:
        """A parameter (numpy array or torch tensor) so that it broadcasts against a tensor of ``shape``."""
        return param.reshape(self.broadcast_shape(shape))

    def firsts(self, shape: Shape) -> tuple[slice, ...]:
        """Slices that select the first element of each scale in a tensor of ``shape``."""
        axis = self._concrete(shape, "tensor")
        return tuple(slice(None) if i == axis else slice(0, 1) for i in range(len(shape)))

    def resolve(self, channel_axis: int | None, block_axis: int | None) -> PerChannel | PerTensor:
        """The granularity with its open axis filled in; per tensor where the operator has no channel axis."""
        if self.axis is not None:
            return self
        return PerTensor() if channel_axis is None else PerChannel(channel_axis)

    def _concrete(self, shape: Shape, site: str) -> int:
        if self.axis is None:
            raise GranularityError(
                site, "PerChannel() has no axis yet", "call resolve() first or write PerChannel(axis)"
            )
        return _axis(self.axis, len(shape), site)


@dataclass(frozen=True)
class PerBlock:
    """One scale per ``size`` neighbours along ``axis`` and per index of ``channel_axis``, or of each of several axes.

    ==================  ===========================================  ================
    tensor shape        granularity                                  scale shape
    ==================  ===========================================  ================
    ``(8, 64)``         ``PerBlock(32, axis=1, channel_axis=0)``       ``(8, 2)``
    ``(64, 8)``         ``PerBlock(32, axis=0, channel_axis=1)``       ``(2, 8)``
    ``(8, 64, 3, 3)``   ``PerBlock(32, axis=1, channel_axis=0)``       ``(8, 2, 1, 1)``
    ``(4, 64, 8)``      ``PerBlock(32, axis=1, channel_axis=(0, 2))``  ``(4, 2, 8)``
    ``(8, 72)``         ``PerBlock(32, axis=1, channel_axis=0)``       ``(8, 3)``
    ==================  ===========================================  ================

    Where the size does not divide the axis, the last block has fewer elements: to its range it is the same as a block that
    is padded with zeros, which is how engines store it.

    A tuple of several axes is for stacked matrices, which do not share scales. It is sorted; of one axis it is that axis,
    of none ``None``, so that equal granularities compare equal.
    """

    size: int
    axis: int | None = None
    channel_axis: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.channel_axis, tuple):
            axes = tuple(sorted(set(self.channel_axis)))
            object.__setattr__(self, "channel_axis", axes if len(axes) > 1 else axes[0] if axes else None)
        if not isinstance(self.size, int) or self.size < 1:
            raise GranularityError(
                f"PerBlock({self.size!r})", "a block needs at least one element", "use 16, 32, 64 or 128"
            )

    def param_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """Shape of ``scale`` and ``zero_point`` for a tensor of ``shape``."""
        axis, channels = self._concrete(shape, site)
        size = self._length(shape, axis)
        return tuple(-(-n // size) if i == axis else n if i in channels else 1 for i, n in enumerate(shape))

    def _length(self, shape: Shape, axis: int) -> int:
        """Elements of a block, at most the length of its axis."""
        return min(self.size, max(1, shape[axis]))

    def padding(self, shape: Shape, site: str = "tensor") -> int:
        """Number of elements missing in the last block; 0 where the size divides the axis."""
        axis, _ = self._concrete(shape, site)
        return -shape[axis] % self._length(shape, axis)

    def broadcast_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """Shape of a parameter after :meth:`spread`."""
        axis, _ = self._concrete(shape, site)
        param = self.param_shape(shape, site)
        if self.padding(shape, site):
            return (*param[:axis], shape[axis], *param[axis + 1 :])
        return (*param[: axis + 1], 1, *param[axis + 1 :])

    def view_shape(self, shape: Shape, site: str = "tensor") -> Shape:
        """The tensor's shape with the block axis split into (blocks, size); its own where the last block lacks elements."""
        axis, _ = self._concrete(shape, site)
        if self.padding(shape, site):
            return shape
        size = self._length(shape, axis)
        return (*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])

    def spread(self, param: Any, shape: Shape) -> Any:
        """A parameter (numpy array or torch tensor) so that it broadcasts against the view of a tensor of ``shape``.

        Where the last block lacks elements, that is one number for each index of the block axis.
        """
        if not self.padding(shape):
            return param.reshape(self.broadcast_shape(shape))
        axis, _ = self._concrete(shape, "tensor")
        repeated = param.repeat(self.size, axis) if not is_torch(param) else param.repeat_interleave(self.size, axis)
        return repeated[(*(slice(None),) * axis, slice(0, shape[axis]))]

    def firsts(self, shape: Shape) -> tuple[slice, ...]:
        """Slices that select the first element of each scale in a tensor of ``shape``."""
        axis, channels = self._concrete(shape, "tensor")
        every = {axis: slice(None, None, self.size), **dict.fromkeys(channels, slice(None))}
        return tuple(every.get(i, slice(0, 1)) for i in range(len(shape)))

    @property
    def channel_axes(self) -> tuple[int, ...]:
        """``channel_axis`` as a tuple, empty where blocks span all channels."""
        axes = self.channel_axis
        return () if axes is None else axes if isinstance(axes, tuple) else (axes,)

    def resolve(self, channel_axis: int | tuple[int, ...] | None, block_axis: int | None) -> PerBlock | PerTensor:
        """The granularity with its open axes filled in; per tensor where the operator has no block axis."""
        if self.axis is not None:
            return self
        return PerTensor() if block_axis is None else replace(self, axis=block_axis, channel_axis=channel_axis)

    def _concrete(self, shape: Shape, site: str) -> tuple[int, tuple[int, ...]]:
        if self.axis is None:
            raise GranularityError(
                site, f"PerBlock({self.size}) has no axis yet", "call resolve() first or write PerBlock(size, axis)"
            )
        axis = _axis(self.axis, len(shape), site)
        channels = tuple(_axis(channel, len(shape), site) for channel in self.channel_axes)
        return axis, channels


@dataclass(frozen=True)
class PerGate(PerTensor):
    """One scale per gate of a recurrent layer's weight; for weights without gates, one per tensor.

    It becomes a :class:`PerBlock` over the rows of a gate as soon as the operator is known
    (:func:`bitwright.core.graph.operators.resolve_granularity`):

    ==================  ==========================  =============
    tensor shape        becomes                     scale shape
    ==================  ==========================  =============
    ``(4 * 16, 8)``     ``PerBlock(16, axis=0)``    ``(4, 1)``
    ``(1, 4 * 16, 8)``  ``PerBlock(16, axis=1)``    ``(1, 4, 1)``
    ==================  ==========================  =============
    """

    def resolve(self, channel_axis: int | None, block_axis: int | None) -> PerTensor:
        """One scale per tensor, as no gates are known here."""
        return PerTensor()


@dataclass(frozen=True)
class PerToken(PerTensor):
    """One scale per token, or per ``block`` elements of each token, computed in every run and never stored.

    It goes with ranges that are chosen at run time (``QuantSpec.dynamic``). ``axis`` is the axis of a token's elements.

    ================  =====================  =======================
    tensor shape      granularity            scales at run time
    ================  =====================  =======================
    ``(2, 7, 64)``    ``PerToken()``         ``(2, 7, 1)``
    ``(2, 7, 64)``    ``PerToken(32)``       ``(2, 7, 2)``
    ``(2, 64, 7)``    ``PerToken(axis=1)``   ``(2, 1, 7)``
    ================  =====================  =======================
    """

    block: int | None = None
    axis: int = -1

    def __post_init__(self) -> None:
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise GranularityError(
                f"PerToken({self.block!r})", "a block needs at least one element", "use 16, 32, 64 or 128"
            )


Granularity = PerTensor | PerChannel | PerBlock

PER_TENSOR = PerTensor()


def phrase(granularity: Granularity) -> str:
    """Describe which elements share a scale; the axis is named once it is known.

    >>> phrase(PerTensor()), phrase(PerChannel()), phrase(PerChannel(1)), phrase(PerBlock(32, 1, (0, 2)))
    ('per tensor', 'per channel', 'per channel (axis 1)', 'per block of 32 of each matrix (axis 1)')
    """
    if isinstance(granularity, PerToken):
        return f"per token in blocks of {granularity.block}" if granularity.block else "per token"
    if isinstance(granularity, PerTensor):
        return "per tensor"
    axis = "" if granularity.axis is None else f" (axis {granularity.axis})"
    if isinstance(granularity, PerChannel):
        return f"per channel{axis}"
    if isinstance(granularity, PerBlock) and granularity.size >= 1 << 24:  # all of the axis, however long it is
        return f"per {'channel' if len(granularity.channel_axes) > 1 else 'head'} over all tokens"
    each = " of each matrix" if len(granularity.channel_axes) > 1 else ""
    return f"per block of {granularity.size}{each}{axis}"


def fitted(granularity: Granularity, shape: Shape) -> Granularity:
    """``granularity`` for a tensor of ``shape``: blocks that are longer than their axis are one scale per channel.

    >>> fitted(PerBlock(32, 1, 0), (8, 24)), fitted(PerBlock(32, 1, 0), (8, 72))
    (PerChannel(axis=0), PerBlock(size=32, axis=1, channel_axis=0))
    >>> fitted(PerBlock(32, 1, (0, 2)), (4, 24, 8))
    PerBlock(size=24, axis=1, channel_axis=(0, 2))
    """
    if not isinstance(granularity, PerBlock) or granularity.axis is None or shape[granularity.axis] >= granularity.size:
        return granularity
    if len(granularity.channel_axes) > 1:  # one block is all that a channel of a matrix sums over
        return replace(granularity, size=shape[granularity.axis])
    channel = next(iter(granularity.channel_axes), None)
    return PerTensor() if channel is None else PerChannel(channel)


def permuted(granularity: Granularity, axes: tuple[int, ...]) -> Granularity:
    """``granularity`` of the tensor with its axes permuted.

    >>> permuted(PerBlock(32, 1, 0), (1, 0)), permuted(PerChannel(0), (0, 2, 1)), permuted(PerTensor(), (1, 0))
    (PerBlock(size=32, axis=0, channel_axis=1), PerChannel(axis=0), PerTensor())
    """
    if isinstance(granularity, PerChannel):
        assert granularity.axis is not None
        return PerChannel(axes.index(granularity.axis % len(axes)))
    if not isinstance(granularity, PerBlock):
        return granularity
    assert granularity.axis is not None
    channels = tuple(axes.index(axis % len(axes)) for axis in granularity.channel_axes)
    return replace(granularity, axis=axes.index(granularity.axis % len(axes)), channel_axis=channels)
