"""Changing a model in parts that must each leave its function as it was: what fails the check is found by halving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from bitwright.core.simulation.protocols import Undo

T = TypeVar("T")

#: says what is wrong with the model as it stands, or ``None``
Check = Callable[[], str | None]
#: how often the check of the whole model is asked at most
MAX_CHECKS = 100
#: shows how far the work is: items and a title -> the same items
Bar = Callable[[Iterable[Any], str], Iterable[Any]]


def no_bar(items: Iterable[Any], title: str) -> Iterable[Any]:
    """The :data:`Bar` that shows nothing."""
    return items


def sift(
    items: Sequence[T], carry_out: Callable[[Sequence[T]], Undo], check: Check | None, bar: Bar = no_bar
) -> tuple[list[T], list[tuple[T, str]]]:
    """Which of ``items`` can be carried out without an objection of ``check``; the model is left as it was.

    Args:
        items: changes that are independent as far as anybody knows.
        carry_out: makes some of them together and returns how to undo them.
        check: of the model as a whole; without one everything is accepted untried.
        bar: shows the checks.

    Returns:
        The accepted ones, and the others, each with the objection.
    """
    if check is None or not items:
        return list(items), []
    accepted: list[T] = []
    rejected: list[tuple[T, str]] = []
    groups, checks = [list(items)], 0
    for group in bar(_popped(groups), "checking the model's function"):
        undo = carry_out(group)
        try:
            problem = check()
        finally:
            undo()
        checks += 1
        if problem is None:
            accepted += group
        elif len(group) == 1 or checks >= MAX_CHECKS:
            rejected += [(item, f"with it, {problem}") for item in group]
        else:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return accepted, rejected


def _popped(items: list[list[T]]) -> Iterator[list[T]]:
    """The last of ``items``, again and again, while others come in."""
    while items:
        yield items.pop()


class Reversible:
    """A report of changes to a model that can be undone, or made final."""

    _undos: list[Undo]

    def undo(self) -> None:
        """Give the model back as it was; a second call does nothing."""
        joined(self._undos)()

    def keep(self) -> None:
        """Make the change final: what it takes to undo it is released."""
        self._undos.clear()


def joined(undos: list[Undo]) -> Undo:
    """Undo everything in ``undos``, the last first; a second call does nothing."""

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo
