"""The progress bar: only on a terminal, only when it takes long, and never in the way of the items."""

from __future__ import annotations

import gc
import importlib.machinery
import io
import sys
import types

import pytest

from bitwright.progress import collector_paused, in_notebook, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "enabled", "delay", "shown"),
    [(True, True, 0.0, True), (True, True, 60.0, False), (True, False, 0.0, False), (False, True, 0.0, False)],
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


class Kernel:
    """What ``ipykernel.zmqshell`` is to ``in_notebook``."""

    class ZMQInteractiveShell:
        running = True

        @classmethod
        def initialized(cls) -> bool:
            return cls.running


@pytest.mark.parametrize(("running", "widgets"), [(True, True), (False, True), (True, False)])
def test_a_notebook_that_has_widgets_shows_a_bar(monkeypatch: pytest.MonkeyPatch, running: bool, widgets: bool) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", Kernel)  # type: ignore[arg-type]
    monkeypatch.setattr(Kernel.ZMQInteractiveShell, "running", running)
    spec = importlib.machinery.ModuleSpec("ipywidgets", None)
    widget = types.ModuleType("ipywidgets")
    widget.__spec__ = spec
    monkeypatch.setitem(sys.modules, "ipywidgets", widget if widgets else None)  # type: ignore[arg-type]
    assert in_notebook() == (running and widgets)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # no terminal
    assert list(progress([1, 2], "calibrating", delay=0.0)) == [1, 2]
    # rich draws with the widgets of a real kernel; here it finds neither kernel nor terminal, and ends a line
    assert bool(sys.stderr.getvalue()) == (running and widgets)  # type: ignore[attr-defined]
