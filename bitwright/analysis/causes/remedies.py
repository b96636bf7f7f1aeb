"""Trying what the causes suggest: each remedy is applied to the simulation, measured, and kept only while it is the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bitwright.analysis.causes.adjusted import Adjustment
from bitwright.analysis.metrics.judged import Judged
from bitwright.analysis.result import Analysis, LayerRow, RemedyRow
from bitwright.analysis.subject.data import Clock
from bitwright.analysis.subject.subject import Subject
from bitwright.analysis.values.site_values import calibrated_bounds
from bitwright.core.numerics import affine
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.granularity import PerChannel, PerTensor
from bitwright.core.numerics.ranges import find_range_method
from bitwright.core.simulation.sites import Site
from bitwright.errors import BitwrightError, ConfigError

if TYPE_CHECKING:
    from bitwright.algorithms.rounding.program import SimulatedModel
    from bitwright.analysis.values.site_values import SiteValues

_WORTH = 0.1  # dB that a remedy must bring to be kept; less is luck
_NAMES = ("per_channel", "8_bits", "16_bits", "minmax", "mse", "seq_mse", "gptq")


@dataclass(frozen=True)
class Trials:
    """What remedies are tried with.

    Attributes:
        subject, model: the simulation, and its steps; ``None`` where it has none.
        batches, judged: data, and what is measured on it.
        values: what was seen at each site.
    """

    subject: Subject
    model: SimulatedModel | None
    batches: Sequence[Any]
    judged: Callable[[], Judged]
    values: Mapping[str, SiteValues]

    def __call__(
        self, analysis: Analysis, n: int, *, keep: bool = False, deadline: float | None = None, float_model: bool = True
    ) -> tuple[RemedyRow, ...]:
        """See :func:`try_remedies`."""
        return try_remedies(self, analysis, n, keep=keep, deadline=deadline, float_model=float_model)

    def measure(self, judged: Judged | None = None) -> tuple[float, float | None]:
        """SQNR of the outputs in dB, and the metric, of the simulation as it stands; or of another that is judged."""
        judged = judged or self.judged()
        for batch, labels in zip(self.batches, judged.labels, strict=True):
            judged.batch(batch, labels)
        metric = judged.whole.metric
        if judged.function is not None:
            metric = float(judged.called("quantized").mean())
        sqnr = judged.output["sqnr_db"]
        assert sqnr is not None
        return sqnr, metric


def try_remedies(
    trials: Trials,
    analysis: Analysis,
    n: int = 3,
    *,
    keep: bool = False,
    deadline: float | None = None,
    float_model: bool = True,
) -> tuple[RemedyRow, ...]:
    """Measure the remedies suggested for the worst layers, one after the other.

    A remedy that brings at least 0.1 dB stays while the next layers are tried; of several for one layer the best does.

    Args:
        trials: the simulation and its data.
        analysis: whose causes are gone through.
        n: how many of its worst layers.
        keep: leave the simulation with the remedies that were kept; otherwise it is as it was.
        deadline: seconds after which no other remedy is begun; the one that runs then is finished.
        float_model: whether to try those of the float model as well, which take a simulation each.

    Returns:
        One row per remedy tried. Those of the float model (equalize, smooth) come last, each measured on a simulation of its
        own: see :mod:`bitwright.analysis.causes.adjusted`. They are never kept, because they come before the simulation is made;
        they are begun first. What was suggested and not tried is in the notes of ``analysis``, with the reason.

    Raises:
        ConfigError: ``n`` or ``deadline`` is not positive.
        KeyboardInterrupt: Ctrl-C; the simulation is as it was.
    """
    if n < 1:
        raise ConfigError("try_remedies", f"{n} layers are none", "give at least 1")
    clock = Clock(deadline)
    adjustment = Adjustment(trials.subject, trials.batches, trials.judged, trials.measure, clock)
    with trials.subject.exclusive():
        adjusted, notes = adjustment.rows(analysis.worst(n) if float_model else ())
        restore = trials.subject.remember(parameters=True)
        done = False
        try:
            rows = _layers(trials, analysis.worst(n), notes, clock)
            done = True
        finally:
            if not (keep and done):
                restore()
    analysis.notes = tuple(dict.fromkeys((*analysis.notes, *notes)))
    return (*rows, *adjusted)


def _layers(trials: Trials, layers: Sequence[LayerRow], notes: list[str], clock: Clock) -> list[RemedyRow]:
    """Try what the causes of layers suggest, layer after layer; the simulation keeps the best."""
    rows: list[RemedyRow] = []
    now = None
    for layer in layers:
        if clock.over:
            names = [f"{remedy} at {site.name}" for remedy, site in _suggested(trials, layer)]
            notes += [clock.left_out(name) for name in names]
            continue
        now = now or trials.measure()
        tried, now = _layer(trials, layer, now, notes, clock)
        rows += tried
    return rows


def _layer(
    trials: Trials, layer: LayerRow, before: tuple[float, float | None], notes: list[str], clock: Clock
) -> tuple[list[RemedyRow], tuple[float, float | None]]:
    """Try what one layer's causes suggest, and leave the best of it."""
    rows: list[RemedyRow] = []
    best, again = before, None
    restore = trials.subject.remember(parameters=True)
    try:
        for remedy, site in _suggested(trials, layer):
            if clock.over:
                notes.append(clock.left_out(f"{remedy} at {site.name}"))
                continue
            try:
                if not _apply(trials, remedy, site):
                    continue
                after = trials.measure()
            except BitwrightError as error:
                notes.append(f"{remedy} was not tried at {site.name}: {error.problem}")
                continue
            finally:
                kept = trials.subject.remember(parameters=True)
                restore()
            rows.append(RemedyRow(f"{remedy} at {site.name}", (layer.name,), before[0], after[0], before[1], after[1]))
            if after[0] > best[0] + (_WORTH if again is None else 0):
                best, again = after, (kept, len(rows) - 1)
    except BaseException:
        restore()
        raise
    if again is not None:
        again[0]()
        rows[again[1]] = replace(rows[again[1]], kept=True)
    return rows, best


