"""Candidates, the precisions that weights and activations may have, and the groups of sites that must share one.

A group holds the operands of one kernel, and what these share with the next. Kernels that read one grid have activations of one
precision, and weights that may differ: such groups are *tied*. :func:`simulation_of` makes the simulation that a search begins
with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bitwright.core.graph.graph import Graph, Op
from bitwright.core.graph.operators import op_row
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.spec import PRESETS, Preset, QuantSpec, activation_spec, find_preset, weight_spec
from bitwright.core.simulation.sites import Site, values_on_grids
from bitwright.errors import ConfigError
from bitwright.recipes.quantize import quantize

_FLOAT_BITS = 32


@dataclass(frozen=True)
class Candidate:
    """A precision that a group may have.

    Attributes:
        name: ``w4a8``.
        weight, activation: what is asked for; ``None`` leaves them in float.
    """

    name: str
    weight: QuantSpec | None
    activation: QuantSpec | None

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of weights and of activations; 32 for float."""
        return bits_of(self.weight), bits_of(self.activation)


def bits_of(spec: QuantSpec | None) -> int:
    """Bits per element; 32 where nothing is quantized."""
    return _FLOAT_BITS if spec is None else spec.format.bits


def as_candidates(given: str | Preset | Iterable[Any]) -> tuple[Candidate, ...]:
    """Candidates from names of presets, presets, or AIMET's pairs ``((activation bits, type), (weight bits, type))``.

    Raises:
        ConfigError: none, an unknown preset, a pair that cannot be read, or two of one name.
    """
    if isinstance(given, (str, Preset)):
        given = (given,)
    if not isinstance(given, Iterable):
        raise ConfigError(
            "candidates",
            f"{given!r} is not a list of precisions",
            'pass presets, for example ["w8a8", "w8a16", "w4a8"]',
        )
    found = [_candidate(item) for item in given]
    names = [c.name for c in found]
    if not found:
        raise ConfigError("candidates", "the list is empty", 'pass presets, for example ["w8a8", "w8a16", "w4a8"]')
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError("candidates", f"{min(repeated)} stands there twice", "name each candidate once")
    return tuple(found)


def _candidate(item: Any) -> Candidate:
    if isinstance(item, Candidate):
        return item
    if isinstance(item, (str, Preset)):
        preset = find_preset(item)
        name = item if isinstance(item, str) else next((n for n, p in PRESETS.items() if p == item), "")
        w, a = bits_of(preset.weight), bits_of(preset.activation)
        return Candidate(name or f"w{w}a{a}", preset.weight, preset.activation)
    try:
        (activation, activation_type), (weight, weight_type) = item
        names = [_format(activation, activation_type), _format(weight, weight_type)]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "candidates",
            f"{item!r} is neither a preset nor a pair of precisions",
            'write "w8a16", or ((16, "int"), (8, "int")): activations first',
        ) from error
    a_spec = None
    if names[0].startswith("int"):
        a_spec = activation_spec(f"u{names[0]}")
    elif names[0] != "float32":
        a_spec = activation_spec(names[0], symmetry="symmetric")
    w_spec = None if names[1] == "float32" else weight_spec(names[1])
    kind = "" if "int" in names[0] and "int" in names[1] else "f"
    return Candidate(f"w{weight}a{activation}{kind}", w_spec, a_spec)


def _format(bits: int, kind: Any) -> str:
    text = str(getattr(kind, "name", kind))
    return f"int{int(bits)}" if text == "int" else {16: "float16", 8: "float8_e4m3", 32: "float32"}[int(bits)]


