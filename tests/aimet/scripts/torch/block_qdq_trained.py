import torch
from aimet_torch.quantization.affine import QuantizeDequantize

qdq = QuantizeDequantize(shape=(), qmin=0, qmax=15, symmetric=False)
x = torch.linspace(-1, 1, 101)
with qdq.compute_encodings():
    qdq(x)
optimizer = torch.optim.SGD(qdq.parameters(), lr=0.1)
before = float(qdq.get_scale().detach())
for _ in range(20):
    optimizer.zero_grad()
    (qdq(3 * x) - 3 * x).square().mean().backward()
    optimizer.step()
assert qdq.get_scale() > before, "the range learned to hold the wider values"
