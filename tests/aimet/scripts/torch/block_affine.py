import aimet_torch.quantization as Q
import torch

x = torch.randn(5, 10)
q = Q.affine.Quantize(shape=(5, 1), bitwidth=8, symmetric=False, block_size=(1, 10))
with q.compute_encodings():
    q(x)
codes = q(x)
assert isinstance(codes, Q.QuantizedTensor) and codes.quantized_repr().dtype == torch.uint8
assert codes.encoding.granularity == "blockwise"
values = codes.dequantize()
assert isinstance(values, Q.DequantizedTensor) and (values - x).abs().max() <= q.get_scale().max()
assert torch.equal(values.quantize(), codes)
