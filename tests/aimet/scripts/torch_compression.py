"""Compression of a torch model, as AIMET's documentation has it."""

import os
from decimal import Decimal

import torch

from tests.aimet.nets import Net, images


def _evaluate(model: torch.nn.Module, eval_iterations: int, use_cuda: bool = False) -> float:
    torch.manual_seed(1)
    x = torch.randn(8, 3, 12, 12)
    with torch.no_grad():
        return float(-(model(x) - _REFERENCE(x)).square().mean())


_REFERENCE = Net().eval()


def spatial_svd_auto_mode():
    from aimet_common.defs import CompressionScheme, CostMetric, GreedySelectionParameters
    from aimet_torch.compress import ModelCompressor
    from aimet_torch.defs import SpatialSvdParameters

    model = _REFERENCE
    greedy_params = GreedySelectionParameters(target_comp_ratio=Decimal(0.8), num_comp_ratio_candidates=4)
    auto_params = SpatialSvdParameters.AutoModeParams(greedy_params, modules_to_ignore=[model.conv1])
    params = SpatialSvdParameters(SpatialSvdParameters.Mode.auto, auto_params, multiplicity=1)
    results = ModelCompressor.compress_model(
        model,
        eval_callback=_evaluate,
        eval_iterations=1000,
        input_shape=(1, 3, 12, 12),
        compress_scheme=CompressionScheme.spatial_svd,
        cost_metric=CostMetric.mac,
        parameters=params,
    )
    compressed_model, stats = results
    assert "Compression ratio for" in str(stats) and float(stats.mac_compression_ratio) <= 0.8
    assert isinstance(compressed_model.conv2, torch.nn.Sequential) and isinstance(
        compressed_model.conv1, torch.nn.Conv2d
    )
    assert compressed_model.conv2[0].kernel_size in ((3, 1), (1, 3))
    saved = os.path.join("data", "greedy_selection_eval_scores_dict.json")
    again = GreedySelectionParameters(Decimal(0.9), 4, saved_eval_scores_dict=saved)
    calls = []

    def counting(model, iterations, use_cuda):
        calls.append(iterations)
        return _evaluate(model, iterations)

    ModelCompressor.compress_model(
        model, counting, 5, (1, 3, 12, 12), CompressionScheme.spatial_svd, CostMetric.mac,
        SpatialSvdParameters(
            SpatialSvdParameters.Mode.auto, SpatialSvdParameters.AutoModeParams(again, [model.conv1])
        ),
    )  # fmt: skip
    assert calls == [5, 5]  # the original and the result: scores are read


def weight_svd_manual_mode():
    from aimet_common.defs import CompressionScheme, CostMetric
    from aimet_torch.compress import ModelCompressor
    from aimet_torch.defs import ModuleCompRatioPair, WeightSvdParameters

    class Trainer:
        layers = []

        def train_model(self, model, layer, train_flag=True):
            self.layers.append(layer)

    model = _REFERENCE
    manual_params = WeightSvdParameters.ManualModeParams(
        [ModuleCompRatioPair(model.conv2, 0.5), ModuleCompRatioPair(model.fc, 0.4)]
    )
    params = WeightSvdParameters(WeightSvdParameters.Mode.manual, manual_params)
    compressed, stats = ModelCompressor.compress_model(
        model, _evaluate, 10, (1, 3, 12, 12), CompressionScheme.weight_svd, CostMetric.memory, params, trainer=Trainer()
    )
    ratios = {layer.name: layer.compression_ratio for layer in stats.per_layer_stats}
    assert ratios["conv2"] <= 0.5 and ratios["fc"] <= 0.4 and ratios["conv1"] == 1.0
    assert Trainer.layers == [compressed.conv2, compressed.fc]
    assert isinstance(model.conv2, torch.nn.Conv2d)
    compressed(next(iter(images()))[0])


