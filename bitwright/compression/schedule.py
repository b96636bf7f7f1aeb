"""Schedules of compression in a training loop: one shot, equal steps, or gradual."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bitwright.errors import ConfigError, close_matches

Kind = Literal["one_shot", "iterative", "gradual"]
_KINDS = ("one_shot", "iterative", "gradual")


@dataclass
class CompressionSchedule:
    """Says at which steps of a training loop what part of a cost may be left.

    Attributes:
        target: part that may be left at the end, above 0, below 1.
        kind: ``one_shot`` asks for the target at once; ``iterative`` takes the same share of what is left each time;
            ``gradual`` takes most at first, along a cubic (Zhu and Gupta 2017, arXiv:1710.01878).
        steps: how often the model is compressed; ``one_shot`` has one.
        first: step of the loop at which it begins, counted from 0.
        every: steps of the loop between two.
        done: steps of the loop so far; part of :meth:`state_dict`.

    Raises:
        ConfigError: a kind that does not exist, or a number that is none of these.

    >>> schedule = CompressionSchedule(0.25, "iterative", steps=2, every=10)
    >>> [(n, part) for n in range(30) if (part := schedule.step()) is not None]
    [(0, 0.5), (10, 0.25)]
    """

    target: float
    kind: Kind = "one_shot"
    steps: int = 1
    first: int = 0
    every: int = 1
    done: int = field(default=0)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(
                "kind",
                f"there is no schedule {self.kind!r}{close_matches(str(self.kind), _KINDS)}",
                f"use {', '.join(_KINDS)}",
            )
        if not 0 < self.target < 1:
            raise ConfigError("target", f"{self.target!r} is not a part that is left", "write a number between 0 and 1")
        for name, least in (("steps", 1), ("first", 0), ("every", 1)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ConfigError(name, f"{getattr(self, name)!r} is not a number of steps", f"write {least} or more")
        if self.kind == "one_shot" and self.steps != 1:
            raise ConfigError("steps", f"one_shot has one step, not {self.steps}", "use iterative or gradual")

    def parts(self) -> list[float]:
        """Target fraction after each compression step."""
        n = self.steps
        if self.kind == "gradual":
            return [self.target + (1 - self.target) * (1 - k / n) ** 3 for k in range(1, n + 1)]
        return [self.target ** (k / n) for k in range(1, n + 1)]

    def step(self) -> float | None:
        """Count a step of the loop: the part to compress to now, ``None`` for nothing to do."""
        now, self.done = self.done - self.first, self.done + 1
        index, rest = divmod(now, self.every)
        return self.parts()[index] if now >= 0 and rest == 0 and index < self.steps else None

    def state_dict(self) -> dict[str, int]:
        """State to store in a checkpoint."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state of a checkpoint."""
        self.done = int(state["done"])
