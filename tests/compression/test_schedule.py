"""Schedules of compression in a training loop."""

import pytest

from bitwright.compression.schedule import CompressionSchedule
from bitwright.errors import ConfigError


@pytest.mark.parametrize("kind, steps", [("one_shot", 1), ("iterative", 3), ("gradual", 5)])
def test_parts_fall_to_the_target_and_a_checkpoint_goes_on(kind, steps):
    schedule = CompressionSchedule(0.3, kind, steps=steps, first=4, every=7)
    whole = [(n, part) for n in range(60) if (part := schedule.step()) is not None]
    assert [n for n, _ in whole] == [4 + 7 * k for k in range(steps)]
    parts = [part for _, part in whole]
    assert parts == sorted(parts, reverse=True) and parts[-1] == pytest.approx(0.3)
    first, second = (CompressionSchedule(0.3, kind, steps=steps, first=4, every=7) for _ in range(2))
    begun = [part for _ in range(9) if (part := first.step()) is not None]
    second.load_state_dict(first.state_dict())
    assert begun + [part for _ in range(51) if (part := second.step()) is not None] == parts


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kind": "gradul"}, "no schedule 'gradul' .*did you mean 'gradual'"),
        ({"target": 1.0}, "1.0 is not a part that is left"),
        ({"kind": "iterative", "steps": 0}, "0 is not a number of steps"),
        ({"steps": 3}, "one_shot has one step, not 3"),
    ],
)
def test_bad_schedules_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CompressionSchedule(**{"target": 0.5, **options})
