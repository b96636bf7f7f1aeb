import pytest
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

sim = QuantizationSimModel(Net().eval(), batch())
with pytest.raises(RuntimeError):
    sim.model(batch())
with pytest.raises(ValueError):
    QuantizationSimModel(Net(), batch(), default_param_bw=1)
with pytest.raises(RuntimeError):
    QuantizationSimModel.get_original_model(Net())
with pytest.raises(RuntimeError):
    sim.model.conv1.output_quantizers[0] = sim.model.relu1.output_quantizers[0]
