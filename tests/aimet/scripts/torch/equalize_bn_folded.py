from aimet_torch.batch_norm_fold import fold_all_batch_norms
from aimet_torch.cross_layer_equalization import equalize_bn_folded_model

from tests.aimet.nets import Net, batch

model = Net().eval()
folded_pairs = fold_all_batch_norms(model, [(1, 3, 12, 12)])
before = model(batch())
equalize_bn_folded_model(model, [(1, 3, 12, 12)], folded_pairs=list(folded_pairs))
assert (model(batch()) - before).abs().max() < 0.2
