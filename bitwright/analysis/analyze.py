"""``bitwright.analyze``: sensitivity of every site and layer, where error arises, its causes and remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bitwright.analysis import subject as targets
from bitwright.analysis.causes import Trials, causes_of, choices_note, most_enlarged
from bitwright.analysis.layer_errors import SiteValues, calibrated_bounds, grid_row
from bitwright.analysis.result import Analysis, GroupRow, LayerRow, SiteRow, decibel
from bitwright.analysis.sensitivity import Judged, judged, metric_name
from bitwright.analysis.subject import Array, Subject, fingerprint, first_rows, listed, open_subject
from bitwright.core.graph.float_values import reciprocals
from bitwright.core.simulation.calibration import samples_in
from bitwright.core.simulation.float_model import sqnr
from bitwright.core.simulation.sites import Site
from bitwright.errors import ConfigError, ModelError, checks_arguments, some_of
from bitwright.methods.switching import Clock, Kept
from bitwright.metrics.intervals import Better
from bitwright.metrics.labels import inputs_and_labels, split_labels
from bitwright.metrics.metric import OutputMetric, is_function, needs_labels
from bitwright.progress import progress as bar

if TYPE_CHECKING:
    from bitwright.analysis.exact import Pair
    from bitwright.analysis.layer_errors import LayerErrors, Lockstep
    from bitwright.analysis.sensitivity import Sensitivity
    from bitwright.methods.rounding.program import SimulatedModel
    from bitwright.recipes.site_cost import OutputErrors

_REFERENCE_DB = 60.0  # inputs better than this count as this: the error of exact values has no logarithm


def site_rows(
    subject: Subject,
    noise: Mapping[str, float],
    values: Mapping[str, SiteValues],
    pairs: Mapping[str, Pair],
    metrics: Mapping[str, tuple[float, float]],
    target: Mapping[str, str],
    named: OutputMetric | None = None,
) -> dict[str, SiteRow]:
    """Every site's row, in execution order.

    Args:
        noise: estimates by site.
        values: what was seen.
        pairs, metrics: what was measured, by target.
        target: site -> the target that stands for its quantizer.
        named: the metric of ``pairs``.
    """
    found = {}
    for name, site in subject.sites.items():
        row = found[name] = _site_row(site)
        if not site.enabled:
            continue
        row.noise = noise.get(name)
        bounds = calibrated_bounds(site)  # for sites whose values no step shows
        known = {**grid_row(site), **({} if bounds is None else {"minimum": bounds[0], "maximum": bounds[1]})}
        for key, value in {**known, **(values[name].row() if name in values else {})}.items():
            setattr(row, key, value)
        pair = pairs.get(target[name])
        if pair is not None and pair.batches:
            row.only_db, row.without_db = decibel(pair.only.ratio), decibel(pair.without.ratio)
            row.metric_only, row.metric_without = pair.only.score(named), pair.without.score(named)
        if target[name] in metrics:
            row.metric_only, row.metric_without = metrics[target[name]]
    return found


def _site_row(site: Site) -> SiteRow:
    fmt = site.quantizer.spec.format
    row = SiteRow(site.name, site.role, site.op, site._graph.op(site.op).type, fmt.name, fmt.bits, site.enabled)
    if not site.enabled:
        row.why_float = site.quantizer.why_float or site.quantizer.why_spec or "switched off"
    return row


def layer_rows(subject: Subject, seen: Lockstep | None, sites: Mapping[str, SiteRow]) -> list[LayerRow]:
    """Every operator's row with its causes, the worst first."""
    held: dict[str, list[str]] = {}
    for name, row in sites.items():
        held.setdefault(row.layer, []).append(name)
    found = list(_layers(subject, seen, sites, held))
    whole, values = sum(row.cost for row in sites.values()), {} if seen is None else seen.sites
    errors = {} if seen is None else seen.layers
    graph = subject.sim.graph
    divided = reciprocals(graph, graph.static())
    enlarging = most_enlarged(graph, errors)
    for layer in found:
        layer.causes = causes_of(layer, subject, values, sites, whole, errors, divided, enlarging)
    return sorted(found, key=lambda row: -(row.noise or 0.0))


