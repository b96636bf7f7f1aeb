"""Collective operations of this package end with their tensors: no other thread drops one later."""

from __future__ import annotations

import threading
import time
import weakref

import torch

from bitwright.torch.ranks import run_to_release


class Holder:
    """A thread that holds a tensor for a while after the operation that was given it has returned, as gloo's do."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.holds = False

    def __call__(self, tensor: torch.Tensor) -> None:
        self.holds = True
        threading.Thread(target=self._hold, args=([tensor],), daemon=True).start()

    def _hold(self, box: list[torch.Tensor]) -> None:
        time.sleep(self.seconds)
        self.holds = False
        box.clear()


def test_an_operation_lasts_until_no_other_thread_holds_its_tensor() -> None:
    hold, tensor = Holder(0.05), torch.zeros(2)
    run_to_release(hold, tensor, seconds=60.0)
    gone = weakref.ref(tensor)
    assert not hold.holds
    del tensor
    assert gone() is None


def test_a_thread_that_keeps_the_tensor_is_not_waited_for_without_end() -> None:
    hold, tensor = Holder(0.5), torch.zeros(2)
    run_to_release(hold, tensor, seconds=0.02)
    assert hold.holds
