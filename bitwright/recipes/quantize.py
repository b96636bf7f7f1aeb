"""The whole path in one call: fold, simulate, calibrate and, if asked, export."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from bitwright.compare.benchmark import measured_if_short
from bitwright.core.graph.operators import op_row
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import NonFinite, Preset, find_preset
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.float_model import Undo, sqnr
from bitwright.core.simulation.sites import Site
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, ModelError, checks_arguments
from bitwright.export.files.atomic import check_destination
from bitwright.export.files.manifest import origin_of, scores_of
from bitwright.export.opsets import check_versions, has_sixteen_bits
from bitwright.export.qdq.products import ProductForm, check_weight_only
from bitwright.export.targets import DEFAULT_TARGET, find_target, rules_for
from bitwright.methods.activation_ranges import keep_histograms
from bitwright.methods.attention import has_attention
from bitwright.methods.bias_correction import BiasReport, apply_bias_correction
from bitwright.methods.folding.batch_norm_fold import FoldReport, fold_all_batch_norms
from bitwright.methods.front_end import Opened, Pipeline, front_end_of, pipeline_of
from bitwright.methods.layer_inputs import between_layers, layer_inputs
from bitwright.methods.options import Options, keyword_options
from bitwright.methods.rounding.apply import apply_reconstruction, require_torch
from bitwright.methods.runtime_repairs import (
    SaturationRepair,
    StemReport,
    check_repair,
    leave_stem_in_float,
    repair_saturation,
)
from bitwright.methods.scaling.equalize import EqualizeReport, equalize_opened
from bitwright.recipes.default_recipe import RecipeLike, as_recipe, find_effort
from bitwright.recipes.judge import Judge, Rating, in_float
from bitwright.recipes.recipe import (
    KINDS,
    Action,
    FrontEnd,
    ModelRunner,
    OnHarm,
    RecipeReport,
    Step,
    action,
    checked_metric,
    declared_actions,
    integer_bits,
    run_recipe,
    weight_actions,
)
from bitwright.report.document import POOR
from bitwright.report.result import Reported

logger = logging.getLogger("bitwright")
_SHOWN = 3  # kinds of operators, or reasons, that an error names


@dataclass(frozen=True)
class Result(Reported):
    """What :func:`quantize` returns.

    Attributes:
        sim: the calibrated simulation; ``sim.model(x)`` runs that of a module, ``sim.run(feeds)`` that of an ONNX model.
        folds: which batch norms were folded, and why the others were not.
        exported: the files written, when a path was given.
        metrics: ``{"float": ..., "quantized": ...}`` when a metric was given.
        report: what each step of the recipe did; with a recipe and a metric, also to the metric.
        benchmark: speed, size and memory of the files beside the float model, when asked for.
        repair: what ``repair=`` did, when asked for.
        stem: the first convolutions that are in float because the target computes them faster so.
        quality: the outputs against the float model's, part by part, with intervals; ``quality.worst`` is what is printed.
        plain: the same of the plain simulation, batch norms folded and ranges of everything seen; where the default recipe ran.
        poor_below: dB of the worst part below which the result is called poor.
        tried: what was done because the recipe or the preset gave a worse result than something else; empty for nothing.
        asked: steps that the user's recipe names and that changed nothing, with what they say.
    """

    sim: Any
    folds: FoldReport
    exported: Any
    metrics: dict[str, float]
    report: RecipeReport
    benchmark: Any = None
    repair: SaturationRepair | None = None
    stem: StemReport = field(default_factory=StemReport)
    quality: Rating = field(default_factory=Rating)
    plain: Rating | None = None
    poor_below: float = POOR
    tried: str = ""
    asked: tuple[str, ...] = ()

    @property
    def model(self) -> Any:
        """The simulated model."""
        return self.sim.model


@checks_arguments
def quantize(
    model: Any,
    data: Iterable[Any],
    preset: str | Preset = "w8a8",
    *,
    recipe: RecipeLike | None = None,
    effort: str = "default",
    config_file: str | Path | dict[str, Any] | Rules | None = None,
    quant_scheme: str | None = None,
    providers: Any = None,
    memory_budget: int | None = None,
    metric: Callable[[Any], float] | None = None,
    lower_is_better: bool = False,
    on_harm: OnHarm = "report",
    path: str | Path | None = None,
    filename_prefix: str = "model",
    weight_only: ProductForm = "exact",
    target: str = DEFAULT_TARGET,
    opset: int | None = None,
    ir_version: int | None = None,
    samples: bool = True,
    benchmark: bool = False,
    measure_speed: bool = True,
    progress: bool = True,
    non_finite: NonFinite = "error",
    allow_unreached: bool = True,
    allow_float: bool = False,
    repair: str | None = None,
    held_out: Iterable[Any] | None = None,
    poor_below: float = POOR,
    fallback: bool = True,
) -> Result:
    """Quantize ``model`` in one line: fold batch norms, simulate under ``preset``, calibrate on ``data``, export.

    Args:
        model: a ``torch.nn.Module``, or an ONNX model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. Left as it is;
            the work is done on a copy.
        data: calibration batches. Of a module each a tensor, a tuple of positional arguments, or a dict of keyword arguments;
            of an ONNX model a dict of feeds, an array for one input, or a tuple in the model's order. The first is also the
            example input; a generator is fine.
        preset: a row of ``PRESETS`` or a :class:`Preset`.
        recipe: post-training methods in their order, ``["fold", "equalize", {"adaround": {"iterations": 2000}}]``, or the
            path of a file that lists them; :func:`bitwright.recipes.default_recipe.default_recipe` by default.
        effort: without a recipe, how much is done: ``"quick"``, ``"default"`` or ``"thorough"``, the rows of
            :data:`bitwright.recipes.default_recipe.EFFORTS`.
        config_file: rules, as for :class:`QuantizationSimModel`.
        quant_scheme: range method, as for :class:`QuantizationSimModel`.
        providers, memory_budget: for ONNX models, as for :class:`bitwright.onnx.QuantizationSimModel`.
        metric: ``metric(model) -> float`` of a module, ``metric(session) -> float`` of the ``InferenceSession`` of an ONNX
            model; measured on the float and on the simulated model, and after every step of a recipe that is given.
        lower_is_better: for metrics such as a perplexity.
        on_harm: ``"undo"`` takes a step back that made the metric worse, ``"report"`` keeps it and says so.
        path: folder to export to.
        filename_prefix: stem of the files.
        weight_only, target: as for :meth:`QuantizationSimModel.export`. Without a ``config_file`` the target also says what is
            simulated: first convolutions of large images that it computes faster in float stay so, ``result.stem``.
        opset, ir_version: of the files, as for :meth:`QuantizationSimModel.export`.
        samples: write ``<prefix>_samples.npz`` too, which `bitwright verify` compares with; it holds a batch of ``data``.
        benchmark: measure the files beside the float model, see :meth:`QuantizationSimModel.benchmark`.
        measure_speed: run the files that were written beside the float model, and warn where they are slower on this machine;
            ``result.exported.speed``. It takes about a second at most: files of more than 64 MiB, and those of which one
            run takes more than a tenth of a second, are not measured; ``benchmark`` measures any.
        progress: show a progress bar on a terminal.
        non_finite: what to do with a batch that gives NaN or Inf: ``"error"``, ``"skip"`` or ``"clamp"``, as for
            :meth:`QuantizationSimModel.compute_encodings`.
        allow_unreached: leave sites that no batch reached in float and name them in a warning; otherwise they are an error
            as soon as calibration shows them. Weights need no data: they are quantized in either case.
        allow_float: go on with a model of which no layer is quantized, with a warning; otherwise that is an error. Rules of a
            ``config_file`` may leave all in float without it.
        repair: ``"saturation"`` gives 7-bit weights to the layers whose products saturate on CPUs without VNNI, and to no
            others; ``result.repair`` has accuracy before and after.
        held_out: batches that judge, as far from ``data`` as what the model will see: other recordings, other days. Nothing is
            fitted to them. By default the last fifth of ``data`` is held out where no recipe is given; a recipe of your own
            calibrates on all of ``data`` and is rated on some of it.
        poor_below: signal-to-noise ratio of the worst output in dB below which ``print(result)`` begins with POOR.
        fallback: where the result is poor and 8-bit activations are the reason, do it again with 16 bits, and take that if the
            judge's worst output gains 3 dB; without a recipe, a ``config_file`` and a ``quant_scheme`` only. ``result.tried``
            and the first line say so.

    Raises:
        CalibrationError: ``data`` is empty, or gives NaN or Inf under the policy ``"error"``; the metric is NaN; or no
            batch reached some sites and that is not allowed.
        ConfigError: a recipe that cannot work, or stands beside an effort; no such effort;
            or a ``filename_prefix`` that cannot begin the names of files.
        KeyboardInterrupt: Ctrl-C, at any step; ``model`` and an earlier export in ``path`` are as they were.
        ModelError: the model cannot be read or run, a batch does not fit, or no layer can be quantized.
    """
    pipeline = pipeline_of(model, providers, memory_budget)
    check_weight_only(weight_only)
    check_repair(repair)
    check_versions(opset, ir_version)
    find_target(target)
    _check_limit(poor_below)
    if path is not None:
        check_destination(path, filename_prefix)
    job = _Job(
        pipeline, recipe, effort, config_file, quant_scheme, target, metric, lower_is_better, on_harm,
        providers=providers, non_finite=non_finite, allow_unreached=allow_unreached, progress=progress,
        allow_float=allow_float or config_file is not None,
    )  # fmt: skip
    steps = job.steps(preset)
    first, batches = batches_of(data, again=job.goes_over_data_again(steps))
    metrics = {} if metric is None else {"float": checked_metric("float", pipeline.rate_float(metric))}
    job.take(first, batches, held_out, steps, metrics.get("float"))
    done, plain, tried = job.best(preset, poor_below, fallback and has_sixteen_bits(opset))
    sim, report, methods = done.sim, done.report, done.methods
    sim.origin = origin_of(done.preset, map(attrgetter("name"), steps), first, sim.calibration_log)
    form = {"weight_only": weight_only, "target": target}
    repaired = None
    if repair is not None:
        rate = partial(_accuracy, pipeline, sim, first, metric, None if metric else pipeline.float_outputs(first))
        repaired = repair_saturation(sim, batches, rate, **form)
    narrowed = repaired is not None and bool(repaired.narrowed)
    if metric is not None:
        known = None if narrowed else report.metric
        metrics["quantized"] = checked_metric("quantized", pipeline.rate(sim, metric) if known is None else known)
    versions: dict[str, Any] = {"opset": opset, "ir_version": ir_version, "samples": samples}
    write = partial(pipeline.export, sim, prefix=filename_prefix, first=first, **form, **versions)
    rating = methods.rated(sim) if narrowed else done.rating
    origin = sim.origin
    sim.origin = {
        **origin,
        **scores_of(metrics, rating.worst),
    }  # these files alone have them: the simulation may change
    exported = _written(write, path, target if measure_speed else None)
    sim.origin = origin
    measured = sim.benchmark(**form) if benchmark else None
    return Result(
        sim, methods.folds, exported, metrics, report, measured, repaired, methods.stem,
        rating, plain, poor_below, "; ".join(tried), job.idle(report),
    )  # fmt: skip


def _check_limit(poor_below: float) -> None:
    if not poor_below < math.inf:
        raise ConfigError("poor_below", f"{poor_below!r} is not a number of dB", "use 20, or -inf for never")


@dataclass(frozen=True)
class _Attempt:
    """A simulation that a recipe has led to, with its rating."""

    methods: _Methods
    sim: Any
    report: RecipeReport
    rating: Rating
    preset: str | Preset


_GAIN = 3.0  # dB of the worst part that 16 bits must bring


@dataclass
class _Job:
    """One call of :func:`quantize`: what is asked for, and the data.

    Attributes:
        pipeline: the model.
        recipe, effort, config_file, quant_scheme, target, metric, lower_is_better, on_harm: as for :func:`quantize`.
        providers, non_finite, allow_unreached, allow_float, progress: the same.
        first, batches: the example input, and the calibration data.
        chosen: the part of it that calibration and methods see.
        judge: who rates simulations by the rest.
        float_metric: of the float model.
    """

    pipeline: Pipeline
    recipe: RecipeLike | None
    effort: str
    config_file: Any
    quant_scheme: str | None
    target: str
    metric: Callable[[Any], float] | None
    lower_is_better: bool
    on_harm: OnHarm
    providers: Any
    non_finite: NonFinite
    allow_unreached: bool
    allow_float: bool
    progress: bool
    first: Any = None
    batches: Iterable[Any] = ()
    chosen: Iterable[Any] = ()
    judge: Judge = field(default_factory=lambda: Judge([], lambda batch: []))
    float_metric: float | None = None

    def steps(self, preset: str | Preset) -> tuple[Step, ...]:
        """The recipe for a preset."""
        own = {"own_rules": self.config_file is not None, "own_scheme": self.quant_scheme is not None}
        return as_recipe(self.recipe, preset, effort=self.effort, **own)

    def goes_over_data_again(self, steps: Sequence[Step]) -> bool:
        """Whether the data are needed more than once."""
        return self.recipe is not None or any(step.name != "fold" for step in steps)

    def take(
        self,
        first: Any,
        batches: Iterable[Any],
        held_out: Iterable[Any] | None,
        steps: Sequence[Step],
        float_metric: float | None,
    ) -> None:
        """Divide the data: what calibration and methods see, and what rates the result."""
        self.first, self.batches, self.chosen, self.float_metric = first, batches, batches, float_metric
        outputs, names, most = self.pipeline.float_outputs, self.pipeline.output_names, find_effort(self.effort).judged
        if held_out is not None:
            self.judge = Judge.given(held_out, outputs, most, names)
        elif self.recipe is None and any(KINDS[step.name].gain is not None for step in steps):
            self.judge, self.chosen = Judge.of(batches, outputs, most, names)
        else:
            whence = "on the first batch, which calibration saw: give held_out for a figure of other data"
            self.judge = Judge([first], outputs, seen=True, names=names, whence=whence)

    def best(
        self, preset: str | Preset, poor_below: float, fallback: bool
    ) -> tuple[_Attempt, Rating | None, list[str]]:
        """What the recipe leads to, the plain simulation where this is better, or 16-bit activations where both are poor.

        Returns:
            What is taken, the rating of the plain simulation, and what was done beside the recipe.
        """
        done, plain, tried = self._attempt(preset), None, list[str]()
        if self.recipe is not None:
            return done, plain, tried
        if not self.judge.seen:
            done, plain = _never_worse_than_plain(done, tried)
        if fallback and self.config_file is None and self.quant_scheme is None:
            done = self._with_more_bits(done, poor_below, tried)
        return done, plain, tried

    def idle(self, report: RecipeReport) -> tuple[str, ...]:
        """Steps that the user's recipe names and that changed nothing; folding where there is no batch norm is none."""
        if self.recipe is None:
            return ()
        said = (o for o in report if not o.changed and o.kept)
        return tuple(f"{o.step} ({o.note})" for o in said if not (o.step == "fold()" and " 0 kept" in o.note))

    def _attempt(self, preset: str | Preset) -> _Attempt:
        pipeline, steps, own = self.pipeline, self.steps(preset), self.config_file
        rules = {
            "preset": preset,
            "config_file": rules_for(self.target, own, preset),
            "quant_scheme": self.quant_scheme,
        }
        methods = _Methods(
            pipeline=pipeline,
            first=self.first,
            batches=self.batches,
            chosen=self.chosen,
            placing=next((step.options for step in steps if step.name == "layer_inputs"), None),
            ranging=any(step.name == "activation_ranges" for step in steps),
            rules=rules,
            target=self.target if own is None else None,
            keep_float=any(step.name == "bias_correction" for step in steps),
            providers=self.providers,
            non_finite=self.non_finite,
            allow_unreached=self.allow_unreached,
            allow_float=self.allow_float,
            progress=self.progress,
            judge=self.judge,
        )
        front_end = FrontEnd(
            pipeline.copied,
            methods.simulate,
            lambda sim: _measured(pipeline, sim, self.metric),
            _keep,
            methods.actions(),
            pipeline.outputs,
            methods.trial,
        )
        runner = ModelRunner(pipeline.work(self.first), front_end, None if self.recipe is not None else self.judge)
        report = run_recipe(
            steps,
            runner,
            float_metric=None if self.recipe is None else self.float_metric,
            on_harm=self.on_harm,
            lower_is_better=self.lower_is_better,
        )
        return _Attempt(methods, runner.sim, report, methods.rated(runner.sim), preset)

    def _with_more_bits(self, done: _Attempt, poor_below: float, tried: list[str]) -> _Attempt:
        """What was done, or the same with 16-bit activations where 8 bits are why it is poor and the judge sees a gain."""
        preset, worst = find_preset(done.preset), done.rating.worst
        spec = preset.activation
        if worst is None or worst.sqnr >= poor_below or spec is None or integer_bits(spec) > 8:
            return done
        alone = done.methods.rated(done.sim, lambda site: site.role != "weight").worst
        if alone is None or alone.sqnr < worst.sqnr + _GAIN:
            return done
        assert isinstance(spec.format, IntFormat)
        wide = replace(preset, activation=replace(spec, format=replace(spec.format, bits=16)))
        try:
            other = self._attempt(wide)
        except BitwrightError as error:
            tried.append(f"16-bit activations could not be tried: {error}")
            return done
        found = other.rating.worst
        if found is None or found.sqnr < worst.sqnr + _GAIN:
            tried.append("16-bit activations were tried and bring less than 3 dB")
            return done
        tried.append(
            f"activations have 16 bits, because with {integer_bits(spec)} the result was poor ({worst.name} "
            f"{worst.sqnr:.1f} dB); fallback=False keeps {integer_bits(spec)}"
        )
        logger.warning("%s", tried[-1])
        return other


