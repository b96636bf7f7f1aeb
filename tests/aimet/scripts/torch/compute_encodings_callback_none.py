import aimet_torch
from aimet_torch.v2.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, batch

x = batch()
sim = QuantizationSimModel(Net().eval(), x)
seen = []


def callback(model, args):
    seen.append(args)
    model(x)


sim.compute_encodings(callback, None)
assert seen == [None]
sim.compute_encodings(lambda model: model(x))
assert isinstance(sim, aimet_torch.QuantizationSimModel)
