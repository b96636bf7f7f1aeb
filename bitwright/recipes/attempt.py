"""Run a recipe on a model: fold, simulate, calibrate, apply the steps and rate the result, for :func:`bitwright.quantize`."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwright.core.graph.operators import op_row
from bitwright.core.numerics.spec import NonFinite, Preset
from bitwright.core.simulation.calibration import fewer_samples, samples_in, slice_samples
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.sites import Site
from bitwright.errors import ModelError
from bitwright.export.files.atomic import FinishedLayers
from bitwright.export.targets import find_target, rules_for
from bitwright.methods.activations import between_layers, keep_histograms
from bitwright.methods.attention import has_attention
from bitwright.methods.bias_correction import BiasReport, apply_bias_correction, first_samples
from bitwright.methods.details import Detailed
from bitwright.methods.folding.batch_norm_fold import FoldReport, fold_all_batch_norms
from bitwright.methods.front_end import GivenModel, front_end_of
from bitwright.methods.options import Options, check_options, check_required, keyword_options
from bitwright.methods.rounding.apply import apply_reconstruction, require_torch
from bitwright.methods.runtime_repairs import StemReport, leave_stem_in_float
from bitwright.methods.scaling.equalize import EqualizeReport, equalize_opened
from bitwright.recipes.default_recipe import RecipeLike, as_recipe, find_effort
from bitwright.recipes.judge import Judge, Rating, batches_in, in_float, some_and_others
from bitwright.recipes.recipe import ROUNDING, OnHarm, RecipeReport, Runner, Step, integer_bits, metric_of, run_recipe

logger = logging.getLogger("bitwright")
_EXAMPLE = 5  # samples that show the calls of a float model, and whether a step changed what it computes
_PART = 8  # samples of which a method holds values at once
#: samples that calibrate simulations which are compared with each other: half of the data, between these bounds
_FEW, _TRIAL = 16, 32
_SHOWN = 3  # kinds of operators, or reasons, that an error names


@dataclass
class Work:
    """Finished layers of the steps of a call, from which the same call goes on after it was ended.

    Attributes:
        folder: with one folder per step; ``None`` keeps nothing.
        steps: how many have theirs.
    """

    folder: Path | None = None
    steps: int = 0

    def options(self, step: Step, known: Options) -> dict[str, Any]:
        """The options of the next step, with its folder where it keeps finished layers.

        A call with the same arguments has the same steps in the same order.
        """
        if self.folder is None or "cache_dir" not in known or "cache_dir" in step.options:
            return dict(step.options)
        self.steps += 1
        return {**step.options, "cache_dir": self.folder / f"{self.steps:02d}-{step.name}"}

    def clear(self) -> None:
        """Remove what steps keep, and the folder where nothing else is in it."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in self.folder.glob("[0-9][0-9]-*"):
            FinishedLayers(path).clear()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


