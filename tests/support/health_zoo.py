"""Models with one planted fault each, and models that only look as if they had one, for both front ends.

The tables are those of ``tests.onnx.faulty`` and ``tests.torch.faulty``.
"""

from __future__ import annotations

from typing import Any

from tests.onnx import faulty as onnx_zoo
from tests.support.faults import Fault, LookAlike
from tests.torch import faulty as torch_zoo

FAULTS: dict[str, list[Fault]] = {"onnx": onnx_zoo.FAULTS, "torch": torch_zoo.FAULTS}
LOOK_ALIKES: dict[str, list[LookAlike]] = {"onnx": onnx_zoo.LOOK_ALIKES, "torch": torch_zoo.LOOK_ALIKES}


def check(front: str, case: Fault | LookAlike) -> Any:
    """The report of the doctor of a front end."""
    if front == "onnx":
        from bitwright.onnx import check_model
    else:
        from bitwright.torch import check_model
    return check_model(*case.build())
