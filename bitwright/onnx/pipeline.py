"""The whole path in one call: fold, simulate, calibrate and, if asked, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.algorithms.bias_correct import BiasReport
from bitwright.algorithms.folding.batch_norm_fold import FoldReport
from bitwright.algorithms.options import Options, keyword_options
from bitwright.algorithms.scaling.equalize import EqualizeReport
from bitwright.algorithms.search.activation_ranges import activation_ranges, keep_histograms
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
    batches_of,
    run_recipe,
    weight_actions,
)
from bitwright.algorithms.search.recipe_report import RecipeReport, checked_metric
from bitwright.core.numerics.spec import NonFinite, Preset
from bitwright.core.simulation.protocols import Array, Undo
from bitwright.export.artefacts import Exported
from bitwright.export.files.atomic import check_destination
from bitwright.export.qdq.origin import origin_of
from bitwright.export.qdq.products import ProductForm, check_weight_only
from bitwright.export.targets import DEFAULT_TARGET, find_target, rules_for
from bitwright.export.verify.outputs import one_array
from bitwright.methods import bias, channels
from bitwright.methods.folding import fold_all_batch_norms
from bitwright.onnx.model.data import as_feeds, input_specs
from bitwright.onnx.model.load import Loaded, Source, load_model
from bitwright.onnx.model.session import Providers, open_session
from bitwright.onnx.reconstruct import apply_reconstruction, require_torch
from bitwright.onnx.simulation.quantsim import QuantizationSimModel
from bitwright.report.result import Reported
from bitwright.runtimes.benchmark import BenchmarkReport

if TYPE_CHECKING:
    from bitwright.algorithms.search.widen import WidenReport


@dataclass(frozen=True)
class Result(Reported):
    """What :func:`quantize` returns.

    Attributes:
        sim: the calibrated simulation; ``sim.run(feeds)`` runs it.
        folds: which batch norms were folded, and why the others were not.
        exported: the files written, when a path was given.
        metrics: ``{"float": ..., "quantized": ...}`` when a metric was given.
        report: what each step of the recipe did; with a recipe and a metric, also to the metric.
        benchmark: speed, size and memory of the files beside the float model, when asked for.
    """

    sim: QuantizationSimModel
    folds: FoldReport
    exported: Exported | None
    metrics: dict[str, float]
    report: RecipeReport
    benchmark: BenchmarkReport | None = None


def quantize(
    model: Source,
    data: Iterable[Any],
    preset: str | Preset = "w8a8",
    *,
    recipe: RecipeLike | None = None,
    effort: str = "default",
    config_file: str | Path | dict[str, Any] | None = None,
    quant_scheme: str | None = None,
    providers: Providers | None = None,
    memory_budget: int | None = None,
    metric: Callable[[Any], float] | None = None,
    lower_is_better: bool = False,
    on_harm: OnHarm = "report",
    path: str | Path | None = None,
    filename_prefix: str = "model",
    weight_only: ProductForm = "exact",
    target: str = DEFAULT_TARGET,
    benchmark: bool = False,
    progress: bool = True,
    non_finite: NonFinite = "error",
    allow_unreached: bool = True,
) -> Result:
    """Quantize ``model`` in one line: fold batch norms, simulate under ``preset``, calibrate on ``data``, export.

    Args:
        model: path, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        data: feeds, each a dict, an array for a model with one input, or a tuple in the model's order. The first is also
            the example input; a generator is fine.
        preset: a row of ``PRESETS`` or a :class:`Preset`.
        recipe: post-training methods in their order, ``["fold", "equalize", {"adaround": {"iterations": 2000}}]``, or the
            path of a file that lists them; :func:`bitwright.algorithms.search.default_recipe.default_recipe` by default.
        effort: without a recipe, how much is done: ``"quick"``, ``"default"`` or ``"thorough"``, the rows of
            :data:`bitwright.algorithms.search.default_recipe.EFFORTS`.
        config_file, quant_scheme, providers, memory_budget: as for :class:`QuantizationSimModel`.
        metric: ``metric(session) -> float`` of an ``InferenceSession``, measured on the float and on the simulated model,
            and after every step of a recipe that is given.
        lower_is_better: for metrics such as a perplexity.
        on_harm: ``"undo"`` takes a step back that made the metric worse, ``"report"`` keeps it and says so.
        path: folder to export to.
        filename_prefix: stem of the files.
        weight_only, target: as for :meth:`QuantizationSimModel.export`.
        benchmark: measure the files beside the float model, see :meth:`QuantizationSimModel.benchmark`.
        progress: show a progress bar on a terminal.
        non_finite: what to do with a batch that gives NaN or Inf: ``"error"``, ``"skip"`` or ``"clamp"``, as for
            :meth:`QuantizationSimModel.compute_encodings`.
        allow_unreached: leave sites that no batch reached in float and name them in a warning; otherwise they are an error
            as soon as calibration shows them. Weights need no data: they are quantized in either case.

    Raises:
        CalibrationError: ``data`` is empty, or gives NaN or Inf under the policy ``"error"``; the metric is NaN; or no
            batch reached some sites and that is not allowed.
        ConfigError: a recipe that cannot work, or stands beside an effort; no such effort;
            or a ``filename_prefix`` that cannot begin the names of files.
        KeyboardInterrupt: Ctrl-C, at any step; ``model`` and an earlier export in ``path`` are as they were.
        ModelError: the model cannot be read or run, or a feed does not fit.
    """
    check_weight_only(weight_only)
    find_target(target)
    if path is not None:
        check_destination(path, filename_prefix)
    steps = as_recipe(
        recipe, preset, effort=effort, own_rules=config_file is not None, own_scheme=quant_scheme is not None
    )
    first, batches = batches_of(data, again=recipe is not None or any(step.name != "fold" for step in steps))
    loaded = load_model(model)
    metrics = {}
    if metric is not None:
        metrics["float"] = checked_metric("float", float(metric(open_session(loaded.model, providers))))
    judge, chosen = None, batches
    if recipe is None and any(KINDS[step.name].gain is not None for step in steps):
        judge, chosen = Judge.of(batches, _float_outputs(model, providers), find_effort(effort).judged)
    methods = _Methods(
        first=first,
        batches=batches,
        chosen=chosen,
        placing=next((step.options for step in steps if step.name == "layer_inputs"), None),
        ranging=any(step.name == "activation_ranges" for step in steps),
        rules={"preset": preset, "config_file": rules_for(target, config_file), "quant_scheme": quant_scheme},
        providers=providers,
        memory_budget=memory_budget,
        non_finite=non_finite,
        allow_unreached=allow_unreached,
        progress=progress,
    )
    front_end = FrontEnd(
        _copied,
        methods.simulate,
        lambda sim: _measured(sim, metric),
        _keep,
        methods.actions(),
        lambda sim, batch: _arrays(sim.run(batch)),
        methods.trial,
    )
    runner = ModelRunner(loaded, front_end, judge)
    report = run_recipe(
        steps,
        runner,
        float_metric=None if recipe is None else metrics.get("float"),
        on_harm=on_harm,
        lower_is_better=lower_is_better,
    )
    runner.sim.origin = origin_of(preset, steps, first, runner.sim.calibration_log)
    if metric is not None:
        found = float(metric(runner.sim.session)) if report.metric is None else report.metric
        metrics["quantized"] = checked_metric("quantized", found)
    exported = (
        None
        if path is None
        else runner.sim.export(path, filename_prefix, weight_only=weight_only, target=target)
    )
    measured = runner.sim.benchmark(target=target, weight_only=weight_only) if benchmark else None
    return Result(runner.sim, methods.folds, exported, metrics, report, measured)


@dataclass
class _Methods:
    """The steps of a recipe on ONNX models, with all that they need beside their own options.

    Attributes:
        first, batches: the example input, and the calibration data.
        chosen: the part of it on which methods choose; the rest judges them.
        placing: options of the step ``layer_inputs``, if the recipe has it.
        ranging: whether the recipe chooses ranges of activations anew.
        rules: what is asked for: ``preset``, ``config_file``, ``quant_scheme``.
        providers, memory_budget, non_finite, allow_unreached, progress: as for :func:`quantize`.
        folds: what the last folding did.
        float_model: what the last simulation was made of; methods of rounding leave it as it is.
    """

    first: Any
    batches: Iterable[Any]
    chosen: Iterable[Any]
    placing: Mapping[str, Any] | None
    ranging: bool
    rules: dict[str, Any]
    providers: Providers | None
    memory_budget: int | None
    non_finite: NonFinite
    allow_unreached: bool
    progress: bool
    folds: FoldReport = field(default_factory=FoldReport)
    float_model: Any = None

    def fold(self, loaded: Loaded) -> FoldReport:
        self.folds = fold_all_batch_norms(
            loaded, None, self.first, providers=self.providers, progress=self.progress
        )
        return self.folds

    def equalize(self, loaded: Loaded, *, absorb_bias: bool = False) -> EqualizeReport:
        """Equalize with what batch norms said that this step or one before folded."""
        folds = fold_all_batch_norms(
            loaded, None, self.first, providers=self.providers, progress=self.progress
        )
        moments = {**self.folds.moments, **folds.moments}
        return channels.equalize_bn_folded_model(
            loaded,
            None,
            moments,
            self.first,
            data=self.chosen,
            absorb_bias=absorb_bias,
            providers=self.providers,
            progress=self.progress,
        )

    def simulate(self, loaded: Loaded) -> QuantizationSimModel:
        self.float_model = loaded.model
        sim = QuantizationSimModel(
            loaded.model,
            self.first,
            **self.rules,
            providers=self.providers,
            memory_budget=self.memory_budget,
        )
        if self.ranging:
            keep_histograms(sim, () if self.placing is None else between_layers(sim, **self.placing))
        self.calibrate(sim)
        return sim

    def calibrate(self, sim: QuantizationSimModel, batches: Iterable[Any] | None = None) -> None:
        sim.compute_encodings(
            self.batches if batches is None else batches,
            progress=self.progress,
            non_finite=self.non_finite,
            allow_unreached=self.allow_unreached,
        )
        sim.quantizers.require_reached()

    def trial(self, loaded: Loaded, judge: Judge) -> QuantizationSimModel:
        """A simulation for a comparison, calibrated on the judge's batches."""
        sim = QuantizationSimModel(
            loaded.model, self.first, **self.rules, providers=self.providers, memory_budget=self.memory_budget
        )
        self.calibrate(sim, judge.batches)
        if self.placing is not None:
            layer_inputs(sim, **self.placing)
        return sim

    def widen(self, sim: QuantizationSimModel, **options: Any) -> WidenReport:
        """16 bits where 8 cost the output most."""
        from bitwright.algorithms.search.widen import widen
        from bitwright.onnx.adapters.program import OnnxSimulation

        return widen(OnnxSimulation(sim), self.chosen, **options)

    def correct_biases(
        self,
        sim: QuantizationSimModel,
        *,
        num_samples: int | None = None,
        layers_to_ignore: Iterable[str] = (),
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
        common = {"dummy_input": self.first, "providers": self.providers, "progress": self.progress}
        awq = {"weight" if name == "preset" else name: given for name, given in self.rules.items()}
        choose = partial(apply_reconstruction, inputs=self.chosen, progress=self.progress)
        return {
            "fold": action(self.fold),
            "fold_norms": action(channels.fold_norms, **common),
            "equalize": action(self.equalize),
            "smooth": action(channels.smooth_model, data=self.chosen, **common),
            "rotate": action(channels.rotate_model, **common),
            "awq": action(channels.awq_model, data=self.chosen, **awq, **common),
            "layer_inputs": action(layer_inputs),
            "activation_ranges": action(activation_ranges, calibrate=self.calibrate),
            "widen": Action(self.widen, _widen_options),
            "bias_correction": action(self.correct_biases),
            **weight_actions(choose, self.calibrate, _method_options),
        }


def _widen_options() -> Options:
    require_torch("widen")  # derivatives are taken on it
    from bitwright.algorithms.search.widen import widen

    return keyword_options(widen)


def _float_outputs(model: Source, providers: Providers | None) -> Callable[[Any], Sequence[Array]]:
    """What the model as given returns; its session is opened with the first batch."""

    @cache
    def opened() -> tuple[Any, Any]:
        loaded = load_model(model)
        return open_session(loaded.model, providers), input_specs(loaded.model)

    def outputs(batch: Any) -> Sequence[Array]:
        session, specs = opened()
        return _arrays(session.run(None, dict(as_feeds(batch, specs))))

    return outputs


def _arrays(outputs: Iterable[Any]) -> list[Array]:
    """Outputs as a judge takes them, one array each: of a sequence or a map all floats in a row."""
    return [one_array(y) for y in outputs]


def _method_options(name: str) -> Options:
    require_torch(name)  # what chooses weights is written on it
    from bitwright.algorithms.rounding.table import method_options

    return method_options(name)


def _copied(loaded: Loaded) -> Loaded:
    return replace(loaded, model=loaded.model.clone())


def _measured(sim: QuantizationSimModel, metric: Callable[[Any], float] | None) -> float:
    assert metric is not None  # without one, no recipe asks
    return float(metric(sim.session))


def _keep(sim: QuantizationSimModel) -> Undo:
    return sim.remember(parameters=True)
