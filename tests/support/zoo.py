"""A zoo of small models: real architectures and the odd things real models do.

``ZOO[name]`` is a :class:`~tests.support.cases.Case`: ``build()`` gives a seeded model in eval mode whose batch norms
have the statistics of real batches, ``example(seed)`` its inputs, ``run(model, seed)`` its output. The same
architectures at full size (``ResNet18()``, ``MobileNetV2()``, ``Encoder()``) serve the benchmarks.
``FOLDING_ZOO`` holds the batch-norm variants, each with what folding must do; ``chain(n)`` has ``n`` blocks,
for scaling tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.support.cases import Call, Case, Make, bools, builder, floats, inputs, ints, just
from tests.support.folding_zoo import FOLDING_ZOO

__all__ = ["FOLDING_ZOO", "ZOO", "Call", "Case", "Encoder", "MobileNetV2", "ResNet18", "cases", "chain", "chain_input"]

ZOO: dict[str, Case] = {}


def cases(*tags: str) -> list[Case]:
    """The cases of ``ZOO`` that carry all of ``tags``."""
    return [case for case in ZOO.values() if case.tags.issuperset(tags)]


def _add(
    name: str,
    build: Callable[[], nn.Module],
    make: Callable[[torch.Generator], Call],
    *tags: str,
    finish: Callable[[nn.Module], object] | None = None,
) -> None:
    assert name not in ZOO, name
    ZOO[name] = Case(name, builder(name, build, make, finish), make, frozenset(tags))


# ------------------------------------------------------------------------------------------------------------
# convolutional networks


def conv_bn(
    cin: int, cout: int, k: int = 3, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    """Convolution without bias, batch norm, and ``act`` if given."""
    layers = [nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(cout)]
    return nn.Sequential(*layers, *([] if act is None else [act]))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = conv_bn(cin, cout, 1, stride) if stride != 1 or cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += identity
        return self.relu(y)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2015, arXiv:1512.03385), ImageNet layout; ``width`` 64 and 4 ``stages`` are the original."""

    def __init__(self, width: int = 64, classes: int = 1000, stages: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width][: stages + 1]
        for i, (cin, cout) in enumerate(zip(widths, widths[1:], strict=False), 1):
            stage = nn.Sequential(BasicBlock(cin, cout, 1 if i == 1 else 2), BasicBlock(cout, cout, 1))
            self.add_module(f"layer{i}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], classes)
        self.stages = stages

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(1, self.stages + 1):
            x = getattr(self, f"layer{i}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    """Expand, depthwise, project; a shortcut where the shape allows."""

    def __init__(self, cin: int, cout: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = cin * expand
        layers: list[nn.Module] = [] if expand == 1 else [conv_bn(cin, hidden, 1, act=nn.ReLU6(inplace=True))]
        layers += [conv_bn(hidden, hidden, 3, stride, groups=hidden, act=nn.ReLU6(inplace=True))]
        self.conv = nn.Sequential(*layers, conv_bn(hidden, cout, 1))
        self.shortcut = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.shortcut else self.conv(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381), ImageNet layout."""

    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, width: float = 1.0, classes: int = 1000, stages: int = 7) -> None:
        super().__init__()

        def channels(c: int) -> int:
            return max(8, int(c * width + 4) // 8 * 8)

        c = channels(32)
        features: list[nn.Module] = [conv_bn(3, c, 3, 2, act=nn.ReLU6(inplace=True))]
        for expand, out, repeats, stride in self.STAGES[:stages]:
            for i in range(repeats):
                features.append(InvertedResidual(c, channels(out), stride if i == 0 else 1, expand))
                c = channels(out)
        last = channels(1280)
        features.append(conv_bn(c, last, 1, act=nn.ReLU6(inplace=True)))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class UNet(nn.Module):
    """Two levels down and up, skips joined by concatenation."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._double(3, c), self._double(c, 2 * c)
        self.bottom = self._double(2 * c, 4 * c)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.right2, self.right1 = self._double(4 * c, 2 * c), self._double(2 * c, c)
        self.head = nn.Conv2d(c, 2, 1)
        self.pool = nn.MaxPool2d(2)

    @staticmethod
    def _double(cin: int, cout: int) -> nn.Sequential:
        return nn.Sequential(conv_bn(cin, cout, act=nn.ReLU()), conv_bn(cout, cout, act=nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        y = self.bottom(self.pool(b))
        y = self.right2(torch.cat([self.up2(y), b], 1))
        y = self.right1(torch.cat([self.up1(y), a], 1))
        return self.head(y)


class Conv3dNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(1, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(), nn.MaxPool3d(2),
            nn.Conv3d(6, 12, 3, padding=1, groups=3, bias=False), nn.BatchNorm3d(12), nn.ReLU(),
            nn.ConvTranspose3d(12, 4, 2, 2),
        )  # fmt: skip
        self.pool, self.fc = nn.AdaptiveAvgPool3d((1, 2, 2)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.features(x)).flatten(1))


class AudioNet(nn.Module):
    """Dilated and grouped 1-D convolutions with gated units, waveform in and out."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, c, 8, 4, padding=2)
        self.gated = nn.ModuleList([nn.Conv1d(c, 2 * c, 3, padding=d, dilation=d) for d in (1, 2, 4)])
        self.mix = nn.ModuleList([nn.Conv1d(c, c, 1, groups=4) for _ in range(3)])
        self.norm = nn.BatchNorm1d(c)
        self.decode = nn.ConvTranspose1d(c, 1, 8, 4, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        for gated, mix in zip(self.gated, self.mix, strict=True):
            h = h + mix(F.glu(gated(h), dim=1))
        return torch.tanh(self.decode(self.norm(h)))


class SqueezeExcite(nn.Module):
    """Channel gates from a global average (MobileNetV3 form)."""

    def __init__(self, c: int, gate: nn.Module) -> None:
        super().__init__()
        self.reduce, self.expand, self.gate = nn.Conv2d(c, c // 2, 1), nn.Conv2d(c // 2, c, 1), gate

    def forward(self, x: Tensor) -> Tensor:
        s = F.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.expand(F.relu(self.reduce(s))))


class DenseLayers(nn.Module):
    """DenseNet: norm, relu, convolution; each layer reads all before it."""

    def __init__(self, c: int = 8, growth: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(c + i * growth) for i in range(layers)])
        self.convs = nn.ModuleList([nn.Conv2d(c + i * growth, growth, 3, padding=1, bias=False) for i in range(layers)])
        self.head = nn.Linear(c + layers * growth, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            found.append(conv(F.relu(norm(torch.cat(found, 1)))))
        return self.head(torch.cat(found, 1).mean((2, 3)))


class Inception(nn.Module):
    """Four branches side by side."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.one = conv_bn(3, c, 1, act=nn.ReLU())
        self.three = nn.Sequential(conv_bn(3, c, 1, act=nn.ReLU()), conv_bn(c, c, 3, act=nn.ReLU()))
        self.five = nn.Sequential(conv_bn(3, c, 1, act=nn.ReLU()), conv_bn(c, c, 5, act=nn.ReLU()))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), conv_bn(3, c, 1, act=nn.ReLU()))
        self.fc = nn.Linear(4 * c, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)
        return self.fc(F.adaptive_max_pool2d(y, 1).squeeze(-1).squeeze(-1))


def _mobilenet_v3_block() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 8, 3, 2, act=nn.Hardswish()), conv_bn(8, 8, 5, groups=8, act=nn.Hardswish()),
        SqueezeExcite(8, nn.Sigmoid()), conv_bn(8, 16, 1), SqueezeExcite(16, nn.Hardsigmoid()),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def _depthwise_separable() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 8, 3, 2, act=nn.ReLU6()),
        conv_bn(8, 8, 3, groups=8, act=nn.ReLU6()), conv_bn(8, 16, 1, act=nn.ReLU6()),
        nn.Conv2d(16, 32, 3, 2, 1, groups=16), nn.ReLU6(),  # a depthwise layer with two outputs per channel
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


_add("resnet18", lambda: ResNet18(8, 10, stages=2), inputs(floats(2, 3, 32, 32)), "cnn", "residual", "inplace")
_add(
    "mobilenet-v2",
    lambda: MobileNetV2(0.25, 10, stages=3),
    inputs(floats(2, 3, 32, 32)),
    "cnn",
    "residual",
    "depthwise",
)
_add("unet", UNet, inputs(floats(2, 3, 16, 16)), "cnn", "concat")
_add("conv3d-net", Conv3dNet, inputs(floats(2, 1, 8, 8, 8)), "cnn")
_add("audio-net", AudioNet, inputs(floats(2, 1, 64)), "cnn", "residual")
_add("depthwise-separable", _depthwise_separable, inputs(floats(2, 3, 16, 16)), "cnn", "depthwise")
_add("mobilenet-v3-block", _mobilenet_v3_block, inputs(floats(2, 3, 16, 16)), "cnn", "depthwise")
_add("densenet", DenseLayers, inputs(floats(2, 3, 8, 8)), "cnn", "concat")
_add("inception", Inception, inputs(floats(2, 3, 12, 12)), "cnn", "concat")


# ------------------------------------------------------------------------------------------------------------
# transformers


class Encoder(nn.Module):
    """A stack of ``nn.TransformerEncoderLayer`` over patches that are vectors already."""

    def __init__(
        self, dim: int = 256, heads: int = 8, layers: int = 6, norm_first: bool = True, classes: int = 1000
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.1, "gelu", batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.position = nn.Parameter(torch.randn(1, 1024, dim) * 0.02)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x + self.position[:, : x.shape[1]]).mean(1))


class Attention(nn.Module):
    """Multi-head self-attention; ``how`` says by which functions."""

    def __init__(self, dim: int, heads: int, how: Literal["sdpa", "bmm", "einsum", "matmul"]) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = self._weights(q, k, mask)
            if self.how == "bmm":
                y = torch.bmm(y.flatten(0, 1), v.reshape(-1, t, c // self.heads)).view(b, self.heads, t, -1)
            elif self.how == "einsum":
                y = torch.einsum("bhqk,bhkd->bhqd", y, v)
            else:
                y = y @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, c))

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        if self.how == "bmm":
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:3], k.shape[2])
        elif self.how == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1))
        scores = scores / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, heads: int, how: Literal["sdpa", "bmm", "einsum", "matmul"]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, how)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, class token, positions, handwritten blocks (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

    def __init__(self, dim: int = 16, heads: int = 2, layers: int = 2, how: Any = "sdpa") -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        self.position = nn.Parameter(torch.randn(1, 17, dim) * 0.1)
        self.blocks = nn.ModuleList([Block(dim, heads, how) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class MaskedLanguageModel(nn.Module):
    """Token ids and a mask in, logits out; the output layer reads the embedding's weight."""

    def __init__(self, vocab: int = 40, dim: int = 16, how: Any = "matmul") -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim, padding_idx=0), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList([Block(dim, 2, how) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        return self.head(self.norm(x))


class CrossAttention(nn.Module):
    """``nn.MultiheadAttention`` with a float mask, a padding mask and weights as second output."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4, kdim=12, vdim=12, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor, pad: Tensor) -> tuple[Tensor, Tensor]:
        causal = torch.full((x.shape[1], memory.shape[1]), float("-inf")).triu(1)
        pad_values = torch.zeros(pad.shape).masked_fill(pad, float("-inf"))
        return self.attention(x, memory, memory, key_padding_mask=pad_values, attn_mask=causal)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim).uniform_(0.5, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LlamaBlock(nn.Module):
    """Rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023, arXiv:2302.13971)."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, dim // heads
        self.input_norm, self.post_norm = RMSNorm(dim), RMSNorm(dim)
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, kv_heads * self.d, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
        b, t, _ = x.shape
        h = self.input_norm(x)
        q = self.rotate(self.q_proj(h).view(b, t, self.heads, self.d).transpose(1, 2), cos, sin)
        k = self.rotate(self.k_proj(h).view(b, t, self.kv_heads, self.d).transpose(1, 2), cos, sin)
        v = self.v_proj(h).view(b, t, self.kv_heads, self.d).transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        present, repeats = (k, v), self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mask = torch.full((t, k.shape[2]), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1 + k.shape[2] - t)
        weights = F.softmax(q @ k.transpose(-1, -2) * self.d**-0.5 + mask, dim=-1)
        x = x + self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, -1))
        h = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h)), present


