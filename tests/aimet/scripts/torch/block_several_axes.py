import aimet_torch.quantization.affine as affine
import torch

x = torch.randn(4, 6)
q = affine.QuantizeDequantize((2, 3), 8, True, block_size=(2, 2))
with q.compute_encodings():
    q(x)
tile = x[:2, :2]
assert torch.isclose(q.get_scale()[0, 0], torch.maximum(tile.max() / 127, -tile.min() / 128))
assert (q(x) - x).abs().max() <= q.get_scale().max()
