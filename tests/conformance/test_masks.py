"""However an attention mask is built, no encoding is ruined by it and no masked token leaks through; in both front ends."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel, check_model
from tests.onnx.nets import run
from tests.support.simulations import calibrated

B, T, D, H = 3, 6, 16, 2
INF, LEAST = math.inf, torch.finfo(torch.float32).min
How = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Attention whose weights come from ``how(self, q, k, keep)``; ``keep [B, 1, 1, T]`` is True at real tokens."""

    def __init__(self, how: How) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.relative, self.bias = nn.Embedding(8, H), nn.Parameter(torch.randn(H, T, T))
        self.how = how
        self.register_buffer("causal", torch.ones(T, T).tril().bool())

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (m(x).view(B, T, H, D // H).transpose(1, 2) for m in (self.q, self.k, self.v))
        weights = self.how(self, 2 * q, 2 * k, keep[:, None, None, :])
        return self.o((weights @ v).transpose(1, 2).reshape(B, T, D))


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(D // H)


def added(constant: float) -> How:
    return lambda m, q, k, keep: torch.softmax(product(q, k) + (1 - keep.float()) * constant, -1)


def filled(constant: float) -> How:
    return lambda m, q, k, keep: torch.softmax(product(q, k).masked_fill(~keep, constant), -1)


def t5(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    distance = torch.arange(T)[None] - torch.arange(T)[:, None]
    bias = m.relative(distance.clamp(-3, 3) + 3).permute(2, 0, 1)[None]
    bias = bias + (1 - keep.float()) * LEAST
    scores = product(q, k)
    scores += bias
    return torch.softmax(scores.float(), -1).type_as(scores)


def t5_of_input(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    place = keep[:, 0, 0].long().cumsum(-1)
    bias = m.relative((place[:, None, :] - place[:, :, None]).clamp(-3, 3) + 3).permute(0, 3, 1, 2)
    return torch.softmax(product(q, k) + (bias + (1 - keep.float()) * LEAST), -1)


def swin(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    mask = torch.zeros(B, T, T).masked_fill(~keep[:, 0], -100.0)
    scores = (product(q, k) + m.bias).view(1, B, H, T, T) + mask[None, :, None]
    return torch.softmax(scores.view(B, H, T, T), -1)


def causal_and_padding(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    mask = torch.full((T, T), LEAST).triu(1).expand(B, 1, T, T).clone()
    return torch.softmax(product(q, k) + mask.masked_fill((mask == 0) & ~keep, LEAST), -1)


def gpt2(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    seen = keep.float()
    return torch.softmax(product(q, k) * seen - 1e4 * (1 - seen), -1)


def by_hand(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    scores = product(q, k).masked_fill(~keep, -INF)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def with_sink(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    scores = product(q, k) + (1 - keep.float()) * LEAST
    return torch.softmax(torch.cat([scores, m.bias[:, :, :1].expand(B, -1, -1, -1)], -1), -1)[..., :-1]


def scaled_after(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2) + (1 - keep.float()) * -1e4) / math.sqrt(D // H), -1)


def fused(kind: str) -> How:
    def how(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
        mask: Tensor = keep.expand(B, 1, T, T)
        if kind == "float":
            mask = (~mask).float() * LEAST
        return F.scaled_dot_product_attention(q, k, torch.eye(T).expand(B, H, T, T), attn_mask=mask)

    return how


def fused_bias(m: Attention, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    """A table of distances and a mask in one, as T5 gives it to a fused attention."""
    distance = torch.arange(T)[None] - torch.arange(T)[:, None]
    bias = m.relative(distance.clamp(-3, 3) + 3).permute(2, 0, 1)[None] + torch.where(keep, 0.0, -INF)
    return F.scaled_dot_product_attention(q, k, torch.eye(T).expand(B, H, T, T), attn_mask=bias)


WAYS: dict[str, How] = {
    "added-ten-thousand": added(-1e4),
    "added-least": added(LEAST),
    "filled-inf": filled(-INF),
    "filled-billion": filled(-1e9),
    "where-inf": lambda m, q, k, keep: torch.softmax(torch.where(keep, product(q, k), -INF), -1),
    "where-least": lambda m, q, k, keep: torch.softmax(torch.where(keep, product(q, k), torch.full([], LEAST)), -1),
    "logarithm": lambda m, q, k, keep: torch.softmax(product(q, k) + torch.log(keep.float()), -1),
    "subtracted": lambda m, q, k, keep: torch.softmax(product(q, k) - 1e30 * (~keep).float(), -1),
    "clamped": lambda m, q, k, keep: torch.softmax((product(q, k) + ~keep * -1e9).clamp(min=-1e4), -1),
    "then-bias": lambda m, q, k, keep: torch.softmax(product(q, k).masked_fill(~keep, -INF) + m.bias, -1),
    "in-float32": lambda m, q, k, keep: F.softmax(product(q, k) + ~keep * LEAST, -1, dtype=torch.float32),
    "sigmoid": lambda m, q, k, keep: torch.sigmoid(product(q, k) + ~keep * -1e4),
    "t5": t5,
    "t5-of-input": t5_of_input,
    "swin": swin,
    "causal-and-padding": causal_and_padding,
    "gpt2": gpt2,
    "by-hand": by_hand,
    "with-sink": with_sink,
    "scaled-after": scaled_after,
    "fused-boolean": fused("boolean"),
    "fused-float": fused("float"),
    "fused-bias": fused_bias,
}  # fmt: skip


def data(seed: int, n: int = 1) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    keep = torch.arange(T) < torch.tensor([T, T - 2, T - 4])[:, None]
    return [(torch.randn(B, T, D, generator=random), keep) for _ in range(n)]


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_accuracy_holds_and_nothing_leaks(how: How) -> None:
    torch.manual_seed(0)
    model = Attention(how).eval()
    assert check_model(model, data(1)).ok
    sim = calibrated(QuantizationSimModel(model, data(0)[0]), data(1, 4))
    x, keep = data(9)[0]
    with torch.no_grad():
        expected, found = model(x, keep), sim.model(x, keep)
        other = sim.model(torch.where(keep[..., None], x, 1 - x), keep)
    noise = float((expected - found).pow(2).sum() / expected.pow(2).sum())
    assert noise < 1e-3, f"{-10 * math.log10(noise):.1f} dB"  # -30 dB; a ruined range gives -10 or less
    assert torch.equal(found[keep], other[keep]), "tokens that are masked out change what comes of the others"


class FromOutside(nn.Module):
    """Attention under a mask that the caller makes: fused, or of torch's own module without or with its weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.o = kind, nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.own = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if self.kind == "module":
            masks = {"attn_mask": mask.repeat_interleave(H, 0), "key_padding_mask": padding}
            return self.own(x, x, x, **masks, is_causal=is_causal, need_weights=False)[0]  # type: ignore[no-any-return]
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], is_causal=is_causal)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rows_masked_in_full(form: str, kind: str) -> Tensor:
    """Whether a token takes part ``[B, T, T]``; some take part for no query. Torch's module masks where others take part."""
    keep = torch.ones(B, T, T, dtype=torch.bool).tril()
    keep[0, 2], keep[1, 4:] = False, False
    if form == "boolean":
        return ~keep if kind == "module" else keep
    return torch.zeros(B, T, T).masked_fill(~keep, -INF)


@pytest.mark.parametrize("form", ["boolean", "float"])
@pytest.mark.parametrize("kind", ["fused", "module"])
@pytest.mark.parametrize("causal", [False, True], ids=["mask", "mask-and-causal"])
def test_a_query_that_may_attend_to_nothing_gets_zeros_as_in_torch(form: str, kind: str, causal: bool) -> None:
    torch.manual_seed(0)
    model, x, mask = FromOutside(kind).eval(), torch.randn(B, T, D), rows_masked_in_full(form, kind)
    arguments = (x, mask, None, causal)
    expected = model(*arguments)  # with gradients, without which torch's module may take a kernel that answers NaN
    assert expected.isfinite().all()
    sim = QuantizationSimModel(model, arguments)
    with sim.in_float():
        torch.testing.assert_close(sim.model(*arguments), expected)
    sim.compute_encodings([arguments], progress=False)
    found = sim.model(*arguments)
    assert float(((expected - found).pow(2).sum() / expected.pow(2).sum()).detach()) < 1e-3
    if not (causal and kind == "module"):  # with this hint torch's module does not read its mask
        out = model.own.out_proj if kind == "module" else model.o
        assert float((found[0, 2] - out.bias).abs().max().detach()) < 0.01  # zeros go through the last layer alone
    found.pow(2).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in sim.model.parameters())


def test_padding_and_mask_of_torchs_module_leave_a_query_nothing_only_together() -> None:
    torch.manual_seed(0)
    model, x = FromOutside("module").eval(), torch.randn(B, T, D)
    mask, padding = torch.zeros(B, T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -INF), torch.zeros(B, T)
    padding[1, :3] = -INF  # padded on the left: its first queries see padding only
    sim = QuantizationSimModel(model, (x, mask, padding))
    with sim.in_float():
        torch.testing.assert_close(sim.model(x, mask, padding), model(x, mask, padding))
    assert model(x, mask, padding).isfinite().all()


class Padded(nn.Module):
    """A decoder on sequences padded on the left, masked as its users do: causal and padding in one additive mask."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        d, length = self.decoder, tokens.shape[1]
        mask = torch.full((length, length), LEAST).triu(1)[None, None]
        mask = mask.masked_fill(attention_mask[:, None, None, :] == 0, LEAST)
        place = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x, cos, sin = d.tok_embeddings(tokens), d.cos[place][:, None], d.sin[place][:, None]
        for block in d.layers:
            x = block(x, cos, sin, mask)
        return d.output(d.norm(x))


def padded(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, mask and targets: row i keeps its first ``32 (i + 1)`` tokens, the rest is padding on its left."""
    n = len(tokens)
    lengths = (32 * (1 + torch.arange(n) % 4))[:, None]
    place = torch.arange(128) - (128 - lengths)
    mask = place >= 0
    rows = torch.arange(n)[:, None]
    inputs, targets = tokens[rows, place.clamp(min=0)], tokens[rows, (place + 1).clamp(min=0)]
    return torch.where(mask, inputs, 0), mask.long(), targets


@pytest.mark.slow
def test_a_language_model_on_padded_batches(shared_data: Any) -> None:
    from tests.support.data import stories, trained

    def perplexity(model: nn.Module) -> float:
        tokens, mask, targets = padded(stories("test")[:32])
        with torch.no_grad():
            logits = model(tokens, mask)
        return math.exp(F.cross_entropy(logits[mask == 1], targets[mask == 1]))

    model = Padded(trained("stories260k")).eval()
    batches = [padded(rows)[:2] for rows in stories("calib").split(8)]
    report = check_model(model, batches[:1])
    assert report.ok, report.text()
    sim = calibrated(QuantizationSimModel(model, batches[0]), batches)
    lows = {n: float(s.encoding.min.min()) for n, s in sim.quantizers.items() if s.enabled and s.encoding is not None}
    assert min(lows.values()) > -1000, "a mask entered a range"
    assert perplexity(sim.model) < 1.08 * perplexity(model)


class MaybeMasked(nn.Module):
    """Applies a mask where one is given, as transformers do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor, keep: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.how == "sdpa":
            return self.o(F.scaled_dot_product_attention(q, k, v, None if keep is None else keep[:, None, :]))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        if keep is not None:
            scores = scores + torch.where(keep[:, None, :], 0.0, LEAST)
        if shift is not None:
            scores = scores + shift
        return self.o(torch.softmax(scores, -1) @ v)


@pytest.mark.parametrize("how", ["sdpa", "added"])
def test_a_mask_that_the_example_did_not_have_is_no_gap(how: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x, keep = MaybeMasked(how).eval(), torch.randn(B, T, D), torch.ones(B, T, dtype=torch.bool)
    keep[1, 3:] = False
    found = []
    for example in ((x,), (x, keep)):
        sim = calibrated(QuantizationSimModel(model, example), [(x,), (x, keep)])
        with torch.no_grad():
            found.append(sim.model(x, keep))
        unrecorded = sim.coverage().unseen
        assert bool(unrecorded) == (len(example) == 1)
        assert all("applies a mask, which takes no quantizer" in why for _, why in unrecorded)
    assert torch.equal(*found)
    assert "did not happen on the example input" not in caplog.text
    if how == "added":  # what is added is not a mask: a real gap, though the same place added one before
        sim = calibrated(QuantizationSimModel(model, x), [(x, keep)])
        sim.model(x, None, torch.randn(T, T))
        assert "add: this call did not happen on the example input" in caplog.text


L, W = 6, 8


def attention(mask, weights):
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[{L},{W}] q, float[{L},{W}] k, float[{L},{L}] mask) => (float[{L},{W}] y)
        <float[1] low = {{-10000}}, float[1] two = {{2}}, int64[1] axis = {{-1}}> {{
            kt = Transpose<perm = [1, 0]>(k)
            scores = MatMul(q, kt)
            {mask}
            {weights}
            y = MatMul(w, k)
        }}""")


ONNX_WAYS = {
    "clamped": ("masked = Add(scores, mask)", "c = Max(masked, low)  w = Softmax(c)"),
    "sigmoid": ("masked = Add(scores, mask)", "w = Sigmoid(masked)"),
    "scaled-after": ("masked = Add(scores, mask)", "c = Div(masked, two)  w = Softmax(c)"),
    "plain": ("masked = Add(scores, mask)", "w = Softmax(masked)"),
    "by-hand": (
        "masked = Add(scores, mask)  top = ReduceMax(masked, axis)  shifted = Sub(masked, top)",
        "e = Exp(shifted)  n = ReduceSum(e, axis)  w = Div(e, n)",
    ),
}


def feeds(seed, low):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((L, W)).astype(np.float32) for _ in range(2))
    return {"q": q / 2, "k": k, "mask": np.triu(np.full((L, L), low, np.float32), 1)}


@pytest.mark.parametrize("low", [-1e4, np.finfo(np.float32).min, -np.inf], ids=["ten-thousand", "least", "inf"])
@pytest.mark.parametrize("mask, weights", ONNX_WAYS.values(), ids=ONNX_WAYS)
def test_accuracy_holds(mask, weights, low):
    data = [feeds(seed, low) for seed in range(8)]
    model = attention(mask, weights)
    sim = calibrated(OnnxSim(model, data[0]), data)
    (expected,), found = run(model, data[3]), sim.run(data[3])[0]
    noise = float(np.square(expected - found).sum() / np.square(expected).sum())
    assert noise < 1e-3, f"{-10 * np.log10(noise):.1f} dB"
    scores = [s.encoding for s in sim.quantizers.values() if s.enabled and s.value != "mask"]
    assert all(float(e.min.min()) > -1000 for e in scores)


class InParts(nn.Module):
    """An attention whose softmax takes the keys in two parts, with a running maximum that begins at -1e38 (FlashAttention)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        top, above, below = x[..., :1] * 0 - 1e38, torch.zeros_like(v), torch.zeros_like(x[..., :1])
        for part in (slice(0, 3), slice(3, 6)):
            scores = q @ k[:, part].transpose(1, 2)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, old = torch.exp(scores - new), torch.exp(top - new)
            above, below, top = old * above + weights @ v[:, part], old * below + weights.sum(-1, keepdim=True), new
        return above / below


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_a_running_maximum_that_begins_at_a_large_negative_number_has_no_grid(front_end: str) -> None:
    net, data = (
        InParts().eval(),
        [torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(i)) * 2 for i in range(3)],
    )
    if front_end == "torch":
        sim: Any = calibrated(QuantizationSimModel(net, data[0]), data)
        found = sim.model(data[0]).detach().numpy()
    else:
        file = io.BytesIO()
        torch.onnx.export(net, (data[0],), file, dynamo=False, input_names=["x"])
        sim = OnnxSim(onnx.load_from_string(file.getvalue()), {"x": data[0].numpy()})
        sim.compute_encodings([{"x": x.numpy()} for x in data], progress=False)
        (found,) = sim.run({"x": data[0].numpy()})
    held = [
        s for s in sim.quantizers.values() if s.enabled and s.role in ("input", "output") and s.encoding is not None
    ]
    assert held and all(float(s.encoding.min.min()) > -1e4 for s in held)
    assert sqnr(net(data[0]).detach().numpy(), found) > 25
