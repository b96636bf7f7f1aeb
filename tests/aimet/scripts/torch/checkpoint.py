import pytest
from aimet_torch import QuantizationSimModel
from aimet_torch.quantsim import load_checkpoint, save_checkpoint

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
sim.compute_encodings(lambda m: m(x))
save_checkpoint(sim, "checkpoint")
with pytest.raises(RuntimeError, match="load_checkpoint"):
    load_checkpoint("checkpoint")
other = QuantizationSimModel(model, x)
other.load_checkpoint("checkpoint")
assert other.model(x).equal(sim.model(x))
