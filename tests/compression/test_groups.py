"""Which channels belong together, on both front ends: what is zero can be removed and nothing changes."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright
from bitwright.compression.checks import checked_dependencies, masked_outputs
from bitwright.compression.groups import Dependencies, components
from bitwright.compression.prune import apply
from bitwright.errors import ConfigError
from bitwright.methods.front_end import Structured, front_end_of

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
T = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))


class Residual(nn.Module):
    """A sum, a concatenation, a squeeze-excite gate and a shuffle of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.down, self.up = nn.Linear(16, 4), nn.Linear(4, 16)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = torch.cat([x + self.norm(self.a(x)), self.b(x)], 1)
        gate = self.up(self.down(x.mean((2, 3))).relu()).sigmoid()
        x = x * gate[:, :, None, None]
        return self.out(x)


class Mobile(nn.Module):
    """Depthwise and grouped convolutions, pixel shuffle, group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped, self.norm = nn.Conv2d(8, 16, 1, groups=4), nn.GroupNorm(4, 16)
        self.turned, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.grouped(self.depth(self.stem(x)).relu()))
        return self.out(F.pixel_shuffle(self.turned(x), 2))


class Attention(nn.Module):
    """Queries in four heads, keys and values in two; the packed matrix is split by sizes that an attribute holds."""

    def __init__(self, heads: int = 4, kv: int = 2, width: int = 2) -> None:
        super().__init__()
        self.heads, self.kv, self.width = heads, kv, width
        self.sizes = (heads * width, kv * width, kv * width)
        self.qkv, self.proj = nn.Linear(8, (heads + 2 * kv) * width), nn.Linear(heads * width, 8)
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).split(self.sizes, -1)
        q = q.view(b, t, self.heads, self.width).transpose(1, 2)
        k, v = (z.view(b, t, self.kv, self.width).transpose(1, 2).repeat_interleave(2, 1) for z in (k, v))
        y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, -1))
        h = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 6, 2, batch_first=True), nn.GRU(6, 6, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.lstm(x)[0])[0])


class Streaming(nn.Module):
    """Two stacks whose states are returned, as a caller hands them back; the states of each make one group."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 6, 2, batch_first=True), nn.GRU(6, 9, 2, batch_first=True)
        self.out = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y, (h, c) = self.lstm(x)
        y, state = self.gru(y)
        return self.out(y), h, c, state


class Padded(nn.Module):
    """A shortcut that fills channels up, as in ResNets of CIFAR."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.out, self.pad = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 12, 1), nn.Conv2d(12, 3, 1), 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.out(F.pad(x, (0, 0, 0, 0, self.pad, self.pad)) + self.conv(x))


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.out = nn.Conv2d(4, 6, 3), nn.Linear(6 * 36, 10), nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.fc(self.conv(x).flatten(1)).relu())


class Selective(nn.Module):
    """A selective scan as Mamba's: a depthwise convolution, a gate, and a state that a loop over the sequence carries on."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.conv, self.out = nn.Linear(8, 12), nn.Conv1d(6, 6, 3, groups=6, padding=2), nn.Linear(6, 3)
        self.parameters_of, self.step = nn.Linear(6, 2 + 5 + 5, bias=False), nn.Linear(2, 6)
        self.log, self.skip = nn.Parameter(torch.rand(6, 5)), nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.enter(x).transpose(1, 2).chunk(2, 1)
        weight = self.conv.weight.squeeze(1)
        x = F.conv1d(x, weight.unsqueeze(1), self.conv.bias, padding=2, groups=x.shape[1])[..., : x.shape[-1]]
        x = F.silu(x).transpose(1, 2)
        low, b, c = self.parameters_of(x).split([self.step.in_features, self.log.shape[1], self.log.shape[1]], -1)
        step = F.softplus(self.step(low))
        decay = torch.exp(-step[..., None] * self.log.exp())
        update = (step * x)[..., None] * b[:, :, None]
        state = torch.zeros(x.shape[0], x.shape[2], self.log.shape[1])
        kept, rows = torch.zeros_like(state), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + update[:, t]
            rows.append((state @ c[:, t, :, None])[..., 0])
        kept = kept.copy_(state)
        return self.out((torch.stack(rows, 1) + x * self.skip + kept.sum(-1)[:, None]) * F.silu(gate).transpose(1, 2))


