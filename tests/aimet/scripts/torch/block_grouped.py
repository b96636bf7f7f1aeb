import aimet_torch.v2.quantization as Q
import torch

weight = torch.randn(8, 64)
q = Q.affine.GroupedBlockQuantizeDequantize(
    shape=(8, 4), bitwidth=4, symmetric=True, decompressed_bw=8, block_size=(1, 16), block_grouping=(1, -1)
)
with q.compute_encodings():
    q(weight)
encoding = q.get_encodings()
assert encoding.per_channel_scale.shape == (8, 1) and q.get_per_channel_scale().shape == (8, 1)
assert encoding.per_block_int_scale.max() == 16 and encoding.per_block_int_scale.min() >= 1
assert torch.allclose(encoding.per_block_int_scale * encoding.per_channel_scale, q.get_scale())
