"""Decide which calls are one place: iterations of loops over time, and calls repeated by activation checkpointing.

A layer that a loop calls on one line is a chain in depth, whose calls have places of their own, or a loop over time.
``for _ in range(4): x = layer(x)`` is the same network as four layers that share their weights, each with a range of its
own. ``for t in range(n): h = cell(x[:, t], h)`` is one layer at every step, for any number of steps. What tells them apart
is what the calls read. A chain reads what its earlier call made, and otherwise the same as every other call; a loop over
time reads another part of its input each time. A loop whose turns are all collected (``torch.stack(states)``), that runs a
recurrent cell, or whose number of turns depends on the data is one over time too.

What activation checkpointing computes again in the backward pass is intercepted where the forward was.
``torch.utils.checkpoint`` runs a function without keeping its intermediate results and calls it again in the backward pass,
where no forward of the model runs: the calls would find no place, and those outside of any module would not be seen at all. A
region is recognised by the first call inside of it, and the function that torch keeps for the backward pass is given the
frames as they stood then. Both variants keep it in an object that is made for each region, so nothing of torch is changed.

Loops over time that use no parameters are told apart by the line of code, not by counting. A place without parameters is the
n-th of its kind since parameters were last used. In ``c = f[t] * c + (1 - f[t]) * z[t]`` that would be another place at every
step. While a model is recorded, the line of code of each such call is noted; lines that ran several times and fed themselves
are a loop, and with them what ran between. Those are one place from then on.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from bitwright.core.graph.recurrence import CELLS
from bitwright.torch.calls.inputs import map_arguments

Resumed = Callable[[], AbstractContextManager[None]]

_REENTRANT = CheckpointFunction.forward.__code__
_CHECKPOINT = getattr(checkpoint, "__wrapped__", checkpoint).__code__
_PACK = "_checkpoint_hook.__init__.<locals>.pack_hook"


class Recomputed:
    """The function of a region, as the backward pass calls it.

    Args:
        owner: the interceptor.
        function: what was checkpointed.
        resumed: brings back the frames in which the region stood, inside of a block.
        line: where the region stands in the code.
    """

    def __init__(
        self, owner: object, function: Callable[..., Any], resumed: Resumed, line: tuple[Hashable, ...]
    ) -> None:
        self.owner, self.function, self.resumed, self.line = owner, function, resumed, line

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in the frames of the forward."""
        with self.resumed():
            return self.function(*args, **kwargs)


RECOMPUTES = Recomputed.__call__.__code__


class Region:
    """The innermost checkpointed region around a call; ``holder`` keeps its function under ``name``."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name = holder, name

    def known_to(self, owner: object) -> bool:
        """Whether the frames of ``owner`` are saved already."""
        function = getattr(self.holder, self.name)
        while isinstance(function, Recomputed):
            if function.owner is owner:
                return True
            function = function.function
        return False

    def resume_with(self, owner: object, resumed: Resumed, line: tuple[Hashable, ...]) -> None:
        """Let the backward pass call the function in a block of ``resumed``."""
        function = getattr(self.holder, self.name)
        setattr(self.holder, self.name, Recomputed(owner, function, resumed, line))


def region_of_call() -> Region | None:
    """The checkpointed region that makes this call of a model in training; ``None`` outside of any.

    The variant ``use_reentrant=False`` computes with gradients under hooks of its own for saved tensors, the other one
    without gradients.
    """
    if torch.is_grad_enabled():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or getattr(hooks[0], "__qualname__", "") != _PACK:
            return None
        pack = hooks[0]
        held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))["frame"].cell_contents
        return Region(held, "recompute_fn")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            ctx = frame.f_locals["ctx"]  # before it has the function it looks at the arguments
            return Region(ctx, "run_function") if hasattr(ctx, "run_function") else None
        frame = frame.f_back
    return None


def frame_of_region() -> FrameType | None:
    """The innermost frame of ``torch.utils.checkpoint.checkpoint`` on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CHECKPOINT:
        frame = frame.f_back
    return frame


Where = tuple[Hashable, ...]
"""``(where the frame stands, its anchor, label, line of code)``; the first is a ``Where`` itself, or a module's path."""

CALLS = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)

#: they stand between a module and its forward while a model is exported, or between a function and what it checkpoints
_BETWEEN = (
    *("torch.fx.", "torch.export.", "torch._export.", "torch._dynamo."),
    *("torch._compile", "torch.utils.checkpoint", "torch.autograd."),
)


def line_of_code(stop: Container[CodeType], modules: int = 0, *, start: FrameType | None = None) -> Where:
    """The current instruction of each function between the running forward and this call.

    Args:
        stop: code of what stands in place of a module's forward.
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
    """Places in loops, which stay one place however often they run, and the frames around them.

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
    """Places with several calls, with their first and last call."""
    spans: dict[Where, list[int]] = {}
    for i, call in enumerate(order):
        if call.key in seen:
            spans.setdefault(seen[call.key], []).append(i)
    return {where: (found[0], found[-1]) for where, found in spans.items() if len(found) > 1}


