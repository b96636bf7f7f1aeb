"""Where images are transposed between kernels with the channels last and first, as by hand and as in ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import bitwright.torch
from bitwright.core.graph.cost import KernelTimes, Layouts, Moved
from tests.core.graphs import Build


def chain() -> Build:
    """Two convolutions with a pool between them, and a sum of the second one's output with the pool's."""
    b = Build()
    first = b.conv(b.input(shape=(1, 8, 8, 8)), "first")
    pooled = b.op("MaxPool", first, name="pool")
    b.op("Add", pooled, b.conv(pooled, "second"), name="add")
    return b


def moved(in_float: set[str]) -> Moved:
    b = chain()
    return Layouts(b.graph(b.ops[-1].outputs[0])).moved(lambda op: op.name not in in_float)


def test_all_on_codes_is_transposed_where_the_model_begins_and_ends():
    found = moved(set())
    assert len(found.transposed) == 2 and not found.slow_pools


def test_a_float_value_keeps_the_channels_first_in_pools_and_sums():
    """The pooled values, for the convolution; what that makes, for the sum. The pool is one of floats, and fast."""
    found = moved({"first"})
    assert len(found.transposed) == 2 and not found.slow_pools


@pytest.mark.parametrize("reads", ["both", "input"])
def test_a_pool_of_codes_is_slow_while_the_channels_come_first(reads: str) -> None:
    """As where another operator reads what the convolution in float makes, which is rounded in front of both then."""
    b = Build()
    x = b.input(shape=(1, 8, 8, 8))
    made = b.op("Relu", b.conv(x, "first") if reads == "both" else x, name="relu")
    pooled = b.op("MaxPool", made, name="pool")
    b.op("Add", b.conv(pooled, "second"), made if reads == "both" else pooled, name="add")
    found = Layouts(b.graph(b.ops[-1].outputs[0])).moved(lambda op: op.name != "first")
    assert [op.name for op in found.slow_pools] == ["pool"]


def test_nothing_on_codes_is_not_transposed():
    found = moved({"first", "second"})
    assert found.transposed == () and not found.slow_pools


def test_time_is_that_of_numbers_and_of_operators():
    b = chain()
    layouts = Layouts(b.graph(b.ops[-1].outputs[0]))
    times = KernelTimes(*[(0.0, 0.0)] * 3, patch=0.0, conversion=0.0, operator=1000.0, transpose=1.0, pool=10.0)
    found = layouts.moved(lambda op: op.name == "second")
    pool = next(op for op in b.ops if op.name == "pool")
    slow = replace(found, slow_pools=(pool,))
    assert layouts.time(slow, times, rows=3) == 3 * 2 * 1000 + 2 * 512 + 512 * 10


class Residual(nn.Module):
    """Two residual blocks behind a first convolution."""

    def __init__(self, pool: bool) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(4, 8, 3, padding=1), nn.MaxPool2d(2) if pool else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.first(x)))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return x


@pytest.mark.quick_variants("plain-float")
@pytest.mark.parametrize("in_float", [False, True], ids=["codes", "float"])
@pytest.mark.parametrize("pool", [False, True], ids=["plain", "pool"])
def test_onnx_runtime_transposes_so(tmp_path: Path, pool: bool, in_float: bool) -> None:
    torch.manual_seed(0)
    model, data = Residual(pool).eval(), [torch.randn(1, 4, 16, 16)]
    sim = bitwright.torch.QuantizationSimModel(model, data[0])
    off = {"first"} if in_float else set()
    for site in sim.quantizers.values():
        if site.op in off and not site.name.endswith("output[0]"):
            site.quantizer.release("tried in float")
    sim.compute_encodings(data, progress=False)
    sim.export(tmp_path, "net", data[0])
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(tmp_path / "run.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "run.onnx").graph.node
    ran, codes = (
        Counter(node.op_type for node in nodes),
        {n.output[0] for n in nodes if n.op_type == "QuantizeLinear"},
    )
    expected = Layouts(sim.graph).moved(lambda op: op.name not in off)
    assert ran["Transpose"] == len(expected.transposed), ran
    pools = [node for node in nodes if node.op_type == "MaxPool" and node.input[0] in codes]
    assert len(pools) == len(expected.slow_pools), ran
