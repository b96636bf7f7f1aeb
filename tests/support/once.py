"""What takes long and is the same for all processes of a run of the tests: one of them makes it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def once(name: str, make: Callable[[], T], folders: pytest.TempPathFactory) -> T:
    """What ``make`` returns, by way of JSON; a process that comes while another one makes it waits for that.

    Args:
        name: of a file.
        make: returns lists, dicts with text as keys, numbers and text.
        folders: the fixture ``tmp_path_factory``.
    """
    folder = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers
    file = folder / f"{name}.json"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            made = json.dumps(make())
            file.write_text(made)
    found: T = json.loads(file.read_text())
    return found
