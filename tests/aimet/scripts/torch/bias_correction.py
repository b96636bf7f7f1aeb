from aimet_common.defs import QuantScheme
from aimet_torch.batch_norm_fold import fold_all_batch_norms
from aimet_torch.bias_correction import correct_bias
from aimet_torch.quantsim import QuantParams

from tests.aimet.nets import Net, images

model = Net().eval()
pairs = fold_all_batch_norms(model, (1, 3, 12, 12))
before = model.fc.bias.clone()
params = QuantParams(weight_bw=4, act_bw=8, round_mode="nearest", quant_scheme=QuantScheme.post_training_tf_enhanced)
correct_bias(
    model,
    params,
    num_quant_samples=8,
    data_loader=images(),
    num_bias_correct_samples=8,
    conv_bn_dict={conv: bn for conv, bn in pairs},
    perform_only_empirical_bias_corr=False,
    layers_to_ignore=[model.conv1],
)
assert not before.equal(model.fc.bias)
