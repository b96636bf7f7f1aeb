"""One layer that a loop calls on one line: a chain in depth, whose calls have places of their own, or a loop over time.

``for _ in range(4): x = layer(x)`` is the same network as four layers that share their weights, each with a range of its
own. ``for t in range(n): h = cell(x[:, t], h)`` is one layer at every step, for any number of steps. What tells them apart
is what the calls read. A chain reads what its earlier call made, and otherwise the same as every other call; a loop over
time reads another part of its input each time. A loop whose turns are all collected (``torch.stack(states)``), that runs a
recurrent cell, or whose number of turns depends on the data is one over time too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bitwright.core.graph.recurrence import CELLS
from bitwright.torch.calls.trees import map_arguments
from bitwright.torch.interception.loops import Where

#: more turns than networks have layers
_MOST_TURNS = 64
#: events looked at, over all places, for each that was recorded
_MOST_LOOKS = 30


@dataclass(slots=True, frozen=True)
class Event:
    """A call, in the order in which they ran, with numbers for values that no other call has.

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
    """What ran while a model was recorded: calls, and where the place of a parameter was called."""

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
    """The places that a loop calls on one line, as a chain, and how many turns it has.

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
    """How often every forward calls a place; 0 where the forwards differ, or that cannot be layers in depth."""
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
    """Value -> the turn that makes it, and its place in the turn."""
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
    """Whether every turn does the same with the same; the first may have other values in the place of its forerunner's."""
    if any(turn != turns[1] for turn in turns[2:]):
        return False
    return len(turns) < 2 or _begins(turns[0], turns[1])


def _end(events: Sequence[Event], start: int, last: int, path: str | None) -> int:
    """Where the calls of the place itself end: one call for a parameter, those within a module otherwise."""
    if path is None:
        return start + 1
    end = start
    while end < last and (events[end].path == path or events[end].path.startswith(f"{path}.")):
        end += 1
    return end


Read = tuple[str, Any]
_Shape = tuple[str, str, tuple[Read, ...]]


def _reads(events: Sequence[Event], turn_of: Mapping[int, tuple[int, int]], turn: int) -> list[_Shape]:
    """What the calls of one turn do and read, told by where it comes from: this turn, the one before, or elsewhere."""
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
    """Whether the first turn is as the second, with values from outside in the place of those of a turn before."""
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
    """Whether a turn reads what the one before it made."""
    return any(turn_of.get(value, (turn, 0))[0] == turn - 1 for event in events for value in event.reads)


def _collected(events: Sequence[Event], turn_of: Mapping[int, tuple[int, int]]) -> bool:
    """Whether a later call reads values of several turns at once."""
    return any(len({turn_of[v][0] for v in event.reads if v in turn_of}) > 1 for event in events)
