"""A model of which no layer can be quantized is an error, unless it was asked for."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import bitwright
from bitwright.errors import ModelError
from bitwright.onnx import QuantizationSimModel
from tests.onnx.nets import Net

X = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)


def trees(scaled: bool) -> onnx.ModelProto:
    """A tree of two leaves, of the input or of what a scaler makes of it."""
    n = Net()
    x = n.input("x", ("n", 4))
    if scaled:
        x = n("Div", n("Sub", x, n.const(np.ones(4)), name="sub"), n.const(np.full(4, 2.0)), name="div")
    tree = helper.make_node(
        "TreeEnsembleRegressor", [x], ["y"], "tree", domain="ai.onnx.ml", n_targets=1, nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2], nodes_featureids=[1, 0, 0], nodes_values=[0.3, 0.0, 0.0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
        target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[1.5, -2.0],
    )  # fmt: skip
    n.nodes.append(tree)
    return n.model("y", domains={"ai.onnx.ml": 3})


@pytest.mark.parametrize("scaled", [False, True])
def test_what_a_tree_compares_stays_in_float(scaled):
    coverage = QuantizationSimModel(trees(scaled), {"x": X}).coverage()
    assert coverage.find("x").status == "float"
    assert "tree compares it" in coverage.find("x").how


@pytest.mark.parametrize("front_end", ["onnx", "torch"])
def test_no_layer_is_an_error(front_end, tmp_path, caplog):
    model, data = (trees(False), [X]) if front_end == "onnx" else (nn.Sequential(nn.ReLU()).eval(), [torch.tensor(X)])
    kind = "1 ai.onnx.ml::TreeEnsembleRegressor" if front_end == "onnx" else "1 Relu"
    problem = f"the model has no layer that could be quantized; its operators are {kind}. Remedy: .*allow_float=True"
    with pytest.raises(ModelError, match=problem):
        bitwright.quantize(model, data, path=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
    result = bitwright.quantize(model, data, recipe=["fold"], allow_float=True, progress=False, measure_speed=False)
    assert "no layer that could be quantized" in caplog.text and result.sim is not None


def test_layers_that_all_stay_in_float_are_an_error_unless_rules_say_so(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    preset = bitwright.Preset(None, None)
    with pytest.raises(ModelError, match="no layer of the model is quantized; of its tensors, .*stay in float under"):
        bitwright.quantize(model, [torch.tensor(X)], preset, progress=False)
    rules = {"rules": [{"match": "*", "weight": None, "input": None, "output": None, "bias": None}]}
    bitwright.quantize(model, [torch.tensor(X)], config_file=rules, recipe=["fold"], progress=False)
    assert "no layer of the model is quantized" in caplog.text
