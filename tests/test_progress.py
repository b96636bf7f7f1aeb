"""The progress bar: only on a terminal, only when it takes long, and never in the way of the items."""

from __future__ import annotations

import gc
import io
import sys

import pytest

from bitwright.progress import collector_paused, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "enabled", "delay", "shown"),
    [
        (True, True, 0.0, True),
        (True, True, 60.0, False),
        (True, False, 0.0, False),
        (False, True, 0.0, False),
    ],
    ids=["long", "short", "switched off", "no terminal"],
)
def test_when_a_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, enabled: bool, delay: float, shown: bool
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress([1, 2, 3], "calibrating", enabled, delay)) == [1, 2, 3]
    assert ("calibrating" in stream.getvalue()) == shown


def test_the_bar_ends_when_the_work_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(KeyboardInterrupt):
        for item in progress(range(5), "calibrating", delay=0.0):
            if item == 3:
                raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in stream.getvalue()  # the cursor is back


def test_the_collector_is_paused_and_comes_back() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), collector_paused():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
