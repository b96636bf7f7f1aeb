"""Recipes: an ordered list of post-training methods, and a report of what each did to the metric.

A recipe is a list of steps. Steps of the phase ``float`` change the float model without changing its function; then the
simulation is made and calibrated; steps of the phase ``simulation`` choose roundings, scales and biases in it. This
module knows names, order and bookkeeping, and reports what each step did; an :class:`~bitwright.recipes.attempt.Attempt`
carries the steps out.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bitwright.core.numerics.formats import IntFormat
from bitwright.core.numerics.spec import QuantSpec
from bitwright.core.placement.config import read_file
from bitwright.core.registry import Registry
from bitwright.core.simulation.float_model import Undo
from bitwright.core.simulation.output_quality import Gain
from bitwright.errors import BitwrightError, CalibrationError, ConfigError, close_matches, with_article
from bitwright.recipes.judge import Judge, Rating
from bitwright.tables import Tabular, html_table, text_table

logger = logging.getLogger("bitwright")

_LEFT_OUT = "left out: "
_NOISE = 1e-3  # changes of the metric below this share of it are not harm


@dataclass(frozen=True)
class Outcome:
    """Result of one step.

    Attributes:
        step: as written, or ``float`` and ``no step`` for the first two lines.
        metric: after it, on the simulated model; ``None`` when no metric was given.
        change: of the metric, positive for the better.
        note: what the step says of itself, or why it was undone.
        kept: whether it is in effect.
        sqnr: signal-to-noise ratio of the outputs before and after it, in dB, where a judge was asked.
        gain: the difference, with its interval.
        changed: whether it did anything.
        on_float: whether it is a step that works on the float model.
        details: of a step of compression, what became of every part: see :class:`bitwright.methods.details.Detailed`.
    """

    step: str
    metric: float | None
    change: float | None
    note: str = ""
    kept: bool = True
    sqnr: tuple[float, float] | None = None
    changed: bool = True
    on_float: bool = False
    gain: Gain | None = None
    details: Mapping[str, Any] | None = None

    @property
    def judged(self) -> str:
        """The judge's numbers in one phrase; empty where it was not asked."""
        if self.sqnr is None:
            return ""
        found = self.gain
        ends = "" if found is None or found.low is None else f" ({found.low:+.2f} to {found.high:+.2f})"
        return f"output {self.sqnr[0]:.2f} -> {self.sqnr[1]:.2f} dB{ends}"

    @property
    def hurts(self) -> bool:
        """Whether this step made the metric worse by more than a thousandth of its value."""
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

    @property
    def idle(self) -> tuple[str, ...]:
        """Steps that changed nothing, with their notes; folding a model without batch norms is not counted."""
        said = (o for o in self.outcomes if not o.changed and o.kept)
        return tuple(f"{o.step} ({o.note})" for o in said if not (o.step == "fold()" and " 0 kept" in o.note))

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows; the columns of the metric are left out where no step was measured by one."""
        measured = any(o.metric is not None for o in self.outcomes)
        rows = []
        for o in self.outcomes:
            metric = "" if o.metric is None else f"{o.metric:.5g}"
            change = "" if o.change is None else f"{o.change:+.3g}"
            back = not o.kept and not o.note.startswith(_LEFT_OUT)
            told = f"{'undone: ' if back else ''}{o.note}{'; ' * bool(o.judged)}{o.judged}"
            rows.append([o.step, metric, change, told] if measured else [o.step, told])
        return ["step", "metric", "change", "note"] if measured else ["step", "note"], rows

    def _lines(self) -> list[str]:
        if not self.judged:
            return []
        has_interval = any(o.gain is not None and o.gain.low is not None for o in self.outcomes)
        interval = "; in brackets the 95 % interval of the gain" if has_interval else ""
        return [f"outputs compared with float {self.judged}{interval}"]

    def __str__(self) -> str:
        head, rows = self._cells()
        return "\n".join([text_table(head, rows, right=(1, 2) if len(head) > 2 else ()), *self._lines()])

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), notes=self._lines())


def metric_of(metric: Callable[[Any], Any], model: Any) -> float:
    """Evaluate ``metric`` on ``model`` and check that the result is a number.

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
    """Return ``metric`` unless it is NaN.

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


Phase = Literal["float", "simulation"]


@dataclass(frozen=True)
class Kind:
    """A row of :data:`KINDS`.

    Attributes:
        phase: on what the step works.
        run: the function that carries it out, or ``"module.function"``, imported when a recipe has the step. It is called with
            the float model or the simulation, with what its parameters ask for by name
            (:meth:`~bitwright.recipes.attempt.Attempt.given`), and with the
            options of the step, its other keyword-only parameters. If its first parameter is ``view``, it works on a
            :class:`~bitwright.core.simulation.float_model.FloatModel` of either front end and returns a
            :class:`~bitwright.methods.layers.Reversible`. ``None`` for a method of
            :class:`~bitwright.recipes.attempt.Attempt` of that name, or a method of rounding.
        after: steps that must come earlier where a recipe has both: they would undo or miss what this one does.
        instead_of: steps that decide the same thing, so that a recipe has one of them at most.
        does: one phrase, for tables and ``--help``.
        gain: dB of the outputs that the step must bring where a judge is asked (:mod:`bitwright.recipes.judge`);
            ``None`` for steps that are not put to one.
        apart: whether the judge leaves weights in float where a step that rounds them comes later: their noise at nearest
            rounding, twenty times what the rounding leaves, would hide that of the activations.
        joined: whether it may lose alone if it gains together with the step that rounds weights after it.
        fitted: whether what it chooses is fitted to samples, and may serve others worse: a gain must then be more than chance.
            More bits and float make noise of no sample larger: such a step is not measured where it reports a gain of
            :data:`_CERTAIN` dB itself.
    """

    phase: Phase
    does: str
    after: tuple[str, ...] = ()
    instead_of: tuple[str, ...] = ()
    gain: float | None = None
    apart: bool = False
    joined: bool = False
    fitted: bool = True
    run: Callable[..., Any] | str | None = None


_WORTH = 0.1  # dB of the outputs that are worth clipped values, or 16 bits
_CERTAIN = 0.5  # dB of an estimate that is off by a third, one standard deviation: beyond doubt more than _WORTH
_BLOCKS = ("drop_blocks", "drop_experts", "replace_blocks")
_RANGES = ("layer_inputs", "activation_ranges", "widen")
#: what a step's function is given by name where it has a parameter of that name
GIVEN = (
    "data", "dummy_input", "providers", "progress", "calibrate", "weight", "config_file", "quant_scheme", "export_target",
)  # fmt: skip
ROUNDING = (
    "gptq", "gptaq", "gptvq", "codebook", "adaround", "brecq", "qdrop", "flexround", "learned_clipping", "distill", "autoround",
)  # fmt: skip


def _rounding(does: str) -> Kind:
    return Kind("simulation", does, (*_RANGES, "seq_mse"), ROUNDING, gain=0.0)


def _checked_kind(name: str, row: Any) -> Kind:
    """A step of a plug-in: a :class:`Kind`, or a function that works on what its first parameter says."""
    if isinstance(row, Kind):
        if row.run is None:
            raise ConfigError(f"step {name!r}", "nothing carries it out", "give Kind(..., run=function)")
        return row
    if not callable(row):
        problem = f"{row!r:.100} is not a step"
        raise ConfigError(f"step {name!r}", problem, "register a function whose first parameter is sim, model or view")
    _check_function(Step(name, run=row))
    phase: Phase = "simulation" if _works_on(row) == "sim" else "float"
    return Kind(phase, (row.__doc__ or f"the function {name}").strip().partition("\n")[0], run=row)


_OWN: dict[str, Kind] = {
    "fold": Kind("float", "batch norms into the layers before them"),
    "fold_norms": Kind(
        "float",
        "weights of layer and RMS norms into the layers after them",
        run="bitwright.methods.folding.norm_fold.fold_norms",
    ),
    "drop_blocks": Kind(
        "float",
        "whole residual blocks and layers of transformers taken out",
        run="bitwright.compression.depth.drop_blocks",
    ),
    "drop_experts": Kind(
        "float",
        "fewer experts in mixtures, those of the least saliency taken out",
        run="bitwright.compression.experts.drop_experts",
    ),
    "replace_blocks": Kind(
        "float",
        "blocks replaced by linear layers that are fitted to them, or by nothing",
        ("drop_blocks",),
        run="bitwright.compression.replace.replace_blocks",
    ),
    "prune": Kind(
        "float",
        "fewer channels, heads and hidden units, fitted to the original",
        _BLOCKS,
        run="bitwright.compression.compress.prune_model",
    ),
    "svd": Kind(
        "float",
        "layers as smaller ones in a row, by low-rank factors",
        ("fold", *_BLOCKS, "prune"),
        run="bitwright.compression.svd.svd_model",
    ),
    "sparsify": Kind(
        "float",
        "zeros in weights, by magnitude, Wanda or SparseGPT",
        ("fold", *_BLOCKS, "prune", "svd", "equalize", "smooth", "rotate", "awq"),
        run="bitwright.compression.sparsify.sparsify_model",
    ),
    "equalize": Kind("float", "balance channel ranges of neighbouring layers", ("fold", "prune"), gain=0.0, apart=True),
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
    "transform": Kind(
        "float",
        "fitted products in front of layers, for activations of few bits",
        ("fold_norms", "smooth", "rotate", "awq"),
        run="bitwright.methods.scaling.transform.transform_model",
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
        run="bitwright.methods.activations.layer_inputs",
    ),
    "activation_ranges": Kind(
        "simulation",
        "activation ranges by least squared error",
        ("layer_inputs",),
        gain=_WORTH,
        apart=True,
        run="bitwright.methods.activations.activation_ranges",
    ),
    "widen": Kind(
        "simulation",
        "16 bits, or float, where 8 bits cost the outputs most",
        ("layer_inputs", "activation_ranges"),
        gain=_WORTH,
        apart=True,
        fitted=False,
    ),
    "seq_mse": Kind("simulation", "weight ranges by output error, layer after layer", _RANGES, gain=0.0, joined=True),
    "gptq": _rounding("round weights column by column with error feedback"),
    "gptvq": _rounding("as gptq, by vectors of a codebook for neighbouring weights on the grid of 8 bits"),
    "codebook": _rounding("as gptq, by a codebook of 2 to 256 numbers a layer on the grid of 8 bits"),
    "gptaq": _rounding("as gptq, aiming at the outputs of the float model"),
    "adaround": _rounding("learn each weight's rounding, layer after layer"),
    "brecq": _rounding("learn each weight's rounding, block after block"),
    "qdrop": _rounding("as brecq, with activation quantizers dropped at random"),
    "flexround": _rounding("learn scales and roundings together"),
    "learned_clipping": _rounding("learn the ends of weight ranges, block after block"),
    "distill": _rounding("train the weights towards the float outputs, block after block, without labels"),
    "autoround": _rounding("learn roundings and ranges by signs of gradients, block after block"),
    "bias_correction": Kind("simulation", "take the mean error out of every layer's output", ROUNDING, gain=0.0),
}
KINDS: Registry[Kind] = Registry("steps", _OWN, _checked_kind)


@dataclass(frozen=True)
class Step:
    """One step of a recipe: a row of :data:`KINDS`, or a function of the user's, and its options.

    A step that is ``optional`` is left out, with the reason in the report, where it cannot be done.

    Attributes:
        run: a function of the user's, whose first parameter says what it works on: ``sim``, the calibrated simulation; ``model``,
            the float model; ``view``, a :class:`~bitwright.core.simulation.float_model.FloatModel`. It is called as those of
            :attr:`Kind.run` are.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False
    run: Callable[..., Any] | None = None

    @property
    def kind(self) -> Kind:
        """The row of the step; a function of the user's is not put to the judge."""
        if self.run is None:
            return KINDS[self.name]
        phase: Phase = "simulation" if _works_on(self.run) == "sim" else "float"
        return Kind(phase, f"the function {self.name}", run=self.run)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