class Llama(nn.Module):
    """Decoder with an optional cache of keys and values, and a tied output layer."""

    def __init__(self, vocab: int = 48, dim: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([LlamaBlock(dim, 4, 2, 24) for _ in range(layers)])
        self.norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        angle = torch.outer(torch.arange(64).float(), 10000 ** (-torch.arange(0, 4, 2).float() / 4)).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor, past: list[tuple[Tensor, Tensor]] | None = None) -> dict[str, Any]:
        start = 0 if past is None else past[0][0].shape[2]
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        x, cache = self.embed_tokens(ids), []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, cos, sin, None if past is None else past[i])
            cache.append(present)
        return {"logits": self.lm_head(self.norm(x)), "past": cache}


def _cache(layers: int, *shape: int) -> Make:
    make = floats(*shape)
    return lambda g: [(make(g), make(g)) for _ in range(layers)]


for _first in (True, False):
    _add(
        f"encoder-{'pre' if _first else 'post'}-norm", lambda first=_first: Encoder(16, 2, 2, first, 10),
        inputs(floats(2, 9, 16)), "transformer",
    )  # fmt: skip
for _how in ("sdpa", "bmm", "einsum", "matmul"):
    _add(f"vit-{_how}", lambda how=_how: VisionTransformer(how=how), inputs(floats(2, 3, 16, 16)), "transformer")
