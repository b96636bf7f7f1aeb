import torch
from aimet_torch.cross_layer_equalization import equalize_model

from tests.aimet.nets import Net, batch

model = Net().eval()
before = model(batch())
equalize_model(model, (1, 3, 12, 12))
assert (model(batch()) - before).abs().max() < 0.2
assert isinstance(model.bn1, torch.nn.Identity)
