"""Rules that users teach: which axes of the operands and results of their own operators hold the same channels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.core.registry import Registry
from bitwright.errors import ConfigError

_REST = "..."


@dataclass(frozen=True)
class ChannelRule:
    """What an operator does with channels, in the manner of an ``einsum``: ``"n C h w, C -> n C h w"``.

    A name per axis, inputs before the arrow and outputs behind it. A name with a capital letter is an axis of channels: axes of
    one name are the same channels, position by position, and are cut together. An axis whose name is in small letters stays;
    ``...`` stands for any number of these. A channel that no output has is summed over, and one that only a parameter has among
    the inputs is made by it, as by a layer. Inputs behind the last that is named stay.

    Attributes:
        inputs, outputs: names per axis.
    """

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, text: str, name: str = "rule") -> ChannelRule:
        """Parse a rule.

        >>> ChannelRule.of("n C ..., C -> n C ...").inputs
        (('n', 'C', '...'), ('C',))

        Raises:
            ConfigError: it is none: no arrow, a name that is none, an axis of channels that no input has.
        """
        left, arrow, right = text.partition("->")
        inputs, outputs = _terms(left), _terms(right)
        problem = _problem(inputs, outputs) if arrow else f"{text!r} has no arrow"
        if problem:
            remedy = 'write names of axes, channels in capitals, as "n C h w, C -> n C h w"'
            raise ConfigError(f"channel rule {name!r}", problem, remedy)
        return cls(inputs, outputs)

    @staticmethod
    def axes(term: Sequence[str], rank: int) -> tuple[str, ...] | None:
        """A name for each of ``rank`` axes, empty for those that stay; ``None`` where the rule is for another number of them."""
        names = list(term)
        if _REST in names:
            at = names.index(_REST)
            names[at : at + 1] = [""] * (rank - len(names) + 1)
        return tuple(n if is_channel(n) else "" for n in names) if len(names) == rank else None


def is_channel(name: str) -> bool:
    """Whether the name of an axis has a capital letter."""
    return name != name.lower()


def _terms(side: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(term.split()) for term in side.split(","))


def _problem(inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]) -> str:
    """Why this is no rule; empty where it is one."""
    read, made = ({name for term in side for name in term} for side in (inputs, outputs))
    wrong = sorted(n for n in read | made if n != _REST and not re.fullmatch(r"[A-Za-z]\w*", n))
    if wrong:
        return f"{wrong[0]!r} is no name"
    twice = [" ".join(term) for term in (*inputs, *outputs) if list(term).count(_REST) > 1]
    if twice:
        return f"{twice[0]!r} has ... twice"
    unknown = sorted(n for n in made - read if is_channel(n))
    return f"no input has the channels {unknown[0]}" if unknown else ""


def _checked(name: str, row: Any) -> ChannelRule:
    if isinstance(row, ChannelRule):
        return row
    if not isinstance(row, str):
        raise ConfigError(
            f"channel rule {name!r}", f"{row!r:.100} is no rule", 'give a text as "n C h w, C -> n C h w"'
        )
    return ChannelRule.of(row, name)


#: type of an operator, as messages of :func:`bitwright.compress` name it -> its rule
CHANNEL_RULES: Registry[ChannelRule] = Registry("channel_rules", {}, _checked)


def rule_of(kind: str) -> ChannelRule | None:
    """The rule of a type of operator; ``gate`` is also that of the overload ``gate.default``, and of ``mylib::gate``."""
    names = (kind, kind.partition(".")[0], kind.rpartition("::")[2])
    return next((CHANNEL_RULES[name] for name in names if name in CHANNEL_RULES), None)
