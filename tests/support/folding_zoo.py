"""Batch norms in every position: where folding them into a layer is right, and where it must be refused.

``FOLDING_ZOO[name]`` is a :class:`~tests.support.cases.Case` with ``expect``: ``folds`` means that every batch norm
of the model ends up absorbed and the output stays; ``refuses`` that the model is left as it was, and ``why``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.support.cases import Call, Case, builder, floats, inputs

FOLDING_ZOO: dict[str, Case] = {}

Build = Callable[[], nn.Module]
Inputs = Callable[[torch.Generator], Call]
Finish = Callable[[Any], object] | None

IMAGE, IMAGES = inputs(floats(2, 4, 8, 8)), inputs(floats(2, 4, 8, 8), floats(2, 4, 8, 8))
SIGNAL, VOLUME, ROWS = inputs(floats(2, 4, 12)), inputs(floats(2, 4, 5, 5, 5)), inputs(floats(8, 4))


def folds(name: str, build: Build, make: Inputs = IMAGE, *, pairs: int = 1, finish: Finish = None) -> None:
    """Add a model whose batch norms all fold, as ``pairs`` (layer, batch norm) pairs."""
    assert name not in FOLDING_ZOO, name
    tags = frozenset({"bn"})
    FOLDING_ZOO[name] = Case(name, builder(name, build, make, finish), make, tags, "folds", pairs)


def refuses(name: str, why: str, build: Build, make: Inputs = IMAGE, *, finish: Finish = None) -> None:
    """Add a model that folding must leave alone."""
    assert name not in FOLDING_ZOO, name
    tags = frozenset({"bn"})
    FOLDING_ZOO[name] = Case(name, builder(name, build, make, finish), make, tags, "refuses", 0, why)


# ------------------------------------------------------------------------------------------------------------
# parts


class Wired(nn.Module):
    """Named modules and what wires them: ``Wired(lambda m, x: m.bn(m.conv(x)), conv=..., bn=...)``."""

    def __init__(self, wiring: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.wiring = wiring
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Tensor) -> Any:
        return self.wiring(self, *args)


class NormedConv(nn.Conv2d):
    """A convolution that normalises in its own forward."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__(cin, cout, 3, padding=1)
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(super().forward(x))


class FunctionalBN(nn.Module):
    """``F.conv2d`` and ``F.batch_norm`` on raw parameters and buffers."""

    def __init__(self, bias: bool = True, affine: bool = True, training: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, 3, 3) * 0.2)
        self.b = nn.Parameter(torch.randn(6) * 0.3) if bias else None
        self.gamma = nn.Parameter(torch.rand(6) + 0.5) if affine else None
        self.beta = nn.Parameter(torch.randn(6) * 0.3) if affine else None
        self.register_buffer("mean", torch.randn(6) * 0.4)
        self.register_buffer("var", torch.rand(6) + 0.3)
        self.batch_statistics = training

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.w, self.b, stride=2, padding=1)
        if self.batch_statistics:
            return F.relu(F.batch_norm(y, None, None, self.gamma, self.beta, training=True))
        return F.relu(F.batch_norm(y, self.mean, self.var, self.gamma, self.beta))


