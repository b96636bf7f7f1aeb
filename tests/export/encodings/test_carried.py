"""Entries for tensors that carry elements of others, and for no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bitwright.errors import EncodingsError
from bitwright.onnx import QuantizationSimModel


def model() -> onnx.ModelProto:
    """A layer, movement of many kinds, and what must not be taken for it."""
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.normal(size=(4, 3, 3, 3)).astype(np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "seven": np.float32(7),
        "shape": np.array([0, -1]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["pool"], "pool", kernel_shape=[2, 2]),
        helper.make_node("Pad", ["pool", "pads"], ["zeros"], "pad0"),
        helper.make_node("Pad", ["pool", "pads", "seven"], ["sevens"], "pad7"),
        helper.make_node("Transpose", ["zeros"], ["moved"], "transpose", perm=[0, 2, 3, 1]),
        helper.make_node("Concat", ["pool", "pool"], ["same"], "same", axis=1),
        helper.make_node("Sigmoid", ["pool"], ["s"], "sigmoid"),
        helper.make_node("Concat", ["pool", "s"], ["mixed"], "mixed", axis=1),
        helper.make_node("Reshape", ["same", "shape"], ["flat"], "reshape"),
    ]
    outputs = ("flat", "moved", "sevens", "mixed")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def simulated() -> QuantizationSimModel:
    rng = np.random.default_rng(1)
    sim = QuantizationSimModel(model())
    sim.compute_encodings([{"x": rng.normal(size=(2, 3, 8, 8)).astype(np.float32)}], progress=False)
    return sim


def entries(path: Path) -> dict[str, Any]:
    return {entry["name"]: entry for entry in json.loads(path.read_text())["activation_encodings"]}


def test_what_carries_elements_has_an_entry_when_asked_for(tmp_path: Path) -> None:
    sim = simulated()
    plain = entries(sim.export(tmp_path / "plain", "net", samples=False).encodings)
    found = entries(sim.export(tmp_path / "all", "net", samples=False, every_tensor=True).encodings)
    assert set(found) - set(plain) == {"pool", "zeros", "moved", "same", "flat"}
    for name in set(found) - set(plain):
        assert {**found[name], "name": "r"} == plain["r"]
    assert all(found[name] == entry for name, entry in plain.items())


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_the_file_is_read_back_strictly(tmp_path: Path, version: str) -> None:
    sim = simulated()
    made = sim.export(tmp_path, "net", samples=False, every_tensor=True, encoding_version=version)
    other = QuantizationSimModel(model())
    other.load_encodings(made.encodings)
    scales = {n: float(s.encoding.scale) for n, s in sim.quantizers.items() if s.role == "output" and s.encoding}
    assert scales == {n: float(other.quantizers[n].encoding.scale) for n in scales}  # type: ignore[union-attr]
    document = json.loads(made.sites.read_text())
    document["carried"] = [3]
    made.sites.write_text(json.dumps(document))
    with pytest.raises(EncodingsError, match="key 'carried': it is 3, not a text.*export the model again"):
        QuantizationSimModel(model()).load_encodings(made.encodings)
