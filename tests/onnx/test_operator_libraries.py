"""Operators of a user's own library: every session has them, they run in float, and the exported folder names the library.

The registration lasts as long as the process, so that what needs it runs in one of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bitwright.errors import ConfigError, ModelError
from bitwright.onnx import QuantizationSimModel, register_operators
from tests.support.processes import python

extensions = pytest.importorskip("onnxruntime_extensions")


def model() -> onnx.ModelProto:
    """Conv, Relu, an operator of the library, Sub, Conv."""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 3, 3, 3), "w2": (4, 8, 3, 3)}
    weights = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("NegPos", ["r"], ["below", "above"], name="own", domain="ai.onnx.contrib"),
        helper.make_node("Sub", ["above", "below"], ["d"], name="sub"),
        helper.make_node("Conv", ["d", "w2"], ["y"], name="last"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["n", 3, 8, 8])], [value("y", 1, ["n", 4, 4, 4])], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.contrib", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


BATCHES = [{"x": np.random.default_rng(i).normal(size=(4, 3, 8, 8)).astype(np.float32)} for i in range(6)]

RUN = """
import sys
from onnxruntime_extensions import get_library_path
from bitwright.onnx import QuantizationSimModel, check_model, quantize, register_operators
from bitwright.precision.trials import Job
from multiprocessing.reduction import ForkingPickler
from tests.onnx.test_operator_libraries import BATCHES, model

QuantizationSimModel(model(), libraries=[get_library_path()])
register_operators(get_library_path())
result = quantize(model(), BATCHES, path=sys.argv[1], progress=False)
rows = {row.name: row for row in result.sim.coverage()}
assert rows["below"].status == "float" and "runs in float" in rows["below"].how, rows["below"]
assert rows["d"].status == "quantized", "the type of what follows the operator is known"
assert result.sim.verify().ok
check_model(model(), BATCHES, progress=False)
print(ForkingPickler.dumps(Job(model(), BATCHES, {}, "folder")).hex())
"""


@pytest.mark.slow
def test_the_model_around_the_operator_is_quantized_and_the_folder_names_the_library(tmp_path):
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    done = python("-c", RUN, tmp_path, env={"PYTHONPATH": path}, cwd=root)
    settings = json.loads((tmp_path / "model_manifest.json").read_text())["settings"]
    library = Path(extensions.get_library_path())
    assert settings["libraries"] == [library.name]
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("NegPos") == 1 and kinds.count("QuantizeLinear") >= 2
    assert str(library) in str(bytes.fromhex(done.stdout.split()[-1])), "workers load it as well"


def test_without_the_library_the_remedy_is_to_register_it():
    sim = QuantizationSimModel(model())
    with pytest.raises(ModelError, match=r"NegPos.*register_operators\(path\), or --library"):
        sim.compute_encodings(BATCHES, progress=False)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "there is no such file. Remedy: give the path of the shared library"),
        (b"MZ of another system", "cannot load operators from it: .* Remedy: give a library built for this system"),
        ("numpy", "cannot load operators from it: .*RegisterCustomOps. Remedy: give a library"),
    ],
)
def test_what_is_no_library_of_operators_is_refused(tmp_path, content, message):
    path = tmp_path / "own.so"
    if content == "numpy":
        path = Path(np._core._multiarray_umath.__file__)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        register_operators(path)
    with pytest.raises(ConfigError, match=message):
        QuantizationSimModel(model(), libraries=[path])
