"""What a search for folds finds: layers that absorb batch norms, and the batch norms that stay, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bitwright.algorithms.folding.channel_map import Array, Between
from bitwright.core.graph.graph import Graph

Direction = Literal["backward", "forward"]


#: names of batch norms in execution order
Chain = tuple[str, ...]


@dataclass(frozen=True)
class Fold:
    """Layers that change together, each with the batch norms it absorbs.

    Attributes:
        direction: ``backward`` into the layer before, ``forward`` into the layer after.
        layers: ``(layer, batch norms in execution order)``; several when they share a batch norm or a
            parameter.
        scale, shift: what is absorbed, float64, shape [C]; not part of the comparison.
        keeps_shift: the layer has no place for a bias, so the last batch norm stays and only adds the shift.
        between: layer -> what moves its elements on the way; not for layers with the batch norm's own channels.
    """

    direction: Direction
    layers: tuple[tuple[str, tuple[str, ...]], ...]
    scale: Array = field(compare=False, repr=False)
    shift: Array = field(compare=False, repr=False)
    keeps_shift: bool = False
    between: Mapping[str, Between] = field(default_factory=dict, compare=False, repr=False)

    def of_layer(self, layer: str, values: Array) -> Array:
        """``values``, one per channel of the batch norm, for each channel of ``layer``."""
        return values[self.between[layer].channels] if layer in self.between else values

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Every ``(layer, batch norm)``."""
        return tuple((layer, bn) for layer, chain in self.layers for bn in chain)

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """Every batch norm once."""
        return tuple(dict.fromkeys(bn for _, bn in self.pairs))

    def __str__(self) -> str:
        form = "{layer} <- {norms}" if self.direction == "backward" else "{norms} -> {layer}"
        rows = [form.format(layer=layer, norms=" + ".join(chain)) for layer, chain in self.layers]
        kept = " (the shift stays in the batch norm, the layer has no bias)" if self.keeps_shift else ""
        return ", ".join(rows) + kept


@dataclass(frozen=True)
class Refusal:
    """A batch norm that stays, and why.

    Attributes:
        op: the layer that could have absorbed it, if there is one beside it.
        bn: the batch norm.
        reason: what stands against it, with the names involved.
    """

    op: str | None
    bn: str
    reason: str

    def __str__(self) -> str:
        return f"{self.bn}: {self.reason}"


def in_execution_order(refusals: Iterable[Refusal], graph: Graph) -> list[Refusal]:
    """The refusals in the order in which the graph runs their batch norms."""
    order = {op.name: i for i, op in enumerate(graph.ops)}
    return sorted(refusals, key=lambda refusal: order[refusal.bn])
