"""``param_quantizers``, ``input_quantizers`` and ``output_quantizers`` on the modules of a simulated model.

They are attributes of the instances, set by the simulations of this layer alone: classes, parameters and ``state_dict`` stay
as they are, and a copy of the model has copies of them that belong to the copy's own quantizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from bitwright.aimet_common.utils import Handle
from bitwright.aimet_torch._core import Site, walk_modules
from bitwright.aimet_torch._sites import SiteQuantizer, view_of
from bitwright.errors import ConfigError, ModelError

RECORD = "_bitwright_quantizers"
PUBLIC = ("param_quantizers", "input_quantizers", "output_quantizers")
#: methods of quantized modules that the modules of a simulation have too
METHODS = (
    "compute_encodings",
    "compute_param_encodings",
    "export_input_encodings",
    "export_output_encodings",
    "export_param_encodings",
    "fold_param_quantizers",
    "get_original_module",
    "import_input_encodings",
    "import_output_encodings",
    "import_param_encodings",
    "set_weight_quantizer_to_mxfp4_int8",
    "set_weight_quantizer_to_nvfp4_int8",
)


class Slot:
    """One place of a module: its sites, of which there may be none."""

    def __init__(self, name: str, sites: Sequence[Site], why_none: str) -> None:
        self.name, self.sites, self.why_none = name, tuple(sites), why_none
        self._view: SiteQuantizer | None = None

    def get(self) -> SiteQuantizer | None:
        """The quantizer in effect; ``None`` where there is none, or it is switched off."""
        if not any(site.enabled and not site.quantizer.derived for site in self.sites):
            return None
        made = view_of(self.sites)
        if type(self._view) is not type(made):
            self._view = made
        return self._view

    def set(self, quantizer: Any) -> None:
        """Switch the quantizer off (``None``), or make it what ``quantizer`` is.

        Raises:
            ModelError: there is no quantizer here that could be changed.
        """
        if quantizer is None:
            for site in self.sites:
                site.enabled = False
            return
        if not self.sites:
            raise ModelError(
                self.name,
                f"this place has no quantizer: {self.why_none}",
                "set the quantizer of the place that sim.coverage() names for this value, or give the simulation a "
                "config_file that quantizes it here",
            )
        view_of(self.sites).assign(quantizer)


class QuantizerList(Sequence[Any]):
    """The quantizers of a module's inputs or outputs; items are read and assigned, the length stays."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)

    def __getitem__(self, index: Any) -> Any:
        found = self._slots[index]
        return [slot.get() for slot in found] if isinstance(index, slice) else found.get()

    def __setitem__(self, index: int, quantizer: Any) -> None:
        self._slots[index].set(quantizer)

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return repr(list(self))


class QuantizerDict(MutableMapping[str, Any]):
    """The quantizers of a module's parameters by name; items are read and assigned, the names stay."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = dict(slots)

    def __getitem__(self, name: str) -> Any:
        return self._slots[name].get()

    def __setitem__(self, name: str, quantizer: Any) -> None:
        self._slots[name].set(quantizer)

    def __delitem__(self, name: str) -> None:
        raise ConfigError(
            self._slots[name].name, "the place of a quantizer stays", f"assign None: param_quantizers[{name!r}] = None"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return repr(dict(self))


class Record:
    """What a module of a simulated model knows of its quantizers.

    Attributes:
        sim: the simulation; a copy of the model has a copy of it.
        name: path of the module.
        params, inputs, outputs: the quantizers at its edge.
        inside: sites of calls in its forward that are at none of its edges.
    """

    def __init__(
        self,
        sim: Any,
        name: str,
        params: QuantizerDict,
        inputs: QuantizerList,
        outputs: QuantizerList,
        inside: tuple[Site, ...],
    ) -> None:
        self.sim, self.name, self.inside = sim, name, inside
        self.params, self.inputs, self.outputs = params, inputs, outputs

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Name and place of everything at the module's edge."""
        for name, slot in self.params._slots.items():
            yield f"param_quantizers.{name}", slot
        for kind, slots in (("input", self.inputs), ("output", self.outputs)):
            for index, slot in enumerate(slots._slots):
                yield f"{kind}_quantizers.{index}", slot


def record_of(module: Any) -> Record | None:
    """What a module knows of its quantizers; ``None`` outside a simulation of this layer."""
    found = vars(module).get(RECORD) if isinstance(module, nn.Module) else None
    return found if isinstance(found, Record) else None


def is_quantized(module: Any) -> bool:
    """Whether a module shows quantizers."""
    return record_of(module) is not None and PUBLIC[0] in vars(module)


def attach(sim: Any) -> None:
    """Give the modules of ``sim.model`` their quantizers; those without sub-modules show them."""
    modules = dict(walk_modules(sim.model))
    by_module: dict[str, list[Any]] = {}
    below_module: dict[str, list[str]] = {}
    for op in sim.graph.ops:
        by_module.setdefault(op.module, []).append(op)
        below_module.setdefault(_nearest(op.module, modules), []).append(op.name)
    by_param, by_op = _sites_by_place(sim)
    for path, module in modules.items():
        inputs, outputs = QuantizerList(()), QuantizerList(())
        if not module._modules:  # what the forward of others computes lies between their sub-modules
            inputs, outputs = _edges(sim, path, by_module.get(path, []), by_op)
        own = [site for op in below_module.get(path, ()) for site in by_op.get(op, ())]
        params = _param_slots(path, module, by_param)
        record = Record(sim, path, params, inputs, outputs, _not_among(own, (*inputs._slots, *outputs._slots)))
        vars(module)[RECORD] = record
        if not module._modules and not any(hasattr(type(module), name) for name in PUBLIC):
            vars(module).update(param_quantizers=record.params, input_quantizers=inputs, output_quantizers=outputs)