class Summed(nn.Module):
    """A scan by cumulative sums over a padded sequence: heads, and a state axis that einsum reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.out, self.heads = nn.Linear(8, 3 * 2 + 3 + 4 + 4), nn.Linear(6, 3), 3
        self.values, self.states = 6, 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v, step, b, c = self.enter(x).split([self.values, self.heads, self.states, self.states], -1)
        v = F.pad(v.reshape(*x.shape[:2], self.heads, -1), (0, 0, 0, 0, 0, 3))
        passed = F.pad(F.softplus(step), (0, 0, 0, 3)).cumsum(1)
        decay = torch.exp(-(passed[:, :, None] - passed[:, None]).abs())
        scores = torch.einsum("bln,bsn->bls", F.pad(c, (0, 0, 0, 3)), F.pad(b, (0, 0, 0, 3)))
        y = torch.einsum("blsh,bshp->blhp", scores[..., None] * decay, v)[:, : x.shape[1]]
        return self.out(y.reshape(*x.shape[:2], -1))


class Transposed(nn.Module):
    """A matrix that the code transposes, and heads of which an empty rest is put beside the rest, as partial rotation does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out, self.heads, self.turned = *map(nn.Linear, (8, 6, 7), (6, 7, 3)), 3, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (x @ self.a.weight.T + self.a.bias).reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
        h = torch.cat([h[..., : self.turned] * 2, h[..., self.turned :]], -1)
        return self.out((h.transpose(1, 2).reshape(*x.shape[:2], -1) @ self.b.weight.T).relu())


#: model, input, units of every group
CASES: dict[str, tuple[type[nn.Module], torch.Tensor, list[int]]] = {
    "residual": (Residual, X, [8, 8, 4]),
    "mobile": (Mobile, X, [4, 4]),
    "attention": (Attention, T, [2, 12]),
    "recurrent": (Recurrent, T, [6, 6]),
    "streaming": (Streaming, T, [6, 9]),
    "padded": (Padded, X, [4, 4]),
    "flat": (Flat, X, [6, 10]),
    "selective": (Selective, T, [6, 2, 5]),
    "summed": (Summed, T, [3, 4]),
    "transposed": (Transposed, T, [3, 7]),
}


