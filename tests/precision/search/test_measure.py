"""Noise and metrics of points."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from scipy.stats import norm

from bitwright.precision.measure import Metric, Noise, Score
from bitwright.precision.result import Goal, Seen


def test_noise_of_several_outputs_adds_up() -> None:
    """What disturbs one output only and what disturbs the other: together they cost the sum; a mean of dB is not a sum."""
    wanted = [np.ones((4, 8), np.float32), np.ones((4, 2), np.float32)]
    added = [0.0, 0.0]
    subject = SimpleNamespace(
        front_end="torch",
        outputs=lambda batch, in_float: [y + (0.0 if in_float else a) for y, a in zip(wanted, added, strict=True)],
    )
    noise = Noise(cast(Any, subject), [0] * 5)
    found = []
    for added[:] in ([0.1, 0.0], [0.0, 0.01], [0.1, 0.01]):
        found.append(noise.measure())
    assert found[0] == pytest.approx(0.01 / 2, rel=1e-3) and found[2] == pytest.approx(found[0] + found[1], rel=1e-3)
    added[:] = [np.nan, 0.0]
    assert noise.measure() == np.inf


class Normal:
    """A metric whose drops have a normal error of 1 on either half of the samples."""

    allowed, held_back = 10.0, 100

    def bound(self, score: Score, confidence: float) -> float:
        return score.mean + float(norm.ppf(confidence))


def test_a_safe_point_is_borne_out_19_times_of_20() -> None:
    goal = Goal("weight_bytes", {}, cast(Metric, Normal()), None, 12, 0.9)
    true = np.linspace(4, 10, 61)
    random = np.random.default_rng(0)
    safe = passed = 0
    for drop in np.repeat(true, 200):
        seen = drop + random.normal()
        point = Seen((0,), 1.0, 1e-3, Score(np.float64(seen)), seen, seen + 1.2816)
        if goal.safe(point):
            safe += 1
            passed += drop + random.normal() + 1.2816 <= 10
    assert safe > 1000 and passed / safe > 0.95
    edge = 10 - 3.7  # a point there is safe by what is seen of it; by luck alone it fails once in twenty times
    again = edge + random.normal(0, np.sqrt(2), 4000) + 1.2816 <= 10
    assert goal.safe(Seen((0,), 1.0, 1e-3, Score(np.float64(edge)), edge, edge)) and again.mean() > 0.94
