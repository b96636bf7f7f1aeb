"""AIMET's automatic mixed precision by our search: candidates, callbacks and ``pareto_list.json`` of both front ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from bitwright.aimet_common.defs import CallbackFunc
from bitwright.errors import ConfigError
from bitwright.mixed.search import mixed_precision


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
) -> list[tuple[float, float, Any, float]]:
    """The Pareto list: (bit operations relative to the best candidate, metric, choice, predicted dB), the dearest first.

    The simulation has the chosen precisions afterwards; ``results_dir`` gets ``pareto_list.json`` and ``accuracy_list.json``.
    """
    if not isinstance(evaluate, CallbackFunc) and not callable(evaluate):
        raise ConfigError(
            "eval_callback", f"{evaluate!r} cannot be called", "pass CallbackFunc(function, arguments)"
        )
    drop = 1e9 if allowed_accuracy_drop is None else allowed_accuracy_drop
    if drop < 0:
        raise ConfigError(
            "allowed_accuracy_drop", f"{drop} is below zero", "pass 0 or more, or None for the whole front"
        )
    result = mixed_precision(
        sim,
        data,
        candidates,
        cost="bit_ops",
        metric=lambda target: float(evaluate(target)),
        allowed_drop=drop,
    )
    measured = [p for p in result.points if p.metric is not None]
    dear = max((p.costs["bit_ops"] for p in result.points), default=1.0)
    pareto = [
        (p.costs["bit_ops"] / dear, float(p.metric or 0.0), dict(p.choice), p.predicted_db)
        for p in measured
        if p.front
    ]
    folder = Path(results_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pareto_list.json").write_text(json.dumps(pareto[::-1], indent=1))
    rows = [[p.name, p.metric, p.costs["bit_ops"] / dear] for p in measured]
    (folder / "accuracy_list.json").write_text(json.dumps(rows, indent=1))
    return pareto[::-1]
