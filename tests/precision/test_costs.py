"""What a model needs of a memory that holds weights and activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import bitwright.onnx
from bitwright import ConfigError
from bitwright.cli.app import app
from bitwright.core.graph.cost import parse_bytes
from bitwright.precision.costs import memory_plan


def residual(path: Path) -> Path:
    """x -> Conv -> Relu -> Conv, plus x: the input lives until the sum."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=(4, 4, 1, 1)).astype(np.float32) for n in ("w0", "w1")}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "w1"], ["c"], "second"),
        helper.make_node("Add", ["c", "x"], ["y"], "sum"),
    ]
    shape = [1, 4, 8, 8]  # 256 numbers
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", "y")]
    graph = helper.make_graph(
        nodes, "net", ends[:1], ends[1:], [numpy_helper.from_array(w, n) for n, w in weights.items()]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("preset, weights, per_number", [("w8a8", 32, 1), ("w4a8", 16, 1), ("w8a16", 32, 2)])
def test_the_peak_counts_what_lives_at_the_bits_of_the_preset(
    tmp_path: Path, preset: str, weights: int, per_number: int
) -> None:
    """A chain that is one kernel makes one tensor: what its operators hand to one another is never stored."""
    plan = memory_plan(bitwright.onnx.QuantizationSimModel(residual(tmp_path / "m.onnx"), preset=preset))
    kept = {row.op: row.bytes / (256 * per_number) for row in plan.rows}
    assert plan.weights == weights
    # the output of the model is float
    assert kept == {"first": 1, "relu": 2, "second": 3, "sum": 2 + 4 / per_number}
    assert plan.peak is not None and plan.peak.op == "sum"
    assert plan.total == weights + (2 * per_number + 4) * 256


def test_the_command_says_whether_it_fits_and_what_sets_the_peak(tmp_path: Path) -> None:
    model = str(residual(tmp_path / "m.onnx"))
    fits = CliRunner().invoke(app, ["inspect", model, "--memory", "1568"])
    assert fits.exit_code == 0 and "fits, 0 bytes are left: 32 bytes of weights, peak at sum (Add)" in fits.output
    over = CliRunner().invoke(app, ["inspect", model, "--memory", "0.5KiB"])
    assert over.exit_code == 1 and "does NOT fit, 1,056 bytes are missing" in over.output


def test_memory_as_a_budget(tmp_path: Path) -> None:
    """What is met is what the plan adds up; the least that is possible is the plan of the candidate with the fewest bits."""
    model, data = residual(tmp_path / "m.onnx"), [np.ones((1, 4, 8, 8), np.float32)]

    def search(budget: Any) -> Any:
        presets = ["w4a8", "w8a8", "w8a16"]
        return bitwright.mixed_precision(model, data * 5, presets, budget=budget, rounding=False, evaluations=2)

    plans = [memory_plan(bitwright.onnx.QuantizationSimModel(model, preset=p)).total for p in ("w4a8", "w8a16")]
    found = search({"memory": f"{int(plans[1])}B"})
    assert found.met and memory_plan(found.sim).total <= plans[1]
    found = search({"memory": plans[0]})
    assert found.met and memory_plan(found.sim).total == plans[0] < plans[1]
    with pytest.raises(ConfigError, match=rf"fits memory of 1024 bytes; the least possible is {plans[0]:.6g} "):
        search({"memory": "1KiB"})
    with pytest.raises(ConfigError, match="'512KiB' of bit_ops is no number. Remedy: write a number"):
        search({"bit_ops": "512KiB"})


@pytest.mark.parametrize("text", ["1Mx", "", "-3", "0"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ConfigError, match="no number of bytes.*write 512KiB"):
        parse_bytes(text)