def parse_recipe(steps: Iterable[str | Mapping[str, Any] | Step], source: str = "recipe") -> tuple[Step, ...]:
    """Steps from what a user wrote: names, functions, ``{name or function: {option: value}}``, or :class:`Step` objects.

    Raises:
        ConfigError: an unknown step (with close matches), a function that cannot be called as a step, a step twice, or an order
            that cannot work.

    >>> [str(step) for step in parse_recipe(["fold", {"adaround": {"iterations": 2000}}])]
    ['fold()', 'adaround(iterations=2000)']
    """
    if isinstance(steps, (str, Mapping)) or not isinstance(steps, Iterable):
        written = [name.strip() for name in steps.split(",")] if isinstance(steps, str) else [steps]
        raise ConfigError(source, f"a recipe is a list of steps, not {steps!r:.300}", f"write {written!r:.300}")
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


def _parse_step(item: str | Callable[..., Any] | Mapping[Any, Any] | Step, source: str) -> Step:
    if isinstance(item, str) or callable(item):
        item = _named(item)
    if isinstance(item, Mapping):
        if len(item) != 1:
            raise ConfigError(source, f"{dict(item)!r:.300} is not one step", "write {step: {option: value}}")
        ((name, options),) = item.items()
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(
                source, f"the options of {name!r:.100} are {options!r:.100}", f"write {{{name}: {{option: value}}}}"
            )
        item = replace(_named(name), options={str(key): value for key, value in (options or {}).items()})
    if not isinstance(item, Step):
        problem = f"{item!r:.100} is {with_article(type(item).__name__)}, not one step"
        raise ConfigError(source, problem, "write step or {step: {option: value}}")
    if item.run is not None:
        _check_function(item)
    elif item.name not in KINDS:
        raise ConfigError(
            source, f"there is no step {item.name!r}{close_matches(item.name, KINDS)}", f"use {', '.join(KINDS)}"
        )
    return item