def _sites_by_place(sim: Any) -> tuple[dict[str, list[Site]], dict[str, list[Site]]]:
    """The sites of stored parameters by parameter, and all others by operator."""
    by_param: dict[str, list[Site]] = {}
    by_op: dict[str, list[Site]] = {}
    for site in sim.quantizers.values():
        param = sim.graph.values[site.value].param
        if site.role in ("weight", "bias", "constant") and param is not None:
            by_param.setdefault(param, []).append(site)
        else:
            by_op.setdefault(site.op, []).append(site)
    return by_param, by_op


def _not_among(sites: Sequence[Site], slots: Sequence[Slot]) -> tuple[Site, ...]:
    edge = {id(site) for slot in slots for site in slot.sites}
    return tuple(site for site in sites if id(site) not in edge)


def _param_slots(path: str, module: nn.Module, by_param: Mapping[str, list[Site]]) -> QuantizerDict:
    why_none = "the parameter is not quantized by the configuration"
    names = {name: f"{path}.{name}" if path else name for name, p in module._parameters.items() if p is not None}
    return QuantizerDict({name: Slot(full, by_param.get(full, ()), why_none) for name, full in names.items()})


def _nearest(path: str, modules: Mapping[str, nn.Module]) -> str:
    """The innermost module at or above ``path``; calls that are recorded in parts (attention) have paths of their own."""
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path


def _edges(
    sim: Any, path: str, ops: Sequence[Any], by_op: Mapping[str, list[Site]]
) -> tuple[QuantizerList, QuantizerList]:
    """Quantizers of what a module reads and returns."""
    sites = [site for op in ops for site in by_op.get(op.name, ())]
    reads = _by_value("input", _entering(sim.graph, ops), sites)
    returns = _by_value("output", _leaving(sim.graph, path, ops), sites)
    if len(ops) > 1 and len({(op.type, len(op.outputs)) for op in ops}) == 1 == len(ops[0].outputs):
        reads, returns = ([list(chain(*found))] for found in (reads, returns))  # one call, made several times
    return _slots(f"{path}.input", reads, bool(ops)), _slots(f"{path}.output", returns, bool(ops))


def _by_value(role: str, values: Iterable[str], sites: Sequence[Site]) -> list[list[Site]]:
    """For each value the sites of a role that hold it."""
    found: dict[str, list[Site]] = {value: [] for value in values}
    for site in sites:
        if site.role == role and site.value in found:
            found[site.value].append(site)
    return list(found.values())


def _slots(place: str, found: Sequence[Sequence[Site]], computes: bool) -> QuantizerList:
    why = "its values lie on the grid of another place" if computes else "the module computes nothing that is quantized"
    return QuantizerList([Slot(f"{place}[{i}]", sites, why) for i, sites in enumerate(found or [()])])


def _entering(graph: Any, ops: Sequence[Any]) -> list[str]:
    """The values that operators read and none of them makes."""
    made = {value for op in ops for value in op.outputs}
    read = dict.fromkeys(value for op in ops for _, value in op.sources())
    return [value for value in read if value not in made and not graph.values[value].is_static]


def _leaving(graph: Any, path: str, ops: Sequence[Any]) -> Iterator[str]:
    """The values that operators of a module make and others read, or nothing reads."""
    for value in (value for op in ops for value in op.outputs):
        readers = {reader.module for reader, _ in graph.consumers(value)}
        if graph.is_output(value) or readers != {path}:
            yield value


def check_attached(sim: Any) -> None:
    """Refuse a model one of whose lists of quantizers was replaced as a whole, which would change nothing.

    Raises:
        ModelError: with the module.
    """
    for path, module in walk_modules(sim.model):
        record = record_of(module)
        for name, own in zip(PUBLIC, (record.params, record.inputs, record.outputs) if record else (), strict=False):
            if getattr(module, name, own) is not own:
                raise ModelError(
                    f"{path}.{name}",
                    "it was replaced, so that the simulation does not see it",
                    f"assign its items: {path}.{name}[...] = quantizer",
                )


def below(modules: Any) -> list[Record]:
    """The records of one or several modules and of everything below them."""
    several = [modules] if isinstance(modules, nn.Module) else list(modules)
    found: dict[int, Record] = {}
    for top in several:
        for _, module in walk_modules(top):
            record = record_of(module)
            if record is not None:
                found[id(record)] = record
    return list(found.values())


def switched_off(sites: Iterable[Site]) -> Handle:
    """Switch sites off now; the handle brings them back as they were."""
    kept = [(site, site.enabled) for site in sites]
    for site, _ in kept:
        site.enabled = False

    def restore() -> None:
        for site, enabled in kept:
            site.enabled = enabled

    return Handle(restore)