def _never_worse_than_plain(done: _Attempt, tried: list[str]) -> tuple[_Attempt, Rating]:
    """What a recipe led to, or the plain simulation where the judge finds that better; and the rating of this."""
    methods, report = done.methods, done.report
    beside = [o for o in report if o.kept and o.changed and not o.step.startswith("fold(")]
    on_float = any(KINDS[o.step.partition("(")[0]].phase == "float" for o in beside)
    sim = methods.plain() if on_float or methods.start is None else None
    plain = methods.rated(sim) if sim is not None or methods.start is None else methods.start
    part = done.rating.loses_to(plain)
    if part is None:
        return done, plain
    before = next(p for p in plain.parts if p.name == part.name)
    tried.append(
        f"the recipe is undone, as it was worse than the plain simulation ({part.name} {part.sqnr:.1f} dB against "
        f"{before.sqnr:.1f} dB)"
    )
    logger.warning("%s", tried[-1])
    undone = tuple(o if o.step.startswith("fold(") else replace(o, kept=False) for o in report)
    sim = methods.plain() if sim is None else sim
    return replace(done, sim=sim, report=replace(report, outcomes=undone), rating=methods.rated(sim)), plain


def batches_of(data: Iterable[Any], *, again: bool) -> tuple[Any, Iterable[Any]]:
    """The first batch, and all of them.

    Args:
        data: batches.
        again: whether they are to be gone through more than once; those of a generator are then kept.

    Raises:
        CalibrationError: there is none.
    """
    if again and iter(data) is data:
        data = list(data)
    source = iter(data)
    first = next(source, None)
    if first is None:
        raise CalibrationError(
            "quantize",
            "the data held no batch",
            "pass a non-empty list or DataLoader; a few hundred samples are enough",
        )
    return first, data if again else itertools.chain([first], source)


