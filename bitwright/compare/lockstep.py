"""Two executions on one input: from the input on, and operator by operator, fed what the first one computed before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.compare.agreement import Agreement, compare
from bitwright.compare.cut import Cut, Place
from bitwright.compare.parameters import Key, Parameter, give, parameters
from bitwright.compare.points import Pair, Point, cut_at, match, observed, on_grids, points_of, read_alike, steps_of
from bitwright.compare.runtime import run_model
from bitwright.compare.sides import Side
from bitwright.export.qdq.markers import copy_model

Array = NDArray[Any]
Feeds = Mapping[str, Array]
Edit = Callable[[ir.Model], object]
_ROUNDED = 1.0 + 1e-3  # steps: a parameter this close was rounded, up or down


def unchanged(model: ir.Model) -> None:
    """The edit that changes nothing."""


@dataclass
class Lockstep:
    """Two executions, of which ``a`` is the one nearer to what was trained.

    Attributes:
        a, b: the sides.
        feeds_a, feeds_b: the input.
        pairs: the tensors that both have, in the order of ``b``.
        errors: codes -> how far the arithmetic of the kernels of ``b`` is known to bring a value, in steps.
    """

    a: Side
    b: Side
    feeds_a: Feeds
    feeds_b: Feeds
    pairs: list[Pair] = field(init=False)
    errors: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        known = frozenset(self.a.values or self.b.values) or None
        fine = not (self.a.in_runtime or self.b.in_runtime) and known is None
        found = match(
            points_of(self.a.model), points_of(self.b.model), known=known if self.a.values else None, fine=fine
        )
        # between quantizers of b only those count: a plain tensor there has no grid that could be missed
        quantized = any(pair.b.quantized or pair.a.quantized for pair in found)
        kept = [
            pair
            for pair in found
            if not quantized or pair.a.quantized or pair.b.quantized or pair.b.output or pair.b.between_floats
            if not self.b.values or known is None or known & set(pair.b.names)
        ]
        self.pairs = read_alike(kept, self.b.model)

    # ------------------------------------------------------------------------------------------- free runs

    @cached_property
    def free_a(self) -> dict[Pair, Array]:
        """Values of ``a``, run from the input on."""
        return self._free(self.a, self.feeds_a, [pair.a for pair in self.pairs])

    @cached_property
    def free_b(self) -> dict[Pair, Array]:
        """Values of ``b``, run from the input on."""
        return self._free(self.b, self.feeds_b, [pair.b for pair in self.pairs])

    def _free(self, side: Side, feeds: Feeds, points: Sequence[Point]) -> dict[Pair, Array]:
        if side.values:
            names = [next(name for name in point.names if name in side.values) for point in points]
            return {pair: np.asarray(side.values[name][0]) for pair, name in zip(self.pairs, names, strict=True)}
        model, seen = observed(side.model, points)
        found = side.run(model, feeds)
        return {pair: found[seen[point]] for pair, point in zip(self.pairs, points, strict=True)}

    # ----------------------------------------------------------------------------------- operator by operator

    @cached_property
    def fed(self) -> dict[Pair, Array]:
        """``free_a`` on the grids of ``b``: the inputs of every operator."""
        return self.on_grid(self.free_a)

    @cached_property
    def rounded(self) -> dict[Key, Array]:
        """Parameters of ``b`` that are parameters of ``a`` rounded to a grid: at most one step apart."""
        if self.a.values:
            return {}
        ours, theirs = self.parameters
        same = ((key, ours[key], theirs[name]) for name, key in self.keys_in_a.items())
        return {
            key: b.value
            for key, a, b in same
            if a.step is None and b.step is not None and a.value.shape == b.value.shape and b.apart(a.value) <= _ROUNDED
        }

    @cached_property
    def parameters(self) -> tuple[dict[Key, Parameter], dict[Key, Parameter]]:
        """Constants that operators of ``a`` and of ``b`` read."""
        return parameters(self.a.model), parameters(self.b.model)

    @cached_property
    def keys_in_a(self) -> dict[Key, Key]:
        """Parameters of ``b`` -> what they are called in ``a``: by the tensor that the operator makes, else by their order."""
        ours, theirs = self.parameters
        alias = {name: pair.a.entry for pair in self.pairs for name in (pair.b.entry, pair.b.result)}
        found = {(name, port): (alias.get(name, name), port) for name, port in theirs}
        found = {key: other for key, other in found.items() if other in ours and ours[other].op == theirs[key].op}
        taken, rest = set(found.values()), dict[Any, list[Key]]()
        for key, one in ours.items():
            if key not in taken:
                rest.setdefault((one.op, key[1], one.value.shape), []).append(key)
        for key, one in theirs.items():
            same = rest.get((one.op, key[1], one.value.shape), [])
            if key not in found and same:
                found[key] = same.pop(0)
        return found

    @cached_property
    def own_a(self) -> dict[Pair, Array]:
        """Outputs of the operators of ``a``, fed ``fed``, with parameters as ``b`` rounded them, on the grids of ``b``."""
        if self.a.values:
            return self.fed
        found, _ = self.locally(self.a, self.feeds_a, edit=lambda model: give(model, self.rounded))
        return self.on_grid(found)

    @cached_property
    def kernels(self) -> dict[Pair, str]:
        """The kernel with which the runtime of ``b`` computed each tensor."""
        return self._own_b[1]

    @cached_property
    def places(self) -> dict[Pair, Place]:
        """Every tensor in ``b``, with the operators that lead to it."""
        return self.cut_b[1]

    @property
    def own_b(self) -> dict[Pair, Array]:
        """Outputs of the operators of ``b``, fed what ``a`` has."""
        return self._own_b[0]

    @cached_property
    def cut_b(self) -> tuple[Cut, dict[Pair, Place]]:
        """The model of ``b`` cut at the pairs, with values of ``a`` as inputs; the place of each pair."""
        cut, places = cut_at(copy_model(self.b.model), {pair.b: self.free_a[pair] for pair in self.pairs})
        return cut, {pair: places[pair.b] for pair in self.pairs}

    @cached_property
    def _own_b(self) -> tuple[dict[Pair, Array], dict[Pair, str]]:
        return self.locally(self.b, self.feeds_b, run=partial(self.b.run, errors=self.errors))

    def in_the_whole(self, edit: Edit = unchanged) -> dict[Pair, tuple[Array, Array]]:
        """Outputs of the operators of ``b`` alone, fed the values of a run of the whole model, and their outputs in that run.

        Args:
            edit: changes a copy of the graph before.
        """
        side, free = self.b, self.free_b
        if edit is not unchanged:
            side = replace(side, model=copy_model(side.model))
            edit(side.model)
            free = self._free(side, self.feeds_b, [pair.b for pair in self.pairs])
        alone, _ = self.locally(side, self.feeds_b, source=free)
        return {pair: (alone[pair], free[pair]) for pair in self.pairs if pair in alone}

    def locally(
        self,
        side: Side,
        feeds: Feeds,
        pairs: Sequence[Pair] | None = None,
        *,
        edit: Edit = unchanged,
        source: Mapping[Pair, Array] | None = None,
        run: Callable[[ir.Model, Feeds, dict[str, str]], Mapping[str, Array] | None] | None = None,
    ) -> tuple[dict[Pair, Array], dict[Pair, str]]:
        """Outputs of the operators of ``side`` for given inputs, and the kernels that computed them.

        Args:
            side: ``a`` or ``b``.
            feeds: of its graph.
            pairs: only these; all by default.
            edit: changes a copy of the side's graph before.
            source: what they are fed; by default what ``a`` has there.
            run: runs a model instead of the side; empty results where it gives ``None``.
        """
        model = copy_model(side.model)
        edit(model)
        mine = {pair: pair.a if side is self.a else pair.b for pair in self.pairs}
        source = source or (self.fed if side is self.a else self.free_a)
        cut, places = cut_at(model, {point: source[pair] for pair, point in mine.items()})
        names = {pair: places[mine[pair]] for pair in (self.pairs if pairs is None else pairs)}
        groups = cut.groups() if pairs is None else [list(names.values())]
        execute = side.run if run is None else run
        found: dict[str, Array] = {}
        types: dict[str, str] = {}
        for part, more in map(cut.part, groups):
            found.update(execute(part, {**feeds, **more}, types) or {})
        values = {pair: found[str(p.result.name)] for pair, p in names.items() if str(p.result.name) in found}
        return values, {pair: p.kernel(types) for pair, p in names.items()}

    # ------------------------------------------------------------------------------------------- comparing

    def on_grid(self, values: Mapping[Pair, Array]) -> dict[Pair, Array]:
        """Values on the grid of ``b``, where it has one."""
        by_point = {pair.b: array for pair, array in values.items() if pair.b.quantized}
        if not by_point:
            return dict(values)
        model, feeds, names = on_grids(self.b.model, by_point)
        found = run_model(model, feeds, "float")
        return {pair: found[names[pair.b]] if pair.b in names else array for pair, array in values.items()}

    def agreement(self, pair: Pair, one: Array, other: Array) -> Agreement:
        """How two values of a tensor compare on its grid."""
        point, side = (pair.b, self.b) if pair.b.quantized or not pair.a.quantized else (pair.a, self.a)
        scale = steps_of(point, one, side.model)
        return compare(one, other, {**point.facts, "places": [[pair.name, 0]]}, scale)
