"""Operators of a user, cut by the rule that was registered for them; a rule that is not true is found out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.compression.rules import CHANNEL_RULES, ChannelRule
from bitwright.errors import ConfigError
from bitwright.testing import check


@torch.library.custom_op("bitwright_tests::gate", mutates_args=())
def gate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A factor per channel."""
    return x * torch.sigmoid(w)[:, None, None]


@torch.library.custom_op("bitwright_tests::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A layer: channels of ``x`` are summed over, and rows of ``w`` make others."""
    return torch.einsum("nchw,dc->ndhw", x, w)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.factors, self.matrix = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = gate(self.stem(x), self.factors)
        return self.head(project(x, self.matrix).relu()).mean((2, 3))


DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))]


@pytest.fixture
def rules() -> Iterator[None]:
    yield
    CHANNEL_RULES.clear()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def _teach(**rules: str) -> None:
    for name, rule in rules.items():
        bitwright.register("channel_rules", name, rule)


def test_operators_are_cut_by_their_rules(net: Net, rules: None) -> None:
    """Both groups lose channels, and what is left is the whole model with these channels at zero."""
    _teach(gate="n C ..., C -> n C ...", project="n C h w, D C -> n D h w")
    check("channel_rules", "gate")
    result = bitwright.compress(
        net, DATA, {"macs": 0.5}, widths=1, reconstruction=False, ranking="uniform", progress=False
    )
    gone = {row.name: list(row.removed) for row in result.rows}
    assert len(gone) == 2 and all(gone.values()), gone
    width = result.model.stem.out_channels
    assert result.model.factors.shape == (width,) and result.model.matrix.shape[1] == width
    with torch.no_grad():
        net.stem.weight[gone["stem"]] = 0
        net.stem.bias[gone["stem"]] = 0
        net.matrix[next(units for name, units in gone.items() if name != "stem")] = 0
        np.testing.assert_allclose(result.model(DATA[0]), net(DATA[0]), atol=1e-5)


def test_an_operator_without_a_rule_is_named_with_the_remedy(net: Net, rules: None) -> None:
    with pytest.raises(ConfigError, match="which the dependency graph has no rule for: see docs/plugins.md"):
        bitwright.compress(net, DATA, {"macs": 0.5}, progress=False)


def test_a_rule_that_is_not_true_is_found_out(net: Net, rules: None) -> None:
    """``project`` does not leave channels as they are: nothing is cut by such a rule."""
    _teach(gate="n C ..., C -> n C ...", project="n C h w, C d -> n C h w")
    with pytest.raises(ConfigError):
        bitwright.compress(net, DATA, {"macs": 0.5}, widths=1, progress=False)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("n C h w", "has no arrow.*write names of axes, channels in capitals"),
        ("n C 3 -> n C 3", "'3' is no name"),
        ("n c -> n D", "no input has the channels D"),
        ("... C ... -> C", "has ... twice"),
        (7, "7 is no rule"),
    ],
)
def test_what_is_no_rule(rule: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bitwright.register("channel_rules", "mine", rule)


def test_axes_that_are_not_named_stay() -> None:
    rule = ChannelRule.of("n C ..., C -> n C ...")
    assert rule.axes(rule.inputs[0], 4) == ("", "C", "", "") and rule.axes(rule.inputs[0], 2) == ("", "C")
    assert rule.axes(rule.inputs[1], 2) is None