def opened(name: str, form: str, tmp_path: Path) -> tuple[Structured, Any, list[int]]:
    kind, x, units = CASES[name]
    torch.manual_seed(0)
    model = kind().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    if form == "torch":
        return front_end_of(model).structured(model, x, None), x, units
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(model, (x,), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
    return front_end_of("m.onnx").structured(str(tmp_path / "m.onnx"), x.numpy(), None), x.numpy(), units


@pytest.mark.parametrize(("name", "form"), [
    pytest.param(name, form, marks=[pytest.mark.slow] * (form == "onnx" and name in ("selective", "summed", "transposed")))
    for name in CASES for form in ("torch", "onnx")
])  # fmt: skip
def test_removing_zeros_changes_nothing(name: str, form: str, tmp_path: Path) -> None:
    """A third of the units of every group, first set to zero, then removed; the shapes are those that were predicted."""
    structure, x, units = opened(name, form, tmp_path)
    found = checked_dependencies(structure, x)
    assert sorted(g.units for g in found.groups) == sorted(units), (found.groups, found.refused)
    removed = {g.name: np.arange(max(1, g.units // 3)) for g in found.groups}
    before = {p: v.size for p, v in ((m.param, structure.param(m.param)) for g in found.groups for m in g.members)}
    masked = masked_outputs(structure, found.groups, removed, x)
    cut = found.cut(removed)
    apply(structure, found, removed, x)
    for value, a, b in zip(found.graph.outputs, masked, structure.outputs(x), strict=True):
        for axis, positions in enumerate(cut.axes(value) if value in found.states else ()):
            a = a if positions is None else a.take(positions, axis)
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert all(structure.param(p).size < size for p, size in before.items())


class Halves(nn.Module):
    """The larger of two halves (maxout) behind a gate of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gated, self.out = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(8, 12, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.stem(x).chunk(2, 1)
        x, gate = self.gated(torch.maximum(a, b)).chunk(2, 1)
        return self.out(x * gate.sigmoid())


def test_halves_whose_bounds_a_file_computes_lose_the_same_positions(tmp_path: Path) -> None:
    """An export with a batch of any length computes the bounds of ``chunk`` from the shape of its input."""
    torch.manual_seed(0)
    file = str(tmp_path / "m.onnx")
    axes = {"x": {0: "n"}}
    torch.onnx.export(Halves().eval(), (X,), file, dynamo=False, input_names=["x"], dynamic_axes=axes)
    structure = front_end_of(file).structured(file, X.numpy(), None)
    assert any(op.type == "Slice" and structure.constant(op, 2) is None for op in structure.graph().ops)
    found = checked_dependencies(structure, X.numpy())
    assert sorted(g.units for g in found.groups) == [6, 8] and [r.name for r in found.refused] == ["/out/Conv"]
    removed = {g.name: np.arange(0, g.units, 3) for g in found.groups}
    masked = masked_outputs(structure, found.groups, removed, X.numpy())
    apply(structure, found, removed, X.numpy())
    for batch in (X, X[:1], torch.cat([X, X])):
        np.testing.assert_allclose(structure.outputs(batch.numpy())[0][0], masked[0][0], atol=1e-5)


def test_key_and_value_heads_go_with_their_query_heads(tmp_path: Path) -> None:
    structure, x, _ = opened("attention", "torch", tmp_path)
    group = checked_dependencies(structure, x).group("qkv")
    assert (group.kind, group.units) == ("heads", 2)
    rows = next(m for m in group.members if m.param == "qkv.weight").positions
    assert rows.tolist() == [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]


def test_inner_positions_of_heads(tmp_path: Path) -> None:
    """Widths of queries and keys go together, those of values with the columns of the projection; groups keep their number."""
    structure, x, _ = opened("attention", "torch", tmp_path)
    found = checked_dependencies(structure, x, inner=True)
    rows = {tuple(m.positions[0].tolist()) for g in found.groups for m in g.members if m.param == "qkv.weight"}
    assert rows == {(0, 2, 4, 6, 8, 10), (12, 14)}
    structure, x, _ = opened("mobile", "torch", tmp_path)
    members = {
        m.param: m.positions.tolist() for m in checked_dependencies(structure, x, inner=True).group("stem").members
    }
    assert members["stem.weight"] == [[0, 2, 4, 6], [1, 3, 5, 7]] and members["grouped.weight"] == [[0], [1]]


def test_reasons(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 2)
            self.norm, self.d = nn.LayerNorm(8), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x).reshape(2, 5, 6) * 1.5
            return self.d(self.c(self.norm(self.b(h))))

    model = Fixed()
    found = checked_dependencies(front_end_of(model).structured(model, T, None), T)
    reasons = {r.name: r.reason for r in found.refused}
    assert not found.groups
    assert "the model fails after the cut" in reasons["a"] and "[2, 5, 6]" in reasons["a"]
    assert reasons["b"].startswith("norm averages over its channels") and "averaged=True" in reasons["b"]
    assert reasons["c"].startswith(
        "d.linear multiplies it by a weight that the model computes (torch.nn.utils.parametrize."
    )
    assert checked_dependencies(front_end_of(model).structured(model, T, None), T, averaged=True).group(
        "b"
    ).averaged == ("norm",)


def test_a_split_by_a_number_in_the_code_is_named() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out = nn.Linear(8, 12), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.a(x).split(6, -1)
            return self.out(a * b.sigmoid())

    (reason, _) = (r.reason for r in checked_dependencies(front_end_of(Gate()).structured(Gate(), T, None), T).refused)
    assert re.search(r"the model fails after the cut: .*; split is given the lengths of its pieces: use chunk", reason)


def test_pieces_whose_length_is_one_attribute_lose_the_same_positions() -> None:
    """As in YOLO: one half of a split goes through a block of its own, and one number holds the length of both."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 8
            self.stem, self.block, self.head = nn.Conv2d(4, 16, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(24, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = list(self.stem(x).split((self.width, self.width), 1))
            return self.head(torch.cat([*parts, parts[-1] + self.block(parts[-1]).relu()], 1))

    torch.manual_seed(0)
    model = Halves().eval()
    structure = front_end_of(model).structured(model, X, None)
    assert [g.units for g in checked_dependencies(structure, X).groups] == [8]
    small = bitwright.compress(model, [X], {"macs": 0.6}, widths=1, progress=False).model
    assert small.stem.out_channels == 2 * small.width == 2 * small.block.in_channels < 16


def test_heads_of_a_module_with_one_width_are_refused_with_the_way_out() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    found = checked_dependencies(front_end_of(model).structured(model, T, None), T)
    assert [g.units for g in found.groups] == [12]
    assert any("an ONNX file of the model can lose heads" in refusal.reason for refusal in found.refused)


def test_a_module_that_runs_on_values_of_two_ranks() -> None:
    """A table of a history and of one item: what reads the second run is cut as what reads the first."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 6)
            self.one, self.other, self.last = nn.Linear(6, 5), nn.Linear(6, 7), nn.Linear(12, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            both = self.one(self.table(ids)).mean(1), self.other(self.table(ids[:, 0])).relu()
            return self.last(torch.cat(both, -1))

    torch.manual_seed(0)
    model, ids = Towers().eval(), torch.randint(9, (4, 3))
    found = checked_dependencies(front_end_of(model).structured(model, ids, None), ids)
    assert sorted(g.units for g in found.groups) == [5, 6, 7]


def test_a_model_whose_path_depends_on_a_width_is_refused() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return self.b(h.tanh() if h.shape[-1] >= 6 else h)

    with pytest.raises(
        ConfigError, match="nothing can be removed: a: tanh.*the model takes another path after the cut"
    ):
        bitwright.compress(Deciding(), [T], {"macs": 0.5})


def test_a_width_that_scales_the_result_is_refused() -> None:
    """Fewer positions of zeros change a product that is divided by the root of their number, however little."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = *(nn.Linear(8, 4) for _ in range(3)), nn.Linear(4, 2)
            nn.init.normal_(self.q.weight, std=0.004)
            nn.init.zeros_(self.q.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = self.q(x), self.k(x)
            return self.out((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ self.v(x))

    torch.manual_seed(0)
    model = Scaled()
    found = checked_dependencies(front_end_of(model).structured(model, T, None), T)
    assert [g.name for g in found.groups] == ["v"]
    assert "differs by" in next(r.reason for r in found.refused if r.name == "q")


def test_returned_states() -> None:
    """A whole state beside another result may become narrower; a picked one, and one that is all there is, is a feature."""

    class Encoder(nn.Module):
        def __init__(self, returned: str) -> None:
            super().__init__()
            self.gru, self.out, self.returned = nn.GRU(8, 6, 2, batch_first=True), nn.Linear(6, 3), returned

        def forward(self, x: torch.Tensor) -> Any:
            y, h = self.gru(x)
            return {"state": (self.out(y), h), "picked": (self.out(y), h[-1]), "alone": h, "all": (y, h)}[self.returned]

    units = {}
    for returned in ("state", "picked", "alone", "all"):
        model = Encoder(returned).eval()
        found = checked_dependencies(front_end_of(model).structured(model, T, None), T)
        units[returned] = [g.units for g in found.groups]
        assert units[returned] or "the model returns it" in {r.reason for r in found.refused}
    assert units == {"state": [6], "picked": [], "alone": [], "all": []}


def test_components_are_the_connected_ones() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        n = int(rng.integers(2, 40))
        pairs = rng.integers(0, n, (int(rng.integers(1, n)), 2))
        label = list(range(n))
        for _ in range(n):
            for a, b in pairs:
                label[a] = label[b] = min(label[a], label[b])
        assert components(n, pairs[:, 0], pairs[:, 1]).tolist() == label


@pytest.mark.parametrize("blocks", [300, pytest.param(10000, marks=pytest.mark.slow)])
def test_long_chains(blocks: int) -> None:
    """Linear in the number of blocks, at Python's default recursion limit."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(self.a(x).relu())

    model = nn.Sequential(*(Block() for _ in range(blocks)))
    structure = front_end_of(model).structured(model, torch.randn(1, 4), None)
    structure.graph()
    start = time.perf_counter()
    found = Dependencies(structure)
    assert len(found.groups) == blocks
    assert time.perf_counter() - start < 5e-3 * blocks
