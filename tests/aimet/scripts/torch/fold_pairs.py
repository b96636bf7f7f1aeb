import torch
from aimet_torch.batch_norm_fold import fold_all_batch_norms

from tests.aimet.nets import Net, batch

model = Net().eval()
before, conv1, bn1 = model(batch()), model.conv1, model.bn1
pairs = fold_all_batch_norms(model, (1, 3, 12, 12))
assert (conv1, bn1) in pairs and len(pairs) == 2
bn_dict = {}
for conv_bn in pairs:
    bn_dict[conv_bn[0]] = conv_bn[1]
assert bn_dict[model.conv1] is bn1
assert isinstance(model.bn1, torch.nn.Identity) and torch.allclose(model(batch()), before, atol=1e-5)