def _layers(
    subject: Subject, seen: Lockstep | None, sites: Mapping[str, SiteRow], held: Mapping[str, Sequence[str]]
) -> Iterator[LayerRow]:
    graph, layers = subject.sim.graph, {} if seen is None else seen.layers
    for op in graph.ops:
        errors = layers.get(op.name)
        names = tuple(held.get(op.name, ()))
        if errors is None and not names:
            continue
        makers = (graph.producer(value) for value in op.inputs if value is not None)
        inputs = tuple(dict.fromkeys(maker.name for maker in makers if maker is not None))
        by_cost = sorted(names, key=lambda name: sites[name].cost)
        apart = {subject.sharing[name][0]: name for name in by_cost}  # each quantizer counts once
        row = LayerRow(op.name, op.type, names, inputs, _total(list(apart.values()), sites))
        if errors is not None:
            _add_errors(row, errors, subject)
        yield row


def _total(names: Sequence[str], sites: Mapping[str, SiteRow]) -> float | None:
    """Summed cost of sites; their errors are taken as uncorrelated."""
    known = [sites[n].cost for n in names if sites[n].noise is not None or sites[n].only_db is not None]
    return sum(known) if known else None


def _add_errors(row: LayerRow, errors: LayerErrors, subject: Subject) -> None:
    row.made_db, row.made_quantized_db = decibel(errors.made.value), decibel(errors.made_quantized.value)
    row.arrived_db, row.after_db = decibel(errors.arrived), decibel(errors.after.value)
    if row.after_db is not None:
        before = _REFERENCE_DB if row.arrived_db is None else min(row.arrived_db, _REFERENCE_DB)
        row.jump = max(0.0, before - row.after_db)
    for name in row.sites:
        site = subject.sites[name]
        if site.role == "output" and site.enabled and site.encoding is not None and errors.elements:
            row.made_lsb = float((errors.made.noise / errors.elements) ** 0.5 / site.encoding.scale.mean())
            return


def group_rows(
    groups: Mapping[str, Sequence[str]], sites: Mapping[str, SiteRow], pairs: Mapping[str, Pair]
) -> tuple[GroupRow, ...]:
    """Rows of the requested groups; columns that were not measured are empty."""
    found = []
    for name, held in groups.items():
        row = GroupRow(name, tuple(held), _total(held, sites))
        pair = pairs.get(group_target(name))
        if pair is not None and pair.batches:
            row.only_db, row.without_db = decibel(pair.only.ratio), decibel(pair.without.ratio)
        found.append(row)
    return tuple(found)


def group_target(name: str) -> str:
    """Key of a group among targets; never equal to the name of a site."""
    return f"group: {name}"


Mode = Literal["auto", "fast", "exact"]
MODES = ("auto", "fast", "exact")
_SAMPLES = 64  # rows that estimates are taken on
_BUDGET = 1 << 30  # bytes of values in memory
_WORST, _WORST_METRIC = 24, 4  # quantizers that `auto` measures where no deadline is given
_UNKNOWN = 64  # quantizers without an estimate that it measures then
_POOR_DB = 20.0  # outputs below: `auto` tries the remedies for the worst layer
_REPEATED_DB = 60.0  # SQNR of two float runs from which on they count as equal
_ENOUGH_REPEATED_DB = 30.0  # below, quantization error cannot be told from the model's own


