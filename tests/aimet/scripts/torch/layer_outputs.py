"""Outputs of all layers, in float and simulated, as files."""

import json
import os

import numpy as np
from aimet_torch.layer_output_utils import LayerOutputUtil, NamingScheme
from aimet_torch.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, images

model = Net().eval()
loader = images()
first = next(iter(loader))[0]
sim = QuantizationSimModel(model, first)
sim.compute_encodings(lambda model: model(first))

for name, subject in (("fp32", model), ("quantsim", sim.model)):
    util = LayerOutputUtil(model=subject, dir_path=f"./{name}", naming_scheme=NamingScheme.PYTORCH)
    for x, _ in loader:
        util.generate_layer_outputs(x)
    with open(f"{name}/layer_output_name_order.json") as file:
        order = json.load(file)["layer_output_names"]
    assert order[0].startswith("conv1") and order[-1].startswith("fc")
    assert len(os.listdir(f"{name}/inputs")) == 2 and len(os.listdir(f"{name}/outputs")) == 2
    found = np.fromfile(f"{name}/outputs/layer_outputs_1/fc.raw", np.float32)
    assert found.shape == (4 * 10,)
named = LayerOutputUtil(sim.model, "./onnx", NamingScheme.ONNX, first)
named.generate_layer_outputs(first)
assert os.listdir("onnx/outputs/layer_outputs_0")
