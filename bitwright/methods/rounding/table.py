"""The methods that choose weights on the grid, by name: one table for both front ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from bitwright.errors import ConfigError, close_matches
from bitwright.methods.bias_correction import first_samples
from bitwright.methods.options import check_options, keyword_options
from bitwright.methods.rounding import gptq, gptvq, reconstruct, seq_mse
from bitwright.methods.rounding.driver import NO_CACHE, Cache, Method, RoundingReport, Task, Units, Walk, apply
from bitwright.methods.rounding.program import SimulatedModel, Unit, layer_units
from bitwright.methods.rounding.reconstruct import feasible


@dataclass(frozen=True)
class Row:
    """A row of :data:`METHODS`.

    Attributes:
        settings: the data class of its options.
        make: settings -> the method.
        units: what is treated together.
    """

    settings: type[Any]
    make: Callable[[Any], Method]
    units: Units


def _alone(walk: Walk, layers: Sequence[str]) -> list[Unit]:
    units = layer_units(walk.model.graph(), layers)
    return [Unit((op,), (op,)) for unit in units for op in unit.layers]


def _learned(variant: reconstruct.Variant) -> Row:
    def make(settings: reconstruct.Settings) -> Callable[[Task], Any]:
        return reconstruct.method(variant, settings)

    return Row(variant.settings, make, reconstruct.variant_units(variant))


METHODS: dict[str, Row] = {
    **{name: _learned(variant) for name, variant in reconstruct.VARIANTS.items()},
    "gptq": Row(gptq.Settings, gptq.method, _alone),
    "gptaq": Row(gptq.AsymmetricSettings, gptq.asymmetric_method, _alone),
    "gptvq": Row(gptvq.Settings, gptvq.method, _alone),
    "codebook": Row(gptvq.ScalarSettings, gptvq.scalar_method, _alone),
    "seq_mse": Row(seq_mse.Settings, seq_mse.method, _alone),
}


def method_options(name: str) -> dict[str, Any]:
    """The options of a method, and those that all methods have, with their annotations."""
    common = keyword_options(choose_weights, ("cache", "progress"))
    return {**_settings(METHODS[name]), **common, "cache_dir": str | Path | None}


def _settings(row: Row) -> dict[str, Any]:
    return get_type_hints(row.settings)


def find_method(name: str, options: Mapping[str, Any]) -> tuple[Row, Any]:
    """The row of a method and its settings.

    Raises:
        ConfigError: an unknown method or option, with close matches, or a value that an option does not take.
    """
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError("method", f"there is no method {name!r}{close_matches(name, METHODS)}", f"use one of {known}")
    row = METHODS[name]
    check_options(name, options, _settings(row))
    return row, row.settings(**options)


def choose_weights(
    model: SimulatedModel,
    batches: Iterable[Any],
    method: str,
    options: Mapping[str, Any],
    *,
    num_samples: int | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    blocks: Sequence[Sequence[str]] | None = None,
    seed: int = 0,
    memory_budget: int | None = None,
    spill_dir: str | None = None,
    cache: Cache = NO_CACHE,
    progress: Callable[[Sequence[Unit]], Iterable[Unit]] = lambda items: items,
) -> RoundingReport:
    """Carry out ``method`` on a simulation; see :func:`bitwright.methods.rounding.driver.apply`.

    Args:
        num_samples: batches are read until so many samples (rows) have passed; all with ``None``.
        blocks: operators (names) that are reconstructed together, instead of the blocks found from the graph.

    Raises:
        ConfigError: an unknown method, option, layer or block.
        CalibrationError: see :func:`bitwright.methods.rounding.driver.apply`.
    """
    row, settings = find_method(method, options)
    units = row.units if blocks is None else _given(blocks)
    return apply(
        model,
        (batch for batch, _ in first_samples(batches, num_samples)),
        row.make(settings),
        name=method,
        units=units,
        include=include,
        exclude=exclude,
        seed=seed,
        memory_budget=memory_budget,
        spill_dir=spill_dir,
        cache=cache,
        settings=f"{settings} {blocks}",
        rows_per_input=getattr(settings, "rows_per_input", None),
        progress=progress,
    )


def _given(blocks: Sequence[Sequence[str]]) -> Units:
    """Units as the user lists them; layers in none of them stand alone."""
    return lambda walk, layers: _as_listed(blocks, walk, layers)


def _as_listed(blocks: Sequence[Sequence[str]], walk: Walk, layers: Sequence[str]) -> list[Unit]:
    graph = walk.model.graph()
    position = {op.name: i for i, op in enumerate(graph.ops)}
    left, found = set(layers), []
    for block in blocks:
        places = [_known_position(name, position) for name in block]
        ops = tuple(op.name for op in graph.ops[min(places) : max(places) + 1])
        inside = tuple(name for name in ops if name in left)
        if inside:
            found.append(Unit(ops, inside))
        left.difference_update(inside)
    alone = layer_units(graph, [name for name in layers if name in left])
    return sorted(feasible(walk, found) + alone, key=lambda u: position[u.ops[0]])


def _known_position(name: str, position: Mapping[str, int]) -> int:
    if name not in position:
        raise ConfigError(
            "blocks", f"there is no operator {name!r}{close_matches(name, position)}", "use names of sim.graph"
        )
    return position[name]