def conv(cin: int = 4, cout: int = 6, k: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(cin, cout, k, **options)


def point() -> nn.Conv2d:
    """A 1x1 convolution that keeps the shape, for wirings where a value meets another one."""
    return nn.Conv2d(4, 4, 1)


def up(cin: int = 4, cout: int = 6, k: int = 3, **options: Any) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(cin, cout, k, **options)


def bn(c: int = 6, **options: Any) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(c, **options)


def row(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def tie(model: nn.Module, source: str, target: str, name: str = "weight") -> nn.Module:
    """``model`` with one parameter of the module ``target`` being that of ``source``."""
    setattr(model.get_submodule(target), name, getattr(model.get_submodule(source), name))
    return model


# ------------------------------------------------------------------------------------------------------------
# layer before batch norm: every kind of layer

folds("conv1d", lambda: row(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU()), SIGNAL)
folds("conv2d", lambda: row(conv(padding=1), bn(), nn.ReLU()))
folds("conv2d-no-bias", lambda: row(conv(padding=1, bias=False), bn(), nn.ReLU()))
folds("conv3d", lambda: row(nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6), nn.ReLU()), VOLUME)
folds("conv2d-strided-dilated", lambda: row(conv(stride=2, padding=2, dilation=2), bn(), nn.ReLU()))
folds("conv2d-same-padding", lambda: row(conv(padding="same"), bn()))
folds("conv2d-same-padding-even-kernel", lambda: row(conv(k=4, padding="same"), bn()))
folds("conv2d-circular-padding", lambda: row(conv(padding=1, padding_mode="circular"), bn()))
folds("convtranspose1d", lambda: row(nn.ConvTranspose1d(4, 6, 3, 2), nn.BatchNorm1d(6)), SIGNAL)
folds("convtranspose2d", lambda: row(up(stride=2, padding=1, output_padding=1), bn(), nn.ReLU()))
folds("convtranspose2d-no-bias", lambda: row(up(bias=False), bn()))
folds("convtranspose3d", lambda: row(nn.ConvTranspose3d(4, 6, 2, 2), nn.BatchNorm3d(6)), VOLUME)
folds("grouped", lambda: row(conv(groups=2), bn()))
folds("depthwise", lambda: row(conv(4, 4, padding=1, groups=4), bn(4), nn.ReLU6()))
folds("depthwise-multiplier-2", lambda: row(conv(4, 8, groups=4, bias=False), bn(8)))
folds("convtranspose2d-grouped", lambda: row(up(groups=2), bn()))
folds("convtranspose2d-depthwise", lambda: row(up(4, 4, groups=4), bn(4)))
folds("convtranspose2d-depthwise-multiplier-2", lambda: row(up(4, 8, groups=4), bn(8)))
folds("linear", lambda: row(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), ROWS)
folds("linear-no-bias", lambda: row(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)), ROWS)
refuses(
    "linear-three-axes",
    "the layer's channels are the last axis, the batch norm's are axis 1; both have 6 elements",
    lambda: row(nn.Linear(5, 6), nn.BatchNorm1d(6)),
    inputs(floats(3, 6, 5)),
)
folds(
    "linear-transposed",
    lambda: Wired(lambda m, x: m.bn(m.fc(x).transpose(1, 2)), fc=nn.Linear(4, 6), bn=nn.BatchNorm1d(6)),
    inputs(floats(3, 5, 4)),
)
folds(
    "linear-as-picture",
    lambda: Wired(lambda m, x: m.bn(m.fc(x).view(-1, 6, 3, 3)), fc=nn.Linear(4, 54), bn=bn()),
    inputs(floats(3, 4)),
)
folds("norm-flatten-linear", lambda: row(bn(4), nn.Flatten(), nn.Linear(256, 3)))
refuses(
    "norm-of-every-place",
    "each place of the picture has a factor of its own",
    lambda: row(conv(), nn.Flatten(), nn.BatchNorm1d(216)),
)

# ------------------------------------------------------------------------------------------------------------
# batch norms of every kind

folds("not-affine", lambda: row(conv(), bn(affine=False)))
folds("momentum-none", lambda: row(conv(), bn(momentum=None)))
folds("large-epsilon", lambda: row(conv(), bn(eps=0.5)))
folds("sync-batch-norm", lambda: row(conv(), nn.SyncBatchNorm(6)))
folds(
    "zero-and-negative-gamma",
    lambda: row(conv(), bn()),
    finish=lambda m: m[1].weight.data.copy_(torch.tensor([0.0, -1.5, 1.0, -0.2, 0.0, 2.0])),
)
folds(
    "dead-channel",
    lambda: row(conv(), bn()),
    finish=lambda m: (m[0].weight.data[2].zero_(), m[1].running_var.data[2].zero_()),
)
folds("frozen-parameters", lambda: row(conv(), bn()), finish=lambda m: m.requires_grad_(False))
folds("half", lambda: row(conv(), bn()), inputs(floats(2, 4, 8, 8, dtype=torch.float16)), finish=lambda m: m.half())
folds(
    "bfloat16",
    lambda: row(conv(bias=False), bn()),
    inputs(floats(2, 4, 8, 8, dtype=torch.bfloat16)),
    finish=lambda m: m.bfloat16(),
)
BATCH = "the batch norm takes its statistics from the batch"
refuses("no-running-statistics", BATCH, lambda: row(conv(), bn(track_running_stats=False)))
refuses(
    "instance-norm",
    "not a batch norm: its statistics come from the input",
    lambda: row(conv(), nn.InstanceNorm2d(6, affine=True)),
)