_add("masked-lm", MaskedLanguageModel, inputs(ints(40, 2, 7), bools(2, 7)), "transformer", "tokens", "mask", "tied")
_add(
    "masked-lm-sdpa",
    lambda: MaskedLanguageModel(how="sdpa"),
    inputs(ints(40, 2, 7), bools(2, 7)),
    "transformer",
    "tokens",
    "mask",
    "tied",
)
_add(
    "cross-attention",
    CrossAttention,
    inputs(floats(2, 5, 16), floats(2, 6, 12), bools(2, 6, first=False)),
    "transformer",
    "mask",
    "multi-io",
)
_add("llama", Llama, inputs(ints(48, 2, 6)), "transformer", "tokens", "tied", "containers")
_add(
    "llama-cached",
    Llama,
    inputs(ints(48, 2, 3), past=_cache(2, 2, 2, 4, 4)),
    "transformer",
    "tokens",
    "tied",
    "containers",
    "kwargs",
)


# ------------------------------------------------------------------------------------------------------------
# recurrent networks


class LstmTagger(nn.Module):
    """Embedding, two-layer LSTM with state in and out, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 12, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(12, 5)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(self.embedding(ids), state)
        return self.out(y), state


class PackedGru(nn.Module):
    """A bidirectional GRU over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.out(y)


