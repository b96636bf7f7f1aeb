"""Recipes: post-training methods in a row, and what each of them did to the metric.

A recipe is a list of steps. Steps of the phase ``float`` change the float model without changing its function; then the
simulation is made and calibrated; steps of the phase ``simulation`` choose roundings, scales and biases in it. This
module knows names, order and bookkeeping; a :class:`ModelRunner` carries the steps out.

What a recipe did, step by step: the report, and the book it is written from.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.placement.config import read_file
from bitwright.core.simulation.float_model import Undo
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, close_matches
from bitwright.methods.options import Options, check_options, keyword_options
from bitwright.recipes.judge import Judge, weights_in_float
from bitwright.tables import Tabular, html_table, text_table

logger = logging.getLogger("bitwright")

_LEFT_OUT = "left out: "
_NOISE = 1e-3  # changes of the metric below this share of it are not harm


@dataclass(frozen=True)
class Outcome:
    """What one step did.

    Attributes:
        step: as written, or ``float`` and ``no step`` for the first two lines.
        metric: after it, on the simulated model; ``None`` when no metric was given.
        change: of the metric, positive for the better.
        note: what the step says of itself, or why it was undone.
        kept: whether it is in effect.
        sqnr: signal-to-noise ratio of the outputs before and after it, in dB, where a judge was asked.
        changed: whether it did anything.
    """

    step: str
    metric: float | None
    change: float | None
    note: str = ""
    kept: bool = True
    sqnr: tuple[float, float] | None = None
    changed: bool = True

    @property
    def hurts(self) -> bool:
        """Whether the metric became worse by this step, by more than a thousandth of itself."""
        if self.change is None or self.metric is None:
            return False
        return self.change < -_NOISE * abs(self.metric)


@dataclass(frozen=True)
class RecipeReport(Tabular, Sequence[Outcome]):
    """One line per step; a table when printed.

    Attributes:
        outcomes: in order.
        judged: on what the outputs were compared with those of the float model, if they were.
    """

    _rows = "outcomes"

    outcomes: tuple[Outcome, ...]
    judged: str = ""

    def __getitem__(self, index: int) -> Outcome:  # type: ignore[override]
        return self.outcomes[index]

    def __len__(self) -> int:
        return len(self.outcomes)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    @property
    def metric(self) -> float | None:
        """The metric in effect at the end; ``None`` where none was measured."""
        kept = [o.metric for o in self.outcomes if o.kept]
        return kept[-1] if kept else None

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows; the columns of the metric are left out where no step was measured by one."""
        measured = any(o.metric is not None for o in self.outcomes)
        rows = []
        for o in self.outcomes:
            metric = "" if o.metric is None else f"{o.metric:.5g}"
            change = "" if o.change is None else f"{o.change:+.3g}"
            back = not o.kept and not o.note.startswith(_LEFT_OUT)
            noise = "" if o.sqnr is None else f"; output {o.sqnr[0]:.2f} -> {o.sqnr[1]:.2f} dB"
            told = f"{'undone: ' if back else ''}{o.note}{noise}"
            rows.append([o.step, metric, change, told] if measured else [o.step, told])
        return ["step", "metric", "change", "note"] if measured else ["step", "note"], rows

    def _lines(self) -> list[str]:
        return [f"outputs compared with float {self.judged}"] if self.judged else []

    def __str__(self) -> str:
        head, rows = self._cells()
        return "\n".join([text_table(head, rows, right=(1, 2) if len(head) > 2 else ()), *self._lines()])

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), notes=self._lines())


def metric_of(metric: Callable[[Any], Any], model: Any) -> float:
    """What ``metric`` returns for ``model``, as a number.

    Raises:
        CalibrationError: it returns no number.
    """
    found = metric(model)
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        shown = "None" if found is None else f"{repr(found)[:80]} ({type(found).__name__})"
        raise CalibrationError(
            f"metric {getattr(metric, '__name__', type(metric).__name__)}",
            f"it returned {shown}, which is not a number",
            "end it with a return statement whose value is one number, for example an accuracy",
        ) from error


def checked_metric(step: str, metric: float) -> float:
    """``metric`` itself.

    Raises:
        CalibrationError: it is NaN.
    """
    if math.isnan(metric):
        raise CalibrationError(
            step,
            "the metric is NaN",
            "run the metric on the float model first; check it for empty batches and divisions by zero",
        )
    return metric


