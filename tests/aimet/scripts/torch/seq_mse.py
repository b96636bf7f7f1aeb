from aimet_torch import QuantizationSimModel
from aimet_torch.seq_mse import apply_seq_mse

from tests.aimet.nets import Net, images

model, loader = Net().eval(), images()
sim = QuantizationSimModel(model, next(iter(loader))[0], default_param_bw=4)
apply_seq_mse(sim, loader, num_candidates=5, modules_to_exclude=[model.conv1, sim.model.fc])
assert not sim.model.conv2.param_quantizers["weight"].is_overwrite_allowed()
assert sim.model.fc.param_quantizers["weight"].is_overwrite_allowed()
sim.compute_encodings(lambda m: [m(x) for x, _ in loader])
