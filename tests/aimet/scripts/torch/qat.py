import torch
from aimet_torch import QuantizationSimModel

from tests.aimet.nets import Net, images

loader = images()
sim = QuantizationSimModel(Net().eval(), next(iter(loader))[0])
sim.compute_encodings(lambda model: [model(x) for x, _ in loader])
optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.05)
losses = []
for _ in range(5):
    for image, label in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(sim.model(image), label)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
assert losses[-1] < losses[0]
