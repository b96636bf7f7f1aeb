"""Checkpoints of a simulation: parameters and statistics in safetensors, quantizers in JSON, a manifest with hashes; no pickle.

The files replace those of an earlier checkpoint at once (:func:`bitwright.export.files.atomic.atomic_files`), and a
checkpoint is read only if all of them are those that its manifest was written with.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from bitwright.core.health.diagnosis import Repair
from bitwright.core.numerics import statistics
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json, spec_from_json, spec_to_json
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.simulation import all_or_nothing
from bitwright.core.simulation.sites import Site
from bitwright.errors import EncodingsError, ExportError, GranularityError, ModelError
from bitwright.export.encodings.write import names_error
from bitwright.export.files.atomic import atomic_files, settle
from bitwright.export.files.manifest import FileEntry, read_manifest, write_manifest
from bitwright.torch.calls.inputs import model_device, named_state
from bitwright.torch.quantizers.learned_range import RangeEnds
from bitwright.torch.simulation.ranges import (
    learned_from_json,
    learned_ranges,
    learned_to_json,
    refuse_corrections,
    restore_learned,
    share_gradients,
)
from bitwright.torch.simulation.simulated_module import SimulatedModule

_TENSORS, _QUANTIZERS, _MANIFEST = "model.safetensors", "quantizers.json", "checkpoint.json"
_STATISTICS = "statistics.safetensors"  # not in checkpoints of earlier versions
_VERSION = 2
_REMEDY = "pass a folder that save_checkpoint wrote, with all of its files"
_OTHER = "load another checkpoint"


def save_checkpoint(sim: SimulatedModule, folder: str | Path) -> Path:
    """Write the checkpoint into ``folder``, created if missing.

    ``model.safetensors`` holds parameters and buffers, tied ones once, under their first name; ``quantizers.json`` specs and
    encodings; ``statistics.safetensors`` what calibration saw, from which other bits and range methods are chosen without data;
    ``checkpoint.json`` their hashes. An earlier checkpoint there is replaced at once: whatever stops this call,
    :func:`load_checkpoint` finds the earlier one or the new one, whole.

    Raises:
        ExportError: the folder cannot be written; an earlier checkpoint in it is as it was.
        ModelError: the simulation is being calibrated.
    """
    from safetensors.numpy import save as save_arrays
    from safetensors.torch import save

    state = {"version": _VERSION, **_state(sim)}
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_state(sim.model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    with atomic_files(folder, name=_MANIFEST, create=True) as staging:
        (staging / _TENSORS).write_bytes(save(tensors))
        (staging / _QUANTIZERS).write_text(json.dumps(state, indent=1), encoding="utf-8")
        (staging / _STATISTICS).write_bytes(save_arrays(_seen(sim)))
        write_manifest(staging / _MANIFEST, files=[_TENSORS, _QUANTIZERS, _STATISTICS])
    return Path(folder)


def _seen(sim: SimulatedModule) -> dict[str, NDArray[Any]]:
    """Calibration statistics of every quantizer by ``kind/field/site``, with the name of its first site."""
    return {
        f"{statistics.kind_of(seen)}/{field}/{quantizer.name}": np.array(array)
        for quantizer in sim.quantizers.unique()
        if (seen := quantizer.statistics) is not None
        for field, array in statistics.to_arrays(seen).items()
    }


def _state(sim: SimulatedModule) -> dict[str, Any]:
    """The state of a simulation without the model's tensors, as plain JSON."""
    if sim._simulator.stage not in ("simulate", "uncalibrated"):
        raise ModelError(
            "save_checkpoint", "the simulation is being calibrated", "call it when compute_encodings has returned"
        )
    refuse_corrections(sim, "save_checkpoint")
    quantizers = {
        site.name: {
            "spec": spec_to_json(site.quantizer.spec),
            "encoding": None if site.encoding is None else encoding_to_json(site.encoding),
            "enabled": site.enabled,
            "frozen": site.frozen,
            "why_float": site.quantizer.why_float,
            **_learned(site),
        }
        for site in sim.quantizers.values()
    }
    return {
        "stage": sim._simulator.stage,
        "quantizers": quantizers,
        "repairs": [asdict(repair) for repair in sim.repairs],
        "lengths": dict(sim._simulator.lengths),
    }


