import torch
from aimet_torch import QuantizationSimModel
from aimet_torch.quantsim import compute_encodings_for_sims

from tests.aimet.nets import Residual

x = torch.randn(2, 3, 8, 8)
sims = [QuantizationSimModel(Residual(), x), QuantizationSimModel(Residual(), x)]


def callback(models, args):
    for model in models:
        model(args)


compute_encodings_for_sims(sims, callback, x)
assert all(sim.model.conv1.input_quantizers[0].is_initialized() for sim in sims)
