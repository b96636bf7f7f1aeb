"""AIMET's ``AutoQuant`` by :func:`bitwright.auto_quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bitwright.aimet_common.absent import differs
from bitwright.errors import ConfigError
from bitwright.precision.auto import AutoResult, auto_quantize
from bitwright.precision.trials import FIRST, Trial

_SCHEMES = (("min_max", "min_max"), ("mse", "mse"), ("percentile", "percentile"))


class AutoQuant:
    """Finds a quantized model that keeps the accuracy.

    Args:
        model: the float model.
        dummy_input: taken from the data; kept for AIMET's order of arguments.
        data_loader: batches without labels.
        eval_callback: ``(model or session) -> accuracy``; higher is better.
        results_dir: folder of the trials; a search that was ended goes on there.
        options: others of AIMET's arguments.
    """

    def __init__(
        self,
        model: Any,
        dummy_input: Any,
        data_loader: Iterable[Any],
        eval_callback: Callable[[Any], float],
        results_dir: str = "./autoquant",
        **options: Any,
    ) -> None:
        self._model, self._data, self._metric, self._folder = (
            model,
            list(data_loader),
            eval_callback,
            Path(results_dir),
        )
        self._adaround: dict[str, Any] | None = None
        self._result: AutoResult | None = None
        self._schemes: list[tuple[str, str]] = list(_SCHEMES)
        if options:
            differs(", ".join(sorted(options)), "the search decides this itself")

    def set_adaround_params(self, adaround_params: Any) -> None:
        """Add a trial with AdaRound: iterations and regulariser of ``AdaroundParameters``, on the data of the search.

        Raises:
            ConfigError: they are none.
        """
        names = {
            "reg_param": "default_reg_param",
            "beta_range": "default_beta_range",
            "warm_start": "default_warm_start",
        }
        names["iterations"] = "default_num_iterations"
        if not all(hasattr(adaround_params, name) for name in names.values()):
            raise ConfigError(
                "adaround_params",
                f"{adaround_params!r} is a {type(adaround_params).__name__}",
                "pass AdaroundParameters(data_loader, num_batches)",
            )
        found = {key: getattr(adaround_params, name) for key, name in names.items()}
        self._adaround = {key: value for key, value in found.items() if value is not None}

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
            Trial("mixed", "w8a16", mixed=("w8a8", "w8a16"), why="16-bit activations where they matter"),
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
        """The best model within the drop, or the nearest: its simulation, its accuracy, the path of its encodings."""
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
