import pytest
import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
quantizer = sim.model.relu2.output_quantizers[0]
quantizer.set_range(torch.tensor(0.0), torch.tensor(6.0))
quantizer.allow_overwrite(False)
sim.compute_encodings(lambda model: model(batch()))
assert torch.allclose(quantizer.max, torch.tensor(6.0)) and quantizer.min == 0
with pytest.raises(ValueError, match="set_range"):
    quantizer.min.copy_(torch.tensor(-1.0))
