"""``aimet_onnx.mixed_precision``: automatic mixed precision under AIMET's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bitwright.aimet_common.amp import AMPSearchAlgo, choose
from bitwright.aimet_common.defs import CallbackFunc
from bitwright.mixed.sensitivity import analyze_groups, lower_in_order

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

    As in ``aimet_torch.mixed_precision``; callbacks get the session. ``data`` are feeds on which sensitivities are estimated; the
    example input by default.
    """
    feeds = [sim.example()] if data is None else data
    return choose(sim, feeds, candidates, eval_callback_for_phase2, allowed_accuracy_drop, results_dir)


def analyze_mixed_precision_sensitivity(
    sim: Any,
    precisions: Sequence[Any],
    eval_fn: Callable[[Any], float],
    calibration_input: Iterable[Any] | None = None,
) -> dict[tuple[str, str], float]:
    """Metric with one group alone at a precision and the others at the best one: (group, candidate) -> metric.

    Args:
        sim: calibrated, or with ``calibration_input``.
        precisions: candidates, as for :func:`bitwright.mixed_precision`.
        eval_fn: ``(session) -> metric``; higher is better.
        calibration_input: feeds.
    """
    if calibration_input is not None:
        sim.compute_encodings(list(calibration_input))
    return analyze_groups(sim, precisions, eval_fn)


def apply_amp(
    sim: Any, sensitivity_dict: dict[tuple[str, str], float], acceptance_fn: Callable[[Any], bool]
) -> Any:
    """Lower groups, the least sensitive first, while ``acceptance_fn(session)`` holds; the last accepted state stays.

    Returns:
        ``sim``.
    """
    return lower_in_order(sim, sensitivity_dict, acceptance_fn)
