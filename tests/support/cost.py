"""The cost of a call as a number that no machine's load changes, and how deep it may call."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def steps(call: Callable[[], object]) -> int:
    """Lines of Python that `call` executes on this thread: linear code executes so many per operator.

    Python's collector waits: the finalizers that it runs belong to tests before this one.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


@contextmanager
def calls_left(count: int) -> Iterator[None]:
    """Let code run ``count`` calls deeper than here: shorter chains show that nothing recurses over them."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(list(traceback.walk_stack(None))) + count)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
