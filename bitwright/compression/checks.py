"""Check cuts numerically: try every group once, and refuse groups that cannot be cut, by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from bitwright.compression.groups import Cut, Dependencies, Group
from bitwright.core.simulation.float_model import Array
from bitwright.errors import ConfigError
from bitwright.methods.front_end import Problem, Structured, taken

#: largest difference of an output, in parts of its largest number, that rounding may leave; with weights of 16 bits
_NOISE, _NOISE_OF_16_BITS = 1e-4, 2e-3


def checked_dependencies(
    structure: Structured, batch: Any, *, inner: bool = False, averaged: bool = False, narrow_inputs: bool = True
) -> Dependencies:
    """The dependency graph of a model, with groups whose removal was checked.

    One unit is removed from every group at once. The model then has to run, every value has to have the shape that was
    predicted, and the outputs have to be those of the whole model with the same channels set to zero. A group that fails is
    refused together with its kin, and the others are tried again.

    Args:
        structure: of either front end; left as it is.
        batch: an input.
        inner: as for :class:`Dependencies`.
        averaged: take groups over which a norm averages, whose removal is not checked by numbers: the norm divides by the
            number of channels that are left. Embedding widths are of this kind.
        narrow_inputs: as for :class:`Dependencies`.

    Returns:
        Its ``groups`` can be removed; its ``refused`` say why others cannot.
    """
    forbidden: dict[str, str] = {}
    found = Dependencies(structure, inner=inner, narrow_inputs=narrow_inputs)
    if not averaged:
        for group in found.groups:
            if group.averaged:
                forbidden[group.name] = (
                    f"{group.averaged[0]} averages over its channels, so that removing even a channel of zeros changes what it "
                    "computes; averaged=True removes them all the same"
                )
        if forbidden:
            found = found.without(forbidden)
    while found.groups:
        problem = tried(structure, found, found.groups, batch)
        if problem is None:
            break
        guilty = _blamed(structure, found, problem, batch)
        if not guilty:  # only together: the first kind of groups goes
            guilty = {found.groups[0].kin: f"it cannot be removed together with other groups: {problem.text}"}
        forbidden.update(guilty)
        found = found.without(forbidden)
    return found


def tried(structure: Structured, found: Dependencies, groups: Sequence[Group], batch: Any) -> Problem | None:
    """Remove the last unit of each of ``groups``, report the first problem, and restore the model."""
    exact = [group for group in groups if not group.averaged]
    for chosen in [exact] if len(exact) == len(groups) else [list(groups), exact]:
        problem = _tried_at_once(structure, found, chosen, batch, chosen is exact) if chosen else None
        if problem is not None:
            return problem
    return None


def _tried_at_once(
    structure: Structured, found: Dependencies, groups: Sequence[Group], batch: Any, exact: bool
) -> Problem | None:
    graph = structure.graph()
    removed = {group.name: np.array([group.units - 1]) for group in groups}
    cut = found.cut(removed)
    try:
        undo = structure.cut(cut)
    except ConfigError as error:
        return Problem(error.site, error.problem)
    try:
        problem = structure.problem(cut, graph)
        after = structure.outputs(batch) if problem is None else []
    finally:
        undo()
    if problem is not None or not exact:
        return problem
    return difference(found, cut, masked_outputs(structure, groups, removed, batch), after)


def difference(found: Dependencies, cut: Cut, masked: Sequence[Array], after: Sequence[Array]) -> Problem | None:
    """Compare the outputs of the whole model, with the removed channels at zero, with those of the cut model.

    Of states of recurrent layers the whole model returns more: the positions that stay are compared.
    """
    axes = [cut.axes(value) for value in found.graph.outputs] if found.states else []
    most = _limit(found)
    for i, (a, b) in enumerate(zip(masked, after, strict=True)):
        a = a if len(axes) != len(masked) else taken(axes[i], a)
        if a.shape != b.shape:
            return Problem("", f"output {i} has the shape {b.shape} after the cut and not {a.shape}")
        if not np.issubdtype(a.dtype, np.floating):
            continue
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all() and not np.array_equal(a[~finite], b[~finite], equal_nan=False):
            return Problem("", f"output {i} is not finite where channels are zero, so that the cut cannot be checked")
        large = float(np.abs(a[finite]).max(initial=0.0))
        worst = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
        if worst > most * max(large, 1e-6):
            return Problem(
                "",
                f"output {i} differs by {worst:.2g} (largest {large:.2g}) from the model with these channels set to zero",
            )
    return None


def _limit(found: Dependencies) -> float:
    """The largest difference that rounding may leave in the dtype of the parameters."""
    dtypes = {value.dtype for value in found.graph.values.values() if value.param is not None}
    return _NOISE if dtypes.isdisjoint(("float16", "bfloat16")) else _NOISE_OF_16_BITS


def masked_outputs(
    structure: Structured, groups: Sequence[Group], removed: dict[str, Array], batch: Any
) -> list[Array]:
    """The outputs of the whole model with units set to zero in every parameter; the model is restored."""
    before: dict[str, Array] = {}
    changed: dict[str, Array] = {}
    for group in groups:
        units = removed[group.name]
        for member in group.members:
            if member.param not in before:
                before[member.param] = structure.param(member.param)
                changed[member.param] = before[member.param].copy()
            at: list[Any] = [slice(None)] * changed[member.param].ndim
            at[member.axis] = member.positions[units].reshape(-1)
            changed[member.param][tuple(at)] = 0
    try:
        for name, value in changed.items():
            structure.set_param(name, value)
        return structure.outputs(batch)
    finally:
        for name, value in before.items():
            structure.set_param(name, value)


def _blamed(structure: Structured, found: Dependencies, problem: Problem, batch: Any) -> dict[str, str]:
    """Groups near a problem, by kin, that also fail alone; all groups are tried where none is near."""
    near = _guilty(found, problem)
    if len(near) == 1:
        return near
    return _guilty_alone(structure, found, batch, near or {g.kin for g in found.groups}) or near


def _guilty(found: Dependencies, problem: Problem) -> dict[str, str]:
    """Groups, by their kin, that reach the operator of a problem."""
    if not problem.where:
        return {}
    graph = found.graph
    ops = [op for op in graph.ops if op.name == problem.where]
    ops = ops or [op for op in graph.ops if f"{op.module}.".startswith(f"{problem.where}.")]
    below = f"{problem.where}."
    held = {v.param for v in graph.values.values() if v.param is not None and v.param.startswith(below)}
    read = {value for op in ops for value in (*op.inputs, *op.outputs)}
    reached = [atoms for value in read for atoms in found.walked(value) if atoms is not None]
    roots = np.unique(found.roots[np.concatenate([np.zeros(0, np.int64), *reached])])
    return {
        group.kin: f"{problem.where}: {problem.text}"
        for group in found.groups
        if any(m.param in held for m in group.members) or np.isin(found.roots[group.atoms[:, 0]], roots).any()
    }


def _guilty_alone(structure: Structured, found: Dependencies, batch: Any, among: Collection[str]) -> dict[str, str]:
    """Groups, by kin, that fail when only they are removed."""
    guilty = {}
    for kin in dict.fromkeys(group.kin for group in found.groups if group.kin in among):
        problem = tried(structure, found, [g for g in found.groups if g.kin == kin], batch)
        if problem is not None:
            guilty[kin] = f"{problem.where}: {problem.text}" if problem.where else problem.text
    return guilty
