import pytest
from aimet_torch import QuantizationSimModel
from aimet_torch.nn import compute_param_encodings

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
compute_param_encodings(sim.model)
assert sim.model.conv1.param_quantizers["weight"].is_initialized()
assert not sim.model.conv1.input_quantizers[0].is_initialized()
with pytest.raises(RuntimeError):
    sim.model(batch())