class CellLoop(nn.Module):
    """Cells stepped by a Python loop, one of the library and one written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.ih, self.hh = nn.LSTMCell(6, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = c = s = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            s = torch.tanh(self.ih(h) + self.hh(s))
        return s


_add("lstm", LstmTagger, inputs(ints(20, 2, 6)), "recurrent", "tokens", "multi-io")
_add("gru-packed", PackedGru, inputs(floats(3, 5, 6), just(torch.tensor([3, 5, 2]))), "recurrent")
_add("cell-loop", CellLoop, inputs(floats(2, 5, 6)), "recurrent", "loop")
_add("rnn-projected-lstm", lambda: nn.LSTM(6, 8, proj_size=4), inputs(floats(5, 2, 6)), "recurrent", "multi-io")


# ------------------------------------------------------------------------------------------------------------
# how modules are used


class SharedTwice(nn.Module):
    """The same convolution and the same activation run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.relu = (nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        x = self.relu(self.conv(x))
        return self.relu(self.conv(x)) + x


class SharedActivation(nn.Module):
    """One activation object everywhere, as many written networks have it."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU()
        self.body = nn.Sequential(conv_bn(3, 6, act=act), conv_bn(6, 6, act=act), conv_bn(6, 6, act=act))
        self.act, self.fc1, self.fc2 = act, nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(self.act(self.body(x)).mean((2, 3)))))


class Siamese(nn.Module):
    """One backbone for both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            conv_bn(3, 6, act=nn.ReLU()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 8)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.sigmoid(self.head(torch.abs(self.backbone(left) - self.backbone(right))))


class Nested(nn.Module):
    """Containers in containers, names that look alike, and a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleDict({"output": nn.Linear(6, 6), "output_1": nn.Linear(6, 6)})
        self.hidden_output, self.hidden_output_1 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Identity())) for _ in range(3)]
        )
        self.heads = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(6, 2)]), "b": nn.ModuleList([nn.Linear(6, 3)])})
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.hidden["output"](x) + self.hidden["output_1"](x)
        x = F.relu(self.hidden_output(x)) - self.hidden_output_1(x)
        for layer in self.layers:
            x = layer(x) + x
        return tuple(head(x) for heads in self.heads.values() for head in heads)


class Functional(nn.Module):
    """No submodules at all: raw parameters and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(6, 3, 3, 3) * 0.2)
        self.kernel_bias = nn.Parameter(torch.randn(6) * 0.1)
        self.w, self.b = nn.Parameter(torch.randn(6, 5) * 0.4), nn.Parameter(torch.randn(5) * 0.1)
        self.left = nn.Parameter(torch.randn(4, 2) * 0.5)
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.kernel, self.kernel_bias, padding=1))
        x = F.layer_norm(x.mean((2, 3)) * self.gain, (6,)) @ self.w + self.b
        return self.left @ F.linear(x, self.w)


