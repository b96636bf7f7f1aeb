"""The whole path in one call: fold, simulate, calibrate, improve by the steps of a recipe, judge and, if asked, export."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitwright.compare.benchmark import measured_if_short
from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import NonFinite, Preset, find_preset
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.calibration import refuse_one_batch, with_samples
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, checks_arguments
from bitwright.export.edges import edges_of
from bitwright.export.files.atomic import check_destination
from bitwright.export.files.manifest import origin_of, scores_of
from bitwright.export.opsets import check_versions, has_sixteen_bits
from bitwright.export.qdq.half import check_half
from bitwright.export.qdq.products import ProductForm, check_weight_only
from bitwright.export.targets import DEFAULT_TARGET, find_target
from bitwright.methods.data_free import generated_of
from bitwright.methods.folding.batch_norm_fold import FoldReport
from bitwright.methods.front_end import front_end_of
from bitwright.methods.runtime_repairs import SaturationRepair, StemReport, check_repair, repair_saturation
from bitwright.metrics.labels import inputs_and_labels, inputs_of
from bitwright.metrics.metric import MetricRow, OutputMetric, named_of, row_of, scorer
from bitwright.recipes.attempt import Attempt, Job, Work
from bitwright.recipes.default_recipe import RecipeLike
from bitwright.recipes.judge import Rating
from bitwright.recipes.recipe import OnHarm, RecipeReport, checked_metric, integer_bits, metric_of
from bitwright.report.document import POOR
from bitwright.report.result import Reported, main_causes

logger = logging.getLogger("bitwright")


@dataclass(frozen=True)
class Result(Reported):
    """Result of :func:`quantize`.

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
        plain: the same of the plain simulation, batch norms folded and ranges of everything seen, in part of the calibration
            data at least; where the default recipe ran.
        poor_below: dB of the worst part below which the result is called poor.
        tried: what was done because the recipe or the preset gave a worse result than something else; empty for nothing.
        asked: steps that the user's recipe names and that changed nothing, with what they say.
        metric: both values of a metric by name, and how sure their difference is.
        causes: why a poor result is poor: what :func:`bitwright.analyze` says of the layers that cost most.
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
    metric: MetricRow | None = None
    causes: tuple[str, ...] = ()

    @property
    def model(self) -> Any:
        """The simulated model."""
        return self.sim.model


