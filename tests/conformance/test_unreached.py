"""Sites that no batch reached: named with what becomes of them."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import CalibrationError
from bitwright.torch import QuantizationSimModel


class Branch(nn.Module):
    """Two ways, of which the sign of the data chooses one."""

    def __init__(self, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), b

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def test_eight_sites_are_named_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(1, 2)
    sim = QuantizationSimModel(Branch(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))), x, examples=[-x])
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim.compute_encodings([x])
    assert re.search(r"never reached 10 site.*: b\.0\.output\[0\].*, b\.7\.output\[0\] and 2 more\n", caplog.text)


def test_sites_that_calibration_never_reached(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(1, 2)
    sim = QuantizationSimModel(Branch(nn.Linear(2, 2)), x, examples=[-x])
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim.compute_encodings([x])
    assert re.search(r"never reached 1 site\(s\), without an encoding; using them is an error: b\.output", caplog.text)
    with pytest.raises(
        CalibrationError, match=r"b\.output\[0\]: the quantizer has no encoding: calibration never reached"
    ):
        sim.model(-x)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bitwright"):
        sim.compute_encodings([x], allow_unreached=True)
    assert re.search(r"never reached 1 site\(s\), left in float: b\.output", caplog.text)
    assert torch.isfinite(sim.model(-x)).all()
