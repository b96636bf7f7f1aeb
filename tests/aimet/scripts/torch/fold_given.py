import pytest
import torch
from aimet_torch.batch_norm_fold import fold_given_batch_norms

from tests.aimet.nets import Net, batch

model = Net().eval()
before = model(batch())
fold_given_batch_norms(model, [(model.conv1, model.bn1), (model.conv2, model.bn2)])
assert isinstance(model.bn2, torch.nn.Identity) and torch.allclose(model(batch()), before, atol=1e-5)
with pytest.raises(RuntimeError):
    fold_given_batch_norms(model, [(model.conv1, model.relu1)])
