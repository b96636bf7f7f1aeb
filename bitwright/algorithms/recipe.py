"""Recipes: post-training methods in a row, and what each of them did to the metric.

A recipe is a list of steps. Steps of the phase ``float`` change the float model without changing its function; then the
simulation is made and calibrated; steps of the phase ``simulation`` choose roundings, scales and biases in it. This
module knows names, order and bookkeeping; a :class:`Runner` of either front end carries the steps out.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from bitwright.core.config import read_file
from bitwright.core.formats import IntFormat
from bitwright.core.granularity import PerTensor
from bitwright.core.model import Undo
from bitwright.core.spec import Preset, QuantSpec, find_preset
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, close_matches

logger = logging.getLogger("bitwright")

Phase = Literal["float", "simulation"]


@dataclass(frozen=True)
class Kind:
    """A row of :data:`KINDS`.

    Attributes:
        phase: on what the step works.
        after: steps that must come earlier where a recipe has both: they would undo or miss what this one does.
        instead_of: steps that decide the same thing, so that a recipe has one of them at most.
        does: one phrase, for tables and ``--help``.
    """

    phase: Phase
    does: str
    after: tuple[str, ...] = ()
    instead_of: tuple[str, ...] = ()


_NOISE = 1e-3  # changes of the metric below this share of it are no harm
_ROUNDING = ("gptq", "adaround", "brecq", "qdrop", "flexround")


def _rounding(does: str) -> Kind:
    return Kind("simulation", does, ("layer_inputs", "seq_mse"), _ROUNDING)


KINDS: dict[str, Kind] = {
    "fold": Kind("float", "batch norms into the layers before them"),
    "fold_norms": Kind("float", "weights of layer and RMS norms into the layers behind them"),
    "equalize": Kind("float", "balance channel ranges of neighbouring layers", ("fold",)),
    "smooth": Kind("float", "move activation outliers into weights", ("fold_norms", "rotate")),
    "rotate": Kind("float", "spread outliers by Hadamard rotations", ("fold_norms",)),
    "awq": Kind(
        "float",
        "scale channels so that rounded weights change outputs least",
        ("fold_norms", "equalize", "smooth", "rotate"),
    ),
    "layer_inputs": Kind("simulation", "keep activations in float that no layer with a weight reads"),
    "seq_mse": Kind("simulation", "weight ranges by output error, layer after layer", ("layer_inputs",)),
    "gptq": _rounding("round weights column by column with error feedback"),
    "adaround": _rounding("learn each weight's rounding, layer after layer"),
    "brecq": _rounding("learn each weight's rounding, block after block"),
    "qdrop": _rounding("as brecq, with activation quantizers dropped at random"),
    "flexround": _rounding("learn scales and roundings together"),
    "bias_correction": Kind("simulation", "take the mean error out of every layer's output", _ROUNDING),
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
        raise ConfigError(
            source, f"a recipe is a list of steps, not {steps!r:.300}", f"write [{steps!r:.300}]"
        )
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
                source,
                f"the options of {name!r:.100} are {options!r:.100}",
                f"write {{{name}: {{option: value}}}}",
            )
        item = Step(str(name), {str(key): value for key, value in (options or {}).items()})
    if not isinstance(item, Step):
        problem = f"{item!r:.100} is a {type(item).__name__}, not one step"
        raise ConfigError(source, problem, "write step or {step: {option: value}}")
    if item.name not in KINDS:
        raise ConfigError(
            source,
            f"there is no step {item.name!r}{close_matches(item.name, KINDS)}",
            f"use {', '.join(KINDS)}",
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
                    source,
                    f"step {at + 1} ({step.name}) comes too late: {why}",
                    f"put {step.name} before {earlier}",
                )
        seen[step.name] = at


def default_recipe(preset: Preset, *, own_rules: bool = False) -> tuple[Step, ...]:
    """What is done when no recipe is given: no labels, no settings, seconds to minutes.

    Batch norms are folded; for one scale per tensor channels are equalized; where activations have at most 8 bits,
    transformers are smoothed and only what their layers read is quantized. Integer weights are rounded with error feedback;
    those of 8 bits with one scale per tensor have their biases corrected instead.

    Args:
        preset: of the simulation.
        own_rules: whether a configuration of the user's says which activations are quantized.

    Example:
        >>> from bitwright.core.spec import find_preset
        >>> [step.name for step in default_recipe(find_preset("w8a8"))]
        ['fold', 'smooth', 'layer_inputs', 'gptq']
    """
    steps, bits = [Step("fold")], _bits(preset.weight)
    coarse = bits <= 8 and preset.weight is not None and preset.weight.granularity == PerTensor()
    if coarse:
        steps.append(Step("equalize", optional=True))
    if _bits(preset.activation) <= 8:
        steps.append(Step("smooth", optional=True))
        if not own_rules:
            steps.append(Step("layer_inputs", {"only_with_attention": True}))
    if bits < 8:
        steps.append(Step("seq_mse", optional=True))
    if bits <= 8:
        steps.append(Step("bias_correction" if coarse and bits == 8 else "gptq", optional=True))
    return tuple(steps)


def _bits(spec: QuantSpec | None) -> int:
    """Width of an integer format; more than any of them for others."""
    return spec.format.bits if spec is not None and isinstance(spec.format, IntFormat) else 64


RecipeLike = str | Path | Iterable[str | Mapping[str, Any] | Step]


def as_recipe(
    recipe: RecipeLike | None, preset: str | Preset = "w8a8", *, own_rules: bool = False
) -> tuple[Step, ...]:
    """Steps from a list, the path of a recipe file, or ``None`` for :func:`default_recipe`.

    Raises:
        ConfigError: see :func:`parse_recipe` and :func:`load_recipe`; or an unknown preset.
    """
    if recipe is None:
        return default_recipe(find_preset(preset), own_rules=own_rules)
    if isinstance(recipe, (str, Path)) and Path(recipe).suffix:
        return load_recipe(recipe)
    return parse_recipe(recipe)  # type: ignore[arg-type]


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


class Runner(Protocol):
    """A model that steps are carried out on; each front end has one."""

    def check(self, step: Step) -> None:
        """Refuse options the step's function does not have, before any work is done.

        Raises:
            ConfigError: naming the option, with close matches.
        """

    def apply(self, step: Step) -> str:
        """Carry the step out; returns one line on what it did."""

    def simulate(self) -> None:
        """Make the calibrated simulation of the float model as it stands."""

    def measure(self) -> float:
        """The metric of the simulation, or of the one the float model would have now."""

    def keep(self) -> Undo:
        """Remember the state; the function returned brings it back."""


@dataclass(frozen=True)
class Action:
    """How a front end carries out one step.

    Attributes:
        run: (the model in the phase ``float``, the simulation in the other, then options) -> one line on what was done.
        options: names it takes; asked for when a recipe is checked.
    """

    run: Callable[..., str]
    options: Callable[[], tuple[str, ...]]


def action(function: Callable[..., Any], **bound: Any) -> Action:
    """An action that calls ``function(target, **bound, **options)``; its options are the keyword-only parameters.

    What is written down is the ``summary`` of the report that the function returns, or its first line.
    """
    parameters = inspect.signature(function).parameters.values()
    names = tuple(p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.name not in bound)
    return Action(lambda target, **options: _said(function(target, **bound, **options)), lambda: names)


def weight_actions(
    choose: Callable[..., Any], calibrate: Callable[[Any], None], options: Callable[[str], tuple[str, ...]]
) -> dict[str, Action]:
    """Actions of the steps that choose weights on the grid.

    Args:
        choose: ``choose(sim, method=name, **options)``.
        calibrate: finds the ranges of the activations anew for the weights chosen.
        options: of a method.
    """

    def one(name: str) -> Action:
        def run(sim: Any, **given: Any) -> str:
            report = choose(sim, method=name, **given)
            calibrate(sim)
            return _said(report)

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
    """

    copy: Callable[[Any], Any]
    simulate: Callable[[Any], Any]
    measure: Callable[[Any], float]
    remember: Callable[[Any], Undo]
    actions: Mapping[str, Action]


