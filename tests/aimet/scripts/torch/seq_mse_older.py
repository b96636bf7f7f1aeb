from aimet_torch import QuantizationSimModel
from aimet_torch.v2.seq_mse import SeqMseParams, apply_seq_mse

from tests.aimet.nets import Net, images

model, loader = Net().eval(), images()
sim = QuantizationSimModel(model, next(iter(loader))[0], default_param_bw=4)
params = SeqMseParams(num_batches=1, num_candidates=5, inp_symmetry="symqt", loss_fn="mse")
apply_seq_mse(model, sim, loader, params, modules_to_exclude=[model.fc])
assert not sim.model.conv1.param_quantizers["weight"].is_overwrite_allowed()