class Branch(nn.Module):
    """Which layer runs depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.up(x)) if x.sum() > 0 else torch.tanh(self.down(x))
        return self.out(x)


class LayerLoop(nn.Module):
    """A module called a number of times that an argument decides, and a list of layers with residual adds."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.SiLU()) for _ in range(3)])

    def forward(self, x: Tensor, steps: int = 3) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(self.step(x))
        for layer in self.layers:
            x = x + layer(x)
        return x


class InPlace(nn.Module):
    """Values that are overwritten after they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ReLU(inplace=True)
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)  # overwrites the model's own input
        y = F.relu_(self.conv1(x))
        z = self.conv2(y)
        z += y
        z.add_(0.5).mul_(2.0)
        z[:, :2] = z[:, 2:4] * 0.5
        z.clamp_(-4, 4)
        return torch.sigmoid_(z)


class TiedAutoencoder(nn.Module):
    """The decoder reads the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.encode = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, 10)
        self.conv_bias, self.decode_bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x)).mean(1).flatten(1)
        h = F.linear(F.relu(self.encode(h)), self.encode.weight.t(), self.decode_bias).view(-1, 1, 8, 8)
        return F.conv_transpose2d(h.expand(-1, 4, -1, -1), self.conv.weight, self.conv_bias, padding=1)


class Parametrized(nn.Module):
    """Weights that are computed from other parameters at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = weight_norm(nn.Conv2d(3, 6, 3, padding=1)), spectral_norm(nn.Linear(6, 6))
        self.mask = nn.Parameter((torch.rand(4, 6) > 0.5).float(), requires_grad=False)
        self.masked = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(F.relu(self.conv(x)).mean((2, 3)))
        return F.linear(h, self.masked.weight * self.mask, self.masked.bias)


class Outputs(nn.Module):
    """Inner values that are outputs as well, the same value twice, and the input handed back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        raw = self.conv1(x)
        act = F.relu(raw)
        return raw, act, self.conv2(act), act, x