@dataclass
class Job:
    """Arguments and data of a call of :func:`bitwright.quantize`; shared by all its attempts.

    Attributes:
        given: the model.
        recipe, effort, config_file, quant_scheme, target, metric, lower_is_better, on_harm: as for ``quantize``.
        providers, non_finite, allow_unreached, allow_float, progress: the same.
        work: of finished layers.
        first, batches: the example input, and the calibration data.
        chosen: the part of it that calibration and methods see.
        judge: who rates simulations by the rest.
        float_metric: of the float model.
    """

    given: GivenModel
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
    work: Work = field(default_factory=Work)
    first: Any = None
    batches: Iterable[Any] = ()
    chosen: Iterable[Any] = ()
    judge: Judge = field(default_factory=lambda: Judge([], lambda batch: []))
    float_metric: float | None = None

    def steps(self, preset: str | Preset) -> tuple[Step, ...]:
        """The recipe for a preset."""
        own = {"own_rules": self.config_file is not None, "own_scheme": self.quant_scheme is not None}
        return as_recipe(self.recipe, preset, effort=self.effort, **own)

    def reads_again(self, steps: Sequence[Step]) -> bool:
        """Whether the data are iterated more than once."""
        return self.recipe is not None or any(step.name != "fold" for step in steps)

    @cached_property
    def example(self) -> Any:
        """The first samples of :attr:`first`, on which float models are opened; all of them where the model takes no fewer."""
        return fewer_samples(self.first, _EXAMPLE, self.given.outputs)

    def parts(self, batch: Any) -> Iterator[Any]:
        """Yield slices of a batch, for methods that hold many values of one run; the batch where the model takes no fewer."""
        if self.example is self.first or slice_samples(batch, 0, 1) is None:
            yield batch
            return
        count = samples_in(batch)
        for start in range(0, count, _PART):
            yield slice_samples(batch, start, min(start + _PART, count))

    @cached_property
    def for_trials(self) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """Calibration batches for simulations that are only compared, spread over the data; and the others.

        There are none where that saves little; the others are ``None`` where another pass may bring them in another order. Two
        float models that compute the same differ by more than by the values that these batches miss.
        """
        if self.non_finite != "error":  # which batches are left out is known after all of them
            return (), ()
        rows, count = max(samples_in(self.first), 1), batches_in(self.chosen)
        wanted = min(_TRIAL, max(_FEW, rows * count // 2))
        return some_and_others(self.chosen, -(-wanted // rows))

    def divide(self, held_out: Iterable[Any] | None, steps: Sequence[Step]) -> None:
        """Split the data into those for calibration and methods, and those that rate the result."""
        self.chosen = self.batches
        outputs, names, most = self.given.outputs, self.given.output_names, find_effort(self.effort).judged
        if held_out is not None:
            self.judge = Judge.given(held_out, outputs, most, names)
        elif self.recipe is None and any(step.kind.gain is not None for step in steps):
            self.judge, self.chosen = Judge.of(self.batches, outputs, most, names)
        else:
            whence = "calibration saw: give held_out (--held-out) for a figure of other data"
            others = self.batches if self.reads_again(steps) else ()
            self.judge = Judge.of_seen(self.first, others, outputs, names, whence)


@dataclass(frozen=True, eq=False)
class _State:
    """State of the float model between two changes.

    Attributes:
        folded: whether its batch norms are folded.
        altered: whether another step than folding has changed it.
    """

    folded: bool = False
    altered: bool = False


@dataclass(frozen=True)
class _Made:
    """A calibrated simulation of one state of the float model, with the records of :class:`Attempt`.

    Attributes:
        rating: of a model that no step but folding has worked on; ``None`` of others.
        some_only: whether it is calibrated on :attr:`Job.for_trials` alone so far.
    """

    state: _State
    sim: Any
    rating: Rating | None
    stem: StemReport
    reference: Any
    some_only: bool = False


class Attempt(Runner):
    """One attempt to quantize a model under a preset; the runner of :func:`~bitwright.recipes.recipe.run_recipe`.

    Attributes:
        model: the float model as it stands; a copy.
        sim: the calibrated simulation, once there is one.
        judge: says what steps are worth; ``None`` where the recipe is the user's.
        changed: whether the last step did anything.
        report, rating: what became of the steps, and of the outputs.
        metric: of the simulation, as far as it is known.
        folds: what the last folding did.
        stem: which first convolutions the last simulation leaves in float.
        unchanged: rating of the simulation of the model that no step but folding has worked on, before a step worked on the
            simulation; ``None`` where none was rated.
    """

    def __init__(self, job: Job, preset: str | Preset) -> None:
        self.job, self.preset, self.steps = job, preset, job.steps(preset)
        rules = rules_for(job.target, job.config_file, preset)
        self._rules = {"preset": preset, "config_file": rules, "quant_scheme": job.quant_scheme}
        self._asked = {step.name: step.options for step in self.steps}
        # whose slow first convolutions are left in float: rules of the user's own say what is quantized
        self._target = job.target if job.config_file is None else None
        self._float_model: Any = None  # from before the simulation, for bias correction
        self.model, self.sim = job.given.copy(job.first), None  # type: Any, Any
        self.judge = None if job.recipe is not None else job.judge
        self.changed = False
        self.report, self.rating = RecipeReport(()), Rating()
        self.folds, self.stem = FoldReport(), StemReport()
        self.unchanged: Rating | None = None
        self._state = _State()  # of the float model: another one after every change
        self._made: list[_Made] = []
        self._said: set[str] = set()
        self._some_only = False  # how the last simulation was calibrated
        self._known: Rating | None = None  # of the simulation as it stands
        self.metric: float | None = None

    def run(self) -> Attempt:
        """Run the recipe and rate the resulting simulation."""
        job = self.job
        self.report = run_recipe(
            self.steps,
            self,
            float_metric=None if job.recipe is None else job.float_metric,
            on_harm=job.on_harm,
            lower_is_better=job.lower_is_better,
        )
        self.metric, self.rating = self.report.metric, self.rate()
        return self

    def final_metric(self) -> float:
        """The metric of the current simulation."""
        return self.measure() if self.metric is None else self.metric

    # -- from the float model to a simulation

    def simulate(self) -> None:
        """Create the calibrated simulation of the current float model, or take the one that a judge rated."""
        made, self._made = self._made_already(), []
        if made is None:
            self.sim = self._simulated(self.model)
            self._known = None if self._state.altered else self.unchanged
        else:
            self.sim, self._known, self.stem, self._float_model = made.sim, made.rating, made.stem, made.reference
            if made.some_only:
                self._calibrate_further()
                self._known = None

    def _made_already(self) -> _Made | None:
        """The simulation of the current float model, if the judge already rated one."""
        return next((made for made in self._made if made.state is self._state), None)

    def _trial(self) -> _Made:
        """Simulate a copy of the current float model; :meth:`simulate` reuses it if the model does not change."""
        made = self._made_already()
        if made is None:
            sim = self._simulated(self.job.given.copied(self.model), trial=True)
            rating = None if self._state.altered else self.unchanged
            made = _Made(self._state, sim, rating, self.stem, self._float_model, self._some_only)
            self._made = [*self._made[-1:], made]  # that of the model before the step that is judged, and after it
        return made

    def _simulated(self, work: Any, trial: bool = False) -> Any:
        """Make a simulation and calibrate it; one that is only compared with another on some batches, if these suffice."""
        if "bias_correction" in self._asked:
            self._float_model = self.job.given.reference(work)
        sim = self._placed(work)
        if "activation_ranges" in self._asked:
            keep_histograms(sim, self._left_in_float(sim))
        self._some_only = trial and self._calibrated_on_some(sim)
        if not self._some_only:
            self.calibrate(sim)
        self.job.judge.look_at_layers(sim)
        if not self._state.altered:
            self.unchanged = self.rated(sim)
        return sim

    def _left_in_float(self, sim: Any) -> tuple[str, ...]:
        """The sites that the step ``layer_inputs`` will switch off, if the recipe has it."""
        placing = self._asked.get("layer_inputs")
        return () if placing is None else between_layers(sim, export_target=self._target, **placing)

    def _calibrated_on_some(self, sim: Any) -> bool:
        """Calibrate on the batches of :attr:`Job.for_trials`, if there are such; returns whether every site was reached."""
        job = self.job
        some, _ = job.for_trials
        if not some:
            return False
        with sim.quantizers._calibrated_on_part():
            sim.compute_encodings(some, progress=job.progress, non_finite=job.non_finite)
        return not sim.quantizers.unreached()

    def _calibrate_further(self) -> None:
        """Calibrate the simulation, which has seen batches of :attr:`Job.for_trials`, on the others."""
        _, others = self.job.for_trials
        if others is None:
            self.calibrate(self.sim)
        else:
            self.calibrate(self.sim, others, resume=True)

    def take_in_held_out(self) -> None:
        """Let the ranges of the result take in the samples that judged it, as the plain simulation has ranges of all data.

        Weights, and what the steps chose, stay. The rating is the one from before.
        """
        judge = self.job.judge
        if judge.left_out and self.job.chosen is not self.job.batches:
            self.calibrate(self.sim, judge.left_out, resume=True)

    def plain(self) -> Any:
        """The simulation after folding only, with min-max ranges."""
        work = self.job.given.copy(self.job.first)
        self.fold(work)
        sim = self._placed(work)
        self.calibrate(sim)
        return sim

    def _placed(self, work: Any) -> Any:
        """Create a simulation, not calibrated yet."""
        sim = self.job.given.simulation(work, self.job.first, self._rules)
        sim.quantizers._share_log(self._said)
        check_layers(sim, self.job.allow_float or self.job.config_file is not None)
        if self._target is not None:
            self.stem = leave_stem_in_float(sim, self._target)
        return sim

    def calibrate(self, sim: Any, batches: Iterable[Any] | None = None, *, resume: bool = False) -> None:
        """Compute encodings on the calibration data, or on all data where some sites are reached only by the held-out part.

        Args:
            sim: the simulation.
            batches: instead of the calibration data.
            resume: add them to what the last calibration saw.
        """
        job = self.job
        part = batches is None and job.chosen is not job.batches
        options: dict[str, Any] = {"progress": job.progress, "non_finite": job.non_finite}
        if resume:
            options["resume"] = True
        given = job.chosen if batches is None else batches
        # what the batches outside of a part reach is not known yet
        with sim.quantizers._calibrated_on_part() if part else nullcontext():
            sim.compute_encodings(given, allow_unreached=job.allow_unreached and not part, **options)
        if part:
            if sim.quantizers.unreached():
                logger.info("calibration reads what judges too: some sites are reached by no other batch")
                job.judge.whence += ", which calibration reads as well, as no other batch reaches some sites"
                job.chosen = job.batches
                sim.compute_encodings(job.batches, allow_unreached=job.allow_unreached, **options)
            else:
                sim.quantizers.settle_unreached(allow=job.allow_unreached)
        sim.quantizers.require_reached()

    def rated(self, sim: Any, without: Callable[[Site], bool] | None = None) -> Rating:
        """Rate the outputs of a simulation against those of the float model, with some quantizers disabled."""
        with in_float(sim.quantizers, without) if without else nullcontext():
            return self.job.judge.rate(self.job.judge.answers(sim))

    # -- what a recipe asks between steps

    def measure(self) -> float:
        """The metric of the simulation; before there is one, of one that is made for it and dropped."""
        sim = self._simulated(self.job.given.copied(self.model)) if self.sim is None else self.sim
        assert self.job.metric is not None
        return metric_of(self.job.metric, sim._metric_target)

    def rate(self, *, float_weights: bool = False) -> Rating:
        """The judge's rating of the simulation; before there is one, of a simulation of the current model."""
        sim, off = self.sim, frozenset[str]()
        if sim is None:
            made = self._trial()
            sim, off = made.sim, frozenset(self._left_in_float(made.sim))
            if made.rating is not None and not off and not float_weights:
                return made.rating
        elif not float_weights and self._known is not None:
            return self._known
        self.job.judge.look_at_layers(sim)
        found = self.rated(sim, lambda s: s.name in off or (float_weights and s.role == "weight"))
        if sim is self.sim and not float_weights:
            self._known = found
        return found

    def keep(self) -> Undo:
        """Remember the state; the function returned brings it back."""
        if self.sim is not None:
            undo, known = self.sim.remember(parameters=True), self._known

            def bring_back() -> None:
                undo()
                self._known = known

            return bring_back
        saved, state = self.job.given.copied(self.model), self._state

        def restore() -> None:
            self.model, self._state = saved, state

        return restore

    # -- steps

    def check(self, step: Step) -> None:
        """Refuse options the step's function does not have, and values it does not take, before any work is done.

        Raises:
            ConfigError: see :func:`bitwright.methods.options.check_options`; or torch is missing.
        """
        function, bound, options = self._function(step)
        check_options(step.name, step.options, options)
        check_required(step.name, function, {*bound, *step.options}, options)

    def apply(self, step: Step) -> str:
        """Run the step; returns one line on what it did."""
        function, bound, known = self._function(step)
        parameters = inspect.signature(function).parameters
        options = self.job.work.options(step, known)
        target = self.model if step.kind.phase == "float" else self.sim
        if next(iter(parameters)) == "view":
            opened = front_end_of(target).open_model(target, None, self.job.example, step.name, self.job.providers)
            checks = {"changed": opened.changed} if "changed" in parameters else {}
            report = function(opened.view, **checks, **bound, **options)
            opened.finish(report)
        else:
            report = function(target, **bound, **options)
        self.changed = bool(getattr(report, "changed", True))
        if self.changed:
            self._known = None
        self.expected = float(getattr(report, "gain", 0.0)) if not step.kind.fitted else 0.0
        self.details = report.details() if isinstance(report, Detailed) else None
        if target is self.model and self.changed:
            self._state = replace(self._state, altered=self._state.altered or step.name != "fold")
        return "" if report is None else str(getattr(report, "summary", None) or str(report).partition("\n")[0])

    def _function(self, step: Step) -> tuple[Callable[..., Any], Mapping[str, Any], Options]:
        """The function of a step, the arguments it is given by name, and the options that the recipe sets."""
        name, run = step.name, step.kind.run
        if step.run is None and name in ("seq_mse", *ROUNDING):  # written on torch
            require_torch(name)
            from bitwright.methods.rounding.table import method_options

            return self.choose_weights, {"method": name}, method_options(name)
        if step.run is None and name == "widen":  # derivatives are taken on torch
            require_torch(name)
            from bitwright.recipes.widen import widen

            return self.widen, {}, keyword_options(widen, bound=("times",))
        if run is None:
            function = getattr(self, name)
            return function, {}, keyword_options(function)
        if isinstance(run, str):
            module, _, attribute = run.rpartition(".")
            run = getattr(importlib.import_module(module), attribute)
        assert callable(run)
        names = inspect.signature(run).parameters
        bound = {parameter: value for parameter, value in self.given().items() if parameter in names}
        if step.run is not None:
            return run, bound, keyword_options(run, {next(iter(names)), *bound, "changed"}, by_place=True)
        return run, bound, keyword_options(run, {*bound, "changed"})

    def given(self) -> dict[str, Any]:
        """Arguments that the function of a step receives where it has a parameter of that name; see :data:`GIVEN`."""
        return {
            "data": self.job.chosen,
            "dummy_input": self.job.first,
            "providers": self.job.providers,
            "progress": self.job.progress,
            "calibrate": self.calibrate,
            "weight": self._rules["preset"],
            "config_file": self._rules["config_file"],
            "quant_scheme": self._rules["quant_scheme"],
            "export_target": self._target,
        }

    def fold(self, work: Any) -> FoldReport:
        """Fold batch norms."""
        job = self.job
        self.folds = fold_all_batch_norms(work, None, job.example, providers=job.providers, progress=job.progress)
        self._state = replace(self._state, folded=True)
        return self.folds

    def equalize(
        self,
        work: Any,
        *,
        absorb_bias: bool = False,
        keep_bounds: bool = False,
        only_without_attention: bool = False,
        weight_noise: float = 1.0,
        worth: float = 0.0,
        samples: int | None = None,
    ) -> EqualizeReport:
        """Equalize with the moments of folded batch norms; ``only_without_attention`` skips models with attention.

        ``weight_noise`` is the share of the noise of nearest rounding that weights will have, ``worth`` how many dB less noise
        is expected at least of a model that is equalized.

        Other moments are measured on ``samples`` of the data, or on all of them.
        """
        job, before = self.job, self.folds
        own = FoldReport()
        if not self._state.folded:
            own = fold_all_batch_norms(work, None, job.example, providers=job.providers, progress=job.progress)
        opened = front_end_of(work).open_model(work, None, job.example, "equalize", job.providers)
        if only_without_attention and has_attention(opened.view.graph()):
            return EqualizeReport(left_alone="left alone, as the model has an attention")
        moments = {**before.moments, **own.moments}
        options: dict[str, Any] = {"absorb_bias": absorb_bias, "keep_bounds": keep_bounds}
        options |= {"weight_noise": weight_noise, "worth": worth}
        data = (part for batch, _ in first_samples(job.chosen, samples) for part in job.parts(batch))
        return equalize_opened(opened, moments, job.progress, data=data, **options)

    def widen(self, sim: Any, **options: Any) -> Any:
        """Widen activations whose 8 bits cost the outputs most to 16 bits or float, as the target supports."""
        from bitwright.recipes.widen import widen

        row = None if self._target is None else find_target(self._target)
        wide = {} if row is None else {"bits": row.wide_bits, "times": row.kernel_times}
        return widen(front_end_of(sim).steppable(sim, None), self.job.chosen, **{**wide, **options})

    def choose_weights(self, sim: Any, *, method: str, **options: Any) -> Any:
        """Choose integer weights; activations are calibrated again where weights have fewer than 8 bits."""
        report = apply_reconstruction(sim, self.job.chosen, method, progress=self.job.progress, **options)
        # of eight bits, nearest rounding has shown the same ranges
        if any(integer_bits(site.spec) < 8 for site in sim.quantizers.values() if site.role == "weight"):
            self.calibrate(sim)
        return report

    def bias_correction(
        self, sim: Any, *, num_samples: int | None = None, layers_to_ignore: Iterable[str] = ()
    ) -> BiasReport:
        """Correct the bias of every layer by the mean error of its output."""
        return apply_bias_correction(
            sim, self.job.chosen, num_samples=num_samples, layers_to_ignore=layers_to_ignore,
            reference=self._float_model, progress=self.job.progress,
        )  # fmt: skip


def check_layers(sim: Any, allow_float: bool) -> None:
    """Refuse a simulation in which no layer with weights and no product of activations is quantized.

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
    """The most frequent of ``names``, with their counts."""
    shown = ", ".join(f"{count} {name}" for name, count in names.most_common(_SHOWN))
    return shown + (", ..." if len(names) > _SHOWN else "")