def _named(step: Any) -> Step:
    return Step(getattr(step, "__name__", type(step).__name__), run=step) if callable(step) else Step(str(step))


def _works_on(function: Callable[..., Any]) -> str:
    """Name of the first parameter, which says what the function works on."""
    return next(iter(inspect.signature(function).parameters), "")


def _check_function(step: Step) -> None:
    """Refuse a function that cannot be called as a step.

    Raises:
        ConfigError: its first parameter is none of ``sim``, ``model``, ``view``, or another has neither a value nor a name that
            steps are given.
    """
    assert step.run is not None
    first = _works_on(step.run)
    if first not in ("sim", "model", "view"):
        problem = f"its first parameter is {first!r}" if first else "it takes nothing"
        remedy = "name it sim (the calibrated simulation), model (the float model) or view (a FloatModel of either front end)"
        raise ConfigError(f"step {step.name}", problem, remedy)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for other in list(inspect.signature(step.run).parameters.values())[1:]:
        if other.default is other.empty and other.kind not in variable and other.name not in (*GIVEN, *step.options):
            raise ConfigError(
                f"step {step.name}",
                f"its parameter {other.name!r} has no value",
                f"give it a default, an option of the step, or one of the names {', '.join(GIVEN)}",
            )


def _check_order(steps: Sequence[Step], source: str) -> None:
    for at, step in enumerate(steps):
        for where, before in enumerate(steps[:at]):
            if step.run is None and before.name in (step.name, *step.kind.instead_of):
                problem = f"step {at + 1} ({step.name}) decides again what step {where + 1} ({before.name}) decided"
                raise ConfigError(source, problem, "keep one of them")
            why = _too_late(step, before)
            if why:
                problem = f"step {at + 1} ({step.name}) comes too late: {why}"
                raise ConfigError(source, problem, f"put {step.name} before {before.name}")