_add("shared-twice", SharedTwice, inputs(floats(2, 3, 8, 8)), "reuse")
_add("shared-activation", SharedActivation, inputs(floats(2, 3, 8, 8)), "reuse")
_add("siamese", Siamese, inputs(floats(2, 3, 8, 8), floats(2, 3, 8, 8)), "reuse", "multi-io")
_add("nested-names", Nested, inputs(floats(3, 6)), "names", "multi-io")
_add("functional", Functional, inputs(floats(2, 3, 6, 6)), "functional")
_add("branch", Branch, inputs(floats(3, 6, shift=0.0)), "branch")
_add("layer-loop", LayerLoop, inputs(floats(3, 6)), "loop", "residual")
_add("in-place", InPlace, inputs(floats(2, 3, 6, 6)), "inplace", "mutates-input")
_add("tied-autoencoder", TiedAutoencoder, inputs(floats(2, 1, 8, 8)), "tied", "functional")
_add("parametrized", Parametrized, inputs(floats(2, 3, 6, 6)), "parametrized")
_add("inner-outputs", Outputs, inputs(floats(2, 3, 6, 6)), "multi-io")


# ------------------------------------------------------------------------------------------------------------
# what goes in and comes out


@dataclass
class Sample:
    """A data class as argument."""

    image: Tensor
    meta: Tensor
    weight: float = 1.0
    extra: Tensor | None = None


@dataclass
class Detection:
    """A data class as result; one field stays empty."""

    scores: Tensor
    boxes: dict[str, Tensor]
    aux: Tensor | None = None


class Pair(NamedTuple):
    """A named tuple as argument and result."""

    left: Tensor
    right: Tensor


class Detector(nn.Module):
    """Data class in, data class out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.meta = conv_bn(3, 6, act=nn.ReLU()), nn.Linear(4, 6)
        self.score, self.box = nn.Conv2d(6, 2, 1), nn.Conv2d(6, 4, 1)

    def forward(self, sample: Sample) -> Detection:
        x = self.conv(sample.image) * sample.weight + self.meta(sample.meta)[:, :, None, None]
        if sample.extra is not None:
            x = x + sample.extra
        return Detection(self.score(x).softmax(1), {"xy": self.box(x)[:, :2], "wh": self.box(x)[:, 2:].exp()})


class DictModel(nn.Module):
    """A dictionary with a list in it goes in, a nested dictionary with a ``None`` comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, batch: dict[str, Any], scale: float = 1.0, flag: bool = True) -> dict[str, Any]:
        h = self.a(batch["x"])
        for more in batch["more"]:
            h = h + self.b(more) * scale
        pair = Pair(*h.split(3, dim=-1))
        return {"out": self.c(F.relu(h)), "parts": {"pair": pair, "none": None}, "n": 3, "flag": flag}


class Pairs(nn.Module):
    """Tuples and named tuples in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Bilinear(4, 5, 3), nn.Linear(5, 3)

    def forward(
        self, pair: Pair, state: tuple[Tensor, tuple[Tensor, None]]
    ) -> tuple[Pair, tuple[Tensor, list[Tensor]]]:
        left, right = self.left(pair.left, pair.right) + state[0], self.right(pair.right) * state[1][0]
        return Pair(left, right), (left + right, [left - right])


class KeywordOnly(nn.Module):
    """Nothing may be given by position."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, *, image: Tensor, text: Tensor | None = None, scale: float = 1.0) -> Tensor:
        h = self.image(image)
        return h if text is None else h + self.text(text) * scale


class Star(nn.Module):
    """Any number of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, *parts: Tensor, **more: Tensor) -> Tensor:
        return self.fc(torch.stack([*parts, *more.values()]).sum(0))


class BooleanIndex(nn.Module):
    """Shapes that depend on the data: boolean indexing, nonzero, top-k, scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert, self.out = nn.Linear(6, 3), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, index = self.gate(x).topk(2, dim=-1)
        rows = (index == 1).any(-1)
        y = x.clone()
        y[rows] = F.relu(self.expert(x[rows]))
        y = torch.where(rows[:, None], y * weight.softmax(-1)[:, :1], y)
        return self.out(y), rows.nonzero()


def _of(type_: Callable[..., Any], **makers: Make) -> Make:
    return lambda g: type_(**{k: v(g) for k, v in makers.items()})


def _many(*makers: Make, into: Callable[[Any], Any] = tuple) -> Make:
    return lambda g: into(m(g) for m in makers)


