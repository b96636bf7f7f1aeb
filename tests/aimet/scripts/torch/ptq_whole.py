import torch
from aimet_common.defs import QuantScheme
from aimet_torch.batch_norm_fold import fold_all_batch_norms
from aimet_torch.model_preparer import prepare_model
from aimet_torch.quantsim import QuantizationSimModel

from tests.aimet.nets import Net, images

loader = images()
model = prepare_model(Net().eval())
dummy_input = torch.randn(1, 3, 12, 12)
fold_all_batch_norms(model, input_shapes=(1, 3, 12, 12))
sim = QuantizationSimModel(
    model,
    quant_scheme=QuantScheme.post_training_tf_enhanced,
    dummy_input=dummy_input,
    default_output_bw=8,
    default_param_bw=8,
)


def pass_calibration_data(sim_model, args):
    with torch.no_grad():
        for image, _ in loader:
            sim_model(image)


sim.compute_encodings(forward_pass_callback=pass_calibration_data, forward_pass_callback_args=None)
with torch.no_grad():
    error = (sim.model(dummy_input) - model(dummy_input)).abs().max()
assert 0 < error < 0.2
sim.export(path=".", filename_prefix="net", dummy_input=dummy_input.cpu())
