"""Which values of a model lie on the grid of which quantizer."""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.core.simulation.sites import Site


def values_on_grids(sites: Mapping[str, Site], shared: Mapping[str, str]) -> dict[int, dict[str, None]]:
    """Quantizer (its ``id``) -> the values that lie on its grid.

    Args:
        sites: of a simulation.
        shared: value that only carries elements of another -> the group of sites on whose grid they lie.
    """
    found: dict[int, dict[str, None]] = {}
    by_group = {}
    for site in sites.values():
        if site.role in ("input", "output"):
            found.setdefault(id(site.quantizer), {}).setdefault(site.value)
            by_group[site.group] = id(site.quantizer)
    for value, group in shared.items():
        if group in by_group:
            found[by_group[group]].setdefault(value)
    return found
