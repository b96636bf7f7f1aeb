"""``bitwright.mixed_precision``: the cheapest precisions that are good enough, or the best within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwright.analysis.subject.subject import open_subject
from bitwright.core.numerics.spec import Preset
from bitwright.errors import CalibrationError, ConfigError, checks_arguments
from bitwright.mixed.precisions.candidates import as_candidates, highest
from bitwright.mixed.precisions.start import simulation_of
from bitwright.mixed.search.explorer import Explorer
from bitwright.mixed.search.goal import Goal
from bitwright.mixed.search.measure import Metric
from bitwright.mixed.search.result import MixedPrecision

CANDIDATES = ("w8a8", "w8a16", "w4a8", "w4a16")


@checks_arguments
def mixed_precision(
    model: Any,
    data: Iterable[Any],
    candidates: str | Preset | Iterable[Any] = CANDIDATES,
    *,
    cost: str = "weight_bytes",
    budget: float | Mapping[str, float] | None = None,
    metric: str | Callable[[Any], Any] | None = None,
    lower_is_better: bool = False,
    allowed_drop: float | str | None = None,
    min_sqnr: float | None = None,
    labels: Any = None,
    evaluation_data: Iterable[Any] | None = None,
    times: Any = None,
    evaluations: int = 12,
    deadline: float | None = None,
    confidence: float = 0.9,
    rounding: bool = True,
    samples: int = 32,
    seed: int = 0,
    config_file: Any = None,
    folder: str | Path | None = None,
    filename_prefix: str = "model",
) -> MixedPrecision:
    """Choose the precision of every layer.

    What each quantizer costs the outputs is estimated in one run forward and one back per candidate; costs add up; the choice
    of one candidate per group is an integer program that is solved exactly; a few points are then measured, each where it
    tells most, and the estimates are corrected by what was seen.

    Args:
        model: a calibrated simulation of either front end (changed in place), or a model: a module, a path, a proto.
        data: batches without labels; every fifth is held out to measure the outputs on.
        candidates: presets by name or value, or AIMET's pairs.
        cost: what is to be small: ``weight_bytes``, ``bit_ops``, ``activation_bytes``, or ``ms`` (with ``times``).
        budget: the most that may be spent: of ``cost``, or cost -> bound. A bound up to 1 is a share of what the candidate with
            the most bits costs.
        metric: ``"accuracy"``, ``"agreement"``, ``"kl"``, or a function of the model (of the session in ONNX) that returns a
            number or, better, one value per sample; half of the samples are then held back for the last word.
        lower_is_better: for a function such as a perplexity.
        allowed_drop: of the metric against float: in its units, or ``"1%"`` of its float value. Of the points that keep within
            it the cheapest is taken.
        min_sqnr: instead of a metric: the least SQNR of the outputs, in dB.
        labels: one per sample of ``evaluation_data``, for ``accuracy``.
        evaluation_data: what named metrics are measured on; ``data`` by default.
        times: milliseconds per layer or operator type and candidate, or the path of a JSON file of them.
        evaluations: of the metric, at most; parts of the data count as parts.
        deadline: seconds, from now.
        confidence: with which the drop on samples held back is within ``allowed_drop``.
        rounding: round weights with error feedback (``gptq``) at each width, instead of each to its nearest code.
        samples: rows that the estimates are taken on.
        seed: of what is random.
        config_file: rules for a model that is given; its ``supported_kernels`` say which candidates an operator may have.
        folder: where the best point so far is exported to, each time there is a better one.
        filename_prefix: stem of the files.

    Returns:
        The result; its table shows every point that was measured, its ``sim`` works with the choice.

    Raises:
        ConfigError: nothing is asked for, a budget that no choice fits (the message says what is possible), a metric that is
            constant or has the other direction, a deadline shorter than one evaluation, or a table of times with holes.
        CalibrationError: the simulation is not calibrated, or ``data`` is empty.
        KeyboardInterrupt: Ctrl-C before there was a point; later it ends the search with the best one.
    """
    begin = time.monotonic()
    wanted = as_candidates(candidates)
    _check_wish(budget, allowed_drop, min_sqnr)
    check_options(
        metric, allowed_drop, min_sqnr, deadline, confidence, lower_is_better=lower_is_better, labels=labels,
        evaluation_data=evaluation_data,
    )  # fmt: skip
    batches = _batches(data)
    sim = simulation_of(model, batches, wanted[highest(wanted)], config_file)
    subject = open_subject(sim)
    restore = subject.remember(parameters=True)
    try:
        with subject.exclusive():
            search = Explorer(subject, wanted, batches, begin, deadline, rounding, samples, seed, times)
            bounds = search.bounds(cost, budget)
            tester = None
            if metric is not None:
                tester = Metric(
                    subject, metric, lower_is_better=lower_is_better, allowed=allowed_drop, labels=labels, seed=seed,
                    data=batches if evaluation_data is None else list(evaluation_data),
                )  # fmt: skip
                _check_deadline(deadline, begin, tester.seconds)
            goal = Goal(cost, bounds, tester, min_sqnr, evaluations, confidence)
            save = _saver(sim, folder, filename_prefix)
            return search.run(goal, save)
    except BaseException:
        restore()
        raise


def _check_wish(budget: Any, allowed_drop: Any, min_sqnr: float | None) -> None:
    if budget is None and allowed_drop is None and min_sqnr is None:
        raise ConfigError(
            "mixed_precision",
            "neither a budget nor a quality is asked for",
            "pass budget=0.6 (share of the cost), allowed_drop=0.01 with a metric, or min_sqnr=20",
        )


def check_options(
    metric: Any, allowed_drop: Any, min_sqnr: float | None, deadline: float | None, confidence: float, **of_metric: Any
) -> None:
    """What a search is asked for, as far as it can be told before it begins.

    Args:
        of_metric: ``lower_is_better``, ``labels`` and ``evaluation_data``.

    Raises:
        ConfigError: a number that has no meaning, or an option that nothing would look at.
    """
    if min_sqnr is not None and not math.isfinite(min_sqnr):
        raise ConfigError("min_sqnr", f"{min_sqnr} is not a number of dB", "give 20, or leave it out")
    if deadline is not None and not deadline >= 0:
        raise ConfigError("deadline", f"{deadline} is not a time", "give seconds, or leave it out")
    if not 0 < confidence < 1:
        raise ConfigError("confidence", f"{confidence} is not a share", "give 0.9, or another number between 0 and 1")
    if allowed_drop is not None and metric is None:
        raise ConfigError(
            "allowed_drop", "there is no metric that could drop", "pass metric=..., or min_sqnr=... in dB instead"
        )
    given = [name for name, value in of_metric.items() if value is not None and value is not False]
    if metric is None and given:
        raise ConfigError(
            given[0], "there is no metric that it could be for", f"pass metric=..., or leave {given[0]} out"
        )
    _check_of_metric(metric, given)


def _check_of_metric(metric: Any, given: Sequence[str]) -> None:
    """Options of the other kind of metric would be passed over in silence."""
    data = [name for name in given if name != "lower_is_better"]
    if callable(metric) and data:
        raise ConfigError(
            data[0],
            "the metric is a function, which looks at data of its own",
            f"leave {data[0]} out, or pass metric='accuracy', 'agreement' or 'kl'",
        )
    if isinstance(metric, str) and "lower_is_better" in given and metric != "kl":
        raise ConfigError(
            "lower_is_better", f"the direction of {metric!r} is known", "leave it out; it is for functions"
        )


def _check_deadline(deadline: float | None, begin: float, seconds: float) -> None:
    spent = time.monotonic() - begin
    left = math.inf if deadline is None else deadline - spent
    if left < seconds:
        raise ConfigError(
            "deadline",
            f"one evaluation of the metric takes {seconds:.3g} s, and {max(left, 0):.3g} s are left of {deadline:.3g} s: what "
            f"comes before the first point took {spent:.3g} s",
            f"allow more than {spent + seconds:.3g} s, or let the metric look at fewer samples",
        )


def _batches(data: Iterable[Any]) -> list[Any]:
    if isinstance(data, Mapping) or hasattr(data, "shape") or not isinstance(data, Iterable):
        raise CalibrationError(
            "mixed_precision", f"data is a {type(data).__name__}, not a list of batches", "write [batch] for a single batch"
        )  # fmt: skip
    batches = list(data)
    if not batches:
        raise CalibrationError(
            "mixed_precision", "the data held no batch", "pass a non-empty list; a few hundred samples are enough"
        )
    return batches


def _saver(sim: Any, folder: str | Path | None, prefix: str) -> Callable[[], None]:
    if folder is None:
        return lambda: None
    target = Path(folder)
    return lambda: sim.export(target, prefix) and None
