"""Functional calls and repeated calls of a module as modules of their own."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.torch.modularize import FUNCTION_MODULES, modularized

CASES = {
    "relu": (lambda a, b: F.relu(a, inplace=False), nn.ReLU),
    "elu": (lambda a, b: F.elu(a, alpha=0.2), nn.ELU),
    "hardshrink": (lambda a, b: F.hardshrink(a, lambd=0.2), nn.Hardshrink),
    "softmax": (lambda a, b: F.softmax(a, dim=1), nn.Softmax),
    "sigmoid": (lambda a, b: a.sigmoid(), nn.Sigmoid),
    "add": (lambda a, b: a + b, "Add"),
    "sub": (lambda a, b: 1.5 - a, "Subtract"),
    "truediv": (lambda a, b: a / (b * b + 1), "Divide"),
    "matmul": (lambda a, b: a @ b.transpose(-1, -2), "MatMul"),
    "mean": (lambda a, b: a.mean((2, 3), keepdim=True), "Mean"),
    "cat": (lambda a, b: torch.cat([a, b], dim=1), "Concat"),
    "interpolate": (lambda a, b: F.interpolate(a, size=(b.size(2) + 1, 4)), "Interpolate"),
    "max_pool2d": (lambda a, b: F.max_pool2d(a, 2), "MaxPool2d"),
    "max_pool2d_with_indices": (lambda a, b: F.max_pool2d(a, 2, return_indices=True)[0], "MaxPool2d"),
    "conv2d": (lambda a, b: F.conv2d(a, b[:, :, :1, :1].reshape(2, 3, 1, 1)), "DynamicConv2d"),
}


class Function(nn.Module):
    """A function of two inputs, twice."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.function(a, b), self.function(a, b)


@pytest.mark.parametrize("name", CASES)
def test_a_function_becomes_a_module_that_computes_the_same(name: str) -> None:
    function, kind = CASES[name]
    x = (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    model = Function(function)
    made = modularized(model)
    wanted = FUNCTION_MODULES[kind] if isinstance(kind, str) else kind
    assert isinstance(getattr(made, f"module_{name}"), wanted) and isinstance(getattr(made, f"module_{name}_1"), wanted)
    assert all(torch.equal(a, b) for a, b in zip(made(*x), model(*x), strict=True))


class Layers(nn.Module):
    """Parameters that functions read, a layer that is called twice, and a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 1, 1, 1)), nn.Parameter(torch.randn(3))
        self.conv, self.part = nn.Conv2d(3, 3, 1), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.conv(self.conv(F.conv2d(x, self.weight, self.bias, padding=1, groups=3))))


class Scale(nn.Module):
    """A product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.softplus(x)


@pytest.mark.parametrize("keep", [False, True])
def test_layers_keep_their_parameters_and_parts_may_be_kept(keep: bool) -> None:
    model, x = Layers().eval(), torch.randn(1, 3, 4, 4)
    made = modularized(model, keep=[model.part] if keep else [])
    assert isinstance(made.module_conv2d, nn.Conv2d) and made.module_conv2d.groups == 3
    assert made.module_conv_1.weight is made.conv.weight and made.conv.weight is not model.conv.weight
    assert hasattr(made, "module_softplus") == (not keep) and hasattr(made, "part") == keep and not made.training
    for twin in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(twin(x), model(x))


class Branch(nn.Module):
    """A path that depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) if x.sum() > 0 else x


def test_a_model_that_cannot_be_traced_is_copied_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = Branch()
    with caplog.at_level(logging.WARNING):
        made = modularized(model)
    assert type(made) is Branch and made is not model and "Branch is not rewritten" in caplog.text
