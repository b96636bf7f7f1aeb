"""A small decoder with outlier channels, in the shapes that transformers come in."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.methods.layers import Layers, rescaling
from bitwright.methods.scaling.smooth import linear_groups
from bitwright.torch import TorchView


class RMSNorm(nn.Module):
    """Written out, as language models do."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def turn(x: Tensor, halves: bool) -> Tensor:
    """Rotary positions: neighbours or halves of a head are turned."""
    angle = torch.arange(x.shape[-2]).float()[:, None] * torch.tensor([1.0, 0.3])
    cos, sin = angle.cos(), angle.sin()
    if halves:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Decoder(nn.Module):
    """Tokens [B, T] to logits [B, T, vocab]: one block with grouped-query attention and a gated MLP.

    Args:
        norm: ``rms`` (written out), ``RMSNorm`` or ``LayerNorm`` of torch.
        rotary: ``pairs``, ``halves`` or ``none``.
        tied: the output layer shares the embedding's table.
        bias: of the linear layers.
    """

    def __init__(
        self, norm: str = "rms", rotary: str = "pairs", tied: bool = True, bias: bool = False, dim: int = 16
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rotary, self.heads, self.kv, self.d = rotary, dim // 4, dim // 8, 4
        make = {"rms": RMSNorm, "RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}[norm]
        self.embed = nn.Embedding(11, dim)
        self.norm1, self.norm2, self.norm = make(dim), make(dim), make(dim)
        self.q, self.o = nn.Linear(dim, dim, bias), nn.Linear(dim, dim, bias)
        self.k, self.v = (nn.Linear(dim, dim // 2, bias) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, 24, bias) for _ in range(2))
        self.down, self.head = nn.Linear(24, dim, bias), nn.Linear(dim, 11, False)
        if tied:
            self.head.weight = self.embed.weight
        for module in (self.norm1, self.norm2, self.norm):
            module.weight.data = torch.exp(torch.randn(dim))
            if getattr(module, "bias", None) is not None:
                module.bias.data.normal_()
        for layer in (self.k, self.up):
            layer.weight.data *= torch.exp(torch.randn(len(layer.weight), 1))
        self.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        B, T = tokens.shape
        x = self.embed(tokens)
        h = self.norm1(x)
        q = self.q(h).view(B, T, self.heads, self.d).transpose(1, 2)
        k, v = (layer(h).view(B, T, self.kv, self.d).transpose(1, 2) for layer in (self.k, self.v))
        if self.rotary != "none":
            q, k = turn(q, self.rotary == "halves"), turn(k, self.rotary == "halves")
        k, v = (y.repeat_interleave(self.heads // self.kv, 1) for y in (k, v))
        mask = torch.full((T, T), float("-inf")).triu(1)
        a = torch.softmax(q @ k.transpose(-1, -2) / self.d**0.5 + mask, -1)
        x = x + self.o((a @ v).transpose(1, 2).reshape(B, T, -1))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norm(x))


def with_outliers(model: nn.Module, example: Tensor) -> nn.Module:
    """``model`` with four channels of every norm sixteen times larger, as large language models have them, and the
    weights behind as much smaller: the same function."""
    view = TorchView(model, [example])
    groups = [group for group in linear_groups(Layers(view.graph()))[0] if group.producers[0].kind == "norm"]
    factors = []
    for seed, group in enumerate(groups):
        factors.append(np.ones(group.channels))
        factors[-1][np.random.default_rng(seed).choice(group.channels, 4, replace=False)] = 1 / 16
    view.edit(rescaling(view, groups, factors)[0])
    return model


def tokens(rows: int = 3) -> Tensor:
    """Random rows of 7 tokens."""
    return torch.randint(0, 11, (rows, 7), generator=torch.Generator().manual_seed(1))