def _overlaps(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    return any(span[0] < end and span[1] > start for start, end in others)


def _extents(carried: Mapping[Where, tuple[int, int]]) -> dict[Where, tuple[int, int]]:
    """Frame and anchor -> first and last call in which its state is carried."""
    found: dict[Where, tuple[int, int]] = {}
    for where, (first, last) in carried.items():
        for context in _contexts(where):
            known = found.get(context, (first, last))
            found[context] = (min(known[0], first), max(known[1], last))
    return found


def _feeding_themselves(calls: Sequence[tuple[Any, Hashable | None]], passes: int = 1) -> list[Any]:
    """Marks of calls whose later runs read results of their earlier runs, directly or through other operators.

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
    """Places of parameters that several layers share, each called from its own line.

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
    """``where``, and the frames without parameters around it."""
    while isinstance(where, tuple):
        yield where
        where = where[0]  # type: ignore[assignment]


def _contexts(where: Where) -> Iterator[Where]:
    """Frame and anchor of a place, and of the frames around it."""
    return (place[:2] for place in _around(where))


#: more turns than networks have layers
_MOST_TURNS = 64
#: events looked at, over all places, for each that was recorded
_MOST_LOOKS = 30


@dataclass(slots=True, frozen=True)
class Event:
    """A call in execution order, with unique numbers for its values.

    Attributes:
        path: of the module that runs.
        op_type: of the operator.
        reads, writes: tensors; those of parameters are negative.
        rest: the arguments that are not tensors; compared as text, which tells 1 from True.
    """

    path: str
    op_type: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    rest: Any


class Trace:
    """Record of a run: its calls, and the calls at each parameter's place."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.starts: dict[Where, list[list[int]]] = {}  # place -> by forward -> index of the next event
        self.scattered: set[Where] = set()  # places that several forwards of one module call
        self.forwards = 0
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._next = 0

    def begin(self) -> None:
        """The next forward starts."""
        self.forwards += 1
        self._numbers.clear()

    def start(self, place: Where, turn: int) -> None:
        """The place of a parameter is about to be called, for the ``turn``-th time in the forward that calls it."""
        by_forward = self.starts.setdefault(place, [])
        if turn != (len(by_forward[-1]) if len(by_forward) == self.forwards else 0):
            self.scattered.add(place)
        by_forward.extend([] for _ in range(self.forwards - len(by_forward)))
        by_forward[-1].append(len(self.events))

    def call(
        self,
        path: str,
        op_type: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_fixed: Callable[[torch.Tensor], bool],
        made: Sequence[torch.Tensor],
    ) -> None:
        """A call returned; ``is_fixed`` says of the tensors in its arguments which are parameters or constants."""
        tensors: list[torch.Tensor] = []
        rest = map_arguments(args, kwargs, tensors.append)
        reads = tuple([-1 if is_fixed(tensor) else self._number(tensor) for tensor in tensors])
        writes = tuple([self._new_number(tensor) for tensor in made])
        self.events.append(Event(path, op_type, reads, writes, rest))

    def _number(self, tensor: torch.Tensor) -> int:
        known = self._numbers.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else self._new_number(tensor)

    def _new_number(self, tensor: torch.Tensor) -> int:
        self._next += 1
        self._numbers[id(tensor)] = (weakref.ref(tensor), self._next)
        return self._next


def find_repeats(trace: Trace, lines: Mapping[Where, Mapping[Where, int]]) -> dict[Hashable, int]:
    """The places that a loop calls on one line, as a chain, and the number of turns.

    Args:
        trace: of the recorded forwards.
        lines: place -> line of code -> how often it called.
    """
    found: dict[Hashable, int] = {}
    inside: list[str] = []  # paths of modules whose calls are told apart, with all that is in them
    budget = _MOST_LOOKS * len(trace.events)
    for place in _candidates(trace, lines):
        forwards, turns = trace.starts[place], _turns(trace, place)
        path = _module_of(place)
        if not turns or _is_within_any(trace.events[forwards[0][0]].path if path is None else path, inside):
            continue
        budget -= sum(starts[-1] - starts[0] for starts in forwards)
        if budget < 0:
            break
        if all(_is_chain(trace.events, starts, path) for starts in forwards):
            found[place] = turns
            inside += [] if path is None else [path]
    return found


def _candidates(trace: Trace, lines: Mapping[Where, Mapping[Where, int]]) -> list[Where]:
    """The places that one line calls, in the order of their first calls."""
    found = [p for p in trace.starts if len(lines.get(p, {})) == 1 and p not in trace.scattered]
    return sorted(found, key=lambda place: trace.starts[place][0][:1])


def _module_of(place: Where) -> str | None:
    """The path of the module that a place is; ``None`` where it is a parameter and a function."""
    return str(place[1]) if len(place) == 2 else None


def _turns(trace: Trace, place: Where) -> int:
    """Number of calls of a place per forward; 0 where forwards differ, or the calls cannot be layers in depth."""
    by_forward = trace.starts[place]
    turns = {len(starts) for starts in by_forward}
    if len(turns) != 1 or len(by_forward) != trace.forwards:
        return 0
    (count,) = turns
    return count if 1 < count <= _MOST_TURNS else 0


def _is_within_any(path: str, outer: Iterable[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in outer)


def _is_chain(events: Sequence[Event], starts: Sequence[int], path: str | None) -> bool:
    """Whether the turns that begin at ``starts`` are layers one after the other."""
    ends = [_end(events, a, b, path) for a, b in zip(starts, [*starts[1:], len(events)], strict=True)]
    if path is not None:  # what follows the last call may be of the same module
        ends[-1] = min(ends[-1], starts[-1] + ends[0] - starts[0])
    bounds = [*starts, ends[-1]]
    if any(event.op_type in CELLS for event in events[starts[0] : ends[-1]]):
        return False
    turn_of = _turn_of_values(events, bounds)
    own = [_reads(events[a:b], turn_of, k) for k, (a, b) in enumerate(zip(starts, ends, strict=True))]
    gaps = [_reads(events[a:b], turn_of, k) for k, (a, b) in enumerate(zip(ends, starts[1:], strict=False))]
    if not (_alike(own) and _alike(gaps)):
        return False
    if len(gaps) == 1 and _reads_from_outside(gaps[0], own):
        return False  # two turns alone do not tell whether the second would read the same as a third
    followed = (_follows(events[a:b], turn_of, k) for k, (a, b) in enumerate(zip(starts, ends, strict=True)) if k)
    return all(followed) and not _collected(events[ends[-1] :], turn_of)


def _turn_of_values(events: Sequence[Event], bounds: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Value -> the turn that computes it, and its position in the turn."""
    found: dict[int, tuple[int, int]] = {}
    for turn, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        values = [value for event in events[first:last] for value in event.writes]
        found.update((value, (turn, i)) for i, value in enumerate(values))
    return found


def _reads_from_outside(gap: Sequence[_Shape], own: Sequence[Sequence[_Shape]]) -> bool:
    """Whether what runs between two turns reads something from outside that the second turn does not take from the first."""
    pairs = [pair for one, other in zip(own[0], own[1], strict=True) for pair in zip(one[2], other[2], strict=True)]
    carried = {read[1] for read, later in pairs if read != later}
    return any(kind == "outer" and value not in carried for *_, reads in gap for kind, value in reads)


def _alike(turns: Sequence[Sequence[_Shape]]) -> bool:
    """Whether all turns make the same calls on the same operands; the first may read others in place of a previous turn's."""
    if any(turn != turns[1] for turn in turns[2:]):
        return False
    return len(turns) < 2 or _begins(turns[0], turns[1])


def _end(events: Sequence[Event], start: int, last: int, path: str | None) -> int:
    """End of the place's own calls: one call for a parameter, else those within its module."""
    if path is None:
        return start + 1
    end = start
    while end < last and (events[end].path == path or events[end].path.startswith(f"{path}.")):
        end += 1
    return end


Read = tuple[str, Any]
_Shape = tuple[str, str, tuple[Read, ...]]


def _reads(events: Sequence[Event], turn_of: Mapping[int, tuple[int, int]], turn: int) -> list[_Shape]:
    """Signature of one iteration: its calls, and whether each operand is from this iteration, the one before, or elsewhere."""
    found = []
    for event in events:
        reads: list[Read] = []
        for value in event.reads:
            made = turn_of.get(value)
            if value < 0:
                reads.append(("param", None))
            elif made is None:
                reads.append(("outer", value))
            elif turn - made[0] in (0, 1):
                reads.append(("this" if made[0] == turn else "before", made[1]))
            else:
                reads.append(("older", value))
        found.append((event.op_type, str(event.rest), tuple(reads)))
    return found


def _begins(first: Sequence[_Shape], second: Sequence[_Shape]) -> bool:
    """Whether the first turn equals the second, with outside values instead of those of a previous turn."""
    if len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        if one[:2] != other[:2] or len(one[2]) != len(other[2]):
            return False
        for read, later in zip(one[2], other[2], strict=True):
            if read != later and not (read[0] == "outer" and later[0] == "before"):
                return False
    return True


def _follows(events: Sequence[Event], turn_of: Mapping[int, tuple[int, int]], turn: int) -> bool:
    """Whether a turn reads results of the previous one."""
    return any(turn_of.get(value, (turn, 0))[0] == turn - 1 for event in events for value in event.reads)


def _collected(events: Sequence[Event], turn_of: Mapping[int, tuple[int, int]]) -> bool:
    """Whether a later call reads values of several turns at once."""
    return any(len({turn_of[v][0] for v in event.reads if v in turn_of}) > 1 for event in events)
