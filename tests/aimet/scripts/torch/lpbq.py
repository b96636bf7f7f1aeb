import aimet_torch.v2.quantization as Q
import torch
from aimet_torch.v2.quantsim import QuantizationSimModel
from aimet_torch.v2.quantsim.config_utils import set_grouped_blockwise_quantization_for_weights

from tests.aimet.nets import Mlp

x = torch.randn(4, 16)
sim = QuantizationSimModel(Mlp(), x)
set_grouped_blockwise_quantization_for_weights(
    sim, [torch.nn.Linear], bitwidth=4, symmetric=True, decompressed_bw=8, block_size=8, block_grouping=-1
)
sim.compute_encodings(lambda model: model(x))

quantizer = sim.model.fc1.param_quantizers["weight"]
assert isinstance(quantizer, Q.affine.GroupedBlockQuantizeDequantize)
assert quantizer.bitwidth == 4 and quantizer.decompressed_bw == 8
assert quantizer.get_scale().shape == (32, 2)
assert quantizer.get_per_channel_scale().shape == (32, 1)
encoding = quantizer.get_encodings()
multiples = encoding.per_block_int_scale
assert torch.equal(multiples.amax(1), torch.full((32,), 16.0)), (
    "the largest block of a channel has the largest multiple"
)
assert torch.equal(encoding.scale, multiples * encoding.per_channel_scale)

# the same building block on its own finds the same scales
block = Q.affine.GroupedBlockQuantizeDequantize((32, 2), 4, True, 8, block_size=(1, 8), block_grouping=(1, -1))
with block.compute_encodings():
    block(sim.model.fc1.weight)
assert torch.allclose(block.get_scale(), quantizer.get_scale().as_subclass(torch.Tensor), rtol=1e-6)
