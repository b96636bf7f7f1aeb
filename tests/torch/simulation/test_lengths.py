"""What follows the lengths of the input (positions, states, batches) is an activation: any other length runs as well."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright
from bitwright.torch import QuantizationSimModel

N, D = 31, 16  # the longest distance, features
Bias = Callable[["Attention", Tensor, int], Tensor]


def shifted(s: Tensor) -> Tensor:
    """Scores of distances ``[B, n, 2 n - 1]`` as scores of positions ``[B, n, n]`` (Dai et al. 2019, arXiv:1901.02860)."""
    b, n, _ = s.shape
    return F.pad(s, (1, 0)).view(b, 2 * n, n)[:, 1:].reshape(b, n, 2 * n - 1)[..., :n]


def projected(m: Attention, q: Tensor, n: int) -> Tensor:
    return shifted(q @ m.p(m.table[None, N + 1 - n : N + n]).transpose(1, 2))


def learned(m: Attention, q: Tensor, n: int) -> Tensor:
    return shifted(q @ m.table[N + 1 - n : N + n].T)


def narrowed(m: Attention, q: Tensor, n: int) -> Tensor:
    return shifted(torch.einsum("bnd,md->bnm", q, m.table.narrow(0, N + 1 - n, 2 * n - 1)))


def sines(m: Attention, q: Tensor, n: int) -> Tensor:
    t = torch.arange(1 - n, n)[:, None] * m.frequencies
    return shifted(q @ m.p(torch.cat([t.sin(), t.cos()], -1)).T)


def stretched(m: Attention, q: Tensor, n: int) -> Tensor:
    rows = F.interpolate(m.table.T[None], size=2 * n - 1, mode="linear")[0]
    return shifted(q @ rows)


def of_the_batch(m: Attention, q: Tensor, n: int) -> Tensor:
    state = m.table[None, :n].expand(q.shape[0], -1, -1)
    return q @ state.transpose(1, 2)


def from_nothing(m: Attention, q: Tensor, n: int) -> Tensor:
    return q @ torch.ones(q.shape[0], D, n)


def added(m: Attention, q: Tensor, n: int) -> Tensor:
    return m.table[:n, :1] + torch.zeros(n, n)


WAYS: dict[str, Bias] = {
    f.__name__: f for f in (projected, learned, narrowed, sines, stretched, of_the_batch, from_nothing, added)
}


class Attention(nn.Module):
    frequencies: Tensor

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.q, self.k, self.v, self.p = (nn.Linear(D, D) for _ in range(4))
        self.table, self.bias = nn.Parameter(torch.randn(2 * N + 1, D)), bias
        self.register_buffer("frequencies", 10 ** -torch.linspace(0, 2, D // 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = (q @ k.transpose(1, 2) + self.bias(self, q, x.shape[1])) / math.sqrt(D)
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("bias", WAYS.values(), ids=WAYS)
def test_other_lengths_and_batches_run_and_keep_their_accuracy(bias: Bias) -> None:
    torch.manual_seed(0)
    model = Attention(bias).eval()
    batches = [torch.randn(b, n, D) for b, n in ((2, 13), (2, 9), (1, 17), (3, 13))]
    for example in batches[:3]:
        sim = QuantizationSimModel(model, example)
        sim.compute_encodings(batches, progress=False)
        with torch.no_grad():
            for x in (*batches, 0.5 * torch.randn(1, 11, D)):
                y = model(x)
                assert float((y - sim.model(x)).pow(2).sum() / y.pow(2).sum()) < 10**-2.5


def test_the_default_recipe_takes_batches_of_several_lengths() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(1, n, D) for n in (13, 9, 17, 11)]
    result = bitwright.quantize(Attention(projected).eval(), batches, progress=False)
    assert result.model(batches[1]).shape == batches[1].shape


class Cut(nn.Module):
    """Weights that are parts of one parameter: no length of the input is among their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 48))

    def forward(self, x: Tensor) -> Tensor:
        gates = x @ self.weight[:, :24] + torch.tanh(x) @ self.weight[:, 24:]
        return F.linear(gates, self.weight[:5, :24])


def test_a_part_of_a_parameter_that_is_a_weight_stays_one() -> None:
    sim = QuantizationSimModel(Cut().eval(), torch.randn(3, 7, 24))
    assert [s.role for s in sim.quantizers.values() if s.role == "weight"] == ["weight"] * 3