def _written(write: Callable[..., Any], path: str | Path | None, timed: str | None) -> Any:
    """What ``write`` wrote into ``path``, with its speed on the target ``timed``; ``None`` without a path."""
    if path is None:
        return None
    exported = write(path=path)
    return exported if timed is None else measured_if_short(exported, timed)


def _accuracy(
    pipeline: Pipeline, sim: Any, first: Any, metric: Callable[[Any], float] | None, reference: Sequence[Any] | None
) -> float:
    """The metric, or without one the signal-to-noise ratio of the outputs to ``reference``, the lowest of them."""
    if metric is not None:
        return pipeline.rate(sim, metric)
    found = pipeline.outputs(sim, first)
    return min((sqnr(a, b) for a, b in zip(reference or (), found, strict=True)), default=float("nan"))


@dataclass
class _Methods:
    """The steps of a recipe, with all that they need beside their own options.

    Attributes:
        pipeline: the model.
        first, batches: the example input, and the data.
        chosen: the part of them on which calibration and methods work; the rest judges.
        placing: options of the step ``layer_inputs``, if the recipe has it.
        ranging: whether the recipe chooses ranges of activations anew.
        rules: what is asked for: ``preset``, ``config_file``, ``quant_scheme``.
        target: whose slow first convolutions are left in float; ``None`` where the user's own rules say what is quantized.
        keep_float: whether a step asks for the float model.
        providers, non_finite, allow_unreached, allow_float, progress: as for :func:`quantize`.
        folds: what the last folding did.
        float_model: the model from before the simulation; ``None`` if no step asks.
        stem: which first convolutions the last simulation leaves in float.
        judge: who rates simulations.
        start: its rating of the simulation before any step worked on it; ``None`` where it saw its data in calibration.
    """

    pipeline: Pipeline
    first: Any
    batches: Iterable[Any]
    chosen: Iterable[Any]
    placing: Mapping[str, Any] | None
    ranging: bool
    rules: dict[str, Any]
    target: str | None
    keep_float: bool
    providers: Any
    non_finite: NonFinite
    allow_unreached: bool
    allow_float: bool
    progress: bool
    judge: Judge
    folds: FoldReport = field(default_factory=FoldReport)
    float_model: Any = None
    stem: StemReport = field(default_factory=StemReport)
    start: Rating | None = None

    def fold(self, work: Any) -> FoldReport:
        self.folds = self._folded(work)
        return self.folds

    def _folded(self, work: Any) -> FoldReport:
        return fold_all_batch_norms(work, None, self.first, providers=self.providers, progress=self.progress)

    def _opened(self, work: Any, step: str) -> Opened:
        """The model opened for a change by a step."""
        return front_end_of(work).open_model(work, None, self.first, step, self.providers)

    def equalize(
        self, work: Any, *, absorb_bias: bool = False, keep_bounds: bool = False, only_without_attention: bool = False
    ) -> EqualizeReport:
        """Equalize with what batch norms said that this step or one before folded; with an attention not, if so asked."""
        folds = self._folded(work)
        opened = self._opened(work, "equalize")
        if only_without_attention and has_attention(opened.view.graph()):
            return EqualizeReport(left_alone="left alone, as the model has an attention")
        return equalize_opened(
            opened,
            {**self.folds.moments, **folds.moments},
            self.progress,
            data=self.chosen,
            absorb_bias=absorb_bias,
            keep_bounds=keep_bounds,
        )

    def simulate(self, work: Any) -> Any:
        if self.keep_float:
            self.float_model = self.pipeline.reference(work)
        sim = self._placed(work)
        if self.ranging:
            keep_histograms(sim, () if self.placing is None else between_layers(sim, **self.placing))
        self.calibrate(sim)
        self.start = None if self.judge.seen else self.rated(sim)
        return sim

    def plain(self) -> Any:
        """The simulation that no step but folding has worked on, ranges of everything seen."""
        work = self.pipeline.work(self.first)
        self.folds = self._folded(work)
        sim = self._placed(work)
        self.calibrate(sim)
        return sim

    def rated(self, sim: Any, without: Callable[[Site], bool] | None = None) -> Rating:
        """The outputs of a simulation against those of the float model; with some quantizers left out."""
        with in_float(sim.quantizers, without) if without else nullcontext():
            return self.judge.rate(lambda batch: self.pipeline.outputs(sim, batch))

    def _placed(self, work: Any) -> Any:
        """A simulation that is not calibrated yet."""
        sim = self.pipeline.simulation(work, self.first, self.rules)
        check_layers(sim, self.allow_float)
        if self.target is not None:
            self.stem = leave_stem_in_float(sim, self.target)
        return sim

    def calibrate(self, sim: Any, batches: Iterable[Any] | None = None) -> None:
        part = batches is None and self.chosen is not self.batches
        given = self.chosen if batches is None else batches
        options = {"progress": self.progress, "non_finite": self.non_finite}
        if part:
            sim.quantizers.say_nothing_of_unreached()  # what the other batches reach is not known yet
        sim.compute_encodings(given, allow_unreached=self.allow_unreached and not part, **options)
        if part:
            sim.quantizers.say_nothing_of_unreached(False)
            if sim.quantizers.unreached():
                logger.info("calibration reads what judges too: some sites are reached by no other batch")
                self.judge.whence += ", which calibration reads as well, as no other batch reaches some sites"
                self.chosen = self.batches
                sim.compute_encodings(self.batches, allow_unreached=self.allow_unreached, **options)
            else:
                sim.quantizers.settle_unreached(allow=self.allow_unreached)
        sim.quantizers.require_reached()

    def trial(self, work: Any, judge: Judge) -> Any:
        """A simulation for a comparison, calibrated on the judge's batches."""
        sim = self._placed(work)
        sim.quantizers.say_nothing_of_unreached()
        self.calibrate(sim, judge.batches)
        if self.placing is not None:
            layer_inputs(sim, **self.placing)
        return sim

    def widen(self, sim: Any, **options: Any) -> Any:
        """16 bits, or float, as the target computes, where 8 bits cost the outputs most."""
        from bitwright.recipes.widen import widen

        row = None if self.target is None else find_target(self.target)
        wide = {} if row is None else {"bits": row.wide_bits, "times": row.kernel_times}
        return widen(front_end_of(sim).steppable(sim, None), self.chosen, **{**wide, **options})

    def correct_biases(
        self, sim: Any, *, num_samples: int | None = None, layers_to_ignore: Iterable[str] = ()
    ) -> BiasReport:
        return apply_bias_correction(
            sim,
            self.chosen,
            num_samples=num_samples,
            layers_to_ignore=layers_to_ignore,
            reference=self.float_model,
            progress=self.progress,
        )

    def actions(self) -> dict[str, Action]:
        """By step."""
        given = {
            "data": self.chosen,
            "dummy_input": self.first,
            "providers": self.providers,
            "progress": self.progress,
            "calibrate": self.calibrate,
            **{"weight" if name == "preset" else name: rule for name, rule in self.rules.items()},
        }
        choose = partial(apply_reconstruction, data=self.chosen, progress=self.progress)
        return {
            **declared_actions(given, self._opened),
            "fold": action(self.fold),
            "equalize": action(self.equalize),
            "widen": Action(self.widen, _widen_options),
            "bias_correction": action(self.correct_biases),
            **weight_actions(choose, self.calibrate, _method_options),
        }


