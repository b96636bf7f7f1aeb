"""``aimet_onnx.mixed_precision``: automatic mixed precision under AIMET's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bitwright.aimet_common.amp import MOST_BATCHES, AMPSearchAlgo, choose
from bitwright.aimet_common.defs import CallbackFunc, qtype
from bitwright.precision.measure import analyze_groups, lower_in_order

__all__ = ["AMPSearchAlgo", "analyze_mixed_precision_sensitivity", "apply_amp", "choose_mixed_precision"]


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
    return choose(sim, feeds, candidates, eval_callback_for_phase2, allowed_accuracy_drop, results_dir)


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
