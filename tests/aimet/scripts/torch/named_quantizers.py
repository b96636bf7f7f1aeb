import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Residual

sim = QuantizationSimModel(Residual(), torch.randn(1, 3, 8, 8))
names = dict(sim.named_quantizers())
assert "conv1.param_quantizers.weight" in names and "relu.output_quantizers.0" in names
assert len(list(sim.quantizers())) == len(names)
assert [name for name, _ in sim.named_qmodules()] == ["conv1", "relu", "conv2"]
assert len(list(sim.qmodules())) == 3
