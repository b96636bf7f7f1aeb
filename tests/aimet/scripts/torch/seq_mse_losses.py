import pytest
import torch
from aimet_torch import QuantizationSimModel
from aimet_torch.seq_mse import SeqMseParams, apply_seq_mse

from tests.aimet.nets import Net, images

model, loader = Net().eval(), images()
found = {}
for inp_symmetry in ("symqt", "symfp", "asym"):
    for loss_fn in ("mse", "l1", "sqnr"):
        sim = QuantizationSimModel(model, next(iter(loader))[0], default_param_bw=2)
        params = SeqMseParams(num_batches=2, num_candidates=20, inp_symmetry=inp_symmetry, loss_fn=loss_fn)
        apply_seq_mse(model, sim, loader, params)
        assert not sim.model.conv2.param_quantizers["weight"].is_overwrite_allowed()
        layers = (sim.model.conv1, sim.model.conv2, sim.model.fc)
        found[inp_symmetry, loss_fn] = torch.cat([m.param_quantizers["weight"].get_scale().flatten() for m in layers])
for symmetry, loss in (("symqt", "l1"), ("symfp", "mse"), ("asym", "mse")):
    assert not torch.equal(found["symqt", "mse"], found[symmetry, loss])
with pytest.raises(ValueError):
    SeqMseParams(num_batches=1, loss_fn="huber")
