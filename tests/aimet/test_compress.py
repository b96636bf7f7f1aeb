"""Channel pruning by AIMET's names: what is refused, and that a residual sum is pruned as a whole."""

from __future__ import annotations

import pytest
import torch

from bitwright.aimet_common.defs import CompressionScheme, CostMetric
from bitwright.aimet_torch.compress import ChannelPruningParameters, ModelCompressor, ModuleCompRatioPair
from bitwright.errors import CalibrationError, ConfigError


class Sum(torch.nn.Module):
    """Two convolutions read what two others make together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, padding=1)
        self.last = torch.nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        return self.last(x + self.body(x).relu())


def pruned(model: Sum, pairs: list[tuple[str, float]], images: list[torch.Tensor]):
    given = [ModuleCompRatioPair(getattr(model, name), ratio) for name, ratio in pairs]
    params = ChannelPruningParameters(
        images, 16, False, ChannelPruningParameters.Mode.manual, ChannelPruningParameters.ManualModeParams(given)
    )
    return ModelCompressor.compress_model(
        model, lambda *_, **__: 1.0, 1, (1, 3, 6, 6), CompressionScheme.channel_pruning, CostMetric.mac, params
    )


def test_layers_that_share_their_channels_are_pruned_together():
    torch.manual_seed(0)
    model, images = Sum().eval(), [torch.randn(16, 3, 6, 6)]
    compressed, stats = pruned(model, [("last", 0.5)], images)
    assert [compressed.stem.out_channels, compressed.body.in_channels, compressed.body.out_channels] == [4, 4, 4]
    assert {layer.name: layer.compression_ratio for layer in stats.per_layer_stats} == {"body": 0.5, "last": 0.5}


@pytest.mark.parametrize(
    "pairs, images, kind, message",
    [
        ([("stem", 0.5)], True, ConfigError, "stem: its input channels cannot be removed: last: the model returns it"),
        ([("body", 0.5), ("last", 0.25)], True, ConfigError, "last: it reads the same channels as body.*give both 0.5"),
        ([("last", 1.5)], True, ConfigError, "last: 1.5 is not a ratio"),
        ([("last", 0.5)], False, CalibrationError, "data_loader: it held no image"),
    ],
)
def test_bad_input(pairs, images, kind, message):
    with pytest.raises(kind, match=message):
        pruned(Sum().eval(), pairs, [torch.randn(16, 3, 6, 6)] if images else [])
