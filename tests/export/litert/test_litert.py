"""LiteRT's runtime: the arithmetic of its reference kernels bit for bit, and the metric of trained networks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright.torch
from bitwright.compare.litert import FUNCTION_ERRORS, RESCALES, arithmetic_error
from bitwright.compare.verify import verify_folder
from bitwright.executors.litert import FLAT_KERNELS
from bitwright.export.litert.flat import FlatModel, Grid
from bitwright.runtimes.adapters import session_of
from tests.support.deployed import in_litert, quantized
from tests.support.tasks import TASKS

pytest.importorskip("ai_edge_litert")
pytestmark = pytest.mark.slow

#: by how much the metric of the file may differ from the simulation's: half of its own standard deviation; 1 % of a perplexity
NOISE = {
    "resnet20_aux": 0.4,
    "mobilenet_v1_025": 1.2,
    "mobilenet_v2_cifar": 0.5,
    "mnist_cntk": 0.15,
    "stories260k": 0.03,
}


@pytest.mark.parametrize(
    ("name", "front_end"),
    [
        ("resnet20_aux", "torch"), ("mobilenet_v1_025", "torch"), ("mobilenet_v2_cifar", "torch"), ("mnist_cntk", "onnx"),
        ("stories260k", "torch"),
    ],
)  # fmt: skip
def test_reference_kernels_differ_by_their_roundings_alone(shared_data, tmp_path, name, front_end):
    task = TASKS[name]()
    simulation, _ = quantized(name, front_end, task, tmp_path, target="litert")
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
    # every code is the one that the kernel is specified to make of the same codes
    assert [row.specified for row in report.rows] == [1.0] * len(report.rows)
    # and would be the simulation's if the kernel rescaled with one rounding
    once = [row.rounded_once for row in report.rows if row.rounded_once is not None]
    assert once and min(once) >= 0.9999, min(once)
    assert abs(task.score(in_litert(tmp_path / "model.tflite")) - task.score(simulation)) <= NOISE[name]


pytest.importorskip("ai_edge_litert")


class Kernels(nn.Module):
    """Every operator whose arithmetic is told, on codes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(16, 8, 3, groups=2)
        self.depthwise = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=8)
        self.dilated, self.last = nn.Conv2d(8, 8, 3, dilation=2, padding=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.depthwise(F.leaky_relu(self.first(x), 0.1)))
        x = F.leaky_relu(self.grouped(x), 0.3)
        y = self.dilated(x) * x
        rows = (y - x + 0.5 * y).flatten(2)
        return self.last(rows.transpose(1, 2)) @ (rows @ rows.transpose(1, 2))[:, :5]


