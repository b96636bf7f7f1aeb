"""AIMET's ``AutoQuant`` and automatic mixed precision by our searches, and the pages that AIMET writes about them."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from bitwright.aimet_common.defs import CallbackFunc
from bitwright.aimet_common.names import differs
from bitwright.errors import ConfigError, check_keywords, with_article
from bitwright.precision.auto import AutoResult, auto_quantize
from bitwright.precision.result import MixedPrecision
from bitwright.precision.search import mixed_precision
from bitwright.precision.trials import FIRST, Trial
from bitwright.report.page import points_chart, scores_chart, write_page

# ------------------------------------------------------------------------------------ mixed precision


#: of those that a callback runs, for the estimate of sensitivities
MOST_BATCHES = 16


class AMPSearchAlgo(Enum):
    """Names of AIMET's searches; ours is one and the same for all of them."""

    Binary = 1
    Interpolation = 2
    BruteForce = 3


def choose(
    sim: Any,
    data: Iterable[Any],
    candidates: Sequence[Any],
    evaluate: Callable[[Any], float],
    allowed_accuracy_drop: float | None,
    results_dir: str,
    calibrate: Callable[[Any], Any] | None,
) -> list[tuple[float, float, Any, float]]:
    """The Pareto list: (bit operations relative to the best candidate, metric, choice, predicted dB), the dearest first.

    A simulation without encodings is calibrated first, by ``calibrate`` or on ``data``.
    The simulation has the chosen precisions afterwards; ``results_dir`` gets ``pareto_list.json``,
    ``accuracy_list.json`` and pages of both.
    """
    if not isinstance(evaluate, CallbackFunc) and not callable(evaluate):
        raise ConfigError("eval_callback", f"{evaluate!r} cannot be called", "pass CallbackFunc(function, arguments)")
    drop = 1e9 if allowed_accuracy_drop is None else allowed_accuracy_drop
    _check_drop(drop)
    if any(site.enabled and site.encoding is None and not site.quantizer.derived for site in sim.quantizers.values()):
        sim.compute_encodings(calibrate or list(data))
    result = mixed_precision(
        sim, data, candidates, cost="bit_ops", metric=lambda target: float(evaluate(target)), allowed_drop=drop
    )
    measured = [p for p in result.points if p.metric is not None]
    dear = max((p.costs["bit_ops"] for p in result.points), default=1.0)
    pareto = [
        (p.costs["bit_ops"] / dear, float(p.metric or 0.0), dict(p.choice), p.predicted_db) for p in measured if p.front
    ]
    folder = Path(results_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pareto_list.json").write_text(json.dumps(pareto[::-1], indent=1))
    rows = [[p.name, p.metric, p.costs["bit_ops"] / dear] for p in measured]
    (folder / "accuracy_list.json").write_text(json.dumps(rows, indent=1))
    write_pages(result, folder, dear)
    return pareto[::-1]


def _check_drop(drop: Any) -> None:
    if not isinstance(drop, (int, float)) or not drop >= 0:
        raise ConfigError("allowed_accuracy_drop", f"{drop!r} is not a number from 0 on", "pass 0 or more")


# ------------------------------------------------------------------------------------ AutoQuant


_SCHEMES = (("min_max", "min_max"), ("mse", "mse"), ("percentile", "percentile"))
#: other arguments of AIMET's AutoQuant, which the search decides itself
_DECIDED = (
    "param_bw", "output_bw", "quant_scheme", "rounding_mode", "config_file", "cache_id", "strict_validation", "use_cuda",
    "device", "model_prepare_required",
)  # fmt: skip


class AutoQuant:
    """Finds a quantized model that keeps the accuracy.

    Args:
        model: the float model.
        dummy_input: an input; the data are what is run.
        data_loader: batches without labels.
        eval_callback: ``(model or session) -> accuracy``, or ``(model or session, num_samples) -> accuracy``, where
            ``num_samples`` is ``None``: all of them; higher is better.
        results_dir: folder of the trials; a search that was ended goes on there.
        options: others of AIMET's arguments.

    Raises:
        ConfigError: (a ValueError) an argument is of another kind; one that AIMET does not have is a TypeError too.
    """

    def __init__(
        self,
        model: Any,
        dummy_input: Any,
        data_loader: Iterable[Any],
        eval_callback: Callable[..., float],
        results_dir: str = "./autoquant",
        **options: Any,
    ) -> None:
        other = isinstance(model, (type, int, float, bytes, list, tuple, dict, type(None)))
        batches = isinstance(data_loader, Iterable) and not isinstance(data_loader, (str, bytes))
        strict, rounding = options.get("strict_validation", True), options.get("rounding_mode", "nearest")
        widths = {name: options[name] for name in ("param_bw", "output_bw") if name in options}
        for name, given, right, asked in (
            ("model", model, not other, "a model"),
            ("data_loader", data_loader, batches, "batches without labels"),
            ("eval_callback", eval_callback, callable(eval_callback), "a function of a model"),
            ("results_dir", results_dir, isinstance(results_dir, (str, os.PathLike)), "the folder of the results"),
            ("strict_validation", strict, isinstance(strict, bool), "True or False"),
            ("rounding_mode", rounding, rounding == "nearest", "'nearest'"),
            *((name, width, width in range(4, 33), "4 to 32 bits") for name, width in widths.items()),
        ):
            if not right:
                raise ConfigError(name, f"it is {given!r}, not {asked}", f"pass {asked}")
        self._model, self._data, self._folder = model, list(data_loader), Path(results_dir)
        self._metric: Callable[[Any], float] = eval_callback
        if _takes_samples(eval_callback):
            self._metric = lambda target: eval_callback(target, None)
        self._mixed: tuple[str, ...] = ("w8a8", "w8a16")
        self._adaround: dict[str, Any] | None = None
        self._result: AutoResult | None = None
        self._schemes: list[tuple[str, str]] = list(_SCHEMES)
        check_keywords("AutoQuant", options, _DECIDED)
        if options:
            differs(", ".join(sorted(options)), "the search decides this itself")

    def set_adaround_params(self, adaround_params: Any) -> None:
        """Add a trial with AdaRound: iterations and regulariser of ``AdaroundParameters``, on the data of the search.

        Raises:
            ConfigError: they are not parameters of AdaRound.
        """
        names = {name: f"default_{name}" for name in ("reg_param", "beta_range", "warm_start")}
        names["iterations"] = "default_num_iterations"
        if not all(hasattr(adaround_params, name) for name in names.values()):
            raise ConfigError(
                "adaround_params",
                f"{adaround_params!r} is {with_article(type(adaround_params).__name__)}",
                "pass AdaroundParameters(data_loader, num_batches)",
            )
        found = {key: getattr(adaround_params, name) for key, name in names.items()}
        self._adaround = {key: value for key, value in found.items() if value is not None}

    def set_export_params(self, onnx_export_args: Any = -1, propagate_encodings: bool | None = None) -> None:
        """Without effect, with a warning: names and axes of the exported files are those of the model."""
        differs(
            "set_export_params", "the search writes its files with their defaults; export the simulation it returns"
        )

    def set_model_preparer_params(self, modules_to_exclude: Any = None, **options: Any) -> None:
        """Without effect: models need no preparation."""

    def set_mixed_precision_params(self, candidates: Sequence[Any], *args: Any, **options: Any) -> None:
        """Use these precisions, ``((activation bits, type), (weight bits, type))``, in the trial of mixed precision.

        Raises:
            ConfigError: one is not of integers.
        """
        if any(kind.name != "int" for candidate in candidates for _, kind in candidate):
            raise ConfigError(
                "candidates", f"{candidates!r} has float formats", "give integer formats of 4, 8 or 16 bits"
            )
        if args or options:
            differs(
                "set_mixed_precision_params", "only the candidates have an effect: sensitivities are estimated at once"
            )
        self._mixed = tuple(f"w{weight}a{activation}" for (activation, _), (weight, _) in candidates)

    def get_quant_scheme_candidates(self) -> tuple[tuple[str, str], ...]:
        """Range methods that are tried: (weights, activations)."""
        return tuple(self._schemes)

    def set_quant_scheme_candidates(self, candidates: Sequence[tuple[str, str]]) -> None:
        """Try these range methods instead."""
        self._schemes = [(str(param), str(activation)) for param, activation in candidates]

    def _trials(self) -> list[Trial] | None:
        found = [
            Trial(f"w8a8-{scheme}", "w8a8", scheme, ("fold",), why=f"ranges by {scheme}") for _, scheme in self._schemes
        ]
        rounding = (
            []
            if self._adaround is None
            else [Trial("w8a8-adaround", "w8a8", None, ("fold", {"adaround": self._adaround}))]
        )
        rest = [
            Trial("w8a8-recipe", "w8a8", why="the default recipe"),
            *rounding,
            Trial("mixed", "w8a16", mixed=self._mixed, why="16-bit activations where they matter"),
        ]
        return [FIRST, *found, *rest]

    def run_inference(self) -> tuple[Any, float]:
        """The fastest trial: its simulation and its accuracy."""
        result = self._search([FIRST], 1e9)
        row = result.best or result.nearest
        if row is None:
            raise ConfigError(
                "run_inference", result.reason, "quantize the model with bitwright.quantize to see where it fails"
            )
        return result.simulation(row.name), float(row.metric or 0.0)

    def optimize(self, allowed_accuracy_drop: float = 0.0) -> tuple[Any, float, str]:
        """The best model within the drop, or the nearest: its simulation, its accuracy, the path of its encodings.

        Raises:
            ConfigError: (a ValueError) the drop is not a number from 0 on.
        """
        _check_drop(allowed_accuracy_drop)
        result = self._result = self._search(self._trials(), allowed_accuracy_drop)
        row = result.best or result.nearest
        if row is None or result.folder is None:
            return self._model, float(result.float_metric or 0.0), ""
        encodings = sorted(result.folder.glob("*.encodings"))
        return (
            result.simulation(row.name),
            float(row.metric or 0.0),
            str(encodings[0]) if encodings else str(result.folder),
        )

    def _search(self, trials: list[Trial] | None, drop: float) -> AutoResult:
        folder = self._folder / ("inference" if drop >= 1e9 else f"drop-{drop:g}")
        return auto_quantize(self._model, self._data, self._metric, allowed_drop=drop, folder=folder, trials=trials)


AutoQuantWithAutoMixedPrecision = AutoQuant  # whose last trial is one of mixed precision


def _takes_samples(callback: Callable[..., Any]) -> bool:
    """Whether a callback is called with the number of samples too, as AIMET calls it."""
    try:
        parameters = inspect.signature(callback).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 2 or any(p.name == "num_samples" for p in parameters)


def write_pages(result: MixedPrecision, folder: Path, dearest: float) -> None:
    """``pareto_curve.html`` and ``quantizer_group_sensitivity.html``, pages without scripts.

    Args:
        dearest: bit operations that costs are relative to.
    """
    name = str(result.metric["name"]) if result.metric is not None else "metric"
    shown = {
        f"{'front' if front else 'other'}: {p.name}": (p.costs["bit_ops"] / dearest, float(p.metric))
        for front in (True, False)
        for p in result.points
        if p.front == front and p.metric is not None
    }
    fronts = {label: point for label, point in shown.items() if label.startswith("front")}
    axes = ("relative bit operations", name)
    write_page(
        folder / "pareto_curve.html",
        "Mixed precision: Pareto front",
        points_chart(fronts, *axes, joined=True),
        points_chart(shown, *axes, title="All points that were measured"),
    )
    by_candidate = {
        candidate: {group: values[candidate] for group, values in result.sensitivities.items() if candidate in values}
        for candidate in result.candidates
    }
    write_page(
        folder / "quantizer_group_sensitivity.html",
        "Mixed precision: SQNR of the outputs with one group alone at a precision, as estimated",
        *(scores_chart(scores, "dB", candidate) for candidate, scores in by_candidate.items() if scores),
    )
