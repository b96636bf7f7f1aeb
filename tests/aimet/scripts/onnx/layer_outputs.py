"""Outputs of all nodes of a float model as files."""

import json
import os

import numpy as np
from aimet_onnx.layer_output_utils import LayerOutputUtil

from tests.aimet.onnx_nets import feeds, folded

util = LayerOutputUtil(model=folded(), dir_path="./fp32")
for feed in feeds():
    util.generate_layer_outputs(feed["input"])
with open("fp32/layer_output_name_order.json") as file:
    assert len(json.load(file)["layer_output_names"]) >= 6
assert len(os.listdir("fp32/outputs")) == 3
assert np.fromfile("fp32/outputs/layer_outputs_0/output.raw", np.float32).shape == (2 * 10,)
