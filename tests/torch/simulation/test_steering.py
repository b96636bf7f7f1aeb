"""What stays in float or the caller's: values that decide what is computed, lengths, tensors read later, computed biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright
from bitwright.core.health.diagnosis import Repair
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from bitwright.torch.simulation.simulate import repaired
from tests.support.simulations import calibrated


class Adaptive(nn.Module):
    """A neural ODE by Heun's method, which halves and doubles its step by an estimate of the error."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 3)
        self.steps: list[float] = []

    def forward(self, y: Tensor) -> Tensor:
        t, step, self.steps = torch.tensor(0.0), y.abs().mean() * 0.9, []
        while t < 1.0:
            step = torch.minimum(step, 1.0 - t)
            first = self.f(y)
            second = self.f(y + step * first)
            error = ((second - first) * step / 2).pow(2).mean().sqrt() / (1e-5 + 1e-3 * y.abs().max())
            if error <= 1.0:
                self.steps.append(float(step))
                y, t = y + step / 2 * (first + second), t + step
            step = step * (0.9 / (error + 1e-9).sqrt()).clamp(0.2, 5.0)
            assert t + step > t, "underflow"
        return self.head(y)


def test_a_solver_that_chooses_its_steps_takes_those_of_the_float_model() -> None:
    torch.manual_seed(0)
    model, batches = Adaptive().eval(), [torch.randn(2, 8) for _ in range(3)]
    with torch.no_grad():
        for p in model.f.parameters():
            p.mul_(2)
    sim = calibrated(QuantizationSimModel(model, batches[0]), batches)
    rows = {row.name: row for row in sim.coverage()}
    for row in rows.values():
        # a place of several calls may hand a state to a layer, which quantizes it there
        at_layer = row.how.partition(" at ")[2].startswith(("f.", "head."))
        assert row.status != "quantized" or at_layer or max(row.shape, default=1) > 1, f"{row.name} is a single number"
    assert any(row.how.startswith("float: the model's code decides by it") for row in rows.values())
    for name in ("f.0.weight", "f.0.output[0]", "f.1.output[0]", "f.2.output[0]", "head.output[0]"):
        assert sim.quantizers[name].enabled, name
    for x in batches:
        with torch.no_grad():
            y = model(x)
            noise = (y - sim.model(x)).pow(2).sum() / y.pow(2).sum()
        assert float(noise) < 1e-3
        assert abs(len(sim.model.steps) - len(model.steps)) <= 2