def _too_late(step: Step, before: Step) -> str:
    """The reason why ``step`` cannot follow ``before``; empty if it can."""
    if step.kind.phase == "float" and before.kind.phase == "simulation":
        return f"it changes the float model, and {before.name} has worked on its simulation"
    return f"{before.name} relies on it" if step.name in before.kind.after else ""


def integer_bits(spec: QuantSpec | None) -> int:
    """Bits of an integer format; a number above all of them for other formats."""
    return spec.format.bits if spec is not None and isinstance(spec.format, IntFormat) else 64


class Runner(ABC):
    """Protocol of the object that runs steps: it holds the float model, then its simulation.

    Attributes:
        judge: says what a step is worth; ``None`` keeps every step.
        changed: whether the last step did anything.
        details: of the last step, see :attr:`Outcome.details`.
        expected: dB of the outputs that the last step gained by its own estimate; 0 where it makes none.
    """

    judge: Judge | None
    changed: bool
    details: Mapping[str, Any] | None = None
    expected: float = 0.0

    @abstractmethod
    def check(self, step: Step) -> None:
        """Refuse options the step's function does not have, and values it does not take, before any work is done.

        Raises:
            ConfigError: see :func:`bitwright.methods.options.check_options`.
        """

    @abstractmethod
    def apply(self, step: Step) -> str:
        """Run the step; returns one line on its effect."""

    @abstractmethod
    def simulate(self) -> None:
        """Make the calibrated simulation of the float model as it stands."""

    @abstractmethod
    def measure(self) -> float:
        """The metric of the simulation; before there is one, of one that is made for it and dropped."""

    @abstractmethod
    def rate(self, *, float_weights: bool = False) -> Rating:
        """The judge's rating of the simulation, or of one of the current float model.

        Args:
            float_weights: let the simulation's weights be in float meanwhile.
        """

    @abstractmethod
    def keep(self) -> Undo:
        """Remember the state; the function returned brings it back."""


