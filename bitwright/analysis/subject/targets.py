"""What is measured together: the quantizer of a site, a layer, a block, all weights, all activations, a user's pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from bitwright.algorithms.rounding.blocks import block_units
from bitwright.core.graph.graph import Graph
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, close_matches

Groups = Mapping[str, str | Sequence[str]] | Sequence[str]
"""Name -> pattern or patterns of site names, or patterns that are names too."""


def kinds(sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """All weights, and all activations."""
    weights = tuple(n for n, s in sites.items() if s.enabled and s.role in ("weight", "bias", "constant"))
    held = frozenset(weights)
    rest = tuple(n for n, s in sites.items() if s.enabled and n not in held)
    return {name: found for name, found in (("all weights", weights), ("all activations", rest)) if found}


def layers(sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """Operators with several enabled sites."""
    found: dict[str, list[str]] = {}
    for name, site in sites.items():
        if site.enabled:
            found.setdefault(site.op, []).append(name)
    return {op: tuple(names) for op, names in found.items() if len(names) > 1}


def blocks(graph: Graph, sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """Residual blocks, transformer layers and the like, as the graph shows them; those of a single layer are left out."""
    weighted = dict.fromkeys(s.op for s in sites.values() if s.role == "weight" and s.enabled)
    by_op: dict[str, list[str]] = {}
    for name, site in sites.items():
        if site.enabled:
            by_op.setdefault(site.op, []).append(name)
    found = {}
    for unit in block_units(graph, list(weighted)):
        names = tuple(name for op in unit.ops for name in by_op.get(op, ()))
        if len(unit.layers) > 1 and names:
            found[f"block {unit.name}"] = names
    return found


def chosen(groups: Groups | None, sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """The user's groups.

    Raises:
        ConfigError: a pattern matches no site, or only sites in float.
    """
    if groups is None:
        return {}
    if isinstance(groups, str):
        groups = [groups]
    named = groups if isinstance(groups, Mapping) else {str(pattern): pattern for pattern in groups}
    found = {}
    for name, patterns in named.items():
        held: dict[str, None] = {}
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            held.update(dict.fromkeys(_matching(pattern, sites)))
        found[name] = tuple(held)
    return found


def _matching(pattern: str, sites: Mapping[str, Site]) -> list[str]:
    glob = pattern.replace("[", "[[]")  # brackets are part of site names
    names = [n for n, s in sites.items() if fnmatch.fnmatchcase(n, glob) or s.op == pattern]
    if not names:
        raise ConfigError(
            "groups",
            f"{pattern!r} matches no site{close_matches(pattern, [*sites, *{s.op for s in sites.values()}])}",
            "use names of sites or layers as in sim.quantizers; * and ? are wildcards",
        )
    enabled = [n for n in names if sites[n].enabled]
    if not enabled:
        raise ConfigError(
            "groups", f"{pattern!r} matches sites in float only", "name a site that is quantized, see sim.coverage()"
        )
    return enabled
