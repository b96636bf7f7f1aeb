"""Encodings files of a simulation: written under site names, read under site names or the names of an exported model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from bitwright.core.calibration import CalibrationLog
from bitwright.core.formats import IntFormat
from bitwright.core.ops import weight_axes
from bitwright.core.placement import Plan
from bitwright.core.repair import Repair
from bitwright.core.rules import Rules
from bitwright.core.sites import Site, SiteMap
from bitwright.core.spec import QuantSpec
from bitwright.export.encodings import NamedEncoding, names_error, read_encodings, write_encodings

logger = logging.getLogger("bitwright")


class Simulated(Protocol):
    """What a simulation of either front end offers to whoever reads or writes its encodings."""

    @property
    def quantizers(self) -> SiteMap:
        """Every site by name."""

    @property
    def rules(self) -> Rules:
        """What was asked for."""

    @property
    def plan(self) -> Plan:
        """Where the rules put quantizers, and why not elsewhere."""

    @property
    def repairs(self) -> Sequence[Repair]:
        """What keeps the model's operators from handing on NaN and Inf."""

    @property
    def calibration_log(self) -> CalibrationLog | None:
        """What became of the batches of the last calibration."""

    @property
    def output_values(self) -> Mapping[str, str]:
        """Output of an exported model -> the graph's value behind it, where the two have different names."""


def quantizer_args(sim: Simulated) -> dict[str, Any]:
    """The global settings under the names encodings files use."""
    weight, activation = sim.rules.weight, sim.rules.activation
    spec = weight or activation or QuantSpec()
    return {
        "quant_scheme": spec.method.name,
        "param_bitwidth": 32 if weight is None else weight.format.bits,
        "activation_bitwidth": 32 if activation is None else activation.format.bits,
        "dtype": "int" if isinstance(spec.format, IntFormat) else "float",
        "is_symmetric": weight is None or weight.symmetry != "asymmetric",
        "per_channel_quantization": weight is not None and type(weight.granularity).__name__ == "PerChannel",
    }


def site_records(sim: Simulated) -> list[NamedEncoding]:
    """One record per calibrated, enabled site; derived biases are left to whoever needs them."""
    return [
        NamedEncoding(
            site.name, "param" if site.role in ("weight", "bias", "constant") else "activation", site.encoding
        )
        for site in sim.quantizers.values()
        if site.enabled and site.encoding is not None and not site.quantizer.derived
    ]


def save_encodings(sim: Simulated, path: str | Path, version: str = "2.0.0") -> Path:
    """Write the encodings of ``sim`` under site names; what the version cannot express is logged."""
    disabled = [site.name for site in sim.quantizers.values() if not site.enabled]
    summary = version != "2.0.0"  # which has no place for one; every record of it says these things itself
    written = write_encodings(
        path,
        site_records(sim),
        version,
        quantizer_args=quantizer_args(sim) if summary else {},
        excluded_layers=disabled if summary else (),
    )
    for lost in written.not_expressed:
        logger.warning("%s: %s", lost.name, lost.reason)
    return Path(written.path)


def load_encodings(sim: Simulated, source: str | Path | dict[str, Any], strict: bool = True) -> None:
    """Give every site of ``sim`` the encoding the file has for it; sites without one are switched off.

    A record belongs to the site of its name, or, in a file written for an exported model, to the sites that read the
    tensor of its name (``x`` for the input ``x``).

    Raises:
        EncodingsError: the file is malformed; or, when ``strict``, it names what the model does not have, or has nothing
            for a site of it (which are missing, which are extra).
    """
    found = _matched(sim, source, strict, params_only=False)
    for site in sim.quantizers.values():
        if site.name in found:
            _take(site, found[site.name])
    for site in sim.quantizers.values():
        if not site.quantizer.derived and site.encoding is None:
            site.enabled = False


def set_and_freeze_param_encodings(sim: Simulated, source: str | Path | dict[str, Any]) -> None:
    """Take the parameter encodings of the file and protect them from calibration.

    Raises:
        EncodingsError: the file is malformed or names parameters the model does not have.
    """
    for name, record in _matched(sim, source, strict=False, params_only=True).items():
        _take(sim.quantizers[name], record)
        sim.quantizers[name].frozen = True


def _matched(
    sim: Simulated, source: str | Path | dict[str, Any], strict: bool, params_only: bool
) -> dict[str, NamedEncoding]:
    sites = [s for s in sim.quantizers.values() if not s.quantizer.derived]
    params = {s.name for s in sites if s.role in ("weight", "bias", "constant")}
    file = read_encodings(source, params=params)
    by_value: dict[str, list[str]] = {}
    for site in sites:
        by_value.setdefault(site._plan.value, []).append(site.name)
    for value, group in sim.plan.shared.items():  # tensors that lie on the grid of a site
        by_value.setdefault(value, [group] if group in sim.quantizers else [])
    for output, value in sim.output_values.items():  # an exported model calls it by the name of its output
        by_value.setdefault(output, by_value.get(value, []))
    derived = {s.name for s in sim.quantizers.values() if s.quantizer.derived}
    derived |= {s._plan.value for s in sim.quantizers.values() if s.quantizer.derived}
    found: dict[str, NamedEncoding] = {}
    extra: list[str] = []
    for record in file.records:
        if record.name in derived or (params_only and record.kind == "activation"):
            continue
        names = [record.name] if record.name in sim.quantizers else by_value.get(record.name, [])
        if not names:
            extra.append(record.name)
        for name in names:
            found[name] = record
    # a site is served when any site of its sharing group is
    served = {id(sim.quantizers[name].quantizer) for name in found}
    expected = [s.name for s in sites if s.enabled and (not params_only or s.name in params)]
    have = [s.name for s in sites if id(s.quantizer) in served]
    where = str(source) if isinstance(source, (str, Path)) else "encodings"
    problem = names_error(where, expected if strict else have, [*have, *extra])
    if problem is not None and (strict or extra):
        if strict or params_only:
            raise problem
        logger.warning("%s", problem)
    return found


def _take(site: Site, record: NamedEncoding) -> None:
    op, shape = site._graph.op(site.op), site._graph.values[site._plan.value].shape
    channel, block = (
        (None, None)
        if site.role in ("input", "output")
        else weight_axes(op.type, op.attrs, site._plan.port, len(shape))
    )
    encoding = record.resolve(shape, channel, block).encoding if record.is_open else record.encoding
    site.quantizer.spec = _spec_of(site.quantizer.spec, encoding)
    site.encoding = encoding
    site.enabled = True


def _spec_of(spec: QuantSpec, encoding: Any) -> QuantSpec:
    """``spec`` with the format and granularity of an encoding that came from elsewhere."""
    if (
        spec.format.bits == encoding.format.bits
        and type(spec.format) is type(encoding.format)
        and spec.granularity == encoding.granularity
    ):
        return spec
    return replace(spec, format=encoding.format, granularity=encoding.granularity)
