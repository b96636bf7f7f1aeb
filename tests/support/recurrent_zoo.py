"""Recurrent models as people write them: attention over time, teacher forcing, beams, convolutional cells, halting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Recurrent:
    """A model and its inputs.

    Attributes:
        build: makes it.
        example: length of the sequences -> inputs as positional arguments, seeded by the second argument.
        sqnr: decibels that W8A8 keeps at least on the first output.
    """

    build: Callable[[], nn.Module]
    example: Callable[[int, int], tuple[Any, ...]]
    sqnr: float = 20.0


def _floats(*shape: int | None) -> Callable[[int, int], tuple[Any, ...]]:
    """Random inputs of ``shape``, with the length in the place of ``None``."""

    def make(length: int, seed: int) -> tuple[Any, ...]:
        size = [length if n is None else n for n in shape]
        return (torch.randn(size, generator=torch.Generator().manual_seed(seed)),)

    return make


class HandWrittenLstm(nn.Module):
    """An LSTM from two linear layers and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(6, 32), nn.Linear(8, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            i, f, g, o = (self.ih(step) + self.hh(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


class Attention(nn.Module):
    """Additive attention (Bahdanau et al. 2014, arXiv:1409.0473)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.score = (nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1))

    def forward(self, state: Tensor, memory: Tensor) -> Tensor:
        energy = self.score(torch.tanh(self.query(state).unsqueeze(1) + self.key(memory)))
        return (torch.softmax(energy, 1) * memory).sum(1)


class Translator(nn.Module):
    """Encoder and attending decoder; fed with the target where there is one, with its own choice otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True)
        self.attention, self.decoder, self.out = Attention(8), nn.GRUCell(16, 8), nn.Linear(8, 12)

    def forward(self, source: Tensor, target: Tensor | None = None, steps: int = 4) -> Tensor:
        memory, last = self.encoder(self.embedding(source))
        state, token, logits = last[0], source.new_zeros(source.shape[0]), []
        for t in range(steps if target is None else target.shape[1]):
            context = self.attention(state, memory)
            state = self.decoder(torch.cat([self.embedding(token), context], -1), state)
            logits.append(self.out(state))
            token = logits[-1].argmax(-1) if target is None else target[:, t]
        return torch.stack(logits, 1)


class Beams(nn.Module):
    """A beam search over an LSTM cell: the states follow the hypotheses that survive."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width, self.embedding, self.cell, self.out = (
            width,
            nn.Embedding(10, 8),
            nn.LSTMCell(8, 8),
            nn.Linear(8, 10),
        )

    def forward(self, start: Tensor, length: Tensor) -> Tensor:
        tokens = start.repeat(self.width)
        h = c = torch.zeros(self.width, 8)
        scores = torch.zeros(1)
        for _ in range(int(length)):
            h, c = self.cell(self.embedding(tokens), (h, c))
            total = scores.unsqueeze(1) + F.log_softmax(self.out(h), -1)[: len(scores)]
            scores, best = total.flatten().topk(self.width)
            parent, tokens = best // 10, best % 10
            h, c = h[parent], c[parent]
        return scores


class ConvLstm(nn.Module):
    """Convolutional LSTM (Shi et al. 2015, arXiv:1506.04214) without peepholes."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(3 + 4, 16, 3, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        h = c = frames.new_zeros(frames.shape[0], 4, *frames.shape[-2:])
        for frame in frames.unbind(1):
            i, f, g, o = self.gates(torch.cat([frame, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class QuasiRnn(nn.Module):
    """Gates by convolution over time, a pooled state by a loop (Bradbury et al. 2016, arXiv:1611.01576)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 24, 2)

    def forward(self, x: Tensor) -> Tensor:
        z, f, o = self.conv(F.pad(x.transpose(1, 2), (1, 0))).chunk(3, 1)
        z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
        c, out = torch.zeros_like(z[..., 0]), []
        for t in range(x.shape[1]):
            c = f[..., t] * c + (1 - f[..., t]) * z[..., t]
            out.append(o[..., t] * c)
        return torch.stack(out, 1)


class Halting(nn.Module):
    """Thinks until it is sure, at most eight times (Graves 2016, arXiv:1603.08983)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.halt, self.out = nn.RNNCell(6, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, sure, n = x.new_zeros(x.shape[0], 8), 0.0, 0
        while sure < 2.0 and n < 8:
            h = self.cell(x, h)
            sure += float(torch.sigmoid(self.halt(h)).mean())
            n += 1
        return self.out(h)


class Residual(nn.Module):
    """Layers of their own with shortcuts and normalisation between them, the first one in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 4, batch_first=True, bidirectional=True)
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))[0]
        return x


class Siamese(nn.Module):
    """One layer for two sequences, with a learned state to start from."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.rnn = nn.Parameter(torch.randn(1, 1, 8) * 0.3), nn.GRU(6, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = self.start.expand(1, len(x), 8).contiguous()
        one, other = (self.rnn(part, state)[1][0] for part in (x, x.flip(1)))
        return one * other


class Stateful(nn.Module):
    """Keeps its state from call to call until it is told to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.state = nn.LSTM(6, 8, batch_first=True), None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.rnn(x, self.state)
        self.state = tuple(s.detach() for s in state)
        return out


class Speech(nn.Module):
    """Convolution over time, a packed recurrence in both directions, logits per frame."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = (nn.Conv1d(6, 8, 3, padding=1), nn.GRU(8, 6, 2, bidirectional=True, batch_first=True))
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        packed = nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return F.log_softmax(self.out(y), -1)


def _source(length: int, seed: int) -> tuple[Any, ...]:
    return (torch.randint(12, (2, length), generator=torch.Generator().manual_seed(seed)),)


def _source_and_target(length: int, seed: int) -> tuple[Any, ...]:
    return (*_source(length, seed), *_source(length + 1, seed + 100))


def _frames(length: int, seed: int) -> tuple[Any, ...]:
    return (*_floats(3, None, 6)(length, seed), torch.tensor([1, length, max(1, length - 1)]))


RECURRENT_ZOO: dict[str, Recurrent] = {
    "hand-written": Recurrent(HandWrittenLstm, _floats(2, None, 6)),
    "attention": Recurrent(Translator, _source),
    "teacher-forcing": Recurrent(Translator, _source_and_target),
    "beams": Recurrent(Beams, lambda length, seed: (torch.tensor([seed % 10]), torch.tensor(length))),
    "conv-lstm": Recurrent(ConvLstm, _floats(2, None, 3, 6, 6)),
    "quasi-rnn": Recurrent(QuasiRnn, _floats(2, None, 6), sqnr=16.0),
    "halting": Recurrent(Halting, lambda length, seed: _floats(4, 6)(length, seed)),
    "residual": Recurrent(Residual, _floats(2, None, 6)),
    "siamese": Recurrent(Siamese, _floats(2, None, 6)),
    "stateful": Recurrent(Stateful, _floats(2, None, 6)),
    "speech": Recurrent(Speech, _frames),
}
