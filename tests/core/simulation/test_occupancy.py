"""Many threads run a simulation, or one changes it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

from bitwright.core.simulation.simulation import Lock, Occupancy
from bitwright.errors import BusyError


def elsewhere(function: Callable[[], object]) -> Exception | None:
    """What ``function`` raises in another thread."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return errors[0] if errors else None


def test_many_run_and_one_changes() -> None:
    use = Occupancy("copy it")
    use.enter()
    assert elsewhere(lambda: (use.enter(), use.leave())) is None and not use.crowded
    assert isinstance(elsewhere(use.exclusive("calibration").__enter__), BusyError)
    with use.exclusive("calibration"), use.exclusive("recording"):  # within a run of its own
        error = elsewhere(use.enter)
        assert isinstance(error, BusyError)
        assert "(recording)" in error.problem and error.remedy.endswith("or copy it")
        assert elsewhere(copy.deepcopy(use).enter) is None
    use.leave()
    assert elsewhere(use.exclusive("calibration").__enter__) is None


def test_a_thread_that_ended_holds_nothing() -> None:
    use = Occupancy("copy it")
    elsewhere(use.enter)
    block = use.exclusive("calibration")
    assert elsewhere(block.__enter__) is None
    use.check()
    with use.exclusive("calibration"):
        pass


def test_copies_of_a_lock_are_free() -> None:
    lock = Lock()
    with lock, copy.deepcopy(lock) as _:
        assert elsewhere(copy.deepcopy(lock).__enter__) is None
