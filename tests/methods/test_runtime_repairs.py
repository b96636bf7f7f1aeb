"""First convolutions that a target computes faster in float: which they are, and that everything else stays quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bitwright.onnx
import bitwright.torch
from bitwright.methods.runtime_repairs import leave_stem_in_float

SIZE = 96  # 8 channels of 96 x 96 are more than 65536 numbers


class Mobile(nn.Module):
    """A first convolution, a depthwise one of few channels, and a pointwise one."""

    def __init__(self, channels: int = 3, activation: type[nn.Module] = nn.ReLU6) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(8, 12, 1, stride=4)
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.pointwise(self.act(self.depthwise(self.act(self.first(x))))))


class Prepared(Mobile):
    """The model scales its pictures itself, and hands what the first convolution makes to two readers."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.act(self.first((x - 0.45) / 0.225))
        return self.pointwise(first) + self.pointwise(self.depthwise(first))


def pictures(channels: int = 3, size: int = SIZE) -> list[Tensor]:
    return [torch.randn(1, channels, size, size, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def quantized(model: nn.Module, data: list[Tensor], preset: str = "w8a8", **options: Any) -> Any:
    torch.manual_seed(0)
    return bitwright.torch.quantize(model.eval(), data, preset, recipe=["fold"], progress=False, **options)


def in_float(result: Any) -> set[str]:
    return {site.name for site in result.sim.quantizers.values() if not site.enabled}


def test_the_stem_of_a_module_is_in_float_and_the_rest_on_integers(tmp_path: Path) -> None:
    result = quantized(Mobile(), pictures(), path=tmp_path)
    assert result.stem.layers == ("first", "depthwise")
    assert in_float(result) == set(result.stem.in_float)
    assert {"first.input[0]", "first.weight", "depthwise.weight"} <= in_float(result)
    report = result.sim.verify(pictures()[1])
    assert report.ok, str(report)
    assert [row.kernel for row in report.rows] == ["float", "QLinearConv"]
    assert "ort_cpu computes the first convolutions of large images faster in float" in str(result.sim.coverage())
    assert str(result.stem) == "in float, because faster so: first, depthwise"


def test_the_stem_of_an_onnx_model(tmp_path: Path) -> None:
    quantized(Mobile(), pictures(), path=tmp_path, filename_prefix="net", target="packed")
    data = [x.numpy() for x in pictures()]
    options = {"recipe": ["fold"], "progress": False, "path": tmp_path / "again"}
    result = bitwright.onnx.quantize(tmp_path / "net_float.onnx", data, **options)
    assert len(result.stem.layers) == 2
    why = "in float, because ort_cpu computes the first convolutions of large images faster in float"
    assert f"{result.stem.in_float[0]}: {why}" in result.exported.notes
    report = result.sim.verify(data[1])
    assert report.ok and [row.kernel for row in report.rows] == ["float", "QLinearConv"], str(report)


def test_the_simulation_is_closer_to_float_with_it() -> None:
    torch.manual_seed(0)
    model = Mobile().eval()
    x = pictures()[1]
    with torch.no_grad():
        errors = [
            float((quantized(model, pictures(), target=t).sim.model(x) - model(x)).square().mean())
            for t in ("ort_cpu", "packed")
        ]
    assert errors[0] < errors[1]


def test_a_model_that_scales_its_pictures_keeps_them_in_float() -> None:
    result = quantized(Prepared(), pictures())
    assert result.stem.layers == ("first",)  # two operators read what it makes, so that it is quantized
    assert any(name.startswith("sub") for name in in_float(result)), in_float(result)
    assert all(site.enabled for site in result.sim.quantizers.values() if site.op == "depthwise")


@pytest.mark.parametrize(
    "preset, target", [("w8", "ort_cpu"), ("w8a16", "ort_cpu"), ("w8a8", "packed"), ("w8a8", "litert"), ("w8a8", "openvino_cpu")]
)  # fmt: skip
def test_other_presets_and_targets_have_no_such_stem(preset: str, target: str) -> None:
    assert not quantized(Mobile(), pictures(), preset, target=target).stem.layers


def test_small_images_many_channels_and_rules_of_the_user_are_left_alone() -> None:
    assert not quantized(Mobile(), pictures(size=32)).stem.layers
    assert not quantized(Mobile(channels=4), pictures(4)).stem.layers
    assert not quantized(Mobile(), pictures(), config_file={}).stem.layers


def test_a_weight_that_another_layer_has_too_stays_quantized() -> None:
    class Twice(Mobile):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Conv2d(3, 8, 3, padding=1)
            self.other.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.pointwise(self.other(self.act(self.first(x))[:, :3]))

    result = quantized(Twice(), pictures())
    assert not result.stem.layers and not in_float(result)


def test_a_simulation_of_ones_own_takes_it_too() -> None:
    torch.manual_seed(0)
    model = Mobile(activation=nn.Hardswish).eval()
    sim = bitwright.torch.QuantizationSimModel(model, pictures()[0])
    report = leave_stem_in_float(sim)
    assert report.layers == ("first", "depthwise")
    sim.compute_encodings(pictures())
    assert np.isfinite(sim.model(pictures()[0]).detach().numpy()).all()
    assert str(leave_stem_in_float(sim)) == "no first convolution is faster in float"


class Pooled(nn.Module):
    """As a ResNet begins: a first convolution, a pool, and sums."""

    def __init__(self, pool: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.second = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.first(x)))
        return x + self.second(x)


@pytest.mark.parametrize("pool", [False, True], ids=["plain", "pooled"])
def test_a_pool_costs_nothing_in_float_and_a_sum_three_transposes(pool: bool) -> None:
    result = quantized(Pooled(pool), pictures())
    assert result.stem.layers == ("first",)
    report = result.sim.verify(pictures()[1])
    assert report.ok and not report.unchecked, str(report)
    assert ("MaxPool" in report.rows[0].ops) == pool


class Read(Pooled):
    """What the first convolution makes is read by a pool and by another convolution."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.pool(x).mean((2, 3)) + self.second(x).mean((2, 3))


def test_what_is_pooled_on_codes_stays_on_integers() -> None:
    """Such a pool is fast where the channels come last, as an integer convolution makes them."""
    assert not quantized(Read(), pictures()).stem.layers


def test_the_first_convolution_of_a_resnet_stays_on_integers() -> None:
    """Its patches are copied in few, long rows."""
    net = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 16, 3))
    assert not quantized(net, pictures(size=128)).stem.layers


class Keyword(nn.Module):
    """As Keras sample code begins for sound."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 32, 3)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.first(x)))
        return self.head(self.pool(torch.relu(self.second(x))).mean((2, 3)))


def test_sound_of_one_channel_is_pooled_in_float_by_both_front_ends(tmp_path: Path) -> None:
    data = [x[..., :40] for x in pictures(1)]
    result = quantized(Keyword(), data, path=tmp_path)
    assert result.stem.layers == ("first",)
    reports = [result.sim.verify(data[1])]
    options = {"recipe": ["fold"], "progress": False, "path": tmp_path / "again"}
    again = bitwright.onnx.quantize(result.exported.float_model, [x.numpy() for x in data], **options)
    assert len(again.stem.layers) == 1
    for report in (*reports, again.sim.verify(data[1].numpy())):
        assert report.ok and not report.unchecked, str(report)
        assert report.rows[0].ops == ("Conv", "Relu", "MaxPool")


class Sound(Mobile):
    """One channel, stored without an axis of its own: what Keras makes a Reshape of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(x.shape[0], 1, *x.shape[1:3]))


def test_a_reshape_may_stand_between_the_input_and_the_first_convolution() -> None:
    result = quantized(Sound(1), [x.permute(0, 2, 3, 1) for x in pictures(1)])
    assert result.stem.layers == ("first", "depthwise")


def test_the_choice_does_not_depend_on_the_size_of_batches() -> None:
    """Its costs are all of one sample."""
    for pool in (False, True):
        one, many = (quantized(Pooled(pool), [torch.cat(pictures() * size)]).stem.layers for size in (1, 4))
        assert one == many