class Book:
    """The outcomes so far, and the metric in effect."""

    def __init__(self, lower_is_better: bool) -> None:
        self.sign = -1.0 if lower_is_better else 1.0
        self.outcomes: list[Outcome] = []

    def _last(self) -> float | None:
        # the float model is not a predecessor: its metric is the goal
        kept = [o.metric for o in self.outcomes[1:] if o.kept and o.metric is not None]
        return kept[-1] if kept else None

    def add(
        self,
        step: str,
        metric: float | None,
        note: str = "",
        sqnr: tuple[float, float] | None = None,
        changed: bool = True,
    ) -> Outcome:
        """Write down a step."""
        metric = metric if metric is None else checked_metric(step, metric)
        last = self._last()
        change = None if metric is None or last is None else self.sign * (metric - last)
        self.outcomes.append(Outcome(step, metric, change, note, sqnr=sqnr, changed=changed))
        logger.info("%s: %s", step, note or "done")
        return self.outcomes[-1]

    def leave_out(self, step: str, why: BitwrightError) -> None:
        """Write down an optional step that cannot be done."""
        logger.warning("%s is left out: %s", step, why)
        self.outcomes.append(Outcome(step, None, None, f"{_LEFT_OUT}{why}", kept=False))

    def take_back(self, count: int = 1) -> None:
        """The steps written last are no longer in effect."""
        self.outcomes[-count:] = [replace(outcome, kept=False) for outcome in self.outcomes[-count:]]


Phase = Literal["float", "simulation"]


@dataclass(frozen=True)
class Kind:
    """A row of :data:`KINDS`.

    Attributes:
        phase: on what the step works.
        run: the function that carries it out, or ``"module.function"``, imported when a recipe has the step. It is called with
            the float model or the simulation, with what its parameters ask for by name (:func:`declared_actions`), and with the
            options of the step, its other keyword-only parameters. If its first parameter is ``view``, it works on a
            :class:`~bitwright.core.simulation.float_model.FloatModel` of either front end and returns a
            :class:`~bitwright.methods.layers.Reversible`. ``None`` where the caller of the recipe brings the action.
        after: steps that must come earlier where a recipe has both: they would undo or miss what this one does.
        instead_of: steps that decide the same thing, so that a recipe has one of them at most.
        does: one phrase, for tables and ``--help``.
        gain: dB of the outputs that the step must bring where a judge is asked (:mod:`bitwright.recipes.judge`);
            ``None`` for steps that are not put to one.
        apart: whether the judge leaves weights in float where a step that rounds them comes later: their noise at nearest
            rounding, twenty times what the rounding leaves, would hide that of the activations.
        joined: whether it may lose alone if it gains together with the step that rounds weights after it.
    """

    phase: Phase
    does: str
    after: tuple[str, ...] = ()
    instead_of: tuple[str, ...] = ()
    gain: float | None = None
    apart: bool = False
    joined: bool = False
    run: Callable[..., Any] | str | None = None


_WORTH = 0.1  # dB of the outputs that are worth clipped values, or 16 bits
_RANGES = ("layer_inputs", "activation_ranges", "widen")
_ROUNDING = ("gptq", "adaround", "brecq", "qdrop", "flexround")


def _rounding(does: str) -> Kind:
    return Kind("simulation", does, (*_RANGES, "seq_mse"), _ROUNDING, gain=0.0)