@checks_arguments
def analyze(
    sim: Any,
    data: Iterable[Any],
    metric: str | Mapping[str, Any] | Callable[[Any], Any] | None = None,
    mode: Mode = "auto",
    deadline: float | None = None,
    *,
    labels: Any = None,
    transform: Callable[[Any], Any] | None = None,
    better: Better = "higher",
    groups: targets.Groups | None = None,
    samples: int = _SAMPLES,
    memory_budget: int | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Analysis:
    """Find the layers and quantizers that cost a simulation its accuracy, and the causes.

    Args:
        sim: a calibrated simulation of either front end; as it was afterwards.
        data: batches as the model takes them, without labels; a few hundred samples.
        metric: a name of :data:`bitwright.metrics.metric.NAMED` (``"accuracy"`` with ``labels``, ``"agreement"`` with the float
            model's answers, ``"f1"``, ``"map"``, ...) or ``{name: options}``, an object of torchmetrics, or a function of the
            model (PyTorch) or session (ONNX) that returns one value per sample, or one number. Outputs are compared by SQNR in
            any case.
        mode: ``"fast"`` estimates every quantizer from one run forward and one back; ``"exact"`` measures every quantizer on
            all data; ``"auto"`` estimates all and measures the worst, 24 of them or as many as ``deadline`` allows. Where
            the outputs are below 20 dB and there is no deadline, it tries the remedies for the worst layer, too.
        deadline: seconds after which it ends with what it has.
        labels: right answers, one per sample in the order of the data, or a function that takes them from a batch.
        transform: makes of a batch what the model takes. Without it, and without ``labels`` that a metric needs, batches are
            pairs of an input and its labels.
        better: ``"lower"`` for a metric function that is an error or a perplexity.
        groups: sites that are measured together: patterns of site or layer names, or name -> pattern(s).
        samples: rows that estimates are taken on, and in ``auto`` measurements too; a batch is not divided.
        memory_budget: bytes of values held in memory, 1 GiB by default; what goes beyond lies in temporary files.
        resume: folder that keeps measurements; the same call goes on from there after Ctrl-C or a deadline.
        progress: show a progress bar on a terminal.
        seed: of what is random.

    Returns:
        The analysis. Ctrl-C after the estimate ends it with what it has, and a note.

    Raises:
        CalibrationError: the simulation is not calibrated, or the data held no batch.
        ConfigError: an argument that cannot be understood, a metric that is not finite or does not depend on the model, or
            labels that do not fit.
        ModelError: the model fails on the data, returns no tensor of numbers, or is not deterministic.
        BusyError: another thread uses the simulation.

    Example:
        >>> found = bitwright.analyze(sim, batches)  # doctest: +SKIP
        >>> found.worst(3)[0].causes[0].text  # doctest: +SKIP
        'conv1.output[0]: the values use 3.1% of the grid's range: ...'
    """
    _check_options(mode, samples, memory_budget)
    clock, subject = Clock(deadline), open_subject(sim)
    metric = None if metric == "sqnr" else metric
    data, labels = inputs_and_labels(data, transform, labels, needs_labels(metric))
    batches = listed(data)
    named = targets.chosen(groups, subject.sites)
    parts = split_labels(labels, batches)
    judge = judged(subject, metric, better, parts, len(batches))
    with subject.exclusive():
        notes = _check_outputs(subject, batches[0])
        model, why = _steps_of(subject, batches[0])
        run = _Run(subject, model, batches, judge, clock, mode, progress, notes)
        if why:
            run.notes.append(f"no estimate by derivatives, quantizers are switched one by one: {why}")
        few = first_rows(batches, samples) if mode != "exact" else batches
        kept = Kept(resume, "" if resume is None else _name(subject, few, metric, mode))
        budget = _BUDGET if memory_budget is None else memory_budget
        run.fast(first_rows(batches, samples), samples, seed)
        run.totals()
        run.exact(few, kept, budget, named)
    found = run.result(named)
    poor = (found.output["sqnr_db"] or _POOR_DB) < _POOR_DB
    if mode == "auto" and poor and clock.limit is None and judge.function is None and not run.ended:
        found.try_remedies(1, float_model=False)
    return found


@dataclass
class _Run:
    """Stages of an analysis and their results."""

    subject: Subject
    model: SimulatedModel | None
    batches: Sequence[Any]
    judge: Judged
    clock: Clock
    mode: Mode
    show: bool
    notes: list[str]
    errors: OutputErrors | None = None
    seen: Lockstep | None = None
    found: Sensitivity | None = None
    passes: float = 0.0
    judged_rows: int = 0
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def fast(self, few: Sequence[Any], samples: int, seed: int) -> None:
        """Estimate the cost of all sites and measure the errors of every layer."""
        if self.model is None:
            return
        from bitwright.analysis.layer_errors import observe
        from bitwright.recipes.site_cost import output_errors

        self.errors = output_errors(self.model, few, samples=samples, seed=seed)
        self.seen = observe(self.model, bar(few, "layers", self.show))
        if self.seen.turned:
            self.passes += 2 * self._share([few[i] for i in self.seen.turned])
            self.notes += filter(None, [choices_note(self.seen, self._noise_of(few[i] for i in self.seen.turned))])
        # one run, one of the weights' effects, one back (as two), one of all quantizers; and what was counted
        self.passes += self._share(few) * (5 + self.seen.runs / max(self.seen.steps, 1))

    def _noise_of(self, batches: Iterable[Any]) -> float | None:
        """Noise of the model's outputs over their power."""
        judge = Judged(self.subject, None, None, self.judge.better, ())
        for batch in batches:
            judge.batch(batch, None)
        return judge.whole.ratio

    def totals(self) -> None:
        """Measure outputs and metric of the whole model on all data, or on as much as the time allows."""
        try:
            pairs = list(zip(self.batches, self.judge.labels, strict=True))
            for batch, labels in bar(pairs, "outputs", self.show):
                self.judge.batch(batch, labels)
                self.judged_rows += samples_in(batch)
                if self.clock.over:
                    break
            if self.judge.whole.ratio is None:
                raise ModelError(
                    self.subject.name,
                    "its outputs hold no number but 0 on these data, so there is nothing that an error could be compared with",
                    "load trained weights, and give data of the kind that the model is made for",
                )
            self.judge.judge()
        except KeyboardInterrupt:
            self._end("Ctrl-C")
        self.passes += 2 * self.judged_rows / self._rows(self.batches)

    def exact(self, few: Sequence[Any], kept: Kept, budget: int, named: Mapping[str, tuple[str, ...]]) -> None:
        """Measure the targets of the mode."""
        from bitwright.analysis.sensitivity import Sensitivity

        if self.ended:
            return
        labels = self.judge.labels[: len(few)]
        self.found = Sensitivity(
            subject=self.subject, judged=self.judge, model=self.model, batches=few, labels=labels, clock=self.clock, kept=kept,
            show=self.show, budget=budget,
        )  # fmt: skip
        known = self.found.load()
        if known:
            self.notes.append(f"{known} measurements of an earlier analysis were taken over")
        sites, more = self._targets(named)
        self.found.measure({**sites, **more})
        self.found.measure_metric(sites if self.mode == "exact" else dict(list(sites.items())[:_WORST_METRIC]))
        self.passes += self._share(few) * self.found.passes
        if self.found.stopped:
            left = len([name for name in sites if name not in self.found.pairs])
            self._end(self.found.stopped, f"; {left} of {len(sites)} quantizers were not measured")

    def _targets(
        self, named: Mapping[str, tuple[str, ...]]
    ) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
        """Quantizers, most costly first, and groups."""
        sites = self.subject.sites
        together = self.subject.sharing
        unique = {names[0]: names for name, names in together.items() if sites[name].enabled}
        picked = {name: frozenset(unique[name]) for name in self._chosen(unique)}
        self.groups = dict(named)
        if self.mode != "fast":
            self.groups |= targets.kinds(sites)
        if self.mode == "exact":
            self.groups |= {**targets.blocks(self.subject.sim.graph, sites), **targets.layers(sites)}
        return picked, {group_target(n): frozenset(held) for n, held in self.groups.items()}

    def _chosen(self, unique: Mapping[str, tuple[str, ...]]) -> list[str]:
        """The quantizers to measure: those without an estimate first, then the most costly ones."""
        noise = self._noise
        cost = {name: max(noise.get(n, 0.0) for n in names) for name, names in unique.items()}
        estimated = [name for name, names in unique.items() if not noise.keys().isdisjoint(names)]
        ranked = sorted(estimated, key=lambda name: -cost[name])
        derived = {name for name in unique if self.subject.sites[name].quantizer.derived}
        known = derived.union(estimated)
        unknown = [name for name in unique if name not in known]
        if self.mode == "fast" and self.model is not None:
            ranked, unknown = [], []
        if self.mode == "auto" and self.clock.limit is None:
            ranked, unknown = ranked[:_WORST], unknown[:_UNKNOWN]
        if unknown and self.model is not None:
            self.notes.append(
                f"{len(unknown)} quantizers have no derivative and are measured instead: {some_of(unknown, 4)}"
            )
        return {"auto": unknown + ranked, "exact": list(unique)}.get(self.mode, unknown)

    @property
    def _noise(self) -> dict[str, float]:
        errors = self.errors
        return {} if errors is None else {**errors.activations, **errors.weights, **errors.constants}

    @property
    def ended(self) -> bool:
        """Whether Ctrl-C or the deadline ended the analysis early."""
        return any(note.startswith("ended by") for note in self.notes)

    def _end(self, what: str, more: str = "") -> None:
        self.notes.append(f"ended by {what}{more}; what was found until then is here")

    def _share(self, few: Sequence[Any]) -> float:
        return self._rows(few) / self._rows(self.batches)

    @staticmethod
    def _rows(batches: Sequence[Any]) -> int:
        return max(1, sum(map(samples_in, batches)))

    def result(self, named: Mapping[str, tuple[str, ...]]) -> Analysis:
        """Build the analysis from the measurements."""
        pairs = {} if self.found is None else self.found.pairs
        metrics = {} if self.found is None else self.found.metrics
        seen = {} if self.seen is None else self.seen.sites
        target = {name: names[0] for name, names in self.subject.sharing.items()}
        sites = site_rows(self.subject, self._noise, seen, pairs, metrics, target, self.judge.named)
        model = {"name": self.subject.name, "front_end": self.subject.front_end, **self.subject.size()}
        rows = self._rows(self.batches)
        if 0 < self.judged_rows < rows:
            self.notes.append(f"outputs were compared on {self.judged_rows} of {rows} samples")
        judge = self.judge
        fresh = partial(
            Judged, judge.subject, judge.named, judge.function, judge.better, judge.labels
        )  # nothing measured
        trials = Trials(self.subject, self.model, self.batches, fresh, seen)
        return Analysis(
            model,
            {"samples": rows, "passes": round(self.passes, 3)},
            self.mode,
            tuple(sorted(sites.values(), key=lambda row: -row.cost)),
            tuple(layer_rows(self.subject, self.seen, sites)),
            self.judge.output,
            self.judge.row,
            group_rows(self.groups or named, sites, pairs),
            notes=tuple(self.notes),
            _try=trials,
        )


def _check_options(mode: str, samples: int, memory_budget: int | None) -> None:
    if mode not in MODES:
        raise ConfigError("mode", f"there is no mode {mode!r}", f"use {', '.join(MODES)}")
    if samples < 1:
        raise ConfigError("samples", f"{samples} rows show nothing", "use 64, or leave it out")
    if memory_budget is not None and memory_budget < 1:
        raise ConfigError("memory_budget", f"{memory_budget} bytes hold nothing", "use bytes, for example 2**30")


def _steps_of(subject: Subject, batch: Any) -> tuple[SimulatedModel | None, str]:
    """The simulation as steps, or ``None`` with the reason why it cannot be run step by step."""
    model = subject.steps()
    try:
        model.program(batch)
    except ModelError as error:
        return None, f"{error.site}: {error.problem}"
    return model, ""


def _check_outputs(subject: Subject, batch: Any) -> list[str]:
    """Refuse models whose outputs cannot be compared; add a note where two float runs differ slightly."""
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
            "take out the operators that draw random numbers, or seed them; in a module only those of a generator of its own "
            "differ, so seed that one in forward",
        )
    if agreement < _REPEATED_DB:
        return [f"two float runs of the same batch differ: errors beyond {agreement:.0f} dB are not its own"]
    return []


def _finite(one: Array, other: Array) -> tuple[Array, Array]:
    if one.shape != other.shape:
        return np.ones(1), np.zeros(1)
    both = np.isfinite(one) & np.isfinite(other)
    return one[both], other[both]


def _name(subject: Subject, batches: Sequence[Any], metric: Any, mode: str) -> str:
    """Fingerprint of everything on which the measurements depend."""

    def parts() -> Iterable[bytes]:
        yield f"{mode} {metric_name(metric) if is_function(metric) else metric}".encode()
        for name, site in subject.sites.items():
            yield f"{name} {site.enabled}".encode()
            if site.enabled and site.encoding is not None:
                yield site.encoding.scale.tobytes() + site.encoding.zero_point.tobytes()

    return fingerprint(batches, parts())
