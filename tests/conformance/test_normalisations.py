"""A normalisation written out, by hand or by exporters, keeps the precision of the single call; with padding too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from bitwright.core.simulation.float_model import sqnr
from bitwright.onnx import QuantizationSimModel as OnnxSim
from bitwright.torch import QuantizationSimModel
from tests.support.simulations import calibrated

CHANNELS = 16


class Written(nn.Module):
    """A norm as a function of the input, with a weight and a bias that are not trivial."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.weight, self.bias)


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.norm, self.b = nn.Linear(CHANNELS, CHANNELS, bias=False), norm, nn.Linear(CHANNELS, CHANNELS)
        nn.init.uniform_(norm.weight, 0.3, 3)  # type: ignore[arg-type]
        if getattr(norm, "bias", None) is not None:
            nn.init.normal_(norm.bias, 0, 0.2)  # type: ignore[arg-type]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x * mask)))


def _rms(x: Tensor, root: Callable[[Tensor], Tensor]) -> Tensor:
    x32 = x.to(torch.float32)
    return (x32 * root(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _moments(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
    return (x - mean) * (torch.reciprocal(torch.sqrt(variance + 1e-5)) * w) + b


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return w * ((x - mean) / torch.sqrt(variance + 1e-5)) + b


RMS = {
    "rsqrt": lambda x, w, b: w * _rms(x, torch.rsqrt),
    "power": lambda x, w, b: _rms(x, lambda v: v**-0.5) * w,
    "reciprocal": lambda x, w, b: _rms(x, lambda v: torch.reciprocal(torch.sqrt(v))) * w,
    "one over": lambda x, w, b: _rms(x, lambda v: 1 / torch.sqrt(v)) * w,
    "divided": lambda x, w, b: x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,
    "one plus weight": lambda x, w, b: _rms(x, torch.rsqrt) * (1.0 + (w - 1).float()),
    "by norm": lambda x, w, b: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) * CHANNELS**-0.5).clamp(1e-3) * w,
}
LAYER = {"moments": _moments, "var_mean": _layer}


@pytest.fixture(scope="module")
def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    mask = torch.ones(4, 16, 1)
    mask[1, 12:] = 0
    return [(torch.randn(4, 16, CHANNELS), mask) for _ in range(3)]


def decibels(norm: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, QuantizationSimModel]:
    """Signal to noise at the tokens that are no padding."""
    model = Net(norm).eval()
    sim = calibrated(QuantizationSimModel(model, batches[0]), batches)
    keep = batches[0][1][..., 0].bool()
    with torch.no_grad():
        want, got = model(*batches[0])[keep], sim.model(*batches[0])[keep]
    return sqnr(want.numpy(), got.numpy()), sim


@pytest.mark.parametrize("name", RMS)
def test_rms_norms_with_padding_lose_what_the_single_call_loses(name, batches):
    one, _ = decibels(nn.RMSNorm(CHANNELS, eps=1e-6), batches)
    written, sim = decibels(Written(RMS[name]), batches)
    assert one > 30
    assert written > one - 1
    assert {row.status for row in sim.coverage() if row.name.startswith("norm.") and "output" in row.name} <= {
        "float", "shared", "quantized"
    }  # fmt: skip
    assert not [site for site in sim.quantizers if site.startswith("norm.")]


@pytest.mark.parametrize("name", LAYER)
def test_layer_norms_with_padding_lose_what_the_single_call_loses(name, batches):
    one, _ = decibels(nn.LayerNorm(CHANNELS), batches)
    written, sim = decibels(Written(LAYER[name]), batches)
    assert one > 30
    assert written > one - 1
    assert not [site for site in sim.quantizers if site.startswith("norm.")]


def test_the_file_of_a_written_norm_agrees_with_its_simulation(tmp_path, batches):
    _, sim = decibels(Written(RMS["rsqrt"]), batches)
    sim.export(tmp_path, "net", batches[0])
    assert sim.verify(batches[0]).ok


def test_a_norm_of_padded_rows_verifies_where_its_output_has_sixteen_bits(tmp_path, batches):
    """The root of a row of zeros is a thousand times those of others, and codes are a 65,536th of the range."""
    model = Net(Written(RMS["rsqrt"])).eval()
    sim = calibrated(QuantizationSimModel(model, batches[0], preset="w8a16"), batches)
    sim.export(tmp_path, "net", batches[0])
    assert (report := sim.verify(batches[0])).ok, report.to_text()


D = 32
Node = tuple[str, str, str]  # operator, what it reads, what it makes

MEAN: list[Node] = [("ReduceMean", "h", "m"), ("Sub", "h m", "c")]
TORCH: list[Node] = [
    *MEAN, ("Pow", "c two", "c2"), ("ReduceMean", "c2", "v"), ("Add", "v eps", "ve"), ("Sqrt", "ve", "sd"), ("Div", "c sd", "n"),
    ("Mul", "n g", "ng"), ("Add", "ng b", "o"),
]  # fmt: skip
KERAS: list[Node] = [
    *MEAN, ("Mul", "c c", "c2"), ("ReduceMean", "c2", "v"), ("Add", "v eps", "ve"), ("Sqrt", "ve", "sd"),
    ("Reciprocal", "sd", "r"), ("Mul", "r g", "rg"), ("Mul", "h rg", "a"), ("Mul", "m rg", "mm"), ("Sub", "b mm", "s"),
    ("Add", "a s", "o"),
]  # fmt: skip
FLAX: list[Node] = [
    ("ReduceSum", "h ax", "s1"), ("Div", "s1 count", "m"), ("Mul", "h h", "h2"), ("ReduceSum", "h2 ax", "s2"),
    ("Div", "s2 count", "q"), ("Mul", "m m", "mm"), ("Sub", "q mm", "v0"), ("Max", "v0 zero", "v"), ("Add", "v eps", "ve"),
    ("Sqrt", "ve", "sd"), ("Reciprocal", "sd", "r"), ("Mul", "r g", "rg"), ("Sub", "h m", "c"), ("Mul", "c rg", "ng"),
    ("Add", "ng b", "o"),
]  # fmt: skip
SHAPED: list[Node] = [  # the number of elements read off the shape, as with lengths that are not fixed
    ("Shape", "h", "shape"), ("Gather", "shape ax", "length"), ("Cast", "length", "count_2"), ("ReduceSum", "h ax", "s1"),
    ("Div", "s1 count_2", "m"), ("Sub", "h m", "c"), ("Mul", "c c", "c2"), ("ReduceSum", "c2 ax", "s2"),
    ("Div", "s2 count_2", "v"), ("Add", "v eps", "ve"), ("Sqrt", "ve", "sd"), ("Div", "c sd", "n"), ("Mul", "n g", "ng"),
    ("Add", "ng b", "o"),
]  # fmt: skip
RMS_NODES: list[Node] = [
    ("Mul", "h h", "h2"), ("ReduceMean", "h2", "v"), ("Add", "v eps", "ve"), ("Sqrt", "ve", "sd"), ("Reciprocal", "sd", "r"),
    ("Mul", "h r", "n"), ("Add", "g one", "g1"), ("Mul", "n g1", "o"),
]  # fmt: skip
NORM: list[Node] = [
    ("ReduceL2", "h", "l"),
    ("Max", "l eps", "lb"),
    ("Div", "h lb", "n"),
    ("Mul", "n g", "ng"),
    ("Add", "ng b", "o"),
]
FORMS = {"torch": TORCH, "keras": KERAS, "flax": FLAX, "shaped": SHAPED, "rms": RMS_NODES, "norm": NORM}


def network(norm: Sequence[Node]) -> onnx.ModelProto:
    """A product, a normalisation, a product; weight and bias of the normalisation are not trivial."""
    rng = np.random.default_rng(0)
    stored = {
        "two": np.float32(2), "eps": np.float32(1e-6), "zero": np.float32(0), "one": np.float32(1), "count": np.float32(D),
        "ax": np.array([-1]), "g": rng.uniform(0.3, 3, D).astype(np.float32), "b": rng.normal(0, 0.3, D).astype(np.float32),
        "w1": (rng.normal(size=(D, D)) / 6).astype(np.float32), "w2": (rng.normal(size=(D, 8)) / 6).astype(np.float32),
    }  # fmt: skip
    nodes = [helper.make_node("MatMul", ["x", "w1"], ["h"], "first")]
    for op, reads, makes in norm:
        attributes = {
            "ReduceMean": {"axes": [-1]}, "ReduceL2": {"axes": [-1]}, "Cast": {"to": 1}, "LayerNormalization": {"epsilon": 1e-6},
        }.get(op, {})  # fmt: skip
        nodes.append(helper.make_node(op, reads.split(), [makes], f"make_{makes}", **attributes))
    nodes.append(helper.make_node("MatMul", ["o", "w2"], ["y"], "last"))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, ["n", D])],
        [helper.make_tensor_value_info("y", 1, ["n", 8])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def onnx_batches() -> list[dict[str, np.ndarray]]:
    """Rows of which every fourth is padding."""
    rng = np.random.default_rng(1)
    found = [rng.normal(size=(16, D)).astype(np.float32) for _ in range(4)]
    for rows in found:
        rows[::4] = 0
    return [{"x": rows} for rows in found]


def onnx_decibels(norm: Sequence[Node], data: list[dict[str, np.ndarray]]) -> tuple[float, OnnxSim]:
    model = network(norm)
    sim = calibrated(OnnxSim(model), data)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    want = np.asarray(session.run(None, data[0])[0])
    keep = data[0]["x"].any(1)
    return sqnr(want[keep], sim.run(data[0])[0][keep]), sim


@pytest.mark.parametrize("name", FORMS)
def test_written_out_a_normalisation_has_the_precision_of_the_one_operator(name: str) -> None:
    data = onnx_batches()
    one, _ = onnx_decibels([("LayerNormalization", "h g b", "o")], data)
    written, sim = onnx_decibels(FORMS[name], data)
    assert one > 28
    assert written > one - 2
    assert set(sim.quantizers) == {"first.input[0]", "w1", "first.output[0]", "last.input[0]", "w2", "last.output[0]"}


def test_the_file_of_a_written_normalisation_agrees_with_its_simulation(tmp_path: Path) -> None:
    data = onnx_batches()
    _, sim = onnx_decibels(FLAX, data)
    sim.export(tmp_path, "net")
    assert sim.verify(data[0]).ok