KINDS: dict[str, Kind] = {
    "fold": Kind("float", "batch norms into the layers before them"),
    "fold_norms": Kind(
        "float",
        "weights of layer and RMS norms into the layers after them",
        run="bitwright.methods.folding.norm_fold.fold_norms",
    ),
    "equalize": Kind("float", "balance channel ranges of neighbouring layers", ("fold",), gain=0.0),
    "smooth": Kind(
        "float",
        "move activation outliers into weights",
        ("fold_norms", "rotate"),
        gain=0.0,
        run="bitwright.methods.scaling.smooth.smooth_model",
    ),
    "rotate": Kind(
        "float",
        "spread outliers by Hadamard rotations",
        ("fold_norms",),
        run="bitwright.methods.scaling.rotate.rotate_model",
    ),
    "awq": Kind(
        "float",
        "scale channels so that rounded weights change outputs least",
        ("fold_norms", "equalize", "smooth", "rotate"),
        run="bitwright.methods.scaling.awq.awq_model",
    ),
    "layer_inputs": Kind(
        "simulation",
        "keep activations in float that no layer with a weight reads",
        run="bitwright.methods.layer_inputs.layer_inputs",
    ),
    "activation_ranges": Kind(
        "simulation",
        "activation ranges by least squared error",
        ("layer_inputs",),
        gain=_WORTH,
        apart=True,
        run="bitwright.methods.activation_ranges.activation_ranges",
    ),
    "widen": Kind(
        "simulation",
        "16 bits, or float, where 8 bits cost the outputs most",
        ("layer_inputs", "activation_ranges"),
        gain=_WORTH,
        apart=True,
    ),
    "seq_mse": Kind("simulation", "weight ranges by output error, layer after layer", _RANGES, gain=0.0, joined=True),
    "gptq": _rounding("round weights column by column with error feedback"),
    "adaround": _rounding("learn each weight's rounding, layer after layer"),
    "brecq": _rounding("learn each weight's rounding, block after block"),
    "qdrop": _rounding("as brecq, with activation quantizers dropped at random"),
    "flexround": _rounding("learn scales and roundings together"),
    "bias_correction": Kind("simulation", "take the mean error out of every layer's output", _ROUNDING, gain=0.0),
}


