"""Encodings files of a simulation: written by site name, read by site name or by names of an exported model.

``<prefix>_sites.json`` of an export keeps everything about the sites, and says which tensors of the exported model are theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitwright.core.files import read_document
from bitwright.core.graph.operators import block_axes, weight_axes
from bitwright.core.graph.recurrence import CELLS
from bitwright.core.numerics.affine import recognized
from bitwright.core.numerics.encoding import Encoding
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerTensor
from bitwright.core.numerics.serialize import encoding_from_json, spec_from_json
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.simulation.simulation import Simulation, all_or_nothing
from bitwright.core.simulation.sites import Site
from bitwright.errors import EncodingsError, checks_methods
from bitwright.export.encodings.read import read_encodings
from bitwright.export.encodings.records import GATED, NamedEncoding, from_onnx_order, gate_order
from bitwright.export.encodings.write import names_error, write_encodings
from bitwright.export.files.atomic import AnyPath, read_error, settle

VERSION = 1
_MAX_BYTES = 2 << 30  # scales of every block of a large model are in it
_MEND = "export the model again"


@dataclass(frozen=True)
class SavedSite:
    """One site as it was exported.

    Attributes:
        role: ``weight``, ``output``, ...
        enabled: whether its quantizer was on.
        spec: what was asked for.
        encoding: what calibration found, if anything.
        tensors: its names in the exported float model.
    """

    role: str
    enabled: bool
    spec: QuantSpec
    encoding: Encoding | None
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class SavedSites:
    """All sites by name, values in float with the reason, and tensors that carry elements of a site."""

    sites: dict[str, SavedSite]
    floats: dict[str, str]
    carried: tuple[str, ...] = ()


def read_sites(path: AnyPath) -> SavedSites:
    """Read and check a ``*_sites.json``.

    Raises:
        ExportError: the file does not exist or cannot be read.
        EncodingsError: it is malformed; names the file, and the site if it is one.
    """
    document = read_document(
        path, EncodingsError, remedy=_MEND, max_bytes=_MAX_BYTES, kind=".json", unreadable=read_error
    )
    version = _need(document, f"{path}", dict).get("version")
    if version != VERSION:
        raise EncodingsError(f"{path}", f"its version is {version!r:.40}, not {VERSION}", _MEND)
    sites = {
        name: _site(entry, f"{path}: {name!r:.200}")
        for name, entry in _need(document.get("sites"), f"{path}, key 'sites'", dict).items()
    }
    floats = _need(document.get("float"), f"{path}, key 'float'", dict)
    for name, reason in floats.items():
        _need(reason, f"{path}, key 'float': {name!r:.200}", str)
    carried = _need(document.get("carried", []), f"{path}, key 'carried'", list)
    for tensor in carried:
        _need(tensor, f"{path}, key 'carried'", str)
    return SavedSites(sites, floats, tuple(carried))


def _site(entry: Any, at: str) -> SavedSite:
    _need(entry, at, dict)
    encoding = entry.get("encoding")
    tensors = _need(entry.get("tensors"), f"{at}, key 'tensors'", list)
    for tensor in tensors:
        _need(tensor, f"{at}, key 'tensors'", str)
    return SavedSite(
        role=_need(entry.get("role"), f"{at}, key 'role'", str),
        enabled=_need(entry.get("enabled"), f"{at}, key 'enabled'", bool),
        spec=spec_from_json(entry.get("spec"), f"{at}, key 'spec'"),
        encoding=None if encoding is None else encoding_from_json(encoding, f"{at}, key 'encoding'"),
        tensors=tuple(tensors),
    )


def _need(value: Any, at: str, kind: type) -> Any:
    if not isinstance(value, kind):
        what = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}[kind]
        raise EncodingsError(at, f"it is {value!r:.40}, not {what}", _MEND)
    return value


logger = logging.getLogger("bitwright")


#: range methods that AIMET has, and its names for them
_SCHEMES = {"minmax": "min_max", "sqnr": "post_training_tf_enhanced", "percentile": "post_training_percentile"}


def quantizer_args(sim: Simulation) -> dict[str, Any]:
    """The global settings under the names encodings files use."""
    weight, activation = sim.rules.weight, sim.rules.activation
    spec = weight or activation or QuantSpec()
    return {
        "quant_scheme": _SCHEMES.get(spec.method.name, spec.method.name),
        "param_bitwidth": 32 if weight is None else weight.format.bits,
        "activation_bitwidth": 32 if activation is None else activation.format.bits,
        "dtype": "int" if isinstance(spec.format, IntFormat) else "float",
        "is_symmetric": weight is None or not weight.has_zero_point,
        "per_channel_quantization": weight is not None and type(weight.granularity).__name__ == "PerChannel",
    }


def site_records(sim: Simulation) -> list[NamedEncoding]:
    """One record per calibrated, enabled site, without derived biases."""
    return [
        NamedEncoding(
            site.name, "param" if site.role in ("weight", "bias", "constant") else "activation", site.encoding
        )
        for site in sim.quantizers.values()
        if site.enabled and site.encoding is not None and not site.quantizer.derived
    ]


@checks_methods
class SimulationFiles(Simulation):
    """A simulation with its encodings files."""

    def save_encodings(self, path: str | Path, version: str = "2.0.0") -> Path:
        """Write every encoding under its site's name; see :mod:`bitwright.export.encodings.write`.

        What the version cannot express is logged.
        """
        disabled = [site.name for site in self.quantizers.values() if not site.enabled]
        summary = version != "2.0.0"  # which has no place for one; every record of it says these things itself
        written = write_encodings(
            path,
            site_records(self),
            version,
            quantizer_args=quantizer_args(self) if summary else {},
            excluded_layers=disabled if summary else (),
        )
        for lost in written.not_expressed:
            logger.warning("%s: %s", lost.name, lost.reason)
        return Path(written.path)

    def load_encodings(
        self, path: str | Path | dict[str, Any], strict: bool = True, *, partial: bool = False
    ) -> tuple[str, ...]:
        """Load the encodings of a file; sites without one are disabled, unmatched names are errors if ``strict``.

        With ``partial``, sites without one stay as they are.

        A record belongs to the site of its name, or, in a file written for an exported model, to the sites that read the
        tensor of its name (``x`` for the input ``x``). The ``<prefix>_sites.json`` that an export writes beside
        ``<prefix>.encodings`` is read too: it knows the tensors whose names only the exported model has.

        Raises (and leaves the simulation as it was):
            EncodingsError: the file is malformed; or, when ``strict``, it names what the model does not have, or has nothing
                for a site of it (which are missing, which are extra).
            BusyError: another thread uses the simulation.

        Returns:
            The sites that got an encoding.
        """
        with self._changing("load_encodings"):
            found = _matched(self, path, strict, params_only=False, partial=partial)
            with all_or_nothing(self):
                for site in self.quantizers.values():
                    if site.name in found:
                        _take(site, found[site.name])
                for site in () if partial else self.quantizers.values():
                    if not site.quantizer.derived and site.encoding is None:
                        site.enabled = False
            self._set_calibrated()
        return tuple(name for name in self.quantizers if name in found)

    def set_and_freeze_param_encodings(self, path: str | Path | dict[str, Any]) -> None:
        """Load the parameter encodings of a file and keep them through calibration.

        Raises (and leaves the simulation as it was):
            EncodingsError: the file is malformed or names parameters the model does not have.
            BusyError: another thread uses the simulation.
        """
        with self._changing("set_and_freeze_param_encodings"):
            found = _matched(self, path, strict=False, params_only=True)
            with all_or_nothing(self):
                for name, record in found.items():
                    _take(self.quantizers[name], record)
                    self.quantizers[name].frozen = True


def _matched(
    sim: Simulation, source: str | Path | dict[str, Any], strict: bool, params_only: bool, partial: bool = False
) -> dict[str, NamedEncoding]:
    sites = [s for s in sim.quantizers.values() if not s.quantizer.derived]
    params = {s.name for s in sites if s.role in ("weight", "bias", "constant")}
    exported, carried = exported_names(source)
    file = read_encodings(source, params=params.union(*(exported.get(name, ()) for name in params)))
    records = _records_for_sites(sim, file.records, exported, params_only)
    by_tensor = _by_tensor(sites, exported, records)
    by_name, unused = _by_name(records.values(), sim, sites, by_tensor)
    found = {**by_tensor, **by_name}
    known = set(carried).union(*(exported.get(site.name, ()) for site in sites))
    extra = [name for name in unused if name not in known]
    have = expected = _served(sim, sites, found)
    if strict and not partial:
        # calibration leaves a mask in float, and the file has nothing for it; for a site that is off it may have something
        asked = {s.name for s in sites if s.enabled and not s.quantizer.masking}.union(have)
        expected = [s.name for s in sites if s.name in asked and (not params_only or s.name in params)]
    _tell_names(names_error(_where(source), expected, [*have, *extra]), strict, params_only, extra)
    return found


def _served(sim: Simulation, sites: Iterable[Site], found: Iterable[str]) -> list[str]:
    """Names of the sites with a record, their own or of their sharing group."""
    served = {id(sim.quantizers[name].quantizer) for name in found}
    return [site.name for site in sites if id(site.quantizer) in served]


def _where(source: str | Path | dict[str, Any]) -> str:
    return str(source) if isinstance(source, (str, Path)) else "encodings"


def _records_for_sites(
    sim: Simulation, records: Iterable[NamedEncoding], exported: Mapping[str, Sequence[str]], params_only: bool
) -> dict[str, NamedEncoding]:
    """Records by name, without those of biases whose grids follow from others."""
    derived = [site for site in sim.quantizers.values() if site.quantizer.derived]
    names = {name for site in derived for name in (site.name, site.value)}
    names |= {tensor for name in names for tensor in exported.get(name, ())}
    kept = {record.name: record for record in records if record.name not in names}
    if params_only:
        return {name: record for name, record in kept.items() if record.kind != "activation"}
    return kept


def _tell_names(problem: EncodingsError | None, strict: bool, params_only: bool, extra: Sequence[str]) -> None:
    if problem is not None and (strict or (extra and params_only)):
        raise problem
    if problem is not None and extra:
        logger.warning("%s", problem)


def _by_name(
    records: Iterable[NamedEncoding], sim: Simulation, sites: Iterable[Site], by_tensor: Container[str]
) -> tuple[dict[str, NamedEncoding], list[str]]:
    """Site -> the record by its name or its tensor's, where it has none ``by_tensor``; and names without a site."""
    by_value, own = _sites_by_value(sim, sites), set(sim.quantizers)  # of which a pattern such as "*" is none
    found: dict[str, NamedEncoding] = {}
    unused = []
    for record in records:
        names = [name for name in by_value.get(record.name, []) if name not in by_tensor]
        if record.name in own:
            names = [record.name]
        found.update(dict.fromkeys(names, record))
        if not names:
            unused.append(record.name)
    return found, unused