# ------------------------------------------------------------------------------------------------------------
# batch norm before a layer

folds("norm-before-conv", lambda: row(bn(4), conv()))
folds("norm-before-grouped", lambda: row(bn(4), conv(groups=2, bias=False)))
folds("norm-before-depthwise", lambda: row(bn(4), conv(4, 8, groups=4)))
folds("norm-before-conv1d", lambda: row(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3)), SIGNAL)
folds("norm-before-conv3d", lambda: row(nn.BatchNorm3d(4), nn.Conv3d(4, 6, 3)), VOLUME)
folds("norm-before-linear", lambda: row(nn.BatchNorm1d(4), nn.Linear(4, 6)), ROWS)
folds(
    "norm-before-padded-conv-without-shift",
    lambda: row(bn(4), conv(padding=1)),
    finish=lambda m: (m[0].running_mean.zero_(), m[0].bias.data.zero_()),
)
PADDED = "padding zeros join after the shift, so the border would change"
refuses("norm-before-padded-conv", PADDED, lambda: row(bn(4), conv(padding=1)))
refuses("norm-before-padded-grouped", PADDED, lambda: row(bn(4), conv(padding=1, groups=2)))
refuses("norm-before-padded-depthwise", PADDED, lambda: row(bn(4), conv(4, 4, padding=(0, 1), groups=4)))
refuses(
    "norm-before-convtranspose",
    "border outputs see fewer inputs, so the shift is not a constant",
    lambda: row(bn(4), up(stride=2)),
)
refuses(
    "norm-before-linear-three-axes",
    "the layer sums over the last axis, the batch norm's channels are axis 1",
    lambda: row(nn.BatchNorm1d(5), nn.Linear(5, 6)),
    inputs(floats(3, 5, 5)),
)
refuses(
    "norm-before-conv-and-shortcut",
    "the normalised value has a second reader",
    lambda: Wired(lambda m, x: m.conv(y := m.bn(x)) + y, bn=bn(4), conv=point()),
)
refuses(
    "norm-before-conv-and-output",
    "the normalised value is an output of the model",
    lambda: Wired(lambda m, x: (m.conv(y := m.bn(x)), y), bn=bn(4), conv=point()),
)
refuses("norm-alone", "no layer is next to it", lambda: row(bn(4), nn.ReLU()))
refuses("norm-after-activation", "an activation lies between", lambda: row(conv(), nn.ReLU(), bn()))
refuses(
    "norm-after-concat",
    "a concatenation lies between",
    lambda: Wired(lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], 1)), a=conv(4, 2), b=conv(4, 3), bn=bn(5)),
)
refuses(
    "norm-after-add",
    "an addition lies between",
    lambda: Wired(lambda m, x: m.bn(m.conv(x) + x), conv=point(), bn=bn(4)),
)
refuses(
    "overwritten-between",
    "the value is overwritten in place before the batch norm reads it",
    lambda: Wired(lambda m, x: m.bn(m.conv(x).add_(1.0).relu_()), conv=point(), bn=bn(4)),
)

# ------------------------------------------------------------------------------------------------------------
# several in a row, nested, with something in between, functional

folds("conv-norm-norm", lambda: row(conv(), bn(), bn()), pairs=2)
folds("norm-conv-norm", lambda: row(bn(4), conv(), bn()), pairs=2)
folds("two-convs", lambda: row(conv(), bn(), conv(6, 4, padding=1), bn(4)), pairs=2)
folds("nested", lambda: row(row(conv()), row(row(bn()), nn.ReLU()), row(conv(6, 6)), bn()), pairs=2)
folds("identity-between", lambda: row(conv(), nn.Identity(), bn()))
folds("dropout-between", lambda: row(conv(), nn.Dropout2d(0.5), bn()))
folds("inside-conv-subclass", lambda: row(NormedConv(4, 6), nn.ReLU(), NormedConv(6, 4)), pairs=2)
folds("in-place-after", lambda: Wired(lambda m, x: m.bn(m.conv(x)).add_(x).relu_(), conv=point(), bn=bn(4)))
folds("functional", FunctionalBN)
folds("functional-no-bias", lambda: FunctionalBN(bias=False))
folds("functional-not-affine", lambda: FunctionalBN(affine=False))
folds("functional-no-bias-not-affine", lambda: FunctionalBN(bias=False, affine=False))
refuses("functional-batch-statistics", BATCH, lambda: FunctionalBN(training=True))