@dataclass(frozen=True)
class Step:
    """One step of a recipe: a row of :data:`KINDS` and the options of its function.

    A step that is ``optional`` is left out, with the reason in the report, where it cannot be done.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


def parse_recipe(steps: Iterable[str | Mapping[str, Any] | Step], source: str = "recipe") -> tuple[Step, ...]:
    """Steps from what a user wrote: names, ``{name: {option: value}}``, or :class:`Step` objects.

    Raises:
        ConfigError: an unknown step (with close matches), a step twice, or an order that cannot work.

    >>> [str(step) for step in parse_recipe(["fold", {"adaround": {"iterations": 2000}}])]
    ['fold()', 'adaround(iterations=2000)']
    """
    if isinstance(steps, (str, Mapping)) or not isinstance(steps, Iterable):
        raise ConfigError(source, f"a recipe is a list of steps, not {steps!r:.300}", f"write [{steps!r:.300}]")
    parsed = tuple(_parse_step(item, source) for item in steps)
    _check_order(parsed, source)
    return parsed


def load_recipe(path: str | Path) -> tuple[Step, ...]:
    """The recipe of a YAML, TOML or JSON file with the key ``recipe``.

    Raises:
        ConfigError: the file cannot be read, has another key, or its recipe cannot work.
    """
    data = read_file(Path(path), ("recipe",))
    unknown = next((key for key in data if key != "recipe"), None)
    if unknown is not None or "recipe" not in data:
        problem = "it has no recipe" if unknown is None else f"unknown key {unknown!r}"
        raise ConfigError(str(path), problem, "write a list of steps under the key recipe")
    return parse_recipe(() if data["recipe"] is None else data["recipe"], str(path))


def _parse_step(item: str | Mapping[str, Any] | Step, source: str) -> Step:
    if isinstance(item, str):
        item = Step(item)
    if isinstance(item, Mapping):
        if len(item) != 1:
            raise ConfigError(source, f"{dict(item)!r:.300} is not one step", "write {step: {option: value}}")
        ((name, options),) = item.items()
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(
                source, f"the options of {name!r:.100} are {options!r:.100}", f"write {{{name}: {{option: value}}}}"
            )
        item = Step(str(name), {str(key): value for key, value in (options or {}).items()})
    if not isinstance(item, Step):
        problem = f"{item!r:.100} is a {type(item).__name__}, not one step"
        raise ConfigError(source, problem, "write step or {step: {option: value}}")
    if item.name not in KINDS:
        raise ConfigError(
            source, f"there is no step {item.name!r}{close_matches(item.name, KINDS)}", f"use {', '.join(KINDS)}"
        )
    return item


def _check_order(steps: Sequence[Step], source: str) -> None:
    seen: dict[str, int] = {}
    for at, step in enumerate(steps):
        kind = KINDS[step.name]
        for earlier, where in seen.items():
            rivals = {step.name, *kind.instead_of}
            if earlier in rivals:
                raise ConfigError(
                    source,
                    f"step {at + 1} ({step.name}) decides again what step {where + 1} ({earlier}) decided",
                    "keep one of them",
                )
            wrong_phase = kind.phase == "float" and KINDS[earlier].phase == "simulation"
            if wrong_phase or step.name in KINDS[earlier].after:
                why = (
                    f"it changes the float model, and {earlier} has worked on its simulation"
                    if wrong_phase
                    else f"{earlier} relies on it"
                )
                raise ConfigError(
                    source, f"step {at + 1} ({step.name}) comes too late: {why}", f"put {step.name} before {earlier}"
                )
        seen[step.name] = at


def integer_bits(spec: QuantSpec | None) -> int:
    """Width of an integer format; more than any of them for others."""
    return spec.format.bits if spec is not None and isinstance(spec.format, IntFormat) else 64


@dataclass(frozen=True)
class Action:
    """How a front end carries out one step.

    Attributes:
        run: (the model in the phase ``float``, the simulation in the other, then options) -> the report: its ``summary``
            or first line is written down, and its ``changed`` says whether anything was done.
        options: what it takes, with annotations; asked for when a recipe is checked.
    """

    run: Callable[..., Any]
    options: Callable[[], Options]


def action(function: Callable[..., Any], **bound: Any) -> Action:
    """An action that calls ``function(target, **bound, **options)``; its options are the keyword-only parameters."""
    return Action(
        lambda target, **options: function(target, **bound, **options), lambda: keyword_options(function, bound)
    )


def declared_actions(given: Mapping[str, Any], opened: Callable[[Any, str], Any]) -> dict[str, Action]:
    """Actions of the rows of :data:`KINDS` that name their function.

    Args:
        given: what functions are called with where they have a parameter of that name.
        opened: (model, step) -> an :class:`~bitwright.methods.front_end.Opened`, for functions that work on a ``view``;
            they may also ask for ``changed``, which says what the model computes differently since it was opened.
    """

    def declared(step: str, run: Callable[..., Any] | str) -> Action:
        def made() -> Action:
            function = _imported(run) if isinstance(run, str) else run
            names = list(inspect.signature(function).parameters)
            bound = {name: value for name, value in given.items() if name in names}
            return _on_view(function, step, bound, opened) if names[0] == "view" else action(function, **bound)

        return Action(lambda target, **options: made().run(target, **options), lambda: made().options())

    return {name: declared(name, kind.run) for name, kind in KINDS.items() if kind.run is not None}


def _on_view(
    function: Callable[..., Any], step: str, bound: Mapping[str, Any], opened: Callable[[Any, str], Any]
) -> Action:
    def call(target: Any, **options: Any) -> Any:
        model = opened(target, step)
        asked = "changed" in inspect.signature(function).parameters
        report = function(model.view, **({"changed": model.changed} if asked else {}), **bound, **options)
        model.finish(report)
        return report

    return Action(call, lambda: keyword_options(function, {*bound, "changed"}))


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def weight_actions(
    choose: Callable[..., Any], calibrate: Callable[[Any], None], options: Callable[[str], Options]
) -> dict[str, Action]:
    """Actions of the steps that choose weights on the grid.

    Args:
        choose: ``choose(sim, method=name, **options)``.
        calibrate: finds the ranges of the activations anew for the weights chosen; called where these have fewer than 8 bits.
        options: of a method.
    """

    def one(name: str) -> Action:
        def run(sim: Any, **given: Any) -> Any:
            report = choose(sim, method=name, **given)
            # of eight bits, nearest rounding has shown the same ranges
            if any(integer_bits(s.spec) < 8 for s in sim.quantizers.values() if s.role == "weight"):
                calibrate(sim)
            return report

        return Action(run, lambda: options(name))

    return {name: one(name) for name in ("seq_mse", *_ROUNDING)}


def _said(report: object) -> str:
    return str(getattr(report, "summary", None) or str(report).partition("\n")[0])


@dataclass(frozen=True)
class FrontEnd:
    """What a :class:`ModelRunner` asks of a front end.

    Attributes:
        copy: model -> an independent copy.
        simulate: model, which it may keep -> calibrated simulation.
        measure: simulation -> metric.
        remember: simulation -> how to bring its present state back.
        actions: by step.
        outputs: (simulation, batch) -> its outputs, as a judge compares them.
        trial: model, which it may keep -> simulation calibrated on the judge's batches alone, for a comparison.
    """

    copy: Callable[[Any], Any]
    simulate: Callable[[Any], Any]
    measure: Callable[[Any], float]
    remember: Callable[[Any], Undo]
    actions: Mapping[str, Action]
    outputs: Callable[[Any, Any], Sequence[Any]] | None = None
    trial: Callable[[Any, Judge], Any] | None = None


class ModelRunner:
    """A model that steps are carried out on, in either front end.

    Attributes:
        model: the float model as it stands; its own copy.
        sim: the calibrated simulation, once there is one.
        judge: says what a step is worth; ``None`` keeps every step.
        changed: whether the last step did anything.
    """

    def __init__(self, model: Any, front_end: FrontEnd, judge: Judge | None = None) -> None:
        self.model, self._front, self.judge = model, front_end, judge
        self.sim: Any = None
        self.changed = False

    def check(self, step: Step) -> None:
        """Refuse options the step's function does not have, and values it does not take, before any work is done.

        Raises:
            ConfigError: see :func:`bitwright.methods.options.check_options`.
        """
        check_options(step.name, step.options, self._front.actions[step.name].options())

    def apply(self, step: Step) -> str:
        """Carry the step out; returns one line on what it did."""
        target = self.model if KINDS[step.name].phase == "float" else self.sim
        report = self._front.actions[step.name].run(target, **step.options)
        self.changed = bool(getattr(report, "changed", True))
        return _said(report)

    def simulate(self) -> None:
        """Make the calibrated simulation of the float model as it stands."""
        self.sim = self._front.simulate(self.model)

    def measure(self) -> float:
        """The metric of the simulation; in the phase ``float``, of one that is made for it and dropped."""
        sim = self._front.simulate(self._front.copy(self.model)) if self.sim is None else self.sim
        return float(self._front.measure(sim))

    def sqnr(self, *, float_weights: bool = False) -> float:
        """What the judge says of the simulation, or of the one the float model would have now, in dB.

        Args:
            float_weights: let the simulation's weights be in float meanwhile.
        """
        outputs, trial = self._front.outputs, self._front.trial
        assert self.judge is not None and outputs is not None and trial is not None
        sim = trial(self._front.copy(self.model), self.judge) if self.sim is None else self.sim
        with weights_in_float(sim.quantizers) if float_weights else nullcontext():
            return self.judge.sqnr(lambda batch: outputs(sim, batch))

    def keep(self) -> Undo:
        """Remember the state; the function returned brings it back."""
        if self.sim is not None:
            return self._front.remember(self.sim)
        saved = self._front.copy(self.model)
        return lambda: setattr(self, "model", saved)


OnHarm = Literal["report", "undo"]


def run_recipe(
    steps: Sequence[Step],
    runner: ModelRunner,
    *,
    float_metric: float | None = None,
    on_harm: OnHarm = "report",
    lower_is_better: bool = False,
) -> RecipeReport:
    """Carry out ``steps`` and leave the runner with a calibrated simulation.

    Args:
        steps: as :func:`parse_recipe` gives them.
        runner: the model.
        float_metric: metric of the float model; ``None`` when there is no metric, and then nothing is measured.
        on_harm: what becomes of a step that makes the metric worse: ``report`` keeps it and says so, ``undo`` reverts
            it.
        lower_is_better: for perplexities and errors.

    Raises:
        ConfigError: an option that a step does not have, or an unknown ``on_harm``; before any work.
        CalibrationError: the metric is NaN.
        KeyboardInterrupt: Ctrl-C; a note on it names the step. A model that is treated in part is not a result, so
            none is returned.
    """
    if on_harm not in ("report", "undo"):
        raise ConfigError("on_harm", f"{on_harm!r} is neither 'report' nor 'undo'", "use one of them")
    impossible = _check(steps, runner)
    book = Book(lower_is_better)
    if float_metric is not None:
        book.add("float", float_metric)
        book.add("no step", runner.measure())
    run = _Run(runner, book, _Judging(runner), float_metric is not None, on_harm)
    simulated = False
    queue = deque(enumerate(steps))
    while queue:
        index, step = queue.popleft()
        if index in impossible:
            book.leave_out(str(step), impossible[index])
            continue
        if KINDS[step.name].phase == "simulation" and not simulated:
            runner.simulate()
            run.judging.begin()
            simulated = True
        later = [other for place, other in enumerate(steps) if place > index and place not in impossible]
        if run.carry_out(step, later):
            queue.appendleft((index, step))  # without the one before it
    if not simulated:
        runner.simulate()
    return RecipeReport(tuple(book.outcomes), run.judging.where)


@dataclass(frozen=True)
class _Verdict:
    """What a step was worth: the judge's numbers before and after it, of what, and whether it stays."""

    sqnr: tuple[float, float]
    kept: bool
    float_weights: bool
    both: Undo | None = None  # undoes this step and the one that is judged with it

    def said(self, note: str) -> str:
        """What the step says of itself, with what the numbers stand for."""
        more = "; with float weights" if self.float_weights else ""
        return f"{note}{more}{'' if self.both is None else '; with the step before'}"


