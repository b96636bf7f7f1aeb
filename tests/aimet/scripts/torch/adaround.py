import json

from aimet_common.defs import QuantScheme
from aimet_torch import QuantizationSimModel
from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
from aimet_torch.batch_norm_fold import fold_all_batch_norms

from tests.aimet.nets import Net, images

model, loader = Net().eval(), images()
dummy_input = next(iter(loader))[0]
fold_all_batch_norms(model, tuple(dummy_input.shape))
params = AdaroundParameters(data_loader=loader, num_batches=2, default_num_iterations=20)
ada_model = Adaround.apply_adaround(
    model,
    dummy_input,
    params,
    path="./",
    filename_prefix="adaround",
    default_param_bw=4,
    ignore_quant_ops_list=[model.relu1],
    default_quant_scheme=QuantScheme.post_training_tf_enhanced,
)
with open("adaround.encodings") as file:
    encodings = json.load(file)
assert set(encodings["param_encodings"]) == {"conv1.weight", "conv2.weight", "fc.weight"}
assert encodings["param_encodings"]["conv1.weight"][0]["bitwidth"] == 4
sim = QuantizationSimModel(
    ada_model, dummy_input, quant_scheme=QuantScheme.post_training_tf_enhanced, default_param_bw=4
)
sim.set_and_freeze_param_encodings(encoding_path="./adaround.encodings")
sim.compute_encodings(lambda m, _: [m(x) for x, _ in loader], None)
quantizer = sim.model.conv1.param_quantizers["weight"]
assert quantizer.bitwidth == 4 and not quantizer.is_overwrite_allowed()
assert (quantizer(sim.model.conv1.weight) - sim.model.conv1.weight).abs().max() < 1e-5