def _learned(site: Site) -> dict[str, Any]:
    """The parameters of a learned range, and the encoding that they are relative to."""
    learned = getattr(site.quantizer, "learned", None)
    if learned is None or site.encoding is None or isinstance(learned, RangeEnds):
        return {}  # ends follow from the encoding
    return {"learned": {"base": encoding_to_json(learned.base), "parameters": learned_to_json(learned)}}


def state_dict(sim: SimulatedModule) -> dict[str, Any]:
    """The simulation as tensors and plain values, for ``torch.save``: ``model`` is ``sim.model.state_dict()``."""
    return {"model": sim.model.state_dict(), "simulation": {"version": _VERSION, **_state(sim)}}


def load_state_dict(sim: SimulatedModule, state: Mapping[str, Any]) -> None:
    """Load what :func:`state_dict` returned for a simulation of the same model under the same rules; all or nothing.

    Raises:
        EncodingsError: it is no such state, or one of another model.
    """
    if set(state) != {"model", "simulation"}:
        raise EncodingsError(
            "load_state_dict",
            f"the state has the keys {sorted(map(str, state))}, not 'model' and 'simulation'",
            "pass what sim.state_dict() returned; sim.model.load_state_dict() takes the weights alone",
        )
    where = Path("load_state_dict")
    try:
        loaded = _parsed({}, state["simulation"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EncodingsError("load_state_dict", f"no readable state: {error!r:.300}", _OTHER) from error
    remedy = _remedy(sim, state["model"])
    settings = _settings(sim, where, loaded, remedy)
    with all_or_nothing(sim, parameters=True):
        try:
            sim.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise EncodingsError("load_state_dict", f"the tensors do not fit the model: {error}", remedy) from error
        _put(sim, loaded, settings)


def load_checkpoint(sim: SimulatedModule, folder: str | Path) -> None:
    """Read a checkpoint into ``sim``, which must simulate the same model under the same rules.

    Everything is read and checked before anything changes; a call that fails or is interrupted leaves weights, quantizers
    and stage as they were. What calibration saw is read too: bits, range methods and symmetry can be changed without data.

    Raises:
        EncodingsError: no checkpoint there, a part of it is damaged, missing or of another checkpoint, or it is one of
            another model (which names are missing or extra).
    """
    folder = Path(folder)
    loaded = _read(folder)
    own = dict(named_state(sim.model))
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    remedy = _remedy(sim, loaded.tensors)
    _check_names(folder / _TENSORS, first.values(), loaded.tensors, remedy)
    settings = _settings(sim, folder / _QUANTIZERS, loaded, remedy)
    for name, tensor in loaded.tensors.items():
        _check_tensor(folder, name, tensor, own[name])
    with all_or_nothing(sim, parameters=True):
        for name in list(loaded.tensors):
            own[name].detach().copy_(loaded.tensors.pop(name))
        _put(sim, loaded, settings)


def _put(sim: SimulatedModule, loaded: _Checkpoint, settings: Mapping[str, _Setting]) -> None:
    """Restore the state that a checkpoint holds besides the tensors."""
    for name, setting in settings.items():
        setting.put(sim.quantizers[name])
    for name, seen in loaded.statistics.items():
        sim.quantizers[name].quantizer.statistics = seen
    for site in sim.quantizers.values():
        site.channels.seen = None
    for _, learned in learned_ranges(sim):
        learned.to(model_device(sim.model))
    share_gradients(sim)
    sim._simulator.repairs = {repair.op: repair for repair in loaded.repairs}
    sim._simulator.lengths, sim._simulator.longer = dict(loaded.lengths), {}
    sim._simulator.stage = "simulate" if loaded.calibrated else "uncalibrated"
    sim.calibration_log = None


def _remedy(sim: SimulatedModule, saved: Iterable[str]) -> str:
    """The remedy where the tensor names ``saved`` differ from the model's; often only one of the two is folded."""
    here, there = (
        {name for name in names if name.endswith(".running_mean")}
        for names in ((name for name, _ in named_state(sim.model)), saved)
    )
    if here != there:
        return (
            "fold the batch norms as before it was saved: fold_all_batch_norms(model, dummy_input=...) before the simulation is "
            "built, or compute_encodings and fold_all_batch_norms_to_scale(sim) after it, or neither"
        )
    return "build the simulation from the same model and rules"


def _check_names(where: Path, expected: Iterable[str], found: Iterable[str], remedy: str) -> None:
    mismatch = names_error(str(where), expected, found)
    if mismatch:
        raise EncodingsError(mismatch.site, mismatch.problem, remedy)


def _settings(sim: SimulatedModule, where: Path, loaded: _Checkpoint, remedy: str) -> dict[str, _Setting]:
    """Settings of every quantizer in a checkpoint, checked against the simulation."""
    _check_names(where, sim.quantizers, loaded.quantizers, remedy)
    settings = {name: _setting(where, sim.quantizers[name], saved) for name, saved in loaded.quantizers.items()}
    _check_groups(where, sim, settings)
    return settings


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class _Checkpoint:
    """The parts of a checkpoint, not yet compared with a simulation."""

    tensors: dict[str, torch.Tensor]
    quantizers: Mapping[str, Mapping[str, Any]]
    repairs: tuple[Repair, ...]
    lengths: Mapping[str, int]
    calibrated: bool
    statistics: Mapping[str, statistics.Statistics]


def _read(folder: Path) -> _Checkpoint:
    from safetensors import SafetensorError
    from safetensors.numpy import load as load_arrays
    from safetensors.torch import load

    try:
        settle(folder)
        entries = {entry.name: entry for entry in read_manifest(folder / _MANIFEST).files}
    except ExportError as error:
        problem = f"no readable checkpoint there: {error.problem}"
        if (folder / _QUANTIZERS).is_file() and not (folder / _MANIFEST).exists():
            problem = (
                f"no readable checkpoint there: {_MANIFEST} is missing, which tells whether the other files are whole"
            )
        raise EncodingsError(str(folder), problem, _REMEDY) from error
    tensors = _content(folder, _TENSORS, entries)
    state = _content(folder, _QUANTIZERS, entries)
    seen = _content(folder, _STATISTICS, entries) if _STATISTICS in entries else None
    try:
        return _parsed(load(tensors), json.loads(state), {} if seen is None else load_arrays(seen))
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise EncodingsError(str(folder), f"no readable checkpoint there: {reason:.300}", _REMEDY) from error


def _content(folder: Path, name: str, entries: Mapping[str, FileEntry]) -> bytes:
    """The bytes of a file, checked against the manifest."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        problem = f"no readable checkpoint there: {name}: {error.strerror or error}"
        raise EncodingsError(str(folder), problem, _REMEDY) from error
    entry = entries.get(name)
    if entry is None or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise EncodingsError(
            str(folder / name),
            f"it has another content than {_MANIFEST} was written with: it is damaged, was edited, or belongs to another "
            "checkpoint",
            "restore the file, or load another checkpoint",
        )
    return content


def _parsed(
    tensors: dict[str, torch.Tensor], state: Any, seen: Mapping[str, NDArray[Any]] | None = None
) -> _Checkpoint:
    """Parse the parts. Raises ValueError, TypeError, KeyError or AttributeError where they are malformed."""
    if state["version"] != _VERSION:
        raise ValueError(f"its version is {state['version']!r}, this is version {_VERSION}")
    if state["stage"] not in ("simulate", "uncalibrated"):
        raise ValueError(f"there is no stage {state['stage']!r}")
    lengths = {str(op): int(length) for op, length in state["lengths"].items()}
    repairs = tuple(Repair(**repair) for repair in state["repairs"])
    quantizers = dict(state["quantizers"])
    found = _statistics(seen or {}, quantizers)
    return _Checkpoint(tensors, quantizers, repairs, lengths, state["stage"] == "simulate", found)


def _statistics(arrays: Mapping[str, NDArray[Any]], sites: Container[str]) -> dict[str, statistics.Statistics]:
    """Site -> its statistics. Raises ValueError or KeyError where the arrays are malformed."""
    fields: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}
    for key, array in arrays.items():
        kind, field, site = key.split("/", 2)
        fields.setdefault((kind, site), {})[field] = array
    found: dict[str, statistics.Statistics] = {}
    for (kind, site), held in fields.items():
        if kind not in get_args(statistics.Kind) or site not in sites or site in found:
            raise ValueError(f"{_STATISTICS}: there are no statistics of kind {kind!r:.50} of a site {site!r:.100}")
        seen = statistics.from_arrays(cast(statistics.Kind, kind), held)
        expected = statistics.to_arrays(statistics.start(cast(statistics.Kind, kind), held["count"].shape))
        if any(held[name].shape != one.shape or held[name].dtype != one.dtype for name, one in expected.items()):
            raise ValueError(f"{_STATISTICS}: the statistics of {site} are not of one shape")
        found[site] = seen
    return found


# ------------------------------------------------------------------------------------------------ checks


def _check_tensor(folder: Path, name: str, saved: torch.Tensor, own: torch.Tensor) -> None:
    for what, found, expected in (("shape", tuple(saved.shape), tuple(own.shape)), ("dtype", saved.dtype, own.dtype)):
        if found != expected:
            raise EncodingsError(
                str(folder),
                f"{name} has {what} {found} in the checkpoint and {expected} in the model",
                "build the simulation from the same model",
            )


@dataclass(frozen=True)
class _Setting:
    """Settings of one quantizer in a checkpoint."""

    spec: QuantSpec
    encoding: Encoding | None
    enabled: bool
    frozen: bool
    why_float: str
    learned: tuple[tuple[str, tuple[float, ...]], ...] = ()  # beside the encoding, which is then its base

    def put(self, site: Site) -> None:
        """Apply to the quantizer of ``site``; drops its earlier statistics, which belong to other encodings."""
        quantizer = site.quantizer
        quantizer.spec, quantizer.encoding = self.spec, self.encoding
        quantizer.enabled, quantizer.frozen, quantizer.why_float = self.enabled, self.frozen, self.why_float
        quantizer.statistics, quantizer.empty = None, 0
        if self.learned:
            restore_learned(site, dict(self.learned))


def _setting(where: Path, site: Site, saved: Mapping[str, Any]) -> _Setting:
    """The saved settings of ``site``, if they fit its tensor.

    Raises:
        EncodingsError: naming the site and what is wrong with it.
    """
    at = f"{where}, {site.name}"
    learned: tuple[tuple[str, tuple[float, ...]], ...] = ()
    try:
        spec = spec_from_json(saved["spec"], at)
        encoding = None if saved["encoding"] is None else encoding_from_json(saved["encoding"], at)
        switches, why_float = (saved["enabled"], saved["frozen"]), saved["why_float"]
        if "learned" in saved:
            encoding = encoding_from_json(saved["learned"]["base"], at)
            learned = learned_from_json(saved["learned"]["parameters"], encoding)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        problem = f"what is saved of its quantizer cannot be read: {type(error).__name__}: {error}"
        raise EncodingsError(at, problem, _OTHER) from error
    wrong = _switches_problem(switches, why_float) or _fixed_range_problem(spec)
    if wrong is None and site.role in ("weight", "bias", "constant"):
        shape = site._graph.values[site.value].shape
        wrong = _shape_problem(spec, encoding, shape, site.name)
    if wrong:
        raise EncodingsError(at, wrong, _OTHER)
    return _Setting(spec, encoding, *switches, why_float, learned)


def _switches_problem(switches: tuple[Any, Any], why_float: Any) -> str | None:
    plain = all(type(switch) is bool for switch in switches) and isinstance(why_float, str)
    return None if plain else "enabled and frozen are not true or false, or why_float is not text"


def _fixed_range_problem(spec: QuantSpec) -> str | None:
    ends = [end for end in spec.fixed_range or () if end is not None]
    good = all(math.isfinite(end) for end in ends) and ends == sorted(ends)
    return None if good else f"its spec has the fixed range {spec.fixed_range}"


def _shape_problem(spec: QuantSpec, encoding: Encoding | None, shape: tuple[int, ...], site: str) -> str | None:
    try:
        spec.granularity.param_shape(shape, site)
        expected = None if encoding is None else encoding.granularity.param_shape(shape, site)
    except GranularityError as error:
        return error.problem
    if encoding is None or encoding.scale.shape == expected:
        return None
    return (
        f"its encoding has scales of shape {encoding.scale.shape}; {encoding.granularity} of a tensor of shape {shape} has "
        f"{expected}"
    )


def _check_groups(where: Path, sim: SimulatedModule, settings: Mapping[str, _Setting]) -> None:
    """Refuse two settings for one quantizer that several sites share."""
    known: dict[int, str] = {}
    for name, setting in settings.items():
        other = known.setdefault(id(sim.quantizers[name].quantizer), name)
        if settings[other] != setting:
            raise EncodingsError(
                f"{where}, {name}", f"it shares its quantizer with {other}, of which something else is saved", _OTHER
            )