class _Judging:
    """Puts the steps that ask for it before the runner's judge, if it has one."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._before: float | None = None
        self._float_weights = False
        self.pending: Undo | None = None  # undoes a step that waits for the one it is judged with
        self.where = ""

    def begin(self) -> None:
        """The simulation is made: numbers of trials do not compare with its own."""
        self._before = None

    def verdict(self, step: Step, undo: Undo, later: Sequence[Step]) -> _Verdict | None:
        """Of the step just done; ``None`` where nothing is asked."""
        runner, kind = self._runner, KINDS[step.name]
        rounded_later = any(other.name in _ROUNDING for other in later)
        if runner.judge is None or not runner.judge.possible or not (runner.changed or self.pending):
            return None
        if kind.gain is None:
            self._before = None
            return None
        both, self.pending = self.pending, None
        verdict = self._compared(both or undo, kind.gain, kind.apart and rounded_later, both)
        if kind.joined and rounded_later and not verdict.kept:
            self.pending = undo
            return replace(verdict, kept=True)  # for now
        return verdict

    def give_up(self) -> bool:
        """Undo the step that waits, if one does: what it waited for could not be done. Whether there was one."""
        undo, self.pending = self.pending, None
        if undo is not None:
            undo()
        return undo is not None

    def _compared(self, undo: Undo, gain: float, apart: bool, both: Undo | None) -> _Verdict:
        runner = self._runner
        assert runner.judge is not None
        self.where = runner.judge.where
        if self._before is None or apart != self._float_weights:
            again = runner.keep()
            undo()
            self._before, self._float_weights = runner.sqnr(float_weights=apart), apart
            again()
        before, after = self._before, runner.sqnr(float_weights=apart)
        kept = after >= before + gain
        self._before = after if kept else before
        return _Verdict((before, after), kept, apart, both)


@dataclass(frozen=True)
class _Run:
    """A recipe under way."""

    runner: ModelRunner
    book: Book
    judging: _Judging
    measured: bool  # with the metric, after each step
    on_harm: OnHarm

    def carry_out(self, step: Step, later: Sequence[Step]) -> bool:
        """Do one step, and keep or undo it. Whether it is to be done again, without the one before it."""
        undo = self.runner.keep()
        try:
            note = self.runner.apply(step)
            verdict = self.judging.verdict(step, undo, later)
            value = self.runner.measure() if self.measured else None
        except KeyboardInterrupt as stop:
            stop.add_note(f"during the step {step} of the recipe")
            raise
        except BitwrightError as error:
            undo()
            if not step.optional:
                raise
            if self.judging.give_up():
                self.book.take_back()
            self.book.leave_out(str(step), error)
            return False
        said, found = (note, None) if verdict is None else (verdict.said(note), verdict.sqnr)
        outcome = self.book.add(str(step), value, said, found, self.runner.changed)
        if verdict is not None and not verdict.kept:
            logger.info("%s is undone: the outputs did not gain", step)
            (verdict.both or undo)()
            self.book.take_back(1 if verdict.both is None else 2)
            return verdict.both is not None
        if outcome.hurts:
            self._hurt(step, outcome, undo)
        return False

    def _hurt(self, step: Step, outcome: Outcome, undo: Undo) -> None:
        """The step made the metric worse."""
        fate = "; it is undone" if self.on_harm == "undo" else "; on_harm='undo' would undo it"
        logger.warning("%s made the metric worse by %.4g%s", step, -(outcome.change or 0), fate)
        if self.on_harm == "undo":
            undo()
            self.book.take_back()


def _check(steps: Sequence[Step], runner: ModelRunner) -> dict[int, BitwrightError]:
    """Refuse what the runner cannot do; of optional steps, say why by their place."""
    impossible = {}
    for index, step in enumerate(steps):
        try:
            runner.check(step)
        except BitwrightError as error:
            if not step.optional:
                raise
            impossible[index] = error
    return impossible
