"""Divisors, logarithms, roots, angles and comparisons under eight bits: close to float in both front ends, and why."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import bitwright.onnx as bo
import bitwright.torch as bt
from bitwright.core.graph.float_values import exact_values
from bitwright.core.numerics.spec import PRESETS
from bitwright.core.placement.place import place
from bitwright.core.placement.rules import BOUNDARY_ONLY, Rule, default_rules
from bitwright.core.simulation.float_model import sqnr
from tests.conformance.test_ptq import exported
from tests.core.graphs import Build
from tests.support.simulations import calibrated


class ConstantQ(nn.Module):
    """Decibels of magnitudes: a root of sums of squares, which is squared again in front of the logarithm.

    The real and the imaginary part, of several octaves that are joined, hold many decades.
    """

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag, self.last = nn.Conv1d(1, 8, 8, 8), nn.Conv1d(1, 8, 8, 8), nn.Linear(8, 4)
        self.gains = nn.Buffer(torch.logspace(0, 2, 8)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        octaves = [torch.stack([-self.real(part), self.imag(part)], -1) for part in x.split(128, -1)]
        magnitude = (torch.cat(octaves, 2) * self.gains).square().sum(-1).sqrt()
        return self.last(torch.log(magnitude.square() + 1e-10).transpose(1, 2))


class LinearAttention(nn.Module):
    """Some queries are so small that their denominators are nothing beside the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = torch.sigmoid(q), torch.sigmoid(k)
        size = torch.tensor([1e-3, 1.0, 1.0, 1.0]).view(1, 4, 1)
        total = (q @ k.sum(1, keepdim=True).transpose(1, 2)) * size
        return self.out((q @ (k.transpose(1, 2) @ v)) / (total + 1e-8))


