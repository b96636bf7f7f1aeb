import aimet_torch.v2.quantization as Q
import torch
from aimet_torch.v2.quantsim import QuantizationSimModel

from tests.aimet.nets import Mlp

x = torch.randn(4, 16)
sim = QuantizationSimModel(Mlp(), x)
sim.model.fc2.param_quantizers["weight"] = Q.affine.QuantizeDequantize(
    shape=(16, 4), bitwidth=4, symmetric=True, block_size=(1, 8)
)
sim.compute_encodings(lambda model: model(x))
assert sim.model.fc2.param_quantizers["weight"].get_scale().shape == (16, 4)
assert sim.model.fc2.param_quantizers["weight"].block_size == (1, 8)
