"""Outputs whose rows an operator selected before the last layers: only rows of the same index are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import level
from bitwright.core.simulation.output_quality import RowOrder, matched_rows, places_of
from bitwright.export.qdq.markers import copy_model

Array = NDArray[Any]


@dataclass(frozen=True)
class RowMatch:
    """What the simulation returned, and which rows of it stand beside which rows of a file.

    ``TopK`` chooses rows by scores, and rows of nearly equal scores change places from one execution to another.

    Attributes:
        expected: output -> what the simulation returned.
        orders: output -> the choice that orders its rows in the simulation; empty where nothing is chosen.
        model: the file, with its own choices among the outputs where an order is given.
        choices: names of these.
        as_written: whether ``model`` is the file as it stands.
    """

    expected: Mapping[str, Array]
    orders: Mapping[str, RowOrder]
    model: ir.Model
    choices: frozenset[str] = frozenset()
    as_written: bool = True

    @classmethod
    def of(
        cls,
        model: ir.Model,
        expected: Mapping[str, Array],
        orders: Mapping[str, RowOrder] | None,
        *,
        as_written: bool = True,
    ) -> RowMatch:
        """For a file as ``to_qdq`` wrote it, which is not changed; without ``as_written`` one whose inputs were converted."""
        known = {name: order for name, order in (orders or {}).items() if name in expected}
        if not known:
            return cls(expected, {}, model, as_written=as_written)
        shown = copy_model(model)
        held = set(shown.graph.outputs)
        made = [node.outputs[1] for node in shown.graph if node.op_type == "TopK" and node.outputs[1].name]
        shown.graph.outputs.extend(value for value in made if value not in held)
        return cls(expected, known, shown, frozenset(str(value.name) for value in made), as_written=False)

    def level(self, name: str, found: Mapping[str, Array]) -> tuple[float, float | None]:
        """How near an output is to the simulation.

        Args:
            name: of the output.
            found: output of :attr:`model` -> its value.

        Returns:
            Signal-to-noise ratio in dB; and the share of the rows that both chose, ``None`` where rows are compared in their
            order. Of several operators that choose as many rows, the one is taken that chose most of the same.
        """
        wanted, own, order = self.expected[name], found.get(name), self.orders.get(name)
        if order is None or own is None or own.shape != wanted.shape:
            return level(wanted, own), None
        alike = [found[choice] for choice in self.choices if found[choice].shape == order.indices.shape]
        both, at = max((places_of(order.indices, one) for one in alike), key=_share, default=(None, None))
        if both is None or at is None:
            return level(wanted, own), None
        if not both.any():
            return -math.inf, 0.0
        return level(*matched_rows(wanted, own, both, at, order.axis)), _share((both, at))


def _share(places: tuple[Array, Array]) -> float:
    return float(places[0].mean())
