import aimet_torch.v2.quantization as Q
import torch
from aimet_torch.v2.nn import QuantizationMixin
from aimet_torch.v2.quantsim import QuantizationSimModel


class MaskedAdd(torch.nn.Module):
    def forward(self, x, mask):
        return x + mask


@QuantizationMixin.implements(MaskedAdd)
class QuantizedMaskedAdd(QuantizationMixin, MaskedAdd):
    def __quant_init__(self):
        super().__quant_init__()
        self.input_quantizers = torch.nn.ModuleList([None, None])
        self.output_quantizers = torch.nn.ModuleList([None])

    def forward(self, x, mask):
        if self.input_quantizers[0]:
            x = self.input_quantizers[0](x)
        out = super().forward(x, mask)
        if self.output_quantizers[0]:
            out = self.output_quantizers[0](out)
        return out


QuantizationMixin.ignore(torch.nn.Identity)
one = QuantizationMixin.from_module(MaskedAdd())
assert isinstance(one, QuantizedMaskedAdd)
one.output_quantizers[0] = Q.affine.QuantizeDequantize((), 8, False)
x = torch.randn(3, 4)
with one.compute_encodings():
    one(x, x)
assert (one(x, x) - 2 * x).abs().max() < 0.1


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.add = torch.nn.Linear(4, 4), MaskedAdd()

    def forward(self, x):
        return self.add(self.fc(x), x)


sim = QuantizationSimModel(Model(), x)
sim.compute_encodings(lambda model: model(x))
assert sim.model.add.output_quantizers[0] is not None