def _method_options(name: str) -> Options:
    """Of a method that chooses weights; it is written on torch."""
    require_torch(name)
    from bitwright.methods.rounding.table import method_options

    return method_options(name)


def _widen_options() -> Options:
    """Of ``widen``; derivatives are taken on torch."""
    require_torch("widen")
    from bitwright.recipes.widen import widen

    return keyword_options(widen, bound=("times",))


def check_layers(sim: Any, allow_float: bool) -> None:
    """Refuse a simulation in which nothing that multiplies with weights, or activations with each other, is quantized.

    Raises:
        ModelError: it is one; with what the model has instead, or why its layers are in float.
    """
    layers = {op.name for op in sim.graph.ops if op_row(op.type).kind == "compute"}
    if any(site.enabled and (site.role == "weight" or site.op in layers) for site in sim.quantizers.values()):
        return
    if layers:
        reasons = Counter(row.how for row in sim.coverage() if row.status == "float")
        problem = f"no layer of the model is quantized; of its tensors, {_counted(reasons)}"
    else:
        kinds = Counter(op.type for op in sim.graph.ops)
        problem = f"the model has no layer that could be quantized; its operators are {_counted(kinds)}"
    if not allow_float:
        raise ModelError(
            "quantize", problem, "leave it in float; allow_float=True (--allow-float) goes on with it as it is"
        )
    logger.warning("%s: the files hold the float model", problem)


def _counted(names: Counter[str]) -> str:
    """The most frequent of ``names``, with their numbers."""
    shown = ", ".join(f"{count} {name}" for name, count in names.most_common(_SHOWN))
    return shown + (", ..." if len(names) > _SHOWN else "")


def _measured(pipeline: Pipeline, sim: Any, metric: Callable[[Any], float] | None) -> float:
    assert metric is not None  # without one, no recipe asks
    return pipeline.rate(sim, metric)


def _keep(sim: Any) -> Undo:
    undo: Undo = sim.remember(parameters=True)
    return undo