# ------------------------------------------------------------------------------------------------------------
# layers, weights and norms that are used more than once

folds(
    "conv-and-norm-reused",
    lambda: Wired(lambda m, x: m.bn(m.conv(F.relu(m.bn(m.conv(x))))), conv=conv(4, 4), bn=bn(4)),
    pairs=2,  # two places, one weight
)
folds("siamese", lambda: Wired(lambda m, x, y: m.bn(m.conv(x)) - m.bn(m.conv(y)), conv=conv(), bn=bn()), IMAGES)
folds(
    "norm-shared-by-two-convs",
    lambda: Wired(lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x)), a=conv(), b=conv(bias=False), bn=bn()),
    pairs=2,
)
folds("two-norms-tie-their-weight", lambda: tie(row(conv(), bn(), nn.ReLU(), conv(6, 6), bn()), "1", "4"), pairs=2)
refuses(
    "norm-shared-with-an-activation",
    "the batch norm also runs on a value that no layer made",
    lambda: Wired(lambda m, x: m.bn(m.conv(x)) + m.bn(F.relu(x)), conv=point(), bn=bn(4)),
)
refuses(
    "norm-shared-and-value-read-twice",
    "the value of one of the layers has a second reader",
    lambda: Wired(lambda m, x: m.bn(m.a(x)) + m.bn(y := m.b(x)) * y, a=point(), b=point(), bn=bn(4)),
)
refuses(
    "conv-reused-normalised-once",
    "the second use of the layer is not normalised",
    lambda: Wired(lambda m, x: m.bn(m.conv(x)) + m.conv(F.relu(x)), conv=point(), bn=bn(4)),
)
refuses(
    "conv-reused-with-two-norms",
    "two batch norms follow one layer",
    lambda: Wired(lambda m, x: m.b(m.conv(F.relu(m.a(m.conv(x))))), conv=point(), a=bn(4), b=bn(4)),
)
refuses(
    "weight-tied-to-plain-conv",
    "the weight belongs to a second layer",
    lambda: tie(Wired(lambda m, x: m.bn(m.a(x)) + m.b(x), a=point(), b=point(), bn=bn(4)), "a", "b"),
)
refuses(
    "bias-tied-to-plain-conv",
    "the bias belongs to a second layer",
    lambda: tie(Wired(lambda m, x: m.bn(m.a(x)) + m.b(x), a=point(), b=point(), bn=bn(4)), "a", "b", "bias"),
)
refuses(
    "weight-tied-between-two-norms",
    "the weight belongs to two layers that are normalised differently",
    lambda: tie(Wired(lambda m, x: m.p(m.a(x)) + m.q(m.b(x)), a=point(), b=point(), p=bn(4), q=bn(4)), "a", "b"),
)
refuses(
    "weight-read-by-a-function",
    "a second operator reads the weight",
    lambda: Wired(lambda m, x: F.conv_transpose2d(F.relu(m.bn(m.conv(x))), m.conv.weight), conv=conv(), bn=bn()),
)
refuses("weight-norm", "the weight is computed from other parameters", lambda: row(weight_norm(conv()), bn()))
refuses(
    "value-is-model-output",
    "the value of the layer is an output of the model",
    lambda: Wired(lambda m, x: (m.bn(y := m.conv(x)), y), conv=point(), bn=bn(4)),
)
refuses(
    "value-has-two-readers",
    "the value of the layer has a second reader",
    lambda: Wired(lambda m, x: m.bn(y := m.conv(x)) + F.relu(y), conv=point(), bn=bn(4)),
)
refuses(
    "value-has-two-norms",
    "two batch norms read the value of the layer",
    lambda: Wired(lambda m, x: m.a(y := m.conv(x)) + m.b(y), conv=point(), a=bn(4), b=bn(4)),
)
