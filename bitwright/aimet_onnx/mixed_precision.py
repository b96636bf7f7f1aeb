"""``aimet_onnx.mixed_precision`` and ``aimet_onnx.lite_mp``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bitwright.aimet_common.defs import CallbackFunc, qtype
from bitwright.aimet_common.search import MOST_BATCHES, AMPSearchAlgo, choose
from bitwright.errors import ConfigError
from bitwright.precision.manual import PrecisionRequest, set_precisions
from bitwright.precision.measure import analyze_groups, lower_in_order

__all__ = [
    "AMPSearchAlgo", "analyze_mixed_precision_sensitivity", "apply_amp", "choose_mixed_precision",
    "flip_layers_to_higher_precision",
]  # fmt: skip


def choose_mixed_precision(
    sim: Any,
    candidates: list[Any],
    eval_callback_for_phase1: CallbackFunc,
    eval_callback_for_phase2: CallbackFunc,
    allowed_accuracy_drop: float | None,
    results_dir: str,
    clean_start: bool = True,
    forward_pass_callback: CallbackFunc | None = None,
    use_all_amp_candidates: bool = False,
    phase1_optimize: bool = True,
    amp_search_algo: AMPSearchAlgo = AMPSearchAlgo.Binary,
    *,
    phase2_reverse: bool = False,
    data: Iterable[Any] | None = None,
) -> list[tuple[float, float, Any, float]]:
    """Choose the precision of every group of layers; see :func:`bitwright.mixed_precision`.

    As in ``aimet_torch.mixed_precision``; callbacks get the session. ``data`` are feeds on which sensitivities are estimated;
    by default the first of those that ``forward_pass_callback`` runs, or the example input.
    """
    feeds = data
    if feeds is None and forward_pass_callback is not None:
        recorder = _Recorder(sim)
        forward_pass_callback(recorder)
        feeds = recorder.feeds
    feeds = [sim.example()] if feeds is None or feeds == [] else feeds
    return choose(
        sim, feeds, candidates, eval_callback_for_phase2, allowed_accuracy_drop, results_dir, forward_pass_callback
    )


class _Recorder:
    """The session of a simulation, which keeps the first feeds that it runs."""

    def __init__(self, sim: Any) -> None:
        self._session = sim.session
        self.feeds: list[Any] = []

    def run(self, output_names: Any, input_feed: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the session."""
        if len(self.feeds) < MOST_BATCHES:
            self.feeds.append(dict(input_feed))
        return self._session.run(output_names, input_feed, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def analyze_mixed_precision_sensitivity(
    sim: Any,
    precisions: Sequence[Any],
    eval_fn: Callable[[Any], float],
    calibration_input: Callable[[Any], Any] | Iterable[Any] | None = None,
) -> dict[tuple[str, str], float]:
    """Metric with one group alone at a precision and the others at the best one: (group, candidate) -> metric.

    Args:
        sim: calibrated, or with ``calibration_input``.
        precisions: pairs ``(param_type, activation_type)`` of number formats, or candidates as for
            :func:`bitwright.mixed_precision`.
        eval_fn: ``(session) -> metric``; higher is better.
        calibration_input: feeds, or a function of the session that runs them.
    """
    if calibration_input is not None:
        sim.compute_encodings(calibration_input if callable(calibration_input) else list(calibration_input))
    return analyze_groups(sim, [_candidate(precision) for precision in precisions], eval_fn)


def _candidate(precision: Any) -> Any:
    """A pair of number formats, weights first, as the pair that our search takes, activations first."""
    if not isinstance(precision, tuple | list) or not all(isinstance(p, qtype | str) for p in precision):
        return precision
    weight, activation = (qtype.as_qtype(p).to_legacy_repr()[::-1] for p in precision)
    return activation, weight


def apply_amp(sim: Any, sensitivity_dict: dict[tuple[str, str], float], acceptance_fn: Callable[[Any], bool]) -> Any:
    """Lower groups, the least sensitive first, while ``acceptance_fn(session)`` holds; the last accepted state stays.

    Returns:
        ``sim``.
    """
    return lower_in_order(sim, sensitivity_dict, acceptance_fn)


# ------------------------------------------------------------------------------------ by a sensitivity that is known


def flip_layers_to_higher_precision(
    sim: Any,
    layer_sensitivity_dict: dict[str, float],
    percent_to_flip: float = 10.0,
    override_precision: Any = "float16",
) -> list[str]:
    """Give the most sensitive layers a higher precision: what they read and compute, and their weights.

    Args:
        sim: the simulation; changed in place.
        layer_sensitivity_dict: layer -> SQNR or PSNR with it alone quantized; the lower, the more sensitive.
        percent_to_flip: share of the layers, 0 to 100; a part of a layer is one.
        override_precision: a number format, or one for weights and one for activations.

    Raises:
        ConfigError: (a ValueError) a share or precisions that have no meaning.

    Returns:
        The layers, the most sensitive first.
    """
    if not 0 <= percent_to_flip <= 100:
        raise ConfigError("percent_to_flip", f"{percent_to_flip!r} is not a share", "use 0 to 100")
    several = override_precision if isinstance(override_precision, tuple | list) else [override_precision] * 2
    if len(several) != 2:
        raise ConfigError(
            "override_precision", f"{override_precision!r} is not a pair", "give (param_type, activation_type)"
        )
    weight, activation = (qtype.as_qtype(one) for one in several)
    count = math.ceil(len(layer_sensitivity_dict) * percent_to_flip / 100)
    worst = sorted(layer_sensitivity_dict, key=lambda name: layer_sensitivity_dict[name])[:count]
    if worst:
        set_precisions(sim, [PrecisionRequest(tuple(worst), str(activation), str(weight))], strict=False)
    for quantizer in (q for name in worst for q in sim.get_op_quantizers(name)[1]):
        quantizer.set_precision(activation)
    return worst
