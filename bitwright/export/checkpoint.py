"""Checkpoints of simulations: tensors and statistics in safetensors, quantizers in JSON, a manifest with hashes; no pickle.

The files replace those of an earlier checkpoint at once (:func:`bitwright.export.files.atomic.atomic_files`), and a
checkpoint is read only if all of them are those that its manifest was written with.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from bitwright.core.health.diagnosis import Repair
from bitwright.core.numerics import statistics
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.serialize import encoding_from_json, encoding_to_json, spec_from_json, spec_to_json
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.simulation import Simulation
from bitwright.core.simulation.sites import Site
from bitwright.errors import EncodingsError, ExportError, GranularityError
from bitwright.export.encodings.write import names_error
from bitwright.export.files.atomic import atomic_files, settle
from bitwright.export.files.manifest import FileEntry, read_manifest, write_manifest

_TENSORS, _QUANTIZERS, _MANIFEST = "model.safetensors", "quantizers.json", "checkpoint.json"
_STATISTICS = "statistics.safetensors"  # not in checkpoints of earlier versions
_VERSION = 2
_REMEDY = "pass a folder that save_checkpoint wrote, with all of its files"
OTHER = "load another checkpoint"


def write_checkpoint(folder: str | Path, sim: Simulation, tensors: bytes, state: Mapping[str, Any]) -> Path:
    """Write the files of a checkpoint into ``folder``, created if missing.

    Args:
        folder: where to.
        sim: whose statistics are written.
        tensors: parameters and buffers, as safetensors.
        state: that :func:`state_of` gave.

    Raises:
        ExportError: the folder cannot be written; an earlier checkpoint in it is as it was.
    """
    from safetensors.numpy import save

    with atomic_files(folder, name=_MANIFEST, create=True) as staging:
        (staging / _TENSORS).write_bytes(tensors)
        (staging / _QUANTIZERS).write_text(json.dumps(state, indent=1), encoding="utf-8")
        (staging / _STATISTICS).write_bytes(save(_seen(sim)))
        write_manifest(staging / _MANIFEST, files=[_TENSORS, _QUANTIZERS, _STATISTICS])
    return Path(folder)


def _seen(sim: Simulation) -> dict[str, NDArray[Any]]:
    """Calibration statistics of every quantizer by ``kind/field/site``, with the name of its first site."""
    return {
        f"{statistics.kind_of(seen)}/{field}/{quantizer.name}": np.array(array)
        for quantizer in sim.quantizers.unique()
        if (seen := quantizer.statistics) is not None
        for field, array in statistics.to_arrays(seen).items()
    }


def state_of(sim: Simulation, more: Callable[[Site], Mapping[str, Any]], **of_model: Any) -> dict[str, Any]:
    """The state of a simulation without the model's tensors, as plain JSON.

    Args:
        sim: a simulation that is not being calibrated.
        more: what else is kept of the quantizer of a site.
        of_model: what else the front end keeps.
    """
    quantizers = {
        site.name: {
            "spec": spec_to_json(site.quantizer.spec),
            "encoding": None if site.encoding is None else encoding_to_json(site.encoding),
            "enabled": site.enabled,
            "frozen": site.frozen,
            "why_float": site.quantizer.why_float,
            **more(site),
        }
        for site in sim.quantizers.values()
    }
    return {
        "version": _VERSION,
        "stage": "simulate" if sim.calibrated else "uncalibrated",
        "quantizers": quantizers,
        "repairs": [asdict(repair) for repair in sim.repairs],
        **of_model,
    }


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a checkpoint, not yet compared with a simulation."""

    tensors: dict[str, Any]
    quantizers: Mapping[str, Mapping[str, Any]]
    repairs: tuple[Repair, ...]
    lengths: Mapping[str, int]
    calibrated: bool
    statistics: Mapping[str, statistics.Statistics]


def put_statistics(sim: Simulation, loaded: Checkpoint) -> None:
    """Give the quantizers what calibration saw."""
    for name, seen in loaded.statistics.items():
        sim.quantizers[name].quantizer.statistics = seen
    for site in sim.quantizers.values():
        site.channels.seen = None


def tensors_of(folder: Path) -> str:
    """Path of the file of tensors, for messages."""
    return str(folder / _TENSORS)


def check_names(where: Path | str, expected: Iterable[str], found: Iterable[str], remedy: str) -> None:
    """Refuse a part of a checkpoint whose names are not those of the model or simulation."""
    mismatch = names_error(str(where), expected, found)
    if mismatch:
        raise EncodingsError(mismatch.site, mismatch.problem, remedy)


