import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, batch

model, x = Net().eval(), batch()
sim = QuantizationSimModel(model, x)
sim.compute_encodings(lambda m: m(x))
sim.save_encodings_to_json(".", "encodings")
other = QuantizationSimModel(model, x)
other.load_encodings("encodings.json")
assert torch.equal(other.model(x), sim.model(x))