def spec_at(planned: QuantSpec, wanted: QuantSpec) -> QuantSpec:
    """``planned`` at the precision of ``wanted``, with the rules' settings of grid and range.

    Of an integer format only the bits are taken; of others the format. A granularity that is not the default of its kind
    (blocks), and a format of the scales, are part of the precision.
    """
    changes: dict[str, Any] = {}
    if not isinstance(wanted.granularity, PerTensor | PerChannel):
        changes["granularity"] = wanted.granularity
    if wanted.scale_format != planned.scale_format:
        changes["scale_format"] = wanted.scale_format
    if isinstance(wanted.format, IntFormat) and isinstance(planned.format, IntFormat):
        changes["format"] = replace(planned.format, bits=wanted.format.bits)
    else:
        changes.update(format=wanted.format, symmetry=wanted.symmetry, fixed_range=None)
    return replace(planned, **changes)


def coarser(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` has integer weights and activations of at most the bits of ``other``."""
    return one != other and _no_finer(one.weight, other.weight) and _no_finer(one.activation, other.activation)


def _no_finer(one: QuantSpec | None, other: QuantSpec | None) -> bool:
    if one is None or other is None:
        return other is None
    integers = isinstance(one.format, IntFormat) and isinstance(other.format, IntFormat)
    return one == other or (integers and one.granularity == other.granularity and one.format.bits <= other.format.bits)


def highest(candidates: Sequence[Candidate]) -> int:
    """Index of the candidate with the most bits."""
    return max(range(len(candidates)), key=lambda i: (sum(candidates[i].bits), candidates[i].bits[1]))


@dataclass(frozen=True)
class Group:
    """Quantizers whose precision changes together.

    Attributes:
        name: of its first layer.
        layers: operators whose operands they quantize, in execution order.
        weights, activations: the first site of each quantizer.
        candidates: places of the candidates that it may have.
        refused: candidate -> why it may not have it.
        tie: groups of one tie have candidates with the same activations; empty for a group that is free.
    """

    name: str
    layers: tuple[str, ...]
    weights: tuple[str, ...]
    activations: tuple[str, ...]
    candidates: tuple[int, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    tie: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites of the group."""
        return (*self.weights, *self.activations)


class _Sets:
    """Disjoint sets of quantizers."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, key: int) -> int:
        """The representative of the set that contains ``key``."""
        root = key
        while (up := self._parent.setdefault(root, root)) != root:
            root = up
        while key != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def join(self, keys: Sequence[int]) -> None:
        """Merge the sets of ``keys``."""
        for key in keys[1:]:
            self._parent[self.find(key)] = self.find(keys[0])


def can_change(site: Site) -> bool:
    """Whether a search may change the precision of a site: calibrated, not frozen, no int32 bias."""
    quantizer = site.quantizer
    return (
        site.enabled and not quantizer.derived and quantizer.encoding is not None
        and site.role != "bias" and not site.frozen
    )  # fmt: skip


def operands(sim: Any, which: Callable[[Site], bool] = can_change) -> dict[str, dict[int, Site]]:
    """Operator -> the quantizers of what its kernel computes with, each with one of its sites.

    A kernel reads activations and weights on their grids; a recurrent layer has its states and gates beside them. Operators
    that only move data have none of their own.

    Args:
        sim: of either front end.
        which: sites that count; those that a search may change by default.
    """
    graph: Graph = sim.graph
    movable = [site for site in sim.quantizers.values() if which(site)]
    of = {id(site.quantizer): site for site in movable}
    grids = values_on_grids(sim.quantizers, sim.plan.shared)
    on_grid = {value: of[key] for key in grids if key in of for value in grids[key]}
    own: dict[str, list[Site]] = {}
    for site in filter(_is_operand, movable):
        own.setdefault(site.op, []).append(site)

    def read(op: Op) -> list[Site]:
        mine = own.get(op.name, [])
        held = {site.value for site in mine}
        return [*mine, *(on_grid[v] for _, v in op.sources() if v in on_grid and v not in held)]

    found = {op.name: {id(site.quantizer): site for site in read(op)} for op in filter(_has_kernel, graph.ops)}
    return {name: sites for name, sites in found.items() if sites}


def _is_operand(site: Site) -> bool:
    """Whether the site is an input or an inner value of a kernel, not an output."""
    return site.is_stored or site.role == "input" or site.inner is not None


def _has_kernel(op: Op) -> bool:
    """Whether integer runtimes compute with the grids of all its operands: products, sums, joins."""
    row = op_row(op.type)
    return row.kind == "compute" or (row.integer and row.activations is None)


def find_groups(
    sim: Any, candidates: Sequence[Candidate], allowed: Any = None, *, tied: bool = False,
    which: Callable[[Site], bool] = can_change,
) -> tuple[Group, ...]:  # fmt: skip
    """The groups of a calibrated simulation, in execution order.

    Args:
        sim: of either front end.
        candidates: what each may become.
        allowed: ``(operator type, candidate) -> None``, or the reason why its kernel cannot; every candidate by default.
        tied: give the weights of every kernel a group of their own where several kernels read one grid; these groups and
            the one of the activations are tied. Otherwise they are one group.
        which: sites that count; those that a search may change by default.
    """
    kernels, sets = operands(sim, which), _Sets()
    for sites in kernels.values():
        sets.join(list(sites))
    layers: dict[int, list[str]] = {}
    members: dict[int, dict[int, Site]] = {}
    for name, sites in kernels.items():
        key = sets.find(next(iter(sites)))
        layers.setdefault(key, []).append(name)
        members.setdefault(key, {}).update(sites)
    for site in sim.quantizers.values():  # what no kernel reads is a group of its own
        if which(site) and sets.find(id(site.quantizer)) not in members:
            members[sets.find(id(site.quantizer))] = {id(site.quantizer): site}
    found = []
    for key, sites in members.items():
        parts = list((_parts(layers.get(key, []), kernels) if tied else {}).values())
        tie = next(iter(sites.values())).name if parts else ""
        parts = [*parts, *_rest(layers.get(key, []), sites, parts)]
        found += [_group(sim.graph, names, own, candidates, allowed, tie) for names, own in parts]
    return tuple(found)


def _rest(
    layers: Sequence[str], sites: Mapping[int, Site], parts: Sequence[tuple[list[str], dict[int, Site]]]
) -> list[tuple[list[str], dict[int, Site]]]:
    """One group of the layers and quantizers of a set that are in none of its parts; none without quantizers."""
    taken = {name for names, _ in parts for name in names}
    held = {key for _, own in parts for key in own}
    rest = {key: site for key, site in sites.items() if key not in held}
    return [([name for name in layers if name not in taken], rest)] if rest else []


def _parts(
    layers: Sequence[str], kernels: Mapping[str, Mapping[int, Site]]
) -> dict[int, tuple[list[str], dict[int, Site]]]:
    """The kernels of one set with the weights that they alone read; empty where fewer than two have any."""
    own = {n: {k: s for k, s in kernels[n].items() if s.is_stored} for n in layers}
    sets = _Sets()
    for weights in own.values():
        sets.join(list(weights))
    found: dict[int, tuple[list[str], dict[int, Site]]] = {}
    for name, weights in own.items():
        if weights:
            names, sites = found.setdefault(sets.find(next(iter(weights))), ([], {}))
            names.append(name)
            sites.update(weights)
    return found if len(found) > 1 else {}


def _group(
    graph: Graph, layers: Sequence[str], sites: Mapping[int, Site], candidates: Sequence[Candidate], allowed: Any, tie: str
) -> Group:  # fmt: skip
    refused = _refused(graph, layers, candidates, allowed)
    computing = [name for name in layers if op_row(graph.op(name).type).kind == "compute"]
    first = next(iter(sites.values()))
    weights = tuple(s.name for s in sites.values() if s.is_stored)
    return Group(
        next(iter([*computing, *layers]), first.name) if weights or not tie else first.name,
        tuple(layers),
        weights,
        tuple(s.name for s in sites.values() if not s.is_stored),
        tuple(i for i, c in enumerate(candidates) if c.name not in refused),
        refused,
        tie,
    )


def _less(group: Group, refused: Mapping[int, str], candidates: Sequence[Candidate]) -> Group:
    """A group without the candidates ``refused``, each with the reason."""
    why = {candidates[c].name: text for c, text in refused.items()}
    left = tuple(c for c in group.candidates if candidates[c].name not in why)
    return replace(group, candidates=left, refused={**group.refused, **why})


def without(
    groups: Sequence[Group], refused: Mapping[int, Mapping[int, str]], candidates: Sequence[Candidate]
) -> tuple[Group, ...]:
    """Groups without the candidates that a site of theirs cannot have, or whose activations a tied group cannot have.

    Raises:
        ConfigError: a group is left with none.
    """
    found = [_less(group, refused.get(i, {}), candidates) for i, group in enumerate(groups)]
    for members in ties(found):
        able = set.intersection(*({candidates[c].activation for c in found[i].candidates} for i in members))
        for i in members:
            why = f"its activations are not possible at all of {found[i].tie}"
            lost = (c for c in found[i].candidates if candidates[c].activation not in able)
            found[i] = _less(found[i], dict.fromkeys(lost, why), candidates)
    for group in found:
        if not group.candidates:
            raise ConfigError(
                group.name,
                f"none of the candidates is possible: {'; '.join(f'{n}: {t}' for n, t in group.refused.items())}",
                "add a candidate that its kernel has, or freeze its sites: sim.quantizers[...].frozen = True",
            )
    return tuple(found)


def distinct(
    groups: Sequence[Group], same: Callable[[int, int, int], bool], candidates: Sequence[Candidate]
) -> tuple[Group, ...]:
    """Groups without candidates of equal effect, such as 4-bit and 8-bit weights of a sum, which has none.

    Groups of a tie keep one per precision of activations, which they share with groups that it makes a difference to.

    Args:
        same: (place of a group, candidate, candidate) -> whether both give every site of it the same spec.
    """
    found = []
    for i, group in enumerate(groups):
        kept: list[int] = []
        for c in group.candidates:
            alike = (k for k in kept if not group.tie or candidates[k].activation == candidates[c].activation)
            if not any(same(i, k, c) for k in alike):
                kept.append(c)
        found.append(replace(group, candidates=tuple(kept)))
    return tuple(found)


def ties(groups: Sequence[Group]) -> list[list[int]]:
    """Indices of the groups of each tie."""
    found: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        if group.tie:
            found.setdefault(group.tie, []).append(i)
    return list(found.values())


def _refused(graph: Graph, layers: Sequence[str], candidates: Sequence[Candidate], allowed: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for candidate in candidates if allowed is not None else ():
        for name in layers:
            why = allowed(graph.op(name).type, candidate)
            if why is not None:
                found[candidate.name] = f"{name}: {why}"
                break
    return found


def planned_bits(sim: Any) -> dict[str, int]:
    """Site -> minimum bits, where the placement gave more than the preset, as for a cell state."""
    base = bits_of(sim.rules.activation)
    return {
        name: site.spec.format.bits
        for name, site in sim.plan.sites.items()
        if site.spec is not None and not site.is_stored and site.spec.format.bits > base
    }


_STEPS: tuple[Any, ...] = ("fold", {"layer_inputs": {"only_with_attention": True}})


def simulation_of(model: Any, batches: Sequence[Any], candidate: Candidate, config_file: Any = None) -> Any:
    """``model`` itself where it is a simulation, else one that is folded, placed and calibrated.

    Ranges are chosen by least squared error, from histograms, which serve every number of bits.
    """
    if hasattr(model, "quantizers") and hasattr(model, "remember"):
        if config_file is not None:
            raise ConfigError(
                "config_file", "the simulation has its rules already", "pass it to the simulation, or the model here"
            )
        return model
    preset = Preset(candidate.weight, candidate.activation)
    options: dict[str, Any] = {
        "recipe": [s for s in _STEPS if config_file is None or s == "fold"],
        "quant_scheme": "mse",
        "config_file": config_file,
        "progress": False,
    }
    return quantize(model, batches, preset, **options).sim