class ModelRunner:
    """The :class:`Runner` of both front ends.

    Attributes:
        model: the float model as it stands; its own copy.
        sim: the calibrated simulation, once there is one.
    """

    def __init__(self, model: Any, front_end: FrontEnd) -> None:
        self.model, self._front = model, front_end
        self.sim: Any = None

    def check(self, step: Step) -> None:
        """See :class:`Runner`."""
        known = self._front.actions[step.name].options()
        for option in step.options:
            if option not in known:
                raise ConfigError(
                    step.name,
                    f"there is no option {option!r}{close_matches(option, known)}",
                    f"use {', '.join(known)}" if known else "it takes none",
                )

    def apply(self, step: Step) -> str:
        """See :class:`Runner`."""
        target = self.model if KINDS[step.name].phase == "float" else self.sim
        return self._front.actions[step.name].run(target, **step.options)

    def simulate(self) -> None:
        """See :class:`Runner`."""
        self.sim = self._front.simulate(self.model)

    def measure(self) -> float:
        """See :class:`Runner`; in the phase ``float`` a simulation is made for it and dropped."""
        sim = self._front.simulate(self._front.copy(self.model)) if self.sim is None else self.sim
        return float(self._front.measure(sim))

    def keep(self) -> Undo:
        """See :class:`Runner`."""
        if self.sim is not None:
            return self._front.remember(self.sim)
        saved = self._front.copy(self.model)
        return lambda: setattr(self, "model", saved)


