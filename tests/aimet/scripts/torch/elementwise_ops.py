import torch
from aimet_torch import QuantizationSimModel, elementwise_ops
from aimet_torch.nn.modules.custom import Concat, MatMul


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add, self.cat, self.matmul = elementwise_ops.Add(), Concat(axis=-1), MatMul()

    def forward(self, x):
        y = self.cat(self.add(x, x.flip(0)), x)
        return self.matmul(y, y.transpose(0, 1))


x = torch.randn(4, 4)
sim = QuantizationSimModel(Model(), x)
sim.compute_encodings(lambda model: model(x))
assert sim.model.add.output_quantizers[0].bitwidth == 8
assert sim.model.matmul.output_quantizers[0].bitwidth == 8
