"""Entries of encodings files of any version, and the order of gates in recurrent weights.

Torch stores recurrent weights as ``[gates * hidden, columns]``, ONNX as ``[1, gates * hidden, columns]`` with the gates in
another order. ``order[i]`` is the gate of the one layout at position ``i`` of the other; it is empty for a projection, whose
rows keep their order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitwright.core.numerics.affine import is_sayable, scale_multiples
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import FLOAT4_E2M1, FLOAT8_E4M3, FLOAT8_E5M2, SCALE_FORMATS, FloatFormat, IntFormat
from bitwright.core.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, Shape, phrase
from bitwright.errors import EncodingsError, close_matches

Version = Literal["0.6.1", "1.0.0", "2.0.0"]
Kind = Literal["activation", "param", "unknown"]

VERSIONS: tuple[Version, ...] = ("0.6.1", "1.0.0", "2.0.0")

SECTIONS: dict[str, Kind] = {"activation_encodings": "activation", "param_encodings": "param"}
FLOATS_2_0_0: dict[str, FloatFormat] = {
    "float8e4m3fn": FLOAT8_E4M3,
    "float8e5m2": FLOAT8_E5M2,
    "float4e2m1": FLOAT4_E2M1,
}
INTS_2_0_0 = ("int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32")


#: axis of output channels, several of stacked matrices, or none
Channels = int | tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class GroupedScale:
    """Block scales in two factors (LPBQ): a small integer per block times one float per channel.

    Attributes:
        block: int64, shape P of the blocks; flat while the axes are open.
        channel: float32, P with 1 on the block axis; flat while the axes are open.
        decompressed_bits: width of the integer weight that block scale and code multiply to.
    """

    block: NDArray[np.int64]
    channel: NDArray[np.float32]
    decompressed_bits: int

    @classmethod
    def of(cls, encoding: Encoding) -> GroupedScale | None:
        """The factors of an encoding whose scales are whole multiples of one number per channel; else ``None``."""
        multiples, fmt = encoding.scale_format.multiples, encoding.format
        stored = scale_multiples(encoding)
        if not isinstance(multiples, IntFormat) or not isinstance(fmt, IntFormat) or stored is None:
            return None
        if not isinstance(encoding.granularity, PerBlock) or encoding.common is None:
            return None
        if encoding.scale_format.shared != "channel":
            return None
        return cls(stored.astype(np.int64), encoding.common, fmt.bits + multiples.bits)

    def applied_to(self, encoding: Encoding) -> Encoding:
        """``encoding`` with the scale format of these factors, where there is one and its axes are known."""
        name = f"uint{self.decompressed_bits - encoding.format.bits}"
        if name not in SCALE_FORMATS or self.channel.ndim != encoding.scale.ndim or encoding.scale.ndim < 2:
            return encoding
        stored = replace(encoding, scale_format=SCALE_FORMATS[name], common=self.channel)
        return stored if is_sayable(stored) else encoding

    def product(self) -> NDArray[np.float32]:
        """The effective scales, shape P: the float32 products that an integer runtime computes."""
        block = self.block.astype(np.float32)
        with np.errstate(over="ignore"):  # the reader reports what is not finite, with its name
            if block.ndim == 1:  # open: all blocks of the first channel come first
                return (block.reshape(self.channel.size, -1) * self.channel[:, None]).ravel()
            return block * self.channel

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GroupedScale):
            return NotImplemented
        return (
            self.decompressed_bits == other.decompressed_bits
            and np.array_equal(self.block, other.block)
            and np.array_equal(self.channel, other.channel)
        )

    def __hash__(self) -> int:
        return hash((self.decompressed_bits, self.block.tobytes(), self.channel.tobytes()))


@dataclass(frozen=True)
class NamedEncoding:
    """One entry of an encodings file.

    Attributes:
        name: ONNX value or initializer, or a site such as ``conv1.input[0]``.
        kind: activation or parameter; ``"unknown"`` after reading 2.0.0 without ``params``.
        encoding: what calibration found; after reading, its axes may be open (see :meth:`resolve`).
        grouped: the two factors of the block scales, for LPBQ; their product is ``encoding.scale``. Taken from the encoding
            where it has them.
    """

    name: str
    kind: Kind
    encoding: Encoding
    grouped: GroupedScale | None = None

    def __post_init__(self) -> None:
        if self.grouped is None:
            object.__setattr__(self, "grouped", GroupedScale.of(self.encoding))
        else:
            object.__setattr__(self, "encoding", self.grouped.applied_to(self.encoding))

    @property
    def is_open(self) -> bool:
        """Whether axes are missing, so that :meth:`resolve` has to come first."""
        granularity = self.encoding.granularity
        return not isinstance(granularity, PerTensor) and granularity.axis is None

    def resolve(self, shape: Shape, channel_axis: Channels = None, block_axis: int | None = None) -> NamedEncoding:
        """The record with concrete, non-negative axes and parameters of shape P for a tensor of ``shape``.

        Args:
            shape: of the tensor that the entry describes.
            channel_axis: output-channel axis of the operator that consumes it, several where matrices are stacked;
                ``None`` where it has none.
            block_axis: its input-channel axis; ``None`` where it has none.

        Raises:
            EncodingsError: the scales do not fit ``shape``, as in a file of another model.
        """
        granularity = self._fit(shape, channel_axis, block_axis)
        params = granularity.param_shape(shape, self.name)
        turned = self.is_open and channels_come_first(granularity, len(params))
        grouped = self.grouped if isinstance(granularity, PerBlock) else None
        if grouped is not None:
            channel = grouped.channel.reshape(_without_blocks(params, granularity))
            grouped = replace(grouped, block=_place(grouped.block, params, turned), channel=channel)
        scale = _place(self.encoding.scale, params, turned) if grouped is None else grouped.product()
        zero_point = _place(self.encoding.zero_point, params, turned)
        encoding = Encoding(self.encoding.format, scale, zero_point, granularity)
        return replace(self, encoding=encoding, grouped=grouped)

    def _fit(self, shape: Shape, channel_axis: Channels, block_axis: int | None) -> Granularity:
        """The granularity with concrete axes under which the scales fit a tensor of ``shape``."""
        scale = self.encoding.scale
        for granularity in _candidates(self.encoding.granularity, channel_axis, block_axis, len(shape)):
            params = granularity.param_shape(shape, self.name)
            channels = self.grouped.channel.size if self.grouped and isinstance(granularity, PerBlock) else None
            if channels not in (None, prod(_without_blocks(params, granularity))):
                continue
            if scale.shape == params or (scale.size == prod(params) and (self.is_open or scale.size == 1)):
                return granularity
        raise EncodingsError(
            site=self.name,
            problem=f"its {scale.size} scales, {phrase(self.encoding.granularity)}, do not fit a tensor of "
            f"shape {tuple(shape)} with channel axis {channel_axis} and block axis {block_axis}",
            remedy="use the encodings file that was exported with this model",
        )


def _concrete(rank: int, axis: int | None) -> int | None:
    """``axis`` as a non-negative number, if a tensor of this rank has it."""
    return axis % rank if axis is not None and -rank <= axis < rank else None


def _candidates(
    granularity: Granularity, channel_axis: Channels, block_axis: int | None, rank: int
) -> list[Granularity]:
    """Possible readings of an entry for an operator with these axes, most likely first."""
    if isinstance(granularity, PerTensor):
        return [granularity]
    given = PerBlock(1, block_axis, channel_axis).channel_axes
    concrete = partial(_concrete, rank)

    if isinstance(granularity, PerChannel):
        axis = concrete(next(iter(given[-1:]), None) if granularity.axis is None else granularity.axis)
        return [PerTensor() if axis is None else PerChannel(axis)]
    axis = concrete(block_axis if granularity.axis is None else granularity.axis)
    if axis is None:
        return [PerTensor()]
    held = granularity.channel_axes or given
    channels = tuple(c for c in map(concrete, held) if c is not None and c != axis)
    # A channel axis of the operator need not be one of the blocks: these may span all channels, or all matrices.
    likely: list[Channels] = [channels, channels[-1:], granularity.channel_axis]
    return list(dict.fromkeys(PerBlock(granularity.size, axis, one) for one in likely))


def channels_come_first(granularity: Granularity, rank: int) -> bool:
    """Whether 1.0.0 lists the blocks of a matrix transposed: by output channel, also where that is axis 1."""
    if not isinstance(granularity, PerBlock) or rank != 2 or granularity.channel_axis is None:
        return False
    return granularity.channel_axes == (1,) or granularity.channel_axes == (-1,)


def _without_blocks(params: Shape, granularity: Granularity) -> Shape:
    """``params`` with a single block on the block axis: the shape of the channel factor of LPBQ."""
    axis = granularity.axis if isinstance(granularity, PerBlock) else None
    return tuple(1 if i == axis else n for i, n in enumerate(params))


def _place(values: NDArray[Any], shape: Shape, turned: bool) -> NDArray[Any]:
    return values.reshape(shape[::-1]).T if turned else values.reshape(shape)


@dataclass(frozen=True)
class EncodingsFile:
    """Contents of an encodings file; `quantizer_args` and `excluded_layers` are empty in version 2.0.0."""

    version: Version
    records: tuple[NamedEncoding, ...]
    quantizer_args: dict[str, Any] = field(default_factory=dict)
    excluded_layers: tuple[str, ...] = ()
    producer: dict[str, Any] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, NamedEncoding]:
        """Every record under its name; names are unique in a file."""
        return {record.name: record for record in self.records}


@dataclass(frozen=True)
class NotExpressed:
    """Something that a version of the format cannot express exactly.

    Attributes:
        name: the record, or ``"quantizer_args"`` / ``"excluded_layers"``.
        reason: what the version lacks, and what was done instead.
        written: whether the nearest faithful form is in the file; otherwise it was left out.
    """

    name: str
    reason: str
    written: bool


@dataclass(frozen=True)
class WrittenEncodings(os.PathLike[str]):
    """The written file (usable as a path), and encodings that its version cannot express."""

    path: Path
    not_expressed: tuple[NotExpressed, ...] = ()

    def __fspath__(self) -> str:
        return str(self.path)


def check_version(site: str, version: str) -> Version:
    """``version`` if it is one of `VERSIONS`; else an error with the close matches."""
    for known in VERSIONS:
        if version == known:
            return known
    raise EncodingsError(
        site,
        f"version {version!r:.40} is not known{close_matches(version[:40], VERSIONS)}",
        f"use one of the versions {', '.join(VERSIONS)}",
    )


#: ports of W and R, whose rows are gates
GATED = (1, 2)


def gate_order(have: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """Index in ``have`` of each gate in ``wanted``.

    Example:
        >>> gate_order(("reset", "update", "candidate"), ("update", "reset", "candidate"))
        (1, 0, 2)
    """
    return tuple(have.index(gate) for gate in wanted)


def to_onnx_order(encoding: Encoding, order: Sequence[int], shape: tuple[int, ...]) -> Encoding:
    """The encoding of a weight ``[rows, columns]`` in ONNX's order; one scale per gate becomes one per row.

    Args:
        encoding: of the weight in torch's layout.
        order: place of a gate in ONNX -> its place in torch; empty for a projection.
        shape: of the weight in torch.
    """
    granularity, scale, zero_point = encoding.granularity, encoding.scale, encoding.zero_point
    shift = encoding.shift
    if isinstance(granularity, PerTensor):
        return encoding
    assert granularity.axis is not None
    axis = granularity.axis % 2
    if isinstance(granularity, PerBlock) and granularity.channel_axis is None and axis == 0:  # per gate
        granularity = PerChannel(0)
        size = shape[0] // len(scale)
        scale, zero_point = np.repeat(scale[:, 0], size), np.repeat(zero_point[:, 0], size)
        shift = None if shift is None else np.repeat(shift[:, 0], size)
    wanted: Granularity = PerChannel(axis + 1)
    if isinstance(granularity, PerBlock):
        wanted = PerBlock(granularity.size, axis + 1, tuple(c % 2 + 1 for c in granularity.channel_axes))

    def moved(values: NDArray[Any]) -> NDArray[Any]:
        if axis == 0 or isinstance(granularity, PerBlock):
            values = _reordered(values, order)
        return values if isinstance(wanted, PerChannel) else values[None]

    shift = None if shift is None else moved(shift)
    return replace(encoding, granularity=wanted, scale=moved(scale), zero_point=moved(zero_point), shift=shift)


def from_onnx_order(encoding: Encoding, order: Sequence[int]) -> Encoding:
    """The encoding of an ONNX weight ``[1, rows, columns]`` in torch's order; inverse of :func:`to_onnx_order`.

    Args:
        encoding: of the weight in ONNX, with concrete axes, none of them the axis of directions.
        order: place of a gate in torch -> its place in ONNX; empty for a projection.
    """
    granularity = encoding.granularity
    if isinstance(granularity, PerTensor):
        return encoding
    assert granularity.axis is not None
    axis = granularity.axis % 3 - 1
    wanted: Granularity = PerChannel(axis)
    if isinstance(granularity, PerBlock):
        channels = tuple(c % 3 - 1 for c in granularity.channel_axes if c % 3)
        wanted = PerBlock(granularity.size, axis, channels)

    def moved(values: NDArray[Any]) -> NDArray[Any]:
        values = values if isinstance(wanted, PerChannel) else values[0]
        return _reordered(values, order) if axis == 0 or isinstance(wanted, PerBlock) else values

    scale, zero_point = moved(encoding.scale), moved(encoding.zero_point)
    shift = None if encoding.shift is None else moved(encoding.shift)
    return replace(encoding, granularity=wanted, scale=scale, zero_point=zero_point, shift=shift)


def _reordered(values: NDArray[Any], order: Sequence[int]) -> NDArray[Any]:
    """``values`` per row, or per block of rows, with their gates in ``order``; a single row holds for all gates."""
    if not order or len(values) == 1:
        return values
    parts = np.array_split(values, len(order))
    return np.concatenate([parts[i] for i in order])
