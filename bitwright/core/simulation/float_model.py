"""``FloatModel``: the protocol through which algorithms read and edit a model of either front end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bitwright.core.graph.graph import Graph

Array = NDArray[Any]
Undo = Callable[[], None]
"""Takes an edit back."""


class Handle:
    """A change that is undone by ``remove`` or at the end of a ``with`` block."""

    def __init__(self, cleanup_fn: Undo) -> None:
        self._cleanup: Undo | None = cleanup_fn

    def remove(self) -> None:
        """Undo the change; a second call does nothing."""
        cleanup, self._cleanup = self._cleanup, None
        if cleanup is not None:
            cleanup()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclass(frozen=True)
class SetParam:
    """Give the parameter ``name`` a new value of the same shape; its dtype stays."""

    name: str
    value: Array


@dataclass(frozen=True)
class AddBias:
    """Give the op ``op`` a bias it did not have; ``value`` has one entry per output channel."""

    op: str
    value: Array


@dataclass(frozen=True)
class Bypass:
    """Make the op ``op`` pass its first input through unchanged."""

    op: str


@dataclass(frozen=True)
class Clamp:
    """Make the op ``op``, which cuts at fixed bounds, cut each channel at bounds of its own.

    ``low`` and ``high`` have one entry per channel of ``axis``; an infinite one does not cut.
    """

    op: str
    low: Array
    high: Array
    axis: int = 1


@dataclass(frozen=True)
class Untie:
    """Give the op ``op`` a copy of its own of the parameter that it reads at ``port`` and that others read too."""

    op: str
    port: int


@dataclass(frozen=True)
class Before:
    """A layer without bias that a :class:`Chain` puts in front of an operator.

    Attributes:
        type: ``Conv`` with a weight ``[O, I, *kernel]``, or ``MatMul`` with one ``[K, O]``.
        weight: its values.
        attrs: of the convolution: ``kernel_shape``, ``strides``, ``pads``, ``dilations``, ``auto_pad``, ``group``.
        rotates: whether ``weight`` is an invertible matrix that is not a parameter: a ``MatMul`` whose name ends in
            :data:`~bitwright.core.graph.operators.ROTATION`, which simulations leave in float.
    """

    type: str
    weight: Array
    attrs: Mapping[str, Any]
    rotates: bool = False


@dataclass(frozen=True)
class Chain:
    """Put layers in front of ``op`` and give it a weight of another shape, as for factors of its weight; its bias stays.

    Attributes:
        op: a layer; of a recurrent module with two directions the first of them.
        before: in order of execution; what they make is what ``op`` reads then.
        weight: in the layout of the operator's own; of a recurrent layer with the directions as first axis.
        attrs: attributes of a convolution that change, as of :class:`Before`.
    """

    op: str
    before: tuple[Before, ...]
    weight: Array
    attrs: Mapping[str, Any]


Edit = SetParam | AddBias | Bypass | Clamp | Untie | Chain


Seen = Callable[[str, range, list[list[Array]]], None]
"""Takes the name of a value, indices of batches, and for each the value in its runs; see :meth:`FloatModel.walk`."""


class FloatModel(Protocol):
    """Protocol of a float model that algorithms read and change."""

    def graph(self) -> Graph:
        """The data-flow graph of the model after the edits so far."""

    def param(self, name: str) -> Array:
        """The value of a parameter, float32 or wider; a copy."""

    def constant(self, name: str) -> Array | None:
        """Array of a value of the kind ``constant`` under the current parameters, float32 or wider; a copy.

        ``None`` where it is not computed apart from the model.
        """

    def capture(self, values: Sequence[str], batches: Iterable[Any]) -> Iterator[dict[str, list[Array]]]:
        """Run the batches one by one; yield the named values of each, one array per run of their place."""

    def walk(self, values: Sequence[str], batches: Sequence[Any], seen: Seen) -> None:
        """Run the batches, and hand over each named value before it is read: what is edited then applies after it.

        A front end hands over one batch at a time, all values of it in the order of the run; or one value of all batches at a
        time, in the order of the graph. ``seen`` may set parameters that are read after the value, and edit nothing else.

        Args:
            values: names, as for :meth:`capture`.
            batches: data that can be read several times.
            seen: ``seen(value, batches, runs)``: indices of batches, and for each the arrays of the value in its runs.
        """

    def local(self, op: str) -> Callable[..., Array]:
        """One operator as a function of its activation inputs, with its current parameters."""

    def can_edit(self, edit: Edit) -> str | None:
        """The reason why ``edit`` is impossible, or ``None`` where it can be done."""

    def edit(self, edits: Sequence[Edit]) -> Undo:
        """Carry out the edits together; the function returned undoes them."""


def carry_out(edits: Sequence[Edit], one: Callable[[Edit], Undo], refresh: Callable[[], None]) -> Undo:
    """Do ``edits`` in order by ``one``, which returns how to take its edit back; all of them or none.

    Args:
        edits: in order.
        one: carries out one of them.
        refresh: reads the model again; called once for all chains, after they are carried out and after they are undone.

    Returns:
        A function that takes all of them back, the last first; calling it again changes nothing.
    """
    undos: list[Undo] = []
    chains = any(isinstance(edit, Chain) for edit in edits)

    def take_back() -> None:
        while undos:
            undos.pop()()

    def undo() -> None:
        take_back()
        if chains:
            refresh()

    try:
        for edit in edits:
            undos.append(one(edit))
    except BaseException:
        take_back()
        raise
    if chains:
        refresh()
    return undo


def sqnr(reference: Array, other: Array) -> float:
    """Signal-to-quantization-noise ratio in dB, in float64; ``inf`` when equal. Infinities that both have count nothing.

    Example:
        >>> round(sqnr(np.array([1.0, -np.inf]), np.array([1.1, -np.inf])), 3)
        20.0
    """
    one, two = np.asarray(reference, np.float64), np.asarray(other, np.float64)
    signal = np.square(one).sum()
    if not np.isfinite(signal):
        shared = np.isinf(one) & (one == two)
        one, two = np.where(shared, 0.0, one), np.where(shared, 0.0, two)
        signal = np.square(one).sum()
    noise = np.square(one - two).sum()
    if noise == 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal else float("-inf")
