"""Equalization: factors, which layers share channels, that the function stays, and bounds of ReLU6 that are kept."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright.onnx
import bitwright.torch
from bitwright.core.graph.graph import Op
from bitwright.core.simulation.float_model import sqnr
from bitwright.errors import ConfigError, ModelError
from bitwright.methods.front_end import front_end_of
from bitwright.methods.layers import Group, Layers, find_groups, sift
from bitwright.methods.scaling.channel_noise import LEAST, MARGIN, bounds_of_factors
from bitwright.methods.scaling.equalize import (
    absorbed_bias,
    converged_factors,
    equalize,
    equalize_opened,
    equalizing_factors,
)
from bitwright.onnx.opened import OnnxOpened
from bitwright.torch import TorchView, equalize_model
from bitwright.torch.view import ChannelClamp
from tests.support.cost import steps
from tests.support.simulations import calibrated

# ------------------------------------------------------------------------------------------------ arithmetic


def test_factors_give_both_layers_the_same_range():
    r1, r2 = np.array([8.0, 0.5, 3.0]), np.array([2.0, 4.0, 3.0])
    s = equalizing_factors(r1, r2)
    np.testing.assert_allclose(r1 / s, r2 * s)
    np.testing.assert_allclose(r1 / s, np.sqrt(r1 * r2))  # arXiv:1906.04721, eq. 9


@pytest.mark.parametrize("r1, r2", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (np.inf, 1.0), (np.nan, 1.0)])
def test_a_channel_without_a_range_is_left_alone(r1, r2):
    assert equalizing_factors(np.array([r1]), np.array([r2])) == 1.0


def ranges(view, layers, names):
    rows = []
    for name, side in names:
        layer = layers.of[name]
        W = view.param(layer.weight)
        rows.append(layer.output_range(W) if side == "out" else layer.input_range(W))
    return rows


def test_a_depthwise_triple_gets_the_cube_root_of_the_paper():
    model = spread(
        nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Conv2d(6, 4, 1))
    )
    view = TorchView(model, [torch.randn(1, 3, 8, 8)])
    layers = Layers(view.graph())
    r0, r1, r2 = ranges(view, layers, [("0", "out"), ("2", "out"), ("4", "in")])
    groups, _ = find_groups(layers, layers.of.values())
    shown = []

    def bar(steps, label):
        for step in steps:
            shown.append(step)
            yield step

    (a, b), rounds = converged_factors(
        groups, {layer.weight: view.param(layer.weight) for layer in layers.of.values()}, bar
    )
    assert rounds == len(shown) - 1  # one more was shown, which found that nothing changes any more
    middle = np.cbrt(r0 * r1 * r2)
    np.testing.assert_allclose(a, r0 / middle, rtol=2e-2)  # S12 and S23, up to the end of the iteration
    np.testing.assert_allclose(b, middle / r2, rtol=2e-2)


def test_factors_are_those_of_whole_weights_to_the_last_bit():
    """The iteration holds one number per channel of the first and the last layer; here every weight is changed."""
    torch.manual_seed(0)
    model = spread(
        nn.Sequential(
            *(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU()),
            *(nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(4, 5, 2)),
        )
    )
    view = TorchView(model, [torch.randn(1, 3, 12, 12)])
    layers = Layers(view.graph())
    groups, _ = find_groups(layers, layers.of.values())
    weights = {layer.weight: view.param(layer.weight) for layer in layers.of.values()}
    found, rounds = converged_factors(groups, weights)
    whole = {name: np.asarray(W, np.float64) for name, W in weights.items()}
    factors = [np.ones(group.channels) for group in groups]
    for _ in range(rounds):
        for i, group in enumerate(groups):
            ((producer,), ((consumer, repeat),)) = group.producers, group.consumers
            r2 = consumer.input_range(whole[consumer.weight]).reshape(-1, repeat).max(1)
            s = equalizing_factors(producer.output_range(whole[producer.weight]), r2)
            W, axes = whole[producer.weight], producer.axes
            whole[producer.weight] = (axes.split(W) / axes.over_outputs(s)).reshape(W.shape)
            W = whole[consumer.weight]
            whole[consumer.weight] = consumer.times_inputs(W, np.repeat(s, repeat))
            factors[i] = factors[i] * s
    assert len(groups) == 4 and rounds > 3
    assert all(np.array_equal(one, other) for one, other in zip(found, factors, strict=True))


def test_only_what_lies_three_deviations_above_zero_is_absorbed():
    np.testing.assert_array_equal(absorbed_bias(np.array([5.0, 1.0, -4.0]), np.array([1.0, 1.0, 0.5])), [2.0, 0.0, 0.0])


# ------------------------------------------------------------------------------------------- models, both ways


def spread(model: nn.Module) -> nn.Module:
    """``model`` with output channels of very different ranges, in evaluation mode."""
    random = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            scale = torch.exp(torch.randn(len(module.weight), generator=random))
            module.weight.data *= scale.reshape(-1, *(1,) * (module.weight.dim() - 1))
        elif isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d)):
            scale = torch.exp(torch.randn(module.weight.shape[1], generator=random))
            module.weight.data *= scale.reshape(1, -1, *(1,) * (module.weight.dim() - 2))
    return model.eval()


class Wired(nn.Module):
    """Named modules and what wires them."""

    def __init__(self, wiring, **modules):
        super().__init__()
        self.wiring = wiring
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.wiring(self, x)


def conv(cin=4, cout=6, k=3, **options):
    return nn.Conv2d(cin, cout, k, padding=k // 2, **options)


IMAGE = (2, 4, 8, 8)
# name -> model, shape of the input, number of equalized groups
TREATED = {
    "conv-conv": (lambda: nn.Sequential(conv(), conv(6, 5)), IMAGE, 1),
    "relu": (lambda: nn.Sequential(conv(), nn.ReLU(), conv(6, 5)), IMAGE, 1),
    "no-bias": (lambda: nn.Sequential(conv(bias=False), nn.ReLU(), conv(6, 5, bias=False)), IMAGE, 1),
    "leaky-relu": (lambda: nn.Sequential(conv(), nn.LeakyReLU(0.2), conv(6, 5)), IMAGE, 1),
    "prelu": (lambda: nn.Sequential(conv(), nn.PReLU(6), conv(6, 5)), IMAGE, 1),
    "relu6": (lambda: nn.Sequential(conv(), nn.ReLU6(), conv(6, 5)), IMAGE, 1),
    "hardtanh": (lambda: nn.Sequential(conv(), nn.Hardtanh(-1, 2), conv(6, 5)), IMAGE, 1),
    "depthwise": (
        lambda: nn.Sequential(conv(), nn.ReLU6(), conv(6, 6, groups=6), nn.ReLU6(), conv(6, 5, 1)),
        IMAGE, 2,
    ),
    "depthwise-multiplier": (
        lambda: nn.Sequential(conv(), nn.ReLU(), conv(6, 12, groups=6), nn.ReLU(), conv(12, 5)),
        IMAGE, 2,
    ),
    "grouped": (
        lambda: nn.Sequential(conv(4, 8), nn.ReLU(), conv(8, 6, groups=2), nn.ReLU(), conv(6, 5)),
        IMAGE, 2,
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2), nn.ReLU(), nn.ConvTranspose2d(6, 5, 2), conv(5, 4)),
        IMAGE, 2,
    ),
    "transposed-grouped": (
        lambda: nn.Sequential(conv(), nn.ReLU(), nn.ConvTranspose2d(6, 8, 3, 2, groups=2), conv(8, 4)),
        IMAGE, 2,
    ),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 5, 3)), (2, 4, 9), 1),
    "pools": (
        lambda: nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2), conv(6, 8), nn.AvgPool2d(2), conv(8, 5)),
        IMAGE, 2,
    ),
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)), (3, 4), 1),
    "linear-three-axes": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)), (3, 7, 4), 1),
    "head": (
        lambda: nn.Sequential(conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
        IMAGE, 1,
    ),
    "flattened": (lambda: nn.Sequential(conv(), nn.ReLU(), nn.Flatten(), nn.Linear(384, 5)), IMAGE, 1),
    "two-readers": (
        lambda: Wired(lambda m, x: m.b(h := torch.relu(m.a(x))) + m.c(h), a=conv(), b=conv(6, 5), c=conv(6, 5, 1)), IMAGE, 1,
    ),
    "gate": (
        lambda: Wired(
            lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
            gate=nn.Linear(4, 6), up=nn.Linear(4, 6), down=nn.Linear(6, 4),
        ),
        (3, 4), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TREATED)
def test_ranges_meet_and_the_function_stays(name):
    build, shape, count = TREATED[name]
    torch.manual_seed(0)
    model = spread(build())
    x = torch.randn(shape) * 3
    before, weights = model(x), copy.deepcopy(model.state_dict())
    report = equalize_model(model, dummy_input=x)
    assert len(report.groups) == count, str(report)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    view = TorchView(model, [x])
    for group in report.groups:
        (first,) = group.producers
        r1 = first.output_range(view.param(first.weight))
        r2 = np.max(
            [c.input_range(view.param(c.weight)).reshape(-1, repeat).max(axis=1) for c, repeat in group.consumers],
            axis=0,
        )
        np.testing.assert_allclose(r1, r2, rtol=1e-2)
    report.undo()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = conv(4, 4), conv(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


# name -> model, shape of the input, what the refusal of the first layer says
REFUSED = {
    "residual": (
        lambda: Wired(lambda m, x: m.b(h := torch.relu(m.a(x))) + h, a=conv(), b=conv(6, 6)),
        IMAGE, "a: add (Add) reads relu",
    ),
    "returned": (
        lambda: Wired(lambda m, x: (m.b(h := m.a(x)), h), a=conv(), b=conv(6, 6)),
        IMAGE, "a: a.output[0] is an output of the model",
    ),
    "shared-weight": (Shared, IMAGE, "a: b also reads a.weight"),
    "reused": (
        lambda: Wired(lambda m, x: m.a(torch.relu(m.a(x))), a=conv(4, 4)),
        IMAGE, "a: a is used at 2 places of the model, which share a.weight",
    ),
    "swish": (lambda: nn.Sequential(conv(), nn.SiLU(), conv(6, 5)), IMAGE, "0: 1 (Silu) reads 0.output[0]"),
    "functional-relu6": (
        lambda: Wired(lambda m, x: m.b(F.relu6(m.a(x))), a=conv(), b=conv(6, 5)), IMAGE,
        "a: relu6 cuts all channels at the same bounds and cannot be changed: it is a call in the model's own code",
    ),
    "concat": (
        lambda: Wired(lambda m, x: m.b(torch.cat([m.a(x), x], 1)), a=conv(), b=conv(10, 5)),
        IMAGE, "a: cat (Concat) reads",
    ),
    "transposed-axes": (
        lambda: Wired(lambda m, x: m.b(m.a(x).transpose(1, 2)), a=nn.Linear(4, 6), b=nn.Linear(5, 3)),
        (2, 5, 4), "a: transpose (Transpose) reads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_equalized_says_why(name):
    build, shape, reason = REFUSED[name]
    torch.manual_seed(0)
    model = spread(build())
    x = torch.randn(shape)
    before = copy.deepcopy(model.state_dict())
    report = equalize_model(model, dummy_input=x)
    assert not report.groups
    assert any(str(line).startswith(reason) for line in report.refused), str(report)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_relu6_becomes_a_bound_per_channel():
    torch.manual_seed(0)
    model = spread(nn.Sequential(conv(), nn.ReLU6(), conv(6, 5)))
    x = torch.randn(IMAGE) * 5
    assert (model[:2](x) == 6).any()  # the bound cuts
    before = model(x)
    report = equalize_model(model, dummy_input=x)
    assert isinstance(model[1], ChannelClamp) and report.clamped == ("1",)
    np.testing.assert_allclose(model[1].high.flatten(), 6 / report.factors[0], rtol=1e-6)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    report.undo()
    assert isinstance(model[1], nn.ReLU6)


def test_batch_norms_are_folded_first_and_their_moments_kept():
    torch.manual_seed(0)
    model = nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 5, 1)).eval()
    model[1].bias.data.uniform_(-1, 5)
    model[1].weight.data.uniform_(0.1, 0.5)
    beta, x = model[1].bias.detach().numpy().copy(), torch.randn(IMAGE)
    report = equalize_model(model, dummy_input=x)
    assert isinstance(model[1], nn.Identity)
    np.testing.assert_allclose(report.statistics["0"][0] * report.factors[0], beta, rtol=1e-6)


def test_high_biases_move_on_and_the_function_stays_nearly():
    torch.manual_seed(0)
    model = nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 5, 1)).eval()
    x = torch.randn(64, 4, 8, 8)
    model[0].weight.data /= model[0](x).std((0, 2, 3)).reshape(-1, 1, 1, 1)  # as the batch norm says
    model[1].running_mean.data = model[0](x).mean((0, 2, 3))
    model[1].bias.data = torch.tensor([6.0, 5.0, 0.0, -1.0, 4.0, 1.0])
    before = model(x)
    report = equalize_model(model, dummy_input=x, absorb_bias=True)
    assert report.absorbed == ("0",) and "absorbed   high biases of 0" in str(report)
    after = model(x)
    assert ((after - before).abs() > 1e-4).float().mean() < 0.01  # where a normal variable lies beyond three deviations
    assert (after - before).abs().mean() < 1e-3 * before.abs().max()
    highest = model[:3](x).amax((0, 2, 3)) * torch.tensor(report.factors[0])
    assert highest[0] < 7.5  # the first channel went to 6 + 4 deviations, of which 3 are gone


def test_a_group_that_the_check_objects_to_is_found_and_left_alone():
    torch.manual_seed(0)
    model = spread(nn.Sequential(conv(), conv(6, 6), conv(6, 6), conv(6, 6), conv(6, 5)))
    x = torch.randn(IMAGE)
    view, kept = TorchView(model, [x]), copy.deepcopy(model[2].weight.detach())
    report = equalize(view, lambda: None if torch.equal(model[2].weight, kept) else "the third layer changed")
    assert [str(group) for group in report.groups] == ["0 -> 1", "3 -> 4"]
    reasons = {line.op: line.reason for line in report.refused}
    assert reasons["1"] == reasons["2"] == "with it, the third layer changed"


def test_sifting_asks_a_logarithm_of_times():
    asked = []

    def carry_out(items):
        state.update(items)
        return lambda: state.difference_update(items)

    def check():
        asked.append(set(state))
        return "bad" if 13 in state else None

    state = set()
    good, bad = sift(range(64), carry_out, check)
    assert sorted(good) == [i for i in range(64) if i != 13] and bad == [(13, "with it, bad")]
    assert len(asked) < 20 and not state


def test_half_precision_stays_what_it_is():
    torch.manual_seed(0)
    model = spread(nn.Sequential(conv(), nn.ReLU(), conv(6, 5))).half()
    x = torch.randn(IMAGE).half()
    before = model(x).float()
    assert len(equalize_model(model, dummy_input=x).groups) == 1
    assert model[0].weight.dtype == torch.float16
    torch.testing.assert_close(model(x).float(), before, rtol=2e-2, atol=2e-2)


def test_an_input_is_needed():
    with pytest.raises(ModelError, match="equalize_model: neither dummy_input nor input_shapes was given"):
        equalize_model(nn.Sequential(conv()))


def test_cost_grows_with_the_number_of_layers():
    def cost(blocks):
        layers = [layer for _ in range(blocks) for layer in (nn.Conv2d(4, 4, 1), nn.ReLU())]
        view = TorchView(nn.Sequential(*layers).eval(), [torch.randn(1, 4, 2, 2)])
        graph = view.graph()
        return steps(lambda: find_groups(found := Layers(graph), found.of.values()))

    assert cost(80) < 2.2 * cost(40)


def test_the_model_runs_three_times():
    """To be recorded, to be recorded with its batch norms folded, which is their check, and to check the factors."""
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 4)).eval()
    runs: list[int] = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    report = equalize_model(model, dummy_input=torch.randn(2, 3, 8, 8), progress=False)
    assert len(report.groups) == 1 and len(runs) == 3


CHANNELS = 8


def group(**bounds: float) -> Group:
    """Four channels with an activation that cuts."""
    return Group((), (), ((Op("cut", "Clip", ("x",), ("y",), bounds), 1),), 4)


def test_a_channel_grows_at_most_to_a_share_of_the_bound():
    """The first reaches it, the second a tenth of it, the third nothing."""
    ends = {"cut": (np.full(4, -9.0), np.array([6.0, 0.6, 0.0, 0.6]))}
    least, most = bounds_of_factors(group(min=0.0, max=6.0), ends)
    np.testing.assert_allclose(least, [1.0, MARGIN / 10, LEAST, MARGIN / 10])
    np.testing.assert_array_equal(most, 1.0)


def test_a_lower_bound_that_is_not_zero_limits_as_well():
    ends = {"cut": (np.array([-1.0, -0.2, 0.0, 0.0]), np.array([0.0, 0.1, 0.25, 0.0]))}
    least, _ = bounds_of_factors(group(min=-1.0, max=1.0), ends)
    np.testing.assert_allclose(least, [1.0, 0.2 * MARGIN, 0.25 * MARGIN, LEAST])


@pytest.mark.parametrize(
    "free", [(Group((), (), (), 4), {}), (group(min=0.0, max=6.0), None)], ids=["no cut", "changed"]
)
def test_factors_are_free_where_nothing_cuts_or_what_cuts_is_changed(free):
    least, most = bounds_of_factors(*free)
    assert (least == 0).all() and np.isposinf(most).all()


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
    sim = calibrated(bitwright.torch.QuantizationSimModel(model, x[:1]), [x])
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


@pytest.mark.parametrize(("worth", "groups"), [(1.0, 2), (60.0, 0)])
def test_a_model_is_left_alone_where_less_noise_is_gained_than_asked_for(worth, groups):
    model, batches = block(), [data(0)]
    before = copy.deepcopy(model.state_dict())
    opened = front_end_of(model).open_model(model, None, data(0)[:1], "equalize", None)
    report = equalize_opened(opened, None, False, data=batches, keep_bounds=True, worth=worth)
    assert len(report.groups) == groups and report.changed == bool(groups)
    changed = any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert changed == bool(groups) and ("60 are asked for" in str(report)) != bool(groups)


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


def norms_onnx():
    """Convolutions with batch norms between them as an ONNX model of fixed shapes."""
    rng = np.random.default_rng(0)
    held = {"w0": (8, 3, 3, 3), "w1": (8, 1, 3, 3), "w2": (4, 8, 1, 1)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in held.items()}
    nodes, value = [], "x"
    for i, (group, channels) in enumerate(((1, 8), (8, 8), (1, 4))):
        arrays |= {
            f"{k}{i}": rng.uniform(0.1, 3, channels).astype(np.float32) for k in ("scale", "bias", "mean", "var")
        }
        pads = [1, 1, 1, 1] if i < 2 else [0] * 4
        nodes.append(
            onnx.helper.make_node("Conv", [value, f"w{i}"], [f"c{i}"], name=f"conv{i}", group=group, pads=pads)
        )
        norm = [f"c{i}", *(f"{k}{i}" for k in ("scale", "bias", "mean", "var"))]
        nodes.append(onnx.helper.make_node("BatchNormalization", norm, [f"n{i}"], name=f"norm{i}"))
        nodes.append(onnx.helper.make_node("Relu", [f"n{i}"], [f"r{i}"], name=f"relu{i}"))
        value = f"r{i}"
    given, made = (
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s)
        for n, s in (("x", [1, 3, 6, 6]), ("r2", [1, 4, 6, 6]))
    )
    weights = [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = onnx.helper.make_graph(nodes, "g", [given], [made], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_that_changes_is_opened_again_and_looked_at_step_by_step(monkeypatch):
    """Folds and factors are compared with the original together; where that fails each is checked as if it were alone."""
    feeds = {"x": np.random.default_rng(1).standard_normal((1, 3, 6, 6)).astype(np.float32)}
    together, apart, loaded = norms_onnx(), norms_onnx(), bitwright.onnx.load_model(norms_onnx())
    assert len(bitwright.onnx.equalize_model(together, feeds, progress=False).groups) == 2
    asked, changed = [], OnnxOpened.changed
    monkeypatch.setattr(
        OnnxOpened, "changed", lambda self: asked.append(1) or ("no" if len(asked) == 1 else changed(self))
    )
    assert len(bitwright.onnx.equalize_model(apart, feeds, progress=False).groups) == 2
    assert len(asked) == 2
    bitwright.onnx.equalize_model(loaded, feeds, progress=False)  # changed as it is, so that it is not opened again
    before = onnxruntime.InferenceSession(norms_onnx().SerializeToString()).run(None, feeds)[0]
    for model in (together, apart, onnx_ir.to_proto(loaded.model)):
        assert not any(node.op_type == "BatchNormalization" for node in model.graph.node)
        after = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-4 * np.abs(before).max())


def test_a_model_without_groups_is_compared_after_its_folds(monkeypatch):
    monkeypatch.setattr("bitwright.methods.scaling.equalize.equalizable", lambda *args, **kwargs: ([], []))
    asked, changed = [], OnnxOpened.changed
    monkeypatch.setattr(OnnxOpened, "changed", lambda self: asked.append(1) or changed(self))
    feeds = {"x": np.ones((1, 3, 6, 6), np.float32)}
    assert not bitwright.onnx.equalize_model(norms_onnx(), feeds, progress=False).groups
    assert len(asked) == 1
