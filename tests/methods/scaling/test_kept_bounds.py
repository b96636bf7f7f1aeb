"""Equalization under which a ReLU6 goes on to cut all channels at 6: the factors, the function, and what is gained."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import bitwright.onnx
import bitwright.torch
from bitwright.core.graph.graph import Op
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError
from bitwright.methods.layers import Group
from bitwright.methods.scaling.channel_noise import LEAST, MARGIN, within_bounds
from bitwright.torch import equalize_model

CHANNELS = 8


def group(**bounds: float) -> Group:
    """Four channels with an activation that cuts."""
    return Group((), (), ((Op("cut", "Clip", ("x",), ("y",), bounds), 1),), 4)


def test_a_channel_grows_at_most_to_a_share_of_the_bound():
    """The first reaches it, the second a tenth of it, the third nothing; the fourth wants to shrink."""
    ends = {"cut": (np.full(4, -9.0), np.array([6.0, 0.6, 0.0, 0.6]))}
    found = within_bounds(group(min=0.0, max=6.0), np.array([0.1, 0.01, 0.001, 4.0]), ends)
    np.testing.assert_allclose(found, [1.0, MARGIN / 10, LEAST, 1.0])


def test_a_lower_bound_that_is_not_zero_limits_as_well():
    ends = {"cut": (np.array([-1.0, -0.2, 0.0, 0.0]), np.array([0.0, 0.1, 0.25, 0.0]))}
    found = within_bounds(group(min=-1.0, max=1.0), np.full(4, 0.01), ends)
    np.testing.assert_allclose(found, [1.0, 0.2 * MARGIN, 0.25 * MARGIN, LEAST])


def test_without_a_bound_the_factors_are_free():
    wanted = np.array([0.1, 3.0, 1.0, 20.0])
    np.testing.assert_array_equal(within_bounds(Group((), (), (), 4), wanted, {}), wanted)


def block(seed: int = 0) -> nn.Sequential:
    """A widening layer, a depthwise one and a narrowing one, whose channels reach 6, or a small part of it."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 1), nn.ReLU6(), nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS), nn.ReLU6(),
        nn.Conv2d(CHANNELS, 4, 1),
    )  # fmt: skip
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight *= torch.tensor([4.0, 0.02, 1.0, 0.05, 3.0, 0.1, 0.02, 0.5]).reshape(-1, 1, 1, 1)
            layer.bias *= 0.01
        model[4].weight *= 1 / model[2].weight.abs().amax((1, 2, 3)).clamp(max=1).reshape(1, -1, 1, 1)
    return model.eval()


def data(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def test_the_function_stays_and_so_does_the_activation():
    model = block()
    before = copy.deepcopy(model)
    report = equalize_model(model, dummy_input=data(0)[:1], data=[data(0)], keep_bounds=True, progress=False)
    assert len(report.groups) == 2 and report.clamped == () and isinstance(model[1], nn.ReLU6)
    assert (before[:2](data(0)) == 6).any() and min(factors.min() for factors in report.factors) < 0.1
    torch.testing.assert_close(model(data(0)), before(data(0)), rtol=1e-5, atol=1e-5)
    report.undo()
    torch.testing.assert_close(model(data(0)), before(data(0)), rtol=0, atol=0)


def test_values_twice_as_large_come_through():
    """In front of the first activation; where weights look at larger values too, the second one's are bounded."""
    model = block()
    before = copy.deepcopy(model)
    equalize_model(model, dummy_input=data(0)[:1], data=[data(0)], keep_bounds=True, progress=False)
    x = 2 * data(0)
    with torch.no_grad():
        for mine, theirs in zip(model[:2](x).unbind(1), before[:2](x).unbind(1), strict=True):
            factor = float((theirs.max() / mine.max()).nan_to_num(1.0))
            torch.testing.assert_close(mine * factor, theirs, rtol=1e-4, atol=2e-3)


def test_an_onnx_model_is_equalized_alike(tmp_path):
    """Its Clip keeps its bounds, and its outputs stay; descent ends a little apart where sums round differently."""
    model, x = block(), data(0)
    sim = bitwright.torch.QuantizationSimModel(model, x[:1])
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path, "net", x[:1])
    proto = onnx.load(tmp_path / "net_float.onnx")
    (given,), pictures = [i.name for i in proto.graph.input], list(x.numpy()[:, None])
    before = onnxruntime.InferenceSession(proto.SerializeToString())
    options = {"keep_bounds": True, "progress": False}
    theirs = bitwright.onnx.equalize_model(proto, data=pictures, **options)
    mine = equalize_model(model, dummy_input=x[:1], data=x.split(1), **options)
    assert len(theirs.factors) == len(mine.factors) == 2
    for one, other in zip(theirs.factors, mine.factors, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05)
    after = onnxruntime.InferenceSession(proto.SerializeToString())
    for picture in pictures:
        wanted, found = (session.run(None, {given: picture})[0] for session in (before, after))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_data_tells_what_a_bound_would_cut():
    message = "equalize: which values a kept bound would cut is not known. Remedy: give data"
    with pytest.raises(ConfigError, match=message):
        equalize_model(block(), dummy_input=data(0)[:1], keep_bounds=True)


@pytest.mark.parametrize("preset", ["w8a8", "w8a8_per_tensor"])
def test_channels_that_fill_their_range_lose_less(preset):
    """Unseen data, scales per channel of the weights: what remains is the activations' noise."""
    x, levels = data(7), {}
    for recipe in (["fold"], ["fold", {"equalize": {"keep_bounds": True}}]):
        model = block()
        with torch.no_grad():
            wanted = model(x)
            result = bitwright.torch.quantize(model, [data(0)], preset, recipe=recipe, progress=False)
            levels[len(recipe)] = sqnr(wanted.numpy(), result.sim.model(x).numpy())
    assert levels[2] > levels[1] + 6, levels


def test_a_generator_of_batches_is_gone_through_once():
    """Moments and extremes are measured on the same batches."""
    model, batches = block(), (batch for batch in data(0).split(4))
    report = equalize_model(model, dummy_input=data(0)[:1], data=batches, keep_bounds=True, progress=False)
    assert len(report.groups) == 2


class Attending(nn.Module):
    """An attention, and two layers that can be equalized."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.after = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        return self.after(torch.softmax(scores, dim=-1) @ self.value(x))


def test_the_default_recipe_leaves_models_with_an_attention_alone_and_says_so():
    torch.manual_seed(0)
    batches = [torch.randn(4, 5, 8) for _ in range(6)]
    result = bitwright.torch.quantize(Attending().eval(), batches, progress=False)
    (note,) = [str(line) for line in str(result.report).splitlines() if line.startswith("equalize")]
    assert note.endswith("left alone, as the model has an attention")
    report = bitwright.torch.equalize_model(Attending().eval(), dummy_input=batches[0], progress=False)
    assert len(report.groups) == 1, "by itself it is equalized"
