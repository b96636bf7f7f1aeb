"""``bitwright.analyze``: sensitivity of every site and layer, where error is made, why, and what helps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bitwright.analysis.causes import causes_of
from bitwright.analysis.result import Analysis, LayerRow, SiteRow, decibel
from bitwright.analysis.subject import Array, Subject, open_subject
from bitwright.core.simulation.sites import Site
from bitwright.errors import CalibrationError, ModelError

if TYPE_CHECKING:
    from bitwright.algorithms.rounding.program import SimulatedModel
    from bitwright.algorithms.search.output_error import OutputErrors
    from bitwright.analysis.lockstep import Lockstep

Mode = Literal["auto", "fast", "exact"]
_SAMPLES = 64  # rows that estimates are taken on
_REFERENCE_DB = 60.0  # inputs better than this count as this: the error of exact values has no logarithm
_REPEATED_DB = 60.0  # SQNR of two float runs from which on they count as equal
_ENOUGH_REPEATED_DB = 30.0  # below, quantization error cannot be told from the model's own


def analyze(
    sim: Any,
    data: Iterable[Any],
    *,
    mode: Mode = "auto",
    samples: int = _SAMPLES,
    seed: int = 0,
) -> Analysis:
    """Find which layers and which quantizers cost the accuracy of a simulation, and why.

    Args:
        sim: a calibrated simulation of either front end; as it was afterwards.
        data: batches as the model takes them, without labels.
        samples: how many rows the estimates are taken on; a batch is not divided.
        seed: of what is random.

    Raises:
        CalibrationError: the simulation is not calibrated, or the data held no batch.
        ConfigError: an argument that cannot be understood.
        ModelError: the model fails on the data, returns no tensor of numbers, or is not deterministic.
        BusyError: another thread uses the simulation.
    """
    subject = open_subject(sim)
    batches = _batches(data)
    with subject.exclusive():
        notes = [*_check_outputs(subject, batches[0])]
        model = subject.steps()
        found = _Findings(subject, model, batches, notes)
        found.totals()
        found.fast(samples, seed)
    return found.result("fast")


@dataclass
class _Findings:
    """What is known so far."""

    subject: Subject
    model: SimulatedModel
    batches: Sequence[Any]
    notes: list[str]
    errors: OutputErrors | None = None
    seen: Lockstep | None = None
    output: dict[str, Any] = field(default_factory=lambda: {"sqnr_db": None, "kl": None})
    passes: float = 0.0

    def totals(self) -> None:
        """The outputs of the whole model."""
        noise: dict[int, float] = {}
        signal: dict[int, float] = {}
        for batch in self.batches:
            wanted = [np.array(y) for y in self.subject.outputs(batch, True)]
            for i, (w, f) in enumerate(zip(wanted, self.subject.outputs(batch, False), strict=True)):
                if w.dtype.kind == "f" and w.shape == f.shape:
                    finite = np.isfinite(w)
                    noise[i] = noise.get(i, 0.0) + float(np.square((w - f)[finite].astype(np.float64)).sum())
                    signal[i] = signal.get(i, 0.0) + float(np.square(w[finite].astype(np.float64)).sum())
        ratios = [noise[i] / signal[i] for i in noise if signal[i]]
        self.output["sqnr_db"] = decibel(sum(ratios) / len(ratios)) if ratios else None
        self.passes += 2

    def fast(self, samples: int, seed: int) -> None:
        """Estimate all sites, and look at the errors of every layer."""
        from bitwright.algorithms.search.output_error import output_errors
        from bitwright.analysis.lockstep import observe

        few = _first_rows(self.batches, samples)
        share = sum(map(rows_of, few)) / max(sum(map(rows_of, self.batches)), 1)
        self.errors = output_errors(self.model, few, samples=samples, seed=seed)
        self.seen = observe(self.model, few)
        # one run, one of the weights' effects, one back (as two), one of all quantizers; and what was counted
        self.passes += share * (5 + self.seen.runs / max(self.seen.steps, 1))

    def result(self, mode: str) -> Analysis:
        """The rows."""
        assert self.errors is not None and self.seen is not None
        noise = {**self.errors.activations, **self.errors.weights}
        values = self.seen.sites
        sites = {name: _site_row(site, noise, values) for name, site in self.subject.sites.items()}
        layers = [row for row in self._layers(sites)]
        for layer in layers:
            layer.causes = causes_of(layer, self.subject, values, sites)
        ranked = sorted(sites.values(), key=lambda row: -row.cost)
        model = {"name": self.subject.name, "front_end": self.subject.front_end, **self.subject.size()}
        data = {"samples": sum(map(rows_of, self.batches)), "passes": round(self.passes, 3)}
        by_cost = sorted(layers, key=lambda row: -(row.noise or 0.0))
        return Analysis(
            model, data, mode, tuple(ranked), tuple(by_cost), self.output, notes=tuple(self.notes)
        )

    def _layers(self, sites: Mapping[str, SiteRow]) -> Iterable[LayerRow]:
        from bitwright.analysis.lockstep import sites_of

        assert self.seen is not None
        graph, held = self.model.graph(), sites_of(self.subject.sites)
        for op in graph.ops:
            errors = self.seen.layers.get(op.name)
            names = tuple(held.get(op.name, ()))
            if errors is None and not names:
                continue
            inputs = [graph.producer(v) for v in op.inputs if v is not None]
            row = LayerRow(
                op.name, op.type, names, tuple(dict.fromkeys(p.name for p in inputs if p is not None))
            )
            known = [sites[name].cost for name in names if sites[name].noise is not None]
            row.noise = sum(known) if known else None
            if errors is not None:
                row.made_db, row.made_quantized_db = (
                    decibel(errors.made.value),
                    decibel(errors.made_quantized.value),
                )
                row.arrived_db, row.after_db = decibel(errors.arrived.value), decibel(errors.after.value)
                row.jump = _jump(row)
                row.made_lsb = self._in_steps(names, errors.made.noise, errors.elements)
            yield row

    def _in_steps(self, names: Sequence[str], noise: float, elements: int) -> float | None:
        """Root mean square of an error in steps of the output's grid."""
        for name in names:
            site = self.subject.sites[name]
            if site.role == "output" and site.enabled and site.encoding is not None and elements:
                return float((noise / elements) ** 0.5 / site.encoding.scale.mean())
        return None


