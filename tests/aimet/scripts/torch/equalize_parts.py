import torch
from aimet_torch.batch_norm_fold import fold_all_batch_norms
from aimet_torch.cross_layer_equalization import CrossLayerScaling, HighBiasFold

from tests.aimet.nets import Net, batch

model = Net().eval()
folded_pairs = fold_all_batch_norms(model, (1, 3, 12, 12))
before = model(batch())
bn_dict = {conv: bn for conv, bn in folded_pairs}
cls_set_info_list = CrossLayerScaling.scale_model(model, (1, 3, 12, 12))
pair = cls_set_info_list[0].cls_pair_info_list[0]
assert pair.layer1 is model.conv1 and pair.layer2 is model.conv2 and pair.relu_activation_between_layers
first = pair.layer1.weight.detach().abs().amax(dim=(1, 2, 3))
second = pair.layer2.weight.detach().abs().amax(dim=(0, 2, 3))
assert torch.allclose(first, second, rtol=1e-3) and len(pair.scale_factor) == 8
assert torch.allclose(model(batch()), before, atol=1e-5)
HighBiasFold.bias_fold(cls_set_info_list, bn_dict)
