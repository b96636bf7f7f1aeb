"""Stopping a function at one file operation after the other, in forked copies of a process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

Stop = Literal["kill", "interrupt"]

_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def _changes_files(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        return isinstance(arguments[1], str) and bool(set(arguments[1]) & set("wax+"))
    return event in _CHANGES


class Watch:
    """An audit hook that stops its process before the ``at``-th change of files below a folder, from 0."""

    def __init__(self, folder: Path, at: int | None, stop: Stop) -> None:
        self.folder, self.at, self.stop, self.seen = os.path.realpath(folder), at, stop, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not _changes_files(event, arguments) or not str(arguments[0]).startswith(self.folder):
            return
        self.seen += 1
        if self.seen - 1 == self.at:
            if self.stop == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt


def in_a_copy(function: Callable[[], int]) -> int:
    """Exit code of a forked process that runs ``function``, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        code = 99
        try:
            code = function()
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stops(function: Callable[[Path], object], folders: Iterator[Path], stop: Stop) -> Iterator[Path]:
    """Run ``function`` on one folder after the other, each time stopped one change of files later.

    Ends after the folder in which it was not stopped any more.
    """
    for at, folder in enumerate(folders):

        def run(folder: Path = folder, at: int = at) -> int:
            sys.addaudithook(Watch(folder, at, stop))
            function(folder)
            return 0

        code = in_a_copy(run)
        assert code in (0, 130 if stop == "interrupt" else -signal.SIGKILL), code
        yield folder
        if code == 0:
            return