def _suggested(trials: Trials, layer: LayerRow) -> Iterator[tuple[str, Site]]:
    """``(remedy, site)``, each once, of causes in their order."""
    seen = set()
    for cause in layer.causes:
        names = [cause.evidence["site"]] if "site" in cause.evidence else layer.sites
        for name in names:
            site = trials.subject.sites[name]
            for remedy in cause.evidence.get("tries", ()):
                if remedy in _NAMES and site.enabled and (remedy, name) not in seen:
                    seen.add((remedy, name))
                    yield remedy, site


def _apply(trials: Trials, remedy: str, site: Site) -> bool:
    """Carry a remedy out; whether there was anything to do."""
    if remedy in ("seq_mse", "gptq"):
        return _choose(trials, remedy, site)
    return _OF_SITES[remedy](trials, site)


def _choose(trials: Trials, method: str, site: Site) -> bool:
    from bitwright.algorithms.rounding.table import choose_weights

    if trials.model is None:
        return False
    return bool(len(choose_weights(trials.model, trials.batches, method, {}, include=[site.op])))


def _bits(bits: int) -> Callable[[Trials, Site], bool]:
    def apply(trials: Trials, site: Site) -> bool:
        fmt = site.quantizer.spec.format
        if not isinstance(fmt, IntFormat) or fmt.bits >= bits:
            return False
        if site.is_stored:
            site.spec = replace(site.quantizer.spec, format=replace(fmt, bits=bits))
        else:
            site.quantizer.refine(bits, f"{bits} bits were tried as a remedy")
        return True

    return apply


def _per_channel(trials: Trials, site: Site) -> bool:
    spec = site.quantizer.spec
    if site.role != "weight" or not isinstance(spec.granularity, PerTensor):
        return False
    site.spec = replace(spec, granularity=PerChannel())
    return site.encoding is not None and site.encoding.scale.size > 1


def _minmax(trials: Trials, site: Site) -> bool:
    """The range of what was seen at all sites with this quantizer."""
    sharing = trials.subject.sharing[site.name]
    values = [trials.values[name] for name in sharing if name in trials.values]
    bounds = [(v.low, v.high) for v in values if v.count and (v.low or v.high)]
    bounds = bounds or [found for found in (calibrated_bounds(site),) if found is not None]
    encoding = site.encoding
    if encoding is None or not bounds or not isinstance(encoding.granularity, PerTensor):
        return False
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    spec = replace(site.quantizer.spec, fixed_range=None)
    site.quantizer.encoding = affine.encode(low, high, spec, encoding.granularity, site.name)
    return True


def _mse(trials: Trials, site: Site) -> bool:
    """Chosen again from the statistics of the calibration, where it took those that the method reads."""
    spec = replace(site.quantizer.spec, method=find_range_method("mse"))
    if spec == site.quantizer.spec:
        return False
    site.spec = spec
    return site.encoding is not None


_OF_SITES: dict[str, Callable[[Trials, Site], bool]] = {
    "16_bits": _bits(16),
    "8_bits": _bits(8),
    "per_channel": _per_channel,
    "minmax": _minmax,
    "mse": _mse,
}
