"""Quantization-aware training with learned ranges, new statistics of batch norms, and folding into scales."""

import itertools

import torch
from aimet_torch.batch_norm_fold import fold_all_batch_norms_to_scale
from aimet_torch.bn_reestimation import reestimate_bn_stats
from aimet_torch.common.defs import QuantScheme
from aimet_torch.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, images

torch.manual_seed(0)
loader = images(16)
sim = QuantizationSimModel(
    Net().eval(),
    next(iter(loader))[0],
    quant_scheme=QuantScheme.training_range_learning_with_tf_init,
    default_param_bw=4,
    default_output_bw=8,
)
sim.compute_encodings(lambda model, _: [model(x) for x, _ in loader], None)
before = sim.model.conv1.param_quantizers["weight"].get_scale().detach().clone()

sim.model.train()
parameters = list({id(p): p for p in itertools.chain(sim.model.parameters(), sim.quantizer_parameters())}.values())
optimizer = torch.optim.Adam(parameters, lr=2e-3)
losses = []
for _ in range(6):
    for image, label in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(sim.model(image), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
assert losses[-1] < losses[0]
assert not torch.equal(sim.model.conv1.param_quantizers["weight"].get_scale().detach(), before)

sim.model.eval()
mean = sim.model.bn1.running_mean.clone()
handle = reestimate_bn_stats(sim.model, loader, num_batches=2, forward_fn=lambda model, batch: model(batch[0]))
assert not torch.equal(sim.model.bn1.running_mean, mean)
handle.remove()
assert torch.equal(sim.model.bn1.running_mean, mean)
reestimate_bn_stats(sim.model, loader, num_batches=2, forward_fn=lambda model, batch: model(batch[0]))

fold_all_batch_norms_to_scale(sim)
assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in sim.model.modules())