def settings_in(sim: Simulation, folder: Path, loaded: Checkpoint, remedy: str) -> dict[str, Setting]:
    """Settings of every quantizer in a checkpoint, checked against the simulation."""
    where = folder / _QUANTIZERS
    check_names(where, sim.quantizers, loaded.quantizers, remedy)
    settings = {name: _setting(where, sim.quantizers[name], saved) for name, saved in loaded.quantizers.items()}
    _check_groups(where, sim, settings)
    return settings


def read_checkpoint(folder: Path, load: Callable[[bytes], dict[str, Any]]) -> Checkpoint:
    """The files of a folder; ``load`` reads its tensors.

    Raises:
        EncodingsError: no checkpoint there, or a part of it is damaged, missing or of another checkpoint.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load as load_arrays

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
        return parsed(load(tensors), json.loads(state), {} if seen is None else load_arrays(seen))
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


def parsed(tensors: dict[str, Any], state: Any, seen: Mapping[str, NDArray[Any]] | None = None) -> Checkpoint:
    """The parts of a checkpoint.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: a part is not what :func:`state_of` or :func:`_seen` gives.
    """
    if state["version"] != _VERSION:
        raise ValueError(f"its version is {state['version']!r}, this is version {_VERSION}")
    if state["stage"] not in ("simulate", "uncalibrated"):
        raise ValueError(f"there is no stage {state['stage']!r}")
    lengths = {str(op): int(length) for op, length in state.get("lengths", {}).items()}
    repairs = tuple(Repair(**repair) for repair in state["repairs"])
    quantizers = dict(state["quantizers"])
    found = _statistics(seen or {}, quantizers)
    return Checkpoint(tensors, quantizers, repairs, lengths, state["stage"] == "simulate", found)


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


def check_tensor(folder: Path, name: str, saved: Any, own: Any) -> None:
    """Refuse a tensor of another shape or type than the model's."""
    for what, found, expected in (("shape", tuple(saved.shape), tuple(own.shape)), ("dtype", saved.dtype, own.dtype)):
        if found != expected:
            raise EncodingsError(
                str(folder),
                f"{name} has {what} {found} in the checkpoint and {expected} in the model",
                "build the simulation from the same model",
            )


@dataclass(frozen=True)
class Setting:
    """Settings of one quantizer in a checkpoint."""

    spec: QuantSpec
    encoding: Encoding | None
    enabled: bool
    frozen: bool
    why_float: str

    def put(self, site: Site) -> None:
        """Apply to the quantizer of ``site``; drops its earlier statistics, which belong to other encodings."""
        quantizer = site.quantizer
        quantizer.spec, quantizer.encoding = self.spec, self.encoding
        quantizer.enabled, quantizer.frozen, quantizer.why_float = self.enabled, self.frozen, self.why_float
        quantizer.statistics, quantizer.empty = None, 0


def _setting(where: Path, site: Site, saved: Mapping[str, Any]) -> Setting:
    """The saved settings of ``site``, if they fit its tensor.

    Raises:
        EncodingsError: naming the site and what is wrong with it.
    """
    at = f"{where}, {site.name}"
    try:
        spec = spec_from_json(saved["spec"], at)
        encoding = None if saved["encoding"] is None else encoding_from_json(saved["encoding"], at)
        switches, why_float = (saved["enabled"], saved["frozen"]), saved["why_float"]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        problem = f"what is saved of its quantizer cannot be read: {type(error).__name__}: {error}"
        raise EncodingsError(at, problem, OTHER) from error
    wrong = _switches_problem(switches, why_float) or _fixed_range_problem(spec)
    if wrong is None and site.role in ("weight", "bias", "constant"):
        shape = site._graph.values[site.value].shape
        wrong = _shape_problem(spec, encoding, shape, site.name)
    if wrong:
        raise EncodingsError(at, wrong, OTHER)
    return Setting(spec, encoding, *switches, why_float)


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


def _check_groups(where: Path, sim: Simulation, settings: Mapping[str, Setting]) -> None:
    """Refuse two settings for one quantizer that several sites share."""
    known: dict[int, str] = {}
    for name, setting in settings.items():
        other = known.setdefault(id(sim.quantizers[name].quantizer), name)
        if settings[other] != setting:
            raise EncodingsError(
                f"{where}, {name}", f"it shares its quantizer with {other}, of which something else is saved", OTHER
            )
