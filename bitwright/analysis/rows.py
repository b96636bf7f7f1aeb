"""Rows of sites, layers and groups from what was estimated, seen and measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitwright.analysis.causes.causes import causes_of
from bitwright.analysis.result import GroupRow, LayerRow, SiteRow, decibel
from bitwright.analysis.subject.subject import Subject
from bitwright.analysis.values.site_values import SiteValues, calibrated_bounds, grid_row
from bitwright.core.graph.exact import reciprocals
from bitwright.core.simulation.sites import Site

if TYPE_CHECKING:
    from bitwright.analysis.metrics.exact import Pair
    from bitwright.analysis.values.lockstep import LayerErrors, Lockstep

_REFERENCE_DB = 60.0  # inputs better than this count as this: the error of exact values has no logarithm


def site_rows(
    subject: Subject,
    noise: Mapping[str, float],
    values: Mapping[str, SiteValues],
    pairs: Mapping[str, Pair],
    metrics: Mapping[str, tuple[float, float]],
    target: Mapping[str, str],
) -> dict[str, SiteRow]:
    """Every site's row, in execution order.

    Args:
        noise: estimates by site.
        values: what was seen.
        pairs, metrics: what was measured, by target.
        target: site -> the target that stands for its quantizer.
    """
    found = {}
    for name, site in subject.sites.items():
        row = found[name] = _site_row(site)
        if not site.enabled:
            continue
        row.noise = noise.get(name)
        for key, value in {**_of_calibration(site), **(values[name].row() if name in values else {})}.items():
            setattr(row, key, value)
        pair = pairs.get(target[name])
        if pair is not None and pair.batches:
            row.only_db, row.without_db = decibel(pair.only.ratio), decibel(pair.without.ratio)
            row.metric_only, row.metric_without = pair.only.metric, pair.without.metric
        if target[name] in metrics:
            row.metric_only, row.metric_without = metrics[target[name]]
    return found


def _site_row(site: Site) -> SiteRow:
    fmt = site.quantizer.spec.format
    row = SiteRow(site.name, site.role, site.op, site._graph.op(site.op).type, fmt.name, fmt.bits, site.enabled)
    if not site.enabled:
        row.why_float = site.quantizer.why_float or site.quantizer.why_spec or "switched off"
    return row


def _of_calibration(site: Site) -> dict[str, Any]:
    """The grid, and the bounds that calibration saw: for sites whose values no step shows."""
    bounds = calibrated_bounds(site)
    return {**grid_row(site), **({} if bounds is None else {"minimum": bounds[0], "maximum": bounds[1]})}


def layer_rows(subject: Subject, seen: Lockstep | None, sites: Mapping[str, SiteRow]) -> list[LayerRow]:
    """Every operator's row with its causes, the worst first."""
    held: dict[str, list[str]] = {}
    for name, row in sites.items():
        held.setdefault(row.layer, []).append(name)
    found = list(_layers(subject, seen, sites, held))
    whole, values = sum(row.cost for row in sites.values()), {} if seen is None else seen.sites
    errors = {} if seen is None else seen.layers
    graph = subject.sim.graph
    divided = reciprocals(graph, {value.name for value in graph.values.values() if value.is_static})
    for layer in found:
        layer.causes = causes_of(layer, subject, values, sites, whole, errors, divided)
    return sorted(found, key=lambda row: -(row.noise or 0.0))


def _layers(
    subject: Subject, seen: Lockstep | None, sites: Mapping[str, SiteRow], held: Mapping[str, Sequence[str]]
) -> Iterator[LayerRow]:
    graph, layers = subject.sim.graph, {} if seen is None else seen.layers
    for op in graph.ops:
        errors = layers.get(op.name)
        names = tuple(held.get(op.name, ()))
        if errors is None and not names:
            continue
        makers = (graph.producer(value) for value in op.inputs if value is not None)
        inputs = tuple(dict.fromkeys(maker.name for maker in makers if maker is not None))
        by_cost = sorted(names, key=lambda name: sites[name].cost)
        apart = {subject.sharing[name][0]: name for name in by_cost}  # each quantizer counts once
        row = LayerRow(op.name, op.type, names, inputs, _total(list(apart.values()), sites))
        if errors is not None:
            _add_errors(row, errors, subject)
        yield row


def _total(names: Sequence[str], sites: Mapping[str, SiteRow]) -> float | None:
    """What sites cost together, as if their errors had nothing in common."""
    known = [sites[n].cost for n in names if sites[n].noise is not None or sites[n].only_db is not None]
    return sum(known) if known else None


def _add_errors(row: LayerRow, errors: LayerErrors, subject: Subject) -> None:
    row.made_db, row.made_quantized_db = decibel(errors.made.value), decibel(errors.made_quantized.value)
    row.arrived_db, row.after_db = decibel(errors.arrived.value), decibel(errors.after.value)
    if row.after_db is not None:
        before = _REFERENCE_DB if row.arrived_db is None else min(row.arrived_db, _REFERENCE_DB)
        row.jump = max(0.0, before - row.after_db)
    for name in row.sites:
        site = subject.sites[name]
        if site.role == "output" and site.enabled and site.encoding is not None and errors.elements:
            row.made_lsb = float((errors.made.noise / errors.elements) ** 0.5 / site.encoding.scale.mean())
            return


def group_rows(
    groups: Mapping[str, Sequence[str]], sites: Mapping[str, SiteRow], pairs: Mapping[str, Pair]
) -> tuple[GroupRow, ...]:
    """Groups as they were asked for; columns that were not measured are empty."""
    found = []
    for name, held in groups.items():
        row = GroupRow(name, tuple(held), _total(held, sites))
        pair = pairs.get(group_target(name))
        if pair is not None and pair.batches:
            row.only_db, row.without_db = decibel(pair.only.ratio), decibel(pair.without.ratio)
        found.append(row)
    return tuple(found)


def group_target(name: str) -> str:
    """What a group is called among targets: none of these is a site's name."""
    return f"group: {name}"