@dataclass(frozen=True)
class Outcome:
    """What one step did.

    Attributes:
        step: as written, or ``float`` and ``no step`` for the first two lines.
        metric: after it, on the simulated model; ``None`` when no metric was given.
        change: of the metric, positive for the better.
        note: what the step says of itself, or why it was taken back.
        kept: whether it is in force.
    """

    step: str
    metric: float | None
    change: float | None
    note: str = ""
    kept: bool = True

    @property
    def hurts(self) -> bool:
        """Whether the metric became worse by this step, by more than a thousandth of itself."""
        if self.change is None or self.metric is None:
            return False
        return self.change < -_NOISE * abs(self.metric)


@dataclass(frozen=True)
class RecipeReport(Sequence[Outcome]):
    """One line per step; a table when printed.

    Attributes:
        outcomes: in order.
        interrupted: the step that Ctrl-C stopped; those before it are in force.
    """

    outcomes: tuple[Outcome, ...]
    interrupted: str | None = None

    def __getitem__(self, index: int) -> Outcome:  # type: ignore[override]
        return self.outcomes[index]

    def __len__(self) -> int:
        return len(self.outcomes)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    @property
    def metric(self) -> float | None:
        """The metric in force at the end; ``None`` where none was measured."""
        kept = [o.metric for o in self.outcomes if o.kept]
        return kept[-1] if kept else None

    def __str__(self) -> str:
        rows = [("step", "metric", "change", "")]
        for o in self.outcomes:
            metric = "" if o.metric is None else f"{o.metric:.5g}"
            change = "" if o.change is None else f"{o.change:+.3g}"
            state = "" if o.kept or o.change is None else "taken back: "
            rows.append((o.step, metric, change, f"{state}{o.note}"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}  {d}".rstrip()
            for a, b, c, d in rows
        ]
        if self.interrupted:
            lines.append(f"interrupted during {self.interrupted}; the steps before it are in force")
        return "\n".join(lines)


OnHarm = Literal["report", "undo"]


def run_recipe(
    steps: Sequence[Step],
    runner: Runner,
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
        on_harm: what becomes of a step that makes the metric worse: ``report`` keeps it and says so, ``undo`` takes it
            back.
        lower_is_better: for perplexities and errors.

    Raises:
        ConfigError: an option that a step does not have, or an unknown ``on_harm``; before any work.
        CalibrationError: the metric is NaN.
    """
    if on_harm not in ("report", "undo"):
        raise ConfigError("on_harm", f"{on_harm!r} is neither 'report' nor 'undo'", "use one of them")
    impossible = _check(steps, runner)
    book = _Book(lower_is_better)
    if float_metric is not None:
        book.add("float", float_metric)
        book.add("no step", runner.measure())
    simulated, interrupted = False, None
    for index, step in enumerate(steps):
        if index in impossible:
            book.leave_out(step, impossible[index])
            continue
        if KINDS[step.name].phase == "simulation" and not simulated:
            runner.simulate()
            simulated = True
        undo = runner.keep()
        try:
            note = runner.apply(step)
            value = None if float_metric is None else runner.measure()
        except KeyboardInterrupt:
            undo()
            interrupted = str(step)
            logger.warning("interrupted during %s; the steps before it are in force", step)
            break
        except BitwrightError as error:
            undo()
            if not step.optional:
                raise
            book.leave_out(step, error)
            continue
        outcome = book.add(str(step), value, note)
        if outcome.hurts:
            logger.warning("%s made the metric worse by %.4g%s", step, -(outcome.change or 0), _fate(on_harm))
            if on_harm == "undo":
                undo()
                book.take_back()
    if not simulated:
        runner.simulate()
    return RecipeReport(tuple(book.outcomes), interrupted)


def _check(steps: Sequence[Step], runner: Runner) -> dict[int, BitwrightError]:
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


def _fate(on_harm: OnHarm) -> str:
    return "; it is taken back" if on_harm == "undo" else "; on_harm='undo' would take it back"


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


class _Book:
    """The outcomes so far, and the metric in force."""

    def __init__(self, lower_is_better: bool) -> None:
        self.sign = -1.0 if lower_is_better else 1.0
        self.outcomes: list[Outcome] = []

    def _last(self) -> float | None:
        # the float model is no predecessor: its metric is the goal
        kept = [o.metric for o in self.outcomes[1:] if o.kept and o.metric is not None]
        return kept[-1] if kept else None

    def add(self, step: str, metric: float | None, note: str = "") -> Outcome:
        """Write down a step."""
        metric = metric if metric is None else checked_metric(step, metric)
        last = self._last()
        change = None if metric is None or last is None else self.sign * (metric - last)
        self.outcomes.append(Outcome(step, metric, change, note))
        return self.outcomes[-1]

    def leave_out(self, step: Step, why: BitwrightError) -> None:
        """Write down an optional step that cannot be done."""
        logger.warning("%s is left out: %s", step, why)
        self.outcomes.append(Outcome(str(step), None, None, f"left out: {why}", kept=False))

    def take_back(self) -> None:
        """The step written last is no longer in force."""
        self.outcomes[-1] = replace(self.outcomes[-1], kept=False)
