"""What both front ends share of replacing blocks: the space of choices, and the variants of a block with their costs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.compression.ratios import Option, Part, Space

COSTS = ("macs", "params", "bytes")


class ReplaceSpace(Space):
    """Blocks of a model, each as it is or replaced by one of its variants.

    Attributes:
        errors: block -> error of its linear variant, in parts of its result.
        refused: what is no block -> why.
    """

    errors: Mapping[str, float]
    refused: Mapping[str, str]

    def picked(self, choice: Sequence[int]) -> dict[str, str]:
        """Block -> the variant in its place; empty where it stays."""
        return {p.name: p.options[k].what or "" for p, k in zip(self.parts, choice, strict=True)}

    @abstractmethod
    def finished(self, choice: Sequence[int]) -> dict[str, Any]:
        """Make the choice, which is applied, the user's model; returns its plan, empty where none is needed."""


def part_of(
    name: str, saved: Mapping[str, float], rows: int, width: int, error: float, variants: Sequence[str]
) -> Part:
    """The variants of a block.

    Args:
        name: of the block.
        saved: costs that go with it.
        rows, width: of what it reads in the example.
        error: of its linear fit.
        variants: what it may become, where that is cheaper.
    """
    size = width * (width + 1)
    linear = {"macs": float(rows * width**2), "params": float(size), "bytes": 4.0 * size}
    free = dict.fromkeys(COSTS, 0.0)
    options = [Option("as it was", dict(saved), 0.0)]
    for variant in variants:
        costs = linear if variant == "linear" else free
        if all(costs[n] < saved[n] for n in ("macs", "params")):
            ratio = costs["macs"] / max(saved["macs"], 1.0)
            options.append(Option(variant, costs, error if variant == "linear" else 1.0, ratio, variant))
    return Part(name, tuple(options))
