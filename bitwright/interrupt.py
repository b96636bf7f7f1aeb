"""Handle Ctrl-C for a whole program: the first press asks it to stop, the second ends it at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130  # exit code of a program that Ctrl-C ended, as shells report it

_CAN_WAIT = hasattr(signal, "setitimer")  # not on Windows
_AGAIN = 0.05  # seconds between two looks whether an import has ended


class Interrupts:
    """The interrupts received so far.

    Attributes:
        seen: Ctrl-C was pressed. The KeyboardInterrupt itself may be lost: Python drops exceptions of finalizers, and some C
            extensions replace it with errors of their own.
    """

    def __init__(self) -> None:
        self.seen = False
        self._imports = _imports(sys._getframe())
        self._alarm: Any = None  # the handler that the clock had, where one waits for an import

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if _CAN_WAIT and _imports(frame) > self._imports:
            former = signal.signal(signal.SIGALRM, self._raise)
            self._alarm = former if self._alarm is None else self._alarm
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        raise KeyboardInterrupt

    def _end(self) -> None:
        if self._alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm)


@contextmanager
def watched() -> Iterator[Interrupts]:
    """Handle Ctrl-C inside the block; for the main thread of a program, not for a library.

    Python handles a signal only between two of its own instructions. While C code runs (a large product, a session), the first
    Ctrl-C waits; the second is noticed by a thread and ends the process with code 130. Files stay intact, as they are written
    atomically. An import that began inside the block is completed first: C++ extensions abort the process when a
    KeyboardInterrupt reaches them while they are loaded. Where Ctrl-C is ignored or handled elsewhere, nothing changes.
    """
    found = Interrupts()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield found
        return
    near, far = socket.socketpair()
    far.setblocking(False)
    thread = threading.Thread(target=_watch, args=(near,), daemon=True)
    handler: Any = signal.signal(signal.SIGINT, found._raise)
    wakeup = signal.set_wakeup_fd(far.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield found
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, handler)
        found._end()
        far.close()
        thread.join()
        near.close()


def _imports(frame: FrameType | None) -> int:
    """Number of imports among the calls that led to ``frame``."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return count


def _watch(signals: socket.socket) -> None:
    """Count presses of Ctrl-C: the C level writes a byte for every signal, whatever Python is doing."""
    pressed = 0
    while received := signals.recv(64):
        before, pressed = pressed, pressed + received.count(signal.SIGINT)
        if pressed > 1:
            _say("\x1b[?25h" if sys.stderr.isatty() else "")  # a progress bar may have hidden the cursor
            os._exit(INTERRUPTED)
        if pressed > before:
            _say("stopping; Ctrl-C again ends at once\n")


def _say(text: str) -> None:
    os.write(2, text.encode())