def weight_svd_auto_mode():
    from aimet_common.defs import CompressionScheme, CostMetric, GreedySelectionParameters, RankSelectScheme
    from aimet_torch.compress import ModelCompressor
    from aimet_torch.defs import WeightSvdParameters

    greedy_params = GreedySelectionParameters(Decimal(0.7), num_comp_ratio_candidates=3, use_monotonic_fit=True)
    auto_params = WeightSvdParameters.AutoModeParams(
        rank_select_scheme=RankSelectScheme.greedy, select_params=greedy_params, modules_to_ignore=[]
    )
    params = WeightSvdParameters(WeightSvdParameters.Mode.auto, auto_params)
    _, stats = ModelCompressor.compress_model(
        _REFERENCE, _evaluate, 10, (1, 3, 12, 12), CompressionScheme.weight_svd, CostMetric.memory, params
    )
    assert float(stats.memory_compression_ratio) <= 0.7
    assert set(stats.eval_scores_dictionary) == {layer.name for layer in stats.per_layer_stats}


def channel_pruning_auto_mode():
    from aimet_common.defs import CompressionScheme, CostMetric, GreedySelectionParameters
    from aimet_torch.compress import ModelCompressor
    from aimet_torch.defs import ChannelPruningParameters

    model = _REFERENCE
    greedy_params = GreedySelectionParameters(target_comp_ratio=Decimal(0.7), num_comp_ratio_candidates=4)
    auto_params = ChannelPruningParameters.AutoModeParams(greedy_params, modules_to_ignore=[model.conv1])
    params = ChannelPruningParameters(
        data_loader=images(), num_reconstruction_samples=16, allow_custom_downsample_ops=True,
        mode=ChannelPruningParameters.Mode.auto, params=auto_params,
    )  # fmt: skip
    compressed_model, stats = ModelCompressor.compress_model(
        model, _evaluate, 1000, (1, 3, 12, 12), CompressionScheme.channel_pruning, CostMetric.mac, params
    )
    assert float(stats.mac_compression_ratio) <= 0.7 and set(stats.eval_scores_dictionary) == {"conv2"}
    width = compressed_model.conv2.in_channels
    assert width < 8 and compressed_model.conv1.out_channels == compressed_model.bn1.num_features == width
    saved = os.path.join("data", "greedy_selection_eval_scores_dict.json")
    again = GreedySelectionParameters(Decimal(0.8), 4, saved_eval_scores_dict=saved)
    calls = []

    def counting(model, iterations, use_cuda):
        calls.append(iterations)
        return _evaluate(model, iterations)

    params = ChannelPruningParameters(
        images(), 16, True, ChannelPruningParameters.Mode.auto,
        ChannelPruningParameters.AutoModeParams(again, modules_to_ignore=[model.conv1]),
    )  # fmt: skip
    ModelCompressor.compress_model(
        model, counting, 5, (1, 3, 12, 12), CompressionScheme.channel_pruning, CostMetric.mac, params
    )
    assert calls == [5, 5]  # the original and the result: scores are read


def channel_pruning_manual_mode():
    from aimet_common.defs import CompressionScheme, CostMetric
    from aimet_torch.compress import ModelCompressor
    from aimet_torch.defs import ChannelPruningParameters, ModuleCompRatioPair

    model = _REFERENCE
    manual_params = ChannelPruningParameters.ManualModeParams([ModuleCompRatioPair(model.conv2, 0.5)])
    params = ChannelPruningParameters(
        images(), 16, True, ChannelPruningParameters.Mode.manual, manual_params, multiplicity=2
    )
    compressed, stats = ModelCompressor.compress_model(
        model, _evaluate, 10, (1, 3, 12, 12), CompressionScheme.channel_pruning, CostMetric.memory, params
    )
    assert compressed.conv2.weight.shape == (8, 4, 3, 3) and compressed.conv1.weight.shape == (4, 3, 3, 3)
    assert {layer.name: layer.compression_ratio for layer in stats.per_layer_stats}["conv2"] == 0.5
    assert model.conv2.in_channels == 8 and float(stats.memory_compression_ratio) < 1
    compressed(next(iter(images()))[0])
