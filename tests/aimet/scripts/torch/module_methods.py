from aimet_torch import QuantizationSimModel
from torch import nn

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch(), default_param_bw=4)
conv = sim.model.conv1
conv.compute_param_encodings()
assert conv.param_quantizers["weight"].is_initialized()
with sim.model.relu1.compute_encodings():
    sim.model(batch())
assert sim.model.relu1.output_quantizers[0].is_initialized()
assert not sim.model.relu2.output_quantizers[0].is_initialized()
sim.compute_encodings(lambda model: model(batch()))
exported = conv.export_param_encodings("1.0.0")
assert exported["weight"]["bw"] == 4 and len(exported["weight"]["scale"]) == 8
assert sim.model.relu1.export_output_encodings("0.6.1")["0"][0]["bitwidth"] == 8
plain = conv.get_original_module()
assert type(plain) is nn.Conv2d and plain.weight is conv.weight and not hasattr(plain, "param_quantizers")
assert hasattr(conv, "param_quantizers")
conv.fold_param_quantizers()
assert conv.param_quantizers["weight"] is None and conv.weight.unique().numel() <= 8 * 16
