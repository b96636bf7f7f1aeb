from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters

from tests.aimet.nets import Net, images

model = Net().eval()
params = AdaroundParameters(images(), 1, 10, 0.01, (20, 2), 0.2, forward_fn=lambda module, inputs: module(inputs[0]))
Adaround.apply_adaround(
    model,
    next(iter(images()))[0],
    params,
    ".",
    "ada",
    param_bw_override_list=[(model.conv1, 8)],
    ignore_quant_ops_list=[model.fc],
)
assert len(open("ada.encodings").read())