def _sites_by_value(sim: Simulation, sites: Iterable[Site]) -> dict[str, list[str]]:
    """Tensor -> the sites that quantize it, or an earlier one on whose grid it lies."""
    found: dict[str, list[str]] = {}
    for site in sites:
        found.setdefault(site.value, []).append(site.name)
    for value, group in sim.plan.shared.items():  # tensors that lie on the grid of a site
        found.setdefault(value, [group] if group in sim.quantizers else [])
    for output, value in sim.output_values.items():  # an exported model calls it by the name of its output
        found.setdefault(output, found.get(value, []))
    return found


def exported_names(source: str | Path | dict[str, Any]) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Site -> names of its tensors in the exported model, from ``<prefix>_sites.json``; empty where there is none.

    Also the tensors that carry elements of those, whose entries say nothing new.

    A tensor that several sites mark has the record of the first in the encodings file; it is not a name of a site whose
    encoding was another.
    """
    if isinstance(source, dict) or Path(source).suffix != ".encodings":
        return {}, ()
    settle(Path(source).parent)  # the two files are read as a pair
    path = Path(source).with_name(f"{Path(source).stem}_sites.json")
    if not path.is_file():
        return {}, ()
    first: dict[str, Any] = {}
    saved = read_sites(path)
    return {
        name: [tensor for tensor in site.tensors if first.setdefault(tensor, site.encoding) == site.encoding]
        for name, site in saved.sites.items()
    }, saved.carried


def _by_tensor(
    sites: Sequence[Site], exported: Mapping[str, Sequence[str]], records: Mapping[str, NamedEncoding]
) -> dict[str, NamedEncoding]:
    """Site -> the record of its first tensor with one, in the form of the simulated model."""
    found = {}
    for site in sites:
        for tensor in exported.get(site.name, ()):
            if tensor in records:
                found[site.name] = _from_exported(site, records[tensor])
                break
    return found


def _from_exported(site: Site, record: NamedEncoding) -> NamedEncoding:
    """``record``, with a recurrent weight's scales in the order of gates and with the axes of the simulated model.

    Raises:
        EncodingsError: the scales do not fit the weight, or lie along the axis of directions.
    """
    op, shape = site._graph.op(site.op), site._graph.values[site.value].shape
    if op.type not in CELLS or site.role != "weight" or len(shape) != 2:
        return record
    port, there = site.port, (1, *shape)
    order = gate_order(CELLS[op.type].gates, op.attrs["gates"]) if port in GATED else ()
    whole = record.resolve(there, *weight_axes(op.type, op.attrs, port, len(there)))
    granularity = whole.encoding.granularity
    if not isinstance(granularity, PerTensor) and granularity.axis == 0:
        raise EncodingsError(
            record.name,
            "its scales lie along axis 0, the one direction of a recurrent weight",
            "write one scale for the whole weight without an axis",
        )
    return replace(whole, encoding=from_onnx_order(whole.encoding, order))


def _take(site: Site, record: NamedEncoding) -> None:
    op, shape = site._graph.op(site.op), site._graph.values[site.value].shape
    channel, block = (
        (None, None) if site.role in ("input", "output") else block_axes(op.type, op.attrs, site.port, shape)
    )
    encoding = record.resolve(shape, channel, block).encoding if record.is_open else record.encoding
    spec = site.spec
    site.encoding = encoding if spec is None else recognized(encoding, spec.scale_format)
    site.enabled = True