class PaddedAttention(nn.Module):
    """Linear attention whose denominators are a row of the product: values have a channel of ones. Heads differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.size = nn.Buffer(torch.tensor([1.0, 0.3, 0.1, 0.05])[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = torch.sigmoid(q), torch.sigmoid(k) * self.size
        sums = k.transpose(-1, -2) @ nn.functional.pad(v, (0, 1), value=1.0)
        found = q @ sums
        return self.out((found[..., :-1] / (found[..., -1:] + 1e-15)).transpose(1, 2).flatten(2))


class Nearest(nn.Module):
    """The nearest entry of a codebook, its distances in four spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling, self.encode, self.decode = spelling, nn.Linear(8, 16), nn.Linear(16, 8)
        self.book = nn.Parameter(torch.randn(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        if self.spelling == "product":
            far = z.pow(2).sum(-1, keepdim=True) + self.book.pow(2).sum(-1) - 2 * (z @ self.book.t())
        elif self.spelling == "squares":
            far = (z[:, None] - self.book).square().sum(-1)
        elif self.spelling == "cdist":
            far = torch.cdist(z, self.book)
        else:
            far = torch.linalg.vector_norm(z[:, None] - self.book, dim=-1)
        return self.decode(nn.functional.embedding(far.argmin(-1), self.book))


class FeatureAttention(nn.Module):
    """Linear attention with features elu + 1, its numerators and denominators computed apart, in three spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.qkv, self.out, self.spelling = nn.Linear(16, 48), nn.Linear(16, 16), spelling
        nn.init.normal_(self.qkv.weight, std=0.6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)) for part in self.qkv(x).chunk(3, -1))
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        if self.spelling == "products":
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            total = (q * k.sum(2, keepdim=True)).sum(3, keepdim=True)
            found = ((q @ (k.transpose(2, 3) @ v)) / (total + 1e-6)).transpose(1, 2)
        elif self.spelling == "factor":
            share = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(1)) + 1e-6)
            found = torch.einsum("nlhd,nhdm,nlh->nlhm", q, torch.einsum("nshd,nshm->nhdm", k, v), share)
        else:
            before = torch.einsum("nshd,nshm->nshdm", k, v).cumsum(1)
            share = 1 / (torch.einsum("nlhd,nlhd->nlh", q, k.cumsum(1)) + 1e-6)
            found = torch.einsum("nlhd,nlhdm->nlhm", q, before) * share[..., None]
        return self.out(found.flatten(2))


class Spectrum(nn.Module):
    """A logarithm of powers over many decades."""

    def __init__(self) -> None:
        super().__init__()
        self.re, self.im, self.last = nn.Conv1d(1, 9, 16, 8), nn.Conv1d(1, 9, 16, 8), nn.Conv1d(9, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.re(x), self.im(x)
        power = torch.sqrt(a * a + b * b)
        return self.last(torch.log(power * power + 1e-10))


class Fourier(nn.Module):
    """Positions as angles, as in the prompts of a segmentation model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gauss", 2 * torch.randn(2, 32))
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * ((2 * x - 1) @ self.gauss)
        return self.last(torch.cat([angles.sin(), angles.cos()], -1))


class Labels(nn.Module):
    """What is added depends on a label that is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(3, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        label = torch.cat([x[..., :1], x[..., :1]], -1)[..., 1:]
        h = self.first(x)
        return self.last(torch.where(label == 1.0, h + 3 * self.table, h))


class Interpolated(nn.Module):
    """Rows between those of a table, at positions from 0 to 1; written out, with an index that is rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Parameter(torch.randn(200, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        position = x * 198
        low = position.floor()
        part, low = position - low, low.long()[:, 0]
        return self.last(self.table[low] * (1 - part) + self.table[low + 1] * part)


class Probabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(6 * self.a(x), -1)
        return self.b(torch.log(p)) + torch.rsqrt(torch.sigmoid(8 * self.a(x)))


class Routed(nn.Module):
    """Which row of a table is added depends on scores that are close to each other, and far from one that never wins."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(6, 8)
        with torch.no_grad():
            self.first.bias[0] -= 400
            self.table.weight *= 4

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.table(self.first(x)[:, :6].argmax(-1)))


class Squares(nn.Module):
    """Rows over three decades, each divided by the product with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x[:, :1]) * torch.sigmoid(x)
        return self.last(self.first(torch.sigmoid(x)) / torch.einsum("bi,bi->b", y, y)[:, None].log().exp().sqrt())


class Remainder(nn.Module):
    """An angle within its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.remainder(self.first(x) * 100, 2 * math.pi))


def labelled() -> Tensor:
    x = torch.rand(12, 3)
    x[:, 0] = torch.tensor([-1.0, 0.0, 1.0, -3.0]).repeat(3)
    return x


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], float]] = {
    "divisor": (LinearAttention, lambda: torch.randn(2, 4, 16), 25.0),
    "divisor by a row of a product": (PaddedAttention, lambda: torch.randn(2, 32, 16), 35.0),
    "quotient of products": (partial(FeatureAttention, "products"), lambda: torch.randn(4, 48, 16), 35.0),
    "product with a reciprocal": (partial(FeatureAttention, "factor"), lambda: torch.randn(4, 48, 16), 36.0),
    "quotient of running sums": (partial(FeatureAttention, "running"), lambda: torch.randn(4, 48, 16), 31.0),
    "decibels": (ConstantQ, lambda: torch.randn(2, 1, 256) * torch.logspace(-4, 0, 256), 25.0),
    "logarithm": (Spectrum, lambda: torch.randn(2, 1, 256) * torch.logspace(-4, 0, 256), 25.0),
    "angle": (Fourier, lambda: torch.rand(2, 5, 2), 30.0),
    "label": (Labels, labelled, 30.0),
    "decision": (Routed, lambda: torch.randn(64, 8), 30.0),
    "squares": (Squares, lambda: torch.linspace(-4, 4, 64)[:, None] + torch.randn(64, 8) / 4, 25.0),
    "index": (Interpolated, lambda: torch.rand(256, 1), 30.0),
    "probability": (Probabilities, lambda: torch.randn(8, 8), 25.0),
}


def simulated(front: str, model: nn.Module, x: Tensor, **options: Any) -> tuple[Any, np.ndarray]:
    if front == "torch":
        sim: Any = calibrated(bt.QuantizationSimModel(model, x, **options), [x])
        return sim, sim.model(x).detach().numpy()
    sim = calibrated(bo.QuantizationSimModel(exported(model, x), x.numpy(), **options), [x.numpy()])
    return sim, sim.run(x.numpy())[0]


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("name", NETS)
def test_eight_bits_stay_close_to_float(front: str, name: str) -> None:
    make, data, floor = NETS[name]
    torch.manual_seed(0)
    model, x = make().eval(), data()
    wanted = model(x).detach().numpy()
    sim, found = simulated(front, model, x)
    assert np.isfinite(found).all()
    assert sqnr(wanted, found) > floor
    reasons = [row.how for row in sim.coverage() if row.how.startswith("float: ")]
    assert reasons, str(sim.coverage())


@pytest.mark.parametrize(
    ("spelling", "kept"),
    [
        ("products", {"matmul", "matmul_1", "mul", "sum"}),
        ("factor", {"einsum_1", "sum"}),
        ("running", {"einsum", "einsum_2", "cumsum", "cumsum_1"}),
    ],
)
def test_sums_of_linear_attention_stay_in_float_and_its_queries_keys_and_values_do_not(spelling, kept) -> None:
    graph = bt.QuantizationSimModel(FeatureAttention(spelling).eval(), torch.randn(2, 6, 16)).graph
    static = {value.name for value in graph.values.values() if value.is_static}
    found = {value for value, (need, _) in exact_values(graph, static).items() if need == "quotient"}
    assert found == {f"{name}.output[0]" for name in kept}


def test_a_product_that_is_divided_by_its_own_size_or_by_other_sums_is_no_linear_attention() -> None:
    b = Build()
    q, k, v = (b.op("Relu", b.linear(b.input(name), f"l{name}", 8), name=f"r{name}") for name in "qkv")
    scores = b.op("MatMul", q, b.op("MatMul", k, v, name="sums"), name="product")
    size = b.op("Sqrt", b.op("ReduceSum", b.op("Mul", scores, scores, name="square"), name="energy"), name="size")
    other = b.op("ReduceSum", b.op("Mul", v, k, name="unlike"), name="total")
    graph = b.graph(b.op("Div", scores, size, name="unit"), b.op("Div", scores, other, name="by"))
    assert "quotient" not in {need for need, _ in exact_values(graph, set()).values()}


def test_what_a_general_rule_of_a_configuration_quantizes() -> None:
    b = Build()
    total = b.op("Sigmoid", b.linear(b.input(shape=(1, 8)), "fc", 8), name="total")
    graph = b.graph(b.op("Div", b.op("Relu", total, name="top"), total, name="div"))
    every = Rule(port="output", quantized=True)
    reason = "float: div divides by it, and an integer grid rounds its small values to zero"
    made = place(graph, default_rules().extended([every]))
    assert made.floats["total.output[0]"] == reason
    named = place(graph, default_rules().extended([every, Rule("total", port="output", quantized=True)]))
    assert "total.output[0]" in named.sites
    fp8 = PRESETS["fp8"]
    floats = replace(default_rules(fp8.weight, fp8.activation), float_tail=False)
    assert "total.output[0]" in place(graph, floats).sites


def test_how_far_a_need_reaches_back() -> None:
    b = Build()
    image = b.linear(b.input(shape=(1, 8)), "fc", 8)
    skip = b.op("Add", image, b.op("Relu", image, name="relu"), name="skip")
    mean = b.op("ReduceMean", b.op("Mul", skip, skip, name="squared"), name="mean")
    shifted = b.op("Add", mean, b.const("eps"), name="shifted")
    power = b.op("Pow", skip, None, name="power", exponent=2.0)
    less = b.op("Pow", b.op("Abs", skip, name="abs"), None, name="less", exponent=-0.5)
    graph = b.graph(b.op("Rsqrt", shifted, name="rsqrt"), power, less)
    found = {name: need for name, (need, _) in exact_values(graph, {"eps"}).items() if name in graph.values}
    assert found["shifted.output[0]"] == found["mean.output[0]"] == "divisor"
    assert found["squared.output[0]"] == "sum"  # and what was squared is not asked
    assert found["abs.output[0]"] == found["skip.output[0]"] == "divisor"
    assert "fc.output[0]" not in found and "relu.output[0]" not in found  # a sum of two signed values is one of its own


def test_an_input_of_the_model_may_have_either_sign() -> None:
    b = Build()
    divided = b.op(
        "Div", b.input("x"), b.op("Add", b.op("Relu", b.input("y"), name="relu"), b.input("z"), name="sum"), name="div"
    )
    found = {value for value, (need, _) in exact_values(b.graph(divided), set()).items() if need == "divisor"}
    assert found == {"sum.output[0]"}  # a small sum need not be one of small values


def test_the_matrix_that_makes_angles_of_positions_stays_in_float_and_others_do_not() -> None:
    b = Build()
    first = b.op("Gemm", b.input(shape=(4, 2)), b.param("first", (8, 2)), name="a", shape=(4, 8), transB=1)
    wave = b.op("Sin", b.op("Mul", first, b.const("thirty"), name="m"), name="s1", shape=(4, 8))
    second = b.op("Gemm", wave, b.param("second", (8, 8)), name="b", shape=(4, 8), transB=1)
    made = place(b.graph(b.op("Sin", second, name="s2", shape=(4, 8))), default_rules())
    assert made.floats["first"].startswith("float: s1 takes it for an angle")
    assert made.floats["x"].startswith("float: s1 takes it for an angle")
    assert made.floats["b.output[0]"].startswith("float: s2 takes it for an angle")
    assert "second" in made.sites  # a layer that reads what a layer made keeps its integer product


def test_scores_that_decide_what_is_computed_stay_in_float_and_those_of_the_answer_do_not() -> None:
    b = Build()
    x = b.linear(b.input(shape=(4, 8)), "body", 8)
    router = b.op("Add", b.linear(x, "router", 8), b.const("favour"), name="sum")
    chosen = b.op("ArgMax", b.op("Softmax", router, name="scores"), name="best", dtype="int64")
    token = b.op("Add", x, b.op("Gather", b.const("table", (8, 8)), chosen, name="row"), name="token")
    answer = b.op("ArgMax", b.linear(token, "head", 8), name="answer", dtype="int64")
    made = place(b.graph(answer), default_rules())
    for value in ("router.output[0]", "scores.output[0]"):
        assert made.floats[value].startswith("float: best decides by it what is computed next")
    assert {"body.output[0]", "head.output[0]", "token.output[0]"} <= set(made.sites)


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("spelling", ["product", "squares", "norm", "cdist"])
def test_distances_that_decide_have_no_grid_between_layer_and_decision(front: str, spelling: str) -> None:
    torch.manual_seed(0)
    model, x = Nearest(spelling).eval(), torch.randn(256, 8)
    sim, _ = simulated(front, model, x)
    between = {(256, 64), (256, 64, 16), (256, 1)}  # distances, differences of elements, squared lengths
    assert not [row for row in sim.coverage() if tuple(row.shape) in between and row.status == "quantized"], (
        sim.coverage()
    )
    assert any(row.how.startswith("float: ") for row in sim.coverage())


class Farthest(nn.Module):
    """The points that are farthest from those chosen before, as PointNet++ chooses them, in two spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling, self.layer = spelling, nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, far, near = torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long), x.new_full(x.shape[:2], 1e4)
        chosen = []
        for _ in range(4):
            here = x[rows, far][:, None]
            chosen.append(here)
            apart = (x - here).square().sum(-1)
            near = torch.minimum(near, apart) if self.spelling == "minimum" else torch.where(apart < near, apart, near)
            far = near.argmax(-1)
        return self.layer(torch.cat(chosen, 1))


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize("spelling", ["minimum", "where"])
def test_the_points_that_are_chosen_are_those_of_float(front: str, spelling: str) -> None:
    torch.manual_seed(0)
    model, x = Farthest(spelling).eval(), torch.randn(16, 60, 3)
    _, found = simulated(front, model, x)
    assert sqnr(model(x).detach().numpy(), found) > 35.0  # another point is another row of the output


@pytest.mark.parametrize(
    ("reader", "port"),
    [("RoiAlign", 1), ("roi_align", 1), ("GridSample", 1), ("DeformConv", 2), ("NonMaxSuppression", 0), ("nms", 0)],
)
def test_positions_between_two_stages_stay_in_float_up_to_the_layers_that_make_them(reader: str, port: int) -> None:
    b = Build()
    features = b.conv(b.input(), "features", inputs=3)
    deltas = b.op("Slice", b.conv(features, "deltas"), name="part")
    boxes = b.op(
        "Add", b.op("Mul", deltas, b.const("sizes", (8,)), name="scaled"), b.const("anchors", (8,)), name="moved"
    )
    clipped = b.op("Clip", boxes, name="clipped")
    numbered = b.op("Concat", b.input("number"), clipped, name="numbered")
    data = ("features.output[0]", b.param("w", (8, 8, 3, 3)))[:port]
    read = b.op(reader, *data, numbered, name="read")
    made = place(b.graph(b.linear(read, "head", 8)), default_rules())
    assert made.floats["scaled.output[0]"].startswith("float: read reads positions from it")
    between = (
        "scaled.output[0]",
        "moved.output[0]",
        "clipped.output[0]",
        "numbered.output[0]",
        "sizes",
        "anchors",
        "numbered.input[0]",
    )
    assert not set(between) & set(made.sites)
    assert {"features.output[0]", "deltas.output[0]", "head.input[0]", "head.weight"} <= set(made.sites)


def test_scores_of_several_levels_that_are_joined_decide_together() -> None:
    b = Build()
    x = b.conv(b.input(), "features", inputs=3)
    scores = b.op("Concat", b.conv(x, "near"), b.conv(x, "far"), name="scores")
    best = b.op("TopK", scores, name="best", outputs=2)
    b.values["best.output[1]"] = replace(b.values["best.output[1]"], dtype="int64")
    rows = b.op("Gather", x, "best.output[1]", name="rows")
    made = place(b.graph(b.linear(rows, "head", 8), best), default_rules())
    for value in ("near.output[0]", "far.output[0]"):
        assert made.floats[value].startswith("float: best decides by it what is computed next")
    assert "scores.output[0]" not in made.sites


class Sampling(nn.Module):
    """Boxes of 640 pixels, found by a first stage, of which a second one reads the features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.offset, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 2), nn.Linear(8, 4)
        self.register_buffer("anchors", torch.rand(32, 2) * 640)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        place = (self.anchors + 20 * self.offset(features.mean((2, 3))).unsqueeze(1)).clamp(0, 640)
        read = nn.functional.grid_sample(features, (place / 320 - 1).unsqueeze(1), align_corners=False)
        return self.head(read[:, :, 0].transpose(1, 2))


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_a_second_stage_reads_where_the_first_one_found(front: str) -> None:
    torch.manual_seed(0)
    model, x = Sampling().eval(), torch.rand(4, 3, 128, 128)
    wanted = model(x).detach().numpy()
    if front == "torch":
        sim: Any = calibrated(bt.QuantizationSimModel(model, x), [x])
        found = sim.model(x).detach().numpy()
    else:
        sim = calibrated(bo.QuantizationSimModel(exported(model, x, dynamo=True), x.numpy()), [x.numpy()])
        found = sim.run(x.numpy())[0]
    assert sqnr(wanted, found) > 30  # 8-bit positions: a step of 2.5 pixels


class Vanishing(nn.Module):
    """A layer's own products vanish where all its inputs round to zero, and with them what is divided by them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.total = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.total.weight.data.abs_().add_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.first(x) - 8 * (x[:, :1] < 0).float())
        return 2 * h / self.total(h)


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_nan_of_the_simulation_alone_is_named_once(front: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Vanishing().eval(), torch.randn(16, 4)
    with caplog.at_level("WARNING", "bitwright"):
        sim, found = simulated(front, model, x, config_file={"tail": "quantized"})
        assert torch.isfinite(model(x)).all() and np.isnan(found).any()
        again = sim.model(x).detach().numpy() if front == "torch" else sim.run(x.numpy())[0]
    assert np.array_equal(found, again, equal_nan=True)
    told = [r.message for r in caplog.records if "makes NaN in the simulation and not in float" in r.message]
    assert len(told) == 1
    div = next(op.name for op in sim.graph.ops if op.type == "Div")
    assert told[0].startswith(f"{div} (Div) makes NaN")
    assert "mul" in told[0].lower() and "Remedy: sim.quantizers[" in told[0]
    assert sim.calibrated and sim.quantizers["first.weight"].encoding is not None


class Itself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-1 - self.last(x).abs())


@pytest.mark.parametrize("front", ["torch", "onnx"])
def test_nan_of_the_model_itself_is_not_blamed_on_the_simulation(front: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Itself().eval(), torch.randn(4, 4)
    with caplog.at_level("WARNING", "bitwright"):
        _, found = simulated(front, model, x)
    assert np.isnan(found).any()
    assert not [r for r in caplog.records if "NaN" in r.message]


def test_what_is_taken_modulo_a_turn_stays_in_float() -> None:
    torch.manual_seed(0)
    model, x = Remainder().eval(), torch.randn(64, 8)
    sim, found = simulated("torch", model, x)
    assert "takes it for an angle" in str(sim.coverage())
    with torch.no_grad():
        assert sqnr(model(x).numpy(), found) > 15


class LongMemory(nn.Module):
    """One step of an LSTM, written out: both states in one tensor, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh, self.out = nn.Linear(8, 64), nn.Linear(16, 64), nn.Linear(16, 2)
        with torch.no_grad():
            self.ih.bias[16:32] = 4.0  # it forgets two per cent a step

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state[0], state[1]
        i, f, g, o = (self.ih(x) + self.hh(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return self.out(h), torch.stack([h, c])


class Layer(LongMemory):
    """The same by the layer, of which runtimes quantize weights and what goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 16)
        with torch.no_grad():
            self.rnn.bias_ih_l0[16:32] = 4.0

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, c) = self.rnn(x[None], (state[:1], state[1:]))
        return self.out(y[0]), torch.cat([h, c])


class Gated(nn.Module):
    """One step of a GRU as PyTorch computes it, ``(h - n) z + n``."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.n, self.out = nn.Linear(24, 16), nn.Linear(24, 16), nn.Linear(16, 2)
        with torch.no_grad():
            self.z.bias += 4.0

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([x, state], -1)
        z, n = self.z(both).sigmoid(), self.n(both).tanh()
        h = (state - n) * z + n
        return self.out(h), h


@pytest.mark.parametrize("front", ["torch", "onnx"])
@pytest.mark.parametrize(("make", "shape"), [(LongMemory, (2, 3, 16)), (Layer, (2, 3, 16)), (Gated, (3, 16))])
def test_states_that_are_carried_from_run_to_run_do_not_drift(
    front: str, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, state, batches, wanted = make().eval(), torch.zeros(shape), [], []
    inputs, rules = torch.randn(120, 3, 8) + 0.5, default_rules().extended([BOUNDARY_ONLY])
    with torch.no_grad():
        for x in inputs:
            batches.append((x, state))
            y, state = model(x, state)
            wanted.append(y.numpy())
    if front == "torch":
        sim: Any = calibrated(bt.QuantizationSimModel(model, batches[9], config_file=rules), batches[::4])
        step = sim.model
    else:
        names = ["x", "state"]
        file = io.BytesIO()
        torch.onnx.export(model, batches[9], file, dynamo=False, opset_version=17, input_names=names)
        sim = bo.QuantizationSimModel(onnx.load_from_string(file.getvalue()), config_file=rules)
        sim.compute_encodings([dict(zip(names, map(np.asarray, b), strict=True)) for b in batches[::4]], progress=False)

        def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            y, s = sim.run(dict(zip(names, (x.numpy(), state.numpy()), strict=True)))
            return torch.from_numpy(y), torch.from_numpy(s)

    state, found = torch.zeros(shape), []
    with torch.no_grad():
        for x in inputs:
            y, state = step(x, state)
            found.append(y.numpy())
    assert sqnr(np.concatenate(wanted), np.concatenate(found)) > 27
    assert any("passes on a state from run to run" in row.how for row in sim.coverage()), str(sim.coverage())
