"""Operators of a user's own, in PyTorch and in ONNX: in float until a row of the op table says what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import bitwright
from bitwright.core.graph.operators import OPS, OpRow
from bitwright.core.numerics.affine import fake_quantize
from bitwright.errors import ConfigError, ModelError
from bitwright.testing import check
from tests.support.simulations import calibrated

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((6, 8)).astype(np.float32)
X = [RNG.standard_normal((64, 8)).astype(np.float32) for _ in range(2)]
DISTANCE = OpRow("compute", {1: "weight"}, weight=1, activations=(0,), integer=True, axes=(0, 1))


@torch.library.custom_op("bitwright_rows::distance", mutates_args=())
def distance(x: torch.Tensor, w: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Squared distances of rows."""
    return (x[:, None] - w).square().sum(-1) * factor


@distance.register_fake
def _(x: torch.Tensor, w: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return x.new_empty(len(x), len(w))


class Net(nn.Module):
    """Distances by an operator of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(WEIGHT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return distance(x, w=self.weight, factor=1.0)


def _file() -> onnx.ModelProto:
    """The same by ``CDist``, which ONNX Runtime has beside the standard operators."""
    value, one = helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    node = helper.make_node("CDist", ["x", "weight"], ["y"], "distance", domain="com.microsoft", metric="sqeuclidean")
    graph = helper.make_graph(
        [node], "g", [value("x", one, [64, 8])], [value("y", one, [64, 6])],
        [numpy_helper.from_array(WEIGHT, "weight")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _simulation(front_end: str) -> Any:
    if front_end == "torch":
        return bitwright.torch.QuantizationSimModel(Net().eval(), torch.from_numpy(X[0]))
    return bitwright.onnx.QuantizationSimModel(_file())


NAMES = {"torch": "bitwright_rows::distance", "onnx": "com.microsoft::CDist"}


@pytest.fixture
def table() -> Iterator[None]:
    before = dict(dict.items(OPS))
    yield
    OPS.clear()
    OPS.update(before)


@pytest.mark.parametrize("front_end", NAMES)
def test_an_operator_of_the_user_is_quantized_by_its_row(table: None, front_end: str) -> None:
    """Weights per row, and the simulation is the distance of what lies on the grids."""
    assert "weight" not in _simulation(front_end).quantizers
    bitwright.register("operators", NAMES[front_end], DISTANCE)
    check("operators", NAMES[front_end])
    sim = calibrated(_simulation(front_end), [torch.from_numpy(x) if front_end == "torch" else {"x": x} for x in X])
    sites = sim.quantizers
    assert {name: site.role for name, site in sites.items()} == {
        "distance.input[0]": "input", "weight": "weight", "distance.output[0]": "output",
    }  # fmt: skip
    scale = np.maximum(WEIGHT.max(1) / 127, -WEIGHT.min(1) / 128)
    np.testing.assert_allclose(np.ravel(sites["weight"].encoding.scale), scale, rtol=1e-6)
    x, w = (fake_quantize(a, sites[name].encoding) for a, name in ((X[1], "distance.input[0]"), (WEIGHT, "weight")))
    expected = fake_quantize(np.square(x[:, None] - w).sum(-1), sites["distance.output[0]"].encoding)
    found = sim.model(torch.from_numpy(X[1])).detach().numpy() if front_end == "torch" else sim.run({"x": X[1]})[0]
    np.testing.assert_allclose(found, expected, atol=float(sites["distance.output[0]"].encoding.scale) * 1.01)
    assert np.mean(np.abs(found - expected) > 1e-6) < 0.01  # sums are rounded in another order


@pytest.mark.parametrize("row", [None, DISTANCE], ids=["float", "quantized"])
def test_a_simulation_with_an_operator_of_the_user_is_compiled_whole(table: None, row: OpRow | None) -> None:
    if row is not None:
        bitwright.register("operators", NAMES["torch"], row)
    sim = calibrated(_simulation("torch"), [torch.from_numpy(x) for x in X])
    x = torch.from_numpy(X[0])
    with torch.no_grad():
        compiled = torch.compile(sim.model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), sim.model(x))


def test_attributes_of_an_operator_are_in_the_graph(table: None) -> None:
    bitwright.register("operators", NAMES["torch"], DISTANCE)
    op = _simulation("torch").graph.op("distance")
    assert op.type == NAMES["torch"] and op.attrs == {"factor": 1.0}


def test_the_export_of_the_file_computes_what_the_simulation_does(table: None, tmp_path: Any) -> None:
    bitwright.register("operators", NAMES["onnx"], DISTANCE)
    sim = calibrated(_simulation("onnx"), [{"x": x} for x in X])
    made = onnx.load(sim.export(tmp_path, "net").qdq)
    kinds = [node.op_type for node in made.graph.node]
    assert kinds.count("DequantizeLinear") == 3 and "CDist" in kinds
    integers = {onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.UINT16}
    assert next(t for t in made.graph.initializer if t.name == "weight_q").data_type in integers
    assert sim.verify({"x": X[0]}).ok


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (OpRow("movement", activations=(0,), fixed_range=(1.0, 0.0)), "the lower end comes first"),
        (OpRow("produce"), "no kind 'produce'.*kinds are compute, movement, pointwise"),  # type: ignore[arg-type]
        (OpRow("compute", {-1: "weight"}), "-1 is no port; ports are counted from 0"),
        (OpRow("pointwise", exact={0: "care"}), "no need 'care'; needs are divisor"),  # type: ignore[dict-item]
        (OpRow("pointwise", axes=(0, 1)), "axes of a weight and no weight"),
        (3, r"3 is not an OpRow. Remedy: register an OpRow, as OpRow\("),
    ],
)
def test_what_is_no_row(row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bitwright.register("operators", "mylib::gate", row)


def test_names_of_operators() -> None:
    with pytest.raises(ConfigError, match="its name is not a domain and a type, as 'mylib::Gate'"):
        bitwright.register("operators", "my gate", DISTANCE)
    with pytest.raises(ConfigError, match="operators of this package has a row of that name"):
        bitwright.register("operators", "Conv", DISTANCE)


def test_a_row_that_contradicts_itself_breaks_its_conformance_test(table: None) -> None:
    """It says both that it has integer kernels and that it computes in float."""
    bitwright.register("operators", "mylib::gate", OpRow("float", activations=(0,), integer=True))
    with pytest.raises(ConfigError, match="conformance test 'placed': it is computed in float, and these have a grid"):
        check("operators", "mylib::gate")


def test_operators_of_this_package_conform() -> None:
    for name in OPS:
        check("operators", name)


def test_the_default_recipe_goes_on_without_gradients_of_an_operator_and_analyze_says_what_is_missing() -> None:
    """An operator of ``torch.library`` has no gradient until one is registered."""
    batches = [torch.from_numpy(x[:8]) for x in X] * 4
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Net(), nn.Linear(6, 4)).eval()
    result = bitwright.quantize(model, batches, progress=False)
    assert result.quality.worst.sqnr > 20
    left_out = [outcome.note for outcome in result.report.outcomes if "torch has no gradient" in outcome.note]
    assert left_out and "torch.library.register_autograd" in left_out[0]
    with pytest.raises(ModelError, match="torch has no gradient of it: .*register_autograd"):
        bitwright.analyze(result.sim, batches, progress=False)
