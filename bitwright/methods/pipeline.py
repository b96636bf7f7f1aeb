"""The whole path in one call: fold, simulate, calibrate and, if asked, export."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from bitwright.algorithms.bias_correct import BiasReport
from bitwright.algorithms.channels.attention import has_attention
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.front_ends import Opened, Pipeline
from bitwright.algorithms.options import Options, keyword_options
from bitwright.algorithms.scaling.equalize import EqualizeReport
from bitwright.algorithms.search.activation_ranges import keep_histograms
from bitwright.algorithms.search.default_recipe import RecipeLike, as_recipe, find_effort
from bitwright.algorithms.search.judge import Judge
from bitwright.algorithms.search.layer_inputs import between_layers, layer_inputs
from bitwright.algorithms.search.recipe import (
    KINDS,
    Action,
    FrontEnd,
    ModelRunner,
    OnHarm,
    action,
    declared_actions,
    run_recipe,
    weight_actions,
)
from bitwright.algorithms.search.recipe_report import RecipeReport, checked_metric
from bitwright.core.numerics.spec import NonFinite, Preset
from bitwright.core.placement.rules import Rules
from bitwright.core.simulation.protocols import Undo, sqnr
from bitwright.errors import CalibrationError, checks_arguments
from bitwright.export.deployed import measured_if_short
from bitwright.export.files.atomic import check_destination
from bitwright.export.files.origin import origin_of
from bitwright.export.qdq.products import ProductForm, check_weight_only
from bitwright.export.targets import DEFAULT_TARGET, find_target, rules_for
from bitwright.methods import bias, channels, rounding
from bitwright.methods.folding import fold_all_batch_norms
from bitwright.methods.front_end import front_end_of, pipeline_of
from bitwright.methods.saturation import SaturationRepair, check_repair, repair_saturation
from bitwright.methods.stem import StemReport, leave_stem_in_float
from bitwright.report.result import Reported


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
    """

    sim: Any
    folds: FoldReport
    exported: Any
    metrics: dict[str, float]
    report: RecipeReport
    benchmark: Any = None
    repair: SaturationRepair | None = None
    stem: StemReport = field(default_factory=StemReport)

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
    benchmark: bool = False,
    measure_speed: bool = True,
    progress: bool = True,
    non_finite: NonFinite = "error",
    allow_unreached: bool = True,
    repair: str | None = None,
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
            path of a file that lists them; :func:`bitwright.algorithms.search.default_recipe.default_recipe` by default.
        effort: without a recipe, how much is done: ``"quick"``, ``"default"`` or ``"thorough"``, the rows of
            :data:`bitwright.algorithms.search.default_recipe.EFFORTS`.
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
        benchmark: measure the files beside the float model, see :meth:`QuantizationSimModel.benchmark`.
        measure_speed: run the files that were written beside the float model, and warn where they are slower on this machine;
            ``result.exported.speed``. It takes about a second at most: files of more than 64 MiB, and those of which one
            run takes more than a tenth of a second, are not measured; ``benchmark`` measures any.
        progress: show a progress bar on a terminal.
        non_finite: what to do with a batch that gives NaN or Inf: ``"error"``, ``"skip"`` or ``"clamp"``, as for
            :meth:`QuantizationSimModel.compute_encodings`.
        allow_unreached: leave sites that no batch reached in float and name them in a warning; otherwise they are an error
            as soon as calibration shows them. Weights need no data: they are quantized in either case.
        repair: ``"saturation"`` gives 7-bit weights to the layers whose products saturate on CPUs without VNNI, and to no
            others; ``result.repair`` has accuracy before and after.

    Raises:
        CalibrationError: ``data`` is empty, or gives NaN or Inf under the policy ``"error"``; the metric is NaN; or no
            batch reached some sites and that is not allowed.
        ConfigError: a recipe that cannot work, or stands beside an effort; no such effort;
            or a ``filename_prefix`` that cannot begin the names of files.
        KeyboardInterrupt: Ctrl-C, at any step; ``model`` and an earlier export in ``path`` are as they were.
        ModelError: the model cannot be read or run, or a batch does not fit.
    """
    pipeline = pipeline_of(model, providers, memory_budget)
    check_weight_only(weight_only)
    check_repair(repair)
    find_target(target)
    if path is not None:
        check_destination(path, filename_prefix)
    steps = as_recipe(
        recipe, preset, effort=effort, own_rules=config_file is not None, own_scheme=quant_scheme is not None
    )
    first, batches = batches_of(data, again=recipe is not None or any(step.name != "fold" for step in steps))
    metrics = {} if metric is None else {"float": checked_metric("float", pipeline.rate_float(metric))}
    reference = pipeline.float_outputs(first) if repair is not None and metric is None else None
    judge, chosen = None, batches
    if recipe is None and any(KINDS[step.name].gain is not None for step in steps):
        judge, chosen = Judge.of(batches, pipeline.float_outputs, find_effort(effort).judged, pipeline.output_names)
    methods = _Methods(
        pipeline=pipeline,
        first=first,
        batches=batches,
        chosen=chosen,
        placing=next((step.options for step in steps if step.name == "layer_inputs"), None),
        ranging=any(step.name == "activation_ranges" for step in steps),
        rules={"preset": preset, "config_file": rules_for(target, config_file, preset), "quant_scheme": quant_scheme},
        target=target if config_file is None else None,
        keep_float=any(step.name == "bias_correction" for step in steps),
        providers=providers,
        non_finite=non_finite,
        allow_unreached=allow_unreached,
        progress=progress,
    )
    front_end = FrontEnd(
        pipeline.copied,
        methods.simulate,
        lambda sim: _measured(pipeline, sim, metric),
        _keep,
        methods.actions(),
        pipeline.outputs,
        methods.trial,
    )
    runner = ModelRunner(pipeline.work(first), front_end, judge)
    report = run_recipe(
        steps,
        runner,
        float_metric=None if recipe is None else metrics.get("float"),
        on_harm=on_harm,
        lower_is_better=lower_is_better,
    )
    runner.sim.origin = origin_of(preset, map(attrgetter("name"), steps), first, runner.sim.calibration_log)
    form = {"weight_only": weight_only, "target": target}
    repaired = None
    if repair is not None:
        rate = partial(_accuracy, pipeline, runner.sim, first, metric, reference)
        repaired = repair_saturation(runner.sim, batches, rate, **form)
    if metric is not None:
        known = None if repaired is not None and repaired.narrowed else report.metric
        found = pipeline.rate(runner.sim, metric) if known is None else known
        metrics["quantized"] = checked_metric("quantized", found)
    write = partial(pipeline.export, runner.sim, prefix=filename_prefix, first=first, **form)
    exported = _written(write, path, target if measure_speed else None)
    measured = runner.sim.benchmark(**form) if benchmark else None
    return Result(runner.sim, methods.folds, exported, metrics, report, measured, repaired, methods.stem)


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
        first, batches: the example input, and the calibration data.
        chosen: the part of it on which methods choose; the rest judges them.
        placing: options of the step ``layer_inputs``, if the recipe has it.
        ranging: whether the recipe chooses ranges of activations anew.
        rules: what is asked for: ``preset``, ``config_file``, ``quant_scheme``.
        target: whose slow first convolutions are left in float; ``None`` where the user's own rules say what is quantized.
        keep_float: whether a step asks for the float model.
        providers, non_finite, allow_unreached, progress: as for :func:`quantize`.
        folds: what the last folding did.
        float_model: the model from before the simulation; ``None`` if no step asks.
        stem: which first convolutions the last simulation leaves in float.
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
    progress: bool
    folds: FoldReport = field(default_factory=FoldReport)
    float_model: Any = None
    stem: StemReport = field(default_factory=StemReport)

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
        return channels.equalize_opened(
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
        return sim

    def _placed(self, work: Any) -> Any:
        """A simulation that is not calibrated yet."""
        sim = self.pipeline.simulation(work, self.first, self.rules)
        if self.target is not None:
            self.stem = leave_stem_in_float(sim, self.target)
        return sim

    def calibrate(self, sim: Any, batches: Iterable[Any] | None = None) -> None:
        sim.compute_encodings(
            self.batches if batches is None else batches,
            progress=self.progress,
            non_finite=self.non_finite,
            allow_unreached=self.allow_unreached,
        )
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
        from bitwright.algorithms.search.widen import widen

        row = None if self.target is None else find_target(self.target)
        wide = {} if row is None else {"bits": row.wide_bits, "times": row.kernel_times}
        return widen(front_end_of(sim).steppable(sim, None), self.chosen, **{**wide, **options})

    def correct_biases(
        self, sim: Any, *, num_samples: int | None = None, layers_to_ignore: Iterable[str] = ()
    ) -> BiasReport:
        return bias.apply_bias_correction(
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
        choose = partial(rounding.apply_reconstruction, data=self.chosen, progress=self.progress)
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
    rounding.require_torch(name)
    from bitwright.algorithms.rounding.table import method_options

    return method_options(name)


def _widen_options() -> Options:
    """Of ``widen``; derivatives are taken on torch."""
    rounding.require_torch("widen")
    from bitwright.algorithms.search.widen import widen

    return keyword_options(widen, bound=("times",))


def _measured(pipeline: Pipeline, sim: Any, metric: Callable[[Any], float] | None) -> float:
    assert metric is not None  # without one, no recipe asks
    return pipeline.rate(sim, metric)


def _keep(sim: Any) -> Undo:
    undo: Undo = sim.remember(parameters=True)
    return undo
