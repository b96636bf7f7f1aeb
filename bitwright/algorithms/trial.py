"""Changing a model in parts that must each leave its function as it was: what fails the check is found by halving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from bitwright.core.model import Undo

T = TypeVar("T")

#: says what is wrong with the model as it stands, or ``None``
Check = Callable[[], str | None]
#: how often the check of the whole model is asked at most
MAX_CHECKS = 100


def sift(
    items: Sequence[T], carry_out: Callable[[Sequence[T]], Undo], check: Check | None
) -> tuple[list[T], list[tuple[T, str]]]:
    """Which of ``items`` can be carried out without an objection of ``check``; the model is left as it was.

    Args:
        items: changes that are independent as far as anybody knows.
        carry_out: makes some of them together and returns how to take them back.
        check: of the model as a whole; without one everything is accepted untried.

    Returns:
        The accepted ones, and the others, each with the objection.
    """
    if check is None or not items:
        return list(items), []
    accepted: list[T] = []
    rejected: list[tuple[T, str]] = []
    groups, checks = [list(items)], 0
    while groups:
        group = groups.pop()
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


def joined(undos: list[Undo]) -> Undo:
    """Take back everything in ``undos``, the last first; a second call does nothing."""

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo
