"""Weights rounded to float4 in blocks of input channels."""

from __future__ import annotations

import pytest
import torch

from bitwright.aimet_torch.module_quantizers import mxfp4_rounded, nvfp4_rounded


def test_numbers_of_the_grid_stay_and_blocks_of_mxfp4_share_a_power_of_two() -> None:
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    weight = torch.cat([grid * 4, -grid / 8]).reshape(1, 16)
    assert torch.equal(mxfp4_rounded(weight, 8), weight)
    assert torch.equal(nvfp4_rounded(weight[:, :8].repeat(1, 2), torch.full((1, 1), 2.0).to(torch.float8_e4m3fn), 2.0),
                       weight[:, :8].repeat(1, 2))  # fmt: skip


def test_blocks_and_scales_that_do_not_fit_are_refused() -> None:
    weight = torch.ones(2, 32)
    with pytest.raises(ValueError, match="blocks of 5 do not divide 32 input channels"):
        mxfp4_rounded(weight, 5)
    with pytest.raises(ValueError, match="give the scales as torch.float8_e4m3fn"):
        nvfp4_rounded(weight, torch.ones(2, 2), 1.0)
    with pytest.raises(ValueError, match=r"give shape \(2, 2\) and a single number"):
        nvfp4_rounded(weight, torch.ones(2, 1).to(torch.float8_e4m3fn), 1.0)
