"""Search space of widths and bits: every group unchanged or narrower, and every weight with one of several bit widths.

The bytes of a weight are a product, width times width times bits: they are added up near a choice, as the costs of consecutive
layers are (:class:`~bitwright.compression.widths.WidthSpace`), and one exact choice settles both. A weight is rounded to nearest,
per output channel, in the model that is cut and fitted; the method that rounds it in the end makes less noise, of all weights
alike. Activations stay in float in the search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.compression.ratios import Option, Part, Space
from bitwright.compression.widths import WidthSpace
from bitwright.core.graph.graph import Op
from bitwright.core.graph.operators import resolve_granularity
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel
from bitwright.core.numerics.ranges import on_grid
from bitwright.core.numerics.spec import RangeMethod, weight_spec
from bitwright.core.placement.place import place
from bitwright.core.placement.rules import default_rules
from bitwright.core.simulation.float_model import Array, Undo
from bitwright.errors import ConfigError
from bitwright.methods.front_end import Structured

_FEWEST, _MOST = 2, 16


def check_bits(bits: Sequence[int]) -> tuple[int, ...]:
    """Check the bit widths to choose from, and sort them in descending order.

    Raises:
        ConfigError: there is none, or one is not a whole number from 2 to 16.
    """
    for n in bits:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not _FEWEST <= n <= _MOST:
            raise ConfigError(
                "bits", f"{n!r} is not a number of bits from {_FEWEST} to {_MOST}", "write bits=(4, 8), for weights"
            )
    return tuple(sorted({int(n) for n in bits}, reverse=True))


@dataclass(frozen=True)
class StoredWeight:
    """A weight that a simulation rounds.

    Attributes:
        param: its name.
        op: the first operator that reads it.
        port: where.
        readers: all operators that read it.
    """

    param: str
    op: Op
    port: int
    readers: tuple[str, ...]

    def rounded(self, value: Array, bits: int) -> Array:
        """``value``, of any width, rounded to nearest: symmetric, one scale per output channel of least squared error."""
        attrs = {name: value for name, value in self.op.attrs.items() if name != "group"}  # groups are cut too
        scales = resolve_granularity(self.op.type, attrs, self.port, PerChannel(), value.shape)
        return on_grid(value, weight_spec(f"int{bits}", scales, method=RangeMethod("mse")), self.param)


class BitSpace:
    """The weights of a model, each with one of several bit widths.

    Args:
        structure: the model.
        levels: numbers of bits, the largest first.

    Raises:
        ConfigError: no weight of the model is rounded.
    """

    def __init__(self, structure: Structured, levels: Sequence[int]) -> None:
        self.structure, self.levels = structure, tuple(levels)
        graph = structure.view().graph()
        ops = {op.name: op for op in graph.ops}
        readers: dict[str, list[Any]] = {}
        for site in place(graph, default_rules()).sites.values():
            param = graph.values[site.value].param
            if site.role == "weight" and param is not None and isinstance(site.spec.format, IntFormat):
                readers.setdefault(param, []).append(site)
        self.weights = [
            StoredWeight(param, ops[sites[0].op], sites[0].port, tuple(dict.fromkeys(site.op for site in sites)))
            for param, sites in readers.items()
        ]
        if not self.weights:
            raise ConfigError("bits", "the model has no stored weight that is quantized", "leave bits out")

    def of(self, choice: Sequence[int]) -> dict[str, int]:
        """Parameter -> bits."""
        return {weight.param: self.levels[k] for weight, k in zip(self.weights, choice, strict=True)}

    def all_at(self, level: int) -> dict[str, int]:
        """Parameter -> bits, the same for all weights."""
        return self.of([level] * len(self.weights))

    def rules(self, bits: Mapping[str, int]) -> dict[str, Any]:
        """The configuration of a simulation with these bits (:func:`bitwright.core.placement.config.load_config`)."""
        entries = [(op, bits[weight.param]) for weight in self.weights for op in weight.readers]
        return {"rules": [{"match": op, "weight": f"int{n}"} for op, n in entries]}

    def apply(self, bits: Mapping[str, int]) -> Undo:
        """Round the weights of the present model; the function returned undoes it."""
        before = {weight.param: self.structure.param(weight.param) for weight in self.weights}
        for weight in self.weights:
            self.structure.set_param(weight.param, weight.rounded(before[weight.param], bits[weight.param]))

        def undo() -> None:
            for name, value in before.items():
                self.structure.set_param(name, value)

        return undo


class JointSpace(Space):
    """The groups of a model, each unchanged or narrower, and its weights, each with one of several bit widths.

    Args:
        widths: of the groups.
        bits: of the weights.
    """

    def __init__(self, widths: WidthSpace, bits: BitSpace) -> None:
        self.widths, self.bits = widths, bits
        self._n = len(widths.parts)
        self._prices = widths.selector.prices
        self.fixed = widths.fixed
        self.parts = [*widths.parts, *(self._part(weight) for weight in bits.weights)]
        self._floor: float | None = None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data and of the model's outputs."""
        return self.widths.fingerprint

    def split(self, choice: Sequence[int]) -> tuple[list[int], dict[str, int]]:
        """The choice of widths, and parameter -> bits."""
        return list(choice[: self._n]), self.bits.of(choice[self._n :])

    def _part(self, weight: StoredWeight) -> Part:
        """A weight with its bit widths and their rounding errors."""
        value, graph = self.bits.structure.param(weight.param), self.widths.found.graph
        energy = max(float(np.square(value, dtype=np.float64).sum()), 1e-300)
        options: list[Option] = []
        for n in self.bits.levels:
            costs = self._prices.at({**self.bits.all_at(0), weight.param: n})(graph)
            error = float(np.square(weight.rounded(value, n).astype(np.float64) - value).sum()) / energy
            options.append(Option(f"{n} bits", costs, error if options else 0.0, n / self.bits.levels[0], n))
        return Part(weight.param, tuple(options))

    def original_costs(self) -> Mapping[str, float]:
        """Costs of the model in float."""
        return self._prices.whole

    def floor(self) -> float:
        """The noise with all weights at the largest bit width."""
        if self._floor is None:
            undo = self.apply([0] * len(self.parts))
            self._floor = self.noise()
            undo()
        return self._floor

    def costs_of(self, choice: Sequence[int]) -> dict[str, float]:
        """Costs of the cut graph at the bits chosen."""
        narrow, bits = self.split(choice)
        return self._prices.at(bits)(self.widths.graph_of(narrow))

    def around(self, choice: Sequence[int]) -> Mapping[str, tuple[Sequence[Sequence[float]], float]]:
        """Costs of every option with the others at ``choice``."""
        narrow, bits = self.split(choice)
        prices, graph = self._prices.at(bits), self.widths.graph_of(narrow)
        held = {v.param: math.prod(v.shape) for v in graph.values.values() if v.param is not None}
        found = {}
        for name, (rows, rest) in self.widths.around(narrow, prices).items():
            counted = name in ("bytes", "memory")
            more = [[held[w.param] * n / 8 * counted for n in self.bits.levels] for w in self.bits.weights]
            here = sum(row[k] for row, k in zip(more, choice[self._n :], strict=True))
            found[name] = ([*rows, *more], rest - here)
        return found

    def apply(self, choice: Sequence[int]) -> Undo:
        """Cut the model, fit the rest to the original, and round the weights."""
        narrow, bits = self.split(choice)
        undos = [self.widths.apply(narrow), self.bits.apply(bits)]

        def undo() -> None:
            while undos:
                undos.pop()()

        return undo

    def noise(self) -> float:
        """Noise-to-signal power ratio of the outputs."""
        return self.widths.noise()

    def runnable(self) -> Any:
        """The argument of the metric."""
        return self.widths.runnable()