OnHarm = Literal["report", "undo"]


def run_recipe(
    steps: Sequence[Step],
    runner: Runner,
    *,
    float_metric: float | None = None,
    on_harm: OnHarm = "report",
    lower_is_better: bool = False,
) -> RecipeReport:
    """Run ``steps``; the runner then holds a calibrated simulation.

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
    impossible = _impossible(steps, runner)
    run = _Run(runner, float_metric is not None, on_harm, lower_is_better)
    if float_metric is not None:
        run.add("float", float_metric)
        run.add("no step", runner.measure())
    simulated = False
    queue = deque(enumerate(steps))
    while queue:
        index, step = queue.popleft()
        if index in impossible:
            run.leave_out(step, impossible[index])
            continue
        if step.kind.phase == "simulation" and not simulated:
            runner.simulate()
            run.before = None  # numbers of trials do not compare with those of the simulation
            simulated = True
        later = [other.name for place, other in enumerate(steps) if place > index and place not in impossible]
        if run.carry_out(step, rounded_later=not set(ROUNDING).isdisjoint(later)):
            queue.appendleft((index, step))  # without the one before it
    if not simulated:
        runner.simulate()
    return RecipeReport(tuple(run.outcomes), run.where)


def _impossible(steps: Sequence[Step], runner: Runner) -> dict[int, BitwrightError]:
    """Refuse steps that the runner cannot do; returns the reason for each optional one, by its position."""
    found = {}
    for index, step in enumerate(steps):
        try:
            runner.check(step)
        except BitwrightError as error:
            if not step.optional:
                raise
            found[index] = error
    return found


class _Run:
    """State of a running recipe: outcomes so far, and the judge's last rating.

    Attributes:
        before: the judge's rating of the state that is in effect; ``None`` where it is not known.
        where: on what the judge compared outputs.
    """

    def __init__(self, runner: Runner, measured: bool, on_harm: OnHarm, lower_is_better: bool) -> None:
        self.runner, self.measured, self.on_harm = runner, measured, on_harm
        self.sign = -1.0 if lower_is_better else 1.0
        self.outcomes: list[Outcome] = []
        self.where = ""
        self.before: Rating | None = None
        self._float_weights = False  # of `before`
        self._pending: Undo | None = None  # undoes a step that waits for the one it is judged with

    def add(
        self,
        step: str,
        metric: float | None,
        note: str = "",
        compared: _Compared | None = None,
        changed: bool = True,
        on_float: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Record the outcome of a step."""
        metric = metric if metric is None else checked_metric(step, metric)
        # the float model is not a predecessor: its metric is the goal
        kept = [o.metric for o in self.outcomes[1:] if o.kept and o.metric is not None]
        change = None if metric is None or not kept else self.sign * (metric - kept[-1])
        sqnr, found = (None, None) if compared is None else (compared.sqnr, compared.gain)
        outcome = Outcome(step, metric, change, note, True, sqnr, changed, on_float, found, details)
        self.outcomes.append(outcome)
        logger.info("%s: %s", step, note or "done")
        return self.outcomes[-1]

    def leave_out(self, step: Step, why: BitwrightError) -> None:
        """Record an optional step that cannot be done."""
        logger.warning("%s is left out: %s", step, why)
        self.outcomes.append(Outcome(str(step), None, None, f"{_LEFT_OUT}{why}", kept=False))

    def _give_up(self) -> None:
        """Undo a step that depends on a later one that could not be done."""
        if self._pending is not None:
            self._pending()
            self._pending = None
            self._take_back()

    def _take_back(self, count: int = 1) -> None:
        """Mark the last recorded steps as undone."""
        self.outcomes[-count:] = [replace(outcome, kept=False) for outcome in self.outcomes[-count:]]

    def carry_out(self, step: Step, rounded_later: bool) -> bool:
        """Do one step, and keep or undo it; returns whether to repeat it without the previous one."""
        runner, undo, both = self.runner, self.runner.keep(), self._pending
        try:
            note = runner.apply(step)
            compared, kept, said = self._judged(step, undo, rounded_later)
            value = runner.measure() if self.measured else None
        except KeyboardInterrupt as stop:
            stop.add_note(f"during the step {step} of the recipe")
            raise
        except BitwrightError as error:
            undo()
            if not step.optional:
                raise
            self._give_up()
            self.leave_out(step, error)
            return False
        on_float = step.kind.phase == "float"
        outcome = self.add(str(step), value, note + said, compared, runner.changed, on_float, runner.details)
        if not kept:
            logger.info("%s is undone: the outputs did not gain", step)
            (both or undo)()
            self._take_back(1 if both is None else 2)
            return both is not None
        if outcome.hurts:
            undone = self.on_harm == "undo"
            fate = "; it is undone" if undone else "; on_harm='undo' would undo it"
            logger.warning("%s made the metric worse by %.4g%s", step, -(outcome.change or 0), fate)
            if undone:
                undo()
                self._take_back()
        return False

    def _estimated(self, kind: Kind) -> str:
        """What the last step says it gains, where that is beyond doubt and needs no judge."""
        certain = not kind.fitted and self._pending is None and self.runner.expected >= _CERTAIN
        return f"; {self.runner.expected:.1f} dB less noise by its estimate" if certain else ""

    def _judged(self, step: Step, undo: Undo, rounded_later: bool) -> tuple[_Compared | None, bool, str]:
        """The judge's ratings before and after the last step, whether the step is kept, and what the ratings measure."""
        runner, kind, both = self.runner, step.kind, self._pending
        if runner.judge is None or not runner.judge.possible or not (runner.changed or both):
            return None, True, ""
        estimated = self._estimated(kind)
        if kind.gain is None or estimated:
            self.before = None
            return None, True, estimated
        self.where = runner.judge.where
        apart = kind.apart and rounded_later
        if self.before is None or apart != self._float_weights:
            again = runner.keep()
            (both or undo)()
            self.before, self._float_weights = runner.rate(float_weights=apart), apart
            again()
        before, after = self.before, runner.rate(float_weights=apart)
        found = after.gain_over(before)
        doubtful = kind.fitted and found.is_doubtful
        kept = found.decibel >= kind.gain and not doubtful
        self.before = after if kept else before
        self._pending = undo if kind.joined and rounded_later and not kept else None
        said = ("; with float weights" if apart else "") + ("; with the step before" if both is not None else "")
        if doubtful:
            said += "; a gain that the samples do not tell from none"
        return _Compared((before.sqnr, after.sqnr), found), kept or self._pending is not None, said


@dataclass(frozen=True)
class _Compared:
    """What the judge saw of a step: dB before and after it, and the gain."""

    sqnr: tuple[float, float]
    gain: Gain