_add(
    "dataclass-io", Detector, inputs(_of(Sample, image=floats(2, 3, 6, 6), meta=floats(2, 4))), "containers", "multi-io"
)
_add(
    "dataclass-io-optional",
    Detector,
    inputs(_of(Sample, image=floats(2, 3, 6, 6), meta=floats(2, 4), weight=just(0.5), extra=floats(6, 6))),
    "containers",
    "multi-io",
)
_add(
    "dict-io",
    DictModel,
    inputs(_of(dict, x=floats(3, 4), more=_many(floats(3, 5), floats(3, 5), into=list)), just(0.7)),
    "containers",
    "multi-io",
)
_add(
    "tuple-io",
    Pairs,
    inputs(_of(Pair, left=floats(3, 4), right=floats(3, 5)), _many(floats(3, 3), _many(floats(3, 3), just(None)))),
    "containers",
    "multi-io",
)
_add("keyword-only", KeywordOnly, inputs(image=floats(3, 6), text=floats(3, 5), scale=just(0.5)), "kwargs", "multi-io")
_add("keyword-only-absent", KeywordOnly, inputs(image=floats(3, 6)), "kwargs")
_add("star-arguments", Star, inputs(floats(3, 6), floats(3, 6), last=floats(3, 6)), "kwargs", "multi-io")
_add("boolean-index", BooleanIndex, inputs(floats(5, 6)), "branch", "multi-io")


# ------------------------------------------------------------------------------------------------------------
# operators


class Activations(nn.Module):
    """Every activation in a row, each after a layer that keeps its input alive on both sides of zero."""

    MAKERS: tuple[Callable[[], nn.Module], ...] = (
        nn.ReLU, lambda: nn.PReLU(6), nn.PReLU, lambda: nn.LeakyReLU(0.1), nn.ELU, nn.SELU, nn.CELU, nn.SiLU,
        nn.Mish, nn.GELU, lambda: nn.GELU("tanh"), nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus,
        nn.Softsign, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Tanhshrink, lambda: nn.Hardshrink(0.1),
        lambda: nn.Softshrink(0.1), nn.ReLU6, lambda: nn.GLU(1),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.acts = nn.ModuleList([make() for make in self.MAKERS])
        self.layers = nn.ModuleList([nn.Linear(6, 12 if isinstance(a, nn.GLU) else 6) for a in self.acts])
        self.out = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = act(layer(x) * 1.5)
        return self.out(x)


class Norms(nn.Module):
    """The normalisations that do not fold."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.norms = nn.ModuleList(
            [
                nn.GroupNorm(2, c), nn.InstanceNorm2d(c), nn.InstanceNorm2d(c, affine=True),
                nn.LayerNorm([c, 6, 6]), nn.BatchNorm2d(c), nn.LocalResponseNorm(3), nn.RMSNorm([6]),
                nn.LayerNorm(6, elementwise_affine=False),
            ]
        )  # fmt: skip
        self.convs = nn.ModuleList([nn.Conv2d(c, c, 1) for _ in self.norms])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(norm(x))
        return F.normalize(x.mean((2, 3)), dim=-1)


class SuperResolution(nn.Module):
    """Pixel shuffle, both kinds of interpolation, adaptive pools, explicit padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.Conv2d(4, 3, 3, padding=1),
        )
        self.shuffle, self.pad = nn.PixelShuffle(2), nn.ReflectionPad2d(1)
        self.up, self.pool = nn.Upsample(scale_factor=2, mode="nearest"), nn.AdaptiveMaxPool2d(12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small = F.leaky_relu(self.conv1(self.pad(x)), 0.1)
        large = self.conv3(self.shuffle(self.conv2(small)))
        return large + F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False), self.pool(self.up(x))


