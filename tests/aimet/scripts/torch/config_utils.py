import torch
from aimet_torch import QuantizationSimModel
from aimet_torch.quantsim.config_utils import set_activation_quantizers_to_float, set_blockwise_quantization_for_weights

from tests.aimet.nets import Mlp

x = torch.randn(4, 16)
sim = QuantizationSimModel(Mlp(), x)
set_blockwise_quantization_for_weights(sim, [torch.nn.Linear], bitwidth=4, symmetric=True, block_size=8)
set_activation_quantizers_to_float(sim, lambda module: module is sim.model.act, dtype=torch.float16)
sim.compute_encodings(lambda model: model(x))
assert sim.model.fc1.param_quantizers["weight"].get_scale().shape == (32, 2)
assert sim.model.act.output_quantizers[0].is_float16()
