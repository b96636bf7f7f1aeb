"""MixedPrecisionConfigurator: precisions by module and by type of module."""

import os

import torch
from aimet_torch.mixed_precision import MixedPrecisionConfigurator
from aimet_torch.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, batch

model = Net().eval()
sim = QuantizationSimModel(model, batch(), default_param_bw=8, default_output_bw=8)
configurator = MixedPrecisionConfigurator(sim)
configurator.set_precision(torch.nn.Conv2d, activation="int8", param={"weight": "int4"})
configurator.set_precision(sim.model.fc, activation="int16", param={"weight": "int8"})
configurator.set_precision(sim.model.relu1, activation="int8")
configurator.set_model_input_precision("int16")
configurator.set_model_output_precision("int16")
with open("mmp_log.txt", "w") as log:
    configurator.apply(log_file=log, strict=False)
assert os.path.getsize("mmp_log.txt") > 0
configurator.set_precision(sim.model.fc, activation="int16", param={"weight": "int8"})
configurator.apply(log_file="./again.txt", strict=False)

sim.compute_encodings(lambda model: model(batch()))
assert sim.model.conv2.param_quantizers["weight"].bitwidth == 4
assert sim.model.fc.param_quantizers["weight"].bitwidth == 8
assert sim.model.fc.output_quantizers[0].bitwidth == 16
assert sim.model(batch()).shape == (4, 10)

# half precision leaves no integer quantizer behind
other = QuantizationSimModel(Net().eval(), batch())
configurator = MixedPrecisionConfigurator(other)
configurator.set_precision(other.model.conv1, "fp16", {"weight": "fp16"})
configurator.apply()
assert other.model.conv1.param_quantizers["weight"].is_float16()
