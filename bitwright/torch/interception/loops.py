"""Loops over time that use no parameters: their places are told apart by the line of code, not by counting.

A place without parameters is the n-th of its kind since parameters were last used. In ``c = f[t] * c + (1 - f[t]) * z[t]``
that would be another place at every step. While a model is recorded, the line of code of each such call is noted; lines
that ran several times and fed themselves are a loop, and with them what ran between. Those are one place from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import nn

from bitwright.torch.interception.checkpointing import RECOMPUTES

Where = tuple[Hashable, ...]
"""``(where the frame stands, its anchor, label, line of code)``; the first is a ``Where`` itself, or a module's path."""

CALLS = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)

#: they stand between a module and its forward while a model is exported, or between a function and what it checkpoints
_BETWEEN = (
    *("torch.fx.", "torch.export.", "torch._export.", "torch._dynamo."),
    *("torch._compile", "torch.utils.checkpoint", "torch.autograd."),
)


def line_of_code(stop: Container[CodeType], modules: int = 0, *, start: FrameType | None = None) -> Where:
    """The instructions at which the functions stand that lead from the running forward to this call.

    Args:
        stop: code of what stands in the place of a module's forward.
        modules: forwards to pass by: 1 where the place of a module that is called is looked for.
        start: the innermost function to look at; the caller where none is given.
    """
    found: list[Hashable] = []
    frame: FrameType | None = start or sys._getframe(1)
    while frame is not None:
        if frame.f_code in stop:
            if not modules:
                break
            modules -= 1
            found.clear()
        elif frame.f_code is RECOMPUTES:  # the backward pass; its function was called from where the forward was
            found.extend(frame.f_locals["self"].line)
            break
        elif frame.f_code not in CALLS and not frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def find_loops(calls: Iterable[Any], seen: Mapping[Hashable, Where]) -> frozenset[Where]:
    """The places that are one place however often they run, the frames around them included.

    Args:
        calls: those of a recorder, in execution order: ``key``, ``inputs``, ``also`` and ``outputs`` are read.
        seen: key of a call -> where it stands; calls that are told apart by their parameters are not in it.
    """
    order = list(calls)
    several = _called_again(order, seen)
    if not several:
        return frozenset()
    marks = {key: where for key, where in seen.items() if where in several}
    marked = [(call, marks.get(call.key)) for call in order]
    loops = _extents({where: several[where] for where in _feeding_themselves(marked)})
    shared: set[Where] = set()
    for where, span in several.items():
        if _overlaps(span, (loops[context] for context in _contexts(where) if context in loops)):
            shared.update(_around(where))
    return frozenset(shared)


def _called_again(order: Sequence[Any], seen: Mapping[Hashable, Where]) -> dict[Where, tuple[int, int]]:
    """The places of several calls, from the first to the last."""
    spans: dict[Where, list[int]] = {}
    for i, call in enumerate(order):
        if call.key in seen:
            spans.setdefault(seen[call.key], []).append(i)
    return {where: (found[0], found[-1]) for where, found in spans.items() if len(found) > 1}


def _overlaps(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    return any(span[0] < end and span[1] > start for start, end in others)


def _extents(carried: Mapping[Where, tuple[int, int]]) -> dict[Where, tuple[int, int]]:
    """Frame and anchor -> from the first to the last of what is carried there."""
    found: dict[Where, tuple[int, int]] = {}
    for where, (first, last) in carried.items():
        for context in _contexts(where):
            known = found.get(context, (first, last))
            found[context] = (min(known[0], first), max(known[1], last))
    return found


def _feeding_themselves(calls: Sequence[tuple[Any, Hashable | None]], passes: int = 1) -> list[Any]:
    """Marks of calls whose later runs read, through whatever operators, what their earlier runs made.

    Args:
        calls: with the mark of each; ``None`` has none.
        passes: how often the calls are gone through: what a later run reads may stand after its place in the order.
    """
    bits: dict[Hashable, int] = {}
    reached: dict[int, int] = {}  # value -> the marks it comes from
    carried: dict[Hashable, None] = {}
    for call, mark in [*calls] * passes:
        mask = 0
        for value in (*call.inputs, *(value for _, value in call.also)):
            mask |= reached.get(value, 0)
        if mark is not None:
            bit = bits.setdefault(mark, 1 << len(bits))
            if mask & bit:
                carried[mark] = None
            mask |= bit
        for value in call.outputs if mask else ():
            reached[value] = reached.get(value, 0) | mask
    return list(carried)


def find_turns(calls: Iterable[Any], lines: Mapping[Where, Mapping[Where, int]], forwards: int) -> frozenset[Hashable]:
    """The places of parameters at which several layers share them, each called by a line of its own.

    Such a place is called by several lines, one of which reads what came of another. A line that is called more than once in
    a forward is a loop over time: it stays one place, and so does what stands before it.

    Args:
        calls: those of a recorder, in execution order, the calls of one place as one.
        lines: place -> line of code -> how often it called; a place is ``(frame, path of a module)`` or
            ``(frame, parameter, label)``.
        forwards: how many were recorded.
    """
    shared = [p for p, found in lines.items() if len(found) > 1 and max(found.values()) <= forwards]
    if not shared:
        return frozenset()
    order = list(calls)
    heads: dict[int, list[Hashable]] = {}  # the first call of a place -> the place
    for place in shared:
        at = next((i for i, call in enumerate(order) if _stands_at(call, place)), None)
        if at is not None:
            heads.setdefault(at, []).append(place)
    marked = [(call, i if i in heads else None) for i, call in enumerate(order)]
    return frozenset(place for at in _feeding_themselves(marked, passes=3) for place in heads[at])


def _stands_at(call: Any, place: Any) -> bool:
    if len(place) > 2:
        return bool(call.key == place)
    path = place[1]
    return bool(call.path == path or call.path.startswith(f"{path}."))


def _around(where: Where) -> Iterator[Where]:
    """``where``, and the frames without parameters that it lies in."""
    while isinstance(where, tuple):
        yield where
        where = where[0]  # type: ignore[assignment]


def _contexts(where: Where) -> Iterator[Where]:
    """Frame and anchor of a place, and of the frames around it."""
    return (place[:2] for place in _around(where))