def exported(folder: Path, preset: str) -> None:
    torch.manual_seed(0)
    data = [torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    bitwright.torch.quantize(
        Kernels().eval(), data, preset, recipe=["fold"], path=folder, target="litert", progress=False
    )


@pytest.mark.parametrize("preset", ["w8a8", "w8a16"])
def test_reference_kernels_compute_what_is_specified_bit_for_bit(tmp_path: Path, preset: str) -> None:
    exported(tmp_path, preset)
    report = verify_folder(tmp_path, runtime="litert")
    assert report.ok, str(report)
    assert {row.specified for row in report.rows} == {1.0}, [(r.site, r.ops, r.specified) for r in report.rows]
    seen = {kind for row in report.rows for kind in row.ops}
    assert seen >= RESCALES, RESCALES - seen
    told = [row for row in report.rows if row.reason is not None]
    assert told and all("computed as they are specified, every code is equal" in str(r.reason) for r in told)
    # what differs does so by these roundings: with one of them the codes are those of the simulation
    assert all((r.rounded_once is None) == (r.as_float.equal == 1) for r in report.rows)
    once = [r for r in report.rows if r.rounded_once is not None]
    assert once and all(r.as_float.equal <= (r.rounded_once or 0) for r in once), once
    if preset == "w8a8":  # steps of 16 bits are as fine as the float sums of the simulation
        assert min(r.rounded_once or 0 for r in once) > 0.999, once
    assert all(f"with one rounding {r.rounded_once:.2%} would be" in str(r.reason) for r in once)


def test_a_kernel_that_computes_something_else_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(tmp_path, "w8a8")
    monkeypatch.setitem(FLAT_KERNELS["MUL"], "q31_double", lambda call: call.read(0).values)
    report = verify_folder(tmp_path, runtime="litert")
    assert [row.specified != 1 for row in report.rows] == [row.kernel == "MUL int8" for row in report.rows]


def values_of(kind: str, scale: float, out: Grid, options: object) -> np.ndarray:
    """What the kernels make of every code of 8 bits, reference and default ones, as codes."""
    flat, source = FlatModel(), Grid("int8", (scale,), (0,))
    tensors = [flat.tensor("x", (1, 256), "int8", source), flat.tensor("y", (1, 256), "int8", out)]
    flat.op(kind, tensors[:1], tensors[1:], options)  # type: ignore[arg-type]
    content = flat.finish({"x": tensors[0]}, {"y": tensors[1]}, {})
    codes = np.arange(-128, 128, dtype=np.int8)[None]
    return np.stack([session_of(content, reference=r).run({"x": codes})["y"][0] for r in (True, False)])


FUNCTIONS = {
    "LOGISTIC": (lambda x: 1 / (1 + np.exp(-x)), None),
    "TANH": (np.tanh, None),
    "HARD_SWISH": (lambda x: x * np.clip(x / 6 + 0.5, 0, 1), {"table": "HardSwishOptions"}),
    "GELU": (
        lambda x: torch.nn.functional.gelu(torch.from_numpy(x)).numpy(),
        {"table": "GeluOptions", "approximate": False},
    ),
}
_FIXED = {"LOGISTIC": (2.0**-8, -128), "TANH": (2.0**-7, 0)}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_bounds_of_functions_hold_for_every_code(kind: str) -> None:
    compute, options = FUNCTIONS[kind]
    worst = 0.0
    for scale in np.geomspace(0.004, 0.2, 12):
        exact = compute(np.arange(-128, 128) * np.float64(np.float32(scale)))
        low, high = min(exact.min(), 0.0), exact.max()
        step, zero = _FIXED.get(kind, ((high - low) / 255, round(-128 - low / ((high - low) / 255))))
        step = float(np.float32(step))
        found = values_of(kind, float(scale), Grid("int8", (step,), (zero,)), options)
        wanted = exact / step + zero
        inside = (wanted > -128) & (wanted < 127)
        worst = max(worst, float(np.abs(found - wanted)[:, inside].max()) - 0.5)
    assert worst <= FUNCTION_ERRORS[kind]


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.3])
def test_the_bound_of_leaky_relu_holds_for_every_code(alpha: float) -> None:
    worst = 0.0
    for scale in (0.01, 0.013, 0.05, 0.2):
        out = Grid("int8", (scale * 0.9,), (-20,))
        found = values_of("LEAKY_RELU", scale, out, {"table": "LeakyReluOptions", "alpha": alpha})
        x = np.arange(-128, 128) * np.float64(np.float32(scale))
        wanted = np.where(x >= 0, x, alpha * x) / np.float64(np.float32(scale * 0.9)) - 20
        inside = (wanted > -128) & (wanted < 127)
        worst = max(worst, float(np.abs(found - wanted)[:, inside].max()) - 0.5)
    options = SimpleNamespace(alpha=alpha)
    assert worst <= arithmetic_error("LEAKY_RELU", [np.array([0.05])], np.array([0.045]), options, wide=False)


def test_bounds_follow_from_the_factors() -> None:
    one, half = np.array([0.1]), np.array([0.3])
    assert arithmetic_error("MUL", [one, half], np.array([0.1]), None, wide=False) == pytest.approx(0.27)
    assert arithmetic_error("MUL", [one, half], np.array([0.03]), None, wide=False) == pytest.approx(0.02)
    assert arithmetic_error("CONV_2D", [one, half], np.array([1.0]), None, wide=True) <= 1.02 + 0.02
    assert arithmetic_error("RESHAPE", [one], one, None, wide=False) == pytest.approx(0.02)


def test_the_bound_of_a_transposed_convolution_is_that_of_its_product() -> None:
    """Its first input is a shape, which has no scale."""
    data, weight, output, none = np.array([0.01]), np.array([0.02]), np.array([0.0009]), np.empty(0)
    for wide in (False, True):
        plain = arithmetic_error("CONV_2D", [data, weight], output, None, wide)
        assert plain > 0.02
        assert arithmetic_error("TRANSPOSE_CONV", [none, weight, data], output, None, wide) == plain
