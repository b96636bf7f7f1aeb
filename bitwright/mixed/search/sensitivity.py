"""One group at a time, measured: what a user's own search works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bitwright.analysis.subject.subject import open_subject
from bitwright.core.simulation.state import all_or_nothing
from bitwright.errors import ConfigError, close_matches
from bitwright.mixed.precisions.candidates import as_candidates, highest, spec_at
from bitwright.mixed.precisions.groups import Group, find_groups


def analyze_groups(
    sim: Any, candidates: Sequence[Any], evaluate: Callable[[Any], float]
) -> dict[tuple[str, str], float]:
    """Metric with one group alone at a candidate, the others at the one with the most bits; the simulation is as before.

    Args:
        sim: calibrated.
        candidates: as for :func:`bitwright.mixed_precision`.
        evaluate: of the model, or of the session.
    """
    subject, wanted = open_subject(sim), as_candidates(candidates)
    groups = find_groups(sim, wanted)
    before = subject.remember()
    found: dict[tuple[str, str], float] = {}
    try:
        for group in groups:
            _set(sim, group, wanted[highest(wanted)])
        best = subject.remember()
        for group in groups:
            for i, candidate in enumerate(wanted):
                if i != highest(wanted):
                    best()
                    _set(sim, group, candidate)
                    found[group.name, candidate.name] = float(evaluate(subject.runnable()))
    finally:
        before()
    return found


def lower_in_order(sim: Any, sensitivities: Mapping[tuple[str, str], float], accepts: Callable[[Any], bool]) -> Any:
    """Lower groups, the least sensitive first, while the result is accepted.

    Raises:
        ConfigError: a group that the simulation does not have.
    """
    subject = open_subject(sim)
    candidates = {c.name: c for c in as_candidates(sorted({name for _, name in sensitivities}))}
    groups = {g.name: g for g in find_groups(sim, list(candidates.values()))}
    order = sorted(sensitivities, key=lambda key: -sensitivities[key])
    for name, _ in order:
        if name not in groups:
            raise ConfigError(
                name, f"the simulation has no such group{close_matches(name, groups)}", "analyze this simulation"
            )  # fmt: skip
    with all_or_nothing(sim):
        for name, candidate in order:
            before = subject.remember()
            _set(sim, groups[name], candidates[candidate])
            if not accepts(subject.runnable()):
                before()
                break
    return sim


def _set(sim: Any, group: Group, candidate: Any) -> None:
    for name in group.sites:
        site = sim.quantizers[name]
        spec = candidate.weight if site.is_stored else candidate.activation
        if spec is None:
            site.enabled = False
        else:
            site.spec = spec_at(site.quantizer.spec, spec)
