from aimet_torch import QuantizationSimModel
from aimet_torch.quantsim import load_encodings_to_sim

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
sim.compute_encodings(lambda m: m(x))
sim.export(".", "net", x)
other = QuantizationSimModel(model, x)
load_encodings_to_sim(other, "net_torch.encodings")
assert other.model(x).equal(sim.model(x))
frozen = QuantizationSimModel(model, x)
frozen.load_and_freeze_encodings("net_torch.encodings")
frozen.compute_encodings(lambda m: m(3 * x))
assert frozen.model(x).equal(sim.model(x))
