"""Sites that the file rounds after a pool are compared there, with what the pool makes of the simulation's values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from bitwright.compare.drift import drift
from bitwright.compare.recurrent_steps import after_pools, pooled_places
from bitwright.compare.verify import verify_folder, verify_layers
from bitwright.core.numerics.granularity import PerChannel
from bitwright.errors import ExportError
from bitwright.export.qdq.forms import METADATA
from bitwright.export.qdq.write import to_qdq
from bitwright.methods.runtime_repairs import leave_stem_in_float
from bitwright.torch import QuantizationSimModel
from tests.export.marked import Array, Graph, simulate

FEEDS = {"x": np.random.default_rng(5).normal(size=(2, 1, 12, 10)).astype(np.float32)}
SITE = "relu.output[0]"


def net(pools: int = 1) -> tuple[ir.Model, Graph]:
    g = Graph()
    weight = g.weight(g.param("first.weight", (4, 1, 5, 5)), granularity=PerChannel(0))
    conv = g.op("Conv", g.input("x", 2, 1, 12, 10), weight, g.param("first.bias", (4,)), pads=[2] * 4)
    value = g.mark(g.op("Relu", conv, name="relu"), SITE, data=(0, 9))
    for _ in range(pools):
        value = g.op("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    second = g.op("Conv", value, g.weight(g.param("second.weight", (3, 4, 3, 3))), name="second")
    return g.model(g.mark(second, "second.output[0]", data=(-9, 9), name="y")), g


def file_and_values(pools: int = 1) -> tuple[ir.Model, dict[str, list[Array]], dict[str, Array]]:
    model, g = net(pools)
    values, outputs = simulate(model, g.encodings, FEEDS)
    return to_qdq(model, g.encodings, target="ort_cpu").model, values, outputs


@pytest.mark.parametrize("pools", [1, 2])
def test_every_site_is_judged(pools: int) -> None:
    model, values, outputs = file_and_values(pools)
    report = verify_layers(model, values, FEEDS, outputs=outputs)
    assert report.ok and not report.unchecked, str(report)
    (row,) = [row for row in report.rows if row.site == SITE]
    assert row.ops == ("Conv", "Relu", *["MaxPool"] * pools) and row.kernel == "float"
    assert {row.site for row in report.rows} == values.keys()
    assert values[SITE][0].shape == (2, 4, 12, 10), "the simulation's values are left as they are"


def test_values_are_those_of_the_pools() -> None:
    model, values, _ = file_and_values(2)
    assert [len(pools) for pools in pooled_places(model).values()] == [2]
    (found,) = after_pools(model, values)[SITE]
    x = torch.from_numpy(values[SITE][0])
    expected = nn.functional.max_pool2d(nn.functional.max_pool2d(x, 3, 2, 1), 3, 2, 1)
    np.testing.assert_array_equal(found, expected.numpy())


def test_a_wrong_scale_is_seen() -> None:
    model, values, _ = file_and_values()
    scale = next(v for name, v in model.graph.initializers.items() if name.startswith("maxpool") and "scale" in name)
    assert scale.const_value is not None
    scale.const_value = ir.Tensor(scale.const_value.numpy() * np.float32(1.02), name=scale.name)
    report = verify_layers(model, values, FEEDS)
    assert [row.ok for row in report.rows if row.site == SITE] == [False], str(report)


def test_values_of_other_inputs_are_refused() -> None:
    model, values, _ = file_and_values()
    with pytest.raises(ExportError, match="has shape"):
        verify_layers(model, {**values, SITE: [values[SITE][0][:1]]}, FEEDS)


def test_values_that_no_pool_takes_do_not_agree() -> None:
    model, values, _ = file_and_values()
    report = verify_layers(model, {**values, SITE: [values[SITE][0].reshape(2, -1)]}, FEEDS)
    assert not report.ok and report.failures, str(report)


@pytest.mark.parametrize("number", ["7", '"many"'])
def test_damaged_notes_are_an_error(number: str) -> None:
    model, values, _ = file_and_values()
    for node in model.graph:
        text = node.metadata_props.get(METADATA, "")
        node.metadata_props[METADATA] = text.replace('"pooled":1', f'"pooled":{number}')
    with pytest.raises(ExportError, match="damaged"):
        verify_layers(model, values, FEEDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a module whose first convolution is in float, for two targets."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    ).eval()  # fmt: skip
    x, path = torch.randn(1, 1, 98, 90), tmp_path_factory.mktemp("export")
    model(x)
    sim = QuantizationSimModel(model, x, config_file={"recurrent": "boundary_only"})
    assert leave_stem_in_float(sim).layers
    sim.compute_encodings([x])
    for target in ("ort_cpu", "openvino_cpu"):
        sim.export(path, target, x, target=target)
    return path


def test_a_module_is_verified_from_its_folder(folder: Path) -> None:
    report = verify_folder(folder, "ort_cpu")
    assert report.ok and not report.unchecked, str(report)
    assert {row.site for row in report.rows} == {row.site for row in verify_folder(folder, "openvino_cpu").rows}
    assert report.outputs[0].as_integer > 40


@pytest.mark.parametrize("sides", [("simulation", "file"), ("float", "file"), ("simulation", "onnxruntime")])
def test_drift_compares_what_is_pooled(folder: Path, sides: tuple[str, str]) -> None:
    report = drift(f"{folder}@{sides[0]}", f"{folder}@{sides[1]}", prefix="ort_cpu")
    names = {row.name for row in report.rows}
    assert "1.output[0], pooled" in names, names


def test_drift_of_two_files_that_round_at_different_places(folder: Path) -> None:
    report = drift(str(folder / "openvino_cpu.onnx"), str(folder / "ort_cpu.onnx"))
    assert report.rows and all(row.own.equal == row.carried.equal == 1 for row in report.rows), str(report)
