"""AutoQuant as in the versions of AIMET that had it."""

import os

import torch
from aimet_common.defs import QuantScheme
from aimet_torch.adaround.adaround_weight import AdaroundParameters
from aimet_torch.auto_quant import AutoQuant

from tests.aimet.nets import Net, images

model = Net().eval()
loader = images(16)
unlabelled = torch.utils.data.DataLoader(loader.dataset.tensors[0], batch_size=4)
with torch.no_grad():
    labels = torch.cat([model(x).argmax(1) for x, _ in loader])


def eval_callback(model, num_samples=None):
    with torch.no_grad():
        found = torch.cat([model(x).argmax(1) for x, _ in loader])
    return float((found == labels).float().mean())


auto_quant = AutoQuant(
    model,
    dummy_input=next(iter(unlabelled)),
    data_loader=unlabelled,
    eval_callback=eval_callback,
    param_bw=8,
    output_bw=8,
    quant_scheme=QuantScheme.post_training_tf_enhanced,
    results_dir="./autoquant",
)
sim, accuracy = auto_quant.run_inference()
assert accuracy == eval_callback(sim.model)
auto_quant.set_quant_scheme_candidates([("min_max", "min_max")])
auto_quant.set_adaround_params(AdaroundParameters(unlabelled, num_batches=2, default_num_iterations=20))
best, accuracy, encodings = auto_quant.optimize(allowed_accuracy_drop=0.1)
assert accuracy >= 0.9 and accuracy == eval_callback(best.model if hasattr(best, "model") else best)
assert os.path.isfile(encodings)