@checks_arguments
def quantize(
    model: Any,
    data: Iterable[Any] | str,
    preset: str | Preset = "w8a8",
    *,
    recipe: RecipeLike | None = None,
    effort: str = "default",
    config_file: str | Path | dict[str, Any] | Rules | None = None,
    quant_scheme: str | None = None,
    providers: Any = None,
    memory_budget: int | None = None,
    metric: str | Mapping[str, Any] | Callable[[Any], float] | None = None,
    labels: Any = None,
    transform: Callable[[Any], Any] | None = None,
    lower_is_better: bool = False,
    on_harm: OnHarm = "report",
    path: str | Path | None = None,
    work_dir: str | Path | None = None,
    filename_prefix: str = "model",
    weight_only: ProductForm = "exact",
    target: str = DEFAULT_TARGET,
    rest: str | None = None,
    io: str | Mapping[str, str] | None = None,
    normalize: Mapping[str, Any] | None = None,
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
        model: a ``torch.nn.Module``; a program of ``torch.export`` or the path of its ``.pt2`` file; or an ONNX model: a path, an
            ``onnx.ModelProto`` or an ``onnx_ir.Model``. Left as it is; the work is done on a copy.
        data: calibration batches. Of a module each a tensor, a tuple of positional arguments, or a dict of keyword arguments;
            of an ONNX model a dict of feeds, an array for one input, or a tuple in the model's order. The first is also the
            example input; a generator is fine. ``"generate"`` makes them: see :func:`bitwright.generate_data`, whose result may
            be given too; the first line of the result says so then.
        preset: a row of ``PRESETS`` or a :class:`Preset`.
        recipe: post-training methods in their order, ``["fold", "equalize", {"adaround": {"iterations": 2000}}]``, or the
            path of a file that lists them; :func:`bitwright.recipes.default_recipe.default_recipe` by default.
        effort: without a recipe, how much is done: ``"quick"``, ``"default"`` or ``"thorough"``, the rows of
            :data:`bitwright.recipes.default_recipe.EFFORTS`.
        config_file: rules, as for :class:`QuantizationSimModel`.
        quant_scheme: range method, as for :class:`QuantizationSimModel`.
        providers, memory_budget: for ONNX models, as for :class:`bitwright.onnx.QuantizationSimModel`.
        metric: a name of :data:`bitwright.metrics.metric.NAMED` (``"accuracy"``, ``"map"``, ...) or ``{name: options}``,
            an object of torchmetrics, or a function: ``metric(model) -> float`` of a module, ``metric(session) -> float`` of the
            ``InferenceSession`` of an ONNX model; measured on the float and on the simulated model, and after every step of a
            recipe that is given. A named one is measured on ``held_out``, or else on ``data``, which are kept in memory then.
        labels: right answers for a named metric: one per sample of the data that it is measured on, or a function that takes them
            from a batch. Without it, and without ``transform``, batches of a metric that needs labels are pairs (input, labels).
        transform: makes of a batch of ``data`` and ``held_out`` what the model takes, as ``lambda batch: batch[0]``.
        lower_is_better: for functions such as a perplexity.
        on_harm: ``"undo"`` takes a step back that made the metric worse, ``"report"`` keeps it and says so.
        path: folder to export to.
        work_dir: folder in which methods (``gptq`` and the others of :func:`apply_reconstruction`, ``awq``) keep each layer or
            group that is finished. The same call goes on there after Ctrl-C or a kill, and removes it at the end; a call with
            another model, other data, another recipe or seed starts anew, with a warning.
        filename_prefix: stem of the files.
        weight_only, target: as for :meth:`QuantizationSimModel.export`. Without a ``config_file`` the target also says what is
            simulated: first convolutions of large images that it computes faster in float stay so, ``result.stem``.
        rest, io, normalize: half precision of what is not quantized, types of inputs and outputs, and pixels that the file
            normalises, as for :meth:`QuantizationSimModel.export`.
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
        repair: ``"saturation"`` gives 7-bit weights to the output channels whose products saturate on CPUs without VNNI, and
            to no others; ``result.repair`` has accuracy before and after, in the simulation and as such a CPU computes it.
        held_out: batches that judge, as far from ``data`` as what the model will see: other recordings, other days. Nothing is
            fitted to them. By default the last fifth of ``data`` is held out where no recipe is given (of fewer than five
            batches, the last fifth of the samples); a recipe of your own calibrates on all of ``data``, and some of it rates.
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
    given = front_end_of(model).given(model, providers, memory_budget)
    check_weight_only(weight_only)
    check_repair(repair)
    check_versions(opset, ir_version)
    check_half("rest", rest)
    edges_of(io, normalize)
    find_target(target)
    _check(poor_below, path, work_dir, filename_prefix)
    generated, data = generated_of(model, data, providers, progress)
    data, held_out, measured_on, labels = _labelled(named_of(metric), data, held_out, labels, transform)
    score, lower_is_better = scorer(metric, lower_is_better, given, measured_on, labels)

    job = Job(
        given, recipe, effort, config_file, quant_scheme, target, score, lower_is_better, on_harm,
        providers=providers, non_finite=non_finite, allow_unreached=allow_unreached, allow_float=allow_float,
        progress=progress, work=Work(None if work_dir is None else Path(work_dir)),
    )  # fmt: skip
    steps = job.steps(preset)
    job.first, job.batches = first, batches = batches_of(data, again=job.reads_again(steps))
    metrics: dict[str, float] = {}
    if score is not None:
        job.float_metric = metrics["float"] = checked_metric("float", metric_of(score, given.metric_target()))
    job.divide(held_out, steps)

    done, plain, tried = Attempt(job, preset).run(), None, list[str]()
    if generated is not None:
        tried.append(f"CALIBRATED WITHOUT DATA, on {generated}")
    if recipe is None:
        plain = _never_worse_than_plain(done, tried)
        if fallback and has_sixteen_bits(opset):
            done = _with_more_bits(done, poor_below, tried)
    sim, causes = done.sim, _causes(done, poor_below)
    done.take_in_held_out()
    sim.origin = origin_of(done.preset, [step.name for step in steps], first, sim.calibration_log)
    if generated is not None:
        sim.origin["generated_data"] = str(generated)

    form = {"weight_only": weight_only, "target": target}
    repaired = None if repair is None else _repaired(done, batches, **form)
    if score is not None:
        metrics["quantized"] = checked_metric("quantized", done.final_metric())

    versions: dict[str, Any] = {"opset": opset, "ir_version": ir_version, "samples": samples}
    versions |= {"rest": rest, "io": io, "normalize": normalize}
    exported = None
    if path is not None:
        origin = sim.origin
        sim.origin = {**origin, **scores_of(metrics, done.rating.worst)}  # the simulation may change after this
        exported = sim.export(path, filename_prefix, **sim._export_options, **form, **versions)
        sim.origin = origin
        exported = measured_if_short(exported, target) if measure_speed else exported
    measured = sim.benchmark(**form) if benchmark else None
    job.work.clear()
    return Result(
        sim, done.folds, exported, metrics, done.report, measured, repaired, done.stem,
        done.rating, plain, poor_below, "; ".join(tried), () if recipe is None else done.report.idle,
        row_of(score, sim._metric_target), causes,
    )  # fmt: skip


def _labelled(
    named: OutputMetric | None, data: Iterable[Any], held_out: Iterable[Any] | None, labels: Any, transform: Any
) -> tuple[Iterable[Any], Iterable[Any] | None, Iterable[Any], Any]:
    """Data as the model takes them, those that are held out and those that a metric is measured on, and their labels."""
    needed = named is not None and named.needs_labels
    if held_out is None:
        data, labels = inputs_and_labels(data, transform, labels, needed)
        data = data if named is None else list(data)
        return data, None, data, labels
    pairs = needed and labels is None  # as far as these are
    held_out = list(held_out) if named is not None else held_out
    held_out, labels = inputs_and_labels(held_out, transform, labels, needed)
    return inputs_of(data, transform or _input_of_pair if pairs else transform), held_out, held_out, labels


def _input_of_pair(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def _check(poor_below: float, path: str | Path | None, work_dir: str | Path | None, filename_prefix: str) -> None:
    for folder in (path, work_dir):
        if folder is not None:
            check_destination(folder, filename_prefix)
    if not poor_below < math.inf:
        raise ConfigError("poor_below", f"{poor_below!r} is not a number of dB", "use 20, or -inf for never")


def _repaired(done: Attempt, batches: Iterable[Any], **form: Any) -> SaturationRepair:
    """Give 7 bits to weights whose sums saturate; rate by the metric, or by the worst output of the first batch."""
    first, sim, given, metric = done.job.first, done.sim, done.job.given, done.job.metric
    reference = given.outputs(first) if metric is None else ()

    def accuracy(target: Any) -> float:
        if metric is not None:
            return metric_of(metric, target)
        found = given.answers(target, first)
        return min((sqnr(a, b) for a, b in zip(reference, found, strict=True)), default=float("nan"))

    repaired = repair_saturation(sim, batches, accuracy, **form)
    if repaired.narrowed:
        done.metric, done.rating = None, done.rated(sim)
    return repaired


def _never_worse_than_plain(done: Attempt, tried: list[str]) -> Rating:
    """Take the plain simulation where the judge rates it above the recipe's result; returns the rating of the one taken."""
    plain, sim = done.unchanged, None
    if plain is None:
        sim = done.plain()
        plain = done.rated(sim)
    part = done.rating.loses_to(plain)
    if part is not None and sim is None:  # that one was calibrated for a comparison only
        sim = done.plain()
        plain = done.rated(sim)
        part = done.rating.loses_to(plain)
    if part is None:
        return plain
    before = next(p for p in plain.parts if p.name == part.name)
    tried.append(
        f"the recipe is undone, as it was worse than the plain simulation ({part.name} {part.sqnr:.1f} dB against "
        f"{before.sqnr:.1f} dB)"
    )
    logger.warning("%s", tried[-1])
    undone = tuple(o if o.step.startswith("fold(") else replace(o, kept=False) for o in done.report)
    done.sim, done.report = sim, replace(done.report, outcomes=undone)
    done.rating = done.rated(done.sim)
    return plain


_ANALYZED = 2  # batches


def _causes(done: Attempt, poor_below: float) -> tuple[str, ...]:
    """Why a result is poor, on the samples that rate it; empty for any other."""
    worst = done.rating.worst
    if worst is None or worst.sqnr >= poor_below:
        return ()
    return main_causes(done.sim, list(done.job.judge.batches[:_ANALYZED]))


_GAIN = 3.0  # dB of the worst part that 16 bits must bring


def _with_more_bits(done: Attempt, poor_below: float, tried: list[str]) -> Attempt:
    """The result, or one with 16-bit activations where 8-bit activations make it poor and the judge sees a gain."""
    if done.job.config_file is not None or done.job.quant_scheme is not None:
        return done
    preset, worst = find_preset(done.preset), done.rating.worst
    spec = preset.activation
    if worst is None or worst.sqnr >= poor_below or spec is None or integer_bits(spec) > 8:
        return done
    alone = done.rated(done.sim, lambda site: site.role != "weight").worst
    if alone is None or alone.sqnr < worst.sqnr + _GAIN:
        return done
    assert isinstance(spec.format, IntFormat)
    wide = replace(preset, activation=replace(spec, format=replace(spec.format, bits=16)))
    try:
        other = Attempt(done.job, wide).run()
    except BitwrightError as error:
        tried.append(f"16-bit activations could not be tried: {error}")
        return done
    found = other.rating.worst
    if found is None or found.sqnr < worst.sqnr + _GAIN:
        tried.append(
            "16-bit activations were tried and bring less than 3 dB, so that steps of activations are not the cause: the "
            "samples that judge leave the ranges of calibration, or decisions of the model change"
        )
        return done
    tried.append(
        f"activations have 16 bits, because with {integer_bits(spec)} the result was poor ({worst.name} "
        f"{worst.sqnr:.1f} dB); fallback=False keeps {integer_bits(spec)}"
    )
    logger.warning("%s", tried[-1])
    return other


def batches_of(data: Iterable[Any], *, again: bool) -> tuple[Any, Iterable[Any]]:
    """The first batch, and all of them.

    Args:
        data: batches.
        again: whether they are to be gone through more than once; those of a generator are then kept.

    Raises:
        CalibrationError: there is none, one of a list holds no sample, or ``data`` is one batch.
    """
    refuse_one_batch(data, "quantize")
    if again and iter(data) is data:
        data = list(data)
    if isinstance(data, (list, tuple)):  # before any step runs
        data = list(with_samples(data))
    source = iter(data)
    first = next(source, None)
    if first is None:
        raise CalibrationError(
            "quantize",
            "the data held no batch",
            "pass a non-empty list or DataLoader; a few hundred samples are enough",
        )
    return first, data if again else itertools.chain([first], source)