def _jump(row: LayerRow) -> float | None:
    if row.after_db is None:
        return None
    before = _REFERENCE_DB if row.arrived_db is None else min(row.arrived_db, _REFERENCE_DB)
    return max(0.0, before - row.after_db)


def _site_row(site: Site, noise: Mapping[str, float], values: Mapping[str, Any]) -> SiteRow:
    fmt = site.quantizer.spec.format
    row = SiteRow(
        site.name, site.role, site.op, site._graph.op(site.op).type, fmt.name, fmt.bits, site.enabled
    )
    row.why_float = "" if site.enabled else site.quantizer.why_float or site.quantizer.why_spec or "disabled"
    row.noise = noise.get(site.name) if site.enabled else None
    if site.name in values:
        for key, value in values[site.name].row().items():
            setattr(row, key, value)
    return row


# ---- data


def _batches(data: Iterable[Any]) -> list[Any]:
    if isinstance(data, Mapping) or hasattr(data, "shape") or not isinstance(data, Iterable):
        raise CalibrationError(
            "analyze",
            f"data is a {type(data).__name__}, not a list of batches",
            "write bitwright.analyze(sim, [batch]) for a single batch",
        )
    batches = list(data)
    if not batches:
        raise CalibrationError(
            "analyze",
            "the data held no batch",
            "pass a non-empty list or DataLoader (a generator can be used only once); a few hundred samples are enough",
        )
    return batches


def rows_of(batch: Any) -> int:
    """Samples of a batch: the length of its first array with an axis."""
    left = [batch]
    while left:
        item = left.pop(0)
        shape = getattr(item, "shape", None)
        if shape is not None:
            if len(shape):
                return int(shape[0])
        elif isinstance(item, Mapping):
            left.extend(item.values())
        elif isinstance(item, (tuple, list)):
            left.extend(item)
    return 1


def _first_rows(batches: Sequence[Any], samples: int) -> list[Any]:
    found: list[Any] = []
    count = 0
    for batch in batches:
        found.append(batch)
        count += rows_of(batch)
        if count >= samples:
            break
    return found


def _check_outputs(subject: Subject, batch: Any) -> list[str]:
    """Refuse models whose outputs cannot be compared; a note where float runs differ a little."""
    from bitwright.core.simulation.protocols import sqnr

    once = [np.array(y) for y in subject.outputs(batch, True)]
    if not any(y.dtype.kind == "f" and y.size for y in once):
        kinds = ", ".join(sorted({y.dtype.name for y in once})) or "none"
        raise ModelError(
            subject.name,
            f"it returns no tensor of floating-point numbers (outputs: {kinds}), so there is no error to measure",
            "let forward return the tensor before the last decision (scores instead of argmax)",
        )
    again = subject.outputs(batch, True)
    pairs = [_finite(a, b) for a, b in zip(once, again, strict=True) if a.dtype.kind == "f"]
    agreement = min(sqnr(*pair) for pair in pairs)
    if agreement < _ENOUGH_REPEATED_DB:
        raise ModelError(
            subject.name,
            f"it is not deterministic: two float runs of the same batch differ ({agreement:.0f} dB), which is more than "
            "quantization changes",
            "switch off what is random in forward (dropout called with training=True, noise), or draw it from a generator "
            "that is seeded in forward",
        )
    if agreement < _REPEATED_DB:
        return [f"two float runs of the same batch differ: errors beyond {agreement:.0f} dB are not its own"]
    return []


def _finite(one: Array, other: Array) -> tuple[Array, Array]:
    if one.shape != other.shape:
        return np.ones(1), np.zeros(1)
    both = np.isfinite(one) & np.isfinite(other)
    return one[both], other[both]
