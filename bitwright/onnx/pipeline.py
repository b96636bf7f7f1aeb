"""The whole path in one call: fold, simulate, calibrate and, if asked, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bitwright.algorithms.batch_norm_fold import FoldReport
from bitwright.algorithms.bias_correct import BiasReport
from bitwright.algorithms.layer_inputs import layer_inputs
from bitwright.algorithms.recipe import (
    FrontEnd,
    ModelRunner,
    OnHarm,
    RecipeLike,
    RecipeReport,
    action,
    as_recipe,
    batches_of,
    checked_metric,
    run_recipe,
    weight_actions,
)
from bitwright.core.model import Undo
from bitwright.core.spec import NonFinite, Preset
from bitwright.export.artefacts import Exported
from bitwright.onnx import ptq
from bitwright.onnx.batch_norm_fold import fold_all_batch_norms
from bitwright.onnx.load import Loaded, Source, load_model
from bitwright.onnx.quantsim import QuantizationSimModel
from bitwright.onnx.reconstruct import apply_reconstruction, require_torch
from bitwright.onnx.session import Providers, open_session


@dataclass(frozen=True)
class Result:
    """What :func:`quantize` returns.

    Attributes:
        sim: the calibrated simulation; ``sim.run(feeds)`` runs it.
        folds: which batch norms were folded, and why the others were not.
        exported: the files written, when a path was given.
        metrics: ``{"float": ..., "quantized": ...}`` when a metric was given.
        report: what each step of the recipe did; with a recipe and a metric, also to the metric.
    """

    sim: QuantizationSimModel
    folds: FoldReport
    exported: Exported | None
    metrics: dict[str, float]
    report: RecipeReport


def quantize(
    model: Source,
    data: Iterable[Any],
    preset: str | Preset = "w8a8",
    *,
    recipe: RecipeLike | None = None,
    config_file: str | Path | dict[str, Any] | None = None,
    quant_scheme: str | None = None,
    providers: Providers | None = None,
    memory_budget: int | None = None,
    metric: Callable[[Any], float] | None = None,
    lower_is_better: bool = False,
    on_harm: OnHarm = "report",
    path: str | Path | None = None,
    filename_prefix: str = "model",
    progress: bool = True,
    non_finite: NonFinite = "error",
) -> Result:
    """Quantize ``model`` in one line: fold batch norms, simulate under ``preset``, calibrate on ``data``, export.

    Args:
        model: path, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        data: feeds, each a dict, an array for a model with one input, or a tuple in the model's order. The first is also
            the example input; a generator is fine.
        preset: a row of ``PRESETS`` or a :class:`Preset`.
        recipe: post-training methods in their order, ``["fold", "equalize", {"adaround": {"iterations": 2000}}]``, or the
            path of a file that lists them; :func:`bitwright.algorithms.recipe.default_recipe` by default.
        config_file, quant_scheme, providers, memory_budget: as for :class:`QuantizationSimModel`.
        metric: ``metric(session) -> float`` of an ``InferenceSession``, measured on the float and on the simulated model,
            and after every step of a recipe that is given.
        lower_is_better: for metrics such as a perplexity.
        on_harm: ``"undo"`` takes a step back that made the metric worse, ``"report"`` keeps it and says so.
        path: folder to export to.
        filename_prefix: stem of the files.
        progress: show a progress bar on a terminal.
        non_finite: what to do with a batch that gives NaN or Inf: ``"error"``, ``"skip"`` or ``"clamp"``, as for
            :meth:`QuantizationSimModel.compute_encodings`.

    Raises:
        CalibrationError: ``data`` is empty, or gives NaN or Inf under the policy ``"error"``; or the metric is NaN.
        ConfigError: a recipe that cannot work.
        ModelError: the model cannot be read or run, or a feed does not fit.
    """
    steps = as_recipe(recipe, preset, own_rules=config_file is not None)
    first, batches = batches_of(data, again=recipe is not None or any(step.name != "fold" for step in steps))
    loaded = load_model(model)
    metrics = {}
    if metric is not None:
        metrics["float"] = checked_metric("float", float(metric(open_session(loaded.model, providers))))
    folds: list[FoldReport] = []

    def fold(target: Loaded) -> FoldReport:
        folds.append(fold_all_batch_norms(target, first, providers=providers, progress=progress))
        return folds[-1]

    def calibrate(sim: QuantizationSimModel) -> None:
        sim.compute_encodings(batches, progress=progress, non_finite=non_finite)

    goals: list[Any] = []  # the float model, which methods of rounding leave in the simulation no longer

    def correct_biases(
        sim: QuantizationSimModel, *, num_samples: int | None = None, layers_to_ignore: Iterable[str] = ()
    ) -> BiasReport:
        return ptq.apply_bias_correction(
            sim,
            batches,
            num_samples=num_samples,
            layers_to_ignore=layers_to_ignore,
            reference=goals[-1],
            progress=progress,
        )

    def simulate(work: Loaded) -> QuantizationSimModel:
        goals[:] = [work.model]
        sim = QuantizationSimModel(
            work.model,
            first,
            quant_scheme,
            config_file=config_file,
            providers=providers,
            preset=preset,
            memory_budget=memory_budget,
        )
        calibrate(sim)
        return sim

    common = {"dummy_input": first, "providers": providers, "progress": progress}
    actions = {
        "fold": action(fold),
        "fold_norms": action(ptq.fold_norms, **common),
        "equalize": action(ptq.equalize_model, **common),
        "smooth": action(ptq.smooth_model, data=batches, **common),
        "rotate": action(ptq.rotate_model, **common),
        "awq": action(
            ptq.awq_model,
            data=batches,
            weight=preset,
            config_file=config_file,
            quant_scheme=quant_scheme,
            **common,
        ),
        "layer_inputs": action(layer_inputs),
        "bias_correction": action(correct_biases),
        **weight_actions(
            partial(apply_reconstruction, inputs=batches, progress=progress), calibrate, _method_options
        ),
    }
    runner = ModelRunner(
        loaded, FrontEnd(_copied, simulate, lambda sim: _measured(sim, metric), _remember, actions)
    )
    report = run_recipe(
        steps,
        runner,
        float_metric=None if recipe is None else metrics.get("float"),
        on_harm=on_harm,
        lower_is_better=lower_is_better,
    )
    if metric is not None:
        found = float(metric(runner.sim.session)) if report.metric is None else report.metric
        metrics["quantized"] = checked_metric("quantized", found)
    exported = None if path is None else runner.sim.export(path, filename_prefix)
    return Result(runner.sim, folds[-1] if folds else FoldReport(), exported, metrics, report)


def _method_options(name: str) -> tuple[str, ...]:
    require_torch(name)  # what chooses weights is written on it
    from bitwright.algorithms.methods import method_options

    return method_options(name)


def _copied(loaded: Loaded) -> Loaded:
    return replace(loaded, model=loaded.model.clone())


def _measured(sim: QuantizationSimModel, metric: Callable[[Any], float] | None) -> float:
    assert metric is not None  # without one, no recipe asks
    return float(metric(sim.session))


def _remember(sim: QuantizationSimModel) -> Undo:
    """Keep initializers and quantizers of a simulation; the function returned brings them back."""
    tensors = {name: value.const_value for name, value in sim.marked.graph.initializers.items()}
    quantizers = sim.quantizers.remember()

    def restore() -> None:
        for name, tensor in tensors.items():
            if tensor is not None and sim.marked.graph.initializers[name].const_value is not tensor:
                sim.set_parameter(name, tensor.numpy())
        quantizers()

    return restore
