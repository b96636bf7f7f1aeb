import aimet_torch.quantization.affine as affine
import torch

x = torch.tensor([[0.3, 70.0], [-0.3, -70.0]])
scale, offset = torch.tensor([0.5], requires_grad=True), torch.tensor([0.0])
codes = affine.quantize(x, scale, offset, -128, 127)
assert codes.tolist() == [[1, 127], [-1, -128]]
assert affine.quantize(x, scale, offset, bitwidth=8, signed=True).equal(codes)
assert affine.quantize(x, scale, offset, num_steps=255, signed=True).equal(codes)
assert affine.dequantize(codes, scale, offset).tolist() == [[0.5, 63.5], [-0.5, -64.0]]
affine.quantize_dequantize(x, scale, offset, bitwidth=4).sum().backward()
assert scale.grad is not None