class Checked(nn.Module):
    """Residual layers with a look at every stream, a threshold from it, and an exit where the answer is sure."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.layers, self.head, self.asks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
            if self.asks and (not bool(x.isfinite().all()) or x.abs().max().item() > 1e4):
                raise ValueError("it diverges")
            if self.asks and self.head(x).softmax(-1).max() > 0.999:
                break
        return self.head(x)


def test_a_question_about_a_stream_does_not_take_it_to_float() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    sims = [QuantizationSimModel(Checked(asks).eval(), x) for asks in (True, False)]
    asked, plain = ({n for n, s in sim.quantizers.items() if s.enabled} for sim in sims)
    streams = {name for name in plain if name.startswith(("add", "layers"))}
    assert streams and streams <= asked


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
        sim = calibrated(QuantizationSimModel(model, example), batches)
        with torch.no_grad():
            for x in (*batches, 0.5 * torch.randn(1, 11, D)):
                y = model(x)
                assert float((y - sim.model(x)).pow(2).sum() / y.pow(2).sum()) < 10**-2.5


def test_the_default_recipe_takes_batches_of_several_lengths() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(1, n, D) for n in (13, 9, 17, 11)]
    result = bitwright.quantize(Attention(projected).eval(), batches, progress=False)
    assert result.model(batches[1]).shape == batches[1].shape


class Regulated(nn.Module):
    """Every token repeated as often as the model predicts, then positions of the length that comes of it (FastSpeech 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.layer = nn.Linear(D, 1), Attention(projected)

    def forward(self, x: Tensor) -> Tensor:
        times = self.length(x).squeeze(-1).abs().round().long() + 1
        rows = torch.zeros(x.shape[0], int(times.sum(1).max()), D)
        for row, tokens, n in zip(rows, x, times, strict=True):
            row[: n.sum()] = tokens.repeat_interleave(n, 0)
        return self.layer(rows)


class Selected(nn.Module):
    """Positions of as many rows as a condition selects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention(projected)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, (x[0].abs() < 1.5).all(1)])


@pytest.mark.parametrize("make", [Regulated, Selected])
def test_positions_are_activations_where_values_decide_on_the_length(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, batches = make().eval(), [0.7 * torch.randn(1, 12, D) for _ in range(4)]
    sim = calibrated(QuantizationSimModel(model, batches[0]), batches)
    with torch.no_grad():
        lengths = set()
        for x in batches:
            y, z = model(x), sim.model(x)
            lengths.add(y.shape[1])
            assert y.shape != z.shape or float((y - z).pow(2).sum() / y.pow(2).sum()) < 10**-2
        assert len(lengths) > 1


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


#: calls that return their operand, or a view of it, where they have nothing to do
HANDS_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to-type": lambda x: x.to(torch.float32),
    "to-device": lambda x: x.to("cpu"),
    "to-other": lambda x: x.to(x),
    "type": lambda x: x.type(torch.float32),  # type: ignore[return-value]
    "type_as": lambda x: x.type_as(x),
    "cpu": lambda x: x.cpu(),
    "contiguous": lambda x: x.contiguous(),
    "alias": torch.ops.aten.alias.default,
    "reshape": lambda x: x.reshape(x.shape),
    "view": lambda x: x.view(x.shape),
    "view_as": lambda x: x.view_as(x),
    "flatten": lambda x: x.flatten(3),
    "unflatten": lambda x: x.unflatten(3, (6,)),
    "ravel": lambda x: x.view(-1).ravel().view(x.shape),
    "squeeze": lambda x: x.squeeze(),
    "squeeze-axis": lambda x: x.squeeze(1),
    "expand": lambda x: x.expand(x.shape),
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_to": lambda x: x.broadcast_to(x.shape),
    "permute": lambda x: x.permute(0, 1, 2, 3),
    "transpose": lambda x: x.transpose(1, 1),
    "movedim": lambda x: x.movedim(1, 1),
    "slice": lambda x: x[:],
    "ellipsis": lambda x: x[...],
    "narrow": lambda x: x.narrow(0, 0, x.shape[0]),
    "split": lambda x: x.split(x.shape[0])[0],
    "chunk": lambda x: x.chunk(1)[0],
    "cat-of-one": lambda x: torch.cat([x]),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout-of-nothing": lambda x: F.dropout(x, 0.0),
    "dropout2d": lambda x: F.dropout2d(x, 0.5, training=False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "identity": nn.Identity(),
    "pad-by-nothing": lambda x: F.pad(x, (0, 0)),
    "adaptive-pool": lambda x: F.adaptive_avg_pool2d(x, (6, 6)),
    "pool-of-one": lambda x: F.max_pool2d(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=1.0),
    "repeat": lambda x: x.repeat(1, 1, 1, 1),
    "flip": lambda x: x.flip(()),
    "roll": lambda x: x.roll(0, 0),
    "tril": lambda x: x.tril(9),
    "sum-of-one": lambda x: x[None].sum(0),
    "mean-of-one": lambda x: x[None].mean(0),
    "times-one": lambda x: x * 1.0,
    "plus-nothing": lambda x: x + 0,
    "relu": lambda x: x.relu(),
    "clamp": lambda x: x.clamp(-9, 9),
}


class Up(nn.Module):
    def __init__(self, hand_on: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.b, self.hand_on = nn.Conv2d(4, 2, 1), hand_on

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.interpolate(self.hand_on(x), scale_factor=2.0))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Skips a layer in its first frame, so that what follows gets values of two grids."""

    def __init__(self, hand_on: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.time, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), Up(hand_on)

    def forward(self, x: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        if not first:
            h = self.time(h)
        h = h.view(h.shape)
        return self.up(h), h


class Frames(nn.Module):
    def __init__(self, hand_on: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.decoder = Decoder(hand_on)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        frames = [self.decoder(frame, i == 0) for i, frame in enumerate((x, x.flip(0)))]
        return frames[0][0] + frames[1][0], frames[0][1]


@pytest.mark.parametrize("hand_on", HANDS_ON.values(), ids=HANDS_ON)
def test_what_an_operator_hands_on_stays_as_it_was_for_other_readers(hand_on: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 3, 6, 6), Frames(hand_on).eval()
    with torch.no_grad():
        model.decoder.time.weight.mul_(6)  # so that the grids differ
    sim = calibrated(QuantizationSimModel(model, x), [x])
    with torch.no_grad():
        found = sim.model(x)[1]
    encoding = sim.quantizers["decoder.a.output[0]"].encoding
    assert encoding is not None
    codes = found.double() / float(encoding.scale)
    assert float((codes - codes.round()).abs().max()) < 1e-3
    outputs = sim.model(x)
    assert torch.equal(outputs[1].detach(), found)
    sum(y.pow(2).mean() for y in outputs).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in sim.model.parameters())


@pytest.mark.parametrize("call", [torch.Tensor.float, torch.Tensor.contiguous, torch.Tensor.resolve_conj])
def test_a_repair_is_of_the_result_and_not_of_what_the_call_was_given(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.0, float("nan"), 3.0])
    made = repaired(call, Repair("cast", "clamp", -2.0, 2.0))(x)
    assert made.tolist() == [1.0, 0.0, 2.0] and x[2] == 3.0 and x[1].isnan()
    assert repaired(torch.Tensor.relu_, Repair("cast", "clamp", -2.0, 2.0))(x) is x
    assert x.tolist() == [1.0, 0.0, 2.0]


class PackedAttention(nn.Module):
    """``self``: one source; ``cross``: key and value have another; ``three``: each has its own."""

    def __init__(self, sources: str) -> None:
        super().__init__()
        self.sources = sources
        self.query, self.other = nn.Linear(8, 16), nn.Linear(8, 16)
        self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 4)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        k = q if self.sources == "self" else self.other(x.flip(1))
        v = F.relu(k) if self.sources == "three" else k
        return self.head(self.attention(q, k, v, need_weights=False)[0])