class Shapes(nn.Module):
    """Data movement: every value at the end is one that a layer computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 1), nn.Linear(8, 8)
        self.register_buffer("order", torch.tensor([1, 0, 3, 2, 5, 4, 7, 6]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).reshape(x.shape[0], 8, *x.shape[2:])
        y = F.pad(F.max_pool2d(y, 2), (1, 0, 0, 1))[:, self.order]
        y = torch.roll(y.flip(-1), 1, dims=2).permute(0, 2, 3, 1)
        first, second = torch.chunk(self.b(y.contiguous()), 2, dim=-1)
        return torch.cat([second, first], -1).movedim(-1, 1).unsqueeze(1).repeat(1, 2, 1, 1, 1).squeeze(0)


class Arithmetic(nn.Module):
    """Operators on tensors: with tensors, with parameters, with numbers from either side."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale, self.offset = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(6))
        self.register_buffer("mean", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.fc(x) - self.mean) / (self.scale.abs() + 1.0)
        h = 1.0 - 2 * h * self.scale + self.offset
        g = self.fc2(h.clamp(min=-3.0)) ** 2 / (1.0 + h.abs()) + torch.maximum(h, x) - torch.minimum(h, -x)
        return torch.logsumexp(g.cumsum(-1), -1, keepdim=True) - g.std(-1, keepdim=True) + (h @ h.t()).mean()


def _dropout() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.Dropout2d(0.3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.AlphaDropout(0.1),
        nn.Linear(96, 4),
    )


_add("activations", Activations, inputs(floats(4, 6)), "operators")
_add("norms", Norms, inputs(floats(2, 3, 6, 6)), "operators", "residual")
_add("super-resolution", SuperResolution, inputs(floats(2, 3, 6, 6)), "operators", "multi-io")
_add("data-movement", Shapes, inputs(floats(2, 4, 6, 6)), "operators")
_add("arithmetic", Arithmetic, inputs(floats(4, 6)), "operators", "functional")
_add("dropout", _dropout, inputs(floats(2, 3, 6, 6)), "operators")
_add("embedding-bag", lambda: nn.EmbeddingBag(20, 6), inputs(ints(20, 3, 4)), "operators", "tokens")

for _dtype, _word in ((torch.float16, "half"), (torch.bfloat16, "bfloat16")):
    _add(
        f"resnet18-{_word}",
        lambda: ResNet18(8, 10, stages=2),
        inputs(floats(2, 3, 32, 32, dtype=_dtype)),
        "cnn",
        "residual",
        _word,
        finish=lambda m, d=_dtype: m.to(d),
    )
    _add(
        f"vit-{_word}",
        VisionTransformer,
        inputs(floats(2, 3, 16, 16, dtype=_dtype)),
        "transformer",
        _word,
        finish=lambda m, d=_dtype: m.to(d),
    )
_add(
    "siamese-double",
    Siamese,
    inputs(floats(2, 3, 8, 8, dtype=torch.float64), floats(2, 3, 8, 8, dtype=torch.float64)),
    "reuse",
    "multi-io",
    "double",
    finish=lambda m: m.double(),
)


# ------------------------------------------------------------------------------------------------------------
# scaling


class ChainBlock(nn.Module):
    """Convolution, batch norm, activation; with a residual add or not."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(x)))
        return x + y if self.residual else y


def chain(n: int, residual: bool = False) -> nn.Sequential:
    """``n`` blocks of convolution, batch norm and ReLU in a row, 2 channels; the input is ``chain_input()``.

    The weights keep the signal of order one however long the chain: without residual adds each block
    contracts towards its shift, with them each block adds about 1/n.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(n)
        model = nn.Sequential(*[ChainBlock(residual) for _ in range(n)])
        mean, var = torch.randn(n, 2) * 0.2, torch.rand(n, 2) + 0.5
        gain, shift = torch.rand(n, 2) * 0.6 + 0.4, torch.rand(n, 2) * 0.5 + 0.1
    size = 1 / n if residual else 1.0
    for i, block in enumerate(model):
        block.bn.running_mean.copy_(mean[i])
        block.bn.running_var.copy_(var[i])
        block.bn.weight.data.copy_(gain[i] * size)
        block.bn.bias.data.copy_(shift[i] * size)
    return model.eval()


def chain_input(seed: int = 0) -> Tensor:
    """The input of :func:`chain`: [1, 2, 4, 4] float32."""
    return torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


_add("chain", lambda: chain(20), inputs(floats(1, 2, 4, 4)), "cnn")
_add("chain-residual", lambda: chain(20, residual=True), inputs(floats(1, 2, 4, 4)), "cnn", "residual")