class Scaled(nn.Module):
    """The bias is a product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16))
        self.gain, self.head = nn.Parameter(torch.tensor([1.5])), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.linear(x, self.weight, self.bias * self.gain)))


class ByHand(nn.Module):
    """Products and additions without ``linear``; one of the biases is a row, one is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(n, 16) * 0.3) for n in (8, 16, 16))
        self.bias, self.row = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(1, 16))
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(x @ self.first + self.bias)
        y = F.relu(torch.matmul(y, self.second) + self.row)
        return y @ self.third + self.bias * self.gain


def integer_biases(path: Path) -> int:
    """How many biases of a file are int32; no operator reads one that is computed in float."""
    graph = onnx.load(str(path)).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    read = [node.input[-1] for node in graph.node if node.op_type in ("Add", "Gemm")]
    assert {made.get(name) for name in read} == {"DequantizeLinear"}, read
    return sum(i.data_type == onnx.TensorProto.INT32 for i in graph.initializer)


MODELS = {
    **{sources: (lambda sources=sources: PackedAttention(sources)) for sources in ("self", "cross", "three")},
    "scaled": Scaled,
    "by-hand": ByHand,
}
X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))


def simulated(name: str) -> QuantizationSimModel:
    torch.manual_seed(0)
    sim = QuantizationSimModel(MODELS[name]().eval(), X, preset="w4a8")
    return sim


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("name", MODELS)
def test_they_are_integers_in_simulation_and_file_and_trained_ones_verify(name, learned, tmp_path):
    sim = calibrated(simulated(name), [X])
    if learned:
        sim.learn_ranges()
    biases = [site for site in sim.quantizers.values() if site.role == "bias"]
    assert biases and all(site.encoding is not None for site in biases)
    ranges = sim.range_parameters() if learned else []
    optimizer = torch.optim.Adam([*sim.model.parameters(), *ranges], lr=3e-3)
    sim.model.train()
    for _ in range(8):
        optimizer.zero_grad()
        (sim.model(X) - 1.0).square().mean().backward()
        optimizer.step()
    sim.model.eval()
    report = sim.verify(X)
    assert report.ok, report
    sim.export(str(tmp_path), "model", X)
    assert integer_biases(tmp_path / "model.onnx") == len(biases)


def test_loaded_encodings_serve_before_any_run(tmp_path: Path) -> None:
    sim = calibrated(simulated("cross"), [X])
    sim.save_checkpoint(tmp_path)
    again = simulated("cross")
    again.load_checkpoint(tmp_path)
    torch.testing.assert_close(again.model(X), sim.model(X), rtol=0, atol=0)
    assert again.verify(X).ok


def test_calibration_sees_the_bias_of_its_own_run() -> None:
    """A bias far from the recorded one asks for a larger scale of the weight, so that int32 can hold it."""
    sim = simulated("scaled")
    with torch.no_grad():
        sim.model.weight[0] = 0.0  # a channel without weights has the smallest of scales
        sim.model.bias[0] = 1e6
    sim.compute_encodings([X], progress=False)
    (bias,) = (site for site in sim.quantizers.values() if site.role == "bias" and site.name != "head.bias")
    assert bias.encoding is not None and bias.encoding.scale[0] * 2.0**31 > 1.5e6


def test_the_file_of_an_onnx_model_has_them_as_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = str(tmp_path / "float.onnx")  # with its weights in a file beside it
    torch.onnx.export(PackedAttention("cross").eval(), (X,), path, dynamo=True, verbose=False, external_data=True)
    sim = calibrated(OnnxSim(path, default_activation_bw=8, default_param_bw=4), [{"x": X.numpy()}])
    sim.export(str(tmp_path / "out"), "model")
    assert (
        integer_biases(tmp_path / "out" / "model.onnx") == 5
    )  # key and value are one product, and the last bias of attention is zero
